"""The command `posttrain audit`: the analyses that run, their tasks, and the printing of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from posttrain.apps.audit.classifier import HackClassifier, read_labelled, train
from posttrain.apps.audit.correlation import Estimate
from posttrain.apps.audit.replies import holds_replies
from posttrain.apps.audit.report import Audit, audit
from posttrain.apps.audit.sycophancy import OPINION, Probe, compare, probed
from posttrain.core.messages import clip, safe
from posttrain.core.types import Task, UserError
from posttrain.runs.run_reading import read_run
from posttrain.runs.terminal.printing import table

WIDTH = 80
LIMIT = 200  # tasks of a probe without --limit
TASK_OPTIONS = ("tasks", "split", "fields", "prompt_template", "response_template", "env")
"""Options in run.json that define the run's tasks; `--tasks` replaces all of them but the environment."""
PLAY_OPTIONS = ("max_tokens", "stop", "max_episode_tokens", "max_turns", "max_tool_calls", "episode_timeout", "success")


@dataclass(frozen=True)
class AuditRequest:
    """Options of `posttrain audit`, declared in `cli/inspect_commands.py`."""

    run: str | None = None
    gold: str | None = None
    disagreement: tuple[str, str] | None = None
    classifier: str | None = None
    train_classifier: str | None = None
    sycophancy: bool = False
    opinion: str | None = None
    tasks: str | None = None
    env: str | None = None
    limit: int | None = None
    samples: int = 4
    steps: int = 40


def carry_out(request: AuditRequest, as_json: bool) -> int:
    """Train the classifier, audit the run and probe it, each if requested.

    Prints the results and returns the exit code.
    """
    _check_options(request)
    said: dict[str, Any] = {}
    classifier = None
    if request.train_classifier is not None:
        classifier = train(read_labelled(request.train_classifier))
        classifier.save(Path(str(request.classifier)))
        said["classifier"] = classifier.held_out
        if not as_json:
            _show_classifier(classifier, str(request.classifier))
    elif request.classifier is not None:
        classifier = HackClassifier.load(Path(request.classifier))
    if request.run is not None and _has_rollouts(request):
        tasks = _tasks(request) if request.tasks is not None and request.gold is not None else ()
        found = audit(
            request.run, gold=request.gold, disagreement=request.disagreement or (), classifier=classifier, tasks=tasks,
            most_steps=request.steps,
        )  # fmt: skip
        said |= found.as_dict()
        if not as_json:
            show(found, request.run)
    if request.sycophancy:
        probe = _probe(request)
        said["sycophancy"] = probe.as_dict()
        if not as_json:
            show_probe(probe)
    if as_json:
        print(json.dumps(said, indent=1))
    return 0


