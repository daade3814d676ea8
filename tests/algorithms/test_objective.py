"""Denominators and gradients: the loss of an optimizer batch is a plain weighted sum, however the batch is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import make_rollouts, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_sources import one_of_a_kind
from torch import Tensor
from transcriptions import LOSSES, TEXTS, Played
from update_cases import (
    OTHER,
    ROWS,
    SUCCESS,
    TEACHER_TEMPERATURE,
    WORDS,
    Case,
    board,
    chosen_row,
    clear,
    collector_of,
    credit,
    feed,
    gathered,
    gradient,
    new_case,
    new_learner,
    new_player,
    new_texts,
    old_of,
)

from posttrain.algorithms.aggregate import ConstantLength, SequenceMean, SequenceSum, TokenMean
from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.credit import Baselined, PassAtK, StepRewards
from posttrain.algorithms.describe import describe
from posttrain.algorithms.earned_rewards import equal_rewards
from posttrain.algorithms.penalty import KL, EarlyStop, Entropy
from posttrain.algorithms.policy import Algorithm, PolicyObjective
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.ratio import Causal, OverSequence, RatioStep
from posttrain.algorithms.surrogate import Clip
from posttrain.config.training import RL
from posttrain.core.batch import Batch, Outputs, Packed, Scores, Stats
from posttrain.core.component import Need
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, StopReason, Task, UserError
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.critic import ActionValueModel, SoftStateValueModel, ValueModel
from posttrain.models.losses.likelihood import token_logp
from posttrain.models.native.decoder import Decoder, causal
from posttrain.models.native.head import Head
from posttrain.training.adjust import adjust
from posttrain.training.sources.collector import Size
from posttrain.training.sources.packing import Taught, collate, pack, split_microbatches
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.sources.scoreboard import scoreboard
from posttrain.training.sources.sft_source import LikelihoodObjective
from posttrain.training.sources.teacher_targets import TEACHER, Teachers


def scores_of(reward: Sequence[float], group: Sequence[int], length: Sequence[int]) -> Scores:
    return Scores(torch.tensor(reward), torch.tensor(group), torch.tensor(length, dtype=torch.float32))


def outputs_of(model: Decoder, batch: Packed, temperature: float = 1.0) -> Outputs:
    hidden = model.hidden(batch.layout, batch.at)
    return Outputs(token_logp(hidden, model.head, batch.target, temperature))


def batch_of(advantage: torch.Tensor) -> Batch:
    """The tokens of one rollout, each with its advantage, that weigh the same."""
    weight = torch.full_like(advantage, 1 / len(advantage)).detach()
    whole = torch.zeros(len(advantage), dtype=torch.int64)
    return Batch(None, whole, whole, whole, whole, weight=weight, advantage=advantage)  # type: ignore[arg-type]


def turns(transcript: Transcript) -> list[tuple[int, tuple[int, ...]]]:
    """(scored tokens before it, tokens that the environment wrote before it) of each turn that is learned from."""
    found, before, observed = [], 0, ()
    for span in transcript.spans:
        tokens = tuple(transcript.tokens[span.start : span.start + span.length])
        if span.learned:
            found += [(before, observed)] if observed else []  # what is sampled right behind a turn belongs to it
            before += span.length
        observed = () if span.learned else tokens
    return found


def played(case: Case, rollout: Rollout, correct: float) -> Played:
    """What the transcriptions are told of a rollout: one sequence at a time, no packing and no shared prompt."""
    (transcript,) = rollout.transcripts
    tokens, place = torch.tensor(transcript.tokens), torch.arange(len(transcript))
    sampled = transcript.scored.tolist()
    model, critic, key = case.learner.model, case.learner.critic, id(rollout)
    logs = (model(tokens, place, causal) @ model.head.weight.T).log_softmax(-1)
    told = Played(
        [logs[t - 1, tokens[t]] for t in sampled],
        case.old[key].tolist(),
        case.reference[key].tolist(),
        float(rollout.reward),  # type: ignore[arg-type]
        rollout.group,
        rollout.steps,
        truncated=rollout.stop in (StopReason.LENGTH, StopReason.CONTEXT),
        correct=float(rollout.reward) >= correct,  # type: ignore[arg-type]
        taken=[int(tokens[t]) for t in sampled],
        greedy=rollout.baseline or 0.0,
        turns=turns(transcript),
    )
    if case.taught:
        by, (read,) = case.taught[key]
        with torch.no_grad():
            own = torch.tensor(read.tokens)
            teacher = case.learner.others[by]
            said = teacher(own, torch.arange(len(own)), causal) @ teacher.head.weight.T / TEACHER_TEMPERATURE  # type: ignore[operator]
        told.tea = [said[t - 1].softmax(-1) for t in read.scored.tolist()]
    if case.taught or case.row.entropy:
        told.p = [logs[t - 1].exp() for t in sampled]
    if isinstance(critic, ValueModel):
        assert critic.backbone is not None
        values = critic.backbone(tokens, place, causal) @ critic.weight + critic.bias
        told.values, told.old_values = [values[t - 1] for t in sampled], case.value[key].tolist()
    elif isinstance(critic, SoftStateValueModel):
        own = critic.backbone(tokens, place, causal) @ critic.heads.transpose(1, 2)
        state, slow_state = critic.state, critic.slow_state
        assert state.backbone is not None and slow_state.backbone is not None
        values = state.backbone(tokens, place, causal) @ state.weight + state.bias
        with torch.no_grad():
            slow_values = slow_state.backbone(tokens, place, causal) @ slow_state.weight + slow_state.bias
        told.pi = [logs[t - 1].exp() for t in sampled]
        told.q = [(own[0, t - 1], own[1, t - 1]) for t in sampled]
        told.values, told.slow_values = [values[t - 1] for t in sampled], [slow_values[t - 1].item() for t in sampled]
    elif isinstance(critic, ActionValueModel):
        own = critic.backbone(tokens, place, causal) @ critic.heads.transpose(1, 2)
        with torch.no_grad():
            slow = critic.slow_backbone(tokens, place, causal) @ critic.slow_heads.transpose(1, 2)
        told.pi = [logs[t - 1].exp() for t in sampled]
        told.q = [(own[0, t - 1], own[1, t - 1]) for t in sampled]
        told.slow_q = [(slow[0, t - 1], slow[1, t - 1]) for t in sampled]
    return told


def by_loops(case: Case, correct: float = SUCCESS) -> tuple[float, Tensor]:
    """Loss and gradient as the row's paper writes them."""
    clear(case.learner)
    loss, name = LOSSES[case.row.name]([played(case, r, correct) for r in case.rollouts]), case.row.name
    if name in TEXTS:
        texts, model = [], case.learner.model
        for text in case.texts:
            tokens = torch.tensor(text.tokens)
            logs = (model(tokens, torch.arange(len(tokens)), causal) @ model.head.weight.T).log_softmax(-1)
            texts.append([logs[t - 1, tokens[t]] for t in range(1, len(tokens))])
        loss = loss + TEXTS[name](texts)
    loss.backward()
    return loss.item(), gathered(case.learner)


