"""posttrain's answers about comparisons: rollouts 2 i and 2 i + 1 of a case are the better and the worse reply."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from exchange import SHIFT, TAIL, Answer, Case, Side
from torch import Tensor

from posttrain.algorithms.preference import PreferenceAlgorithm, PreferenceObjective
from posttrain.algorithms.preference_table import PREFERENCES
from posttrain.algorithms.settings import change
from posttrain.core.batch import Outputs, Stats
from posttrain.core.rollouts import Comparison, PreferenceExample
from posttrain.core.transcripts import Transcript
from posttrain.training.sources.preferences import Comparisons
from posttrain.training.sources.reference_cache import Reference


def transcript(place: int, length: int) -> Transcript:
    """Of no matter which tokens: log-probabilities are given."""
    found = Transcript()
    found.observe([0, place])
    found.imitate([1] * length)
    return found


def laid(x: Tensor, lengths: list[int]) -> Tensor:
    """Numbers of tokens in the order in which the source lays the pairs: by the length of the longer reply."""
    parts = x.split([a + b for a, b in zip(lengths[::2], lengths[1::2], strict=True)])
    return torch.cat([parts[i] for i in sorted(range(len(parts)), key=lambda i: max(lengths[2 * i : 2 * i + 2]))])


def answer(row: PreferenceAlgorithm, case: Case) -> Answer:
    """Loss of a row and its gradient with respect to log-probabilities [N], by the source and the objective of a run."""
    lengths = case.length.tolist()
    items = [
        PreferenceExample([transcript(i, lengths[i]), transcript(i, lengths[i + 1])], [Comparison(0, 1)])
        for i in range(0, len(lengths), 2)
    ]
    pairs = [a + b for a, b in zip(lengths[::2], lengths[1::2], strict=True)]
    reference = Reference(range(len(items)), {"own": case.ref.numpy(), "own_ends": np.cumsum(pairs)})
    said = [Outputs(laid(case.logp, lengths), collision=laid(case.collision, lengths))]
    learner = cast(Any, SimpleNamespace(device=torch.device("cpu"), evaluate=lambda batches: said))
    source = Comparisons(cast(Any, None), row, learner, len(items), 10**6, 0, reference)
    coefficients = {"drift": case.drift, "shift": SHIFT}
    (batch,) = source.batches(range(len(items)), items, coefficients)
    logp = case.logp.clone().requires_grad_()
    outputs = replace(said[0], logp=laid(logp, lengths))
    loss = PreferenceObjective(row)(outputs, batch, Stats())
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, logp)[0]}


def ask(side: Side) -> None:
    def changed(name: str = "dpo", **settings: Any) -> PreferenceAlgorithm:
        return change(PREFERENCES[name], settings)

    asked = dict(PREFERENCES)
    asked |= {
        "dpo, forward KL": changed(divergence="forward-kl"),
        "dpo, Jensen-Shannon": changed(divergence="jensen-shannon"),
        "dpo, alpha 0.7": changed(divergence="alpha", **{"score.alpha": 0.7}),
        "dpo, tail": changed(tail=TAIL),
        "dpo, weighted by the policy": changed(policy_weight=True),
        "dpo, imitation per token": changed(imitation=1.0),
        "orpo, comparisons alone": changed("orpo", imitation=0),
        "cpo, comparisons alone": changed("cpo", imitation=0),
        "bco without shift": changed("bco", **{"link.shift": False}),
    }
    for name, row in asked.items():
        side.add(f"prefer: {name}", partial(answer, row))
