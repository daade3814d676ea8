"""C is compiled without a warning, agrees with Python field by field, and what is loaded was built by this user."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from places import ROOT

from posttrain.models.native.kernels import binder, build, private_folder
from posttrain.models.native.kernels.private_folder import NotPrivate

SOURCES = ("attention.c", "decode.c", "layer.c")
TARGETS = {
    "SSE2": "-march=x86-64",
    "AVX2": "-march=x86-64-v3",
    "AVX-512": "-march=x86-64-v4",
    "AVX-512 with bfloat16": "-march=cooperlake",
    "AMX": "-march=sapphirerapids",
    "this processor": "-march=native",
}
SOONER = tuple("-O1" if flag == "-O3" else flag for flag in build.FLAGS)
"""Flags that are as good here, and compile sooner."""
needs_compiler = pytest.mark.skipif(binder.layer() is None, reason=f"needs compiled code: {build.missing()}")


def load(source: str) -> ctypes.CDLL | None:
    """As a process does that has loaded nothing before."""
    return build._loaded.__wrapped__(source)  # type: ignore[no-any-return]


# -- warnings ----------------------------------------------------------------------------------------------------------


def knows(compiler: str, target: str) -> bool:
    command = (compiler, target, "-x", "c", "-c", os.devnull, "-o", os.devnull)
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [target if target == "AVX-512" else pytest.param(target, marks=pytest.mark.long) for target in TARGETS],
)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_every_file_compiles_without_a_warning(compiler: str, target: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    if not knows(compiler, TARGETS[target]):
        pytest.skip(f"{compiler} does not know {TARGETS[target]} here")
    flags = [flag for flag in build.FLAGS if not flag.startswith("-march")]
    for source in SOURCES:
        command = (compiler, *flags, TARGETS[target], "-fopenmp", "-Wall", "-Wextra", "-Werror")
        where = ("-c", str(build.HERE / source), "-o", str(tmp_path / "object.o"))
        done = subprocess.run((*command, *where), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


# -- what Python and C agree on ----------------------------------------------------------------------------------------


STRUCTURES = {
    "attention": ("attention.c", binder.Attention),
    "linear": ("decode.c", binder.CLinear),
    "layer": ("decode.c", binder.CLayer),
    "model": ("decode.c", binder.CModel),
    "step": ("decode.c", binder.CStep),
}


def changed(declared: type, change: Callable[[list], object]) -> type:  # type: ignore[type-arg]
    fields = list(declared._fields_)  # type: ignore[attr-defined]
    change(fields)
    return type("Changed", (ctypes.Structure,), {"_fields_": fields})


def swap(fields: list) -> None:  # type: ignore[type-arg]
    fields[1], fields[2] = fields[2], fields[1]


@needs_compiler
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_that_differs_from_that_of_c_is_named_with_its_field(name: str) -> None:
    source, declared = STRUCTURES[name]
    loaded = build.library(source)
    assert loaded is not None
    binder.check(loaded, name, declared)
    fields = [field for field, _ in declared._fields_]  # type: ignore[attr-defined]
    wrong: dict[Callable[[list], object], str] = {  # type: ignore[type-arg]
        swap: f"struct {name}, field {fields[2]}",
        lambda f: f.pop(): f"struct {name} of Python has no field {fields[-1]}",
        lambda f: f.append(("more", ctypes.c_int64)): f"struct {name} of C has no field more",
        lambda f: f.__setitem__(0, (f[0][0], ctypes.c_int32)): f"struct {name}, field {fields[0]}",
        lambda f: f.__setitem__(0, (f[0][0], ctypes.c_double)): f"struct {name}, field {fields[0]}",
    }
    for change, message in wrong.items():
        with pytest.raises(AssertionError, match=message):
            binder.check(loaded, name, changed(declared, change))


def test_a_structure_is_made_with_all_of_its_fields_or_not_at_all() -> None:
    with pytest.raises(AssertionError, match="panels"):
        binder.CLinear(weight=None, bias=None, inputs=3)  # type: ignore[call-arg]
    assert binder.CLinear(weight=None, bias=None, inputs=3, panels=2).panels == 2


ONE_STEP = """
import sys
from pathlib import Path
from posttrain.models.native.kernels import build
build.HERE = Path(sys.argv[1])
build.FLAGS = ("-O1", "-march=native", "-fPIC", "-std=gnu11")
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.models.native.decoder import DecoderConfig, new_decoder
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.core.types import Sampling
tokenizer = Tokenizer.train(["0123456789"], 64, "characters")
engine = LocalEngine(new_decoder(DecoderConfig(64, 16, 2, 2, 1, 8, 16, 64), 0), tokenizer)
assert engine.backend == "compiled code", build.missing()
engine.submit(0, [5, 6], Sampling(max_tokens=3))
print("sampled", len(engine.poll()[0].tokens))
"""
LAST_PHASE = "    end_phase(w, SAMPLING);"


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(LAST_PHASE, None, id="as it is", marks=pytest.mark.long),
        pytest.param(LAST_PHASE * 2, "promises fewer", id="one more"),
        pytest.param("", "promises more", id="one less", marks=pytest.mark.long),
    ],
)
def test_a_step_has_as_many_phases_as_it_promises(text: str, says: str | None, tmp_path: Path) -> None:
    """A phase claims its work from a counter of its own: one that nobody made room for would lie behind the others."""
    place = tmp_path / "kernels"
    shutil.copytree(build.HERE, place)
    source = place / "decode.c"
    code = source.read_text()
    assert code.count(LAST_PHASE) == 1
    claims = text.replace("    end_phase", "    (void)claim(w);\n    end_phase") if says else text
    source.write_text(code.replace(LAST_PHASE, claims))
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = (sys.executable, "-c", ONE_STEP, str(place))
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if says is None:
        assert done.returncode == 0 and done.stdout.strip() == "sampled 3", done.stderr
    else:
        assert done.returncode == -signal.SIGABRT and says in done.stderr


# -- compiling ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_missing", {})
    monkeypatch.setattr(build, "_hung", set())
    monkeypatch.setattr(build, "FLAGS", SOONER)
    return tmp_path / "posttrain"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the library of layer.c."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(build, "FLAGS", SOONER)
        assert load("layer.c") is not None
    return folder / "posttrain"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the compiler was asked for."""
    ran: list[str] = []
    compile = build._compile

    def counted(compiler: str, *arguments: str) -> None:
        ran.append(" ".join(arguments))
        compile(compiler, *arguments)

    monkeypatch.setattr(build, "_compile", counted)
    return ran


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """The only one there is from now on."""
    folder.mkdir(exist_ok=True)
    program = folder / "gcc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(build.shutil, "which", lambda name: str(program) if name == "gcc" else None)
    return program


