"""Demonstrations as transcripts: prompts are context, responses are imitated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.core.conversation import encoder_of
from posttrain.core.pictures import digests
from posttrain.core.thoughts import reasoning_of, taken_apart
from posttrain.core.transcripts import Mask, Media, SpanKind, Transcript
from posttrain.core.types import Task, ToolCall, UserError
from posttrain.data.chat_prompts import is_context, without_marks
from posttrain.data.preference_examples import CUT
from posttrain.envs.play.env_outputs import read_schema
from posttrain.models.tokenizer.rendered_reply import RenderedReply, rendered_reply
from posttrain.models.tokenizer.tool_parser import check_shown

if TYPE_CHECKING:
    from posttrain.models.tokenizer.tokenizer import Tokenizer


def last_alone(transcript: Transcript, without: Sequence[int] = ()) -> Transcript:
    """Return the same transcript with only the last reply scored, without a final token that is in `without`."""
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
    task: Task, tokenizer: Tokenizer, eos_ids: Sequence[int], mask: Mask = "assistant", length: int | None = None
) -> Transcript:
    """Return the transcript of a demonstration: `prompt` and `response`, or chat `messages`.

    Assistant turns are imitated unless their weight is 0 or their "train" is false. Prompt and response are tokenised
    separately, as when the response is sampled. A response ends with the end-of-sequence token, which is imitated,
    unless "response_stop" marks it as cut off. `mask`: see `Mask`; "all" leaves out the first token, which nothing
    precedes. A response without a prompt is a whole text, for which "all" holds. `length`: keep only so many tokens.
    Raises UserError if nothing is left to imitate.
    """
    if "prompt" not in task and "messages" not in task:
        mask = "all"
    pieces = list(_pieces(task, encoder_of(tokenizer, task), eos_ids, mask))
    if task.get("response_stop") in CUT:
        last = max((place for place, piece in enumerate(pieces) if piece.imitated), default=-1)
        pieces[last] = pieces[last]._replace(tokens=pieces[last].tokens[:-1] or pieces[last].tokens)
    if mask == "all":
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
        raise UserError(f"nothing to learn: {_reason(task, mask)}")
    return transcript


def _reason(task: Task, mask: Mask) -> str:
    """Return why nothing of a task is imitated."""
    if "messages" in task and not any(learned_of(task["messages"], mask)):
        return (
            'all replies of the assistant are context ("train": false, or "weight": 0): train one, or leave the row out'
        )
    return "no reply after a prompt of at least one token"


def demonstrate_steps(task: Task, steps: Sequence[str], tokenizer: Tokenizer, begun: str = "") -> Transcript:
    """Return the transcript of a solution in steps, each a scored span that ends with a new line, the last one too.

    There is no end-of-sequence token: solutions are cut after their first mistake, which an end would reveal. `begun`:
    text between the prompt and the first step, which is context.
    """
    chat, tokenizer = task.get("messages"), encoder_of(tokenizer, task)
    shown = task["prompt"] if chat is None else tokenizer.render(chat, generation=True)
    transcript = Transcript()
    transcript.observe(tokenizer.encode(shown, start=True))
    if begun:
        transcript.observe(tokenizer.encode(begun))
    for step in steps:
        transcript.imitate(tokenizer.encode(step + "\n"))
    return transcript


def lost_reasoning(task: Task, tokenizer: Tokenizer, mask: Mask = "assistant") -> tuple[int, int]:
    """Count the assistant messages with thoughts that the template does not show: (all, trained ones).

    Raises UserError where the template cannot render the messages.
    """
    messages, tokenizer = without_marks(task["messages"]), encoder_of(tokenizer, task)
    thoughts = [_thoughts(tokenizer, m) if m["role"] == "assistant" else "" for m in messages]
    if not any(thoughts):
        return 0, 0
    learned, tools = learned_of(task["messages"], mask), _tools(task)
    first = next((i for i, own in enumerate(learned) if own), len(messages))
    asked = tokenizer.render(messages[:first], first < len(messages) or messages[-1]["role"] != "assistant", tools)
    prompt = sum(text not in asked for text in thoughts[:first])
    later = [i for i in range(first, len(messages)) if thoughts[i]]
    lost = [i for i in later if rendered_reply(tokenizer, messages[:i], messages[i], tools, learned=learned[i]).lost]
    return prompt + len(lost), sum(learned[i] for i in lost)


def _thoughts(tokenizer: Tokenizer, message: Mapping[str, Any]) -> str:
    """Return the thoughts of a message, or "": also thoughts within its content, if the template can show thoughts."""
    apart = reasoning_of(message)
    if apart is None and tokenizer.reasoning_name is not None:
        apart = taken_apart(str(message["content"]))[0]
    return (apart or "").strip()


class _Piece(NamedTuple):
    """A run of tokens."""

    tokens: list[int]
    imitated: bool
    media: Sequence[Media] = ()  # pictures in it, at positions from its first token
    context: bool = False  # whether it is never imitated: a turn that the row leaves out


def _shown(tokenizer: Tokenizer, text: str, messages: Sequence[Mapping[str, Any]], start: bool = False) -> _Piece:
    """Tokenize the rendered text of messages."""
    if not (pictures := digests(messages)):
        return _Piece(tokenizer.encode(text, start=start), False)
    tokens, media = tokenizer.encode_seen(text, pictures, start)
    return _Piece(tokens, False, media)


def _all_imitated(pieces: Sequence[_Piece]) -> Iterator[_Piece]:
    """Yield the pieces with all tokens imitated except the first, placeholders of pictures, and turns that the row
    leaves out.
    """
    first = True
    for piece in pieces:
        if piece.context:
            yield piece
            first = first and not piece.tokens
            continue
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


def learned_of(messages: Sequence[Mapping[str, Any]], mask: Mask) -> list[bool]:
    """Return for each message whether it is imitated as a reply of the assistant."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    return [
        message["role"] == "assistant" and not is_context(message) and (mask != "last" or i == last)
        for i, message in enumerate(messages)
    ]


