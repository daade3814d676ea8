"""The code in the jail beside the program: it runs code, calls functions that the code defined, and answers in plain
data.

Nothing here is trusted once the program has begun, since it shares this interpreter and may change all of it. The worst
possible answer is a wrong value: verdicts are decided outside, and the expected values are never sent here.

    {"do": "run", "code": ...}        define the program's names             -> {"value": null}
    {"do": "cell", "code": ...}       as at a prompt: shows the last value   -> {"value": null}
    {"do": "value", "source": ...}    an expression of the program's names   -> {"value": form}
    {"do": "names", "names": [...]}   its globals with these names           -> {"value": {"dict": ...}}
    {"do": "call", "of": form, "args": [...], "kwargs": [[name, form], ...]} -> {"value": form, "args": [...] if changed}
    {"do": "get" | "set" | "item" | "put" | "next" | "iter" | "len" | "str" | "repr", "of": form, ...}
    {"do": "examine", ...}            from here on this process runs tests instead of a program: see `examiner`

An exception is answered with {"raised": [type, text, traceback]}. To call a function that came with the arguments, the
guest sends a request itself: {"callback": number, "args": [...], "kwargs": [...]}. The caller answers in the same form.
"""

from __future__ import annotations

import ast
import importlib
import linecache
import os
import random
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from posttrain.sandbox.examiner import Examiner, exception
from posttrain.sandbox.json_messages import receive, send
from posttrain.sandbox.plain_values import NAMED, decode, encode

LONGEST_REQUEST = 64 << 20
LONGEST_TEXT = 2000  # characters of an exception's message
FILE = "<program>"
OPERATIONS: dict[str, Callable[[Any], Any]] = {"next": next, "len": len, "str": str, "repr": repr}


def serve(descriptor: int, folder: str) -> NoReturn:
    """Answer until the caller disconnects."""
    os.environ.clear()
    os.environ.update({"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PATH": ""})
    tempfile.tempdir = None
    random.seed(0)  # equal programs have equal results
    sys.argv[:] = ["program"]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    guest = Guest(descriptor)
    while True:
        try:
            request = receive(descriptor, LONGEST_REQUEST)
        except (EOFError, OSError):
            os._exit(0)
        guest.answer(request)


class CallerRaised(Exception):
    """A function of the caller raised an exception that is not defined in this interpreter."""


class Guest:
    """The program's interpreter, as it appears from outside."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._module = types.ModuleType("__program__")
        self._objects: list[Any] = []  # the objects of references
        self._numbers: dict[int, int] = {}  # id of an object -> its index in `_objects`

    def answer(self, request: dict[str, Any]) -> None:
        try:
            asked = request["do"]
            if asked in OPERATIONS:
                answer = {"value": self._form(OPERATIONS[asked](self._value(request["of"])))}
            else:
                answer = getattr(self, f"_do_{asked}")(request)
        except BaseException as error:
            answer = {"raised": described(error)}
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):  # the program closed or replaced it
                stream.flush()
        send(self._descriptor, answer)

    # -- code ----------------------------------------------------------------------------------------------------------

    def _do_run(self, request: dict[str, Any]) -> dict[str, Any]:
        self._named(request)
        exec(compile(request["code"], FILE, "exec", dont_inherit=True), vars(self._module))
        return {"value": None}

    def _do_cell(self, request: dict[str, Any]) -> dict[str, Any]:
        self._named(request)
        tree = ast.parse(request["code"], FILE)
        linecache.cache[FILE] = (0, None, request["code"].splitlines(keepends=True), FILE)  # for tracebacks
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, FILE, "exec", dont_inherit=True), vars(self._module))
        if last is not None:
            shown = compile(ast.Expression(last.value), FILE, "eval", dont_inherit=True)
            sys.displayhook(eval(shown, vars(self._module)))
        return {"value": None}

    def _named(self, request: dict[str, Any]) -> None:
        """Register the module under its name, for libraries that look it up, such as dataclasses and pickle."""
        self._module.__name__ = name = request.get("name", "__program__")
        sys.modules[name] = self._module

    def _do_value(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"value": self._form(eval(request["source"], vars(self._module)))}

    def _do_names(self, request: dict[str, Any]) -> dict[str, Any]:
        known = vars(self._module)
        return {"value": self._form({name: known[name] for name in request["names"] if name in known})}

    def _do_examine(self, request: dict[str, Any]) -> NoReturn:
        Examiner(self._descriptor).serve(request)

    # -- objects -------------------------------------------------------------------------------------------------------

    def _do_call(self, request: dict[str, Any]) -> dict[str, Any]:
        function = self._value(request["of"])
        forms = request["args"]
        args = [self._value(form) for form in forms]
        kwargs = {name: self._value(form) for name, form in request["kwargs"]}
        answer: dict[str, Any] = {"value": self._form(function(*args, **kwargs))}
        after = [self._form(value) for value in args]
        return {**answer, "args": after} if after != forms else answer

    def _do_get(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"value": self._form(getattr(self._value(request["of"]), request["name"]))}

    def _do_set(self, request: dict[str, Any]) -> dict[str, Any]:
        setattr(self._value(request["of"]), request["name"], self._value(request["to"]))
        return {"value": None}

    def _do_item(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"value": self._form(self._value(request["of"])[self._value(request["key"])])}

    def _do_put(self, request: dict[str, Any]) -> dict[str, Any]:
        self._value(request["of"])[self._value(request["key"])] = self._value(request["to"])
        return {"value": None}

    def _do_iter(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"value": self._reference(iter(self._value(request["of"])))}

    # -- forms ---------------------------------------------------------------------------------------------------------

    def _form(self, value: Any) -> Any:
        return encode(value, self._reference)

    def _value(self, form: Any) -> Any:
        return decode(form, self._resolved)

    def _reference(self, value: Any) -> Any:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)  # keeps the object alive, so that no other object gets its id
        return {"ref": number}

    def _resolved(self, kind: str, content: Any) -> Any:
        if kind == "ref":
            return self._objects[content]
        if kind == "callback":
            return self._callback(content)
        module, _, name = content.rpartition(".")
        assert module in NAMED
        return getattr(importlib.import_module(module), name)

    def _callback(self, number: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            forms = [self._form(value) for value in args]
            named = [[name, self._form(value)] for name, value in kwargs.items()]
            send(self._descriptor, {"callback": number, "args": forms, "kwargs": named})
            while "do" in (answer := receive(self._descriptor, LONGEST_REQUEST)):
                self.answer(answer)  # the called function may call back in turn
            if "raised" in answer:
                raise exception(answer["raised"], CallerRaised)
            return self._value(answer["value"])

        return call


def described(error: BaseException) -> list[str]:
    """Return [type, text, traceback] of a program's exception; the traceback has only the program's lines."""
    try:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == FILE]
        told = ["Traceback (most recent call last):\n", *traceback.format_list(own)] if own else []
        told += traceback.format_exception_only(error)
        return [type(error).__name__, str(error)[:LONGEST_TEXT], "".join(told)[-2 * LONGEST_TEXT :]]
    except BaseException:  # from its own __str__, or because no memory is left
        return [type(error).__name__, "", ""]
