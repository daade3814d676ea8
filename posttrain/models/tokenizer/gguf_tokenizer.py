"""Builds the tokenizer that the metadata of a GGUF file describes: a `tokenizers` object, special tokens, template.

Two kinds: byte-level BPE ("gpt2"), and the BPE of SentencePiece ("llama"), whose merges follow from its vocabulary. The
file only names the method of splitting a text; `SPLITS` defines each as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from posttrain.core.types import UserError
from posttrain.models.gguf.gguf_file import GgufFile, read_gguf
from posttrain.models.tokenizer.tokenizer_files import check_ids, refusing
from posttrain.models.tokenizer.tokenizer_training import WORDS

KEY = "tokenizer.ggml."
MODEL, TOKENS, TYPES, MERGES, PRE, SCORES = (
    f"{KEY}{name}" for name in ("model", "tokens", "token_type", "merges", "pre", "scores")
)
TEMPLATE = "tokenizer.chat_template"
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
CONTROL, USER_DEFINED = 3, 4  # types of tokens that are matched literally; the first are special
KINDS = ("gpt2", "llama", "gemma4")
SPACE = "\u2581"  # a space in SentencePiece

_GPT2, _DIGITS = "GPT-2", "digits"  # ByteLevel's own expression, without and with digits split one by one before it
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
BEGINS = ("llama3", "llama-v3", "llama-bpe")  # texts begin with BOS unless the file has a flag against it
LONGEST = 4096  # maximum of characters in a token
WHOLE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")
"""Splits in which a piece that is a token is not built from its merges."""


def gguf_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any], str | None]:
    """Return (tokenizer, content of tokenizer_config.json, chat template) of a GGUF file.

    Raises UserError if the file has no tokenizer, or one that is damaged or unknown.
    """
    file = read_gguf(path)
    if not {MODEL, TOKENS} <= file.metadata.keys():
        raise UserError(f"{path} has no tokenizer ({MODEL}, {TOKENS}): convert the whole model folder to GGUF again")
    kind, tokens = file.text(MODEL), _texts(file, TOKENS)
    if kind not in KINDS:
        raise UserError(
            f"{path}: {MODEL} is {kind!r:.60}; supported are {', '.join(KINDS)}: give the Hugging Face folder"
        )
    if len(set(tokens)) < len(tokens):
        raise UserError(f"{path} is damaged, copy it again: {TOKENS} names a token twice")
    special = dict(_special(file, tokens))
    template = file.text(TEMPLATE) if TEMPLATE in file.metadata else None
    gemma = file.architecture.startswith("gemma")
    with refusing(f"{path}: its tokenizer cannot be built"):
        backend = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens, special, gemma)
        typed, there = zip(tokens, _types(file, len(tokens)), strict=False), backend.get_vocab()
        literal = [(token, kind) for token, kind in typed if kind in (CONTROL, USER_DEFINED) and token in there]
        backend.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL) for token, kind in literal])
        check_ids(backend)
        bos = special.get("bos_token")
        usual = kind == "llama" or file.metadata.get(PRE) in BEGINS
        if bos is not None and file.metadata.get(f"{KEY}add_bos_token", usual) is True and kind != "gemma4":
            if bos.startswith("$") or ":" in bos:
                raise ValueError(f"a text that begins with {bos!r:.40}")
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


def _types(file: GgufFile, count: int) -> list[Any]:
    types = file.metadata.get(TYPES, [])
    if not isinstance(types, list) or len(types) not in (0, count):
        raise file.refuse(TYPES, f"a list of {count} numbers")
    return types


def _byte_level(file: GgufFile, tokens: list[str]) -> tokenizers.Tokenizer:
    pre = file.text(PRE)
    if pre not in SPLITS:
        raise UserError(
            f"{file.path}: {PRE} is {pre!r:.60}; supported are {', '.join(SPLITS)}: give the Hugging Face folder"
        )
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(BPE(vocabulary, _merges(file), ignore_merges=pre in WHOLE))
    backend.pre_tokenizer, backend.decoder = _split(SPLITS[pre]), decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in _texts(file, MERGES))]


def _sentencepiece(file: GgufFile, tokens: list[str], special: Mapping[str, str], gemma: bool) -> tokenizers.Tokenizer:
    if gemma:  # stores runs of spaces as plain spaces
        tokens = [SPACE * len(token) if not token.strip(" ") else token for token in tokens]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = _merges(file) if MERGES in file.metadata else _derived(file, tokens, vocabulary, gemma)
    unknown = {"unk_token": special["unk_token"]} if "unk_token" in special else {}
    backend = tokenizers.Tokenizer(BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True, **unknown))
    prefixed = not gemma and file.metadata.get(f"{KEY}add_space_prefix", True) is True
    if gemma:
        backend.normalizer = normalizers.Replace(" ", SPACE)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif file.architecture == "phi3":  # as in its tokenizer.json; texts with a leading space differ otherwise
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        scheme = "first" if prefixed else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", 1)] if prefixed else []
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(parts)
    return backend


def _derived(file: GgufFile, tokens: list[str], vocabulary: Mapping[str, int], gemma: bool) -> list[tuple[str, str]]:
    """Return the merges that a vocabulary implies, the best first: each way to build a token from two others. They are
    ranked by the token's score, or with Gemma by its index.
    """
    scores = [-place for place in range(len(tokens))] if gemma else file.metadata.get(SCORES)
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise file.refuse(SCORES, f"a list of {len(tokens)} numbers")
    if (longest := max(map(len, tokens))) > LONGEST:  # splitting a token in all ways takes the square of its length
        raise UserError(
            f"{file.path}: a token has {longest:,} characters, more than {LONGEST:,}: give the folder of the model"
        )
    found = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in known]
    found.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [(left, right) for *_, left, right in found]


def _split(how: str) -> Any:
    if how == _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if how == _DIGITS:
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        return pre_tokenizers.Sequence([digits, words])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(how), "isolated"), byte_level])
