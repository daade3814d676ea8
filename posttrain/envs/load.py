"""Finds the user's reward or environment, and decides what counts as a turn and as a reward.

An environment is named "my.py:reward", "package.module:name", or by the short name of a built-in one. What it yields
and returns is user data and is checked here, in one place: a value that cannot be read becomes `Invalid` with a reason
that says what was expected, never a silent 0.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import pickle
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.types import Env, Invalid, Reply, Reward, Task, Turn, UserError, Verdict

BUILTIN = {
    "arithmetic": "posttrain.envs.arithmetic:reward",
    "gsm8k": "posttrain.envs.gsm8k:reward",
    "word-problems": "posttrain.envs.word_problems:reward",
    "math": "posttrain.envs.math_problems:reward",
}
EXPECTED = "expected a finite number, a dict of them, or Invalid(reason)"
PRIVATE = "_posttrain_env_"  # prefix of the names under which the user's files are imported: they shadow nothing


def load_env(spec: str | Callable[..., Any]) -> Callable[..., Any]:
    """The reward or generator function that `spec` names (a function stands for itself), as its author wrote it.

    Raises UserError, with the fix, if it cannot be found, imported or called.
    """
    if not isinstance(spec, str):
        return _checked(spec, getattr(spec, "__qualname__", repr(spec)))
    target, name = _split(spec)
    module = _import(target)
    if not hasattr(module, name):
        raise UserError(f"{target} has no {name!r}{_hint(name, _functions(module))}")
    return _checked(getattr(module, name), spec)


def load_named(spec: str) -> Any:
    """Whatever "my.py:name" or "package.module:name" names. Raises UserError, with the fix, if it cannot be found."""
    target, name = _split(spec)
    module = _import(target)
    if not hasattr(module, name):
        raise UserError(f"{target} has no {name!r}{_hint(name, [n for n in vars(module) if not n.startswith('_')])}")
    return getattr(module, name)


def load_converter(spec: str | Callable[..., Any]) -> Callable[[Task], Task] | None:
    """The `row_to_task` that stands beside the environment, for rows of a public data set; None if there is none."""
    if isinstance(spec, str):
        module: ModuleType | None = _import(_split(spec)[0])
    else:
        module = sys.modules.get(getattr(spec, "__module__", None) or "")
    return getattr(module, "row_to_task", None)


def is_generator_env(function: Callable[..., Any]) -> bool:
    """True for an environment (generator function, or object whose call is one), False for a plain reward."""
    inner = inspect.unwrap(function)
    return inspect.isgeneratorfunction(inner) or inspect.isgeneratorfunction(type(inner).__call__)


def opening(task: Task) -> Turn:
    """The only turn of a plain reward: the task's messages, or else its prompt."""
    stop = task.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if task.get("messages") is not None:
        return Turn(messages=task["messages"], stop=stop)
    if not isinstance(task.get("prompt"), str):
        raise UserError(
            f'task {task.get("id")!r} needs "prompt", a string, or "messages"; it has {", ".join(map(str, task))}'
        )
    return Turn(text=task["prompt"], stop=stop)


def lift(reward: Reward) -> Env:
    """The environment of one turn that a plain reward stands for."""

    def env(task: Task) -> Generator[Turn | str, Reply, Verdict]:
        reply = yield opening(task)
        return reward(task, reply)

    return env


def read_verdict(value: Any) -> tuple[float | Invalid, dict[str, float]]:
    """What a reward returned -> (reward, its named parts).

    Example: {"correct": 1, "format": 0.5} -> (1.5, {"correct": 1.0, "format": 0.5}). A part called "reward" is the
    reward, and is not listed again among the parts.
    """
    if isinstance(value, Invalid):
        return value, {}
    if not isinstance(value, Mapping):
        return _number(value, "returned"), {}
    if not value:
        return Invalid(f"returned an empty dict; {EXPECTED}"), {}
    parts: dict[str, float] = {}
    for name, part in value.items():
        number = _number(part, f"part {name!r} is")
        if isinstance(number, Invalid):
            return number, {}
        parts[str(name)] = number
    if "reward" in parts:
        return parts.pop("reward"), parts
    try:
        return math.fsum(parts.values()), parts  # exact: the order of the parts does not matter
    except OverflowError:
        return Invalid(f"the parts add up to infinity; {EXPECTED}"), {}


