"""Generates pages of the documentation site from code, as a hook of MkDocs: the home page and all of reference/.

The home page is the README. The reference comes from where things are declared: options from the command, verifiers from
`posttrain.verify`, environments from their registry, metrics from their table, columns
from the schema.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mkdocs.plugins
import pyarrow as pa
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import posttrain
import posttrain.verify
from posttrain.cli.command_table import COMMANDS
from posttrain.cli.help_pages import HelpEntry, entries_of
from posttrain.cli.main import app
from posttrain.config.verbs import VERBS
from posttrain.core.foreign_options import ELSEWHERE
from posttrain.envs.play.load_env import BUILTIN
from posttrain.runs import run_files
from posttrain.runs.metrics_table import METRICS, QUESTIONS, Metric
from posttrain.runs.record import schema

sys.path.append(str(Path(__file__).parent))
from docstring_markdown import as_markdown

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "posttrain"
LINK = re.compile(r"\[([^\]\[]*)\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand `folder/*.md` in the navigation to all pages of the folder that are not named before it."""
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} | generated().keys()

    def listed(entry: Any) -> list[Any]:
        if isinstance(entry, dict):
            return [{title: expanded(inner) if isinstance(inner, list) else inner for title, inner in entry.items()}]
        if not entry.endswith("/*.md"):
            return [entry]
        return sorted(page for page in pages if os.path.dirname(page) == os.path.dirname(entry))

    def expanded(entries: list[Any]) -> list[Any]:
        found = [new for entry in entries for new in listed(entry)]
        return [entry for place, entry in enumerate(found) if isinstance(entry, dict) or entry not in found[:place]]

    config.nav = expanded(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    return files


@mkdocs.plugins.event_priority(100)
def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links that leave docs/, which the site cannot resolve, by the path."""

    def seen(found: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join("docs", os.path.dirname(page.file.src_uri), found[2]))
        return found[0] if path.startswith("docs/") else f"{found[1]} (`{path}`)"

    if page.file.src_uri.startswith(("results/", "decisions/")):
        page.meta["search"] = {"boost": 0.5}  # a search should find the guides first, then the reasons
    return LINK.sub(seen, markdown)


def generated() -> dict[str, str]:
    """Path under docs/ -> text."""
    return {
        "index.md": home(),
        **command_pages(),
        "reference/config.md": config_page(),
        "reference/verifiers.md": verifiers_page(),
        "reference/environments.md": environments_page(),
        "reference/metrics.md": metrics_page(),
        "reference/record.md": record_page(),
        "reference/python.md": python_page(),
    }


def home() -> str:
    """The README, with its links relative to docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    def inside(found: re.Match[str]) -> str:
        path = found[2].removeprefix("docs/") if found[2].startswith("docs/") else f"../{found[2]}"
        return f"[{found[1]}]({path}{found[3] or ''})"

    return "---\nhide: [navigation]\n---\n\n" + LINK.sub(inside, text)


# -- the command ---------------------------------------------------------------------------------------------------------


def command_pages() -> dict[str, str]:
    pages = {}
    table = ["| command | purpose |", "|---|---|"]
    for command in COMMANDS:
        file = f"{command.name.replace(' ', '-')}.md"
        groups: dict[str, list[HelpEntry]] = {}
        for entry in entries_of(app, command):
            groups.setdefault(entry.group, []).append(entry)
        told = "\n\n".join(
            f"## {group.capitalize()}\n\n"
            + "\n".join(f"`{entry.names}`\n:   {as_markdown(entry.help)}\n" for entry in entries)
            for group, entries in groups.items()
        )
        example = f"```bash\nposttrain {command.name} {command.example}\n```"
        pages[f"reference/cli/{file}"] = f"# posttrain {command.name}\n\n{command.help}\n\n{example}\n\n{told}\n"
        table.append(f"| [`posttrain {command.name}`]({file}) | {command.help} |")
    head = (
        "# Command line\n\nEvery command with its options, as `posttrain COMMAND --help-all` prints them. Options may also"
        " come from a [recipe](../config.md); the command line overrides it.\n\n"
    )
    tail = (
        "\n\nExit codes: 0 done; 1 a bug in posttrain, with a traceback; 2 a user error, reported in one line; 3 stopped"
        " by the health check, and saved; 130 interrupted by Ctrl-C, SIGTERM or SIGHUP, and saved.\n"
    )
    return {"reference/cli/index.md": head + "\n".join(table) + tail} | pages


def config_page() -> str:
    """All options with the commands that have them, and their names in other trainers."""
    found: dict[str, list[str]] = {}
    for command in COMMANDS:
        for entry in entries_of(app, command) if command.name in VERBS else ():
            found.setdefault(entry.names.replace(",", " ").split()[0], []).append(command.name)
    lines = ["| option | commands |", "|---|---|"]
    lines += [
        f"| `{option}` | {', '.join(f'[{name}](cli/{name}.md)' for name in names)} |"
        for option, names in sorted(found.items())
    ]
    return CONFIG + "\n".join(lines) + NAMES + aliases() + "\n"


CONFIG = """# Configuration

One set of options, three ways to give them: on the command line (`--max-tokens 64`), in a recipe (`max_tokens = 64`), or
from Python (`max_tokens=64`). The command line overrides the recipe.

A recipe is a TOML file with a table for each command that it configures. Settings of the algorithm without a flag go into
a table `settings`, by their place:

```toml
[rl]
model = "runs/sft"
tasks = "sums.jsonl"
env = "my.py:reward"
algorithm = "grpo"

[rl.settings]
"advantage.eps" = 1e-4
```

`posttrain rl --config recipe.toml --steps 100` reads the table `[rl]`. `posttrain algorithms NAME` lists every setting of an
algorithm. For an option name of another trainer, the command line reports the name here: see
[coming from another trainer](../guides/coming-from.md).

## Every option

"""

NAMES = """

## Names of other trainers

Option names of TRL, verl, OpenRLHF or Search-R1, and the option here.

| name | option |
|---|---|
"""


# -- what is declared elsewhere ------------------------------------------------------------------------------------------


def docstring(file: Path, name: str | None = None) -> str:
    """Of a module, or of a function or class in it, without importing it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if name is None:
        return ast.get_docstring(tree) or ""
    named = (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
    return next((ast.get_docstring(node) or "" for node in named if node.name == name), "")


def first_line(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def file_of(module: str) -> Path:
    return (ROOT / module.replace(".", "/")).with_suffix(".py")


def verifiers_page() -> str:
    modules: dict[str, list[str]] = {}
    for name in posttrain.verify.__all__:
        modules.setdefault(getattr(posttrain.verify, name).__module__, []).append(name)
    sections = [
        f"## {module.rpartition('.')[2].replace('_', ' ').capitalize()}\n\n{as_markdown(docstring(file_of(module)))}\n\n"
        + "\n\n".join(f"::: {module}.{name}" for name in names)
        for module, names in sorted(modules.items())
    ]
    return (
        "# Verifiers\n\nEvery function of `posttrain.verify`, from its docstring. [The guide](../guides/verifiers.md) "
        "shows which one to use, with examples.\n\n" + "\n\n".join(sections) + "\n"
    )


def environments_page() -> str:
    table, sections = ["| `--env` | environment |", "|---|---|"], []
    for name, target in sorted(BUILTIN.items()):
        module, _, function = target.partition(":")
        about = docstring(file_of(module))
        own = as_markdown(docstring(file_of(module), function))
        table.append(f"| [`{name}`](#{name}) | {as_markdown(first_line(about))} |")
        sections.append(f"## {name}\n\n`{target}`\n\n{as_markdown(about)}\n\n{own}\n")
    return (
        "# Environments\n\nEvery environment that `--env` takes by name. "
        "[The guide](../guides/environments-built-in.md) shows whole episodes of each.\n\n"
        + "\n".join(table)
        + "\n\n"
        + "\n".join(sections)
    )


def metrics_page() -> str:
    page = "# Metrics\n\n" + METRICS_ARE
    for group in (*QUESTIONS, ""):
        page += f"## {group or 'The others'}\n\n| metric | meaning | unit | shown |\n|---|---|---|---|\n"
        for metric in (metric for metric in METRICS if metric.group == group):
            meaning, shown = metric.meaning.replace("|", "\\|"), ", ".join(shown_in(metric))
            page += f"| `{metric.name}` | {meaning} | {metric.unit} | {shown} |\n"
        page += "\n"
    return page


METRICS_ARE = """`metrics.jsonl` has one line a step, with these names; what depends on the clock is in `timing.jsonl`.
A name in braces stands for what a run decides, such as a part of the reward. They are in the groups of the overview of
[view](../guides/view.md), which draws the others below these, and each with its meaning as a tooltip.

What your own reward returns as parts is logged as `reward/{part}`. What your own source, objective or component adds to its
`stats` is logged under the name that it gives: any name that does not stand here, best `own/NAME`. It is drawn in view and
in TensorBoard under its name.

"""


def shown_in(metric: Metric) -> Iterator[str]:
    if metric.terminal:
        yield f"terminal (`{metric.terminal}`)"
    if metric.plotted:
        yield "curves"
    if metric.checked:
        yield "health check"


def record_page() -> str:
    comments = dict(commented(Path(schema.__file__)))
    sections = []
    for title, about, columns in (
        ("One row per rollout", "Columns of `rollouts/*.parquet` and `evals/*.parquet`.", schema.SCALARS),
        ("Its tokens", "Lists over all tokens, with the transcripts end to end.", schema.TOKENS),
    ):
        lines = [f"| `{c.name}` | {column_type(c.type)} | {comments.get(c.name, '')} |" for c in columns]
        sections.append(f"## {title}\n\n{about}\n\n| column | type | meaning |\n|---|---|---|\n" + "\n".join(lines))
    numbers = "\n".join(f"| `{name}` | {comments.get(name, '')} |" for name in schema.NUMBERS)
    sections.append(f"## Numbers of scored tokens\n\nAll are float32.\n\n| column | meaning |\n|---|---|\n{numbers}")
    return (
        f"# The record of a run\n\n{first_line(docstring(Path(run_files.__file__)))}\n\n```text\n"
        + docstring(Path(run_files.__file__)).partition("\n\n")[2]
        + "\n```\n\nThe purpose of the files: [what a run leaves behind](../guides/runs.md).\n\n"
        + "\n\n".join([first_line(docstring(Path(schema.__file__))), *sections]) + "\n"
    )  # fmt: skip


def column_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list of {column_type(kind.value_type)}"
    if pa.types.is_struct(kind):
        return f"({', '.join(f'`{kind.field(i).name}`' for i in range(kind.num_fields))})"
    return str(kind)


def commented(file: Path) -> Iterator[tuple[str, str]]:
    """(first text of a line, the comment at its end) of a module."""
    strings: dict[int, str] = {}
    with tokenize.open(file) as lines:
        for token in tokenize.generate_tokens(lines.readline):
            if token.type == tokenize.STRING:
                strings.setdefault(token.start[0], token.string.strip("\"'"))
            elif token.type == tokenize.COMMENT and token.start[0] in strings:
                yield strings[token.start[0]], token.string.lstrip("# ").replace("|", "\\|")


def python_page() -> str:
    functions = [name for name in posttrain.__all__ if name.islower()]
    types = [name for name in posttrain.__all__ if not name.islower()]
    return (
        "# Python\n\n`import posttrain` gives the commands as functions, and the types that rewards and environments use. "
        "The options are those of [the command line](cli/index.md), with underscores.\n\n## Functions\n\n"
        + "\n\n".join(f"::: posttrain.{name}" for name in functions if name not in ("note", "recorded"))
        + "\n\n::: posttrain.envs.play.call_recording.note\n\n::: posttrain.envs.play.call_recording.recorded"
        + "\n\n## Types\n\n"
        + "\n\n".join(f"::: {posttrain.LATER.get(name, 'posttrain.core.types')}.{name}" for name in types)
        + "\n"
    )


def aliases() -> str:
    """A table of option names in other trainers, and the name here."""

    def flag(found: re.Match[str]) -> str:
        return f"`--{found[1].replace('_', '-')}`"

    return "\n".join(f"| `{name}` | {re.sub(r'{([^}]+)}', flag, here)} |" for name, here in sorted(ELSEWHERE.items()))
