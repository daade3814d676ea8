"""The optional libraries: how an extra of the package is installed, and which commands run without it.

Messages to a user name only commands that run here, or how to install them. That is decided here alone.
"""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from importlib.util import find_spec

COMPILERS = ("gcc", "cc", "clang")
"""C compilers, in the order in which they are looked for."""

NEEDED = {"view": ("duckdb",), "query": ("duckdb",)}
"""Verb -> libraries that it needs and that some installations lack. The extra `view` includes all of them."""


def install(extra: str) -> str:
    """Return the command that installs an extra's packages, quoted so that any shell accepts it. It needs neither the
    clone nor a release of this package.
    """
    try:
        required = metadata.requires("posttrain") or []
    except metadata.PackageNotFoundError:  # run from a clone that is not installed
        required = []
    pairs = [line.split("; extra == ") for line in required if "; extra == " in line]
    packages = [_upwards(package) for package, of in pairs if of.strip('"') == extra.replace("_", "-")]
    return f"pip install {' '.join(packages) or shlex.quote(f'.[{extra}]')}"


def _upwards(package: str) -> str:
    """Return a requirement, quoted, with its lower bound first."""
    name = re.match(r"[\w.-]+", package)
    assert name is not None
    bounds = package[name.end() :].split(",")
    return shlex.quote(name[0] + ",".join(sorted(bounds, reverse=True)))


def installed(library: str) -> bool:
    """Return whether a library is installed, without importing it."""
    try:
        found = find_spec(library)
    except (ImportError, ValueError):  # a partly removed library
        return False
    return found is not None


def lacking(verb: str) -> list[str]:
    """Return the libraries that a verb needs and that are not installed."""
    return [library for library in NEEDED.get(verb, ()) if not installed(library)]


def runnable(command: str) -> str:
    """Return a posttrain command for a hint; with "(after ...)" and the installation, where libraries that it needs are
    missing.
    """
    _, verb, *_ = command.split()
    return f"{command} (after {install('view')})" if lacking(verb) else command


EXTRAS = {
    "datasets": ("datasets", "rows of the Hugging Face hub"),
    "transformers": ("transformers", "models that are not native, and their tokenizers"),
    "view": ("duckdb", "pages and SQL queries of runs"),
    "gguf": ("gguf", "GGUF files"),
    "qlora": ("bitsandbytes", "NF4, adamw8bit and lion of bitsandbytes"),
    "float8": ("torchao", "--float8"),
    "faiss": ("faiss", "approximate indices of vectors"),
    "ray": ("ray", "--launch ray"),
    "mcp": ("mcp", "tools of MCP servers"),
    "lm-eval": ("lm_eval", "eval --harness lm-eval:TASK"),
    "openenv": ("websockets", "servers of OpenEnv"),
    "reasoning_gym": ("reasoning_gym", "--env reasoning-gym"),
    "gymnasium": ("gymnasium", "--env gymnasium"),
    "textarena": ("textarena", "--env textarena"),
    "wandb": ("wandb", "--track wandb"),
    "trackio": ("trackio", "--track trackio"),
    "mlflow": ("mlflow", "--track mlflow"),
    "swanlab": ("swanlab", "--track swanlab"),
    "e2b": ("e2b", "--env harbor in sandboxes of E2B"),
    "daytona": ("daytona", "--env harbor in sandboxes of Daytona"),
    "modal": ("modal", "--env harbor in sandboxes of Modal"),
}
"""Extra -> the library whose presence shows that it is installed, and its purpose. Without developers' extras."""
