"""Estimate, before the first step, of the GPU memory at a run's peak, which is within an update.

Weights are counted; gradients, moments and copies follow from them, activations from the model's shape and the tokens
of a micro-batch. Within 10% of measurements on an H200 (`tests/training/test_memory_estimate.py` has the figures).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from posttrain.config.training import RL, Training
from posttrain.core.protocols import Model
from posttrain.engines.local.cuda_step import COPIED_SHARE, RESTING_SHARE
from posttrain.engines.local.step_cache import row_bucket, token_bucket
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.host_memory import without_shared_weights
from posttrain.learners.local_learner import LocalLearner
from posttrain.learners.natural_memory import VECTORS, product_bytes
from posttrain.learners.optimizer_chunks import CHUNK, wide_bytes
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.backbone import Backbone, decoders_in
from posttrain.models.free_memory import in_gib
from posttrain.models.hf.pass_memory import copied_weights, pass_bytes
from posttrain.models.hf.transformers_folder import ACTIVATIONS
from posttrain.models.losses.likelihood import GPU_LOGITS
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.linear import matrices_read_rounded
from posttrain.models.native.merged_weights import copied_bytes
from posttrain.models.native.quantized import packed_layers
from posttrain.models.row_shards import whole_shape
from posttrain.training.role_devices import CRITIC, TEACHERS

FLOAT8_BYTES = 9  # of a number that torchao rounds: scaled and clamped in float32, and the result
ROW = 1024  # tokens of a row, where no option bounds them
KL_LOGITS = 5  # float32 copies of the logits of a chunk in the backward pass of the exact KL
SOFT_LOGITS = 5  # the same of the expected values of actions: probabilities, and of two heads the values and the least


@dataclass(frozen=True)
class SamplingSize:
    """Concurrent requests of the engine in the learner's process, and their length."""

    requests: int
    tokens: int  # most tokens of a reply
    asynchronous: bool = False  # it samples during updates too, and never rests
    cache: float = math.inf  # limit of its KV cache in bytes


def sampling_size(config: Training) -> SamplingSize | None:
    """Return the size of the sampling in the learner's process; None if it samples nothing."""
    if not isinstance(config, RL) or config.engine != "local" or config.replicas:
        return None
    limit = math.inf if config.engine_cache is None else config.engine_cache * 2**30
    requests = min(config.slots, config.prompts * config.group)
    return SamplingSize(requests, config.max_tokens, config.async_steps > 0, limit)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of GPU memory by use."""

    parts: Mapping[str, float]
    place: str = "the GPU"  # in words

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        """Describe it in a line."""
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in self.parts.items() if size >= 0.05 * 2**30)
        return f"memory of {self.place}: about {in_gib(self.total)} at the peak ({parts})"


@dataclass(frozen=True)
class UpdateSize:
    """All that the memory of an update depends on, beside its models."""

    tokens: int  # of a micro-batch
    recompute: bool  # whether layers are computed again in the backward pass
    sampling: SamplingSize | None
    room: float  # bytes of the GPU
    shares: int = 1  # processes that shard the weights
    tensor: int = (
        1  # processes that divide heads, MLP and vocabulary, or experts: the models are already a process's part
    )
    context: int = 1  # processes that divide the tokens of a micro-batch
    offload: frozenset[str] = frozenset()  # what is on the host: optimizer, activations, reference
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # role of models beside the policy -> their device
    copies: int = 0  # of the weights, that engines which sample during updates have or wait for
    wants: frozenset[str] = frozenset()  # outputs that the loss reads, see `Objective`
    processes: int = 1
    row: int = ROW  # tokens of a row of a model that computes its rows apart

    @classmethod
    def of(
        cls, config: Training, tokens: int, room: float, wants: frozenset[str] = frozenset(), processes: int = 1
    ) -> UpdateSize:
        """Return the size of a run's updates, whose loss reads `wants`."""
        how = config.recompute == "layers", sampling_size(config)
        parts = config.tensor_parallel * config.expert_parallel  # which exclude each other
        divided = config.shards(processes), parts, config.context_parallel
        # the step that is sampled, and those that wait; an engine elsewhere has its own, and receives one meanwhile
        copies = config.async_steps if isinstance(config, RL) else 0
        placed = frozenset(config.offload), dict(config.role_devices)
        row = config.max_tokens if isinstance(config, RL) else getattr(config, "max_length", None) or ROW
        return cls(tokens, *how, room, *divided, *placed, copies, wants, processes, row)


