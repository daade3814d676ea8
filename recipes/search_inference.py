"""Compares searches at equal sampled tokens on worked sums: best-of-N, beam, best-first, lookahead, MCTS, verification.

    python recipes/search_inference.py [--seeds 0 1 2] [--out runs/search] [--page docs/guides/search.md]

The starts are those of `recipes/algorithms.py --task worked-sums`, the process reward models those of
`recipes/process_rewards.py`; a reward model that is missing is trained. To verify itself, a policy must know what a verdict
is: that of the rows "taught" imitates, beside the demonstrations of the start, verdicts on whether workings end with the
right answer. The rows "ppo" are of a policy that PPO trained, with its critic as the value of steps. Every search finds a
reply to each of 200 held-out tasks, with the same budget of sampled tokens. Finished searches are not repeated. With
--page the recipe writes its part of that page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import process_rewards
from common_tasks import WORKED_SUMS
from pages import over_seeds, write_page
from results_file import ResultsFile

import posttrain
from posttrain.core.intervals import wilson_interval
from posttrain.core.types import Task

ASKED = 200  # held-out tasks
BUDGETS = (150, 500)  # sampled tokens per reply: some five and some eighteen whole replies
WIDE: dict[str, Any] = {"search": ("best-of-n",), "search_width": 64}  # as many replies as the tokens hold
SEARCHES: dict[str, dict[str, Any]] = {
    "one reply": {"search": ("best-of-n",), "search_width": 1, "search_proposals": 1},
    "majority": {**WIDE, "choose": "majority"},
    "best-of-n": WIDE,
    "best-of-n, weighted": {**WIDE, "choose": "weighted"},
    "beam": {"search": ("beam",)},
    "lookahead": {"search": ("lookahead",)},
    "best-first": {"search": ("best-first",)},
    "mcts": {"search": ("mcts",)},
    "mcts, weighted": {"search": ("mcts",), "choose": "weighted"},
    "taught, one reply": {"search": ("best-of-n",), "search_width": 1, "search_proposals": 1, "choose": "majority"},
    "taught, majority": {**WIDE, "choose": "majority"},
    "taught, verified": {**WIDE, "choose": "verified", "verify_question": "ok?"},
    "ppo, one reply": {"search": ("best-of-n",), "search_width": 1, "search_proposals": 1, "choose": "majority"},
    "ppo, majority": {**WIDE, "choose": "majority"},
    "ppo, best-of-n": {**WIDE, "search_value": "critic"},
    "ppo, beam": {"search": ("beam",), "search_value": "critic"},
    "ppo, best-first": {"search": ("best-first",), "search_value": "critic"},
    "ppo, mcts": {"search": ("mcts",), "search_value": "critic"},
    "ppo, mcts, majority": {"search": ("mcts",), "search_value": "critic", "choose": "majority"},
}
TAUGHT = "taught"  # first word of the searches by the policy that has imitated verdicts
PPO = "ppo"  # first word of the searches by a policy that PPO trained
SHAPES = {150: {"search_width": 2, "search_proposals": 2}, 500: {"search_width": 4, "search_proposals": 4}}
"""Budget -> width and proposals of the searches that have them: a beam of this shape ends within the budget."""
NARROW = {150: {"search_width": 1, "search_proposals": 2}, 500: {"search_width": 2, "search_proposals": 3}}
"""The same of lookahead, whose rollouts take tokens too."""
COMMON: dict[str, Any] = {
    **{"samples": 1, "max_tokens": 36, "step_aggregate": "min", "env_workers": 0, "threads": 1, "quiet": True},
    "overwrite": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/search"))
    parser.add_argument("--starts", type=Path, default=Path("runs/algorithms/worked-sums/start"))
    parser.add_argument("--models", type=Path, default=Path("runs/process-rewards"), help="process reward models")
    parser.add_argument("--only", nargs="+", default=list(SEARCHES), choices=list(SEARCHES))
    parser.add_argument("--page", type=Path, help="page whose marked part is replaced")
    options = parser.parse_args()
    found = ResultsFile(options.out)
    for seed in options.seeds:
        for budget, name in product(BUDGETS, options.only):
            if key(name, budget, seed) not in found:
                start, model = _policy(options, name, seed), options.models / f"reward-model-{seed}"
                if "reward_model" in settings(name, budget) and not (model / "report.json").exists():
                    process_rewards.one(options.models, start, process_rewards.MODEL, seed)
                found.add(key(name, budget, seed), one(options.out, start, model, name, budget, seed))
    lines = table(found, options.seeds)
    print("\n".join(lines))
    if options.page:
        write_page(options.page, lines)


def _policy(options: argparse.Namespace, name: str, seed: int) -> Path:
    """Return the policy of a search. Those that have learned more than the start are trained if they are missing."""
    start: Path = options.starts / f"seed-{seed}" / "sft"
    learned = {TAUGHT: taught, PPO: practised}.get(name.split(",")[0])
    if not start.exists() and learned is not taught:
        raise SystemExit(f"{start} is missing: python recipes/algorithms.py start --task worked-sums --seeds {seed}")
    if learned is None:
        return start
    folder: Path = options.out / f"{name.split(',')[0]}-{seed}"
    if not (whole := folder.with_suffix(".json")).exists():
        whole.write_text(json.dumps(learned(start, folder, seed)))
    return folder


def taught(start: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Train a policy that knows verdicts, as a start is trained. Return its settings."""
    rows = [*WORKED_SUMS.demonstrations(WORKED_SUMS.practice(seed), seed), *verdicts(seed)]
    run = posttrain.sft(rows, out=str(folder), seed=seed, overwrite=True, **WORKED_SUMS.imitation)
    assert not run.interrupted, "half a policy is none"
    return dict(WORKED_SUMS.imitation)


