"""Recipes from OpenRLHF's command lines: names and defaults of version 0.11, and the names of 0.9, which had no dots.

A step samples rollout.n_samples_per_prompt replies to each of rollout.batch_size prompts; train.batch_size counts replies.
"""

from __future__ import annotations

import math
from typing import Any

from posttrain.apps.migration.foreign_run import shown, value_of
from posttrain.apps.migration.openrlhf_names import FLAT, GROUPS, OF_ONE_MODEL
from posttrain.apps.migration.recipe_draft import RecipeDraft
from posttrain.apps.migration.shared_rules import (
    adapters,
    clips,
    devices_of,
    engine,
    frequency,
    same_estimator,
    split_of,
    steps_of,
    tracked_by_wandb,
    warm_up,
)
from posttrain.core.types import UserError

_LEARNS: dict[str, Any] = {
    "train.batch_size": 128,
    "train.max_epochs": 1,
    "train.seed": 42,
    "max_norm": 1.0,
    "adam.betas": [0.9, 0.95],
    "adam.weight_decay": 0.0,
    "lr_scheduler": "cosine_with_min_lr",
    "data.prompt_split": "train",
    "data.dataset_split": "train",
    "lr_warmup_ratio": 0.03,
    "min_lr_ratio": 0.1,
    "ckpt.save_steps": -1,
    "ckpt.max_num": 3,
    "eval.steps": -1,
    "ds.lora.rank": 0,
    "ds.lora.alpha": 16,
    "ds.lora.target_modules": "all-linear",
    "ds.param_dtype": "bf16",
    "data.apply_chat_template": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "train_ppo_ray": {
        **_LEARNS,
        "rollout.batch_size": 1024,
        "rollout.n_samples_per_prompt": 1,
        "rollout.temperature": 1.0,
        "train.num_episodes": 1,
        "data.max_len": 2048,
        "data.input_key": "input",
        "actor.adam.lr": 1e-6,
        "critic.adam.lr": 9e-6,
        "actor.eps_clip": 0.2,
        "critic.value_clip": 0.5,
        "actor.policy_loss_type": "ppo",
        "algo.advantage.estimator": "gae",
        "algo.advantage.lambd": 1,
        "algo.advantage.gamma": 1,
        "algo.kl.init_coef": 0.01,
        "algo.kl.estimator": "k1",
        "algo.kl.horizon": 10000,
        "algo.dynamic_filtering_range": [0, 1],
        "eval.n_samples_per_prompt": 4,
        "train.async_queue_size": 1,
        "critic.freezing_steps": -1,
        "algo.advantage.is_correction_threshold": [0.5, 5.0],
        "algo.advantage.is_correction_type": "tis",
        "algo.advantage.is_correction_level": "off",
        "algo.advantage.is_correction_mode": "mask",
        "algo.advantage.is_correction_gating": "ratio",
        "actor.loss_agg_mode": "token-mean",
        "reward.clip_range": [-10, 10],
    },
    "train_sft": {
        **_LEARNS,
        "train.max_epochs": 2,
        "adam.lr": 5e-6,
        "data.max_len": 2048,
        "data.input_key": "input",
        "data.input_template": "User: {}\nAssistant: ",  # of no other program
    },
    "train_dpo": {**_LEARNS, "adam.lr": 1e-5, "data.max_len": 512, "model.beta": 0.1},
    "train_rm": {**_LEARNS, "adam.lr": 9e-6, "data.max_len": 512, "model.loss_type": "sigmoid"},
}
_ESTIMATORS = {
    "gae": "ppo",
    "reinforce": "reinforce++",
    "reinforce_baseline": "reinforce++-baseline",
    "rloo": "grpo",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
    "flash_reinforce": "grpo",
}
_BASELINES = {"rloo": "others", "flash_reinforce": "batch"}
_CORRECTIONS = {
    **{"tis": "truncate", "icepop": "icepop", "seq-mask-tis": "sequence"},
    **{"token, clip": "truncate", "token, mask": "icepop", "seq, mask": "sequence"},
}
"""is_correction_type of versions before 0.11, or is_correction_level and is_correction_mode -> the kind here."""
_CORRECTION = "algo.advantage.is_correction"


