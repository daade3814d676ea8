"""The weight sync of several training processes of a machine with their engines: one writer for all, or one in each.

python benchmarks/speed/weight_writers.py --model ../shared/data/models/gsm8k-5m --processes 2
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from posttrain.core.protocols import Alone
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.pool.replicas import open_pool
from posttrain.learners import process_group
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.tokenizer.tokenizer import Tokenizer


def measured(rank: int, port: int, folder: str, processes: int, rounds: int) -> None:
    """One training process: its syncs, the two ways in turns."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()})
    torch.set_num_threads(1)
    world = process_group.joined("cpu", 600.0)
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    shared = EngineOptions(8, replicas=processes).of(world)
    with (
        closing(open_pool(model, tokenizer, shared)) as one,
        closing(open_pool(model, tokenizer, replace(shared, world=Alone()))) as each,
    ):
        pools = {"one writer": one, "a writer in each process": each}
        seconds: dict[str, list[float]] = {name: [] for name in pools}
        for version in range(rounds + 1):
            for name, pool in pools.items():
                world.gather(None)
                began = time.perf_counter()
                pool.load(model, version)
                took = max(world.gather(time.perf_counter() - began))
                seconds[name] += [took] * (version > 0)
        for name, pool in pools.items():
            transport: Any = pool.members[0].place.transport
            memory = getattr(transport, "memory", None) if name == "one writer" else transport
            written = sum(world.gather(os.fstat(memory.descriptor).st_blocks * 512))
            if rank == 0:
                times = seconds[name]
                print(json.dumps({"way": name, "bytes": written, "seconds": round(median(times), 4),
                                  "from": round(min(times), 4), "to": round(max(times), 4)}), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start_processes(
        measured, (port, str(given.model), given.processes, given.rounds), given.processes, start_method="spawn"
    )  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
