"""A real model learns to call a calculator, or Python, for numbers that it cannot work out in its head. One command,
which also resumes:

    python -m recipes.real.tools

The questions are word problems with numbers of three digits in place of their own. Held-out problems share no wording with
those to learn from. For every seed:

    start             the untrained model; its prompt has the instruction and one solved question
    SFT               imitates scripted episodes: a call with the right expression, then the answer
    GRPO              after SFT, on other problems; the reward is the right answer alone
    ..., Python       the same three with a Python interpreter in the calculator's place
    ..., no tool      the same three without a tool; SFT imitates the answers
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import posttrain
from posttrain import Rollout
from posttrain.core.seeds import seed_of
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import Task
from posttrain.envs.builtin import calculator, interpreter
from posttrain.verify.expression import evaluate
from recipes.real.problems import enlarged, problems
from recipes.real.study import Figures, Study, conversation, finished, options, right_and_wrong, run, shuffled

Row = dict[str, Any]

SOLVED = ("A farm has 214 rows of 132 trees. In spring 618 of the trees are cut. How many are left?", "214*132-618")
CALLS = 2  # that are answered in an episode
LONGEST = 48  # tokens of a reply
SFT_RATE, RATE = 2e-5, 1e-5
STAGES = ("start", "SFT", "GRPO")


@dataclass(frozen=True)
class Tool:
    """How a tool is called, and its built-in environment. Without `opened` there is no tool."""

    name: str
    env: str
    instruction: str
    opened: str = ""
    closed: str = ""
    result: str = ""  # form of what the tool answers
    failed: str = ""  # how the result of a call begins that could not be made
    answer: str = "{}"  # form of the last reply

    def replies(self, expression: str) -> list[str]:
        """The scripted replies: a call with the expression, and the answer."""
        value = self.answer.format(evaluate(expression))
        return [f"{self.opened}{expression}{self.closed}", value] if self.opened else [value]

    def row(self, problem: Task) -> Row:
        """A row for rl, eval and sft: the instruction, a solved question as a part of it, then the problem."""
        question, expression = SOLVED
        result = str(evaluate(expression))
        call, *answer = self.replies(expression)
        if self.opened:
            call = f"{call}{self.result.format(result)}{answer[0]}"
        text = f"{self.instruction}\n\nQuestion: {question}\n{call}\n\nQuestion: {problem['prompt']}"
        prompt = [{"role": "user", "content": text}]
        replies = self.replies(problem["response"])
        kept = {"id": problem["id"], "prompt": prompt, "answer": problem["answer"], "calls": CALLS}
        return {**kept, "replies": replies} if self.opened else {**kept, "response": replies[0]}


TOOLS = (
    Tool(
        "calculator",
        "calculator",
        "You have a calculator. Write an expression between <calc> and </calc>, and its value is shown to you between <out> "
        "and </out>. Then give the answer as a number.",
        calculator.OPEN,
        calculator.CLOSE,
        "<out>{}</out>",
        "<out>not an expression",
    ),
    Tool(
        "Python",
        "python",
        "You may run Python: write code between <python> and </python>, and what it prints is shown to you between <output> "
        "and </output>. Then give the answer between <answer> and </answer>.",
        interpreter.OPEN,
        interpreter.CLOSE,
        "\n<output>\n{}\n</output>\n",
        "\n<output>\nTraceback",
        "<answer>{}</answer>",
    ),
    Tool("no tool", "verify:numeric", "Answer with the number only."),
)


def arm(stage: str, tool: Tool) -> str:
    """The arm's name in the tables."""
    return stage if tool is TOOLS[0] else f"{stage}, {tool.name}"


ARMS = tuple(arm(stage, tool) for tool in TOOLS for stage in STAGES)


