"""What turns cost: episodes of 5 replies of 50 tokens, each behind 250 tokens of a tool, kept between turns and not.

    python benchmarks/agents/turns.py

Both ways in one process, taking turns. Needed are the tokens that have to go through the model once: all but the last
of each episode, a group's prompt once. Kept memory is that at the end of the third turn over what keys and values of the
tokens that are kept take without anything between them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from posttrain.core.types import Sampling
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import Decoder, DecoderConfig, new_decoder
from posttrain.models.tokenizer.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "models" / "gsm8k-5m"
PROMPT, REPLY, TOOL, TURNS = 250, 50, 250, 5
PROMPTS, GROUP = 4, 4


def models() -> dict[str, Decoder]:
    """The small one, and one of 27 M parameters whose weights are random; their contexts hold five turns."""
    small = load_model(FOLDER)
    shape = {"vocab": small.config.vocab, "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "head_size": 64}
    large = new_decoder(DecoderConfig(**shape, intermediate=1536, context=2048, tied=True), seed=0)
    object.__setattr__(small.config, "context", 2048)
    for model in (small, large):
        model.eos_ids = (model.config.vocab - 1,)
    return {"5m": small, "27m": large}


def episodes(engine: LocalEngine, keep: bool) -> tuple[float, int, float]:
    """(seconds, tokens that went through the model, kept memory over that of the kept tokens)."""
    vocab, config = engine.model.config.vocab - 1, engine.model.config
    draw = torch.Generator().manual_seed(0)

    def some(count: int) -> list[int]:
        return torch.randint(5, vocab, (count,), generator=draw).tolist()

    prompts = [some(PROMPT) for _ in range(PROMPTS)]
    said = {i: list(prompts[i // GROUP]) for i in range(PROMPTS * GROUP)}
    before, kept, begin = engine.computed, 0.0, time.perf_counter()
    for turn in range(TURNS):
        for i, tokens in said.items():
            engine.submit(i, tokens, Sampling(max_tokens=REPLY, seed=1000 * turn + i), keep=keep)
        while engine.running or engine.waiting:
            for completion in engine.poll():
                said[completion.id] += completion.tokens
        if turn == 2 and keep:
            each = 2 * config.layers * config.kv_heads * config.head_size * 4
            kept = engine.kept.bytes / (each * engine.kept.tokens)
        if turn < TURNS - 1:
            for tokens in said.values():
                tokens += some(TOOL)
    seconds = time.perf_counter() - begin
    for i in said:
        engine.forget(i)
    return seconds, engine.computed - before, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(2)
    needed = PROMPTS * PROMPT + PROMPTS * GROUP * (TURNS * REPLY + (TURNS - 1) * TOOL - 1)
    for name, model in models().items():
        engine = LocalEngine(model, Tokenizer.load(FOLDER), slots=PROMPTS * GROUP)
        ratios, found = [], {}
        for _ in range(options.rounds):
            found = {keep: episodes(engine, keep) for keep in (True, False)}
            ratios.append(found[False][0] / found[True][0])
        ratio = statistics.median(ratios)
        print(
            f"{name}: {ratio:.2f} [{min(ratios):.2f}-{max(ratios):.2f}] times as fast as computing every turn anew "
            f"({found[True][0]:.1f} s, {found[False][0]:.1f} s); computed {found[True][1] / needed:.3f} of the tokens "
            f"needed (anew: {found[False][1] / needed:.2f}); kept memory {found[True][2]:.3f} of its tokens'"
        )


if __name__ == "__main__":
    main()
