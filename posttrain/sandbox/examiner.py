"""Plays tests in a jail of their own, beside which the program runs in another: tests of any form, and nothing shared.

Test code is the user's and is trusted; the program is not, and never shares an interpreter with it. A name that the tests do
not define themselves stands for the program's object. Calling it sends the arguments over, and brings the result back as
plain data, rebuilt here from Python's own types. So what a test compares has no methods of the program's, and what it
compares with never leaves this jail.

An object of the program's that is no plain data is a `RemoteObject`. It may be called, indexed and iterated over, its
attributes may be read and set, it has a length and a text. Whether it is equal, true, or less, it may not say: a test
that asks the program for a verdict fails. A function of the tests' that is passed as an argument can be called by the
program, no more.

What the program raises is raised here too, so that a test may expect it. Python itself takes some exceptions for signals:
`map` ends at StopIteration, iteration by `__getitem__` at IndexError, and `hasattr` says no at AttributeError. No program
may end a test's loop by them. StopIteration and StopAsyncIteration come as `ProgramRaised`, unless the test asks an iterator
of the program's for its next value. Any other exception of a function has to be caught by the tests' own code (`except`,
`with`): if Python's machinery has taken it for a sign, the test has failed.

    host -> examiner   {"do": "examine", "setup": ..., "names": [...]}, then for each test {"do": "test", "source": ...}
    examiner -> host   {"verdict": "passed" | "failed" | "broken", "why": ...}; before it, perhaps several times,
                       {"ask": a request to the program}, to which the program's answer comes back
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
LONGEST_WHY = 300  # characters
MOST_REFERENCES = 1 << 31
TESTS = "<test>"  # the file of the tests' code
SIGNALS: dict[str, tuple[type[Exception], ...]] = {
    "next": (StopIteration,),
    "get": (AttributeError,),
    "item": (IndexError, KeyError),
    "len": (TypeError,),
}
"""Operation on an object of the program's -> exceptions that count as its result."""
LOOP_ENDS = (StopIteration, StopAsyncIteration)
MOST_RAISED = 1000  # exceptions that are held at once, each with its traceback


class Unfit(TypeError):
    """The test does something that no test can do here."""


class ProgramRaised(Exception):
    """The program raised an exception that Python itself does not have, or one that ends a loop."""


def exception(raised: Iterable[Any], other: type[Exception]) -> Exception:
    """Return the exception for [type, text, ...]: one of Python's own, or `other`. Never one that ends a process."""
    name, text, *_ = raised
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # it wants more than a text
            return other(f"{name}: {text}")
    return other(f"{name}: {text}")


class Examiner:
    """The tests' side of the exchange with the program."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._namespace: dict[str, Any] = {"__name__": "__tests__"}
        self._names: list[str] = []  # that stand for the program's
        self._asked = False  # whether the program has done anything yet
        self._remotes: dict[int, RemoteObject] = {}
        self._exported: list[Callable[..., Any]] = []
        self._raised: list[Exception] = []  # by the program's functions, during this test

    def serve(self, request: dict[str, Any]) -> NoReturn:
        """Run this request, and answer further ones until the host is gone."""
        while True:
            source = request["setup"] if request["do"] == "examine" else request["source"]
            send(self._descriptor, self._played(source, request.get("names", [])))
            try:
                request = receive(self._descriptor, LONGEST_ANSWER)
            except (EOFError, OSError):
                os._exit(0)

    def _played(self, source: str, names: list[str]) -> dict[str, str]:
        """Run test code and return its verdict. A failure is the code's own fault where the program cannot have caused
        it.
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
        self._asked = False  # what a name stands for, and no more, is known of it

    # -- asking the program --------------------------------------------------------------------------------------------

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the program's answer. Raises its exception."""
        self._asked = True
        send(self._descriptor, {"ask": request})
        while "callback" in (answer := receive(self._descriptor, LONGEST_ANSWER)):
            send(self._descriptor, {"ask": self._called_back(answer)})
        if "raised" in answer:
            raise self._raising(answer["raised"], SIGNALS.get(request["do"], ()))
        return answer

    def _raising(self, raised: Iterable[Any], answers: tuple[type[Exception], ...]) -> Exception:
        """Return the exception to raise for one of the program's. `answers`: kinds that count as an answer to the
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
            raise error  # a traceback from the beginning: Python 3.11 notes it only where an exception is caught
        except Exception:
            return error

    def value(self, request: dict[str, Any]) -> Any:
        return decode(self.ask(request)["value"], self._resolved)

    def call(self, of: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one of its functions. What the function changed in its arguments is changed here too."""
        named_forms = [[name, self.form(value)] for name, value in kwargs.items()]
        answer = self.ask({"do": "call", "of": of, "args": [self.form(value) for value in args], "kwargs": named_forms})
        after = answer.get("args", [])
        if isinstance(after, list) and len(after) == len(args):
            for value, form in zip(args, after, strict=True):
                change(value, decode(form, self._resolved))
        return decode(answer["value"], self._resolved)

    def _called_back(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the tests' for the program, and return the result in the form of the program's own."""
        try:
            function = self._resolved("callback", request["callback"])
            args = [decode(form, self._resolved) for form in request["args"]]
            kwargs = {name: decode(form, self._resolved) for name, form in request["kwargs"]}
            return {"value": self.form(function(*args, **kwargs))}
        except Exception as error:  # it was called with what the program chose
            error.__traceback__ = None  # the program is told
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
            raise NotPlain("a reference that is none")
        if kind == "ref":
            return self._remotes.setdefault(content, RemoteObject(self, content))
        return self._exported[content]


class RemoteObject:
    """Proxy of an object of the program's."""

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
    """Make a value equal to another in place, as far as that can be: lists, sets and dicts keep what they are."""
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
    """Whether code of the tests has caught what the program raised, rather than something of Python's own.

    A traceback grows by each frame through which its exception passes. Where the exception ends, in the outermost of them,
    there is a handler if that frame's code has caught it. Without a traceback somebody took it away who had caught it, as
    unittest's `assertRaises` does.
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
