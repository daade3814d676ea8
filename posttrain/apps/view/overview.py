"""The overview page: the panels of its four questions, drawn from the run's record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.apps.view import silent_defects
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.reward_and_length import lengths
from posttrain.apps.view.step_series import finite, series
from posttrain.apps.view.verdict_texts import FAR_APART, verdicts
from posttrain.config.verbs import sampling
from posttrain.runs.metrics_table import METRICS, QUESTIONS, REWARDS, STABLE, Metric, metric_named

Values = list[float | None]
Panel = dict[str, Any]


def overview(run: OpenRun) -> dict[str, Any]:
    """Return everything on the page as JSON data."""
    steps, metrics = run.series()
    rows, own = run.store.rows, _own(run, steps)
    about, answers, drawn = run.about, verdicts(metrics, own), _panels(steps, metrics, own)
    questions: list[dict[str, Any]] = [
        {"name": name, **verdict, "panels": panels[:3]}
        for (name, verdict), panels in zip(answers.items(), drawn, strict=True)
    ]
    changed = changes(about)
    used = {line["of"] for question in questions for panel in question["panels"] for line in panel["lines"]}
    trained_on = ~rows.flag("held_out")
    return {
        "name": run.name,
        "verb": about["verb"],
        "seed": about.get("seed"),
        "git": (about.get("git") or {}).get("revision"),
        "start": about.get("start"),
        "end": about.get("end"),
        "on": run.on,
        "objective": run.objective,
        "sizes": about.get("sizes") or [],
        "options": changed,
        "health": run.health(),
        "checkpoints": run.checkpoints(),
        "resumes": [resume.get("step") for resume in about.get("resumes", [])],
        "steps": steps,
        "parts": [part.name for part in run.store.files],
        "questions": questions,
        "others": [_other(name, values, steps) for name, values in metrics.items() if name not in used],
        "fates": own.get("fates", {}),
        "origins": own.get("origins", {}),
        "foreign": silent_defects.FOREIGN,
        "pushed": own.get("pushed", 0),
        "looked": len(silent_defects.looked_at(run.store)),
        "rollouts": int(trained_on.sum()),
        "tokens": int(np.nansum(rows.number("sampled")[trained_on])),
    }


def changes(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the changed settings of the algorithm, and the most informative options."""
    config = about["config"]
    names = ("algorithm", "model", "env", "tasks", "steps", "prompts", "group", "max_tokens", "temperature", "lr",
             "schedule", "held_out", "eval_every", "async_steps", "lora", "rows", "epochs", "processes",
             "engine")  # fmt: skip
    found = [{"name": name, "value": value} for name, value in (config.get("settings") or {}).items()]
    found += [{"name": name, "value": config[name]} for name in names if config.get(name) not in (None, "", [], 0, 0.0)]
    return found


def _own(run: OpenRun, steps: Sequence[int]) -> dict[str, Any]:
    """Return the figures of the rollouts: series at each step of the metrics, and signs of defects."""
    store, config = run.store, run.about["config"]
    if not store.files:
        return {}
    return {
        "told": store.success is not None,
        "given": run.about["verb"] not in sampling(),
        "judged": bool(config.get("reward_model") or config.get("judge")),
        "origins": silent_defects.origins(store),
        "pushed": sum(len(silent_defects.pushed_in(file, run.objective)) for file in silent_defects.looked_at(store)),
        "leaks": silent_defects.leaks(store),
        "lengths": lengths(store, config),
        **series(store.rows, steps),
    }


def _panels(steps: list[int], m: Mapping[str, Values], own: Mapping[str, Any]) -> list[list[Panel]]:
    """Return the panels of each question, in the order of the metrics table; missing metrics are left out."""
    parts = [_line(name, values, f"reward/{name}") for name, values in list((own.get("parts") or {}).items())[:6]]
    lost = any(name in m for name in ("truncated", "invalid"))
    before: dict[str, list[Panel | None]] = {  # panels of the rollouts, by the metric that they precede
        "accuracy": [_groups(steps, own)],
        "length": [None if len(parts) > 1 and lost else _gap(steps, m)],
        "diversity/similarity": [*_replies(steps, own)],
    }
    found: dict[str, list[Panel]] = {question: [] for question in QUESTIONS}
    for metric in (metric for metric in METRICS if metric.group):
        panels = [panel for panel in before.get(metric.name, ()) if panel is not None]
        shared = [own for other in METRICS if other.panel == metric.panel for own in _logged(other, m)]
        if metric.name == REWARDS:
            lines = parts if len(parts) > 1 else []
        elif metric.panel:
            lines = [_line_of(other, m) for other in shared] if shared[:1] == [metric] else []
        else:
            lines = [_line_of(metric, m)] if metric.name in m and not metric.hidden(m) else []
        if lines:
            title, about = (
                metric.panel or metric.label,
                " ".join(dict.fromkeys(x.meaning for x in (shared if metric.panel else [metric]))),
            )
            panels.append({**_panel(title, steps, lines), "zero": metric.zero, "log": metric.log, "about": about})
        if metric.name == "reward" and lines and any(value is not None for value in own.get("least", ())):
            kept = [i for i, value in enumerate(m["reward"]) if value is not None]
            band = {side: [own[of][i] for i in kept] for side, of in (("low", "least"), ("high", "most"))}
            panels[-1] |= {"title": f"{title}, 95% band over groups", "band": band}
        found[metric.group] += panels
    gap = [panel for panel in found[STABLE] if panel["lines"][0]["of"] == "sampler/gap/max"]
    if any(value is not None and value > FAR_APART for value in m.get("sampler/gap", ())):
        found[STABLE] = gap + [panel for panel in found[STABLE] if panel not in gap]
    return list(found.values())


