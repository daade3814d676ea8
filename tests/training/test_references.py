"""What the reference says of rows is found once, kept under all that it depends on, and the same when a run is resumed."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from processes import FORKS, commanded
from run_traces import there, traces
from update_cases import WORDS

from posttrain.algorithms.all_algorithms import find_preference
from posttrain.cli.main import main
from posttrain.config.training import Prefer
from posttrain.core.batch import Outputs, Packed
from posttrain.data import arrow_store
from posttrain.data.preference_examples import to_item
from posttrain.data.tasks import hold_out, to_tasks
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.native.decoder import causal
from posttrain.models.native.decoder_writer import save_model
from posttrain.training import open_learner, training_run
from posttrain.training.sources.length_filter import TooLong
from posttrain.training.sources.preferences import PreferenceExamples
from posttrain.training.sources.reference_cache import Reference, mismatched, reference_logps
from posttrain.training.verbs import prefer

PAIRS = [{"prompt": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": "no" * (i % 3 + 1)} for i in range(12)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in which everything is kept however fast it was made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(arrow_store, "SLOW_SECONDS", -1.0)
    return tmp_path / "cache"


class Asked:
    """A learner's evaluation that counts what it was asked."""

    def __init__(self, seed: int = 0) -> None:
        self.learner = LocalLearner(tiny(WORDS, seed), Optimization())
        self.count = 0

    def __call__(self, batches: Sequence[Packed]) -> list[Outputs]:
        self.count += len(batches)
        return self.learner.evaluate(batches)


def items_of(rows: Sequence[dict[str, Any]], context: int = 64) -> PreferenceExamples:
    tasks = to_tasks(rows, convert=to_item)
    return PreferenceExamples(tasks, WORDS, (WORDS.eos_id or 0,), WORDS.vocab_size, TooLong("skip", context, print))


def found(asked: Asked, rows: Sequence[dict[str, Any]] = PAIRS, weights: str = "w", drift: bool = False) -> Reference:
    items = items_of(rows)
    return reference_logps(items, range(len(items)), weights, asked, 50, torch.device("cpu"), drift)


def test_log_probabilities_are_those_of_each_response_alone() -> None:
    asked = Asked()
    reference, items, model = found(asked, drift=True), items_of(PAIRS), asked.learner.model
    for place in range(len(items)):
        item = items[place]
        assert item is not None
        for transcripts, known in (
            (item.responses, reference.of(place)),
            (mismatched(items, place), reference.of_mismatched(place)),
        ):
            expected = []
            for transcript in transcripts:
                tokens = torch.tensor(transcript.tokens)
                with torch.no_grad():
                    logs = (model(tokens, torch.arange(len(tokens)), causal) @ model.head.weight.T).log_softmax(-1)
                expected += [logs[t - 1, tokens[t]].item() for t in transcript.scored.tolist()]
            assert known.dtype == torch.float32 and known.tolist() == pytest.approx(expected, abs=2e-5)


def test_what_was_found_is_kept_on_the_disk_and_found_again(cache: Path) -> None:
    first = Asked()
    before = found(first, drift=True)
    assert first.count > 1 and list(cache.rglob("*.npz"))
    again = Asked()
    after = found(again, drift=True)
    assert again.count == 0
    for place in range(len(PAIRS)):
        assert torch.equal(before.of(place), after.of(place))
        assert torch.equal(before.of_mismatched(place), after.of_mismatched(place))


def test_other_rows_tokens_weights_or_needs_never_meet_what_was_kept() -> None:
    found(Asked())
    for changed in (
        {"rows": PAIRS[:-1]},
        {"rows": [*PAIRS[:-1], {**PAIRS[-1], "chosen": "23"}]},
        {"rows": [{"prompt": "0+", "chosen": "0=0", "rejected": "0=no"}, *PAIRS[1:]]},  # parted elsewhere
        {"weights": "other"},
        {"drift": True},
    ):
        asked = Asked()
        found(asked, **changed)  # type: ignore[arg-type]
        assert asked.count, changed


def test_rows_are_told_apart_from_one_whose_response_has_the_tokens_of_both() -> None:
    """The prompt has 4 tokens, and "*" is token 4."""
    cut = {"prompt": "0+0=", "label": True, "stop": "length"}
    assert WORDS.encode("*0+0=") == [4, *WORDS.encode("0+0=", start=True)]
    found(Asked(), [{**cut, "response": "1"}, {**cut, "response": "2"}])
    asked = Asked()
    found(asked, [{**cut, "response": "1*0+0=2"}])
    assert asked.count


