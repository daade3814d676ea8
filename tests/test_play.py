"""Episodes: what the policy sampled is trainable, what it was shown is not, and timing changes nothing."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from conftest import CHATML, tiny

from posttrain.engines.local import LocalEngine
from posttrain.envs.chat import Conversation
from posttrain.envs.play import Episode, play
from posttrain.envs.pool import EnvPool
from posttrain.models.tokenizer import Tokenizer
from posttrain.seeds import seed_of
from posttrain.types import Completion, Invalid, Reply, Rollout, Sampling, StopReason, Task, Turn, UserError


def asking(task: Task) -> Generator[Turn | str, Reply, float]:
    """Two tool replies whose text repeats what the policy said, then the length of it all."""
    reply = yield Turn(task["prompt"], stop=("7",))
    total = len(reply)
    for _ in range(2):
        reply = yield f"<info>{reply}</info>"
        total += len(reply)
    return float(total)


def slow(task: Task) -> Generator[Turn | str, Reply, float]:
    """The same, answering after a delay that differs from task to task."""
    reply = yield Turn(task["prompt"], stop=("7",))
    total = len(reply)
    for _ in range(2):
        time.sleep(0.004 * (2 - int(task["id"]) % 3))
        reply = yield f"<info>{reply}</info>"
        total += len(reply)
    return float(total)


def run(
    env: Any,
    tokenizer: Tokenizer,
    count: int = 12,
    workers: int = 0,
    context: int = 256,
    too_long: Any = "refuse",
    **how: Any,
) -> list[Rollout]:
    model = tiny(tokenizer, context=context)
    engine = LocalEngine(model, tokenizer, slots=5)
    episodes = [Episode({"id": str(i // 3), "prompt": f"say {i // 3}="}, str(i // 3), seed_of(i)) for i in range(count)]
    with EnvPool(env, workers) as pool:
        return play(episodes, pool, engine, tokenizer, Sampling(**{"max_tokens": 9, **how}), context, too_long)


def test_only_what_the_policy_sampled_is_trainable(tokenizer: Tokenizer) -> None:
    for rollout in run(asking, tokenizer):
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
    rollouts = run(asking, tokenizer)
    for id, rollout in enumerate(rollouts):
        (transcript,) = rollout.transcripts
        kept = [transcript.tokens[i] for i in transcript.scored.tolist()]
        assert kept == [t for c in seen if c.id == id for t in c.tokens]


def test_outcome_does_not_depend_on_the_timing_of_environments(tokenizer: Tokenizer) -> None:
    inline, workers = run(asking, tokenizer), run(slow, tokenizer, workers=2)
    for a, b in zip(inline, workers, strict=True):
        assert a.transcripts[0].tokens == b.transcripts[0].tokens
        assert a.transcripts[0].logp == b.transcripts[0].logp
        assert a.reward == b.reward


def test_stop_string_of_a_turn_ends_the_reply(tokenizer: Tokenizer) -> None:
    replies = []

    def env(task: Task) -> Generator[Turn, Reply, float]:
        reply = yield Turn(task["prompt"], stop=("7", "e"), max_tokens=60)
        replies.append(reply)
        return 0.0

    run(env, tokenizer)
    stopped = [r for r in replies if r.stop is StopReason.STOP]
    assert stopped and all(r[-1] in "7e" and not set(r[:-1]) & set("7e") for r in stopped)


def test_step_rewards_are_kept_with_their_place_and_add_up(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn, Reply, float]:
        yield Turn(task["prompt"])
        yield Turn("more", reward=0.5)
        return 1.0

    for rollout in run(env, tokenizer):
        assert rollout.reward == 1.5 and len(rollout.steps) == 1
        position, reward = rollout.steps[0]
        assert reward == 0.5 and 0 < position < rollout.n_sampled


def test_first_prompt_beyond_the_context_is_the_users_mistake(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="task '0'.*context holds 6 tokens"):
        run(lambda task, reply: 0.0, tokenizer, context=6)


def test_first_prompt_beyond_the_context_is_invalid_or_cut_where_that_is_wanted(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield "=".join(map(str, range(int(task["id"]), 40)))
        return 1.0

    whole = run(env, tokenizer, context=200, max_tokens=2)
    skipped = run(env, tokenizer, context=60, max_tokens=2, too_long="skip")
    assert all(isinstance(r.reward, Invalid) and "context holds 60" in r.reward.reason for r in skipped)
    for most, length in ((2, 58), (50, 30)):  # room for the reply, but half of the context for the prompt
        cut = run(env, tokenizer, context=60, max_tokens=most, too_long="truncate")
        for one, other in zip(cut, whole, strict=True):
            prompt = other.transcripts[0].tokens[: -other.n_sampled]
            kept = one.transcripts[0].tokens[: -one.n_sampled]
            assert one.reward == 1.0 and len(kept) == length and kept == [prompt[0], *prompt[-length + 1 :]]


def test_later_turn_beyond_the_context_gets_an_empty_reply_and_a_score(tokenizer: Tokenizer) -> None:
    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield Turn(task["prompt"])
        reply = yield "x" * 30
        return -1.0 if reply == "" and reply.stop is StopReason.CONTEXT else 1.0

    for rollout in run(env, tokenizer, context=30, max_tokens=3):
        assert rollout.reward == -1.0 and rollout.stop is StopReason.CONTEXT and rollout.n_sampled <= 3


def test_environment_that_asks_for_ever_is_invalid(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.envs.play.MAX_TURNS", 3)

    def env(task: Task) -> Generator[Turn | str, Reply, float]:
        yield Turn(task["prompt"])
        while True:
            yield "again"

    rollouts = run(env, tokenizer, max_tokens=2)
    assert all(isinstance(r.reward, Invalid) and "3 turns" in r.reward.reason for r in rollouts)


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
    assert conversation.messages == messages


def test_seeds_differ_in_every_part_and_fit_an_int64() -> None:
    seeds = {seed_of(a, b, c) for a in range(5) for b in ("x", "y") for c in range(20)}
    assert len(seeds) == 200 and all(0 <= s < 2**63 for s in seeds)
