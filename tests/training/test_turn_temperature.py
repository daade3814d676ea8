"""Temperatures of turns and of tasks: sampler and learner agree on each token's distribution, from record to gradient."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from digit_tasks import TASKS
from episodes import played
from rl_sources import digits, row, run, source
from tiny_models import make
from torch import Tensor
from update_cases import WORDS, chosen_row

import posttrain
from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.policy import PolicyObjective
from posttrain.core.batch import Stats
from posttrain.core.rollouts import Outcome
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Reply, Sampling, Task, Turn, UserError
from posttrain.data.tasks import to_tasks
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.local.uncached_engine import UncachedEngine
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import Player
from posttrain.envs.play.task_temperature import check_temperatures, task_temperature
from posttrain.learners.forward_pass import REFERENCE, Teaching
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts, rows_of
from posttrain.runs.record.rollout_rows import transcripts_of
from posttrain.runs.record.rollout_tables import rollouts_table
from posttrain.runs.run_reading import rollout_steps
from posttrain.runs.terminal.printing import sample
from posttrain.training.sources.packing import Taught, collate, pack
from posttrain.training.sources.remote_teacher import RemoteTeacher
from posttrain.training.sources.rollout_state import restored, stored
from posttrain.training.sources.teacher_targets import TEACHER

ROUNDING = 2e-5  # nats: float32 log-probabilities of two arrangements of the same sums


def heated(task: Task) -> Generator[Turn | str, Reply, float]:
    """Three turns: at 0.5, at the run's temperature, at 2."""
    text = ""
    for heat in (0.5, None, 2.0):
        text += yield Turn(text=task["prompt"], temperature=heat, max_tokens=5)
    return digits(task, text)


def transcript(*replies: tuple[float | None, bool]) -> Transcript:
    """A prompt and replies of made-up tokens: (temperature, whether it is learned from)."""
    from posttrain.core.types import Completion, StopReason

    made, draw = Transcript(), torch.Generator().manual_seed(len(replies))
    for number, (heat, learn) in enumerate(replies):
        made.observe(torch.randint(3, WORDS.vocab_size, (3 + number,), generator=draw).tolist())
        tokens = torch.randint(3, WORDS.vocab_size, (4 + number,), generator=draw).tolist()
        made.sample(Completion(0, tokens, [-1.0] * len(tokens), "", StopReason.EOS, 0), learn, heat)
    return made


def of_each(made: Transcript, run: float) -> list[float]:
    """The temperature of each scored token."""
    return [s.temperature or run for s in made.spans if s.learned for _ in range(s.length)]


@pytest.mark.parametrize("engine", [LocalEngine, UncachedEngine])
def test_gap_between_sampler_and_learner_stays_rounding(
    tokenizer: Tokenizer, engine: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_sources.LocalEngine", engine)
    _, seen = run(source(tokenizer, row("grpo", kl=0.1, minibatches=2), heated), steps=2)
    assert all(0 < s["sampler/gap/max"] < ROUNDING for s in seen)


def test_gradient_of_a_step_is_that_of_a_loop_over_tokens_at_their_own_temperatures() -> None:
    """min(r A, clip(r) A) - beta KL(policy || reference) + coefficient x entropy, in float64."""
    algorithm = chosen_row(find("grpo"), kl=0.3, kl_estimator="exact", entropy=0.2, minibatches=2)
    model, other = tiny(WORDS, dtype=torch.float64), tiny(WORDS, seed=1, dtype=torch.float64)
    learner = LocalLearner(model, Optimization(max_grad_norm=0), temperature=0.8, others={REFERENCE: other})
    made = [transcript((0.5, True), (None, True), (2.0, False)), transcript((1.7, True)), transcript((None, True))]
    draw = torch.Generator().manual_seed(5)
    counts = [t.n_scored for t in made]
    advantage, old = ([torch.randn(n, generator=draw, dtype=torch.float64) for n in counts] for _ in range(2))
    old = [x / 3 - 2 for x in old]
    batch = collate(
        [[t] for t in made],
        range(3),
        weight=torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64),
        fields={"advantage": advantage, "old_logp": old, "ref_logp": old},
    )
    objective = PolicyObjective(algorithm)
    outputs = learner._outputs(model, batch, objective.wants)
    found = torch.autograd.grad(objective(outputs, batch, Stats()), list(model.parameters()))

    loss = torch.zeros((), dtype=torch.float64)
    for own, gain, before, weight in zip(made, advantage, old, (0.2, 0.5, 0.3), strict=True):
        p, q = (distributions(m, own, 0.8) for m in (model, other))
        logp = p[torch.arange(len(p)), torch.tensor([own.tokens[t] for t in own.scored])]
        ratio = (logp - before).exp()
        surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        kl, entropy = (p.exp() * (p - q)).sum(-1), -(p.exp() * p).sum(-1)
        loss = loss - weight * (surrogate - 0.3 * kl + 0.2 * entropy).sum()
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    assert all((a - b).abs().max() < 1e-9 for a, b in zip(found, wanted, strict=True))


