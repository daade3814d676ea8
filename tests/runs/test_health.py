"""What goes wrong is named, and nothing is said of a run in which nothing does.

The histories are of real runs of a decoder of 0.1 M parameters on sums of four digits, as in cli/demo_command.py: every
step, where nothing else is said.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.preference import PreferenceAlgorithm
from posttrain.algorithms.settings import flags
from posttrain.apps.view.verdict_texts import verdicts
from posttrain.cli.inspect_commands import rollouts
from posttrain.config.training import RL, Prefer
from posttrain.envs.builtin import arithmetic
from posttrain.runs.health import Health, HealthFinding
from posttrain.runs.health_checks import CHECKS
from posttrain.runs.metric_history import READ, HealthLimits
from posttrain.runs.metrics_table import QUESTIONS

Rows = list[dict[str, float]]

DIVERGED = {
    "reward": """
        .521 .207 .328 .178 .268 .172 .0391 .0391 .0469 .0664 .0938 .0527 .0742 .0684 .0918 .109 .0684 .0684 .102 .123
        .0879 .0723 .0645 .084 .0879 .109 .0742 .127 .119 .129 .0703 .0938 .0879 .0703 .0957 .0527 .123 .121 .0469
        .0898 .0605 .0723 .0332 .0391 .0293 .0684 .0332 .0566 .0742 .0684 .104 .115 .0488 .0566 .0469 .0156 0 .0195
        .109 .0625""",
    "entropy": """
        .454 .487 .476 .423 .43 .403 .43 .445 .435 .442 .443 .364 .306 .311 .285 .345 .331 .432 .427 .412 .392 .4 .426
        .407 .416 .394 .426 .426 .426 .4 .381 .332 .284 .251 .162 .319 .105 .0558 .189 .0889 .149 .177 .199 .165 .266
        .298 .252 .216 .226 .223 .136 .135 .0894 .135 .00992 .0255 .0262 .0334 .00641 .0218""",
    "groups/no_signal": """
        .0312 .375 .109 .406 .375 .516 .828 .922 .844 .859 .75 .875 .828 .891 .875 .797 .797 .844 .766 .75 .766 .781
        .766 .781 .734 .75 .781 .641 .688 .688 .797 .812 .812 .891 .859 .891 .875 .891 .922 .938 .969 .953 .984 .922
        .953 .938 .984 .922 .922 .938 .953 .906 .984 .938 1 1 1 .984 1 1""",
}
"""Learning rate 5e-3, 7 times too high. Accuracy is the reward."""

LOOPHOLE = {
    "reward": """
        .537 .518 .496 .543 .508 .49 .477 .539 .5 .516 .504 .5 .6 .574 .551 .543 .547 .506 .531 .49 .527 .537 .525 .51
        .566 .586 .533 .6 .564 .576 .57 .592 .602 .586 .578 .629 .59 .545 .615 .566 .58 .66 .611 .688 .619 .646 .623
        .652 .633 .676 .705 .781 .668 .76 .762 .738 .721 .822 .922 .957 .969 .961""",
    "accuracy": """
        .529 .514 .482 .535 .506 .488 .469 .525 .492 .51 .494 .488 .588 .561 .539 .527 .533 .49 .508 .48 .521 .525 .514
        .492 .549 .572 .521 .582 .539 .564 .551 .572 .564 .555 .545 .598 .566 .512 .57 .523 .539 .613 .549 .588 .543
        .586 .545 .553 .539 .578 .568 .637 .547 .592 .596 .576 .566 .605 .658 .631 .656 .664""",
    "entropy": """
        .454 .48 .48 .461 .475 .483 .492 .476 .476 .457 .501 .474 .429 .429 .424 .481 .422 .494 .509 .47 .472 .463 .463
        .47 .461 .456 .444 .453 .498 .428 .439 .458 .482 .503 .507 .446 .462 .494 .485 .499 .491 .463 .506 .514 .534
        .494 .59 .523 .524 .504 .512 .481 .595 .515 .545 .56 .547 .591 .517 .527 .545 .54""",
    "kl": """
        3.75e-05 .00164 .00437 .00349 .00534 .00249 .00227 .00362 .00381 .00713 .00667 .00843 .0128 .00623 .0169 .0146
        .0219 .0167 .0164 .0259 .0198 .0105 .0131 .0146 .0298 .0148 .0126 .0127 .017 .015 .0144 .021 .0275 .0343 .0229
        .0192 .0235 .0318 .0448 .0743 .043 .0569 .0675 .0833 .0745 .0939 .0806 .154 .122 .101 .217 .194 .228 .25 .221
        .327 .503 .39 .506 .571 .611 .604""",
}
"""A reply of 4 digits is paid twice, whatever it says; KL coefficient 1e-4. Found at about step 50."""

LONGER = {
    "reward": """
        .0822 .0829 .0865 .0887 .0911 .0968 .116 .147 .178 .238 .294 .354 .539 .915 1.69 2.16 2.83 3.38 3.93 4.18 4.42
        4.45""",
    "accuracy": """
        0 0 0 0 0 0 0 0 0 0 .00195 .0293 .141 .391 .723 .871 .963 .971 .994 .992 .996 .996""",
    "entropy": """
        .454 .469 .472 .449 .471 .492 .534 .531 .623 .599 .566 .657 .706 .787 .81 .771 .762 .765 .758 .745 .751 .738""",
    "length": """
        2.93 2.94 2.99 2.99 3.04 3.1 3.2 3.38 3.53 3.8 3.98 4.36 5.59 8.04 12.9 15.3 19.1 21.5 23.6 23.8 23.9 23.9""",
    "truncated": """
        0 0 0 0 0 0 0 0 0 0 0 0 .00195 .0176 .0957 .152 .367 .703 .953 .988 .996 .992""",
    "groups/no_signal": """
        .75 .734 .703 .781 .609 .594 .391 .234 .141 .141 .0625 .0625 .0156 0 0 0 0 0 0 0 0 0""",
}
"""The reward is the number of characters."""

LEARNED = {
    "reward": """
        .466 .478 .55 .57 .55 .593 .633 .662 .679 .732 .683 .66 .731 .721 .716 .804 .787 .87 .717 .835 .896 .805 .714
        .893 .875 .916 .87 .892 .924 .92 .93 .916 .849 .885 .948 .91 .948 .921 .862 .966 .942 .933 .888 .958 .892 .945
        .944 .901 .965 .967 .975 .969 .946 .937 .961 .967 .968 .965 .973 .967 .953 .958 .965 .961 .951 .975 .996 .983
        .967 .967 .986 .986 .965 .97 .962 .968 .99 .977 .989 .984 .949 .982 .997 .989 .981 .993 .981 .965 .984 .979
        .976 .993 .983 .997""",
    "entropy": """
        .523 .488 .426 .416 .443 .409 .338 .359 .319 .294 .309 .33 .27 .277 .304 .22 .235 .169 .238 .172 .144 .204 .203
        .138 .156 .126 .13 .129 .12 .102 .0984 .104 .136 .122 .0697 .0919 .0611 .0803 .0981 .0515 .0658 .0623 .106
        .0435 .0878 .0634 .0621 .085 .0422 .0579 .0358 .0442 .0522 .0677 .0463 .024 .0412 .041 .03 .053 .0244 .039
        .0356 .0353 .0378 .0249 .0122 .0104 .0221 .0297 .0176 .0216 .0173 .0254 .0326 .0274 .0214 .0241 .0122 .0202
        .0289 .0136 .00825 .0166 .0218 .0163 .0147 .0348 .0161 .0194 .0249 .0167 .0212 .00823""",
    "groups/no_signal": """
        .0312 .0625 .0781 .156 .0938 .164 .188 .156 .203 .305 .227 .188 .305 .234 .203 .375 .406 .43 .352 .43 .531 .352
        .312 .547 .523 .578 .539 .648 .586 .617 .695 .672 .539 .609 .758 .672 .82 .711 .641 .844 .781 .812 .594 .844
        .711 .789 .812 .758 .891 .781 .875 .859 .789 .758 .852 .922 .875 .891 .914 .852 .938 .875 .906 .914 .891 .922
        .969 .977 .922 .906 .953 .93 .977 .945 .906 .914 .922 .938 .977 .945 .93 .969 .977 .953 .93 .945 .977 .891 .945
        .953 .938 .945 .938 .977""",
}
"""Every 6th step of a run that went from 0.48 to 0.98 right, and to 0.97 on new sums. Accuracy is the reward."""


def rows(columns: Mapping[str, Any]) -> Rows:
    """Of columns, numbers or text, the rows as in metrics.jsonl; accuracy is the reward if it is not there."""
    values = {n: [float(x) for x in (c.split() if isinstance(c, str) else c)] for n, c in columns.items()}
    values = {"accuracy": values.get("reward", []), **values}
    lengths = {len(column) for name, column in values.items() if column}
    assert len(lengths) == 1, lengths
    return [{"step": i + 1, **{n: c[i] for n, c in values.items() if c}} for i in range(lengths.pop())]


def find(history: Rows, limits: HealthLimits | None = None) -> list[HealthFinding]:
    health = Health(limits)
    return [finding for row in history for finding in health.look(int(row["step"]), row)]


def named(history: Rows) -> dict[str, int]:
    """Finding -> the step at which it was told first."""
    return {finding.name: finding.step for finding in reversed(find(history))}


def noisy(values: Iterable[float], noise: float, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [max(0.0, v * (1 + generator.gauss(0, noise))) for v in values]


def test_a_learning_rate_too_high_is_named_by_the_reward_then_by_signal_and_entropy() -> None:
    assert named(rows(DIVERGED)) == {"drop": 23, "signal": 42, "entropy": 56}
    drop, signal, entropy = find(rows(DIVERGED))
    assert "from 0.3 at its best to 0.0856" in drop.message and "--lr" in drop.message
    assert "about 87% of the groups are all wrong" in signal.message
    assert "94% of the replies are wrong" in entropy.message and "--entropy 0.001" in entropy.message


def test_a_loophole_found_in_mid_run_is_named_by_the_kl_and_by_the_reward() -> None:
    assert named(rows(LOOPHOLE)) == {"kl": 55, "jump": 59}
    assert "posttrain rollouts RUN --step 59 --order best" in find(rows(LOOPHOLE))[1].message
    assert named(rows({n: c for n, c in LOOPHOLE.items() if n != "kl"})) == {"jump": 59}


def test_a_reward_that_pays_for_length_is_named_as_length() -> None:
    assert named(rows(LONGER)) == {"length": 19}
    assert "from 3.0 to 11.8 tokens" in find(rows(LONGER))[0].message


EASY_PART: dict[str, Any] = {
    "reward/kept": ".219 .125 .141 .047 .031 0 0 .031 .016 .094 .047 .016 .031 0 .031 .016",
    "reward/about": ".703 .844 .859 .969 .984 .984 1 1 .938 .984 .984 1 1 1 .984 1",
}
"""16 steps of an instruct model with adapters, paid for keeping a constraint and for naming its topic."""


def test_a_part_of_the_reward_that_is_given_up_for_an_easier_one_is_named() -> None:
    parts = {name: [float(x) for x in column.split()] for name, column in EASY_PART.items()}
    both = [a + b for a, b in zip(*parts.values(), strict=True)]
    assert named(rows({"accuracy": [], "reward": both, **parts})) == {"part": 15}
    [finding] = find(rows({"accuracy": [], "reward": both, **parts}))
    assert "kept fell from 0.11 to 0.0" in finding.message and "about fell" not in finding.message


def test_a_part_is_named_only_if_it_counts_in_the_reward_and_the_reward_does_not_fall() -> None:
    parts = {name: [float(x) for x in column.split()] for name, column in EASY_PART.items()}
    of_kept = parts["reward/kept"]
    logged = {"reward": parts["reward/about"], **parts}  # beside the reward, as the number of invalid actions is
    assert "part" not in named(rows({"accuracy": [], **logged}))
    falling = [1.0 - n / 32 for n in range(16)]
    told = {"reward/kept": of_kept, "reward/about": [a - b for a, b in zip(falling, of_kept, strict=True)]}
    assert "part" not in named(rows({"accuracy": [], "reward": falling, **told}))
    steady = {"reward/kept": [0.1, 0.12] * 8, "reward/about": [0.9, 0.88] * 8}
    assert "part" not in named(rows({"accuracy": [], "reward": [1.0] * 16, **steady}))
    noise = {"reward/kept": [0.25, 0.0, 0.25, 0.0] * 4, "reward/about": [0.75, 1.0, 0.75, 1.0] * 4}
    assert "part" not in named(rows({"accuracy": [], "reward": [1.0] * 16, **noise}))


def test_a_healthy_run_is_solved_and_nothing_else() -> None:
    assert set(named(rows(LEARNED))) == {"solved"}
    assert set(named(rows({**LEARNED, "entropy": [1.0] * 94}))) == {"solved"}, "certainty is not asked for"


def test_groups_that_are_all_right_are_said_to_teach_nothing_only_where_no_critic_judges_them() -> None:
    for critic, said in (
        ({}, "neither teaches anything"),
        ({"explained_variance": [0.5] * 94}, "little is left to learn"),
    ):
        [finding] = find(rows({**LEARNED, **critic}))
        assert finding.name == "solved" and said in finding.message


def test_a_run_that_replaces_groups_without_signal_is_not_told_to() -> None:
    for series in (LEARNED, DIVERGED):
        played = {"groups/played": "16 " * len(series["reward"].split())}
        plain, replacing = (find(rows({**series, **more})) for more in ({}, played))
        assert any("--dynamic-sampling" in finding.message for finding in plain)
        assert [f.name for f in replacing] == [f.name for f in plain]
        assert not any("--dynamic-sampling" in finding.message for finding in replacing)


def test_entropy_that_falls_as_fast_without_solving_anything_is_a_collapse() -> None:
    stuck: dict[str, Any] = {"reward": noisy([0.5] * 94, 0.05), "entropy": LEARNED["entropy"]}
    assert set(named(rows(stuck))) == {"entropy"}
    assert set(named(rows({**stuck, "accuracy": [0.0] * 94}))) == {"entropy"}, "a reward that never counts as correct"


def test_a_collapse_of_the_entropy_tells_the_mass_of_the_most_likely_token_where_it_is_measured() -> None:
    stuck: dict[str, Any] = {"reward": noisy([0.5] * 94, 0.05), "entropy": LEARNED["entropy"]}
    (plain,) = (f for f in find(rows(stuck)) if f.name == "entropy")
    assert "most likely token" not in plain.message
    (told,) = (f for f in find(rows({**stuck, "top_mass": [0.5] * 20 + [0.96] * 74})) if f.name == "entropy")
    assert "the most likely token has 96% of the probability (50% at the start)" in told.message
    assert told.step == plain.step


def test_entropy_that_falls_while_groups_still_differ_is_no_collapse() -> None:
    """Means of ten steps of a run of recipes/real/reading.py (SmolLM2, seed 2), which learns to answer briefly."""
    entropy = [2.42, 1.66, 1.18, 0.99, 0.75, 0.66, 0.58, 0.67, 0.68, 0.45, 0.31, 0.29]
    equal = [0.138, 0.087, 0.175, 0.35, 0.475, 0.375, 0.388, 0.3, 0.388, 0.425, 0.4, 0.512]
    accuracy = [0.01, 0.07, 0.32, 0.32, 0.3, 0.29, 0.41, 0.37, 0.43, 0.57, 0.52, 0.55]
    brief = {"reward": accuracy, "accuracy": accuracy, "entropy": entropy, "groups/no_signal": equal}
    history = {name: [value for value in means for _ in range(10)] for name, means in brief.items()}
    assert named(rows(history)) == {}
    assert "entropy" in named(rows({**history, "groups/no_signal": [0.7] * 120}))
    scores = {"accuracy": [], "reward": noisy([1.0] * 120, 0.1), "entropy": [2 * 0.95**step for step in range(120)]}
    assert "entropy" in named(rows({**scores, "groups/no_signal": [0.0] * 120})), "scores of a model are never equal"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("level", [0.02, 0.5, 0.9])
def test_noise_alone_is_never_named(seed: int, level: float) -> None:
    """4 prompts of 4 rollouts at a step, for 300 steps in which nothing is learned."""
    generator = random.Random(seed)
    reward = [sum(generator.random() < level for _ in range(16)) / 16 for _ in range(300)]
    other = {"entropy": noisy([0.4] * 300, 0.2, seed), "length": noisy([50] * 300, 0.2, seed + 1)}
    other |= {"truncated": noisy([0.1] * 300, 0.5, seed), "kl": noisy([0.01] * 300, 0.5, seed)}
    other |= {"invalid": [sum(generator.random() < 0.1 for _ in range(16)) / 16 for _ in range(300)]}
    assert named(rows({"reward": reward, **other})) == {}


@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0])
def test_a_constant_reward_is_named_after_one_window_and_never_solved(reward: float) -> None:
    constant = rows({"reward": [reward] * 100, "groups/no_signal": [1.0] * 100, "advantage/abs": [0.0] * 100})
    assert named(constant) == {"signal": 10}
    assert f"every reply since the first step got the reward {reward:g}:" in find(constant)[0].message


def test_groups_without_signal_are_told_apart_by_what_they_have_in_common() -> None:
    def of(accuracy: float) -> HealthFinding:
        columns = {"reward": noisy([accuracy] * 20, 0.01), "groups/no_signal": noisy([0.95] * 20, 0.01)}
        (finding,) = find(rows(columns))
        return finding

    assert of(0.97).name == "solved" and of(0.5).name == "signal" and of(0.02).name == "signal"
    assert "all wrong" in of(0.02).message and "tasks too hard" in of(0.02).message
    assert "all right" in of(0.6).message and "all wrong" in of(0.6).message


def test_groups_that_are_all_wrong_are_named_sooner_than_those_that_are_all_right() -> None:
    def of(accuracy: float, equal: float) -> set[str]:
        columns = {"reward": noisy([0.1] * 20, 0.01), "accuracy": [accuracy] * 20, "groups/no_signal": [equal] * 20}
        return set(named(rows(columns)))

    assert of(0.02, 0.8) == {"signal"} and of(0.02, 0.7) == set(), "a quarter of the rollouts doubles the noise"
    assert of(0.8, 0.8) == set() and of(0.9, 0.92) == {"solved"}


def test_groups_of_one_are_not_blamed_for_having_equal_rewards() -> None:
    single = {"reward": noisy([0.5] * 60, 0.1), "groups/no_signal": [1.0] * 60, "advantage/abs": [0.5] * 60}
    assert named(rows(single)) == {}


def test_longer_replies_are_named_only_if_they_are_no_better() -> None:
    length = noisy([100 + 4 * i for i in range(60)], 0.05)
    better = noisy([0.2 + 0.01 * i for i in range(60)], 0.05)
    assert named(rows({"reward": better, "length": length})) == {}
    assert set(named(rows({"reward": noisy([0.2] * 60, 0.05), "length": length}))) == {"length"}


def test_kl_is_named_if_it_is_large_and_has_not_paid() -> None:
    columns = {"entropy": noisy([0.4] * 60, 0.1), "kl": noisy([min(1.0, 0.1 * i) for i in range(60)], 0.2)}
    assert set(named(rows({"reward": noisy([0.2] * 60, 0.05), **columns}))) == {"kl"}
    assert named(rows({"reward": noisy([0.2 + 0.01 * i for i in range(60)], 0.05), **columns})) == {}


def test_tasks_learned_by_heart_are_named_once_held_out_ones_do_not_follow() -> None:
    training = noisy([min(0.9, 0.5 + 0.01 * i) for i in range(60)], 0.02)

    def evaluated(gain: float) -> dict[str, int]:
        history = rows({"reward": training})
        for row in history[::10]:
            row["eval/accuracy"] = 0.45 + gain * row["step"] / 60
        return named(history)

    assert set(evaluated(0.0)) == {"held_out"} and evaluated(0.3) == {}


def evaluations(**metrics: list[float]) -> Rows:
    """Evaluations before the first step and after every tenth."""
    (count,) = {len(values) for values in metrics.values()}
    return [{"step": 10 * i, **{name: values[i] for name, values in metrics.items()}} for i in range(count)]


def test_tasks_and_texts_that_training_makes_the_model_forget_are_named_once_two_evaluations_agree() -> None:
    history = evaluations(
        **{
            "suite/sums/accuracy": [0.8, 0.3, 0.8, 0.6, 0.5, 0.2],
            "suite/code/accuracy": [0.1, 0.2, 0.5, 0.9, 0.9, 0.9],
            "suite/sums/tasks": [100.0] * 6,
            "suite/code/tasks": [100.0] * 6,
        },
        **{
            "suite/sums/reward/accuracy": [0.9, 0.1, 0.1, 0.1, 0.1, 0.1],
            "forget/loss": [2.0, 2.2, 2.0, 2.05, 2.08, 2.09],
        },
    )
    (finding,) = find(history)
    assert (finding.name, finding.step) == ("forgetting", 40), "a single low evaluation may be noise"
    assert "accuracy on sums fell from 0.80 to 0.50" in finding.message
    assert "code" not in finding.message and "--forget" not in finding.message
    (finding,) = find(evaluations(**{"forget/loss": [2.0, 2.2, 1.9, 2.3, 2.4]}))
    assert finding.step == 40 and "--forget rose from 2.00 to 2.40 nats per token" in finding.message
    assert find(evaluations(**{"forget/loss": [2.0, 1.9, 1.8], "suite/sums/accuracy": [0.8, 0.7, 0.7]})) == []


@pytest.mark.parametrize(("tasks", "named_at"), [(8, []), (28, []), (29, [20]), (400, [20])])
def test_a_part_of_few_tasks_whose_accuracy_falls_by_chance_is_no_forgetting(tasks: int, named_at: list[int]) -> None:
    """Newcombe's interval of 0.75 - 0.5 excludes 0 from 29 tasks on."""
    fallen = {"suite/sums/accuracy": [0.75, 0.5, 0.5], "suite/sums/tasks": [float(tasks)] * 3}
    assert [f.step for f in find(evaluations(**fallen))] == named_at


