"""Losses and gradients of preference rows: those of their papers, however a batch of items is cut, ordered and packed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import comparisons
import numpy as np
import pytest
import torch
import torch.distributed as dist
from comparisons import DRIFT, LOSSES, SHIFT, Asked, Said
from conftest import tiny
from processes import in_processes
from torch import Tensor, nn
from update_cases import WORDS, clear, gathered

from posttrain.algorithms.comparison_weights import PerComparison, PerPrompt
from posttrain.algorithms.links import LINKS, Pairs, PlackettLuce, Sigmoid
from posttrain.algorithms.optimal_transport import monotone
from posttrain.algorithms.preference import PreferenceAlgorithm, PreferenceObjective
from posttrain.algorithms.preference_table import PREFERENCES
from posttrain.algorithms.responses import LogRatio, Odds
from posttrain.algorithms.settings import change
from posttrain.core.batch import Batch, Preferences, Stats, TrainingStep
from posttrain.core.component import Need
from posttrain.core.protocols import World
from posttrain.core.rollouts import Comparison, PreferenceExample
from posttrain.core.transcripts import Transcript
from posttrain.data.preference_examples import to_item
from posttrain.data.row_files import Row
from posttrain.data.tasks import to_tasks
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.learners.process_group import Processes
from posttrain.models.native.decoder import causal
from posttrain.training.sources.length_filter import TooLong
from posttrain.training.sources.packing import pack
from posttrain.training.sources.preferences import Comparisons, PreferenceExamples
from posttrain.training.sources.reference_cache import Reference, mismatched

EXACT = 1e-12
ROWS = pytest.mark.parametrize("row", PREFERENCES.values(), ids=lambda r: r.name)
COEFFICIENTS = {"drift": DRIFT, "shift": SHIFT}


@dataclass(frozen=True)
class Case:
    """Items, what the reference says of them, and a learner in float64."""

    items: list[PreferenceExample]
    reference: Reference
    learner: LocalLearner

    def source(self, row: PreferenceAlgorithm, tokens: int = 10**6) -> Comparisons:
        reference = self.reference if Need.REFERENCE in row.needs else None
        return Comparisons(_nothing(), row, self.learner, 8, tokens, 0, reference)


def _nothing() -> PreferenceExamples:
    """Rows that no test of the loss asks for."""
    tasks = to_tasks([{"prompt": "a", "chosen": "b", "rejected": "c"}], convert=to_item)
    return PreferenceExamples(tasks, WORDS, (2,), WORDS.vocab_size, TooLong("skip", 64, print))


def response(prompt: Sequence[int], tokens: Sequence[int]) -> Transcript:
    transcript = Transcript()
    transcript.observe(prompt)
    transcript.imitate(tokens)
    return transcript


def arrays_of(values: Sequence[Tensor], name: str = "own") -> dict[str, Any]:
    return {name: torch.cat(list(values)).numpy(), f"{name}_ends": np.cumsum([len(v) for v in values])}


@cache
def case(world: World | None = None) -> Case:
    """Pairs, K-wise items, a cycle, unequal shares, margins, one token, equal prefixes, and two items with one prompt."""
    draw = torch.Generator().manual_seed(3)

    def tokens(low: int, high: int) -> list[int]:
        count = int(torch.randint(low, high, (), generator=draw))
        return torch.randint(3, WORDS.vocab_size, (count,), generator=draw).tolist()

    prompts = [tokens(1, 9) for _ in range(5)]
    long = tokens(8, 12)
    items = [
        PreferenceExample([response(prompts[0], tokens(1, 9)) for _ in range(2)], [Comparison(0, 1)]),
        PreferenceExample([response(prompts[0], tokens(1, 9)) for _ in range(2)], [Comparison(1, 0, 2.5, 0.7)]),
        PreferenceExample(  # each begins like the next; the first is a single token
            [response(prompts[1], long[:1]), response(prompts[1], long[:5]), response(prompts[1], long)],
            [Comparison(0, 1, 1.0, 0.2), Comparison(0, 2, 0.5, 1.5), Comparison(2, 1, 3.0, 0.1)],
        ),
        PreferenceExample([response(prompts[2], tokens(1, 2)) for _ in range(2)], [Comparison(0, 1, 0.25, -0.4)]),
        PreferenceExample(  # a cycle, and a response that both wins and loses as much
            [response(prompts[3], tokens(1, 9)) for _ in range(4)],
            [Comparison(0, 1), Comparison(1, 2), Comparison(2, 0), Comparison(3, 0, 0.3, 2.0), Comparison(3, 2, 0.1)],
        ),
        PreferenceExample([response(prompts[4], tokens(2, 6)) for _ in range(3)], [Comparison(2, 0), Comparison(2, 1)]),
    ]
    learner = LocalLearner(tiny(WORDS, dtype=torch.float64), Optimization(lr=1e-3), world=world)
    said = []
    for item in items:
        (own,) = learner.evaluate([pack([item.responses], [0])])
        said.append(own.logp + 0.4 * torch.randn(len(own.logp), generator=draw, dtype=torch.float64))
    return Case(items, Reference(range(len(items)), arrays_of(said)), learner)


def through_the_library(
    case: Case, row: PreferenceAlgorithm, order: Sequence[int], tokens: int
) -> tuple[float, Tensor, Stats]:
    clear(case.learner)
    batches = case.source(row, tokens).batches(order, [case.items[i] for i in order], COEFFICIENTS)
    return added(case.learner, row, batches)


def added(learner: LocalLearner, row: PreferenceAlgorithm, batches: Sequence[Batch]) -> tuple[float, Tensor, Stats]:
    total, stats, objective = 0.0, Stats(), PreferenceObjective(row)
    for batch in batches:
        loss = objective(learner._outputs(learner.model, batch, objective.wants), batch, stats)
        loss.backward()
        total += loss.item()
    return total, gathered(learner), stats


def asked(case: Case) -> list[Asked]:
    """What the transcriptions are told: each response alone, without packing and without a shared prompt."""
    found = []
    for place, item in enumerate(case.items):
        known, said, model = iter(case.reference.of(place).tolist()), [], case.learner.model
        for transcript in item.responses:
            tokens = torch.tensor(transcript.tokens)
            logs = (model(tokens, torch.arange(len(tokens)), causal) @ model.head.weight.T).log_softmax(-1)
            scored = transcript.scored.tolist()
            squares = [(logs[t - 1].detach().exp() ** 2).sum().item() for t in scored]
            said.append(Said([logs[t - 1, tokens[t]] for t in scored], [next(known) for _ in scored], squares))
        found.append(Asked(said, [(c.better, c.worse, c.share, c.margin) for c in item.comparisons]))
    return found


def same(case: Case, row: PreferenceAlgorithm, expected: Callable[[list[Asked]], Tensor]) -> None:
    """Loss and gradient of the library are those of the transcription."""
    clear(case.learner)
    loss = expected(asked(case))
    loss.backward()
    want = gathered(case.learner)
    found, gradient, _ = through_the_library(case, row, range(len(case.items)), 10**6)
    assert abs(found - loss.item()) <= EXACT * max(1.0, abs(found)), (found, loss.item())
    largest = want.abs().max().item()
    assert largest > 1e-4
    assert (gradient - want).abs().max() <= EXACT * max(1.0, largest)


@ROWS
def test_loss_and_gradient_equal_a_transcription_of_the_paper(row: PreferenceAlgorithm) -> None:
    same(case(), row, LOSSES[row.name])


def test_every_row_has_its_transcription() -> None:
    assert LOSSES.keys() == PREFERENCES.keys()


def changed(name: str = "dpo", **settings: Any) -> PreferenceAlgorithm:
    return change(PREFERENCES[name], settings)


AXES: dict[str, tuple[PreferenceAlgorithm, comparisons.Loss]] = {
    "forward KL": (changed(divergence="forward-kl"), comparisons.diverging("forward-kl")),
    "Jensen-Shannon": (changed(divergence="jensen-shannon"), comparisons.diverging("jensen-shannon")),
    "alpha": (changed(divergence="alpha", **{"score.alpha": 0.7}), comparisons.diverging("alpha")),
    "alpha of 1 is the reverse KL": (
        changed(divergence="alpha", **{"score.alpha": 1.0}),
        comparisons.diverging("reverse-kl"),
    ),
    "alpha of 0 is the forward KL": (
        changed(divergence="alpha", **{"score.alpha": 0.0}),
        comparisons.diverging("forward-kl"),
    ),
    "tail": (changed(tail=0.3), comparisons.desensitised(0.3)),
    "no tail": (changed(tail=0.0), comparisons.desensitised(0.0)),
    "policy weight": (changed(policy_weight=True), comparisons.by_policy),
    "policy weight of labels": (changed("kto", policy_weight=True), comparisons.labelled_by_policy),
    "a margin for all": (changed(margin=0.6), comparisons.with_margins(0.6, 0.0)),
    "margins of the rows": (changed(margin=0.2, row_margins=0.5), comparisons.with_margins(0.2, 0.5)),
    "length-normalised": (changed(length_normalised=True, beta=5.0), comparisons.dpo_norm),
    "per prompt": (changed(denominator="prompt"), comparisons.per_prompt),
    **{
        f"imitation per {per}": (
            changed(imitation=0.7, imitation_per=per),
            lambda items, per=per: comparisons.dpo(items) + 0.7 * comparisons.imitated(items, per),
        )
        for per in ("tokens", "responses", "sums")
    },
}


@pytest.mark.parametrize("name", AXES)
def test_what_a_row_may_be_changed_to_equals_a_transcription(name: str) -> None:
    row, expected = AXES[name]
    same(case(), row, expected)


def test_plackett_luce_is_the_product_over_choices() -> None:
    plain = case()
    rankings = [[0, 1], [1, 0], [0, 2, 1], [0, 1], [3, 1, 0, 2], [2, 0, 1]]
    items = [
        replace(
            item,
            comparisons=[Comparison(better, worse) for k, better in enumerate(order) for worse in order[k + 1 :]],
        )
        for item, order in zip(plain.items, rankings, strict=True)
    ]
    row = changed(link="plackett-luce", beta=0.5)
    same(replace(plain, items=items), row, partial(comparisons.of_rankings, rankings=rankings, beta=0.5))


def test_plackett_luce_of_scores_far_apart_is_finite() -> None:
    far = torch.tensor([800.0, -900.0, 0.0], dtype=torch.float64)
    unit, zero = torch.tensor([0, 1, 2]), torch.zeros(3, dtype=torch.float64)
    found = PlackettLuce(1.0).compare(Pairs(far, torch.zeros_like(far), zero, unit, {}))
    assert torch.allclose(found, torch.tensor([0.0, 900.0, math.log(2)], dtype=torch.float64), atol=1e-12)


def pairs_of(better: float, worse: float) -> Pairs:
    def one(x: float) -> Tensor:
        return torch.tensor([x], dtype=torch.float64)

    return Pairs(one(better), one(worse), one(0.0), torch.tensor([0]), {"shift": 0.0})


def test_golden_numbers() -> None:
    assert round(Sigmoid(1.0).compare(pairs_of(0.4, 0.4)).item(), 6) == 0.693147
    assert round(Sigmoid(0.1).compare(pairs_of(2.0, -1.0)).item(), 6) == 0.554355


@pytest.mark.parametrize("name", [name for name, link in LINKS.items() if not link.reads_labels])
def test_links_of_scores_hundreds_of_nats_apart_are_finite(name: str) -> None:
    for better, worse in ((900.0, -900.0), (-900.0, 900.0)):
        pairs = pairs_of(better, worse)
        pairs.better.requires_grad_()
        loss = replace(LINKS[name], beta=1.0).compare(pairs)  # type: ignore[call-arg]
        (slope,) = torch.autograd.grad(loss.sum(), pairs.better)
        assert loss.isfinite().all() and slope.isfinite().all()


def test_certain_responses_have_finite_odds_and_divergences() -> None:
    transcript = torch.zeros(2, dtype=torch.int64)
    logp = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    outputs = comparisons_outputs(logp)
    batch = bare(transcript, ref_logp=torch.full((2,), 90.0, dtype=torch.float64))
    responses = responses_of(batch)
    for score in (Odds(), *(LogRatio(divergence=d) for d in ("forward-kl", "jensen-shannon", "alpha"))):  # type: ignore[arg-type]
        found = score(outputs, batch, responses, torch.tensor([0]), None)
        (slope,) = torch.autograd.grad(found.sum(), logp)
        assert found.isfinite().all() and slope.isfinite().all()


@pytest.mark.parametrize("divergence", ["reverse-kl", "forward-kl", "jensen-shannon", "alpha"])
def test_scores_are_zero_where_policy_and_reference_agree(divergence: Any) -> None:
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    batch = bare(torch.zeros(2, dtype=torch.int64), ref_logp=logp)
    score = LogRatio(divergence=divergence)
    found = score(comparisons_outputs(logp), batch, responses_of(batch), torch.tensor([0]), None)
    assert found.abs().item() < 1e-15


def test_pair_that_the_policy_has_moved_alike_counts_half_in_the_accuracy() -> None:
    logp = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    number, share = torch.tensor, torch.full((3,), 1 / 3)
    said = Preferences(number([0, 1, 2]), number([1, 0, 0]), 0 * share, share, number([]), number([]), number([]))
    batch = bare(torch.arange(3), ref_logp=torch.tensor([-2.0, -3.0, -3.0], dtype=torch.float64), preferences=said)
    stats = Stats()
    PreferenceObjective(PREFERENCES["dpo"]).measure(comparisons_outputs(logp), batch, stats)
    assert stats["accuracy"] == (0.5 + 0.5 + 0.0, 3.0)


def comparisons_outputs(logp: Tensor) -> Any:
    from posttrain.core.batch import Outputs

    return Outputs(logp)


def responses_of(batch: Batch) -> Any:
    from posttrain.algorithms.responses import Responses

    return Responses.of(batch)


def bare(transcript: Tensor, **fields: Any) -> Batch:
    zero = torch.zeros(len(transcript), dtype=torch.int64)
    return Batch(None, zero, zero, zero, transcript, weight=zero.double(), **fields)  # type: ignore[arg-type]


# -- denominators --------------------------------------------------------------------------------------------------------


def test_weights_add_up_to_one_under_both_denominators() -> None:
    shares = [[1.0, 3.0], [], [2.0], [0.5, 0.5, 1.0]]
    assert PerComparison()(shares) == [[1 / 8, 3 / 8], [], [2 / 8], [0.5 / 8, 0.5 / 8, 1 / 8]]
    assert PerPrompt()(shares) == [[1 / 12, 3 / 12], [], [1 / 3], [0.25 / 3, 0.25 / 3, 0.5 / 3]]
    assert PerComparison()([[], []]) == [[], []] and PerPrompt()([[]]) == [[]]


# -- cuts, order, processes ----------------------------------------------------------------------------------------------

CUT = [
    *PREFERENCES.values(),
    *(AXES[name][0] for name in ("tail", "policy weight", "per prompt", "margins of the rows")),
]
CUT += [
    changed(link="plackett-luce"),
    changed(imitation=1.0, imitation_per="sums"),
    changed("kto", denominator="prompt"),
]


@pytest.mark.parametrize("number", range(len(CUT)), ids=lambda n: f"{n}-{CUT[n].name}")
def test_gradient_does_not_depend_on_cuts_order_or_packing(number: int) -> None:
    plain, row = case(), CUT[number]
    loss, want, told = through_the_library(plain, row, range(len(plain.items)), 10**6)
    for seed, tokens in enumerate((1, 12, 25, 40, 10**6)):
        order = torch.randperm(len(plain.items), generator=torch.Generator().manual_seed(seed)).tolist()
        found, gradient, stats = through_the_library(plain, row, order, tokens)
        assert abs(found - loss) <= EXACT * max(1.0, abs(loss))
        assert (gradient - want).abs().max() <= EXACT * max(1.0, want.abs().max().item())
        assert stats.keys() == told.keys()
        for name in stats:
            assert stats[name] == pytest.approx(told[name], rel=1e-10, abs=1e-10)


def test_prompts_are_shared_within_an_item_and_between_items_and_one_item_may_stand_alone() -> None:
    plain = case()
    (whole,) = plain.source(PREFERENCES["dpo"]).batches(range(6), plain.items, {})
    alone = plain.source(PREFERENCES["dpo"], 1).batches(range(6), plain.items, {})
    assert len(alone) == len(plain.items)
    used = sum(len(b.layout.tokens) for b in alone)
    assert len(whole.layout.tokens) < used < sum(len(t) for item in plain.items for t in item.responses)


def updated(
    row: PreferenceAlgorithm, world: World | None, fed: Callable[[list[Batch]], list[Batch]]
) -> dict[str, Tensor]:
    own = case()
    learner = LocalLearner(tiny(WORDS, dtype=torch.float64), Optimization(lr=1e-3), world=world)
    items = replace(own, learner=learner)
    batches = fed(items.source(row, 20).batches(range(len(own.items)), own.items, COEFFICIENTS))
    stats = learner.update(batches, PreferenceObjective(row))
    weights = nn.utils.parameters_to_vector(list(learner.model.parameters())).detach().clone()
    return {"gradient": gathered(learner), "weights": weights, "norm": torch.tensor(stats["grad_norm"][0])}


def one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        world = Processes()
        found = [updated(row, world, lambda batches: batches[rank::2]) for row in CUT]
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_update_of_two_processes_is_that_of_one_for_every_row(tmp_path: Path) -> None:
    in_processes(one_of_two, (str(tmp_path),), 2)
    two = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for number, row in enumerate(CUT):
        alone = updated(row, None, lambda batches: batches)
        for process in two:
            for name in ("gradient", "norm"):
                difference = (process[number][name] - alone[name]).abs().max()
                assert difference < EXACT * max(1.0, alone[name].abs().max().item()), (row.name, name)
        assert torch.equal(two[0][number]["weights"], two[1][number]["weights"]), row.name


# -- what is measured over a whole optimizer batch -------------------------------------------------------------------------

PAIRS: list[Row] = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    {"prompt": "1+1=", "chosen": "two", "rejected": "22"},
    {"prompt": "abc", "responses": ["d", "e", "fgh"], "ranks": [1, 2, 3]},
    {"prompt": "7*6=", "chosen": "42", "rejected": "no"},
]


def from_rows(row: PreferenceAlgorithm, tokens: int = 10**6) -> Comparisons:
    learner = LocalLearner(tiny(WORDS, dtype=torch.float64), Optimization(lr=1e-3))
    tasks = to_tasks(PAIRS, convert=to_item)
    items = PreferenceExamples(tasks, WORDS, (WORDS.eos_id or 0,), WORDS.vocab_size, TooLong("skip", 64, print))
    draw = torch.Generator().manual_seed(1)
    arrays: dict[str, Any] = {}
    for name, of in (("own", lambda i: items[i].responses), ("mismatched", lambda i: mismatched(items, i))):  # type: ignore[union-attr]
        said = []
        for place in range(len(items)):
            (outputs,) = learner.evaluate([pack([of(place)], [0])])
            said.append(outputs.logp - torch.rand(len(outputs.logp), generator=draw, dtype=torch.float64))
        arrays |= arrays_of(said, name)
    return Comparisons(items, row, learner, 4, tokens, 0, Reference(range(len(items)), arrays))


def log_ratios(source: Comparisons, prompt: str, reply: str, known: Sequence[float]) -> list[float]:
    """Of each token of a reply to a prompt, alone, with the reference's log-probabilities of its tokens."""
    model = source.learner.weights()
    start, end = WORDS.encode(prompt, start=True), [*WORDS.encode(reply), WORDS.eos_id or 0]
    tokens = torch.tensor([*start, *end])
    logs = (model(tokens, torch.arange(len(tokens)), causal) @ model.head.weight.T).log_softmax(-1)  # type: ignore[operator]
    own = [logs[t - 1, tokens[t]].item() for t in range(len(start), len(tokens))]
    return [lp - ref for lp, ref in zip(own, known, strict=True)]


