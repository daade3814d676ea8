"""A reader of passages, pre-trained on worlds that are never seen twice, and the policy that reinforcement starts from.

The reader is shown a question with passages of a fresh world and writes down the facts that lead to the answer, and the
answer. It cannot know any fact by heart: each row has a world of its own. A gate checks whether it reads well enough.

The policy that reinforcement starts from is the reader after a little imitation of a careless searcher: one that often
answers without a search, asks vague questions, and does not ask again. So it knows the form of a search, and not when it
pays, nor what to ask. An answer that it has not read is right in the demonstration's own world, and a guess in
any other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from experiments.experiment import Numbers, Say, Settings
from experiments.harness import QUIET, checkpoint_of
from experiments.search import Play, direct, given, imitation, played, retrieved, searching
from experiments.world import (
    DIRECT,
    ENTITIES,
    RELATIONS,
    Fact,
    Question,
    World,
    ask,
    drawn_question,
    information,
    path_of,
    vocabulary,
)
from posttrain.config.inference import Evaluation
from posttrain.config.training import SFT
from posttrain.core.rollouts import Rollout
from posttrain.core.seeds import seed_of
from posttrain.core.types import Env, Invalid, Task, UserError
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import described
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.checkpoint import newest, resolve, step_of
from posttrain.training.training_run import run_training
from posttrain.training.verbs import evaluate

GATE = {1: 0.9, 2: 0.8}
"""Hops -> accuracy with gold passages given, below which nothing can be learned about searching."""

HOPS = {1: "one hop", 2: "two hops"}
GATED = 400  # questions of each kind that the gate asks
RECITED = 20  # facts of a row that teaches to look up
LARGER = 4.0  # times the usual deviation of new weights
CONTEXT = 256
LONGEST = 24  # tokens of a reply
Row = dict[str, Any]


@dataclass(frozen=True)
class Lesson:
    """A stage of the reader's training."""

    until: float  # which share of the rows
    names: int  # how many entities are subjects of what is recited
    asks: int  # one row of so many is a question; 0: none


LESSONS = (Lesson(0.3, 32, 0), Lesson(0.42, 4, 4), Lesson(0.48, 8, 4), Lesson(0.54, 16, 4), Lesson(1.0, 32, 2))
"""To look up by a relation is learned in some 300 steps of 32 rows if all names are there. To look up by subject and
relation at once is then learned in 200 with few names, and not in 400 with all; what holds of few soon holds of all."""


def fresh(*what: object) -> World:
    """A world that nobody else has."""
    return World(seed_of("world", *what))


# -- reading -----------------------------------------------------------------------------------------------------------


def thought(facts: list[Fact]) -> str:
    """The facts that were read, in the order of the chain."""
    return "<think>" + ".".join(map(str, facts)) + "</think>"


def answered(facts: list[Fact]) -> str:
    """The reply that ends with the last of these facts."""
    return f"{thought(facts)}<answer> {facts[-1].object}</answer>"


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


def reciting_row(world: World, draw: random.Random, names: int = len(ENTITIES)) -> Row:
    """Passages that share subjects and relations, and a long list of them, each as often as it comes.

    Every line is a lesson in looking up by subject and relation together, where a question holds one or two. The
    subjects are among the first `names` entities.
    """
    subjects = draw.sample(ENTITIES[:names], draw.randint(2, 3))
    relations = draw.sample(RELATIONS[:names], draw.randint(2, 3))
    facts = [world.fact(subject, relation) for subject in subjects for relation in relations]
    facts = draw.sample(facts, min(len(facts), 6))
    return imitation(information(facts), thought(draw.choices(facts, k=RECITED)))


def lessons(total: int) -> Iterator[Row]:
    """Without end, for a run of `total` rows in the stages of `LESSONS`; each row has a world of its own."""
    draw = random.Random("reading")
    for number in count():
        lesson = next((lesson for lesson in LESSONS if number < lesson.until * total), LESSONS[-1])
        asks = lesson.asks and number % lesson.asks == 0
        world = fresh("reading", number)
        yield reading_row(world, draw) if asks else reciting_row(world, draw, lesson.names)


def practice() -> Iterator[Row]:
    """Without end: questions alone, each with a world of its own."""
    draw = random.Random("practice")
    for number in count():
        yield reading_row(fresh("practice", number), draw)


def reader(settings: Settings, folder: Path, say: Say) -> str:
    """The checkpoint of the reader: the one of the setting `reader`, or one made in `folder`, once for all seeds.

    It has lessons, and then practises.
    """
    if settings["reader"]:
        return str(resolve(settings["reader"]))
    steps, practised = settings["lesson_steps"], settings["practice_steps"]
    size = f"{settings['reader_hidden']}-{settings['reader_layers']}-{steps}"
    first, start = folder / f"lessons-{size}", folder / f"untrained-{size}"
    if not first.exists():
        say(f"  reader: {32 * steps + 64 * practised:,} worlds to read in, once for all seeds")
        untrained(start, vocabulary(), settings["reader_hidden"], settings["reader_layers"], CONTEXT)
    taught = _read(first, str(start), steps, 32, 2e-3, lambda: lessons(32 * steps))
    return _read(folder / f"reader-{size}-{practised}", taught, practised, 64, 1e-3, practice)


