"""Warnings about rows, at the start of a run: mistyped columns, text and reasoning that the model does not see, and
prompts that responses repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from posttrain.core.conversation import TextEncoder
from posttrain.core.messages import clip
from posttrain.core.transcripts import Mask
from posttrain.core.types import Task, UserError
from posttrain.data.mixed_tasks import AnyTasks
from posttrain.data.tasks_from_rows import is_script
from posttrain.envs.demonstration import lost_reasoning
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.terminal.notices import warn

COLUMNS = ("prompt", "messages", "response", "completion", "answer", "chosen", "rejected", "label", "score")
LISTS = ("responses", "completions", "answers", "labels", "scores")  # columns that a reward may read
NEAR = 0.8  # similarity from which a name is a mistyped one
READ_FOR_UNKNOWN = 20  # most tasks to read
LONGEST_READ = 100_000  # characters of each of their texts
MOST_UNKNOWN = 0.01  # share of tokens that may be unknown to the tokenizer
MOST_READ = 1000  # most tasks to read for lost reasoning, and for repeated prompts
LEAST_REPEATED = 8  # characters of a prompt; a response may begin with a shorter prompt by chance


def warn_near_names(fields: Mapping[str, str], warn: Callable[[str], None] = warn) -> None:
    """Warn about names of `--fields` that look like misspelt columns; they are valid, as a reward may read any name."""
    for name, column in fields.items():
        if name not in (*COLUMNS, *LISTS) and (close := get_close_matches(name, COLUMNS, 1, NEAR)):
            warn(f"--fields.{name} {column}: only your own code reads {name!r}; did you mean --fields.{close[0]}?")


def warn_unread(
    tokenizer: Tokenizer, tasks: AnyTasks, warn: Callable[[str], None] = warn, mask: Mask = "assistant"
) -> None:
    """Warn about text of some tasks for which the tokenizer has no tokens, reasoning that its template drops, and
    messages with marks of the template.
    """
    warn_unknown_tokens(tokenizer, tasks, warn)
    for line in message_lines(tokenizer, tasks, mask):
        warn(line)


def warn_unknown_tokens(tokenizer: Tokenizer, tasks: AnyTasks, warn: Callable[[str], None] = warn) -> None:
    """Warn if the tokenizer has no tokens for more than `MOST_UNKNOWN` of some tasks' text, which the model cannot
    read.
    """
    texts = (text for task in tasks.examples(READ_FOR_UNKNOWN) for text in texts_of(task))
    _warn_unknown_tokens(tokenizer, texts, "the tasks' text", warn)


def warn_unknown_tokens_in_episodes(
    tokenizer: TextEncoder, texts: Iterable[str], warn: Callable[[str], None] = warn
) -> None:
    """Warn if the tokenizer has no tokens for more than `MOST_UNKNOWN` of an environment's texts."""
    _warn_unknown_tokens(tokenizer, texts, "what the environment shows", warn)


def _warn_unknown_tokens(tokenizer: TextEncoder, texts: Iterable[str], what: str, warn: Callable[[str], None]) -> None:
    unknown = tokenizer.unknown_id
    if unknown is None:
        return
    encoded = [(text, tokenizer.encode(text[:LONGEST_READ])) for text in texts]
    count = sum(tokens.count(unknown) for _, tokens in encoded)
    total = sum(len(tokens) for _, tokens in encoded)
    if count > MOST_UNKNOWN * total:
        example = next(text for text, tokens in encoded if unknown in tokens)
        warn(
            f"the model's tokenizer has no token for {count / total:.0%} of {what}, as in {clip(repr(example))}, and reads "
            "all of it as one unknown token: train with a tokenizer that has these characters"
        )


def warn_bad_responses(tasks: AnyTasks, warn: Callable[[str], None] = warn) -> None:
    """Warn if some responses that are to be imitated are labelled as bad ones."""
    some = tasks.examples(MOST_READ)
    bad = sum(task.get("label") is False for task in some)
    if bad:
        warn(
            f"{bad:,} of {len(some):,} rows checked have the label false, and sft imitates them too: leave them out, or let "
            "posttrain prefer --algorithm kto learn from both kinds"
        )