def test_updates_that_are_skipped_are_named() -> None:
    assert named(rows({"skipped": [0.0] * 20 + [0.0, 1.0] * 5})) == {"skipped": 24}
    assert named(rows({"skipped": [0.0] * 20 + [1.0] + [0.0] * 20})) == {}, "one is an accident"


def test_a_run_without_any_update_for_five_steps_is_stalled_and_that_ends_it() -> None:
    for healthy in (0, 3, 20):
        found = find(rows({"skipped": [0.0] * healthy + [1.0] * 5}))
        assert [(f.name, f.step) for f in found if f.fatal] == [("stalled", healthy + 5)]
    assert named(rows({"skipped": [0.0] * 20 + [1.0] * 4 + [0.0] * 20})) == {"skipped": 22}
    assert "stalled" not in named(rows({"skipped": [0.0] * 20 + [0.5] * 20})), "half of the updates of each step"
    assert not any(f.fatal for f in find(rows(DIVERGED)))


def test_a_run_is_motionless_until_its_first_update() -> None:
    health = Health()
    assert not health.motionless
    health.look(0, {"eval/loss": 1.0})
    assert not health.motionless, "an evaluation is no update"
    health.look(1, {"skipped": 1.0})
    assert health.motionless
    health.look(2, {"skipped": 0.75})
    assert not health.motionless


