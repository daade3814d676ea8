"""Reads a job from the files of a pilot run: the lengths of its episodes, and the speed of its engine and learner.

A pilot is a run of one process with one engine. The first step, and the first after each resumption, are left out:
kernels are compiled in them, and caches are empty.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import cast

from posttrain.apps.planning.job import Group, Job, JobEpisode, JobTurn, Learning, Speed
from posttrain.config.training import RL
from posttrain.config.verbs import VERBS, sampling
from posttrain.core.messages import dashed
from posttrain.core.seeds import seed_of
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import UserError
from posttrain.runs.record.rollout_reading import timed_rollouts
from posttrain.runs.record.rollout_rows import Row
from posttrain.runs.record.schema import SCALARS
from posttrain.runs.run_files import TIMING
from posttrain.runs.run_reading import read_run, read_timing, rollout_steps

LEAST = 3  # measured steps that a pilot must have
MOST_READ = 20  # most steps whose rollouts are read; the last ones
_BUCKET = re.compile(r"decoding/(\d+)/steps")


@dataclass(frozen=True)
class Pilot:
    """Measurements of a job on the pilot's machine."""

    folder: str
    options: RL
    job: Job
    groups: tuple[Group, ...]
    steps: int  # that were measured
    size: tuple[int, int]  # prompts a step, replies a prompt
    resized: bool  # whether the size differs from the pilot's own
    steps_per_hour: float  # of the pilot itself
    update_tokens: float  # tokens per second that the learner scored and learned from
    waits: float  # mean seconds of an episode that the environment and the reward took


def read_pilot(
    folder: str,
    prompts: int | None = None,
    group: int | None = None,
    weight_sync: float | None = None,
    gradients: float = 0.0,
) -> Pilot:
    """Read the pilot in a folder. `prompts`, `group`, `weight_sync` replace the pilot's own values where given.

    Raises UserError if the folder holds no pilot.
    """
    run = read_run(folder)
    config = run["config"]
    _check_kind(folder, run["verb"], config)
    own = config["prompts"], config["group"]
    size = prompts or own[0], group or own[1]
    rows = _measured(folder, run)
    steps = {row["step"] for row in rows}
    known = [step for step in rollout_steps(folder) if step in steps][-MOST_READ:]
    if len(known) < LEAST:
        raise UserError(f"{folder} lacks the rollouts of the steps in its {TIMING}: put a copy of them back")
    groups = _groups(folder, known)
    speed = _speed(
        folder, rows, config, weight_sync, sum(len(e.stages) for g in groups for e in g.episodes) / len(known)
    )
    used = [row for row in rows if row["step"] in known]
    learning = sum(row["seconds/update"] + row["seconds/credit"] for row in used) / sum(g.tokens for g in groups)
    between = _mean(rows, "seconds/between")
    # dynamic sampling samples more groups than a step learns from
    factor = len(groups) / len(known) / config["prompts"]
    job = Job(
        max(1, round(size[0] * factor)),
        _draw(groups, size[1], config["group"], config.get("seed", 0)),
        speed,
        Learning(learning, between, gradients),
    )
    took = _mean(rows, "seconds/rollout") + _mean(rows, "seconds/update") + between
    episodes = [episode for g in groups for episode in g.episodes]
    waits = sum(e.reward + sum(stage.wait for stage in e.stages) for e in episodes) / len(episodes)
    return Pilot(
        str(folder),
        _options(folder, run["verb"], config),
        job,
        groups,
        len(rows),
        size,
        size != own,
        3600 / took,
        1 / learning,
        waits,
    )


def _check_kind(folder: str, verb: str, config: Row) -> None:
    if verb not in sampling():
        raise UserError(
            f"{folder} is a run of posttrain {verb}, which samples nothing: a pilot is one of {' or '.join(sampling())}"
        )
    for name, least in (("processes", 1), ("replicas", 1), ("async_steps", 0)):
        value = config.get(name) or least
        if not isinstance(value, int) or value > least:
            raise UserError(
                f"{folder} ran with {dashed(name)} {value}: a pilot has one process and one engine, and is synchronous"
            )
    if not all(type(config.get(name)) is int and config[name] > 0 for name in ("prompts", "group")):
        raise UserError(f"{Path(folder) / 'run.json'} is damaged (no valid prompts or group): put a copy of it back")


def _options(folder: str, verb: str, config: Row) -> RL:
    """Return the options of the run."""
    kind = VERBS[verb].options
    try:
        return cast(RL, kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in config.items()}))
    except TypeError as error:
        raise UserError(
            f"{folder} was made by another version, with other options ({error}): run a pilot again"
        ) from None


def _measured(folder: str, run: Row) -> list[Row]:
    """Return the rows of timing.jsonl without the first steps, which warm up."""
    cold = {1, *(again.get("step", 0) + 1 for again in run.get("resumes", []) if isinstance(again, dict))}
    every = [row for row in read_timing(folder) if row["step"] > 0]
    rows = [row for row in every if row["step"] not in cold]
    if len(rows) < LEAST:
        raise UserError(f"{folder} is too short for a pilot, with {len(every)} timed steps: run {LEAST + 1} or more")
    needed = ("seconds/load", "seconds/play", "seconds/credit", "seconds/update", "seconds/rollout", "seconds/between")
    if any(row.get(name) is None for row in rows for name in needed):
        raise UserError(f"{Path(folder) / TIMING} lacks the times within a step: run a pilot with this version")
    if not any(_BUCKET.fullmatch(name) for row in rows for name in row):
        raise UserError(
            f"{Path(folder) / TIMING} has no seconds of decoding: its engine counts none; pilot with another --engine"
        )
    return rows


