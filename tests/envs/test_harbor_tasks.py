"""Folders in Harbor's format: what is read, and what is refused in one line with its place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from container_engines import SET

from posttrain.cli.main import main
from posttrain.core.types import UserError
from posttrain.envs.bridges import harbor_tasks
from posttrain.envs.bridges.harbor import step_seconds, task_rows
from posttrain.envs.bridges.harbor_tasks import HarborTask, read_set, read_task


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    harbor_tasks._read_set.cache_clear()
    return Path(shutil.copytree(SET, tmp_path / "tasks"))


def told(task: Path, text: str) -> HarborTask:
    """Read a task with this task.toml."""
    (task / "task.toml").write_text(text)
    return read_task(task)


def test_a_folder_of_tasks_and_a_single_task_are_sets(tasks: Path) -> None:
    assert list(read_set(str(tasks))) == ["greet", "rename", "total"]
    assert list(read_set(str(tasks / "greet"))) == ["greet"]
    assert task_rows(str(tasks))[0] == {
        "id": "greet",
        "task": "greet",
        "prompt": (SET / "greet" / "instruction.md").read_text().strip(),
        "difficulty": "easy",
        "category": "files",
    }


def test_the_values_of_every_version_of_the_schema_are_read(tasks: Path) -> None:
    older, newer, bare = read_task(tasks / "rename"), read_task(tasks / "total"), told(tasks / "greet", "")
    assert (older.memory, older.build_seconds, older.test_seconds, older.network) == (128, 300.0, 120.0, False)
    assert (newer.memory, newer.network, newer.work_folder) == (128, False, "/app")
    assert newer.solution_variables == {"TARGET": "total.txt"}
    assert (bare.memory, bare.cpus, bare.network, bare.test_seconds, bare.image) == (2048, 1.0, None, 600.0, None)
    both = told(
        tasks / "greet", '[environment]\nmemory = "1.5G"\nallow_internet = true\ncpus = 2.5\n[agent]\nuser = 1000'
    )
    assert (both.memory, both.network, both.cpus, both.work_user) == (1536, True, 2.5, "1000")
    for kilobytes, expected in (("2048K", 2), ("2 G", 2048), ("512MB", 512)):
        assert told(tasks / "greet", f'[environment]\nmemory = "{kilobytes}"').memory == expected


def test_an_image_in_place_of_a_dockerfile_needs_no_dockerfile(tasks: Path) -> None:
    (tasks / "greet" / "environment" / "Dockerfile").unlink()
    assert told(tasks / "greet", '[environment]\ndocker_image = "debian:12"').image == "debian:12"


def test_variables_of_this_process_fill_the_places_that_name_them(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_A", "a")
    found = told(tasks / "greet", '[verifier.env]\nX = "<${POSTTRAIN_A}-${POSTTRAIN_B:-b}-${POSTTRAIN_C:-}>"')
    assert found.test_variables == {"X": "<a-b->"}
    with pytest.raises(UserError, match="verifier.env needs the environment variable POSTTRAIN_B: set it"):
        told(tasks / "greet", '[verifier.env]\nX = "${POSTTRAIN_B}"')


def test_a_step_may_take_as_long_as_the_tasks_own_limits_and_never_a_day(tasks: Path) -> None:
    before = step_seconds(str(tasks))
    assert before > 600 + 120 + 2 * 120
    harbor_tasks._read_set.cache_clear()
    most = harbor_tasks.LONGEST_SECONDS
    told(
        tasks / "greet", f"agent.timeout_sec={most}\nverifier.timeout_sec={most}\nenvironment.build_timeout_sec={most}"
    )
    assert before < step_seconds(str(tasks)) < 86_400


REFUSED: dict[str, tuple[str, str]] = {
    "bad TOML": ("a = [", "task.toml is not valid TOML: "),
    "unknown section": ("[verifer]", "there is no key 'verifer'; did you mean 'verifier'?"),
    "unknown key": ("[agent]\ntimeout = 3", "there is no key 'agent.timeout'; did you mean 'timeout_sec'?"),
    "no table": ("agent = 3", "agent is 3 (int); it must be a table, [agent]"),
    "no number": ('[agent]\ntimeout_sec = "3"', "agent.timeout_sec is '3' (str); expected a number above 0"),
    "a truth value": ("[agent]\ntimeout_sec = true", "expected a number above 0"),
    "zero": ("[verifier]\ntimeout_sec = 0", "expected a number above 0"),
    "not finite": ("[verifier]\ntimeout_sec = inf", "expected a number above 0"),
    "no cpus": ("[environment]\ncpus = -1", "expected a number above 0"),
    "no size": ('[environment]\nmemory = "much"', "environment.memory is 'much' (str); expected a size such as 2G"),
    "an option as a user": ('[agent]\nuser = "--privileged"', "agent.user is '--privileged' (str); expected text"),
    "an option as an image": ('[environment]\ndocker_image = "-v"', "environment.docker_image is '-v' (str); expected"),
    "no text": ("[verifier]\nenv = {A = 1}", "verifier.env is {'A': 1}"),
    "steps": ('[[steps]]\nname = "a"', "tasks of several steps are not supported: leave it out"),
    "a GPU": ("[environment]\ngpus = 1", "environment.gpus is 1 (int); GPUs in a container are not supported"),
    "Windows": ('[environment]\nos = "windows"', "another system than Linux"),
    "separate tests": ('[verifier]\nenvironment_mode = "separate"', "tests in a container of their own"),
    "chosen hosts": ('[environment]\nnetwork_mode = "allowlist"', "expected public or no-network"),
    "another network for the tests": (
        '[environment]\nnetwork_mode = "no-network"\n[verifier]\nnetwork_mode = "public"',
        "network_mode differs between phases",
    ),
    "a network for one phase": ('[agent]\nnetwork_mode = "public"', "put it under [environment] for all"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_damaged_or_unsupported_task_toml_is_refused_in_one_line(kind: str, tasks: Path) -> None:
    text, reason = REFUSED[kind]
    with pytest.raises(UserError) as refused:
        told(tasks / "greet", text)
    assert (
        reason in str(refused.value) and str(tasks / "greet") in str(refused.value) and "\n" not in str(refused.value)
    )


def linked(target: str) -> Callable[[Path], None]:
    return lambda task: os.symlink(target, task / "environment" / "link")


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no task.toml": (
        lambda task: (task / "task.toml").unlink(),
        "has no task.toml: it is not a task in Harbor's format",
    ),
    "no instruction": (lambda task: (task / "instruction.md").unlink(), "has no instruction.md"),
    "an empty instruction": (
        lambda task: (task / "instruction.md").write_text(" \n") and None,
        "instruction.md is empty",
    ),
    "an instruction that is no text": (
        lambda task: (task / "instruction.md").write_bytes(b"\xff") and None,
        "instruction.md cannot be read as text",
    ),
    "no tests": (lambda task: shutil.rmtree(task / "tests"), "has no tests/test.sh: it writes the reward"),
    "no Dockerfile": (lambda task: (task / "environment" / "Dockerfile").unlink(), "has no environment/Dockerfile"),
    "several containers": (
        lambda task: (task / "environment" / "docker-compose.yaml").touch(),
        "several containers (environment/docker-compose.yaml) are not supported",
    ),
    "a link out of the task": (linked("/etc/passwd"), "link links to a place outside its task: put a copy there"),
    "a link to another task": (linked("../../total/instruction.md"), "links to a place outside its task"),
    "a pipe": (lambda task: os.mkfifo(task / "tests" / "pipe"), "pipe is neither a file nor a folder: remove it"),
    "the first form of Terminal-Bench": (
        lambda task: (task / "task.toml").rename(task / "task.yaml") and None,
        "is in the first form of Terminal-Bench (task.yaml)",
    ),
    "one name twice": (
        lambda task: shutil.copy(task / "task.toml", task.parent / "rename") and None,
        "greet has the same name, 'posttrain/greet': rename one",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_folder_is_refused_in_one_line(kind: str, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, reason = FILES[kind]
    damage(tasks / "greet")
    assert main(["check", "--env", f"harbor:{tasks}"]) == 2
    shown = capsys.readouterr().err
    assert reason in shown and shown.count("\n") == 1


def test_links_within_a_task_are_followed(tasks: Path) -> None:
    linked("Dockerfile")(tasks / "greet")
    assert read_task(tasks / "greet").name == "greet"


def test_what_holds_no_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no task folder: each has task\.toml"):
        read_set(str(tmp_path))
    with pytest.raises(UserError, match="cannot be read: No such file or directory; name a folder"):
        read_set(str(tmp_path / "none"))
