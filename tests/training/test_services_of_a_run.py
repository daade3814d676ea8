"""Runs whose rewards are asked for: alone, by name, over an outage, resumed byte for byte; and what is refused."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from endpoints import Said, by_length, replied, serving, write_recipe
from processes import FORKS, commanded
from reward_models import write_reward_model

import posttrain
from posttrain.cli.main import main
from posttrain.envs.play.answer_journal import ANSWERS
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.system import endpoint as endpoints

BOTH = """
from posttrain import Ask, Invalid


def both(task):
    reply = yield task["prompt"]
    score = yield Ask("reward-model", {"prompt": task["prompt"], "response": reply})
    verdict = yield Ask("judge", {"prompt": task["prompt"], "response": reply})
    if isinstance(verdict, Invalid):  # the judge may be away: the model's score is better than nothing
        return {"model": score, "judge": 0.0}
    return {"model": score, "judge": verdict}


def unknown(task):
    yield task["prompt"]
    return (yield Ask("jugde", "x"))
"""
ROWS = [{"id": str(i), "prompt": f"say {i}=", "answer": str(i)} for i in range(8)]


@pytest.fixture
def place(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with rows, a policy, a reward model and environments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.01)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "my.py").write_text(BOTH)
    save_model(tiny(tokenizer, context=64), tmp_path / "start", tokenizer)
    write_reward_model(tmp_path / "reward", tiny(tokenizer, seed=5), tokenizer, offset=0.5)
    yield tmp_path


def options(out: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "start", "out": out, "steps": 4, "prompts": 2, "group": 4, "max_tokens": 9, "lr": 1e-2, "threads": 1,
        "env_workers": 1, "quiet": True, "save_every": 2, **more,
    }  # fmt: skip


def left(out: str) -> dict[str, bytes]:
    """What a run left that does not depend on the clock."""
    folder = Path(out)
    return {p.name: p.read_bytes() for p in [folder / "metrics.jsonl", *sorted(folder.glob("rollouts/*"))]}


def test_a_reward_model_alone_is_enough(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = posttrain.rl("rows.jsonl", **options("run", reward_model=("reward",), quiet=False))
    told = capsys.readouterr().out
    assert "+0.5 to every score (posttrain_score_offset)" in told
    assert len(run.metrics) == 4 and all(m["invalid"] == 0 for m in run.metrics)
    rows = read_rollouts(run.path, 1)
    from posttrain.services.reward_model_service import RewardModelService

    service = RewardModelService("reward")
    assert {row["stop"] for row in rows} >= {"length"}  # some are cut off, and read so
    for id, row in enumerate(rows):
        service.submit(id, {"prompt": row["prompt"], "response": row["text"], "cut": row["stop"] == "length"})
    expected = dict(service.poll())
    assert [row["reward"] for row in rows] == [expected[id] for id in range(len(rows))]
    assert rows[0]["answers"] == [{"service": "reward-model", "answer": rows[0]["reward"]}]
    timing = json.loads((run.path / "timing.jsonl").read_text().splitlines()[0])
    assert timing["services/reward-model/scored"] > 0


def test_a_judge_alone_is_enough_and_evaluates_too(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        write_recipe(place / "judge.toml", server.address)
        assert main(["rl", "--tasks", "rows.jsonl", "--judge", "judge.toml", "--model", "start", "--out", "run",
                     *"--steps 1 --prompts 2 --group 2 --max-tokens 5 --env-workers 1 --quiet".split()]) == 0  # fmt: skip
        found = posttrain.evaluate("rows.jsonl", model="run", judge=("judge.toml",), samples=2, max_tokens=5)
    scores = [min(9, len(r.text)) + 1 for r in found.rollouts]
    assert [r.reward for r in found.rollouts] == scores
    assert any(note.startswith("judge: asked") for note in found.notes)
    rows = read_rollouts("run", 1)
    assert all(row["reward"] == 1 + min(9, len(row["text"])) for row in rows)
    assert all(f'"score": {row["reward"]:.0f}}}' in row["answers"][0]["said"][0] for row in rows)
    capsys.readouterr()
    assert main(["rollouts", "run"]) == 0
    assert 'said   │ judge: {"reason": "by length", "score": ' in capsys.readouterr().out


def test_an_environment_asks_services_by_their_names(place: Path) -> None:
    with serving() as server:
        write_recipe(place / "judge.toml", server.address)
        run = posttrain.rl(
            "rows.jsonl", "my.py:both", **options("run", reward_model=("reward",), judge=("judge.toml",))
        )
    assert all(m["reward"] == pytest.approx(m["reward/model"] + m["reward/judge"]) for m in run.metrics)
    assert run.metrics[0]["reward/judge"] >= 1


def test_two_reward_models_have_names(place: Path, tokenizer: Tokenizer) -> None:
    write_reward_model(place / "other", tiny(tokenizer, seed=6), tokenizer)
    (place / "two.py").write_text(BOTH.replace('Ask("reward-model"', 'Ask("one"').replace('Ask("judge"', 'Ask("other"'))
    services = ("one=reward", "other=other")
    run = posttrain.rl("rows.jsonl", "two.py:both", **options("run", steps=1, reward_model=services))
    assert run.metrics[0]["reward/model"] != run.metrics[0]["reward/judge"] and run.metrics[0]["invalid"] == 0
    inputs = json.loads((run.path / "run.json").read_text())["inputs"]
    assert {"reward_model one", "reward_model other"} <= inputs.keys()


def troubled(request: dict[str, Any], number: int) -> Said:
    """A judge that has no answer for a fifth of the replies: those come back as HTTP 400."""
    [reply] = replied(request)
    return Said(status=400) if sum(map(ord, reply)) % 5 == 0 and "2 + 2" not in reply else by_length(request)


def test_a_resumed_run_repeats_every_byte_with_the_server_gone(place: Path) -> None:
    """Its last steps are played again from the checkpoint of step 2, with Invalid where there was no answer."""
    with serving(troubled) as server:
        write_recipe(place / "judge.toml", server.address)
        whole = posttrain.rl("rows.jsonl", **options("run", judge=("judge.toml",), eval_every=1, held_out=0.3, steps=4))
        expected = left("run")
        assert any(m["invalid"] > 0 for m in whole.metrics[3:]), "the outage is to be in what is repeated"
        # as a kill before the last checkpoint leaves it: the journal and the record have what came after step 2
        shutil.copytree("run", "killed")
        shutil.rmtree("killed/checkpoints/step-000004")
        asked = len(server.asked)
    resumed = posttrain.rl("rows.jsonl", **options("killed", judge=("judge.toml",), resume=True))
    assert left("killed") == expected and len(server.asked) == asked
    assert resumed.metrics == whole.metrics


def test_a_run_that_is_killed_while_its_judge_works_ends_as_the_undisturbed_one(place: Path) -> None:
    def slow(request: dict[str, Any], number: int) -> Said:
        said = troubled(request, number)
        said.after = 0.05
        return said

    command = ["rl", "--tasks", "rows.jsonl", "--judge", "judge.toml"]
    for name, value in options("killed", steps=5).items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    with serving(troubled) as server:
        write_recipe(place / "judge.toml", server.address, retries=0)
        posttrain.rl("rows.jsonl", **options("whole", steps=5, judge=("judge.toml",)))
        server.behave = slow
        child = FORKS.Process(target=commanded, args=(command, place))
        child.start()
        until = time.monotonic() + 60
        metrics, saved = place / "killed/metrics.jsonl", place / "killed/checkpoints/step-000002"
        while not (saved.exists() and metrics.read_text().count("\n") >= 3):  # it is saved beside the third step
            assert time.monotonic() < until and child.is_alive()
            time.sleep(0.005)
        child.kill()
        child.join()
        assert (place / "killed" / ANSWERS).exists()
        server.behave = troubled
        assert main([*command, "--resume"]) == 0
    assert left("killed") == left("whole")


def refused(capsys: pytest.CaptureFixture[str], words: list[str], *parts: str) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err.strip()
    assert told.count("\n") == 0 and told.startswith("posttrain: "), told
    assert all(part in told for part in parts), told


RL = "rl --tasks rows.jsonl --model start --steps 1 --prompts 2 --group 2 --max-tokens 5 --env-workers 1".split()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (Said(status=401, raw=b'{"error": {"message": "Incorrect API key"}}'), ("HTTP 401", "Incorrect API key")),
        (Said(status=403), ("HTTP 403", "refuses the key")),
        (Said(raw=b"<!doctype html>", headers={"Content-Type": "text/html"}), ("HTML", "/v1")),
        (Said(status=404, raw=b'{"detail": "model not found"}'), ("model not found",)),
    ],
)
def test_an_endpoint_that_is_wrong_is_told_before_anything_heavy(
    place: Path, capsys: pytest.CaptureFixture[str], said: Said, told: tuple[str, ...]
) -> None:
    shutil.rmtree("start/")  # it would be told of this next
    Path("start").mkdir()
    with serving(lambda request, number: said) as server:
        write_recipe(place / "judge.toml", server.address)
        refused(capsys, [*RL, "--judge", "judge.toml"], "judge at http", *told)
    assert not Path("runs").exists()


def test_an_endpoint_that_is_down_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        write_recipe(place / "judge.toml", server.address)
    refused(capsys, [*RL, "--judge", "judge.toml"], "does not answer", "check that the server runs")


def test_services_that_cannot_be_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, [*RL, "--reward-model", "start"], "--reward-model start has no score head")
    refused(capsys, [*RL, "--reward-model", "nowhere"], "nowhere")
    refused(capsys, [*RL, "--judge", "nowhere.toml"], "the judge's recipe nowhere.toml: there is no such file")
    refused(
        capsys, [*RL, "--reward-model", "a=reward", "b=reward"], "--env is missing: give an environment that uses a, b"
    )
    refused(capsys, [*RL, "--reward-model", "reward", "reward"], "two services have the name 'reward-model'")
    refused(capsys, [*RL], "--env is missing")
    config = json.loads(Path("reward/config.json").read_text())
    Path("reward/config.json").write_text(json.dumps({**config, "model_type": "deberta-v2"}))
    refused(capsys, [*RL, "--reward-model", "reward"], "deberta-v2")


def test_a_service_that_the_run_has_not_is_told_at_the_rehearsal(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, [*RL, "--env", "my.py:both"], "asked the service 'reward-model', which this run has none")
    refused(
        capsys, [*RL, "--env", "my.py:unknown", "--reward-model", "judge=reward"], "'jugde'", "did you mean 'judge'"
    )


def test_a_service_that_nothing_can_ask_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plain reward asks nobody; step rewards ask one reward model, and no other."""
    (place / "plain.py").write_text("def reward(task, reply):\n    return 1.0\n")
    plain, given = [*RL, "--env", "plain.py:reward"], ["--reward-model", "reward"]
    add = "add --step-delimiter line to reward steps, or leave it out"
    refused(capsys, [*plain, *given], "--reward-model reward is used by nothing", add)
    refused(capsys, [*plain, *given, "--step-delimiter", ""], add)
    refused(
        capsys,
        [*plain, "--reward-model", "process=reward", "other=reward", "--step-delimiter", "line"],
        "--reward-model other=reward is used by nothing, as --env scores replies by itself: leave it out",
    )
    write_recipe(place / "judge.toml", "http://127.0.0.1:1")
    refused(capsys, [*plain, "--judge", "judge.toml"], "--judge judge.toml is used by nothing")
    steps = [*RL, *given, "--step-delimiter", "line", "--step-rewards", "if-right"]
    refused(capsys, steps, "needs to know which replies are right: add --env")
    refused(capsys, [*steps, "--env", "plain.py:reward"], "needs to know which replies are right: add --success")
    checked = ["check", "--tasks", "rows.jsonl", "--env", "plain.py:reward"]
    refused(capsys, [*checked, *given], "--reward-model reward is used by nothing", add)
    evaluated = ["eval", "--tasks", "rows.jsonl", "--model", "start", "--env", "plain.py:reward"]
    refused(capsys, [*evaluated, *given], "--reward-model reward is used by nothing", add)


