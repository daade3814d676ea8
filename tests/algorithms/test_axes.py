"""Axes: options change the part they name, contradictions are refused with option and fix; and rows of one's own."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from update_cases import WORDS, collector_of, new_learner, new_player

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.aggregate import AGGREGATES, ConstantLength, PromptMean, SequenceMean, SequenceSum, TokenMean
from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.branching import Branching
from posttrain.algorithms.credit import (
    GAE,
    Baselined,
    Decoupled,
    KStep,
    PassAtK,
    StepRewards,
    ToGo,
    Unrewarded,
)
from posttrain.algorithms.critic_loss import SoftQ, Value
from posttrain.algorithms.describe import differences
from posttrain.algorithms.filters import (
    CovarianceClip,
    CovariancePenalty,
    DynamicSampling,
    OverlongFilter,
    Replay,
    TopEntropy,
)
from posttrain.algorithms.moving_models import MovingReference
from posttrain.algorithms.penalty import CONTROLS, KL, Adaptive, EarlyStop, Entropy, HalvingDoubling
from posttrain.algorithms.policy import Algorithm, Imitation, PolicyObjective, Pretraining
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.ratio import (
    RATIOS,
    Causal,
    Correction,
    OffPolicyMask,
    OverSequence,
    PessimisticClip,
    SequenceValueTokenGradient,
)
from posttrain.algorithms.redistribution import Redistribution
from posttrain.algorithms.settings import change, flags, settings_of
from posttrain.algorithms.shaping import GroupLength, LengthPenalty, RewardFloor, SoftOverlong
from posttrain.algorithms.surrogate import (
    SURROGATES,
    Clip,
    DivergenceMask,
    GammaWeight,
    ImportanceRatio,
    LogProbability,
    SoftGate,
    WeightedLogProbability,
)
from posttrain.algorithms.teacher import Distillation
from posttrain.algorithms.turn_groups import TurnGroups, TurnHistories
from posttrain.cli.main import main
from posttrain.config.resolve import filled, validate
from posttrain.config.training import RL, Distill
from posttrain.core.component import NEVER, Need, setting_of
from posttrain.core.transcripts import Transcript
from posttrain.core.trust_region import TrustRegion
from posttrain.core.types import Task, UserError
from posttrain.envs.demonstration import demonstrate
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.native.decoder import causal
from posttrain.models.native.decoder_writer import save_model
from posttrain.training.adjust import adjust
from posttrain.training.loop import train
from posttrain.training.sources.collector import Size
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.sources.teacher_targets import TEACHER as NAMED_TEACHER
from posttrain.training.sources.teacher_targets import Teachers, TopTokens

Part = Callable[[Algorithm], Any]


def part(name: str) -> Part:
    return lambda row: getattr(row, name)


ADVANTAGE, SURROGATE, RATIO, AGGREGATE = part("advantage"), part("surrogate"), part("ratio"), part("aggregate")
PENALTY, CRITIC, ENTROPY, CORRECTION = part("kl"), part("critic"), part("entropy"), part("correction")
SHAPING, TEACHER, SPREAD = part("shaping"), part("teacher"), part("redistribution")

CHANGES: list[tuple[str, dict[str, Any], Part, Any]] = [
    ("grpo", {"advantage": "baselined"}, ADVANTAGE, Baselined()),
    ("grpo", {"advantage": "to-go"}, ADVANTAGE, ToGo()),
    ("grpo", {"advantage": "process"}, ADVANTAGE, StepRewards()),
    ("grpo-process", {"outcome_apart": True}, ADVANTAGE, StepRewards(outcome_apart=True)),
    ("grpo", {"advantage": "decoupled"}, ADVANTAGE, Decoupled()),
    ("grpo", {"advantage": "decoupled", "part_weights": "digits=0.5"}, ADVANTAGE, Decoupled(("digits=0.5",))),
    ("grpo", {"advantage": "decoupled", "whiten": False}, ADVANTAGE, Decoupled(whiten=False)),
    ("grpo", {"advantage": "pass-at-k"}, ADVANTAGE, PassAtK(2)),
    ("grpo", {"advantage": "pass-at-k", "advantage_k": 1}, ADVANTAGE, PassAtK(1)),
    ("grpo", {"advantage": "gae"}, ADVANTAGE, GAE(whiten=True)),
    ("grpo", {"advantage": "gae"}, CRITIC, Value()),
    ("ppo", {"advantage": "baselined"}, CRITIC, None),
    ("grpo", {"advantage": "k-step"}, ADVANTAGE, KStep()),
    ("grpo", {"advantage": "k-step", "k_step": 2, "gamma": 0.9, "whiten": True}, ADVANTAGE, KStep(2, 0.9, True)),
    ("ppo", {"advantage": "k-step"}, CRITIC, Value()),
    *(("grpo", {"baseline": b}, ADVANTAGE, Baselined(b, "group")) for b in ("none", "batch", "group", "others")),
    ("reinforce", {"baseline": "group"}, ADVANTAGE, ToGo("group")),
    *(
        ("grpo", {"baseline_weight": w}, ADVANTAGE, Baselined("group", "group", w))
        for w in ("equal", "length", "gradient")
    ),
    *(("grpo", {"scale": s}, ADVANTAGE, Baselined("group", s)) for s in ("none", "batch", "group", "mean")),
    ("ppo", {"gamma": 0.9}, ADVANTAGE, GAE(0.9, 0.95, whiten=True)),
    ("reinforce", {"gamma": 0.9}, ADVANTAGE, ToGo(gamma=0.9)),
    ("sac", {"gamma": 0.9}, CRITIC, SoftQ(gamma=0.9, warmup=2)),
    ("sac", {"critic_tau": 0.5}, CRITIC, SoftQ(tau=0.5, warmup=2)),
    ("ppo", {"gae_lambda": 0.5}, ADVANTAGE, GAE(1.0, 0.5, whiten=True)),
    ("ppo", {"gae_alpha": 0.1}, ADVANTAGE, GAE(1.0, 0.95, 0.1, whiten=True)),
    ("vapo", {"gae_lambda": 0.5}, ADVANTAGE, GAE(1.0, 0.5, whiten=True)),
    ("ppo", {"whiten": False}, ADVANTAGE, GAE(1.0, 0.95)),
    ("reinforce", {"whiten": True}, ADVANTAGE, ToGo(whiten=True)),
    ("grpo", {"surrogate": "clip"}, SURROGATE, Clip()),
    ("grpo", {"surrogate": "ratio"}, SURROGATE, ImportanceRatio()),
    ("grpo", {"surrogate": "log-probability"}, SURROGATE, LogProbability()),
    ("grpo", {"surrogate": "weighted"}, SURROGATE, WeightedLogProbability()),
    ("gspo", {"surrogate": "log-probability"}, RATIO, ()),
    ("gspo", {"ratio": "token"}, RATIO, ()),
    ("grpo", {"ratio": "sequence-mean"}, RATIO, (OverSequence("mean"),)),
    ("grpo", {"ratio": "sequence-sum"}, RATIO, (OverSequence("sum"),)),
    ("grpo", {"ratio": "sequence-value"}, RATIO, (SequenceValueTokenGradient(),)),
    ("grpo", {"ratio": "causal"}, RATIO, (Causal(),)),
    ("grpo", {"ratio": "geometric"}, RATIO, (PessimisticClip(), OverSequence("mean"))),
    ("dapo", {"clip_low": 0.1}, SURROGATE, Clip(0.1, 0.28)),
    ("grpo", {"surrogate": "soft-gate"}, SURROGATE, SoftGate()),
    ("grpo", {"surrogate": "divergence-mask"}, SURROGATE, DivergenceMask()),
    ("grpo", {"surrogate": "gamma-weight"}, SURROGATE, GammaWeight()),
    ("grpo", {"clip_high": 0.3, "minibatches": 2}, SURROGATE, Clip(0.2, 0.3)),
    ("cispo", {"clip_high": 2.0}, SURROGATE, WeightedLogProbability(2.0)),
    ("off-policy-pg", {}, SURROGATE, WeightedLogProbability(at="reward")),
    ("off-policy-pg", {"weight_at": "token"}, SURROGATE, WeightedLogProbability()),
    ("off-policy-pg", {"advantage": "to-go"}, ADVANTAGE, ToGo()),
    ("off-policy-pg", {"replay": 500}, part("old"), "sampler"),
    ("dr-grpo", {"replay": 500}, part("old"), "sampler"),
    ("gpg", {"epochs": 2}, CORRECTION, Correction()),
    ("grpo", {"epsilon_greedy": 0.1}, CORRECTION, Correction()),
    ("grpo", {"epsilon_greedy": 0.1, "correction": "icepop"}, CORRECTION, Correction("icepop")),
    ("off-policy-pg", {"epsilon_greedy": 0.1}, part("old"), "sampler"),
    ("dapo", {"clip_dual": 3.0}, SURROGATE, Clip(0.2, 0.28, 3.0)),
    ("dapo", {"clip_dual": 0.0}, SURROGATE, Clip(0.2, 0.28)),
    ("gpg", {"aggregate": "sequence-mean"}, AGGREGATE, SequenceMean()),
    ("grpo", {"aggregate": "token-mean"}, AGGREGATE, TokenMean()),
    ("grpo", {"aggregate": "sequence-sum"}, AGGREGATE, SequenceSum()),
    ("grpo", {"aggregate": "constant"}, AGGREGATE, ConstantLength(6)),
    ("grpo", {"aggregate": "prompt-mean"}, AGGREGATE, PromptMean()),
    ("grpo", {"kl": 0.0}, PENALTY, None),
    ("grpo", {"kl": 0.5}, PENALTY, KL("k3", 0.5)),
    ("dr-grpo", {"kl": 0.5}, PENALTY, KL("k3", 0.5)),
    *(("grpo", {"kl_estimator": e}, PENALTY, KL(e, 0.04)) for e in ("k1", "k2", "k3", "exact", "forward")),
    ("grpo", {"kl_unit": "response"}, PENALTY, KL("k3", 0.04, unit="response")),
    ("grpo", {"kl_weighed": True}, PENALTY, KL("k3", 0.04, weighed=True)),
    ("deepseek-v3.2", {"kl_weighed": False}, PENALTY, KL("k3", 0.04)),
    ("grpo", {"kl_where": "reward"}, PENALTY, KL("k3", 0.04, "reward")),
    ("grpo", {"kl_where": "reward", "kl_estimator": "exact"}, PENALTY, KL("exact", 0.04, "reward")),
    ("ppo", {"kl_where": "loss"}, PENALTY, KL("k1", 0.05, "loss")),
    ("ppo-kl", {"kl_control": "fixed"}, PENALTY, KL("k3", 1.0, against="old")),
    ("grpo", {"kl_control": "adaptive"}, PENALTY, KL("k3", 0.04, control=Adaptive())),
    ("grpo", {"kl_control": "halving-doubling"}, PENALTY, KL("k3", 0.04, control=HalvingDoubling())),
    ("ppo-kl", {"kl_target": 0.5}, PENALTY, KL("k3", 1.0, against="old", control=HalvingDoubling(0.5))),
    ("grpo", {"kl_control": "adaptive", "kl_horizon": 9.0}, PENALTY, KL("k3", 0.04, control=Adaptive(horizon=9.0))),
    ("grpo", {"reference_every": 7}, part("moving"), MovingReference(7)),
    ("gigpo", {"turn_weight": 0.5}, ADVANTAGE, TurnGroups(weight=0.5)),
    ("gigpo", {"turn_gamma": 1.0}, ADVANTAGE, TurnGroups(gamma=1.0)),
    ("gigpo", {"turn_state": "history"}, ADVANTAGE, TurnGroups(state="history")),
    ("gigpo", {"scale": "none"}, ADVANTAGE, TurnGroups(scale="none")),
    ("grpo", {"advantage": "turns"}, ADVANTAGE, TurnGroups()),
    ("hgpo", {"turn_history": 4}, ADVANTAGE, TurnHistories(4)),
    ("hgpo", {"turn_history_power": 0.5}, ADVANTAGE, TurnHistories(power=0.5)),
    ("hgpo", {"turn_gamma": 1.0}, ADVANTAGE, TurnHistories(gamma=1.0)),
    ("hgpo", {"scale": "none"}, ADVANTAGE, TurnHistories(scale="none")),
    ("grpo", {"advantage": "turn-histories"}, ADVANTAGE, TurnHistories()),
    ("iterative-grpo", {"reference_every": 0}, part("moving"), None),
    ("iterative-grpo", {"kl": 0.0}, part("moving"), None),
    ("iterative-grpo", {"reference_update_rate": 0.5}, part("moving"), MovingReference(50, 0.5)),
    ("grpo", {"entropy": 0.1}, ENTROPY, Entropy(0.1)),
    ("grpo", {"entropy": 0.0}, ENTROPY, None),
    ("grpo", {"entropy_target": 0.5}, ENTROPY, Entropy(0.0, target=0.5)),
    ("sac", {"entropy_target": 0.5}, ENTROPY, Entropy(0.01, target=0.5)),
    ("grpo", {"top_entropy": 0.2}, part("select"), (TopEntropy(0.2),)),
    ("grpo", {"top_entropy": 1.0}, part("select"), ()),
    ("grpo", {"clip_cov": 0.01}, part("select"), (CovarianceClip(0.01),)),
    ("grpo", {"clip_cov": 0.01, "top_entropy": 0.5}, part("select"), (CovarianceClip(0.01), TopEntropy(0.5))),
    ("clip-cov", {"clip_cov": 0}, part("select"), ()),
    ("grpo", {"kl_cov": 0.01, "minibatches": 2}, part("covariance"), CovariancePenalty(0.01)),
    ("kl-cov", {"kl_cov": 0}, part("covariance"), None),
    *(
        ("grpo", {"correction": kind}, CORRECTION, Correction(kind))
        for kind in ("truncate", "icepop", "sequence", "sequence-truncate")
    ),
    ("grpo", {"correction": "none"}, CORRECTION, None),
    ("grpo", {"correction": "icepop", "correction_cap": 5.0}, CORRECTION, Correction("icepop", 5.0)),
    ("grpo", {"off_policy_mask": 0.1, "minibatches": 2}, part("off_policy_mask"), OffPolicyMask(0.1)),
    ("deepseek-v3.2", {"off_policy_mask": 0}, part("off_policy_mask"), None),
    ("grpo", {"old_policy": "sampler"}, part("old"), "sampler"),
    ("grpo", {"old_policy": "start"}, part("old"), "start"),
    ("arpo", {}, part("branching"), Branching(1, 0.5, 20, 0.5, 0.2, 0.5, "soft")),
    ("arpo", {"branches": 0}, part("branching"), None),
    ("gpg", {"branches": 3}, part("branching"), Branching(3)),
    ("arpo", {"branch_first": 0.25}, part("branching"), Branching(first=0.25)),
    ("arpo", {"branch_tokens": 7}, part("branching"), Branching(tokens=7)),
    ("arpo", {"branch_threshold": 0.6}, part("branching"), Branching(threshold=0.6)),
    ("arpo", {"branch_credit": "hard"}, part("branching"), Branching(credit="hard")),
    ("grpo", {"dynamic_sampling": 3}, part("sampling"), DynamicSampling(3)),
    ("dapo", {"dynamic_sampling": 0}, part("sampling"), None),
    ("grpo", {"overlong_filter": True}, part("filters"), (OverlongFilter(),)),
    ("dapo", {"overlong_filter": False}, part("filters"), ()),
    ("grpo", {"overlong_cache": 2}, SHAPING, (SoftOverlong(6, 2),)),
    ("dapo", {}, SHAPING, (SoftOverlong(6, 1),)),
    ("dapo", {"overlong_cache": 0}, SHAPING, ()),
    ("grpo", {"length_reward": 0.2}, SHAPING, (GroupLength(0.2),)),
    ("grpo", {"length_penalty": 0.01}, SHAPING, (LengthPenalty(0.01),)),
    ("grpo", {"reward_floor": -1.0}, SHAPING, (RewardFloor(-1.0),)),
    ("grpo", {"reward_floor": 0.0}, SHAPING, ()),
    ("reinforce", {"redistribution": "even"}, SPREAD, Redistribution()),
    ("ppo", {"redistribution": "entropy"}, SPREAD, Redistribution("entropy")),
    ("reinforce", {"redistribution_share": 0.5, "redistribution": "even"}, SPREAD, Redistribution("even", 0.5)),
    ("grpo-process", {"redistribution": "even"}, SPREAD, Redistribution()),
    ("grpo", {"redistribution": "none"}, SPREAD, None),
    ("ppo", {"bootstrap_truncated": True}, ADVANTAGE, GAE(1.0, 0.95, whiten=True, bootstrap=True)),
    ("a2c", {"bootstrap_truncated": True}, lambda row: row.advantage.bootstrap, True),
    ("grpo", {"entropy": 0.1, "entropy_where": "reward"}, ENTROPY, Entropy(0.1, where="reward")),
    ("dapo", {"length_reward": 0.2}, SHAPING, (SoftOverlong(6, 1), GroupLength(0.2))),
    ("ppo", {"advantage": "to-go"}, CRITIC, None),
    ("ppo", {"critic": "shared"}, CRITIC, Value()),
    ("vapo", {"critic_warmup": 3}, CRITIC, Value(lam=1.0, warmup=3)),
    ("sac", {"critic_warmup": 3}, CRITIC, SoftQ(warmup=3)),
    ("sac", {"value_network": True}, CRITIC, SoftQ(warmup=2, state_value=True)),
    ("sac-v", {"value_network": False}, CRITIC, SoftQ(warmup=2)),
    ("ppo", {"value_clip": 0.5}, CRITIC, Value(clip=0.5)),
    ("ppo", {"value_clip": 0.0}, CRITIC, Value(clip=None)),
    ("ppo", {"value_coefficient": 0.5}, CRITIC, Value(coefficient=0.5)),
    ("grpo", {"imitation": 0.2}, part("imitation"), Imitation(0.2)),
    ("vapo", {"imitation": 0.0, "critic_warmup": 0}, part("imitation"), None),
    ("grpo", {"ptx": "text.jsonl"}, part("pretraining"), Pretraining()),
    (
        "grpo",
        {"ptx": "text.jsonl", "ptx_weight": "probability"},
        part("pretraining"),
        Pretraining(weight="probability"),
    ),
    ("chord", {"ptx_weight": "equal"}, part("pretraining"), Pretraining(0.1, mask_prompt=True)),
    ("grpo", {"ptx": "text.jsonl", "ptx_coefficient": 0.5}, part("pretraining"), Pretraining(0.5)),
    ("dr-grpo", {"trust_region": 0.02}, part("trust_region"), TrustRegion(0.02)),
    ("trpo", {"trust_region": 0.0}, part("trust_region"), None),
    ("sac", {"replay": 500}, part("replay"), Replay(500)),
    ("sac", {"replay": 0, "epochs": 1, "minibatches": 1}, part("replay"), None),
    ("reinforce", {"replay": 500}, part("replay"), Replay(500)),
    ("reinforce", {"replay": 500, "kl": 0.1}, part("replay"), Replay(500)),
    ("sac", {"kl": 0.1, "kl_estimator": "exact"}, part("kl"), KL("exact", 0.1)),
    ("distill-reverse-kl", {}, TEACHER, Distillation()),
    ("distill-reverse-kl", {"teacher_temperature": 0.5}, TEACHER, Distillation(temperature=0.5)),
    ("distill-reverse-kl", {"temperature": 0.5}, TEACHER, Distillation()),
    ("distill-jsd", {"divergence": "forward-kl"}, TEACHER, Distillation("forward-kl")),
    ("distill-jsd", {"teacher_top_k": 20}, TEACHER, Distillation("jensen-shannon", top_k=20)),
    ("distill-jsd", {"teacher_every": 3}, TEACHER, Distillation("jensen-shannon", every=3)),
    (
        "distill-reverse-kl",
        {"teacher_every": 1, "teacher_update_rate": 0.1},
        TEACHER,
        Distillation(every=1, rate=0.1),
    ),
    ("distill-jsd", {"jsd_beta": 0.1}, TEACHER, Distillation("jensen-shannon", beta=0.1)),
    ("distill-k1", {"distillation": 0.3}, TEACHER, Distillation("sampled", 0.3)),
    ("distill-reverse-kl", {"advantage": "baselined"}, ADVANTAGE, Baselined()),
    ("distill-k1", {"advantage": "baselined"}, ADVANTAGE, Baselined()),
    ("distill-k1", {"minibatches": 2}, TEACHER, Distillation("sampled")),
    ("distill-jsd", {"minibatches": 2}, part("minibatches"), 2),
    ("grpo", {"teacher": "t"}, TEACHER, Distillation()),
    ("grpo", {"teacher": "t", "divergence": "sampled"}, TEACHER, Distillation("sampled")),
    ("grpo", {"teacher": "t", "advantage": "none"}, ADVANTAGE, Unrewarded()),
    ("grpo", {"epochs": 3}, part("epochs"), 3),
    ("grpo", {"epochs": 3, "target_kl": 0.05}, part("early_stop"), EarlyStop(0.05)),
    ("grpo", {"target_kl": 0}, part("early_stop"), None),
    ("grpo", {"minibatches": 2}, part("minibatches"), 2),
]
CASES = [pytest.param(*c, id=f"{c[0]} {c[1]}".replace("'", "")) for c in CHANGES]


def run_of(**how: Any) -> RL:
    """A small run's."""
    small = {"tasks": "rows", "env": "env", "model": "m", "steps": 10, "prompts": 2, "group": 3, "max_tokens": 6}
    config = filled(Distill if "teacher" in how else RL, {**small, **how})
    validate(config)
    return config


