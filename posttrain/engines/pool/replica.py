"""An embedded engine of a pool, in another process: `serve` is its main loop.

    pool -> engine   ("submit", ticket, id, prompt, own, sampling, keep), ("cancel", id), ("forget", id),
                     ("copy", id, to, tokens), ("load", offer); first of all ("setup", ...)
    engine -> pool   ("started", properties), ("loaded", version, checksum), ("memory", bytes) after it from a GPU,
                     ("done", ticket, completion), ("refused", ticket, reason) of a request that it cannot carry out,
                     ("alive",) as a heartbeat while it works, ("failed", reason) before it exits

It also samples while the pool does not listen. A server of vLLM or SGLang gets the same messages through a client of its
own (see `posttrain.engines.servers.server_client`), and ("transfer", method, info) and ("sleep",) besides, which it
answers with ("transferred", result) and ("slept",). Only servers get pictures: last in "submit", [start, length, digest]
of each.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from posttrain.core.types import UserError
from posttrain.engines.local.embedded import embedded
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.pool.pool_protocol import Gone, Message, Wire, decode_sampling, encode_completion, wait
from posttrain.engines.weight_sync import Offer, Received, checksum_of, offered
from posttrain.models.backbone import Backbone
from posttrain.models.checkpoint_folder import WeightOptions, allocate
from posttrain.models.free_memory import peak_memory
from posttrain.models.json_files import read_json
from posttrain.models.native.decoder_config import read_config
from posttrain.models.native.kernels import build
from posttrain.models.native.merged_weights import held
from posttrain.models.tokenizer.tokenizer import Tokenizer

LAST_SECONDS = 1.0  # time for sending the reason of a failure to the pool


class LocalHost:
    """The embedded engine with its own copy of the weights."""

    def __init__(self, setup: dict[str, Any], read: Callable[[Offer], Tensor] = offered) -> None:
        """Build the model and its engine. `setup`: the result of `posttrain.engines.pool.replicas.setup_of`. `read`:
        returns the bytes of offered weights, uint8 [n].
        """
        torch.set_num_threads(setup["threads"])
        build.use(setup["compiled"])
        folder, self.layout = Path(setup["folder"]), setup["layout"]
        self.dtype = dtype = getattr(torch, setup["layout"]["dtype"])
        self.device = device = torch.device(setup["device"])
        if device.index is not None:  # Ray shows an actor one GPU alone
            torch.cuda.set_device(device)
        self.model: Backbone
        if setup["backed"] is None:
            config = read_config(folder, read_json(folder / "config.json"))
            self.model = allocate(folder, config, WeightOptions(dtype, device)).requires_grad_(False)
        else:
            from posttrain.models.hf.transformers_folder import empty_backed

            self.model = empty_backed(folder, dtype, device, setup["context"], setup["backed"]).requires_grad_(False)
        own = {name: list(tensor.shape) for name, tensor in held(cast(nn.Module, self.model))}
        assert own == {s["name"]: s["shape"] for s in self.layout["stored"]}, "the setup describes the run's model"
        self.model.eos_ids = tuple(setup["eos_ids"])
        self.read, self.slots, kept = read, setup["slots"], setup["cache_gib"]
        tokenizer, precision = Tokenizer.load(folder), setup["precision"]
        self.engine = embedded(self.model, tokenizer, self.slots, precision, kept, filled=True)
        if isinstance(self.engine, LocalEngine):
            self.engine.memory.sharers = setup["sharers"]

    def properties(self) -> dict[str, Any]:
        own = {
            "min_temperature": 0.0,
            "truncated_logp": True,
            "slots": self.slots,
            "context": self.model.config.context,
        }
        return {"backend": self.engine.backend, "batch_invariant": self.engine.batch_invariant, **own}

    def take(self, offer: Offer) -> tuple[int, int]:
        """Load the offered weights. The checksum is computed from the engine's own weights, after the weight sync."""
        self.engine.load(Received(self.layout, self.read(offer)), offer["version"])
        return offer["version"], checksum_of(
            (name, tensor.to(self.dtype)) for name, tensor in held(cast(nn.Module, self.model))
        )


def serve(host: LocalHost, wire: Wire, alive: float) -> None:
    """Serve the pool. Raises Gone when the pool is gone. `alive`: seconds between two heartbeats."""
    engine, tickets, last_heartbeat = host.engine, dict[int, int](), time.monotonic()
    wire.send("started", host.properties())
    while True:
        if not tickets or wire.pending:
            wait([wire], 0.001 if tickets else None)
            wire.flush()
        for message in wire.receive():
            _carry_out(host, wire, tickets, message)
        for done in engine.poll() if tickets else ():
            wire.send("done", tickets.pop(done.id), encode_completion(done))
        if tickets and time.monotonic() - last_heartbeat > alive:
            wire.send("alive")
            last_heartbeat = time.monotonic()


def _carry_out(host: LocalHost, wire: Wire, tickets: dict[int, int], message: Message) -> None:
    what, *more = message
    if what == "submit":
        ticket, id, prompt, own, sampling, keep = more
        if own and isinstance(host.engine, LocalEngine):
            host.engine.take_over(id, prompt)
        try:
            host.engine.submit(id, [*prompt, *own], decode_sampling(sampling), keep)
        except UserError as error:  # no other engine, nor this one after a restart, would accept it
            wire.send("refused", ticket, str(error))
        else:
            tickets[id] = ticket
    elif what == "cancel":
        host.engine.cancel(*more)
        tickets.pop(more[0], None)
    elif what == "forget":
        host.engine.forget(*more)
    elif what == "copy":
        host.engine.copy(*more)
    elif what == "load":
        wire.send("loaded", *host.take(*more))
        if most := peak_memory(host.device):
            wire.send("memory", most)
    else:
        raise ValueError(f"the pool asked for {what!r}")


def serve_pool(wire: Wire, host: Callable[[dict[str, Any]], LocalHost]) -> None:
    """Serve the pool from its first message until it is gone. Any other error is sent to the pool, and raised."""
    try:
        while not (messages := wire.receive()):
            wait([wire], None)
        [[what, setup]] = messages
        assert what == "setup", "a pool sends its setup first"
        serve(host(setup), wire, setup["alive"])
    except Gone:
        return
    except Exception as error:
        wire.send("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        end = time.monotonic() + LAST_SECONDS
        while wire.pending and time.monotonic() < end:
            wait([wire], LAST_SECONDS)
            wire.flush()
        raise


def main(socket_fd: int) -> None:
    """Run a child process on the pool's own machine."""
    serve_pool(Wire(socket.socket(fileno=socket_fd)), LocalHost)