DODGING = noisy([0.0] * 20 + [0.01 * i for i in range(40)], 0.1)


def test_invalid_rewards_that_grow_with_the_policy_are_named_and_a_constant_share_is_not() -> None:
    (finding,) = find(rows({"invalid": DODGING}))
    assert finding.name == "invalid" and 25 < finding.step < 45 and "0% were at the start" in finding.message
    assert "too long" not in finding.message and "--env-timeout" in finding.message
    (slow,) = find(rows({"invalid": DODGING, "invalid/timeout": DODGING}))
    assert "took too long to check" in slow.message
    for share in (0.0, 0.02, 0.3):
        assert named(rows({"invalid": noisy([share] * 300, 0.5)})) == {}
    assert named(rows({"invalid": [0.3] * 5 + [0.0] * 60})) == {}, "fewer of them"


STUCK = {"reward": noisy([0.5] * 60, 0.05), "entropy": [0.5 * 0.9**i for i in range(60)]}


def test_a_clip_is_advised_only_where_it_can_bind() -> None:
    """With one update per step every ratio is 1, whatever the clip."""

    def advice(**columns: list[float]) -> str:
        (finding,) = find(rows({**STUCK, **columns}))
        assert finding.name == "entropy"
        return finding.message

    bound = {"updates": [4.0] * 60, "ratio/clipped_high": [0.01] * 60}
    assert "--clip-high 0.28" in advice(**bound) and "keeps rare tokens rare" in advice(**bound)
    assert "clip" not in advice(**{**bound, "updates": [1.0] * 60})
    assert "clip" not in advice(**{**bound, "ratio/clipped_high": [0.0] * 60})
    assert "clip" not in advice(updates=[4.0] * 60), "a surrogate without a clip"