def through_the_library(case: Case, rollouts: Sequence[Rollout], cuts: Sequence[Sequence[int]]) -> tuple[float, Tensor]:
    return gradient(case, feed(case, rollouts, credit(case.row, board(case, rollouts), old_of(case, rollouts)), cuts))


@pytest.mark.parametrize(
    ("row", "noise"),
    [(row, noise) for row in ROWS for noise in (0.001, 0.3) if noise == 0.3 or row.surrogate.uses_ratio],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_loss_and_gradient_equal_a_loop_written_transcription(row: Algorithm, noise: float) -> None:
    case = new_case(row, noise=noise)
    loss, grad = through_the_library(case, case.rollouts, [range(len(case.rollouts))])
    expected, want = by_loops(case)
    assert abs(loss - expected) < 1e-10 * max(1.0, abs(expected))
    assert want.abs().max() > 1e-3 and (grad - want).abs().max() < 1e-10 * max(1.0, want.abs().max().item())


def test_every_row_has_its_transcription() -> None:
    assert LOSSES.keys() == TABLE.keys() and TEXTS.keys() == {n for n, row in TABLE.items() if row.pretraining}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    groups=st.integers(1, 4),
    size=st.integers(2, 5),
    row=st.sampled_from(ROWS),
    data=st.data(),
)
def test_gradient_is_the_same_under_any_cut_order_and_packing(seed, groups, size, row, data) -> None:  # type: ignore[no-untyped-def]
    case = new_case(row, seed=seed, groups=groups, size=size)
    rollouts = case.rollouts
    loss, grad = through_the_library(case, rollouts, [range(len(rollouts))])
    close = 1e-10 * max(1.0, grad.abs().max().item())

    shuffled = data.draw(st.permutations(rollouts))
    borders = sorted(data.draw(st.lists(st.integers(0, len(rollouts)), max_size=5)))
    edges = [0, *borders, len(rollouts)]
    cuts = [list(range(a, b)) for a, b in pairwise(edges)]  # some empty, the last one partial
    again, same = through_the_library(case, shuffled, cuts)
    assert abs(loss - again) < 1e-10 * max(1.0, abs(loss)) and (grad - same).abs().max() <= close

    budget = data.draw(st.integers(1, 60))
    again, same = through_the_library(case, rollouts, split_microbatches([r.transcripts for r in rollouts], budget))
    assert abs(loss - again) < 1e-10 * max(1.0, abs(loss)) and (grad - same).abs().max() <= close


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_packed_log_probabilities_equal_those_of_each_sequence_alone(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny(WORDS, dtype=torch.float64)
    rollouts = make_rollouts(generator, 3, 4, WORDS.vocab_size)
    together = outputs_of(model, pack([r.transcripts for r in rollouts], range(12)), temperature=0.8).logp
    alone = []
    for rollout in rollouts:
        transcript = rollout.transcripts[0]
        tokens = torch.tensor(transcript.tokens)
        logp = (model(tokens, torch.arange(len(tokens)), causal) @ model.head.weight.T / 0.8).log_softmax(-1)
        alone += [logp[t - 1, tokens[t]] for t in transcript.scored.tolist()]
    assert (together - torch.stack(alone)).abs().max() < 1e-10


def test_policy_and_reference_are_two_models_read_at_the_temperature_of_sampling() -> None:
    models = {name: tiny(WORDS, seed=seed, dtype=torch.float64) for seed, name in enumerate(("policy", REFERENCE))}
    learner = LocalLearner(models["policy"], Optimization(), temperature=0.7, others={REFERENCE: models[REFERENCE]})
    rollouts = make_rollouts(torch.Generator().manual_seed(0), 1, 3, WORDS.vocab_size)
    batch = pack([r.transcripts for r in rollouts], range(3))
    for name, model in models.items():
        for want in (frozenset[str](), frozenset({"entropy"})):
            (found,) = learner.evaluate([batch], of=name, want=want)
            assert (found.logp - outputs_of(model, batch, temperature=0.7).logp).abs().max() < 1e-10


def test_shared_prompt_and_last_token_are_not_computed_twice_or_at_all() -> None:
    rollouts = make_rollouts(torch.Generator().manual_seed(0), 1, 4, WORDS.vocab_size)
    batch = pack([r.transcripts for r in rollouts], range(4))
    prompt = int(rollouts[0].transcripts[0].scored[0])
    rest = [len(r.transcripts[0]) - prompt - 1 for r in rollouts]
    assert len(batch.layout.tokens) == prompt + sum(rest)


def test_chunked_log_probabilities_and_gradients_equal_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 16, generator=generator, dtype=torch.float64, requires_grad=True) for n in (37, 50))
    target = torch.randint(0, 50, (37,), generator=generator)
    weight = torch.randn(37, generator=generator, dtype=torch.float64)
    plain = (hidden @ head.T / 0.7).log_softmax(-1)
    expected = torch.autograd.grad((plain[torch.arange(37), target] * weight).sum(), (hidden, head))
    monkeypatch.setattr("posttrain.models.losses.likelihood.CHUNK_LOGITS", 200)
    logp = token_logp(hidden, Head(head), target, 0.7)
    found = torch.autograd.grad((logp * weight).sum(), (hidden, head))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, expected, strict=True))