def _logged(metric: Metric, m: Mapping[str, Values]) -> list[Metric]:
    """Return the metric, or those of its family, as far as the run has logged them."""
    if "{" not in metric.name:
        return [metric] if metric.name in m else []
    named = (metric_named(name) for name in m if metric.pattern.fullmatch(name))
    return [own for own in named if own is not None and own.panel == metric.panel and not own.hidden(m)]


def _groups(steps: list[int], own: Mapping[str, Any]) -> Panel | None:
    if own.get("given") or own.get("n", 1) < 2:
        return None
    about = "mixed groups are those that teach"
    if own.get("equal") and not own["told"]:
        lines = [
            _line("mixed", [_rest(e, 0.0 if e is not None else None) for e in own["equal"]], "", "sky"),
            _line("equal", own["equal"], "", "pink"),
        ]
        about += "; without --success it is unknown which rewards are right"
        return {**_panel("Groups by their rewards", steps, lines), "stack": True, "about": about}
    if not own.get("right"):
        return None
    lines = [
        _line("all right", own["right"], "right", "green"),
        _line("mixed", [_rest(r, w) for r, w in zip(own["right"], own["wrong"], strict=True)], "", "sky"),
        _line("all wrong", own["wrong"], "wrong", "red"),
    ]
    return {**_panel("Groups", steps, lines), "stack": True, "about": about}


def _gap(steps: list[int], m: Mapping[str, Values]) -> Panel | None:
    held = m.get("eval/reward", m.get("eval/accuracy"))
    if not held or "reward" not in m:
        return None
    values = [None if h is None or r is None else r - h for r, h in zip(_filled(m["reward"]), held, strict=True)]
    return _panel("Reward minus held-out reward", steps, [_line("gap", values, "gap", "red", dots=True)])


def _replies(steps: list[int], own: Mapping[str, Any]) -> list[Panel]:
    found = []
    if own.get("replies") and own.get("n", 1) > 1 and not own["given"]:
        title = f"Distinct replies in a group of {own['n']}"
        found.append({**_panel(title, steps, [_line("distinct", own["replies"], "replies", "green")]), "zero": True})
    if any(value is not None for value in own.get("alike", ())) and not own["given"]:
        line = _line("alike", own["alike"], "alike", "pink")
        about = f"chance that two rollouts with different prompts begin with the same {own['compared']} characters"
        found.append({**_panel("Replies to two prompts alike", steps, [line]), "zero": True, "about": about})
    return found


def _other(name: str, values: Values, steps: list[int]) -> Panel:
    metric, panel = metric_named(name), _panel(name, steps, [_line(name, values, name)])
    return panel if metric is None else {**panel, "title": metric.label, "about": f"{name}: {metric.meaning}"}


# -- pieces of a panel -------------------------------------------------------------------------------------------------


def _line(name: str, values: Sequence[float | None], of: str, colour: str = "", dots: bool = False) -> dict[str, Any]:
    return {"name": name, "values": [finite(v) for v in values], "of": of, "colour": colour, "dots": dots}


def _panel(title: str, steps: Sequence[int], lines: list[dict[str, Any]]) -> Panel:
    """Return a panel, without the steps at which no line has a value."""
    kept = [i for i in range(len(steps)) if any(line["values"][i] is not None for line in lines)]
    return {
        "title": title,
        "steps": [steps[i] for i in kept],
        "lines": [{**line, "values": [line["values"][i] for i in kept]} for line in lines],
    }


def _line_of(metric: Metric, m: Mapping[str, Values]) -> dict[str, Any]:
    return _line(metric.line or metric.name, m[metric.name], metric.name, metric.colour)


def _filled(values: Values) -> Values:
    """Replace None by the next value: an evaluation before the first step has no training reward of its own."""
    found: Values = []
    later: float | None = None
    for value in reversed(values):
        later = value if value is not None else later
        found.append(later)
    return found[::-1]


def _rest(right: float | None, wrong: float | None) -> float | None:
    return None if right is None or wrong is None else 1 - right - wrong
