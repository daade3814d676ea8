"""Rows of reward models, of every form."""

from __future__ import annotations

import random
from typing import Any

PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "three"},
    {"prompt": "1+1=", "chosen": "two", "rejected": "2 or 3", "margin": 0.75},
    {"prompt": "why", "chosen": "because", "rejected": "so", "score_chosen": 1.5, "score_rejected": 2.0},
]
SEVERAL = [
    {"prompt": "a", "responses": ["b", "cc", "d d", "eee"], "ranks": [1, 2, 2, 4]},  # a tie is dropped
    {"prompt": "b", "responses": ["x", "y", "z"], "comparisons": [[0, 1], [1, 2], [2, 0, 0.25]]},  # a cycle is kept
    {"prompt": "c", "responses": ["0", "1", "22"], "scores": [0.5, -1, 2]},
    {"prompt": "a", "responses": ["b", "q"], "pairs": [[0, 1]], "preferred": [2]},
    {"prompt": "d", "responses": ["k", "l", "m", "n"], "comparisons": [[3, 0, 2.0, 0.5], [3, 1], [3, 2, 0.5], [0, 1]]},
]
LABELLED = [
    {"prompt": "1+1=", "response": "2", "label": True},
    {"prompt": "1+1=", "response": "11", "label": False},
    {"prompt": "1+2=", "response": "3 or 4", "label": 0.25},
    {"prompt": "2*3+1=", "steps": ["2*3=6", "6+1=7", "so 7"], "mistake_index": None},
    {"prompt": "2*3+1=", "steps": ["2*3=6", "6+1=8", "so 8"], "mistake_index": 1},
    {"prompt": "9-8", "steps": ["9", "-8", "=1"], "labels": [1, 0, 1]},
]
GRADED = [
    {"prompt": "a", "response": "b", "score": 1.5},
    {"prompt": "a", "response": "cc", "score": -2},
    {"prompt": "b", "response": "dd d", "score": 4},
]
WORDS = ("one", "two", "so", "a", "because", "it", "is", "no", "yes", "half past nine", ".", "why")


def said(drawn: random.Random, most: int = 6) -> str:
    """One to `most` words."""
    return " ".join(drawn.choices(WORDS, k=drawn.randint(1, most)))


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    drawn = random.Random(seed)
    return [{"prompt": f"{i} =", "chosen": said(drawn), "rejected": said(drawn) + " no"} for i in range(count)]
