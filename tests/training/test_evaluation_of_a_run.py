"""A run is evaluated as it was trained, on the tasks that it held out, but for what is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sums import QUICK, SMALL, SUMS

import posttrain
from posttrain.cli.main import main
from posttrain.config.training import RL
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.trained_options import evaluation_options
from posttrain.training.setup import split_tasks

REWARD = """
SUCCESS = 0.5
def reward(task, reply, *, most=9):
    return min(len(reply), most) / 10
"""
TRAINED = ["--env", "my.py:reward,most=2", "--tasks", "sums.jsonl", "--max-tokens", "3", "--temperature", "0.5"]
SHORT = ["--steps", "1", "--prompts", "2", "--group", "2", "--threads", "1", "--quiet", "--no-compiled"]

QUICKLY: dict[str, Any] = {"threads": 1, "compiled": False}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, a reward, a model, and runs: one that held out a share, one with rows of its own, one without."""
    place = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        (place / "my.py").write_text(REWARD)
        for name, rows in (("sums", SUMS), ("other", SUMS[:4])):
            (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        posttrain.sft("sums.jsonl", out="start", steps=1, compiled=False, **SMALL, **QUICK)
        words = ["rl", "--model", "start", *TRAINED, *SHORT]
        assert main([*words, "--held-out", "0.3", "--seed", "5", "--out", "share"]) == 0
        assert main([*words, "--eval-tasks", "other.jsonl", "--out", "file"]) == 0
        assert main([*words, "--out", "nothing"]) == 0
    return place


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def held_out(**options: Any) -> set[str]:
    _, unseen = split_tasks(RL(tasks="sums.jsonl", **options), None)
    assert unseen is not None
    return {str(task["id"]) for task in unseen.examples(99)}


def test_a_run_alone_is_evaluated_on_its_held_out_tasks_with_its_reward_and_limits(place: Path) -> None:
    found = posttrain.evaluate(model="share", samples=2, **QUICKLY)
    assert set(found.rewards) == held_out(held_out=0.3, seed=5)
    assert all(rollout.n_sampled <= 3 and rollout.reward <= 0.2 for rollout in found.rollouts)
    assert found.figures["accuracy"]["mean"] == 0, "SUCCESS belongs to the reward"
    [line] = [note for note in found.notes if note.startswith("taken from share: ")]
    for told in ("env my.py:reward,most=2", "tasks sums.jsonl", "max_tokens 3", "temperature 0.5", "held_out 0.3"):
        assert told in line


def test_a_checkpoint_in_a_run_is_evaluated_as_the_run(place: Path) -> None:
    [checkpoint] = (place / "file" / "checkpoints").iterdir()
    found = posttrain.evaluate(model=checkpoint, samples=1, **QUICKLY)
    assert set(found.rewards) == {row["id"] for row in SUMS[:4]}


def test_an_evaluation_samples_what_the_run_sampled_in_its_own_with_the_same_seed(place: Path) -> None:
    steps = [int(path.name.removeprefix("step-")) for path in (place / "file" / "checkpoints").iterdir()]
    own = {row["task"]: row["text"] for row in read_rollouts(place / "file", max(steps), held_out=True)}
    found = posttrain.evaluate(model="file", samples=1, seed=0, **QUICKLY)
    assert len(own) == 4 and {str(r.task["id"]): r.text for r in found.rollouts} == own
    other = posttrain.evaluate(model="file", samples=1, seed=1, **QUICKLY)
    assert {str(r.task["id"]): r.text for r in other.rollouts} != own


def test_options_that_are_given_replace_those_of_the_run(place: Path) -> None:
    found = posttrain.evaluate("other.jsonl", model="share", max_tokens=1, success=0.1, samples=1, **QUICKLY)
    assert len(found.rewards) == 4 and all(rollout.n_sampled == 1 for rollout in found.rollouts)
    [line] = [note for note in found.notes if note.startswith("taken from share: ")]
    assert "max_tokens" not in line and "tasks" not in line and "held_out" not in line and "env my.py" in line
    other = posttrain.evaluate("other.jsonl", lambda task, reply: 0.25, "share", samples=1, **QUICKLY)
    assert set(map(tuple, other.rewards.values())) == {(0.25,)} and "accuracy" not in other.figures


def test_an_evaluation_leaves_no_tables_of_an_older_one(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "eval --model share --samples 2 --temperature 0 --threads 1 --no-compiled --out ev.json".split()
    others = [place / name for name in ("eve.rollouts.parquet", "ev.against-x.rollouts.parquet")]
    for other in others:
        other.write_text("mine")
    assert main([*words, "--against", "file", "start"]) == 0
    tables = [place / f"ev{side}.rollouts.parquet" for side in ("", ".against", ".against-2")]
    assert all(table.exists() for table in tables)
    assert main([*words, "--overwrite"]) == 0
    assert [table.exists() for table in tables] == [True, False, False] and all(o.read_text() == "mine" for o in others)
    assert "at --temperature 0 the 2 samples of a task are the same reply" in capsys.readouterr().err


def test_the_file_that_a_run_learned_from_is_never_evaluated_on_trained_tasks(place: Path) -> None:
    found = posttrain.evaluate("sums.jsonl", model="share", samples=1, **QUICKLY)
    assert set(found.rewards) == held_out(held_out=0.3, seed=5)
    rows = posttrain.evaluate(SUMS, model="share", samples=1, **QUICKLY)
    assert len(rows.rewards) == len(SUMS), "rows as objects are evaluated on as they are"


def test_a_run_that_holds_out_nothing_needs_tasks(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", "nothing"]) == 2
    assert "nothing holds out no tasks: name some that it does not train on with --tasks" in capsys.readouterr().err
    assert main(["eval", "--model", "start"]) == 2, "a run of sft has no reward"
    assert "--tasks is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trained", "given", "found"),
    [
        ({"eval_tasks": ["a=x.jsonl"], "split": "s"}, {}, {"tasks": "x.jsonl"}),
        ({"held_out": 0.1, "seed": 4, "limit": 9, "split": "s"}, {},
         {"tasks": "t", "held_out": 0.1, "split_seed": 4, "limit": 9, "split": "s"}),
        ({"held_out": 0.1}, {"tasks": "u"}, {}),
        ({"held_out": 0.1, "split_seed": 2, "seed": 4}, {"tasks": "t"}, {"held_out": 0.1, "split_seed": 2}),
        ({"env": "e", "success": 0.5, "judge": ["j"], "fields": {"a": "b"}}, {"tasks": "u"},
         {"env": "e", "success": 0.5, "judge": ["j"], "fields": {"a": "b"}}),
        ({"env": "e", "success": 0.5, "fields": {"a": "b"}, "stop": ["."]}, {"tasks": "u", "env": "f"}, {"stop": ["."]}),
        ({"env": "e", "step_delimiter": "line"}, {"tasks": "u", "search": ("beam",), "reward_model": ("r",)}, {"env": "e"}),
        ({"eval_tasks": "x.jsonl"}, {}, {"tasks": "x.jsonl"}),
        ({"held_out": 0.1, "seed": 4}, {"tasks": "./t"}, {"held_out": 0.1, "split_seed": 4}),
        ({"held_out": 0.1, "env": "e"}, {"env": "harbor:tests/harbor_tasks"}, {}),
        ({"steps": 9, "lr": 0.1, "prompts": 4, "algorithm": "grpo", "held_out": 0.2}, {"tasks": "u"}, {}),
    ],
)  # fmt: skip
def test_what_follows_from_training(trained: dict[str, Any], given: dict[str, Any], found: dict[str, Any]) -> None:
    assert evaluation_options({"tasks": "t", **trained}, given, "it") == found


@pytest.mark.parametrize(
    ("trained", "told"),
    [
        (
            {"tasks": "12 rows in memory", "held_out": 0.2},
            "it got its tasks from a program: give a file of them with --tasks",
        ),
        ({"tasks": "rows made by f", "held_out": 0.2}, "it got its tasks from a program"),
        ({"held_out": "lots"}, "it: held_out and seed must be numbers, eval_tasks names of files: could not convert"),
        ({"eval_tasks": [1]}, "it: held_out and seed must be numbers, eval_tasks names of files"),
        ({"held_out": 0.1, "seed": [1]}, "it: held_out and seed must be numbers, eval_tasks names of files"),
    ],
)
def test_a_damaged_record_and_tasks_of_a_program_are_refused_in_one_line(trained: dict[str, Any], told: str) -> None:
    with pytest.raises(posttrain.UserError) as caught:
        evaluation_options({"tasks": "t", **trained}, {}, "it")
    assert told in str(caught.value)


def test_several_sets_and_mixtures_are_named() -> None:
    with pytest.raises(posttrain.UserError, match=r"several sets, a \(x\), b \(y\): choose one with --tasks"):
        evaluation_options({"eval_tasks": ["a=x", "b=y"]}, {}, "it")
    with pytest.raises(
        posttrain.UserError, match="learns a mixture: name tasks of one part with --tasks, and its --env"
    ):
        evaluation_options({"tasks": "", "mixture": {"a": {}}, "held_out": 0.1}, {}, "it")


def test_a_recipe_of_rl_alone_evaluates_its_model_before_it_has_run_and_its_run_afterwards(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ['model = "start"', 'tasks = "sums.jsonl"', 'env = "my.py:reward,most=2"', "held-out = 0.3", "seed = 5"]
    recipe = place / "recipe.toml"
    recipe.write_text("\n".join(["[rl]", *lines, "max_tokens = 2", "prompts = 2", "group = 2", 'out = "later"', ""]))
    words = "eval --config recipe.toml --samples 1 --threads 1 --no-compiled --out found.json --overwrite".split()
    assert main(words) == 0
    told = capsys.readouterr()
    assert "taken from [rl] of recipe.toml: model, " in told.err and "start" in told.out
    found = json.loads((place / "found.json").read_text())
    assert set(found["rewards"]) == held_out(held_out=0.3, seed=5)
    assert main([*words, "--tasks", "other.jsonl"]) == 0
    capsys.readouterr()
    assert len(json.loads((place / "found.json").read_text())["rewards"]) == 4
    recipe.write_text(recipe.read_text().replace('"later"', '"share"'))
    assert main(words) == 0
    told = capsys.readouterr()
    assert "evaluating share, the run of [rl] of recipe.toml" in told.err and "taken from share: " in told.out
    assert set(json.loads((place / "found.json").read_text())["rewards"]) == held_out(held_out=0.3, seed=5)


def test_check_reads_the_rows_and_the_environment_of_a_recipe_of_rl(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ['tasks = "sums.jsonl"', 'env = "my.py:reward,most=2"', "limit = 1000", "prompts = 2", 'algorithm = "grpo"']
    (place / "recipe.toml").write_text("\n".join(["[rl]", *lines, ""]))
    assert main(["check", "--config", "recipe.toml"]) == 0
    assert "taken from [rl] of recipe.toml: tasks, env" in capsys.readouterr().err
    assert main(["check", "--config", "recipe.toml", "--tasks", "missing.jsonl"]) == 2
    assert "missing.jsonl" in capsys.readouterr().err, "what is given decides"


def test_a_model_without_a_chat_template_is_compared_in_that_of_the_other(place: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in SUMS[:3]]
    learned = [{"prompt": row["prompt"], "response": row["response"]} for row in SUMS]
    sizes = {**SMALL, "context": 256}
    for name, more in (("plain", {}), ("chatty", {"chat_template": "chatml", "chat": True})):
        posttrain.sft(learned, out=name, steps=1, overwrite=True, compiled=False, **sizes, **QUICK, **more)
    with pytest.raises(posttrain.UserError, match="no chat template"):
        posttrain.evaluate(rows, lambda task, reply: 1.0, "plain", samples=1, **QUICKLY)
    for model, against in (("chatty", "plain"), ("plain", "chatty")):
        found = posttrain.evaluate(
            rows, lambda task, reply: 1.0, model, against=against, samples=1, max_tokens=2, **QUICKLY
        )
        assert [
            note for note in found.notes if note.startswith("plain: without a chat template of its own: messages are")
        ]
        assert {r.prompt for r in found.rollouts} == {r.prompt for r in found.against[0].rollouts}
    with pytest.raises(
        posttrain.UserError, match="plain/checkpoints/.*: this model has no chat template|plain.*no chat"
    ):
        posttrain.evaluate(rows, lambda task, reply: 1.0, "plain", against="start", samples=1, **QUICKLY)