def test_weights_of_an_update_come_from_its_own_rollouts() -> None:
    """The generation batch is not the optimizer batch: weights of one update sum to what the paper's mean says."""
    scores = scores_of([0.0, 1.0, 1.0], [0, 0, 0], [2, 6, 6])
    assert torch.allclose(SequenceMean()(scores), torch.tensor([1 / 6, 1 / 18, 1 / 18]))
    assert torch.allclose(TokenMean()(scores), torch.full((3,), 1 / 14))
    assert torch.allclose(SequenceSum()(scores), torch.full((3,), 1 / 3))
    assert torch.allclose(ConstantLength(10)(scores), torch.full((3,), 1 / 30))


def test_golden_group_advantages() -> None:
    scores = scores_of([1.0, 1.0, -1.0], [0, 0, 0], [2, 6, 6])
    assert torch.allclose(Baselined("group", "none")(scores), torch.tensor([2 / 3, 2 / 3, -4 / 3]))
    assert torch.allclose(Baselined("group", "group")(scores), torch.tensor([0.57735, 0.57735, -1.154701]), atol=1e-5)
    centred = Baselined("group", "none")(scores)
    assert torch.allclose(Baselined("others", "none")(scores), 3 / 2 * centred)


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "moves"),
    [(1.0, 1.5, 1.2, False), (1.0, 0.5, 0.5, True), (-1.0, 0.5, -0.8, False), (-1.0, 1.5, -1.5, True)],
)
def test_golden_clip(advantage: float, ratio: float, value: float, moves: bool) -> None:
    r = torch.tensor([ratio], requires_grad=True)
    gain = Clip(0.2, 0.2)(r, Outputs(r.log()), batch_of(torch.tensor([advantage])))
    gain.sum().backward()
    assert torch.isclose(gain, torch.tensor(value)) and r.grad is not None and bool(r.grad != 0) is moves


