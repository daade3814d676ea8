"""Tasks in Harbor's format as an environment: the policy works in a container with a shell, and tests give the reward.

    posttrain check --env harbor:FOLDER
    posttrain rl --env harbor:FOLDER --model runs/sft

Each task folder is a row ("id", "task", "prompt"). The policy gets the instruction as a user's message, and one tool,
`shell`. When a reply calls nothing, or a budget is exhausted, the tests are copied into the same container and run, as
Harbor does by default.

Tests that give no reward are first tried in an untouched container, once for each task. If they work there, the
policy broke them and earns 0; else the reward is Invalid.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from posttrain.core.messages import clip, near_or_all, short
from posttrain.core.types import Invalid, Task, Turn, UserError
from posttrain.envs.bridges.bridge import LONGEST, shown
from posttrain.envs.bridges.harbor_tasks import SOLUTION, HarborTask, read_set
from posttrain.envs.play.call_recording import note
from posttrain.envs.play.env_outputs import MOST_REWARD
from posttrain.envs.play.tools import Tools
from posttrain.sandbox import container_choice
from posttrain.sandbox.container_choice import AnyContainer
from posttrain.sandbox.containers import LONGEST_COMMAND, START_SECONDS, ContainerError, ContainerLimits

SUCCESS = 1.0  # the reward of a task whose tests all pass
ORACLE = "oracle"  # a column: the solution of the task's folder works in place of the policy
SMALL_SECONDS = 60.0  # for commands of our own in a container
STARTS = 4  # containers of a worker process that start at once
LONGEST_REWARD = 1 << 16  # bytes of a reward file
SHOWN_OF_TESTS = 2000  # characters of the tests' output that a rollout's notes keep
ROOT = "0"
_CONTROLS = dict.fromkeys([*range(9), 11, 12, 13, *range(14, 32), 127])
_PREPARE = "mkdir -p /logs/verifier /logs/agent /logs/artifacts && chmod 777 /logs/agent /logs/artifacts"
_EMPTY_TESTS = "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier && chmod {rights} /logs/verifier"
_READ = (
    "cd /logs/verifier && for name in reward.json reward.txt; do if [ -e $name ]; then echo $name; "
    f"head -c {LONGEST_REWARD + 1} $name; exit; fi; done"
)


async def play(
    task: Task, *, folder: str = "", command: float = 60.0, output: int = LONGEST, network: bool = False
) -> AsyncGenerator[Any, Any]:
    """Run an episode of one task.

    `folder`: the set of tasks; `command`: seconds of one command; `output`: most characters shown of its output;
    `network`: gives the network to tasks that do not decide about it.
    """
    known = _task_of(folder, task)
    try:
        async with _container(known, network) as container:
            shell = _Shell(container, known, command, output)
            tools = Tools(shell.tool(), once=False)
            prompt = task["prompt"] if isinstance(task.get("prompt"), str) else known.instruction
            reply = yield Turn(messages=[{"role": "user", "content": prompt}], tools=tools)
            if task.get(ORACLE):
                await _solve(known, container)
            else:
                while not shell.broken and (turn := await tools.answer_async(reply)):
                    reply = yield turn
                note(commands=shell.count)
            found, printed = await _tested(known, container)
            note(**({"tests": printed} if printed else {}))
    except ContainerError as error:
        found = Invalid(str(error))
    if isinstance(found, Invalid) and not task.get(ORACLE) and await _works_untouched(known, network):
        note(broken_tests=found.reason)
        found = {"reward": 0.0}
    yield found


def _task_of(folder: str, task: Task) -> HarborTask:
    tasks = read_set(folder)
    name = task.get("task")
    if not isinstance(name, str) or name not in tasks:
        raise UserError(f"the row's column task is {short(name)}{near_or_all(str(name), list(tasks))}")
    return tasks[name]


@asynccontextmanager
async def _container(known: HarborTask, network: bool) -> AsyncGenerator[AnyContainer, None]:
    """Start the container of a task, and remove it at the end. Raises ContainerError."""
    allowed = known.network if known.network is not None else network
    life = max(ContainerLimits.life, 2 * (known.work_seconds + known.test_seconds))
    limits = ContainerLimits(known.memory, known.cpus, network=allowed, life=life)
    async with _starting():
        container = await container_choice.start(
            known.image, known.folder / "environment", known.build_seconds, limits, known.variables
        )
    try:
        prepared = await container.run(_PREPARE, SMALL_SECONDS, user=ROOT)
        if prepared.exit:
            raise ContainerError(f"the image cannot be used: {clip(_plain(prepared.output), 300)}")
        yield container
    finally:
        await container.close()


_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _starting() -> asyncio.Semaphore:
    """Return the semaphore of this event loop for starts of containers."""
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(STARTS))


def _plain(output: bytes) -> str:
    """Return output of a command as text without colours and control characters."""
    return shown(output.decode(errors="replace").replace("\r\n", "\n"), len(output) + 1).translate(_CONTROLS)


# -- the policy's side -------------------------------------------------------------------------------------------------


@dataclass
class _Shell:
    """The tool of one episode."""

    container: AnyContainer
    known: HarborTask
    seconds: float
    longest: int
    count: int = 0  # commands so far
    broken: bool = False  # whether the container has ended
    spent: float = 0.0  # seconds of all commands
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # commands of one reply run in their order

    def tool(self) -> Any:
        """Return the function that the model calls."""

        async def shell(command: str) -> str:
            """Run a command in the shell of a Linux container, and return what it prints.

            Files stay from call to call. Each call begins in the same folder, with the same variables.

            Args:
                command: The command, or several lines of them.
            """
            async with self.turn:
                return await self._run(command)

        return shell

    async def _run(self, command: str) -> str:
        left = self.known.work_seconds - self.spent
        encoded = command.encode("utf-8", "replace")
        if "\0" in command or len(encoded) > LONGEST_COMMAND:
            return f"Error: a command is text of at most {LONGEST_COMMAND:,} bytes, without the character of code 0"
        if self.broken or left <= 0:
            return "Error: the time for commands is used up" if not self.broken else "Error: the container has ended"
        self.count += 1
        began = time.monotonic()
        limit = min(self.seconds, left)
        try:
            ran = await self.container.run(
                encoded.decode(),
                limit,
                user=self.known.work_user,
                folder=self.known.work_folder,
                most=8 * self.longest,
            )
        except ContainerError as error:
            self.broken = True
            return f"Error: {error}"
        self.spent += time.monotonic() - began
        text = shown(_plain(ran.output), self.longest).rstrip("\n")
        end = f"(stopped after {limit:.0f} s)" if ran.over else f"(exit code {ran.exit})" if ran.exit else ""
        return "\n".join(filter(None, (text, end))) or "(no output)"


# -- the tests' side ---------------------------------------------------------------------------------------------------


async def _solve(known: HarborTask, container: AnyContainer) -> None:
    """Run the task's own solution. Raises ContainerError without one."""
    if not known.solved:
        raise ContainerError(f"task {known.name} has no {SOLUTION}, so nothing shows that its tests can pass")
    place = SOLUTION.partition("/")[0]
    await container.copy_in(known.folder / place, f"/{place}")
    ran = await container.run(
        f"chmod +x /{SOLUTION} && /{SOLUTION}",
        known.work_seconds,
        user=known.work_user,
        folder=known.work_folder,
        environment={"DEBIAN_FRONTEND": "noninteractive", **known.solution_variables},
    )
    if ran.over or ran.exit:
        how = f"did not end within {known.work_seconds:g} s" if ran.over else f"ended with exit code {ran.exit}"
        note(solution=f"{how}: {_plain(ran.output)[-300:].strip()}")


