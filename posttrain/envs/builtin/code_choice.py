"""The policy writes several programs for a task, each without seeing the others, and then chooses one to submit.

    posttrain check --env code-choice --tasks code/mbpp.jsonl
    posttrain check --env code-choice,candidates=8,outcomes=false --tasks code/mbpp.jsonl

Rows are those of the environment `code`. The reward is 1 if the chosen program passes all hidden tests, else 0; a
choice that names none of them submits nothing. Further parts are the rewards of other choosers with the same programs:
"random", the mean of all; "filtered", the first that passes the test that is shown; "best", a correct one if there is
any.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import lru_cache

from posttrain.core.types import Invalid, Reply, Task, Turn, Verdict
from posttrain.envs.builtin.code import SUCCESS, row_to_task
from posttrain.envs.play.load_env import opening
from posttrain.sandbox.shared_sandbox import about, begin_in_worker
from posttrain.verify.fenced import code_in, without_thoughts
from posttrain.verify.unit_tests import Grade, graded

__all__ = ["SUCCESS", "about", "choice_of", "code_choice", "row_to_task", "shown"]

begin_in_worker()

NUMBERED = "Program {number}:\n"
PASSES, FAILS = "It passes the test above.\n", "It fails the test above.\n"
QUESTION = "Which program is right? Answer with its number.\n"
_NUMBER = re.compile(r"\d+")


def code_choice(
    task: Task, *, candidates: int = 4, outcomes: bool = True, learn_writing: bool = True, over_random: bool = False
) -> Generator[Turn, Reply, Verdict]:
    """Run an episode.

    `candidates`: number of programs; `outcomes`: whether the policy sees which programs pass the example;
    `learn_writing`: whether the programs are trained too, or the choice alone; `over_random`: the reward is that of the
    choice minus that of a random choice, which depends less on the programs to choose from.
    """
    first = opening(task)
    programs = []
    for _ in range(candidates):
        reply = yield replace(first, fresh=True, learn=learn_writing)
        programs.append(code_in(reply))
    tests = (task["example"], *task["tests"])
    try:
        grades = [_graded(code, tests, task.get("setup", ""), tuple(task.get("entry", ()))) for code in programs]
    except _NoGradeError as error:
        return error.reason
    passes = [grade.passed[0] for grade in grades]
    right = [float(all(grade.passed[1:])) for grade in grades]
    reply = yield replace(_asked(first, shown(programs, passes if outcomes else None)), fresh=True)
    chosen = choice_of(reply, candidates)
    earned, by_chance = 0.0 if chosen is None else right[chosen], sum(right) / candidates
    return {
        "reward": earned - by_chance if over_random else earned,
        "chosen": earned,
        "random": by_chance,
        "filtered": right[passes.index(True) if any(passes) else 0],
        "best": max(right),
        "readable": float(chosen is not None),
    }


class _NoGradeError(Exception):
    """A program could not be graded, for a reason outside the program.

    Exceptions are not cached, so grading is tried again.
    """

    def __init__(self, reason: Invalid) -> None:
        super().__init__(reason.reason)
        self.reason = reason


@lru_cache(maxsize=256)
def _graded(code: str, tests: tuple[str, ...], setup: str, entry: tuple[str, ...]) -> Grade:
    """Grade the example first, then the hidden tests.

    Cached, as candidates of a task or group are often the same program.
    """
    grade = graded(code, tests, setup, entry)
    if isinstance(grade, Invalid):
        raise _NoGradeError(grade)
    return grade


def shown(programs: Sequence[str], passes: Sequence[bool] | None = None) -> str:
    """Return the programs with their numbers, from 1 on. `passes`: whether each passes the example; None: not shown.

    The outcomes come after all programs, passing ones last, where a small model finds them.
    """
    parts = [f"{_numbered(place)}```python\n{code.strip()}\n```\n" for place, code in enumerate(programs)]
    return "".join(parts) + ("" if passes is None else outcomes(passes)) + QUESTION


def outcomes(passes: Sequence[bool]) -> str:
    """Describe which programs pass the example."""
    told = sorted(range(len(passes)), key=lambda place: passes[place])
    return "".join(f"{_numbered(place)}{PASSES if passes[place] else FAILS}" for place in told)


def _numbered(place: int) -> str:
    return NUMBERED.format(number=place + 1)


def choice_of(reply: str, candidates: int) -> int | None:
    """Return the index, from 0 on, of the chosen program: the last number of a reply.

    None if there is no such program.
    """
    numbers = _NUMBER.findall(without_thoughts(reply))
    chosen = int(numbers[-1]) if numbers and len(numbers[-1]) < 10 else 0
    return chosen - 1 if 1 <= chosen <= candidates else None


def _asked(first: Turn, text: str) -> Turn:
    """Return the turn with more text after its own."""
    if first.messages is None:
        return replace(first, text=f"{first.text}{text}")
    *before, last = first.messages
    return replace(first, messages=[*before, {**last, "content": f"{last['content']}\n{text}"}])
