"""`posttrain show`: a run in a page, the runs of a folder in a table, two runs side by side, from the record alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import generated_runs
import numpy as np
import pytest

import posttrain
from posttrain.apps.view import view_command
from posttrain.cli.main import main
from posttrain.envs.builtin import arithmetic
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import read_metrics
from posttrain.runs.terminal.ending import outcome


def even(task: posttrain.Task, reply: str) -> dict[str, float]:
    return {"digit": 0.5 * reply[:1].isdigit(), "even": float(reply[:1] in "02468" and reply[:1] != "")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs: imitation, and what rl makes of it; and a generated one."""
    place = tmp_path_factory.mktemp("runs")
    tasks = arithmetic.tasks(40, 0, digits=1)
    posttrain.sft(
        tasks, out=str(place / "sft"), hidden=32, layers=1, heads=2, context=24, tokenizer="characters", epochs=3, rows=16,
        lr=5e-3, held_out=0.25, threads=1, quiet=True,
    )  # fmt: skip
    posttrain.rl(
        tasks, even, model=str(place / "sft"), out=str(place / "rl"), steps=4, prompts=4, group=4, max_tokens=4, lr=3e-3,
        kl=0.0, held_out=0.25, eval_every=2, env_workers=0, success=1.0, threads=1, quiet=True,
    )  # fmt: skip
    generated_runs.make_run(place / "made", steps=20, groups=2, group=2, tokens=6, evals=10)
    return place