@pytest.mark.parametrize("tokens", [1, 10**6])
@pytest.mark.parametrize("mean", [False, True])
def test_drift_of_kto_is_the_mean_over_the_whole_batch_of_prompts_with_other_prompts_responses(
    tokens: int, mean: bool
) -> None:
    source = from_rows(change(PREFERENCES["kto"], {"length_normalised": mean}), tokens)
    by_hand = {  # by row: its prompt with the responses of the next row that asks something else
        0: [("1+1=", "d"), ("1+1=", "e")],
        1: [("1+1=", "d"), ("1+1=", "e")],
        2: [("abc", "42"), ("abc", "no"), ("abc", "42")],
        3: [("7*6=", "2"), ("7*6=", "3")],
    }
    assert source.reference is not None
    ratios = []
    for place, pairs in by_hand.items():
        known = source.reference.of_mismatched(place).tolist()
        for prompt, reply in pairs:
            n = len(reply) + 1
            ratios.append(math.fsum(log_ratios(source, prompt, reply, known[:n])) / (n if mean else 1))
            known = known[n:]
        assert not known
    expected = sum(ratios) / len(ratios)
    assert expected > 0.05
    step = source.produce(1)
    for batch in step.updates[0]():
        assert abs(batch.coefficients["drift"] - expected) < 1e-12


