"""What waiting for tools costs: episodes whose tools take a time, beside the same with tools that answer at once.

    python benchmarks/agents/waiting.py

64 episodes of 3 turns, each reply followed by a tool whose latency is exponential with a mean of half a second, in two
workers. The critical path is that of the slowest episode: its latencies, and the time of the run with instant tools. And
the memory of 256 tools that wait at once, beside workers that do nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch

from posttrain.engines.embedded import embedded
from posttrain.envs.play import Episode, Player
from posttrain.envs.pool import EnvPool
from posttrain.models.folder import load_model
from posttrain.models.tokenizer import Tokenizer
from posttrain.types import Reply, Rollout, Sampling, Turn

MODEL = Path(__file__).resolve().parents[3] / "shared" / "data" / "models" / "gsm8k-5m"
EPISODES, TURNS, MEAN, TOKENS, WAITING = 64, 3, 0.5, 32, 256


async def tool(task: dict[str, Any]) -> AsyncGenerator[Any, Any]:
    """A reply, a tool's answer, and so on; the reward is how much was said."""
    reply = yield Turn(task["prompt"])
    said = len(reply)
    for latency in task["latencies"][:-1]:
        await asyncio.sleep(latency)
        reply = yield f"\n[{said}]\n"
        said += len(reply)
    await asyncio.sleep(task["latencies"][-1])
    yield float(said)


def tasks(seed: int, mean: float) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    found = []
    for number in range(EPISODES):
        latencies = [mean * draw.expovariate(1.0) for _ in range(TURNS)]
        found.append({"id": str(number), "prompt": f"Anna has {number} apples.", "latencies": latencies})
    return found


def played(seed: int, mean: float, workers: int) -> tuple[float, list[Rollout]]:
    model, tokenizer = load_model(MODEL), Tokenizer.load(MODEL)
    engine = embedded(model, tokenizer, slots=EPISODES)
    with EnvPool(tool, workers=workers, seconds=60.0) as pool:
        pool.ready()
        sampling = Sampling(max_tokens=TOKENS)
        player = Player(pool, engine, tokenizer, sampling, model.config.context)
        player.play([Episode({"id": "warm", "prompt": "A", "latencies": [0.0] * TURNS}, "warm", 0)])
        begin = time.perf_counter()
        rollouts = player.play([Episode(task, task["id"], seed + i) for i, task in enumerate(tasks(seed, mean))])
        return time.perf_counter() - begin, rollouts


def same(some: list[Rollout], others: list[Rollout]) -> bool:
    """Whether all that is learned from is the same to the last bit."""

    def essence(rollout: Rollout) -> Any:
        logp = [t.sampler_logp for t in rollout.transcripts]
        return (
            [(t.tokens, t.spans) for t in rollout.transcripts],
            [x.tobytes() for x in logp if x is not None],
            rollout.reward,
            rollout.stop,
        )

    return repr(list(map(essence, some))) == repr(list(map(essence, others)))


def memory(pool: EnvPool) -> float:
    """Resident MiB of the workers, each counted with what it shares."""
    own = str(os.getpid())
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        except OSError:
            continue
        parents[folder.name] = status["PPid"].strip(), int(status.get("VmRSS", "0 kB").split()[0]) / 1024
    total, below = 0.0, {own}
    for _ in range(4):  # keepers, and workers below them
        below |= {pid for pid, (parent, _) in parents.items() if parent in below}
    total = sum(size for pid, (_, size) in parents.items() if pid in below - {own})
    return total


def waiting(workers: int) -> tuple[float, float]:
    """MiB of the workers before, and while so many tools wait."""
    with EnvPool(tool, workers=workers, seconds=60.0) as pool:
        pool.ready()
        before = memory(pool)
        for id in range(WAITING):
            pool.start(id, {"id": str(id), "prompt": "A", "latencies": [2.0] * TURNS})
        asked = 0
        while asked < WAITING:
            for id, _ in pool.poll(None):
                pool.send(id, Reply("reply"))
                asked += 1
        pool.poll(0.5)
        return before, memory(pool)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(2)
    for seed in options.seeds:
        instant, expected = played(seed, 0.0, options.workers)
        seconds, found = played(seed, MEAN, options.workers)
        longest = max(sum(task["latencies"]) for task in tasks(seed, MEAN))
        path = longest + instant
        print(
            f"seed {seed}: {seconds:.2f} s; instant tools {instant:.2f} s, slowest episode's tools {longest:.2f} s: "
            f"{seconds / path:.2f} of the critical path, {seconds / longest:.2f} of its tools alone; "
            f"same bytes: {same(found, expected)}"
        )
    before, there = waiting(options.workers)
    print(f"{WAITING} waiting tools in {options.workers} workers: {there - before:.0f} MiB more than {before:.0f}")


if __name__ == "__main__":
    main()
