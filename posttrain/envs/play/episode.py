"""The state of an episode in progress, and its result as a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from posttrain.core.conversation import TextEncoder, encoder_of
from posttrain.core.rollouts import Branch, Piece, PlayedTurn, Rollout
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import (
    Completion,
    Invalid,
    InvalidKind,
    Reply,
    Sampling,
    SpanReward,
    StopReason,
    Task,
    ToolCall,
    Turn,
    value_type,
)
from posttrain.envs.play.contexts import Context, placed, positions
from posttrain.envs.play.env_outputs import Done

MAX_TURNS = 64  # bounds an environment that never returns


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode; None: no limit."""

    tokens: int | None = None  # most sampled tokens, over all replies
    turns: int = MAX_TURNS  # most replies
    tool_calls: int | None = None  # most answers of tools shown
    seconds: float | None = None  # seconds after which no turn is shown


@value_type
class Episode:
    """A rollout to be sampled."""

    task: Task
    group: str
    seed: int
    sampling: Sampling | None = None  # instead of the player's
    begun: Completion | None = None  # the part of its reply that was sampled in earlier steps
    limits: EpisodeLimits | None = None  # instead of the player's
    greedy: bool = False
    """Whether it is sampled at temperature 0: its reward is its group's baseline, and it is not trained."""


def is_tool(turn: Turn) -> bool:
    """Return whether a turn is the answer of a tool."""
    return turn.tool or (bool(turn.messages) and all(message["role"] == "tool" for message in turn.messages or ()))


def content_text(message: Mapping[str, Any]) -> str:
    """Return the text of a chat message, whose content may be a list of parts."""
    content = message["content"]
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(
        f"[{part.get('image')}]" if part.get("type") == "image" else str(part.get("text") or "")
        for part in parts
        if isinstance(part, Mapping)
    )


