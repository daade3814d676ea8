"""What is played ahead was sampled by the weights that the count says, and accounted for; timing decides nothing."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny

import posttrain
from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.policy import PolicyObjective
from posttrain.algorithms.ratio import Correction
from posttrain.algorithms.settings import change
from posttrain.cli.main import main
from posttrain.config.training import RL, Distill
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.component import Need
from posttrain.core.protocols import Alone
from posttrain.core.rollouts import Branch, Piece, PlayedTurn, Rollout
from posttrain.core.seeds import seed_of
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Completion, Invalid, InvalidKind, Sampling, StopReason, ToolCall, Turn, UserError
from posttrain.data.tasks import to_tasks
from posttrain.engines.local.engine_weights import own_copy
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.local.uncached_engine import UncachedEngine
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import Player, Unwanted
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.linear import accumulates, accumulating, compute_apart
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs import checkpoint
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.record.rollout_rows import transcripts_of
from posttrain.runs.run_reading import read_metrics
from posttrain.system.worker_thread import WorkerThread
from posttrain.training.adjust import adjust
from posttrain.training.sources.async_rollouts import StepQueue
from posttrain.training.sources.collector import Collected, Collector, Size
from posttrain.training.sources.packing import collate
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.sources.rollout_state import restored, stored
from posttrain.training.sources.task_order import Uniform

SUMS = [{"id": f"{a}{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
PLAYED: dict[str, Any] = {"steps": 6, "prompts": 3, "group": 3, "max_tokens": 6, "lr": 1e-2, "env_workers": 0,
                          "threads": 1, "quiet": True, "algorithm": "grpo", "save_every": 1, "keep": 9}  # fmt: skip


def digits(task: posttrain.Task, reply: str) -> float:
    """Differs between the replies of a model that knows nothing, so that every step moves the weights."""
    return sum(c.isdigit() for c in reply) / (len(reply) + 1)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("ahead") / "start"
    save_model(tiny(tokenizer), folder, tokenizer)
    threads = torch.get_num_threads()
    yield folder
    torch.set_num_threads(threads)


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_step_is_sampled_by_the_weights_after_the_step_that_the_count_says(
    start: Path, tmp_path: Path, tokenizer: Tokenizer, ahead: int
) -> None:
    run = posttrain.rl(
        SUMS, digits, str(start), out=str(tmp_path / "run"), async_steps=ahead, settings={"minibatches": 2}, **PLAYED
    )
    for step in range(1, 7):
        before = max(0, step - 1 - ahead)
        folder = run.path / "checkpoints" / f"step-{before:06d}" if before else start
        engine = LocalEngine(load_model(folder), tokenizer)
        for place, row in enumerate(read_rollouts(run.path, step)):
            assert row["version"] == 2 * before
            transcript = transcripts_of(row)[0]
            prompt, sampled = (
                transcript.tokens[: transcript.spans[0].length],
                transcript.tokens[transcript.spans[0].length :],
            )
            seed = seed_of(0, "rollout", step, row["group"], place % 3)
            engine.submit(place, prompt, Sampling(max_tokens=6, seed=seed))
            found = finished(engine)
            assert list(found.tokens) == sampled and list(found.logp) == pytest.approx(transcript.logp, rel=1e-6)
    metrics = read_metrics(run.path)
    assert [row["staleness"] for row in metrics] == [2 * min(step, ahead) for step in range(6)]
    assert [row["staleness/max"] for row in metrics] == [2 * min(step, ahead) for step in range(6)]
    assert metrics[-1]["sampler/kl"] > 0 and metrics[-1]["sampler/ess"] < 1
    assert not [thread for thread in threading.enumerate() if thread.name == "playing"]


def finished(engine: LocalEngine) -> Completion:
    while not (done := engine.poll()):
        pass
    return done[0]


def test_the_first_steps_of_a_run_played_ahead_learn_from_the_start_alone(start: Path, tmp_path: Path) -> None:
    """Steps 1 to 1 + k are sampled by the weights that the run begins with: of step 1 nothing differs from k = 0."""
    one, other = (
        posttrain.rl(SUMS, digits, str(start), out=str(tmp_path / str(k)), async_steps=k, **{**PLAYED, "steps": 2})
        for k in (0, 3)
    )
    first, second = read_rollouts(one.path, 1), read_rollouts(other.path, 1)
    assert first == second
    gradients = [read_metrics(run.path)[0]["grad_norm"] for run in (one, other)]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-5)
    assert read_rollouts(one.path, 2) != read_rollouts(other.path, 2)


def test_what_is_learned_from_of_a_step_played_ahead_is_the_same_after_a_resumption(
    start: Path, tmp_path: Path
) -> None:
    """Some rewards are invalid, so not all that was played is learned from."""

    def broken(task: posttrain.Task, reply: str) -> Any:
        return Invalid("broken") if "5" in reply else digits(task, reply)

    def played(**how: Any) -> posttrain.Run:
        how = {**PLAYED, "steps": 4, "async_steps": 1, **how}
        return posttrain.rl(SUMS, broken, str(start), out=str(tmp_path / "run"), **how)

    path = played().path
    whole = (path / "metrics.jsonl").read_bytes()
    assert any(row["invalid"] > 0 for row in read_metrics(path)[2:])
    for step in (3, 4):
        shutil.rmtree(path / "checkpoints" / f"step-{step:06d}")
    assert "ahead" in (path / "checkpoints" / "step-000002" / "training" / "state.json").read_text()
    played(resume=True)
    assert (path / "metrics.jsonl").read_bytes() == whole


def test_no_update_reaches_weights_that_have_not_been_taken_over_yet(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sampled(out: str) -> list[Any]:
        run = posttrain.rl(SUMS, digits, str(start), out=str(tmp_path / out), async_steps=1, **{**PLAYED, "steps": 4})
        return [read_rollouts(run.path, step) for step in range(1, 5)]

    quick, load = sampled("quick"), LocalEngine.load

    def slow(self: LocalEngine, weights: Any, version: int) -> None:
        time.sleep(0.3)  # the update that is made meanwhile has ended
        load(self, weights, version)

    monkeypatch.setattr(LocalEngine, "load", slow)
    assert sampled("slow") == quick


@dataclass
class Quick(Collector):
    """Plays nothing, and fails in some steps."""

    broken: tuple[int, ...] = ()

    def collect(self, number: int, groups: Any, stats: Stats) -> Collected:
        episodes = self.episodes(number, self.size.prompts)
        if number in self.broken:
            raise UserError("broken")
        played = [Rollout(e.task, e.group, [Transcript()], 1.0) for e in episodes]
        return Collected(played, played, [], {group: self._places[group] for group in (r.group for r in played)})


@contextmanager
def stocked(
    start: Path, tokenizer: Tokenizer, broken: tuple[int, ...] = ()
) -> Iterator[tuple[StepQueue, LocalLearner]]:
    learner = LocalLearner(load_model(start), Optimization())
    with EnvPool(digits, 0) as pool:
        engine = LocalEngine(load_model(start), tokenizer, own=True)
        player = Player(pool, engine, tokenizer, Sampling(max_tokens=2), 64)
        tasks = to_tasks(SUMS)
        quick = Quick(tasks, player, Size(2, 1, 64), 0, None, broken=broken, order=Uniform(len(tasks), 0))
        stock = StepQueue(quick, None, 2, 3)
        yield stock, learner
        stock.close()


def test_copies_of_weights_are_freed_as_soon_as_the_engine_has_them(
    start: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[weakref.ref[Any]] = []

    def copied(model: Any) -> Any:
        own = own_copy(model)
        copies.append(weakref.ref(own))
        return own

    monkeypatch.setattr("posttrain.training.sources.async_rollouts.own_copy", copied)
    with stocked(start, tokenizer) as (stock, learner):
        stock.take(1, learner)
        for step in stock._steps:
            step.result()
        assert len(copies) == 1 and len(stock._steps) == 2 and copies[0]() is None


def test_no_process_computes_before_the_engines_of_all_rest(start: Path, tokenizer: Tokenizer) -> None:
    told: list[str] = []

    class Rests(LocalEngine):
        def rest(self) -> None:
            told.append("rests")

    class Meets(Alone):
        def gather(self, x: Any) -> list[Any]:
            told.append("meets")
            return [x]

    learner = LocalLearner(load_model(start), Optimization())
    with EnvPool(digits, 0) as pool:
        player = Player(pool, Rests(learner.weights(), tokenizer), tokenizer, Sampling(max_tokens=2), 64, world=Meets())
        tasks = to_tasks(SUMS)
        StepQueue(Quick(tasks, player, Size(2, 1, 64), 0, None, order=Uniform(len(tasks), 0)), None, 0, 3).take(
            1, learner
        )
    assert told[-2:] == ["rests", "meets"]


def test_a_state_is_that_behind_the_last_step_learned_from_however_far_playing_is(
    start: Path, tokenizer: Tokenizer
) -> None:
    with stocked(start, tokenizer) as (stock, learner):
        stock.take(1, learner)
        assert [step.result().number for step in stock._steps] == [2, 3], "all of them are played"
        stock.take(2, learner)
        assert stock.state()["cursor"] == 4
        state = json.loads(json.dumps(stock.state(), default=lambda made: made.plain()))
    with stocked(start, tokenizer) as (again, learner):
        again.restore(state)
        assert again.take(3, learner).after.order == {"cursor": 6}
        assert again.state() == {"cursor": 6}


def test_what_was_played_behind_a_step_that_failed_is_played_anew(start: Path, tokenizer: Tokenizer) -> None:
    with stocked(start, tokenizer, broken=(2,)) as (stock, learner):
        stock.take(1, learner)
        state = json.loads(json.dumps(stock.state(), default=lambda made: made.plain()))
    assert [row and row["number"] for row in state["ahead"]] == [None, 3] and state["cursor"] == 2
    with stocked(start, tokenizer) as (again, learner):
        again.restore(state)
        found = [again.take(number, learner).after.order["cursor"] for number in (2, 3)]
    assert found == [4, 6]


# -- replies in the middle ---------------------------------------------------------------------------------------------


def pieces_of(transcript: Transcript) -> list[tuple[int, int, int]]:
    """(first token, tokens, version) of each run that one weights sampled."""
    return [(s.start, s.length, s.version) for s in transcript.spans if s.version is not None]


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.long), 1])
def test_each_piece_of_a_reply_is_sampled_by_the_weights_of_its_step_and_groups_are_learned_from_whole(
    start: Path, tmp_path: Path, tokenizer: Tokenizer, ahead: int
) -> None:
    how = {**PLAYED, "max_tokens": 8, "steps": 7}
    run = posttrain.rl(SUMS, digits, str(start), out=str(tmp_path / "run"), async_steps=ahead, tokens_per_step=3, **how)
    learned: dict[str, int] = {}  # group -> the step that learned from it
    weights = {0: start}
    for folder in sorted((run.path / "checkpoints").iterdir(), reverse=True):
        weights.setdefault(json.loads((folder / "training" / "learner.json").read_text())["version"], folder)
    engines = {version: LocalEngine(load_model(folder), tokenizer) for version, folder in weights.items()}
    lengths = set()
    for step in range(1, 8):
        rows = read_rollouts(run.path, step) if (run.path / "rollouts" / f"step-{step:06d}.parquet").exists() else []
        assert len({row["group"] for row in rows}) * 3 == len(rows), "groups are whole"
        members: dict[str, int] = {}
        for row in rows:
            place = members[row["group"]] = members.get(row["group"], -1) + 1
            transcript = transcripts_of(row)[0]
            own = pieces_of(transcript)
            for number, (at, length, version) in enumerate(own):
                assert length == 3 or number == len(own) - 1
                engine, tried = engines[version], []
                for begin in range(1, step + 1):  # seeds are those of the step that began the group
                    seed = seed_of(0, "rollout", begin, row["group"], place)
                    seed = seed_of(seed, "behind", 3 * number) if number else seed
                    budget = min(3, 8 - 3 * number)
                    engine.submit(0, transcript.tokens[:at], Sampling(max_tokens=budget, seed=seed, begun=3 * number))
                    tried.append(list(finished(engine).tokens))
                assert transcript.tokens[at : at + length] in tried
            versions = [version for *_, version in own]
            assert versions == sorted(versions)
            assert row["group"] not in learned or learned[row["group"]] == step
            learned[row["group"]] = step
            lengths.add(len(own))
    assert lengths == {1, 2, 3}
    left = read_metrics(run.path)[-1]["unfinished"]
    drawn = json.loads((run.path / "checkpoints" / "step-000007" / "training" / "state.json").read_text())["source"]
    assert len(learned) + len(drawn.get("open", [])) == drawn["cursor"] == 21
    assert left == sum("seed" in m for group in drawn["open"] for m in group["members"]) > 0


def test_a_step_of_which_no_group_is_whole_leaves_coefficients_alone(start: Path, tmp_path: Path) -> None:
    how = {**PLAYED, "max_tokens": 8, "settings": {"entropy_target": 9.0}}
    run = posttrain.rl(SUMS, digits, str(start), out=str(tmp_path / "run"), tokens_per_step=2, **how)
    rows = read_metrics(run.path)
    held = [row["coefficient/entropy"] for row in rows]
    assert rows[0]["updates"] == 0 and held[0] == held[1], "there was nothing to measure"
    assert rows[3]["updates"] == 1 and held[4] != held[3]


@pytest.mark.parametrize("tokens", [2, 3])
def test_a_reply_in_pieces_that_fills_the_context_ends_there_and_says_so(
    start: Path, tokenizer: Tokenizer, tokens: int
) -> None:
    """Whether the last piece ends where the context does, or would go on behind it."""
    model = load_model(start)
    room, task = 5 if tokens == 2 else 6, {"id": "0"}
    length = model.config.context - room
    with EnvPool(digits, 0) as pool:
        player = Player(pool, LocalEngine(model, tokenizer), tokenizer, Sampling(max_tokens=20), model.config.context)
        played: list[Any] = [Episode({**task, "prompt": "1" * length}, "0", seed) for seed in range(12)]
        for _ in range(3):
            begun = [found for found in played if isinstance(found, Episode)]
            whole = [found for found in played if isinstance(found, Rollout)]
            played = [*whole, *player.play_on(begun, tokens)] if begun else whole
    full = [r for r in played if len(r.transcripts[0]) == model.config.context]
    assert len(full) > 2 and all(r.transcripts[0].spans[0].length == length for r in played)
    assert {r.stop for r in full} - {StopReason.EOS} == {StopReason.CONTEXT}


def test_staleness_is_a_mean_over_tokens_each_with_its_own_weights() -> None:
    first = Completion(0, [5, 6, 7], [-1.0] * 3, "", StopReason.LENGTH, 1)
    transcript = Transcript()
    transcript.observe([1, 2])
    joined = first.continued(Completion(0, [8], [-1.0], "", StopReason.EOS, 4))
    assert joined.version == 1, "that of the oldest"
    transcript.sample(joined)
    rollout, stats = Rollout({"id": "0"}, "0#0", [transcript], 1.0), Stats()
    assert rollout.version == 1
    told: Any = SimpleNamespace(learner=SimpleNamespace(version=5))
    RLSource._measure_staleness(told, [rollout], stats)
    assert stats.means() == {"staleness": (3 * 4 + 1) / 4, "staleness/max": 4}


@pytest.mark.parametrize("engine", [LocalEngine, UncachedEngine])
def test_a_stop_string_that_begins_in_one_piece_ends_the_reply_in_the_next(
    start: Path, tokenizer: Tokenizer, engine: Any
) -> None:
    sampler = engine(load_model(start), tokenizer)
    prompt = tokenizer.encode("1+2=")

    def sampled(tokens: list[int], how: Sampling) -> Completion:
        sampler.submit(0, tokens, how)
        return finished(sampler)

    for seed in range(20):
        first = sampled(prompt, Sampling(max_tokens=3, seed=seed))
        behind = [*prompt, *first.tokens]
        how = Sampling(max_tokens=5, seed=seed + 1, begun=3)
        joined = first.continued(sampled(behind, how))
        stop = joined.text[2:4]  # its end is in the second piece
        if len(joined.tokens) == 8 and stop not in first.text and stop not in joined.text[3:]:
            break
    assert joined.text == tokenizer.decode(joined.tokens) and joined.runs == ((3, 0), (5, 0))
    ended = first.continued(sampled(behind, replace(how, stop=(stop,))))
    assert (ended.stop, ended.text, list(ended.tokens)) == (StopReason.STOP, joined.text[:4], list(joined.tokens[:4]))
    assert sampled(behind, replace(how, stop=(stop,), begun=0)).stop is StopReason.LENGTH


@pytest.mark.parametrize(
    ("asked", "single", "told"),
    [
        ({"tokens_per_step": 4}, False, "an episode of several turns cannot be interrupted"),
        ({"tokens_per_step": 256}, True, "would have no effect"),
        ({"tokens_per_step": 4, "algorithm": "dapo"}, True, "cannot be replaced"),
        (
            {"tokens_per_step": 4, "algorithm": "reinforce", "settings": {"correction": "none"}},
            True,
            "which nothing corrects",
        ),
    ],
)
def test_what_cannot_be_left_in_the_middle_is_refused(asked: dict[str, Any], single: bool, told: str) -> None:
    run = RL(**{"algorithm": "grpo", **asked})
    with pytest.raises(UserError, match=told):
        adjust(find(run.algorithm), run, single)


# -- what accounts for older weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["grpo", "gspo", "cispo", "ppo"])
@pytest.mark.parametrize("lag", [{"async_steps": 1}, {"tokens_per_step": 9}])
def test_older_weights_are_corrected_for_or_the_ratio_is_to_the_policy_that_sampled(
    row: str, lag: dict[str, int]
) -> None:
    plain = adjust(find(row), RL(algorithm=row))
    assert plain.old == "start" and plain.correction is None
    corrected = adjust(find(row), RL(algorithm=row, **lag))
    assert corrected.old == "start" and corrected.correction == Correction("truncate", 2.0)
    chosen = adjust(find(row), RL(algorithm=row, **lag, settings={"correction": "icepop"}))
    assert chosen.old == "start" and chosen.correction == Correction("icepop", 2.0)
    for settings in ({"correction": "none"}, {"old_policy": "sampler"}):
        other = adjust(find(row), RL(algorithm=row, **lag, settings=settings))
        assert other.old == "sampler" and other.correction is None


@pytest.mark.parametrize(
    ("row", "settings", "told"),
    [
        ("reinforce", {"correction": "none"}, "which nothing corrects"),
        ("grpo", {"old_policy": "start"}, "which nothing corrects"),
        ("grpo", {"old_policy": "sampler", "correction": "truncate"}, "nothing to correct"),
        ("reinforce", {"old_policy": "sampler", "correction": "truncate"}, "no ratio"),
    ],
)
def test_rows_that_account_for_nothing_are_refused(row: str, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        adjust(find(row), RL(algorithm=row, async_steps=1, settings=settings))
    assert "\n" not in str(error.value)


def test_with_a_correction_rows_without_a_ratio_are_played_ahead() -> None:
    row = adjust(find("reinforce"), RL(algorithm="reinforce", async_steps=1))
    assert row.old == "start" and row.correction is not None


def micro_batch(sampler: torch.Tensor, advantage: torch.Tensor) -> Batch:
    count = len(sampler)
    transcript = Transcript()
    transcript.observe([1])
    transcript.sample(Completion(0, list(range(count)), sampler.tolist(), "", StopReason.EOS, 0))
    fields = {"advantage": [advantage]}
    return collate([[transcript]], [0], weight=torch.full((1,), 1 / count), fields=fields)


@pytest.mark.parametrize("first", [True, False])
def test_the_ratio_to_the_sampler_is_clipped_as_the_paper_says_in_every_update(first: bool) -> None:
    """PPO's clip written out: min(r A, clip(r) A), r the probability now over that of sampling."""
    torch.manual_seed(0)
    sampler, advantage = torch.randn(12).float() - 2, torch.randn(12)
    logp = (sampler.double() + 0.4 * torch.randn(12).double()).requires_grad_()
    batch = micro_batch(sampler, advantage)
    if not first:
        batch = replace(batch, old_logp=sampler + 1)  # of the step's start: not asked for
    row = change(find("grpo"), {"old_policy": "sampler", "kl": 0.0, "clip_low": 0.2, "clip_high": 0.2})
    stats = Stats()
    loss = PolicyObjective(row)(Outputs(logp), batch, stats)
    by_hand = 0.0
    for now, then, a in zip(logp.tolist(), sampler.double().tolist(), advantage.tolist(), strict=True):
        ratio = torch.tensor(now - then).double().exp().item()
        by_hand -= min(ratio * a, min(max(ratio, 0.8), 1.2) * a) / 12
    assert loss.item() == pytest.approx(by_hand, rel=1e-6)
    gap = logp.detach() - sampler.double()
    assert stats.means()["sampler/kl"] == pytest.approx((gap.exp() - 1 - gap).mean().item(), rel=1e-5)
    assert "ratio/first" not in stats, "it is not 1"


