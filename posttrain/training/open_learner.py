"""Opens the learner of a run, and loads its models into the run's processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from posttrain.config.training import RL, Training
from posttrain.core.protocols import Model, World
from posttrain.core.types import UserError
from posttrain.learners.data_parallel import DataParallelLearner
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.host_memory import without_shared_weights
from posttrain.learners.local_learner import Optimization
from posttrain.learners.router_losses import RouterLosses
from posttrain.models.adapters.adapter_config import is_adapter
from posttrain.models.adapters.adapter_folder import base_named, fingerprint, read_adapter, read_note
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.adapters.lora import (
    ALL,
    LoRA,
    attach,
    begin,
    decoder_of,
    named_targets,
    shared_copy,
    sharing,
    targets_of,
)
from posttrain.models.backbone import Backbone, decoders_in
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.checkpoint_location import checkpoint_folder
from posttrain.models.native.float8 import MULTIPLE, Product, float8_product
from posttrain.models.other_adapters import OtherAdapters
from posttrain.training.role_devices import CRITIC, TEACHERS, refuse_idle_roles, role_device
from posttrain.training.weight_types import frozen_type, refuse_useless, trained_type

if TYPE_CHECKING:
    from posttrain.learners.process_mesh import ProcessMesh


def held_model(
    config: Training,
    folder: Path,
    device: torch.device,
    world: World,
    frozen: bool = False,
    changes: bool = False,
    packed: str = "",
) -> Model:
    """Load the model of a folder for the learner; with `--shard` and the like only this process's part is kept.

    `frozen`: its weights are not trained, but adapters of them may be. `changes`: its modules may still be exchanged
    or tried, which needs a model of transformers whole; the learner shards it. `packed`: see `load_model`.
    """
    matrices = frozen_type(config) if frozen else trained_type(config)
    if not config.in_parts:
        model = load_model(folder, device=device, matrices=matrices, packed=packed)
        return _learning(model, config, matrices is not None and not frozen)
    from posttrain.learners.process_group import Processes  # imports much of torch.distributed

    assert isinstance(world, Processes), "one process alone was refused"
    if config.tensor_parallel > 1:
        from posttrain.models.native.tensor_parallel import divide

        peers = cast(Processes, mesh_of(config, world).tensor)

        def divide_now(decoder: Backbone) -> None:
            refuse_backed(config, decoder)
            divide(cast(Any, decoder), peers)

        model = load_model(folder, device=device, shard=divide_now, shares=config.tensor_parallel, matrices=matrices)
        return _learning(model, config, matrices is not None and not frozen)
    if config.expert_parallel > 1:
        from posttrain.models.hf.expert_parallel import divide_experts

        experts = cast(Processes, mesh_of(config, world).tensor)

        def divide_mixture(decoder: Backbone) -> None:
            if decoder.routers is not None:  # a dense reference stays whole; the learner refuses a dense policy
                divide_experts(decoder, experts)

        model = load_model(folder, device=device, shard=divide_mixture, matrices=matrices)
        return _learning(model, config, matrices is not None and not frozen)
    from posttrain.learners.sharded_decoder import can_gather, shard

    def shard_now(decoder: Backbone) -> None:
        if decoder.native or not changes:
            shard(decoder, world.size, device, config.shard_size)

    shares = config.shards(world.size)
    model = load_model(folder, device=device, shard=shard_now, shares=shares, matrices=matrices)
    _learning(model, config, matrices is not None and not frozen)
    for decoder in decoders_in(cast(nn.Module, model)):
        can_gather(decoder, world)
    return model


def _learning(model: Model, config: Training, all_weights: bool) -> Model:
    """Decide which weights learn. `all_weights`: those that reading matrices in a narrower type has frozen do."""
    if all_weights:
        cast(nn.Module, model).requires_grad_(True)
    if model.decoder is not None and not config.train_vision:
        for parameter in model.decoder.vision_weights():
            parameter.requires_grad_(False)
    return model


def mesh_of(config: Training, world: World) -> ProcessMesh:
    """Return the groups of processes that compute a micro-batch, or the experts of a layer, together."""
    from posttrain.learners.process_group import Processes
    from posttrain.learners.process_mesh import open_mesh

    assert isinstance(world, Processes), "one process alone was refused"
    return open_mesh(world, config.tensor_parallel * config.expert_parallel, config.context_parallel)


def refuse_backed(config: Training, decoder: Backbone) -> None:
    """Raise UserError for a model that transformers computes and that no process can compute a part of."""
    if not decoder.native:
        raise UserError(
            f"{refusing(config)} divides the native decoder, and transformers computes {decoder.family}: leave it out; "
            "--shard works"
        )


def policy(config: Training, folder: Path, device: torch.device, world: World) -> Model:
    """Load the model of a folder for training: all weights, or its adapters, which are new with `--lora`.

    Raises UserError if the options contradict the adapter in the folder.
    """
    if config.lora is None and not is_adapter(folder):
        refuse_without_lora(config)
        model = held_model(config, folder, device, world, changes=getattr(config, "routing_replay", False))
    else:
        refuse_packed_shards(config, folder)  # before anything is read
        model = held_model(config, folder, device, world, frozen=True, changes=True, packed=config.quantize or "")
        adapt(config, decoder_of(model), folder)
    if config.train_vision and (model.decoder is None or not model.decoder.sees):
        raise UserError(f"--train-vision has no effect, as the model in {folder} reads only text: leave it out")
    return model


def adapt(config: Training, decoder: Backbone, folder: Path) -> None:
    """Freeze the weights of a decoder read from a folder, and make its adapters trainable: existing or new ones."""
    if config.lora is None and decoder.lora is None:
        return refuse_without_lora(config)
    if decoder.lora is not None:
        frozen_type(config, decoder.lora.quantize)
        _refuse_other(config, decoder, folder)
        return
    assert config.lora is not None
    targets = named_targets(config.lora_targets, targets_of(decoder))
    alpha = 2.0 * config.lora if config.lora_alpha is None else config.lora_alpha
    lora = LoRA(
        config.lora,
        alpha,
        config.rslora,
        base_named(folder),
        fingerprint(checkpoint_folder(folder)),
        config.quantize or "",
        config.dora,
    )
    left = set() if config.train_vision else decoder.tower()
    attach(decoder, lora, lambda name: name.rpartition(".")[2] in targets and name not in left)
    begin(decoder, config.seed)


def reference(config: Training, model: Model, start: Path, world: World, moves: bool = False) -> Model:
    """Return the policy at the start of the run, frozen. With adapters it shares the policy's frozen weights.

    `moves`: the policy replaces it from time to time.
    """
    if model.decoder is None or model.decoder.lora is None:
        return held_model(config, start, other_device(config, REFERENCE, model), world, frozen=True).requires_grad_(
            False
        )
    if config.shard:
        return _exchanged_adapters(config, model.decoder, start, moves)
    other = _beside_adapters(config, model.decoder, start, moves)
    other.replays = False  # it does not replay the policy's routing
    return other


def other_device(config: Training, role: str, model: Model) -> torch.device:
    """Return where the models of a role are opened: on its device, or on the host if they are offloaded."""
    there = role_device(config, role, model.head.device)
    if "reference" not in config.offload:
        return there
    if there != model.head.device:
        raise UserError(
            f"--offload reference brings frozen models to the device of the policy, and --role-devices {role}="
            f"{config.role_devices[role]} gives them another: leave out one of them"
        )
    return torch.device("cpu")


def _exchanged_adapters(config: Training, model: Backbone, start: Path, moves: bool) -> Model:
    """Return `_beside_adapters` for weights that are sharded, or are about to be."""
    assert model.lora is not None
    other, names = OtherAdapters(model), {name for adapter in adapters(model) for name in adapter.names}
    with other.exchanged() as decoder:
        if is_adapter(start):
            read_adapter(decoder, start)
        elif moves:
            attach(decoder, model.lora, names.__contains__)
            begin(decoder, config.seed)
    return other


def _beside_adapters(config: Training, model: Backbone, start: Path, moves: bool) -> Backbone:
    if not is_adapter(start):
        if not moves:
            return sharing(model)
        other = shared_copy(model)
        begin(other, config.seed)
        return other
    other = sharing(model)
    read_adapter(other, start)
    return other.requires_grad_(False)


def refuse_without_lora(config: Training) -> None:
    """Raise UserError for options of adapters where there are none."""
    for name, value, default in _adapter_options(config)[1:]:
        if value != default:
            raise UserError(f"{name} has no effect without --lora RANK: add --lora, or leave {name} out")


def _adapter_options(config: Training) -> list[tuple[str, Any, Any]]:
    """Return (option, value, default) of the adapter options."""
    return [
        ("--lora", config.lora, None),
        ("--lora-alpha", config.lora_alpha, None),
        ("--lora-targets", config.lora_targets, (ALL,)),
        ("--rslora", config.rslora, False),
        ("--quantize", config.quantize, None),
        ("--dora", config.dora, False),
    ]


def refuse_packed_shards(config: Training, folder: Path) -> None:
    """Raise UserError for quantized weights that would have to be split."""
    packed = config.quantize or (read_note(folder).get("quantize") if is_adapter(folder) else None)
    if config.in_parts and packed:
        raise UserError(
            f"--quantize {packed} packs whole matrices, and {config.divisions[0]} splits them: leave out one of them; "
            "--frozen-weights bfloat16 takes half of the memory, and can be split"
        )


def _refuse_other(config: Training, decoder: Backbone, folder: Path) -> None:
    """Raise UserError if the options contradict the adapter in the folder, whose training continues."""
    lora = decoder.lora
    assert lora is not None
    names = {name.rpartition(".")[2] for adapter in adapters(decoder) for name in adapter.names}
    known = targets_of(decoder)
    there = (
        lora.rank,
        lora.alpha,
        tuple(name for name in known if name in names),
        lora.rslora,
        lora.quantize,
        lora.dora,
    )
    for (option, value, default), own in zip(_adapter_options(config), there, strict=True):
        asked = named_targets(value, known) if option == "--lora-targets" else value
        if value != default and asked != own:
            told = " ".join(own) if isinstance(own, tuple) else own if isinstance(own, str) else f"{own:g}"
            has = f"with {option} {told}" if own else f"without {option}"
            raise UserError(
                f"{folder} is an adapter {has}, which training continues: leave the option out, or merge it with posttrain "
                "merge and start a new one"
            )


def new_learner(
    config: Training, model: Model, optimization: Optimization, world: World, **options: Any
) -> DataParallelLearner:
    """Open the learner of a run. `options`: further arguments of the learner."""
    if optimization.trust_region is not None and trained_type(config) is not None:
        raise UserError("--weights bfloat16 would round the step of a trust region: leave it out")
    losses = RouterLosses(config.router_balance, config.router_z)
    if losses and (model.decoder is None or model.decoder.routers is None):
        raise UserError(
            "--router-balance and --router-z need a mixture of experts, and this model is dense: leave them out"
        )
    refuse_useless(config, model, options.get("others", {}))
    refuse_idle(config, model, options.get("others", {}), options.get("critic"))
    if config.recompute == "layers":
        recompute_layers(model, options.get("critic"))
    if config.float8:
        options["product"] = _in_float8([model, *options.get("others", {}).values(), options.get("critic")])
    options |= {"precision": config.precision, "router_losses": losses, "offload": config.offload}
    if not config.divisions:
        return DataParallelLearner(model, optimization, world=world, **options)
    _refuse_undivided(config, model, options.get("others", {}), options.get("critic"))
    from posttrain.learners.process_group import Processes

    assert isinstance(world, Processes), "one process alone was refused"
    mesh = None if config.divisions == ("--shard",) else mesh_of(config, world)
    if config.expert_parallel > 1:
        from posttrain.learners.expert_parallel_learner import ExpertParallelLearner

        assert mesh is not None
        return ExpertParallelLearner(model, optimization, world=world, mesh=mesh, **options)
    if mesh is not None and mesh.tensor is not None:
        from posttrain.learners.tensor_parallel_learner import TensorParallelLearner

        return TensorParallelLearner(model, optimization, mesh=mesh, **options)
    if config.shard:
        from posttrain.learners.fsdp import FSDPLearner

        return FSDPLearner(model, optimization, world=world, mesh=mesh, shard_size=config.shard_size, **options)
    return DataParallelLearner(model, optimization, mesh=mesh, **options)


def _refuse_undivided(config: Training, model: Model, others: Mapping[str, Model], critic: Any) -> None:
    """Raise UserError for models that cannot be divided among processes."""
    option = config.divisions[0]
    for held in (model, *others.values()):
        if held.decoder is None and not decoders_in(cast(nn.Module, held)):
            raise UserError(
                f"{option} divides the layers of a decoder, and a {type(held).__name__} is not one: leave it out; "
                "--processes works without it"
            )
    if config.divisions == ("--shard",):
        return
    for held in (model, critic, *others.values()) if config.expert_parallel == 1 else ():
        for decoder in [] if held is None else decoders_in(cast(nn.Module, held)):
            refuse_backed(config, decoder)
    if set(others) - {REFERENCE}:
        raise UserError(
            f"{refusing(config)} computes no divergence from a teacher: leave it out; --shard works with teachers"
        )


def refusing(config: Training) -> str:
    """Return the option, other than `--shard`, that divides work among several processes."""
    return next(name for name in config.divisions if name != "--shard")


def refuse_idle(config: Training, model: Model, others: Mapping[str, Model], critic: Any) -> None:
    """Raise UserError for `--offload` and `--role-devices` where nothing moves."""
    others = without_shared_weights(model, others)
    if config.offload and model.head.device.type == "cpu":
        raise UserError(
            f"--offload {' '.join(config.offload)} has no effect on a CPU, whose memory is the host's: leave it out"
        )
    if "reference" in config.offload and not others:
        raise UserError(
            "--offload reference has no effect, as this run holds no reference and no teacher with weights of their own: "
            "leave it out"
        )
    own = {TEACHERS if name != REFERENCE else REFERENCE for name in others}
    own |= {CRITIC} if critic is not None and decoders_in(critic) else set()
    refuse_idle_roles(config, [REFERENCE, TEACHERS, CRITIC], own)


def _in_float8(models: Sequence[Any]) -> Product:
    """Return the product in float8 for these models. Raises UserError for one that cannot have it."""
    decoders = [decoder for model in models if model is not None for decoder in decoders_in(model)]
    if not decoders or not all(decoder.native and decoder.lora is None for decoder in decoders):
        raise UserError(
            "--float8 is for native decoders without adapters, and this run has another model: leave it out"
        )
    for decoder in decoders:
        for _, linear, _ in decoder.linears():
            if odd := [size for size in linear.weight.shape if size % MULTIPLE]:
                raise UserError(
                    f"--float8 needs matrices with a multiple of {MULTIPLE} rows and columns, and one here has {odd[0]}: "
                    "leave it out"
                )
    return float8_product(decoders[0].head.device)


def recompute_layers(model: Model, critic: Any) -> None:
    """Make the trained decoders recompute their layers. Raises UserError if there is no decoder."""
    if not (decoders := decoders_in(cast(nn.Module, model))):
        raise UserError(
            f"--recompute layers needs the layers of a decoder, and a {type(model).__name__} is not one: leave it out"
        )
    for decoder in [*decoders, *(decoders_in(critic) if critic is not None else [])]:
        decoder.recompute_layers()


def replay_experts(config: RL, model: Model) -> None:
    """Prepare a policy for `--routing-replay`. Raises UserError if the options or the model do not allow it."""
    if not config.routing_replay:
        return
    if model.decoder is None or model.decoder.routers is None:
        raise UserError("--routing-replay requires a mixture-of-experts model, and this one is dense: leave it out")
    if config.tokens_per_step:
        raise UserError("--routing-replay needs replies that one step samples: leave out --tokens-per-step")
    from posttrain.models.hf.transformers_folder import replay_routing

    replay_routing(cast(Any, model))