def test_a_response_behind_another_prompt_is_cut_to_the_context() -> None:
    rows = [
        {"prompt": "1+1+1+1+1+1+1=", "chosen": "7", "rejected": "8"},
        {"prompt": "2=", "chosen": "123456789", "rejected": "2"},
    ]
    items = items_of(rows, 18)
    prompt, long, short = (WORDS.encode(t, start=t.endswith("=")) for t in ("1+1+1+1+1+1+1=", "123456789", "2"))
    eos = [WORDS.eos_id]
    assert [t.tokens for t in mismatched(items, 0)] == [[*prompt, *long[: 18 - len(prompt)]], [*prompt, *short, *eos]]
    assert len(prompt) < 18 < len(prompt) + len(long)


def test_response_behind_another_prompt_is_of_the_next_row_that_fits_and_has_another_one() -> None:
    rows = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": "1+1=", "chosen": "4", "rejected": "5"},
        {"prompt": "1+1+1+1+1+1+1+1+1=", "chosen": "9", "rejected": "8"},
        {"prompt": "3=", "chosen": "6", "rejected": "7"},
    ]
    items = items_of(rows, 12)
    assert items[2] is None, "it does not fit"
    prompt, eos = WORDS.encode("1+1=", start=True), WORDS.eos_id
    for place in (0, 1):
        assert [t.tokens for t in mismatched(items, place)] == [[*prompt, *WORDS.encode(x), eos] for x in "67"]
    assert mismatched(items_of(rows[:3], 12), 0) == [], "no other prompt fits"


def test_each_row_is_evaluated_once_however_many_are_made_together(monkeypatch: pytest.MonkeyPatch) -> None:
    items, asked, seen = items_of(PAIRS), Asked(), list[int]()

    def evaluate(batches: Sequence[Packed]) -> list[Outputs]:
        seen.extend(len(batch.target) for batch in batches)
        return asked(batches)

    monkeypatch.setattr("posttrain.training.sources.reference_cache.AT_ONCE", 5)
    found = reference_logps(items, range(len(items)), "few", evaluate, 50, torch.device("cpu"), False)
    scored = [item.n_scored for item in map(items.__getitem__, range(len(items))) if item is not None]
    assert sum(seen) == sum(scored) and [len(found.of(place)) for place in range(len(items))] == scored


def test_a_row_that_only_lends_its_response_to_another_prompt_is_in_the_name_too() -> None:
    """A run that is shorter than an epoch visits some rows; the next one's response is read behind the last one's prompt."""
    for last in ("10", "a much longer one"):
        items = items_of([*PAIRS[:5], {**PAIRS[5], "chosen": last}])
        reference = reference_logps(items, range(5), "w", Asked(), 50, torch.device("cpu"), drift=True)
        assert len(reference.of_mismatched(4)) == sum(t.n_scored for t in mismatched(items, 4))


