"""From rollouts to the gradient of an update, in float64 and through the library's own parts; for proofs about them.

What a run takes from its engine and from earlier weights (old log-probabilities, the reference's, the critic's values
of rollout time) is made up here, so that ratios, clips and returns are in all their cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from conftest import make_rollouts, tiny
from torch import Tensor

from posttrain.algorithms.critic_loss import SoftQ, Value
from posttrain.algorithms.earned_rewards import per_token
from posttrain.algorithms.policy import Algorithm, PolicyObjective
from posttrain.algorithms.policy_table import TABLE
from posttrain.config.resolve import filled
from posttrain.config.training import RL, Distill
from posttrain.core.batch import Batch, Scores, Stats
from posttrain.core.component import Need
from posttrain.core.protocols import Model, World
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, Env, Sampling, StopReason
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.player import Player
from posttrain.learners.forward_pass import REFERENCE, Teaching
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.critic import ActionValueModel, Critic, SoftStateValueModel, ValueModel
from posttrain.models.native.decoder import Decoder
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.adjust import adjust
from posttrain.training.sources.collector import Collector, Size
from posttrain.training.sources.length_filter import Placed
from posttrain.training.sources.packing import Taught, collate, pack
from posttrain.training.sources.scoreboard import scoreboard
from posttrain.training.sources.task_order import Uniform
from posttrain.training.sources.teacher_targets import NAMED, TEACHER

WORDS = Tokenizer.train(["0123456789+-*/= .abcdefghijklmnopqrstuvwxyz<>"], 64, "characters")
OTHER = NAMED.format("other")
TEACHER_TEMPERATURE = 1.3
SUCCESS = 0.75  # rewards from here on are successes

PerRollout = dict[int, Tensor]  # by id(rollout), so that rollouts may change their places


def chosen_row(row: Algorithm, **settings: Any) -> Algorithm:
    """The row as a run has it whose replies have at most 20 tokens."""
    given: dict[str, Any] = {"ptx": "text.jsonl"} if row.pretraining else {}
    warm = {"critic_warmup": 0} if row.critic else {}
    kind = Distill if row.teacher else RL
    if row.teacher:
        given["teacher_temperature"] = TEACHER_TEMPERATURE
    return adjust(row, filled(kind, {"max_tokens": 20, "group": 4, "steps": 10, **given, **warm, **settings}))


ROWS = [chosen_row(row) for row in TABLE.values()]


@dataclass(frozen=True)
class Case:
    """A row, models and rollouts to take a gradient of."""

    row: Algorithm
    learner: LocalLearner
    rollouts: list[Rollout]
    texts: list[Transcript]  # pretraining text
    old: PerRollout
    reference: PerRollout
    value: PerRollout  # the critic's, of rollout time
    teacher: PerRollout = field(default_factory=dict)  # the teacher's
    taught: dict[int, Taught] = field(
        default_factory=dict
    )  # by id(rollout): who teaches it, and what the teacher reads


def critic_on(row: Algorithm, backbone: Decoder) -> Critic:
    """A new critic of the kind that the row's loss needs."""
    if isinstance(row.critic, SoftQ):
        return (SoftStateValueModel if row.critic.state_value else ActionValueModel)(backbone, 3)
    return ValueModel(backbone.config.hidden, backbone, 3)


def new_critic_of(row: Algorithm, dtype: torch.dtype) -> Critic | None:
    """A critic with a backbone of its own whose heads are far from zero, and whose slow copies are elsewhere."""
    if row.critic is None:
        return None
    backbone = tiny(WORDS, seed=2)
    critic = critic_on(row, backbone)
    with torch.no_grad():
        if isinstance(critic, SoftStateValueModel):
            for parameter in (critic.heads, critic.state.weight, critic.slow_state.weight):
                parameter.mul_(500)
            for slow in critic.slow_state.parameters():
                slow.mul_(0.9)
            return critic.to(dtype)
        for parameter in (critic.weight,) if isinstance(critic, ValueModel) else (critic.heads, critic.slow_heads):
            parameter.mul_(500)
        if isinstance(critic, ActionValueModel):
            critic.slow_heads.mul_(0.7)
            for slow in critic.slow_backbone.parameters():
                slow.mul_(0.9)
    return critic.to(dtype)


def new_player(env: Env, model: Decoder, max_tokens: int) -> Player:
    """One that plays `env` in this process."""
    how = Sampling(max_tokens=max_tokens)
    return Player(EnvPool(env, 0), LocalEngine(model, WORDS), WORDS, how, model.config.context)


def collector_of(
    tasks: Placed,
    player: Player,
    row: Algorithm,
    size: Size,
    seed: int = 0,
    success: float | None = None,
    rewarded: bool = True,
    vocab: int = WORDS.vocab_size,
) -> Collector:
    """One that samples for the needs of the row, each task once per epoch."""
    plan = row.branching.plan(vocab) if row.branching else None
    order = Uniform(len(tasks), seed)
    return Collector(tasks, player, size, seed, success, needs=row.needs, rewarded=rewarded, plan=plan, order=order)


