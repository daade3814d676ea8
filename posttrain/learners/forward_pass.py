"""The forward pass of a learner: what it computes with the policy, its critic and frozen models.

N    scored tokens of a micro-batch
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import Batch, Outputs, Packed
from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.learners.devices import input_on, moved
from posttrain.learners.host_memory import HostModel, without_shared_weights
from posttrain.models.backbone import Backbone
from posttrain.models.critic import Critic
from posttrain.models.gpu_placement import working_on
from posttrain.models.losses.divergence import FORWARD, REVERSE, measured_divergence
from posttrain.models.losses.likelihood import (
    Entropies,
    Hidden,
    Temperature,
    exact_kl,
    log_collision,
    token_logp_top,
)
from posttrain.models.losses.top_divergence import top_divergence
from posttrain.models.native.linear import multiplying

DISTANCES = frozenset({"reverse_kl", "forward_kl", "jensen_shannon"})
"""Fields of `Outputs` that compare the policy with its teachers."""
REFERENCE = "reference"
"""Name of the reference model: at first, the policy's start."""


@dataclass(frozen=True)
class Teaching:
    """Settings of distillation."""

    temperature: float | None = None  # of the teachers' logits; None: the temperature at which each token was sampled
    beta: float = 0.5  # the teacher's share in the mixture of a Jensen-Shannon divergence


