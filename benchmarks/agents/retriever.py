"""What retrieval takes and finds: python benchmarks/agents/retriever.py build memory serve recall

build    an index of all passages, and 64 queries on it, several times
memory   what an open index takes of its own in a worker, after 1000 queries; and that of the process that searches for all
serve    `posttrain retriever serve` in a process of its own, asked at a steady rate, one query a request; a request that
         leaves late counts from when it should have left. Server and asker share the machine's cores
recall   the share of questions one of whose gold passages is among the best k, with intervals over questions

The passages and questions are those of ../shared/data/retrieval, or of --data.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.core.intervals import share_interval
from posttrain.services.retrieval.bm25 import K1, B
from posttrain.services.retrieval.passage_index import build, open_index

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "retrieval"
KS = (1, 3, 5, 10, 20)


def questions(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / "questions.jsonl").read_text(encoding="utf-8").splitlines()]


def spread(values: Sequence[float], unit: float = 1.0) -> str:
    median, low, high = (unit * x for x in (statistics.median(values), min(values), max(values)))
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def measure_build(data: Path, folder: Path, runs: int) -> None:
    texts = [question["question"] for question in questions(data)[::300]][:64]
    built, asked = [], []
    for _ in range(runs):
        began = time.perf_counter()
        manifest = build(data / "passages.jsonl", folder, overwrite=True)
        built.append(time.perf_counter() - began)
        index = open_index(folder)
        for _ in range(5):
            began = time.perf_counter()
            index.search(texts, 3)
            asked.append(time.perf_counter() - began)
    size = sum(size for size, _ in manifest.files.values()) / 2**20
    print(f"build: {manifest.count:,} passages, {size:.1f} MiB, in s: {spread(built)}, {runs} runs")
    print(f"64 queries, the best 3 of each, in s: {spread(asked)}, {len(asked)} times")


OWN = """
import json, sys
def own():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous")) / 1024
import posttrain.envs.play.env_worker
before = own()
from posttrain.services.retrieval.passage_index import open_index
index = open_index(sys.argv[1])
for line in sys.stdin:
    index.search([line], 3)
print(before, own() - before)
"""


def measure_memory(data: Path, folder: Path, runs: int) -> None:
    asked = "\n".join(" ".join(question["question"].split()) for question in questions(data)[:: max(1, 19_000 // 1000)])
    found = []
    for _ in range(runs):
        words = [sys.executable, "-c", OWN, str(folder)]
        ran = subprocess.run(words, input=asked, capture_output=True, text=True, check=True)
        found.append([float(number) for number in ran.stdout.split()])
    plain, added = zip(*found, strict=True)
    print(f"a worker of environments, MiB of its own: {spread(plain)}; an index open in it adds {spread(added)}")
    print("with --retriever no worker opens one: one process, of a worker's size and that, searches for all")


class Asker:
    """Sends one request at a time over a connection that stays open."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader | None = None

    async def ask(self, query: str) -> None:
        if self.reader is None or self.reader.at_eof():  # the server ends connections that are idle
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps({"queries": [query], "topk": 3, "return_scores": True}).encode()
        self.writer.write(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert head.startswith(b"HTTP/1.1 200") and length is not None, head
        await self.reader.readexactly(int(length[1]))


async def at_a_rate(port: int, texts: Sequence[str], rate: float, seconds: float) -> list[float]:
    """Seconds from when each request should have left to its whole answer."""
    idle: list[Asker] = []
    taken: list[float] = []

    async def one(number: int, due: float) -> None:
        asker = idle.pop() if idle else Asker(port)
        await asker.ask(texts[number % len(texts)])
        taken.append(time.perf_counter() - due)
        idle.append(asker)

    began, tasks = time.perf_counter() + 0.1, []
    for number in range(int(rate * seconds)):
        due = began + number / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(number, due)))
    await asyncio.gather(*tasks)
    return taken


def measure_server(data: Path, folder: Path, runs: int, rate: float, seconds: float) -> None:
    texts = [question["question"] for question in questions(data)[::7]]
    words = [sys.executable, "-m", "posttrain", "retriever", "serve", str(folder), "--port", "0"]
    began = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        server.stdout.readline()
        found = re.search(r":(\d+)/retrieve", server.stdout.readline())
        assert found is not None
        print(f"the server answers {time.perf_counter() - began:.2f} s after its start")
        try:
            every = defaultdict(list)
            for _ in range(runs):
                taken = sorted(1000 * s for s in asyncio.run(at_a_rate(int(found[1]), texts, rate, seconds)))
                for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
                    every[name].append(taken[min(len(taken) - 1, int(share * len(taken)))])
            print(f"{rate:g} requests/s of one query for {seconds:g} s, {runs} runs, in ms:")
            print("  " + ", ".join(f"{name} {spread(values)}" for name, values in every.items()))
        finally:
            server.terminate()


def measure_recall(data: Path, folder: Path) -> None:
    print(f"| questions | n | {' | '.join(f'recall@{k}' for k in KS)} |\n|---|---|{'---|' * len(KS)}")
    for k1, b in ((K1, B), (1.5, 0.75)):
        other = folder.with_name(f"{folder.name}-{k1:g}-{b:g}")
        build(data / "passages.jsonl", other, k1=k1, b=b, overwrite=True)
        index = open_index(other)
        of: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for question in questions(data):
            if question["gold_ids"]:
                of[question["dataset"]].append(question)
        for name, own in of.items():
            found = index.search([question["question"] for question in own], max(KS))
            ranks = [
                next((place for place, hit in enumerate(hit_list) if hit.passage.id in question["gold_ids"]), max(KS))
                for hit_list, question in zip(found, own, strict=True)
            ]
            of_ks = [[float(rank < k) for rank in ranks] for k in KS]
            cells = [f"{statistics.fmean(hits):.3f} {share_interval(hits, of='questions').text()}" for hits in of_ks]
            shown = " | ".join(cells)
            print(f"| {name}, k1 {k1:g}, b {b:g} | {len(own):,} | {shown} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["build", "memory", "serve", "recall"])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "index"
        build(given.data / "passages.jsonl", folder)
        if "build" in given.what:
            measure_build(given.data, folder, given.runs)
        if "memory" in given.what:
            measure_memory(given.data, folder, given.runs)
        if "serve" in given.what:
            measure_server(given.data, folder, given.runs, given.rate, given.seconds)
        if "recall" in given.what:
            measure_recall(given.data, folder)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"{time.strftime('%Y-%m-%d')}, commit {commit}, {platform.machine()}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
