"""Linear attention over a layout: the gated delta rule and the short convolution before it, over trees of segments.

Both read what came before a token, so a segment begins with what its prefix ends with. For the convolution these are its
last few inputs, which are laid before the segment. For the delta rule it is a state, one matrix for each head.

T    tokens of a micro-batch    C    chunks    n    tokens of a chunk, filled up
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from posttrain.core.batch import Layout
from posttrain.models.native.attention_compiled import at_least_float32
from posttrain.models.native.segments import Forest

CHUNK = 64  # tokens, as in transformers and fla
LEAST = 16  # in fla too
NORM = 1e-6  # added to squared norms by both

Rule = Callable[..., tuple[Tensor, Tensor | None]]


class Recurrence:
    """Linear attention over one layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.forest = layout, Forest(layout)
        self._laid: dict[int, tuple[Tensor, Tensor]] = {}

    def convolve(self, function: Callable[..., Tensor], x: Tensor, weight: Tensor, *more: Any, **named: Any) -> Tensor:
        """Convolve x [1, size, T] with weight [size, width] by a function for one sequence."""
        laid, own = self._gaps(weight.shape[-1] - 1)
        inputs = functional.pad(x[0].t(), (0, 0, 0, 1)).index_select(0, laid)
        found = function(inputs.t().unsqueeze(0), weight, *more, **named)
        return found[0].t().index_select(0, own).t().unsqueeze(0)

    def _gaps(self, width: int) -> tuple[Tensor, Tensor]:
        """Return (int64: of each input of a convolution its place in [T], or T for 0; int64 [T]: the place of each token's
        output). Before a segment are the last `width` tokens of its ancestors, and zeros where it has fewer.
        """
        if width not in self._laid:
            total, device = self.layout.tokens.shape[0], self.layout.tokens.device
            laid, own, at = [], np.empty(total, dtype=np.int64), 0
            for k, length in enumerate(self.layout.length):
                before, tokens = self.forest.path(k, width), self.forest.tokens([k])
                laid += [np.full(width - len(before), total), before, tokens]
                own[tokens] = np.arange(length) + at + width
                at += width + length
            both = torch.from_numpy(np.concatenate(laid)), torch.from_numpy(own)
            self._laid[width] = both[0].to(device), both[1].to(device)
        return self._laid[width]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normed: bool) -> Tensor:
        """Apply the gated delta rule: q, k [1, T, key heads, size], v [1, T, heads, width], decays g (logarithms) and beta
        [1, T, heads] -> [1, T, heads, width]. `normed`: q and k are first divided by their norms.
        """
        if (fast := fast_rule(q.device)) is not None:
            return self.levels(fast, q, k, v, g, beta, use_qk_l2norm_in_kernel=normed)
        given = v.dtype
        q, k, v, g, beta = (at_least_float32(x[0]) for x in (q, k, v, g, beta))
        if normed:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM) for x in (q, k))
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q * q.shape[-1] ** -0.5, k))
        with torch.autocast(q.device.type, enabled=False):  # a state sums over a whole transcript
            return self._chunks(q, k, v, g, beta).to(given).unsqueeze(0)

    def levels(self, rule: Rule, *given: Tensor, **named: Any) -> Tensor:
        """Compute the delta rule by a function for sequences laid end to end, with fla's arguments: first the roots,
        then what continues them, with their last states, and so on.
        """
        found, states = list[Tensor](), None
        for level in self._levels:
            picked = given if len(self._levels) == 1 else [x.index_select(1, level.tokens) for x in given]
            begun: Tensor | None = None if states is None else states.index_select(0, level.parents)
            out, states = rule(
                *picked, initial_state=begun, output_final_state=level is not self._levels[-1], cu_seqlens=level.ends,
                **named,
            )  # fmt: skip
            found.append(out)
        if len(found) == 1:
            return found[0]
        place = torch.cat([level.tokens for level in self._levels])
        return torch.cat(found, 1).index_select(1, torch.argsort(place))

    @cached_property
    def _levels(self) -> list[_Level]:
        device, levels = self.layout.tokens.device, []
        place: dict[int, int] = {-1: 0}  # of a segment within its level
        for depth in range(max(self.forest.depth) + 1):
            segments = [k for k, own in enumerate(self.forest.depth) if own == depth]
            parents = [place[self.layout.prefix[k]] for k in segments]
            ends = np.cumsum([0, *(self.layout.length[k] for k in segments)])
            numbers = self.forest.tokens(segments), np.array(parents), ends
            levels.append(_Level(*(torch.from_numpy(x).to(device) for x in numbers)))
            place |= {k: number for number, k in enumerate(segments)}
        return levels

    @cached_property
    def _cut(self) -> _Chunks:
        return _Chunks(self.layout, self.forest)

    def _chunks(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Apply the delta rule in chunks (arXiv 2412.06464, section 3.3): q, k [T, heads, size], v [T, heads, width], g,
        beta [T, heads] -> [T, heads, width]. Within a chunk all is a product of matrices; chunks of equal rank are
        computed at once, each from the state that the chunk before it leaves.
        """
        cut = self._cut
        keyed, valued = (x * beta.unsqueeze(-1) for x in (k, v))
        q, k, keyed, valued = (cut.gather(x) for x in (q, k, keyed, valued))
        decay = cut.gather(g).cumsum(-1)  # [C, heads, n]
        upper = torch.ones(cut.size, cut.size, dtype=torch.bool, device=q.device).triu(1)
        between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(upper, -torch.inf).exp()
        system = keyed @ k.transpose(-1, -2) * between
        within = q @ k.transpose(-1, -2) * between
        both = torch.cat((valued, keyed * decay.exp().unsqueeze(-1)), -1)
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        new, old = solved.split_with_sizes((v.shape[-1], k.shape[-1]), -1)
        q = q * decay.exp().unsqueeze(-1)
        k = (k * (decay[..., -1:] - decay).exp().unsqueeze(-1)).transpose(-1, -2)
        last = decay[..., -1, None, None].exp()
        found: list[Tensor] = []
        state = v.new_zeros(cut.counts[0], v.shape[1], k.shape[-2], v.shape[-1])
        ranks = (x.split_with_sizes(cut.counts) for x in (q, k, new, old, within, last))
        for rank, (query, key, value, known, inside, left) in enumerate(zip(*ranks, strict=True)):
            if rank:
                state = state.index_select(0, cut.before[rank])
            value = value - known @ state
            found.append(query @ state + inside @ value)
            state = state * left + key @ value
        return torch.cat(found).transpose(1, 2).flatten(0, 1).index_select(0, cut.place)


@dataclass(frozen=True)
class _Level:
    """Segments with equally many ancestors."""

    tokens: Tensor  # int64, their tokens
    parents: Tensor  # int64, of each the place of its prefix within the level above
    ends: Tensor  # int64 [segments + 1], the start of each in `tokens`, and the end of the last


class _Chunks:
    """The chunks of a layout by rank, the number of chunks before them in their transcript."""

    def __init__(self, layout: Layout, forest: Forest) -> None:
        longest = max(layout.length)
        self.size = min(CHUNK, max(LEAST, 1 << (longest - 1).bit_length()))
        rank, chunks = [0] * len(layout.length), list[tuple[int, int, int]]()  # (rank, segment, number within it)
        for k in (k for tree in forest.trees for k in tree):
            parent = layout.prefix[k]
            rank[k] = rank[parent] + -(-layout.length[parent] // self.size) if parent >= 0 else 0
            chunks += [(rank[k] + i, k, i) for i in range(-(-layout.length[k] // self.size))]
        chunks.sort()
        total, device = layout.tokens.shape[0], layout.tokens.device
        index, within, place = (
            np.full((len(chunks), self.size), total),
            dict[tuple[int, int], int](),
            np.empty(total, int),
        )
        self.counts = np.bincount([r for r, _, _ in chunks]).tolist()
        starts = np.cumsum([0, *self.counts])
        before: list[list[int]] = [[] for _ in self.counts]  # of each chunk of a rank the one before it, in its rank
        for number, (r, k, i) in enumerate(chunks):
            count, at = min(self.size, layout.length[k] - i * self.size), layout.start[k] + i * self.size
            index[number, :count] = np.arange(at, at + count)
            place[at : at + count] = number * self.size + np.arange(count)
            within[k, i] = number - int(starts[r])
            if r:
                parent = layout.prefix[k]
                previous = (k, i - 1) if i else (parent, -(-layout.length[parent] // self.size) - 1)
                before[r].append(within[previous])
        self.index, self.place = (torch.from_numpy(x).to(device) for x in (index.reshape(-1), place))
        self.before = [torch.tensor(x, dtype=torch.int64, device=device) for x in before]

    def gather(self, x: Tensor) -> Tensor:
        """Gather [T, heads, ...] -> [C, heads, n, ...], with 0 where a chunk is filled up."""
        padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
        return padded.index_select(0, self.index).unflatten(0, (-1, self.size)).transpose(1, 2)


def fast_rule(device: torch.device) -> Rule | None:
    """Return fla's kernel; None on a CPU, where fla is not installed, and where a second derivative is needed, for which
    callers switch fused kernels off.
    """
    if device.type != "cuda" or not torch.backends.cuda.flash_sdp_enabled() or find_spec("fla") is None:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    rule: Rule = chunk_gated_delta_rule
    return rule