def read_turn(value: Any) -> Turn | Invalid:
    """What an environment yielded -> a turn of plain data (so that it can be sent between processes)."""
    if isinstance(value, str):
        return Turn(text=str(value))
    if not isinstance(value, Turn):
        return Invalid(f"yielded {_short(value)}; expected a Turn or a string")
    if (value.text is None) == (value.messages is None):
        return Invalid("yielded a Turn that needs one of text and messages")
    if value.text is not None and not isinstance(value.text, str):
        return Invalid(f"yielded a Turn whose text is {_short(value.text)}; expected a string")
    if isinstance(value.stop, str) or not all(isinstance(stop, str) for stop in value.stop):
        return Invalid(f"yielded a Turn whose stop is {_short(value.stop)}; expected a tuple of strings")
    messages = None if value.messages is None else [dict(message) for message in value.messages]
    if not all(isinstance(part, str) for message in messages or () for pair in message.items() for part in pair):
        return Invalid("yielded a Turn whose messages hold something other than strings")
    if value.max_tokens is not None and (not isinstance(value.max_tokens, int) or value.max_tokens < 1):
        return Invalid(f"yielded a Turn whose max_tokens is {_short(value.max_tokens)}; expected a positive integer")
    reward = _number(value.reward, "yielded a Turn whose reward is")
    if isinstance(reward, Invalid):
        return reward
    text = None if value.text is None else str(value.text)
    return Turn(text, messages, tuple(map(str, value.stop)), reward, value.max_tokens)


def describe_error(error: BaseException, file: str | None) -> str:
    """One line: type, message, and the innermost line in `file` (any file if it is not on the stack).

    Example: "ValueError: bad thing (my.py:12)".
    """
    if isinstance(error, SyntaxError) and error.lineno is not None:
        message, at = error.msg, f" ({Path(error.filename or '?').name}:{error.lineno})"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        inner = [frame for frame in frames if frame.filename == file] or frames
        message, at = str(error), f" ({Path(inner[-1].filename).name}:{inner[-1].lineno})" if inner else ""
    message = " ".join(message.split())
    message = message if len(message) <= 300 else message[:300] + "..."
    return type(error).__name__ + (f": {message}" if message else "") + at