@needs_compiler
def test_code_is_compiled_once(cache: Path, commands: list[str]) -> None:
    assert load("layer.c") is not None and len(commands) == 2, "it is compiled and linked"
    assert load("layer.c") is not None and len(commands) == 2
    assert load("attention.c") is not None and len(commands) == 4
    assert len(list(cache.glob("*.so"))) == len(list(cache.glob("*.sha256"))) == 2 and len(list(cache.iterdir())) == 4


@needs_compiler
def test_code_is_compiled_anew_when_anything_it_is_made_from_changes(
    cache: Path, commands: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = tmp_path / "kernels"
    shutil.copytree(build.HERE, copy)
    monkeypatch.setattr(build, "HERE", copy)
    keys = set()
    for change in ("layer.c", "vectors.h", "flags"):
        if change == "flags":
            monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DANYTHING"))
        else:
            (copy / change).write_text((copy / change).read_text() + "\n// changed\n")
        assert load("layer.c") is not None
        keys.add(frozenset(cache.glob("*.sha256")))
    assert len(keys) == 3 and len(commands) == 6


@needs_compiler
@pytest.mark.parametrize("damage", ["one byte", "cut short", "empty", "no library", "no checksum", "another checksum"])
def test_a_damaged_library_is_built_again(cache: Path, built: Path, commands: list[str], damage: str) -> None:
    shutil.copytree(built, cache)
    assert load("layer.c") is not None and not commands, "it is whole"
    (library,), (manifest,) = cache.glob("*.so"), cache.glob("*.sha256")
    content = library.read_bytes()
    library.unlink()  # it is loaded: what lies in memory is the file's own
    middle = len(content) // 2
    if damage != "no library":
        library.write_bytes(
            {
                "one byte": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
                "cut short": content[:middle],
                "empty": b"",
            }.get(damage, content)
        )
    if damage == "no checksum":
        manifest.write_bytes(b"\xff\0")
    if damage == "another checksum":
        manifest.write_text(manifest.read_text().replace(manifest.read_text()[:8], "0" * 8))
    assert load("layer.c") is not None and len(commands) == 2, "it is compiled and linked"
    again = cache / manifest.read_text().split()[1]
    assert subprocess.run(["sha256sum", "--check", "--status", manifest], cwd=cache).returncode == 0
    assert again.stat().st_size == len(content)
    assert load("layer.c") is not None and len(commands) == 2


@pytest.mark.slow
@needs_compiler
def test_processes_that_build_at_once_do_not_disturb_each_other(cache: Path) -> None:
    code = f"""
from posttrain.models.native.kernels import binder, build
build.FLAGS = {SOONER!r}
assert binder.layer() is not None, build.missing()
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent)}
    started = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in started] == [0, 0]
    (manifest,) = cache.glob("*.sha256")
    assert build._verified(manifest).parent == cache and len(list(cache.glob("*.so"))) == 1


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        "exit 0",
        'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"',
        "kill -9 $$",
        "echo internal compiler error >&2; exit 4",
    ],
    ids=["fails", "writes nothing", "writes nonsense", "is killed", "complains"],
)
def test_a_broken_compiler_is_no_compiler(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler(tmp_path / "bin", monkeypatch, script)
    assert all(load(source) is None for source in SOURCES)
    assert build.missing() and not list(cache.iterdir()), "nothing is kept of it"
    assert capfd.readouterr() == ("", "")


def test_without_a_compiler_there_is_no_compiled_code(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert load("layer.c") is None and build.missing() == "no C compiler was found" and not cache.exists()


def test_a_compiler_that_hangs_is_ended_and_not_asked_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "COMPILER_SECONDS", 0.5)
    compiler(
        tmp_path / "bin", monkeypatch, f"sleep 1000 & echo $! > {tmp_path}/child; echo x >> {tmp_path}/asked; wait"
    )
    assert all(load(source) is None for source in SOURCES)
    assert (tmp_path / "asked").read_text() == "x\n" and not list(cache.iterdir())
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "status")
    for _ in range(100):
        if not child.exists() or "State:\tZ" in child.read_text():
            return
        time.sleep(0.05)
    raise AssertionError("what the compiler started still runs")


# -- the cache folder --------------------------------------------------------------------------------------------------


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(build, "_missing", {})
    return tmp_path / "home"


def test_the_cache_folder_is_made_for_its_user_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        folder = build.cache_folder()
    finally:
        os.umask(before)
    assert folder == home / ".cache" / "posttrain"
    assert [part.stat().st_mode & 0o777 for part in (folder, home / ".cache", home)] == [0o700] * 3
    assert build.cache_folder() == folder


def test_a_cache_folder_that_a_variable_names_is_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    assert build.cache_folder() == home / "elsewhere" / "posttrain"
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    assert build.cache_folder() == home / ".cache" / "posttrain", (
        "a relative path is ignored, as its specification says"
    )


SPOILED: dict[str, Callable[[Path], object]] = {
    "writable by everybody": lambda folder: folder.chmod(0o707),
    "writable by a group": lambda folder: folder.chmod(0o770),
    "sticky and writable by everybody": lambda folder: folder.chmod(0o1777),
    "in a folder writable by everybody": lambda folder: folder.parent.chmod(0o777),
    "in a folder writable by a group": lambda folder: folder.parent.parent.chmod(0o775),
    "a symbolic link": lambda folder: folder.rename(folder.with_name("real")).symlink_to,
    "a file": lambda folder: (folder.rmdir(), folder.write_text("")),
}


def spoil(folder: Path, how: str) -> None:
    if how == "a symbolic link":
        folder.symlink_to(folder.rename(folder.with_name("real")))
    else:
        SPOILED[how](folder)


@pytest.mark.parametrize("how", SPOILED)
def test_a_folder_that_others_can_change_is_not_used(home: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build.cache_folder()
    monkeypatch.setattr(private_folder, "_own_group", lambda group: False)
    spoil(folder, how)
    with pytest.raises(OSError):
        build.cache_folder()
    assert load("layer.c") is None and build.missing()


def test_a_folder_of_another_user_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build.cache_folder()
    if os.getuid() == 0:
        os.chown(folder, 1234, -1)
    else:
        monkeypatch.setattr(private_folder.os, "getuid", lambda: 1234)
    with pytest.raises(NotPrivate, match="belongs to another user"):
        build.cache_folder()


def test_a_link_on_the_way_is_followed_if_nobody_else_can_turn_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = home / "disk" / "cache"
    real.mkdir(parents=True)
    (home / ".cache").symlink_to("disk/../disk/cache")
    assert build.cache_folder() == home / ".cache" / "posttrain" and (real / "posttrain").is_dir()
    (home / "disk").chmod(0o777)
    with pytest.raises(NotPrivate, match=f"{home}/disk is writable by everybody"):
        build.cache_folder()
    (home / "disk").chmod(0o1777)
    build.cache_folder()  # others may add to such a folder, not rename what is not theirs


def test_links_that_go_round_end_in_a_refusal(home: Path) -> None:
    home.mkdir()
    (home / ".cache").symlink_to(home / "other")
    (home / "other").symlink_to(home / ".cache")
    with pytest.raises((OSError, RuntimeError)):
        build.cache_folder()
    assert load("layer.c") is None


def test_a_group_of_the_users_own_may_write(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build.cache_folder()
    home.chmod(0o775)
    monkeypatch.setattr(private_folder, "_own_group", lambda group: group == folder.stat().st_gid)
    assert build.cache_folder() == folder
    monkeypatch.setattr(private_folder, "_own_group", lambda group: False)
    with pytest.raises(NotPrivate, match="writable by a group"):
        build.cache_folder()


@pytest.mark.parametrize("where", ["read-only", "unset", "empty", "relative", "no room"])
def test_a_home_that_cannot_be_written_is_no_error(
    home: Path, monkeypatch: pytest.MonkeyPatch, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if where == "read-only":
        monkeypatch.setenv("HOME", "/proc/self")  # for root, too
    elif where == "unset":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", lambda user: (_ for _ in ()).throw(KeyError(user)))
    elif where == "relative":
        monkeypatch.setenv("HOME", "home")
    elif where == "empty":
        monkeypatch.setenv("HOME", "")
        monkeypatch.setattr(
            Path, "mkdir", lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
        )
    else:
        monkeypatch.setattr(
            build.tempfile, "TemporaryDirectory", lambda **k: (_ for _ in ()).throw(OSError(28, "No space"))
        )
    assert load("layer.c") is None and build.missing()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_run_without_a_home_works(tmp_path: Path) -> None:
    """Without a word: what computes is said in the record of the run."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment["HOME"] = "/proc/self"
    code = ONE_STEP.replace(
        'assert engine.backend == "compiled code"', 'assert engine.backend == "torch\'s operations"'
    )
    command = (sys.executable, "-c", code, str(build.HERE))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "sampled 3", "")