def practised(start: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Train the start with PPO and a critic, with the settings of `recipes/algorithms.py`. Return them."""
    settings = WORKED_SUMS.settings(PPO)
    run = posttrain.rl(
        WORKED_SUMS.practice(seed), model=str(start), algorithm=PPO, out=str(folder), seed=seed, overwrite=True,
        **{**settings, "eval_every": 0},
    )  # fmt: skip
    assert not run.interrupted, "half a policy is none"
    return settings


def verdicts(seed: int) -> list[Task]:
    """Return the question of `--choose verified` after each solution that reward models learn from, with the verdict."""
    rows = []
    for solution in process_rewards.solutions(seed):
        prompt, reply = solution["prompt"], "\n".join(solution["steps"])
        numbers = [int(number) for number in prompt.rstrip(":").split()]
        right = process_rewards.right_answer({"numbers": numbers}, reply)
        question = SEARCHES["taught, verified"]["verify_question"]
        rows.append({"prompt": f"{prompt}{reply}\n{question}\n", "response": "Yes" if right else "No"})
    return rows


def key(name: str, budget: int, seed: int) -> str:
    return f"{name} {budget} {seed}"


def settings(name: str, budget: int) -> dict[str, Any]:
    """Return the options of `posttrain sample` for a search."""
    own = SEARCHES[name]
    shape = {} if "search_width" in own else (NARROW if name == "lookahead" else SHAPES)[budget]
    if own.get("search_value") == "critic" or own.get("choose") in ("majority", "verified"):
        scored: dict[str, Any] = {"step_aggregate": "last"}  # the default: no reward model scores a step
    else:
        scored = {"reward_model": ("{reward model}",)}
    return {**COMMON, **shape, **own, **scored, "search_tokens": budget}


def one(out: Path, start: Path, model: Path, name: str, budget: int, seed: int) -> dict[str, float]:
    """Search for a reply to each held-out task. Return the accuracy, the tokens spent and the whole replies found."""
    chosen = settings(name, budget)
    if "reward_model" in chosen:
        chosen["reward_model"] = (str(model),)
    written = posttrain.sample(
        WORKED_SUMS.unseen(seed)[:ASKED], str(start), WORKED_SUMS.env, seed=(seed,),
        out=str(out / f"{name}-{budget}-{seed}.jsonl"), **chosen,
    )  # fmt: skip
    rows = list(written.rows())
    courses = [row["samples"][0] for row in rows]
    return {
        "accuracy": sum(row["scores"][0] for row in rows) / len(rows),
        "tokens": sum(course["search_tokens"] for course in courses) / len(rows),
        "finished": sum(course["finished"] for course in courses) / len(rows),
        "unfinished": sum(not course["finished"] for course in courses) / len(rows),
        "unverified": sum(course.get("unverified", 0) for course in courses) / len(rows),
    }


def table(found: Mapping[str, Mapping[str, float]], seeds: Sequence[int]) -> list[str]:
    """Return a row for each budget and search: means over the seeds, with 95% intervals."""
    lines = [
        "| budget | search | width x proposals | accuracy | less best-of-n | tokens | whole replies | none whole |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for budget in BUDGETS:
        for name in SEARCHES:
            runs = [found[key(name, budget, seed)] for seed in seeds if key(name, budget, seed) in found]
            if len(runs) < len(seeds):
                continue
            own = settings(name, budget)
            shape = "all that fit" if own["search_width"] == WIDE["search_width"] else _shape(own)
            beside = [found.get(key("best-of-n", budget, seed)) for seed in seeds]
            less = [run["accuracy"] - other["accuracy"] for run, other in zip(runs, beside, strict=True) if other]
            cells = [
                str(budget), name, shape, _accuracy([run["accuracy"] for run in runs]),
                "" if name == "best-of-n" or len(less) < len(runs) else over_seeds(less, "+.3f"),
                *(f"{sum(run[what] for run in runs) / len(runs):{form}}"
                  for what, form in (("tokens", ".0f"), ("finished", ".1f"), ("unfinished", ".3f"))),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _shape(options: Mapping[str, Any]) -> str:
    return f"{options['search_width']} x {options['search_proposals']}"


def _accuracy(values: Sequence[float]) -> str:
    """Return the mean with Student's interval over seeds; of one seed, with Wilson's over its tasks."""
    if values[1:]:
        return over_seeds(values)
    return f"{values[0]:.3f} {wilson_interval(round(values[0] * ASKED), ASKED).text('.3f')}"


if __name__ == "__main__":
    main()
