"""Memory of the KV cache while SmolLM2 answers GSM8K, and what its tokens need: 8 questions x 4 replies, then another turn.

    python benchmarks/speed/kv_memory.py --max-tokens 400        # a minute on one core

The second turn reads the same passage in most rollouts of a group, as in Search-R1.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import cast

import torch

from posttrain.cli.real_model import fetched
from posttrain.core.types import Completion, Sampling
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import Decoder
from posttrain.models.tokenizer.tokenizer import Tokenizer

REPLIES = 4
SYSTEM = "You are a careful assistant. Solve the problem step by step, and give the final number after ####. " * 4


class Measured:
    """An engine, and what its cache has and needs after each decoding step."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer) -> None:
        self.engine = LocalEngine(model, tokenizer, precision="bfloat16")
        config = model.config
        self.token = 4 * config.layers * config.kv_heads * config.head_size  # bytes, in bfloat16
        self.sizes: list[tuple[int, int]] = []
        self._decode = self.engine._decode
        self.engine._decode = self._seen  # type: ignore[method-assign]

    def _seen(self) -> int:
        steps, engine = self._decode(), self.engine
        if running := engine.running:
            own = int(engine._rows.length[: len(running)].sum()) - sum(len(request.prompt) for request in running)
            needed = own + sum(map(len, {request.prompt for request in running}))
            self.sizes.append((engine.memory.occupied, needed * self.token))
        return steps

    def sampled(self, what: str, texts: list[list[int]], max_tokens: int, keep: bool = True) -> dict[int, Completion]:
        self.sizes.clear()
        for number, text in enumerate(texts):
            self.engine.submit(number, text, Sampling(seed=number, max_tokens=max_tokens), keep=keep)
        found: dict[int, Completion] = {}
        while len(found) < len(texts):
            found |= {c.id: c for c in self.engine.poll()}
        has, needs = zip(*self.sizes, strict=True)
        print(
            f"{what}: at most {max(has) / 2**20:.0f} MiB, {max(needs) / 2**20:.0f} needed; on average "
            f"{sum(has) / sum(needs):.2f} times what is needed",
            flush=True,
        )
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[3] / "shared" / "data")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = fetched()
    model, tokenizer = cast(Decoder, load_model(path)), Tokenizer.load(path)
    lines = sorted((given.data / "gsm8k").glob("*.jsonl"))[0].read_text().splitlines()[:8]
    questions = [json.loads(line)["question"] for line in lines]
    texts = [
        tokenizer.encode(
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        for question in questions
        for _ in range(REPLIES)
    ]
    Measured(model, tokenizer).sampled("replies", texts, given.max_tokens, keep=False)
    measured = Measured(model, tokenizer)
    calls = measured.sampled("calls of a tool", texts, 24)
    passage = tokenizer.encode(" ".join(questions))[:300]
    for number in range(len(texts)):
        if number % REPLIES in (1, 2):  # says what the first one says
            first = number - number % REPLIES
            calls[number] = calls[first]
            measured.engine.forget(number)
            measured.engine.copy(first, number, len(texts[first]) + len(calls[first].tokens))
    more = [[*text, *calls[number].tokens, *passage] for number, text in enumerate(texts)]
    measured.sampled("the next turn", more, 48)


if __name__ == "__main__":
    main()
