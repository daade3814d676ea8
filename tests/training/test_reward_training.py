"""Runs of reward models: what is written and reported is what naive code finds, and what cannot be learned is refused."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DATA, tiny
from judged import own_pad, scores
from reward_rows import LABELLED, SEVERAL, pairs, said

import posttrain
from posttrain.cli.main import main
from posttrain.core.intervals import share_interval
from posttrain.core.types import UserError
from posttrain.data.preference_examples import to_item
from posttrain.data.tasks import hold_out, order, to_tasks
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.reward_model import load_reward_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.services.reward_model_service import RewardModelService as Service
from posttrain.training.reward_baselines import ComparedTexts, Perceptron, longer_wins
from posttrain.training.reward_model_evaluation import _area, _by_margin, _calibration_error
from posttrain.training.trainer import Trainer
from posttrain.training.verbs.reward_model_training import lines, only_label

QUICK: dict[str, Any] = {"lr": 1e-2, "rows": 4, "threads": 1, "quiet": True}


@pytest.fixture
def start(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    return tmp_path / "start"


def test_every_checkpoint_has_the_offset_that_centres_its_own_scores(tmp_path: Path, start: Path) -> None:
    rows = pairs(9)
    posttrain.reward_model(rows, start, out=str(tmp_path / "run"), save_every=1, keep=9, **QUICK)
    found = []
    for step in (1, 2, 3):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        service = Service(folder)
        for id, row in enumerate(rows):
            for way in ("chosen", "rejected"):
                service.submit(2 * id + (way == "chosen"), {"prompt": row["prompt"], "response": row[way]})
        answers = dict(service.poll())
        assert len(answers) == 18 and sum(answers.values()) == pytest.approx(0, abs=1e-4)
        assert max(answers.values()) > 0.1
        found.append(json.loads((folder / "config.json").read_text())["posttrain_score_offset"])
        assert found[-1] == service.model.offset and f"{service.model.offset:+g} to every score" in service.description
    assert len(set(found)) == 3


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_recorded_score_is_that_of_the_weights_that_the_update_began_with(
    tmp_path: Path, start: Path, pooling: str
) -> None:
    run = posttrain.reward_model(
        pairs(8), start, out=str(tmp_path / "run"), save_every=1, pooling=pooling, record="full", **QUICK
    )
    assert run.checkpoint is not None and len(run.metrics) == 3
    service = Service(run.checkpoint.parent / "step-000001")
    for step in (1, 2):
        rows = read_rollouts(run.path, step)
        told = run.metrics[step]
        assert np.mean([row["reward"] for row in rows]) == pytest.approx(told["score"])
        margins = [row["parts"]["margin"] for row in rows if not row["member"]]
        assert np.mean(margins) == pytest.approx(told["margin"]) and len(margins) == 4
        assert not any(row["parts"] for row in rows if row["member"])
    for place, row in enumerate(rows):
        service.submit(place, {"prompt": row["prompt"], "response": row["text"].removesuffix("<|eos|>")})
    found = dict(service.poll())
    assert [row["reward"] for row in rows] == pytest.approx(
        [found[place] - service.model.offset for place in range(8)], abs=1e-5
    )


def test_each_step_of_a_solution_has_its_score_at_its_end(tmp_path: Path, start: Path) -> None:
    rows = [
        {"prompt": f"{i}", "steps": ["one two", "so it is"], "mistake_index": (None, 0, 1)[i % 3]} for i in range(4)
    ]
    run = posttrain.reward_model(rows, start, out=str(tmp_path / "run"), steps=1, algorithm="outcome", **QUICK)
    told = read_rollouts(run.path, 1)
    several = [row for row in told if row["step_rewards"]]
    scores = [row["reward"] for row in told if row not in several]  # cut behind its first step: it has one score
    scores += [step["reward"] for row in several for step in row["step_rewards"]]
    assert np.mean(scores) == pytest.approx(run.metrics[1]["score"]) and not any(row["parts"] for row in told)
    assert len(several) > 1 and all(row["reward"] is None for row in several)
    for row in several:
        ends = np.cumsum([span["length"] for span in row["spans"] if span["learned"]])
        assert [step["at"] for step in row["step_rewards"]] == ends.tolist()


def test_the_offset_is_of_rows_from_all_over(tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.training.reward_model_evaluation.CENTRED_ON", 3)
    rows = pairs(9)
    run = posttrain.reward_model(rows, start, out=str(tmp_path / "run"), steps=1, **QUICK)
    assert run.checkpoint is not None
    service = Service(run.checkpoint)
    texts = [{"prompt": row["prompt"], "response": row[way]} for row in rows[::3] for way in ("chosen", "rejected")]
    for id, text in enumerate(texts):
        service.submit(id, text)
    assert sum(dict(service.poll()).values()) == pytest.approx(0, abs=1e-4)


def test_scores_that_labels_fix_are_not_moved(tmp_path: Path, start: Path) -> None:
    for name, rows in (("outcome", LABELLED), ("regression", [{"prompt": "a", "response": "b", "score": 3}])):
        run = posttrain.reward_model(rows, start, algorithm=name, out=str(tmp_path / name), **QUICK)
        assert run.checkpoint is not None and load_reward_model(run.checkpoint).offset == 0
        assert run.metrics[-1]["score/training"] != 0


def test_the_report_is_what_naive_code_finds_of_the_held_out_rows(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.training.reward_model_evaluation.AT_ONCE", 5)  # several portions, as of many rows
    rows = [*pairs(40), *({**row, "prompt": f"x{i}"} for i, row in enumerate(SEVERAL))]
    run = posttrain.reward_model(rows, start, out=str(tmp_path / "run"), held_out=0.3, seed=5, **QUICK)
    report = json.loads((run.path / "report.json").read_text())
    assert run.checkpoint is not None
    model, tokenizer = load_reward_model(run.checkpoint), Tokenizer.load(run.checkpoint)
    _, unseen = hold_out(to_tasks(rows, convert=to_item, split_seed=5), 0.3, 5)
    sums, counts, margins, longer = [], [], [], []
    for task in unseen:
        texts = [
            (tokenizer.encode(task["prompt"], start=True), [*tokenizer.encode(r), *model.eos_ids])
            for r in task["responses"]
        ]
        found = scores(model, texts).tolist()
        own = [found[int(b)] - found[int(w)] for b, w, _, _ in task["comparisons"]]
        margins += own
        sums.append(float(sum(m > 0 for m in own)))
        counts.append(float(len(own)))
        lengths = [len(r.split()) for r in task["responses"]]
        longer += [np.sign(lengths[int(b)] - lengths[int(w)]) / 2 + 0.5 for b, w, _, _ in task["comparisons"]]
    figures = report["figures"]
    assert (report["prompts"], report["comparisons"]) == (len(unseen), len(margins))
    assert figures["accuracy"]["mean"] == pytest.approx(sum(sums) / sum(counts))
    assert figures["longer wins"]["mean"] + figures["shorter wins"]["mean"] == pytest.approx(1)
    assert figures["calibration error"]["mean"] == pytest.approx(calibration(margins), abs=1e-5)
    assert (figures["accuracy"]["low"], figures["accuracy"]["high"]) == tuple(share_interval(sums, counts))
    assert report["offset"] == model.offset and sum(p["n"] for p in report["by_margin"]) == len(margins)
    assert run.metrics[-1]["eval/accuracy"] == figures["accuracy"]["mean"]


def test_labels_of_steps_are_reported_step_by_step_and_by_solution(tmp_path: Path, start: Path) -> None:
    drawn = random.Random(1)
    rows = [
        {
            "prompt": f"{i} =",
            "steps": [said(drawn, 2)[:12] for _ in range(3)],
            "mistake_index": drawn.choice([None, 0, 1, 2]),
        }
        for i in range(40)
    ]
    run = posttrain.reward_model(rows, start, algorithm="outcome", out=str(tmp_path / "run"), held_out=0.4, **QUICK)
    assert run.checkpoint is not None
    report, model = json.loads((run.path / "report.json").read_text()), load_reward_model(run.checkpoint)
    words = Tokenizer.load(run.checkpoint)
    _, unseen = hold_out(to_tasks(rows, convert=to_item, split_seed=0), 0.4, 0)
    judged: list[list[tuple[float, float]]] = []
    for task in unseen:
        so_far, own = words.encode(task["prompt"], start=True), []
        for step, label in zip(task["responses"][0], task["labels"][0], strict=True):
            tokens = words.encode(step + "\n")
            own.append((scores(model, [(so_far, tokens)]).item(), label))
            so_far = so_far + tokens
        judged.append(own)
    flat = [pair for own in judged for pair in own]
    figures = {name: figure["mean"] for name, figure in report["figures"].items()}
    good = np.mean([y for _, y in flat])
    assert figures["accuracy"] == pytest.approx(np.mean([(s > 0) == (y == 1) for s, y in flat]))
    assert figures["always the commoner"] == pytest.approx(max(good, 1 - good))
    whole = [all(s > 0 for s, _ in own) == all(y == 1 for _, y in own) for own in judged]
    assert figures["verdict on solutions"] == pytest.approx(np.mean(whole))
    assert figures["area under the curve"] == pytest.approx(area(flat), abs=1e-9)
    gain, told = report["gain"], "\n".join(lines(report))
    assert gain["mean"] == pytest.approx(figures["accuracy"] - figures["always the commoner"])
    assert gain["low"] is None or gain["low"] < 0, "a model of random labels learns nothing"
    assert "not shown to be better than a guess" in told and "train longer or on more labels" in told
    report["gain"] = {"mean": 0.2, "low": 0.1, "high": 0.3}
    assert "verdict                better than a guess: +0.200 [+0.100, +0.300]" in "\n".join(lines(report))


def test_a_single_label_of_all_rows_is_found_and_told(
    tmp_path: Path, start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{i} =", "steps": ["1", "2"], "mistake_index": None} for i in range(8)]
    posttrain.reward_model(rows, start, algorithm="outcome", out=str(tmp_path / "run"), **QUICK)
    told = capsys.readouterr()
    assert "all labels are 1, so the model can learn nothing else" in told.out + told.err
    assert only_label(to_tasks([*rows, {**rows[0], "mistake_index": 1}], convert=to_item, split_seed=0)) is None
    assert only_label(to_tasks(pairs(3), convert=to_item, split_seed=0)) is None


def area(flat: Sequence[tuple[float, float]]) -> float:
    """The chance that a good one is above a bad one, pair by pair."""
    won = [(a > b) + 0.5 * (a == b) for a, y in flat if y > 0.5 for b, z in flat if z <= 0.5]
    return float(np.mean(won))


def calibration(margins: Sequence[float]) -> float:
    """Expected calibration error of ten bins from one half to one, comparison by comparison."""
    inside: dict[int, list[tuple[float, float]]] = {}
    for margin in margins:
        confidence = 1 / (1 + np.exp(-abs(margin)))
        right = 0.5 if margin == 0 else float(margin > 0)
        inside.setdefault(min(9, int((confidence - 0.5) / 0.05)), []).append((confidence, right))
    gaps = [abs(sum(c - r for c, r in own)) for own in inside.values()]
    return sum(gaps) / len(margins)


def test_calibration_area_and_parts_by_margin_are_those_of_loops() -> None:
    drawn = random.Random(2)
    for _ in range(20):
        margins = [drawn.choice([0.0, drawn.gauss(0.5, 1), drawn.gauss(0, 9)]) for _ in range(drawn.randint(1, 60))]
        assert _calibration_error(np.array(margins)) == pytest.approx(calibration(margins))
        parts = _by_margin(np.array(margins))
        right = sum(p["accuracy"] * p["n"] for p in parts)
        assert right == pytest.approx(sum(0.5 if m == 0 else m > 0 for m in margins))
        smallest = sorted(margins, key=abs)[: int(parts[0]["n"])]
        assert parts[0]["accuracy"] == pytest.approx(np.mean([0.5 if m == 0 else m > 0 for m in smallest]))
        assert parts[0]["most"] == pytest.approx(abs(smallest[-1]))
        pairs = [[(float(drawn.randint(0, 5)), float(drawn.random() < 0.5)) for _ in range(3)] for _ in range(9)]
        flat = [pair for own in pairs for pair in own]
        assert _area(pairs) == pytest.approx(area(flat), nan_ok=True)


def test_the_longer_wins_counts_words_and_signs() -> None:
    item = ComparedTexts(["one two", "one, two", "A b", "c"], [(1, 0), (0, 1), (0, 2), (3, 2)])
    assert longer_wins(item) == [1.0, 0.0, 0.5, 0.0]


def test_the_bag_of_words_is_an_averaged_perceptron() -> None:
    """Every weight vector that ever judged an example is stored, and their mean taken."""
    drawn = random.Random(3)
    items = [
        ComparedTexts([said(drawn), said(drawn) + drawn.choice(["", " no"]), said(drawn)], [(0, 1), (2, 1)])
        for _ in range(12)
    ]
    names = sorted({word for item in items for text in item.texts for word in text.split()})

    def counts(text: str) -> np.ndarray[Any, Any]:
        return np.array([text.split().count(name) for name in names], dtype=float)

    examples = [counts(item.texts[b]) - counts(item.texts[w]) for item in items for b, w in item.pairs]
    weights, stored = np.zeros(len(names)), []
    for epoch in range(10):
        for place in order(len(examples), epoch, 0):
            stored.append(weights.copy())
            if weights @ examples[int(place)] <= 0:
                weights = weights + examples[int(place)]
    mean = np.mean(stored, axis=0)
    found = Perceptron.learned(items)
    assert np.abs(mean).max() > 0.5
    assert [found.weights.get(name, 0.0) for name in names] == pytest.approx(mean.tolist(), abs=1e-9)
    test = ComparedTexts(["yes yes", "no", "no", "unheard"], [(0, 1), (1, 2), (3, 1)])
    value = dict(zip(names, mean, strict=True))
    expected = [float(2 * value["yes"] > value["no"]), 0.5, float(value["no"] < 0)]
    assert found.wins(test) == expected


def test_intervals_are_over_whole_prompts() -> None:
    drawn = np.random.default_rng(4)
    sums, counts = [], []
    for _ in range(30):  # the comparisons of a prompt agree: as independent ones they would look surer than they are
        counts.append(float(drawn.integers(1, 9)))
        sums.append(counts[-1] * float(drawn.random() < 0.6))
    ratios = []
    for _ in range(4000):
        picked = drawn.integers(30, size=30)
        ratios.append(sum(sums[i] for i in picked) / sum(counts[i] for i in picked))
    low, high = share_interval(sums, counts)
    assert (low, high) == pytest.approx(np.quantile(ratios, [0.025, 0.975]), abs=0.03)
    share, total = sum(sums) / sum(counts), sum(counts)
    assert high - low > 1.5 * 2 * 1.96 * (share * (1 - share) / total) ** 0.5


LABEL = {"prompt": "a", "response": "b", "label": 1}
GRADE = {"prompt": "a", "response": "b", "score": 7}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
STEPS = {"prompt": "a", "steps": ["b", "c"], "mistake_index": 1}
BAD: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([LABEL], {}, "bradley-terry compares responses to one prompt, and these rows label single responses"),
    ([STEPS], {"algorithm": "k-wise"}, "k-wise compares responses"),
    ([PAIR], {"algorithm": "regression"}, "regression learns scores, and these rows compare responses"),
    (
        [GRADE],
        {"algorithm": "outcome"},
        "outcome learns probabilities, and a row has the score 7: choose --algorithm regression",
    ),
    ([STEPS], {"algorithm": "outcome", "pooling": "mean"}, "leave out --pooling mean"),
    ([PAIR, {**LABEL, "prompt": "z"}], {"too_long": "refuse"}, "row 2: bradley-terry compares responses"),
    ([LABEL, {**GRADE, "prompt": "z"}], {"algorithm": "outcome", "too_long": "refuse"}, "row 2: outcome learns"),
    (
        [{**PAIR, "rejected": "b"}],
        {},
        "1 of 1 rows were left out, without a label or comparison of different responses",
    ),
    ([{**PAIR, "chosen": "x" * 100}], {}, "nothing fits|longer|context"),
]


@pytest.mark.parametrize(("rows", "options", "told"), BAD, ids=[told[:40] for _, _, told in BAD])
def test_rows_that_a_link_cannot_read_are_refused_in_one_line(
    tmp_path: Path, start: Path, rows: list[dict[str, Any]], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told) as error:
        posttrain.reward_model(rows, start, out=str(tmp_path / "run"), **{**QUICK, **options})
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_equal_responses_ties_and_empty_ones_are_left_out_and_counted(tmp_path: Path, start: Path) -> None:
    nothing = [
        {**PAIR, "rejected": "b"},
        {**PAIR, "chosen": " "},
        {"prompt": "t", "responses": ["u", "v"], "ranks": [1, 1]},
    ]
    run = posttrain.reward_model([*pairs(4), *nothing], start, out=str(tmp_path / "run"), **QUICK)
    sizes = "\n".join(json.loads((run.path / "run.json").read_text())["sizes"])
    assert (
        "3 rows left out" in sizes
        and "without a label or comparison of different responses that are not empty" in sizes
    )


@pytest.mark.parametrize("options", [{}, {"pooling": "mean", "head": "mlp"}], ids=["linear at the end", "ours"])
def test_what_separates_words_is_learned(tmp_path: Path, options: dict[str, Any]) -> None:
    words = own_pad()
    config = DecoderConfig(words.vocab_size, 32, 1, 4, 2, 8, 48, 64, tied=True)
    save_model(new_decoder(config, 0), tmp_path / "start", words)
    drawn = random.Random(0)
    rows = [{"prompt": f"{i}", "chosen": said(drawn, 3), "rejected": "no " + said(drawn, 3)} for i in range(96)]
    given = {**QUICK, "rows": 8, "epochs": 5, **options}
    run = posttrain.reward_model(rows, tmp_path / "start", out=str(tmp_path / "run"), **given)
    assert np.mean([m["accuracy"] for m in run.metrics[-6:]]) > 0.9


def test_an_interrupted_run_reports_nothing_of_a_model_that_it_did_not_reach(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = Trainer._after

    def interrupting(self: Trainer, trained: Any, interrupted: Any) -> bool:
        if trained.step.number == 1:
            signal.raise_signal(signal.SIGINT)
        return after(self, trained, interrupted)

    monkeypatch.setattr(Trainer, "_after", interrupting)
    run = posttrain.reward_model(pairs(20), start, out=str(tmp_path / "run"), held_out=0.3, **QUICK)
    assert run.interrupted and not (run.path / "report.json").exists()
    monkeypatch.undo()
    posttrain.reward_model(pairs(20), start, out=str(tmp_path / "run"), held_out=0.3, **QUICK, resume=True)
    assert (run.path / "report.json").exists()


def test_the_command_prints_the_report(
    tmp_path: Path, start: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(30)))
    words = "reward-model --tasks pairs.jsonl --model start --out run --held-out 0.3 --threads 1 --quiet".split()
    assert main(words) == 0
    shown = capsys.readouterr().out
    for name in ("accuracy", "longer wins", "shorter wins", "bag of words", "calibration error", "accuracy by margin"):
        assert f"\n{name}" in "\n" + shown
    assert torch.get_num_threads() == 1


def test_real_pairs_that_are_identical_are_skipped(data: Path) -> None:
    rows = [json.loads(line) for line in (DATA / "preferences" / "pairs.jsonl").read_text().splitlines()]
    assert sum(to_item(row) is None for row in rows) == sum(row["chosen"] == row["rejected"] for row in rows) == 6
