"""Proves and measures posttrain on one CUDA card, in 25 minutes, and writes what it found into one Markdown file.

    make gpu
    python3 benchmarks/gpu/gpu.py [--only PART ...] [--into docs/results/gpu.md] [--limit 25] [--long]

Needs no data and no network: models are random, with the shapes of Qwen2.5. Each part runs in a process of its own with a
time limit of its own, so that one that crashes loses nothing of the others. The document is written again after each part.
With --only, results of the other parts that are in --out already stay in it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for place in ("tools", "benchmarks/speed", "."):
    sys.path.insert(0, str(ROOT / place))
os.environ.update(
    HF_HUB_OFFLINE="1", PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
)

import report  # noqa: E402
from findings import CEILINGS, Findings, Setting, commit, read, said  # noqa: E402

MINUTES = 25.0
LEAST = 0.5  # share of its time limit without which a part is not begun
SLACK = 6  # a processor that tests share with others may take so many times as long


@dataclass(frozen=True)
class Part:
    """One part of the measurements, run in a process of its own."""

    seconds: int  # it is stopped after these
    function: str  # module:name
    what: str
    longer: int = 0  # more seconds with --long


PARTS = {
    "about": Part(30, "about:about", "Card, software, and the measured ceilings of the card"),
    "equality": Part(80, "equality:equality", "One update of each verb on the card compared with the CPU"),
    "verbs": Part(90, "verbs:verbs", "The runs of tools/golden.py on the card"),
    "options": Part(175, "options:options", "Runs with options that no card had run: offloading, bfloat16, float8 ..."),
    "cards": Part(110, "cards:cards", "Runs divided among the cards of this machine, if it has several", longer=400),
    "vllm": Part(155, "vllm_runs:vllm_runs", "Whole steps with --engine vllm, where it is installed"),
    "steps": Part(175, "steps:steps", "Whole steps at the shapes of Qwen2.5-0.5B and 1.5B"),
    "packed": Part(60, "packed:packed", "Windows, sinks, soft caps and linear attention: packed and in padded rows"),
    "lora7b": Part(215, "steps:lora7b", "GRPO of adapters at the shape of Qwen2.5-7B", longer=540),
    "sampling": Part(80, "sampling:sampling", "The embedded engine, and vLLM where it is installed"),
    "trl": Part(120, "trl_steps:trl", "Steps compared with TRL's, where it is installed"),
    "resume": Part(30, "resume:resume", "A run that is interrupted and resumed"),
    "profile": Part(50, "profiling:profiling", "Time by kind of operation and by kernel"),
    "tests": Part(130, "fast_tests:fast_tests", "The fast tests of the repository"),
}
"""Their limits fit into those of the command, so that each is begun however long the others take."""


def main() -> int:
    options = read_options()
    if options.list:
        print("\n".join(f"{name:10} {part.seconds:4} s  {part.what}" for name, part in PARTS.items()))
        return 0
    if options.part:
        return run_part(options)
    if options.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            print("gpu.py measures a CUDA card, and PyTorch finds none on this machine", file=sys.stderr)
            return 2
    begin = time.monotonic()
    if not options.only:
        shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True, exist_ok=True)
    options.place.mkdir(parents=True, exist_ok=True)
    (options.out / CEILINGS).unlink(missing_ok=True)  # another card, perhaps
    ended = []
    for name in options.only or PARTS:
        left = 60 * options.limit - (time.monotonic() - begin)
        result = supervised(name, options, left)
        report.append(options.out, result)
        report.write(options.into, options.out, tuple(PARTS), " ".join(["benchmarks/gpu/gpu.py", *sys.argv[1:]]))
        print(f"{name}: {report.WORDS[result['ended']]}, {result['seconds']:.0f} s", flush=True)
        ended.append(result["ended"])
    print(f"written: {options.into}")
    return int(any(end != "done" for end in ended))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help="these parts; see --list")
    parser.add_argument("--list", action="store_true", help="name the parts, and the seconds that each may take")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "results" / "gpu.md", help="the document")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="findings and logs")
    parser.add_argument("--place", type=Path, default=Path("/tmp/posttrain-gpu"), help="models (20 GB) and runs")
    parser.add_argument(
        "--limit", type=float, default=MINUTES, metavar="MINUTES", help="parts that do not fit are left out"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each kind")
    parser.add_argument(
        "--long",
        action="store_true",
        help="lora7b: all weights too, 9 minutes more; cards: weight sync with vLLM, up to 7 minutes more",
    )
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)  # cpu: does it run at all?
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--crash", choices=list(PARTS), help=argparse.SUPPRESS)  # a part to be killed, for the test
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # the process of one part
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in ("into", "out", "place"):
        setattr(options, name, getattr(options, name).absolute())
    return options


def supervised(name: str, options: argparse.Namespace, left: float) -> dict[str, object]:
    """Run a part in a process of its own and return its result. `left`: seconds until the whole command has to end."""
    part, file, log = PARTS[name], options.out / f"{name}.json", options.out / f"{name}.log"
    result = {
        "part": name,
        "what": part.what,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "seconds": 0.0,
    }
    most = part.seconds + (part.longer if options.long else 0)
    most *= SLACK if options.tiny else 1
    seconds = min(most, left)
    if seconds < LEAST * most:
        return {**result, "ended": "not run"}
    file.unlink(missing_ok=True)
    begin = time.monotonic()
    command = [sys.executable, __file__, *sys.argv[1:], "--part", name, "--until", str(begin + seconds)]
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        with_children(process.pid)
        process.wait()
    found = read(file)
    failures = list(found.get("failures", ()))
    ended = {0: "failed" if failures else "done", None: "timed out"}.get(code, "crashed")
    if ended == "timed out":
        failures.append(f"stopped after {seconds:.0f} s")
    if ended == "crashed":
        failures.append(f"exit code {code}: {' / '.join(log.read_text(errors='replace').splitlines()[-2:])[-400:]}")
    return {**result, **found, "failures": failures, "ended": ended, "seconds": time.monotonic() - begin}


def with_children(group: int) -> None:
    """End all processes of a part's group: those that a crash left behind hold the card's memory."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run_part(options: argparse.Namespace) -> int:
    """The process of one part. Its log is what it prints."""
    if options.crash == options.part:
        os.kill(os.getpid(), signal.SIGKILL)
    module, _, name = PARTS[options.part].function.partition(":")
    found = Findings(options.out / f"{options.part}.json")
    try:
        getattr(importlib.import_module(module), name)(setting_of(options), found)
    except Exception as error:  # a part that fails as a whole: its findings so far are kept
        traceback.print_exc()
        found.failures.append(said(error))
    found.write()
    return 0


def setting_of(options: argparse.Namespace) -> Setting:
    names = ("device", "tiny", "place", "out", "rounds", "long", "until")
    return Setting(**{name: getattr(options, name) for name in names})


if __name__ == "__main__":
    sys.exit(main())
