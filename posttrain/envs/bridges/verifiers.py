"""Environments of the `verifiers` library (0.4), trained unchanged: their agents, harnesses and rewards.

    secret = Taskset({"taskset": {"id": "secret_number"}}, python="runs/verifiers-env/bin/python")
    env = secret.environment()
    rows = secret.rows

The library needs other versions of packages, so it is installed in a separate Python environment, and each worker
starts one process there (`verifiers_side.py`). Its model client speaks to the episode's own address, as any harness
does. With the "train" client the library renders conversations itself and sends token ids; with "eval" it sends
messages, which are rendered here with the checkpoint's template. Either way transcripts grow here, from the engine's
samples.

The reward of an episode is the mean over its trainable agents. The library's own records are only kept, not learned
from; `rollouts` reads records of other samplers, and trains a node that occurs in two branches once.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from posttrain.core.messages import one_line
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import AsyncEnv, Completion, StopReason, Task, UserError
from posttrain.envs.bridges.harness import MODEL, PolicyEndpoint, harness

SIDE = Path(__file__).with_name("verifiers_side.py")
ROWS_SECONDS = 120.0  # timeout for starting the library and listing its tasks
LONGEST_LINE = 1 << 26  # bytes


@dataclass(frozen=True)
class Taskset:
    """An environment of the library.

    `env`: its [env] block, as `vf-eval` reads it; by default agents run on this machine. `client`: the block of its
    model client without the address, such as {"type": "train", "renderer": {"name": "qwen3"}, "renderer_model_name":
    FOLDER}. `python`: the interpreter of the environment with the library. `path`: folders with tasksets. `record`: a
    file for the library's own records of episodes.
    """

    env: Mapping[str, Any]
    python: str
    client: Mapping[str, Any] = field(default_factory=lambda: {"type": "eval"})
    sampling: Mapping[str, Any] = field(default_factory=dict)
    path: Sequence[str] = ()
    record: str | None = None

    def rows(self, most: int = 1000) -> list[dict[str, Any]]:
        """Return the first `most` tasks. Raises UserError if the library does not start."""
        setup = json.dumps({"env": self.env, "tasks": most}) + "\n"
        try:
            ran = subprocess.run(
                self._command, input=setup, capture_output=True, text=True, timeout=ROWS_SECONDS, env=self._variables
            )
            told = json.loads(ran.stdout or '{"failed": ""}')
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise UserError(f"{self.python} cannot list the tasks: {one_line(error)}") from None
        if "tasks" not in told:
            last = ran.stderr.strip().splitlines()[-1:]
            raise UserError(f"{self.python} cannot list the tasks: {told.get('failed') or ' '.join(last)}")
        found: list[dict[str, Any]] = told["tasks"]
        return found

    def environment(self, unfinished: float = 0.0) -> AsyncEnv:
        """Return the environment that runs these tasks. `unfinished`: see `harness`."""

        async def play(task: Task, endpoint: PolicyEndpoint) -> dict[str, float]:
            return _reward(await _side_of(self).play(task["index"], endpoint.url))

        return harness(unfinished=unfinished, sampling="ignore")(play)  # the library always sends sampling fields

    @property
    def _command(self) -> list[str]:
        return [self.python, "-P", str(SIDE)]  # -P: our own folder must not be on its path

    @property
    def _variables(self) -> dict[str, str]:
        paths = [str(Path(folder).resolve()) for folder in self.path]
        tools = f"{Path(self.python).absolute().parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PATH": tools}

    @property
    def _setup(self) -> dict[str, Any]:
        return {
            "env": self.env,
            "client": self.client,
            "sampling": self.sampling,
            "model": MODEL,
            "record": self.record and str(Path(self.record).resolve()),
        }


class _Side:
    """The process of the library that runs the episodes of this event loop."""

    def __init__(self, taskset: Taskset) -> None:
        self.taskset = taskset
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._runs: dict[int, asyncio.Future[Any]] = {}
        self._begun = 0
        self._hearing: asyncio.Task[None] | None = None

    async def play(self, index: int, url: str) -> list[dict[str, Any]]:
        """Run an episode of a task and return its traces. Raises RuntimeError with the library's error."""
        async with self._starting:
            if self._process is None:
                await self._start()
        self._begun += 1
        number = self._begun
        self._runs[number] = asyncio.get_running_loop().create_future()
        self._write({"run": number, "task": index, "url": url})
        try:
            traces: list[dict[str, Any]] = await self._runs[number]
            return traces
        except asyncio.CancelledError:
            self._write({"run": number})
            raise
        finally:
            del self._runs[number]

    async def _start(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *self.taskset._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self.taskset._variables,
            limit=LONGEST_LINE,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(self.taskset._setup).encode() + b"\n")
            answer = json.loads(await process.stdout.readline() or "{}")
            if not answer.get("ready"):
                raise RuntimeError(f"verifiers did not start: {answer.get('failed', 'see what it printed')}")
        except BaseException:
            _kill(process)
            raise
        self._process = process
        self._hearing = asyncio.ensure_future(self._receive(process, process.stdout))

    async def _receive(self, process: asyncio.subprocess.Process, lines: asyncio.StreamReader) -> None:
        """Handle the process's messages, until it ends or sends an invalid one."""
        with suppress(ValueError, LookupError, TypeError):
            while line := await lines.readline():
                told = json.loads(line)
                run = self._runs.get(told["run"])
                if run is None or run.done():
                    continue
                if "traces" in told:
                    run.set_result(told["traces"])
                else:
                    run.set_exception(RuntimeError(str(told["failed"])))
        self._process = None
        _kill(process)
        code = await process.wait()
        for run in self._runs.values():
            if not run.done():
                run.set_exception(RuntimeError(f"the process of verifiers ended with exit code {code}"))

    def _write(self, message: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


_sides: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Side]] = WeakKeyDictionary()


