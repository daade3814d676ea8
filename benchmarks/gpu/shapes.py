"""The random models and the work: shapes of Qwen2.5, prompts, rows, pairs.

A token is a character, and the tokenizer knows as many characters as the model's vocabulary has entries: every reply of a
random model is a text of its own, so that its rewards differ. The models never end a reply by themselves, so all replies
have the same length on every side.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from findings import ROOT, Setting
from models import NEVER, set_end

from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer

SHAPES = {
    "0.5b": DecoderConfig(
        vocab=151936, hidden=896, layers=24, heads=14, kv_heads=2, head_size=64, intermediate=4864, context=4096,
        rope_theta=1e6, qkv_bias=True, tied=True,
    ),
    "1.5b": DecoderConfig(
        vocab=151936, hidden=1536, layers=28, heads=12, kv_heads=2, head_size=128, intermediate=8960, context=4096,
        rope_theta=1e6, qkv_bias=True, tied=True,
    ),
    "7b": DecoderConfig(
        vocab=152064, hidden=3584, layers=28, heads=28, kv_heads=4, head_size=128, intermediate=18944, context=8192,
        rope_theta=1e6, qkv_bias=True, tied=False,
    ),
}  # fmt: skip
"""Those of Qwen2.5."""
SIGNAL = f"{ROOT / 'benchmarks' / 'speed' / 'rewards.py'}:signal"
"""A reward that spreads in every group."""
TINY = {"vocab": 512, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 16, "intermediate": 128}
CHARACTERS = ((0x20000, 42_000), (0xF0000, 65_000), (0x100000, 65_000))
"""(first, count) of characters that no normalisation changes: enough for the largest vocabulary."""


def shape_of(name: str, setting: Setting) -> DecoderConfig:
    return replace(SHAPES[name], **TINY) if setting.tiny else SHAPES[name]


def model_folder(name: str, setting: Setting) -> Path:
    """The folder of the model of that name, in bfloat16, made on the device where it is missing."""
    folder = setting.place / f"{'tiny' if setting.tiny else 'qwen2.5'}-{name}"
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    shape = shape_of(name, setting)
    tokenizer = tokenizer_of(shape.vocab)
    assert tokenizer.eos_id is not None
    model = new_decoder(shape, 0, torch.bfloat16, setting.device)
    model.eos_ids = (tokenizer.eos_id,)
    set_end(model, tokenizer.eos_id, NEVER)
    save_model(model, folder, tokenizer)
    (folder / "complete").touch()
    return folder


def tokenizer_of(vocab: int) -> Tokenizer:
    """Characters for tokens, as many as the vocabulary has entries. Those of the prompts come first: they are frequent."""
    every = "".join(chr(first + i) for first, count in CHARACTERS for i in range(count))
    return Tokenizer.train([*prompts(16) * 2, every], vocab, "characters")


def prompts(count: int) -> list[str]:
    """Questions of different lengths, about 100 characters each."""
    return [f"What is {' + '.join(str(i * 37 + k) for k in range(16 + i % 8))}? Answer:" for i in range(count)]


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def tasks(count: int) -> list[dict[str, Any]]:
    return [{"id": str(i), "prompt": text, "answer": ""} for i, text in enumerate(prompts(count))]


def rows(count: int, length: int) -> list[dict[str, Any]]:
    """Prompts with responses, `length` tokens together with the end of the sequence."""
    return [
        {"id": str(i), "prompt": prompt, "response": digits(length - len(prompt) - 1, i)}
        for i, prompt in enumerate(prompts(count))
    ]


def pairs(count: int, length: int) -> list[dict[str, Any]]:
    """Comparisons of two responses, each of `length` tokens with its prompt and the end of the sequence."""
    return [
        {
            "prompt": prompt,
            "chosen": digits(length - len(prompt) - 1, 2 * i),
            "rejected": digits(length - len(prompt) - 1, 2 * i + 1),
        }
        for i, prompt in enumerate(prompts(count))
    ]


def digits(count: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("0123456789", k=max(4, count)))
