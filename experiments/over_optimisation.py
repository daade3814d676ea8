"""Over-optimisation: how much of what a proxy promises is true, by how far a policy has gone from its start.

A proxy learns from a few comparisons of the start's replies, some of them wrong: it is a fair judge where it was trained,
and nobody knows what it is elsewhere. The policy climbs it, under several penalties on its KL from the start, and best-of-N
picks by it among the start's own replies. The KL of the policy is the mean log ratio of its own samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.experiment import Comparison, Estimate, Experiment, Finding, Numbers, Say, Settings, over_seeds
from experiments.figure import Panel, Series
from experiments.harness import Arena, imitate, late, learn
from experiments.proxies import (
    CHOICES,
    ENSEMBLES,
    JOIN,
    LETTERS,
    MEMBERS,
    PROMPTS,
    Gold,
    Judges,
    Scale,
    accuracy,
    choices,
    comparisons,
    correlation,
    demonstrations,
    sampled,
    scores_of,
    symbols,
    trained,
)
from posttrain.core.transcripts import Transcript
from posttrain.core.types import UserError
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.losses.likelihood import token_logp
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.record.rollout_rows import transcripts_of
from posttrain.runs.run_reading import rollout_steps
from posttrain.training.sources.packing import pack, split_microbatches

BEST = f"best of {CHOICES[-1]}"
PLAIN = "beta 0"


# -- reinforcement learning --------------------------------------------------------------------------------------------


@torch.no_grad()
def log_ratios(transcripts: Sequence[Transcript], start: str) -> list[float]:
    """log pi(reply) - log start(reply) of sampled replies, in nats: their mean is the KL of the policy from the start."""
    model = load_model(start)
    parts = [[transcript] for transcript in transcripts]
    found = [float(sum(transcript.logp)) for transcript in transcripts]
    for index in split_microbatches(parts, 2048):
        packed = pack([parts[i] for i in index], index)
        logp = token_logp(model.hidden(packed.layout, packed.at), model.head, packed.target).tolist()
        for place in index:
            own, logp = logp[: transcripts[place].n_scored], logp[transcripts[place].n_scored :]
            found[place] -= sum(own)
    return found


def course(run: Path, start: str, every: int) -> Numbers:
    """KL, proxy and gold reward of each `every` steps; gold also of each half of the rollouts, to choose by one and
    measure by the other."""
    steps = rollout_steps(run)
    found: Numbers = {"kl": [], "proxy": [], "gold": [], "halves": [], "correlation": [], "repeats": [], "outside": []}
    for first in range(0, len(steps), every):
        rows = [
            row
            for step in steps[first : first + every]
            for row in read_rollouts(run, step)
            if row["reward"] is not None
        ]
        gold, proxy = [row["parts"]["gold"] for row in rows], [row["reward"] for row in rows]
        said = [symbols(row["text"]) for row in rows]
        letters = [[symbol for symbol in reply if symbol in LETTERS] for reply in said]
        ratios = log_ratios([transcripts_of(row)[0] for row in rows], start)
        found["kl"].append(float(np.mean(ratios)))
        found["proxy"].append(float(np.mean(proxy)))
        found["gold"].append(float(np.mean(gold)))
        found["halves"].append([float(np.mean(gold[::2])), float(np.mean(gold[1::2]))])
        found["correlation"].append(correlation(proxy, gold))
        found["repeats"].append(float(np.mean([len(own) - len(set(own)) for own in letters])))
        found["outside"].append(float(np.mean([len(r) - len(own) for r, own in zip(said, letters, strict=True)])))
    return found


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    if 0 not in settings["betas"] or settings["pool"] < CHOICES[-1]:
        raise UserError(
            f"betas must hold 0, and pool must be at least {CHOICES[-1]}, the most that best-of-N chooses from"
        )
    gold = Gold.drawn(seed)
    start = imitate(demonstrations(settings, seed), folder, seed, context=32, epochs=settings["imitation_epochs"])
    own = 2 * -(-settings["pairs"] // len(PROMPTS))  # replies to each prompt
    rows = comparisons(sampled(start, gold, own, seed, settings), settings["noise"], seed)
    folders = {
        name: trained(rows, start, folder / f"proxy-{name}", seed + 1000 * place, settings)
        for place, name in enumerate(MEMBERS)
    }
    pool = sampled(start, gold, settings["pool"], seed + 1, settings)
    truth = [[value for _, value in replies] for replies in pool]
    raw = {name: scores_of(path, pool) for name, path in folders.items()}
    judges = Judges(
        gold, Scale.of(np.concatenate(truth)), folders, {name: Scale.of(np.concatenate(raw[name])) for name in raw}
    )
    scaled = [[judges.of_gold(value) for value in values] for values in truth]
    found: Numbers = {"pairs": len(rows), "accuracy": accuracy(raw["one"], truth), "best of N": {}, "rl": {}}
    for join, how in JOIN.items():
        joined = [
            [
                how({name: judges.of_proxies[name](raw[name][prompt][place]) for name in MEMBERS})
                for place in range(len(own))
            ]
            for prompt, own in enumerate(pool)
        ]
        found["best of N"][join] = {
            **choices(joined, scaled), "correlation": correlation(np.concatenate(joined), np.concatenate(scaled)),
        }  # fmt: skip
    for arm, (join, beta) in arms(settings).items():
        found["rl"][arm] = climb(seed, settings, folder, start, judges, join, beta)
        own = found["rl"][arm]
        say(f"  seed {seed}, {arm}: KL {own['kl'][-1]:.1f}, proxy {own['proxy'][-1]:.2f}, gold {own['gold'][-1]:.2f}"
            f" (highest {max(own['gold']):.2f})")  # fmt: skip
    return found


def arms(settings: Settings) -> dict[str, tuple[str, float]]:
    """Name -> how proxies are joined, and the coefficient of the KL."""
    found = {f"beta {beta:g}": ("single", float(beta)) for beta in settings["betas"]}
    return found | {join: (join, 0.0) for join in JOIN if join != "single"}


def climb(seed: int, settings: Settings, folder: Path, start: str, judges: Judges, join: str, beta: float) -> Numbers:
    """One run of reinforcement learning against the proxy: its course."""
    out = folder / f"{join} {beta:g}".replace(" ", "-")
    chosen = {name: settings[name] for name in ("steps", "prompts", "group", "lr", "max_tokens")}
    asked = tuple(f"{name}={judges.folders[name]}" for name in JOIN[join].members)
    learn(
        Arena(PROMPTS, judges.environment(join), start), out, seed, algorithm="rloo", kl=beta, betas=(0.9, 0.95),
        warmup=10, reward_model=asked, success=None, **chosen,
    )  # fmt: skip
    return course(out, start, settings["every"])


# -- reading courses ---------------------------------------------------------------------------------------------------


def stopped(course: Numbers) -> dict[str, float]:
    """KL, proxy and gold reward where gold is highest: chosen by one half of the rollouts, gold measured by the other.

    The highest of several noisy means is too high by its noise. Both halves take turns, and the two are averaged.
    """
    halves = np.array(course["halves"])  # [points, 2]
    places = [int(np.argmax(halves[:, choosing])) for choosing in (0, 1)]
    gold = [halves[place, 1 - choosing] for choosing, place in enumerate(places)]
    return {
        "gold": float(np.mean(gold)),
        **{n: float(np.mean([course[n][p] for p in places])) for n in ("kl", "proxy")},
    }


def at(course: Numbers, what: str, kl: float | Sequence[float], first: float) -> Any:
    """Proxy or gold reward at this KL, between the two points that were measured around it; `first`: the start's."""
    far = np.maximum.accumulate([0.0, *course["kl"]])
    return np.interp(kl, far, [first, *course[what]])


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    names = list(arms(settings))
    seeds = list(numbers.values())
    rows = [_row(arm, [n["rl"][arm] for n in seeds]) for arm in names]
    for join in JOIN:
        best = [n["best of N"][join] for n in seeds]
        found = [str(over_seeds([b[what][-1] for b in best])) for what in ("kl", "proxy", "gold")]
        each = ", ".join(f"{b['gold'][-1]:.2f}" for b in best)
        alike = str(over_seeds([b["correlation"] for b in best]))
        rows.append([f"{BEST}, {join}", *found, "-", "-", alike, "-", "-", each])
    fit = over_seeds([n["accuracy"] for n in seeds])
    pairs = " ".join(str(n["pairs"]) for n in seeds)
    return Finding(
        ("arm", "KL at the end", "proxy at the end", "gold at the end", "gold if stopped early", "KL there",
         "correlation of proxy and gold at the end", "letters repeated at the end", "non-letters at the end",
         "gold, early and at the end, each seed"),
        rows,
        _comparisons(seeds, settings),
        _panels(seeds, names, settings["every"]),
        [f"Rewards in standard deviations of the start's replies; the end is the last fifth of the run. On the start's "
         f"replies the single proxy prefers the better of two in {fit} of the pairs; training comparisons of each "
         f"seed: {pairs}. For best-of-N the correlation is that over the start's replies.",
         f"A KL of {seeds[0]['best of N']['single']['kl'][-1]:.2f} nats is that of {BEST}: there, gold of it minus gold of "
         f"{PLAIN} is among the claims; proxy of it minus proxy of {PLAIN} is {_of_best(seeds, 'proxy')}. At the end of "
         f"each run with a penalty, gold minus that of {PLAIN} at the same KL: {_beside(seeds, settings)}."],
    )  # fmt: skip


