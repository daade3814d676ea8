"""The calls of vLLM's weight transfer are those of the installed vLLM (`make test-vllm`)."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

NO_VLLM = "vLLM is not installed here: make test-vllm"
base = pytest.importorskip("vllm.distributed.weight_transfer.base", reason=NO_VLLM)


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_vllms_trainer_side_over_nccl_takes_what_is_given() -> None:
    engine = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")
    named = {field.name: field.kw_only for field in fields(engine.NCCLTrainerInitInfo)}
    positional = [name for name, keyword in named.items() if not keyword]
    assert positional[:3] == ["master_address", "master_port", "world_size"] and named["rank"]
    assert parameters(engine.NCCLTrainerWeightTransferEngine.trainer_init) == ["init_info", "client", "source"]
    assert {"client"} <= {*parameters(base.TrainerWeightTransferEngine.__init__)}
    assert base.WeightSource.__abstractmethods__ == {"metadata", "__iter__"}
    assert [field.name for field in fields(base.ParamMeta)] == ["name", "dtype", "shape"]


def test_vllms_trainer_side_within_a_gpu_meets_other_processes_only_in_what_is_replaced() -> None:
    engine = pytest.importorskip("vllm.distributed.weight_transfer.ipc_engine")
    kind = engine.IPCTrainerWeightTransferEngine
    assert parameters(kind._all_gather_and_merge_handles) == ["self", "handles"]
    assert parameters(kind._post_send_sync) == []
    replaced = [inspect.getsource(kind._all_gather_and_merge_handles), inspect.getsource(kind._post_send_sync)]
    rest = inspect.getsource(kind)
    for part in replaced:
        assert "torch.distributed" in part
        rest = rest.replace(part, "")
    assert "torch.distributed" not in rest
