"""The command `posttrain plan`: simulates a pilot's job in many settings, and prints the best and its bottleneck."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from posttrain.apps.planning.job import PlanSetting
from posttrain.apps.planning.pilot import Pilot, read_pilot
from posttrain.apps.planning.simulation import Simulation, SimulationResult
from posttrain.config.command_words import command_words
from posttrain.config.scale import Plan
from posttrain.config.training import RL
from posttrain.core.messages import dashed
from posttrain.core.types import UserError
from posttrain.envs.play.load_env import BUILTIN
from posttrain.runs.trained_options import FROM_PYTHON

FAR = 0.1  # relative difference of the pilot's speed to its simulation above which a line gives advice
ENOUGH = 20  # measured steps of a pilot
SHOWN = 10  # settings, so that all fits a terminal of 24 lines
SPLITS = 12  # splits of many devices to try before the neighbours of the best one
FEWEST, MOST, REPLIES = 16, 48, 12_000  # fewest and most steps to simulate, and the replies that suffice
ALIKE = 0.01  # relative difference in steps per hour below which settings are equal
OF_A_FOLDER = frozenset(["resume", "overwrite"])
"""Options about the folder of the pilot, which its command in another setting does not have."""
HELP = {
    "decoding": "engines decode all the time: add engines, or shorten replies",
    "tail": "engines wait for their longest replies: --tokens-per-step helps",
    "weights": "engines wait for new weights: --async-steps, or more learners",
    "learners": "learners work all the time: add learners, not engines",
    "environments": "engines wait for environments: --env-workers, --prompts, --async-steps",
    "reading": "engines spend their time on prompts, and between replies",
    "loading": "the weight sync takes the time: fewer, larger steps",
}
"""Bottleneck of a setting -> remedy."""


def plan(run: str, config: Plan) -> int:
    """Print the forecast of a pilot run's job in other settings. Returns the exit code."""
    _check(config)
    pilot = read_pilot(run, config.prompts, config.group, config.weight_sync_seconds, config.gradients)
    steps = config.steps or _enough(pilot, config)

    @cache
    def outcome(setting: PlanSetting) -> SimulationResult:
        return Simulation(pilot.job, setting, steps).run()

    alone = outcome(PlanSetting(1, shared=True))
    found = _tried(config, outcome)
    best = _best(found)
    if config.json:
        print(
            json.dumps(
                {**_data(pilot, alone, found, best), "command": command_of(pilot, best.setting, config)}, indent=1
            )
        )
    else:
        print("\n".join(_lines(pilot, alone, found, best, config, steps)))
    return 0


