"""Every option of every verb: frozen dataclasses, one field an option, documented where it is declared.

The command line, recipes (TOML) and the Python front door all fill in these and nothing else. They stand by what they are
for: `rows`, what whatever reads rows has; `training`; `using`, what trains nothing; `growing`, plans and files for batch
systems; `services`, which options name services.
"""

from __future__ import annotations

from posttrain.config.inference import (
    Chat,
    Check,
    Evaluation,
    Label,
    RetrieverBuild,
    RetrieverServe,
    Sample,
    ServeEngine,
    ServePolicy,
)
from posttrain.config.row_options import Data, FromRows, Precision
from posttrain.config.scale import Launch, Plan
from posttrain.config.service_options import LABELLERS, SCORERS, SERVICES, named_services
from posttrain.config.training import RL, SFT, Distill, Passes, Prefer, RewardModelling, Training

__all__ = [
    "FREE_TO_CHANGE", "LABELLERS", "OF_GROWING", "OF_ONE_CALL", "OF_RETRIEVERS", "RL", "SCORERS", "SERVICES", "SFT", "VERBS",
    "Chat", "Check", "Data", "Distill", "Evaluation", "FromRows", "Label", "Launch", "Passes", "Plan", "Precision", "Prefer",
    "RetrieverBuild", "RetrieverServe", "RewardModelling", "Sample", "ServeEngine", "ServePolicy", "Training",
    "named_services",
]  # fmt: skip

OF_RETRIEVERS = (RetrieverBuild, RetrieverServe)
"""Options classes of posttrain retriever."""

OF_GROWING = {"plan": Plan, "launch": Launch}
"""Options classes of the commands for larger runs."""

VERBS: dict[str, type[FromRows]] = {
    kind.verb: kind for kind in (SFT, Prefer, RewardModelling, RL, Distill, Evaluation, Check, Sample, Label)
}
"""The verbs that take a configuration; a recipe has a table for each."""

OF_ONE_CALL = frozenset(
    {"out", "resume", "accept_changes", "overwrite", "quiet", "processes", "collective_timeout", "restarts", "shard"}
)
"""Options that a continued run does not take over."""

FREE_TO_CHANGE = frozenset(
    {
        "steps",
        "save_every",
        "keep",
        "record",
        "record_after",
        "threads",
        "env_workers",
        "env_timeout",
        "env_memory",
        "engine_timeout",
        "replicas",
        "weight-sync",
        "launch",
        "replica_cpus",
        "engines",
        "engine_token",
        "engine_restarts",
        "health",
        "retriever",
    }
)
"""Options that a continued run takes over unless they are given anew."""
