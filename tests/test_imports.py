"""Who imports whom: a module imports its own rank or a lower one, heavy libraries have one home each."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "posttrain"
RANKS = (
    {"types", "deferred", "messages"},
    {"values", "pictures"},
    {"names"},
    {"user_code", "user_folders", "seeds", "part", "batch", "sink", "children", "connections", "endpoint", "beside"},
    {"protocols"},
    {"sandbox"},
    {"kernels", "verify", "data"},
    {"envs", "models", "serving"},
    {"engines", "learners", "retrieval"},
    {"algorithms"},
    {"config", "options", "typed"},
    {"runs", "sources", "record"},
    {"services"},
    {"training"},
    {"audit", "planning", "reproduce", "view"},
    {"cli"},
    {"__main__"},
)
"""Modules and folders of the package, the lowest first. The front door, `__init__`, reaches up to `run` when called."""

HOMES = {
    "transformers": ("models/",),
    "bitsandbytes": ("models/adapters/quantized.py",),
    "huggingface_hub": ("models/",),
    "tokenizers": ("models/",),
    "jinja2": ("models/",),
    "PIL": ("pictures.py",),
    "safetensors": ("models/",),
    "datasets": ("data/",),
    "pyarrow": ("data/", "record/", "view/"),
    "duckdb": ("record/", "view/"),
    "starlette": ("apps/view/web_server.py",),
    "uvicorn": ("apps/view/view_command.py",),
    "math_verify": ("verify/",),
    "sympy": ("verify/",),
    "matplotlib": ("runs/curves.py", "experiments/figure.py"),
    "tensorboardX": ("runs/events.py",),
    "rich": ("runs/terminal/printing.py", "runs/terminal/live_region.py", "cli/rank_command.py"),
    "cyclopts": ("cli/",),
    "vllm": ("engines/vllm/vllm_worker.py", "engines/vllm/nccl_transfer.py"),
    "ray": ("engines/pool/ray_engines.py",),
    "rapidfuzz": ("training/sources/diversity.py", "verify/", "apps/audit/shared_phrases.py"),
    "httpcore2": ("connections.py", "endpoint.py"),
    "aiohttp": ("serving/", "services/retrieval/search_server.py"),
    "verifiers": ("envs/bridges/verifiers_side.py",),
    "bm25s": ("services/retrieval/bm25.py",),
    "faiss": ("services/retrieval/dense.py",),
    "jsonschema": ("verify/", "services/", "envs/tools.py"),
    "docstring_parser": ("envs/tool_schemas.py",),
    "referencing": ("verify/",),
    "reasoning_gym": ("envs/bridges/reasoning.py",),
    "gymnasium": ("envs/bridges/gym.py",),
    "textarena": ("envs/bridges/arena.py",),
    "websockets": ("envs/bridges/openenv.py",),
    "mcp": ("envs/bridges/mcp_tools.py",),
    "mcp_types": ("envs/bridges/mcp_tools.py",),
    "py3langid": ("verify/",),
    "torch.distributed": ("learners/process_group.py", "learners/fsdp.py"),
}
"""Where each heavy library may be imported."""

LIGHT = ("audit/", "planning/", "envs/", "verify/", "sandbox/", "runs/", "training/intervals.py",
         "training/sources/diversity.py", "algorithms/", "config/", "types.py", "batch.py", "protocols.py", "part.py",
         "record/", "seeds.py", "messages.py", "user_code.py", "values.py", "names.py", "deferred.py", "typed.py",
         "cli/main.py", "cli/commands.py", "cli/inspect_commands.py", "cli/write_types.py",
         "data/", "training/sources/packing.py", "retrieval/", "services/retriever.py")  # fmt: skip
"""What imports no torch when it is imported itself, so that --help and check start at once."""

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


def imports(file: Path) -> list[tuple[str, bool]]:
    """(full name, whether it is imported with the module): not those for type checking, and False within functions."""
    found: list[tuple[str, bool]] = []

    def walk(node: ast.AST, at_once: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: imports are absolute"
            found.extend((f"{node.module}.{alias.name}", at_once) for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            walk(child, at_once and not inside)

    walk(ast.parse(file.read_text(encoding="utf-8")), True)
    return found


def rank_of(part: str) -> int:
    ranks = [number for number, parts in enumerate(RANKS) if part in parts]
    assert len(ranks) == 1, f"posttrain/{part} has no rank: give it one here and in the architecture document"
    return ranks[0]


def part_of(name: str) -> str:
    """The module or folder of the package that a file, or a full name, belongs to."""
    return Path(name).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_module_imports_its_own_rank_or_lower(file: Path) -> None:
    if file == PACKAGE / "__init__.py":
        at_once = {name.split(".")[1] for name, now in imports(file) if now and name.startswith("posttrain.")}
        assert at_once == {"types"}, "the front door loads what it needs when it is called"
        return
    own = part_of(name_of(file))
    for name, _ in imports(file):
        parts = name.split(".")
        if parts[0] != "posttrain" or parts[1:] == ["__version__"]:
            continue
        front_door = (PACKAGE / f"{parts[1]}.py").exists() or (PACKAGE / parts[1]).is_dir()
        assert front_door, f"{file}: inside the package, import {name} from where it is defined"
        assert rank_of(parts[1]) <= rank_of(own), f"{own} may not import {parts[1]}: it stands higher"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_heavy_libraries_have_one_home_each(file: Path) -> None:
    for name, _ in imports(file):
        for library, homes in HOMES.items():
            if f"{name}.".startswith(f"{library}."):
                assert name_of(file).startswith(homes), f"{library} belongs into {', '.join(homes)}"


def test_light_modules_name_no_torch_at_their_top() -> None:
    light = [file for file in FILES if name_of(file).startswith(LIGHT)]
    assert len(light) > len(LIGHT)
    for file in light:
        heavy = [name for name, at_once in imports(file) if at_once and name.split(".")[0] == "torch"]
        assert not heavy, f"{file}: {heavy}"


def test_light_modules_load_no_torch_by_any_way() -> None:
    light = [name_of(file) for file in FILES if name_of(file).startswith(LIGHT)]
    modules = ["posttrain." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in light]
    code = f"import sys, {', '.join(modules)}; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'tokenizers')])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"
