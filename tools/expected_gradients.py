"""All replies of a tiny policy, so that the expected gradient of an algorithm is a sum and not an estimate.

    PYTHONPATH=tests:tests/helpers python tools/expected_gradients.py

writes docs/algorithms/expected-gradients.md. The policy is a table: a row of three logits for each of 15 beginnings of a
reply. A reply ends with the token 0, or after four tokens: 31 replies, and 961 pairs of them as the group of an update. The
library itself computes advantages, weights and loss of each update; only the model outputs come from the table.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from update_cases import chosen_row

from posttrain.algorithms.credit import GAE, Advantage, Baselined, PassAtK, ToGo
from posttrain.algorithms.penalty import KL
from posttrain.algorithms.policy import Algorithm, PolicyObjective
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.ratio import Correction
from posttrain.algorithms.redistribution import Redistribution
from posttrain.algorithms.settings import change
from posttrain.algorithms.surrogate import Clip
from posttrain.config.training import RL
from posttrain.core.batch import Layout, Outputs, Packed, Stats
from posttrain.core.component import Need
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, StopReason
from posttrain.training import older_weights
from posttrain.training.sources.credit_assignment import credit
from posttrain.training.sources.packing import collate, pack
from posttrain.training.sources.scoreboard import scoreboard

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "algorithms" / "expected-gradients.md"
LONGEST, WORDS, END = 4, 3, 0
SUCCESS = 1.0  # rewards from here on are successes
EXACT = 2e-6  # what single precision leaves of the samplers' log-probabilities

Reply = tuple[int, ...]


def _replies(begun: Reply = ()) -> Iterator[Reply]:
    for token in range(WORDS):
        if token == END or len(begun) == LONGEST - 1:
            yield (*begun, token)
        else:
            yield from _replies((*begun, token))


REPLIES = sorted(_replies())
BEGINNINGS = sorted({reply[:t] for reply in REPLIES for t in range(len(reply))})
AT = {beginning: place for place, beginning in enumerate(BEGINNINGS)}


def steps_of(reply: Reply) -> list[tuple[int, float]]:
    """A word 2 in the second place earns something by itself."""
    return [(2, 0.4)] if reply[1:2] == (2,) else []


def reward_of(reply: Reply) -> float:
    """Right if it contains the word 1 an odd number of times; a small reward if it ends before it is truncated."""
    return 1.0 * (reply.count(1) % 2) + 0.2 * (reply[-1] == END) + sum(earned for _, earned in steps_of(reply))


@cache
def rollout_of(reply: Reply, sampler: str) -> Rollout:
    transcript = Transcript()
    transcript.observe([WORDS])
    stop = StopReason.EOS if reply[-1] == END else StopReason.LENGTH
    transcript.sample(Completion(0, list(reply), logp_of(reply, sampler).tolist(), "", stop, 0))
    baseline = reward_of(greedy())
    return Rollout(
        {"id": "0"}, "0", [transcript], reward_of(reply), steps=steps_of(reply), stop=stop, baseline=baseline
    )


@cache
def greedy() -> Reply:
    """The reply of the policy at temperature 0."""
    reply: Reply = ()
    while reply in AT:
        reply = (*reply, int(POLICY[AT[reply]].argmax()))
    return reply


# -- the policy as a table, float64 [15, 3] ----------------------------------------------------------------------------


@cache
def logp_of(reply: Reply, name: str) -> Tensor:
    """[n] of its tokens, under one of the tables."""
    return _logp(TABLES[name], reply)


def _logp(table: Tensor, reply: Reply) -> Tensor:
    return table.log_softmax(-1)[[AT[reply[:t]] for t in range(len(reply))], list(reply)]


def probabilities(table: Tensor) -> Tensor:
    """[31]"""
    return torch.stack([_logp(table, reply).sum() for reply in REPLIES]).exp()


def draw(seed: int, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(len(BEGINNINGS), WORDS, generator=generator, dtype=torch.float64)


POLICY = draw(1, 0.7)
OTHERS = {"older": (2, 0.6), "reference": (3, 0.5), "teacher": (4, 0.5)}
TABLES = {"policy": POLICY, **{name: POLICY + draw(*how) for name, how in OTHERS.items()}}


@cache
def worth(alpha: float) -> tuple[Tensor, Tensor]:
    """(V [15], Q [15, 3]) of the policy, exactly: what is still earned, and alpha x entropy of what follows."""
    p = POLICY.softmax(-1)
    values, actions = torch.zeros(len(BEGINNINGS)).double(), torch.zeros(len(BEGINNINGS), WORDS).double()
    for beginning in sorted(BEGINNINGS, key=len, reverse=True):
        for token in range(WORDS):
            reply = (*beginning, token)
            earned = sum(reward for end, reward in steps_of(reply) if end == len(reply))
            rest = values[AT[reply]] if reply in AT else reward_of(reply) - sum(r for _, r in steps_of(reply))
            actions[AT[beginning], token] = earned + rest
        own = p[AT[beginning]]
        values[AT[beginning]] = (own * (actions[AT[beginning]] - alpha * own.log())).sum()
    return values, actions


@dataclass
class Tabled:
    """A learner with tables for models. Its critics are exact."""

    alpha: float = 0.0  # of the entropy in its critic's values
    device = torch.device("cpu")

    def evaluate(
        self, batches: Sequence[Packed], of: str = "policy", want: frozenset[str] = frozenset()
    ) -> list[Outputs]:
        return [self.say(batch, TABLES[of]) for batch in batches]

    def say(self, batch: Packed, table: Tensor) -> Outputs:
        place = _places(batch.layout)[batch.at]
        logs = table.log_softmax(-1)[place]
        p, values = logs.exp(), worth(self.alpha)
        ref, tea = (other.log_softmax(-1)[place] for other in (TABLES["reference"], TABLES["teacher"]))
        middle = ((p + tea.exp()) / 2).log()
        return Outputs(
            logs.gather(1, batch.target[:, None])[:, 0],
            entropy=-(p * logs).sum(-1),
            kl=(p * (logs - ref)).sum(-1),
            reverse_kl=(p * (logs - tea)).sum(-1),
            forward_kl=(tea.exp() * (tea - logs)).sum(-1),
            jensen_shannon=((p * (logs - middle)).sum(-1) + (tea.exp() * (tea - middle)).sum(-1)) / 2,
            value=values[0][place],
            expected_q=(p * values[1][place]).sum(-1),
        )

    def logp(self, learner: Any, rollouts: Sequence[Rollout], tokens: int) -> list[Tensor]:
        """As a teacher."""
        return [logp_of(tuple(r.transcripts[0].tokens[1:]), "teacher") for r in rollouts]


def _places(layout: Layout) -> Tensor:
    """int64 [T], the row of the table that each token leads to; -1 where a reply is at its end."""
    found: list[list[Reply]] = []
    for start, length, prefix in zip(layout.start, layout.length, layout.prefix, strict=True):
        before = found[prefix][-1] if prefix >= 0 else None
        own = []
        for token in layout.tokens[start : start + length].tolist():
            before = () if before is None else (*before, token)
            own.append(before)
        found.append(own)
    return torch.tensor([AT.get(beginning, -1) for own in found for beginning in own])


# -- the expected gradient of an algorithm, through the library --------------------------------------------------------


@cache
def configured(name: str) -> Algorithm:
    """An algorithm of the table for such replies: one update, from its rewards, or its teacher, alone."""
    row = chosen_row(TABLE[name], max_tokens=LONGEST)
    kl = row.kl if row.kl is not None and row.kl.where == "reward" else None
    entropy = row.entropy if row.critic is not None and not row.surrogate.samples else None  # its values hold it too
    other: Any = dict.fromkeys(("imitation", "pretraining", "critic", "replay", "trust_region"))
    return replace(row, kl=kl, entropy=entropy, epochs=1, minibatches=1, old="start", **other)


@cache
def expected(row: Algorithm, sampler: str) -> Tensor:
    """[15, 3]: the mean gradient of an update of the policy, over all groups that the sampler may give."""
    alike, rollouts, weights, fields = _alike(row), [], [], defaultdict(list)
    same = {
        "name": "",
        "paper": "",
        "idea": "",
        "stated": "",
        "correction": None,
        "old": "start",
        "ratio": (),
        "moving": None,
    }
    credits = _credits(replace(row, surrogate=Clip(), branching=None, **same))  # which credit does not read
    for (i, group), share in _groups(sampler, group_of(row), alike).items():
        if (found := credits[group].get(alike[i])) is None:
            continue  # a filter has left it out
        rollouts.append(rollout_of(REPLIES[i], sampler).transcripts)
        weights.append(share * found[0])
        fields["advantage"].append(found[1])
        for name, other in (("ref_logp", "reference"), ("teacher_logp", "teacher")):
            fields[name].append(logp_of(REPLIES[i], other))
    batch = collate(rollouts, range(len(rollouts)), weight=torch.tensor(weights, dtype=torch.float64), fields=fields)
    table = POLICY.clone().requires_grad_()
    loss = PolicyObjective(row)(Tabled(_alpha(row)).say(batch, table), batch, Stats())
    return -torch.autograd.grad(loss, table)[0]


def group_of(row: Algorithm) -> int:
    return row.advantage.k + 1 if isinstance(row.advantage, PassAtK) else 2


def _alpha(row: Algorithm) -> float:
    return row.entropy.coefficient if row.entropy else 0.0


@cache
def _groups(sampler: str, size: int, alike: tuple[int, ...]) -> dict[tuple[int, tuple[int, ...]], float]:
    """(reply, its group as far as credit tells replies apart) -> how often an update has such a member, on average."""
    chance, found = probabilities(TABLES[sampler]).tolist(), defaultdict[Any, float](float)
    for members in itertools.product(range(len(REPLIES)), repeat=size):
        share, group = math.prod(chance[i] for i in members), tuple(sorted(alike[i] for i in members))
        for i in members:
            found[i, group] += share
    return found


def _alike(row: Algorithm) -> tuple[int, ...]:
    """[31] the first reply that has the credit of each in any group: itself, where credit reads single tokens."""
    if row.needs & {Need.VALUE, Need.ENTROPY} or (row.kl is not None and row.kl.where == "reward"):
        return tuple(range(len(REPLIES)))
    told = [(reward_of(r), len(r), r[-1] == END, tuple(steps_of(r))) for r in REPLIES]
    return tuple(told.index(own) for own in told)


@cache
def _credits(row: Algorithm) -> dict[tuple[int, ...], dict[int, tuple[float, Tensor]]]:
    """Of every group: its reply -> (weight, advantage [n]), as far as the algorithm's filters keep it."""
    learner, found = Tabled(_alpha(row)), {}
    for group in itertools.combinations_with_replacement(sorted(set(_alike(row))), group_of(row)):
        rollouts, stats = [rollout_of(REPLIES[i], "policy") for i in group], Stats()
        beta = {"kl": row.kl.beta if row.kl else 0.0}
        credited = credit(row, rollouts, learner, 1000, beta, SUCCESS, stats, learner if row.teacher else None)  # type: ignore[arg-type]
        kept = torch.arange(len(group))
        for chosen in row.filters:
            kept = kept[chosen(credited.scores.of(kept))]
        credited = credited.of(kept)
        weight = row.aggregate(credited.scores).tolist()
        told = zip((group[i] for i in kept.tolist()), weight, credited.per_token["advantage"], strict=True)
        found[group] = {i: (w, a.double()) for i, w, a in told}
    return found


