"""Builds the tokenizer that the metadata of a GGUF file describes: `tokenizers` description, special tokens, template.

Byte-level BPE is built here. SentencePiece vocabularies are converted by transformers, which derives the merges that
such a file does not name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from posttrain.core.extras import install, installed
from posttrain.core.types import UserError
from posttrain.models.gguf.gguf_file import GgufFile, read_gguf
from posttrain.models.tokenizer.tokenizer_files import check_ids, refusing
from posttrain.models.tokenizer.tokenizer_training import WORDS

KEY = "tokenizer.ggml."
MODEL, TOKENS, TYPES, MERGES, PRE = (f"{KEY}{name}" for name in ("model", "tokens", "token_type", "merges", "pre"))
TEMPLATE = "tokenizer.chat_template"
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
CONTROL, USER_DEFINED = 3, 4  # types of tokens that are matched literally; the first are special
CONVERTED = ("llama", "gemma4", "t5")  # by transformers

_GPT2, _DIGITS = "GPT-2", "digits"  # the expression of ByteLevel itself, and digits one by one before it
_LLAMA3 = WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+END|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*END"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASES.replace("END", "") + r"|\p{N}" + _REST
_GPT4O = _CASES.replace("END", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + _REST
_NAMES = {
    _GPT2: "gpt-2 phi-2 mpt olmo",
    _DIGITS: "smollm starcoder refact command-r codeshell exaone",
    _LLAMA3: "llama3 llama-v3 llama-bpe falcon3 pixtral lfm2 dbrx smaug-bpe",
    WORDS: "qwen2 deepseek-r1-qwen megrez",
    _TEKKEN: "tekken",
    _GPT4O: "gpt-4o llama4",
}
SPLITS = {name: split for split, names in _NAMES.items() for name in names.split()}
"""How a text is split before byte pairs are merged, by the name that llama.cpp gives it."""
WHOLE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")
"""Those where a piece that is a token is not built from its merges."""


def gguf_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any], str | None]:
    """Return (tokenizer, content of tokenizer_config.json, chat template) of a GGUF file.

    Raises UserError for a file without a tokenizer, or with one that is damaged or unknown.
    """
    file = read_gguf(path)
    if not {MODEL, TOKENS} <= file.metadata.keys():
        raise UserError(f"{path} holds no tokenizer ({MODEL}, {TOKENS}): convert the whole model folder to GGUF anew")
    kind, tokens = file.text(MODEL), _texts(file, TOKENS)
    if kind not in ("gpt2", *CONVERTED):
        raise UserError(f"{path}: {MODEL} is {kind!r:.60}; supported are gpt2, {', '.join(CONVERTED)}: give the folder")
    if len(set(tokens)) < len(tokens):
        raise UserError(f"{path} is damaged, copy it again: {TOKENS} names a token twice")
    special = dict(_special(file, tokens))
    template = file.text(TEMPLATE) if TEMPLATE in file.metadata else None
    backend = _byte_level(file, tokens) if kind == "gpt2" else _converted(file)
    bos = special.get("bos_token")
    if bos is not None and file.metadata.get(f"{KEY}add_bos_token", kind == "llama") is True:
        backend.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, tokens.index(bos))])
    return backend, {"tokenizer_class": "PreTrainedTokenizerFast", **special}, template


def _special(file: GgufFile, tokens: list[str]) -> Iterator[tuple[str, str]]:
    for name, key in SPECIAL.items():
        id = file.metadata.get(f"{KEY}{key}_token_id")
        if id is None:
            continue
        if type(id) is not int or not 0 <= id < len(tokens):
            raise file.refuse(f"{KEY}{key}_token_id", f"a token id below {len(tokens)}")
        yield name, tokens[id]


def _texts(file: GgufFile, key: str) -> list[str]:
    found = file.metadata.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise file.refuse(key, "a list of texts")
    return found


def _byte_level(file: GgufFile, tokens: list[str]) -> tokenizers.Tokenizer:
    pre, types = file.text(PRE), file.metadata.get(TYPES, [])
    if pre not in SPLITS:
        raise UserError(f"{file.path}: {PRE} is {pre!r:.60}; supported are {', '.join(SPLITS)}: give the folder")
    if not isinstance(types, list) or len(types) not in (0, len(tokens)):
        raise file.refuse(TYPES, f"a list of {len(tokens)} numbers")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _texts(file, MERGES))]
    with refusing(f"{file.path}: its tokenizer cannot be built"):
        vocabulary = {token: id for id, token in enumerate(tokens)}
        backend = tokenizers.Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in WHOLE))
        backend.pre_tokenizer = _split(SPLITS[pre])
        backend.decoder = decoders.ByteLevel()
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
        literal = zip(tokens, types, strict=False)
        backend.add_tokens([_literal(token, kind) for token, kind in literal if kind in (CONTROL, USER_DEFINED)])
        check_ids(backend)
    return backend


def _literal(token: str, kind: int) -> AddedToken:
    return AddedToken(token, normalized=False, special=kind == CONTROL)


def _split(how: str) -> Any:
    if how == _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if how == _DIGITS:
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        return pre_tokenizers.Sequence([digits, words])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(how), "isolated"), byte_level])


def _converted(file: GgufFile) -> tokenizers.Tokenizer:
    if not installed("transformers"):
        raise UserError(f"{file.path}: a tokenizer of SentencePiece needs transformers: {install('transformers')}")
    with refusing(f"{file.path}: transformers cannot build its tokenizer"):
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name, local_files_only=True)
        backend: tokenizers.Tokenizer = found.backend_tokenizer
        check_ids(backend)
    return backend
