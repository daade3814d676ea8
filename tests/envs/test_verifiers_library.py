"""Environments of the `verifiers` library run unchanged, and their rollouts are ours. See `make test-verifiers`."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from places import ROOT, TESTS
from served import served

import posttrain
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import Invalid, Sampling, StopReason, UserError
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.envs.bridges.verifiers import Taskset, rollouts
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import EpisodeLimits, Player
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.packing import collate

PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
needs_verifiers = pytest.mark.skipif(
    not PYTHON.with_name("ready").exists() and not (ROOT / ".venv-verifiers" / "ready").exists(),
    reason="the verifiers library is not installed here: make test-verifiers",
)
pytestmark = pytest.mark.timeout(600)  # each agent is a program of its own, and takes seconds to start

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")
SPECIAL += ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
SEAT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
BLOCK: dict[str, Any] = {"taskset": {"id": "secret_number"}, "player": SEAT}
CONTEXT = 512


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """One with the special tokens of Qwen3, whose renderer the library has."""
    trained = Tokenizer.train(["higher lower guess 0123456789.\n"], 300, "bpe", SPECIAL)
    return Tokenizer(trained.backend, {**trained.config, "eos_token": "<|im_end|>"}, CHAT)


@pytest.fixture(scope="module")
def folder(words: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model") / "tiny"
    tiny(words, context=CONTEXT).save(found)
    words.save(found)
    return found


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps what it makes below the home folder: here, that of all these tests."""
    found = ROOT / "runs" / "verifiers-home"
    if PYTHON.exists():
        found.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("HOME", str(found))


def taskset(folder: Path, kind: str, **more: Any) -> Taskset:
    train = {"type": "train", "renderer": {"name": "qwen3", "thinking_retention": "all"}}
    client = {**train, "renderer_model_name": str(folder)} if kind == "train" else {"type": "eval"}
    path = [str(TESTS / "verifiers_taskset")]
    return Taskset(**{"env": BLOCK, "python": str(PYTHON), "client": client, "path": path, **more})


def played(words: Tokenizer, which: Taskset, count: int = 3, **limits: Any) -> list[Rollout]:
    engine = LocalEngine(tiny(words, context=CONTEXT), words, slots=4)
    rows = [Episode({"index": place}, str(place), place) for place in range(count)]
    with EnvPool(which.environment(unfinished=-1.0), 1, seconds=120) as pool:
        return Player(pool, engine, words, Sampling(max_tokens=12), CONTEXT, **limits).play(rows)


RECORD: dict[str, Any] = {
    "traces": [
        {
            "task": {"data": {"idx": 3, "secret": 3}, "key": "k"},
            "agent": {"trainable": True},
            "rewards": {"found": {"score": 1.0, "weight": 1.0}, "brief": {"score": 1.0, "weight": 0.5}, "off": None},
            "nodes": [
                {"message": {"role": "user", "content": "a"}, "token_ids": [1, 2], "mask": [False, False]},
                {
                    "parent": 0, "sampled": True, "message": {"role": "assistant", "content": "b"},
                    "token_ids": [3, 4, 5], "mask": [False, True, True], "logprobs": [-0.5, -1.5],
                },
                {"parent": 1, "message": {"role": "user", "content": "c"}, "token_ids": [6], "mask": [False]},
                {
                    "parent": 2, "sampled": True, "message": {"role": "assistant", "content": "d"},
                    "token_ids": [7], "mask": [True], "logprobs": [-2.5],
                },
                {"parent": 1, "message": {"role": "user", "content": "e"}, "token_ids": [8], "mask": [False]},
                {
                    "parent": 4, "sampled": True, "message": {"role": "assistant", "content": "f"},
                    "token_ids": [9], "mask": [True], "logprobs": [-3.5],
                },
            ],
        },
        {"task": {"data": {}}, "agent": {"trainable": False}, "rewards": {}, "nodes": []},
    ]
}  # fmt: skip


def test_a_branch_is_a_transcript_and_what_two_share_is_learned_from_once() -> None:
    [rollout] = rollouts([json.dumps(RECORD)])
    first, second = rollout.transcripts
    assert first.tokens == [1, 2, 3, 4, 5, 6, 7] and second.tokens == [1, 2, 3, 4, 5, 8, 9]
    assert first.scored.tolist() == [3, 4, 6] and second.scored.tolist() == [6]
    assert (
        first.logp == [-0.5, -1.5, -2.5] and second.sampler_logp is not None and second.sampler_logp.tolist() == [-3.5]
    )
    assert rollout.reward == 1.5 and rollout.rewards == {"found": 1.0, "brief": 0.5} and rollout.group == "k"
    assert [span.kind for span in first.spans] == [
        SpanKind.PROMPT, SpanKind.OBSERVATION, SpanKind.SAMPLED, SpanKind.OBSERVATION, SpanKind.SAMPLED,
    ]  # fmt: skip


def test_an_interpreter_that_there_is_not_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot list the tasks: .*No such file"):
        Taskset(BLOCK, str(tmp_path / "python")).rows()


