"""The simulation is exact where times can be worked out by hand, and near the formulas and the runs where they cannot."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import TESTS

import posttrain
from posttrain.apps.planning.job import Group, Job, JobEpisode, JobTurn, Learning, PlanSetting, Speed
from posttrain.apps.planning.pilot import read_pilot, rising
from posttrain.apps.planning.plan_command import _about, command_of
from posttrain.apps.planning.simulation import Simulation, SimulationResult
from posttrain.cli.commands import _training_of
from posttrain.cli.main import main
from posttrain.config.command_words import command_words
from posttrain.config.scale import Plan
from posttrain.config.training import RL
from posttrain.core.types import UserError
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import read_timing

ONE = Speed(((1, 1.0),))  # a second for every step
STEP = Learning(0.0, step=1.0)
RECORDED = TESTS / "pilots"


def group(*lengths: int) -> Group:
    return Group(tuple(JobEpisode((JobTurn(length),)) for length in lengths), sum(lengths))


def job(*groups: Group, prompts: int = 1, speed: Speed = ONE, learning: Learning = STEP) -> Job:
    return Job(prompts, lambda number: groups[number % len(groups)], speed, learning)


def run(job: Job, steps: int = 4, trace: bool = False, **setting: Any) -> SimulationResult:
    return Simulation(job, PlanSetting(**{"engines": 1, **setting}), steps, trace).run()


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_one_engine_and_one_learner_in_turns_or_side_by_side() -> None:
    alone = job(group(10), speed=replace(ONE, slots=1), learning=Learning(0.4, step=1.0))
    turns = run(alone)
    assert turns.learned == (15, 30, 45, 60)
    assert turns.steps_per_hour == pytest.approx(240) and turns.learners == pytest.approx(1 / 3)
    assert turns.engines["decoding"] == pytest.approx(2 / 3) and turns.idle == pytest.approx((1 / 3, 2 / 3))
    # 0-10 and 10-20 with the first weights; those of the update until 15 play from 20 on
    side = run(alone, async_steps=1)
    assert side.learned == (15, 25, 35, 45) and side.engines["decoding"] == pytest.approx(1)
    assert run(alone, learners=2, async_steps=1).learned == (13, 23, 33, 43), (
        "tokens are shared, what else a step takes is not"
    )
    slow = replace(alone, learning=Learning(2.0))
    assert run(slow, async_steps=1).learned == (30, 50, 70, 90) and run(slow, async_steps=1).limit == "learners"
    shared = run(alone, shared=True)
    assert shared.learned == turns.learned and shared.idle == pytest.approx((0, 0), abs=1e-9)


def test_a_step_takes_what_the_number_of_running_requests_says() -> None:
    speed = Speed(((1, 1.0), (3, 2.0)))
    assert [speed.step(n) for n in (1, 2, 3, 5)] == [1.0, 1.5, 2.0, 3.0]
    # four steps of two, six of one
    assert run(job(group(10, 4), speed=speed)).learned[0] == 4 * 1.5 + 6 + 1
    # one slot after the other is filled: four steps of two, two more of two, four of one
    assert run(job(group(10, 4, 2), speed=replace(speed, slots=2))).learned[0] == 6 * 1.5 + 4 + 1
    # the third waits until two slots are free
    assert run(job(group(10, 4, 2), speed=replace(speed, slots=2, admitted=2))).learned[0] == 4 * 1.5 + 6 + 2 + 1


def test_two_engines_hold_two_versions_and_take_up_the_next_when_they_have_finished() -> None:
    groups = group(10), group(4), group(7), group(4)
    learning = Learning(0.0, step=3.0)
    two = job(*groups, prompts=2, speed=replace(ONE, slots=1), learning=learning)
    assert run(two, engines=2).learned == (13, 23, 36, 46)
    # first: 0-10, 10-17 and 17-21 (third step); second: 0-4, 4-8, 13-23 (third step); fourth step: 21-28, 23-27
    assert run(two, engines=2, async_steps=1).learned == (13, 20, 26, 31)
    loading = replace(two, speed=replace(two.speed, load=2.0))
    # third step: first 19-23, second 15-25; fourth: first 25-32, second 27-31
    assert run(loading, engines=2, async_steps=1).learned == (13, 20, 28, 35)


def test_replies_that_are_cut_go_on_in_the_next_step_and_their_group_waits_for_them() -> None:
    cut = job(group(10, 3))
    outcome = run(cut, tokens=4, steps=12)
    # nothing is whole in the first two steps, then a group a step: four tokens each
    assert outcome.learned == tuple(range(5, 65, 5))
    assert outcome.steps_per_hour == pytest.approx(720)
    assert run(cut).learned[:3] == (11, 22, 33)
    # what was said before the cut is read again, by the new weights: 4 tokens, then 8 and 4
    assert run(replace(cut, speed=replace(ONE, read=0.5)), tokens=4).learned[:3] == (5, 12, 23)


def test_what_was_played_ahead_before_it_is_measured_counts_once() -> None:
    outcome = run(job(group(10), learning=Learning(0.0, step=4.5)), 10, async_steps=5)
    # six steps are played at once until 10, then one at a time: until 24.5, 34.5, 44.5, 54.5
    assert outcome.learned == (14.5, 19, 23.5, 28, 32.5, 37, 41.5, 46, 50.5, 59)
    # of the three that were learned from since 41.5 two were played since then
    assert outcome.steps_per_hour == pytest.approx(3600 * 2 / (59 - 41.5))


def test_environments_are_waited_for_and_the_prompt_of_a_group_is_read_once() -> None:
    episode = JobEpisode((JobTurn(5, read=4, wait=2.0), JobTurn(3, read=1, wait=1.5)), reward=2.0)
    speed = replace(ONE, read=0.25)
    assert run(job(Group((episode,), 13), speed=speed)).learned[0] == 15.75
    both = run(job(Group((episode, episode), 22), speed=speed))
    assert both.learned[0] == 16 and both.engines["environments"] == pytest.approx(5.5 / 16)
    assert both.engines["reading"] == pytest.approx(1.5 / 16)
    # a cut between two turns, at 8: in the next step the second turn is read at 10.5, and waits from 11 to 12 while the new
    # prompt is read, whose five tokens end at 17
    assert run(job(Group((episode,), 13), speed=speed), tokens=5, steps=2).learned == (9, 18)


def test_weights_that_go_under_running_replies_interrupt_them_for_the_hand_over_alone() -> None:
    clock = job(group(10), speed=replace(ONE, slots=1, load=0.5), learning=Learning(0.0, step=3.0))
    # 0-10 and 10-20 but for half a second from 13 on
    assert run(clock, async_steps=1, clock=True).learned == (13, 23.5, 34, 44.5)


# -- by formula --------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 30), st.integers(0, 4), st.integers(0, 3))
def test_the_period_of_a_tandem_is_the_sum_in_turns_and_the_slower_side_ahead(
    members: int, length: int, learning: int, load: int, ahead: int
) -> None:
    speed = Speed(((1, 0.5 + 0.25), (8, 0.5 + 8 * 0.25)), load=load, slots=members)
    play = length * (0.5 + 0.25 * members) + load
    outcome = run(job(group(*[length] * members), speed=speed, learning=Learning(0.0, learning)), 12, async_steps=ahead)
    period = play + learning if ahead == 0 else max(play, learning)
    # steps that are played with one version may come in pairs: the mean over a few of them is the period
    assert outcome.learned[-1] - outcome.learned[5] == pytest.approx(6 * period, abs=1e-6 + load * (ahead > 0) * 6)
    if ahead == 0 or not load:
        assert outcome.learned[-1] - outcome.learned[-2] == pytest.approx(period)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_waiting_in_front_of_one_slot_is_that_of_a_queue_with_random_arrivals_and_fixed_service(load: float) -> None:
    random, service = Random("arrivals"), 10
    arrivals, now = [], 0.0
    for _ in range(15_000):
        now += random.expovariate(load / service)
        arrivals.append(JobEpisode((JobTurn(service, wait=now),)))
    served = run(job(Group(tuple(arrivals), 1), speed=replace(ONE, slots=1)), 2, trace=True).served
    waited = sum(request.begun - request.asked for request in served) / len(served)
    assert waited == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)  # Pollaczek and Khinchine


@given(st.lists(st.tuples(st.floats(0.1, 9), st.integers(1, 9)), min_size=1, max_size=6))
def test_a_measured_curve_is_made_to_rise_as_least_squares_would(points: list[tuple[float, int]]) -> None:
    curve = rising((2.0**place, seconds, weight) for place, (seconds, weight) in enumerate(points))
    values = [seconds for _, seconds in curve]
    assert values == sorted(values) and len(curve) <= len(points)
    # the min-max formula of isotonic regression gives the same values
    prefix = [(0.0, 0)]
    for seconds, weight in points:
        prefix.append((prefix[-1][0] + seconds * weight, prefix[-1][1] + weight))

    def mean(a: int, b: int) -> float:
        return (prefix[b][0] - prefix[a][0]) / (prefix[b][1] - prefix[a][1])

    count = len(points)
    fitted = [max(min(mean(a, b) for b in range(i + 1, count + 1)) for a in range(i + 1)) for i in range(count)]
    assert {round(v, 6) for v in fitted} == {round(v, 6) for v in values}


def test_long_replies_cost_what_ahead_cannot_win_back_and_cutting_them_does() -> None:
    """The trial of docs/results/plan.md, smaller."""
    random, mu = Random("trial"), math.log(200) - 0.7**2 / 2
    groups = [group(*(min(1600, 1 + int(random.lognormvariate(mu, 0.7))) for _ in range(8))) for _ in range(512)]
    trial = job(*groups, prompts=32, speed=Speed(((1, 0.0101), (1000, 0.11))), learning=Learning(5 / (32 * 8 * 200)))
    base = run(trial, 12, engines=8).steps_per_hour
    one, two, four = (run(trial, 24, engines=8, async_steps=ahead).steps_per_hour / base for ahead in (1, 2, 4))
    assert 1.3 < one < two and four == pytest.approx(two, rel=0.05)
    clock = run(trial, 24, engines=8, async_steps=4, clock=True).steps_per_hour / base
    parts = run(trial, 24, engines=8, async_steps=2, tokens=200).steps_per_hour / base
    assert clock > 1.15 * two and parts == pytest.approx(clock, rel=0.1)


# -- from files --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pilot")
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b)} for a in range(5) for b in range(5)]
    small: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "context": 32, "tokenizer": "characters"}
    quick: dict[str, Any] = {"threads": 1, "quiet": True}
    start = posttrain.sft(rows, out=str(folder / "sft"), steps=5, rows=8, **small, **quick)
    options: dict[str, Any] = {"prompts": 4, "group": 4, "max_tokens": 12, "env_workers": 0, "lr": 1e-3}
    posttrain.rl(rows, lambda task, reply: len(set(reply)) / 9, str(start.path), out=str(folder / "rl"), steps=6,
                 **options, **quick)  # fmt: skip
    return folder


def test_what_a_step_records_of_its_time_adds_up(pilot: Path) -> None:
    for row in read_timing(pilot / "rl"):
        rollouts = read_rollouts(pilot / "rl", row["step"])
        sampled = sum(turn["length"] for r in rollouts for turn in r["turns"] if turn["role"] == "sampled")
        decoded = sum(value for name, value in row.items() if name.startswith("decoding/") and name.endswith("/rows"))
        assert decoded + len(rollouts) == sampled, "the first token of each comes with its prompt"
        prompts = {r["group"]: r["turns"][0]["length"] for r in rollouts}
        assert row["reading/tokens"] == sum(prompts.values())
        assert row["update/tokens"] > 0
        spent = sum(value for name, value in row.items() if name.endswith("/seconds") and "turn" not in name)
        assert spent <= row["seconds/play"] <= row["seconds/rollout"]
        parts = sum(row[f"seconds/{name}"] for name in ("load", "play", "credit"))
        assert 0 < parts <= row["seconds/rollout"]


def test_a_job_is_what_the_files_say(pilot: Path) -> None:
    read = read_pilot(str(pilot / "rl"))
    assert read.steps == 5 and read.size == (4, 4) and read.job.prompts == 4 and len(read.groups) == 20
    rows = [row for row in read_timing(pilot / "rl") if row["step"] > 1]
    first = read_rollouts(pilot / "rl", 2)[0]
    assert read.groups[0].episodes[0].sampled == first["turns"][1]["length"] - 1
    total = {name: sum(row.get(name, 0) for row in rows) for name in {name for row in rows for name in row}}
    tokens = sum(g.tokens for g in read.groups)
    assert read.update_tokens == pytest.approx(tokens / (total["seconds/update"] + total["seconds/credit"]))
    assert read.job.learning.step == pytest.approx(total["seconds/between"] / 5)
    assert read.job.group(7) is read.job.group(7) and read_pilot(str(pilot / "rl")).job.group(7) == read.job.group(7)
    larger = read_pilot(str(pilot / "rl"), prompts=3, group=9, weight_sync=1.5)
    assert larger.job.prompts == 3 and larger.job.speed.load == 1.5
    assert {len(larger.job.group(n).episodes) for n in range(9)} == {9}
    drawn = [larger.job.group(n) for n in range(300)]
    assert sum(g.tokens for g in drawn) / 300 == pytest.approx(
        sum(g.tokens for g in read.groups) / 20 * 9 / 4, rel=0.15
    )


def test_the_command_fits_a_terminal_and_gives_data(pilot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(pilot / "rl"), "--gpus", "6", "--tokens-per-step", "4", "--steps", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    wide = [line for line in lines if len(line) > 80 and str(pilot) not in line and not line.startswith("command")]
    assert len(lines) <= 24 and not wide, wide
    assert any(line.startswith("best of 6 GPUs: ") for line in lines)
    (further,) = (
        line.partition("was started, with ")[2] for line in lines if line.startswith("command   as the pilot")
    )
    read = _training_of(["rl", *shlex.split(further)], "plan", checked=False)
    assert read.processes * (1 if read.replicas else 6) + read.replicas == (6 if read.replicas else 36)
    assert (
        main(["plan", str(pilot / "rl"), "--engines", "1", "3", "--async-steps", "0", "1", "--steps", "12", "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert [(s["engines"], s["async_steps"]) for s in told["settings"]] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert told["best"] in told["settings"] and sum(told["best"]["engine_time"].values()) == pytest.approx(1, abs=0.02)
    assert told["best"]["steps_per_hour"] == pytest.approx(max(s["steps_per_hour"] for s in told["settings"]), rel=0.01)


@pytest.mark.parametrize(("measured", "option"), [(5, "--steps 21"), (30, "--steps 48")])
def test_a_simulation_far_from_the_pilots_own_speed_names_the_option_to_set(
    pilot: Path, measured: int, option: str
) -> None:
    read = read_pilot(str(pilot / "rl"))
    alone = Simulation(read.job, PlanSetting(1, shared=True), 12).run()
    near = replace(read, steps=measured, resized=False, steps_per_hour=alone.steps_per_hour * 1.05)
    assert not any("apart" in line for line in _about(near, alone, 12))
    *_, told, advice = _about(replace(near, steps_per_hour=alone.steps_per_hour * 1.5), alone, 12)
    assert "more than 10% apart" in told and option in advice and max(len(told), len(advice)) <= 80
    assert not any("apart" in line for line in _about(replace(near, resized=True), alone, 12))


def test_real_runs_of_other_sizes_are_predicted_within_a_fifth() -> None:
    """Recorded by benchmarks/plan/predict.py: a pilot without its texts, and what runs of other sizes then really did."""
    made = json.loads((RECORDED / "made.json").read_text())
    assert len(made) == 3
    for size, steps_per_hour in made.items():
        prompts, group = map(int, size.split("x"))
        job = read_pilot(str(RECORDED / "8x8"), prompts, group).job
        simulated = Simulation(job, PlanSetting(1, shared=True), 24).run().steps_per_hour
        assert simulated == pytest.approx(steps_per_hour, rel=0.2), size


def damaged(pilot: Path, tmp_path: Path, what: str) -> Path:
    """A copy of the pilot's files that plan reads, with something wrong."""
    copy = tmp_path / "copy"
    (copy / "rollouts").mkdir(parents=True)
    run, timing = json.loads((pilot / "rl" / "run.json").read_text()), (pilot / "rl" / "timing.jsonl").read_text()
    rows = [json.loads(line) for line in timing.splitlines()]
    if what == "sft":
        run["verb"] = "sft"
    if what == "processes":
        run["config"]["processes"] = 2
    if what == "short":
        rows = rows[:3]
    if what == "old":
        rows = [{"step": row["step"], "seconds/rollout": 1.0, "seconds/update": 1.0} for row in rows]
    if what == "engine":
        rows = [{name: v for name, v in row.items() if not name.startswith("decoding/")} for row in rows]
    if what != "rollouts":
        for path in (pilot / "rl" / "rollouts").iterdir():
            (copy / "rollouts" / path.name).write_bytes(path.read_bytes())
    (copy / "run.json").write_text(json.dumps(run))
    (copy / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return copy


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("sft", "is a run of posttrain sft, which samples nothing"),
        ("processes", "ran with --processes 2: a pilot has one process"),
        ("short", "is too short for a pilot, with 3 timed steps: run 4 or more"),
        ("old", "lacks the times within a step"),
        ("engine", "has no seconds of decoding"),
        ("rollouts", "lacks the rollouts of the steps"),
    ],
)
def test_what_is_no_pilot_is_told_in_one_line(
    pilot: Path, tmp_path: Path, what: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(damaged(pilot, tmp_path, what))]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_options_that_say_nothing_are_refused(pilot: Path, tmp_path: Path) -> None:
    for words, said in (
        (["--gpus", "4", "--engines", "2"], "--gpus tries every split"),
        (["--engines", "0"], "--engines 0 must be from 1"),
        (["--async-steps", "-1"], "--async-steps -1 must be from 0"),
        (["--steps", "2"], "--steps"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            lines: list[str] = []
            patch.setattr("builtins.print", lambda *told, lines=lines, **how: lines.extend(map(str, told)))
            assert main(["plan", str(pilot / "rl"), *words]) == 2
        assert said in " ".join(lines)
    with pytest.raises(UserError, match="holds no run"):
        read_pilot(str(tmp_path))


def run_options(**changed: Any) -> RL:
    own: dict[str, Any] = {"tasks": "my rows.jsonl", "env": "my.py:reward", "model": "runs/sft", "out": "runs/pilot"}
    return RL(**{**own, **changed})


def read_back(command: str) -> Any:
    """The options that the command line reads from a printed command."""
    name, *words = shlex.split(command)
    assert name == "posttrain"
    return _training_of(words, "plan", checked=False)


def test_the_printed_command_is_that_of_the_split_with_the_other_options_of_the_pilot(pilot: Path) -> None:
    of = partial(replace, read_pilot(str(pilot / "rl")))
    own = run_options(prompts=7, settings={"surrogate.high": "0.28"}, overwrite=True, steps=20)
    seven = of(options=own, size=(7, 4))
    split = PlanSetting(5, 3, async_steps=2, tokens=64)
    expected = {
        **{"prompts": 7, "group": 4, "out": "runs/pilot-8", "overwrite": False, "processes": 3, "replicas": 5},
        **{"async_steps": 2, "tokens_per_step": 64},
    }
    gpus = {"learner_devices": (0, 1, 2), "engine_devices": (3, 4, 5, 6, 7)}
    assert read_back(command_of(seven, split, Plan(gpus=8))) == replace(own, **expected, **gpus)
    assert read_back(command_of(seven, split, Plan())) == replace(own, **expected)
    on_cpu = of(options=replace(own, device="cpu"), size=(7, 4))
    assert read_back(command_of(on_cpu, split, Plan(gpus=8))) == replace(own, device="cpu", **expected)
    turns = read_back(command_of(seven, PlanSetting(4, 4, shared=True), Plan(gpus=4)))
    assert turns == replace(own, group=4, out="runs/pilot-4", overwrite=False, processes=4)


@pytest.mark.parametrize(
    "options",
    [
        {"tasks": "rows made by rows"},
        {"tasks": "9 rows in memory"},
        {"env": "reward"},
        {"chat_template_kwargs": {"a": {"b": 1}}},
    ],
)
def test_a_command_that_the_command_line_would_read_otherwise_is_not_printed(
    options: dict[str, Any], pilot: Path
) -> None:
    own = replace(read_pilot(str(pilot / "rl")), options=replace(run_options(), **options))
    told = command_of(own, PlanSetting(1, 2), Plan(gpus=3))
    assert told == "as the pilot was started, with --processes 2 --learner-devices 0 1 --replicas 1 --engine-devices 2"


def test_gpus_of_other_models_are_left_to_the_user(pilot: Path) -> None:
    own = replace(read_pilot(str(pilot / "rl")), options=run_options(role_devices={"reference": "1"}))
    assert not {"--learner-devices", "--engine-devices"} & set(command_of(own, PlanSetting(1, 1), Plan(gpus=3)).split())


@pytest.mark.parametrize(
    "options",
    [
        {"settings": {"surrogate.high": "0.28", "kl": "0.0"}, "learner_devices": (0, 2), "betas": (0.8, 0.95)},
        {"fields": {"prompt": "the question"}, "role_devices": {"reference": "1"}, "offload": ("optimizer",)},
        {"chat_template_kwargs": {"enable_thinking": False}, "quiet": True, "warmup": 3, "lora": 8},
        {
            "optimizer": "sgd",
            "optimizer_options": {"momentum": 0.95, "nesterov": True},
            "prompt_template": "-{prompt}\n",
        },
        {"mixture": {"a": {"tasks": "a.jsonl", "env": "my.py:one"}, "b": {"tasks": "b.jsonl", "env": "my.py:two"}}},
    ],
)
def test_words_of_options_are_read_as_these_options(options: dict[str, Any]) -> None:
    own = run_options(**options)
    assert read_back(shlex.join(["posttrain", "rl", *command_words(own)])) == own
