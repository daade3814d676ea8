"""Layout of prompts for prefill, in which the common prefix of several prompts is computed once (prefix caching).

Prompts are cut into blocks of one size. Two prompts share a block if they are equal up to its end. So the blocks of a
prompt, and thus all bits of its keys and values, depend only on the prompt, and not on other prompts with the same
prefix. If bits may depend on other prompts, adjacent blocks that all of their prompts share are joined.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from posttrain.core.batch import Layout

BLOCK = 64
"""Tokens of a block. Prompts share whole blocks; each costs a call of attention."""


class PromptBlocks:
    """Prompts as paths through a tree of blocks; each prompt has at least one token."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.tokens = 0  # total of tokens in all blocks
        self.paths: list[list[int]] = []  # the blocks of each prompt
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}  # (previous block, tokens of the block) -> block
        self._users: list[int] = []  # number of prompts of each block

    def missing(self, prompt: tuple[int, ...]) -> int:
        """Return the number of tokens of a prompt that are in no block yet."""
        before = -1
        for first in range(0, len(prompt), BLOCK):
            if (number := self._known.get((before, prompt[first : first + BLOCK]))) is None:
                return len(prompt) - first
            before = number
        return 0

    def add(self, prompt: tuple[int, ...]) -> None:
        """Add a prompt, and those of its blocks that are new."""
        self.tokens += self.missing(prompt)
        before, path = -1, []
        for first in range(0, len(prompt), BLOCK):
            before = self._known.setdefault((before, prompt[first : first + BLOCK]), len(self._users))
            if before == len(self._users):
                self._users.append(0)
            self._users[before] += 1
            path.append(before)
        self.prompts.append(prompt)
        self.paths.append(path)

    def lay(self, device: torch.device, joined: bool) -> PromptLayout:
        """Lay out each block as a segment. `joined`: join adjacent blocks with the same prompts into one segment."""
        place: dict[int, int] = {}  # block -> its segment
        start, length, prefix = list[int](), list[int](), list[int]()
        tokens, position, paths = list[int](), list[int](), []
        for prompt, path in zip(self.prompts, self.paths, strict=True):
            for number, block in enumerate(path):
                if block in place:
                    continue
                own = prompt[number * BLOCK : (number + 1) * BLOCK]
                before = path[number - 1] if number else -1
                if joined and number and self._users[block] == self._users[before]:
                    place[block] = place[before]
                    length[-1] += len(own)  # the previous block is in the last segment
                else:
                    place[block] = len(start)
                    start.append(len(tokens))
                    length.append(len(own))
                    prefix.append(place[before] if number else -1)
                position += range(number * BLOCK, number * BLOCK + len(own))
                tokens += own
            paths.append(list(dict.fromkeys(place[block] for block in path)))
        index, where = (torch.tensor(values, device=device) for values in (tokens, position))
        return PromptLayout(Layout(index, where, tuple(start), tuple(length), tuple(prefix)), paths)


class PromptLayout:
    """Layout of prompts, and the segments of each prompt."""

    def __init__(self, layout: Layout, paths: list[list[int]]) -> None:
        self.layout, self.paths = layout, paths

    def last(self, prompt: int) -> int:
        """Return the index of a prompt's last token."""
        segment = self.paths[prompt][-1]
        return self.layout.start[segment] + self.layout.length[segment] - 1

    def places(self, prompt: int) -> slice | Tensor:
        """Return the indices of a prompt's tokens: a slice, or int64 [P] if they are not contiguous."""
        path, start, length = self.paths[prompt], self.layout.start, self.layout.length
        if all(b == a + 1 for a, b in pairwise(path)):
            return slice(start[path[0]], self.last(prompt) + 1)
        device = self.layout.tokens.device
        return torch.cat([torch.arange(start[k], start[k] + length[k], device=device) for k in path])
