"""Arrays of the replies of a run: the input of the audit. Reads rollout files and writes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from posttrain.apps.audit.correlation import Floats, Integers
from posttrain.config.verbs import sampling
from posttrain.core.types import StopReason, Task, UserError
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.record.rollout_rows import Row
from posttrain.runs.record.schema import SCALARS
from posttrain.runs.run_files import Folder
from posttrain.runs.run_reading import read_run, rollout_steps

STEPS = 40  # default number of steps to read
WINDOW = 0.2  # share of the steps read that counts as early, and as late


@dataclass(frozen=True, eq=False)
class Replies:
    """The n replies with a valid reward, in order, of some steps of a run."""

    step: Integers  # [n]
    prompt: Integers  # [n], number of the reply's task, from 0 on: the unit of resampling
    cell: Integers  # [n], number of the reply's group: one prompt in one step
    text: list[str]  # [n], the sampled text, the turns of an episode joined by line ends
    length: Floats  # [n], sampled tokens
    reward: Floats  # [n]
    parts: dict[str, Floats]  # name -> [n]; nan where a reply lacks it
    stop: list[StopReason]  # [n], stop reason of the last reply of the rollout
    tasks: list[Task]  # [n], columns of the task: id, prompt, answer
    steps: list[int]  # the steps that were read
    recorded: int  # number of steps with rollouts on disk
    invalid: int = 0  # replies without a valid reward, left out
    single: bool = field(default=True)  # whether every episode had one reply

    def __len__(self) -> int:
        return len(self.text)

    @property
    def ends(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return masks ([n] early, [n] late) of the first and the last fifth of the steps; both empty if one step was
        read.
        """
        count = max(1, round(WINDOW * len(self.steps))) if len(self.steps) > 1 else 0
        early, late = self.steps[:count], self.steps[len(self.steps) - count :]
        return np.isin(self.step, early), np.isin(self.step, late)

    def part(self, name: str) -> Floats:
        """Return a part of the reward, [n]. Raises UserError, with the known names, if there is none of that name."""
        if name not in self.parts:
            known = ", ".join(self.parts) or "none: return a dict from the reward, such as {'reward': r, 'gold': g}"
            raise UserError(f"the rollouts have no part of the reward named {name!r}; there are {known}")
        return self.parts[name]

    def with_tasks(self, tasks: Iterable[Task]) -> Replies:
        """Return the replies with all columns of their tasks, matched by id.

        Values recorded in the rollouts take precedence.
        """
        known = {str(task["id"]): task for task in tasks}
        return replace(self, tasks=[{**known.get(str(own["id"]), {}), **_without_nulls(own)} for own in self.tasks])


def holds_replies(run: Folder) -> bool:
    """Return whether the run holds replies of its policy. Verbs that do not sample record their input rows instead."""
    return read_run(run)["verb"] in sampling() and bool(rollout_steps(run))


def read_replies(run: Folder, most_steps: int = STEPS) -> Replies:
    """Return the replies of at most `most_steps` steps, evenly spread, including the first and the last.

    Raises UserError if the folder holds no run, or no rollouts with a valid reward.
    """
    verb = read_run(run)["verb"]
    there = rollout_steps(run)
    if verb not in sampling():
        raise UserError(f"{run} is a run of posttrain {verb}, which samples no replies: audit one of posttrain rl")
    if not there:
        raise UserError(f"{run} holds no rollouts: audit a run of posttrain rl, after its first step")
    places = sorted({round(p) for p in np.linspace(0, len(there) - 1, min(most_steps, len(there)))})
    steps = [there[p] for p in places]
    rows = [(step, row) for step in steps for row in read_rollouts(run, step, SCALARS.names)]
    valid = [(step, row) for step, row in rows if row["reward"] is not None]
    if not valid:
        raise UserError(f"{run}: none of its {len(rows)} rollouts has a valid reward, so there is nothing to audit")
    said = [_replies(row) for _, row in valid]
    names = sorted({name for _, row in valid for name in row["parts"]})
    return Replies(
        step=np.array([step for step, _ in valid], dtype=np.int64),
        prompt=_numbered([_task_of(row["group"]) for _, row in valid]),
        cell=_numbered([f"{step} {row['group']}" for step, row in valid]),
        text=["\n".join(texts) for texts in said],
        length=np.array([row["sampled"] for _, row in valid], dtype=np.float64),
        reward=np.array([row["reward"] for _, row in valid], dtype=np.float64),
        parts={name: np.array([_part(row, name) for _, row in valid], dtype=np.float64) for name in names},
        stop=[StopReason(row["stop"]) for _, row in valid],
        tasks=[
            {
                "id": _task_of(row["group"]),
                "prompt": row["prompt"],
                "answer": row["columns"].get("answer", row["columns"].get("answers")),
            }
            for _, row in valid
        ],
        steps=steps,
        recorded=len(there),
        invalid=len(rows) - len(valid),
        single=all(len(texts) == 1 for texts in said),
    )


def _without_nulls(task: Task) -> Task:
    return {name: value for name, value in task.items() if value is not None}


def _replies(row: Row) -> list[str]:
    """Return the replies of the policy, one by one."""
    said = [turn["text"] for turn in row["turns"] if turn["role"] == "sampled"]
    return said or [row["text"]]


def _task_of(group: str) -> str:
    """Return the task's id from a group's name, which is the id and the visit: "17#0"."""
    return group.rpartition("#")[0] or group


def _part(row: Row, name: str) -> float:
    value = row["parts"].get(name)
    return float("nan") if value is None else float(value)


def _numbered(names: list[str]) -> Integers:
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)
