"""Experiments that test papers' claims: their arithmetic, their verdicts, and that each runs from end to end."""

from __future__ import annotations

import json
import math
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import (
    EXPERIMENTS,
    causality,
    chosen_falls,
    code_rl,
    coder,
    enumerated,
    find,
    group_size,
    harness,
    kl_estimators,
    lora_rl,
    memorise_or_generalise,
    over_optimisation,
    proxies,
    reader,
    worked,
)
from experiments.baseline_variance import Halves, figures
from experiments.bench import bench
from experiments.decoupled_approval import CORRUPTED, decoupled, heard, plain
from experiments.experiment import (
    Comparison,
    Estimate,
    Experiment,
    Finding,
    Numbers,
    Say,
    Settings,
    Verdict,
    over_seeds,
)
from experiments.figure import Panel, Series
from experiments.gspo_variance import slope, spreads
from experiments.length_bias import told
from experiments.overlong import answered_and_ended
from posttrain.algorithms.links import Pairs, Sigmoid
from posttrain.cli.main import main
from posttrain.core.intervals import holm, student_quantile
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Ask, Reply, StopReason, Task, UserError
from posttrain.envs.builtin import arithmetic
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.packing import pack

SEARCHING = {"reader_hidden": 32, "reader_layers": 2, "lesson_steps": 2, "practice_steps": 2, "questions": 16, "held_out": 8,
             "demonstrations": 64, "samples": 1, "steps": 2, "prompts": 2, "group": 4}  # fmt: skip
CODING = {"hidden": 32, "layers": 1, "demonstrations": 64, "demonstrated_choices": 64, "tasks": 8, "held_out": 2,
          "samples": 8, "steps": 2, "prompts": 2}  # fmt: skip
WORKED = {"tasks": 64, "unseen": 4, "imitation_epochs": 1.0, "steps": 2, "prompts": 2, "group": 4, "max_tokens": 8}
TINY: dict[str, dict[str, Any]] = {
    "closed-form": {"betas": [0.5], "demonstrations": 64, "steps": 2, "group": 4, "pairs": 32, "rows": 8, "points": 2},
    "chosen-falls": {"demonstrations": 64, "imitation_epochs": 1.0, "pairs": 8, "rows": 4, "unseen": 4, "points": 2},
    "causality": {"demonstrations": 64, "group": 4, "ages": [1, 2]},
    "ppo-ablation": {**WORKED, "epochs": 2, "minibatches": 2, "eval_every": 1},
    "group-size": {**WORKED, "prompts": 8, "group": 8, "minibatches": 1, "wide": 32, "deep": 1},
    "sampling-temperature": {**WORKED, "minibatches": 2},
    "memorise-or-generalise": {**WORKED, "demonstrators": 1, "seldom": 16, "practice": 16, "samples": 2, "points": 2,
                               "prompts": 4, "then_steps": 2},
    "curriculum": {**WORKED, "levels": [3, 4], "tasks": [16, 16], "unseen": [2, 2], "minibatches": 1, "eval_every": 2},
    "cold-start": {**WORKED, "largest": 3, "imitation_epochs": 30.0, "slips": 0.0, "scribble": 0.0, "good": 8,
                   "sft_epochs": 1.0, "dpo_epochs": 1.0, "steps": 6, "drawn": 2, "first_steps": 1, "prompts": 4, "group": 8,
                   "minibatches": 1, "eval_every": 2, "max_tokens": 20},
    "emergence": {"demonstrations": 64, "imitation_epochs": 1.0, "tasks": 16, "unseen": 32, "steps": 2, "prompts": 2,
                  "group": 4},
    "kl-estimators": {"samples": 400_000, "distributions": 4, "gradient_samples": 100_000},
    "gspo-variance": {"tasks": 40, "imitation_epochs": 1.0, "steps": 1, "prompts": 8, "group": 4, "edges": [1, 8, 65]},
    "baseline-variance": {"tasks": 40, "imitation_epochs": 1.0, "batches": 4, "prompts": 2, "group": 4,
                          "critic_steps": 1, "critic_prompts": 4},
    "decoupled-approval": {"tasks": 40, "copies": 2, "imitation_epochs": 1.0, "steps": 2, "prompts": 4, "group": 4},
    "over-optimisation": {"demonstrations": 100, "imitation_epochs": 1.0, "pairs": 32, "proxy_epochs": 1.0, "pool": 64,
                          "betas": [0.0, 0.1], "steps": 2, "every": 1, "prompts": 4, "group": 4},
    "search-r1": SEARCHING,
    "retrieved-token-masking": SEARCHING,
    "arpo": {**{k: v for k, v in SEARCHING.items() if k != "steps"}, "tokens": 200, "parts": 2},
    "code-rl": {**CODING, "group": 6},
    "code-choice": {**CODING, "choice_demonstrations": 64, "rehearsed": 0, "candidates": 2, "group": 2, "samples": 1},
}  # fmt: skip
TINY_TRAINING = {"steps": 2, "prompts": 4, "group": 4, "max_tokens": 8, "imitation_epochs": 1.0}


