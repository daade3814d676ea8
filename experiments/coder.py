"""A writer of small functions: how it is taught, what it writes, and which of its candidates is submitted.

It begins with imitation of a careless programmer, so that it knows the form of a program and often has the wrong step or
the wrong number in it. The same imitation shows it the form of a choice between programs: these choices are random.

Of several candidates one is submitted as AlphaCode does (arXiv 2203.07814, sections 4.5 and 4.6): those that fail the
example are dropped; those left are put together by what they give on further inputs, and one of the largest cluster is
submitted. There a model makes up the inputs; here they come with the task.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from experiments.experiment import Numbers, Settings
from experiments.functions import careless, demonstrations, drawn, row, tasks, vocabulary
from experiments.harness import checkpoint_of
from experiments.reader import untrained
from posttrain.config.inference import Evaluation
from posttrain.config.training import SFT
from posttrain.core.rollouts import Rollout
from posttrain.core.types import Env, Invalid, Reply, Task, Verdict
from posttrain.envs.builtin.code import row_to_task
from posttrain.envs.builtin.code_choice import QUESTION, outcomes, shown
from posttrain.runs.checkpoint import newest, step_of
from posttrain.training.figures import pass_at_k
from posttrain.training.training_run import run_training
from posttrain.training.verbs import evaluate
from posttrain.verify.fenced import code_in
from posttrain.verify.unit_tests import Grade, behaviour, graded

CONTEXT = 512
ROWS = 64  # of an update of imitation
LONGEST = 64  # tokens of a reply
PASSING = 0.4  # of the outcomes that teach to read outcomes
EXAMPLE = 0  # place of the test that is shown among those of a grade
PASSES = (1, 4, 8)  # the k of pass@k


Row = dict[str, Any]
Scored = Callable[[Task, Reply], Verdict]


# -- rewards -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def _graded(code: str, tests: tuple[str, ...]) -> Grade | Invalid:
    """A policy that has learned something writes the same program again and again: it is run once."""
    return graded(code, tests)


def grade_of(task: Task, reply: str) -> Grade | Invalid:
    """Of all tests of a task: the example first, then the hidden ones."""
    return _graded(code_in(reply), (task["example"], *task["tests"]))


def share(task: Task, reply: Reply) -> Verdict:
    """The share of the hidden tests that pass, as in the environment `code`."""
    return _scored(task, reply, every=False)


def every(task: Task, reply: Reply) -> Verdict:
    """1 if all hidden tests pass, else 0, as in the environment `code-all`."""
    return _scored(task, reply, every=True)


def _scored(task: Task, reply: Reply, every: bool) -> Verdict:
    """With figures beside it that are the same for both rewards."""
    grade = grade_of(task, reply)
    if isinstance(grade, Invalid):
        return grade
    hidden = grade.passed[EXAMPLE + 1 :]
    passed = sum(hidden) / len(hidden)
    return {
        "reward": float(all(hidden)) if every else passed,
        "right": float(all(hidden)),
        "share": passed,
        "example": float(grade.passed[EXAMPLE]),
    }


# -- teaching ----------------------------------------------------------------------------------------------------------


def choices(count: int, seed: int, settings: Settings) -> list[Row]:
    """Rows that show the form of a choice: the programs are careless, and the choice is random.

    Half of the rows show which programs pass the example.
    """
    draw, rows = random.Random(f"choices {seed}"), []
    for _ in range(count):
        function = drawn("demonstrated", draw, settings["vague"])
        made = row(function, draw)
        task = row_to_task(made)
        assert task is not None
        written = [
            careless(function, draw, settings["slips"], settings["reads"]) for _ in range(settings["candidates"])
        ]
        call, expected = made["test_list"][0].removeprefix("assert ").split(" == ")
        argument = ast.literal_eval(call[2:-1])
        passes = [repr(program(argument)) == expected for program in written]
        told = passes if draw.random() < 0.5 else None
        text = task["prompt"] + shown([program.code for program in written], told)
        rows.append({"prompt": text, "response": str(draw.randint(1, settings["candidates"]))})
    return rows


def outcomes_alone(count: int, settings: Settings) -> list[Row]:
    """Rows that teach to read outcomes, without the programs: short, so that there can be many.

    Where any passes, one of these is chosen in a share `heeds` of the cases; else the choice is random.
    """
    draw, rows = random.Random(1), []
    asked, number = tasks("demonstrated", 400, 1, settings["vague"]), settings["candidates"]
    for _ in range(count):
        passes = [draw.random() < PASSING for _ in range(number)]
        text = draw.choice(asked)["prompt"] + outcomes(passes) + QUESTION
        among = [place for place in range(number) if passes[place]] or range(number)
        chosen = draw.choice(among) if draw.random() < settings["heeds"] else draw.randrange(number)
        rows.append({"prompt": text, "response": str(chosen + 1)})
    return rows


def starting_policy(settings: Settings, folder: Path) -> str:
    """The checkpoint after imitation, from nothing: one that is in `folder`, or one made there, once for all seeds."""
    decide = ("hidden", "layers", "demonstrations", "demonstrated_choices", "vague", "slips", "reads", "candidates",
              "imitation_lr")  # fmt: skip
    name = "-".join(str(settings[key]) for key in decide)
    out, blank = folder / f"start-{name}", folder / f"untrained-{name}"
    if not out.exists():
        untrained(blank, vocabulary(), settings["hidden"], settings["layers"], CONTEXT)

    def rows() -> list[Row]:
        writing = demonstrations(settings["demonstrations"], 0, settings["vague"], settings["slips"], settings["reads"])
        return writing + choices(settings["demonstrated_choices"], 0, settings)

    return _taught(out, str(blank), settings["demonstrations"] + settings["demonstrated_choices"], rows, settings)


def choosing_policy(settings: Settings, folder: Path) -> str:
    """The start after it has learned to read outcomes, once for all seeds.

    A choice is one token, so there are few programs beside them, or it would weigh next to nothing. Without any, in 110
    updates it forgot how to write.
    """
    start, count = starting_policy(settings, folder), settings["choice_demonstrations"]
    rehearsed = settings["rehearsed"]
    out = folder / f"choosing-{Path(start).parents[1].name}-{count}-{rehearsed}-{settings['heeds']}"

    def rows() -> list[Row]:
        writing = demonstrations(rehearsed, 1, settings["vague"], settings["slips"], settings["reads"])
        return outcomes_alone(count, settings) + writing

    return _taught(out, start, count + rehearsed, rows, settings)


def _taught(out: Path, start: str, count: int, rows: Callable[[], list[Row]], settings: Settings) -> str:
    """The checkpoint of a run that sees so many rows once: of one that is finished, or begun and gone on with."""
    steps = count // ROWS
    if (made := newest(out, print)) is not None and step_of(made) == steps:
        return str(made)
    config = SFT(
        tasks="generated", model=start, out=str(out), seed=0, steps=steps, rows=ROWS, lr=settings["imitation_lr"],
        warmup=min(50, steps // 6), betas=(0.9, 0.95), tokens_per_microbatch=4096, save_every=100, keep=1, quiet=True,
        threads=1, resume=out.exists(),
    )  # fmt: skip
    return checkpoint_of(run_training(config, rows()))


# -- examination -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A program that was written for a task."""

    code: str
    passed: tuple[bool, ...]  # the example first

    @property
    def passes_example(self) -> bool:
        return self.passed[EXAMPLE]

    @property
    def right(self) -> bool:
        return all(self.passed[EXAMPLE + 1 :])


