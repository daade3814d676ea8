"""Options of whatever reads rows."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from posttrain.algorithms.algorithm_base import AlgorithmBase
from posttrain.algorithms.settings import Flag, flags
from posttrain.config.option_groups import OptionGroup
from posttrain.config.verbs import name_of
from posttrain.core.coerce import read_variable
from posttrain.core.component import option
from posttrain.envs.play.load_env import task_set

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class FromRows(OptionGroup, group="data"):
    """Source of rows."""

    algorithm_kind: ClassVar[type[AlgorithmBase] | None] = None  # its settings are options of this verb too

    @property
    def verb(self) -> str:
        """The name of its verb: of the command line, and of the table of a recipe."""
        return name_of(type(self))

    @classmethod
    def flags(cls) -> dict[str, Flag]:
        """Return the flags of its algorithms' settings, by name."""
        return flags(cls.algorithm_kind) if cls.algorithm_kind is not None else {}

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

    tasks: str = option("", first_hour=True, value="ROWS")
    """The rows: a .jsonl, .json, .csv or .parquet file, a folder, the name of a dataset, or my.py:rows. A Hugging Face
    dataset of several configurations is named with one: openai/gsm8k:main. my.py:rows is a function that yields rows,
    possibly without end. Default: the set of tasks that --env names (harbor:FOLDER)."""
    split: str | None = None
    """Split of a dataset that has several."""
    limit: int | None = option(None, above=0, most=1e12)
    """Read only the first N rows."""
    fields: dict[str, str] = option(factory=dict, first_hour=True, value="COLUMN")
    """Rename columns: --fields.prompt question --fields.answer solution. A reward finds them under both names. A dot
    selects a key inside a column: --fields.answer reward_model.ground_truth."""
    prompt_template: str | None = None
    """Build each prompt from columns: "Question: {question}\\nAnswer:". Write a literal brace as {{ or }}. On the
    command line, \\n and \\t mean a newline and a tab."""


@dataclass(frozen=True)
class ChatTemplateGroup(OptionGroup, group="model"):
    """Options of chat templates."""

    chat_template: str | None = None
    """Chat template: a Jinja file, or chatml. Default: the one in the model's folder. A run saves it with its
    checkpoints."""
    chat_template_kwargs: dict[str, Any] = option(factory=dict, value="KEY=VALUE")
    """Variables of the chat template: --chat-template-kwargs enable_thinking=false. In a recipe, a table. A run saves
    them with its checkpoints, where later commands find them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        read = {name: read_variable(value) for name, value in self.chat_template_kwargs.items()}
        object.__setattr__(self, "chat_template_kwargs", read)


@dataclass(frozen=True)
class Data(ChatTemplateGroup, FromRows, group="data"):
    """Rows, and how they become tasks of a model."""

    response_template: str | None = None
    """Build each response from columns, like --prompt-template (sft)."""
    too_long: Literal["skip", "truncate", "refuse"] = "skip"
    """Treatment of rows that exceed --max-length or the model's context: drop and count them (skip), cut them
    (truncate), or stop (refuse). truncate cuts the start of prompts, the end of demonstrations, and the middle of later
    observations of an episode. refuse measures all rows before the first step. In rl, a prompt is too long if it leaves
    no room for a reply."""
    env: str = option("", group="environment", first_hour=True)
    """Reward function or environment: my.py:reward, package.module:name, a verifier such as verify:exact_match, or a
    built-in name. Settings follow the name: search-qa,topk=5. Add verifiers up with weights: "verify:exact_match*0.9 +
    verify:tags*0.1". Functions written for other trainers: trl:rewards.py:accuracy,format and
    verl:score.py:compute_score. harbor:FOLDER is a set of tasks in containers, which makes its rows too. Built in are
    adventure, arithmetic, calculator, code, code-all, code-choice, countdown, functions, gsm8k, guess, gymnasium,
    judge, math, nemo-gym, nim, openenv, python, reasoning-gym, refusal, reward-model, search-qa, shapes, textarena,
    unscored, verdict, word-problems and worked-sums. In sft, the replies of rows run through it; for rows without
    replies, its row_to_task, if any, writes the demonstrations."""
    chat: bool | None = option(None, group="model")
    """Wrap plain prompts in the model's chat template, as the message of a user; --no-chat sends them as bare text.
    Responses of sft, prefer and reward-model are then the assistant's. Default: as in the run that trained the model;
    for other models, yes if they are instruct models (whose template ends replies as the model does). Rows of messages
    are always wrapped."""
    system: str | None = option(None, group="model", value="TEXT", first_hour=True)
    """System message of prompts, and of messages without one. Default: the system message of the run that trained the
    model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks and (found := task_set(self.env)):
            object.__setattr__(self, "tasks", f"{found.form}:{found.folder}")
