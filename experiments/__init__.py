"""Small experiments that test what the papers claim; `posttrain reproduce NAME` runs one."""

from __future__ import annotations

import difflib

from experiments import (
    arpo,
    baseline_variance,
    causality,
    chosen_falls,
    clip_higher,
    closed_form,
    code_choice,
    code_rl,
    cold_start,
    curriculum,
    decoupled_approval,
    dynamic_sampling,
    emergence,
    entropy_collapse,
    group_size,
    gspo_variance,
    kl_estimators,
    length_bias,
    lora_rl,
    memorise_or_generalise,
    moe_routing,
    over_optimisation,
    overlong,
    ppo_ablation,
    ppo_vs_grpo,
    retrieved_token_masking,
    sampling_temperature,
    search_r1,
)
from experiments.experiment import Experiment
from posttrain.core.types import UserError

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        kl_estimators,
        baseline_variance,
        gspo_variance,
        causality,
        closed_form,
        chosen_falls,
        clip_higher,
        dynamic_sampling,
        overlong,
        length_bias,
        ppo_vs_grpo,
        ppo_ablation,
        group_size,
        sampling_temperature,
        memorise_or_generalise,
        curriculum,
        cold_start,
        emergence,
        entropy_collapse,
        decoupled_approval,
        over_optimisation,
        search_r1,
        retrieved_token_masking,
        arpo,
        code_rl,
        code_choice,
        lora_rl,
        moe_routing,
    )
}
"""Name -> experiment, in the order in which they are listed."""


def find(name: str) -> Experiment:
    """The experiment of that name. Raises UserError with the list of them."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    close = difflib.get_close_matches(name, EXPERIMENTS, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UserError(f"unknown experiment {name!r}: {hint}there are {', '.join(EXPERIMENTS)}")