# -- what it should be -------------------------------------------------------------------------------------------------


def aim(row: Algorithm) -> tuple[str, Callable[[Tensor], Tensor]]:
    """The aim of the algorithm, in words and as a function of the policy."""
    if row.teacher is not None:
        field = {"forward-kl": "forward_kl", "jensen-shannon": "jensen_shannon"}.get(
            row.teacher.divergence, "reverse_kl"
        )
        return "less divergence, per token", lambda table: -per_token(table, field)
    if isinstance(row.advantage, PassAtK):
        k, right = row.advantage.k, torch.tensor([float(reward_of(r) >= SUCCESS) for r in REPLIES]).double()
        return f"pass@{k}", lambda table: -((1 - (probabilities(table) * right).sum()) ** k)
    scores = scoreboard([rollout_of(reply, "policy") for reply in REPLIES], success=SUCCESS)
    reward = sum((shape(scores) for shape in row.shaping), scores.reward)
    told = "mean reward" + (", shaped" if row.shaping else "")
    if row.kl is not None:
        beta = row.kl.beta
        return f"{told} - {beta:g} KL", lambda table: (probabilities(table) * reward).sum() - beta * reply_kl(table)
    if row.entropy is not None:
        alpha = row.entropy.coefficient
        return f"{told} + {alpha:g} H", lambda table: (
            probabilities(table) * (reward - alpha * probabilities(table).log())
        ).sum()
    return told, lambda table: (probabilities(table) * reward).sum()


