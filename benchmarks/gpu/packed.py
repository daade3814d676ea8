"""Models of transformers whose layers have windows, sinks, soft caps or linear attention: an update with packed tokens and
shared prompts, beside the same update with padded rows.

The kernels are torch's flash attention for ragged sequences (windows, sinks), flex attention (soft caps), and fla's for the
gated delta rule, where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from findings import Findings, Setting
from tables import Figure, Table, number

from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.transcripts import Transcript
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.hf.backed import Backed, Way
from posttrain.models.hf.token_mixing import NAME
from posttrain.models.hf.transformers_folder import load_backed
from posttrain.training.sources.packing import collate

SPARE = 10  # seconds without which a further model is not begun
SIZES = {
    "vocab_size": 32_768, "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 64, "intermediate_size": 2816, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
TINY = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48,
}  # fmt: skip
WINDOWS = {"sliding_window": 128}
LINEAR = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
KINDS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "gemma2": ("soft caps, windows", ("sliding_attention", "full_attention"), WINDOWS),
    "gpt_oss": (
        "windows, sinks", ("sliding_attention", "full_attention"),
        {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_5_text": ("gated delta rule", (*["linear_attention"] * 3, "full_attention"), LINEAR),
}  # fmt: skip
"""model_type -> (what is its own, the layers that repeat, what else its configuration has)."""


class Loss:
    wants: frozenset[str] = frozenset()

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> torch.Tensor:
        return -(batch.weight * outputs.logp).sum()


def packed(setting: Setting, found: Findings) -> None:
    groups, group, prompt, reply = (2, 2, 9, 5) if setting.tiny else (4, 8, 512, 256)
    table = found.table(
        f"Packed and padded updates, {groups} x {group} replies of {reply} tokens after prompts of {prompt}",
        "model", "its own", "packed, s", "padded rows, s", "rows / packed", "most memory packed, GB", "in rows, GB",
    )  # fmt: skip
    table.notes.append(
        f"Random models with {SIZES['num_hidden_layers']} layers of {SIZES['hidden_size']}. Seconds of an update in one "
        f"micro-batch, the median of {setting.rounds}, after one that is discarded; the two in turn."
    )
    if setting.cuda and importlib.util.find_spec("fla") is None:
        table.notes.append("fla is not installed: the gated delta rule is computed by torch's operations.")
    for kind in KINDS:
        if setting.left() < SPARE:
            table.notes.append(f"{kind} was not measured: the time of this part is over.")
            continue
        with found.trying(kind):
            _measure(setting, found, table, kind, _batch(setting, groups, group, prompt, reply))


def _measure(setting: Setting, found: Findings, table: Table, kind: str, batch: Batch) -> None:
    folder = _folder(setting, kind)
    model = load_backed(folder, json.loads((folder / "config.json").read_text()), device=torch.device(setting.device))
    model.activation_room = float("inf")
    learner = LocalLearner(model, Optimization(lr=1e-6), precision="bfloat16")
    seconds: dict[Way, list[float]] = {"flat": [], "rows": []}
    memory: dict[Way, float] = {}
    for measured in range(setting.rounds + 1):
        for way, laps in seconds.items():
            lap, memory[way] = _update(setting, model, way, lambda: learner.update([batch], Loss()))
            if measured:
                laps.append(lap)
    flat, rows = (Figure.of(seconds[way]) for way in ("flat", "rows"))
    ratio = sum(seconds["rows"]) / sum(seconds["flat"])
    table.add(kind, KINDS[kind][0], flat, rows, number(ratio), number(memory["flat"]), number(memory["rows"]))
    found.figures[f"{kind}: rows / packed, seconds of an update"] = ratio


def _update(setting: Setting, model: Backed, way: Way, update: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of an update and the most memory in GB."""
    model.way = way
    model.attend(NAME if way == "flat" else model.rows_attention)
    if setting.cuda:
        torch.cuda.reset_peak_memory_stats()
    setting.wait()
    begin = time.perf_counter()
    update()
    setting.wait()
    seconds = time.perf_counter() - begin
    return seconds, torch.cuda.max_memory_allocated() / 1e9 if setting.cuda else float("nan")


def _batch(setting: Setting, groups: int, group: int, prompt: int, reply: int) -> Batch:
    """Return groups of replies of different lengths, up to `reply` tokens."""
    generator = torch.Generator().manual_seed(0)
    vocab = (TINY if setting.tiny else SIZES)["vocab_size"]

    def tokens(count: int) -> list[int]:
        return torch.randint(3, vocab, (count,), generator=generator).tolist()

    rollouts = []
    for _ in range(groups):
        shared = tokens(prompt)
        for place in range(group):
            transcript = Transcript()
            transcript.observe(shared)
            transcript.imitate(tokens(reply - place * reply // (2 * group)))
            rollouts.append([transcript])
    weight = torch.full((len(rollouts),), 1 / sum(t.n_scored for [t] in rollouts))
    return collate(rollouts, range(len(rollouts)), weight=weight, device=setting.device)


def _folder(setting: Setting, kind: str) -> Path:
    """Return the folder of a random model, made where it is missing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = setting.place / f"{'tiny' if setting.tiny else 'small'}-{kind}"
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    _, layers, more = KINDS[kind]
    sizes = {**SIZES, **more, **(TINY if setting.tiny else {})}
    sizes["layer_types"] = [layers[place % len(layers)] for place in range(sizes["num_hidden_layers"])]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(folder)
    (folder / "complete").touch()
    return folder
