"""Trains new tokenizers: byte-level BPE, and single characters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer

from posttrain.core.types import UserError
from posttrain.models.tokenizer.tokenizer_files import VOCAB_MOST

PAD, EOS, UNKNOWN = "<|pad|>", "<|eos|>", "<|unk|>"

# Splits a text before byte pairs are merged: words with the character before them, single digits, punctuation, line
# ends, spaces. It is Qwen2's, because beside a qwen2 model transformers ignores the split in tokenizer.json.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(
    texts: Iterable[str], vocab: int, kind: str, special: Sequence[str]
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return a new tokenizer and its tokenizer_config.json, see `Tokenizer.train`."""
    if vocab > VOCAB_MOST:
        raise UserError(f"vocab is {vocab}: give at most {VOCAB_MOST:,}")
    if kind not in ("bpe", "characters"):
        raise UserError(f'kind must be "bpe" or "characters", not {kind!r}')
    unknown = [UNKNOWN] if kind == "characters" else []
    named = [PAD, EOS, *unknown, *special]
    backend = (train_characters if unknown else train_bpe)(texts, vocab, named)
    backend.add_special_tokens(named)
    return backend, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN if unknown else None,  # without the entry, transformers may add its own
        "clean_up_tokenization_spaces": False,
    }


def train_bpe(texts: Iterable[str], vocab: int, special: list[str]) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab < len(alphabet) + len(special):
        raise UserError(f"vocab is {vocab}: bytes and special tokens need at least {len(alphabet) + len(special)}")
    backend = tokenizers.Tokenizer(BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    return backend


def train_characters(texts: Iterable[str], vocab: int, special: list[str]) -> tokenizers.Tokenizer:
    if vocab <= len(special):
        raise UserError(f"vocab is {vocab}: give more than the {len(special)} that special tokens need")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    frequent = sorted(counts, key=lambda character: (-counts[character], character))[: vocab - len(special)]
    ids = {token: id for id, token in enumerate([*special, *sorted(frequent)])}
    backend = tokenizers.Tokenizer(WordLevel(ids, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend
