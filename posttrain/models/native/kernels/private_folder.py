"""Verifies that only this user can have written the files of a folder."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

MOST_LINKS = 40  # maximum of symbolic links that the kernel follows


class NotPrivate(OSError):
    """Raised if other users can change files of the folder, or replace the folder."""


def private_folder(path: Path) -> Path:
    """Return the folder at this absolute path, created with mode 0700 if it is missing.

    It must belong to this user, be no symbolic link, and be writable by nobody else. Nobody else may be able to replace
    it, or a folder or link on the path to it. Raises NotPrivate, or OSError if it cannot be created.
    """
    if not path.exists():
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                folder.mkdir(0o700, exist_ok=True)
    if path.is_symlink():
        raise NotPrivate(f"{path} is a symbolic link")
    *way, last = _way(path)
    for step in way:
        _check(step)
    _check(last, own=True)
    return path


def _way(path: Path) -> list[Path]:
    """Return all folders and symbolic links on the path, the path itself last."""
    at, names, links = Path(path.anchor), list(reversed(path.parts[1:])), 0
    way = [at]
    while names:
        if (name := names.pop()) == "..":
            at = at.parent
            continue
        way.append(at / name)
        if not (at / name).is_symlink():
            at = at / name
            continue
        links += 1
        if links > MOST_LINKS:
            raise NotPrivate(f"{path} passes too many symbolic links")
        target = Path(os.readlink(at / name))
        names.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
        at = Path(target.anchor) if target.is_absolute() else at
    return way


def _check(path: Path, own: bool = False) -> None:
    """Raise NotPrivate unless the folder or link is this user's (or root's), and nobody else can replace its
    entries.
    """
    info, user = os.lstat(path), os.getuid()
    if info.st_uid not in ((user,) if own else (user, 0)):
        raise NotPrivate(f"{path} belongs to another user")
    if stat.S_ISLNK(info.st_mode):
        return
    if not stat.S_ISDIR(info.st_mode):
        raise NotPrivate(f"{path} is not a folder")
    sticky = info.st_mode & stat.S_ISVTX and not own  # others may add entries, but not replace existing ones
    if info.st_mode & stat.S_IWOTH and not sticky:
        raise NotPrivate(f"{path} is writable by everybody")
    if info.st_mode & stat.S_IWGRP and not sticky and not _own_group(info.st_gid):
        raise NotPrivate(f"{path} is writable by a group")


def _own_group(group: int) -> bool:
    """Return whether this is the user's private group (the user's name, no other members), as some systems create."""
    try:
        me, it = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == me.pw_gid and it.gr_name == me.pw_name and set(it.gr_mem) <= {me.pw_name}