def chosen(name: str, how: dict[str, Any]) -> Algorithm:
    small = {"ptx": "text.jsonl"} if TABLE[name].pretraining else {"teacher": "t"} if TABLE[name].teacher else {}
    critic = TABLE[name].critic
    warm = {"critic_warmup": 2} if critic is not None and critic.warmup else {}
    turns = any(option.startswith("branch") for option in how)  # which only change something if there are several
    return adjust(find(name), run_of(**{**small, **warm, **how}), not turns)


@pytest.mark.parametrize(("name", "how", "where", "expected"), CASES)
def test_option_changes_the_part_it_names(name: str, how: dict[str, Any], where: Part, expected: Any) -> None:
    assert where(chosen(name, how)) == expected


EVERYTHING = replace(
    chosen("ppo", {}),
    kl=KL("k3", 0.1, control=Adaptive()),
    ratio=(PessimisticClip(), OverSequence("mean")),
    correction=Correction(),
    off_policy_mask=OffPolicyMask(),
    entropy=Entropy(0.1, target=0.5),
    select=(TopEntropy(), CovarianceClip()),
    covariance=CovariancePenalty(),
    early_stop=EarlyStop(),
    branching=Branching(),
    sampling=DynamicSampling(),
    filters=(OverlongFilter(),),
    shaping=(SoftOverlong(6, 1), GroupLength(), LengthPenalty(), RewardFloor()),
    imitation=Imitation(),
    pretraining=Pretraining(),
    trust_region=TrustRegion(),
    replay=Replay(),
    teacher=Distillation(),
)
"""Most parts that there are, in one row; for nothing but to reach their settings."""
WHOLE: dict[str, Any] = {
    "advantage": ADVANTAGES,
    "surrogate": SURROGATES,
    "aggregate": AGGREGATES,
    "ratio": RATIOS,
    "kl.control": CONTROLS,
    "filters": ("true", "false"),
}
"""Places of whole parts -> what may stand there."""
CANDIDATES = (
    "-0.5",
    "0.5",
    "3",
    "0.25",
    "true",
    "false",
    "length",
    "batch",
    "others",
    "k1",
    "k2",
    "group",
    "reward",
    "token",
    "loss",
    "old",
    "reference",
    "sum",
    "mean",
    "icepop",
    "none",
    "forward-kl",
    "sampled",
    "sampler",
    "hard",
    "kl",
    "tv",
    "start",
    "probability",
    "history",
    "response",
)


