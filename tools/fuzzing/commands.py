"""Words of the command line and recipes: every option that a verb's --help names, with values of every wrong kind."""

from __future__ import annotations

import math
import os
import re
import tomllib
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.case import Case
from fuzzing.mutate import content_of, damage_file
from fuzzing.samples import REWARD, copy, rows, write_rows
from fuzzing.usual import CHAT, CHECK, EVAL, RL, SCRATCH, options, without

USUAL = {
    "sft": SCRATCH,
    "rl": f"{RL} --model plain",
    "eval": f"{EVAL} --model plain",
    "chat": f"plain {CHAT}",
    "check": CHECK,
    "algorithms": "grpo",
    "reproduce": "kl-estimators --seeds 0 --settings.samples 100 --settings.distributions 2 "
    "--settings.gradient_samples 20",
}
LONG = {
    "steps",
    "epochs",
    "samples",
    "eval-samples",
    "settings",
    "seeds",
    "replay",
    "minibatches",
    "tokens-per-microbatch",
}
"""Options of which a large value is right and only takes long."""

INTEGERS = (
    *(
        "0",
        "-1",
        "1",
        "2",
        "3",
        "7",
        "1.5",
        "nan",
        "inf",
        "1e3",
        "9" * 30,
        "-" + "9" * 12,
        "1000000000",
        "1000000000000",
    ),
    *("", " ", "text", "0x10", "1_000", "٣", "²", "-", "--", "true", "None", "1,2", "+2", "2147483648", "9" * 5000),
)
NUMBERS = (
    *(
        "0",
        "-1",
        "1",
        "0.5",
        "2",
        "1e-3",
        "1e30",
        "1e308",
        "1e999",
        "nan",
        "-inf",
        "inf",
        "1e-320",
        "",
        "x",
        "1,5",
        "-0.0",
    ),
    *("-0.5", "1.0000001", "0.9999999", "1e3", "-1e-9", "infinity", "0x1p3", "1e", "9" * 400),
)
TEXTS = (
    *(
        "",
        " ",
        "x",
        "nowhere",
        ".",
        "/",
        "/dev/null",
        "..",
        "two\nlines",
        "naïve",
        "x" * 5000,
        "-",
        "\udc80",
        "a:b",
        ":",
        "~",
    ),
    *(
        "rows.jsonl",
        "env.py",
        "env.py:reward",
        "plain",
        "plain/config.json",
        "pipe.jsonl",
        "endless.json",
        "cpu:7",
        "cuda",
        "meta",
        "None",
        "owner/name",
        "%s",
    ),
)
LINES = ("1+2=", " ", "\x00", "x" * 5000, "naïve", "<|im_end|>", "<|eos|>", "\t", "\x1b[A", "\udc80", "\\")
SMALL_TIME = ("0", "-1", "1", "2", "1.5", "nan", "inf", "-inf", "", "text", "1e-9", "-5", "1e3", "9e999")


def word(option: str, kind: str, random: Random) -> str:
    if option in LONG:
        return random.choice(SMALL_TIME)
    usual = {"INT": INTEGERS, "FLOAT": NUMBERS, "STR": TEXTS}.get(kind, TEXTS)
    return random.choice(usual if random.random() < 0.85 else [*INTEGERS, *NUMBERS, *TEXTS])


def files(place: Path, samples: Path) -> None:
    copy(samples, "plain", place)
    write_rows(place / "rows.jsonl", rows())
    (place / "env.py").write_text(REWARD)
    os.mkfifo(place / "pipe.jsonl")
    (place / "endless.json").symlink_to("/dev/zero")


def words(random: Random, place: Path, samples: Path) -> Case:
    files(place, samples)
    verb = random.choice(
        ["sft", "sft", "rl", "rl", "rl", "eval", "eval", "eval", "eval", "chat", "check", "algorithms", "reproduce"]
    )
    line = [verb, *USUAL[verb].split()]
    known = options(verb)
    broken: bool | None = None
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        option = random.choice(list(known))
        value = word(option, known[option], random)
        form = random.randrange(12)
        if random.random() < 0.95:
            line = without(line, option)
        if form < 6:
            line += [f"--{option}", value]
        elif form < 9:
            line += [f"--{option}={value}"]
        elif form == 9:
            line += [f"--{option}"] + ([] if random.random() < 0.5 else [value, value])
        elif form == 10:
            line += random.choice(
                [[f"--no-{option}"], [f"--{option}.x", value], [f"--{option[:-1]}", value], [f"-{option}"]]
            )
        else:
            line.insert(
                random.randrange(len(line) + 1), random.choice([*TEXTS, f"--{option}", "--help", "--config", "--"])
            )
    if random.random() < 0.1:
        line.pop(random.randrange(len(line)))
    if random.random() < 0.05:
        line = [random.choice([*TEXTS, verb.upper(), verb[:-1]]), *line[1:]]
    shown = [part if len(part) < 60 else part[:60] + "..." for part in line]
    return Case(line, " ".join(shown), broken, (), "1+2=\n\n", codes=(0, 2, 3))


