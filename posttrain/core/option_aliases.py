"""What a user who knows another trainer calls things, and which option means it here."""

from __future__ import annotations

import re
from collections.abc import Iterable

from posttrain.core.messages import near

ELSEWHERE = {
    "learning_rate": "lr",
    "actor_learning_rate": "lr",
    "critic_learning_rate": "critic_lr",
    "num_generations": "group",
    "n_samples_per_prompt": "group",
    "rollout_n": "group",
    "group_size": "group",
    "num_return_sequences": "group",
    "per_device_train_batch_size": "prompts (rl) or rows (sft), and tokens_per_microbatch for memory",
    "gradient_accumulation_steps": "prompts (rl) or rows (sft): micro-batches follow from tokens_per_microbatch",
    "train_batch_size": "prompts (rl) or rows (sft)",
    "rollout_batch_size": "prompts",
    "micro_train_batch_size": "tokens_per_microbatch",
    "micro_batch_size": "tokens_per_microbatch",
    "batch_size": "prompts (rl) or rows (sft)",
    "mini_batch_size": "minibatches (how many per step)",
    "num_mini_batches": "minibatches",
    "ppo_mini_batch_size": "minibatches (how many per step)",
    "num_iterations": "epochs",
    "ppo_epochs": "epochs",
    "num_ppo_epochs": "epochs",
    "num_train_epochs": "epochs (sft) or steps (rl)",
    "max_steps": "steps",
    "total_steps": "steps",
    "beta": "kl",
    "kl_coef": "kl",
    "init_kl_coef": "kl",
    "kl_loss_coef": "kl",
    "kl_penalty": "kl_estimator",
    "target_kl": "kl_target",
    "epsilon": "clip_low and clip_high",
    "eps_clip": "clip_low and clip_high",
    "cliprange": "clip_low and clip_high",
    "clip_ratio": "clip_low and clip_high",
    "epsilon_high": "clip_high",
    "clip_ratio_high": "clip_high",
    "clip_ratio_low": "clip_low",
    "clip_ratio_c": "clip_dual",
    "cliprange_value": "value_clip",
    "vf_coef": "value_coefficient",
    "lam": "gae_lambda",
    "lambd": "gae_lambda",
    "adv_estimator": "algorithm, or advantage",
    "advantage_estimator": "algorithm, or advantage",
    "loss_type": "algorithm, or aggregate",
    "loss_agg_mode": "aggregate",
    "scale_rewards": "scale (none, batch or group)",
    "entropy_coeff": "entropy",
    "top_entropy_quantile": "top_entropy",
    "mask_truncated_completions": "overlong_filter",
    "ref_model_sync_steps": "reference_every",
    "sync_ref_model": "reference_every",
    "max_completion_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "generate_max_len": "max_tokens",
    "max_response_length": "max_tokens",
    "response_length": "max_tokens",
    "max_prompt_length": "too_long",
    "max_length": "context (from scratch), or too_long",
    "max_seq_length": "context (from scratch), or too_long",
    "reward": "env",
    "reward_funcs": "env",
    "reward_function": "env",
    "reward_fn": "env",
    "train_dataset": "tasks",
    "dataset_name": "tasks",
    "dataset": "tasks",
    "data": "tasks",
    "train_files": "tasks",
    "val_files": "eval_tasks",
    "eval_dataset": "eval_tasks",
    "input_key": "fields.prompt",
    "prompt_key": "fields.prompt",
    "label_key": "fields.answer",
    "model_name_or_path": "model",
    "pretrain": "model",
    "output_dir": "out",
    "save_path": "out",
    "save_steps": "save_every",
    "save_freq": "save_every",
    "save_total_limit": "keep",
    "eval_steps": "eval_every",
    "test_freq": "eval_every",
    "warmup_steps": "warmup",
    "lr_scheduler_type": "schedule",
    "lr_scheduler": "schedule",
    "ddp_timeout": "collective_timeout",
    "nccl_timeout": "collective_timeout",
    "max_norm": "max_grad_norm",
    "clip_grad": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "adam_beta1": "betas",
    "adam_betas": "betas",
    "bf16": "precision bfloat16",
    "fp16": "precision bfloat16",
    "dtype": "precision",
    "use_vllm": "engine vllm",
    "vllm_gpu_memory_utilization": "engine_cache",
    "completion_only_loss": "mask_prompt",
    "assistant_only_loss": "mask_prompt",
    "resume_from_checkpoint": "resume",
    "correct": "success",
    "logging_steps": "not needed: every step is logged, in metrics.jsonl and for TensorBoard",
    "report_to": "not needed: every run writes metrics.jsonl and a folder for TensorBoard",
    "warmup_ratio": "warmup (a number of updates)",
    "importance_sampling_level": "ratio (token, or sequence-mean as in GSPO)",
}
"""A name in TRL, verl, OpenRLHF or Search-R1 -> what to use here."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?", or "; here it is ...", for a name that there is not; "" where nothing comes near.

    A word of the command line ("--stesp") is answered with one ("--steps").
    """
    plain = word.strip("-").replace("-", "_").rpartition(".")[2].lower()
    names = [name.replace("-", "_") for name in known]
    elsewhere = ELSEWHERE.get(plain) if plain not in names else None
    told = f"; here it is {elsewhere}" if elsewhere else near(plain, names)
    if not word.startswith("--"):
        return told
    flags = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    return re.sub(rf"(?<![\w-])'?({flags})'?(?!\w)", lambda found: "--" + found[1].replace("_", "-"), told)