def test_drift_is_never_below_zero_and_zero_where_all_prompts_are_equal() -> None:
    source = from_rows(PREFERENCES["kto"])
    assert source.reference is not None
    source.reference._arrays["mismatched"] += 50.0
    assert source.produce(1).updates[0]()[0].coefficients["drift"] == 0.0
    source.items.tasks = to_tasks(PAIRS[:2], convert=to_item)
    source.items._remembered.clear()
    assert mismatched(source.items, 0) == []
    assert source._drift([0, 1]) == 0.0


def test_kto_without_a_reference_measures_its_drift_on_likelihoods() -> None:
    row = change(PREFERENCES["kto"], {"score": "likelihood"})
    source = replace(from_rows(row), reference=None)
    batches = source.produce(1).updates[0]()
    assert batches[0].coefficients["drift"] == 0.0  # log-probabilities are negative
    assert math.isfinite(added(source.learner, row, batches)[0])  # type: ignore[arg-type]


def desensitised(ratios: Sequence[float], other: Sequence[float], tail: float) -> float:
    """The sum, what lies behind the length of the other one counting `tail`."""
    return math.fsum(x * (1 if place < len(other) else tail) for place, x in enumerate(ratios))


@pytest.mark.parametrize("tail", [1.0, 0.3])
def test_shift_of_bco_is_the_running_mean_of_earlier_rewards_as_they_were_compared(tail: float) -> None:
    source = from_rows(changed("bco", tail=tail))
    rewards: list[float] = []
    learner = source.learner
    assert isinstance(learner, LocalLearner)
    for number in (1, 2, 3):
        step = source.produce(number)
        batches = step.updates[0]()
        expected = sum(rewards) / len(rewards) if rewards else 0.0
        assert batches[0].coefficients["shift"] == pytest.approx(expected, abs=1e-12)
        assert source.reference is not None
        for place, row in enumerate(PAIRS):
            known = source.reference.of(place).tolist()
            texts = row.get("responses") or [row["chosen"], row["rejected"]]
            own = []
            for text in texts:
                own.append(log_ratios(source, row["prompt"], text, known[: len(text) + 1]))
                known = known[len(text) + 1 :]
            pairs = [(0, 1), (0, 2), (1, 2)] if len(own) == 3 else [(0, 1)]
            for i, j in pairs:
                rewards += [0.1 * desensitised(own[i], own[j], tail), 0.1 * desensitised(own[j], own[i], tail)]
        stats = learner.update(batches, PreferenceObjective(source.algorithm))
        source.learned(step, stats)
        again = replace(source, rewards=(0.0, 0.0))
        again.restore(source.state())
        assert again.rewards == source.rewards
    assert abs(expected) > 1e-3


