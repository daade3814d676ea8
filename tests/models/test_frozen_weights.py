"""Frozen matrices held in bfloat16: what is computed is what the same numbers give in float32, with half the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import SHAPE, adapt, base_of, laid, logits, loss_of, stir
from judged import own_pad
from safetensors.torch import load_file
from sums import PAIRS, SUMS, nearness
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import posttrain
from posttrain.core.types import Sampling, UserError
from posttrain.engines.local.engine_weights import own_copy
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.adapters.lora import LoRA, sharing
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.hf.linear_layers import narrow_products
from posttrain.models.native import linear
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.kernels import build
from posttrain.models.native.linear import Linear, accumulating
from posttrain.models.native.merged_weights import plain_weights
from posttrain.models.reward_model import load_reward_model
from posttrain.models.tokenizer.tokenizer import Tokenizer

SHAPES = {
    "biases": replace(SHAPE, o_bias=True, mlp_bias=True),
    "tied, norms of q and k": replace(SHAPE, tied=True, qk_norm=True, qkv_bias=False),
}
ADAPTERS = {"lora": LoRA(3, 6.0), "dora": LoRA(3, 6.0, dora=True)}


def base(shape: str, narrow: bool) -> Decoder:
    """A model whose matrices have values of bfloat16, held in that type or in float32. Vectors have other values too."""
    model = new_decoder(SHAPES[shape], 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "norm" not in name:
                parameter.copy_(parameter.mul(5).bfloat16())
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    if narrow:
        model.narrow(torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
    return model.requires_grad_(False)


@contextmanager
def computing(precision: str, compiled: bool) -> Iterator[None]:
    build.use(compiled)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            yield
    finally:
        build.use(True)


ways = [
    pytest.mark.parametrize("precision", ["float32", "bfloat16"]),
    pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"]),
    pytest.mark.parametrize("shape", SHAPES),
]


def in_all_ways(test: Callable[..., Any]) -> Callable[..., Any]:
    for way in ways:
        test = way(test)
    return test


@in_all_ways
def test_states_and_logits_are_the_same_bits(shape: str, compiled: bool, precision: str) -> None:
    with computing(precision, compiled):
        ours, theirs = (logits(base(shape, narrow)) for narrow in (True, False))
    assert ours.dtype == torch.float32 and torch.equal(ours, theirs)


@in_all_ways
@pytest.mark.parametrize("in_place", [True, False], ids=["accumulating", "by torch"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_gradients_of_adapters_are_the_same_bits(
    kind: str, in_place: bool, shape: str, compiled: bool, precision: str
) -> None:
    def found(narrow: bool) -> list[Tensor]:
        model = base(shape, narrow)
        adapt(model, ADAPTERS[kind])
        assert all(p.dtype == torch.float32 for adapter in adapters(model) for p in adapter.parameters())
        with computing(precision, compiled):
            if in_place:
                with accumulating():
                    loss = loss_of(model, *laid())
                    with torch.autocast("cpu", enabled=False):
                        loss.backward()
            else:
                loss = loss_of(model, *laid())
                loss.backward()
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        assert gradients
        return [loss.detach(), *(g for g in gradients if g is not None)]

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found(True), found(False), strict=True))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_copy_of_a_frozen_matrix_is_kept(precision: str) -> None:
    model = base("biases", narrow=True)
    adapt(model, ADAPTERS["lora"])
    frozen = {m.weight for m in model.modules() if isinstance(m, Linear)}
    with computing(precision, True), accumulating():
        loss_of(model, *laid()).backward()
        known = linear._settings().narrowed
        assert known is not None and not frozen & set(known)
        assert bool(known) == (precision == "bfloat16"), "the adapters"


@pytest.mark.parametrize("kind", ADAPTERS)
def test_merged_weights_are_those_of_float32(kind: str) -> None:
    pairs = zip(*(plain_weights(adapt(base("biases", n), ADAPTERS[kind])) for n in (True, False)), strict=True)  # type: ignore[arg-type]
    for (name, ours), (other, theirs) in pairs:
        assert name == other and torch.equal(ours.float(), theirs), name
    copies = [own_copy(adapt(base("biases", n), ADAPTERS[kind])) for n in (True, False)]
    assert torch.equal(*map(logits, copies))  # type: ignore[arg-type]


@in_all_ways
def test_engine_samples_the_same(shape: str, compiled: bool, precision: str, tokenizer: Tokenizer) -> None:
    def sampled(narrow: bool) -> list[tuple[list[int], list[float]]]:
        model = base(shape, narrow)
        adapt(model, ADAPTERS["lora"])
        engine = LocalEngine(model, tokenizer, precision=precision)
        for number in range(4):
            engine.submit(number, [3 + number, 5, 7], Sampling(max_tokens=12, seed=number))
        done: list[Any] = []
        while len(done) < 4:
            done += engine.poll()
        return [(list(one.tokens), list(one.logp)) for one in sorted(done, key=lambda one: one.id)]

    build.use(compiled)
    try:
        assert sampled(True) == sampled(False)
    finally:
        build.use(True)


# -- loading -----------------------------------------------------------------------------------------------------------


class Float32Matrices(TorchDispatchMode):
    """The numbers of float32 tensors with two dimensions that anything allocates, besides those of few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.dtype == torch.float32 and x.device.type == "cpu" and x.ndim == 2:
                self.seen.append(x.numel())
        return out