def estimate_memory(learner: LocalLearner, size: UpdateSize) -> MemoryEstimate | None:
    """Estimate the peak of an update on a GPU, which the policy's engine shares. It is in the backward pass: buckets of
    gradients, which several processes sum after it, are smaller than its activations and logits.

    None for a model of transformers with numbers, whose passes are counted without, and for a trust region of a model that
    is not a plain native decoder. With one it may be in the natural step, see `natural_bytes`.
    """
    if learner.trust_region is not None and not _has_natural_estimate(learner):
        return None
    narrow = learner.precision == "bfloat16"
    critic, here = models_here(learner, size)
    compared = learner.compared(size.wants)
    away = fetched_models(learner, size)
    read = learner.model, critic, *(other for name, other in here.items() if name in compared)
    tokens = size.tokens / size.context
    learning = [*([] if learner.model.decoder is None else [learner.model.decoder]), *_decoders_that_learn(critic)]
    if not learning or not all(map(_is_known, learning)):
        return None
    parts = {
        **lasting_bytes(learner, size),
        "copies in bfloat16": _copied_bytes(_narrowed(learner, read)) * (narrow and size.shares == 1),
        "gathered": _gathered_bytes(learner, narrow) if size.shares > 1 else 0.0,
        "unpacked": _unpacked_bytes((learner.model, *here.values()), narrow),
        "activations": sum(_pass_bytes(one, size, learner) for one in learning),
        "logits": 4.0 * GPU_LOGITS * max(2, KL_LOGITS * ("kl" in size.wants), _soft_logits(critic)),
        "values of actions": _action_bytes(critic, tokens),
        "compared models": sum(
            _compared_bytes(learner.others[name], tokens, narrow, name in here) for name in compared
        ),
    }
    parts["rounding to float8"] = max(
        0.0, _rounding_bytes(learner, unique_parameters(read), tokens) - parts["logits"]
    )  # at another time
    parts["fetched models"] = _evaluated_bytes([learner.others[name] for name in away], parts, size)
    if size.sampling is not None:
        # packed weights are sampled from as they are, see `cuda_step.fits`; copies of them are not packed
        cast_once = narrow and (size.copies > 0 or not is_quantized(learner))
        most = cast_once * COPIED_SHARE * size.room
        engine = _engine_bytes(learner.model, size.sampling, narrow, most, narrow and samples_apart(size))
        if size.sampling.asynchronous or engine <= RESTING_SHARE * size.room:  # else it is freed before an update
            parts["engine"] = engine
    if size.copies or samples_apart(size):
        parts["engine's weights"] = _own_bytes(learner, size, narrow)
    found = MemoryEstimate(parts)
    if learner.trust_region is None:
        return found
    natural = MemoryEstimate({**parts, **natural_bytes(learner, size, parts)})
    return max(found, natural, key=lambda one: one.total)


def _has_natural_estimate(learner: LocalLearner) -> bool:
    return learner.model.decoder is not None and learner.model.decoder.native and not is_quantized(learner)