def reply_kl(table: Tensor) -> Tensor:
    """KL(policy || reference) of a whole reply."""
    p = probabilities(table)
    return (p * (p.log() - probabilities(TABLES["reference"]).log())).sum()


def per_token(table: Tensor, field: str = "kl") -> Tensor:
    """A divergence at each token, summed over a reply, without its gradient through what was sampled before."""
    transcripts = [rollout_of(reply, "policy").transcripts for reply in REPLIES]
    batch = pack(transcripts, range(len(REPLIES)))
    return (probabilities(POLICY)[batch.rollout] * getattr(Tabled().say(batch, table), field)).sum()


def gradient_of(f: Callable[[Tensor], Tensor]) -> Tensor:
    table = POLICY.clone().requires_grad_()
    return torch.autograd.grad(f(table), table)[0]


@cache
def true(row: Algorithm) -> Tensor:
    """[15, 3]: the gradient of the aim of the algorithm."""
    return gradient_of(aim(row)[1])


def error(found: Tensor, true: Tensor) -> float:
    """What is left of the true gradient beside the nearest multiple of what was found, as a share of it.

    0: the same direction. 1: nothing of it. Beyond 1, up to 2: 2 less that share, where they point apart.
    """
    cosine = ((found * true).sum() / (found.norm() * true.norm()).clamp_min(1e-30)).clamp(-1, 1).item()
    sine = math.sqrt(max(0.0, 1 - cosine**2))
    return sine if cosine >= 0 else 2 - sine


