"""What a run leaves behind, for people and for any tool to read.

    run.json                    what was run, with what, where, from when to when, and its final figures
    metrics.jsonl               one line a step, of configuration and seed alone: a resumed run repeats every byte
    timing.jsonl                one line a step, of all that depends on the clock
    health.jsonl                what the health check found, and after which step
    rollouts/step-000012.jsonl  what was sampled in a step, and how it was rewarded
    tensorboard/                metrics and timing as event files
    curves.png                  drawn by `curves`

It decides the form of these files and when they are safe on disk. It never reads a tensor.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.types import Invalid, Rollout, SpanKind, Transcript, UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Folder = str | os.PathLike[str]

PANELS = {
    "reward": "Reward",
    "loss": "Training loss, nats per token",
    "eval/accuracy": "Held-out accuracy",
    "eval/reward": "Held-out reward",
    "eval/loss": "Held-out loss, nats per token",
    "length": "Reply length, tokens",
    "entropy": "Entropy, nats per token",
    "kl": "KL from the reference, nats per token",
    "explained_variance": "Explained variance of the critic",
    "groups/no_signal": "Share of groups without signal",
    "diversity/similarity": "Similarity of replies within a group",
    "tokens_per_second": "Speed, tokens per second",
}
"""Metric -> title in `curves`, in the order in which they are drawn."""

SECONDS_BETWEEN_FLUSHES = 10.0  # of what TensorBoard shows of a run that is on

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's, for the colour-blind


class Record:
    """The run directory of one run, open for writing. Only one process writes it."""

    def __init__(self, folder: Path, step: int) -> None:
        """Use `create` or `resume`. `step` is the last one that is kept; -1: the run is new."""
        self.folder = folder
        self._metrics = _Journal(folder / "metrics.jsonl", step)
        self._timing = _Journal(folder / "timing.jsonl", step)
        self._health = folder / "health.jsonl"
        if self._health.exists():
            kept = [line for line in read_health(folder) if line["step"] <= step]
            self._health.write_bytes(b"".join(map(_line, kept)))
        self._unsynced: list[Path] = []  # rollout files that are not yet known to be on disk
        self._events: _Events | None = None
        self._kept = step

    @classmethod
    def create(cls, folder: Folder, config: Mapping[str, Any], command: str, extra: Mapping[str, Any]) -> Record:
        """Begin a run in `folder`: new, or without a run in it (UserError).

        `command` is the verb, such as "rl"; `config` all settings as resolved, with "seed"; `extra` what else run.json
        should say, such as {"objective": "the formula"}.
        """
        path = Path(folder)
        if any((path / name).exists() for name in ("run.json", "metrics.jsonl", "rollouts")):
            raise UserError(f"{path} already holds a run: pass --resume to continue it, or another --out")
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file: pass a folder as --out")
        run = {"verb": command, "start": _now(), **_circumstances(), "seed": config.get("seed"), "config": config}
        assert not run.keys() & extra.keys(), f"extra repeats {sorted(run.keys() & extra.keys())}"
        path.mkdir(parents=True, exist_ok=True)
        _replace(path / "run.json", {**run, **extra})
        (path / "rollouts").mkdir()
        return cls(path, -1)

    @classmethod
    def resume(cls, folder: Folder, step: int, config: Mapping[str, Any] | None = None) -> Record:
        """Continue a run from its checkpoint of `step`: what was recorded of later steps is deleted.

        `config`: all settings as they are from now on, if some were changed.
        """
        path = Path(folder)
        run = read_run(path)
        again = {"step": step, "start": _now(), **_circumstances()}
        kept = {name: value for name, value in run.items() if name not in ("end", "final", "resumes")}
        kept["config"] = run["config"] if config is None else config
        (path / "rollouts").mkdir(exist_ok=True)  # killed before `create` had made it
        _replace(path / "run.json", {**kept, "resumes": [*run.get("resumes", []), again]})
        later = [_rollout_file(path, number) for number in rollout_steps(path) if number > step]
        for file in [*later, *path.glob("rollouts/*.tmp")]:
            file.unlink()
        return cls(path, step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One line of metrics.jsonl; once a step. What depends on the clock belongs in `timing`."""
        self._metrics.append(step, values)
        self._draw(step, values)

    def timing(self, step: int, values: Mapping[str, float]) -> None:
        """One line of timing.jsonl; once a step."""
        self._timing.append(step, values)
        self._draw(step, values)

    def health(self, step: int, name: str, message: str) -> None:
        """One line of health.jsonl: something was found after this step."""
        with self._health.open("ab") as file:
            file.write(_line({"step": step, "name": name, "message": message}))

    def rollouts(self, step: int, rollouts: Sequence[tuple[Rollout, float]]) -> None:
        """Write the rollouts of a step, each with its advantage. The file appears whole or not at all."""
        path = _rollout_file(self.folder, step)
        unfinished = path.with_name(path.name + ".tmp")
        with unfinished.open("wb") as file:
            for place, (rollout, advantage) in enumerate(rollouts):
                file.write(_line({"id": f"{step}/{place}", **_readable(rollout), "advantage": _number(advantage)}))
        unfinished.replace(path)
        self._unsynced.append(path)

    def flush(self) -> None:
        """Return once all JSON written so far would outlive a power cut. Call it before a checkpoint is saved."""
        self._metrics.sync()
        self._timing.sync()
        if self._events:
            self._events.flush()
        for path in (*self._unsynced, self.folder / "rollouts", self.folder):
            _sync(path)
        self._unsynced.clear()

    def close(self, final: Mapping[str, Any]) -> None:
        """Note the end of the run and its final figures in run.json."""
        self.flush()
        self._metrics.close()
        self._timing.close()
        if self._events:
            self._events.close()
        _replace(self.folder / "run.json", {**read_run(self.folder), "end": _now(), "final": final})

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        """Pass on to TensorBoard, which hides what an earlier attempt wrote of the steps since the resume."""
        if self._events is None:
            # The suffix, because two attempts may begin within one second, which is all their names would tell.
            suffix = f".{len(read_run(self.folder).get('resumes', []))}"
            self._events = _Events(self.folder / "tensorboard", self._kept + 1, suffix)
        self._events.add(step, values)