def test_check_asks_a_judge_that_it_is_given(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        write_recipe(place / "judge.toml", server.address)
        assert main(["check", "--tasks", "rows.jsonl", "--judge", "judge.toml"]) == 0
    told = capsys.readouterr().out
    assert "it asks the service judge: it answered" in told and "reward 10" in told
    assert main(["check", "--tasks", "rows.jsonl", "--env", "my.py:both"]) == 0
    told = capsys.readouterr().out
    assert "it asks the service reward-model: numbers from 0 to 1 were made up" in told
    assert "without an answer (task 0): invalid: " in told


def test_an_outage_ends_the_run_with_the_reason_and_a_resumed_one_asks_again(place: Path) -> None:
    with serving() as server:
        write_recipe(place / "judge.toml", server.address, retries=0)
        whole = posttrain.rl("rows.jsonl", **options("whole", judge=("judge.toml",)))

        def fails_in_step_4(request: dict[str, Any], number: int) -> Said:
            metrics = Path("run/metrics.jsonl")
            out = metrics.exists() and metrics.read_text().count("\n") == 3
            return Said(status=500) if out else by_length(request)

        server.behave = fails_in_step_4
        with pytest.raises(posttrain.UserError, match="HTTP 500"):
            posttrain.rl("rows.jsonl", **options("run", judge=("judge.toml",)))
        server.behave = by_length
        posttrain.rl("rows.jsonl", **options("run", judge=("judge.toml",), resume=True))
    assert left("run") == left("whole") and len(whole.metrics) == 4
