"""Sampling in bfloat16: the embedded engine, and vLLM where it is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from findings import Findings, Setting, Watch, ceilings
from posttrain_side import Bench, Request
from shapes import model_folder, prompts, shape_of
from side import timed
from tables import Figure, Table, number

from posttrain.models.native.decoder_shape import DecoderConfig

PROMPTS = 16


def sampling(setting: Setting, found: Findings) -> None:
    tokens, counts = (8, (8, 16)) if setting.tiny else (256, (64, 256))
    table = found.table(
        f"Sampling, replies of {tokens} tokens to {PROMPTS} prompts, bfloat16",
        "",
        "tokens/s",
        "ms a decoding step",
        "share of the measured bandwidth, %",
        "most memory, GB",
        notes=(
            "A step: seconds over the tokens of a reply, prompts included. Bandwidth: weights in bfloat16 once and the "
            "cache that a step reads, a prompt once for all its replies, over the measured copy.",
        ),
    )
    for model in ("0.5b", "1.5b"):
        with found.trying(model):
            _engine(setting, found, table, model, tokens, counts)
    if setting.cuda and importlib.util.find_spec("vllm"):
        for model in ("0.5b", "1.5b"):
            with found.trying(f"vLLM {model}"):
                _vllm(setting, table, model, tokens, counts)
    else:
        table.notes.append("vLLM is not installed here.")
    with found.trying("long replies"):
        _long_replies(setting, found)


def wanted_of(bench: Bench, count: int, tokens: int, distinct: int = PROMPTS) -> list[Request]:
    """So many requests on some prompts, those of a prompt in a row."""
    distinct = min(distinct, count)
    ids = [tuple(bench.tokenizer.encode(text)) for text in prompts(distinct)]
    return [(prompt, tokens) for prompt in ids for _ in range(count // distinct)]


def bench_of(setting: Setting, model: str) -> Bench:
    threads = os.cpu_count() or 1
    folder = str(model_folder(model, setting))
    return Bench(folder, threads=threads, device=setting.device, precision="bfloat16")


def _engine(setting: Setting, found: Findings, table: Table, model: str, tokens: int, counts: tuple[int, ...]) -> None:
    bench = bench_of(setting, model)
    for count in counts:
        wanted = wanted_of(bench, count, tokens)
        bench.sampled([(prompt, min(16, tokens)) for prompt, _ in wanted])
        watch = Watch(setting)
        seconds = Figure.of([bench.sampled(wanted)[0] for _ in range(setting.rounds)])
        label = f"embedded engine, {model}, {count} at once"
        _add(setting, table, label, model, wanted, seconds, watch.most())
        found.figures[f"{label}: tokens/s"] = count * tokens / seconds.median
        found.write()


def _long_replies(setting: Setting, found: Findings) -> None:
    """Measure replies of which a few are long: the cache grows, and with a limit requests are preempted."""
    count, tokens, short, long = (8, 4, 8, 600) if setting.tiny else (64, 4, 256, 4096)
    table = found.table(
        f"Sampling, {count - tokens} replies of {short} tokens and {tokens} of {long}, 1.5b, bfloat16",
        "",
        "tokens/s",
        "most of the KV cache, GB",
        "most memory, GB",
        "preemptions",
        notes=("With a limit: a third of what the cache took without one, at least one long reply.",),
    )
    bench = bench_of(setting, "1.5b")
    engine, wanted = bench.engine, wanted_of(bench, count, short)
    wanted = [*wanted[tokens:], *((prompt, long) for prompt, _ in wanted[:tokens])]
    limit = None
    for label in ("no limit", "a third"):
        engine.memory.given, engine.preempted = limit, 0
        bench.sampled(wanted)
        watch, most, room = Watch(setting), [0], engine._make_room

        def seen(steps: int, room: Callable[[int], None] = room, most: list[int] = most) -> None:
            room(steps)
            most[0] = max(most[0], engine._cache.bytes)

        engine._make_room = seen  # type: ignore[method-assign]
        seconds = Figure.of([bench.sampled(wanted)[0] for _ in range(setting.rounds)])
        engine._make_room = room  # type: ignore[method-assign]
        speed = Figure.of([sum(reply for _, reply in wanted) / s for s in seconds.values])
        again = engine.preempted // (setting.rounds + 1)
        table.add(label, speed, number(most[0] / 1e9), number(watch.most()), str(again))
        found.figures[f"long replies, {label}: tokens/s"] = speed.median
        found.write()
        alone = max(engine._cache.size(reply, len(prompt)) for prompt, reply in wanted)
        limit = max(most[0] // 3, alone)


def _add(
    setting: Setting, table: Table, label: str, model: str, wanted: list[Request], seconds: Figure, memory: float
) -> None:
    count, tokens = len(wanted), wanted[0][1]
    read = bytes_of_a_step(shape_of(model, setting), wanted)
    bandwidth = ceilings(setting)["copy"]
    table.add(
        label,
        Figure.of([count * tokens / s for s in seconds.values]),
        Figure.of([1000 * s / tokens for s in seconds.values]),
        Figure.of([100 * read * tokens / s / bandwidth for s in seconds.values]),
        number(memory),
    )


def bytes_of_a_step(shape: DecoderConfig, wanted: list[Request]) -> float:
    """Return the bytes that a decoding step reads halfway through the replies: weights, keys and values, in bfloat16."""
    own = sum(tokens / 2 for _, tokens in wanted)
    cached = (own + sum(len(prompt) for prompt in {prompt for prompt, _ in wanted})) * shape.layers
    embedding = 0 if shape.tied else shape.vocab * shape.hidden  # of which a step reads a few rows
    return 2 * (shape.parameters - embedding + cached * 2 * shape.kv_heads * shape.head_size)


def _vllm(setting: Setting, table: Table, model: str, tokens: int, counts: tuple[int, ...]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    folder: Path = model_folder(model, setting)
    llm = LLM(
        str(folder),
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max(counts),
        gpu_memory_utilization=0.5,
        skip_tokenizer_init=True,
        generation_config="vllm",
        seed=0,
    )
    from posttrain.models.tokenizer.tokenizer import Tokenizer

    ids = [tuple(Tokenizer.load(folder).encode(text)) for text in prompts(PROMPTS)]
    for count in counts:
        wanted = [(prompt, tokens) for prompt in ids for _ in range(count // PROMPTS)]
        asked = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt, _ in wanted]
        options = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)

        def sample(asked: list[TokensPrompt] = asked, options: SamplingParams = options) -> None:
            llm.reset_prefix_cache()
            llm.generate(asked, options, use_tqdm=False)

        sample()
        seconds = Figure.of([timed(sample) for _ in range(setting.rounds)])
        _add(setting, table, f"vLLM, {model}, {count} at once", model, wanted, seconds, float("nan"))