class ForwardPass:
    """Outputs of a policy, its critic and frozen models.

    The temperature of sampling divides the logits only here, for current, old and reference log-probabilities alike (the
    engine divides its own logits): that of each token (`Packed.temperature`), or else `temperature`, the run's. Teachers
    may have a separate one.
    """

    def __init__(
        self,
        model: Model,
        *,
        temperature: float = 1.0,
        precision: str = "float32",
        others: Mapping[str, Model] | None = None,
        teaching: Teaching | None = None,
        critic: Critic | None = None,
        offload: Collection[str] = (),
        product: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """Parameters as of `LocalLearner`."""
        self.model, self.others, self.critic = model, dict(others or {}), critic
        self.teaching, self.temperature, self.precision = teaching or Teaching(), temperature, precision
        self.offload, self.product = frozenset(offload), product
        self.device = model.head.device
        held = without_shared_weights(model, self.others) if "reference" in self.offload else {}
        self._host = {name: HostModel(other, self.device) for name, other in held.items()}

    def evaluate(
        self,
        batches: Sequence[Packed],
        of: str = "policy",
        want: frozenset[str] = frozenset(),
    ) -> list[Outputs]:
        model = self.model if of == "policy" else self.others[of]
        with (
            torch.no_grad(),
            multiplying(self.product),
            self._fetched([of] if of != "policy" else self.compared(want)),
        ):
            with working_on(device := model.head.device):
                found = [self._outputs(model, input_on(batch, device), want, of=of) for batch in batches]
            return [moved(outputs, self.device) for outputs in found]

    def compared(self, want: Collection[str]) -> list[str]:
        """Return the names of the frozen models whose distributions outputs are computed from."""
        return [name for name in self.others if ({"kl"} if name == REFERENCE else DISTANCES) & {*want}]

    @contextmanager
    def _fetched(self, names: Sequence[str]) -> Iterator[None]:
        """Context in which these frozen models are on the policy's device if they are on the host otherwise."""
        with ExitStack() as fetched:
            for name in names:
                if name in self._host:
                    fetched.enter_context(self._host[name].on(self.device))
            yield

    def _outputs(
        self,
        model: Model,
        batch: Packed,
        want: frozenset[str],
        measured: bool = False,
        of: str = "policy",
    ) -> Outputs:
        """Compute the log-probabilities and the outputs in `want`, once for scored tokens that are repeated.

        `measured`: compute the entropy too, without a gradient if it is not in `want`. `of`: the model's name.
        """
        # routers are scored as often as their tokens are
        if batch.repeats is None or want & {*DISTANCES, "score"} or self._mixture() is not None:
            return self._outputs_of_each(model, batch, want, measured, of)
        return self._outputs_of_each(model, batch.without_repeats(), want, measured, of).at(batch.repeats.of)

    def _outputs_of_each(self, model: Model, batch: Packed, want: frozenset[str], measured: bool, of: str) -> Outputs:
        temperature = self._temperature(batch, of)
        if isinstance(batch, Batch) and batch.advantage is None:  # texts to imitate, which no teacher has read
            want = want - DISTANCES
        with self._computing(batch.at.device):
            hidden = model.hidden(batch.layout, batch.at)
            if "score" in want:
                return Outputs(logp=hidden.new_zeros(0), score=model.head.logits(hidden)[:, 0])
            outputs, distances = None, {}
            for name in sorted(want & DISTANCES):
                logp, distances[name], *told = self._distance(Hidden(hidden, model.head), batch, name, measured)
                outputs = Outputs(logp)  # computed from the same logits
                if measured:
                    outputs = replace(outputs, teacher=told[0], entropy=told[1])
            if "entropy" in want or outputs is None:
                kind: Entropies = "learned" if "entropy" in want else "constant" if measured else "none"
                logp, entropy, top = token_logp_top(hidden, model.head, batch.target, temperature, kind)
                outputs = Outputs(logp, entropy=entropy, top=top)
            outputs = replace(outputs, **distances)
            if "collision" in want:
                fixed = Hidden(hidden.detach(), model.head.detach())
                outputs = replace(outputs, collision=log_collision(fixed, temperature))
            if "kl" in want:
                kl = exact_kl(Hidden(hidden, model.head), self._other(REFERENCE, batch), temperature)
                outputs = replace(outputs, kl=kl)
            if want & {"value", "q"}:
                outputs = replace(outputs, **self._values(batch, Hidden(hidden, model.head), temperature))
        return outputs

    def _values(self, batch: Packed, policy: Hidden, temperature: Temperature) -> dict[str, Tensor]:
        """Return the critic's outputs, see `posttrain.models.critic`."""
        assert self.critic is not None
        own, there = batch.at.device, self.critic_device
        if there == own:
            return self.critic(batch, policy, temperature)
        with self._autocast(there), working_on(there):
            read = moved(policy, there) if self.critic.reads_policy else policy  # the head is as large as a vocabulary
            found = self.critic(input_on(batch, there), read, moved(temperature, there))
        return {name: value.to(own) for name, value in found.items()}

    @property
    def critic_device(self) -> torch.device:
        return self.device if self.critic is None else next(self.critic.parameters()).device

    def _states(self, model: Model, batch: Packed) -> Tensor:
        if batch.layout.media and (model.decoder is None or not model.decoder.sees):
            raise UserError(
                f"a {type(model).__name__} is text-only, and the batch has pictures: use a vision-language model"
            )
        return model.hidden(batch.layout, batch.at)

    def _other(self, name: str, batch: Packed) -> Hidden:
        """Return a frozen model's hidden states at the scored tokens, and its head, on the policy's device."""
        model = self.others[name]
        device = model.head.device
        with torch.no_grad(), working_on(device), nullcontext() if device == self.device else self._autocast(device):
            states = self._states(model, input_on(batch, device))
        return moved(Hidden(states, model.head), self.device)

    def _temperature(self, batch: Packed, of: str = "policy") -> Temperature:
        """Return the temperature of a model's logits at the scored tokens of a batch: one number, or [N]."""
        if of not in ("policy", REFERENCE) and self.teaching.temperature is not None:
            return self.teaching.temperature
        own = batch.temperature
        return self.temperature if own is None else own.nan_to_num(nan=self.temperature)

    def _distance(self, policy: Hidden, batch: Packed, name: str, measured: bool) -> tuple[Tensor, ...]:
        """Return (log-probabilities of the scored tokens, divergence `name` from their teachers), each [N].

        If `measured`, also return the teachers' log-probabilities and the policy's entropy, each [N].
        """
        beta = {"reverse_kl": REVERSE, "forward_kl": FORWARD}.get(name, self.teaching.beta)
        if isinstance(batch, Batch) and batch.teacher_ids is not None:
            ids, top, sampled = batch.teacher_ids, batch.teacher_top, batch.teacher_logp
            assert top is not None and sampled is not None
            temperature = self._temperature(batch)
            logp, apart, entropy = top_divergence(policy, ids, top, batch.target, beta, temperature, measured)
            return (logp, apart, sampled, entropy) if measured else (logp, apart)
        assert batch.readings, "a divergence is computed where teachers have read the rollouts"
        parts = []
        for reading in batch.readings:
            theirs = self._other(reading.model, reading.packed)
            own = policy if reading.rows is None else Hidden(policy.states[reading.rows], policy.head)
            temperatures = self._temperature(reading.packed), self._temperature(reading.packed, reading.model)
            parts.append(measured_divergence(own, theirs, reading.packed.target, beta, temperatures, measured))
        rows = [reading.rows for reading in batch.readings if reading.rows is not None]
        if not rows:
            return parts[0]
        order = torch.cat(rows).argsort()
        columns = list(zip(*parts, strict=True))[: None if measured else 2]
        return tuple(torch.cat(column)[order] for column in columns)

    def _mixture(self) -> Backbone | None:
        """Return the trained decoder if it is a mixture of experts, else None."""
        decoder = self.model.decoder
        return decoder if decoder is not None and decoder.routers is not None else None

    def _computing(self, device: torch.device | None = None) -> AbstractContextManager[Any]:
        """Return the context for the forward pass in `_outputs`. `device`: the model's; None: the policy's."""
        return self._autocast(device)

    def _autocast(self, device: torch.device | None = None) -> AbstractContextManager[Any]:
        device = device or self.device
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bfloat16")
