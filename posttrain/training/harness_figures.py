"""Figures of an evaluation harness besides posttrain's own: `posttrain eval --harness lm-eval:TASK,TASK`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.config.inference import Evaluation
from posttrain.core.extras import install, installed
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.training.setup import prepare

BOOTSTRAP = 1000  # resamples for the standard error of a figure that is no mean

Figures = dict[str, dict[str, dict[str, float | None]]]
"""Task -> figure, such as "acc" or "exact_match (flexible-extract)" -> {"mean": 0.5, "stderr": 0.03}."""


def harness_tasks(harness: str) -> list[str]:
    """Return the tasks that `--harness` names. Raises UserError for any other form, and if lm_eval is not installed."""
    name, _, tasks = harness.partition(":")
    listed = [task.strip() for task in tasks.split(",")]
    if name != "lm-eval" or not all(listed):
        raise UserError(
            f"--harness {harness:.60} must name tasks of lm-evaluation-harness: lm-eval:hellaswag,arc_easy, or files of "
            "tasks, lm-eval:my_task.yaml"
        )
    if not installed("lm_eval"):
        raise UserError(f"--harness lm-eval needs lm-evaluation-harness: {install('lm-eval')}")
    return listed


def harness_figures(config: Evaluation) -> dict[str, Figures]:
    """Return the figures that the harness computes for each model of the evaluation, by its folder.

    Raises UserError if lm_eval is not installed, and for tasks that it cannot load.
    """
    assert config.harness is not None
    tasks = harness_tasks(config.harness)
    device = prepare(config)
    import lm_eval
    from lm_eval.tasks import TaskManager

    from posttrain.training.lm_eval_model import PosttrainLM

    try:
        manager = TaskManager(include_defaults=not all(task.endswith((".yaml", ".yml")) for task in tasks))
        loaded = list(manager.load(tasks)["tasks"].values())
    except Exception as error:  # files, the hub, and the code of tasks: anything may fail
        raise UserError(f"--harness {config.harness:.100}: {type(error).__name__}: {one_line(error)}") from error
    found: dict[str, Figures] = {}
    for folder in (config.model, *config.against):
        model = PosttrainLM.load(folder, str(device), slots=config.slots, precision=config.precision, seed=config.seed)
        results = lm_eval.simple_evaluate(
            model,
            tasks=loaded,
            limit=config.limit,
            apply_chat_template=bool(config.chat),
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=BOOTSTRAP,
            random_seed=config.seed % 2**32,
            numpy_random_seed=config.seed % 2**32,
            torch_random_seed=config.seed,
            fewshot_random_seed=config.seed,
        )
        found[folder] = {task: _figures(own) for task, own in results["results"].items()}
    return found


def _figures(told: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the figures of a task. Keys of `told`: "acc,none", "acc_stderr,none", "alias"."""
    found: dict[str, dict[str, float | None]] = {}
    for key, value in told.items():
        name, comma, filtered = key.partition(",")
        if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = told.get(f"{name}_stderr,{filtered}")
        shown = name if filtered == "none" else f"{name} ({filtered})"
        found[shown] = {"mean": float(value), "stderr": float(error) if isinstance(error, int | float) else None}
    return found