def openrlhf_recipe(draft: RecipeDraft, devices: int | None, rows: int | None) -> None:
    """Write the lines of a run of OpenRLHF."""
    draft.run.options = _renamed(draft.run.options)
    for name in draft.run.options:
        if "." in name and name.partition(".")[0] not in GROUPS:
            draft.treated.add(name)
            draft.differs(draft.origin(name), "OpenRLHF has no option of this name: set what you mean by it here")
    devices_of(draft, devices, need=False)
    ours = "actor." if draft.run.trainer == "train_ppo_ray" else "model."
    for name in OF_ONE_MODEL:  # those of the model that is trained are read without a prefix
        for prefix in (ours, "model."):
            if prefix + name in draft.run.options and not (name == "adam.lr" and prefix == "actor."):
                draft.run.options[name] = draft.run.options.pop(prefix + name)
    draft.same("model", "model_name_or_path")
    samples = draft.number("data.max_samples")
    if samples is not None:
        draft.same("limit", "data.max_samples", "same meaning; of several files, of each and of all together there")
        rows = min(rows, int(samples)) if rows else int(samples) if samples < 1e7 else None
    draft.same("chat", "data.apply_chat_template")
    if draft.run.trainer == "train_ppo_ray":
        _rollouts(draft, rows)
    else:
        _given_responses(draft, rows)
    if not draft.given("data.apply_chat_template"):
        draft.put("chat", False, f"{draft.origin('data.apply_chat_template')}: plain text")
    draft.same("optimizer", "optim")
    if draft.read("optim") == "muon":
        _muon(draft)
    draft.same("betas", "adam.betas")
    draft.same("weight_decay", "adam.weight_decay")
    draft.same("max_grad_norm", "max_norm")
    schedule = draft.read("lr_scheduler")
    draft.same("schedule", "lr_scheduler")
    if schedule == "cosine_with_min_lr":
        draft.differs(draft.origin("min_lr_ratio"), "the cosine ends at 0 here, not at a share of the peak")
    draft.read("min_lr_ratio")
    draft.same("seed", "train.seed")
    draft.same("precision", "ds.param_dtype")
    if draft.read("gradient_checkpointing_enable"):
        draft.put("recompute", "layers", "gradient_checkpointing: memory only")
    draft.same("router_balance", "aux_loss_coef")
    adapters(draft, "ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules", ("ds.load_in_4bit", "load_in_8bit"))
    draft.same("keep", "ckpt.max_num")
    draft.same("out", "ckpt.output_dir")
    if draft.read("logger.wandb.key"):
        tracked_by_wandb(draft, "logger.wandb.key")
    draft.same("track_project", "logger.wandb.project")


def _muon(draft: RecipeDraft) -> None:
    draft.put("optimizer_options.adjust_lr_fn", "original", "optim = muon: DeepSpeed's scale of an update")
    if draft.given("muon.lr"):
        draft.same("lr", "muon.lr", "here of all weights, also of those that AdamW updates")
    for name in ("momentum", "ns_steps"):
        if draft.given(f"muon.{name}"):
            draft.put(f"optimizer_options.{name}", draft.number(f"muon.{name}"), f"muon.{name}: same meaning")


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    return {FLAT.get(name, name): value for name, value in options.items()}


def _rows(draft: RecipeDraft, name: str, shares: str) -> None:
    """Write the rows: several files are separated by commas."""
    value = draft.run.options.get(name)
    if isinstance(value, str) and "," in value:
        draft.run.options[name] = [part.strip() for part in value.split(",") if part.strip()]
    probs = draft.read(shares)
    weights = [value_of(part) for part in probs.split(",")] if isinstance(probs, str) else [probs]
    if probs is not None and all(isinstance(weight, (int, float)) for weight in weights):
        draft.shares = ([float(weight) for weight in weights], f"{draft.origin(shares)}: same share")
    draft.tasks(name)
    if draft.parts and probs is not None:
        draft.differs(
            draft.origin(shares),
            "a pass ends there when every file was read once, the others repeated: set steps or epochs to as many rows",
        )


