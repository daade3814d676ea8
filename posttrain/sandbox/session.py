"""A Python interpreter as a tool, which keeps its definitions from one call to the next."""

from __future__ import annotations

import os

from posttrain.sandbox.limits import ProgramLimits
from posttrain.sandbox.program import Ended, Program
from posttrain.sandbox.shared_sandbox import STEP, shared

SECONDS = 5.0  # wall time of a call
SHARE = 0.5  # share of an environment's step that a call may take at most
LIMITS = ProgramLimits(cpu=60, life=3600.0)  # for all calls together
SHOWN = 2000  # most characters of a call's output; longer output is shortened in the middle


class InterpreterSession:
    """The interpreter of one episode. It starts with the first call, and with the next after one that ended it."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = min(seconds, SHARE * float(os.environ.get(STEP, "inf")))
        self._program: Program | None = None

    def run(self, code: str) -> str:
        """Run code as at a prompt. Return its output, the value of its last line, and its exception; "" if there are
        none.

        Raises SandboxError.
        """
        if self._program is None:
            self._program = shared().start(LIMITS, output=True)
        program, after = self._program, ""
        try:
            answer = program.asked({"do": "cell", "code": code, "name": "__main__"}, self._seconds)
            if "raised" in answer:
                after = answer["raised"][2] or answer["raised"][0]
        except Ended as error:
            after = f"The interpreter {error}. What it knew is lost.\n"
            self.close()
        printed = program.printed.decode("utf-8", "replace")
        program.printed.clear()
        return (cut(printed, SHOWN) + cut(after, SHOWN)).encode("utf-8", "replace").decode()

    def close(self) -> None:
        """End the interpreter. May be called twice."""
        if self._program is not None:
            self._program.close()
            self._program = None


def cut(text: str, most: int) -> str:
    """Return the text, shortened to its beginning and end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters ...\n{text[-half:]}"