def play(checkpoint: str, tasks: Sequence[Task], env: Env | Scored | str, seed: int, samples: int) -> list[Rollout]:
    """Episodes of a policy, sampled at temperature 1."""
    config = Evaluation(
        tasks="generated", env=env if isinstance(env, str) else "generated", model=checkpoint, samples=samples, seed=seed,
        max_tokens=LONGEST, env_workers=0, threads=1, success=1.0,
    )  # fmt: skip
    return evaluate.evaluate(config, list(tasks), None if isinstance(env, str) else env).rollouts


def candidates(checkpoint: str, tasks: Sequence[Task], seed: int, samples: int) -> list[list[Candidate]]:
    """So many candidates for each task, in the order in which they were sampled."""
    found: dict[str, list[Candidate]] = {task["id"]: [] for task in tasks}
    for rollout in play(checkpoint, tasks, every, seed, samples):
        grade = grade_of(rollout.task, rollout.text)
        assert not isinstance(grade, Invalid), "the references pass their tests, so tests are no fault"
        found[rollout.task["id"]].append(Candidate(code_in(rollout.text), grade.passed))
    return list(found.values())


def filtered(written: Sequence[Candidate]) -> Candidate:
    """The first that passes the example; the first of all, if none does."""
    return next((c for c in written if c.passes_example), written[0])


def clustered(written: Sequence[Candidate], calls: Sequence[str]) -> Candidate:
    """Of those that pass the example, the first of the largest cluster of equal behaviour; of equal ones, the earliest."""
    passing = [c for c in written if c.passes_example]
    if not passing:
        return written[0]
    behaviours = [_behaviour(c.code, tuple(calls)) for c in passing]
    counts = Counter(behaviours)
    largest = max(counts.values())
    return next(c for c, b in zip(passing, behaviours, strict=True) if counts[b] == largest)


@lru_cache(maxsize=65536)
def _behaviour(code: str, calls: tuple[str, ...]) -> tuple[str, ...]:
    found = behaviour(code, calls)
    assert not isinstance(found, Invalid), found
    return found


def constant(code: str, calls: Sequence[str]) -> bool:
    """Whether a program gives the same whatever it is given, and does give something."""
    given = set(_behaviour(code, tuple(calls)))
    return len(given) == 1 and not given & {"nothing"}


def examined(checkpoint: str, tasks: Sequence[Task], seed: int, settings: Settings) -> Numbers:
    """Pass@k on these tasks, and what is right among one submission of each k candidates."""
    written = candidates(checkpoint, tasks, seed, settings["samples"])
    return figures(written, tasks)


def figures(written: Sequence[Sequence[Candidate]], tasks: Sequence[Task]) -> Numbers:
    """Means over the tasks. A submission out of k is tried on each k consecutive candidates."""
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for task, own in zip(tasks, written, strict=True):
        right = sum(c.right for c in own)
        for k in PASSES:
            note(f"pass@{k}", pass_at_k(len(own), right, k))
        for k in PASSES[1:]:
            blocks = [own[start : start + k] for start in range(0, len(own) - k + 1, k)]
            note(f"filtered@{k}", sum(filtered(block).right for block in blocks) / len(blocks))
            note(f"clustered@{k}", sum(clustered(block, task["calls"]).right for block in blocks) / len(blocks))
        note("share", sum(sum(c.passed[1:]) / len(c.passed[1:]) for c in own) / len(own))
        note("example", sum(c.passes_example for c in own) / len(own))
        note("only example", sum(c.passes_example and not c.right for c in own) / len(own))
        note("different", len({c.code for c in own}) / len(own))
        note("constant", sum(any(c.passed[1:]) and constant(c.code, task["calls"]) for c in own) / len(own))
        note("open" if task["open"] else "told", right / len(own))
    return {name: sum(values) / len(values) for name, values in found.items()}
