"""Runs with epsilon-greedy sampling: resumed exactly, recorded with the sampler's probabilities, evaluated without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from digit_tasks import TASKS, digits
from rl_sources import row, run, source

import posttrain
from posttrain.core.types import Sampling, UserError
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts

EPSILON = 0.3
QUICK: dict[str, Any] = {
    **{"prompts": 3, "group": 3, "max_tokens": 8, "lr": 1e-3, "threads": 1, "env_workers": 0, "save_every": 2},
    **{"temperature": 0.8, "epsilon_greedy": EPSILON, "quiet": True, "held_out": 0.2, "steps": 4},
}
HOW: dict[str, dict[str, Any]] = {
    "alone": {"minibatches": 2, "kl": 0.1, "kl_control": "adaptive"},
    "replicas": {"replicas": 2},
    "ahead": {"async_steps": 1, "old_policy": "sampler"},
    "partial": {"tokens_per_step": 3},
}
STOP = """
from posttrain import StopRun


def stop(step, metrics, rollouts):
    if step == 2:
        raise StopRun("half")
"""


@pytest.fixture
def start(tmp_path: Path, tokenizer: Tokenizer) -> str:
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    (tmp_path / "stop.py").write_text(STOP)
    return str(tmp_path / "start")


@pytest.mark.parametrize("how", HOW)
def test_exploring_run_goes_on_to_the_bit(start: str, how: str, tmp_path: Path) -> None:
    given = {"model": start, **QUICK, **HOW[how]}
    whole = posttrain.rl(TASKS, digits, out=str(tmp_path / "whole"), **{**given, "replicas": 0})
    begun = {**given, "replicas": 0}  # the second half alone is sampled by replicas
    posttrain.rl(TASKS, digits, out=str(tmp_path / "parts"), hook=(str(tmp_path / "stop.py") + ":stop",), **begun)
    parts = posttrain.rl(TASKS, digits, out=str(tmp_path / "parts"), resume=True, **given)
    assert parts.metrics == whole.metrics
    trained = [step for step in whole.metrics if "sampler/gap" in step]
    assert trained and all(step["sampler/gap"] > 0.01 for step in trained)


def test_recorded_probabilities_are_the_mixture_s(start: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    ran = posttrain.rl(TASKS, digits, model=start, out=str(tmp_path / "run"), **QUICK, record="full")
    allowed = set(LocalEngine(tiny(tokenizer), tokenizer).uniform_tokens.ids.tolist())
    rows = read_rollouts(ran.path, 1, ("engine", "learner", "tokens"))
    found = [
        t
        for r in rows
        if r["learner"]
        for t in zip(r["engine"], r["learner"], r["tokens"][-len(r["engine"]) :], strict=True)
    ]
    assert len(found) > 20
    for engine, learner, token in found:  # of the step's only update: the policy that sampled
        share = EPSILON / len(allowed) * (token in allowed)
        assert math.exp(engine) == pytest.approx((1 - EPSILON) * math.exp(learner) + share, abs=1e-3)


def test_evaluations_and_greedy_baselines_draw_from_the_policy_alone(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, asked = LocalEngine.submit, list[Sampling]()

    def noted(self: Any, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        asked.append(sampling)
        submit(self, id, prompt, sampling, keep)

    monkeypatch.setattr(LocalEngine, "submit", noted)
    given = {**QUICK, "algorithm": "remax", "steps": 1, "kl": 0.0}
    posttrain.rl(TASKS, digits, model=start, out=str(tmp_path / "run"), **given)
    assert {s.temperature for s in asked if s.epsilon} == {0.8} and {s.epsilon for s in asked} == {0.0, EPSILON}
    assert sum(s.epsilon > 0 for s in asked) == 3 * 3 and sum(s.temperature == 0 for s in asked) == 3
    assert len(asked) > 3 * 3 + 3, "and the held-out tasks, before and after"


def test_entropy_is_steered_by_the_policy_s_own_where_tokens_are_drawn_uniformly(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, row("grpo", kl=0.0, entropy_target=3.0, epsilon_greedy=EPSILON))
    assert not experience.explores
    player = experience.queue.collector.player
    object.__setattr__(player, "sampling", Sampling(max_tokens=8, epsilon=EPSILON))
    assert experience.explores and not experience.lags
    _, [seen] = run(experience, steps=1)
    assert "staleness" not in seen and seen["sampler/ratio"] == pytest.approx(1.0, abs=0.5)


def test_engine_without_it_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="servers do not sample with --epsilon-greedy: leave out --engine vllm"):
        posttrain.rl(TASKS, digits, model="nowhere", out=str(tmp_path / "run"), engine="vllm", **QUICK)
