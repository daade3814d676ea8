"""Denominators and gradients: the loss of an optimizer batch is a plain weighted sum, however the batch is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import make_rollouts, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transcriptions import LOSSES, Played

from posttrain.algorithms.adjust import adjust
from posttrain.algorithms.credit import Baselined, Process, equal_rewards, per_token
from posttrain.algorithms.parts import Clip, ConstantLength, SequenceMean, SequenceSum, TokenMean
from posttrain.algorithms.penalty import KL
from posttrain.algorithms.policy import Algorithm, policy_objective
from posttrain.algorithms.ratio import Causal, OverSequence, RatioStep
from posttrain.algorithms.table import TABLE, find
from posttrain.config import RL
from posttrain.data.pack import cut, lay
from posttrain.models.decoder import Decoder, causal
from posttrain.models.likelihood import token_logp
from posttrain.models.tokenizer import Tokenizer
from posttrain.scoreboard import scoreboard
from posttrain.supervised import Likelihood
from posttrain.types import Batch, Outputs, Rollout, Scores, Stats, UserError

PerRollout = dict[int, Tensor]
ROWS = [
    adjust(row, RL(max_tokens=20, group=4, ptx="text.jsonl" if row.pretraining else None)) for row in TABLE.values()
]
WORDS = Tokenizer.train(["0123456789+-*/= .abcdefghijklmnopqrstuvwxyz<>"], 64, "characters")


def scores_of(reward: Sequence[float], group: Sequence[int], length: Sequence[int]) -> Scores:
    return Scores(torch.tensor(reward), torch.tensor(group), torch.tensor(length, dtype=torch.float32))


def precise(scores: Scores) -> Scores:
    return replace(scores, reward=scores.reward.double(), length=scores.length.double())


def outputs_of(model: Decoder, batch: Batch, temperature: float = 1.0) -> Outputs:
    hidden = model.hidden(batch.layout)
    return Outputs(token_logp(hidden[batch.at], model.head, batch.target, temperature))


def gradient(
    model: Decoder,
    row: Algorithm,
    rollouts: Sequence[Rollout],
    old: dict[int, torch.Tensor],
    reference: dict[int, torch.Tensor],
    cuts: Sequence[Sequence[int]],
) -> tuple[float, torch.Tensor]:
    """Loss and gradient over these micro-batches; `old` and `reference` are per rollout, by id()."""
    penalty = []
    if row.kl and row.kl.where == "reward":
        penalty = [row.kl.beta * row.kl(old[id(r)], reference[id(r)]) for r in rollouts]
    scores = precise(scoreboard(rollouts, penalty))
    credit, weight = per_token(row.advantage(scores), scores), row.aggregate(scores)
    model.zero_grad()
    total, objective = 0.0, policy_objective(row)
    for index in cuts:
        if not index:
            continue
        batch = lay([rollouts[i].transcripts for i in index], index)
        order = batch.rollout.unique_consecutive().tolist()
        batch = replace(
            batch,
            weight=weight[batch.rollout].double(),
            advantage=torch.cat([credit[i] for i in order]),
            old_logp=torch.cat([old[id(rollouts[i])] for i in order]),
            ref_logp=torch.cat([reference[id(rollouts[i])] for i in order]),
        )
        loss = objective(outputs_of(model, batch), batch, Stats())
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def noisy_logps(
    model: Decoder, rollouts: Sequence[Rollout], generator: torch.Generator, noise: float
) -> dict[int, torch.Tensor]:
    """Log-probabilities near the model's own, one tensor per rollout."""
    found = {}
    for rollout in rollouts:
        with torch.no_grad():
            logp = outputs_of(model, lay([rollout.transcripts], [0])).logp
        found[id(rollout)] = logp + noise * torch.randn(len(logp), generator=generator, dtype=logp.dtype)
    return found


def by_loops(
    model: Decoder, row: Algorithm, rollouts: Sequence[Rollout], old: PerRollout, reference: PerRollout
) -> Tensor:
    """The same loss as its paper writes it: one sequence, one token at a time; no packing and no shared prompt."""
    played = []
    for rollout in rollouts:
        (transcript,) = rollout.transcripts
        tokens = torch.tensor(transcript.tokens)
        logps = (model(tokens, torch.arange(len(tokens)), causal) @ model.head.T).log_softmax(-1)
        lp = [logps[t - 1, tokens[t]] for t in range(len(tokens)) if transcript.sampled[t]]
        reward = float(rollout.reward)  # type: ignore[arg-type]
        played.append(
            Played(lp, old[id(rollout)].tolist(), reference[id(rollout)].tolist(), reward, rollout.group, rollout.steps)
        )
    return LOSSES[row.name](played)


