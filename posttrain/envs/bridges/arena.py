"""Games of TextArena: the game's text is a turn, a reply the move.

    # my.py                                                          posttrain rl --env my.py:hangman ...
    hangman = environment("Hangman-v0", invalid="end")

    python -m posttrain.envs.bridges.arena GuessTheNumber-v0 --count 100 > rows.jsonl     posttrain rl --env textarena ...

Games have one player or several. In the second case a function of yours makes the others' moves, or the policy plays
every seat and each seat has a rollout of its own. The task's "seed" is the game's. The reward is the game's at its end,
mostly from -1 to 1. All settings may be columns of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.core.types import Reply, Task, Turn, UserError, Verdict
from posttrain.envs.bridges.bridge import (
    BridgeError,
    Chance,
    GameStep,
    Manner,
    made,
    need,
    number_of,
    played,
    task_seed,
)
from posttrain.envs.builtin.generated import write

need("textarena", "textarena")

SUCCESS = 1.0  # the reward of winning
PATIENT = 1 << 30  # number of invalid moves that a game then explains


@dataclass(frozen=True)
class TextArena(Manner):
    """A game of TextArena as an environment of ours.

    `invalid`: with "answer" the game explains every invalid move, with "end" the first one ends the game.
    `invalid_reward` is added to the game's own reward for losing by an invalid move.
    """

    game: str = ""  # its id
    make: Mapping[str, Any] = field(default_factory=dict)  # arguments of textarena.make
    players: int = 1
    seat: int = 0  # the policy's seat
    opponent: Callable[[str], str] | None = None
    """Plays the other seats: text of the game -> move; None: the policy plays them."""

    def __call__(self, task: Task) -> Generator[Turn, Reply, Verdict]:
        how: TextArena = self.told_by(task)
        return (yield from played(how, _Episode(how, task)))


def environment(game: str, **settings: Any) -> TextArena:
    """Return the game of this id as an environment. `settings`: fields of `TextArena`."""
    return made(TextArena, repr(game), game=game, **settings)


play = TextArena()
"""Any game, with the policy in every seat. The task's column "game" is its id, "players" the number of players (1)."""


class _Episode:
    def __init__(self, how: TextArena, task: Task) -> None:
        self.how, self.seed = how, task_seed(task)
        self.chance = Chance(self.seed)
        self.env: Any = None
        self.mistakes = 0

    def begin(self) -> GameStep:
        with self.chance.own():
            self.env = self._made()
            try:
                self.env.reset(num_players=self.how.players, seed=self.seed)
            except AssertionError as error:
                raise BridgeError(f"{self.how.game} is not for {self.how.players} players: {error}") from error
            if hasattr(self._state, "error_allowance"):
                self._state.error_allowance = PATIENT if self.how.invalid == "answer" else 0
            return self._after(done=False)

    def act(self, reply: str) -> GameStep:
        with self.chance.own():
            before = self._mistakes()
            seat = self._state.current_player_id
            done, _ = self.env.step(reply.strip())
            wrong = self._mistakes() > before or self._lost_by_mistake(seat)
            step = self._after(bool(done))
        mistake = self.how.invalid_reward * wrong
        if step.earned is None:
            return replace(step, reward=step.reward + mistake)
        own = self._side(seat)
        return replace(step, earned={**step.earned, own: step.earned[own] + mistake})

    def close(self) -> None:
        pass  # games hold nothing

    @property
    def _state(self) -> Any:
        return self.env.state

    def _made(self) -> Any:
        import textarena
        from textarena.wrappers import ActionFormattingWrapper

        if not self.how.game:
            raise UserError('the task has no column "game": give the id of a game')
        raw = self.how.game if self.how.game.endswith("-raw") else f"{self.how.game}-raw"
        return ActionFormattingWrapper(textarena.make(raw, **self.how.make))

    def _after(self, done: bool) -> GameStep:
        """Play the opponent's moves until it is the policy's turn; return the text that the policy then sees."""
        import textarena

        moves = 0
        while not done and not self._of_the_policy(self._state.current_player_id):
            if self.how.opponent is None or moves >= self.how.turns * self.how.players:
                raise BridgeError(
                    f"{self.how.game} asks player {self._state.current_player_id} for the same move repeatedly"
                )
            _, said = self.env.get_observation()
            done, _ = self.env.step(self.how.opponent(_words(said, textarena.GAME_ID, self._state.current_player_id)))
            moves += 1
        if not done:
            seat, said = self.env.get_observation()
            return GameStep(_words(said, textarena.GAME_ID, seat), side=self._side(seat))
        rewards, _ = self.env.close()
        earned = {seat: number_of((rewards or {}).get(seat), "the game's reward") for seat in range(self.how.players)}
        if not self._side(0):
            return GameStep("", earned.get(self.how.seat, 0.0), True)
        return GameStep("", done=True, earned={self._side(seat): reward for seat, reward in earned.items()})

    def _of_the_policy(self, seat: int) -> bool:
        return seat == self.how.seat or bool(self._side(seat))

    def _side(self, seat: int) -> str:
        """Return the name of a seat if the policy plays several; else ""."""
        return f"player {seat}" if self.how.players > 1 and self.how.opponent is None else ""

    def _mistakes(self) -> int:
        return int(getattr(self._state, "error_count", 0))

    def _lost_by_mistake(self, seat: int) -> bool:
        return bool(self._state.game_info.get(seat, {}).get("invalid_move"))


def _words(said: Sequence[tuple[int, str, Any]], game: int, own: int) -> str:
    """Return the new messages for a player, without its own moves."""
    return "\n".join(
        text if speaker == game else f"Player {speaker}: {text}" for speaker, text, _ in said if speaker != own
    )


def tasks(count: int, seed: int, game: str, *, held_out: bool = False) -> list[Task]:
    """Return rows for `--env textarena`: seeds of one game, even ones for training and odd ones held out."""
    first = 2 * seed * count + held_out
    return [{"id": f"{game} {first + 2 * n}", "game": game, "seed": first + 2 * n} for n in range(count)]


if __name__ == "__main__":
    write(tasks)
