"""How long episodes with slow tools take, beside the longest of them alone: python benchmarks/agents/waiting.py

64 episodes of 3 turns; after each reply a tool answers, after a time drawn from an exponential distribution of mean
0.5 s, the same for every run. The critical path is the episode whose tools take longest, played alone. A model with random
weights samples. What is sampled has to be that of a run whose tools answer at once, to the last bit.

The environment is async; --blocking: one that is not, each of whose episodes occupies a worker while its tool works. Then
the memory of 256 tools that wait at once, over that of workers that do nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core.seeds import seed_of
from posttrain.core.types import Reply, Task, Turn

if TYPE_CHECKING:
    from posttrain.envs.play.env_pool import EnvPool

TURNS, MEAN, WAITING = 3, 0.5, 256


def latency(task: Task, turn: int) -> float:
    """Seconds of the tool after a reply: exponential."""
    draw = (seed_of("latency", task["id"], turn) % 2**32 + 0.5) / 2**32
    return -MEAN * math.log(draw)


async def tools(task: Task) -> AsyncGenerator[Turn | str | float, Reply]:
    reply = yield task["prompt"]
    for turn in range(1, TURNS):
        await asyncio.sleep(task["scale"] * latency(task, turn))
        reply = yield Turn(f"<{len(reply)}>", tool=True)
    await asyncio.sleep(task["scale"] * latency(task, TURNS))
    yield float(len(reply))


def blocking_tools(task: Task) -> Generator[Turn | str, Reply, float]:
    reply = yield task["prompt"]
    for turn in range(1, TURNS):
        time.sleep(task["scale"] * latency(task, turn))
        reply = yield Turn(f"<{len(reply)}>", tool=True)
    time.sleep(task["scale"] * latency(task, TURNS))
    return float(len(reply))


def memory() -> float:
    """Resident MiB of all that this process started."""
    sizes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        except OSError:
            continue
        sizes[folder.name] = status["PPid"].strip(), int(status.get("VmRSS", "0 kB").split()[0]) / 1024
    below = {str(os.getpid())}
    while more := {pid for pid, (parent, _) in sizes.items() if parent in below} - below:
        below |= more
    return sum(sizes[pid][1] for pid in below - {str(os.getpid())})


def waiting(pool: EnvPool) -> tuple[float, float]:
    """MiB of the workers before, and while so many tools wait."""
    before = memory()
    for id in range(WAITING):
        pool.start(id, {"id": str(id), "prompt": "a", "scale": 9.0})
    asked = 0
    while asked < WAITING:
        for id, _ in pool.poll(None):
            pool.send(id, Reply("reply"))
            asked += 1
    pool.poll(0.2)
    return before, memory()


def measure(env: str, episodes: int, workers: int, runs: int, max_tokens: int, compiled: bool, threads: int) -> None:
    import torch

    from posttrain.core.rollouts import Rollout
    from posttrain.core.types import Sampling
    from posttrain.engines.local.local_engine import LocalEngine
    from posttrain.envs.play.env_pool import EnvPool
    from posttrain.envs.play.episode import Episode
    from posttrain.envs.play.player import Player
    from posttrain.models.native.decoder import new_decoder
    from posttrain.models.native.decoder_shape import DecoderConfig
    from posttrain.models.native.kernels import build
    from posttrain.models.tokenizer.tokenizer import Tokenizer

    build.use(compiled)
    torch.set_num_threads(threads)
    tokenizer = Tokenizer.train(["0123456789+-*/= .abcdefghijklmnopqrstuvwxyz<>"], 64, "characters")
    config = DecoderConfig(
        vocab=tokenizer.vocab_size, hidden=128, layers=4, heads=4, kv_heads=4, head_size=32, intermediate=352,
        context=512, tied=True,
    )  # fmt: skip
    model = new_decoder(config, 0)
    model.eos_ids = (tokenizer.eos_id or 0,)
    engine = LocalEngine(model, tokenizer)

    def timed(pool: EnvPool, ids: Sequence[int], scale: float = 1.0) -> tuple[float, list[Rollout]]:
        tasks = [{"id": str(i), "prompt": f"task {i} ", "scale": scale} for i in ids]
        begin = time.perf_counter()
        player = Player(pool, engine, tokenizer, Sampling(max_tokens=max_tokens), config.context)
        rollouts = player.play([Episode(task, task["id"], seed_of(task["id"])) for task in tasks])
        return time.perf_counter() - begin, rollouts

    def waits(i: int) -> float:
        return sum(latency({"id": str(i)}, turn) for turn in range(1, TURNS + 1))

    slowest = max(range(episodes), key=waits)
    print(f"{episodes} episodes of {TURNS} turns, {workers} workers, {engine.backend}, {threads} threads")
    print(f"tools: {sum(map(waits, range(episodes))):.1f} s in all, {waits(slowest):.2f} s in the slowest episode")

    def bits(rollouts: list[Rollout]) -> list[object]:
        return [[(t.tokens, list(t.logp)) for t in r.transcripts] for r in rollouts]

    with EnvPool(f"{Path(__file__)}:{env}", workers, seconds=60.0) as pool:
        pool.ready()
        _, instant = timed(pool, range(episodes), 0.0)  # everything is compiled, imported and warm
        ratios = []
        for run in range(runs):
            path, _ = timed(pool, [slowest])
            seconds, rollouts = timed(pool, range(episodes))
            ratios.append(seconds / path)
            assert bits(rollouts) == bits(instant), "timing has changed what was sampled"
            print(f"run {run + 1}: {seconds:.2f} s, critical path {path:.2f} s: {ratios[-1]:.3f} times")
    if env == "tools":
        with EnvPool(f"{Path(__file__)}:{env}", workers, seconds=60.0) as pool:
            pool.ready()
            before, there = waiting(pool)
        print(f"{WAITING} tools that wait in {workers} workers: {there - before:.0f} MiB more than {before:.0f}")
    print(f"median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(f"{time.strftime('%Y-%m-%d')}, commit {commit}, {machine}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-compiled", dest="compiled", action="store_false")
    parser.add_argument("--blocking", action="store_true")
    given = parser.parse_args()
    env = "blocking_tools" if given.blocking else "tools"
    measure(env, given.episodes, given.workers, given.runs, given.max_tokens, given.compiled, given.threads)