@pytest.mark.parametrize("tail", [1.0, 0.3])
def test_measures_are_those_of_pairs_counted_by_hand(tail: float) -> None:
    plain, row = case(), changed(tail=tail)
    _, _, stats = through_the_library(plain, row, range(len(plain.items)), 25)
    said, won, margins, rewards, chosen, lost, kl, tokens = asked(plain), [], [], [], [], [], [], 0
    for item in said:
        for better, worse, _, _ in item.compared:
            w, v = item.responses[better], item.responses[worse]
            of = [[lp.item() - ref for lp, ref in zip(y.lp, y.ref, strict=True)] for y in (w, v)]
            rewards.append(0.1 * desensitised(of[0], of[1], tail))
            margin = rewards[-1] - 0.1 * desensitised(of[1], of[0], tail)
            margins.append(margin)
            won.append(float(margin > 0))
            chosen.append(w.likelihood.item() / w.n)
            lost.append(v.likelihood.item())
        for y in item.responses:
            tokens += y.n
            kl += [0.5 * (lp.item() - ref) ** 2 for lp, ref in zip(y.lp, y.ref, strict=True)]
    count = len(margins)
    for name, total, number in (
        ("accuracy", sum(won), count),
        ("margin", sum(margins), count),
        ("implicit_reward/chosen", sum(rewards), count),
        ("logp_per_token/chosen", sum(chosen), count),
        ("logp/rejected", sum(lost), count),
        ("kl/data", sum(kl), tokens),
    ):
        assert stats[name] == pytest.approx((total, number), abs=1e-10), name
    assert 0 < sum(won) < count


