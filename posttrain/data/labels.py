"""Reads the labels of responses, and converts labelled responses to rows for training.

This module defines the *value* of a response: its score or, with ranks or comparisons, the number of responses that it
beats minus the number of those that beat it, each weighted by its share. The best response is the first with the
highest value. Empty responses are never the best, and equal texts never form a pair.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from posttrain.core.seeds import seed_of
from posttrain.core.types import Task, UserError
from posttrain.data.chat_prompts import unlearned
from posttrain.data.preference_examples import asked, comparisons_of, plain, said_of
from posttrain.data.row_files import Row

SAID = ("chosen", "rejected", "margin", "score_chosen", "score_rejected", "responses", "pairs", "preferred",
        "comparisons", "ties", "ranks", "scores", "parts", "invalid", "labeller", "skipped", "flipped")  # fmt: skip
"""Columns with responses or their labels."""
REPLACED = ("ranks", "pairs", "preferred")  # columns that are replaced by comparisons
DETAILS = ("samples",)  # columns with an entry per response


def to_prompt(row: Row) -> Task | None:
    """Convert a row of preference data to its prompt alone, for new samples; other rows do not change."""
    if not any(row.get(name) is not None for name in ("chosen", "rejected", "responses")):
        return row
    return {**{name: value for name, value in row.items() if name not in (*SAID, *DETAILS)}, **asked(row)}


def to_responses(row: Row) -> Task | None:
    """Convert a row of any format to the prompt and the responses, without labels."""
    prompt, responses, taken = said_of(row)
    kept = {name: value for name, value in row.items() if name not in (*SAID, taken)}
    return {**kept, **prompt, "responses": responses}


def to_labelled(row: Row) -> Task | None:
    """Convert a row to the prompt, the responses and their labels."""
    row = plain(row)
    prompt, responses, taken = said_of(row)
    if taken == "chosen":
        kept = {name: value for name, value in row.items() if name not in SAID}
        return {**kept, **prompt, "responses": responses, "comparisons": comparisons_of(row, 2)}
    kept = {name: value for name, value in row.items() if name not in ("chosen", "rejected", taken)}
    if taken != "responses" and row.get("score") is not None:
        kept["scores"] = [row["score"]]
    found = {**kept, **prompt, "responses": responses}
    if not found.get("skipped") and all(
        found.get(name) is None for name in ("scores", "comparisons", "ranks", "pairs")
    ):
        raise UserError(
            "the responses have no labels: add them with posttrain label, for example --with reward-model=FOLDER"
        )
    LabelledResponses.of(found)  # checked here, where errors get the row's place
    return found


@dataclass(frozen=True)
class LabelledResponses:
    """Responses, with their values."""

    responses: Sequence[str]
    values: Sequence[float | None]  # None: unknown
    flipped: frozenset[tuple[int, int]] = frozenset()  # pairs (better, worse) by value whose comparison was flipped

    @staticmethod
    def of(row: Row) -> LabelledResponses:
        """Read a row made by `to_labelled`. Raises UserError if its responses have no labels."""
        responses = row["responses"]
        if row.get("skipped"):
            return LabelledResponses(responses, [None] * len(responses))
        flipped = frozenset((int(w), int(b)) for b, w in row.get("flipped") or ())
        scores = row.get("scores")
        if scores is not None:
            comparisons_of({"scores": scores}, len(responses))  # checks the scores
            return LabelledResponses(responses, [None if score is None else float(score) for score in scores], flipped)
        found = comparisons_of(row, len(responses))
        won: list[float | None] = [None] * len(responses)
        for better, worse, share, _ in found:
            turned = (int(worse), int(better)) in flipped
            sign = -1.0 if turned else 1.0
            won[int(better)] = (won[int(better)] or 0.0) + sign * share
            won[int(worse)] = (won[int(worse)] or 0.0) - sign * share
        return LabelledResponses(responses, won, flipped)

    def comparisons(self) -> list[list[float]]:
        """Return [better, worse, share, margin] for each two responses with different values."""
        found: list[list[float]] = []
        for i, j in combinations(range(len(self.values)), 2):
            first, second = self.values[i], self.values[j]
            if first is not None and second is not None and first != second:
                better, worse = (i, j) if first > second else (j, i)
                found.append([better, worse, 1.0, abs(first - second)])
        return found

    def best(self, top: int, at_least: float | None) -> list[tuple[int, float]]:
        """Return (index, value) of the best distinct responses, from the best on."""
        valued = [(place, value) for place, value in enumerate(self.values) if value is not None]
        found: dict[str, tuple[int, float]] = {}
        for place, value in sorted(valued, key=lambda pair: -pair[1]):
            text = self.responses[place]
            if text.strip() and (at_least is None or value >= at_least):
                found.setdefault(text, (place, value))
        return list(found.values())[:top]

    def pairs(self, margin: float) -> list[tuple[int, int, float]]:
        """Return (better, worse, difference) of all possible pairs, with flips applied."""
        pairs = [(int(b), int(w), m) for b, w, _, m in self.comparisons() if m >= margin]
        texts = self.responses
        different = [p for p in pairs if texts[p[0]] != texts[p[1]] and texts[p[0]].strip() and texts[p[1]].strip()]
        return [(w, b, m) if (b, w) in self.flipped else (b, w, m) for b, w, m in different]


def best_rows(row: Row, top: int, at_least: float | None) -> Iterator[Row]:
    """Yield rows of prompt and response for sft: best-of-N, or rejection sampling if there is a threshold."""
    kept, stops = _task(row), _stops(row)
    for place, value in LabelledResponses.of(row).best(top, at_least):
        text = row["responses"][place]
        said: Row = {"response": text}
        if "messages" in kept:
            said = {"messages": [*unlearned(kept["messages"]), {"role": "assistant", "content": text}]}
        stop = {"response_stop": stops[place]} if stops else {}
        yield {**kept, **said, "score": value, **stop}


def pair_row(row: Row, random_pair: bool, margin: float, seed: int) -> Row | None:
    """Return a row of prompt, chosen and rejected; None if no two responses differ enough."""
    judged = LabelledResponses.of(row)
    pairs = judged.pairs(margin)
    if not pairs:
        return None
    if random_pair:
        chosen, rejected, difference = pairs[seed_of(seed, "pair", row["id"]) % len(pairs)]
    else:
        chosen, rejected, difference = max(pairs, key=lambda pair: pair[2])  # the first if several are equal
    texts = {"chosen": judged.responses[chosen], "rejected": judged.responses[rejected], "margin": difference}
    if stops := _stops(row):
        texts |= {"chosen_stop": stops[chosen], "rejected_stop": stops[rejected]}
    return {**_task(row), **texts}


def _stops(row: Row) -> list[str]:
    """Return how each response ended, if `posttrain sample` recorded it: the end of a truncated response is not
    trained.
    """
    stops = [note["stop"] for note in row.get("samples") or () if "stop" in note]
    return stops if len(stops) == len(row["responses"]) else []


def flip(row: Row, share: float, seed: int) -> Row:
    """Return the row with each comparison flipped with probability `share`; "flipped" lists the flipped ones."""
    comparisons = (
        comparisons_of(row, len(row["responses"]))
        if row.get("scores") is None
        else LabelledResponses.of(row).comparisons()
    )
    turned = []
    for number, (better, worse, _, _) in enumerate(comparisons):
        low, high = sorted((int(better), int(worse)))
        if random.Random(seed_of(seed, "flip", row["id"], low, high)).random() < share:
            comparisons[number][:2] = [worse, better]
            turned.append([int(worse), int(better)])
    whole = [[int(b), int(w), s, m] for b, w, s, m in comparisons]
    return {**{k: v for k, v in row.items() if k not in REPLACED}, "comparisons": whole, "flipped": turned}


def _task(row: Row) -> Row:
    """Return the columns without labels. Several rows would share the id, so it is renamed to `item`."""
    kept = {name: value for name, value in row.items() if name not in (*SAID, *DETAILS, "id", "response", "completion")}
    return {"item": row["id"], **kept}
