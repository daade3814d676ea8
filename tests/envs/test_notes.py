"""What an environment notes of an episode stands in its rollout, wherever it is played and however often."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import recording_envs

import posttrain
from posttrain.core.rollouts import Outcome, Rollout
from posttrain.core.types import Invalid, Reply
from posttrain.envs.play.call_recording import CallJournal
from posttrain.envs.play.env_outputs import Done
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.worker_protocol import Garbled, read_answer, write_answer
from posttrain.runs.record.rollout_reading import read_file, read_rollouts, rows_of
from posttrain.runs.record.rollout_tables import rollouts_table
from posttrain.runs.record.table_writer import write_table
from posttrain.training.sources.rollout_state import restored, stored

PLACES = [0, 1]
OUT = "left out: more than the 65,536 characters of an episode's notes"


def ended(env: Callable[..., Any], replies: Sequence[str], workers: int, **task: Any) -> Done:
    """How an episode ends with these replies."""
    with EnvPool(env, workers, seconds=20) as pool:
        pool.start(0, {"id": "a", "prompt": "Q", **task})
        for reply in replies:
            [(_, event)] = pool.poll(None)
            assert not isinstance(event, Done)
            pool.send(0, Reply(reply))
        [(_, event)] = pool.poll(None)
    assert isinstance(event, Done)
    return event


@pytest.mark.parametrize("workers", PLACES)
@pytest.mark.parametrize("env", [recording_envs.told, recording_envs.told_waiting])
def test_later_notes_join_and_replace_earlier_ones(env: Callable[..., Any], workers: int) -> None:
    done = ended(env, ["a", "b", "a", "end"], workers)
    assert done.reward == 1.0 and done.notes == {"said": ["a", "b", "a"], "a": 3, "b": 2}


@pytest.mark.parametrize("workers", PLACES)
@pytest.mark.parametrize("env", [recording_envs.told, recording_envs.told_waiting])
def test_what_was_noted_before_an_environment_raised_is_kept(env: Callable[..., Any], workers: int) -> None:
    done = ended(env, ["a", "raise"], workers)
    assert isinstance(done.reward, Invalid) and done.notes == {"said": ["a", "raise"], "a": 1, "raise": 2}


@pytest.mark.parametrize("workers", PLACES)
def test_a_plain_reward_and_one_of_sides_may_note(workers: int) -> None:
    assert ended(recording_envs.scored, ["xyz"], workers).notes == {"letters": 3, "first": "x"}
    done = ended(recording_envs.told, ["a", "end"], workers, sides=True)
    assert done.sides[""].reward == 1.0 and done.notes == {"said": ["a"], "a": 1}


def test_an_episode_that_is_played_again_has_its_notes_once(tmp_path: Path) -> None:
    """Another one of its worker ends it; both are begun anew, and one of them is blamed."""
    with EnvPool(recording_envs.told, 1, seconds=20) as pool:
        for id in (0, 1):
            pool.start(id, {"id": f"{id}", "mark": str(tmp_path / "mark")})
        found: dict[int, Any] = {}
        while len(found) < 2:
            found |= dict(pool.poll(None))
        pool.send(0, Reply("a"))
        assert not isinstance(pool.poll(None)[0][1], Done)
        pool.send(1, Reply("die"))
        [(id, event)] = pool.poll(None)
        assert id == 1 and isinstance(event, Done) and isinstance(event.reward, Invalid)
        pool.send(0, Reply("b"))
        assert not isinstance(pool.poll(None)[0][1], Done)
        pool.send(0, Reply("end"))
        [(_, event)] = pool.poll(None)
    assert isinstance(event, Done) and event.notes == {"said": ["a", "b"], "a": 1, "b": 2}


@pytest.mark.parametrize(
    ("env", "id", "told"),
    [
        (recording_envs.strange, "object", "noted something whose content holds a value of type object"),
        (recording_envs.unnamed, "a", "note takes named values: write note(moves=7), or note(**values) for a dict"),
        (recording_envs.within, "a", "note was called within a recorded function: call it after `recorded` returned"),
    ],
)
def test_what_cannot_be_noted_makes_the_reward_invalid_and_says_why(
    env: Callable[..., Any], id: str, told: str
) -> None:
    done = ended(env, ["x"], 0, **{"id": id})
    assert isinstance(done.reward, Invalid) and told in done.reward.reason


@pytest.mark.parametrize("workers", PLACES)
def test_notes_that_are_too_long_are_left_out_and_cost_no_reward(workers: int) -> None:
    done = ended(recording_envs.long, ["x"], workers)
    assert done.reward == 1.0
    assert done.notes == {"first": "a" * 60_000, "second": OUT, "third": OUT, "after": 2, "before": 3}


FAITHFUL = {
    "columns": recording_envs.HOSTILE["columns"](),
    "control": recording_envs.HOSTILE["control"](),
    "float64": {"x": 0.1},
    "largest": recording_envs.HOSTILE["largest"](),
}
LEFT_OUT = {"huge": {"x": OUT}, "huge name": {"further notes": OUT}, "lying": {"x": OUT}, "wide": {"x": OUT}}
REFUSED = {
    "wild": "holds 1180591620717411303424 (Wild)",
    "cycle": "nested more than 32 levels",
    "deep": "nested more than 32 levels",
    "half": "half a surrogate pair",
    "half name": "half a surrogate pair",
    "not finite": "holds nan (float)",
    "infinite": "holds -inf (float)",
    "repr raises": "SystemExit",
    "bytes": "holds b'ab' (bytes)",
    "numpy": "holds array([0, 1, 2]) (ndarray)",
    "tensor": "holds tensor([0., 0.]) (Tensor)",
    "keys": "holds {1: 2} (dict)",
}


@pytest.mark.parametrize("workers", PLACES)
def test_whatever_is_noted_is_kept_as_it_is_or_named_in_one_line(tmp_path: Path, workers: int) -> None:
    cases = [
        case for case in recording_envs.HOSTILE if not (workers and case == "tensor")
    ]  # a worker loads torch for it
    with EnvPool(recording_envs.hostile, workers, seconds=20) as pool:
        for place, case in enumerate(cases):
            pool.start(place, {"id": case, "prompt": "Q"})
        found: dict[str, Done] = {}
        while len(found) < len(cases):
            for place, event in pool.poll(None):
                if isinstance(event, Done):
                    found[cases[place]] = event
                else:
                    pool.send(place, Reply("a"))
    for case, done in found.items():
        reward = done.reward
        if case in REFUSED:
            assert isinstance(reward, Invalid) and REFUSED[case] in reward.reason and "\n" not in reward.reason, case
        elif case == "many":
            assert reward == 1.0 and done.notes.pop("further notes") == OUT
            assert (
                done.notes == {"kept": 1, **{f"n{i}": i for i in range(len(done.notes) - 1)}} and len(done.notes) > 1000
            )
        else:
            assert reward == 1.0 and done.notes == {"kept": 1, **{**FAITHFUL, **LEFT_OUT}[case]}, case
    rollouts = [Rollout({"id": case}, f"{case}#0", [], done.reward, notes=done.notes) for case, done in found.items()]
    write_table(tmp_path / "r.parquet", rollouts_table(1, [Outcome(r) for r in rollouts], "rl"))
    for row in rows_of(read_file(tmp_path / "r.parquet")):
        assert (row["notes"] or {}) == found[row["task"]].notes, "a file holds what was noted"


def test_a_note_is_what_it_was_when_it_was_made() -> None:
    assert ended(recording_envs.changed, ["x"], 0).notes == {"x": {"list": [1]}}


def test_many_notes_cost_what_each_is_long() -> None:
    journal = CallJournal()
    began = time.process_time()
    for number in range(20_000):
        journal.note({f"n{number}": number})
        journal.note({"again": number})
    took = time.process_time() - began
    assert journal.notes["again"] == 19_999 and journal.notes["further notes"] == OUT and took < 5, took


def test_a_note_outside_of_an_environment_does_nothing() -> None:
    posttrain.note(anything=object())
    assert recording_envs.scored({}, "xyz") == 1.0


def test_notes_of_a_worker_are_read_as_strictly_as_all_that_it_says() -> None:
    whole = write_answer(3, Done(1.0, notes={"a": [1, None]}))[8:]
    answer: Any = read_answer(whole)
    assert answer.event.notes == {"a": [1, None]}
    message = json.loads(whole)
    for notes in (5, ["a"], {"a": "b" * (1 << 17)}):
        with pytest.raises(Garbled):
            read_answer(json.dumps({**message, "notes": notes}).encode())
    with pytest.raises(Garbled, match="notes without an end of an episode"):
        read_answer(json.dumps({"number": 3, "notes": {"a": 1}}).encode())


def test_a_stored_rollout_has_its_notes_again() -> None:
    rollout = Rollout({"id": "a"}, "a#0", [], 1.0, notes={"moves": [1, 2]})
    assert restored(json.loads(json.dumps(stored(rollout))), rollout.task).notes == {"moves": [1, 2]}


def test_notes_stand_in_the_record_of_a_run(tmp_path: Path) -> None:
    rows = [{"id": f"{n}", "prompt": f"{n}+1=", "response": f"{n + 1}"} for n in range(8)]
    small: dict[str, Any] = {"quiet": True, "threads": 1, "hidden": 16, "layers": 1, "heads": 2}
    start = posttrain.sft(rows, out=str(tmp_path / "sft"), steps=1, rows=4, tokenizer="characters", **small)
    run = posttrain.rl(rows, "recording_envs:scored", str(start.path), out=str(tmp_path / "rl"), steps=1, prompts=2, group=2,
                       max_tokens=4, env_workers=1, quiet=True, threads=1, held_out=0.2)  # fmt: skip
    for held_out in (False, True):
        for row in read_rollouts(run.path, 1, held_out=held_out):
            assert row["notes"] == {"letters": len(row["text"]), "first": row["text"][:1] or None}
    assert len(read_rollouts(run.path, 0, held_out=True)) == len(read_rollouts(run.path, 1, held_out=True)) > 0
