"""Reads folders of tasks in Harbor's format (schema 1.0 to 1.4), each with a container to work in and its tests.

    NAME/task.toml                limits, users, network, variables
    NAME/instruction.md           the text that the policy gets
    NAME/environment/Dockerfile   the container
    NAME/tests/test.sh            writes the reward to /logs/verifier/reward.txt, or reward.json
    NAME/solution/solve.sh        the reference solution, if there is one

Every error is a UserError of one line with the task's folder. A key that would change an episode and is not supported
is refused; keys that only describe a task are not read.
"""

from __future__ import annotations

import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.core import user_files
from posttrain.core.messages import inline, near_or_all, short
from posttrain.core.types import Task, UserError

TOML, INSTRUCTION, TESTS, SOLUTION = "task.toml", "instruction.md", "tests/test.sh", "solution/solve.sh"
DOCKERFILE = "environment/Dockerfile"
SECONDS = 600.0  # Harbor's limit of tests and of a build where the task gives none; also of the policy's commands
MEMORY = 2048  # MiB, where the task gives none
LONGEST_SECONDS = 18_000.0  # of one limit; the longest step, of four of them, stays below a day
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])B?", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")

_KEYS = {
    "": "version schema_version task metadata source artifacts verifier agent environment solution steps "
    "multi_step_reward_strategy",
    "verifier": "timeout_sec env user network_mode allowed_hosts environment_mode environment collect",
    "agent": "timeout_sec user network_mode allowed_hosts",
    "environment": "build_timeout_sec docker_image os cpus memory_mb memory storage_mb storage gpus gpu_types tpu "
    "mcp_servers env skills_dir healthcheck workdir allow_internet network_mode allowed_hosts",
    "solution": "env",
}
KEYS: Mapping[str, frozenset[str]] = {section: frozenset(keys.split()) for section, keys in _KEYS.items()}
"""Section -> the keys of Harbor's schema."""

REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "steps": (bool, "tasks of several steps"),
    "verifier.environment": (bool, "tests in a container of their own"),
    "verifier.environment_mode": (lambda value: value != "shared", "tests in a container of their own"),
    "verifier.collect": (bool, "commands that collect files before the tests"),
    "environment.os": (lambda value: str(value).lower() != "linux", "another system than Linux"),
    "environment.gpus": (bool, "GPUs in a container"),
    "environment.tpu": (bool, "TPUs in a container"),
    "environment.mcp_servers": (bool, "MCP servers of a task"),
    "environment.skills_dir": (bool, "skills of an agent"),
    "environment.healthcheck": (bool, "health checks"),
    "environment.allowed_hosts": (bool, "a network of chosen hosts"),
    "agent.allowed_hosts": (bool, "a network of chosen hosts"),
    "verifier.allowed_hosts": (bool, "a network of chosen hosts"),
}
"""Key -> (whether a value asks for something that is not supported, what that is)."""


@dataclass(frozen=True)
class HarborTask:
    """A task as its folder describes it."""

    folder: Path
    instruction: str
    image: str | None = None  # the name of an image that is used in place of the Dockerfile
    build_seconds: float = SECONDS
    work_seconds: float = SECONDS  # of all the policy's commands together, and of the solution
    test_seconds: float = SECONDS
    memory: int = MEMORY  # MiB
    cpus: float = 1.0
    network: bool | None = None  # None: the task does not decide
    work_folder: str | None = None  # None: that of the image
    work_user: str | None = None  # None: that of the image
    test_user: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)  # of the container
    test_variables: Mapping[str, str] = field(default_factory=dict)
    solution_variables: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)  # difficulty and category, for the rows

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def solved(self) -> bool:
        """Whether the task has a reference solution."""
        return (self.folder / SOLUTION).is_file()

    @property
    def row(self) -> Task:
        return {"id": self.name, "task": self.name, "prompt": self.instruction, **self.about}


def read_set(folder: str) -> dict[str, HarborTask]:
    """Return the tasks of a folder by name; the folder may also be one task. Raises UserError."""
    return _read_set(os.path.abspath(user_files.named(folder)))


