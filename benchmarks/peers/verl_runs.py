"""Published commands of verl, made small enough for a processor: what verl itself and `posttrain import` are given.

A command keeps its options. Smaller are the model, the rows, the lengths and, by the same factor, the batches; the steps are
the first ten, on one process instead of eight. Products are in float32 on both sides, so that rounding hides nothing. Needs
the standard library alone: both environments read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from originals import REPLY, VECTORS

STEPS, PROMPTS = 10, 8  # of a run, and of a step: a 128th of the published 1024
LONGEST = 96  # tokens of a prompt
SCORE = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of letters, less for length. Spaces at the ends, which a decoder may drop, do not count."""
    text = solution_str.strip()
    return sum(c.isalpha() for c in text) / (len(text) + 1) + 1 / (1 + len(text))
'''
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SMALL: Mapping[str, Any] = {
    "data.train_batch_size": PROMPTS,
    "data.max_response_length": REPLY,
    f"{ACTOR}.ppo_mini_batch_size": 2,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 5,
    f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "fp32",
    "trainer.n_gpus_per_node": 1,
    "trainer.total_epochs": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.logger": '["console"]',
    "reward.custom_reward_function.name": "compute_score",
}
"""Options that differ from the published command in both runs: smaller sizes, no checkpoints."""
ADDED = (f"{ACTOR}.fsdp_config.mixed_precision.param_dtype",)  # options that verl's files do not list
ON_CPU: Mapping[str, Any] = {
    "data.max_prompt_length": LONGEST,
    "data.shuffle": False,  # the rows of our run, in its order
    "data.dataloader_num_workers": 0,
    "actor_rollout_ref.model.use_remove_padding": False,  # needs flash attention
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    f"{ACTOR}.strategy": "fsdp2",  # the first FSDP refuses a processor
    "actor_rollout_ref.ref.strategy": "fsdp2",
    f"{ACTOR}.fsdp_config.use_torch_compile": False,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 5,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 5,
    "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": "fp32",
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.calculate_log_probs": False,  # those of a sampler, for a metric
    f"{ROLLOUT}.agent.num_workers": 1,
    "reward.num_workers": 1,
    "trainer.device": "cpu",
    "trainer.val_before_train": False,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "ray_kwargs.ray_init.num_cpus": 16,  # counted, not used: the trainer reserves some
    "+ray_kwargs.ray_init.num_gpus": 1,
    "+ray_kwargs.ray_init.include_dashboard": False,
}
"""Options of verl that say where it computes, and in which order it reads rows."""


@dataclass(frozen=True)
class VerlRun:
    """A command of verl. `changed`: options that differ from the published ones beyond their size."""

    name: str
    vector: str  # its name in tests/vectors/foreign_runs.json
    changed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return self.name.replace(",", "").replace(" ", "-")

    def options(self, place: Path) -> dict[str, Any]:
        """Return the options of both sides."""
        runs = json.loads(VECTORS.read_text(encoding="utf-8"))
        words = next(run["options"] for run in runs if run["name"] == self.vector)
        given: dict[str, Any] = dict(word.split("=", 1) for word in words)
        places = {
            "data.train_files": place / "rows.jsonl",
            "data.val_files": place / "rows.jsonl",
            "actor_rollout_ref.model.path": place / "model",
            "reward.custom_reward_function.path": place / "score.py",
        }
        return given | SMALL | dict(self.changed) | {name: str(path) for name, path in places.items()}


VERL_RUNS = (
    VerlRun("verl ten steps", "verl grpo qwen2-7b gsm8k"),
    VerlRun(
        "verl ten large steps",
        "verl grpo qwen2-7b gsm8k",
        {
            f"{ACTOR}.optim.lr": 1e-4,
            f"{ACTOR}.optim.clip_grad": 0.5,
            f"{ACTOR}.clip_ratio_high": 0.28,
            f"{ACTOR}.kl_loss_coef": 0.05,
            f"{ACTOR}.entropy_coeff": 0.01,
        },
    ),
)
"""The published command, and one whose weights move: ratios leave the clip range, and the KL is not 0."""


def command(options: Mapping[str, Any], added: Sequence[str] = ADDED) -> list[str]:
    """Return the words of a command, each `name=value`; options that Hydra does not know yet have a plus sign."""
    return [f"{'+' * (name in added)}{name}={value}" for name, value in options.items()]
