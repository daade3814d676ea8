"""Preview of an episode as a model sees it: its turns as tokens, and calls of tools as its template writes them.

So a chat template that is missing, that shows no tools, or that shows nothing of a message, and a context that is too short,
are told before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.core.conversation import TextEncoder
from posttrain.core.types import Completion, Reply, StopReason, Task, Turn, UserError
from posttrain.envs.play.episode import Episode, RunningEpisode


@dataclass(frozen=True)
class Viewer:
    """View of a model without its weights."""

    tokenizer: TextEncoder
    context: int  # tokens of prompt and replies together
    ends: Sequence[int] = ()  # the id that ends a reply, if it is known

    def watch(self, task: Task) -> Seen:
        """Begin the preview of an episode."""
        return Seen(self, task)


class Seen:
    """State of the preview of one episode."""

    def __init__(self, viewer: Viewer, task: Task) -> None:
        self._viewer = viewer
        self._playing = RunningEpisode(Episode(task, "", 0), viewer.tokenizer)
        self.prompt = 0  # tokens of the first turn
        self.texts: list[str] = []  # what it was shown
        self.problem: str | None = None  # why it could be shown no more

    @property
    def longest(self) -> int:
        """Number of tokens of the longest of its contexts."""
        return max(map(len, self._playing.transcripts))

    @property
    def full(self) -> bool:
        """Whether the last turn left no room for a reply."""
        return len(self._playing.context.transcript) >= self._viewer.context

    def show(self, turn: Turn) -> None:
        """Add a turn, or record why it cannot be shown."""
        if self.problem is not None:
            return
        first = not self._playing.turns
        said = [turn.text, *(message.get("content") for message in turn.messages or ())]
        self.texts += [text for text in said if isinstance(text, str)]
        try:
            turn = self._playing.place(turn)
            tokens = self._playing.read(turn)
        except UserError as error:
            self.problem = str(error)
            return
        self._playing.show(turn, tokens, 0.0)
        self.prompt = len(tokens) if first else self.prompt

    def say(self, text: str) -> Reply | None:
        """Return the reply that an environment gets for this text; None where the last turn could not be shown."""
        if self.problem is not None:
            return None
        try:
            tokens = [*self._viewer.tokenizer.encode(text), *self._viewer.ends]
        except UserError:  # no model says it: to the environment it is all the same
            tokens = list(self._viewer.ends)
        completion = Completion(0, tokens, [0.0] * len(tokens), text, StopReason.EOS, 0)
        return self._playing.reply(completion, 0.0)