@pytest.mark.parametrize("damage", ["truncate", "empty", "other"])
def test_a_damaged_file_is_made_again(cache: Path, damage: str) -> None:
    before = found(Asked())
    (file,) = [f for f in cache.rglob("*.npz") if "own" in np.load(f)]
    whole = file.read_bytes()
    file.write_bytes({"truncate": whole[: len(whole) // 2], "empty": b"", "other": b"no archive"}[damage])
    asked = Asked()
    after = found(asked)
    assert asked.count and all(torch.equal(before.of(i), after.of(i)) for i in range(len(PAIRS)))


# -- runs ----------------------------------------------------------------------------------------------------------------

RUN = (
    "prefer --tasks rows.jsonl --model start --rows 4 --steps 8 --lr 1e-3 --save-every 2 --held-out 0.2 --eval-every 3"
)
SHORTER = [*RUN.replace("--steps 8", "--steps 4").split(), *"--tokens-per-microbatch 60 --threads 1 --quiet".split()]
WORDS_OF_RUN = [*RUN.split(), *"--tokens-per-microbatch 60 --threads 1 --quiet".split()]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS * 2))
    save_model(tiny(WORDS), tmp_path / "start", WORDS)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.slow
# with a drift, and with a state of its own
@pytest.mark.parametrize("name", [pytest.param("kto", marks=pytest.mark.long), "bco"])
def test_run_killed_and_resumed_with_the_cache_emptied_is_identical(place: Path, cache: Path, name: str) -> None:
    words = [*WORDS_OF_RUN, "--algorithm", name]
    assert main([*words, "--out", "whole"]) == 0
    process = FORKS.Process(target=commanded, args=([*words, "--out", "killed"], place))
    process.start()
    saved = there(place / "killed" / "checkpoints" / "step-000002")
    while not saved() and process.is_alive():
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "killed before its end"
    shutil.rmtree(cache, ignore_errors=True)
    assert main([*words, "--out", "killed", "--resume"]) == 0
    assert traces(place / "killed") == traces(place / "whole")
    assert json.loads((place / "killed" / "run.json").read_text())["resumes"]


def test_run_from_a_full_cache_equals_the_one_that_filled_it(place: Path) -> None:
    for out in ("first", "second"):
        assert main([*WORDS_OF_RUN, "--out", out]) == 0
    assert traces(place / "first") == traces(place / "second")
    rows = [json.loads(line) for line in (place / "first" / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if "kl/data" in row)
    assert (
        first["kl/data"] < 1e-10 and abs(first["margin"]) < 1e-5 and first["loss"] == pytest.approx(0.693147, abs=1e-6)
    )


def test_held_out_rows_of_which_none_fits_are_refused_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, held_out = hold_out(to_tasks(PAIRS, convert=to_item), 0.2, 0)
    unseen = {task["prompt"] for task in held_out}
    long = [{**row, "chosen": "9" * 100} if row["prompt"] in unseen else row for row in PAIRS]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    assert main([*WORDS_OF_RUN, "--out", "run"]) == 2
    told = capsys.readouterr().err.strip()
    assert "the model's context" in told and "Traceback" not in told and not (place / "run").exists()


def test_numbers_of_another_precision_have_another_name(place: Path) -> None:
    row, learner = find_preference("dpo"), Asked().learner
    options: list[dict[str, Any]] = [
        {}, {"precision": "bfloat16"}, {"precision": "bfloat16", "weights": "bfloat16"},
        {"precision": "bfloat16", "float8": True},
        {"lora": 2, "quantize": "nf4"}, {"lora": 2, "quantize": "int8"}, {"lora": 2, "frozen_weights": "bfloat16"},
    ]  # fmt: skip
    names = set()
    for given in options:
        config = Prefer(tasks="rows.jsonl", model="start", **given)
        run: Any = SimpleNamespace(config=config, start=place / "start", checkpoint=None)
        names.add(prefer._Reference(run, row, learner, torch.device("cpu"))._weights)
    assert len(names) == len(options)


def test_weights_stored_in_bfloat16_do_not_read_what_was_kept_of_float32(place: Path) -> None:
    for out, more in ("wide", []), ("narrow", ["--weights", "bfloat16"]):
        assert main([*SHORTER, "--precision", "bfloat16", *more, "--out", out]) == 0
        rows = [json.loads(line) for line in (place / out / "metrics.jsonl").read_text().splitlines()]
        first = next(row for row in rows if "kl/data" in row)
        assert first["kl/data"] == 0 and first["margin"] == 0, "the policy is its reference before the first update"


@pytest.mark.parametrize("resume", [False, True])
def test_no_second_model_is_in_memory_after_the_start(
    place: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    assert not resume or main([*SHORTER, "--out", "run"]) == 0
    shutil.rmtree(cache, ignore_errors=True)
    made: list[weakref.ref[Any]] = []
    load, trainer = open_learner.load_model, training_run.Trainer

    def noted(*given: Any, **options: Any) -> Any:
        model = load(*given, **options)
        made.append(weakref.ref(model))
        return model

    def counted(*given: Any) -> Any:
        gc.collect()
        alive.append(sum(model() is not None for model in made))
        return trainer(*given)

    alive: list[int] = []
    monkeypatch.setattr(open_learner, "load_model", noted)
    monkeypatch.setattr(training_run, "Trainer", counted)
    assert main([*WORDS_OF_RUN, "--out", "run", *["--resume"][: int(resume)]]) == 0
    assert alive == [1] and len(made) == (3 if resume else 1), "on resume: once for the rows, once for those held out"
