"""Rows of reward models: loss and gradient are those of loops written from the papers, however a step is cut or ordered."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import tiny
from layouts import segments
from processes import in_processes
from reward_rows import GRADED, LABELLED, PAIRS, SEVERAL
from torch import Tensor
from update_cases import WORDS, gathered

from posttrain.algorithms.comparison_weights import PerPrompt
from posttrain.algorithms.links import Pairs
from posttrain.algorithms.reward_model_table import (
    REWARD_MODELS,
    RewardModelAlgorithm,
    RewardModelObjective,
    ScorePenalty,
)
from posttrain.algorithms.settings import change
from posttrain.core.batch import Preferences, Stats
from posttrain.core.protocols import Alone, World
from posttrain.core.rollouts import PreferenceExample
from posttrain.data.preference_examples import to_item
from posttrain.data.tasks import to_tasks
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.learners.process_group import Processes
from posttrain.models.reward_model import RewardModel, ScoreShape
from posttrain.training.sources.length_filter import TooLong
from posttrain.training.sources.packing import Read
from posttrain.training.sources.preferences import PreferenceExamples
from posttrain.training.sources.reward_examples import RewardExamples

Score = Callable[[str, Any], list[Tensor]]
"""Prompt and response (or its steps) -> a score for each reading of it."""

COMPARED = [*PAIRS, *SEVERAL]


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def comparisons(row: Mapping[str, Any]) -> list[tuple[Any, Any, float, float]]:
    """(better text, worse text, share, margin), by the rules of the forms."""
    if "chosen" in row:
        margin = row.get("margin", row.get("score_chosen", 0.0) - row.get("score_rejected", 0.0))
        return [(row["chosen"], row["rejected"], 1.0, margin)]
    texts = row["responses"]
    if "preferred" in row:
        return [
            (texts[j], texts[i], 1.0, 0.0) for (i, j), p in zip(row["pairs"], row["preferred"], strict=True) if p == 2
        ]
    if "comparisons" in row:
        usual = [None, None, 1.0, 0.0]
        filled = [[*given, *usual[len(given) :]] for given in row["comparisons"]]
        return [(texts[b], texts[w], share, margin) for b, w, share, margin in filled]
    found = []
    for i in range(len(texts)):
        for j in range(len(texts)):
            if "ranks" in row and row["ranks"][i] < row["ranks"][j]:
                found.append((texts[i], texts[j], 1.0, 0.0))
            if "scores" in row and row["scores"][i] > row["scores"][j]:
                found.append((texts[i], texts[j], 1.0, row["scores"][i] - row["scores"][j]))
    return found


def labels(row: Mapping[str, Any]) -> tuple[Any, list[float]]:
    if "steps" in row:
        given = row.get("labels")
        if given is None:
            first = row["mistake_index"]
            given = [1.0] * len(row["steps"]) if first is None else [1.0] * first + [0.0]
        return row["steps"][: len(given)], [float(x) for x in given]
    return row["response"], [float(row["label"] if "label" in row else row["score"])]


def bradley_terry(
    rows: Sequence[Mapping[str, Any]], score: Score, link: Callable[[Tensor, Tensor, float], Tensor]
) -> Tensor:
    """Every comparison weighs its share of all of them."""
    losses, shares = [], []
    for row in rows:
        for better, worse, share, margin in comparisons(row):
            losses.append(share * link(score(row["prompt"], better)[0], score(row["prompt"], worse)[0], margin))
            shares.append(share)
    return torch.stack(losses).sum() / sum(shares)


def k_wise(rows: Sequence[Mapping[str, Any]], score: Score) -> Tensor:
    """InstructGPT, eq. 1: every prompt is one element, its comparisons averaged."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        inside, shares = torch.zeros((), dtype=torch.float64), 0.0
        for better, worse, share, _ in comparisons(row):
            inside = inside - share * sigma(score(row["prompt"], better)[0] - score(row["prompt"], worse)[0]).log()
            shares += share
        total = total + inside / shares
    return total / len(rows)


