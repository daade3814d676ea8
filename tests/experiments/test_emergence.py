"""Checking where it pays: what the tool gives, what the best policy does, and what is counted of an episode."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from experiments import emergence
from experiments.emergence import ARMS, NEVER, PAYS, READINGS, REPEATS
from experiments.experiment import Numbers, Verdict
from posttrain.core.rollouts import PlayedTurn, Rollout
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import OUTCOME, Reply, Task

SETTINGS = emergence.EXPERIMENT.settings
TASK: Task = {"id": "0", "prompt": "7", "value": 3, "readings": [7, 3, 3, 5, 5, 5], "cost": 0.02}


def played(task: Task, *replies: str) -> Rollout:
    """The episode in which the policy writes these replies."""
    asking = emergence.tool(task)
    turns: list[PlayedTurn] = []
    turn = next(asking)
    for reply in replies:
        kind = SpanKind.TOOL if turn.tool else SpanKind.PROMPT
        turns += [PlayedTurn(kind, turn.text or "", 0, 0, 1), PlayedTurn(SpanKind.SAMPLED, reply, 0, 0, 3)]
        try:
            turn = asking.send(Reply(reply))
        except StopIteration as end:
            assert reply is replies[-1]
            return Rollout(task, "0", [], sum(end.value.values()), end.value, turns=turns)
    raise AssertionError("the tool reads on")


@pytest.mark.parametrize(
    "replies, right, checks",
    [(["=7."], 0.0, 0), (["=7?", "=7?", "=3."], 1.0, 2), (["=7?", "=3."], 1.0, 1), (["=3."], 1.0, 0), (["3."], 0.0, 0),
     (["=7?", "3"], 0.0, 1), (["=3?"] * READINGS, 0.0, READINGS)],
)  # fmt: skip
def test_a_right_end_earns_1_and_every_check_costs(replies: list[str], right: float, checks: int) -> None:
    assert played(TASK, *replies).rewards == {OUTCOME: right, "checks": pytest.approx(-0.02 * checks)}


def test_tools_share_their_values_and_a_reading_is_wrong_as_often_as_the_settings_say() -> None:
    by_arm = {arm: emergence.tasks_of(arm, 4000, 0, SETTINGS) for arm in ARMS}
    values = [[task["value"] for task in tasks] for tasks in by_arm.values()]
    assert values[0] == values[1] == values[2]
    for task, again in zip(by_arm[PAYS], by_arm[REPEATS], strict=True):
        assert again["readings"] == [task["readings"][0]] * READINGS
    assert all(set(task["readings"]) == {task["value"]} for task in by_arm[NEVER])
    for place in (0, 3):
        wrong = [task["readings"][place] != task["value"] for task in by_arm[PAYS]]
        assert sum(wrong) / len(wrong) == pytest.approx(SETTINGS["error"], abs=0.03)
    missed = Counter((t["readings"][0] - t["value"]) % 10 for t in by_arm[PAYS] if t["readings"][0] != t["value"])
    assert set(missed) == set(range(1, 10)) and max(missed.values()) < 1.5 * min(missed.values())


def test_every_seed_has_episodes_and_demonstrators_of_its_own_and_unseen_ones_are_others() -> None:
    readings = [
        [t["readings"] for t in emergence.tasks_of(PAYS, 300, s, SETTINGS, h)] for s in (0, 1) for h in (False, True)
    ]
    assert all(one != other for place, one in enumerate(readings) for other in readings[:place])
    one = {**SETTINGS, "demonstrations": 1}  # of which only a careful demonstrator checks
    assert {"?" in emergence.demonstrations(seed, one)[0]["response"] for seed in range(40)} == {True, False}


def test_the_best_policy_earns_what_it_promises_and_no_other_rule_earns_more() -> None:
    """Rules that stop once a value was read a number of times, played against the tool."""
    tasks = emergence.tasks_of(PAYS, 20_000, 1, SETTINGS)

    def earned(times: int) -> tuple[float, float, float]:
        right = checks = 0
        for task in tasks:
            seen: list[int] = []
            for reading in task["readings"]:
                seen.append(reading)
                value, count = Counter(seen).most_common(1)[0]
                if count == times:
                    break
            right, checks = right + (value == task["value"]), checks + len(seen) - 1
        return (right - SETTINGS["cost"] * checks) / len(tasks), right / len(tasks), checks / len(tasks)

    best = emergence.best(SETTINGS["error"], SETTINGS["cost"])
    assert earned(2)[:2] == pytest.approx(best[:2], abs=0.02)
    assert best[0] > max(earned(times)[0] for times in (1, 3, READINGS)) + 0.01
    assert emergence.best(SETTINGS["error"], 0.05) == pytest.approx(
        (earned(2)[1] - 0.05 * earned(2)[2], *earned(2)[1:]), abs=0.02
    )


def test_where_checks_tell_nothing_or_cost_too_much_the_best_policy_makes_none() -> None:
    assert emergence.best(0.0, 0.02) == (1.0, 1.0, 0.0)
    assert emergence.best(0.3, 0.5) == pytest.approx((0.7, 0.7, 0.0))
    assert emergence.best(0.3, 0.01)[1] > emergence.best(0.3, 0.05)[1] > 0.7
    assert emergence.optimum(NEVER, SETTINGS) == (1.0, 1.0, 0.0)
    assert emergence.optimum(REPEATS, SETTINGS) == pytest.approx((0.7, 0.7, 0.0))


def test_counts_are_those_of_the_episodes_and_none_where_nothing_could_show_them() -> None:
    corrected, obstinate = played(TASK, "=7?", "=7?", "=3."), played(TASK, "=7?", "=7?", "=7?", "=7.")
    found = emergence.figures_of([corrected, obstinate, played(TASK, "=3."), played(TASK, "7")])
    assert found["checks"] == 0.5 and found["number"] == 5 / 4
    assert found["corrects"] == 1 / 3  # the first, the second and the fourth began wrongly
    assert found["differs"] == 1 / 4
    assert found["unsettled"] == 1.0  # after 7 3, twice
    assert found["settled"] == 1 / 3  # after 7 3 3, once of two; after 7 3 3 5, never
    assert found["accuracy"] == 0.5 and found["reward"] == pytest.approx((2 - 5 * 0.02) / 4)
    alone = emergence.figures_of([played(TASK, "=3.")])
    assert alone["corrects"] is None and alone["settled"] is None and alone["unsettled"] is None


def test_few_demonstrators_check_and_their_episodes_are_the_tools() -> None:
    rows = emergence.demonstrations(0, SETTINGS)
    assert len({row["id"] for row in rows}) == len(rows)  # rows that are equal would be merged, and the shares others
    first = [row for row in rows if len(row["prompt"]) == 1]
    assert len(first) == SETTINGS["demonstrations"] and all(row["response_stop"] == "length" for row in rows)
    careful = [row["response"].endswith("?") for row in first]
    assert sum(careful) / len(careful) == pytest.approx(SETTINGS["careful"], abs=0.03)
    for row in random.Random(0).sample(rows, 200):
        readings, replies = (
            row["prompt"][::4],
            [row["prompt"][at : at + 3] for at in range(1, len(row["prompt"]) - 1, 4)],
        )
        assert len(readings) == len(replies) + 1 <= READINGS and all(reply.endswith("?") for reply in replies)
        assert row["response"][1] in readings


def counted(seed: int, **figures: float) -> dict[str, float]:
    """Counts with a little noise, so that the seeds have an interval."""
    return {
        name: value + 0.01 * (seed % 3) for name, value in {**dict.fromkeys(emergence.FIGURES, 0.5), **figures}.items()
    }


def test_claims_are_seen_where_checks_rise_if_they_pay_and_fall_elsewhere_and_contradicted_in_reverse() -> None:
    low, high = dict.fromkeys(emergence.FIGURES, 0.1), dict.fromkeys(emergence.FIGURES, 0.9)

    def verdicts(where_it_pays: dict[str, float], elsewhere: dict[str, float]) -> list[Verdict]:
        curves: Any = {name: [0.1, None, 0.3] for name in emergence.COURSE}
        numbers: dict[int, Numbers] = {
            seed: {
                arm: {"before": counted(0), "after": counted(seed, **after), "curves": curves}
                for arm, after in ((PAYS, where_it_pays), (NEVER, elsewhere), (REPEATS, elsewhere))
            }
            for seed in range(5)
        }
        return emergence.conclude(numbers, SETTINGS).verdicts

    assert set(verdicts(high, low)) == {Verdict.SEEN}
    assert set(verdicts(low, high)) == {Verdict.CONTRADICTED}
