"""How often a 95% interval covers the truth, by simulation: every kind of figure, several sizes and rates.

    python recipes/coverage.py --into docs/results/intervals.md

The page also gives the coverage of a percentile bootstrap over tasks. It takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from pages import write_page

from posttrain.apps.audit.correlation import correlation
from posttrain.core.intervals import Interval, mean_interval, paired_interval, share_interval
from posttrain.training.verbs.agreement import measured

SIZES = (6, 10, 20, 50, 200)  # tasks, or prompts
RESAMPLES = 500
OLD = 5  # times fewer repetitions of the bootstrap


@dataclass(frozen=True)
class Case:
    """A figure whose truth is known."""

    about: str
    draw: Callable[[Generator, int], Any]
    """(generator, tasks) -> an observation."""
    truth: float
    interval: Callable[[Any], Interval]
    mean: Callable[[Any], Any] | None = field(default=None)
    """Function from an observation to the value of each task, [tasks]. None where a figure is no mean of these."""


@dataclass(frozen=True)
class Covered:
    """The outcome of the repetitions of a case."""

    share: float  # of those that have an interval
    none: float  # share of those that have none
    width: float  # median


def covered(case: Case, n: int, repetitions: int, seed: int = 0) -> Covered:
    """Draw, and count how often the interval holds the truth."""
    generator = np.random.default_rng([seed, n])
    found = [case.interval(case.draw(generator, n)) for _ in range(repetitions)]
    there = [own for own in found if not own.why]
    inside = [own.low - 1e-12 <= case.truth <= own.high + 1e-12 for own in there]
    if not there:
        return Covered(math.nan, 1.0, math.nan)
    widths = [own.high - own.low for own in there]
    return Covered(float(np.mean(inside)), 1 - len(there) / len(found), float(np.median(widths)))


def bootstrapped(case: Case, n: int, repetitions: int, seed: int = 0) -> float | None:
    """The same of the percentile bootstrap."""
    if case.mean is None:
        return None
    generator, inside = np.random.default_rng([seed, n]), 0
    for _ in range(repetitions):
        values = np.asarray(case.mean(case.draw(generator, n)), dtype=np.float64)
        means = values[generator.integers(n, size=(RESAMPLES, n))].mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        inside += bool(low - 1e-12 <= case.truth <= high + 1e-12)
    return inside / repetitions


# -- what is drawn -----------------------------------------------------------------------------------------------------


def replies(samples: int, difficulty: Callable[[Generator, int], Any]) -> Callable[[Generator, int], Any]:
    """[tasks]: the share of right replies of each."""
    return lambda g, n: g.binomial(samples, difficulty(g, n)) / samples


def pairs(won: float, lost: float) -> Callable[[Generator, int], Any]:
    """([tasks], [tasks]): right or wrong on both sides; half of the ties are right."""

    def draw(g: Generator, n: int) -> Any:
        tie = (1 - won - lost) / 2
        kind = g.choice(4, size=n, p=[won, lost, tie, tie])
        return np.isin(kind, (0, 2)).astype(float), np.isin(kind, (1, 2)).astype(float)

    return draw


def sampled_pairs(g: Generator, n: int) -> Any:
    """Difficulties of both: uniform, and 0.1 easier for the first where that is possible."""
    hard = g.random(n)
    return g.binomial(4, np.minimum(1.0, hard + 0.1)) / 4, g.binomial(4, hard) / 4


def skewed_pairs(g: Generator, n: int) -> Any:
    shared = g.standard_normal(n)
    return shared + g.lognormal(size=n), shared


def comparisons(g: Generator, n: int) -> Any:
    """([prompts], [prompts]): won of 1 to 6 comparisons of each, whose rate is its own."""
    counts = g.integers(1, 7, size=n)
    return g.binomial(counts, g.beta(3, 2, size=n)), counts


def correlated(g: Generator, n: int) -> Any:
    """Four replies a prompt, half of the spread between prompts: correlation 0.3 both within and between."""
    of_prompts, of_replies = g.standard_normal((2, n)), g.standard_normal((2, n, 4))
    x, noise = of_prompts[:, :, None] + of_replies
    return x.ravel(), (0.3 * x + math.sqrt(1 - 0.09) * noise).ravel(), np.arange(n).repeat(4)


def labelled(g: Generator, n: int) -> Any:
    """[prompts, 3, 3]: three comparisons of each by two raters who agree on 80%, and choose A in 70%: kappa 0.524."""
    table = np.zeros((n, 3, 3))
    chances = [0.6, 0.1, 0.1, 0.2]
    for place, counts in enumerate(g.multinomial(3, chances, size=n)):
        table[place, :2, :2] = counts.reshape(2, 2)
    return table


def kappa_interval(tables: Any) -> Interval:
    found = measured(tables).kappa
    why = found.why or ("one verdict alone" if math.isnan(found.mean) else "")
    return Interval(found.low, found.high, why)


def correlation_of(seen: Any) -> Interval:
    found = correlation(*seen)
    return Interval(found.low, found.high, found.why)


def same(p: float) -> Callable[[Generator, int], Any]:
    return lambda g, n: np.full(n, p)


def beta(a: float, b: float) -> Callable[[Generator, int], Any]:
    return lambda g, n: g.beta(a, b, size=n)


def mixed(impossible: float, rest: float) -> Callable[[Generator, int], Any]:
    return lambda g, n: np.where(g.random(n) < impossible, 0.0, rest)


def itself(values: Any) -> Any:
    return values


def apart(both: Any) -> Any:
    return both[0] - both[1]


def share_of(samples: int, difficulty: Callable[[Generator, int], Any], truth: float, about: str) -> Case:
    return Case(about, replies(samples, difficulty), truth, share_interval, itself)


def mean_of(draw: Callable[[Generator, int], Any], truth: float, about: str) -> Case:
    return Case(about, draw, truth, mean_interval, itself)


def paired_share(both: Any) -> Interval:
    return paired_interval(*both, share=True)


def paired(draw: Callable[[Generator, int], Any], truth: float, about: str, share: bool = True) -> Case:
    return Case(about, draw, truth, paired_share if share else lambda both: paired_interval(*both), apart)


CASES = {
    "share .5": share_of(1, same(0.5), 0.5, "one reply a task, right with .5"),
    "share .9": share_of(1, same(0.9), 0.9, "one reply a task, right with .9"),
    "share .97": share_of(1, same(0.97), 0.97, "one reply a task, right with .97"),
    "8 samples .5": share_of(8, beta(1, 1), 0.5, "eight replies a task, difficulties uniform"),
    "8 samples .9": share_of(8, beta(4.5, 0.5), 0.9, "eight replies a task, difficulties Beta(4.5, .5)"),
    "8 samples .97": share_of(8, same(0.97), 0.97, "eight replies a task, all tasks alike: .97"),
    "8 samples, some impossible": share_of(
        8, mixed(0.1, 0.98), 0.882, "a tenth of the tasks impossible, the others .98"
    ),
    "reward 0, .1, 1": mean_of(
        lambda g, n: g.choice([0.0, 0.1, 1.0], p=[0.1, 0.2, 0.7], size=n), 0.72, "rewards 0, .1, 1"
    ),
    "mean, normal": mean_of(lambda g, n: 5 + 3 * g.standard_normal(n), 5.0, "means of tasks normal, of any size"),
    "mean, lognormal": mean_of(lambda g, n: g.lognormal(size=n), math.exp(0.5), "means of tasks lognormal"),
    "pairs .05 .05": paired(pairs(0.05, 0.05), 0.0, "pairs of 0 and 1: .05 won, .05 lost"),
    "pairs .3 .1": paired(pairs(0.3, 0.1), 0.2, "pairs of 0 and 1: .3 won, .1 lost"),
    "pairs .1 0": paired(pairs(0.1, 0.0), 0.1, "pairs of 0 and 1: .1 won, none lost"),
    "pairs of 4 samples": paired(sampled_pairs, 0.095, "pairs of four replies each, .1 easier up to 1"),
    "pairs, lognormal": paired(skewed_pairs, math.exp(0.5), "pairs of rewards, differences lognormal", share=False),
    "comparisons": Case("won comparisons, 1 to 6 a prompt", comparisons, 0.6, lambda seen: share_interval(*seen)),
    "correlation": Case("correlation .3, four replies a prompt", correlated, 0.3, correlation_of),
    "kappa": Case("kappa .524, three comparisons a prompt", labelled, 0.22 / 0.42, kappa_interval),
}


def report(repetitions: int, command: str) -> list[str]:
    """The page's lines."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    spread = math.sqrt(0.95 * 0.05 / repetitions)
    lines = [
        f"    {command}",
        "",
        f"{time.strftime('%Y-%m-%d')}, commit {commit}, numpy {np.__version__}. {repetitions:,} repetitions:",
        f"the standard error of a share of .95 is {spread:.4f}. The figure after the slash is a percentile bootstrap over",
        f"tasks, {RESAMPLES} resamples, {repetitions // OLD:,} repetitions: {spread * math.sqrt(OLD):.4f}. A star: more",
        "than 1% of the draws had no interval and were left out.",
        "",
        "| what is drawn | " + " | ".join(f"{n} tasks" for n in SIZES) + " | width at 20 |",
        "|---" * (len(SIZES) + 2) + "|",
    ]
    for case in CASES.values():
        cells, width = [], ""
        for n in SIZES:
            found, old = covered(case, n, repetitions), bootstrapped(case, n, repetitions // OLD)
            width = f"{found.width:.2f}" if n == 20 else width
            beside = "" if old is None else f" / {old:.3f}"
            cells.append(f"{found.share:.3f}{'*' if found.none > 0.01 else ''}{beside}")
        lines.append(f"| {case.about} | {' | '.join(cells)} | {width} |")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repetitions", type=int, default=10_000)
    parser.add_argument("--into", type=Path, help="the page")
    options = parser.parse_args(words)
    lines = report(options.repetitions, f"python {shlex.join(sys.argv)}")
    print("\n".join(lines))
    if options.into:
        write_page(options.into, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
