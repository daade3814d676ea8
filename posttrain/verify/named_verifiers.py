"""Verifiers by name, as in `--env verify:exact_match`: one table for the command line, `check` and the documents.

The table defines which columns of a row a verifier reads, and which part of a reply. All other parameters are settings
after the name, parsed as the parameter's type: verify:within,least=3,unit=sentences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from posttrain.core.coerce import convert
from posttrain.core.messages import near_or_all, near_or_where, short
from posttrain.core.types import VERIFIER_PREFIX, Invalid, Task, UserError
from posttrain.verify.answer import final_answer, last_boxed
from posttrain.verify.citation import cites_every_sentence, cites_what_was_shown, quotes_verbatim
from posttrain.verify.fenced import without_thoughts
from posttrain.verify.format import between, sections, tags
from posttrain.verify.json_schema import matches_schema
from posttrain.verify.language import in_language, language_share
from posttrain.verify.length import count, length_error, length_penalty, within
from posttrain.verify.math import verify
from posttrain.verify.numeric import same_number
from posttrain.verify.pattern import matches
from posttrain.verify.refusal import refusal_reward, refuses
from posttrain.verify.repetition import distinct, longest_repeat, looping, repetition_penalty
from posttrain.verify.short_answer import contains_answer, exact_match, f1
from posttrain.verify.similarity import bleu, chrf, edit_similarity, rouge_l
from posttrain.verify.syntax import defines, parses, tree_similarity
from posttrain.verify.toxicity import clean, toxicity
from posttrain.verify.unit_tests import passes_tests, share_of_tests

PREFIX = VERIFIER_PREFIX
ANSWERS: Mapping[str, Callable[[str], str | None]] = MappingProxyType(
    {
        "final": lambda reply: final_answer(reply) or without_thoughts(reply).strip(),
        "reply": lambda reply: without_thoughts(reply).strip(),
        "tags": lambda reply: between(reply, "answer"),
        "boxed": last_boxed,
    }
)
"""Ways to extract the answer from a reply: the setting `answer` of verifiers that compare answers."""
_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class NamedVerifier:
    """A verifier and the columns of a row that it reads.

    Its function gets the reply, or the answer in it, then the parameters in `columns` (parameter -> column) and
    settings.
    """

    name: str
    function: Callable[..., Any]
    columns: Mapping[str, str] = field(default_factory=dict)
    answers: bool = False  # whether the function gets the answer in a reply instead of the reply
    success: float | None = 1.0  # its best verdict; None: there is none, as for a count or a penalty

    @property
    def idea(self) -> str:
        """The verifier's description: the first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @cached_property
    def hints(self) -> dict[str, Any]:
        """The types of the function's parameters."""
        return get_type_hints(self.function)

    def needs(self, parameter: str) -> bool:
        """Return whether a parameter has no default."""
        return inspect.signature(self.function).parameters[parameter].default is _EMPTY

    @cached_property
    def settings(self) -> dict[str, tuple[Any, Any]]:
        """The verifier's settings -> (type, default); there is no default where a column has the value."""
        parameters = inspect.signature(self.function).parameters
        found: dict[str, tuple[Any, Any]] = {"answer": (Literal[tuple(ANSWERS)], "final")} if self.answers else {}
        for name in list(parameters)[1:]:
            if (hint := _as_text(self.hints[name])) is not None:
                found[name] = (hint, parameters[name].default)
        return found

    def columns_of(self, chosen: Collection[str] = ()) -> list[str]:
        """Return the columns that the verifier reads with these settings; optional ones in brackets."""
        return [
            column if self.needs(name) else f"[{column}]" for name, column in self.columns.items() if name not in chosen
        ]

    def reward(self, options: Mapping[str, str | None] = MappingProxyType({})) -> NamedReward:
        """Return the reward function for settings given as text. Raises UserError for an unknown or invalid setting."""
        label = f"--env {PREFIX}{self.name}"
        chosen = {}
        for name, text in options.items():
            if name not in self.settings:
                has = near_or_all(name, list(self.settings)) if self.settings else "; it has none"
                raise UserError(f"{label}: no setting {name!r}{has}")
            if text is None:
                raise UserError(f"{label}: the setting {name} has no value: write {PREFIX}{self.name},{name}=VALUE")
            chosen[name] = convert(text, self.settings[name][0], f"{label}: {name}")
        for name, (_, default) in self.settings.items():
            if default is _EMPTY and name not in chosen and name not in self.columns:
                raise UserError(f"{label} needs the setting {name}: {PREFIX}{self.name},{name}=VALUE")
        return NamedReward(self, chosen)