@pytest.mark.parametrize("row", [*TABLE.values(), EVERYTHING], ids=lambda r: r.name)
def test_every_setting_of_every_part_is_reached_by_its_place_and_changes_nothing_else(row: Algorithm) -> None:
    for place in settings_of(row):
        tried = tuple(WHOLE[place]) if place in WHOLE else CANDIDATES
        for text in tried:
            try:
                changed = change(row, {place: text})
            except UserError:
                continue
            if changed != row:
                break
        else:
            pytest.fail(f"{place} took none of {tried}")
        if place not in WHOLE:
            moved = {p for p, v in settings_of(changed).items() if settings_of(row).get(p) != v}
            assert moved - WHOLE.keys() == {place}, (place, text)


def test_every_flag_is_proven() -> None:
    others = {"ptx", "critic", "teacher", "temperature", "epsilon_greedy"}
    assert flags(Algorithm).keys() | others == {option for _, how, *_ in CHANGES for option in how}


@pytest.mark.parametrize("name", TABLE)
def test_row_without_any_option_is_the_table_s_own(name: str) -> None:
    row, own = chosen(name, {}), TABLE[name]
    if own.critic is not None and own.critic.warmup:
        own = replace(own, critic=replace(own.critic, warmup=2))  # type: ignore[type-var]
    if isinstance(own.aggregate, ConstantLength):
        own = replace(own, aggregate=ConstantLength(6))
    if own.shaping:
        own = replace(own, shaping=(SoftOverlong(6, 1),))
    if own.replay is None:  # an update needs a group, and there are two
        own = replace(own, minibatches=min(2, own.minibatches))
    assert row == own


