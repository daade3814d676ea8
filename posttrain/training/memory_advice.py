"""Will a run fit into its GPUs? Lines with the estimate of memory, options that take less, and the refusal of runs that
cannot fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from posttrain.config.training import Training
from posttrain.core.types import UserError
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.host_memory import without_shared_weights
from posttrain.learners.local_learner import LocalLearner
from posttrain.learners.optimizer_chunks import wide_bytes
from posttrain.models.free_memory import in_gib
from posttrain.training.memory_estimate import (
    MemoryEstimate,
    UpdateSize,
    bytes_at_once,
    bytes_here,
    estimate_memory,
    estimate_roles,
    fetched_models,
    is_quantized,
    lasting_bytes,
    models_here,
    moment_bytes_per_byte,
    samples_apart,
    sharded_parameters,
    unique_parameters,
)

TIGHT = 0.95
"""Share of a GPU's memory beyond which a run may not fit, because of fragmentation and libraries."""
SURE = 1.1
"""Multiple of a GPU's memory above which a run cannot fit, as estimates are within a tenth of what is measured."""
SHARDS = 1024  # most processes that advice names
FEW_TOKENS = 1024  # tokens of a micro-batch below which a GPU waits for the host
LORA_OFFER = "--lora 16 with --frozen-weights bfloat16"
NARROW_OFFER = "--weights bfloat16 with --optimizer adamw8bit"


def with_recomputation(config: Training, learner: LocalLearner, size: UpdateSize) -> UpdateSize:
    """Return the size with the recomputation that `--recompute auto` chooses: if the update may not fit otherwise. Second
    derivatives need all activations at once.
    """
    if config.recompute != "auto" or learner.trust_region is not None or _too_large(learner, size):
        return size
    kept = estimate_memory(learner, size)
    return replace(size, recompute=True) if kept is not None and kept.total > TIGHT * size.room else size


def recomputation_lines(config: Training, size: UpdateSize) -> list[str]:
    """Return a line if `--recompute auto` recomputes layers; else []."""
    chosen = config.recompute == "auto" and size.recompute
    return [
        "layers are recomputed in the backward pass, since their activations may not fit (--recompute auto)"
    ] * chosen


def memory_lines(learner: LocalLearner, size: UpdateSize) -> list[str]:
    """Return lines with the estimate, and with remedies if it may not fit. Of a model of transformers, what lasts."""
    found = estimate_memory(learner, size)
    if found is None:
        lasting = MemoryEstimate(lasting_bytes(learner, size))
        return [str(lasting).replace("at the peak", "beside activations")]
    roles = estimate_roles(learner, size).values()
    return [str(found), *advice(found, learner, size), *map(str, roles)]


def refuse_too_large(learner: LocalLearner, size: UpdateSize) -> None:
    """Raise UserError if a run cannot fit into its GPUs, however small its micro-batches are. Those of roles
    (`--role-devices`) are taken to have as much memory as the policy's.
    """
    if problem := _too_large(learner, size):
        raise UserError(problem)
    if problem := next(roles_too_large(learner, size), ""):
        raise UserError(problem)


def roles_too_large(learner: LocalLearner, size: UpdateSize) -> Iterator[str]:
    """Yield a line for each GPU of `--role-devices` that cannot hold the models that it is given."""
    for found in estimate_roles(learner, size).values():
        needed = sum(found.parts[name] for name in ("weights", "gradients", "moments"))
        if needed > SURE * size.room:
            less = (
                ", --offload optimizer takes less" if found.parts["moments"] and "optimizer" not in size.offload else ""
            )
            yield (
                f"{found.place} would need {in_gib(needed)} beside activations, and has {in_gib(size.room)}: give the roles "
                f"GPUs of their own or smaller models{less}"
            )


