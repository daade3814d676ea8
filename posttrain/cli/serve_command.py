"""Serves a checkpoint over HTTP, until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing

from posttrain.config.inference import ServePolicy
from posttrain.core.protocols import Engine
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.open_engine import open_engine
from posttrain.engines.serving.engine_policy import EnginePolicy
from posttrain.engines.serving.engine_thread import EngineThread
from posttrain.engines.serving.policy_server import PolicyHandlers, ServerLimits, serving
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.kernels import build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.checkpoint import resolve
from posttrain.runs.run_files import step_of
from posttrain.system.http_front import HOST, read_token
from posttrain.system.http_server import stop_signal
from posttrain.training.setup import choose_device, end_tokens, use_threads


def _say(line: str) -> None:
    print(line, flush=True)  # a program may be waiting for the address


def serve_policy(config: ServePolicy, say: Callable[[str], None] = _say) -> None:
    """Answer requests until a signal stops the server. Raises UserError if the checkpoint cannot be loaded, or the
    engine fails.

    Answers carry the version of the weights: the step of the checkpoint in its run, or 0.
    """
    use_threads(config.threads)
    build.use(config.compiled)
    folder, device = resolve(config.model), choose_device(config.device)
    tokenizer = Tokenizer.load(folder, config.chat_template, config.chat_template_kwargs)
    model = load_model(folder, device=device)
    ends = end_tokens(model, tokenizer)
    options = EngineOptions(
        config.slots, config.precision, cache_gib=config.engine_cache, seconds=config.engine_timeout
    )
    with closing(open_engine(config.engine, model, tokenizer, options, serving=True)) as engine:
        version = step_of(folder.name) or 0
        engine.load(model, version)
        name, context = config.name or config.model, model.config.context
        limits = ServerLimits(config.requests)

        def opened(desk: EngineThread) -> EnginePolicy:
            return EnginePolicy(desk, tokenizer, name, context, ends, config.max_tokens)

        def told(port: int) -> None:
            say(f"model       {name}, version {version}, {context} tokens of context, {engine.backend}")
            say(f"OpenAI      http://{HOST}:{port}/v1")
            say(f"Anthropic   http://{HOST}:{port}")
            say(f"token ids   http://{HOST}:{port}/inference/v1/generate")
            say("Ctrl-C ends it")

        asyncio.run(_serve(engine, opened, limits, config.port, told, read_token(config.token)))
    say("stopped")


async def _serve(
    engine: Engine,
    opened: Callable[[EngineThread], EnginePolicy],
    limits: ServerLimits,
    port: int,
    told: Callable[[int], None],
    token: str | None,
) -> None:
    over = stop_signal()

    def fail(problem: BaseException) -> None:
        if not over.done():
            over.set_exception(problem)

    desk = EngineThread(engine, failed=fail)
    with closing(opened(desk)) as policy:
        service = PolicyHandlers(lambda request: policy, limits, token)
        async with serving(service.application(), port) as bound:
            told(bound)
            await over
