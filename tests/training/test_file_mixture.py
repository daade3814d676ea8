"""Passes over several files: sft, prefer and reward-model take rows by their shares, each file in epochs of its own."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

import posttrain
from posttrain.cli.main import main
from posttrain.core.seeds import seed_of
from posttrain.core.types import UserError
from posttrain.data.mixed_tasks import MixedTasks
from posttrain.data.tasks import order, to_tasks
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import read_metrics
from posttrain.training.sources.mixture import MixedRows, next_part

SUMS = [{"id": f"s{n}", "prompt": f"{n}+1=", "response": str(n + 1)} for n in range(9)]
WORDS = [{"id": f"w{n}", "prompt": f"the cat {n}", "response": "sat"} for n in range(4)]
PAIRS = [{"prompt": f"{n}+2=", "chosen": str(n + 2), "rejected": "the"} for n in range(8)]
QUICK: dict[str, Any] = {"threads": 1, "quiet": True, "lr": 1e-3}


def rows(shares: dict[str, float], count: int = 4, seed: int = 3) -> MixedRows:
    return MixedRows(MixedTasks({"sums": to_tasks(SUMS), "words": to_tasks(WORDS)}, shares), count, seed)


def test_the_files_of_a_mixture_are_shown_each_in_its_own_form(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chat = tokenizer.templated("{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}", "a test")
    save_model(tiny(chat), tmp_path / "start", chat)
    for name, own in (("sums", SUMS), ("words", WORDS)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    parts: dict[str, Any] = {"sums": {"tasks": "sums.jsonl", "system": "add"}, "words": {"tasks": "words.jsonl"}}
    run = posttrain.sft(model="start", chat=True, mixture=parts, out="run", steps=1, rows=4, record="tokens", **QUICK)
    shown = {str(row["task"]).partition("/")[0]: row["prompt"] for row in read_rollouts(run.path, 1)}
    assert shown["sums"].startswith("s add u ") and shown["words"].startswith("u the cat")


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_shares_are_exact_at_every_step_and_each_file_is_read_in_epochs_of_its_own(share: float) -> None:
    found = rows({"sums": share, "words": 1 - share})
    seen: list[int] = []
    for step in range(1, 40):
        places = found.of_step(step)
        seen += places
        assert len(places) == 4
        counts = Counter("sums" if place < 9 else "words" for place in seen)
        assert abs(counts["sums"] - share * 4 * step) < 1
        assert found.shares_of(step)["sums"] == sum(place < 9 for place in places) / 4
    for name, own, start in (("sums", [p for p in seen if p < 9], 0), ("words", [p for p in seen if p >= 9], 9)):
        size = 9 if name == "sums" else 4
        expected = [start + int(at) for epoch in range(40) for at in order(size, epoch, seed_of(3, "part", name))]
        assert own == expected[: len(own)]


def test_the_next_row_is_of_the_part_that_would_be_furthest_behind() -> None:
    drawn = {"a": 0, "b": 0}
    found = ""
    for _ in range(8):
        name = next_part({"a": 0.25, "b": 0.75}, drawn)
        drawn[name] += 1
        found += name
    assert found == "babbbabb"  # at N = 1: 0.25 x 2 - 0 against 0.75 x 2 - 1, equal: the first


def test_the_rows_of_a_step_follow_from_its_number_alone() -> None:
    shares = {"sums": 0.7, "words": 0.3}
    in_order = rows(shares)
    whole = [in_order.of_step(step) for step in range(1, 12)]
    assert [rows(shares).of_step(step) for step in range(1, 12)] == whole
    again = rows(shares)
    assert [again.of_step(step) for step in (7, 7, 2, 11, 3)] == [whole[step - 1] for step in (7, 7, 2, 11, 3)]
    following = again.following(4)
    assert [next(following) for _ in range(8)] == [*whole[4], *whole[5]]


def test_the_order_of_a_file_is_computed_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def counted(size: int, epoch: int, seed: int) -> Any:
        asked.append((size, epoch))
        return order(size, epoch, seed)

    monkeypatch.setattr("posttrain.training.sources.mixture.order", counted)
    found = rows({"sums": 0.5, "words": 0.5})
    for step in range(1, 9):  # 16 rows of each
        found.of_step(step)
    assert asked == [(9, 0), (4, 0), (4, 1), (4, 2), (9, 1), (4, 3)]


@pytest.fixture
def place(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, own in {"sums": SUMS, "words": WORDS, "pairs": PAIRS}.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    save_model(tiny(tokenizer), tmp_path / "start")
    tokenizer.save(tmp_path / "start")
    return tmp_path


A, B = "--mixture.a.tasks sums.jsonl --mixture.a.weight 3", "--mixture.b.tasks words.jsonl --mixture.b.weight 1"
SFT = f"sft --model start {A} {B}"


def test_sft_reads_files_by_their_weights_and_resumes_to_the_byte(place: Path) -> None:
    words = f"{SFT} --rows 4 --steps 6 --save-every 1 --keep 9 --threads 1 --quiet --lr 1e-3 --out run".split()
    assert main(words) == 0
    whole = (place / "run" / "metrics.jsonl").read_bytes()
    for metrics in read_metrics(place / "run"):
        assert (metrics["mixture/a/share"], metrics["mixture/b/share"]) == (0.75, 0.25)
    for step in (4, 5, 6):
        shutil.rmtree(place / "run" / "checkpoints" / f"step-{step:06d}")
    assert main(["sft", "--out", "run", "--resume", "--quiet"]) == 0
    assert (place / "run" / "metrics.jsonl").read_bytes() == whole


def test_weights_are_sizes_where_none_are_given_and_held_out_rows_are_of_every_file(place: Path) -> None:
    parts = {"a": {"tasks": "sums.jsonl"}, "b": {"tasks": "words.jsonl", "limit": 3}}
    run = posttrain.sft(model="start", mixture=parts, rows=4, held_out=0.4, eval_every=3, steps=9, out="run", **QUICK)
    metrics = read_metrics(run.path)
    told = "".join((place / "run" / name).read_text() for name in ("run.json",))
    assert "eval/loss" in metrics[-1] and '"mixture a tasks"' in told
    shares = [m["mixture/a/share"] for m in metrics if "mixture/a/share" in m]
    assert len(shares) == 9 and 0.5 < sum(shares) / 9 < 0.9


def test_preferences_and_reward_models_take_mixtures_too(place: Path) -> None:
    parts = {"a": {"tasks": "pairs.jsonl", "weight": 1.0}, "b": {"tasks": "pairs.jsonl", "weight": 1.0, "limit": 3}}
    for verb in (posttrain.prefer, posttrain.reward_model):
        run = verb(model="start", mixture=parts, rows=4, steps=5, out=verb.__name__, **QUICK)
        assert [m["mixture/b/share"] for m in read_metrics(run.path) if "loss" in m] == [0.5] * 5


def test_equal_files_with_shares_by_size_train_on_every_row_once_per_epoch(place: Path) -> None:
    parts = {"a": {"tasks": "sums.jsonl"}, "b": {"tasks": "words.jsonl"}}
    run = posttrain.sft(model="start", mixture=parts, rows=13, epochs=2, out="run", **QUICK)
    assert [m["mixture/a/share"] for m in read_metrics(run.path)] == [pytest.approx(9 / 13)] * 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (f"{A} --mixture.a.env my.py:reward", "--mixture.a.env: not a setting of a part"),
        ("--mixture.a.tasks sums.jsonl --mixture.a.weight 0", "must be above 0"),
        (f"{A} --tasks words.jsonl", "--tasks and --mixture both give rows"),
        (f"{A} --mixture.c.weight 2", "--mixture.c.tasks is missing"),
        ("--mixture.a.tasks nothing.jsonl --mixture.a.weight 1", "part a of the mixture: .*nothing.jsonl"),
    ],
)
def test_mistakes_are_one_line(place: Path, capsys: pytest.CaptureFixture[str], words: str, told: str) -> None:
    import re

    assert main(["sft", "--model", "start", *B.split(), "--steps", "1", "--out", "run", "--quiet", *words.split()]) == 2
    err = capsys.readouterr().err.strip()
    assert re.search(told, err) and "\n" not in err and not (place / "run").exists()


def test_rows_that_are_passed_as_objects_cannot_go_with_a_mixture(place: Path) -> None:
    with pytest.raises(UserError, match="--tasks and --mixture both give rows"):
        posttrain.sft(SUMS, model="start", mixture={"a": {"tasks": "sums.jsonl"}}, steps=1, out="run", **QUICK)


def test_a_mixture_whose_common_rows_do_not_fit_is_refused_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = [{"prompt": "the cat " * 200, "response": str(n)} for n in range(3)]
    Path("long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    parts = "--mixture.a.tasks long.jsonl --mixture.a.weight 1e9 --mixture.b.tasks words.jsonl --mixture.b.weight 1"
    words = f"sft --model start {parts} --rows 2 --steps 3 --too-long skip --threads 1 --quiet --out run".split()
    assert main(words) == 2
    err = capsys.readouterr().err.strip()
    assert "raise the weight of parts whose rows fit" in err.splitlines()[-1]
