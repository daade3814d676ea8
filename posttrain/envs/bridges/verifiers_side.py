"""Runs episodes of the `verifiers` library, in a Python environment with that library. It imports nothing of ours.

`posttrain.envs.bridges.verifiers` starts it by its path. Both exchange lines of JSON:

    in    first {"env": {...}, "client": {...}, "sampling": {...}, "model": name} or, to list tasks, {"env": ...,
          "tasks": most tasks}; then {"run": number, "task": index, "url": base URL}, or {"run": number} to cancel one
    out   {"ready": true}, {"tasks": [...]} or {"failed": reason}; then, of each run, {"run": number, "traces": [...]}
          or {"run": number, "failed": reason}
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from typing import Any

MOST_CLIENTS = 256  # most clients that the library holds


async def main() -> None:
    lines = await _lines()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # printed text goes to standard error
    sys.stdout = sys.stderr

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")

    try:
        setup = json.loads(await lines.readline())
        side = Side(setup)
        if "tasks" in setup:
            say({"tasks": side.rows(setup["tasks"])})
            return
    except Exception as error:
        say({"failed": described(error)})
        return
    say({"ready": True})
    await side.play(lines, say)


class Side:
    def __init__(self, setup: dict[str, Any]) -> None:
        import verifiers.v1 as vf

        self.setup = setup
        self.env = vf.load_environment(vf.resolve_env_config(setup["env"]))
        self.runs: dict[int, asyncio.Task[list[dict[str, Any]]]] = {}
        self._made: list[Any] = []  # tasks so far; a taskset may have no end
        self._tasks = iter(self.env.taskset)

    def task(self, index: int) -> Any:
        self._made += itertools.islice(self._tasks, max(0, index + 1 - len(self._made)))
        if index >= len(self._made):
            raise IndexError(f"the taskset has {len(self._made)} tasks; there is no task {index}")
        return self._made[index]

    def rows(self, most: int) -> list[dict[str, Any]]:
        """Return the first tasks' fields that JSON can represent."""
        self._made += itertools.islice(self._tasks, most)
        told = [json.loads(task.data.model_dump_json(exclude_defaults=True)) for task in self._made]
        keys = [task.key for task in self._made]
        return [{**data, "id": key, "index": place} for place, (key, data) in enumerate(zip(keys, told, strict=True))]

    async def play(self, lines: asyncio.StreamReader, say: Any) -> None:
        """Run episodes until the input ends.

        The library holds a client for each address, and each episode has its own address: all clients are freed once
        `MOST_CLIENTS` episodes have begun and none is running.
        """
        line = await lines.readline()
        while line:
            async with self.env.serving():
                begun = 0
                while line and (self.runs or begun < MOST_CLIENTS):
                    begun += self._take(json.loads(line), say)
                    line = await lines.readline()
                left = list(self.runs.values())  # not empty only if the input has ended
                for run in left:
                    run.cancel()
                await asyncio.gather(*left, return_exceptions=True)

    def _take(self, message: dict[str, Any], say: Any) -> bool:
        """Handle a message; return whether it begins a run."""
        number, runs = message["run"], self.runs
        if "task" not in message:
            if number in runs:
                runs[number].cancel()
            return False
        run = runs[number] = asyncio.ensure_future(self._played(message))

        def ended(run: asyncio.Task[Any]) -> None:
            del runs[number]
            if run.cancelled():
                return
            error = run.exception()
            say({"run": number, **({"failed": described(error)} if error is not None else {"traces": run.result()})})

        run.add_done_callback(ended)
        return True

    async def _played(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        import verifiers.v1 as vf

        client = {"api_key_var": "POSTTRAIN_KEY", **self.setup["client"], "base_url": message["url"]}
        kinds = {"train": vf.TrainClientConfig, "eval": vf.EvalClientConfig}
        context = vf.ModelContext(
            model=self.setup["model"],
            client=kinds[client.pop("type", "eval")](**client),
            sampling=vf.SamplingConfig(**self.setup["sampling"]),
        )
        episode = await self.env.run_episode(self.task(message["task"]), context)
        if self.setup.get("record"):
            self._record(episode)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(
                f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode was not completed"
            )
        return [_described(trace) for trace in episode.traces if trace.agent.trainable]

    def _record(self, episode: Any) -> None:
        """Append the library's own record to a file, to which several processes may write."""
        line = json.dumps(episode.to_record(float_decimals=None)) + "\n"
        file = os.open(self.setup["record"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


def _described(trace: Any) -> dict[str, Any]:
    """Return the fields of a trace for JSON."""
    return {
        "agent": trace.agent.name,
        "reward": trace.reward,
        "rewards": {name: reward.value for name, reward in trace.rewards.items() if reward is not None},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
    }


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


if __name__ == "__main__":
    asyncio.run(main())