def test_what_is_logged_of_a_micro_batch_is_what_its_name_says() -> None:
    logp, old = [-1.0, -2.0, -0.5, -3.0, -1.0, -1.0, -2.0], [-1.5, -1.8, -1.5, -1.0, -3.0, -2.0, -1.0]
    ref, mu = [-2.0, -1.0, -0.4, -3.5, -1.0, -1.1, -2.1], [-1.4, -1.9, -0.5, -1.3, -2.0, -1.7, -1.0]
    advantage, entropy = [1.0, -1.0, 0.5, -2.0, -1.5, 0.0, 0.0], [0.3, 0.6, 0.1, 0.2, 0.7, 0.8, 0.4]
    exact, n = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], 7
    current, *others = (torch.tensor(x, dtype=torch.float64) for x in (logp, old, ref, mu, advantage, entropy, exact))
    current.requires_grad_()
    batch = replace(batch_of(others[3]), old_logp=others[0], ref_logp=others[1], sampler_logp=others[2])
    row = Algorithm(
        "mine", "nobody 2026", Baselined(), Clip(0.2, 0.3, dual=3.0), TokenMean(), kl=KL("k2", 0.1), entropy=Entropy(0.05)
    )  # fmt: skip
    stats = Stats()
    outputs = Outputs(current, entropy=others[4], kl=others[5], top=others[5])
    loss = PolicyObjective(row)(outputs, batch, stats)
    r = [math.exp(a - b) for a, b in zip(logp, old, strict=True)]
    gaps = [a - b for a, b in zip(old, mu, strict=True)]
    k3 = sum(math.exp(b - a) - 1 - (b - a) for a, b in zip(logp, ref, strict=True))
    expected = {
        "ratio": (sum(r), n), "ratio/max": (max(r), 1), "ratio/min": (min(r), 1), "kl": (k3, n),
        "ratio/clipped_low": (sum(x < 0.8 and a < 0 for x, a in zip(r, advantage, strict=True)), n),
        "ratio/clipped_high": (sum(x > 1.3 and a > 0 for x, a in zip(r, advantage, strict=True)), n),
        "ratio/clipped_dual": (sum(x > 3 and a < 0 for x, a in zip(r, advantage, strict=True)), n),
        "entropy/policy": (sum(entropy), n), "top_mass": (sum(exact), n),
        "sampler/kl": (sum(math.exp(g) - 1 - g for g in gaps), n), "sampler/gap": (sum(map(abs, gaps)), n),
        "sampler/ratio": (sum(map(math.exp, gaps)), n), "sampler/ratio/square": (sum(math.exp(2 * g) for g in gaps), n),
        "sampler/gap/max": (max(map(abs, gaps)), 1),
    }  # fmt: skip
    assert stats.keys() == expected.keys()
    assert all(stats[name] == pytest.approx(value, abs=1e-12) for name, value in expected.items())
    gain = 0.0
    for x, a, lp, q, h in zip(r, advantage, logp, ref, entropy, strict=True):
        bound = min(x * a, min(max(x, 0.8), 1.3) * a)
        gain += (max(bound, 3.0 * a) if a < 0 else bound) - 0.1 * (q - lp) ** 2 / 2 + 0.05 * h
    assert loss.item() == pytest.approx(-gain / n)

    first = Stats()
    PolicyObjective(replace(row, kl=KL("exact", 0.1)))(
        Outputs(current, entropy=others[4], kl=others[5]), replace(batch, old_logp=None), first
    )
    assert first["ratio/first"] == (n, n) and first["kl/exact"] == (pytest.approx(2.8), n)
    far = Stats()
    PolicyObjective(replace(row, kl=KL("k3", 0.1, against="old")))(Outputs(current, entropy=others[4]), batch, far)
    assert far["kl/old"] == (pytest.approx(sum(x - 1 - math.log(x) for x in r)), n) and "kl" not in far
    stopping = Stats()  # tokens of the old policy: their mean of r - 1 - log r estimates KL(old || policy)
    PolicyObjective(replace(row, early_stop=EarlyStop()))(outputs, batch, stopping)
    assert stopping["kl/step"] == (pytest.approx(sum(x - 1 - math.log(x) for x in r)), n)
    none = Stats()
    empty = {name: getattr(batch, name)[:0] for name in ("advantage", "weight", "rollout", "old_logp", "ref_logp")}
    PolicyObjective(row)(
        Outputs(current[:0], entropy=others[4][:0]), replace(batch, sampler_logp=others[2][:0], **empty), none
    )
    assert none["ratio"] == (0.0, 0.0) and not any(name.endswith(("/max", "/min")) for name in none)


