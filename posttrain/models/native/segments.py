"""Trees of a layout's segments: each segment continues its prefix, and segments without a prefix are roots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.core.batch import Layout


class Forest:
    """The trees of a layout's segments. A segment's tokens attend to all tokens of its ancestors, and causally to the
    segment's own.

    K    segments
    """

    def __init__(self, layout: Layout) -> None:
        assert all(layout.length), "a segment has tokens"  # chunks and padded batches begin with a segment's first
        self._start, self._length, self.parent = layout.start, layout.length, layout.prefix
        self._children: dict[int, list[int]] = {}
        for k, parent in enumerate(layout.prefix):
            self._children.setdefault(parent, []).append(k)
        self.trees = [self.subtree(root) for root in self._children.get(-1, ())]
        """Segments of each tree, depth first: all descendants of a segment follow it."""
        assert sum(map(len, self.trees)) == len(layout.length), "a segment is its own ancestor"
        self.before = [0] * len(layout.length)
        """[K] number of tokens of all ancestors of a segment."""
        self.depth = [0] * len(layout.length)
        """[K] number of ancestors of a segment."""
        for tree in self.trees:
            for k in tree[1:]:
                parent = self.parent[k]
                self.before[k] = self.before[parent] + self._length[parent]
                self.depth[k] = self.depth[parent] + 1
        self._paths: dict[int, np.ndarray] = {-1: np.empty(0, dtype=np.int64)}

    def subtree(self, k: int) -> list[int]:
        """Return the segment and its descendants, depth first."""
        found, left = [], [k]
        while left:
            found.append(left.pop())
            left.extend(reversed(self._children.get(found[-1], ())))
        return found

    @property
    def prefixes(self) -> list[int]:
        """Return the segments that other segments continue, ancestors first."""
        return [k for tree in self.trees for k in tree if k in self._children]

    def tokens(self, segments: Sequence[int]) -> np.ndarray:
        """Return int64 indices in [T] of these segments' tokens."""
        return np.concatenate([np.arange(self._start[k], self._start[k] + self._length[k]) for k in segments])

    def path(self, k: int, last: int | None = None) -> np.ndarray:
        """Return int64 [before[k]]: indices in [T] of the tokens of all ancestors of a segment, the root's first.
        `last`: at most this many, the nearest.
        """
        missing, parent = [], self.parent[k]
        while parent not in self._paths:
            missing.append(parent)
            parent = self.parent[parent]
        for parent in reversed(missing):
            self._paths[parent] = np.concatenate((self._paths[self.parent[parent]], self.tokens([parent])))
        whole = self._paths[self.parent[k]]
        return whole if last is None else whole[max(0, len(whole) - last) :]