def _side_of(taskset: Taskset) -> _Side:
    """Return the process for this taskset and event loop."""
    sides = _sides.setdefault(asyncio.get_running_loop(), {})
    return sides.setdefault(repr(taskset), _Side(taskset))


def _reward(traces: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each component over the traces; "reward" is the total."""
    if not traces:
        raise RuntimeError("no agent of the episode is trainable")
    found: dict[str, list[float]] = {}
    for trace in traces:
        for name, value in {**trace["metrics"], **trace["rewards"], "reward": trace["reward"]}.items():
            found.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}


# -- records -----------------------------------------------------------------------------------------------------------


def rollouts(records: Iterable[str | bytes]) -> Iterator[Rollout]:
    """Yield a rollout for each trainable trace of the library's records (traces.jsonl); each branch is a transcript.

    They have tokens and masks if the "train" client sampled them. The records of `vf-eval` round log-probabilities to
    four digits.
    """
    for line in records:
        record = json.loads(line)
        for trace in record.get("traces", [record]):
            if trace.get("agent", {}).get("trainable", True):
                yield _rollout(trace)


def _rollout(trace: Mapping[str, Any]) -> Rollout:
    nodes = trace["nodes"]
    parents = {node.get("parent") for node in nodes}
    learned: set[int] = set()
    transcripts = [
        _transcript([(place, nodes[place]) for place in _path(nodes, leaf)], learned)
        for leaf in range(len(nodes))
        if leaf not in parents
    ]
    rewards = {name: part for name, part in trace["rewards"].items() if part is not None}
    parts = {name: float(part["score"]) * float(part.get("weight", 1.0)) for name, part in rewards.items()}
    data = trace["task"]["data"]
    said = [node["message"].get("content") or "" for node in nodes if node.get("sampled")]
    return Rollout(
        task=data,
        group=str(trace["task"].get("key") or data.get("idx")),
        transcripts=[transcript for transcript in transcripts if transcript.n_sampled],
        reward=sum(parts.values()),
        rewards=parts,
        text="".join(said),
    )


def _path(nodes: Sequence[Mapping[str, Any]], leaf: int) -> list[int]:
    found = [leaf]
    while (parent := nodes[found[-1]].get("parent")) is not None:
        found.append(parent)
    return found[::-1]


def _transcript(path: Sequence[tuple[int, Mapping[str, Any]]], learned: set[int]) -> Transcript:
    """Return the transcript of these nodes; each node is trained in one transcript only."""
    transcript = Transcript()
    for place, node in path:
        logp = iter(node.get("logprobs", ()))
        marked = zip(node.get("token_ids", ()), node.get("mask", ()), strict=True)
        for sampled, run in groupby(marked, key=lambda token: token[1]):
            tokens = [id for id, _ in run]
            if sampled:
                own = [float(next(logp)) for _ in tokens]
                transcript.sample(Completion(0, tokens, own, "", StopReason.EOS, 0), place not in learned)
            else:
                transcript.observe(tokens)
        learned.add(place)
    return transcript
