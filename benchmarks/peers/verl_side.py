"""Answers the questions with verl's functions. Runs in verl's environment.

python benchmarks/peers/verl_side.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from exchange import BUDGET, CACHE, CAP, GAMMA, LAMBDA, TEMPERATURE, Answer, Case, Side, load_cases, record
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits
from verl.workers.config import ActorConfig
from verl.workers.reward_manager.dapo import DAPORewardManager

VERL = Side()
NO_DUAL_CLIP = 1e9
TOKEN, SEQUENCE = "token-mean", "seq-mean-token-mean"


def actor(**settings: Any) -> ActorConfig:
    return ActorConfig(strategy="fsdp", rollout_n=4, use_dynamic_bsz=True, **{"clip_ratio_c": NO_DUAL_CLIP, **settings})


# -- losses -----------------------------------------------------------------------------------------------------------


def policy_loss(loss: str, mode: str, settings: dict[str, Any], case: Case, **more: Tensor) -> Answer:
    """One of verl's policy losses; `settings` go to its actor, `more` replaces what it is called with."""
    logp = case.slopes(case.logp)
    given = {"advantages": case.padded(case.advantage), "response_mask": case.mask, **more}
    function = core_algos.get_policy_loss_fn(loss)
    value, _ = function(case.padded(case.old), logp, loss_agg_mode=mode, config=actor(**settings), **given)
    return case.graded(value, logp)


def loss_by_token(loss: str, mode: str, settings: dict[str, Any], case: Case) -> Answer:
    return policy_loss(loss, mode, settings, case, advantages=case.padded(case.token_advantage))


def loss_filtered(mode: str, case: Case) -> Answer:
    return policy_loss("vanilla", mode, {}, case, response_mask=case.mask * ~case.truncated[:, None])


def loss_with_kl(mode: str, estimator: str, beta: float, case: Case) -> Answer:
    """The PPO loss and a KL in the loss, put together as verl's actor does it."""
    plain = policy_loss("vanilla", mode, {}, case)
    logp = case.slopes(case.logp)
    penalty = core_algos.kl_penalty(logp, case.padded(case.ref), estimator)
    kl = case.graded(beta * core_algos.agg_loss(penalty, case.mask, mode), logp)
    return {key: plain[key] + kl[key] for key in plain}


def loss_with_entropy(mode: str, case: Case) -> Answer:
    plain = policy_loss("vanilla", mode, {}, case)
    entropy = case.slopes(case.entropy)
    bonus = case.graded(-0.01 * core_algos.agg_loss(entropy, case.mask, mode), entropy, "gradient by entropy")
    return {**bonus, "loss": plain["loss"] + bonus["loss"], "gradient": plain["gradient"]}


def gradient_on_policy(case: Case) -> Answer:
    answer = policy_loss("vanilla", "seq-mean-token-sum", {}, case)
    return {"gradient": answer["gradient"]} if case.on_policy else {}


