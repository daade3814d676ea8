"""Imports the published commands of verl and OpenRLHF; writes the quantities of the recipes and their losses on the cases.

    python benchmarks/peers/originals_configured.py FOLDER

Runs in posttrain's environment, before `originals_verl.py` and `originals_openrlhf.py`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cases import loss_of, make_cases
from exchange import Side, record, save_cases
from originals import VECTORS

from posttrain.algorithms.all_algorithms import EVERY
from posttrain.algorithms.policy import Algorithm
from posttrain.apps.migration.migrate import recipe_for
from posttrain.apps.migration.recipe_draft import RecipeDraft
from posttrain.config.resolve import filled
from posttrain.config.verbs import VERBS
from posttrain.learners.local_learner import Optimization
from posttrain.training.adjust import adjust

ROWS = 7473  # of the runs whose command does not tell its steps: those of GSM8K
ALL = 1 << 20  # more updates than a learning rate is compared in


def imported(run: dict[str, Any], folder: Path) -> RecipeDraft:
    path = folder / "run.sh"
    path.write_text(" \\\n    ".join([run["command"], *run["options"]]) + "\n", encoding="utf-8")
    return recipe_for(str(path), None, run["rows"] or ROWS, None)


def configured(draft: RecipeDraft) -> tuple[Any, Algorithm | None]:
    """The options of a recipe, and of a run of reinforcement learning the algorithm."""
    table: dict[str, Any] = {option: value for option, (value, _) in draft.lines.items() if "." not in option}
    for option, (value, _) in draft.lines.items():
        if "." in option:
            group, _, name = option.partition(".")
            table.setdefault(group, {})[name] = value
    table["settings"] = {place: value for place, (value, _) in draft.settings.items()}
    config = filled(VERBS[draft.verb].options, table)
    return config, adjust(EVERY[config.algorithm], config) if draft.verb == "rl" else None


def quantities(config: Any, algorithm: Algorithm | None) -> dict[str, Any]:
    """Return the quantities of a recipe that the original trainer's configuration has too."""
    found = {
        "betas": list(config.betas),
        "weight decay": config.weight_decay,
        "gradient clipping": config.max_grad_norm,
        "products": config.precision,
    }
    if algorithm is None:
        return found | {"rows of an update": config.rows, "passes": config.epochs, "schedule": config.schedule}
    updates = algorithm.minibatches * algorithm.epochs
    plan = Optimization(lr=config.lr, schedule=config.schedule, warmup=config.warmup, updates=config.steps * updates)
    return found | {
        "prompts of a step": config.prompts,
        "replies to a prompt": config.group,
        "updates of a step": updates,
        "rollouts of an update": config.prompts * config.group // algorithm.minibatches,
        "steps": config.steps,
        "learning rates": [plan.rate(k + 1) for k in range(min(config.steps * updates, ALL))],
        "KL coefficient": algorithm.kl.beta if algorithm.kl else 0.0,
        "entropy coefficient": algorithm.entropy.coefficient if algorithm.entropy else 0.0,
        "temperature": config.temperature,
        "longest reply": config.max_tokens,
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    cases, losses, found = make_cases(), Side(), {}
    save_cases(cases, folder)
    for run in json.loads(VECTORS.read_text(encoding="utf-8")):
        if not run["name"].startswith(("verl", "openrlhf")):
            continue
        draft = imported(run, folder)
        config, algorithm = configured(draft)
        found[run["name"]] = {
            "recipe": draft.toml("run.sh", "recipe.toml"),
            "rows": run["rows"] or ROWS,
            **quantities(config, algorithm),
        }
        if algorithm is not None:
            row = replace(algorithm, critic=None, imitation=None, pretraining=None, correction=None)
            losses.add(run["name"], partial(loss_of, row))
    record("ours", losses, cases, folder, ["torch"])
    (folder / "recipes.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
