"""A real model learns from comparisons: reward models beside a bag of words, PPO against one, DPO, KTO and SimPO.

    python -m recipes.real.preferences --precision bfloat16

SmolLM2-135M-Instruct, for every seed:

    reward model, given pairs    comparisons from a file; beside a bag of words and rules of length
    reward model, own replies    replies of the start, compared by a rule in place of a judge (recipes.real.reply_judge)
    start                        the untrained model
    DPO, KTO, SimPO              learn from the same comparisons of own replies, without sampling
    PPO                          samples, and is rewarded by the reward model of own replies

Prompts are held out by their text, the same ones for all arms and seeds. The judge marks the replies to them; policies are
compared with the start reply by reply, by the judge and by the reward model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import posttrain
from posttrain import Rollout
from posttrain.core.types import StopReason, Task
from posttrain.data.preference_examples import to_item
from posttrain.data.tasks import hold_out, to_tasks
from posttrain.training.trainer import Run
from recipes.real.reply_judge import mark
from recipes.real.study import Figures, Study, finished, options, read, run, shuffled
from recipes.real.word_baselines import baselines, mean, won

Row = dict[str, Any]

HELD_OUT = {"held_out": 0.25, "split_seed": 0}
JUDGED = "recipes.real.reply_judge:judged"
REPLIES = 4  # to each prompt, that are compared
SAMPLED = 2  # replies to each held-out prompt, beside the greedy one
WARMED: dict[str, Any] = {"warmup": 3, "schedule": "linear"}
SCORED: dict[str, Any] = {"pooling": "mean", "lr": 1e-4, "epochs": 1, **WARMED}
DIRECT = {"DPO": {"lr": 1e-5}, "KTO": {"lr": 1e-5}, "SimPO": {"lr": 1e-5}}
PPO: dict[str, Any] = {"group": 2, "minibatches": 2, "lr": 1e-5, "critic_lr": 2e-5, "kl": 0.05}
GIVEN, OWN = "reward model, given pairs", "reward model, own replies"
POLICIES = ("start", *DIRECT, "PPO")
ARMS = (GIVEN, OWN, *POLICIES)


@dataclass(frozen=True)
class Size:
    """How much of each thing."""

    pairs: int = 400  # given pairs that are learned from
    unseen_pairs: int = 200
    prompts: int = 150  # whose replies are compared, and that PPO plays
    unseen_prompts: int = 60
    tokens: int = 48  # of a reply, at most
    gap: float = 0.1  # least difference of two marks that is a comparison
    rows: int = 4  # prompts of an update on own replies
    steps: int = 16  # of PPO
    batch: int = 16  # prompts of a step


SMALL = Size(pairs=12, unseen_pairs=8, prompts=8, unseen_prompts=6, tokens=12, gap=0.0, rows=2, steps=2, batch=4)


@dataclass
class Preferring:
    """The arms of one seed: how each is trained, and how all are measured."""

    study: Study
    seed: int
    size: Size
    pairs: tuple[list[Row], list[Row]]  # learned from, held out
    prompts: tuple[list[Row], list[Row]]

    def run(self) -> None:
        for arm in ARMS:
            self.study.once(arm, self.seed, lambda arm=arm: self.figures(arm))

    def figures(self, arm: str) -> Figures:
        if arm == GIVEN:
            return self.reward_model(arm, self.pairs[0] + self.pairs[1], 8)
        if arm == OWN:
            return self.reward_model(arm, self.compared(), self.size.rows)
        if arm == "start":
            return self.measured(self.study.model)
        if arm == "PPO":
            done = self.ppo()
            return {**self.measured(finished(done)), "steps": course(done)}
        done = posttrain.prefer(
            self.compared(), model=self.study.model, algorithm=arm.lower(), rows=self.size.rows,
            epochs=1, **DIRECT[arm], **WARMED, **HELD_OUT, **self.study.common(arm, self.seed),
        )  # fmt: skip
        return {**self.measured(finished(done)), **before_and_after(done)}

    def compared(self) -> list[Row]:
        """Replies of the start to all prompts with their comparisons: those of a file, once they are there."""
        file = self.study.out / f"own-replies-{self.seed}.jsonl"
        if not file.exists():
            sampled = self.study.evaluate(
                self.prompts[0] + self.prompts[1], "verify:chrf", self.study.model,
                samples=REPLIES, temperature=1.0, max_tokens=self.size.tokens, seed=self.seed,
            ).rollouts  # fmt: skip
            rows = [row for own in by_prompt(sampled) if (row := comparison_row(own, self.size.gap))["comparisons"]]
            draft = file.with_suffix(".draft")
            draft.write_text("".join(json.dumps(row) + "\n" for row in rows))
            draft.replace(file)
        return read(file)

    def reward_model(self, arm: str, rows: list[Row], batch: int) -> Figures:
        done = posttrain.reward_model(
            rows, model=self.study.model, rows=batch, **SCORED, **HELD_OUT, **self.study.common(arm, self.seed)
        )
        finished(done)
        first, last = evaluations(done)
        learned, unseen = sides(rows)
        return {
            "accuracy": last["accuracy"],
            "before": first["accuracy"],
            "calibration": last["calibration_error"],
            **baselines(learned, unseen),
            "comparisons": [sum(len(task["comparisons"]) for task in side) for side in (learned, unseen)],
        }

    def ppo(self) -> Run:
        size = {"prompts": self.size.batch, "max_tokens": self.size.tokens, "steps": self.size.steps}
        critic = {"critic_model": str(self.study.folder(OWN, self.seed))}
        return posttrain.rl(
            self.prompts[0], JUDGED, self.study.model, algorithm="ppo", reward_model=self.judges(), **critic,
            **size, **PPO, **WARMED, **self.study.common("PPO", self.seed),
        )  # fmt: skip

    def judges(self) -> tuple[str]:
        return (str(self.study.folder(OWN, self.seed)),)

    def measured(self, model: str) -> Figures:
        """Marks, scores and lengths of greedy and of sampled replies to the held-out prompts; win rates over the start's."""
        found: Figures = {}
        how = {"greedy": {}, "sampled": {"samples": SAMPLED, "temperature": 1.0, "seed": self.seed + 1000}}
        for name, given in how.items():
            rollouts = self.study.evaluate(
                self.prompts[1], JUDGED, model, k=None, reward_model=self.judges(), max_tokens=self.size.tokens, **given
            ).rollouts
            rollouts = [rollout for own in by_prompt(rollouts) for rollout in own]
            marks = [mark(rollout.text, rollout.task["reference"]) for rollout in rollouts]
            scores = [float(rollout.reward) for rollout in rollouts if isinstance(rollout.reward, float)]
            assert len(scores) == len(marks), "the reward model reads every reply"
            found |= {f"{name} marks": marks, f"{name} scores": scores}
            found |= {f"{name} mark": mean(marks), f"{name} score": mean(scores)}
            found[f"{name} tokens"] = mean([rollout.n_sampled for rollout in rollouts])
            found[f"{name} ended"] = mean([rollout.stop is StopReason.EOS for rollout in rollouts])
            if name == "greedy":
                found["replies"] = [told(rollout) for rollout in rollouts[:8]]
        start = self.study.known("start", self.seed) or found
        for name in how:
            for figure in ("mark", "score"):
                own, other = (of[f"{name} {figure}s"] for of in (found, start))
                found[f"{name} {figure} wins"] = mean([won(a - b) for a, b in zip(own, other, strict=True)])
        return found