def test_fewer_updates_are_advised_only_where_there_are_several() -> None:
    several = find(rows({**DIVERGED, "updates": [4.0] * 60}))[0]
    assert several.name == "drop" and "fewer --epochs and --minibatches" in several.message
    assert "--minibatches" not in find(rows({**DIVERGED, "updates": [1.0] * 60}))[0].message


def test_without_a_success_threshold_nothing_is_said_of_right_and_wrong() -> None:
    column = {"accuracy": [], "reward": noisy([0.4] * 20, 0.05), "groups/no_signal": noisy([0.95] * 20, 0.01)}
    (finding,) = find(rows(column))
    assert finding.name == "signal" and "--success" in finding.message
    assert "all wrong" not in finding.message and "all right" not in finding.message


def test_longer_replies_without_a_success_threshold_are_judged_by_the_reward() -> None:
    length = noisy([100 + 4 * i for i in range(60)], 0.05)
    idle, paid = noisy([0.2] * 60, 0.05), noisy([0.2 + 0.01 * i for i in range(60)], 0.05)
    (finding,) = find(rows({"accuracy": [], "reward": idle, "length": length}))
    assert finding.name == "length" and "earn no more" in finding.message
    assert named(rows({"accuracy": [], "reward": paid, "length": length})) == {}


