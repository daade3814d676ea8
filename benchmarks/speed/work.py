"""What is measured: prompts, lengths, sizes. Needs nothing but the standard library, so every environment can import it.

All sides sample from the same prompts, score with the same rewards (`rewards.py`) and read the same model folders
(`models.py`). Lengths that are given beforehand stand here as numbers, so that every side has the same tokens to sample.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

PROMPTS = 8  # per step
GROUP = 8  # rollouts per prompt
REQUESTS = PROMPTS * GROUP
FIXED = 128  # new tokens per request, where all replies have the same length
SFT_ROWS = 16  # per step
PAIRS = 8  # per step: 16 responses, as many as SFT has rows
KINDS_OF_PAIRS = {"gsm8k": 16, "short": 16}  # how many there are of each; a pass over them is two steps
BACKED_TOKENS = 48  # of each reply of models that transformers computes
DISTILLED = 16  # prompts of a step of distillation, a reply each
LEARNING_RATE = 1e-6
VOCABULARIES = (4096, 32768, 131072)

REAL = "smollm2"
"""The real model among those that are measured."""

CASES = ("fixed", "ragged")
"""What is sampled: see `requests`."""

MAX_TOKENS = {"5m": 256, "27m": 200, "smollm2": 48}
"""Most tokens of a reply in a GRPO step: of the real model few, enough for a sentence. The 27 M model is random and ends
by chance (see `models.py`): with this bound and its chance its replies have the mean and the maximum of the 5 M model's own.
"""

BUDGETS = (
    *(86, 142, 54, 76, 75, 46, 67, 57, 93, 69, 57, 136, 113, 23, 25, 62, 148, 197, 103, 89, 33, 70, 96, 146, 145, 133),
    *(193, 116, 92, 124, 119, 135, 67, 53, 130, 150, 56, 95, 172, 68, 182, 85, 175, 102, 164, 95, 150, 161, 117, 141),
    *(162, 111, 121, 142, 120, 85, 148, 80, 94, 110, 115, 138, 51, 100),
)
"""Natural, ragged lengths: those of 64 replies which the 5 M model gave to these prompts, ended by itself (mean 107)."""


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Problems of GSM8K: prompt, worked solution (`response`) and the number that answers it."""
    with open(DATA / "gsm8k" / "train.jsonl", encoding="utf-8") as file:
        read = [json.loads(line) for line, _ in zip(file, range(first + count), strict=False)][first:]
    return [
        {
            "id": str(first + place),
            "prompt": row["question"].strip() + "\n",
            "response": row["answer"],
            "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
        }
        for place, row in enumerate(read)
    ]


def pairs(kind: str) -> list[dict[str, str]]:
    """Comparisons. gsm8k: a problem, its solution, and that of another problem. short: a line or two.

    Every prompt ends with a new line, so its tokens are the same alone and before a response.
    """
    count = KINDS_OF_PAIRS[kind]
    if kind == "short":
        with open(DATA / "preferences" / "pairs.jsonl", encoding="utf-8") as file:
            read = [json.loads(line) for line in file]
        some = [row for row in read if row["chosen"] != row["rejected"]][:count]
        return [{**row, "prompt": row["prompt"].strip() + "\n"} for row in some]
    solved = rows(count + 1)
    return [
        {"prompt": one["prompt"], "chosen": one["response"], "rejected": other["response"]}
        for one, other in pairwise(solved)
    ]


def tokens_of_pairs(folder: str | Path, kind: str) -> int:
    """Tokens of all responses, with an end of sequence each: what DPO learns in a pass over these pairs."""
    texts = [row[side] for row in pairs(kind) for side in ("chosen", "rejected")]
    return sum(len(ids) + 1 for ids in tokens_of(folder, texts))


def tasks(count: int = PROMPTS) -> list[dict[str, Any]]:
    """The tasks of every step."""
    return [{name: row[name] for name in ("id", "prompt", "answer")} for row in rows(count)]


def requests(case: str) -> list[tuple[str, int]]:
    """(prompt, tokens to sample) of each request; the members of a group follow each other.

    fixed: all alike. ragged: natural lengths. warm: a short piece of the ragged ones, to be thrown away.
    """
    budgets = {"fixed": (FIXED,) * REQUESTS, "ragged": BUDGETS, "warm": tuple(max(1, n // 8) for n in BUDGETS)}[case]
    prompts = [row["prompt"] for row in rows(PROMPTS)]
    return [(prompts[i // GROUP], n) for i, n in enumerate(budgets)]


def tokens_of(folder: str | Path, texts: list[str]) -> list[list[int]]:
    """Token ids by the folder's own tokenizer.json."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    return [encoded.ids for encoded in tokenizer.encode_batch(texts)]
