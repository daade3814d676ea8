"""Steps of TRL's trainers beside ours, where TRL can be imported: same model, prompts, lengths, batch, arithmetic.

The number of rows that go through TRL's model at once is tried; the fastest counts. TRL samples with vLLM in this process
where it is installed, and else with transformers.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from findings import Findings, Setting, Watch
from shapes import model_folder, rows, tasks
from side import timed
from stepping import laps_of
from steps import Work, grpo, sft
from tables import Figure, Goal, Table, number

GOAL = Goal(1.5)
TRIED = 1  # steps of each number of rows at once, after one to warm up
Make = Callable[[int, Callable[[], bool]], Any]
"""(rows at once, what is called after each step and says whether to stop) -> a trainer."""


def trl(setting: Setting, found: Findings) -> None:
    table = found.table(
        "0.5B compared with TRL, bfloat16", "", "s a step", "tokens/s", "most memory, GB", "posttrain over TRL"
    )
    if not importlib.util.find_spec("trl"):
        table.notes.append("TRL cannot be imported here: pip install trl==1.16.0 measures it too.")
        return
    folder = model_folder("0.5b", setting)
    sampled, given = (Work(4, 4, 8), Work(8, 1, 200)) if setting.tiny else (Work(16, 16, 256), Work(64, 1, 512))
    with found.trying("GRPO"):
        vllm = bool(importlib.util.find_spec("vllm"))
        whole, label = sampled.prompts * sampled.group, f"TRL, {'vLLM' if vllm else 'transformers'} samples"
        make = partial(_grpo_trainer, setting, folder, sampled, vllm)
        ratio = _beside(
            setting, found, table, "GRPO", grpo(setting, folder, sampled), label, make, _sizes(setting, whole)
        )
        told = GOAL.judge(ratio) if vllm else "not judged: vLLM is not installed here"
        table.notes.append(f"GRPO: goal against TRL with vLLM: {told}")
    with found.trying("SFT"):
        _beside(
            setting, found, table, "SFT", sft(setting, folder, given), "TRL",
            partial(_sft_trainer, setting, folder, given), _sizes(setting, given.prompts),
        )  # fmt: skip


def _sizes(setting: Setting, whole: int) -> list[int]:
    return [whole // 2] if setting.tiny else [size for size in (16, 32) if size <= whole]


def _beside(
    setting: Setting, found: Findings, table: Table, name: str, config: Any, label: str, make: Make, sizes: list[int]
) -> float:
    """Two rows, ours and TRL's; returns how many times faster ours is."""
    laps, taken = laps_of(setting, config)
    ours, tokens = Figure.of([lap["step"] for lap in laps]), laps[0]["tokens"]
    table.add(f"{name}, posttrain", ours, Figure.of([tokens / s for s in ours.values]), number(taken.most), "")
    found.write()
    tried: dict[int, float] = {}
    for size in sizes:
        with found.trying(f"{name}, TRL with {size} at once"):
            tried[size] = min(_seconds(setting, make, size, TRIED)[0])
    best = min(tried, key=lambda size: tried[size])
    table.notes.append(f"{name}, TRL, rows at once: {', '.join(f'{n}: {number(s)} s' for n, s in tried.items())}")
    seconds, memory = _seconds(setting, make, best, setting.rounds)
    theirs = Figure.of(seconds)
    ratio = theirs.median / ours.median
    speed = Figure.of([tokens / s for s in seconds])
    table.add(f"{name}, {label}, {best} at once", theirs, speed, number(memory), f"{number(ratio)}x")
    found.figures[f"{name}: posttrain over TRL"] = ratio
    return ratio


def _seconds(setting: Setting, make: Make, size: int, rounds: int) -> tuple[Sequence[float], float]:
    """Seconds of each step after the first, and the most memory in GB."""
    watch, ended = Watch(setting), list[float]()

    def after() -> bool:
        setting.wait()
        ended.append(time.perf_counter())
        return len(ended) > rounds

    trainer = make(size, after)
    timed(trainer.train)
    return [b - a for a, b in pairwise(ended)], watch.most()


def _common(setting: Setting) -> dict[str, Any]:
    from trl_side import COMMON

    own = {"use_cpu": not setting.cuda, "bf16": True, "output_dir": str(setting.run_folder("trl"))}
    return {**COMMON, **own, "model_init_kwargs": {"dtype": "float32"}}


def _tokenizer(folder: Path) -> Any:
    """transformers takes every tokenizer beside a Qwen2 model for Qwen's own, unless it is given."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|pad|>", eos_token="<|eos|>"
    )


def _grpo_trainer(setting: Setting, folder: Path, work: Work, vllm: bool, size: int, after: Callable[[], bool]) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl_side import AfterStep, Scores

    given = [{"prompt": task["prompt"], "answer": ""} for task in tasks(work.prompts)] * 100
    sampler = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4} if vllm else {}
    return GRPOTrainer(
        model=str(folder),
        reward_funcs=Scores("signal"),
        args=GRPOConfig(
            **_common(setting),
            **sampler,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=work.prompts * work.group // size,
            num_generations=work.group,
            max_completion_length=work.tokens,
            beta=0.0,
            loss_type="grpo",
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list(given),
        processing_class=_tokenizer(folder),
        callbacks=[AfterStep(after)],
    )


def _sft_trainer(setting: Setting, folder: Path, work: Work, size: int, after: Callable[[], bool]) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from trl_side import AfterStep

    given = [{"prompt": row["prompt"], "completion": row["response"]} for row in rows(work.prompts, work.tokens)]
    return SFTTrainer(
        model=str(folder),
        args=SFTConfig(
            **_common(setting),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=work.prompts // size,
            max_length=None,
        ),
        train_dataset=Dataset.from_list(given),
        processing_class=_tokenizer(folder),
        callbacks=[AfterStep(after)],
    )
