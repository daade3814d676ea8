"""`posttrain demo`: a model learns while the user watches, on sums of a tiny model or in conversation with a real one.

The small demo trains a decoder of 0.1 M parameters from scratch: imitation of sums of four digits such as 3+5+2+7=17,
then GRPO with an exact check of the answer as the reward. The real one trains an instruct model with GRPO alone; it can
write already, and has partly learned the tables of addition and multiplication.
"""

from __future__ import annotations

import json
import operator
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import posttrain
from posttrain.cli.real_model import fetched
from posttrain.core.extras import runnable
from posttrain.core.intervals import told
from posttrain.core.messages import clip, one_line
from posttrain.core.rollouts import Rollout
from posttrain.core.types import Task, UserError
from posttrain.envs.builtin import arithmetic
from posttrain.runs.curves import curves
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import rollout_steps
from posttrain.runs.terminal.printing import sample, table

PER_ANSWER = 45  # demonstrations per answer: exploration hardly finds answers without any, and rare sums have few
OPERATORS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "*": operator.mul, "-": operator.sub}


def demonstrations(practice: Iterable[Task]) -> list[Task]:
    """Return the tasks to imitate: the first few with each answer."""
    shown: Counter[str] = Counter()
    found = []
    for task in practice:
        shown[task["answer"]] += 1
        if shown[task["answer"]] <= PER_ANSWER:
            found.append(task)
    return found


def small(out: Path, seed: int) -> Any:
    """Imitate, then learn from a verifier, and measure both on held-out sums. Return the run."""
    practice = arithmetic.tasks(8800, seed, digits=1, operands=4)
    unseen = arithmetic.tasks(500, seed, digits=1, operands=4, held_out=True)
    _write(out, practice=practice, unseen=unseen)
    imitated = posttrain.sft(
        demonstrations(practice),
        out=str(out / "sft"), overwrite=True, seed=seed, threads=1,
        hidden=64, layers=2, heads=4, context=32, tokenizer="characters",
        epochs=10, rows=64, lr=5e-3, warmup=20,
    )  # fmt: skip
    learned = posttrain.rl(
        practice, "arithmetic", str(imitated.path), algorithm="grpo",
        out=str(out / "rl"), overwrite=True, seed=seed, threads=1,
        steps=400, prompts=64, group=8, minibatches=2, max_tokens=4, kl=0.0,
        lr=1e-3, betas=(0.9, 0.95), warmup=10, schedule="linear",
        eval_tasks=(str(out / "unseen.jsonl"),), eval_every=20, save_every=100,
    )  # fmt: skip
    found = posttrain.evaluate(
        unseen, "arithmetic", str(learned.path), against=(str(imitated.path),),
        samples=8, k=(1, 8), max_tokens=4, threads=1,
    )  # fmt: skip
    [compared] = found.against
    rows = [
        [stage, *(told(figures[name]) for name in ("accuracy", "pass@1", "pass@8"))]
        for stage, figures in (("before: imitation", compared.figures), ("after: GRPO", found.figures))
    ]
    table(f"{len(unseen)} sums never seen, 8 replies each, 95% intervals", ["", "accuracy", "pass@1", "pass@8"], rows)
    print(f"gained {told(compared.differences['accuracy'])}, the same sums compared one by one")
    return learned


# -- a real model ------------------------------------------------------------------------------------------------------


def questions(operators: str, numbers: Iterable[int], seed: int) -> list[Task]:
    """Return all questions with these operators and numbers, worded as by a person, shuffled."""
    made = [_question(sign, a, b) for sign in operators for a, b in product(numbers, repeat=2)]
    random.Random(seed).shuffle(made)
    return made


def _question(sign: str, a: int, b: int) -> Task:
    prompt = f"What is {a} {sign} {b}? Answer with the number only."
    return {"id": f"{a}{sign}{b}", "prompt": prompt, "answer": str(OPERATORS[sign](a, b))}


def real(out: Path, seed: int, model: str) -> Any:
    """Teach an instruct model one-digit addition and multiplication by GRPO alone. Return the run.

    A fifth of the pairs is held out. Two-digit sums and differences are not trained at all: they measure whether the
    model learns more than the tables.
    """
    asked = questions("+*", range(10), seed)
    unseen, practice = asked[:40], asked[40:]
    tests = {
        "held-out pairs": unseen,
        "two digits, +": questions("+", range(10, 100), seed)[:60],
        "one digit, -": questions("-", range(10), seed)[:60],
    }
    _write(out, practice=practice, unseen=unseen)
    learned = posttrain.rl(
        practice, "verify:numeric", model, algorithm="grpo",
        out=str(out / "rl"), overwrite=True, seed=seed,
        steps=30, prompts=8, group=8, max_tokens=24, kl=0.0, lr=1e-5,
        eval_tasks=(str(out / "unseen.jsonl"),), eval_every=10, save_every=30,
    )  # fmt: skip
    rows = []
    for name, tasks in tests.items():
        found = posttrain.evaluate(
            tasks, "verify:numeric", str(learned.path), against=(model,), samples=4, max_tokens=24
        )
        [compared] = found.against
        before, after = compared.figures["accuracy"], found.figures["accuracy"]
        gain = compared.differences["accuracy"]
        lengths = [f"{mean_length(rollouts):.0f}" for rollouts in (compared.rollouts, found.rollouts)]
        rows.append([name, told(before, ".2f"), told(after, ".2f"), told(gain, ".2f"), " to ".join(lengths)])
    columns = ["", "before", "after", "gained", "tokens"]
    table("Accuracy, 4 replies each at temperature 1, 95% intervals", columns, rows)
    return learned


def mean_length(rollouts: Sequence[Rollout]) -> float:
    """Return the mean number of sampled tokens of a rollout."""
    return sum(rollout.n_sampled for rollout in rollouts) / len(rollouts)


# -- both --------------------------------------------------------------------------------------------------------------


def demo(out: Path, seed: int, is_real: bool, model: str | None) -> None:
    """Run the small demo, or the real one with `model` (None: SmolLM2), and print where the results are.

    Raises UserError if the folder is not writable, or the model cannot be fetched or opened.
    """
    began = time.perf_counter()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {clip(str(out))} cannot be written: {one_line(error)}") from error
    learned = real(out, seed, model or str(fetched())) if is_real else small(out, seed)
    last = read_rollouts(learned.path, rollout_steps(learned.path)[-1])
    sample(last[::8], 5)  # one reply of each group
    print(f"curves      {curves(learned.path, out / 'curves.png')}")
    print(f"every token {learned.path / 'rollouts'}")
    print(f"checkpoint  {learned.checkpoint}")
    print(f"took        {time.perf_counter() - began:.0f} s")
    print(f"look        {runnable(f'posttrain view {learned.path}')}")
    print(f"talk        posttrain chat {learned.path}")


def _write(out: Path, **sets: list[Task]) -> None:
    try:
        for name, tasks in sets.items():
            (out / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    except OSError as error:
        raise UserError(f"--out {clip(str(out))} cannot be written: {one_line(error)}") from error
