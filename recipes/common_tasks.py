"""The two tasks that every algorithm must learn: their rows, the start of a seed, and the settings of each algorithm.

`VARIANTS` are algorithms with an option that changes one component.

sums           3+5+2+7=17, the answer alone: replies of two or three tokens
worked-sums    7 4 9 2 8: answered line by line, 7+4=11, 11+9=20 ...: replies of some 25 tokens, long ones are cut off
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.types import Task
from posttrain.envs.builtin import arithmetic, worked_sums

FORGETS = 1 / 3  # sums: how often a demonstrator leaves out the last number
DEMONSTRATORS = 3  # sums: of each task, so that most sums are shown both ways; equal answers are merged
SLIPS = 0.12  # worked sums: how often a demonstrator's line is wrong by one
LONG_LINES = 0.3  # worked sums: how often a demonstrator adds three numbers in a line
NUMBERS = 5  # worked sums: of each task

_ON_POLICY = {"minibatches": 1}  # lp A has no ratio: a second update would follow rollouts of a policy that is gone


@dataclass(frozen=True)
class Variant:
    """An algorithm with other options of `posttrain.rl`, the same on both tasks."""

    row: str
    options: Mapping[str, Any]
    beside: str = ""  # the variant that it is compared with; "": the algorithm itself

    @property
    def compared(self) -> str:
        return self.beside or self.row


VARIANTS = {
    "ppo-bootstrap": Variant("ppo", {"bootstrap_truncated": True}),
    "ppo-entropy-reward": Variant("ppo", {"entropy": 0.01, "entropy_where": "reward"}),
    "grpo-kl-response": Variant("grpo", {"kl_unit": "response"}),
    "grpo-length-penalty": Variant("grpo", {"length_penalty": 0.005}),  # up to .13 on worked sums, .02 on sums
    # A step ends after an update whose policy had moved before it: that takes more updates than grpo makes on the sums.
    "grpo-epochs": Variant("grpo", {"epochs": 2}),
    "grpo-target-kl": Variant("grpo", {"epochs": 2, "target_kl": 0.02}, beside="grpo-epochs"),
    "grpo-epsilon-greedy": Variant("grpo", {"epsilon_greedy": 0.02}),
    "reinforce++-even": Variant("reinforce++", {"redistribution": "even"}),
    "reinforce++-by-entropy": Variant("reinforce++", {"redistribution": "entropy"}),
    "dapo-reward-floor": Variant("dapo", {"reward_floor": -1.0}),
}


@dataclass(frozen=True)
class CommonTask:
    """A task, and how each algorithm trains on it."""

    name: str
    env: str
    text: Sequence[str]  # about it, for the page
    practice: Callable[[int], list[Task]]  # training tasks of a seed
    unseen: Callable[[int], list[Task]]  # held-out tasks of a seed
    demonstrations: Callable[[Sequence[Task], int], list[Task]]  # imitated by the start of a seed
    imitation: Mapping[str, Any]  # options of `posttrain.sft` for the start
    common: Mapping[str, Any]  # options of `posttrain.rl` for all algorithms
    target: float  # held-out accuracy that counts as learned
    own: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # algorithm -> where it differs, each with its reason

    def settings(self, name: str) -> dict[str, Any]:
        """Return all options of `posttrain.rl` for an algorithm or a variant; {start} is the folder of the seed's start."""
        if name in VARIANTS:
            return {**self.settings(VARIANTS[name].row), **VARIANTS[name].options}
        return {"env": self.env, **self.common, **self.own.get(name, {})}


# -- sums --------------------------------------------------------------------------------------------------------------


def _forgetful(tasks: Sequence[Task], seed: int) -> list[Task]:
    """Every sum as several demonstrators answer it; each may forget the last number."""
    rng = random.Random(seed)
    rows = []
    for task in tasks:
        numbers = [int(n) for n in task["prompt"].rstrip("=").split("+")]
        for _ in range(DEMONSTRATORS):
            heard = numbers[:-1] if rng.random() < FORGETS else numbers
            rows.append({"prompt": task["prompt"], "response": str(sum(heard))})
    return rows


