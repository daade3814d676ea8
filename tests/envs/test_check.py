"""`check` finds what would spoil a run, and finds nothing in an environment that is in order."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import recording_envs

from posttrain.core.types import Graded, Invalid, InvalidKind, Reply, SpanReward, Task, Turn, UserError
from posttrain.envs.check import TASKS, check
from posttrain.envs.trial_report import TURNS, Report

TASKS_OF_TWO: list[dict[str, Any]] = [
    {"id": "a", "prompt": "1+1=", "answer": "2"},
    {"id": "b", "prompt": "2+2=", "answer": 4},
]


def said(report: Report) -> str:
    return "\n".join(report.lines())


def test_a_sound_reward_is_in_order() -> None:
    report = check(lambda task, reply: {"correct": str(task["answer"]) == reply}, TASKS_OF_TWO)
    assert report.ok and report.lines()[-1] == "check passed"
    assert [case.kind for case in report.cases[:5]] == ["answer", "empty", "junk", "very long", "unicode"]
    assert report.rewards == [1, 0, 0, 0, 0] * 2
    assert "'1+1='" in said(report) and "reward 1 (correct 1)" in said(report)


def test_a_column_that_a_reward_misses_is_named_with_those_that_there_are() -> None:
    report = check(lambda task, reply: task["solution"] == reply, TASKS_OF_TWO)
    assert "the row has no 'solution', but 'prompt', 'answer': --fields.solution COLUMN renames one" in report.lines()
    assert said(report).count("KeyError: 'solution'") == 2 and "invalid: as above" in said(report)


def test_a_column_with_a_typo_is_answered_with_the_one_that_is_meant() -> None:
    report = check(lambda task, reply: task["anwser"] == reply, TASKS_OF_TWO)
    assert "the row has no 'anwser'; did you mean 'answer'?" in report.lines()


LABELS = "SUCCESS = 1.0\n\n\ndef reward(task, reply):\n    right = float(reply == task['label'])\n"


def test_a_check_without_any_right_reply_is_undecided_and_names_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "labels.py"
    file.write_text(f"{LABELS}    return right + 0.1 * (len(reply) < 20)\n")
    row = {"id": "a", "prompt": "lost", "label": "refund"}
    report = check(f"{file}:reward", [row])
    assert report.ok and report.lines()[-1] == "undecided: no error, and no right reply was tried"
    assert "no reply reached SUCCESS = 1: no column" in said(report) and "--fields.response label" in said(report)
    assert "an empty reply earns the most (0.1)" in said(report)
    known = check(f"{file}:reward", [{**row, "response": "refund"}])
    assert known.lines()[-1] == "check passed" and "SUCCESS" not in said(known)
    assert "an empty reply" not in said(known)


def test_what_an_environment_notes_is_shown() -> None:
    report = check(recording_envs.scored, [{"id": "a", "prompt": "Q", "answer": "xyz"}])
    assert sum('noted letters 3, first "x"' in line for line in report.lines()) == 1


def test_a_reply_of_check_that_a_model_cannot_read_whole_is_no_fault_of_the_environment() -> None:
    """The very long reply is longer than any of training; the task's own replies are not excused."""

    def read(task: Task, reply: str) -> float | Invalid:
        kind = InvalidKind.TOO_LONG
        return Invalid(f"{len(reply)} tokens; it reads 1 to 96", kind) if len(reply) > 96 else float(reply == "2")

    report = check(read, [{"id": "a", "prompt": "1+1=", "answer": "2"}])
    assert report.ok and report.lines()[-1] == "check passed" and not report.invalid
    assert "the very long reply was not scored (56000 tokens; it reads 1 to 96)" in said(report)
    own = check(read, [{"id": "a", "prompt": "1+1=", "answer": "2", "response": "so " * 99}])
    assert not own.ok and [case.kind for case in own.invalid] == ["response"]


