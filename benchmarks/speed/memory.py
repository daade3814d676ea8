"""Memory and time of an update with recomputed layers and with narrow frozen weights, on the shape of SmolLM2-135M.

    python benchmarks/speed/memory.py --tokens 1024 --rounds 3

Bytes are counted: the storages of parameters, and of the tensors that autograd keeps after a forward pass.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from posttrain.core.batch import Layout
from posttrain.models.adapters.lora import LoRA, attach, begin
from posttrain.models.losses.likelihood import token_logp
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.linear import accumulating

SMOL = DecoderConfig(
    vocab=49_152, hidden=576, layers=30, heads=9, kv_heads=3, head_size=64, intermediate=1536, context=2048, tied=True
)
MIB = 2**20


def update(model: Decoder, layout: Layout, bfloat16: bool) -> tuple[float, int]:
    """Return the seconds of a forward and a backward pass, and the bytes of activations in between."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    at = torch.arange(len(layout.tokens) - 1)
    begun = time.perf_counter()
    with accumulating():
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                hidden = model.hidden(layout, at)
                count = sum(kept.values())
            loss = -token_logp(hidden, model.head, layout.tokens[1:]).mean()
        loss.backward()
    return time.perf_counter() - begun, count


def model_of(lora: bool, narrow: bool, recomputes: bool) -> Decoder:
    model = new_decoder(SMOL, 0)
    if narrow:
        model.narrow(torch.bfloat16)
    if lora:
        attach(model, LoRA(16, 32.0), lambda name: True)
        begin(model, 0)
    if recomputes:
        model.recompute_layers()
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bfloat16", action="store_true")
    given = parser.parse_args()
    tokens = torch.randint(0, SMOL.vocab, (given.tokens,), generator=torch.Generator().manual_seed(0))
    layout = Layout(tokens, torch.arange(given.tokens), (0,), (given.tokens,), (-1,))
    kinds: dict[str, Callable[[], Decoder]] = {
        f"{'rank 16' if lora else 'all weights'}{', bfloat16 base' if narrow else ''}{', recomputed' if again else ''}": (
            lambda lora=lora, narrow=narrow, again=again: model_of(lora, narrow, again)  # type: ignore[misc]
        )
        for lora, narrow in ((False, False), (True, False), (True, True))
        for again in (False, True)
    }
    print("| updates of | seconds | weights, MiB | activations, MiB |\n| --- | --- | --- | --- |")
    for name, made in kinds.items():
        model = made()
        weights = sum(
            {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values()
        )
        found = [update(model, layout, given.bfloat16) for _ in range(given.rounds + 1)][1:]
        seconds = [s for s, _ in found]
        print(
            f"| {name} | {sum(seconds) / len(seconds):.1f} [{min(seconds):.1f}-{max(seconds):.1f}] | "
            f"{weights / MIB:,.0f} | {found[0][1] / MIB:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
