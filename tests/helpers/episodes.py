"""How environments are played by a tiny model: what tests of episodes share."""

from __future__ import annotations

from typing import Any

from conftest import tiny

from posttrain.core.rollouts import Rollout
from posttrain.core.seeds import seed_of
from posttrain.core.types import Completion, Sampling
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.scripted import ScriptedEngine
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import Player
from posttrain.models.tokenizer.tokenizer import Tokenizer


def episodes(count: int) -> list[Episode]:
    """Three of each task."""
    return [Episode({"id": str(i // 3), "prompt": f"say {i // 3}="}, str(i // 3), seed_of(i)) for i in range(count)]


def played(
    env: Any,
    tokenizer: Tokenizer,
    count: int = 12,
    workers: int = 0,
    context: int = 256,
    *,
    slots: int = 5,
    limits: dict[str, Any] | None = None,
    **how: Any,
) -> list[Rollout]:
    """Rollouts of `count` episodes. `limits`: of `Player`; `how`: of sampling."""
    engine = LocalEngine(tiny(tokenizer, context=context), tokenizer, slots=slots)
    sampling = Sampling(**{"max_tokens": 9, **how})
    with EnvPool(env, workers, 200.0) as pool:  # a busy machine decides nothing
        return Player(pool, engine, tokenizer, sampling, context, **limits or {}).play(episodes(count))


def said(rollouts: list[Rollout]) -> list[Any]:
    """All of them that must not depend on the clock, to the last bit."""
    return [
        (r.group, r.reward, r.rewards, r.steps, r.stop, r.text, r.turns, [t.as_dict() for t in r.transcripts])
        for r in rollouts
    ]


def until_done(engine: LocalEngine) -> list[Completion]:
    """Completions of all that the engine has, in order of their ids."""
    done: list[Completion] = []
    while engine.running or engine.waiting:
        done += engine.poll()
    return sorted(done, key=lambda completion: completion.id)


def enacted(env: Any, tokenizer: Tokenizer, replies: list[str], context: int = 400, **task: Any) -> list[Rollout]:
    """An episode whose replies are these."""
    with EnvPool(env, workers=0) as pool:
        engine = ScriptedEngine(tokenizer, (0,), replies)
        player = Player(pool, engine, tokenizer, Sampling(max_tokens=50), context)
        return player.play([Episode({"id": "a", **task}, "a#0", 7)])


def whole(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
    """Each context, what was observed and what was said."""
    return [tokenizer.decode(t.tokens) for t in rollout.transcripts]
