"""The inputs and outputs of learners and objectives: scoreboard of an optimizer batch, micro-batches, outputs, metrics.

No tensor is made at import; torch is imported for type checking only.

Shape legend, used everywhere:

    L    tokens of one transcript
    T    tokens of one micro-batch, laid end to end without padding
    K    segments of one micro-batch (a segment is a run of tokens that one or more transcripts have)
    N    scored tokens of one micro-batch: those the policy sampled (in SFT: those to imitate), once for each rollout
    R    transcripts of one micro-batch that have a scored token, in their order: replies, or responses
    S    rollouts, or preference examples, of one optimizer batch, over all micro-batches and ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from posttrain.core.rollouts import Outcome, Piece, Rollout
from posttrain.core.transcripts import Media

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.core.token_probe import TokenProbe


@dataclass(frozen=True)
class TurnStart:
    """Start of a turn of the policy, with hashes of its context: equal contexts have equal hashes."""

    before: int  # scored tokens of the rollout before this turn
    observation: int  # hash of the tokens since the policy's previous turn
    history: int  # hash of all tokens before this turn


@dataclass(frozen=True)
class Scores:
    """The scoreboard: small per-rollout values of all rollouts of the optimizer batch, over all micro-batches and
    ranks.

    Advantages and aggregation weights are functions of the scoreboard alone, so the loss is a plain weighted sum and
    any split into micro-batches is exact.

    Example: reward [1., 0., 1., 1.], group [0, 0, 1, 1], length [12, 9, 14, 11]
    """

    reward: Tensor  # float64 [S]: equal sums of step rewards stay equal
    group: Tensor  # int64 [S]
    length: Tensor  # float32 [S], scored tokens of each rollout: at least 1
    steps: tuple[tuple[tuple[int, float], ...], ...] = ()  # per rollout: (scored tokens up to the step's end, reward)
    turns: tuple[tuple[TurnStart, ...], ...] = ()  # per rollout: turns with a scored token; () where credit needs none
    pieces: tuple[tuple[Piece, ...], ...] = ()  # per rollout: replies with its scored tokens; () unless rollouts branch
    # per rollout, [n_i]: part of the final reward that each token earns; (): the last all
    shares: tuple[Tensor, ...] = ()
    penalty: tuple[Tensor, ...] = ()  # per rollout, [n_i]: KL penalty that is deducted from each token's reward
    value: tuple[Tensor, ...] = ()  # per rollout, [n_i]: the critic's value of the state in which each token was chosen
    squared_gradient_norm: Tensor | None = None  # float64 [S], of the gradient of the rollout's log-probability
    sampled: Tensor | None = None  # float32 [S], tokens of the episode that count against its budget
    truncated: Tensor | None = None  # bool [S], whether the episode was cut off
    greedy: Tensor | None = None  # float64 [S], the reward of a greedy rollout of the same group
    success: Tensor | None = None  # bool [S], whether the rollout's reward, before any shaping, reaches the threshold
    # float64 [S] each: named parts, where credit compares them
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.reward.shape == self.group.shape == self.length.shape

    @staticmethod
    def join(boards: Sequence[Scores]) -> Scores:
        """Return the joined scoreboard of several processes, in their order. No group may be on two processes."""
        import torch

        groups, offset = [], 0
        for board in boards:
            groups.append(board.group + offset)
            offset += int(board.group.max()) + 1 if len(board.group) else 0

        def column(name: str) -> Any:
            columns = [getattr(b, name) for b in boards]
            if isinstance(columns[0], tuple):
                return tuple(x for own in columns for x in own)
            if isinstance(columns[0], Mapping):
                filled = [own for own, b in zip(columns, boards, strict=True) if len(b.reward)]
                names = filled[0].keys() if filled else ()
                assert all(own.keys() == set(names) for own in filled), "processes name the same parts"
                return {part: torch.cat([own[part] for own in filled]) for part in names}
            found = [c for c, b in zip(columns, boards, strict=True) if c is not None or len(b.reward)]
            return None if not found or any(c is None for c in found) else torch.cat(found)

        columns = {f.name: column(f.name) for f in fields(Scores)}
        return Scores(**{**columns, "group": torch.cat(groups)})

    def of(self, rows: Tensor) -> Scores:
        """Return the scoreboard of the rollouts with these indices: rows int64 [S']."""

        def some(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(x[i] for i in rows.tolist()) if x else ()
            if isinstance(x, Mapping):
                return {part: values[rows] for part, values in x.items()}
            return None if x is None else x[rows]

        return Scores(**{f.name: some(getattr(self, f.name)) for f in fields(Scores)})


@dataclass(frozen=True)
class Layout:
    """The arrangement of the tokens of a micro-batch. No padding: segments follow each other.

    A segment may name another one as its prefix: the tokens it continues, such as the prompt that a group shares, which
    are then computed once. Prefixes form a tree: a prefix may have one itself. A token sees the segments before its own
    wholly and its own up to itself.

    Example, one prompt (3 tokens) with two replies (2 and 4): start (0, 3, 5), length (3, 2, 4), prefix (-1, 0, 0),
    position [0 1 2, 3 4, 3 4 5 6].
    """

    tokens: Tensor  # int64 [T]
    position: Tensor  # int64 [T], place in the transcript; or [3, T]: places in time, height and width
    start: tuple[int, ...]  # [K]
    length: tuple[int, ...]  # [K]
    prefix: tuple[int, ...]  # [K] segment before this one, -1: none; a prefix precedes the segments that continue it
    media: tuple[Media, ...] = ()  # places counted in [T]
    experts: Tensor | None = None  # int16 [T, layers, k] of the engine's routing; -1: not known


@dataclass(frozen=True)
class Reading:
    """Some rollouts of a micro-batch as a teacher reads them: the same scored tokens, possibly after another prompt."""

    model: str  # the teacher's name
    packed: Packed
    rows: Tensor | None  # int64 [n], which of the micro-batch's scored tokens [N] these are; None: all of them


@dataclass(frozen=True)
class Repeats:
    """Scored tokens that are the same token after the same tokens, as in equal replies of a group. n are different."""

    first: Tensor  # int64 [n], the first of each among the scored tokens
    of: Tensor  # int64 [N], index in [n] of each scored token


@dataclass(frozen=True)
class Packed:
    """The model's input for one micro-batch of rollouts, without the values that only a loss needs."""

    layout: Layout
    at: Tensor  # int64 [N], index in [T] of the token that *predicts* scored token n; may repeat
    target: Tensor  # int64 [N], its token id
    rollout: Tensor  # int64 [N], index in [S]; rollouts are whole within a micro-batch and their tokens are neighbours
    transcript: Tensor  # int64 [N], index in [R]; tokens of a transcript are neighbours too
    # either each scored token is in one of them, or there are none
    readings: tuple[Reading, ...] = field(default=(), kw_only=True)
    # float64 [N], at which each scored token was sampled; nan, and None for all of them: the run's
    temperature: Tensor | None = field(default=None, kw_only=True)
    repeats: Repeats | None = field(default=None, kw_only=True)  # None: none, or at temperatures of their own

    def without_repeats(self) -> Packed:
        """Return the input with each different scored token once; without `readings`."""
        assert self.repeats is not None and self.temperature is None
        columns = self.at, self.target, self.rollout, self.transcript
        return Packed(self.layout, *(column[self.repeats.first] for column in columns))


@dataclass(frozen=True)
class Matched:
    """Numbers with which comparisons or labels are compared, from an optimal transport over the optimizer batch.

    P    pieces of the transport: one for each comparison or label where all weigh the same
    """

    own: Tensor  # int64 [P], index in [C], or in [V] where responses are not paired
    other: Tensor  # float64 [P], the reference's margin that a comparison is compared with, or the score of a response
    weight: Tensor  # float64 [P], the share of each piece in the loss


@dataclass(frozen=True)
class Preferences:
    """Comparisons and labels of the responses of a micro-batch, which holds whole preference examples: both sides of
    each comparison.

    U    scores: one a response [R], or, where hidden states are read instead of log-probabilities, one a reading [N]
    C    comparisons between them    V    labels of them
    """

    better: Tensor  # int64 [C], index in [U]
    worse: Tensor  # int64 [C]
    margin: Tensor  # float64 [C], by how much, from the rows
    weight: Tensor  # float64 [C], the share of each in the loss
    labelled: Tensor  # int64 [V], index in [U]
    label: Tensor  # float64 [V]
    label_weight: Tensor  # float64 [V], the share of each in the loss
    matched: Matched | None = None  # what comparisons or labels are compared with instead; None: as they are given


@dataclass(frozen=True)
class Batch(Packed):
    """One micro-batch as objectives see it: flat [N], only scored tokens. Prompts, padding, retrieved text do not exist.

    Made whole, in one call: `posttrain.training.sources.packing.collate`.
    """

    weight: Tensor  # float32 [N], the share of each token in the loss: from `aggregate`, or 1 / tokens in SFT
    advantage: Tensor | None = None  # float32 [N]; None: nothing here is reinforced
    sampler_logp: Tensor | None = None  # float32 [N], the engine's; None: imitated tokens
    old_logp: Tensor | None = None  # float32 [N], the learner's at the start of the update; None: current, detached
    ref_logp: Tensor | None = None  # float32 [N]
    teacher_logp: Tensor | None = None  # float32 [N]
    # int64 [N, k + 1], the teacher's k likeliest tokens and the sampled one; -1: none
    teacher_ids: Tensor | None = None
    teacher_top: Tensor | None = None  # float32 [N, k + 1], the teacher's log-probabilities of `teacher_ids`
    held: Tensor | None = None  # float32 [N], the weight of |lp - old| in the loss
    value: Tensor | None = None  # float32 [N], the critic's at rollout time
    returns: Tensor | None = None  # float32 [N], the critic's targets
    imitate: Tensor | None = None  # float32 [N], the share of each token in a likelihood term beside the policy's
    preferences: Preferences | None = None  # None: nothing here is compared or labelled
    coefficients: Mapping[str, float] = field(default_factory=dict)  # those that change during a run, by part
    tap: TokenProbe | None = None  # receives the numbers of single tokens that the learner computes


@dataclass(frozen=True)
class Outputs:
    """The models' outputs for a micro-batch: log-probabilities, and the others only where they were requested."""

    logp: Tensor  # float32 [N]; [0] where scores are requested instead
    entropy: Tensor | None = None  # float32 [N], of the whole distribution at each scored token
    top: Tensor | None = None  # float32 [N], probability of the most likely token at each position; no gradient
    kl: Tensor | None = None  # float32 [N], exact KL(policy || reference) at each scored token
    reverse_kl: Tensor | None = None  # float32 [N], exact KL(policy || teacher) at each scored token
    forward_kl: Tensor | None = None  # float32 [N], exact KL(teacher || policy)
    jensen_shannon: Tensor | None = None  # float32 [N], their generalised Jensen-Shannon divergence
    value: Tensor | None = None  # float32 [N]
    q: Tensor | None = None  # float32 [2, N], twin soft action values of the scored token
    expected_q: Tensor | None = None  # float32 [N], sum_a pi(a) min_k Q_k(a): with a gradient into the policy alone
    target_q: Tensor | None = None  # float32 [N], the same of the slowly moving copies; no gradient
    target_value: Tensor | None = None  # float32 [N], soft value of the state by its slowly moving copy; no gradient
    score: Tensor | None = None  # float32 [N], a reward model's at each reading
    # float32 [N], log-probabilities under the teachers, where their distributions are made
    teacher: Tensor | None = None
    collision: Tensor | None = None  # float32 [N], log sum_v pi(v)^2 over the vocabulary; no gradient

    def at(self, index: Tensor) -> Outputs:
        """Return the outputs at these scored tokens, int64 [n], which may repeat."""
        columns = ((f.name, getattr(self, f.name)) for f in fields(self))
        return replace(self, **{name: x.index_select(-1, index) for name, x in columns if x is not None})


_EXTREMES: dict[str, Callable[[float, float], float]] = {"max": max, "min": min}


def _extreme(name: str) -> Callable[[float, float], float] | None:
    """Return a metric's extreme-value function; None: the metric is summed."""
    return _EXTREMES.get(name.rpartition("/")[2])


class Stats(dict[str, tuple[float, float]]):
    """Metrics as name -> (sum, count): merged over micro-batches and ranks, divided only when printed.

    For a name that ends in /max or /min, the largest or smallest value is kept instead.
    """

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        extreme = _extreme(name)
        if extreme is not None:
            self[name] = (extreme(self[name][0], float(total)) if name in self else float(total), 1.0)
            return
        before = self.get(name, (0.0, 0.0))
        self[name] = (before[0] + float(total), before[1] + float(count))

    def add_each(self, name: str, values: Sequence[float]) -> None:
        """Add values one by one, in order, each with a count of 1. The result is bitwise equal to calls of `add`."""
        if not values or _extreme(name) is not None:
            for value in values:
                self.add(name, value)
            return
        total, count = self.get(name, (0.0, 0.0))
        for value in values:
            total += float(value)
        self[name] = total, count + len(values)

    def merge(self, other: Mapping[str, tuple[float, float]]) -> None:
        for name, (total, count) in other.items():
            self.add(name, total, count)

    def means(self) -> dict[str, float]:
        """Return name -> sum / count, in alphabetical order, without names whose count is 0."""
        return {name: self[name][0] / self[name][1] for name in sorted(self) if self[name][1]}


@dataclass(frozen=True)
class TrainingStep:
    """One training step of a source: its optimizer updates, each a list of micro-batches, and the values to record."""

    number: int  # 1, 2, ...
    updates: Sequence[Callable[[], Sequence[Batch]]]  # called in order, each just before its optimizer update
    stats: Stats
    tokens: int = 0  # sampled, or imitated, in this step: the speed is measured by these
    played: Sequence[Rollout] = ()  # in order
    outcomes: list[Outcome] = field(default_factory=list)
    """The fates of the rollouts in `played`, in their order, then of replayed ones; or of given rows that are
    recorded. `Source.learned` completes it in place."""
    seconds: Mapping[str, float] = field(default_factory=dict)  # by activity: "waiting" is for environments alone
    counts: Mapping[str, float] = field(default_factory=dict)  # of services and engines: they depend on the clock
    work: Mapping[str, float] = field(default_factory=dict)  # the engine's counts of this step: see `engines.pace`
    enough: Callable[[Stats], bool] = lambda stats: False
    """Whether the updates end after the one with these metrics. The same in all processes, as the metrics are."""