def test_a_step_says_how_many_tokens_it_learns_from() -> None:
    source = from_rows(PREFERENCES["dpo"])
    step: TrainingStep = source.produce(1)
    assert step.tokens == sum(
        len(text) + 1 for row in PAIRS for text in row.get("responses") or [row["chosen"], row["rejected"]]
    )


# -- optimal transport over an optimizer batch -----------------------------------------------------------------------------


@pytest.mark.parametrize("link", [name for name, link in LINKS.items() if link.of_difference])
def test_any_cost_of_a_difference_may_be_transported_as_equal_weights_pair_the_sorted(link: str) -> None:
    """With as many good as bad responses of one weight: the k-th smallest of both, whatever the cost."""
    plain = case()
    items = [replace(plain.items[0]), replace(plain.items[3], comparisons=[Comparison(0, 1)])]
    row = changed("aot-unpaired", link=link, beta=0.4)
    plain = Case(items, Reference(range(2), arrays_of([plain.reference.of(0), plain.reference.of(3)])), plain.learner)

    def sorted_pairs(asked: list[comparisons.Asked]) -> Tensor:
        good, bad = (sorted((a.responses[side].ratio for a in asked), key=lambda x: x.item()) for side in (0, 1))
        both = torch.stack(good), torch.stack(bad)
        nothing = torch.zeros(2, dtype=torch.float64)
        return row.link.compare(Pairs(*both, nothing, torch.arange(2), {})).mean()

    same(plain, row, sorted_pairs)


