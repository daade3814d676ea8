"""Values that may have a name: NAME=VALUE."""

import re


def named_value(text: str) -> tuple[str, str] | None:
    """Return (name, value) of NAME=VALUE, with the name "" where none is given; None for an empty text or value."""
    found = re.fullmatch(r"(?:([A-Za-z][\w-]*)=)?(.+)", text, re.DOTALL)
    return (found[1] or "", found[2]) if found else None
