"""Memory and time of an update by one process, by several that hold the whole model each, and by as many that share it.

    python benchmarks/speed/sharding.py [--processes 2] [--rounds 3] [--precision float32]

A decoder of 28 M parameters, eight micro-batches of 256 tokens. Memory in MiB, less what the process had once all modules
were imported: with the model loaded, between updates, and at most. Seconds: the median of the updates behind the first.
The worst of the processes; median and range of the rounds, which alternate between the ways.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

UPDATES = 6
SIZES = {"vocab": 4096, "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 8, "head_size": 64, "intermediate": 1408}


def resident() -> float:
    """MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def work(way: str, folder: Path, precision: str) -> None:
    """One process of one way; prints its figures."""
    import torch

    from posttrain.config.training import SFT
    from posttrain.core.protocols import Alone, World
    from posttrain.core.transcripts import Transcript
    from posttrain.learners import fsdp, process_group  # noqa: F401  loaded before memory is measured
    from posttrain.learners.local_learner import Optimization
    from posttrain.training.open_learner import held_model, new_learner
    from posttrain.training.sources.sft_source import Demonstrations, LikelihoodObjective

    torch.set_num_threads(1)
    config = SFT(shard=way == "sharded", precision=precision)  # type: ignore[arg-type]
    own: World = process_group.joined("cpu", 600.0) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else Alone()
    generator, rows = torch.Generator().manual_seed(0), []
    for _ in range(8):
        transcript = Transcript()
        transcript.observe([1])
        transcript.imitate(torch.randint(3, SIZES["vocab"], (255,), generator=generator).tolist())
        rows.append([transcript])
    batches = Demonstrations([], 1, 256, 0, torch.device("cpu")).batches(rows)  # type: ignore[arg-type]
    before = resident()
    model = held_model(config, folder, torch.device("cpu"), own)
    learner = new_learner(config, model, Optimization(lr=1e-5), own)
    loaded = resident() - before
    seconds = []
    for _ in range(UPDATES):
        own.gather(None)
        start = time.perf_counter()
        learner.update(batches, LikelihoodObjective())
        seconds.append(time.perf_counter() - start)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    print(
        json.dumps(
            {"loaded": loaded, "idle": resident() - before, "most": most, "seconds": statistics.median(seconds[1:])}
        )
    )


def measured(way: str, folder: Path, processes: int, precision: str) -> dict[str, float]:
    """The worst of all processes of a way."""
    count = 1 if way == "one" else processes
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(count):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{k: str(v) for k, v in own.items()}, "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, "--way", way, "--folder", str(folder), "--precision", precision]
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    found = [json.loads(child.communicate()[0]) for child in children]
    return {name: max(each[name] for each in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        work(given.way, given.folder, given.precision)
        return
    from posttrain.models.native.decoder import new_decoder
    from posttrain.models.native.decoder_shape import DecoderConfig

    with tempfile.TemporaryDirectory() as name:
        model = new_decoder(DecoderConfig(context=512, tied=True, **SIZES), 0)
        model.eos_ids = (1,)
        model.save(Path(name))
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {given.precision}")
        found: dict[str, list[dict[str, float]]] = {"one": [], "whole": [], "sharded": []}
        for _ in range(given.rounds):
            for way, rounds in found.items():
                rounds.append(measured(way, Path(name), given.processes, given.precision))
    for way, rounds in found.items():
        columns = {key: [r[key] for r in rounds] for key in rounds[0]}
        told = [f"{k} {statistics.median(c):.2f} [{min(c):.2f}, {max(c):.2f}]" for k, c in columns.items()]
        print(f"{way:<8} {', '.join(told)}")


if __name__ == "__main__":
    main()