def test_figures_beyond_measure_are_left_out() -> None:
    """The square of 1e200 is infinite."""
    holes = [{**row, "step": row["step"] * 2 - 1} for row in rows(DIVERGED)]
    for row in rows(DIVERGED):
        holes.append({"step": row["step"] * 2, "reward": 1e308, "entropy": -1e200, "kl": 10**300})
    holes.sort(key=lambda row: row["step"])
    assert set(named(holes)) == set(named(rows(DIVERGED)))


def test_a_critic_is_named_if_it_stays_worse_than_a_constant() -> None:
    learning = noisy([i / 100 for i in range(60)], 0.5)
    assert named(rows({"explained_variance": [-5.0] * 20 + learning[20:]})) == {}
    assert named(rows({"explained_variance": [*learning[:40], -8.0, *learning[41:]]})) == {}, "one step is an outlier"
    assert named(rows({"explained_variance": [-0.4] * 40})) == {"critic": 30}


BOTH_FALL = {
    "logp_per_token/chosen": [-x for x in noisy([1.0 + 0.02 * i for i in range(60)], 0.05)],
    "logp_per_token/rejected": [-x for x in noisy([1.1 + 0.05 * i for i in range(60)], 0.05)],
}


def test_comparisons_won_by_making_both_responses_unlikely_are_named() -> None:
    assert set(named(rows(BOTH_FALL))) == {"likelihood"}
    (finding, *_) = find(rows(BOTH_FALL))
    assert "became less likely" in finding.message and "--imitation 1" in finding.message


