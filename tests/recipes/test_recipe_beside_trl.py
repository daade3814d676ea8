"""GRPO beside TRL: both sides get the same prompts and sizes, and the table is what its numbers give."""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from conftest import tiny
from recipe_modules import recipe_module

from posttrain.cli.demo_command import questions
from posttrain.core.types import Reply
from posttrain.envs.play.load_env import load_env
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts

recipe: Any = recipe_module("real.beside_trl")
T_OF_TWO = 4.302652729911275  # Student's 97.5% quantile with two degrees of freedom


class Recorded:
    """Stands for TRL's trainer and its configuration: keeps what they are given."""

    given: dict[str, Any]
    state = SimpleNamespace(log_history=[{"loss": 0.5}])

    def __init__(self, **given: Any) -> None:
        self.given = given
        trainers.append(self)

    def train(self) -> None:
        [clock] = self.given["callbacks"]
        for step in range(1, self.given["args"].given["max_steps"] + 1):
            clock.on_step_end(None, SimpleNamespace(global_step=step), None)


trainers: list[Recorded] = []
SAME = {"learning_rate": "lr", "seed": "seed", "num_generations": "group", "max_completion_length": "max_tokens",
        "max_steps": "steps", "max_grad_norm": "max_grad_norm", "lr_scheduler_type": "schedule"}  # fmt: skip


@pytest.fixture
def trl_grpo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's side, with a trainer that only keeps what it is given, and without the libraries that load it."""
    trl, transformers, datasets = (cast(Any, ModuleType(name)) for name in ("trl", "transformers", "datasets"))
    trl.GRPOConfig = trl.GRPOTrainer = Recorded
    transformers.TrainerCallback, transformers.AutoTokenizer = object, SimpleNamespace(from_pretrained=str)
    transformers.logging = SimpleNamespace(set_verbosity_error=list)
    datasets.Dataset = SimpleNamespace(from_list=list)
    for module in (trl, transformers, datasets):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "recipes.real.trl_grpo", None)
    del sys.modules["recipes.real.trl_grpo"]  # and after the test again
    for name in ("HF_HUB_OFFLINE", "TRL_EXPERIMENTAL_SILENCE"):
        monkeypatch.setenv(name, "1")
    trainers.clear()
    return recipe_module("real.trl_grpo")


def test_both_sides_train_on_the_same_prompts_with_the_same_sizes(
    tokenizer: Tokenizer, tmp_path: Path, trl_grpo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PROMPTS": 4, "GROUP": 8, "LONGEST": 6, "EVERY": 1}.items():
        monkeypatch.setattr(recipe, name, value)
    save_model(tiny(tokenizer, context=64), tmp_path / "model", tokenizer)
    ours, theirs = tmp_path / "posttrain-3", tmp_path / "trl-3"
    recipe.ours(ours, str(tmp_path / "model"), 3, 2)
    python = tmp_path / "python"  # stands for the one of TRL's environment
    python.write_text('#!/bin/sh\necho "$OMP_NUM_THREADS threads: $1 $2"\n')
    python.chmod(0o755)
    recipe.theirs(theirs, python, str(tmp_path / "model"), 3, 2, ours)
    script, settings = (theirs / "output.txt").read_text().removeprefix("1 threads: ").split()
    assert Path(script) == Path(trl_grpo.__file__)

    monkeypatch.setattr(sys, "argv", [script, settings])
    trl_grpo.main()
    config, trainer = trainers
    known = {task["id"]: task for task in questions("+*", range(10), 3)}
    held_out = {task["id"] for task in questions("+*", range(10), 3)[: recipe.HELD_OUT]}
    asked = [one["task"] for step in (1, 2) for one in read_rollouts(ours, step, ("task",))]
    in_order = [task for place, task in enumerate(asked) if place % 8 == 0]
    assert asked == [task for task in in_order for _ in range(8)] and not held_out & set(asked)
    rows = trainer.given["train_dataset"]
    assert rows == [
        {"prompt": [{"content": known[id]["prompt"], "role": "user"}], "answer": known[id]["answer"]} for id in in_order
    ]
    given = config.given
    assert given["per_device_train_batch_size"] * given["gradient_accumulation_steps"] == 4 * 8
    options = json.loads((ours / "run.json").read_text())["config"]
    for theirs_of, name in SAME.items():
        assert given[theirs_of] == options[name], name
    assert not given["shuffle_dataset"] and json.loads((theirs / "log.json").read_text()) == [{"loss": 0.5}]
    assert [recipe.checkpoint(ours, "posttrain", step).is_dir() for step in (1, 2)] == [True, True]
    assert recipe.checkpoint(theirs, "TRL", 2) == theirs / "checkpoint-2"
    for out, side in ((ours, "posttrain"), (theirs, "TRL")):
        first, both = (recipe.seconds(out, side, step) for step in (1, 2))
        assert 0 < first < both


def test_rewards_of_both_sides_agree_on_whole_numbers(trl_grpo: Any) -> None:
    reward = load_env("verify:numeric")
    replies = ["12", "3 + 9 = 12.", "12 apples", "the answer is **12**", "1,012", "-12", "= 13", "none", "", "12 or 13"]
    theirs = [float(trl_grpo.last_number(reply) == "12") for reply in replies]
    assert theirs == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert theirs == [reward({"answer": "12"}, Reply(reply)) for reply in replies]


def curve(accuracy: float, seconds: float) -> dict[str, Any]:
    return {"step": [0, 5, 10], "accuracy": [0.25, accuracy - 0.1, accuracy], "seconds": [0.0, seconds / 2, seconds]}


def test_table_has_means_and_students_intervals_over_seeds() -> None:
    ours, theirs = (0.8, 0.9, 0.85), (0.7, 0.9, 0.8)
    found = {f"posttrain {seed}": curve(ours[seed], 100.0 + 10 * seed) for seed in range(3)}
    found |= {f"TRL {seed}": curve(theirs[seed], 400.0) for seed in range(3)}

    def over(values: list[float], form: str = ".3f") -> str:
        mean, half = statistics.mean(values), T_OF_TWO * statistics.stdev(values) / math.sqrt(3)
        return f"{mean:{form}} [{mean - half:{form}}, {mean + half:{form}}]"

    head, _, first, second, _, end = recipe.table(found, [0, 1, 2])
    assert head == "| | after 0 | after 5 | after 10 | seconds a step |"
    assert first.split(" | ")[3:] == [over([*ours]), f"{over([10.0, 11.0, 12.0], '.1f')} |"]
    assert second.split(" | ")[0] == "| TRL" and second.split(" | ")[3] == over([*theirs])
    assert over([0.1, 0.0, 0.05], "+.3f") in end and "0.800 and 0.700, 0.900 and 0.900, 0.850 and 0.800" in end
    assert over([4.0, 400 / 110, 400 / 120], ".1f") in end

    alone = recipe.table(found, [1])
    assert alone[2] == "| posttrain | 0.250 | 0.800 | 0.900 | 11.0 |" and "minus TRL +0.000 (0.900" in alone[-1]


def test_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = {f"{side} {seed}": curve(0.5 + 0.1 * seed, 60.0) for side in recipe.SIDES for seed in range(2)}
    recipe.draw(found, [0, 1], tmp_path / "a" / "curves.png")
    assert (tmp_path / "a" / "curves.png").read_bytes().startswith(b"\x89PNG")
