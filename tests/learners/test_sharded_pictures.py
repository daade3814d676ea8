"""A run with pictures whose weights are sharded (--shard) is the run of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from picture_envs import drawn, looking, message
from picture_tokenizer import picture_tokenizer
from processes import in_processes
from ranks import free_port, joined
from safetensors.torch import load_file
from sharded import same_run
from sums import SUMS
from tiny_models import make_seeing

import posttrain
from posttrain.config.training import SFT
from posttrain.core.pictures import PICTURES
from posttrain.learners import process_group
from posttrain.learners.fsdp import FSDPLearner
from posttrain.models.row_shards import is_sharded

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(600)  # a module's processes start in its first test

TASKS = [{"id": str(shade), "shade": shade} for shade in range(0, 250, 25)]
KINDS: dict[str, dict[str, Any]] = {
    "frozen tower": {},
    "tower that learns": {"train_vision": True},
    "adapters": {"lora": 2},
    "played": {"prompts": 2, "group": 3, "max_tokens": 4, "kl": 0.01, "env_workers": 0},
}
STEPS = 2


def rows() -> list[dict[str, Any]]:
    """Some have pictures, so that micro-batches of a process may have none."""
    seen = [message("what?", (drawn(number),)) for number in range(3)]
    asked = [*seen, *({"role": "user", "content": row["prompt"]} for row in SUMS[:5])]
    return [{"messages": [one, {"role": "assistant", "content": str(n)}]} for n, one in enumerate(asked)]


def play(out: Path, model: Path, kind: str, **options: Any) -> None:
    how: dict[str, Any] = {
        "model": str(model),
        "out": str(out),
        "steps": STEPS,
        "lr": 1e-3,
        "threads": 1,
        "quiet": True,
    }
    how |= {"tokens_per_microbatch": 24, **KINDS[kind], **options}
    if kind == "played":
        posttrain.rl(TASKS, looking, **how)
    else:
        posttrain.sft(rows(), rows=4, **how)


def ranks(rank: int, port: int, out: Path) -> None:
    joined(rank, port, 2)
    process_group.joined("cpu", SFT().collective_timeout)
    opened: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        new = FSDPLearner.__init__
        patched.setattr(FSDPLearner, "__init__", lambda self, *a, **k: (new(self, *a, **k), opened.append(self))[0])
        for kind in KINDS:
            patched.setattr(PICTURES, "_held", {})
            play(out / "two" / kind, out / "start", kind, shard=True)
    for learner in opened:
        decoder = learner.model.decoder
        tower = {id(p) for p in decoder.vision_weights()}
        adapted = {id(p) for name, p in decoder.named_parameters() if "adapter" in name}
        for name, parameter in decoder.named_parameters():
            assert is_sharded(parameter) != (id(parameter) in tower | adapted), name
        assert (
            tower and len(decoder.layers) == 2 and all(map(is_sharded, decoder.layers[0].parameters())) != bool(adapted)
        )
    assert len(opened) == len(KINDS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    reader = picture_tokenizer()
    reader.save(make_seeing("qwen3_vl", out / "start", vocab_size=reader.vocab_size))
    for kind in KINDS:
        play(out / "one" / kind, out / "start", kind)
    in_processes(ranks, (free_port(), out), 2)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_run_with_pictures_is_that_of_one_process(runs: Path, kind: str) -> None:
    same_run(runs / "one" / kind, runs / "two" / kind)
    last = f"checkpoints/step-{STEPS:06d}"
    [file] = [
        path.relative_to(runs / "one" / kind / last) for path in (runs / "one" / kind / last).glob("*.safetensors")
    ]
    mine, theirs = (load_file(runs / of / kind / last / file) for of in ("one", "two"))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, atol=1e-4, rtol=1e-3)
    if kind != "adapters":
        start = load_file(runs / "start" / "model.safetensors")
        moved = {name for name, tensor in theirs.items() if not torch.equal(tensor, start[name])}
        assert any("visual" in name for name in moved) == (kind == "tower that learns") and moved