def distributions(model: Any, own: Transcript, run: float) -> Tensor:
    """Log-probabilities [n, V] of all tokens at each scored place, from the transcript alone."""
    layout = pack([[own]], [0]).layout
    logits = model.hidden(layout, torch.from_numpy(own.scored - 1)) @ model.head.weight.T
    return (logits / torch.tensor(of_each(own, run), dtype=torch.float64)[:, None]).log_softmax(-1)


def test_policy_and_reference_are_read_at_the_temperature_of_each_token_in_any_packing() -> None:
    models = {name: tiny(WORDS, seed=s, dtype=torch.float64) for s, name in enumerate(("policy", REFERENCE))}
    learner = LocalLearner(models["policy"], Optimization(), temperature=0.8, others={REFERENCE: models[REFERENCE]})
    one, two = transcript((0.5, True), (3.0, True)), transcript((None, True), (1.3, True), (0.6, True))
    shared = one.branch()  # its tokens are laid once, and scored for both
    for name, model in models.items():
        [outputs] = learner.evaluate([pack([[one], [two], [shared]], range(3))], of=name)
        alone = [
            distributions(model, t, 0.8)[range(t.n_scored), [t.tokens[i] for i in t.scored]] for t in (one, two, one)
        ]
        assert (outputs.logp - torch.cat(alone)).abs().max() < 1e-10


def test_batch_without_own_temperatures_has_none() -> None:
    assert pack([[transcript((None, True))]], [0]).temperature is None


def requests(monkeypatch: pytest.MonkeyPatch, env: Any, tokenizer: Tokenizer, **how: Any) -> list[float]:
    """The temperatures of an episode's requests."""
    submit, asked = LocalEngine.submit, []

    def noted(self: Any, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        asked.append(sampling.temperature)
        submit(self, id, prompt, sampling, keep)

    task, sampling = how.pop("task", {}), how.pop("sampling", Sampling(0.8, max_tokens=5))
    engine = LocalEngine(tiny(tokenizer, context=256), tokenizer)
    with EnvPool(env, 0) as pool, monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "submit", noted)
        player = Player(pool, engine, tokenizer, sampling, 256, temperature_column="heat")
        [rollout] = player.play([Episode({"id": "a", "prompt": "say=", **task}, "a#0", 7, **how)])
    spans = [s.temperature for t in rollout.transcripts for s in t.spans if s.kind == "sampled"]
    turns = [t.temperature for t in rollout.turns if t.kind == "sampled"]
    assert spans == turns == [None if heat == sampling.temperature else heat for heat in asked]
    return asked