def _rollouts(draft: RecipeDraft, rows: int | None) -> None:
    """Write the lines of train_ppo_ray."""
    _rows(draft, "data.prompt_dataset", "data.prompt_probs")
    split_of(draft, "data.prompt_split")
    draft.same("fields.prompt", "data.input_key")
    draft.same("fields.answer", "data.label_key")
    _template(draft, draft.read("data.input_key"))
    draft.same("eval_tasks", "eval.dataset")
    if draft.given("eval.dataset"):
        draft.same("eval_samples", "eval.n_samples_per_prompt")
    _reward(draft)
    prompts, updates = _batch(draft)
    steps = steps_of(draft, draft.number("train.num_episodes"), "train.num_episodes", prompts, rows)
    warm_up(draft, "lr_warmup_ratio", draft.number("lr_warmup_ratio"), None if steps is None else steps * updates)
    draft.read("lr_warmup_ratio")
    frequency(draft, "save_every", "ckpt.save_steps", 1)
    frequency(draft, "eval_every", "eval.steps", 1)
    longest, length = draft.number("rollout.max_new_tokens"), draft.number("data.max_len")
    if draft.given("data.prompt_max_len"):  # before version 0.11, whose replies have a length of their own
        told = "longer prompts are cut there, here those that leave no room for a reply in the model's context"
        draft.differs(draft.origin("data.prompt_max_len"), told)
        length = 1024
    draft.read("data.prompt_max_len")
    named = "rollout.max_new_tokens" if longest or draft.given("data.prompt_max_len") else "data.max_len"
    together = "" if named != "data.max_len" else ", of prompt and reply together"
    if together:
        draft.differs(
            draft.origin(named), "a reply has at most as many tokens less those of its prompt there, here as many"
        )
    draft.put("max_tokens", int(longest or length), f"{draft.origin(named)}{together}")
    draft.same("temperature", "rollout.temperature")
    if draft.read("rollout.top_p") not in (None, 1, 1.0):
        draft.differs(draft.origin("rollout.top_p"), "training samples from the model's own distribution: left out")
    draft.same("lr", "actor.adam.lr")
    _policy(draft, updates)
    _kl(draft)
    _filtering(draft)
    _asynchronous(draft)
    if draft.number("vllm.num_engines"):
        engine(draft, draft.origin("vllm.num_engines"), "vllm.gpu_memory_utilization", "vllm.tensor_parallel_size")
        if draft.number("vllm.num_engines") >= draft.lines.get("processes", (1, ""))[0]:
            draft.same("replicas", "vllm.num_engines")
        _correction(draft)
    else:
        told = "no engine is named (vllm.num_engines): with one, set correction and correction_cap"
        for name in ("level", "mode", "gating", "enable", "type", "threshold"):
            if draft.given(f"{_CORRECTION}_{name}"):
                draft.differs(draft.origin(f"{_CORRECTION}_{name}"), told)
    for name in ("type", "threshold", "level", "mode", "gating", "enable"):
        draft.read(f"{_CORRECTION}_{name}")


def _filtering(draft: RecipeDraft) -> None:
    """Write that groups whose mean score is not between two bounds are replaced: here those with equal rewards."""
    bounds = draft.read("algo.dynamic_filtering_range")
    if not draft.read("algo.dynamic_filtering_enable"):
        return
    draft.put(
        "dynamic_sampling", 10, "dynamic_filtering: groups without signal are replaced, up to 10 times the prompts"
    )
    if bounds not in ([0, 1], [0.0, 1.0]):
        draft.differs(
            draft.origin("algo.dynamic_filtering_range"), "here a group is replaced if its rewards are all equal"
        )


def _asynchronous(draft: RecipeDraft) -> None:
    """Write how many steps sampling is ahead, in a run that samples while it learns."""
    ahead = draft.count("train.async_queue_size")
    if draft.read("train.async_enable"):
        told = "as many steps ahead; rollouts of older weights get a correction here"
        draft.put("async_steps", ahead, f"{draft.origin('train.async_queue_size')}, with async_enable: {told}")
    elif draft.given("train.async_queue_size"):
        draft.note(draft.origin("train.async_queue_size"), "no effect without async_enable")