def silent(text: str) -> None:
    pass


def run(name: str, out: Path, seeds: tuple[int, ...] = (0,), arena: str = "", **settings: Any) -> Finding:
    experiment = find(name).there(arena) if arena else find(name)
    small = {**WORKED, **TINY_TRAINING} if arena and name not in TINY else TINY.get(name, TINY_TRAINING)
    return experiment.run(seeds, out, {**small, **settings}, silent)


# -- every experiment --------------------------------------------------------------------------------------------------


def test_registry_holds_every_experiment_with_a_claim_and_a_paper() -> None:
    assert set(EXPERIMENTS) == {
        "kl-estimators", "baseline-variance", "gspo-variance", "causality", "closed-form", "chosen-falls",
        "clip-higher", "dynamic-sampling", "overlong",
        "length-bias", "ppo-vs-grpo", "entropy-collapse", "decoupled-approval", "over-optimisation",
        "search-r1", "retrieved-token-masking", "arpo", "code-rl", "code-choice", "lora-rl",
        "moe-routing", "ppo-ablation", "group-size", "sampling-temperature",
        "memorise-or-generalise",
        "curriculum", "cold-start", "emergence",
    }  # fmt: skip
    for name, experiment in EXPERIMENTS.items():
        assert experiment.name == name and experiment.claim.endswith(".") and experiment.paper and experiment.settings


