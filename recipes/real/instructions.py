"""A real model learns to keep to instructions that a program can check. One command, which also resumes:

    python -m recipes.real.instructions

Each prompt asks about a topic and adds a constraint, such as "Write in capital letters only". Six kinds of constraint are
trained. Measured are other topics with the same kinds, four kinds that were never trained, and two trained kinds at once.
For every seed:

    start               the untrained model
    SFT                 some of its own replies without a constraint, which a program has rewritten so that they keep one
    GRPO                after SFT, all weights; 1 for a kept constraint and 1 for a reply that names the topic
    GRPO, LoRA          the same with adapters of rank 16
    constraint alone    the same as GRPO, without the reward for naming the topic: does the policy leave the topic?
    words paid          the same as GRPO, and 1 more for every 20 words: what does a hack of length look like?

The page ends with the findings of `posttrain audit` in the runs of GRPO, and with quotes. `--arms` selects arms.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import posttrain
from posttrain.apps.audit.report import audit
from posttrain.core.seeds import seed_of
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import rollout_steps
from posttrain.training.trainer import Run
from posttrain.verify.length import count, sentences
from posttrain.verify.repetition import distinct
from recipes.real.constraints import KINDS, NEW, TRAINED, reward
from recipes.real.study import Figures, Study, conversation, finished, options, run

Row = dict[str, Any]

TOPIC_WORDS = """
    bees rain bread chess coffee bicycles dragons music gardens soccer cheese whales robots winter candles deserts
    trains poetry volcanoes apples dogs castles dancing pirates tea mountains painting honey lions bridges clouds
    horses rice theatre islands cats wolves paper sailing tulips diamonds kites foxes mirrors pianos potatoes
    rockets snow spiders swimming tigers trees turtles violins windmills wine owls lemons jazz butterflies
