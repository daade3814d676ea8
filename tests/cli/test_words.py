"""Documents and help texts use the field's words: each retired word has its replacement in one list.

A text joins the check by a line in `texts`, a folder of code by its name in `docstrings(...)` there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from places import ROOT

from posttrain.cli.command_table import COMMANDS
from posttrain.cli.help_pages import entries_of
from posttrain.cli.main import app

EPISODES = "(?:episode|rollout|task|environment|step|group|prompt|repl(?:y|ie)|demonstration|case)s?"

RETIRED = {
    r"knobs?": "setting",
    r"(?:an? part|parts) (?:of an algorithm|with a setting)": "component",
    r"rows? of (?:the table|policy gradients|distillation)|algorithms? (?:is|are) (?:an? )?rows?": "algorithm",
    r"row's (?:paper|bias|correction|components?|settings?|updates?|ratio)": "algorithm",
    r"(?<!\.)items?(?! of a (?:list|dict))": "preference example",
    r"hand(?:s|ed|ing)?[- ]?over": "weight sync; syncs, passes",
    r"play(?:s|ed|ing)? ahead": "asynchronous rollouts",
    rf"play(?:s|ed|ing)? (?:(?:an?|the|its|all|every|each|whole|these|those|of) )*{EPISODES}": "run an episode",
    rf"{EPISODES} (?:that )?(?:is|are|was|were|been|being) played|played again": "run, sampled, replayed",
    r"what plays(?: and scores)?": "the worker, the environment",
    r"patience": "timeout",
    r"canar(?:y|ies)": "weight probe",
    r"says?|said|saying": "returns, reports, defines, lists; replies, if it is the policy",
    r"tells?|told|telling": "reports, gets a message, is refused; distinguishes",
    r"lies|lie(?! about)|stands?(?!-?ins?\b| in for)|stood|standing": "is, is stored",
    r"accounts? for|accounted for|accounting for": "corrects, explains",
    r"who(?:so)?ever": "a noun: the user, the process",
    r"lets? go of": "frees, evicts, deletes",
    r"(?:is|are|was|were) heard": "is read, is accepted",
}
"""Pattern, of whole words -> the field's word."""

PATTERNS = {re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): word for pattern, word in RETIRED.items()}

CLAUSE = re.compile(r"(?:^|(?<=[.!?:] ))\W*(?:What|Who|Whatever|Whoever|Whichever)\b[^.?!]*(?:[.!]|$)")
"""A sentence that begins with a subject clause. A question is none, as it ends otherwise."""


def texts() -> Iterator[tuple[str, str]]:
    """(where, prose) of all that is checked."""
    yield from documents()
    yield from helps()
    yield from docstrings("recipes", "examples", "tools", "posttrain", "experiments")


LATER = {file.name for folder in ("fuzzing", "mutating") for file in (ROOT / "tools" / folder).glob("*.py")}
LATER |= {"fuzz.py", "mutants.py", "sanitize.py", "wheel.py", "models_table.py", "expected_gradients.py"}
"""Tools whose docstrings are not held to this yet."""


ITEMS = {"openai_responses.py", "functions.py"}
"""Modules where items are the API's own word, or goods of a shop."""


def documents() -> Iterator[tuple[str, str]]:
    for page in (ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))):
        name = str(page.relative_to(ROOT))
        if name != "docs/guides/verifiers-by-name.md":  # it consists of docstrings
            yield name, prose(page.read_text(encoding="utf-8").partition("## Words that are not used")[0])


def helps() -> Iterator[tuple[str, str]]:
    for command in COMMANDS:
        yield f"posttrain {command.name}", prose(command.help)
        for entry in entries_of(app, command):
            yield f"posttrain {command.name} {entry.names}", prose(entry.help)


def docstrings(*folders: str) -> Iterator[tuple[str, str]]:
    """Of modules, classes and functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for file in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py") if file.name not in LATER):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                text = re.sub(
                    r"^ *>>> .*?(?:\n\n|\Z)", "", ast.get_docstring(node) or "", flags=re.DOTALL | re.MULTILINE
                )
                text = re.sub(r"\bitems?\b", "goods", text) if file.name in ITEMS else text
                yield f"{file.relative_to(ROOT)} {getattr(node, 'name', '')}", prose(text)


def prose(text: str) -> str:
    """The text without code, headings, targets of links and quotations, each paragraph in one line.

    Also without replies that a page shows: quoted lines, and rows of a table with their rewards, such as (0.50).
    """
    text = re.sub(r"^```.*?^```$|<!--.*?-->|!\[.*?\]\(.*?\)", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?: {4}|#|>|\|.*\(\d\.\d\d\) \|).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`|--[\w.-]+|\w+\.(?:jsonl?|toml|py)\b", "`code`", text))
    text = re.sub(r"\"[^\"\n]*\"|\u201c[^\u201d]*\u201d", "quoted", re.sub(r"\n +(?=\w)", " ", text))
    text = re.sub(r"(?<!\n)\n(?!\n|[|#]|- |\d+\. )", " ", text)
    return re.sub(r"^\s*(?:- |\d+\. |\| )", "", text, flags=re.MULTILINE)


def retired(text: str) -> list[str]:
    """What is wrong in it, with the remedy."""
    words = [f"{hit[0]!r}: {word}" for pattern, word in PATTERNS.items() for hit in pattern.finditer(text)]
    clauses = [hit[0] for line in text.split("\n") for hit in CLAUSE.finditer(line) if not hit[0].endswith("?")]
    return words + [f"{clause!r}: begin with a noun" for clause in clauses]


def test_documents_and_help_use_the_words_of_the_field() -> None:
    wrong = [f"{where}: {word}" for where, text in texts() for word in retired(text)]
    assert not wrong, "\n".join(wrong)


def test_retired_words_are_found_in_prose_and_neither_in_code_nor_in_questions() -> None:
    page = "# What it says\n\nWhat is here?\n\n    say it\n\nThe option `--items` is\nnot told. "
    page += "What follows lies.\n\n```\nplayed\n```\n\n> Mom said.\n\n| The cat told him. (0.50) |\n"
    assert [word.partition(":")[0] for word in retired(prose(page))] == ["'told'", "'lies'", "'What follows lies.'"]
    assert retired("it plays all episodes; an item; the row's papers are handed over") != []
    assert retired(prose("The judge stands in for people. The policy plays both sides.")) == []
