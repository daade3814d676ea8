"""The file system of a program in the sandbox: the standard library, shared libraries, a folder of its own.

With a mount namespace, these are in a small read-only root, in which nothing else exists: no /proc, no /home. Without
one, Landlock permits the same paths at their places.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress

from posttrain.sandbox import syscalls

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
FOLDER = "/tmp"  # a program's own folder, in a root of its own
DEEPEST = 200  # most levels of folders that are searched
_OLD = "/old"
_KEPT = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}  # flag of statvfs -> flag of mount


def readable() -> list[str]:
    """Return the existing files and folders that this interpreter reads, none of them inside another one."""
    loaded = {os.path.dirname(path) for path in _loaded()}
    paths = [*sys.path, os.path.join(sys.base_prefix, "lib"), *_LIBRARIES, *loaded]
    return _topmost({os.path.abspath(p) for p in paths if p and os.path.exists(p)})


def _topmost(paths: set[str]) -> list[str]:
    """Return the paths that are not inside another one."""
    found: list[str] = []
    for path in sorted(paths):
        if not any(path.startswith(above + "/") for above in found):
            found.append(path)
    return found


def _loaded() -> Iterator[str]:
    """Yield the files of the shared libraries in this process."""
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if ".so" in path:
                yield "/" + path


def build_root(paths: list[str]) -> None:
    """Build a root of these paths and the devices, and change to it. Requires a mount namespace of this process's
    own.
    """
    links: dict[str, str] = {}
    real = _topmost({_resolved(path, links) for path in (*paths, *filter(os.path.exists, DEVICES))})
    base = os.path.realpath(tempfile.gettempdir())
    syscalls.mount("none", "/", None, syscalls.RECURSIVE | syscalls.PRIVATE)
    syscalls.mount("tmpfs", base, "tmpfs", syscalls.NO_SUID | syscalls.NO_DEVICES, "size=1m,mode=0755")
    os.mkdir(base + _OLD)
    syscalls.pivot_root(base, base + _OLD)
    os.chdir("/")
    for path in real:
        _bind(path)
    for link, target in links.items():
        if not os.path.lexists(link):
            os.makedirs(os.path.dirname(link), exist_ok=True)
            os.symlink(target, link)
    os.makedirs(FOLDER, exist_ok=True)
    syscalls.unmount(_OLD)
    os.rmdir(_OLD)
    syscalls.mount(
        "none",
        "/",
        None,
        syscalls.REMOUNT | syscalls.BIND | syscalls.READ_ONLY | syscalls.NO_SUID | syscalls.NO_DEVICES,
    )


def _resolved(path: str, links: dict[str, str]) -> str:
    """Return the path without symbolic links; these are added to `links`."""
    for _ in range(40):
        parts = path.split("/")
        prefixes = ("/".join(parts[: n + 1]) for n in range(1, len(parts)))
        link = next((prefix for prefix in prefixes if os.path.islink(prefix)), None)
        if link is None:
            break
        links[link] = os.readlink(link)
        path = os.path.normpath(os.path.join(os.path.dirname(link), links[link]) + path[len(link) :])
    return path


def _bind(path: str) -> None:
    """Mount a path of the old root read-only."""
    if os.path.isdir(_OLD + path):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    syscalls.mount(_OLD + path, path, None, syscalls.BIND | syscalls.RECURSIVE)
    known = os.statvfs(path).f_flag
    kept = sum(flag for bit, flag in _KEPT.items() if known & bit)
    device = stat.S_ISCHR(os.stat(path).st_mode)
    flags = syscalls.NO_SUID | (0 if device else syscalls.NO_DEVICES | syscalls.READ_ONLY) | kept
    syscalls.mount("none", path, None, syscalls.REMOUNT | syscalls.BIND | flags)


def mount_folder(size: int, files: int, owner: int | None) -> None:
    """Mount a program's own folder in memory; it disappears with its namespace."""
    flags = syscalls.NO_SUID | syscalls.NO_DEVICES | syscalls.NO_EXECUTION
    owned = "" if owner is None else f",uid={owner},gid={owner}"
    syscalls.mount("tmpfs", FOLDER, "tmpfs", flags, f"size={size},nr_inodes={files},mode=0700{owned}")


# -- folders on a disk, where there are no namespaces -------------------------------------------------------------------


def usage(folder: str, most_bytes: int, most_files: int) -> bool:
    """Return whether a folder's content is within these limits. Reads at most `most_files` entries.

    The result is False for folders that may not be listed or are deeper than `DEEPEST`. Each folder is opened from
    within its parent, never through a link that may have replaced it in the meantime.
    """
    size = count = 0

    def within(descriptor: int, depth: int) -> bool:
        nonlocal size, count
        inner = []
        with os.scandir(descriptor) as entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # deleted in the meantime
                    continue
                count += 1
                size += found.st_blocks * 512
                if count > most_files or size > most_bytes:
                    return False
                if stat.S_ISDIR(found.st_mode):
                    inner.append(entry.name)
        return all(opened(name, descriptor, depth + 1) for name in inner)

    def opened(name: str, above: int | None, depth: int) -> bool:
        if depth > DEEPEST:
            return False
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # deleted, or replaced by a file or a link
        try:
            return within(descriptor, depth)
        except OSError:
            return False
        finally:
            os.close(descriptor)

    return opened(folder, None, 0)


def remove(folder: str) -> None:
    """Delete a folder with all its content, at any depth and with any modes."""
    number = 0
    with suppress(OSError):
        os.chmod(folder, 0o700)
        while names := os.listdir(folder):
            for name in names:
                path = os.path.join(folder, name)
                if not _is_folder(path):
                    os.unlink(path)
                    continue
                os.chmod(path, 0o700)
                for inner in os.listdir(path):
                    number += 1  # move it up by one level: a path can become too long for the system
                    below = os.path.join(path, inner)
                    if _is_folder(below):
                        os.chmod(below, 0o700)  # a folder without write permission cannot be moved
                    os.rename(below, os.path.join(folder, f"moved {os.getpid()} {number}"))
                os.rmdir(path)
        os.rmdir(folder)


def _is_folder(path: str) -> bool:
    return stat.S_ISDIR(os.lstat(path).st_mode)
