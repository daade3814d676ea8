"""What a turn says as a whole is compared with the contexts of its episode: only what is new is observed."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
from conftest import CHATML, tiny
from episodes import enacted, episodes, played, said, whole
from served import TOOLS, Scripted

from posttrain.core.rollouts import Rollout
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
    ToolCall,
    Turn,
)
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.envs.play.contexts import Context, placed, positions
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.player import EpisodeLimits, Player
from posttrain.models.tokenizer.tokenizer import Tokenizer

Playing = Generator[Turn, Reply, Any]


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    tokenizer = Tokenizer.train(["say go on 0123456789=.\n"], 300, "bpe", ("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = CHATML
    return tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def steadily(task: Task) -> Playing:
    reply = yield Turn(messages=[user(task["prompt"])], max_tokens=7)
    reply = yield Turn(messages=[user("go on")], max_tokens=7)
    reply = yield Turn(messages=[user("on")], max_tokens=7)
    return float(len(reply))


def all_of_it(task: Task) -> Playing:
    """The same, said as programs say it."""
    messages = [user(task["prompt"])]
    reply = yield Turn(messages=messages, whole=True, max_tokens=7)
    for more in ("go on", "on"):
        messages = [*messages, {"role": "assistant", "content": reply.strip()}, user(more)]
        reply = yield Turn(messages=messages, whole=True, max_tokens=7)
    return float(len(reply))


def test_a_conversation_that_is_said_as_a_whole_is_the_one_that_goes_on(words: Tokenizer) -> None:
    assert said(played(all_of_it, words)) == said(played(steadily, words))


def in_tokens(task: Task) -> Playing:
    """All of it as token ids, which the environment knows from its replies."""
    tokens = [int(id) for id in task["ids"]]
    reply = yield Turn(tokens=tokens, max_tokens=7)
    for more in ([40, 41], [42]):
        assert reply.sampled is not None and reply.read == len(tokens)
        tokens = [*tokens, *reply.sampled.tokens, *more]
        reply = yield Turn(tokens=tokens, max_tokens=7)
    return float(len(reply))


def play(words: Tokenizer, env: Any, count: int = 6, workers: int = 0, **limits: Any) -> list[Rollout]:
    """Episodes whose tasks are token ids."""
    engine = LocalEngine(tiny(words, context=128), words, slots=4)
    asked = [replace(e, task={**e.task, "ids": [5, 6, 7 + n]}) for n, e in enumerate(episodes(count))]
    with EnvPool(env, workers) as pool:
        return Player(pool, engine, words, Sampling(max_tokens=9), 128, **limits).play(asked)


def test_token_ids_that_go_on_are_observations_and_what_was_sampled_stays_sampled(words: Tokenizer) -> None:
    for number, rollout in enumerate(play(words, in_tokens)):
        [transcript] = rollout.transcripts
        kinds = [span.kind for span in transcript.spans]
        assert kinds == [SpanKind.PROMPT, *[SpanKind.SAMPLED, SpanKind.OBSERVATION] * 2, SpanKind.SAMPLED]
        assert transcript.tokens[:3] == [5, 6, 7 + number]
        seen = [transcript.tokens[s.start : s.start + s.length] for s in transcript.spans]
        assert seen[2] == [40, 41] and seen[4] == [42]
        assert transcript.n_scored == transcript.n_sampled == rollout.n_sampled
        assert [turn.text for turn in rollout.turns][2] == words.decode([40, 41])


def two_at_once(task: Task) -> Playing:
    """Two conversations that take turns, as an agent and its helper have them."""
    a, b = [user(task["prompt"])], [user("go")]
    said: list[str] = []
    for turn in range(3):
        for number, messages in enumerate((a, b)):
            reply = yield Turn(messages=list(messages), whole=True, max_tokens=5, reward=float(turn > 0))
            said.append(str(reply))
            messages += [{"role": "assistant", "content": str(reply)}, user(f"on {number}")]
    return Graded(1.0, [SpanReward(1, 0.25, 2), SpanReward(1, 0.5, 3)])


def test_conversations_that_take_turns_keep_one_transcript_each(words: Tokenizer) -> None:
    for rollout in played(two_at_once, words, context=256):
        assert len(rollout.transcripts) == 2
        assert [turn.transcript for turn in rollout.turns] == [0, 0, 1, 1] * 3
        replies = [turn for turn in rollout.turns if turn.kind is SpanKind.SAMPLED]
        for turn in replies:
            tokens = rollout.transcripts[turn.transcript].tokens[turn.start : turn.start + turn.length]
            assert words.decode(tokens).startswith(turn.text)
        assert rollout.n_scored == rollout.n_sampled == sum(turn.length for turn in replies)
        ends = {(t.transcript, t.start): t.length for t in replies}
        own = [[n for (place, _), n in sorted(ends.items()) if place == which] for which in (0, 1)]
        assert sorted(rollout.steps) == sorted(_earned(rollout, own))
        assert rollout.reward == 1.0 + 4.0 + 0.75


def _earned(rollout: Rollout, own: list[list[int]]) -> list[tuple[int, float]]:
    """The steps of `two_at_once`: each turn but the first two rewards the reply that stands before it in time."""
    before = [0, sum(own[0])]
    counts, found, last = [0, 0], [], 0
    for turn in rollout.turns:
        if turn.kind is SpanKind.SAMPLED:
            counts[turn.transcript] += 1
            last = turn.transcript
        elif turn.reward:
            found.append((before[last] + sum(own[last][: counts[last]]), turn.reward))
    found.append((own[0][0] + 1, 0.25))
    found.append((before[1] + own[1][0] + 1, 0.5))
    return found


def changed(task: Task) -> Playing:
    """Forgets what was said."""
    reply = yield Turn(messages=[user(task["prompt"])], whole=True, max_tokens=5)
    told = [user(task["prompt"]), {"role": "assistant", "content": "something else"}, user("on")]
    reply = yield Turn(messages=told, whole=True, max_tokens=5)
    reply = yield Turn(messages=[user(task["prompt"])], whole=True, max_tokens=5)  # the same once more
    return float(len(reply))


def test_what_continues_no_context_begins_one(words: Tokenizer) -> None:
    for rollout in played(changed, words):
        assert len(rollout.transcripts) == 3 and rollout.n_scored == rollout.n_sampled
        first, told, again = rollout.transcripts
        assert first.spans[0].length == again.spans[0].length < told.spans[0].length
        assert all([span.kind for span in t.spans] == [SpanKind.PROMPT, SpanKind.SAMPLED] for t in rollout.transcripts)


def ends_with_a_reply(task: Task) -> Playing:
    messages = [user(task["prompt"])]
    reply = yield Turn(messages=messages, whole=True, max_tokens=5)
    yield Turn(messages=[*messages, {"role": "assistant", "content": str(reply)}], whole=True, max_tokens=5)
    return 0.0


def test_a_conversation_that_ends_with_the_reply_is_shown_anew(words: Tokenizer) -> None:
    for rollout in played(ends_with_a_reply, words):
        assert not isinstance(rollout.reward, Invalid) and len(rollout.transcripts) == 2


def text(task: Task) -> Playing:
    so_far = task["prompt"]
    for _ in range(3):
        reply = yield Turn(text=so_far, whole=True, max_tokens=4)
        so_far += f"{reply}."
    return 0.0


def test_text_goes_on_where_its_tokens_say_all_of_it(words: Tokenizer) -> None:
    for rollout in played(text, words):
        for transcript in rollout.transcripts:
            assert words.decode(transcript.tokens).replace("<|eos|>", "")
        ended = [turn for turn in rollout.turns if turn.kind is SpanKind.SAMPLED][:-1]
        whole = [
            words.decode(rollout.transcripts[t.transcript].tokens[t.start : t.start + t.length]) == t.text
            for t in ended
        ]
        assert len(rollout.transcripts) == 1 + whole.count(False)


def unknown(task: Task) -> Playing:
    reply = yield Turn(tokens=[5, 1 << 20], max_tokens=4)
    return float(len(reply))


def endless(task: Task) -> Playing:
    reply = yield Turn(tokens=[5] * 500, max_tokens=4)
    return float(len(reply))


@pytest.mark.parametrize("too_long", ["skip", "truncate", "refuse"])
def test_token_ids_that_cannot_be_read_make_an_episode_invalid_and_end_no_run(words: Tokenizer, too_long: Any) -> None:
    for env, told in ((unknown, "the model cannot read"), (endless, "has 500 tokens")):
        for rollout in play(words, env, 2, too_long=too_long):
            assert isinstance(rollout.reward, Invalid) and told in rollout.reward.reason


def refused(task: Task) -> Playing:
    yield Turn(
        messages=[{"role": "user", "content": "a"}], whole=True, tools=[{"type": "function", "function": {"name": "f"}}]
    )
    return 1.0


def test_messages_that_a_template_refuses_make_an_episode_invalid_where_a_program_said_them(words: Tokenizer) -> None:
    for rollout in played(refused, words, 2):
        assert isinstance(rollout.reward, Invalid) and "does not show the tool" in rollout.reward.reason


def goes_back(task: Task) -> Playing:
    """Fills one conversation and goes on with another."""
    a, b = [user(task["prompt"])], [user("go")]
    reply = yield Turn(messages=list(b), whole=True, max_tokens=5)
    b += [{"role": "assistant", "content": str(reply)}, user("on")]
    reply = yield Turn(messages=list(a), whole=True, max_tokens=5)
    a += [{"role": "assistant", "content": str(reply)}, user("on " * 200)]
    full = yield Turn(messages=list(a), whole=True, max_tokens=5)
    again = yield Turn(messages=list(a), whole=True, max_tokens=5)
    reply = yield Turn(messages=list(b), whole=True, max_tokens=5)
    return {"full": float(full.stop is again.stop is StopReason.CONTEXT), "other": float(reply.sampled is not None)}


def test_a_context_that_is_full_does_not_end_the_others(words: Tokenizer) -> None:
    for rollout in played(goes_back, words, context=128):
        assert rollout.rewards == {"full": 1.0, "other": 1.0}, rollout.rewards
        assert len(rollout.transcripts) == 2


def shortens_messages(task: Task) -> Playing:
    """Says too much, then less of the same, then goes on."""
    messages = [user(task["prompt"])]
    reply = yield Turn(messages=list(messages), whole=True, max_tokens=5)
    messages.append({"role": "assistant", "content": str(reply)})
    full = yield Turn(messages=[*messages, user("on " * 200)], whole=True, max_tokens=5)
    side = yield Turn(messages=[user("other " * 200)], whole=True, max_tokens=5)
    messages.append(user("on"))
    reply = yield Turn(messages=list(messages), whole=True, max_tokens=5)
    messages += [{"role": "assistant", "content": str(reply)}, user("go")]
    yield Turn(messages=list(messages), whole=True, max_tokens=5)
    return float(full.stop is side.stop is StopReason.CONTEXT)


def shortens_tokens(task: Task) -> Playing:
    reply = yield Turn(tokens=[5, 6, 7], max_tokens=5)
    assert reply.sampled is not None
    tokens = [5, 6, 7, *reply.sampled.tokens]
    full = yield Turn(tokens=[*tokens, *[40] * 200], max_tokens=5)
    side = yield Turn(tokens=[41] * 200, max_tokens=5)
    reply = yield Turn(tokens=[*tokens, 40], max_tokens=5)
    assert reply.sampled is not None
    yield Turn(tokens=[*tokens, 40, *reply.sampled.tokens, 41], max_tokens=5)
    return float(full.stop is side.stop is StopReason.CONTEXT)


@pytest.mark.parametrize("env", [shortens_messages, shortens_tokens])
def test_what_does_not_fit_is_refused_alone_and_a_shorter_one_goes_on(words: Tokenizer, env: Any) -> None:
    for rollout in played(env, words, context=128):
        assert rollout.reward == 1.0
        [transcript] = rollout.transcripts
        kinds = [span.kind for span in transcript.spans]
        assert kinds == [SpanKind.PROMPT, *[SpanKind.SAMPLED, SpanKind.OBSERVATION] * 2, SpanKind.SAMPLED]
        if env is shortens_messages:
            shown = words.decode(transcript.tokens)
            assert (
                shown.count("<|im_start|>user") == 3 and "on on" not in shown and rollout.stop is not StopReason.CONTEXT
            )


def test_a_text_that_does_not_fit_is_forgotten_and_a_shorter_one_goes_on(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Playing:
        yield Turn("a=", stop=(".",), whole=True)
        full = yield Turn("a=1." + "x" * 100, stop=(".",), whole=True)
        assert full.stop is StopReason.CONTEXT
        yield Turn("a=1.+", stop=(".",), whole=True)
        return 1.0

    [rollout] = enacted(env, tokenizer, ["1.", "2."], context=90)
    assert whole(tokenizer, rollout) == ["a=1.+2."]


def talks_of_calls(task: Task) -> Playing:
    """Was told of no tools, so what looks like a call is text."""
    reply = yield Turn(messages=[user(task["prompt"])], whole=True)
    assert reply.tool_calls
    messages = [user(task["prompt"]), {"role": "assistant", "content": str(reply)}, user("on")]
    yield Turn(messages=messages, whole=True)
    return 1.0


def test_a_call_of_no_tool_is_a_reply_like_any_other() -> None:
    tokenizer = Tokenizer.train(["say go on 0123456789=.\n"], 300, "bpe", ("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = TOOLS
    engine = Scripted(tokenizer, ['<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>', "a<|im_end|>"])
    with EnvPool(talks_of_calls, 0) as pool:
        [rollout] = Player(pool, engine, tokenizer, Sampling(), 4096).play(episodes(1))
    assert rollout.reward == 1.0 and len(rollout.transcripts) == 1


def test_bounds_count_over_all_contexts(words: Tokenizer) -> None:
    for rollout in played(changed, words, limits={"bounds": EpisodeLimits(turns=2)}):
        assert rollout.stop is StopReason.TURNS and len(rollout.transcripts) == 2 and rollout.reward == 0.0


def test_positions_count_the_scored_tokens_of_the_transcripts_before(words: Tokenizer) -> None:
    rollout = played(two_at_once, words, 1, context=256)[0]
    first, second = (t.n_scored for t in rollout.transcripts)
    given = [(0, 2, 1.0), (1, 0, 2.0), (1, second, 3.0)]
    assert positions(given, rollout.transcripts) == [(2, 1.0), (first, 2.0), (first + second, 3.0)]


def spoken(words: Tokenizer, asked: list[dict[str, Any]], text: str, turn: Turn | None = None, **how: Any) -> Context:
    """A context of one turn and one reply."""
    context = Context(words)
    turn = turn or Turn(messages=asked)
    context.transcript.observe(context.read(turn), SpanKind.PROMPT)
    tokens = words.encode(text)
    completion = Completion(0, tokens, [0.0] * len(tokens), text, StopReason.STOP, 0)
    context.reply(completion, Reply(text, StopReason.STOP, **how), True, None)
    return context


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def test_of_several_contexts_the_longest_goes_on_and_of_equal_ones_the_latest(words: Tokenizer) -> None:
    asked = [user("say")]
    short, longest = spoken(words, asked, "1"), spoken(words, [*asked, assistant("1"), user("on")], "2")
    whole = Turn(messages=[*asked, assistant("1"), user("on"), assistant("2"), user("go")], whole=True)
    for contexts in ([short, longest], [longest, short]):
        rest, found = placed(whole, contexts)
        assert found is longest and rest.messages == [user("go")]
    first, second = spoken(words, asked, "1"), spoken(words, asked, "1")
    again = Turn(messages=[*asked, assistant("1"), user("go")], whole=True)
    assert placed(again, [first, second])[1] is second
    assert placed(Turn(messages=asked, whole=True), [first]) == (Turn(messages=asked, whole=True, fresh=True), None)


def test_a_reply_is_known_without_its_stop_string_and_by_the_calls_that_could_be_read(words: Tokenizer) -> None:
    asked = [user("say")]
    stopped = spoken(words, asked, "12.", Turn(messages=asked, stop=(".",)))
    for text, same in (("12.", True), (" 12\n", True), ("12", True), ("1", False), ("", False)):
        turn = Turn(messages=[*asked, assistant(text), user("on")], whole=True)
        assert (stopped.rest(turn) is not None) == same
    calls = [
        ToolCall("f", {}, 3, id="aaaaaaaaa"),
        ToolCall("", {}, 5, "odd", "bbbbbbbbb"),
        ToolCall("g", {}, 9, id="c" * 9),
    ]
    shows = Tokenizer(words.backend, words.config, "{{ tools }}" + (words.chat_template or ""))
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    calling = spoken(shows, asked, "12", Turn(messages=asked, tools=tools), tool_calls=calls)
    for ids, same in (("ac", True), ("abc", False), ("a", False), ("ca", False), ("", False)):
        listed = [{"id": id * 9, "function": {"name": "f", "arguments": {}}} for id in ids]
        turn = Turn(messages=[*asked, assistant(None, tool_calls=listed), user("on")], whole=True, tools=tools)
        assert (calling.rest(turn) is not None) == same


def test_a_context_goes_on_with_the_tools_it_began_with_alone(words: Tokenizer) -> None:
    shows = Tokenizer(words.backend, words.config, "{{ tools }}" + (words.chat_template or ""))
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    asked = [user("say")]
    context = spoken(shows, asked, "1", Turn(messages=asked, tools=tools[:1]))
    for given, same in ((tools[:1], True), (tools, False), (None, False)):
        turn = Turn(messages=[*asked, assistant("1"), user("on")], whole=True, tools=given)
        assert (context.rest(turn) is not None) == same
