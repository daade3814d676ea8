"""A row as a run has it: the recipe's axes in place of the row's defaults. Contradictions are refused here.

Each function takes the row and the settings and gives the row with one axis changed. Settings that were left out are
None and change nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from posttrain.algorithms.aggregate import Aggregate, ConstantLength, PromptMean, SequenceMean, SequenceSum, TokenMean
from posttrain.algorithms.credit import GAE, Advantage, Baselined, Earned, Process, ToGo
from posttrain.algorithms.critic import SoftQ, Value
from posttrain.algorithms.filters import DynamicSampling, OverlongFilter, Replay, TopEntropy
from posttrain.algorithms.penalty import KL, Adaptive, Control, Entropy, HalvingDoubling
from posttrain.algorithms.policy import Algorithm, Imitation, Pretraining
from posttrain.algorithms.ratio import (
    Causal,
    Correction,
    OverSequence,
    PessimisticClip,
    RatioStep,
    SequenceValueTokenGradient,
)
from posttrain.algorithms.shaping import GroupLength, Shaping, SoftOverlong
from posttrain.algorithms.surrogate import (
    Clip,
    ExpectedQ,
    ImportanceRatio,
    LogProbability,
    Surrogate,
    WeightedLogProbability,
)
from posttrain.config import RL
from posttrain.learners.natural import TrustRegion
from posttrain.part import Limits, Need
from posttrain.types import UserError

ADVANTAGES: dict[str, Advantage] = {
    "baselined": Baselined(),
    "to-go": ToGo(),
    "process": Process(),
    "gae": GAE(whiten=True),
}
SURROGATES: dict[str, Surrogate] = {
    "clip": Clip(),
    "ratio": ImportanceRatio(),
    "log-probability": LogProbability(),
    "weighted": WeightedLogProbability(),
}
RATIOS: dict[str, tuple[RatioStep, ...]] = {
    "token": (),
    "sequence-mean": (OverSequence("mean"),),
    "sequence-sum": (OverSequence("sum"),),
    "sequence-value": (SequenceValueTokenGradient(),),
    "causal": (Causal(),),
    "geometric": (PessimisticClip(), OverSequence("mean")),
}
AGGREGATES: dict[str, Aggregate] = {
    "sequence-mean": SequenceMean(),
    "token-mean": TokenMean(),
    "sequence-sum": SequenceSum(),
    "constant": ConstantLength(),
    "prompt-mean": PromptMean(),
}


def adjust(row: Algorithm, settings: RL) -> Algorithm:
    """The row with these settings in place of its defaults. Raises UserError where they contradict each other."""
    for axis in (_advantage, _surrogate, _aggregate, _kl, _regularisers, _choice, _critic, _extras):
        row = axis(row, settings)
    row = replace(row, epochs=settings.epochs or row.epochs, minibatches=settings.minibatches or row.minibatches)
    row = row.configured(Limits(settings.max_tokens))
    _check(row, settings)
    _check_parts(row, settings)
    return row


def _given(settings: RL, **names: str) -> dict[str, Any]:
    """Field of a part -> value, for those of these options that were given: `_given(s, low="clip_low")`."""
    values = {part: getattr(settings, name) for part, name in names.items()}
    return {part: value for part, value in values.items() if value is not None}


def _refuse(row: Algorithm, settings: RL, names: tuple[str, ...], reason: str) -> None:
    """Raise UserError if any of these options was given."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(settings, name) is not None]
    if given:
        raise UserError(f"{', '.join(given)} cannot go with {row.name}: {reason}")


