"""`posttrain eval --suite`: evaluates the parts of a suite, and prints its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.config.inference import Evaluation
from posttrain.core.intervals import told
from posttrain.runs.terminal.printing import say, table
from posttrain.training.verbs import suite
from posttrain.training.verbs.evaluate import Evaluated


def evaluate_suite(config: Evaluation) -> int:
    """Evaluate one or two models on a suite, and return the exit code."""

    def part(name: str, found: Evaluated) -> None:
        say(f"{name:<12}{told(suite.headline(found.figures))}", *(f"{'':<12}{note}" for note in found.notes))

    found = suite.evaluate_suite(config, part)
    say("")
    table(config.model, HEAD, [_line(name, told["figures"], told["rates"], told) for name, told in found.parts.items()])
    if config.against is not None:
        others = [(name, told["against"], told) for name, told in found.parts.items()]
        table(config.against, HEAD, [_line(name, own["figures"], own["rates"], told) for name, own, told in others])
        head = ["part", "difference", "won", "lost", "tied", "p"]
        title = f"{config.model} less {config.against}, task by task (p: sign test)"
        table(title, head, [_difference(name, told) for name, told in found.parts.items()])
    for name, average in found.averages.items():
        label = f"mean of {average['parts']} part{'s'[: average['parts'] - 1]}{'' if name == 'all' else f' {name}'}"
        say(f"{label}: {told(average)}")
        if "difference" in average:
            say(f"    {config.against}: {told(average['against'])}; difference {told(average['difference'])}")
    if config.out:
        say(f"figures     {config.out}; of each part, with its rollouts: {suite.beside(Path(config.out), 'PART')}")
    return 0


HEAD = ["part", "tasks", "accuracy or reward", "tokens", "cut off", "invalid", "distribution"]


def _line(name: str, figures: dict[str, Any], rates: dict[str, float], of: dict[str, Any]) -> list[Any]:
    place = "in" if of["in_distribution"] else "out"
    headline = suite.headline(figures)
    said = f"{headline['mean']:.3f}" if headline.get("why") else told(headline)
    return [name, figures["tasks"], said, rates["tokens"], rates["truncated"], rates["invalid"], place]


def _difference(name: str, of: dict[str, Any]) -> list[Any]:
    headline, wins = suite.headline(of["differences"]), of["wins"]
    said = f"{headline['mean']:.3f}" if headline.get("why") else told(headline)
    return [name, said, wins["won"], wins["lost"], wins["tied"], wins["p"]]
