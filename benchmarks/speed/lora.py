"""What low-rank adapters save: memory and time of updates, against those of all weights.

    python benchmarks/speed/lora.py --rounds 5              # some 10 minutes on one core, 4 GiB

A random decoder with the shape of SmolLM2-135M. Each way of training is a process of its own; they take turns, and times, of
processors and not of the clock, are compared within a round. Memory is the most that a process occupied from the loaded
model on: the process itself, weights, gradients, moments, activations. With a KL term each update begins with a pass of the
reference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from side import Memory, use_threads
from tables import Figure

from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.policy import PolicyObjective
from posttrain.config.training import RL
from posttrain.core.batch import Batch
from posttrain.core.protocols import Alone
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, StopReason
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.training.adjust import adjust
from posttrain.training.open_learner import policy, reference
from posttrain.training.setup import microbatch_tokens
from posttrain.training.sources.packing import collate, split_microbatches

SHAPE = DecoderConfig(
    vocab=49_152, hidden=576, layers=30, heads=9, kv_heads=3, head_size=64, intermediate=1536, context=8192, tied=True
)
WAYS = {"all weights": None, "rank 16": 16, "rank 16 with KL": 16}
PROMPTS, GROUP, PROMPT, REPLY = 2, 8, 96, 128  # of a step: rollouts that share prompts, lengths in tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens-per-microbatch", type=int, help="default: that of posttrain, 1024")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.side, options)
        return 0
    with tempfile.TemporaryDirectory(prefix="lora-") as place:
        new_decoder(SHAPE, 0).save(Path(place))
        return measured(place, options)


def measured(place: str, options: argparse.Namespace) -> int:
    """Let the ways take turns, and print what they took."""
    more = ["--model", place, "--threads", str(options.threads), "--precision", options.precision]
    if options.tokens_per_microbatch:
        more += ["--tokens-per-microbatch", str(options.tokens_per_microbatch)]
    sides = {
        way: subprocess.Popen(
            [sys.executable, __file__, "--side", way, *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for way in WAYS
    }
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(options.rounds + 1):  # the first one warms up
        for way in list(WAYS) if number % 2 else reversed(list(WAYS)):
            told = ask(sides[way])
            if number:
                found[way].append(told)
    for side in sides.values():
        assert side.stdin is not None
        side.stdin.close()
        side.wait()
    print(
        "| updates of | processor seconds | over all weights | peak, MiB | over all weights | tokens |\n"
        + "| --- " * 6
        + "|"
    )
    seconds = {way: Figure.of([told["seconds"] for told in tolds]) for way, tolds in found.items()}
    peaks = {way: max(told["peak"] for told in tolds) for way, tolds in found.items()}
    for way in WAYS:
        time_ratio, share = seconds[way].over(seconds["all weights"]), peaks[way] / peaks["all weights"]
        tokens = found[way][0]["tokens"]
        print(f"| {way} | {seconds[way]} | {time_ratio} | {peaks[way]:,.0f} | {share:.2f} | {tokens:,.0f} |")
    print(f"memory with KL over that without: {peaks['rank 16 with KL'] / peaks['rank 16']:.3f}")
    return 0


def ask(side: subprocess.Popen[str]) -> dict[str, float]:
    assert side.stdin is not None and side.stdout is not None
    side.stdin.write("update\n")
    side.stdin.flush()
    told: dict[str, float] = json.loads(side.stdout.readline())
    return told


def serve(way: str, options: argparse.Namespace) -> None:
    """An update for each line, until there are no more."""
    use_threads(options.threads)
    folder, precision = Path(options.model), options.precision
    settings: dict[str, Any] = {} if WAYS[way] is None else {"lora": WAYS[way]}
    config = RL(model=str(folder), precision=precision, tokens_per_microbatch=options.tokens_per_microbatch, **settings)
    model = policy(config, folder, torch.device("cpu"), Alone())
    kl = way.endswith("KL")
    others = {REFERENCE: reference(config, model, folder, Alone())} if kl else {}
    learner = LocalLearner(model, Optimization(lr=1e-6), precision=precision, others=others)
    objective = PolicyObjective(adjust(find("grpo"), RL(settings={"kl": 0.05 if kl else 0.0})))
    batches, watch = laid(config), Memory()
    watch.begin()
    for _ in sys.stdin:
        began = time.process_time()
        now = batches
        if kl:
            known = learner.evaluate(batches, of=REFERENCE)
            now = [replace(b, ref_logp=o.logp) for b, o in zip(batches, known, strict=True)]
        learner.update(now, objective)
        took = time.process_time() - began
        tokens = sum(batch.layout.tokens.numel() for batch in batches)
        print(json.dumps({"seconds": took, "tokens": tokens, **watch.peak()}), flush=True)


def laid(config: RL) -> list[Batch]:
    """Micro-batches as GRPO's: groups share their prompts, every rollout has an advantage."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, SHAPE.vocab, (count,), generator=generator).tolist())

    rollouts = []
    for _ in range(PROMPTS):
        prompt = tokens(PROMPT)
        for _ in range(GROUP):
            transcript = Transcript()
            transcript.observe(prompt)
            transcript.sample(Completion(0, tokens(REPLY), [-10.0] * REPLY, "", StopReason.LENGTH, 0))
            rollouts.append([transcript])
    weight = torch.full((len(rollouts),), 1 / (len(rollouts) * REPLY))
    advantage = [torch.full((REPLY,), 1.0 - 2.0 * (i % 2)) for i in range(len(rollouts))]
    most = microbatch_tokens(config, torch.device("cpu"))
    return [
        collate([rollouts[i] for i in index], index, weight=weight, fields={"advantage": advantage})
        for index in split_microbatches(rollouts, most)
    ]


if __name__ == "__main__":
    sys.exit(main())