def digits(task: Task, reply: str) -> dict[str, float]:
    return {"digits": sum(c.isdigit() for c in reply) / 8}


TASKS = [{"id": str(i), "prompt": f"{i}+1="} for i in range(4)]


class NamesTokens:
    """A teacher that names the likeliest tokens of a model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def logp(self, transcripts: Sequence[Transcript]) -> list[torch.Tensor]:
        return [told.sampled for told in self.top(transcripts, 1)]

    def top(self, transcripts: Sequence[Transcript], count: int) -> list[TopTokens]:
        found = []
        for transcript in transcripts:
            with torch.no_grad():
                tokens = torch.tensor(transcript.tokens)
                hidden = self.model(tokens, torch.arange(len(tokens)), causal)
                logs = (hidden @ self.model.head.weight.T).log_softmax(-1)[transcript.scored - 1]
            sampled, top = tokens[transcript.scored][:, None], logs.topk(count)
            last = sampled.masked_fill((top.indices == sampled).any(-1, keepdim=True), -1)
            own = logs.gather(-1, sampled)
            found.append(TopTokens(torch.cat([top.indices, last], -1), torch.cat([top.values, own], -1), own[:, 0]))
        return found


def teachers_of(row: Algorithm, learner: LocalLearner) -> Teachers | None:
    if row.teacher is None:
        return None
    named = NamesTokens(learner.others[NAMED_TEACHER])
    return Teachers(WORDS, {}, {NAMED_TEACHER: named}) if row.teacher.top_k else Teachers(WORDS, {NAMED_TEACHER: 64})


@pytest.mark.parametrize(("name", "how", "where", "expected"), CASES)
def test_row_with_the_option_takes_a_step(name: str, how: dict[str, Any], where: Part, expected: Any) -> None:
    row = chosen(name, how)
    learner = new_learner(row, torch.float32)
    texts = [[demonstrate({"id": t["id"], "prompt": t["prompt"], "response": "1"}, WORDS, [0])] for t in TASKS]
    length = 20 if row.filters else 6  # some replies must end by themselves to be learned from
    collector = collector_of(TASKS, new_player(digits, learner.model, length), row, Size(2, 3, 60), success=0.25)
    source = RLSource(collector, learner, row, texts=texts, teachers=teachers_of(row, learner))
    figures: list[dict[str, float]] = []
    steps = 2 if row.replay or row.moving else 1
    train(learner, source, PolicyObjective(row), [lambda t: figures.append(t.stats.means())], first=1, steps=steps)
    assert len(figures) == steps and all(f["skipped"] == 0 and math.isfinite(f["loss"]) for f in figures)


def test_critic_has_a_learning_rate_of_its_own() -> None:
    row = chosen("ppo", {})
    model, critic = new_learner(row).model, new_learner(row).critic
    plan = Optimization(lr=1e-3, schedule="linear", warmup=2, updates=4, critic_lr=5e-3)
    learner = LocalLearner(model, plan, critic=critic)
    for group in learner.optimizer.param_groups:
        group["params"] = []
    learner.update([], PolicyObjective(row))
    assert [g["lr"] for g in learner.optimizer.param_groups] == pytest.approx([5e-4, 5e-4, 2.5e-3, 2.5e-3])


@pytest.mark.parametrize("turn", [1, -1])
def test_settings_of_a_part_are_of_the_part_that_is_chosen_with_them_in_whatever_order(turn: int) -> None:
    given = [("surrogate.high", 0.5), ("surrogate", "clip"), ("kl_control", "adaptive")]
    row = change(TABLE["rloo"], dict(given[::turn]))
    assert row.surrogate == Clip(0.2, 0.5) and row.kl is not None and row.kl.control == Adaptive()


@pytest.mark.parametrize(("single_turn", "how"), [(True, {}), (False, {"max_turns": 1})])
def test_branches_are_refused_where_an_episode_is_one_reply(single_turn: bool, how: dict[str, Any]) -> None:
    told = "grpo: --branches, --branch-credit would have no effect: rollouts branch after tool results.*leave it out"
    with pytest.raises(UserError, match=told):
        adjust(find("grpo"), run_of(branches=2, branch_credit="hard", **how), single_turn)
    assert adjust(find("arpo"), run_of(**how), single_turn).branching == Branching()


# -- what is written down of settings ----------------------------------------------------------------------------------

WRITTEN = """
ConstantLength.length = None: above 0
Baselined.eps = 1e-06: above 0
Baselined.signal = False
KStep.k = 5: at least 1
KStep.gamma = 1.0: at least 0 and at most 1
KStep.whiten = False
KStep.bootstrap = False
KStep.eps = 1e-08: above 0
GAE.gamma = 1.0: at least 0 and at most 1
GAE.lam = 0.95: at least 0 and at most 1
GAE.alpha = None: above 0
GAE.whiten = False
GAE.bootstrap = False
GAE.eps = 1e-08: above 0
Decoupled.eps = 1e-06: above 0
StepRewards.eps = 1e-06: above 0
TurnGroups.weight = 1.0: above 0
TurnGroups.gamma = 0.95: at least 0 and at most 1
TurnGroups.state = observation
TurnGroups.scale = group
TurnGroups.eps = 1e-06: above 0
TurnHistories.history = 2: at least 0
TurnHistories.power = 1.0: at least 0
TurnHistories.gamma = 0.95: at least 0 and at most 1
TurnHistories.scale = group
TurnHistories.eps = 1e-06: above 0
MovingReference.every = 1: at least 0; 0 is absent
MovingReference.rate = 1.0: above 0 and at most 1
ToGo.whiten = False
ToGo.gamma = 1.0: at least 0 and at most 1
ToGo.eps = 1e-08: above 0
Redistribution.weight = even; none is absent
Redistribution.share = 1.0: above 0 and at most 1
SoftQ.gamma = 1.0: at least 0 and at most 1
SoftQ.tau = 0.05: at least 0 and at most 1
SoftQ.coefficient = 1.0: at least 0
SoftQ.warmup = 20: at least 0
SoftQ.state_value = False
Value.clip = 0.2: above 0; 0 is none
Value.coefficient = 0.1: at least 0
Value.lam = None: at least 0 and at most 1
Value.warmup = 0: at least 0
Branching.branches = 1: above 0; 0 is absent
Branching.first = 0.5: above 0 and below 1
Branching.tokens = 20: above 0
Branching.alpha = 0.5: at least 0 and at most 1
Branching.beta = 0.2: above 0
Branching.threshold = 0.5
DynamicSampling.rounds = 4: above 0; 0 is absent
DynamicSampling.low = 0.0: at least 0 and below 1
DynamicSampling.high = 1.0: above 0 and at most 1
Replay.capacity = 4096: above 0; 0 is absent
TopEntropy.share = 0.2: above 0 and at most 1; 1 is absent
CovarianceClip.share = 0.0002: above 0 and at most 1; 0 is absent
CovarianceClip.low = 1.0
CovarianceClip.high = 5.0
CovariancePenalty.share = 0.0002: above 0 and at most 1; 0 is absent
CovariancePenalty.coefficient = 1.0: above 0
Adaptive.target = 0.05: above 0
Adaptive.horizon = 10000.0: above 0
EarlyStop.kl = 0.02: above 0; 0 is absent
Entropy.coefficient = 0.0: at least 0; 0 is absent
Entropy.target = None: above 0
Entropy.rate = 0.01: above 0
Entropy.where = loss
HalvingDoubling.target = 0.01: above 0
KL.beta = 0.04: at least 0; 0 is absent
KL.control = None
Imitation.coefficient = 0.1: at least 0; 0 is absent
Pretraining.coefficient = 1.0: at least 0
Pretraining.rows = 16: above 0
Pretraining.weight = equal
Correction.cap = 2.0: above 1
PessimisticClip.width = 0.4: above 0
LengthPenalty.cost = 0.0001: at least 0; 0 is absent
RewardFloor.floor = -1.0: at most 0; 0 is absent
GroupLength.weight = 0.1: at least 0; 0 is absent
SoftOverlong.limit = None: above 0
SoftOverlong.cache = None: above 0; 0 is absent
Clip.low = 0.2: at least 0 and at most 1
Clip.high = 0.2: at least 0
Clip.dual = None: above 1; 0 is none
WeightedLogProbability.high = None: at least 0
SoftGate.positive = 1.0: above 0
SoftGate.negative = 1.05: above 0
DivergenceMask.low = 0.15: at least 0
DivergenceMask.high = 0.15: at least 0
GammaWeight.power = 2.0: above 0
GammaWeight.decay = 3.0: above 0
GammaWeight.negative_power = 3.0: above 0
GammaWeight.negative_decay = 2.0: above 0
OffPolicyMask.delta = 0.5: above 0; 0 is absent
Distillation.coefficient = 1.0: above 0
Distillation.beta = 0.5: above 0 and below 1
Distillation.temperature = None: above 0
Distillation.every = 0: at least 0
Distillation.rate = 1.0: above 0 and at most 1
TrustRegion.delta = 0.01: above 0; 0 is absent
TrustRegion.iterations = 10: above 0
TrustRegion.damping = 0.01: at least 0
TrustRegion.halvings = 10: at least 0
"""
"""Defaults and ranges as the papers have them, where they say any, and else as they were chosen."""


@pytest.mark.parametrize("line", WRITTEN.strip().splitlines())
def test_default_and_range_of_a_setting_are_those_written_down(line: str) -> None:
    place, _, rest = line.partition(" = ")
    part, name = place.split(".")
    (field,) = (f for f in dataclasses.fields(globals()[part]) if f.name == name)
    told = setting_of(field)
    words = f"{field.default}" + (f": {told.bounds}" if str(told.bounds) else "")
    words += "" if told.off is NEVER else f"; {told.off} is none"
    words += "" if told.absent is NEVER else f"; {told.absent} is absent"
    assert words == rest


ASKED = """
reinforce: | |
reinforce-baseline: | |
off-policy-pg: old | |
reinforce++: old, reference | |
reinforce++-baseline: group, reference | | every token
rloo: group, old, reference | |
remax: greedy | |
grpo: group, reference | | every token
grpo-process: group, reference | | every token
gigpo: group, reference, turns | | every token
hgpo: group, reference, turns | | every token
grpo-sequence: group, old, reference | | every token
iterative-grpo: group, reference | | every token
dr-grpo: episode tokens, group, old | |
dapo: episode tokens, group, old | |
gspo: group, old | |
gspo-token: group, old | |
gmpo: group, old | |
gpg: group | |
lite-ppo: group | |
pass-at-k: group, success | |
cispo: group, old | |
sapo: group, old | |
dppo: episode tokens, group | |
dppo-kl: episode tokens, group | |
maxrl: group | |
luspo: group, old | |
vespo: group | |
deepseek-v3.2: group, reference | | every token
chord: group | |
clip-cov: group, old | |
kl-cov: group, old | |
trpo: group | | every token
arpo: group, reference | | every token
a2c: value | entropy, value | every token
ppo: old, reference, value | value | every token
ppo-kl: old, value | value | every token
ppo-ptx: old, reference, value | value | every token
open-reasoner-zero: value | value | every token
vapo: old, success, value | value | every token
sac: action value | entropy, expected_q, q, target_q | every token
sac-v: action value, soft state value | entropy, expected_q, q, target_value, value | every token
distill-reverse-kl: | reverse_kl | every token
distill-forward-kl: | forward_kl | every token
distill-jsd: | jensen_shannon | every token
distill-k1: teacher | | every token
"""
"""Row: what it needs of a run | what its loss reads besides log-probabilities | whether advantage 0 may have a gradient."""


@pytest.mark.parametrize("line", ASKED.strip().splitlines())
def test_row_asks_the_run_for_what_it_uses_and_for_no_more(line: str) -> None:
    row = TABLE[line.partition(":")[0]]
    needs, wants = (", ".join(sorted(map(str, of))) for of in (row.needs, row.wants))
    said = f"{row.name}: {needs} | {wants} | {'every token' if row.moves_every_token else ''}"
    assert " ".join(said.split()) == line
    for need in Need:
        assert bool(row.needing(need)) is (need in row.needs) or need is Need.OLD


# -- contradictions ----------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # what learns from a teacher, or from nothing
    ("grpo", {"advantage": "none"}, "--advantage none has nothing to learn from without a teacher"),
    (
        "grpo",
        {"divergence": "sampled"},
        "--divergence cannot go with grpo.*posttrain distill --teacher FOLDER brings one",
    ),
    ("grpo", {"teacher": "t", "env": ""}, "learns from rewards and its teacher: give --env, or --advantage none"),
    ("distill-jsd", {"replay": 500}, "a teacher scores only the step's own rollouts: leave out --replay"),
    ("distill-jsd", {"dynamic_sampling": 2}, "learns nothing from rewards, so --dynamic-sampling would change nothing"),
    ("distill-jsd", {"kl": 0.1, "kl_where": "reward"}, "so --kl-where reward would change nothing"),
    ("distill-jsd", {"length_reward": 0.1}, "so what shapes the reward would change nothing"),
    ("distill-jsd", {"top_entropy": 0.2}, "--top-entropy selects where rewards are learned from"),
    ("distill-k1", {"jsd_beta": 0.2}, "--jsd-beta has no effect with sampled"),
    ("distill-jsd", {"jsd_beta": 1.0}, "--jsd-beta must be above 0 and below 1, not 1"),
    ("distill-jsd", {"distillation": 0.0}, "--distillation must be above 0, not 0"),
    ("distill-k1", {"teacher_top_k": 20}, "--teacher-top-k has no effect with sampled"),
    ("distill-jsd", {"teacher_temperature": 0.0}, "--teacher-temperature must be above 0, not 0"),
    # parts that do not have what the option changes
    ("ppo", {"baseline": "group"}, "--baseline cannot go with ppo.*--advantage baselined"),
    ("ppo", {"scale": "group", "baseline_weight": "length"}, "--scale cannot go with ppo.*--advantage baselined"),
    ("reinforce", {"scale": "batch"}, "--scale cannot go with reinforce.*--advantage baselined"),
    ("reinforce", {"baseline": "batch"}, "--baseline is one of none, group, not 'batch'"),
    ("reinforce", {"baseline": "others"}, "--baseline is one of none, group"),
    ("reinforce", {"gae_lambda": 0.9}, "--gae-lambda .*--advantage gae"),
    ("ppo", {"gae_lambda": 0.9, "gae_alpha": 0.1}, "--gae-lambda already .*leave out --gae-alpha"),
    ("reinforce", {"gae_alpha": 0.1}, "--gae-alpha .*--advantage gae"),
    ("sac", {"gae_alpha": 0.1}, "--gae-alpha cannot go with sac"),
    ("grpo", {"gamma": 0.9}, "--gamma cannot go with grpo.*--advantage to-go or --advantage gae"),
    ("grpo", {"whiten": True}, "--whiten cannot go with grpo"),
    ("sac", {"gae_lambda": 0.9}, "--gae-lambda cannot go with sac"),
    ("sac", {"whiten": True}, "--whiten cannot go with sac"),
    ("rloo", {"clip_low": 0.1}, "--clip-low cannot go with rloo.*--surrogate clip"),
    ("cispo", {"clip_low": 0.1}, "--clip-low cannot go with cispo.*--surrogate clip"),
    ("gpg", {"ratio": "sequence-mean"}, "gpg: it has no ratio.*leave out --ratio, or see --surrogate"),
    ("gpg", {"clip_dual": 3.0}, "--clip-dual cannot go with gpg"),
    # the KL
    ("grpo", {"kl": 0.0, "kl_estimator": "k2"}, "--kl-estimator cannot go with grpo.*--kl brings one"),
    ("dr-grpo", {"kl_control": "adaptive"}, "--kl-control cannot go with dr-grpo.*--kl brings one"),
    ("dr-grpo", {"reference_every": 5}, "dr-grpo: .*--reference-every .*--kl 0.01"),
    ("grpo", {"kl_target": 0.1}, "--kl-target cannot .*--kl-control adaptive or --kl-control halving-doubling"),
    ("ppo-kl", {"kl_horizon": 9.0}, "--kl-horizon .*--kl-control adaptive"),
    ("ppo-kl", {"kl_estimator": "exact"}, "ppo-kl: .*leave out --kl-estimator exact"),
    ("ppo-kl", {"reference_every": 5}, "ppo-kl: .*--reference-every"),
    ("ppo-kl", {"kl_where": "reward"}, "ppo-kl: .*leave out --kl-where"),
    ("grpo-process", {"kl_where": "reward"}, "grpo-process: .*leave out --kl-where reward"),
    ("grpo", {"kl_unit": "response", "kl_where": "reward"}, "grpo: --kl-unit response .*leave it out"),
    ("grpo", {"kl_unit": "response", "kl_estimator": "exact"}, "grpo: --kl-unit response .*leave it out"),
    ("deepseek-v3.2", {"kl_unit": "response"}, "deepseek-v3.2: --kl-unit response .*leave it out"),
    ("grpo", {"k_step": 3}, "--k-step cannot go with grpo.*--advantage k-step"),
    ("grpo", {"advantage": "k-step", "k_step": 0}, "--k-step must be at least 1, not 0"),
    ("grpo", {"length_penalty": -1.0}, "--length-penalty must be at least 0"),
    ("deepseek-v3.2", {"kl_where": "reward"}, "deepseek-v3.2: --kl-weighed .*leave it out"),
    ("grpo", {"kl_estimator": "exact", "kl_weighed": True}, "grpo: --kl-weighed .*leave it out"),
    ("ppo-kl", {"kl_weighed": True}, "ppo-kl: --kl-weighed .*leave it out"),
    ("gpg", {"replay": 100, "kl": 0.1, "kl_weighed": True}, "gpg: .*unknown for rollouts of earlier steps"),
    ("gpg", {"replay": 100, "off_policy_mask": 0.1}, "gpg: .*unknown for rollouts of earlier steps"),
    # terms and choices
    ("sac", {"entropy": 0.0}, "sac: .*--entropy-target"),
    ("sac", {"entropy_where": "reward"}, "sac: .*--entropy-target"),
    ("grpo", {"entropy_where": "reward"}, "--entropy-where cannot go with grpo"),
    ("grpo", {"entropy": 0.1, "entropy_where": "reward", "entropy_target": 1.0}, "grpo: .*leave out --entropy-where"),
    ("grpo-process", {"entropy": 0.1, "entropy_where": "reward"}, "leave out --entropy-where reward"),
    ("pass-at-k", {"entropy": 0.1, "entropy_where": "reward"}, "leave out --entropy-where reward"),
    ("reinforce", {"replay": 200, "entropy": 0.1, "entropy_where": "reward"}, "leave out --replay, or --entropy-where"),
    ("distill-jsd", {"entropy": 0.1, "entropy_where": "reward"}, "so --entropy-where reward would change nothing"),
    ("grpo", {"reward_floor": 0.5}, "--reward-floor must be at most 0, not 0.5"),
    ("grpo", {"bootstrap_truncated": True}, "--bootstrap-truncated cannot go with grpo"),
    ("grpo", {"correction_cap": 3.0}, "--correction-cap cannot go with grpo.*--correction brings one"),
    ("grpo", {"correction": "none", "correction_cap": 3.0}, "--correction-cap cannot go with grpo"),
    ("grpo", {"overlong_cache": 6}, "--overlong-cache 6 must be below .* of an episode, 6"),
    ("grpo", {"ptx_coefficient": 0.5}, "--ptx-coefficient cannot go with grpo.*--ptx FILE brings one"),
    ("ppo-ptx", {"ptx": None}, "ppo-ptx: .*--ptx FILE"),
    ("chord", {"ptx": None}, "chord: .*--ptx FILE"),
    ("grpo", {"ptx_weight": "equal"}, "--ptx-weight cannot go with grpo.*--ptx FILE brings one"),
    ("sac", {"top_entropy": 0.2}, "sac: .*leave out --top-entropy"),
    (
        "grpo",
        {"baseline": "none", "scale": "none", "baseline_weight": "length"},
        "grpo: --baseline-weight has no effect with --baseline none",
    ),
    ("lite-ppo", {"baseline": "none"}, "lite-ppo: .*set --scale none, or choose a --baseline"),
    ("reinforce", {"group": 1, "length_reward": 0.1}, "shaping compares .*--group must be at least 2"),
    ("grpo", {"group": 1}, "--group must be at least 2, not 1"),
    ("pass-at-k", {"advantage_k": 4, "group": 4}, "pass-at-k: a group of 4 .*set --group above --advantage-k"),
    ("pass-at-k", {"kl": 0.1, "kl_where": "reward"}, "pass-at-k: .*leave out --kl-where reward"),
    ("reinforce", {"group": 1, "dynamic_sampling": 2}, "sampling compares .*--group must be at least 2"),
    # the critic
    *(
        (
            name,
            {"redistribution": "even", **how},
            f"{name}: .*only the total reward.*--redistribution.*--advantage to-go",
        )
        for name, how in (
            ("grpo", {}),
            ("rloo", {}),
            ("pass-at-k", {}),
            ("grpo", {"advantage": "decoupled"}),
            ("distill-k1", {}),
        )
    ),
    ("a2c", {"redistribution": "even", "bootstrap_truncated": True}, "a2c: .*or --bootstrap-truncated"),
    ("reinforce", {"redistribution_share": 0.5}, "--redistribution-share cannot go with reinforce: .*--redistribution"),
    ("reinforce", {"redistribution": "even", "redistribution_share": 1.5}, "--redistribution-share must be .*not 1.5"),
    ("grpo", {"critic": "shared"}, "grpo: --critic .*without a critic.*--advantage gae"),
    ("grpo", {"critic_lr": 1e-3}, "grpo: --critic-lr .*without a critic.*--advantage gae"),
    ("grpo", {"value_clip": 0.1}, "--value-clip cannot go with grpo.*--advantage gae"),
    ("grpo", {"critic_model": "x"}, "grpo: --critic-model has no effect without a critic"),
    ("sac", {"value_clip": 0.1}, "--value-clip cannot go with sac"),
    ("sac", {"critic": "shared", "critic_warmup": 0}, "sac: .*backbone of the critic's own"),
    ("sac", {"advantage": "gae"}, "sac: .*need each other"),
    ("sac", {"surrogate": "clip", "replay": 0}, "sac: .*need each other"),
    ("ppo", {"critic_tau": 0.1}, "--critic-tau cannot go with ppo"),
    ("grpo", {"critic_tau": 0.1}, "--critic-tau cannot go with grpo"),
    ("ppo", {"value_network": True}, "--value-network cannot go with ppo"),
    ("sac-v", {"critic": "shared", "critic_warmup": 0}, "sac-v: .*backbone of the critic's own"),
    ("ppo", {"critic": "shared", "critic_warmup": 2}, "--critic separate"),
    ("ppo", {"critic": "shared", "critic_model": "x"}, "leave out --critic-model"),
    ("trpo", {"advantage": "gae", "critic": "shared"}, "trpo: .*--critic separate"),
    ("vapo", {"critic_warmup": 10}, "warms up for 10 of 10 steps.*--critic-warmup below --steps"),
    # updates
    ("gpg", {"epochs": 2, "correction": "none"}, "2 updates per step learn from samples of earlier weights"),
    ("grpo", {"minibatches": 3}, "--minibatches 3 is above --prompts 2"),
    ("dr-grpo", {"replay": 100, "correction": "truncate"}, "leave out --correction, and give --old-policy sampler"),
    ("trpo", {"replay": 100}, "leave out --replay"),
    (
        "off-policy-pg",
        {"advantage": "gae"},
        "a discounted advantage does not define: --weight-at token with --ratio sequence-sum",
    ),
    ("off-policy-pg", {"top_entropy": 0.5}, "--top-entropy does not define"),
    ("reinforce", {"replay": 200, "kl": 0.1, "kl_where": "reward"}, "leave out --replay, or --kl-where reward"),
    (
        "ppo",
        {"surrogate": "log-probability", "kl": 0.0, "replay": 100},
        "leave out --replay, or --advantage gae",
    ),
    ("sac", {"replay": 5}, "--replay 5 is below a step's 6 rollouts"),
    # what would change nothing
    ("grpo", {"clip_high": 0.28}, "grpo: --clip-high would have no effect: with one update .*--minibatches 4"),
    ("dapo", {"minibatches": 1, "clip_low": 0.1}, "dapo: --clip-low would have no effect"),
    ("cispo", {"minibatches": 1, "settings": {"surrogate.high": 3}}, "cispo: --clip-high would have no effect"),
    ("grpo", {"off_policy_mask": 0.1}, "grpo: --off-policy-mask would have no effect: .*--minibatches 4"),
    ("grpo", {"target_kl": 0.1}, "grpo: --target-kl would have no effect: .*--minibatches 4"),
    ("dr-grpo", {"replay": 100, "target_kl": 0.1}, "dr-grpo: .*unknown for rollouts of earlier steps"),
    ("grpo", {"target_kl": -0.1}, "--target-kl must be above 0, not -0.1"),
    ("grpo", {"kl_cov": 0.1}, "grpo: --kl-cov would have no effect: .*--minibatches 4"),
    ("sac", {"clip_cov": 0.1}, "sac: its critic learns from every token: leave out --clip-cov"),
    ("distill-jsd", {"kl_cov": 0.1, "minibatches": 2}, "--kl-cov selects where rewards are learned from"),
    ("dr-grpo", {"replay": 100, "kl_cov": 0.1}, "dr-grpo: .*unknown for rollouts of earlier steps"),
    ("grpo", {"clip_cov": 1.5}, "--clip-cov must be above 0 and at most 1, not 1.5"),
    # places
    (
        "grpo",
        {"settings": {"surrogate.hihg": 1}},
        "surrogate has no setting 'hihg'; did you mean 'high'.*low, high, dual",
    ),
    (
        "grpo",
        {"minibatches": 4, "clip_high": 0.2, "settings": {"surrogate.high": 0.3}},
        "--clip-high 0.2 and --set surrogate.high=0.3 are the same setting: leave one of them out",
    ),
    ("grpo", {"settings": {"surogate.high": 1}}, "no component .*'surogate'; did you mean 'surrogate.high'"),
    ("grpo", {"settings": {"surrogate.high": "much"}}, "surrogate.high is a number, not 'much'"),
    ("grpo", {"settings": {"surrogate.high.x": 1}}, "surrogate.high is a single value"),
    ("grpo", {"settings": {"advantage.eps": 0}}, "advantage.eps must be above 0"),
    ("grpo", {"settings": {"critic.lam": 1.0}}, "there is no critic to change"),
    ("grpo", {"settings": {"shaping.soft-overlang.cache": 3}}, "did you mean 'soft-overlong'"),
    ("grpo", {"settings": {"shaping.soft-overlong": 3}}, "name a setting of soft-overlong: limit, cache"),
    ("grpo", {"settings": {"name": "mine"}}, "no component 'name'"),
    # numbers
    ("ppo", {"gamma": 1.5}, "--gamma must be at least 0 and at most 1, not 1.5"),
    ("ppo", {"gae_lambda": -0.1}, "--gae-lambda must be at least 0"),
    ("grpo", {"off_policy_mask": -1}, "--off-policy-mask must be above 0, not -1"),
    ("grpo", {"top_entropy": 0.0}, "--top-entropy must be above 0 and at most 1"),
    ("grpo", {"clip_low": 1.5}, "--clip-low must be .*at most 1, not 1.5"),
    ("grpo", {"clip_high": -0.1}, "--clip-high must be at least 0"),
    ("grpo", {"clip_dual": 1.0}, "--clip-dual must be above 1, not 1"),
    ("grpo", {"correction": "icepop", "correction_cap": 0.5}, "--correction-cap .*above 1, not 0.5"),
    ("grpo", {"kl": -0.1}, "--kl must be at least 0"),
    ("grpo", {"kl_control": "adaptive", "kl_target": 0.0}, "--kl-target must be above 0"),
    ("ppo", {"critic_lr": 0.0}, "--critic-lr must be above 0"),
    ("grpo", {"trust_region": -1.0}, "--trust-region must be above 0"),
    ("grpo", {"dynamic_sampling": -1}, "--dynamic-sampling must be above 0"),
    ("grpo", {"top_p": 0.9}, "--top-p and --top-k .*leave them at 1 and 0"),
    ("grpo", {"temperature": 0.0}, "--temperature 0 is greedy"),
    (
        "grpo",
        {"epsilon_greedy": 0.1, "old_policy": "start"},
        "rollouts of --epsilon-greedy were sampled by another policy",
    ),
    ("grpo", {"epsilon_greedy": 1.0}, "--epsilon-greedy must be at least 0 and below 1"),
]


@pytest.mark.parametrize(("name", "how", "told"), REFUSED, ids=[f"{n} {h}".replace("'", "") for n, h, _ in REFUSED])
def test_contradiction_is_refused_with_its_option_and_the_fix_in_one_line(
    name: str, how: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told) as refusal:
        chosen(name, how)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


# -- a row of one's own ------------------------------------------------------------------------------------------------

MINE = """
from posttrain.algorithms.credit import Baselined
from posttrain.algorithms.aggregate import AGGREGATES, TokenMean
from posttrain.algorithms.surrogate import SURROGATES, Clip
from posttrain.algorithms.policy import Algorithm

