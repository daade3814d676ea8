"""Base of bridges: a game of another library, played turn by turn. It decides the effect of a reply that is no action.

A game gets a reply and returns its next text. Global random generators are saved and restored for each episode: a
worker interleaves many episodes, which would otherwise draw from each other's generators.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from posttrain.core.extras import install, installed
from posttrain.core.messages import near_or_all
from posttrain.core.seeds import seed_of
from posttrain.core.types import Reply, Sides, Task, Turn, UserError, Verdict

Made = TypeVar("Made")
WHICH = ("env", "game", "url")
LONGEST = 8000  # default for the most characters shown of an observation or a tool's answer
_COLOURED = re.compile("\x1b\\[[0-9;]*m(.*?)\x1b\\[0m", re.DOTALL)  # text that a terminal shows in colour
_ESCAPE = re.compile("\x1b\\[[0-9;?]*[A-Za-z]")


class NotAnAction(Exception):
    """A reply that is not an action; the message describes valid ones."""


class BridgeError(Exception):
    """A failure of a game, a server or a tool; the message describes it."""


@dataclass(frozen=True)
class GameStep:
    """State of a game after an action, as the policy sees it."""

    text: str
    reward: float = 0.0  # reward of that action
    done: bool = False
    side: str = ""  # the side to act, where the policy plays several
    earned: Mapping[str, float] | None = None  # reward of each side, at the end


class BridgedGame(Protocol):
    """An episode of another library. `act` raises NotAnAction; any other exception is a failure of the library."""

    def begin(self) -> GameStep: ...
    def act(self, reply: str) -> GameStep: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Manner:
    """Settings of episodes of any library. Columns of a task with the name of a setting replace it.

    The game itself (`WHICH`) is taken from a column only where no setting names it.
    """

    prompt: str = ""  # text before the first observation
    chat: bool = False  # whether observations are user messages, for chat models; else they are text
    stop: tuple[str, ...] = ()  # stop strings of every reply
    turns: int = 64  # most replies of an episode
    invalid: Literal["answer", "end"] = "answer"  # a reply that is no action gets an error text, or ends the episode
    invalid_reward: float = 0.0  # reward of each reply that is no action
    failure: Literal["invalid", "end"] = "invalid"  # if the library fails: an invalid reward, or `invalid_reward`
    longest: int = LONGEST  # most characters shown of an observation

    def __post_init__(self) -> None:
        check_choices(self, invalid=("answer", "end"), failure=("invalid", "end"))
        if self.turns < 1 or self.longest < 1:
            raise UserError("an episode needs turns and longest of 1 or more")

    def told_by(self, task: Task) -> Any:
        """Return these settings, replaced by the task's columns of the same names."""
        settings = {field.name for field in fields(self) if field.name not in WHICH or not getattr(self, field.name)}
        said = {name: value for name, value in task.items() if name in settings and value is not None}
        if isinstance(said.get("stop"), str | list):
            said["stop"] = (said["stop"],) if isinstance(said["stop"], str) else tuple(said["stop"])
        return replace(self, **said) if said else self

    def turn(self, step: GameStep, first: bool) -> Turn:
        """Return the turn that shows a step. `first`: whether it is the first of its side."""
        text = shown(step.text, self.longest)
        if first and self.prompt:
            text = f"{self.prompt}\n{text}"
        if self.chat:
            messages = [{"role": "user", "content": text}]
            return Turn(messages=messages, stop=self.stop, reward=step.reward, side=step.side)
        text = f"{text}\n" if first else f"\n{text}\n"
        return Turn(text=text, stop=self.stop, reward=step.reward, side=step.side)

    def refused(self, problem: NotAnAction) -> GameStep:
        """Return the step after a reply that is not an action."""
        return GameStep(str(problem), self.invalid_reward, self.invalid == "end")

    def failed(self, problem: Exception) -> GameStep:
        """Return the step after a failure of the library; raise the problem if failures make the episode invalid."""
        if self.failure == "invalid":
            raise problem
        return GameStep("", self.invalid_reward, True)


