"""Tools and environments of TRL's agent training, unchanged: what TRL itself plays, trains and scores."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import trl_agent
from places import ROOT
from scripted import scripted
from template_families import needs_templates, tokenizer_of

import posttrain
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import Reply, Sampling, StopReason, UserError
from posttrain.engines.scripted import ScriptedEngine
from posttrain.envs.check import check
from posttrain.envs.play import trl_tools
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.env_runner import EnvRunner
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.load_env import is_async, is_generator_env, load_env, success_of
from posttrain.envs.play.player import Player

TRL = json.loads((ROOT / "tests" / "vectors" / "trl_tools.json").read_text(encoding="utf-8"))
"""Messages, tokens and masks of TRL 1.16 for the same replies, written by benchmarks/peers/trl_tools.py."""
FILE = f"trl:{trl_agent.__file__}"
ROW = {"id": "a", "messages": trl_agent.PROMPT, "target": 5}
CALL = trl_agent.call


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    trl_agent.SEEN.clear()


def reward_of(**how: Any) -> Any:
    return posttrain.trl_reward(trl_agent.seen, **how)


@needs_templates
@pytest.mark.parametrize("name", trl_agent.CASES)
def test_an_episode_has_the_messages_and_the_trained_tokens_of_trl(name: str) -> None:
    case, expected = trl_agent.CASES[name], TRL[name]
    made = getattr(trl_agent, case.get("environment", ""), None)
    tools = [getattr(trl_agent, tool) for tool in case["tools"]]
    env = reward_of(tools=tools, environment_factory=made, max_tool_calling_iterations=case.get("most"))
    tokenizer, end = tokenizer_of("qwen3_instruct_2507")
    ends = [tokenizer.backend.token_to_id(end)]
    with EnvPool(env, workers=0) as pool:
        engine = ScriptedEngine(tokenizer, ends, case["replies"])
        player = Player(pool, engine, tokenizer, Sampling(max_tokens=1000), 100_000)
        [rollout] = player.play([Episode(ROW, "a#0", 7)])
    assert engine.left == expected["left"] == 0
    [seen] = trl_agent.SEEN
    assert seen == {"prompt": expected["prompt"], "completion": expected["completion"]}
    [transcript] = rollout.transcripts
    pieces = [
        [tokenizer.decode(transcript.tokens[s.start : s.start + s.length]), int(s.kind is SpanKind.SAMPLED)]
        for s in transcript.spans
    ]
    # a list of anything but content blocks is shown by no template; here its text is
    shown = "\n[('x', 1), ('other', 2)]\n"
    assert [[text.replace(shown, "\n\n"), learned] for text, learned in pieces] == expected["pieces"]
    assert transcript.n_scored == sum(s.length for s in transcript.spans if s.kind is SpanKind.SAMPLED)
    own = expected["reward"] or 0.0
    assert rollout.reward == own + 0.25 * sum("tool_calls" in message for message in expected["completion"])
    assert rollout.notes == {"turns": len(expected["completion"])}


def test_a_file_names_tools_environments_and_rewards_of_a_sum() -> None:
    spec = f"{FILE}:seen*2,counted + verify:exact_match + {FILE}:tools=multiply,environment_factory=Counter"
    with pytest.raises(UserError, match="a term of its own"):
        load_env(spec)
    env = load_env(spec.replace("seen*2,counted", "seen*2"))
    assert is_generator_env(env) and not is_async(env)
    replies = [CALL("increment", step=5), CALL("multiply", a=2, b=3), "7"]
    found = scripted(env, {**ROW, "answer": "7"}, replies, None)
    assert found.done is not None and found.done.rewards == {"seen": 0.5, "exact_match": 1.0, "Counter": 1.0}
    assert found.reward == 3.0
    assert success_of(f"{FILE}:seen,tools=multiply", None) == 1.0
    [schema, other] = found.shown[0].tools or ()
    assert [schema["function"]["name"], other["function"]["name"]] == ["multiply", "increment"]


def test_coroutine_functions_wait_and_environments_are_read_by_rewards() -> None:
    env = load_env(f"{FILE}:counted,tools=multiply+add_later,environment_factory=Counter")
    assert is_async(env)
    replies = [f"{CALL('add_later', a=1, b=2)}\n{CALL('multiply', a=1, b=2)}\n{CALL('increment', step=4)}", "."]
    found = scripted(env, ROW, replies, None)
    assert [m["content"] for m in found.shown[1].messages or ()] == ["3", "2", "4"]
    assert found.done is not None and found.done.rewards == {"counted": 4.0, "Counter": 0.0}
    env = load_env(f"{FILE}:later,tools=multiply")
    assert is_async(env) and "no tokens" in scripted(env, ROW, ["x"], None).reason


def test_each_row_has_the_tools_of_its_environment_alone() -> None:
    env = load_env(f"{FILE}:seen,environment_factory=environments")
    for name, tool, reward in (("counter", "increment", 1.0), ("quiet", "look", 0.0)):
        found = scripted(env, {**ROW, "environment": name, "target": 0}, ["done"], None)
        assert [t["function"]["name"] for t in found.shown[0].tools or ()] == [tool] and found.reward == reward
    assert found.shown[0].messages == trl_agent.PROMPT, "reset returned nothing"
    problem = "environment is 'chess' (there are: counter, quiet)"
    assert env.problem_of_row({**ROW, "environment": "chess"}) == problem
    assert problem in scripted(env, {**ROW, "environment": "chess"}, ["done"], None).reason


def test_an_environment_is_made_once_and_reset_for_each_episode() -> None:
    env, before = reward_of(environment_factory=trl_agent.Counter), trl_agent.Counter.made
    for _ in range(3):
        assert scripted(env, ROW, [CALL("increment", step=5), "."], None).reward == 1.25
    assert trl_agent.Counter.made == before + 1
    runner = EnvRunner(env)
    runner.start(0, ROW), runner.start(1, ROW)
    assert trl_agent.Counter.made == before + 2, "two episodes at once share none"


def test_answers_that_no_longer_fit_are_taken_back_as_trl_does() -> None:
    env = reward_of(tools=[trl_agent.multiply])
    call = CALL("multiply", a=2, b=3)
    found = scripted(env, ROW, [call, Reply("", StopReason.LENGTH)], None)
    assert [m["role"] for m in trl_agent.SEEN[0]["completion"]] == ["assistant"] and found.reward == 0.25


def test_a_text_prompt_and_a_row_without_one_are_a_message_of_the_user() -> None:
    env = reward_of(environment_factory=trl_agent.Counter)
    for row, text in (({"prompt": "Go."}, "Go. Reach 5."), ({}, " Reach 5.")):
        shown = scripted(env, {"id": "a", "target": 5, **row}, ["."], None).shown[0]
        assert shown.messages == [{"role": "user", "content": text}]


def test_check_plays_it_and_tells_a_call_that_failed() -> None:
    found = check(f"{FILE}:seen,tools=multiply", [{**ROW, "replies": [CALL("multiply", a=2), "no"]}])
    assert found.ok and any(case.result and case.result.reward == 0.25 for case in found.cases)


class Kinds:
    """An environment with each kind of function."""

    def reset(self) -> None:
        """Begin."""

    def bound(self, n: int) -> int:
        """Returns n.

        Args:
            n: What.
        """
        return n

    @classmethod
    def of_class(cls, n: int) -> int:
        """Returns n.

        Args:
            n: What.
        """
        return n

    @staticmethod
    def helper(n: int) -> int:
        return n

    def get_reward(self) -> float:
        return 1.0


def test_tools_are_the_methods_that_trl_finds() -> None:
    """It takes `inspect.getmembers(environment, inspect.ismethod)`: no static methods."""
    found = {name for name, _ in inspect.getmembers(Kinds(), inspect.ismethod)} - {"reset", "get_reward"}
    assert set(trl_tools._methods(Kinds)) == found == {"bound", "of_class"}


def test_rewards_of_one_name_are_all_counted() -> None:
    def Kinds2(completions: list[Any], **_: Any) -> list[float]:
        return [10.0] * len(completions)

    Kinds2.__name__ = "Kinds"
    env = posttrain.trl_reward(Kinds2, environment_factory=Kinds)
    result = check(env, [{**ROW, "replies": ["8"]}]).cases[0].result
    assert result is not None and result.reward == 11.0


def broken() -> None:
    pass


class NoReset:
    def get_reward(self) -> float:
        return 0.0


class NoWords:
    def reset(self, **kwargs: Any) -> None: ...

    def act(self, word: str) -> None: ...


def closed() -> None:
    raise RuntimeError("no server")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"tools": trl_agent.multiply}, "tools is a value of type function; it is a list"),
        ({"environment_factory": closed}, r"environment_factory fails: RuntimeError: no server \(test_trl_tools"),
        ({"environment_factory": {}}, "environment_factory has no environments"),
        ({"max_tool_calling_iterations": 3}, "no effect without tools"),
        ({"tools": [broken]}, "broken has no docstring"),
        ({"environment_factory": NoReset}, "NoReset has no reset"),
        ({"environment_factory": NoWords}, "act has no docstring"),
        ({"environment_factory": 3}, "environment_factory is 3 .*; it is a class"),
        ({"tools": [trl_agent.multiply], "max_tool_calling_iterations": -1}, "is -1 .*; it is a whole number"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_run(how: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        reward_of(**how)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("seen,tool=multiply", "no option 'tool'; did you mean 'tools'"),
        ("seen,tools=multiply+devide", "has no 'devide'"),
        ("seen,max_tool_calling_iterations=3", "has no tools: name them too"),
        ("seen,tools=multiply,max_tool_calling_iterations=few", "max_tool_calling_iterations"),
        ("counted,tools=multiply", "counted needs environments, which TRL passes with environment_factory"),
        ("environment_factory=Quiet", "nothing gives a reward"),
        ("seen,tools=multiply + verify:tags + trl:x.py:tools=f", "gives tools twice"),
    ],
)
def test_a_name_that_cannot_be_played_is_refused_in_one_line(spec: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as refused:
        load_env(f"{FILE}:{spec}")
    assert "\n" not in str(refused.value)


def test_a_worker_plays_functions_of_a_notebook() -> None:
    def double(n: int) -> int:
        """Doubles.

        Args:
            n: What.
        """
        return 2 * n

    env = posttrain.trl_reward(lambda completions, **_: [float(len(c)) for c in completions], tools=[double])
    found = check(env, [{**ROW, "replies": [CALL("double", n=4), "8"]}])
    assert found.ok and any(case.result and case.result.reward == 3.0 for case in found.cases)
