"""Valid samples that cases start from: checkpoints of every stored form, rows, and finished runs. Made once per run of
the fuzzer; a case copies what it damages."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

from fuzzing.usual import RL, SFT

CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TEXTS = [
    "What is 2 + 2? It is 4.\n",
    "Debby had 32 pieces and ate 17 of them: 32 - 17 = 15.",
    "naïve <think>café</think>",
]
LETTERS = "0123456789+-*/= .abcdefghijklmnopqrstuvwxyz<>"
SIZES: dict[str, Any] = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_size": 8, "intermediate": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
REWARD = "def reward(task, reply):\n    return sum(c.isdigit() for c in reply) / (len(reply) + 1)\n"
CHECKPOINTS = ("plain", "chat", "shards", "window")
"""One of each stored form: tied llama with a tokenizer of characters; qwen3 with byte pairs and a chat template; biased
llama with scaled rotary embeddings in several files; mistral with a sliding window."""


def rows() -> list[dict[str, Any]]:
    """Sums with prompt, response, answer and id."""
    sums = [(a, b) for a in range(1, 4) for b in range(2, 4)]
    return [
        {"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b), "level": a}
        for a, b in sums
    ]


def chats() -> list[dict[str, Any]]:
    """The same as conversations with system and assistant turns."""
    return [
        {
            "id": row["id"],
            "messages": [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["response"]},
            ],
            "answer": row["answer"],
        }
        for row in rows()
    ]


def questions() -> list[dict[str, Any]]:
    """Conversations that wait for an answer."""
    return [{**row, "messages": row["messages"][:2]} for row in chats()]


def write_rows(path: Path, content: list[Any]) -> None:
    path.write_text("".join(json.dumps(row, default=str) + "\n" for row in content), encoding="utf-8")


def make(folder: Path) -> None:
    """All samples, as folders inside `folder`."""
    import torch

    from posttrain.models.native.decoder import new_decoder
    from posttrain.models.native.decoder_shape import DecoderConfig
    from posttrain.models.native.decoder_writer import save_model
    from posttrain.models.tokenizer.tokenizer import Tokenizer

    torch.set_num_threads(1)
    characters = Tokenizer.train([LETTERS], 64, "characters")
    pairs = Tokenizer.train(TEXTS * 5, 300, "bpe", ("<|im_start|>", "<|im_end|>"))
    pairs = Tokenizer(pairs.backend, {**pairs.config, "eos_token": "<|im_end|>"}, CHATML)

    def checkpoint(name: str, tokenizer: Tokenizer, **changes: Any) -> None:
        shape = {**SIZES, "vocab": tokenizer.vocab_size, "context": 256, "tied": True, **changes}
        model = new_decoder(DecoderConfig(**shape), seed=0)
        assert tokenizer.eos_id is not None
        model.eos_ids = (tokenizer.eos_id,)
        save_model(model, folder / name, tokenizer, shard_bytes=8_000 if name == "shards" else 10**9)

    checkpoint("plain", characters)
    checkpoint("chat", pairs, qk_norm=True)
    checkpoint("shards", characters, tied=False, qkv_bias=True, o_bias=True, rope_scaling=LLAMA3)
    checkpoint("window", characters)
    _edit(folder / "window" / "config.json", model_type="mistral", sliding_window=200)
    named = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": "<|pad|>"}
    (folder / "chat" / "special_tokens_map.json").write_text(json.dumps(named))
    _edit(folder / "chat" / "generation_config.json", eos_token_id=[1, pairs.eos_id], temperature=0.6)
    _reward_model(folder)
    _old_tokenizer(folder, pairs)
    _runs(folder)


def copy(samples: Path, name: str, place: Path) -> Path:
    """A copy of one sample inside the folder of a case."""
    shutil.copytree(samples / name, place / name)
    return place / name


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=1))


def _reward_model(folder: Path) -> None:
    """The plain checkpoint with a score head in place of an output head."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder / "plain", folder / "score")
    weights = load_file(folder / "score" / "model.safetensors")
    weights["score.weight"] = torch.full((1, SIZES["hidden"]), 0.1)
    save_file(weights, folder / "score" / "model.safetensors", metadata={"format": "pt"})


def _old_tokenizer(folder: Path, pairs: Any) -> None:
    """The chat checkpoint with vocab.json and merges.txt in place of tokenizer.json."""
    shutil.copytree(folder / "chat", folder / "old")
    model = json.loads((folder / "old" / "tokenizer.json").read_text())["model"]
    (folder / "old" / "tokenizer.json").unlink()
    (folder / "old" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "old" / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    _edit(folder / "old" / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")


def _runs(folder: Path) -> None:
    """A finished run of each kind of training, with two checkpoints."""
    from posttrain.cli.main import main

    write_rows(folder / "rows.jsonl", rows())
    (folder / "env.py").write_text(REWARD)
    before = Path.cwd()
    os.chdir(folder)
    try:
        for words in (
            f"sft {SFT} --model plain --save-every 1 --out run-sft",
            f"rl {RL} --model plain --save-every 1 --out run-rl".replace("--steps 1", "--steps 2"),
        ):
            with contextlib.redirect_stdout(io.StringIO()):
                assert main(words.split()) == 0, words
    finally:
        os.chdir(before)
