"""Learner of one process: backward, clip, step, independent of rewards and algorithms."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from posttrain.core import user_files
from posttrain.core.batch import Batch, Outputs, Packed, Stats
from posttrain.core.protocols import TRAINING, Alone, Learner, Measured, Model, Objective, World
from posttrain.core.token_probe import sink_of
from posttrain.core.trust_region import TrustRegion
from posttrain.core.types import UserError
from posttrain.learners.forward_pass import ForwardPass, Teaching
from posttrain.learners.gradient_sums import sum_gradients
from posttrain.learners.host_memory import activations_on_host
from posttrain.learners.library_optimizer import stored_state
from posttrain.learners.muon import stacked_rows
from posttrain.learners.natural_step import NaturalStep
from posttrain.learners.optimizers import BETAS, EPS, OptimizerChoice, parameter_groups
from posttrain.learners.repeated_bits import repeated_bits
from posttrain.learners.rounded_weights import RoundedOptimizer, widen_gradients
from posttrain.learners.router_losses import RouterLosses, Routing
from posttrain.models.critic import Critic
from posttrain.models.critic_file import STORED
from posttrain.models.hf.experts import Routed, watching
from posttrain.models.native.linear import accumulating, multiplying
from posttrain.models.row_shards import here, whole_shape
from posttrain.models.tensor_files import open_tensors, read_rows, read_state, stored_kind, write_state

P = TypeVar("P", bound=Packed)

COUNTERS, MOMENTS, MOVED = "learner.json", "optimizer.safetensors", "{}.safetensors"


@dataclass(frozen=True)
class Optimization:
    """The optimizer, its learning-rate schedule, and what else decides how an update moves the weights."""

    lr: float = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0  # updates over which the learning rate rises from 0
    updates: int = 1  # updates over which linear and cosine fall to `final` times lr
    final: float = 0.0
    betas: tuple[float, float] = BETAS
    eps: float = EPS  # of AdamW
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0: no clipping
    optimizer: str = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the optimizer
    trust_region: TrustRegion | None = None  # makes the policy's step natural instead of the optimizer's
    critic_lr: float | None = None  # None: lr
    critic_follow: float = 0.0  # share by which target copies of a critic move towards it in each update

    @property
    def choice(self) -> OptimizerChoice:
        return OptimizerChoice(self.optimizer, self.options, self.betas, self.eps)

    def rate(self, update: int) -> float:
        """Return the learning rate of an update; the first is update 1."""
        if update <= self.warmup:
            return self.lr * update / self.warmup
        progress = min(1.0, (update - self.warmup - 1) / max(1, self.updates - self.warmup))
        if self.schedule == "linear":
            return self.lr * (1 - (1 - self.final) * progress)
        if self.schedule == "cosine":
            return self.lr * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress)))
        return self.lr


@dataclass(frozen=True)
class TrainedModule:
    """A module that is optimised: its gradients are clipped by one norm, and it has its own learning rate."""

    name: str  # "policy" or "critic"
    parameters: dict[str, nn.Parameter]
    share: float = 1.0  # ratio of its learning rate to the schedule's


class LocalLearner(ForwardPass):
    """Learner of one process; implements `posttrain.core.protocols.Learner`."""

    _keeps = True  # whether weights in the type of products are kept between micro-batches

    def __init__(
        self,
        model: Model,
        optimization: Optimization,
        *,
        temperature: float = 1.0,
        precision: str = "float32",
        others: Mapping[str, Model] | None = None,
        teaching: Teaching | None = None,
        critic: Critic | None = None,
        router_losses: RouterLosses | None = None,
        offload: Collection[str] = (),
        product: Callable[[Tensor, Tensor], Tensor] | None = None,
        world: World | None = None,
    ) -> None:
        """Create the learner. `others`: models that are evaluated and not trained, by name; all but the reference are
        teachers. They, and the critic, may be on other devices than the policy.

        `offload`: what is in the host's memory while the policy's device does not need it: "optimizer", "activations",
        "reference" (`others`). `product`: see `posttrain.models.native.float8`.

        In a `world` of several processes each has the same weights and its own micro-batches; gradients are summed.
        """
        super().__init__(
            model,
            temperature=temperature,
            precision=precision,
            others=others,
            teaching=teaching,
            critic=critic,
            offload=offload,
            product=product,
        )
        self.world = self.groups = world or Alone()
        self.optimization, self.trust_region = optimization, optimization.trust_region
        self.router_losses = router_losses or RouterLosses()
        self.version = 0
        self.moved: set[str] = set()  # names of frozen models that have changed since they were opened
        share = 1.0 if optimization.critic_lr is None else optimization.critic_lr / optimization.lr
        self.parts = [TrainedModule("policy", self._trained(model))]
        self.parts += [TrainedModule("critic", self._trained(critic), share)] if critic else []
        choice, decay = optimization.choice, optimization.weight_decay
        narrow = widen_gradients(p for part in self.parts for p in part.parameters.values())
        rounds = partial(RoundedOptimizer, in_chunks=choice.in_chunks, weight=self._weight_of, numbers={})
        self.optimizer = choice.open(
            [group for p in self.parts for group in parameter_groups(p.parameters, p.share, decay, choice)],
            optimization.lr,
            {own: rows for held in (model, critic) if held for own, rows in stacked_rows(cast(nn.Module, held))},
            offloads="optimizer" in self.offload,
            wrap=partial(rounds, update=lambda: self.version) if narrow else None,
        )

    @property
    def moves_every_token(self) -> bool:
        return bool(self.router_losses)

    def update(self, batches: Sequence[Batch], objective: Objective) -> Stats:
        """Make an update, see `Learner`. An update with a gradient that is not finite is counted as "skipped": it
        changes neither weights, nor the optimizer's moments, nor the schedule.
        """
        stats = Stats()
        self.optimizer.zero_grad()
        if self.trust_region is not None:
            batches = self._with_old(batches)
        routed = self._mixture()
        counted = self._counted(batches)
        routing = None if routed is None else Routing(cast(Any, routed), self.router_losses, self.world, counted)
        with (
            accumulating(keeps=self._keeps),
            multiplying(self.product),
            repeated_bits(),
            self._fetched(self.compared(objective.wants)),
        ):
            if routing is not None:
                routing.count(batches, len(counted), self._computing())
            self._accumulate(batches, objective, stats, routing)
            if routing is not None:
                routing.measure(stats)
        stats.add("loss", 0.0, 1 / self.groups.size)  # counts one update, since processes merge their counts
        self._share_gradients()
        norms = self._clip()
        if not all(math.isfinite(norm) for norm in norms.values()):
            stats.add("skipped", 1)
            if (sink := sink_of(batches)) is not None:
                sink.skipped = True
            self.optimizer.zero_grad()
            return stats
        if self.trust_region is not None:
            with repeated_bits(), self._fetched(self.compared(objective.wants)):
                self._natural_step(self.trust_region, batches, objective, stats)
        rate = self.optimization.rate(self.version + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["share"]
        with repeated_bits():
            self.optimizer.step()
        self.optimizer.zero_grad()  # the next rollouts need the memory
        if self.critic is not None:
            self.critic.follow(self.optimization.critic_follow)
        self.version += 1
        stats.add("skipped", 0)
        for name, norm in norms.items():
            stats.add("grad_norm" if name == "policy" else f"grad_norm/{name}", norm)
        stats.add("lr", rate)
        return stats

    def _counted(self, batches: Sequence[P]) -> Sequence[P]:
        """Return the micro-batches whose results count, which are the first ones."""
        return batches

    def _accumulate(
        self, batches: Sequence[Batch], objective: Objective, stats: Stats, routing: Routing | None
    ) -> None:
        """Accumulate the gradients of these micro-batches; of a mixture of experts, including its router losses."""
        for batch in batches:
            with self._watched(routing) as routed:
                outputs = self._tapped(batch, objective.wants)
            loss = objective(outputs, batch, stats)
            if routing is not None and routed is not None:
                loss = self._with_routers(loss, batch, routing.loss(routed))
            loss.backward()
            stats.add("loss", loss.item(), 0)

    @staticmethod
    def _watched(routing: Routing | None) -> AbstractContextManager[Routed | None]:
        return nullcontext() if routing is None else watching(routing.model, scored=bool(routing.losses))

    def _with_routers(self, loss: Tensor, batch: Batch, of_routers: Tensor | None) -> Tensor:
        """Return the loss of a micro-batch with that of its routers, if there is one."""
        warming = batch.coefficients.get("policy", 1.0) == 0  # while a critic warms up, the policy must not change
        return loss if warming or of_routers is None else loss + of_routers.to(loss.dtype)

    def squared_gradients(self, batches: Sequence[Packed]) -> Tensor:
        found = []
        parameters = list(self.parts[0].parameters.values())
        for batch in batches:
            with multiplying(self.product):
                logp = self._outputs(self.model, batch, frozenset()).logp.sum()
            gradients = torch.autograd.grad(logp, parameters, allow_unused=True)
            found.append(sum(g.double().square().sum().item() for g in gradients if g is not None))
        return torch.tensor(found, dtype=torch.float64)

    def move(self, of: str, rate: float) -> None:
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in self._movable(of).items():
                place = here(parameter)
                target = here(own[name]).to(place.device)
                place.copy_(target if rate == 1 else torch.lerp(place, target, rate))
        self.moved.add(of)

    def _movable(self, of: str) -> dict[str, Tensor]:
        """Return the tensors of a frozen model that can change, without those shared with an adapted policy."""
        own = dict(self.model.named_parameters())
        return {name: p for name, p in self.others[of].named_parameters() if p is not own[name]}

    def weights(self) -> Model:
        return self.model

    def save(self, folder: Path | None) -> None:
        """Save the policy, optimizer moments and counters, the critic, and frozen models that have moved.

        `folder` None: another process writes, and this one takes part in collectives. Raises UserError if a weight is
        not finite, since no run could continue from it.
        """
        if folder is None:
            if isinstance(self.model, Measured):
                self.model.measure()
            return
        self._check_finite()
        self.model.save(folder)
        state = folder / TRAINING
        state.mkdir(exist_ok=True)
        for name, tensors in self._state():
            write_state(state / name, tensors)
        (state / COUNTERS).write_text(json.dumps({"version": self.version}))

    def _check_finite(self) -> None:
        for part in self.parts:
            if not self._finite(part):
                raise UserError(
                    f"weights of the {part.name} are no longer finite after update {self.version}, and are not saved: "
                    "try a lower --lr, more --warmup, or --precision float32"
                )

    def _finite(self, part: TrainedModule) -> bool:
        return all(bool(parameter.isfinite().all()) for parameter in part.parameters.values())

    def _state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (file, tensors by name) of everything that is saved beside the policy."""
        moments: dict[str, Tensor] = {}
        for part in self.parts:
            for name, parameter in part.parameters.items():
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    moments[f"{part.name}/{name}/{key}"] = self._as_stored(parameter, stored_state(key, value))
        if moments:
            yield MOMENTS, moments
        if self.critic is not None:
            yield STORED, dict(self.critic.named_parameters())
        for name in sorted(self.moved):
            yield MOVED.format(name), self._movable(name)

    def load(self, folder: Path) -> None:
        """Load the state that `save` has written, except the policy's weights. Raises UserError if the files do not fit
        this learner.
        """
        folder = folder / TRAINING
        counted = json.loads(user_files.content(folder / COUNTERS))["version"]
        if type(counted) is not int or not 0 <= counted < 2**31:  # the record stores it in 32 bits
            raise UserError(f"{folder / COUNTERS} is damaged: it counts {counted!r} updates")
        self.version = counted
        if self.critic is not None:
            read_state(folder / STORED, dict(self.critic.named_parameters()))
        for name in self.others:
            if (file := folder / MOVED.format(name)).exists():
                read_state(file, self._movable(name))
                self.moved.add(name)
        if (folder / MOMENTS).exists():
            self._load_moments(folder / MOMENTS)

    def _load_moments(self, file: Path) -> None:
        with open_tensors(file) as stored:
            known: dict[str, list[str]] = {}
            for key in stored.keys():  # noqa: SIM118  it is not a dict
                owner, _, moment = key.rpartition("/")
                known.setdefault(owner, []).append(moment)
            for part in self.parts:
                for name, parameter in part.parameters.items():
                    owner = f"{part.name}/{name}"
                    if owner not in known:
                        continue
                    found = {key: self._stored(file, stored, f"{owner}/{key}", parameter) for key in known[owner]}
                    try:
                        self.optimizer.restore(parameter, found)
                    except KeyError:
                        odd = f"{file} is not a file of this model: it has the unexpected tensor {owner}"
                        raise UserError(odd) from None

    def _stored(self, file: Path, stored: Any, name: str, parameter: nn.Parameter) -> Tensor:
        """Read a moment of a parameter; of a sharded one, this process's rows."""
        dtype, shape = stored_kind(file, stored, name)
        place = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        if whole_shape(self._as_stored(parameter, place)) != shape:
            place = torch.empty(shape, dtype=dtype)
        read_rows(file, stored, name, self._as_stored(parameter, place))
        return place

    def _as_stored(self, parameter: nn.Parameter, moment: Tensor) -> Tensor:
        """Return a moment of a parameter in the form in which it is saved."""
        return moment

    def _weight_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the tensor that knows which part of a whole weight a parameter is, see `row_shards`."""
        return parameter

    def _tapped(self, batch: Batch, want: frozenset[str]) -> Outputs:
        """Compute the outputs of a micro-batch of an update, and pass them to its token probe, if there is one."""
        learned = [cast(nn.Module, held) for held in (self.model, self.critic) if held is not None]
        with activations_on_host(learned) if "activations" in self.offload else nullcontext():
            outputs = self._outputs(self.model, batch, want, measured=batch.tap is not None and batch.tap.entropy)
        if batch.tap is not None:
            batch.tap.watch(outputs)
        return outputs

    def _share_gradients(self) -> None:
        """Sum the gradients over the world. A module without gradients in any process keeps None."""
        if self.world.size == 1:
            return
        for part in self.parts:
            parameters = list(part.parameters.values())
            anywhere = parameters[0].new_full((1,), float(any(p.grad is not None for p in parameters)))
            sum_gradients(self.world, parameters, anywhere)
            if not anywhere.item():
                for parameter in parameters:
                    parameter.grad = None

    def _clip(self) -> dict[str, float]:
        """Clip the gradients of each module. Return the norms before clipping, by module.

        If only some modules have a gradient, the others are not updated, not even by their moments. If no module has
        one, the gradient is 0, and the update still happens.
        """
        limit = self.optimization.max_grad_norm
        moved = [p for p in self.parts if any(x.grad is not None for x in p.parameters.values())] or self.parts
        norms = {}
        for part in moved:
            for parameter in part.parameters.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            # a trust region itself bounds the policy's step
            free = limit <= 0 or (self.trust_region is not None and part.name == "policy")
            norms[part.name] = self._clip_part(part, math.inf if free else limit)
        return norms

    def _clip_part(self, part: TrainedModule, limit: float) -> float:
        return nn.utils.clip_grad_norm_(part.parameters.values(), limit).item()

    def _trained(self, model: Model | nn.Module) -> dict[str, nn.Parameter]:
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    # -- the natural step of a trust region ----------------------------------------------------------------------------

    def _with_old(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return batches with stored old log-probabilities, since the line search changes the current ones."""
        now = ForwardPass.evaluate(self, batches)  # not of all processes: the batches are this process's own
        old = [b.old_logp if b.old_logp is not None else o.logp for b, o in zip(batches, now, strict=True)]
        return [replace(b, old_logp=logp) for b, logp in zip(batches, old, strict=True)]

    def _natural_step(self, region: TrustRegion, batches: Sequence[Batch], objective: Objective, stats: Stats) -> None:
        """Update the policy by a natural gradient step instead of AdamW."""

        def loss() -> float:
            with torch.no_grad():
                ignored = Stats()
                outputs = (self._outputs(self.model, b, objective.wants) for b in batches)
                own = sum(objective(o, b, ignored).item() for o, b in zip(outputs, batches, strict=True))
                return self.world.sum(torch.tensor(own, dtype=torch.float64, device=self.device)).item()

        parameters = list(self.parts[0].parameters.values())
        NaturalStep(self.model, parameters, batches, self.world, self._states, self._temperature, loss).take(
            region, stats
        )


if TYPE_CHECKING:
    _proof: Callable[..., Learner] = LocalLearner
