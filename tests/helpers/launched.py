"""Kills processes of real runs under torchrun, on one machine and on two that are one, and compares with a run left alone.

    python tests/helpers/launched.py [--folder runs/launched]

Each run has two processes and 12 steps. After the second checkpoint the second process is killed; torchrun starts both
again, and they go on from the newest checkpoint. The metrics of all three runs have to be the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from places import ROOT

STEPS = "--steps 12 --prompts 4 --group 4 --max-tokens 4 --save-every 1 --env-workers 1 --threads 1 --lr 1e-3 --quiet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", default="runs/launched")
    folder = Path(parser.parse_args().folder).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my.py").write_text(
        "import time\ndef reward(task, reply):\n    time.sleep(0.02)\n    return len(set(reply)) / 4\n"
    )
    small = (
        "--tokenizer characters --hidden 16 --layers 1 --heads 2 --context 32 --steps 2 --rows 4 --threads 1 --quiet"
    )
    command = [sys.executable, "-m", "posttrain", "sft", "--tasks", "sums.jsonl", "--out", "start", *small.split()]
    subprocess.run(command, cwd=folder, env=environment(), check=True, stdout=subprocess.DEVNULL)
    one = ["--nproc-per-node", "2"]
    calm = metrics(folder, "calm", [one], killed=False)
    print("calm               exit 0, 12 steps")
    endpoint = f"127.0.0.1:{free_port()}"
    meeting = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-id",
        "launched",
        "--local-addr",
        "127.0.0.1",
    ]
    two = [["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", *meeting]] * 2
    for name, agents in (("one machine", [[*one, "--max-restarts", "1"]]), ("two machines", two)):
        began = time.monotonic()
        found = metrics(folder, name, agents, killed=True)
        same = "the same metrics as the calm run" if found == calm else "OTHER METRICS than the calm run"
        print(f"{name:<18} exit 0, one process killed, {same}, {time.monotonic() - began:.0f} s")
        assert found == calm


def metrics(folder: Path, out: str, agents: Sequence[Sequence[str]], killed: bool) -> bytes:
    """metrics.jsonl of a run under these agents of torchrun."""
    words = ["--tasks", "sums.jsonl", "--env", "my.py:reward", "--model", "start", "--out", out, *STEPS.split()]
    running = []
    for number, options in enumerate(agents):
        with (folder / f"{out} {number}.log").open("w") as log:
            command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "posttrain", "rl", *words]
            running.append(subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=log))
    if killed:
        while not (folder / out / "checkpoints" / "step-000002").exists():
            assert all(agent.poll() is None for agent in running), f"see {folder / out}*.log"
            time.sleep(0.01)
        os.kill(second_of([agent.pid for agent in running]), signal.SIGKILL)
    codes = [agent.wait(300) for agent in running]
    assert codes == [0] * len(codes), f"exit codes {codes}: see {folder / out}*.log"
    return (folder / out / "metrics.jsonl").read_bytes()


def second_of(agents: Sequence[int]) -> int:
    """The process with rank 1 that one of these agents has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            known = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent in agents and b"RANK=1" in known:
            return int(path.name)
    raise AssertionError("it has not begun")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
