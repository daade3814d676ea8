"""Decides what a step plays, and which of its rollouts are kept: tasks in their order, groups replaced where a row asks."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.algorithms.credit import equal_rewards
from posttrain.algorithms.filters import DynamicSampling
from posttrain.batch import Stats
from posttrain.data.tasks import draw
from posttrain.envs.branching import Plan
from posttrain.envs.play import Episode, Player
from posttrain.seeds import seed_of
from posttrain.sources.lengths import Placed, Prompts, TooLong
from posttrain.sources.scores import describe, refuse_broken, scoreboard, usable
from posttrain.types import Rollout, UserError


@dataclass(frozen=True)
class Size:
    """How large a step is."""

    prompts: int  # tasks per step
    group: int  # rollouts per task
    tokens_per_microbatch: int


@dataclass(frozen=True)
class Collected:
    """The rollouts of a step."""

    played: list[Rollout]
    kept: list[Rollout]  # those to learn from


@dataclass
class Collector:
    """Plays the steps' episodes. All it remembers is how many tasks it has played."""

    tasks: Placed
    player: Player
    size: Size
    seed: int
    success: float | None  # rewards from it on are successes
    too_long: TooLong | None = None  # takes note of prompts that do not fit; left out: the player alone sees to them
    parts: bool = False  # whether the named parts of rewards are compared, so that they too are signal
    rewarded: bool = True  # whether anything scores the replies
    plan: Plan | None = None  # how the rollouts of a group branch
    cursor: int = field(default=0, init=False)  # tasks drawn so far

    def __post_init__(self) -> None:
        if self.size.prompts > len(self.tasks):
            raise UserError(
                f"--prompts {self.size.prompts} asks for more tasks per step than there are: {len(self.tasks)}"
            )

    def collect(self, number: int, groups: DynamicSampling | None, stats: Stats) -> Collected:
        """The rollouts of step `number`. With `groups`, those without signal are replaced, within its budget."""
        budget = self.size.prompts * (groups.rounds if groups else 1)
        if self.too_long is not None:
            self.too_long.take()  # what was met elsewhere
        played: list[Rollout] = []
        kept: list[Rollout] = []
        while (missing := min(self.size.prompts - len({r.group for r in kept}), budget)) > 0:
            episodes, self.cursor = self.episodes(number, self.cursor, missing)
            budget -= missing
            rollouts = self.player.play(episodes, self.plan)
            played += rollouts
            fit = usable(rollouts, stats)
            if fit and self.rewarded:
                scores = scoreboard(fit, success=self.success, parts=self.parts)
                stats.add("groups/no_signal", equal_rewards(scores).sum().item(), len(fit))
                if groups is not None:
                    fit = [r for r, keep in zip(fit, groups(scores).tolist(), strict=True) if keep]
            kept += fit
            if groups is None:
                break
        if self.too_long is not None:
            stats.add("too_long", self.too_long.take())
        refuse_broken(played)
        stats.merge(describe(played, self.success, self.rewarded))
        if groups is not None:
            stats.add("groups/played", len({r.group for r in played}))
            stats.add("groups/kept", len({r.group for r in kept}))
        return Collected(played, kept)

    def _fits(self, place: int) -> bool:
        """Whether a prompt does, where that can be told before it is played."""
        if self.too_long is None or not self.player.pool.single_turn:
            return True
        return Prompts(self.tasks, self.player.tokenizer, self.too_long).fits(place)

    def episodes(self, number: int, first: int, count: int) -> tuple[list[Episode], int]:
        """What step `number` plays: `count` tasks, each once per member of its group; and the cursor after them.

        They are those from `first` on in the epochs' permutations. For one whose prompt does not fit the next is taken.
        """
        episodes = []
        drawn, cursor = draw(len(self.tasks), first, count, self.seed, self._fits)
        for visit, place in drawn:
            task = self.tasks[place]
            group = f"{task['id']}#{visit}"  # a task may come twice in a step where two epochs meet
            for member in range(self.size.group):
                episodes.append(Episode(task, group, seed_of(self.seed, "rollout", number, group, member)))
        return episodes, cursor
