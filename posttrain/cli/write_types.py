"""Writes `posttrain/typed.py`, which tells editors the options of the front door: python -m posttrain.cli.write_types"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from posttrain.config.inference import Evaluation, Label, Sample
from posttrain.config.row_options import Data, FromRows
from posttrain.config.training import RL, SFT, Distill, Passes, Prefer, RewardModelling, Training

GIVEN = {"tasks", "env", "model", "teacher", "items", "with_", "human", "rater", "agreement"}
"""What the functions of the front door take by position, if at all."""

HEAD = '''"""The options of the front door, for editors.

Written by `python -m posttrain.cli.write_types` from where the options are declared.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

'''


def text() -> str:
    """The whole file."""
    kinds = (FromRows, Data, Training, Passes, SFT, Prefer, RewardModelling, RL, Distill, Evaluation, Sample, Label)
    return HEAD + "\n\n".join(_of(kind) for kind in kinds)


def _of(kind: type[FromRows]) -> str:
    """The options that `kind` adds to those of the class it extends."""
    hints, above = get_type_hints(kind), kind.__mro__[1]
    known = {f.name for f in fields(above)} if above is not object else set()
    names = [f.name for f in fields(kind) if f.name not in known | GIVEN]
    names += [name for name in ("model", "env") if kind is SFT]  # `sft` takes the tasks alone
    told = {name: (_said(hints[name]), _help(kind, name)) for name in names}
    if "settings" in told:
        told |= {flag.name: (_said(flag.type), flag.help) for flag in kind.flags().values()}
    extended = "TypedDict" if above is object else f"{above.__name__}Options"
    verbs = "several verbs" if kind in (FromRows, Data, Training, Passes) else f"posttrain {kind.verb}"
    lines = [f"class {kind.__name__}Options({extended}, total=False):", f'    """Options of {verbs}."""', ""]
    for name, (hint, help) in told.items():
        lines += [f"    {name}: {hint}", textwrap.indent(textwrap.fill(f'"""{help}"""', 116), "    ")]
    return "\n".join(lines) + "\n"


def _said(hint: Any) -> str:
    if hint is Any:
        return "Any"
    origin, inner = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "None"
    if hint is Ellipsis:
        return "..."
    if origin is Literal:
        return f"Literal[{', '.join(repr(word).replace(chr(39), chr(34)) for word in inner)}]"
    if origin in (tuple, dict):
        return f"{origin.__name__}[{', '.join(map(_said, inner))}]"
    return " | ".join(map(_said, inner)) if inner else hint.__name__


def _help(kind: type[Any], name: str) -> str:
    """The documentation of a field where it is declared, in one line."""
    for owner in kind.__mro__:
        if name in inspect.get_annotations(owner):
            lines = inspect.getsource(owner).splitlines()
            at = next(i for i, line in enumerate(lines) if line.startswith(f"    {name}: "))
            rest = "\n".join(lines[at:])
            begin = rest.index('"""') + 3
            return " ".join(rest[begin : rest.index('"""', begin)].split())
    return ""


if __name__ == "__main__":
    import subprocess
    import sys

    place = Path(__file__).resolve().parents[1] / "typed.py"
    place.write_text(text(), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(place)], check=False)
