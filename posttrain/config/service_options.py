"""Options that name services: reward models, judges, retrievers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from posttrain.config.named_values import named_value
from posttrain.core.messages import dashed
from posttrain.core.reply_steps import expression_of
from posttrain.core.types import UserError
from posttrain.envs.play.env_options import split_options
from posttrain.envs.play.load_env import BUILTIN

LABELLERS = ("reward-model", "judge")
"""Services that can label."""

SCORERS = ("reward_model", "judge")
"""Options that name services which score replies."""

SERVICES = (*SCORERS, "retriever")
"""Options that name services."""


def named_services(values: Sequence[str], kind: str) -> list[tuple[str, str]]:
    """Return (name, file or folder) of each service of an option; one without a name is called as its kind."""
    found = list(map(named_value, values))
    if None in found:
        raise UserError(f"--{kind} is empty: leave it out, or give a file or folder")
    return [(name or kind, value) for name, value in filter(None, found)]


def options_of_services(config: Any) -> dict[str, str]:
    """Return name of a service -> the option that names it, such as --reward-model FOLDER, as far as options name any."""
    return {
        name: f"--{kind.replace('_', '-')} {value}"
        for kind in SERVICES
        for value in getattr(config, kind, ())
        for name, _ in named_services([value], kind.replace("_", "-"))
    }


@dataclass(frozen=True)
class ScorerOption:
    """A scorer of replies, as options name it: reward-model=FOLDER, judge=RECIPE.toml, or a reward function (my.py:reward,
    verify:NAME).
    """

    text: str

    @property
    def env(self) -> str:
        """The environment that uses the service, or scores."""
        return self.service or ("" if re.match(r"[\w-]*=", self.text) else self.text)

    @property
    def service(self) -> str:
        """The service: "reward-model" or "judge"; "": none."""
        kind, equals, file = self.text.partition("=")
        return kind if equals and file and kind in LABELLERS else ""

    @property
    def place(self) -> str:
        """The folder, recipe or function that it names."""
        return self.text.partition("=")[2] if self.service else self.env

    @property
    def reward_model(self) -> tuple[str, ...]:
        return self._places("reward-model")

    @property
    def judge(self) -> tuple[str, ...]:
        return self._places("judge")

    def _places(self, kind: str) -> tuple[str, ...]:
        return (self.place,) if self.service == kind else ()

    def check(self, option: str, noun: str) -> None:
        """Raise UserError if it is neither a service nor a reward function. `noun`: what it has to be, with its article."""
        known = not self.text or self.service or ":" in self.env
        if not known and split_options(self.text)[0] not in set(BUILTIN) - set(LABELLERS):
            raise UserError(
                f"{option} {self.text:.60} is not {noun}: write {option} reward-model=FOLDER, {option} judge=RECIPE.toml, "
                f"or {option} my.py:reward"
            )


def play_the_only_service(config: Any) -> None:
    """Without an environment, a reward model or a judge alone is one."""
    given = [(kind.replace("_", "-"), value) for kind in SCORERS for value in getattr(config, kind)]
    if not config.env and len(given) == 1:
        [(kind, value)] = given
        [(name, _)] = named_services([value], kind)
        if name == kind:
            object.__setattr__(config, "env", kind)


def implying(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of which the environment of these follows; {} if it is given by itself."""
    env = options.get("env")
    given = {kind: options[kind] for kind in SCORERS if options.get(kind)}
    if env == "unscored" and options.get("step_delimiter"):
        return given | {"step_delimiter": options["step_delimiter"]}
    alone = sum(map(len, given.values())) == 1 and env in [kind.replace("_", "-") for kind in given]
    return given if alone else {}


def check_step_rewards(config: Any) -> None:
    """Raise UserError for options of step rewards that contradict each other.

    Without an environment the outcome of a reply earns nothing: its steps alone do.
    """
    if not config.step_delimiter:
        given = [f.name for f in fields(config) if f.name.startswith("step_") and getattr(config, f.name) != f.default]
        if given:
            option = dashed(given[0])
            raise UserError(f"{option} has no effect without --step-delimiter: add it, such as line")
        return
    if not config.reward_model:
        raise UserError("--step-delimiter needs the model that scores steps: --reward-model FOLDER")
    process_model(config)
    check_delimiter(config.step_delimiter)
    if not config.env:
        object.__setattr__(config, "env", "unscored")


def check_delimiter(delimiter: str) -> None:
    """Raise UserError for a delimiter between slashes that is no regular expression, or a new line typed as two letters."""
    if (expression := expression_of(delimiter)) is not None:
        try:
            re.compile(expression)
        except (re.error, RecursionError, OverflowError) as error:
            raise UserError(f"--step-delimiter {delimiter} is not a regular expression: {error}") from error
    elif "\\n" in delimiter:
        raise UserError(
            f"--step-delimiter {delimiter} is a backslash and an n, which no reply contains: for new lines write "
            f'--step-delimiter "/{delimiter}/"'
        )


def process_model(config: Any) -> str:
    """Return the name of the reward model that scores steps: the only one, or that called "process"."""
    names = [name for name, _ in named_services(config.reward_model, "reward-model")]
    if len(names) > 1 and PROCESS_MODEL not in names:
        raise UserError(
            f"several reward models, and none is named {PROCESS_MODEL}: name the one that scores steps with "
            f"--reward-model {PROCESS_MODEL}=FOLDER"
        )
    return PROCESS_MODEL if PROCESS_MODEL in names else names[0]


PROCESS_MODEL = "process"
"""Name of the reward model that scores steps, where there are several."""
