"""Calculator, countdown, guess-the-number and the adventure: what right, wrong, malformed and hostile replies earn."""

from __future__ import annotations

import doctest
import itertools
import json
import random
import time
from fractions import Fraction
from typing import Any

import pytest
from scripted import scripted

from posttrain.core.types import Invalid, Reply, StopReason, Turn, UserError
from posttrain.envs.builtin import adventure, arithmetic, calculator, countdown, guess
from posttrain.envs.builtin.generated import HELD_OUT, is_held_out, write
from posttrain.envs.check import check
from posttrain.verify.expression import DEEPEST, LONGEST, leaves, parse

MAKERS = {"calculator": calculator, "countdown": countdown, "guess": guess, "adventure": adventure}
LIMITS = {"guess": {"limit": 100}}
HOSTILE = (
    "", " \n", "\x00", "}{ )))", "so we get 12, " * 4000, "9" * 5000, "-", "(" * 3000, "1/0", "\u0661\u0662", "1_2", "NaN",
    "[exit()]", "__import__('os')", "<answer></answer>", "</calc>", "<calc></calc>", "go", "take", "go north\ntake crown",
    "\u00b2", "1e3", "\ud800",
)  # fmt: skip


def made(name: str, count: int = 60, seed: int = 3, **settings: Any) -> list[dict[str, Any]]:
    return MAKERS[name].tasks(count, seed, **{**LIMITS.get(name, {}), **settings})  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MAKERS)
def test_tasks_are_distinct_reproducible_and_solved_by_their_own_replies(name: str) -> None:
    tasks = made(name)
    assert len({task["id"] for task in tasks}) == len(tasks) == 60
    assert tasks == made(name) == json.loads(json.dumps(tasks)) and tasks != made(name, seed=4)
    assert check(name, tasks[:4]).ok
    for task in tasks:
        env = load(name)
        right = scripted(env, task, task.get("replies") or [task["response"]])
        earned = {"answer": 1.0, "form": 0.1} if name == "countdown" else {}
        assert right.reward == pytest.approx(1.1 if name == "countdown" else 1.0) and right.done.rewards == earned  # type: ignore[union-attr]


@pytest.mark.parametrize("name", MAKERS)
def test_training_tasks_and_held_out_ones_never_meet(name: str) -> None:
    train = {task["id"] for seed in range(3) for task in made(name, 200, seed)}
    held_out = {task["id"] for seed in range(3) for task in made(name, 40, seed, held_out=True)}
    assert not train & held_out
    assert abs(sum(map(is_held_out, map(str, range(20_000)))) / 20_000 - HELD_OUT) < 0.01


@pytest.mark.parametrize("name", MAKERS)
def test_hostile_replies_earn_nothing_and_cost_no_time(name: str) -> None:
    env, began = load(name), time.perf_counter()
    for task in made(name, 2):
        for reply in HOSTILE:
            assert scripted(env, task, [], then=reply).reward == 0.0, reply
    assert time.perf_counter() - began < 20


