"""Recipes from TRL's trainers on given responses: SFT, DPO and its family, KTO, reward models."""

from __future__ import annotations

import math
from typing import Any

from posttrain.apps.migration.foreign_run import is_known, shown
from posttrain.apps.migration.recipe_draft import RecipeDraft
from posttrain.apps.migration.shared_rules import FIRST_RATE, moving_reference, strategies, warm_up
from posttrain.core.types import UserError

_LINKS = {
    "sigmoid": "dpo",
    "hinge": "hinge",
    "ipo": "ipo",
    "exo_pair": "exo",
    "nca_pair": "nca",
    "robust": "robust",
    "bco_pair": "bco",
    "sppo_hard": "sppo",
    "apo_zero": "apo-zero",
    "apo_down": "apo-down",
    "sigmoid_norm": "dpo-norm",
    "aot": "aot",
    "aot_unpaired": "aot-unpaired",
}


_SMOOTHED = {"robust": "noise", **dict.fromkeys(("exo", "aot", "aot-unpaired"), "smoothing")}
"""Losses that read label_smoothing -> the option."""


def warm_up_of(draft: RecipeDraft, updates: int, steps: int | None) -> None:
    """Write a warm-up of so many updates, or of a share of them."""
    first, share = draft.number("warmup_steps"), draft.number("warmup_ratio")
    if (first or share) and draft.read("lr_scheduler_type") == "constant":
        named = [name for name in ("warmup_steps", "warmup_ratio") if draft.given(name)]
        draft.note(" and ".join(named), "no effect: the schedule constant of transformers has no warm-up")
        return
    if 0 < first < 1:
        warm_up(draft, "warmup_steps", first, None if steps is None else steps * updates)
    elif first:
        draft.put("warmup", int(first), f"{draft.origin('warmup_steps')} updates{FIRST_RATE}")
    elif share:
        warm_up(draft, "warmup_ratio", share, None if steps is None else steps * updates)


def given_responses(draft: RecipeDraft, processes: int, rows: int | None) -> None:
    """Write the batch and the loss of training on given responses."""
    batch, accumulated = draft.count("per_device_train_batch_size"), draft.count("gradient_accumulation_steps")
    size = int(batch * processes * accumulated)
    draft.head.append(f"An update: {batch} rows x {processes} processes x {accumulated} = {size} rows.")
    told = f"per_device_train_batch_size {batch} x {processes} processes x {accumulated} accumulated"
    averaged = "; TRL averages micro-batches, so that a short last one of a pass counts as much as a full one"
    draft.put("rows", size, told + averaged * (draft.run.trainer != "sft" and size > batch))
    most, passes = draft.number("max_steps"), draft.number("num_train_epochs")
    updates = None if rows is None else math.ceil(rows / size) * passes
    if most > 0:
        draft.put("steps", int(most), f"{draft.origin('max_steps')}: same meaning (updates)")
        updates = most
    else:
        draft.put("epochs", float(passes), f"{draft.origin('num_train_epochs')}: same meaning")
    warm_up_of(draft, 1, None if updates is None else int(updates))
    strategies(draft, 1, None if rows is None else math.ceil(rows / size))
    trainer = draft.run.trainer
    if trainer == "sft" and draft.read("packing") and draft.read("packing_strategy") == "wrapped":
        draft.treated.add("max_length")
        told = (
            "rows are cut into blocks of max_length there, whose rows see each other; here each row is whole and alone"
        )
        draft.differs(draft.origin("packing_strategy"), told)
    elif draft.read("max_length") is not None:
        how, told = ("skip", "left out") if trainer == "reward" else ("truncate", "cut")
        draft.same("max_length", "max_length")
        smaller = "; an update with such rows has fewer here" * (how == "skip")
        draft.put("too_long", how, f"{draft.origin('max_length')}: longer rows are {told}{smaller}")
    if draft.read("truncation_mode") == "keep_end":
        draft.differs("truncation_mode = keep_end", "the end of a long row is cut here, not its beginning")
    {"sft": _sft, "reward": _reward_model}.get(trainer, _preferences)(draft)


def _sft(draft: RecipeDraft) -> None:
    if (kind := draft.word("loss_type")) == "dft":
        draft.put("token_weight", "probability", f"{draft.origin('loss_type')}: dynamic fine-tuning")
    elif kind != "nll":
        raise UserError(f"SFT's loss_type {shown(kind)!r:.40} has no counterpart; supported: nll and dft")
    only, assistant = draft.read("completion_only_loss"), draft.read("assistant_only_loss")
    masked = only is not False or bool(assistant)
    told = "completion_only_loss, assistant_only_loss: the loss is on responses" if masked else "every token is trained"
    if "assistant_only_loss" in draft.run.names:
        told = f"{draft.run.names['assistant_only_loss']}: the loss is on responses"
    if only is None and not assistant:
        told = "not given: TRL trains completions alone of rows that have them; rows of text are trained as a whole"
        draft.run.notes.append('the rows: of messages TRL trains every token, so set mask = "all" for these')
    draft.put("mask", "assistant" if masked else "all", told)
    if draft.read("packing"):
        told = "a packed row of TRL holds several of yours: rows counts yours, so raise it by as much"
        draft.differs("packing = true", told)
        draft.treated.add("packing_strategy")

    if isinstance(place := draft.read("chat_template_path"), str):
        if place.endswith((".jinja", ".j2")):
            draft.same("chat_template", "chat_template_path")
        else:
            told = "save the template of this tokenizer as a file, and give it as chat_template"
            draft.first.append(f"{draft.origin('chat_template_path')}: {told}")

    if (column := draft.read("dataset_text_field")) not in (None, "text"):
        draft.put("fields.text", str(column), f"{draft.origin('dataset_text_field')}: same meaning, of rows of text")


