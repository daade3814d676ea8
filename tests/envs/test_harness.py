"""A program that speaks OpenAI's API is an environment like any other: same tokens, same bounds, same verdicts."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import harnesses
import pytest
from conftest import CHATML, tiny
from episodes import episodes, played, said
from processes import descendants
from served import TOOLS, Scripted

from posttrain.core.protocols import Engine
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import Completion, Invalid, InvalidKind, Reply, Sampling, StopReason, Turn
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.serving.requests import PolicyRequest
from posttrain.envs.bridges.harness import PolicyEndpoint, _Session, harness
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.player import EpisodeLimits, Player
from posttrain.models.tokenizer.tokenizer import Tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    tokenizer = Tokenizer.train(["say go on 0123456789=.\n"], 300, "bpe", SPECIAL)
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="module")
def expected(words: Tokenizer) -> list[Any]:
    """Of the environment that does by hand what the harnesses do."""
    return said(played(harnesses.by_hand, words))


@pytest.mark.parametrize(("name", "workers"), [("agent", 2), ("blocking", 0), ("program", 0)])
def test_a_harness_is_the_environment_that_says_the_same(
    words: Tokenizer, expected: list[Any], name: str, workers: int
) -> None:
    found = played(getattr(harnesses, name), words, workers=workers)
    assert said(found) == expected
    assert all(len(rollout.transcripts) == 1 for rollout in found)


def test_it_is_played_alike_in_this_process_and_leaves_no_server(words: Tokenizer, expected: list[Any]) -> None:
    addresses: list[str] = []

    @harness(sampling="ignore")
    async def noting(task: Any, endpoint: PolicyEndpoint) -> float:
        addresses.append(endpoint.url)
        return await harnesses.agent.stands_for(task, endpoint)  # type: ignore[attr-defined,no-any-return]

    assert said(played(noting, words)) == expected
    assert len(set(addresses)) == len(addresses) == len(expected)
    for port in {int(address.split(":")[2].split("/")[0]) for address in addresses}:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def asking(**how: Any) -> Any:
    """A harness whose request says how it is to be sampled; its reward is 1 where that is answered."""

    async def one(task: Any, endpoint: PolicyEndpoint) -> float:
        from openai import AsyncOpenAI, BadRequestError

        messages: Any = [{"role": "user", "content": task["prompt"]}]
        async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key) as client:
            try:
                await client.chat.completions.create(model="any", messages=messages, max_tokens=3, **how)
            except BadRequestError as error:
                assert "the run sets the sampling of replies" in str(error) and next(iter(how)) in str(error)
                return 0.0
        return 1.0

    return one


@pytest.mark.parametrize("how", [{"temperature": 0.2}, {"presence_penalty": 0.5}, {"top_p": 0.5}, {"seed": 1}])
def test_whatever_says_how_to_sample_is_refused_or_ignored_alike(words: Tokenizer, how: dict[str, Any]) -> None:
    refused, ignored = harness(asking(**how)), harness(sampling="ignore")(asking(**how))
    for env, reward in ((refused, 0.0), (ignored, 1.0), (harness(asking(presence_penalty=0)), 1.0)):
        [rollout] = played(env, words, 1)
        assert rollout.reward == reward


def play(words: Tokenizer, env: Any, count: int = 4, workers: int = 0, seconds: float = 20.0, **limits: Any) -> Any:
    engine = limits.pop("engine", None) or LocalEngine(tiny(words, context=128), words, slots=4)
    more = limits.pop("task", {})
    asked = [
        replace(e, task={**e.task, **more, "id": str(n), "ids": [5, 6, 7 + n]}) for n, e in enumerate(episodes(count))
    ]
    with EnvPool(env, workers, seconds) as pool:
        return Player(pool, engine, words, Sampling(max_tokens=9), 128, **limits).play(asked)


def test_token_ids_come_back_as_one_transcript_with_the_engines_own_log_probabilities(words: Tokenizer) -> None:
    for rollout in play(words, harnesses.in_tokens):
        [transcript] = rollout.transcripts
        assert [span.kind for span in transcript.spans][:3] == [SpanKind.PROMPT, SpanKind.SAMPLED, SpanKind.OBSERVATION]
        assert rollout.rewards["tokens"] == len(transcript)
        assert rollout.rewards["logp"] == pytest.approx(sum(transcript.logp), abs=1e-9)


def test_an_episode_that_has_run_out_gives_empty_replies_and_is_still_scored(words: Tokenizer) -> None:
    rollouts = play(words, harnesses.insatiable, bounds=EpisodeLimits(turns=3))
    assert all(rollout.stop is StopReason.TURNS for rollout in rollouts)
    assert [rollout.reward for rollout in rollouts] == [3.0, 3.0, 3.0, 0.25]  # the last one failed after it was told


def test_a_full_context_may_be_told_as_servers_tell_it(words: Tokenizer) -> None:
    for rollout in play(words, harnesses.compacting, 2):
        assert rollout.rewards["refusals"] >= 1 and len(rollout.transcripts) == 1 + rollout.rewards["refusals"]
        assert max(map(len, rollout.transcripts)) <= 128


def test_a_harness_that_fails_makes_its_episode_invalid_alone_and_leaves_nothing_behind(words: Tokenizer) -> None:
    began, before = time.monotonic(), set(descendants(os.getpid()))
    rollouts = play(words, harnesses.failing, 5, workers=1, seconds=1.0)
    kinds = [rollout.reward.kind for rollout in rollouts]
    assert kinds == [
        InvalidKind.RAISED, InvalidKind.TIMEOUT, InvalidKind.TIMEOUT, InvalidKind.REPORTED, InvalidKind.UNREADABLE,
    ]  # fmt: skip
    assert "bad thing (harnesses.py:" in rollouts[0].reward.reason
    while set(descendants(os.getpid())) - before and time.monotonic() - began < 30:
        time.sleep(0.05)
    assert not set(descendants(os.getpid())) - before


def test_a_program_of_an_episode_that_is_over_is_killed_while_others_go_on() -> None:
    with EnvPool(harnesses.failing, 1, seconds=1.0) as pool:
        pool.start(0, {"id": "2"})
        [(_, turn)] = pool.poll(20)
        before = set(descendants(os.getpid()))
        pool.send(0, Reply("x"))
        pool.poll(0.3)
        assert len(set(descendants(os.getpid())) - before) == 1, "it sleeps"
        [(_, done)] = pool.poll(20)
        assert isinstance(turn, Turn) and done.reward.kind is InvalidKind.TIMEOUT  # type: ignore[union-attr]
        began = time.monotonic()
        while set(descendants(os.getpid())) - before and time.monotonic() - began < 20:
            time.sleep(0.02)
        assert set(descendants(os.getpid())) == before


class Waiting:
    """An engine that samples nothing until a file is there, and says by another that it was asked."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def poll(self) -> list[Completion]:
        (self.folder / "sampling").touch()
        if not (self.folder / "given up").exists():
            time.sleep(0.01)
            return []
        return self.engine.poll()


