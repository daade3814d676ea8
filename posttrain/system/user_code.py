"""Loads the user's code, "my.py:name" or "package.module:name", and locates errors in it."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.core import user_files
from posttrain.core.messages import inline, message_of, near_or_all
from posttrain.core.types import UserError

_PREFIXED = re.compile(r"([A-Za-z]{2,}:)[^:]+\.py")  # one letter and a colon are a drive

PRIVATE = "_posttrain_user_"  # prefix of the module names of the user's files, which therefore shadow no other module


def load_named(spec: str) -> Any:
    """Load the object that "my.py:name" or "package.module:name" names. Raises UserError, with the fix, if it cannot be
    found.
    """
    target, name = split_name(spec)
    module = import_target(target)
    return named_in(module, name, target, [n for n in vars(module) if not n.startswith("_")])


def named_in(module: ModuleType, name: str, target: str, known: list[str]) -> Any:
    """Return the object with that name in a module. Raises UserError with similar names from `known`."""
    try:
        return getattr(module, name)
    except AttributeError:
        raise UserError(f"{target} has no {name!r}{near_or_all(name, known)}") from None
    except (Exception, SystemExit) as error:  # a module may have a __getattr__ of its own
        raise UserError(f"{target} does not give its {name!r}: {describe_error(error, None)}") from error


def describe_error(error: BaseException, file: str | None) -> str:
    """Describe an error in one line: type, message, and the innermost line in `file` (in any file if `file` is not on
    the stack).

    Example: "ValueError: bad thing (my.py:12)".
    """
    if isinstance(error, SyntaxError) and error.lineno is not None:
        message, at = error.msg, f" ({Path(error.filename or '?').name}:{error.lineno})"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        inner = [frame for frame in frames if frame.filename == file] or frames
        message, at = message_of(error), f" ({Path(inner[-1].filename).name}:{inner[-1].lineno})" if inner else ""
    message = inline(message)
    return type(error).__name__ + (f": {message}" if message else "") + at


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without decorators and bound arguments; the function itself if decorators form a circle."""
    try:
        while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
            function = function.func if isinstance(function, functools.partial) else inspect.unwrap(function)
    except ValueError:
        pass
    return function


def source_file(function: Callable[..., Any]) -> str | None:
    """Return the file of a function, as tracebacks show it."""
    inner = unwrapped(getattr(function, "stands_for", function))
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return getattr(code, "co_filename", None)


def is_of_kind(function: Callable[..., Any], kind: Callable[[object], bool]) -> bool:
    """Return whether a function or an object's `__call__`, without its decorators, is of a kind, such as
    `inspect.iscoroutinefunction`.
    """
    inner = unwrapped(function)
    return kind(inner) or kind(type(inner).__call__)


def required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names of the parameters that need a value."""
    further = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, p in parameters.items() if p.default is p.empty and p.kind not in further]


def takes_any_name(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether one of the parameters is `**kwargs`."""
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def split_name(spec: str, prefix: str = "", usual: str = "reward") -> tuple[str, str]:
    """Split "my.py:reward" into ("my.py", "reward"). Raises UserError for anything else.

    `prefix`: what precedes the name in the user's option; `usual`: the name of a function in an example.
    """
    target, _, name = spec.rpartition(":")
    if target and name:
        return target, name
    if spec.rstrip(":").endswith(".py"):
        file = spec.rstrip(":")
        if prefix and not os.path.isfile(file):
            raise UserError(f"there is no file {file}: write {prefix}FILE.py:{usual}")
        known = _defined(Path(file)) or [usual]
        names = " or ".join(f"{prefix}{file}:{name}" for name in known[:5])
        raise UserError(f"{prefix}{spec} names no function: write {names}")
    raise UserError(f"{spec!r} has no file or module: write my.py:{spec} or package.module:{spec}")


def _defined(file: Path) -> list[str]:
    """Return the functions and classes that a file defines, without running it; [] if it cannot be read."""
    try:
        found = ast.parse(user_files.content(file)).body
    except (OSError, ValueError, SyntaxError, RecursionError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [part.name for part in found if isinstance(part, kinds) and not part.name.startswith("_")]


def import_target(target: str) -> ModuleType:
    return _import_file(Path(target)) if target.endswith(".py") or "/" in target else _import_module(target)


def _import_module(target: str) -> ModuleType:
    _put_on_path(Path.cwd())
    try:
        return importlib.import_module(target)
    except UserError as error:  # its message has the fix
        raise UserError(f"{target}: {error}") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{target}.".startswith(f"{error.name}."):
            raise UserError(f"there is no module {target!r} in this folder or among the installed packages") from error
        raise UserError(f"{target} does not import: {describe_error(error, None)}") from error


def require_file(path: Path) -> None:
    """Raise UserError if there is no such file of code."""
    if not os.path.isfile(path):  # also for a name that is too long for the system
        if (found := _PREFIXED.match(str(path))) is not None:
            raise UserError(
                f"there is no prefix {found[1]!r}: a function of (task, reply) is {path.name.removeprefix(found[1])}:NAME, "
                "one for TRL trl:FILE.py:NAME, and one for verl verl:FILE.py:NAME"
            )
        near = sorted(p.name for p in path.parent.glob("*.py")) if os.path.isdir(path.parent) else []
        raise UserError(f"there is no file {path}{near_or_all(path.name, near)}")


def _import_file(path: Path) -> ModuleType:
    """Return the module of a file, imported once per version (its name is a hash of path and modification time)."""
    require_file(path)
    given, path = path, path.resolve()
    stamp = hashlib.sha256(os.fsencode(path) + str(path.stat().st_mtime_ns).encode()).hexdigest()[:12]
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
    except BaseException as error:  # a script may call exit(), or raise an object that is not an Exception
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error, UserError):
            raise UserError(f"{given}: {error}") from error
        raise UserError(f"{given} does not import: {describe_error(error, str(path))}") from error
    return module


def _put_on_path(folder: Path) -> None:
    """Put a folder first on the module path, as Python does for a script in it, so that its other modules are found."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def importable(name: str) -> bool:
    """Return whether another process can import the module: its presence in `sys.modules` does not show that."""
    top = name.partition(".")[0]
    return any(finder.find_spec(top, None) is not None for finder in sys.meta_path)