@dataclass(frozen=True)
class NamedReward:
    """The reward function of a named verifier with its settings."""

    verifier: NamedVerifier
    chosen: Mapping[str, Any]

    def __call__(self, task: Task, reply: str) -> float | Invalid:
        chosen = dict(self.chosen)
        judged = ANSWERS[chosen.pop("answer", "final")](reply) if self.verifier.answers else reply
        for parameter, column in self.verifier.columns.items():
            if parameter in chosen:
                continue
            if task.get(column) is None:
                if self.verifier.needs(parameter):
                    return self._invalid(
                        f"reads the column {column!r}, which the row lacks: rename one with --fields.{column} COLUMN"
                    )
                continue
            try:
                chosen[parameter] = _as_column(task[column], self.verifier.hints[parameter])
            except TypeError as error:
                return self._invalid(f"cannot read the column {column!r}: {error}")
        value = self.verifier.function(judged, **chosen)
        return value if isinstance(value, Invalid) else float(value)

    def _invalid(self, reason: str) -> Invalid:
        return Invalid(f"{PREFIX}{self.verifier.name} {reason}")


def _refusal(reply: str, harmful: bool, *, missed: float = 0.0, over: float = 0.0) -> float | Invalid:
    """1.0 for refusing a harmful request and for not refusing a harmless one."""
    return refusal_reward(harmful, reply, missed=missed, over=over)


_GOLD, _GOLDS, _LIKE = {"gold": "answer"}, {"golds": "answer"}, {"references": "reference"}
_TESTS = {"tests": "tests", "setup": "setup", "entry": "entry"}
VERIFIERS = {
    verifier.name: verifier
    for verifier in (
        NamedVerifier("exact_match", exact_match, _GOLDS, answers=True),
        NamedVerifier("f1", f1, _GOLDS, answers=True),
        NamedVerifier("contains_answer", contains_answer, _GOLDS, answers=True),
        NamedVerifier("numeric", same_number, _GOLD, answers=True),
        NamedVerifier("math", verify, _GOLD),
        NamedVerifier("matches_schema", matches_schema, {"schema": "schema"}),
        NamedVerifier("tags", tags),
        NamedVerifier("sections", sections, {"headings": "headings"}),
        NamedVerifier("matches", matches, {"pattern": "pattern"}),
        NamedVerifier("within", within),
        NamedVerifier("length_penalty", length_penalty, success=None),
        NamedVerifier("length_error", length_error, {"target": "target"}, success=None),
        NamedVerifier("count", count, success=None),
        NamedVerifier("in_language", in_language, {"code": "language"}),
        NamedVerifier("language_share", language_share, {"code": "language"}),
        NamedVerifier("distinct", distinct),
        NamedVerifier("repetition_penalty", repetition_penalty, success=None),
        NamedVerifier("longest_repeat", longest_repeat, success=None),
        NamedVerifier("looping", looping, success=None),
        NamedVerifier("cites_what_was_shown", cites_what_was_shown, {"shown": "shown"}),
        NamedVerifier("cites_every_sentence", cites_every_sentence),
        NamedVerifier("quotes_verbatim", quotes_verbatim, {"sources": "sources"}),
        NamedVerifier("parses", parses),
        NamedVerifier("defines", defines, {"signature": "signature"}),
        NamedVerifier("tree_similarity", tree_similarity, {"reference": "reference"}),
        NamedVerifier("share_of_tests", share_of_tests, _TESTS),
        NamedVerifier("passes_tests", passes_tests, _TESTS),
        NamedVerifier("edit_similarity", edit_similarity, _LIKE),
        NamedVerifier("rouge_l", rouge_l, _LIKE),
        NamedVerifier("bleu", bleu, _LIKE),
        NamedVerifier("chrf", chrf, _LIKE),
        NamedVerifier("refuses", refuses),
        NamedVerifier("refusal_reward", _refusal, {"harmful": "harmful"}),
        NamedVerifier("clean", clean),
        NamedVerifier("toxicity", toxicity, success=None),
    )
}
"""Name -> verifier, in the order of docs/verifiers.md."""

