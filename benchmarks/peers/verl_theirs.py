"""Runs each command of `verl_runs.py` by verl itself, on the rows, the order and the replies of our run.

    .../env-verl/bin/python benchmarks/peers/verl_theirs.py FOLDER [NAME ...]

`verl_ours.py` comes first. `python -m verl.trainer.main_ppo` runs with Ray, its agent loops, reward workers, transfer queue,
trainer and FSDP worker; `verl_on_cpu.py` says what is put in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from verl_runs import ON_CPU, VERL_RUNS, VerlRun, command

HERE = Path(__file__).resolve().parent


def run(own: VerlRun, place: Path) -> dict[str, Any]:
    ours = json.loads((place / "ours.json").read_text())
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ours["rows"]), encoding="utf-8")
    (place / "replies.json").write_text(json.dumps(ours["replies"]))
    written = place / "updates.jsonl"
    written.unlink(missing_ok=True)
    environment = {
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "VERL_PLATFORM": "processor",
        "GIVEN_REPLIES": str(place / "replies.json"),
        "WRITTEN_UPDATES": str(written),
        "PYTHONPATH": str(HERE),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(place.parent / "cache"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "HYDRA_FULL_ERROR": "1",
    }
    words = [*command(own.options(place)), *command(ON_CPU), f"hydra.run.dir={place / 'hydra'}"]
    with (place / "theirs.log").open("w") as log:
        code = subprocess.run(
            [sys.executable, "-m", "verl.trainer.main_ppo", *words],
            cwd=place, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT,
        ).returncode  # fmt: skip
    assert code == 0, f"{own.name}: verl returned {code}: see {place / 'theirs.log'}"
    lines = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]
    return {"updates": [line["update"] for line in lines], **lines[0]["facts"]}


def all_of(folder: Path, names: Sequence[str]) -> None:
    for own in VERL_RUNS:
        place = folder / own.folder
        if (names and own.name not in names) or not (place / "ours.json").exists():
            continue
        found = run(own, place)
        found["versions"] = {name: version(name) for name in ("verl", "ray", "transformers", "torch", "tensordict")}
        (place / "theirs.json").write_text(json.dumps(found))
        print(f"{own.name}: {len(found['updates'])} updates", flush=True)


if __name__ == "__main__":
    all_of(Path(sys.argv[1]).resolve(), sys.argv[2:])
