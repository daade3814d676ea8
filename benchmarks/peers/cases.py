"""Makes random cases and answers every question with posttrain's own rows and parts. Runs in posttrain's environment.

python benchmarks/peers/cases.py FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import preference_cases
import torch
from exchange import BUDGET, CACHE, CAP, GAMMA, LAMBDA, SHARE, TEMPERATURE, Answer, Case, Side, record, save_cases
from torch import Tensor

from posttrain.algorithms.aggregate import Aggregate, ConstantLength, PromptMean, SequenceMean, SequenceSum, TokenMean
from posttrain.algorithms.credit import GAE, Advantage, Baselined, ToGo
from posttrain.algorithms.critic_loss import Value
from posttrain.algorithms.filters import OverlongFilter, TopEntropy
from posttrain.algorithms.penalty import KL, Adaptive, Entropy
from posttrain.algorithms.policy import Algorithm, PolicyObjective
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.ratio import Correction
from posttrain.algorithms.shaping import SoftOverlong
from posttrain.algorithms.surrogate import Clip, LogProbability
from posttrain.algorithms.teacher import FIELDS, Distillation
from posttrain.core.batch import Batch, Outputs, Scores, Stats
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, StopReason
from posttrain.models.losses.divergence import measured_divergence
from posttrain.models.losses.likelihood import Hidden, token_logp, token_logp_entropy
from posttrain.models.native.head import Head
from posttrain.training.sources.packing import collate

OURS = Side()

# -- cases ------------------------------------------------------------------------------------------------------------


def make_case(name: str, seed: int, spread: float, binary: bool, groups: int = 4, members: int = 4) -> Case:
    """`spread`: how far, in nats, the current log-probabilities are from the old ones. `binary`: rewards of 0 and 1."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    rollouts = groups * members
    length = torch.randint(1, 13, (rollouts,), generator=draw)
    tokens = int(length.sum())
    reward = torch.randint(0, 2, (rollouts,), generator=draw).double() if binary else normal(rollouts)
    if binary:
        reward[:members] = 1.0  # one group that tells nothing
        reward[members : members + 2] = torch.tensor([0.0, 1.0])  # and one that tells something
    advantage = normal(rollouts)
    advantage[3] = 0.0
    old = -3 * torch.rand(tokens, generator=draw, dtype=torch.float64) - 0.01
    return Case(
        name=name,
        length=length,
        group=torch.arange(groups).repeat_interleave(members),
        reward=reward,
        advantage=advantage,
        token_advantage=normal(tokens),
        logp=old + spread * normal(tokens),
        old=old,
        ref=old + 0.3 * normal(tokens),
        sampler=old + 0.2 * normal(tokens),
        value=normal(tokens),
        new_value=normal(tokens),
        entropy=normal(tokens).abs(),
        logits=2 * normal(tokens, 7),
        target=torch.randint(0, 7, (tokens,), generator=draw),
    )


def make_cases() -> list[Case]:
    spreads = (("on policy", 0.0), ("close", 5e-4), ("usual", 0.1), ("far", 0.8))
    return [
        make_case(f"{name}, {'0 or 1' if binary else 'real'} rewards", 2 * i + binary, spread, bool(binary))
        for i, (name, spread) in enumerate(spreads)
        for binary in (0, 1)
    ]


# -- ours, from the parts ---------------------------------------------------------------------------------------------


def split(case: Case, x: Tensor) -> tuple[Tensor, ...]:
    """[N] -> one [n_i] for each rollout."""
    return x.split(case.length.tolist())


def scores_of(case: Case, penalised: bool = False) -> Scores:
    return Scores(
        reward=case.reward,
        group=case.group,
        length=case.length.double(),
        penalty=split(case, case.penalty) if penalised else (),
        value=split(case, case.value),
    )


