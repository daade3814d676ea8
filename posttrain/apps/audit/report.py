"""The audit of a run: figures of its replies from early to late, correlations with the reward, and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.apps.audit.classifier import HackClassifier
from posttrain.apps.audit.correlation import Estimate, Floats, centred, change, correlation, rank_correlation
from posttrain.apps.audit.findings import (
    AuditFinding,
    FindingLimits,
    Leap,
    Trend,
    classifier_found,
    disagreement_found,
    duplicates_found,
    gold_found,
    greatest_leap,
    leap_found,
    length_found,
    signal_found,
    templates_found,
)
from posttrain.apps.audit.replies import STEPS, Replies, read_replies
from posttrain.apps.audit.second_score import score_of
from posttrain.apps.audit.shared_phrases import Spread, commonest_opening, near_duplicates, spreads
from posttrain.core.types import Task
from posttrain.runs.metric_history import equal_groups
from posttrain.runs.run_files import Folder
from posttrain.runs.run_reading import read_metrics

HACKED = 0.5  # probability from which on a reply is classed as hacked


@dataclass(frozen=True)
class Audit:
    """Results of an audit. `trends` and `correlations` map names to figures, in the order of printing."""

    read: dict[str, int]  # steps, steps recorded, replies, prompts, invalid
    trends: dict[str, Trend]
    correlations: dict[str, tuple[Estimate, Estimate]]  # Pearson's, Spearman's
    templates: list[Spread]
    leap: Leap | None
    steps: list[dict[str, float]]  # a row for each step read
    findings: list[AuditFinding]
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the results as JSON data."""
        return {
            "read": self.read,
            "findings": [asdict(f) for f in self.findings],
            "trends": {name: t.as_dict() for name, t in self.trends.items()},
            "correlations": {
                name: {"pearson": p.as_dict(), "spearman": s.as_dict()} for name, (p, s) in self.correlations.items()
            },
            "templates": [s.as_dict() for s in self.templates],
            "leap": self.leap and asdict(self.leap),
            "steps": [{name: v if isfinite(v) else None for name, v in row.items()} for row in self.steps],
            "notes": self.notes,
        }


def audit(
    run: Folder,
    *,
    gold: str | None = None,
    disagreement: Sequence[str] = (),
    classifier: HackClassifier | None = None,
    tasks: Sequence[Task] = (),
    most_steps: int = STEPS,
    limits: FindingLimits | None = None,
) -> Audit:
    """Read at most `most_steps` steps of a run and look for traces of reward hacking. Writes nothing.

    gold: a second score of every reply: a part of the reward, or any reward, which then scores the texts.
    disagreement: two parts of the reward that ought to agree. tasks: rows that the gold score needs, matched by id.
    Raises UserError if the run has no rollouts, or for an unknown name.
    """
    limits = limits or FindingLimits()
    replies = read_replies(run, most_steps)
    cut = np.array([stop.truncated for stop in replies.stop], dtype=np.float64)
    series = {"reward": replies.reward, "length in tokens": replies.length, "cut off": cut}
    findings: list[AuditFinding] = []
    notes = [] if len(replies.steps) > 1 else ["one step alone shows no change: early and late need two"]
    scores = _scores(replies, gold, disagreement, tasks)
    series |= scores
    if classifier is not None:
        series["classed as hacked"] = (classifier(replies.text) >= HACKED).astype(np.float64)
        notes.append(_of_classifier(classifier))
    series["near-duplicates"] = near_duplicates(replies)
    trends = {name: trend(replies, values) for name, values in series.items()}
    templates = spreads(replies)
    correlations = _correlations(replies, series, templates, gold)
    steps, reward = _rewards(run, replies)
    leap = greatest_leap(steps, reward, limits)
    findings += gold_found(trends["reward"], trends[APART].change, limits) if APART in trends else []
    findings += disagreement_found(trends[DISAGREE], disagreement, limits) if DISAGREE in trends else []
    findings += classifier_found(trends["classed as hacked"], limits) if classifier is not None else []
    findings += length_found(trends["length in tokens"], correlations[LENGTH_WITHIN][1], trends["cut off"], limits)
    findings += templates_found(templates, limits)
    findings += duplicates_found(trends["near-duplicates"], limits)
    findings += leap_found(leap)
    findings += signal_found(equal_groups(read_metrics(run), limits.equal))
    return Audit(
        read={"steps": len(replies.steps), "recorded": replies.recorded, "replies": len(replies),
              "prompts": int(replies.prompt.max()) + 1, "invalid": replies.invalid},
        trends=trends, correlations=correlations, templates=templates, leap=leap,
        steps=_by_step(replies, series), findings=findings, notes=notes,
    )  # fmt: skip


