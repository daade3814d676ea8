"""Reasons other than training that may explain why two runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from posttrain.runs.run_reading import split_of

SAMPLING = (
    "temperature",
    "temperature_column",
    "top_p",
    "top_k",
    "max_tokens",
    "max_turns",
    "stop",
    "eval_samples",
    "eval_limit",
)


class Compared(Protocol):
    """A run, as far as its record of options and inputs."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def about(self) -> Mapping[str, Any]:
        """The content of run.json."""
        ...

    @property
    def on(self) -> bool:
        """Whether it is in progress."""
        ...


def warnings_of(a: Compared, b: Compared, of_a: str = "", of_b: str = "") -> list[str]:
    """Return the reasons. `of_a`, `of_b`: the compared parts of their rollouts, such as eval-20."""
    found = []
    inputs = [run.about.get("inputs") or {} for run in (a, b)]
    for name, word in (("tasks", "training tasks"), ("eval_tasks", "held-out tasks")):
        digests = [
            {label: read.get("digest") for label, read in own.items() if label.partition(" ")[0] == name}
            for own in inputs
        ]
        if digests[0] != digests[1]:
            found.append(f"their {word} differ: only tasks of the same id are paired")
    if a.about.get("seed") != b.about.get("seed"):
        found.append(f"their seeds differ ({a.about.get('seed')}, {b.about.get('seed')}): order and sampling do too")
    configs = [run.about["config"] for run in (a, b)]
    for name in SAMPLING:
        if all(name in config for config in configs) and configs[0][name] != configs[1][name]:
            found.append(f"they sample differently: {name} is {configs[0].get(name)} and {configs[1].get(name)}")
    if of_a and of_b and of_a.split("-")[0] != of_b.split("-")[0]:
        found.append("one side is held out, the other is not")
    splits = [split_of(config) for config in configs]
    if splits[0] != splits[1] and all(share for share, _ in splits):
        (one, seed), (other, other_seed) = splits
        held = f"{one:g} by seed {seed}, {other:g} by seed {other_seed}"
        found.append(
            f"they hold out other tasks ({held}): runs with the same --held-out and --split-seed hold out the same"
        )
    for run in (a, b):
        if run.on:
            found.append(f"{run.name} has not ended")
    return found