def test_transport_keeps_the_order_and_all_of_the_weight_and_costs_no_more_than_any_other() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        one, other = draw.normal(size=5), draw.normal(size=3)
        share, weight = draw.uniform(0.1, 1, 5), draw.uniform(0.1, 1, 3)
        pieces = monotone(one.tolist(), share.tolist(), other.tolist(), weight.tolist())
        assert [sum(p.weight for p in pieces if p.first == i) for i in range(5)] == pytest.approx(share / share.sum())
        assert [sum(p.weight for p in pieces if p.second == j) for j in range(3)] == pytest.approx(
            weight / weight.sum()
        )
        cost = sum(p.weight * math.exp(other[p.second] - one[p.first]) for p in pieces)
        for a in pieces:  # a swap of what two pieces lead to is no cheaper under a convex cost
            for b in pieces:
                moved = min(a.weight, b.weight)
                paid = math.exp(other[a.second] - one[a.first]) + math.exp(other[b.second] - one[b.first])
                swapped = math.exp(other[b.second] - one[a.first]) + math.exp(other[a.second] - one[b.first])
                assert cost + moved * (swapped - paid) >= cost - 1e-12
    assert monotone([], [], [1.0], [1.0]) == []


def test_optimizer_batch_without_a_bad_response_teaches_nothing() -> None:
    plain = case()
    items = [replace(item, comparisons=[], labels=[(1.0,)] * len(item.responses)) for item in plain.items]
    found, gradient, _ = through_the_library(replace(plain, items=items), PREFERENCES["aot-unpaired"], range(6), 25)
    assert found == 0.0 and not gradient.any()
