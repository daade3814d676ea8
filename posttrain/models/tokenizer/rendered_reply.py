"""Text of a reply in the data, as the policy would sample it behind the template's opening of a reply.

Training uses the same opening as sampling, and thoughts are at the place that the template gives them. A template may
open the thoughts itself (<think> in the opening) and leave them out of the rendered message, as DeepSeek-R1's does:
they are put back. It may also write an empty block of thoughts into a message that has none, as Qwen3's does: the block
is removed, since the row has no such text, unless the message has an empty "reasoning_content".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.core.thoughts import CLOSES, OPENS, reasoning_of, taken_apart, without_reasoning
from posttrain.core.types import UserError

if TYPE_CHECKING:
    from posttrain.models.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, Any]

_OPENED = re.compile(rf"{OPENS}\s*\Z")
_EMPTY = re.compile(rf"\A\s*{OPENS}\s*{CLOSES}\n*")
REWRITTEN = (
    "this chat template rewrites the beginning of a reply, so the reply's tokens are unknown: give another with "
    "--chat-template, or train plain prompts as bare text with --no-chat"
)


class RenderedReply(NamedTuple):
    """A reply as text that follows the template's opening."""

    text: str  # from the opening to the end of the rendering, which may be behind the end of the reply
    content: str  # content of the message, without thoughts
    lost: bool = False  # whether the template does not show the thoughts that the message has


def rendered_reply(
    tokenizer: Tokenizer,
    before: Sequence[Message],
    message: Message,
    tools: Sequence[Message] | None = None,
    *,
    learned: bool = True,
    cut: bool = False,
) -> RenderedReply:
    """Return the text of the assistant's `message` behind the messages `before`.

    `learned`: whether the reply is trained on, not context. `cut`: whether the reply was cut off, perhaps within its
    thoughts. Raises UserError if the text that a policy would sample cannot be determined.
    """
    shown = tokenizer.render(before, True, tools)
    opened = _OPENED.search(shown)
    thoughts, content = reasoning_of(message), str(message["content"])
    if thoughts is None and CLOSES in content and (opened or tokenizer.reasoning_name is not None):
        thoughts, content = taken_apart(content)
        message = {**message, "content": content, "reasoning_content": thoughts}

    def rendered(one: Message) -> str:
        return tokenizer.render([*before, one], False, tools)

    whole = rendered(message)
    if opened:
        if thoughts is None and cut:
            return RenderedReply(content, content)
        if thoughts is None and learned:
            raise UserError(_without_thoughts(tokenizer))
        return RenderedReply(_behind_opened(whole, shown, opened.start(), thoughts or ""), content)
    text = _behind(whole, shown)
    if thoughts is None:
        return RenderedReply(_EMPTY.sub("", _known(text)), content)
    if text is not None and thoughts.strip() in text:
        return RenderedReply(text, content)
    plain = _known(_behind(rendered(without_reasoning(message)), shown))
    return RenderedReply(_EMPTY.sub("", plain), content, lost=True)


def _behind_opened(whole: str, shown: str, opened: int, thoughts: str) -> str:
    """Return the reply behind an opening that opens the thoughts itself, at character `opened`."""
    text = _behind(whole, shown)
    if text is not None and thoughts.strip() in text and CLOSES in text:
        return text
    return f"{thoughts}\n{CLOSES}\n\n{_known(_behind(whole, shown[:opened]))}"


def _behind(whole: str, shown: str) -> str | None:
    return whole[len(shown) :] if whole.startswith(shown) else None


def _known(text: str | None) -> str:
    if text is None:
        raise UserError(REWRITTEN)
    return text


def _without_thoughts(tokenizer: Tokenizer) -> str:
    off = (
        "--chat-template-kwargs enable_thinking=false, or " if "enable_thinking" in tokenizer.template_variables else ""
    )
    return (
        f'this chat template begins each reply with its thoughts, and a trained message has none: pass {off}"train": false '
        'in that message, or give it "reasoning_content" ("" trains empty thoughts)'
    )