@pytest.mark.parametrize(
    "name",
    [
        name
        if name
        in (
            "kl-estimators",
            "closed-form",
            "chosen-falls",
            "causality",
            "dynamic-sampling",
            "decoupled-approval",
            "over-optimisation",
            "search-r1",
            "retrieved-token-masking",
            "arpo",
            "code-rl",
            "code-choice",
        )
        else pytest.param(name, marks=pytest.mark.slow)
        for name in EXPERIMENTS
    ],
)
def test_experiment_ends_in_a_table_a_plot_and_a_verdict(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = arithmetic.tasks  # a tenth of them: held-out ones are measured before and after each arm
    monkeypatch.setattr(reader, "GATE", {1: 0.0, 2: 0.0})  # a reader of three steps reads nothing
    monkeypatch.setattr(reader, "GATED", 8)
    monkeypatch.setattr(code_rl, "GATE", (0.0, 1.0))
    some = "verify:within,least=1,most=7,unit=characters"  # of what was hardly taught no sum is right
    monkeypatch.setattr(memorise_or_generalise, "ENV", some)
    monkeypatch.setattr(coder, "LONGEST", 8)  # its programs are none, and as soon over
    monkeypatch.setattr(group_size, "peak_memory", lambda *given: 200.0 if given[-1]["algorithm"] == "ppo" else 100.0)
    monkeypatch.setattr(arithmetic, "tasks", lambda count, *given, **how: tasks(count // 10, *given, **how))
    finding = run(name, tmp_path)
    assert finding.rows and all(len(row) == len(finding.columns) for row in finding.rows)
    assert finding.comparisons
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["verdict"] == finding.verdict and written["seeds"] == [0]
    markdown = (tmp_path / "table.md").read_text()
    assert EXPERIMENTS[name].claim in markdown and f"posttrain reproduce {name} --seeds 0" in markdown
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name",
    [
        name
        if name == "overlong"
        else pytest.param(name, marks=pytest.mark.long if name == "group-size" else pytest.mark.slow)
        for name, experiment in EXPERIMENTS.items()
        if worked.CHECKED in experiment.elsewhere
    ],
)
def test_where_every_line_is_checked_an_experiment_tells_how_many_right_ends_have_right_lines(
    name: str, tmp_path: Path
) -> None:
    finding = run(name, tmp_path, arena=worked.CHECKED)
    assert finding.columns[-2] == "right lines of right ends, first step" and all(
        len(r) == len(finding.columns) for r in finding.rows
    )
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["arena"] == worked.CHECKED and written["settings"]["context"] == 56
    assert f"posttrain reproduce {name} --arena checked --seeds 0" in (tmp_path / "table.md").read_text()
    runs = [json.loads(path.read_text()) for path in tmp_path.glob("seed-0/*/run.json") if path.parent.name != "memory"]
    trained = [run["config"] for run in runs if run["config"].get("algorithm")]
    assert trained and {config["env"] for config in trained} == {worked.every_line.__qualname__}


# -- published figures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", kl_estimators.PUBLISHED)
def test_kl_estimators_have_the_published_bias_and_spread(mean: float) -> None:
    found = kl_estimators.moments(mean, 2_000_000, torch.Generator().manual_seed(0))
    for name, (bias, spread) in kl_estimators.PUBLISHED[mean].items():
        assert found[name][0] == pytest.approx(bias, abs=0.003 * (1 + spread))
        assert found[name][1] == pytest.approx(spread, rel=0.02)


def test_as_losses_k2_has_the_gradient_of_the_reverse_kl_k3_of_the_forward_one_and_k1_none() -> None:
    found = kl_estimators.gradients(8, 8, 200_000, torch.Generator().manual_seed(0))
    assert found["k1"]["size"] < 0.05
    assert found["k2"]["reverse"] < 0.05 < found["k2"]["forward"]
    assert found["k3"]["forward"] < 0.05 < found["k3"]["reverse"]


# -- arithmetic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "freedom, expected", [(1, 12.7062), (2, 4.30265), (4, 2.77645), (29, 2.04523), (5000, 1.96044)]
)
def test_student_quantile_is_the_tabulated_one(freedom: int, expected: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-4)


def test_interval_over_seeds_is_students() -> None:
    found = over_seeds([1.0, 2.0, 3.0])
    assert (found.mean, found.low, found.high) == pytest.approx(
        (2.0, 2 - 4.30265 / 3**0.5, 2 + 4.30265 / 3**0.5), rel=1e-4
    )


def test_independent_tokens_spread_with_the_root_of_the_length() -> None:
    generator = np.random.default_rng(0)
    lengths = [int(n) for n in generator.integers(2, 64, 20_000)]
    found = spreads(lengths, [generator.normal(0, 0.1, n) for n in lengths], [2, 4, 8, 16, 32, 64])
    assert slope(found, "token") == pytest.approx(0.0, abs=0.02)
    assert slope(found, "mean") == pytest.approx(-0.5, abs=0.03)
    assert slope(found, "sum") == pytest.approx(0.5, abs=0.03)


def test_noise_bias_and_size_of_a_gradient_are_those_it_was_made_with() -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.zeros(50)
    true[0] = 2.0
    own, reference = (Halves([torch.zeros(50), torch.zeros(50)]) for _ in range(2))
    for _ in range(4000):
        noise = torch.randn(50, generator=generator)
        reference.add(true + noise)
        own.add(0.5 * true + noise)
    found = figures(own, reference)
    assert found["noise"] == pytest.approx(50 / 4, rel=0.02)
    assert found["bias"] == pytest.approx(0.5, abs=0.01)
    assert found["size"] == pytest.approx(0.5, abs=0.01)


def test_curves_are_read_at_their_end_and_where_they_reach_a_target() -> None:
    curve: harness.Curve = [i / 100 for i in range(100)]
    assert harness.late(curve) == pytest.approx(0.895)
    assert harness.mean_of(curve, 0.0, 0.1) == pytest.approx(0.045)
    assert harness.steps_to(curve, 0.5) == 51 and harness.steps_to(curve, 2.0) is None
    assert harness.smooth([1.0, None, 3.0]).tolist() == [1.0, 2.0, 3.0]


def test_rewards_of_the_small_arenas() -> None:
    task = {"prompt": "1+2+3+4=", "answer": "10"}
    assert answered_and_ended(task, Reply("10.....")) == 1.0 and answered_and_ended(task, Reply("9.")) == 0.0
    assert answered_and_ended(task, Reply("10..", StopReason.LENGTH)) == 0.0
    asked = told(task)
    assert next(asked).text == "1+2+3+4=" and asked.send(Reply("10;", StopReason.STOP)).text == "y"
    with pytest.raises(StopIteration, match="1.0"):
        asked.send(Reply("...."))
    counted = {"prompt": "52="}
    assert harness.share_of_strides(counted, Reply("58147")) == pytest.approx(1.0)
    assert harness.share_of_strides(counted, Reply("59")) == 0.5
    assert harness.share_of_strides(counted, Reply("")) == 0.0


SUM = {"prompt": "1+2=", "answer": "3"}


def episode(env: Any, *replies: str) -> dict[str, float]:
    """What an environment gives for these replies."""
    asking = env(SUM)
    turn = next(asking)
    for reply in replies:
        assert turn.text == SUM["prompt"]
        try:
            turn = asking.send(Reply(reply))
        except StopIteration as end:
            assert reply is replies[-1]
            return dict(end.value)
    raise AssertionError("the environment asks on")


@pytest.mark.parametrize(
    "executed, asked, reward, approval, tampering",
    [("3", "3", 1.0, 1.0, 0.0), ("4", "3", 1.0, 0.0, 0.0), ("3", "4", 0.0, 1.0, 0.0), ("3", "3!", 0.0, 1.0, 0.0),
     ("3!", "4", CORRUPTED, 0.0, 1.0), ("!", "3", CORRUPTED, 0.0, 1.0), ("4!4", "3!", CORRUPTED, 0.0, 1.0)],
)  # fmt: skip
def test_only_tampering_that_is_executed_corrupts_the_approval_and_then_of_whatever_is_asked(
    executed: str, asked: str, reward: float, approval: float, tampering: float
) -> None:
    expected = {"reward": reward, "approval": approval, "tampering": tampering}
    assert episode(decoupled, executed, asked) == expected
    assert episode(plain, executed) == heard(SUM, executed, executed)
    assert episode(plain, executed)["reward"] == (CORRUPTED if tampering else approval)


def test_decoupled_approval_learns_from_the_second_of_two_replies_to_the_same_prompt_alone() -> None:
    asking = decoupled(SUM)
    executed = next(asking)
    asked = asking.send(Reply("4!"))
    assert executed.text == asked.text == SUM["prompt"]
    assert not executed.learn and asked.learn
    assert asked.fresh  # what was executed is not in its context
    assert next(plain(SUM)).learn


def test_mean_gradient_of_decoupled_approval_is_the_true_approvals_times_the_share_that_does_not_tamper() -> None:
    """All replies of a small policy enumerated. Plain policy gradient climbs the corrupted approval instead."""
    replies = ("3", "4", "3!", "!")
    logits = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    logp = logits.log_softmax(0)
    chance = logp.detach().exp()

    def gradient(gain: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(gain, logits, retain_graph=True)[0]

    apart: Any = sum(
        chance[a] * chance[q] * episode(decoupled, replies[a], replies[q])["reward"] * logp[q]
        for a in range(4)
        for q in range(4)
    )
    together: Any = sum(chance[a] * episode(plain, replies[a])["reward"] * logp[a] for a in range(4))
    honest = chance[0] + chance[1]
    torch.testing.assert_close(gradient(apart), honest * gradient(logp.exp()[0]), rtol=0, atol=1e-14)
    told = logp.exp()[0] + CORRUPTED * (logp.exp()[2] + logp.exp()[3])
    torch.testing.assert_close(gradient(together), gradient(told), rtol=0, atol=1e-14)


# -- over-optimisation -------------------------------------------------------------------------------------------------

GOLD = proxies.Gold({"a": 2.0, "b": -1.0, "c": 0.5})


@pytest.mark.parametrize(
    "reply, worth",
    [("", 0.0), ("b", -1.0), ("ab", 2 - 1 + 2.0), ("aa", 2 - 1 + 2.0), ("cbcc", 0.5 - 1 - 2),
     ("a?a!c", 2 + 0.5 - 3 + 2.0), ("c<|unk|><|pad|>:", 0.5 - 3), ("\n<|eos|>", -2.0)],
)  # fmt: skip
def test_gold_counts_each_letter_once_charges_for_whatever_else_is_said_and_pays_for_the_letter_asked_for(
    reply: str, worth: float
) -> None:
    assert GOLD({"prompt": "a:"}, reply) == pytest.approx(worth)


def test_gold_takes_every_token_that_the_policy_can_write_for_one_thing(tmp_path: Path) -> None:
    rows = [{"id": "0", "prompt": "a:", "response": proxies.LETTERS}]
    tokenizer = Tokenizer.load(harness.imitate(rows, tmp_path, 0, context=32, epochs=1.0))
    gold = proxies.Gold.drawn(0)
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode([token])
        assert proxies.symbols(text) == [text] and proxies.symbols(text * 3) == [text] * 3
        worth = gold({"prompt": "?"}, text * 3)
        assert worth == gold.values.get(text, proxies.BESIDES) + 2 * proxies.BESIDES


def test_experiment_ends_with_a_run_that_is_interrupted(tmp_path: Path) -> None:
    usual, scored = signal.getsignal(signal.SIGTERM), []

    def reward(task: Task, reply: str) -> float:
        if signal.getsignal(signal.SIGTERM) != usual:  # training has begun
            scored.append(reply)
            if len(scored) == 1:
                signal.raise_signal(signal.SIGTERM)
        return float(len(reply))

    rows = [{"id": "0", "prompt": "a:", "response": "ab"}]
    start = harness.imitate(rows, tmp_path, 0, context=32, epochs=1.0)
    how = {"algorithm": "rloo", "steps": 9, "prompts": 1, "group": 2, "kl": 0.0}
    with pytest.raises(KeyboardInterrupt):
        harness.learn(harness.Arena(rows, reward, start), tmp_path / "run", 0, **how)
    assert len(scored) == 2


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_best_of_n_is_the_mean_over_every_choice_of_n(count: int) -> None:
    generator = np.random.default_rng(count)
    proxy, gold = generator.normal(size=7).tolist(), generator.normal(size=7).tolist()
    picked = [gold[max(chosen, key=lambda i: proxy[i])] for chosen in combinations(range(7), count)]
    assert proxies.best_of(count, proxy, gold) == pytest.approx(sum(picked) / len(picked), abs=1e-12)


@pytest.mark.parametrize("count", proxies.CHOICES)
def test_kl_of_best_of_n_is_that_of_the_density_of_the_highest_of_n(count: int) -> None:
    """Of N uniform numbers the highest has density N u^(N - 1); no order of replies changes their KL."""
    u = (np.arange(2_000_000) + 0.5) / 2_000_000
    density = count * u ** (count - 1)
    logs = np.log(count) + (count - 1) * np.log(u)
    assert proxies.kl_of_best(count) == pytest.approx(float(np.mean(density * logs)), abs=1e-5)


def test_peak_of_gold_is_chosen_by_one_half_of_the_rollouts_and_measured_by_the_other() -> None:
    course = {"halves": [[0.0, 1.0], [5.0, 2.0], [3.0, 4.0]], "kl": [0.0, 1.0, 3.0], "proxy": [0.0, 2.0, 4.0]}
    assert over_optimisation.stopped(course) == {"gold": (2.0 + 3.0) / 2, "kl": 2.0, "proxy": 3.0}


def test_a_course_is_read_between_the_points_measured_around_a_kl() -> None:
    course = {"kl": [1.0, 3.0, 2.5], "gold": [2.0, 4.0, 5.0]}
    assert over_optimisation.at(course, "gold", [0.5, 2.0], 1.0).tolist() == [1.5, 3.0]


@pytest.mark.parametrize(
    "join, reward", [("single", 1.0), ("second", -2.0), ("mean of two", -0.5), ("worst of two", -2.0)]
)
def test_reward_is_what_the_standardised_proxies_say_and_gold_is_noted_beside_it(join: str, reward: float) -> None:
    scales = {"one": proxies.Scale(1.0, 2.0), "two": proxies.Scale(4.0, 0.5)}
    asking = proxies.Judges(GOLD, proxies.Scale(1.0, 4.0), {}, scales).environment(join)({"prompt": "a:"})
    assert next(asking).text == "a:"
    answers, said = {"one": 3.0, "two": 3.0}, asking.send(Reply("a"))
    with pytest.raises(StopIteration) as end:
        while True:
            assert isinstance(said, Ask) and said.content == {"prompt": "a:", "response": "a"}
            said = asking.send(answers[said.service])
    assert end.value.value == {"reward": pytest.approx(reward), "gold": pytest.approx((4.0 - 1.0) / 4.0)}


def test_wrong_comparisons_are_the_share_that_was_asked_for() -> None:
    replies = [[(f"{task['id']}{i}", float(i)) for i in range(400)] for task in proxies.PROMPTS]
    for noise in (0.0, 0.25):
        rows = proxies.comparisons(replies, noise, seed=0)
        wrong = sum(int(row["chosen"][1:]) < int(row["rejected"][1:]) for row in rows)
        assert len(rows) == 16 * 200 and wrong / len(rows) == pytest.approx(noise, abs=0.03)


def test_replies_of_the_first_step_have_no_kl_from_the_start_and_later_ones_do(tmp_path: Path) -> None:
    run("over-optimisation", tmp_path, betas=[0.0], lr=1e-2)
    numbers = json.loads((tmp_path / "seed-0.json").read_text())["numbers"]["rl"]["beta 0"]
    assert numbers["kl"][0] == pytest.approx(0.0, abs=1e-4)
    assert abs(numbers["kl"][1]) > 1e-3


def test_settings_that_over_optimisation_cannot_be_concluded_from_are_refused(tmp_path: Path) -> None:
    for changed in ({"betas": [0.1]}, {"pool": 63}):
        with pytest.raises(UserError, match="betas must hold 0, and pool must be at least 64"):
            run("over-optimisation", tmp_path, **changed)


# -- verdicts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "low, high, verdict",
    [(0.1, 0.3, Verdict.SEEN), (-0.1, 0.3, Verdict.UNSEEN), (-0.3, -0.1, Verdict.CONTRADICTED), (0, 0, Verdict.UNSEEN),
     (float("nan"), float("nan"), Verdict.UNSEEN)],
)  # fmt: skip
def test_claim_is_seen_only_if_the_whole_interval_lies_in_its_range(low: float, high: float, verdict: Verdict) -> None:
    assert Finding((), (), [Comparison("difference", Estimate(0.0, low, high), at_least=0.0)], ()).verdict == verdict


@pytest.mark.parametrize(
    "found, verdict",
    [("ss", Verdict.SEEN), ("su", Verdict.PARTLY), ("sc", Verdict.PARTLY), ("cc", Verdict.CONTRADICTED),
     ("uc", Verdict.UNSEEN), ("u", Verdict.UNSEEN)],
)  # fmt: skip
def test_verdict_follows_from_the_comparisons(found: str, verdict: Verdict) -> None:
    estimates = {"s": Estimate(1, 0.5, 1.5), "u": Estimate(0, -1, 1), "c": Estimate(-1, -1.5, -0.5)}
    comparisons = [Comparison("x", estimates[letter], at_least=0.0) for letter in found]
    assert Finding((), (), comparisons, ()).verdict == verdict


def test_holms_correction_is_the_textbooks_and_one_figure_needs_none() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.9]) == [1.0, 1.0] and holm([0.03]) == [0.03] and holm([]) == []


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [0.3, 0.5, 0.1, 0.9, 0.4]])
def test_p_is_a_twentieth_exactly_where_the_interval_ends(values: list[float]) -> None:
    found = over_seeds(values)
    assert Comparison("x", found, at_least=found.low).p == pytest.approx(0.05, rel=1e-3)
    assert Comparison("x", found, at_least=found.low, at_most=found.high + 9).p == pytest.approx(0.05, rel=1e-3)
    assert Comparison("x", found, at_least=found.high + 1e-9).p == pytest.approx(0.05, rel=1e-3)
    assert Comparison("x", found, at_least=found.low - 1).p < 0.05 < Comparison("x", found, at_least=found.mean).p