def new_others(row: Algorithm, dtype: torch.dtype) -> dict[str, Model]:
    """The reference and two teachers, as far as the row needs them."""
    named = {REFERENCE: Need.REFERENCE in row.needs, TEACHER: row.teacher is not None, OTHER: row.teacher is not None}
    return {name: tiny(WORDS, seed=s, dtype=dtype) for s, (name, there) in enumerate(named.items(), start=1) if there}


class Numbered:
    """Teachers of made-up rollouts: by the number of the group, and a hint before the prompt of every second one."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        numbers = {group: i for i, group in enumerate(dict.fromkeys(r.group for r in rollouts))}
        self.told = {id(r): self._taught(r, numbers[r.group]) for r in rollouts}

    @staticmethod
    def _taught(rollout: Rollout, number: int) -> Taught:
        first, *others = rollout.transcripts
        read = first if number % 2 else first.with_prompt([5, 6, 7, *first.tokens[: first.spans[0].length]])
        return Taught(TEACHER if number < 2 else OTHER, [read, *others])


def new_learner(row: Algorithm, dtype: torch.dtype = torch.float64, world: World | None = None) -> LocalLearner:
    return LocalLearner(
        tiny(WORDS, dtype=dtype),
        Optimization(lr=1e-3, weight_decay=0.1, trust_region=row.trust_region, critic_follow=0.1),
        others=new_others(row, dtype),
        teaching=Teaching(TEACHER_TEMPERATURE, row.teacher.beta) if row.teacher else Teaching(),
        critic=new_critic_of(row, dtype),
        world=world,
    )


def new_rollouts(generator: torch.Generator, groups: int, size: int) -> list[Rollout]:
    """As `make_rollouts`; the first of each group is long, some are truncated."""
    rollouts = make_rollouts(generator, groups, size, WORDS.vocab_size)
    for i, rollout in enumerate(rollouts):
        if i % size == 0:
            more = torch.randint(3, WORDS.vocab_size, (24,), generator=generator).tolist()
            rollout.transcripts[0].sample(Completion(0, more, [-1.0] * 24, "", StopReason.EOS, 0))
        if i % 3 == 1:
            rollout.stop = StopReason.LENGTH
        rollout.baseline = 0.1 + 0.2 * (i // size)  # the reward of a greedy reply, which all of a group share
    return rollouts


def new_texts(generator: torch.Generator, count: int = 4) -> list[Transcript]:
    texts = []
    for _ in range(count):
        text = Transcript()
        text.observe([1])
        tokens = torch.randint(3, WORDS.vocab_size, (5,), generator=generator).tolist()
        text.imitate(tokens)
        texts.append(text)
    return texts


def new_case(
    row: Algorithm, *, seed: int = 1, groups: int = 3, size: int = 4, noise: float = 0.3, world: World | None = None
) -> Case:
    """`noise`: deviation of the old log-probabilities from the current ones."""
    generator = torch.Generator().manual_seed(seed)
    learner = new_learner(row, world=world)
    rollouts = new_rollouts(generator, groups, size)

    def near(values: Tensor, deviation: float) -> Tensor:
        return values + deviation * torch.randn(len(values), generator=generator, dtype=values.dtype)

    want = frozenset({"value"}) if isinstance(row.critic, Value) else frozenset()
    old, reference, value, teacher = {}, {}, {}, {}
    taught = Numbered(rollouts).told if row.teacher else {}
    for rollout in rollouts:
        (own,) = learner.evaluate([pack([rollout.transcripts], [0])], want=want)
        old[id(rollout)], reference[id(rollout)] = near(own.logp, noise), near(own.logp, 0.5)
        if row.old == "sampler":  # what the engine noted, in single precision
            old[id(rollout)] = old[id(rollout)].float().double()
            rollout.transcripts[0].logp = old[id(rollout)].tolist()
        if own.value is not None:
            value[id(rollout)] = near(own.value, 0.3)
        if row.teacher is not None:
            by, read = taught[id(rollout)]
            teacher[id(rollout)] = learner.evaluate([pack([read], [0])], of=by)[0].logp
    texts = new_texts(generator) if row.pretraining else []
    return Case(row, learner, rollouts, texts, old, reference, value, teacher, taught)


@dataclass(frozen=True)
class Credit:
    """What is a function of the scoreboard."""

    advantage: list[Tensor]  # [n_i] of each rollout
    weight: Tensor  # [S]
    fed: list[bool]  # [S], whether the rollout is in the loss
    returns: list[Tensor]  # [n_i] of each rollout, where there is a critic of states
    imitate: Tensor | None  # [S]
    held: list[Tensor]  # [n_i] of each rollout, where tokens are held near the old policy


def board(case: Case, rollouts: Sequence[Rollout]) -> Scores:
    """The scoreboard of these, in float64, before any shaping."""
    row, penalty = case.row, []
    if row.kl and row.kl.where == "reward":
        penalty = [row.kl.beta * row.kl(case.old[id(r)], case.reference[id(r)]) for r in rollouts]
    value = [case.value[id(r)] for r in rollouts] if case.value else []
    scores = scoreboard(rollouts, penalty, value, SUCCESS, row.needs)
    assert scores.sampled is not None
    return replace(scores, length=scores.length.double(), sampled=scores.sampled.double())


def old_of(case: Case, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """The log-probabilities of rollout time, [n_i] of each of these."""
    return [case.old[id(r)] for r in rollouts]


def credit(row: Algorithm, scores: Scores, logp: list[Tensor] | None = None) -> Credit:
    """Advantages before the filters, weights after them: filtered rollouts count in their group's statistics.

    `logp`: of rollout time, where tokens are chosen by it.
    """
    for shape in row.shaping:
        scores = replace(scores, reward=scores.reward + shape(scores))
    advantage = per_token(row.advantage(scores), scores)
    own = {"logp": logp or []}
    held = row.covariance(own, advantage) if row.covariance else []
    for select in row.select:
        advantage = [a * keep for a, keep in zip(advantage, select(own, advantage), strict=True)]
    fed = torch.ones(len(scores.reward), dtype=torch.bool)
    for keep in row.filters:
        fed &= keep(scores)
    rows = fed.nonzero().flatten()
    weight = torch.zeros(len(fed), dtype=torch.float64).index_put((rows,), row.aggregate(scores.of(rows)))
    aims = []
    if row.critic is not None:
        aims = row.critic.targets(row.advantage, scores) or []
    imitate = None
    if row.imitation is not None:
        assert scores.success is not None
        good = scores.success.double()
        imitate = row.imitation.coefficient * good / (good * scores.length).sum().clamp_min(1.0)
    return Credit(advantage, weight, fed.tolist(), aims, imitate, held)


def feed(
    case: Case,
    rollouts: Sequence[Rollout],
    found: Credit,
    cuts: Sequence[Sequence[int]],
    texts: Sequence[Transcript] | None = None,
    text_tokens: int | None = None,
    offset: int = 0,
) -> list[Batch]:
    """Micro-batches of these cuts. `found` is of a board in which these rollouts stand from place `offset` on."""
    row, batches = case.row, []
    coefficients = {
        **({"kl": row.kl.beta} if row.kl else {}),
        **({"entropy": row.entropy.coefficient} if row.entropy else {}),
    }
    for index in ([i for i in part if found.fed[offset + i]] for part in cuts):
        if not index:
            continue
        fields = {"advantage": {i: found.advantage[offset + i] for i in index}}
        if row.surrogate.uses_ratio:
            fields["old_logp"] = {i: case.old[id(rollouts[i])] for i in index}
        if Need.REFERENCE in row.needs:
            fields["ref_logp"] = {i: case.reference[id(rollouts[i])] for i in index}
        if Need.TEACHER in row.needs:
            fields["teacher_logp"] = {i: case.teacher[id(rollouts[i])] for i in index}
        if found.held:
            fields["held"] = {i: found.held[offset + i] for i in index}
        if found.returns:
            fields["value"] = {i: case.value[id(rollouts[i])] for i in index}
            fields["returns"] = {i: found.returns[offset + i] for i in index}
        batches.append(
            collate(
                [rollouts[i].transcripts for i in index],
                [offset + i for i in index],
                weight=found.weight,
                fields={name: _placed(values, offset) for name, values in fields.items()},
                imitate=found.imitate,
                coefficients=coefficients,
                taught=[case.taught[id(rollouts[i])] for i in index] if case.taught else (),
            )
        )
    texts = case.texts if texts is None else texts
    if row.pretraining is not None and texts:
        share = row.pretraining.coefficient / (text_tokens or sum(t.n_scored for t in texts))
        weights = torch.zeros(len(texts)), torch.full((len(texts),), share, dtype=torch.float64)
        batches.append(collate([[t] for t in texts], range(len(texts)), weight=weights[0], imitate=weights[1]))
    return batches


def _placed(values: dict[int, Tensor], offset: int) -> list[Tensor]:
    """Values by place among the rollouts at hand -> by place in a board in which these stand from `offset` on."""
    found = [torch.zeros(0)] * (offset + max(values) + 1)
    for place, value in values.items():
        found[offset + place] = value
    return found


def gradient(case: Case, batches: Sequence[Batch]) -> tuple[float, Tensor]:
    """Loss and gradient, of policy and critic together, summed over these micro-batches."""
    clear(case.learner)
    total, objective = 0.0, PolicyObjective(case.row)
    for batch in batches:
        loss = objective(case.learner._outputs(case.learner.model, batch, objective.wants), batch, Stats())
        loss.backward()
        total += loss.item()
    return total, gathered(case.learner)


def clear(learner: LocalLearner) -> None:
    for part in learner.parts:
        for parameter in part.parameters.values():
            parameter.grad = None


def gathered(learner: LocalLearner) -> Tensor:
    """The gradient of all parts as one vector; 0 where there is none."""
    every = [p for part in learner.parts for p in part.parameters.values()]
    return torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in every])
