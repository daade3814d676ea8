"""verl's side of its published commands: the configuration that Hydra resolves, its learning rates, its loss functions.

    python benchmarks/peers/originals_verl.py FOLDER

Runs in verl's environment, after `originals_configured.py`. The trainer itself needs Ray and a GPU and is not run.
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import verl
from exchange import Answer, Case, Side, load_cases, record
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from originals import VECTORS
from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import ActorConfig

CONFIGS = Path(verl.__file__).parent / "trainer" / "config"


def resolved(run: dict[str, Any]) -> Any:
    """The configuration as Hydra composes it from verl's files and the command."""
    words = [word.replace("$HOME", "/home").strip() for word in run["options"]]
    words = [re.sub(r"\$\(\((\d+) \* (\d+)\)\)", lambda m: str(int(m[1]) * int(m[2])), word) for word in words]
    words = [re.sub(r'="(\[.*\])"$', r"=\1", re.sub(r"='(\[.*\])'$", r"=\1", word)) for word in words]
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose("ppo_trainer", overrides=words)


def rates(optim: Any, steps: int, updates: int) -> list[float]:
    """The learning rate of every update, by verl's own schedules; they move once a step (engine_workers.py:308)."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=optim.lr)
    warm = optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else int(optim.lr_warmup_steps_ratio * steps)
    if optim.lr_scheduler_type == "cosine":
        schedule = get_cosine_schedule_with_warmup(
            optimizer, warm, steps, min_lr_ratio=optim.min_lr_ratio, num_cycles=optim.num_cycles
        )
    else:
        schedule = get_constant_schedule_with_warmup(optimizer, warm)
    found: list[float] = []
    for _ in range(steps):
        found += [optimizer.param_groups[0]["lr"]] * updates
        optimizer.step()
        schedule.step()
    return found


def quantities(config: Any, rows: int) -> dict[str, Any]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    prompts, optim = config.data.train_batch_size, actor.optim
    # engine_workers.py:287: rollouts of a step // those of a mini-batch, times the passes
    updates = prompts * rollout.n // (actor.ppo_mini_batch_size * rollout.n) * actor.ppo_epochs
    # ray_trainer.py:404-438: the loader drops the last batch of a pass
    steps = config.trainer.total_training_steps or rows // prompts * config.trainer.total_epochs
    in_reward = config.algorithm.use_kl_in_reward
    return {
        "betas": list(optim.betas),
        "weight decay": optim.weight_decay,
        "gradient clipping": optim.clip_grad,
        "products": actor.fsdp_config.dtype,
        "prompts of a step": prompts,
        "replies to a prompt": rollout.n,
        "updates of a step": updates,
        "rollouts of an update": actor.ppo_mini_batch_size * rollout.n,
        "steps": steps,
        "learning rates": rates(optim, steps, updates),
        "KL coefficient": actor.kl_loss_coef
        if actor.use_kl_loss
        else config.algorithm.kl_ctrl.kl_coef
        if in_reward
        else 0.0,
        "entropy coefficient": actor.entropy_coeff,
        "temperature": rollout.temperature,
        "longest reply": config.data.max_response_length,
    }


def loss(config: Any, case: Case) -> Answer:
    """The policy's loss as `ppo_loss` (workers/utils/losses.py) puts it together, from two micro-batches of an update."""
    own = OmegaConf.to_container(config.actor_rollout_ref.actor, resolve=True)
    names = (
        "clip_ratio",
        "clip_ratio_low",
        "clip_ratio_high",
        "clip_ratio_c",
        "tau_pos",
        "tau_neg",
        "loss_scale_factor",
    )
    settings = {name: own[name] for name in names if own.get(name) is not None}
    actor = ActorConfig(strategy="fsdp", rollout_n=4, use_dynamic_bsz=True, **settings)
    mode, size = own["loss_agg_mode"], len(case.length)
    batch = {"dp_size": 1, "batch_num_tokens": case.mask.sum(), "global_batch_size": size}
    actor.global_batch_info.update(batch, loss_scale_factor=own.get("loss_scale_factor"))
    logp, entropy = case.slopes(case.logp), case.slopes(case.entropy)
    total = torch.zeros((), dtype=torch.float64)
    for part in torch.arange(size).chunk(2):
        mask = case.mask[part]
        function = core_algos.get_policy_loss_fn(own["policy_loss"]["loss_mode"])
        value, _ = function(
            old_log_prob=case.padded(case.old)[part], log_prob=logp[part], advantages=case.padded(case.advantage)[part],
            response_mask=mask, loss_agg_mode=mode, config=actor,
        )  # fmt: skip
        whole = {"loss_mask": mask, "loss_agg_mode": mode, **actor.global_batch_info}
        total = total + value - own["entropy_coeff"] * core_algos.agg_loss(entropy[part], **whole)
        if own["use_kl_loss"]:
            kl = core_algos.kl_penalty(logp[part], case.padded(case.ref)[part], own["kl_loss_type"])
            total = total + own["kl_loss_coef"] * core_algos.agg_loss(kl, **whole)
    return case.graded(total, logp)


def main(folder: Path) -> None:
    asked = json.loads((folder / "recipes.json").read_text())
    losses, found = Side(), {}
    for run in json.loads(VECTORS.read_text(encoding="utf-8")):
        if run["name"].startswith("verl") and run["command"].endswith(("main_ppo", "main_dapo")):
            config = resolved(run)
            found[run["name"]] = quantities(config, asked[run["name"]]["rows"])
            losses.add(run["name"], partial(loss, config))
    record("verl", losses, load_cases(folder), folder, ["verl"])
    found["version"] = f"verl {version('verl')}, hydra-core {version('hydra-core')}, torch {version('torch')}"
    (folder / "verl-quantities.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
