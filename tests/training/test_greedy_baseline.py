"""ReMax samples a greedy reply to every prompt, takes its reward off those of the others, and learns nothing from it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import tiny
from rl_sources import TASKS, accounted, digits, row, source

import posttrain
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.rollout_filters import ViewQuestion
from posttrain.apps.view.step_series import series
from posttrain.core.rollouts import Fate, Rollout
from posttrain.core.types import Invalid, InvalidKind, Sampling, Task, UserError
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import Player
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import read_metrics
from posttrain.training.sources.collector import baselined
from posttrain.training.sources.rollout_state import restored, stored

QUICK: dict[str, Any] = {
    **{"algorithm": "remax", "steps": 3, "prompts": 2, "group": 2, "max_tokens": 6, "lr": 1e-2},
    **{"env_workers": 0, "threads": 1, "quiet": True},
}


def test_the_greedy_reply_of_a_group_is_the_model_s_own_at_temperature_0(tokenizer: Tokenizer) -> None:
    played = source(tokenizer, row("remax")).produce(1).played
    greedy = {r.group: r for r in played if r.greedy}
    assert len(greedy) == 3 and len(played) == 15
    player = Player(
        EnvPool(digits, 0), LocalEngine(tiny(tokenizer), tokenizer), tokenizer, Sampling(0.0, max_tokens=8), 64
    )
    for found, rollout in zip(
        player.play([Episode(r.task, r.group, 7) for r in greedy.values()]), greedy.values(), strict=True
    ):
        assert found.text == rollout.text and found.reward == rollout.reward


def test_the_advantage_is_the_reward_above_that_of_the_greedy_reply_and_it_moves_nothing(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, row("remax"))
    baseline = {r.group: r.reward for r in experience.produce(1).played if r.greedy}
    outcomes = accounted(experience)
    assert len(outcomes) == 15
    for outcome in outcomes:
        rollout = outcome.rollout
        if rollout.greedy:
            assert outcome.fate is Fate.BASELINE and outcome.advantage is None and "greedy" in outcome.why
        else:
            assert outcome.advantage == pytest.approx(rollout.reward - baseline[rollout.group], abs=1e-12)


def test_one_rollout_of_a_prompt_is_enough(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, row("remax", group=1), size=(3, 1))
    step = experience.produce(1)
    assert [r.greedy for r in step.played] == [False, True] * 3
    assert "groups/no_signal" not in step.stats.means(), "a rollout alone has no group to be equal to"


def test_figures_of_a_step_leave_the_greedy_replies_out(tokenizer: Tokenizer) -> None:
    step = source(tokenizer, row("remax")).produce(1)
    for greedy, name in ((False, "reward"), (True, "reward_greedy")):
        assert step.stats.means()[name] == pytest.approx(np.mean([r.reward for r in step.played if r.greedy == greedy]))


def rollout(group: str, reward: float | Invalid, greedy: bool = False, side: str = "") -> Rollout:
    return Rollout({"id": "0"}, group, [], reward, greedy=greedy, side=side)


def test_a_group_whose_greedy_reply_has_no_reward_is_left_out_with_the_reason() -> None:
    failed = Invalid("it raised", InvalidKind.RAISED)
    rollouts = [rollout("a", 1.0), rollout("a", failed, True), rollout("b", 0.5), rollout("b", 0.25, True)]
    kept, dropped = baselined(rollouts)
    assert kept == [rollouts[2]] and kept[0].baseline == 0.25
    assert [each.rollout for each in dropped] == [rollouts[0], rollouts[1], rollouts[3]]
    assert [each.fate for each in dropped] == [Fate.SMALL, Fate.INVALID, Fate.BASELINE]
    assert [each.why for each in dropped[:2]] == ["the greedy reply of its group has no reward: it raised", "it raised"]


def test_rollouts_whose_greedy_reply_failed_are_counted_as_dropped(tokenizer: Tokenizer) -> None:
    def fails(task: Task, reply: str) -> float | Invalid:
        return Invalid("no digits") if task["id"] == failing and reply in greedy else digits(task, reply)

    first = source(tokenizer, row("remax")).produce(1).played
    failing = first[0].task["id"]
    greedy = {r.text for r in first if r.greedy and r.task["id"] == failing}
    step = source(tokenizer, row("remax"), env=fails).produce(1)
    bad = {r.group for r in step.played if r.greedy and isinstance(r.reward, Invalid)}
    assert len(bad) == 1
    assert step.stats.means()["dropped"] == pytest.approx(4 / 12)


def test_each_side_of_a_game_is_compared_with_its_own_greedy_reply() -> None:
    rollouts = [rollout("a", 1.0, greedy, side) for greedy in (False, True) for side in ("x", "y")]
    rollouts[2].reward, rollouts[3].reward = 0.25, 0.75
    assert [r.baseline for r in baselined(rollouts)[0]] == [0.25, 0.75]


def test_a_rollout_keeps_its_baseline_in_the_training_state(tokenizer: Tokenizer) -> None:
    for one in source(tokenizer, row("remax")).produce(1).played:
        again = restored(stored(one), one.task)
        assert (again.greedy, again.baseline) == (one.greedy, one.baseline)


@pytest.mark.parametrize("more", [{}, {"async_steps": 1}])
def test_a_run_that_is_resumed_takes_the_same_steps(tokenizer: Tokenizer, tmp_path: Path, more: dict[str, Any]) -> None:
    save_model(tiny(tokenizer), tmp_path / "model")
    tokenizer.save(tmp_path / "model")

    def trained(**how: Any) -> Path:
        given = {**QUICK, "save_every": 1, "keep": 9, **more, **how}
        return posttrain.rl(TASKS, digits, str(tmp_path / "model"), out=str(tmp_path / "run"), **given).path

    path = trained(steps=4)
    whole = (path / "metrics.jsonl").read_bytes()
    assert b"reward_greedy" in whole
    for step in (3, 4):
        shutil.rmtree(path / "checkpoints" / f"step-{step:06d}")
    trained(steps=4, resume=True)
    assert (path / "metrics.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"tokens_per_step": 2}, "a greedy reply must be complete"),
        ({"baseline_weight": "length"}, "--baseline-weight has no effect with --baseline none"),
    ],
)
def test_what_cannot_have_a_greedy_baseline_is_refused_in_one_line(how: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as refused:
        row("remax", **how)
    assert "\n" not in str(refused.value)


def test_a_reward_of_whole_groups_is_refused() -> None:
    def reward(tasks: list[Task], replies: list[str]) -> list[float]:
        return [0.0] * len(replies)

    with pytest.raises(UserError, match="leave out --baseline greedy"):
        posttrain.rl(TASKS, reward, "nowhere", **QUICK)


def test_figures_of_view_are_of_outcomes_and_leave_the_greedy_replies_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def reward(task: Task, reply: str) -> dict[str, float]:
        return {"outcome": float(len(reply) % 2), "style": 0.5 * (len(reply) % 3)}

    save_model(tiny(tokenizer), tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    how = {**QUICK, "prompts": 4, "group": 3, "steps": 2, "success": 1.0, "out": str(tmp_path / "run")}
    path = posttrain.rl(TASKS, reward, str(tmp_path / "model"), **how).path
    run = OpenRun(path, "run")
    run.read()
    run.store.read_texts()
    rows, recorded = run.store.rows, [row for step in (1, 2) for row in read_rollouts(path, step)]
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for each in recorded:
        groups.setdefault((each["step"], each["group"]), []).append(each)
    right = [sum(len(each["text"]) % 2 for each in own if each["fate"] != "baseline") for own in groups.values()]
    assert rows.groups["right_n"].tolist() == right and set(rows.groups["n"].tolist()) == {3.0} and sum(right)
    metrics = [m for m in read_metrics(path) if "accuracy" in m]
    shown = series(rows, [1, 2])
    assert shown["reward"] == pytest.approx([m["reward"] for m in metrics], rel=1e-5)
    assert [sum(right[at : at + 4]) / 12 for at in (0, 4)] == pytest.approx([m["accuracy"] for m in metrics])
    once = ViewQuestion.of({"ask": "once"}, run.store)
    assert "fate = 'baseline'" in once.shown[0] and 'coalesce("part.outcome", reward) end >= 0.99' in once.shown[0]
    meant = {key for key, count in zip(groups, right, strict=True) if count == 1}
    listed = once.page(0)["rows"]
    assert {(r["step"], r["group"]) for r in listed} == meant and len(listed) == len(meant)
