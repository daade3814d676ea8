"""A reference, a critic and teachers on a device of their own: the results of one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from second_device import bytes_held, second_device
from sharded import micro_batches
from sums import QUICK, SMALL, SUMS, nearness
from torch import Tensor

import posttrain
from posttrain.core.batch import Batch, Outputs, Packed, Reading, Stats
from posttrain.learners.devices import moved
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.critic import ActionValueModel, Critic, SoftStateValueModel, ValueModel
from posttrain.models.losses.likelihood import Hidden
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.kernels import build
from posttrain.runs.run_reading import read_metrics

SHAPE = DecoderConfig(41, 16, 1, 2, 1, 8, 24, 64, qk_norm=True)
CPU, SECOND = torch.device("cpu"), second_device()
KINDS: dict[str, type[Critic]] = {"values": ValueModel, "actions": ActionValueModel, "states": SoftStateValueModel}
WANTS = {
    "values": {"kl", "value", "forward_kl", "entropy"},
    "actions": {"kl", "q", "jensen_shannon"},
    "states": {"q", "value", "reverse_kl"},
}


@pytest.fixture(autouse=True)
def plain() -> Any:
    """Plain operations everywhere, since compiled ones of the processor round differently."""
    build.use(False)
    yield
    build.use(True)


class Everything:
    """A loss of all outputs."""

    def __init__(self, wants: set[str]) -> None:
        self.wants = frozenset(wants)

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        found = [outputs.logp, outputs.entropy, outputs.kl, outputs.value, outputs.reverse_kl, outputs.forward_kl]
        found += [outputs.jensen_shannon, outputs.q, outputs.expected_q]
        return sum((((x - 1) ** 2) * batch.weight).sum() for x in found if x is not None)  # type: ignore[return-value]


def learner(kind: str, places: Mapping[str, torch.device]) -> LocalLearner:
    """A learner with models in float64. `places`: device by role; else the processor."""
    model: Any = new_decoder(SHAPE, 0).double().to(places.get("policy", CPU))
    others: Any = {
        REFERENCE: new_decoder(SHAPE, 1).double().to(places.get("reference", CPU)).requires_grad_(False),
        "teacher": new_decoder(SHAPE, 2).double().to(places.get("teacher", CPU)).requires_grad_(False),
    }
    backbone: Any = new_decoder(SHAPE, 5).double()
    critic = ValueModel(SHAPE.hidden, backbone, 0) if kind == "values" else KINDS[kind](backbone, 0)  # type: ignore[call-arg, arg-type]
    critic = critic.double().to(places.get("critic", CPU))
    return LocalLearner(model, Optimization(lr=1e-2, critic_follow=0.1), others=others, critic=critic, temperature=0.9)


def batches(device: torch.device) -> list[Batch]:
    """Micro-batches that a teacher reads, with a temperature for each token."""
    found = []
    for batch in micro_batches(2):
        own = {name: getattr(batch, name) for name in ("layout", "at", "target", "rollout", "transcript")}
        heat = torch.linspace(0.5, 1.5, len(batch.at), dtype=torch.float64)
        packed = Packed(**own, temperature=heat)
        batch = replace(batch, temperature=heat, weight=batch.weight.double())
        found.append(moved(replace(batch, readings=(Reading("teacher", packed, None),)), device))
    return found


def results(of: LocalLearner, kind: str) -> list[Tensor]:
    """Return its outputs, and its weights after two updates."""
    own = batches(of.device)
    found = [of.evaluate(own, name)[0].logp for name in ("policy", REFERENCE, "teacher")]
    told = of.evaluate(own, want=frozenset(WANTS[kind]))
    found += [x for x in vars(told[0]).values() if x is not None]
    assert {x.device for x in found} == {of.device}
    for _ in range(2):
        of.update(own, Everything(WANTS[kind]))
        of.move(REFERENCE, 0.3)
    found += [p.detach() for part in of.parts for p in part.parameters.values()]
    found += [p for other in of.others.values() for p in other.parameters()]
    return [x.cpu() for x in found]


PLACES = {
    "reference": {"reference"},
    "teacher": {"teacher"},
    "critic": {"critic"},
    "all beside the policy": {"reference", "teacher", "critic"},
    "the policy alone": {"policy"},
    "policy and critic": {"policy", "critic"},
}


@pytest.mark.parametrize(
    ("kind", "roles"),
    [*(("values", roles) for roles in PLACES), *((kind, "critic") for kind in KINDS if kind != "values")],
)
def test_results_do_not_depend_on_where_models_are(kind: str, roles: str) -> None:
    ours = learner(kind, dict.fromkeys(PLACES[roles], SECOND))
    assert bytes_held() > 0
    for place, (mine, theirs) in enumerate(zip(results(ours, kind), results(learner(kind, {}), kind), strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11, msg=lambda said, n=place: f"{n}: {said}")  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["values", "actions"])
def test_only_a_critic_of_actions_gets_the_output_head(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "posttrain.learners.forward_pass.moved", lambda value, device: seen.append(value) or moved(value, device)
    )
    learner(kind, {"critic": SECOND}).evaluate(batches(CPU), want=frozenset({"value" if kind == "values" else "q"}))
    assert any(isinstance(value, Hidden) for value in seen) == (kind == "actions")


def test_a_critic_on_its_own_device_is_saved_and_continued(tmp_path: Path) -> None:
    places = {"critic": SECOND, "reference": SECOND}
    ours, theirs = learner("values", places), learner("values", {})
    results(ours, "values")
    ours.save(tmp_path)
    with torch.no_grad():
        for mine, other in zip(theirs.model.parameters(), ours.model.parameters(), strict=True):
            mine.copy_(other)
    theirs.load(tmp_path)
    for mine, other in zip(results(ours, "values"), results(theirs, "values"), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, and beside it a teacher."""
    folder = tmp_path_factory.mktemp("start")
    posttrain.sft(SUMS, out=str(folder / "policy"), steps=2, rows=4, **SMALL, **QUICK)
    posttrain.sft(SUMS, model=str(folder / "policy"), out=str(folder / "teacher"), steps=4, rows=8, lr=1e-2, **QUICK)
    return folder