def test_a_reward_that_is_always_the_same_is_found() -> None:
    report = check(lambda task, reply: 0.5, [{**task, "response": "so"} for task in TASKS_OF_TWO])
    assert not report.ok and report.lines()[-1] == "check failed"
    assert "the reward is the same for every reply (0.5): nothing can be learned from it" in said(report)


def test_a_reward_that_differs_between_tasks_only_is_found() -> None:
    report = check(lambda task, reply: float(task["answer"]), [{**task, "response": "so"} for task in TASKS_OF_TWO])
    assert not report.ok and "the same for every reply:" in said(report)


def test_invalid_cases_are_counted_with_the_reason() -> None:
    report = check(lambda task, reply: 1 / len(reply), TASKS_OF_TWO[:1])
    assert not report.ok and len(report.invalid) == 1
    assert "invalid on 1 of 5: ZeroDivisionError" in said(report)


def test_a_hang_is_found_and_the_rest_is_still_checked() -> None:
    def reward(task: Any, reply: str) -> float:
        while not reply:
            time.sleep(0.01)
        return float(len(reply))

    report = check(reward, TASKS_OF_TWO[:1], seconds=0.5)
    assert [case.kind for case in report.invalid] == ["empty"] and len(report.rewards) == 4
    assert "did not return within 0.5 s" in said(report)


def test_a_reward_that_changes_its_mind_is_found() -> None:
    seen: list[str] = []

    def reward(task: Any, reply: str) -> float:
        seen.append(reply)
        return float(len(seen))

    report = check(reward, TASKS_OF_TWO[:1])
    assert not report.ok and "two calls disagree on 5 of 5" in said(report)


def test_of_further_tasks_only_what_is_wrong_is_shown_and_all_of_it_if_asked() -> None:
    def reward(task: Any, reply: str) -> float:
        if task["id"] == "b" and not reply:
            raise ValueError("odd")
        return float(str(task["answer"]) == reply)

    tasks = [{**task, "prompt": "long " * 40} for task in [*TASKS_OF_TWO, {"id": "c", "prompt": "", "answer": 3}]]
    report = check(reward, tasks)
    short, whole = report.lines(), report.lines(verbose=True)
    cut = [line for line in short if "invalid" not in line]
    assert max(map(len, cut)) <= 80 and "(9 more cases: show them with --verbose)" in short
    assert [line for line in short if line.startswith("task b")] != [] and "  empty" in "\n".join(short).split(
        "task b"
    )[1]
    assert "task c: " + repr("long " * 40) in "\n".join(whole) and sum(" junk " in line for line in whole) == 3


def test_slow_calls_are_timed() -> None:
    def reward(task: Any, reply: str) -> float:
        time.sleep(0.05)
        return float(len(reply))

    report = check(reward, TASKS_OF_TWO[:1], ["a", "bb"])
    assert all(case.seconds >= 0.05 for case in report.cases)
    assert report.ok and "slowest call" in said(report)


def test_an_environment_of_many_turns_hears_the_reply_on_each_and_need_not_end() -> None:
    def env(task: Any) -> Generator[str, Reply, float]:
        reply = yield "start"
        for turn in range(3):
            if reply == "stop":
                return 1.0
            reply = yield f"turn {turn}"
        while reply == "on":
            reply = yield "still here"
        return 0.0

    report = check(env, TASKS_OF_TWO[:1], ["stop", "other", "on"])
    stop, other, on = report.cases
    assert stop.shown == ("start",) and other.shown == ("start", "turn 0", "turn 1", "turn 2")
    assert on.result is None and report.rewards == [1.0, 0.0] and report.ok
    assert f"still asking after {TURNS} turns on 1 of 3" in said(report)


def test_only_the_first_tasks_are_played() -> None:
    report = check(lambda task, reply: float(len(reply)), TASKS_OF_TWO * 10, ["a", "bb"])
    assert len(report.cases) == 2 * TASKS


def test_the_users_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tasks"):
        check("arithmetic", [])
    with pytest.raises(UserError, match="there is no file"):
        check(f"{tmp_path}/my.py:reward", TASKS_OF_TWO)
    with pytest.raises(UserError, match='needs "prompt"'):
        check(lambda task, reply: 1.0, [{"id": "a"}])


