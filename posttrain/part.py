"""What every part of an algorithm is: a frozen dataclass whose fields are its settings, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Need(StrEnum):
    """What a part needs of the run that it is part of, before the first update of a step."""

    GROUP = "group"  # at least two rollouts of every task
    SUCCESS = "success"  # a threshold from which on a reward counts as a success
    EPISODE_TOKENS = "episode tokens"  # most tokens that the policy may sample in an episode
    OLD = "old"  # the learner's log-probabilities of rollout time
    REFERENCE = "reference"  # a reference model and its log-probabilities
    ENTROPY = "entropy"  # of the whole distribution at each token, at rollout time
    KL = "kl"  # the exact KL to the reference at each token, at rollout time
    VALUE = "value"  # a critic of states, and its values of rollout time
    ACTION_VALUE = "action value"  # a critic of actions
    GRADIENT_NORM = "gradient norm"  # the squared norm of the gradient of each rollout's log-probability


@dataclass(frozen=True)
class Limits:
    """What a run fills into parts that leave it open."""

    episode_tokens: int | None = None  # None: episodes of several turns without a budget


class Part:
    """Base class. A field is a setting: `--set PART.FIELD=VALUE` reaches it."""

    @property
    def formula(self) -> str:
        """What it computes with its settings, in plain mathematics."""
        raise NotImplementedError

    @property
    def source(self) -> str:
        """Paper and equation."""
        raise NotImplementedError

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset()

    @property
    def wants(self) -> frozenset[str]:
        """Fields of `Outputs`, besides logp, that it reads in the loss."""
        return frozenset()

    def configured(self, limits: Limits) -> Self:
        """The part as a run has it."""
        return self