def test_a_checkpoint_in_bfloat16_is_never_held_in_float32(tmp_path: Path) -> None:
    save_model(base("biases", narrow=False), tmp_path / "model", own_pad(), dtype=torch.bfloat16)
    with Float32Matrices() as allocated:
        model = load_model(tmp_path / "model", matrices=torch.bfloat16)
    assert not allocated.seen
    whole = load_model(tmp_path / "model")
    assert isinstance(model, Decoder) and isinstance(whole, Decoder)
    size = [sum(p.nbytes for p in m.parameters()) for m in (model, whole)]
    vectors = sum(p.nbytes for name, p in whole.named_parameters() if p.ndim == 1)
    assert size[0] == (size[1] - vectors) / 2 + vectors
    assert torch.equal(logits(model), logits(whole))


@pytest.mark.parametrize("kind", ["phi3", "gemma3_text", "mixtral", "qwen3_moe"])
def test_layers_of_transformers_give_the_same_numbers(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = base_of(kind, tmp_path / "model")
    model, whole = load_model(folder, matrices=torch.bfloat16), load_model(folder)
    own = dict(model.named_parameters())
    narrowed = {name for name, p in own.items() if p.dtype == torch.bfloat16}
    assert narrowed and all(p.dtype == torch.float32 for name, p in own.items() if name not in narrowed)
    with torch.no_grad():
        for name, p in whole.named_parameters():
            p.copy_(own[name])
    assert torch.equal(logits(model), logits(whole))  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(model), logits(whole))  # type: ignore[arg-type]
    for one in (model, whole):
        adapt(one, LoRA(2, 4.0))  # type: ignore[arg-type]
    shared = sharing(model)  # type: ignore[arg-type]
    assert torch.equal(logits(model), logits(whole)) and not torch.equal(logits(shared), logits(whole))  # type: ignore[arg-type]