@pytest.mark.parametrize("noise", [0.001, 0.3])
@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_loss_and_gradient_equal_a_loop_written_transcription(row: Algorithm, noise: float) -> None:
    generator = torch.Generator().manual_seed(1)
    model = tiny(WORDS, dtype=torch.float64)
    rollouts = make_rollouts(generator, 3, 4, WORDS.vocab_size)
    old, reference = (noisy_logps(model, rollouts, generator, s) for s in (noise, 0.5))
    loss, grad = gradient(model, row, rollouts, old, reference, [range(len(rollouts))])
    model.zero_grad()
    expected = by_loops(model, row, rollouts, old, reference)
    expected.backward()  # type: ignore[no-untyped-call]
    want = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert abs(loss - expected.item()) < 1e-10
    assert (grad - want).abs().max() < 1e-10


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    groups=st.integers(1, 4),
    size=st.integers(2, 5),
    row=st.sampled_from(ROWS),
    data=st.data(),
)
def test_gradient_is_the_same_under_any_cut_order_and_packing(seed, groups, size, row, data) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    model = tiny(WORDS, dtype=torch.float64)
    rollouts = make_rollouts(generator, groups, size, WORDS.vocab_size)
    old, reference = (noisy_logps(model, rollouts, generator, s) for s in (0.3, 0.5))
    loss, grad = gradient(model, row, rollouts, old, reference, [range(len(rollouts))])

    shuffled = data.draw(st.permutations(rollouts))
    borders = sorted(data.draw(st.lists(st.integers(0, len(rollouts)), max_size=5)))
    edges = [0, *borders, len(rollouts)]
    cuts = [list(range(a, b)) for a, b in pairwise(edges)]  # some empty, the last one partial
    again, same = gradient(model, row, shuffled, old, reference, cuts)
    assert abs(loss - again) < 1e-6
    assert (grad - same).abs().max() <= 1e-6 * max(1.0, grad.abs().max().item())

    budget = data.draw(st.integers(1, 60))
    again, same = gradient(model, row, rollouts, old, reference, cut([r.transcripts for r in rollouts], budget))
    assert (grad - same).abs().max() <= 1e-6 * max(1.0, grad.abs().max().item())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_packed_log_probabilities_equal_those_of_each_sequence_alone(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny(WORDS, dtype=torch.float64)
    rollouts = make_rollouts(generator, 3, 4, WORDS.vocab_size)
    together = outputs_of(model, lay([r.transcripts for r in rollouts], range(12)), temperature=0.8).logp
    alone = []
    for rollout in rollouts:
        transcript = rollout.transcripts[0]
        tokens = torch.tensor(transcript.tokens)
        logp = (model(tokens, torch.arange(len(tokens)), causal) @ model.head.T / 0.8).log_softmax(-1)
        alone += [logp[t - 1, tokens[t]] for t in range(len(tokens)) if transcript.sampled[t]]
    assert (together - torch.stack(alone)).abs().max() < 1e-10


def test_shared_prompt_and_last_token_are_not_computed_twice_or_at_all() -> None:
    rollouts = make_rollouts(torch.Generator().manual_seed(0), 1, 4, WORDS.vocab_size)
    batch = lay([r.transcripts for r in rollouts], range(4))
    prompt = rollouts[0].transcripts[0].sampled.index(True)
    rest = [len(r.transcripts[0]) - prompt - 1 for r in rollouts]
    assert len(batch.layout.tokens) == prompt + sum(rest)


def test_chunked_log_probabilities_and_gradients_equal_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 16, generator=generator, dtype=torch.float64, requires_grad=True) for n in (37, 50))
    target = torch.randint(0, 50, (37,), generator=generator)
    weight = torch.randn(37, generator=generator, dtype=torch.float64)
    plain = (hidden @ head.T / 0.7).log_softmax(-1)
    expected = torch.autograd.grad((plain[torch.arange(37), target] * weight).sum(), (hidden, head))
    monkeypatch.setattr("posttrain.models.likelihood.CHUNK_LOGITS", 200)
    logp = token_logp(hidden, head, target, 0.7)
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
    gain = Clip(0.2, 0.2)(r, Outputs(r.log()), torch.tensor([advantage]))
    gain.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.isclose(gain, torch.tensor(value)) and r.grad is not None and bool(r.grad != 0) is moves


