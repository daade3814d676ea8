"""What an update with a long rollout takes: memory above weights, gradients and moments, and time, by its length.

    python benchmarks/agents/long.py

A model of the 5 M shape whose context is set to 16,384, random weights, GRPO's objective, one rollout of one context; each
length in a process of its own, after an update with a short one. Attention's share of the arithmetic says by how much
the time per token may grow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.policy import PolicyObjective
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, StopReason
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import new_decoder
from posttrain.training.sources.packing import collate

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "models" / "gsm8k-5m"
LENGTHS = (1_000, 4_000, 16_000)
PROMPT = 100


def memory(name: str) -> float:
    """A line of this process's status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":"))


def rollout(length: int, vocab: int) -> Transcript:
    draw = np.random.default_rng(length)
    tokens = draw.integers(5, vocab, length).tolist()
    transcript = Transcript()
    transcript.observe(tokens[:PROMPT])
    sampled = tokens[PROMPT:]
    transcript.sample(Completion(0, sampled, [-8.0] * len(sampled), "", StopReason.LENGTH, 0))
    return transcript


def measured(length: int) -> dict[str, float]:
    config = replace(load_model(FOLDER).config, context=16_384)
    learner = LocalLearner(new_decoder(config, seed=0), Optimization(lr=1e-6))
    objective = PolicyObjective(find("grpo"))

    def update(tokens: int) -> float:
        transcript = rollout(tokens, config.vocab)
        count = transcript.n_scored
        fields = {"advantage": [torch.linspace(-1, 1, count)]}
        fields |= {name: [torch.full((count,), -8.0)] for name in ("old_logp", "ref_logp")}
        batch = collate([[transcript]], [0], weight=torch.tensor([1 / count]), fields=fields)
        begin = time.perf_counter()
        learner.update([batch], objective)
        return time.perf_counter() - begin

    update(200)  # gradients and moments are there
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    seconds = update(length)
    products = 2 * config.parameters  # the head is the embedding, or counted beside it
    attention = 4 * config.layers * config.heads * config.head_size * length / 2
    return {"mib": memory("VmHWM") - before, "seconds": seconds, "flop": float(length * (products + attention))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--length", type=int, help="measure this one, in this process")
    options = parser.parse_args()
    torch.set_num_threads(2)
    if options.length:
        print(json.dumps(measured(options.length)))
        return
    found = {}
    for length in LENGTHS:
        command = [sys.executable, __file__, "--length", str(length)]
        found[length] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{length} tokens: {found[length]['mib']:.0f} MiB, {found[length]['seconds']:.2f} s")
    for short, long in pairwise(LENGTHS):
        ratio = {name: found[long][name] / found[short][name] for name in ("mib", "seconds", "flop")}
        print(
            f"{long} beside {short}: {ratio['mib']:.2f} times the memory, {ratio['seconds']:.2f} times the time, "
            f"{ratio['flop']:.2f} times the arithmetic"
        )


if __name__ == "__main__":
    main()