def test_who_asks_again_after_a_lost_connection_gets_the_reply_that_was_sampled(
    words: Tokenizer, tmp_path: Path
) -> None:
    engine = Waiting(LocalEngine(tiny(words, context=128), words, slots=4), tmp_path)
    [rollout] = play(words, harnesses.impatient, 1, workers=1, engine=engine, task={"folder": str(tmp_path)})
    sampled = [turn for turn in rollout.turns if turn.kind is SpanKind.SAMPLED]
    assert len(sampled) == 2, "the first request was asked twice, and answered once"
    assert rollout.rewards["same"] == 0.0, "a request that was answered is sampled anew"


def test_who_asks_again_for_several_replies_gets_each_of_them_in_its_place() -> None:
    async def asked_twice() -> list[str]:
        session, asked = _Session(PolicyEndpoint("http://x/v1"), "error", "ignore"), PolicyRequest(("say",), count=3)
        lost = asyncio.ensure_future(session.replies("say", asked))
        while session._asked.qsize() < 3:
            await asyncio.sleep(0)
        lost.cancel()
        with suppress(asyncio.CancelledError):
            await lost
        for text in "abc":
            session.answer(session._asked.get_nowait(), Reply(text))
        async with asyncio.timeout(5):
            again = await session.replies("say", asked)
        assert session._asked.empty(), "nothing is sampled a second time"
        return [reply.completion.text for reply in again]

    assert asyncio.run(asked_twice()) == ["a", "b", "c"]


