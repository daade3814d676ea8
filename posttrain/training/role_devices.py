"""Where models beside the policy are: a reference, a critic, teachers, reward models and judges (`--role-devices`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from posttrain.config.training import ROLES
from posttrain.core.types import UserError
from posttrain.models.gpu_placement import GPUPlacement, gpus_of_roles
from posttrain.training.setup import named_device

_, CRITIC, TEACHERS, REWARD_MODELS, JUDGES = ROLES


def role_device(config: Any, role: str, device: torch.device) -> torch.device:
    """Return the device of a role's models; `device`: the training process's, on which they are by default.

    Raises UserError for a device that does not exist, and for a number of devices that is not that of processes.
    """
    named: dict[str, str] = getattr(config, "role_devices", {})
    if role not in named:
        return device
    placement = GPUPlacement.here(config.learner_devices, (), gpus_of_roles(named))
    choice = [one.strip() for one in named[role].split(",")]
    if len(choice) not in (1, placement.learners) or (choice[0].isdecimal() and len(choice) < placement.learners):
        raise UserError(
            f"--role-devices {role}={named[role]} names {len(choice)} for {placement.learners} training processes of this "
            f"machine: give each a number, as in {role}=2,3"
        )
    name = choice[placement.place % len(choice)]
    if name in ("auto", "cuda"):  # which would be the GPU of the training process
        raise UserError(f"--role-devices {role}={named[role]} names no GPU: give its number, as in {role}=1")
    try:
        return named_device(f"cuda:{name}" if name.isdecimal() else name)
    except UserError as error:
        raise UserError(str(error).replace("--device ", f"--role-devices {role}=")) from None


def refuse_idle_roles(config: Any, roles: Collection[str], held: Collection[str]) -> None:
    """Raise UserError if the options place one of `roles` of which the run has no model; `held`: those that it has."""
    for role in roles:
        if role in getattr(config, "role_devices", {}) and role not in held:
            raise UserError(
                f"--role-devices {role}={config.role_devices[role]} has no effect, as this run holds no {role} with weights "
                "of its own: leave it out"
            )