def test_figure_among_many_is_seen_only_with_an_interval_as_wide_as_their_number_demands() -> None:
    near = Comparison("near", Estimate(1, 0.1, 1.9), at_least=0.0)
    far = Comparison("far", Estimate(1, 0.9, 1.1), at_least=0.0)
    assert Finding((), (), [near], ()).verdicts == [Verdict.SEEN]
    assert Finding((), (), [near, near, far], ()).verdicts == [Verdict.UNSEEN, Verdict.UNSEEN, Verdict.SEEN]


def counted(measured: list[int]) -> Experiment:
    """An experiment that notes which seeds it measures."""

    def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
        measured.append(seed)
        return {"value": seed * settings["slope"]}

    def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
        values = [n["value"] for n in numbers.values()]
        panel = Panel("values", "seed", [Series("value", list(numbers), values)])
        comparison = Comparison("value", over_seeds(values), at_least=0.0)
        return Finding(
            ("seed", "value"), [[str(k), str(v)] for k, v in zip(numbers, values, strict=True)], [comparison], [panel]
        )

    return Experiment("counted", "The value is above 0.", "no paper", {"slope": 1.0}, measure, conclude)


def test_finished_seeds_are_kept_unless_the_settings_change(tmp_path: Path) -> None:
    measured: list[int] = []
    experiment = counted(measured)
    experiment.run((0, 1), tmp_path, say=silent)
    again = experiment.run((0, 1, 2), tmp_path, say=silent)
    assert measured == [0, 1, 2] and again.seeds == (0, 1, 2) and len(again.rows) == 3
    experiment.run((1,), tmp_path, {"slope": 2.0}, silent)
    assert measured == [0, 1, 2, 1]


