"""Collects a step's rollouts: draws tasks in their order, and replaces groups under dynamic sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.algorithms.earned_rewards import equal_rewards
from posttrain.algorithms.filters import DynamicSampling
from posttrain.core.batch import Scores, Stats
from posttrain.core.component import Need
from posttrain.core.rollouts import Fate, Rollout
from posttrain.core.seeds import seeds_of
from posttrain.core.types import Completion, Invalid, StopReason, Task, UserError, succeeds
from posttrain.data.mixed_tasks import MixedTasks
from posttrain.envs.play.branch_plan import BranchPlan
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import Player
from posttrain.training.sources.length_filter import Placed, Prompts, TooLong
from posttrain.training.sources.mixture import part_metrics
from posttrain.training.sources.rollout_state import restored, stored
from posttrain.training.sources.scoreboard import Dropped, describe, refuse_broken, refuse_greedy, scoreboard, usable
from posttrain.training.sources.task_order import Solved, TaskOrder


@dataclass(frozen=True)
class Size:
    """Size of a step."""

    prompts: int  # tasks per step
    group: int  # rollouts per task
    tokens_per_microbatch: int


@dataclass(frozen=True)
class Collected:
    """Rollouts of a step."""

    played: list[Rollout]
    kept: list[Rollout]  # rollouts to learn from
    dropped: list[Dropped]
    places: dict[str, int]  # group -> place of its task


@dataclass(frozen=True)
class UnfinishedGroup:
    """A group with an unfinished reply."""

    group: str
    place: int  # place of its task
    members: tuple[Rollout | Episode, ...]

    def plain(self) -> dict[str, Any]:
        return {"group": self.group, "place": self.place, "members": [_member(member) for member in self.members]}


def _member(member: Rollout | Episode) -> dict[str, Any]:
    if isinstance(member, Rollout):
        return {"rollout": stored(member)}
    begun = member.begun
    assert begun is not None, "an unfinished episode has a reply so far"
    runs = begun.runs or ((len(begun.tokens), begun.version),)
    return {"seed": member.seed, "tokens": list(begun.tokens), "logp": list(begun.logp), "runs": list(map(list, runs))}


@dataclass(frozen=True)
class CollectorPosition:
    """Position of a collector: the next tasks, and the groups that are not finished."""

    order: Mapping[str, Any]  # the state of the order of tasks
    open: tuple[UnfinishedGroup, ...] = ()

    def state(self) -> dict[str, Any]:
        return {**self.order, **({"open": list(self.open)} if self.open else {})}

    def plain(self) -> dict[str, Any]:
        return {**self.state(), **({"open": [group.plain() for group in self.open]} if self.open else {})}


@dataclass
class Collector:
    """Collects the rollouts of steps. Its state is the order of tasks, and unfinished groups."""

    tasks: Placed
    player: Player
    size: Size
    seed: int
    success: float | None  # the reward from which on a reply succeeds
    too_long: TooLong | None = None  # records prompts that do not fit; None: only the player handles them
    needs: frozenset[Need] = frozenset()  # needs of the algorithm, which decide how rewards are compared
    rewarded: bool = True  # whether anything scores the replies
    plan: BranchPlan | None = None  # how the rollouts of a group branch
    tokens: int = 0  # most tokens of each reply that a step samples, later steps continue it; 0: no limit
    order: TaskOrder = field(kw_only=True)  # decides which task is next
    _open: dict[str, UnfinishedGroup] = field(default_factory=dict, init=False)  # by group
    _places: dict[str, int] = field(default_factory=dict, init=False)  # group that was drawn -> place of its task

    def __post_init__(self) -> None:
        if self.size.prompts > len(self.tasks):
            raise UserError(
                f"--prompts {self.size.prompts} is above the {len(self.tasks)} different training tasks: give "
                f"--prompts {len(self.tasks)} or fewer, or more rows"
            )

    def collect(self, number: int, groups: DynamicSampling | None, stats: Stats) -> Collected:
        """Return the rollouts of step `number`. With `groups`, replace groups without signal, within its budget."""
        budget = self.size.prompts * (groups.rounds if groups else 1)
        if self.too_long is not None:
            self.too_long.take()  # drops counts from elsewhere
        played: list[Rollout] = []
        kept: list[Rollout] = []
        dropped: list[Dropped] = []
        while (missing := min(self.size.prompts - len({r.group for r in kept}), budget)) > 0:
            episodes = self.episodes(number, missing)
            budget -= missing
            rollouts = self._whole(episodes) if self.tokens else self.player.play(episodes, self.plan)
            played += rollouts
            if Need.GREEDY in self.needs:
                rollouts, lost = baselined(rollouts)
                dropped += lost
                without = sum(each.fate is Fate.SMALL for each in lost)
                stats.add("dropped", without, without)
            fit, lost = usable(rollouts, stats)
            dropped += lost
            if fit and self.rewarded:
                scores = scoreboard(fit, success=self.success, needs=self.needs)
                if self.size.group > 1 or self.plan is not None:  # a rollout alone is always equal to its group
                    stats.add("groups/no_signal", equal_rewards(scores).sum().item(), len(fit))
                if groups is not None:
                    fit, lost = _informative(fit, scores, groups, spent=not budget)
                    dropped += lost
            kept += fit
            if groups is None:
                break
        if self.too_long is not None:
            stats.add("too_long", self.too_long.take())
        refuse_broken(played)
        refuse_greedy(played)
        own = [rollout for rollout in played if not rollout.greedy]
        stats.merge(describe(own, self.success, self.rewarded))
        if Need.GREEDY in self.needs:
            stats.add_each(
                "reward_greedy", [r.reward for r in played if r.greedy and not isinstance(r.reward, Invalid)]
            )
        if isinstance(self.tasks, MixedTasks):
            stats.merge(part_metrics(own, self.success))
        if groups is not None:
            stats.add("groups/played", len({r.group for r in played}))
            stats.add("groups/kept", len({r.group for r in kept}))
        if self.tokens:
            stats.add("unfinished", sum(isinstance(m, Episode) for group in self._open.values() for m in group.members))
        self.order.observe(self._solved(own))
        self.order.measure(stats)
        places = {group: self._places[group] for group in dict.fromkeys(r.group for r in played)}
        self._places = {group: found.place for group, found in self._open.items()}
        return Collected(played, kept, dropped, places)

    def _solved(self, played: Sequence[Rollout]) -> list[Solved]:
        """Return how often each task was solved; [] without a success threshold."""
        success, found, ids = self.success, dict[int, list[bool]](), dict[int, str]()
        if success is None:
            return []
        for rollout in played:
            if not isinstance(rollout.reward, Invalid):
                place = self._places[rollout.group]
                ids[place] = str(rollout.task["id"])
                found.setdefault(place, []).append(bool(succeeds(rollout.outcome, success)))
        return [Solved(place, ids[place], sum(own), len(own) - sum(own)) for place, own in found.items()]

    def _whole(self, begun: list[Episode]) -> list[Rollout]:
        """Begin these episodes and continue unfinished ones; return the rollouts of complete groups."""
        members: dict[str, list[Rollout | Episode]] = {
            group: list(found.members) for group, found in self._open.items()
        }
        for episode in begun:
            members.setdefault(episode.group, []).append(episode)
        asked = [(group, at) for group, own in members.items() for at, m in enumerate(own) if isinstance(m, Episode)]
        episodes = [member for own in members.values() for member in own if isinstance(member, Episode)]
        for (group, at), found in zip(asked, self.player.play_on(episodes, self.tokens), strict=True):
            members[group][at] = found
        self._open, whole = {}, []
        for group, own in members.items():
            rollouts = [member for member in own if isinstance(member, Rollout)]
            if len(rollouts) == len(own):
                whole += rollouts
            else:
                self._open[group] = UnfinishedGroup(group, self._places[group], tuple(own))
        return whole

    @property
    def position(self) -> CollectorPosition:
        return CollectorPosition(self.order.state(), tuple(self._open.values()))

    def restore(self, state: Mapping[str, Any]) -> CollectorPosition:
        """Continue from a position, given as JSON data. Raises ValueError, LookupError or TypeError if it is invalid."""
        self.order.restore(state)
        found = [self._opened(row) for row in state.get("open", ())]
        self._open = {group.group: group for group in found}
        self._places = {group.group: group.place for group in found}
        return self.position

    def task_of(self, group: str, place: int) -> Task:
        """Return the task of a group. Raises ValueError if the group is of another task."""
        task = self.tasks[place]
        if not group.startswith(f"{task['id']}#"):
            raise ValueError(f"the group {group!r} is of another task than {task['id']!r}")
        return task

    def _opened(self, row: Mapping[str, Any]) -> UnfinishedGroup:
        group, place = str(row["group"]), int(row["place"])
        task = self.task_of(group, place)

        def member(told: Mapping[str, Any]) -> Rollout | Episode:
            if "rollout" in told:
                return restored(told["rollout"], task)
            runs = tuple((int(count), int(version)) for count, version in told["runs"])
            begun = Completion(0, told["tokens"], told["logp"], "", StopReason.LENGTH, runs[0][1], None, runs)
            return Episode(task, group, int(told["seed"]), begun=begun)

        members = tuple(map(member, row["members"]))
        if len(members) != self.size.group:
            raise ValueError(f"{len(members)} members of a group of {self.size.group}")
        return UnfinishedGroup(group, place, members)

    def _fits(self, place: int, task: Task) -> bool:
        """Return whether a prompt fits, as far as that is known before its episode runs."""
        if self.too_long is None or not self.player.pool.single_turn:
            return True
        return Prompts(self.tasks, self.player.tokenizer, self.too_long).leaves_room(place, task)

    def episodes(self, number: int, count: int) -> list[Episode]:
        """Return further episodes of step `number`: those of the next `count` tasks, one for each member of the group.

        A task whose prompt does not fit is replaced by the next one.
        """
        episodes: list[Episode] = []
        read: dict[int, Task] = {}  # place -> task; reading a row takes longer than making its episodes

        def fits(place: int) -> bool:
            task = read[place] = self.tasks[place]
            return self._fits(place, task)

        for visit, place in self.order.draw(count, fits, set(self._places.values())):
            task = read[place]
            group = f"{task['id']}#{visit}"  # a task may come twice in a step where two epochs meet
            self._places[group] = place
            seeds = seeds_of(self.seed, "rollout", number, group, count=self.size.group)
            episodes += [Episode(task, group, seed) for seed in seeds]
            if Need.GREEDY in self.needs:
                episodes.append(Episode(task, group, seeds[0], greedy=True))
        return episodes


def baselined(rollouts: Sequence[Rollout]) -> tuple[list[Rollout], list[Dropped]]:
    """Set each rollout's baseline to the reward of its group's greedy one; return those with one, and the others.

    A group whose greedy rollout has no valid reward has no baseline, and is left out.
    """
    found = {r.group_and_side: r.reward for r in rollouts if r.greedy}
    kept, dropped = [], list[Dropped]()
    for rollout in rollouts:
        baseline = found.get(rollout.group_and_side, Invalid("there is none"))
        if not (rollout.greedy or isinstance(baseline, Invalid)):
            rollout.baseline = baseline
            kept.append(rollout)
        elif isinstance(rollout.reward, Invalid):
            dropped.append(Dropped(rollout, Fate.INVALID, rollout.reward.reason))
        elif isinstance(baseline, Invalid) and not rollout.greedy:
            why = f"the greedy reply of its group has no reward: {baseline.reason}"
            dropped.append(Dropped(rollout, Fate.SMALL, why))
        else:
            why = "a greedy reply: its reward is the baseline of its group"
            dropped.append(Dropped(rollout, Fate.BASELINE, why))
    return kept, dropped


def _informative(
    rollouts: list[Rollout], scores: Scores, groups: DynamicSampling, spent: bool
) -> tuple[list[Rollout], list[Dropped]]:
    """Return the rollouts of groups that dynamic sampling keeps, and the others.

    `spent`: no budget is left.
    """
    kept, dropped = [], list[Dropped]()
    columns = groups(scores).tolist(), equal_rewards(scores).tolist(), scores.reward.tolist()
    for rollout, keep, equal, reward in zip(rollouts, *columns, strict=True):
        if keep:
            kept.append(rollout)
            continue
        why = f"all rewards of its group are {reward:g}" if equal else groups.exclusion_reason
        why += "; the budget is used up, so no other group was sampled" if spent else "; another group replaced it"
        dropped.append(Dropped(rollout, Fate.REPLACED, why))
    return kept, dropped
