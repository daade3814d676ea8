"""Training examples from rows without episodes: made lazily from tasks, in the order in which steps visit them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import ClassVar, Generic, TypeVar

from posttrain.core.batch import Stats
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Task, UserError
from posttrain.data.mixed_tasks import MixedTasks
from posttrain.data.tasks import ENDLESS, draw, order
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.length_filter import Placed, TooLong
from posttrain.training.sources.mixture import MixedRows

X = TypeVar("X")
REMEMBERED = 1 << 21  # tokens: some 60 MB


class ExampleStream(Sequence["X | None"], Generic[X]):
    """Training examples of tasks, each made on access; None for one that is too long and skipped, or unwanted.

    The first ones are cached, up to `REMEMBERED` tokens, so that small data is tokenised once.
    """

    noun: ClassVar[str]  # name of an example in messages

    def __init__(
        self, tasks: Placed, tokenizer: Tokenizer, eos_ids: Sequence[int], vocab: int, too_long: TooLong
    ) -> None:
        """`vocab`: size of the model's vocabulary."""
        self.tasks, self.tokenizer, self.eos_ids, self.vocab, self.too_long = tasks, tokenizer, eos_ids, vocab, too_long
        self._remembered: dict[int, X] = {}
        self._room = REMEMBERED
        self.unwanted = 0  # number of unwanted examples since the last report
        self.mixed: MixedRows | None = None  # the order of a mixture, set at the first step
        if too_long.policy == "refuse" and len(tasks) < ENDLESS:  # refuses now, not in the middle of a run
            for place in range(len(tasks)):
                self[place]

    @abstractmethod
    def make(self, task: Task, length: int | None) -> X | None:
        """Return the example of a task, its transcripts cut to their first `length` tokens; None for an unwanted one.

        Raises UserError if nothing is left to learn.
        """

    def notice(self, place: int, task: Task) -> None:
        """Report what is strange about a row that was made."""

    @abstractmethod
    def transcripts(self, made: X) -> Sequence[Transcript]: ...

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, place: int) -> X | None:  # type: ignore[override]  # no slices
        if place in self._remembered:
            return self._remembered[place]
        task, context = self.tasks[place], self.too_long.context
        try:
            made = self.make(task, None)
        except UserError as error:
            raise UserError(f"{self.tasks.where(place)}: {error}") from error
        if made is None:
            self.unwanted += 1
            return None
        self.notice(place, task)
        transcripts = self.transcripts(made)
        most = max(max(t.tokens) for t in transcripts)
        if most >= self.vocab:
            raise UserError(
                f"the tokenizer gives token {most}, and the model's vocabulary has {self.vocab}: use the model's own "
                "tokenizer"
            )
        longest = max(map(len, transcripts))
        if longest > context:
            return self._cut(place, task, longest)
        size = sum(map(len, transcripts))
        if size <= self._room:
            self._remembered[place] = made
            self._room -= size
        return made

    def check(self) -> None:
        """Raise UserError if no example fits, before a run's folder is created."""
        try:
            draw(len(self), 0, 1, 0, lambda place: self[place] is not None)
        except UserError:
            if self.unwanted:
                raise UserError(f"none of {self.unwanted:,} episodes reaches --min-reward: lower it") from None
            if self.too_long.count:
                raise UserError(self.too_long.nothing_fits(len(self))) from None
            raise
        self.unwanted = 0

    def _cut(self, place: int, task: Task, length: int) -> X | None:
        made = None
        if self.too_long.policy == "truncate":
            with suppress(UserError):  # the prompt alone is too long
                made = self.make(task, self.too_long.context)
        self.too_long.meet(self.tasks.where(place), f"the {self.noun} has {length} tokens", made is not None)
        return made


def steps_per_epoch(made: ExampleStream[X], rows: int) -> int:
    return -(-len(made) // rows)


def examples_of_step(made: ExampleStream[X], rows: int, seed: int, number: int) -> list[tuple[int, X]]:
    """Return (place, example) of the rows of a step: `rows` of them, in a new order each epoch, whose last step is
    short.

    They depend on the number alone. Examples that do not fit are missing; if none fits, the step has the next one that
    does.
    """
    if isinstance(made.tasks, MixedTasks):
        return _of_mixture(made, made.tasks, rows, seed, number)
    epoch, part = divmod(number - 1, steps_per_epoch(made, rows))
    first, count = part * rows, len(made)
    places = map(int, order(count, epoch, seed)[first : first + rows])
    found = [(place, one) for place in places if (one := made[place]) is not None]
    if not found:
        after = epoch * count + min(first + rows, count)
        [(_, place)], _ = draw(count, after, 1, seed, lambda place: made[place] is not None)
        found = [(place, one) for one in [made[place]] if one is not None]
    return found


def _of_mixture(made: ExampleStream[X], tasks: MixedTasks, rows: int, seed: int, number: int) -> list[tuple[int, X]]:
    """Return (place, example) of the rows of a mixture's step, by the shares of its parts: always `rows` of them."""
    if made.mixed is None or (made.mixed.rows, made.mixed.seed) != (rows, seed):
        made.mixed = MixedRows(tasks, rows, seed)
    found = [(place, one) for place in made.mixed.of_step(number) if (one := made[place]) is not None]
    later = islice(made.mixed.following(number), 10 * len(made))
    found = found or list(islice(((place, one) for place in later if (one := made[place]) is not None), 1))
    if not found:
        raise UserError(
            f"none of the {10 * len(made):,} rows after step {number} of the mixture fits: raise the weight of parts whose "
            "rows fit, or leave out the others"
        )
    return found


def progress(made: ExampleStream[X], rows: int, number: int, stats: Stats) -> None:
    """Add the epoch, and the number of the step's rows that did not fit, to the metrics."""
    epoch, part = divmod(number - 1, steps_per_epoch(made, rows))
    stats.add("epoch", epoch + (part + 1) / steps_per_epoch(made, rows))
    stats.add("too_long", made.too_long.take())
    for name, share in (made.mixed.shares_of(number) if made.mixed else {}).items():
        stats.add(f"mixture/{name}/share", share)
    if made.unwanted:
        stats.add("unwanted", made.unwanted)
        made.unwanted = 0
