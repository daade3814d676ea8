"""Recipes from TRL's configurations. Defaults are those of TRL 1.16 and of transformers 5.17's TrainingArguments.

    W    processes    b    per_device_train_batch_size    a    gradient_accumulation_steps    s    steps_per_generation

An update learns from b W a rows, which of GRPO are replies; s / a updates share what one generation of b W s replies gives.
"""

from __future__ import annotations

import math
import re
from typing import Any

from posttrain.apps.migration.foreign_run import shown
from posttrain.apps.migration.recipe_draft import NEVER, RecipeDraft
from posttrain.apps.migration.shared_rules import (
    adapters,
    clips,
    devices_of,
    engine,
    held_out,
    kept_checkpoints,
    moving_reference,
    split_of,
    steps_of,
    strategies,
    trackers,
)
from posttrain.apps.migration.trl_given_responses import given_responses, warm_up_of
from posttrain.core.types import UserError

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "seed": 42,
    "save_steps": 500,
    "save_total_limit": NEVER,  # all of them
    "dataset_train_split": "train",
    "gradient_checkpointing": True,
    "bf16": True,
}
_LORA: dict[str, dict[str, Any]] = {
    "use_peft": {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
    "LoraConfig": {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0},
    "get_peft_model": {
        "lora_r": 16,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    },
}
"""Source of LoRA's settings -> their defaults: TRL's ModelConfig for a command, PEFT or Unsloth for a script."""
_ROLLOUTS = {
    "learning_rate": 1e-6,
    "num_generations": 8,
    "max_completion_length": 512,
    "temperature": 1.0,
    "num_iterations": 1,
    "epsilon": 0.2,
    "beta": 0.0,
}
_REFERENCE = {"ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6}
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {
        **COMMON,
        **_ROLLOUTS,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "use_bias_correction_kl": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        **_REFERENCE,
        "top_entropy_quantile": 1.0,
    },
    "rloo": {**COMMON, **_ROLLOUTS, "num_generations": 2, "beta": 0.05, **_REFERENCE},
    "dpo": {
        **COMMON,
        "learning_rate": 1e-6,
        "beta": 0.1,
        "loss_type": ["sigmoid"],
        "label_smoothing": 0.0,
        "max_length": 1024,
        **_REFERENCE,
    },
    "kto": {**COMMON, **_REFERENCE, "learning_rate": 1e-6, "beta": 0.1, "loss_type": "kto", "max_length": 1024},
    "orpo": {**COMMON, "learning_rate": 1e-6, "beta": 0.1, "max_length": 1024},
    "cpo": {**COMMON, "learning_rate": 1e-6, "beta": 0.1, "loss_type": "sigmoid", "cpo_alpha": 1.0, "simpo_gamma": 0.5},
    "sft": {**COMMON, "learning_rate": 2e-5, "max_length": 1024, "loss_type": "nll"},
    "reward": {**COMMON, "learning_rate": 1e-4, "max_length": 1024},
}
_BITS = ("load_in_4bit", "load_in_8bit")
_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
_LEARNED = (
    *("rpo_alpha", "max_prompt_length", "center_rewards_coefficient", "optim_args", "loss_weights", "ref_model"),
    *(
        "multi_objective_aggregation",
        "use_adaptive_entropy",
        "entropy_target",
        "entropy_coef_min",
        "entropy_coef_max",
        "entropy_coef_delta",
    ),
    *("min_p", "top_p", "top_k", "repetition_penalty", "generation_kwargs", "suppress_tokens", "neftune_noise_alpha"),
    *(
        "reward_clip_range",
        "lr_scheduler_kwargs",
        "load_best_model_at_end",
        "reference_free",
        "train_sampling_strategy",
    ),
)
"""Options with an answer in the table of names that change what is learned."""
_QUIET = re.compile(
    r"(log|hub_|push_|dataloader_|ddp_|fsdp|deepspeed|accelerator|vllm_(?!importance)|save_|eval_|include_|skip_|report|"
    r"torch_|use_(transformers|liger|cpu|mps|ipex|legacy|reentrant|bnb)|tf32|bf16_|fp16_|half_|parallel|metric_for|"
    r"greater_is|generate_during|do_|ignore_data|restore_|debug|past_index|local_rank|jit_|dataset_batch|dataset_num|"
    r"num_proc|cache_|ds3_|pad_to|padding|wandb|trackio|project|overwrite|auto_find|disable_tqdm|remove_unused|run_name|"
    r"attn_implementation|inference_mode|trust_remote|lora_task|bnb_4bit_(compute|quant_storage|use_double)|no_cuda|activation_off|hf_|"
    r"gradient_checkpointing|optim_target|device|seed|data_seed|full_determinism|precompute|output_dir|resume|"
    r"average_tokens|eval|dataset_name|model_name_or_path|per_device_eval|num_generations_eval|max_model_length|tokenizer_name|WANDB|callbacks|token$)"
)
"""Options that change nothing that is learned: where and how fast it runs, what is shown and kept."""
_SERVER = ("vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port")
SPACE = "; a reply keeps its leading space here, which TRL's decoding drops with SentencePiece tokenizers"
VERBS_OF = {"grpo": "rl", "rloo": "rl", "sft": "sft", "reward": "reward-model"}  # the others: prefer
_WITH_DROPOUT = ("grpo", "rloo", "sft")  # trainers that drop unless they are told not to
_AGGREGATES = {
    "grpo": ("sequence-mean", "mean of each reply's mean, 1 / (B n_i)"),
    "bnpo": (
        "token-mean",
        "mean over the tokens of the update; TRL averages within each micro-batch, so its size matters",
    ),
    "dapo": ("token-mean", "mean over all tokens, 1 / sum n_j"),
    "dr_grpo": ("constant", "1 / (B max_completion_length)"),
}
_CORRECTIONS = {
    "token_truncate": ("truncate", "same meaning", ""),
    "sequence_truncate": ("sequence-truncate", "same meaning", ""),
    "sequence_mask": (
        "sequence-truncate",
        "the same weight, a product over the reply, up to the cap",
        "TRL leaves a reply with a larger weight out (weight 0); here its weight is the cap",
    ),
    "token_mask": (
        "icepop",
        "the same weight of a token between the bounds",
        "the same upper bound; here tokens below 1 / cap are left out too",
    ),
}
"""Mode of TRL -> the correction here, how it differs, and how its cap does."""
_NO_CAP = 1e6
_TURNS = 64  # replies of an episode by default
_OWN_ALGORITHMS = {"cispo": "cispo", "sapo": "sapo", "vespo": "vespo", "luspo": "luspo"}


def trl_recipe(draft: RecipeDraft, devices: int | None, rows: int | None) -> None:
    """Write the lines of a run of TRL."""
    trainer = draft.run.trainer
    draft.learned, draft.quiet = _LEARNED, _is_quiet
    _initial(draft)
    if draft.run.options.get("model_revision") == "main":
        draft.treated.add("model_revision")
    _data(draft, rows)
    draft.same("model", "model_name_or_path")
    processes = devices_of(draft, devices, need=True)
    (_rollouts if trainer in ("grpo", "rloo") else given_responses)(draft, processes, rows)
    draft.same("lr", "learning_rate")
    floor = draft.read("lr_scheduler_type") == "cosine_with_min_lr"
    draft.same("schedule", "lr_scheduler_type", "it ends at 0 here, and at min_lr there" if floor else "same meaning")
    for name in ("weight_decay", "max_grad_norm", "seed"):
        draft.same(name, name)
    _moments(draft)
    if draft.read("gradient_checkpointing"):
        draft.put("recompute", "layers", f"{draft.origin('gradient_checkpointing')}: same meaning; memory only")
    _precision(draft)
    _adapters(draft)
    kept_checkpoints(draft, "save_total_limit")
    draft.same("out", "output_dir")
    run_name = draft.read("run_name", draft.read("WANDB_NAME"))
    if isinstance(run_name, str) and "out" not in draft.lines:
        draft.put("out", f"runs/{run_name}", "run_name: trackers name a run after its folder")
    elif run_name:
        draft.note(f"run_name = {shown(run_name)}", "trackers name a run after its folder, out")
    trackers(draft, "report_to", "WANDB_PROJECT")


def _is_quiet(name: str) -> bool:
    return bool(_QUIET.match(name.rpartition(".")[2]))


def _initial(draft: RecipeDraft) -> None:
    """Read the type of weights out of model_init_kwargs."""
    given = draft.run.options.get("model_init_kwargs")
    if isinstance(given, dict):
        for name in ("dtype", "torch_dtype"):
            if isinstance(given.get(name), str):
                draft.run.options.setdefault(name, given[name])


def _moments(draft: RecipeDraft) -> None:
    """Write the betas and epsilon of Adam; other optimizers have none, or read them too."""
    kind = str(draft.run.options.get("optim") or "adamw_torch")
    first, second = draft.number("adam_beta1"), draft.number("adam_beta2")
    epsilon, given = draft.number("adam_epsilon", 1e-8), [name for name in _ADAM if draft.given(name)]
    if not ("adam" in kind or "lion" in kind):
        for name in given:
            draft.note(draft.origin(name), f"no effect: transformers does not give it to optim = {kind}")
        return
    if "lion" in kind and (first, second) == (0.9, 0.999):
        draft.differs("adam_beta2", "transformers gives 0.999 to Lion; here its own default, 0.99, stays")
    if (first, second) != (0.9, 0.999):
        draft.put("betas", [first, second], "adam_beta1, adam_beta2: same meaning")
    if epsilon != 1e-8 and "lion" not in kind:
        draft.put("optimizer_options.eps", epsilon, "adam_epsilon: same meaning")


def _precision(draft: RecipeDraft) -> None:
    """Write the type of products. TRL's is bfloat16 unless fp16 is chosen or bf16 is false."""
    told = "products in bfloat16, weights that learn in float32"
    stored = next((name for name in ("dtype", "torch_dtype") if draft.read(name) in ("bfloat16", "float16")), None)
    chosen = "fp16" if draft.read("fp16") else "bf16"
    draft.treated.add("bf16")
    if any(map(draft.read, _LORA)):
        quantized = any(map(draft.read, _BITS))
        told = (
            "products in bfloat16; adapters are float32 here"
            + ", and bfloat16 in TRL for a quantized model" * quantized
        )
    if stored is not None and any(map(draft.read, _LORA)):
        draft.put("precision", "bfloat16", f"{draft.origin(stored)}: {told}")
    elif stored is not None:
        told = f"weights that learn stay in float32 here; of TRL ({draft.origin(stored)}) they are rounded too"
        draft.put("precision", "bfloat16", told)
    elif draft.read(chosen):
        draft.put("precision", "bfloat16", f"{draft.origin(chosen)}: {told}")
        if draft.read("dtype") == "auto" and not any(map(draft.read, _LORA)):
            told = "weights that learn are float32 here; there of the checkpoint's type, in which updates are rounded"
            draft.differs(f"{draft.run.names.get('dtype', 'dtype')} = auto", told)


def _adapters(draft: RecipeDraft) -> None:
    """Write LoRA with the defaults of the command or of the script; without either, its options have no effect."""
    on = [name for name in _LORA if draft.read(name)]
    if not on:
        for name in [name for name in draft.run.options if name.startswith("lora_")]:
            draft.note(draft.origin(name), "no effect: TRL trains all weights without use_peft")
            draft.treated.add(name)
        return
    draft.defaults = {**draft.defaults, **_LORA[on[0]]}
    adapters(draft, "lora_r", "lora_alpha", "lora_target_modules", _BITS)
    if draft.read("load_in_4bit") and (kind := draft.read("bnb_4bit_quant_type", "nf4")) != "nf4":
        draft.differs(draft.origin("bnb_4bit_quant_type"), f"4 bits here are nf4, not {shown(kind)}")
        draft.put("quantize", "nf4", f"load_in_4bit: also 4 bits, but nf4, not {shown(kind)}")
    share = draft.number("lora_dropout")
    if share and draft.run.trainer not in _WITH_DROPOUT and draft.run.options.get("disable_dropout", True) is True:
        draft.note(draft.origin("lora_dropout"), "nothing is dropped here; nor there, where disable_dropout is true")
    elif share:
        told = "" if draft.given("lora_dropout") else f", {share:g}"
        draft.differs(f"{draft.origin('lora_dropout')}{told}", "nothing is dropped here while adapters learn")


def _data(draft: RecipeDraft, rows: int | None) -> None:
    name, configuration = draft.read("dataset_name"), draft.read("dataset_config")
    if isinstance(configuration, str) and isinstance(name, str):
        draft.put("tasks", f"{name}:{configuration}", "dataset_name and dataset_config")
    else:
        draft.tasks("dataset_name")
    split_of(draft, "dataset_train_split")
    draft.read("dataset_test_split")
    if VERBS_OF.get(draft.run.trainer) == "rl":
        draft.same("eval_tasks", "eval_dataset_name")
    elif draft.read("eval_dataset_name"):
        draft.note(draft.origin("eval_dataset_name"), "held_out keeps a share of tasks for evaluation")
    draft.read("eval_dataset_config")
    held_out(draft, "train_test_split", rows)
    draft.put("chat", False, "TRL trains on text as it is; rows of messages get the chat template all the same")


def _rollouts(draft: RecipeDraft, processes: int, rows: int | None) -> None:
    """Write the batch, the algorithm and the sampling of GRPO or RLOO."""
    prompts, together, passes, minibatches = _generations(draft, processes)
    updates = passes * minibatches
    steps = _steps(draft, prompts, together, updates, rows)
    warm_up_of(draft, updates, steps)
    strategies(draft, updates, None if rows is None else max(1, round(rows / prompts)))
    draft.same("max_tokens", "max_completion_length")
    draft.same("temperature", "temperature")
    for name, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0), ("repetition_penalty", 1)):
        if draft.read(name) not in (None, neutral):
            draft.differs(draft.origin(name), "training samples from the model's own distribution: left out")
    if draft.read("vllm_sampling_params") is not None or "vllm_sampling_params" in draft.run.options:
        told = "training samples from the model's own distribution: left out"
        draft.differs(f"vllm_sampling_params = {shown(draft.run.options['vllm_sampling_params'])}", told)
    _rewards(draft)
    (_grpo if draft.run.trainer == "grpo" else _rloo)(draft, updates)
    if draft.read("use_vllm"):
        engine(draft, "use_vllm", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")
        _server(draft)
        _correction(draft)
    for name in (
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max",
    ):
        draft.read(name)
    if draft.read("mask_truncated_completions"):
        draft.put("overlong_filter", True, "mask_truncated_completions: same meaning")


def _server(draft: RecipeDraft) -> None:
    """Write the address of a server that runs already: a URL there, or a host and a port."""
    mode, url, host, port = map(draft.read, _SERVER)
    named = [name for name in _SERVER if draft.given(name)]
    if mode == "colocate" or not named:
        return
    told = "start it with vllm serve, as the guide to vLLM tells, not with trl vllm-serve"
    address = url or f"http://{host or '127.0.0.1'}:{port or 8000}"
    draft.put("engine_url", [address], f"{', '.join(map(draft.origin, named))}: {told}")
    if shared := draft.lines.pop("processes", None):
        draft.note(
            f"{shared[0]} processes", "each needs a server of its own here: processes, with as many in engine_url"
        )


def _generations(draft: RecipeDraft, processes: int) -> tuple[int, int, int, int]:
    """Write and return the prompts of a step and of a generation, the passes of a step and its updates a pass."""
    batch, accumulated = draft.count("per_device_train_batch_size"), draft.count("gradient_accumulation_steps")
    group, passes = draft.count("num_generations"), draft.count("num_iterations")
    together = batch * processes
    given = draft.given("generation_batch_size") and draft.read("generation_batch_size") is not None
    size = draft.count("generation_batch_size") if given else 0
    per_generation = size / together if size else draft.count("steps_per_generation", accumulated)
    replies = together * max(per_generation, accumulated)
    prompts, minibatches = replies / group, max(1.0, per_generation / accumulated)
    factors = f"{batch} x {processes} processes x {max(per_generation, accumulated):g} steps"
    if prompts % 1 or minibatches % 1:
        raise UserError(
            f"their batch of {replies:g} replies ({factors}) is no whole number of groups of num_generations {group}, or of "
            "updates: give the number of their processes with --devices"
        )
    prompts, minibatches = int(prompts), int(minibatches)
    draft.head.append(
        f"A step: {prompts} prompts x {group} replies = {replies:g} rollouts, {passes * minibatches} "
        f"update{'s'[: passes * minibatches != 1]} of {replies / minibatches:g} rollouts."
    )
    draft.put("prompts", prompts, f"replies of a generation ({factors} = {replies:g}) / num_generations {group}")
    draft.put("group", int(group), f"{draft.origin('num_generations')}: same meaning")
    if minibatches > prompts:
        told = f"{minibatches} updates a pass: an update needs a whole group here, so {prompts}"
        draft.differs("steps_per_generation", told)
        minibatches = prompts
    told = "steps_per_generation / gradient_accumulation_steps: updates a pass"
    mixed = "; TRL deals the replies of a step out at random, here the replies to a prompt stay together"
    draft.put("minibatches", minibatches, told + mixed * (minibatches > 1))
    draft.put("epochs", int(passes), f"{draft.origin('num_iterations')}: same meaning")
    return prompts, max(1, int(together * per_generation / group)), int(passes), minibatches


def _steps(draft: RecipeDraft, prompts: int, together: int, updates: int, rows: int | None) -> int | None:
    most, passes = draft.number("max_steps"), draft.number("num_train_epochs")
    if most > 0:
        steps = math.ceil(most / updates)
        draft.put("steps", steps, f"{draft.origin('max_steps')} counts updates, of which a step has {updates}")
        return steps
    return steps_of(draft, passes, "num_train_epochs", prompts, rows, together)


def _rewards(draft: RecipeDraft) -> None:
    """Write the reward functions as a sum with their weights."""
    functions, weights = draft.read("reward_funcs"), draft.read("reward_weights")
    model = draft.read("reward_model_name_or_path")
    terms = [f if isinstance(f, tuple) else _named(str(f)) for f in _listed(functions)]
    terms += [("model", model)] if isinstance(model, str) else []
    fits = isinstance(weights, list) and len(weights) == len(terms) and all(type(w) in (int, float) for w in weights)
    numbers = weights if fits else [1] * len(terms)
    sum_of = [
        text if w == 1 else f"{text}*{w:g}"
        for (kind, text), w in zip(terms, numbers, strict=True)
        if kind == "function"
    ]
    _agent(draft, sum_of)
    models = [text for kind, text in terms if kind == "model"]
    if unknown := [text for kind, text in terms if kind == "unknown"]:
        are = "are missing from env: write functions" if len(unknown) > 1 else "is missing from env: write a function"
        file, them = draft.run.home or "rewards.py", "them" if len(unknown) > 1 else "it"
        draft.first.append(f"reward_funcs: {', '.join(unknown)} {are} in {file} and add {them}")
    if models:
        draft.put("reward_model", models, "reward model of reward_funcs; without env its score is the reward")
        if sum_of:
            told = f"TRL adds the score of {models[0]}, posttrain does not: write an environment that asks for it"
            draft.first.append(f"reward_funcs: {told}")
    if sum_of or not models:
        draft.put(
            "env",
            " + ".join(sum_of) or "trl:rewards.py:reward",
            f"reward_funcs{SPACE}" if sum_of else "reward_funcs: name yours",
        )
    if weights and not (sum_of and fits):
        told = "weights follow the terms of env: trl:rewards.py:f*0.5"
        draft.differs(draft.origin("reward_weights"), told)


def _agent(draft: RecipeDraft, sum_of: list[str]) -> None:
    """Add tools and their environment to the terms of env, and write the limits of their episodes."""
    found: list[str] = []
    for name in ("tools", "environment_factory"):
        draft.treated.add(name)
        value = draft.run.options.get(name)
        if isinstance(value, str) and value:
            found.append(f"{name}={value}")
        elif value:
            told = f"give it a name in a file and add it to env, trl:FILE.py:NAME,{name}=NAME"
            draft.note(f"{name} = {shown(value)}", told)
    most = draft.read("max_tool_calling_iterations")
    if not found:
        return
    if isinstance(most, int):
        found.append(f"max_tool_calling_iterations={most}")
    if not isinstance(most, int) or most >= _TURNS:
        told = "max_tool_calling_iterations + 1, for the last reply; TRL has no other limit"
        draft.put("max_turns", most + 1 if isinstance(most, int) else 1000, told)
    told = "sampled tokens of all replies here; TRL counts the tools' texts too"
    draft.put(
        "max_episode_tokens", draft.count("max_completion_length"), f"{draft.origin('max_completion_length')}: {told}"
    )
    draft.run.notes.append(
        "that no reward function compares the replies to a prompt: of episodes it gets one in a call"
    )
    home, settings = f"trl:{draft.run.home}:", ",".join(found)
    if sum_of and sum_of[-1].startswith(home) and "*" not in sum_of[-1]:
        sum_of[-1] += f",{settings}"
    else:
        sum_of.append(home + settings)


def _listed(functions: Any) -> list[Any]:
    return functions if isinstance(functions, list) else [] if functions is None else [functions]


def _named(name: str) -> tuple[str, str]:
    """Return a reward function of TRL's command line: one of its own, or a dotted path; a model has a slash."""
    if "/" in name:
        return "model", name
    module, _, function = name.rpartition(".")
    return "function", f"trl:{module}:{function}" if module else f"trl:{function}"


def _grpo(draft: RecipeDraft, updates: int) -> None:
    """Write the loss of GRPO in its variants."""
    kind, level = draft.word("loss_type"), draft.word("importance_sampling_level")
    low = draft.number("epsilon")
    high, dual = draft.number("epsilon_high", low) or low, draft.number("delta")
    if kind in _AGGREGATES:
        draft.put("algorithm", "grpo", f"GRPOTrainer; {draft.origin('loss_type')}: the lines below")
        aggregate, formula = _AGGREGATES[kind]
        draft.put("aggregate", aggregate, f"{draft.origin('loss_type')}: {formula}")
        clips(draft, updates, low, high, dual, "epsilon, epsilon_high, delta")
    elif kind in _OWN_ALGORITHMS:
        draft.put("algorithm", _OWN_ALGORITHMS[kind], f"{draft.origin('loss_type')}: same loss")
        _own_settings(draft, kind, updates, low, high)
    else:
        raise UserError(
            f"GRPO's loss_type {shown(kind)!r:.40} has no counterpart in posttrain: posttrain algorithms lists what there is"
        )
    if draft.lines["minibatches"][0] > 1 and kind in ("dapo", "cispo", "vespo"):
        told = "TRL divides by the tokens of a whole generation over its updates; posttrain by those of the update"
        draft.differs("loss_type", told)
    _ratio(draft, kind, level, updates)
    scale = draft.word("scale_rewards")
    draft.put(
        "scale", {True: "group", False: "none"}.get(scale, scale), f"{draft.origin('scale_rewards')}: same meaning"
    )
    if scale not in (False, "none"):
        draft.set("advantage.eps", 1e-4, "TRL divides by (std + 1e-4)")
    _penalties(draft, updates)


def _ratio(draft: RecipeDraft, kind: str, level: Any, updates: int) -> None:
    """Write the ratio: of each token, or one of the whole reply."""
    name = "importance_sampling_level"
    if level not in ("token", "sequence"):
        raise UserError(f"GRPO's {name} is token or sequence, not {shown(level)!r:.40}")
    if kind == "vespo":  # its weight is of the whole reply, whatever the level
        if level == "sequence":
            draft.note(draft.origin(name), "no effect on vespo, whose weight is of the whole reply")
        return
    if level == "sequence":
        told = "; with one update a step every ratio is 1, and it has no effect" * (updates == 1)
        draft.put("ratio", "sequence-mean", f"{draft.origin(name)}: GSPO's ratio{told}")
    elif kind in _AGGREGATES or kind == "luspo":
        draft.put("ratio", "token", f"{draft.origin(name)}: same meaning")


def _own_settings(draft: RecipeDraft, kind: str, updates: int, low: float, high: float) -> None:
    if kind == "cispo":
        if updates > 1:
            told = f"epsilon_high = {high:g} bounds the ratio itself; here 1 + clip_high does"
            draft.put("clip_high", max(0.0, high - 1), told)
        if high < 1:
            bound = "epsilon_high" if draft.given("epsilon_high") else "epsilon_high, not given: epsilon"
            told = "here none is bounded below 1. If 1 + it was meant, give epsilon_high + 1 there too"
            draft.first.append(
                f"{bound} = {high:g} bounds the ratio itself for cispo, so TRL multiplies every gradient by {high:g}; {told}"
            )
    if kind == "luspo":
        clips(draft, updates, low, high, None, "epsilon, epsilon_high")
    places = {
        "sapo_temperature_pos": "positive", "sapo_temperature_neg": "negative", "vespo_k_pos": "power",
        "vespo_lambda_pos": "decay", "vespo_k_neg": "negative_power", "vespo_lambda_neg": "negative_decay",
    }  # fmt: skip
    for name, place in places.items():
        if draft.given(name) and name.startswith(kind):
            draft.set(f"surrogate.{place}", float(draft.number(name)), f"{name}: same meaning")


def _penalties(draft: RecipeDraft, updates: int) -> None:
    """Write KL, entropy and the tokens that are learned from."""
    beta = draft.number("beta")
    draft.put("kl", float(beta), f"{draft.origin('beta')}: same meaning (0: no reference)")
    corrected = draft.read("use_bias_correction_kl")
    if beta:
        draft.put("kl_where", "loss", "TRL adds the KL to the loss of each token")
        draft.put("kl_estimator", "k3", "TRL's estimator")
        draft.put(
            "kl_weighed", bool(corrected), f"{draft.origin('use_bias_correction_kl')}: the estimate times the ratio"
        )
        if corrected and draft.read("importance_sampling_level") == "sequence":
            told = "the KL is weighed by the ratio of the token here, of the reply there"
            draft.differs("use_bias_correction_kl", told)
        moving_reference(draft, updates)
    if (share := draft.number("top_entropy_quantile")) != 1:
        draft.put("top_entropy", share, "top_entropy_quantile: same meaning")
    if entropy := draft.number("entropy_coef"):
        draft.put("entropy", entropy, "entropy_coef: same meaning")
    if (threshold := draft.number("off_policy_mask_threshold")) is not None and updates > 1:
        draft.put("off_policy_mask", threshold, "off_policy_mask_threshold: same meaning")


def _correction(draft: RecipeDraft) -> None:
    """Write the weight for vLLM's probabilities. TRL's bounds are (none, clip_max) unless clip_min is given."""
    mode, name = draft.word("vllm_importance_sampling_mode"), "vllm_importance_sampling_clip_max"
    older = "vllm_importance_sampling_cap"  # where it is given, TRL takes it in place of the newer one
    if draft.run.options.get(older) is not None:
        draft.run.options[name], draft.run.names[name] = draft.run.options.pop(older), older
    if not draft.read("vllm_importance_sampling_correction"):
        return
    kind, told, beyond = _CORRECTIONS.get(mode, ("truncate", "not known here: the nearest kind", ""))
    draft.put("correction", kind, f"{draft.origin('vllm_importance_sampling_mode')}: {told}")
    cap = None if draft.given(name) and draft.read(name) is None else draft.number(name)
    if cap is None:
        draft.put("correction_cap", _NO_CAP, f"{draft.origin(name)}: no bound")
    elif cap > 1:
        draft.put("correction_cap", float(cap), f"{draft.origin(name)}: {beyond or 'same meaning'}")


def _rloo(draft: RecipeDraft, updates: int) -> None:
    draft.put("algorithm", "rloo", "RLOOTrainer: mean of the others as baseline, KL in the reward")
    draft.put("kl", float(draft.number("beta")), f"{draft.origin('beta')}: same meaning")
    draft.put("kl_where", "reward", "RLOO subtracts the KL from the reward")
    if updates > 1:
        low = draft.number("epsilon")
        draft.put("surrogate", "clip", "RLOOTrainer clips the ratio of the whole reply")
        draft.put("ratio", "sequence-sum", "RLOOTrainer: the product of the ratios of a reply's tokens")
        draft.put(
            "aggregate", "sequence-mean", "one ratio and one loss for all tokens of a reply, whose mean is the reply's"
        )
        clips(draft, updates, low, draft.number("epsilon_high", low) or low, None, "epsilon, epsilon_high")
    for name in ("epsilon", "epsilon_high", "ref_model_sync_steps", "ref_model_mixup_alpha"):
        draft.read(name)
    if draft.read("normalize_advantages"):
        told = "normalize_advantages: by the standard deviation of the step's rewards here, of its advantages there"
        draft.put("scale", "batch", told)
