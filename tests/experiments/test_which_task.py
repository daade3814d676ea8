"""The order of tasks and the cold start: what arms share, what they spend, and what their claims read."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments import cold_start, curriculum, worked
from experiments.experiment import Numbers, Verdict
from posttrain.config.resolve import filled, validate
from posttrain.config.training import RL
from posttrain.core.rollouts import Rollout
from posttrain.core.types import StopReason, Task, UserError
from posttrain.envs.builtin import worked_sums

ORDERS: dict[str, Any] = {
    **curriculum.EXPERIMENT.settings, "levels": [3, 4], "tasks": [16, 16], "unseen": [2, 2], "imitation_epochs": 1.0,
    "steps": 4, "prompts": 2, "group": 2, "max_tokens": 8, "minibatches": 1, "eval_every": 2,
}  # fmt: skip
STAGES: dict[str, Any] = {
    **cold_start.EXPERIMENT.settings, "largest": 3, "tasks": 64, "unseen": 2, "imitation_epochs": 30.0, "slips": 0.0,
    "scribble": 0.0, "good": 8, "sft_epochs": 1.0, "dpo_epochs": 1.0, "steps": 6, "drawn": 2, "first_steps": 1, "prompts": 4,
    "group": 8, "minibatches": 1, "eval_every": 2,
}  # fmt: skip
SEEDS = range(5)


def silent(text: str) -> None:
    pass


def wavering(seed: int) -> float:
    """A little noise, so that the seeds have an interval."""
    return 0.01 * (seed % 3)


# -- curriculum --------------------------------------------------------------------------------------------------------


def test_held_out_tasks_of_every_level_are_in_no_practice() -> None:
    settings = curriculum.EXPERIMENT.settings
    practice = curriculum.levels_of(settings["tasks"], 0, settings)
    unseen = curriculum.levels_of(settings["unseen"], 0, settings, held_out=True)
    assert list(practice) == list(unseen) == settings["levels"]
    for level in settings["levels"]:
        assert {task["level"] for task in practice[level] + unseen[level]} == {level}
        assert all(len(task["numbers"]) == level for task in practice[level] + unseen[level])
        assert not {task["id"] for task in practice[level]} & {task["id"] for task in unseen[level]}
    assert all(count >= settings["prompts"] for count in settings["tasks"])  # or no stage fills a step


def test_orders_differ_in_the_curriculum_alone_which_is_that_of_training() -> None:
    settings = curriculum.EXPERIMENT.settings
    common = {"tasks": "generated", "env": worked.ENV, "model": "start"}
    configs = {arm: filled(RL, {**common, **options}) for arm, options in curriculum.arms(settings).items()}
    assert {arm: config.curriculum for arm, config in configs.items()} == {arm: arm for arm in curriculum.ARMS}
    for config in configs.values():
        validate(config)
        changed = {name for name, value in asdict(config).items() if value != asdict(configs["uniform"])[name]}
        assert all(name.startswith("curriculum") for name in changed)


@pytest.mark.slow
def test_orders_share_the_start_and_the_number_of_rollouts_and_leave_accuracies_by_level(tmp_path: Path) -> None:
    found = curriculum.measure(0, ORDERS, tmp_path, silent)
    assert len({str(found[arm]["sets"]["of-3"][0] + found[arm]["sets"]["of-4"][0]) for arm in found}) == 1
    for arm in found.values():
        assert [step for step, _ in arm["sets"]["of-4"]] == [0, 2, 4]
        assert len(arm["curves"]["level"]) == len(arm["curves"]["groups/no_signal"]) == ORDERS["steps"]
    assert found["stages"]["curves"]["level"][0] == min(ORDERS["levels"])


def ordered(seed: int, easy: float, hard: float, silent_groups: float) -> Numbers:
    levels = curriculum.EXPERIMENT.settings["levels"]
    ends = {curriculum.named(n): hard if n == max(levels) else easy for n in levels}
    evaluated = {name: [[0, 0.1], [10, end + wavering(seed)]] for name, end in ends.items()}
    curves = {"groups/no_signal": [silent_groups - wavering(seed), silent_groups], "level": [2.0, 3.0]}
    return {"sets": evaluated, "curves": curves}


def test_claims_on_orders_are_seen_if_the_curricula_are_better_and_contradicted_if_they_are_worse() -> None:
    settings = curriculum.EXPERIMENT.settings
    plain = {0: (0.4, 0.2, 0.5)}
    better = {"solve-rate": (0.6, 0.4, 0.3), "stages": (0.3, 0.5, 0.5)}
    worse = {"solve-rate": (0.3, 0.1, 0.7), "stages": (0.6, 0.1, 0.2)}

    def verdicts(found: dict[str, tuple[float, float, float]]) -> list[Verdict]:
        numbers = {
            seed: {
                "uniform": ordered(seed, *plain[0]),
                **{arm: ordered(seed * 2, *figures) for arm, figures in found.items()},
            }
            for seed in SEEDS
        }
        return curriculum.conclude(numbers, settings).verdicts

    assert verdicts(better) == [Verdict.SEEN] * 3
    assert verdicts(worse) == [Verdict.CONTRADICTED] * 3


def test_levels_count_alike_however_many_tasks_they_have() -> None:
    arm = {"sets": {"of-2": [[0, 0.0], [1, 1.0]], "of-3": [[0, 0.5], [1, 0.0]]}}
    assert curriculum.over_levels(arm) == 0.5 and curriculum.over_levels(arm, 0) == 0.25
    assert curriculum.at_level(2, arm) == 1.0


# -- cold-start --------------------------------------------------------------------------------------------------------


def reply(text: str, right: bool, stop: StopReason = StopReason.EOS, numbers: tuple[int, ...] = (1, 2)) -> Rollout:
    task: Task = {"prompt": "".join(map(str, numbers)), "numbers": list(numbers)}
    return Rollout(task, "0", [], float(right), stop=stop, text=text)


def test_a_pair_is_a_right_and_a_wrong_reply_to_the_same_task_and_no_reply_is_in_two() -> None:
    other = (2, 2)
    rollouts = [
        reply("1+2=3", True), reply("2+1=3", True), reply("1+2=4", False), reply("1+2=5", False, StopReason.LENGTH),
        reply("2+2=4", True, numbers=other), reply("3+3=6", False, numbers=(3, 3)),
    ]  # fmt: skip
    assert cold_start.pairs(rollouts) == [{"prompt": "12", "chosen": "1+2=3", "rejected": "1+2=4"}]


def test_only_right_workings_that_ended_are_accepted_and_each_of_them_once() -> None:
    rollouts = [
        reply("1+2=3", True), reply("1+2=3", True), reply("3", True), reply("2+1=3", True, StopReason.LENGTH),
        reply("1+2=4", False),
    ]  # fmt: skip
    assert cold_start.accepted(rollouts) == [{"prompt": "12", "response": "1+2=3"}]


def test_a_working_may_be_wrong_but_adds_all_numbers() -> None:
    assert worked.is_working([1, 2, 3], "1+2=3\n3+3=6") and worked.is_working([1, 2, 3], "1+2=4\n4+3=8")
    assert worked.is_working([1, 2, 3], "3+2+1=6")
    for wrong in ("6", "", "1+2=3", "1+2=3\n4+3=7", "1+2=3\n3+3=6\n6", "3+1=4\n4+2=6\n6+6=12"):
        assert not worked.is_working([1, 2, 3], wrong)


def test_good_demonstrations_are_right_and_the_base_reads_scribble_in_the_share_that_is_set() -> None:
    settings = cold_start.EXPERIMENT.settings
    tasks = worked.tasks_of(settings["tasks"], 0, settings)
    by_prompt = {task["prompt"]: task for task in tasks}
    shown = cold_start.good(tasks, 0, settings)
    assert len(shown) == settings["good"]
    for row in shown:
        task = by_prompt[row["prompt"]]
        assert worked_sums.reward(task, row["response"]) == {"outcome": 1.0}
        assert worked.is_working(task["numbers"], row["response"])
    read = cold_start.untaught(tasks, 0, settings)
    formed = np.mean([worked.is_working(by_prompt[row["prompt"]]["numbers"], row["response"]) for row in read])
    assert abs(1 - formed - settings["scribble"]) < 0.03
    assert sorted(cold_start.scribble(random.Random(0), "1+2=3")) == sorted("1+2=3")


def test_budgets_are_equal_and_leave_steps_to_each_stage() -> None:
    settings = cold_start.EXPERIMENT.settings
    steps = cold_start.budget(settings)
    drawn = {"DPO, RL": settings["drawn"], "four stages": settings["drawn"]}
    assert {sum(parts) + drawn.get(arm, 0) for arm, parts in steps.items()} == {settings["steps"]}
    with pytest.raises(UserError, match="steps must be more than drawn and first-steps"):
        cold_start.budget({**settings, "drawn": settings["steps"] - settings["first_steps"]})


@pytest.mark.slow
def test_arms_that_practise_have_as_many_rollouts_and_both_that_start_cold_share_that_start(tmp_path: Path) -> None:
    found = cold_start.measure(0, STAGES, tmp_path, silent)
    each = STAGES["prompts"] * STAGES["group"]
    assert {found[arm]["rollouts"] for arm in cold_start.PRACTISED} == {each * STAGES["steps"]}
    assert found["DPO"]["rollouts"] == each * STAGES["drawn"]
    assert {found[arm]["rollouts"] for arm in ("base", "cold start", "SFT")} == {0}
    assert found["four stages"]["evaluated"][0] == found["SFT, RL"]["evaluated"][0]
    assert found["DPO, RL"]["evaluated"][0][0] == STAGES["drawn"]  # its pairs come first
    for arm in cold_start.PRACTISED:
        places = [step for step, _ in found[arm]["evaluated"]]
        assert places == sorted(places) and places[-1] == STAGES["steps"]
    assert all(set(arm["after"]) >= set(cold_start.FIGURES) for arm in found.values())


def staged(seed: int, **ends: float) -> Numbers:
    found: Numbers = {}
    for arm in cold_start.ARMS:
        accuracy = ends.get(arm.replace(", ", "_").replace(" ", "_"), 0.3) + wavering(seed + len(arm))
        after = dict.fromkeys(cold_start.FIGURES, accuracy)
        found[arm] = {
            "after": after,
            "evaluated": [[0, 0.1], [10, accuracy]],
            "rollouts": 8,
            "curves": {"entropy": [1.0]},
        }
    return found


def test_claims_on_the_cold_start_are_seen_and_contradicted_by_the_accuracies_they_name() -> None:
    def verdicts(**ends: float) -> list[Verdict]:
        numbers = {seed: staged(seed, **ends) for seed in SEEDS}
        return cold_start.conclude(numbers, cold_start.EXPERIMENT.settings).verdicts

    seen, contradicted = Verdict.SEEN, Verdict.CONTRADICTED
    assert verdicts(SFT_RL=0.6, four_stages=0.6) == [seen, seen, seen]
    assert verdicts(SFT_RL=0.1, SFT=0.3, four_stages=0.4) == [contradicted, contradicted, seen]
    assert verdicts(SFT_RL=0.6, RL=0.9, four_stages=0.3) == [contradicted, seen, contradicted]


def test_each_seed_draws_its_own_tasks_for_pairs_and_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "evaluate", lambda config, tasks: SimpleNamespace(rollouts=tasks))
    settings = {**cold_start.EXPERIMENT.settings, "drawn": 2, "prompts": 8}
    tasks = [{"id": str(number)} for number in range(100)]
    first, again, other = (cold_start.sampled("model", tasks, seed, settings) for seed in (0, 0, 1))
    assert first == again != other and len(first) == len({str(task) for task in first}) == 16
