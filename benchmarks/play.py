"""How long episodes with slow tools take, beside the longest of them alone: python benchmarks/play.py

64 episodes of 3 turns; after each reply a tool answers, after a time drawn from an exponential distribution of mean
0.5 s, the same for every run. The critical path is the episode whose tools take longest, played alone. A model with random
weights samples.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Generator, Sequence

from posttrain.seeds import seed_of
from posttrain.types import Reply, Task, Turn

TURNS, MEAN = 3, 0.5


def latency(task: Task, turn: int) -> float:
    """Seconds of the tool after a reply: exponential."""
    draw = (seed_of("latency", task["id"], turn) % 2**32 + 0.5) / 2**32
    return -MEAN * math.log(draw)


def tools(task: Task) -> Generator[Turn | str, Reply, float]:
    reply = yield task["prompt"]
    for turn in range(1, TURNS):
        time.sleep(task["scale"] * latency(task, turn))
        reply = yield Turn(f"<{len(reply)}>", tool=True)
    time.sleep(task["scale"] * latency(task, TURNS))
    return float(len(reply))


def measure(episodes: int, workers: int, runs: int, max_tokens: int, compiled: bool, threads: int) -> None:
    import torch

    from posttrain.engines.local import LocalEngine
    from posttrain.envs.play import Episode, Player
    from posttrain.envs.pool import EnvPool
    from posttrain.kernels import build
    from posttrain.models.decoder import DecoderConfig, new_decoder
    from posttrain.models.tokenizer import Tokenizer
    from posttrain.types import Rollout, Sampling

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
    with EnvPool("benchmarks.play:tools", workers, seconds=60.0) as pool:
        pool.ready()
        timed(pool, range(episodes), 0.0)  # everything is compiled, imported and warm
        ratios, first = [], None
        for run in range(runs):
            path, _ = timed(pool, [slowest])
            seconds, rollouts = timed(pool, range(episodes))
            ratios.append(seconds / path)
            tokens = [[t.tokens for t in r.transcripts] for r in rollouts]
            first = first or tokens
            assert tokens == first, "timing has changed what was sampled"
            print(f"run {run + 1}: {seconds:.2f} s, critical path {path:.2f} s: {ratios[-1]:.3f} times")
    print(f"median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(f"{time.strftime('%Y-%m-%d')}, commit {commit}, {machine}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-compiled", dest="compiled", action="store_false")
    given = parser.parse_args()
    measure(given.episodes, given.workers, given.runs, given.max_tokens, given.compiled, given.threads)
