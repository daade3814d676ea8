"""The trackers that --track names, and the check of such names before anything heavy starts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from posttrain.config.verbs import load
from posttrain.core.extras import install, installed
from posttrain.core.messages import near_or_all
from posttrain.core.types import UserError
from posttrain.system.user_code import load_named


class KnownTracker(NamedTuple):
    """A tracker by name."""

    place: str  # module:class, a `posttrain.runs.tracking.tracker.Tracker`
    library: str = ""  # to be installed, by the extra of the same name; "": none


_HOME = "posttrain.runs.tracking.adapters"
TRACKERS = {
    "wandb": KnownTracker(f"{_HOME}:WandbTracker", "wandb"),
    "trackio": KnownTracker(f"{_HOME}:TrackioTracker", "trackio"),
    "mlflow": KnownTracker(f"{_HOME}:MLflowTracker", "mlflow"),
    "swanlab": KnownTracker(f"{_HOME}:SwanLabTracker", "swanlab"),
    "prometheus": KnownTracker("posttrain.runs.tracking.prometheus:PrometheusTracker"),
}


def trackers_of(given: Iterable[str]) -> list[str]:
    """Return the trackers of --track, each once: "wandb,trackio" names two."""
    return list(dict.fromkeys(name for text in given for name in text.split(",") if name))


def tracker_class(spec: str) -> type[Any]:
    """Return the class of a tracker: of a known one, perhaps with an address ("prometheus:9464"), or of my.py:Mine.

    Raises UserError, with the fix, for a name that means nothing.
    """
    known = TRACKERS.get(spec.partition(":")[0])
    return load(known.place) if known else load_named(spec)


def check_trackers(given: Iterable[str]) -> None:
    """Raise UserError for a name that is no tracker's, or whose library is not installed."""
    given = tuple(given)
    if given and not trackers_of(given):
        raise UserError(f"--track names no tracker: give one of {', '.join(TRACKERS)}, or leave it out")
    for spec in trackers_of(given):
        name = spec.partition(":")[0]
        if name == "tensorboard":
            raise UserError("--track tensorboard has no effect, as every run writes TensorBoard's files: leave it out")
        if name not in TRACKERS and ":" not in spec:
            raise UserError(f"--track {spec}: no such tracker{near_or_all(spec, [*TRACKERS, 'my.py:Mine'])}")
        if name in TRACKERS and (library := TRACKERS[name].library) and not installed(library):
            raise UserError(f"--track {name} needs the library {library}: {install(library)}")
        if name in TRACKERS:
            _check_address(name, spec)
        elif not (isinstance(kind := tracker_class(spec), type) and hasattr(kind, "finish")):
            raise UserError(f"--track {spec} is not a tracker: write a class that extends posttrain.Tracker")


def _check_address(name: str, spec: str) -> None:
    """Raise UserError for an address behind the name of a tracker that takes none, or that is none."""
    address = spec.partition(":")[2]
    if name != "prometheus" and address:
        raise UserError(
            f"--track {spec}: {name} takes no address: set the server with the library's own environment variables"
        )
    port = address.rpartition(":")[2]
    if name == "prometheus" and not (re.fullmatch(r"([^:]+:)?\d{0,5}", address) and int(port or 0) < 1 << 16):
        raise UserError(
            f"--track {spec} is not an address: write prometheus:PORT or prometheus:HOST:PORT, with a port from 0 to "
            "65535"
        )
