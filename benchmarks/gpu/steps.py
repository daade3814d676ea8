"""Whole steps of the trainers in bfloat16, with seconds by phase, useful arithmetic and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from findings import DATASHEET, Findings, Setting, ceilings
from flops import forward
from shapes import SIGNAL, model_folder, pairs, prompts, rows, shape_of, tasks, write_rows
from side import timed
from stepping import Lap, Memory, common, known, laps_of
from tables import Figure, Goal, Table, number
from work import LEARNING_RATE

from posttrain.config.training import RL, SFT, Prefer
from posttrain.models.native.decoder_flops import BACKWARD

COLUMNS = ("", "s a step", "s, sampling", "s, update", "tokens/s", "MFU of the update, measured peak, %")
MORE = ("of 989 TFLOP/s, %", "most memory, GB", "estimated, GB", "estimate / most")
PHASES = ("step", "rollout", "update", "tokens", "fed", "between")
LONG_SECONDS = 90  # for a step of 7B with replies of 4,096 tokens, and to open its run
MFU = Goal(45, unit=" %")
FITS = Goal(80, least=False, unit=" GB")


@dataclass(frozen=True)
class Work:
    """Which tokens a step learns from."""

    prompts: int
    group: int
    tokens: int  # of each reply, or of a row with its prompt

    def __str__(self) -> str:
        return f"{self.prompts} x {self.group} replies of {self.tokens:,} tokens"

    def flops(self, shape: Any) -> float:
        """Of an update on sampled replies: prompts once per group."""
        groups = [(len(text), [self.tokens] * self.group) for text in prompts(self.prompts)]
        return BACKWARD * forward(shape, groups)

    def flops_of_rows(self, shape: Any) -> float:
        """Of an update on rows; `group` responses share a prompt."""
        groups = [(len(text), [self.tokens - len(text)] * self.group) for text in prompts(self.prompts)]
        return BACKWARD * forward(shape, groups)


def steps(setting: Setting, found: Findings) -> None:
    tiny = setting.tiny
    table = found.table(
        "Whole steps",
        *COLUMNS,
        *MORE,
        notes=(
            f"Medians of {setting.rounds} steps after a discarded first one [minimum-maximum]. Weights, gradients and "
            "moments in float32, arithmetic in bfloat16, defaults otherwise (record, scoring process, micro-batches).",
            "tokens/s: sampled (GRPO) or learned (SFT, DPO) ones over the whole step. MFU: FLOP that the result needs "
            "(prompts once per group, no recomputation, no padding) over seconds of the update and the card's peak.",
            "Memory: the most that tensors had in any step, and what posttrain memory estimates of the same options.",
            "DPO's reference log-probabilities are computed before the first step and not measured.",
        ),
    )
    sampled = Work(4, 4, 8) if tiny else Work(16, 16, 512)
    rows_of, pairs_of = Work(8, 1, 200) if tiny else Work(64, 1, 512), Work(4, 2, 140) if tiny else Work(32, 2, 256)
    cases = {
        f"GRPO 0.5B, {sampled}": ("0.5b", sampled, grpo),
        f"GRPO 1.5B, {sampled}": ("1.5b", sampled, grpo),
        f"SFT 1.5B, {rows_of.prompts} rows of {rows_of.tokens} tokens": ("1.5b", rows_of, sft),
        f"DPO 1.5B, {pairs_of.prompts} pairs of {pairs_of.tokens} tokens": ("1.5b", pairs_of, dpo),
    }
    for label, (model, work, make) in cases.items():
        with found.trying(label):
            folder = model_folder(model, setting)
            laps, memory = laps_of(setting, make(setting, folder, work))
            flops = work.flops if make is grpo else work.flops_of_rows
            share = add_steps(setting, table, label, laps, memory, flops(shape_of(model, setting)))
            found.figures[f"{label}: MFU %"] = share
            found.figures[f"{label}: s a step"] = median(lap["step"] for lap in laps)
            if model == "1.5b":
                table.notes.append(f"{label}: goal {MFU.judge(share)}")


def add_steps(setting: Setting, table: Table, label: str, laps: Sequence[Lap], memory: Memory, useful: float) -> float:
    """A row of `COLUMNS` and `MORE`; returns the median share of the measured peak, in percent."""
    peak = ceilings(setting)["product"]
    seconds = {name: Figure.of([lap[name] for lap in laps]) for name in ("step", "rollout", "update")}
    shares = Figure.of([100 * useful / lap["update"] / peak for lap in laps])
    speed = Figure.of([lap["tokens"] / lap["step"] for lap in laps])
    sheet = 100 * useful / seconds["update"].median / DATASHEET
    table.add(
        label,
        *seconds.values(),
        speed,
        shares,
        number(sheet),
        *map(number, (memory.most, memory.estimated, memory.ratio)),
    )
    others = sorted({name for lap in laps for name in lap} - set(PHASES))
    parts = [f"{name} {number(median(lap.get(name, 0.0) for lap in laps))} s" for name in (*others, "between")]
    table.notes.append(f"{label}: {number(laps[-1]['fed'])} tokens fed; within a step {', '.join(parts)}")
    return shares.median


# -- the runs ----------------------------------------------------------------------------------------------------------


def grpo(setting: Setting, folder: Path, work: Work, **more: Any) -> RL:
    return RL(
        **common(setting, "grpo"),
        tasks=write_rows(setting.place / "tasks.jsonl", tasks(work.prompts)),
        env=SIGNAL,
        model=str(folder),
        algorithm="grpo",
        prompts=work.prompts,
        group=work.group,
        max_tokens=work.tokens,
        lr=LEARNING_RATE,
        **{"settings": {"kl": 0.0}, **more},
    )


def sft(setting: Setting, folder: Path, work: Work, **more: Any) -> SFT:
    return SFT(**_of_rows(setting, folder, work, "sft", rows(work.prompts, work.tokens)), **more)


def dpo(setting: Setting, folder: Path, work: Work) -> Prefer:
    return Prefer(**_of_rows(setting, folder, work, "dpo", pairs(work.prompts, work.tokens)))


def _of_rows(setting: Setting, folder: Path, work: Work, name: str, given: Any) -> dict[str, Any]:
    tasks_file = write_rows(setting.place / f"{name}.jsonl", given)
    own = {"tasks": tasks_file, "model": str(folder), "rows": work.prompts, "lr": LEARNING_RATE}
    return {**common(setting, name), **own}


# -- 7B ----------------------------------------------------------------------------------------------------------------


def lora7b(setting: Setting, found: Findings) -> None:
    """GRPO of adapters on a model of 7B: what a step takes, and whether it fits into 80 GB."""
    options = known(recompute="layers", frozen_weights="bfloat16")
    table = found.table(
        "GRPO of 7B with --lora 16",
        *COLUMNS,
        *MORE,
        notes=(
            f"Options used, of --recompute layers and --frozen-weights bfloat16: {options or 'none'}. "
            "MFU counts a backward pass as much as the forward pass, because frozen matrices have no gradients.",
        ),
    )
    if setting.cuda:  # a larger card answers for one of 80 GB
        room = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 1e9 * FITS.bound / room))
        table.notes.append(f"PyTorch may use {FITS.bound:g} GB of the card's {room / 1e9:.1f}.")
    folder = Path()
    with found.trying("making the model"):
        seconds = timed(lambda: model_folder("7b", setting))
        folder = model_folder("7b", setting)
        table.notes.append(f"creating and saving the model, or finding it, took {number(seconds)} s")
    lengths = (8, 16) if setting.tiny else (1024, 4096)
    for tokens in lengths:
        if tokens != lengths[0] and setting.left() < LONG_SECONDS and not setting.tiny:
            table.notes.append(
                f"replies of {tokens:,} tokens did not fit into the time of this part: --long gives it more"
            )
            continue
        _fitted(setting, found, table, folder, Work(2, 2, tokens) if setting.tiny else Work(4, 8, tokens), options)
    if setting.long or setting.tiny:
        _whole7b(setting, found, folder)


def _whole7b(setting: Setting, found: Findings, folder: Path) -> None:
    """The same of all weights, stored in bfloat16, with moments in eight bits: whether it fits into 80 GB."""
    table = found.table(
        "GRPO of all weights of 7B with --weights bfloat16 --optimizer adamw8bit", *COLUMNS, *MORE, notes=()
    )
    work = Work(2, 2, 8) if setting.tiny else Work(4, 8, 1024)
    with found.trying(str(work)):
        run = grpo(setting, folder, work, weights="bfloat16", optimizer="adamw8bit", recompute="layers")
        laps, memory = laps_of(setting, run, warm=True)
        add_steps(setting, table, str(work), laps, memory, work.flops(shape_of("7b", setting)))
        found.figures[f"7B, all weights, {work}: GB"] = memory.most


def _fitted(setting: Setting, found: Findings, table: Table, folder: Path, work: Work, options: dict[str, Any]) -> None:
    """A row of the first of some sizes of micro-batches that fits, the default first.

    Of long replies a single step is measured, the first: it takes minutes.
    """
    long = work.tokens > 1024
    for tokens in (None, 4096, 2048, 1024):
        label = f"{work}, micro-batches {'by default' if tokens is None else f'of {tokens:,} tokens'}"
        full = False
        with found.trying(label):
            try:
                make = partial(grpo, setting, folder, work, lora=16, tokens_per_microbatch=tokens, **options)
                laps, memory = laps_of(setting, make(), warm=not long)
            except torch.OutOfMemoryError:
                full = True
                raise
            add_steps(setting, table, label, laps, memory, work.flops(shape_of("7b", setting)) * 2 / 3)
            if long:
                table.notes.append(f"{label}: goal {FITS.judge(memory.most)}")
            found.figures[f"7B LoRA, {label}: GB"] = memory.most
        if not full:
            return
