"""Imports: a room imports its own floor or a lower one, without circles; a name is used once, and exists; heavy libraries
have one home; no test imports a test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from places import ROOT, TESTS

PACKAGE = ROOT / "posttrain"
FLOORS = (
    {"core"},
    {"system"},
    {"sandbox"},
    {"data", "verify"},
    {"models"},
    {"engines", "learners"},
    {"envs"},
    {"algorithms"},
    {"config"},
    {"runs"},
    {"training", "services"},
    {"apps"},
    {"cli"},
    {"__main__"},
)
"""The rooms of the package, the lowest first. The front door, `__init__`, reaches up to the verbs when called."""

HOMES = {
    "transformers": ("models/",),
    "fla": ("models/hf/recurrence.py",),
    "gguf": ("models/gguf/",),
    "bitsandbytes": ("models/native/quantized.py",),
    "torchao": ("models/native/float8.py",),
    "huggingface_hub": ("models/", "system/hub.py", "apps/publishing/"),
    "tokenizers": ("models/",),
    "yaml": ("apps/migration/",),
    "jinja2": ("models/tokenizer/",),
    "PIL": ("core/pictures.py",),
    "safetensors": ("models/",),
    "datasets": ("data/",),
    "pyarrow": ("data/", "runs/record/", "apps/view/"),
    "duckdb": ("runs/record/", "apps/view/"),
    "math_verify": ("verify/",),
    "sympy": ("verify/",),
    "matplotlib": ("runs/curves.py",),
    "tensorboardX": ("runs/events.py",),
    "wandb": ("runs/tracking/adapters.py",),
    "trackio": ("runs/tracking/adapters.py",),
    "mlflow": ("runs/tracking/adapters.py",),
    "swanlab": ("runs/tracking/adapters.py",),
    "rich": ("runs/terminal/", "cli/rank_command.py"),
    "cyclopts": ("cli/",),
    "vllm": ("engines/vllm/gpu_transfer.py",),
    "ray": ("engines/pool/ray_engines.py",),
    "rapidfuzz": ("training/sources/diversity.py", "verify/", "apps/audit/shared_phrases.py"),
    "aiohttp": (
        "engines/serving/",
        "engines/servers/server_client.py",
        "services/retrieval/search_server.py",
        "system/endpoint.py",
        "system/http_server.py",
        "apps/view/web_server.py",
        "runs/tracking/prometheus.py",
        "envs/bridges/nemo_gym.py",
    ),
    "verifiers": ("envs/bridges/verifiers_side.py",),
    "bm25s": ("services/retrieval/bm25.py",),
    "faiss": ("services/retrieval/dense.py",),
    "jsonschema": ("verify/", "services/", "envs/play/tools.py"),
    "docstring_parser": ("envs/tool_schemas.py",),
    "referencing": ("verify/",),
    "reasoning_gym": ("envs/bridges/reasoning.py",),
    "gymnasium": ("envs/bridges/gym.py",),
    "textarena": ("envs/bridges/arena.py",),
    "websockets": ("envs/bridges/openenv.py",),
    "e2b": ("sandbox/remote/e2b_sandbox.py",),
    "daytona": ("sandbox/remote/daytona_sandbox.py",),
    "modal": ("sandbox/remote/modal_sandbox.py",),
    "mcp": ("envs/bridges/mcp_tools.py",),
    "lm_eval": ("training/lm_eval_model.py", "training/harness_figures.py"),
    "mcp_types": ("envs/bridges/mcp_tools.py",),
    "py3langid": ("verify/",),
    "torch.distributed": ("learners/process_group.py", "learners/fsdp.py", "learners/sharded_decoder.py"),
}
"""Where each heavy library may be imported."""

LIGHT = ("core/", "system/", "data/", "verify/", "sandbox/", "envs/", "algorithms/", "config/", "runs/", "apps/audit/",
         "apps/migration/", "apps/planning/", "services/retrieval/", "services/retriever.py", "engines/serving/requests.py",
         "engines/serving/request_fields.py", "engines/serving/openai_completions.py", "engines/serving/openai_responses.py",
         "engines/serving/anthropic_messages.py",
         "training/figures.py", "training/sources/diversity.py", "training/sources/packing.py",          
         "cli/main.py", "cli/argument_errors.py",
         "cli/commands.py", "cli/training_commands.py", "cli/inspect_commands.py", "cli/write_types.py",
         "cli/command_table.py", "cli/help_pages.py", "cli/init_command.py", "cli/named_files.py",
         "cli/import_command.py", "cli/doctor_command.py", "cli/show_command.py", "apps/show/")  # fmt: skip
"""What imports no torch when it is imported itself, so that --help and check start at once."""

SEAMS = {"Engine", "Learner", "Model", "Objective", "Service", "Source", "World"}
"""The protocols of `core/protocols.py` that the loop and the sources know: nothing else bears these names."""

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports(file: Path) -> tuple[tuple[str, bool], ...]:
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

    walk(tree_of(file), True)
    return tuple(found)


def file_of(name: str) -> Path | None:
    """The file of the package that a full name belongs to: a module, or something in one."""
    parts = name.split(".")
    if parts[0] != "posttrain":
        return None
    for length in (len(parts), len(parts) - 1):
        place = PACKAGE.joinpath(*parts[1:length])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if length > 1 and file.exists():
                return file
    assert parts[1:] in ([], ["__version__"]), f"{name}: inside the package, import it from where it is defined"
    return None


def room_of(file: Path) -> str:
    return Path(name_of(file)).parts[0].removesuffix(".py")


def inner_room_of(file: Path) -> str:
    """The folder within a room, or the file itself where it stands beside such folders."""
    return "/".join(Path(name_of(file)).parts[:2])


def floor_of(room: str) -> int:
    floors = [number for number, rooms in enumerate(FLOORS) if room in rooms]
    assert len(floors) == 1, f"posttrain/{room} has no floor: give it one here and in docs/architecture.md"
    return floors[0]


def arrows() -> list[tuple[Path, Path]]:
    """(file, file that it imports), for all of the package, the front door excepted."""
    found = []
    for file in FILES:
        if file != PACKAGE / "__init__.py":
            targets = {target for name, _ in imports(file) if (target := file_of(name)) not in (None, file)}
            found.extend((file, target) for target in targets if target)
    return found


def circles(arrows: Iterable[tuple[str, str]]) -> list[set[str]]:
    """Sets of nodes each of which leads to all others of its set."""
    ahead: Mapping[str, set[str]] = defaultdict(set)
    for source, target in arrows:
        ahead[source].add(target)

    def reached(node: str) -> set[str]:
        seen: set[str] = set()
        waiting = [node]
        while waiting:
            new = ahead.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    found: list[set[str]] = []
    all_reached = {node: reached(node) for node in list(ahead)}
    for node, seen in all_reached.items():
        circle = {other for other in seen if node in all_reached.get(other, set())}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def test_room_imports_its_own_floor_or_a_lower_one() -> None:
    at_once = {name.split(".")[1] for name, now in imports(PACKAGE / "__init__.py") if now and "posttrain." in name}
    assert at_once == {"core", "config"}, "the front door loads what it needs when it is called"
    verbs = {name.split(".")[0] for name, _ in imports(PACKAGE / "config" / "verbs.py")}
    assert not imports(PACKAGE / "config" / "__init__.py") and verbs == {"__future__", "importlib", "typing"}
    for file, target in arrows():
        own, other = room_of(file), room_of(target)
        if target != PACKAGE / "__init__.py":
            assert floor_of(other) <= floor_of(own), (
                f"{name_of(file)} may not import {name_of(target)}: it stands higher"
            )


def test_no_circle_between_rooms_folders_or_files() -> None:
    found = arrows()
    rooms = {(room_of(a), room_of(b)) for a, b in found if room_of(a) != room_of(b) and b != PACKAGE / "__init__.py"}
    inner = {(inner_room_of(a), inner_room_of(b)) for a, b in found if inner_room_of(a) != inner_room_of(b)}
    assert circles(rooms) == []
    assert circles(inner) == []
    assert circles((name_of(a), name_of(b)) for a, b in found) == []


def test_circle_is_found() -> None:
    assert circles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]) == [{"a", "b", "c"}]


def test_module_and_public_class_names_are_used_once() -> None:
    modules = Counter(file.stem for file in FILES if file.stem not in ("__init__", "__main__"))
    classes = Counter(
        node.name
        for file in FILES
        for node in tree_of(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in modules.items() if count > 1] == []
    assert [name for name, count in classes.items() if count > 1] == []
    assert set(classes) >= SEAMS


def bound_names(tree: ast.Module) -> set[str]:
    """The names that a module has: what it defines, assigns or imports outside its functions and classes."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(name.asname or name.name).split(".")[0] for name in node.names}
        else:
            found |= {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()
            waiting += ast.iter_child_nodes(node)
    return found


def missing_names(tree: ast.Module) -> list[str]:
    """Names that a file imports from the package, also within a function, and that the package does not have."""
    missing = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("posttrain.") and not node.level:
            place = ROOT / str(node.module).replace(".", "/")
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            names = bound_names(tree_of(file)) if file.exists() else set()
            for name in () if "__getattr__" in names else (name.name for name in node.names):
                if name not in names and not (place / name).is_dir() and not (place / f"{name}.py").exists():
                    missing.append(f"{node.lineno}: {node.module} has no {name}")
    return missing


def test_names_imported_from_the_package_exist() -> None:
    """mypy checks the package and the experiments; tools, benchmarks and recipes are run by few tests."""
    rooms = ("tests", "tools", "benchmarks", "recipes", "experiments", "notebooks", "docs")
    for file in (file for room in rooms for file in sorted((ROOT / room).rglob("*.py"))):
        assert missing_names(tree_of(file)) == [], str(file)


def test_missing_name_is_found() -> None:
    lines = ("from posttrain.core.intervals import gone", "def f():\n    from posttrain.core.gone import name",
             "from posttrain.core import intervals", "from posttrain import api")  # fmt: skip
    assert [len(missing_names(ast.parse(line))) for line in lines] == [1, 1, 0, 0]


def test_no_test_imports_another() -> None:
    """Shared code of tests is in tests/helpers or in conftest.py, so that each file of tests runs alone."""
    for file in (*TESTS.rglob("*.py"), *(ROOT / "tools").rglob("*.py")):
        for name, _ in imports(file):
            assert not name.startswith(("test_", "tests.")), f"{file}: {name}: move it to tests/helpers"


def test_heavy_libraries_have_one_home_each() -> None:
    for file in FILES:
        for name, _ in imports(file):
            for library, homes in HOMES.items():
                if f"{name}.".startswith(f"{library}."):
                    assert name_of(file).startswith(homes), (
                        f"{name_of(file)}: {library} belongs into {', '.join(homes)}"
                    )


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


def test_options_are_refused_before_torch_is_loaded() -> None:
    refused = [
        "rl",
        "sft --eval-every 3",
        "eval --tasks a",
        "check",
        "sample",
        "prefer --tasks a",
        "rl --env a --tasks a",
    ]
    code = f"""import sys
from posttrain.cli.main import main
codes = [main(words.split()) for words in {refused}]
print(codes, "torch" in sys.modules)"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == f"{[2] * len(refused)} False", ran.stderr


def test_nobody_outside_of_models_asks_which_kind_a_model_is() -> None:
    """What differs between them is asked of the model: see `Model.decoder`, and `Backbone`."""
    trees = {file: tree_of(file) for file in FILES}
    classes = [node for file, tree in trees.items() if room_of(file) == "models" for node in tree.body
               if isinstance(node, ast.ClassDef)]  # fmt: skip
    kinds, before = {"nn.Module", "Model"}, 0
    while len(kinds) > before:
        before = len(kinds)
        kinds |= {node.name for node in classes if any(ast.unparse(base) in kinds for base in node.bases)}
    assert kinds >= {"Backbone", "Decoder", "Backed", "RewardModel", "ValueModel", "Linear", "QuantizedLinear"}
    for file, tree in trees.items():
        for node in ast.walk(tree) if room_of(file) != "models" else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                asked = {ast.unparse(name) for name in ast.walk(node.args[1])} & (kinds - {"nn.Module"})
                assert not asked, f"{name_of(file)}:{node.lineno} asks whether something is a {', '.join(asked)}"


def test_only_the_demo_goes_through_the_front_door() -> None:
    users = [str(file.relative_to(PACKAGE)) for file in FILES if re.search(r"(?m)^import posttrain$", file.read_text())]
    assert users == ["cli/demo_command.py"]
