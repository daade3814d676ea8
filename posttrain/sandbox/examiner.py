"""Runs tests in one jail while the program runs in another: any form of test is possible, and nothing is shared.

Test code is the user's and is trusted; the program is not, and never shares an interpreter with it. A name that the
tests do not define refers to the program's object. A call of it sends the arguments to the program, and returns the
result as plain data, rebuilt here from Python's own types. So no value that a test compares has methods of the program,
and the expected values never leave this jail.

An object of the program that is not plain data becomes a `RemoteObject`. It may be called, indexed and iterated over,
its attributes may be read and set, and it has a length and a text. It does not decide whether it is equal, true, or
less: a test that asks the program for such a verdict fails. A function of the tests that is passed as an argument can
be called by the program, and used for nothing else.

An exception of the program is raised here too, so that a test may expect it. Python itself treats some exceptions as
signals: `map` ends at StopIteration, iteration by `__getitem__` at IndexError, and `hasattr` is false at
AttributeError. No program may end a test's loop with these. StopIteration and StopAsyncIteration are raised as
`ProgramRaised`, unless the test requested the next value of an iterator of the program. Any other exception of a
function must be caught by the tests' own code (`except`, `with`): if Python itself consumed it as a signal, the test
has failed.

    host -> examiner   {"do": "examine", "setup": ..., "names": [...]}, then for each test {"do": "test", "source": ...}
    examiner -> host   {"verdict": "passed" | "failed" | "broken", "why": ...}; before it, perhaps several times,
                       {"ask": a request to the program}, which is answered with the program's answer
"""

from __future__ import annotations

import builtins
import dis
import os
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from posttrain.sandbox.json_messages import receive, send
from posttrain.sandbox.plain_values import NotPlain, decode, encode, named

LONGEST_ANSWER = 64 << 20
LONGEST_WHY = 300  # most characters of a reason
MOST_REFERENCES = 1 << 31
TESTS = "<test>"  # the file name of the tests' code in tracebacks
SIGNALS: dict[str, tuple[type[Exception], ...]] = {
    "next": (StopIteration,),
    "get": (AttributeError,),
    "item": (IndexError, KeyError),
    "len": (TypeError,),
}
"""Operation on an object of the program -> exceptions that count as its result."""
LOOP_ENDS = (StopIteration, StopAsyncIteration)
MOST_RAISED = 1000  # most exceptions kept at once, each with its traceback


class Unfit(TypeError):
    """The test does something that is not supported here."""


class ProgramRaised(Exception):
    """The program raised an exception that is not one of Python's own, or one that ends loops."""


def exception(raised: Iterable[Any], other: type[Exception]) -> Exception:
    """Return the exception for [type, text, ...]: one of Python's own, or `other`. Never one that ends a process."""
    name, text, *_ = raised
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # it needs more arguments than a text
            return other(f"{name}: {text}")
    return other(f"{name}: {text}")


