"""The correction of vLLM's probabilities, the division of models among processes, and offload, of a run of verl."""

from __future__ import annotations

from posttrain.apps.migration.foreign_run import shown, value_of
from posttrain.apps.migration.recipe_draft import RecipeDraft
from posttrain.core.types import UserError

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
_DIVISIONS = {
    "expert_parallel": (f"{ACTOR}.megatron.expert_model_parallel_size", f"{ACTOR}.veomni.expert_parallel_size"),
    "tensor_parallel": (f"{ACTOR}.megatron.tensor_model_parallel_size",),
    "context_parallel": (
        f"{ACTOR}.ulysses_sequence_parallel_size",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        f"{ACTOR}.megatron.context_parallel_size",
    ),
}
"""Option here -> the names of it. Experts first: they go with no other division here."""


def bypasses(draft: RecipeDraft) -> bool:
    """Return whether the ratio is one to the sampler's own probabilities, with PPO's clip."""
    return bool(draft.read(f"{CORRECTION}.bypass_mode")) and draft.read(f"{CORRECTION}.loss_type") == "ppo_clip"


def correction(draft: RecipeDraft) -> None:
    """Write the weight for vLLM's probabilities. A threshold of one number truncates, and of two ("lower_upper") masks."""
    level, bypass = draft.word(f"{CORRECTION}.rollout_is"), draft.read(f"{CORRECTION}.bypass_mode")
    threshold, told = draft.read(f"{CORRECTION}.rollout_is_threshold"), draft.origin(f"{CORRECTION}.rollout_is")
    for name in ("rollout_rs", "rollout_rs_threshold", "rollout_is_batch_normalize"):
        if draft.read(f"{CORRECTION}.{name}"):
            what = "its mean is not made 1 here" if "normalize" in name else _REJECTION
            draft.differs(draft.origin(f"{CORRECTION}.{name}"), what)
    if bypasses(draft) and draft.lines["algorithm"][0] == "gpg":
        draft.differs(draft.origin(f"{CORRECTION}.bypass_mode"), "no counterpart: gpg has no ratio here")
        return
    if bypasses(draft):
        draft.put("old_policy", "sampler", "rollout_correction.bypass_mode: the ratio is one to the sampler's own")
        if level:
            draft.note(told, "no effect: with bypass_mode the ratio corrects already")
        return
    if bypass:
        what = "no counterpart: without it, or with --surrogate reinforce, see posttrain algorithms"
        draft.differs(draft.origin(f"{CORRECTION}.loss_type"), what)
    if not level:
        return _of_earlier_versions(draft)
    if level not in ("token", "sequence"):
        raise UserError(f"verl's rollout_is is token or sequence, not {shown(level)!r:.40}")
    lower, upper = _bounds(threshold)
    kinds = {"token": ("truncate", "icepop"), "sequence": ("sequence-truncate", "sequence")}
    kind = kinds[level][lower is not None]
    differs = "; here by the mean of its tokens, and those that are kept have weight 1" if kind == "sequence" else ""
    draft.put(
        "correction",
        kind,
        f"{told}, threshold {shown(threshold)}: {'nearest kind' if differs else 'same meaning'}{differs}",
    )
    at = draft.origin(f"{CORRECTION}.rollout_is_threshold")
    if upper <= 1:
        draft.differs(at, "correction_cap is above 1 here: 2 is taken")
        return
    mirrored = lower is None or abs(lower * upper - 1) < 0.02
    draft.put(
        "correction_cap", upper, f"{at}: {'same meaning' if mirrored else f'the lower bound is 1 / {upper:g} here'}"
    )


def _of_earlier_versions(draft: RecipeDraft) -> None:
    """Write the correction by the names of versions before 0.7; those of 0.6 in parts are left to the reader."""
    if cap := draft.number(f"{ACTOR}.tis_imp_ratio_cap"):
        told = draft.origin(f"{ACTOR}.tis_imp_ratio_cap")
        if cap > 1:
            draft.put("correction", "truncate", f"{told}: same meaning")
            draft.put("correction_cap", float(cap), f"{told}: same meaning")
        elif cap > 0:
            draft.differs(told, "correction_cap is above 1 here: left out")
    for name in [name for name in draft.run.options if name.startswith("algorithm.rollout_is")]:
        draft.treated.add(name)
        draft.differs(draft.origin(name), "names of verl 0.6: set correction (a kind), and correction_cap above 1")


_REJECTION = "no such rejection here: correction icepop masks tokens, sequence whole replies, by the ratio"


def _bounds(threshold: object) -> tuple[float | None, float]:
    """Return the lower bound, if there is one, and the upper one."""
    words = str(threshold).split("_")
    numbers = [value_of(word) for word in words[:2]]
    if len(words) > 2 or not all(isinstance(n, (int, float)) and not isinstance(n, bool) and n > 0 for n in numbers):
        raise UserError(f"verl's rollout_is_threshold is a number or lower_upper, not {shown(threshold)!r:.40}")
    return (float(numbers[0]) if len(numbers) == 2 else None), float(numbers[-1])


def divisions(draft: RecipeDraft) -> None:
    """Write what divides the model, or the tokens of a micro-batch, among processes."""
    for option, names in _DIVISIONS.items():
        for name in names:
            size = draft.count(name, 1)
            if size == 1 or option in draft.lines:
                continue
            if "expert_parallel" in draft.lines:
                draft.note(
                    draft.origin(name), "expert_parallel leaves all but the experts whole: one of them, not both"
                )
            else:
                draft.put(option, size, f"{draft.origin(name)}: same meaning; results do not depend on it")


def offload(draft: RecipeDraft) -> None:
    """Write what is kept on the host, in a run in which every process has whole models and micro-batches."""
    places = {
        "optimizer": [f"{ACTOR}.fsdp_config.optimizer_offload", f"{ACTOR}.megatron.optimizer_offload"],
        "activations": ["actor_rollout_ref.model.enable_activation_offload"],
        "reference": [
            "actor_rollout_ref.ref.fsdp_config.param_offload",
            "actor_rollout_ref.ref.megatron.param_offload",
        ],
    }
    chosen = [kind for kind, names in places.items() if any([draft.read(name) for name in names])]
    if "reference" in chosen and not draft.lines.get("kl", (0.0,))[0]:
        chosen.remove("reference")  # there is none
    if not chosen:
        return
    given = [name for kind in chosen for name in places[kind] if draft.read(name)]
    if divided := next((option for option in _DIVISIONS if option in draft.lines), None):
        for name in given:
            draft.note(draft.origin(name), f"offload is of whole models here: with it, leave out {divided}")
        return
    draft.put("offload", chosen, f"{', '.join(map(draft.origin, given))}: same meaning; memory only")
