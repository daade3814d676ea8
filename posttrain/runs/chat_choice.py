"""The choice whether the plain prompts of rows are shown to a model as messages, in its chat template, or unchanged.

Without --chat or --no-chat, a run's checkpoint continues as that run did. For any other model, the template is used if
it belongs to an instruct model, that is, if its text after a reply ends replies of this model. Compared with a run, a
model without a run of its own, or the one with which that run began, is shown that run's system message. The decision
is stored in run.json, for resumption, evaluation and later training.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from posttrain.config.mixture_options import of_part
from posttrain.core.types import Task, Turn, UserError
from posttrain.data.chat_prompts import AsMessages
from posttrain.data.mixed_tasks import AnyTasks, MixedTasks
from posttrain.data.tasks import Stream, Tasks
from posttrain.runs.checkpoint import resolve
from posttrain.runs.run_reading import read_run, run_of

SomeTasks = TypeVar("SomeTasks", Tasks, Tasks | Stream, Tasks | MixedTasks, AnyTasks)

CHAT = "chat"  # key in run.json


class Templated(Protocol):
    """The part of a tokenizer that this module needs."""

    chat_template: str | None

    def closes_with(self, ends: Collection[int]) -> bool: ...


class Asked(Protocol):
    """Options that decide the choice."""

    @property
    def chat(self) -> bool | None: ...
    @property
    def system(self) -> str | None: ...
    @property
    def chat_template(self) -> str | None: ...


@dataclass(frozen=True)
class Chatting:
    """The form in which a model is shown plain prompts."""

    on: bool = False
    system: str | None = None
    because: str = ""  # the reason, if the user did not decide
    template: bool = False  # whether the model has a template
    parts: Mapping[str, Chatting] = field(default_factory=dict)  # of parts of a mixture that are shown otherwise

    def of(self, tasks: SomeTasks, answered: bool = False, whole: bool = False) -> SomeTasks:
        """Return the tasks as this model is shown them. `answered`: "response" becomes a message too, to be imitated.
        `whole`: the earlier messages are imitated as well.
        """
        if isinstance(tasks, MixedTasks):
            return tasks.shown_by({name: self.part(name)._form(answered, whole) for name in tasks.parts})
        return tasks.shown(self._form(answered, whole))

    def part(self, name: str) -> Chatting:
        """Return the form for a part of a mixture."""
        return self.parts.get(name, self)

    def _form(self, answered: bool, whole: bool) -> AsMessages | None:
        return AsMessages(self.system, answered, whole) if self.on else None

    def task(self, task: Task) -> Task:
        """Convert a task."""
        return AsMessages(self.system)(task) if self.on else task

    def recorded(self) -> dict[str, Any]:
        """Return the choice as an entry of run.json."""
        parts = {name: own.recorded() for name, own in self.parts.items()}
        return {"on": self.on, "system": self.system, **({"parts": parts} if parts else {})}

    def lines(self, tasks: AnyTasks, shown: Turn | None = None) -> list[str]:
        """Return the lines about the choice for the start of a run. `shown`: the environment's first turn, if there is
        one.
        """
        if not self.template:
            return []
        if shown is not None and shown.messages is None and not _plain(shown, tasks):
            said = (
                "the environment shows bare text, without the model's chat template: yield Turn(messages=[...]) instead"
            )
            return [said] if self.on else []
        if not any(isinstance(task.get("prompt"), str) for task in tasks.examples()):
            return []
        because = f" ({self.because})" if self.because else ""
        parts = [f"part {name}: prompts are {own._described}" for name, own in self.parts.items()]
        switch = "--no-chat: bare text" if self.on else "--chat puts it around them"
        return [f"prompts are {self._described}{because}; {switch}", *parts]

    @property
    def _described(self) -> str:
        if not self.on:
            return "bare text, without the model's chat template"
        return f"user messages in the model's chat template{'' if self.system is None else ', behind a system message'}"

    def check(self, given: bool | None, shown: Turn | None, option: str = "--chat") -> None:
        """Raise UserError if --chat was given, by this option, and the environment shows text of its own."""
        if given and shown is not None and shown.messages is None:
            raise UserError(
                f"{option} has no effect on the text that this environment yields: yield Turn(messages=[...]) instead, or "
                f"leave out {option}"
            )


def _plain(shown: Turn, tasks: AnyTasks) -> bool:
    """Return whether the first turn is the prompt of a row."""
    return any(task.get("prompt") == shown.text for task in tasks.examples())


def chatting(
    asked: Asked | None,
    folder: Path | None,
    tokenizer: Templated,
    ends: Collection[int],
    beside: Path | None = None,
    parts: Mapping[str, Asked] | None = None,
) -> Chatting:
    """Return the choice for a model: by these options, by the run to which its folder belongs, or by its template.

    `ends`: the ids that end its replies; `beside`: the checkpoint with which it is compared, which may lend it a system
    message; `parts`: the options of each part of a mixture. Raises UserError for --chat without a template, and for
    --system without --chat.
    """
    chat, system, other = (None, None, None) if asked is None else (asked.chat, asked.system, asked.chat_template)
    run, known = _of_run(folder) if folder is not None else (None, {})
    template, because = tokenizer.chat_template is not None, ""
    if chat is None and known and (known.get("on") is True or other is None):
        chat, because = known.get("on") is True, f"as in {run}"
    elif chat is None:
        chat = tokenizer.closes_with(ends)
        because = f"which ends replies {'as the model does' if chat else 'otherwise than the model'}"
    if chat and not template:
        raise UserError(
            "--chat needs a chat template, and this model has none: give one with --chat-template chatml (or a file), or "
            "leave the prompts as they are with --no-chat"
        )
    if system is not None and not chat:
        raise UserError(
            "--system needs prompts in a chat template, and these are bare text: add --chat, or leave --system out"
        )
    if system is None and chat and isinstance(known.get("system"), str):
        system = known["system"]
    elif system is None and chat and beside and folder and (not run or _began_with(beside, folder)):
        system = system_of(beside)
        because = because if system is None else f"{because}; its system message is that of {beside}"
    found = Chatting(chat, system, because, template)
    return replace(found, parts=_of_parts(found, parts, folder, tokenizer, ends)) if parts else found


def _of_parts(
    whole: Chatting, parts: Mapping[str, Asked], folder: Path | None, tokenizer: Templated, ends: Collection[int]
) -> dict[str, Chatting]:
    """Return the forms of the parts of a mixture that are shown otherwise than the whole."""
    found = {}
    for name, own in parts.items():
        try:
            form = chatting(own, folder, tokenizer, ends)
        except UserError as error:
            raise of_part(name, error) from None
        if (form.on, form.system) != (whole.on, whole.system):
            found[name] = form
    return found


def system_of(folder: Path) -> str | None:
    """Return the system message of a checkpoint's run."""
    system = _of_run(folder)[1].get("system")
    return system if isinstance(system, str) else None


def _began_with(trained: Path, folder: Path) -> bool:
    """Return whether the run of the first checkpoint began with the second one."""
    run = run_of(trained)
    first = read_run(run)["config"].get("model") if run is not None else None
    return isinstance(first, str) and os.path.exists(first) and resolve(first) == folder


def _of_run(folder: Path) -> tuple[Path | None, Mapping[str, Any]]:
    """Return a checkpoint's run, and that run's choice."""
    if (place := run_of(folder)) is None:
        return None, {}
    try:
        found = read_run(place).get(CHAT)
    except UserError:  # reported later, where the file is needed
        return None, {}
    return place, found if isinstance(found, dict) else {}