async def _tested(known: HarborTask, container: AnyContainer) -> tuple[dict[str, float] | Invalid, str]:
    """Run the tests, and return the reward that they write, or Invalid, with the end of what they printed.

    Raises ContainerError.
    """
    rights = "777" if known.test_user else "755"
    await container.run(_EMPTY_TESTS.format(rights=rights), SMALL_SECONDS, user=ROOT)
    await container.copy_in(known.folder / "tests", "/tests")
    await container.run("chmod +x /tests/test.sh", SMALL_SECONDS, user=ROOT)
    ran = await container.run(
        "/tests/test.sh",
        known.test_seconds,
        user=known.test_user,
        folder=known.work_folder,
        environment=known.test_variables,
    )
    printed = _plain(ran.output)[-SHOWN_OF_TESTS:]
    if ran.over:
        return Invalid(f"the tests of {known.name} did not end within {known.test_seconds:g} s"), printed
    written = await container.run(_READ, SMALL_SECONDS, user=ROOT, most=2 * LONGEST_REWARD)
    found = read_reward(written.output)
    if isinstance(found, str):
        return Invalid(f"the tests of {known.name} {found} (exit code {ran.exit})"), printed
    return found, printed


def read_reward(written: bytes) -> dict[str, float] | str:
    """Return the reward, as "reward", with further numbers by name; or the fault of the file, in words.

    `written`: the file's name, a line end, its content. The reward is from 0 to 1.

    >>> read_reward(b"reward.txt\\n0.5\\n"), read_reward(b"reward.json\\n{\\"reward\\": 1, \\"speed\\": 3.5}")
    ({'reward': 0.5}, {'reward': 1.0, 'speed': 3.5})
    >>> read_reward(b"reward.txt\\nyes"), read_reward(b"")
    ("wrote reward.txt, which holds 'yes' and no number", 'wrote neither reward.txt nor reward.json')
    """
    first, _, content = written.partition(b"\n")
    name = first.decode(errors="replace")
    if name not in ("reward.json", "reward.txt"):
        return "wrote neither reward.txt nor reward.json"
    text = content.decode(errors="replace").strip()
    if len(content) > LONGEST_REWARD:
        return f"wrote {name} of more than {LONGEST_REWARD:,} bytes"
    try:
        told = json.loads(text) if name == "reward.json" else float(text)
    except (ValueError, RecursionError):
        kind = "JSON" if name == "reward.json" else "number"
        return f"wrote {name}, which holds {short(text)} and no {kind}"
    parts = told if isinstance(told, dict) else {"reward": told}
    if len(parts) == 1:
        parts = {"reward": next(iter(parts.values()))}
    if "reward" not in parts:
        return f"wrote {name} of {len(parts)} numbers, none of them named reward"
    for key, value in parts.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST_REWARD:
            return f"wrote {name}, in which {key} is {short(value)}, not a number below {MOST_REWARD:g}"
    if not 0 <= parts["reward"] <= 1:
        return f"wrote {name} with the reward {short(parts['reward'])}, which is not from 0 to 1"
    return {key: float(value) for key, value in parts.items()}


