"""Looks for the files and folders that options name, before libraries are loaded, which takes seconds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.config.held_out_sets import held_out_sets
from posttrain.config.mixture_options import of_part, parts_of
from posttrain.config.service_options import ScorerOption, named_services
from posttrain.config.training import RL, Passes
from posttrain.core.types import UserError
from posttrain.data.rows import find_rows
from posttrain.envs.play.load_env import BUILTIN, task_set
from posttrain.envs.reward_sums import PREFIXES, is_sum
from posttrain.models.checkpoint_location import find_checkpoint
from posttrain.models.critic_file import critic_file
from posttrain.runs.checkpoint import resolve
from posttrain.services.judge_recipe import Generative, read_recipe
from posttrain.system.hub import HubName
from posttrain.system.user_code import require_file

MODELS = ("model", "against")
"""Options that name models alone."""

TEXTS = ("forget", "ptx")
"""Options that name rows of texts."""

SCORERS = {"--scorer": "scorer", "--with": "with_"}
"""Options that name a reward model, a judge or a function -> their fields."""

ENDPOINT = ("http://", "https://")


def check_files(config: Any) -> None:
    """Raise the UserError of the verb for rows, a model, a judge's recipe or an environment's file that is not there.

    Only recipes are read; nothing is run or downloaded. Names of the hub and of modules are left to the verb, and rows
    that an environment's task set makes.
    """
    mixed = isinstance(config, RL | Passes) and config.mixture
    for name, part in parts_of(config).items() if mixed else [("", config)]:
        try:
            _check_rows(part.tasks)
            _check_code(getattr(part, "env", ""))
        except UserError as error:
            raise (of_part(name, error) if name else error) from None
    for rows in held_out_sets(getattr(config, "eval_tasks", ())).values():
        _check_rows(rows)
    for option in TEXTS:
        with _told_of(f"--{option}"):
            _check_rows(getattr(config, option, None) or "")
    for option in MODELS:
        check_models(getattr(config, option, None))
    if getattr(config, "search", ()):
        _check_search(config)
    _check_teachers(config)
    check_services(config)
    for option, field in SCORERS.items():
        scorer = ScorerOption(getattr(config, field, ""))
        check_services(scorer, option)
        _check_code(scorer.env)


def _check_search(config: Any) -> None:
    """Raise UserError for a model that lacks what its search needs: a critic, or tokens of a verdict."""
    for name in (config.model,) if isinstance(config.model, str) else config.model:
        folder = find_checkpoint(name)
        if isinstance(folder, HubName):
            continue
        if config.search_value == "critic":
            critic_file(resolve(str(folder)))
        if config.choose == "verified":
            from posttrain.engines.search.verdict_tokens import verdict_tokens
            from posttrain.models.tokenizer.tokenizer import Tokenizer

            verdict_tokens(Tokenizer.load(resolve(str(folder))))


def _check_teachers(config: Any) -> None:
    """Raise UserError for a critic's or a teacher's model that is not there. A teacher may be an endpoint."""
    named = {"--critic-model": getattr(config, "critic_model", None), "--teacher": getattr(config, "teacher", None)}
    named |= {f"--teachers.{name}": model for name, model in (getattr(config, "teachers", None) or {}).items()}
    for option, model in named.items():
        if model and not (option.startswith("--teacher") and model.startswith(ENDPOINT)):
            with _told_of(option):
                check_models(model)


def check_services(config: Any, option: str = "--reward-model") -> None:
    """Raise UserError for a reward model or a judge's recipe that is not there, and for a recipe that is invalid."""
    for _, folder in named_services(getattr(config, "reward_model", ()), "reward-model"):
        with _told_of(option):
            check_models(folder)
    for _, file in named_services(getattr(config, "judge", ()), "judge"):
        recipe = read_recipe(file)
        if isinstance(recipe, Generative):
            with _told_of(f"the judge's recipe {file}"):
                check_models(recipe.model)


@contextmanager
def _told_of(what: str) -> Iterator[None]:
    """Begin the UserErrors of the block with these words."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


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