mine = Algorithm("mine", "nobody 2026", Baselined("group", "none"), Clip(0.1, 0.3), TokenMean())
number = 7
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "env.py").write_text("def reward(task, reply):\n    return float('1' in reply)\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(t) + "\n" for t in TASKS))
    save_model(tiny(WORDS), tmp_path / "start", WORDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


OWN_PART = """
from dataclasses import dataclass

import torch

from posttrain.algorithms.surrogate import Surrogate
from posttrain.core.component import setting


@dataclass(frozen=True)
class ByProbability(Surrogate):
    \"\"\"Rare tokens may move further: the clip's width is eps / sqrt(old probability).\"\"\"

    eps: float = setting(0.1, above=0, most=1)
    source = "nobody 2026, eq. 1"

    @property
    def formula(self):
        return f"min(r A, clip(r, 1 - w, 1 + w) A), w = {self.eps:g} exp(-old / 2)"

    def __call__(self, ratio, outputs, batch):
        width = self.eps * (-batch.old_logp / 2).exp()
        clipped = torch.clamp(ratio, 1 - width, 1 + width)
        return torch.minimum(ratio * batch.advantage, clipped * batch.advantage)
"""


def test_part_of_one_s_own_reads_the_batch_and_is_set_from_the_command_line(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "own.py").write_text(OWN_PART)
    words = "rl --tasks rows.jsonl --env env.py:reward --model start --steps 1 --prompts 2 --group 2 --max-tokens 3 "
    words += "--env-workers 0 --threads 1 --quiet --out run --algorithm dapo --set surrogate=own.py:ByProbability"
    assert main([*words.split(), "--set", "surrogate.eps=2"]) == 2
    assert "surrogate.eps must be above 0 and at most 1, not 2" in capsys.readouterr().err
    assert main([*words.split(), "--set", "surrogate.epps=0.3"]) == 2
    assert "surrogate has no setting 'epps'; did you mean 'eps'" in capsys.readouterr().err
    assert main([*words.split(), "--set", "surrogate.eps=0.3"]) == 0
    assert "w = 0.3 exp(-old / 2)" in "".join(json.loads((place / "run" / "run.json").read_text())["objective"])


def test_row_of_one_s_own_is_described_and_trained_with_like_any_other(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["algorithms", "mine.py:mine"]) == 0
    said = capsys.readouterr().out
    assert "mine: nobody 2026" in said and "clip(r, 0.9, 1.3)" in said and "differences from grpo" in said
    words = "rl --tasks rows.jsonl --env env.py:reward --model start --steps 1 --prompts 2 --group 2 --max-tokens 3"
    more = "--env-workers 0 --threads 1 --quiet --out run --algorithm mine.py:mine --minibatches 2 --clip-high 0.5"
    assert main([*words.split(), *more.split()]) == 0
    recorded = json.loads((place / "run" / "run.json").read_text())
    assert recorded["config"]["algorithm"] == "mine.py:mine" and "clip(r, 0.9, 1.5)" in "".join(recorded["objective"])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mine.py:number", "7 (int), not an algorithm: make it an Algorithm"),
        ("mine.py:absent", "absent"),
        ("nowhere.py:mine", "nowhere.py"),
        ("grop", "did you mean 'grpo'"),
    ],
)
def test_anything_else_under_that_name_is_refused_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    assert main(["algorithms", name]) == 2
    said = capsys.readouterr().err
    assert told in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("row", "place"),
    [
        (replace(find("grpo"), surrogate=Clip(dual=0.5)), "surrogate.dual must be above 1"),
        (replace(find("ppo"), advantage=GAE(lam=1.5)), "advantage.lam must be"),
        (replace(find("dapo"), minibatches=0), "minibatches must be"),
        (replace(find("dapo"), shaping=(SoftOverlong(cache=-3),)), "shaping.soft-overlong.cache must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_of_a_row_of_one_s_own_are_held_to_the_same_ranges(row: Algorithm, place: str) -> None:
    with pytest.raises(UserError, match=place):
        adjust(row, filled(RL, {"group": 4}))


def test_row_of_one_s_own_differs_in_what_it_says() -> None:
    own = Algorithm(
        "mine", "nobody 2026", Baselined("group", "group"), Clip(0.2, 0.2), SequenceMean(), kl=KL("k3", 0.04)
    )
    assert differences(own, TABLE["grpo"]) == []
    assert len(differences(replace(own, kl=None), TABLE["grpo"])) == 1


@pytest.mark.parametrize("value", ["none", None, "0", 0])
def test_none_removes_a_part_as_0_does(value: Any) -> None:
    assert change(TABLE["grpo"], {"kl": value}).kl is None


@pytest.mark.parametrize("place", ["ratio", "filters"])
def test_choice_is_known_by_its_name_again_whatever_the_settings_within_it(place: str) -> None:
    for name in WHOLE[place]:
        row = change(TABLE["grpo"], {place: name})
        assert settings_of(row)[place] == name
        if name == "geometric":
            assert settings_of(change(row, {"ratio.pessimistic-clip.width": "0.7"}))[place] == name


def test_none_leaves_no_part_where_there_may_be_several_or_one_and_is_no_word_where_there_must_be_one() -> None:
    assert change(TABLE["dapo"], {"filters": "none"}).filters == ()
    assert change(TABLE["dapo"], {"filters": None}).filters == ()
    with pytest.raises(UserError, match="kl.control is one of fixed, adaptive, halving-doubling, none, my.py:NAME"):
        change(TABLE["grpo"], {"kl.control": "adaptiv"})
    with pytest.raises(UserError, match=r"aggregate is one of [^:]*constant, prompt-mean, my.py:NAME, not 'none'"):
        change(TABLE["grpo"], {"aggregate": "none"})


def test_word_that_names_no_part_is_answered_with_those_there_are_and_looked_for_in_no_file() -> None:
    with pytest.raises(UserError, match="aggregate is one of .*, not 'tokenmean'; did you mean 'token-mean'"):
        change(TABLE["grpo"], {"aggregate": "tokenmean"})


@pytest.mark.parametrize("wrong", [{"epochs": "2"}, {"minibatches": 1.5}, {"surrogate": Clip("0.2", 0.2)}], ids=str)  # type: ignore[arg-type]
def test_row_of_one_s_own_with_a_setting_of_another_type_is_refused(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.algorithms.all_algorithms.load_named", lambda name: replace(TABLE["grpo"], **wrong))
    with pytest.raises(UserError, match="grpo: (epochs|minibatches|surrogate.low) must be a (whole )?number, not"):
        find("own.py:row")


@pytest.mark.parametrize(
    "wrong",
    [
        {"surrogate": (Clip(0.2, 0.2),)},
        {"surrogate": Clip},
        {"ratio": OverSequence("sum")},
        {"ratio": (Clip(0.2, 0.2),)},
    ],
    ids=str,
)
def test_row_of_one_s_own_with_one_part_for_several_or_several_for_one_is_refused(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.algorithms.all_algorithms.load_named", lambda name: replace(TABLE["grpo"], **wrong))
    with pytest.raises(
        UserError, match="grpo: (surrogate must be a component|ratio must be a tuple of components) of kind"
    ):
        find("own.py:row")


REFUSED = r"""
grpo kl.control.target=0.1 there is no kl.control to change; choose one first: --set kl.control=...
dapo kl.coef=0.1 there is no kl to change; --set kl.beta=... makes one
grpo imitation.x=7 there is no imitation to change; --set imitation.coefficient=... makes one
dapo shaping.soft-overlong.buffer=7 shaping.soft-overlong has no setting 'buffer' (it has: limit, cache)
grpo filters.overlong=7 filters has no 'overlong'; did you mean 'overlong-filter'? (there are: overlong-filter)
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_setting_that_has_no_place_is_told_where_it_is_missing(line: str) -> None:
    row, setting, told = line.split(maxsplit=2)
    place, _, value = setting.partition("=")
    with pytest.raises(UserError) as refused:
        change(TABLE[row], {place: value})
    assert str(refused.value) == f"{place}: {told}"


def test_one_setting_with_two_values_is_told_with_both() -> None:
    with pytest.raises(UserError) as refused:
        change(TABLE["grpo"], {"clip_high": 0.3, "surrogate.high": 0.4})
    told = "--clip-high 0.3 and --set surrogate.high=0.4 are the same setting: leave one of them out"
    assert str(refused.value) == told
    assert change(TABLE["dapo"], {"clip_high": 0.3, "surrogate.high": 0.3}).surrogate == Clip(0.2, 0.3)