def _row(arm: str, courses: Sequence[Numbers]) -> list[str]:
    def end(name: str) -> str:
        return str(over_seeds([late(course[name]) for course in courses]))

    early = [stopped(course) for course in courses]
    there = [str(over_seeds([e[name] for e in early])) for name in ("gold", "kl")]
    each = ", ".join(f"{e['gold']:.2f} {late(c['gold']):.2f}" for e, c in zip(early, courses, strict=True))
    return [arm, end("kl"), end("proxy"), end("gold"), *there, end("correlation"), end("repeats"), end("outside"), each]


def _comparisons(seeds: Sequence[Numbers], settings: Settings) -> list[Comparison]:
    def end(arm: str, what: str) -> np.ndarray:
        return np.array([late(n["rl"][arm][what]) for n in seeds])

    def peak(arm: str, what: str) -> np.ndarray:
        return np.array([stopped(n["rl"][arm])[what] for n in seeds])

    def fall(arm: str) -> np.ndarray:
        return peak(arm, "gold") - end(arm, "gold")

    def above(what: str, values: np.ndarray) -> Comparison:
        return Comparison(what, over_seeds(values.tolist()), at_least=0.0)

    def alone(of: Callable[[str], np.ndarray]) -> np.ndarray:
        """Of the members of the ensembles, each by itself: which of them is called the first is chance."""
        return (of(PLAIN) + of("second")) / 2

    penalised = [f"beta {beta:g}" for beta in sorted(settings["betas"])]
    return [
        above(f"{PLAIN}: gold at its peak", peak(PLAIN, "gold")),
        above(f"{PLAIN}: fall of gold from its peak to the end", fall(PLAIN)),
        above(f"{PLAIN}: proxy at the end minus where gold peaks", end(PLAIN, "proxy") - peak(PLAIN, "proxy")),
        *(above(f"fall of gold, {one} minus {other}", fall(one) - fall(other)) for one, other in pairwise(penalised)),
        *(above(f"gold at the end, {arm} minus {PLAIN}", end(arm, "gold") - end(PLAIN, "gold")) for arm in penalised[1:]),
        *(above(f"fall of gold, one proxy minus {join}", alone(fall) - fall(join)) for join in ENSEMBLES),
        *(above(f"KL where gold peaks, {join} minus one proxy", peak(join, "kl") - alone(lambda arm: peak(arm, "kl")))
          for join in ENSEMBLES),
        *(above(f"gold at the end, {join} minus one proxy", end(join, "gold") - alone(lambda arm: end(arm, "gold")))
          for join in ENSEMBLES),
        Comparison(f"gold at the KL of {BEST}, {BEST} minus {PLAIN}", _of_best(seeds, "gold"), at_least=0.0),
    ]  # fmt: skip


