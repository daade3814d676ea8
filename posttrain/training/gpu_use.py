"""Use of the GPUs in a step, for timing.jsonl: peak memory, and the arithmetic of its updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from posttrain.config.training import Training
from posttrain.core.protocols import Learner, World
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.adapters.lora import is_adapted
from posttrain.models.backbone import decoders_in
from posttrain.models.free_memory import peak_memory
from posttrain.models.gpu_speed import dense_peak
from posttrain.models.native.decoder_flops import BACKWARD, FROZEN_BACKWARD, forward_flop
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.training.role_devices import JUDGES, REWARD_MODELS, role_device
from posttrain.training.update_work import UpdateWork

POLICY = "policy"


def gpus_by_role(config: Training, device: torch.device) -> dict[str, torch.device]:
    """Return the GPUs of this process, each by the first role that has it: the policy, on `device`, and the models of the
    learner that `--role-devices` places.

    Models without a GPU of their own are on the policy's. On a CPU there are none.
    """
    found: dict[str, torch.device] = {}
    for role in (POLICY, *(role for role in config.role_devices if role not in (REWARD_MODELS, JUDGES))):
        place = device if role == POLICY else role_device(config, role, device)
        if place.type == "cuda" and place not in found.values():
            found[role] = place
    return found


def peaks(gpus: Mapping[str, torch.device], world: World) -> dict[str, float]:
    """Return the most memory in GB of each role's GPU since the last call, in the process where it is highest."""
    own = {f"memory/{role}": peak_memory(gpu) / 1e9 for role, gpu in gpus.items()}
    if not own:  # the policy is on a CPU, and no role on a GPU, in any process
        return {}
    every = world.gather(own)  # a role that shares a GPU in one process may have its own in another
    names = dict.fromkeys(name for each in every for name in each)
    return {name: max(each.get(name, 0.0) for each in every) for name in names}


def speed(learner: Learner, work: UpdateWork, seconds: float, processes: int, scores: bool = False) -> dict[str, float]:
    """Return the arithmetic of a step's updates for each of the processes over their seconds, in TFLOP/s, and as a share of
    the card's peak where that is known.

    `scores`: a head of one output reads the policy, in place of the vocabulary's. {} for models that transformers computes
    and for trust regions, whose arithmetic is not counted.
    """
    flop = _update_flop(learner, work, scores)
    if not flop or seconds <= 0:
        return {}
    rate, peak = flop / seconds / processes, dense_peak(learner.device)
    return {"update/tflops": rate / 1e12, **({"mfu": rate / peak} if peak else {})}


def _update_flop(learner: Learner, work: UpdateWork, scores: bool) -> float:
    """Return the FLOP of updates of the policy, and of a critic with a decoder of its own; 0 if they are not counted."""
    if not isinstance(learner, LocalLearner) or learner.trust_region is not None:
        return 0.0
    shape = learner.model.config
    if not isinstance(shape, DecoderConfig):
        return 0.0
    backward = FROZEN_BACKWARD if is_adapted(learner.model) else BACKWARD
    found = backward * forward_flop(shape, work.fed, 0 if scores else work.scored, work.pairs)
    for decoder in [] if learner.critic is None else decoders_in(cast(nn.Module, learner.critic)):
        own: object = decoder.config
        if not isinstance(own, DecoderConfig):  # a critic that transformers computes
            return 0.0
        learns = any(p.requires_grad for p in decoder.parameters())  # target networks do not
        found += (BACKWARD if learns else 1) * forward_flop(own, work.fed, 0, work.pairs)
    return found