def main() -> None:
    given = options(__doc__ or "", "preferences").parse_args()
    size = SMALL if given.small else Size()
    settings = {**vars(size), "scored": SCORED, "direct": DIRECT, "ppo": PPO, "held out": HELD_OUT}
    study = Study(given, settings)
    pairs, prompts = given_pairs(given.data), asked(given.data)
    for seed in study.seeds:
        few = part(pairs, seed, size.pairs, size.unseen_pairs), part(prompts, seed, size.prompts, size.unseen_prompts)
        Preferring(study, seed, size, *few).run()
    study.finish(page(study))


# -- data --------------------------------------------------------------------------------------------------------------


def given_pairs(data: Path) -> list[Row]:
    """The pairs of a file, of each prompt the first one whose responses differ."""
    rows = read(data / "preferences" / "pairs.jsonl")
    first = {row["prompt"]: row for row in reversed(rows) if row["chosen"] != row["rejected"]}
    return list(first.values())


def asked(data: Path) -> list[Row]:
    """Prompts for own replies, each with the reference that only the judge reads."""
    first = {row["prompt"]: row["response"] for row in reversed(read(data / "sft" / "instructions.jsonl"))}
    return [
        {"id": f"prompt-{number}", "prompt": prompt, "reference": response}
        for number, (prompt, response) in enumerate(first.items())
    ]