class _Events:
    """An event file of TensorBoard, which shows of older files only what lies before step `first`.

    It is written in the caller's thread. tensorboardX's SummaryWriter has a thread for it, which dies of a full disk;
    the queue in front of it then fills up, and the run waits for ever.
    """

    def __init__(self, folder: Path, first: int, suffix: str) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        folder.mkdir(exist_ok=True)
        self._event, self._scalar = Event, scalar
        self._file = EventsWriter(str(folder / "events"), suffix)
        begin = Event(step=first, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
        self._file.write_event(begin)
        self._flushed = time.monotonic()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                summary = self._scalar(name, float(value))
                self._file.write_event(self._event(step=step, wall_time=time.time(), summary=summary))
        if time.monotonic() - self._flushed > SECONDS_BETWEEN_FLUSHES:
            self.flush()

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()


class _Journal:
    """A file of one JSON line a step, in the order of the steps. Opening it removes what lies after step `last`."""

    def __init__(self, path: Path, last: int) -> None:
        self._file = path.open("ab")
        self._last, size = -1, 0
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or json.loads(line)["step"] > last:  # half-written, or later
                break
            self._last, size = json.loads(line)["step"], size + len(line)
        self._file.truncate(size)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        assert step > self._last, f"a line for step {step} after step {self._last}: one line a step, in order"
        assert "step" not in values
        self._file.write(_line({"step": step, **{name: _number(values[name]) for name in sorted(values)}}))
        self._file.flush()
        self._last = step

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_run(folder: Folder) -> dict[str, Any]:
    """run.json of a run; UserError if the folder holds none."""
    path = Path(folder) / "run.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no run: pass a folder with a run.json in it")
    run: dict[str, Any] = json.loads(path.read_bytes())
    return run


