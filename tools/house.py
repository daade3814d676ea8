"""Draws the rooms of the package on their floors: python tools/house.py writes docs/assets/house.svg, and counts code.

The floors are those that tests/tools/test_imports.py enforces: a room imports from its own floor or a lower one.
"""

from __future__ import annotations

import ast
import tokenize
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_CODE = {
    tokenize.ENCODING,
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
PLACE = ROOT / "docs" / "assets" / "house.svg"
CAPTIONS = {
    "core": "types, batches, protocols, seeds: what every room uses",
    "system": "child processes, worker threads, HTTP, user code",
    "sandbox": "runs programs that a policy wrote",
    "data": "files to rows, rows to tasks",
    "verify": "functions that judge a reply",
    "models": "decoder, transformers models, adapters, tokenizer, losses",
    "engines": "sample: local, vLLM, SGLang, pools",
    "learners": "hold weights, update them",
    "envs": "play episodes; built-in environments, bridges",
    "algorithms": "components, and the tables of algorithms",
    "config": "every option, declared once",
    "runs": "a run's folder, record, health, terminal",
    "training": "one file a verb, sources, loop, trainer",
    "services": "judges, reward models, retrievers",
    "apps": "view, audit, plan: programs on top of runs",
    "cli": "the command: words to options, exit codes",
}
WIDTH, HEIGHT, GAP, ROOF = 720, 46, 6, 78
STYLE = (
    "<style>text{font-family:system-ui,sans-serif;text-anchor:middle;fill:#1c2333}"
    ".room{font-size:15px;font-weight:600}.caption{font-size:12px;fill:#4a5468}"
    ".roof{font-size:14px;font-weight:600;fill:#fff}</style>"
)


def floors() -> list[list[str]]:
    """Names of the rooms, the lowest floor first."""
    tree = ast.parse((ROOT / "tests" / "tools" / "test_imports.py").read_text(encoding="utf-8"))
    [value] = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"
    ]
    return [sorted(rooms) for rooms in ast.literal_eval(value) if rooms != {"__main__"}]


def drawn() -> str:
    rows = floors()[::-1]
    height = ROOF + len(rows) * (HEIGHT + GAP) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="The rooms of posttrain on their floors">',
        STYLE,
        f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#f6f7fb"/>',
        f'<polygon points="{WIDTH / 2},8 {WIDTH - 20},{ROOF - 6} 20,{ROOF - 6}" fill="#3f51b5"/>',
        f'<text class="roof" x="{WIDTH / 2}" y="{ROOF - 30}">posttrain ...</text>',
        f'<text class="roof" x="{WIDTH / 2}" y="{ROOF - 13}">import posttrain</text>',
    ]
    for number, rooms in enumerate(rows):
        wide = (WIDTH - 40 - GAP * (len(rooms) - 1)) / len(rooms)
        for place, room in enumerate(rooms):
            x, y = 20 + place * (wide + GAP), ROOF + number * (HEIGHT + GAP)
            middle = x + wide / 2
            parts += [
                f'<rect x="{x:g}" y="{y}" width="{wide:g}" height="{HEIGHT}" rx="6" fill="#fff" stroke="#9fa8da"/>',
                f'<text class="room" x="{middle:g}" y="{y + 19}">{room}/</text>',
                f'<text class="caption" x="{middle:g}" y="{y + 36}">{escape(CAPTIONS[room])}</text>',
            ]
    parts.append(f'<text class="caption" x="{WIDTH / 2}" y="{height - 10}">imports point down, never up</text></svg>\n')
    return "\n".join(parts)


def code_lines(file: Path) -> int:
    """Return the number of lines with code: not blank lines, comments, docstrings and other unused strings."""
    tree = ast.parse(file.read_bytes())
    alone = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    strings = {line for node in alone if isinstance(node.value.value, str) for line in _lines(node)}
    with open(file, "rb") as content:
        tokens = [token for token in tokenize.tokenize(content.readline) if token.type not in NO_CODE]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - strings)


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


if __name__ == "__main__":
    files = sorted((ROOT / "posttrain").rglob("*.py"))
    print(f"{sum(map(code_lines, files)):,} code lines in {len(files)} files")
    PLACE.write_text(drawn(), encoding="utf-8")