@pytest.fixture(autouse=True)
def there(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["show", *words]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def data(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(shown(capsys, *words, "--json"))


@pytest.mark.parametrize("name", ["sft", "rl", "made"])
def test_a_page_fits_a_terminal_of_80_columns_and_24_lines(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, name).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80


def test_figures_of_a_page_are_those_of_the_record(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, metrics = data(capsys, "rl"), read_metrics(runs / "rl")
    assert (found["state"], found["steps"], found["planned"]) == ("ended", 4, 4)
    held = {figure["name"]: figure for figure in found["held_out"]}
    rewards: dict[int, dict[str, list[float]]] = {0: {}, 4: {}}
    for step, own in rewards.items():
        for row in read_rollouts(runs / "rl", step, ["task", "reward"], held_out=True):
            own.setdefault(row["task"], []).append(row["reward"])
    for name, value in (("reward", lambda r: r), ("accuracy", lambda r: float(r >= 1.0))):
        before, after = ({t: np.mean([value(r) for r in of]) for t, of in rewards[s].items()} for s in (0, 4))
        figure = held[name]
        assert (figure["before"], figure["after"]) == (metrics[0][f"eval/{name}"], metrics[-1][f"eval/{name}"])
        assert figure["change"]["mean"] == pytest.approx(np.mean([after[task] - before[task] for task in after]))
        assert figure["change"]["tasks"] == len(after) > 1
    training = [row["reward"] for row in metrics if "reward" in row]
    assert found["training"][0] == {"name": "reward", "first": training[0], "last": training[-1]}
    assert found["no_signal"] == pytest.approx(np.mean([row["groups/no_signal"] for row in metrics[1:]]))
    sampled = [row["reward"] for step in range(1, 5) for row in read_rollouts(runs / "rl", step, ["reward"])]
    assert (found["best"]["reward"], found["worst"]["reward"]) == (max(sampled), min(sampled))
    assert found["checkpoint"] == "rl/checkpoints/step-000004"
    page = " ".join(shown(capsys, "rl").split())
    assert "posttrain eval --model rl" in page and "--group 4" in page and "--temperature" not in page


def test_tenths_are_means_of_a_tenth_of_the_steps(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = [row["reward"] for row in read_metrics(runs / "made")]
    [trained, *_] = data(capsys, "made")["training"]
    assert trained["first"] == pytest.approx(sum(rewards[:2]) / 2)
    assert trained["last"] == pytest.approx(sum(rewards[-2:]) / 2)


def test_figures_have_the_names_that_the_steps_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert "training    loss " in (text := shown(capsys, "sft")) and "nll" not in text
    assert "training loss" in shown(capsys, "sft", "rl")


def test_a_run_on_labelled_responses_shows_their_held_out_implicit_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labelled = [{"prompt": f"{i}+{j}=", "response": str(i), "label": j < 1} for i in range(9) for j in (0, 1)]
    posttrain.prefer(
        labelled,
        model="sft",
        algorithm="kto",
        out=str(tmp_path / "kto"),
        held_out=0.5,
        steps=1,
        lr=1e-3,
        threads=1,
        quiet=True,
    )
    rows = read_metrics(tmp_path / "kto")
    ended, last, text = outcome(rows), rows[-1], shown(capsys, str(tmp_path / "kto"))
    for side in ("chosen", "rejected"):
        figure = f"implicit reward {side} 0.000 -> {last[f'eval/implicit_reward/{side}']:.3f}"
        assert figure in text and f"held-out {figure}" in ended


def test_the_first_line_of_a_page_names_the_folder_in_full(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name := "a-long-name-" * 5).symlink_to(runs / "made")
    lines = shown(capsys, name).splitlines()
    assert name in lines[1] and max(map(len, lines[:2])) <= 80


def test_state_tells_how_a_run_ended(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = json.loads((runs / "made" / "run.json").read_text())

    def state(**changes: Any) -> str:
        changed = {name: value for name, value in {**about, **changes}.items() if value is not None}
        (tmp_path / "run.json").write_text(json.dumps(changed))
        (tmp_path / "metrics.jsonl").write_text((runs / "made" / "metrics.jsonl").read_text())
        return str(data(capsys, str(tmp_path))["state"])

    assert state() == "ended"
    assert state(steps=50) == "interrupted"
    assert state(final={}) == "failed"
    assert state(end=None, config={**about["config"], "save_every": 7}).startswith("killed")
    assert "none: one is saved every 7 steps (--save-every)" in shown(capsys, str(tmp_path))
    (tmp_path / "health.jsonl").write_text('{"step": 20, "name": "entropy", "message": "it fell"}\n')
    assert state(steps=50, config={**about["config"], "health": "stop"}) == "stopped by the health check"


def test_damaged_parts_are_told_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = generated_runs.make_run(tmp_path / "a", steps=3, groups=1, group=2, tokens=6)
    (run / "metrics.jsonl").write_text("{}\n")
    for file in (run / "rollouts").iterdir():
        file.write_bytes(b"PAR1 of another version")
    page = shown(capsys, str(run))
    assert page.count("damaged ") >= 2 and "nowhere" in page and "metrics.jsonl:1" in page
    (run / "run.json").write_text("{")
    assert shown(capsys, str(run), code=2).count("\n") == 1
    generated_runs.make_run(tmp_path / "b", steps=1, groups=1, group=2, tokens=6, evals=0)
    table = shown(capsys, str(tmp_path))
    assert "a    damaged" in table and "1/1" in table and "run.json is damaged" in table


@pytest.mark.parametrize(
    "change", [{"config": {"steps": "x", "model": ["m"]}}, {"final": {"a": 1}, "sizes": [1]}, {"steps": {}}]
)
def test_values_of_another_version_make_no_traceback(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"verb": "of another version", "config": {}, **change}
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert "of another version" in shown(capsys, str(tmp_path))


def test_a_folder_is_a_table_with_a_row_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, ".").splitlines()
    assert {line.split()[0] for line in lines[2:5]} == {"sft", "rl", "made"}
    assert max(map(len, lines)) <= 80
    assert {one["run"] for one in data(capsys, ".")} == {"sft", "rl", "made"}


def test_two_runs_are_compared_by_options_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found, text = data(capsys, "rl", "made"), shown(capsys, "rl", "made")
    options = {one["name"]: (one["a"], one["b"]) for one in found["options"]}
    assert options["group"] == (4, 2) and "algorithm" not in options
    assert "\n--group " in text and "_" not in text.partition("figure")[0] and "[" not in text.partition("figure")[0]
    assert "their training tasks differ" in text or "hold out" in text or "max_tokens" in text
    same = data(capsys, "rl", "rl")
    assert same["options"] == [] and same["difference"]["reward"]["mean"] == 0


def test_three_runs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "two runs" in shown(capsys, "rl", "sft", "made", code=2)


@pytest.mark.parametrize("word", ["list", "runs", "ls", "status", "diff", "compare"])
def test_words_for_the_same_are_answered_with_the_command(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "a"]) == 2
    assert "posttrain show" in capsys.readouterr().err
    assert main(["export", "a"]) == 2
    assert "--export" in capsys.readouterr().err


def test_show_loads_no_torch(runs: Path) -> None:
    code = "import sys; from posttrain.cli.main import main; main(['show', 'rl']); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.endswith(
        "False\n"
    )


@pytest.mark.parametrize("connection, told", [("10.0.0.9 5123 10.0.0.2 22", "10.0.0.2"), ("", "")])
def test_ssh_users_are_told_how_to_reach_the_pages(connection: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", connection)
    assert view_command._reached() == told
