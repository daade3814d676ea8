"""Recipes from verl's Hydra overrides. Defaults are those of verl 0.9.1; of fsdp_sft_trainer, no longer in it, of 0.6.

A step samples rollout.n replies to each of data.train_batch_size prompts; ppo_mini_batch_size counts prompts too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from posttrain.apps.migration import verl_reward
from posttrain.apps.migration.foreign_run import shown
from posttrain.apps.migration.recipe_draft import ESTIMATORS, NEVER, RecipeDraft
from posttrain.apps.migration.shared_rules import (
    adapters,
    chat_variables,
    clips,
    devices_of,
    engine,
    frequency,
    kept_checkpoints,
    optimizer,
    same_estimator,
    steps_of,
    trackers,
)
from posttrain.apps.migration.verl_machines import CORRECTION, bypasses, correction, divisions, offload
from posttrain.apps.migration.verl_sft_recipe import DECAYED, both_ends, limited, stored, verl_sft
from posttrain.core.types import UserError

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
OPTIMIZER = f"{ACTOR}.optim"

SFT_DEFAULTS: Mapping[str, Any] = {
    "model.enable_gradient_checkpointing": True,
    "model.lora_rank": 0,
    "model.lora_alpha": 16,
    "model.target_modules": "all-linear",
    "trainer.total_epochs": 4,
    "trainer.seed": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.max_ckpt_to_keep": NEVER,  # all of them
}
"""Defaults of both SFT trainers."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "main_ppo": {
        "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "data.truncation": "error",
        "data.filter_overlong_prompts": False,
        f"{MODEL}.enable_gradient_checkpointing": True,
        f"{MODEL}.lora_rank": 0,
        f"{MODEL}.lora_alpha": 16,
        f"{MODEL}.target_modules": "all-linear",
        f"{MODEL}.lora.alpha": 32,
        f"{ROLLOUT}.n": 1,
        f"{ROLLOUT}.temperature": 1.0,
        f"{ROLLOUT}.name": "vllm",
        f"{ACTOR}.ppo_mini_batch_size": 256,
        f"{ACTOR}.ppo_epochs": 1,
        f"{ACTOR}.clip_ratio": 0.2,
        f"{ACTOR}.clip_ratio_low": 0.2,
        f"{ACTOR}.clip_ratio_high": 0.2,
        f"{ACTOR}.clip_ratio_c": 3.0,
        f"{ACTOR}.loss_agg_mode": "token-mean",
        f"{ACTOR}.entropy_coeff": 0,
        f"{ACTOR}.use_kl_loss": False,
        f"{ACTOR}.kl_loss_coef": 0.001,
        f"{ACTOR}.kl_loss_type": "low_var_kl",
        f"{ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
        f"{ACTOR}.fsdp_config.dtype": "bfloat16",
        f"{ACTOR}.megatron.dtype": "bfloat16",
        f"{OPTIMIZER}.lr": 1e-6,
        f"{OPTIMIZER}.weight_decay": 0.01,
        f"{OPTIMIZER}.clip_grad": 1.0,
        f"{OPTIMIZER}.lr_warmup_steps": -1,
        f"{OPTIMIZER}.lr_warmup_steps_ratio": 0.0,
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.use_kl_in_reward": False,
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_ctrl.type": "fixed",
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "algorithm.kl_ctrl.horizon": 10000,
        "algorithm.kl_ctrl.target_kl": 0.1,
        f"{CORRECTION}.rollout_is_threshold": 2.0,
        f"{CORRECTION}.loss_type": "ppo_clip",
        "critic.optim.lr": 1e-5,
        "critic.cliprange_value": 0.5,
        "critic.model.path": "~/models/deepseek-llm-7b-chat",
        "trainer.total_epochs": 30,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.max_actor_ckpt_to_keep": NEVER,  # all of them
        "trainer.n_gpus_per_node": 8,
        "trainer.nnodes": 1,
        "trainer.critic_warmup": 0,
    },
    "sft_trainer": {
        "data.train_files": "~/data/gsm8k/train.parquet",
        "data.train_batch_size": 256,
        "data.messages_key": "messages",
        "data.max_length": 1024,
        "data.truncation": "error",
        "model.path": "~/models/deepseek-llm-7b-chat",
        "optim.lr": 1e-3,
        "optim.betas": [0.9, 0.999],
        "optim.weight_decay": 0.01,
        "optim.lr_warmup_steps": -1,
        "optim.lr_warmup_steps_ratio": 0.0,
        "optim.clip_grad": 1.0,
        "optim.lr_scheduler_type": "constant",
        "engine.dtype": "bfloat16",
        **SFT_DEFAULTS,
    },
    "fsdp_sft_trainer": {
        "data.train_files": "~/data/gsm8k/train.parquet",
        "data.train_batch_size": 256,
        "data.prompt_key": "question",
        "data.response_key": "answer",
        "data.max_length": 1024,
        "data.truncation": "error",
        "optim.lr": 1e-5,
        "optim.betas": [0.9, 0.95],
        "optim.weight_decay": 0.01,
        "optim.lr_warmup_steps_ratio": 0.1,
        "optim.clip_grad": 1.0,
        "optim.lr_scheduler": "cosine",
        **SFT_DEFAULTS,
    },
}
AGGREGATES = {
    "token-mean": (
        "token-mean",
        "1 / sum n_j over the update, as in verl 0.9; older ones average within micro-batches",
    ),
    "seq-mean-token-sum": ("sequence-sum", "1 / B"),
    "seq-mean-token-mean": ("sequence-mean", "1 / (B n_i)"),
    "seq-mean-token-sum-norm": (
        "constant",
        "1 / (B length); without loss_scale_factor verl's length is the width of a padded micro-batch, here max_tokens",
    ),
}
PADDING = "the padding token's input embedding is trained here, not there; in some tokenizers it is the end token's"
ALGORITHMS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "grpo",
    "rloo_vectorized": "grpo",
    "opo": "grpo",
    "remax": "grpo",
    "gae": "ppo",
    "gpg": "gpg",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
}
"""Advantage estimator -> the algorithm whose advantages are the same, or become so by the lines below it."""

