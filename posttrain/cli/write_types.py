"""Write `posttrain/__init__.pyi`, the types of the Python functions for editors: python -m posttrain.cli.write_types"""

from __future__ import annotations

import json
import textwrap
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from posttrain.config.option_groups import OptionGroup, help_of
from posttrain.config.verbs import OPTION_OF, VERBS, Verb, load
from posttrain.verify.named_verifiers import PREFIX, VERIFIERS, described

BY_HAND = {"human", "rater", "agreement"}
"""Options of the command line only: they need a terminal, or print."""

ROWS, ENV, PATH = "Rows", "str | Callable[..., Any]", "str | PathLike[str]"
PARAMETERS = {"tasks": ROWS, "items": ROWS, "env": ENV, "by": ENV, "model": PATH, "teacher": PATH}
"""Types of the functions' positional arguments."""

VERIFIERS_HEAD = """# Verifiers by name

<!-- Written by `python -m posttrain.cli.write_types`. -->

Which verifiers can be a reward without a line of code? Every verifier of `posttrain.verify` that returns a number, by its
name:

    posttrain rl --tasks rows.jsonl --env verify:exact_match ...

- **Settings** follow the name: `verify:numeric,tolerance=0.01`. A setting cannot contain a comma: put patterns into a
  column.
- **Sums** have weights: `"verify:exact_match*0.9 + verify:tags*0.1"`. A weight is the last `*NUMBER`. Each part is logged
  without its weight. A reward of your own or a built-in one may be a part too.
- **Recipes** (`env = "verify:exact_match*0.9 + verify:tags*0.1"`), Python (`env="verify:f1"`) and `posttrain label
  --with` take the same text.
- **The answer**: verifiers with the setting `answer` judge the answer in a reply. `final` (the default) is a closed
  `\\boxed{}`, `<answer>`, `####` or a sentence such as "the answer is ...", else the whole reply after its thoughts;
  `tags`, `boxed` and `reply` look in one place only. Other verifiers judge the whole reply.
- **Columns** in brackets are optional. For other column names: `--fields.answer solution`.
- **Accuracy and pass@k** count full marks as right, where every part has them.

| name | columns | settings and defaults | result |
|---|---|---|---|
"""

HEAD = '''"""posttrain: reinforcement-learning post-training for language models.

Written by `python -m posttrain.cli.write_types` from where verbs and options are declared.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, Unpack

{imports}

__all__ = {exported}
__version__: str
Rows = str | PathLike[str] | Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]
"""A file, folder or dataset by its name; rows in memory; a generator; a function that makes rows without end."""

'''


def text() -> str:
    """Return the whole file."""
    posttrain = import_module("posttrain")  # no module of the package imports it directly
    verbs = {name: verb for name, verb in VERBS.items() if verb.function}
    kinds = [verb.options for verb in verbs.values()]
    every = dict.fromkeys(part for kind in kinds for part in reversed(kind.__mro__) if _has_options(part))
    exported = [name for name in posttrain.__all__ if name not in posttrain.FUNCTIONS]
    imports = [f"from {posttrain.LATER.get(n, 'posttrain.core.types')} import {n} as {n}" for n in exported]
    functions, results = [], dict[str, None]()
    for name, verb in verbs.items():
        result = _result(verb)
        results[f"from {result.__module__} import {result.__name__}"] = None
        called = verb.python or name.replace("-", "_")
        functions.append(_function(getattr(posttrain, called), verb, result.__name__))
    listed = "\n".join(["[", *(f'    "{name}",' for name in posttrain.__all__), "]"])
    head = HEAD.replace("{imports}", "\n".join([*imports, *results])).replace("{exported}", listed)
    return head + "\n\n".join([*(_of(kind) for kind in every), *functions])


def _result(verb: Verb) -> type[Any]:
    """Return the class of a verb's result."""
    from posttrain.training.training_run import run_training

    result: type[Any] = get_type_hints(run_training if verb.learns else load(verb.function))["return"]
    return result


