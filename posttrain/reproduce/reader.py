"""A reader of passages, pre-trained on worlds that are never seen twice, and the policy that reinforcement starts from.

The reader is shown a question with passages of a fresh world and writes down the facts that lead to the answer, and the
answer. It cannot know any fact by heart: each row has a world of its own. A gate says whether it reads well enough.

The policy that reinforcement starts from is the reader after a little imitation of a careless searcher: one that often
answers without a search, asks vague questions, and does not ask again. So it knows the form of a search, and not when it
pays, nor what to ask. What it answers without having read it is right in the demonstration's own world, and a guess in
any other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from posttrain.config import SFT, Evaluation
from posttrain.reproduce.experiment import Numbers, Say, Settings
from posttrain.reproduce.harness import QUIET, checkpoint_of
from posttrain.reproduce.search import direct, imitation, played, retrieved, searching, single
from posttrain.reproduce.world import (
    DIRECT,
    ENTITIES,
    RELATIONS,
    Fact,
    Question,
    World,
    ask,
    asked,
    information,
    vocabulary,
)
from posttrain.runs.checkpoint import resolve
from posttrain.seeds import seed_of
from posttrain.training import evaluation, imitating
from posttrain.types import Env, Invalid, Rollout, Task, UserError

GATE = {1: 0.9, 2: 0.8}
"""Hops -> accuracy with gold passages given, below which nothing can be learned about searching."""

HOPS = {1: "one hop", 2: "two hops"}
GATED = 400  # questions of each kind that the gate asks
LONGEST = 24  # tokens of a reply
Row = dict[str, Any]


def fresh(*what: object) -> World:
    """A world that nobody else has."""
    return World(seed_of("world", *what))


# -- reading -----------------------------------------------------------------------------------------------------------


def thought(facts: list[Fact]) -> str:
    """What was read, in the order in which it leads on."""
    return "<think>" + ".".join(map(str, facts)) + "</think>"


def answered(facts: list[Fact]) -> str:
    """The reply that ends with the last of these facts."""
    return f"{thought(facts)}<answer> {facts[-1].object}</answer>"


def drawn_question(hops: int, draw: random.Random) -> Question:
    return Question(draw.choice(ENTITIES), tuple(draw.choice(RELATIONS) for _ in range(hops)))


def gold(world: World, question: Question, draw: random.Random) -> list[Fact]:
    """The facts that lead to the answer among others that have words of the question, in any order."""
    path = world.path(question)
    others = [world.fact(fact.subject, draw.choice(RELATIONS)) for fact in path]
    others += [world.fact(draw.choice(ENTITIES), fact.relation) for fact in path]
    others += world.find(f"{path[-1].subject} {path[-1].relation}")
    others = [fact for fact in dict.fromkeys(others) if fact not in path]
    shown = list(dict.fromkeys([*path, *draw.sample(others, draw.randint(1, min(4, len(others))))]))
    draw.shuffle(shown)
    return shown


def reading_row(world: World, draw: random.Random) -> Row:
    """A question with passages that answer it, and what is read there."""
    question = drawn_question(1 + draw.randrange(2), draw)
    prompt = ask(question, DIRECT) + information(gold(world, question, draw))
    return imitation(prompt, answered(world.path(question)))


def repeating_row(world: World, draw: random.Random) -> Row:
    """Passages, and the same ones in another order: every fact is a lesson in looking up, not the one asked for alone."""
    facts = gold(world, drawn_question(1 + draw.randrange(2), draw), draw)
    return imitation(information(facts), thought(draw.sample(facts, len(facts))))


def reading_rows() -> Iterator[Row]:
    """Without end; each has a world of its own. Half of them ask, half repeat: looking up is learned far sooner so."""
    draw = random.Random("reading")
    for number in count():
        make = repeating_row if number % 2 else reading_row
        yield make(fresh("reading", number), draw)


def reader(settings: Settings, folder: Path, say: Say) -> str:
    """The checkpoint of the reader: the one of the setting `reader`, or one made in `folder`, once for all seeds."""
    given = str(settings["reader"])
    if given:
        return str(resolve(given))
    sizes = {name: settings[f"reader_{name}"] for name in ("hidden", "layers", "steps", "rows", "lr")}
    out = folder / ("reader " + " ".join(f"{name} {value}" for name, value in sizes.items())).replace(" ", "-")
    config = SFT(
        tasks="generated", out=str(out), seed=0, context=256, tokenizer=str(out.with_name("vocabulary")), warmup=50,
        heads=4, betas=(0.9, 0.95), tokens_per_microbatch=4096, save_every=1000, keep=1, quiet=True, threads=1,
        resume=out.exists(), **sizes,
    )  # fmt: skip
    if not out.exists():
        say(f"  reader: {sizes['steps'] * sizes['rows']:,} worlds to read in, once for all seeds")
        vocabulary().save(out.with_name("vocabulary"))
    return checkpoint_of(imitating.sft(config, reading_rows))


def gate(checkpoint: str, seed: int) -> Numbers:
    """Accuracy with gold passages given, in worlds never seen, by hops. Raises UserError below `GATE`."""
    found: Numbers = {}
    for hops, least in GATE.items():
        draw = random.Random(f"gate {seed} {hops}")
        tasks, shown = [], {}
        for number in range(GATED):
            world, question = fresh("gate", seed, hops, number), drawn_question(hops, draw)
            tasks.append({**world.task(question), "id": str(number)})
            shown[str(number)] = gold(world, question, draw)
        accuracy = mean_reward(play(checkpoint, tasks, single(lambda task: shown[task["id"]]), seed, 1))  # noqa: B023
        if accuracy < least:
            raise UserError(
                f"the reader answers {accuracy:.2f} of the questions of {HOPS[hops]} with gold passages "
                f"given, and must answer {least} before anything is learned about searching: raise "
                "--settings.reader-steps"
            )
        found[HOPS[hops]] = accuracy
    return found


# -- searching ---------------------------------------------------------------------------------------------------------


def vague(fact: Fact, question: str, draw: random.Random, settings: Settings) -> str:
    """A query for a fact; a share `precise` names its subject and its relation, the others leave out or mistake a word."""
    if draw.random() < settings["precise"]:
        return f" {fact.subject} {fact.relation}"
    return draw.choice(
        [f" {fact.subject}", f" {fact.relation}", question.rstrip("?"), f" {fact.subject} {draw.choice(RELATIONS)}"]
    )


class Careless:
    """A scripted policy: one episode of it. It searches, goes on and asks again as often as the settings say."""

    def __init__(self, world: World, task: Task, draw: random.Random, settings: Settings) -> None:
        self.path, self.question = world.path(asked(task)), task["question"]
        self.draw, self.settings = draw, settings
        self.known = 0  # facts of the path that it has read
        self.searched = False

    def __call__(self, shown: str) -> str:
        before = self.known
        while self.known < len(self.path) and f"{self.path[self.known]}\n" in shown:
            self.known += 1
        if self.known == len(self.path) or self.draw.random() >= self.settings[self._wish(before)]:
            return answered(self.path)
        self.searched = True
        query = vague(self.path[self.known], self.question, self.draw, self.settings)
        return f"{thought(self.path[: self.known])}<search>{query}</search>"

    def _wish(self, before: int) -> str:
        """The name of the setting that says how often it searches now."""
        if not self.searched:
            return "searches"
        return "goes_on" if self.known > before else "asks_again"


def searching_rows(count: int, seed: int, settings: Settings) -> list[Row]:
    """Replies of so many episodes, each in a world of its own.

    Half of them are of the careless searcher; the others read what is given, what the question found, or nothing.
    """
    draw, rows = random.Random(f"searching {seed}"), list[Row]()
    for number in range(count):
        world = fresh("searching", seed, number)
        task = world.task(drawn_question(1 + draw.randrange(2), draw))
        kind = number % 8
        env: Env = searching(world) if kind < 4 else retrieved(world) if kind == 4 else direct()
        if kind > 5:
            rows.append(reading_row(world, draw))
        else:
            rows += played(env, task, Careless(world, task, draw, settings if kind < 4 else READS_ONLY))[0]
    return rows


READS_ONLY: Settings = {"searches": 0.0, "goes_on": 0.0, "asks_again": 0.0}


def imitate(checkpoint: str, rows: list[Row], folder: Path, seed: int, epochs: float, lr: float) -> str:
    """The checkpoint after some passes over these rows."""
    config = SFT(
        tasks="generated", model=checkpoint, out=str(folder), seed=seed, epochs=epochs, rows=64, lr=lr, warmup=10,
        betas=(0.9, 0.95), tokens_per_microbatch=4096, **QUIET,
    )  # fmt: skip
    return checkpoint_of(imitating.sft(config, rows))


def starting_policy(checkpoint: str, folder: Path, seed: int, settings: Settings) -> str:
    """The reader after imitation of the careless searcher."""
    rows = searching_rows(settings["demonstrations"], seed, settings)
    return imitate(checkpoint, rows, folder, seed, 1.0, settings["imitation_lr"])


# -- playing -----------------------------------------------------------------------------------------------------------


def play(checkpoint: str, tasks: list[Task], env: Env, seed: int, samples: int) -> list[Rollout]:
    """What a policy does, sampled at temperature 1."""
    config = Evaluation(
        tasks="generated", env="world", model=checkpoint, samples=samples, seed=seed, max_tokens=LONGEST, env_workers=0,
        threads=1, success=1.0,
    )  # fmt: skip
    return evaluation.evaluate(config, tasks, env).rollouts


def mean_reward(rollouts: list[Rollout]) -> float:
    """Exact match."""
    rewards = [r.reward for r in rollouts if not isinstance(r.reward, Invalid)]
    assert len(rewards) == len(rollouts), "exact match can always be told"
    return sum(rewards) / len(rewards)
