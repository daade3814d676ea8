"""The model of a TRL script: its adapters, its quantization and the type of its weights."""

from __future__ import annotations

import ast
import re

from posttrain.apps.migration.foreign_run import ForeignRun
from posttrain.apps.migration.script_names import name_of
from posttrain.apps.migration.script_values import ScriptValues

_LORA = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
}
_NOT_OF_LORA = (
    "task_type",
    "inference_mode",
    "model",
    "random_state",
    "use_gradient_checkpointing",
    "loftq_config",
    "max_seq_length",
    *("finetune_vision_layers", "finetune_language_layers", "finetune_attention_modules", "finetune_mlp_modules"),
)
"""Words of LoRA's configuration, or of Unsloth's function, that change nothing for models of text."""
_NO_CHANGE = {"bias": "none", "init_lora_weights": True, "use_dora": False, "use_rslora": False}
"""Words of LoRA's configuration -> the value with which they change nothing."""


def take_adapters(script: ScriptValues, last: dict[str, ast.Call], run: ForeignRun, trainer: str) -> None:
    """Add LoRA and the types of weights that a script gives to the model, not to the trainer."""
    loads = {word.arg for call in (*_loads_of_models(script), last.get(trainer)) if call for word in call.keywords}
    bits = last.get("BitsAndBytesConfig")
    if bits is not None and not {"quantization_config", "model_init_kwargs", None} & loads and last.get(trainer):
        run.notes.append(f"{name_of(bits)} (line {bits.lineno}), which no model gets: nothing is quantized")
        bits = None
    for call in (bits, *_loads_of_models(script)):
        given = {} if call is None else script.keywords(call)
        run.options |= {word: given[word] for word in ("load_in_4bit", "load_in_8bit") if word in given}
        if given.get("load_in_4bit") and call is not None and not name_of(call).startswith("Fast"):
            run.options["bnb_4bit_quant_type"] = given.get("bnb_4bit_quant_type", "fp4")
            run.names["bnb_4bit_quant_type"] = "bnb_4bit_quant_type of the model"
    unsloth = next((call for call in _loads_of_models(script) if name_of(call).startswith("Fast")), None)
    if unsloth is not None:
        given = script.keywords(unsloth)
        full = given.get("full_finetuning") is True or given.get("load_in_8bit") or given.get("load_in_16bit")
        run.options.setdefault("load_in_4bit", not full)
        if "max_seq_length" in given and run.trainer not in ("grpo", "rloo"):
            run.options.setdefault("max_seq_length", given["max_seq_length"])
    made = last.get("get_peft_model")
    own = made is not None and any(word.arg == "r" for word in made.keywords)
    own = own or (made is not None and name_of(made).startswith("Fast"))
    config = last.get("LoraConfig")
    if config is not None and not _is_given(script, last.get(trainer)):
        run.notes.append(
            f"{name_of(config)} (line {config.lineno}), which the trainer does not get: all weights are trained"
        )
        config = None
    for turned_on, lora in (("LoraConfig", config), ("get_peft_model", made if own else None)):
        if lora is not None and (told := _used(script, lora, last.get(trainer))) is not None:
            if told:
                run.notes.append(f"whether adapters learn: {told}; without them, delete lora and its options")
            words = script.keywords(lora)
            run.options |= {turned_on: True} | {_LORA.get(key, key): value for key, value in words.items()
                                                if key not in _NOT_OF_LORA and value != _NO_CHANGE.get(key, ())}  # fmt: skip


def raise_batch_of_unsloth(script: ScriptValues, run: ForeignRun) -> None:
    """Raise the batch to a whole group, as Unsloth does by itself."""
    names = ("per_device_train_batch_size", "num_generations", "gradient_accumulation_steps")
    batch, group, steps = (run.options.get(name, default) for name, default in zip(names, (8, 8, 1), strict=True))
    if (
        run.trainer != "grpo"
        or "unsloth" not in script.modules
        or not all(isinstance(n, int) for n in (batch, group, steps))
    ):
        return
    if batch * steps % group:
        run.options[names[0]] = group
        run.notes.append(f"{names[0]} = {batch}: Unsloth raises it to num_generations, {group}")


def _is_given(script: ScriptValues, trainer: ast.Call | None) -> bool:
    """Return whether a configuration of adapters can reach the model: by the trainer, or by a function that adds them."""
    names = {name_of(call).rpartition(".")[2] for call in script.calls}
    words = {word.arg for word in trainer.keywords} if trainer is not None else {None}
    return bool({"peft_config", None} & words or {"get_peft_model", "add_adapter", "inject_adapter_in_model"} & names)


def _used(script: ScriptValues, lora: ast.Call, trainer: ast.Call | None) -> str | None:
    """Return None if a switch that is off keeps the script from adapters, "" if nothing does, else what decides it."""
    told = script.condition(script.branch_of[lora])
    words = {word.arg: word.value for word in trainer.keywords} if trainer is not None else {}
    if told is None or "peft_config" not in words:
        return told
    chosen = script.origin(words["peft_config"])
    if isinstance(chosen, ast.Constant) and chosen.value is None:
        return None
    return told or (ast.unparse(chosen)[:100] if isinstance(chosen, ast.IfExp) else "")


def _loads_of_models(script: ScriptValues) -> list[ast.Call]:
    """Return the calls that load a model, in their order: not those of a tokenizer or of a processor."""
    loads = [
        call
        for call in script.calls
        if name_of(call).endswith("Model.from_pretrained") or ".from_pretrained" in name_of(call)
    ]
    return [call for call in loads if not re.search("Tokenizer|Processor|Config", name_of(call))]


def take_type_of_weights(
    script: ScriptValues, load: ast.Call, named: dict[str | None, ast.expr], run: ForeignRun
) -> None:
    """Add the type in which a script loads its model: transformers takes that of the checkpoint unless one is given."""
    given = named.get("torch_dtype") or named.get("dtype")
    text = ast.unparse(script.origin(given)) if given is not None else "auto"
    kind = next((name for name in ("bfloat16", "float16", "float32", "auto") if name in text), None)
    if name_of(load).startswith("Fast") or kind is None:
        return
    run.options.setdefault("dtype", kind)
    run.names["dtype"] = f"{name_of(load)}'s dtype"
