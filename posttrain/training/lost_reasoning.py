"""Counts rows whose reasoning the chat template drops, for a line at the start of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from posttrain.core.types import Mask, Task, UserError
from posttrain.data.mixed_tasks import AnyTasks
from posttrain.envs.demonstration import lost_reasoning
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.terminal.notices import warn

READ_FOR_REASONING = 1000  # most tasks to read


def warn_lost_reasoning(
    tokenizer: Tokenizer, tasks: AnyTasks, warn: Callable[[str], None] = warn, mask: Mask = "assistant"
) -> None:
    """Warn if messages of some tasks have reasoning that the model's chat template does not show."""
    if line := lost_reasoning_line(tokenizer, tasks.examples(READ_FOR_REASONING), mask):
        warn(line)


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


def _off(tokenizer: Tokenizer) -> bool:
    """Return whether the template can show reasoning, but it is turned off."""
    return (
        tokenizer.reasoning_name is not None
        and "enable_thinking" in tokenizer.template_variables
        and tokenizer.chat_template_kwargs.get("enable_thinking") is not True
    )
