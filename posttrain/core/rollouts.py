"""Rollouts and preference examples: finished replies with what they earned, and their use in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import OUTCOME, Invalid, StopReason, Task, ToolCall, value_type

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Comparison:
    """States that one response is better than another."""

    better: int  # index of the better response in the example
    worse: int
    share: float = 1.0  # its weight relative to other comparisons, such as the number of people who agree
    margin: float = 0.0  # the difference in quality


@value_type
class PlayedTurn:
    """One contribution to an episode, by either side, for readers: an entry of `Rollout.turns`."""

    kind: SpanKind  # its origin
    text: str
    transcript: int  # index of the rollout's transcript
    start: int  # index of its first token in that transcript
    length: int  # tokens
    reward: float = 0.0  # the environment's reward of this step, before the episode's end
    seconds: float = field(default=0.0, compare=False)  # depends on the clock, and is recorded with the timings
    cut: int = 0  # tokens that did not fit the context and were left out
    calls: tuple[ToolCall, ...] = ()  # tool calls of a reply
    temperature: float | None = None  # of a reply's sampling; None: the run's
    answered: tuple[int, int] = (0, 0)  # answers of `Tools` to calls, and how many of them are no result


@dataclass(frozen=True)
class PreferenceExample:
    """A prompt with several responses and their labels: comparisons, or a label for each response.

    The responses are transcripts that begin with the same prompt, which is computed once for all of them.
    """

    responses: Sequence[Transcript]
    comparisons: Sequence[Comparison] = ()
    # labels of each response: one per scored span (a reply has one, a solution one per step)
    labels: Sequence[tuple[float, ...]] = ()

    @property
    def n_scored(self) -> int:
        return sum(t.n_scored for t in self.responses)


@value_type
class Piece:
    """A scored reply and its owner: rollouts of a group that branched off share their first replies."""

    length: int  # tokens
    member: int  # member of the group for which it was sampled
    reply: int  # index among that member's replies: 0 is the first


@dataclass(frozen=True)
class Branch:
    """The place where a rollout branched off another rollout of its group."""

    of: int  # member of the group that it branched off
    turns: int  # number of turns that it shares with that member
    taken: tuple[int, ...]  # number of sampled tokens of each transcript that it shares with that member


@dataclass(slots=True)
class Rollout:
    """One episode with its reward."""

    task: Task
    group: str
    transcripts: list[Transcript]  # one, unless turns were fresh
    reward: float | Invalid
    rewards: dict[str, float] = field(default_factory=dict)  # its named parts
    steps: list[tuple[int, float]] = field(default_factory=list)  # (scored tokens up to the step's end, step reward)
    stop: StopReason = StopReason.EOS  # of the episode: that of its last completion, or the limit that it reached
    turns: list[PlayedTurn] = field(default_factory=list)
    text: str = ""  # the sampled text, turns joined; for reading only
    prompt: str = ""  # the first input of the policy; for reading only
    # services' answers: name, JSON, Invalid or Reasoned; for reading
    answers: list[tuple[str, Any]] = field(default_factory=list)
    side: str = ""  # the side, where the policy plays several: each has its own rollout, and is compared with its like
    pieces: list[Piece] = field(default_factory=list)  # replies of all scored tokens, in order; []: no branches
    branch: Branch | None = None  # where it branched off another rollout; None: it began with the prompt
    notes: dict[str, Any] = field(default_factory=dict)  # notes of its environment: JSON data; for reading only
    # the last user message of a prompt of messages, which distinguishes it from other prompts; for reading only
    asked: str = ""
    greedy: bool = False  # sampled at temperature 0 as the baseline of its group: not trained
    baseline: float | None = None  # the reward of the greedy rollout of its group, if it has one
    seconds: float = field(default=0.0, compare=False)  # from its last turn to its reward: depends on the clock

    @property
    def n_scored(self) -> int:
        """Number of scored tokens: n_i of the formulas."""
        count = 0  # a loop: it is called several times a step, and a comprehension takes twice as long
        for transcript in self.transcripts:
            count += transcript.n_scored
        return count

    @property
    def n_sampled(self) -> int:
        """Number of tokens that the policy sampled, scored or not: the number that budgets limit."""
        count = 0
        for transcript in self.transcripts:
            count += len(transcript.logp)
        return count

    @property
    def outcome(self) -> float:
        """The number that the success threshold is compared with: the part "outcome" of the reward, or else the whole
        reward.
        """
        assert not isinstance(self.reward, Invalid), "an invalid reward has no outcome"
        return self.rewards.get(OUTCOME, self.reward)

    @property
    def group_and_side(self) -> tuple[str, str]:
        """Key of the rollouts with which this one is compared: those of its group with the same side."""
        return self.group, self.side

    @property
    def n_own(self) -> int:
        """Number of tokens sampled for this rollout alone, without those of the rollout that it branched off."""
        return self.n_sampled - (sum(self.branch.taken) if self.branch else 0)

    @property
    def version(self) -> int:
        """Version of the oldest weights that sampled any token of the rollout; 0 if none was sampled."""
        found = [s.version for t in self.transcripts for s in t.spans if s.version is not None]
        return min(found, default=0)


class Fate(StrEnum):
    """The fate of a rollout in a step: exactly one of these."""

    TRAINED = "trained"  # an update of the step learned from it
    EQUAL = "equal group"  # all rewards of its group are equal, and only the advantage would give its tokens a gradient
    INVALID = "invalid"  # it has no valid reward, or no sampled token
    SMALL = "group too small"  # it is valid, but too few other rollouts of its group are
    REPLACED = "replaced"  # dynamic sampling dropped its group, and sampled another one if the budget allowed it
    FILTERED = "filtered"  # a filter of the algorithm left it out, or its teacher cannot read it
    BASELINE = "baseline"  # a greedy reply, whose reward is the baseline of its group
    UNSELECTED = "not selected"  # no update used it, though its group has a signal: see `Outcome.why`


@value_type
class Outcome:
    """A rollout of a step and its use in the step, for the record."""

    rollout: Rollout
    advantage: float | None = None  # mean over its scored tokens; None: it has no advantage
    fate: Fate = Fate.TRAINED
    why: str = ""  # reason for the fate, in words, such as "cut off after 512 tokens"
    flags: tuple[str, ...] = ()  # further remarks: see `posttrain.training.sources.ledger`
    shaping: float = 0.0  # amount that shaping added to its reward
    penalty: float = 0.0  # KL penalty deducted from its reward, summed over its tokens
    replayed: bool = False  # whether an earlier step sampled it, and this one trained on it again
    member: int | None = None  # index of the response in its preference example; None without one
    label: Any = None  # JSON data of a response's labels: see `posttrain.training.sources.example_recording`
    numbers: dict[str, NDArray[Any]] = field(default_factory=dict)  # column -> [n_i], of each scored token
