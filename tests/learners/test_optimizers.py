"""Each optimizer takes the steps of its library's class, survives saving bit for bit, and learns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import normal
from sharded import Both, micro_batches
from torch import Tensor, nn

import posttrain
from posttrain.algorithms.all_algorithms import find
from posttrain.cli.main import _by_name
from posttrain.config.resolve import filled, validate
from posttrain.config.training import RL, SFT
from posttrain.core.types import UserError
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.learners.muon import stacked_rows
from posttrain.learners.optimizers import ROWS, OptimizerChoice, parameter_groups
from posttrain.models.adapters.lora import LoRA, attach, begin
from posttrain.models.critic import ValueModel
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.tensor_files import write_state
from posttrain.training.adjust import adjust
from posttrain.training.memory_estimate import UpdateSize, estimate_memory
from posttrain.training.memory_plan import shapes_of
from posttrain.training.setup import rate_note

MAIN = ("adamw", "adamw8bit", "adafactor", "lion", "muon", "sgd", "radam", "nadam")
OF_TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "adafactor": ("Adafactor", {"eps": (1e-15, 1.0)}),
    "sgd": ("SGD", {"momentum": 0.9}),
    **{name: (kind, {}) for name, kind in (("radam", "RAdam"), ("nadam", "NAdam"), ("rmsprop", "RMSprop"))},
    **{name: (kind, {}) for name, kind in (("adam", "Adam"), ("adamax", "Adamax"), ("adagrad", "Adagrad"))},
    **{name: (kind, {}) for name, kind in (("adadelta", "Adadelta"), ("asgd", "ASGD"), ("rprop", "Rprop"))},
}
SHAPE = DecoderConfig(41, 16, 2, 2, 1, 8, 24, 64, qk_norm=True)


def decoder(seed: int = 0) -> Decoder:
    return new_decoder(SHAPE, seed)


def learner(name: str, options: dict[str, Any] | None = None, lr: float = 1e-2, model: Any = None) -> LocalLearner:
    plan = Optimization(
        lr=lr, weight_decay=0.1, max_grad_norm=0.5, optimizer=name, options=options or {}, critic_lr=lr / 2
    )
    critic = ValueModel(16, new_decoder(SHAPE, 5), 0)
    return LocalLearner(model or decoder(), plan, critic=critic)


def weights(of: LocalLearner) -> Tensor:
    return torch.cat([p.detach().flatten() for part in of.parts for p in part.parameters.values()])


def states(of: LocalLearner) -> list[dict[str, Any]]:
    return [of.optimizer.state[p] for part in of.parts for p in part.parameters.values()]


def steps(choice: OptimizerChoice, decay: float, peer: Callable[[list[nn.Parameter]], Callable[[], None]]) -> None:
    """Take five steps with the optimizer and its peer, with the same gradients."""
    ours, theirs = ([nn.Parameter(normal(3, 4)), nn.Parameter(normal(4, seed=1))] for _ in range(2))
    own = choice.open([{"params": ours[:1], "weight_decay": decay}, {"params": ours[1:], "weight_decay": 0.0}], 0.01)
    step = peer(theirs)
    for number in range(5):
        for parameters in (ours, theirs):
            for place, parameter in enumerate(parameters):
                parameter.grad = normal(*parameter.shape, seed=10 * number + place)
                if number == 2 and place == 1:
                    parameter.grad = None  # is left alone, moments included
        own.step()
        step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)
    assert not torch.equal(ours[0], normal(3, 4))


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_steps_are_those_of_torch_with_decoupled_decay(name: str, decay: float) -> None:
    kind, options = OF_TORCH[name]

    def peer(parameters: list[nn.Parameter]) -> Callable[[], None]:
        theirs = getattr(torch.optim, kind)(parameters, lr=0.01, **options, weight_decay=0.0) if kind != "Rprop" else (
            torch.optim.Rprop(parameters, lr=0.01)
        )  # fmt: skip

        def step() -> None:
            with torch.no_grad():
                parameters[0].mul_(1 - 0.01 * decay)
            theirs.step()

        return step

    steps(OptimizerChoice(name), decay, peer)


def test_settings_and_betas_reach_the_class() -> None:
    def peer(parameters: list[nn.Parameter]) -> Callable[[], None]:
        return torch.optim.NAdam(parameters, lr=0.01, betas=(0.8, 0.9), momentum_decay=0.1).step  # type: ignore[return-value]

    steps(OptimizerChoice("nadam", {"momentum_decay": 0.1}, (0.8, 0.9)), 0.0, peer)


def test_lion_takes_the_steps_of_its_paper() -> None:
    """Chen et al., arXiv 2302.06675, algorithm 2."""
    parameter = nn.Parameter(normal(8, 8).float())
    own = OptimizerChoice("lion").open([{"params": [parameter], "weight_decay": 0.1}], 0.01)
    weight, momentum = parameter.detach().clone(), torch.zeros(8, 8)
    for number in range(5):
        gradient = normal(8, 8, seed=number).float()
        parameter.grad = gradient.clone()
        own.step()
        weight = weight - 0.01 * ((0.9 * momentum + 0.1 * gradient).sign() + 0.1 * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e-1, 1e-5, 1e-7])
def test_adafactor_takes_the_steps_of_its_paper(size: float) -> None:
    """Shazeer and Stern, arXiv 1804.04235, algorithm 4 with steps of the learning rate: for gradients of any size, since
    those of a large model are small, and for rows of very different ones.
    """
    parameter = nn.Parameter((0.02 * normal(16, 8)).float())
    own = OptimizerChoice("adafactor").open([{"params": [parameter], "weight_decay": 0.1}], 0.01)
    weight, row, column = parameter.detach().double(), torch.zeros(16, 1).double(), torch.zeros(1, 8).double()
    for number in range(1, 6):
        gradient = normal(16, 8, seed=number) * torch.logspace(-1, 1, 16).double()[:, None] * size
        parameter.grad = gradient.float()
        own.step()
        kept = 1 - number**-0.8
        row = kept * row + (1 - kept) * (gradient**2 + 1e-30).mean(1, keepdim=True)
        column = kept * column + (1 - kept) * (gradient**2 + 1e-30).mean(0, keepdim=True)
        update = gradient / (row * column / row.mean()).sqrt()
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * update / max(1.0, update.square().mean().sqrt().item())
        torch.testing.assert_close(parameter.detach().double(), weight, rtol=1e-4, atol=1e-5)


def test_adamw_in_8_bits_stays_close_to_adamw() -> None:
    """Within the step that 8 bits of a moment allow: numbers of 4096 and more are quantized."""
    ours, theirs = (nn.Parameter(normal(64, 64).float()) for _ in range(2))
    pair = [
        OptimizerChoice(name).open([{"params": [p], "weight_decay": 0.1}], 0.01)
        for name, p in (("adamw8bit", ours), ("adamw", theirs))
    ]
    for number in range(10):
        for parameter, of in zip((ours, theirs), pair, strict=True):
            parameter.grad = normal(64, 64, seed=number).float()
            of.step()
    assert pair[0].state[ours]["state1"].dtype == torch.uint8
    moved = theirs.detach() - normal(64, 64).float()
    assert (ours - theirs).norm() < 0.1 * moved.norm() and not torch.equal(ours, theirs)


# -- Muon --------------------------------------------------------------------------------------------------------------


def test_muon_updates_each_matrix_of_the_layers_and_adamw_the_rest() -> None:
    """q, k, v, gate and up are stacked here and matrices of their own in a checkpoint: compared with torch's classes
    on the separate ones.
    """
    model, critic = decoder().double(), ValueModel(16, new_decoder(SHAPE, 5), 0).double()
    ours = LocalLearner(model, Optimization(lr=1e-2, weight_decay=0.1, optimizer="muon"), critic=critic)
    pieces = {"qkv": (16, 8, 8), "o": (16,), "gate_up": (24, 24), "down": (16,)}
    hidden, rest, copies = [], [], {}
    for part in ours.parts:
        for name, parameter in part.parameters.items():
            sizes = pieces.get(name.split(".")[-2] if "." in name else "", ())
            if sizes and name.endswith("weight") and "norm" not in name:
                copies[parameter] = [nn.Parameter(p.detach().clone()) for p in parameter.split(sizes)]
                hidden += copies[parameter]
            else:
                copies[parameter] = [nn.Parameter(parameter.detach().clone())]
                rest.append((parameter.ndim >= 2 and "norm" not in name, copies[parameter][0]))
    assert len(hidden) == 4 * 7  # of two layers each, of policy and critic
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([
        {"params": [p for wide, p in rest if wide], "weight_decay": 0.1},
        {"params": [p for wide, p in rest if not wide], "weight_decay": 0.0},
    ], lr=1e-2)  # fmt: skip
    for number in range(3):
        for place, (parameter, own) in enumerate(copies.items()):
            parameter.grad = normal(parameter.numel(), seed=100 * number + place).view_as(parameter)
            for copy, gradient in zip(own, parameter.grad.split([len(c) for c in own]) if parameter.ndim else
                                      [parameter.grad], strict=True):  # fmt: skip
                copy.grad = gradient.clone()
        versions = [p._version for p in copies]
        ours.optimizer.step()
        muon.step(), adamw.step()
        for parameter, own in copies.items():
            joined = torch.cat([c.detach() for c in own]) if parameter.ndim else own[0].detach()
            torch.testing.assert_close(parameter.detach(), joined, rtol=1e-10, atol=1e-12)
        assert all(p._version > before for p, before in zip(copies, versions, strict=True))


def test_muon_updates_the_factors_of_each_adapter() -> None:
    model = decoder()
    attach(model, LoRA(2, 4.0), lambda name: not name.endswith("k_proj"))
    begin(model, 0)
    rows = {name: found for name, p in model.named_parameters() for own, found in stacked_rows(model) if own is p}
    assert rows["layers.0.qkv.adapter.a"] == [2, 2] and rows["layers.0.qkv.adapter.b"] == [16, 8]
    assert rows["layers.1.gate_up.adapter.b"] == [24, 24]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    first, *others = parameter_groups(trained, 1.0, 0.1, OptimizerChoice("muon"))
    assert first["hidden"] and len(first["params"]) == len(trained) and not any(g["params"] for g in others)


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_every_group_has_its_share_of_the_learning_rate(name: str) -> None:
    choice = OptimizerChoice(name)
    groups = parameter_groups(dict(decoder().named_parameters()), 0.25, 0.1, choice)
    assert len(groups) == 2 + (name == "muon") and all(group["params"] for group in groups)
    assert [group["share"] for group in groups] == [0.25] * len(groups)
    assert [group["weight_decay"] for group in groups] == [0.1] * (len(groups) - 1) + [0.0]


def test_betas_are_those_of_the_adamw_within_muon() -> None:
    matrix, ours, theirs = nn.Parameter(normal(4, 4)), nn.Parameter(normal(4)), nn.Parameter(normal(4))
    hidden = {"params": [matrix], "weight_decay": 0.0, "hidden": True}
    own = OptimizerChoice("muon", betas=(0.5, 0.8)).open([hidden, {"params": [ours], "weight_decay": 0.0}], 0.01)
    peer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.5, 0.8), weight_decay=0.0)
    for number in range(3):
        ours.grad, theirs.grad = normal(4, seed=number), normal(4, seed=number)
        own.step(), peer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_a_matrix_without_a_gradient_is_not_decayed(name: str) -> None:
    still, moved = nn.Parameter(normal(4, 4)), nn.Parameter(normal(4, 4))
    group = {"params": [still, moved], "weight_decay": 0.5, "hidden": name == "muon"}
    own = OptimizerChoice(name).open([group], 0.1)
    moved.grad = normal(4, 4, seed=1)
    own.step()
    assert torch.equal(still, normal(4, 4)) and not torch.equal(moved, normal(4, 4))


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_gradients_are_cleared(name: str) -> None:
    matrix, vector = nn.Parameter(normal(4, 4)), nn.Parameter(normal(4))
    groups = [{"params": [matrix], "weight_decay": 0.0, "hidden": name == "muon"}]
    own = OptimizerChoice(name).open([*groups, {"params": [vector], "weight_decay": 0.0}], 0.1)
    matrix.grad, vector.grad = normal(4, 4), normal(4)
    own.zero_grad()
    assert matrix.grad is None and vector.grad is None


# -- in the learner ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", MAIN)
def test_a_learner_continues_from_its_checkpoint_bit_for_bit(name: str, adapted: bool, tmp_path: Path) -> None:
    def made() -> LocalLearner:
        model = new_decoder(DecoderConfig(512, 16, 2, 2, 1, 8, 24, 64), 0)  # its embedding is large enough for 8 bits
        if adapted:
            attach(model, LoRA(2, 4.0), lambda name: True)
            begin(model, 0)
        return learner(name, model=model)

    one, other = made(), made()
    for _ in range(3):
        one.update(micro_batches(4), Both())
    one._check_finite()
    for file, tensors in one._state():  # an adapter without a base is not written
        (tmp_path / "training").mkdir(exist_ok=True)
        write_state(tmp_path / "training" / file, tensors)
    (tmp_path / "training" / "learner.json").write_text(json.dumps({"version": one.version}))
    with torch.no_grad():
        for mine, saved in zip(other.model.parameters(), one.model.parameters(), strict=True):
            mine.copy_(saved)
    other.load(tmp_path)
    for mine, theirs in zip(states(other), states(one), strict=True):
        assert {key: type(value) for key, value in mine.items()} == {key: type(value) for key, value in theirs.items()}
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in theirs)
    for each in (one, other):
        for _ in range(2):
            each.update(micro_batches(4), Both())
    assert torch.equal(weights(one), weights(other)) and one.version == other.version == 5


@pytest.mark.parametrize(
    ("name", "options"), [("muon", {"momentum": 0.9}), ("sgd", {"nesterov": True}), ("adamw8bit", {})]
)
def test_a_run_continues_bit_for_bit(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(5) for b in range(5)]
    how: dict[str, Any] = {"rows": 8, "lr": 1e-2, "weight_decay": 0.1, "schedule": "constant", "held_out": 0.2}
    how |= {
        "tokenizer": "characters",
        "hidden": 64,
        "layers": 2,
        "heads": 4,
        "context": 32,
        "threads": 1,
        "quiet": True,
    }
    how |= {"optimizer": name, "optimizer_options": options}
    whole = posttrain.sft(rows, out=str(tmp_path / "whole"), steps=4, **how)
    posttrain.sft(rows, out=str(tmp_path / "half"), steps=2, **how)
    half = posttrain.sft(rows, out=str(tmp_path / "half"), steps=4, resume=True, **how)
    assert whole.checkpoint and half.checkpoint
    for file in ("model.safetensors", "training/optimizer.safetensors"):
        assert (Path(whole.checkpoint) / file).read_bytes() == (Path(half.checkpoint) / file).read_bytes()


@pytest.mark.parametrize(("name", "lr"), [("adamw", 1e-2), ("adamw8bit", 1e-2), ("adafactor", 1e-2), ("lion", 3e-3),
                                          ("muon", 1e-2), ("sgd", 0.3), ("radam", 0.1)])  # fmt: skip
def test_the_loss_falls(name: str, lr: float) -> None:
    of, batches = learner(name, lr=lr), micro_batches(4)
    losses = [of.update(batches, Both()).means()["loss"] for _ in range(15)]
    assert losses[-1] < losses[0] - 0.3 * abs(losses[0]), losses


@pytest.mark.parametrize("name", MAIN)
def test_the_estimated_moments_are_those_that_an_update_makes(name: str) -> None:
    sizes = DecoderConfig(512, 128, 2, 2, 2, 64, 256, 64)
    of = LocalLearner(new_decoder(sizes, 0), Optimization(optimizer=name))
    for parameter in of.parts[0].parameters.values():
        parameter.grad = torch.ones_like(parameter)
    of.optimizer.step()
    state = [value for own in of.optimizer.state.values() for value in own.values()]
    found = sum(value.nbytes for value in state if isinstance(value, Tensor))
    whole = sum(p.nbytes for p in of.model.parameters())
    assert abs(found - of.optimizer.moment_bytes()) < 0.02 * whole, (found / whole, of.optimizer.moment_bytes() / whole)


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    one = learner("sgd")
    one.update(micro_batches(2), Both())
    one.save(tmp_path)
    with pytest.raises(UserError, match=r"optimizer.safetensors is not a file of this model: it has the unexpected"):
        learner("adamw").load(tmp_path)


# -- options -----------------------------------------------------------------------------------------------------------

MINE = """
import torch