@pytest.mark.parametrize(("chosen", "rejected"), [(0.01, -0.05), (0.0, -0.05), (-0.002, -0.05), (-0.02, 0.001)])
def test_chosen_responses_that_keep_their_likelihood_are_healthy(chosen: float, rejected: float) -> None:
    healthy = {
        "logp_per_token/chosen": [-x for x in noisy([1.0 - chosen * i for i in range(60)], 0.05)],
        "logp_per_token/rejected": [-x for x in noisy([1.1 - rejected * i for i in range(60)], 0.05, 1)],
    }
    assert named(rows(healthy)) == {}


def test_a_finding_is_told_once_until_it_has_been_away_for_a_while() -> None:
    def share(*lengths: int) -> Rows:
        """Alternately with all signal and with none, for so many steps each."""
        column = [x for i, n in enumerate(lengths) for x in [float(i % 2)] * n]
        return rows({"reward": noisy([0.1] * len(column), 0.1), "groups/no_signal": column})

    assert [f.step for f in find(share(20, 100))] == [29]
    assert [f.step for f in find(share(20, 30, 20, 30))] == [29], "away for less than 30 steps"
    assert [f.step for f in find(share(20, 30, 50, 30))] == [29, 109]
    assert [f.step for f in find(share(20, 30, 20, 30), HealthLimits(again=10))] == [29, 79]


