"""Images whose programs this machine has: a plain Debian, Ubuntu or Python, with files, folders and variables added.

A container of such an image can be a jail of bubblewrap. A Dockerfile that asks for more is refused, with its line.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from posttrain.core import user_files
from posttrain.core.messages import clip, inline
from posttrain.core.types import UserError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NO_EFFECT = ("LABEL", "MAINTAINER", "EXPOSE", "CMD", "STOPSIGNAL")  # where every command starts a shell
_IMAGE = re.compile(r"(?:docker\.io/)?(?:library/)?(debian|ubuntu|python)(?::([\w.-]+))?(?:@sha256:[0-9a-f]{64})?")
_INSTALLS = re.compile(
    r"(?<![\w./-])(apt|apt-get|dpkg|apk|yum|dnf|pip3?|pipx|uv|conda|npm|yarn|cargo|gem|curl|wget|git clone|useradd|adduser|"
    r"groupadd|service|systemctl)(?![\w./-])"
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class ImageStep:
    """A folder to make, files to copy or a command to run, for one line of a Dockerfile."""

    where: str  # file and line
    folder: str  # the current folder; without sources and command, it is made
    sources: tuple[Path, ...] = ()  # files and folders of this machine
    target: str = ""
    command: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlainImage:
    """Beginning of each container of an image."""

    steps: tuple[ImageStep, ...] = ()
    folder: str = "/"
    variables: Mapping[str, str] = field(default_factory=dict)


def read_plain_image(source: Path | str) -> PlainImage:
    """Read an image's name, or the Dockerfile of a folder. Raises UserError for one that needs other programs."""
    if isinstance(source, str):
        _check_image(source, "image ")
        return PlainImage()
    file = source / "Dockerfile"
    if (source / ".dockerignore").exists():
        raise UserError(f"{source / '.dockerignore'}: files that are left out")
    folder, variables, steps = "/", dict[str, str](), list[ImageStep]()
    for number, (line, word, text) in enumerate(_instructions(file)):
        where = f"{file}:{line}: "
        what = f"{where}{word} {clip(inline(text), 80)}"
        if (word == "FROM") != (number == 0):
            raise UserError(f"{what} (one FROM, in the first line)")
        if word in ("WORKDIR", "COPY", "ENV"):
            text = _filled(text, variables, what)
        if word == "FROM":
            _check_image(re.sub(r"(?i)\s+as\s+\w+$", "", text), f"{where}FROM ")
        elif word == "WORKDIR":
            folder = os.path.join(folder, text)
            steps.append(ImageStep(where, folder))
        elif word == "ENV":
            variables |= _assigned(text, what)
        elif word == "COPY":
            steps.append(_copied(source, text, folder, what))
        elif word == "RUN" and not re.search(r"^(?:--|\[)|<<", text) and not _INSTALLS.search(text):
            steps.append(ImageStep(where, folder, command=text, variables=dict(variables)))
        elif word not in NO_EFFECT and (word, text) not in (("USER", "root"), ("USER", "0")):
            raise UserError(what)
    return PlainImage(tuple(steps), folder, variables)


def _instructions(file: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, instruction, what follows it)."""
    first, joined = 0, ""
    for number, line in enumerate(user_files.text(file).splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not joined):
            continue
        first, joined = first if joined else number, joined + line.strip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        word, _, text = joined.partition(" ")
        yield first, word.upper(), text.strip()
        joined = ""


def _check_image(name: str, where: str) -> None:
    found = _IMAGE.fullmatch(name)
    if found is None or "alpine" in (found[2] or ""):
        raise UserError(f"{where}{clip(inline(name), 80)} (not debian, ubuntu or python)")
    asked, own = re.match(r"\d+\.\d+", found[2] or ""), python_version()
    if found[1] == "python" and (own is None or (asked is not None and asked[0] != own)):
        has = f"has Python {own}" if own else "has none"
        raise UserError(f"{where}{clip(inline(name), 80)} ({has} in /usr here)")


@cache
def python_version() -> str | None:
    """Return the version of the Python in /usr, such as 3.11; None if there is none."""
    program = shutil.which("python3", path=PATH)
    if program is None:
        return None
    shown = "import sys; print('{}.{}'.format(*sys.version_info))"
    ran = subprocess.run([program, "-I", "-c", shown], capture_output=True, text=True, timeout=60)
    return ran.stdout.strip() or None


def _filled(text: str, variables: Mapping[str, str], what: str) -> str:
    """Put variables of the image into a text."""
    filled = _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text.replace("$PATH", PATH))
    if "$" in filled or "\\" in filled:
        raise UserError(f"{what} (such variables are not read)")
    return filled


def _assigned(text: str, what: str) -> dict[str, str]:
    """Return the variables of ENV NAME=VALUE ..., or of its older form, ENV NAME VALUE."""
    name, space, value = text.partition(" ")
    try:
        pairs = [word.partition("=") for word in shlex.split(text)] if "=" in name else [(name, space, value.strip())]
    except ValueError:
        pairs = []
    if not pairs or not all(re.fullmatch(r"\w+", name) and equals for name, equals, _ in pairs):
        raise UserError(what)
    return {name: value for name, _, value in pairs}


def _copied(context: Path, text: str, folder: str, what: str) -> ImageStep:
    words = text.split()
    if len(words) < 2 or text.startswith(("--", "[", "<<")) or any(".." in word for word in words):
        raise UserError(what)
    sources = [
        sorted(context.glob(word.strip("/"))) if word.strip("/") not in ("", ".") else [context] for word in words[:-1]
    ]
    if not all(sources):
        raise UserError(f"{what} (no such file in {context.name})")
    target = os.path.join(folder, "" if words[-1] in (".", "./") else words[-1])
    several = sum(map(len, sources)) > 1
    where = what[: what.index("COPY")]
    return ImageStep(where, folder, tuple(path for found in sources for path in found), target + "/" * several)
