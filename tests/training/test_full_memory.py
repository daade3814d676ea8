"""Full memory, of a GPU or of the machine, ends a run in a line that names what takes less, with the last step saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sums import SUMS

import posttrain
from posttrain.config.training import RL, SFT
from posttrain.core.types import UserError
from posttrain.learners.local_learner import LocalLearner
from posttrain.training.full_memory import full_memory_in_words

# as torch writes it: c10/cuda/CUDACachingAllocator.cpp
TOLD = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.11 GiB of which 1.20 GiB is free. "
    "Process 4711 has 20.50 GiB memory in use. Including non-PyTorch memory, this process has 57.41 GiB memory in use. Of "
    "the allocated memory 50.12 GiB is allocated by PyTorch, and 6.33 GiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True."
)


def said(config: Any, told: str = TOLD, kind: type[Exception] = torch.OutOfMemoryError) -> str:
    with pytest.raises(UserError) as found, full_memory_in_words(config):
        raise kind(told)
    assert found.value.code == 1
    return str(found.value)


def test_the_message_names_what_takes_the_memory_and_options_that_are_not_used_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    full = "GPU 3 has 79.11 GiB and no room for 2.00 GiB more (50.12 GiB of tensors, 20.50 GiB of another process)"
    ways = "--tokens-per-microbatch 2048 or less, --recompute layers, --offload activations optimizer, fewer --slots"
    ways += ", less --engine-cache"
    pieces = "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, as 6.33 GiB are in pieces"
    assert said(RL()) == f"the GPU's memory is full: {full}; try {ways}, {pieces}"
    assert pieces not in said(RL(engine="vllm", weight_sync="ipc"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    used = RL(engine="vllm", shard=True, recompute="layers", tokens_per_microbatch=8192)
    assert said(used).endswith("; try --tokens-per-microbatch 4096, less --engine-cache")
    assert said(SFT(recompute="layers"), "HIP out of memory").startswith(
        "the GPU's memory is full: HIP out of memory; try "
    )


def test_full_memory_of_the_machine_is_a_line_too_and_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError) as real:  # a tensor of 2 EiB
        torch.empty(1 << 61, dtype=torch.uint8)
    assert said(RL(), str(real.value), RuntimeError).startswith(
        "the machine's memory is full: there is no room for 2,147,483,648.0 GiB more; try --tokens-per-microbatch"
    )
    assert said(SFT(), "", MemoryError).startswith("the machine's memory is full; try --tokens-per-microbatch")
    with pytest.raises(RuntimeError, match="^shapes differ$"), full_memory_in_words(RL()):
        raise RuntimeError("shapes differ")


def test_a_run_whose_gpu_is_full_ends_in_a_line_with_its_last_step_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = LocalLearner.update

    def full(self: LocalLearner, *given: Any) -> Any:
        if self.version == 2:
            raise torch.OutOfMemoryError(TOLD)
        return update(self, *given)

    monkeypatch.setattr(LocalLearner, "update", full)
    small: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "context": 32, "tokenizer": "characters"}
    with pytest.raises(UserError, match="the GPU's memory is full: .*; fix it and continue after step 2") as found:
        posttrain.sft(SUMS, out=str(tmp_path / "run"), steps=4, rows=4, save_every=9, threads=1, quiet=True, **small)
    assert found.value.code == 1 and (tmp_path / "run" / "checkpoints" / "step-000002").exists()
