"""Task orders depend on counts and results alone, and a resumed run continues with the same tasks."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny

import posttrain
from posttrain.cli.main import main
from posttrain.config.resolve import filled, validate
from posttrain.config.training import RL
from posttrain.core.batch import Stats
from posttrain.core.types import UserError, succeeds
from posttrain.data.levels import MOST_LEVELS, SPAN, Levels, makes_levels
from posttrain.data.preference_examples import to_item
from posttrain.data.tasks import Stream, Tasks, order, to_tasks
from posttrain.data.tasks_from_rows import Conversion
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import read_metrics, rollout_steps
from posttrain.training.sources.task_order import ByLevel, Drawn, Solved, SolveRate, Stages, TaskOrder, Uniform
from posttrain.training.task_orders import order_lines, stages_of, task_order

ROWS = [{"id": str(i), "prompt": f"{i}+1=", "level": 1 + i % 3} for i in range(12)]
TASKS = to_tasks(ROWS)
PLAYED: dict[str, Any] = {"prompts": 3, "group": 4, "max_tokens": 6, "lr": 1e-2, "env_workers": 0, "threads": 1,
                          "quiet": True, "save_every": 1, "keep": 9, "success": 0.3}  # fmt: skip
CURRICULA: dict[str, dict[str, Any]] = {
    "solve-rate": {"curriculum": "solve-rate", "curriculum_floor": 0.2},
    "stages": {
        "curriculum": "stages",
        "curriculum_column": "level",
        "curriculum_accuracy": 0.3,
        "curriculum_floor": 0.4,
    },
}


def everything(place: int) -> bool:
    return True


def solve_rate(floor: float = 0.0, decay: float = 0.5, sharpness: float = 1.0, tasks: Tasks = TASKS) -> SolveRate:
    return SolveRate(tasks, 0, floor, decay, sharpness)


def stages(floor: float = 0.25, decay: float = 0.5, accuracy: float = 0.8, least: float = 8.0) -> Stages:
    return Stages([np.arange(0, 4), np.arange(4, 8), np.arange(8, 12)], 0, floor, decay, accuracy, least, "abc")


def results(*rows: tuple[int, int, int]) -> list[Solved]:
    return [Solved(place, str(place), right, wrong) for place, right, wrong in rows]


def through_json(of: TaskOrder, into: TaskOrder) -> TaskOrder:
    into.restore(json.loads(json.dumps(of.state())))
    return into


def seen_by(found: TaskOrder, steps: int = 12, count: int = 5, first: int = 0) -> list[Drawn]:
    """Draw from an order in steps whose results follow from their numbers."""
    drawn = []
    for number in range(first, first + steps):
        drawn.append(found.draw(count, everything, ()))
        places = sorted({place for _, place in drawn[-1]})
        found.observe(results(*((place, (7 * place + number) % 5, (place + 3 * number) % 4) for place in places)))
        found.measure(Stats())
    return drawn


# -- the usual order ---------------------------------------------------------------------------------------------------


def test_usual_order_is_that_of_the_epochs() -> None:
    assert Uniform(7, 0).draw(9, everything) == [
        *((0, p) for p in order(7, 0, 0)),
        *((1, p) for p in order(7, 1, 0)[:2]),
    ]
    parts = Uniform(7, 3)
    assert [*parts.draw(4, everything), *parts.draw(7, everything)] == Uniform(7, 3).draw(11, everything)
    assert parts.state() == {"cursor": 11}


# -- solve rates -------------------------------------------------------------------------------------------------------


def test_solve_rate_is_the_mean_of_a_beta_distribution_whose_results_decay_at_each_visit() -> None:
    rng = np.random.default_rng(0)
    found, told = solve_rate(decay=0.6), {place: list[tuple[int, int]]() for place in range(12)}
    for _ in range(9):
        for place in rng.choice(12, 4, replace=False).tolist():
            told[place].append((int(rng.integers(9)), int(rng.integers(9))))
            found.observe(results((place, *told[place][-1])))
    for place, visits in told.items():
        ages = [0.6**age for age in reversed(range(len(visits)))]
        right, wrong = (sum(a * visit[i] for a, visit in zip(ages, visits, strict=True)) for i in (0, 1))
        assert found.rate[place] == pytest.approx((right + 1) / (right + wrong + 2), abs=1e-12)
    stats = Stats()
    found.measure(stats)
    known = [found.rate[place] for place, visits in told.items() if visits]
    assert stats.means()["curriculum/solve_rate"] == pytest.approx(sum(known) / len(known))
    assert stats.means()["curriculum/seen"] == len(known) / 12


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 3.0])
def test_tasks_are_drawn_in_proportion_to_their_weights(sharpness: float) -> None:
    found = solve_rate(sharpness=sharpness)
    found.observe(results(*((place, place, 12 - place) for place in range(12))))
    rates = [(place + 1) / 14 for place in range(12)]
    weights = np.array([(p * (1 - p)) ** sharpness for p in rates])
    first, second = Counter[int](), Counter[int]()
    for _ in range(6000):
        one, other = (place for _, place in found.draw(2, everything, ()))
        assert one != other
        first[one] += 1
        second[other] += 1
    share = weights / weights.sum()
    assert [first[place] / 6000 for place in range(12)] == pytest.approx(share, abs=0.02)
    # without replacement: the second is i with the sum over j of share_j times share_i / (1 - share_j)
    expected = [share[i] * (share / (1 - share))[np.arange(12) != i].sum() for i in range(12)]
    assert [second[place] / 6000 for place in range(12)] == pytest.approx(expected, abs=0.02)


def test_floor_brings_every_task_in_turn_though_nothing_else_would() -> None:
    found = solve_rate(floor=0.25, sharpness=100.0, decay=1 - 1e-9)
    hopeless = results(*((place, 0, 1000) for place in range(11)))
    for number in range(12 * 4 // 4):  # n / floor draws, four in each step
        found.observe(hopeless if number == 0 else [])
        drawn = [place for _, place in found.draw(4, everything, ())]
        assert len(set(drawn)) == 4 and 11 in drawn
    assert set(found.visits) == set(range(12))
    stats = Stats()
    found.measure(stats)
    assert stats["curriculum/share"] == (12.0, 48.0)
    alone = solve_rate(floor=0.0, sharpness=100.0)
    alone.observe(results(*((place, 0, 1000) for place in range(8)), *((place, 1, 1) for place in range(8, 12))))
    assert {place for _ in range(20) for _, place in alone.draw(4, everything, ())} == {8, 9, 10, 11}


def test_a_step_has_no_task_twice_while_there_are_others_that_fit() -> None:
    found = solve_rate(floor=0.5)
    taken = [place for _, place in found.draw(6, everything, ())]
    assert len(set(taken)) == 6
    rest = solve_rate()
    assert {place for _, place in rest.draw(6, everything, set(taken))} == set(range(12)) - set(taken)
    assert len(rest.draw(12, everything, set(taken))) == 12, "taken ones come where there are no others"
    few = rest.draw(4, lambda place: place in (3, 5), ())
    assert Counter(place for _, place in few) == {3: 2, 5: 2} and len(set(few)) == 4
    with pytest.raises(UserError, match="none of 12 rows fits into the model's context"):
        rest.draw(1, lambda place: False, ())


def test_visits_are_counted_for_each_task() -> None:
    for found in (solve_rate(floor=0.3), stages()):
        visits = Counter[int]()
        for drawn in seen_by(found, steps=20):
            for visit, place in drawn:
                assert visit == visits[place]
                visits[place] += 1


# -- stages ------------------------------------------------------------------------------------------------------------


def test_a_stage_ends_when_its_running_accuracy_reaches_the_threshold() -> None:
    found, right, wrong, stage = stages(), 0.0, 0.0, 0
    shares = iter([(1, 7), (8, 0), (8, 0), (6, 2), (0, 8), (8, 0), (8, 0), (8, 0), (8, 0), (8, 0)])
    moved = []
    for number, (own_right, own_wrong) in enumerate(shares):
        drawn = found.draw(4, everything, ())
        over = right + wrong >= 8 and right >= 0.8 * (right + wrong) and stage < 2
        if over:
            right, wrong, stage = 0.0, 0.0, stage + 1
            moved.append(number)
        earlier = sum(place // 4 < stage for _, place in drawn)
        assert earlier == (1 if stage else 0) and all(place // 4 <= stage for _, place in drawn)
        other = results((0, 0, 50)) if stage else []  # of an earlier stage: it decides nothing
        found.observe([*results((4 * stage, own_right, own_wrong)), *other])
        right, wrong = 0.5 * right + own_right, 0.5 * wrong + own_wrong
        stats = Stats()
        found.measure(stats)
        assert stats.means()["curriculum/stage"] == stage + 1 and stats.means()["curriculum/share"] == earlier / 4
        assert stats.means()["curriculum/accuracy"] == pytest.approx(right / (right + wrong))
    assert moved == [3, 7] and stage == 2


def test_a_stage_needs_some_results_before_it_ends() -> None:
    found = stages(least=8.0)
    for right, stage in ((3, 0), (3, 0), (3, 0), (8, 0), (0, 1)):  # 3 + 1.5 + 0.75 are fewer than 8
        found.draw(4, everything, ())
        assert found.stage == stage
        found.observe(results((0, right, 0)))


def test_tasks_of_a_stage_come_once_per_epoch_and_earlier_ones_too() -> None:
    found = stages(floor=0.5, accuracy=0.01, least=1.0)
    first = [place for _ in range(2) for _, place in found.draw(4, everything, ())]
    assert sorted(first) == sorted([0, 1, 2, 3] * 2) and first[:4] != [0, 1, 2, 3]
    found.observe(results((0, 9, 0)))
    drawn = [place for _ in range(4) for _, place in found.draw(4, everything, ())]
    assert Counter(drawn) == {place: 2 for place in range(8)}
    with pytest.raises(UserError, match="none of 4 rows fits"):
        found.draw(4, lambda place: place >= 8, ())


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [lambda: Uniform(12, 0), lambda: solve_rate(0.3, 0.7, 2.0), lambda: stages(accuracy=0.3, least=2.0)]
)
def test_order_goes_on_from_its_state(kind: Any) -> None:
    whole, begun = kind(), kind()
    drawn = seen_by(whole, 14)
    assert seen_by(begun, 5) == drawn[:5]
    state = begun.state()
    again = through_json(begun, kind())
    assert seen_by(again, 9, first=5) == drawn[5:] and again.state() == whole.state()
    assert begun.state() == state, "a state is a copy"
    seen_by(begun, 3)
    assert begun.state() != state and through_json(begun, again).state() == begun.state()


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (solve_rate, {"cursor": -1}),
        (solve_rate, {"drawn": 1.0}),
        (solve_rate, {"drawn": 10**400}),
        (solve_rate, {"results": [[0, "0", 10**400, 0.0]]}),
        (solve_rate, {"results": [[0, "0", -1.0, 0.0]]}),
        (solve_rate, {"results": [[0, "0", float("nan"), 0.0]]}),
        (solve_rate, {"results": [[0, "0"]]}),
        (solve_rate, {"visits": [["a", 1]]}),
        (stages, {"stage": 3}),
        (stages, {"results": [1.0, float("inf")]}),
        (stages, {"earlier": None}),
    ],
)
def test_state_that_is_none_is_refused(kind: Any, broken: dict[str, Any]) -> None:
    state = kind().state()
    kind().restore(state)
    assert broken.keys() <= state.keys()
    with pytest.raises((ValueError, LookupError, TypeError, OverflowError)) as told:
        kind().restore({**state, **broken})
    assert len(str(told.value)) < 100


def test_results_of_tasks_that_were_replaced_are_forgotten() -> None:
    found = solve_rate()
    found.observe(results((2, 5, 1), (3, 0, 6), (11, 4, 4)))
    other = to_tasks([ROWS[0], ROWS[1], ROWS[2], {**ROWS[3], "id": "new"}])
    again = through_json(found, solve_rate(tasks=other))
    assert isinstance(again, SolveRate) and list(again.results) == [2] and again.rate.tolist()[2] == found.rate[2]
    assert again.rate[3] == 0.5


# -- columns and options -----------------------------------------------------------------------------------------------


def leveled(*levels: Any) -> Tasks:
    return to_tasks([{"prompt": f"p{i}", "level": level} for i, level in enumerate(levels)])


def test_stages_are_the_values_of_a_column_in_ascending_order() -> None:
    def places(*levels: Any) -> list[tuple[Any, list[int]]]:
        return [(value, found.tolist()) for value, found in stages_of(leveled(*levels), "level").items()]

    assert places(10, 2, 2.5, 2) == [(2, [1, 3]), (2.5, [2]), (10, [0])]
    assert places("10", "2", "2.0") == [(2, [1, 2]), (10, [0])]  # as numbers, though a file has texts
    assert places("hard", "easy", "10") == [("10", [2]), ("easy", [1]), ("hard", [0])]
    nested = to_tasks([{"prompt": str(i), "extra": {"level": -i}} for i in range(3)])
    assert list(stages_of(nested, "extra.level")) == [-2, -1, 0]


@pytest.mark.parametrize(
    ("levels", "told"),
    [
        ((1, None), r"row 2: level is null: a stage must be a finite number or a string"),
        ((1, [2]), r"row 2: level is '\[2\]'|row 2: level is \[2\]"),
        ((1, float("nan")), "row 2: level is nan"),
        ((1, 10**400), "row 2: level is 1000"),
        ((1, "hard"), "row 2: level is 'hard', and 1 in row 1: make all of them numbers, or all strings"),
        (tuple(range(1001)), "the column 'level' has 1,001 different values"),
    ],
)
def test_values_that_are_no_stages_are_refused_in_one_line(levels: Sequence[Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as refused:
        stages_of(leveled(*levels), "level")
    assert "\n" not in str(refused.value)


def test_missing_column_is_refused_with_its_row_and_the_columns_that_there_are() -> None:
    rows = to_tasks([{"prompt": "a", "level": 1}, {"prompt": "b", "depth": 1}])
    with pytest.raises(UserError, match="row 2: no column 'level'.*the columns are: .*depth"):
        stages_of(rows, "level")


def config(**how: Any) -> RL:
    return filled(RL, {"tasks": "x.jsonl", "env": "arithmetic", "model": "m", "prompts": 3, "group": 4, **how})


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"curriculum": "stages"}, "--curriculum stages needs the column of the stages: add --curriculum-column level"),
        ({"curriculum_column": "level"}, "--curriculum-column has no effect without --curriculum stages: leave it out"),
        ({"curriculum_floor": 0.2}, "--curriculum-floor has no effect without --curriculum solve-rate or stages"),
        (
            {"curriculum": "stages", "curriculum_column": "level", "curriculum_sharpness": 1},
            "--curriculum-sharpness has no effect without --curriculum solve-rate: leave it out",
        ),
        ({"curriculum": "solve-rate", "curriculum_accuracy": 0.5}, "--curriculum-accuracy has no effect without"),
        (
            {**CURRICULA["stages"], "curriculum_accuracy": 1.0},
            "--curriculum-accuracy must be above 0 and below 1, not 1",
        ),
        ({**CURRICULA["stages"], "curriculum_floor": 1.0}, "--curriculum-floor must be at least 0 and below 1, not 1"),
    ],
)
def test_options_that_contradict_each_other_are_refused_in_one_line(how: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as refused:
        validate(config(**how))
    assert str(refused.value).startswith(told) and "\n" not in str(refused.value)
    for good in CURRICULA.values():
        validate(config(**good))


def test_curriculum_that_tasks_do_not_allow_is_refused_in_one_line() -> None:
    by_rate, by_stage = (config(**how) for how in CURRICULA.values())
    endless = Stream(lambda: iter(ROWS), Conversion({}, None, None, None, None, ("prompt",), ""))
    for given, tasks, success, told in (
        (by_rate, TASKS, None, "counts right replies: give the reward of a right reply with --success"),
        (by_rate, endless, 1.0, "these rows have no end: set their number with --limit"),
        (by_stage, endless, 1.0, "these rows have no end"),
        (config(**CURRICULA["stages"], prompts=5), TASKS, 1.0, "the stage level = 1 has 4 tasks, fewer than a step's"),
    ):
        with pytest.raises(UserError, match=told):
            task_order(given, tasks, success)
    assert isinstance(task_order(config(), endless, None), Uniform), "the usual order needs nothing"
    found = task_order(by_stage, TASKS, 1.0)
    assert isinstance(found, Stages) and found.running.least == 3 * 4 * 0.6 / 2
    assert "3 stages by level: 1 (4), 2 (4), 3 (4), each until" in order_lines(by_stage, found)[0]
    with pytest.raises(UserError, match="level is 1 in every row, which is one stage: name another column"):
        task_order(by_stage, leveled(1, 1, 1, 1), 1.0)


def test_stages_of_texts_are_named_in_their_order_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("posttrain.training.task_orders.warn", told.append)
    how = config(**CURRICULA["stages"], prompts=2)
    found = task_order(how, leveled(*["easy"] * 3, *["medium"] * 2, *["hard"] * 4), 1.0)
    assert "3 stages by level: easy (3), hard (4), medium (2), each until" in order_lines(how, found)[0]
    assert len(told) == 1 and "in alphabetical order: easy, hard, medium; give numbers" in told[0]
    task_order(how, leveled(1, 1, 2, 2), 1.0)
    assert len(told) == 1, "numbers have an order of their own"


def test_a_missing_column_of_stages_is_refused_with_the_columns_of_the_file() -> None:
    rows = to_tasks([{"question": "a", "solution": "b"}], fields={"prompt": "question", "response": "solution"})
    with pytest.raises(UserError) as refused:
        stages_of(rows, "nix")
    assert str(refused.value) == "row 1: no column 'nix'; the columns are: question, solution"
    with pytest.raises(UserError, match="no prompt; the row has: question, steps, step_labels; name its column"):
        to_tasks(
            [{"question": "a", "steps": ["x"], "step_labels": [1]}],
            fields={"labels": "step_labels"}, convert=to_item, left_out="without labels",
        )  # fmt: skip


# -- runs --------------------------------------------------------------------------------------------------------------


def digits(task: posttrain.Task, reply: str) -> float:
    return sum(c.isdigit() for c in reply) / (len(reply) + 1)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("order") / "start"
    save_model(tiny(tokenizer), folder, tokenizer)
    threads = torch.get_num_threads()
    yield str(folder)
    torch.set_num_threads(threads)


def drawn_by_results(path: Path, steps: int, **how: Any) -> list[set[str]]:
    """The groups of each step, by an order that sees the recorded results of the steps before it alone."""
    found, groups = task_order(config(**how), to_tasks(ROWS), 0.3), []
    for number in range(1, steps + 1):
        drawn = found.draw(3, everything, ())
        groups.append({f"{place}#{visit}" for visit, place in drawn})
        told: dict[int, list[bool]] = {}
        for row in read_rollouts(path, number):
            told.setdefault(int(row["task"]), []).append(bool(succeeds(row["reward"], 0.3)))
        found.observe([Solved(p, str(p), sum(own), len(own) - sum(own)) for p, own in told.items()])
    return groups


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("name", list(CURRICULA))
def test_tasks_of_a_run_follow_from_the_results_of_the_steps_before_and_a_resumed_run_repeats_them(
    start: str, tmp_path: Path, name: str, ahead: int
) -> None:
    def played(steps: int, **how: Any) -> Path:
        out = str(tmp_path / "run")
        return posttrain.rl(
            ROWS, digits, start, out=out, steps=steps, async_steps=ahead, **CURRICULA[name], **PLAYED, **how
        ).path

    path = played(8)
    whole = (path / "metrics.jsonl").read_bytes()
    groups = [{row["group"] for row in read_rollouts(path, step)} for step in range(1, 9)]
    assert groups == drawn_by_results(path, 8, **CURRICULA[name])
    usual = Uniform(12, 0)
    assert groups != [{f"{place}#{visit}" for visit, place in usual.draw(3, everything)} for _ in range(8)]
    metrics = read_metrics(path)
    if name == "stages":
        assert {row["curriculum/stage"] for row in metrics} >= {1, 2}, "a stage ended"
    else:
        seen = {group.split("#")[0] for step in groups for group in step}
        assert metrics[-1]["curriculum/seen"] == len(seen) / 12
    for step in range(4, 9):
        shutil.rmtree(path / "checkpoints" / f"step-{step:06d}")
    played(8, resume=True)
    assert (path / "metrics.jsonl").read_bytes() == whole
    assert [{row["group"] for row in read_rollouts(path, step)} for step in range(1, 9)] == groups


def test_dynamic_sampling_replaces_groups_by_the_next_tasks_of_the_curriculum(start: str, tmp_path: Path) -> None:
    def uneven(task: posttrain.Task, reply: str) -> float:
        return digits(task, reply) if int(task["id"]) % 3 == 0 else 1.0

    def played(name: str, **how: Any) -> Path:
        given = {**PLAYED, **CURRICULA["solve-rate"], "settings": {"dynamic_sampling": 4}, **how}
        return posttrain.rl(ROWS, uneven, start, out=str(tmp_path / name), steps=4, **given).path

    path = played("run")
    metrics, again = read_metrics(path), 0
    for step in range(1, 5):
        ids = [task for task, _ in {(row["task"], row["group"]): 0 for row in read_rollouts(path, step)}]
        assert len(ids) == metrics[step - 1]["groups/played"] > 3
        again += len(ids) - len(set(ids))
    assert again <= 4, "only the floor may bring a task that the step has already"
    whole = (path / "metrics.jsonl").read_bytes()
    shutil.rmtree(path / "checkpoints" / "step-000004")
    shutil.rmtree(path / "checkpoints" / "step-000003")
    played("run", resume=True)
    assert (path / "metrics.jsonl").read_bytes() == whole


def test_groups_that_several_steps_sample_count_when_they_are_whole(start: str, tmp_path: Path) -> None:
    def played(**how: Any) -> Path:
        given = {**PLAYED, **CURRICULA["solve-rate"], "tokens_per_step": 3, "async_steps": 1, **how}
        return posttrain.rl(ROWS, digits, start, out=str(tmp_path / "run"), steps=6, **given).path

    path = played()
    whole = (path / "metrics.jsonl").read_bytes()
    seen = {row["task"] for step in rollout_steps(path) for row in read_rollouts(path, step)}
    assert read_metrics(path)[-1]["curriculum/seen"] == len(seen) / 12 < 1
    for step in range(4, 7):
        shutil.rmtree(path / "checkpoints" / f"step-{step:06d}")
    played(resume=True)
    assert (path / "metrics.jsonl").read_bytes() == whole


def test_mistakes_end_the_command_in_one_line(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("my.py").write_text("def reward(task, reply):\n    return 1.0\n")
    words = f"rl --tasks rows.jsonl --env my.py:reward --model {start} --steps 1 --quiet --prompts 3".split()
    for more, told in (
        ("--curriculum stages --curriculum-column depth --success 1", "rows.jsonl:1: no column 'depth'"),
        ("--curriculum solve-rate", "--curriculum solve-rate counts right replies"),
        ("--curriculum hardest", "hardest"),
    ):
        assert main([*words, *more.split()]) == 2
        said = capsys.readouterr().err
        assert told in said and len(said.strip().splitlines()) == 1


# -- levels ------------------------------------------------------------------------------------------------------------


def rows_of_level(seed: int, level: int) -> list[dict[str, Any]]:
    """Three rows of a level, other ones for another seed; there are three levels."""
    return [{"prompt": f"{level} {seed % 997} {n}="} for n in range(3)] if level < 4 else []


def levels(of_level: Any = rows_of_level, seed: int = 0) -> Levels:
    return Levels(of_level, Conversion({}, None, None, None, None, ("prompt",)), seed)


def by_level(of_level: Any = rows_of_level, floor: float = 0.25, decay: float = 0.5) -> ByLevel:
    return ByLevel(levels(of_level), floor, decay, 0.8, 8.0)


def test_tasks_of_a_level_follow_from_seed_and_number_alone_and_do_not_come_twice() -> None:
    made = levels()
    prompts = [made[level * SPAN + number]["prompt"] for level in range(3) for number in range(9)]
    assert len(set(prompts)) == 27 and [p.split()[0] for p in prompts] == ["1"] * 9 + ["2"] * 9 + ["3"] * 9
    again = levels()
    backwards = [again[level * SPAN + number]["prompt"] for level in (2, 1, 0) for number in range(8, -1, -1)]
    assert backwards[::-1] == prompts
    other = levels(seed=1)
    assert not {other[level * SPAN + n]["prompt"] for level in range(3) for n in range(9)} & {*prompts}, "another seed"
    endless = levels(lambda seed, level: [{"prompt": str(level)}])
    assert endless.has(MOST_LEVELS - 1) and not endless.has(MOST_LEVELS) and MOST_LEVELS * SPAN < 2**31
    seeds = {p.split()[1] for p in prompts}
    assert len(seeds) == 9, "a level's second call of the function has another seed"


def test_next_level_begins_at_the_running_accuracy_and_the_last_one_has_no_end() -> None:
    found, seen = by_level(), []
    for _ in range(12):
        drawn = found.draw(8, everything, ())
        seen.append([place // SPAN for _, place in drawn])
        found.observe([Solved(place, "", 4, 0) for _, place in drawn])
    assert seen[0] == [0] * 8 and seen[1].count(1) == 6 and seen[1].count(0) == 2
    assert all(step.count(2) == 6 and step.count(1) == step.count(0) == 1 for step in seen[2:])
    slow = by_level()
    for right in (5, 6, 7):
        drawn = slow.draw(8, everything, ())
        slow.observe([Solved(place, "", right, 10 - right) for _, place in drawn])
        assert slow.level == 0


def test_results_of_a_level_do_not_end_the_next_one() -> None:
    found = by_level()
    found.observe([Solved(place, "", 9, 1) for _, place in found.draw(4, everything, ())])
    for _ in range(3):  # no result of the second level comes, or too few
        found.draw(4, everything, ())
        assert found.level == 1 and (found.running.right, found.running.wrong) == (0.0, 0.0)
    found.observe([Solved(SPAN, "", 7, 0)])
    found.draw(4, everything, ())
    assert found.level == 1, "8 rollouts are needed"
    found.observe([Solved(SPAN, "", 7, 0)])
    found.draw(4, everything, ())
    assert found.level == 2


def test_floor_of_levels_takes_the_earlier_ones_in_turn_and_results_on_them_do_not_count() -> None:
    found = by_level(floor=0.5)
    for _ in range(3):
        found.observe([Solved(place, "", 9, 0) for _, place in found.draw(4, everything, ())])
    earlier = [place // SPAN for _ in range(6) for _, place in found.draw(3, everything, ()) if place // SPAN < 2]
    assert earlier[:-1] and all(a != b for a, b in pairwise(earlier))
    found.observe([Solved(0, "", 0, 99), Solved(SPAN, "", 0, 99)])
    assert found.running.wrong == 0


def test_levels_go_on_from_their_state() -> None:
    def seen(order: ByLevel, first: int) -> list[Drawn]:
        drawn = []
        for number in range(first, first + 6):
            drawn.append(order.draw(5, everything, ()))
            order.observe([Solved(place, "", 2 + (place + number) % 2, number % 2) for _, place in drawn[-1]])
        return drawn

    whole = by_level()
    seen(whole, 0)
    resumed = through_json(whole, by_level())
    assert isinstance(resumed, ByLevel) and seen(resumed, 6) == seen(whole, 6) and resumed.state() == whole.state()
    for broken in ({"next": []}, {"next": [-1]}, {"drawn": "x"}, {"results": [1]}):
        with pytest.raises((ValueError, LookupError, TypeError)):
            by_level().restore({**whole.state(), **broken})


def test_function_that_fails_is_told_with_the_level() -> None:
    def failing(seed: int, level: int) -> list[dict[str, Any]]:
        return rows_of_level(seed, level) if level == 1 else [{"prompt": 1 / 0}]

    found = by_level(failing)
    found.observe([Solved(place, "", 9, 0) for _, place in found.draw(4, everything, ())])
    with pytest.raises(UserError, match="making rows of level 2 failed: ZeroDivisionError"):
        found.draw(4, everything, ())
    with pytest.raises(UserError, match="making rows of level 2 failed: SystemExit"):
        levels(lambda seed, level: sys.exit(level)).has(1)


def test_a_list_of_levels_that_has_ended_is_the_end() -> None:
    listed = levels(lambda seed, level: [{"prompt": ["1=", "2="][level - 1]}])
    assert listed.has(1) and not listed.has(2)
    assert makes_levels(rows_of_level) and not makes_levels(lambda seed=0, level=1: []) and not makes_levels(list)


LEVELS = """
def tasks(seed, level):
    return [{"prompt": f"{(seed + n) % 9}+{level}="} for n in range(4)]

