"""Short commands that work, one a verb, and every option that a verb has: cases change them."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args, get_origin

SFT = "--tasks rows.jsonl --rows 4 --quiet --threads 1"
SCRATCH = f"{SFT} --tokenizer characters --hidden 8 --heads 1 --layers 1"
RL = (
    "--tasks rows.jsonl --env env.py:reward --steps 1 --prompts 2 --group 2 --max-tokens 2 --quiet --threads 1 "
    "--env-workers 0"
)
EVAL = (
    "--tasks rows.jsonl --env env.py:reward --samples 1 --success 1 --k 1 --max-tokens 2 --limit 2 --threads 1 "
    "--env-workers 0"
)
CHECK = "--tasks rows.jsonl --env env.py:reward --limit 1"
CHAT = "--max-tokens 2"


def without(words: list[str], option: str) -> list[str]:
    """A command line without one option and its value: no option may be given twice."""
    if f"--{option}" not in words:
        return words
    at = words.index(f"--{option}")
    valued = at + 1 < len(words) and not words[at + 1].startswith("--")
    return words[:at] + words[at + 1 + valued :]


WORDS = {bool: "", int: "INT", float: "FLOAT", str: "STR"}


@cache
def options(verb: str) -> dict[str, str]:
    """Every option of a verb, from its declaration: name -> INT, FLOAT, STR, CHOICE, or "" for a switch or a table."""
    from posttrain.config.option_groups import options_of
    from posttrain.config.verbs import VERBS

    kind = VERBS[verb].options
    hints = {option.name: option.type for option in options_of(kind) if option.name != "settings"}
    hints |= {name: flag.type for name, flag in kind.flags().items()}
    return {name.rstrip("_").replace("_", "-"): _word(hint) for name, hint in hints.items()}


def _word(hint: Any) -> str:
    inner = [part for part in get_args(hint) if part not in (type(None), Ellipsis)]
    if get_origin(hint) is Literal:
        return "CHOICE"
    if get_origin(hint) is dict:
        return ""
    return _word(inner[0]) if inner else WORDS[hint]
