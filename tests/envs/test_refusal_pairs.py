"""Refusal pairs share their words, are drawn alike every time, and reward the refusal of the harmful twin alone."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from posttrain.core.types import Invalid, UserError
from posttrain.envs.builtin.refusal_pairs import OPENINGS, VERBS, reward, tasks
from posttrain.envs.play.load_env import load_env

NO, YES = "I'm sorry, but I can't help with that.", "Sure. First, take your time."
EVERY = 2 * len(OPENINGS) * sum(map(len, VERBS.values()))


def words(prompt: str) -> list[str]:
    return re.findall(r"[\w']+", prompt)


def test_twins_differ_in_their_object_alone() -> None:
    found = tasks(200, seed=1)
    for harmful, harmless in list(pairwise(found))[::2]:
        assert harmful["pair"] == harmless["pair"] and (harmful["harmful"], harmless["harmful"]) == (True, False)
        opening = next(o for o in OPENINGS if harmful["prompt"].startswith(o.partition("{}")[0]))
        before, after = (part for part in opening.split("{}"))
        verb = next(v.partition("{}")[0] for v in VERBS if harmful["prompt"].startswith(before + v.partition("{}")[0]))
        for task in (harmful, harmless):
            assert task["prompt"].startswith(before + verb) and task["prompt"].endswith(after)
        assert words(harmful["prompt"]) != words(harmless["prompt"])
        objects = [task["prompt"][len(before + verb) :].removesuffix(after) for task in (harmful, harmless)]
        assert tuple(objects) in VERBS[verb + "{}"], "the first is the harmful one"


def test_requests_are_distinct_and_follow_from_count_and_seed() -> None:
    found = tasks(300, seed=0)
    assert len({task["id"] for task in found}) == len({task["prompt"] for task in found}) == 300
    assert found == tasks(300, seed=0) != tasks(300, seed=1) and found[:100] == tasks(100, seed=0)
    assert len(tasks(3, seed=0)) == 3


def test_held_out_requests_are_about_other_objects() -> None:
    parts = [{True: set(), False: set()} for _ in range(2)]
    for place, held_out in enumerate((False, True)):
        size = next(n for n in range(EVERY, 0, -2) if _exist(n, held_out))
        for task in tasks(size, 0, held_out=held_out):
            objects = task["pair"].partition(" / ")
            parts[place][task["harmful"]] |= {objects[2]}
    assert not parts[0][True] & parts[1][True] and not parts[0][False] & parts[1][False] and parts[1][True]


def _exist(count: int, held_out: bool) -> bool:
    try:
        return bool(tasks(count, 0, held_out=held_out))
    except UserError:
        return False


def test_too_many_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"only \d+ such requests exist: ask for fewer than 100000"):
        tasks(100_000, 0)


def test_reward_wants_refusals_of_harmful_requests_and_of_no_others() -> None:
    found = [reward({"harmful": harmful}, reply) for harmful in (True, False) for reply in (NO, YES)]
    assert found == [
        {"reward": 1.0, "refusal/wanted": 1.0},
        {"reward": 0.0, "refusal/wanted": 0.0},
        {"reward": 0.0, "refusal/unwanted": 1.0},
        {"reward": 1.0, "refusal/unwanted": 0.0},
    ]
    priced = load_env("refusal,missed=-1,over=-0.5")
    assert priced({"harmful": True}, YES)["reward"] == -1 and priced({"harmful": False}, NO)["reward"] == -0.5
    assert isinstance(reward({"harmful": "yes"}, NO), Invalid) and isinstance(reward({}, NO), Invalid)


def test_a_model_that_always_refuses_earns_as_much_as_one_that_never_does() -> None:
    for reply in (NO, YES):
        earned = [reward(task, reply) for task in tasks(100, 0)]
        assert sum(one["reward"] for one in earned if not isinstance(one, Invalid)) == 50


def test_a_mistake_that_earns_as_much_as_the_right_reaction_is_refused() -> None:
    with pytest.raises(UserError, match="missed is 1: give less than 1"):
        load_env("refusal,missed=1")
