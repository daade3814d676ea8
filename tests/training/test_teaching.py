"""Who teaches which rollout and what it reads; runs of posttrain distill; teachers that cannot teach."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from conftest import make_rollouts, tiny
from torch import Tensor
from update_cases import OTHER, WORDS, chosen_row, collector_of, new_learner, new_player

import posttrain
from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.policy import PolicyObjective
from posttrain.algorithms.policy_table import TABLE
from posttrain.cli.main import main
from posttrain.config.training import Distill
from posttrain.core.batch import Stats
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Task, UserError
from posttrain.learners.forward_pass import Teaching
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.native.decoder import Decoder, causal, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.health import Health
from posttrain.system import endpoint as endpoints
from posttrain.training.adjust import adjust
from posttrain.training.loop import train
from posttrain.training.open_teachers import teaches_itself
from posttrain.training.sources.collector import Size
from posttrain.training.sources.credit_assignment import credit
from posttrain.training.sources.ledger import Ledger
from posttrain.training.sources.minibatches import Minibatches
from posttrain.training.sources.model_outputs import evaluate_rollouts
from posttrain.training.sources.packing import Taught, pack
from posttrain.training.sources.remote_teacher import RemoteTeacher
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.sources.teacher_targets import TEACHER, Teachers, TopTokens
from posttrain.training.sources.token_recording import TokenRecording

DISTILLING = [name for name, row in TABLE.items() if row.teacher is not None]
DISTANCES = ("reverse_kl", "forward_kl", "jensen_shannon")


def rollouts_of(seed: int = 0, groups: int = 3, **task: Any) -> list[Rollout]:
    rollouts = make_rollouts(torch.Generator().manual_seed(seed), groups, 2, WORDS.vocab_size)
    for rollout in rollouts:
        rollout.task = {"id": rollout.group, **task}
    return rollouts


def text_of(rollout: Rollout) -> str:
    first = rollout.transcripts[0]
    return WORDS.decode(first.tokens[: first.spans[0].length])


def learner_of(dtype: torch.dtype = torch.float64) -> LocalLearner:
    return new_learner(chosen_row(find("distill-jsd")), dtype)


# -- what a teacher reads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DISTANCES)
def test_teacher_that_reads_the_same_prompt_apart_says_the_identical_numbers(name: str) -> None:
    learner, plain = learner_of(torch.float32), rollouts_of()
    for rollout in plain:  # prompts that a tokenizer can read and give again
        first = rollout.transcripts[0]
        rollout.transcripts = [first.with_prompt(WORDS.encode("1+2=", start=True)), *rollout.transcripts[1:]]
    teachers = Teachers(WORDS, {TEACHER: 64})
    same = evaluate_rollouts(learner, plain, 10_000, want=frozenset({name}), taught=teachers.taught(plain))
    for rollout in plain:
        rollout.task["teacher_prompt"] = "1+2="
    apart = teachers.taught(plain)
    assert all(t.transcripts[0] is not r.transcripts[0] for t, r in zip(apart, plain, strict=True))
    again = evaluate_rollouts(learner, plain, 10_000, want=frozenset({name}), taught=apart)
    for field in ("logp", name):
        assert all(torch.equal(a, b) for a, b in zip(same[field], again[field], strict=True))
    one, other = teachers.logp(learner, plain, 40), Teachers(WORDS, {TEACHER: 64}).logp(learner, plain, 40)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("budget", [30, 10_000])
def test_divergence_is_from_the_teacher_a_task_chose_behind_the_prompt_it_reads(budget: int) -> None:
    """Against a forward pass of each sequence alone, one token at a time."""
    learner, rollouts = learner_of(), rollouts_of()
    told = ["", "think: ", "9-9=0, so "]
    for i, rollout in enumerate(rollouts):
        rollout.task |= {"teacher": "other"} if i % 2 else {}
        rollout.task |= {"teacher_prompt": told[i // 2]} if told[i // 2] else {}
    teachers = Teachers(WORDS, {TEACHER: 64, OTHER: 64}, choose=True)
    wanted = frozenset({"reverse_kl"})
    found = evaluate_rollouts(learner, rollouts, budget, want=wanted, taught=teachers.taught(rollouts))["reverse_kl"]
    logp = teachers.logp(learner, rollouts, budget)
    for i, rollout in enumerate(rollouts):
        (own,) = rollout.transcripts
        prompt = own.spans[0].length
        read = own.tokens if not told[i // 2] else WORDS.encode(told[i // 2], start=True) + own.tokens[prompt:]
        moved = len(read) - len(own.tokens)
        log_p = distributions(learner.model, own.tokens, 1.0)
        log_q = distributions(learner.others[OTHER if i % 2 else TEACHER], read, 1.3)
        for n, place in enumerate(own.scored.tolist()):
            p, q = log_p[place - 1], log_q[place + moved - 1]
            assert found[i][n] == pytest.approx((p.exp() * (p - q)).sum().item(), abs=1e-10)
            assert logp[i][n] == pytest.approx(q[own.tokens[place]].item(), abs=1e-10)


def distributions(model: Any, tokens: list[int], temperature: float) -> Tensor:
    with torch.no_grad():
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), causal)
        return (hidden @ model.head.weight.T / temperature).log_softmax(-1)


def test_transcript_behind_another_prompt_keeps_what_was_sampled_and_its_spans() -> None:
    for rollout in rollouts_of(groups=8):
        (own,) = rollout.transcripts
        other = own.with_prompt([4, 4, 4, 4])
        prompt = own.spans[0].length
        assert other.tokens == [4, 4, 4, 4, *own.tokens[prompt:]] and other.logp == own.logp
        assert (other.scored - 4).tolist() == (own.scored - prompt).tolist()
        assert [(s.kind, s.length, s.learned, s.version) for s in other.spans[1:]] == [
            (s.kind, s.length, s.learned, s.version) for s in own.spans[1:]
        ]
        assert other.spans[0].kind is SpanKind.PROMPT and own.tokens[:prompt] != [4, 4, 4, 4]


def test_rollouts_longer_than_a_teacher_s_context_are_counted_and_left_out() -> None:
    rollouts = rollouts_of()
    rollouts[3].task["teacher_prompt"] = "1" * 60
    stats = Stats()
    kept, others = Teachers(WORDS, {TEACHER: 64}).readable(rollouts, stats)
    assert len(others) == 1 and others[0] is rollouts[3]
    assert kept == [r for i, r in enumerate(rollouts) if i != 3] and stats["teacher/too_long"] == (1.0, 6.0)


def test_a_rollout_fits_where_all_tokens_before_its_last_scored_one_do() -> None:
    rollouts = rollouts_of()
    last = [r.transcripts[0].scored[-1].item() for r in rollouts]
    for context in (max(last), max(last) - 1):
        kept, _ = Teachers(WORDS, {TEACHER: context}).readable(rollouts, Stats())
        assert kept == [r for r, place in zip(rollouts, last, strict=True) if place <= context]


def test_only_the_first_transcript_is_read_behind_the_teacher_s_prompt() -> None:
    learner, rollouts = learner_of(), rollouts_of()
    teachers = Teachers(WORDS, {TEACHER: 64})
    plain = teachers.logp(learner, rollouts, 10_000)
    rollouts[0].task["teacher_prompt"] = "9-9=0, so "
    behind = teachers.logp(learner, rollouts[:1], 10_000)
    rollouts[0].transcripts = [*rollouts[0].transcripts, *rollouts[2].transcripts, *rollouts[4].transcripts]
    (joined,) = teachers.logp(learner, rollouts[:1], 10_000)
    assert torch.allclose(joined, torch.cat([*behind, plain[2], plain[4]]), atol=1e-12)


def test_divergence_from_a_teacher_elsewhere_is_log_p_minus_log_q_of_the_sampled_tokens() -> None:
    learner, rollouts = learner_of(), rollouts_of()

    class Elsewhere:
        def logp(self, transcripts: Sequence[Transcript]) -> list[Tensor]:
            logs = [distributions(learner.others[TEACHER], t.tokens, 1.0) for t in transcripts]
            return [
                log_q[t.scored - 1, torch.tensor(t.tokens)[t.scored]]
                for log_q, t in zip(logs, transcripts, strict=True)
            ]

        def top(self, transcripts: Sequence[Transcript], count: int) -> list[TopTokens]:
            raise AssertionError("the sampled tokens are enough")

    stats = Stats()
    Teachers(WORDS, {}, {TEACHER: Elsewhere()}).measure(learner, rollouts, 40, stats)
    expected = 0.0
    for (own,) in (r.transcripts for r in rollouts):
        log_p, log_q = (distributions(m, own.tokens, 1.0) for m in (learner.model, learner.others[TEACHER]))
        expected += sum((log_p - log_q)[place - 1, own.tokens[place]].item() for place in own.scored.tolist())
    assert abs(expected) > 0.1
    assert stats["eval/divergence"] == pytest.approx((expected, sum(r.n_scored for r in rollouts)), abs=1e-9)


def test_task_without_a_teacher_is_refused_in_one_line() -> None:
    teachers = Teachers(WORDS, {OTHER: 64}, choose=True)
    with pytest.raises(UserError, match="task 'a' chooses the teacher 'another': --teachers names other"):
        teachers.name({"id": "a", "teacher": "another"})
    with pytest.raises(
        UserError, match="task 'a' has no \"teacher\", and there is no --teacher: --teachers names other"
    ):
        teachers.name({"id": "a"})
    assert Teachers(WORDS, {TEACHER: 64}).name({"teacher": "Ms Smith"}) == TEACHER, "a column of the data's own"
    with pytest.raises(UserError, match='"teacher_prompt" must be text or a list of messages'):
        teachers.prompt({"id": "a", "teacher_prompt": 3})


def test_readings_lay_nothing_twice_where_all_have_one_teacher() -> None:
    rollouts = rollouts_of()
    transcripts = [r.transcripts for r in rollouts]
    packed = pack(transcripts, range(6), taught=[Taught("t", t) for t in transcripts])
    (reading,) = packed.readings
    assert reading.rows is None and reading.packed.layout is packed.layout
    two = pack(transcripts, range(6), taught=[Taught("ts"[i % 2], t) for i, t in enumerate(transcripts)])
    rows = torch.cat([r.rows for r in two.readings if r.rows is not None]).sort().values
    assert len(two.readings) == 2 and rows.tolist() == list(range(len(packed.target)))


# -- rows learn --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTILLING)
def test_every_row_halves_the_divergence_from_its_teacher(name: str) -> None:
    torch.manual_seed(0)
    row = chosen_row(find(name), teacher_temperature=1.0)
    wide = DecoderConfig(
        vocab=WORDS.vocab_size, hidden=48, layers=1, heads=2, kv_heads=2, head_size=24, intermediate=64, context=96,
        tied=True,
    )  # fmt: skip
    teacher = new_decoder(wide, 3)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(3 if parameter.ndim == 2 else 1)
    model = tiny(WORDS)
    learner = LocalLearner(model, Optimization(lr=1e-2), others={TEACHER: teacher}, teaching=Teaching(1.0, 0.5))
    tasks: list[Task] = [{"id": str(i), "prompt": f"{i}+1="} for i in range(4)]
    player = new_player(lambda task, reply: 0.0, model, 12)
    collector = collector_of(tasks, player, row, Size(4, 8, 200), rewarded=False)
    source = RLSource(collector, learner, row, teachers=Teachers(WORDS, {TEACHER: 96}))
    seen: list[dict[str, float]] = []
    health = Health()
    found = []
    for step in range(30):
        train(
            learner,
            source,
            PolicyObjective(row),
            [lambda t: seen.append(t.stats.means())],
            first=step + 1,
            steps=step + 1,
        )
        found += health.look(step + 1, seen[-1])
    assert sum(s["divergence"] for s in seen[-3:]) / 3 < 0.5 * seen[0]["divergence"], [s["divergence"] for s in seen]
    assert "reward" not in seen[-1] and "groups/no_signal" not in seen[-1]
    assert not [f for f in found if f.name in ("signal", "solved")]


def test_reward_of_zero_is_no_finding_where_a_teacher_teaches() -> None:
    untaught, taught = Health(), Health()
    metrics = {
        "reward": 0.0,
        "accuracy": 0.0,
        "groups/no_signal": 1.0,
        "advantage/abs": 0.0,
        "entropy": 1.0,
        "length": 5.0,
    }
    found = {"untaught": [], "taught": []}  # type: ignore[var-annotated]
    for step in range(1, 40):
        found["untaught"] += [f.name for f in untaught.look(step, metrics)]
        found["taught"] += [f.name for f in taught.look(step, {**metrics, "divergence": 1.0})]
    assert "signal" in found["untaught"] and found["taught"] == []


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, a student, a wider teacher, and a model of another tokenizer."""
    folder = tmp_path_factory.mktemp("teaching")
    rows = [{"id": str(i), "prompt": f"{i}+{i}=", "hint": f"{2 * i}; "} for i in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_model(tiny(WORDS), folder / "student", WORDS)
    save_model(tiny(WORDS, seed=4, context=128), folder / "teacher", WORDS)
    other = Tokenizer.train(["zyxwvutsrqponmlkjihgfedcba9876543210+=-"], 64, "characters")
    save_model(tiny(other), folder / "foreign", other)
    return folder


def small(place: Path, out: str, *words: str) -> list[str]:
    fixed = "--prompts 6 --steps 2 --max-tokens 6 --lr 1e-3 --held-out 0.25 --threads 1 --quiet --env-workers 0".split()
    rows, student = str(place / "rows.jsonl"), str(place / "student")
    return ["distill", "--tasks", rows, "--model", student, "--out", str(place / out), *fixed, *words]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_run_without_an_environment_reports_divergences_and_no_rewards(place: Path, capsys: Any) -> None:
    teacher = str(place / "teacher")
    words = ["--teacher", teacher, "--teacher-temperature", "0.8", "--teacher-prompt-template", "{hint}{prompt}"]
    assert main(small(place, "plain", *words)) == 0
    first, *steps = metrics(place / "plain")
    assert set(first) == {"step", "eval/divergence", "eval/invalid", "eval/length"} and first["eval/divergence"] > 0
    assert all("divergence" in s and s["skipped"] == 0 and not any("reward" in name for name in s) for s in steps)
    told = json.loads((place / "plain" / "run.json").read_text())
    assert any("q at temperature 0.8" in line for line in told["objective"])
    assert any(teacher in line and "divided by 0.8" in line for line in told["sizes"])
    assert "divergence" in capsys.readouterr().out


def test_front_door_takes_teachers_by_name_and_a_reward_to_mix_in(place: Path) -> None:
    rows = [{"id": str(i), "prompt": f"{i}=", "teacher": "ab"[i % 2]} for i in range(8)]
    run = posttrain.distill(
        rows, str(place / "student"), env=lambda task, reply: float(len(reply)), out=str(place / "mixed"), steps=2,
        teachers={"a": str(place / "teacher"), "b": str(place / "student")}, algorithm="grpo", divergence="sampled",
        prompts=4, group=3, max_tokens=5, quiet=True, threads=1, env_workers=0, kl=0.0, distillation=0.5,
    )  # fmt: skip
    assert run.metrics[-1]["reward"] > 0 and run.metrics[-1]["divergence"] > 0
    assert {"teachers a", "teachers b"} <= json.loads((run.path / "run.json").read_text())["inputs"].keys()


def test_a_student_that_is_its_own_teacher_is_told_unless_they_read_different_prompts(place: Path) -> None:
    tasks: list[Task] = [{"id": "1", "prompt": "1+1="}]

    def equal(tasks: list[Task] = tasks, **options: Any) -> bool:
        config = Distill(**{"tasks": "t", "model": "m", "teacher": str(place / "student"), **options})
        return teaches_itself(config, adjust(find(config.algorithm), config), tasks, place / "student")

    assert equal()
    assert not equal(teacher=str(place / "teacher"))
    assert not equal([{**tasks[0], "teacher_prompt": "2; 1+1="}])
    assert not equal(settings={"teacher_temperature": 0.5}) and equal(settings={"teacher_temperature": 1.0})
    assert not equal(algorithm="grpo", env="arithmetic", group=4)
    assert not equal(ptx="texts.jsonl"), "texts are learned too"


def test_texts_to_imitate_beside_a_divergence_need_no_teacher(place: Path) -> None:
    (place / "texts.jsonl").write_text('{"text": "1=2"}\n' * 4)
    texts = ["--ptx", str(place / "texts.jsonl"), "--ptx-coefficient", "0.5"]
    for name, words in (("with", texts), ("without", [])):
        options = ["--algorithm", "distill-reverse-kl", "--teacher", str(place / "teacher")]
        assert main(small(place, f"{name}-texts", *options, *words)) == 0
    with_texts, without = (metrics(place / f"{name}-texts")[1:] for name in ("with", "without"))
    assert with_texts[0]["divergence"] == without[0]["divergence"], "texts are no tokens of the divergence"
    assert with_texts[-1]["divergence"] != without[-1]["divergence"] and all(s["skipped"] == 0 for s in with_texts)


def test_evaluation_reports_the_exact_divergence_whatever_the_row(place: Path) -> None:
    starts = set()
    for name in DISTILLING:
        words = ["--algorithm", name, "--teacher", str(place / "teacher")]
        assert main(small(place, name, *words)) == 0
        starts.add(metrics(place / name)[0]["eval/divergence"])
    assert len(starts) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--teacher is missing"),
        (["--teacher", "foreign"], "foreign has another tokenizer"),
        (["--teacher", "nowhere"], "nowhere: no such folder"),
        (
            ["--teacher", "teacher", "--algorithm", "grpo", "--group", "2"],
            "learns from rewards and its teacher: give --env",
        ),
        (["--teachers.a", "teacher"], 'has no "teacher", and there is no --teacher: --teachers names a'),
        (
            ["--teacher", "http://localhost:9/v1"],
            "needs full distributions: give --teacher-top-k 20, use --algorithm distill-k1",
        ),
        (
            ["--teacher", "teacher", "--teacher-top-k", "5"],
            "--teacher-top-k is for endpoints, and --teacher teacher is a folder",
        ),
        (
            ["--teacher", "http://localhost:9/v1", "--teacher-top-k", "5", "--temperature", "0.7"],
            "gives log-probabilities at temperature 1: give --teacher-temperature 1",
        ),
        (
            ["--teacher", "teacher", "--algorithm", "distill-k1", "--teacher-top-k", "5"],
            "--teacher-top-k has no effect with sampled",
        ),
        (
            ["--teacher", "http://localhost:9/v1", "--algorithm", "distill-k1", "--temperature", "0.7"],
            "gives log-probabilities at temperature 1: give --teacher-temperature 1",
        ),
        (
            ["--teacher", "http://localhost:9/v1", "--algorithm", "distill-k1"],
            "not answer: ClientConnectorError.*check that the server runs",
        ),
    ],
)
def test_teacher_that_cannot_teach_is_refused_in_one_line(
    place: Path, words: list[str], said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    monkeypatch.chdir(place)
    assert main(small(place, "refused", *words)) == 2
    told = capsys.readouterr().err
    assert re.search(said, told), told
    assert told.count("\n") == 1 and not (place / "refused").exists()


def test_row_with_a_teacher_is_refused_by_rl(place: Path, capsys: Any) -> None:
    rows, student = str(place / "rows.jsonl"), str(place / "student")
    words = ["--tasks", rows, "--model", student, "--out", str(place / "rl"), "--env", "arithmetic"]
    assert main(["rl", *words, "--algorithm", "distill-k1"]) == 2
    assert "run it with posttrain distill --teacher FOLDER" in capsys.readouterr().err


# -- endpoints ---------------------------------------------------------------------------------------------------------

CLOSED = (0, b"")  # the connection, instead of an answer


class Server:
    """A real one on this machine, that scores prompts with a model, in the form of OpenAI or of vLLM."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.asked, self.form, self.failing = model, 0, "openai", list[tuple[int, bytes]]()
        self.models, self.authorization, self.most = ["teacher"], "", WORDS.vocab_size
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.authorization = self.headers.get("Authorization", "")
                self.answer(200, json.dumps({"data": [{"id": name} for name in server.models]}).encode())

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked += 1
                if asked["logprobs"] > server.most:
                    self.answer(400, b'{"message": "more than max_logprobs"}')
                    return
                self.answer(*(server.failing.pop(0) if server.failing else (200, server.scored(asked))))

            def answer(self, status: int, body: bytes) -> None:
                if (status, body) == CLOSED:
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}/v1"
        Thread(target=self.http.serve_forever, daemon=True).start()

    def scored(self, asked: dict[str, Any]) -> bytes:
        assert asked["echo"] and asked["model"] == "teacher"
        tokens = asked["prompt"]
        logs = distributions(self.model, tokens, 1.0)
        values = [None, *(logs[t - 1, tokens[t]].item() for t in range(1, len(tokens)))]
        likeliest = [{token: value} for token, value in zip(tokens[1:], values[1:], strict=True)]
        for t, named in enumerate(likeliest):
            top = logs[t].topk(asked["logprobs"])
            named |= dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        if self.form == "vllm":
            listed = [{str(id): {"logprob": logp, "rank": 1} for id, logp in named.items()} for named in likeliest]
            return json.dumps({"choices": [{"text": "x", "prompt_logprobs": [None, *listed]}]}).encode()
        as_ids = asked.get("return_tokens_as_token_ids") and self.form != "plain"
        texts = [f"token_id:{id}" if as_ids else WORDS.decode([id]) for id in range(WORDS.vocab_size)]
        tops = [{texts[id]: logp for id, logp in named.items()} for named in likeliest]
        own = {"token_logprobs": [*values, -0.5], "tokens": [*(texts[id] for id in tokens), "x"]}
        return json.dumps({"choices": [{"text": "x", "logprobs": {**own, "top_logprobs": [None, *tops, {}]}}]}).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(tiny(WORDS, seed=4, context=128))
    yield found
    found.http.shutdown()
    found.http.server_close()


@pytest.mark.parametrize("form", ["openai", "vllm"])
def test_endpoint_says_what_the_same_model_in_a_folder_says(server: Server, form: str) -> None:
    server.form = form
    rollouts = rollouts_of()
    learner = LocalLearner(tiny(WORDS), Optimization(), others={TEACHER: tiny(WORDS, seed=4, context=128)})
    here = Teachers(WORDS, {TEACHER: 128}).logp(learner, rollouts, 60)
    there = Teachers(WORDS, {}, {TEACHER: RemoteTeacher(server.address)}).logp(learner, rollouts, 60)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(here, there, strict=True)) and len(here) == 6


@pytest.fixture
def remote(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteTeacher]:
    """A teacher that waits no time between its calls."""
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.001)
    with closing(RemoteTeacher(server.address)) as found:
        yield found


def transcripts_of(count: int) -> list[Transcript]:
    return [t for r in rollouts_of() for t in r.transcripts][:count]


@pytest.mark.parametrize(
    "trouble",
    [(429, b"slow down"), (500, b"oops"), (503, b"<html>busy</html>"), (408, b""), CLOSED],
    ids=["429", "500", "503", "408", "closed"],
)
def test_teacher_is_asked_again_where_that_may_help(
    server: Server, remote: RemoteTeacher, trouble: tuple[int, bytes]
) -> None:
    said = remote.logp(transcripts_of(2))
    server.asked, server.failing = 0, [trouble, trouble]
    again = remote.logp(transcripts_of(2))
    assert server.asked == 4 and all(torch.equal(a, b) for a, b in zip(said, again, strict=True))


@pytest.mark.parametrize(
    "status, body, told",
    [
        (200, b"<html>no</html>", "sent a page of HTML instead of an answer; it must be an OpenAI-compatible endpoint"),
        (200, b"hello", "sent 'hello', which is no JSON, instead of an answer"),
        (200, b"{}", "an answer without choices"),
        (
            401,
            b'{"error": {"message": "wrong key"}}',
            "HTTP 401, it refuses the key (wrong key); check the environment",
        ),
        (403, b"no entry", "HTTP 403, it refuses the key (no entry); check the environment variable OPENAI_API_KEY"),
        (404, b"", "HTTP 404; an endpoint usually ends in /v1; check its address and model"),
        (400, b'{"message": "too long"}', "HTTP 400 (too long); look at its address and model"),
        (200, b'{"choices": [{"logprobs": {"token_logprobs": [null, -1.0]}}]}', "2 log-probabilities for"),
        *(
            (200, b'{"choices": [{"logprobs": {"token_logprobs": [%s]}}]}' % b",".join([own] * 99), told)
            for own, told in (
                (b"NaN", "log-probability nan"),
                (b"true", "log-probability True"),
                (b"0.5", "log-probability 0.5"),
                (b"-1e300", "log-probability -1e+300"),
                (b"-1" + b"0" * 400, "log-probability -1000"),
            )
        ),
    ],
)
def test_teacher_that_another_call_cannot_help_is_told_at_once_in_one_line(
    server: Server, remote: RemoteTeacher, status: int, body: bytes, told: str
) -> None:
    server.failing = [(status, body)] * 9
    with pytest.raises(UserError) as refused:
        remote.logp(transcripts_of(1))
    assert told in str(refused.value) and "\n" not in str(refused.value) and server.asked == 1


def test_teacher_that_goes_down_is_given_up_after_the_attempts_of_one_call(
    server: Server, remote: RemoteTeacher
) -> None:
    transcripts = transcripts_of(3) * 20
    server.failing = [(503, b"busy")] * 10_000
    with pytest.raises(UserError, match=r"HTTP 503 \(busy\); check that the server runs, and its address and model"):
        remote.logp(transcripts)
    assert 7 <= server.asked < 60 * 7
    server.failing = []
    assert len(remote.logp(transcripts)) == 60


def test_teacher_gets_the_key_of_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    RemoteTeacher(server.address).close()
    assert server.authorization == "Bearer secret"
    monkeypatch.setenv("OPENAI_API_KEY", "sec\nret")
    with pytest.raises(UserError, match="OPENAI_API_KEY holds no key"):
        RemoteTeacher(server.address)


def test_teacher_that_is_not_there_is_told(server: Server) -> None:
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(UserError, match="ClientConnectorError.*check that the server runs, and its address and model"):
        RemoteTeacher(server.address)


def test_endpoint_with_several_models_needs_a_name(server: Server) -> None:
    server.models = ["teacher", "another"]
    with pytest.raises(UserError, match="serves teacher, another: choose one of them"):
        RemoteTeacher(server.address)
    with closing(RemoteTeacher(f"{server.address}#teacher")) as named:
        assert named.model == "teacher"


def test_endpoint_of_another_tokenizer_is_refused(remote: RemoteTeacher) -> None:
    remote.check(WORDS.encode("1+2=3"), WORDS)
    other = Tokenizer.train(["=+9876543210"], 64, "characters")
    with pytest.raises(UserError, match="has another tokenizer"):
        remote.check(other.encode("1+2=3"), other)


def test_run_taught_by_an_endpoint_is_that_taught_by_the_folder(server: Server, place: Path) -> None:
    for name, teacher in (("near", str(place / "teacher")), ("far", server.address)):
        assert main(small(place, name, "--algorithm", "distill-k1", "--teacher", teacher)) == 0
    for one, other in zip(metrics(place / "near")[1:], metrics(place / "far")[1:], strict=True):
        assert one["divergence"] == pytest.approx(other["divergence"], abs=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


# -- the likeliest tokens of an endpoint -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["openai", "vllm"])
def test_endpoint_names_the_likeliest_tokens_of_the_model_and_the_sampled_one(server: Server, form: str) -> None:
    server.form = form
    rollouts = rollouts_of()
    rollouts[1].task["teacher_prompt"] = "9-9=0, so "
    with closing(RemoteTeacher(server.address)) as remote:
        remote.check_top(3)
        teachers = Teachers(WORDS, {}, {TEACHER: remote})
        told, sampled = teachers.top(rollouts, 3, torch.device("cpu")), teachers.logp(learner_of(), rollouts, 60)
    added = 0
    for taught, top, one in zip(teachers.taught(rollouts), told, sampled, strict=True):
        (read,) = taught.transcripts
        logs = distributions(server.model, read.tokens, 1.0)
        assert torch.equal(top.sampled, one) and top.ids.shape == top.logp.shape == (len(one), 4)
        for row, place in enumerate(read.scored.tolist()):
            likeliest, token = logs[place - 1].topk(3).indices.tolist(), read.tokens[place]
            expected = likeliest if token in likeliest else [*likeliest, token]
            assert top.ids[row].tolist() == [*expected, -1][:4]
            assert torch.allclose(top.logp[row, : len(expected)], logs[place - 1, expected], atol=1e-6)
            added += token not in likeliest
    assert 0 < added < sum(map(len, sampled))


@pytest.mark.parametrize("budget", [30, 10_000])
@pytest.mark.parametrize("name", ["distill-reverse-kl", "distill-forward-kl", "distill-jsd"])
def test_loss_of_likeliest_tokens_is_the_mean_of_a_loop_over_their_cells(
    server: Server, remote: RemoteTeacher, name: str, budget: int
) -> None:
    """The gradient too, whatever the micro-batches; and the record has the teacher's values of the sampled tokens."""
    row = chosen_row(find(name), teacher_top_k=3, teacher_temperature=1.0)
    learner, rollouts = LocalLearner(tiny(WORDS, dtype=torch.float64), Optimization(), temperature=0.8), rollouts_of()
    teachers, stats = Teachers(WORDS, {}, {TEACHER: remote}), Stats()
    credited = credit(row, rollouts, learner, budget, {}, None, stats, teachers)
    ledger = Ledger(row, 1, rollouts, [], TokenRecording())
    ledger.credit(credited)
    size = Size(3, 2, budget)
    batches = Minibatches(row, learner, size, 0, None, (), None, teachers).updates(1, credited, {}, ledger)[0]()
    objective, told = PolicyObjective(row), Stats()
    for batch in batches:
        assert not batch.readings
        objective(learner._outputs(learner.model, batch, objective.wants), batch, told).backward()
    beta = {"distill-reverse-kl": 1.0, "distill-forward-kl": 0.0, "distill-jsd": 0.5}[name]
    parameters = [p for p in learner.model.parameters() if p.grad is not None]
    found = [p.grad.clone() for p in parameters if p.grad is not None]
    own = []
    for rollout, top in zip(rollouts, credited.per_token["teacher_ids"], strict=True):
        (read,) = rollout.transcripts
        hidden = learner.model(torch.tensor(read.tokens), torch.arange(len(read.tokens)), causal)
        log_p = (hidden @ learner.model.head.weight.T / 0.8).log_softmax(-1)
        log_q = distributions(server.model, read.tokens, 1.0).double()
        for ids, place in zip(top.tolist(), read.scored.tolist(), strict=True):
            own.append(over_cells(log_p[place - 1], log_q[place - 1], [i for i in ids if i >= 0], beta))
    loss = torch.stack(own).mean()
    assert told.means()["divergence"] == pytest.approx(loss.item(), rel=1e-5)
    expected = torch.autograd.grad(loss, parameters)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(
        credited.per_token["teacher_logp"], teachers.logp(learner, rollouts, budget), strict=True
    ))  # fmt: skip