def _too_large(learner: LocalLearner, size: UpdateSize) -> str:
    """Return why a run cannot fit, with options that take less; "" if it may fit."""
    parts = lasting_bytes(learner, size)
    needed = sum(parts.values())
    if needed <= SURE * size.room:
        return ""
    told = " + ".join(f"{name} {bytes_ / 2**30:.1f}" for name, bytes_ in parts.items() if bytes_ >= 0.05 * 2**30)
    offers = [
        (way, sum(lasting_bytes(learner, changed).values())) for way, changed in _offloaded(learner, size).items()
    ]
    if _can_adapt(learner):
        offers.append((LORA_OFFER, _adapted_bytes(learner, size)))
    if _can_narrow(learner, size):
        offers.append((NARROW_OFFER, needed - _narrowed_bytes(learner, size)))
    if whole := _whole_bytes(learner):
        offers.append(("--frozen-weights bfloat16", needed - whole / 2 / size.shares))
    ways = [f"{way} ({in_gib(less)})" for way, less in offers if less < needed]
    ways += _more_shards(learner, size)
    less = f": {', '.join(ways)} would take less" if ways else ": use a smaller model"
    return f"this run needs {in_gib(needed)} ({told}) beside its activations, and the GPU has {in_gib(size.room)}{less}"


def _more_shards(learner: LocalLearner, size: UpdateSize) -> list[str]:
    """Return the option that shards over the fewest GPUs that hold what lasts; [] if none do."""
    if size.tensor > 1 or size.context > 1 or size.offload or size.elsewhere:  # which refuse --shard
        return []
    if not learner.optimization.choice.row.by_number:  # see `OptimizerChoice.check`
        return []
    if learner.trust_region is not None:  # see `NOT_DIVIDED`
        return []
    if learner.product is not None or is_quantized(learner):
        return []
    for shares, way in _ways_to_shard(size):
        less = sum(lasting_bytes(learner, replace(size, shares=shares)).values())
        if less <= TIGHT * size.room:
            return [f"{way} ({in_gib(less)} each)"]
    return []


def _ways_to_shard(size: UpdateSize) -> Iterator[tuple[int, str]]:
    """Yield (processes that share a copy of the weights, the option for it): first with the GPUs of the run, then with
    more, a power of two times as many.
    """
    new, undo = (
        "" if size.shares > 1 else "--shard ",
        " without --shard-size" if 1 < size.shares < size.processes else "",
    )
    for shares in range(size.shares + 1, size.processes):
        if size.processes % shares == 0:
            yield shares, f"{new}--shard-size {shares}"
    if size.shares < size.processes:
        yield size.processes, f"--shard{undo}"
    shares = 2 * max(size.shares, size.processes)
    while shares <= SHARDS:
        yield shares, f"--shard --processes {shares}{undo} on as many GPUs"
        shares *= 2


def _offloaded(learner: LocalLearner, size: UpdateSize) -> dict[str, UpdateSize]:
    """Return the sizes of updates with more on the host, by the option; {} if weights or micro-batches are divided."""
    if not size.shares == size.tensor == size.context == 1:
        return {}
    whats = (
        *(["optimizer"] if not learner.optimization.choice.row.extra else []),  # see `OptimizerChoice.check`
        *(["activations"] if learner.trust_region is None else []),  # second derivatives read them again and again
        *(["reference"] if REFERENCE in without_shared_weights(learner.model, learner.others) else []),
    )
    found = [size.offload | {what} for what in whats]
    return {f"--offload {' '.join(sorted(offload))}": replace(size, offload=offload) for offload in found}


def _served(found: MemoryEstimate, size: UpdateSize) -> dict[str, UpdateSize]:
    """Return the size of updates whose engine, with whole weights of its own, is a server on other GPUs, by the options
    for it: divided among so many GPUs that its weights take at most half of each; {} for other engines.
    """
    if not samples_apart(size):
        return {}
    gpus = 1
    while found.parts["engine's weights"] / gpus > size.room / 2:
        gpus *= 2
    divided = f" --engine-tensor-parallel {gpus}" if gpus > 1 else ""
    return {f"--engine vllm{divided} on other GPUs": replace(size, sampling=None)}