LOSSES = {
    "gspo": "gspo",
    "sapo": "sapo",
    "geo_mean": "gmpo",
    "clip_cov": "clip-cov",
    "kl_cov": "kl-cov",
    "cispo": "cispo",
    "gpg": "gpg",
}
"""policy_loss.loss_mode -> the algorithm with that loss on advantages within a group."""


_LAYERS = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}
"""Layers of Megatron -> those here."""


def verl_recipe(draft: RecipeDraft, devices: int | None, rows: int | None) -> None:
    """Write the lines of a run of verl."""
    verl_reward.rename(draft)
    if draft.read("trainer.val_only"):
        raise UserError("verl's trainer.val_only evaluates and trains nothing: here it is posttrain eval")
    devices_of(draft, devices, need=False)
    for name in ("trainer.n_gpus_per_node", "trainer.nnodes"):
        draft.read(name)
    draft.tasks("data.train_files")
    chat_variables(draft, "data.apply_chat_template_kwargs")
    if draft.run.trainer != "main_ppo":
        return verl_sft(draft, rows)
    draft.same("eval_tasks", "data.val_files")
    draft.same("fields.prompt", "data.prompt_key")
    if draft.lines.get("fields.prompt", ("",))[0] == "prompt":
        del draft.lines["fields.prompt"]
    adapted = draft.read(f"{MODEL}.lora_rank") or draft.read(f"{MODEL}.lora.rank")
    draft.same("model", f"{MODEL}.path", "same meaning" if adapted else f"same meaning; {PADDING}")
    verl_reward.reward(draft)
    rows = limited(draft, rows)
    prompts, minibatches = _batch(draft)
    updates = minibatches * draft.count(f"{ACTOR}.ppo_epochs")
    _policy(draft, updates)
    correction(draft)
    _kl(draft)
    _optimizer(draft, prompts, updates, rows)
    turns = draft.read(f"{ROLLOUT}.multi_turn.enable")
    draft.same(
        "max_tokens",
        "data.max_response_length",
        "of all turns together there, of each reply here" if turns else "same meaning",
    )
    draft.same("temperature", f"{ROLLOUT}.temperature")
    for name, neutral in (("top_p", (1, 1.0)), ("top_k", (-1, 0))):
        if (value := draft.read(f"{ROLLOUT}.{name}")) is not None and value not in neutral:
            draft.differs(
                draft.origin(f"{ROLLOUT}.{name}"), "training samples from the model's own distribution: left out"
            )
    _long_rows(draft)
    if (server := draft.read(f"{ROLLOUT}.name")) in ("vllm", "sglang", "trtllm"):
        engine(
            draft,
            draft.origin(f"{ROLLOUT}.name"),
            f"{ROLLOUT}.gpu_memory_utilization",
            f"{ROLLOUT}.tensor_model_parallel_size",
            "sglang" if server == "sglang" else "vllm",
        )
    _adapters(draft)
    frequency(draft, "save_every", "trainer.save_freq", 1)
    frequency(draft, "eval_every", "trainer.test_freq", 1)
    kept_checkpoints(draft, "trainer.max_actor_ckpt_to_keep")
    _housekeeping(draft)
    if draft.given("trainer.default_local_dir"):
        draft.same("out", "trainer.default_local_dir")
    elif isinstance(experiment := draft.read("trainer.experiment_name"), str):
        draft.put("out", f"runs/{experiment}", f"{draft.origin('trainer.experiment_name')}: a folder here")


