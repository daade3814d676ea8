"""Of an engine's log the error is shown that the others follow from, with what a user can do about it.

The lines of vLLM are those of 0.32 on a processor, 2026-11-29, those of SGLang as its source of 0.5.23 writes them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.engines.engine_log import TAIL, last_error
from posttrain.engines.sglang.sglang_setup import SGLangSetup
from posttrain.engines.vllm.vllm_setup import VLLMSetup

API, CORE = "(APIServer pid=31029) ", "(EngineCore pid=31200) ERROR 11-29 21:04:00 [core.py:1114] "
FAILED = f"""{API}    raise RuntimeError(
{API}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore': 1}}
"""

LOGS = {
    "an option that vLLM does not know": (
        "                [model_tag]\nentry.py: error: unrecognized arguments: --no-such-option\n",
        "unrecognized arguments: --no-such-option",
        "install vLLM as the guide says (docs/guides/vllm.md)",
    ),
    "a model that vLLM does not know": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, Model architectures ['OddForCausalLM'] are not supported for now. Supported architectures: "
        "dict_keys(['AfmoeForCausalLM']) [type=value_error, input_value=ArgsKwargs((), {'model_co... None}), input_type=A]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error\n",
        "Model architectures ['OddForCausalLM'] are not supported for now. Supported architectures: "
        "dict_keys(['AfmoeForCausalLM'])",
        "it cannot sample from this model: leave out --engine vllm, or install a version that can",
    ),
    "a kind of model that transformers does not know": (
        "  Value error, The checkpoint you are trying to load has model type `odd` but Transformers does not recognize this "
        "architecture. This could be because of an issue with the checkpoint.\n\nYou can update Transformers with the "
        "command `pip install --upgrade transformers`. [type=value_error, input_value=A, input_type=ArgsKwargs]\n",
        "The checkpoint you are trying to load has model type `odd` but Transformers does not recognize this architecture. "
        "This could be because of an issue with the checkpoint.",
        "it cannot sample from this model: leave out --engine vllm, or install a version that can",
    ),
    "a value that an option cannot have": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig\nblock_size\n"
        "  Input should be greater than 0 [type=greater_than, input_value=0, input_type=int]\n",
        "Input should be greater than 0",
        "",
    ),
    "heads that GPUs cannot share": (
        "  Value error, Total number of attention heads (4) must be divisible by tensor parallel size (3). "
        "[type=value_error, input_value=ArgsKwargs((), {'model_co... 'shutdown_timeout': 0}), input_type=ArgsKwargs]\n",
        "Total number of attention heads (4) must be divisible by tensor parallel size (3).",
        "give another --engine-tensor-parallel",
    ),
    "more GPUs than there are": (
        "  Value error, World size (8) is larger than the number of available GPUs (4) in this node. [type=value_error]\n",
        "World size (8) is larger than the number of available GPUs (4) in this node.",
        "give another --engine-tensor-parallel",
    ),
    "a cache of fewer tokens than the context, in another process": (
        f"{CORE}Traceback (most recent call last):\n"
        f"{CORE}ValueError: To serve at least one request with the model's max seq len (4096), (0.02 GiB KV cache is "
        f"needed, which is larger than the available KV cache memory (0.0 GiB).\n{FAILED}",
        "ValueError: To serve at least one request with the model's max seq len (4096), (0.02 GiB KV cache is needed, which "
        "is larger than the available KV cache memory (0.0 GiB).",
        "give a larger --engine-cache, or more GPUs of each server (--engine-tensor-parallel)",
    ),
    "a GPU that is full": (
        f"{CORE}ValueError: Free memory on device cuda:0 (1.0/79.2 GiB) on startup is less than desired GPU memory "
        f"utilization (0.05, 3.96 GiB).\n{FAILED}",
        "ValueError: Free memory on device cuda:0 (1.0/79.2 GiB) on startup is less than desired GPU memory utilization "
        "(0.05, 3.96 GiB).",
        "give it GPUs of its own (--engine-devices), or a smaller --engine-cache",
    ),
    "no line that says why": ("INFO 11-29 21:04:00 [api_utils.py:347] Error: is not one\nKilled\n", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("what", LOGS)
def test_the_error_that_others_follow_from_is_found_with_its_fix(what: str, tmp_path: Path) -> None:
    text, error, fix = LOGS[what]
    (tmp_path / "log").write_text("OSError: an earlier one\n" * bool(error) + text)
    assert last_error(tmp_path / "log") == error
    assert VLLMSetup.fix(error) == fix


def test_the_scheduler_of_sglang_says_why_the_server_ended(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "[2026-11-29 21:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "scheduler.py", line 6353, in run_scheduler_process\n'
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n\n"
        "[2026-11-29 21:00:01 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40123\n\n"
        "[2026-11-29 21:00:01 TP2] Scheduler hit an exception: Traceback (most recent call last):\n"
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited\n\n"
        "BrokenPipeError: [Errno 32] Broken pipe\n"
        "[2026-11-29 21:00:01] Received sigquit from a child process. It usually means the child failed.\n"
    )
    error = last_error(tmp_path / "log")
    assert error == "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    assert SGLangSetup.fix(error) == LOGS["a cache of fewer tokens than the context, in another process"][2]
    assert SGLangSetup.fix("ValueError: Model architectures ['Odd'] are not supported").startswith(
        "it cannot sample from this model: leave out --engine sglang"
    )


def test_a_log_of_any_bytes_and_length_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"")
    assert last_error(log) == ""
    long = b"\xff\xfe noise\n" * (TAIL // 8)
    log.write_bytes(b"ValueError: too early\n" + long + b"\x1b[31mValueError: \x1b[0mlast\xff\n" + b"\xff\n" * 9)
    assert last_error(log) == "ValueError: last\ufffd"
    log.write_bytes(b"ValueError: too early\n" + long)
    assert last_error(log) == ""
