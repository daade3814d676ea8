"""The command `posttrain data`: rows as a model reads them, before a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from posttrain.core.coerce import read_variable
from posttrain.core.messages import safe
from posttrain.core.transcripts import Mask
from posttrain.core.types import UserError

if TYPE_CHECKING:
    from posttrain.apps.data_report import DataReport, MarkedRow

TRAINED, PLAIN = "\x1b[32m", "\x1b[0m"  # green
OPEN, CLOSE = "[[", "]]"
LONGEST = 1200  # most characters of an example
PAGE = 100  # columns of the report where no terminal has fewer or more
NAMED = 3  # most rows listed as invalid or too long; further ones are counted


def data(
    rows: str,
    /,
    *,
    model: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    fields: Annotated[dict[str, str] | None, Parameter(negative=())] = None,
    prompt_template: str | None = None,
    chat: bool | None = None,
    system: str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Annotated[dict[str, Any] | None, Parameter(negative=())] = None,
    mask: Mask = "assistant",
    number: int = 3,
) -> int:
    """Show rows as a model reads them: shape, lengths in tokens, repetitions, what is trained. Nothing is written.

    Parameters
    ----------
    rows
        File of rows, a folder of such files, or the name of a dataset.
    model
        Folder of the model whose tokenizer and template read the rows; no weights are read.
    split
        Split of a dataset that has several.
    limit
        Read only the first N rows.
    fields
        Rename columns: --fields.prompt question.
    prompt_template
        Build each prompt from columns: "Question: {question}\\nAnswer:".
    chat
        Wrap plain prompts in the model's chat template. Default: as a run with this model does.
    system
        System message before the prompts.
    chat_template
        Chat template: a Jinja file, or chatml. Default: the model's own.
    chat_template_kwargs
        Variables of the chat template: --chat-template-kwargs enable_thinking=false.
    mask
        Messages that sft trains: assistant, last or all.
    number
        Number of rows to show.
    """
    from posttrain.apps.data_report import report
    from posttrain.data.rows import load_rows
    from posttrain.models.checkpoint_summary import outline
    from posttrain.runs.chat_choice import Chatting, chatting
    from posttrain.runs.checkpoint import resolve
    from posttrain.runs.terminal.output import Output, columns, fancy, wrapped
    from posttrain.training.row_warnings import warn_near_names

    if number < 0:
        raise UserError(f"--number {number} must be at least 0, the number of rows shown")
    warn_near_names(fields or {})
    loaded = load_rows(rows, split, limit)
    known, way = None, Chatting()
    if model is not None:
        folder = resolve(model)
        known = outline(folder, chat_template, {k: read_variable(v) for k, v in (chat_template_kwargs or {}).items()})
        way = chatting(_Asked(chat, system, chat_template), folder, known.tokenizer, known.ends)
    elif chat is not None or system is not None or chat_template is not None or chat_template_kwargs:
        raise UserError(
            "--chat, --system, --chat-template and --chat-template-kwargs need --model: the folder whose template wraps "
            "the prompts"
        )
    found = report(loaded, {"fields": fields or {}, "prompt_template": prompt_template}, known, way, number, mask)
    out = Output(sys.stdout)
    width = columns(out) or PAGE
    template = [_template(way.on, way.because)] if way.template else []
    for line in [*lines(found), *template]:
        print(wrapped(line, width, 12))
    colours = fancy(out) and not os.environ.get("NO_COLOR")
    for example in found.examples:
        print("\n".join(["", *drawn(example, colours)]))
    return 0 if found.ok else 2


class _Asked:
    """The options that determine how plain prompts are shown to the model."""

    def __init__(self, chat: bool | None, system: str | None, chat_template: str | None) -> None:
        self.chat, self.system, self.chat_template = chat, system, chat_template


def _template(on: bool, because: str) -> str:
    """Return the line that explains how plain prompts are shown to a model that has a chat template."""
    form = "user messages in the model's chat template" if on else "bare text; --chat wraps them"
    return f"plain       prompts are {form}" + (f" ({because})" if because else "")


def lines(found: DataReport) -> Iterator[str]:
    """Yield the lines of a report, without its examples."""
    from posttrain.apps.data_report import MEASURED, PERCENTILES, percentiles

    yield f"shape       {found.shape} (posttrain {found.verb})"
    yield f"columns     {', '.join(f'{safe(name)}: {kind}' for name, kind in found.columns.items())}"
    yield f"rows        {found.rows:,}; a run uses {found.used:,}"
    if found.prompts:
        repeated = found.used - found.prompts
        yield f"prompts     {found.prompts:,} different ones" + (f", {repeated:,} repetitions" if repeated else "")
    if found.merged:
        yield f"merged      {found.merged:,} rows are equal to an earlier one in every column: each is kept once"
    for reason, count in found.left_out.items():
        yield f"left out    {count:,} rows {reason}"
    if found.lengths:
        some = f", of {found.measured:,} rows" if found.used > MEASURED else ""
        yield f"tokens      smallest, {', '.join(f'{p}%' for p in PERCENTILES[1:-1])}, largest{some}"
        for name, counts in found.lengths.items():
            yield f"  {name:<10}{', '.join(f'{count:,}' for count in percentiles(counts))}"
    if found.too_long:
        yield (
            f"too long    {len(found.too_long):,} of {found.measured:,} rows for the context of {found.context:,} tokens, "
            f"left out by default (--too-long): {_named(found.too_long)}"
        )
    for problem, places in list(found.wrong.items())[:NAMED]:
        yield f"wrong       {_named(places)}: {safe(problem)}"
    if found.lost:
        yield f"reasoning   {found.lost}"
    if found.marked:
        yield f"marks       {found.marked}"
    if len(found.wrong) > NAMED:
        yield f"wrong       {sum(map(len, list(found.wrong.values())[NAMED:])):,} more rows, for other reasons"


def _named(places: Sequence[str]) -> str:
    more = f" and {len(places) - NAMED:,} more" if len(places) > NAMED else ""
    return ", ".join(map(safe, places[:NAMED])) + more


def drawn(example: MarkedRow, colours: bool) -> Iterator[str]:
    """Yield the lines of an example, with the trained text in colour or in brackets."""
    left, right = (TRAINED, PLAIN) if colours else (OPEN, CLOSE)
    trained = f"{example.trained:,} of them trained" if example.trained else "behind which a reply is sampled"
    yield f"-- {safe(example.where)}" + (f": {example.tokens:,} tokens, {trained}" if example.tokens else "")
    for name, text in zip_longest(example.names, example.texts):
        if name:
            yield f"-- {name}"
        room, parts = LONGEST, []
        for piece in text:
            kept = piece.text if len(piece.text) <= room else f"{piece.text[:room]} ... {len(piece.text) - room:,} more"
            room = max(0, room - len(piece.text))
            shown = "\n".join(map(safe, kept.split("\n")))
            parts.append(f"{left}{shown}{right}" if piece.trained else shown)
        yield "".join(parts)
