"""Looks whether replies have the delimiter of their steps: see `--step-delimiter`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.core.reply_steps import REPLY, SPANS
from posttrain.core.rollouts import Rollout
from posttrain.envs.step_rewards import delimits

LOOKED = 3  # steps of training


@dataclass
class DelimiterWatch:
    """Reports once that no reply of the first steps has the delimiter, so that each was one step."""

    delimiter: str
    say: Callable[[str], None]
    _replies: int = 0
    _steps: int = 0
    _over: bool = False

    def look(self, rollouts: Sequence[Rollout]) -> None:
        """Look at the replies of a training step, unless the question is settled."""
        if self._over or self.delimiter in (REPLY, SPANS):
            return
        self._steps += 1
        self._replies += len(rollouts)
        found = any(delimits(self.delimiter, rollout.text) for rollout in rollouts)
        self._over = found or self._steps == LOOKED
        if self._over and not found and self._replies:
            self.say(
                f"--step-delimiter {self.delimiter!r} is in none of the {self._replies:,} replies of {LOOKED} steps, so "
                "each reply is one step: compare it with replies (posttrain rollouts), ask for it in the prompt, or "
                "give reply"
            )
