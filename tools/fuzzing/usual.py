"""Short commands that work, one a verb, and every option that a verb has: cases change them."""

from __future__ import annotations

from functools import cache

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


@cache
def options(verb: str) -> dict[str, str]:
    """Every option of a command, as its help has it: name -> INT, FLOAT, STR, CHOICE, or "" for a switch or a table."""
    from posttrain.cli.command_table import command_of
    from posttrain.cli.help_pages import entries_of
    from posttrain.cli.main import app

    command, found = command_of([verb]), {}
    assert command is not None, verb
    for entry in entries_of(app, command):
        name, _, word = entry.names.partition(", --no-")[0].partition(" ")
        if name.startswith("--"):
            kind = "CHOICE" if "|" in word or word == "CHOICE" else {"N": "INT", "X": "FLOAT", "": ""}.get(word, "STR")
            found[name[2:].partition(".NAME")[0]] = "" if ".NAME" in name else kind
    assert found, f"{verb} has no option"
    return found