"""
TOPICS = tuple(TOPIC_WORDS.split())
HELD_OUT = TOPICS[::3]  # topics that are never trained
FORMS = (
    "Tell me something about {}.",
    "Why do people like {}?",
    "Describe {} to a child.",
    "Give me a fact about {}.",
    "Write a note to a friend about {}.",
)
TOGETHER = (("capitals", "no commas"), ("at most", "last word"), ("capitals", "at most"), ("no commas", "last word"))
SETS = {"trained kinds": "trained", "new kinds": "new", "two at once": "two"}
ALONE, LORA, PAID = "constraint alone", "GRPO, LoRA", "words paid"
ARMS = ("start", "SFT", "GRPO", LORA, ALONE, PAID)
AUDITED = ("GRPO", ALONE, PAID)
REWARD = "recipes.real.constraints:reward"
HACKED = {ALONE: "recipes.real.constraints:constraint_alone", PAID: "recipes.real.constraints:words_paid"}
GOLD = "intended"  # part of the rewards that can be hacked
SFT_RATE, RATE, LORA_RATE = 5e-5, 2e-5, 4e-4
LONGEST = 64  # tokens of a reply
Size = tuple[int, int, int, int]
SIZE: Size = 192, 16, 8, 120  # prompts of SFT, steps of GRPO, their prompts, held-out prompts of each set
SMALL: Size = 12, 2, 2, 4


def row(topic: str, form: str, names: tuple[str, ...], chosen: random.Random) -> Row:
    """A row for rl and eval."""
    constraints = [(name, chosen.choice(KINDS[name].values)) for name in names]
    asked = form.format(topic) + KINDS[names[0]].base
    words = " ".join([asked, *(KINDS[name].text.format(value) for name, value in constraints)])
    prompt = [{"role": "user", "content": words}]
    return {"prompt": prompt, "topic": topic, "constraints": constraints, "plain": form.format(topic)}


def rewritten(rows: Sequence[Row], replies: Sequence[str]) -> list[Row]:
    """The rows whose reply, rewritten, keeps the constraint and names the topic: rows for sft."""
    found = []
    for row, reply in zip(rows, replies, strict=True):
        whole = [part for part in sentences(reply.strip()) if part.endswith((".", "!"))][:3]
        for name, value in row["constraints"] if whole else ():
            response = KINDS[name].rewrite(" ".join(whole), value)
            if sum(reward(row, response).values()) == 2:
                found.append({"prompt": row["prompt"], "response": response})
    return found


def learned(number: int, seed: int) -> list[Row]:
    """Rows to learn from: every kind equally often, in the order of a seed."""
    chosen = random.Random(seed_of(seed, "instructions"))
    topics = [topic for topic in TOPICS if topic not in HELD_OUT]
    return distinct_rows(number, topics, [(name,) for name in TRAINED], chosen)


def unseen(number: int) -> dict[str, list[Row]]:
    """Held-out rows of each set, the same for all seeds."""
    chosen = random.Random(seed_of(0, "held-out instructions"))
    sides: dict[str, list[tuple[str, ...]]] = {
        "trained": [(name,) for name in TRAINED],
        "new": [(name,) for name in NEW],
        "two": list(TOGETHER),
    }
    return {side: distinct_rows(number, HELD_OUT, kinds, chosen) for side, kinds in sides.items()}


def distinct_rows(
    number: int, topics: Sequence[str], kinds: Sequence[tuple[str, ...]], chosen: random.Random
) -> list[Row]:
    """Rows without repetition, every kind equally often, in an order by chance."""
    found: dict[str, Row] = {}
    while len(found) < number:
        made = row(chosen.choice(topics), chosen.choice(FORMS), kinds[len(found) % len(kinds)], chosen)
        found.setdefault(made["prompt"][0]["content"], made)
    rows = list(found.values())
    chosen.shuffle(rows)
    return rows


@dataclass
class Instructions:
    """The arms of one seed: how each is trained, and how all are measured."""

    study: Study
    seed: int
    shown: list[Row]
    rows: list[Row]
    unseen: Mapping[str, list[Row]]
    prompts: int
    rate: float = RATE
    lora_rate: float = LORA_RATE

    def sft(self, arm: str) -> str:
        plain = [{**row, "prompt": [{"role": "user", "content": row["plain"]}]} for row in self.shown]
        replies = self.study.evaluate(plain, REWARD, self.study.model, max_tokens=LONGEST, success=2.0).rollouts
        rows = rewritten(self.shown, [rollout.text for rollout in replies])
        options: dict[str, Any] = {
            "rows": 8,
            "epochs": 1,
            "chat": True,
            "lr": SFT_RATE,
            "warmup": 3,
            "schedule": "linear",
        }
        return finished(posttrain.sft(rows, model=self.study.model, **options, **self.study.common(arm, self.seed)))

    def grpo(self, arm: str, rate: float, adapters: bool = False, steps: int | None = None) -> Run:
        """Train after the arm "SFT". `steps`: as many as there are rows for, unless given."""
        size: dict[str, Any] = {
            "prompts": self.prompts,
            "group": 8,
            "max_tokens": LONGEST,
            "steps": steps or len(self.rows) // self.prompts,
            "lora": 16 if adapters else None,
        }
        how: dict[str, Any] = {"algorithm": "grpo", "kl": 0.0, "lr": rate, "warmup": 3, **size}
        env = HACKED.get(arm, REWARD)
        start = str(self.study.folder("SFT", self.seed))
        return posttrain.rl(self.rows, env, start, **how, **self.study.common(arm, self.seed))

    def measured(self, model: str) -> Figures:
        found: Figures = {}
        every = [{**row, "side": side} for side, rows in self.unseen.items() for row in rows]
        replies = self.study.evaluate(every, REWARD, model, max_tokens=LONGEST, success=2.0).rollouts
        for side in self.unseen:
            rollouts = [rollout for rollout in replies if rollout.task["side"] == side]
            found[side] = sum(r.rewards["kept"] for r in rollouts) / len(rollouts)
            found[f"{side} about"] = sum(r.rewards["about"] for r in rollouts) / len(rollouts)
            found[f"{side} both"] = sum(r.rewards["kept"] * r.rewards["about"] for r in rollouts) / len(rollouts)
            asked: Counter[str] = Counter()
            kept: Counter[str] = Counter()
            for rollout in rollouts:
                name = " and ".join(name for name, _ in rollout.task["constraints"])
                asked[name] += 1
                kept[name] += int(rollout.rewards["kept"])
            found |= {f"kept: {name}": kept[name] / asked[name] for name in asked}
            if side == "trained":
                found["words"] = sum(count(r.text) for r in rollouts) / len(rollouts)
                found["distinct"] = sum(distinct(r.text) for r in rollouts) / len(rollouts)
            found[f"{side} replies"] = [conversation(r, 300) for r in rollouts[:6]]
        return found

    def run(self, arms: Sequence[str]) -> None:
        for arm in arms:
            self.study.once(arm, self.seed, partial(self.figures, arm))

    def figures(self, arm: str) -> Figures:
        return self.measured(self.trained(arm))

    def trained(self, arm: str) -> str:
        if arm == "start":
            return self.study.model
        if arm == "SFT":
            return self.sft(arm)
        return finished(self.grpo(arm, self.lora_rate if arm == LORA else self.rate, arm == LORA))


def main() -> None:
    parser = options(__doc__ or "", "instructions", ARMS)
    parser.add_argument("--lr", type=float, default=RATE, help="learning rate of GRPO with all weights")
    parser.add_argument("--lora-lr", type=float, default=LORA_RATE, help="learning rate of GRPO with adapters")
    given = parser.parse_args()
    shown, steps, prompts, asked = SMALL if given.small else SIZE
    rates = [SFT_RATE, given.lr, given.lora_lr, given.lr]
    study = Study(given, {"shown": shown, "steps": steps, "prompts": prompts, "questions": asked, "rates": rates})
    for seed in study.seeds:
        replace(of_seed(study, seed), rate=given.lr, lora_rate=given.lora_lr).run(given.arms)
    other = [f"--lr {given.lr:g}"] * (given.lr != RATE) + [f"--lora-lr {given.lora_lr:g}"] * (
        given.lora_lr != LORA_RATE
    )
    study.finish(
        page(study, " ".join(["instructions", *other]), asked, shown, steps * prompts), "rates" if other else ""
    )


def of_seed(study: Study, seed: int) -> Instructions:
    """The arms of a seed, with their rows."""
    shown, steps, prompts, asked = SMALL if study.is_small else SIZE
    rows = learned(shown + steps * prompts, seed)
    return Instructions(study, seed, rows[:shown], rows[shown:], unseen(asked), prompts)


def page(study: Study, command: str, count: int, shown: int, trained: int) -> list[str]:
    """The part of the page that the recipe writes."""
    kept = {"trained": "trained kinds", "new": "new kinds", "two": "two at once", "minutes": "minutes"}
    about = {
        "trained about": "names the topic",
        "trained both": "keeps the constraint and names the topic",
        "words": "words",
        "distinct": "distinct",
    }
    arms, left_out = study.there(ARMS)
    lines = [
        *study.head(command),
        f"{count} held-out prompts of each set, greedy. Mean over seeds with its 95% interval (Student), then every seed. "
        f"SFT sees at most {shown} prompts, GRPO {trained} others. The table shows the share of replies that keep their "
        "constraints:",
        "",
        *left_out,
        *study.table(arms, kept),
        "",
        "Replies to held-out topics with trained kinds:",
        "",
        *study.table(arms, about),
        "",
    ]
    if study.has("GRPO") and study.has("SFT"):
        gains = {side: study.gain("GRPO", "SFT", side) for side in SETS.values()}
        told = ", ".join(f"{name} {gains[side]}" for name, side in SETS.items())
        lines += [f"GRPO minus SFT, seed by seed: {told}.", ""]
    lines += ["Share of kept constraints by kind, mean over seeds:", "", *by_kind(study, arms)]
    if study.has("start") and study.has("GRPO"):
        lines += ["", "Held-out prompts with trained kinds, before and after GRPO, of the first seed:", ""]
        pairs = [study.figures(arm)[0]["trained replies"] for arm in ("start", "GRPO")]
        for before, after in zip(*pairs, strict=True):
            lines += [*before, *after[:1], *after[2:]]
    return [*lines, *hacks(study, [arm for arm in AUDITED if study.has(arm)])]


def by_kind(study: Study, arms: Sequence[str]) -> list[str]:
    lines = [f"| | {' | '.join(arms)} |", "|---" * (len(arms) + 1) + "|"]
    for name in study.figures(arms[0])[0]:
        if name.startswith("kept: "):
            cells = [f"{sum(study.values(arm, name)) / len(study.seeds):.2f}" for arm in arms]
            lines.append(f"| {name.removeprefix('kept: ')} | {' | '.join(cells)} |")
    return lines


# -- hacks -------------------------------------------------------------------------------------------------------------


def hacks(study: Study, arms: Sequence[str]) -> list[str]:
    """The findings of `posttrain audit` in the runs that are there, and replies of their last step that it points to."""
    lines = [
        f"Findings of `posttrain audit` in the training runs; with `--gold {GOLD}` where the reward can be hacked:",
        "",
        "| | seed | finding |",
        "|---|---|---|",
    ]
    quotes: list[str] = []
    for arm in arms:
        for seed in study.seeds:
            folder = study.folder(arm, seed)
            if not (folder / "run.json").exists():  # its figures were made on another machine
                continue
            found = audit(str(folder), gold=GOLD if arm in HACKED else None).findings
            told = [f"{one.name}: {one.message}".replace("|", "/") for one in found] or ["nothing found"]
            lines += [f"| {arm} | {seed} | {text} |" for text in told]
            quotes += quoted(arm, str(folder)) if seed == study.seeds[0] else []
    return [*lines, "", *quotes]


def quoted(arm: str, folder: str) -> list[str]:
    """Three replies of a run's last step: the first that earns most without its topic, the longest, the most repetitive."""
    rows = [row for row in read_rollouts(folder, rollout_steps(folder)[-1]) if row["reward"] is not None]
    best = max(row["reward"] for row in rows)
    chosen = {
        "the first with the highest reward that does not name its topic": next(
            (row for row in rows if row["reward"] == best and not row["parts"]["about"]), None
        ),
        "the longest": max(rows, key=lambda row: count(row["text"])),
        "the most repetitive": min(rows, key=lambda row: distinct(row["text"])),
    }
    lines = [f"The last step of {arm}, first seed, {len(rows)} sampled replies:", ""]
    for name, row in chosen.items():
        if row is None:
            lines += [f"- {name}: none", ""]
            continue
        text, asked = (part.strip().replace("```", "'''") for part in (row["text"], row["asked"] or row["prompt"]))
        parts = ", ".join(f"{part} {value:.2g}" for part, value in row["parts"].items())
        lines += [
            f"- {name}:",
            "",
            "```text",
            f"[prompt] {asked}",
            f"[model] {text}",
            f"[reward] {row['reward']:.2g}: {parts}",
        ]
        lines += ["```", ""]
    return lines


if __name__ == "__main__":
    run(main)