@lru_cache(4)
def _read_set(folder: str) -> dict[str, HarborTask]:
    place = Path(folder)
    try:
        names = sorted(entry.name for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}; name a folder of Harbor's task folders") from None
    if (place / TOML).exists():
        return {place.name: read_task(place)}
    _refuse_first_form(place)
    if not names:
        raise UserError(f"{folder} holds no task folder: each has {TOML}, {INSTRUCTION}, environment and tests")
    found: dict[str, HarborTask] = {}
    named: dict[str, str] = {}  # the name of a task for others -> its folder
    for name in names:
        _refuse_first_form(place / name)
        found[name] = read_task(place / name)
        full = _full_name(place / name)
        if full is not None and named.setdefault(full, name) != name:
            raise UserError(f"{place / name}: {named[full]} has the same name, {full!r}: rename one, or leave it out")
    return found


def _refuse_first_form(folder: Path) -> None:
    if (folder / "task.yaml").exists() and not (folder / TOML).exists():
        raise UserError(
            f"{folder} is in the first form of Terminal-Bench (task.yaml), which has no reward file: convert it with "
            "harbor task migrate"
        )


def _full_name(folder: Path) -> str | None:
    told = _toml(folder).get("task")
    return str(told["name"]) if isinstance(told, Mapping) and told.get("name") else None


def read_task(folder: Path) -> HarborTask:
    """Read and check one task folder. Raises UserError."""
    _check_files(folder)
    told = _toml(folder)
    _check_keys(folder, told)
    image = _text(folder, told, "environment", "docker_image")
    for name, why in (
        (INSTRUCTION, "the text that the policy gets"),
        (TESTS, "it writes the reward to /logs/verifier/reward.txt"),
        *(() if image else ((DOCKERFILE, "or environment.docker_image in task.toml"),)),
    ):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: {why}")
    if (folder / "environment" / "docker-compose.yaml").exists():
        raise UserError(f"{folder}: several containers (environment/docker-compose.yaml) are not supported")
    instruction = _read(folder / INSTRUCTION).strip()
    if not instruction:
        raise UserError(f"{folder / INSTRUCTION} is empty: it is the text that the policy gets")
    return HarborTask(
        folder,
        instruction,
        image,
        _seconds(folder, told, "environment", "build_timeout_sec"),
        _seconds(folder, told, "agent", "timeout_sec"),
        _seconds(folder, told, "verifier", "timeout_sec"),
        _memory(folder, told),
        _number(folder, told, "environment", "cpus", 1.0, 1024.0),
        _network(folder, told),
        _text(folder, told, "environment", "workdir"),
        _text(folder, told, "agent", "user"),
        _text(folder, told, "verifier", "user"),
        _variables(folder, told, "environment"),
        _variables(folder, told, "verifier"),
        _variables(folder, told, "solution"),
        _about(told),
    )


def _check_files(folder: Path) -> None:
    """Refuse links out of the folder, and whatever is neither file nor folder."""
    home = user_files.real(folder)
    for path in sorted(folder.rglob("*")):
        kind = path.lstat().st_mode
        if stat.S_ISLNK(kind) and not user_files.real(path).is_relative_to(home):
            raise UserError(f"{path} links to a place outside its task: put a copy there")
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind)):
            raise UserError(f"{path} is neither a file nor a folder: remove it")


def _read(path: Path) -> str:
    try:
        return user_files.text(path)
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}: it is not a task in Harbor's format") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: {inline(str(error))}") from None


def _toml(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read(folder / TOML))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{folder / TOML} is not valid TOML: {inline(str(error))}") from None


