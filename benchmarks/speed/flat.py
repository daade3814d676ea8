"""Time of an update of models that transformers computes: all tokens in one row (flat), and in padded rows.

    PYTHONPATH=tests/helpers python benchmarks/speed/flat.py --rounds 7 [--bfloat16]

Random models, 384 wide, of four layers; a forward and a backward pass in each way in turns, on one thread. Prints for each
model and layout the median of the ratios rows / flat, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from layouts import laid
from tiny_models import make, opened

from posttrain.core.batch import Layout
from posttrain.models.hf import transformers_folder
from posttrain.models.hf.backed import Backed, Way

SIZES = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


def layers(kind: str, **more: Any) -> dict[str, Any]:
    return {**more, "layer_types": [kind] * 3 + ["full_attention"]}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3, window 512": ("gemma3_text", layers("sliding_attention", sliding_window=512)),
    "Gemma 3, window 32": ("gemma3_text", layers("sliding_attention", sliding_window=32)),
    "Gemma 2, soft cap": ("gemma2", layers("sliding_attention", sliding_window=4096)),
    "GPT-OSS, window 128": ("gpt_oss", layers("sliding_attention", sliding_window=128)),
    "Qwen3.5": ("qwen3_5_text", layers("linear_attention", **LINEAR)),
    "LFM2": ("lfm2", layers("conv")),
}
LAYOUTS = {
    "8 replies of 60 to one prompt of 100": laid([100, *[60] * 8], [-1, *[0] * 8]),
    "8 texts of 57 to 110": laid([57, 80, 100, 64, 90, 72, 110, 96], [-1] * 8),
    "30 texts of 18 to 28": laid([20, 25, 18, 22, 28, 24] * 5, [-1] * 30),
    "texts of 700 and 600": laid([700, 600], [-1, -1]),
}


def seconds(model: Backed, layout: Layout, way: Way, bfloat16: bool) -> float:
    model.way = way
    model.attend("posttrain" if way == "flat" else model.rows_attention)
    begun = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        hidden = model.hidden(layout, torch.arange(1, len(layout.tokens)))
    hidden.float().square().sum().backward()
    model.zero_grad()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bfloat16", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers_folder.TOLERANCE = 1e-2  # numbers of these random models are large
    print(f"| | {' | '.join(LAYOUTS)} |")
    for name, (kind, more) in MODELS.items():
        with tempfile.TemporaryDirectory() as place:
            model = opened(make(kind, Path(place) / kind, **SIZES, **more))
        assert model.way == "flat"
        cells = []
        for layout in LAYOUTS.values():
            for way in ("flat", "rows"):  # the first calls allocate
                seconds(model, layout, way, given.bfloat16)
            ratios = [
                seconds(model, layout, "rows", given.bfloat16) / seconds(model, layout, "flat", given.bfloat16)
                for _ in range(given.rounds)
            ]
            cells.append(f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