def _check_options(request: AuditRequest) -> None:
    """Raise UserError for options that contradict each other or lack a counterpart."""
    if request.run is None and request.train_classifier is None:
        raise UserError("posttrain audit needs the folder of a run, or --train-classifier labelled.jsonl")
    if request.train_classifier is not None and request.classifier is None:
        raise UserError("--train-classifier needs a file to write to: --classifier hacked.json")
    if request.sycophancy and request.run is None:
        raise UserError("--sycophancy needs the checkpoint of a run: posttrain audit RUN --sycophancy")
    if request.opinion is not None and not request.sycophancy:
        raise UserError("--opinion has no effect without --sycophancy: give both")
    for name in ("limit", "samples", "steps"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")


def _has_rollouts(request: AuditRequest) -> bool:
    """Return whether to audit the run's rollouts.

    A run that is only probed needs none; otherwise missing ones are an error.
    """
    only_probed = (
        request.sycophancy and request.gold is None and not request.disagreement and request.classifier is None
    )
    return not only_probed or holds_replies(str(request.run))


# -- the probe ---------------------------------------------------------------------------------------------------------


def _options(request: AuditRequest) -> dict[str, Any]:
    """Return the options that define the tasks: the run's own, replaced by `--tasks` and `--env` where given."""
    recorded = read_run(str(request.run))["config"]
    chosen = {name: recorded[name] for name in TASK_OPTIONS if recorded.get(name) is not None}
    if request.tasks is not None:
        chosen = {"tasks": request.tasks, "env": recorded.get("env") or ""}
    elif chosen.get("tasks") in (None, "", "generated"):
        raise UserError(f"{request.run} got its tasks from a program: give a file of them with --tasks")
    if request.env is not None:
        chosen["env"] = request.env
    return chosen


def _tasks(request: AuditRequest, limit: int | None = None) -> list[Task]:
    """Return the first `limit` tasks; the run's held-out tasks if it has some and `--tasks` is not given."""
    from itertools import islice

    from posttrain.config.inference import Check
    from posttrain.config.resolve import filled
    from posttrain.data.tasks import hold_out
    from posttrain.training.setup import load_tasks

    chosen, recorded = _options(request), read_run(str(request.run))["config"]
    data = load_tasks(filled(Check, {**chosen, "limit": None}, "audit: "))
    share = recorded.get("held_out") or 0.0
    if request.tasks is None and share:
        data = hold_out(data, share, recorded["seed"])[1]
    return list(islice(data, limit))


def _probe(request: AuditRequest) -> Probe:
    """Sample replies to the tasks and to the same tasks with a wrong opinion, with the same seeds, and compare them."""
    from posttrain.config.inference import Evaluation
    from posttrain.config.resolve import filled
    from posttrain.envs.play.load_env import success_of
    from posttrain.training.verbs.evaluate import evaluate

    recorded = read_run(str(request.run))["config"]
    env = _options(request)["env"]
    tasks = _tasks(request, request.limit or LIMIT)
    twins = probed(tasks, int(recorded.get("seed") or 0), request.opinion or OPINION)
    own = {t["id"]: t for t in tasks}
    plain = [own[t["id"]] for t in twins]
    played = {name: recorded[name] for name in PLAY_OPTIONS if recorded.get(name) is not None}
    success = success_of(env, played.get("success"))
    if success is None:
        raise UserError("--sycophancy needs to know which replies are right: put SUCCESS = 1.0 beside the reward")
    options = {
        "model": str(request.run),
        "env": env,
        "tasks": "generated",
        "samples": request.samples,
        **played,
        "k": (),
    }
    config = filled(Evaluation, options, "audit: ")
    sides = [evaluate(config, rows).rollouts for rows in (plain, twins)]
    return compare(twins, sides[0], sides[1], env, success)


# -- printing ----------------------------------------------------------------------------------------------------------


def show(found: Audit, run: str) -> None:
    """Print an audit in 80 columns."""
    read = found.read
    invalid = f", {read['invalid']:,} invalid left out" if read["invalid"] else ""
    of = f" of {read['recorded']:,}" if read["recorded"] > read["steps"] else ""
    print(clip(safe(run), 76))
    print(f"{read['steps']:,}{of} steps, {read['replies']:,} replies to {read['prompts']:,} prompts{invalid}\n")
    rows = [[name, _number(t.early), _number(t.late), str(t.change)] for name, t in found.trends.items()]
    ends = [row["commonest opening"] for row in (found.steps[0], found.steps[-1])]
    rows.append(["commonest opening, first and last step", *map(_number, ends), "-"])
    table("Means over the first and the last fifth of these steps", ["", "early", "late", "change"], rows)
    print()
    rows = [[safe(name), str(p), str(s)] for name, (p, s) in found.correlations.items()]
    table("Correlation of the reward with", ["", "Pearson", "Spearman"], rows)
    print()
    rows = [
        [s.place, safe(" ".join(s.gram))[:24], _number(s.early), _number(s.late), str(s.growth)]
        for s in found.templates
    ]
    if rows:
        table("Openings and closings that spread most", ["", "words", "early", "late", "change"], rows)
        print()
    if found.leap is not None:
        print(f"greatest leap: {found.leap.before:.3g} -> {found.leap.after:.3g} at step {found.leap.step}\n")
    for finding in found.findings:
        _wrapped(finding.name, finding.message)
    if not found.findings:
        print("nothing found")
    for note in found.notes:
        _wrapped("note", note)
    _without_interval([t.change for t in found.trends.values()])
    _without_interval([figure for both in found.correlations.values() for figure in both])
    print("Intervals: 95%, over prompts. A finding is a reason to read replies.")


def show_probe(probe: Probe) -> None:
    """Print a sycophancy probe in 80 columns."""
    rows = [
        ["accuracy", str(probe.plain)],
        ["with the user's wrong opinion", str(probe.swayed)],
        ["fall", str(probe.fall)],
    ]
    if probe.adopted is not None:
        rows.append(["more replies give the user's answer", str(probe.adopted)])
    print()
    table(f"Sycophancy: {probe.tasks:,} tasks, each without and with a wrong opinion", ["", "mean"], rows)
    _without_interval([probe.plain, probe.swayed, probe.fall, *([probe.adopted] if probe.adopted else [])])
    _wrapped("verdict", probe.verdict)


def _without_interval(figures: Sequence[Estimate]) -> None:
    """Print why figures marked with a star have no interval."""
    for why in dict.fromkeys(figure.why for figure in figures if figure.why and isfinite(figure.value)):
        _wrapped("*", why)


def _show_classifier(classifier: HackClassifier, path: str) -> None:
    told = classifier.held_out
    rows = [
        ["replies to unseen prompts", f"{told['replies']:.0f}"],
        ["accuracy", f"{told['accuracy']:.3f}"],
        ["accuracy of naming the commoner kind", f"{told['commoner']:.3f}"],
        ["area under the curve", f"{told['auc']:.3f}"],
    ]
    table(f"Classifier, written to {clip(path, 50)}", ["", ""], rows)
    print()


def _wrapped(name: str, text: str) -> None:
    from textwrap import fill

    print(fill(f"{name}: {safe(text)}", WIDTH, subsequent_indent="  "))


def _number(value: float) -> str:
    return f"{value:.3g}" if isfinite(value) else "-"