def _reward_model(draft: RecipeDraft) -> None:
    draft.put("algorithm", "bradley-terry", "RewardTrainer: -log sigmoid(r_chosen - r_rejected)")


def _preferences(draft: RecipeDraft) -> None:
    """Write the loss of DPO and its family."""
    trainer, beta = draft.run.trainer, float(draft.number("beta"))
    if trainer in ("cpo", "orpo") and draft.given("max_completion_length"):
        draft.treated.add("max_completion_length")
        draft.note(draft.origin("max_completion_length"), "no effect: TRL reads it for encoder-decoders alone")
    kinds = draft.read("loss_type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not is_known(kinds):
        raise UserError(
            f"only the script computes a part of loss_type, {shown(kinds):.60}: write its value into the script"
        )
    weights = draft.read("loss_weights") or [1.0] * len(kinds)
    if trainer == "orpo":
        told = "the likelihood is that of chosen responses, a mean of each here; of their prompts too, per token, there"
        draft.put("algorithm", "orpo", f"ORPOTrainer; {told}")
        draft.put("preference", beta, f"{draft.origin('beta')} is the weight of the odds ratio (lambda of the paper)")
        return
    if trainer == "kto":
        if kinds != ["kto"]:
            raise UserError(f"KTO's loss_type {shown(kinds[0])!r:.40} has no counterpart; supported: kto")
        told = "the drift (KL) is estimated from the replies of the update here, from those of a micro-batch there"
        draft.put("algorithm", "kto", f"KTOTrainer; {told}")
    elif trainer == "cpo":
        simpo = kinds == ["simpo"]
        if kinds not in (["simpo"], ["sigmoid"], ["hinge"]):
            raise UserError(
                f"CPO's loss_type {shown(kinds[0])!r:.40} has no counterpart; supported: sigmoid, hinge, simpo"
            )
        draft.put("algorithm", "simpo" if simpo else "cpo", f"CPOTrainer, loss_type {shown(kinds[0])}")
        if kinds == ["hinge"]:
            draft.put("link", "hinge", "loss_type = hinge: same meaning")
            if draft.read("label_smoothing"):
                draft.note(draft.origin("label_smoothing"), "no effect: TRL has none for hinge")
        if alpha := draft.number("alpha", 0.0):
            if not simpo:
                raise UserError(
                    f"CPO's alpha {alpha:g} without loss_type simpo has no counterpart: AlphaPO is with simpo"
                )
            draft.put("algorithm", "alphapo", f"CPOTrainer, loss_type simpo, {draft.origin('alpha')}")
            draft.set("score.alpha", float(alpha), "alpha: same meaning")
        draft.put("imitation", float(draft.number("cpo_alpha")), f"{draft.origin('cpo_alpha')}: same meaning")
        if simpo:
            draft.put("margin", float(draft.number("simpo_gamma")), f"{draft.origin('simpo_gamma')}: same meaning")
        draft.read("simpo_gamma")
    else:
        _direct_preferences(draft, kinds, weights)
    if trainer in ("dpo", "kto"):
        moving_reference(draft, 1)
        if reference := draft.read("ref_model"):
            draft.first.append(
                f"ref_model = {shown(reference)}: the reference here is the starting model, and no option names another"
            )
    draft.put("beta", beta, f"{draft.origin('beta')}: same meaning")


def _direct_preferences(draft: RecipeDraft, kinds: list[Any], weights: list[Any]) -> None:
    smoothing = draft.number("label_smoothing")
    links = [kind for kind in kinds if kind != "sft"]
    if len(links) != 1 or str(links[0]) not in _LINKS or len(weights) != len(kinds):
        raise UserError(
            f"DPO's loss_type {shown(kinds)!r:.60} has no counterpart; supported: {', '.join(_LINKS)}, alone or with sft"
        )
    name = _LINKS[links[0]]
    draft.put("algorithm", name, f"{draft.origin('loss_type')}: same loss")
    if smoothing and name in _SMOOTHED:
        draft.put(_SMOOTHED[name], smoothing, f"{draft.origin('label_smoothing')}: same meaning")
    elif smoothing:
        older = f"; versions before 1.0 smooth it: algorithm = cdpo, smoothing = {smoothing:g}" * (name == "dpo")
        draft.differs(draft.origin("label_smoothing"), f"no effect: TRL 1.16 has none for {links[0]}{older}")
    weight = dict(zip(kinds, weights, strict=True))
    if "sft" in weight or weight[links[0]] != 1:
        draft.put("preference", float(weight[links[0]]), "loss_weights: of the comparisons")
    if "sft" in weight:
        draft.put("imitation", float(weight["sft"]), "loss_weights: of the likelihood of chosen responses")
    divergence = draft.word("f_divergence_type")
    if divergence not in (None, "reverse_kl"):
        known = {"forward_kl": "forward-kl", "js_divergence": "jensen-shannon", "alpha_divergence": "alpha"}
        if divergence not in known:
            raise UserError(
                f"DPO's f_divergence_type {shown(divergence)!r:.40} has no counterpart; supported: {', '.join(known)}"
            )
        draft.put("divergence", known[divergence], f"{draft.origin('f_divergence_type')}: same meaning")
        if divergence == "alpha_divergence" and draft.given("f_alpha_divergence_coef"):
            draft.set(
                "score.alpha", float(draft.number("f_alpha_divergence_coef")), "f_alpha_divergence_coef: same meaning"
            )