def stage(task):
    return len(task["prompt"])
"""


def test_run_by_levels_makes_new_tasks_and_a_resumed_run_repeats_them(start: str, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(LEVELS + "\ndef reward(task, reply):\n    return float(len(reply) > 2)\n")
    how: dict[str, Any] = {**PLAYED, "env": f"{tmp_path}/my.py:reward", "model": start, "curriculum": "levels",
                           "curriculum_accuracy": 0.3, "curriculum_floor": 0.4, "seed": 3}  # fmt: skip
    whole, part = tmp_path / "whole", tmp_path / "part"
    for out, steps, resume in ((whole, 6, False), (part, 3, False), (part, 6, True)):
        posttrain.rl(f"{tmp_path}/my.py:tasks", steps=steps, out=str(out), resume=resume, **how)
    groups = [
        [{row["group"] for row in read_rollouts(run, step)} for step in rollout_steps(run)] for run in (whole, part)
    ]
    assert groups[0] == groups[1] and sum(map(len, groups[0])) == len(set().union(*groups[0])), "no task twice"
    metrics = read_metrics(whole)
    assert metrics[-1]["curriculum/stage"] > 1 and metrics == read_metrics(part)


@pytest.mark.parametrize(
    ("tasks", "how", "told"),
    [
        ("my.py:tasks", {}, "has the parameters seed and level: add --curriculum levels"),
        ("my.py:tasks", {"curriculum": "levels", "limit": 4}, "as many tasks as the run needs: leave out --limit"),
        ("my.py:tasks", {"curriculum": "levels", "held_out": 0.1}, "evaluate on --eval-tasks, without --held-out"),
        ("rows.jsonl", {"curriculum": "levels"}, r"a function tasks\(seed, level\) that returns rows"),
        ("rows.jsonl", {"curriculum": "stages", "curriculum_column": "my.py:none"}, "none"),
        ("rows.jsonl", {"curriculum": "stages", "curriculum_column": "my.py:tasks"}, "my.py:tasks failed: TypeError"),
    ],
)
def test_levels_and_stages_by_a_function_are_refused_in_one_line(
    tasks: str, how: dict[str, Any], told: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(LEVELS + "\ndef reward(task, reply):\n    return 1.0\n")
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    with pytest.raises(UserError, match=told) as refused:
        posttrain.rl(tasks, "my.py:reward", model=start, out="run", **{**PLAYED, **how})
    assert "\n" not in str(refused.value)


def test_stages_may_be_what_a_function_of_the_task_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(LEVELS)
    found = stages_of(TASKS, "my.py:stage")
    assert [value for value in found] == [4.0, 5.0]
    assert [len(TASKS[int(place)]["prompt"]) for places in found.values() for place in places] == [4] * 10 + [5] * 2