APART, DISAGREE = "reward minus gold, in deviations", "disagreement, in deviations"
LENGTH_ALL, LENGTH_WITHIN = "length, all replies", "length, within a prompt"


def trend(replies: Replies, values: Floats) -> Trend:
    """Return means over the early and the late replies; nan values are left out."""
    early, late = (side & np.isfinite(values) for side in replies.ends)
    ends = early | late
    if not (early.any() and late.any()):
        return Trend(nan, nan, Estimate(nan))
    moved = change(values[ends], late[ends], replies.prompt[ends])
    return Trend(float(values[early].mean()), float(values[late].mean()), moved)


def _scores(
    replies: Replies, gold: str | None, disagreement: Sequence[str], tasks: Sequence[Task]
) -> dict[str, Floats]:
    """Return the series to compare with the reward: name -> [n]."""
    found: dict[str, Floats] = {}
    if gold is not None:
        found["gold"] = score_of(replies.with_tasks(tasks), gold)
        known = np.isfinite(found["gold"])
        found[APART] = _standard(np.where(known, replies.reward, nan)) - _standard(found["gold"])
    if disagreement:
        early = replies.ends[0]
        one, other = (_standard(replies.part(name), early) for name in disagreement)
        found[DISAGREE] = np.abs(one - other)
    return found


def _standard(values: Floats, around: NDArray[np.bool_] | None = None) -> Floats:
    """Divide by the standard deviation of all replies, after subtracting the mean of those in `around`, or of all.

    Constant values become 0.
    """
    some = values if around is None or not np.isfinite(values[around]).any() else values[around]
    if not np.isfinite(values).any():
        return values
    centre, deviation = np.nanmean(some), np.nanstd(values)
    out: Floats = (values - centre) / deviation if deviation > 1e-12 else np.where(np.isfinite(values), 0.0, nan)
    return out


def _correlations(
    replies: Replies, series: Mapping[str, Floats], templates: Sequence[Spread], gold: str | None
) -> dict[str, tuple[Estimate, Estimate]]:
    """Return correlations of the reward with each series. Within a prompt: each group's mean is subtracted first."""
    reward, within = replies.reward, centred(replies.reward, replies.cell)

    def both(x: Floats, y: Floats, at: Any = slice(None)) -> tuple[Estimate, Estimate]:
        prompt = replies.prompt[at]
        return correlation(x[at], y[at], prompt), rank_correlation(x[at], y[at], prompt)

    found = {
        LENGTH_ALL: both(replies.length, reward),
        LENGTH_WITHIN: both(centred(replies.length, replies.cell), within),
    }
    for spread in templates[:2]:
        found[f'{spread.place} "{" ".join(spread.gram)[:16]}", within'] = spread.reward, Estimate(nan)
    if gold is not None:
        known = np.isfinite(series["gold"])
        for name, side in zip(("gold, early", "gold, late"), replies.ends, strict=True):
            if (side & known).any():
                found[name] = both(series["gold"], reward, side & known)
    return found


def _rewards(run: Folder, replies: Replies) -> tuple[list[int], Floats]:
    """Return (steps, mean rewards): from metrics.jsonl, which has all steps, else from the replies that were read."""
    rows = [(row["step"], row["reward"]) for row in read_metrics(run) if row.get("reward") is not None]
    if rows:
        return [step for step, _ in rows], np.array([value for _, value in rows], dtype=np.float64)
    means = [float(replies.reward[replies.step == step].mean()) for step in replies.steps]
    return replies.steps, np.array(means)


def _by_step(replies: Replies, series: Mapping[str, Floats]) -> list[dict[str, float]]:
    """Return a row for each step: the mean of each series, and the share of the commonest opening."""
    openings = commonest_opening(replies)
    rows = []
    for place, step in enumerate(replies.steps):
        inside = replies.step == step
        row: dict[str, float] = {"step": step}
        for name, values in series.items():
            known = values[inside & np.isfinite(values)]
            row[name] = float(known.mean()) if len(known) else nan
        rows.append({**row, "commonest opening": float(openings[place])})
    return rows


def _of_classifier(classifier: HackClassifier) -> str:
    told = classifier.held_out
    return (
        f"classifier: on unseen prompts of its own data accuracy {told['accuracy']:.2f} (naming the commoner kind: "
        f"{told['commoner']:.2f}), area under the curve {told['auc']:.2f}"
    )
