"""Data sets of reasoning-gym as tasks, with their scorers as rewards.

    python -m posttrain.envs.bridges.reasoning leg_counting --count 1000 > rows.jsonl
    posttrain rl --env reasoning-gym --tasks rows.jsonl ...

A row holds the whole entry, so its score depends neither on a seed nor on entries that another process would generate.
The answer is in <answer> tags; with the column "plain": true it is the whole reply.

Scorers read text of a policy: some call `eval` or sympy's parser on it, some raise, some do not end. So an answer is
scored in a separate process with limits, and an answer that would be executed must have a harmless form. If a scorer
fails on an answer, the reward is 0 if it can score the entry's own answer, else Invalid.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np

from posttrain.core.messages import near
from posttrain.core.seeds import seed_of
from posttrain.core.types import Invalid, Task, UserError
from posttrain.envs.bridges.bridge import need
from posttrain.envs.builtin.generated import read_json, write
from posttrain.verify.format import between
from posttrain.verify.limited_process import CheckFailed, limited

need("reasoning_gym", "reasoning_gym")

SUCCESS = 1.0  # the reward of a correct answer
SECONDS = 1.5  # processor time of a scorer
LONGEST = 20_000  # most characters of an answer
INSTRUCTION = "\nGive the answer alone in <answer> </answer>.\n"

LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Data sets whose scorers evaluate an answer: `LITERALS` as a list in Python's notation, `FORMULAS` by sympy."""
EXACT = frozenset({"game_of_life_halting"})
"""Data sets whose scorers accept any nonempty text: here the answer must equal the entry's own."""

_FORMULA = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[-+*/^(),\s]|[A-Za-z]+)*")
_NAME = re.compile("[A-Za-z]|a?(sin|cos|tan)|(sin|cos|tan)h|cot|sec|csc|exp|log|ln|sqrt|Abs|pi|Integral")


def reward(task: Task, reply: str) -> float | Invalid:
    """Return the score of the data set's scorer, from 0 to 1."""
    try:
        dataset, entry = str(task["dataset"]), json.dumps(task["entry"])
    except (KeyError, TypeError, ValueError) as error:
        return Invalid(f"the row was not made by this module: {type(error).__name__}: {error}")
    answer = reply.strip() if task.get("plain") else between(reply, "answer")
    if answer is None or len(answer) > LONGEST or not harmless(dataset, answer):
        return 0.0
    if dataset in EXACT:
        return float(answer == task["entry"]["answer"])
    config = json.dumps(task.get("config") or {})
    score = _score(dataset, config, entry, answer)
    if not isinstance(score, CheckFailed):
        return score
    own = task["entry"].get("answer") if isinstance(task["entry"], Mapping) else None
    known = _score(dataset, config, entry, own if isinstance(own, str) else "none")
    return Invalid(f"the scorer of {dataset} fails: {score.reason}") if isinstance(known, CheckFailed) else 0.0


def harmless(dataset: str, answer: str) -> bool:
    """Return whether an answer may be passed to the scorer: most read it as text, some evaluate it."""
    if dataset in LITERALS:
        try:
            ast.literal_eval(answer)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return not set(answer) & set("([{")  # without brackets nothing can be called
    if dataset in FORMULAS:
        names = re.findall("[A-Za-z]+", answer)
        return bool(_FORMULA.fullmatch(answer)) and all(map(_NAME.fullmatch, names))
    return dataset != "complex_arithmetic" or "nan" not in answer.lower()  # the scorer would give the full score


def _score(dataset: str, config: str, entry: str, answer: str) -> float | Invalid | CheckFailed:
    answer = answer.encode("utf-8", "replace").decode()
    found = limited(f"{__name__}:scored", dataset, config, entry, answer, seconds=SECONDS)
    if isinstance(found, CheckFailed | Invalid):
        return found
    if not isinstance(found, int | float) or not 0 <= found <= 1:
        return CheckFailed(f"its score is {found!r:.40}")
    return float(found)


# -- what runs in a process of its own ---------------------------------------------------------------------------------


def prepare() -> None:
    """Prepare the process that scores; called once."""
    import reasoning_gym  # noqa: F401


def scored(dataset: str, config: str, entry: str, answer: str) -> float:
    """Return the score of an answer to an entry; `config` and `entry` as JSON."""
    return float(_dataset(dataset, config).score_answer(answer, _restored(json.loads(entry))))


@lru_cache(8)
def _dataset(name: str, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(config))


# -- rows --------------------------------------------------------------------------------------------------------------


def tasks(
    count: int, seed: int, dataset: str, *, config: str = "", plain: bool = False, held_out: bool = False
) -> list[Task]:
    """Return rows of one data set, equal questions once. Held-out rows use another seed, and none of the training
    questions.

    `config`: settings of the data set, as JSON; `plain`: the whole reply is the answer.
    """
    settings = _settings(dataset, config)
    made = _made(dataset, settings, count, seed_of("reasoning-gym", seed))
    if held_out:
        seen = {entry["question"] for entry in made}
        fresh = _made(dataset, settings, count, seed_of("reasoning-gym", seed, "held out"))
        made = [entry for entry in fresh if entry["question"] not in seen]
    rows: dict[str, Task] = {}
    for entry in made:
        prompt = entry["question"].strip() + ("\n" if plain else INSTRUCTION)
        digest = sha256(entry["question"].encode()).hexdigest()[:12]
        row: Task = {"id": f"{dataset}-{digest}", "dataset": dataset, "prompt": prompt, "plain": plain}
        row |= {"config": settings} if settings else {}
        row["entry"] = _plain(entry)
        if isinstance(answer := entry["answer"], str):
            row |= {"answer": answer, "response": answer if plain else f"<answer>{answer}</answer>"}
        rows.setdefault(row["id"], row)
    return list(rows.values())


def _settings(dataset: str, config: str) -> dict[str, Any]:
    """Return the settings. Raises UserError for an unknown data set, or settings that are not an object."""
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS or dataset == "composite":
        raise UserError(f"reasoning-gym has no data set {dataset!r} with questions of its own{near(dataset, DATASETS)}")
    return read_json(config, "--config", 'settings, such as {"max_animals": 5}')


def _made(dataset: str, settings: dict[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    import reasoning_gym

    try:
        made = reasoning_gym.create_dataset(dataset, **{**settings, "size": count, "seed": seed % 2**31})
        return [made[place] for place in range(count)]
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"{dataset} with {settings}: {error}") from error


def _plain(value: Any) -> Any:
    """Encode a value for JSON, including tuples and keys that are not text.

    Raises UserError if it cannot be encoded.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(part) for part in value]}
    if not isinstance(value, dict):
        raise UserError(f"an entry has {value!r:.60}, which a row cannot hold")
    if all(isinstance(key, str) for key in value) and value.keys() not in ({"tuple"}, {"items"}):
        return {str(key): _plain(part) for key, part in value.items()}
    return {"items": [[_plain(key), _plain(part)] for key, part in value.items()]}


def _restored(value: Any) -> Any:
    """Invert `_plain`."""
    if isinstance(value, list):
        return [_restored(part) for part in value]
    if isinstance(value, dict):
        if value.keys() == {"tuple"}:
            return tuple(map(_restored, value["tuple"]))
        if value.keys() == {"items"}:
            return {_restored(key): _restored(part) for key, part in value["items"]}
        return {key: _restored(part) for key, part in value.items()}
    return value


if __name__ == "__main__":
    write(tasks)
