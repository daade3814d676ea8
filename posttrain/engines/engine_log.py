"""The line of a log in which an engine reports why it failed."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.core import user_files
from posttrain.core.messages import inline

TAIL = 1 << 18  # bytes of a log that are read: other processes of a server may write much after the one that failed
LABELS = re.compile(
    r"\x1b\[[\d;]*m"  # colours
    r"|^(\s*\([\w-]+( pid=\d+)?\))+ ?"  # vLLM's processes
    r"|(?:(?<=^)|(?<=\) ))(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] "  # and its logger
    r"|^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] "  # SGLang's
)
ERROR = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?P<kind>[A-Za-z_]\w*(?:Error|Exception)): (?P<text>\S.*)"  # the end of a traceback
    r"|\S+: error: (?P<usage>\S.*)"  # argparse
    r"|\s+(?:Value error|Assertion failed), (?P<detail>\S.*?)(?: \[type=.*)?"  # pydantic, below a line without reason
    r"|\s+(?P<input>\S.*) \[type=\w+, .*"
)
FOLLOWS = re.compile(
    "root cause|initialization failed|[Cc]onnection (closed|reset|refused)|^(BrokenPipe|DistBackend)Error"
)
"""Errors that follow from another one, often of another process."""


def last_error(log: Path) -> str:
    """Return the last error in a log that does not follow from another one, without the labels of its line; "" if
    there is none.
    """
    with user_files.opened(log) as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        found = ERROR.fullmatch(LABELS.sub("", line).rstrip())
        if found is None:
            continue
        told = found["usage"] or found["detail"] or found["input"] or f"{found['kind']}: {found['text']}"
        if not FOLLOWS.search(told):
            return inline(told)
    return ""