_STARTS: dict[str, Any] = {
    **{"hidden": 64, "heads": 4, "tokenizer": "characters", "rows": 64, "warmup": 50, "threads": 1, "quiet": True},
    "save_every": 10**6,
}
_RUNS: dict[str, Any] = {
    **{"betas": (0.9, 0.95), "warmup": 10, "schedule": "linear", "eval_every": 10, "eval_limit": 500},
    **{"slots": 512, "env_workers": 0, "threads": 1, "quiet": True, "save_every": 10**6},
}
_CRITIC = {"critic_lr": 2e-3}  # begins knowing nothing, and has to keep pace with a policy that learns in 20 steps
_SAC = {"lr": 3e-4, "critic_lr": 2e-3, "critic_warmup": 20, "kl": 0.03, "kl_estimator": "exact"}
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("reinforce", "reinforce-baseline", "remax", "gpg"), _ON_POLICY),
    **dict.fromkeys(("ppo", "ppo-kl", "open-reasoner-zero"), _CRITIC),
    "a2c": {**_CRITIC, **_ON_POLICY},
    # The text is what the start imitated, and pulls back to it: at 1 nothing would be unlearned.
    "ppo-ptx": {**_CRITIC, "ptx": "{start}/demonstrations.jsonl", "ptx_coefficient": 0.05},
    "chord": {"ptx": "{start}/demonstrations.jsonl"},
    "vapo": {**_CRITIC, "critic_warmup": 10},
}
"""Settings of both tasks."""
_SUMS_OWN: dict[str, dict[str, Any]] = {
    **_OWN,
    "dapo": {"steps": 60},  # it plays up to four times as many prompts for a step full of groups that tell something
    # No schedule shortens a step that is as long as the region allows, nor its noise: a small region, more rollouts.
    "trpo": {"minibatches": 1, "prompts": 128, "trust_region": 5e-4, "steps": 60},
    # lambda = 1 - 1 / (0.05 n) is made for thousands of tokens; for the two or three of a sum it is 0.
    "vapo": {**_OWN["vapo"], "gae_lambda": 0.95},
    # Q only guesses for tokens that nobody has sampled yet: it learns first and faster, and a KL keeps the policy to
    # tokens that the start would say.
    **{name: {**_SAC, "minibatches": 4, "steps": 220, "entropy_target": 0.05} for name in ("sac", "sac-v")},
}
SUMS = CommonTask(
    "sums",
    "arithmetic",
    (
        "Task: sums of four digits (`3+5+2+7=17`), with a decoder of 0.1 M parameters. The start imitates demonstrators",
        "who forget the last number every third time (each answer to a sum counts once, so 40% of the imitated answers",
        "forget it). Each algorithm then trains on 8,800 sums; its only reward is an exact check of the answer. We",
        "measure accuracy at temperature 1 on 500 sums that neither stage has seen, with 4 replies each. Each seed has",
        "its own sums, start and sampling. The interval is Student's 95% over seeds. Seconds are processor seconds of",
        "training on one thread, including the evaluations during training.",
        "",
        "Choice of settings: we chose the common ones for grpo on seed 0 and kept them. We also chose the critic's",
        "learning rate, ppo-ptx's coefficient and vapo's lambda on seed 0, and trpo's region on seeds 0 and 2. We tried",
        "sac's settings five times, three of them with all three seeds (the last but one: 0.899, 0.905, 0.937), so its",
        "figures are those of the best trial; the new seeds 3, 4 and 5 then gave 0.926, 0.960 and 0.968. With a reward",
        "for the answer alone grpo-process equals grpo, digit for digit. So does arpo where there are no tools; the",
        "table leaves it out.",
    ),
    lambda seed: arithmetic.tasks(8800, seed, digits=1, operands=4),  # nearly all outside the held-out tenth
    lambda seed: arithmetic.tasks(500, seed, digits=1, operands=4, held_out=True),
    _forgetful,
    {**_STARTS, "layers": 2, "context": 16, "epochs": 10, "lr": 4e-3},
    {**_RUNS, "steps": 120, "prompts": 64, "group": 8, "max_tokens": 4, "minibatches": 2, "lr": 1e-3},
    0.9,
    _SUMS_OWN,
)


# -- worked sums -------------------------------------------------------------------------------------------------------


def _slipping(tasks: Sequence[Task], seed: int) -> list[Task]:
    """Every task as a demonstrator works it out: in any order, at times with three numbers to a line, or wrong by one."""
    rng = random.Random(seed)
    return [
        {"prompt": t["prompt"], "response": worked_sums.working(rng, t["numbers"], LONG_LINES, SLIPS)} for t in tasks
    ]


_WORKED_OWN: dict[str, dict[str, Any]] = {
    **_OWN,
    "grpo-process": {"env": "worked-sums,lines=0.5"},  # right lines earn something: without it this is grpo
    "dapo": {"steps": 30},  # as on the sums
    # With few steps the critic learns little, and credit that ends in it before the reward is reached teaches its errors.
    "vapo": {**_OWN["vapo"], "gae_lambda": 0.95},
    "a2c": {**_OWN["a2c"], "k_step": 26},
    "trpo": {"minibatches": 1, "prompts": 64, "trust_region": 5e-4, "steps": 30},
    **{name: {**_SAC, "steps": 120, "entropy_target": 0.3} for name in ("sac", "sac-v")},
}
WORKED_SUMS = CommonTask(
    "worked-sums",
    "worked-sums",
    (
        "Task: add five digits line by line (`7 4 9 2 8:`, then `7+4=11`, `11+9+2=22`, `22+8=30`), in any order, with",
        "two or more numbers a line. A decoder of 0.15 M parameters first imitates demonstrators who are off by one in",
        "12% of the lines. Each algorithm then trains on 8,000 tasks; its only reward is an exact check of the last",
        "number (grpo-process also gets half a point if all lines are right). Replies have some 25 tokens and a budget",
        "of 26, which cuts off many replies of the start; longer lines make shorter replies. Four updates a step. We",
        "measure accuracy at temperature 1 on 500 tasks that neither stage has seen, with 4 replies each. Each seed has",
        "its own tasks, start and sampling.",
        "",
        "Choice of settings: we chose the common ones for grpo on seed 0, the learning rate among 5e-4, 1e-3 and 2e-3",
        "with 80 steps. The settings of single algorithms are those for the sums, except for two that we changed on",
        "seed 0: with the lambda of its paper (0.2 for 25 tokens) vapo ended at 0.114, and with an advantage over 5",
        "tokens a2c ended at 0.253: both bootstrap from a critic that has learned little, before they reach the reward.",
    ),
    lambda seed: worked_sums.tasks(8000, seed, numbers=NUMBERS),
    lambda seed: worked_sums.tasks(500, seed, numbers=NUMBERS, held_out=True),
    _slipping,
    {**_STARTS, "layers": 3, "context": 48, "epochs": 16, "lr": 6e-3, "schedule": "linear"},
    {**_RUNS, "steps": 60, "prompts": 32, "group": 8, "max_tokens": 26, "minibatches": 4, "lr": 5e-4},
    0.6,
    _WORKED_OWN,
)

TASKS = {task.name: task for task in (SUMS, WORKED_SUMS)}
