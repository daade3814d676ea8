"""Text that a chat template renders between two replies: found by a placeholder in the place of the first reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from posttrain.core.types import ToolCall, UserError
from posttrain.models.tokenizer.tool_parser import ToolFormat

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

MARK = "\u2063reply\u2063"  # placeholder of a sampled reply, to render the text around it
WORD = "Xyzzy"  # placeholder of a content, to test whether a template shows it


class Continuation(NamedTuple):
    """Text that follows a reply, up to the next reply."""

    text: str
    reply: Mapping[str, Any]  # message with a placeholder for the reply, to be passed to later calls


def rendered_continuation(
    render: Render,
    form: ToolFormat | None,
    before: Sequence[Message],
    new: Sequence[Message],
    calls: Sequence[ToolCall],
) -> Continuation:
    """Return the text between the reply to `before` and the reply to `new`, see `Tokenizer.render_after`.

    `render`: renders messages with the opening of the next reply. `form`: the template's format of tool calls.
    """
    problem: UserError | None = None
    mark = _unused_mark([*before, *new])
    for reply, closing in _stand_ins(form, calls, new, mark):
        try:
            text = render([*before, reply, *new])
            end = text.find(mark) + len(mark) if text.count(mark) == 1 else -1
            if end >= 0 and closing is not None:
                end = closing(text, mark)
            if end < 0:
                continue
            _check_shown(render, text[end:], [*before, reply], new)
        except UserError as error:
            problem = problem or error
            continue
        return Continuation(text[end:], json.loads(json.dumps(reply, ensure_ascii=False).replace(mark, WORD)))
    raise problem or UserError(
        "this chat template does not keep replies in their place: use it with one turn, or yield text, not messages"
    )


def _unused_mark(messages: Sequence[Message]) -> str:
    """Return a placeholder for a reply that occurs in none of these messages, which may repeat text of the policy."""
    shown, mark = json.dumps(messages, ensure_ascii=False, default=str), MARK
    while mark in shown:
        mark = f"\u2063{mark}\u2063"
    return mark


def _stand_ins(
    form: ToolFormat | None, calls: Sequence[ToolCall], new: Sequence[Message], mark: str
) -> Iterator[tuple[dict[str, Any], Callable[[str, str], int] | None]]:
    """Yield messages with a placeholder for the reply, each with a function that finds the end of a call in a
    rendered text, or None.

    Some templates accept a tool's result only behind a call, and some end a reply with a call differently.
    """
    answered = [m for m in new if m["role"] == "tool"]
    if not calls and answered:
        calls = [
            ToolCall(str(m.get("name") or "tool"), {}, id=str(m.get("tool_call_id") or "call00000")) for m in answered
        ]
        yield {"role": "assistant", "content": mark}, None
    if calls and form is not None:
        marked = [ToolCall(call.name or "unknown", {}, id=call.id) for call in calls]
        marked[-1] = replace(marked[-1], arguments={"text": mark})
        yield form.message(marked), form.end_of_call
        yield form.message(marked[-1:]), form.end_of_call  # some templates accept one call per turn
    yield {"role": "assistant", "content": mark}, None


def _check_shown(render: Render, after: str, before: Sequence[Message], new: Sequence[Message]) -> None:
    """Raise UserError if the text rendered `after` the reply does not show the content of each new message."""
    for place, message in enumerate(new):
        content = message.get("content")
        if not isinstance(content, str) or content.strip() in after:
            continue
        # the content may be transformed, such as to JSON: test with a placeholder word instead
        marked = [{**message, "content": WORD} if i == place else message for i, message in enumerate(new)]
        if WORD not in render([*before, *marked]):
            raise UserError(
                f"this chat template drops messages with the role {message.get('role')!r}: use one that shows them "
                "(--chat-template chatml), or yield the message as text or in another role"
            )