def over_cells(log_p: Tensor, log_q: Tensor, named: list[int], beta: float) -> Tensor:
    """The divergence over these tokens and all others together."""
    other = torch.ones(len(log_p), dtype=torch.bool)
    other[named] = False
    p, q = (torch.stack([*(x[i].exp() for i in named), x[other].exp().sum()]) for x in (log_p, log_q))
    m = (1 - beta) * p + beta * q
    if beta in (0.0, 1.0):
        return (p * (p / q).log()).sum() if beta else (q * (q / p).log()).sum()
    return ((1 - beta) * p * (p / m).log() + beta * q * (q / m).log()).sum()


def changed(server: Server, tokens: Sequence[int], change: Callable[[dict[str, Any]], None]) -> bytes:
    """The server's answer with a change in its choice."""
    asked = {
        "echo": True,
        "model": "teacher",
        "prompt": list(tokens),
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    answer = json.loads(server.scored(asked))
    change(answer["choices"][0])
    return json.dumps(answer).encode()


@pytest.mark.parametrize(
    ("form", "change", "told"),
    [
        ("openai", lambda c: c["logprobs"].pop("top_logprobs"), "sent the likeliest tokens at 0 of"),
        ("openai", lambda c: c["logprobs"].update(top_logprobs="no"), "sent the likeliest tokens at 0 of"),
        ("openai", lambda c: c["logprobs"]["top_logprobs"].__setitem__(-3, None), "sent 0 likeliest tokens, and --teacher-"),
        ("openai", lambda c: c["logprobs"]["top_logprobs"][-3].update({"token_id:5": None}), "sent a log-probability None"),
        ("openai", lambda c: c["logprobs"]["top_logprobs"][-3].update({"token_id:5": math.inf}), "log-probability inf"),
        ("openai", lambda c: c["logprobs"]["top_logprobs"][-3].update({"token_id:5": -0.0}), "that add up to"),
        ("openai", lambda c: c["logprobs"]["top_logprobs"][-3].update({"token_id:x": -1.0}), "sent the token 'token_id:x'"),
        ("openai", lambda c: c["logprobs"]["top_logprobs"][-3].update({"5": -1.0}), "sent the token '5' in place of its id"),
        ("openai", lambda c: c["logprobs"]["top_logprobs"][-3].update({f"token_id:{9**20}": -1.0}), "sent the token"),
        ("openai", lambda c: c.update(logprobs=[]), "0 log-probabilities for"),
        ("vllm", lambda c: c["prompt_logprobs"].__setitem__(-2, []), "a log-probability None"),
        ("vllm", lambda c: c["prompt_logprobs"][-2].update({" a": {"logprob": -1.0}}), "sent the token ' a'"),
        ("vllm", lambda c: c.update(prompt_logprobs="no"), "0 log-probabilities for"),
    ],
)  # fmt: skip
def test_damaged_likeliest_tokens_are_told_in_one_line(
    server: Server, remote: RemoteTeacher, form: str, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    server.form = form
    transcripts = transcripts_of(1)
    tokens = transcripts[0].tokens[: int(transcripts[0].scored[-1]) + 1]
    assert remote.top(transcripts, 2)[0].ids.shape[1] == 3
    server.failing = [(200, changed(server, tokens, change))]
    with pytest.raises(UserError) as refused:
        remote.top(transcripts, 2)
    assert told in str(refused.value) and "\n" not in str(refused.value)


def test_endpoint_that_names_fewer_tokens_or_no_ids_is_refused_before_the_run(
    server: Server, place: Path, capsys: Any
) -> None:
    words = ["--teacher", server.address, "--teacher-top-k", "9"]
    for form, most, told in (("openai", 8, "does not name 9 likeliest tokens: HTTP 400"), ("plain", 99, "of its id")):
        server.form, server.most = form, most
        assert main(small(place, "refused", *words)) == 2
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1 and not (place / "refused").exists()


def test_run_with_all_tokens_of_an_endpoint_is_that_taught_by_the_folder(server: Server, place: Path) -> None:
    every = ["--teacher-top-k", str(WORDS.vocab_size)]
    for name, words in (("whole", [str(place / "teacher")]), ("named", [server.address, *every])):
        assert main(small(place, name, "--minibatches", "2", "--teacher", *words)) == 0
    for one, other in zip(metrics(place / "whole")[1:], metrics(place / "named")[1:], strict=True):
        assert one["divergence"] == pytest.approx(other["divergence"], abs=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    told = json.loads((place / "named" / "run.json").read_text())
    assert any(
        f"asked for log-probabilities of the sampled and its {WORDS.vocab_size} likeliest" in s for s in told["sizes"]
    )
