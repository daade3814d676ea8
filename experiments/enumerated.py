"""A task so small that every reply can be listed: exact distributions of a policy, and the optimum that a penalty has.

Prompts are digits, replies up to a few letters, and a table has the worth of each reply to each prompt. The optimum of
E[r] - beta KL(pi || ref) is pi*(y) proportional to ref(y) exp(r(y) / beta). A policy's shortfall is
beta KL(pi || pi*), for every pi.

    P    prompts    Y    replies: token sequences that end with the end token or are of the greatest length
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from posttrain.core.batch import Layout
from posttrain.core.protocols import Model
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, Reply, StopReason, Task
from posttrain.envs.play.player import Episode, Player
from posttrain.models.tokenizer.tokenizer import Tokenizer

LETTERS = "abc"
PROMPTS = "01"
LONGEST = 2  # letters of a reply
ITERATIONS = 120
WORTHLESS = -3.0  # whatever is not one or more letters: three standard deviations below the mean of those


def demonstrations(count: int, seed: int) -> list[Task]:
    """Random replies of 1 or 2 letters; each prompt has a letter that comes first more often."""
    draw = random.Random(f"demonstrations {seed}")
    rows = []
    for number in range(count):
        own = number % len(PROMPTS)
        said = [draw.choice((*LETTERS, LETTERS[own])), *draw.choices(LETTERS, k=draw.randrange(LONGEST))]
        rows.append({"id": str(number), "prompt": PROMPTS[own], "response": "".join(said)})
    return rows


def worths(seed: int) -> dict[tuple[str, str], float]:
    """(prompt, reply) -> what a reply of letters is worth: a draw for prompt and first letter, plus one for the reply.

    Both are from N(0, 1/2). A table of independent draws for all would be learned too slowly to see where it ends.
    """
    draw = random.Random(f"worths {seed}")
    replies = ["".join(said) for size in range(1, LONGEST + 1) for said in product(LETTERS, repeat=size)]
    own = {reply: draw.gauss(0, 0.5**0.5) for reply in replies}
    first = {(prompt, letter): draw.gauss(0, 0.5**0.5) for prompt in PROMPTS for letter in LETTERS}
    return {(prompt, reply): own[reply] + first[prompt, reply[0]] for prompt in PROMPTS for reply in replies}


def sequences(vocabulary: int, end: int, longest: int) -> list[tuple[int, ...]]:
    """Every reply of at most `longest` tokens: it ends with `end`, or has that many tokens and was cut off."""
    others = [token for token in range(vocabulary) if token != end]
    ended = [(*said, end) for size in range(longest) for said in product(others, repeat=size)]
    return ended + list(product(others, repeat=longest))


@dataclass(frozen=True)
class World:
    """Prompts, all replies of at most `longest` tokens, and what they are worth."""

    longest: int
    replies: Sequence[tuple[int, ...]]  # [Y]
    texts: Sequence[str]  # [Y], without the end token
    worth: Tensor  # float64 [P, Y]
    layout: Layout  # every prompt with every beginning of a reply that may go on
    at: Tensor  # int64, the tokens of the layout after which a reply's token may stand
    place: Tensor  # int64 [P, Y, longest], of each token's distribution among `at`
    token: Tensor  # int64 [Y, longest]
    there: Tensor  # bool [Y, longest], whether the reply has that many tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer, end: int, worth: dict[tuple[str, str], float], longest: int) -> World:
        vocabulary = tokenizer.vocab_size
        replies = sequences(vocabulary, end, longest)
        texts = [tokenizer.decode([token for token in reply if token != end]) for reply in replies]
        others = [token for token in range(vocabulary) if token != end]
        starts = [tuple(tokenizer.encode(prompt, start=True)) for prompt in PROMPTS]
        laid = [(own, said) for own in range(len(starts)) for said in product(others, repeat=longest - 1)]
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        at, first, tokens = list[int](), list[int](), list[int]()
        for own, said in laid:
            first.append(len(tokens))
            tokens += [*starts[own], *said]
            for size in range(longest):
                if (own, said[:size]) not in known:
                    known[own, said[:size]] = len(at)
                    at.append(first[-1] + len(starts[own]) - 1 + size)
        sizes = [len(starts[own]) + longest - 1 for own, _ in laid]
        position = torch.cat([torch.arange(size) for size in sizes])
        layout = Layout(torch.tensor(tokens), position, tuple(first), tuple(sizes), (-1,) * len(laid))
        rows = [
            [[known[own, reply[:k]] if k < len(reply) else 0 for k in range(longest)] for reply in replies]
            for own in range(len(starts))
        ]
        padded = [[*reply, *[0] * (longest - len(reply))] for reply in replies]
        there = [[k < len(reply) for k in range(longest)] for reply in replies]
        value = [[worth.get((prompt, text), WORTHLESS) for text in texts] for prompt in PROMPTS]
        return cls(
            longest, replies, texts, torch.tensor(value, dtype=torch.float64), layout, torch.tensor(at), torch.tensor(rows),
            torch.tensor(padded), torch.tensor(there),
        )  # fmt: skip

    def each(self, model: Model) -> Tensor:
        """Log-probability of every token of every reply, float64 [P, Y, longest]; 0 behind a reply's end."""
        logits = model.head.logits(model.hidden(self.layout, self.at)).double().log_softmax(-1)
        return logits[self.place, self.token] * self.there

    @torch.no_grad()
    def logp(self, model: Model) -> Tensor:
        """Log-probability of every reply, float64 [P, Y]; the probabilities of a prompt's replies sum to 1."""
        return self.each(model).sum(-1)

    def reward(self) -> Callable[[Task, Reply], float]:
        """The table as an environment's reward."""
        place = {text: number for number, text in enumerate(self.texts)}

        def worth(task: Task, reply: Reply) -> float:
            return (
                self.worth[PROMPTS.index(task["prompt"]), place[str(reply)]].item()
                if str(reply) in place
                else WORTHLESS
            )

        return worth

    def player(self) -> Callable[..., Player]:
        """Return a class of players that draw replies from the list with the policy's probabilities, much
        faster than an engine."""

        def made(*given: Any) -> Player:
            return _Drawing(*given, world_of=self)  # type: ignore[misc]

        return made


