"""Options of mixtures: several sets of tasks in one run, in `rl` each with its own environment and limits."""

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

from posttrain.config.option_groups import OptionGroup
from posttrain.core.coerce import convert
from posttrain.core.component import option, setting_of
from posttrain.core.messages import near_or_all
from posttrain.core.types import PART_SEPARATOR, UserError
from posttrain.envs.play.load_env import task_set

PART: dict[str, Any] = {
    "tasks": str,
    "env": str,
    "weight": float,
    "split": str,
    "limit": int,
    "fields": dict,
    "prompt_template": str,
    "chat": bool,
    "system": str,
    "max_tokens": int,
    "temperature": float,
    "max_turns": int,
    "max_episode_tokens": int,
    "max_tool_calls": int,
    "env_timeout": float,
    "env_memory": float,
}
"""Settings of a part, with their types. All but the weight are options of the run, whose values are the defaults."""


OF_ROWS = ("tasks", "weight", "split", "limit", "fields", "prompt_template", "chat", "system")
"""Settings of a part where nothing is sampled."""
FLOOR = 0.2  # share of the prompts that keeps the fixed weights


@dataclass(frozen=True)
class MixtureGroup(OptionGroup, group="data"):
    """Several sets of tasks."""

    mixture: dict[str, dict[str, str]] = option(factory=dict, value="VALUE")
    """Parts of a mixture, instead of --tasks: --mixture.maths.tasks maths.jsonl --mixture.maths.weight 2. Or a table
    [sft.mixture.maths] in a recipe. A part may have its own split, limit, fields (--mixture.maths.fields.prompt question),
    prompt_template, chat and system; in rl it has its own env, and may have max_tokens, temperature, max_turns,
    max_episode_tokens, max_tool_calls, env_timeout and env_memory."""
    mixture_temperature: float = option(1.0, above=0, most=1e6)
    """Temperature T of a mixture without weights: a part of n tasks has the weight n^(1/T). 1: by size; large:
    equal."""


@dataclass(frozen=True)
class MixtureWeightsGroup(OptionGroup, group="data"):
    """Weights of the parts of a mixture that change during a run."""

    mixture_weights: Literal["fixed", "progress"] = "fixed"
    """Weights of the parts of --mixture. fixed: those given, or by size. progress: in proportion to the absolute change
    of each part's running solve rate, so that parts which are learned, or forgotten, come more often."""
    mixture_floor: float = option(FLOOR, above=0, below=1)
    """With --mixture-weights progress: share of the prompts that goes by the fixed weights, so that no part is
    forgotten."""


AnyMixture = TypeVar("AnyMixture", bound=MixtureGroup)


def settings_of(config: MixtureGroup) -> dict[str, Any]:
    """Return the settings of a part, with their types: where nothing is sampled, rows and their form alone."""
    sampled = hasattr(config, "max_tokens")
    return PART if sampled else {name: PART[name] for name in OF_ROWS}


def parts_of(config: AnyMixture) -> dict[str, AnyMixture]:
    """Return the options of each part of a mixture, by its name; {} where the run has none.

    Raises UserError, in one line, for a setting that does not exist or fit, and for a part without tasks or environment.
    """
    found: dict[str, AnyMixture] = {}
    for name, given in config.mixture.items():
        own = _read_part(config, name, given)
        own.pop("weight", None)
        if own.get("chat") is False:
            own.setdefault("system", None)  # that of the run belongs to messages
        if not own.get("tasks") and not task_set(own.get("env")):
            raise UserError(f"--mixture.{name}.tasks is missing: give the rows of this part")
        found[name] = replace(config, mixture={}, mixture_temperature=1.0, **own)
        if "env" in settings_of(config) and not getattr(found[name], "env", ""):
            raise UserError(
                f"--mixture.{name}.env is missing: give the reward or environment that scores the replies of this part"
            )
    return found