def _correction(draft: RecipeDraft) -> None:
    """Write the correction for vLLM's log-probabilities: by the names of version 0.11, or of the versions before."""
    level, mode = draft.read("algo.advantage.is_correction_level"), draft.read("algo.advantage.is_correction_mode")
    gating, kind = draft.read("algo.advantage.is_correction_gating"), draft.read("algo.advantage.is_correction_type")
    threshold, by_type = draft.read("algo.advantage.is_correction_threshold"), draft.read(f"{_CORRECTION}_enable")
    if level == "off" and not by_type:
        return
    if draft.read("actor.policy_loss_type") == "gspo":
        told = f"{draft.origin('actor.policy_loss_type')} with a correction: the ratio is one to the sampler's own"
        return draft.put("old_policy", "sampler", told)
    if gating != "ratio":
        draft.differs(draft.origin(f"{_CORRECTION}_gating"), "only the ratio bounds a correction here: left out")
        return
    named = "type" if by_type else "level"
    found = _CORRECTIONS.get(kind if by_type else f"{level}, {mode}", "truncate")
    told = draft.origin(f"{_CORRECTION}_{named}") + ("" if by_type else f", is_correction_mode {mode}")
    weight = "; here replies that are kept have weight 1, there their tokens' own ratios" * (found == "sequence")
    draft.put("correction", found, f"{told}: nearest kind{weight}")
    high = threshold[-1] if isinstance(threshold, list) and threshold else threshold
    if isinstance(high, (int, float)) and high > 1:
        lower = "there is no lower one" if found == "truncate" else "the lower one is 1 / cap"
        told = f"{draft.origin('algo.advantage.is_correction_threshold')}: its upper bound; here {lower}"
        draft.put("correction_cap", float(high), told)


def _batch(draft: RecipeDraft) -> tuple[int, int]:
    """Write the batch; return the prompts of a step and its updates."""
    prompts, group = draft.count("rollout.batch_size"), draft.count("rollout.n_samples_per_prompt")
    size, passes = draft.count("train.batch_size"), draft.count("train.max_epochs")
    minibatches = max(1, math.ceil(prompts * group / size))
    draft.head.append(
        f"A step: {prompts} prompts x {group} replies = {prompts * group} rollouts, {minibatches * passes} "
        f"update{'s'[: minibatches * passes != 1]} of {min(size, prompts * group)} rollouts."
    )
    draft.put("prompts", int(prompts), f"{draft.origin('rollout.batch_size')}: same meaning")
    draft.put("group", int(group), f"{draft.origin('rollout.n_samples_per_prompt')}: same meaning")
    if left := prompts * group % size:
        draft.differs(
            draft.origin("train.batch_size"),
            f"of {prompts * group} rollouts the last {left} are no update of their own there; here all updates have "
            "nearly the same number of groups",
        )
    if minibatches > prompts:
        draft.differs(
            draft.origin("train.batch_size"),
            f"{minibatches} updates a pass: an update needs a whole group here, so {prompts}",
        )
        minibatches = int(prompts)
    draft.put(
        "minibatches", minibatches, f"{draft.origin('train.batch_size')} replies of {prompts * group}: updates a pass"
    )
    draft.put("epochs", int(passes), f"{draft.origin('train.max_epochs')}: same meaning")
    return int(prompts), minibatches * int(passes)


def _reward(draft: RecipeDraft) -> None:
    remote, agent = draft.read("reward.remote_url"), draft.read("train.agent_func_path")
    if isinstance(model := draft.read("reward.model_name_or_path"), str):
        draft.put(
            "reward_model",
            [part for part in model.split(",") if part],
            "reward.model_name_or_path: its score is the reward",
        )
    if agent:
        written = "write it as a generator function (guides/environments)"
        draft.put("env", "agent.py:play", f"{draft.origin('train.agent_func_path')}: {written}")
    elif isinstance(remote, str) and remote.endswith(".py"):
        told = f"{draft.origin('reward.remote_url')}: write reward_func(queries, prompts, labels) as reward(tasks, replies)"
        draft.put("env", "reward.py:reward", told)
    elif remote:
        draft.put(
            "env", "reward.py:reward", f"{draft.origin('reward.remote_url')}: a function of yours asks the address"
        )
    elif not isinstance(model, str):
        draft.put("env", "reward.py:reward", "no reward is named: name yours")
    bounds = draft.read("reward.clip_range")
    if bounds:
        named = f"reward.clip_range {shown(bounds)}"
        text = "rewards are not clipped here: bound them in the reward"
        (draft.differs if draft.given("reward.clip_range") or isinstance(model, str) else draft.note)(named, text)
    length, factor = draft.number("reward.overlong_buffer_len"), draft.number("reward.overlong_penalty_factor", 1)
    if length:
        draft.put("overlong_cache", int(length), f"{draft.origin('reward.overlong_buffer_len')}: same meaning")
        if factor != 1:
            draft.differs(f"reward.overlong_penalty_factor = {factor:g}", "the penalty grows to 1 here")