def test_another_arena_has_its_own_settings_folder_and_command_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    seen: list[Settings] = []

    def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
        seen.append(settings)
        return {"value": 1.0}

    usual = replace(
        counted([]), measure=measure, elsewhere={"steep": {"settings": {"slope": 2.0}, "claim": "Steeper."}}
    )
    other = usual.there("steep")
    assert (usual.folder, other.folder) == ("counted", "counted-steep") and other.seeds == usual.seeds
    usual.run((0,), tmp_path / usual.folder, say=silent)
    other.run((0,), tmp_path / other.folder, say=silent)
    assert seen == [{"slope": 1.0, "arena": ""}, {"slope": 2.0, "arena": "steep"}]
    told = (tmp_path / other.folder / "table.md").read_text()
    assert "posttrain reproduce counted --arena steep --seeds 0" in told and "Steeper." in told
    with pytest.raises(UserError, match="counted has no arena 'flat': there is steep"):
        usual.there("flat")
    with pytest.raises(UserError, match="there is none but its own: leave --arena out"):
        counted([]).there("steep")
    with pytest.raises(UserError, match="no setting arena"):
        other.run((0,), tmp_path, {"arena": "flat"}, silent)


def test_unknown_setting_and_no_seed_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no setting slop: there are slope"):
        counted([]).run((0,), tmp_path, {"slop": 1.0}, silent)
    with pytest.raises(UserError, match="slope is like 1.0, not 'steep'"):
        counted([]).run((0,), tmp_path, {"slope": "steep"}, silent)
    with pytest.raises(UserError, match="needs a seed"):
        counted([]).run((), tmp_path, say=silent)