def texts_of(task: Task) -> list[str]:
    """Return the texts of a task: its prompt or messages, and its responses."""
    said: list[Any] = [task.get("prompt"), task.get("response"), *(task["replies"] if is_script(task) else ())]
    said += [message["content"] for message in task.get("messages") or ()]
    for response in task.get("responses") or ():
        said += [response] if isinstance(response, str) else response
    return [text for text in said if isinstance(text, str)]


def message_lines(tokenizer: Tokenizer, tasks: AnyTasks, mask: Mask = "assistant") -> list[str]:
    """Return the warnings about messages of these tasks: reasoning that is dropped, marks of the template."""
    read = tasks.examples(MOST_READ)
    return [*filter(None, [lost_reasoning_line(tokenizer, read, mask), marks_line(tokenizer, read)])]


def lost_reasoning_line(tokenizer: Tokenizer, tasks: Iterable[Task], mask: Mask = "assistant") -> str:
    """Return the warning about these tasks; "" if the template shows all of their reasoning."""
    if tokenizer.chat_template is None:
        return ""
    read, rows, trained = 0, 0, 0
    for task in tasks:
        read += 1
        if task.get("messages"):
            with suppress(UserError):  # reported later, when the row is tokenised
                lost, learned = lost_reasoning(task, tokenizer, mask)
                rows, trained = rows + bool(lost), trained + bool(learned)
    if not rows:
        return ""
    name = tokenizer.reasoning_name
    why = "reads none" if name is None else "drops the reasoning of earlier turns" if not trained else "drops it"
    on = " (--chat-template-kwargs enable_thinking=true may keep it)" if _off(tokenizer) and trained else ""
    return (
        f"{rows:,} of {read:,} rows have reasoning that the model does not see, {trained:,} of them in a trained reply: "
        f"the chat template {why}{on}"
    )


def marks_line(tokenizer: Tokenizer, tasks: Iterable[Task]) -> str:
    """Return the warning about messages that contain a mark of the chat template, such as <|im_end|>; "" without any."""
    if tokenizer.chat_template is None:
        return ""
    marks: set[str] = set()
    with suppress(UserError):  # a template with needs of its own
        shown = tokenizer.encode(tokenizer.render([{"role": "user", "content": "a"}]))
        marks = {tokenizer.added[id] for id in tokenizer.special_ids.intersection(shown)}
    read, rows, found = 0, 0, ""
    for task in tasks:
        read += 1
        texts = [
            message["content"] for message in task.get("messages") or () if isinstance(message.get("content"), str)
        ]
        inside = next((mark for mark in sorted(marks) if any(mark in text for text in texts)), None)
        rows, found = rows + (inside is not None), found or inside or ""
    if not rows:
        return ""
    return (
        f"{rows:,} of {read:,} rows have {found!r} in the text of a message, which the model reads as a mark of its chat "
        "template, such as the end of a turn: take it out of the text, or write it differently"
    )


def _off(tokenizer: Tokenizer) -> bool:
    """Return whether the template can show reasoning, but it is turned off."""
    return (
        tokenizer.reasoning_name is not None
        and "enable_thinking" in tokenizer.template_variables
        and tokenizer.chat_template_kwargs.get("enable_thinking") is not True
    )


def warn_repeated_prompts(tasks: AnyTasks, warn: Callable[[str], None] = warn) -> None:
    """Warn if some responses to a prompt begin with the prompt and others do not, as the model would learn that
    difference.

    A prompt that all of its responses repeat is removed when the rows are read.
    """
    some = tasks.examples(MOST_READ)
    found = [task for task in some if _repeated_by_some(task)]
    if found:
        warn(
            f"in {len(found)} of {len(some)} rows checked, some responses begin with the prompt and others do not, as in "
            f"{clip(repr(found[0]['prompt']))}: remove the prompt from all responses, or the model learns to repeat it"
        )


def _repeated_by_some(task: Task) -> bool:
    prompt, responses = task.get("prompt"), [text for text in task["responses"] if isinstance(text, str)]
    if not isinstance(prompt, str) or len(prompt.strip()) < LEAST_REPEATED:
        return False
    return len({text.startswith(prompt.strip()) for text in map(str.lstrip, responses)}) > 1
