"""From rollouts to the scoreboard: metrics of rollouts, selection of usable ones, and their scores.

S    rollouts of an optimizer batch
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.core.batch import Scores, Stats, TurnStart
from posttrain.core.component import Need
from posttrain.core.rollouts import Fate, Rollout
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Invalid, InvalidKind, UserError, succeeds
from posttrain.training.sources.diversity import GROUPS, MEMBERS, diversity

EXAMPLE = '{"correct": 1.0, "format": 0.5}'
MAX_INVALID = 0.5  # share of a step's rollouts beyond which the reward function is broken, not some replies


def describe(rollouts: Sequence[Rollout], success: float | None, rewarded: bool = True) -> Stats:
    """Return the metrics of all rollouts of a step, unusable ones included.

    `success`: the reward from which on a reply is accurate; None: no success threshold exists, so there is no accuracy.
    `rewarded`: whether anything scores replies; if not, there are no metrics of rewards.
    """
    stats = Stats()
    # In self-play one side wins what the other loses, so an accuracy over all sides is meaningless.
    sides = len({r.side for r in rollouts}) > 1
    kinds = Counter(r.reward.kind for r in rollouts if isinstance(r.reward, Invalid))
    for kind in {InvalidKind.TIMEOUT, *kinds}:  # timeouts always: a policy may learn replies that are slow to check
        stats.add(f"invalid/{kind}", kinds[kind], len(rollouts))
    stats.add("invalid", sum(kinds.values()), len(rollouts))
    stats.add("truncated", sum(r.stop.truncated for r in rollouts), len(rollouts))
    stats.add("length", sum(r.n_sampled for r in rollouts), len(rollouts))
    # E[-log p] is the entropy of what sampled: an unbiased estimate, at the temperature of each turn, epsilon included.
    stats.add("entropy", sum(-_own_logp(r) for r in rollouts), sum(r.n_own for r in rollouts))
    for name, values in _rewards(rollouts, success, sides).items() if rewarded else ():
        stats.add_each(name, values)
    if any(r.pieces for r in rollouts):
        branches = [r for r in rollouts if r.branch]
        stats.add("branches", len(branches), len({r.group for r in rollouts}))
        stats.add("branches/shared", sum(r.n_sampled - r.n_own for r in branches), sum(r.n_sampled for r in rollouts))
    stats.merge(diversity(_replies(rollouts)))
    return stats


def _rewards(rollouts: Sequence[Rollout], success: float | None, sides: bool) -> dict[str, list[float]]:
    """Return metric -> its values, one for each rollout that has it, in order.

    `sides`: each has an accuracy of its own.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if isinstance(rollout.reward, Invalid):
            continue
        found["reward"].append(rollout.reward)
        if rollout.side:
            found[f"reward/{rollout.side}"].append(rollout.reward)
        if success is not None:
            name = f"accuracy/{rollout.side}" if sides else "accuracy"
            found[name].append(succeeds(rollout.outcome, success))
        for name, value in rollout.rewards.items():
            found[f"reward/{name}"].append(value)
    return found


def _own_logp(rollout: Rollout) -> float:
    """Return the sum of log-probabilities of a rollout's own tokens; a branch's shared tokens count in the other
    rollout.
    """
    if rollout.branch is None:
        return sum([sum(t.logp) for t in rollout.transcripts])
    taken = dict(enumerate(rollout.branch.taken))
    return sum(sum(t.logp[taken.get(place, 0) :]) for place, t in enumerate(rollout.transcripts))


def _replies(rollouts: Sequence[Rollout]) -> list[list[list[int]]]:
    """Return the scored tokens of the first groups, for `diversity`."""
    groups: dict[tuple[str, str], list[list[int]]] = {}
    for rollout in rollouts:
        if rollout.group_and_side not in groups and len(groups) == GROUPS:
            break  # rollouts of a group are consecutive
        members = groups.setdefault(rollout.group_and_side, [])
        if len(members) < MEMBERS:
            members.append([t.tokens[i] for t in rollout.transcripts for i in t.scored.tolist()])
    return [members for members in groups.values() if len(members) > 1]


def refuse_broken(rollouts: Sequence[Rollout]) -> None:
    """Raise UserError if most rewards of a step are invalid, among all its rollouts, replaced groups included.

    Likewise if most of its branches are invalid because their environments took another course.
    """
    branches = [r.reward for r in rollouts if r.branch]
    parted = [r.reason for r in branches if isinstance(r, Invalid) and r.kind is InvalidKind.DIVERGED]
    if len(parted) > MAX_INVALID * len(branches):
        raise UserError(f"{len(parted)} of {len(branches)} branches of this step are invalid; the first: {parted[0]}")
    bad = [r.reward.reason for r in rollouts if isinstance(r.reward, Invalid)]
    if len(bad) > MAX_INVALID * len(rollouts):
        raise UserError(f"{len(bad)} of {len(rollouts)} rewards of this step are invalid; the first: {bad[0]}")


def refuse_greedy(rollouts: Sequence[Rollout]) -> None:
    """Raise UserError if a turn that is trained was sampled at temperature 0: the sampled distribution has all of its mass
    on one token, so there is no ratio to it.
    """
    heats = ((r, s) for r in rollouts if not r.greedy for t in r.transcripts for s in t.spans if s.learned)
    if found := next((rollout for rollout, span in heats if span.temperature == 0), None):
        raise UserError(
            f"task {found.task.get('id')!r}: a turn that is trained was sampled at temperature 0, where no ratio exists: "
            "give it a temperature above 0, or Turn(..., learn=False)"
        )


