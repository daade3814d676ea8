"""Demonstrations as transcripts: prompts are context, responses are imitated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.core.pictures import digests
from posttrain.core.types import Media, SpanKind, Task, ToolCall, Transcript, UserError
from posttrain.data.chat_prompts import without_weights
from posttrain.data.preference_examples import CUT
from posttrain.envs.play.env_outputs import read_schema

if TYPE_CHECKING:
    from posttrain.models.tokenizer.tokenizer import Tokenizer


def last_alone(transcript: Transcript, without: Sequence[int] = ()) -> Transcript:
    """Return the same conversation, with only the last reply scored, and that up to a final token of `without`."""
    last = max(place for place, span in enumerate(transcript.spans) if span.learned)
    before = [replace(span, kind=SpanKind.PROMPT, learned=False) for span in transcript.spans[:last]]
    span = transcript.spans[last]
    if span.length > 1 and transcript.tokens[span.start + span.length - 1] in without:
        span = replace(span, length=span.length - 1)
        transcript.tokens = transcript.tokens[: span.start + span.length]
        transcript.spans = [*before, span]
    else:
        transcript.spans = [*before, *transcript.spans[last:]]
    transcript.n_scored = span.length
    return transcript


def demonstrate(
    task: Task, tokenizer: Tokenizer, eos_ids: Sequence[int], mask_prompt: bool = True, length: int | None = None
) -> Transcript:
    """The transcript of a demonstration: `prompt` and `response`, or chat `messages`, whose assistant turns are imitated
    unless their weight is 0.

    Prompt and response are tokenised apart, as they are when the response is sampled. A response ends with the
    end-of-sequence token, which is part of what is imitated, unless "response_stop" says that it was cut off. `length`: the
    first so many tokens only. Raises UserError if nothing is left to imitate.
    """
    pieces = list(_pieces(task, tokenizer, eos_ids))
    if task.get("response_stop") in CUT:
        last = max(place for place, piece in enumerate(pieces) if piece.imitated)
        pieces = [*pieces[:last], _Piece(pieces[last].tokens[:-1], True)]
    if not mask_prompt:
        pieces = list(_all_imitated(pieces))
    transcript = Transcript()
    for piece in pieces:
        before = len(transcript)
        kept = piece.tokens if length is None else piece.tokens[: length - before]
        if piece.imitated:
            transcript.imitate(kept)
        else:
            whole = [m for m in piece.media if m.start + m.length <= len(kept)]
            transcript.observe(kept, media=[replace(m, start=m.start + before) for m in whole])
    if not transcript.n_scored or transcript.spans[0].learned:
        raise UserError("nothing to learn: no reply after a prompt of at least one token")
    return transcript


def demonstrate_steps(task: Task, steps: Sequence[str], tokenizer: Tokenizer, begun: str = "") -> Transcript:
    """Return the transcript of a solution in steps, each a scored span that ends with a new line, the last one too.

    Solutions are cut behind their first mistake: an end of its own would reveal that step. `begun`: text between the prompt
    and the first step, which is context.
    """
    chat = task.get("messages")
    shown = task["prompt"] if chat is None else tokenizer.render(chat, generation=True)
    transcript = Transcript()
    transcript.observe(tokenizer.encode(shown, start=True))
    if begun:
        transcript.observe(tokenizer.encode(begun))
    for step in steps:
        transcript.imitate(tokenizer.encode(step + "\n"))
    return transcript


class _Piece(NamedTuple):
    """A run of tokens."""

    tokens: list[int]
    imitated: bool
    media: Sequence[Media] = ()  # in it, counted from its first token


def _shown(tokenizer: Tokenizer, text: str, messages: Sequence[Mapping[str, Any]], start: bool = False) -> _Piece:
    """Tokenize the rendered text of messages."""
    if not (pictures := digests(messages)):
        return _Piece(tokenizer.encode(text, start=start), False)
    tokens, media = tokenizer.encode_seen(text, pictures, start)
    return _Piece(tokens, False, media)


def _all_imitated(pieces: Sequence[_Piece]) -> Iterator[_Piece]:
    """Yield every token but the first and placeholders of pictures."""
    first = True
    for piece in pieces:
        done = int(first)
        if done:
            yield _Piece(piece.tokens[:1], False, [m for m in piece.media if m.start == 0 and m.length == 1])
        for m in piece.media:
            if m.start >= done:
                yield _Piece(piece.tokens[done : m.start], True)
                yield _Piece(piece.tokens[m.start : m.start + m.length], False, [replace(m, start=0)])
                done = m.start + m.length
        yield _Piece(piece.tokens[done:], True)
        first = first and not piece.tokens


def _pieces(task: Task, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Iterator[_Piece]:
    """Yield runs of tokens in order, and whether they are imitated."""
    if "messages" not in task:
        yield _Piece(tokenizer.encode(task.get("prompt", ""), start=True), False)
        yield _Piece([*tokenizer.encode(task["response"]), eos_ids[0]], True)
        return
    messages = without_weights(task["messages"])
    said = -1  # place of the assistant's last message
    reply: list[int] = []
    tools = None if task.get("tools") is None else [read_schema(tool) for tool in task["tools"]]
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        shown = tokenizer.render(messages[:i], True, tools)
        whole = tokenizer.render(messages[: i + 1], False, tools)
        if not whole.startswith(shown):
            raise UserError(
                "this chat template rewrites what opens a reply, so the reply's tokens are not known: give another with "
                "--chat-template, or train plain prompts as bare text with --no-chat"
            )
        if said < 0:
            yield _shown(tokenizer, shown, messages[:i], start=True)
        else:  # as a policy would see it: behind what it said stands what it said, however the template shows it later
            before, new = messages[:said], messages[said + 1 : i]
            calls = _calls(messages[said])
            after, _, media = _shown(tokenizer, tokenizer.render_after(before, new, calls, tools).text, new)
            ended = next((n for n in range(min(len(after), len(reply)), 0, -1) if reply[-n:] == after[:n]), 0)
            yield _Piece(after[ended:], False, [replace(m, start=m.start - ended) for m in media])
        reply = tokenizer.encode(whole[len(shown) :])
        ends = [place for place, token in enumerate(reply) if token in eos_ids]
        content = "" if message.get("tool_calls") else str(message["content"]).strip()
        closing = whole[len(shown) :].rpartition(content)[2] if content else ""
        behind = sum(token in eos_ids for token in tokenizer.encode(closing))  # several: a policy ends with the first
        end = ends[-max(behind, 1)] + 1 if ends else len(reply)  # what the template puts after it is not sampled
        said, reply = i, reply[:end]
        yield _Piece(reply if ends else [*reply, eos_ids[0]], task["messages"][i].get("weight", 1) == 1)


def _calls(message: Mapping[str, Any]) -> list[ToolCall]:
    """Return the calls of a message in OpenAI's form. Raises UserError."""
    found: list[ToolCall] = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError('a tool call is not {"type": "function", "function": {"name": ..., "arguments": ...}}')
        found.append(ToolCall(function["name"], {}, id=str(call.get("id") or f"call{len(found):05d}")))
    return found
