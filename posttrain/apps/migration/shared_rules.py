"""Conversions that the recipes of all three trainers share: steps from passes, warm-up, LoRA, clips."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from posttrain.apps.migration.foreign_run import shown
from posttrain.apps.migration.recipe_draft import NEVER, TRACKERS, RecipeDraft
from posttrain.core.extras import install
from posttrain.core.types import UserError

FIRST_RATE = "; the first has 1 / warmup of the rate here, and 0 there"
"""The difference between a warm-up here and one of transformers, whose rates are one update behind."""


def steps_of(
    draft: RecipeDraft, passes: float, name: str, prompts: int, rows: int | None, together: int | None = None
) -> int | None:
    """Write the steps of a number of passes over the rows, and return them; None where the number of rows is not known.

    `together`: what is left of a pass after the last so many rows is not used. None: passes follow each other without gap.
    """
    told = draft.origin(name)
    if rows is None:
        formula = f"{passes:g} x ROWS / {prompts} prompts"
        own = draft.own_default("steps")
        draft.put(
            "steps",
            own,
            f"{told}: here steps, not passes: set {formula} (or import with --rows ROWS); {own} is the default",
        )
        draft.first.append(f"set steps = {formula}, or import with --rows ROWS: {own} is the default here")
        return None
    used = rows if together is None else max(together, rows // together * together)
    per_pass = used / prompts if together is None else math.ceil(used / prompts)
    steps = max(1, math.ceil(per_pass * passes))
    left = f", of which the last {rows - used} are left out of a pass" if used < rows else ""
    draft.put(
        "steps",
        steps,
        f"{told}: {passes:g} pass{'es' * (passes != 1)} over {rows} rows{left}, {prompts} prompts a step",
    )
    return steps


def warm_up(draft: RecipeDraft, name: str, share: float, updates: int | None) -> None:
    """Write a warm-up that is a share of all updates."""
    if not share:
        return
    if updates is None:
        draft.differs(draft.origin(name), f"warmup is a number of updates here: {share:g} x all updates")
        return
    draft.put("warmup", math.ceil(share * updates), f"{draft.origin(name)}: {share:g} of {updates} updates{FIRST_RATE}")


def clips(draft: RecipeDraft, updates: int, low: Any, high: Any, dual: Any, names: str) -> None:
    """Write the clip range, where more than one update a step can leave it."""
    told = f"{names} ({low:g} below, {high:g} above)"
    if updates == 1:
        draft.note(told, "no effect: with one update a step every ratio is 1, and nothing is clipped")
        return
    draft.put("clip_low", low, f"{names}: same meaning")
    draft.put("clip_high", high, f"{names}: same meaning")
    if dual is not None:
        draft.put("clip_dual", dual, f"{names}: bound where the advantage is below 0")


def frequency(draft: RecipeDraft, option: str, name: str, updates: int) -> None:
    """Write how often to save or to evaluate: there in updates, here in steps."""
    value = draft.read(name)
    never = NEVER if option == "save_every" else 0
    if isinstance(value, str):
        return draft.note(draft.origin(name), f"{option} is a number of steps here: set it")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        if value is not None:
            draft.put(option, never, f"{draft.origin(name)}: only at the end")
    elif value < 1:
        draft.note(draft.origin(name), f"a share of the run: set {option} to a number of steps")
    else:
        steps = max(1, round(value / updates))
        why = "same meaning" if updates == 1 else f"{updates} updates there are a step here"
        draft.put(option, steps, f"{draft.origin(name)}: {why}")


def kept_checkpoints(draft: RecipeDraft, name: str) -> None:
    """Write how many checkpoints stay; trainers without the option keep all."""
    draft.same("keep", name)
    if draft.lines.get("keep", (0, ""))[0] == NEVER:
        draft.put("keep", NEVER, f"{draft.origin(name)}: all checkpoints stay")


def adapters(draft: RecipeDraft, rank: str, alpha: str, targets: str, quantized: tuple[str, str] | None = None) -> None:
    """Write the options of LoRA, and of a quantized base."""
    if not draft.read(rank):
        for name in (alpha, targets):
            draft.read(name)
        return
    draft.same("lora", rank)
    draft.same("lora_alpha", alpha)
    value = draft.read(targets)
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "all-linear"}
    chosen = [value] if isinstance(value, str) else value
    if isinstance(chosen, list) and set(map(str, chosen)) <= known:
        draft.put("lora_targets", chosen, f"{draft.origin(targets)}: same meaning")
    elif chosen is not None:
        told = f"here any of {', '.join(sorted(known))}; all-linear is the default"
        draft.tell(draft.origin(targets), told, draft.is_learned(targets))
    elif draft.run.framework == "TRL":
        draft.put("lora_targets", ["q_proj", "v_proj"], f"{targets}, not given: PEFT's default for most models")
    for name, kind in zip(quantized or (), ("nf4", "int8"), strict=False):
        if draft.read(name):
            draft.put("quantize", kind, f"{name}: same meaning")


def engine(draft: RecipeDraft, name: str, share: str, parallel: str, server: str = "vllm") -> None:
    """Write that a server samples; its memory is a share there and the size of the cache here. `parallel`: GPUs of each
    engine.
    """
    draft.put(
        "engine", server, f"{name}: same meaning; without a GPU of its own, leave it out: the local engine samples"
    )
    if draft.given(share):
        draft.note(draft.origin(share), "--engine-cache is the size of the KV cache in GiB, not a share of the GPU")
    draft.read(share)
    if draft.given(parallel):
        draft.same("engine_tensor_parallel", parallel)


def same_estimator(estimator: str) -> str:
    """Return how an estimator of the KL relates to that of verl and OpenRLHF, as a comment of the recipe."""
    bounded = "same formula; there a token's is at most 10, beyond which nothing pulls it back"
    return bounded if estimator == "k3" else "same meaning"


def optimizer(draft: RecipeDraft, prefix: str) -> None:
    """Write the optimizer of verl: a class of `optimizer_impl`, which is torch.optim unless it is given."""
    name, module = f"{prefix}.optimizer", draft.read(f"{prefix}.optimizer_impl", "torch.optim")
    kind = draft.read(name, "AdamW")
    if (draft.given(name) or draft.given(f"{prefix}.optimizer_impl")) and isinstance(kind, str):
        try:
            draft.put("optimizer", draft.fitted("optimizer", f"{module}:{kind}"), f"{draft.origin(name)} of {module}")
        except UserError as error:
            draft.differs(f"{draft.origin(name)} of {module}", f"not taken over as optimizer: {error}")


def split_of(draft: RecipeDraft, name: str) -> None:
    """Write the split of a dataset of the hub; a file has none."""
    tasks = draft.lines.get("tasks", ("", ""))[0]
    if draft.given(name):
        draft.same("split", name)
    elif (
        isinstance(value := draft.read(name), str)
        and re.fullmatch(r"[\w.-]+/[\w.-]+(:.+)?", tasks)
        and not Path(tasks).suffix
    ):
        draft.put("split", value, f"{draft.origin(name)}")


def held_out(draft: RecipeDraft, name: str, rows: int | None) -> None:
    """Write the share of the rows that a split of them keeps from training: given as a share, or as a number of rows."""
    size = draft.read(name)
    if not isinstance(size, (int, float)) or isinstance(size, bool) or size <= 0:
        return
    share = size if size < 1 else size / rows if rows else None
    if share is None or share >= 1:
        told = "held_out is a share of the rows here: import with --rows ROWS, or set it"
        draft.tell(draft.origin(name), told, draft.is_learned(name))
    else:
        draft.put("held_out", round(float(share), 6), f"{draft.origin(name)}: the same share, other rows of it")


def strategies(draft: RecipeDraft, updates: int, per_pass: int | None) -> None:
    """Write when TRL saves and evaluates: after so many updates, after each pass of `per_pass` steps, or never."""
    for option, kind, otherwise in (("save_every", "save", "steps"), ("eval_every", "eval", "no")):
        strategy, name = draft.word(f"{kind}_strategy"), f"{kind}_steps"
        evaluates = kind == "eval" and (draft.given(name) or draft.read("do_eval"))
        if strategy is None:
            strategy = "steps" if evaluates else otherwise
        if strategy == "steps":
            if kind == "eval" and not draft.given(name):
                told = "eval_steps, not given: TRL's logging_steps, which are not in it"
                if draft.given("logging_steps"):
                    frequency(draft, option, "logging_steps", updates)
                else:
                    draft.put(option, max(1, round(500 / updates)), f"{told}: its default, 500 updates")
            else:
                frequency(draft, option, name, updates)
            continue
        draft.treated.add(name)
        if strategy == "epoch" and per_pass is not None:
            draft.put(option, per_pass, f"{draft.origin(f'{kind}_strategy')}: the steps of a pass")
        elif strategy == "epoch":
            what = f"{option} is a number of steps here: those of a pass (import with --rows ROWS)"
            draft.note(draft.origin(f"{kind}_strategy"), what)
        elif kind == "save" and strategy in (False, "no"):
            draft.put(option, NEVER, f"{draft.origin('save_strategy')}: only at the end")
        elif strategy not in (False, "no"):
            draft.note(draft.origin(f"{kind}_strategy"), f"{option} is a number of steps here")


def chat_variables(draft: RecipeDraft, name: str) -> None:
    """Write the variables of the chat template: a mapping, or a dotted name for each."""
    given = draft.read(name) if draft.given(name) else {}
    values = dict(given) if isinstance(given, dict) else {}
    if given and not values:
        draft.differs(draft.origin(name), "variables of the chat template: set them as chat_template_kwargs")
    values |= {key.removeprefix(f"{name}."): draft.read(key) for key in draft.run.options if key.startswith(f"{name}.")}
    for variable, value in values.items():
        if isinstance(value, (bool, int, float, str)) and re.fullmatch(r"\w+", variable, re.ASCII):
            told = f"{name}.{variable} = {shown(value)}: same meaning"
            draft.put(f"chat_template_kwargs.{variable}", value, told)
        elif value is not None:
            draft.differs(
                f"{name}.{variable} = {shown(value)}", "a variable is a number, a truth value or a text: set it here"
            )


def trackers(draft: RecipeDraft, name: str, project: str) -> None:
    """Write the trackers of a run and their project, which has an effect only with one of them."""
    given = draft.read(name) if draft.given(name) else None
    kept = [kind for kind in (given if isinstance(given, list) else [given]) if kind in TRACKERS]
    if kept:
        draft.put("track", kept, f"{draft.origin(name)}: where it runs, {install(str(kept[0]))}")
    if isinstance(given, str) and given not in (*TRACKERS, "none", "console", "tensorboard"):
        draft.note(draft.origin(name), f"trackers here: {', '.join(TRACKERS)}; TensorBoard's files are always written")
    if not draft.given(project):
        draft.read(project)
    elif kept:
        draft.same("track_project", project)
    else:
        draft.note(
            draft.origin(project), f"no effect without a tracker, and {name} names none: --track, --track-project"
        )
        draft.treated.add(project)


def tracked_by_wandb(draft: RecipeDraft, name: str) -> None:
    """Write that wandb follows the run."""
    told = f"its key is in WANDB_API_KEY; where it runs, {install('wandb')}"
    draft.put("track", ["wandb"], f"{draft.origin(name)}: {told}")
    draft.treated.add(name)


def devices_of(draft: RecipeDraft, devices: int | None, need: bool) -> int:
    """Return the processes of the run: as given, as the command names them, or one. They share its batch."""
    found = devices or draft.run.devices or 1
    if devices is None and draft.run.devices is None and need:
        draft.run.notes.append(
            "the number of devices, a factor of the batch: it is not known here, 1 is assumed: --devices N"
        )
    if found > 1:
        draft.put(
            "processes", found, "processes that share a batch; results do not depend on them here: set what you have"
        )
    return found


def moving_reference(draft: RecipeDraft, updates: int) -> None:
    """Write how TRL's reference follows the policy, in a run of so many updates a step."""
    if draft.read("sync_ref_model"):
        exact = draft.number("ref_model_sync_steps") / updates
        every = max(1, round(exact))
        told = f"{draft.origin('ref_model_sync_steps')} updates, of which a step has {updates}"
        rounded = f": {exact:g} steps, rounded" if every != exact else ""
        draft.put("reference_every", every, told + rounded)
        rate = float(draft.number("ref_model_mixup_alpha"))
        draft.put("reference_update_rate", rate, f"{draft.origin('ref_model_mixup_alpha')}: same meaning")
    draft.treated |= {"ref_model_sync_steps", "ref_model_mixup_alpha"}
