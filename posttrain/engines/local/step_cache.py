"""Key-value cache of a decoding step on CUDA: bucketed sizes, and the assignment of requests in tensors at fixed
addresses.

A captured graph uses fixed addresses and shapes. So the cache grows rarely and in large steps, and the sizes that a
decoding step uses are rounded up to buckets.

B    running requests    G    prompts in use    W    requests of the most used prompt
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.engines.local.kv_cache import KVCache
from posttrain.models.native.decoder_shape import DecoderConfig

TOKENS = (64, 128, 256, 512)
"""Buckets of numbers of tokens; beyond, multiples of the last."""
ROWS = 32
"""Numbers of requests are rounded up to powers of two below it, and to its multiples beyond."""


def row_bucket(count: int) -> int:
    """Round a number of requests or prompts up to a bucket."""
    return 1 << max(count - 1, 0).bit_length() if count <= ROWS else -(-count // ROWS) * ROWS


def token_bucket(count: int) -> int:
    """Round a number of tokens up to a bucket."""
    return next((size for size in TOKENS if count <= size), -(-count // TOKENS[-1]) * TOKENS[-1])


class StepCache(KVCache):
    """Key-value cache for at most `most` concurrent requests."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, most: int) -> None:
        self.most = row_bucket(most)
        super().__init__(config, dtype, device)

    def clear(self) -> None:
        super().clear()
        self.widest = self.prompt_tokens = 0  # W; tokens of the longest prompt in use
        self.seats = self._no_seats(0)  # int64 [3, slots]: row of a slot's prompt, number in that row, prompt's length
        self._seated = False

    def seat(self) -> None:
        """Update `seats` if the assignment has changed. An unused slot has row -1, and sees one token of row 0."""
        slots = self.own.shape[2]
        if self.seats.shape[1] != slots:
            self.seats, self._seated = self._no_seats(slots), False
        if self._seated:
            return
        taken = [0] * len(self.row)
        seats: list[tuple[int, int, int]] = []
        for prompt in self.prompt:
            row = self.row[prompt]
            seats.append((row, taken[row], len(prompt)))
            taken[row] += 1
        free = [(-1, 0, 1)] * (slots - len(seats))
        self.seats.copy_(torch.tensor([*seats, *free]).t())
        self.widest, self.prompt_tokens = max(taken), max(map(len, self.row))
        self._seated = True

    def _no_seats(self, slots: int) -> Tensor:
        return torch.zeros(3, slots, dtype=torch.int64, device=self.device)

    def _reseated(self) -> None:
        super()._reseated()
        self._seated = False

    def _rounded(self, slots: int, tokens: int) -> tuple[int, int]:
        return row_bucket(slots), token_bucket(tokens)

    def _grown_size(self, old: Tensor, slots: int, tokens: int) -> tuple[int, int]:
        """Return the size in whole buckets. A dimension that grows at least doubles, up to its maximum, because all graphs
        have to be captured again when the cache moves.
        """
        have, filled = old.shape[2], old.shape[4]
        if slots > have:
            slots = max(slots, min(2 * have, self.most))
        if tokens > filled:
            tokens = max(tokens, min(2 * filled, self.config.context))
        return super()._grown_size(old, slots, tokens)