def typed(random: Random, place: Path, samples: Path) -> Case:
    """What a person types in a chat: every line of it odd."""
    name = copy(samples, random.choice(["plain", "chat"]), place).name
    lines = [random.choice(LINES) for _ in range(random.randrange(4))]
    line = ["chat", name, *CHAT.split()]
    line += random.choice([[], [], ["--system", random.choice(TEXTS)], ["--temperature", "0"]])
    ending = random.choice(["", "\n\n"])
    return Case(line, f"{' '.join(line)!r:.80}: {lines!r:.200}", None, (), "\n".join(lines) + ending)


# -- recipes -----------------------------------------------------------------------------------------------------------

BASE: dict[str, dict[str, Any]] = {
    "sft": {"tasks": "rows.jsonl", "tokenizer": "characters", "hidden": 8, "heads": 1, "layers": 1, "rows": 4, "quiet": True,
            "threads": 1, "betas": [0.9, 0.99], "lr": 1e-3},
    "rl": {"tasks": "rows.jsonl", "model": "plain", "env": "env.py:reward", "steps": 1, "prompts": 2, "group": 2,
           "max_tokens": 2, "quiet": True, "threads": 1, "env_workers": 0, "stop": ["x"], "fields": {"prompt": "prompt"}},
    "eval": {"tasks": "rows.jsonl", "model": "plain", "env": "env.py:reward", "samples": 1, "success": 1, "k": [1],
             "max_tokens": 2, "limit": 2, "threads": 1, "env_workers": 0},
}  # fmt: skip
VALUES: tuple[Any, ...] = (
    *(
        0,
        1,
        -1,
        2,
        3,
        10**6 + 1,
        -(10**18),
        0.0,
        0.5,
        1.5,
        -0.5,
        1e308,
        1e-320,
        math.nan,
        math.inf,
        -math.inf,
        True,
        False,
    ),
    *(
        "",
        "x",
        "1",
        "nan",
        "true",
        "x" * 5000,
        "a\nb",
        "naïve",
        "rows.jsonl",
        "a\x00b",
        "\x00",
        ["\x00"],
        {"\x00": "\x00"},
        "pipe.jsonl",
        "endless.json",
        [],
        [1],
        ["a"],
        [[]],
        [1, "a"],
        {},
        {"a": 1},
    ),
    *({"a": {"b": []}}, [{}], [0.9, 0.999, 0.5], [-1.0, -1.0], [2, 2], "0.5", "-1", "grpo", ["1", "2"], {"prompt": 5}),
)
LITERALS = (
    "1979-05-27",
    "07:32:00",
    "1979-05-27T07:32:00Z",
    "0x1F",
    "1e5",
    "+1",
    "9" * 30,
    "'''a'''",
    "[1, [2, [3]]]",
    "{a.b = 1}",
)


class Literal(str):
    """TOML to be written as it stands."""


def toml(value: Any) -> str:
    """A value in TOML; tables inline."""
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {toml(inner)}" for name, inner in value.items()) + "}"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text) + '"'


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else toml(name)


def recipe(random: Random, place: Path, samples: Path) -> Case:
    files(place, samples)
    verb = random.choice(list(BASE))
    table: dict[str, Any] = dict(BASE[verb])
    what = "as it is"
    broken: bool | None = None
    said: tuple[str, ...] = ()
    known = [name.replace("-", "_") for name in options(verb) if "." not in name]
    for _ in range(random.choice([0, 1, 1, 1, 2])):
        name = random.choice([*table, *known])
        value = random.choice(VALUES) if random.random() < 0.85 else Literal(random.choice(LITERALS))
        if name.replace("_", "-") in LONG:
            value = random.choice([0, -1, 1.5, "x", [], {}, math.nan, True])
        table[name] = value
        what = f"{name} = {toml(value)[:80]}"
    if random.random() < 0.1:
        name = random.choice(["stesp", "", "a.b", "learning_rate", "num_generations", "naïve", "x" * 200, "--steps"])
        table[name], what, broken, said = 1, f"unknown option {name[:40]!r}", True, ("recipe.toml", f"{name}")
    title = verb
    if random.random() < 0.08:
        title = random.choice(["train", "", "RL", "sft.rl", f"{verb}.{verb}", "default"])
        what, broken, said = f"table [{title}]", True, ("recipe.toml",)
    lines = [
        f"[{'.'.join(_key(part) for part in title.split('.'))}]",
        *(f"{_key(n)} = {toml(v)}" for n, v in table.items()),
    ]
    if random.random() < 0.1:
        lines.insert(
            0, random.choice(["steps = 3", "x = {}", "[[rl]]", "[eval]\nk = 5", "rl = 5", "[rl.fields]\nx = 1"])
        )
        broken = None
    file = place / "recipe.toml"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if random.random() < 0.2:
        what, broken, said = damage_file(file, random), None, ()
    try:
        tomllib.loads(content_of(file).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        broken, said = True, ("recipe.toml",)
    line = [verb, "--config", "recipe.toml"]
    if random.random() < 0.05:
        line = random.choice(
            [
                [verb, "--config="],
                [verb, "--config"],
                ["--config", "recipe.toml"],
                ["chat", *line[1:]],
                [*line, *line[1:]],
            ]
        )
    return Case(line, f"{' '.join(line)}: {what}", broken, said, codes=(0, 2, 3))