def batch_of(case: Case, advantage: Tensor, aggregate: Aggregate, kept: Tensor | None = None) -> Batch:
    """The case as one micro-batch. `advantage` [S] or [N], `kept` bool [S]: the rollouts in the loss, None: all."""
    scores = scores_of(case)
    rows = torch.arange(len(case.length)) if kept is None else kept.nonzero().squeeze(1)
    weight = torch.zeros_like(scores.length)
    weight[rows] = aggregate(scores.of(rows))
    rollouts = []
    for i, own in enumerate(split(case, case.sampler)):
        transcript = Transcript()
        transcript.observe([0])
        transcript.sample(Completion(i, [1] * len(own), own.tolist(), "", StopReason.EOS, 0))
        rollouts.append([transcript])
    owner = torch.repeat_interleave(torch.arange(len(case.length)), case.length)
    columns = {
        "advantage": advantage if len(advantage) == len(owner) else advantage[owner],
        "old_logp": case.old,
        "ref_logp": case.ref,
    }
    fields = {name: split(case, column) for name, column in columns.items()}
    batch = collate(rollouts, range(len(rollouts)), weight=weight, fields=fields)
    return replace(batch, sampler_logp=case.sampler)  # in float64


def loss_of(row: Algorithm, case: Case, advantage: Tensor | None = None, kept: Tensor | None = None) -> Answer:
    """Loss of a row and its gradient with respect to log-probabilities and entropies, for given advantages."""
    batch = batch_of(case, case.advantage if advantage is None else advantage, row.aggregate, kept)
    logp, entropy = case.logp.clone().requires_grad_(), case.entropy.clone().requires_grad_()
    loss = PolicyObjective(row)(Outputs(logp, entropy=entropy), batch, Stats())
    slopes = torch.autograd.grad(loss, [logp, entropy], allow_unused=True)
    answer = {"loss": loss.detach(), "gradient": slopes[0]}
    return answer if slopes[1] is None else {**answer, "gradient by entropy": slopes[1]}


def policy_alone(name: str) -> Algorithm:
    """The row without what is outside of the policy's loss: the critic has questions of its own."""
    row = TABLE[name]
    if isinstance(row.aggregate, ConstantLength):
        row = replace(row, aggregate=ConstantLength(BUDGET))
    return replace(row, critic=None, imitation=None, pretraining=None)


def loss_by_token(row: Algorithm, case: Case) -> Answer:
    return loss_of(row, case, case.token_advantage)


def loss_filtered(row: Algorithm, case: Case) -> Answer:
    """With DAPO's filter: truncated rollouts leave the loss and its denominators."""
    return loss_of(row, case, kept=OverlongFilter()(replace(scores_of(case), truncated=case.truncated)))


def divergence(part: KL, case: Case) -> Answer:
    logp = case.logp.clone().requires_grad_()
    value = part(logp, case.ref)
    return {"value": value.detach(), "gradient": torch.autograd.grad(value.sum(), logp)[0]}


def credit(part: Advantage, penalised: bool, case: Case) -> Answer:
    """[S], or [N] where the part gives one for each token."""
    found = part(scores_of(case, penalised))
    return {"advantage": found if isinstance(found, Tensor) else torch.cat(found)}


def ask_losses() -> None:
    plain = {
        "grpo": policy_alone("grpo"),
        "dr-grpo": policy_alone("dr-grpo"),
        "rloo": policy_alone("rloo"),
        "reinforce": policy_alone("reinforce"),
        "reinforce++": policy_alone("reinforce++"),
        "reinforce++-baseline": policy_alone("reinforce++-baseline"),
        "gspo": policy_alone("gspo"),
        "gmpo": policy_alone("gmpo"),
        "gpg": policy_alone("gpg"),
        "lite-ppo": policy_alone("lite-ppo"),
        "cispo": policy_alone("cispo"),
        "dapo": policy_alone("dapo"),
        "grpo-sequence without KL": replace(policy_alone("grpo-sequence"), kl=None),
        "lite-ppo, clip 0.1": replace(policy_alone("lite-ppo"), surrogate=Clip(0.1, 0.1)),
        "dual clip 3": replace(policy_alone("lite-ppo"), surrogate=Clip(0.2, 0.2, dual=3.0)),
        "entropy bonus, token-mean": replace(policy_alone("lite-ppo"), entropy=Entropy(0.01)),
        "entropy bonus, sequence-mean": replace(policy_alone("grpo"), kl=None, entropy=Entropy(0.01)),
    }
    for kind in ("truncate", "icepop", "sequence"):
        plain[f"correction {kind}"] = replace(policy_alone("lite-ppo"), correction=Correction(kind, CAP))
    for name, row in plain.items():
        OURS.add(f"loss: {name}", partial(loss_of, row))
    for name in ("ppo", "gspo", "gspo-token"):
        OURS.add(f"loss: {name}, an advantage per token", partial(loss_by_token, policy_alone(name)))
    OURS.add("loss: overlong filter, token-mean", partial(loss_filtered, policy_alone("lite-ppo")))
    OURS.add("loss: overlong filter, sequence-mean", partial(loss_filtered, replace(policy_alone("grpo"), kl=None)))


