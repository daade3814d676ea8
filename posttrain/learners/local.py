"""The learner of one process: forward, backward, clip, step. It knows neither rewards nor algorithms.

N    scored tokens of a micro-batch
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.models.decoder import Decoder
from posttrain.models.likelihood import token_logp
from posttrain.types import Batch, Objective, Outputs, Stats


@dataclass(frozen=True)
class Optimization:
    """AdamW and its learning-rate schedule."""

    lr: float = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0  # updates over which the learning rate rises from 0
    updates: int = 1  # updates over which linear and cosine fall to `final` times lr
    final: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0: no clipping

    def rate(self, update: int) -> float:
        """Learning rate of update 1, 2, ..."""
        if update <= self.warmup:
            return self.lr * update / self.warmup
        progress = min(1.0, (update - self.warmup - 1) / max(1, self.updates - self.warmup))
        if self.schedule == "linear":
            return self.lr * (1 - (1 - self.final) * progress)
        if self.schedule == "cosine":
            return self.lr * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress)))
        return self.lr


class LocalLearner:
    """See `posttrain.types.Learner`.

    `temperature` divides the logits here and nowhere else, for current, old and reference log-probabilities alike (the
    engine divides its own).
    """

    def __init__(
        self,
        model: Decoder,
        optimization: Optimization,
        *,
        temperature: float = 1.0,
        precision: str = "float32",
        reference: Decoder | None = None,
    ) -> None:
        self.model = model
        self.reference = reference
        self.optimization = optimization
        self.temperature = temperature
        self.precision = precision
        self.version = 0
        self.device = model.head.device
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in trained if p.ndim >= 2 and "norm" not in name]
        vectors = [p for name, p in trained if p.ndim < 2 or "norm" in name]  # norms and biases are not decayed
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": optimization.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=optimization.lr,
            betas=optimization.betas,
            eps=optimization.eps,
            fused=True,
        )

    def evaluate(self, batches: Sequence[Batch], of: Literal["policy", "reference"] = "policy") -> list[Outputs]:
        """What the policy, or the frozen reference, says of each micro-batch, without a gradient."""
        model = self.reference if of == "reference" else self.model
        assert model is not None, "this run keeps no reference"
        with torch.no_grad():
            return [self._outputs(model, batch) for batch in batches]

    def update(self, batches: Sequence[Batch], objective: Objective) -> Stats:
        """One optimizer update with the summed gradient of all micro-batches.

        A gradient that is not finite is counted as "skipped" and nothing moves: neither weights, nor the optimizer's
        moments, nor the schedule.
        """
        stats = Stats()
        self.optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            loss = objective(self._outputs(self.model, batch), batch, stats)
            loss.backward()
            stats.add("loss", loss.item(), 0)
        for parameter in self.parameters:
            if parameter.grad is None:  # nothing to learn here is a gradient of 0, not the absence of an update
                parameter.grad = torch.zeros_like(parameter)
        limit = self.optimization.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self.parameters, limit if limit > 0 else math.inf)
        stats.add("loss", 0.0, 1)
        if not torch.isfinite(norm):
            stats.add("skipped", 1)
            self.optimizer.zero_grad(set_to_none=True)
            return stats
        rate = self.optimization.rate(self.version + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.version += 1
        stats.add("skipped", 0)
        stats.add("grad_norm", norm.item())
        stats.add("lr", rate)
        return stats

    def weights(self) -> Decoder:
        return self.model

    def save(self, folder: Path) -> None:
        """Optimizer moments and counters, beside the weights that the checkpoint itself holds."""
        moments: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                moments[f"{name}/{key}"] = value
        if moments:
            save_file(moments, folder / "optimizer.safetensors")
        (folder / "learner.json").write_text(json.dumps({"version": self.version}))

    def load(self, folder: Path) -> None:
        """The inverse of `save`."""
        self.version = json.loads((folder / "learner.json").read_text())["version"]
        path = folder / "optimizer.safetensors"
        if not path.exists():
            return
        moments = load_file(path)
        for name, parameter in self.model.named_parameters():
            state = {key.rpartition("/")[2]: value for key, value in moments.items() if key.rpartition("/")[0] == name}
            if state:
                self.optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}

    def _outputs(self, model: Decoder, batch: Batch) -> Outputs:
        with self._autocast():
            hidden = model.hidden(batch.layout).index_select(0, batch.at)
            logp = token_logp(hidden, model.head, batch.target, self.temperature)
        return Outputs(logp=logp)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")