_untouched: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, asyncio.Task[bool]]] = WeakKeyDictionary()
"""Event loop -> whether the tests of a task work in a container in which nothing was done."""


async def _works_untouched(known: HarborTask, network: bool) -> bool:
    """Return whether the tests give a reward in a container in which nothing was done. Tried once for each task."""

    async def tried() -> bool:
        try:
            async with _container(known, network) as container:
                return not isinstance((await _tested(known, container))[0], Invalid)
        except ContainerError:
            return False

    loop = asyncio.get_running_loop()
    tasks, key = _untouched.setdefault(loop, {}), (known.folder, network)
    if key not in tasks:
        tasks[key] = loop.create_task(tried())
    return await asyncio.shield(tasks[key])


# -- the set -----------------------------------------------------------------------------------------------------------


def check_options(*, folder: str, command: float, output: int, network: bool) -> None:
    """Raise UserError for a folder that is no set of tasks, and for limits out of range."""
    if not 0 < command <= 3600:
        raise UserError(f"command is {command:g}; a command may take from above 0 to 3600 seconds")
    if not 100 <= output <= 100_000:
        raise UserError(f"output is {output}; from 100 to 100,000 characters of a command's output may be shown")
    read_set(folder)


def task_rows(folder: str) -> list[Task]:
    """Return a row for each task of a set."""
    return [known.row for known in read_set(folder).values()]


def step_seconds(folder: str) -> float:
    """Return the seconds that the longest step of a task may take: its image, its solution, and its tests twice."""
    tasks = read_set(folder).values()
    return max(
        k.build_seconds + k.work_seconds + 2 * (k.test_seconds + START_SECONDS + 5 * SMALL_SECONDS) for k in tasks
    )


def with_oracle(task: Task) -> Task:
    """Return the task in which its own solution works in place of the policy."""
    return {**task, ORACLE: True}


def about(folder: str) -> list[str]:
    """Describe where containers run, and remove those that earlier runs left.

    Raises UserError, with the fix, if a task of the set can run nowhere.
    """
    told = container_choice.about()
    for known in read_set(folder).values():
        try:
            source = known.image or known.folder / "environment"
            container_choice.check(source, bool(known.network), (known.work_user, known.test_user))
        except UserError as error:
            raise UserError(f"task {known.name}: {error}") from None
    return [told]
