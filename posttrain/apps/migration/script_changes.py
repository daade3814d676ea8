"""Changes that a script of TRL makes otherwise than by options: of tokenizer, model, trainer, loss. Each is a line."""

from __future__ import annotations

import ast
import re

from posttrain.apps.migration.foreign_run import ForeignRun, shown
from posttrain.apps.migration.script_names import name_of
from posttrain.apps.migration.script_values import ScriptValues

_OF_TRAINERS = {
    "formatting_func": "it makes a text of each row, all of which is trained: write these texts to a file with the column "
    'text, or messages to one with the column messages, with mask = "all"',
    "data_collator": 'it decides which tokens are trained: here mask does ("assistant": replies, "all": every token)',
    "optimizers": "optimizer, optimizer_options and schedule make them here: set those of the script",
    "optimizer_cls_and_kwargs": "optimizer (MODULE:CLASS) and optimizer_options are its equal: set them",
    "compute_loss_func": "the loss is the algorithm's here: a component of your own replaces it (docs/guides/algorithms.md)",
    "rollout_func": "env my.py:play, a generator function, makes episodes here (docs/guides/environments.md)",
    "callbacks": "one that changes or ends the training has no counterpart; hook my.py:NAME is called after each step",
    "model_init": "the recipe starts from model: name it",
}
"""Arguments of a trainer that change what is learned -> what to do. Others of these are read, or have no effect on it."""
_NO_EFFECT = {
    *("compute_metrics", "preprocess_logits_for_metrics", "dataset_num_proc", "reward_processing_classes"),
    *("eval_dataset", "train_dataset", "model", "args", "ref_model", "reward_funcs", "peft_config", "tools"),
    *("environment_factory", "processing_class", "tokenizer", "quantization_config", "ref_adapter_name"),
    *("model_adapter_name", "max_seq_length", "max_length", "max_prompt_length", "packing", "dataset_text_field"),
    *("beta", "loss_type", "generate_during_eval", "is_encoder_decoder", "dataset_kwargs"),
}
_CALLS = {
    "add_special_tokens": "a model here keeps its tokenizer: add the tokens to the folder of the model, and train that",
    "add_tokens": "a model here keeps its tokenizer: add the tokens to the folder of the model, and train that",
    "resize_token_embeddings": "the model has more tokens there: save it with its tokenizer in a folder, and train that",
    "setup_chat_format": "it adds ChatML and its tokens: save model and tokenizer in a folder, and train that; or, with "
    "the tokens that it has, chat_template chatml",
    "clone_chat_template": "it copies a template and its tokens: save model and tokenizer in a folder, and train that",
    "get_chat_template": "it gives the tokenizer another template: write that to a file, and set chat_template",
    "train_on_responses_only": 'replies alone are trained: give rows of messages, of which mask = "assistant" trains those',
    "set_transform": "rows are read as they are: write those that it makes to a file",
    "add_callback": _OF_TRAINERS["callbacks"],
    "add_adapter": "adapters are lora and its options here: set them",
    "load_adapter": "merge the adapter into the model, and give this as model",
    "freeze": "lora is what keeps weights from training here",
    "create_optimizer_and_scheduler": "optimizer and schedule make them here",
}
"""Last names of calls that change what is learned -> what to do."""
_ATTRIBUTES = {
    "chat_template": "write the template to a file, and set chat_template to it",
    "requires_grad": "lora is what keeps weights from training here; without it all weights learn",
    "compute_loss": _OF_TRAINERS["compute_loss_func"],
    "_compute_loss": _OF_TRAINERS["compute_loss_func"],
    "eos_token": "the end of a reply is that of the model's folder here: set it there",
    "bos_token": "the beginning token is that of the model's folder here: set it there",
    "eos_token_id": "the end of a reply is that of the model's folder here: set it there",
    "add_eos_token": "the end token is trained here wherever a reply ends",
    "truncation_side": "the beginning of a long prompt is cut here, and the end of a long row: see too_long",
    "model_max_length": "max_length bounds a row here: set it",
}
"""Attributes that change what is learned -> what to do, where a script sets them of anything but its options."""
_PLAIN_COLLATORS = ("DataCollatorForSeq2Seq", "DataCollatorForLanguageModeling", "DataCollatorWithPadding")
"""Collators that only lay rows together: every token, or those that the row says, is trained."""
_PADDING = ("padding_side", "pad_token", "pad_token_id")


