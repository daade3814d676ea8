"""`posttrain init`: the files of a first run, for a reward, an agent, preferences or a judge.

Rows are generated here; the other files are in `init_files`, in one folder per kind.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

from posttrain.core import user_files
from posttrain.core.messages import clip, one_line
from posttrain.core.types import UserError

Kind = Literal["reward", "agent", "preferences", "judge"]
Rows = Iterator[dict[str, Any]]
TEMPLATES = Path(__file__).with_name("init_files")
SEED = 0
DIGITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
WORDS = ("zero", *DIGITS, "ten", "eleven", "twelve", *TEENS, "twenty", *(f"twenty-{digit}" for digit in DIGITS))


def init(folder: str = ".", *, kind: Kind = "reward") -> int:
    """Write the files of a first run: rows, reward, recipe.

    Parameters
    ----------
    folder
        Folder for the files, to be created (default: this one). Nothing in it is overwritten.
    kind
        Kind of run: a reward function, an agent with a tool, pairs to prefer, or a judge.
    """
    place = Path(folder)
    files = {name: text for name, (_, text) in files_of(kind).items()}
    if there := [name for name in files if (place / name).exists()]:
        raise UserError(f"{place / there[0]} is there already: choose another folder, or delete it")
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # a name that the system does not accept
        raise UserError(f"{clip(str(place))} cannot be written: {one_line(error)}") from error
    longest = max(len(str(place / name)) for name in files)
    for name, (what, _) in files_of(kind).items():
        print(f"wrote       {place / name!s:<{longest}}  {what}")
    enter = "" if place.resolve() == Path.cwd() else f"cd {folder} && "
    print(f"next        {enter}posttrain {FIRST[kind]}")
    return 0


def files_of(kind: Kind) -> dict[str, tuple[str, str]]:
    """Return name -> (description, text)."""
    made = {name: (what, "".join(json.dumps(row) + "\n" for row in rows())) for name, what, rows in ROWS[kind]}
    written = {name: (what, _template(kind, name)) for name, what in WRITTEN[kind]}
    return {**made, **written}


def _template(kind: Kind, name: str) -> str:
    own = TEMPLATES / kind / (f"{name}.txt" if name.endswith(".py") else name)  # a user's code is no module of ours
    return user_files.text(own)


# -- rows --------------------------------------------------------------------------------------------------------------


def _sums() -> Rows:
    for a, b, c in product(range(10), repeat=3):
        answer = str(a + b + c)
        yield {"prompt": f"{a}+{b}+{c}=", "response": answer, "answer": answer}


def _calculations() -> Rows:
    """Return products as tasks, with an episode that shows how the tool is used."""
    for a, b in product(range(2, 22), repeat=2):
        yield {"prompt": f"{a}*{b}? ", "answer": str(a * b), "replies": [f"<calc>{a}*{b}</calc>", str(a * b)]}


def _pairs() -> Rows:
    """Return sums whose better response is in digits, the worse one in words. Imitation gets one of the two."""
    draw = random.Random(SEED)
    for a, b, c in product(range(10), repeat=3):
        pair = {"chosen": str(a + b + c), "rejected": WORDS[a + b + c]}
        yield {"prompt": f"{a}+{b}+{c}=", "response": draw.choice(list(pair.values())), **pair}


def _answered() -> Rows:
    """Return the same sums, each with one of its two responses."""
    for row in _pairs():
        yield {"prompt": row["prompt"], "response": row["response"]}


def _checks() -> Rows:
    """Return replies to such sums (digits, words, broken ones), each with the verdict of a good judge."""
    draw = random.Random(SEED)
    for row in draw.sample(list(_pairs()), 200):
        broken = "".join(draw.sample(row["chosen"] + row["rejected"], draw.randrange(len(row["rejected"]))))
        for said, reason in ((row["chosen"], "digits"), (row["rejected"], "words"), (broken, "neither")):
            verdict = "yes" if said.isdigit() else "no"
            reason = "digits" if said.isdigit() else reason
            yield {"prompt": f"{row['prompt']}{said}\n", "response": f"{reason}. verdict: {verdict}"}


ROWS: dict[Kind, tuple[tuple[str, str, Callable[[], Rows]], ...]] = {
    "reward": (("rows.jsonl", "the tasks: prompts, answers, responses to imitate", _sums),),
    "agent": (("rows.jsonl", "the tasks: prompts, answers, episodes to imitate", _calculations),),
    "preferences": (("rows.jsonl", "pairs: prompts with a better and a worse response", _pairs),),
    "judge": (
        ("rows.jsonl", "the tasks: prompts, and responses to imitate", _answered),
        ("checks.jsonl", "replies with verdicts, from which the judge learns", _checks),
    ),
}
RECIPE = ("recipe.toml", "the options of every command")
WRITTEN: dict[Kind, tuple[tuple[str, str], ...]] = {
    "reward": (("reward.py", "the reward function"), RECIPE),
    "agent": (("agent.py", "the environment, with a tool"), RECIPE),
    "preferences": (RECIPE,),
    "judge": (
        ("judge.toml", "the judge"),
        ("train_judge.toml", "options to train it"),
        ("replies.txt", "sample replies to try it on"),
        RECIPE,
    ),
}
FIRST: dict[Kind, str] = {
    "reward": "check --config recipe.toml",
    "agent": "check --config recipe.toml",
    "preferences": "check --config recipe.toml",
    "judge": "sft --config train_judge.toml",
}
"""The next commands to type."""