class Tied(nn.Module):
    """Two products of one weight and one of its own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.own, self.head = (nn.Linear(4, 4) for _ in range(4))
        self.other.weight = self.one.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_weights_that_layers_of_transformers_share_keep_their_type() -> None:
    inner = Tied()
    narrow_products(inner, torch.bfloat16)
    assert inner.one.weight is inner.other.weight and not inner.head.weight.requires_grad
    assert [x.weight.dtype for x in (inner.one, inner.own, inner.head)] == [
        torch.float32, torch.bfloat16, torch.float32
    ]  # fmt: skip


# -- runs --------------------------------------------------------------------------------------------------------------

QUICK: dict[str, Any] = {"threads": 1, "quiet": True}


@pytest.fixture
def start(tmp_path: Path) -> str:
    """A checkpoint stored in bfloat16."""
    save_model(load_model(base_of("native", tmp_path / "wide")), tmp_path / "start", own_pad(), torch.bfloat16)  # type: ignore[arg-type]
    return str(tmp_path / "start")


def stored(run: Path) -> dict[str, bytes]:
    folder = run / "checkpoints" / "step-000002"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("how", ["lora", "reference", "lora, reward model", "distill"])
def test_runs_are_those_of_float32(how: str, tmp_path: Path, start: str) -> None:
    played: dict[str, Any] = {
        "steps": 2, "prompts": 4, "group": 2, "max_tokens": 4, "env_workers": 0, "lr": 1e-2, "precision": "bfloat16",
    }  # fmt: skip
    for frozen in ("float32", "bfloat16"):
        out: dict[str, Any] = {"out": str(tmp_path / frozen), "frozen_weights": frozen, **QUICK}
        kl = {"kl": 0.1}
        if how == "lora":
            posttrain.rl(SUMS, nearness, start, algorithm="grpo", settings=kl, lora=2, **played, **out)
        elif how == "reference":
            posttrain.rl(SUMS, nearness, start, algorithm="grpo", settings=kl, **played, **out)
        elif how == "distill":
            posttrain.distill(SUMS, model=start, teacher=start, temperature=0.7, **played, **out)
        else:
            more: dict[str, Any] = {"steps": 2, "rows": 4, "lora": 2, "lr": 1e-2, "precision": "bfloat16"}
            posttrain.reward_model(PAIRS, start, **more, **out)
    assert stored(tmp_path / "float32") and stored(tmp_path / "float32") == stored(tmp_path / "bfloat16")


def test_adapters_over_narrow_weights_merge_and_go_on(tmp_path: Path, start: str) -> None:
    run = tmp_path / "run"
    more: dict[str, Any] = {"lora": 2, "lr": 1e-2, "rows": 4, "frozen_weights": "bfloat16", **QUICK}
    posttrain.sft([{"prompt": "1", "response": "2"}] * 8, model=start, out=str(run), steps=2, **more)
    adapted = load_model(run / "checkpoints" / "step-000002", matrices=torch.bfloat16)
    assert adapted.decoder is not None and adapted.decoder.lora is not None
    from posttrain.cli.main import main

    assert main(["merge", str(run), "--out", str(tmp_path / "merged")]) == 0
    whole = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(whole[name], weight.float()) for name, weight in adapted.decoder.stored_tensors())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "has no effect, as all weights are trained"),
        ({"lora": 2, "quantize": "int8"}, "leave out --frozen-weights"),
    ],
)
def test_where_nothing_is_frozen_it_is_refused(options: dict[str, Any], told: str, tmp_path: Path, start: str) -> None:
    rows = [{"prompt": "1", "response": "2"}] * 4
    out: dict[str, Any] = {"out": str(tmp_path / "run"), "steps": 1, "rows": 2, **QUICK}
    with pytest.raises(UserError, match=told):
        posttrain.sft(rows, model=start, frozen_weights="bfloat16", **options, **out)


def test_a_reward_model_scores_the_same(tmp_path: Path, start: str) -> None:
    posttrain.reward_model(PAIRS, start, out=str(tmp_path / "rm"), steps=1, rows=4, **QUICK)
    folder = tmp_path / "rm" / "checkpoints" / "step-000001"
    model, whole = load_reward_model(folder, matrices=torch.bfloat16), load_reward_model(folder)
    assert model.score.dtype == torch.float32
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            theirs.copy_(mine)
        layout, at, _ = laid()
        assert torch.equal(model.hidden(layout, at), whole.hidden(layout, at))


def test_adapters_that_stir_nothing_are_not_what_is_tested() -> None:
    model = base("biases", narrow=True)
    adapt(model, ADAPTERS["lora"])
    before = logits(model)
    stir(model, 6)
    assert not torch.equal(before, logits(model))
