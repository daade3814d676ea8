"""Counts the tokens of a prompt for environments, which run in processes without a tokenizer."""

from __future__ import annotations

from typing import Any

from posttrain.core.conversation import TextEncoder
from posttrain.core.messages import one_line
from posttrain.core.types import Invalid, InvalidKind, UserError

PROMPT_TOKENS = "prompt-tokens"
"""The name of the service: `count = yield Ask(PROMPT_TOKENS, {"messages": [...], "tools": [...]})`.

Every run has it.
"""

CHARACTERS_OF_A_TOKEN = 4
"""An estimate for use without a tokenizer, as in `posttrain check`."""


def count_prompt(tokenizer: TextEncoder, content: Any) -> int | Invalid:
    """Return the number of tokens of messages with tools, as the beginning of a context; Invalid if the template
    refuses them.
    """
    try:
        text = tokenizer.render(content["messages"], True, content["tools"] or None)
        return len(tokenizer.encode(text, start=True))
    except UserError as error:
        return Invalid(one_line(error), InvalidKind.UNANSWERED)