def _enough(pilot: Pilot, config: Plan) -> int:
    """Return the steps to simulate: fewer if steps are large, so that a plan takes seconds."""
    replies = pilot.job.prompts * pilot.size[1]
    return max(FEWEST, min(MOST, REPLIES // replies)) + 4 * max(config.async_steps)


def _check(config: Plan) -> None:
    if config.gpus is not None and (config.engines or config.learners):
        raise UserError(
            "--gpus tries every split, and --engines and --learners name splits: give either --gpus or these"
        )
    for name in ("engines", "learners", "async_steps"):
        least = 0 if name == "async_steps" else 1
        if wrong := [value for value in getattr(config, name) if not least <= value <= 10_000]:
            raise UserError(f"{dashed(name)} {wrong[0]} must be from {least} to 10000")
    if not config.async_steps:
        raise UserError("--async-steps is empty: give at least one number, or leave it out")


def _tried(config: Plan, outcome: Callable[[PlanSetting], SimulationResult]) -> list[SimulationResult]:
    """Simulate all requested settings and return their results."""
    cuts: tuple[int | None, ...] = (None,) if config.tokens_per_step is None else (None, config.tokens_per_step)
    ways = [(ahead, cut) for ahead in config.async_steps for cut in cuts]
    if config.gpus is None:
        return [
            outcome(PlanSetting(engines, learners, ahead, cut))
            for engines in config.engines or (1, 2, 4)
            for learners in config.learners or (1,)
            for ahead, cut in ways
        ]
    gpus = config.gpus
    found = [outcome(PlanSetting(gpus, gpus, shared=True))]
    for ahead, cut in ways if gpus > 1 else ():
        found += _splits(gpus, ahead, cut, outcome)
    return found


def _splits(
    gpus: int, ahead: int, cut: int | None, of: Callable[[PlanSetting], SimulationResult]
) -> list[SimulationResult]:
    """Return the results of all splits of a few devices; of many: of some, then of the best one's neighbours until
    none is better.

    Each process of a run has engines of its own, so there are at least as many engines as learners.
    """

    def outcome(engines: int) -> SimulationResult:
        return of(PlanSetting(engines, gpus - engines, ahead, cut))

    there = set(range(-(-gpus // 2), gpus))
    tried = {round(gpus * part / (SPLITS + 1)) for part in range(1, SPLITS + 1)} & there or there
    if gpus <= SPLITS + 1:
        tried = there
    while True:
        best = max(sorted(tried), key=lambda engines: outcome(engines).steps_per_hour)
        further = {best - 1, best + 1} & there - tried
        if not further:
            return [outcome(engines) for engines in sorted(tried)]
        tried |= further


def _best(found: Iterable[SimulationResult]) -> SimulationResult:
    """Return the fastest; among equally fast ones, that with the fewest `async_steps`, then the fewest devices."""
    ordered = sorted(found, key=lambda o: (o.setting.async_steps, o.setting.tokens or 0, o.setting.devices))
    most = max(o.steps_per_hour for o in ordered)
    return next(o for o in ordered if o.steps_per_hour >= most * (1 - ALIKE))


# -- output ------------------------------------------------------------------------------------------------------------


def _lines(
    pilot: Pilot,
    alone: SimulationResult,
    found: list[SimulationResult],
    best: SimulationResult,
    config: Plan,
    steps: int,
) -> list[str]:
    # settings with equal speeds as shown are ordered by their devices
    order = sorted(
        found,
        key=lambda o: (o is not best, -float(f"{o.steps_per_hour:.3g}"), o.setting.async_steps, o.setting.devices),
    )
    shown = order[:SHOWN]
    head = f"{'engines':>7} {'learners':>8} {'async':>5} {'tokens':>6} {'steps/h':>8} {'times':>6}  {'idle':<12}  limited by"
    lines = [*_about(pilot, alone, steps), "", head]
    lines += [_row(o, alone) for o in shown]
    if len(order) > SHOWN:
        lines.append(f"... and {len(order) - SHOWN} slower ones (--json has all)")
    return [*lines, "", *_advice(pilot, best, alone, config)]


def _about(pilot: Pilot, alone: SimulationResult, steps: int) -> list[str]:
    """Return the lines that describe the pilot."""
    episodes = [episode for group in pilot.groups for episode in group.episodes]
    lengths = sorted(episode.sampled + 1 for episode in episodes)
    speed, most = pilot.job.speed, len(lengths)
    turns = sum(len(episode.stages) for episode in episodes) / most
    decoding = ", ".join(f"{requests:.0f}: {_ms(seconds)}" for requests, seconds in _thinned(speed.decoding))
    far = alone.steps_per_hour / pilot.steps_per_hour - 1
    measured = "" if pilot.resized else f"{pilot.steps_per_hour:,.0f} steps/h measured, "
    compared = f" ({far:+.0%})" if measured else ""
    prompts, group = pilot.size
    handed = f"weight sync {speed.load:.2g} s" if speed.load > 1e-3 else "no sync (--weight-sync-seconds)"
    return [
        f"pilot     {pilot.folder}: {pilot.steps} steps measured; a step is {prompts} prompts x {group} replies",
        f"replies   {sum(lengths) / most:,.0f} tokens, 95% up to {lengths[int(0.95 * (most - 1))]:,}, "
        f"longest {lengths[-1]:,}; {turns:.1f} turns; environment {pilot.waits:.2g} s",
        f"decoding  ms a step, by requests: {decoding}",
        f"learner   {pilot.update_tokens:,.0f} tokens/s, {pilot.job.learning.step:.2g} s between; {handed}",
        f"as it ran {measured}{alone.steps_per_hour:,.0f} in the simulation{compared}",
        *(_apart(pilot.steps, steps) if measured and abs(far) > FAR else ()),
    ]


def _apart(measured: int, simulated: int) -> list[str]:
    """Return the lines about a simulation that misses the pilot's own speed."""
    few = f"few steps were measured: run the pilot again with --steps {ENOUGH + 1}"
    noisy = f"run the pilot with nothing beside it, or plan with --steps {4 * simulated}"
    return [
        f"          more than {FAR:.0%} apart, so smaller gains below mean little:",
        f"          {few if measured < ENOUGH else noisy}",
    ]


def _thinned(curve: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    return [curve[place] for place in sorted({0, len(curve) // 3, 2 * len(curve) // 3, len(curve) - 1})]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def _rate(o: SimulationResult) -> str:
    """Return steps an hour, rounded to four digits."""
    return f"{float(f'{o.steps_per_hour:.4g}'):,.12g}"


def _row(o: SimulationResult, alone: SimulationResult) -> str:
    s = o.setting
    learners = "same" if s.shared else str(s.learners)
    engines, learning = (f"{share:.0%}" for share in o.idle)
    return (
        f"{s.engines:>7} {learners:>8} {s.async_steps:>5} {s.tokens or '-':>6} {_rate(o):>8} "
        f"{o.steps_per_hour / alone.steps_per_hour:>6.2f}  {engines + ', ' + learning:<12}  {NAMES[o.limit]}"
    )


NAMES = {"tail": "longest replies", "reading": "prompts", "loading": "weight sync"} | {
    name: name for name in ("decoding", "weights", "learners", "environments")
}


def _advice(pilot: Pilot, best: SimulationResult, alone: SimulationResult, config: Plan) -> list[str]:
    s, times = best.setting, best.steps_per_hour / alone.steps_per_hour
    what = (
        f"{s.engines} processes that sample and learn in turns"
        if s.shared
        else (f"{s.engines} engine{'s' * (s.engines > 1)}, {s.learners} learner{'s' * (s.learners > 1)}")
    )
    of = f" of {config.gpus} GPUs" if config.gpus else ""
    return [
        f"best{of}: {what}: {_rate(best)} steps/h, {times:.2f} times one process",
        f"limit     {HELP[best.limit]}",
        f"command   {command_of(pilot, s, config)}",
    ]


def command_of(pilot: Pilot, setting: PlanSetting, config: Plan) -> str:
    """Return the command that runs the pilot's job in a setting: its other options, then those of the setting. It runs in a
    folder beside the pilot's. Where a command line cannot express the pilot's options, only those of the setting.

    With `--gpus` it names the GPUs of learners and engines, unless the pilot was to run on a CPU, or placed other models
    on GPUs.
    """
    options = pilot.options
    placed = config.gpus is not None and not setting.shared and options.device != "cpu"
    gpus = range(setting.devices if placed and not options.role_devices else 0)
    own = replace(
        options,
        out=f"{options.out.rstrip('/') or '/run'}-{setting.devices}",
        prompts=pilot.size[0],
        group=pilot.size[1],
    )
    split: dict[str, Any] = {
        "processes": setting.learners,
        "replicas": 0 if setting.shared else setting.engines,
        "async_steps": setting.async_steps,
        "tokens_per_step": setting.tokens or 0,
        "learner_devices": tuple(gpus[: setting.learners]),
        "engine_devices": tuple(gpus[setting.learners :]),
    }
    further = command_words(type(options)(**split))
    if not _expressible(options):
        return f"as the pilot was started, with {shlex.join(further) or 'no further option'}"
    return shlex.join(["posttrain", options.verb, *command_words(own, OF_A_FOLDER | split.keys()), *further])


def _expressible(options: RL) -> bool:
    """Return whether a command line can express the pilot's options: its rows and environment are no Python objects, and the
    settings of its chat template are plain.
    """
    by_name = not options.env or ":" in options.env or options.env in BUILTIN
    plain = not any(isinstance(value, str | dict | list) for value in options.chat_template_kwargs.values())
    return by_name and plain and not FROM_PYTHON.fullmatch(options.tasks)


def _data(
    pilot: Pilot, alone: SimulationResult, found: list[SimulationResult], best: SimulationResult
) -> dict[str, Any]:
    speed, learning = pilot.job.speed, pilot.job.learning
    about = {
        "run": pilot.folder,
        "steps": pilot.steps,
        "prompts": pilot.size[0],
        "group": pilot.size[1],
        "steps_per_hour": pilot.steps_per_hour,
        "simulated_steps_per_hour": alone.steps_per_hour,
        "decoding": [{"requests": requests, "seconds": seconds} for requests, seconds in speed.decoding],
        "seconds_per_token_read": speed.read,
        "weight_sync_seconds": speed.load,
        "update_tokens_per_second": pilot.update_tokens,
        "seconds_between_steps": learning.step,
        "environment_seconds": pilot.waits,
    }
    return {"pilot": about, "settings": [_as_data(o) for o in found], "best": _as_data(best)}


def _as_data(o: SimulationResult) -> dict[str, Any]:
    s = o.setting
    return {
        "engines": s.engines,
        "learners": s.learners,
        "shared": s.shared,
        "gpus": s.devices,
        "async_steps": s.async_steps,
        "tokens_per_step": s.tokens,
        "steps_per_hour": o.steps_per_hour,
        "idle": dict(zip(("engines", "learners"), o.idle, strict=True)),
        "engine_time": o.engines,
        "limit": NAMES[o.limit],
    }
