"""Games whose sides are all the policy: each side sees its own, earns its own, and is compared with its like."""

from __future__ import annotations

import doctest
import json
import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from duels import duel
from episodes import enacted, episodes, played, said, whole
from scripted import scripted

import posttrain
from posttrain.core.rollouts import Rollout
from posttrain.core.types import Graded, Invalid, Reply, Sampling, Sides, SpanReward, StopReason, Task, Turn
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.envs.builtin import nim
from posttrain.envs.check import check
from posttrain.envs.play.env_outputs import Done, read_turn, read_verdict
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.player import Player
from posttrain.envs.play.worker_protocol import Garbled, read_answer, write_answer
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.training.sources.scoreboard import describe, scoreboard, usable

Game = Generator[Turn, Reply, Any]


def learned(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
    """What each context is learned from."""
    return [tokenizer.decode([t.tokens[i] for i in t.scored.tolist()]) for t in rollout.transcripts]


def talk(task: Task) -> Game:
    """Two who speak in turn, one of them in two contexts; steps of both earn something."""
    one = yield Turn("a1=", stop=(".",), side="a")
    two = yield Turn(f"b1 {one}=", stop=(".",), side="b")
    three = yield Turn(f"a2 {two}=", stop=(".",), side="a", reward=0.5)
    four = yield Turn(f"b2 {three}=", stop=(".",), side="b", reward=0.25, fresh=True)
    assert (one, two, three, four) == ("1.", "2.", "3.", "4.")
    return Sides({"a": Graded({"won": 1.0}, [SpanReward(1, 2.0, 0), SpanReward(1, 4.0)]), "b": -1.0})


def test_each_side_has_contexts_rewards_and_a_rollout_of_its_own(tokenizer: Tokenizer) -> None:
    a, b = enacted(talk, tokenizer, ["1.", "2.", "3.", "4."])
    assert (a.side, b.side) == ("a", "b") and a.group == b.group and a.group_and_side != b.group_and_side
    assert whole(tokenizer, a) == ["a1=1.a2 2.=3."] and learned(tokenizer, a) == ["1.3."]
    assert whole(tokenizer, b) == ["b1 1.=2.", "b2 3.=4."] and learned(tokenizer, b) == ["2.", "4."]
    assert [turn.text for turn in a.turns] == ["a1=", "1.", "a2 2.=", "3."] and a.prompt == "a1=" and a.text == "1.3."
    assert [turn.transcript for turn in b.turns] == [0, 0, 1, 1] and b.prompt == "b1 1.=" and b.text == "2.4."
    # The reward of a turn is that of the step of the side that sees it, and a part of a reply is one of its own.
    first = a.transcripts[0].spans[1].length
    assert a.steps == [(1, 2.0), (first, 0.5), (first + 1, 4.0)] and a.reward == 7.5 and a.rewards == {"won": 1.0}
    assert b.steps == [(b.transcripts[0].n_scored, 0.25)] and b.reward == -0.75 and b.rewards == {}


def test_a_plain_verdict_is_that_of_all_sides(tokenizer: Tokenizer) -> None:
    def together(task: Task) -> Game:
        yield Turn("a=", stop=(".",), side="a")
        yield Turn("b=", stop=(".",), side="b")
        return Graded(1.0, [SpanReward(1, 2.0, 0), SpanReward(1, 4.0)])

    a, b = enacted(together, tokenizer, ["1.", "2."])
    assert (a.reward, b.reward) == (3.0, 5.0) and a.steps == [(1, 2.0)] and b.steps == [(1, 4.0)]


def test_sides_that_nothing_is_learned_from_are_a_part_of_the_world(tokenizer: Tokenizer) -> None:
    def apart(task: Task) -> Game:
        yield Turn("a=", stop=(".",), side="a", learn=task["both"])
        yield Turn("b=", stop=(".",), side="b")
        return 1.0

    assert [r.side for r in enacted(apart, tokenizer, ["1.", "2."], both=False)] == ["b"]
    assert [r.side for r in enacted(apart, tokenizer, ["1.", "2."], both=True)] == ["a", "b"]


@pytest.mark.parametrize(
    ("verdict", "a", "b"),
    [
        (Sides({"a": 1.0}), 1.0, "without the side 'b' that was asked"),
        (Sides({"a": Invalid("no judge"), "b": 2.0}), "no judge", 2.0),
        (Sides({"a": float("nan"), "b": 2.0}), "nan", 2.0),
        (Sides({"a": Graded(1.0, [SpanReward(1, 1.0, 1)]), "b": 2.0}), "one of side 'b', for side 'a'", 2.0),
        (Sides({"a": Graded(1.0, [SpanReward(1, 1.0, -2)]), "b": 2.0}), "side 'a' has 1", 2.0),
        (Sides({"a": 1.0, "b": 2.0, "c": 3.0}), 1.0, 2.0),
        (Sides({}), "1 to 64 verdicts", "1 to 64 verdicts"),
        (Sides({"a": Sides({"a": 1.0}), "b": 1.0}), "Sides within Sides", "Sides within Sides"),  # type: ignore[dict-item]
        (Sides({"a\nb": 1.0}), "a name of one line", "a name of one line"),
        (Sides([1.0]), "1 to 64 verdicts", "1 to 64 verdicts"),  # type: ignore[arg-type]
        ("rubbish", "rubbish", "rubbish"),
    ],
)
def test_what_is_wrong_with_a_side_makes_only_that_side_invalid(
    tokenizer: Tokenizer, verdict: Any, a: Any, b: Any
) -> None:
    def game(task: Task) -> Game:
        yield Turn("a=", stop=(".",), side="a")
        yield Turn("b=", stop=(".",), side="b")
        return verdict

    rollouts = enacted(game, tokenizer, ["1.", "2."])
    assert [r.side for r in rollouts] == ["a", "b"]
    for rollout, expected in zip(rollouts, (a, b), strict=True):
        if isinstance(expected, float):
            assert rollout.reward == expected
        else:
            assert isinstance(rollout.reward, Invalid) and expected in rollout.reward.reason


def test_a_side_that_runs_out_of_context_leaves_the_other_its_own(tokenizer: Tokenizer) -> None:
    def long(task: Task) -> Game:
        said = []
        for _ in range(3):
            said.append((yield Turn("x" * 30, stop=(".",), side="a")))
            said.append((yield Turn("b=", stop=(".",), side="b")))
        assert [reply.stop for reply in said[4:]] == [StopReason.CONTEXT, StopReason.STOP]
        return 1.0

    a, b = enacted(long, tokenizer, ["1.", "2.", "3.", "4.", "5."], context=70)
    assert (a.stop, b.stop) == (StopReason.CONTEXT, StopReason.STOP) and (a.text, b.text) == ("1.3.", "2.4.5.")


@pytest.mark.parametrize("how", ["fresh", "whole", "tokens"])
def test_a_side_that_begins_afresh_has_no_empty_context_before(tokenizer: Tokenizer, how: str) -> None:
    def game(task: Task) -> Game:
        for side in ("a", "b"):
            if how == "tokens":
                yield Turn(tokens=tokenizer.encode(f"{side}="), stop=(".",), side=side)
            else:
                yield Turn(f"{side}=", stop=(".",), side=side, fresh=how == "fresh", whole=how == "whole")
        return 1.0

    a, b = enacted(game, tokenizer, ["1.", "2."])
    assert (whole(tokenizer, a), whole(tokenizer, b)) == (["a=1."], ["b=2."])
    assert {turn.transcript for turn in b.turns} == {0}


def test_a_side_goes_on_where_it_was_before_a_turn_that_did_not_fit(tokenizer: Tokenizer) -> None:
    def game(task: Task) -> Game:
        yield Turn("a=", stop=(".",), side="a", whole=True)
        yield Turn("c=", stop=(".",), side="a", whole=True)
        yield Turn("a=1.+", stop=(".",), side="a", whole=True)
        yield Turn("b=", stop=(".",), side="b")
        refused = yield Turn("x" * 100, stop=(".",), side="a", whole=True)
        assert refused.stop is StopReason.CONTEXT
        yield Turn("-", stop=(".",), side="a")
        return 1.0

    a, b = enacted(game, tokenizer, ["1.", "2.", "3.", "4.", "5."], context=90)
    assert whole(tokenizer, a) == ["a=1.+3.-5.", "c=2."] and whole(tokenizer, b) == ["b=4."]


def test_a_name_of_a_side_is_one_line() -> None:
    for side in ("a\nb", "x" * 201, 3, None):
        assert isinstance(read_turn(Turn("a", side=side)), Invalid)  # type: ignore[arg-type]
    turn = read_turn(Turn("a", side="white"))
    assert isinstance(turn, Turn) and turn.side == "white"


def test_verdicts_of_sides_survive_the_way_from_a_worker_and_nothing_else_does() -> None:
    done = read_verdict(Sides({"a": Graded({"won": 1.0}, [SpanReward(2, 0.5, 0)]), "b": Invalid("late")}))
    content = write_answer(3, done)[8:]
    answer = read_answer(content)
    assert not isinstance(answer, tuple) and answer.event == done  # type: ignore[union-attr]
    assert isinstance(done, Done) and done.of("a").reward == 1.0 and isinstance(done.of("b").reward, Invalid)
    plain = json.loads(content)
    wrong: Any
    for wrong in ({}, {"a": 1.0}, {"a\nb": plain["sides"]["a"]}, [], {"a": {**plain["sides"]["a"], "more": 1}}):
        with pytest.raises(Garbled):
            read_answer(json.dumps({**plain, "sides": wrong}).encode())


# -- statistics --------------------------------------------------------------------------------------------------------


def test_sides_are_compared_with_their_like(tokenizer: Tokenizer) -> None:
    games = [enacted(talk, tokenizer, ["1.", "2.", "3.", "4."]) for _ in range(3)]
    rollouts = [rollout for game in games for rollout in game]
    stats = describe(rollouts, None)
    figures = stats.means()
    assert figures["reward/a"] == 7.5 and figures["reward/b"] == -0.75
    right = describe(rollouts, 1.0).means()  # half of a game is always lost: that is no share of right replies
    assert right["accuracy/a"] == 1 and right["accuracy/b"] == 0 and "accuracy" not in right
    assert describe([r for r in rollouts if r.side == "a"], 1.0).means()["accuracy"] == 1
    kept, _ = usable(rollouts, stats)
    assert [r.side for r in kept] == list("aaabbb") and scoreboard(rollouts).group.tolist() == [0, 1, 0, 1, 0, 1]
    rollouts[1].reward = rollouts[3].reward = Invalid("two of three of one side")
    assert [r.side for r in usable(rollouts, stats)[0]] == ["a", "a", "a"]


def test_a_side_that_one_game_of_several_came_to_is_left_out(tokenizer: Tokenizer) -> None:
    def short(task: Task) -> Game:
        if (yield Turn("a=", stop=(".",), side="a")) == "2.":
            yield Turn("b=", stop=(".",), side="b")
        return 1.0

    games = [enacted(short, tokenizer, replies) for replies in (["1."], ["2.", "1."], ["1."])]
    stats = describe([], None)
    assert [r.side for r in usable([r for game in games for r in game], stats)[0]] == ["a", "a", "a"]
    assert stats.means()["dropped"] == 0.25
    assert [r.side for r in usable(games[1], stats)[0]] == ["a", "b"]  # groups of one game: a critic compares nothing


def test_a_run_of_self_play_is_exact_over_workers_and_resumes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_model(tiny(tokenizer, context=256), tmp_path / "start", tokenizer)
    rows = [{"id": str(i), "prompt": f"say {i}"} for i in range(8)]

    def files(name: str, steps: int, workers: int, **more: Any) -> dict[str, bytes]:
        run = posttrain.rl(
            rows, duel, str(tmp_path / "start"), out=str(tmp_path / name), env_workers=workers, algorithm="dapo",
            steps=steps, prompts=2, group=4, max_tokens=3, max_episode_tokens=30, lr=1e-2, save_every=2, threads=1,
            quiet=True, **more,
        )  # fmt: skip
        return {p.name: p.read_bytes() for p in [run.path / "metrics.jsonl", *sorted(run.path.glob("rollouts/*"))]}

    expected = files("whole", 4, 0)
    assert files("workers", 4, 2) == expected
    files("resumed", 2, 1)
    assert files("resumed", 4, 1, resume=True) == expected
    assert {row["side"] for step in range(1, 5) for row in read_rollouts(tmp_path / "whole", step)} == {"x", "y"}


def test_an_evaluation_tells_the_sides_apart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_model(tiny(tokenizer, context=256), tmp_path / "start", tokenizer)
    rows = [{"id": str(i), "prompt": f"say {i}"} for i in range(3)]
    found = posttrain.evaluate(rows, duel, str(tmp_path / "start"), samples=2, max_tokens=3, threads=1)
    for task in rows:
        x, y = (found.rewards[f"{task['id']} as {side}"] for side in ("x", "y"))
        assert len(x) == len(y) == 2 and {*x, *y} <= {1.0, -1.0} and all(a + b >= 0 for a, b in zip(x, y, strict=True))
    assert len(found.rewards) == 6


def test_demonstrations_of_sides_are_those_of_the_winner_where_a_least_reward_is_asked(tokenizer: Tokenizer) -> None:
    from posttrain.training.sources.demonstrations import demonstration_runner

    task = nim.tasks(1, 0, stones=9)[0]
    with EnvPool(nim.nim, workers=0) as pool:
        sides = demonstration_runner(pool, tokenizer, (0,))(task)
    assert sorted(reward for _, reward in sides) == [-1.0, 1.0]
    said = [[tokenizer.decode([t.tokens[i]]) for t in own for i in t.scored.tolist()] for own, _ in sides]
    assert [[token for token in own if token.isdigit()] for own in said] == [
        task["replies"][::2],
        task["replies"][1::2],
    ]


# -- Nim ---------------------------------------------------------------------------------------------------------------


def test_examples_in_docstrings_are_true() -> None:
    tried = doctest.testmod(nim)
    assert tried.attempted and not tried.failed


def winning(stones: int, most: int) -> bool:
    """Whether who is to move wins, by looking at every game."""
    known = [False]
    for left in range(1, stones + 1):
        known.append(any(not known[left - take] for take in range(1, min(most, left) + 1)))
    return known[stones]


def test_perfect_play_wins_every_game_that_can_be_won_and_its_own_replies_say_so() -> None:
    rng = random.Random(0)
    for most in (2, 3, 4):
        for stones in range(1, 30):
            task = {"id": "a", "stones": stones, "most": most}
            ended = scripted(nim.nim, task, [f"{move}\n" for move in nim.moves(task, rng)], then=None).done
            assert ended is not None and ended.of("first").reward == (1.0 if winning(stones, most) else -1.0)
            assert ended.of("second").reward == -ended.of("first").reward  # type: ignore[operator]
            left = stones - nim.best(stones, most, rng)
            assert not winning(stones, most) or not winning(left, most)


@pytest.mark.parametrize("reply", ["", "0", "4", "-1", "one", "1 2", "\u0661", "99999999999", "1.0"])
def test_a_move_that_the_rules_do_not_allow_loses_at_once(reply: str) -> None:
    task = {"id": "a", "stones": 9, "most": 3}
    done = scripted(nim.nim, task, [reply], then=None).done
    assert done is not None and (done.of("first").reward, done.of("second").reward) == (-1.0, 1.0)
    done = scripted(nim.nim, task, ["2", reply], then=None).done
    assert done is not None and (done.of("first").reward, done.of("second").reward) == (1.0, -1.0)


def test_an_opponent_of_the_world_is_never_asked_and_plays_by_the_rules() -> None:
    for against in ("perfect", "random"):
        for stones in range(1, 20):
            task = {"id": "a", "stones": stones, "most": 3, "against": against, "seed": 5}
            played = scripted(nim.nim, task, ["1\n"] * 20, then=None)
            assert {turn.side for turn in played.shown} == {"first"} and played.done is not None
            assert played.done.of("first").reward in (1.0, -1.0)
            assert [t.text for t in played.shown] == [
                t.text for t in scripted(nim.nim, task, ["1\n"] * 20, then=None).shown
            ]
    lost = scripted(nim.nim, {"id": "a", "stones": 8, "most": 3, "against": "perfect"}, ["1\n", "2\n"], then=None)
    assert lost.done is not None and lost.done.of("first").reward == -1.0 and len(lost.shown) == 2


@pytest.mark.parametrize("own", ["seed", "id"])  # the other one is the same in all games
def test_a_random_opponent_follows_its_seed_and_takes_no_more_than_there_are(own: str) -> None:
    games = set()
    for number in range(30):
        task = {**({"id": "a"} if own == "seed" else {}), own: number, "stones": 9, "most": 3, "against": "random"}
        turns, again = (scripted(nim.nim, dict(task), ["1\n"] * 20, then=None).shown for _ in range(2))
        assert [turn.text for turn in turns] == [turn.text for turn in again]
        said = [[int(word) for word in str(turn.text).split() if word.isdigit()] for turn in turns]
        left = [9, *(stones for _, stones, *_ in said[1:])]
        assert all(1 <= took <= min(3, before - 1) for before, (took, *_) in zip(left, said[1:], strict=False))
        assert all(before - 1 - took == after > 0 for before, (took, after, *_) in zip(left, said[1:], strict=False))
        games.add(tuple(left))
    assert len(games) > 5


def test_check_tells_winners_from_losers() -> None:
    report = check("nim", nim.tasks(4, 0))
    assert report.ok and not report.constant
    assert any("(first 1, second -1)" in line for line in report.lines())


def test_rollouts_name_the_side(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    from posttrain.runs.terminal.printing import sample

    sample(enacted(talk, tokenizer, ["1.", "2.", "3.", "4."]), 2)
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("── ")]
    assert [head.split(" ── ")[1] for head in heads] == ["a", "b"]


def test_an_environment_without_sides_has_rollouts_without_one(tokenizer: Tokenizer) -> None:
    from environments import asking

    assert {rollout.side for rollout in played(asking, tokenizer)} == {""}


def rounds(task: Task) -> Game:
    """Four rounds of three, each in a context of its own."""
    for number in range(4):
        for side in ("x", "y", "z"):
            yield Turn(f"{task['prompt']} round {number} for {side}=", side=side)
    return 1.0


def test_what_each_side_saw_is_computed_once_and_no_bit_tells_whether_it_was_kept(tokenizer: Tokenizer) -> None:
    def play(**how: Any) -> tuple[list[Rollout], int]:
        engine = LocalEngine(tiny(tokenizer, context=256), tokenizer, slots=18, **how)
        with EnvPool(rounds, workers=0) as pool:
            rollouts = Player(pool, engine, tokenizer, Sampling(max_tokens=9), 256).play(episodes(6))
        assert not engine.kept.bytes, "what nobody goes on from is let go"
        return rollouts, engine.computed

    kept, computed = play()
    anew, again = play(kept_bytes=0)
    assert said(kept) == said(anew) and {len(rollout.turns) for rollout in kept} == {8}
    prompts = {(r.group, r.side): r.turns[0].length for r in kept}  # of a group, each computed once
    own = sum(len(r.transcripts[0]) - 1 - r.turns[0].length for r in kept)  # nothing follows the last token
    assert computed == sum(prompts.values()) + own < again / 2
