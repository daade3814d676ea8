"""Explains why a rollout was or was not trained, in a sentence, and its advantage, in an equation."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.config.verbs import VERBS
from posttrain.core.rollouts import Fate

CLIP = re.compile(r"clip\(r, ([\d.]+), ([\d.]+)\)")
CLOSE = 2e-3  # relative tolerance within which an equation gives the recorded advantage
EPSILON = 1e-6

_BECAUSE = {
    Fate.EQUAL: "all rewards of its group are equal, so no reply is better than another",
    Fate.INVALID: "its reward is invalid, so it is left out of its group",
    Fate.SMALL: "too few valid rollouts are left in its group",
    Fate.REPLACED: "dynamic sampling played another group in its place",
    Fate.FILTERED: "a filter left it out",
    Fate.BASELINE: "its reward is the baseline of its group",
    Fate.UNSELECTED: "no update of the step drew it",
}


def why(row: Mapping[str, Any]) -> str:
    """Return a sentence: why the rollout of this row was trained or not."""
    fate, advantage, flags = row["fate"], row["advantage"], list(row["flags"] or ())
    reason = row["why"] or row["invalid"]
    beside = f" ({'; '.join(flags)})" if flags else ""
    if row["kind"] == "eval":
        return "Held out: it is measured, never trained on."
    learns = VERBS[row["kind"]].learns
    if learns == "demonstrations":
        return "A demonstration: its response is imitated, token by token."
    if learns in ("preferences", "scores"):
        return "One response of a preference example: the labels of the example move it."
    if fate is None:
        if row["invalid"]:
            return f"Not trained: its reward is invalid ({row['invalid']})."
        if not advantage:
            return "Its advantage is 0: this run did not record why, or whether anything else moved it."
        return f"Trained, made {'more' if advantage > 0 else 'less'} likely (this run did not record fates)."
    if fate != Fate.TRAINED:
        said = _BECAUSE.get(Fate(fate), fate)
        return f"Not trained: {said}{f': {reason}' if reason and reason not in said else ''}{beside}."
    if "update skipped" in flags:
        return "It was given to an update that was skipped, because its gradient was not finite."
    if not advantage:
        moved = ", ".join(flag for flag in flags if flag.startswith("moved"))
        return f"Trained with advantage 0: {moved}." if moved else "Trained with mean advantage 0."
    if (own := row.get("token_advantage")) is not None:
        more, less = int((own > 0).sum()), int((own < 0).sum())
        if more and less:
            return (
                f"Trained: {more} of its {len(own)} tokens made more likely, {less} less: advantages from "
                f"{_signed(own.min())} to {_signed(own.max())}, mean {_signed(advantage)}{beside}."
            )
    return f"Trained: advantage {_signed(advantage)}, made {'more' if advantage > 0 else 'less'} likely{beside}."


def equation(row: Mapping[str, Any], others: Sequence[float | None], objective: Sequence[str]) -> dict[str, Any]:
    """Return the reward's figures, and the equation that gives the recorded advantage.

    `others`: rewards as used, of the whole group. If no usual equation gives the value, only the algorithm's own
    formula, which is always returned, describes the advantage.
    """
    found: dict[str, Any] = {"formula": _formula(objective)}
    value, advantage = row["used"] if row["used"] is not None else row["reward"], row["advantage"]
    rewards = [reward for reward in others if reward is not None and math.isfinite(reward)]
    if value is None or advantage is None or not rewards:
        return found
    n, mean = len(rewards), sum(rewards) / len(rewards)
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / n)
    found |= {"reward": value, "mean": mean, "sd": spread, "n": n}
    sample = spread * math.sqrt(n / (n - 1)) if n > 1 else 0.0
    choices = [
        ("(R − mean) / std", (value - mean) / (spread + EPSILON), spread),
        ("(R − mean) / std", (value - mean) / (sample + EPSILON), sample),
        ("R − mean", value - mean, None),
        ("R − mean of the others", (value - mean) * n / (n - 1) if n > 1 else 0.0, None),
        ("R", value, None),
    ]
    for name, result, divisor in choices:
        if math.isclose(result, advantage, rel_tol=CLOSE, abs_tol=1e-6):
            found |= {"equation": name, "sd": divisor if divisor is not None else spread}
            break
    return found


def bounds(objective: Sequence[str]) -> tuple[float, float] | None:
    """Return the range of ratios in which the algorithm's clip keeps a token's gradient; None without a clip."""
    found = next(filter(None, (CLIP.search(line) for line in objective)), None)
    return (float(found[1]), float(found[2])) if found else None


def _formula(objective: Sequence[str]) -> str | None:
    line = next((line.strip() for line in objective if line.strip().startswith("advantage A:")), None)
    return line.removeprefix("advantage A:").strip() if line else None


def _signed(value: float) -> str:
    return f"{value:+.3g}".replace("-", "−")
