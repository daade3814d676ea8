"""Options of the curriculum: the order of the tasks."""

from dataclasses import dataclass, fields
from typing import Literal

from posttrain.config.option_groups import OptionGroup
from posttrain.core.component import option
from posttrain.core.messages import dashed
from posttrain.core.types import UserError


@dataclass(frozen=True)
class CurriculumGroup(OptionGroup, group="sampling"):
    """The order of the tasks."""

    curriculum: Literal["uniform", "solve-rate", "stages", "levels"] = "uniform"
    """Order of the tasks. uniform: each once per epoch. solve-rate: those that the policy solves about half of the time
    come first. stages: by a column, the lowest value first; a stage ends at --curriculum-accuracy. levels: the same with
    new tasks of the function tasks(seed, level) that --tasks my.py:tasks names; levels count from 1, and one without
    rows ends them."""
    curriculum_column: str = option("", value="COLUMN")
    """Column with the stage of a task, for --curriculum stages: numbers, or strings in alphabetical order. Or a
    function of the task that returns it, as my.py:stage."""
    curriculum_accuracy: float = option(0.8, above=0, below=1)
    """Running accuracy at which a stage, or a level, ends."""
    curriculum_floor: float = option(0.1, least=0, below=1)
    """Share of the prompts that the curriculum does not choose. solve-rate: they go through all tasks in turn, so that
    no task is dropped for good. stages, levels: they are tasks of earlier ones."""
    curriculum_decay: float = option(0.5, least=0, below=1)
    """Decay of the curriculum's running means. solve-rate: of a task's results, at each further visit. stages, levels: of
    its results, at each step."""
    curriculum_sharpness: float = option(2.0, least=0, most=100)
    """Exponent s of --curriculum solve-rate: a task is drawn with weight (p (1 - p))^s, p its solve rate. At 0 all
    tasks have equal weight."""


OF_ONE = {
    "curriculum_column": ("stages",),
    "curriculum_accuracy": ("stages", "levels"),
    "curriculum_sharpness": ("solve-rate",),
}
"""Option -> the curricula that it applies to."""


def check_curriculum(config: CurriculumGroup) -> None:
    """Raise UserError, in one line, for options of the curriculum that contradict each other or have no effect."""
    for f in fields(CurriculumGroup)[1:]:
        wanted = OF_ONE.get(f.name, ("solve-rate", "stages", "levels"))
        if getattr(config, f.name) != f.default and config.curriculum not in wanted:  # a resumed run gives all of them
            name = dashed(f.name)
            raise UserError(f"{name} has no effect without --curriculum {' or '.join(wanted)}: leave it out")
    if config.curriculum == "stages" and not config.curriculum_column:
        raise UserError("--curriculum stages needs the column of the stages: add --curriculum-column level")
    if config.curriculum == "levels" and getattr(config, "held_out", False):
        raise UserError("--curriculum levels makes tasks as it goes: evaluate on --eval-tasks, without --held-out")