def test_a_turn_s_temperature_goes_before_its_task_s_and_that_before_the_run_s(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask: Callable[..., list[float]] = lambda **how: requests(monkeypatch, heated, tokenizer, **how)  # noqa: E731
    assert ask() == [0.5, 0.8, 2.0]
    assert ask(task={"heat": 1.25}) == ask(task={"heat": "1.25"}) == [0.5, 1.25, 2.0]
    assert ask(task={"heat": None}) == ask(task={"heat": ""}) == [0.5, 0.8, 2.0]
    assert ask(greedy=True) == [0.0] * 3  # as the baseline of a group
    assert ask(sampling=Sampling(0.0, max_tokens=5)) == [0.0] * 3  # a greedy evaluation
    assert ask(sampling=Sampling(0.5, max_tokens=5)) == [0.5, 0.5, 2.0]


def test_workers_pass_a_turn_s_temperature_on(tokenizer: Tokenizer) -> None:
    [here], [there] = ([played(heated, tokenizer, 1, workers=n)] for n in (0, 1))
    assert [t.as_dict() for r in here for t in r.transcripts] == [t.as_dict() for r in there for t in r.transcripts]
    assert {s.temperature for s in here[0].transcripts[0].spans} == {0.5, None, 2.0}


@pytest.mark.parametrize("heat", [-0.5, float("nan"), float("inf"), True, "hot", 1e-9])
def test_turn_at_no_temperature_is_invalid_with_the_value(tokenizer: Tokenizer, heat: Any) -> None:
    def env(task: Task) -> Generator[Turn, Reply, float]:
        yield Turn(text="a", temperature=heat)
        return 1.0

    [rollout] = played(env, tokenizer, 1)
    assert "yielded a Turn whose temperature is" in rollout.reward.reason  # type: ignore[union-attr]


@pytest.mark.parametrize("learn", [True, False])
def test_greedy_turn_is_refused_where_it_is_trained_and_sampled_where_it_is_not(
    tokenizer: Tokenizer, learn: bool
) -> None:
    def env(task: Task) -> Generator[Turn, Reply, float]:
        text = yield Turn(text=task["prompt"], max_tokens=5)
        yield Turn(text="Right? ", temperature=0, learn=learn, max_tokens=5)
        return digits(task, text)

    experience = source(tokenizer, row("grpo"), env)
    if learn:
        with pytest.raises(UserError, match=r"task '.': a turn that is trained .* temperature 0.*learn=False"):
            run(experience, steps=1)
    else:
        _, [seen] = run(experience, steps=1)
        assert seen["sampler/gap/max"] < ROUNDING


def test_rollouts_keep_their_temperatures_as_training_state_and_in_the_record(tokenizer: Tokenizer) -> None:
    for rollout in played(heated, tokenizer, 2):
        again = restored(json.loads(json.dumps(stored(rollout))), rollout.task)
        [row] = rows_of(rollouts_table(1, [Outcome(rollout)], "rl"))
        wanted = [s.temperature for t in rollout.transcripts for s in t.spans]
        assert wanted.count(0.5) == wanted.count(2.0) == 1
        for transcripts in (again.transcripts, transcripts_of(row)):
            assert [s.temperature for t in transcripts for s in t.spans] == wanted
        assert again.turns == rollout.turns
        assert [t["temperature"] for t in row["turns"]] == [t.temperature for t in rollout.turns]


def test_printed_rollouts_show_the_temperature_of_a_turn_where_it_is_not_the_run_s(
    tokenizer: Tokenizer,
) -> None:
    shown = io.StringIO()
    sample(played(heated, tokenizer, 1), 1, shown)
    assert [shown.getvalue().count(f"(temperature {heat})") for heat in ("0.5", "1", "2")] == [1, 0, 1]


ENV = """
from posttrain import StopRun, Turn


def stop(step, metrics, rollouts):
    if step == 2:
        raise StopRun("half")


def heated(task):
    text = ""
    for heat in (0.5, None, 2.0):
        text += yield Turn(text=task["prompt"], temperature=heat, max_tokens=4)
    return sum(c.isdigit() for c in text) / 8
"""


@pytest.fixture
def start(tmp_path: Path, tokenizer: Tokenizer, request: pytest.FixtureRequest) -> str:
    """A model of ours, or one that transformers computes; and the environment in a file of its own."""
    (tmp_path / "heated.py").write_text(ENV)
    if request.param == "ours":
        save_model(tiny(tokenizer, context=128), tmp_path / "start", tokenizer)
    else:
        pytest.importorskip("transformers")
        tokenizer.save(make(request.param, tmp_path / "start", vocab_size=tokenizer.vocab_size))
    return str(tmp_path / "start")


HOW: dict[str, dict[str, Any]] = {
    "alone": {"minibatches": 2, "kl": 0.1},
    "replicas": {"replicas": 2},
    "ahead": {"async_steps": 1},
    "partial": {"tokens_per_step": 3, "env": digits},
}


@pytest.mark.parametrize(
    ("start", "how"), [*(("ours", how) for how in HOW), ("gemma2", "alone"), ("gpt2", "alone")], indirect=["start"]
)
def test_runs_agree_with_their_sampler_and_go_on_to_the_bit(start: str, how: str, tmp_path: Path) -> None:
    tasks = [{**task, "heat": 0.75 + place % 2} for place, task in enumerate(TASKS)]
    quick: dict[str, Any] = {
        **{"model": start, "prompts": 3, "group": 3, "max_tokens": 8, "lr": 1e-3, "threads": 1, "env_workers": 0},
        **{"temperature": 1.5, "temperature_column": "heat", "save_every": 2, "quiet": True, **HOW[how]},
    }
    env = quick.pop("env", str(tmp_path / "heated.py") + ":heated")
    alone = {**quick, "replicas": 0}  # the second half alone is sampled by replicas
    whole = posttrain.rl(tasks, env, steps=4, out=str(tmp_path / "whole"), **alone)
    stop = (str(tmp_path / "heated.py") + ":stop",)
    posttrain.rl(tasks, env, steps=4, out=str(tmp_path / "parts"), hook=stop, **alone)
    parts = posttrain.rl(tasks, env, steps=4, out=str(tmp_path / "parts"), resume=True, **quick)
    assert parts.metrics == whole.metrics
    if not {"async_steps", "tokens_per_step"} & quick.keys():  # there, other weights sampled
        assert all(0 < step["sampler/gap/max"] < ROUNDING for step in whole.metrics)
    rows = [r for step in rollout_steps(whole.path) for r in read_rollouts(whole.path, step)]
    assert {s["temperature"] for r in rows for s in r["spans"] if s["kind"] == "sampled"} >= {0.75, 1.75}


def test_task_at_no_temperature_is_refused_with_its_row_and_what_is_left_out_has_none() -> None:
    rows = [{"prompt": "a", "heat": {"of": 0.5}}, {"prompt": "b", "heat": {}}, {"prompt": "c"}]
    assert [task_temperature(task, "heat.of") for task in to_tasks(rows)] == [0.5, None, None]
    check_temperatures(to_tasks(rows), "heat.of", trained=True)
    for value, trained in ((0, True), (-1, False), ("inf", False), ([], False)):
        with pytest.raises(UserError, match=r"row 2: --temperature-column heat is"):
            check_temperatures(to_tasks([{"prompt": "a"}, {"prompt": "b", "heat": value}]), "heat", trained)
    check_temperatures(to_tasks([{"prompt": "b", "heat": 0}]), "heat", trained=False)  # a greedy evaluation


@pytest.mark.parametrize("own", [None, 1.3])
def test_teacher_is_read_at_the_temperature_of_each_token_unless_it_has_its_own(own: float | None) -> None:
    models = {name: tiny(WORDS, seed=s, dtype=torch.float64) for s, name in enumerate(("policy", TEACHER))}
    learner = LocalLearner(
        models["policy"], Optimization(), temperature=0.8, others={TEACHER: models[TEACHER]}, teaching=Teaching(own)
    )
    made = transcript((0.5, True), (None, True), (2.0, True))
    batch = pack([[made]], [0], taught=[Taught(TEACHER, [made])])
    [found] = learner.evaluate([batch], want=frozenset({"reverse_kl"}))
    [theirs] = learner.evaluate([batch], of=TEACHER)
    p, q = (distributions(model, made, 0.8) for model in models.values())
    if own is not None:
        logits = q * torch.tensor(of_each(made, 0.8), dtype=torch.float64)[:, None]
        q = (logits / own).log_softmax(-1)
    assert (found.reverse_kl - (p.exp() * (p - q)).sum(-1)).abs().max() < 1e-10
    assert (theirs.logp - q[range(made.n_scored), [made.tokens[t] for t in made.scored]]).abs().max() < 1e-10


def test_endpoint_as_a_teacher_cannot_follow_temperatures_of_turns() -> None:
    endpoint = RemoteTeacher.__new__(RemoteTeacher)
    endpoint.address, endpoint.fixed = "http://there/v1", False
    with pytest.raises(UserError, match="sampled at temperature 0.5, and the teacher .* give --teacher-temperature 1"):
        endpoint.logp([transcript((None, True)), transcript((2.0, True), (0.5, True))])


def test_part_of_a_mixture_has_its_own_temperature(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({**task, "id": str(place)}) + "\n" for place, task in enumerate(TASKS)))
    (tmp_path / "env.py").write_text("def reward(task, reply):\n    return float(len(reply))\n")
    part = {"tasks": str(rows), "env": str(tmp_path / "env.py") + ":reward"}
    ran = posttrain.rl(
        model=str(tmp_path / "start"), mixture={"cold": {**part, "temperature": "0.5"}, "warm": part}, steps=1, prompts=4,
        group=2, max_tokens=5, temperature=1.2, threads=1, env_workers=0, quiet=True, out=str(tmp_path / "run"),
    )  # fmt: skip
    assert ran.metrics[0]["sampler/gap/max"] < ROUNDING
    heats = {
        (r["task"].partition("/")[0], t["temperature"]) for r in read_rollouts(ran.path, 1) for t in r["turns"][1:]
    }
    assert heats == {("cold", 0.5), ("warm", None)}
