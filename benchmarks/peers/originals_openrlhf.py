"""OpenRLHF's side of its published commands: the options that its parsers return, its learning rates, its loss.

    python benchmarks/peers/originals_openrlhf.py FOLDER

Runs in verl's environment, after `originals_configured.py`. The trainer itself needs Ray, vLLM and DeepSpeed and is not run.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import math
import os
import sys
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers.optimization import get_scheduler  # before DeepSpeed's stand-in

# isort: split
from exchange import Answer, Case, Side, load_cases, record
from openrlhf_side import aggregate_loss, compute_approx_kl, policy_loss
from originals import VECTORS


def parsed(trainer: str, words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The options by OpenRLHF's own parser: the statements of its main block up to `parse_args`; and refused words."""
    spec = find_spec("openrlhf")
    assert spec is not None and spec.submodule_search_locations
    tree = ast.parse(Path(spec.submodule_search_locations[0], "cli", f"{trainer}.py").read_text(encoding="utf-8"))
    main = next(node for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))
    found: dict[str, Any] = {"argparse": argparse, "datetime": datetime.datetime, "os": os}
    for statement in main.body:
        if "parse_args" in ast.unparse(statement):
            break
        exec(compile(ast.Module([statement], []), trainer, "exec"), found)
    args, unknown = found["parser"].parse_known_args(words)
    return vars(args), unknown


def rates(args: dict[str, Any], lr: float, before: str, steps: int) -> list[float]:
    """The learning rates as DeepSpeed's strategy asks transformers for them (utils/deepspeed/deepspeed.py:367-384)."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    name = args[f"{before}lr_scheduler"]
    more = {"min_lr_rate": args[f"{before}min_lr_ratio"]} if "min_lr" in name else {}
    warm = math.ceil(steps * args[f"{before}lr_warmup_ratio"])
    schedule = get_scheduler(
        name, optimizer, num_warmup_steps=warm, num_training_steps=steps, scheduler_specific_kwargs=more
    )
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def quantities(args: dict[str, Any], trainer: str, rows: int) -> dict[str, Any]:
    before = "actor." if trainer == "train_ppo_ray" else ""
    found = {
        "betas": list(args[f"{before}adam.betas"]),
        "weight decay": args[f"{before}adam.weight_decay"],
        "gradient clipping": args[f"{before}max_norm"],
        "products": {"bf16": "bfloat16"}[args["ds.param_dtype"]],
    }
    if trainer != "train_ppo_ray":
        passes = args["train.max_epochs"]
        return found | {
            "rows of an update": args["train.batch_size"],
            "passes": passes,
            "schedule": args["lr_scheduler"].split("_")[0],
        }
    rows = min(rows, args["data.max_samples"])
    prompts, group, size = args["rollout.batch_size"], args["rollout.n_samples_per_prompt"], args["train.batch_size"]
    passes, episodes = args["train.max_epochs"], args["train.num_episodes"]
    most = rows * group // size * episodes * passes  # ppo_trainer.py:72
    return found | {
        "prompts of a step": prompts,
        "replies to a prompt": group,
        "updates of a step": prompts * group // size * passes,
        "rollouts of an update": size,
        "steps": math.ceil(rows / prompts) * episodes,
        "learning rates": rates(args, args["actor.adam.lr"], before, most),
        "KL coefficient": args["algo.kl.init_coef"],
        "entropy coefficient": args["actor.entropy_coef"] or 0.0,
        "temperature": args["rollout.temperature"],
        "longest reply": args["rollout.max_new_tokens"] or args["data.max_len"],
    }


def loss(args: dict[str, Any], case: Case) -> Answer:
    """The policy's loss as `ppo_actor.py` puts it together, without the correction of the sampler."""
    low, high = args["actor.eps_clip_low_high"] or [args["actor.eps_clip"]] * 2
    by_token = args["actor.loss_agg_mode"] == "token-mean"
    settings = {"clip_eps_low": low, "clip_eps_high": high, "dual_clip": args["actor.dual_clip"],
                "token_level_loss": by_token, "policy_loss_type": args["actor.policy_loss_type"]}  # fmt: skip
    plain = policy_loss(settings, case)
    if not args["algo.kl.use_loss"]:
        return plain
    logp = case.slopes(case.logp)
    penalty = compute_approx_kl(logp, case.padded(case.ref), kl_estimator=args["algo.kl.estimator"])
    kl = case.graded(args["algo.kl.init_coef"] * aggregate_loss(penalty, case.mask, by_token), logp)
    return {key: plain[key] + kl[key] for key in plain}


def main(folder: Path) -> None:
    asked = json.loads((folder / "recipes.json").read_text())
    losses, found = Side(), {}
    for run in json.loads(VECTORS.read_text(encoding="utf-8")):
        if not run["name"].startswith("openrlhf") or "0.9" in run["name"]:
            continue
        trainer = run["command"].rpartition(".")[2]
        args, refused = parsed(trainer, [word for option in run["options"] for word in option.split()])
        found[run["name"]] = quantities(args, trainer, asked[run["name"]]["rows"]) | {"refused": refused}
        if trainer == "train_ppo_ray":
            losses.add(run["name"], partial(loss, args))
    record("openrlhf", losses, load_cases(folder), folder, ["openrlhf"])
    found["version"] = (
        f"openrlhf {version('openrlhf')}, transformers {version('transformers')}, torch {version('torch')}"
    )
    (folder / "openrlhf-quantities.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
