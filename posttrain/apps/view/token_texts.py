"""The text of each token, as far as a token has text of its own.

The bytes of one character may be spread over several tokens. Such tokens are decoded together: the first gets the
character and the others get "", so that the joined pieces are the text.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.types import UserError
from posttrain.runs.run_files import CHECKPOINTS
from posttrain.runs.run_reading import read_run

if TYPE_CHECKING:
    from posttrain.models.tokenizer.tokenizer import Tokenizer

BROKEN = "\ufffd"  # a decoder's replacement for bytes that are no character
TOGETHER = 8  # most tokens that may share a character


def vocabulary_of(run: Path) -> list[str]:
    """Return the texts of a run's tokens, by id; [] without a run's folder or a tokenizer."""
    return TokenPieces(run, read_run(run)).vocabulary() if run.is_dir() else []


class TokenPieces:
    """Decodes a run's tokens one by one; without a tokenizer, the pieces are their ids."""

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        self._folder, self._run = folder, run
        self._tokenizer: Tokenizer | None = None
        self._known: dict[int, str] = {}
        self._tried = False
        self._lock = threading.Lock()

    @property
    def known(self) -> bool:
        """Whether there is a tokenizer."""
        self._open()
        return self._tokenizer is not None

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        self._open()
        if self._tokenizer is None:
            return [f"⟨{token}⟩" for token in tokens]
        for token in set(tokens) - self._known.keys():
            self._known[token] = self._decoded([token])
        pieces = [self._known[token] for token in tokens]
        place = 0
        while place < len(pieces):
            if BROKEN in pieces[place]:
                place = self._join(tokens, pieces, place)
            else:
                place += 1
        return pieces

    def vocabulary(self) -> list[str]:
        """Return the text of every token id; [] without a tokenizer. Bytes that are no character become U+FFFD."""
        self._open()
        return (
            [] if self._tokenizer is None else [self._decoded([token]) for token in range(self._tokenizer.vocab_size)]
        )

    def _join(self, tokens: Sequence[int], pieces: list[str], begin: int) -> int:
        """Give the characters that several tokens make together to the first of them; return the place behind them."""
        for end in range(begin + 2, min(begin + TOGETHER, len(pieces)) + 1):
            together = self._decoded(list(tokens[begin:end]))
            if BROKEN not in together:
                pieces[begin:end] = [together] + [""] * (end - begin - 1)
                return end
        return begin + 1

    def _decoded(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        try:
            return self._tokenizer.decode(tokens)
        except UserError:
            return "".join(f"⟨{token}⟩" for token in tokens)

    def _open(self) -> None:
        with self._lock:
            if self._tried:
                return
            from posttrain.models.tokenizer.tokenizer import Tokenizer

            for folder in self._places():
                try:
                    self._tokenizer = Tokenizer.load(folder)
                    break
                except (UserError, OSError):
                    continue
            self._tried = True

    def _places(self) -> list[Path]:
        """Return the folders where this run's tokenizer may be, the likeliest first. Nothing is downloaded."""
        own = sorted(self._folder.glob(f"{CHECKPOINTS}/step-*"), reverse=True)
        named = [self._run.get("initial"), self._run.get("config", {}).get("model")]
        given = [Path(name) for name in named if isinstance(name, str) and name]
        tried = [*own, *given, *(newest for path in given for newest in sorted(path.glob("checkpoints/step-*"))[-1:])]
        files = ("tokenizer.json", "adapter_config.json", "vocab.json", "tokenizer.model")
        return [path for path in tried if any((path / name).is_file() for name in files)]