def test_the_ratio_to_the_sampler_needs_no_further_pass() -> None:
    several = change(find("grpo"), {"minibatches": 4, "kl": 0.0})
    assert several.looks_back and not change(several, {"old_policy": "sampler"}).needs & {Need.OLD}


def test_the_correction_is_outside_of_the_clip_and_does_not_move_from_update_to_update() -> None:
    """The decoupled objective (AReaL, arXiv 2505.24298): min(old / mu, cap) min(r A, clip(r) A), r = now / old."""
    torch.manual_seed(1)
    sampler, advantage = torch.randn(12).float() - 2, torch.randn(12)
    old = sampler.double() + 0.3 * torch.randn(12).double()
    logp = (old + 0.4 * torch.randn(12).double()).requires_grad_()
    row = change(find("grpo"), {"correction": "truncate", "correction_cap": 1.1, "kl": 0.0, "clip_low": 0.2})
    row = change(row, {"clip_high": 0.2})
    loss = PolicyObjective(row)(Outputs(logp), replace(micro_batch(sampler, advantage), old_logp=old), Stats())
    by_hand = 0.0
    for now, then, mu, a in zip(logp.tolist(), old.tolist(), sampler.tolist(), advantage.tolist(), strict=True):
        ratio = math.exp(now - then)
        by_hand -= min(math.exp(then - mu), 1.1) * min(ratio * a, min(max(ratio, 0.8), 1.2) * a) / 12
    assert loss.item() == pytest.approx(by_hand, rel=1e-6)


