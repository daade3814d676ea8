"""Every verb that takes a configuration, declared once.

The command line, its help, recipes, the Python functions, their types for editors, the record, `view`, `audit` and `plan`
read this table. It imports nothing, so that `posttrain --help` answers at once; classes and functions are loaded when they
are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, NamedTuple


class Verb(NamedTuple):
    """A command with a configuration: what it is called, what it takes, and what it learns from.

    A verb that trains gives in `function` one that builds a run: (`RunContext`) -> `RunParts`, both in
    `posttrain.training.training_run`. The others give one that does the work: (configuration, rows, env) -> result.
    """

    config: str  # module:class of its options
    function: str  # module:function
    heading: str  # of the front page
    help: str
    example: str  # what follows its name on the command line
    reads: str = ""  # the rows that the Python function takes, in words
    given: tuple[str, ...] = ("tasks",)  # options that the Python function takes by position
    without_rows: bool = False  # the first of these may be left out: the model's run names its own
    learns: Literal["", "demonstrations", "rollouts", "preferences", "scores"] = ""  # "": it does not train
    use: str = ""  # what to do with a finished run, with {path}
    python: str = ""  # the name of the Python function, where it is not the verb's own

    @property
    def options(self) -> type[Any]:
        """The class of its configuration."""
        return load(self.config)


def load(place: str) -> Any:
    """The object at "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


OPTION_OF = {"items": "tasks", "by": "with_"}
"""Parameter of a Python function -> its option, where the names differ."""
CHAT = "talk to it  posttrain chat {path}"
CONFIG, FUNCTIONS = "posttrain.config", "posttrain.training.verbs"

VERBS: dict[str, Verb] = {
    "sft": Verb(
        config=f"{CONFIG}.training:SFT",
        function=f"{FUNCTIONS}.sft:sft",
        heading="train",
        help="Supervised fine-tuning on responses, conversations or recorded episodes.",
        example="--tasks rows.jsonl --model MODEL --out runs/sft",
        reads='Rows have "prompt" and "response", or chat "messages".',
        learns="demonstrations",
        use=CHAT,
    ),
    "rl": Verb(
        config=f"{CONFIG}.training:RL",
        function=f"{FUNCTIONS}.rl:rl",
        heading="train",
        help="Reinforcement learning from a reward function, a verifier or an environment.",
        example="--tasks rows.jsonl --env my.py:reward --model runs/sft",
        reads="`env`: a reward function (task, reply) -> float, an environment, or the name of one.",
        given=("tasks", "env", "model"),
        learns="rollouts",
        use=CHAT,
    ),
    "prefer": Verb(
        config=f"{CONFIG}.training:Prefer",
        function=f"{FUNCTIONS}.prefer:prefer",
        heading="train",
        help="Learn from preferences without sampling (DPO and its family).",
        example="--tasks pairs.jsonl --model runs/sft --out runs/prefer",
        reads='Rows have "prompt", "chosen" and "rejected"; or several "responses" with ranks, comparisons or labels; or '
        'one "response" with a "label".',
        given=("tasks", "model"),
        learns="preferences",
        use=CHAT,
    ),
    "reward-model": Verb(
        config=f"{CONFIG}.training:RewardModelling",
        function=f"{FUNCTIONS}.reward_model_training:reward_model",
        heading="train",
        help="Train a reward model from pairs, rankings, labels or scores.",
        example="--tasks pairs.jsonl --model runs/sft --out runs/reward-model",
        reads='Rows are as for `prefer`, or have a "response" with a "score" or with "steps".',
        given=("tasks", "model"),
        learns="scores",
        use="ask it      posttrain label --items items.jsonl --with reward-model={path}\n"
        "or          posttrain rl --reward-model {path} ...",
    ),
    "distill": Verb(
        config=f"{CONFIG}.training:Distill",
        function=f"{FUNCTIONS}.rl:rl",
        heading="train",
        help="On-policy distillation: a teacher scores what a student samples.",
        example="--tasks rows.jsonl --model runs/sft --teacher MODEL",
        reads="`teacher`: a model of any size with the same tokenizer. With `env`, replies are scored as well.",
        given=("tasks", "model", "teacher", "env"),
        learns="rollouts",
        use=CHAT,
    ),
    "eval": Verb(
        config=f"{CONFIG}.inference:Evaluation",
        function=f"{FUNCTIONS}.evaluate:evaluate",
        heading="evaluate",
        help="Mean reward, accuracy and pass@k on a set of tasks; --against compares models.",
        example="--tasks test.jsonl --env my.py:reward --model runs/rl --against runs/sft",
        reads="Every figure has a 95% interval.",
        given=("tasks", "env", "model"),
        without_rows=True,
        python="evaluate",
    ),
    "check": Verb(
        config=f"{CONFIG}.inference:Check",
        function="",
        heading="start",
        help="Try a reward or an environment on sample replies.",
        example="--tasks rows.jsonl --env my.py:reward",
    ),
    "sample": Verb(
        config=f"{CONFIG}.inference:Sample",
        function=f"{FUNCTIONS}.sample:sample",
        heading="evaluate",
        help="Sample replies to label or to learn from.",
        example="--tasks rows.jsonl --model runs/sft --out items.jsonl",
        reads="With `env` or a reward model, replies have scores.",
        given=("tasks", "model", "env"),
    ),
    "label": Verb(
        config=f"{CONFIG}.inference:Label",
        function=f"{FUNCTIONS}.label:label",
        heading="evaluate",
        help="Label replies: by a reward model, judge, function or person.",
        example="--items items.jsonl --with my.py:reward --pairs pairs.jsonl",
        reads='`by`: "reward-model=FOLDER", "judge=RECIPE.toml", or a reward (task, reply) -> float.',
        given=("items", "by"),
    ),
}
"""Verbs by name. Each has a table in a recipe."""


def training() -> dict[str, Verb]:
    """The verbs that train."""
    return {name: verb for name, verb in VERBS.items() if verb.learns}


def learning(*kinds: str) -> list[str]:
    """The names of the verbs that learn from these."""
    return [name for name, verb in VERBS.items() if verb.learns in kinds]


def sampling() -> list[str]:
    """The names of the verbs that learn from what the policy samples."""
    return learning("rollouts")


def name_of(kind: type[Any]) -> str:
    """The verb that a class of options belongs to: its own, or that of the class which it extends."""
    places = [f"{cls.__module__}:{cls.__qualname__}" for cls in kind.__mro__]
    return next(name for place in places for name, verb in VERBS.items() if verb.config == place)
