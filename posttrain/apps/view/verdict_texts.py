"""Answers to the overview's four questions: for each a word, a sentence, and the evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from posttrain.apps.view.reward_and_length import MORE, REWARD, Length
from posttrain.apps.view.silent_defects import FOREIGN
from posttrain.runs.health_checks import fallen
from posttrain.runs.metrics_table import QUESTIONS

Values = list[float | None]
Verdict = dict[str, str]

GAIN = 0.02  # least gain that counts as learning: of a reward between 0 and 1, or as a share of a loss
SOLVED = 0.98  # success rate from which on little is left to learn
NOISE = 2.0  # standard errors within which a change counts as noise
GAP = 0.1  # most that the training reward may exceed the held-out reward
LONGER = 1.5  # factor by which length may change from the start
COLLAPSED, ALONE = 0.33, 0.1  # share of the entropy at the start; see posttrain.runs.metric_history.HealthLimits
ROUNDING = 1e-3  # range of ratios below which they have not moved
FAR_APART = 0.1  # nats per token between engine and learner; rounding in half precision leaves about 0.01
FALLEN = 0.5  # share of the start's value: a fault that the run is unlearning is no sign of a loophole
SIDES = "held-out figure of sides"
RARE = 0.01  # share of clipped tokens below which a few extreme ratios do not matter
AROUND = 10  # steps before and after, whose gradient norms a step's norm is compared with
FAR = 3.0  # ratio from which on a user should look


def verdicts(m: Mapping[str, Values], own: Mapping[str, Any]) -> dict[str, Verdict]:
    """Return question -> verdict, in the order of the questions."""
    learning, honest = _learning(_without_sides(m, own)), _honest(m, own)
    if learning["word"] == "yes" and honest["tone"] == "warn":
        told = f"{learning['text']}; see “{QUESTIONS[1]}” before you believe it"
        learning = _verdict("yes, but", "warn", told)
    answers = (learning, honest, _exploring(_without_sides(m, own)), _stable(m, own))
    return dict(zip(QUESTIONS, answers, strict=True))


def _without_sides(m: Mapping[str, Values], own: Mapping[str, Any]) -> Mapping[str, Values]:
    """Return the metrics; in self-play with sides, without training rewards: one side wins what another loses."""
    sides = [
        name for name in m if name.startswith("reward/") and name.removeprefix("reward/") not in own.get("parts", ())
    ]
    held = next((name for name in ("eval/accuracy", "eval/reward") if name in m), None)
    if not own or len(sides) < 2 or held is None:
        return m
    left = {name: values for name, values in m.items() if name not in ("reward", "accuracy", held)}
    return {**left, SIDES: m[held]}


def _learning(m: Mapping[str, Values]) -> Verdict:
    for name, word, better in ((SIDES, "", 1), ("divergence", "divergence", -1), ("reward", "reward", 1),
                               ("accuracy", "accuracy", 1), ("margin", "margin", 1), ("nll", "loss", -1),
                               ("loss", "loss", -1)):  # fmt: skip
        ends = _ends(m.get(name))
        if ends is None:
            continue
        before, now = ends
        text = f"{word} {_f(before)} → {_f(now)}"
        held = next((n for n in ("eval/accuracy", "eval/reward", "eval/loss", "eval/divergence") if n in m), None)
        if name == SIDES:
            held, text = name, "sides that play each other, whose own reward shows little"
        gained = (now - before) * better
        scale = max(abs(before), abs(now), 1e-9) if better < 0 or max(abs(before), abs(now)) > 2 else 1.0
        if held is not None:
            values = [v for v in m[held] if v is not None]
            text += f"; held-out {_f(values[0])} → {_f(values[-1])}" if values else ""
            if _unmoved(values, m):
                text += (
                    f": exactly the same at all {len(values)} evaluations, though gradients are not 0; "
                    "does the engine receive new weights?"
                )
                return _verdict("look", "warn", text)
        else:
            text += "; nothing is held out"
        if held == "eval/accuracy" and (fall := fallen(values, min(_all(m.get("eval/tasks")), default=0))):
            return _verdict("getting worse", "bad", f"{text}: held-out accuracy {fall}")
        accuracy = _ends(m.get("accuracy"))
        if accuracy is not None and min(accuracy) > SOLVED:
            return _verdict(
                "solved", "good", f"{text}; {min(accuracy):.1%} of the replies were right from the start on"
            )
        shift = values[-1] - values[0] if held in ("eval/accuracy", "eval/reward") and values else 0.0
        alike = math.copysign(shift, shift * gained) > 2 * GAIN  # held-out rewards have moved in the same direction
        if GAIN * scale < abs(gained) < NOISE * _error(_all(m[name])) and not alike:
            return _verdict("not yet", "warn", f"{text}; single steps vary as much by chance")
        if gained > GAIN * scale:
            return _verdict("yes", "good", text)
        if gained < 0 and shift > GAIN * scale:
            return _verdict("unclear", "warn", text)
        return _verdict("going back" if gained < -GAIN * scale else "not yet", "bad" if gained < 0 else "warn", text)
    return _verdict("too early", "plain", "no steps yet")


def _unmoved(held: Sequence[float], m: Mapping[str, Values]) -> bool:
    """Return whether a held-out figure never moves although weights do.

    All wrong and all right are no sign of a defect.
    """
    norms = _all(m.get("grad_norm"))
    return len(held) > 2 and len(set(held)) == 1 and held[0] not in (0.0, 1.0) and bool(norms) and _median(norms) > 0


def _honest(m: Mapping[str, Values], own: Mapping[str, Any]) -> Verdict:
    doubts, said = list[str](), list[str]()
    length, reward = _ends(m.get("length")), _ends(m.get("reward"))
    held = _ends(m.get("eval/reward", m.get("eval/accuracy")))
    if length is not None and length[1] > LONGER * length[0]:
        doubts.append(f"replies are {length[1] / max(length[0], 1e-9):.1f} times as long as at the start")
    elif length is not None and length[1] * LONGER < length[0]:
        said.append(f"replies are {length[1] / length[0]:.0%} as long as at the start")
    if held is not None and reward is not None and (gap := reward[1] - held[1]) > GAP:
        grown = gap > reward[0] - held[0]
        text = f"the reward is {_f(gap)} above the held-out one"
        (doubts if grown else said).append(text if grown else f"{text}, {_f(reward[0] - held[0])} at the start")
    for name, word in (("truncated", "are cut off"), ("invalid", "have no valid reward")):
        ends = _ends(m.get(name))
        if ends is None or ends[1] <= 0.05:
            continue
        if ends[1] > FALLEN * ends[0]:
            doubts.append(f"{ends[1]:.0%} of the replies {word}")
        else:
            said.append(f"{ends[1]:.0%} of the replies {word}, {ends[0]:.0%} at the start")
    if own.get("leaks") is not None:
        doubts.append(f"{own['leaks']:.0%} of the prompts contain the answer of their task, and the others do not")
    paid, aside = _paid(own.get("lengths") or ())
    doubts += paid
    said += aside
    rising = _part_alone(own.get("parts") or {}) if any(_all(m.get("grad_norm")) or [1.0]) else None  # else by chance
    if rising:
        doubts.append(rising)
    if doubts:
        return _verdict("look", "warn", "; ".join(doubts) + ": read the best replies, and their prompts")
    rewards = _all(m.get("reward"))
    if rewards and not any(rewards):
        return _verdict("nothing earned", "plain", "; ".join(["no reply has earned anything so far", *said]))
    if not any(name in m for name in ("length", "reward")):
        return _verdict("nothing to game", "plain", "no reward is maximised here")
    if own.get("judged"):
        text = "; ".join(["a model gives the reward or a part of it, held-out too", *said])
        return _verdict("judged by a model", "plain", f"{text}: read the best replies, and check some by other means")
    said.append("one part, one check" if len(own.get("parts") or {}) < 2 else "no part rises while another falls")
    said.append("held-out follows" if held is not None else "nothing is held out to compare with")
    return _verdict(
        "no sign of a loophole", "good", "; ".join(said) + "; a loophole would show as a leap, or in the length"
    )


def _paid(lengths: Sequence[Length]) -> tuple[list[str], list[str]]:
    """Return doubts about rewards that correlate with the length of the reply, and remarks on them."""
    doubts, said = [], []
    for one in lengths:
        name = "the reward" if one.name == REWARD else f"“{one.name}”"
        how = f"{name} {'rises' if one.correlation > 0 else 'falls'} with the length of the reply"
        within = f"correlation {_f(one.correlation)} within groups"
        if one.paid is not None and one.paid >= MORE:
            doubts.append(f"{how} ({within}), and longer wrong replies earn more of it than right ones")
        elif one.scored:
            doubts.append(f"{how} ({within}): does the model that gives it like length?")
        else:
            said.append(f"{how} ({within}), as it may where length follows from being right")
    return doubts, said[:2]


def _part_alone(parts: Mapping[str, Values]) -> str | None:
    """Return a sentence about a part that rises while another falls; None if there is none."""
    moves = {name: (e[1] - e[0]) for name, values in parts.items() if (e := _ends(values)) is not None}
    up = max(moves, key=lambda n: moves[n], default=None)
    down = min(moves, key=lambda n: moves[n], default=None)
    if up is None or down is None or not (moves[up] > 0.05 and moves[down] < -0.05):
        return None
    return f"“{up}” rises ({moves[up]:+.2g}) while “{down}” falls ({moves[down]:+.2g})"


def _exploring(m: Mapping[str, Values]) -> Verdict:
    entropy, accuracy = _ends(m.get("entropy")), _ends(m.get("accuracy"))
    if entropy is None:
        return _verdict("not asked", "plain", "nothing is sampled, or no entropy was recorded")
    share = entropy[1] / max(entropy[0], 1e-9)
    text, limit = f"entropy at {share:.0%} of its start", ALONE
    if accuracy is not None and accuracy[0] < 1 and max(accuracy) > 0.05:
        left = min(1.0, (1 - accuracy[1]) / (1 - accuracy[0]))
        text += f"; {left:.1%} as many wrong replies as at the start"
        limit = COLLAPSED * left
    return _verdict("yes", "good", text) if share > limit else _verdict("collapsed", "bad", text)


def _stable(m: Mapping[str, Values], own: Mapping[str, Any]) -> Verdict:
    doubts, said = [], []
    if gap := _gap(m):
        doubts.append(gap)
    foreign = {kind: count for kind, count in (own.get("origins") or {}).items() if kind in FOREIGN and count}
    if foreign:
        told = " and ".join(f"{count:,} tokens of the {kind}" for kind, count in foreign.items())
        doubts.append(f"{told} were trained on, which the policy did not write: look at the mask")
    if own.get("pushed"):
        doubts.append(f"{own['pushed']:,} tokens were pushed though clipped, in the steps looked at")
    high, low = _all(m.get("ratio/max")), _all(m.get("ratio/min"))
    if high and low:
        still = max(high) - min(low) < ROUNDING
        said.append("ratios stay at 1" if still else f"ratios within [{_f(min(low))}, {_f(max(high))}]")
        if max(high) > FAR or min(low) < 1 / FAR:
            clipped = [_all(m.get(f"ratio/clipped_{side}")) for side in ("low", "high")]
            cut = sum(fmean(values) for values in clipped if values) if any(clipped) else None
            text = said.pop() + ("" if cut is None else f", {cut:.2%} of the tokens clipped")
            (said if cut is not None and cut < RARE else doubts).append(text)
    norms = _all(m.get("grad_norm"))
    if norms and not any(norms):
        return _verdict("nothing moved", "warn", "; ".join([*doubts, "every gradient is 0: no weight has changed"]))
    if leaps := _leaps(norms):
        where = (
            f"of {_f(leaps[0])} in one step" if len(leaps) == 1 else f"of up to {_f(max(leaps))} in {len(leaps)} steps"
        )
        doubts.append(f"a gradient norm {where}, beside {_f(_rule(norms))} as a rule")
    stale = _all(m.get("staleness/max")) or _all(m.get("staleness"))
    if stale and max(stale) > 0:
        most = _all(m.get("sampler/gap/max"))
        gap = f", up to {_f(max(most))} nats per token apart" if most else ""
        ess = _all(m.get("sampler/ess"))
        share = f", effective share of the sample {_f(min(ess))} at least" if ess else ""
        said.append(f"replies up to {max(stale):.0f} updates old{gap}{share}")
    kl = _ends(m.get("kl"))
    if kl is not None:
        said.append(f"KL from the reference {_f(kl[1])}")
    skipped = _all(m.get("skipped"))
    if skipped and max(skipped) > 0:
        doubts.append(f"updates were skipped in {sum(value > 0 for value in skipped)} steps")
    if not (doubts or said or norms):
        return _verdict("too early", "plain", "no updates yet")
    if doubts:
        return _verdict("look", "warn", "; ".join([*doubts, *said]))
    return _verdict("yes", "good", "; ".join(said) or "gradient norms keep their size")


def _gap(m: Mapping[str, Values]) -> str | None:
    """Return how engine and learner differ where they should not, with the likely cause; None if they agree."""
    mean, most = _fresh(m, "sampler/gap"), _fresh(m, "sampler/gap/max")
    if not mean or max(mean) <= FAR_APART:
        return None
    said = f"engine and learner differ by {_f(max(mean))} nats per token"
    said += f" and up to {_f(max(most))}" if most else ""
    ess = _fresh(m, "sampler/ess")
    said += f" (effective share of the sample {_f(min(ess))})" if ess else ""
    if mean[0] > FAR_APART:
        return f"{said}, already before the first update: the mask, the tokens or the template differ"
    return f"{said}, from {_f(mean[0])} at the start: the engine samples with other weights than it claims"


def _fresh(m: Mapping[str, Values], name: str) -> list[float]:
    """Return a metric at the steps whose replies the learner's own weights sampled: elsewhere a gap is expected."""
    values = m.get(name) or []
    ages = m.get("staleness") or [None] * len(values)
    return [v for v, age in zip(values, ages, strict=False) if v is not None and not age]