def weights_of(config: MixtureGroup, sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the share of each part in the prompts: by the given weights, or by the numbers of tasks.

    Raises UserError where only some parts have weights.
    """
    given = {name: _read_part(config, name, own).get("weight") for name, own in config.mixture.items()}
    missing = [name for name, weight in given.items() if weight is None]
    if missing and len(missing) < len(given):
        raise UserError(
            f"--mixture.{missing[0]}.weight is missing: give every part a weight, or none for weights by size"
        )
    power = 1 / config.mixture_temperature if missing else 1.0
    weights = {name: float(sizes[name]) if weight is None else float(weight) for name, weight in given.items()}
    largest = max(weights.values())  # powers and sums of numbers from 0 to 1 are finite
    weights = {name: (weight / largest) ** power for name, weight in weights.items()}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def check_mixture(config: MixtureGroup) -> None:
    """Raise UserError, in one line, for a mixture that contradicts other options."""
    if isinstance(config, MixtureWeightsGroup) and config.mixture_weights == "fixed" and _floored(config):
        raise UserError("--mixture-floor has no effect without --mixture-weights progress: leave it out")
    if not config.mixture:
        if config.mixture_temperature != 1:
            raise UserError("--mixture-temperature has no effect without --mixture: leave it out")
        if isinstance(config, MixtureWeightsGroup) and config.mixture_weights != "fixed":
            raise UserError("--mixture-weights has no effect without --mixture: leave it out")
        return
    if getattr(config, "tasks", ""):
        raise UserError(
            "--tasks and --mixture both give rows: make --tasks a part of the mixture, or leave one of them out"
        )
    if getattr(config, "curriculum", "uniform") == "stages":
        raise UserError("--curriculum stages needs one set of rows, and --mixture has several: leave one of them out")
    parts_of(config)
    if config.mixture_temperature != 1 and any("weight" in own for own in config.mixture.values()):
        raise UserError(
            "--mixture-temperature has no effect where parts have weights: leave it out, or leave the weights out"
        )
    weights_of(config, dict.fromkeys(config.mixture, 1))


def _floored(config: MixtureWeightsGroup) -> bool:
    """Whether a floor was chosen: another one, or the default one explicitly."""
    given: Collection[str] = getattr(config, "given", ())
    explicit = "mixture_floor" in given and len(given) < len(fields(config))  # a resumed run gives every option
    return explicit or config.mixture_floor != FLOOR


def _read_part(config: MixtureGroup, name: str, given: Any) -> dict[str, Any]:
    """Return the settings of a part in their types; bounds are those of the options."""
    if not name or PART_SEPARATOR in name:
        raise UserError(f"--mixture.{name}: a part has a name without {PART_SEPARATOR}")
    if not isinstance(given, Mapping):
        raise UserError(f"--mixture.{name} needs settings: --mixture.{name}.tasks rows.jsonl")
    bounds = {f.name: setting_of(f).bounds for f in fields(config)}
    read: dict[str, Any] = {}
    for word, value in given.items():
        plain, where = word.replace("-", "_"), f"--mixture.{name}.{word}"
        known = list(settings_of(config))
        if plain not in known:
            raise UserError(f"{where}: not a setting of a part{near_or_all(plain, known, len(known))}")
        read[plain] = _columns(value, where) if plain == "fields" else convert(value, PART[plain], where)
        if plain == "weight" and not 0 < read[plain] < float("inf"):
            raise UserError(f"{where} must be above 0, not {read[plain]:g}: to skip a part, leave it out")
        if plain in bounds:
            bounds[plain].check(where, read[plain])
    return read


def _columns(value: Any, where: str) -> dict[str, str]:
    """Return the renamed columns of a part, from a table or, as the command line has it, its JSON text."""
    with suppress(ValueError, RecursionError):
        value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, Mapping) or not all(isinstance(own, str) for own in value.values()):
        raise UserError(f"{where} renames columns: write {where}.prompt COLUMN, or a table in a recipe")
    return dict(value)


def of_part(name: str, error: UserError, more: str = "") -> UserError:
    """Return an error of a part's rows or environment, with its options as those of the part."""
    options = "|".join(word.replace("_", "-") for word in PART)
    told = re.sub(rf"(?<!\S)--({options})(?![\w-])", rf"--mixture.{name}.\1", str(error))
    return UserError(f"part {name} of the mixture: {told}{more}")
