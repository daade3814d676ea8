"""Builds and opens indices of both kinds: queries in, passages with scores out.

Example:

    build("passages.jsonl", "runs/index")
    [[first, *others]] = open_index("runs/index").search(["who wrote The Hobbit?"], k=3)
    first.title, first.text, first.score
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.core.types import UserError
from posttrain.services.retrieval.bm25 import BM25, K1, B, Writer
from posttrain.services.retrieval.dense import Dense, Encoder, write_vectors
from posttrain.services.retrieval.encoders import encoder_of, load_encoder
from posttrain.services.retrieval.index_folder import (
    Manifest,
    check,
    consistent_files,
    described,
    drafted,
    finish,
    is_fresh,
)
from posttrain.services.retrieval.passages import Passage, Passages, PassageSource, write_passages

MOST = 1000  # most passages per query


class Hit(NamedTuple):
    """A passage found by a search."""

    passage: Passage
    score: float

    @property
    def title(self) -> str:
        return self.passage.title

    @property
    def text(self) -> str:
        return self.passage.text


class PassageIndex:
    """An open index. It needs only a few MB of memory of its own: everything large is memory-mapped."""

    def __init__(self, folder: Path, manifest: Manifest, encoder: Encoder | None) -> None:
        """Open the index's files. Raises UserError for damaged files."""
        self.folder, self.manifest = folder, manifest
        self._searcher: BM25 | Dense
        with consistent_files(folder):
            self.passages = Passages(folder, manifest.count)
            if encoder is not None:
                self._searcher = Dense(folder, manifest.count, manifest.settings, encoder)
            else:
                self._searcher = BM25(folder, manifest.count)

    def __len__(self) -> int:
        return len(self.passages)

    @property
    def description(self) -> str:
        return f"{self.folder}, {len(self):,} passages, {self.manifest.kind}"

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[Hit]]:
        """Return for each query the best `k` passages, the best first; fewer if fewer match.

        Raises UserError for damaged files, or an encoder that fails.
        """
        if not 0 < k <= MOST:
            raise UserError(f"k is {k}: give a number from 1 to {MOST}")
        with consistent_files(self.folder):
            found = self._searcher.search([query.encode("utf-8", "replace").decode() for query in queries], k)
            return [[Hit(self.passages[place], score) for place, score in own] for own in found]


def build(
    passages: str | Path | Iterable[Mapping[str, Any]],
    folder: str | Path,
    *,
    split: str | None = None,
    limit: int | None = None,
    fields: Mapping[str, str] | None = None,
    k1: float = K1,
    b: float = B,
    encoder: Encoder | str | None = None,
    faiss: str | None = None,
    overwrite: bool = False,
    **encoding: Any,
) -> Manifest:
    """Build an index of passages: rows {"title", "text"} or {"contents"}, perhaps with "id", as `load_rows` reads them.

    With `encoder` the index is dense: a folder of a transformers encoder (`encoding`: see `encoders.load_encoder`),
    "my.py:encode", or an object; `faiss`: the kind of FAISS index, such as "HNSW32"; None: plain products. Otherwise it
    is an index of BM25, with `k1` and `b`. Raises UserError, in one line, for any error, and then leaves the folder
    unchanged.
    """
    source, place = PassageSource(passages, split, limit, fields or {}), Path(folder).expanduser()
    loaded = load_encoder(encoder, **encoding) if isinstance(encoder, str) else encoder
    if loaded is None and (faiss is not None or encoding):
        raise UserError(
            f"--{'faiss' if faiss is not None else next(iter(encoding)).replace('_', '-')} has no effect without --encoder: "
            "leave it out"
        )
    with drafted(place, overwrite) as draft:
        from_file = described(source.file) if source.file is not None else {}
        writer = Writer(k1, b) if loaded is None else None
        count, digest = write_passages(source, draft, writer.add if writer is not None else lambda passage: None)
        if loaded is not None:
            settings = write_vectors(Passages(draft, count), loaded, faiss, draft)
        else:
            assert writer is not None
            settings = writer.write(draft)
        if from_file and not is_fresh(from_file):
            raise UserError(f"{source.file} has changed while the index was made of it: build it again")
        told = {
            "kind": "bm25" if loaded is None else "dense", "count": count, "passages": digest, "settings": settings,
            "source": from_file, "encoder": loaded.identity if loaded is not None else {}, "made_by": _versions(),
        }  # fmt: skip
        finish(draft, told)
    return Manifest.read(place)


def open_index(folder: str | Path, encoder: Encoder | str | None = None) -> PassageIndex:
    """Open the index in a folder. `encoder`: that of a dense index, if it has moved or was given as an object.

    Raises UserError if there is no index, if it is damaged, or if its sources have changed.
    """
    place = Path(folder).expanduser()
    manifest = Manifest.read(place)
    check(place, manifest)
    if manifest.kind == "bm25":
        return PassageIndex(place, manifest, None)
    return PassageIndex(place, manifest, encoder_of(manifest.encoder, place, encoder))


def _versions() -> dict[str, str]:
    return {"posttrain": version("posttrain"), "bm25s": version("bm25s")}