QUICK_RL: dict[str, Any] = {
    **QUICK, "env": nearness, "steps": 2, "prompts": 2, "group": 2, "max_tokens": 4, "env_workers": 0, "lr": 1e-2,
    "compiled": False,
}  # fmt: skip


def run(verb: str, start: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    getattr(posttrain, verb)(SUMS, model=str(start / "policy"), out=str(out), **{**QUICK_RL, **options})
    return read_metrics(out)


@pytest.mark.parametrize(
    ("verb", "options", "roles"),
    [
        ("rl", {"algorithm": "ppo"}, ("reference", "critic")),
        ("distill", {"env": "", "teacher": "teacher"}, ("teacher",)),
    ],
)
def test_a_run_has_the_same_metrics(
    verb: str, options: dict[str, Any], roles: tuple[str, ...], start: Path, tmp_path: Path
) -> None:
    options |= {"teacher": str(start / "teacher")} if "teacher" in options else {}
    one = run(verb, start, tmp_path / "one", **options)
    assert run(verb, start, tmp_path / "cpu", **options, role_devices=dict.fromkeys(roles, "cpu")) == one
    apart = run(verb, start, tmp_path / "apart", **options, role_devices=dict.fromkeys(roles, "second"))
    for mine, theirs in zip(apart, one, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    assert apart != one, "on the second device, attention rounds differently"


def test_runs_on_a_device_continue_with_what_is_offloaded(tmp_path: Path) -> None:
    """A whole run on the second device, of which one half has its moments and activations on the host."""
    how: dict[str, Any] = {**SMALL, **QUICK, "rows": 4, "device": "second", "compiled": False, "schedule": "constant"}
    posttrain.sft(SUMS, out=str(tmp_path / "whole"), steps=3, **how)
    posttrain.sft(SUMS, out=str(tmp_path / "parts"), steps=2, **how, offload=("optimizer", "activations"))
    posttrain.sft(SUMS, out=str(tmp_path / "parts"), steps=3, resume=True)
    parts, whole = ([row["loss"] for row in read_metrics(tmp_path / name)[1:]] for name in ("parts", "whole"))
    assert parts == whole and len(set(whole)) == 3
