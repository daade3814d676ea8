"""The table of metrics and what runs log are the same: every name that is logged stands there, and nothing else does."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import golden
import pytest
from documents import ROOT

from posttrain.cli.main import main
from posttrain.runs.metrics_table import HELD_OUT, METRICS, metric_named
from posttrain.runs.run_reading import read_metrics, read_timing
from posttrain.runs.terminal.panel import figures

ROOMS = ("core", "system", "engines", "learners", "envs", "algorithms", "training", "services")  # those that log
RUNS = ("sft", "dapo", "distill", "dpo", "reward-model")  # of every verb that trains
POPPED = "sampler/ratio/square"  # an intermediate sum, which no step logs


@cache
def texts() -> frozenset[tuple[str, bool]]:
    """(text, whether a metric is added by it) of every string in these rooms, a placeholder for what is filled in."""
    found = set()
    for file in (file for room in ROOMS for file in (ROOT / "posttrain" / room).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        added = {id(node.args[0]) for node in nodes if isinstance(node, ast.Call) and adds(node.func) and node.args}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add((node.value, id(node) in added))
            elif isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
                found.add(("".join(parts), id(node) in added))
    return frozenset(found)


def adds(called: ast.expr) -> bool:
    return isinstance(called, ast.Attribute) and called.attr == "add" and ast.unparse(called.value).endswith("stats")


def pattern(text: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, text.split("{}"))))


def test_every_metric_that_code_adds_stands_in_the_table() -> None:
    added = {text for text, adding in texts() if adding} - {POPPED}
    names = [metric.name for metric in METRICS]
    assert len(added) > 70
    assert not [text for text in added if "{}" not in text and metric_named(text) is None]
    assert not [text for text in added if not any(pattern(text).fullmatch(name) for name in names)]
    both = [text.removeprefix("{}") for text in added if re.match(r"{}\w", text)]  # of training, and held out
    assert both and all(metric_named(name) for text in both for name in (text, HELD_OUT + text) if "{}" not in text)


def test_every_metric_of_the_table_is_logged() -> None:
    found = {text for text, _ in texts()}
    words = {word for text in found for word in re.split("[/{}]", text.replace(" ", "_"))}
    patterns = [pattern(text) for text in found if re.search(r"\w", text.replace("{}", "")) and len(text) < 40]

    def logged(name: str) -> bool:
        """Whether a string of the code is the name, but for words which are other strings of it."""
        matches = filter(None, (own.fullmatch(name) for own in patterns))
        return any(all(known(word) for filled in found.groups() for word in filled.split("/")) for found in matches)

    def known(word: str) -> bool:
        return not word or word in words or word.startswith("{")

    assert not [metric.name for metric in METRICS if not logged(metric.name)]
    assert not logged("groups/vanished") and not logged("routing/vanished")


def test_every_metric_that_training_logs_stands_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden.write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in RUNS:
        words = f"{golden.RUNS[name][1]} --out runs/{name} --threads 1 --quiet"
        assert main(words.split()) == 0
        lines = [*read_metrics(Path("runs", name)), *read_timing(Path("runs", name))]
        logged = {key for line in lines for key in line} - {"step"}
        assert len(logged) > 10 and not [key for key in logged if metric_named(key) is None]


def test_rows_are_told_apart() -> None:
    for said in ("name", "label"):
        assert len({getattr(metric, said) for metric in METRICS}) == len(METRICS)
    assert all(metric.meaning.endswith(".") and metric.title for metric in METRICS)
    found = metric_named("reward/valid searches")
    assert found is not None and found.title == "Reward: valid searches" and metric_named("own/figure") is None


def test_held_out_figures_are_words_on_the_terminal() -> None:
    values = {metric.name: 0.5 for metric in METRICS if metric.name.startswith(HELD_OUT) and "{" not in metric.name}
    labels = [label for one in values for label, _ in figures({one: 0.5})]
    assert len(labels) == len(values) == len(set(labels)) and not [
        label for label in labels if re.search("[_/,]", label)
    ]
    assert "held-out implicit reward chosen" in labels and "held-out bag of words" in labels