@dataclass
class Calling:
    """The arms of one seed: how each is trained, and how all are measured."""

    study: Study
    seed: int
    shown: list[Task]
    learned: list[Task]
    unseen: list[Task]
    steps: int
    prompts: int

    def run(self) -> None:
        for tool in TOOLS:
            for stage in STAGES:
                self.study.once(arm(stage, tool), self.seed, partial(self.figures, stage, tool))

    def figures(self, stage: str, tool: Tool) -> Figures:
        if stage == "start":
            return self.measured(tool, self.study.model)
        return self.measured(tool, self.sft(tool) if stage == "SFT" else self.grpo(tool))

    def sft(self, tool: Tool) -> str:
        rows = [tool.row(problem) for problem in self.shown]
        how = {"rows": 8, "epochs": 1, "lr": SFT_RATE, "warmup": 3, "schedule": "linear"}
        played = {"env": tool.env} if tool.opened else {"chat": True}
        common = self.study.common(arm("SFT", tool), self.seed)
        return finished(posttrain.sft(rows, model=self.study.model, **how, **played, **common))

    def grpo(self, tool: Tool) -> str:
        rows = [tool.row(problem) for problem in self.learned]
        start = str(self.study.folder(arm("SFT", tool), self.seed))
        size = {"steps": self.steps, "prompts": self.prompts, "group": 8, "max_tokens": LONGEST}
        how = {"algorithm": "grpo", "kl": 0.0, "lr": RATE, "warmup": 3, **size}
        common = self.study.common(arm("GRPO", tool), self.seed)
        return finished(posttrain.rl(rows, tool.env, start, **how, **common))

    def measured(self, tool: Tool, model: str) -> Figures:
        rows = [tool.row(problem) for problem in self.unseen]
        rollouts = self.study.evaluate(rows, tool.env, model, max_tokens=LONGEST).rollouts
        right = sum(r.reward or 0.0 for r in rollouts) / len(rollouts)
        found: Figures = {"right": right, "episodes": [conversation(r, 500) for r in right_and_wrong(rollouts)]}
        if tool.opened:
            found |= of_calls(rollouts, tool)
        return found


def of_calls(rollouts: Sequence[Rollout], tool: Tool) -> Figures:
    """Calls per question, the share of calls that had a result, and the share of questions with such a call."""
    results = [calls(rollout, tool) for rollout in rollouts]
    made = [call for each in results for call in each]
    return {
        "calls": len(made) / len(rollouts),
        "answered": sum(made) / max(1, len(made)),
        "questions with a call": sum(any(each) for each in results) / len(rollouts),
    }


def calls(rollout: Rollout, tool: Tool) -> list[bool]:
    """Of each call of an episode, whether it had a result."""
    turns = rollout.turns
    return [
        not result.text.startswith(tool.failed)
        for reply, result in pairwise(turns)
        if reply.kind is SpanKind.SAMPLED and reply.text.endswith(tool.closed)
    ]


def main() -> None:
    given = options(__doc__ or "", "tools").parse_args()
    shown, steps, prompts, asked = (8, 2, 2, 8) if given.small else (64, 16, 8, 120)
    settings = {"shown": shown, "steps": steps, "prompts": prompts, "questions": asked, "rates": [SFT_RATE, RATE]}
    study = Study(given, settings)
    learned, held_out = problems(given.data)
    unseen = enlarged(held_out, random.Random(0))[:asked]
    for seed in study.seeds:
        rows = shuffled(enlarged(learned, random.Random(seed_of(seed, "tools"))), seed, "tools")
        Calling(study, seed, rows[:shown], rows[shown:], unseen, steps, prompts).run()
    study.finish(page(study, len(unseen), shown, steps * prompts))


def page(study: Study, count: int, shown: int, trained: int) -> list[str]:
    """The part of the page that the recipe writes."""
    columns = {
        "right": "right answers", "calls": "calls per question", "answered": "calls with a result",
        "questions with a call": "questions with a result", "minutes": "minutes",
    }  # fmt: skip
    lines = [
        *study.head("tools"),
        f"{count} held-out problems, greedy. Mean over seeds with its 95% interval (Student), then every seed. "
        f"SFT imitates {shown} episodes; GRPO then samples 8 rollouts for each of {trained} other problems.",
        "",
        *study.table(ARMS, columns),
        "",
        "Right answers, seed by seed: "
        f"GRPO minus SFT with the calculator {study.gain('GRPO', 'SFT', 'right')}, "
        f"with Python {study.gain('GRPO, Python', 'SFT, Python', 'right')}; "
        f"with the calculator minus no tool {study.gain('GRPO', 'GRPO, no tool', 'right')}.",
        "",
    ]
    for tool in TOOLS[:2]:
        name = arm("GRPO", tool)
        lines += [f"The first right and the first wrong held-out episode of the first seed after {name}:", ""]
        for episode in study.figures(name)[0]["episodes"]:
            lines += episode
    return lines


if __name__ == "__main__":
    run(main)