def ask_losses() -> None:
    gspo = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    sequence_sum, constant = "seq-mean-token-sum", "seq-mean-token-sum-norm"
    asked: dict[str, tuple[str, str, dict[str, Any]]] = {
        "reinforce++": ("vanilla", TOKEN, {}),
        "lite-ppo": ("vanilla", TOKEN, {}),
        "lite-ppo @ clip_ratio_c left out": ("vanilla", TOKEN, {"clip_ratio_c": 3.0}),
        "lite-ppo, clip 0.1": ("vanilla", TOKEN, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}),
        "lite-ppo, clip 0.1 @ clip_ratio alone": ("vanilla", TOKEN, {"clip_ratio": 0.1}),
        "dapo": ("vanilla", TOKEN, {"clip_ratio_high": 0.28}),
        "dual clip 3": ("vanilla", TOKEN, {"clip_ratio_c": 3.0}),
        "gspo": ("gspo", SEQUENCE, gspo),
        "gmpo": ("geo_mean", TOKEN, {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
        "gpg": ("gpg", TOKEN, {}),
        "reinforce": ("gpg", sequence_sum, {}),
        "cispo": ("cispo", TOKEN, {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
        "cispo @ clip_ratio_low left out": ("cispo", TOKEN, {"clip_ratio_high": 4.0}),
        "dr-grpo": ("vanilla", constant, {"global_batch_info": {"loss_scale_factor": BUDGET}}),
        "dr-grpo @ loss_scale_factor left out": ("vanilla", constant, {}),
        "rloo @ the default loss": ("vanilla", sequence_sum, {}),
    }
    for name, (loss, mode, settings) in asked.items():
        shown = "".join(f", {key}={value}" for key, value in settings.items())
        VERL.add(f"loss: {name}", partial(policy_loss, loss, mode, settings), f"policy loss {loss}({mode}{shown})")
    VERL.add("loss: rloo @ the default loss on policy", gradient_on_policy, f"policy loss vanilla({sequence_sum})")
    for name, (loss, mode, settings) in {"ppo": ("vanilla", TOKEN, {}), "gspo-token": ("gspo", SEQUENCE, gspo)}.items():
        by_token = partial(loss_by_token, loss, mode, settings)
        VERL.add(f"loss: {name}, an advantage per token", by_token, f"policy loss {loss}({mode})")
    for name, (mode, estimator, beta) in {
        "grpo": (SEQUENCE, "low_var_kl", 0.04),
        "reinforce++-baseline": (TOKEN, "k2", 0.01),
    }.items():
        calls = f"policy loss vanilla + {beta:g} kl_penalty({estimator}), {mode}"
        VERL.add(f"loss: {name}", partial(loss_with_kl, mode, estimator, beta), calls)
    for name, mode in (("token-mean", TOKEN), ("sequence-mean", SEQUENCE)):
        calls = f"policy loss vanilla - 0.01 agg_loss(entropy), {mode}"
        VERL.add(f"loss: entropy bonus, {name}", partial(loss_with_entropy, mode), calls)
        calls = f"policy loss vanilla({mode}), rows masked"
        VERL.add(f"loss: overlong filter, {name}", partial(loss_filtered, mode), calls)


# -- corrections ------------------------------------------------------------------------------------------------------


def loss_weighted(threshold: str | float, case: Case) -> Answer:
    gap = case.padded(case.old - case.sampler)
    weight, _ = compute_rollout_correction_weights(gap, case.mask, "token", threshold)
    return policy_loss("vanilla", TOKEN, {}, case, rollout_is_weights=weight)


def loss_rejected(replacing: str, case: Case) -> Answer:
    """`replacing`: what the mask of the kept tokens stands for, the weights or the mask of the whole loss."""
    gap = case.padded(case.old - case.sampler)
    kept, _ = compute_rollout_rejection_mask(gap, case.mask, "seq_mean_k1", f"{1 / CAP!r}_{CAP!r}")
    return policy_loss("vanilla", TOKEN, {}, case, **{replacing: kept})


def ask_corrections() -> None:
    weights, mask = "compute_rollout_correction_weights", "compute_rollout_rejection_mask"
    VERL.add("loss: correction truncate", partial(loss_weighted, CAP), f"{weights}(token, {CAP})")
    icepop = partial(loss_weighted, f"{1 / CAP!r}_{CAP!r}")
    VERL.add("loss: correction icepop", icepop, f"{weights}(token, 1 / {CAP} to {CAP})")
    kept = f"{mask}(seq_mean_k1)"
    VERL.add("loss: correction sequence", partial(loss_rejected, "rollout_is_weights"), f"{kept}, as weights")
    VERL.add("loss: correction sequence @ with the mask it returns", partial(loss_rejected, "response_mask"), kept)


# -- aggregations, penalties ------------------------------------------------------------------------------------------


def aggregated(mode: str, parts: int, case: Case) -> Answer:
    """In `parts` micro-batches, which are told what the whole batch counts."""
    logp = case.slopes(case.logp)
    loss, mask = -logp * case.padded(case.advantage), case.mask
    whole = {"batch_num_tokens": mask.sum(), "global_batch_size": len(mask), "loss_scale_factor": BUDGET}
    pieces = zip(loss.chunk(parts), mask.chunk(parts), strict=True)
    return case.graded(torch.stack([core_algos.agg_loss(*piece, mode, **whole) for piece in pieces]).sum(), logp)


def divergence(estimator: str, case: Case) -> Answer:
    logp = case.logp.clone().requires_grad_()
    value = core_algos.kl_penalty(logp, case.ref, estimator)
    return {"value": value.detach(), "gradient": torch.autograd.grad(value.sum(), logp)[0]}


def ask_aggregates() -> None:
    modes = {
        "sequence-mean": SEQUENCE,
        "token-mean": TOKEN,
        "sequence-sum": "seq-mean-token-sum",
        "constant": "seq-mean-token-sum-norm",
    }
    for name, mode in modes.items():
        VERL.add(f"aggregate: {name}", partial(aggregated, mode, 1), f"agg_loss({mode})")
        VERL.add(f"aggregate: {name} @ four micro-batches", partial(aggregated, mode, 4), f"agg_loss({mode}), 4 times")


def ask_penalties() -> None:
    for estimator in ("k1", "k2", "k3"):
        VERL.add(f"kl: {estimator}", partial(divergence, estimator), f"kl_penalty({estimator})")

    @VERL.asks("kl: k2 @ its gradient under the value of k3", "kl_penalty(k3+)")
    def straight_through(case: Case) -> Answer:
        return {"gradient": divergence("k3+", case)["gradient"]}

    @VERL.asks("kl: k3 of 12 nats", "kl_penalty(k3)")
    def far(case: Case) -> Answer:
        return {"value": core_algos.kl_penalty(case.old - 12, case.old, "k3")}

    @VERL.asks("kl: adaptive coefficient", "AdaptiveKLController")
    def adaptive(case: Case) -> Answer:
        controller, found = core_algos.AdaptiveKLController(0.1, 0.02, 1000.0), []
        for each in 0.02 * case.entropy:
            controller.update(float(each), len(case.length))
            found.append(float(controller.value))
        return {"coefficient": torch.tensor(found, dtype=torch.float64)}


# -- advantages -------------------------------------------------------------------------------------------------------


def of_rollouts(function: Callable[..., tuple[Tensor, Tensor]], penalised: bool, settings: Any, case: Case) -> Answer:
    """A function that gives all tokens of a rollout the same -> [S]."""
    reward = case.padded(case.token_reward if penalised else case.last_reward)
    found, _ = function(reward, case.mask, index=case.group.numpy(), **settings)
    assert bool((found == found[:, :1] * case.mask).all())
    return {"advantage": found[:, 0]}


def of_tokens(function: Callable[..., tuple[Tensor, Tensor]], penalised: bool, settings: Any, case: Case) -> Answer:
    reward = case.padded(case.token_reward if penalised else case.last_reward)
    return {"advantage": case.flat(function(reward, case.mask, **settings(case))[0])}


def ask_advantages() -> None:
    grpo, rloo = core_algos.compute_grpo_outcome_advantage, core_algos.compute_rloo_outcome_advantage
    asked: dict[str, tuple[Callable[..., Any], bool, dict[str, Any]]] = {
        "group / std(group)": (grpo, False, {}),
        "group / std(group) @ vectorized": (core_algos.compute_grpo_vectorized_outcome_advantage, False, {}),
        "group": (grpo, False, {"norm_adv_by_std_in_grpo": False}),
        "others": (rloo, False, {}),
        "others @ vectorized": (core_algos.compute_rloo_vectorized_outcome_advantage, False, {}),
        "others, KL in the reward (rloo)": (rloo, True, {}),
        "group, signal (gpg)": (core_algos.compute_gpg_outcome_advantage, False, {}),
        "group, weighted by length (opo)": (core_algos.compute_opo_outcome_advantage, False, {}),
    }
    for name, (function, penalised, settings) in asked.items():
        shown = ", ".join(f"{key}={value}" for key, value in settings.items())
        answer = partial(of_rollouts, function, penalised, settings)
        VERL.add(f"advantage: {name}", answer, f"{function.__name__}({shown})")
    for name, gamma in (("KL in the reward (reinforce++)", 1.0), ("discounted", GAMMA)):
        function = core_algos.compute_reinforce_plus_plus_outcome_advantage
        config = {"config": SimpleNamespace(gamma=gamma)}
        answer = partial(of_tokens, function, True, lambda _, config=config: config)
        VERL.add(f"advantage: whitened returns, {name}", answer, f"{function.__name__}(gamma={gamma:g})")
    for name, penalised in (("", False), (", KL in the reward", True)):
        function = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage
        answer = partial(of_tokens, function, penalised, lambda case: {"index": case.group.numpy()})
        VERL.add(f"advantage: group, then whitened{name}", answer, function.__name__)

    @VERL.asks("advantage: seven rewards of 0.7 in float32", f"{grpo.__name__}(epsilon=1e-9)")
    def constant(case: Case) -> Answer:
        reward, mask, index = torch.full((7, 1), 0.7), torch.ones(7, 1), np.zeros(7)
        return {"advantage": grpo(reward, mask, index, epsilon=1e-9)[0][:, 0]}


def ask_critic() -> None:
    gae = core_algos.compute_gae_advantage_return

    @VERL.asks("critic: gae", "compute_gae_advantage_return; advantage = returns - values")
    def plain(case: Case) -> Answer:
        found = gae(case.padded(case.token_reward), case.padded(case.value), case.mask, GAMMA, LAMBDA)
        returns = case.flat(found[1])
        return {"advantage": returns - case.value, "returns": returns}

    @VERL.asks("critic: gae, whitened", "compute_gae_advantage_return")
    def whitened(case: Case) -> Answer:
        found = gae(case.padded(case.token_reward), case.padded(case.value), case.mask, GAMMA, LAMBDA)
        return {"advantage": case.flat(found[0])}

    @VERL.asks("critic: gae across tool text", "compute_gae_advantage_return, tool text masked")
    def tool_text(case: Case) -> Answer:
        mask = case.spaced(torch.ones_like(case.logp), 0.0)
        found = gae(case.spaced(case.token_reward, 0.0), case.spaced(case.value, 7.0), mask, GAMMA, LAMBDA)
        returns = found[1][mask.bool()]
        return {"advantage": returns - case.value, "returns": returns}

    @VERL.asks("critic: value loss", "compute_value_loss(cliprange_value=0.2)")
    def value_loss(case: Case) -> Answer:
        value, returns = case.slopes(case.new_value), case.padded(case.token_advantage)
        loss, _ = core_algos.compute_value_loss(value, returns, case.padded(case.value), case.mask, 0.2)
        return case.graded(loss, value)


# -- shaping, the model -----------------------------------------------------------------------------------------------


def overlong(longer: int, case: Case) -> Answer:
    """What DAPO's reward manager adds for length: its verdict of every reply is 0."""
    words = SimpleNamespace(decode=lambda *_, **__: "", eos_token="<eos>")
    buffer = SimpleNamespace(enable=True, len=CACHE, penalty_factor=1.0, log=False)
    manager = DAPORewardManager(words, 0, lambda **_: 0.0, max_resp_len=BUDGET, overlong_buffer_cfg=buffer)
    length = case.length + longer
    mask = (torch.arange(int(length.max())) < length[:, None]).long()
    ones = torch.ones(len(length), 1, dtype=torch.long)
    data = DataProto.from_dict(
        tensors={"prompts": ones, "responses": mask, "attention_mask": torch.cat([ones, mask], 1)},
        non_tensors={
            "data_source": np.array([""] * len(length), dtype=object),
            "reward_model": np.array([{"ground_truth": ""}] * len(length), dtype=object),
        },
    )
    return {"reward": manager(data).sum(1)}


def ask_the_rest() -> None:
    VERL.add("shaping: overlong", partial(overlong, 4), "DAPORewardManager")
    VERL.add("shaping: overlong, beyond the limit", partial(overlong, BUDGET), "DAPORewardManager")

    @VERL.asks("model: log-probability of a token", "verl.utils.torch_functional.logprobs_from_logits")
    def log_probability(case: Case) -> Answer:
        logits = case.logits.clone().requires_grad_()
        found = logprobs_from_logits(logits / TEMPERATURE, case.target)
        return {"value": found.detach(), "gradient by logits": torch.autograd.grad(found.sum(), logits)[0]}

    @VERL.asks("model: entropy at a token", "verl.utils.torch_functional.entropy_from_logits")
    def entropy(case: Case) -> Answer:
        logits = case.logits.clone().requires_grad_()
        found = entropy_from_logits(logits / TEMPERATURE)
        return {"value": found.detach(), "gradient by logits": torch.autograd.grad(found.sum(), logits)[0]}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for ask in (ask_losses, ask_corrections, ask_aggregates, ask_penalties, ask_advantages, ask_critic, ask_the_rest):
        ask()
    record("verl", VERL, load_cases(folder), folder, ["verl", "transformers", "torch"])
