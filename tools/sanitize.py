"""Runs the tests of the compiled code under AddressSanitizer and UndefinedBehaviorSanitizer.

    make sanitize                                              # appends what it found to docs/results/sanitize.md
    python tools/sanitize.py [--into FILE] [pytest's options]

All tensors lie in memory that the sanitizer watches, since its runtime is loaded before Python and hands out theirs. Leaks
are not looked for: Python itself keeps memory to the end. First a file with both kinds of mistake is compiled and run in
the same way, so that a set-up that sees nothing cannot pass.

As a plugin of pytest (`-p sanitize`) this file has the C code built with sanitizers.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", *SANITIZE)
TESTS = ("models/test_compiled.py", "models/test_tree_attention.py", "models/test_kernels.py", "engines/test_engine.py")
MISTAKES = """
#include <stdlib.h>
int main(int count, char **arguments) {
    (void)arguments;
    volatile int largest = 0x7FFFFFFF;
    if (count == 2) return largest + count;
    char *x = malloc((size_t)count);
    x[count] = 1;
    return x[0];
}
"""


def pytest_configure() -> None:
    from posttrain.models.native.kernels import binder, build

    build.FLAGS = (*build.FLAGS, *FLAGS)
    build.LINK_FLAGS = (*build.LINK_FLAGS, *SANITIZE)
    assert binder.attention() and binder.layer() and binder.decode(), build.missing()


def main() -> int:
    parser = argparse.ArgumentParser(description="the compiled code's tests under sanitizers")
    parser.add_argument("--into", type=Path, help="a document to append to")
    options, rest = parser.parse_known_args()
    compiler = shutil.which("gcc")
    runtime = [] if compiler is None else [_library(compiler, name) for name in ("libasan.so", "libstdc++.so")]
    if compiler is None or not all(runtime):
        print("skipped: gcc with its sanitizers was not found")
        return 0
    with tempfile.TemporaryDirectory() as place:
        environment = {
            **os.environ,
            "LD_PRELOAD": ":".join(runtime),
            "ASAN_OPTIONS": f"detect_leaks=0:log_path={place}/found",  # pytest holds back what is printed before a crash
            "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={place}/found",
            "XDG_CACHE_HOME": place,
            "PYTHONPATH": str(ROOT),
            "OMP_WAIT_POLICY": "passive",
        }
        _see_mistakes(compiler, Path(place))
        command = (sys.executable, "-m", "pytest", "-p", "sanitize", "-p", "no:cacheprovider", "--timeout=1200", *rest)
        begin = time.time()
        done = subprocess.run(
            (*command, *(str(ROOT / "tests" / name) for name in TESTS)),
            env=environment,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said = done.stdout + "".join(file.read_text() for file in sorted(Path(place).glob("found.*")))
    print(said)
    if options.into is not None:
        _append(options.into, compiler, done.returncode == 0, said, time.time() - begin)
    return done.returncode


def _library(compiler: str, name: str) -> str:
    """The path of a runtime library of the compiler; "" if it is not installed."""
    found = subprocess.run((compiler, f"-print-file-name={name}"), capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else ""


def _see_mistakes(compiler: str, place: Path) -> None:
    """Exit unless a write behind an array and a signed overflow are both seen."""
    source, program = place / "mistakes.c", place / "mistakes"
    source.write_text(MISTAKES)
    subprocess.run((compiler, *FLAGS, str(source), "-o", str(program)), check=True)
    for arguments, says in ((("overflow",), "signed integer overflow"), ((), "heap-buffer-overflow")):
        done = subprocess.run((str(program), *arguments), capture_output=True, text=True)
        if done.returncode == 0 or says not in done.stderr:
            sys.exit(f"the sanitizers do not see a {says} here: nothing would be found\n{done.stderr}")


def _append(document: Path, compiler: str, clean: bool, output: str, seconds: float) -> None:
    def said(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()

    changed = " with changes" if said("git", "status", "--porcelain", "--untracked-files=no") else ""
    cpu = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpu.read_text()) if cpu.exists() else None
    summary = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", output)
    lines = [
        f"## {time.strftime('%Y-%m-%d', time.gmtime())}",
        "",
        f"- Date: {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, took {seconds / 60:.1f} minutes",
        f"- Machine: {model[1] if model else platform.processor()}, {os.cpu_count()} cores",
        f"- Compiler: {said(compiler, '--version').splitlines()[0]}, {' '.join(FLAGS)}",
        f"- Commit: {said('git', 'rev-parse', '--short=12', 'HEAD')}{changed}",
        f"- Command: python tools/sanitize.py {' '.join(sys.argv[1:])}",
        f"- Ran: {', '.join(TESTS)}; {', '.join(summary)}",
        f"- Found: {'nothing' if clean else 'see below'}",
        "",
    ]
    if not clean:
        lines += ["```", *output.splitlines()[-60:], "```", ""]
    document.write_text((document.read_text() if document.exists() else HEAD) + "\n" + "\n".join(lines))


HEAD = """# The compiled code under sanitizers

What `make sanitize` found, the newest run last: the tests of the three C files with AddressSanitizer (writes and reads
outside what was allocated, tensors included) and UndefinedBehaviorSanitizer (signed overflow, shifts, misaligned access).
Each run first proves that both see a planted mistake. Products in bfloat16 run with matrix tiles in plain C
(`tests/emulated`), or with the processor's where it has them.
"""

if __name__ == "__main__":
    sys.exit(main())