def is_empty(message: Mapping[str, Any]) -> bool:
    """Return whether a message has neither content, nor reasoning, nor tool calls."""
    content = message["content"]
    blank = not content.strip() if isinstance(content, str) else not content
    return blank and not message.get("tool_calls") and not (reasoning_of(message) or "").strip()


def _tools(task: Task) -> list[dict[str, Any]] | None:
    return None if task.get("tools") is None else [read_schema(tool) for tool in task["tools"]]


def _pieces(task: Task, tokenizer: Tokenizer, eos_ids: Sequence[int], mask: Mask) -> Iterator[_Piece]:
    """Yield runs of tokens in order, with whether they are imitated.

    Assistant turns before the first imitated one belong to the prompt: the template renders them as in a prompt that is
    sampled from.
    """
    if "messages" not in task:
        if "prompt" in task:
            yield _Piece(tokenizer.encode(task["prompt"], start=True), False)
        tokens = tokenizer.encode(task["response"], start="prompt" not in task)
        closed = "prompt" not in task and tokens and tokens[-1] in eos_ids  # a text that was written with its end
        yield _Piece(tokens if closed else [*tokens, eos_ids[0]], True)
        return
    messages, learned, tools = without_marks(task["messages"]), learned_of(task["messages"], mask), _tools(task)
    last = max((i for i, own in enumerate(learned) if own), default=-1)
    said = -1  # place of the assistant's last message
    reply: list[int] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not (said >= 0 or learned[i] or mask == "all"):
            continue
        if said < 0:
            yield _shown(tokenizer, tokenizer.render(messages[:i], True, tools), messages[:i], start=True)
        else:  # as a policy sees it: after its own reply as sampled, however the template shows that later
            before, new = messages[:said], messages[said + 1 : i]
            calls = _calls(messages[said])
            after, _, media, _ = _shown(tokenizer, tokenizer.render_after(before, new, calls, tools).text, new)
            ended = next((n for n in range(min(len(after), len(reply)), 0, -1) if reply[-n:] == after[:n]), 0)
            yield _Piece(after[ended:], False, [replace(m, start=m.start - ended) for m in media])
        cut = i == last and task.get("response_stop") in CUT
        text = rendered_reply(tokenizer, messages[:i], message, tools, learned=learned[i], cut=cut)
        check_shown([message], text.text)
        said, reply = i, _ended(tokenizer, text, eos_ids, calling=bool(message.get("tool_calls")))
        whole = reply if any(token in eos_ids for token in reply) else [*reply, eos_ids[0]]
        yield _Piece(whole, learned[i], context=not learned[i])


def _ended(tokenizer: Tokenizer, reply: RenderedReply, eos_ids: Sequence[int], calling: bool) -> list[int]:
    """Return the tokens of a reply up to its end: text that the template puts after that is not sampled."""
    tokens = tokenizer.encode(reply.text)
    ends = [place for place, token in enumerate(tokens) if token in eos_ids]
    content = "" if calling else reply.content.strip()
    closing = reply.text.rpartition(content)[2] if content else ""
    behind = sum(token in eos_ids for token in tokenizer.encode(closing))  # if several, a policy ends with the first
    return tokens[: ends[-max(behind, 1)] + 1] if ends else tokens


def _calls(message: Mapping[str, Any]) -> list[ToolCall]:
    """Return the tool calls of a message in OpenAI's form. Raises UserError for other forms."""
    found: list[ToolCall] = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError('a tool call is not {"type": "function", "function": {"name": ..., "arguments": ...}}')
        found.append(ToolCall(function["name"], {}, id=str(call.get("id") or f"call{len(found):05d}")))
    return found
