"""Tries malformed inputs of every kind, by the thousand, and says which of them end otherwise than they should.

    python tools/fuzz.py                       10,000 inputs, some 15 minutes on two cores
    python tools/fuzz.py --kinds config rows   of these kinds only
    python tools/fuzz.py --case config:17      one of them, with all that it wrote and said

Exit code 1 if any failed. `--out` writes the table into a document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from fuzzing.judge import VERDICTS
from fuzzing.kinds import KINDS, counts
from fuzzing.processes import Result, as_dict, run_all, run_case

TOOLS = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="how many inputs")
    parser.add_argument("--first", type=int, default=0, help="the first seed of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--case", help="one case: kind:seed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--accepted", type=int, default=0, help="show so many of the inputs that were accepted")
    parser.add_argument("--out", type=Path, help="a document to write the table into")
    parser.add_argument("--log", type=Path, help="every result, a line of JSON each")
    chosen = parser.parse_args(arguments)
    root = TOOLS.parent
    own = [TOOLS, root / "tests" / "helpers", root / "tests", root]  # the package of this very checkout, and no other
    sys.path[:0] = list(map(str, own))
    os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path[:4]), "HF_HUB_OFFLINE": "1"}
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    scratch = Path(tempfile.mkdtemp(prefix="posttrain-fuzz-", dir=fast))
    try:
        samples = scratch / "samples"
        code = "import sys; from pathlib import Path; from fuzzing.samples import make; make(Path(sys.argv[1]))"
        samples.mkdir()
        subprocess.run([sys.executable, "-c", code, str(samples)], check=True)
        if chosen.case:
            return _show(chosen.case, samples, scratch)
        return _run(chosen, samples, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _show(name: str, samples: Path, scratch: Path) -> int:
    """Run one case here, without a limit, and print all there is to see. Its folder stays."""
    kind, _, seed = name.partition(":")
    place = Path(tempfile.mkdtemp(prefix=f"posttrain-{kind}-{seed}-"))
    result = run_case(kind, int(seed), samples, place)
    print(f"{result.what}\ncd {place}; python -m posttrain {' '.join(map(repr, result.words))}")
    print(f"exit code {result.code} after {result.seconds:.2f} s\n{(place / 'out').read_text(errors='replace')}")
    print(f"{result.verdict or 'as it should be'}: {result.details}")
    return 0 if result.verdict is None else 1


def _run(chosen: argparse.Namespace, samples: Path, scratch: Path) -> int:
    began = time.monotonic()
    number = counts(chosen.kinds, chosen.count)
    cases = [(kind, chosen.first + seed) for kind in chosen.kinds for seed in range(number[kind])]
    cases.sort(key=lambda case: (case[1] / number[case[0]], case[0]))  # kinds side by side: dear ones beside cheap ones
    results = []
    log = chosen.log.open("w") if chosen.log else None
    for result in run_all(cases, chosen.workers, samples, scratch):
        results.append(result)
        if log:
            print(json.dumps(as_dict(result)), file=log, flush=True)
        if result.verdict:
            print(
                f"{result.verdict:<10} {result.kind}:{result.seed}  {result.what[:150]!r}\n    {_last(result.details)}",
                flush=True,
            )
    seconds = time.monotonic() - began
    lines = table(results)
    print("\n" + "\n".join(lines) + f"\n{len(results)} inputs in {seconds:.0f} s")
    for result in [r for r in results if r.code == 0][:: max(1, len(results) // max(1, chosen.accepted))][
        : chosen.accepted
    ]:
        print(f"accepted   {result.kind}:{result.seed}  {result.what[:200]!r}")
    if chosen.out:
        chosen.out.write_text("\n".join(document(lines, results, seconds, chosen)) + "\n")
    return 1 if any(result.verdict for result in results) else 0


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return (lines[-1] if lines else "")[:300]


def table(results: Sequence[Result]) -> list[str]:
    """A row for each kind, in Markdown."""
    lines = [f"| kind | inputs | refused | accepted | {' | '.join(VERDICTS)} |", "|---" * (4 + len(VERDICTS)) + "|"]
    for kind in [*KINDS, "all"]:
        own = [r for r in results if kind in (r.kind, "all")]
        if own:
            codes, wrong = Counter(r.code for r in own), Counter(r.verdict for r in own)
            failed = " | ".join(str(wrong[name]) for name in VERDICTS)
            lines.append(f"| {kind} | {len(own):,} | {codes[2]:,} | {codes[0] + codes[3]:,} | {failed} |")
    return lines


def document(lines: list[str], results: Sequence[Result], seconds: float, chosen: argparse.Namespace) -> list[str]:
    """The whole page: how it was run, the table, the failures with what makes each of them again."""
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    failed = [r for r in results if r.verdict]
    return [
        "# Malformed inputs",
        "",
        f"`make fuzz` ({len(results):,} inputs, seeds from {chosen.first}), {date.today()}, "
        f"commit {revision.stdout.strip()}, {seconds / 60:.0f} minutes with {chosen.workers} workers on "
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}.",
        "",
        "Every input must work, or be refused in one line with exit code 2 that names the place of the mistake. "
        f"The columns after `accepted` count the inputs that did neither: {VERDICTS_SAID}.",
        "",
        *lines,
        "",
        f"{len(failed)} of {len(results):,} failed. `python tools/fuzz.py --case KIND:SEED` makes any of them again.",
        *(f"- {r.kind}:{r.seed} ({r.verdict}): {_last(r.details)[:160]}" for r in failed),
    ]  # fmt: skip


VERDICTS_SAID = (
    "an exception that left the command (traceback), no end within 30 s (hang), a process that died (crash), an exit code "
    "that means something else, a broken input that was accepted, a sound one that was refused, more than one line, a "
    "message that does not name the file or the key, and runs that left numbers that are not finite (harm)"
)

if __name__ == "__main__":
    sys.exit(main())
