"""A server of the library OpenEnv: a game of guessing. Runs where `openenv-core` is installed. Argument: the port."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class Guess(Action):  # type: ignore[misc]
    number: int = Field(ge=0)


class Seen(Observation):  # type: ignore[misc]
    hint: str = ""


class Game(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret = self.asked = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, most: int = 10, **others: Any) -> Seen:
        self.secret = (seed or 0) % most
        return Seen(hint=f"A number below {most}.")

    def step(self, action: Guess, timeout_s: float | None = None, **others: Any) -> Seen:
        if action.number == 99:
            raise RuntimeError("the game breaks")
        self.asked += 1
        right = action.number == self.secret
        hint = "right" if right else "higher" if action.number < self.secret else "lower"
        return Seen(hint=hint, reward=1.0 if right else None, done=right or self.asked == 5)

    @property
    def state(self) -> State:
        return State(step_count=self.asked)


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Seen, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
