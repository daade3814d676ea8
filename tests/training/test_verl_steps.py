"""Two steps of a run of verl, update by update: what verl's trainer computed is what the imported recipe computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT

from posttrain.algorithms.all_algorithms import EVERY
from posttrain.algorithms.policy import PolicyObjective
from posttrain.apps.migration.migrate import recipe_for
from posttrain.config.resolve import filled
from posttrain.config.training import RL
from posttrain.core.batch import Stats
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, StopReason
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import load_model
from posttrain.training.adjust import adjust
from posttrain.training.sources import minibatches
from posttrain.training.sources.collector import Size
from posttrain.training.sources.credit_assignment import credit
from posttrain.training.sources.ledger import Ledger
from posttrain.training.sources.token_recording import TokenRecording

VERL = json.loads((ROOT / "tests" / "vectors" / "verl_steps.json").read_text(encoding="utf-8"))
"""Options, rollouts and updates of verl 0.9.1, written by benchmarks/peers/verl_compare.py."""
BUDGET = 1000


def rollouts_of(step: list[dict[str, Any]], version: int) -> list[Rollout]:
    found = []
    for prompt, reply, reward in (rollout for update in step for rollout in update["rollouts"]):
        transcript = Transcript()
        transcript.observe(prompt)
        transcript.sample(Completion(0, reply, [0.0] * len(reply), "", StopReason.LENGTH, version))
        found.append(Rollout({"id": str(prompt)}, str(prompt), [transcript], reward))
    return found


def ending_model(folder: Path) -> Any:
    """The model of the run, whose replies end early: its end token has the embedding of the full stop."""
    model = load_model(folder)
    with torch.no_grad():
        embedding = next(p for p in model.parameters() if p.shape == (512, 64))
        embedding[2] = embedding[426]
    return model


def test_updates_of_a_verl_command_are_those_of_verl(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Learning rate, loss, KL, entropy, share of clipped tokens and gradient norm of eight updates, one after another."""
    words = [f"{name}={value}" for name, value in VERL["options"].items()]
    (tmp_path / "run.sh").write_text(" ".join(["python3 -m verl.trainer.main_ppo", *words]), encoding="utf-8")
    lines = recipe_for(str(tmp_path / "run.sh"), None, 80, None).lines
    config = filled(RL, {name: value for name, (value, _) in lines.items() if "." not in name})
    algorithm = adjust(EVERY[config.algorithm], config)
    names = ("lr", "schedule", "warmup", "betas", "weight_decay", "max_grad_norm")
    plan = Optimization(**{name: getattr(config, name) for name in names})
    policy, reference = (ending_model(data / "models" / "stories260K") for _ in range(2))
    learner = LocalLearner(policy, plan, others={REFERENCE: reference})
    parts = algorithm.minibatches
    dealt = [
        g for first in range(config.prompts // parts) for g in range(first, config.prompts, config.prompts // parts)
    ]
    monkeypatch.setattr(minibatches, "order", lambda *_: dealt)  # groups to updates in the order of the file
    size, recording = Size(config.prompts, config.group, BUDGET), TokenRecording()
    assert algorithm.kl is not None and algorithm.entropy is not None
    coefficients = {"kl": algorithm.kl.beta, "entropy": algorithm.entropy.coefficient}
    for number, step in enumerate(VERL["steps"], 1):
        rollouts = rollouts_of(step, learner.version)
        credited = credit(algorithm, rollouts, learner, BUDGET, coefficients, None, Stats())
        ledger = Ledger(algorithm, number, rollouts, [], recording)
        ledger.credit(credited)
        source = minibatches.Minibatches(algorithm, learner, size, 0, None, (), None)
        builds = source.updates(number, credited, coefficients, ledger)
        assert len(builds) == len(step)
        for build, expected in zip(builds, step, strict=True):
            stats = learner.update(build(), PolicyObjective(algorithm))
            found = {name: total / max(1, count) for name, (total, count) in stats.items()}
            found["clipped"] = found["ratio/clipped_low"] + found["ratio/clipped_high"]
            for name, value in expected["numbers"].items():
                assert found[name] == pytest.approx(value, rel=5e-4, abs=2e-6), (number, name)
