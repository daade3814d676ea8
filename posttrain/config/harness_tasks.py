"""The option --harness: tasks of another library."""

from __future__ import annotations

from posttrain.core.extras import install, installed
from posttrain.core.types import UserError


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