def _advantage(row: Algorithm, settings: RL) -> Algorithm:
    advantage = ADVANTAGES[settings.advantage] if settings.advantage else row.advantage
    changed = _given(settings, baseline="baseline", weight="baseline_weight", scale="scale")
    if isinstance(advantage, Baselined):
        advantage = replace(advantage, **changed)
    elif isinstance(advantage, ToGo) and changed.keys() <= {"baseline"} and changed.get("baseline") != "batch":
        if changed.get("baseline") == "others":
            _refuse(row, settings, ("baseline",), "rewards to go take --baseline group or none")
        advantage = replace(advantage, **changed)
    else:
        names = ("baseline", "baseline_weight", "scale")
        _refuse(row, settings, names, f"its advantage is {advantage.formula}; --advantage baselined takes them")
    if isinstance(advantage, GAE):
        if settings.gae_lambda is not None:
            _refuse(row, settings, ("gae_alpha",), "--gae-lambda already says lambda, the same for every length")
            advantage = replace(advantage, alpha=None)
        changed = _given(settings, gamma="gamma", lam="gae_lambda", alpha="gae_alpha", whiten="whiten")
        advantage = replace(advantage, **changed)
    elif isinstance(advantage, ToGo):
        _refuse(row, settings, ("gae_lambda", "gae_alpha"), "lambda belongs to --advantage gae")
        advantage = replace(advantage, **_given(settings, gamma="gamma", whiten="whiten"))
    elif not isinstance(row.critic, SoftQ):
        discounting = ("gamma", "gae_lambda", "gae_alpha", "whiten")
        _refuse(
            row,
            settings,
            discounting,
            "one advantage for the whole reply has no discount; see --advantage gae or to-go",
        )
    else:
        reason = "its critic learns from what each token earns, as it is; leave them out"
        _refuse(row, settings, ("gae_lambda", "gae_alpha", "whiten"), reason)
    return replace(row, advantage=advantage)


def _surrogate(row: Algorithm, settings: RL) -> Algorithm:
    surrogate = SURROGATES[settings.surrogate] if settings.surrogate else row.surrogate
    if isinstance(surrogate, Clip):
        changed = _given(settings, low="clip_low", high="clip_high", dual="clip_dual")
        surrogate = replace(surrogate, **{**changed, "dual": (changed.get("dual", surrogate.dual) or None)})
    elif isinstance(surrogate, WeightedLogProbability):
        _refuse(row, settings, ("clip_low", "clip_dual"), "its weight is only capped above, by --clip-high")
        surrogate = replace(surrogate, **_given(settings, high="clip_high"))
    else:
        names = ("clip_low", "clip_high", "clip_dual")
        _refuse(row, settings, names, f"it has no clip, it maximises {surrogate.formula}; --surrogate clip has one")
    ratio = row.ratio
    if settings.ratio is not None:
        if not surrogate.uses_ratio:
            _refuse(row, settings, ("ratio",), f"it has no ratio, it maximises {surrogate.formula}; see --surrogate")
        ratio = RATIOS[settings.ratio]
    elif not surrogate.uses_ratio:
        ratio = ()
    return replace(row, surrogate=surrogate, ratio=ratio)


def _aggregate(row: Algorithm, settings: RL) -> Algorithm:
    return replace(row, aggregate=AGGREGATES[settings.aggregate] if settings.aggregate else row.aggregate)


def _kl(row: Algorithm, settings: RL) -> Algorithm:
    changed = _given(settings, beta="kl", estimator="kl_estimator", where="kl_where")
    controls = ("kl_control", "kl_target", "kl_horizon")
    if settings.kl == 0 or (row.kl is None and settings.kl is None):
        names = ("kl_estimator", "kl_where", *controls, "reference_every")
        _refuse(row, settings, names, "there is no KL penalty to change: give it a coefficient, such as --kl 0.01")
        return replace(row, kl=None, refresh=0)
    kl = replace(row.kl or KL(), **changed)
    if kl.estimator == "exact" and kl.against == "old":
        _refuse(
            row, settings, ("kl_estimator",), "the old policy's whole distributions are not kept; see --kl-estimator k3"
        )
    kl = replace(kl, control=_control(row, kl, settings))
    refresh = row.refresh if settings.reference_every is None else settings.reference_every
    if refresh and kl.against == "old":
        _refuse(row, settings, ("reference_every",), "its KL is to the policy before the update, there is no reference")
    return replace(row, kl=kl, refresh=refresh)


def _control(row: Algorithm, kl: KL, settings: RL) -> Control | None:
    control = kl.control
    if settings.kl_control is not None:
        control = {"fixed": None, "adaptive": Adaptive(), "halving-doubling": HalvingDoubling()}[settings.kl_control]
    changed = _given(settings, target="kl_target", horizon="kl_horizon")
    if isinstance(control, Adaptive):
        return replace(control, **changed)
    if isinstance(control, HalvingDoubling):
        _refuse(row, settings, ("kl_horizon",), "only --kl-control adaptive has a horizon")
        return replace(control, **changed)
    _refuse(row, settings, ("kl_target", "kl_horizon"), "its coefficient is fixed; see --kl-control")
    return None


