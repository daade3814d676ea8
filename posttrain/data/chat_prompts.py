"""Converts the plain prompts of rows to messages, for models with a chat template.

The columns do not change: rewards read them, and ids and the hold-out depend on them. Only the model's view changes, so
that models with and without a template get the same tasks. A prompt of hh-rlhf, a conversation as plain text, becomes
messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.types import Task

ROLES = {"Human": "user", "Assistant": "assistant"}
TURNS = re.compile(r"\n\n(Human|Assistant):")  # of hh-rlhf
MARKS = {"weight", "train"}  # keys of a message: whether it is trained
SYSTEM = ("system", "developer")  # roles of a message at the head of a conversation


def unlearned(messages: Sequence[Any]) -> list[Any]:
    """Return the messages of a prompt with weight 0 (OpenAI's key) for its assistant turns, so that none is
    imitated.
    """
    return [{**m, "weight": 0} if isinstance(m, dict) and m.get("role") == "assistant" else m for m in messages]


def without_marks(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages without the keys that define which are trained: templates must not see these."""
    return [{key: value for key, value in m.items() if key not in MARKS} if MARKS & m.keys() else m for m in messages]


def is_context(message: Mapping[str, Any]) -> bool:
    """Return whether an assistant message is excluded from training: its weight is 0, or its "train" is false."""
    return message.get("weight", 1) == 0 or message.get("train") is False


@dataclass(frozen=True)
class AsMessages:
    """Converts a task's plain prompt to a user message."""

    system: str | None = None  # a system message before the prompt, and before messages without one
    answered: bool = False  # whether "response" becomes an assistant message after the prompt, to be imitated
    whole: bool = False  # whether earlier assistant messages are imitated too

    def __call__(self, task: Task) -> Task:
        """Return the task with "messages" added to its "prompt"; a task that has only messages keeps these."""
        prompt = task.get("prompt")
        if isinstance(prompt, str):
            turns = _turns(prompt)
            said = [*self._asked(None), *turns] if turns else self._asked(prompt)
            if self.answered and isinstance(task.get("response"), str):
                said = said if self.whole else unlearned(said)
                answer = task["response"].strip() if turns else task["response"]  # without the space after "Assistant:"
                said.append({"role": "assistant", "content": answer})
            task = {**task, "messages": said}
            if turns and "responses" in task:
                task["responses"] = [text.strip() if isinstance(text, str) else text for text in task["responses"]]
        elif task.get("messages") and task["messages"][0]["role"] not in SYSTEM:
            task = {**task, "messages": [*self._asked(None), *task["messages"]]}
        told = task.get("teacher_prompt")
        return {**task, "teacher_prompt": self._asked(told)} if isinstance(told, str) else task

    def _asked(self, prompt: str | None) -> list[dict[str, Any]]:
        said = [("system", self.system), ("user", prompt)]
        return [{"role": role, "content": content} for role, content in said if content is not None]


def _turns(prompt: str) -> list[dict[str, Any]]:
    """Return the messages of an hh-rlhf prompt, which ends where the assistant replies; [] for any other prompt."""
    before, *parts = TURNS.split(prompt)
    texts = parts[1::2]
    if before.strip() or len(texts) < 2 or parts[-2] != "Assistant" or texts[-1].strip():
        return []
    return [{"role": ROLES[who], "content": text.strip()} for who, text in zip(parts[:-2:2], texts[:-1], strict=True)]
