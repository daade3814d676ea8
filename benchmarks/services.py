"""How long a judge's calls take while sampling goes on: python benchmarks/services.py

256 episodes ask a judge once after a short reply, 64 more sample long replies meanwhile. The judge is a real server, in
a process of its own, that answers each call after 0.5 s; 64 calls are in the air at once, so that 2 s is the least. A model
with random weights samples. The window is from the first call that is begun to the last answer that is heard.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import Any

from posttrain.core.seeds import seed_of
from posttrain.core.types import Ask, Task, Turn

AT_ONCE = 64  # calls in the air


def serve(latency: float, told: Connection) -> None:
    """A server that speaks as much HTTP as a judge needs."""
    verdict = {"choices": [{"message": {"content": '{"reason": "", "score": 5}'}}]}
    content = json.dumps(verdict).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        len(content),
        content,
    )

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
                await asyncio.sleep(latency)
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=512)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def asking(task: Task) -> Generator[Turn | Ask, Any, float]:
    reply = yield Turn(task["prompt"], max_tokens=None if task["long"] else 4)
    if task["long"]:
        return 0.0
    answer = yield Ask("judge", {"prompt": task["prompt"], "response": task["id"] + reply})
    return float(answer)


def measure(
    port: int, latency: float, asked: int, beside: int, tokens: int, runs: int, workers: int, threads: int
) -> None:
    import torch

    from posttrain.core.types import Completion, Sampling
    from posttrain.engines.local.local_engine import LocalEngine
    from posttrain.envs.play.env_pool import EnvPool
    from posttrain.envs.play.episode import Episode
    from posttrain.envs.play.player import Player
    from posttrain.envs.play.service_client import Services
    from posttrain.models.native.decoder import new_decoder
    from posttrain.models.native.decoder_shape import DecoderConfig
    from posttrain.models.tokenizer.tokenizer import Tokenizer
    from posttrain.services.judge import Judge
    from posttrain.services.judge_recipe import recipe_of

    torch.set_num_threads(threads)
    tokenizer = Tokenizer.train(["0123456789+-*/= .abcdefghijklmnopqrstuvwxyz<>"], 64, "characters")
    config = DecoderConfig(
        vocab=tokenizer.vocab_size, hidden=128, layers=4, heads=4, kv_heads=4, head_size=32, intermediate=352,
        context=1024, tied=True,
    )  # fmt: skip
    model = new_decoder(config, 0)
    model.eos_ids = (1 << 20,)  # none: long replies are as long as they may be
    polls: list[tuple[float, int]] = []  # when the engine had worked, and what was running

    class Watched(LocalEngine):
        def poll(self) -> list[Completion]:
            done = super().poll()
            polls.append((time.perf_counter(), len(self.running)))
            return done

    class Timed(Judge):
        def submit(self, id: int, content: Any) -> None:
            times.append(time.perf_counter())
            super().submit(id, content)

        def poll(self) -> list[tuple[int, Any]]:
            if answers := super().poll():
                times.append(time.perf_counter())
            return answers

    engine = Watched(model, tokenizer, slots=512)
    times: list[float] = []
    windows = []
    with EnvPool("benchmarks.services:asking", workers, seconds=60.0) as pool:
        pool.ready()
        for run in range(runs + 1):  # the first warms up
            recipe = recipe_of(
                {"endpoint": f"http://127.0.0.1:{port}/v1", "model": "m", "cache": False, "calls": AT_ONCE}
            )
            times.clear()
            polls.clear()
            with Services({"judge": Timed(recipe)}) as services:
                player = Player(pool, engine, tokenizer, Sampling(max_tokens=tokens), 1024, services=services)
                tasks = [{"id": str(i), "prompt": f"task {i} ", "long": i >= asked} for i in range(asked + beside)]
                rollouts = player.play([Episode(t, t["id"], seed_of(run, t["id"])) for t in tasks])
                counts = services.counts()
            assert [r.reward for r in rollouts] == [5.0] * asked + [0.0] * beside and counts["judge/requests"] == asked
            begin, end = times[0], times[-1]
            inside = [running for when, running in polls if begin <= when <= end]
            if run:
                windows.append(end - begin)
                print(
                    f"run {run}: {asked} calls in {end - begin:.2f} s; meanwhile the engine worked {len(inside)} times, "
                    f"{statistics.mean(inside):.0f} requests running"
                )
    middle, least = statistics.median(windows), latency * math.ceil(asked / AT_ONCE)
    print(
        f"median {middle:.2f} s, from {min(windows):.2f} to {max(windows):.2f}: {middle / least:.2f} times the least that "
        f"is possible, {least:g} s"
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {engine.backend}"
    print(f"{time.strftime('%Y-%m-%d')}, commit {commit}, {machine}, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--asked", type=int, default=256)
    parser.add_argument("--beside", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--latency", type=float, default=0.5)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(given.latency, theirs), daemon=True)
    server.start()
    sizes = given.asked, given.beside, given.tokens, given.runs, given.workers, given.threads
    measure(ours.recv(), given.latency, *sizes)
    server.terminate()
