"""The same yardsticks on a CUDA card, with a random model of the shape of Qwen2.5-0.5B in bfloat16.

    python benchmarks/speed/gpu.py [--rounds 3] [--into docs/results/speed-gpu.md]

Sampling, updates, their share of the card's measured peak, memory, and whole steps of GRPO; the latter beside TRL where TRL
can be imported in this environment. Needs no data: prompts are sums, the model is random and never ends a reply by itself,
so all replies have the same length on both sides. Weights, gradients and moments are float32, arithmetic is bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from flops import BACKWARD, config_of, forward, peak_shapes, product_peak
from posttrain_side import Bench, also, leave
from rich.console import Console
from tables import Figure, Table, number
from work import LEARNING_RATE

from posttrain.config.training import RL
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.training_run import run_training

ROOT = Path(__file__).resolve().parents[2]
NEVER = 1e-12
QWEN = DecoderConfig(
    vocab=151936, hidden=896, layers=24, heads=14, kv_heads=2, head_size=64, intermediate=4864, context=4096,
    rope_theta=1e6, qkv_bias=True, tied=True,
)  # fmt: skip
TINY = replace(QWEN, vocab=512, hidden=64, layers=2, heads=4, head_size=16, intermediate=128)


@dataclass(frozen=True)
class Size:
    """How much is asked of the card."""

    device: str
    prompts: int
    group: int
    tokens: int  # of each reply
    rounds: int

    @property
    def sampled(self) -> int:
        return self.prompts * self.group * self.tokens


def main() -> int:
    options = read_options()
    if options.device != "cpu" and not torch.cuda.is_available():
        print("gpu.py measures a CUDA card, and PyTorch finds none on this machine", file=sys.stderr)
        return 2
    shape = TINY if options.tiny else QWEN
    size = Size(options.device, 4, 4, 8, options.rounds) if options.tiny else Size("cuda", 16, 16, 512, options.rounds)
    folder = make(options.place.absolute() / f"qwen-{shape.vocab}", shape, size)
    console = Console(width=max(130, Console().width), soft_wrap=True)
    about = f"{card(size.device)}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    console.print(f"{about}; {size.prompts} prompts x {size.group} replies of {size.tokens} tokens")
    tables = [parts_of_a_step(folder, size), whole_steps(folder, size)]
    for table in tables:
        table.show(console.print)
    if options.into:
        with open(options.into, "a") as file:
            file.write(f"\n## {about}\n\n" + "\n".join(table.markdown() for table in tables))
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--place", type=Path, default=ROOT / "runs" / "bench" / "gpu", help="model and runs")
    parser.add_argument("--into", help="append the tables to this document")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)  # cpu: does it run at all?
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def make(folder: Path, shape: DecoderConfig, size: Size) -> Path:
    """The model's folder, with characters for tokens, and the tasks beside it."""
    from models import set_end

    folder.mkdir(parents=True, exist_ok=True)
    texts = prompts(size.prompts)
    tasks = [{"id": str(i), "prompt": text, "answer": ""} for i, text in enumerate(texts)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    if not (folder / "config.json").exists():
        tokenizer = Tokenizer.train(texts, 64, "characters")
        assert tokenizer.eos_id is not None
        model = new_decoder(shape, seed=0)
        model.eos_ids = (tokenizer.eos_id,)
        set_end(model, tokenizer.eos_id, NEVER)
        save_model(model, folder, tokenizer)
    return folder


def prompts(count: int) -> list[str]:
    """Questions of different lengths, about 100 characters each."""
    return [f"What is {' + '.join(str(i * 37 + k) for k in range(16 + i % 8))}? Answer:" for i in range(count)]


def card(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "processor"


# -- sampling and updates ----------------------------------------------------------------------------------------------


def parts_of_a_step(folder: Path, size: Size) -> Table:
    """Engine and learner, called directly."""
    table = Table(
        f"Sampling and updates, {size.prompts * size.group} replies of {size.tokens} tokens, bfloat16",
        ("", "tokens per second", "TFLOP/s, useful", "TFLOP/s, peak", "share, %", "most memory, MiB"),
        notes=["Useful: prompts once per group, no recomputation. Tokens: sampled ones, in the update too."],
    )
    bench = Bench(str(folder), threads=os.cpu_count() or 1, device=size.device, precision="bfloat16")
    wanted = [(tuple(bench.tokenizer.encode(p)), size.tokens) for p in prompts(size.prompts) for _ in range(size.group)]
    shape = config_of(folder)
    groups = [(len(wanted[i * size.group][0]), [size.tokens] * size.group) for i in range(size.prompts)]
    useful = {"sampling": forward(shape, groups), "update": BACKWARD * forward(shape, groups)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in useful}
    peaks = []
    for measured in (False, *[True] * size.rounds):
        peak = product_peak(peak_shapes(shape), torch.bfloat16, size.device)
        memory = Watch(size.device)
        seconds, completions = bench.sampled(wanted)
        laps = {"sampling": {"seconds": seconds, "memory": memory.most()}}
        batches = bench.laid(wanted, completions)
        memory = Watch(size.device)
        laps["update"] = {"seconds": bench.updated(batches), "memory": memory.most()}
        if measured:
            peaks.append(peak / 1e12)
            for name, lap in laps.items():
                found[name].append(lap)
    top = Figure.of(peaks)
    for name, each in found.items():
        speed = Figure.of([size.sampled / lap["seconds"] for lap in each])
        rate = Figure.of([useful[name] / lap["seconds"] / 1e12 for lap in each])
        share = Figure.of([100 * x for x in rate.over(top).values])
        table.add(name, speed, rate, top, share, number(each[-1]["memory"]))
    return table


class Watch:
    """The most memory that tensors took on the card since this was made."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def most(self) -> float:
        return torch.cuda.max_memory_allocated() / (1 << 20) if self.device == "cuda" else 0.0


# -- steps of the trainers ---------------------------------------------------------------------------------------------


def whole_steps(folder: Path, size: Size) -> Table:
    """GRPO from end to end. The first step of each trainer is left out; between steps nobody takes turns here."""
    table = Table(
        f"A step of GRPO from end to end, {size.prompts} prompts x {size.group} rollouts of {size.tokens} tokens",
        ("", "tokens per second", "seconds per step", "most memory, MiB"),
    )
    sides: dict[str, Callable[[Path, Size], tuple[list[float], float]]] = {"posttrain": our_steps}
    if importlib.util.find_spec("trl"):
        for batch in (size.prompts * size.group // 8, size.prompts * size.group // 32):
            sides[f"TRL, update with {max(1, batch)} at once"] = trl_steps(max(1, batch))
    else:
        table.notes.append("TRL cannot be imported here: pip install trl==1.16.0 measures it too.")
    speed: dict[str, Figure] = {}
    for name, steps in sides.items():
        seconds, memory = steps(folder, size)
        speed[name] = Figure.of([size.sampled / s for s in seconds])
        table.add(name, speed[name], Figure.of(seconds), number(memory))
    if len(speed) > 1:
        best = max((f.median, name) for name, f in speed.items() if name != "posttrain")
        table.notes.append(f"posttrain over {best[1]}: {number(speed['posttrain'].median / best[0])}x")
    return table


def our_steps(folder: Path, size: Size) -> tuple[list[float], float]:
    """Seconds of each step of `posttrain rl`, and the most memory."""
    config = RL(
        tasks=str(folder / "tasks.jsonl"),
        env=f"{Path(__file__).with_name('rewards.py')}:signal",
        model=str(folder),
        out=str(folder.with_name("run")),
        overwrite=True,
        quiet=True,
        device=size.device,
        precision="bfloat16",
        algorithm="grpo",
        prompts=size.prompts,
        group=size.group,
        max_tokens=size.tokens,
        settings={"kl": 0.0},
        lr=LEARNING_RATE,
        steps=1_000_000,
        save_every=1_000_000,
        health="off",
    )
    memory, ends = Watch(size.device), Ends(size.rounds)
    also(lambda trained: leave(ends.reached()))
    with suppress(SystemExit):
        run_training(config)
    return ends.seconds, memory.most()


def trl_steps(batch: int) -> Callable[[Path, Size], tuple[list[float], float]]:
    """The same of TRL's trainer, `batch` rollouts at once in its update."""

    def steps(folder: Path, size: Size) -> tuple[list[float], float]:
        from datasets import Dataset
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer
        from trl_side import COMMON, AfterStep, Scores

        memory, ends = Watch(size.device), Ends(size.rounds)
        rollouts = size.prompts * size.group
        tasks = [{"prompt": p, "answer": ""} for p in prompts(size.prompts)] * 100
        trainer = GRPOTrainer(
            model=str(folder),
            reward_funcs=Scores("signal"),
            args=GRPOConfig(
                **{**COMMON, "use_cpu": size.device == "cpu", "bf16": True},
                output_dir=str(folder.with_name("trl")),
                model_init_kwargs={"dtype": "float32"},
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=rollouts // batch,
                num_generations=size.group,
                max_completion_length=size.tokens,
                beta=0.0,
                loss_type="grpo",
                shuffle_dataset=False,
            ),
            train_dataset=Dataset.from_list(tasks),
            # transformers takes every tokenizer beside a Qwen2 model for Qwen's own, unless it is given
            processing_class=PreTrainedTokenizerFast(
                tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|pad|>", eos_token="<|eos|>"
            ),
            callbacks=[AfterStep(ends.reached)],
        )
        trainer.train()
        return ends.seconds, memory.most()

    return steps


class Ends:
    """When each step ended. The first one starts the clock."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.times = rounds, list[float]()

    def reached(self) -> bool:
        """Note the end of a step; whether there were enough."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return len(self.times) > self.rounds

    @property
    def seconds(self) -> Sequence[Any]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


if __name__ == "__main__":
    sys.exit(main())
