"""Dense search: returns the passages whose vectors have the largest inner products with a query's.

Vectors are in one memory-mapped float32 file. Plain products read it block by block; with FAISS, an index of any of its
kinds is stored as well ("Flat", "HNSW32", "IVF256,PQ32" ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from posttrain.core import user_files
from posttrain.core.extras import install
from posttrain.core.messages import one_line, short
from posttrain.core.types import UserError
from posttrain.services.retrieval.bm25 import Found
from posttrain.services.retrieval.passages import Passages
from posttrain.services.retrieval.top_k import best

VECTORS, FAISS = "vectors.npy", "vectors.faiss"
BLOCK = 65_536  # vectors per multiplication
TOGETHER = 256  # passages per call of the encoder, which may use smaller batches

Kind = Literal["query", "passage"]
Vectors = NDArray[np.float32]


class Encoder(Protocol):
    """Computes vectors of texts. Asymmetric encoders distinguish queries and passages."""

    @property
    def identity(self) -> dict[str, Any]: ...  # JSON data that identifies the encoder: equal data, equal vectors

    def encode(self, texts: Sequence[str], kind: Kind) -> Vectors: ...  # [texts, dimensions]


def encoded(encoder: Encoder, texts: Sequence[str], kind: Kind, dimensions: int | None = None) -> Vectors:
    """Encode texts and check the result, as the encoder may be the user's. Raises UserError."""
    vectors = np.asarray(encoder.encode(texts, kind))
    if vectors.ndim != 2 or len(vectors) != len(texts) or not vectors.shape[1] or vectors.dtype.kind not in "fiu":
        raise UserError(
            f"the encoder made an array {list(vectors.shape)} of {vectors.dtype} of {len(texts)} texts; it must make "
            f"[{len(texts)}, dimensions] of numbers"
        )
    if dimensions is not None and vectors.shape[1] != dimensions:
        raise UserError(
            f"the encoder made vectors of {vectors.shape[1]} dimensions, and those of the index have {dimensions}"
        )
    if not np.isfinite(vectors).all():
        text = texts[int(np.flatnonzero(~np.isfinite(vectors).all(1))[0])]
        raise UserError(f"the encoder made a vector with NaN or infinity of {short(text)}")
    return np.ascontiguousarray(vectors, dtype=np.float32)


def write_vectors(passages: Passages, encoder: Encoder, faiss: str | None, folder: Path) -> dict[str, Any]:
    """Encode passages into a folder; return metadata of the files. `faiss`: a kind of FAISS index, or None.

    Raises UserError for an encoder that fails, and for a kind that FAISS does not support.
    """
    vectors: Any = None
    for first in range(0, len(passages), TOGETHER):
        texts = [passages[place].contents for place in range(first, min(first + TOGETHER, len(passages)))]
        some = encoded(encoder, texts, "passage", None if vectors is None else vectors.shape[1])
        if vectors is None:
            shape = len(passages), some.shape[1]
            vectors = np.lib.format.open_memmap(folder / VECTORS, mode="w+", dtype=np.float32, shape=shape)
        vectors[first : first + len(some)] = some
    vectors.flush()
    if faiss is not None:
        _write_faiss(vectors, faiss, folder)
    return {"dimensions": vectors.shape[1], "faiss": faiss}


def _write_faiss(vectors: Vectors, kind: str, folder: Path) -> None:
    library = _library()
    try:
        index = library.index_factory(vectors.shape[1], kind, library.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            index.train(np.asarray(vectors))
        for first in range(0, len(vectors), BLOCK):
            index.add(np.asarray(vectors[first : first + BLOCK]))
        library.write_index(index, str(folder / FAISS))
    except RuntimeError as error:  # any error of FAISS; its text begins with a place in the source code
        said = one_line(error).rpartition("Error: ")[2]
        raise UserError(f"--faiss {kind} does not work for these {len(vectors)} vectors: {said}") from error


def _library() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise UserError(f"--faiss needs FAISS: {install('faiss')}, or leave it out for plain products") from error
    return faiss


class Dense:
    """Dense search in the memory-mapped files of `write_vectors`, with the encoder for queries."""

    def __init__(self, folder: Path, count: int, settings: dict[str, Any], encoder: Encoder) -> None:
        """Map the files. `count`: number of passages. Raises ValueError or OSError for damaged files, UserError if
        FAISS is missing.
        """
        self._encoder, self._dimensions = encoder, int(settings["dimensions"])
        self._vectors: Vectors = np.load(user_files.readable(folder / VECTORS), mmap_mode="r", allow_pickle=False)
        if self._vectors.shape != (count, self._dimensions) or self._vectors.dtype != np.float32:
            raise ValueError(f"{VECTORS} does not fit")
        self._faiss: Any = None
        if settings["faiss"] is not None:
            library = _library()
            try:
                self._faiss = library.read_index(
                    str(user_files.readable(folder / FAISS)), library.IO_FLAG_MMAP | library.IO_FLAG_READ_ONLY
                )
            except RuntimeError as error:
                raise ValueError(f"{FAISS}: {one_line(error)}") from error
            if (self._faiss.ntotal, self._faiss.d) != (count, self._dimensions):
                raise ValueError(f"{FAISS} does not fit {VECTORS}")

    def search(self, queries: Sequence[str], k: int) -> list[Found]:
        """Return for each query the `k` passages with the largest products. The last bits of scores may depend on other
        queries.
        """
        if not queries:
            return []
        asked = encoded(self._encoder, queries, "query", self._dimensions)
        k = min(k, len(self._vectors))
        return self._by_faiss(asked, k) if self._faiss is not None else self._by_products(asked, k)

    def _by_faiss(self, asked: Vectors, k: int) -> list[Found]:
        scores, places = self._faiss.search(asked, k)
        found = zip(places.tolist(), scores.tolist(), strict=True)  # FAISS fills missing results with index -1
        return [[(p, s) for p, s in zip(*one, strict=True) if p >= 0] for one in found]

    def _by_products(self, asked: Vectors, k: int) -> list[Found]:
        found: list[Found] = [[] for _ in asked]
        for first in range(0, len(self._vectors), BLOCK):
            products = asked @ np.asarray(self._vectors[first : first + BLOCK]).T
            for own, scores in zip(found, products, strict=True):
                own += [(first + place, float(scores[place])) for place in best(scores, k).tolist()]
        return [sorted(own, key=lambda one: (-one[1], one[0]))[:k] for own in found]
