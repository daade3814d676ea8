"""Writes `posttrain/typed.py`, which tells editors the options of the front door: python -m posttrain.cli.write_types"""

from __future__ import annotations

import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from posttrain.config.inference import Evaluation, Label, Sample
from posttrain.config.option_groups import OptionGroup, help_of
from posttrain.config.training import RL, SFT, Distill, Prefer, RewardModelling
from posttrain.verify.named_verifiers import PREFIX, VERIFIERS, described

GIVEN = {"tasks", "env", "model", "teacher", "items", "with_", "human", "rater", "agreement"}
"""Positional parameters of the public functions."""

VERIFIERS_HEAD = """# Verifiers by name

<!-- Written by `python -m posttrain.cli.write_types`. -->

Every verifier of `posttrain.verify` that gives a number is a reward by its name, without a line of code:

    posttrain rl --tasks rows.jsonl --env verify:exact_match ...

Settings follow the name: `verify:numeric,tolerance=0.01`. Rewards add up with weights, and each part is logged without its
weight: `"verify:exact_match*0.9 + verify:tags*0.1"`; a reward of your own or a built-in one may be a part too. The same text
stands in a recipe (`env = "verify:exact_match*0.9 + verify:tags*0.1"`), in Python (`env="verify:f1"`), and behind
`posttrain label --with`. A weight is the last `*NUMBER`, and a setting cannot hold a comma: put patterns into a column.

Verifiers with the setting `answer` judge the answer in a reply. `final` (the default) is a closed `\\boxed{}`, `<answer>`,
`####` or a sentence such as "the answer is ...", else the whole reply behind its thoughts; `tags`, `boxed` and `reply` look
in one place only. Other verifiers judge the whole reply. Columns in brackets are optional. A row names its columns as it
likes: `--fields.answer solution`. Accuracy and pass@k count full marks as right, where every part has them.

| name | columns | settings and defaults | gives |
|---|---|---|---|
"""

HEAD = '''"""The options of the front door, for editors.

Written by `python -m posttrain.cli.write_types` from where the options are declared.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

'''


def text() -> str:
    """The whole file."""
    kinds = (SFT, Prefer, RewardModelling, RL, Distill, Evaluation, Sample, Label)
    every = dict.fromkeys(part for kind in kinds for part in reversed(kind.__mro__) if _has_options(part))
    return HEAD + "\n\n".join(_of(kind) for kind in every)


def _has_options(kind: type[Any]) -> bool:
    return issubclass(kind, OptionGroup) and kind is not OptionGroup


def _of(kind: type[Any]) -> str:
    """The options that `kind` adds to those of the classes that it extends."""
    hints, above = get_type_hints(kind), [base for base in kind.__bases__ if _has_options(base)]
    known = {f.name for base in above for f in fields(base)}
    names = [f.name for f in fields(kind) if f.name not in known | GIVEN]
    names += [name for name in ("model", "env") if kind is SFT]  # `sft` takes the tasks alone
    told = {name: (_said(hints[name]), help_of(kind, name)) for name in names}
    flags = kind.flags() if "settings" in {f.name for f in fields(kind)} - GIVEN and hasattr(kind, "flags") else {}
    inherited = {name for base in above if hasattr(base, "flags") for name in base.flags()}
    told |= {flag.name: (_said(flag.type), flag.help) for flag in flags.values() if flag.name not in inherited}
    extended = ", ".join(f"{_titled(base)}" for base in above) or "TypedDict"
    verbs = f"posttrain {kind.verb}" if "verb" in vars(kind) else "several verbs"
    lines = [f"class {_titled(kind)}({extended}, total=False):", f'    """Options of {verbs}."""', ""]
    for name, (hint, help) in told.items():
        lines += [f"    {name}: {hint}", textwrap.indent(textwrap.fill(f'"""{help}"""', 116), "    ")]
    return "\n".join(lines) + "\n"


def _titled(kind: type[Any]) -> str:
    return f"{kind.__name__.removesuffix('Group')}Options"


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


def verifiers_page() -> str:
    """The page of the verifiers that work by name."""
    rows = "\n".join(
        f"| `{PREFIX}{name}` | {columns} | {f'`{settings}`' if settings else ''} | {idea} |"
        for name, verifier in VERIFIERS.items()
        for columns, settings, idea in [described(verifier)]
    )
    return VERIFIERS_HEAD + rows.replace("|n - target|", "distance from the target") + "\n"


if __name__ == "__main__":
    import subprocess
    import sys

    place = Path(__file__).resolve().parents[1] / "typed.py"
    place.write_text(text(), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(place)], check=False)
    (place.parents[1] / "docs" / "guides" / "verifiers-by-name.md").write_text(verifiers_page(), encoding="utf-8")