def test_golden_ratios_of_a_sequence() -> None:
    """Token ratios 2.0 and 0.4 with A = 1: PPO's bound gives (1.2 + 0.4) / 2 by token, sqrt(0.8) as a sequence."""
    log_ratio = torch.tensor([2.0, 0.4], dtype=torch.float64).log()
    batch = batch_of(torch.ones(2, dtype=torch.float64))

    def gain(*steps: RatioStep) -> float:
        x = log_ratio
        for step in steps:
            x = step(x, batch)
        return float((batch.weight * Clip(0.2, 0.2)(x.exp(), Outputs(x), batch)).sum())

    assert gain() == pytest.approx(0.8)
    assert gain(OverSequence("mean")) == pytest.approx(0.894427, abs=1e-6)
    assert gain(OverSequence("sum")) == pytest.approx(0.8)
    assert gain(Causal()) == pytest.approx((1.2 + 0.8) / 2)


@pytest.mark.parametrize(("high", "most"), [(0.2, 0.012), (0.28, 0.0128)])
def test_golden_clip_higher(high: float, most: float) -> None:
    """How far a token of probability 0.01 may rise before its gradient ends (DAPO, section 3.1)."""
    p = torch.tensor([most * 0.999, most * 1.001], dtype=torch.float64, requires_grad=True)
    Clip(0.2, high)(p / 0.01, Outputs(p.log()), batch_of(torch.ones_like(p))).sum().backward()
    assert p.grad is not None and (p.grad != 0).tolist() == [True, False]


def test_golden_kl_estimators() -> None:
    sampled = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for mean, true, spread in (
        (0.1, 0.005, {"k1": 20, "k2": 1.42, "k3": 1.42}),
        (1.0, 0.5, {"k1": 2, "k2": 1.73, "k3": 1.7}),
    ):
        lp, ref = -(sampled**2) / 2, -((sampled - mean) ** 2) / 2
        for name, expected in spread.items():
            k = KL(name)(lp, ref)  # type: ignore[arg-type]
            assert abs(k.std().item() / true - expected) < 0.06 * expected
            bias = {"k2": {0.1: 0.002, 1.0: 0.25}[mean]}.get(name, 0.0)
            assert abs(k.mean().item() / true - 1 - bias) < 4 * expected / 400_000**0.5