@pytest.mark.parametrize("column", ["solution", "answer"])
def test_without_a_whole_right_reply_equal_rewards_are_told_and_not_judged(column: str) -> None:
    report = check(lambda task, reply: float(reply == f"So: {task[column]}"), [{"prompt": "1+1=", column: "2"}])
    assert report.ok and report.lines()[-1].startswith("undecided: ")
    which = "your answer column" if column == "answer" else "no column of yours"
    assert f"the same for every reply (0): {which} is {'not ' * (column == 'answer')}a full reply" in said(report)
    named = "solution" if column == "solution" else "COLUMN"
    assert f"--fields.response {named}" in said(report) and "--replies FILE" in said(report)


def test_several_turns_without_a_right_episode_ask_for_one_with_an_example() -> None:
    def guess(task: Task) -> Generator[str, str, float]:
        for _ in range(2):
            reply = yield "Guess: "
        return float(reply == "a word that nothing tried has")

    report = check(guess, [{"prompt": "", "limit": 4}])
    assert report.lines()[-1].startswith("undecided: ")
    assert 'one for each turn: {..., "replies": ["first reply", "second reply"]}' in said(report)
    given = [{"prompt": "", "replies": ["?", "a word that nothing tried has"]}]
    assert check(guess, given).lines()[-1] == "check passed"


def test_an_answer_that_is_no_whole_reply_is_tried_in_the_forms_that_scorers_look_for() -> None:
    report = check(lambda task, reply: float(f"\\boxed{{{task['answer']}}}" in reply), TASKS_OF_TWO)
    assert report.ok and report.lines()[-1] == "check passed"
    assert "your answer column is not a full reply: '\\\\boxed{2}' earns 1 and '2' 0" in said(report)
    assert [case.task for case in report.cases] == ["a"] * 9 + ["b"] * 9
    assert len(check(lambda task, reply: float(reply == str(task["answer"])), TASKS_OF_TWO).cases) == 10


def test_of_messages_lists_show_what_the_user_said_last() -> None:
    def asked(task: Any) -> Generator[Turn, Reply, float]:
        said = [{"role": "system", "content": "be brief " * 30}, {"role": "user", "content": task["prompt"]}]
        reply = yield Turn(messages=said)
        return float(reply == str(task["answer"]))

    lines = check(asked, TASKS_OF_TWO).lines()
    assert next(line for line in lines if line.startswith("task ")) == "task a: '1+1='"
    assert any(line.startswith("task b: '2+2='") for line in lines)


def test_of_the_users_own_replies_it_says_so() -> None:
    report = check(lambda task, reply: 0.0, TASKS_OF_TWO, ["5", "6"])
    assert report.ok and "the same for every one of these replies (0)" in said(report)


def test_step_rewards_are_part_of_the_total_and_no_zero_is_negative() -> None:
    def env(task: Any) -> Generator[Any, Reply, Graded]:
        reply = yield "start"
        reply = yield Turn(text="more", reward=0.25)
        return Graded({"speed": -0.0}, [SpanReward(end=1, reward=0.5)] if reply else [])

    report = check(env, TASKS_OF_TWO[:1], ["x", ""])
    assert report.rewards == [0.75, 0.25]
    assert "reward 0.75 (speed 0, steps 0.75)" in said(report)


def test_turns_that_are_not_shown_are_counted_and_what_was_expected_is_said_once() -> None:
    def env(task: Any) -> Generator[str, Reply, None]:
        for turn in range(5):
            yield f"turn {turn}"

    text = said(check(env, TASKS_OF_TWO[:1], ["a", "b"]))
    cases, verdicts = text.split("\n\n")
    assert "'turn 1'" in cases and "'turn 2'" not in cases and cases.count("... and 3 more") == 2
    assert cases.count("; expected ") == 1 and cases.count("invalid: ") == 2 and verdicts.count("; expected ") == 1