def _batch(draft: RecipeDraft) -> tuple[int, int]:
    """Write and return the prompts of a step and its updates a pass."""
    prompts, mini = draft.count("data.train_batch_size"), draft.count(f"{ACTOR}.ppo_mini_batch_size")
    group, passes = draft.count(f"{ROLLOUT}.n"), draft.count(f"{ACTOR}.ppo_epochs")
    minibatches = math.ceil(prompts / mini)
    draft.head.append(
        f"A step: {prompts} prompts x {group} replies = {prompts * group} rollouts, {minibatches * passes} "
        f"update{'s'[: minibatches * passes != 1]} of {min(mini, prompts) * group} rollouts."
    )
    draft.put("prompts", int(prompts), f"{draft.origin('data.train_batch_size')}: prompts of a step")
    draft.put("group", int(group), f"{draft.origin(f'{ROLLOUT}.n')}: same meaning")
    mini_told = draft.origin(f"{ACTOR}.ppo_mini_batch_size")
    if mini > prompts or prompts % mini:
        what = (
            f"verl 0.9 refuses it for {prompts} prompts a step; here all updates have nearly the same number of groups"
        )
        draft.differs(mini_told, what)
    whole = "; of whole groups here, there of rollouts in the order of their end, balanced over GPUs"
    told = f"{mini_told} prompts of {prompts}: updates a pass{whole * (minibatches > 1)}"
    draft.put("minibatches", minibatches, told)
    draft.put("epochs", int(passes), f"{draft.origin(f'{ACTOR}.ppo_epochs')}: same meaning")
    return int(prompts), minibatches


def _policy(draft: RecipeDraft, updates: int) -> None:
    """Write advantages, ratio, clip and denominator."""
    estimator, mode = draft.word("algorithm.adv_estimator"), draft.word(f"{ACTOR}.policy_loss.loss_mode")
    if estimator not in ALGORITHMS:
        raise UserError(
            f"verl's adv_estimator {shown(estimator)!r:.60} has no counterpart; supported: {', '.join(ALGORITHMS)}"
        )
    if mode not in ("vanilla", *LOSSES):
        raise UserError(
            f"verl's loss_mode {shown(mode)!r:.60} has no counterpart; supported: vanilla, {', '.join(LOSSES)}"
        )
    if mode != "vanilla" and bypasses(draft):
        draft.note(draft.origin(f"{ACTOR}.policy_loss.loss_mode"), "no effect: bypass_mode has a loss of its own")
        mode = "vanilla"
    grouped = ALGORITHMS[estimator] == "grpo"
    if estimator in ("gpg", "reinforce_plus_plus_baseline") and draft.count(f"{ROLLOUT}.n") == 1:
        raise UserError(
            f"verl's adv_estimator {estimator} with rollout.n = 1 has no counterpart: it compares the replies of a group"
        )
    if mode != "vanilla" and not grouped and (mode, estimator) != ("gpg", "gpg"):
        raise UserError(
            f"verl's loss_mode {mode} with adv_estimator {estimator} has no counterpart: use grpo or rloo with it"
        )
    name = LOSSES.get(mode, ALGORITHMS[estimator])
    told = (
        draft.origin(f"{ACTOR}.policy_loss.loss_mode") if mode != "vanilla" else draft.origin("algorithm.adv_estimator")
    )
    draft.put("algorithm", name, f"{told}; what differs is in the lines below")
    _advantage(draft, estimator)
    aggregate, formula = AGGREGATES.get(draft.word(f"{ACTOR}.loss_agg_mode"), ("", ""))
    if not aggregate:
        raise UserError(
            f"verl's {draft.origin(f'{ACTOR}.loss_agg_mode')} has no counterpart; supported: {', '.join(AGGREGATES)}"
        )
    if mode != "geo_mean":
        draft.put("aggregate", aggregate, f"{draft.origin(f'{ACTOR}.loss_agg_mode')}: {formula}")
    elif draft.given(f"{ACTOR}.loss_agg_mode"):
        draft.note(draft.origin(f"{ACTOR}.loss_agg_mode"), "no effect: the loss of geo_mean is a mean over replies")
    if (length := draft.number(f"{ACTOR}.loss_scale_factor")) and aggregate == "constant":
        draft.set("aggregate.length", int(length), f"{draft.origin(f'{ACTOR}.loss_scale_factor')}: same meaning")
    _clip(draft, mode, updates)
    if entropy := draft.number(f"{ACTOR}.entropy_coeff"):
        draft.put("entropy", float(entropy), f"{draft.origin(f'{ACTOR}.entropy_coeff')}: same meaning")


