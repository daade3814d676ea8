"""What an environment asks of a service comes back to it: over workers, lost ones too, in any order, from the journal."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from environments import careful, scored
from episodes import episodes, said

from posttrain.core.protocols import Service
from posttrain.core.rollouts import Outcome, Rollout
from posttrain.core.types import Ask, Invalid, InvalidKind, Reasoned, Reply, Sampling, Task, Turn, UserError
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.envs.check import check
from posttrain.envs.play.answer_journal import ANSWERS, AnswerJournal
from posttrain.envs.play.env_outputs import DEEPEST, LONGEST_TEXT, Done, read_ask
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.player import MOST_ASKS, Player
from posttrain.envs.play.service_client import Services
from posttrain.envs.play.worker_protocol import Garbled, read_answer, write_answer
from posttrain.envs.score_replies import compare
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import rows_of
from posttrain.runs.record.rollout_tables import rollouts_table
from posttrain.training.sources.rollout_state import restored, stored


class Lengths:
    """A service that answers how long a text is, and nothing to one that says "none"; `later`: polls until it does."""

    identity = description = "lengths"

    def __init__(self, later: int = 0, backward: bool = False) -> None:
        self.asked: list[Any] = []
        self._waiting: list[list[Any]] = []
        self._later, self._backward = later, backward

    def submit(self, id: int, content: Any) -> None:
        self.asked.append(content)
        self._waiting.append([id, content, self._later * (1 + len(self.asked) % 3)])

    def poll(self) -> list[tuple[int, Any]]:
        for one in self._waiting:
            one[2] -= 1
        due = [one for one in self._waiting if one[2] < 0]
        self._waiting = [one for one in self._waiting if one[2] >= 0]
        answers = [
            (id, Invalid("no answer", InvalidKind.UNANSWERED) if content == "none" else len(content))
            for id, content, _ in due
        ]
        return answers[::-1] if self._backward else answers

    def example(self, content: Any) -> Any:
        return 1

    def counts(self) -> dict[str, float]:
        return {"asked": float(len(self.asked))}

    def close(self) -> None:
        self._waiting.clear()


_proof: type[Service] = Lengths


def played(env: Any, tokenizer: Tokenizer, service: Service, count: int = 12, workers: int = 0) -> list[Rollout]:
    engine = LocalEngine(tiny(tokenizer, context=256), tokenizer, slots=5)
    with EnvPool(env, workers) as pool:
        player = Player(pool, engine, tokenizer, Sampling(max_tokens=9), 256, services=Services({"lengths": service}))
        return player.play(episodes(count))


@pytest.mark.parametrize("workers", [0, 2])
def test_each_episode_gets_the_answers_to_its_own_questions(tokenizer: Tokenizer, workers: int) -> None:
    for rollout in played(scored, tokenizer, Lengths(), workers=workers):
        replies = [turn.text for turn in rollout.turns if turn.kind == "sampled"]
        assert rollout.rewards == {"first": len(replies[0]), "second": len(replies[1])}
        assert rollout.answers == [("lengths", len(replies[0])), ("lengths", len(replies[1]))]
        assert f"<{len(replies[0])}>" == rollout.turns[2].text


@pytest.mark.parametrize("invariant", [True, False], ids=["as they come", "in order"])
def test_no_bit_of_a_rollout_depends_on_when_and_in_which_order_services_answer(
    tokenizer: Tokenizer, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(service: Service, workers: int) -> Any:
        engine = LocalEngine(tiny(tokenizer, context=256), tokenizer, slots=5)
        if not invariant:
            engine.batch_invariant = False
        elif not engine.batch_invariant:
            pytest.skip("needs a C compiler")
        with EnvPool(scored, workers) as pool:
            services = Services({"lengths": service})
            return said(
                Player(pool, engine, tokenizer, Sampling(max_tokens=9), 256, services=services).play(episodes(12))
            )

    expected = outcome(Lengths(), 0)
    for service, workers in ((Lengths(later=3), 0), (Lengths(backward=True), 0), (Lengths(later=5, backward=True), 2)):
        assert outcome(service, workers) == expected


def test_sampling_goes_on_while_a_service_works(tokenizer: Tokenizer) -> None:
    """One question is answered only after all other replies have been sampled: with a barrier it would wait for ever."""

    class Last(Lengths):
        def poll(self) -> list[tuple[int, Any]]:
            held = [one for one in self._waiting if one[1] == "first" and len(ended) < 8]
            self._waiting = [one for one in self._waiting if one not in held]
            answers = super().poll()
            self._waiting += held
            return answers

    ended: list[str] = []

    def env(task: Task) -> Generator[Turn | str | Ask, Any, Any]:
        reply = yield task["prompt"]
        first = not began
        began.append(task["id"])
        yield Ask("lengths", "first" if first else reply)
        for _ in range(3):
            yield "more"
        ended.append(task["id"])
        return 0.0

    began: list[str] = []
    engine = LocalEngine(tiny(tokenizer, context=256), tokenizer)
    if not engine.batch_invariant:
        pytest.skip("needs a C compiler")
    assert len(played(env, tokenizer, Last(), count=9)) == 9 and len(ended) == 9


def test_an_answer_that_is_invalid_may_be_handled_or_passed_on(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str | Ask, Any, Any]:
        yield task["prompt"]
        answer = yield Ask("lengths", "none")
        if task["id"] == "0":
            return -1.0 if isinstance(answer, Invalid) else 1.0
        return answer

    rewards = [r.reward for r in played(env, tokenizer, Lengths(), count=6, workers=1)]
    assert rewards[:3] == [-1.0] * 3
    assert rewards[3:] == [Invalid("no answer", InvalidKind.UNANSWERED)] * 3


def test_the_invalid_one_of_four_rewards_leaves_baseline_and_group_statistics(tokenizer: Tokenizer) -> None:
    """[1, 3, 2, Invalid]: what is learned from are 1, 3 and 2 with their own mean and deviation."""
    import torch

    from posttrain.algorithms.policy_table import TABLE
    from posttrain.core.batch import Stats
    from posttrain.training.sources.scoreboard import describe, scoreboard, usable

    texts = ["a", "aaa", "aa", "none"]

    def env(task: Task) -> Generator[Turn | str | Ask, Any, Any]:
        yield task["prompt"]
        return (yield Ask("lengths", texts[int(task["member"])]))

    engine = LocalEngine(tiny(tokenizer, context=256), tokenizer)
    from posttrain.envs.play.episode import Episode

    four = [Episode({"id": "t", "member": i, "prompt": "say="}, "g", i) for i in range(4)]
    with EnvPool(env, 0) as pool:
        services = Services({"lengths": Lengths()})
        rollouts = Player(pool, engine, tokenizer, Sampling(max_tokens=4), 256, services=services).play(four)
    assert [r.reward for r in rollouts[:3]] == [1.0, 3.0, 2.0] and isinstance(rollouts[3].reward, Invalid)
    kept, _ = usable(rollouts, Stats())
    stats = describe(rollouts, None)
    assert kept == rollouts[:3] and stats["invalid"] == (1.0, 4.0) and stats["invalid/unanswered"] == (1.0, 4.0)
    assert stats["reward"] == (6.0, 3.0)
    advantage = TABLE["grpo"].advantage(scoreboard(kept))
    assert torch.as_tensor(advantage).tolist() == pytest.approx([-1.0, 1.0, 0.0], abs=1e-3)  # (r - 2) / 1


def test_equal_questions_are_asked_once_and_a_failed_one_again_in_a_later_step() -> None:
    service = Lengths()
    services = Services({"lengths": service})
    for id in range(3):
        services.ask(id, Ask("lengths", "none" if id else "abc"))
    answers = dict(services.poll())
    assert answers[0] == 3 and isinstance(answers[1], Invalid) and answers[1] == answers[2]
    assert service.asked == ["abc", "none"] and services.pending == 0
    services.ask(0, Ask("lengths", "none"))
    assert isinstance(services.poll()[0][1], Invalid) and len(service.asked) == 2
    services.begin(1)
    services.ask(0, Ask("lengths", "none"))
    services.ask(1, Ask("lengths", "abc"))
    services.poll()
    assert service.asked == ["abc", "none", "none"]


def test_a_question_is_known_by_the_service_and_by_what_it_is() -> None:
    class Doubled(Lengths):
        def poll(self) -> list[tuple[int, Any]]:
            return [(id, 2 * answer) for id, answer in super().poll()]

    services = Services({"one": Lengths(), "other": Doubled()})
    for id, name in enumerate(("one", "other")):
        services.ask(id, Ask(name, "abc"))
    assert dict(services.poll()) == {0: 3, 1: 6}
    changed = Doubled()
    changed.identity = "doubled lengths"
    services.named["one"] = changed  # as in a resumed run whose judge has another rubric
    services.ask(0, Ask("one", "abc"))
    assert services.poll() == [(0, 6)]


def test_what_an_environment_does_to_an_answer_changes_no_other() -> None:
    class Lists(Lengths):
        def poll(self) -> list[tuple[int, Any]]:
            return [(id, {"parts": [1, 2]}) for id, _ in super().poll()]

    services = Services({"lists": Lists()})
    services.ask(0, Ask("lists", "a"))
    [(_, first)] = services.poll()
    first["parts"].append(3)
    services.ask(0, Ask("lists", "a"))
    assert services.poll() == [(0, {"parts": [1, 2]})]


def test_a_play_that_was_given_up_leaves_nothing_to_the_next() -> None:
    services = Services({"lengths": Lengths(later=2)})
    services.ask(0, Ask("lengths", "abc"))
    services.forget()
    assert services.pending == 0
    services.ask(7, Ask("lengths", "ab"))
    answers: list[Any] = []
    while services.pending:
        answers += services.poll()
    assert answers == [(7, 2)]


def test_a_failure_that_comes_late_is_none_of_the_next_step() -> None:
    service = Lengths(later=1)
    services = Services({"lengths": service})
    services.ask(0, Ask("lengths", "none"))
    services.forget()
    services.begin(1)
    for _ in range(9):
        services.poll()
    services.ask(0, Ask("lengths", "none"))
    assert service.asked == ["none", "none"]


def test_comparisons_are_answered_in_the_order_of_their_questions() -> None:
    services = Services({"lengths": Lengths(later=1, backward=True)})
    assert compare(services, "lengths", [{"a": 0}, {"a": 0, "b": 0}, {}]) == [1, 2, 0]


# -- workers -----------------------------------------------------------------------------------------------------------

DIES = """
import os
from posttrain import Ask

