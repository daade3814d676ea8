"""Hooks see steps, evaluations and checkpoints; they cannot change a result, and end a run only by asking for it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny

import posttrain
from posttrain.cli.main import main
from posttrain.core.rollouts import Rollout
from posttrain.core.types import StopRun, UserError
from posttrain.envs.builtin import arithmetic
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_reading import read_health, read_metrics
from posttrain.training.hooks import Hooks, RolloutCopies
from posttrain.training.trainer import Run


def rl(place: Path, tokenizer: Tokenizer, out: str, **options: Any) -> Run:
    if not (place / "start").exists():
        save_model(tiny(tokenizer), place / "start", tokenizer)
    given: dict[str, Any] = {"algorithm": "grpo", "prompts": 2, "group": 2, "max_tokens": 3, "threads": 1, "steps": 4}
    given |= {"held_out": 0.2, "eval_every": 2, "save_every": 2, "env_workers": 0, "quiet": True, "lr": 1e-2}
    sums = arithmetic.tasks(20, seed=0, digits=1)
    return posttrain.rl(sums, length, str(place / "start"), out=str(place / out), **{**given, **options})


def length(task: Any, reply: str) -> float:
    return float(len(reply))


class Watch:
    """Notes everything, and then spoils what it was given."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float], int]] = []
        self.evaluations: list[tuple[int, dict[str, float], int]] = []
        self.checkpoints: list[str] = []

    def on_step(self, step: int, metrics: dict[str, float], rollouts: Any) -> None:
        self.steps.append((step, dict(metrics), len(rollouts)))
        self.spoil(metrics, rollouts)

    def on_evaluation(self, step: int, metrics: dict[str, float], rollouts: Any) -> None:
        self.evaluations.append((step, dict(metrics), len(rollouts)))
        self.spoil(metrics, rollouts)

    def on_checkpoint(self, path: Path) -> None:
        assert (path / "config.json").exists()
        self.checkpoints.append(path.name)

    def spoil(self, metrics: dict[str, float], rollouts: Any) -> None:
        metrics.clear()
        for rollout in [*rollouts, *rollouts[:1]]:
            rollout.reward, rollout.task["prompt"] = 100.0, "?"
            rollout.transcripts[0].tokens.clear()


def test_hooks_see_each_step_evaluation_and_checkpoint_and_change_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain = rl(tmp_path, tokenizer, "plain")
    one, other, seen = Watch(), Watch(), list[int]()

    def count(step: int, metrics: dict[str, float], rollouts: Any) -> None:
        seen.append(sum(rollout.n_sampled for rollout in rollouts))

    run = rl(tmp_path, tokenizer, "watched", hook=[one, other, count])
    for name in ("metrics.jsonl", "rollouts/step-000004.parquet", "checkpoints/step-000004/model.safetensors"):
        assert (run.path / name).read_bytes() == (plain.path / name).read_bytes(), name
    rows = {row["step"]: row for row in read_metrics(run.path)}
    for watch in (one, other):
        assert [step for step, _, _ in watch.steps] == [1, 2, 3, 4] and {n for _, _, n in watch.steps} == {4}
        for step, metrics, _ in watch.steps:
            assert metrics == {name: value for name, value in rows[step].items() if name != "step"}
        assert [(step, count) for step, _, count in watch.evaluations] == [(0, 1), (2, 1), (4, 1)]
        assert all(m["eval/reward"] == rows[step]["eval/reward"] for step, m, _ in watch.evaluations)
        assert all(name.startswith("eval/") for _, metrics, _ in watch.evaluations for name in metrics)
        assert watch.checkpoints == ["step-000002", "step-000004"]
    assert len(seen) == 4 and all(0 < tokens <= 12 for tokens in seen)


