"""TRL's answers about comparisons: the real methods of its trainers, on the case's log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from exchange import TAIL, Answer, Case, Side
from torch import Tensor
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

ROWS = {"prompt": ["a"] * 4, "chosen": ["a"] * 4, "rejected": ["b"] * 4}
LABELLED = {"prompt": ["a"] * 4, "completion": ["a"] * 4, "label": [True, False] * 2}


@cache
def trainer(model: str, kind: str, **settings: Any) -> Any:
    config, maker, rows = {"dpo": (DPOConfig, DPOTrainer, ROWS), "kto": (KTOConfig, KTOTrainer, LABELLED)}[kind]
    given = {"beta": 0.1, **{key: list(v) if isinstance(v, tuple) else v for key, v in settings.items()}}
    args = config(output_dir=f"{model}/out", use_cpu=True, bf16=False, report_to=[], **given)
    made = maker(model=model, args=args, train_dataset=Dataset.from_dict(rows))
    made.model.eval()
    return made


def saying(logp: Tensor, collision: Tensor) -> Callable[..., SimpleNamespace]:
    """A model that says these log-probabilities [rows, W]."""
    none = torch.zeros_like(logp)
    said = SimpleNamespace(log_probs=logp, log_sum_sq_probs=collision, entropy=none, mean_logits=none, is_top1=none > 1)
    return lambda **_: said


def inputs_of(mask: Tensor) -> dict[str, Tensor]:
    """Of a prompt of one token and completions [rows, W]."""
    whole = torch.cat([torch.zeros(len(mask), 1), mask.float()], 1).long()
    return {"input_ids": torch.ones_like(whole), "attention_mask": torch.ones_like(whole), "completion_mask": whole}


def of_pairs(model: str, settings: dict[str, Any], double: bool, case: Case) -> Answer:
    """`DPOTrainer._compute_loss`, chosen replies first; in float32 where it knows no other type."""
    made = trainer(model, "dpo", **{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})
    order = [*range(0, len(case.length), 2), *range(1, len(case.length), 2)]
    wide = torch.float64 if double else torch.float32
    logp = case.slopes(case.logp)
    ref = saying(case.padded(case.ref)[order].to(wide), logp)
    with patch.object(made, "ref_model", ref):
        model_says = saying(logp[order].to(wide), case.padded(case.collision)[order].to(wide))
        loss = made._compute_loss(model_says, inputs_of(case.mask[order]), False)
    return case.graded(loss, logp)


def of_labels(model: str, case: Case) -> Answer:
    made = trainer(model, "kto")
    logp = case.slopes(case.logp)
    inputs = {**inputs_of(case.mask), "label": torch.arange(len(case.length)) % 2 == 0}
    ref = saying(case.padded(case.ref), logp)
    drifts = {id(ref): torch.zeros(len(case.length), dtype=torch.float64)}
    mismatched = case.padded(case.value).sum(1)  # log ratios of mismatched pairs
    with (
        patch.object(made, "ref_model", ref),
        patch.object(made, "_compute_kl_logps", lambda who, batch: drifts.get(id(who), mismatched)),
    ):
        loss = made._compute_loss(saying(logp, logp.detach()), inputs, False)
    return case.graded(loss, logp)


def without_reference(method: Any, mean: bool, sign: float, settings: dict[str, Any], case: Case) -> Answer:
    """A trainer's loss of log-probabilities [pairs], its mean."""
    fixed = {"alpha": 0.0, "label_smoothing": 0.0, "accelerator": SimpleNamespace(device="cpu")}
    made = SimpleNamespace(**{**fixed, **settings})
    logp = case.slopes(case.logp)
    said = logp.sum(1) / (case.length if mean else 1)
    return case.graded(sign * method(made, said[::2], said[1::2])[0].mean(), logp)


def ask(side: Side, model: str) -> None:
    settings: dict[str, dict[str, Any]] = {
        "dpo": {"loss_type": ["sigmoid"]},
        "dpo-norm": {"loss_type": ["sigmoid_norm"], "beta": 5.0},
        "ipo": {"loss_type": ["ipo"]},
        "hinge": {"loss_type": ["hinge"]},
        "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
        "exo": {"loss_type": ["exo_pair"], "label_smoothing": 1e-3},
        "nca": {"loss_type": ["nca_pair"]},
        "sppo": {"loss_type": ["sppo_hard"], "beta": 0.001},
        "apo-zero": {"loss_type": ["apo_zero"]},
        "apo-down": {"loss_type": ["apo_down"]},
        "aot": {"loss_type": ["aot"]},
        "aot-unpaired": {"loss_type": ["aot_unpaired"]},
        "bco": {"loss_type": ["bco_pair"]},
        "bco without shift": {"loss_type": ["bco_pair"]},
        "rpo": {"loss_type": ["sigmoid", "sft"]},
        "dpo, imitation per token": {"loss_type": ["sigmoid", "sft"]},
        "dpo, forward KL": {"f_divergence_type": "forward_kl"},
        "dpo, Jensen-Shannon": {"f_divergence_type": "js_divergence"},
        "dpo, alpha 0.7": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7},
        "dpo, tail": {"ld_alpha": TAIL},
        "dpo, weighted by the policy": {"use_weighting": True},
    }
    for name, chosen in settings.items():
        shown = ", ".join(f"{key}={value}" for key, value in chosen.items())
        answer = partial(of_pairs, model, chosen, "alpha" not in name)
        side.add(f"prefer: {name}", answer, f"DPOTrainer._compute_loss({shown})")
    side.add("prefer: kto", partial(of_labels, model), "KTOTrainer._compute_loss()")
    plain = {"loss_type": "sigmoid", "beta": 0.1}
    simpo = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0}
    alphapo = {
        "loss_type": "simpo",
        "beta": 2.5,
        "simpo_gamma": 0.1,
        "alpha": 0.25,
    }  # what its loss_type alphapo becomes
    answers = {
        "cpo, comparisons alone": (CPOTrainer.cpo_loss, False, 1.0, plain),
        "simpo": (CPOTrainer.cpo_loss, True, 1.0, simpo),
        "alphapo": (CPOTrainer.cpo_loss, True, 1.0, alphapo),
        "orpo, comparisons alone": (ORPOTrainer.odds_ratio_loss, True, -1.0, {"beta": 0.1}),
    }
    for name, asked in answers.items():
        called = f"{asked[0].__qualname__}, on {'means' if asked[1] else 'sums'} of log-probabilities"
        side.add(f"prefer: {name}", partial(without_reference, *asked), called)
