"""Answers the questions with OpenRLHF's functions and loss classes. Runs in verl's environment.

    python benchmarks/peers/openrlhf_side.py FOLDER

What trains in a cluster (ray, DeepSpeed) is imported by the files asked here and not used by them: empty stand-ins do.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from exchange import BUDGET, CACHE, CAP, GAMMA, LAMBDA, Answer, Case, Side, load_cases, record
from torch import Tensor

for name in ("deepspeed", "ray"):
    sys.modules[name] = MagicMock()
for name in ("openrlhf.models", "openrlhf.trainer", "openrlhf.trainer.ppo_utils", "openrlhf.utils"):
    # Packages without their __init__, which would import everything.
    package = ModuleType(name)
    found = importlib.util.find_spec("openrlhf")
    assert found is not None and found.submodule_search_locations
    package.__path__ = [str(Path(found.submodule_search_locations[0], *name.split(".")[1:]))]
    sys.modules[name] = package
sys.modules["openrlhf.trainer.ray"] = MagicMock()
sys.modules["openrlhf.trainer.ray.launcher"] = MagicMock()

from openrlhf.models.loss import PolicyLoss, ValueLoss, aggregate_loss  # noqa: E402
from openrlhf.models.utils import compute_approx_kl  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController  # noqa: E402
from openrlhf.trainer.ppo_utils.length_penalty import apply_overlong_penalty  # noqa: E402

OPENRLHF = Side()


# -- losses -----------------------------------------------------------------------------------------------------------


def policy_loss(settings: dict[str, Any], case: Case, **more: Tensor) -> Answer:
    """`PolicyLoss(**settings)`; `more` replaces what it is called with."""
    logp = case.slopes(case.logp)
    given = {"advantages": case.padded(case.advantage), "action_mask": case.mask, **more}
    sampler = case.padded(case.sampler)
    loss = PolicyLoss(**settings)(logp, case.padded(case.old), rollout_log_probs=sampler, **given)[0]
    return case.graded(loss, logp)


def loss_by_token(settings: dict[str, Any], case: Case) -> Answer:
    return policy_loss(settings, case, advantages=case.padded(case.token_advantage))


def loss_filtered(settings: dict[str, Any], case: Case) -> Answer:
    return policy_loss(settings, case, action_mask=case.mask * ~case.truncated[:, None])


def loss_with_kl(estimator: str, beta: float, token_level: bool, case: Case) -> Answer:
    """The PPO loss and a KL in the loss, put together as its actor does it."""
    plain = policy_loss({"token_level_loss": token_level}, case)
    logp = case.slopes(case.logp)
    penalty = compute_approx_kl(logp, case.padded(case.ref), kl_estimator=estimator)
    kl = case.graded(beta * aggregate_loss(penalty, case.mask, token_level), logp)
    return {key: plain[key] + kl[key] for key in plain}


def ask_losses() -> None:
    gspo = {"policy_loss_type": "gspo", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4}
    token = {"is_correction_level": "token"}
    asked: dict[str, dict[str, Any]] = {
        "reinforce++": {},
        "lite-ppo": {},
        "dapo": {"clip_eps_high": 0.28},
        "dual clip 3": {"dual_clip": 3.0},
        "gspo": gspo,
        "dr-grpo @ the loss of its estimator dr_grpo": {},
        "correction truncate": {**token, "is_correction_mode": "clip", "is_correction_threshold": [0.0, CAP]},
        "correction icepop": {**token, "is_correction_mode": "mask", "is_correction_threshold": [1 / CAP, CAP]},
        "correction sequence": {"is_correction_level": "seq", "is_correction_threshold": [1 / CAP, CAP]},
    }
    for name, settings in asked.items():
        shown = ", ".join(f"{key}={value}" for key, value in settings.items() if "threshold" not in key)
        OPENRLHF.add(f"loss: {name}", partial(policy_loss, settings), f"PolicyLoss({shown})")
    OPENRLHF.add("loss: ppo, an advantage per token", partial(loss_by_token, {}), "PolicyLoss()")
    calls = "PolicyLoss(policy_loss_type=gspo)"
    OPENRLHF.add("loss: gspo, an advantage per token", partial(loss_by_token, gspo), calls)
    calls = "PolicyLoss(token_level_loss=False) + 0.04 compute_approx_kl(k3)"
    OPENRLHF.add("loss: grpo", partial(loss_with_kl, "k3", 0.04, False), calls)
    calls = "PolicyLoss() + 0.01 compute_approx_kl(k2)"
    OPENRLHF.add("loss: reinforce++-baseline", partial(loss_with_kl, "k2", 0.01, True), calls)
    for name, token_level in (("token-mean", True), ("sequence-mean", False)):
        calls = f"PolicyLoss(token_level_loss={token_level}), rows masked"
        answer = partial(loss_filtered, {"token_level_loss": token_level})
        OPENRLHF.add(f"loss: overlong filter, {name}", answer, calls)


# -- aggregations, penalties ------------------------------------------------------------------------------------------


def aggregated(token_level: bool, case: Case) -> Answer:
    logp = case.slopes(case.logp)
    return case.graded(aggregate_loss(-logp * case.padded(case.advantage), case.mask, token_level), logp)


def divergence(estimator: str, case: Case) -> Answer:
    logp = case.logp.clone().requires_grad_()
    value = compute_approx_kl(logp, case.ref, kl_estimator=estimator)
    return {"value": value.detach(), "gradient": torch.autograd.grad(value.sum(), logp)[0]}


def ask_parts() -> None:
    OPENRLHF.add("aggregate: token-mean", partial(aggregated, True), "aggregate_loss(token_level_loss=True)")
    OPENRLHF.add("aggregate: sequence-mean", partial(aggregated, False), "aggregate_loss(token_level_loss=False)")
    for estimator in ("k1", "k2", "k3"):
        OPENRLHF.add(f"kl: {estimator}", partial(divergence, estimator), f"compute_approx_kl(kl_estimator={estimator})")

    @OPENRLHF.asks("kl: k3 of 12 nats", "compute_approx_kl(kl_estimator=k3)")
    def far(case: Case) -> Answer:
        return {"value": compute_approx_kl(case.old - 12, case.old, kl_estimator="k3")}

    @OPENRLHF.asks("kl: adaptive coefficient", "AdaptiveKLController")
    def adaptive(case: Case) -> Answer:
        controller, found = AdaptiveKLController(0.1, 0.02, 1000.0), []
        for each in 0.02 * case.entropy:
            controller.update(float(each), len(case.length))
            found.append(float(controller.value))
        return {"coefficient": torch.tensor(found, dtype=torch.float64)}

    @OPENRLHF.asks("critic: value loss", "ValueLoss(clip_eps=0.2)")
    def value_loss(case: Case) -> Answer:
        value, returns = case.slopes(case.new_value), case.padded(case.token_advantage)
        return case.graded(ValueLoss(0.2)(value, case.padded(case.value), returns, case.mask), value)


# -- advantages -------------------------------------------------------------------------------------------------------


def experience(estimator: str, beta: float, gamma: float, case: Case) -> Any:
    """`compute_advantages_and_returns` on the case as one batch; `beta` is that of the KL in the reward."""
    maker: Any = object.__new__(RemoteExperienceMaker)
    maker.strategy = SimpleNamespace(
        args=SimpleNamespace(
            algo=SimpleNamespace(
                advantage=SimpleNamespace(estimator=estimator, gamma=gamma, lambd=LAMBDA, no_std_norm=False)
            ),
            reward=SimpleNamespace(clip_range=None),
            rollout=SimpleNamespace(n_samples_per_prompt=case.group_size),
        )
    )
    maker.advantage_estimator = estimator
    maker.kl_ctl = SimpleNamespace(value=beta)
    batch = SimpleNamespace(
        rewards=case.reward,
        index=list(range(len(case.reward))),
        info={},
        kl=case.padded(case.old - case.ref),
        values=case.padded(case.value),
        action_mask=case.mask,
    )
    return maker.compute_advantages_and_returns([batch])[0]


def of_rollouts(estimator: str, beta: float, case: Case) -> Answer:
    """The advantage of the first token, which is that of all of them where the reward has no KL."""
    return {"advantage": experience(estimator, beta, 1.0, case).advantages[:, 0]}


def of_tokens(estimator: str, beta: float, gamma: float, case: Case) -> Answer:
    return {"advantage": case.flat(experience(estimator, beta, gamma, case).advantages)}


def ask_advantages() -> None:
    maker = "RemoteExperienceMaker.compute_advantages_and_returns"
    for name, (estimator, beta) in {
        "group / std(group)": ("group_norm", 0.0),
        "group / std(group), eps 1e-9": ("group_norm", 0.0),
        "group": ("dr_grpo", 0.0),
        "others": ("rloo", 0.0),
        "others, KL in the reward (rloo)": ("rloo", 0.05),
        "batch": ("flash_reinforce", 0.0),
    }.items():
        OPENRLHF.add(f"advantage: {name}", partial(of_rollouts, estimator, beta), f"{maker}({estimator})")
    for name, (estimator, beta, gamma) in {
        "advantage: whitened returns, KL in the reward (reinforce++)": ("reinforce", 0.05, 1.0),
        "advantage: whitened returns, discounted": ("reinforce", 0.05, GAMMA),
        "advantage: group, then whitened": ("reinforce_baseline", 0.0, 1.0),
        "advantage: group, then whitened, KL in the reward": ("reinforce_baseline", 0.05, 1.0),
        "critic: gae, whitened": ("gae", 0.05, GAMMA),
    }.items():
        OPENRLHF.add(name, partial(of_tokens, estimator, beta, gamma), f"{maker}({estimator}, gamma={gamma:g})")

    @OPENRLHF.asks("critic: gae", f"{maker}(gae); advantage = returns - values")
    def gae(case: Case) -> Answer:
        returns = case.flat(experience("gae", 0.05, GAMMA, case).returns)
        return {"advantage": returns - case.value, "returns": returns}

    @OPENRLHF.asks("critic: gae across tool text", "RemoteExperienceMaker.get_advantages_and_returns, tool text masked")
    def tool_text(case: Case) -> Answer:
        reward, value = case.spaced(case.token_reward, 0.0), case.spaced(case.value, 7.0)
        mask = case.spaced(torch.ones_like(case.logp), 0.0)
        found = RemoteExperienceMaker.get_advantages_and_returns(object(), value, reward, mask, GAMMA, LAMBDA)
        advantage, returns = (x[mask.bool()] for x in found)
        return {"advantage": advantage, "returns": returns}


# -- shaping ----------------------------------------------------------------------------------------------------------


def overlong(longer: int, case: Case) -> Answer:
    reward = torch.zeros_like(case.reward)
    apply_overlong_penalty([SimpleNamespace(response_length=case.length + longer, rewards=reward)], BUDGET, CACHE)
    return {"reward": reward}


def ask_shaping() -> None:
    OPENRLHF.add("shaping: overlong", partial(overlong, 4), "apply_overlong_penalty")
    OPENRLHF.add("shaping: overlong, beyond the limit", partial(overlong, BUDGET), "apply_overlong_penalty")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for ask in (ask_losses, ask_parts, ask_advantages, ask_shaping):
        ask()
    record("openrlhf", OPENRLHF, load_cases(folder), folder, ["openrlhf", "torch"])
