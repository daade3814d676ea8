"""What tests of reward models share: tiny models of every family, tokenizers of every kind, items, and their scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models import make
from torch import Tensor

from posttrain.core.transcripts import Transcript
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.reward_model import RewardModel, ScoreShape, new_reward_model, settle
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.tokenizer.tokenizer_training import EOS, PAD, UNKNOWN, train_characters
from posttrain.training.sources.packing import Read, pack

TEXT = ["0123456789+-*/= .abcdefghijklmnopqrstuvwxyz<>"]
FAMILIES = ("llama", "qwen2", "qwen3")
Spoken = tuple[list[int], list[int]]  # ids of a prompt, and of a response with its end


def own_pad() -> Tokenizer:
    return Tokenizer.train(TEXT, 64, "characters")


def pad_is_eos() -> Tokenizer:
    """As many published checkpoints have it; another special token is there."""
    made = Tokenizer.train(TEXT, 64, "characters")
    return Tokenizer(made.backend, {**made.config, "pad_token": EOS})


def eos_alone() -> Tokenizer:
    """The only special token is the end, so a new one has to be made."""
    backend = train_characters(TEXT, 64, [EOS, UNKNOWN])
    backend.add_special_tokens([EOS])
    assert backend.token_to_id(PAD) is None
    return Tokenizer(backend, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": EOS})


def no_names() -> Tokenizer:
    """Nothing is named, the end only in generation_config.json."""
    made = eos_alone()
    return Tokenizer(made.backend, {"tokenizer_class": "PreTrainedTokenizerFast"})


TOKENIZERS = {"own pad": own_pad, "pad is eos": pad_is_eos, "eos alone": eos_alone, "no names": no_names}


def decoder(tokenizer: Tokenizer, family: str = "llama", tied: bool = True, seed: int = 0) -> Decoder:
    config = DecoderConfig(
        vocab=tokenizer.vocab_size, hidden=32, layers=2, heads=4, kv_heads=2, head_size=8, intermediate=48, context=64,
        tied=tied, family=family, qkv_bias=family == "qwen2", qk_norm=family == "qwen3",
    )  # fmt: skip
    model = new_decoder(config, seed)
    eos = tokenizer.backend.token_to_id(EOS)
    assert eos is not None
    model.eos_ids = (eos,)
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform, so that mistakes show
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


def move(model: RewardModel, by: float, seed: int) -> None:
    """As training does, at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
        model.score.mul_(3)


def started(folder: Path, kind: str, tokenizer: Tokenizer) -> Path:
    """A backed language model whose tokenizer knows as many tokens as it does."""
    end = tokenizer.backend.token_to_id(EOS)
    make(kind, folder, vocab_size=tokenizer.vocab_size, eos_token_id=end, pad_token_id=None)
    tokenizer.save(folder)
    return folder


def trained(
    folder: Path,
    tokenizer: Tokenizer,
    start: Decoder | str,
    shape: ScoreShape = ScoreShape(),  # noqa: B008
    seed: int = 1,
) -> RewardModel:
    """A reward model as training writes it, its head and backbone moved a little; folder/start holds what it began from.

    `start`: a decoder, or the `model_type` of a new model, native or backed.
    """
    native = decoder(tokenizer, start) if start in FAMILIES else start
    if isinstance(native, Decoder):
        save_model(native, folder / "start", tokenizer)
        named = json.loads((folder / "start" / "config.json").read_text())
        del named["eos_token_id"]  # it stands in generation_config.json alone, as in many checkpoints
        (folder / "start" / "config.json").write_text(json.dumps(named))
    else:
        started(folder / "start", native, tokenizer)
    model = new_reward_model(folder / "start", shape, seed)
    kept = settle(model, Tokenizer.load(folder / "start"), model.eos_ids)
    move(model, 0.05 if isinstance(native, Decoder) else 0.02, seed)
    model.save(folder / "reward")
    kept.save(folder / "reward")
    return model


def spoken(tokenizer: Tokenizer, end: int) -> list[Spoken]:
    """Prompts and responses of many lengths; the first two have one prompt."""
    said = [
        ("1+1=", "2"),
        ("1+1=", "3 or so"),
        ("a", "b"),
        ("what is the time", "half past nine"),
        ("x" * 20, "y" * 30),
    ]
    return [(tokenizer.encode(p, start=True), [*tokenizer.encode(r), end]) for p, r in said]


def transcript(prompt: Sequence[int], *responses: Sequence[int]) -> Transcript:
    """A prompt with a response, or with the steps of one."""
    made = Transcript()
    made.observe(prompt)
    for response in responses:
        made.imitate(response)
    return made


@torch.no_grad()
def scores(model: RewardModel, texts: Sequence[Spoken]) -> Tensor:
    """What training computes of these, laid together, [n]."""
    read: Read = "each" if model.shape.pooling == "mean" else "last"
    packed = pack([[transcript(*text)] for text in texts], range(len(texts)), read=read)
    each = model.head.logits(model.hidden(packed.layout, packed.at))[:, 0]
    return torch.stack([each[packed.transcript == place].mean() for place in range(len(texts))])


@torch.no_grad()
def theirs(model: Any, texts: Sequence[Spoken], pad: int | None = None, side: str = "right") -> Tensor:
    """transformers' scores: of each text alone, or of a batch that is padded on one side."""
    if pad is None:
        return torch.cat([theirs(model, [text], 0) for text in texts])
    longest = max(len(p) + len(r) for p, r in texts)
    rows, masks = [], []
    for prompt, response in texts:
        tokens = [*prompt, *response]
        fill = [pad] * (longest - len(tokens))
        rows.append(tokens + fill if side == "right" else fill + tokens)
        ones, zeros = [1] * len(tokens), [0] * len(fill)
        masks.append(ones + zeros if side == "right" else zeros + ones)
    found: Tensor = model(input_ids=torch.tensor(rows), attention_mask=torch.tensor(masks)).logits[:, 0]
    return found