class Mine(torch.optim.Optimizer):
    def __init__(self, params, lr, power=1.0):
        super().__init__(params, {"lr": lr, "power": power})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    p.sub_(group["lr"] * p.grad.sign() * p.grad.abs() ** group["power"] / self.state[p]["count"])

class Closed(torch.optim.LBFGS):
    pass

class Hidden(Mine):
    def step(self):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1

class Counting(Mine):
    steps = 0

    def step(self):
        self.steps += 1
        super().step()

class Late(Mine):
    def step(self):
        super().step()
        for state in self.state.values():
            if state["count"] > 1:
                state["phase"] = "second"

three = 3

class Kept(Mine):
    def step(self):
        self.state[self.param_groups[0]["params"][0]]["history"] = [1]

def none(params, lr):
    return 3
"""


def test_a_class_of_the_user_trains_and_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    one = learner("mine.py:Mine", {"power": 0.5})
    before = weights(one)
    for _ in range(2):
        one.update(micro_batches(3), Both())
    one.save(tmp_path / "saved")
    other = learner("mine.py:Mine", {"power": 0.5})
    other.model.load_state_dict(one.model.state_dict())
    other.load(tmp_path / "saved")
    assert {own["count"] for own in other.optimizer.state.values()} == {2}
    one.update(micro_batches(3), Both()), other.update(micro_batches(3), Both())
    assert torch.equal(weights(one), weights(other)) and not torch.equal(weights(one), before)


def test_a_class_whose_state_no_checkpoint_holds_is_told_when_one_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    one = learner("mine.py:Late")
    for _ in range(2):
        one.update(micro_batches(3), Both())
    with pytest.raises(UserError, match="the optimizer keeps 'phase' of type str, and a checkpoint holds only tensors"):
        one.save(tmp_path / "saved")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": "adamv"},
            r"--optimizer adamv is unknown; did you mean 'adam'\? \(there are: adamw, adamw8bit, ",
        ),
        ({"optimizer": "mine.py:Other"}, "mine.py has no 'Other'"),
        ({"optimizer": "mine.py:Closed"}, "--optimizer mine.py:Closed: TypeError: .*closure"),
        ({"optimizer": "mine.py:Hidden"}, "--optimizer mine.py:Hidden keeps 'count' where no checkpoint"),
        ({"optimizer": "mine.py:Counting"}, "--optimizer mine.py:Counting keeps 'steps' where no checkpoint"),
        ({"optimizer": "mine.py:three"}, "--optimizer mine.py:three is no optimizer of torch: name a class such as"),
        ({"optimizer": "mine.py:Kept"}, "--optimizer mine.py:Kept keeps 'history' where no checkpoint"),
        ({"optimizer": "mine.py:none"}, "--optimizer mine.py:none is no optimizer of torch: it has no param_groups"),
        (
            {"optimizer": "sgd", "optimizer_options": {"momentom": 0.9}},
            "sgd has no 'momentom'; did you mean 'momentum'",
        ),
        ({"optimizer": "muon", "optimizer_options": {"ns": 3}}, "--optimizer-options: muon has no 'ns'"),
        ({"optimizer_options": {"amsgrad": True}}, r"--optimizer-options: adamw has no 'amsgrad' \(there are: eps\)"),
        ({"optimizer": "sgd", "optimizer_options": {"momentum": -1}}, "--optimizer sgd: ValueError: Invalid momentum"),
        ({"optimizer": "sgd", "optimizer_options": {"momentum": "high"}}, "momentum is a number, not 'high'"),
        ({"optimizer": "sgd", "optimizer_options": {"nesterov": "no"}}, "nesterov is true or false, not 'no'"),
        ({"optimizer": "muon", "optimizer_options": {"ns_steps": "5x"}}, "ns_steps is a number, not '5x'"),
        ({"optimizer_options": {"eps": "small"}}, "eps is a number, not 'small'"),
        ({"optimizer_options": {"eps": -1}}, "eps must be at least 0, not -1"),
        ({"optimizer": "sgd", "optimizer_options": {"lr": 1}}, "--optimizer-options lr: give it as --lr"),
        ({"optimizer": "radam", "optimizer_options": {"weight_decay": 1}}, "give it as --weight-decay"),
        ({"optimizer": "sgd", "betas": (0.9, 0.95)}, "--betas has no effect with --optimizer sgd: leave it out"),
        *(
            (
                {"optimizer": name, "shard": True, "processes": 2},
                f"--optimizer {name} may need whole matrices, and --shard",
            )
            for name in ("muon", "adafactor", "adamw8bit", "lion", "mine.py:Mine", "torch.optim:Adafactor")
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as refused:
        validate(filled(SFT, {"tasks": "rows.jsonl", **options}))
    assert "\n" not in str(refused.value)


def test_a_trust_region_refuses_an_optimizer() -> None:
    for chosen in ({"optimizer": "sgd"}, {"optimizer_options": {"eps": 1e-6}}):
        with pytest.raises(UserError, match="trpo: its policy takes natural gradient steps .* leave out --optimizer"):
            adjust(find("trpo"), RL(algorithm="trpo", **chosen))  # type: ignore[arg-type]


def test_settings_are_read_as_on_the_command_line() -> None:
    assert _by_name(["sft", "--optimizer-options", "momentum=0.5", "nesterov=true", "--lr", "1"]) == [
        "sft", "--optimizer-options.momentum=0.5", "--optimizer-options.nesterov=true", "--lr", "1",
    ]  # fmt: skip
    given = SFT(optimizer_options={"momentum": "0.5", "nesterov": "true", "betas": "[0.9, 0.99]", "mode": "fast"})
    assert given.optimizer_options == {"momentum": 0.5, "nesterov": True, "betas": [0.9, 0.99], "mode": "fast"}
    with pytest.raises(UserError, match="write --optimizer-options KEY=VALUE, such as --optimizer-options momentum"):
        _by_name(["sft", "--optimizer-options", "momentum"])


def test_the_memory_of_a_command_has_the_moments_of_its_optimizer() -> None:
    shape = DecoderConfig(4096, 512, 4, 8, 2, 64, 1024, 64, family="qwen2")

    def moments(name: str) -> float:
        of = shapes_of(filled(SFT, {"tasks": "x", "optimizer": name}), shape)
        found = estimate_memory(of, UpdateSize(1024, False, None, 80e9))
        assert found is not None
        return found.parts["moments"] / found.parts["gradients"]

    embedding = 4096 * 512 / shape.parameters
    expected = {"adamw": 2, "adamw8bit": 0.52, "adafactor": 0.008, "lion": 1, "sgd": 1, "radam": 2,
                "muon": 1 + embedding * (1 if shape.tied else 2)}  # fmt: skip
    assert {name: moments(name) for name in expected} == pytest.approx(expected, abs=0.01)


def test_a_missing_library_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"adamw8bit needs bitsandbytes, .*: pip install 'bitsandbytes"):
        OptimizerChoice("adamw8bit").check()


def test_other_code_of_the_optimizer_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(4)]
    new: dict[str, Any] = {"hidden": 16, "layers": 1, "tokenizer": "characters", "threads": 1, "quiet": True}
    posttrain.sft(rows, out="run", optimizer="mine.py:Mine", rows=2, steps=2, **new)
    Path("mine.py").write_text(MINE.replace('group["power"] /', '2 * group["power"] /'))
    with pytest.raises(UserError, match="--optimizer mine.py:Mine changed since the run began"):
        posttrain.sft(rows, out="run", resume=True, steps=4, quiet=True)


def test_a_class_by_its_place_has_its_own_defaults() -> None:
    assert not OptimizerChoice("torch.optim:SGD").row.options and OptimizerChoice("sgd").row.options
    assert all(":" in row.place for name, row in ROWS.items() if name != "adamw")


def test_advice_on_the_learning_rate_is_given_only_where_it_holds() -> None:
    def told(name: str, **options: Any) -> bool:
        return bool(rate_note(Optimization(lr=1e-7, optimizer=name, options=options), False, 1_000_000))

    assert [name for name in MAIN if told(name)] == ["adamw", "adamw8bit", "adafactor", "muon", "radam", "nadam"]
    assert not told("muon", adjust_lr_fn="original") and not told("torch.optim:Adafactor")


@pytest.mark.parametrize(
    ("adapted", "size", "usual"),
    [
        (False, 100_000, "1e-3"),
        (True, 100_000, "5e-3"),
        (False, 135_000_000, "1e-5"),
        (True, 135_000_000, "1e-4 to 1e-3"),
    ],
)
def test_advice_on_the_learning_rate_depends_on_size_and_on_lora(adapted: bool, size: int, usual: str) -> None:
    (line,) = rate_note(Optimization(lr=1e-7), adapted, size)
    assert f": {usual} " in line and ("--lora" in line) == adapted


def test_the_default_imports_no_other_optimizer() -> None:
    import subprocess

    code = """
import sys
import posttrain
from posttrain.algorithms.all_algorithms import find
from posttrain.cli.main import _by_name
from posttrain.config.resolve import filled, validate
from posttrain.config.training import RL, SFT
from posttrain.learners.local_learner import Optimization
validate(filled(SFT, {"tasks": "x"}))
Optimization().choice.check()
print([name for name in ("torch._dynamo", "bitsandbytes", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
