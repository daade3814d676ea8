"""The nouns of the house, with their shapes. No tensor is made here; torch is imported for type checking only.

Shape legend, used everywhere:

    L    tokens of one transcript
    T    tokens of one micro-batch, laid end to end without padding
    K    segments of one micro-batch (a segment is a run of tokens of one transcript, or a prompt that several share)
    N    scored tokens of one micro-batch: the tokens the policy sampled (in SFT: the tokens to imitate)
    S    rollouts of one optimizer batch, over all micro-batches and ranks
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

Task = dict[str, Any]
"""One dataset row. `task["id"]` names its group: all rollouts of one id are compared with each other.

Real example: {"id": "multiarith-1", "prompt": "Debby had 32 pieces ...", "answer": "39"}
"""


class UserError(ValueError):
    """A mistake of the user's. The message is one line that says the fix; the command line prints it and exits with 2."""


class StopReason(StrEnum):
    """Why a completion ended, as the engine saw it; never guessed afterwards from the last token."""

    EOS = "eos"  # sampled one of the model's end-of-sequence ids (which stays part of the sampled tokens)
    STOP = "stop"  # its text reached one of the stop strings of the request
    LENGTH = "length"  # spent its token budget: truncated
    CONTEXT = "context"  # filled the model's context window: truncated

    @property
    def truncated(self) -> bool:
        return self in (StopReason.LENGTH, StopReason.CONTEXT)


@dataclass(frozen=True)
class Invalid:
    """A reward that could not be computed. It is counted and left out of its group; it is never taken for 0."""

    reason: str


@dataclass(frozen=True)
class Turn:
    """What an environment shows the model next, and how the reply is to be sampled."""

    text: str | None = None  # appended as it stands
    messages: Sequence[Mapping[str, str]] | None = None  # or: chat messages, rendered by the tokenizer's template
    stop: tuple[str, ...] = ()  # stop strings; the reply ends with the one that was reached
    reward: float = 0.0  # reward of the step that led here (0: none)
    max_tokens: int | None = None  # budget of this reply; None: the run's


class Reply(str):
    """What the model said: the text of the sampled tokens up to and with the stop string, without the end-of-sequence token.

    It is a `str` for environments that only read it; `reply.stop` tells why it ended.
    """

    stop: StopReason

    def __new__(cls, text: str, stop: StopReason = StopReason.EOS) -> Reply:
        reply = super().__new__(cls, text)
        reply.stop = stop
        return reply

    def __reduce__(self) -> tuple[Any, ...]:
        return Reply, (str(self), self.stop)


Verdict = float | dict[str, float] | Invalid
"""What scores a reply. A dict names the parts of the reward: their sum is the reward, unless it has the key "reward"."""

Env = Callable[[Task], Generator["Turn | str", Reply, Verdict]]
"""A generator function: yields what the model should see, receives what it said, returns the reward."""

Reward = Callable[[Task, str], Verdict]
"""A plain function (task, reply) -> reward; it is lifted to an environment of one turn."""


@dataclass(frozen=True)
class Sampling:
    """How one completion is sampled. Its result depends on these fields, the prompt and the weights alone."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0  # token i is drawn with the uniform number (seed, i): independent of the rest of the batch


@dataclass(frozen=True)
class Completion:
    """What an engine returns for one request."""

    id: int
    tokens: Sequence[int]  # [L] sampled, a final end-of-sequence token included
    logp: Sequence[float]  # [L] under the distribution that sampled them (temperature, top-p, top-k applied)
    text: str  # cut after the stop string; without the end-of-sequence token
    stop: StopReason
    version: int  # of the weights that sampled it


class Transcript:
    """The token sequence of one episode. Append-only.

    A token becomes trainable through `sample` and through nothing else: masks are by provenance, never by token id.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.sampled: list[bool] = []  # [L]
        self.logp: list[float] = []  # one for each sampled token

    def observe(self, tokens: Iterable[int]) -> None:
        """Append what the policy was shown: prompt, tool reply, template. Never trained on."""
        before = len(self.tokens)
        self.tokens.extend(tokens)
        self.sampled.extend([False] * (len(self.tokens) - before))

    def sample(self, completion: Completion) -> None:
        """Append what the policy sampled (in SFT: what it is to imitate)."""
        assert len(completion.tokens) == len(completion.logp), "one log-probability per sampled token"
        self.tokens.extend(completion.tokens)
        self.sampled.extend([True] * len(completion.tokens))
        self.logp.extend(completion.logp)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_sampled(self) -> int:
        return len(self.logp)


