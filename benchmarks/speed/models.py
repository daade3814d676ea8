"""Makes the model folders that every side reads: float32, one tokenizer, config and weights as transformers has them.

python benchmarks/speed/models.py PLACE

5m        the small model that was trained on GSM8K: replies of natural lengths
27m       random, Qwen2-shaped, 27 M parameters; replies end by chance
long      random, the 5 M shape with a context of 4,096; replies never end
vocab-*   random, the 5 M trunk under vocabularies of several sizes; replies never end
tiny      random, 0.1 M parameters, for the start of a run
smollm, gemma   random, shaped as SmolLM2-135M and Gemma-3-270M, made by transformers; replies hardly ever end
smollm2   SmolLM2-135M-Instruct itself, in float32, where it is at hand (`make real-model`)
"""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flops import config_of
from work import BUDGETS, DATA, MAX_TOKENS, REAL, VOCABULARIES, rows

from posttrain.cli.real_model import found
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import Decoder, causal, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer

TRAINED = DATA / "models" / "gsm8k-5m"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
NEVER = 1e-12
BACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm": (
        "llama",
        {
            "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "intermediate_size": 1536, "tie_word_embeddings": True,
        },
    ),
    "gemma": (
        "gemma3_text",
        {
            "vocab_size": 262144, "hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048, "sliding_window": 512,
            "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip


def make(place: Path) -> None:
    """All folders, anew: seconds, and never those of an older version."""
    small = config_of(TRAINED)
    large = replace(small, hidden=512, layers=8, heads=8, kv_heads=4, head_size=64, intermediate=1536)
    shutil.rmtree(place, ignore_errors=True)
    _store(load_model(TRAINED), place / "5m")
    _random(place / "27m", large, _chance(sum(BUDGETS) / len(BUDGETS), MAX_TOKENS["27m"]))
    _random(place / "long", replace(small, context=4096), NEVER)
    for vocabulary in VOCABULARIES:
        _random(place / f"vocab-{vocabulary}", replace(small, vocab=vocabulary), NEVER)
    _tiny(place / "tiny")
    for name, (kind, shape) in BACKED.items():
        _backed(place / name, kind, shape)
    if real := found():
        model = load_model(real)
        save_model(model, place / REAL, Tokenizer.load(real), dtype=torch.float32)


def _random(folder: Path, config: DecoderConfig, ends: float) -> None:
    model = new_decoder(config, seed=0)
    model.eos_ids = load_model(TRAINED).eos_ids
    set_end(model, model.eos_ids[0], ends)
    _store(model, folder)


def _store(model: Decoder, folder: Path) -> None:
    save_model(model, folder, dtype=torch.float32)
    for name in TOKENIZER_FILES:
        shutil.copyfile(TRAINED / name, folder / name)


def _backed(folder: Path, kind: str, shape: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    ids = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": load_model(TRAINED).eos_ids[0]}
    config = AutoConfig.for_model(kind, **shape, **ids, max_position_embeddings=1024)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(TRAINED / name, folder / name)


def _tiny(folder: Path) -> None:
    """As small as what a first try uses: characters for tokens."""
    tokenizer = Tokenizer.train([r["prompt"] + r["response"] for r in rows(200)], 128, "characters")
    config = DecoderConfig(
        vocab=tokenizer.vocab_size, hidden=64, layers=2, heads=4, kv_heads=2, head_size=16, intermediate=176,
        context=1024, tied=True,
    )  # fmt: skip
    model = new_decoder(config, seed=0)
    assert tokenizer.eos_id is not None
    model.eos_ids = (tokenizer.eos_id,)
    save_model(model, folder, tokenizer)


@torch.no_grad()
def set_end(model: Decoder, eos: int, chance: float) -> None:
    """Make every token of a random model the last one with this chance.

    There is no bias on the head. But where the first dimension of all embeddings holds the same number, and no layer
    writes to it, the head's first column is a bias: the end's own row is made of it alone.
    """
    head = model.head.weight
    model.embed.weight[:, 0] = head.shape[1] ** 0.5 * 0.02  # as large as all others together
    for layer in model.layers:
        layer.o.weight[0] = 0  # type: ignore[union-attr, index]
        layer.down.weight[0] = 0  # type: ignore[union-attr, index]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, len(head), (256,), generator=generator).to(head.device)
    hidden = model(tokens, torch.arange(256, device=head.device), causal)
    head[eos] = 0
    others = (hidden @ head.T).float().index_fill_(1, tokens.new_tensor([eos]), -math.inf).logsumexp(-1)
    head[eos, 0] = ((others + math.log(chance / (1 - chance))) / hidden[:, 0]).mean()


def _chance(mean: float, most: int) -> float:
    """With which chance per token replies, cut off at `most`, have this mean."""
    low, high = 1e-6, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        found = (1 - (1 - middle) ** most) / middle
        low, high = (middle, high) if found > mean else (low, middle)
    return low


if __name__ == "__main__":
    make(Path(sys.argv[1]))