def part(rows: Sequence[Row], seed: int, learned: int, unseen: int) -> tuple[list[Row], list[Row]]:
    """Some rows to learn from, which depend on the seed, and some held-out ones, which do not."""
    tasks = to_tasks([{"id": str(place), "prompt": row["prompt"]} for place, row in enumerate(rows)])
    kept, held_out = hold_out(tasks, HELD_OUT["held_out"], int(HELD_OUT["split_seed"]))
    of_side = [[rows[int(task["id"])] for task in side] for side in (kept, held_out)]
    return shuffled(of_side[0], seed, "preferences")[:learned], shuffled(of_side[1], 0, "preferences")[:unseen]


def sides(rows: Sequence[Row]) -> tuple[list[Task], list[Task]]:
    """The rows as training splits them."""
    tasks = to_tasks(rows, convert=to_item, split_seed=int(HELD_OUT["split_seed"]))
    kept, held_out = hold_out(tasks, HELD_OUT["held_out"], int(HELD_OUT["split_seed"]))
    return list(kept), list(held_out)


def by_prompt(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Rollouts of one prompt beside each other, in the order in which they were sampled."""
    found: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(str(rollout.task["id"]), []).append(rollout)
    return [found[name] for name in sorted(found)]


def comparison_row(rollouts: Sequence[Rollout], gap: float) -> Row:
    """A row of preferences: all replies to a prompt, and the comparisons whose marks differ by more than `gap`."""
    task = rollouts[0].task
    texts = [rollout.text for rollout in rollouts]
    marks = [mark(text, task["reference"]) for text in texts]
    wins = [(a, b) if marks[a] > marks[b] else (b, a) for a, b in combinations(range(len(texts)), 2)]
    return {
        "prompt": task["prompt"], "responses": texts, "stops": [str(rollout.stop) for rollout in rollouts],
        "comparisons": [list(pair) for pair in wins if marks[pair[0]] - marks[pair[1]] > gap], "marks": marks,
    }  # fmt: skip


# -- measures ----------------------------------------------------------------------------------------------------------


def evaluations(done: Run) -> tuple[dict[str, float], dict[str, float]]:
    """The run's own evaluations on held-out rows, before training and after it, without the prefix of their names."""
    found = [
        {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
        for metrics in done.metrics
    ]
    first, *_, last = (figures for figures in found if figures)
    return first, last


def before_and_after(done: Run) -> Figures:
    """Held-out accuracy of a policy's implicit reward, and log-probabilities of both sides, before and after."""
    found = {}
    for when, figures in zip(("before", "after"), evaluations(done), strict=True):
        found[f"accuracy {when}"] = figures["accuracy"]
        for side in ("chosen", "rejected"):
            found[f"{side} {when}"] = figures[f"logp/{side}"]
    return found


def course(done: Run) -> list[dict[str, float]]:
    """Of every step of PPO: the reward model's score, the judge's mark, KL from the start (nats a reply), tokens."""
    return [
        {
            "step": metrics["step"],
            "score": metrics["reward"],
            "mark": metrics["reward/judge"],
            "kl": metrics["kl"] * metrics["length"],
            "tokens": metrics["length"],
            "explained": metrics["explained_variance"],
        }
        for metrics in done.metrics
        if "reward" in metrics
    ]


def told(rollout: Rollout) -> dict[str, Any]:
    """A reply for the page."""
    marked = mark(rollout.text, rollout.task["reference"])
    return {"prompt": rollout.task["prompt"], "reply": rollout.text.strip(), "mark": marked, "score": rollout.reward}


# -- the page ----------------------------------------------------------------------------------------------------------


def page(study: Study) -> list[str]:
    """The part of the page that the recipe writes."""
    compared = [figures["comparisons"] for figures in study.figures(OWN)]
    judged = {
        "greedy mark": "judge's score, greedy", "sampled mark": "judge's score, sampled",
        "sampled mark wins": "judge prefers it", "sampled score wins": "reward model prefers it",
        "greedy tokens": "tokens, greedy", "sampled ended": "ended by itself",
    }  # fmt: skip
    scored = {
        "accuracy": "accuracy", "before": "before training", "bag": "bag of words", "longer": "longer wins",
        "shorter": "shorter wins", "calibration": "calibration error", "minutes": "minutes",
    }  # fmt: skip
    likelihoods = {
        f"{name} {when}": f"{title}, {when}"
        for name, title in {"accuracy": "accuracy", "chosen": "chosen", "rejected": "rejected"}.items()
        for when in ("before", "after")
    }
    return [
        *study.head("preferences"),
        "Mean over seeds with its 95% interval (Student), then every seed. Reward models, accuracy on "
        "held-out comparisons:",
        "",
        *study.table((GIVEN, OWN), scored),
        "",
        "Comparisons of own replies, training and held-out: "
        + ", ".join(f"{learned} and {unseen}" for learned, unseen in compared)
        + ".",
        "",
        f"Policies on held-out prompts: the judge's score, and how often a sampled reply ({SAMPLED} a prompt) is "
        "preferred to the start's, ties half:",
        "",
        *study.table(POLICIES, {**judged, "minutes": "minutes"}),
        "",
        "DPO, KTO and SimPO on held-out comparisons: accuracy of the score that the loss compares, and log-probability of "
        "a reply in nats:",
        "",
        *study.table(tuple(DIRECT), likelihoods),
        "",
        *steps_of_ppo(study),
        "",
        *replies(study),
    ]  # fmt: skip


def steps_of_ppo(study: Study) -> list[str]:
    """PPO along its steps, two steps a line, every seed."""
    columns = {"score": "reward model's score", "mark": "judge's score", "kl": "KL, nats a reply", "tokens": "tokens"}
    runs = [figures["steps"] for figures in study.figures("PPO")]
    lines = [
        "PPO on its training prompts, sampled, every seed:",
        "",
        f"| steps | {' | '.join(columns.values())} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for first in range(0, len(runs[0]), 2):
        some = [own[first : first + 2] for own in runs]
        cells = [", ".join(f"{mean([step[name] for step in own]):.3g}" for own in some) for name in columns]
        lines.append(f"| {some[0][0]['step']} to {some[0][-1]['step']} | {' | '.join(cells)} |")
    return lines


def replies(study: Study) -> list[str]:
    """The first greedy replies to held-out prompts, of the first seed, with the judge's score."""
    shown = ("start", "DPO", "PPO")
    lines = [
        "Greedy replies to held-out prompts, of the first seed, with the judge's score:",
        "",
        f"| prompt | {' | '.join(shown)} |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for same in zip(*(study.figures(arm)[0]["replies"] for arm in shown), strict=True):
        cells = [same[0]["prompt"], *(f"{reply['reply']} ({reply['mark']:.2f})" for reply in same)]
        lines.append("| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |")
    return lines


if __name__ == "__main__":
    run(main)