class Dropped(NamedTuple):
    """A rollout that a step does not learn from."""

    rollout: Rollout
    fate: Fate
    why: str


def usable(rollouts: Sequence[Rollout], stats: Stats) -> tuple[list[Rollout], list[Dropped]]:
    """Return the usable rollouts (valid, with a scored token, in a group with enough of them), and the others.

    A group keeps its valid members if these are at least half of it, and at least two; a group of one needs its one.
    Each side counts separately: a side that occurs in only one game of a group has nothing to be compared with.
    """
    groups: dict[tuple[str, str], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_and_side].append(rollout)
    games: dict[str, int] = {}  # group -> number of its games
    for (group, _), members in groups.items():
        games[group] = max(games.get(group, 0), len(members))
    kept: list[Rollout] = []
    dropped: list[Dropped] = []
    for (group, _), members in groups.items():
        valid = []
        for rollout in members:
            if isinstance(rollout.reward, Invalid):
                dropped.append(Dropped(rollout, Fate.INVALID, rollout.reward.reason))
            elif not rollout.n_scored:
                dropped.append(Dropped(rollout, Fate.INVALID, "it has no trainable token"))
            else:
                valid.append(rollout)
        if len(valid) >= max(min(2, games[group]), len(members) / 2):
            kept.extend(valid)
        else:
            why = f"{len(valid)} of the {len(members)} rollouts of its group are usable"
            dropped += [Dropped(rollout, Fate.SMALL, why) for rollout in valid]
    stats.add("dropped", len(rollouts) - len(kept), len(rollouts))
    return kept, dropped


def scoreboard(
    rollouts: Sequence[Rollout],
    penalty: Sequence[Tensor] = (),
    value: Sequence[Tensor] = (),
    success: float | None = None,
    needs: frozenset[Need] = frozenset(),
) -> Scores:
    """Return the scoreboard of these rollouts, whose rewards are valid, on the CPU.

    Rewards from `success` on are successes. `needs`: those of the algorithm, for named parts of rewards and for turns.
    Raises UserError if the parts are not the same in all rollouts.
    """
    number: dict[tuple[str, str], int] = {}
    valid = [r.reward for r in rollouts if not isinstance(r.reward, Invalid)]
    assert len(valid) == len(rollouts), "an invalid reward has no score"
    reward = torch.tensor(valid, dtype=torch.float64)
    baselines = [r.baseline for r in rollouts]
    return Scores(
        reward=reward,
        group=torch.tensor([number.setdefault(r.group_and_side, len(number)) for r in rollouts], dtype=torch.int64),
        length=torch.tensor([r.n_scored for r in rollouts], dtype=torch.float32),
        steps=tuple(tuple(r.steps) for r in rollouts),
        pieces=tuple(tuple(r.pieces) for r in rollouts),
        penalty=tuple(penalty),
        value=tuple(value),
        sampled=torch.tensor([r.n_sampled for r in rollouts], dtype=torch.float32),
        truncated=torch.tensor([r.stop.truncated for r in rollouts], dtype=torch.bool),
        greedy=None if None in baselines or not baselines else torch.tensor(baselines, dtype=torch.float64),
        success=None if success is None else succeeds(torch.tensor([r.outcome for r in rollouts]).double(), success),
        parts=named_parts(rollouts) if Need.PARTS in needs else {},
        turns=tuple(turns(r.transcripts) for r in rollouts) if Need.TURNS in needs else (),
    )


def turns(transcripts: Sequence[Transcript]) -> tuple[TurnStart, ...]:
    """Return the turns of a rollout that have a scored token. Consecutive sampled spans are one turn."""
    found: list[TurnStart] = []
    scored = 0
    for transcript in transcripts:
        observed, was_own = 0, False  # position after the previous turn
        for span in transcript.spans:
            own = span.kind in (SpanKind.SAMPLED, SpanKind.IMITATED)
            if own and not was_own:
                before, context = scored, transcript.tokens[: span.start]
                begun: TurnStart | None = TurnStart(before, hash(tuple(context[observed:])), hash(tuple(context)))
            if own and span.learned and begun is not None:
                found.append(begun)
                begun = None
            scored += span.length if span.learned else 0
            observed, was_own = span.start + span.length if own else observed, own
    return tuple(found)


def named_parts(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Return the named parts of these rollouts' rewards: name -> float64 [S], in alphabetical order.

    Raises UserError if a reward has no parts, if two rewards have different parts, and for step rewards, which have no
    name.
    """
    if not rollouts:
        return {}
    names = sorted(rollouts[0].rewards)
    for rollout in rollouts:
        told = f"task {rollout.task.get('id')!r}"
        if not rollout.rewards:
            raise UserError(f"the reward of {told} has no named parts to compare: return a dict, such as {EXAMPLE}")
        if sorted(rollout.rewards) != names:
            raise UserError(
                f"the reward of {told} has the parts {', '.join(sorted(rollout.rewards))}, that of task "
                f"{rollouts[0].task.get('id')!r} {', '.join(names)}: return the same parts for every task, 0.0 where a part "
                "does not apply"
            )
        if rollout.steps:
            raise UserError(f"{told} returns step rewards instead of named parts: return them as parts of the verdict")
    return {name: torch.tensor([r.rewards[name] for r in rollouts], dtype=torch.float64) for name in names}
