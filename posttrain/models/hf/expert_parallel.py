"""Expert parallelism of a model of transformers: each of several processes has whole experts of each layer, and computes
their outputs for the tokens of all (GShard, arXiv 2006.16668, section 3.2).

A process sends each of its tokens to the processes with its experts, and weighs what comes back. Everything else in a
layer, routers and shared experts included, is whole in each process.

P    processes that divide the experts    E    experts of a layer    n    tokens here    k    experts per token
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from posttrain.core.types import UserError
from posttrain.models.hf.transformers_folder import COARSE, TOLERANCE, probe
from posttrain.models.native.tensor_parallel import cut
from posttrain.models.peers import Peers, dealt
from posttrain.models.row_shards import MEETING

if TYPE_CHECKING:
    from posttrain.models.backbone import Backbone
    from posttrain.models.hf.backed import Backed


DENSE = (
    "--expert-parallel divides the experts of a mixture, and this model is dense: leave it out; --shard divides dense "
    "models"
)


def divide_experts(decoder: Backbone, peers: Peers) -> None:
    """Keep this process's experts of each layer of a mixture; those of an earlier call stay. All peers call this.

    Raises UserError if the experts cannot be divided, or if the model then gives other hidden states.
    """
    if decoder.sees:
        raise UserError(
            "--expert-parallel was not tried with a model that sees pictures: leave it out; --processes works without it"
        )
    if decoder.native or decoder.routers is None:
        raise UserError(DENSE)
    model, count = cast("Backed", decoder), decoder.routers.experts
    _refuse_uneven(count, peers.size)
    layers = expert_layers(model)
    if len(layers) != len(decoder.routers):  # a list of modules, or a function of its own
        raise UserError(
            f"--expert-parallel divides experts that transformers stacks in one tensor: {type(model.inner).__name__} has "
            f"{len(decoder.routers)} layers with routers, and {len(layers)} with such tensors: leave it out"
        )
    if model.peers is not None:
        return
    own = _states(model)
    for layer in layers:
        _keep_own(layer, count, peers)
        layer.forward = partial(_exchanged, layer.forward, peers, count)
    model.peers = peers
    model.at_once = True  # every process then makes the same number of calls
    setattr(model, MEETING, peers.meeting)
    with peers.meeting():
        apart = float((_states(model) - own).abs().max() / own.abs().max().clamp_min(1))
    if not apart <= (TOLERANCE if own.dtype in (torch.float32, torch.float64) else COARSE):
        raise UserError(
            f"--expert-parallel: hidden states of {type(model.inner).__name__} with divided experts are {apart:.2g} off: "
            "leave it out"
        )


def divide_shapes(model: Backed, peers: Any) -> None:
    """Keep the first process's experts of a model that has shapes and no numbers. Its passes then take as many rows from
    others as they send: `peers` have equal shares of all tokens. Raises UserError if the experts cannot be divided.
    """
    layers = [] if model.native else expert_layers(model)
    if not layers:
        raise UserError(DENSE)
    for layer in layers:
        count = layer.num_experts
        _refuse_uneven(count, peers.size)
        _keep_own(layer, count, peers)
        layer.forward = partial(_balanced, layer.forward)


def expert_layers(model: Backed) -> list[Any]:
    """Return the modules whose experts transformers stacks in one tensor."""
    return [m for m in model.inner.modules() if hasattr(m, "is_transposed") and hasattr(m, "num_experts")]


def _refuse_uneven(count: int, size: int) -> None:
    if count % size:
        raise UserError(
            f"--expert-parallel {size} divides experts, and this model has {count} per layer: give a divisor of {count}, "
            "or leave it out"
        )


def _keep_own(layer: Any, count: int, peers: Peers) -> None:
    """Keep this process's experts of a layer."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if parameter.shape[0] == count:
            cut(layer, name, (count,), 0, peers)
    layer.num_experts = count // peers.size


def _states(model: Backed) -> Tensor:
    """Return the hidden states of two short texts."""
    with torch.no_grad():
        return model.hidden(*probe(model))


def _exchanged(inner: Any, peers: Peers, count: int, *given: Tensor, **named: Tensor) -> Tensor:
    """Compute a layer's experts. `inner`: its forward, over its own ones; `count`: E.

    Given: hidden states [n, hidden], the experts of each token [n, k] and their weights [n, k].
    """
    states, experts, weights = (*given, *named.values())
    taken = experts.shape[1]
    chosen, order = experts.flatten().sort(stable=True)
    sent = torch.bincount(chosen, minlength=count).view(peers.size, -1)  # [P, E / P], for each expert of each process
    got = peers.exchanged(sent)  # [P, E / P], from each process for each own expert
    to, back = sent.sum(1).tolist(), got.sum(1).tolist()
    rows = dealt(states[order // taken], peers, to, back)
    index = torch.arange(got.shape[1], device=got.device).repeat(peers.size).repeat_interleave(got.flatten())[:, None]
    if len(rows):  # else the rows pass as they are: the backward pass of every process has the same exchanges
        rows = inner(rows, index, weights.new_ones(index.shape))
    found = dealt(rows, peers, back, to)[order.argsort()].view(-1, taken, rows.shape[1])
    return (found * weights[..., None]).sum(1).to(states.dtype)


def _balanced(inner: Any, *given: Tensor, **named: Tensor) -> Tensor:
    """Compute a layer's experts as `_exchanged` does, with tensors that have no numbers."""
    states, experts, weights = (*given, *named.values())
    taken = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    rows = states[order // taken].clone()  # those of others, as many as were sent
    rows = inner(rows, order[:, None], weights.new_ones((len(order), 1)))
    found = rows.clone()[order.argsort()].view(-1, taken, rows.shape[1])
    return (found * weights[..., None]).sum(1).to(states.dtype)
