"""The ids that a tokenizer puts before a text that opens a context, and its form for texts that continue one."""

from __future__ import annotations

import json
from typing import Any

import tokenizers


def opening_ids(backend: tokenizers.Tokenizer) -> list[int]:
    """Return the ids that the post-processor puts before a text. Ids behind the text are left out: they would end the
    context.
    """
    encoding = backend.encode("a", add_special_tokens=True)
    opening = []
    for id, sequence in zip(encoding.ids, encoding.sequence_ids, strict=True):
        if sequence is not None:
            break
        opening.append(id)
    return opening


def without_leading_space(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a copy of the tokenizer that neither adds a space before a text nor strips one from a decoded text."""
    description = json.loads(backend.to_str())
    changed = {
        **description,
        **{part: _as_it_stands(description[part]) for part in ("normalizer", "pre_tokenizer", "decoder")},
    }
    return backend if changed == description else tokenizers.Tokenizer.from_str(json.dumps(changed))


def _as_it_stands(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a part of tokenizer.json that neither adds nor strips a leading space."""
    if part is None or part["type"] == "Prepend" or (part["type"] == "Strip" and part.get("content") == " "):
        return None
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    if part["type"] == "Sequence":
        key = next(key for key in ("normalizers", "pretokenizers", "decoders") if key in part)
        return {**part, key: [kept for each in part[key] if (kept := _as_it_stands(each)) is not None]}
    return part