OTHERS = {
    "Weighted": 'is written as a sum: "verify:exact_match*0.9 + verify:tags*0.1"',
    "between": "finds a text: give verify:exact_match,answer=tags",
    "cited": "finds ids: verify:cites_what_was_shown judges them",
    "code_in": "finds code: verify:parses or verify:passes_tests judges it",
    "fenced": "finds a text: a reward of your own may judge it",
    "final_answer": "finds the answer: verify:exact_match, verify:numeric or verify:math judges it",
    "final_score": "reads a judge's reply: --env verdict rewards one that is right",
    "final_verdict": "reads a judge's reply: --env verdict rewards one that is right",
    "find_json": "finds a value: verify:matches_schema judges it",
    "last_boxed": "finds the answer: give verify:math, or verify:exact_match,answer=boxed",
    "refusal_rates": "is for a log: verify:refusal_reward is the reward",
    "same_number": "is called verify:numeric",
    "without_thoughts": "finds a text: a reward of your own may judge it",
}
"""Functions of `posttrain.verify` that are not verifiers by name -> what to use instead."""


def find_verifier(name: str) -> NamedVerifier:
    """Return the verifier with this name. Raises UserError with similar names if there is none."""
    if name in VERIFIERS:
        return VERIFIERS[name]
    if name in OTHERS:
        raise UserError(f"--env {PREFIX}{name}: {name} {OTHERS[name]}")
    raise UserError(
        f"--env {PREFIX}{name}: there is no such verifier{near_or_where(name, VERIFIERS, 'posttrain check --verifiers')}"
    )


def described(verifier: NamedVerifier, chosen: Collection[str] = ()) -> tuple[str, str, str]:
    """Return the columns that a verifier reads with these settings, its settings with defaults, and its description."""
    settings = [
        name if default is _EMPTY or default is None else f"{name}={_shown(default)}"
        for name, (_, default) in verifier.settings.items()
        if name not in verifier.columns
    ]
    return ", ".join(verifier.columns_of(chosen)), ", ".join(settings), verifier.idea


def sentence(verifier: NamedVerifier, chosen: Collection[str] = ()) -> str:
    """Return a verifier's description, columns and settings in one line."""
    columns, settings, idea = described(verifier, chosen)
    return f"{idea} Reads {columns or 'no column'}{'; settings: ' * bool(settings)}{settings}."


def _shown(default: Any) -> str:
    text = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return text.lower() if isinstance(default, bool) else text


def _as_text(hint: Any) -> Any:
    """Return the type as which a setting's text is parsed; None for types without a text form: a function, a
    mapping.
    """
    if get_origin(hint) in (Union, UnionType):
        kinds = [read for one in get_args(hint) if one is not type(None) and (read := _as_text(one)) is not None]
        return (kinds[0] | None if type(None) in get_args(hint) else kinds[0]) if kinds else None
    if get_origin(hint) is Sequence:
        return tuple[str, ...]
    return hint if hint in (bool, int, float, str) or get_origin(hint) in (Literal, tuple) else None


def _as_column(value: Any, hint: Any) -> Any:
    """Convert a row's value to a parameter's type. Numbers become text, such as an answer of 42 in JSON.

    Raises TypeError for a value of another type.
    """
    if hint in (bool, int, float) or any(get_origin(one) is Mapping for one in get_args(hint)):
        return value
    return [_text(one) for one in value] if isinstance(value, list | tuple) else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise TypeError(f"expected text, or a list of texts, not {short(value)}")
