"""recipes/process_rewards.py: the cells of the grid exist, and whole replies are ranked by what each source rewards."""

from __future__ import annotations

from typing import Any

import pytest
from recipe_modules import recipe_module

from posttrain import Rollout
from posttrain.config.inference import Evaluation
from posttrain.config.resolve import filled, validate
from posttrain.config.training import RL
from posttrain.core.types import StopReason

process = recipe_module("process_rewards")
OFFLINE = ("dpo", "sft")


@pytest.mark.parametrize("name", list(process.ARMS | process.CELLS))
def test_every_arm_and_cell_has_options_that_exist(name: str) -> None:
    options = dict((process.ARMS | process.CELLS)[name])
    common = {"tasks": "x", "model": "x", "env": process.WORKED_SUMS.env}
    if options["algorithm"] in OFFLINE:
        del options["algorithm"]
        validate(filled(Evaluation, {**common, **options}))
    else:
        validate(filled(RL, {**process.WORKED_SUMS.common, **common, **options, "eval_tasks": ("x",)}))


def test_the_grid_has_every_source_with_every_credit_and_only_the_model_alone_leaves_the_rule_out() -> None:
    names = [process.arm(source, credit) for source in process.SOURCES for credit in process.CREDIT]
    assert len(set(names)) == len(names) == 15 and set(names) == set(process.CELLS)
    unscored = {name for name, options in process.CELLS.items() if options.get("env") == "unscored"}
    assert unscored == {process.arm(process.ALONE, credit) for credit in process.CREDIT}
    asked = {name for name, options in process.CELLS.items() if "reward_model" in options}
    assert asked == set(names) - {process.arm(process.RULE, credit) for credit in process.CREDIT}


def reply(text: str, reward: float, stop: StopReason = StopReason.EOS) -> Rollout:
    task = {"id": "1 2", "prompt": "1 2:", "numbers": [1, 2], "answer": 3}
    return Rollout(task, "g", [], reward, text=text, stop=stop)


def test_a_reply_that_was_cut_off_is_learned_without_an_end() -> None:
    group = [reply("1+2=3", 0.2), reply("1+2=3\n3+", 0.9, StopReason.LENGTH), reply("1+2=4", 0.4)]
    pairs: list[dict[str, Any]] = process.best_and_worst([group])
    assert pairs == [{"prompt": "1 2:", "chosen": "1+2=3\n3+", "rejected": "1+2=3", "chosen_stop": "length"}]
    assert process.chosen(pairs) == [{"prompt": "1 2:", "response": "1+2=3\n3+", "response_stop": "length"}]


def test_a_source_is_judged_by_the_exact_answer() -> None:
    group = [reply("1+2=3", 0.2), reply("1+2=4", 0.2), reply("1+2=5", 0.1)]
    assert process.agreement([group], process.right_answer) == (0.5 + 1) / 2


def test_the_grid_shows_the_mean_the_interval_and_every_seed() -> None:
    found = {
        f"{name} {seed}": {"accuracy": 0.5 + seed / 10, "agrees": 0.75} for name in process.CELLS for seed in (0, 1)
    }
    found |= {f"start {seed}": {"accuracy": 0.3} for seed in (0, 1)}
    found |= {f"{process.MODEL} {seed}": {"area_under_the_curve": 0.9} for seed in (0, 1)}
    lines = process.grid_table(found, [0, 1])
    assert lines[0] == "The start: 0.300."
    assert lines[4].startswith("| rule | 0.550 [") and lines[4].count("0.550 [") == 5
    assert "\n".join(lines).count("0.500, 0.600") == 15 and "0.750" in lines[-2] and "0.900" in lines[-1]
