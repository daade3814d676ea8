"""Options of whatever reads rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from posttrain.algorithms.row import Row
from posttrain.algorithms.settings import Flag, flags
from posttrain.core.component import option

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class FromRows:
    """Where rows come from."""

    verb: ClassVar[str]  # of the command line, and the table of a recipe
    row: ClassVar[type[Row] | None] = None  # of which kind the rows are whose settings are options of this verb too

    @classmethod
    def flags(cls) -> dict[str, Flag]:
        """The flags of its rows' settings, by name."""
        return flags(cls.row) if cls.row is not None else {}

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Notes which options were given: when a run is resumed, one left at its default is not changed."""
        config = super().__new__(cls)
        object.__setattr__(config, "_given", frozenset(options))  # no field: equal options are equal configurations
        return config

    @property
    def given(self) -> frozenset[str]:
        """The names of the options that were given, whatever their values."""
        given: frozenset[str] = self.__dict__["_given"]
        return given

    tasks: str = ""
    """Rows: a .jsonl, .json, .csv or .parquet file, a folder, the name of a Hugging Face dataset, with its configuration
    where it has several (openai/gsm8k:main), or a function that makes rows without end: my.py:rows."""
    split: str | None = None
    """Which split of a dataset that has several."""
    limit: int | None = option(None, above=0)
    """Read only this many rows, the first ones."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names of columns: --fields.prompt question --fields.answer solution. A reward finds them under both names."""
    prompt_template: str | None = None
    """A prompt made from columns: "Question: {question}\\nAnswer:". A brace is {{ or }}. On the
    command line \\n and \\t are read as a new line and a tab."""


@dataclass(frozen=True)
class Data(FromRows):
    """Rows, and how they become tasks of a model."""

    response_template: str | None = None
    """A response made from columns, in the same way (sft)."""
    too_long: Literal["skip", "truncate", "refuse"] = "skip"
    """What happens to rows that do not fit the model's context (in rl: prompts that leave no room for a reply). skip:
    they are left out and counted; truncate: prompts lose their beginning, demonstrations their end, and what is shown later
    in an episode its middle; refuse: all are
    measured before the first step, and one of them ends the run."""
    env: str = ""
    """What plays and scores: my.py:reward, package.module:name, or a built-in name, perhaps with options of its own:
    search-qa,topk=5. Built in are adventure, arithmetic, calculator, code, code-all, code-choice, countdown, functions,
    gsm8k, guess, gymnasium, judge, math, nim, openenv, python, reasoning-gym, reward-model, search-qa, shapes, textarena,
    verdict and word-problems. In sft, rows with replies are played through it; for other rows its row_to_task makes the
    demonstrations, if it has one."""
    chat_template: str | None = None
    """How messages and tools become text: a file of Jinja, or chatml. It takes the place of the model's own, and is written
    into the checkpoints of a run. Default: what the model's folder holds."""
    chat: bool | None = None
    """Show plain prompts of rows as messages of a user, in the model's chat template; responses of sft, prefer and
    reward-model are then the assistant's. --no-chat: as bare text. Default: as the run did that the model is of, or else in
    the template of instruct models (one that ends replies as the model does). Rows of messages are in it anyway."""
    system: str | None = None
    """A system message before these prompts, and before rows of messages that have none. Default: that of the run that the
    model is of."""
