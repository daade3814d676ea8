"""Plays episodes: environments ask, the engine answers, transcripts grow, rewards come back.

Sampling, tools and scoring overlap, yet the outcome does not depend on timing: whenever an environment may ask again,
all of them are heard before the engine goes on, in the order of the episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from posttrain.envs.chat import Conversation, Texts
from posttrain.envs.pool import Done, EnvPool
from posttrain.protocols import Engine
from posttrain.seeds import seed_of
from posttrain.types import Completion, Invalid, Reply, Rollout, Sampling, StopReason, Task, Transcript, Turn, UserError

MAX_TURNS = 64  # an environment that never returns would play for ever


@dataclass(frozen=True)
class Episode:
    """One rollout to be played."""

    task: Task
    group: str
    seed: int


class _Playing:
    def __init__(self, episode: Episode, tokenizer: Texts) -> None:
        self.episode = episode
        self.conversation = Conversation(tokenizer)
        self.transcript = Transcript()
        self.turns = 0
        self.last: Completion | None = None
        self.steps: list[tuple[int, float]] = []
        self.prompt = ""
        self.replies: list[str] = []

    def rollout(self, done: Done) -> Rollout:
        reward = done.reward
        if not isinstance(reward, Invalid):
            reward += sum(r for _, r in self.steps)
        return Rollout(
            task=self.episode.task,
            group=self.episode.group,
            transcripts=[self.transcript],
            reward=reward,
            rewards=done.rewards,
            steps=self.steps,
            stop=self.last.stop if self.last else StopReason.EOS,
            text="".join(self.replies),
            prompt=self.prompt,
        )


def play(
    episodes: Sequence[Episode],
    pool: EnvPool,
    engine: Engine,
    tokenizer: Texts,
    sampling: Sampling,
    context: int,
    too_long: Literal["skip", "truncate", "refuse"] = "refuse",
) -> list[Rollout]:
    """The rollouts of these episodes, in their order. `context`: tokens of prompt and replies together that fit.

    A first prompt that leaves no room for a reply is Invalid ("skip"), loses its beginning ("truncate") or raises
    UserError ("refuse"), as one of no tokens always does. A later turn that does not fit is answered with an empty reply
    whose stop reason is CONTEXT, so that the environment can still score what there is.
    """
    playing = [_Playing(e, tokenizer) for e in episodes]
    finished: dict[int, Rollout] = {}
    asked: dict[tuple[str | None, int], list[int]] = {}  # a group's prompt is tokenised once
    sampled = 0  # requests that the engine still has

    def show(index: int, turn: Turn) -> None:
        nonlocal sampled
        p = playing[index]
        if turn.reward:
            p.steps.append((p.transcript.n_sampled, turn.reward))
        key = (turn.text if turn.messages is None else None, p.turns)
        if p.turns == 0 and key[0] is not None:
            if key not in asked:
                asked[key] = p.conversation.show(turn, None)
            p.conversation.first = False
            tokens = asked[key]
        else:
            tokens = p.conversation.show(turn, p.last)
        if p.turns == 0 and len(tokens) >= context and too_long == "truncate":
            tokens = cut_prompt(tokens, context, sampling.max_tokens)
        if p.turns == 0:
            p.prompt = turn.text if turn.messages is None else "\n".join(m["content"] for m in turn.messages)  # type: ignore[assignment]
        p.transcript.observe(tokens)
        p.turns += 1
        if p.turns > MAX_TURNS:
            finished[index] = p.rollout(Done(Invalid(f"the environment did not return within {MAX_TURNS} turns")))
            pool.drop(index)
            return
        if len(p.transcript) >= context and p.turns > 1:
            p.last = replace(p.last, stop=StopReason.CONTEXT) if p.last else None
            pool.send(index, Reply("", StopReason.CONTEXT))
            return
        if not p.transcript.tokens or len(p.transcript) >= context:
            what = "is empty" if not p.transcript.tokens else f"has {len(p.transcript)} tokens"
            holds = f"the model's context holds {context} tokens with the reply"
            if p.transcript.tokens and too_long == "skip":
                finished[index] = p.rollout(Done(Invalid(f"the prompt {what}; {holds}")))
                pool.drop(index)
                return
            raise UserError(
                f"the prompt of task {p.episode.task.get('id')!r} {what}; {holds}: shorten it or leave the row out"
            )
        budget = min(sampling.max_tokens, turn.max_tokens or sampling.max_tokens)
        seed = p.episode.seed if p.turns == 1 else seed_of(p.episode.seed, p.turns)
        stop = turn.stop or sampling.stop
        engine.submit(index, p.transcript.tokens, replace(sampling, max_tokens=budget, stop=stop, seed=seed))
        sampled += 1

    def hear() -> None:
        """Take in what environments answered: at once if the engine has work that no answer can change, else all of it."""
        events = pool.poll(0 if pool.single_turn and sampled else None)
        while pool.pending and not pool.single_turn:
            events += pool.poll(None)
        for index, event in sorted(events, key=lambda pair: pair[0]):
            if isinstance(event, Done):
                finished.setdefault(index, playing[index].rollout(event))
            elif index not in finished:
                show(index, event)

    for index, p in enumerate(playing):
        pool.start(index, p.episode.task)
    while len(finished) < len(playing):
        while pool.pending and (not sampled or not pool.single_turn):
            hear()
        if pool.pending:
            hear()
        for completion in sorted(engine.poll(), key=lambda c: c.id) if sampled else ():
            sampled -= 1
            p = playing[completion.id]
            p.transcript.sample(completion)
            p.last = completion
            p.replies.append(completion.text)
            pool.send(completion.id, Reply(completion.text, completion.stop))
    return [finished[index] for index in range(len(playing))]


def cut_prompt(tokens: Sequence[int], context: int, max_tokens: int) -> list[int]:
    """A prompt that is too long without its beginning, so that a whole reply fits, or half of the context at least.

    The first token stays: models rely on the one that opens a context.
    """
    length = max(context // 2, context - max_tokens)
    return [*tokens[:1], *tokens[len(tokens) - length + 1 :]]
