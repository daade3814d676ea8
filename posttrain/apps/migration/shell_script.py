"""Reads the commands of a shell script without running it: words, quotes, continuations, and the variables that it sets.

Not a shell: what another program would print stays as it is written. So does a variable that a branch sets, unless the
condition compares texts that are known.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from posttrain.core.types import UserError

LONGEST = 200_000  # characters of a variable: one that doubles itself would fill the memory
MOST_WORDS = 20_000
MOST_DOCUMENTS = 100
LONGEST_REFERENCE = 4000  # characters of ${...} or $((...))

_NAME = re.compile(r"(?:export\s+|local\s+|declare\s+(?:-\w+\s+)*|readonly\s+)?([A-Za-z_]\w*)(\+?)=")
_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)(\w+)\2[^\n]*\n(.*?)\n[ \t]*\3[ \t]*(?:\n|$)", re.DOTALL)
BRANCH = "\x02"
"""Beginning of a word that only a branch adds to a variable: its name and the words, each after another beginning."""
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    **{"=": operator.eq, "==": operator.eq, "!=": operator.ne, "-eq": operator.eq, "-ne": operator.ne},
    **{"-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge},
}
_COMMENT = re.compile(r"^([ \t]*#[^\n]*?)\\+$", re.MULTILINE)  # a backslash at its end continues nothing
_LEADING = re.compile(r"(?:(?:do|\{|!)\s+)+")
_IN_BRANCH = re.compile(r"(?:(?:then|else|elif|if|do|\{|!|case\s+\S+\s+in)\s+)*(?:\(?[\w*|\"'.+ -]+\)\s*(?=\w+\+?=))?")
_NESTS = re.compile(r"\S*\b(?:bash|sh|zsh) -\w*c")
_READ = re.compile(r"\bread\s+(?:-\w+\s+(?:''\s+|\"\"\s+)?)*([A-Za-z_]\w*)\s*$")
_BRACED = re.compile(r"([A-Za-z_]\w*|\d)(?:\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_REDIRECTS = re.compile(r"[>]&|.&>", re.DOTALL)  # 2>&1, &> file: no end of a statement
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>?|<)&?(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_KEYWORDS = {"if", "then", "else", "elif", "fi", "do", "done", "{", "}", "nohup", "exec", "time", "sudo", "env", "!"}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def commands(text: str, depth: int = 0) -> Iterator[list[str]]:
    """Yield the words of each command of a script, variables in place; of `bash -c` and `eval`, those in their text.

    Raises UserError for a script that grows beyond any command.
    """
    variables = {name: os.environ[name] for name in ("HOME",) if name in os.environ} | {"PWD": "."}
    arrays: dict[str, list[str]] = {}
    text = re.sub(r"\\\n", " ", _COMMENT.sub(r"\1", text))
    text, documents = _without_documents(text)
    branches = _Branches()
    for statement, joined in _statements(text):
        if found := re.search(r"\x00(\d+)", statement):
            head = statement[: found.start()]
            if reads := _READ.search(head):
                variables[reads[1]] = _expanded(documents[int(found[1])], variables)
            continue
        runs = branches.enter(statement, joined, variables, arrays)
        statement = (_IN_BRANCH if branches.states else _LEADING).sub("", statement)
        if runs is False:
            continue
        words = _words(_assigned(statement, variables, arrays, runs is None), variables, arrays)
        while words and words[0] in _KEYWORDS:
            words = words[1:]
        inner = next(
            (words[i + 1] for i, word in enumerate(words[:-1]) if _NESTS.fullmatch(f"{words[i - 1]} {word}")), ""
        )
        if words[:1] == ["eval"]:
            inner = " ".join(words[1:])
        if inner and depth < 3:
            yield from commands(inner, depth + 1)
        elif words:
            yield words


class _Branches:
    """The branches around a statement and the tests before it: whether it runs, None where only a run knows."""

    def __init__(self) -> None:
        self.states: list[
            list[bool | None]
        ] = []  # of each `if` and `case`: whether its branches run, the last one here
        self.condition = False  # the statement before was one
        self.test: list[bool | None] = []  # that of a chain [ ... ] && ..., if the statements before are one

    def enter(
        self, statement: str, joined: str, variables: dict[str, str], arrays: dict[str, list[str]]
    ) -> bool | None:
        """Return whether a statement runs. `joined`: && or || before it, or ""."""
        first, _, rest = statement.partition(" ")
        first = first.split()[0]
        after_condition, self.condition = self.condition, first in ("if", "elif")
        known = _truth(rest if self.condition else statement, variables, arrays)
        if first in ("if", "case"):
            self.states.append([known if first == "if" else None])
        elif first in ("fi", "esac"):
            self.states[-1:] = []
        elif first in ("elif", "else") and self.states:
            known, before = known if first == "elif" else True, self.states[-1]
            before.append(False if True in before or known is False else None if None in before else known)
        elif after_condition and joined:
            self.states[-1][-1], self.condition = None, True
        runs = [branches[-1] for branches in self.states]
        if joined and self.test:
            runs.append(self.test[0] if joined == "&&" or self.test[0] is None else not self.test[0])
        if first in ("[", "[[", "test"):
            self.test = [None if joined else known]
        elif not joined:
            self.test = []
        return False if False in runs else None if None in runs else True


def _truth(statement: str, variables: dict[str, str], arrays: dict[str, list[str]]) -> bool | None:
    """Return whether a test holds that compares known texts or numbers; None for any other."""
    found = re.fullmatch(r"(!\s+)?\[\[?\s+(.*?)\s+\]?\]", statement.strip(), re.DOTALL)
    words = _words(found[2], variables, arrays) if found else []
    if found is None or any(character in word for word in words for character in "$`*?"):
        return None
    if len(words) == 2 and words[0] in ("-z", "-n"):
        value = (words[1] == "") == (words[0] == "-z")
    elif len(words) == 3 and words[1] in _COMPARISONS:
        sides = (words[0], words[2])
        if not words[1].startswith("-"):
            value = _COMPARISONS[words[1]](*sides)
        elif all(re.fullmatch(r"-?\d{1,18}", side) for side in sides):
            value = _COMPARISONS[words[1]](*map(int, sides))
        else:
            return None
    else:
        return None
    return value != bool(found[1])


def _assigned(statement: str, variables: dict[str, str], arrays: dict[str, list[str]], unsure: bool) -> str:
    """Set the variables that a statement begins with, and return the rest of it. `unsure`: perhaps it does not run."""
    while assignment := _NAME.match(statement):
        name, adds = assignment[1], bool(assignment[2])
        rest = statement[assignment.end() :]
        if rest.startswith("("):
            inside, rest = _bracketed(rest)
            new = _words(inside, variables, arrays)
            if unsure and new:
                new = [_of_branch(name, " ".join(new))]
            arrays[name] = [*arrays.get(name, []), *new] if adds or unsure else new
        else:
            value, rest = _first_word(rest)
            text, before = "".join(_unquoted(value, variables, arrays)[:1]), variables.get(name, "")
            text = _bounded(before + text if adds else text)
            if not unsure or rest.strip() or text == before:
                variables[name] = text
            elif before and text.startswith(before):
                variables[name] = f"{before} {_of_branch(name, text.removeprefix(before))}"
            else:
                variables.pop(name, None)
        statement = rest.lstrip()
    return statement


def _of_branch(name: str, words: str) -> str:
    return f"{BRANCH}{name}:" + "".join(f"{BRANCH}{word}" for word in words.split())


def _bounded(text: str) -> str:
    if len(text) > LONGEST:
        raise UserError(f"a variable of the script has more than {LONGEST:,} characters: give the command itself")
    return text


def _without_documents(text: str) -> tuple[str, list[str]]:
    """Return the text with each here-document replaced by a mark, and their contents."""
    documents: list[str] = []

    def taken(found: re.Match[str]) -> str:
        documents.append(found[4])
        return f"\x00{len(documents) - 1}\n"

    few = text.count("<<") <= MOST_DOCUMENTS  # each one without an end is searched for to the end of the text
    return _HEREDOC.sub(taken, text) if few else text, documents


def _statements(text: str) -> Iterator[tuple[str, str]]:
    """Yield the statements, each with the && or || that joins it to the one before, or "".

    Ends of lines, ;, &, && and | end one, outside quotes and brackets. Comments are left out.
    """
    start, place, depth, before, joined = 0, 0, 0, "", ""
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 2
            continue
        if character in "'\"`":
            place = _end_of_quote(text, place)
        elif character == "(" or (character == "{" and text[place - 1 : place] == "$"):
            depth += 1
        elif character in ")}" and depth:
            depth -= 1
        elif character == "#" and (place == 0 or text[place - 1] in " \t\n;("):
            end = text.find("\n", place)
            before, start = before + text[start:place], len(text) if end < 0 else end
            place = start
            continue
        elif depth == 0 and character in "\n;&|" and not (character == "&" and _REDIRECTS.match(text, place - 1)):
            if statement := (before + text[start:place]).strip():
                yield statement, joined
                joined = text[place : place + 2] if text[place : place + 2] in ("&&", "||") else ""
            before, start = "", place + 1
        place += 1
    if statement := (before + text[start:]).strip():
        yield statement, joined


def _end_of_quote(text: str, place: int) -> int:
    """Return the place of the quote that ends the one here; of the text's last character if none does."""
    quote = text[place]
    escapes = quote != "'" or text[max(0, place - 1) : place] == "$"  # $'...'
    place += 1
    while place < len(text) and text[place] != quote:
        place += 2 if text[place] == "\\" and escapes else 1
    return min(place, len(text) - 1)