def test_a_hook_that_raises_is_a_finding_once_which_a_resumed_run_keeps(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(step: int, metrics: dict[str, float], rollouts: Any) -> None:
        raise KeyError("acuracy")

    run = rl(tmp_path, tokenizer, "run", hook=broken, quiet=False)
    [found] = read_health(run.path)
    assert (found["step"], found["name"]) == (1, "hook") and run.final["step"] == 4 and run.stopped is None
    where = "broken failed, and the run continues: KeyError: 'acuracy' (test_hooks.py:"
    assert where in found["message"] and f"step 1: {found['message']}" in capsys.readouterr().out
    run = rl(tmp_path, tokenizer, "run", steps=5, resume=True)
    assert read_health(run.path) == [found]


def test_a_hook_that_leaves_gradients_off_or_raises_no_exception_changes_no_bit(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    class Odd(BaseException): ...

    def spoils(step: int, metrics: dict[str, float], rollouts: Any) -> None:
        torch.set_grad_enabled(False)
        raise Odd

    run = rl(tmp_path, tokenizer, "spoiled", hook=spoils)
    assert "spoils failed, and the run continues: Odd" in read_health(run.path)[0]["message"]
    assert read_metrics(run.path) == read_metrics(rl(tmp_path, tokenizer, "plain").path)


def test_a_hook_ends_the_run_with_a_checkpoint_by_asking_for_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def enough(step: int, metrics: dict[str, float], rollouts: Any) -> None:
        if step == 3:
            raise StopRun("reward is high enough")

    run = rl(tmp_path, tokenizer, "run", hook=[enough], save_every=50)
    assert run.stopped is not None and run.stopped.endswith("enough: reward is high enough") and not run.interrupted
    assert run.final["step"] == 3 and run.checkpoint is not None and run.checkpoint.name == "step-000003"
    assert read_health(run.path) == []
    whole, gone_on = rl(tmp_path, tokenizer, "whole"), rl(tmp_path, tokenizer, "run", resume=True)
    assert (gone_on.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()

    def at_once(step: int, metrics: dict[str, float], rollouts: Any) -> None:
        raise StopRun

    class First:
        on_evaluation = staticmethod(at_once)

    early = rl(tmp_path, tokenizer, "early", hook=First())
    assert early.final["step"] == 1 and early.checkpoint is not None and "no reason is given" in str(early.stopped)
    late = rl(tmp_path, tokenizer, "late", steps=1, hook=at_once)
    assert late.stopped is None and late.final["step"] == 1  # there was nothing left to end


def test_a_hook_is_named_on_the_command_line_for_every_verb_and_kept_by_resume(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\nimport posttrain\n"
        "class Watch:\n"
        "    def on_step(self, step, metrics, rollouts):\n"
        "        with open('seen.txt', 'a') as file:\n"
        "            file.write(f'{step} {metrics[\"loss\"] >= 0} {len(rollouts)}\\n')\n"
        "def stop(step, metrics, rollouts):\n"
        "    raise posttrain.StopRun('seen enough')\n"
    )
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "response": "2"}) + "\n" for i in range(8))
    )
    options = ["--out", "run", "--threads", "1", "--steps", "2", "--rows", "2", "--quiet"]
    sizes = ["--hidden", "8", "--heads", "2", "--layers", "1", "--context", "16"]
    assert main(["sft", "--tasks", "rows.jsonl", "--hook", "mine.py:Watch", *options, *sizes]) == 0
    assert main(["sft", "--tasks", "rows.jsonl", "--out", "run", "--resume", "--steps", "3", "--quiet"]) == 0
    assert [line.split()[:2] for line in (tmp_path / "seen.txt").read_text().splitlines()] == [
        ["1", "True"], ["2", "True"], ["3", "True"]]  # fmt: skip
    capsys.readouterr()
    stopped = ["sft", "--tasks", "rows.jsonl", *options, *sizes, "--overwrite", "--hook", "mine.py:stop"]
    assert main(stopped) == 3 and "stopped     hook stop: seen enough" in capsys.readouterr().out
    wrong = {
        "mine.py:sotp": "mine.py has no 'sotp'; did you mean 'stop'?",
        "mine.py:Path": "--hook mine.py:Path is not a hook",
    }
    for name, told in wrong.items():
        assert main([*stopped[:-1], name]) == 2 and told in capsys.readouterr().err


def test_copies_of_rollouts_are_made_when_they_are_asked_for() -> None:
    rollout = Rollout({"prompt": "a"}, "g", [], 1.0)
    copies = RolloutCopies([rollout, rollout])
    copies[0].task["prompt"] = "b"
    assert rollout.task == {"prompt": "a"} and copies[0] == rollout and copies[0] is not rollout
    with pytest.raises(UserError, match="is not a hook"):
        Hooks([3])


async def asks(step: int, metrics: dict[str, float], rollouts: Any) -> None: ...


def yields(step: int, metrics: dict[str, float], rollouts: Any) -> Any:
    yield step


class Asks:
    async def on_checkpoint(self, path: Path) -> None: ...


class Streams:
    async def __call__(self, step: int, metrics: dict[str, float], rollouts: Any) -> Any:
        yield step


@pytest.mark.parametrize("hook", [asks, yields, Asks, Asks(), Streams(), functools.partial(asks, 1)])
def test_a_hook_that_would_never_run_is_refused(hook: Any) -> None:
    with pytest.raises(UserError, match="would never run: write it with def"):
        Hooks([hook])


def test_a_hook_whose_methods_cannot_be_read_is_refused_in_one_line() -> None:
    class Unready:
        @property
        def on_step(self) -> Any:
            raise RuntimeError("no\ndatabase")

    class Exits:
        def __init__(self) -> None:
            raise SystemExit(0)

    with pytest.raises(UserError, match=r"RuntimeError: no database \(test_hooks.py:"):
        Hooks([Unready])
    with pytest.raises(UserError, match=r"SystemExit: 0 \(test_hooks.py:"):
        Hooks([Exits])


def test_what_a_hook_sets_in_torch_ends_with_it() -> None:
    def settings() -> tuple[Any, ...]:
        return torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(), torch.is_grad_enabled()

    def spoils(step: int, metrics: dict[str, float], rollouts: Any) -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_grad_enabled(False)
        assert step == 1, "a hook that fails"

    before = settings()
    for step in (1, 2):
        Hooks([spoils]).step(step, {}, [])
        assert settings() == before


def test_the_reason_of_a_hook_is_shown_on_one_line_without_control_codes() -> None:
    def stops(step: int, metrics: dict[str, float], rollouts: Any) -> None:
        raise StopRun("\x1b[31mred\nline2")

    def fails(step: int, metrics: dict[str, float], rollouts: Any) -> None:
        raise ValueError("\x1b[31mred\nline2")

    hooks = Hooks([stops, fails])
    [told] = hooks.step(1, {}, [])
    assert hooks.stop == r"hook stops: \x1b[31mred line2" and r": ValueError: \x1b[31mred line2 (" in told


def test_a_run_whose_folder_was_moved_away_ends_in_one_line_and_goes_on_when_it_is_back(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    class Moves:
        def on_checkpoint(self, path: Path) -> None:
            if path.name == "step-000001":
                (tmp_path / "run").rename(tmp_path / "elsewhere")

    with pytest.raises(
        UserError, match=r"run is no longer there: put it back; fix it and continue after step 1 "
    ) as told:
        rl(tmp_path, tokenizer, "run", hook=Moves(), save_every=1)
    assert "\n" not in str(told.value) and not (tmp_path / "run").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    unfinished = tmp_path / "run" / "checkpoints" / ".step-000002.draft"
    unfinished.mkdir()
    assert rl(tmp_path, tokenizer, "run", resume=True).final["step"] == 4 and not unfinished.exists()
