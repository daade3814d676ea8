"""Random transcripts that branch, with tool text and replies of one token."""

from __future__ import annotations

import random

import numpy as np
from update_cases import WORDS

from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Completion, StopReason


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, WORDS.vocab_size) for _ in range(count)]


def said(rng: random.Random, count: int, experts: bool = False) -> Completion:
    tokens = drawn(rng, count)
    routes = np.array([[[rng.randrange(8), rng.randrange(8)]] * 2 for _ in tokens], dtype=np.int16)
    logp = [-rng.random() for _ in tokens]
    return Completion(0, tokens, logp, "", StopReason.EOS, rng.randrange(5), routes if experts else None)


def grown(seed: int, trunks: int, leaves: int, shared: int = 0) -> list[Transcript]:
    """Transcripts of which some branch off from others, at any depth; each ends with a scored token or a shown one.

    `shared`: tokens with which all their prompts begin; some prompts have no others.
    """
    rng = random.Random(seed)
    beginning = drawn(rng, shared)
    found: list[Transcript] = []
    for trunk in range(trunks):
        root = Transcript()
        root.observe(beginning + drawn(rng, rng.randint(0 if shared else 1, 5)))
        root.sample(said(rng, rng.randint(1, 4)))
        family = [root]
        while len(family) < leaves + trunk % 2:
            child = rng.choice(family).branch()
            if rng.random() < 0.4:
                child.observe(drawn(rng, rng.randint(1, 3)), SpanKind.TOOL)
            if rng.random() < 0.9:
                child.sample(said(rng, rng.randint(1, 4)), learn=rng.random() < 0.8)
            family.append(child)
        found += family
    return found