def _policy(draft: RecipeDraft, updates: int) -> None:
    """Write advantages, ratio, clip and denominator."""
    estimator, loss = draft.read("algo.advantage.estimator"), draft.read("actor.policy_loss_type")
    if estimator not in _ESTIMATORS:
        raise UserError(
            f"advantage_estimator {shown(estimator)!r:.60} has no counterpart; supported: {', '.join(_ESTIMATORS)}"
        )
    draft.put(
        "algorithm",
        _ESTIMATORS[estimator],
        f"{draft.origin('algo.advantage.estimator')}; what differs is in the lines below",
    )
    gamma, lam = draft.number("algo.advantage.gamma"), draft.number("algo.advantage.lambd")
    if _ESTIMATORS[estimator] == "grpo":
        draft.put("baseline", _BASELINES.get(estimator, "group"), f"{estimator}: the mean that is subtracted")
        draft.put(
            "scale",
            "group" if estimator == "group_norm" else "none",
            f"{estimator}: the division by the standard deviation",
        )
    elif estimator == "reinforce_baseline":
        draft.put("gamma", 1.0, "reinforce_baseline: OpenRLHF takes 1, whatever is given")
    else:
        draft.put("gamma", float(gamma), f"{draft.origin('algo.advantage.gamma')}: same meaning")
    if draft.read("algo.advantage.no_std_norm") and _ESTIMATORS[estimator] != "grpo":
        draft.put("whiten", False, "no_std_norm: advantages are not divided by their standard deviation")
        draft.differs("algo.advantage.no_std_norm", "the mean of advantages over all tokens is not subtracted here")
    _penalised(draft, estimator)
    value_clip, learning_rate = draft.number("critic.value_clip"), draft.number("critic.adam.lr")
    if estimator == "gae":
        draft.put("gae_lambda", float(lam), f"{draft.origin('algo.advantage.lambd')}: same meaning")
        draft.put("value_clip", float(value_clip), f"{draft.origin('critic.value_clip')}: same meaning")
        draft.put("value_coefficient", 1.0, "OpenRLHF's critic learns 1/2 max(...) with coefficient 1")
        draft.put("critic_lr", float(learning_rate), f"{draft.origin('critic.adam.lr')}: same meaning")
        _critic_start(draft)
        if (frozen := draft.number("critic.freezing_steps")) >= 0:
            told = f"{draft.origin('critic.freezing_steps')}: the policy learns in steps after it, the first is 0"
            draft.put("critic_warmup", int(frozen) + 1, told)
    elif draft.number("critic.freezing_steps") >= 0:
        draft.differs(draft.origin("critic.freezing_steps"), "the policy learns from the first step here")
    _aggregate(draft, loss)
    if loss == "gspo":
        draft.put("ratio", "sequence-mean", f"{draft.origin('actor.policy_loss_type')}: GSPO's ratio")
    either = draft.number("actor.eps_clip")
    both = draft.read("actor.eps_clip_low_high")
    low, high = both if isinstance(both, list) and len(both) == 2 else (either, either)
    clips(draft, updates, low, high, draft.number("actor.dual_clip"), "eps_clip")
    if entropy := draft.number("actor.entropy_coef"):
        draft.put("entropy", float(entropy), f"{draft.origin('actor.entropy_coef')}: same meaning")


def _critic_start(draft: RecipeDraft) -> None:
    """Write the model that the critic starts from: as given, or the first reward model where nothing else is the reward."""
    draft.same("critic_model", "critic.model_name_or_path")
    elsewhere = draft.read("reward.remote_url") or draft.read("train.agent_func_path")
    model = draft.read("reward.model_name_or_path")
    if "critic_model" not in draft.lines and isinstance(model, str) and model and not elsewhere:
        told = f"{draft.origin('critic.model_name_or_path')} is the first reward model"
        draft.put("critic_model", draft.fitted("critic_model", model.split(",")[0]), told)


