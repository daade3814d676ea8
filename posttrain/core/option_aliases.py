"""The names of other trainers' options, and the options here that do the same."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from posttrain.core.messages import near

ELSEWHERE = {
    "learning_rate": "{lr}",
    "actor_learning_rate": "{lr}",
    "critic_learning_rate": "{critic_lr}",
    "num_generations": "{group}",
    "n_samples_per_prompt": "{group}",
    "rollout_n": "{group}",
    "group_size": "{group}",
    "num_return_sequences": "{group}",
    "per_device_train_batch_size": "{prompts} (rl) or {rows} (sft), and {tokens_per_microbatch} for memory",
    "gradient_accumulation_steps": "{prompts} (rl) or {rows} (sft): micro-batches follow from {tokens_per_microbatch}",
    "train_batch_size": "{prompts} (rl) or {rows} (sft)",
    "rollout_batch_size": "{prompts}",
    "micro_train_batch_size": "{tokens_per_microbatch}",
    "micro_batch_size": "{tokens_per_microbatch}",
    "batch_size": "{prompts} (rl) or {rows} (sft)",
    "mini_batch_size": "{minibatches} (how many per step)",
    "num_mini_batches": "{minibatches}",
    "ppo_mini_batch_size": "{minibatches} (how many per step)",
    "num_iterations": "{epochs}",
    "ppo_epochs": "{epochs}",
    "num_ppo_epochs": "{epochs}",
    "num_train_epochs": "{epochs} (sft) or {steps} (rl)",
    "max_steps": "{steps}",
    "total_steps": "{steps}",
    "beta": "{kl}",
    "kl_coef": "{kl}",
    "init_kl_coef": "{kl}",
    "kl_loss_coef": "{kl}",
    "kl_penalty": "{kl_estimator}",
    "epsilon": "{clip_low} and {clip_high}",
    "eps_clip": "{clip_low} and {clip_high}",
    "cliprange": "{clip_low} and {clip_high}",
    "clip_ratio": "{clip_low} and {clip_high}",
    "epsilon_high": "{clip_high}",
    "clip_ratio_high": "{clip_high}",
    "clip_ratio_low": "{clip_low}",
    "clip_ratio_c": "{clip_dual}",
    "cliprange_value": "{value_clip}",
    "vf_coef": "{value_coefficient}",
    "n": "{group}",
    "lam": "{gae_lambda}",
    "lambd": "{gae_lambda}",
    "adv_estimator": "{algorithm}, or {advantage}",
    "advantage_estimator": "{algorithm}, or {advantage}",
    "loss_type": "{algorithm}, or {aggregate}",
    "loss_agg_mode": "{aggregate}",
    "scale_rewards": "{scale} (none, batch or group)",
    "entropy_coeff": "{entropy}",
    "top_entropy_quantile": "{top_entropy}",
    "mask_truncated_completions": "{overlong_filter}",
    "ref_model_sync_steps": "{reference_every}",
    "sync_ref_model": "{reference_every}",
    "max_completion_length": "{max_tokens}",
    "max_new_tokens": "{max_tokens}",
    "generate_max_len": "{max_tokens}",
    "max_response_length": "{max_tokens}",
    "response_length": "{max_tokens}",
    "max_prompt_length": "{too_long}",
    "max_length": "{context} (from scratch), or {too_long}",
    "max_seq_length": "{context} (from scratch), or {too_long}",
    "reward": "{env}",
    "reward_funcs": "{env}",
    "reward_function": "{env}",
    "reward_fn": "{env}",
    "train_dataset": "{tasks}",
    "dataset_name": "{tasks}",
    "dataset": "{tasks}",
    "data": "{tasks}",
    "train_files": "{tasks}",
    "val_files": "{eval_tasks}",
    "eval_dataset": "{eval_tasks}",
    "input_key": "{fields.prompt}",
    "prompt_key": "{fields.prompt}",
    "label_key": "{fields.answer}",
    "model_name_or_path": "{model}",
    "pretrain": "{model}",
    "output_dir": "{out}",
    "save_path": "{out}",
    "save_steps": "{save_every}",
    "save_freq": "{save_every}",
    "save_total_limit": "{keep}",
    "eval_steps": "{eval_every}",
    "test_freq": "{eval_every}",
    "warmup_steps": "{warmup}",
    "lr_scheduler_type": "{schedule}",
    "lr_scheduler": "{schedule}",
    "max_norm": "{max_grad_norm}",
    "clip_grad": "{max_grad_norm}",
    "grad_clip": "{max_grad_norm}",
    "adam_beta1": "{betas}",
    "adam_betas": "{betas}",
    "bf16": "{precision} bfloat16",
    "fp16": "{precision} bfloat16",
    "dtype": "{precision}",
    "use_vllm": "{engine} vllm",
    "vllm_gpu_memory_utilization": "{engine_cache}",
    "completion_only_loss": "{mask_prompt}",
    "assistant_only_loss": "{mask_prompt}",
    "resume_from_checkpoint": "{resume}",
    "correct": "{success}",
    "warmup_ratio": "{warmup} (a number of updates)",
    "importance_sampling_level": "{ratio} (token, or sequence-mean as in GSPO)",
    "num_generations_eval": "{eval_samples}",
    "entropy_coef": "{entropy}",
    "use_adaptive_entropy": "{entropy_target}",
    "delta": "{clip_dual}",
    "reward_weights": "{part_weights}",
    "multi_objective_aggregation": "{advantage} decoupled",
    "norm_adv_by_std_in_grpo": "{scale}",
    "policy_loss": "{algorithm}, or {surrogate}",
    "loss_mode": "{algorithm}, or {surrogate}",
    "use_kl_in_reward": "{kl_where} reward",
    "kl_loss_type": "{kl_estimator}",
    "kl_ctrl": "{kl_control}",
    "horizon": "{kl_horizon}",
    "steps_per_generation": "{minibatches} (how many per step)",
    "generation_batch_size": "{slots}",
    "max_num_seqs": "{slots}",
    "per_device_eval_batch_size": "{slots}",
    "val_batch_size": "{eval_limit}",
    "ppo_micro_batch_size": "{tokens_per_microbatch}",
    "ppo_micro_batch_size_per_gpu": "{tokens_per_microbatch}",
    "micro_batch_size_per_gpu": "{tokens_per_microbatch}",
    "log_prob_micro_batch_size": "{tokens_per_microbatch}",
    "log_prob_micro_batch_size_per_gpu": "{tokens_per_microbatch}",
    "ppo_max_token_len_per_gpu": "{tokens_per_microbatch}",
    "total_epochs": "{epochs} (sft) or {steps} (rl)",
    "total_training_steps": "{steps}",
    "num_episodes": "{steps}",
    "lr_warmup_steps": "{warmup}",
    "lr_warmup_steps_ratio": "{warmup} (a number of updates)",
    "warmup_style": "{schedule}",
    "lr_scheduler_kwargs": "{schedule}",
    "min_lr_ratio": "{schedule}",
    "adam_beta2": "{betas}",
    "eval_strategy": "{eval_every}",
    "val_before_train": "{eval_every}",
    "save_strategy": "{save_every}",
    "max_actor_ckpt_to_keep": "{keep}",
    "load_best_model_at_end": "{keep}",
    "resume_mode": "{resume}",
    "resume_from_path": "{resume}",
    "default_local_dir": "{out}",
    "experiment_name": "{out}",
    "run_name": "{out}",
    "use_peft": "{lora}",
    "lora_r": "{lora}",
    "lora_rank": "{lora}",
    "lora_target_modules": "{lora_targets}",
    "target_modules": "{lora_targets}",
    "use_dora": "{dora}",
    "use_rslora": "{rslora}",
    "load_in_4bit": "{quantize} nf4",
    "load_in_8bit": "{quantize} int8",
    "torch_dtype": "{precision}, or {frozen_weights}",
    "model_dtype": "{precision}, or {frozen_weights}",
    "router_aux_loss_coef": "{router_balance}",
    "freeze_vision_tower": "{train_vision}",
    "fsdp": "{shard}, with {processes}",
    "deepspeed": "{shard}, with {processes}",
    "strategy": "{shard}, with {processes}",
    "param_offload": "{shard}, or {lora}",
    "optimizer_offload": "{shard}, or {lora}",
    "activation_offloading": "{tokens_per_microbatch}",
    "n_gpus_per_node": "{processes}",
    "gradient_checkpointing": "{recompute} layers",
    "enable_gradient_checkpointing": "{recompute} layers",
    "gradient_checkpointing_kwargs": "{recompute} layers",
    "torch_compile": "{compiled}",
    "use_torch_compile": "{compiled}",
    "use_liger_kernel": "{compiled}",
    "use_liger": "{compiled}",
    "use_fused_kernels": "{compiled}",
    "truncation": "{too_long}",
    "truncation_mode": "{too_long}",
    "filter_overlong_prompts": "{too_long}",
    "filter_groups": "{dynamic_sampling}",
    "overlong_buffer": "{overlong_cache}",
    "max_assistant_turns": "{max_turns}",
    "max_user_turns": "{max_turns}",
    "max_tool_calling_iterations": "{max_tool_calls}",
    "custom_reward_function": "{env}",
    "reward_manager": "{env}",
    "compute_score": "{env}",
    "reward_model_path": "{reward_model}",
    "reward_model_name_or_path": "{reward_model}",
    "reward_pretrain": "{reward_model}",
    "chat_template_path": "{chat_template}",
    "custom_chat_template": "{chat_template}",
    "apply_chat_template": "{chat}",
    "system_prompt": "{system}",
    "dataset_text_field": "{fields.response}, where rows have a prompt too; or messages",
    "dataset_config": "{tasks} NAME:CONFIGURATION",
    "dataset_train_split": "{split}",
    "dataset_split": "{split}",
    "input_template": "{prompt_template}",
    "teacher_model_name_or_path": "{teacher}",
    "vllm_mode": "{engine} vllm, with {replicas} for processes of their own",
    "vllm_server_base_url": "{engines}, which posttrain engine --listen serves",
    "vllm_server_host": "{engines}, which posttrain engine --listen serves",
    "vllm_server_port": "{engines}, which posttrain engine --listen serves",
    "gpu_memory_utilization": "{engine_cache}",
    "vllm_importance_sampling_correction": "{correction}",
    "vllm_importance_sampling_mode": "{correction}",
    "vllm_importance_sampling_cap": "{correction_cap}",
    "vllm_importance_sampling_clip_max": "{correction_cap}",
    "rollout_correction": "{correction}",
    "tis_imp_ratio_cap": "{correction_cap}",
    "label_smoothing": "{smoothing}",
    "f_divergence_type": "{divergence}",
    "ld_alpha": "{tail}",
    "use_weighting": "{policy_weight}",
    "rpo_alpha": "{imitation}",
    "loss_weights": "{preference} and {imitation}",
    "simpo_gamma": "{margin}",
    "desirable_weight": "{desirable}",
    "undesirable_weight": "{undesirable}",
    "reference_free": "{algorithm} simpo, cpo or orpo",
    "center_rewards_coefficient": "{size_penalty}",
    "data_seed": "{seed}",
    "use_cpu": "{device} cpu",
    "no_cuda": "{device} cpu",
    "max_tokens_per_turn": "{max_tokens}",
    "lmbda": "{algorithm}: all rows of distill learn from the student's own samples",
    "report_to": "{track}",
    "logger": "{track}",
    "use_wandb": "{track} wandb",
    "wandb": "{track} wandb",
    "swanlab": "{track} swanlab",
    "wandb_project": "{track_project}",
    "project_name": "{track_project}",
    "callbacks": "{hook}",
    "ddp_timeout": "{collective_timeout}",
    "nccl_timeout": "{collective_timeout}",
}
"""A name in TRL, verl, OpenRLHF or Search-R1 -> the options, in braces, that mean it here."""


OPTION = re.compile(r"\{([\w.]+)\}")


def _alike(names: str, answer: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), answer)


ANSWERS = {
    **_alike(
        "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo",
        "a run stays on this machine; a checkpoint is a Hugging Face folder, which hf upload OWNER/NAME FOLDER publishes",
    ),
    **_alike(
        "logging_dir",
        "every run writes TensorBoard's files and metrics.jsonl: tensorboard --logdir RUN/tensorboard",
    ),
    **_alike(
        "logging_steps logging_first_step logging_strategy disable_tqdm",
        "every step is logged, in metrics.jsonl and for TensorBoard; {quiet} takes away the display",
    ),
    **_alike(
        "log_completions num_completions_to_print log_unique_prompts log_val_generations rollout_data_dir "
        "validation_data_dir",
        "every rollout is recorded: posttrain rollouts RUN prints them",
    ),
    **_alike(
        "packing eval_packing packing_strategy padding_free use_remove_padding pad_to_multiple_of group_by_length "
        "use_dynamic_bsz",
        "rows are always end to end without padding, and none sees another; {tokens_per_microbatch} bounds a "
        "micro-batch",
    ),
    **_alike(
        "use_kl_loss",
        "the coefficient decides whether there is a KL penalty: {kl} 0.001 and {kl_where} loss (0: none, and no reference)",
    ),
    **_alike(
        "min_p repetition_penalty generation_kwargs suppress_tokens do_sample",
        "training samples from the model's own distribution, or the gradient would be that of another: {temperature} and "
        "{stop} are all that may change",
    ),
    **_alike(
        "optim optimizer adam_epsilon",
        "updates are AdamW's, with {betas} and {weight_decay}; {trust_region} takes natural gradients",
    ),
    **_alike(
        "dataset_num_proc dataloader_num_workers dataset_kwargs filter_overlong_prompts_workers preprocessing_num_workers",
        "rows are read as they are needed, of a file that is converted once: there is nothing to set",
    ),
    **_alike(
        "shuffle shuffle_dataset",
        "each pass has an order of its own, which follows from {seed}",
    ),
    **_alike(
        "remove_unused_columns",
        "a reward gets all columns of its row in task",
    ),
    **_alike(
        "trust_remote_code external_lib",
        "no code that comes with a checkpoint is run",
    ),
    **_alike(
        "disable_dropout lora_dropout neftune_noise_alpha",
        "nothing is dropped or disturbed while a model learns here",
    ),
    **_alike(
        "precompute_ref_log_probs precompute_ref_batch_size",
        "the reference's log-probabilities of all rows are always computed once and kept",
    ),
    **_alike(
        "attn_implementation use_flash_attn flash_attn",
        "attention is chosen by what the model and the machine have",
    ),
    **_alike(
        "tensor_model_parallel_size vllm_tensor_parallel_size ulysses_sequence_parallel_size",
        "each engine holds the whole model: {replicas} makes several; {shard} deals out the learner's weights",
    ),
    **_alike(
        "nnodes num_machines num_processes",
        "{processes} are those of this machine; on several, start posttrain in each with torchrun",
    ),
    **_alike(
        "tools tool_config_path multi_turn interaction_config_path environment_factory",
        "tools and turns are an environment's: {env} my.py:play, a function that yields Turn(messages, tools=[...])",
    ),
    **_alike(
        "image_key video_key",
        'pictures are parts of messages: {"type": "image", "image": "cat.png"}',
    ),
    **_alike(
        "vllm_max_model_length max_model_len max_model_length",
        "the context is that of the model's config.json; {max_tokens} bounds a reply",
    ),
    **_alike(
        "model_init_kwargs override_config",
        "a model is its folder; {precision} and {device} define its computation",
    ),
}
"""A name there -> the answer where no option here is equivalent."""


_OF_VERBS = re.compile(r"(\{\w+\}) \((rl|sft)\) or (\{\w+\}) \((rl|sft)\)")
_OR = re.compile(r", or \{(\w+)\}$")


def is_foreign(word: str, known: Iterable[str]) -> bool:
    """Whether it is an option of another trainer, and none of these."""
    plain = _plain(word)
    return plain in {**ELSEWHERE, **ANSWERS} and plain not in [name.replace("-", "_") for name in known]


def _plain(word: str) -> str:
    return word.strip("-").replace("-", "_").rpartition(".")[2].lower()


def _of_this_verb(meant: str, names: Collection[str]) -> str:
    """Return the meaning, without options that only other verbs have."""

    def chosen(found: re.Match[str]) -> str:
        (one, of), (other, _) = found.group(1, 2), found.group(3, 4)
        rows, prompts = "rows" in names, "prompts" in names
        return found[0] if rows == prompts else one if prompts == (of == "rl") else other

    meant = _OF_VERBS.sub(chosen, meant)
    return _OR.sub("", meant) if (other := _OR.search(meant)) and other[1] not in names else meant


def suggestion(word: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?", or "; here it is ...", for a name that there is not; "" where nothing comes near.

    A word of the command line ("--stesp") is answered with one ("--steps").
    """
    plain = _plain(word)
    names = [name.replace("-", "_") for name in known]
    flags = word.startswith("--")

    def option(found: re.Match[str]) -> str:
        return "--" + found[1].replace("_", "-") if flags else found[1]

    meant = _of_this_verb(ELSEWHERE.get(plain, ""), names) if plain not in names else ""
    if any(name.partition(".")[0] in names for name in OPTION.findall(meant)):
        return "; here it is " + OPTION.sub(option, meant)
    if plain in ANSWERS and plain not in names:
        return "; " + OPTION.sub(option, ANSWERS[plain])
    return re.sub(r"'(\w+)'", option, near(plain, names)) if flags else near(plain, names)
