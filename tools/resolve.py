"""Does every extra resolve on every supported Python? uv answers from the index alone and installs nothing.

make resolve
python tools/resolve.py [--uv UV] [--python 3.12 ...] [EXTRA ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSIONS = [
    c.rpartition(" ")[2] for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python :: 3.")
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", default=list(PROJECT["optional-dependencies"]), help="default: all")
    parser.add_argument("--python", nargs="+", default=VERSIONS, help="default: those of the classifiers")
    parser.add_argument("--uv", default="uv", help="the command")
    options = parser.parse_args()
    failed = 0
    for version in options.python:
        for extra in options.extras:
            ran = resolved(options.uv, version, extra)
            pinned = sum("==" in line for line in ran.stdout.splitlines())
            print(
                f"{version} {extra}: {f'{pinned} packages' if not ran.returncode else ran.stderr.strip()}", flush=True
            )
            failed += ran.returncode != 0
    print(f"{len(options.python) * len(options.extras)} resolutions, {failed} failed")
    return int(failed > 0)


def resolved(uv: str, version: str, extra: str) -> subprocess.CompletedProcess[str]:
    """Resolve posttrain[extra] for Linux and this Python."""
    command = [uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--python-platform", "x86_64-manylinux_2_28",
               "--python-version", version, "--extra", extra, "pyproject.toml"]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