@pytest.mark.parametrize("history", [DIVERGED, LOOPHOLE, LONGER], ids=["diverged", "loophole", "longer"])
def test_a_resumed_run_finds_what_an_uninterrupted_one_does(history: Mapping[str, str]) -> None:
    whole = rows(history)
    for cut in range(len(whole) + 1):
        health = Health.replay(whole[:cut])
        later = [finding for row in whole[cut:] for finding in health.look(int(row["step"]), row)]
        assert later == [finding for finding in find(whole) if finding.step > cut]


@pytest.mark.parametrize("scale", [1e-3, 7.0, 1e6])
def test_no_unit_matters(scale: float) -> None:
    """Neither that of the reward nor that of information."""
    for history in (DIVERGED, LOOPHOLE, LEARNED):
        scaled = rows(history)
        for row in scaled:
            for name in ("reward", "entropy", "kl"):
                if name in row:
                    row[name] *= scale
        assert named(scaled) == named(rows(history))


def test_what_is_missing_or_not_finite_is_as_if_it_were_not_there() -> None:
    holes: list[dict[str, Any]] = []
    for row in rows(DIVERGED):
        other = {"step": row["step"], "reward": None, "entropy": float("nan"), "kl": float("inf"), "eval/accuracy": 0.1}
        holes += [other, dict(row)]
    health = Health()
    found = [f for row in holes for f in health.look(int(row["step"]), row)]
    assert [(f.name, f.step) for f in found] == [(f.name, f.step) for f in find(rows(DIVERGED))]
    assert Health.replay([{"step": i, "loss": 1.0} for i in range(50)]).look(50, {}) == []


SHOWN = r"\(posttrain rollouts RUN[^)]*\)"


