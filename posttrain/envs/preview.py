"""Preview of an episode as a model sees it: its turns as tokens, and tool calls as its template writes them.

So it is reported before a model is loaded if a chat template is missing, shows no tools or nothing of a message, or if
the context is too short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.core.conversation import TextEncoder
from posttrain.core.types import Completion, Reply, StopReason, Task, Turn, UserError
from posttrain.envs.play.episode import Episode, RunningEpisode


@dataclass(frozen=True)
class Viewer:
    """A model's tokenizer and context, without its weights."""

    tokenizer: TextEncoder
    context: int  # tokens of prompt and replies together
    ends: Sequence[int] = ()  # ids that end a reply; empty if unknown

    def watch(self, task: Task) -> Seen:
        """Begin the preview of an episode."""
        return Seen(self, task)


class Seen:
    """The preview of one episode."""

    def __init__(self, viewer: Viewer, task: Task) -> None:
        self._viewer = viewer
        self._playing = RunningEpisode(Episode(task, "", 0), viewer.tokenizer)
        self.prompt = 0  # tokens of the first turn
        self.texts: list[str] = []  # texts that the model was shown
        self.replies: list[int] = []  # tokens of each reply, with its end
        self.problem: str | None = None  # why a turn could not be shown

    @property
    def longest(self) -> int:
        """Number of tokens of the longest context."""
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
        """Return the reply that an environment gets for this text; None if the last turn could not be shown."""
        if self.problem is not None:
            return None
        try:
            tokens = [*self._viewer.tokenizer.encode(text), *self._viewer.ends]
        except UserError:  # a text that no model can sample, which makes no difference to the environment
            tokens = list(self._viewer.ends)
        self.replies.append(len(tokens))
        completion = Completion(0, tokens, [0.0] * len(tokens), text, StopReason.EOS, 0)
        return self._playing.reply(completion, 0.0)