@dataclass(frozen=True)
class _Drawing(Player):
    """Draws replies of the policy from the list of all of them."""

    world_of: World | None = None

    def play(self, episodes: Sequence[Episode], plan: Any = None) -> list[Rollout]:
        world, engine = self.world_of, cast(Any, self.engine)
        assert world is not None
        with torch.no_grad():
            each = world.each(engine.model).numpy()
        total = each.sum(-1)
        chance = np.exp(total - np.logaddexp.reduce(total, -1, keepdims=True)).cumsum(-1)
        found = []
        for episode in episodes:
            prompt = episode.task["prompt"]
            row = PROMPTS.index(prompt)
            at = min(int(chance[row].searchsorted(random.Random(episode.seed).random())), len(world.replies) - 1)
            reply = world.replies[at]
            stop = StopReason.EOS if reply[-1] in engine.model.eos_ids else StopReason.LENGTH
            transcript = Transcript()
            transcript.observe(self.tokenizer.encode(prompt, start=True))
            logp = each[row, at, : len(reply)].tolist()
            transcript.sample(Completion(0, reply, logp, world.texts[at], stop, engine.version))
            worth = world.worth[row, at].item()
            found.append(Rollout(episode.task, episode.group, [transcript], worth, stop=stop, text=world.texts[at]))
        return found


# -- optima ------------------------------------------------------------------------------------------------------------


def normalised(logs: Tensor) -> Tensor:
    """Unnormalised log-probabilities [P, Y] -> log-probabilities."""
    return logs - logs.logsumexp(-1, keepdim=True)


def kl(one: Tensor, other: Tensor) -> float:
    """KL(one || other) of log-probabilities [P, Y], in nats, a mean over the prompts."""
    return (one.exp() * (one - other)).sum(-1).mean().item()


def optimum(ref: Tensor, worth: Tensor, beta: float) -> Tensor:
    """The optimum of E[r] - beta KL(pi || ref)."""
    return normalised(ref + worth / beta)


def scaled_optimum(ref: Tensor, worth: Tensor, beta: float, group: int = 16) -> Tensor:
    """Where rewards are centred and divided by the standard deviation of their group, and the penalty is not.

    With a(y) the mean advantage of reply y in a group of `group` replies of pi, the mean gradient is 0 where pi is
    proportional to ref exp(a / beta). Found by iteration, a from 4,000 random groups each time; the result is a mean over
    the last iterations.
    """
    generator = torch.Generator().manual_seed(0)
    policy, total = ref, torch.zeros_like(ref)
    for turn in range(ITERATIONS):
        gain = torch.zeros_like(ref)
        for row, own in enumerate(policy):
            drawn = torch.multinomial(own.exp(), 4_000 * group, replacement=True, generator=generator)
            reward = worth[row][drawn].view(-1, group)
            centred = reward - reward.mean(1, keepdim=True)
            advantage = (centred / (reward.std(1, keepdim=True) + 1e-6)).flatten()
            count = torch.bincount(drawn, minlength=len(own))
            gain[row] = torch.zeros_like(own).index_add_(0, drawn, advantage) / count.clamp_min(1)
            gain[row][count == 0] = advantage.min()  # too rare to be drawn
        policy = normalised(0.9 * policy + 0.1 * (ref + gain / beta))
        if turn >= ITERATIONS // 2:
            total += policy
    return normalised(total / (ITERATIONS - ITERATIONS // 2))


def forward_optimum(ref: Tensor, worth: Tensor, beta: float) -> Tensor:
    """The optimum of E[r] - beta KL(ref || pi): pi = beta ref / (l - r), l such that the probabilities sum to 1."""
    low = worth.amax(-1, keepdim=True)
    high = low + beta + (low - worth.amin(-1, keepdim=True))
    for _ in range(200):
        middle = (low + high) / 2
        above = (beta * ref.exp() / (middle - worth)).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return normalised(ref - (high - worth).log())


def identity_optimum(ref: Tensor, worth: Tensor, beta: float, among: Tensor) -> Tensor:
    """The optimum of IPO on pairs of replies `among` (bool [P, Y]) that ref drew, with Bradley and Terry's labels.

    Its square loss is least where h(y) - h(y') is nearest to (2 p(y > y') - 1) / (2 beta): h(y) = mean over y' of
    p(y > y') / beta up to a constant, and pi is proportional to ref exp(h).
    """
    drawn = normalised(ref.masked_fill(~among, -torch.inf)).exp()
    wins = torch.sigmoid(worth[:, :, None] - worth[:, None, :])
    mean = (wins * drawn[:, None, :]).sum(-1)
    return normalised(ref + mean / beta)
