"""Experiments on worked sums: what their arms change, and how their figures are read."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from experiments import group_size, overlong, ppo_ablation, worked
from experiments.harness import Arena, checkpoint_of
from experiments.peak_memory import peak_memory, wide_model
from posttrain.algorithms.aggregate import SequenceMean, TokenMean
from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.surrogate import Clip, ImportanceRatio
from posttrain.config.resolve import filled
from posttrain.config.training import RL
from posttrain.core.batch import Batch, Outputs
from posttrain.core.rollouts import Rollout
from posttrain.core.types import Task, UserError
from posttrain.envs.builtin import worked_sums
from posttrain.training.adjust import adjust

TINY: dict[str, Any] = {**worked.SIZES, "tasks": 64, "unseen": 4, "imitation_epochs": 1.0, "steps": 2, "max_tokens": 8}


def silent(text: str) -> None:
    pass


def algorithm_of(settings: Any, **options: Any) -> Algorithm:
    """As a run with these options has it."""
    sizes = {"tasks": "generated", "env": "worked-sums", "model": "start", "prompts": settings["prompts"]}
    run = filled(RL, {**sizes, "group": settings["group"], **options})
    return adjust(find(run.algorithm), run)


# -- ppo-ablation ------------------------------------------------------------------------------------------------------


def test_each_arm_of_the_ablation_lacks_its_part_of_ppo_and_keeps_the_others() -> None:
    settings = ppo_ablation.EXPERIMENT.settings
    updates = {"algorithm": "ppo", "epochs": settings["epochs"], "minibatches": settings["minibatches"]}
    rows = {
        arm: algorithm_of(settings, **{**updates, **options}) for arm, options in ppo_ablation.arms(settings).items()
    }
    whole = rows.pop("whole")
    assert isinstance(whole.surrogate, Clip) and whole.critic is not None and whole.kl is not None and whole.kl.beta > 0
    assert whole.epochs > 1 and whole.minibatches > 1
    changed = {
        "no ratio": {"surrogate": ppo_ablation.Stale()},
        "no clip": {"surrogate": ImportanceRatio()},
        "no min": {"surrogate": ppo_ablation.ClipAlone(whole.surrogate.low, whole.surrogate.high)},
        "no KL": {"kl": rows["no KL"].kl},
        "no critic": {"advantage": rows["no critic"].advantage, "critic": None},
    }
    assert rows.keys() == changed.keys()
    labels = ("name", "paper", "stated", "idea", "best_for")
    for arm, row in rows.items():
        same = {k: v for k, v in vars(whole).items() if k not in labels}
        assert {k: v for k, v in vars(row).items() if k not in labels} == same | changed[arm]
    assert rows["no KL"].kl is not None and rows["no KL"].kl.beta == ppo_ablation.UNPENALISED
    assert rows["no KL"].kl.where == "loss"  # in the reward, whitening would raise it if all rewards were equal
    assert "whitened" in rows["no critic"].advantage.formula


def test_without_the_min_a_token_that_has_left_the_range_the_wrong_way_has_no_gradient() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.5, 1.5], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([2.0, -2.0] * 3, dtype=torch.float64)
    batch = cast(Batch, SimpleNamespace(advantage=advantage))
    outputs = Outputs(logp=ratio.detach().log())

    def gradient(surrogate: Any) -> list[float]:
        [found] = torch.autograd.grad(surrogate(ratio, outputs, batch).sum(), ratio)
        return [float(value) for value in found]

    assert gradient(Clip(0.2, 0.2)) == [2, 0, 2, -2, 0, -2]
    assert gradient(ppo_ablation.ClipAlone()) == [0, 0, 2, -2, 0, 0]


def test_without_the_ratio_the_gradient_is_that_of_the_log_probability_however_far_the_policy_has_moved() -> None:
    logp = torch.tensor([-3.0, -0.1], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([2.0, -1.0], dtype=torch.float64)
    batch = cast(Batch, SimpleNamespace(advantage=advantage))
    gain = ppo_ablation.Stale()((logp + 1).exp(), Outputs(logp=logp), batch)
    [found] = torch.autograd.grad(gain.sum(), logp)
    assert torch.equal(found, advantage)


def test_a_run_has_collapsed_if_it_ends_below_half_of_its_best() -> None:
    assert ppo_ablation.collapsed({"evaluated": [[0, 0.3], [10, 0.5], [20, 0.2]]})
    assert ppo_ablation.collapsed({"evaluated": [[0, 0.6], [10, 0.5], [20, 0.29]]})
    assert not ppo_ablation.collapsed({"evaluated": [[0, 0.3], [10, 0.5], [20, 0.25]]})


# -- group-size --------------------------------------------------------------------------------------------------------


def test_arms_of_the_group_size_sample_and_update_alike_and_ppo_differs_in_its_advantage_alone() -> None:
    settings = group_size.EXPERIMENT.settings
    arms = group_size.arms(settings)
    assert {options["prompts"] * options["group"] for options in arms.values()} == {128}
    rows = {arm: algorithm_of(settings, **options) for arm, options in arms.items()}
    assert {row.epochs * row.minibatches for row in rows.values()} == {settings["minibatches"]}
    assert all(row.kl is None and row.aggregate == rows["ppo"].aggregate for row in rows.values())
    assert rows["ppo"].surrogate == rows["8"].surrogate and arms["ppo"]["group"] == arms["8"]["group"]
    with pytest.raises(UserError, match="a multiple of 128"):
        group_size.arms({**settings, "prompts": 12})


@pytest.mark.slow
def test_training_takes_more_memory_with_a_critic(tmp_path: Path) -> None:
    settings = {**TINY, "wide": 256, "deep": 2}
    start = worked.arena_of(tmp_path, 0, settings).start
    wide = wide_model(tmp_path / "wide", 0, settings)
    arms = group_size.arms(group_size.EXPERIMENT.settings)
    taken = {arm: peak_memory(tmp_path / "run", wide, start, 0, settings, arms[arm]) for arm in ("8", "ppo")}
    weights = 4 * sum(file.stat().st_size for file in Path(wide).glob("*.safetensors")) / 2**20
    assert taken["8"] > weights  # and their gradients and moments
    assert taken["ppo"] - taken["8"] > weights / 2


# -- the arena ---------------------------------------------------------------------------------------------------------


def test_unseen_tasks_are_in_no_practice() -> None:
    practice = {task["id"] for task in worked.tasks_of(worked.SIZES["tasks"], 0, worked.SIZES)}
    assert not practice & {task["id"] for task in worked.unseen(0, worked.SIZES)}


@pytest.mark.parametrize(
    "reply, worth",
    [
        ("1+2=3\n3+3=6", 1.0),
        ("1+2+3=6", 1.0),
        ("1+2=4\n4+2=6", 0.0),  # adds a number that is not left
        ("1+2=4\n4+3=6", 0.0),  # two errors that cancel out
        ("1+2=3\n3+3=7", 0.0),
        ("3+3=6", 0.0),
        ("1+2=3\n3+3=6\n", 0.0),
        ("1+2=3\n\n3+3=6", 0.0),
        ("6", 0.0),
        ("", 0.0),
    ],
)
def test_a_reply_earns_only_if_its_every_line_is_right_to_the_last(reply: str, worth: float) -> None:
    assert worked.every_line({"numbers": [1, 2, 3]}, reply) == worth


def rollout(text: str) -> Rollout:
    return Rollout({"numbers": [1, 2, 3]}, "a group", [], 0.0, text=text)


def test_share_of_right_lines_is_of_the_replies_that_end_right() -> None:
    right, guessed, wrong = rollout("1+2=3\n3+3=6"), rollout("1+2=4\n4+3=6"), rollout("1+2=3\n3+3=7")
    assert worked.share_of_lines([right, guessed, wrong, wrong]) == 0.5
    assert worked.share_of_lines([guessed]) == 0.0 and worked.share_of_lines([wrong]) is None


def test_demonstrators_of_the_checked_arena_add_from_left_to_right_within_the_budget_and_err_as_often_as_told() -> None:
    settings = {**worked.CHECKED_SIZES, "tasks": 500}
    tasks = worked.tasks_of(settings["tasks"], 0, settings)
    numbers, shown = {task["prompt"]: task["numbers"] for task in tasks}, worked.demonstrations(tasks, 0, settings)
    lines = [worked_sums.checked(numbers[row["prompt"]], row["response"]) for row in shown]
    assert all(worked.is_working(numbers[row["prompt"]], row["response"]) for row in shown)
    assert max(len(row["response"]) for row in shown) < settings["max_tokens"]
    first = [row["response"].split("=")[0].split("+") for row in shown]
    assert all(
        list(map(int, added)) == numbers[row["prompt"]][: len(added)] for row, added in zip(shown, first, strict=True)
    )
    found = [line for reply in lines for line in reply]
    assert sum(not line.right for line in found) / len(found) == pytest.approx(settings["slips"], abs=0.02)
    assert sum(line.joined == 2 for line in found) / len(found) == pytest.approx(0.2, abs=0.05)


def test_means_over_replies_differ_from_the_token_mean_in_nothing_that_punishes_length() -> None:
    settings = overlong.EXPERIMENT.there(worked.CHECKED).settings
    how = {"minibatches": settings["minibatches"], "kl": 0.0}
    rows = {arm: algorithm_of(settings, **how, **options) for arm, options in overlong.arms(settings).items()}
    plain, mean, gspo = (rows[arm] for arm in (overlong.NONE, overlong.REPLY_MEAN, overlong.GSPO))
    assert vars(mean) == {**vars(plain), "aggregate": mean.aggregate} and mean.aggregate == gspo.aggregate
    assert mean.aggregate == SequenceMean() and plain.aggregate == TokenMean()
    assert gspo.advantage == plain.advantage and gspo.ratio and not plain.ratio
    assert not any(row.filters or row.shaping or row.kl for row in (plain, mean))


def test_an_arena_is_the_usual_one_unless_the_settings_name_the_other(tmp_path: Path) -> None:
    usual = Arena([], "arithmetic", "start")
    assert worked.opened(lambda *_: usual, tmp_path, 0, {"arena": ""}) is usual


@pytest.mark.slow
def test_a_run_leaves_a_point_for_each_step_and_a_policy_that_is_examined(tmp_path: Path) -> None:
    arena: Arena = worked.arena_of(tmp_path, 0, TINY)
    how = {"algorithm": "grpo", "aggregate": "token-mean", "kl": 0.0, "prompts": 2, "group": 4, "eval_every": 1}
    run, found = worked.practise(arena, tmp_path, "an arm", 0, TINY, silent, **how)
    assert [step for step, _ in found["evaluated"]] == [0, 1, 2] and found["seconds"] > 0
    assert all(len(curve) == 2 for curve in found["curves"].values())
    sampled = worked.examined(checkpoint_of(run), 0, TINY, samples=2)
    assert sampled["accuracy"] <= sampled["pass@2"] and 0 < sampled["entropy"] < math.log(40)
    assert worked.examined(checkpoint_of(run), 0, TINY, temperature=0.0, samples=1)["entropy"] == 0.0
    assert worked.examined(checkpoint_of(run), 0, TINY, env=anything, samples=1)["accuracy"] == 1.0
    assert len(found["curves"]["lines"]) == 2


def anything(task: Task, reply: str) -> float:
    return 1.0


@pytest.mark.slow
def test_a_start_is_trained_once_and_again_if_anything_it_learns_from_changes(tmp_path: Path) -> None:
    shown = worked.tasks_of(8, 0, TINY)

    def begun(seed: int = 0, shown: Any = shown, lr: float = 1e-3) -> int:
        start = worked.imitation(shown, tmp_path / "start", seed, steps=1, context=40, hidden=16, layers=1, lr=lr)
        return (Path(start) / "config.json").stat().st_mtime_ns

    first = begun()
    assert begun() == first
    for changed in ({"seed": 1}, {"shown": shown[1:]}, {"lr": 2e-3}):
        assert begun(**changed) != begun(), changed
