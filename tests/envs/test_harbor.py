"""Task sets in Harbor's format: the policy works in a container, the task's tests give the reward, and no failure of the
policy's making escapes a bad one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import stand_in_engine
from container_engines import REAL, SET, STAND_IN, engine_of
from processes import descendants, gone
from scripted import Scripted, scripted
from scripted_engine import Scripted as ScriptedEngine
from served import TOOLS

from posttrain.cli.main import main
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import Invalid, Reply, Sampling, Task, Turn, UserError
from posttrain.envs.bridges.harbor import read_reward, task_rows, with_oracle
from posttrain.envs.play.env_outputs import Done
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.load_env import load_env, success_of
from posttrain.envs.play.player import Player
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.tokenizer.tool_parser import HERMES
from posttrain.sandbox.containers import ContainerEngine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers are Linux's")


@pytest.fixture(params=(STAND_IN, REAL))
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ContainerEngine]:
    with engine_of(request.param, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a stand-in, for what is the same with every engine."""
    with engine_of(STAND_IN, tmp_path, monkeypatch):
        yield tmp_path / "engine"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A copy of the sample set."""
    return Path(shutil.copytree(SET, tmp_path / "tasks"))


def called(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': command}})}</tool_call>"


def row(tasks: Path, name: str) -> Task:
    return next(task for task in task_rows(str(tasks)) if task["id"] == name)


def played(tasks: Path, name: str, *replies: str, options: str = "", **columns: Any) -> Scripted:
    return scripted(load_env(f"harbor:{tasks}{options}"), {**row(tasks, name), **columns}, [*replies, "done"], None)


# -- episodes ----------------------------------------------------------------------------------------------------------


def test_a_policy_works_with_a_shell_and_the_tests_give_its_reward(engine: ContainerEngine, tasks: Path) -> None:
    episode = played(tasks, "total", called("cat numbers.txt"), called("pwd; echo 12 > total.txt; exit 3"))
    asked, numbers, end = (turn.messages for turn in episode.shown if turn.messages)
    assert asked[0]["content"] == (tasks / "total" / "instruction.md").read_text().strip()
    assert [tool["function"]["name"] for tool in episode.shown[0].tools or ()] == ["shell"]
    assert numbers[0]["content"] == "3\n4\n5" and end[0]["content"].endswith("\n(exit code 3)")
    assert episode.done is not None and (episode.reward, episode.done.rewards) == (1.0, {"lines": 3.0})
    assert episode.done.notes["commands"] == 2
    assert played(tasks, "total", called("echo 11 > total.txt")).reward == 0.5
    assert played(tasks, "total").reward == 0.0


def test_every_solution_gets_full_reward_and_doing_nothing_does_not(engine: ContainerEngine, tasks: Path) -> None:
    for known in task_rows(str(tasks)):
        solved = scripted(load_env(f"harbor:{tasks}"), with_oracle(known), ["done"], None)
        assert solved.reward == success_of(f"harbor:{tasks}", None), (known["id"], solved.done)
        assert played(tasks, known["id"]).reward == 0.0


def test_the_command_check_proves_every_task_and_needs_no_rows(
    engine: ContainerEngine, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--env", f"harbor:{tasks}"]) == 0
    shown = capsys.readouterr().out
    assert f"containers: {engine}" in shown
    assert "3 of 3 solutions get full reward\n3 of 3 tasks give no full reward for doing nothing" in shown
    assert shown.rstrip().endswith("check passed")


def test_the_command_check_fails_for_a_wrong_solution_and_for_tests_that_nothing_passes(
    stand_in: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tasks / "total" / "solution" / "solve.sh").write_text("#!/bin/sh\necho 11 > total.txt\n")
    (tasks / "greet" / "tests" / "test.sh").write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    shutil.rmtree(tasks / "rename" / "solution")
    assert main(["check", "--env", f"harbor:{tasks}"]) == 2
    shown = capsys.readouterr().out
    assert "task total: its solution gets 0.5\n" in shown and "task greet: doing nothing gets 1\n" in shown
    assert "task rename has no solution/solve.sh, so nothing shows that its tests can pass" in shown
    assert "1 of 3 solutions get full reward\n2 of 3 tasks give no full reward for doing nothing" in shown
    assert shown.rstrip().endswith("check failed")


def test_no_container_is_left_and_each_episode_has_its_own(stand_in: Path, tasks: Path) -> None:
    assert played(tasks, "greet", called("echo hello > greeting.txt")).reward == 1.0
    assert played(tasks, "greet", called("ls")).texts[1] == "(no output)"
    assert stand_in_engine.containers(stand_in) == []
    built = [call for call in stand_in_engine.calls(stand_in) if call[0] == "build"]
    assert len(built) == 1, "an image is built once"


def test_a_container_gets_the_limits_of_its_task(stand_in: Path, tasks: Path) -> None:
    toml = tasks / "rename" / "task.toml"
    toml.write_text(toml.read_text().replace("cpus = 1", "cpus = 0.5").replace("128M", "2G"))
    toml = tasks / "greet" / "task.toml"
    toml.write_text(
        toml.read_text() + 'env = { PLACE = "${POSTTRAIN_PLACE:-here}" }\nuser = 7\n'.replace("user = 7\n", "")
    )

    def run_of(name: str, options: str = "") -> str:
        played(tasks, name, options=options)
        return " ".join([call for call in stand_in_engine.calls(stand_in) if call[0] == "run"][-1])

    assert "--memory 2048m --memory-swap 2048m --cpus 0.5 --pids-limit 1024" in run_of("rename")
    assert "--memory 128m" in run_of("greet") and "--env PLACE=here" in run_of("greet")
    assert all("--network none" in run_of(name) for name in ("greet", "total", "rename"))
    assert "--network none" not in run_of("greet", ",network=true"), "this task does not decide"
    assert "--network none" in run_of("total", ",network=true"), "this one does"
    assert all("--volume" not in call and "-v" not in call for call in stand_in_engine.calls(stand_in))


def test_commands_of_one_reply_run_in_their_order(stand_in: Path, tasks: Path) -> None:
    both = called("sleep 0.2; echo first >> order") + called("echo second >> order; cat order")
    assert played(tasks, "greet", both).shown[1].messages == [
        {"role": "tool", "name": "shell", "tool_call_id": "", "content": "(no output)"},
        {"role": "tool", "name": "shell", "tool_call_id": "", "content": "first\nsecond"},
    ]


def test_a_command_beyond_its_limit_is_stopped_and_the_episode_goes_on(engine: ContainerEngine, tasks: Path) -> None:
    episode = played(
        tasks, "greet", called("echo a; sleep 600"), called("echo hello > greeting.txt"), options=",command=5"
    )
    assert episode.texts[1] in ("a\n(stopped after 5 s)", "(stopped after 5 s)")
    assert episode.reward == 1.0


def test_long_output_is_cut_and_unreadable_bytes_are_replaced(stand_in: Path, tasks: Path) -> None:
    episode = played(
        tasks, "greet", called("yes | head -c 100000"), called(r"printf 'a\377\000\033[1mb'"), options=",output=200"
    )
    assert len(episode.texts[1]) <= 204 and " ... " in episode.texts[1]
    assert episode.texts[2] == "a\ufffdb"


def test_a_command_that_no_system_accepts_is_an_error_for_the_policy(stand_in: Path, tasks: Path) -> None:
    episode = played(tasks, "greet", called("echo \0"), called("echo " + "a" * 200_000), called("echo \ud800"))
    assert [text.startswith("Error: a command is text") for text in episode.texts[1:3]] == [True, True]
    assert episode.texts[3].startswith("Error: the arguments hold half a surrogate pair")


# -- rewards -----------------------------------------------------------------------------------------------------------

BROKEN = {
    "no file": "true",
    "out of range": "echo 3 > /logs/verifier/reward.txt",
    "damaged": "echo '{\"reward\": ' > /logs/verifier/reward.json",
}


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (b"", "wrote neither reward.txt nor reward.json"),
        (b"other.txt\n1", "wrote neither"),
        (b"reward.txt\nyes", "holds 'yes'"),
        (b"reward.txt\n", "holds ''"),
        (b"reward.txt\n1 2", "holds '1 2'"),
        (b"reward.txt\nnan", "not a number below 1e+06"),
        (b"reward.txt\n1.01", "the reward 1.01 (float), which is not from 0 to 1"),
        (b"reward.txt\n-0.1", "which is not from 0 to 1"),
        (b"reward.txt\n" + b"1" * 70_000, "more than 65,536 bytes"),
        (b'reward.json\n{"reward": ', "no JSON"),
        (b"reward.json\n" + b"[" * 60_000, "no JSON"),
        (b"reward.json\n[1]", "reward is [1] (list), not a number"),
        (b"reward.json\n{}", "of 0 numbers, none of them named reward"),
        (b'reward.json\n{"a": 1, "b": 0}', "of 2 numbers, none of them named reward"),
        (b'reward.json\n{"reward": "1"}', "not a number below 1e+06"),
        (b'reward.json\n{"reward": true}', "not a number below 1e+06"),
        (b'reward.json\n{"reward": 1e999}', "not a number below 1e+06"),
        (b'reward.json\n{"reward": 1, "speed": NaN}', "speed is nan"),
        (b'reward.json\n{"reward": 1' + b"0" * 400 + b"}", "not a number below 1e+06"),
        (b"reward.txt\n\xff\xfe", "no number"),
    ],
)
def test_a_damaged_reward_file_is_described_on_one_line(written: bytes, told: str) -> None:
    found = read_reward(written)
    assert isinstance(found, str) and told in found and "\n" not in found and len(found) < 300


@pytest.mark.parametrize("kind", ["no file", "out of range"])
def test_tests_that_never_give_a_reward_make_it_invalid(kind: str, stand_in: Path, tasks: Path) -> None:
    (tasks / "greet" / "tests" / "test.sh").write_text(f"#!/bin/sh\n{BROKEN[kind]}\nexit 5\n")
    found = played(tasks, "greet")
    assert "the tests of greet wrote" in found.reason and found.reason.endswith("(exit code 5)")
    assert isinstance(
        scripted(load_env(f"harbor:{tasks}"), with_oracle(row(tasks, "greet")), ["a"], None).reward, Invalid
    )


@pytest.mark.parametrize("kind", ["no file", "damaged"])
def test_a_policy_that_breaks_the_tests_earns_0(kind: str, stand_in: Path, tasks: Path) -> None:
    work = tasks / "greet" / "tests" / "test.sh"
    work.write_text(f"#!/bin/sh\nif [ -e trap ]; then {BROKEN[kind]}; else echo 1 > /logs/verifier/reward.txt; fi\n")
    broken = played(tasks, "greet", called("touch trap"))
    assert (
        broken.reward == 0.0
        and broken.done is not None
        and "the tests of greet wrote" in broken.done.notes["broken_tests"]
    )
    assert played(tasks, "greet").reward == 1.0


def test_tests_beyond_their_limit_are_the_policys_fault_only_if_they_end_without_it(
    stand_in: Path, tasks: Path
) -> None:
    for file, (old, new) in {
        "task.toml": ("120.0\nenv", "2.0\nenv"),
        "tests/test.sh": ("if", "[ -e trap ] && sleep 600; if"),
    }.items():
        place = tasks / "greet" / file
        place.write_text(place.read_text().replace(old, new, 1))
    assert played(tasks, "greet", called("touch trap")).reward == 0.0
    (tasks / "greet" / "tests" / "test.sh").write_text("#!/bin/sh\nsleep 600\n")
    assert played(tasks, "greet").reason == "the tests of greet did not end within 2 s"


def test_what_the_policy_wrote_in_the_place_of_the_tests_and_the_reward_is_gone_before_they_run(
    engine: ContainerEngine, tasks: Path
) -> None:
    forged = "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.json; touch /tests/left"
    test = tasks / "greet" / "tests" / "test.sh"
    test.write_text("#!/bin/sh\n[ -e /tests/left ] || echo 0.25 > /logs/verifier/reward.txt\n")
    assert played(tasks, "greet", called(forged)).reward == 0.25


def test_an_image_that_cannot_be_built_is_invalid_with_the_reason(stand_in: Path, tasks: Path) -> None:
    (tasks / "greet" / "environment" / "Dockerfile").write_text("FROM a\nRUN false\n")
    assert played(tasks, "greet").reason == (
        "the image cannot be built: Error: building at STEP RUN false: exit status 1"
    )


def test_reward_files_are_read_as_harbor_reads_them() -> None:
    assert read_reward(b"reward.txt\n 1\n") == {"reward": 1.0}
    assert read_reward(b"reward.json\n0.5") == {"reward": 0.5}
    assert read_reward(b'reward.json\n{"accuracy": 1}') == {"reward": 1.0}
    assert read_reward(b'reward.json\n{"reward": 0, "speed": 12}') == {"reward": 0.0, "speed": 12.0}


# -- names and options -------------------------------------------------------------------------------------------------


def test_a_set_is_named_with_its_folder_and_options(tasks: Path) -> None:
    for spec, told in {
        "harbor": "--env harbor names no set of tasks: give its folder, harbor:FOLDER",
        f"harbor:{tasks},command=0": "command is 0; a command may take from above 0 to 3600 seconds",
        f"harbor:{tasks},output=5": "output is 5; from 100",
        f"harbor:{tasks},outputs=5": "no option 'outputs'; did you mean",
        f"harbor:{tasks / 'none'}": "none cannot be read: No such file or directory",
    }.items():
        with pytest.raises(UserError) as refused:
            load_env(spec)
        assert told in str(refused.value) and "\n" not in str(refused.value)


def test_rows_may_choose_among_the_tasks_and_give_another_prompt(stand_in: Path, tasks: Path) -> None:
    assert played(tasks, "greet", prompt="Say hello.").texts[0] == "Say hello."
    assert "the row's column task is 'gret' (str); did you mean 'greet'?" in played(tasks, "greet", task="gret").reason


# -- whole rollouts ----------------------------------------------------------------------------------------------------


class Answers(ScriptedEngine):
    """An engine whose replies depend on the prompt."""

    def __init__(self, tokenizer: Tokenizer, replies: dict[str, str]) -> None:
        """`replies`: a part of the prompt -> the reply; the first part that the prompt has decides."""
        super().__init__(tokenizer, [])
        self.parts = replies

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        seen = self.tokenizer.decode(list(prompt))
        self.replies = [f"{next(reply for part, reply in self.parts.items() if part in seen)}<|im_end|>"]
        super().submit(id, prompt, sampling, keep)


def test_rollouts_of_a_policy_that_calls_the_shell_learn_its_own_tokens_alone(
    engine: ContainerEngine, tasks: Path
) -> None:
    words = Tokenizer.train(
        [(SET / "greet" / "instruction.md").read_text()], 400, "bpe", ("<|im_start|>", "<|im_end|>")
    )
    shown = Tokenizer(words.backend, words.config, TOOLS)
    greeting = called("echo hello > greeting.txt; cat greeting.txt")
    replies = {
        "3\n4\n5": "It is 12.",
        "; cat greeting": "Done.",
        "Write the word": greeting,
        "Add up": called("cat numbers.txt"),
    }
    policy = Answers(shown, replies)
    with EnvPool(f"harbor:{tasks}", workers=1) as pool:
        player = Player(pool, policy, shown, Sampling(), 4096)
        rollouts = player.play(
            [Episode(row(tasks, name), name, number) for number, name in enumerate(("greet", "total"))]
        )
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0]
    assert [turn.kind for turn in rollouts[0].turns] == [
        SpanKind.PROMPT,
        SpanKind.SAMPLED,
        SpanKind.TOOL,
        SpanKind.SAMPLED,
    ]
    [transcript] = rollouts[0].transcripts
    learned = shown.decode([transcript.tokens[place] for place in transcript.scored.tolist()])
    assert learned == f"{greeting}<|im_end|>Done.<|im_end|>"
    assert "hello" in rollouts[0].turns[2].text


def test_a_lost_worker_plays_its_episode_again_in_another_container(stand_in: Path, tasks: Path) -> None:
    with EnvPool(f"harbor:{tasks}", workers=1) as pool:
        pool.start(0, row(tasks, "greet"))
        [(_, turn)] = pool.poll(None)
        tools = turn.tools if isinstance(turn, Turn) else None
        for number, text in enumerate([called("echo hello > greeting.txt"), called("cat greeting.txt"), "done"]):
            pool.send(0, Reply(text, tool_calls=HERMES.read(text, list(tools or ())), number=number))
            [(_, event)] = pool.poll(None)
            if number == 0:
                for worker in descendants(pool._workers[0].child.process.pid):
                    with suppress(ProcessLookupError):  # ends by itself once the worker has
                        os.kill(worker, signal.SIGKILL)
                    gone(worker)
    assert isinstance(event, Done) and event.reward == 1.0
    names = {call[call.index("--name") + 1] for call in stand_in_engine.calls(stand_in) if call[0] == "run"}
    assert len(names) == 2
