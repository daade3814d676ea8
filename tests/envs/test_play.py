"""Episodes: what the policy sampled is trainable, what it was shown is not, and timing changes nothing."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import CHATML, tiny
from environments import asking, delayed
from episodes import episodes, played, said, until_done

import posttrain
from posttrain.algorithms.earned_rewards import earnings
from posttrain.core.conversation import Conversation
from posttrain.core.rollouts import PlayedTurn, Rollout
from posttrain.core.seeds import seed_of
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import (
    Completion,
    Graded,
    Invalid,
    Reply,
    Sampling,
    SpanReward,
    StopReason,
    Task,
    Turn,
    UserError,
)
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.envs.play.env_outputs import Done, Event
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode, RunningEpisode
from posttrain.envs.play.player import LONGEST_PAUSE, EpisodeLimits, Player, cut_observation
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.kernels import binder, build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.scoreboard import scoreboard


def test_only_what_the_policy_sampled_is_trainable(tokenizer: Tokenizer) -> None:
    for rollout in played(asking, tokenizer):
        (transcript,) = rollout.transcripts
        shown = [t for i, t in enumerate(transcript.tokens) if i not in transcript.scored]
        observed = tokenizer.decode(shown)
        assert observed.startswith(rollout.prompt) and observed.count("<info>") == 2 == observed.count("</info>")
        assert rollout.n_sampled == len(transcript.scored) == len(transcript.logp)
        assert len(transcript.tokens) == len(transcript.scored) + len(shown)
        assert 3 <= rollout.n_sampled <= 27


def test_sampled_tokens_are_kept_and_never_tokenised_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Completion] = []
    poll = LocalEngine.poll

    def spy(self: LocalEngine) -> list[Completion]:
        done = poll(self)
        seen.extend(done)
        return done

    monkeypatch.setattr(LocalEngine, "poll", spy)
    rollouts = played(asking, tokenizer)
    for id, rollout in enumerate(rollouts):
        (transcript,) = rollout.transcripts
        kept = [transcript.tokens[i] for i in transcript.scored.tolist()]
        assert kept == [t for c in seen if c.id == id for t in c.tokens]


@pytest.fixture(params=["compiled", pytest.param("torch", marks=pytest.mark.long)])
def code(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "compiled" and binder.decode() is None:
        pytest.skip("needs a C compiler")
    build.use(request.param == "compiled")
    yield request.param
    build.use(True)


def test_no_bit_of_a_rollout_depends_on_when_environments_answer(tokenizer: Tokenizer, code: str) -> None:
    expected = said(played(asking, tokenizer, 18))
    for workers in (1, 4):
        assert said(played(delayed, tokenizer, 18, workers)) == expected


def test_no_byte_of_a_run_depends_on_when_environments_answer(tokenizer: Tokenizer, code: str, tmp_path: Path) -> None:
    save_model(tiny(tokenizer, context=256), tmp_path / "start", tokenizer)
    rows = [{"id": str(i), "prompt": f"say {i}="} for i in range(8)]

    def files(env: Any, workers: int) -> dict[str, bytes]:
        run = posttrain.rl(
            rows, env, str(tmp_path / "start"), out=str(tmp_path / f"{workers}"), env_workers=workers, algorithm="dapo",
            steps=3, prompts=2, group=3, max_tokens=9, max_episode_tokens=27, lr=1e-2, threads=1, quiet=True,
            compiled=code == "compiled",
        )  # fmt: skip
        return {p.name: p.read_bytes() for p in [run.path / "metrics.jsonl", *sorted(run.path.glob("rollouts/*"))]}

    expected = files(asking, 0)
    assert len(expected) == 4
    for workers in (1, 4):
        assert files(delayed, workers) == expected


def test_compiled_sampling_waits_for_no_environment(tokenizer: Tokenizer) -> None:
    """Of two episodes one is heard only after the other has ended: with a barrier it would wait for ever."""
    if binder.decode() is None:
        pytest.skip("needs a C compiler")
    ended: list[str] = []

    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield task["prompt"]
        for _ in range(3):
            yield "more"
        ended.append(task["id"])
        return 0.0

    class Late(EnvPool):
        """Episode 0 answers when episode 3 has ended."""

        def poll(self, timeout: float | None = 0.0) -> list[tuple[int, Event]]:
            events = [*late, *super().poll(0.0)]
            late[:] = [e for e in events if e[0] == 0 and "1" not in ended]
            return [e for e in events if e not in late]

        @property
        def pending(self) -> int:
            return super().pending + len(late)

    late: list[tuple[int, Event]] = []
    engine = LocalEngine(tiny(tokenizer, context=256), tokenizer)
    with Late(env, 0) as pool:
        rollouts = Player(pool, engine, tokenizer, Sampling(max_tokens=5), 256).play(episodes(4)[::3])
    assert [r.reward for r in rollouts] == [0.0, 0.0] and ended == ["1", "0"]


def test_every_request_samples_as_the_run_asks_with_a_seed_of_its_own(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, asked = LocalEngine.submit, []

    def noted(self: LocalEngine, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        asked.append(sampling)
        submit(self, id, prompt, sampling, keep)

    monkeypatch.setattr(LocalEngine, "submit", noted)
    played(asking, tokenizer, temperature=0.5, top_p=0.8, top_k=7)
    assert {(s.temperature, s.top_p, s.top_k) for s in asked} == {(0.5, 0.8, 7)}
    assert len(asked) > 12 and len({s.seed for s in asked}) == len(asked)


def test_stop_string_of_a_turn_ends_the_reply(tokenizer: Tokenizer) -> None:
    replies = []

    def env(task: Task) -> Generator[Turn, Reply, float]:
        reply = yield Turn(task["prompt"], stop=("7", "e"), max_tokens=60)
        replies.append(reply)
        return 0.0

    played(env, tokenizer)
    stopped = [r for r in replies if r.stop is StopReason.STOP]
    assert stopped and all(r[-1] in "7e" and not set(r[:-1]) & set("7e") for r in stopped)


def test_step_rewards_are_kept_with_their_place_and_add_up(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn, Reply, float]:
        yield Turn(task["prompt"])
        yield Turn("more", reward=0.5)
        return 1.0

    for rollout in played(env, tokenizer):
        assert rollout.reward == 1.5 and len(rollout.steps) == 1
        position, reward = rollout.steps[0]
        assert reward == 0.5 and 0 < position < rollout.n_sampled


def test_first_prompt_beyond_the_context_is_the_users_mistake(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="task '0'.*context holds 6 tokens"):
        played(lambda task, reply: 0.0, tokenizer, context=6)


def test_a_first_prompt_of_no_tokens_is_the_users_mistake_even_where_long_ones_are_left_out(
    tokenizer: Tokenizer,
) -> None:
    def env(task: Task) -> Generator[str, Reply, float]:
        yield ""
        return 1.0

    with pytest.raises(UserError, match="the prompt of task '0' is empty"):
        played(env, tokenizer, limits={"too_long": "skip"})


def test_an_episode_without_a_turn_has_no_prompt_and_one_that_begins_with_a_tool_has_it_as_its_prompt(
    tokenizer: Tokenizer,
) -> None:
    def env(task: Task) -> Generator[Turn, Reply, float]:
        if task["id"] == "0":
            raise ValueError("no first turn")
        yield Turn(text="from a tool", tool=True)
        yield Turn(text="and then", tool=True)
        return 1.0

    broken, *_, whole = played(env, tokenizer, 6)
    assert broken.prompt == "" and isinstance(broken.reward, Invalid) and not broken.turns
    kinds = [t.kind for t in whole.turns if t.kind is not SpanKind.SAMPLED]
    assert whole.prompt == "from a tool" and kinds == [SpanKind.PROMPT, SpanKind.TOOL]


def test_step_rewards_are_in_the_order_of_their_tokens_whoever_gave_them(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, Graded]:
        first = yield task["prompt"]
        yield Turn(text="and ", reward=0.25)
        return Graded(1.0, [SpanReward(1, 0.5, 0)] if first else [])

    found = [r.steps for r in played(env, tokenizer, max_tokens=5)]
    assert all(steps == sorted(steps) for steps in found) and any(len(steps) == 2 for steps in found)


def test_the_first_reply_of_an_episode_is_that_of_its_own_seed(tokenizer: Tokenizer) -> None:
    rollouts = played(lambda task, reply: 1.0, tokenizer, 6)
    engine = LocalEngine(tiny(tokenizer, context=256), tokenizer)
    for number, episode in enumerate(episodes(6)):
        prompt = tokenizer.encode(episode.task["prompt"], start=True)
        engine.submit(number, prompt, Sampling(max_tokens=9, seed=episode.seed))
    alone = [completion.tokens for completion in until_done(engine)]
    assert [list(r.transcripts[0].tokens[-r.n_sampled :]) for r in rollouts] == [list(tokens) for tokens in alone]


def test_first_prompt_beyond_the_context_is_invalid_or_cut_where_that_is_wanted(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield "=".join(map(str, range(int(task["id"]), 40)))
        return 1.0

    whole = played(env, tokenizer, context=200, max_tokens=2)
    skipped = played(env, tokenizer, context=60, max_tokens=2, limits={"too_long": "skip"})
    assert all(isinstance(r.reward, Invalid) and "context holds 60" in r.reward.reason for r in skipped)
    for most, length in ((2, 58), (50, 30)):  # room for the reply, but half of the context for the prompt
        cut = played(env, tokenizer, context=60, max_tokens=most, limits={"too_long": "truncate"})
        for one, other in zip(cut, whole, strict=True):
            prompt = other.transcripts[0].tokens[: -other.n_sampled]
            kept = one.transcripts[0].tokens[: -one.n_sampled]
            assert one.reward == 1.0 and len(kept) == length and kept == [prompt[0], *prompt[-length + 1 :]]


def test_later_turn_beyond_the_context_gets_an_empty_reply_and_a_score(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield Turn(task["prompt"])
        reply = yield "x" * 30
        return -1.0 if reply == "" and reply.stop is StopReason.CONTEXT else 1.0

    for rollout in played(env, tokenizer, context=30, max_tokens=3):
        assert rollout.reward == -1.0 and rollout.stop is StopReason.CONTEXT and rollout.n_sampled <= 3


def test_loops_that_do_not_look_at_the_stop_end_by_themselves_and_earn_no_more(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield Turn(task["prompt"])
        for _ in range(6):
            yield Turn("again", reward=0.5)
        return 2.0

    for rollout in played(env, tokenizer, max_tokens=2, limits={"bounds": EpisodeLimits(turns=3)}):
        assert rollout.stop is StopReason.TURNS
        assert rollout.reward == 2.0 + 3 * 0.5, "one for each reply that the policy gave"


def test_environment_that_asks_on_without_an_end_is_invalid(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield Turn(task["prompt"])
        while True:
            yield "again"

    for rollout in played(env, tokenizer, max_tokens=2, limits={"bounds": EpisodeLimits(turns=3)}):
        assert isinstance(rollout.reward, Invalid) and "stop was turns" in rollout.reward.reason
        assert len([t for t in rollout.turns if t.kind is SpanKind.SAMPLED]) == 3


@pytest.mark.parametrize("out_of", ["turns", "length", "context", "calls", "time"])
def test_an_episode_that_runs_out_is_told_and_keeps_its_reward(tokenizer: Tokenizer, out_of: str) -> None:
    bounds = {
        "turns": EpisodeLimits(turns=2),
        "length": EpisodeLimits(tokens=11),
        "context": EpisodeLimits(),
        "calls": EpisodeLimits(tool_calls=2),
        "time": EpisodeLimits(seconds=1e-9),
    }[out_of]
    context = 40 if out_of == "context" else 256

    def env(task: Task) -> Generator[Turn | str, Reply, dict[str, float]]:
        reply = yield Turn(task["prompt"])
        heard = 1
        while reply or not reply.stop.truncated:
            reply = yield Turn("and then ", reward=0.25, tool=True)
            heard += 1
        return {str(reply.stop): 1.0, "heard": float(heard)}

    for rollout in played(env, tokenizer, context=context, limits={"bounds": bounds}, max_tokens=4):
        replies = [t for t in rollout.turns if t.kind is SpanKind.SAMPLED]
        assert rollout.rewards == {out_of: 1.0, "heard": len(replies) + 1.0}
        assert rollout.reward == 1.0 + len(replies) + 1.0 + 0.25 * len(replies)
        assert rollout.stop == out_of and rollout.stop.truncated
        assert rollout.turns[-1].length == 0  # what is not answered is not shown to the policy either
        (transcript,) = rollout.transcripts
        assert transcript.spans[-1].kind is SpanKind.SAMPLED and len(transcript) <= context


def test_calls_of_tools_alone_are_counted_and_none_may_be_allowed(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, dict[str, float]]:
        yield Turn(task["prompt"])
        for _ in range(3):
            yield "and then "
        reply = yield Turn("found ", tool=True)
        return {str(reply.stop): 1.0}

    for most, stop in ((0, StopReason.CALLS), (1, None)):
        for rollout in played(env, tokenizer, 3, limits={"bounds": EpisodeLimits(tool_calls=most)}, max_tokens=4):
            assert (StopReason.CALLS in rollout.rewards) == (stop is StopReason.CALLS)
            assert sum(t.kind is SpanKind.SAMPLED for t in rollout.turns) == 4 + (stop is None)


def test_an_answer_that_does_not_fit_loses_its_middle_and_the_record_says_so(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield Turn(task["prompt"])
        yield Turn("<" + "0123456789" * 9 + ">", tool=True)
        return 1.0

    for rollout in played(env, tokenizer, 3, context=60, max_tokens=9, limits={"too_long": "truncate"}):
        (transcript,) = rollout.transcripts
        [shown] = [t for t in rollout.turns if t.kind is SpanKind.TOOL]
        whole = tokenizer.encode(shown.text)
        tokens = transcript.tokens[shown.start : shown.start + shown.length]
        assert shown.cut == len(whole) - shown.length > 0 and rollout.stop is not StopReason.CONTEXT
        end = shown.length // 4
        assert tokens == whole[: shown.length - end] + whole[len(whole) - end :]
        assert shown.start + shown.length == 60 - 9, "a whole reply fits behind it"
    for rollout in played(env, tokenizer, 3, context=60, max_tokens=9, limits={"too_long": "skip"}):
        assert rollout.stop is StopReason.CONTEXT and rollout.turns[-1].length == rollout.turns[-1].cut == 0


@pytest.mark.parametrize("room", [0, 3, 7, 8, 20, 99, 100, 101])
def test_what_is_cut_leaves_room_for_a_reply_or_half_of_what_there_is(room: int) -> None:
    tokens = list(range(100))
    found = cut_observation(tokens, room, 30)
    if room < 8 or room > 100:
        assert found == tokens
    else:
        assert len(found) == max(room // 2, room - 30) and found == sorted(set(found))


def test_the_budget_of_an_episode_holds_over_all_its_replies(tokenizer: Tokenizer) -> None:
    rollouts = played(asking, tokenizer, limits={"bounds": EpisodeLimits(tokens=11)})
    assert max(r.n_sampled for r in rollouts) == 11
    cut = [r for r in rollouts if r.n_sampled == 11]
    assert {r.stop for r in cut} == {StopReason.LENGTH} and not any(isinstance(r.reward, Invalid) for r in rollouts)


def watched(env: Any, tokenizer: Tokenizer, count: int, **limits: Any) -> tuple[list[Rollout], list[Any], EnvPool]:
    """Rollouts; what the engine and the pool were asked; and the pool, which tells its answers last one first."""
    engine, asked = LocalEngine(tiny(tokenizer, context=256), tokenizer, slots=5), list[Any]()
    pool = EnvPool(env, 0)
    submit, drop, poll = engine.submit, pool.drop, pool.poll

    def submitted(id: int, prompt: Any, sampling: Sampling, keep: bool) -> None:
        asked.append((id, sampling.max_tokens))
        submit(id, prompt, sampling, keep)

    def dropped(index: int) -> None:
        asked.append(("drop", index))
        drop(index)

    engine.submit, pool.drop = submitted, dropped  # type: ignore[method-assign]
    pool.poll = lambda seconds: poll(seconds)[::-1]  # type: ignore[method-assign]
    with pool:
        player = Player(pool, engine, tokenizer, Sampling(max_tokens=9), 256, **limits)
        return player.play(episodes(count)), asked, pool


def test_a_reply_may_have_what_its_turn_the_run_and_the_episode_leave_it(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield task["prompt"]
        yield Turn("2 ", max_tokens=3)
        reply = yield "3 "
        while reply.stop not in (StopReason.LENGTH,) or reply:
            reply = yield "on "
        return 1.0

    rollouts, asked, _ = watched(env, tokenizer, 6, bounds=EpisodeLimits(tokens=14))
    for index, rollout in enumerate(rollouts):
        lengths = [span.length for span in rollout.transcripts[0].spans if span.kind is SpanKind.SAMPLED]
        budgets = [tokens for id, tokens in asked if id == index]
        left = [14 - sum(lengths[:i]) for i in range(len(lengths))]
        most = [9, 3, *[9] * len(lengths)]
        assert budgets == [min(a, b) for a, b in zip(most, left, strict=False)]
        assert sum(lengths) == 14 and rollout.reward == 1.0
    assert any(tokens not in (3, 9) for _, tokens in asked)


def test_answers_are_heard_in_the_order_of_the_episodes_and_a_lost_episode_is_dropped(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[str, Reply, float]:
        yield task["prompt"]
        while True:
            yield "on "

    rollouts, asked, pool = watched(env, tokenizer, 5, bounds=EpisodeLimits(turns=2))
    assert [id for id, _ in asked[:5]] == [0, 1, 2, 3, 4]
    assert sorted(index for what, index in asked if what == "drop") == [0, 1, 2, 3, 4]
    assert all(isinstance(r.reward, Invalid) for r in rollouts) and pool.waited >= 0


def test_time_without_anything_to_sample_is_time_spent_waiting(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waits = 0.0, 0
    monkeypatch.setattr("posttrain.envs.play.player.time", SimpleNamespace(perf_counter=lambda: now))
    pool = EnvPool(asking, 0)
    poll = pool.poll

    def polled(seconds: float | None) -> Any:
        nonlocal now, waits
        now, waits = now + (5.0 if seconds == LONGEST_PAUSE else 100.0), waits + (seconds == LONGEST_PAUSE)
        return poll(seconds)

    pool.poll = polled  # type: ignore[method-assign]
    with pool:
        engine = LocalEngine(tiny(tokenizer, context=256), tokenizer, slots=5)
        Player(pool, engine, tokenizer, Sampling(max_tokens=9), 256).play(episodes(3))
    assert waits >= 2 and pool.waited == pytest.approx(5.0 * waits, abs=4.0)  # the pool itself takes a moment


def test_a_fresh_turn_begins_a_transcript_that_knows_nothing_of_the_others(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield task["prompt"]
        yield Turn("once more ", fresh=True, reward=0.5)
        yield "then "
        return 1.0

    for rollout in played(env, tokenizer):
        first, second = rollout.transcripts
        assert tokenizer.decode(second.tokens).startswith("once more ")
        assert [s.kind for s in second.spans] == ["prompt", "sampled", "observation", "sampled"]
        assert rollout.steps == [(first.n_scored, 0.5)] and rollout.reward == 1.5
        assert [t.transcript for t in rollout.turns] == [0, 0, 1, 1, 1, 1]
    alone = LocalEngine(tiny(tokenizer, context=256), tokenizer)
    alone.submit(0, second.tokens[: second.spans[0].length], Sampling(max_tokens=9, seed=seed_of(seed_of(11), 2)))
    assert list(until_done(alone)[0].tokens) == second.tokens[second.spans[1].start :][: second.spans[1].length]


def test_a_full_context_is_left_by_a_fresh_turn_alone(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield task["prompt"]
        told = yield "x" * 40
        assert told.stop is StopReason.CONTEXT and told == ""
        if task["id"] == "0":
            again = yield "short"
            assert again.stop is StopReason.CONTEXT and again == ""
        reply = yield Turn("again ", fresh=True)
        return float(len(reply) > 0)

    rollouts = played(env, tokenizer, 6, context=32, max_tokens=3)
    assert [r.reward for r in rollouts] == [1.0] * 6 and all(len(r.transcripts) == 2 for r in rollouts)
    assert not any(r.stop is StopReason.CONTEXT for r in rollouts)


def test_a_reply_to_a_turn_that_is_not_learned_from_has_no_scored_token(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield Turn(task["prompt"], learn=False)
        yield Turn("now ", reward=0.5)
        return 1.0

    for rollout in played(env, tokenizer):
        (transcript,) = rollout.transcripts
        unlearned, learned = (s for s in transcript.spans if s.kind is SpanKind.SAMPLED)
        assert not unlearned.learned and learned.learned
        assert transcript.scored.tolist() == list(range(learned.start, learned.start + learned.length))
        assert rollout.n_sampled == unlearned.length + learned.length and rollout.steps == [(0, 0.5)]


def test_turns_say_who_said_what_and_where_it_stands(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield task["prompt"]
        yield Turn("<42>", tool=True)
        yield Turn("well ", reward=0.25)
        return 0.0

    for rollout in played(env, tokenizer):
        (transcript,) = rollout.transcripts
        assert [t.kind for t in rollout.turns] == ["prompt", "sampled", "tool", "sampled", "observation", "sampled"]
        assert [t.kind for t in rollout.turns] == [s.kind for s in transcript.spans]
        assert [(t.start, t.length) for t in rollout.turns] == [(s.start, s.length) for s in transcript.spans]
        assert [t.reward for t in rollout.turns] == [0, 0, 0, 0, 0.25, 0]
        for turn in rollout.turns:
            own = [i for i in transcript.tokens[turn.start : turn.start + turn.length] if i != tokenizer.eos_id]
            assert tokenizer.decode(own) == turn.text


def test_a_reward_for_a_part_of_a_reply_is_earned_by_its_last_token(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, Graded]:
        first = yield task["prompt"]
        second = yield "and "
        spans = [SpanReward(1, 0.5, 0)] if first else []
        return Graded({"right": 1.0}, [*spans, *([SpanReward(len(second), 0.25)] if second else [])])

    for rollout in played(env, tokenizer, max_tokens=5):
        (transcript,) = rollout.transcripts
        first, second = (t for t in rollout.turns if t.kind is SpanKind.SAMPLED)

        def place(turn: PlayedTurn, end: int) -> int:
            tokens = transcript.tokens[turn.start : turn.start + turn.length]
            return next(n for n in range(turn.length + 1) if len(tokenizer.decode(tokens[:n])) == end)

        expected = [(place(first, 1), 0.5)] if first.text else []
        expected += [(first.length + place(second, len(second.text)), 0.25)] if second.text else []
        assert rollout.steps == expected and rollout.rewards == {"right": 1.0}
        assert rollout.reward == 1.0 + sum(reward for _, reward in expected)
        [earned] = earnings(scoreboard([rollout]))
        assert all(earned[place - 1] >= reward for place, reward in expected) and earned.sum() == rollout.reward


@pytest.mark.parametrize(
    "span", [SpanReward(0, 1.0), SpanReward(10**6, 1.0), SpanReward(1, 1.0, 1), SpanReward(1, 1.0, -2)]
)
def test_a_reward_for_a_part_that_is_not_there_is_invalid(tokenizer: Tokenizer, span: SpanReward) -> None:
    for rollout in played(lambda task, reply: Graded(1.0, [span]), tokenizer, 3):
        assert isinstance(rollout.reward, Invalid) and "part" in rollout.reward.reason and rollout.steps == []


def test_parts_of_replies_are_found_behind_tokens_of_many_characters() -> None:
    words = Tokenizer.train(["hello there you hello there you"] * 3, 300)
    p = RunningEpisode(Episode({"id": "0"}, "0", 0), words)
    p.show(Turn("hello"), words.encode("hello"), 0.0)
    tokens = words.encode(" there you \u00e9\u4e16 hello")
    text = words.decode(tokens)
    p.reply(Completion(0, tokens, [0.0] * len(tokens), text, StopReason.EOS, 0), 0.0)
    for end in range(1, len(text) + 1):
        [rollout] = p.rollouts(Done(0.0, {}, (SpanReward(end, 1.0),)))
        [(place, _)] = rollout.steps
        assert words.decode(tokens[:place])[:end] == text[:end]
        assert words.decode(tokens[: place - 1])[:end] != text[:end]


@pytest.mark.parametrize("ended", ["eos", "stop", "length"])
def test_chat_turns_add_exactly_what_the_template_says(tmp_path: Path, ended: str) -> None:
    tokenizer = Tokenizer.train(["hello there you"], 300, special=("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = CHATML
    conversation, end = Conversation(tokenizer), tokenizer.encode("<|im_end|>")
    tokens = conversation.show(Turn(messages=[{"role": "user", "content": "hello"}]), None)
    reply = tokenizer.encode("there") + ([] if ended == "length" else end)
    text = "there<|im_end|>" if ended == "stop" else "there"  # a stop string is part of the text, an end token is not
    said = Completion(0, reply, [0.0] * len(reply), text, StopReason(ended), 0)
    tokens += reply + conversation.show(Turn(messages=[{"role": "user", "content": "you"}]), said)
    messages = [{"role": r, "content": c} for r, c in (("user", "hello"), ("assistant", "there"), ("user", "you"))]
    assert tokenizer.decode(tokens) == tokenizer.render(messages, generation=True)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user"]


def test_seeds_differ_in_every_part_and_fit_an_int64() -> None:
    seeds = {seed_of(a, b, c) for a in range(5) for b in ("x", "y") for c in range(20)}
    assert len(seeds) == 200 and all(0 <= s < 2**63 for s in seeds)


def test_part_of_a_reply_that_is_not_learned_from_counts_for_the_tokens_before_it(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, Graded]:
        yield task["prompt"]
        judged = yield Turn("judge ", learn=False)
        yield Turn("then ")
        return Graded(1.0, [SpanReward(len(judged), 0.5, 1)] if judged else [])

    found = [r for r in played(env, tokenizer, max_tokens=5) if r.steps]
    assert found
    for rollout in found:
        first = next(span for span in rollout.transcripts[0].spans if span.learned)
        assert rollout.steps == [(first.length, 0.5)]


@pytest.mark.parametrize("limits", [{"tokens": 14}, {"turns": 3}], ids=["tokens", "turns"])
def test_bounds_are_those_of_the_episode_over_all_contexts_learned_from_or_not(
    tokenizer: Tokenizer, limits: dict[str, int]
) -> None:
    def env(task: Task) -> Generator[Turn, Reply, float]:
        reply = yield Turn(task["prompt"], learn=False)
        for _ in range(20):
            if reply == "" and reply.stop.truncated:
                break
            reply = yield Turn("on ", fresh=True, learn=False)
        return 1.0

    rollouts, _, _ = watched(env, tokenizer, 6, bounds=EpisodeLimits(**limits))
    for rollout in rollouts:
        if "turns" in limits:
            assert len([t for t in rollout.turns if t.kind is SpanKind.SAMPLED]) == 3
            assert rollout.stop is StopReason.TURNS
        else:
            assert rollout.n_sampled == 14 and rollout.stop is StopReason.LENGTH


def test_reward_for_a_reply_that_was_not_sampled_is_not_counted_in_a_fresh_context_either(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield task["prompt"]
        yield "x" * 40
        yield Turn("again ", fresh=True, reward=0.5)
        return 1.0

    for rollout in played(env, tokenizer, 6, context=32, max_tokens=3):
        assert rollout.steps == [] and rollout.reward == 1.0


def test_stop_string_of_the_run_holds_where_a_turn_has_none(tokenizer: Tokenizer) -> None:
    rollouts = played(lambda task, reply: float(len(reply)), tokenizer, stop=("7", "e"), max_tokens=60)
    assert any(rollout.stop is StopReason.STOP for rollout in rollouts)


def test_first_messages_of_a_fresh_context_are_read_as_those_of_an_episode() -> None:
    class Text:
        chat_template = "x"
        tool_format = None

        def encode(self, text: str, start: bool = False) -> list[int]:
            return [1] * start + [ord(c) for c in text]

        def decode(self, tokens: Sequence[int]) -> str:
            return "".join(map(chr, tokens))

        def render(self, messages: Sequence[Any], generation: bool = True, tools: Any = None) -> str:
            return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>" * generation

    playing = RunningEpisode(Episode({"id": "0"}, "0", 0), Text())  # type: ignore[arg-type]
    messages = ({"role": "user", "content": "a"},)
    first = playing.read(playing.place(Turn(messages=messages)))
    playing.show(Turn(messages=messages), first, 0.0)
    playing.reply(Completion(0, [98], [0.0], "b", StopReason.LENGTH, 0), 0.0)
    assert playing.read(playing.place(Turn(messages=messages, fresh=True))) == first
