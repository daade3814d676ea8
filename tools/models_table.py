"""Writes the table of docs/guides/models.md: every tested architecture with its results.

    PYTHONPATH=tests/helpers python tools/models_table.py

Each row is a small random model made by transformers, opened, sampled from and trained for a step. A test compares the
document with the output of this script.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from tiny_models import KINDS, make

import posttrain
from posttrain.core.types import Task
from posttrain.engines.local.backed_engine import BackedEngine
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.hf.backed import Backed
from posttrain.models.tokenizer.tokenizer import Tokenizer

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "guides" / "models.md"
BEGIN, END = "<!-- rows -->\n", "<!-- end of rows -->\n"
VLLM = ("qwen3_moe", "gemma3_text", "gpt2")
"""Kinds that `tests/engines/test_vllm.py` samples with vLLM, with heads of 32."""


def digits(task: Task, reply: str) -> float:
    return sum(c.isdigit() for c in reply) / max(1, len(reply))


def row(kind: str, place: Path, tokenizer: Tokenizer) -> str:
    """A line of the table, of a model that has learned for a step."""
    folder = make(kind, place / kind, vocab_size=tokenizer.vocab_size)
    tokenizer.save(folder)
    model = load_model(folder)
    assert isinstance(model, Backed)
    out = place / f"{kind}-run"
    tasks = [{"prompt": f"{i}+{i}="} for i in range(4)]
    run = posttrain.rl(
        tasks, digits, model=str(folder), out=str(out), steps=1, prompts=2, group=2, max_tokens=3, threads=1,
        env_workers=0, quiet=True,
    )  # fmt: skip
    assert len(run.metrics) == 1
    engine = BackedEngine(model, tokenizer)
    prompts = "prompts of any length together" if engine._pads else "prompts of one length together"
    head = [f"scale {model.scale:g}"] if model.scale != 1.0 else []
    head += [f"soft cap {model.cap:g}"] if model.cap is not None else []
    head += ["bias"] if model.head.bias is not None else []
    attention = "ours" if model.way == "flat" else model.rows_attention
    vllm = ", vLLM" if kind in VLLM else ""
    return f"| `{kind}` | {model.way} | {attention} | {', '.join(head)} | embedded ({prompts}){vllm} |"


def rows(kinds: Iterable[str] = KINDS) -> list[str]:
    tokenizer = Tokenizer.train(["0123456789+-*/= .abcdefghijklmnopqrstuvwxyz<>"], 64, "characters")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        return [row(kind, Path(place), tokenizer) for kind in kinds if kind != "qwen3"]


def main() -> None:
    text = DOCUMENT.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    DOCUMENT.write_text(before + BEGIN + "".join(f"{line}\n" for line in rows()) + END + after)


if __name__ == "__main__":
    main()