def test_messages_are_of_two_lines_and_name_options_that_exist() -> None:
    found = [*find(rows(DIVERGED)), *find(rows(LOOPHOLE)), *find(rows(LONGER)), *find(rows(LEARNED))]
    found += find(rows({"reward": [0.0] * 20, "groups/no_signal": [1.0] * 20}))
    found += find(rows({"skipped": [1.0] * 20, "explained_variance": [-1.0] * 20}), HealthLimits(critic_after=15))
    found += find(rows({"invalid": DODGING, "invalid/timeout": DODGING}))
    found += find(rows({**STUCK, "updates": [2] * 60, "ratio/clipped_high": [0.01] * 60}))
    found += find(rows({"accuracy": [], "reward": noisy([0.1] * 20, 0.1), "groups/no_signal": [0.99] * 20}))
    found += find(rows(BOTH_FALL))
    found += find(rows({"routing/entropy": [0.9**n for n in range(20)], "routing/busiest": [0.9] * 20}))
    part = {name: [float(x) for x in column.split()] for name, column in EASY_PART.items()}
    both = [a + b for a, b in zip(*part.values(), strict=True)]
    found += find(rows({"accuracy": [], "reward": both, **part}))
    found += find(evaluations(**{"forget/loss": [1.0, 2.0, 2.0]}))
    assert {finding.name for finding in found} == CHECKS.keys() - {"held_out"}
    options = (
        {field.name for field in (*fields(RL), *fields(Prefer))}
        | set(flags(Algorithm))
        | set(flags(PreferenceAlgorithm))
    )
    for finding in found:
        assert finding.message.count("\n") == 1
        for option in re.findall(r"--([a-z-]+)", re.sub(SHOWN, "", finding.message)):
            assert option.replace("-", "_") in options, option
        for told in re.findall(SHOWN, finding.message):
            assert set(re.findall(r"--([a-z-]+)", told)) <= set(signature(rollouts).parameters), told


def test_a_real_run_reports_what_the_checks_read_and_its_constant_reward_is_named(tmp_path: Path) -> None:
    tasks: Any = arithmetic.tasks(60, 0, digits=1)
    small: dict[str, Any] = {"threads": 1, "quiet": True, "held_out": 0.2}
    imitated = posttrain.sft(
        tasks, out=str(tmp_path / "sft"), hidden=32, layers=2, heads=2, context=24, tokenizer="characters", epochs=2,
        rows=16, **small,
    )  # fmt: skip

    def ignores(task: posttrain.Task, reply: str) -> float:
        return 0.25

    run = posttrain.rl(
        tasks, ignores, str(imitated.path), out=str(tmp_path / "rl"), steps=11, prompts=4, group=4, max_tokens=4,
        lr=1e-4, kl=0.04, success=1.0, env_workers=0, **small,
    )  # fmt: skip
    others = {"explained_variance", "invalid/timeout", "divergence", "logp_per_token/chosen", "logp_per_token/rejected"}
    others |= {
        "routing/entropy",
        "routing/busiest",
        "groups/played",
        "forget/loss",
        "reward/{part}",
        "suite/{part}/accuracy",
        "suite/{part}/tasks",
    }
    assert READ - run.metrics[-1].keys() <= others, (
        "of a critic, of slow rewards, of a teacher, of preferences, of experts, of dynamic sampling, of other tasks"
    )
    assert [(f.step, f.name) for f in find(run.metrics)] == [(10, "signal")]


@pytest.mark.parametrize(("tasks", "named_at"), [(20, []), (46, [10]), (400, [10])])
def test_held_out_accuracy_that_falls_by_more_than_chance_is_named(tasks: int, named_at: list[int]) -> None:
    """Newcombe's interval of 0.37 - 0.13 excludes 0 from some thirty tasks on."""
    fallen = {"eval/accuracy": [0.37, 0.13], "eval/tasks": [float(tasks)] * 2}
    found = find(evaluations(**fallen))
    assert [(f.name, f.step) for f in found] == [("held_out", step) for step in named_at]
    assert all("fell from 0.37 to 0.13" in f.message for f in found)
    word = verdicts({"reward": [0.3, 0.3], **fallen}, {})[QUESTIONS[0]]["word"]
    assert (word == "getting worse") == bool(named_at)


def test_held_out_accuracy_that_is_low_once_is_noise_where_the_last_evaluation_is_not() -> None:
    assert [
        f.step for f in find(evaluations(**{"eval/accuracy": [0.5, 0.5, 0.2, 0.5, 0.2, 0.2], "eval/tasks": [99.0] * 6}))
    ] == [50]