def test_a_policy_that_is_its_teacher_learns_nothing_from_what_older_weights_sampled() -> None:
    row = adjust(
        find("distill-k1"),
        Distill(
            algorithm="distill-k1",
            async_steps=1,
            teacher="somewhere",
            env="my.py:reward",
            settings={"old_policy": "sampler"},
        ),
    )
    assert row.old == "sampler"
    torch.manual_seed(0)
    sampler = torch.randn(6) - 2
    logp = (sampler + 0.4 * torch.randn(6)).requires_grad_()
    batch = replace(micro_batch(sampler, torch.zeros(6)), teacher_logp=logp.detach())
    stats = Stats()
    PolicyObjective(row)(Outputs(logp), batch, stats).backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None and not logp.grad.any() and stats.means()["divergence"] == 0


def test_a_penalty_to_the_policy_that_sampled_is_steered_by_the_distance_from_that_one(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last step of all nothing moves, and the distance is what older weights have left."""
    rate = Optimization.rate
    monkeypatch.setattr(Optimization, "rate", lambda self, update: rate(self, update) if update <= 4 else 0.0)
    how = {**PLAYED, "steps": 3, "algorithm": "ppo-kl", "critic_lr": 1e-2, "settings": {"old_policy": "sampler"}}
    rows = read_metrics(posttrain.rl(SUMS, digits, str(start), out=str(tmp_path / "run"), async_steps=1, **how).path)
    assert rows[2]["kl/measured"] == pytest.approx(rows[2]["sampler/kl"], rel=1e-3) and rows[2]["sampler/kl"] > 1e-3


def test_with_a_correction_older_weights_weigh_what_was_sampled(start: Path, tmp_path: Path) -> None:
    """The decoupled objective: its weight is what the start of the step thinks of a token over what the sampler did."""
    settings = {"correction": "truncate", "correction_cap": 1.05}
    run = posttrain.rl(SUMS, digits, str(start), out=str(tmp_path / "run"), async_steps=2, settings=settings, **PLAYED)
    rows = read_metrics(run.path)
    assert [row["ratio/first"] for row in rows] == [1.0] * 6
    assert rows[0]["sampler/gap"] < 1e-5 < 1e-3 < rows[-1]["sampler/gap"]


# -- a thread of its own -----------------------------------------------------------------------------------------------


def test_a_mistake_while_playing_ahead_ends_the_run_with_what_was_learned_before(
    start: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the run goes on from there: what could not be played is played with the weights that there are."""
    long = [{**row, "prompt": "1+" * 100} if row["id"] == "33" else row for row in SUMS]
    tasks, out = tmp_path / "rows.jsonl", tmp_path / "run"
    words = [
        "rl",
        "--tasks",
        str(tasks),
        "--env",
        f"{tmp_path / 'env.py'}:dialogue",
        "--model",
        str(start),
        "--out",
        str(out),
    ]
    words += (
        "--steps 6 --prompts 3 --group 2 --max-tokens 6 --async-steps 2 --env-workers 1 --threads 1 --quiet".split()
    )
    (tmp_path / "env.py").write_text(
        "def dialogue(task):\n"
        "    reply = yield task['prompt']\n"
        "    return sum(c.isdigit() for c in reply) / (len(reply) + 1)\n"
    )
    tasks.write_text("".join(json.dumps(row) + "\n" for row in long))
    assert main([*words, "--too-long", "refuse"]) == 2
    told = capfd.readouterr().err
    assert "task '33' has" in told and "Traceback" not in told and "--resume" in told
    done = len(read_metrics(out))
    assert 0 < done < 6 and (out / "checkpoints" / f"step-{done:06d}").exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "playing"]
    state = json.loads((out / "checkpoints" / f"step-{done:06d}" / "training" / "state.json").read_text())
    assert None in state["source"]["ahead"]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    assert main([*words, "--too-long", "refuse", "--resume", "--accept-changes"]) == 0
    assert len(read_metrics(out)) == 6


