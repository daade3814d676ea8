"""How groups of replies are scored in a pool: what tests of rewards of groups share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.core.types import Reply, Turn
from posttrain.envs.play.env_outputs import Done
from posttrain.envs.play.env_pool import EnvPool


def scored(
    env: Any,
    groups: Sequence[Sequence[str]],
    workers: int = 1,
    backwards: bool = False,
    seconds: float = 20.0,
    **task: Any,
) -> list[list[Done]]:
    """The verdicts of groups of replies. `backwards`: the last reply of all is given first."""
    replies = [(g, Reply(text)) for g, own in enumerate(groups) for text in own]
    ends: dict[int, Done] = {}
    with EnvPool(env, workers, seconds) as pool:
        for id, (group, _) in enumerate(replies):
            pool.start(id, {"id": "t", "prompt": "p", **task}, group)
        begun = 0
        while begun < len(replies):
            events = pool.poll(20)
            assert all(event == Turn(text="p") for _, event in events)
            begun += len(events)
        for id in sorted(range(len(replies)), reverse=backwards):
            pool.send(id, replies[id][1])
        while len(ends) < len(replies):
            ends |= {id: event for id, event in pool.poll(20) if isinstance(event, Done)}
        assert not pool.pending
    found = iter(ends[id] for id in range(len(replies)))
    return [[next(found) for _ in own] for own in groups]
