"""Export of a run to one HTML file, which opens from disk without a server, a network or further files.

It selects the exported rollouts: whole groups from the last step back, or those that a condition selects. The
pages are those of `view`; the file holds their JSON responses, compressed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.apps.view.api import Answers
from posttrain.apps.view.evaluation_file import EvaluationFile
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.picture_files import picture
from posttrain.apps.view.rollout_files import RolloutPart
from posttrain.apps.view.rollout_filters import ViewQuestion
from posttrain.core.types import UserError
from posttrain.runs.record.rollout_reading import plainly

STATIC = Path(__file__).parent / "static"
ROLLOUTS = 200
MOST = 5000
PICTURES = 1_500_000  # bytes of all pictures together; base64 takes a third more


@dataclass(frozen=True)
class Selection:
    """The choice of exported rollouts: at most `rollouts` of those selected by a condition or by a page's filters."""

    rollouts: int = ROLLOUTS
    where: str = ""
    query: Mapping[str, str] | None = None  # filters, as in the page's address

    @classmethod
    def of(cls, query: Mapping[str, str], where: str = "") -> Selection:
        """Read a selection from an address. Raises UserError for an invalid number of rollouts."""
        text = query.get("rollouts", str(ROLLOUTS))
        if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MOST:
            raise UserError(f"rollouts is a number from 1 to {MOST}, not {text[:20]!r}")
        return cls(int(text), where, {name: value for name, value in query.items() if name != "rollouts"})


def exported(run: OpenRun, selection: Selection) -> bytes:
    """Return the content of the HTML file."""
    return packed(gathered(run, selection)[0])


def gathered(run: OpenRun, selection: Selection) -> tuple[dict[str, Any], list[str]]:
    """Return the file's data, and the problems with parts left out. Raises UserError where nothing is left."""
    answers = Answers([run])
    rows, problems = [], [run.store.problem] if run.store.problem else []
    kept: dict[str, Any] = {"runs": answers.of("runs", {}), "0/overview": answers.of("0/overview", {})}
    pictures: dict[str, None] = {}  # their names in order
    unread: list[str] = []
    for row in _selected(run, selection):
        place = f"{RolloutPart(row['step'], row['held_out']).name}/{row['index']}"
        try:
            answer = kept[f"0/rollout/{place}"] = answers.of(f"0/rollout/{place}", {})
        except UserError as error:
            unread.append(str(error))
            continue
        rows.append(row)
        pictures |= dict.fromkeys(answer["media"] or ())
    if unread:
        problems.append(f"{len(unread)} rollouts are left out: {unread[0]}")
    if problems and not rows:
        raise UserError(problems[-1])
    kept["pictures"] = _pictures(run.folder, list(pictures))
    if missing := len(pictures) - len(kept["pictures"]):
        problems.append(
            f"{missing} of {len(pictures)} pictures are left out: they are gone, or beyond {PICTURES / 1e6:g} MB"
        )
    kept["runs"]["runs"][0]["problem"] = "; ".join(problems) or None
    kept["rows"] = rows
    kept["total"] = len(run.store.rows)
    return kept, problems


def figures_of(evaluation: EvaluationFile) -> dict[str, Any]:
    """Return the data of a file that holds the figures of an evaluation alone."""
    answers = Answers([], [evaluation])
    return {path: answers.of(path, {}) for path in ("runs", "evaluation/0")}


def _pictures(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return name -> data URL of as many pictures as there is room for."""
    found, left = {}, PICTURES
    for name in names:
        one = picture(folder, name.removeprefix("sha256:"), left)
        if one is not None:
            found[name] = f"data:{one[1]};base64,{b64encode(one[0]).decode('ascii')}"
            left -= len(one[0])
    return found


def _selected(run: OpenRun, selection: Selection) -> list[dict[str, Any]]:
    query = dict(selection.query or {})
    if selection.where:
        query["where"] = selection.where
    query.pop("as", None)
    if not query:
        query = {"step": f"{_latest(run, selection.rollouts)}.."}
    found: list[dict[str, Any]] = ViewQuestion.of(query, run.store).page(0, selection.rollouts)["rows"]
    if not found and run.store.files:
        raise UserError("no rollout fits what is to be exported")
    return found


def _latest(run: OpenRun, rollouts: int) -> int:
    """Return the step from which on there are at least `rollouts` rollouts, so that whole groups are exported."""
    parts = [part for part in sorted(run.store.files, reverse=True) if not part.held_out]
    count, step = 0, 0
    for part in parts:
        own = run.store.rows.of_part(part)
        count, step = count + own.stop - own.start, part.step
        if count >= rollouts:
            break
    return step


def packed(kept: Mapping[str, Any]) -> bytes:
    """Return the HTML page with everything inside. The content is data: it is compressed, and only parsed as JSON."""
    data = json.dumps(plainly(kept), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace"
    )
    packed = b64encode(gzip.compress(data, 9, mtime=0)).decode("ascii")
    style = "".join(_read(name) for name in ("vendor/uplot.css", "app.css"))
    vendored = [_read(name) for name in ("vendor/htm-preact.js", "vendor/uplot.js")]
    script = bundled()
    hashes = " ".join(f"'sha256-{_hash(text)}'" for text in [*vendored, script])
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'sha256-{_hash(style)}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>posttrain view</title>
<style>{style}</style></head><body><div id="app"></div>
<script type="application/gzip" id="data">{packed}</script>
{"".join(f"<script>{text}</script>" for text in vendored)}<script type="module">{script}</script></body></html>
"""
    return page.encode()


_IMPORT = re.compile(r"^import\s+(?:\{[^}]*\}\s+from\s+)?\"\./(\w+\.js)\";\n", re.MULTILINE)


def bundled() -> str:
    """Return the front end's modules as one script, each after its imports.

    A test checks that their names do not collide.
    """
    done: dict[str, str] = {}

    def add(file: str) -> None:
        if file in done:
            return
        text = _read(file)
        done[file] = ""
        for imported in _IMPORT.findall(text):
            add(imported)
        body = re.sub(
            r"^export (?=(?:async )?(?:function|const|let|class)\b)", "", _IMPORT.sub("", text), flags=re.MULTILINE
        )
        del done[file]
        done[file] = body

    add("main.js")
    return "\n".join(done.values())


def _read(name: str) -> str:
    text = (STATIC / name).read_text(encoding="utf-8")
    assert "</script" not in text and "</style" not in text, f"{name} would end its own element"
    return text


def _hash(text: str) -> str:
    return b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
