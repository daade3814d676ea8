"""GSPO's claim about mixtures of experts: token ratios (grpo) need the experts that sampled, ratios of sequences do not.

A mixture of 16 experts of which each token takes 4, some of whose choices change with every update; rollouts are one step
old and serve several updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.experiment import (
    Comparison,
    Experiment,
    Finding,
    Numbers,
    Say,
    Settings,
    differences,
    over_seeds,
)
from experiments.harness import (
    QUIET,
    Arena,
    checkpoint_of,
    courses,
    ends,
    held_out,
    late,
    practise,
)
from posttrain.config.training import SFT
from posttrain.core.seeds import seed_of
from posttrain.envs.builtin import arithmetic
from posttrain.models.hf.transformers_folder import empty_backed
from posttrain.models.json_files import write_json
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.training_run import run_training

ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo"},
    "grpo, replay": {"algorithm": "grpo", "routing_replay": True},
    "gspo": {"algorithm": "gspo"},
    "gspo, replay": {"algorithm": "gspo", "routing_replay": True},
}
CONTEXT = 32
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1, "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}  # fmt: skip


def mixture(folder: Path, seed: int, tokenizer: Tokenizer) -> Path:
    """A new mixture of experts, as a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    assert tokenizer.eos_id is not None
    write_json(folder / "config.json", {**MODEL, "vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_id})
    found = {"scale": 1.0, "cap": None, "attention": "sdpa", "replays": False}
    with torch.random.fork_rng():
        torch.manual_seed(seed_of(seed, "mixture"))  # transformers draws weights from the global generator
        model = empty_backed(folder, torch.float32, torch.device("cpu"), CONTEXT, found)
    model.eos_ids = (tokenizer.eos_id,)
    model.save(folder)
    return folder


def sums(folder: Path, seed: int, settings: Settings) -> Arena:
    """Sums of four digits, and a mixture of experts that imitation leaves right some of the time."""
    tasks = arithmetic.tasks(4000, seed, digits=1, operands=4)
    texts = [str(task[column]) for task in tasks for column in ("prompt", "response")]
    start = mixture(folder / "new", seed, Tokenizer.train(texts, 64, "characters"))
    config = SFT(
        tasks="generated", model=str(start), out=str(folder / "imitation"), seed=seed, rows=32, lr=3e-3, warmup=20,
        epochs=settings["imitation_epochs"], router_balance=settings["balance"], **QUIET,
    )  # fmt: skip
    return Arena(tasks, "arithmetic", checkpoint_of(run_training(config, tasks[:2000])))


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    arena = sums(folder, seed, settings)
    common = {"aggregate": "token-mean", "async_steps": settings["async_steps"], "epochs": settings["epochs"]}
    return {
        arm: practise(
            arena, folder, arm.replace(", ", "-"), seed, settings, say,
            **(common if options["algorithm"] == "grpo" else {**common, "aggregate": "sequence-mean"}), **options,
        )
        for arm, options in ARMS.items()
    }  # fmt: skip


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    rows = [
        [
            arm,
            *(str(ends(numbers, arm, metric)) for metric in ("sampler/kl", "sampler/ess")),
            str(ends(numbers, arm, "routing/moved")) if "routing_replay" in options else "-",
            str(ends(numbers, arm, "accuracy")),
            str(held_out(numbers, arm)),
        ]
        for arm, options in ARMS.items()
    ]

    def end(metric: str, one: str, other: str) -> Any:
        return differences(numbers, one, other, lambda n: late(n["curves"][metric]))

    def right(one: str, other: str) -> Any:
        return differences(numbers, one, other, lambda n: n["held_out"][1])

    moved = over_seeds([late(n["grpo, replay"]["curves"]["routing/moved"]) for n in numbers.values()])
    near = settings["near"]
    comparisons = [
        Comparison("share of choices that the router would make otherwise by now", moved, at_least=0.01),
        Comparison(
            "grpo: KL to the sampler, replay minus none", end("sampler/kl", "grpo, replay", "grpo"), at_most=0.0
        ),
        Comparison(
            "grpo: effective sample size, replay minus none", end("sampler/ess", "grpo, replay", "grpo"), at_least=0.0
        ),
        Comparison("grpo: held-out accuracy, replay minus none", right("grpo, replay", "grpo"), at_least=0.0),
        Comparison("gspo: held-out accuracy, replay minus none", right("gspo, replay", "gspo"), -near, near),
        Comparison("held-out accuracy without replay, gspo minus grpo", right("gspo", "grpo"), at_least=0.0),
    ]
    titles = {
        "accuracy": "Accuracy of the rollouts",
        "sampler/kl": "KL to the sampler, nats per token",
        "sampler/ess": "Effective sample size, share",
    }
    panels = courses(numbers, ARMS, titles)
    return Finding(
        ("arm", "KL to the sampler", "effective sample size", "choices moved", "accuracy at the end",
         "held-out accuracy"),
        rows,
        comparisons,
        panels,
        ["Published (section 5.3, Qwen3-30B-A3B, 48 layers): after each update about 10% of the experts differ; GRPO "
         "does not converge without routing replay, GSPO does. There, replay uses the old policy's experts; here, "
         "those of the policy that sampled, which is one step older."],
    )  # fmt: skip


EXPERIMENT = Experiment(
    "moe-routing",
    "In a mixture of experts some experts of the same tokens change with every update, so that token ratios are noise: "
    "grpo needs the experts that sampled to be taken again, gspo does not.",
    "GSPO, arXiv 2507.18071, section 5.3",
    {"steps": 120, "prompts": 32, "group": 8, "epochs": 1, "minibatches": 4, "async_steps": 1, "lr": 3e-4, "max_tokens": 4,
     "imitation_epochs": 4.0, "balance": 0.01, "near": 0.05},
    measure,
    conclude,
)  # fmt: skip
