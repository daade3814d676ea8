"""Key-value cache of compiled decoding steps, in pages of a fixed number of tokens.

A request has a table of pages: those of its prompt, then its own, which are allocated as tokens are sampled. Requests
with a common prompt share its pages, and so do those that continue the same tokens. Pages are shared only if they are
never written again; the last page of a continued request, if it is not full, is copied. A page is free as soon as nothing
refers to it.

B    running requests    D    head size, padded to whole vectors
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.engines.local.kv_cache import Prompt, PromptPrefix
from posttrain.engines.local.prompt_layout import BLOCK
from posttrain.engines.local.running_batch import RunningBatch
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.kernels import binder

CHUNK = 64 << 20
"""Bytes that are allocated at once. The operating system gives memory when a page is first written."""


class Page:
    """Keys and values of `PagePool.tokens` tokens: [keys and values, layers, kv_heads, tokens, D], where keys are in
    blocks [tokens / lanes, D, lanes]. Its memory returns to the pool when nothing refers to the page any more.
    """

    __slots__ = ("_pool", "address", "memory", "nbytes")

    def __init__(self, memory: Tensor, pool: PagePool) -> None:
        self.memory, self._pool = memory, pool
        self.address, self.nbytes = memory.data_ptr(), memory.nbytes

    def __del__(self) -> None:
        self._pool.free.append(self.memory)


Pages = tuple[Page, ...]


class PagePool:
    """Memory of pages. It grows by chunks, which stay where they are."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype, self.tokens = shape, dtype, shape[3]
        self.page_bytes = dtype.itemsize * torch.Size(shape).numel()
        self.in_chunk = max(1, CHUNK // self.page_bytes)
        self.free: list[Tensor] = []  # memory of pages, the last one is used next
        self.allocated = 0  # number of pages

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return self.allocated - len(self.free)

    def take(self) -> Page:
        if not self.free:
            self.free += torch.empty(self.in_chunk, *self.shape, dtype=self.dtype).unbind()[::-1]
            self.allocated += self.in_chunk
        return Page(self.free.pop(), self)

    def copy(self, page: Page) -> Page:
        new = self.take()
        new.memory.copy_(page.memory)
        return new

    def rest(self) -> None:
        """Free the chunks of which no page is in use. If that is all of them, one remains for the next requests."""
        unused = Counter(map(_chunk, self.free))
        spare = None if self.used else next(iter(unused), None)
        kept = [memory for memory in self.free if unused[_chunk(memory)] < self.in_chunk or _chunk(memory) == spare]
        self.allocated -= len(self.free) - len(kept)
        self.free = kept


def _chunk(memory: Tensor) -> int:
    """Return the address of the chunk of a page's memory."""
    return memory.untyped_storage().data_ptr()


class PagedCache:
    """Key-value cache in which running requests occupy the first slots. The interface is that of `KVCache`."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        library = binder.decode()
        assert library is not None and library.page == BLOCK, "a page of a prompt is a block of its layout"
        self.config, self.lanes, self.page = config, library.lanes, library.page
        padded = -(-config.head_size // library.lanes) * library.lanes
        self.pool = PagePool((2, config.layers, config.kv_heads, library.page, padded), dtype)
        self.clear()

    def clear(self) -> None:
        """Release everything that belongs to running requests."""
        self.prompt: list[Prompt] = []  # [B], prompt of each slot
        self._prompts: dict[Prompt, Pages] = {}  # prompts in use
        self._own: list[list[Page]] = []  # [B], pages of a request's own tokens
        self._lengths = torch.zeros(0, dtype=torch.int32)  # [slots], tokens of the prompt
        self._room = torch.zeros(0, dtype=torch.int64)  # [slots], own tokens that fit into the slot's pages
        self._table = torch.zeros(0, 0, dtype=torch.int64)  # [slots, pages], addresses
        self._fitting = 0  # steps for which every slot has pages
        self._order: Tensor | None = None
        self.pool.rest()

    def __contains__(self, prompt: Prompt) -> bool:
        return prompt in self._prompts

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Bytes of all pages in use, by running requests and by others."""
        return self.pool.used * self.pool.page_bytes

    @property
    def held(self) -> int:
        """Bytes of all pages, in use or not: memory that is not free for others."""
        return self.pool.allocated * self.pool.page_bytes

    def size(self, own: int, prompt: int) -> int:
        """Return the bytes of a request with so many tokens of its own and of its prompt."""
        return (self._pages(own) + self._pages(prompt)) * self.pool.page_bytes

    def added(self, own: Sequence[int], prompts: Sequence[int]) -> int:
        """Return the bytes that requests with so many own tokens, and so many of new prompts, would add, with a further page
        for each running one.
        """
        return (sum(map(self._pages, (*own, *prompts))) + len(self._own)) * self.pool.page_bytes

    def reserve(self, slots: int, own: int, prompts: int, prompt: int) -> None:
        """Make room in the tables; pages are taken as they are needed."""
        self._grow(slots, self._pages(own) + self._pages(prompt))

    def room(self, rows: RunningBatch, steps: int, slots: int, limit: Callable[[], float]) -> bool:
        """Take the pages of the next token of every request. Return False if they do not fit `limit()` bytes."""
        if self._fitting:
            self._fitting -= 1
            return True
        count = len(self._own)
        tokens = (rows.before + rows.count)[:count]
        short = (tokens > self._room[:count]).nonzero().flatten().tolist()
        if short and self.bytes + len(short) * self.pool.page_bytes > limit():
            return False
        for slot in short:
            self.cover(slot, int(tokens[slot]))
        self._fitting = int((self._room[:count] - tokens).min())
        return True

    def cover(self, slot: int, tokens: int) -> None:
        """Take pages for so many own tokens of a request."""
        own, first = self._own[slot], self._pages(len(self.prompt[slot]))
        while len(own) < self._pages(tokens):
            self._grow(0, first + len(own) + 1)
            own.append(self.pool.take())
            self._table[slot, first + len(own) - 1] = own[-1].address
        self._room[slot] = len(own) * self.page

    def _grow(self, slots: int, pages: int) -> None:
        have, width = self._table.shape
        if slots <= have and pages <= width:
            return
        slots, pages = (max(new, 2 * old) if new > old else old for new, old in ((slots, have), (pages, width)))
        for name in ("_lengths", "_room", "_table"):
            old = getattr(self, name)
            new = torch.zeros(slots, *((pages,) if old.ndim == 2 else ()), dtype=old.dtype)
            new[tuple(slice(size) for size in old.shape)] = old
            setattr(self, name, new)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    # -- requests -----------------------------------------------------------------------------------------------------

    def store(
        self, prompt: Prompt, k: Tensor, v: Tensor, places: slice | Tensor, path: Sequence[int], made: dict[int, Page]
    ) -> Pages:
        """Write the keys and values of a computed prompt into pages, unless it has them already.

        k, v [layers, kv_heads, T, size] of several prompts, of which this one has the tokens at `places` and the blocks
        `path`. `made`: the pages of blocks that other prompts share.
        """
        if prompt in self:
            return self._prompts[prompt]
        new = [block for block in path if block not in made]  # the last ones: prompts share their beginnings
        if new:
            whole = len(new) * self.page
            keys, values = (x[:, :, places][:, :, (len(path) - len(new)) * BLOCK :] for x in (k, v))
            keys, values = (functional.pad(x, (0, 0, 0, whole - x.shape[2])) for x in (keys, values))
            keys = keys.unflatten(2, (len(new), -1, self.lanes)).transpose(-1, -2)
            values = values.unflatten(2, (len(new), self.page))
            for number, block in enumerate(new):
                made[block] = page = self.pool.take()
                blocks = page.memory[0].view(*page.memory.shape[1:3], -1, page.memory.shape[4], self.lanes)
                blocks[..., : keys.shape[-2], :] = keys[:, :, number]
                page.memory[1, ..., : values.shape[-1]] = values[:, :, number]
        return tuple(made[block] for block in path)

    def admit(self, prompts: Sequence[Prompt], computed: Mapping[Prompt, PromptPrefix]) -> None:
        """Assign these prompts to the next slots. `computed`: has those that are not in the cache yet."""
        first = len(self.prompt)
        self._grow(first + len(prompts), 0)
        for slot, prompt in enumerate(prompts, first):
            if prompt not in self:
                self._prompts[prompt] = computed[prompt].states
            self.prompt.append(prompt)
            self._own.append([])
            self._lengths[slot] = len(prompt)
            self._seat(slot)
        self._order = None

    def keep(self, count: int, source: Sequence[int], to: Sequence[int], filled: int) -> None:
        """Keep the first `count` slots, after moving `source` to `to`."""
        for old, new in zip(source, to, strict=True):
            self.prompt[new], self._own[new] = self.prompt[old], self._own[old]
            for table in (self._lengths, self._room, self._table):
                table[new] = table[old]
        del self.prompt[count:], self._own[count:]
        self._prompts = {prompt: self._prompts[prompt] for prompt in set(self.prompt)}
        self._fitting, self._order = 0, None

    def states(self, slot: int, tokens: int) -> Pages:
        """Return the pages of a request's first own tokens, which it does not write again."""
        return tuple(self._own[slot][: self._pages(tokens)])

    def cut(self, states: Pages, tokens: int) -> Pages:
        """Return the part of states with the first `tokens` tokens."""
        return states[: self._pages(tokens)]

    def restore(self, slot: int, states: Pages, tokens: int) -> None:
        """Let a slot without own tokens continue the first `tokens` tokens of states. It shares their full pages."""
        full = tokens // self.page
        self._own[slot] = [*states[:full], *map(self.pool.copy, states[full : self._pages(tokens)])]
        self._seat(slot)

    def requests(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (int32 [B], slots in the order of their prompts; int32 [slots], tokens of their prompts; int64 [slots,
        pages], addresses of pages: the prompt's, then the request's own).
        """
        if self._order is None:
            number = {prompt: n for n, prompt in enumerate(dict.fromkeys(self.prompt))}
            order = torch.tensor([number[prompt] for prompt in self.prompt]).argsort(stable=True)
            self._order = order.to(torch.int32)
        return self._order, self._lengths, self._table

    def _seat(self, slot: int) -> None:
        """Write the table of a slot."""
        own = self._own[slot]
        pages = [*self._prompts[self.prompt[slot]], *own]
        self._grow(0, len(pages))
        self._table[slot, : len(pages)] = torch.tensor([page.address for page in pages], dtype=torch.int64)
        self._room[slot], self._fitting = len(own) * self.page, 0
