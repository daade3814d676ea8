"""What given rows leave in a record, and that a record of every level is the same after a resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from generated_runs import table_of
from sums import PAIRS, QUICK, SMALL, SUMS, nearness
from tiny_models import make

import posttrain
from posttrain.apps.view.rollout_files import File, rows
from posttrain.core.batch import Layout, Stats, TrainingStep
from posttrain.core.protocols import Learner, Model
from posttrain.core.rollouts import Outcome, Rollout
from posttrain.core.token_probe import SHARE, TokenSink
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.tokenizer.tokenizer_training import EOS
from posttrain.runs.record.rollout_reading import EVERY, read_rollouts
from posttrain.runs.record.table_writer import half, write_table
from posttrain.runs.run_reading import rollout_steps
from posttrain.training.sources.example_recording import ExampleRecording
from posttrain.training.sources.token_recording import GROUPS, TokenRecording


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("showing") / "start"
    return posttrain.sft(SUMS, out=str(out), steps=3, rows=12, lr=1e-3, **SMALL, **QUICK).path


def numbers_of_each(rows: list[dict[str, Any]], kind: str) -> None:
    """What the first step leaves of all its rows."""
    for told in rows:
        assert {len(told[name]) for name in ("learner", "entropy", "weight", "after")} == {told["scored"]}
        still = kind == "sft" or half(told["learner"]).tolist() == told["reference"]
        assert still, "nothing has moved before step 1"
    if kind == "sft":
        share = 1 / sum(told["scored"] for told in rows)
        assert all(value == pytest.approx(share, rel=1e-3) for told in rows for value in told["weight"])
    else:
        assert all((sum(told["weight"]) > 0) == (told["member"] == 0) for told in rows), "the better response goes up"


@pytest.mark.parametrize("kind", ["sft", "prefer", "reward-model"])
def test_a_sample_of_given_rows_leaves_the_same_numbers_and_changes_no_bit(
    start: Path, tmp_path: Path, kind: str
) -> None:
    def ran(name: str, **how: Any) -> Path:
        train = {"sft": posttrain.sft, "prefer": posttrain.prefer, "reward-model": posttrain.reward_model}[kind]
        rows = SUMS if kind == "sft" else PAIRS
        return train(rows, model=str(start), out=str(tmp_path / name), steps=3, rows=12, lr=1e-3, **QUICK, **how).path

    scored = kind == "reward-model"
    bare, few = ran("bare", record="tokens"), ran("few")
    full = ran("full", record="full", record_after=not scored)
    runs = (bare, few, full)
    assert len({(run / "metrics.jsonl").read_bytes() for run in runs}) == 1
    assert len({b"".join(f.read_bytes() for f in sorted(run.glob("checkpoints/*/*.safetensors"))) for run in runs}) == 1
    assert rollout_steps(bare) == rollout_steps(few) == [1] and rollout_steps(full) == [1, 2, 3]
    plain, sample, whole = (read_rollouts(run, 1, None) for run in runs)
    each = 1 if kind == "sft" else 2
    assert len(sample) == len(plain) == GROUPS * each and len(whole) == 12 * each
    for step in (1, 2, 3):  # two see all rows that are not held out
        assert {told["epoch"] for told in read_rollouts(full, step)} == {(step - 1) // 2}
    assert {told["kind"] for told in whole} == {kind} and not any(told["learner"] for told in plain)
    known = {(told["group"], told["member"]): told for told in whole}
    for told in sample:
        same = known[told["group"], told["member"]]
        assert all(same[name] == told[name] for name in ("tokens", "entropy", "weight", "label"))
        assert same["learner"] is None or half(same["learner"]).tolist() == told["learner"]
    if scored:
        assert not any(told["learner"] for told in whole)
        assert whole[0]["label"] == {"comparisons": [[0, 1, 1.0, 0.0]], "labels": []}
    else:
        numbers_of_each(whole, kind)


def test_a_given_row_whose_update_was_skipped_has_weighed_nothing() -> None:
    outcome = Outcome(Rollout({}, "", [], 0.0), numbers={"weight": np.ones(2), "learner": np.zeros(2)})
    for skipped in (False, True):
        showing = ExampleRecording(TokenRecording("full"), cast(Learner, None), 100)
        sink = showing.sink([])
        assert sink is not None
        sink.skipped = skipped
        showing.settle(TrainingStep(1, [], Stats({}), outcomes=[outcome]))
        assert set(outcome.numbers) == {"learner", *([] if skipped else ["weight"])}


def test_a_token_weighs_what_its_log_probability_does_and_a_share_only_without_one() -> None:
    sink = TokenSink(frozenset({0, 1}))
    first, second = sink.tap([0], [2]), sink.tap([1], [1])
    sink.take(first, {"weight": torch.tensor([1.0, 2.0])})
    sink.take(first, {SHARE: torch.tensor([7.0, 8.0])})
    sink.take(second, {SHARE: torch.tensor([9.0])})
    found = sink.settle()
    assert {place: columns["weight"].tolist() for place, columns in found.items()} == {0: [1.0, 2.0], 1: [9.0]}
    assert all(set(columns) == {"weight"} for columns in found.values())


@pytest.mark.parametrize("level", ["tokens", "sample", "full"])
def test_record_of_each_level_is_exact_after_a_resumption(start: Path, tmp_path: Path, level: str) -> None:
    def ran(out: Path, **how: Any) -> Path:
        options = {"steps": 4, "prompts": 6, "group": 3, "max_tokens": 4, "lr": 1e-3, "env_workers": 0, "save_every": 2}
        options |= {"record": level, "record_after": level != "tokens", "minibatches": 2, "algorithm": "grpo", **how}
        if "resume" in how:
            options = {"resume": True, "steps": 4, "quiet": True, "env_workers": 0}
            return posttrain.rl(SUMS, nearness, str(start), out=str(out), **options).path
        return posttrain.rl(SUMS, nearness, str(start), out=str(out), **options, **QUICK).path

    whole, half = ran(tmp_path / "whole"), ran(tmp_path / "half", steps=2)
    ran(half, resume=True)
    for step in (1, 2, 3, 4):
        tables = [(run / "rollouts" / f"step-{step:06d}.parquet").read_bytes() for run in (whole, half)]
        assert tables[0] == tables[1]
    found = [told["learner"] is not None for told in read_rollouts(whole, 4, None)]
    assert any(found) == (level != "tokens")


def said_by(model: Model, row: dict[str, Any]) -> dict[str, np.ndarray]:
    """Log-probabilities and entropies of a row's scored tokens, from whole logits, one token after the other."""
    tokens = torch.tensor(row["tokens"])
    layout = Layout(tokens, torch.arange(len(tokens)), (0,), (len(tokens),), (-1,))
    with torch.no_grad():
        logs = model.head.logits(model.hidden(layout, torch.arange(len(tokens)))).double().log_softmax(-1)
    at = [span["start"] + i for span in row["spans"] if span["learned"] for i in range(span["length"])]
    logp = np.array([float(logs[place - 1, row["tokens"][place]]) for place in at])
    return {"logp": logp, "entropy": np.array([float(-(logs[p - 1].exp() * logs[p - 1]).sum()) for p in at])}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("native", {}),
        ("native", {"async_steps": 1, "correction": "truncate"}),
        ("native", {"tokens_per_step": 2, "correction": "truncate"}),
        ("native", {"lora": 4}),
        ("gemma3_text", {}),
        ("phi3", {"lora": 4}),
    ],
    ids=str,
)
def test_recorded_numbers_are_those_of_the_checkpoints(
    start: Path, tmp_path: Path, kind: str, how: dict[str, Any]
) -> None:
    if kind != "native":
        tokenizer = Tokenizer.load(start / "checkpoints" / "step-000003")
        vocab, end = tokenizer.vocab_size, tokenizer.backend.token_to_id(EOS)
        make(kind, tmp_path / "start", vocab_size=vocab, eos_token_id=end, pad_token_id=None)
        tokenizer.save(tmp_path / "start")
        start = tmp_path / "start"
    run = posttrain.rl(
        SUMS, nearness, str(start), out=str(tmp_path / "run"), algorithm="grpo", kl=0.1, steps=3, prompts=4, group=3,
        max_tokens=4, lr=3e-3, env_workers=0, save_every=1, keep=9, record="full", record_after=True, **how, **QUICK,
    )  # fmt: skip
    weights = {0: load_model(start if kind != "native" else start / "checkpoints" / "step-000003")}
    weights |= {step: load_model(run.path / "checkpoints" / f"step-{step:06d}") for step in (1, 2, 3)}
    seen, steps = 0, rollout_steps(run.path)
    later = steps[0] - 1  # steps without an update, since no reply was whole: versions count updates
    for step in steps:
        for row in read_rollouts(run.path, step, EVERY):
            if row["learner"] is None:  # nothing of it reached an update
                assert row["fate"] != "trained"
                continue
            before, after = said_by(weights[step - 1], row), said_by(weights[step], row)
            assert row["learner"] == pytest.approx(before["logp"], rel=1e-3, abs=1e-4)
            assert row["entropy"] == pytest.approx(before["entropy"], rel=1e-3, abs=1e-4)
            assert row["after"] == pytest.approx(after["logp"], rel=1e-3, abs=1e-4)
            assert row["reference"] == pytest.approx(said_by(weights[0], row)["logp"], rel=1e-3, abs=1e-4)
            sampled = [s["version"] for s in row["spans"] if s["kind"] == "sampled" for _ in range(s["length"])]
            engine = [
                said_by(weights[version + later if version else 0], row)["logp"][i] for i, version in enumerate(sampled)
            ]
            assert row["engine"] == pytest.approx(np.array(engine), rel=1e-5, abs=1e-4)
            seen += 1
    assert seen > 6


def test_before_the_first_update_is_at_that_update(tmp_path: Path) -> None:
    told = {"spans": [], "learner": [-1.0, -2.0]}
    kinds = [
        {"why": None},
        {"why": "in update 2 of 3"},
        {"why": "in update 1 of 3", "before": [-4.0, -3.0]},
        {"learner": None},
        {"why": "in update 1 of 3"},
        {"why": "in updates 1, 2 of 3"},
    ]
    write_table(tmp_path / "step-000001.parquet", table_of([{**told, **kind} for kind in kinds]))
    file = File(tmp_path / "step-000001.parquet", (0, 0))
    found = rows(file, names=("index", "before"))
    assert found.column_names == ["index", "before"]
    assert found["before"].to_pylist() == [[-1.0, -2.0], None, [-4.0, -3.0], None, [-1.0, -2.0], None]