def _bracketed(text: str, opening: str = "(", closing: str = ")") -> tuple[str, str]:
    """Split "( ... ) rest" into its inside and the rest."""
    place, depth = 0, 0
    while place < len(text):
        character = text[place]
        if character in "'\"":
            place = _end_of_quote(text, place)
        elif character == opening:
            depth += 1
        elif character == closing:
            depth -= 1
            if depth == 0:
                return text[1:place], text[place + 1 :]
        place += 1
    return text[1:], ""


def _first_word(text: str) -> tuple[str, str]:
    """Split a text at the first space outside quotes and brackets."""
    place = 0
    while place < len(text) and not text[place].isspace():
        if text[place] == "\\":
            place += 1
        elif text[place] in "'\"`":
            place = _end_of_quote(text, place)
        elif text[place : place + 2] in ("$(", "${"):
            closing = ")" if text[place + 1] == "(" else "}"
            _, rest = _bracketed(text[place + 1 :], text[place + 1], closing)
            place = len(text) - len(rest) - 1
        place += 1
    return text[:place], text[place:]


def _words(text: str, variables: dict[str, str], arrays: dict[str, list[str]]) -> list[str]:
    words: list[str] = []
    while text := text.lstrip():
        word, text = _first_word(text)
        if redirected := _REDIRECTION.fullmatch(word):
            text = text if redirected[1] else _first_word(text.lstrip())[1]
            continue
        words += _unquoted(word, variables, arrays)
        if len(words) > MOST_WORDS:
            raise UserError(f"the script has more than {MOST_WORDS:,} words: give the command itself")
    return words