def _mean(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows) / len(rows)


def _speed(folder: str, rows: Sequence[Row], config: Row, weight_sync: float | None, replies: float) -> Speed:
    """Return the speed of the engine. `replies`: mean number of replies in a step."""
    total: dict[str, float] = defaultdict(float)
    for row in rows:
        for name, value in row.items():
            total[name] += value or 0.0
    buckets = sorted(int(found[1]) for name in total if (found := _BUCKET.fullmatch(name)) and total[name] > 0)
    measured = []
    for bucket in buckets:
        steps, requests, seconds = (total[f"decoding/{bucket}/{what}"] for what in ("steps", "rows", "seconds"))
        if requests <= 0 or seconds <= 0:
            raise UserError(f"{Path(folder) / TIMING} is damaged (decoding/{bucket}): put a copy of it back")
        measured.append((requests / steps, seconds / steps, steps))
    spent = sum(total[f"decoding/{bucket}/seconds"] for bucket in buckets) + total["reading/seconds"]
    waited = total["seconds/waiting"] + total["seconds/services"]
    rest = max(0.0, total["seconds/play"] - spent - waited) / len(rows)
    slots = config.get("slots")
    slots = slots if isinstance(slots, int) and slots > 0 else 256
    return Speed(
        rising(measured),
        read=total["reading/seconds"] / max(1.0, total["reading/tokens"]),
        load=_mean(rows, "seconds/load") if weight_sync is None else weight_sync,
        reply=rest / replies,
        slots=slots,
        admitted=max(1, slots // 8),
    )


def rising(measured: Iterable[tuple[float, float, float]]) -> tuple[tuple[float, float], ...]:
    """Return (requests, seconds, weight) as a curve that never falls: falling neighbours become their weighted mean.

    A step of more requests takes no less time; a measured fall is noise.
    """
    pooled: list[list[float]] = []  # requests x weight, seconds x weight, weight
    for requests, seconds, weight in measured:
        pooled.append([requests * weight, seconds * weight, weight])
        while len(pooled) > 1 and pooled[-2][1] / pooled[-2][2] > pooled[-1][1] / pooled[-1][2]:
            last = pooled.pop()
            pooled[-1] = [a + b for a, b in zip(pooled[-1], last, strict=True)]
    return tuple((requests / weight, seconds / weight) for requests, seconds, weight in pooled)


def _groups(folder: str, steps: Sequence[int]) -> tuple[Group, ...]:
    """Return the groups of these steps."""
    groups: list[Group] = []
    for step in steps:
        members: dict[str, list[Row]] = defaultdict(list)
        for row in timed_rollouts(folder, step, SCALARS.names):
            members[row["group"]].append(row)
        found = (_group(rows) for rows in members.values())
        groups += [group for group in found if group.episodes]
    if not groups:
        raise UserError(f"nothing was sampled in the last steps of {folder}: there is nothing to simulate")
    return tuple(groups)


def _group(rows: Sequence[Row]) -> Group:
    lengths = [[turn["length"] for turn in _own(row)] for row in rows]
    prompt = max((found[0] for found in lengths if found), default=0)
    tokens = prompt + sum(sum(found[1:]) for found in lengths)
    return Group(tuple(episode for row in rows if (episode := _episode(row)).stages), tokens)


def _own(row: Row) -> list[Row]:
    """Return the turns sampled for this rollout, without those before its branch point."""
    turns: list[Row] = row["turns"][row["branch_turns"] or 0 :]
    return turns


def _episode(row: Row) -> JobEpisode:
    stages: list[JobTurn] = []
    wait, read = 0.0, 0
    for turn in _own(row):
        if turn["role"] != SpanKind.SAMPLED:
            wait, read = wait + turn.get("seconds", 0.0), read + turn["length"]
            continue
        # the first token of a reply comes with the pass over its prompt; behind a turn, a step decodes it
        steps = max(0, turn["length"] - (not stages))
        stages.append(JobTurn(steps, read, wait))
        wait, read = 0.0, 0
    return JobEpisode(tuple(stages), wait + row.get("seconds", 0.0))


def _draw(groups: Sequence[Group], size: int, usual: int, seed: int) -> Callable[[int], Group]:
    """Return a function n -> the n-th group of a simulated job: one of the pilot's, its members redrawn if `size`
    differs.

    The same n gives the same group in every setting, so that settings differ by nothing else.
    """

    @lru_cache(maxsize=1 << 16)
    def draw(number: int) -> Group:
        random = Random(seed_of(seed, "plan", number))
        group = random.choice(groups)
        if size == usual:
            return group
        count = max(1, round(len(group.episodes) * size / usual))
        episodes = tuple(random.choice(group.episodes) for _ in range(count))
        prompt = group.episodes[0].stages[0].read
        return Group(
            episodes,
            prompt + round((group.tokens - prompt) * _reply_count(episodes) / max(1, _reply_count(group.episodes))),
        )

    return draw


def _reply_count(episodes: Iterable[JobEpisode]) -> int:
    return sum(1 + episode.sampled for episode in episodes)
