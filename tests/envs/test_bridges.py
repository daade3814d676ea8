"""Gymnasium, TextArena and reasoning-gym as environments: on real ones, with right, wrong and hostile replies."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import random
import textwrap
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from scripted import Scripted, scripted

from posttrain.core.types import Invalid, Reply, StopReason, Turn, UserError
from posttrain.envs.bridges import arena, bridge, gym, mcp_tools, reasoning
from posttrain.envs.bridges.bridge import BridgeError, Chance, shown, task_seed
from posttrain.envs.check import check
from posttrain.envs.play.env_outputs import Done
from posttrain.envs.play.env_pool import EnvPool

JUNK = ("", "}{ )))", "x" * 100_000, "\x00", "\u0661", "nan", "1e999", "-1", "__import__('os')", "[5] [6]", "\ud800")


@pytest.mark.parametrize("module", [bridge, mcp_tools])
def test_examples_in_docstrings_are_true(module: Any) -> None:
    tried = doctest.testmod(module)
    assert tried.attempted and not tried.failed


# -- Gymnasium ---------------------------------------------------------------------------------------------------------

WORDS = ["left", "down", "right", "up"]
LAKE = gym.environment("FrozenLake-v1", make={"is_slippery": False}, actions=WORDS)
WAY = ["down", "down", "right", "right", "down", "right"]


def test_an_episode_is_the_one_of_the_library() -> None:
    env = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")
    env.reset(seed=task_seed({"id": "a"}))
    played = scripted(LAKE, {"id": "a"}, WAY)
    for text, word in zip(played.texts, WAY, strict=True):
        rendered = str(env.render()).strip("\n")
        assert text.strip("\n") == rendered.replace("\x1b[41m", "[").replace("\x1b[0m", "]")
        _, reward, done, _, _ = env.step(WORDS.index(word))
    assert done and played.reward == reward == 1.0


def test_seeds_come_from_the_task_and_a_stochastic_world_repeats_itself() -> None:
    slippery = gym.environment("FrozenLake-v1", actions=WORDS)
    ways = {
        seed: [scripted(slippery, {"id": "a", "seed": seed}, ["right"] * 9, then="down").texts for _ in range(2)]
        for seed in range(6)
    }
    assert all(first == second for first, second in ways.values())
    assert len({str(first) for first, _ in ways.values()}) > 1
    by_id = [scripted(slippery, {"id": name}, ["right"] * 9, then="down").texts for name in "aab"]
    assert by_id[0] == by_id[1] != by_id[2]
    env = gymnasium.make("FrozenLake-v1", render_mode="ansi")
    env.reset(seed=3)
    for text in ways[3][0][1:9]:
        env.step(2)
        assert str(env.render()).replace("\x1b[41m", "[").replace("\x1b[0m", "]").strip() == text.strip()
    wrong = scripted(slippery, {"seed": -1}, [])
    assert "give a whole number" in wrong.reason


@pytest.mark.parametrize("reply", [*JUNK, "jump", "downdown", "down down", "0", "left."])
def test_a_reply_that_is_no_action_is_answered_or_ends_the_episode(reply: str) -> None:
    told = scripted(LAKE, {"id": "a"}, [reply, *WAY])
    assert told.reward == 1.0 and told.texts[1] == "\nThat is no action. Actions: left, down, right, up.\n"
    assert told.texts[2:] == scripted(LAKE, {"id": "a"}, WAY).texts[1:]
    costs = gym.environment("FrozenLake-v1", make={"is_slippery": False}, actions=WORDS, invalid_reward=-0.25)
    assert scripted(costs, {"id": "a"}, [reply, reply, *WAY]).reward == 0.5
    ends = gym.environment(
        "FrozenLake-v1", make={"is_slippery": False}, actions=WORDS, invalid="end", invalid_reward=-1.0
    )
    ended = scripted(ends, {"id": "a"}, ["down", reply, *WAY])
    assert len(ended.shown) == 2 and ended.reward == -1.0


def test_an_episode_of_endless_nonsense_ends_by_itself() -> None:
    few = gym.environment("FrozenLake-v1", actions=WORDS, turns=5)
    assert len(scripted(few, {"id": "a"}, [], then="nothing").shown) == 5
    told = scripted(LAKE, {"id": "a"}, ["down", Reply("", StopReason.CONTEXT)], then="down")
    assert told.reward == 0.0 and len(told.shown) == 2


def test_settings_are_columns_too_and_what_is_played_stays() -> None:
    rows = gym.tasks(2, 1, "FrozenLake-v1", make='{"is_slippery": false}')
    assert [row["seed"] for row in rows] == [4, 6] and json.loads(json.dumps(rows)) == rows
    assert {row["seed"] % 2 for row in gym.tasks(9, 1, "Taxi-v3", held_out=True)} == {1}
    task = {**rows[0], "actions": WORDS, "prompt": "Go.", "chat": True, "stop": "\n", "turns": 3}
    played = scripted(gym.play, task, WAY)
    assert played.shown[0].messages == [{"role": "user", "content": f"Go.\n{scripted(LAKE, task, WAY).texts[0][4:]}"}]
    assert played.shown[0].stop == ("\n",) and len(played.shown) == 3
    cart = gym.environment("CartPole-v1")
    assert scripted(cart, {"env": "FrozenLake-v1"}, ["0"], then=None).texts[0].count(" ") == 3
    assert 'column "env"' in scripted(gym.play, {}, []).reason
    assert "doesn't exist" in scripted(gym.play, {"env": "FrozenPond-v1"}, []).reason
    for wrong in ({"invalid": "tell"}, {"turns": 0}, {"colour": 1}, {"failure": "no"}):
        with pytest.raises(UserError):
            gym.environment("CartPole-v1", **wrong)


def test_actions_of_other_kinds_are_numbers_texts_or_what_a_function_makes_of_them() -> None:
    car = gym.environment("MountainCarContinuous-v0", turns=4)
    told = scripted(car, {"seed": 1}, ["0.5", "2", "1 1", "one"]).texts
    assert told[0].strip().endswith(" 0") and told[2:] == ["\nThat is no action. It is 1 number from -1 to 1.\n"] * 2
    reads = gym.environment("CartPole-v1", actions=lambda reply: {"l": 0, "r": 1, "x": 7}.get(reply), turns=3)
    assert "no action" in scripted(reads, {"seed": 1}, ["l", "x", ""]).texts[2]
    named = gym.environment("CartPole-v1", actions={"push left": 0}, turns=2)
    assert scripted(named, {"seed": 1}, ["Push Left "], then=None).texts[1].count(" ") == 3
    assert "3 words" in scripted(gym.environment("CartPole-v1", actions=["a", "b", "c"]), {}, ["a"]).reason
    observed = gym.environment("CartPole-v1", observe=lambda o: f"{len(o)} numbers")
    assert scripted(observed, {}, [], then=None).texts[0] == "4 numbers\n"
    assert bridge.as_text(np.array([[1, 2], [3, 4]])) == "1 2\n3 4"


class Moody(gymnasium.Env[Any, Any]):
    """Draws from the global generators, and fails as its action says."""

    action_space = gymnasium.spaces.Text(20)
    observation_space = gymnasium.spaces.Text(20)
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return f"{random.random():.6f}", {}

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        if action == "raise":
            raise RuntimeError("it is broken")
        rewards = {"nan": float("nan"), "none": None, "text": "much", "numpy": np.float32(0.5)}
        return (
            f"{random.random():.6f} {np.random.rand():.6f}\ud800",
            rewards.get(action, 0.0),
            action == "end",
            False,
            {},
        )


def test_chance_is_an_episodes_own_whoever_plays_beside_it() -> None:
    env = gym.environment(Moody)
    alone = [scripted(env, {"seed": seed}, ["a", "b", "end"]).texts for seed in (1, 2)]
    assert alone[0] != alone[1]
    drawn = random.Random(1)
    assert [text.split()[0] for text in alone[0]] == [f"{drawn.random():.6f}" for _ in range(3)]
    beside: dict[int, list[str]] = {1: [], 2: []}
    random.seed(5)
    np.random.seed(5)
    with EnvPool(env, workers=0) as pool:
        for seed in beside:
            pool.start(seed, {"seed": seed})
        for reply in ("a", "b", "end", None):
            for id, event in pool.poll(None):
                if isinstance(event, Turn):
                    beside[id].append(event.text or "")
            for id in beside if reply is not None else ():
                pool.send(id, Reply(reply))
    assert list(beside.values()) == alone
    assert random.random() == random.Random(5).random() and np.random.rand() == np.random.RandomState(5).rand()
    chance = Chance(3)
    with pytest.raises(KeyError), chance.own():
        raise KeyError
    with chance.own():
        assert random.random() == random.Random(3).random()


@pytest.mark.parametrize(("action", "reason"), [("raise", "it is broken"), ("nan", "not a finite"), ("text", "'much'")])
def test_a_library_that_fails_is_invalid_or_ends_the_episode_as_declared(action: str, reason: str) -> None:
    assert reason in scripted(gym.environment(Moody), {"seed": 1}, ["a", action]).reason
    ends = gym.environment(Moody, failure="end", invalid_reward=-0.5)
    ended = scripted(ends, {"seed": 1}, ["numpy", action])
    assert ended.reward == 0.0 and len(ended.shown) == 2
    assert scripted(gym.environment(Moody), {"seed": 1}, ["none", "end"]).reward == 0.0


def test_what_a_library_shows_can_be_shown() -> None:
    text = scripted(gym.environment(Moody), {"seed": 1}, ["a"], then=None).texts[1]
    assert "\ud800" not in text and text.endswith("?\n")
    assert len(shown("a" * 1000, 100)) == 104 and shown("\x1b[2Ja\x1b[1mb\x1b[0m", 9) == "a[b]"


def test_check_finds_one_of_the_users_own_file_in_order(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(
        "from posttrain.envs.bridges.gym import environment\n"
        'lake = environment("FrozenLake-v1", make={"is_slippery": False}, actions=["left", "down", "right", "up"])\n'
    )
    report = check("my.py:lake", [{"id": "a", "replies": WAY}], seconds=30)
    assert report.ok and report.rewards[0] == 1.0, report.lines()


# -- TextArena ---------------------------------------------------------------------------------------------------------


def search(limit: int) -> list[str]:
    return [f"[{number}]" for number in range(1, limit + 1)]


def number_of(game: Scripted) -> int:
    """What the game of guessing was about, told by its hints."""
    return 1 + sum("higher" in text for text in game.texts[1:])


def test_a_game_is_played_with_the_tasks_seed_and_shows_only_what_is_new() -> None:
    easy = arena.environment("GuessTheNumber-v0", make={"max_turns": 30})
    games = {seed: scripted(easy, {"seed": seed}, search(20)) for seed in (1, 2, 3, 4)}
    random.seed(1)
    assert number_of(games[1]) == random.randint(1, 20)
    assert all(game.reward == 1.0 for game in games.values()) and len({number_of(game) for game in games.values()}) > 1
    texts = games[1].texts
    assert "Guess The Number" in texts[0] and set(texts[1:]) == {"\nThe target number is higher.\n"}
    assert scripted(easy, {"seed": 2}, search(20)).texts == games[2].texts
    bare = scripted(easy, {"seed": 1}, [text.strip("[]") for text in search(20)])  # brackets are put around
    assert bare.reward == 1.0


def test_an_invalid_move_is_explained_or_ends_the_game() -> None:
    number = number_of(scripted(arena.environment("GuessTheNumber-v0"), {"seed": 4}, search(20)))
    tells = arena.environment("GuessTheNumber-v0", invalid_reward=-0.125)
    played = scripted(tells, {"seed": 4}, ["hello", "[99]", f"[{number}]"])
    assert played.reward == 0.75 and all("invalid move" in text for text in played.texts[1:])
    ends = arena.environment("GuessTheNumber-v0", invalid="end", invalid_reward=-0.5)
    ended = scripted(ends, {"seed": 4}, ["hello", f"[{number}]"])
    assert len(ended.shown) == 1 and ended.reward == -0.5


@pytest.mark.parametrize("reply", JUNK)
def test_hostile_moves_lead_nowhere_and_come_to_an_end(reply: str) -> None:
    few = arena.environment("GuessTheNumber-v0", turns=6)
    played = scripted(few, {"seed": 4}, [], then=reply)
    assert len(played.shown) <= 6 and played.reward != 1.0
    assert not isinstance(played.reward, Invalid)


def first_free(text: str) -> str:
    return "[" + text.rpartition("Available Moves: '[")[2][:1] + "]"


def test_others_are_played_by_a_function_and_the_policy_has_its_seat() -> None:
    for seat in (0, 1):
        game = arena.environment("TicTacToe-v0", players=2, seat=seat, opponent=first_free)
        played = scripted(game, {"seed": 1}, ["8", "6", "7"])
        assert played.reward in (1.0, -1.0) and f"You are Player {seat}" in played.texts[0]
    assert "not for 1 players" in scripted(arena.environment("TicTacToe-v0"), {}, []).reason
    deaf = arena.environment("TicTacToe-v0", players=2, seat=1, opponent=lambda text: "no", turns=3)
    assert "for the same move repeatedly" in scripted(deaf, {"seed": 1}, ["1"]).reason
    assert 'column "game"' in scripted(arena.play, {}, []).reason


def test_the_policy_plays_every_seat_that_nobody_else_does() -> None:
    game = arena.environment("TicTacToe-v0", players=2, invalid_reward=-0.25)
    ended = scripted(game, {"id": "a", "seed": 1}, ["[0]", "[3]", "[1]", "[4]", "[2]"], then=None)
    assert [turn.side for turn in ended.shown] == ["player 0", "player 1"] * 2 + ["player 0"]
    assert ended.done is not None and {s: d.reward for s, d in ended.done.sides.items()} == {
        "player 0": 1,
        "player 1": -1,
    }
    first, second, third = ended.texts[:3]
    assert "You are Player 0" in first and "You are Player 1" in second and "You are Player" not in third
    assert "[3]" in third and "[0]" not in third  # what the other one did is new, what it did itself is not
    # Who makes a mistake is told, and pays for it.
    ended = scripted(game, {"id": "a", "seed": 1}, ["[0]", "[0]", "[3]", "[1]", "[4]", "[2]"], then=None)
    assert [turn.side for turn in ended.shown] == [
        "player 0",
        "player 1",
        "player 1",
        "player 0",
        "player 1",
        "player 0",
    ]
    assert [turn.reward for turn in ended.shown] == [0, 0, -0.25, 0, 0, 0] and "nvalid" in ended.texts[2]
    harsh = arena.environment("TicTacToe-v0", players=2, invalid="end", invalid_reward=-0.25)
    ended = scripted(harsh, {"id": "a", "seed": 1}, ["[0]", "[0]"], then=None)
    assert ended.done is not None and ended.done.of("player 1").reward == -1.25
    row = {"id": "a", "seed": 1, "game": "TicTacToe-v0", "players": 2}
    assert (
        scripted(arena.play, row, ["[0]", "[3]", "[1]", "[4]", "[2]"], then=None).done
        == scripted(game, row, ["[0]", "[3]", "[1]", "[4]", "[2]"], then=None).done
    )


# -- reasoning-gym -----------------------------------------------------------------------------------------------------

EASY = (
    "leg_counting",
    "basic_arithmetic",
    "binary_matrix",
    "countdown",
    "game_of_life_halting",
    "knights_knaves",
)


@pytest.mark.parametrize("dataset", EASY)
def test_rows_hold_all_that_their_score_needs(dataset: str) -> None:
    rows = reasoning.tasks(2, 0, dataset)
    assert rows == json.loads(json.dumps(rows)) and len({row["id"] for row in rows}) == len(rows)
    import reasoning_gym

    for row in rows:
        assert reasoning.reward(row, f"I think <answer>1</answer>\n{row['response']}") == 1.0
        assert reasoning.reward(row, row["answer"]) == 0.0  # without tags
        assert reasoning.reward({**row, "plain": True}, f" {row['answer']} \n") == 1.0
        entry = reasoning._restored(row["entry"])
        made = reasoning_gym.create_dataset(dataset).score_answer("1 2", entry)
        if dataset not in reasoning.EXACT:
            assert reasoning.reward(row, "<answer>1 2</answer>") == pytest.approx(made)
    with pytest.raises(AssertionError):
        assert reasoning.tasks(2, 0, dataset) == reasoning.tasks(2, 1, dataset)


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("prime_factorization", "}{"), ("coin_flip", "1e999"), ("boxnet", "1"), ("complex_arithmetic", "nan"),
        ("game_of_life_halting", "anything"), ("binary_matrix", "[open('escaped', 'w')]"), ("countdown", "9**9**9**9"),
        ("polynomial_multiplication", "exec(chr(112))"), ("n_queens", "(lambda: 0)()"), ("leg_counting", "7" * 30_000),
    ],
)  # fmt: skip
def test_hostile_answers_earn_nothing_and_are_never_invalid(
    dataset: str, answer: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [row] = reasoning.tasks(1, 0, dataset)
    assert reasoning.reward(row, f"<answer>{answer}</answer>") == 0.0
    assert not list(tmp_path.iterdir())


def test_every_scorer_that_evaluates_what_it_reads_is_known() -> None:
    """By the sources of the installed library."""
    from reasoning_gym.factory import DATASETS

    evaluates: dict[str, bool] = {}
    for name, (dataset, _) in DATASETS.items():
        source = ast.parse(textwrap.dedent(inspect.getsource(dataset.score_answer)))
        calls = {node.func for node in ast.walk(source) if isinstance(node, ast.Call)}
        names = {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}
        evaluates[name] = bool(names & {"eval", "exec", "parse_expr", "sympify", "S", "compile"})
    gold_only = {"number_sorting"}  # evaluates the entry's own answer
    assert {name for name, does in evaluates.items() if does} - gold_only == reasoning.LITERALS | reasoning.FORMULAS
    for name in reasoning.LITERALS | reasoning.FORMULAS:
        for row in reasoning.tasks(10, 3, name):
            assert "answer" not in row or reasoning.harmless(name, row["answer"]), row["answer"]


def test_entries_come_back_from_a_row_as_they_were() -> None:
    entry = {
        "a": [(1, "x"), {2: (3.5, None)}],
        "tuple": (),
        "b": {"items": [True]},
        "c": {"tuple": 1},
        "d": np.float64(0.5),
    }
    found = reasoning._restored(json.loads(json.dumps(reasoning._plain(entry))))
    assert found == entry and type(found["a"][0]) is tuple
    with pytest.raises(UserError, match="which a row cannot hold"):
        reasoning._plain({1, 2})


def test_a_scorer_that_fails_on_everything_is_invalid() -> None:
    [row] = reasoning.tasks(1, 0, "leg_counting")
    broken = {**row, "entry": {**row["entry"], "answer": 5}}
    assert isinstance(reasoning.reward(broken, "<answer>4</answer>"), Invalid)
    assert "was not made by" in getattr(reasoning.reward({"dataset": "x"}, "4"), "reason", "")
    assert isinstance(reasoning.reward({**row, "dataset": "no_such_set"}, "<answer>4</answer>"), Invalid)


def test_held_out_questions_are_not_among_those_to_train_on() -> None:
    train, held_out = (
        reasoning.tasks(60, 0, "leg_counting", config='{"max_animals": 3}', held_out=h) for h in (False, True)
    )
    assert held_out and not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert {row["config"]["max_animals"] for row in train} == {3}
    for dataset, config in (
        ("leg_count", ""),
        ("composite", ""),
        ("leg_counting", "{"),
        ("leg_counting", '{"legs": 1}'),
    ):
        with pytest.raises(UserError):
            reasoning.tasks(1, 0, dataset, config=config)


def test_what_is_not_installed_says_how_to_get_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"pip install 'websockets"):
        bridge.need("no_such_library", "openenv")
    (tmp_path / "mine.py").write_text(
        "from posttrain.envs.bridges.bridge import need\nneed('no_such_library', 'openenv')\n"
    )
    with pytest.raises(UserError, match=r"mine.py: no_such_library is not installed"):
        check(f"{tmp_path / 'mine.py'}:env", [{}])


def test_an_environment_travels_to_its_worker_by_value() -> None:
    loads: Callable[..., Any] = gym.environment("FrozenLake-v1", make={"is_slippery": False}, actions=WORDS)
    with EnvPool(loads, workers=1, seconds=60) as pool:
        pool.start(0, {"id": "a"})
        for word in WAY:
            [(_, event)] = pool.poll(None)
            assert isinstance(event, Turn)
            pool.send(0, Reply(word))
        assert pool.poll(None) == [(0, Done(1.0))]
    assert BridgeError("x").args == ("x",)