def test_golden_ratios_of_a_sequence() -> None:
    """Token ratios 2.0 and 0.4 with A = 1: PPO's bound gives (1.2 + 0.4) / 2 token by token, sqrt(0.8) as a sequence."""
    log_ratio = torch.tensor([2.0, 0.4], dtype=torch.float64).log()
    ones = torch.ones(2, dtype=torch.float64)
    batch = Batch(None, ones, ones, torch.zeros(2, dtype=torch.int64), weight=ones / 2, advantage=ones)  # type: ignore[arg-type]

    def gain(*steps: RatioStep) -> float:
        x = log_ratio
        for step in steps:
            x = step(x, batch)
        return float((batch.weight * Clip(0.2, 0.2)(x.exp(), Outputs(x), ones)).sum())

    assert gain() == pytest.approx(0.8)
    assert gain(OverSequence("mean")) == pytest.approx(0.894427, abs=1e-6)
    assert gain(OverSequence("sum")) == pytest.approx(0.8)
    assert gain(Causal()) == pytest.approx((1.2 + 0.8) / 2)


@pytest.mark.parametrize(("high", "most"), [(0.2, 0.012), (0.28, 0.0128)])
def test_golden_clip_higher(high: float, most: float) -> None:
    """How far a token of probability 0.01 may rise before its gradient ends (DAPO, section 3.1)."""
    p = torch.tensor([most * 0.999, most * 1.001], dtype=torch.float64, requires_grad=True)
    Clip(0.2, high)(p / 0.01, Outputs(p.log()), torch.ones(2, dtype=torch.float64)).sum().backward()  # type: ignore[no-untyped-call]
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
        advantage = Baselined("group", scale, eps=1e-9)(scores)  # type: ignore[arg-type]
        assert (advantage[:7] == 0).all() and (advantage[7:] != 0).all()
    assert equal_rewards(scores).tolist() == [True] * 7 + [False] * 2


def test_equal_step_rewards_give_exactly_zero() -> None:
    rollouts = make_rollouts(torch.Generator().manual_seed(0), 1, 2, WORDS.vocab_size)
    for rollout in rollouts:
        rollout.steps = [(1, 0.7)] * 10
        rollout.reward = 0.7 + sum(reward for _, reward in rollout.steps)
    assert all((a == 0).all() for a in Process()(scoreboard(rollouts)))


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
    batch = lay([r.transcripts for r in rollouts], range(8))
    ones = torch.ones(len(batch.target))
    batch = replace(batch, weight=ones / len(ones), advantage=ones)
    row = adjust(find("dr-grpo"), RL(max_tokens=8, group=4))
    stats = Stats()
    policy_objective(row)(outputs_of(model, batch), batch, stats)
    assert stats["ratio/first"] == (float(len(ones)), float(len(ones)))


def test_likelihood_objective_is_the_mean_over_tokens() -> None:
    logp = torch.tensor([-1.0, -2.0, -6.0])
    batch = Batch(None, logp, logp, logp, weight=torch.full((3,), 1 / 3))  # type: ignore[arg-type]
    assert Likelihood()(Outputs(logp), batch, Stats()).item() == pytest.approx(3.0)


def test_adding_a_row_takes_one_statement() -> None:
    row = Algorithm("mine", "nobody 2026", Baselined("group", "none"), Clip(0.1, 0.3), TokenMean())
    assert any("clip(r, 0.9, 1.3)" in line for line in row.describe())


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda r: r.name)
def test_every_row_describes_itself(row: Algorithm) -> None:
    text = "\n".join(row.describe())
    assert row.name in text and "A_i = " in text and "w_i = " in text


def test_unknown_algorithm_lists_the_rows_and_suggests() -> None:
    with pytest.raises(UserError, match="did you mean 'grpo'.*rloo"):
        find("gprpo")