def source_file(function: Callable[..., Any]) -> str | None:
    """The file that a function was written in, as it stands in tracebacks."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return getattr(code, "co_filename", None)


def pack_env(env: str | Callable[..., Any]) -> str | bytes:
    """`env` in a form that another process can load: its name where it has one, else the function itself.

    Lambdas, closures and what `__main__` or a notebook defines travel by value.
    """
    if isinstance(env, str):
        return env
    module = sys.modules.get(getattr(env, "__module__", None) or "")
    name = getattr(env, "__qualname__", "")
    named = module is not None and name.isidentifier() and getattr(module, name, None) is env
    if module is not None and module.__name__.startswith(PRIVATE) and named:
        return f"{module.__file__}:{name}"
    importable = module is not None and module.__name__ != "__main__" and _importable(module.__name__)
    if module is not None and importable and named:
        return f"{module.__name__}:{name}"
    import cloudpickle

    by_value = module is not None and module.__name__ != "__main__" and not importable
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        packed: bytes = cloudpickle.dumps(env)
        return packed
    except Exception as error:  # whatever the objects it refers to raise
        reason = describe_error(error, None)
        raise UserError(
            f"{name} cannot be sent to a worker: {reason}; move it to a file or set workers to 0"
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def unpack_env(packed: str | bytes) -> Callable[..., Any]:
    """The other end of `pack_env`. Raises UserError as `load_env` does."""
    return load_env(packed if isinstance(packed, str) else pickle.loads(packed))


def _split(spec: str) -> tuple[str, str]:
    """ "my.py:reward" -> ("my.py", "reward"); a short name is looked up first."""
    target, _, name = BUILTIN.get(spec, spec).rpartition(":")
    if target and name:
        return target, name
    if spec.rstrip(":").endswith(".py"):
        raise UserError(f"{spec} does not say which function: write {spec.rstrip(':')}:reward")
    raise UserError(
        f"there is no built-in environment {spec!r}{_hint(spec, sorted(BUILTIN))}; one of your own is my.py:reward"
    )


def _import(target: str) -> ModuleType:
    return _import_file(Path(target)) if target.endswith(".py") or "/" in target else _import_module(target)


def _import_module(target: str) -> ModuleType:
    _put_on_path(Path.cwd())
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{target}.".startswith(f"{error.name}."):
            raise UserError(f"there is no module {target!r} here or among the installed packages") from error
        raise UserError(f"{target} does not import: {describe_error(error, None)}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{target} does not import: {describe_error(error, None)}") from error


def _import_file(path: Path) -> ModuleType:
    """The module of a file, imported once for each content (its name is made of place and time of change)."""
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise UserError(f"there is no file {path}{_hint(path.name, near)}")
    path = path.resolve()
    stamp = hashlib.sha256(f"{path} {path.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    name = f"{PRIVATE}{path.stem}_{stamp}"
    if name in sys.modules:
        return sys.modules[name]
    _put_on_path(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script may well call exit()
        del sys.modules[name]
        raise UserError(f"{path.name} does not import: {describe_error(error, str(path))}") from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _put_on_path(folder: Path) -> None:
    """First, as when Python runs a script of that folder, so that its neighbours are found."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _importable(name: str) -> bool:
    """Whether another process finds the module: being in `sys.modules` here proves nothing."""
    top = name.partition(".")[0]
    return any(finder.find_spec(top, None) is not None for finder in sys.meta_path)


def _checked(function: object, label: str) -> Callable[..., Any]:
    if not callable(function):
        raise UserError(f"{label} is {_short(function)}, not a function")
    if inspect.isclass(function):
        raise UserError(f"{label} is a class: name a function, or an instance that can be called")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(f"{label} is async: write it with plain def, each call has a worker process to itself")
    kind, given = ("an environment", ("task",)) if is_generator_env(function) else ("a reward", ("task", "reply"))
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function may not tell
        return function
    try:
        signature.bind(*given)
    except TypeError as error:
        raise UserError(f"{label} takes {signature}, but {kind} is called with ({', '.join(given)})") from error
    return function


def _functions(module: ModuleType) -> list[str]:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(name for name in own if callable(getattr(module, name)) and not name.startswith("_"))


def _hint(wrong: str, known: list[str]) -> str:
    """ "; did you mean ...? (there are: ...)", as far as there is anything to say."""
    import difflib

    if not known:
        return ""
    close = difflib.get_close_matches(wrong, known, n=1)
    listed = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return (f"; did you mean {close[0]!r}?" if close else "") + f" (there are: {listed})"


def _number(value: Any, said: str) -> float | Invalid:
    if value is None:
        return Invalid(f"{said} None (is a return missing?); {EXPECTED}")
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return Invalid(f"{said} {_short(value)}; {EXPECTED}")
    try:
        number = float(value)
    except Exception:  # arrays of many elements, integers beyond float, whatever the user's type does
        return Invalid(f"{said} {_short(value)}; {EXPECTED}")
    return number if math.isfinite(number) else Invalid(f"{said} {number}; {EXPECTED}")


def _short(value: Any) -> str:
    try:
        shown = " ".join(repr(value).split())
    except Exception:  # the user's __repr__
        shown = "?"
    return f"{shown if len(shown) <= 60 else shown[:60] + '...'} ({type(value).__name__})"