def test_equal_rewards_give_exactly_zero() -> None:
    scores = scores_of([0.7] * 7 + [1.0, 0.0], [0] * 7 + [1, 1], [3] * 9)
    for scale in ("none", "group"):
        advantage = Baselined("group", scale, eps=1e-9)(scores)
        assert (advantage[:7] == 0).all() and (advantage[7:] != 0).all()
    for baseline in ("none", "batch", "others"):
        assert (Baselined(baseline, "group")(scores)[:7] == 0).all()
    assert equal_rewards(scores).tolist() == [True] * 7 + [False] * 2


@pytest.mark.parametrize("size", [1.0, 1e9 / 3, 1e-9])
def test_equal_step_rewards_give_exactly_zero(size: float) -> None:
    rollouts = make_rollouts(torch.Generator().manual_seed(0), 1, 2, WORDS.vocab_size)
    for rollout in rollouts:
        rollout.steps = [(1, 0.7 * size)] * 10
        rollout.reward = 0.7 * size + sum(reward for _, reward in rollout.steps)
    assert all((a == 0).all() for a in StepRewards()(scoreboard(rollouts)))


def test_groups_are_told_by_id_and_not_by_position() -> None:
    scores = scores_of([1.0, 5.0, 0.0, 7.0], [0, 1, 0, 1], [1, 1, 1, 1])
    assert torch.allclose(Baselined("group", "none")(scores), torch.tensor([0.5, -1.0, -0.5, 1.0]))


def test_group_of_one_is_refused_where_the_configuration_is_read() -> None:
    with pytest.raises(UserError, match="group"):
        adjust(find("grpo"), RL(max_tokens=8, group=1))
    adjust(find("reinforce-baseline"), RL(max_tokens=8, group=1))


def test_first_on_policy_ratio_is_exactly_one() -> None:
    model = tiny(WORDS)
    rollouts = make_rollouts(torch.Generator().manual_seed(0), 2, 4, WORDS.vocab_size)
    advantage = [torch.ones(r.n_scored) for r in rollouts]
    batch = collate([r.transcripts for r in rollouts], range(8), weight=torch.ones(8), fields={"advantage": advantage})
    ones = batch.weight
    row = adjust(find("dr-grpo"), RL(max_tokens=8, group=4))
    stats = Stats()
    PolicyObjective(row)(outputs_of(model, batch), batch, stats)
    assert stats["ratio/first"] == (float(len(ones)), float(len(ones)))


def test_likelihood_objective_is_the_mean_over_tokens() -> None:
    logp = torch.tensor([-1.0, -2.0, -6.0])
    batch = Batch(None, logp, logp, logp, logp, weight=torch.full((3,), 1 / 3))  # type: ignore[arg-type]
    assert LikelihoodObjective()(Outputs(logp), batch, Stats()).item() == pytest.approx(3.0)


@pytest.mark.parametrize(("weight", "of"), [("probability", lambda p: p), ("uncertainty", lambda p: p * (1 - p))])
def test_likelihood_may_weigh_tokens_by_their_probability_which_has_no_gradient(weight: Any, of: Any) -> None:
    """As TRL's loss_type="dft" has it for the probability: the mean of -sg(p) log p."""
    logp = torch.tensor([-0.1, -1.0, -4.0], dtype=torch.float64, requires_grad=True)
    batch, stats = batch_of(torch.ones(3, dtype=torch.float64)), Stats()
    loss = LikelihoodObjective(weight)(Outputs(logp), batch, stats)
    probabilities = [math.exp(x) for x in (-0.1, -1.0, -4.0)]
    expected = sum(-of(p) * math.log(p) for p in probabilities) / 3
    assert loss.item() == pytest.approx(expected, abs=1e-12) and stats["nll"] == (pytest.approx(5.1), 3)
    loss.backward()
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx([-of(p) / 3 for p in probabilities], abs=1e-12)