def distilled(row: Algorithm, case: Case) -> Answer:
    """Loss of a distillation row and its gradient, the logits being hidden states before a head that changes nothing."""
    assert row.teacher is not None
    logits, head = case.logits.clone().requires_grad_(), torch.eye(case.logits.shape[1], dtype=torch.float64)
    beta = {"reverse-kl": 1.0, "forward-kl": 0.0}.get(row.teacher.divergence, row.teacher.beta)
    policy, teacher = Hidden(logits, Head(head)), Hidden(case.teacher_logits, Head(head))
    logp, distance, *_ = measured_divergence(policy, teacher, case.target, beta, (TEMPERATURE, TEMPERATURE), False)
    outputs = Outputs(logp, **{FIELDS[row.teacher.divergence]: distance})
    loss = PolicyObjective(row)(
        outputs, batch_of(replace(case, old=logp.detach()), torch.zeros_like(case.reward), row.aggregate), Stats()
    )
    return {"loss": loss.detach(), "gradient by logits": torch.autograd.grad(loss, logits)[0]}


def ask_distillation() -> None:
    for name in ("distill-reverse-kl", "distill-forward-kl", "distill-jsd"):
        OURS.add(f"loss: {name}", partial(distilled, TABLE[name]))
    for beta in (0.1, 0.9):
        row = replace(TABLE["distill-jsd"], teacher=Distillation("jensen-shannon", beta=beta))
        OURS.add(f"loss: distill-jsd, beta {beta}", partial(distilled, row))


def ask_aggregates() -> None:
    parts = {
        "sequence-mean": SequenceMean(),
        "token-mean": TokenMean(),
        "sequence-sum": SequenceSum(),
        "constant": ConstantLength(BUDGET),
        "prompt-mean": PromptMean(),
    }
    for name, part in parts.items():
        row = replace(policy_alone("reinforce"), surrogate=LogProbability(), aggregate=part)
        OURS.add(f"aggregate: {name}", partial(loss_of, row))


def ask_penalties() -> None:
    for part in (KL("k1"), KL("k2"), KL("k3")):
        OURS.add(f"kl: {part.estimator}", partial(divergence, part))

    @OURS.asks("kl: k3 of 12 nats")
    def far(case: Case) -> Answer:
        return {"value": KL("k3")(case.old - 12, case.old)}

    @OURS.asks("kl: adaptive coefficient")
    def adaptive(case: Case) -> Answer:
        measured = [float(x) for x in 0.02 * case.entropy]
        found, coefficient = [], 0.1
        for each in measured:
            coefficient = Adaptive(target=0.02, horizon=1000.0)(coefficient, each, len(case.length))
            found.append(coefficient)
        return {"coefficient": torch.tensor(found, dtype=torch.float64)}