class Examiner:
    """The tests' side of the exchange with the program."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._namespace: dict[str, Any] = {"__name__": "__tests__"}
        self._names: list[str] = []  # names that refer to the program's objects
        self._asked = False  # whether the program has influenced the current test
        self._remotes: dict[int, RemoteObject] = {}
        self._exported: list[Callable[..., Any]] = []
        self._raised: list[Exception] = []  # raised by the program's functions during this test

    def serve(self, request: dict[str, Any]) -> NoReturn:
        """Run this request and answer further ones until the host has closed the connection."""
        while True:
            source = request["setup"] if request["do"] == "examine" else request["source"]
            send(self._descriptor, self._played(source, request.get("names", [])))
            try:
                request = receive(self._descriptor, LONGEST_ANSWER)
            except (EOFError, OSError):
                os._exit(0)

    def _played(self, source: str, names: list[str]) -> dict[str, str]:
        """Run test code and return its verdict. The verdict is "broken", the test's own fault, if the program cannot
        have caused the failure.
        """
        self._raised = []
        try:
            if names:
                self._names = names
                self._bind(names)
            exec(compile(source, TESTS, "exec", dont_inherit=True), self._namespace)
            if uncaught := [error for error in self._raised if not was_caught(error)]:
                raise ProgramRaised(f"{_text(uncaught[0])}, which no code of the test caught")
        except BaseException as error:
            own = not self._asked and (not self._names or isinstance(error, Unfit | ImportError))
            return {"verdict": "broken" if own else "failed", "why": _text(error)}
        return {"verdict": "passed", "why": ""}

    def _bind(self, names: list[str]) -> None:
        found = self.value({"do": "names", "names": names})
        for name, value in found.items() if isinstance(found, dict) else ():
            if name in names:
                self._namespace[name] = value
        self._asked = False  # so far the objects of the names were only looked up

    # -- asking the program --------------------------------------------------------------------------------------------

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the program's answer, or raise its exception."""
        self._asked = True
        send(self._descriptor, {"ask": request})
        while "callback" in (answer := receive(self._descriptor, LONGEST_ANSWER)):
            send(self._descriptor, {"ask": self._called_back(answer)})
        if "raised" in answer:
            raise self._raising(answer["raised"], SIGNALS.get(request["do"], ()))
        return answer

    def _raising(self, raised: Iterable[Any], answers: tuple[type[Exception], ...]) -> Exception:
        """Return the exception to raise for an exception of the program. `answers`: kinds that are an answer to the
        test's question.
        """
        error = exception(raised, ProgramRaised)
        if isinstance(error, answers):
            return error
        if isinstance(error, LOOP_ENDS):
            error = ProgramRaised(_text(error))
        if len(self._raised) >= MOST_RAISED:
            self._raised = [error for error in self._raised if not was_caught(error)]
        self._raised.append(error)
        try:
            raise error  # the traceback must begin here: Python 3.11 records it only where an exception is caught
        except Exception:
            return error

    def value(self, request: dict[str, Any]) -> Any:
        return decode(self.ask(request)["value"], self._resolved)

    def call(self, of: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the program. Changes that it made to its arguments are repeated on the arguments here."""
        named_forms = [[name, self.form(value)] for name, value in kwargs.items()]
        answer = self.ask({"do": "call", "of": of, "args": [self.form(value) for value in args], "kwargs": named_forms})
        after = answer.get("args", [])
        if isinstance(after, list) and len(after) == len(args):
            for value, form in zip(args, after, strict=True):
                change(value, decode(form, self._resolved))
        return decode(answer["value"], self._resolved)

    def _called_back(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the tests for the program, and return the result in the form of the program's own
        results.
        """
        try:
            function = self._resolved("callback", request["callback"])
            args = [decode(form, self._resolved) for form in request["args"]]
            kwargs = {name: decode(form, self._resolved) for name, form in request["kwargs"]}
            return {"value": self.form(function(*args, **kwargs))}
        except Exception as error:  # the program chose the arguments
            error.__traceback__ = None  # the exception is passed to the program
            return {"raised": [type(error).__name__, _text(error), ""]}

    # -- forms ---------------------------------------------------------------------------------------------------------

    def form(self, value: Any) -> Any:
        try:
            return encode(value, self._refer)
        except NotPlain as error:
            raise Unfit(f"gives the program {error}") from None

    def _refer(self, value: Any) -> Any:
        if type(value) is RemoteObject:
            return {"ref": object.__getattribute__(value, "_number")}
        if (name := named(value)) is not None:
            return {"name": name}
        if isinstance(value, types.FunctionType | types.MethodType):
            self._exported.append(value)
            return {"callback": len(self._exported) - 1}
        raise Unfit(f"gives the program a {type(value).__name__}, which is neither plain data nor a function")

    def _resolved(self, kind: str, content: Any) -> Any:
        known = len(self._exported) if kind == "callback" else 0 if kind == "name" else MOST_REFERENCES
        if type(content) is not int or not 0 <= content < known:
            raise NotPlain("an invalid reference")
        if kind == "ref":
            return self._remotes.setdefault(content, RemoteObject(self, content))
        return self._exported[content]


class RemoteObject:
    """Proxy of an object of the program."""

    __slots__ = ("_examiner", "_number")

    def __init__(self, examiner: Examiner, number: int) -> None:
        object.__setattr__(self, "_examiner", examiner)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._examiner.call({"ref": self._number}, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._asked("get", name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._asked("set", name=name, to=self._examiner.form(value))

    def __getitem__(self, key: Any) -> Any:
        return self._asked("item", key=self._examiner.form(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._asked("put", key=self._examiner.form(key), to=self._examiner.form(value))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._asked("iter")
        while True:
            try:
                item = iterator._asked("next")
            except StopIteration:
                return
            yield item

    def __next__(self) -> Any:
        return self._asked("next")

    def __len__(self) -> int:
        return _exactly(int, self._asked("len"))

    def __str__(self) -> str:
        return _exactly(str, self._asked("str"))

    def __repr__(self) -> str:
        return _exactly(str, self._asked("repr"))

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __bool__(self) -> bool:
        raise TypeError("whether an object of the program's is true is not for it to say")

    def _asked(self, what: str, **more: Any) -> Any:
        return self._examiner.value({"do": what, "of": {"ref": self._number}, **more})


def change(value: Any, other: Any) -> None:
    """Make a value equal to another in place where possible: lists, sets and dicts keep their identity."""
    if type(value) is not type(other):
        return
    if isinstance(value, list):
        for mine, theirs in zip(value, other, strict=False):
            change(mine, theirs)
        value[:] = [mine if mine == theirs else theirs for mine, theirs in zip(value, other, strict=False)] + other[
            len(value) :
        ]
    elif isinstance(value, dict):
        for key in value.keys() & other.keys():
            change(value[key], other[key])
        kept = {key: value[key] if key in value and value[key] == theirs else theirs for key, theirs in other.items()}
        value.clear()
        value.update(kept)
    elif isinstance(value, set):
        value.clear()
        value.update(other)
    elif isinstance(value, bytearray):
        value[:] = other
    elif isinstance(value, tuple):
        for mine, theirs in zip(value, other, strict=False):
            change(mine, theirs)


def was_caught(error: Exception) -> bool:
    """Return whether code of the tests caught an exception of the program, instead of Python itself.

    A traceback grows by each frame through which its exception passes. In the outermost of these frames, where the
    exception ended, the frame's code has a handler if it caught the exception. A missing traceback was removed by code
    that caught the exception, such as unittest's `assertRaises`.
    """
    end = error.__traceback__
    if end is None:
        return True
    code = end.tb_frame.f_code
    bytecode: Any = dis.Bytecode(code)
    handled = any(entry.start <= end.tb_lasti < entry.end for entry in bytecode.exception_entries)
    return handled and code.co_filename == TESTS


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"the program gave a {type(value).__name__}")
    return value


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST_WHY]
