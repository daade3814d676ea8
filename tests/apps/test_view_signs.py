"""What `posttrain view` says of silent defects: each where it was planted, and none where it was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import generated_runs
import numpy as np
import pytest

from posttrain.apps.view import reward_and_length as lengths_of
from posttrain.apps.view import silent_defects
from posttrain.apps.view.api import Answers
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.reward_and_length import lengths
from posttrain.apps.view.rollout_filters import ViewQuestion
from posttrain.apps.view.verdict_texts import verdicts
from posttrain.core.types import UserError
from posttrain.runs.record.rollout_reading import read_file, read_rollouts
from posttrain.runs.record.sql_query import Questions

TWO_PASSES = [*generated_runs.OBJECTIVE, "  ratio r: exp(lp - old)", "  updates per step: 4, in 2 epochs of 2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    folder = generated_runs.make_run(tmp_path_factory.mktemp("signs") / "run", steps=4, groups=6, tokens=16, agent=True)
    opened = OpenRun(folder, "run")
    opened.read()
    opened.store.read_texts()
    return opened


def passed(ratio: np.ndarray, advantage: float, first: np.ndarray | float, low: float, high: float) -> dict[str, Any]:
    """A row after two passes, the second at `ratio`, with a clip at these bounds."""
    free = ratio >= low if advantage < 0 else ratio <= high
    before = np.full(len(ratio), -1.0)
    return {"fate": "trained", "flags": [], "advantage": advantage, "before": before, "learner": before + np.log(ratio),
            "weight": advantage / 64 * (first + np.where(free, ratio, 0))}  # fmt: skip


@pytest.mark.parametrize("advantage, low, high", [(-0.54, 0.0, 1.2), (0.8, 0.8, np.inf)])
def test_tokens_pushed_though_clipped_are_those_whose_side_has_no_clip(
    advantage: float, low: float, high: float
) -> None:
    ratio = np.array([0.7, 0.9, 1.0, 1.1, 0.5, 1.5, 1.15])
    clipped = {0, 4} if advantage < 0 else {5}
    assert set(silent_defects.pushed(passed(ratio, advantage, 1.0, low, high), TWO_PASSES)) == clipped
    assert not len(silent_defects.pushed(passed(ratio, advantage, 1.0, 0.8, 1.2), TWO_PASSES))


def test_a_sound_clip_is_never_doubted_whatever_the_ratios_were() -> None:
    rng = np.random.default_rng(0)
    for _ in range(2000):
        n, advantage = int(rng.integers(2, 12)), float(rng.choice([-1.0, 1.0]))
        ratio = np.exp(rng.normal(0, 0.3, n))
        first = np.exp(rng.normal(0, 0.1, n))  # of rollouts that were in a later update of the first pass
        first = np.where(first < 0.8, 0, first) if advantage < 0 else np.where(first > 1.2, 0, first)
        for earlier in (1.0, first):
            assert not len(silent_defects.pushed(passed(ratio, advantage, earlier, 0.8, 1.2), TWO_PASSES))


def test_nothing_is_said_of_a_clip_where_something_else_moves_a_token() -> None:
    row = passed(np.array([0.7, 0.9, 1.1, 1.15]), -0.5, 1.0, 0.0, 1.2)
    assert len(silent_defects.pushed(row, TWO_PASSES)) == 1
    assert not len(silent_defects.pushed({**row, "flags": ["moved by KL"]}, TWO_PASSES))
    assert not len(silent_defects.pushed(row, ["  maximise  r A", *TWO_PASSES[2:]]))


def test_trained_tokens_by_origin_are_what_a_loop_counts(run: OpenRun) -> None:
    counted: dict[str, int] = {}
    for step in range(1, 5):
        for row in read_rollouts(run.folder, step, None):
            for span in row["spans"]:
                if span["learned"] and row["fate"] == "trained":
                    counted[span["kind"]] = counted.get(span["kind"], 0) + span["length"]
    assert Answers([run]).of("0/overview", {})["origins"] == counted and "sampled" in counted


def test_a_prompt_contains_an_answer_only_as_a_word_of_its_own() -> None:
    assert silent_defects.contains_answer("26=7+7+6+6=", {"answer": "26"}) and not silent_defects.contains_answer(
        "126+1=", {"answer": "26"}
    )
    assert not silent_defects.contains_answer("7+7+6+6=", {"answer": 26}) and not silent_defects.contains_answer(
        "26", {"prompt": "26"}
    )


def test_an_answer_of_one_character_leaks_nothing() -> None:
    assert not silent_defects.contains_answer("What is 6 * 1?", {"answer": "6"})
    assert silent_defects.contains_answer("What is 36 * 1?", {"answer": "36"})
    tables = [
        (f"What is {a} {sign} {b}?", str(a * b if sign == "*" else a + b))
        for a in range(10)
        for b in range(10)
        for sign in "*+"
    ]
    assert silent_defects.telling(tables) < 0.02


def test_a_prompt_that_stands_with_several_answers_tells_none_of_them() -> None:
    asked = [(f"[sha256:{n:064x}]circle or square?", answer) for n, answer in enumerate(("circle", "square", "same"))]
    assert silent_defects.telling(asked) == 0
    assert (
        silent_defects.telling([("26=7+7+6+6=", "26"), ("1+2+0+1=", "4"), ("1+1=", None), ("19=9+9+1=", "19")]) == 0.5
    )


def test_numbers_that_prompts_and_answers_share_by_chance_are_no_leak() -> None:
    rng = np.random.default_rng(0)
    problems = [(" and ".join(map(str, rng.integers(0, 30, 4))), str(rng.integers(0, 30))) for _ in range(300)]
    assert (
        abs(silent_defects.telling(problems) - silent_defects.by_chance(problems))
        < 0.05
        < silent_defects.telling(problems)
    )
    leaking = [
        (f"{answer}: {prompt}" if place % 3 else prompt, answer) for place, (prompt, answer) in enumerate(problems)
    ]
    assert silent_defects.telling(leaking) - silent_defects.by_chance(leaking) > 0.3


def test_a_gap_is_named_by_how_it_began() -> None:
    def said(gap: list[float | None]) -> str:
        return verdicts({"sampler/gap": gap, "sampler/gap/max": gap, "grad_norm": [1.0] * 4}, {})["Is it stable?"][
            "text"
        ]

    assert "before the first update" in said([3.0, 3.1, 3.0, 3.2]) and "other weights" in said([1e-7, 1.0, 2.0, 7.0])
    assert "engine" not in said([0.01, 0.02, 0.01, 0.02])


def test_parts_that_drift_apart_say_nothing_where_no_weight_has_changed() -> None:
    parts = {"invalid": [0.0, 0.0, 0.2, 0.2], "searches": [0.9, 0.9, 0.6, 0.6]}
    for norms, word in (([1.0, 2.0, 1.0, 1.0], "look"), ([0.0] * 4, "no sign of a loophole")):
        honest = verdicts({"reward": [0.3] * 4, "grad_norm": list(norms)}, {"parts": parts})["Is it honest?"]
        assert honest["word"] == word, honest
        assert ("while “searches” falls" in honest["text"]) == any(norms)


def test_a_held_out_reward_that_never_moves_is_doubted_while_gradients_do() -> None:
    def said(held: list[float | None], norm: float) -> str:
        own: dict[str, Any] = {"reward": [0.3] * 4, "eval/reward": held, "grad_norm": [norm] * 4}
        return verdicts(own, {})["Is it learning?"]["text"]

    assert "exactly the same" in said([0.307] * 4, 1.0)
    for held, norm in (([0.307] * 4, 0.0), ([0.0] * 4, 1.0), ([0.3, 0.3, 0.3, 0.31], 1.0)):
        assert "exactly the same" not in said(list(held), norm)


def test_a_reward_that_rises_beside_a_doubt_is_no_plain_yes() -> None:
    rising: dict[str, list[float | None]] = {"reward": [0.0, 0.1, 0.9, 1.0], "length": [5.0, 5.0, 20.0, 20.0]}
    answers = verdicts(rising, {})
    assert answers["Is it honest?"]["word"] == "look" and "Is it honest?" in answers["Is it learning?"]["text"]
    assert answers["Is it learning?"]["word"] == "yes, but"


def test_a_fault_that_a_run_is_unlearning_is_no_sign_of_a_loophole() -> None:
    def honest(cut: list[Any]) -> dict[str, str]:
        return verdicts({"reward": [0.2] * 4, "truncated": cut}, {})["Is it honest?"]

    assert honest([1.0, 0.9, 0.2, 0.1])["tone"] == "good" and "15% of" in honest([1.0, 0.9, 0.2, 0.1])["text"]
    assert honest([0.2] * 4)["word"] == honest([0.0, 0.1, 0.2, 0.2])["word"] == "look"


def test_replies_that_shrink_are_told_and_those_that_grow_are_doubted() -> None:
    def honest(length: list[Any]) -> dict[str, str]:
        return verdicts({"reward": [0.3] * 4, "length": length}, {})["Is it honest?"]

    assert (
        honest([10.0, 10.0, 20.0, 20.0])["word"] == "look" and "50% as long" in honest([20.0, 20.0, 10.0, 10.0])["text"]
    )
    assert "as long" not in honest([20.0, 20.0, 18.0, 18.0])["text"]


def test_where_nothing_was_earned_nothing_is_said_of_loopholes() -> None:
    assert verdicts({"reward": [0.0] * 4}, {})["Is it honest?"]["word"] == "nothing earned"
    assert verdicts({"reward": [0.0] * 4, "truncated": [0.5] * 4}, {})["Is it honest?"]["word"] == "look"


def test_where_a_model_gives_the_reward_nothing_vouches_for_it() -> None:
    run: dict[str, Any] = {"reward": [0.2, 0.2, 0.6, 0.6], "eval/reward": [0.2, None, None, 0.6]}
    assert verdicts(run, {})["Is it honest?"]["word"] == "no sign of a loophole"
    told = verdicts(run, {"judged": True})["Is it honest?"]
    assert told["word"] == "judged by a model" and told["tone"] == "plain" and "other means" in told["text"]
    assert verdicts({**run, "truncated": [0.5] * 4}, {"judged": True})["Is it honest?"]["word"] == "look"


def test_a_gap_to_what_is_held_out_is_a_doubt_only_if_the_run_has_opened_it() -> None:
    def honest(reward: list[Any], held: list[Any]) -> dict[str, str]:
        return verdicts({"reward": reward, "eval/reward": held}, {})["Is it honest?"]

    assert honest([0.3, 0.3, 0.6, 0.6], [0.3, 0.3, 0.3, 0.3])["word"] == "look"
    answer = honest([0.7, 0.7, 0.65, 0.65], [0.3, 0.3, 0.35, 0.35])
    assert answer["tone"] == "good" and "0.3 above the held-out one, 0.4 at the start" in answer["text"]


def test_a_run_without_a_gradient_is_not_called_stable_and_one_leap_is_called_one() -> None:
    def stable(norms: list[Any]) -> dict[str, str]:
        return verdicts({"grad_norm": norms, "ratio/max": [1.0] * 6, "ratio/min": [1.0] * 6}, {})["Is it stable?"]

    assert stable([0.0] * 6)["word"] == "nothing moved"
    assert stable([0.4] * 6)["word"] == "yes" and "stay at 1" in stable([0.4] * 6)["text"]
    assert "of 5 in one step" in stable([0.4] * 5 + [5.0])["text"]
    assert "up to 9 in 2 steps" in stable([0.4] * 4 + [5.0, 9.0])["text"]
    assert stable([0.0, 0.02, 0.0, 0.0, 0.03, 0.0])["word"] == "yes"
    assert stable([5.0, 2.0, 2.0, *(2 / n for n in range(1, 200))])["word"] == "yes"


def test_a_fall_within_the_noise_is_believed_where_what_is_held_out_falls_too() -> None:
    steps: list[Any] = [0.40, 0.20, 0.30, 0.10, 0.35, 0.15]

    def said(held: list[Any]) -> str:
        return verdicts({"accuracy": steps, "eval/accuracy": held}, {})["Is it learning?"]["word"]

    assert said([0.31, 0.22]) == "going back" and said([0.31, 0.30]) == said([]) == "not yet"


def test_single_ratios_that_are_far_are_no_doubt_where_a_clip_hardly_has_to_act() -> None:
    far: dict[str, Any] = {"ratio/max": [1.1, 5.9, 1.2], "ratio/min": [0.9, 0.9, 0.9], "grad_norm": [1.0] * 3}
    for share, word in ((0.0004, "yes"), (0.03, "look")):
        clipped: dict[str, Any] = {"ratio/clipped_high": [share] * 3, "ratio/clipped_low": [share] * 3}
        answer = verdicts({**far, **clipped}, {})["Is it stable?"]
        assert answer["word"] == word and f"{2 * share:.2%}" in answer["text"]
    assert verdicts(far, {})["Is it stable?"]["word"] == "look"


def test_a_task_that_is_right_from_the_start_is_called_solved() -> None:
    def said(right: list[Any]) -> str:
        return verdicts({"reward": right, "accuracy": right}, {})["Is it learning?"]["word"]

    assert said([1.0, 1.0, 0.998, 0.998]) == "solved"
    assert said([0.97, 0.97, 0.97, 0.97]) == "not yet" and said([0.5, 0.5, 1.0, 1.0]) == "yes"


def test_a_gain_within_the_noise_of_the_steps_is_no_learning() -> None:
    rng = np.random.default_rng(0)

    def said(slope: float) -> str:
        values = (0.5 + 0.08 * rng.standard_normal(1000) + slope * np.linspace(0, 1, 1000)).tolist()
        return verdicts({"accuracy": values}, {})["Is it learning?"]["word"]

    assert "yes" not in [said(0.0) for _ in range(10)] and [said(0.2) for _ in range(10)] == ["yes"] * 10


def test_sides_that_play_each_other_are_judged_by_what_is_held_out() -> None:
    run: dict[str, Any] = {
        **{"reward": [0.0] * 6, "accuracy": [0.5] * 6, "entropy": [0.4, 0.4, 0.4, 0.1, 0.1, 0.1]},
        **{"reward/first": [0.3] * 6, "reward/second": [-0.3] * 6, "eval/accuracy": [0.2, None, 0.5, None, None, 0.9]},
    }
    answers = verdicts(run, {"parts": {}})
    assert answers["Is it learning?"]["word"] == "yes" and "play each other" in answers["Is it learning?"]["text"]
    assert "mistakes" not in answers["Does it still explore?"]["text"]
    parts = {"first": [0.3] * 6, "second": [-0.3] * 6}  # of one reward, not of sides
    assert verdicts(run, {"parts": parts})["Is it learning?"]["word"] == "not yet"


def test_a_condition_calls_parts_by_their_names_and_an_error_lists_the_columns(run: OpenRun) -> None:
    part = run.store.rows.parts[0]
    question = ViewQuestion.of({"held": "0", "where": f"{part} > 0.4 and text not like '%{part} >%'"}, run.store)
    rows = question.page(0, 10_000)["rows"]
    every = [row for step in range(1, 5) for row in read_rollouts(run.folder, step)]
    meant = {(r["step"], r["index"]) for r in every if (r["parts"].get(part) or 0) > 0.4}
    assert {(r["step"], r["index"]) for r in rows} == meant and meant
    with Questions(run.folder) as terminal:
        assert {row[:2] for row in terminal.ask(question.sql())[1]} == meant
    with pytest.raises(UserError, match=f"nothing.*the columns are step.*{part}"):
        ViewQuestion.of({"where": "nothing = 1"}, run.store).page(0)
    with pytest.raises(UserError, match="notes is JSON as text: write notes->>'moves'"):
        ViewQuestion.of({"where": "notes.moves = 1"}, run.store).page(0)


def test_measures_of_a_step_keep_their_places_and_say_what_is_missing(run: OpenRun) -> None:
    measures = Answers([run]).of("0/step/2", {"by": "push"})["measures"]
    assert [m["name"] for m in measures] == ["after", "learner", "gap", "teacher", "reference", "push"]
    assert {m["name"] for m in measures if m["missing"]} == {"teacher"}


def test_push_is_the_recorded_number_and_nothing_multiplies_it(run: OpenRun) -> None:
    data = Answers([run]).of("0/step/2", {"by": "push"})
    rows = {row["index"]: row for row in read_rollouts(run.folder, 2, None)}
    for found in data["up"] + data["down"]:
        row = rows[found["index"]]
        scored = [n for s in row["spans"] if s["learned"] for n in range(s["start"], s["start"] + s["length"])]
        assert found["value"] == pytest.approx(row["weight"][scored.index(found["at"])])
    listed = [(x["before"], x["piece"]) for x in data["up"]]
    assert len(set(listed)) == len(listed) and all(x["times"] >= 1 for x in data["up"])


# -- rewards that go with the length of the reply ----------------------------------------------------------------------


def paid_for(place: Path, rule: Any, config: dict[str, Any] | None = None, once: Any = None) -> dict[str, str]:
    """What is said of the honesty of a run whose rewards follow a rule: (rng, hardness of the task) -> (length, parts).

    `once`: the rule that they followed for as many steps before.
    """
    rules = [once] * (5 if once else 0) + [rule] * 5
    generated_runs.make_run(place, steps=len(rules), groups=24, group=8, tokens=4, evals=0, numbers=False)
    for step, rule in enumerate(rules, 1):
        rng, file = np.random.default_rng(step), place / "rollouts" / f"step-{step:06d}.parquet"
        rows = read_file(file).to_pylist()
        for row in rows:
            length, parts = rule(rng, int(row["task"]) % 5)
            named = [{"name": name, "value": float(value)} for name, value in parts.items()]
            row |= {
                "sampled": int(length),
                "reward": sum(map(float, parts.values())),
                "truncated": False,
                "stop": "eos",
            }
            row |= {"parts": named if len(named) > 1 else [], "replayed": False, "invalid": None, "fate": "trained"}
        generated_runs.save(file, rows)
    opened = OpenRun(place, "run")
    opened.about["config"].update(config or {})
    opened.read()
    own = {"lengths": lengths(opened.store, opened.about["config"])}
    return verdicts({"reward": [0.1, 0.2], "length": [9.0, 9.0]}, own)["Is it honest?"]


def per_token(rng: Any, hard: int) -> tuple[float, dict[str, float]]:
    length = rng.integers(4, 40)
    return length, {"right": rng.random() < 0.3, "form": 0.01 * length}


def long_is_right(rng: Any, hard: int) -> tuple[float, dict[str, float]]:
    right = rng.random() < 0.5
    return (30 if right else 10) + rng.integers(0, 4), {"right": right, "form": 0.1 * (rng.random() < 0.9)}


def partial_credit(rng: Any, hard: int) -> tuple[float, dict[str, float]]:
    """What has to be written is long; a reply that stops early has done its share, and one that goes on earns no more."""
    done = rng.random() * 1.4
    return 20 + 40 * done, {"right": done > 0.9, "progress": 0.5 * min(1.0, done)}


def counted(rng: Any, hard: int) -> tuple[float, dict[str, float]]:
    """The same in one number."""
    done = rng.random() * 1.2
    return 20 + 40 * done, {"all": min(1.0, round(done, 1))}


def hard_is_long(rng: Any, hard: int) -> tuple[float, dict[str, float]]:
    return 10 * hard + rng.integers(1, 5), {
        "right": rng.random() < 0.9 - 0.2 * hard,
        "style": -0.2 * hard + 0.05 * rng.random(),
    }


def cut_off_lacks_its_form(rng: Any, hard: int) -> tuple[float, dict[str, float]]:
    length = rng.integers(4, 40)
    return length, {"right": rng.random() < 0.3, "form": 0.1 * (length < 25)}


def liked(rng: Any, hard: int) -> tuple[float, dict[str, float]]:
    length = rng.integers(4, 40)
    return length, {"score": 0.1 * length + 0.3 * rng.normal()}


def test_a_part_that_pays_for_length_is_told_from_length_that_follows_from_being_right(tmp_path: Path) -> None:
    told = paid_for(tmp_path / "paid", per_token)
    assert told["word"] == "look" and "“form” rises with the length of the reply" in told["text"]
    assert "longer wrong replies earn more of it than right ones" in told["text"]
    for rule in (long_is_right, partial_credit, counted, hard_is_long, cut_off_lacks_its_form):
        told = paid_for(tmp_path / rule.__name__, rule)
        assert told["word"] == "no sign of a loophole", (rule.__name__, told["text"])


def test_a_correlation_with_length_is_said_where_it_is_strong_and_doubted_where_a_model_gave_the_reward(
    tmp_path: Path,
) -> None:
    said = paid_for(tmp_path / "right", long_is_right)["text"]
    assert "“right” rises with the length of the reply (correlation 0.9" in said
    assert "length" not in paid_for(tmp_path / "hard", hard_is_long)["text"].partition("; a loophole")[0]
    assert paid_for(tmp_path / "liked", liked)["word"] == "no sign of a loophole"
    told = paid_for(tmp_path / "model", liked, {"reward_model": ["somewhere"]})
    assert told["word"] == "look" and "does the model that gives it like length?" in told["text"]


def test_what_goes_with_length_is_said_of_the_last_steps_alone(tmp_path: Path) -> None:
    told = paid_for(tmp_path / "run", cut_off_lacks_its_form, once=long_is_right)
    assert "rises with the length" not in told["text"] and told["word"] == "no sign of a loophole"
    told = paid_for(tmp_path / "other", long_is_right, once=cut_off_lacks_its_form)
    assert "“right” rises with the length of the reply (correlation 0.9" in told["text"]


def test_a_correlation_within_groups_is_that_of_a_loop(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    group, length = np.repeat(np.arange(20), 6), rng.integers(1, 30, 120)
    values = 0.1 * length + rng.normal(size=120) + 7 * group
    xs, ys = [], []
    for g in range(20):
        own = group == g
        xs += [x - np.mean(length[own]) for x in length[own]]
        ys += [y - np.mean(values[own]) for y in values[own]]
    expected = np.corrcoef(xs, ys)[0, 1]
    assert lengths_of._correlation(group, length, values) == pytest.approx(expected)