@pytest.mark.long
@needs_verifiers
def test_its_train_client_gets_transcripts_that_are_its_own_branches_to_the_last_bit(
    words: Tokenizer, folder: Path, tmp_path: Path
) -> None:
    record = tmp_path / "records.jsonl"
    ours = played(words, taskset(folder, "train", record=str(record)))
    theirs = sorted(rollouts(record.read_text().splitlines()), key=lambda rollout: rollout.task["secret"])
    for own, rollout in zip(ours, theirs, strict=True):
        [transcript], [branch] = own.transcripts, rollout.transcripts
        assert transcript.tokens == branch.tokens and transcript.logp == branch.logp
        assert transcript.scored.tolist() == branch.scored.tolist()
        assert own.reward == pytest.approx(rollout.reward) and own.rewards == pytest.approx(rollout.rewards)
    assert any(len(rollout.turns) == 6 for rollout in ours), "three turns"


@pytest.mark.long
@needs_verifiers
def test_both_of_its_clients_get_the_same_tokens(words: Tokenizer, folder: Path) -> None:
    train, chat = (played(words, taskset(folder, kind)) for kind in ("train", "eval"))
    assert [r.transcripts[0].as_dict() for r in train] == [r.transcripts[0].as_dict() for r in chat]


@pytest.mark.long
@needs_verifiers
def test_an_episode_that_has_run_out_is_scored_or_says_so(words: Tokenizer, folder: Path) -> None:
    for rollout in played(words, taskset(folder, "train"), 2, bounds=EpisodeLimits(turns=1)):
        assert rollout.n_sampled <= 12 and not isinstance(rollout.reward, Invalid)
        if len(rollout.turns) > 2:
            assert rollout.stop is StopReason.TURNS


@pytest.mark.long
@needs_verifiers
def test_what_the_library_refuses_is_told(words: Tokenizer, folder: Path) -> None:
    wrong = replace(taskset(folder, "train"), env={"taskset": {"id": "unheard_of"}})
    with pytest.raises(UserError, match="taskset 'unheard_of' not found"):
        wrong.rows()
    [rollout] = played(words, wrong, 1)
    assert isinstance(rollout.reward, Invalid) and "'unheard_of' not found" in rollout.reward.reason
    beyond = taskset(folder, "train")
    engine = LocalEngine(tiny(words, context=CONTEXT), words)
    with EnvPool(beyond.environment(), 1, seconds=120) as pool:
        [rollout] = Player(pool, engine, words, Sampling(), CONTEXT).play([Episode({"index": 99}, "0", 0)])
    assert isinstance(rollout.reward, Invalid) and "there is no task 99" in rollout.reward.reason


@pytest.mark.long
@needs_verifiers
def test_its_own_command_evaluates_a_served_policy(words: Tokenizer, folder: Path, tmp_path: Path) -> None:
    model = tiny(words, context=CONTEXT)
    with served(LocalEngine(model, words, slots=4), words, CONTEXT, name=str(folder)) as server:
        command = [
            str(PYTHON.with_name("vf-eval")), "secret_number", "-n", "2", "-m", str(folder), "-c", "2",
            "--client.type", "train", "--client.base-url", f"{server.url}/v1", "--client.renderer.name", "qwen3",
            "--client.renderer.thinking-retention", "all", "--sampling.max-tokens", "12", "--no-push", "--no-rich",
            "--env.player.runtime.type", "subprocess", "--env.player.harness.id", "null", "-o", str(tmp_path),
        ]  # fmt: skip
        path = f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"
        variables = {**os.environ, "PYTHONPATH": str(TESTS / "verifiers_taskset"), "PATH": path}
        ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    [traces] = tmp_path.rglob("traces.jsonl")
    found = [transcript for rollout in rollouts(traces.read_text().splitlines()) for transcript in rollout.transcripts]
    assert len(found) == 2
    batch = collate([[t] for t in found], range(len(found)), weight=torch.ones(len(found)))
    (outputs,) = LocalLearner(model, Optimization()).evaluate([batch])
    assert batch.sampler_logp is not None
    assert (outputs.logp - batch.sampler_logp).abs().max() < 2e-4  # its records have four digits


@pytest.mark.long
@needs_verifiers
def test_a_policy_is_trained_in_it(folder: Path, tmp_path: Path) -> None:
    which = taskset(folder, "train")
    rows = which.rows(4)
    assert [row["secret"] for row in rows] == [0, 1, 2, 3]
    run = posttrain.rl(
        rows, env=which.environment(), model=str(folder), out=str(tmp_path / "run"), steps=2, prompts=2, group=2,
        max_tokens=12, env_workers=1, env_timeout=120.0, quiet=True, lr=1e-3, precision="float32",
    )  # fmt: skip
    assert len(run.metrics) == 2 and all(line["sampler/kl"] < 1e-6 for line in run.metrics)
    assert all(line.get("invalid", 0) == 0 for line in run.metrics) and run.metrics[0]["reward/brief"] >= 0
