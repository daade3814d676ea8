"""A second score of a run's replies: a part of the reward recorded in the rollouts, or any reward, computed now."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from posttrain.apps.audit.correlation import Floats
from posttrain.apps.audit.replies import Replies
from posttrain.core.types import OUTCOME, Invalid, Reply, StopReason, Task, UserError
from posttrain.envs.play.env_outputs import Done
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.group_rewards import is_group_reward
from posttrain.envs.play.load_env import BUILTIN, is_generator_env, load_env
from posttrain.envs.reward_sums import is_sum


def score_of(replies: Replies, name: str) -> Floats:
    """Return a second score of each reply, [n]: the part of the reward of that name, or a reward "my.py:name"; nan if
    invalid.

    Raises UserError for a name that is neither, a part that no reply has, and a reward that can score nothing.
    """
    if name in replies.parts or not (name in BUILTIN or is_sum(name) or re.fullmatch(r"[^\s:]+:\w+", name)):
        return replies.part(name)
    if is_generator_env(load_env(name)):
        raise UserError(
            f"--gold {name} is an environment, and a gold score needs a reward: give a function of (task, reply)"
        )
    if is_group_reward(load_env(name)) and not is_sum(name):
        raise UserError(
            f"--gold {name} scores whole groups, and a gold score is of one reply: give a reward of (task, reply), or log "
            "it as a part of the reward"
        )
    if not replies.single:
        raise UserError(
            "--gold FILE:NAME scores runs of one reply an episode: log the gold score as a part of the reward"
        )
    scores, reasons = scored(name, replies.tasks, replies.text, replies.stop)
    if not np.isfinite(scores).any():
        raise UserError(f"--gold {name} scored none of the {len(replies)} replies; the first reason: {reasons[0]}")
    return scores


def scored(
    env: str, tasks: Sequence[Task], texts: Sequence[str], stops: Sequence[StopReason], outcomes: bool = False
) -> tuple[Floats, list[str]]:
    """Return ([n] rewards, nan where invalid; reasons of the invalid ones). Equal pairs of task and reply are scored
    once.

    `outcomes`: return the numbers that success is compared with, instead of the rewards.
    """
    scores = np.full(len(texts), np.nan)
    reasons: list[str] = []
    places: dict[tuple[str, str, StopReason], list[int]] = {}
    for place, (task, text, stop) in enumerate(zip(tasks, texts, stops, strict=True)):
        places.setdefault((f"{task['id']} {task.get('answer')}", text, stop), []).append(place)
    pairs = list(places.items())
    with EnvPool(env) as pool:
        for id, (_, at) in enumerate(pairs):
            pool.start(id, tasks[at[0]])
        waiting = len(pairs)
        while waiting:
            for id, event in pool.poll(None):
                (_, text, stop), at = pairs[id]
                if not isinstance(event, Done):
                    pool.send(id, Reply(text, stop))
                    continue
                waiting -= 1
                if isinstance(event.reward, Invalid):
                    reasons.append(event.reward.reason)
                else:
                    scores[at] = event.rewards.get(OUTCOME, event.reward) if outcomes else event.reward
    return scores, reasons
