"""A real model learns from a teacher at every token of its own replies, and from itself with a longer prompt. One command,
which also resumes:

    python -m recipes.real.distillation

The questions are those of `posttrain demo --real`: "What is 7 * 8? Answer with the number only." For every seed:

    start                      the untrained model
    GRPO                       the reward alone; its result is the teacher
    distillation               the untrained model samples, the teacher scores each of its tokens
    SFT on the teacher         the teacher samples, the untrained model imitates
    longer prompt              the untrained model with solved examples in its prompt: no training
    self-distillation          the untrained model samples without the examples; itself with them is the teacher
    SFT on the longer prompt   the untrained model with the examples samples, without them it imitates

Each kind of training has the same number of sampled replies. Only GRPO and the eight examples look at answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import posttrain
from posttrain.cli.demo_command import mean_length, questions
from posttrain.core.types import Task
from posttrain.runs.run_reading import read_metrics
from posttrain.training.trainer import Run
from recipes.real.study import Figures, Study, conversation, finished, options, run

START, GRPO, DISTILLED, IMITATED = "start", "GRPO", "distillation", "SFT on the teacher"
PROMPTED, SELF, SELF_IMITATED = "longer prompt", "self-distillation", "SFT on the longer prompt"
ARMS = (START, GRPO, DISTILLED, IMITATED, PROMPTED, SELF, SELF_IMITATED)
ENV = "verify:numeric"
RATE, SFT_RATE = 1e-5, 2e-5
LONGEST = 24  # tokens of a reply
SETS = {"pairs": "held-out pairs", "two digits": "two digits, +", "minus": "one digit, -"}


def with_examples(task: Task, examples: Sequence[Task]) -> list[dict[str, str]]:
    """The question after solved ones, as turns of a conversation: "7 * 8 = 56" answers "What is 7 * 8? ..."."""
    turns = []
    for example in examples:
        left, sign, right = example["prompt"].removeprefix("What is ").partition("?")[0].split()
        solved = f"{left} {sign} {right} = {example['answer']}"
        turns += [{"role": "user", "content": example["prompt"]}, {"role": "assistant", "content": solved}]
    return [*turns, {"role": "user", "content": task["prompt"]}]


@dataclass
class Distillation:
    """The arms of one seed: how each is trained, and how all are measured."""

    study: Study
    seed: int
    steps: int
    practice: list[Task]
    examples: list[Task]
    unseen: dict[str, list[Task]]

    def run(self) -> None:
        for arm in ARMS:
            self.study.once(arm, self.seed, partial(self.figures, arm))

    def figures(self, arm: str) -> Figures:
        if arm in (START, PROMPTED):
            return {"sampled tokens": 0, **self.measured(self.study.model, prompted=arm == PROMPTED)}
        if arm in (IMITATED, SELF_IMITATED):
            return self.imitation(arm)
        learned = self.grpo() if arm == GRPO else self.distilled(arm)
        metrics = read_metrics(learned.path)
        lengths = [m["length"] * m["rollouts"] for m in metrics if "length" in m]
        curve = {m["step"]: m["eval/accuracy"] for m in metrics if "eval/accuracy" in m}
        found = {f"after {step}": value for step, value in curve.items() if step % 5 == 0}
        return {"sampled tokens": sum(lengths), **found, **self.measured(finished(learned))}

    def size(self, arm: str) -> dict[str, Any]:
        return {
            "steps": self.steps, "prompts": 8, "group": 8, "max_tokens": LONGEST, "kl": 0.0, "lr": RATE,
            "eval_tasks": str(self.held_out()), "eval_every": 5, "eval_samples": 2, **self.study.common(arm, self.seed),
        }  # fmt: skip

    def held_out(self) -> Path:
        file = self.study.out / f"held-out-{self.seed}.jsonl"
        file.write_text("".join(json.dumps(task) + "\n" for task in self.unseen["pairs"]))
        return file

    def grpo(self) -> Run:
        return posttrain.rl(self.practice, ENV, self.study.model, algorithm="grpo", **self.size(GRPO))

    def distilled(self, arm: str) -> Run:
        """On-policy distillation from the result of GRPO, or from the untrained model that reads the examples too."""
        longer = [{**task, "teacher_prompt": with_examples(task, self.examples)} for task in self.practice]
        tasks, teacher = (longer, self.study.model) if arm == SELF else (self.practice, self.teacher())
        return posttrain.distill(tasks, self.study.model, teacher=teacher, env=ENV, **self.size(arm))

    def imitation(self, arm: str) -> Figures:
        """SFT, one pass, on as many sampled replies as the other arms have."""
        longer = arm == SELF_IMITATED
        tasks = self.practice[: self.steps * 64]
        number = max(1, self.steps * 64 // len(tasks))
        shown = [{**t, "prompt": with_examples(t, self.examples)} for t in tasks] if longer else tasks
        teacher = self.study.model if longer else self.teacher()
        sampled = self.study.evaluate(
            shown, ENV, teacher, samples=number, temperature=1.0, max_tokens=LONGEST, seed=self.seed
        ).rollouts
        asked = {task["id"]: task["prompt"] for task in tasks}
        rows = [{"prompt": asked[r.task["id"]], "response": r.text} for r in sampled]
        learned = posttrain.sft(
            rows, model=self.study.model, chat=True, rows=64, epochs=1, lr=SFT_RATE, **self.study.common(arm, self.seed)
        )
        return {"sampled tokens": sum(r.n_sampled for r in sampled), **self.measured(finished(learned))}

    def teacher(self) -> str:
        return str(self.study.folder(GRPO, self.seed))

    def measured(self, model: str, prompted: bool = False) -> Figures:
        found: Figures = {}
        for name, tasks in self.unseen.items():
            asked = [{**t, "prompt": with_examples(t, self.examples)} for t in tasks] if prompted else tasks
            told = self.study.evaluate(asked, ENV, model, samples=4, k=(1,), temperature=1.0, max_tokens=LONGEST)
            found[name] = told.figures["accuracy"]["mean"]
            if name == "pairs":
                found["tokens"] = mean_length(told.rollouts)
                found["replies"] = [conversation(r, 300) for r in told.rollouts[:24:4]]
        return found


def main() -> None:
    given = options(__doc__ or "", "distillation").parse_args()
    steps, pairs, others = (2, 4, 4) if given.small else (30, 40, 60)
    study = Study(given, {"steps": steps, "pairs": pairs, "others": others, "rates": [RATE, SFT_RATE]})
    for seed in study.seeds:
        asked = questions("+*", range(10), seed)
        unseen = {
            "pairs": asked[:pairs],
            "two digits": questions("+", range(10, 100), seed)[:others],
            "minus": questions("-", range(10), seed)[:others],
        }
        Distillation(study, seed, steps, asked[40:], asked[40:48], unseen).run()
    study.finish(page(study, steps))


def page(study: Study, steps: int) -> list[str]:
    """The part of the page that the recipe writes."""
    columns = {**SETS, "tokens": "tokens of a reply", "sampled tokens": "sampled tokens", "minutes": "minutes"}
    early = [step for step in (5, 10, 20, 30) if step <= steps]
    trained = (GRPO, DISTILLED, SELF)
    lines = [
        *study.head("distillation"),
        "Accuracy at temperature 1, four replies to each held-out question. Mean over seeds with its 95% interval "
        "(Student), then every seed:",
        "",
        *study.table(ARMS, columns),
        "",
        "Accuracy on held-out pairs during training, two replies each:",
        "",
        *study.table(trained, {f"after {step}": f"after {step} steps" for step in early}),
        "",
        "Seed by seed, held-out pairs: "
        f"distillation minus GRPO {study.gain(DISTILLED, GRPO, 'pairs')}, "
        f"minus SFT on the teacher {study.gain(DISTILLED, IMITATED, 'pairs')}; "
        f"self-distillation minus its longer prompt {study.gain(SELF, PROMPTED, 'pairs')}, "
        f"minus SFT on it {study.gain(SELF, SELF_IMITATED, 'pairs')}.",
        "",
        "Replies to the same held-out questions, of the first seed:",
        "",
    ]
    for arm in (START, DISTILLED, SELF):
        lines += [f"{arm}:", ""]
        for told in study.figures(arm)[0]["replies"][:3]:
            lines += told
    return lines


if __name__ == "__main__":
    run(main)