def natural_bytes(learner: LocalLearner, size: UpdateSize, parts: Mapping[str, float]) -> dict[str, float]:
    """Return those bytes of a natural step (TRPO) that differ from `parts`, those of the gradients before it. It has the
    gradient as a vector, and a copy of the policy that no step changes. Nothing of the other models is computed.
    """
    own = unique_parameters((learner.model,))
    vector = float(sum(p.nbytes for p in own if p.requires_grad))
    rows = max(1, size.tokens // (length := min(size.row, size.tokens)))
    adapted = learner.model.decoder is not None and learner.model.decoder.lora is not None
    done = ("activations", "logits", "copies in bfloat16", "values of actions", "compared models", "unpacked")
    return {
        **dict.fromkeys(done, 0.0),
        "weights": parts["weights"] + (vector if adapted else sum(p.nbytes for p in own)),
        "gradients": parts["gradients"] - vector,
        "vectors": VECTORS * vector,
        "second derivatives": product_bytes(cast(Any, learner.model), rows, length) * size.tokens / (rows * length),
    }


def samples_apart(size: UpdateSize) -> bool:
    """Return whether the engine in the learner's process samples with whole weights of its own."""
    return size.sampling is not None and (size.copies > 0 or size.shares > 1 or size.tensor > 1)


def _own_bytes(learner: LocalLearner, size: UpdateSize, narrow: bool) -> float:
    """Return the bytes of the weights of the engine in the learner's process, which holds the matrices of layers in the
    type of products, see `engine_weights.own_copy`, and of the copies that wait to be loaded.
    """
    model, own = cast(nn.Module, learner.model), int(samples_apart(size))
    whole, engine = copied_bytes(model), copied_bytes(model, narrow)
    if size.shares > 1 or size.tensor > 1:
        layers = [] if learner.model.decoder is None else learner.model.decoder.layers
        rounded = matrices_read_rounded(layers) if narrow else {}
        shapes = [(whole_shape(p).numel(), 2.0 if id(p) in rounded else 4.0) for p in unique_parameters((model,))]
        whole, engine = 4.0 * sum(number for number, _ in shapes), sum(number * each for number, each in shapes)
    return own * engine + max(0, size.copies - own) * whole


def estimate_roles(learner: LocalLearner, size: UpdateSize) -> dict[str, MemoryEstimate]:
    """Estimate the peak of each GPU that `--role-devices` gives to models beside the policy, by its name there.

    A critic is trained there. Frozen models only evaluate, one layer at a time.
    """
    found, narrow = {}, learner.precision == "bfloat16"
    frozen = without_shared_weights(learner.model, learner.others)
    for place in dict.fromkeys(size.elsewhere.values()):
        roles = [role for role in size.elsewhere if size.elsewhere[role] == place]
        critic = cast(nn.Module | None, learner.critic) if CRITIC in roles else None
        evaluated = [other for name, other in frozen.items() if _role(name) in roles]
        held = (critic, *evaluated)
        kept = [_pass_bytes(one, size, learner) for one in _decoders_that_learn(critic) if _is_known(one)]
        passing = [_pass_bytes(other.decoder, size, learner, False) for other in evaluated if _is_known(other.decoder)]
        parts = {
            **_trained_bytes((critic,), held, learner, size),
            "copies in bfloat16": _copied_bytes(_narrowed(learner, (critic,))) * narrow,
            "unpacked": _unpacked_bytes(held, narrow),
            "activations": max([sum(kept), *passing]),
            "logits": 4.0 * GPU_LOGITS * max(bool(evaluated), _soft_logits(critic)),
            "values of actions": _action_bytes(critic, size.tokens),
        }
        if _values_actions(critic):
            parts["compared models"] = _compared_bytes(learner.model, size.tokens, narrow, False)
        rounding = _rounding_bytes(learner, unique_parameters(held), size.tokens)
        parts["rounding to float8"] = max(0.0, rounding - parts["logits"])
        if parts["weights"] and place != "cpu":
            found[place] = MemoryEstimate(parts, f"GPU {place} ({', '.join(roles)})")
    return found


def _trained_bytes(
    learned: Iterable[Any], held: Iterable[Any], learner: LocalLearner, size: UpdateSize, sharded: Collection[int] = ()
) -> dict[str, float]:
    """Return the bytes of weights, gradients and moments on one GPU: `held` modules, of which `learned` ones train."""
    held, own = list(held), unique_parameters(learned)
    trained = bytes_here((p for p in own if p.requires_grad), sharded, size.shares, wide_bytes)
    return {
        "weights": bytes_here(unique_parameters(held), sharded, size.shares) + _packed_bytes(held),
        "gradients": trained,
        "moments": _moment_bytes(own, trained, learner, size),
    }


def _moment_bytes(learned: Sequence[nn.Parameter], trained: float, learner: LocalLearner, size: UpdateSize) -> float:
    """Return the bytes of moments on the device. The policy has none if a trust region makes its step."""
    if learner.trust_region is not None:
        policy = {id(p) for p in unique_parameters((learner.model,))}
        learned = [p for p in learned if id(p) not in policy]
        trained = float(sum(wide_bytes(p) for p in learned if p.requires_grad))
    return bytes_at_once(learned, trained, size) * moment_bytes_per_byte(learner)


def _soft_logits(critic: nn.Module | None) -> int:
    """Return the copies of a chunk of logits that the expected values of actions take."""
    return SOFT_LOGITS if _values_actions(critic) else 0


def _values_actions(critic: nn.Module | None) -> bool:
    """Return whether a critic values actions, with two heads over the vocabulary."""
    return bool(getattr(critic, "reads_policy", False))


def _action_bytes(critic: nn.Module | None, tokens: float) -> float:
    """Return the bytes that the values of the actions that were taken need for their gradient: both heads once more, and
    for each token their rows, those times its hidden state, and the gradients of both.
    """
    if not _values_actions(critic):
        return 0.0
    heads: Tensor = cast(Any, critic).heads
    return heads.nbytes + 4 * 4.0 * 2 * tokens * heads.shape[-1]


def _copied_bytes(parameters: Iterable[nn.Parameter]) -> float:
    """Return the bytes of copies in bfloat16 of these parameters."""
    return sum(2.0 * p.numel() for p in parameters if p.dtype == torch.float32 and p.ndim == 2)


def _narrowed(learner: LocalLearner, modules: Iterable[Any]) -> list[nn.Parameter]:
    """Return those parameters of these modules that products of an update read in bfloat16: with `--float8` not the
    matrices of layers, and of a model of transformers those of linear layers, if it learns.
    """
    modules = [module for module in modules if module is not None]
    left = _matrices_of_layers(learner) if learner.product is not None else set()
    for decoder in (one for module in modules for one in decoders_in(module) if not one.native):
        left |= {id(p) for p in cast(nn.Module, decoder).parameters()}
        left -= {id(p) for p in copied_weights(cast(Any, decoder))}
    return [p for p in unique_parameters(modules) if id(p) not in left]


def _rounding_bytes(learner: LocalLearner, parameters: Iterable[nn.Parameter], tokens: float) -> float:
    """Return what rounding takes at once with `--float8`: a matrix, or the gradient of its product."""
    layers = _matrices_of_layers(learner) if learner.product is not None else set()
    return max((FLOAT8_BYTES * len(p) * max(tokens, p.shape[1]) for p in parameters if id(p) in layers), default=0.0)


def _matrices_of_layers(learner: LocalLearner) -> set[int]:
    """Return the ids of the matrices of all layers."""
    modules = (cast(nn.Module, m) for m in (learner.model, learner.critic, *learner.others.values()) if m is not None)
    return {id(x.parameter) for module in modules for decoder in decoders_in(module) for _, x, _ in decoder.linears()}


def models_here(learner: LocalLearner, size: UpdateSize) -> tuple[nn.Module | None, dict[str, Model]]:
    """Return the critic and the frozen models, by name, that have no device of their own."""
    critic = None if CRITIC in size.elsewhere else cast(nn.Module | None, learner.critic)
    return critic, {name: other for name, other in learner.others.items() if _role(name) not in size.elsewhere}


def fetched_models(learner: LocalLearner, size: UpdateSize) -> set[str]:
    """Return the names of the frozen models that are on the host in an update."""
    _, here = models_here(learner, size)
    compared = learner.compared(size.wants)
    return {
        name
        for name in without_shared_weights(learner.model, here)
        if "reference" in size.offload and name not in compared
    }


def lasting_bytes(learner: LocalLearner, size: UpdateSize) -> dict[str, float]:
    """Return the bytes that an update has on the GPU whatever its micro-batches are."""
    critic, here = models_here(learner, size)
    away, sharded = fetched_models(learner, size), sharded_parameters(learner) if size.shares > 1 else set()
    held = (learner.model, critic, *(other for name, other in here.items() if name not in away))
    return _trained_bytes((learner.model, critic), held, learner, size, sharded)


def _decoders_that_learn(critic: nn.Module | None) -> list[Backbone]:
    """Return a critic's own backbones that have gradients."""
    own = [] if critic is None else decoders_in(critic)
    return [one for one in own if any(p.requires_grad for p in cast(nn.Module, one).parameters())]


def _is_known(decoder: Backbone | None) -> bool:
    """Return whether the activations of a backbone can be counted: by a formula, or as it has no numbers."""
    return decoder is not None and (decoder.native or decoder.head.weight.is_meta)


def _pass_bytes(decoder: Any, size: UpdateSize, learner: LocalLearner, graded: bool = True) -> float:
    """Return the bytes that a micro-batch takes in a backbone: for the backward pass, or in an evaluation of one layer
    after the other.
    """
    narrow, tokens, offloaded = (
        learner.precision == "bfloat16",
        size.tokens / size.context,
        "activations" in size.offload,
    )
    if isinstance(shape := decoder.config, DecoderConfig):
        if not graded:
            return float(size.tokens * (shape.activation_bytes(narrow) // shape.layers))
        how = narrow, size.recompute, size.tensor, offloaded, learner.product is not None
        return tokens * shape.activation_bytes(*how)
    length = min(size.row, size.tokens, shape.context)
    rows = max(1, size.tokens // length)
    kept = pass_bytes(decoder, rows, length, narrow, size.recompute, offloaded, graded)
    room = (size.room - sum(p.nbytes for p in decoder.parameters())) * ACTIVATIONS
    if graded and not size.recompute and kept > room:  # the model then recomputes its layers of itself
        kept = pass_bytes(decoder, rows, length, narrow, True, offloaded)
    return kept * size.tokens / (rows * length)


def is_quantized(learner: LocalLearner) -> bool:
    """Return whether the frozen weights below adapters are quantized."""
    return bool(packed_layers((learner.model,)))


def _packed_bytes(modules: Iterable[Any]) -> float:
    return float(sum(buffer.nbytes for layer in packed_layers(modules) for buffer in layer.buffers(recurse=False)))


def _unpacked_bytes(modules: Iterable[Any], narrow: bool) -> float:
    """Return the bytes of the largest packed matrix while a product reads it: unpacked, and in the type of products."""
    return max((x.shape.numel() * (x.working_bytes + 2 * narrow) for x in packed_layers(modules)), default=0.0)


def _role(name: str) -> str:
    """Return the role of a frozen model, see `--role-devices`."""
    return REFERENCE if name == REFERENCE else TEACHERS


def _compared_bytes(other: Model, tokens: float, narrow: bool, here: bool) -> float:
    """Return the bytes of the outputs of a model with which the loss compares the policy: hidden states in float32, and
    a copy of the output head, also in the type of products, if the model is on another device.
    """
    states, weight = 4.0 * tokens * other.head.weight.shape[1], other.head.weight
    return (
        states if here else states + weight.nbytes + 2.0 * weight.numel() * (narrow and weight.dtype == torch.float32)
    )


def _evaluated_bytes(fetched: Sequence[Model], parts: Mapping[str, float], size: UpdateSize) -> float:
    """Return the bytes by which an evaluation of a model of the host exceeds an update.

    The policy's gradients, copies and activations are not there in an evaluation, nor moments of the host.
    """
    gone = ["gradients", "copies in bfloat16", "activations", *(["moments"] if "optimizer" in size.offload else [])]
    largest = max(
        (sum(p.nbytes for p in unique_parameters([other])) + _packed_bytes([other]) for other in fetched), default=0
    )
    return max(0.0, largest - sum(parts[name] for name in gone))


def bytes_at_once(learned: Iterable[nn.Parameter], trained: float, size: UpdateSize) -> float:
    """Return the bytes of the weights whose moments are on the device at once."""
    largest = max((wide_bytes(p) for p in learned if p.requires_grad), default=0)
    return min(trained, max(CHUNK, largest)) if "optimizer" in size.offload else trained


def moment_bytes_per_byte(learner: LocalLearner) -> float:
    """Return the bytes of the optimizer's state for each byte of a gradient."""
    whole = sum(wide_bytes(p) for part in learner.parts for p in part.parameters.values())
    return learner.optimizer.moment_bytes() / max(1, whole)


def sharded_parameters(learner: LocalLearner) -> set[int]:
    """Return the ids of the parameters that FSDP2 shards: those of decoders, without adapters and several teachers."""
    teachers = [name for name in learner.others if name != REFERENCE]
    others = [other for name, other in learner.others.items() if len(teachers) < 2 or name not in teachers]
    modules = [cast(nn.Module, m) for m in (learner.model, learner.critic, *others) if m is not None]
    found = [decoder for module in modules for decoder in decoders_in(module)]
    left = {id(p) for decoder in found for adapter in adapters(decoder) for p in adapter.parameters()}
    return {id(p) for decoder in found for p in decoder.parameters()} - left


def bytes_here(
    parameters: Iterable[nn.Parameter],
    sharded: Collection[int],
    shares: int,
    bytes_of: Callable[[Tensor], int] = lambda p: p.nbytes,
) -> float:
    """Return the bytes of parameters, or of their gradients, in the process with most rows."""
    return float(
        sum(-(-p.shape[0] // shares) * bytes_of(p[:1]) if id(p) in sharded else bytes_of(p) for p in parameters)
    )


def _gathered_bytes(learner: LocalLearner, narrow: bool) -> float:
    """Return the bytes that a process has whole for a time: embedding and output head with their gradients, of every
    decoder of an update, and of the largest decoder two layers, one of them with its gradients.
    """
    rest = layers = 0.0
    for module in (learner.model, learner.critic, *learner.others.values()):
        for decoder in [] if module is None else decoders_in(cast(nn.Module, module)):
            first = max((list(layer.parameters()) for layer in decoder.layers), key=_bytes, default=[])
            inner = {id(p) for layer in decoder.layers for p in layer.parameters()}
            outer = [p for p in decoder.parameters() if id(p) not in inner]
            rest += sum(p.nbytes + wide_bytes(p) * p.requires_grad for p in outer)
            read = sum(min(2, p.itemsize) * p.numel() if narrow and p.ndim == 2 else p.nbytes for p in first)
            layers = max(layers, 2 * read + sum(wide_bytes(p) for p in first if p.requires_grad))
    return rest + layers


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.nbytes for p in parameters)


def unique_parameters(modules: Iterable[Any]) -> list[nn.Parameter]:
    """Return the parameters of these modules, shared ones once."""
    return list({id(p): p for m in modules if m is not None for p in cast(nn.Module, m).parameters()}.values())


def _engine_bytes(model: Any, size: SamplingSize, narrow: bool, most: float, rounded: bool = False) -> float:
    """Return the bytes of a decoding step's weights, at `most` these, and cache, see `posttrain.engines.local.cuda_step`.
    With a model of transformers there are no other weights, and each reply has its cache while it runs. `rounded`: the
    engine's own weights are in the type of products, so that only its output head is copied.
    """
    shape, number, copied = model.config, 2 if narrow else 4, 0
    if not isinstance(shape, DecoderConfig):
        return float(number * model.decoder.kept_numbers * size.requests * size.tokens * size.asynchronous)
    if 2 * shape.parameters < most:
        # embedding and output head are not copied if they are in bfloat16 already
        held = 0 if model.head.dtype == torch.float32 else shape.vocab * shape.hidden * (1 if shape.tied else 2)
        copied = 2 * (shape.vocab * shape.hidden if rounded else shape.parameters - held)
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_size
    return copied + min(size.cache, number * numbers * row_bucket(size.requests) * token_bucket(size.tokens))