# -- the document ------------------------------------------------------------------------------------------------------

SHARES = (0.25, 0.5, 1.0)
WEIGHTS: dict[str, dict[str, Any]] = {
    "no weight": {},
    **{kind: {"correction": Correction(kind)} for kind in ("truncate", "icepop", "sequence", "sequence-truncate")},  # type: ignore[arg-type]
    "ratio to the sampler": {"old": "sampler"},
}
FORMS: dict[str, dict[str, str]] = {
    "`--ratio causal --weight-at reward`": {"ratio": "causal", "surrogate.at": "reward"},
    "`--ratio sequence-sum`": {"ratio": "sequence-sum", "surrogate.at": "token"},
    "`--ratio causal --weight-at token`": {"ratio": "causal", "surrogate.at": "token"},
    "`--ratio token`": {"ratio": "token", "surrogate.at": "token"},
}
CREDITS: dict[str, Advantage] = {
    "`R_i - mean(batch)`": Baselined("batch", "none"),
    "rewards from t on": ToGo(),
    "an exact critic's": GAE(1.0, 0.0),
}


def weighed(name: str, weight: str) -> float | None:
    """The error of an algorithm on samples of older weights; None where it has no such weight."""
    row = configured(name)
    if weight != "no weight" and not (row.reinforces and row.surrogate.samples):
        return None
    if weight == "ratio to the sampler" and not row.surrogate.uses_ratio:
        return None
    return error(expected(replace(row, **WEIGHTS[weight]), "older"), true(row))


def formed(form: str, by: str) -> float | None:
    """The error of off-policy-pg in one of its forms, on samples of older weights; None where that is refused."""
    row = change(configured("off-policy-pg"), FORMS[form])
    row = replace(row, advantage=CREDITS[by], old="sampler")
    if any(older_weights.contradictions(row, RL())):
        return None
    return error(expected(row, "older"), true(row))


def penalised(estimator: Any, where: Any, weighed: bool = False) -> tuple[float, float] | None:
    """The errors of a KL's gradient on policy, as that of a reply and as that of each token; None where it is 0."""
    row = configured("reinforce")
    kl = KL(estimator, 1.0, where, weighed=weighed)
    found = expected(replace(row, kl=kl), "policy") - expected(row, "policy")
    if found.norm() < EXACT:
        return None
    return error(-found, gradient_of(reply_kl)), error(-found, gradient_of(per_token))


def said(value: float | None) -> str:
    return "-" if value is None else "exact" if value < EXACT else f"{value:.2f}"