def check_choices(settings: object, **known: tuple[str, ...]) -> None:
    """Raise UserError if a setting is none of its known values."""
    for name, choices in known.items():
        value = getattr(settings, name)
        if value not in choices:
            raise UserError(f"{name} is {value!r}{near_or_all(str(value), list(choices))}")


def made(kind: Callable[..., Made], given: str, **settings: Any) -> Made:
    """Return an environment with these settings. Raises UserError for one that it does not have.

    `given`: the argument of the function `environment` that the user called.
    """
    try:
        return kind(**settings)
    except TypeError as error:
        raise UserError(f"environment({given}): {error}") from error


def played(manner: Manner, game: BridgedGame) -> Generator[Turn, Reply, Verdict]:
    """Run an episode of a game, from its first turn to the reward of its last action, or to each side's reward."""
    try:
        step, asked = begun(game.begin()), set[str]()
        for _ in range(manner.turns):
            if step.done:
                break
            reply = yield manner.turn(step, step.side not in asked)
            asked.add(step.side)
            if ran_out(reply):
                return 0.0
            try:
                step = game.act(reply)
            except NotAnAction as problem:
                step = manner.refused(problem)
            except Exception as error:
                step = manner.failed(error)
        return step.reward if step.earned is None else Sides(step.earned)
    finally:
        with suppress(Exception):  # the reward is already known
            game.close()


def begun(step: GameStep) -> GameStep:
    """Return the first step of a game. Raises BridgeError if the game is already over."""
    if step.done:
        raise BridgeError("the game is over before it began")
    return step


def ran_out(reply: Reply) -> bool:
    """Return whether the reply was not sampled because the episode ran out of turns, tokens or time."""
    return not reply and reply.stop.truncated


# -- texts -------------------------------------------------------------------------------------------------------------


def shown(text: str, longest: int) -> str:
    """Clean a text of another library for a turn: valid characters, colours as brackets, a bounded length.

    >>> shown("SF\\x1b[41mG\\x1b[0m", 10), shown("abcdef", 4)
    ('SF[G]', 'ab ... f')
    """
    text = _ESCAPE.sub("", _COLOURED.sub(r"[\1]", text)) if "\x1b" in text else text
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    if len(text) <= longest:
        return text
    end = longest // 4
    return f"{text[: longest - end - 1]} ... {text[len(text) - end :]}"


def as_text(value: Any) -> str:
    """Return an observation of numbers, names or both as text.

    >>> as_text({"hand": (13, np.True_), "speed": np.array([0.12345, -1.0])})
    'hand: 13, True; speed: 0.123 -1'
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {as_text(part)}" for key, part in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(as_text, value))
    if isinstance(value, np.ndarray) and value.ndim:
        return ("\n" if value.ndim > 1 else " ").join(map(as_text, value))
    if isinstance(value, np.generic | np.ndarray):
        value = value.item()
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def number_of(value: Any, what: str) -> float:
    """Return a reward as a number, 0 for None. Raises BridgeError if it is not a finite number."""
    if value is None:
        return 0.0
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) < float("inf"):
        raise BridgeError(f"{what} is {value!r:.60}, not a finite number")
    return number


# -- chance ------------------------------------------------------------------------------------------------------------


def task_seed(task: Task) -> int:
    """Return the seed of an episode: the task's, or one derived from its id. Equal for all rollouts of the task."""
    seed = task.get("seed")
    if seed is None:
        return seed_of("bridge", task.get("id")) % 2**32
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise BridgeError(f"the task's seed is {seed!r:.40}: give a whole number from 0 to 2^32 - 1")
    return seed


class Chance:
    """An episode's states of the global random generators of Python and NumPy."""

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Use the episode's states of the global random generators inside the block; restore the others after it."""
        python, numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(python)
            np.random.set_state(numpy)


def need(library: str, extra: str) -> None:
    """Raise UserError, with the fix, where a library is not installed. Imports nothing."""
    if not installed(library):
        raise UserError(f"{library} is not installed: {install(extra)}")
