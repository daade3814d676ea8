"""Looks for the files and folders that options name, before libraries are loaded, which takes seconds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from posttrain.config.held_out_sets import held_out_sets
from posttrain.config.mixture_options import parts_of
from posttrain.config.training import RL, Passes
from posttrain.core.types import UserError
from posttrain.data.rows import find_rows
from posttrain.envs.play.load_env import BUILTIN, task_set
from posttrain.envs.reward_sums import PREFIXES, is_sum
from posttrain.models.checkpoint_location import find_checkpoint
from posttrain.system.user_code import require_file

MODELS = ("model", "against")
"""Options that name models alone."""


def check_files(config: Any) -> None:
    """Raise the UserError of the verb for rows, an environment's file or a model that is not there.

    Nothing is read, run or downloaded. Names of the hub and of modules are left to the verb, and rows that an
    environment's task set makes.
    """
    mixed = isinstance(config, RL | Passes) and config.mixture
    for name, part in parts_of(config).items() if mixed else [("", config)]:
        try:
            _check_rows(part.tasks)
            _check_code(getattr(part, "env", ""))
        except UserError as error:
            raise UserError(f"part {name} of the mixture: {error}" if name else str(error)) from None
    for rows in held_out_sets(getattr(config, "eval_tasks", ())).values():
        _check_rows(rows)
    for name in MODELS:
        check_models(getattr(config, name, None))
    teacher = getattr(config, "teacher", None) or ""
    if not teacher.startswith(("http://", "https://")):  # else it is an endpoint
        check_models(teacher)


def check_models(names: str | tuple[str, ...] | None) -> None:
    """Raise UserError for the name of a model that is neither on this machine nor one of the hub."""
    for name in (names,) if isinstance(names, str) else names or ():
        if name:
            find_checkpoint(name)


def _check_rows(source: str) -> None:
    if not source or task_set(source):
        return
    if re.fullmatch(r".+\.py:\w+", source):
        _check_code(source)
    else:
        find_rows(source)


def _check_code(spec: str) -> None:
    """Raise UserError for a function of a file that is not there: `FILE.py:NAME`, perhaps with options."""
    file, colon, _ = spec.partition(",")[0].rpartition(":")
    if colon and file.endswith(".py") and spec not in BUILTIN and not is_sum(spec) and not spec.startswith(PREFIXES):
        require_file(Path(file))
