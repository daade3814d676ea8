"""Held-out tasks are the same for runs of different seeds where that is asked for, and whoever has learned them is named."""

import json
from pathlib import Path

import pytest

from posttrain.config.inference import Evaluation
from posttrain.config.training import RL, SFT
from posttrain.data.rows import load_rows
from posttrain.data.tasks import to_tasks
from posttrain.runs import fingerprint
from posttrain.runs.run_record import RunRecord
from posttrain.training.held_out_check import overlap, split_seed_of, trained_on
from posttrain.training.setup import split_tasks
from posttrain.training.verbs.evaluate import _held_out


@pytest.fixture(autouse=True)
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}?", "response": str(n)}) + "\n" for n in range(200)))
    return file


def held_out(seed: int, split_seed: int | None, share: float = 0.2) -> set[str]:
    config = SFT(tasks="tasks.jsonl", held_out=share, seed=seed, split_seed=split_seed)
    own, other = split_tasks(config, None, need=("prompt", "response"))
    assert other is not None
    prompts = [{str(task["prompt"]) for task in part.examples(200)} for part in (own, other)]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 200
    return prompts[1]


def run_of(name: str, tasks: Path, **config: object) -> str:
    told = {"inputs": {"tasks": fingerprint.of_path(tasks)}}
    RunRecord.create(
        Path(name), {"seed": 0, "held_out": 0.2, "split_seed": None, "model": None, **config}, "rl", told
    ).close({})
    (Path(name) / "checkpoints" / "step-000001").mkdir(parents=True)
    return name


def trained(rows: list[dict[str, object]], others: list[dict[str, object]], seed: int | None = 3) -> list[str]:
    own = to_tasks(load_rows(rows), need=(), split_seed=seed)
    return trained_on(own, {"hard": to_tasks(load_rows(others), need=())}, 3)


@pytest.mark.parametrize("seed", [3, 4, None])  # of the draws that the tasks come with
def test_separate_rows_that_are_trained_on_are_counted_by_their_prompts(seed: int | None) -> None:
    rows: list[dict[str, object]] = [{"prompt": f"{n}?", "answer": n} for n in range(20)]
    others: list[dict[str, object]] = [{"prompt": f"{n}?", "other": n} for n in (3, 7, 20, 21)]
    [told] = trained(rows, others, seed)
    assert told.startswith("--eval-tasks hard: 2 of its 4 prompts are trained on too")
    assert trained(rows, others[2:], seed) == []
    chat: list[dict[str, object]] = [{"messages": [{"role": "user", "content": f"{n}?"}]} for n in range(3)]
    assert "1 of its 1 prompts" in trained(chat, chat[1:2], seed)[0]


def test_prompts_that_do_not_tell_tasks_apart_count_for_nothing() -> None:
    same: list[dict[str, object]] = [{"prompt": "guess", "number": n} for n in range(4)]
    made: list[dict[str, object]] = [{"id": str(n), "number": n} for n in range(4)]  # the environment makes the prompts
    assert trained(same, same) == [] and trained(made, made) == []


def test_runs_with_one_split_seed_hold_out_the_same_tasks_whatever_their_seeds() -> None:
    assert held_out(1, None) == held_out(1, 1) == held_out(7, 1) != held_out(7, None)
    assert held_out(7, 1) < held_out(0, 1, share=0.5), "a share is part of every greater one"


def test_a_checkpoint_that_has_learned_held_out_tasks_is_named_with_the_split_it_kept(tasks: Path) -> None:
    run_of("one", tasks, seed=1)
    for model in ("one", "one/checkpoints/step-000001"):
        said = overlap(model, "tasks.jsonl", 0.2, 0)
        assert (
            said is not None and said.startswith("one was trained on some") and "--held-out 0.2 --split-seed 1" in said
        )
        assert overlap(model, "tasks.jsonl", 0.2, 1) is None and overlap(model, "tasks.jsonl", 0.1, 1) is None
        assert overlap(model, "tasks.jsonl", 0.3, 1) is not None, "it held out less"
        assert overlap(model, "tasks.jsonl", 0.0, 0) is None, "whoever holds nothing out evaluates on what was learned"
    run_of("none", tasks, held_out=0.0)
    assert "trained on all of tasks.jsonl" in str(overlap("none", "tasks.jsonl", 0.2, 0))
    tasks.write_text(tasks.read_text() + '{"prompt": "more", "response": "1"}\n')
    assert overlap("one", "tasks.jsonl", 0.2, 0) is None, "other tasks"
    assert (
        overlap("one", "an-org/a-dataset", 0.2, 0) is None and overlap("an-org/a-model", "tasks.jsonl", 0.2, 0) is None
    )


def test_a_run_answers_for_the_runs_that_it_began_with(tasks: Path) -> None:
    run_of("start", tasks, split_seed=3)
    run_of("next", tasks, split_seed=5, model="start")
    assert str(overlap("next", "tasks.jsonl", 0.2, 5)).startswith("start was trained on some")
    assert str(overlap("next", "tasks.jsonl", 0.2, 3)).startswith("next was trained on some")
    run_of("circle", tasks, split_seed=5, model="circle")
    assert overlap("circle", "tasks.jsonl", 0.2, 5) is None


def test_an_evaluation_holds_out_what_the_run_of_its_checkpoint_held_out(tasks: Path) -> None:
    run_of("start", tasks, seed=3)
    run_of("all", tasks, held_out=0.0, model="start")
    run_of("one", tasks, seed=8, split_seed=5, model="all")
    for model, known in (("one/checkpoints/step-000001", ("one", 5)), ("all", ("start", 3)), ("an-org/a-model", None)):
        assert split_seed_of(model, "tasks.jsonl") == (known and (Path(known[0]), known[1]))
    other = tasks.with_name("other.jsonl")
    other.write_text('{"prompt": "1?", "response": "1"}\n')
    run_of("two", other, seed=9, model="one")
    assert split_seed_of("two", "tasks.jsonl") == (Path("one"), 5), (
        "the run that learned from this very file comes first"
    )
    assert split_seed_of("two", "other.jsonl") == split_seed_of("two", "an-org/a-dataset") == (Path("two"), 9)


@pytest.mark.parametrize("asked", [None, 1])
def test_the_split_of_the_run_is_taken_unless_another_is_asked_for_and_said(tasks: Path, asked: int | None) -> None:
    run_of("one", tasks, seed=5)
    said: list[str] = []
    config = Evaluation(model="one", tasks="tasks.jsonl", env="m.py:f", held_out=0.2, split_seed=asked)
    own = _held_out(config, to_tasks(load_rows("tasks.jsonl"), need=("prompt",)), True, said.append)
    assert {str(task["prompt"]) for task in own.examples(200)} == held_out(5 if asked is None else asked, None)
    assert len(said) == 1 and said[0].startswith(
        "the held-out tasks are those of one (--split-seed 5)" if asked is None else "one was trained on some"
    )


def test_a_run_that_begins_with_such_a_checkpoint_is_warned(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of("one", tasks, seed=1)
    for split_seed, warned in ((0, True), (1, False)):
        split_tasks(
            RL(model="one", tasks="tasks.jsonl", env="m.py:f", held_out=0.2, split_seed=split_seed),
            None,
            lambda t, r: 1.0,
        )
        assert ("one was trained on some" in " ".join(capsys.readouterr().err.split())) == warned