@dataclass
class Rollout:
    """One episode, played and scored."""

    task: Task
    group: str
    transcripts: list[Transcript]
    reward: float | Invalid
    rewards: dict[str, float] = field(default_factory=dict)  # its named parts
    steps: list[tuple[int, float]] = field(default_factory=list)  # (number of sampled tokens before it, step reward)
    stop: StopReason = StopReason.EOS  # of the last completion
    version: int = 0  # of the weights that sampled it
    text: str = ""  # the sampled text, turns joined; for reading only
    prompt: str = ""  # the first thing the policy saw; for reading only

    @property
    def n_sampled(self) -> int:
        return sum(t.n_sampled for t in self.transcripts)


@dataclass(frozen=True)
class Scores:
    """The scoreboard: all rollouts of the optimizer batch, over every micro-batch and every rank. Small.

    Advantages and aggregation weights are functions of this and of nothing else, so the loss is a plain weighted sum
    and any cut into micro-batches is exact.

    Example: reward [1., 0., 1., 1.], group [0, 0, 1, 1], length [12, 9, 14, 11]
    """

    reward: Tensor  # float64 [S]: equal sums of step rewards stay equal
    group: Tensor  # int64 [S]
    length: Tensor  # float32 [S], sampled tokens of each rollout: at least 1
    steps: tuple[tuple[tuple[int, float], ...], ...] = ()  # per rollout: (sampled tokens before it, step reward)
    penalty: tuple[Tensor, ...] = ()  # per rollout, [n_i]: what a KL in the reward takes off each token's
    value: tuple[Tensor, ...] = ()  # per rollout, [n_i]: the critic's, of the state in which each token was chosen
    square: Tensor | None = None  # float64 [S], squared norm of the gradient of the rollout's log-probability
    truncated: Tensor | None = None  # bool [S], whether the engine ended it
    correct: Tensor | None = None  # bool [S], whether its reward, before any shaping, counts as correct

    def __post_init__(self) -> None:
        assert self.reward.shape == self.group.shape == self.length.shape

    @staticmethod
    def join(boards: Sequence[Scores]) -> Scores:
        """One scoreboard of those of several processes, in their order; no group is in two of them."""
        import torch

        groups, offset = [], 0
        for board in boards:
            groups.append(board.group + offset)
            offset += int(board.group.max()) + 1 if len(board.group) else 0

        def column(name: str) -> Tensor | None:
            parts = [getattr(b, name) for b in boards]
            return None if any(p is None for p in parts) else torch.cat(parts)

        def listed(name: str) -> tuple[Any, ...]:
            return tuple(x for b in boards for x in getattr(b, name))

        return Scores(
            reward=torch.cat([b.reward for b in boards]),
            group=torch.cat(groups),
            length=torch.cat([b.length for b in boards]),
            steps=listed("steps"),
            penalty=listed("penalty"),
            value=listed("value"),
            square=column("square"),
            truncated=column("truncated"),
            correct=column("correct"),
        )

    def of(self, rows: Tensor) -> Scores:
        """The scoreboard of some rollouts only: rows int64 [S']."""

        def some(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows]

        def chosen(x: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(x[i] for i in rows.tolist()) if x else ()

        return Scores(
            reward=self.reward[rows],
            group=self.group[rows],
            length=self.length[rows],
            steps=chosen(self.steps),
            penalty=chosen(self.penalty),
            value=chosen(self.value),
            square=some(self.square),
            truncated=some(self.truncated),
            correct=some(self.correct),
        )


@dataclass(frozen=True)
class Layout:
    """How the tokens of a micro-batch lie. No padding: segments follow each other.

    A segment may name another one as its prefix: the tokens it continues, such as the prompt that a group shares, which
    are then computed once. Prefixes are one level deep.

    Example, one prompt (3 tokens) with two replies (2 and 4): start (0, 3, 5), length (3, 2, 4), prefix (-1, 0, 0),
    position [0 1 2, 3 4, 3 4 5 6].
    """

    tokens: Tensor  # int64 [T]
    position: Tensor  # int64 [T], place in the transcript
    start: tuple[int, ...]  # [K]
    length: tuple[int, ...]  # [K]
    prefix: tuple[int, ...]  # [K] segment before this one, -1: none


@dataclass(frozen=True)
class Batch:
    """One micro-batch as objectives see it: flat [N], only scored tokens. Prompts, padding, retrieved text do not exist."""

    layout: Layout
    at: Tensor  # int64 [N], index in [T] of the token that *predicts* scored token n
    target: Tensor  # int64 [N], its token id
    rollout: Tensor  # int64 [N], index in [S]; rollouts are whole within a micro-batch
    weight: Tensor  # float32 [N], the share of each token in the loss: from `aggregate`, or 1 / tokens in SFT
    advantage: Tensor | None = None  # float32 [N]
    sampler_logp: Tensor | None = None  # float32 [N], the engine's, always
    old_logp: Tensor | None = None  # float32 [N], the learner's at the start of the update; None: current, detached
    ref_logp: Tensor | None = None  # float32 [N]
    value: Tensor | None = None  # float32 [N], the critic's at rollout time
    returns: Tensor | None = None  # float32 [N], what the critic is to learn
    imitate: Tensor | None = None  # float32 [N], the share of each token in a likelihood term beside the policy's
    coefficients: Mapping[str, float] = field(default_factory=dict)  # those that change during a run, by part


@dataclass(frozen=True)
class Outputs:
    """What the models say of a micro-batch. Only what was asked for is there, log-probabilities always."""

    logp: Tensor  # float32 [N]
    entropy: Tensor | None = None  # float32 [N], of the whole distribution at each scored token
    kl: Tensor | None = None  # float32 [N], exact KL(policy || reference) at each scored token
    value: Tensor | None = None  # float32 [N]
    q: Tensor | None = None  # float32 [2, N], twin soft action values of the scored token
    expected_q: Tensor | None = None  # float32 [N], sum_a pi(a) min_k Q_k(a): with a gradient into the policy alone
    target_q: Tensor | None = None  # float32 [N], the same of the slowly moving copies; no gradient


class Stats(dict[str, tuple[float, float]]):
    """Metrics as name -> (sum, count), merged over micro-batches and ranks and divided only to print.

    A name that ends in /max or /min keeps the largest or smallest value instead.
    """

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        extreme = {"max": max, "min": min}.get(name.rpartition("/")[2])
        if extreme is not None:
            self[name] = (extreme(self[name][0], float(total)) if name in self else float(total), 1.0)
            return
        before = self.get(name, (0.0, 0.0))
        self[name] = (before[0] + float(total), before[1] + float(count))

    def merge(self, other: Mapping[str, tuple[float, float]]) -> None:
        for name, (total, count) in other.items():
            self.add(name, total, count)

    def means(self) -> dict[str, float]:
        """Name -> sum / count, names in alphabetical order; a name with count 0 is left out."""
        return {name: self[name][0] / self[name][1] for name in sorted(self) if self[name][1]}


class Objective(Protocol):
    """The loss of one micro-batch: a scalar, sum over n of weight[n] * loss[n]. Knows neither masks nor the world size."""

    @property
    def wants(self) -> frozenset[str]: ...  # fields of `Outputs` that it reads, besides logp
    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor: ...


@dataclass(frozen=True)
class Step:
    """One step of training, from a source: some optimizer updates, each a list of micro-batches, and what to record."""

    number: int  # 1, 2, ...
    updates: Sequence[Callable[[], Sequence[Batch]]]  # called in order, each just before its optimizer update
    stats: Stats
    rollouts: Sequence[tuple[Rollout, float]] = ()  # with their advantage (mean over tokens)


@runtime_checkable
class Source(Protocol):
    """Where steps come from. `produce(k)` is called with k = 1, 2, ...; all it remembers is in `state()`."""

    def produce(self, number: int) -> Step: ...
    def learned(self, step: Step, stats: Stats) -> None: ...  # called after the updates of each step
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Engine(Protocol):
    """Samples. Requests are answered in no particular order; a completion's content does not depend on the order."""

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling) -> None: ...
    def poll(self) -> list[Completion]: ...  # works a little; [] only while nothing has finished yet
    def load(self, weights: Any, version: int) -> None: ...  # hand-over; for shared weights only the version changes
    def close(self) -> None: ...


class World(Protocol):
    """The processes that share a run. Every one of them makes the same calls in the same order."""

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor: ...  # over all processes; x itself is not changed
    def gather(self, x: Any) -> list[Any]: ...  # one from each process, by rank


class Alone:
    """The world of a single process."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Any) -> list[Any]:
        return [x]


@runtime_checkable
class Learner(Protocol):
    """Holds the weights, scores and improves them."""

    version: int  # counts optimizer updates

    def evaluate(self, batches: Sequence[Batch], want: frozenset[str]) -> list[Outputs]: ...
    def update(self, batches: Sequence[Batch], objective: Objective) -> Stats: ...
    def weights(self) -> Any: ...
    def save(self, folder: Any) -> None: ...
    def load(self, folder: Any) -> None: ...