def _regularisers(row: Algorithm, settings: RL) -> Algorithm:
    """Entropy bonus, choice of tokens, correction."""
    entropy = row.entropy
    if settings.entropy == 0 and isinstance(row.critic, SoftQ):
        _refuse(row, settings, ("entropy",), "its temperature is above 0; tune it with --entropy-target")
    if settings.entropy == 0 and settings.entropy_target is None:
        entropy = None
    elif changed := _given(settings, coefficient="entropy", target="entropy_target"):
        entropy = replace(entropy or Entropy(0.0), **changed)
    select = row.select
    if settings.top_entropy is not None:
        select = TopEntropy(settings.top_entropy) if settings.top_entropy < 1 else None
    correction = row.correction
    if settings.correction == "none":
        _refuse(row, settings, ("correction_cap",), "there is no correction to bound")
        correction = None
    elif settings.correction:
        correction = replace(correction or Correction(), kind=settings.correction)
    if settings.correction_cap is not None:
        if correction is None:
            _refuse(row, settings, ("correction_cap",), "there is no correction to bound; see --correction")
        else:
            correction = replace(correction, cap=settings.correction_cap)
    return replace(row, entropy=entropy, select=select, correction=correction)


def _choice(row: Algorithm, settings: RL) -> Algorithm:
    """Which groups and rollouts are learned from, and what shapes their reward."""
    sampling = row.sampling
    if settings.dynamic_sampling is not None:
        rounds = settings.dynamic_sampling
        sampling = replace(sampling or DynamicSampling(), rounds=rounds) if rounds else None
    filters = row.filters
    if settings.overlong_filter is not None:
        filters = (OverlongFilter(),) if settings.overlong_filter else ()
    shaping: list[Shaping] = list(row.shaping)
    if settings.overlong_cache is not None:
        shaping = [s for s in shaping if not isinstance(s, SoftOverlong)]
        if settings.overlong_cache:
            shaping.append(SoftOverlong(cache=settings.overlong_cache))
    if settings.length_reward is not None:
        shaping = [s for s in shaping if not isinstance(s, GroupLength)]
        if settings.length_reward:
            shaping.append(GroupLength(settings.length_reward))
    return replace(row, sampling=sampling, filters=filters, shaping=tuple(shaping))


def _critic(row: Algorithm, settings: RL) -> Algorithm:
    own = ("critic_lr", "critic_warmup", "critic_tau", "critic_model", "value_clip", "value_coefficient")
    critic = row.critic
    if settings.critic == "none" or (isinstance(critic, Value) and Need.VALUE not in row.advantage.needs):
        critic = None
    elif (Need.VALUE in row.advantage.needs) and critic is None:
        critic = Value()
    if critic is None:
        if Need.VALUE in row.advantage.needs:
            raise UserError(
                f"{row.name} with GAE needs a critic: leave out --critic none, or choose another --advantage"
            )
        if settings.critic != "none":
            _refuse(row, settings, ("critic",), "nothing would use the critic: --advantage gae does")
        _refuse(row, settings, own, "it has no critic; --advantage gae brings one")
        return replace(row, critic=None)
    changed = _given(settings, warmup="critic_warmup", coefficient="value_coefficient")
    if isinstance(critic, Value):
        _refuse(row, settings, ("critic_tau",), "a critic of states has no slow copies; sac's has")
        changed |= {"clip": settings.value_clip or None} if settings.value_clip is not None else {}
        critic = replace(critic, **changed)
    elif isinstance(critic, SoftQ):
        _refuse(row, settings, ("value_clip",), "its critic values actions and is not clipped")
        critic = replace(critic, **changed, **_given(settings, gamma="gamma", tau="critic_tau"))
        if settings.critic == "shared":
            _refuse(row, settings, ("critic",), "its moving-average targets need a backbone of the critic's own")
    return replace(row, critic=critic)


