"""The tokens of a policy's verdict on its own reply."""

from __future__ import annotations

from posttrain.core.types import UserError
from posttrain.models.tokenizer.tokenizer import Tokenizer

YES, NO = ("Yes", "yes"), ("No", "no")


def verdict_tokens(tokenizer: Tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of yes and of no, in each spelling that the tokenizer has.

    Raises UserError if it has no spelling of one.
    """
    found = tuple(
        [tokens for tokens in map(tokenizer.encode, words) if tokenizer.unknown_id not in tokens] for words in (YES, NO)
    )
    for words, spelled in zip((YES, NO), found, strict=True):
        if not spelled:
            raise UserError(
                f"--choose verified: the model's tokenizer lacks a token for part of {words[0]!r}: give "
                "another --choose, or a model whose tokenizer has these letters"
            )
    return found[0], found[1]