def plackett_luce(rows: Sequence[Mapping[str, Any]], score: Score) -> Tensor:
    """Each choice of a best one: minus log of its share among itself and those it beats; a prompt's choices averaged."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        beats: dict[str, list[tuple[str, float]]] = {}
        for better, worse, share, _ in comparisons(row):
            beats.setdefault(better, []).append((worse, share))
        inside, shares = torch.zeros((), dtype=torch.float64), 0.0
        for better, beaten in beats.items():
            own = score(row["prompt"], better)[0].exp()
            rest = sum((score(row["prompt"], worse)[0].exp() for worse, _ in beaten), torch.zeros(()))
            share = sum(share for _, share in beaten) / len(beaten)
            inside = inside - share * (own / (own + rest)).log()
            shares += share
        total = total + inside / shares
    return total / len(rows)


def pointwise(rows: Sequence[Mapping[str, Any]], score: Score, loss: Callable[[Tensor, float], Tensor]) -> Tensor:
    found = []
    for row in rows:
        said, given = labels(row)
        found += [loss(s, y) for s, y in zip(score(row["prompt"], said), given, strict=True)]
    return torch.stack(found).mean()


def entropy(s: Tensor, y: float) -> Tensor:
    return -y * sigma(s).log() - (1 - y) * (1 - sigma(s)).log()


def won(better: Tensor, worse: Tensor, margin: float) -> Tensor:
    return -sigma(better - worse - margin).log()


def penalised(better: Tensor, worse: Tensor, margin: float) -> Tensor:
    zero = torch.zeros_like(better)
    sign = torch.maximum(-better, zero) + torch.maximum(worse, zero)
    return won(better, worse, 0.5 + margin) + 0.1 * sign + 0.01 * (better * better + worse * worse)


def smoothed(better: Tensor, worse: Tensor, margin: float) -> Tensor:
    return 0.9 * won(better, worse, margin) - 0.1 * sigma(-(better - worse - margin)).log()


BT = REWARD_MODELS["bradley-terry"]
Rows = Sequence[Mapping[str, Any]]
CASES: dict[str, tuple[RewardModelAlgorithm, Rows, Callable[[Rows, Score], Tensor]]] = {
    "bradley-terry": (BT, COMPARED, lambda rows, score: bradley_terry(rows, score, won)),
    "bradley-terry with penalties": (
        change(replace(BT, penalty=ScorePenalty()), {"margin": 0.5}),
        COMPARED,
        lambda rows, score: bradley_terry(rows, score, penalised),
    ),
    "bradley-terry smoothed": (
        change(BT, {"link.smoothing": 0.1}), PAIRS, lambda rows, score: bradley_terry(rows, score, smoothed)
    ),
    "k-wise": (REWARD_MODELS["k-wise"], COMPARED, k_wise),
    "plackett-luce": (REWARD_MODELS["plackett-luce"], COMPARED, plackett_luce),
    "outcome": (REWARD_MODELS["outcome"], LABELLED, lambda rows, score: pointwise(rows, score, entropy)),
    "regression": (
        REWARD_MODELS["regression"], GRADED, lambda rows, score: pointwise(rows, score, lambda s, y: (s - y) ** 2)
    ),
}  # fmt: skip
SHAPES = [ScoreShape(), ScoreShape("mean", "mlp")]


def new_model(shape: ScoreShape, seed: int = 3) -> RewardModel:
    model = RewardModel(tiny(WORDS, seed), shape, seed)
    return model.double()


def source(row: RewardModelAlgorithm, rows: Rows, shape: ScoreShape, tokens: int = 10**6) -> RewardExamples:
    tasks = to_tasks([dict(r, id=str(i)) for i, r in enumerate(rows)], convert=to_item)
    assert WORDS.eos_id is not None
    items = PreferenceExamples(tasks, WORDS, (WORDS.eos_id,), WORDS.vocab_size, TooLong("refuse", 64, print))
    read: Read = "each" if shape.pooling == "mean" else "last"
    return RewardExamples(items, row, 4, tokens, 0, torch.device("cpu"), read)


def all_items(made: RewardExamples) -> list[PreferenceExample]:
    found = [item for item in made.items if item is not None]
    assert len(found) == len(made.items)
    return found


def alone(model: RewardModel) -> Score:
    """Every text through the model by itself, padded with nothing and packed with nobody."""

    def score(prompt: str, said: Any) -> list[Tensor]:
        steps = (
            [WORDS.encode(s + "\n") for s in said] if isinstance(said, list) else [[*WORDS.encode(said), WORDS.eos_id]]
        )
        tokens, ends = WORDS.encode(prompt, start=True), []
        first = len(tokens)
        for step in steps:
            tokens = [*tokens, *step]
            ends.append(len(tokens) - 1)
        layout = replace(segments((len(tokens), -1)), tokens=torch.tensor(tokens), position=torch.arange(len(tokens)))
        hidden = model.backbone.hidden(layout, torch.arange(len(tokens)))
        if model.inner is not None:
            hidden = torch.tanh(hidden @ model.inner.T)
        each = hidden @ model.score[0]
        return [each[first:].mean()] if model.shape.pooling == "mean" else [each[end] for end in ends]

    return score


def learned(
    row: RewardModelAlgorithm,
    rows: Rows,
    shape: ScoreShape,
    order: Sequence[int] | None = None,
    tokens: int = 10**6,
    world: World | None = None,
) -> tuple[float, Tensor]:
    """Loss and gradient as a run has them: through source, packing, objective and learner."""
    model, made = new_model(shape), source(row, rows, shape, tokens)
    learner = LocalLearner(model, Optimization(lr=1e-9, max_grad_norm=0), world=world)
    items = all_items(made)
    batches = [batch for _, batch in made.batches([items[i] for i in order or range(len(items))])]
    own = batches if world is None or world.size == 1 else batches[world.rank :: world.size]
    objective = RewardModelObjective(row, mean=shape.pooling == "mean")
    kept: list[Tensor] = []
    step = learner.optimizer.step
    learner.optimizer.step = lambda *a, **k: (kept.append(gathered(learner)), step())[1]  # type: ignore[method-assign]
    stats = learner.update(own, objective)
    return stats["loss"][0], kept[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_a_loop_written_from_the_paper(name: str, shape: ScoreShape) -> None:
    row, rows, transcribed = CASES[name]
    if shape.pooling == "mean":
        rows = [r for r in rows if "steps" not in r]
    model = new_model(shape)
    expected = transcribed(rows, alone(model))
    expected.backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    loss, found = learned(row, rows, shape)
    assert loss == pytest.approx(expected.item(), abs=1e-12)
    assert gradient.abs().max() > 1e-3 and (found - gradient).abs().max() < 1e-12 * max(1, gradient.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_any_cut_into_micro_batches_and_any_order_give_the_same_gradient(name: str) -> None:
    row, rows, _ = CASES[name]
    loss, gradient = learned(row, rows, ScoreShape())
    drawn = random.Random(name)
    for tokens in (1, 5, 9):
        order = drawn.sample(range(len(rows)), len(rows))
        made = source(row, rows, ScoreShape(), tokens)
        assert tokens > 1 or len(made.batches(all_items(made))) == len(rows)
        other, found = learned(row, rows, ScoreShape(), order, tokens)
        assert other == pytest.approx(loss, abs=1e-12)
        assert (found - gradient).abs().max() < 1e-12 * max(1, gradient.abs().max())


def one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        found = {
            name: learned(row, rows, ScoreShape(), None, 17, Processes())[1] for name, (row, rows, _) in CASES.items()
        }
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_two_processes_give_the_gradient_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    in_processes(one_of_two, (str(tmp_path),), 2)
    both = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for name, (row, rows, _) in CASES.items():
        _, gradient = learned(row, rows, ScoreShape(), None, 17, Alone())
        for found in both:
            assert (found[name] - gradient).abs().max() < 1e-12 * max(1, gradient.abs().max()), name


def test_a_prompt_that_responses_share_is_laid_once() -> None:
    made = source(REWARD_MODELS["k-wise"], SEVERAL, ScoreShape())
    [(places, batch)] = made.batches(all_items(made))
    assert sorted(places) == list(range(len(SEVERAL)))
    prompts = {r["prompt"] for r in SEVERAL}
    replies = {(r["prompt"], text) for r in SEVERAL for text in r["responses"]}
    tokens = sum(len(WORDS.encode(p, start=True)) for p in prompts) + sum(len(WORDS.encode(t)) + 1 for _, t in replies)
    assert len(batch.layout.tokens) == tokens


def test_weights_of_prompts_do_not_depend_on_how_much_was_compared() -> None:
    """Of a ranking of four, one of two and a tie alone, the first two weigh the same; the last does not exist."""
    rows = [SEVERAL[0], SEVERAL[3]]
    made = source(REWARD_MODELS["k-wise"], rows, ScoreShape())
    [(_, batch)] = made.batches(all_items(made))
    assert batch.preferences is not None
    weights = sorted(batch.preferences.weight.tolist())
    assert weights == pytest.approx([0.1] * 5 + [0.5]) and isinstance(made.algorithm.denominator, PerPrompt)
    tie = {"prompt": "t", "responses": ["b", "q"], "pairs": [[0, 1]], "preferred": [0]}
    assert to_item(tie) is None


def test_plackett_luce_of_a_ranking_is_the_likelihood_of_its_order() -> None:
    row = {"prompt": "a", "responses": ["b", "cc", "d d"], "ranks": [2, 3, 1]}
    model = new_model(ScoreShape())
    b, cc, dd = (alone(model)("a", text)[0].item() for text in row["responses"])
    first = math.exp(dd) / (math.exp(dd) + math.exp(b) + math.exp(cc))
    second = math.exp(b) / (math.exp(b) + math.exp(cc))
    loss, _ = learned(REWARD_MODELS["plackett-luce"], [row], ScoreShape())
    assert loss == pytest.approx(-(math.log(first) + math.log(second)) / 2, abs=1e-12)


def test_plackett_luce_bears_scores_of_any_size() -> None:
    link = REWARD_MODELS["plackett-luce"].link
    better = torch.tensor([900.0, -900.0, 0.0], dtype=torch.float64, requires_grad=True)
    worse = torch.tensor([-900.0, 900.0, 0.0], dtype=torch.float64)
    loss = link.compare(Pairs(better, worse, torch.zeros(3), torch.tensor([0, 1, 2]), {}))
    assert loss.tolist() == pytest.approx([0.0, 1800.0, math.log(2)])
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert better.grad is not None and better.grad.tolist() == pytest.approx([0.0, -1.0, -0.5])


def test_figures_of_a_step_are_those_of_its_scores() -> None:
    row, rows, _ = CASES["k-wise"]
    model, made = new_model(ScoreShape()), source(row, rows, ScoreShape(), 17)
    objective, stats = RewardModelObjective(row), Stats()
    learner = LocalLearner(model, Optimization())
    for _, batch in made.batches(all_items(made)):
        (outputs,) = learner.evaluate([batch], want=objective.wants)
        objective(outputs, batch, stats)
    with torch.no_grad():
        said = [(r["prompt"], c) for r in rows for c in comparisons(r)]
        score = alone(model)
        margins = [(score(p, better)[0] - score(p, worse)[0]).item() for p, (better, worse, _, _) in said]
    means = stats.means()
    assert means["accuracy"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    assert means["margin"] == pytest.approx(sum(margins) / len(margins))


def test_equal_scores_are_half_right() -> None:
    of = torch.tensor
    said = Preferences(of([0, 2]), of([1, 0]), of([0.0] * 2), of([0.5] * 2), of([], dtype=torch.int64), of([]), of([]))
    stats = Stats()
    RewardModelObjective(REWARD_MODELS["bradley-terry"]).measure(of([1.0, 1.0, 3.0], dtype=torch.float64), said, stats)
    assert stats.means() == {"score": pytest.approx(5 / 3), "accuracy": 0.75, "margin": 1.0}


def test_where_a_step_is_read_does_not_tell_whether_it_is_the_last() -> None:
    """A solution is cut behind its mistake: an end of its own would give the mistake away."""
    made = source(REWARD_MODELS["outcome"], [r for r in LABELLED if "steps" in r], ScoreShape())
    [(_, batch)] = made.batches(all_items(made))
    assert batch.target.tolist() == WORDS.encode("\n") * 8
