"""Finds the checkpoint to publish, the run that made it, and the model of the hub that the run began with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.core.messages import clip
from posttrain.core.types import UserError
from posttrain.models.adapters.adapter_config import is_adapter, read_adapter_config
from posttrain.models.json_files import read_json
from posttrain.runs import checkpoint as checkpoints
from posttrain.runs.run_files import RUN, step_name
from posttrain.runs.run_files import step_of as step_of_name
from posttrain.runs.run_reading import read_metrics, read_run
from posttrain.system.hub import HubName, hub_name

BEST = (("eval/accuracy", 1), ("eval/reward", 1), ("eval/loss", -1))
"""Held-out figures that decide which checkpoint is best, the first that a run has; -1: the lowest."""


@dataclass(frozen=True)
class Published:
    """A checkpoint to publish, and its origin."""

    folder: Path  # of the checkpoint
    run: Path | None = None  # the run that made it
    about: Mapping[str, Any] = field(default_factory=dict)  # its run.json
    step: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # of that step
    base: HubName | None = None  # the model of the hub that training began with
    stages: tuple[str, ...] = ()  # the verbs of the runs since then, the last one included

    @property
    def adapter(self) -> bool:
        return is_adapter(self.folder)

    @property
    def identity(self) -> str:
        """A text that is the same for all checkpoints of a run, and for no other run's."""
        if self.run is None:
            return f"folder {self.folder.absolute().name}"
        return f"{self.about['verb']} {self.about.get('start', '')}".strip()


def find(source: str, checkpoint: str | None = None, base: str | None = None) -> Published:
    """Find the checkpoint of a run, or that in a folder. `checkpoint`: a step, or best. Default: the newest.

    `base`: the model of the hub that training began with, where its folder does not show it. Raises UserError.
    """
    given = None if base is None else hub_name(base)
    if base is not None and given is None:
        raise UserError(f"--base {clip(base)} is not a model of the hub: write org/name or org/name@revision")
    path = Path(source).expanduser()
    run: Path | None
    if (path / RUN).is_file():
        folder, run = _chosen(path, checkpoint), path
    elif checkpoint is not None:
        raise UserError(f"--checkpoint needs a run, and {source} is not one: leave it out")
    else:
        if not path.is_dir():
            raise UserError(f"{clip(source)}: no such folder: give the folder of a run or of a checkpoint")
        above = path.absolute().parent.parent
        folder, run = path, above if (above / RUN).is_file() and step_of_name(path.name) is not None else None
    if not (is_adapter(folder) or (folder / "config.json").is_file()):
        raise UserError(f"{folder} holds no checkpoint (config.json): give the folder of a run or of a checkpoint")
    if run is None:
        return Published(folder, base=given or (_named(folder) if is_adapter(folder) else None))
    if (damage := checkpoints.damaged(folder)) is not None:
        raise UserError(f"checkpoint {folder} is damaged ({damage}): choose another with --checkpoint")
    about, step = read_run(run), checkpoints.step_of(folder)
    metrics = next((row for row in read_metrics(run) if row["step"] == step), {})
    found, stages = _origin(about)
    named = _named(folder) if is_adapter(folder) else found  # adapters fit the very weights that they were trained on
    return Published(folder, run, about, step, metrics, given or named, stages)


def _chosen(run: Path, checkpoint: str | None) -> Path:
    """Return the checkpoint of a run that the option names."""
    if checkpoint is None:
        return checkpoints.resolve(str(run))
    there = checkpoints.listed(run)
    steps = [checkpoints.step_of(folder) for folder in there]
    kept = f"{run} has checkpoints of steps {', '.join(map(str, steps)) or 'none'}"
    if checkpoint == "best":
        return there[steps.index(_best(run, steps, kept))]
    if not checkpoint.isdecimal() or int(checkpoint) not in steps:
        raise UserError(f"--checkpoint {clip(checkpoint)} is neither best nor a step with a checkpoint: {kept}")
    return there[steps.index(int(checkpoint))]


def _best(run: Path, steps: list[int], kept: str) -> int:
    """Return the step with the best held-out figure among those with a checkpoint; of equal ones the last."""
    rows = [row for row in read_metrics(run) if row["step"] in steps]
    for name, sign in BEST:
        found = [(sign * row[name], row["step"]) for row in rows if row.get(name) is not None]
        if found:
            step: int = max(found)[1]
            return step
    raise UserError(
        f"--checkpoint best needs an evaluation on held-out tasks at a checkpoint, and there is none: {kept}"
    )


def _named(folder: Path) -> HubName | None:
    """Return the base that a folder of adapters names, if that is a model of the hub."""
    base = read_adapter_config(folder).base
    return _of_cache(Path(base)) or (None if Path(base).exists() else hub_name(base))


def _of_cache(folder: Path) -> HubName | None:
    """Return the model that a folder of the hub's cache belongs to."""
    found = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})$", str(folder))
    return HubName(f"{found[1]}/{found[2]}", found[3]) if found else None


def _origin(about: Mapping[str, Any]) -> tuple[HubName | None, tuple[str, ...]]:
    """Return the model of the hub that a run goes back to, over the runs that it began with, and the verbs since then."""
    stages: list[str] = []
    while True:
        stages.insert(0, about["verb"])
        initial = about.get("initial")
        if not isinstance(initial, str) or len(stages) > 20:
            return None, tuple(stages)
        place = Path(initial)
        if (named := _of_cache(place) or (None if place.exists() else hub_name(initial))) is not None:
            return named, tuple(stages)
        above = place.parent.parent
        if place.name != step_name(step_of_name(place.name) or 0) or not (above / RUN).is_file():
            return None, tuple(stages)
        try:
            about = read_run(above)
        except UserError:  # damaged since then
            return None, tuple(stages)


def license_of(published: Published, ask: bool) -> dict[str, str]:
    """Return the entries about the licence in the base's model card, where it is known. `ask`: also ask the hub."""
    from huggingface_hub import HfApi, metadata_load, try_to_load_from_cache

    base, found = published.base, None
    with suppress(Exception):  # a card may hold anything, and it is only a help
        if base is None:
            initial = Path(str(published.about.get("initial")))
            found = metadata_load(initial / "README.md") if (initial / "README.md").is_file() else None
        elif isinstance(file := try_to_load_from_cache(base.name, "README.md", revision=base.revision), str):
            found = metadata_load(file)
        elif ask and (card := HfApi().model_info(base.name, revision=base.revision, timeout=5.0).card_data) is not None:
            found = card.to_dict()
    return {n: str(v) for n in ("license", "license_name", "license_link") if (v := (found or {}).get(n)) is not None}


def architecture(folder: Path) -> dict[str, Any]:
    """Return config.json of a checkpoint folder; {} for one of adapters."""
    return read_json(folder / "config.json", optional=True)
