"""What users name is found or refused with the fix; what they return is read or Invalid, never a silent 0."""

from __future__ import annotations

import functools
import math
import operator
import subprocess
import sys
import threading
from collections.abc import Generator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from posttrain.core.types import Graded, Invalid, InvalidKind, Reply, SpanReward, Task, Turn, UserError
from posttrain.envs.play.env_outputs import LONGEST_TEXT, MOST_SPANS, Done, read_turn, read_verdict
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.env_runner import EnvRunner
from posttrain.envs.play.load_env import (
    BUILTIN,
    is_generator_env,
    lift,
    load_converter,
    load_env,
    pack_env,
    success_of,
    unpack_env,
)

MY = """
from neighbour import SCORE

def reward(task, reply):
    return SCORE

def env(task):
    reply = yield "a"
    return 1.0

def row_to_task(row):
    return {"prompt": row["question"]}

limit = 3

class Judge:
    def __call__(self, task, reply):
        return 0.25

judge = Judge()

class Game:
    def reset(self): ...
    def step(self, action): ...

game = Game()

async def later(task, reply):
    return 1.0

def backwards(reply):
    return 1.0
"""


@pytest.fixture
def my(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("SCORE = 0.75")
    (tmp_path / "my.py").write_text(MY)
    return tmp_path / "my.py"


def refusal(spec: object) -> str:
    with pytest.raises(UserError) as caught:
        load_env(spec)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_is_imported_under_a_private_name_and_finds_its_neighbours(my: Path) -> None:
    reward = load_env(f"{my}:reward")
    assert reward({}, "x") == 0.75
    assert "my" not in sys.modules
    assert load_env(f"{my}:reward") is reward  # imported once


def test_a_relative_path_is_relative_to_the_working_directory(my: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(my.parent)
    assert load_env("my.py:judge")({}, "x") == 0.25


def test_a_module_is_found_by_its_dotted_name() -> None:
    assert load_env("operator:add") is operator.add


def test_functions_stand_for_themselves() -> None:
    function = lambda task, reply: 1.0  # noqa: E731
    assert load_env(function) is function


def test_a_converter_beside_the_environment_is_found(my: Path) -> None:
    convert = load_converter(f"{my}:reward")
    assert convert is not None and convert({"question": "q"}) == {"prompt": "q"}
    assert load_converter(load_env(f"{my}:reward")) is convert
    assert load_converter("operator:add") is None


@pytest.mark.parametrize("success", ['float("nan")', 'float("inf")', '"x"', "[1]", "10**400"])
def test_a_success_beside_the_environment_that_is_no_finite_number_is_refused(tmp_path: Path, success: str) -> None:
    (tmp_path / "my.py").write_text(f"SUCCESS = {success}\ndef reward(task, reply): return 1.0\n")
    for spec in (f"{tmp_path}/my.py:reward", load_env(f"{tmp_path}/my.py:reward")):
        with pytest.raises(UserError, match=r"^SUCCESS in the environment's module is .*; it must be a finite number"):
            success_of(spec, None)
        assert success_of(spec, 0.5) == 0.5


def test_a_converter_beside_the_environment_that_is_no_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("row_to_task = 5\ndef reward(task, reply): return 1.0\n")
    with pytest.raises(UserError, match=r"^row_to_task in the environment's module is 5 \(int\)"):
        load_converter(f"{tmp_path}/my.py:reward")


def test_an_exception_that_cannot_say_what_it_is_is_named_by_its_type() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise SystemExit

    def reward(task: Any, reply: str) -> float:
        raise Silent

    stage = EnvRunner(reward, alone=True)
    stage.start(0, {"prompt": "a"})
    done = stage.send(0, Reply("b"))
    assert isinstance(done, Done) and isinstance(done.reward, Invalid) and done.reward.reason.startswith("Silent (")


def test_a_missing_file_is_refused_with_a_suggestion(my: Path) -> None:
    assert "did you mean 'my.py'" in refusal(f"{my.parent}/mi.py:reward")
    assert "there is no file" in refusal("/no/such/folder/my.py:reward")


def test_a_file_that_does_not_import_shows_its_own_error_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import json\n\njson.loads('{')\n")
    (tmp_path / "b.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "c.py").write_text("import no_such_thing\n")
    (tmp_path / "d.py").write_text("exit()\n")
    assert "JSONDecodeError" in refusal(f"{tmp_path}/a.py:f") and "(a.py:3)" in refusal(f"{tmp_path}/a.py:f")
    assert "SyntaxError" in refusal(f"{tmp_path}/b.py:f") and "(b.py:2)" in refusal(f"{tmp_path}/b.py:f")
    assert "no_such_thing" in refusal(f"{tmp_path}/c.py:f") and "(c.py:1)" in refusal(f"{tmp_path}/c.py:f")
    assert "SystemExit" in refusal(f"{tmp_path}/d.py:f")


def test_a_missing_module_is_told_from_one_that_misses_something() -> None:
    assert "there is no module 'no_such_package.thing'" in refusal("no_such_package.thing:f")


def test_a_missing_name_lists_what_there_is(my: Path) -> None:
    message = refusal(f"{my}:rewards")
    assert "did you mean 'reward'" in message and "backwards" in message and "env" in message


def test_an_unknown_built_in_is_answered_with_one_like_it_or_with_all() -> None:
    assert "did you mean 'gsm8k'?" in (message := refusal("gsm8")) and "nim" not in message
    message = refusal("xyz")
    assert all(name in message for name in BUILTIN)


def test_a_file_without_a_name_says_what_to_write() -> None:
    assert "write my.py:reward" in refusal("my.py")
    assert "write my.py:reward" in refusal("my.py:")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("limit", "3 (int), not a function"),
        ("Judge", "create an instance, such as it = Judge()"),
        ("Game", "--env gymnasium"),
        ("game", "--env gymnasium"),
        ("backwards", "(task, reply)"),
    ],
)
def test_what_cannot_be_called_as_an_environment_is_refused(my: Path, name: str, said: str) -> None:
    assert said in refusal(f"{my}:{name}")


def test_environments_are_told_from_rewards(my: Path) -> None:
    assert is_generator_env(load_env(f"{my}:env"))
    assert not is_generator_env(load_env(f"{my}:reward"))
    assert not is_generator_env(load_env(f"{my}:judge"))


def test_a_lifted_reward_shows_the_task_once_and_returns_what_the_reward_returned() -> None:
    env = lift(lambda task, reply: {"length": len(reply)})
    episode = env({"prompt": "p", "stop": ["\n"]})
    assert next(episode) == Turn(text="p", stop=("\n",))
    with pytest.raises(StopIteration) as end:
        episode.send(Reply("four"))
    assert end.value.value == {"length": 4}
    messages = [{"role": "user", "content": "c"}]
    assert next(env({"messages": messages, "prompt": "p"})) == Turn(messages=messages)
    with pytest.raises(UserError, match='needs "prompt"'):
        next(env({"id": "7", "question": "q"}))


@pytest.mark.parametrize(
    "one",
    [1, True, 1.0, numpy.float32(1), numpy.int64(1), numpy.ones(1)[0], Decimal(1), torch.tensor(1.0), numpy.array(1)],
)
def test_every_kind_of_number_is_a_reward(one: object) -> None:
    done = read_verdict(one)
    assert done == Done(1.0) and type(done.reward) is float


NO_REWARDS = [None, "1.0", "", b"1", 1j, object(), [1.0], numpy.ones(2), math.nan, math.inf, -math.inf, 10**400]
NO_REWARDS += [
    {},
    {"a": None},
    {"a": math.nan},
    {"a": "1"},
    {"a": 1e308, "b": 1e308},
    1e308,
    1.1e6,
    {"a": 9e5, "b": 9e5},
]
NO_REWARDS += [numpy.complex64(1), torch.tensor(1j), numpy.str_("1"), numpy.bytes_(b"1"), b"", bytearray(b"1")]
NO_REWARDS += [
    numpy.datetime64(1, "s"),
    dict.fromkeys(map(str, range(1000)), 0.0),
    numpy.array([1.0]),
    {"a": 1, "a\n": 2},
]


@pytest.mark.parametrize("value", NO_REWARDS)
def test_everything_else_is_invalid_with_a_reason(value: object) -> None:
    done = read_verdict(value)
    assert isinstance(done.reward, Invalid) and done.rewards == {} and done.reward.kind is InvalidKind.UNREADABLE
    assert "expected a finite number" in done.reward.reason and "\n" not in done.reward.reason


def test_a_dict_is_summed_unless_it_names_the_reward() -> None:
    assert read_verdict({"a": 1, "b": 0.5}) == Done(1.5, {"a": 1.0, "b": 0.5})
    assert read_verdict({"a": 1, "reward": 0.25}) == Done(0.25, {"a": 1.0})


def test_the_reason_of_an_invalid_is_kept() -> None:
    assert read_verdict(Invalid("sandbox is down")) == Done(Invalid("sandbox is down"))


@given(st.dictionaries(st.text(min_size=1), st.floats(-1e6, 1e6), min_size=1))
def test_the_reward_of_parts_does_not_depend_on_their_order(parts: dict[str, float]) -> None:
    assert read_verdict(parts).reward == read_verdict(dict(reversed(parts.items()))).reward


NO_TURNS: list[Any] = [3, None, Turn(), Turn("a", messages=[]), Turn("a", reward=math.nan), Turn("a", max_tokens=0)]
NO_TURNS += ["\ud800", Turn("a", stop=("\udfff",)), Turn("x" * (LONGEST_TEXT + 1)), Turn("a", stop=("",))]
NO_TURNS += [Turn(messages=[{"role": "user", "content": "x" * LONGEST_TEXT}]), Turn(messages=[{"role": "user"}])]
NO_TURNS += [Turn(messages=[{"role": "usr", "content": "a"}]), Turn(messages=[{"role": "User", "content": "a"}])]
NO_TURNS += [Turn("a", stop=("x" * 2000,)), Turn("a", learn=1), Turn("a", fresh=None), Turn("a", reward=1e9)]  # type: ignore[arg-type]
NO_TURNS += [Turn(3), Turn("a", stop="</a>"), Turn(messages=[{"role": "user", "content": 3}])]  # type: ignore[arg-type, dict-item]


@pytest.mark.parametrize("value", NO_TURNS)
def test_what_is_not_a_turn_is_invalid(value: object) -> None:
    assert isinstance(read_turn(value), Invalid)


def test_parts_of_replies_are_read_with_the_verdict() -> None:
    spans = [SpanReward(3, 1), SpanReward(end=2, reward=numpy.float32(0.5), reply=0)]
    assert read_verdict(Graded({"a": 1}, spans)) == Done(1.0, {"a": 1.0}, (SpanReward(3, 1.0), SpanReward(2, 0.5, 0)))


NO_SPANS: list[Any] = ["abc", [3], [SpanReward(1.5, 1.0)], [SpanReward(1, math.nan)], [SpanReward(1, 1j)]]  # type: ignore[arg-type]


@pytest.mark.parametrize("spans", [*NO_SPANS, [SpanReward(1, 1.0)] * (MOST_SPANS + 1)])
def test_parts_of_replies_that_cannot_be_read_make_the_verdict_invalid(spans: Any) -> None:
    assert isinstance(read_verdict(Graded(1.0, spans)).reward, Invalid)


def test_a_function_of_a_file_travels_by_its_place_and_a_closure_by_value(my: Path) -> None:
    reward = load_env(f"{my}:reward")
    assert pack_env(reward) == f"{my}:reward"
    scale = 3.0
    packed = pack_env(lambda task, reply: scale * len(reply))
    assert isinstance(packed, bytes) and unpack_env(packed)({}, "ab") == 6.0


def test_what_cannot_travel_is_refused_with_the_fix() -> None:
    lock = threading.Lock()
    with pytest.raises(UserError, match="cannot be sent to a worker"):
        pack_env(lambda task, reply: float(lock.locked()))


def test_environments_need_no_torch_to_be_loaded_and_played() -> None:
    code = "import sys; import posttrain.envs.check; sys.exit('torch' in sys.modules or 'cloudpickle' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_environment_that_is_refused_is_closed_and_may_fail_at_that(capsys: pytest.CaptureFixture[str]) -> None:
    ended = []

    def play(task: Task) -> Generator[Any, Reply, float]:
        try:
            yield None
        finally:
            ended.append(task["id"])
            raise RuntimeError("at its end")

    event = EnvRunner(play).start(1, {"id": "a"})
    assert isinstance(event, Done) and isinstance(event.reward, Invalid) and "yielded None" in event.reward.reason
    assert ended == ["a"] and capsys.readouterr().err == ""


def test_decorators_that_lead_round_in_a_circle_are_looked_through_no_further() -> None:
    def reward(task: Task, reply: str) -> float:
        return 1.0

    reward.__wrapped__ = reward  # type: ignore[attr-defined]
    assert not is_generator_env(reward) and EnvRunner(reward).single_turn


def test_reward_of_another_trainer_is_told_from_one_of_ours() -> None:
    def of_trl(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [1.0]

    def of_verl(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
        return 1.0

    for function, whose in ((of_trl, "TRL"), (of_verl, "verl")):
        with pytest.raises(UserError, match=rf"as a reward of {whose} does: give it as {whose.lower()}:FILE:NAME"):
            load_env(function)


def test_several_rewards_in_a_list_are_answered_with_how_they_are_given() -> None:
    def one(task: Any, reply: Any) -> float:
        return 1.0

    with pytest.raises(UserError, match=r"env is one function.* returns the sum.* posttrain.trl_reward\(f, g, weights"):
        load_env([one, one])  # type: ignore[arg-type]


def test_a_prefix_that_there_is_not_is_answered_with_those_there_are() -> None:
    message = refusal("openrlhf:v.py:rm")
    assert "no prefix 'openrlhf:'" in message and "v.py:NAME" in message and "trl:FILE.py:NAME" in message


def test_object_whose_call_is_none_is_no_function() -> None:
    class Five:
        __call__ = 5

    with pytest.raises(UserError, match="not a function"):
        load_env(Five())  # type: ignore[arg-type]


def test_messages_that_are_no_list_of_dicts_are_told_and_the_environment_is_closed() -> None:
    ended = []

    def play(task: Task) -> Generator[Any, Reply, float]:
        try:
            yield Turn(messages={"role": "user"})  # type: ignore[arg-type]
        finally:
            ended.append(True)
            raise BaseException("at its end")

    event = EnvRunner(play).start(1, {"id": "a"})
    assert isinstance(event, Done) and isinstance(event.reward, Invalid) and ended == [True]
    assert "whose messages are" in event.reward.reason and "expected a list" in event.reward.reason


OPTIONED = """
from functools import wraps


def reward(task, reply, *, weight: float = 1.0, word: "str" = "a", loud: bool = False):
    return weight * reply.count(word.upper() if loud else word)


def env(task, *, turns: int = 1, address: str = ""):
    for _ in range(turns):
        yield task["prompt"]
    return float(len(address))


async def later(task, *, turns: int = 1):
    for _ in range(turns):
        yield "p"
    yield 1.0


def odd(task, reply, *, weight: "nonsense" = 2):
    return float(weight)


@wraps(reward)
def wrapped(*args, **options):
    return reward(*args, **options) + 100


def none(task, reply):
    return 0.0
"""


@pytest.fixture
def optioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(OPTIONED)
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "reward"),
    [
        ("my.py:reward", 2.0),
        ("my.py:reward,weight=0.5", 1.0),
        ("my.py:reward,weight=2,word=b", 2.0),
        ("my.py:reward,word=A,loud=true", 1.0),
        ("my.py:reward,word=", 5.0),
        ("my.py:reward,word=a=b", 0.0),
        ("my.py:wrapped,weight=3", 106.0),
    ],
)
def test_options_behind_a_name_are_given_to_the_function(optioned: Path, spec: str, reward: float) -> None:
    assert load_env(spec)({}, "aabA") == reward
    with EnvPool(spec, workers=1) as pool:
        pool.start(0, {"prompt": "p"})
        pool.poll(20)
        pool.send(0, Reply("aabA"))
        assert pool.poll(20) == [(0, Done(reward))]


def test_environments_of_turns_have_options_too(optioned: Path) -> None:
    for spec in ("my.py:env,turns=3,address=http://127.0.0.1:1/x", "my.py:later,turns=3"):
        assert is_generator_env(load_env(spec)) and not is_generator_env(load_env("my.py:reward,weight=2"))
        with EnvPool(spec, workers=1) as pool:
            pool.start(0, {"prompt": "p"})
            for _ in range(3):
                assert isinstance(pool.poll(20)[0][1], Turn)
                pool.send(0, Reply("x"))
            assert pool.poll(20) == [(0, Done(20.0 if "env" in spec else 1.0))]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("my.py:reward,wieght=2", r"--env my.py:reward: no option 'wieght'; did you mean 'weight'\?"),
        ("my.py:reward,task=2", r"no option 'task' \(there are: weight, word, loud\)"),
        ("my.py:reward,weight=x", "--env my.py:reward: weight is a number, not 'x'"),
        ("my.py:env,turns=1.5", "--env my.py:env: turns is a whole number, not '1.5'"),
        ("my.py:reward,loud=maybe", "loud is true or false, not 'maybe'"),
        ("my.py:none,x=1", r"no option 'x'; it has none \(options are the parameters after a \*\)"),
        ("my.py:reward,weight", "the option weight has no value: write my.py:reward,weight="),
        ("search-qa,topk", "--env search-qa: the option topk has no value: write search-qa,topk=3"),
        ("gsm8k,weight=1", "--env gsm8k: no option 'weight'"),
        ("gsm8,weight=1", "no built-in environment 'gsm8'"),
    ],
)
def test_options_that_an_environment_has_not_are_told(optioned: Path, spec: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        load_env(spec)


def test_what_stands_beside_an_environment_is_found_whatever_its_options(optioned: Path) -> None:
    from posttrain.runs.fingerprint import of_code

    (optioned / "my.py").write_text(OPTIONED + "SUCCESS = 3\ndef row_to_task(row): return {'prompt': 'x'}\n")
    assert success_of("my.py:reward,weight=2", None) == 3
    assert load_converter("my.py:reward,weight=2") is not None
    assert (known := of_code("my.py:env")) is not None and of_code("my.py:env,address=http://x:1") == known
    assert load_env("my.py:odd,weight=2")({}, "") == 2.0, "it is text where a hint names nothing"
    bound = functools.partial(load_env("my.py:reward"), weight=3.0)
    assert unpack_env(pack_env(bound))({}, "aa") == 6.0
