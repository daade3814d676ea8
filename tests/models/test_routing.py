"""Mixtures of experts: their routers' losses, the experts that sampled, and what is measured of both."""

from __future__ import annotations

import copy
import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from digit_tasks import TASKS, digits
from sampled import complete
from tiny_models import KINDS, Folders, InDouble, make, opened
from torch import Tensor
from trees import grown
from update_cases import WORDS

import posttrain
from posttrain.algorithms.policy import Algorithm
from posttrain.config.training import RL
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.protocols import Alone, World
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, Sampling, StopReason, Task, UserError
from posttrain.engines.local.backed_engine import BackedEngine
from posttrain.engines.local.engine_weights import own_copy
from posttrain.learners.data_parallel import DataParallelLearner
from posttrain.learners.local_learner import Optimization
from posttrain.learners.router_losses import RouterLosses, Routing, measured
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.hf.backed import Backed
from posttrain.models.hf.experts import find_routers, watching
from posttrain.models.hf.transformers_folder import replay_routing
from posttrain.models.losses.likelihood import token_logp
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.linear import compute_apart
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.health import Health
from posttrain.training.open_learner import policy, reference, replay_experts
from posttrain.training.sources.packing import collate, split_microbatches

pytest.importorskip("transformers")

MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next")
LOSSES = RouterLosses(balance=0.7, z=0.3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return Folders(tmp_path_factory.mktemp("mixtures"), make, vocab_size=WORDS.vocab_size)


def routers_of(model: Backed) -> list[Any]:
    assert model.routers is not None
    return [model.inner.get_submodule(router.module) for router in model.routers.found]


def weights_of(kind: str, model: Backed, logits: Tensor, experts: Tensor) -> Tensor:
    """Of these experts [n, k], as each architecture's report has it; logits [n, E]."""
    if kind == "gpt_oss":  # a softmax over those that are chosen
        return logits.gather(1, experts).softmax(-1)
    shares = logits.sigmoid() if kind == "deepseek_v3" else logits.softmax(-1)
    chosen = shares.gather(1, experts)
    config = model.inner.config
    if getattr(config, "norm_topk_prob", True):
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen * getattr(config, "routed_scaling_factor", 1.0)


@contextmanager
def experts_set(kind: str, model: Backed, experts: Tensor) -> Iterator[None]:
    """Within it the model's own forward takes these, [L, M, k]."""

    def instead(layer: int) -> Callable[..., Any]:
        def hook(module: Any, arguments: Any, found: Any) -> Any:
            logits, chosen = found[0], experts[:, layer]
            return logits, weights_of(kind, model, logits, chosen).to(found[1].dtype), chosen

        return hook

    hooks = [router.register_forward_hook(instead(layer)) for layer, router in enumerate(routers_of(model))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def told(transcripts: list[Transcript], model: Backed, seed: int = 0) -> None:
    """Let every token have drawn experts, those of a shared beginning the same."""
    assert model.routers is not None
    draw, known = np.random.default_rng(seed), dict[tuple[int, ...], Any]()
    for transcript in transcripts:
        rows = []
        for end in range(1, len(transcript) + 1):
            key = tuple(transcript.tokens[:end])
            if key not in known:
                drawn = [
                    draw.permutation(model.routers.experts)[: model.routers.taken] for _ in range(len(model.routers))
                ]
                known[key] = np.array(drawn, dtype=np.int16)
            rows.append(known[key])
        transcript.spans[:] = [
            replace(s, experts=np.stack(rows[s.start : s.start + s.length])) for s in transcript.spans
        ]


def micro_batches(transcripts: list[Transcript], budget: int) -> list[Batch]:
    one = torch.ones(len(transcripts), dtype=torch.float64)
    return [
        collate([[transcripts[i]] for i in index], index, weight=one)
        for index in split_microbatches([[t] for t in transcripts], budget)
    ]


# -- replay ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MIXTURES)
def test_tokens_take_the_experts_they_are_given_with_the_models_own_weights_and_gradients(
    kind: str, folders: Callable[[str], Path]
) -> None:
    model = opened(folders(kind), torch.float64)
    assert model.way == KINDS[kind][0]
    transcripts = grown(3, 2, 3)
    told(transcripts, model)
    replay_routing(model)
    with InDouble():
        attention = model.inner.config._attn_implementation
        model.attend("eager")
        expected = []
        for transcript in transcripts:
            tokens = torch.tensor([transcript.tokens])
            experts = torch.from_numpy(np.concatenate([s.experts for s in transcript.spans])).long()  # type: ignore[misc]
            with experts_set(kind, model, experts):
                logs = model.inner(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
            expected.append(logs[transcript.scored - 1, tokens[0, transcript.scored]])
        model.attend(attention)
        parameters = list(model.parameters())
        wanted = torch.autograd.grad(sum(x.sum() for x in expected), parameters, allow_unused=True)
        found: dict[int, Tensor] = {}
        total = torch.zeros((), dtype=torch.float64)
        for batch in micro_batches(transcripts, 30):
            logp = token_logp(model.hidden(batch.layout, batch.at), model.head, batch.target)
            total = total + logp.sum()
            found.update({place: logp[batch.rollout == place] for place in batch.rollout.unique().tolist()})
        for place, logp in found.items():
            assert (logp - expected[place]).abs().max() < 1e-9
        for own, other in zip(torch.autograd.grad(total, parameters, allow_unused=True), wanted, strict=True):
            own, other = (torch.zeros(1) if x is None else x for x in (own, other))
            assert (own - other).abs().max() < 1e-9 * max(1.0, other.abs().max().item())


def rolled_out(model: Backed) -> list[Transcript]:
    """Two turns of each episode, by the engine, with what it recorded."""
    prompts = [[5, 6, 7], [5, 6, 7], [9, 4, 3, 8, 11], [20] * 12, [13, 2, 30, 31, 9]]
    sampling = [Sampling(max_tokens=3 + 2 * n, seed=n) for n in range(len(prompts))]
    transcripts = [Transcript() for _ in prompts]
    for transcript, prompt in zip(transcripts, prompts, strict=True):
        transcript.observe(prompt)
    for turn in range(2):
        engine = BackedEngine(model, WORDS, slots=4)
        done = complete(engine, [list(t.tokens) for t in transcripts], sampling)
        for id, transcript in enumerate(transcripts):
            transcript.sample(done[id])
            if not turn:
                transcript.observe([17, 18])
    return transcripts


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_that_sampled_are_recorded_and_taken_when_the_router_has_moved(
    kind: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.engines.local.backed_engine.PREFILL", 12)
    model = opened(folders(kind))
    assert all(s.experts is None for t in rolled_out(model) for s in t.spans), "nobody asked for them"
    replay_routing(model)
    transcripts = rolled_out(model)
    batches = micro_batches(transcripts, 40)

    def scored(forced: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        model.replays = forced
        with torch.no_grad(), watching(model) as routed:
            logs = [token_logp(model.hidden(b.layout, b.at), model.head, b.target) for b in batches]
        return logs, routed.taken, routed.own

    recorded = [b.layout.experts[b.at] for b in batches if b.layout.experts is not None]
    assert len(recorded) == len(batches) and all(int(x.min()) >= 0 for x in recorded)
    logs, taken, own = scored(True)
    for batch, logp, one, free in zip(batches, logs, taken, own, strict=True):
        assert batch.sampler_logp is not None and torch.allclose(logp, batch.sampler_logp, atol=2e-3)
        assert torch.equal(one.sort(-1).values, free.sort(-1).values)
    with torch.no_grad():
        for router in routers_of(model):
            router.weight.add_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)))
    _, taken, own = scored(True)
    assert all(torch.equal(a, b.long()) for a, b in zip(taken, recorded, strict=True))
    assert any(not torch.equal(a.sort(-1).values, b.sort(-1).values) for a, b in zip(taken, own, strict=True))
    _, taken, own = scored(False)
    assert all(torch.equal(a, b) for a, b in zip(taken, own, strict=True))


def test_experts_of_tokens_that_no_engine_saw_are_the_routers_own(folders: Callable[[str], Path]) -> None:
    model = opened(folders("qwen3_moe"))
    transcript = grown(0, 1, 1)[0]
    [batch] = micro_batches([transcript], 40)
    replay_routing(model)
    unknown = replace(batch.layout, experts=torch.full((batch.layout.tokens.numel(), 2, 2), -1, dtype=torch.int16))
    with torch.no_grad():
        assert torch.equal(model.hidden(unknown, batch.at), model.hidden(batch.layout, batch.at))


def test_a_copy_routes_by_its_own_weights(folders: Callable[[str], Path]) -> None:
    model = opened(folders("mixtral"))
    copy: Any = own_copy(model)
    [batch] = micro_batches([grown(0, 1, 1)[0]], 40)
    with torch.no_grad():
        for router in routers_of(copy):
            router.weight.neg_()
        found = []
        for one in (model, copy):
            with watching(one, scored=True) as routed:
                one.hidden(batch.layout, batch.at)
            found.append(routed.scores[0])
    assert torch.allclose(found[0][:, 0], -found[1][:, 0], atol=1e-5)


def test_what_does_not_follow_is_refused_in_one_line(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no router was found in Gemma2ForCausalLM: leave it out"):
        replay_routing(opened(make("gemma2", folders("mixtral").parent / "gemma2", vocab_size=WORDS.vocab_size)))
    model = opened(folders("qwen3_moe"))
    for router in routers_of(model):  # one that does not care what its top-k call says
        forward = router.forward
        router.forward = lambda x, forward=forward: (forward(x)[0], *(y[:, :1].expand(-1, 2) for y in forward(x)[1:]))
    with pytest.raises(UserError, match="Qwen3MoeForCausalLM does not follow the experts that it is given"):
        replay_routing(model)
    assert not model.replays
    assert find_routers(torch.nn.Linear(2, 2), lambda: None) is None


# -- losses of routers -------------------------------------------------------------------------------------------------


class Threads:
    """See `posttrain.core.protocols.World`: each process is a thread of this one."""

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.said = size, 0, [None] * size
        self.barrier = threading.Barrier(size)

    def of(self, rank: int) -> Threads:
        one = Threads.__new__(Threads)
        one.__dict__.update(self.__dict__, rank=rank)
        return one

    def gather(self, x: Any) -> list[Any]:
        self.said[self.rank] = x
        self.barrier.wait(20)
        found = list(self.said)
        self.barrier.wait(20)
        return found

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.gather(x)).sum(0)

    def apart(self) -> Threads:
        return self

    def fail(self, error: BaseException) -> None:
        self.barrier.abort()


class Nothing:
    """A loss of 0: what is left are the routers' terms."""

    wants: frozenset[str] = frozenset()

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        return outputs.logp.sum() * 0


class Likelihood(Nothing):
    """A loss with a gradient into everything."""

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        return -outputs.logp.sum()


class Gradients(DataParallelLearner):
    """Keeps the gradients of an update, and makes none."""

    found: list[Tensor]

    def _clip(self) -> dict[str, float]:
        self.found = [torch.zeros(1) if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return {"policy": math.inf}


def gradients(model: Backed, batches: list[Batch], world: World | None = None) -> tuple[list[Tensor], dict[str, float]]:
    learner = Gradients(model, Optimization(), router_losses=LOSSES, world=world or Alone())
    with InDouble():
        stats = learner.update(batches, Nothing())
    return learner.found, stats.means()


def by_hand(kind: str, model: Backed, transcripts: list[Transcript]) -> tuple[list[Tensor], float]:
    """Gradients of the terms, and their sum, from each transcript's own forward: one loop over scored tokens."""
    logits: dict[int, list[Tensor]] = {}
    chosen: dict[int, list[Tensor]] = {}
    for transcript in transcripts:
        seen = []
        hooks = [r.register_forward_hook(lambda m, a, found: seen.append(found)) for r in routers_of(model)]
        model.inner(input_ids=torch.tensor([transcript.tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        for layer, (scores, _, experts) in enumerate(seen):
            for place in transcript.scored - 1:
                logits.setdefault(layer, []).append(scores[place])
                chosen.setdefault(layer, []).append(experts[place])
    total = torch.zeros((), dtype=torch.float64)
    for layer, rows in logits.items():
        x = torch.stack(rows)
        p = x.sigmoid() / x.sigmoid().sum(-1, keepdim=True) if kind == "deepseek_v3" else x.softmax(-1)
        f = torch.bincount(torch.cat(chosen[layer]), minlength=4).double()
        f = f / f.sum()
        balance, z = 4 * (f * p.mean(0)).sum(), x.exp().sum(-1).log().square().mean()
        total = total + (LOSSES.balance * balance + LOSSES.z * z) / len(logits)
    found = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return [torch.zeros(1) if g is None else g for g in found], total.item()


def same(own: list[Tensor], other: list[Tensor]) -> None:
    largest = max(x.abs().max().item() for x in other)
    assert largest > 1e-3
    for a, b in zip(own, other, strict=True):
        assert (a - b).abs().max() < 1e-9 * largest


@pytest.mark.parametrize("kind", MIXTURES)
def test_gradient_of_the_routers_losses_is_that_of_the_whole_batch_however_it_is_cut_and_dealt(
    kind: str, folders: Callable[[str], Path]
) -> None:
    model = opened(folders(kind), torch.float64)
    transcripts = [t for t in grown(5, 2, 3) if t.n_scored]
    transcripts.append(copy.deepcopy(transcripts[0]))  # tokens count as often as they are scored
    with InDouble():
        attention = model.inner.config._attn_implementation
        model.attend("eager")
        expected, loss = by_hand(kind, model, transcripts)
        model.attend(attention)
    means = []
    for budget in (1000, 8, 1):
        batches = micro_batches(transcripts, budget)
        assert (len(batches) == 1) == (budget == 1000)
        found, measures = gradients(model, batches)
        same(found, expected)
        means.append(measures)
        assert measures["loss"] == pytest.approx(loss, rel=1e-9)
    assert means[0] == pytest.approx(means[1], rel=1e-9) and means[0] == pytest.approx(means[2], rel=1e-9)
    world, batches = Threads(2), micro_batches(transcripts, 1)
    answers: dict[int, Any] = {}
    models = [opened(folders(kind), torch.float64) for _ in range(2)]

    def each(rank: int) -> None:
        compute_apart()
        try:
            answers[rank] = gradients(models[rank], batches, world.of(rank))
        except BaseException as error:
            world.fail(error)
            raise

    threads = [threading.Thread(target=each, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        same(answers[rank][0], expected)
        assert answers[rank][1] == pytest.approx(means[0], rel=1e-9)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_layers_that_are_computed_twice_route_as_they_did(kind: str, folders: Callable[[str], Path]) -> None:
    model = opened(folders(kind), torch.float64)
    transcripts = [t for t in grown(5, 2, 3) if t.n_scored]
    told(transcripts, model)
    replay_routing(model)
    batches, found = micro_batches(transcripts, 8), []
    for room in (math.inf, 0.0):
        model.activation_room = room
        learner = Gradients(model, Optimization(), router_losses=LOSSES)
        stats = learner.update(batches, Likelihood())
        found.append((learner.found, stats.means()))
    same(found[1][0], found[0][0])
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-9)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_load_of_replayed_experts_is_known_without_a_pass(
    kind: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(folders(kind), torch.float64)
    transcripts = [t for t in grown(5, 2, 3) if t.n_scored]
    told(transcripts, model)
    replay_routing(model)
    passes, hidden = [], Backed.hidden
    monkeypatch.setattr(Backed, "hidden", lambda *a: (passes.append(1), hidden(*a))[1])
    found = []
    for budget in (1000, 1):
        batches = micro_batches(transcripts, budget)
        passes.clear()
        found.append(gradients(model, batches))
        assert len(passes) == len(batches)
    same(found[1][0], found[0][0])
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-9) and found[0][1]["routing/moved"] > 0.1


# -- what is measured --------------------------------------------------------------------------------------------------


def test_measures_of_a_load_are_those_of_closed_form() -> None:
    equal = torch.full((2, 8), 1 / 8, dtype=torch.float64)
    assert measured(equal, 2) == pytest.approx({"entropy": 1.0, "busiest": 0.25, "dead": 0.0})
    two = torch.tensor([[0.5, 0.5, 0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    assert measured(two, 2) == pytest.approx({"entropy": 0.0, "busiest": 1.0, "dead": 0.75})
    four = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0, 0, 0, 0]], dtype=torch.float64)
    assert measured(torch.cat([two, four]), 2) == pytest.approx({"entropy": 0.25, "busiest": 1.0, "dead": 0.625})
    assert measured(torch.full((1, 2), 0.5), 2)["entropy"] == 1.0


def test_moved_choices_are_a_share_of_all_choices() -> None:
    told: Any = SimpleNamespace(
        moved=3.0, chosen=12, counts=torch.tensor([[4.0, 8.0]]), sums={"balance": 0.0, "z": 0.0}, world=Alone(),
        model=SimpleNamespace(replays=True), losses=None, _share=Routing._share, _taken=1,
    )  # fmt: skip
    stats = Stats()
    Routing.measure(told, stats)
    assert stats["routing/moved"] == (0.25, 1.0) and stats["routing/busiest"] == (pytest.approx(2 / 3), 1.0)


def test_collapse_of_the_routers_is_found_and_an_unequal_load_is_not() -> None:
    def found(entropy: Callable[[int], float]) -> list[str]:
        rows = [{"step": n, "routing/entropy": entropy(n), "routing/busiest": 0.9} for n in range(1, 60)]
        return [finding.name for finding in Health.replay(rows).findings]

    assert found(lambda n: 0.9 * 0.97**n) == ["routing"]
    assert found(lambda n: 0.5 + 0.01 * (n % 3)) == []


# -- a run -------------------------------------------------------------------------------------------------------------


def test_run_that_replays_goes_on_exactly_and_samples_alike_elsewhere(tmp_path: Path, tokenizer: Tokenizer) -> None:
    start = make("qwen3_moe", tmp_path / "start", vocab_size=tokenizer.vocab_size)
    tokenizer.save(start)
    how: dict[str, Any] = dict(
        model=str(start), prompts=3, group=4, max_tokens=5, lr=5e-3, threads=1, env_workers=0, save_every=2, quiet=True,
        minibatches=2, routing_replay=True, router_balance=0.01, router_z=1e-3, async_steps=1,
    )  # fmt: skip
    whole = posttrain.rl(TASKS, digits, steps=4, out=str(tmp_path / "whole"), **how).metrics
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-000004")
    rest = posttrain.rl(TASKS, digits, out=str(tmp_path / "parts"), resume=True, steps=4, **how).metrics
    assert rest == whole
    steps = [row for row in whole if row["step"] > 0]
    assert all(0 < row["routing/entropy"] <= 1 and row["routing/balance"] > 0.9 for row in steps)
    assert any(row["routing/moved"] > 0 for row in steps)
    apart = posttrain.rl(TASKS, digits, steps=2, out=str(tmp_path / "apart"), **how, replicas=1).metrics
    for row, other in zip(whole, apart, strict=False):
        assert other["routing/moved"] == pytest.approx(row["routing/moved"], abs=1e-3)
        assert other["reward"] == pytest.approx(row["reward"], abs=1e-6)


@pytest.mark.parametrize("lora", [None, 2])
def test_policy_replays_and_its_reference_routes_by_itself(lora: int | None, folders: Callable[[str], Path]) -> None:
    config = RL(model=str(folders("qwen3_moe")), routing_replay=True, lora=lora, engine="local")
    model: Any = policy(config, folders("qwen3_moe"), torch.device("cpu"), Alone())
    replay_experts(config, model)
    others: Any = reference(config, model, folders("qwen3_moe"), Alone())
    transcripts = [t for t in grown(5, 2, 3) if t.n_scored]
    told(transcripts, model)
    for batch in micro_batches(transcripts, 30):
        assert batch.layout.experts is not None
        for one, forced in ((model, True), (others, False)):
            with torch.no_grad(), watching(one) as routed:
                one.hidden(batch.layout, batch.at)
            assert torch.equal(routed.taken[0], batch.layout.experts[batch.at].long()) == forced
            assert torch.equal(routed.taken[0], routed.own[0]) != forced


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"routing_replay": True}, "--routing-replay requires a mixture-of-experts model"),
        ({"router_balance": 0.01}, "--router-balance and --router-z need a mixture of experts"),
        ({"router_z": 0.01, "algorithm": "trpo"}, "leave out --router-balance and --router-z"),
    ],
)
def test_options_of_mixtures_are_refused_of_other_models(
    options: dict[str, Any], message: str, tmp_path: Path, tokenizer: Tokenizer, model: Decoder
) -> None:
    save_model(model, tmp_path / "start", tokenizer)
    with pytest.raises(UserError, match=message):
        posttrain.rl(
            TASKS, digits, str(tmp_path / "start"), out=str(tmp_path / "out"), env_workers=0, quiet=True, **options
        )


def test_experts_of_a_second_turn_do_not_change_those_of_the_first() -> None:
    def routes(count: int, expert: int) -> Any:
        return np.full((count, 1, 1), expert, np.int16)

    def said(count: int, before: int, expert: int) -> Completion:
        experts = routes(count, expert)
        experts[-1] = -1
        return Completion(
            0, [5] * count, [-1.0] * count, "", StopReason.EOS, 0, experts, prompt_experts=routes(before, expert)
        )

    transcript = Transcript()
    transcript.observe([1, 2])
    transcript.sample(said(3, 2, 4))
    transcript.observe([3])
    transcript.sample(said(2, 6, 7))
    told = np.concatenate([s.experts for s in transcript.spans])[:, 0, 0]  # type: ignore[misc]
    assert told.tolist() == [4, 4, 4, 4, 7, 7, 7, -1]
    again = Transcript.from_dict(json.loads(json.dumps(transcript.as_dict())))
    assert np.array_equal(np.concatenate([s.experts for s in again.spans])[:, 0, 0], told)  # type: ignore[misc]


@pytest.mark.parametrize("algorithm", ["dr-grpo", "dapo", "gspo", "lite-ppo"])
@pytest.mark.parametrize("equal", ["some", "every"])
def test_routers_losses_are_of_all_rollouts_of_the_batch_those_without_an_advantage_too(
    algorithm: str, equal: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = make("qwen3_moe", tmp_path / "start", vocab_size=tokenizer.vocab_size)
    tokenizer.save(start)

    def coarse(task: Task, reply: str) -> float:
        return len(reply.encode()) / 20 if equal == "some" and task["prompt"] < "2" else 1.0

    how: dict[str, Any] = dict(
        model=str(start), algorithm=algorithm, prompts=4, group=4, max_tokens=5, threads=1, env_workers=0, quiet=True,
        steps=1, router_balance=0.01, router_z=1e-3,
        **({"dynamic_sampling": 0, "overlong_filter": False} if algorithm == "dapo" else {}),
    )  # fmt: skip
    found = []
    for every in (False, True):
        with monkeypatch.context() as patch:
            if every:
                patch.setattr(Algorithm, "moves_every_token", property(lambda self: True))
            out = tmp_path / f"every-{every}"
            row = posttrain.rl(TASKS, coarse, out=str(out), **how).metrics[-1]
            found.append({name: row.get(name) for name in ("routing/balance", "routing/z", "grad_norm")})
    assert found[0] == found[1] and found[0]["routing/balance"] > 1.0 and found[0]["grad_norm"] > 0


def test_routers_stand_still_with_the_policy_while_a_critic_warms_up(tmp_path: Path, tokenizer: Tokenizer) -> None:
    start = make("qwen3_moe", tmp_path / "start", vocab_size=tokenizer.vocab_size)
    tokenizer.save(start)
    run = posttrain.rl(
        TASKS, digits, model=str(start), algorithm="ppo", critic_warmup=1, prompts=2, max_tokens=4, threads=1, steps=2,
        env_workers=0, quiet=True, router_balance=0.1, save_every=1, minibatches=1, out=str(tmp_path / "run"),
    )  # fmt: skip
    before, after = (load_model(folder).state_dict() for folder in (start, tmp_path / "run/checkpoints/step-000001"))
    assert run.metrics[-2]["routing/balance"] > 1.0 and all(torch.equal(before[name], after[name]) for name in before)