def test_adding_a_row_takes_one_statement() -> None:
    row = Algorithm("mine", "nobody 2026", Baselined("group", "none"), Clip(0.1, 0.3), TokenMean())
    assert any("clip(r, 0.9, 1.3)" in line for line in describe(row))


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda r: r.name)
def test_every_row_describes_itself(row: Algorithm) -> None:
    text = "\n".join(describe(row))
    assert row.name in text and "maximise" in text and "advantage A: " in text and "weight w of a token: " in text


def test_unknown_algorithm_lists_the_rows_and_suggests() -> None:
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        find("gprpo")


def shares_of_digits(task: Task, reply: str) -> float:
    return sum(c.isdigit() for c in reply) / 8


@pytest.mark.parametrize("name", one_of_a_kind(TABLE))
def test_first_update_of_a_real_step_is_the_transcription_of_its_rollouts(name: str) -> None:
    """Played by the engine, credited and laid by the source: the same loss and gradient as from the paper."""
    row = replace(chosen_row(TABLE[name]), epochs=1, minibatches=1)
    learner = new_learner(row)
    tasks: list[Task] = [{"id": str(i), "prompt": f"{i}+1="} for i in range(4)]
    tasks[1] |= {"teacher_prompt": "the sum of 1+1 is "}
    tasks[2] |= {"teacher": "other", "teacher_prompt": "2+1="}
    texts = new_texts(torch.Generator().manual_seed(0), 4)  # 16 are drawn: each of them four times
    player = new_player(shares_of_digits, learner.model, 20)
    success = 0.5 if isinstance(row.advantage, PassAtK) else 0.2  # which not every two of a group hold
    experience = RLSource(
        collector_of(tasks, player, row, Size(3, 4, 100), seed=5, success=success),
        learner,
        row,
        texts=[[text] for text in texts],
        teachers=Teachers(WORDS, {TEACHER: 64, OTHER: 64}, choose=True) if row.teacher else None,
    )
    step = experience.produce(1)
    loss, grad = gradient(Case(row, learner, [], [], {}, {}, {}), step.updates[0]())

    greedy = {r.group: r.reward for r in step.played if r.greedy}
    assert bool(greedy) == (Need.GREEDY in row.needs)
    rollouts = [r for r in step.played if not r.greedy]
    assert all(r.baseline == greedy.get(r.group) for r in rollouts)
    if row.sampling is not None:  # groups without signal have been replaced
        differ = {r.group for r in rollouts for o in rollouts if r.group == o.group and r.reward != o.reward}
        rollouts = [r for r in rollouts if r.group in differ]
    assert len({r.group for r in rollouts}) == 3
    views = [learner.evaluate([pack([r.transcripts], [0])], want=values_of(learner))[0] for r in rollouts]
    reference = views
    if REFERENCE in learner.others:
        reference = [learner.evaluate([pack([r.transcripts], [0])], of="reference")[0] for r in rollouts]
    told = [
        {id(r): getattr(o, name) for r, o in zip(rollouts, of, strict=True)}
        for of, name in ((views, "logp"), (reference, "logp"), (views, "value"))
    ]
    taught = {id(r): as_its_teacher_reads(r) for r in rollouts} if row.teacher else {}
    case = Case(
        row,
        learner,
        rollouts,
        [text for item in experience.minibatches.texts for text in item or ()],
        *told,
        {},
        taught,
    )
    expected, want = by_loops(case, success)
    assert abs(loss - expected) < 1e-5 * max(1.0, abs(expected))
    assert want.abs().max() > 1e-3 and (grad - want).abs().max() < 1e-5 * max(1.0, want.abs().max().item())


def as_its_teacher_reads(rollout: Rollout) -> Taught:
    """Written down from the task, with nothing of the library's that finds it."""
    task, (own,) = rollout.task, rollout.transcripts
    read = Transcript()
    read.observe(WORDS.encode(task.get("teacher_prompt", task["prompt"]), start=True))
    sampled = [own.tokens[place] for place in own.scored.tolist()]
    read.sample(Completion(0, sampled, [0.0] * len(sampled), "", StopReason.EOS, 0))
    return Taught(OTHER if task.get("teacher") else TEACHER, [read])


def values_of(learner: LocalLearner) -> frozenset[str]:
    return frozenset({"value"}) if isinstance(learner.critic, ValueModel) else frozenset()
