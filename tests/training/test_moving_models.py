"""References and teachers that move to the policy: by how much, when, what is saved, and what cannot move."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from safetensors.torch import load_file
from update_cases import WORDS

import posttrain
from posttrain.cli.main import main
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import causal, new_decoder
from posttrain.models.native.decoder_writer import save_model
from posttrain.runs.checkpoint import newest
from posttrain.runs.run_reading import read_metrics
from posttrain.training.sources.teacher_targets import TEACHER

ROWS = [{"id": str(i), "prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(12)]
PAIRS = [{"prompt": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": "9" * (i % 3 + 1)} for i in range(12)]
QUICK: dict[str, Any] = {"threads": 1, "quiet": True, "overwrite": True, "lr": 1e-2, "schedule": "constant"}
PREFER = "prefer --tasks pairs.jsonl --model start --rows 4 --steps 4 --algorithm tr-dpo".split()
DISTILL = (
    "distill --tasks rows.jsonl --model start --teacher start --prompts 2 --group 2 --max-tokens 6 --steps 4".split()
)
DISTILL += "--env-workers 0 --teacher-every 1".split()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, rows in (("rows", ROWS), ("pairs", PAIRS)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_model(tiny(WORDS), Path("start"), WORDS)
    shape = replace(tiny(WORDS).config, hidden=40)
    save_model(new_decoder(shape, 4), Path("wider"), WORDS)
    return tmp_path


def digits(task: Any, reply: str) -> float:
    """A reward that differs between the replies of a model that knows nothing."""
    return sum(c.isdigit() for c in reply) / (len(reply) + 1)


# -- by how much -------------------------------------------------------------------------------------------------------


def test_a_move_goes_the_given_share_of_the_way_and_moves_nothing_else() -> None:
    policy, frozen, other = (tiny(WORDS, seed).double() for seed in (0, 1, 2))
    before = {name: p.detach().clone() for name, p in frozen.named_parameters()}
    apart = {name: p.detach().clone() for name, p in other.named_parameters()}
    learner = LocalLearner(policy, Optimization(), others={REFERENCE: frozen, TEACHER: other})
    learner.move(REFERENCE, 0.25)
    own = dict(policy.named_parameters())
    for name, p in frozen.named_parameters():
        assert torch.allclose(p, 0.75 * before[name] + 0.25 * own[name], rtol=0, atol=1e-15)
    learner.move(REFERENCE, 1.0)
    assert all(torch.equal(p, own[name]) for name, p in frozen.named_parameters())
    assert all(torch.equal(p, apart[name]) for name, p in other.named_parameters()) and learner.moved == {REFERENCE}


def test_a_move_of_bfloat16_weights_to_the_policy_rounds_once() -> None:
    policy, frozen = tiny(WORDS, 0), tiny(WORDS, 1).bfloat16()
    learner = LocalLearner(policy, Optimization(), others={TEACHER: frozen})
    learner.move(TEACHER, 1.0)
    own = dict(policy.named_parameters())
    assert all(torch.equal(p, own[name].bfloat16()) for name, p in frozen.named_parameters())


# -- a reference of preference algorithms ------------------------------------------------------------------------------


def response_logp(model: Any, prompt: str, response: str) -> float:
    """log-probability of a response and its end, one sequence at a time."""
    asked = WORDS.encode(prompt, start=True)
    tokens = torch.tensor([*asked, *WORDS.encode(response), WORDS.eos_id or 0])
    with torch.no_grad():
        logs = (model(tokens, torch.arange(len(tokens)), causal) @ model.head.weight.T).log_softmax(-1)
    return sum(logs[t - 1, tokens[t]].item() for t in range(len(asked), len(tokens)))


def loss_by_hand(policy: Any, reference: Any, beta: float = 0.1) -> float:
    """DPO's equation 7 over all pairs, the batch of every step below."""
    losses = []
    for pair in PAIRS:
        margin = 0.0
        for side, sign in (("chosen", 1), ("rejected", -1)):
            margin += sign * (
                response_logp(policy, pair["prompt"], pair[side]) - response_logp(reference, pair["prompt"], pair[side])
            )
        losses.append(math.log1p(math.exp(-beta * margin)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("every", "rate"), [(1, 0.6), (1, 1.0), (2, 0.25), (0, 1.0)])
def test_dpo_is_measured_against_the_reference_as_it_has_moved(place: Path, every: int, rate: float) -> None:
    steps = 4
    settings = {"reference_every": every, **({"reference_update_rate": rate} if every else {})}
    run = posttrain.prefer(
        PAIRS, model="start", algorithm="tr-dpo", out="run", steps=steps, rows=len(PAIRS), save_every=1, keep=9,
        settings=settings, **QUICK,
    )  # fmt: skip
    policies = [load_model(Path("start")), *(load_model(f) for f in sorted((run.path / "checkpoints").iterdir()))]
    weights = [dict(p.named_parameters()) for p in policies]
    reference = load_model(Path("start")).requires_grad_(False)
    losses = [m["loss"] for m in read_metrics(run.path) if "loss" in m]
    assert len(losses) == steps and losses[0] == pytest.approx(math.log(2), abs=1e-6)
    for step in range(steps):
        assert losses[step] == pytest.approx(loss_by_hand(policies[step], reference), abs=2e-5)
        if every and (step + 1) % every == 0:
            for name, p in reference.named_parameters():
                p.copy_((1 - rate) * p + rate * weights[step + 1][name])


def test_held_out_pairs_are_measured_against_the_moved_reference_too(place: Path) -> None:
    """A reference that has become the policy finds no implicit reward in any pair."""
    words = [*PREFER, "--reference-update-rate", "1", "--held-out", "0.25", "--eval-every", "2", "--out", "run"]
    assert main([*words, *"--threads 1 --quiet --lr 1e-2".split()]) == 0
    evaluated = [m for m in read_metrics(Path("run")) if "eval/margin" in m]
    assert evaluated and all(abs(m["eval/margin"]) < 1e-5 for m in evaluated)


# -- a teacher ---------------------------------------------------------------------------------------------------------


def divergences(out: str, **settings: Any) -> list[float]:
    run = posttrain.distill(
        ROWS, "start", teacher="start", algorithm="grpo", env=digits, out=out, steps=4, prompts=3, group=4,
        max_tokens=6, env_workers=0, settings=settings, **QUICK,
    )  # fmt: skip
    return [m["divergence"] for m in read_metrics(run.path) if "divergence" in m]


def test_a_teacher_that_becomes_the_policy_after_each_step_never_disagrees_with_it(place: Path) -> None:
    """Rewards move the policy, and the teacher started as the policy: only one that follows stays equal to it."""
    fixed, slow, current = (
        divergences("fixed"),
        divergences("slow", teacher_every=1, teacher_update_rate=0.5),
        divergences("current", teacher_every=1),
    )
    assert fixed[0] == slow[0] == current[0] == 0 and all(abs(d) < 1e-9 for d in current)
    assert all(d > 1e-6 for d in fixed[1:]) and all(1e-7 < s < f for s, f in zip(slow[2:], fixed[2:], strict=True))


def test_a_teacher_that_moves_every_two_steps_disagrees_only_between(place: Path) -> None:
    found = divergences("every two", teacher_every=2)
    assert abs(found[2]) < 1e-9 and found[1] > 1e-6 and found[3] > 1e-6


def test_the_reference_of_rl_moves_by_its_rate(place: Path) -> None:
    """Its KL is 0 where it becomes the policy after each step, and the slower it follows the larger."""

    def measured(out: str, **settings: Any) -> list[float]:
        run = posttrain.rl(
            ROWS, digits, "start", algorithm="grpo", out=out, steps=4, prompts=3, group=4, max_tokens=6, env_workers=0,
            kl=0.05, settings=settings, **QUICK,
        )  # fmt: skip
        return [m["kl"] for m in read_metrics(run.path) if "kl" in m]

    fixed = measured("fixed")
    slow = measured("slow", reference_every=1, reference_update_rate=0.5)
    current = measured("current", reference_every=1)
    assert all(abs(kl) < 1e-7 for kl in current)
    assert all(1e-6 < a < b for a, b in zip(slow[2:], fixed[2:], strict=True))


# -- state -------------------------------------------------------------------------------------------------------------


def last(out: str) -> Path:
    found = newest(Path(out))
    assert found is not None
    return found


def content(folder: Path) -> dict[str, str]:
    files = sorted(folder.rglob("*.safetensors"))
    return {str(f.relative_to(folder)): sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.mark.parametrize("more", ["", "--lora 4"])
@pytest.mark.parametrize(
    ("words", "model"),
    [
        ([*PREFER, "--reference-every", "3"], REFERENCE),
        ([*DISTILL[:-1], "3", "--teacher-update-rate", "0.3"], TEACHER),
    ],
    ids=["prefer", "distill"],
)
def test_a_model_that_has_moved_is_saved_and_resumed_bit_for_bit(
    place: Path, words: Sequence[str], model: str, more: str
) -> None:
    """It moves after step 3 alone; the run goes on from step 4, whose checkpoint has it, to step 5."""
    words = " ".join(words).replace("--steps 4", "--steps 5").split()
    common = [*words, *more.split(), *"--threads 1 --quiet --lr 1e-2 --save-every 2 --out run".split()]
    assert main(common) == 0
    stored = load_file(last("run") / "training" / f"{model}.safetensors")
    assert stored and all((".adapter." in name) == bool(more) for name in stored), "a shared base is not saved"
    shutil.copytree("run", "again")
    shutil.rmtree(last("again"))
    assert main([words[0], "--out", "again", "--resume", "--quiet"]) == 0
    assert content(last("again")) == content(last("run"))


def test_a_teacher_with_adapters_shares_the_weights_that_they_leave(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[int, int]] = []
    begin = LocalLearner.__init__

    def opened(self: LocalLearner, model: Any, *arguments: Any, **named: Any) -> None:
        begin(self, model, *arguments, **named)
        own = {p.data_ptr() for p in model.parameters()}
        pointers = [p.data_ptr() for p in self.others[TEACHER].parameters()] if TEACHER in self.others else []
        held.append((len(pointers), sum(pointer in own for pointer in pointers)))

    monkeypatch.setattr(LocalLearner, "__init__", opened)
    for more in ([], ["--teacher-every", "1"]):
        held.clear()
        words = [w for w in DISTILL if w not in ("--teacher-every",)][:-1]
        assert main([*words, *more, *"--lora 4 --threads 1 --quiet --overwrite --out run".split()]) == 0
        (count, shared) = held[0]
        assert count > shared > 0 if more else count == shared > 0


# -- what cannot move --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*DISTILL, "--teacher", "wider"], "--teacher-every needs a teacher with the student's weights"),
        ([*DISTILL, "--teachers.a", "start"], "--teacher-every updates only the teacher of --teacher"),
        ([*DISTILL[:-2], "--teacher-update-rate", "0.5"], "no effect on a fixed teacher: leave it out, or give"),
        ([*DISTILL, "--teacher-update-rate", "0"], "--teacher-update-rate must be above 0 and at most 1, not 0"),
        ([*DISTILL, "--teacher-update-rate", "1.5"], "--teacher-update-rate must be above 0 and at most 1, not 1.5"),
        (
            [*DISTILL, "--teacher-update-rate", "0.5", "--frozen-weights", "bfloat16"],
            "--teacher-update-rate 0.5 makes changes too small for --frozen-weights bfloat16",
        ),
        ([*PREFER, "--frozen-weights", "bfloat16"], "--reference-update-rate 0.6 makes changes too small"),
        ([*PREFER, "--algorithm", "simpo", "--reference-every", "2"], "simpo: --reference-every has no effect"),
        ([*PREFER, "--algorithm", "dpo", "--reference-update-rate", "0.5"], "dpo: .*--reference-every"),
    ],
)  # fmt: skip
def test_what_cannot_move_is_refused_in_one_line(
    place: Path, words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = dict(zip(words[1::2], words[2::2], strict=True))  # an option that is given twice: the last one
    assert main([words[0], *(word for pair in given.items() for word in pair), "--out", "run"]) == 2
    told = capsys.readouterr().err
    assert re.search(said, told) and told.count("\n") == 1 and not Path("run").exists(), told


def test_a_stream_of_pairs_has_a_reference_where_it_moves(place: Path) -> None:
    """No log-probability is computed before the run, so rows without an end can be compared with a reference."""
    Path("stream.py").write_text(
        "import json\n\n\ndef rows():\n"
        "    pairs = [json.loads(line) for line in open('pairs.jsonl')]\n"
        "    while True:\n        yield from pairs\n"
    )
    words = [*PREFER, "--out", "run", *"--threads 1 --quiet".split()]
    words[words.index("pairs.jsonl")] = "stream.py:rows"
    assert main(words) == 0
    assert len([m for m in read_metrics(Path("run")) if "loss" in m]) == 4
