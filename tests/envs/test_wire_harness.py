"""Agents that speak Messages or Responses are trained token by token, exactly as those that speak Chat Completions."""

from __future__ import annotations

from typing import Any

import harnesses
import pytest
import wire_harnesses
from conftest import CHATML
from episodes import episodes, played, said
from served import TOOLS, Scripted

from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import Sampling, StopReason
from posttrain.envs.bridges.harness import PolicyEndpoint
from posttrain.envs.check import check
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.player import EpisodeLimits, Player
from posttrain.models.tokenizer.tokenizer import Tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    tokenizer = Tokenizer.train(["say go on 0123456789=.\n"], 300, "bpe", SPECIAL)
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.mark.parametrize("name", ["messages", "responses", "responses_by_id"])
def test_a_harness_is_the_environment_that_says_the_same(words: Tokenizer, name: str) -> None:
    expected = said(played(harnesses.by_hand, words))
    found = played(getattr(wire_harnesses, name), words)
    assert said(found) == expected
    assert all(len(rollout.transcripts) == 1 for rollout in found)


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "fox"}}\n</tool_call>'
REPLIES = [
    f"<think>\nHm.\n</think>\n\nI look.\n{CALL}<|im_end|>",
    f"{CALL}\n{CALL}<|im_end|>",
    "<think>\nNow I know.\n</think>\n\ndone<|im_end|>",
]


def scripted(env: Any, template: str = TOOLS, replies: list[str] = REPLIES) -> tuple[Tokenizer, Rollout]:
    """An episode in which the policy writes these replies."""
    tokenizer = Tokenizer.train(["look up a word 0123456789 I Hm. done know"], 300, "bpe", SPECIAL)
    tokenizer.chat_template = template
    with EnvPool(env, 0) as pool:
        [rollout] = Player(pool, Scripted(tokenizer, replies), tokenizer, Sampling(), 4096).play(episodes(1))
    assert isinstance(rollout, Rollout)
    return tokenizer, rollout


def check_tokens(tokenizer: Tokenizer, rollout: Rollout) -> None:
    """One transcript, in which exactly the tokens of the replies are trained, as they were sampled."""
    assert rollout.reward == 3.0 and rollout.rewards == {"thoughts": 2.0}, rollout.reward
    [transcript] = rollout.transcripts
    kinds = [SpanKind.PROMPT, *[SpanKind.SAMPLED, SpanKind.TOOL] * 2, SpanKind.SAMPLED]
    assert [span.kind for span in transcript.spans] == kinds
    sampled = [transcript.tokens[s.start : s.start + s.length] for s in transcript.spans if s.kind is SpanKind.SAMPLED]
    assert sampled == [tokenizer.encode(reply) for reply in REPLIES]
    assert transcript.n_scored == transcript.n_sampled == sum(map(len, sampled))
    others = "".join(tokenizer.decode(transcript.tokens[s.start : s.start + s.length])
                     for s in transcript.spans if s.kind is not SpanKind.SAMPLED)  # fmt: skip
    assert others.count("fox is a word") == 3 and "I look" not in others and "Hm" not in others


@pytest.mark.parametrize("name", ["messages_with_tools", "responses_with_tools", "responses_agent"])
def test_calls_and_thoughts_come_back_as_exactly_the_tokens_that_were_sampled(name: str) -> None:
    check_tokens(*scripted(getattr(wire_harnesses, name)))


def test_anthropics_own_client_is_trained_on_exactly_the_tokens_that_were_sampled() -> None:
    pytest.importorskip("anthropic", reason="Anthropic's client is not installed: pip install anthropic")
    check_tokens(*scripted(wire_harnesses.anthropic_agent))


@pytest.mark.parametrize("api", ["Responses", "ChatCompletions"])
def test_an_agent_of_the_agents_sdk_is_trained_on_its_replies_and_not_on_results_of_its_tool(api: str) -> None:
    pytest.importorskip("agents", reason="OpenAI's Agents SDK is not installed: pip install openai-agents")
    check_tokens(*scripted(wire_harnesses.sdk_agent(api)))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("api", ["messages", "responses"])
@pytest.mark.parametrize("opened", [True, False])
def test_thoughts_that_come_back_continue_the_reply_and_without_them_it_is_another(
    api: str, keep: bool, opened: bool
) -> None:
    replies = [f"{'<think>' * opened}\nHm.\n</think>\n\nyes<|im_end|>", "so<|im_end|>"]
    tokenizer, rollout = scripted(wire_harnesses.thinking(api, keep), replies=replies)
    assert rollout.reward == 1.0 and len(rollout.transcripts) == (1 if keep else 2), rollout.reward
    sampled = [t.tokens[s.start : s.start + s.length] for t in rollout.transcripts
               for s in t.spans if s.kind is SpanKind.SAMPLED]  # fmt: skip
    expected = replies if keep else [replies[0]] * 2  # a context begins with the first of the script
    assert sampled == [tokenizer.encode(reply) for reply in expected]


@pytest.mark.parametrize("name", ["messages_branches", "responses_branches"])
def test_helpers_and_summaries_are_contexts_of_their_own_as_in_chat(words: Tokenizer, name: str) -> None:
    expected, found = (played(getattr(wire_harnesses, one), words, 3) for one in ("chat_branches", name))
    assert said(found) == said(expected)
    for rollout in found:
        assert [sum(s.kind is SpanKind.SAMPLED for s in t.spans) for t in rollout.transcripts] == [3, 1, 1]
        assert all(t.n_scored == t.n_sampled > 0 for t in rollout.transcripts)


def test_refusals_come_in_the_form_of_each_api_and_leave_nothing_in_the_transcripts(words: Tokenizer) -> None:
    for rollout in played(wire_harnesses.messages_refusals, words, 2, context=128):
        assert rollout.reward == 1.0
        [transcript] = rollout.transcripts
        assert transcript.n_sampled == rollout.rewards["tokens"] and [s.kind for s in transcript.spans] == [
            SpanKind.PROMPT, SpanKind.SAMPLED,
        ]  # fmt: skip


def test_an_episode_that_has_run_out_gives_empty_messages(words: Tokenizer) -> None:
    for rollout in played(wire_harnesses.insatiable_messages, words, 3, limits={"bounds": EpisodeLimits(turns=3)}):
        assert rollout.stop is StopReason.TURNS and rollout.reward == 3.0 and len(rollout.transcripts) == 1


def test_tokens_of_a_prompt_are_counted_where_the_tokenizer_is_and_cost_no_reply() -> None:
    refusing = "{% if messages[0].content == 'unfit' %}{{ raise_exception('unfit') }}{% endif %}"
    _, rollout = scripted(wire_harnesses.counting, refusing + TOOLS)
    assert rollout.reward == 1.0 and rollout.rewards["counted"] == rollout.rewards["read"] > 0, rollout.reward
    [transcript] = rollout.transcripts
    assert [span.kind for span in transcript.spans] == [SpanKind.PROMPT, SpanKind.SAMPLED]


def test_a_harness_that_counts_tokens_can_be_checked_without_a_model() -> None:
    report = check(wire_harnesses.only_counting, [{"id": "a", "prompt": "say"}], ["x"])
    assert not report.made_up and not report.asked
    assert [case.result.reward for case in report.cases if case.result] == [1.0]


def test_programs_find_the_policy_by_the_variables_of_both_apis() -> None:
    environment = PolicyEndpoint("http://127.0.0.1:1/key/v1").environment
    assert environment["OPENAI_BASE_URL"] == "http://127.0.0.1:1/key/v1"
    assert environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1/key" and environment["ANTHROPIC_API_KEY"]