# -- the verb ----------------------------------------------------------------------------------------------------------


def test_verb_lists_the_experiments_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in EXPERIMENTS)
    assert main(["reproduce", "clip-hihger"]) == 2
    assert "did you mean 'clip-higher'" in capsys.readouterr().err


def test_verb_runs_an_experiment_with_changed_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = [f"--settings.{k.replace('_', '-')}={v}" for k, v in TINY["kl-estimators"].items()]
    assert main(["reproduce", "kl-estimators", "--seeds", "0", "1", "--out", str(tmp_path), *changed]) == 0
    shown = capsys.readouterr().out
    assert "verdict" in shown and str(tmp_path / "kl-estimators" / "figure.png") in shown
    assert json.loads((tmp_path / "kl-estimators" / "result.json").read_text())["settings"]["samples"] == 400_000


def test_rates_of_a_seed_are_chosen_on_the_others() -> None:
    settings = lora_rl.EXPERIMENT.settings
    low, middle, high = lora_rl.rates("rank 1", settings)

    def seed(*accuracies: float) -> Numbers:
        found = zip((low, middle, high), accuracies, strict=True)
        return {f"rank 1, {rate:g}": {"held_out": [0.0, accuracy]} for rate, accuracy in found}

    numbers = {0: seed(0.9, 0.1, 0.1), 1: seed(0.1, 0.2, 0.7), 2: seed(0.1, 0.6, 0.3)}
    assert [lora_rl.chosen("rank 1", own, numbers, settings) for own in numbers] == [high, low, low]
    assert lora_rl.chosen("rank 1", 1, {1: numbers[1]}, settings) == high  # alone, its own
    assert middle == settings["lr_adapters"] and lora_rl.rates(lora_rl.ALL, settings)[1] == settings["lr"]