def ask_advantages() -> None:
    plain: dict[str, Advantage] = {
        "group / std(group)": Baselined("group", "group"),
        "group / std(group), eps 1e-4": Baselined("group", "group", eps=1e-4),
        "group / std(group), eps 1e-9": Baselined("group", "group", eps=1e-9),
        "group": Baselined("group", "none"),
        "group / std(batch)": Baselined("group", "batch"),
        "group / std(batch), eps 1e-4": Baselined("group", "batch", eps=1e-4),
        "others": Baselined("others", "none"),
        "batch": Baselined("batch", "none"),
        "group, signal (gpg)": Baselined("group", "none", signal=True),
        "group, weighted by length (opo)": Baselined("group", "none", weight="length"),
        "group, then whitened": ToGo("group", whiten=True),
    }
    penalised: dict[str, Advantage] = {
        "others, KL in the reward (rloo)": Baselined("others", "none"),
        "whitened returns, KL in the reward (reinforce++)": ToGo("none", whiten=True),
        "whitened returns, discounted": ToGo("none", whiten=True, gamma=GAMMA),
        "group, then whitened, KL in the reward": ToGo("group", whiten=True),
    }
    for name, part in (plain | penalised).items():
        OURS.add(f"advantage: {name}", partial(credit, part, name in penalised))

    @OURS.asks("advantage: seven rewards of 0.7 in float32")
    def constant(case: Case) -> Answer:
        reward = torch.full((7,), 0.7)
        return {
            "advantage": Baselined("group", "group", eps=1e-9)(Scores(reward, torch.zeros(7).long(), torch.ones(7)))
        }


def ask_critic() -> None:
    @OURS.asks("critic: gae")
    def gae(case: Case) -> Answer:
        scores = scores_of(case, penalised=True)
        return {
            "advantage": torch.cat(GAE(GAMMA, LAMBDA).estimate(scores)),
            "returns": torch.cat(GAE(GAMMA, LAMBDA).returns(scores, None)),
        }

    OURS.add("critic: gae across tool text", gae)  # ours never sees the tool text

    OURS.add("critic: gae, whitened", partial(credit, GAE(GAMMA, LAMBDA, whiten=True), True))

    @OURS.asks("critic: value loss")
    def value_loss(case: Case) -> Answer:
        batch = batch_of(case, case.advantage, TokenMean())
        batch = replace(batch, value=case.value, returns=case.token_advantage)
        value = case.new_value.clone().requires_grad_()
        loss = (batch.weight * Value(clip=0.2)(Outputs(case.logp, value=value), batch, Stats())).sum()
        return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, value)[0]}


def ask_choices() -> None:
    @OURS.asks("shaping: overlong")
    def overlong(case: Case) -> Answer:
        long = replace(scores_of(case), sampled=case.length.double() + 4)  # all lengths from 5 to the budget
        return {"reward": SoftOverlong(BUDGET, CACHE)(long)}

    @OURS.asks("shaping: overlong, beyond the limit")
    def beyond(case: Case) -> Answer:
        return {"reward": SoftOverlong(BUDGET, CACHE)(replace(scores_of(case), sampled=case.length.double() + BUDGET))}

    @OURS.asks("tokens: highest entropy")
    def top_entropy(case: Case) -> Answer:
        return {"kept": torch.cat(TopEntropy(SHARE)({"entropy": list(split(case, case.entropy))}, [])).double()}

    @OURS.asks("model: log-probability of a token")
    def log_probability(case: Case) -> Answer:
        logits = case.logits.clone().requires_grad_()
        found = token_logp(logits, Head(torch.eye(7, dtype=torch.float64)), case.target, TEMPERATURE)
        return {"value": found.detach(), "gradient by logits": torch.autograd.grad(found.sum(), logits)[0]}

    @OURS.asks("model: entropy at a token")
    def entropy(case: Case) -> Answer:
        logits = case.logits.clone().requires_grad_()
        found = token_logp_entropy(logits, Head(torch.eye(7, dtype=torch.float64)), case.target, TEMPERATURE)[1]
        return {"value": found.detach(), "gradient by logits": torch.autograd.grad(found.sum(), logits)[0]}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for ask in (ask_losses, ask_distillation, ask_aggregates, ask_penalties, ask_advantages, ask_critic, ask_choices):
        ask()
    preference_cases.ask(OURS)
    cases = make_cases()
    save_cases(cases, folder)
    record("posttrain", OURS, cases, folder, ["torch", "numpy"])