def test_what_is_played_in_vain_is_given_up(start: Path, tokenizer: Tokenizer) -> None:
    thread = WorkerThread("playing")

    begun = threading.Event()

    def never(task: posttrain.Task) -> Iterator[Any]:
        begun.set()
        while True:
            yield Turn(tokens=[5], max_tokens=1, fresh=True)

    with EnvPool(never, 0) as pool:
        engine = LocalEngine(load_model(start), tokenizer)
        player = Player(pool, engine, tokenizer, Sampling(max_tokens=2), 64, unwanted=thread.left)
        playing = thread.call(lambda: player.play([Episode({"id": "0"}, "0", 0)]))
        later = thread.call(lambda: 1)
        assert begun.wait(20)
        began = time.monotonic()
        thread.close(60)
        assert time.monotonic() - began < 50
        assert isinstance(playing.exception(1), Unwanted)
        assert later.cancelled()


def test_products_of_one_thread_do_not_see_what_another_one_accumulates() -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(accumulates())
        compute_apart()
        seen.append(accumulates())

    with accumulating():
        other = threading.Thread(target=look)
        other.start()
        other.join()
    assert seen == [True, False]


# -- checkpoints that are saved beside the steps -----------------------------------------------------------------------


def test_steps_go_on_while_a_checkpoint_waits_for_the_disk(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, slowed, whole = tmp_path / "run", list[Path](), checkpoint.sync

    def slow(path: Path) -> None:
        """The disk has the first checkpoint only after the second step."""
        if "step-000001" in str(path):
            slowed.append(path)
            end = time.monotonic() + 60
            while out.joinpath("metrics.jsonl").read_bytes().count(b"\n") < 2:
                assert time.monotonic() < end, "the next step waits"
                time.sleep(0.01)
        whole(path)

    monkeypatch.setattr(checkpoint, "sync", slow)
    run = posttrain.rl(SUMS, digits, str(start), out=str(out), **{**PLAYED, "steps": 3})
    assert slowed and [folder.name for folder in checkpoint.listed(out)] == [f"step-00000{n}" for n in (1, 2, 3)]
    assert run.checkpoint == checkpoint.newest(out)
    assert not [thread for thread in threading.enumerate() if thread.name == "saving"]


def test_a_disk_that_fails_beside_a_step_ends_the_run_with_the_checkpoint_before_it(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "run", checkpoint.sync

    def full(path: Path) -> None:
        if "step-000002" in str(path):
            raise OSError(28, "No space left on device")
        whole(path)

    monkeypatch.setattr(checkpoint, "sync", full)
    with pytest.raises(UserError, match="could not save checkpoint .*step-000002.*No space left") as error:
        posttrain.rl(SUMS, digits, str(start), out=str(out), **PLAYED)
    assert "--resume" in str(error.value) and "\n" not in str(error.value)
    assert checkpoint.listed(out)[0].name == "step-000001" and not list(out.glob("checkpoints/.*2.draft"))


def test_a_disk_that_fails_late_is_heard_before_the_next_checkpoint(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "run", checkpoint.sync

    def full(path: Path) -> None:
        end = time.monotonic() + 20
        while "step-000002" in str(path) and time.monotonic() < end:
            if out.joinpath("metrics.jsonl").read_bytes().count(b"\n") >= 3:
                time.sleep(0.2)  # the third step is about to be saved
                raise OSError(28, "No space left on device")
            time.sleep(0.01)
        whole(path)

    monkeypatch.setattr(checkpoint, "sync", full)
    with pytest.raises(UserError, match="could not save checkpoint .*step-000002.*No space left"):
        posttrain.rl(SUMS, digits, str(start), out=str(out), **PLAYED)
    assert len(read_metrics(out)) == 3


# -- rollouts as training state ----------------------------------------------------------------------------------------


def test_a_rollout_is_stored_and_restored_whole() -> None:
    transcript = Transcript()
    transcript.observe([1, 2])
    transcript.sample(Completion(0, [3, 4], [-0.1, -1 / 3], "", StopReason.EOS, 7))
    calls = (ToolCall("add", {"a": 1, "b": [2.5, None]}, 9, "wrong", "c1"),)
    turns = [
        PlayedTurn(SpanKind.PROMPT, "hi", 0, 0, 2, 0.0, 1.5),
        PlayedTurn(SpanKind.SAMPLED, "é", 0, 2, 2, 0.25, 2.5, 3, calls, answered=(2, 1)),
    ]
    whole = Rollout(
        {"id": "x"}, "x#0", [transcript], 0.1 + 0.2, {"a": 0.1, "b": 0.2}, [(2, 0.5)], StopReason.TURNS, turns, "é", "hi",
        [("judge", {"score": [1]}), ("judge", Invalid("down", InvalidKind.UNANSWERED))], "black",
        [Piece(2, 1, 0)], Branch(0, 1, (2,)),
    )  # fmt: skip
    invalid = Rollout({"id": "x"}, "x#0", [Transcript()], Invalid("late", InvalidKind.TIMEOUT))
    for rollout in (whole, invalid):
        again = restored(json.loads(json.dumps(stored(rollout))), rollout.task)
        for name in (field.name for field in fields(Rollout) if field.name != "transcripts"):
            assert getattr(again, name) == getattr(rollout, name), name
        assert [t.as_dict() for t in again.transcripts] == [t.as_dict() for t in rollout.transcripts]


def test_rollouts_played_ahead_of_other_tasks_are_refused(start: Path, tmp_path: Path) -> None:
    words: dict[str, Any] = {**PLAYED, "steps": 4, "async_steps": 1}
    run = posttrain.rl(SUMS, digits, str(start), out=str(tmp_path / "run"), **words)
    for folder in ("step-000004", "step-000003"):
        assert (run.path / "checkpoints" / folder).exists()
    state = json.loads((run.path / "checkpoints" / "step-000003" / "training" / "state.json").read_text())["source"]
    assert len(state["ahead"]) == 1 and state["ahead"][0]["number"] == 4 and state["cursor"] == 9
    last = json.loads((run.path / "checkpoints" / "step-000004" / "training" / "state.json").read_text())["source"]
    assert "ahead" not in last, "nothing is played beyond the last step"