def _can_adapt(learner: LocalLearner) -> bool:
    """Return whether the policy could have adapters, and has none."""
    return learner.model.decoder is not None and learner.model.decoder.lora is None and learner.product is None


def _can_narrow(learner: LocalLearner, size: UpdateSize) -> bool:
    """Return whether `NARROW_OFFER` is possible, and new."""
    narrow = learner.precision == "bfloat16" and learner.optimization.optimizer == "adamw" and not size.offload
    narrow = narrow and learner.trust_region is None
    return narrow and _can_adapt(learner) and size.shares == size.tensor == size.context == 1


def _narrowed_bytes(learner: LocalLearner, size: UpdateSize) -> float:
    """Return by how much `NARROW_OFFER` takes less of what lasts: 2 bytes of each number of a matrix, and of AdamW's two
    moments in float32 all but two bytes.
    """
    critic, here = models_here(learner, size)
    held = [
        p
        for p in unique_parameters((learner.model, critic, *here.values()))
        if p.ndim == 2 and p.dtype == torch.float32
    ]
    return sum((2.0 + 6.0 * p.requires_grad) * p.numel() for p in held)


def _whole_bytes(learner: LocalLearner) -> float:
    """Return the bytes of the policy's frozen matrices in float32 below adapters."""
    if learner.model.decoder is None or learner.model.decoder.lora is None or is_quantized(learner):
        return 0.0
    frozen = (p for p in unique_parameters((learner.model,)) if not p.requires_grad and p.ndim == 2)
    return float(sum(p.nbytes for p in frozen if p.dtype == torch.float32))


def _adapted_bytes(learner: LocalLearner, size: UpdateSize) -> float:
    """Return what lasts on the GPU if the policy is frozen in bfloat16 below adapters, which are its own reference too. A
    critic is still trained.
    """
    critic, here = models_here(learner, size)
    policy = unique_parameters((learner.model,))
    gone = {REFERENCE, *fetched_models(learner, size)}
    known = {id(p) for p in policy}
    kept = [
        p
        for p in unique_parameters((critic, *(o for name, o in here.items() if name not in gone)))
        if id(p) not in known
    ]
    sharded = sharded_parameters(learner) if size.shares > 1 else set()
    trained = bytes_here((p for p in kept if p.requires_grad), sharded, size.shares, wide_bytes)
    moments = bytes_at_once(kept, trained, size) * moment_bytes_per_byte(learner)
    narrow = bytes_here(policy, sharded, size.shares, lambda p: min(p.nbytes, 2 * p.numel()))
    held = narrow + bytes_here(kept, sharded, size.shares)
    return held + trained + moments


def advice(found: MemoryEstimate, learner: LocalLearner, size: UpdateSize) -> list[str]:
    """Return a line with options that save memory, if the estimate exceeds the GPU's memory; else []."""
    if found.total <= TIGHT * size.room:
        return []
    if problem := _too_large(learner, size):
        return [problem]
    fewer = max(FEW_TOKENS, size.tokens // 4)
    other = {
        **_served(found, size),
        **({"--recompute layers": replace(size, recompute=True)} if learner.trust_region is None else {}),
        f"--tokens-per-microbatch {fewer}": replace(size, tokens=fewer),
        **_offloaded(learner, size),
    }
    saving = [(way, estimate_memory(learner, changed)) for way, changed in other.items()]
    ways = [f"{way} ({in_gib(less.total)})" for way, less in saving if less is not None and less.total < found.total]
    if _can_adapt(learner):
        lasting = sum(lasting_bytes(learner, size).values()) + found.parts["copies in bfloat16"]
        ways.append(f"{LORA_OFFER} ({in_gib(found.total - lasting + _adapted_bytes(learner, size))})")
    told = f": {', '.join(ways)} would take less" if ways else ""
    return [f"this may not fit into the GPU's {in_gib(size.room)}{told}"]
