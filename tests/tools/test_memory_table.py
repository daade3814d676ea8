"""The table of what fits is that of the estimate."""

from __future__ import annotations

from memory_table import BEGIN, DOCUMENT, END, rows


def test_the_table_of_the_guide_is_what_the_estimate_says() -> None:
    assert DOCUMENT.read_text().split(BEGIN)[1].split(END)[0].splitlines() == rows(), "run python tools/memory_table.py"
