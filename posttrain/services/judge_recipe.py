"""Recipe of a judge: a TOML file, parsed strictly.

A recipe with an endpoint describes a judge there; one with a template describes a checkpoint of this machine.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from posttrain.core import user_files
from posttrain.core.coerce import convert
from posttrain.core.component import option, setting_of
from posttrain.core.messages import toml_problem
from posttrain.core.option_aliases import suggestion
from posttrain.core.types import UserError
from posttrain.data.tasks_from_rows import Pattern, parse_template

RUBRIC = (
    "How well the reply does what it was asked to do: it is right, complete, clear, and no longer than it has to be."
)
OPERATION = ("key_env", "calls", "timeout", "retries", "requests_per_minute", "prompt_price", "reply_price", "cache")
"""Settings that do not affect the answers."""
PLACES = ("prompt", "response", "reference")
"""Placeholders of a template."""


@dataclass(frozen=True)
class Criterion:
    """One of several criteria."""

    name: str
    """Name of the part of the reward."""
    rubric: str
    """Description of a good reply."""
    weight: float = option(1.0, above=0)
    """Weight of the part, relative to the others."""


@dataclass(frozen=True)
class Recipe:
    """A judge behind an endpoint: the model, its rubric and the format of its answers."""

    endpoint: str
    """Address of an OpenAI-compatible server, up to /v1: http://127.0.0.1:8000/v1."""
    model: str
    """Name of the model on that server."""
    kind: Literal["scalar", "pairwise"] = "scalar"
    """scalar: a score for a reply; pairwise: which of two replies is better, asked in both orders."""
    rubric: str = RUBRIC
    """Description of a good reply."""
    criteria: tuple[Criterion, ...] = ()
    """Instead of one rubric: [[criteria]] with name, rubric and weight. The reward is their weighted mean."""
    together: bool = True
    """Whether one call asks for all criteria, or each criterion has a call of its own."""
    scale: tuple[float, float] = (1.0, 10.0)
    """Lowest and highest score of a scalar judge."""
    reason: bool = True
    """Whether the judge writes its reasons before its verdict."""
    structured: Literal["schema", "object", "none"] = "schema"
    """Structured output to request from the endpoint: output that follows the JSON schema, any JSON object, or nothing.
    Answers are checked against the schema in every case."""
    max_tokens: int = option(512, above=0)
    """Maximum number of tokens in an answer."""
    temperature: float = option(0.0, least=0)
    """Sampling temperature of the judge."""
    key_env: str = ""
    """Environment variable with the key, if the endpoint needs one."""
    calls: int = option(64, above=0, most=4096)
    """Maximum number of concurrent calls."""
    requests_per_minute: float | None = option(None, above=0)
    """Maximum number of calls begun per minute. Default: no limit."""
    timeout: float = option(60.0, above=0, most=86_400)
    """Timeout of a call."""
    retries: int = option(5, least=0, most=100)
    """Number of retries of a call after 408, 429, 5xx, a timeout or a lost connection."""
    prompt_price: float = option(0.0, least=0)
    """Cost of a million prompt tokens, in any currency: it is counted in the timings."""
    reply_price: float = option(0.0, least=0)
    """Cost of a million tokens of answers."""
    cache: bool = True
    """Keep valid answers in the user's cache folder, for all runs."""

    @property
    def all_criteria(self) -> tuple[Criterion, ...]:
        """All criteria; a single rubric is one criterion."""
        return self.criteria or (Criterion("score", self.rubric),)

    def identity(self) -> dict[str, Any]:
        """Return the settings that influence the answers, without the address, which may change for the same model."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in (*OPERATION, "endpoint")}


@dataclass(frozen=True)
class Generative:
    """A judge of this machine: a checkpoint that reasons before its verdict."""

    model: str
    """Folder of a checkpoint or of a run."""
    template: str
    """Prompt template, such as "{prompt}\\n{response}\\n"; {reference} is a known good answer. A brace is {{ or }}."""
    chat: bool = False
    """Wrap the prompt as a user message in the checkpoint's chat template."""
    marker: str = "verdict:"
    """Text before the verdict; the last one in a reply counts."""
    words: tuple[str, str] = ("yes", "no")
    """The verdicts, worth 1 and 0."""
    scale: tuple[float, float] | None = None
    """Instead of words: lowest and highest score."""
    votes: int = option(1, above=0, most=1024)
    """Replies to each question. The answer is the mean of their verdicts."""
    answer: Literal["share", "probability"] = "share"
    """Value of a vote: its verdict, 1 or 0, or the probability of the first word at the place of the verdict."""
    temperature: float = option(0.0, least=0)
    """Sampling temperature; 0 is greedy and gives one vote."""
    max_tokens: int = option(256, above=0)
    """Token budget of a reply. One that is cut off is no vote."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply, besides the end-of-sequence token."""
    seed: int = option(0, least=-(2**62), most=2**62)
    """Random seed: seed and question determine the votes."""
    slots: int = option(256, above=0)
    """Number of votes sampled at once."""

    @property
    def pattern(self) -> Pattern:
        """Return the template as literal texts and placeholders."""
        return parse_template(self.template, "template")

    def identity(self) -> dict[str, Any]:
        """Return the settings that influence the answers, in addition to the weights."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in ("model", "slots")}


def read_recipe(file: str | Path) -> Recipe | Generative:
    """Read a recipe. Raises UserError, in one line, if the file is unreadable or invalid."""
    try:
        content = tomllib.loads(user_files.text(file))
    except FileNotFoundError:
        raise UserError(f"the judge's recipe {file}: there is no such file") from None
    except OSError as error:
        raise UserError(f"the judge's recipe {str(file)[:100]} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not valid TOML: {toml_problem(error)}") from error
    read = generative_of if "template" in content and "endpoint" not in content else recipe_of
    return read(content, f"{file}: ")


def generative_of(content: Mapping[str, Any], where: str = "") -> Generative:
    """Create a generative judge with these settings. Raises UserError, in a line that begins with `where`."""
    stop = content.get("stop", [])
    recipe = _filled(Generative, {**content, "stop": [stop] if isinstance(stop, str) else stop}, where)
    places = [place for _, place in parse_template(recipe.template, f"{where}template") if place is not None]
    if unknown := [place for place in places if place not in PLACES]:
        raise UserError(
            f"{where}template has the unknown place {{{unknown[0]:.40}}}; give {{prompt}}, {{response}} or {{reference}}"
        )
    if "response" not in places:
        raise UserError(f"{where}template has no place {{response}}: the judge would not see what it judges")
    if not recipe.marker.strip():
        raise UserError(f"{where}marker is empty; give the text before the verdict, such as verdict:")
    if not all(word.strip() for word in recipe.words) or recipe.words[0].casefold() == recipe.words[1].casefold():
        raise UserError(f'{where}words are {recipe.words!r:.80}; give two, the good one first: ["yes", "no"]')
    if not all(recipe.stop):
        raise UserError(f"{where}stop has an empty string, at which every reply would end: leave it out")
    if recipe.scale is not None:
        _check_scale(recipe.scale, where)
        if {"words", "answer"} & content.keys():
            raise UserError(f"{where}scale does not go with words and answer: leave out scale, or these")
    if recipe.votes > 1 and recipe.temperature == 0:
        raise UserError(
            f"{where}votes {recipe.votes} at temperature 0 are all the same: give a temperature, such as 1.0"
        )
    return recipe


def recipe_of(content: Mapping[str, Any], where: str = "") -> Recipe:
    """Create a recipe with these settings. Raises UserError, in a line that begins with `where`."""
    given = dict(content)
    tables = given.pop("criteria", [])
    if not isinstance(tables, list | tuple) or not all(isinstance(table, Mapping) for table in tables):
        raise UserError(f"{where}criteria are tables: [[criteria]], then name, rubric and weight")
    criteria = tuple(_filled(Criterion, table, f"{where}[[criteria]] ") for table in tables)
    recipe = dataclasses.replace(_filled(Recipe, given, where), criteria=criteria)
    if not re.match(r"https?://[^/\s]+", recipe.endpoint):
        raise UserError(f"{where}endpoint is {recipe.endpoint!r:.60}; an address begins with http:// or https://")
    _check_scale(recipe.scale, where)
    if criteria and "rubric" in content:
        raise UserError(f"{where}rubric and criteria exclude each other: each criterion has a rubric of its own")
    names = [criterion.name for criterion in criteria]
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) or name in ("reward", "reason") or names.count(name) > 1:
            raise UserError(
                f"{where}a criterion has the name {name!r:.80}; give each a different name of letters, digits, _ and -"
            )
    return recipe


def _check_scale(scale: tuple[float, float], where: str) -> None:
    low, high = scale
    if not low < high or max(abs(low), abs(high)) > 1e6:
        raise UserError(
            f"{where}scale is {low:g} to {high:g}; give the lowest score, then the highest: scale = [1, 10]"
        )


Kind = TypeVar("Kind", Recipe, Criterion, Generative)


def _filled(kind: type[Kind], given: Mapping[str, Any], where: str) -> Kind:
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind) if f.name != "criteria"]
    if unknown := [name for name in given if name not in known]:
        hint = suggestion(unknown[0], known) or f"; there are {', '.join(known)}"
        raise UserError(f"{where}unknown setting {unknown[0]!r:.60}{hint}")
    if missing := [f.name for f in fields(kind) if f.default is dataclasses.MISSING and f.name not in given]:
        way = ": the address of a server, or a template where model is a folder" if missing[0] == "endpoint" else ""
        raise UserError(f"{where}{missing[0]} is missing{way}")
    values = {name: convert(_numbers(value), hints[name], f"{where}{name}") for name, value in given.items()}
    made = kind(**values)
    for f in fields(kind):
        setting_of(f).bounds.check(f"{where}{f.name}", getattr(made, f.name))
        if f.default is dataclasses.MISSING and not getattr(made, f.name).strip():
            raise UserError(f"{where}{f.name} is empty")
    return made


def _numbers(value: Any) -> Any:
    """Convert TOML's lists to tuples."""
    return tuple(value) if isinstance(value, list) else value
