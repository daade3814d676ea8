"""Simulates asynchronous rollouts: their gain, the cost of the longest replies, and the effect of `--tokens-per-step`.

    python benchmarks/plan/trial.py

1,024 rollouts a step of 2,000 tokens on average, with a tail (lognormal, at most 16,000), on 8 engines and one learner.
"""

from __future__ import annotations

import math
from random import Random

from posttrain.apps.planning.job import Group, Job, JobEpisode, JobTurn, Learning, PlanSetting, Speed
from posttrain.apps.planning.simulation import Simulation

PROMPTS, GROUP, MEAN, LONGEST, ENGINES = 128, 8, 2000, 16_000, 8
SETTINGS = {
    "async 1": PlanSetting(ENGINES, async_steps=1),
    "async 2": PlanSetting(ENGINES, async_steps=2),
    "async 4": PlanSetting(ENGINES, async_steps=4),
    "in flight": PlanSetting(ENGINES, async_steps=4, clock=True),
    "async 1, 2,000 a step": PlanSetting(ENGINES, async_steps=1, tokens=MEAN),
    "async 2, 2,000 a step": PlanSetting(ENGINES, async_steps=2, tokens=MEAN),
    "async 2, 1,000 a step": PlanSetting(ENGINES, async_steps=2, tokens=MEAN // 2),
}


def job(spread: float, update: float, first: float, further: float) -> Job:
    """`spread`: of the logarithm of lengths; `update`: seconds of one; a decoding step of n requests: first + further n."""
    random, mu = Random("trial"), math.log(MEAN) - spread**2 / 2
    groups = []
    for _ in range(4096):
        lengths = [min(LONGEST, 1 + int(random.lognormvariate(mu, spread))) for _ in range(GROUP)]
        groups.append(Group(tuple(JobEpisode((JobTurn(length),)) for length in lengths), sum(lengths)))
    speed = Speed(((1, first + further), (1000, first + 1000 * further)), load=2.0)
    learning = Learning(update / (PROMPTS * GROUP * MEAN))
    return Job(PROMPTS, lambda number: groups[number % len(groups)], speed, learning)


def main() -> None:
    print("| spread | update | decoding step | synchronous step |", " | ".join(SETTINGS), "|")
    print("|---" * (4 + len(SETTINGS)) + "|")
    for spread, update, first, further in (
        (0.5, 95, 0.01, 0.0001),
        (0.7, 80, 0.01, 0.0001),
        (0.7, 95, 0.01, 0.0001),
        (0.7, 110, 0.01, 0.0001),
        (0.9, 95, 0.01, 0.0001),
        (0.7, 95, 0.02, 0.00005),
        (0.7, 95, 0.005, 0.0002),
    ):
        trial = job(spread, update, first, further)
        base = Simulation(trial, PlanSetting(ENGINES), 24).run().steps_per_hour
        times = [Simulation(trial, s, 48).run().steps_per_hour / base for s in SETTINGS.values()]
        cells = " | ".join(f"{time:.2f}" for time in times)
        print(
            f"| {spread} | {update} s | {first * 1000:g} + {further * 1000:g} n ms | {3600 / base:.0f} s | {cells} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
