"""Writes the table of docs/guides/scaling.md: which models fit how many cards of 80 GiB, by the estimate of memory.

    python tools/memory_table.py

Models are shapes without numbers, so it needs no GPU. A test compares the document with the output of this script.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.config.resolve import filled
from posttrain.config.training import RL, SFT, Training
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.training.memory_advice import TIGHT
from posttrain.training.memory_estimate import UpdateSize, estimate_memory
from posttrain.training.memory_plan import shapes_of
from posttrain.training.setup import ACTIVATION_SHARE, tokens_of_activations

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "guides" / "scaling.md"
BEGIN, END = "<!-- what fits -->\n", "<!-- end of what fits -->\n"
ROOM = 80.0 * 2**30
CARDS = (1, 2, 4, 8, 16, 64)
QWEN = DecoderConfig(
    vocab=151936, hidden=896, layers=24, heads=14, kv_heads=2, head_size=64, intermediate=4864, context=4096,
    rope_theta=1e6, qkv_bias=True, tied=True, family="qwen2",
)  # fmt: skip
LARGE = replace(QWEN, vocab=152064, head_size=128, tied=False)
SHAPES = {
    "0.5B": QWEN,
    "1.5B": replace(QWEN, hidden=1536, layers=28, heads=12, head_size=128, intermediate=8960),
    "3B": replace(QWEN, hidden=2048, layers=36, heads=16, head_size=128, intermediate=11008),
    "7B": replace(LARGE, hidden=3584, layers=28, heads=28, kv_heads=4, intermediate=18944),
    "14B": replace(LARGE, hidden=5120, layers=48, heads=40, kv_heads=8, intermediate=13824),
    "32B": replace(LARGE, hidden=5120, layers=64, heads=40, kv_heads=8, intermediate=27648),
    "70B": replace(
        LARGE, vocab=128256, hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28672, qkv_bias=False
    ),
}
"""Size -> shape: those of Qwen2.5 and, last, of Llama 3."""
COMMON = {"tasks": "x", "precision": "bfloat16", "recompute": "layers"}
ADAPTED = {"lora": 16, "frozen_weights": "bfloat16"}
LESS: dict[str, dict[str, Any]] = {
    "QLoRA on 1 card": {"lora": 16, "quantize": "nf4"},
    "full in bfloat16 on 1 card": {"weights": "bfloat16", "optimizer": "adamw8bit"},
}
"""Column -> options that take less memory than those of the other columns."""
JOBS: dict[str, tuple[type[Training], dict[str, Any]]] = {
    "without a reference": (SFT, {}),
    "with a reference": (RL, {"env": "e", "algorithm": "grpo"}),
}
"""Title of a row -> verb and options of its runs. A reference of a policy with adapters takes no memory of its own."""


def fits(learner: LocalLearner, shape: DecoderConfig, shares: int) -> bool:
    """Whether an update fits into cards of 80 GiB that hold a share of the weights each, and no engine."""
    tokens = tokens_of_activations(shape, ROOM * ACTIVATION_SHARE)
    found = estimate_memory(learner, UpdateSize(tokens, True, None, ROOM, shares=shares))
    return found is not None and found.total <= TIGHT * ROOM


def cells(kind: type[Training], options: dict[str, Any], shape: DecoderConfig) -> Iterator[str]:
    """For each number of cards, the most that can be trained: all weights or else adapters, whole or else sharded."""
    whole = shapes_of(filled(kind, {**COMMON, **options}), shape)
    adapted = shapes_of(filled(kind, {**COMMON, **options, **ADAPTED}), shape)
    for cards in CARDS:
        ways = (
            ("full", whole, 1),
            ("full, sharded", whole, cards),
            ("LoRA", adapted, 1),
            ("LoRA, sharded", adapted, cards),
        )
        yield next((name for name, learner, shares in ways if fits(learner, shape, shares)), "-")


def rows() -> list[str]:
    """The lines of the table."""
    columns = ["1 card", *(f"{n} cards" for n in CARDS[1:]), *LESS]
    lines = [f"| model | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for job, (kind, options) in JOBS.items():
        for name, shape in SHAPES.items():
            tried = [shapes_of(filled(kind, {**COMMON, **options, **less}), shape) for less in LESS.values()]
            less = ["yes" if fits(learner, shape, 1) else "-" for learner in tried]
            lines.append(f"| {name}, {job} | {' | '.join([*cells(kind, options, shape), *less])} |")
    return lines


def main() -> None:
    text = DOCUMENT.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    DOCUMENT.write_text(before + BEGIN + "".join(f"{line}\n" for line in rows()) + END + after)


if __name__ == "__main__":
    main()