def _extras(row: Algorithm, settings: RL) -> Algorithm:
    """Likelihood terms, replay, trust region."""
    imitation, pretraining, replay = row.imitation, row.pretraining, row.replay
    if settings.imitation is not None:
        imitation = Imitation(settings.imitation) if settings.imitation else None
    if settings.ptx:
        pretraining = replace(pretraining or Pretraining(), **_given(settings, coefficient="ptx_coefficient"))
    elif pretraining is not None:
        raise UserError(f"{row.name} mixes in the likelihood of text of your own: give it with --ptx FILE")
    else:
        _refuse(row, settings, ("ptx_coefficient",), "there is no text to weigh: give it with --ptx FILE")
    if settings.replay is not None:
        replay = Replay(settings.replay) if settings.replay else None
    region = row.trust_region
    if settings.trust_region is not None:
        region = replace(region or TrustRegion(), delta=settings.trust_region) if settings.trust_region else None
    return replace(row, imitation=imitation, pretraining=pretraining, replay=replay, trust_region=region)


def _check(row: Algorithm, settings: RL) -> None:
    """Refuse what no single axis can see."""

    def contradiction(reason: str) -> NoReturn:
        raise UserError(f"{row.name}: {reason}")

    if Need.GROUP in row.needs and settings.group < 2:
        parts = " and ".join(row.needing(Need.GROUP))
        contradiction(f"its {parts} compare the rollouts of a group: --group must be at least 2, not {settings.group}")
    if not row.surrogate.uses_ratio and not row.on_policy and row.replay is None:
        contradiction(
            f"maximises {row.surrogate.formula}, which takes the rollouts for fresh: {row.epochs * row.minibatches} updates "
            "per step need a ratio (--surrogate ratio or clip), or set --epochs 1 --minibatches 1"
        )
    if row.replay is not None and row.surrogate.uses_ratio:
        contradiction("rollouts of earlier steps have no old log-probabilities to make a ratio of: leave out --replay")
    if row.replay is not None and row.replay.capacity < settings.prompts * settings.group:
        contradiction(
            f"--replay {row.replay.capacity} is less than a step's {settings.prompts * settings.group} rollouts"
        )
    if settings.critic == "shared" and row.critic is not None and row.critic.warmup:
        contradiction("a critic that warms up alone would move the policy's backbone: --critic separate")
    if row.trust_region is not None and settings.critic == "shared":
        contradiction("a trust region is for the policy alone: --critic separate")
    if settings.critic == "shared" and settings.critic_model:
        contradiction("a shared critic has the policy's backbone: leave out --critic-model")
    soft = isinstance(row.critic, SoftQ)
    if soft != isinstance(row.surrogate, ExpectedQ) or soft != isinstance(row.advantage, Earned):
        contradiction(
            "action values, their expectation and what a token earns belong together: see posttrain algorithms sac"
        )
    if isinstance(row.advantage, Baselined) and row.advantage.baseline == "none" and row.advantage.weight != "equal":
        contradiction(f"--baseline-weight {row.advantage.weight} weighs a baseline that --baseline none leaves out")
    if row.select is not None and isinstance(row.critic, SoftQ):
        contradiction("its critic learns from every token: leave out --top-entropy")


def _check_parts(row: Algorithm, settings: RL) -> None:
    """Refuse parts that need each other or undo each other."""
    kl, baselined = row.kl, row.advantage if isinstance(row.advantage, Baselined) else None
    warmup = row.critic.warmup if row.critic is not None else 0
    rules = (
        (
            row.replay is not None and ((kl is not None and kl.where == "reward") or isinstance(row.critic, Value)),
            "of rollouts of earlier steps neither a KL nor a state's value is known: "
            "leave out --replay, or --kl-where reward and --advantage gae",
        ),
        (
            kl is not None and kl.where == "reward" and kl.against == "old",
            "its KL is to the policy that sampled, and 0 when rewards are given: leave out --kl-where",
        ),
        (
            kl is not None and kl.where == "reward" and isinstance(row.advantage, Process),
            "compares the rewards of steps, which no KL is taken off: leave out --kl-where reward",
        ),
        (
            baselined is not None and (baselined.baseline, baselined.scale) == ("none", "batch"),
            "without a baseline equal rewards would be divided by nothing: set --scale none, or choose a --baseline",
        ),
        (
            warmup >= settings.steps,
            f"its critic warms up for {warmup} of {settings.steps} steps, the policy would learn nothing: "
            "set --critic-warmup below --steps",
        ),
        (
            row.replay is None and row.minibatches > settings.prompts,
            f"an update needs a group: --minibatches {row.minibatches} is above --prompts {settings.prompts}",
        ),
    )
    for broken, reason in rules:
        if broken:
            raise UserError(f"{row.name}: {reason}")
