"""Tensors that remain on the host are laid into few segments, each a power of two of bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from posttrain.learners.host_memory import HostSegments, host_segments
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_shape import DecoderConfig

QWEN_1B = DecoderConfig(151936, 1536, 28, 12, 2, 128, 8960, 4096, qkv_bias=True, tied=True)
QWEN_7B = DecoderConfig(152064, 3584, 28, 28, 4, 128, 18944, 4096, qkv_bias=True, tied=False)


def moments(shape: DecoderConfig) -> Iterator[Tensor]:
    with torch.device("meta"):
        for parameter in Decoder(shape).parameters():
            yield from (torch.empty_like(parameter),) * 2


@pytest.mark.parametrize("shape", [QWEN_1B, QWEN_7B], ids=["1.5b", "7b"])
def test_moments_of_a_model_take_little_more_than_their_bytes(shape: DecoderConfig) -> None:
    sizes = list[int]()

    def allocate(size: int) -> Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8, device="meta")

    memory, whole = HostSegments(allocate), 0
    for x in moments(shape):
        memory.place(x)
        whole += x.nbytes
    assert all(size & (size - 1) == 0 for size in sizes), "torch allocates no more"
    rounded = sum(1 << (x.nbytes - 1).bit_length() for x in moments(shape))
    assert whole <= memory.bytes == sum(sizes) < 1.05 * whole < rounded


def test_tensors_have_memory_of_their_own_and_keep_the_order_of_their_dimensions() -> None:
    memory, given = host_segments(pinned=False), list[Tensor]()
    generator = torch.Generator().manual_seed(0)
    for number, shape in enumerate([(3, 5), (), (700, 11), (2, 3, 4), (1,), (129,)] * 3):
        x = torch.randn(shape, generator=generator).to((torch.float32, torch.bfloat16, torch.float64)[number % 3])
        given.append(x.transpose(0, -1) if x.ndim > 1 and number % 2 else x)
    places = [memory.place(x).copy_(x) for x in given]
    assert all(torch.equal(place, x) and place.stride() == x.stride() for place, x in zip(places, given, strict=True))
    assert all(place.data_ptr() % 64 == 0 for place in places)
    assert memory.bytes < 4 * sum(x.nbytes for x in given)