def _verdict(word: str, tone: str, text: str) -> Verdict:
    return {"word": word, "tone": tone, "text": text}


def _all(values: Values | None) -> list[float]:
    return [value for value in values or () if value is not None]


def _ends(values: Values | None) -> tuple[float, float] | None:
    """Return the means of the first and the last twentieth, at least three values each; None for fewer than two
    values.
    """
    found = _all(values)
    if len(found) < 2:
        return None
    count = _window(found)
    return fmean(found[:count]), fmean(found[-count:])


def _window(values: Sequence[float]) -> int:
    return min(max(3, len(values) // 20), len(values) // 2 or 1)


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the difference of both ends, from second differences of the values."""
    if len(values) < 3:
        return 0.0
    variance = fmean((a - 2 * b + c) ** 2 for a, b, c in zip(values, values[1:], values[2:], strict=False)) / 6
    return math.sqrt(2 * variance / _window(values))


def _leaps(norms: Sequence[float]) -> list[float]:
    """Return outliers from the run and from the steps around them: the first of falling norms is none."""
    rule = _rule(norms)
    high = [at for at, norm in enumerate(norms) if norm > 10 * rule]
    return [norms[at] for at in high if norms[at] > 10 * _median(norms[max(0, at - AROUND) : at + AROUND + 1])]


def _rule(norms: Sequence[float]) -> float:
    """Return the median of the norms that are not 0: steps without any signal do not count."""
    moved = [norm for norm in norms if norm > 0]
    return _median(moved) if moved else 0.0


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _f(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")
