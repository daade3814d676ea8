"""Each number stands at the token that it is of, whichever tokens were sampled, scored, or both."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import generated_runs
import numpy as np
import pytest

from posttrain.apps.view.api import Answers
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.training_reasons import why
from posttrain.runs.record.rollout_reading import read_file

Row = dict[str, Any]
KINDS = ("prompt", "sampled", "observation", "sampled")
LENGTHS = (3, 4, 2, 5)


def row(learned: tuple[bool, ...]) -> Row:
    """An episode whose spans are learned from or not. Each number of token 7 is 7 of its hundred."""
    starts = np.cumsum([0, *LENGTHS])[:-1].tolist()
    places = np.arange(sum(LENGTHS))
    of = np.repeat(np.arange(4), LENGTHS)
    scored, sampled = places[np.array(learned)[of]], places[np.array([k == "sampled" for k in KINDS])[of]]
    return {
        "spans": [
            {"kind": kind, "start": start, "length": length, "version": 1, "learned": own}
            for kind, start, length, own in zip(KINDS, starts, LENGTHS, learned, strict=True)
        ],
        "tokens": np.array(places, dtype=np.int32),
        "transcripts": [int(sum(LENGTHS))],
        "engine": (100 + sampled).astype(np.float32),
        "before": (200 + scored).astype(np.float32),
        "learner": (300 + 2 * scored).astype(np.float32),
        "weight": (500 + scored).astype(np.float32),
        "kept": (scored % 2 == 0).tolist(),
        "sampled": len(sampled),
        "scored": len(scored),
        "length": len(sampled) or len(scored),
        "total": len(places),
    }


SPANS = {
    "replies": (False, True, False, True),
    "the prompt too": (True, True, False, True),
    "the observation too": (False, True, True, True),
    "one reply of two": (False, False, False, True),
    "the first reply alone": (False, True, False, False),
    "a demonstration": (True, False, True, False),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """A run of one step, a rollout for each of SPANS."""
    folder = generated_runs.make_hostile(tmp_path_factory.mktemp("places") / "run")
    base = {
        "step": 1, "kind": "rl", "epoch": 0, "task": "a", "columns": "{}", "prompt": "p", "text": "t", "reward": 1.0,
        "parts": [], "advantage": 0.5, "used": 1.0, "fate": "trained", "flags": [], "replayed": False, "stop": "eos",
        "truncated": False, "version": 1, "versions": [1], "turns": [], "media": [], "pictures": [],
    }  # fmt: skip
    rows = [{**base, **row(own), "index": i, "member": i, "group": "a#0"} for i, own in enumerate(SPANS.values())]
    generated_runs.save(folder / "rollouts" / "step-000001.parquet", rows)
    run = OpenRun(folder, "run")
    run.read()
    return Answers([run])


def by_token(text: str) -> dict[int, float]:
    values = np.frombuffer(b64decode(text), dtype="<f4")
    return {i: float(v) for i, v in enumerate(values) if not np.isnan(v)}


@pytest.mark.parametrize("how", SPANS)
def test_the_engines_numbers_stand_at_what_was_sampled_and_the_learners_at_what_is_scored(
    answers: Answers, how: str
) -> None:
    learned, at, scored, sampled = SPANS[how], 0, [], []
    for kind, length, own in zip(KINDS, LENGTHS, learned, strict=True):
        scored += list(range(at, at + length)) if own else []
        sampled += list(range(at, at + length)) if kind == "sampled" else []
        at += length
    place = list(SPANS).index(how)
    shown = [answers.of(f"0/rollout/1/{place}", {}), answers.of("0/group/1/0", {})["rollouts"][place]]
    for one in shown:
        numbers = {name: by_token(text) for name, text in one["numbers"].items()}
        assert numbers["engine"] == {i: 100.0 + i for i in sampled}
        assert numbers["before"] == {i: 200.0 + i for i in scored}
        assert numbers["weight"] == {i: 500.0 + i for i in scored}
        assert numbers["kept"] == {i: float(i % 2 == 0) for i in scored}
        assert [i for kind, start, n, _, own in one["spans"] for i in range(start, start + n) if own] == scored


MEASURES: dict[str, Callable[[int], float]] = {
    "gap": lambda i: 100.0,  # learner before the step less engine
    "learner": lambda i: 100.0 + i,  # at its update less before
    "push": lambda i: 500.0 + i,
}


@pytest.mark.parametrize("by", MEASURES)
def test_what_a_step_changed_is_counted_at_the_tokens_that_it_is_of(answers: Answers, by: str) -> None:
    data = answers.of("0/step/1", {"by": by})
    expected: dict[int, int] = {}
    for learned in SPANS.values():
        if by == "gap" and any(own for kind, own in zip(KINDS, learned, strict=True) if kind != "sampled"):
            continue  # some scored tokens have no number of the engine's
        at = 0
        for length, own in zip(LENGTHS, learned, strict=True):
            for i in range(at, at + length):
                expected[i] = expected.get(i, 0) + own
            at += length
    assert data["n"] == sum(expected.values())
    entries = {entry["id"]: entry for entry in data["vocabulary"]["up"]}
    assert {i: entry["n"] for i, entry in entries.items()} == {i: n for i, n in expected.items() if n}
    for i, entry in entries.items():
        assert entry["sum"] == pytest.approx(entry["n"] * MEASURES[by](i), rel=1e-3)


def test_numbers_of_a_window_are_those_of_its_tokens(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.apps.view.rollout_page.WINDOW", 4)
    place = list(SPANS).index("the observation too")
    for begin in range(0, sum(LENGTHS), 4):
        one = answers.of(f"0/rollout/1/{place}", {"begin": str(begin)})
        for name, base in (("engine", 100), ("before", 200)):
            for i, value in by_token(one["numbers"].get(name, "")).items():
                assert value == base + begin + i


def test_before_the_step_is_what_the_learner_said_unless_several_updates_came_between(
    answers: Answers, tmp_path: Path
) -> None:
    folder = answers.runs[0].folder
    rows = read_file(folder / "rollouts" / "step-000001.parquet").to_pylist()
    rows[0] |= {"before": None}
    rows[1] |= {"before": None, "why": "in update 2 of 4"}
    generated_runs.make_hostile(tmp_path)
    generated_runs.save(tmp_path / "rollouts" / "step-000001.parquet", rows)
    run = OpenRun(tmp_path, "run")
    run.read()
    one, several, known = (Answers([run]).of(f"0/rollout/1/{i}", {})["numbers"] for i in range(3))
    assert one["before"] == one["learner"] and "before" not in several and known["before"] != known["learner"]


def test_turns_of_several_contexts_begin_where_their_tokens_stand(answers: Answers, tmp_path: Path) -> None:
    rows = read_file(answers.runs[0].folder / "rollouts" / "step-000001.parquet").to_pylist()
    turn = {"role": "sampled", "text": "t", "length": 2, "reward": 0.0, "cut": 0, "calls": []}
    rows[0] |= {"transcripts": [3, 4, 7], "turns": [{**turn, "transcript": t, "first": t} for t in (0, 1, 2, 2)]}
    generated_runs.make_hostile(tmp_path)
    generated_runs.save(tmp_path / "rollouts" / "step-000001.parquet", rows)
    run = OpenRun(tmp_path, "run")
    run.read()
    assert [turn["first"] for turn in Answers([run]).of("0/rollout/1/0", {})["turns"]] == [0, 4, 9, 9]


def test_a_rollout_of_an_update_that_was_skipped_is_not_said_to_be_trained() -> None:
    trained = {"kind": "rl", "fate": "trained", "advantage": 1.0, "why": "", "invalid": None}
    assert "made more likely" in why({**trained, "flags": []})
    assert "skipped" in why({**trained, "flags": ["update skipped"]})
    assert "likely" not in why({**trained, "flags": ["update skipped"]})


def test_a_rollout_whose_tokens_move_apart_is_not_said_to_move_as_one() -> None:
    row = {"kind": "rl", "fate": "trained", "advantage": -0.25, "why": "", "invalid": None, "flags": []}
    said = why({**row, "token_advantage": np.array([0.5, 0.5, -1.0, -1.0, 0.0], dtype=np.float32)})
    assert said == ("Trained: 2 of its 5 tokens made more likely, 2 less: advantages from −1 to +0.5, mean −0.25.")
    assert "made less likely" in why({**row, "token_advantage": np.array([-1.0, -0.5], dtype=np.float32)})


def test_numbers_that_are_none_are_left_out_of_what_a_step_changed(answers: Answers, tmp_path: Path) -> None:
    rows = read_file(answers.runs[0].folder / "rollouts" / "step-000001.parquet").to_pylist()
    rows[0]["weight"] = [float("nan"), float("inf"), *rows[0]["weight"][2:]]
    generated_runs.make_hostile(tmp_path)
    generated_runs.save(tmp_path / "rollouts" / "step-000001.parquet", rows)
    run = OpenRun(tmp_path, "run")
    run.read()
    data = Answers([run]).of("0/step/1", {"by": "push"})
    assert data["n"] == answers.of("0/step/1", {"by": "push"})["n"] - 2 and np.isfinite(data["mean"])


def test_what_a_step_changed_is_told_of_chosen_and_of_rejected_responses(tmp_path: Path) -> None:
    run = OpenRun(generated_runs.make_items(tmp_path / "run", steps=1), "run")
    run.read()
    data = Answers([run]).of("0/step/1", {"by": "push"})
    rows = read_file(run.folder / "rollouts" / "step-000001.parquet").to_pylist()
    for side, member in zip(data["sides"], (0, 1), strict=True):
        weights = [w for row in rows if row["member"] == member for w in row["weight"]]
        assert side["name"] == ("chosen", "rejected")[member] and side["n"] == len(weights)
        assert side["mean"] == pytest.approx(np.mean(weights))
    assert (
        data["preferences"] and {x["member"] for x in data["up"]} == {0} and {x["member"] for x in data["down"]} == {1}
    )
    assert data["up"][0]["label"]["comparisons"][0][:2] == [0, 1]


def test_the_other_side_of_an_episode_is_the_one_that_was_played_with_it(tmp_path: Path) -> None:
    folder = generated_runs.make_run(tmp_path / "run", steps=1, groups=2, group=4, tokens=8, evals=0)
    file = folder / "rollouts" / "step-000001.parquet"
    rows = read_file(file).to_pylist()
    for n, row in enumerate(rows):  # as they are played: both sides of an episode, one after the other
        row |= {"side": ("first", "second")[n % 2], "member": n % 4 // 2}
    rows[-1]["replayed"] = True  # whose other side is not here
    generated_runs.save(file, rows)
    run = OpenRun(folder, "run")
    run.read()
    sides = [Answers([run]).of(f"0/rollout/1/{n}", {})["sides"] for n in range(8)]
    assert sides[:4] == [[{"index": n + 1 - 2 * (n % 2), "side": ("second", "first")[n % 2]}] for n in range(4)]
    assert sides[4:] == [[]] * 4, "one of them is missing, so nobody can tell"
