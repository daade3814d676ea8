"""The four questions of the overview: what is drawn for each, of what the run has recorded."""

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

Values = list[float | None]
Panel = dict[str, Any]


def overview(run: OpenRun) -> dict[str, Any]:
    """Everything on the page, ready to be drawn."""
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
        "others": [
            _panel(name, steps, [_line(name, values, name)]) for name, values in metrics.items() if name not in used
        ],
        "fates": own.get("fates", {}),
        "origins": own.get("origins", {}),
        "foreign": silent_defects.FOREIGN,
        "pushed": own.get("pushed", 0),
        "looked": len(silent_defects.looked_at(run.store)),
        "rollouts": int(trained_on.sum()),
        "tokens": int(np.nansum(rows.number("sampled")[trained_on])),
    }


def changes(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was asked of the run in so many words: settings of its row that differ, and the options that say most."""
    config = about["config"]
    names = ("algorithm", "model", "env", "tasks", "steps", "prompts", "group", "max_tokens", "temperature", "lr",
             "schedule", "held_out", "eval_every", "async_steps", "lora", "rows", "epochs", "processes",
             "engine")  # fmt: skip
    found = [{"name": name, "value": value} for name, value in (config.get("settings") or {}).items()]
    found += [{"name": name, "value": config[name]} for name in names if config.get(name) not in (None, "", [], 0, 0.0)]
    return found


def _own(run: OpenRun, steps: Sequence[int]) -> dict[str, Any]:
    """What follows from the rollouts: series at each step of the metrics, and signs."""
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
    """Of each question, in the order of importance; what was not recorded is left out."""
    return [
        [panel for panel in panels if panel is not None]
        for panels in (
            _learning(steps, m, own),
            _honest(steps, m, own),
            _exploring(steps, m, own),
            _stable(steps, m, own),
        )
    ]


def _learning(steps: list[int], m: Mapping[str, Values], own: Mapping[str, Any]) -> list[Panel | None]:
    band = None
    if any(value is not None for value in own.get("least", ())):
        band = {"low": own["least"], "high": own["most"]}
    groups = None
    if own.get("given"):
        pass
    elif own.get("equal") and own.get("n", 1) > 1 and not own["told"]:
        lines = [
            _line("mixed", [_rest(e, 0.0 if e is not None else None) for e in own["equal"]], "", "sky"),
            _line("equal", own["equal"], "", "pink"),
        ]
        about = "mixed groups are those that teach; without --success nothing says which rewards are right"
        groups = {**_panel("Groups by their rewards", steps, lines), "stack": True, "about": about}
    elif own.get("right") and own.get("n", 1) > 1:
        lines = [
            _line("all right", own["right"], "right", "green"),
            _line("mixed", [_rest(r, w) for r, w in zip(own["right"], own["wrong"], strict=True)], "", "sky"),
            _line("all wrong", own["wrong"], "wrong", "red"),
        ]
        groups = {**_panel("Groups", steps, lines), "stack": True, "about": "mixed groups are those that teach"}
    return [
        _of(steps, m, "divergence", "KL from the teacher, nats per token", "red"),
        _of(steps, m, "reward", "Reward, 95% band over groups" if band else "Reward", band=band),
        _first(steps, m, [
            ("eval/accuracy", "Held-out accuracy"), ("eval/reward", "Held-out reward"),
            ("eval/loss", "Held-out loss, nats per token"), ("eval/divergence", "Held-out KL from the teacher"),
        ], "green"),
        groups,
        _of(steps, m, "accuracy", "Accuracy", "green"),
        _of(steps, m, "margin", "Margin of the better responses"),
        _first(steps, m, [("nll", "Loss, nats per token"), ("loss", "Loss")]),
        _first(steps, m, [
            ("tokens_per_second/sampled", "Sampled tokens per second"), ("tokens_per_second/read", "Tokens read per second"),
        ]),
        _of(steps, m, "tokens_per_second/learned", "Learned tokens per second"),
        _of(steps, m, "lr", "Learning rate"),
    ]  # fmt: skip


def _honest(steps: list[int], m: Mapping[str, Values], own: Mapping[str, Any]) -> list[Panel | None]:
    parts = own.get("parts") or {}
    by_part = None
    if len(parts) > 1:
        lines = [_line(name, values, f"reward/{name}") for name, values in list(parts.items())[:6]]
        by_part = _panel("Reward by part", steps, lines)
    held = m.get("eval/reward", m.get("eval/accuracy"))
    gap = None
    if held and "reward" in m:
        values = [None if h is None or r is None else r - h for r, h in zip(_filled(m["reward"]), held, strict=True)]
        gap = _panel("Reward minus held-out reward", steps, [_line("gap", values, "gap", "red", dots=True)])
    lost = [
        _line(word, m[name], name, colour)
        for name, word, colour in (("truncated", "cut off", "red"), ("invalid", "invalid", "pink"))
        if name in m
    ]
    sides = [
        _line(word, m[name], name, colour)
        for name, word, colour in (
            ("logp_per_token/chosen", "better", "blue"), ("logp_per_token/rejected", "other", "red"))
        if name in m
    ]  # fmt: skip
    return [
        by_part,
        gap if by_part is None or not lost else None,
        _of(steps, m, "length", "Reply length, tokens", zero=True),
        {**_panel("Cut off, invalid", steps, lost), "zero": True} if lost else None,
        _panel("Responses, nats per token", steps, sides) if sides else None,
        gap if by_part is not None and lost else None,
    ]


def _exploring(steps: list[int], m: Mapping[str, Values], own: Mapping[str, Any]) -> list[Panel | None]:
    replies = None
    if own.get("replies") and own.get("n", 1) > 1 and not own["given"]:
        title = f"Distinct replies in a group of {own['n']}"
        replies = {**_panel(title, steps, [_line("distinct", own["replies"], "replies", "green")]), "zero": True}
    alike = None
    if any(value is not None for value in own.get("alike", ())) and not own["given"]:
        line = _line("alike", own["alike"], "alike", "pink")
        alike = {**_panel("Replies to two prompts alike", steps, [line]), "zero": True,
                 "about": "chance that two rollouts with different prompts begin with the same "
                          f"{own['compared']} characters"}  # fmt: skip
    return [
        _of(steps, m, "entropy", "Entropy, nats per token", zero=True),
        replies,
        alike,
        _of(steps, m, "diversity/similarity", "Similarity within a group", "pink"),
    ]


def _stable(steps: list[int], m: Mapping[str, Values], own: Mapping[str, Any]) -> list[Panel | None]:
    ratios = [
        _line(word, m[name], name, colour)
        for name, word, colour in (("ratio/max", "greatest", "red"), ("ratio/min", "least", "blue"))
        if name in m
    ]
    gap = _of(steps, m, "sampler/gap/max", "Engine against learner, greatest gap, nats", "pink", zero=True)
    far = any(value is not None and value > FAR_APART for value in m.get("sampler/gap", ()))
    return [
        gap if far else None,
        {**_panel("Ratio, least and greatest", steps, ratios), "log": True} if ratios else None,
        _of(steps, m, "grad_norm", "Gradient norm", zero=True),
        _of(steps, m, "kl", "KL from the reference, nats per token", "pink", zero=True),
        None if far else gap,
        _of(steps, m, "explained_variance", "Explained variance of the critic", "green"),
        _of(steps, m, "advantage/std", "Spread of advantages", zero=True),
        _of(steps, m, "skipped", "Updates skipped, share", "red", zero=True),
        _of(steps, m, "updates", "Updates"),
    ]


# -- pieces of a panel -------------------------------------------------------------------------------------------------


def _line(name: str, values: Sequence[float | None], of: str, colour: str = "", dots: bool = False) -> dict[str, Any]:
    return {"name": name, "values": [finite(v) for v in values], "of": of, "colour": colour, "dots": dots}


def _panel(title: str, steps: Sequence[int], lines: list[dict[str, Any]]) -> Panel:
    """Steps at which no line has a value are left out."""
    kept = [i for i in range(len(steps)) if any(line["values"][i] is not None for line in lines)]
    return {
        "title": title,
        "steps": [steps[i] for i in kept],
        "lines": [{**line, "values": [line["values"][i] for i in kept]} for line in lines],
    }


def _of(
    steps: list[int], m: Mapping[str, Values], name: str, title: str, colour: str = "blue", zero: bool = False,
    band: Mapping[str, Values] | None = None,
) -> Panel | None:  # fmt: skip
    if name not in m:
        return None
    panel = {**_panel(title, steps, [_line(name, m[name], name, colour)]), "zero": zero}
    if band is not None:
        kept = [i for i, value in enumerate(m[name]) if value is not None]
        panel["band"] = {side: [values[i] for i in kept] for side, values in band.items()}
    return panel


def _first(
    steps: list[int], m: Mapping[str, Values], choices: Sequence[tuple[str, str]], colour: str = "blue"
) -> Panel | None:
    found = next(((name, title) for name, title in choices if name in m), None)
    return _of(steps, m, *found, colour) if found else None


def _filled(values: Values) -> Values:
    """With the next value where there is none: an evaluation before the first step has no reward beside it."""
    found: Values = []
    later: float | None = None
    for value in reversed(values):
        later = value if value is not None else later
        found.append(later)
    return found[::-1]


def _rest(right: float | None, wrong: float | None) -> float | None:
    return None if right is None or wrong is None else 1 - right - wrong
