"""Serves an engine on a port, until Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from posttrain.config.inference import ServeEngine
from posttrain.engines.pool.listener import listen
from posttrain.engines.pool.pool_protocol import read_token
from posttrain.engines.pool.replicas import setup_of
from posttrain.models.adapters.adapter_config import described_in
from posttrain.models.json_files import read_json
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_config import read_config, read_eos_ids
from posttrain.models.native.kernels import build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.checkpoint import resolve
from posttrain.system.temp_folders import TempFolder
from posttrain.training.setup import choose_device, end_tokens, use_threads


def _say(line: str) -> None:
    print(line, flush=True)  # a program may be waiting for the address


def serve_engine(config: ServeEngine, say: Callable[[str], None] = _say) -> None:
    """Answer pools until a signal stops the process. Raises UserError for an unusable folder, token or address."""
    token = read_token(config.engine_token)
    use_threads(config.threads)
    build.use(config.compiled)
    folder, device = resolve(config.model), choose_device(config.device)
    tokenizer, folder = Tokenizer.load(folder), described_in(folder)
    source = read_json(folder / "config.json")
    with torch.device("meta"):  # only its sizes are needed: the weights arrive later
        model = Decoder(read_config(folder, source))
    generation = read_json(folder / "generation_config.json", optional=True)
    model.source, model.eos_ids = source, read_eos_ids(folder, source, generation, model.config.vocab)
    end_tokens(model, tokenizer)
    how = config.slots, config.precision, config.engine_cache, torch.get_num_threads()
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell ignores it for background processes
        signal.signal(number, signal.default_int_handler)
    with TempFolder("engine") as own, suppress(KeyboardInterrupt):
        setup = {**setup_of(model, tokenizer, Path(own), *how), "device": str(device)}
        say(f"samples     {config.model}, {model.config.context} tokens of context, on {device}")
        listen(setup, config.listen, token, say)
    say("stopped")
