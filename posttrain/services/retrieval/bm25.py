"""BM25: search by the words that query and passage have in common. bm25s builds and scores; this module stores and maps
its files.

bm25s memory-maps its scores, one for each word of each passage, but keeps its vocabulary as a dict: 190 MB for an index
of 1 GB, in every process. Here the sorted words are in one memory-mapped file and are found by bisection, in some 20
steps for a million words. So a process that opens an index needs only a few MB of its own, whatever the index's size.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core import user_files
from posttrain.core.types import UserError
from posttrain.services.retrieval.passages import Passage
from posttrain.services.retrieval.top_k import best
from posttrain.services.retrieval.words import query_words, words_of

K1, B = 0.9, 0.4
"""Values of Anserini and Pyserini, whose BM25 Search-R1 uses; bm25s has 1.5 and 0.75. See docs/results/retrieval.md."""

SCORES, PASSAGES, STARTS = "bm25.scores.npy", "bm25.passages.npy", "bm25.starts.npy"
WORDS, ENDS, NUMBERS = "words.txt", "words.ends.npy", "words.numbers.npy"

Found = list[tuple[int, float]]
"""(index of a passage, its score), the best first."""


class Writer:
    """Collects passages one by one; `write` writes the files."""

    def __init__(self, k1: float = K1, b: float = B) -> None:
        self._k1, self._b = k1, b
        self._numbers: defaultdict[str, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__  # a new word gets the next number
        self._passages: list[list[int]] = []

    def add(self, passage: Passage) -> None:
        self._passages.append(list(map(self._numbers.__getitem__, words_of(passage.contents))))

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the files and return their metadata. Raises UserError if no passage has a word."""
        if not self._numbers:
            raise UserError("no passage has a word that can be searched for")
        model = _library().BM25(k1=self._k1, b=self._b, method="lucene")
        built = model.build_index_from_ids(range(len(self._numbers)), self._passages, show_progress=False)
        starts = built["indptr"].astype(np.int64)
        for name, array in ((SCORES, built["data"]), (PASSAGES, built["indices"]), (STARTS, starts)):
            np.save(folder / name, array)
        _write_words(self._numbers, folder)
        return {"k1": self._k1, "b": self._b, "words": len(self._numbers)}


def _library() -> Any:
    import bm25s

    return bm25s


def _write_words(numbers: Mapping[str, int], folder: Path) -> None:
    """Write the words in byte order, with their numbers."""
    known = sorted((word.encode(), number) for word, number in numbers.items())
    (folder / WORDS).write_bytes(b"".join(word for word, _ in known))
    np.save(folder / ENDS, np.cumsum([0, *(len(word) for word, _ in known)], dtype=np.int64))
    np.save(folder / NUMBERS, np.array([number for _, number in known], dtype=np.int32))


class Vocabulary:
    """A memory-mapped map from words to numbers."""

    def __init__(self, folder: Path) -> None:
        with user_files.opened(folder / WORDS) as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        ends = np.load(user_files.readable(folder / ENDS), mmap_mode="r", allow_pickle=False)
        numbers = np.load(user_files.readable(folder / NUMBERS), mmap_mode="r", allow_pickle=False)
        fits = ends.dtype == np.int64 and numbers.dtype == np.int32 and ends.shape == (len(numbers) + 1,)
        if not fits or ends[-1] != len(self._bytes):
            raise ValueError("the vocabulary's files do not fit each other")
        self._ends, self._numbers = memoryview(ends), memoryview(numbers)  # their elements are plain Python numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def get(self, word: str) -> int | None:
        asked = word.encode()
        place = bisect_left(range(len(self)), asked, key=self._at)
        return self._numbers[place] if place < len(self) and self._at(place) == asked else None

    def _at(self, place: int) -> bytes:
        return self._bytes[self._ends[place] : self._ends[place + 1]]


class BM25:
    """BM25 search in the memory-mapped files of a `Writer`."""

    def __init__(self, folder: Path, count: int) -> None:
        """Map the files. `count`: number of passages. Raises ValueError or OSError for damaged files."""
        self.vocabulary = Vocabulary(folder)
        # views as plain arrays: a slice of a numpy.memmap takes a microsecond more
        scores, passages, starts = (
            np.asarray(np.load(user_files.readable(folder / name), mmap_mode="r", allow_pickle=False))
            for name in (SCORES, PASSAGES, STARTS)
        )
        kinds = scores.dtype == np.float32 and passages.dtype == np.int32 and starts.dtype == np.int64
        if not kinds or scores.shape != passages.shape or starts.shape != (len(self.vocabulary) + 1,):
            raise ValueError("the files of scores do not fit each other")
        if starts[0] != 0 or starts[-1] != len(scores):
            raise ValueError(f"{STARTS} does not fit {SCORES}")
        self._model = _library().BM25()
        self._model.scores = {"data": scores, "indices": passages, "indptr": starts, "num_docs": count}
        self._model.nonoccurrence_array = None

    def search(self, queries: Sequence[str], k: int) -> list[Found]:
        """Return for each query up to `k` passages that have one of its words. Raises IndexError for damaged files."""
        return [self._search(words, k) for words in map(query_words, queries)]

    def _search(self, words: Iterable[str], k: int) -> Found:
        numbers = [number for number in map(self.vocabulary.get, words) if number is not None]
        if not numbers:
            return []
        scores = self._model.get_scores_from_ids(numbers)
        places = best(scores, k, np.flatnonzero(scores > 0))  # many equal zeros would make the selection slow
        return list(zip(places.tolist(), scores[places].tolist(), strict=True))
