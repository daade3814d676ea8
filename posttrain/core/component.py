"""The base of every component of an algorithm: a frozen dataclass whose fields are its settings, with its description.

A setting is declared once, as a field: its type, its default, its range, and the name of a flag if it has one.
`--set PART.SETTING=VALUE` reaches every one of them, a user's own included; flags are shorter names for the common ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, Self

from posttrain.core.types import UserError

NEVER: Any = object()
"""An absent value: None is a valid one."""


class Need(StrEnum):
    """The inputs of a component that the run must provide before the first update of a step."""

    GREEDY = "greedy"  # the reward of a greedy reply to every prompt
    GROUP = "group"  # at least two rollouts of every task
    PARTS = "parts"  # the named parts of every reward, with the same names in all rollouts of a step
    TURNS = "turns"  # the turns of every rollout, and the states in which they began
    SUCCESS = "success"  # the reward from which on a rollout counts as a success
    EPISODE_TOKENS = "episode tokens"  # most tokens that the policy may sample in an episode
    OLD = "old"  # the learner's log-probabilities at rollout time
    REFERENCE = "reference"  # a reference model and its log-probabilities
    ENTROPY = "entropy"  # of the whole distribution at each token, at rollout time
    KL = "kl"  # the exact KL to the reference at each token, at rollout time
    TEACHER = "teacher"  # a teacher's log-probabilities of the sampled tokens
    TEACHER_TOP = "teacher's likeliest tokens"  # and their log-probabilities, at each sampled token
    VALUE = "value"  # a critic of states, and its values at rollout time
    ACTION_VALUE = "action value"  # a critic of actions
    SOFT_STATE_VALUE = "soft state value"  # a critic of states beside that of actions, with a target copy of its own
    DRIFT = "drift"  # mean log-ratio of mismatched prompts and responses, over an optimizer batch
    SHIFT = "shift"  # running mean of the implicit rewards
    GRADIENT_NORM = "gradient norm"  # the squared norm of the gradient of each rollout's log-probability


@dataclass(frozen=True)
class RunLimits:
    """Values of a run that fill the open settings of components."""

    episode_tokens: int | None = None  # None: episodes of several turns without a budget


@dataclass(frozen=True)
class SettingRange:
    """The allowed range of a number, or of each of several numbers."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise UserError if a number is not finite or outside the range. Values that are not numbers pass."""
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(x, bool) or not isinstance(x, (int, float)):
                continue
            if x != x or x in (float("inf"), float("-inf")):
                raise UserError(f"{name} must be a finite number, not {x}")
            inside = (
                (self.least is None or x >= self.least)
                and (self.above is None or x > self.above)
                and (self.most is None or x <= self.most)
                and (self.below is None or x < self.below)
            )
            if not inside:
                raise UserError(f"{name} must be {self}, not {x:g}")

    def __str__(self) -> str:
        words = ("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below)
        return " and ".join(f"{word} {bound:g}" for word, bound in words if bound is not None)


OnResume = Literal["fixed", "free", "anew"]
"""How resuming a run treats an option. fixed: the run's value is kept and another one refused; free: the run's value is
kept unless another one is given; anew: the run's value is not kept. Options are fixed by default.
"""


@dataclass(frozen=True)
class OptionShown:
    """How --help shows an option, and how resuming treats it. Empty fields take the values of the overridden class."""

    group: str = ""  # the heading above it
    first_hour: bool | None = None  # whether --help shows it, and not only --help-all
    value: str = ""  # a word for its value: FOLDER; "": by its type
    on_resume: OnResume | None = None


def option(
    default: Any = dataclasses.MISSING,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    factory: Any = dataclasses.MISSING,
    group: str = "",
    first_hour: bool | None = None,
    value: str = "",
    on_resume: OnResume | None = None,
) -> Any:
    """Declare a dataclass field with a range and its appearance in --help: `lr: float = option(1e-5, above=0,
    first_hour=True)`.
    """
    bounds = Setting(bounds=SettingRange(least, above, most, below))
    metadata = {"knob": bounds, "shown": OptionShown(group, first_hour, value, on_resume)}
    if factory is not dataclasses.MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting, in addition to its type and default."""

    flag: str = ""  # its short name on the command line, without dashes; "": it has none
    help: str = ""
    bounds: SettingRange = SettingRange()
    off: Any = NEVER  # a value that is read as None, such as 0 for "no such bound"
    absent: Any = NEVER  # the value that removes the component
    creates: bool = False  # whether setting it adds the component to an algorithm that has none
    choices: Mapping[str, Any] | None = None  # name -> component, where the setting is one component or several
    brought: str = ""  # the option that adds such a component, where none of its own settings does
    first_hour: bool = False  # whether --help shows its flag, and not only --help-all


def setting(
    default: Any = dataclasses.MISSING,
    flag: str = "",
    help: str = "",
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    off: Any = NEVER,
    absent: Any = NEVER,
    creates: bool = False,
    choices: Mapping[str, Any] | None = None,
    brought: str = "",
    first_hour: bool = False,
) -> Any:
    """Declare a setting of a component, as a dataclass field: `low: float = setting(0.2, "clip-low", "...", least=0,
    most=1)`."""
    creates = creates or absent is not NEVER
    bounds = SettingRange(least, above, most, below)
    known = Setting(flag, help, bounds, off, absent, creates, choices, brought, first_hour)
    return field(default=default, metadata={"knob": known})


def setting_of(f: dataclasses.Field[Any]) -> Setting:
    """Return the declaration of a field; an empty one for a plain field."""
    found: Setting = f.metadata.get("knob", Setting())
    return found


class Component:
    """Base class. A subclass is a frozen dataclass; its fields are its settings."""

    interpretation: ClassVar[str] = ""  # of what the paper leaves open, and who interprets it otherwise

    @property
    def formula(self) -> str:
        """The equation of the component with its current settings, in plain mathematics."""
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
        """Fields of `Outputs`, besides logp, that the component reads in the loss."""
        return frozenset()

    def configured(self, limits: RunLimits) -> Self:
        """Fill open settings from the run."""
        return self