def test_the_command_writes_the_rows_of_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    write(countdown.tasks, ["--count", "5", "--seed", "2", "--numbers", "3", "--held-out"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == countdown.tasks(5, 2, numbers=3, held_out=True)
    for words in (["--numbers", "1"], ["--count", "0"], ["--limit", "2"]):
        with pytest.raises(SystemExit) as ended:
            write(guess.tasks if "--limit" in words else countdown.tasks, words)
        assert ended.value.code == 2
    assert "only" in capsys.readouterr().err  # 1000 games of limit 2
    with pytest.raises(UserError, match=r"only \d+ such"):
        guess.tasks(200, 0, limit=14)


@pytest.mark.parametrize("module", [arithmetic, calculator, countdown, guess], ids=lambda module: module.__name__)
def test_examples_in_docstrings_are_true(module: Any) -> None:
    tried = doctest.testmod(module)
    assert tried.attempted and not tried.failed


def load(name: str) -> Any:
    from posttrain.envs.play.load_env import lift, load_env

    return lift(load_env(name)) if name == "countdown" else load_env(name)


# -- countdown ---------------------------------------------------------------------------------------------------------

TASK = {"id": "a", "prompt": "?", "numbers": [3, 7, 7, 25], "target": 32}


@pytest.mark.parametrize(
    ("reply", "answer", "form"),
    [
        ("25+7", 1, 1), (" (25 + 7) \n", 1, 1), ("25+7=32", 1, 1), ("<think>25+8?</think><answer>7+25</answer>", 1, 1),
        ("25\u00d77\u22127", 0, 1), ("7*7-25+3", 0, 1), ("7+7+7+7+7-3", 0, 0), ("25+7+0", 0, 0), ("32", 0, 0),
        ("25+3+4", 0, 0),
        ("-7+25", 0, 0), ("25+7=33", 0, 0), ("25+7=32=32", 0, 0), ("25+ 7 7", 0, 0), ("257", 0, 0),
        ("25.0+7", 0, 0), ("25+7.", 0, 0),
        ("25+7)", 0, 0), ("(25+7", 0, 0), ("2*5**7", 0, 0), ("25//7", 0, 0), ("25%7", 0, 0), ("25+x", 0, 0),
        ("25/(7-7)", 0, 0),
        ("25+\u0667", 0, 0), ("25+7 apples", 0, 0), ("25,7", 0, 0),
        ("<answer>25+7</answer><answer>25</answer>", 0, 1), ("+25+7", 0, 0),
        ("0x19+7", 0, 0), ("7 + 25 or 25 + 7", 0, 0), ("(((((((((((((((((((((((25)))))))))))))))))))))))+7", 0, 0),
    ],
)  # fmt: skip
def test_only_given_numbers_as_often_as_given_reach_the_target(reply: str, answer: int, form: int) -> None:
    assert countdown.reward(TASK, reply) == {"answer": float(answer), "form": 0.1 * form}


def test_where_all_numbers_are_asked_for_none_may_be_left_out() -> None:
    task = {**TASK, "target": 28, "all": True}
    assert countdown.reward(task, "25+3") == {"answer": 0.0, "form": 0.0}
    assert countdown.reward(task, "25+3+7-7") == {"answer": 1.0, "form": 0.1}


def test_values_are_exact_and_equal_pythons_on_random_expressions() -> None:
    rng, rejected = random.Random(1), 0
    for _ in range(400):
        numbers = [rng.randint(0, 9) for _ in range(4)]
        drawn = rng.sample(numbers, 3) if rng.random() < 0.8 else [rng.randint(0, 9) for _ in range(3)]
        text = "({}{}{}){}{}".format(drawn[0], rng.choice("+-*/"), drawn[1], rng.choice("+-*/"), drawn[2])
        legal = all(drawn.count(number) <= numbers.count(number) for number in drawn)
        spaced = "".join(f"Fraction({c})" if c.isdigit() else c for c in text)
        try:
            expected = eval(spaced, {"Fraction": Fraction}) if legal else None
        except ZeroDivisionError:
            expected = None
        rejected += not legal
        assert countdown.value_with(text, numbers) == expected, (text, numbers)
    assert 20 < rejected < 200


def test_the_longest_and_the_deepest_expression_are_read_and_longer_and_deeper_ones_are_not() -> None:
    for most, written in ((LONGEST, "1" * LONGEST), (DEEPEST, "(" * DEEPEST + "1" + ")" * DEEPEST)):
        assert parse(written) is not None, most
    assert parse("1" * (LONGEST + 1)) is None
    assert parse("(" * (DEEPEST + 1) + "1" + ")" * (DEEPEST + 1)) is None


def test_a_number_is_the_same_leaf_however_its_zeros_are_written() -> None:
    written = {"2.50": "2.5", "2.0": "2", "2.": "2", "20": "20", "007": "7", ".50": "0.5", "0.0": "0"}
    assert {text: parse(text) for text in written} == written


def test_rows_of_public_data_become_tasks_and_what_is_none_is_left_out() -> None:
    task = countdown.row_to_task({"nums": [19, 36, 55], "target": 98})
    assert task is not None and task["prompt"] == "Make 98 from 19 36 55: " and task["numbers"] == [19, 36, 55]
    assert countdown.row_to_task({"nums": [], "target": 1}) is None and countdown.row_to_task({"nums": [1]}) is None
    for numbers, target in (([1.5], 2), ([True], 1), (["1"], 1), ([1], "1"), (None, 1)):
        assert isinstance(countdown.reward({"numbers": numbers, "target": target}, "1"), Invalid)


def test_every_generated_solution_uses_most_of_its_numbers() -> None:
    for task in countdown.tasks(100, 0, numbers=5):
        used = list(map(int, leaves(parse(task["response"]))))  # type: ignore[arg-type]
        assert len(used) >= 4 and task["target"] not in task["numbers"] and 0 < task["target"] <= 100
    with pytest.raises(UserError, match="larger target"):
        countdown.tasks(1, 0, numbers=2, largest=1, target=1)


# -- calculator --------------------------------------------------------------------------------------------------------

SUM = {"prompt": "What is 758*37-332? ", "answer": "27714"}


@pytest.mark.parametrize(
    ("replies", "reward", "answers"),
    [
        (["27714"], 1, []),
        (["27,714"], 1, []),
        (["I think <answer>27714</answer>"], 1, []),
        (["27714 or 5"], 0, []),
        (["<calc>758*37-332</calc>", "27714"], 1, ["27714"]),
        (["Well. <calc>758*37</calc>", "so <calc>28046 - 332</calc>", "27714"], 1, ["28046", "27714"]),
        (["<calc>758*37-332</calc>", "It is 27714."], 0, ["27714"]),
        (["<calc>758*37-332</calc>", ""], 0, ["27714"]),
        (["<calc>1</calc><calc>2*3</calc>", "6"], 0, ["6"]),
        (["<calc>__import__('os')</calc>", "27714"], 1, ["not an expression that can be worked out"]),
        (["<calc>9**9**9</calc>", "27714"], 1, ["not an expression that can be worked out"]),
        (["758*37</calc>", "27714"], 1, ["write <calc> before what is asked"]),
        (["<calc>1/3</calc>", "27714"], 1, ["0.333333333333"]),
        (["<calc>1+1</calc> so 27714"], 0, []),  # goes on behind the call: no call
        (["<out>27714</out>"], 0, []),  # its own words, not the tool's
        (["<calc>1</calc>"] * 9, 0, ["1"] * 4),
    ],
)
def test_the_calculator_answers_calls_and_the_last_reply_is_the_answer(
    replies: list[str], reward: float, answers: list[str]
) -> None:
    played = scripted(calculator.calculator, SUM, replies)
    assert played.reward == reward
    assert played.texts == [SUM["prompt"], *(f"<out>{answer}</out>" for answer in answers)]
    assert all(turn.tool == (turn is not played.shown[0]) and "</calc>" in turn.stop for turn in played.shown)


def test_calls_are_a_column_and_messages_are_shown_as_such() -> None:
    task = {"messages": [{"role": "user", "content": "1+1?"}], "answer": "2", "calls": 1, "stop": "\n"}
    played = scripted(calculator.calculator, task, ["<calc>1+1</calc>", "<calc>2</calc>"])
    assert played.shown[0].messages and played.shown[0].stop == ("\n", "</calc>") and len(played.shown) == 2
    assert isinstance(scripted(calculator.calculator, {"prompt": "?", "answer": "many"}, ["1"]).reward, Invalid)
    assert calculator.worked_out(("9" * 99 + "*") * 1 + "9" * 99).isdigit()


# -- guess -------------------------------------------------------------------------------------------------------------

GAME = {"answer": "12", "limit": 50, "guesses": 4}


@pytest.mark.parametrize(
    ("replies", "reward", "hints"),
    [
        (["12"], 1, []),
        ([" 12\n"], 1, []),
        (["25", "12"], 1, ["lower"]),
        (["6\n", "24\n", "9\n", "12\n"], 1, ["higher", "lower", "higher"]),
        (["1", "2", "3", "4", "12"], 0, ["higher", "higher", "higher"]),
        (["12 13", "12, 13", "012", "12"], 1, ["no number", "no number"]),
        (["-12", "12.0", "1 2", "twelve"], 0, ["no number"] * 3),
        (["9" * 10, "9" * 9], 0, ["no number", "lower", "no number"]),
    ],
)
def test_hints_lead_to_the_number(replies: list[str], reward: float, hints: list[str]) -> None:
    played = scripted(guess.guess, GAME, replies)
    assert played.reward == reward
    assert played.texts == ["A number below 50: ", *(f"{hint}: " for hint in hints)]


def test_a_search_by_halves_always_finds_a_number_in_as_many_guesses_as_it_takes() -> None:
    for limit in (2, 63, 100):
        needed = [len(guess.halves(answer, limit)) for answer in range(limit)]
        assert max(needed) == limit.bit_length()
        for answer in range(0, limit, 7):
            task = {"answer": str(answer), "limit": limit, "guesses": 7}
            assert scripted(guess.guess, task, guess.halves(answer, limit)).reward == 1.0


# -- adventure ---------------------------------------------------------------------------------------------------------

WORLD = {
    "home": "hall",
    "treasures": ["ruby", "pearl"],
    "rooms": [
        {"name": "hall", "things": ["iron key"], "exits": [{"way": "north", "to": "cave"}]},
        {"name": "cave", "things": ["pearl", "lamp"], "exits": [
            {"way": "south", "to": "hall"}, {"way": "east", "to": "well", "key": "iron key"},
        ]},
        {"name": "well", "things": ["ruby"], "exits": [{"way": "west", "to": "cave"}]},
    ],
}  # fmt: skip
WAY = [
    "take iron key",
    "go north",
    "take pearl",
    "go east",
    "take ruby",
    "go west",
    "go south",
    "drop pearl",
    "drop ruby",
]


def test_each_step_that_scores_is_rewarded_when_it_does() -> None:
    played = scripted(adventure.adventure, {"world": WORLD}, WAY)
    assert [turn.reward for turn in played.shown] == [0, 0, 0, 0.25, 0, 0.25, 0, 0, 0.25]
    assert played.done is not None and played.done.reward == 0.25 and played.reward == 1.0
    assert len(adventure.solution(WORLD)) == len(WAY)


def test_points_are_given_once_and_only_at_home() -> None:
    twice = ["north", "take pearl", "drop pearl", "take pearl", "south", "drop pearl", "take pearl", "drop pearl"]
    assert scripted(adventure.adventure, {"world": WORLD}, twice).reward == 0.5
    assert scripted(adventure.adventure, {"world": WORLD}, ["go north", "take pearl", "drop pearl"]).reward == 0.25
    assert scripted(adventure.adventure, {"world": WORLD, "turns": 2}, ["go north", "take pearl"]).reward == 0.25
    assert scripted(adventure.adventure, {"world": WORLD, "turns": 1}, ["go north", "take pearl"]).reward == 0.0


def test_what_is_no_command_or_cannot_be_done_changes_nothing() -> None:
    before = "You are in the hall. Ways: north. You see: iron key."
    nothing = ["go east", "take pearl", "drop iron key", "take", "go", "fly", "go north and take pearl", "north south",
               "LOOK AROUND", "take iron  keys", "take key", "x" * 10_000]  # fmt: skip
    played = scripted(adventure.adventure, {"world": WORLD, "turns": 40}, [*nothing, "look"], then=None)
    assert played.texts[-1] == f"{before}\n> " and all(turn.reward == 0 for turn in played.shown)
    assert "x" * 100 not in "".join(played.texts)
    locked = scripted(adventure.adventure, {"world": WORLD}, ["go north", "go east", "look"], then=None).texts
    assert locked[2] == "That way is locked.\n> " and "east (locked)" in locked[3]
    assert "Taken." in scripted(adventure.adventure, {"world": WORLD}, ["  TAKE Iron   Key "], then=None).texts[1]


def test_solutions_are_shortest() -> None:
    """Against a search over all commands that the game itself understands, in the order of their number."""
    for task in adventure.tasks(3, 5, rooms=3, treasures=1):
        world, best = task["world"], len(task["replies"])
        things = [*world["treasures"], *(t for room in world["rooms"] for t in room["things"])]
        commands = [f"go {way}" for way in adventure.WAYS] + [
            f"{verb} {t}" for verb in ("take", "drop") for t in set(things)
        ]
        assert not reachable(world, commands, best - 1) and reachable(world, commands, best)


def reachable(world: dict[str, Any], commands: list[str], steps: int) -> bool:
    """Whether full score is within so many commands."""
    states: dict[Any, list[str]] = {None: []}
    for _ in range(steps):
        after: dict[Any, list[str]] = {}
        for path, command in itertools.product(states.values(), commands):
            game = adventure.Game(world)
            for said in (*path, command):
                game.do(said)
            if game.score == game.most:
                return True
            key = (game.here, tuple(sorted(game.held)), tuple(sorted(game.scored)), str(sorted(game.things.items())))
            after.setdefault(key, [*path, command])
        states = after
    return False


def test_a_world_that_is_none_is_invalid() -> None:
    rooms: list[Any] = WORLD["rooms"]  # type: ignore[assignment]
    wrong: list[Any] = [
        None, {}, {**WORLD, "home": "sea"}, {**WORLD, "treasures": []}, {**WORLD, "treasures": ["gold"]},
        {**WORLD, "rooms": rooms[:2]}, {**WORLD, "rooms": [{"name": "hall"}]}, {**WORLD, "rooms": 3},
        {**WORLD, "treasures": [["ruby"]]},
    ]  # fmt: skip
    for world in wrong:
        assert "world is invalid" in scripted(adventure.adventure, {"world": world}, []).reason
    shut = {**WORLD, "rooms": [{**rooms[0], "things": []}, *rooms[1:]]}
    with pytest.raises(ValueError, match="not all treasures"):
        adventure.solution(shut)


@pytest.mark.parametrize("name", MAKERS)
def test_an_episode_that_runs_out_ends_with_what_it_has(name: str) -> None:
    out = Reply("", StopReason.CONTEXT)
    played = scripted(load(name), made(name, 1)[0], [out], then=out)
    assert played.reward == 0.0 and all(isinstance(turn, Turn) for turn in played.shown)