def document() -> str:
    rows = []
    for name, row in ((name, configured(name)) for name in TABLE):
        errors = [error(expected(row, "policy"), true(row)), *(weighed(name, weight) for weight in WEIGHTS)]
        rows.append([f"[`{name}`]({name}.md)", aim(row)[0], *map(said, errors)])
    kls = []
    for estimator, where in itertools.product(("k1", "k2", "k3", "exact", "forward"), ("loss", "reward")):
        kls.append([f"`{estimator}`", where, *map(said, penalised(estimator, where) or (None, None))])
    for estimator in ("k1", "k2", "k3", "forward"):
        kls.append([f"`{estimator}`, weighed", "loss", *map(said, penalised(estimator, "loss", True) or (None, None))])
    forms = [[form, *(said(formed(form, by)) for by in CREDITS)] for form in FORMS]
    spread = []
    for weight in ("even", "entropy"):
        shares = [replace(configured("reinforce"), redistribution=Redistribution(weight, share)) for share in SHARES]
        spread.append([f"`{weight}`", *(said(error(expected(row, "policy"), true(row))) for row in shares)])
    return TEXT.format(
        spread=_table(["weight", *(f"share {share:g}" for share in SHARES)], spread),
        rows=_table(["algorithm", "aim", "on policy", *WEIGHTS], rows),
        forms=_table(["weight", *CREDITS], forms),
        kls=_table(["estimator", "in the", "as the KL of a reply", "as the KL of each token"], kls),
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


TEXT = """\
# Expected gradients

Is the average update of an algorithm the gradient of its aim? This page computes it without sampling. The policy is a
table of logits, with three tokens and replies of one to four: 31 replies, and every pair of them is the group of an
update (for `pass-at-k` every three). Advantages, weights and loss are the library's own; critics are exact. A reply earns
1 for an odd number of one word, 0.4 for another one in the second place, and 0.2 if it ends before the length limit.
`PYTHONPATH=tests:tests/helpers python tools/expected_gradients.py` writes this page, and a test compares it with the code.

- **Error**: the sine of the angle between the expected and the true gradient. "exact": the same direction; 1: orthogonal;
  above 1, up to 2: opposed. So the length of steps, which the learning rate and the optimizer set, is ignored.
- **True gradient**: the gradient of the *aim* of an algorithm. The aim is the mean reward, less its KL if the algorithm
  subtracts one from the reward, each of whole replies. A divergence from a teacher is per token, with the earlier samples
  held fixed, as the distillation algorithms define it. A KL in the loss, an entropy bonus, imitation, pretraining texts
  and the critic's loss are left out (except for `sac` and `sac-v`, whose values contain the entropy).

An error is no verdict. Division by the deviation of a group, whitening, and means over the tokens of an update are biases
that papers chose, for less variance or equal steps. These figures are of one example with groups of two.

## Algorithms

The table gives the error on policy, and on samples of other weights (0.40 nats a reply away, ratios of whole replies from
0.09 to 12), with each weight that can correct for these, at its default cap of 2. With `--async-steps` and
`--tokens-per-step` `truncate` is the default. `ratio to the sampler` is `--old-policy sampler`, the only one for a ratio
with `--replay`; the later updates of several per step have the same ratio. `-`: the algorithm has no such weight, or
needs none.

{rows}

- A weight per token (`truncate`, `icepop`) is unbiased only for replies of one token. Here it halves the error of an
  exact algorithm and leaves the rest.
- `sequence-truncate` would be exact without its cap. Its variance, which no mean shows, grows with the length of replies.
- A clipped ratio to the sampler does not estimate this gradient: beyond the clip its gradient is 0.
- `sequence` drops replies, and weights none: where it drops none, as here, it changes nothing.

## The weights of off-policy-pg

The errors on samples of other weights, without a cap. The exact weight depends on the advantage:

{forms}

The product up to each reward (Precup et al. 2000) is the default. If the whole reply is rewarded at its end, it is the
product over the reply; if rewards come earlier, it usually has less variance. It requires sums of rewards; `-`: refused.
The product up to the token is exact if the advantage is known at the token, such as that of the policy's own critic; for
a later reward it is an approximation. So is the token's own ratio (Degris et al. 2012), which takes the earlier tokens as
they were sampled.

## A redistributed reward

The errors of `--redistribution`, on policy, with `--aggregate sequence-sum` and rewards to go:

{spread}

They are biases, not noise: what earlier tokens have earned of a reply's reward is not credited to later ones, which had a
part in it too. The less is redistributed (`--redistribution-share`), the smaller the error.

## A KL to the reference

The errors of the penalty's gradient alone, on policy, with `--aggregate sequence-sum` and rewards to go. "as the KL of a
reply" includes the later effect of a token; "as the KL of each token" holds the earlier samples fixed.

{kls}

So `k2` and `exact` in the loss have the gradient of the reverse KL **per token**, and not that of a reply, which `k1` in
the reward has. `weighed` is `--kl-weighed`, the estimate times the ratio to the old policy: with it `k1` and `k3` have that
gradient too. `-`: it is 0. In the reward an estimator has no gradient of its own, only that of the sampled tokens:
there all but `k1` are opposed to the KL's gradient in this example.
"""

if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