def _penalised(draft: RecipeDraft, estimator: str) -> None:
    """Write the advantages of a group with a KL in the reward: there it is that of a token and those after it, and no
    baseline has it.
    """
    if _ESTIMATORS[estimator] != "grpo" or not draft.number("algo.kl.init_coef") or draft.read("algo.kl.use_loss"):
        return
    if estimator == "dr_grpo":
        draft.lines.pop("scale")
        draft.put(
            "algorithm", "reinforce++-baseline", "dr_grpo with a KL in the reward: rewards and KL from a token on"
        )
        draft.put("whiten", False, "dr_grpo: advantages are not normalised")
        return
    told = (
        "the KL of a whole reply is in its reward here, and so in the baseline; there a token's and those after it are"
    )
    draft.differs(f"init_coef without use_loss, with {estimator}", told)


def _aggregate(draft: RecipeDraft, loss: Any) -> None:
    mode, name = draft.read("actor.loss_agg_mode"), draft.origin("actor.loss_agg_mode")
    if mode not in ("token-mean", "seq-mean-token-mean"):
        raise UserError(f"OpenRLHF's loss_agg_mode {shown(mode)!r:.60} has no counterpart")
    whole = loss == "gspo" or mode != "token-mean"
    name = draft.origin("actor.policy_loss_type") if loss == "gspo" else name
    told = "mean of each reply's mean, 1 / (B n_i)" if whole else "mean over the tokens of the update, 1 / sum n_j"
    draft.put("aggregate", "sequence-mean" if whole else "token-mean", f"{name}: {told}")


def _kl(draft: RecipeDraft) -> None:
    beta, in_loss = draft.number("algo.kl.init_coef"), draft.read("algo.kl.use_loss")
    estimator, target = draft.read("algo.kl.estimator"), draft.number("algo.kl.target")
    draft.put("kl", float(beta), f"{draft.origin('algo.kl.init_coef')}: same meaning (0: no reference)")
    if beta:
        draft.put(
            "kl_where",
            "loss" if in_loss else "reward",
            "use_kl_loss" if in_loss else "without use_kl_loss: in the reward",
        )
        draft.same("kl_estimator", "algo.kl.estimator")
        told = f"{draft.origin('algo.kl.estimator')}: {same_estimator(estimator)}"
        draft.put("kl_estimator", estimator, told)
    horizon = draft.number("algo.kl.horizon")
    if target is not None and beta:
        draft.put("kl_control", "adaptive", "kl_target: adaptive")
        draft.put("kl_target", float(target), f"{draft.origin('algo.kl.target')}: same meaning")
        draft.put("kl_horizon", float(horizon), f"{draft.origin('algo.kl.horizon')}: same meaning, in rollouts")


def _template(draft: RecipeDraft, column: Any) -> None:
    template = draft.read("data.input_template")
    if draft.run.options.get("data.apply_chat_template") or not isinstance(template, str):
        return
    if "\\n" in template:
        draft.differs(
            "data.input_template", "it has \\n as two characters, as OpenRLHF reads it: a line break is $'\\n'"
        )
    if "{}" in template:
        text = template.replace("{}", "\0").replace("{", "{{").replace("}", "}}")
        name = "data.input_template" if draft.given("data.input_template") else draft.origin("data.input_template")
        draft.put("prompt_template", text.replace("\0", f"{{{column}}}"), f"{name}: the column in braces")


