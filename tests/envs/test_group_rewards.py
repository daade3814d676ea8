"""A reward of groups is called once for each group, with its replies in their order, and nothing depends on timing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from episodes import played, said
from scored_groups import scored

import posttrain
from posttrain.algorithms.all_algorithms import find
from posttrain.config.training import RL
from posttrain.core.types import Invalid, InvalidKind, Reply, Task, Turn, UserError
from posttrain.envs.play.env_outputs import Done
from posttrain.envs.play.env_pool import EnvPool, _fits_group
from posttrain.envs.play.group_rewards import group_sum, is_group_reward
from posttrain.envs.play.load_env import load_env, success_of
from posttrain.envs.play.worker_handle import PoolEpisode
from posttrain.envs.play.worker_protocol import Garbled, WorkerReply, read_answer, write_answer
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.adjust import adjust

MY = '''
import asyncio, os, signal, time
from pathlib import Path
from posttrain import note

SUCCESS = 1.0

def rank(tasks, replies):
    """The share of the others that are shorter."""
    note(size=len(replies))
    return [sum(len(o) < len(r) for o in replies) / max(1, len(replies) - 1) for r in replies]

def places(tasks, replies):
    return list(range(len(replies)))

async def waits(tasks, replies):
    await asyncio.sleep(0.01 * len(replies[0]))
    return rank(tasks, replies)

def fails(tasks, replies):
    if "raise" in replies:
        raise ValueError("bad thing")
    if "loop" in replies:
        time.sleep(1000)
    if "short" in replies:
        return [1.0]
    if "number" in replies:
        return 1.0
    if "cleared" in replies:
        return [replies.clear()]
    return [None if r == "none" else {"a": 1.0, "b": 2.0} for r in replies]

def dies_once(tasks, replies):
    mark = Path(tasks[0]["mark"])
    if not mark.exists():
        mark.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return rank(tasks, replies)

def yields(tasks, replies):
    yield 1
'''


def rank(tasks: Sequence[Task], replies: Sequence[Reply]) -> list[float]:
    return [sum(len(o) < len(r) for o in replies) / max(1, len(replies) - 1) for r in replies]


@pytest.fixture
def my(tmp_path: Path) -> str:
    (tmp_path / "my.py").write_text(MY)
    return str(tmp_path / "my.py")


GROUPS = [["a", "abc", "ab"], ["x"], ["", "", "abcd", "ab"]]


@pytest.mark.parametrize(("name", "workers"), [("rank", 0), ("rank", 2), ("waits", 0), ("waits", 1)])
def test_each_group_is_scored_whole_whatever_the_order_of_its_replies(my: str, name: str, workers: int) -> None:
    expected = [rank([], [Reply(text) for text in group]) for group in GROUPS]
    for backwards in (False, True):
        found = scored(f"{my}:{name}", GROUPS, workers, backwards)
        assert [[done.reward for done in group] for group in found] == expected
        assert [[done.notes for done in group] for group in found] == [[{"size": len(g)}] * len(g) for g in GROUPS]


def test_replies_are_in_the_order_of_the_members(my: str) -> None:
    for backwards in (False, True):
        found = scored(f"{my}:places", GROUPS, 1, backwards)
        assert [[done.reward for done in group] for group in found] == [list(range(len(group))) for group in GROUPS]


@pytest.mark.parametrize(
    ("reply", "kind", "reason"),
    [
        ("raise", InvalidKind.RAISED, "ValueError: bad thing (my.py:22)"),
        (
            "short",
            InvalidKind.UNREADABLE,
            "returned 1 rewards; a reward of (tasks, replies) returns a list of one reward",
        ),
        ("number", InvalidKind.UNREADABLE, "returned 1.0 (float); a reward of (tasks, replies) returns a list of one"),
        ("loop", InvalidKind.TIMEOUT, "did not return within 1 s"),
        ("cleared", InvalidKind.UNREADABLE, "a list of one reward for each of the 2 replies"),
    ],
)
def test_failure_makes_the_rewards_of_its_whole_group_invalid(
    my: str, reply: str, kind: InvalidKind, reason: str
) -> None:
    failed, sound = scored(f"{my}:fails", [["a", reply], ["a", "b"]], seconds=1.0)
    for done in failed:
        assert isinstance(done.reward, Invalid) and done.reward.kind is kind and reason in done.reward.reason
    assert [(done.reward, done.rewards) for done in sound] == [(3.0, {"a": 1.0, "b": 2.0})] * 2


def test_element_that_cannot_be_read_is_invalid_alone(my: str) -> None:
    [[first, second]] = scored(f"{my}:fails", [["none", "b"]])
    assert isinstance(first.reward, Invalid) and "returned None" in first.reward.reason and second.reward == 3.0


def test_group_of_a_killed_worker_is_scored_again(my: str, tmp_path: Path) -> None:
    [found] = scored(f"{my}:dies_once", [["a", "ab"]], mark=str(tmp_path / "mark"))
    assert [done.reward for done in found] == [0.0, 1.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_group_is_scored_without_the_episodes_that_were_given_up(my: str, workers: int) -> None:
    with EnvPool(f"{my}:rank", workers) as pool:
        for id in range(3):
            pool.start(id, {"id": "t", "prompt": "p"}, "g")
        while pool.pending:
            pool.poll(20)
        pool.send(2, Reply("ab"))
        pool.send(0, Reply("a"))
        assert pool.poll(0.0) == [] and pool.pending == 2
        pool.drop(1)
        ends: dict[int, Any] = {}
        while pool.pending:
            ends |= dict(pool.poll(20))
        assert {id: done.reward for id, done in ends.items()} == {0: 0.0, 2: 1.0}


def test_replies_that_wait_for_their_group_are_given_up_with_it(my: str) -> None:
    with EnvPool(f"{my}:rank", 1) as pool:
        for id in range(2):
            pool.start(id, {"id": "t", "prompt": "p"}, "g")
        while pool.pending:
            pool.poll(20)
        pool.send(0, Reply("a"))
        pool.clear()
        assert not pool.pending
        pool.start(0, {"id": "t", "prompt": "p"}, "g")  # the ids are free again
        assert pool.poll(20) == [(0, Turn(text="p"))]


def test_no_bit_of_a_rollout_depends_on_when_groups_are_scored(my: str, tokenizer: Tokenizer) -> None:
    expected = played(rank, tokenizer)
    for start in range(0, 12, 3):
        group = expected[start : start + 3]
        assert [r.reward for r in group] == rank([], [Reply(r.text) for r in group])
    assert len({r.reward for r in expected}) > 1
    strip = [(text, reward) for _, reward, *_, text, _, _ in said(expected)]
    for name, workers in ((f"{my}:rank", 2), (f"{my}:waits", 1)):
        assert [(text, reward) for _, reward, *_, text, _, _ in said(played(name, tokenizer, workers=workers))] == strip


def test_resumed_run_scores_groups_as_the_whole_run_did(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_model(tiny(tokenizer, context=64), tmp_path / "start", tokenizer)
    rows = [{"id": str(i), "prompt": f"say {i}="} for i in range(4)]

    def files(out: str, *steps: int) -> dict[str, bytes]:
        for part, count in enumerate(steps):
            run = posttrain.rl(
                rows, rank, str(tmp_path / "start"), out=str(tmp_path / out), env_workers=0, steps=count, prompts=2,
                group=3, max_tokens=6, lr=1e-2, threads=1, quiet=True, save_every=1, resume=part > 0, compiled=False,
            )  # fmt: skip
        return {p.name: p.read_bytes() for p in [run.path / "metrics.jsonl", *sorted(run.path.glob("rollouts/*"))]}

    assert files("parts", 1, 2) == files("whole", 2)


def test_responses_of_a_row_are_labelled_as_one_group(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "responses": ["a", "abc", "ab"]}, {"prompt": "q", "responses": ["abc", "a"]}]
    posttrain.label(rows, rank, out=str(tmp_path / "labelled.jsonl"), env_workers=0)
    found = [json.loads(line) for line in (tmp_path / "labelled.jsonl").read_text().splitlines()]
    assert [row["scores"] for row in found] == [rank([], row["responses"]) for row in rows]
    assert found[0]["labeller"].endswith(":rank")


def test_reward_of_groups_is_recognised_by_its_parameters(my: str) -> None:
    assert is_group_reward(rank) and is_group_reward(load_env(f"{my}:waits"))
    assert not is_group_reward(lambda task, reply: 1.0) and not is_group_reward(lambda replies, tasks: [1.0])
    assert load_env(rank) is rank and success_of(f"{my}:rank", None) == 1.0
    with pytest.raises(UserError, match=r"takes \(tasks, replies\) and yields: return a list from a reward of a group"):
        load_env(f"{my}:yields")
    with pytest.raises(UserError, match=r"a reward of a group is called with \(tasks, replies\)"):
        load_env(lambda tasks, replies, more: [1.0])


def test_replies_that_end_in_different_steps_are_refused_for_groups() -> None:
    config = RL(tasks="rows.jsonl", env="my.py:rank", model="m", tokens_per_step=4, max_tokens=8)
    with pytest.raises(
        UserError, match="the reward scores whole groups, and with --tokens-per-step their replies would end"
    ):
        adjust(find("reinforce"), config, by_group=True)
    adjust(find("reinforce"), config)


def test_sum_of_groups_leaves_out_what_is_none() -> None:
    parts = {"a": [1.0, None, None, 2.0], "b": [0.5, 0.25, None, Invalid("unknown")], "c": [0.0, None, None, 1.0]}
    weights = {"a": 2.0, "b": -1.0, "c": 1.0}
    reward = group_sum({n: (weights[n], lambda tasks, replies, n=n: parts[n]) for n in parts})  # type: ignore[misc]
    first, second, third, fourth = reward([{}] * 4, [Reply("")] * 4)
    assert first == {"reward": 1.5, "a": 1.0, "b": 0.5, "c": 0.0} and second == {"reward": -0.25, "b": 0.25}
    assert third == Invalid("no reward function scored it: each of them returned None")
    assert fourth == Invalid("b: unknown")


def test_a_summand_that_clears_the_replies_takes_them_from_no_other() -> None:
    reward = group_sum({"a": (1.0, lambda tasks, replies: [replies.clear() or 1.0] * 2),
                        "b": (1.0, lambda tasks, replies: [float(len(r)) for r in replies])})  # fmt: skip
    assert [one["b"] for one in reward([{}] * 2, [Reply("x"), Reply("xyz")])] == [1.0, 3.0]


def test_answer_of_a_group_is_read_as_it_was_written_and_nothing_else_is() -> None:
    members = Done(1.5, {"a": 1.5}, notes={"n": 1}), Done(Invalid("bad", InvalidKind.RAISED)), Done(0.0)
    whole = Done(0.0, group=members, notes={"size": 3})
    frame = write_answer(7, whole)
    assert read_answer(frame[8:]) == WorkerReply(7, whole)
    for group in (
        "{}",
        "[1]",
        "[[{}]]",
        '[[{"reward": 1.0, "rewards": {}, "spans": []}, 3]]',
        '[[{"reward": 1.0}, {}]]',
    ):
        with pytest.raises(Garbled):
            read_answer(f'{{"number": 7, "group": {group}}}'.encode())


def test_worker_that_answers_for_another_number_of_replies_is_not_believed() -> None:
    alone = PoolEpisode(1, 1, {})
    group = PoolEpisode(-1, 2, {"tasks": [], "replies": []}, members=(alone, alone))
    two, invalid = Done(0.0, group=(Done(1.0), Done(2.0))), Done(Invalid("died"))
    assert _fits_group(group, two) and _fits_group(group, invalid) and _fits_group(alone, Done(1.0))
    assert not _fits_group(group, Done(0.0, group=(Done(1.0),))) and not _fits_group(group, Done(1.0))
    assert not _fits_group(alone, two) and not _fits_group(group, Done(0.0, sides={"a": Done(1.0)}))