def _of_best(seeds: Sequence[Numbers], what: str) -> Estimate:
    """Gold reward of the most choices minus that of the unpenalised run at the same KL."""
    differences = []
    for n in seeds:
        best = n["best of N"]["single"]
        differences.append(best[what][-1] - float(at(n["rl"][PLAIN], what, best["kl"][-1], best[what][0])))
    return over_seeds(differences)


def _beside(seeds: Sequence[Numbers], settings: Settings) -> str:
    """Whether a penalty does more than to stop early."""
    said = []
    for arm, (join, beta) in arms(settings).items():
        if join == "single" and beta:
            ends = [(n["rl"][PLAIN], late(n["rl"][arm]["kl"]), late(n["rl"][arm]["gold"])) for n in seeds]
            said.append(f"{arm} {over_seeds([gold - float(at(c, 'gold', kl, 0.0)) for c, kl, gold in ends])}")
    return ", ".join(said)


def _panels(seeds: Sequence[Numbers], names: Sequence[str], every: int) -> list[Panel]:
    def line(arm: str, what: str) -> Series:
        """Means over the seeds, up to the KL that all of them reach."""
        join = arm if arm in JOIN else "single"
        grid = np.linspace(0.0, min(max(n["rl"][arm]["kl"]) for n in seeds), 40)
        curves = [at(n["rl"][arm], what, grid.tolist(), n["best of N"][join][what][0]) for n in seeds]
        return Series(arm, grid.tolist(), np.mean(curves, axis=0).tolist())

    def by_step(arm: str, what: str) -> Series:
        curves = np.array([n["rl"][arm][what] for n in seeds])
        return Series(arm, (every * np.arange(1, curves.shape[1] + 1)).tolist(), np.mean(curves, axis=0).tolist())

    best = [n["best of N"]["single"] for n in seeds]
    shown = [arm for arm in names if arm != "second"]  # which is like the first one, by another seed
    named = {"gold": "Gold reward", "proxy": "Proxy reward"}
    against_kl = [
        Panel(f"{title}, as far as all seeds go", "KL from the start, nats",
              [*(line(arm, what) for arm in shown),
               Series("best of N", best[0]["kl"], np.mean([own[what] for own in best], axis=0).tolist())])
        for what, title in named.items()
    ]  # fmt: skip
    against_steps = [Panel(title, "step", [by_step(arm, what) for arm in shown]) for what, title in named.items()]
    return [*against_kl, *against_steps]


EXPERIMENT = Experiment(
    "over-optimisation",
    "Where a policy climbs a proxy that was learned from the start's replies, gold rises and then falls while the proxy "
    "goes on rising, the further the smaller the penalty on the KL; ensembles of proxies fall later and less; and "
    "best-of-N has more gold at equal KL.",
    "Gao et al., arXiv 2210.10760; ensembles: Coste et al., arXiv 2310.02743; Eisenstein et al., arXiv 2312.09244",
    {"demonstrations": 2000, "repeats": 0.05, "imitation_epochs": 4.0, "pairs": 1600, "noise": 0.25, "proxy_epochs": 2.0,
     "proxy_lr": 1e-3, "pool": 128, "betas": [0.0, 0.1, 0.4], "steps": 120, "prompts": 16, "group": 8, "lr": 1e-3,
     "max_tokens": 16, "every": 4},
    measure,
    conclude,
)  # fmt: skip