def _clip(draft: RecipeDraft, mode: str, updates: int) -> None:
    either = draft.number(f"{ACTOR}.clip_ratio")
    low, high = (
        draft.number(name) if draft.read(name) is not None else either  # null there: clip_ratio is for both
        for name in (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")
    )
    dual, names = draft.number(f"{ACTOR}.clip_ratio_c"), "clip_ratio_low, clip_ratio_high, clip_ratio_c"
    if draft.given(f"{ACTOR}.clip_ratio") and not draft.given(f"{ACTOR}.clip_ratio_low"):
        draft.note(
            draft.origin(f"{ACTOR}.clip_ratio"), "verl reads clip_ratio_low and clip_ratio_high, whose defaults are 0.2"
        )
    if bypasses(draft):
        updates = max(updates, 2)  # the ratio is not 1, whatever the number of updates
    if mode == "vanilla":
        if draft.lines["algorithm"][0] != "gpg":
            clips(draft, updates, low, high, dual, names)
    elif mode == "gspo":
        clips(draft, updates, low, high, None, names)
    elif mode == "cispo" and updates > 1:
        draft.put("clip_high", high, f"{names}: the weight is at most 1 + clip_high")
        if low < 1:
            told = f"a weight is at least {1 - low:g} there too, and has no lower bound here"
            draft.differs(draft.origin(f"{ACTOR}.clip_ratio_low"), told)
    elif mode in ("clip_cov", "kl_cov"):
        draft.same(mode, f"{ACTOR}.policy_loss.{mode}_ratio", "same meaning; of the step here, of a micro-batch there")
        if mode == "kl_cov":
            weight = float(draft.number(f"{ACTOR}.policy_loss.ppo_kl_coef"))
            told = f"{draft.origin(f'{ACTOR}.policy_loss.ppo_kl_coef')}: same meaning"
            draft.set("covariance.coefficient", weight, told)
        if mode == "clip_cov":
            _keeps_clip(draft, updates, f"clip_ratio_low, clip_ratio_high ({low:g}, {high:g})")
    elif mode == "geo_mean":
        draft.differs(
            f"{names} ({low:g}, {high:g})",
            "gmpo clips the log ratio of each token by 0.4: see posttrain algorithms gmpo",
        )
    elsewhere = [f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg"] if mode != "sapo" else []
    for name in (*elsewhere, *(name for name in draft.run.options if name.startswith(f"{ACTOR}.policy_loss."))):
        if draft.given(name) and name not in draft.treated and f".{mode}_" not in name:
            draft.note(draft.origin(name), f"no effect: it is not of loss_mode {mode}")
            draft.treated.add(name)
    for place, name in (("positive", "tau_pos"), ("negative", "tau_neg")):
        if mode == "sapo" and draft.given(f"{ACTOR}.{name}"):
            draft.set(f"surrogate.{place}", float(draft.number(f"{ACTOR}.{name}")), f"{name}: same meaning")


def _keeps_clip(draft: RecipeDraft, updates: int, names: str) -> None:
    """Note that verl's Clip-Cov keeps the clip of PPO, which that of the paper has not."""
    if updates == 1:
        return draft.note(names, "no effect: with one update a step every ratio is 1, and nothing is clipped")
    draft.differs(
        names,
        "verl's Clip-Cov keeps PPO's clip, and tokens that it clips are no candidates; clip-cov here is the paper's r A: "
        "--surrogate clip with --clip-low and --clip-high clips it, without an effect on the candidates",
    )


def _advantage(draft: RecipeDraft, estimator: str) -> None:
    by_std = draft.read("algorithm.norm_adv_by_std_in_grpo")
    alone = draft.count(f"{ROLLOUT}.n") == 1 and estimator != "remax" and ALGORITHMS[estimator] == "grpo"
    if alone:
        told = f"{draft.origin(f'{ROLLOUT}.n')}: the advantage of a reply without others is its reward there"
        draft.put("baseline", "none", told)
        draft.put("scale", "none", told)
    elif estimator in ("grpo", "grpo_vectorized"):
        told = draft.origin("algorithm.norm_adv_by_std_in_grpo")
        draft.put(
            "scale", "group" if by_std else "none", f"{told}: {'' if by_std else 'do not '}divide by the group's std"
        )
    elif estimator.startswith("rloo"):
        draft.put("baseline", "others", "adv_estimator rloo: the mean of the group's others")
        draft.put("scale", "none", "adv_estimator rloo: no standard deviation")
    elif estimator == "opo":
        draft.put("baseline_weight", "length", "adv_estimator opo: the mean weighs replies by their length")
        draft.put("scale", "none", "adv_estimator opo: no standard deviation")
    elif estimator == "remax":
        draft.put("baseline", "greedy", "adv_estimator remax: the reward of a greedy reply")
        draft.put("scale", "none", "adv_estimator remax: no standard deviation")
    elif estimator == "gpg":
        draft.differs(
            draft.origin("algorithm.adv_estimator"),
            "advantages are multiplied by rollouts / those with a reward other than 0 there; here by rollouts / those in "
            "groups with unequal rewards",
        )
    elif estimator == "reinforce_plus_plus_baseline":
        draft.put("gamma", 1.0, "reinforce_plus_plus_baseline: verl discounts nothing")
    else:
        draft.put("gamma", float(draft.number("algorithm.gamma")), f"{draft.origin('algorithm.gamma')}: same meaning")
    for name in (
        "algorithm.gamma",
        "algorithm.lam",
        "critic.cliprange_value",
        "critic.optim.lr",
        "trainer.critic_warmup",
    ):
        draft.treated.add(name)
    if estimator == "gae":
        draft.put("gae_lambda", float(draft.number("algorithm.lam")), f"{draft.origin('algorithm.lam')}: same meaning")
        draft.same("critic_lr", "critic.optim.lr")
        draft.same("critic_model", "critic.model.path")
        clip = draft.number("critic.cliprange_value")
        draft.put("value_clip", float(clip), f"{draft.origin('critic.cliprange_value')}: same meaning")
        draft.put("value_coefficient", 1.0, "verl's critic learns 1/2 max(...) with coefficient 1")
        if (warmup := draft.number("trainer.critic_warmup")) > 1:
            told = "the policy learns from this step on there, after so many here"
            draft.put("critic_warmup", int(warmup) - 1, f"{draft.origin('trainer.critic_warmup')}: {told}")
        return
    if draft.number("trainer.critic_warmup") > 1:
        draft.differs(draft.origin("trainer.critic_warmup"), "the policy learns from the first step here")
    skipped = [name for name in draft.run.options if name.startswith("critic.")]
    draft.treated |= set(skipped)
    if skipped:
        draft.note("critic.*", f"adv_estimator {estimator} has no critic: nothing to set")


def _kl(draft: RecipeDraft) -> None:
    """Write the KL penalty: in the loss, in the reward, or none."""
    in_loss, in_reward = draft.read(f"{ACTOR}.use_kl_loss"), draft.read("algorithm.use_kl_in_reward")
    loss, reward = draft.number(f"{ACTOR}.kl_loss_coef"), draft.number("algorithm.kl_ctrl.kl_coef")
    kinds = draft.read(f"{ACTOR}.kl_loss_type"), draft.read("algorithm.kl_penalty")
    control = draft.read("algorithm.kl_ctrl.type")
    target, horizon = draft.number("algorithm.kl_ctrl.target_kl"), draft.number("algorithm.kl_ctrl.horizon")
    if in_loss and in_reward and loss and reward:
        draft.differs(
            "use_kl_in_reward", "here a run has one KL penalty: that in the loss is taken, the one in the reward is not"
        )
    if in_loss and loss:
        draft.put("kl", float(loss), f"{draft.origin(f'{ACTOR}.kl_loss_coef')}: same meaning")
        draft.put("kl_where", "loss", "use_kl_loss")
        estimator = _estimator(kinds[0], "kl_loss_type")
        told = f"{draft.origin(f'{ACTOR}.kl_loss_type')}: {same_estimator(estimator)}"
        draft.put("kl_estimator", estimator, told)
    elif in_reward and reward:
        draft.put("kl", float(reward), f"{draft.origin('algorithm.kl_ctrl.kl_coef')}: same meaning")
        draft.put("kl_where", "reward", "use_kl_in_reward")
        estimator = _estimator(str(kinds[1]).removesuffix("+"), "kl_penalty")  # the + is of gradients
        told = f"{draft.origin('algorithm.kl_penalty')}: {same_estimator(estimator)}"
        draft.put("kl_estimator", estimator, told)
        if control == "adaptive":
            draft.put("kl_control", "adaptive", "kl_ctrl.type: same meaning")
            draft.put("kl_target", float(target), "kl_ctrl.target_kl: same meaning")
            draft.put("kl_horizon", float(horizon), "kl_ctrl.horizon: same meaning, in rollouts")
        of, kind = draft.origin("algorithm.use_kl_in_reward"), draft.read("algorithm.adv_estimator")
        if kind == "remax":
            draft.differs(of, "with remax a token has the KL from it on there, here that of the whole reply")
        if kind == "reinforce_plus_plus_baseline":
            draft.differs(of, "with this estimator a token has the KL of the whole reply there, here that from it on")
    else:
        if (
            draft.given("algorithm.kl_ctrl.kl_coef")
            and not draft.given("algorithm.use_kl_in_reward")
            and reward
            and not in_loss
        ):
            told = (
                "no effect without use_kl_in_reward; versions of verl that did not have it put this KL into the reward"
            )
            draft.differs(draft.origin("algorithm.kl_ctrl.kl_coef"), told)
        draft.put("kl", 0.0, "neither use_kl_loss nor use_kl_in_reward (or a coefficient of 0): no reference")


def _estimator(name: Any, option: str) -> str:
    if not isinstance(name, str) or name not in ESTIMATORS:
        raise UserError(f"verl's {option} {shown(name)!r:.40} has no counterpart; supported: {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


def _optimizer(draft: RecipeDraft, prompts: int, updates: int, rows: int | None) -> None:
    draft.same("lr", f"{OPTIMIZER}.lr")
    optimizer(draft, OPTIMIZER)
    megatron = any(name.startswith(f"{ACTOR}.megatron.") for name in draft.run.options)
    draft.same("weight_decay", f"{OPTIMIZER}.weight_decay", "same value" if megatron else DECAYED)
    _clipping(draft)
    names = [f"{OPTIMIZER}.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")]
    draft.same("schedule", next(filter(draft.given, names), names[0]))
    most, passes = draft.number("trainer.total_training_steps"), draft.number("trainer.total_epochs")
    together = verl_reward.generated_together(draft)
    if most:
        ends = None if rows is None else max(together, rows // together * together) // together * passes
        steps: int | None = both_ends(draft, int(most), ends)
    else:
        steps = steps_of(draft, passes, "trainer.total_epochs", together, rows, together)
    warm, share = draft.number(f"{OPTIMIZER}.lr_warmup_steps"), draft.number(f"{OPTIMIZER}.lr_warmup_steps_ratio")
    told = f"verl counts steps, of which each has {updates} update{'s'[: updates != 1]}; its first step has the rate 0"
    if warm is not None and warm > 0:
        draft.put("warmup", int(warm) * updates, f"{draft.origin(f'{OPTIMIZER}.lr_warmup_steps')}: {told}")
    elif share and steps is None:
        draft.differs(
            draft.origin(f"{OPTIMIZER}.lr_warmup_steps_ratio"), f"warmup = {share:g} x steps x {updates} updates"
        )
    elif share and steps is not None:
        draft.put(
            "warmup", int(share * steps) * updates, f"{draft.origin(f'{OPTIMIZER}.lr_warmup_steps_ratio')}: {told}"
        )
    if draft.read(f"{MODEL}.enable_gradient_checkpointing"):
        draft.put("recompute", "layers", f"{draft.origin(f'{MODEL}.enable_gradient_checkpointing')}: memory only")
    adapted = draft.read(f"{MODEL}.lora_rank") or draft.read(f"{MODEL}.lora.rank")
    stored(draft, f"{ACTOR}.fsdp_config.model_dtype", adapted)
    types = (f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", f"{ACTOR}.dtype")
    otherwise = f"{ACTOR}.megatron.dtype" if megatron else f"{ACTOR}.fsdp_config.dtype"
    draft.same("precision", next(filter(draft.given, types), otherwise))


def _clipping(draft: RecipeDraft) -> None:
    """Write the bound of the gradient's norm: optim.clip_grad, before 0.9 actor.grad_clip, which 0.9 does not read."""
    now, before = f"{OPTIMIZER}.clip_grad", f"{ACTOR}.grad_clip"
    if not draft.given(before):
        return draft.same("max_grad_norm", now)
    if draft.given(now):
        draft.same("max_grad_norm", now)
        return draft.note(draft.origin(before), "no effect: verl clips at optim.clip_grad")
    told = f"as before verl 0.9, which does not read it and clips at optim.clip_grad, {draft.read(now):g}"
    draft.same("max_grad_norm", before, told)


def _adapters(draft: RecipeDraft) -> None:
    """Write LoRA: model.lora_rank, or the model.lora.* of Megatron, which has layers of other names."""
    if not draft.read(f"{MODEL}.lora.rank"):
        return adapters(draft, f"{MODEL}.lora_rank", f"{MODEL}.lora_alpha", f"{MODEL}.target_modules")
    name = f"{MODEL}.lora.target_modules"
    if isinstance(chosen := draft.read(name), list):
        draft.run.options[name] = [part for layer in chosen for part in _LAYERS.get(layer, [layer])]
    adapters(draft, f"{MODEL}.lora.rank", f"{MODEL}.lora.alpha", name)


def _long_rows(draft: RecipeDraft) -> None:
    """Write how prompts are treated that are longer than data.max_prompt_length: here, than the context."""
    skips, how = draft.read("data.filter_overlong_prompts"), draft.read("data.truncation")
    draft.read("data.max_prompt_length")
    draft.read("data.filter_overlong_prompts_workers")
    name, value = ("data.filter_overlong_prompts", False) if skips else ("data.truncation", how)
    draft.put("too_long", draft.fitted("too_long", value), f"{draft.origin(name)}: here at the model's context")
    if skips or draft.given("data.max_prompt_length"):
        there = "left out" if skips else "cut"
        draft.differs(
            draft.origin("data.max_prompt_length"),
            f"longer prompts are {there} there, here those that leave no room for a reply in the model's context: "
            "leave them out of the rows",
        )
    if how in ("right", "middle") and not skips:
        draft.differs(draft.origin("data.truncation"), "here the start of a prompt is cut")
    if skips and draft.given("data.truncation"):
        draft.note(draft.origin("data.truncation"), "no effect: longer prompts are left out (too_long)")


def _housekeeping(draft: RecipeDraft) -> None:
    """Write what changes no result: trackers, what is kept on the host; treat what is so here in any case."""
    trackers(draft, "trainer.logger", "trainer.project_name")
    divisions(draft)
    offload(draft)
    if draft.given("trainer.val_before_train"):
        if not draft.read("trainer.val_before_train"):
            draft.note(draft.origin("trainer.val_before_train"), "step 0 is evaluated here")
        draft.treated.add("trainer.val_before_train")
