"""A real model learns word problems from its own right solutions: expert iteration, then GRPO. One command, which also
resumes:

    python -m recipes.real.expert_iteration

A solution is one line, "32 + 42 - 35 = 39". Held-out problems share no wording with those to learn from. For every seed:

    start                  the untrained model; four solved problems as turns of its prompt
    SFT                    imitates written solutions
    GRPO after SFT         the reward is the right number alone
    expert iteration       no written solution but those four: the model samples and is trained on what came out right; each
                           round starts from the untrained weights (STaR, arXiv:2203.14465)
    GRPO after expert iteration

Trained models see no solved problems, only the instruction.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import posttrain
from posttrain import Rollout
from posttrain.core.types import StopReason, Task
from posttrain.verify.expression import evaluate
from recipes.pages import with_seeds
from recipes.real.problems import problems
from recipes.real.study import Figures, Study, conversation, finished, options, right_and_wrong, run, shuffled

Row = dict[str, Any]

START, SFT, SFT_GRPO = "start", "SFT", "GRPO after SFT"
EXPERT, EXPERT_GRPO = "expert iteration", "GRPO after expert iteration"
ARMS = (START, SFT, SFT_GRPO, EXPERT, EXPERT_GRPO)
BEFORE = {SFT_GRPO: SFT, EXPERT_GRPO: EXPERT}
ENV = "verify:numeric"
INSTRUCTION = "Write the calculation and its result in one line."
SOLVED = (
    ("A farm has 14 rows of 12 trees. In spring 18 of the trees are cut. How many are left?", "14 * 12 - 18 = 150"),
    ("Tom had 9 stamps and got 5 more. How many stamps does he have now?", "9 + 5 = 14"),
    ("Anna shares 24 cookies equally among 6 children. How many cookies does each child get?", "24 / 6 = 4"),
    ("A shop had 31 lamps and 8 chairs and sold 20 of the lamps. How many lamps are left?", "31 - 20 = 11"),
)
LONGEST = 40  # tokens of a reply
SAMPLES = 8
ROUNDS = 3
TEMPERATURE = 0.7  # of the replies to learn from; all others are sampled at 1
SFT_RATE, RATE = 2e-5, 1e-5


def row(problem: Task, solved: bool = False) -> Row:
    """A row for rl and eval: the instruction and the problem, after the solved problems where asked for."""
    shown = [(question, reply) for question, reply in SOLVED if solved]
    turns = []
    for question, reply in shown:
        turns += [{"role": "user", "content": f"{INSTRUCTION} {question}"}, {"role": "assistant", "content": reply}]
    turns.append({"role": "user", "content": f"{INSTRUCTION} {problem['prompt']}"})
    return {"id": problem["id"], "prompt": turns, "answer": problem["answer"]}


def solution(problem: Task) -> str:
    """The written solution: spaces around the operators, then the value."""
    spaced = re.sub(r" *([-+*/]) *", r" \1 ", problem["response"])
    return f"{spaced} = {problem['answer']}"


def right(problem: Task) -> bool:
    """Whether a problem has a written solution, and this gives the answer: in some of the data it does not."""
    return "response" in problem and evaluate(problem["response"]) == evaluate(problem["answer"])


@dataclass
class Expert:
    """The arms of one seed: how each is trained, and how all are measured."""

    study: Study
    seed: int
    written: list[Task]  # SFT imitates their solutions
    rounds: list[list[Task]]  # of expert iteration
    learned: list[Task]  # GRPO
    unseen: list[Task]
    prompts: int

    def run(self) -> None:
        for arm in ARMS:
            self.study.once(arm, self.seed, partial(self.figures, arm))

    def figures(self, arm: str) -> Figures:
        if arm == START:
            return self.measured(self.study.model, solved=True)
        if arm == SFT:
            return self.measured(self.imitation([self.demonstration(p, solution(p)) for p in self.written], SFT))
        if arm == EXPERT:
            found: Figures = {}
            model = self.expert_iteration(found)
            return {**found, **self.measured(model)}
        return self.measured(self.grpo(arm))

    def demonstration(self, problem: Task, reply: str) -> Row:
        return {"prompt": row(problem)["prompt"], "response": reply}

    def imitation(self, rows: list[Row], arm: str) -> str:
        how: dict[str, Any] = {"rows": 8, "epochs": 2, "lr": SFT_RATE, "warmup": 3, "schedule": "linear", "chat": True}
        return finished(posttrain.sft(rows, model=self.study.model, **how, **self.study.common(arm, self.seed)))

    def expert_iteration(self, found: Figures) -> str:
        """Rounds of: sample with the last model, keep what is right, train the untrained weights on all that was kept."""
        kept: dict[tuple[str, str], Row] = {}
        model = self.study.model
        for number, tasks in enumerate(self.rounds, 1):
            rows = [row(problem, solved=number == 1) for problem in tasks]
            replies = self.sampled(rows, model)
            known = {problem["id"]: problem for problem in tasks}
            for reply in replies:
                if reply.reward == 1.0 and reply.stop is StopReason.EOS:
                    text = reply.text.strip()
                    kept[reply.task["id"], text] = self.demonstration(known[reply.task["id"]], text)
            found[f"right in round {number}"] = sum(r.reward == 1.0 for r in replies) / len(replies)
            found[f"rows after round {number}"] = len(kept)
            model = self.imitation(list(kept.values()), EXPERT) if kept else model
        return model

    def grpo(self, arm: str) -> str:
        rows = [row(problem) for problem in self.learned]
        steps = len(rows) // self.prompts
        size: dict[str, Any] = {"steps": steps, "prompts": self.prompts, "group": 8, "max_tokens": LONGEST}
        how: dict[str, Any] = {"algorithm": "grpo", "kl": 0.0, "lr": RATE, "warmup": 3, **size}
        before = self.study.folder(BEFORE[arm], self.seed)
        start = str(before) if before.exists() else self.study.model  # no solution came out right: nothing was imitated
        return finished(posttrain.rl(rows, ENV, start, **how, **self.study.common(arm, self.seed)))

    def sampled(self, rows: Sequence[Row], model: str) -> list[Rollout]:
        """Return replies to learn from."""
        how: dict[str, Any] = {
            "samples": SAMPLES, "temperature": TEMPERATURE, "max_tokens": LONGEST, "seed": self.seed,
        }  # fmt: skip
        rollouts: list[Rollout] = self.study.evaluate(rows, ENV, model, **how).rollouts
        return rollouts

    def measured(self, model: str, solved: bool = False) -> Figures:
        rows = [row(problem, solved) for problem in self.unseen]
        how = {"samples": SAMPLES, "k": (SAMPLES,), "maj": (SAMPLES,), "temperature": 1.0, "max_tokens": LONGEST}
        found = self.study.evaluate(rows, ENV, model, **how)
        names = {"pass@1": "accuracy", "pass@8": f"pass@{SAMPLES}", "maj@8": f"maj@{SAMPLES}"}
        return {
            **{name: found.figures[figure]["mean"] for name, figure in names.items()},
            "tokens": sum(r.n_sampled for r in found.rollouts) / len(found.rollouts),
            "replies": [conversation(r, 400) for r in right_and_wrong(found.rollouts)],
        }


def main() -> None:
    given = options(__doc__ or "", "expert_iteration").parse_args()
    written, of_round, learned, prompts, asked = (8, 8, 4, 2, 8) if given.small else (64, 128, 128, 8, 96)
    sizes = {"written": written, "round": of_round, "learned": learned, "prompts": prompts, "questions": asked}
    study = Study(given, {**sizes, "rates": [SFT_RATE, RATE], "temperature": TEMPERATURE})
    to_learn, held_out = problems(given.data)
    unseen = shuffled(held_out, 0, "held-out word problems")[:asked]
    for seed in study.seeds:
        tasks = shuffled([task for task in to_learn if right(task)], seed, "expert iteration")
        cut = written + learned
        rounds = [tasks[cut + n * of_round : cut + (n + 1) * of_round] for n in range(ROUNDS)]
        Expert(study, seed, tasks[:written], rounds, tasks[written:cut], unseen, prompts).run()
    study.finish(page(study, len(unseen), sizes))


def page(study: Study, count: int, sizes: dict[str, int]) -> list[str]:
    """The part of the page that the recipe writes."""
    columns = {name: name for name in ("pass@1", "pass@8", "maj@8")}
    lines = [
        *study.head("expert_iteration"),
        f"{count} held-out problems, {SAMPLES} replies each at temperature 1. Mean over seeds with its 95% interval "
        f"(Student), then every seed. SFT imitates {sizes['written']} written solutions. A round of expert iteration "
        f"samples {SAMPLES} replies to {sizes['round']} problems at temperature {TEMPERATURE}. GRPO trains on "
        f"{sizes['learned']} other problems, 8 replies each.",
        "",
        *study.table(ARMS, {**columns, "tokens": "tokens of a reply", "minutes": "minutes"}),
        "",
        "Replies sampled in each round of expert iteration:",
        "",
        "| round | share of right replies | distinct right solutions so far |",
        "|---|---|---|",
        *(
            f"| {n} | {with_seeds(study.values(EXPERT, f'right in round {n}'))} | "
            f"{', '.join(f'{rows:.0f}' for rows in study.values(EXPERT, f'rows after round {n}'))} |"
            for n in range(1, ROUNDS + 1)
        ),
        "",
        *(
            f"- {arm} minus {over}, seed by seed: pass@1 {study.gain(arm, over, 'pass@1')}; pass@8 "
            f"{study.gain(arm, over, 'pass@8')}; maj@8 {study.gain(arm, over, 'maj@8')}."
            for arm, over in ((SFT_GRPO, SFT), (EXPERT, START), (EXPERT_GRPO, EXPERT), (EXPERT_GRPO, SFT_GRPO))
        ),
        "",
    ]
    for arm in (START, EXPERT_GRPO):
        lines += [f"The first right and the first wrong held-out reply of the first seed, {arm}:", ""]
        for told in study.figures(arm)[0]["replies"]:
            lines += told
    return lines


if __name__ == "__main__":
    run(main)