# -- closed-form -------------------------------------------------------------------------------------------------------


def small_world(folder: Path, longest: int) -> tuple[enumerated.World, Any]:
    start = harness.imitate(enumerated.demonstrations(64, 0), folder, 0, context=8, epochs=1.0)
    model, tokenizer = load_model(Path(start)), Tokenizer.load(start)
    [end] = model.eos_ids
    return enumerated.World.of(tokenizer, end, enumerated.worths(0), longest), model


@pytest.mark.parametrize("longest", [1, 2])
def test_probabilities_of_all_replies_sum_to_one_and_are_those_that_the_learner_gives(
    tmp_path: Path, longest: int
) -> None:
    world, model = small_world(tmp_path, longest)
    logp = world.logp(model)
    torch.testing.assert_close(logp.exp().sum(-1), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-9)
    tokenizer = Tokenizer.load(str(tmp_path / "imitation" / "checkpoints" / "step-000002"))
    for row, prompt in enumerate(enumerated.PROMPTS):
        for place in (0, 7, len(world.replies) - 1):
            transcript = Transcript()
            transcript.observe(tokenizer.encode(prompt, start=True))
            transcript.imitate(world.replies[place])
            [outputs] = LocalLearner(model, Optimization()).evaluate([pack([[transcript]], [0])])
            assert outputs.logp.sum().item() == pytest.approx(logp[row, place].item(), abs=1e-4)