def last_asked(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the user's last message, or else the last of all, which distinguishes prompts made of messages."""
    if not messages:
        return ""
    said = [message for message in messages if message["role"] == "user"] or messages
    return content_text(said[-1])


@value_type
class _Said:
    """A reply as the environment got it."""

    text: str
    tokens: Sequence[int]
    transcript: int  # index of its transcript
    scored: int  # scored tokens of that transcript before it
    learned: bool
    side: str
    piece: Piece  # its place in the rollout that sampled it


class RunningEpisode:
    """An episode in progress: its turns so far, as text and as tokens."""

    def __init__(self, episode: Episode, tokenizer: TextEncoder, member: int = 0) -> None:
        """`member`: its number in its group."""
        tokenizer = encoder_of(tokenizer, episode.task)
        self.episode, self.tokenizer, self.member = episode, tokenizer, member
        self.branch: Branch | None = None  # its branch point in another episode
        self.last: Turn | None = None  # the last turn, as the environment yielded it
        self.opening: Sequence[float] = ()  # log-probabilities of the first reply
        self.contexts = [Context(tokenizer)]  # that were shown
        self.context = self._before = self.contexts[0]  # context of the last turn; of its side's turn before
        self.side = ""  # side of the last turn
        self._sides: dict[str, Context] = {}  # side -> context of its last turn
        self.turns: list[PlayedTurn] = []
        self.replies: list[_Said] = []
        self.answers: list[tuple[str, Any]] = []  # (service, its answer)
        self.asks = ""  # service of the last request
        self.began = 0.0  # time of its begin, by the player's clock
        self.tool_answers = 0  # that were shown
        self.steps: list[tuple[int, int, float]] = []  # (transcript, its scored tokens up to the end, step reward)
        self.asked_in_vain = 0  # turns after the end, over all contexts
        self._asked: dict[str, str] = {}  # side -> its first question, if that was in messages
        self._learn = True  # whether the next reply is trained
        self._stops: dict[str, StopReason] = {}  # side -> its last stop reason

    @property
    def transcripts(self) -> list[Transcript]:
        return [context.transcript for context in self.contexts]

    @property
    def n_sampled(self) -> int:
        return sum([c.transcript.n_sampled for c in self.contexts])

    @property
    def stop(self) -> StopReason:
        """The stop reason of the side of the last turn."""
        return self._stops.get(self.side, StopReason.EOS)

    def place(self, turn: Turn) -> Turn:
        """Find the context of a turn, which becomes the current one; return the turn's new part."""
        self.last = turn
        begins = turn.side not in self._sides
        self._turn_to(turn.side)
        self._earn(turn.reward)
        self._before = self.context
        found: Context | None = self.context
        if turn.whole and not begins:
            turn, found = placed(turn, [context for context in self.contexts if context.side == self.side])
        elif turn.fresh and not begins:
            found = None
        self.context = Context(self.tokenizer, self.side) if found is None else found
        self._sides[self.side] = self.context
        return turn

    def _turn_to(self, side: str) -> None:
        """Make the context of this side's last turn the current one."""
        self.side = side
        if not self._sides:
            self.context.side = side
        elif side not in self._sides:
            self.context = Context(self.tokenizer, side)
            self.contexts.append(self.context)
        else:
            self.context = self._sides[side]

    def read(self, turn: Turn) -> list[int]:
        """Return the tokens that show this turn to the policy."""
        return self.context.read(turn)

    def show(self, turn: Turn, tokens: Sequence[int] | None, seconds: float, cut: int = 0) -> None:
        """Add these tokens of a turn to its context; None: the policy gets no further turn.

        `cut`: number of tokens left out.
        """
        if tokens is None:
            self.context.take_back()
            if self.context not in self.contexts:  # the side stays in its earlier context
                self.context = self._sides[self.side] = self._before
        elif self.context not in self.contexts:
            self.contexts.append(self.context)
        tokens = tokens or ()
        transcript = self.context.transcript
        messages, before = turn.messages or (), len(transcript.tokens)
        kind = SpanKind.OBSERVATION if before else SpanKind.PROMPT
        if before and is_tool(turn):
            kind = SpanKind.TOOL
            self.tool_answers += bool(tokens)
        text = turn.text if turn.text is not None else "\n".join(map(content_text, messages))
        if self.side not in self._asked:
            self._asked[self.side] = last_asked(messages)
        if turn.tokens is not None:
            text = self.tokenizer.decode(tokens)
        answered = (0, 0) if turn.failed is None else (len(messages), turn.failed)
        self._note(kind, text, len(tokens), turn.reward, seconds, cut if tokens else 0, answered=answered)
        seen = self.context.conversation.seen if tokens else ()
        transcript.observe(tokens, kind, [replace(m, start=m.start + before) for m in seen])
        self._learn = turn.learn

    def reply(self, completion: Completion, seconds: float, temperature: float | None = None) -> Reply:
        """Add the policy's reply, and return it in the form that the environment gets. `temperature`: at which it was
        sampled; None: the run's.
        """
        read = len(self.context.transcript)
        self.opening = self.opening or completion.logp
        calls = self.context.conversation.calls(completion.text)
        before = self.context.conversation.before_calls(completion.text)
        said = Reply(completion.text, completion.stop, calls, len(self.replies), before, completion, read)
        piece = Piece(len(completion.tokens), self.member, len(self.replies))
        self.replies.append(_Said(completion.text, completion.tokens, *self._end, self._learn, self.side, piece))
        self._note(SpanKind.SAMPLED, completion.text, len(completion.tokens), 0.0, seconds, 0, calls, temperature)
        self.context.reply(completion, said, self._learn, temperature)
        self._stops[self.side] = completion.stop
        return said

    def tell(self, stop: StopReason, whole: bool = False) -> Reply:
        """Return an empty reply with the limit that the episode has reached.

        `whole`: whether the turn held a whole conversation.
        """
        if whole:
            self._stops[self.side] = stop  # another conversation may still fit
        elif not self.context.told:
            self.context.told, self._stops[self.side] = True, stop
        self.asked_in_vain += 1
        nothing = Piece(0, self.member, len(self.replies))
        self.replies.append(_Said("", (), *self._end, False, self.side, nothing))
        return Reply("", self.stop, (), len(self.replies) - 1)

    @property
    def may_branch(self) -> bool:
        """Whether the next reply follows a tool's answer directly, and this episode did not begin there as a branch."""
        begun = self.branch is not None and self.branch.turns == len(self.turns)
        return bool(self.turns) and self.turns[-1].kind is SpanKind.TOOL and bool(self.opening) and not begun

    def branched(self, episode: Episode, member: int) -> RunningEpisode:
        """Return another episode with all turns and tokens of this one, which then continues independently."""
        other = copy(self)
        other.episode, other.member = episode, member
        other.contexts = [context.branch() for context in self.contexts]
        other.context = other._before = other.contexts[self.contexts.index(self.context)]
        other._sides = {side: other.contexts[self.contexts.index(own)] for side, own in self._sides.items()}
        other._stops, other._asked = dict(self._stops), dict(self._asked)
        other.turns, other.replies, other.steps = list(self.turns), list(self.replies), list(self.steps)
        other.answers = list(self.answers)
        other.branch = Branch(self.member, len(self.turns), tuple(t.n_sampled for t in self.transcripts))
        return other

    def rollouts(self, done: Done, branching: bool = False) -> list[Rollout]:
        """Return the result: a rollout for each side, in the order of their first turns.

        A side without training is part of the environment, and has none. `branching`: rollouts of the group may share
        replies.
        """
        found = [self._rollout(side, done, branching) for side in self._sides or [self.side]]
        return [rollout for rollout in found if rollout.n_scored or not rollout.n_sampled] or found

    def _rollout(self, side: str, ended: Done, branching: bool) -> Rollout:
        """Return the rollout of a side, with its reward."""
        done, shared = ended.of(side), not ended.sides
        places = [place for place, context in enumerate(self.contexts) if context.side == side]
        transcripts = [self.contexts[place].transcript for place in places]
        number = {place: own for own, place in enumerate(places)}  # context -> its number among those of the side
        turns = self.turns  # if all contexts belong to this side, their numbers stay
        if len(places) < len(self.contexts):
            turns = [replace(turn, transcript=number[turn.transcript]) for turn in turns if turn.transcript in number]
        earned, reward = [step for step in self.steps if step[0] in number], done.reward
        if done.spans and not isinstance(reward, Invalid):
            spans = self._placed(done.spans, side, shared)
            if isinstance(spans, Invalid):
                reward, done = spans, Done(spans)
            else:
                earned = [*earned, *spans]
        steps = positions([(number[place], scored, value) for place, scored, value in earned], transcripts)
        if not isinstance(reward, Invalid):
            steps.sort(key=lambda step: step[0])
            reward += sum([value for _, value in steps])
        return Rollout(
            task=self.episode.task,
            group=self.episode.group,
            transcripts=transcripts,
            reward=reward,
            rewards=done.rewards,
            steps=steps,
            stop=self._stops.get(side, StopReason.EOS),
            turns=turns,
            text="".join([said.text for said in self.replies if said.side == side]),
            prompt=turns[0].text if turns else "",
            asked=self._asked.get(side, ""),
            answers=self.answers,
            side=side,
            pieces=self._pieces(side) if branching else [],
            branch=self._branch_of(places),
            notes=ended.notes,
            greedy=self.episode.greedy,
        )

    def _branch_of(self, places: Sequence[int]) -> Branch | None:
        """Return the branch point for the contexts of a side; None if this episode is no branch."""
        if self.branch is None:
            return None
        turns = sum(turn.transcript in places for turn in self.turns[: self.branch.turns])
        taken = self.branch.taken
        return Branch(self.branch.of, turns, tuple(taken[place] for place in places if place < len(taken)))

    def _pieces(self, side: str) -> list[Piece]:
        """Return the pieces of a side's rollout, in the order of its scored tokens."""
        learned = [said for said in self.replies if said.side == side and said.learned and said.tokens]
        return [said.piece for said in sorted(learned, key=lambda said: (said.transcript, said.scored))]

    def _note(
        self,
        kind: SpanKind,
        text: str,
        tokens: int,
        reward: float,
        seconds: float,
        cut: int = 0,
        calls: Sequence[ToolCall] = (),
        temperature: float | None = None,
        answered: tuple[int, int] = (0, 0),
    ) -> None:
        place, start = self.contexts.index(self.context), len(self.context.transcript.tokens)
        turn = PlayedTurn(kind, text, place, start, tokens, reward, seconds, cut, tuple(calls), temperature, answered)
        self.turns.append(turn)

    @property
    def _end(self) -> tuple[int, int]:
        """(index of the current transcript, number of its scored tokens)."""
        return self.contexts.index(self.context), self.context.transcript.n_scored

    def _earn(self, reward: float) -> None:
        """Add a reward for the step that led to this turn, unless that was an empty reply after the end."""
        if reward and not self.context.told:
            self.steps.append((*self._end, reward))

    def _placed(self, spans: Sequence[SpanReward], side: str, shared: bool) -> list[tuple[int, int, float]] | Invalid:
        """Return (transcript, its scored tokens up to the span's end, reward) for each span reward of this side.

        `shared`: whether the spans belong to all sides.
        """
        found = []
        own = [said for said in self.replies if said.side == side]
        for span in spans:
            known = self.replies if span.reply >= 0 or shared else own
            if not -len(known) <= span.reply < len(known):
                what = f"a part of reply {span.reply}; {f'side {side!r}' if side else 'the episode'} has {len(known)}"
                return Invalid(f"returned Graded with {what}", InvalidKind.UNREADABLE)
            said = known[span.reply]
            if said.side != side and shared:
                continue
            if said.side != side:
                what = f"a part of reply {span.reply}, which is one of side {said.side!r}, for side {side!r}"
                return Invalid(f"returned Graded with {what}", InvalidKind.UNREADABLE)
            if not 0 < span.end <= len(said.text):
                what = f"a part that ends after {span.end} characters of a reply that has {len(said.text)}"
                return Invalid(f"returned Graded with {what}", InvalidKind.UNREADABLE)
            tokens = self._tokens_of(said, span.end) if said.learned else 0
            found.append((said.transcript, said.scored + tokens, span.reward))
        return found

    def _tokens_of(self, said: _Said, end: int) -> int:
        """Return the number of tokens that contain a reply's first `end` characters."""
        low, high = 1, len(said.tokens)
        while low < high:
            middle = (low + high) // 2
            if self.tokenizer.decode(said.tokens[:middle])[:end] == said.text[:end]:
                high = middle
            else:
                low = middle + 1
        return low