def _given_responses(draft: RecipeDraft, rows: int | None) -> None:
    """Write the lines of train_sft, train_dpo and train_rm."""
    _rows(draft, "data.dataset", "data.dataset_probs")
    split_of(draft, "data.dataset_split")
    if draft.read("eval.dataset"):
        draft.note("eval.dataset", "held_out keeps a share of tasks for evaluation")
    size, passes = draft.count("train.batch_size"), draft.count("train.max_epochs")
    draft.head.append(f"An update: {size} rows.")
    draft.put("rows", int(size), f"{draft.origin('train.batch_size')}: rows of an update")
    short = "the last rows of a pass, fewer than an update has, are left out there"
    draft.put("epochs", float(passes), f"{draft.origin('train.max_epochs')}: same meaning; {short}")
    updates = None if rows is None else max(1, rows // size) * int(passes)
    warm_up(draft, "lr_warmup_ratio", draft.number("lr_warmup_ratio"), updates)
    draft.read("lr_warmup_ratio")
    draft.same("lr", "adam.lr")
    draft.same("max_length", "data.max_len")
    draft.put(
        "too_long", "truncate", "longer rows are cut; they end with the end-of-sequence token there, without it here"
    )
    if not draft.run.options.get("data.apply_chat_template") and not draft.read("model.pretrain_mode_enable"):
        told = "a response ends with a space and the end-of-sequence token there, with the token alone here"
        draft.differs(draft.origin("data.apply_chat_template"), told)
    frequency(draft, "save_every", "ckpt.save_steps", 1)
    frequency(draft, "eval_every", "eval.steps", 1)
    if draft.run.trainer == "train_sft":
        return _demonstrations(draft)
    for option, name in (("prompt", "prompt_key"), ("chosen", "chosen_key"), ("rejected", "rejected_key")):
        draft.same(f"fields.{option}", f"data.{name}")
        if draft.lines.get(f"fields.{option}", ("",))[0] == option:
            del draft.lines[f"fields.{option}"]
    (_dpo if draft.run.trainer == "train_dpo" else _reward_model)(draft)


def _demonstrations(draft: RecipeDraft) -> None:
    """Write the columns of train_sft: texts, messages, or prompts with their responses."""
    column, reply = draft.read("data.input_key"), draft.read("data.output_key")
    if draft.read("model.pretrain_mode_enable"):
        draft.put("fields.text", column, f"{draft.origin('data.input_key')}, with pretrain_mode: trained as a whole")
        draft.differs("model.pretrain_mode_enable", "a text ends with the end-of-sequence token here, not there")
        if draft.given("data.input_template"):
            draft.treated.add("data.input_template")
            draft.note("data.input_template", "no effect with pretrain_mode")
        draft.lines.pop("chat", None)
    elif draft.run.options.get("data.apply_chat_template") and not reply:
        if column != "messages":
            draft.put("fields.messages", column, f"{draft.origin('data.input_key')}: whole conversations")
        turns = ("assistant", "all turns of") if draft.read("data.multiturn") else ("last", "the last turn of")
        draft.put(
            "mask", turns[0], f"data.multiturn {'' if turns[0] == 'assistant' else 'not '}given: {turns[1]} the model"
        )
    else:
        draft.same("fields.prompt", "data.input_key")
        draft.same("fields.response", "data.output_key")
        _template(draft, column)
    draft.read("data.multiturn")


def _dpo(draft: RecipeDraft) -> None:
    smoothing, ipo = draft.number("model.label_smoothing", 0), draft.read("model.ipo_enable")
    draft.put("algorithm", "ipo" if ipo else "cdpo" if smoothing else "dpo", "train_dpo")
    draft.put("beta", float(draft.number("model.beta")), f"{draft.origin('model.beta')}: same meaning")
    if ipo:
        draft.put("length_normalised", False, "model.ipo_enable: OpenRLHF takes the sum over tokens, not their mean")
    if smoothing and ipo:
        draft.note(draft.origin("model.label_smoothing"), "no effect with ipo_enable")
    elif smoothing:
        draft.put("smoothing", float(smoothing), f"{draft.origin('model.label_smoothing')}: same meaning")
    if weight := draft.number("model.nll_loss_coef", 0):
        draft.put("imitation", float(weight), f"{draft.origin('model.nll_loss_coef')}: same meaning")
        draft.put("imitation_per", "responses", "model.nll_loss_coef: the mean over replies of each one's mean")
    other = draft.read("ref.model_name_or_path")
    if other and other != draft.read("model_name_or_path"):
        draft.differs(draft.origin("ref.model_name_or_path"), "the reference is the starting model here: start with it")


def _reward_model(draft: RecipeDraft) -> None:
    kind = draft.read("model.loss_type")
    if kind not in ("sigmoid", "logexp"):
        raise UserError(f"OpenRLHF's reward loss {shown(kind)!r:.40} has no counterpart; supported: sigmoid and logexp")
    draft.put("algorithm", "bradley-terry", f"{draft.origin('model.loss_type')}: log(1 + exp(r_rejected - r_chosen))")
    counts = draft.read("model.margin_loss_enable") and kind == "sigmoid"
    told = "margins of the rows count, with loss_type sigmoid alone"
    draft.put("row_margins", 1.0 if counts else 0.0, f"{draft.origin('model.margin_loss_enable')}: {told}")