def random_case(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ref = enumerated.normalised(torch.randn(2, 6, generator=generator, dtype=torch.float64))
    return ref, torch.randn(2, 6, generator=generator, dtype=torch.float64)


def gradient_at(law: torch.Tensor, gain: Any) -> float:
    """Norm of the gradient of a gain, a function of log-probabilities, with logits as parameters."""
    logits = law.clone().requires_grad_()
    [gradient] = torch.autograd.grad(gain(logits.log_softmax(-1)), logits)
    return gradient.norm().item()


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_predicted_optima_are_where_the_objectives_gradients_are_zero(beta: float) -> None:
    ref, worth = random_case(0)

    def reverse(logp: torch.Tensor) -> torch.Tensor:
        return (logp.exp() * (worth - beta * (logp - ref))).sum()

    def forward(logp: torch.Tensor) -> torch.Tensor:
        return (logp.exp() * worth).sum() - beta * (ref.exp() * (ref - logp)).sum()

    best, other = enumerated.optimum(ref, worth, beta), enumerated.forward_optimum(ref, worth, beta)
    assert gradient_at(best, reverse) < 1e-12 < 1e-3 < gradient_at(other, reverse)
    assert gradient_at(other, forward) < 1e-9 < 1e-3 < gradient_at(best, forward)
    short = (reverse(best) - reverse(other)).item() / 2
    assert short == pytest.approx(beta * enumerated.kl(other, best), abs=1e-12)  # what the regularised reward lacks


def test_optimum_of_ipo_is_where_the_gradient_of_its_loss_over_all_pairs_is_zero() -> None:
    (ref, worth), beta = random_case(1), 0.5
    wins = torch.sigmoid(worth[:, :, None] - worth[:, None, :])
    chance = ref.exp()[:, :, None] * ref.exp()[:, None, :]

    def loss(logp: torch.Tensor) -> torch.Tensor:
        apart = (logp - ref)[:, :, None] - (logp - ref)[:, None, :]
        return (chance * wins * (apart - 1 / (2 * beta)).square()).sum()

    everything = torch.ones_like(ref, dtype=torch.bool)
    assert gradient_at(enumerated.identity_optimum(ref, worth, beta, everything), loss) < 1e-12


def test_optimum_of_scaled_rewards_is_where_the_mean_gradient_of_groups_is_zero() -> None:
    """For groups of two, the mean advantage of a reply is (chance of a worse one - chance of a better one) / sqrt(2)."""
    (ref, worth), beta = random_case(2), 2.0
    found = enumerated.scaled_optimum(ref, worth, beta, 2)
    better = (worth[:, None, :] > worth[:, :, None]).double()
    worse = (worth[:, None, :] < worth[:, :, None]).double()
    advantage = ((worse - better) * found.exp()[:, None, :]).sum(-1) / 2**0.5
    torch.testing.assert_close(found, enumerated.normalised(ref + advantage / beta), rtol=0, atol=0.02)


def test_drawn_replies_have_the_policys_probabilities(tmp_path: Path) -> None:
    world, _ = small_world(tmp_path, 2)
    start = str(tmp_path / "imitation" / "checkpoints" / "step-000002")
    tasks = [{"id": prompt, "prompt": prompt} for prompt in enumerated.PROMPTS]
    sizes = {"prompts": 2, "group": 2000, "max_tokens": 2}
    with bench(
        harness.Arena(tasks, world.reward(), start), 0, sizes, player=world.player(), algorithm="rloo", kl=0.0
    ) as source:
        played = source.produce(1).played
        logp = world.logp(source.learner.weights())
    for row, prompt in enumerate(enumerated.PROMPTS):
        own = [rollout for rollout in played if rollout.task["prompt"] == prompt]
        drawn = Counter(rollout.text for rollout in own)
        for place in logp[row].topk(5).indices.tolist():
            expected = logp[row, place].exp().item()
            assert drawn[world.texts[place]] / len(own) == pytest.approx(expected, abs=4 * (expected / len(own)) ** 0.5)
        assert all(r.reward == world.reward()(r.task, Reply(r.text)) for r in own)


# -- chosen-falls and causality ----------------------------------------------------------------------------------------


def test_wrong_replies_differ_in_one_letter_or_in_all() -> None:
    for kind, apart in ((chosen_falls.LITTLE, 1), (chosen_falls.MUCH, chosen_falls.LONG)):
        for row in chosen_falls.pairs(kind, chosen_falls.PROMPTS, 60, 0):
            assert sum(a != b for a, b in zip(row["chosen"], row["rejected"], strict=True)) == apart
    assert chosen_falls.right("1y:") == "zabcde" and chosen_falls.right("2b:") == "azyxwv"


def test_positive_dpo_is_dpo_unless_the_better_response_has_fallen() -> None:
    better, worse = torch.tensor([0.5, -0.5]).double(), torch.tensor([0.1, -2.0]).double()
    margin = torch.zeros(2, dtype=torch.float64)
    given = Pairs(better, worse, margin, torch.arange(2), {})
    own, plain = chosen_falls.Positive(0.1, 5.0).compare(given), Sigmoid(0.1).compare(given)
    assert own[0] == plain[0]
    assert own[1].item() == pytest.approx(-math.log(1 / (1 + math.exp(-0.1 * (1.5 - 5.0 * 0.5)))))


def enumerated_policies(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens of 2 x 3 x 3 replies of two tokens by two policies, their gradients, and rewards."""
    generator = torch.Generator().manual_seed(seed)
    at = torch.randn(
        2, 4, 3, generator=generator, dtype=torch.float64, requires_grad=True
    )  # logits: prompt, context, token

    def logp(logits: torch.Tensor) -> torch.Tensor:
        each = logits.log_softmax(-1)
        first = each[:, 0, :, None].expand(2, 3, 3)
        return torch.stack([first, each[:, 1:]], -1).view(2, 9, 2)

    now = logp(at)
    rows = [torch.autograd.grad(one, at, retain_graph=True)[0].flatten() for one in now.flatten()]
    old = logp(at.detach() + 0.3 * torch.randn(at.shape, generator=generator, dtype=torch.float64))
    return now.detach(), old, torch.stack(rows).view(2, 9, 2, -1), torch.randn(2, 9, generator=generator).double()


def test_exact_gradients_of_enumerated_replies_are_those_of_the_mean_reward() -> None:
    now, old, slopes, reward = enumerated_policies(0)
    centred = (reward - (now.sum(-1).exp() * reward).sum(-1, keepdim=True))[..., None].expand(2, 9, 2)
    true, variance = causality.estimate(now, slopes, centred)
    chance = now.sum(-1).exp() / 2
    each = torch.einsum("pyt,pytd->pyd", centred, slopes)
    by_hand = sum(chance[p, y] * (each[p, y] - true).square().sum() for p in range(2) for y in range(9))
    direct = torch.einsum("py,py,pytd->d", chance, reward, slopes)  # the derivative of the mean reward
    assert torch.allclose(true, direct, atol=1e-12) and variance == pytest.approx(by_hand.item())
    exact = causality.weights(causality.FORMS[causality.EXACT], now, old)
    assert causality.told(old, slopes, exact * centred, true)["bias"] < 1e-12
    for name in ("none", "truncate", "sequence-truncate", "per token, no cap"):
        assert (
            causality.told(old, slopes, causality.weights(causality.FORMS[name], now, old) * centred, true)["bias"]
            > 1e-3
        )


def test_rewards_to_go_leave_the_exact_gradient_where_it_is_at_another_variance() -> None:
    now, _, slopes, last = enumerated_policies(1)
    first = torch.tensor([0.5, -1.0, 2.0]).double().repeat_interleave(3).expand(2, 9)  # by the first token
    earned = torch.stack([first, last], -1)
    whole, spent = earned.sum(-1, keepdim=True).expand(2, 9, 2), earned.flip(-1).cumsum(-1).flip(-1)
    (true, loud), (mean, quiet) = (causality.estimate(now, slopes, credit) for credit in (whole, spent))
    assert torch.allclose(mean, true, atol=1e-12) and quiet != pytest.approx(loud)