def env(task):
    reply = yield "p"
    score = yield Ask("judge", {"text": reply, "n": [1, 2.5, None, True]})
    if task.get("dies"):
        reply = yield "die?"
        os._exit(3)
    reply = yield f"got {score}"
    other = yield Ask("judge", reply)
    return {"reward": score + other}

def strays(task):
    if os.path.exists(task["mark"]):
        return 1.0
    yield "p"
    yield Ask("judge", 1)
    open(task["mark"], "w").close()
    os._exit(3)
"""


def one(pool: EnvPool) -> tuple[int, Any]:
    [event] = pool.poll(20)
    return event


def test_a_lost_worker_replays_replies_and_answers(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(DIES)
    with EnvPool(f"{tmp_path}/my.py:env", 1, 5.0) as pool:
        for id, task in enumerate([{"id": "a"}, {"id": "b", "dies": True}]):
            pool.start(id, task)
            assert one(pool)[1] == Turn(text="p")
            pool.send(id, Reply(f"hello {id}"))
            assert one(pool) == (id, Ask("judge", {"text": f"hello {id}", "n": [1, 2.5, None, True]}))
            pool.send(id, 40 + id)
            one(pool)
        pool.send(1, Reply("x"))
        event = one(pool)[1]
        assert isinstance(event, Done) and isinstance(event.reward, Invalid) and "died" in event.reward.reason
        pool.send(0, Reply("abc"))  # in a fresh worker, which has to be brought here first
        assert one(pool) == (0, Ask("judge", "abc"))
        pool.send(0, 2)
        assert one(pool) == (0, Done(42.0))


def test_an_answer_that_is_on_its_way_when_the_worker_dies_arrives_in_the_next(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(DIES)
    with EnvPool(f"{tmp_path}/my.py:env", 1, 5.0) as pool:
        pool.start(0, {"id": "a"})
        one(pool)
        pool.send(0, Reply("r"))
        one(pool)
        from processes import descendants

        [worker] = pool._workers
        for process in descendants(worker.child.process.pid):
            os.kill(process, signal.SIGKILL)
        time.sleep(0.2)
        pool.send(0, 5)
        assert one(pool) == (0, Turn(text="got 5"))


def test_an_environment_that_goes_another_way_when_it_is_replayed_is_invalid(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(DIES)
    mark = str(tmp_path / "mark")
    with EnvPool(f"{tmp_path}/my.py:strays", 1, 5.0) as pool:
        for id in range(2):
            pool.start(id, {"id": str(id), "mark": mark})
            one(pool)
            pool.send(id, Reply("r"))
            one(pool)
        pool.send(0, 1)
        one(pool)
        pool.send(1, 1)
        event = one(pool)[1]
        assert isinstance(event, Done) and isinstance(event.reward, Invalid)
        assert "did something else when it was replayed" in event.reward.reason


# -- what may be asked -------------------------------------------------------------------------------------------------

DEEP: Any = "x"
for _ in range(DEEPEST + 1):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (Ask("", 1), "expected the name"),
        (Ask(7, 1), "expected the name"),  # type: ignore[arg-type]
        (Ask("judge", object()), "expected JSON data"),
        (Ask("judge", {1: "a"}), "expected JSON data"),
        (Ask("judge", [float("nan")]), "expected JSON data"),
        (Ask("judge", 1 << 70), "expected JSON data"),
        (Ask("judge", DEEP), "nested more than"),
        (Ask("judge", ["x" * 1000] * 1100), "more than"),
        (Ask("judge", "x" * (LONGEST_TEXT + 1)), "more than"),
        (Ask("judge", ["\ud800"]), "half a surrogate pair"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_question_is_invalid_with_the_reason(ask: Ask, reason: str) -> None:
    found = read_ask(ask)
    assert isinstance(found, Invalid) and reason in found.reason and found.kind is InvalidKind.UNREADABLE


def test_a_question_goes_over_the_wire_as_plain_data() -> None:
    ask = read_ask(Ask("judge", {"reply": Reply("hi"), "n": (1, 2.5, None, True)}))
    assert ask == Ask("judge", {"reply": "hi", "n": [1, 2.5, None, True]}) and isinstance(ask, Ask)
    assert type(ask.content["reply"]) is str
    assert read_answer(write_answer(3, ask)[8:]).event == ask


@pytest.mark.parametrize(
    "message",
    [
        {"number": 1, "ask": {"service": "judge"}},
        {"number": 1, "ask": {"service": "judge", "content": 1, "more": 1}},
        {"number": 1, "ask": [], "turn": {}},
        {"number": 1, "ask": "judge"},
    ],
)
def test_a_worker_that_garbles_a_question_is_found_out(message: dict[str, Any]) -> None:
    with pytest.raises(Garbled):
        read_answer(json.dumps(message).encode())


def test_an_episode_that_asks_for_ever_ends(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str | Ask, Any, Any]:
        yield task["prompt"]
        while True:
            yield Ask("lengths", "abc")

    [rollout] = played(env, tokenizer, Lengths(), count=1)
    assert isinstance(rollout.reward, Invalid) and f"{MOST_ASKS} times" in rollout.reward.reason


def test_a_service_that_there_is_not_is_named_with_what_helps(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str | Ask, Any, Any]:
        yield task["prompt"]
        return (yield Ask("judge", "abc"))

    [rollout] = played(env, tokenizer, Lengths(), count=1)
    assert isinstance(rollout.reward, Invalid)
    assert "asked the service 'judge', which this run has lengths" in rollout.reward.reason
    assert "--judge RECIPE" in rollout.reward.reason


# -- the journal -------------------------------------------------------------------------------------------------------


def journaled(folder: Path, resumed: bool, service: Service) -> Services:
    services = Services({"lengths": service})
    services.journal = AnswerJournal(folder, resumed)
    return services


def asks(services: Services, texts: list[str]) -> list[Any]:
    for id, text in enumerate(texts):
        services.ask(id, Ask("lengths", text))
    answers = dict(services.poll())
    return [answers[id] for id in range(len(texts))]


class Down(Lengths):
    """No answer to anything."""

    def poll(self) -> list[tuple[int, Any]]:
        return [(id, Invalid("down", InvalidKind.TOO_LONG)) for id, _ in super().poll()]


def test_a_resumed_run_gets_the_answers_of_finished_steps_from_the_journal(tmp_path: Path) -> None:
    first = journaled(tmp_path, False, Lengths())
    first.begin(1)
    assert asks(first, ["abc", "none"])[0] == 3
    first.begin(2)
    first.named["lengths"] = Down()  # an outage within step 2
    outage = asks(first, ["abc", "ab"])
    assert outage[0] == 3 and isinstance(outage[1], Invalid)
    first.begin(3)
    first.named["lengths"] = Lengths()
    assert asks(first, ["ab"]) == [2]
    first.close()
    gone = Down()
    again = journaled(tmp_path, True, gone)
    again.begin(1)
    assert asks(again, ["abc", "none"]) == [3, Invalid("no answer", InvalidKind.UNANSWERED)]
    again.begin(2)
    assert asks(again, ["abc", "ab"]) == outage
    again.begin(3)
    assert asks(again, ["ab"]) == [2]
    assert gone.asked == []


class Reasons(Lengths):
    """As long as the text, and why."""

    def poll(self) -> list[tuple[int, Any]]:
        return [(id, Reasoned(answer, (f"it has {answer}", "ü\n"))) for id, answer in super().poll()]


def test_what_was_said_for_an_answer_is_repeated_from_the_journal_and_not_held(tmp_path: Path) -> None:
    first = journaled(tmp_path, False, Reasons())
    first.begin(1)
    told = asks(first, ["abc", "none"])
    assert told[0] == Reasoned(3, ("it has 3", "ü\n")) and isinstance(told[1].answer, Invalid)
    first.begin(2)
    assert asks(first, ["abc"]) == told[:1], "within the run too"
    first.begin(3)
    first.close()
    gone = Down()
    again = journaled(tmp_path, True, gone)
    again.begin(1)
    assert asks(again, ["abc", "none"]) == told and gone.asked == []
    assert again.journal is not None and "it has" not in str(vars(again.journal)), "texts of a long run are many"
    again.begin(2)
    assert asks(again, ["abc"]) == told[:1]
    again.close()
    (tmp_path / ANSWERS).write_text('{"step": 1, "question": "q", "service": "s", "answer": 1, "said": 5}\n')
    with pytest.raises(UserError, match="damaged after byte 0"):
        AnswerJournal(tmp_path, True)


def test_an_environment_gets_the_answer_alone_and_its_rollout_both(tokenizer: Tokenizer) -> None:
    for rollout in played(scored, tokenizer, Reasons(), count=3):
        found = [answer.answer for _, answer in rollout.answers]
        assert list(rollout.rewards.values()) == found and {name for name, _ in rollout.answers} == {"lengths"}
        assert restored(json.loads(json.dumps(stored(rollout))), rollout.task).answers == rollout.answers
        (row,) = rows_of(rollouts_table(1, [Outcome(rollout)], "rl"))
        assert [one["said"] for one in row["answers"]] == [[f"it has {length}", "ü\n"] for length in found]


def test_an_outage_of_the_step_that_was_not_finished_is_asked_again(tmp_path: Path) -> None:
    first = journaled(tmp_path, False, Down())
    first.begin(1)
    asks(first, ["ab"])
    first.close()
    service = Lengths()
    again = journaled(tmp_path, True, service)
    again.begin(1)
    assert asks(again, ["ab"]) == [2] and service.asked == ["ab"]
    again.begin(2)
    again.close()
    third = journaled(tmp_path, True, Down())  # the later line of a step holds
    third.begin(1)
    assert asks(third, ["ab"]) == [2]


def test_an_outage_is_asked_again_though_the_step_had_begun(tmp_path: Path) -> None:
    first = journaled(tmp_path, False, Lengths())
    first.begin(1)
    assert asks(first, ["abc"]) == [3]
    first.begin(2)
    first.named["lengths"] = Down()
    assert isinstance(asks(first, ["ab"])[0], Invalid)
    first.close()
    service = Lengths()
    again = journaled(tmp_path, True, service)
    again.begin(2)
    assert asks(again, ["ab"]) == [2] and service.asked == ["ab"]


def test_a_line_that_was_cut_off_by_a_kill_is_dropped_and_written_over(tmp_path: Path) -> None:
    first = journaled(tmp_path, False, Lengths())
    first.begin(1)
    asks(first, ["abc", "ab"])
    first.close()
    file = tmp_path / ANSWERS
    file.write_bytes(file.read_bytes()[:-7])
    service = Lengths()
    again = journaled(tmp_path, True, service)
    again.begin(1)
    assert asks(again, ["abc", "ab"]) == [3, 2] and service.asked == ["ab"]
    again.close()
    assert all(json.loads(line) for line in file.read_bytes().splitlines())
    assert journaled(tmp_path, True, Down()).journal is not None


def test_nothing_of_a_long_line_that_was_cut_off_is_left_behind_a_shorter_one(tmp_path: Path) -> None:
    first = journaled(tmp_path, False, Lengths())
    first.begin(1)
    asks(first, ["abc"])
    first.close()
    with (tmp_path / ANSWERS).open("ab") as file:
        file.write(b'{"step": 1, "answer": "' + b"x" * 999)
    again = journaled(tmp_path, True, Lengths())
    again.begin(1)
    asks(again, ["ab"])
    again.close()
    assert all(json.loads(line) for line in (tmp_path / ANSWERS).read_bytes().splitlines())


def test_a_damaged_journal_is_refused_and_a_new_run_ignores_an_old_one(tmp_path: Path) -> None:
    whole = '{"begun": 1}\n'
    place = '{"step": 1e999, "question": "q", "service": "s", "answer": 1}'
    for damage in ('{"step": 1}', "5", "[" * 100_000, '{"begun": Infinity}', place):
        (tmp_path / ANSWERS).write_text(f"{whole}{damage}\n")
        with pytest.raises(UserError, match=f"damaged after byte {len(whole)}: .* or delete it"):
            AnswerJournal(tmp_path, True)
        assert (tmp_path / ANSWERS).read_text() == f"{whole}{damage}\n"
    (tmp_path / ANSWERS).unlink()
    os.mkfifo(tmp_path / ANSWERS)
    with pytest.raises(UserError, match="it is a pipe, not a file"):
        AnswerJournal(tmp_path, True)
    (tmp_path / ANSWERS).unlink()
    fresh = journaled(tmp_path, False, Lengths())
    assert asks(fresh, ["abc"]) == [3]
    fresh.close()
    assert len((tmp_path / ANSWERS).read_text().splitlines()) == 1


# -- check -------------------------------------------------------------------------------------------------------------


def test_check_says_what_is_asked_and_plays_it_with_made_up_answers() -> None:
    report = check(careful, [{"id": "a", "prompt": "p", "answer": "2"}])
    assert report.ok, report.lines()
    told = "\n".join(report.lines())
    assert "it asks the service judge: numbers from 0 to 1 were made up" in told and "--judge RECIPE asks it" in told
    assert "without an answer (task a): reward 0.25" in told
    assert all(0 <= reward <= 1 for reward in report.rewards) and len(set(report.rewards)) == 5


def test_check_asks_the_service_where_it_is_given() -> None:
    service = Lengths()
    report = check(careful, [{"id": "a", "prompt": "p"}], ["x", "xyz"], services=Services({"judge": service}))
    assert report.ok and report.rewards == [1.0, 3.0] and service.asked == ["x", "xyz"]
    assert "it asks the service judge: it answered" in "\n".join(report.lines())


@pytest.fixture(scope="module", autouse=True)
def of_others() -> set[threading.Thread]:
    """Threads that tests of other modules have left."""
    return set(threading.enumerate())


def test_threads_of_nobody_are_left(of_others: set[threading.Thread]) -> None:
    assert not [t for t in threading.enumerate() if t.name == "endpoint" and t not in of_others]
