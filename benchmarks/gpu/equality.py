"""The card beside the processor: one update of each verb on the same micro-batches, greedy tokens, and bfloat16.

The micro-batches are those of a real run on the processor, which is stopped at its first update: models, critics,
teachers and references are copied then, so that both sides start from the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import golden
import torch
from findings import Findings, Setting
from posttrain_side import leave
from shapes import SIGNAL
from tables import Table
from torch import Tensor

from posttrain.config.training import RL, SFT, Distill, Prefer, RewardModelling
from posttrain.core.types import Sampling
from posttrain.engines.local.embedded import embedded
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import LOADERS, load_model
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.reward_model import RewardModel
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.training_run import run_training

BOUNDS = {"float32": 1e-4, "float64": 1e-6, "bfloat16": 3e-2}
"""Largest relative difference: of vectors, |a - b| / |a| in the Euclidean norm. Also in float64 the angles of the rotary
embedding are float32, and their sines are not the same to the last bit.
"""
COLUMNS = ("log-probabilities", "entropies", "loss", "gradients")
GREEDY = 24  # tokens


@dataclass(frozen=True)
class Update:
    """An update that a run was about to make."""

    learner: LocalLearner
    batches: Sequence[Any]
    objective: Any


def equality(setting: Setting, found: Findings) -> None:
    place = setting.run_folder("equality")
    place.mkdir(parents=True, exist_ok=True)
    golden.write_data(place)
    folder = random_model(place)
    table = found.table(
        f"{setting.device} compared with cpu: relative differences of one update",
        "",
        *COLUMNS,
        "bound",
        notes=(
            "A small random decoder; `through transformers` is the same model as transformers computes it.",
            "Vectors: |a - b| / |a|; a loss smaller than 1 is compared as if it were 1. bfloat16 is compared with "
            "the CPU in float32.",
        ),
    )
    runs = _runs(place, folder)
    for name in ("grpo", "sft") if setting.tiny else tuple(runs):
        with found.trying(name):
            _compare(setting, found, table, name, _stopped(runs[name]))
    with found.trying("grpo through transformers"), _backed():
        _compare(setting, found, table, "grpo through transformers", _stopped(runs["grpo"]))
    table = found.table("Greedy tokens of the embedded engine", "", "replies", "equal to the CPU's")
    with found.trying("greedy tokens"):
        _compare_greedy(setting, found, table, folder)
    with found.trying("greedy tokens through transformers"), _backed():
        _compare_greedy(setting, found, table, folder, ", through transformers")


def random_model(place: Path, seed: int = 0) -> Path:
    """The folder of a random decoder far from uniform, so that mistakes show."""
    texts = [file.read_text() for file in sorted(place.glob("*.jsonl"))]
    tokenizer = Tokenizer.train(texts, 128, "characters")
    shape = DecoderConfig(
        vocab=tokenizer.vocab_size, hidden=64, layers=3, heads=4, kv_heads=2, head_size=16, intermediate=160,
        context=96, qkv_bias=True, tied=True,
    )  # fmt: skip
    model = new_decoder(shape, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    save_model(model, place / f"model-{seed}", tokenizer)
    return place / f"model-{seed}"


def _runs(place: Path, folder: Path) -> dict[str, Any]:
    """The options of a run of each verb."""
    every: dict[str, Any] = {
        "model": str(folder),
        "out": str(place / "run"),
        "overwrite": True,
        "quiet": True,
        "device": "cpu",
        "health": "off",
        "lr": 1e-4,
    }
    sampled: dict[str, Any] = {
        **every, "tasks": str(place / "sums.jsonl"), "env": SIGNAL, "prompts": 8, "group": 4,
        "max_tokens": 12, "steps": 1, "env_workers": 1,
    }  # fmt: skip
    given = {**every, "tasks": str(place / "items.jsonl"), "rows": 16}
    return {
        "grpo": RL(**sampled, algorithm="grpo"),
        "ppo with a critic": RL(**sampled, algorithm="ppo"),
        "distill": Distill(**{**sampled, "env": ""}, teacher=str(random_model(place, seed=1))),
        "sft": SFT(**{**given, "tasks": str(place / "sums.jsonl")}),
        "dpo": Prefer(**given),
        "reward model": RewardModelling(**given),
    }


@contextmanager
def _backed() -> Iterator[None]:
    """Within it, no architecture is native: transformers computes every model."""
    kept = dict(LOADERS)
    LOADERS.clear()
    try:
        yield
    finally:
        LOADERS.update(kept)


def _stopped(config: Any) -> Update:
    """The first update of a run, which ends here."""
    caught: list[Update] = []
    original = LocalLearner.update

    def update(self: LocalLearner, batches: Sequence[Any], objective: Any) -> Any:
        bare = [replace(batch, tap=None) for batch in batches]
        if isinstance(self.model, RewardModel):
            self.model.measured = None  # it reads the run's rows, for a checkpoint
        caught.append(Update(self, bare, objective))
        leave(True)

    LocalLearner.update = update  # type: ignore[method-assign]
    try:
        with suppress(SystemExit):
            run_training(config)
    finally:
        LocalLearner.update = original  # type: ignore[method-assign]
    return caught[0]


def _compare(setting: Setting, found: Findings, table: Table, name: str, update: Update) -> None:
    """Rows of one update in several types; the processor in float32 is what bfloat16 is measured by."""
    wide = _computed(update, "cpu", "float32")
    for precision, bound in BOUNDS.items():
        with found.trying(f"{name}, {precision}"):
            own = _computed(update, "cpu", precision) if precision == "float64" else wide
            other = _computed(update, setting.device, precision)
            differences = [_difference(own[column], other[column], column) for column in COLUMNS]
            table.add(
                f"{name}, {precision}", *(f"{d:.1e}" if d is not None else "" for d in differences), f"{bound:.0e}"
            )
            worst = max(d for d in differences if d is not None)
            if not worst <= bound:
                found.failures.append(f"{name}, {precision}: differs by {worst:.1e}, more than {bound:.0e}")
            found.figures[f"{name}, {precision}: relative difference"] = worst


def _difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], column: str) -> float | None:
    """Relative difference of tensors by name, all together; None where there are none.

    A loss may be 0 where its terms cancel, as GRPO's do in the first update: it is compared as if it were 1 at least.
    """
    if not one and not other:
        return None
    assert one.keys() == other.keys()
    a, b = (torch.cat([found[name].flatten() for name in one]) for found in (one, other))
    return ((a - b).norm() / a.norm().clamp_min(1.0 if column == "loss" else 1e-30)).item()


def _computed(update: Update, device: str, precision: str) -> dict[str, dict[str, Tensor]]:
    """Numbers of an update, by `COLUMNS`, in float64 on the processor."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    learner = _learner(update.learner, device, dtype, "bfloat16" if precision == "bfloat16" else "float32")
    batches = [_there(batch, device, dtype) for batch in update.batches]
    gradients: dict[str, Tensor] = {}

    def step() -> None:
        for part in learner.parts:
            gradients.update({f"{part.name}/{n}": _here(p.grad) for n, p in part.parameters.items()})

    learner.optimizer.step = step  # type: ignore[method-assign, assignment]
    outputs = learner.evaluate(batches, want=frozenset({"entropy"})) if learner.model.decoder is not None else []
    stats = learner.update(batches, update.objective)
    return {
        "log-probabilities": {str(i): _here(out.logp) for i, out in enumerate(outputs)},
        "entropies": {str(i): _here(out.entropy) for i, out in enumerate(outputs)},
        "loss": {"loss": torch.tensor([stats.means()["loss"]], dtype=torch.float64)},
        "gradients": gradients,
    }


