"""Recipes from verl's supervised fine-tuning."""

from __future__ import annotations

from posttrain.apps.migration.recipe_draft import RecipeDraft
from posttrain.apps.migration.shared_rules import FIRST_RATE, adapters, frequency, kept_checkpoints, optimizer

DECAYED = "same value; of all weights there, of matrices alone here"


def verl_sft(draft: RecipeDraft, rows: int | None) -> None:
    """Write the lines of supervised fine-tuning: of sft_trainer, or of fsdp_sft_trainer, its predecessor."""
    _columns(draft)
    if draft.read("data.val_files"):
        draft.note("data.val_files", "held_out keeps a share of tasks for evaluation")
    draft.same("model", "model.partial_pretrain" if draft.run.trainer == "fsdp_sft_trainer" else "model.path")
    size = draft.count("data.train_batch_size")
    draft.head.append(f"An update: {size} rows.")
    draft.put("rows", size, f"{draft.origin('data.train_batch_size')}: rows of an update")
    draft.same(
        "schedule", "optim.lr_scheduler" if "optim.lr_scheduler" in draft.defaults else "optim.lr_scheduler_type"
    )
    most, passes = draft.number("trainer.total_training_steps"), draft.number("trainer.total_epochs")
    rows = limited(draft, rows)
    updates = None if rows is None else int(rows // size * passes)
    if most:
        updates = both_ends(draft, int(most), updates)
    else:
        short = "the last rows of a pass, fewer than an update has, are left out there"
        draft.put("epochs", float(passes), f"{draft.origin('trainer.total_epochs')}: same meaning; {short}")
    draft.same("lr", "optim.lr")
    optimizer(draft, "optim")
    draft.same("betas", "optim.betas")
    draft.same("weight_decay", "optim.weight_decay", DECAYED)
    draft.same("max_grad_norm", "optim.clip_grad")
    if "optim.warmup_steps_ratio" in draft.run.options:  # the name of older versions
        draft.run.options["optim.lr_warmup_steps_ratio"] = draft.run.options.pop("optim.warmup_steps_ratio")
    first, share = draft.number("optim.lr_warmup_steps"), draft.number("optim.lr_warmup_steps_ratio")
    if first is not None and first > 0:
        draft.put("warmup", int(first), f"{draft.origin('optim.lr_warmup_steps')} updates{FIRST_RATE}")
    elif share and updates is None:
        draft.differs(draft.origin("optim.lr_warmup_steps_ratio"), f"warmup = {share:g} x all updates")
    elif share and updates is not None:
        told = f"{draft.origin('optim.lr_warmup_steps_ratio')} of {updates} updates{FIRST_RATE}"
        draft.put("warmup", int(share * updates), told)
    if draft.read("model.enable_gradient_checkpointing"):
        draft.put("recompute", "layers", f"{draft.origin('model.enable_gradient_checkpointing')}: memory only")
    draft.put("precision", draft.fitted("precision", draft.read("engine.dtype", "bfloat16")), "verl's type of products")
    draft.same("max_length", "data.max_length")
    draft.put("too_long", draft.fitted("too_long", draft.read("data.truncation")), draft.origin("data.truncation"))
    if draft.read("data.truncation") == "left":
        draft.differs(
            draft.origin("data.truncation"), "rows keep their end there; here a demonstration keeps its start"
        )
    for name in ("engine.model_dtype", "model.fsdp_config.model_dtype"):
        stored(draft, name, draft.read("model.lora_rank"))
    adapters(draft, "model.lora_rank", "model.lora_alpha", "model.target_modules")
    draft.same("seed", "trainer.seed")
    frequency(draft, "save_every", "trainer.save_freq", 1)
    frequency(draft, "eval_every", "trainer.test_freq", 1)
    kept_checkpoints(draft, "trainer.max_ckpt_to_keep")
    draft.same("out", "trainer.default_local_dir")


def both_ends(draft: RecipeDraft, most: int, of_passes: float | None) -> int:
    """Write the steps of a run that ends at total_training_steps or after total_epochs, whichever comes first; return
    those that verl's warm-up is a share of: total_training_steps.
    """
    told, passes = draft.origin("trainer.total_training_steps"), draft.origin("trainer.total_epochs")
    if of_passes is None:
        ends = "the run ends after these passes there, if that is before total_training_steps: import with --rows ROWS"
        draft.differs(passes, ends)
        draft.put("steps", most, f"{told}: at most so many there")
    elif of_passes < most:
        steps = max(1, int(of_passes))
        draft.put("steps", steps, f"{passes}: they end before {told}")
        if draft.lines.get("schedule", (draft.own_default("schedule"),))[0] != "constant":
            draft.differs(told, f"the learning rate falls over these steps there, over the {steps} of the run here")
    else:
        draft.put("steps", most, f"{told}: same meaning")
    return most


def stored(draft: RecipeDraft, name: str, adapted: object) -> None:
    """Write the type in which weights are stored and updated, or with LoRA, stored."""
    if draft.given(name):
        rounded = "same type; updates are rounded stochastically here"
        draft.same("frozen_weights" if adapted else "weights", name, "same meaning" if adapted else rounded)


def _columns(draft: RecipeDraft) -> None:
    """Write the columns: those of messages, or of prompts and responses, and whether the model thinks."""
    draft.same("fields.messages", "data.messages_key")
    if draft.lines.get("fields.messages", ("",))[0] == "messages":
        del draft.lines["fields.messages"]
    thinks = draft.read("data.enable_thinking_default")
    if isinstance(thinks, bool):
        told = f"{draft.origin('data.enable_thinking_default')}: same meaning"
        draft.put("chat_template_kwargs.enable_thinking", thinks, told)
    draft.same("fields.prompt", "data.prompt_key")
    draft.same("fields.response", "data.response_key")
    for option, name in (("prompt", "prompt_dict_keys"), ("response", "response_dict_keys")):
        keys = draft.read(f"data.{name}")
        if isinstance(keys, list) and len(keys) == 1 and f"fields.{option}" in draft.lines:
            column = draft.lines[f"fields.{option}"][0]
            draft.put(
                f"fields.{option}",
                f"{column}.{keys[0]}",
                f"{draft.origin(f'data.{name}')}: a dot reaches into a column",
            )
    if draft.read("data.multiturn.enable"):
        draft.lines.pop("fields.prompt", None)
        draft.lines.pop("fields.response", None)


def limited(draft: RecipeDraft, rows: int | None) -> int | None:
    """Write how many of the rows are read, and return it."""
    most = int(max(0, draft.number("data.train_max_samples", 0)))  # -1: all
    if most and draft.parts:
        draft.differs(draft.origin("data.train_max_samples"), "limit is of each part here: set it in each table")
    elif most:
        draft.put("limit", most, f"{draft.origin('data.train_max_samples')}: the first ones here")
    return min(rows, most) if rows and most else rows
