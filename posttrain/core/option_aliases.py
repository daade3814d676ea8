"""The names of other trainers' options, and the equivalent options here."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable

from posttrain.core.foreign_options import ANSWERS, ELSEWHERE
from posttrain.core.messages import near

HERE = "; here it is "
ALMOST = 0.85  # similarity of a word to another trainer's name from which it counts as a slip
OPTION = re.compile(r"\{([\w.]+)\}")
_OF_VERBS = re.compile(r"(\{\w+\}) \((rl|sft)\) or (\{\w+\}(?: = [^()]+)?) \((rl|sft)\)")
_OR = re.compile(r", or \{(\w+)\}$")


def is_foreign(word: str, known: Iterable[str]) -> bool:
    """Return whether only another trainer has an option of this name."""
    key = entry(word, {**ELSEWHERE, **ANSWERS})
    return bool(key) and key not in [name.replace("-", "_") for name in known]


def entry(word: str, table: Container[str]) -> str:
    """Return the longest ending of a dotted name that has an entry in the table; "" if none has."""
    parts = _plain(word).split(".")
    endings = (".".join(parts[first:]) for first in range(len(parts)))
    return next((ending for ending in endings if ending in table), "")


def direct(word: str) -> str:
    """Return the option here that accepts the value of another trainer's option unchanged; "" if there is none."""
    here = entry(word, ELSEWHERE)
    found = OPTION.fullmatch(ELSEWHERE.get(here, ""))
    return found[1] if found and len(here) >= len(entry(word, ANSWERS)) else ""


def answer(word: str) -> str:
    """Return the entry of a name, with options as the command line writes them, or its answer; "" for an unknown name.

    Of two endings of a name with an entry, the longer one decides.
    """
    here, other = entry(word, ELSEWHERE), entry(word, ANSWERS)
    text = ANSWERS[other] if len(other) > len(here) else ELSEWHERE[here] if here else ""
    return OPTION.sub(lambda found: "--" + found[1].replace("_", "-"), text)


def _plain(word: str) -> str:
    return word.lstrip("-+~").replace("-", "_").lower()


def _of_this_verb(meant: str, names: Collection[str]) -> str:
    """Return the entry without the options that only other verbs have."""

    def chosen(found: re.Match[str]) -> str:
        (one, of), (other, _) = found.group(1, 2), found.group(3, 4)
        rows, prompts = "rows" in names, "prompts" in names
        return found[0] if rows == prompts else one if prompts == (of == "rl") else other

    meant = _OF_VERBS.sub(chosen, meant)
    return _OR.sub("", meant) if (other := _OR.search(meant)) and other[1] not in names else meant


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?", or "; here it is ...", for an unknown name; "" where no name is similar.

    A word of the command line ("--stesp") is answered with one ("--steps").
    """
    from difflib import get_close_matches

    plain = _plain(word).rpartition(".")[2]
    names = [name.replace("-", "_") for name in known]
    flags = word.startswith("--")

    def named(name: str) -> str:
        return "--" + name.replace("_", "-") if flags else name

    def option(found: re.Match[str]) -> str:
        return named(found[1])

    key, other = entry(word, ELSEWHERE), entry(word, ANSWERS)
    meant = _of_this_verb(ELSEWHERE.get(key, ""), names) if key not in names else ""
    if any(name.partition(".")[0] in names for name in OPTION.findall(meant)) and len(key) >= len(other):
        return HERE + OPTION.sub(option, meant)
    if other and other not in names:
        return "; " + OPTION.sub(option, ANSWERS[other])
    if plain in names and plain != _plain(word):
        return f"{HERE}{named(plain)}"
    if close := near(plain, names):
        return re.sub(r"'(\w+)'", option, close) if flags else close
    for foreign in [] if plain in ELSEWHERE else get_close_matches(plain, ELSEWHERE, 1, ALMOST):
        here = suggestion(f"--{foreign}" if flags else foreign, known)
        if here.startswith(HERE):
            return f"; {named(foreign)} is {here.removeprefix(HERE)} here"
    return ""