def _learner(source: LocalLearner, device: str, dtype: torch.dtype, precision: str) -> LocalLearner:
    """A copy of this learner there, without clipping."""

    def moved(model: Any) -> Any:
        return copy.deepcopy(model).to(device=device, dtype=dtype)

    return LocalLearner(
        moved(source.model),
        Optimization(lr=source.optimization.lr, max_grad_norm=0.0, critic_follow=source.optimization.critic_follow),
        temperature=source.temperature,
        precision=precision,
        others={name: moved(model) for name, model in source.others.items()},
        teaching=source.teaching,
        critic=moved(source.critic) if source.critic is not None else None,
    )


def _there(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Micro-batches on that device, numbers that were float32 in that type."""
    if isinstance(value, Tensor):
        return value.to(device, dtype) if value.dtype == torch.float32 else value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: _there(getattr(value, f.name), device, dtype) for f in fields(value) if f.init}
        )
    if isinstance(value, tuple) and any(is_dataclass(part) for part in value):
        return tuple(_there(part, device, dtype) for part in value)
    return value


def _here(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().to("cpu", torch.float64)


def _compare_greedy(setting: Setting, found: Findings, table: Table, folder: Path, way: str = "") -> None:
    own = _greedy(folder, "cpu", "float32")
    for precision in ("float32", "bfloat16"):
        other = _greedy(folder, setting.device, precision)
        equal = sum(a == b for a, b in zip(own, other, strict=True))
        table.add(precision + way, len(own), equal)
        if precision == "float32" and equal < len(own):
            found.failures.append(f"greedy tokens in float32{way}: {equal} of {len(own)} replies are equal")


def _greedy(folder: Path, device: str, precision: str) -> list[list[int]]:
    model, tokenizer = load_model(folder, device=device), Tokenizer.load(folder)
    engine = embedded(model, tokenizer, precision=precision)
    texts = [f"{a}+{b}=" for a in range(4) for b in range(4)]
    for place, text in enumerate(texts):
        engine.submit(place, tokenizer.encode(text), Sampling(max_tokens=GREEDY, temperature=0.0, seed=place))
    done: list[Any] = []
    while len(done) < len(texts):
        done += engine.poll()
    engine.close()
    return [list(c.tokens) for c in sorted(done, key=lambda c: c.id)]
