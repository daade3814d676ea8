"""Holds what is known of an episode that is being played, and decides what becomes of it in the rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.envs.chat import Conversation, Texts
from posttrain.envs.pool import Done
from posttrain.types import (
    Completion,
    Invalid,
    InvalidKind,
    PlayedTurn,
    Reply,
    Rollout,
    Sampling,
    SpanKind,
    SpanReward,
    StopReason,
    Task,
    ToolCall,
    Transcript,
    Turn,
)


@dataclass(frozen=True)
class Episode:
    """One rollout to be played."""

    task: Task
    group: str
    seed: int
    sampling: Sampling | None = None  # instead of the player's


def is_tool(turn: Turn) -> bool:
    """Whether it is the answer of a tool."""
    return turn.tool or (bool(turn.messages) and all(message["role"] == "tool" for message in turn.messages or ()))


def content_text(message: Mapping[str, Any]) -> str:
    """The text of a chat message, whose content may be a list of parts."""
    content = message["content"]
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


@dataclass(frozen=True)
class _Said:
    """A reply as the environment had it."""

    text: str
    tokens: Sequence[int]
    scored: int  # tokens of the rollout that are scored and stand before it
    learned: bool


class Playing:
    """An episode in progress: what was said so far, as text and as tokens."""

    def __init__(self, episode: Episode, tokenizer: Texts) -> None:
        self.episode, self.tokenizer = episode, tokenizer
        self.conversation = Conversation(tokenizer)
        self.transcripts = [Transcript()]
        self.turns: list[PlayedTurn] = []
        self.replies: list[_Said] = []
        self.answers: list[tuple[str, Any]] = []  # of services, each with the name of the service
        self.asks = ""  # the service that was asked last
        self.began = 0.0  # when, by the clock that the player reads
        self.tool_answers = 0  # that were shown
        self.steps: list[tuple[int, float]] = []  # (scored tokens up to its end, step reward)
        self.told = False  # that it has run out of something, since its context last began
        self.asked_in_vain = 0  # times, over all contexts
        self._learn = True  # whether the next reply is learned from
        self._last: Completion | None = None  # of this context
        self.stop = StopReason.EOS

    @property
    def n_sampled(self) -> int:
        return sum(t.n_sampled for t in self.transcripts)

    @property
    def n_scored(self) -> int:
        return sum(t.n_scored for t in self.transcripts)

    def read(self, turn: Turn) -> list[int]:
        """The tokens that put this turn before the policy."""
        if turn.fresh and self.turns:
            self.conversation, self._last = Conversation(self.tokenizer), None
        return self.conversation.show(turn, self._last)

    def show(self, turn: Turn, tokens: Sequence[int], seconds: float, cut: int = 0) -> None:
        """The policy sees these tokens of the turn: none where it is not asked any more. `cut`: so many are left out."""
        if turn.reward and not self.told:  # an empty reply after the end earns nothing
            self.steps.append((self.n_scored, turn.reward))
        if turn.fresh and self.turns and tokens:
            self.transcripts.append(Transcript())
            self.told = False
        transcript = self.transcripts[-1]
        messages = turn.messages or ()
        kind = SpanKind.OBSERVATION if len(transcript) else SpanKind.PROMPT
        if is_tool(turn) and len(transcript):
            kind = SpanKind.TOOL
            self.tool_answers += bool(tokens)
        text = turn.text if turn.text is not None else "\n".join(map(content_text, messages))
        self._note(kind, text, len(tokens), turn.reward, seconds, cut if tokens else 0)
        transcript.observe(tokens, kind)
        self._learn = turn.learn

    def reply(self, completion: Completion, seconds: float) -> Reply:
        """The policy has answered: what the environment gets."""
        calls = self.conversation.calls(completion.text)
        said = Reply(completion.text, completion.stop, calls, len(self.replies))
        self.replies.append(_Said(completion.text, completion.tokens, self.n_scored, self._learn))
        self._note(SpanKind.SAMPLED, completion.text, len(completion.tokens), 0.0, seconds, calls=calls)
        self.transcripts[-1].sample(completion, self._learn)
        self._last, self.stop = completion, completion.stop
        return said

    def tell(self, stop: StopReason) -> Reply:
        """The environment is told that the episode has run out of something."""
        if not self.told:
            self.told, self.stop = True, stop
        self.asked_in_vain += 1
        self.replies.append(_Said("", (), self.n_scored, False))
        return Reply("", self.stop, (), len(self.replies) - 1)

    def rollout(self, done: Done) -> Rollout:
        """What it amounts to."""
        reward, steps = done.reward, self.steps
        if not isinstance(reward, Invalid):
            spans = self._placed(done.spans)
            if isinstance(spans, Invalid):
                reward, done = spans, Done(spans)
            else:
                steps = sorted([*steps, *spans], key=lambda step: step[0])
                reward += sum(earned for _, earned in steps)
        return Rollout(
            task=self.episode.task,
            group=self.episode.group,
            transcripts=self.transcripts,
            reward=reward,
            rewards=done.rewards,
            steps=steps,
            stop=self.stop,
            turns=self.turns,
            text="".join(said.text for said in self.replies),
            prompt=self.turns[0].text if self.turns else "",
            answers=self.answers,
        )

    def _note(
        self,
        kind: SpanKind,
        text: str,
        tokens: int,
        reward: float,
        seconds: float,
        cut: int = 0,
        calls: Sequence[ToolCall] = (),
    ) -> None:
        place, start = len(self.transcripts) - 1, len(self.transcripts[-1])
        self.turns.append(PlayedTurn(kind, text, place, start, tokens, reward, seconds, cut, tuple(calls)))

    def _placed(self, spans: Sequence[SpanReward]) -> list[tuple[int, float]] | Invalid:
        """(scored tokens up to its end, reward) of each part of a reply."""
        placed = []
        for span in spans:
            if not -len(self.replies) <= span.reply < len(self.replies):
                what = f"a part of reply {span.reply}; the episode has {len(self.replies)}"
                return Invalid(f"returned Graded with {what}", InvalidKind.UNREADABLE)
            said = self.replies[span.reply]
            if not 0 < span.end <= len(said.text):
                what = f"a part that ends after {span.end} characters of a reply that has {len(said.text)}"
                return Invalid(f"returned Graded with {what}", InvalidKind.UNREADABLE)
            tokens = self._tokens_of(said, span.end) if said.learned else 0
            placed.append((said.scored + tokens, span.reward))
        return placed

    def _tokens_of(self, said: _Said, end: int) -> int:
        """How many tokens of a reply it takes to say its first `end` characters."""
        low, high = 1, len(said.tokens)
        while low < high:
            middle = (low + high) // 2
            if self.tokenizer.decode(said.tokens[:middle])[:end] == said.text[:end]:
                high = middle
            else:
                low = middle + 1
        return low