def _unquoted(word: str, variables: dict[str, str], arrays: dict[str, list[str]]) -> list[str]:
    """Return the words that one word becomes: quotes removed, variables in place, split where none quotes them."""
    if found := re.fullmatch(r"\"?\$\{(\w+)\[[@*]\]\}\"?", word):
        return arrays.get(found[1], [word])
    bare = re.fullmatch(r"\$\{?(\w+)\}?", word)
    if bare and bare[1] in variables:
        value = variables[bare[1]]
        return [value] if "$(" in value or "`" in value else value.split() or [""]
    text, place = "", 0
    while place < len(word):
        character = word[place]
        if character == "'":
            end = _end_of_quote(word, place)
            text += word[place + 1 : end]
            place = end
        elif character == '"':
            end = _end_of_quote(word, place)
            inside = re.sub(r"\\([\"\\$`])", lambda found: found[1], _expanded(word[place + 1 : end], variables))
            text += inside
            place = end
        elif character == "\\":
            text += word[place + 1 : place + 2]
            place += 1
        elif word[place : place + 2] == "$'":
            end = _end_of_quote(word, place + 1)
            text += _ESCAPED.sub(lambda found: _ESCAPES.get(found[1], found[0]), word[place + 2 : end])
            place = end
        elif character == "$":
            taken, length = _variable(word[place : place + LONGEST_REFERENCE], variables)
            text += taken
            place += length - 1
        else:
            text += character
        place += 1
    return [] if word in ("$@", "$*", '"$@"') else [_bounded(text)]


def _expanded(text: str, variables: dict[str, str]) -> str:
    out, place = [], 0
    while place < len(text):
        if text[place] == "\\":
            out.append(text[place : place + 2])
            place += 2
        elif text[place] == "$":
            taken, length = _variable(text[place : place + LONGEST_REFERENCE], variables)
            out.append(taken)
            place += length
        else:
            out.append(text[place])
            place += 1
    return _bounded("".join(out))


def _variable(text: str, variables: dict[str, str], depth: int = 0) -> tuple[str, int]:
    """Return the value of the variable at the beginning, and its length in the text.

    A variable that the script does not set, and a command's output, stay as written.
    """
    if depth > 20:
        return text, len(text)
    if text.startswith("$(("):
        inside, rest = _bracketed(text[1:])
        number = _arithmetic(inside[1:-1], variables)
        return (text[: len(text) - len(rest)] if number is None else str(number)), len(text) - len(rest)
    if text.startswith("$("):
        inside, rest = _bracketed(text[1:])
        length = len(text) - len(rest)
        return "." if inside.strip() == "pwd" else text[:length], length
    if text.startswith("${"):
        inside, rest = _bracketed(text[1:], "{", "}")
        length = len(text) - len(rest)
        found = _BRACED.fullmatch(inside)
        if found is None:
            return text[:length], length
        if found[1] in variables and (variables[found[1]] or not found[2]):
            return variables[found[1]], length
        if found[2]:
            other = found[3].strip("\"'")
            bare = re.fullmatch(r"\$\{?\w+\}?", other)
            value = _variable(other, variables, depth + 1)[0] if bare else _expanded(other, variables)
            if found[2].endswith("="):
                variables[found[1]] = value
            return value, length
        return text[:length], length
    if found := re.match(r"\$([A-Za-z_]\w*)", text):
        return variables.get(found[1], found[0]), found.end()
    if text[1:2].isdigit():  # an argument of the script or of a function
        return text[:2], 2
    return ("", 2) if text[1:2] in ("@", "*") else ("$", 1)


def _arithmetic(text: str, variables: dict[str, str]) -> int | None:
    """Return the value of whole numbers with + - * / % and brackets; None for anything else."""
    expression = re.sub(r"\$\{?(\w+)\}?", r"\1", text)
    if len(expression) > 1000:
        return None

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return int(variables[node.id])
        if isinstance(node, ast.BinOp):
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise ValueError("no arithmetic")

    try:
        found = value(ast.parse(expression.strip(), mode="eval").body)
    except (ValueError, KeyError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return found if abs(found) < 10**15 else None