def note_changes(script: ScriptValues, tree: ast.Module, trainer: ast.Call | None, run: ForeignRun) -> None:
    """Add a line for each change that the options of the recipe do not show."""
    own = {name for name in script.classes if any(base.endswith("Trainer") for base in script.bases[name])}
    for name in sorted(own & {part for call in script.calls for part in script.lineage(_last(call))}):
        methods = [method for method in script.methods[name] if not method.startswith("__") or method == "__init__"]
        if methods:
            told = (
                "none of it is in the recipe: a loss is a component here (docs/guides/algorithms.md), a reward is env"
            )
            run.first.append(f"{name}, a trainer of the script's own, which defines {', '.join(methods[:8])}: {told}")
    if trainer is not None:
        _note_arguments(script, trainer, run)
    seen: set[str] = set()
    for call in script.calls:
        name, branch = _last(call), script.condition(script.branch_of[call])
        action = _CALLS.get(name)
        if action is not None and name not in seen and branch is not None and name not in script.functions:
            seen.add(name)
            run.first.append(f"{_short(call)} (line {call.lineno}): {action}")
        for word in call.keywords if "Tokenizer.from_pretrained" in name_of(call) else []:
            if word.arg in _ATTRIBUTES and word.arg not in seen:
                seen.add(word.arg)
                run.first.append(f"{word.arg} = {_short(word.value)} of the tokenizer: {_ATTRIBUTES[word.arg]}")
    for owner, name, value, where, _ in script.attributes:
        called = ast.unparse(owner)
        if name in _ATTRIBUTES and name not in seen and script.condition(where) is not None and called != "self":
            seen.add(name)
            run.first.append(f"{called[:60]}.{name} = {_short(value)}: {_ATTRIBUTES[name]}")
        elif name in _PADDING and "padding" not in seen:
            seen.add("padding")
            run.notes.append(
                f"{called[:60]}.{name} = {_short(value)}: nothing is padded here, and no token is a padding token"
            )
    for call in script.calls:
        if (
            re.search(r"Peft\w+\.from_pretrained$", name_of(call))
            and script.condition(script.branch_of[call]) is not None
        ):
            run.first.append(f"{_short(call)}: merge the adapter into the model, and give this as model")
    _note_patches(tree, run)


def _note_arguments(script: ScriptValues, trainer: ast.Call, run: ForeignRun) -> None:
    for word in trainer.keywords:
        value, made = script.value(word.value), script.origin(word.value)
        if word.arg is None or value is None or value == []:
            continue
        if word.arg == "data_collator" and isinstance(made, ast.Call) and _last(made) in _PLAIN_COLLATORS:
            continue
        text = _OF_TRAINERS.get(word.arg)
        if text is not None:
            run.first.append(f"{word.arg} = {_short(script.origin(word.value))}: {text}")
        elif word.arg not in _NO_EFFECT:
            run.notes.append(
                f"{word.arg} = {_short(word.value)}, an argument of the trainer: no counterpart in posttrain"
            )
    _note_tokenizer(script, trainer, run)


def set_mask(script: ScriptValues, run: ForeignRun) -> None:
    """Add which tokens are trained, where a collator or Unsloth's function decides it."""
    for call in script.calls:
        if _last(call) in ("train_on_responses_only", "DataCollatorForCompletionOnlyLM") and run.trainer == "sft":
            run.options["assistant_only_loss"], run.names["assistant_only_loss"] = True, _last(call)


def _note_tokenizer(script: ScriptValues, trainer: ast.Call, run: ForeignRun) -> None:
    """Add a line where the tokenizer is not that of the model's own folder."""
    words = {word.arg: word.value for word in trainer.keywords}
    given = words.get("processing_class", words.get("tokenizer"))
    load, _ = script.source(given) if given is not None else (None, [])
    if load is None or "Tokenizer" not in name_of(load):
        return
    first = (
        load.args[0] if load.args else next((w.value for w in load.keywords if "name_or_path" in (w.arg or "")), None)
    )
    place, model = script.value(first), run.options.get("model_name_or_path")
    if first is not None and place != model and isinstance(place, str) and isinstance(model, str):
        run.first.append(f"the tokenizer is that of {shown(place)}: here a model has its own; save both in one folder")


def _note_patches(tree: ast.Module, run: ForeignRun) -> None:
    """Add a line for each method of a trainer's class that the script replaces."""
    targets = (target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets)
    for target in targets:
        if isinstance(target, ast.Attribute) and ast.unparse(target.value).endswith("Trainer"):
            run.first.append(f"{ast.unparse(target)}, which the script replaces: none of it is in the recipe")


def _last(call: ast.Call) -> str:
    return name_of(call).rpartition(".")[2]


def _short(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