def _read(out: Path, start: str, steps: int, rows: int, lr: float, make: Callable[[], Iterator[Row]]) -> str:
    """The checkpoint of a run on these rows: of one that is finished, or begun, or gone on with."""
    if (made := newest(out, print)) is not None and step_of(made) == steps:
        return str(made)
    config = SFT(
        tasks="generated", model=start, out=str(out), seed=0, warmup=50, betas=(0.9, 0.95), tokens_per_microbatch=4096,
        save_every=500, keep=1, quiet=True, threads=1, resume=out.exists(), steps=steps, rows=rows, lr=lr,
    )  # fmt: skip
    return checkpoint_of(run_training(config, make))


def untrained(folder: Path, tokenizer: Tokenizer, hidden: int, layers: int, context: int) -> None:
    """Write a new model. The usual weights, normal(0, 0.02), are made for a width of 768: at 128 all attention begins
    nearly uniform and stays so for thousands of steps, so here they are larger, and queries and keys are normalised."""
    model = new_decoder(
        DecoderConfig(
            vocab=tokenizer.vocab_size, hidden=hidden, layers=layers, heads=4, kv_heads=4, head_size=hidden // 4,
            intermediate=-(-hidden * 8 // 96) * 32, context=context, tied=True, qk_norm=True,
        ),
        seed=0,
    )  # fmt: skip
    assert tokenizer.eos_id is not None
    model.eos_ids = (tokenizer.eos_id,)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(LARGER)
    model.source = described(model, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    model.save(folder)
    tokenizer.save(folder)


def with_gold(task: Task) -> Play:
    """The environment of the gate: the passages are in the task."""
    return (yield from given(task, [Fact(*words) for words in task["passages"]]))


def gate(checkpoint: str, seed: int) -> Numbers:
    """Accuracy with gold passages given, in worlds never seen, by hops. Raises UserError below `GATE`."""
    found: Numbers = {}
    for hops, least in GATE.items():
        draw = random.Random(f"gate {seed} {hops}")
        tasks = []
        for number in range(GATED):
            world, question = fresh("gate", seed, hops, number), drawn_question(hops, draw)
            passages = [[f.subject, f.relation, f.object] for f in gold(world, question, draw)]
            tasks.append({**world.task(question), "passages": passages})
        accuracy = mean_reward(play(checkpoint, tasks, with_gold, seed, 1))
        if accuracy < least:
            raise UserError(
                f"the reader answers {accuracy:.2f} of the questions of {HOPS[hops]} with gold passages "
                f"given, and must answer {least} before anything is learned about searching: raise "
                "--settings.practice-steps"
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
    """A scripted policy: one episode of it. It searches, goes on and asks again as often as in the settings."""

    def __init__(self, task: Task, draw: random.Random, settings: Settings) -> None:
        self.path, self.question = path_of(task), task["question"]
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
        """The name of the setting for how often it searches now."""
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
        env: Env = searching if kind < 4 else retrieved if kind == 4 else direct
        if kind > 5:
            rows.append(reading_row(world, draw))
        else:
            rows += played(env, task, Careless(task, draw, settings if kind < 4 else READS_ONLY))[0]
    return rows


READS_ONLY: Settings = {"searches": 0.0, "goes_on": 0.0, "asks_again": 0.0}


def imitate(checkpoint: str, rows: list[Row], folder: Path, seed: int, epochs: float, lr: float) -> str:
    """The checkpoint after some passes over these rows."""
    config = SFT(
        tasks="generated", model=checkpoint, out=str(folder), seed=seed, epochs=epochs, rows=64, lr=lr, warmup=10,
        betas=(0.9, 0.95), tokens_per_microbatch=4096, **QUIET,
    )  # fmt: skip
    return checkpoint_of(run_training(config, rows))


def starting_policy(checkpoint: str, folder: Path, seed: int, settings: Settings) -> str:
    """The reader after imitation of the careless searcher."""
    rows = searching_rows(settings["demonstrations"], seed, settings)
    return imitate(checkpoint, rows, folder, seed, 1.0, settings["imitation_lr"])


# -- playing -----------------------------------------------------------------------------------------------------------


def play(checkpoint: str, tasks: list[Task], env: Env, seed: int, samples: int) -> list[Rollout]:
    """Episodes of a policy, sampled at temperature 1."""
    config = Evaluation(
        tasks="generated", env="world", model=checkpoint, samples=samples, seed=seed, max_tokens=LONGEST, env_workers=0,
        threads=1, success=1.0,
    )  # fmt: skip
    return evaluate.evaluate(config, tasks, env).rollouts


def mean_reward(rollouts: list[Rollout]) -> float:
    """Exact match."""
    rewards = [r.reward for r in rollouts if not isinstance(r.reward, Invalid)]
    assert len(rewards) == len(rollouts), "exact match can always be told"
    return sum(rewards) / len(rewards)
