"""Handling of rows that do not fit into the model's context: see `--too-long`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from posttrain.core.conversation import Conversation, TextEncoder, encoder_of
from posttrain.core.pictures import PictureError
from posttrain.core.types import Task, UserError
from posttrain.data.tasks import ENDLESS
from posttrain.envs.play.load_env import opening

Policy = Literal["skip", "truncate", "refuse"]
NAMED = 3  # rows that are named; further ones are only counted
MAX_LENGTH = "--max-length is"  # of `TooLong.limit`
LONGER = "choose a model with a longer context (of a new model: --context)"
REMEMBERED = 1_000_000  # most rows that are counted once each, however often they are read


class Placed(Protocol):
    """Tasks with the places of their rows."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int, /) -> Task: ...
    def where(self, place: int, /) -> str: ...  # "train.jsonl:17"


@dataclass
class TooLong:
    """Handler of rows that do not fit: refuses them, or counts them and names the first ones by their place."""

    policy: Policy
    context: int  # tokens
    say: Callable[[str], None]
    limit: str = "the model's context holds"  # what sets the number of tokens
    count: int = 0  # since the last `take`
    _named: set[str] = field(default_factory=set)
    _met: dict[str, bool] = field(default_factory=dict)  # place -> whether its row was cut

    def meet(self, where: str, what: str, cut: bool) -> None:
        """Record a row that is too long; `what` describes it. Raises UserError if such rows are refused."""
        told = f"{where}: {what}; {self.limit} {self.context}"
        if self.policy == "refuse":
            raise UserError(f"{told}: shorten it, or skip or cut such rows with --too-long skip or truncate")
        self.count += 1
        if len(self._met) < REMEMBERED:
            self._met[where] = cut
        if where not in self._named and len(self._named) < NAMED:
            self._named.add(where)
            last = "; further rows are not listed" if len(self._named) == NAMED else ""
            self.say(f"{told}: it is {'cut' if cut else 'left out'} (--too-long){last}")

    def nothing_fits(self, rows: int) -> str:
        """Return the message that none of this many rows fits, with what helps."""
        cut = self.policy == "truncate"
        told = f"none of {rows:,} rows fits{', as each prompt alone is too long' if cut else ''}"
        ways = ["shorten them", "raise --max-length" if self.limit == MAX_LENGTH else LONGER]
        ways += [] if cut else ["cut them with --too-long truncate"]
        return f"{told}; {self.limit} {self.context} tokens: {', '.join(ways[:-1])}, or {ways[-1]}"

    def total(self) -> list[str]:
        """Return a line about all rows that did not fit, or nothing."""
        cut = sum(self._met.values())
        counts = (cut, "cut"), (len(self._met) - cut, "left out")
        told = ", ".join(f"{count:,} {what}" for count, what in counts if count)
        more = " or more" * (len(self._met) == REMEMBERED)
        return [f"too long    rows: {told}{more}; {self.limit} {self.context} tokens"] if told else []

    def take(self) -> int:
        """Return the number of rows that did not fit since the last call."""
        count, self.count = self.count, 0
        return count


@dataclass(frozen=True)
class Prompts:
    """Tasks and the check that their prompts leave room for a reply, or are cut until they do."""

    tasks: Placed
    tokenizer: TextEncoder
    too_long: TooLong

    def fits(self, place: int) -> bool:
        return self.leaves_room(place, self.tasks[place])

    def leaves_room(self, place: int, task: Task) -> bool:
        """Return whether the prompt of the task at this place leaves room for a reply, perhaps after a cut."""
        try:
            length = len(Conversation(encoder_of(self.tokenizer, task)).show(opening(task), None))
        except PictureError as error:
            raise UserError(f"{self.tasks.where(place)}: {error}") from None
        if length < self.too_long.context:
            return True
        cut = self.too_long.policy == "truncate"
        self.too_long.meet(self.tasks.where(place), f"the prompt has {length} tokens", cut)
        return cut

    def check(self) -> None:
        """With "refuse", measure all prompts now, as refusing one in the middle of a run is too late."""
        if self.too_long.policy == "refuse" and len(self.tasks) < ENDLESS:
            for place in range(len(self.tasks)):
                self.fits(place)

    def fitting(self) -> list[Task]:
        """Return the tasks that fit, in their order."""
        return [self.tasks[place] for place in range(len(self.tasks)) if self.fits(place)]
