"""Environments of Gymnasium: an observation is a turn, a reply an action.

    # my.py                                                          posttrain rl --env my.py:lake ...
    lake = environment("FrozenLake-v1", make={"is_slippery": False}, actions=["left", "down", "right", "up"])

    python -m posttrain.envs.bridges.gym FrozenLake-v1 --count 100 > rows.jsonl       posttrain rl --env gymnasium ...

The task's "seed" is that of the first reset, "options" its options. All settings may be columns of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.types import Reply, Task, Turn, UserError, Verdict
from posttrain.envs.bridges.bridge import (
    Chance,
    GameStep,
    Manner,
    NotAnAction,
    as_text,
    made,
    need,
    number_of,
    played,
    task_seed,
)
from posttrain.envs.builtin.generated import read_json, write

need("gymnasium", "gymnasium")


@dataclass(frozen=True)
class Gymnasium(Manner):
    """An environment of Gymnasium as one of ours."""

    env: str | Callable[..., Any] = ""  # its id, or a function that makes it
    make: Mapping[str, Any] = field(default_factory=dict)  # arguments of gymnasium.make
    actions: Sequence[str] | Mapping[str, Any] | Callable[[str], Any] | None = None
    """Words for the actions: a list (in the order of the actions), a dict, or a function of the reply that returns an
    action, or None for an invalid one. Default: numbers, or the reply for an action space of text."""
    observe: Callable[[Any], str] | None = None  # observation -> text; default: the "ansi" rendering, or its numbers

    def __call__(self, task: Task) -> Generator[Turn, Reply, Verdict]:
        how: Gymnasium = self.told_by(task)
        return (yield from played(how, _Episode(how, task)))


def environment(env: str | Callable[..., Any], **settings: Any) -> Gymnasium:
    """Return Gymnasium's environment with this id, or made by this function. `settings`: fields of `Gymnasium`."""
    return made(Gymnasium, repr(env), env=env, **settings)


play = Gymnasium()
"""Any environment. The task's column "env" is its id."""


class _Episode:
    def __init__(self, how: Gymnasium, task: Task) -> None:
        self.how, self.task, self.seed = how, task, task_seed(task)
        self.chance = Chance(self.seed)
        self.env: Any = None

    def begin(self) -> GameStep:
        with self.chance.own():
            self.env = self._made()
            observation, _ = self.env.reset(seed=self.seed, options=self.task.get("options"))
            return GameStep(self._text(observation))

    def act(self, reply: str) -> GameStep:
        action = self._action(reply)
        with self.chance.own():
            observation, reward, terminated, truncated, _ = self.env.step(action)
            return GameStep(self._text(observation), number_of(reward, "the reward"), bool(terminated or truncated))

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    def _made(self) -> Any:
        import gymnasium

        env, make = self.how.env, dict(self.how.make)
        if not isinstance(env, str):
            return env(**make)
        if not env:
            raise UserError('the task has no column "env": give the id of an environment')
        if "ansi" in _modes(env):
            make.setdefault("render_mode", "ansi")
        return gymnasium.make(env, **{"disable_env_checker": True, **make})

    def _text(self, observation: Any) -> str:
        if self.how.observe is not None:
            return self.how.observe(observation)
        if getattr(self.env, "render_mode", None) == "ansi":
            return str(self.env.render()).strip("\n")
        return as_text(observation)

    def _action(self, reply: str) -> Any:
        """Parse a reply as an action. Raises NotAnAction."""
        space, words = self.env.action_space, self.how.actions
        said = reply.strip()
        if callable(words):
            action = words(reply)
            if action is None or not space.contains(action):
                raise NotAnAction("That is no action.")
            return action
        names = _names(space, words)
        if names is None:
            action = _numbers(space, said)
            if action is None or not space.contains(action):
                raise NotAnAction(f"That is no action. It is {_expected(space)}.")
            return action
        known = {name.lower(): action for name, action in names.items()}
        if said.lower() not in known:
            listed = ", ".join(list(names)[:20]) + (", ..." if len(names) > 20 else "")
            raise NotAnAction(f"That is no action. Actions: {listed}.")
        return known[said.lower()]


def _modes(env: str) -> Sequence[str]:
    """Return the render modes of an environment's class."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    entry = gymnasium.spec(env).entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    return getattr(creator, "metadata", {}).get("render_modes", ())


def _names(space: Any, words: Sequence[str] | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return words -> actions; None if an action is text or numbers."""
    from gymnasium.spaces import Discrete

    if isinstance(words, Mapping):
        return dict(words)
    if isinstance(space, Discrete):
        first, count = int(space.start), int(space.n)
        names = list(words) if words is not None else [str(first + n) for n in range(count)]
        if len(names) != count:
            raise UserError(
                f"actions has {len(names)} words, and the environment has {count} actions: give one word for each"
            )
        return {name: first + n for n, name in enumerate(names)}
    if words is not None:
        raise UserError(
            f"actions is a list of words, but the actions are {space}: give a dict, or a function of the reply"
        )
    return None


def _numbers(space: Any, said: str) -> Any:
    """Parse the text or the numbers of a reply in the form of the space; None if there are too many, too few or
    invalid ones.
    """
    import numpy as np
    from gymnasium.spaces import Box, MultiBinary, MultiDiscrete, Text

    if isinstance(space, Text):
        return said
    if not isinstance(space, Box | MultiBinary | MultiDiscrete):
        raise UserError(f"actions of the kind {space} need a function: actions=lambda reply: ...")
    words = said.replace(",", " ").split()
    if len(words) != int(np.prod(space.shape)):
        return None
    whole = not isinstance(space, Box) or space.dtype.kind in "iu"
    try:
        values = np.array([int(word) if whole else float(word) for word in words])
        with np.errstate(over="ignore", invalid="ignore"):  # too large numbers are refused later
            action = values.astype(space.dtype)
    except (ValueError, OverflowError):
        return None
    return action.reshape(space.shape) if np.array_equal(action, values) or not whole else None


def _expected(space: Any) -> str:
    from gymnasium.spaces import Box, Text

    if isinstance(space, Text):
        return "a text"
    count = " x ".join(map(str, space.shape))
    bounds = f" from {as_text(space.low.flat[0])} to {as_text(space.high.flat[0])}" if isinstance(space, Box) else ""
    return f"{count} number{'s' * (count != '1')}{bounds}"


def tasks(count: int, seed: int, env: str, *, make: str = "", held_out: bool = False) -> list[Task]:
    """Return rows for `--env gymnasium`: seeds of one environment, even ones for training and odd ones held out.

    `make`: arguments of gymnasium.make, as JSON.
    """
    arguments = read_json(make, "--make", 'arguments, such as {"is_slippery": false}')
    first = 2 * seed * count + held_out
    more = {"make": arguments} if arguments else {}
    return [{"id": f"{env} {first + 2 * n}", "env": env, "seed": first + 2 * n, **more} for n in range(count)]


if __name__ == "__main__":
    write(tasks)