def read_metrics(folder: Folder) -> list[dict[str, Any]]:
    """One dict a step: {"step": 12, "reward": 0.5, ...}; None for what was not finite. Also while the run is on."""
    return _read_lines(Path(folder) / "metrics.jsonl")


def read_timing(folder: Folder) -> list[dict[str, Any]]:
    """One dict a step: {"step": 12, "seconds/rollout": 1.5, ...}."""
    return _read_lines(Path(folder) / "timing.jsonl")


def read_health(folder: Folder) -> list[dict[str, Any]]:
    """One dict a finding: {"step": 52, "name": "entropy", "message": "..."}."""
    return _read_lines(Path(folder) / "health.jsonl")


def rollout_steps(folder: Folder) -> list[int]:
    """The steps whose rollouts are there, in order."""
    return sorted(int(path.stem.removeprefix("step-")) for path in Path(folder).glob("rollouts/step-*.jsonl"))


def read_rollouts(folder: Folder, step: int) -> list[dict[str, Any]]:
    """The rollouts of a step as they were written; UserError if there are none."""
    path = _rollout_file(Path(folder), step)
    if not path.exists():
        steps = rollout_steps(folder)
        there = f"take one of {steps[0]} to {steps[-1]}" if steps else "it holds none at all"
        raise UserError(f"{folder} holds no rollouts of step {step}: {there}")
    return _read_lines(path)