def test_requests_of_an_episode_that_is_over_are_refused_and_do_not_wait(tmp_path: Path) -> None:
    def appears(name: str) -> Path:
        began = time.monotonic()
        while not (tmp_path / name).exists() and time.monotonic() - began < 20:
            time.sleep(0.01)
        return tmp_path / name

    with EnvPool(harnesses.leaving, 1, seconds=20) as pool:
        pool.start(0, {"folder": str(tmp_path)})
        [(_, turn)] = pool.poll(20)
        assert isinstance(turn, Turn) and appears("left").exists()
        pool.send(0, Reply("x"))
        [(_, done)] = pool.poll(20)
        assert done.reward == 1.0  # type: ignore[union-attr]
        (tmp_path / "over").touch()
        assert [appears(str(number)).read_text() for number in range(3)] == ["200", "410", "410"]


def test_only_an_episodes_own_address_leads_to_it(words: Tokenizer) -> None:
    found = play(words, harnesses.late, 2)
    assert [(r.rewards["status"], r.rewards["models"]) for r in found] == [(410.0, 1.0)] * 2
    assert all(rollout.rewards["key"] >= 22 for rollout in found)  # 128 bits


def test_calls_of_tools_go_out_and_their_answers_come_back_into_one_transcript() -> None:
    tokenizer = Tokenizer.train(["look up a word 0123456789"], 300, "bpe", SPECIAL)
    tokenizer.chat_template = TOOLS
    call = '<tool_call>\n{"name": "look_up", "arguments": {"word": "fox"}}\n</tool_call>'
    engine = Scripted(tokenizer, [f"I look.\n{call}<|im_end|>", f"{call}\n{call}<|im_end|>", "done<|im_end|>"])
    with EnvPool(harnesses.with_tools, 0) as pool:
        [rollout] = Player(pool, engine, tokenizer, Sampling(), 4096).play(episodes(1))
    assert isinstance(rollout, Rollout) and rollout.rewards == {"contents": 11.0}, rollout.reward
    assert rollout.reward == 3.0
    [transcript] = rollout.transcripts
    assert [span.kind for span in transcript.spans] == [
        SpanKind.PROMPT, SpanKind.SAMPLED, SpanKind.TOOL, SpanKind.SAMPLED, SpanKind.TOOL, SpanKind.SAMPLED,
    ]  # fmt: skip
    shown = tokenizer.decode(transcript.tokens)
    assert shown.count("fox is a word") == 3 and '"name": "look_up"' in shown
    assert [len(turn.calls) for turn in rollout.turns if turn.kind is SpanKind.SAMPLED] == [1, 2, 0]


def test_a_harness_keeps_its_name_and_travels_to_workers() -> None:
    assert harnesses.agent.__name__ == "agent" and not hasattr(harnesses.agent, "__wrapped__")

    @harness
    async def inner(task: Any, endpoint: Any) -> float:
        return float(task["n"])

    with EnvPool(inner, 1) as pool:
        pool.start(0, {"n": 3})
        [(_, event)] = pool.poll(20)
    assert event.reward == 3.0 and not isinstance(event.reward, Invalid)  # type: ignore[union-attr]
