"""Training of judges: the prompt shows a question with a reply, and a verdict is correct if it equals that reply's
label.

Rows have "label", as rows of preferences do: true or 1, false, 0 or -1. The judge's prompt is made from their other
columns with --prompt-template, or is their column "prompt".
"""

from __future__ import annotations

from posttrain.core.types import Invalid, Reply, Task
from posttrain.verify.verdict import final_verdict

SUCCESS = 1.0  # the reward of a correct verdict


def reward(task: Task, reply: str) -> float | Invalid:
    """Return 1.0 if the reply ends with "verdict: yes" for a good reply or "verdict: no" for a bad one; else, or cut
    off, 0.0.
    """
    label = task.get("label")
    if not isinstance(label, bool | int | float) or label not in (-1, 0, 1):
        return Invalid(f"the task's label is {label!r:.40}: give true or 1, or false, 0 or -1")
    if isinstance(reply, Reply) and reply.stop.truncated:
        return 0.0
    return float(final_verdict(reply) == float(label > 0))
