"""Distillation against GRPO against imitating the teacher's samples: accuracy by the tokens that were sampled for it.

    python recipes/distill.py [--seeds 0 1 2] [--out runs/distill]

The task is the demo's: sums of four digits. A teacher has imitated 8,800 sums for 12 epochs; the student, of two
thirds of its width, some 1,300 for 10, as in the demo. From there, each with the same number of sampled tokens:

    distillation   the student samples, the teacher scores each token (distill-reverse-kl)
    k1             the same from the sampled tokens alone (distill-k1)
    GRPO           the student samples, an exact check of the answer is the reward
    imitation      the teacher samples, and the student imitates that (sft)

Everything is measured on unseen sums. Figures go to OUT/results.json, and are printed as Markdown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from results_file import ResultsFile

import posttrain
from posttrain.cli.demo_command import demonstrations
from posttrain.core.intervals import student_interval
from posttrain.envs.builtin import arithmetic

STEPS, ROLLOUTS = 60, 128  # of each kind of training: as many rollouts for all
MEASURED = (0, 10, 30, 60)  # steps after which accuracy is told
SMALL: dict[str, Any] = {"threads": 1, "quiet": True, "overwrite": True}
RL: dict[str, Any] = {
    "steps": STEPS, "max_tokens": 4, "lr": 7e-4, "betas": (0.9, 0.95), "warmup": 10, "schedule": "linear",
    "eval_every": 10, "env_workers": 1,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", default="runs/distill")
    options = parser.parse_args()
    out = Path(options.out)
    results = ResultsFile(out)
    for seed in options.seeds:
        results.add(str(seed), one(out / f"seed-{seed}", seed))
    print(report(results))


def one(out: Path, seed: int) -> dict[str, Any]:
    """Accuracy of the teacher, and of the student after some steps of each kind of training, with the tokens sampled."""
    out.mkdir(parents=True, exist_ok=True)
    practice = arithmetic.tasks(8800, seed, digits=1, operands=4)
    unseen = arithmetic.tasks(500, seed, digits=1, operands=4, held_out=True)
    (out / "unseen.jsonl").write_text("".join(json.dumps(t) + "\n" for t in unseen))
    made = {"layers": 2, "heads": 4, "context": 32, "rows": 64, "lr": 5e-3, "warmup": 20, "seed": seed, **SMALL}
    teacher = posttrain.sft(practice, out=str(out / "teacher"), hidden=96, tokenizer="characters", epochs=12, **made)
    tokens = str(teacher.checkpoint)
    student = posttrain.sft(
        demonstrations(practice), out=str(out / "student"), hidden=64, tokenizer=tokens, epochs=10, **made
    )
    start, taught = str(student.path), {"teacher": str(teacher.path), "prompts": ROLLOUTS}
    common = {**RL, **SMALL, "seed": seed, "eval_tasks": str(out / "unseen.jsonl")}
    runs = {
        "distillation": posttrain.distill(practice, start, env="arithmetic", out=str(out / "kl"), **taught, **common),
        "k1": posttrain.distill(
            practice, start, env="arithmetic", algorithm="distill-k1", out=str(out / "k1"), **taught, **common
        ),
        "GRPO": posttrain.rl(
            practice, "arithmetic", start, out=str(out / "grpo"), prompts=ROLLOUTS // 8, group=8, kl=0.0, **common
        ),
    }
    found: dict[str, Any] = {"teacher": accuracy(str(teacher.path), unseen)}
    for name, run in runs.items():
        found[name] = curve(run)
    found["imitation"] = imitated(out, start, str(teacher.path), practice, unseen, seed)
    return found


def accuracy(model: str, tasks: list[dict[str, Any]]) -> float:
    found = posttrain.evaluate(tasks, "arithmetic", model, samples=1, k=(1,), max_tokens=4, threads=1)
    return float(found.figures["accuracy"]["mean"])


def curve(run: Any) -> list[dict[str, float]]:
    """Accuracy after some steps, and the tokens that the student had sampled until then."""
    sampled, points = 0.0, []
    for line in run.metrics:
        sampled += line.get("length", 0.0) * line.get("rollouts", 0.0)
        if line["step"] in MEASURED:
            points.append({"step": line["step"], "tokens": sampled, "accuracy": line["eval/accuracy"]})
    return points


def imitated(
    out: Path, start: str, teacher: str, practice: list[dict[str, Any]], unseen: list[dict[str, Any]], seed: int
) -> list[dict[str, float]]:
    """The same of imitation: of as many of the teacher's samples, each seen once, with a run for each point."""
    played = [
        r
        for part in range(-(-STEPS * ROLLOUTS // len(practice)))
        for r in posttrain.evaluate(
            practice, "arithmetic", teacher, samples=1, k=(1,), max_tokens=4, threads=1, seed=seed + 1000 * part
        ).rollouts
    ][: STEPS * ROLLOUTS]
    points = [{"step": 0, "tokens": 0.0, "accuracy": accuracy(start, unseen)}]
    for steps in MEASURED[1:]:
        used = played[: steps * ROLLOUTS]
        # One in thousands ends at once: there is nothing to imitate.
        rows = [{"id": str(i), "prompt": r.prompt, "response": r.text} for i, r in enumerate(used) if r.text.strip()]
        run = posttrain.sft(
            rows, model=start, out=str(out / f"imitation-{steps}"), rows=ROLLOUTS, steps=steps, lr=RL["lr"],
            betas=RL["betas"], warmup=min(10, steps // 2), schedule="linear", seed=seed, **SMALL,
        )  # fmt: skip
        sampled = float(sum(r.n_sampled for r in used))
        points.append({"step": steps, "tokens": sampled, "accuracy": accuracy(str(run.path), unseen)})
    return points


def report(results: dict[str, Any]) -> str:
    """A Markdown table: a row for each kind of training, a column for each number of rollouts: mean and interval."""
    kinds = [name for name in next(iter(results.values())) if name != "teacher"]
    first = results[next(iter(results))]
    heads = [f"{p['step'] * ROLLOUTS:,} rollouts" for p in first[kinds[0]]]
    lines = [f"| | {' | '.join(heads)} | tokens |", "|---" * (len(heads) + 2) + "|"]
    for kind in kinds:
        cells = []
        for place in range(len(heads)):
            values = [found[kind][place]["accuracy"] for found in results.values()]
            cells.append(shown(values))
        tokens = sum(found[kind][-1]["tokens"] for found in results.values()) / len(results)
        lines.append(f"| {kind} | {' | '.join(cells)} | {tokens:,.0f} |")
    teachers = [found["teacher"] for found in results.values()]
    return "\n".join([*lines, "", f"Teacher: {shown(teachers)}; seeds {', '.join(results)}"])


def shown(values: list[float]) -> str:
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    return f"{mean:.3f} {student_interval(values).text()}"


if __name__ == "__main__":
    main()