def _function(function: Any, verb: Verb, result: str) -> str:
    first, *others = verb.given
    several = isinstance(getattr(verb.options, "model", None), tuple)
    types = {**PARAMETERS, "model": f"{PATH} | Sequence[str]" if several else PATH}
    optional = " | None = None" if verb.without_rows else ""
    given = [f"{first}: {types[first]}{optional}", *(f"{other}: {types[other]} | None = None" for other in others)]
    options = f"**options: Unpack[{_titled(verb.options)}]"
    about = textwrap.indent(f'"""{function.__doc__}"""', "    ")
    return f"def {function.__name__}({', '.join([*given, options])}) -> {result}:\n{about}\n    ...\n"


def _has_options(kind: type[Any]) -> bool:
    return issubclass(kind, OptionGroup) and kind is not OptionGroup


def _of(kind: type[Any]) -> str:
    """Return the options that `kind` adds to those of its base classes."""
    hints, above = get_type_hints(kind), [base for base in kind.__bases__ if _has_options(base)]
    known = {f.name for base in above for f in fields(base)}
    own = next((verb for verb in VERBS.values() if verb.options is kind), None)
    first = {*PARAMETERS, *OPTION_OF.values()}  # positional in at least one function
    names = [f.name for f in fields(kind) if f.name not in known | BY_HAND | first]
    if own is not None:
        given = {*own.given, *(OPTION_OF.get(name, name) for name in own.given)}
        names += [f.name for f in fields(kind) if f.name in first - given]
    told = {name: (_said(hints[name]), help_of(kind, name)) for name in names}
    flags = kind.flags() if hasattr(kind, "flags") and "settings" in {f.name for f in fields(kind)} else {}
    inherited = {name for base in above if hasattr(base, "flags") for name in base.flags()}
    told |= {flag.name: (_said(flag.type), flag.help) for flag in flags.values() if flag.name not in inherited}
    extended = ", ".join(f"{_titled(base)}" for base in above) or "TypedDict"
    verbs = next((f"posttrain {name}" for name, verb in VERBS.items() if verb is own), "several verbs")
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
    if origin is tuple and inner[-1] is Ellipsis:
        return f"Sequence[{_said(inner[0])}]"  # a list, a tuple, or one text alone
    if origin is Literal:
        return f"Literal[{', '.join(repr(word).replace(chr(39), chr(34)) for word in inner)}]"
    if origin in (tuple, dict):
        return f"{origin.__name__}[{', '.join(map(_said, inner))}]"
    return " | ".join(map(_said, inner)) if inner else hint.__name__


def verifiers_page() -> str:
    """Return the page of the verifiers that work by name."""
    rows = "\n".join(
        f"| `{PREFIX}{name}` | {columns} | {f'`{settings}`' if settings else ''} | {idea} |"
        for name, verifier in VERIFIERS.items()
        for columns, settings, idea in [described(verifier)]
    )
    return VERIFIERS_HEAD + rows.replace("|n - target|", "distance from the target") + "\n"


def script() -> str:
    """Return the script by which the pages of posttrain view get the kind of data that each verb learns from."""
    learns = {name: verb.learns for name, verb in VERBS.items()}
    return (
        "// Written by `python -m posttrain.cli.write_types`: verb -> what it learns from.\n\n"
        f"export const LEARNS = {json.dumps(learns)};\n"
    )


if __name__ == "__main__":
    import subprocess
    import sys

    place = Path(__file__).resolve().parents[1] / "__init__.pyi"
    place.write_text(text(), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(place)], check=False)
    (place.parent / "apps" / "view" / "static" / "verbs.js").write_text(script(), encoding="utf-8")
    (place.parents[1] / "docs" / "guides" / "verifiers-by-name.md").write_text(verifiers_page(), encoding="utf-8")
