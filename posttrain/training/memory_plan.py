"""The command `posttrain memory`: what a training command takes of a GPU at its peak, from the model's shape alone.

The models of the run are made of shapes without numbers. For them it computes the estimate that a run on a GPU prints
before its first step. So it needs no GPU, and of the model's folder only config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.nn import functional

from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.policy import Algorithm
from posttrain.config.resolve import check_bounds, check_divisions
from posttrain.config.training import RL, SFT, Distill, Prefer, Training
from posttrain.core.component import Need
from posttrain.core.trust_region import TrustRegion
from posttrain.core.types import UserError
from posttrain.engines.local.prefix_cache import KEPT_BYTES
from posttrain.engines.servers.server_pool import RESTING_SHARE
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.adapters.adapter_config import is_adapter
from posttrain.models.adapters.lora import LoRA, attach, named_targets, targets_of
from posttrain.models.backbone import Backbone, decoders_in
from posttrain.models.checkpoint_location import checkpoint_folder
from posttrain.models.critic import Critic, ValueModel, critic_kind
from posttrain.models.free_memory import gpu_memory, in_gib
from posttrain.models.hf.backed import Backed
from posttrain.models.hf.expert_parallel import divide_shapes, expert_layers
from posttrain.models.hf.linear_layers import narrow_products
from posttrain.models.json_files import read_json
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_config import ARCHITECTURES, NotNativeError, read_config
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.tensor_parallel import divide
from posttrain.runs.checkpoint import resolve
from posttrain.training.adjust import adjust
from posttrain.training.distributed_setup import SHARD_ALONE, refuse_uneven
from posttrain.training.memory_advice import (
    TIGHT,
    advice,
    recomputation_lines,
    refuse_too_large,
    roles_too_large,
    with_recomputation,
)
from posttrain.training.memory_estimate import (
    MemoryEstimate,
    UpdateSize,
    estimate_memory,
    estimate_roles,
    lasting_bytes,
    unique_parameters,
)
from posttrain.training.open_learner import refuse_backed, refuse_idle, refuse_packed_shards, refuse_without_lora
from posttrain.training.preference_choice import chosen_preference
from posttrain.training.setup import GPU_TOKENS, activation_share, optimization, tokens_of_activations
from posttrain.training.weight_types import frozen_type, refuse_useless, trained_type

ESTIMATED = (SFT, RL, Prefer, Distill)
"""Options of verbs whose models `shapes_of` makes."""


@dataclass(frozen=True)
class MemoryPlan:
    """The estimate for a training command."""

    found: MemoryEstimate
    room: float  # bytes of the GPU
    tokens: int  # of a micro-batch
    notes: Sequence[str]  # what --recompute auto chooses
    advice: Sequence[str]  # options that would take less, where it may not fit
    roles: tuple[MemoryEstimate, ...] = ()  # of the GPUs that --role-devices names
    servers: MemoryEstimate | None = None  # of a GPU that vLLM or SGLang servers share with a learner

    @property
    def lines(self) -> Iterator[str]:
        """Lines for the terminal."""
        for name, size in sorted(self.found.parts.items(), key=lambda part: -part[1]):
            if size:
                yield f"{name:<19} {size / 2**30:7.1f} GiB"
        yield f"{'at the peak':<19} {self.found.total / 2**30:7.1f} GiB, in micro-batches of {self.tokens:,} tokens"
        yield from self.notes
        if self.advice:
            yield from self.advice
        else:
            what = "the policy" if self.roles else "it"
            yield f"{what} fits into {in_gib(self.room)}: {self.found.total / self.room:.0%}"
        for role in self.roles:
            less = "" if role.total <= TIGHT * self.room else "; it may not fit: give the roles GPUs of their own"
            yield f"{role}{less}"
        if self.servers is not None:
            less = (
                ""
                if self.servers.total <= TIGHT * self.room
                else "; it may not fit: give the servers GPUs of their own"
            )
            yield f"{self.servers}{less}"

    @property
    def fits(self) -> bool:
        return all(found.total <= TIGHT * self.room for found in (self.found, *self.roles))


def plan_memory(config: Training, room: float) -> MemoryPlan:
    """Estimate the peak of a run of these options on one GPU with `room` bytes.

    Raises UserError for what the estimate does not know: trust regions of other models than native decoders, and models of
    transformers whose code does more than shapes allow.
    """
    learner, size = _sized(config, config.model or "", config.processes, room)
    found = estimate_memory(learner, size)
    assert found is not None, "the shapes are known"
    told = (*advice(found, learner, size), *roles_too_large(learner, size))
    roles = tuple(estimate_roles(learner, size).values())
    servers = _beside_servers(config, found, learner, size)
    return MemoryPlan(found, room, size.tokens, recomputation_lines(config, size), told, roles, servers)


def _beside_servers(
    config: Training, update: MemoryEstimate, learner: LocalLearner, size: UpdateSize
) -> MemoryEstimate | None:
    """Estimate a GPU that a learner shares with vLLM or SGLang servers that the run starts, while they sample; None for
    other engines, and where `--engine-devices` gives servers their GPUs. `update`: the peak of an update, beside which
    they sample with `--async-steps`; otherwise they sleep then.

    Each process starts one or more. On as many GPUs as processes, each GPU has a part of as many servers as a server has
    parts (`GPUPlacement.engines_on`), so dividing them saves no weights there.
    """
    if not isinstance(config, RL) or config.engine == "local" or config.engine_url or config.engine_devices:
        return None
    beside, each = config.async_steps > 0, max(1, -(-config.replicas // size.processes))
    number = 2 if config.precision == "bfloat16" else 4
    numbers = sum(p.numel() for p in unique_parameters((_decoder(shape_of(config.model or "")),)))
    if config.engine_cache is not None:
        caches = config.engine_cache * 2**30 * each * config.engine_tensor_parallel
    else:
        caches = KEPT_BYTES * each if beside else max(KEPT_BYTES, RESTING_SHARE * size.room)
    parts = {
        "learner": update.total if beside else sum(lasting_bytes(learner, size).values()),
        "servers' weights": float(number * numbers * each),
        "their caches": float(caches),
    }
    return MemoryEstimate(parts, f"a GPU shared with {config.engine} servers")


def refuse_impossible(config: Training, start: Path | None, processes: int, device: torch.device) -> None:
    """Raise UserError before weights are read, if a run on this GPU cannot fit however small its micro-batches are.
    `start`: the folder of its model.

    Options that the estimate does not know pass, and so do mistakes, which the run itself reports.
    """
    if (found := planned(config, start, processes, device)) is not None:
        refuse_too_large(*found)


def planned(
    config: Training, start: Path | None, processes: int, device: torch.device
) -> tuple[LocalLearner, UpdateSize] | None:
    """Return the learner of a run on this GPU, of shapes without numbers, and the size of its updates; None for options
    that the estimate does not know.
    """
    if device.type != "cuda" or type(config) not in ESTIMATED or start is None:
        return None
    if config.lora is None and is_adapter(start):  # adapters that continue
        return None
    try:
        return _sized(config, str(start), processes, float(gpu_memory(device)))
    except UserError:
        return None


def _sized(config: Training, model: str, processes: int, room: float) -> tuple[LocalLearner, UpdateSize]:
    """Return the learner of a run, of shapes without numbers, and the size of its updates. Raises UserError for what the
    estimate does not know.
    """
    check_bounds(config)
    _refuse(config, processes)
    shape = shape_of(model)
    refuse_packed_shards(config, resolve(model))
    learner = shapes_of(config, shape)
    fitting = (
        tokens_of_activations(shape, room * activation_share(config))
        if isinstance(shape, DecoderConfig)
        else GPU_TOKENS
    )
    tokens = config.tokens_per_microbatch or fitting
    size = UpdateSize.of(config, tokens, room, _wants(config), processes)
    return learner, with_recomputation(config, learner, size)


def _refuse(config: Training, processes: int) -> None:
    """Raise UserError for options that the estimate does not know."""
    if not config.model:
        raise UserError(
            "--model is missing, a folder with the model's config.json: posttrain memory --gpu-memory 80 -- rl --model "
            "FOLDER; --lora, --tokens-per-microbatch, --recompute, --offload, --role-devices, --shard, --shard-size, "
            "--tensor-parallel, --context-parallel and --expert-parallel change the estimate"
        )
    if config.shard and processes == 1:
        raise UserError(SHARD_ALONE)
    check_divisions(config)
    refuse_uneven(config, processes)


def shape_of(model: str) -> DecoderConfig | Path:
    """Return the shape of a model by its folder; the folder itself if transformers computes the model."""
    folder = resolve(model)
    found = Path(folder if (folder / "config.json").exists() else checkpoint_folder(folder))
    if not (found / "config.json").exists():
        raise UserError(f"{model} has no config.json: give the folder of a model (of an adapter: that of its base)")
    source = read_json(found / "config.json")
    if source.get("model_type") not in ARCHITECTURES:
        return found
    try:
        return read_config(found, source)
    except NotNativeError:
        return found


def _wants(config: Training) -> frozenset[str]:
    """Return the outputs that the loss of a run reads, as far as they take memory."""
    if isinstance(config, Prefer):
        return chosen_preference(config).wants
    return adjust(find(config.algorithm), config).wants if isinstance(config, RL) else frozenset()


def shapes_of(config: Training, shape: DecoderConfig | Path) -> LocalLearner:
    """Return the learner of a run, with models that have shapes and no numbers."""
    frozen = frozen_type(config)
    model, learned = _decoder(shape), trained_type(config)
    if config.lora is not None:
        targets = named_targets(config.lora_targets, targets_of(model))
        how: dict[str, Any] = {"dora": config.dora, "quantize": config.quantize or ""}
        if not model.native:
            _held(model, frozen)
        lora = LoRA(rank=config.lora, alpha=float(config.lora_alpha or 2 * config.lora), **how)
        with torch.device("meta"):
            attach(model, lora, lambda name: name.rpartition(".")[2] in targets)
        if model.native:
            _held(model, frozen)
    else:
        refuse_without_lora(config)
        _held(model, learned, learns=True)
    others: dict[str, Decoder | Backed] = {}
    critic: Critic | None = None
    region: TrustRegion | None = None
    moves = isinstance(config, Prefer) and chosen_preference(config).moving is not None
    if moves and config.lora is None:
        others[REFERENCE] = _held(_decoder(shape).requires_grad_(False), frozen)
    if isinstance(config, RL):
        algorithm = adjust(find(config.algorithm), config)
        if Need.REFERENCE in algorithm.needs and config.lora is None:  # adapters share the weights of theirs
            others[REFERENCE] = _held(_decoder(shape).requires_grad_(False), frozen)
        region = algorithm.trust_region
        if region is not None and not (model.native and config.quantize is None):
            raise UserError(
                f"posttrain memory knows the second derivatives of {algorithm.name} for native decoders without --quantize "
                "only: give another --algorithm"
            )
        if algorithm.critic is not None:
            critic = _critic(config, algorithm, shape, learned)
    if isinstance(config, Distill):
        teachers = {**config.teachers, **({"teacher": config.teacher} if config.teacher else {})}
        start = resolve(config.model or "").resolve()
        for name, folder in teachers.items():
            if config.lora is None or resolve(folder).resolve() != start:  # adapters share the weights that they leave
                others[name] = _held(_decoder(shape_of(folder)).requires_grad_(False), frozen)
    refuse_useless(config, model, others)
    refuse_idle(config, model, others, critic)
    if config.tensor_parallel > 1 or config.context_parallel > 1:
        first = _FirstProcess(config.tensor_parallel)
        for held in (model, critic, *others.values()):
            for decoder in decoders_in(held) if held is not None else ():
                refuse_backed(config, decoder)
                if first.size > 1:
                    divide(cast(Decoder, decoder), first)
    if config.expert_parallel > 1:
        _divide_experts(config, model, critic, others)
    if config.float8 and not model.native:
        raise UserError(
            "--float8 is for native decoders without adapters, and this run has another model: leave it out"
        )
    product = functional.linear if config.float8 else None  # of which only the memory matters
    held_models: dict[str, Any] = {"others": others, "critic": critic}
    how_to_learn = replace(optimization(config, 1), trust_region=region)
    return LocalLearner(model, how_to_learn, **held_models, precision=config.precision, product=product)


def _critic(config: RL, algorithm: Algorithm, shape: DecoderConfig | Path, learned: torch.dtype | None) -> Critic:
    kind = critic_kind(algorithm.needs)
    backbone = _decoder(shape_of(config.critic_model) if config.critic_model else shape, headless=True)
    if config.critic == "shared":
        return ValueModel(backbone.config.hidden, None, 0)
    if kind is ValueModel:
        return ValueModel(backbone.config.hidden, _held(backbone, learned, learns=True), 0)
    with torch.device("meta"):
        return cast(Any, kind)(backbone, 0)


@dataclass(frozen=True)
class _FirstProcess:
    """The first of several processes, for parts of weights that have shapes and no numbers."""

    size: int
    rank: int = 0

    def meeting(self) -> NoReturn:
        raise AssertionError("there are no numbers to exchange")

    def total(self, *given: Any) -> NoReturn:
        self.meeting()

    stacked = exchanged = dealt = total


def _divide_experts(config: Training, model: Backbone, critic: Any, others: Mapping[str, Any]) -> None:
    """Keep the first process's experts, as `ExpertParallelLearner` does."""
    first = _FirstProcess(config.expert_parallel)
    divide_shapes(cast(Any, model), first)
    for held in (critic, others.get(REFERENCE)):
        for decoder in decoders_in(held) if held is not None else ():
            if not decoder.native and expert_layers(cast(Any, decoder)):
                divide_shapes(cast(Any, decoder), first)


def _decoder(shape: DecoderConfig | Path, headless: bool = False) -> Decoder | Backed:
    if isinstance(shape, Path):
        from posttrain.models.hf.transformers_folder import shaped_backed  # imports transformers

        return shaped_backed(shape, read_json(shape / "config.json"), headless)
    with torch.device("meta"):
        return Decoder(replace(shape, tied=True) if headless else shape)


def _held(model: Any, dtype: torch.dtype | None, learns: bool = False) -> Any:
    """Put the matrices that are not trained, or those that are, into the type in which they are held."""
    if dtype is not None and not model.native:
        narrow_products(model.inner, dtype)
        return model.requires_grad_(learns)
    for module in model.modules() if dtype is not None else ():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 2 and parameter.requires_grad == learns:
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype), requires_grad=learns))
    return model