def curves(runs: Folder | Mapping[str, Folder], out: Folder | None = None) -> Path:
    """Draw what happened over the steps, one panel for each metric of `PANELS` and each held-out one that was recorded.

    `runs` is the folder of a run, or label -> folder for several in the same panels, such as one for each seed.
    Writes `out`, a PNG; by default curves.png in the folder of the run, the first of several.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    folders = dict(runs) if isinstance(runs, Mapping) else {"": runs}
    recorded = {label: _series(folder) for label, folder in folders.items()}
    names = _panels({name for series in recorded.values() for name in series})
    if not names:
        raise UserError(f"{', '.join(map(str, folders.values()))}: no metric was recorded yet, so nothing can be drawn")
    columns = 2 if len(names) == 4 else min(len(names), 3)
    rows = math.ceil(len(names) / columns)
    figure = Figure((4.2 * columns, 2.7 * rows + 0.3), 150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    axes: Axes | None = None
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, place, sharex=axes)
        for number, (label, series) in enumerate(recorded.items()):
            if name in series:
                _curve(axes, *series[name], COLOURS[number % len(COLOURS)], label)
        _dress(axes, name, bottom=place + columns > len(names))
    if len(folders) > 1:
        lines = {str(line.get_label()): line for panel in figure.axes for line in panel.get_legend_handles_labels()[0]}
        figure.legend(lines.values(), lines.keys(), loc="outside upper left", ncols=6, frameon=False, fontsize=9)
    path = Path(out) if out is not None else Path(next(iter(folders.values()))) / "curves.png"
    figure.savefig(path)
    return path


def _panels(names: set[str]) -> list[str]:
    """The names to draw, in the order of `PANELS`."""
    drawn = [name for name in PANELS if name in names]
    return (
        [name for name in drawn if name != "loss"] if "reward" in drawn else drawn
    )  # in RL the loss shows no progress


def _series(folder: Folder) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name -> (steps, values), of what was recorded and finite."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in read_metrics(folder) + read_timing(folder):
        for name, value in line.items():
            if name != "step" and value is not None:
                points.setdefault(name, []).append((line["step"], value))
    return {name: (np.array(pairs)[:, 0], np.array(pairs)[:, 1]) for name, pairs in points.items()}


def _dress(axes: Axes, name: str, bottom: bool) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    title = PANELS.get(name, "Held-out " + name.removeprefix("eval/"))
    axes.set_title(title, loc="left", fontsize=10, color="#222222")
    axes.grid(linewidth=0.5, color="#e6e6e6")
    axes.tick_params(length=0, labelsize=8, labelcolor="#555555")
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color="#999999", linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if name == "tokens_per_second":
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_ylim(bottom=0)  # so that noise does not look like a trend
    axes.set_xlabel("step" if bottom else "", fontsize=9, color="#555555")


def _curve(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str, label: str) -> None:
    """A few points are shown as they are; of many, the running mean, over the raw values drawn faintly."""
    if len(values) < 30:
        axes.plot(steps, values, color=colour, linewidth=1.5, marker="o", markersize=2.5, label=label)
        return
    window = np.ones(2 * (len(values) // 50) + 3)  # about a twenty-fifth of the run, centred: it does not lag
    mean = np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")
    axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.25)
    axes.plot(steps, mean, color=colour, linewidth=1.6, label=label)


def _readable(rollout: Rollout) -> dict[str, Any]:
    reward = rollout.reward
    verdict = {"reward": None, "invalid": reward.reason} if isinstance(reward, Invalid) else {"reward": _number(reward)}
    return {
        "group": rollout.group,
        "prompt": rollout.prompt,
        "text": rollout.text,
        "answer": _plain(rollout.task.get("answer", rollout.task.get("answers"))),
        **verdict,
        "rewards": {name: _number(value) for name, value in rollout.rewards.items()},
        "steps": [[position, _number(value)] for position, value in rollout.steps],
        "stop": str(rollout.stop),
        "version": rollout.version,
        "transcripts": [
            {"tokens": list(map(int, t.tokens)), "sampled": _spans(t), "logp": list(map(_short, t.logp))}
            for t in rollout.transcripts
        ],
    }


def _spans(transcript: Transcript) -> list[list[int]]:
    """[first, number] of each run of sampled tokens."""
    return [[s.start, s.length] for s in transcript.spans if s.kind is SpanKind.SAMPLED]


def _short(value: float) -> float | None:
    """A float32 as the shortest decimal that reads back as the same float32: half the digits of its float64 form."""
    return _number(float(str(np.float32(value))))


def _number(value: float) -> float | None:
    """As JSON can hold it, which knows neither infinity nor not-a-number."""
    return float(value) if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """Any setting as JSON can hold it: what has no JSON form, infinity included, becomes a string."""
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _line(row: Any, indent: int | None = None) -> bytes:
    text = json.dumps(
        row, ensure_ascii=False, allow_nan=False, indent=indent, separators=(",", ": " if indent else ":")
    )
    return (text + "\n").encode("utf-8", "backslashreplace")  # a lone surrogate: its escape is JSON's own


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """[] if there is no file yet. A last line that is still being written is left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _rollout_file(folder: Path, step: int) -> Path:
    return folder / "rollouts" / f"step-{step:06d}.jsonl"


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader, or a crash, sees the old content or the new one."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_bytes(_line(_plain(content), indent=2))
    _sync(unfinished)
    unfinished.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _circumstances() -> dict[str, Any]:
    """Versions, code revision and machine: what else a result may depend on."""
    packages = ("posttrain", "torch", "transformers", "tokenizers", "numpy")
    versions = {"python": platform.python_version(), **{name: _version(name) for name in packages}}
    torch = sys.modules.get("torch")  # asked only if the run has loaded it
    machine = {
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads() if torch else None,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    return {"versions": versions, "git": _git(), "machine": machine}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Revision of the current directory, and whether tracked files differ from it. None outside of git."""
    ask = partial(subprocess.check_output, text=True, timeout=10, stderr=subprocess.DEVNULL)
    try:
        revision, changes = ask(["git", "rev-parse", "HEAD"]), ask(["git", "status", "--porcelain", "-uno"])
    except (OSError, subprocess.SubprocessError):
        return None
    return {"revision": revision.strip(), "dirty": bool(changes.strip())}