def _check_keys(folder: Path, told: Mapping[str, Any]) -> None:
    """Refuse unknown keys, and values that ask for something unsupported."""
    for section, known in KEYS.items():
        given = told if not section else told.get(section, {})
        if not isinstance(given, Mapping):
            raise UserError(f"{folder / TOML}: {section} is {short(given)}; it must be a table, [{section}]")
        for key, value in given.items():
            full = f"{section}.{key}" if section else key
            if key not in known:
                raise UserError(f"{folder / TOML}: there is no key {full!r}{near_or_all(key, sorted(known))}")
            asks, what = REFUSED.get(full, (None, ""))
            if asks is not None and asks(value):
                raise UserError(f"{folder / TOML}: {full} is {short(value)}; {what} are not supported: leave it out")


# -- values ------------------------------------------------------------------------------------------------------------


def _wrong(folder: Path, section: str, key: str, value: Any, expected: str) -> UserError:
    return UserError(f"{folder / TOML}: {section}.{key} is {short(value)}; expected {expected}")


def _text(folder: Path, told: Mapping[str, Any], section: str, key: str) -> str | None:
    value = told.get(section, {}).get(key)
    if value is None:
        return None
    if key == "user" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value or value.startswith("-") or "\0" in value:
        raise _wrong(folder, section, key, value, "text that is not empty and begins with no dash")
    return value


def _number(folder: Path, told: Mapping[str, Any], section: str, key: str, default: float, most: float) -> float:
    value = told.get(section, {}).get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise _wrong(folder, section, key, value, f"a number above 0, of at most {most:g}")
    return float(value)


def _seconds(folder: Path, told: Mapping[str, Any], section: str, key: str) -> float:
    return _number(folder, told, section, key, SECONDS, LONGEST_SECONDS)


def _memory(folder: Path, told: Mapping[str, Any]) -> int:
    """Return the memory in MiB: a number, or text such as 2G, which older tasks have."""
    older = told.get("environment", {}).get("memory")
    if older is None:
        return math.ceil(_number(folder, told, "environment", "memory_mb", MEMORY, 1 << 24))
    found = _SIZE.fullmatch(older) if isinstance(older, str) else None
    size = math.ceil(float(found[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[found[2].upper()]) if found else 0
    if size < 1:
        raise _wrong(folder, "environment", "memory", older, "a size such as 2G or 512M")
    return size


def _network(folder: Path, told: Mapping[str, Any]) -> bool | None:
    """Return whether the task has the network; None if it does not decide. All its phases must agree."""
    modes = {}
    for section in ("environment", "agent", "verifier"):
        mode = told.get(section, {}).get("network_mode")
        if mode is None and section == "environment" and "allow_internet" in told.get(section, {}):
            mode = {True: "public", False: "no-network"}.get(told[section]["allow_internet"], "?")
        if mode is None:
            continue
        if mode not in ("public", "no-network"):
            raise _wrong(folder, section, "network_mode", mode, "public or no-network")
        modes[section] = mode == "public"
    if "environment" not in modes and len(modes) == 1:
        section = next(iter(modes))
        raise UserError(f"{folder / TOML}: {section}.network_mode is for one phase; put it under [environment] for all")
    if len(set(modes.values())) > 1:
        raise UserError(f"{folder / TOML}: network_mode differs between phases, which is not supported: make it one")
    return next(iter(modes.values()), None)


def _variables(folder: Path, told: Mapping[str, Any], section: str) -> dict[str, str]:
    """Return the variables of a section; ${NAME} and ${NAME:-DEFAULT} are taken from this process's environment."""
    given = told.get(section, {}).get("env", {})
    if not isinstance(given, Mapping) or not all(isinstance(value, str) for value in given.values()):
        raise _wrong(folder, section, "env", given, 'a table of texts, such as {NAME = "value"}')

    def own(found: re.Match[str]) -> str:
        value = os.environ.get(found[1], found[2])
        if value is None:
            raise UserError(f"{folder / TOML}: {section}.env needs the environment variable {found[1]}: set it")
        return value

    return {name: _VARIABLE.sub(own, value) for name, value in given.items()}


def _about(told: Mapping[str, Any]) -> dict[str, str]:
    metadata = told.get("metadata", {})
    if not isinstance(metadata, Mapping):
        return {}
    return {key: metadata[key] for key in ("difficulty", "category") if isinstance(metadata.get(key), str)}
