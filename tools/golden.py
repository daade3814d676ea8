"""Fourteen short runs whose metrics, rollouts and weights must not change while the code is rearranged.

    python tools/golden.py                  compare this checkout with its last commit
    python tools/golden.py --base REF       compare it with another commit
    python tools/golden.py --only grpo ppo  a few of the runs

Floating-point results depend on the processor, so nothing is stored in the repository: the base commit is checked out
beside this checkout, and its own copy of this file makes the same runs on the same machine, once; runs/golden/<commit> keeps
them. Two runs are equal if every metric of every step, every column of every recorded rollout and all weights are equal bit
for bit. While names change, RENAMED maps the name of a metric or column at the base to its name here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RENAMED: dict[str, str] = {}
"""Names of metrics and columns at the base commit -> names in this checkout."""

SMALL = (
    "--tokenizer characters --hidden 32 --layers 2 --heads 4 --context 48 --rows 32 --epochs 2 --lr 5e-3 --held-out 0.2"
)
RL = "--steps 3 --prompts 4 --group 4 --lr 1e-3 --env-workers 1 --record full --eval-every 2"
SUMS = f"--tasks sums.jsonl --env my.py:reward --model runs/sft --held-out 0.2 --max-tokens 4 {RL}"
CALLS = "--tasks calls.jsonl --env calculator"
PASSES = "--tasks items.jsonl --model runs/sft --held-out 0.2 --rows 16 --epochs 1 --lr 1e-3 --record full"
RUNS: dict[str, tuple[str, str]] = {
    "sft": ("", f"sft --tasks sums.jsonl {SMALL}"),
    "sft-calls": ("", f"sft {CALLS} {SMALL}"),
    "grpo": ("sft", f"rl {SUMS} --algorithm grpo"),
    "dapo": ("sft", f"rl {SUMS} --algorithm dapo --epochs 2 --minibatches 2"),
    "ppo": ("sft", f"rl {SUMS} --algorithm ppo"),
    "sac": ("sft", f"rl {SUMS} --algorithm sac --critic-warmup 1"),
    "distill": ("sft", f"distill --teacher runs/sft {SUMS} --algorithm distill-reverse-kl --seed 1"),
    "dpo": ("sft", f"prefer {PASSES} --algorithm dpo"),
    "reward-model": ("sft", f"reward-model {PASSES} --algorithm bradley-terry"),
    "agent": ("sft-calls", f"rl {CALLS} --model runs/sft-calls --held-out 0.2 --max-tokens 12 {RL} --algorithm grpo"),
    "replicas": ("sft", f"rl {SUMS} --algorithm grpo --replicas 2"),
    "processes": ("sft", f"rl {SUMS} --algorithm grpo --processes 2"),
    "asynchronous": ("sft", f"rl {SUMS} --algorithm grpo --async-steps 1"),
    "lora": ("sft", f"rl {SUMS} --algorithm grpo --lora 4"),
}
"""Name -> the run whose checkpoint it starts from, and its command."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--base", default="HEAD", help="the commit to compare with")
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS), metavar="RUN")
    parser.add_argument("--make", metavar="FOLDER", help="only make the runs, in this folder")
    options = parser.parse_args()
    if options.make:
        make(Path(options.make), options.only)
        return
    base = base_runs(options.base, options.only)
    here = ROOT / "runs" / "golden" / "here"
    shutil.rmtree(here, ignore_errors=True)
    make(here, options.only)
    differences = [line for name in options.only for line in compared(base / "runs" / name, here / "runs" / name)]
    print("\n".join(differences) or f"{len(options.only)} runs equal those of {options.base}")
    sys.exit(1 if differences else 0)


def base_runs(reference: str, names: Sequence[str]) -> Path:
    """The folder with these runs of a commit, made by that commit's code unless they are there already."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", reference], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    folder = ROOT / "runs" / "golden" / commit
    if all((folder / "runs" / name / "metrics.jsonl").exists() for name in names):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    checkout = folder / "checkout"
    subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(checkout), commit], cwd=ROOT, check=True)
    try:
        command = [sys.executable, "tools/golden.py", "--make", str(folder), "--only", *names]
        subprocess.run(command, cwd=checkout, check=True)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(checkout)], cwd=ROOT, check=True)
    return folder


def make(folder: Path, names: Sequence[str]) -> None:
    """Plays the runs, and those that they start from, with the package beside this file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder)
    wanted = [name for name in RUNS if name in names or any(RUNS[other][0] == name for other in names)]
    for name in wanted:
        run(folder, f"{RUNS[name][1]} --out runs/{name} --threads 1 --quiet --overwrite")


def run(folder: Path, words: str) -> None:
    ran = played(folder, words)
    if ran.returncode != 0:
        sys.exit(f"{ran.stdout}{ran.stderr}\nposttrain {words}: exit code {ran.returncode}")


def played(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    """Run posttrain with these words in this folder, with the package beside this file."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "posttrain", *words.split()], cwd=folder, env=environment, capture_output=True, text=True
    )


def write_data(folder: Path) -> None:
    """Sums with written answers, the same sums as preference examples, and calculator episodes with written replies."""
    sums = [{"prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b)} for a in range(12) for b in range(12)]
    items = [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": str(int(row["answer"]) + 1 + place % 3)}
        for place, row in enumerate(sums)
    ]
    calls = [
        {"prompt": f"{a}*{b}? ", "answer": str(a * b), "replies": [f"<calc>{a}*{b}</calc>", str(a * b)]}
        for a in range(2, 12)
        for b in range(2, 12)
    ]
    for name, rows in (("sums", sums), ("items", items), ("calls", calls)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "my.py").write_text(
        "SUCCESS = 1.0\n\n\ndef reward(task, reply):\n"
        "    right, close = reply.strip() == task['answer'], reply.strip()[:1] == task['answer'][:1]\n"
        "    return 1.0 if right else 0.25 * close\n",
        encoding="utf-8",
    )


def compared(base: Path, here: Path) -> Iterator[str]:
    """A line for each difference between two runs; nothing if they are equal."""
    for table, rows in tables(base).items():
        found = tables(here).get(table)
        if found is None:
            yield f"{here.name}: {table} is missing"
            continue
        if len(found) != len(rows):
            yield f"{here.name}: {table} has {len(found)} rows, the base {len(rows)}"
            continue
        for place, (old, new) in enumerate(zip(rows, found, strict=True)):
            old = {RENAMED.get(name, name): value for name, value in old.items()}
            names = [name for name in sorted({*old, *new}) if repr(old.get(name)) != repr(new.get(name))]
            if names:
                shown = ", ".join(f"{name} {old.get(name)!r:.60} -> {new.get(name)!r:.60}" for name in names[:3])
                yield f"{here.name}: {table} row {place}: {shown}"
                break


def tables(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The metrics of a run, its recorded rollouts and evaluations by file, and the hashes of its weights: rows of values."""
    import pyarrow.parquet

    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = {"metrics": [json.loads(line) for line in lines]}
    for file in sorted([*(run / "rollouts").glob("*.parquet"), *(run / "evals").glob("*.parquet")]):
        found[str(file.relative_to(run))] = pyarrow.parquet.read_table(file).to_pylist()
    weights = sorted((run / "checkpoints").rglob("*.safetensors"))
    found["checkpoints"] = [{str(file.relative_to(run)): sha256(file.read_bytes()).hexdigest()} for file in weights]
    return found


if __name__ == "__main__":
    main()
