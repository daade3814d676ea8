"""GiGPO's advantages: turns of one state are compared, by their discounted returns, beside whole rollouts."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, pstdev, stdev

import pytest
import torch
from update_cases import WORDS

import posttrain
from posttrain.algorithms.credit import Baselined
from posttrain.algorithms.turn_groups import TurnGroups, TurnHistories
from posttrain.core.batch import Scores
from posttrain.core.component import Need
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, StopReason
from posttrain.envs.builtin import adventure
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.runs.run_reading import read_metrics
from posttrain.training.sources.scoreboard import scoreboard, turns

EPS = 1e-6


def episode(group: str, words: str, reward: float, steps: list[tuple[int, float]] | None = None) -> Rollout:
    """An episode from what the environment wrote and (in capitals) the policy: "p AB x C" has turns of 2 and 1 tokens."""
    transcript = Transcript()
    for word in words.split():
        tokens = [ord(c) for c in word]
        if word.isupper():
            transcript.sample(Completion(0, tokens, [-1.0] * len(tokens), "", StopReason.EOS, 0))
        else:
            transcript.observe(tokens)
    return Rollout({"id": group}, group, [transcript], reward, steps=steps or [])


def scores_of(*rollouts: Rollout) -> Scores:
    return scoreboard(rollouts, needs=frozenset({Need.TURNS}))


def test_a_turn_is_compared_with_those_behind_the_same_observation_of_its_group() -> None:
    """Rewards 1, 0, 0; the first two rollouts come to x, the first and the third to y."""
    rollouts = [episode("a", "p AB x C y D", 1.0), episode("a", "p A x BC", 0.0), episode("a", "p B y C", 0.0)]
    found = TurnGroups(gamma=0.5)(scores_of(*rollouts))
    totals, begins, at_x, at_y = [1.0, 0.0, 0.0], [0.25, 0.0, 0.0], [0.5, 0.0], [1.0, 0.0]

    def over(value: float, among: list[float]) -> float:
        return (value - mean(among)) / (stdev(among) + EPS)

    first = [over(1.0, totals) + over(x, own) for x, own in ((0.25, begins), (0.5, at_x), (1.0, at_y))]
    assert found[0].tolist() == pytest.approx([first[0]] * 2 + first[1:], abs=1e-12)
    second = [over(0.0, totals) + over(0.0, own) for own in (begins, at_x)]
    assert found[1].tolist() == pytest.approx([second[0], second[1], second[1]], abs=1e-12)
    third = [over(0.0, totals) + over(0.0, own) for own in (begins, at_y)]
    assert found[2].tolist() == pytest.approx(third, abs=1e-12)


def test_step_rewards_count_from_the_turn_that_earned_them_on() -> None:
    """Of the 1.5 in total 0.5 come behind the first turn: what the second turn earned is the rest."""
    rollouts = [episode("a", "p A x B", 1.5, [(1, 0.5)]), episode("a", "p B x A", 0.0)]
    found = TurnGroups(gamma=1.0, scale="none")(scores_of(*rollouts))
    assert found[0].tolist() == [0.75 + 0.75, 0.75 + 0.5] and found[1].tolist() == [-0.75 - 0.75, -0.75 - 0.5]


def test_groups_are_never_compared_with_each_other() -> None:
    one = [episode("a", "p A x B", 1.0), episode("a", "p B x A", 0.0)]
    other = [episode("b", "p A x B", 5.0), episode("b", "p B x A", 3.0)]
    together, alone = TurnGroups()(scores_of(*one, *other)), TurnGroups()(scores_of(*one))
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=False))


def test_history_compares_turns_behind_the_same_whole_context_alone() -> None:
    """Both come to x, by different replies; only the second pair by the same one."""
    rollouts = [
        *(episode("a", f"p A x {end}", float(end == "C")) for end in "CD"),
        *(episode("a", f"p B x {end}", float(end == "C")) for end in "CD"),
    ]
    observed, read = (
        TurnGroups(state=state, scale="none")(scores_of(*rollouts)) for state in ("observation", "history")
    )
    assert [a.tolist()[1] for a in observed] == [1.0, -1.0, 1.0, -1.0] == [a.tolist()[1] for a in read]
    rollouts[3] = episode("a", "p B x D", 1.0)  # where B came before, x is worth 1 whatever follows
    observed, read = (
        TurnGroups(state=state, scale="none")(scores_of(*rollouts)) for state in ("observation", "history")
    )
    assert [a.tolist()[1] for a in observed] == [0.5, -1.5, 0.5, 0.5] and [a.tolist()[1] for a in read] == [
        0.25 + 0.5, -0.75 - 0.5, 0.25, 0.25,
    ]  # fmt: skip


def test_states_that_never_recur_leave_grpo_beyond_the_first_turn_which_all_share() -> None:
    rollouts = [episode("a", f"p A {'xyz'[i]} B", float(i == 1)) for i in range(3)]
    scores = scores_of(*rollouts)
    whole = Baselined("group", "group")(scores).tolist()
    found = TurnGroups(weight=0.5)(scores)
    for own, a in zip(found, whole, strict=True):
        assert own.tolist()[1] == pytest.approx(a, abs=1e-6) and own.tolist()[0] == pytest.approx(1.5 * a, abs=1e-5)


def test_turns_that_all_earned_the_same_add_exactly_nothing() -> None:
    rollouts = [episode("a", f"p {a} x B", r) for a, r in (("A", 0.1 + 0.2), ("B", 0.3))]
    assert all(a.tolist() == [0.0, 0.0] for a in TurnGroups()(scores_of(*rollouts)))


def test_a_turn_is_compared_once_for_each_length_of_history_and_longer_ones_weigh_more() -> None:
    """All come to x, the first two behind y: rewards 1, 0, 0, of which the third is one of three, then alone."""
    rollouts = [episode("a", f"p A {w} B x C", r) for w, r in (("y", 1.0), ("y", 0.0), ("z", 0.0))]
    found = TurnHistories(gamma=1.0)(scores_of(*rollouts))

    def over(value: float, among: list[float]) -> float:
        return (value - mean(among)) / (pstdev(among) + EPS)

    three, two = [1.0, 0.0, 0.0], [1.0, 0.0]
    at_x = [(2 * over(r, three) + 3 * over(r, two) + 4 * over(r, two)) / 9 for r in two]
    at_y = [(2 * over(r, two) + 3 * over(r, two)) / 5 for r in two]
    assert found[0].tolist() == pytest.approx([over(1.0, three), at_y[0], at_x[0]], abs=1e-12)
    assert found[1].tolist() == pytest.approx([over(0.0, three), at_y[1], at_x[1]], abs=1e-12)
    assert found[2].tolist() == pytest.approx([over(0.0, three), 0.0, over(0.0, three)], abs=1e-12)


def test_without_earlier_observations_turns_are_those_of_gigpo_less_the_rollout_s_part() -> None:
    rollouts = [episode("a", "p AB x C y D", 1.0), episode("a", "p A x BC", 0.0), episode("a", "p B y C", 0.5)]
    scores = scores_of(*rollouts)
    whole = Baselined("group", "none")(scores)
    found, both = TurnHistories(0, scale="none")(scores), TurnGroups(scale="none")(scores)
    for own, other, a in zip(found, both, whole, strict=True):
        assert own.tolist() == pytest.approx((other - a).tolist(), abs=1e-12)


def test_a_return_that_is_the_mean_of_its_state_does_not_count_whatever_the_rounding() -> None:
    """0.1, 0.2 and 0.3: the second has no advantage among the three, so the longer history alone counts."""
    rollouts = [episode("a", f"p A {w} B x C", r) for w, r in (("y", 0.1), ("y", 0.2), ("z", 0.3))]
    found = TurnHistories(1, gamma=1.0)(scores_of(*rollouts))
    assert found[1].tolist()[2] == pytest.approx((0.2 - 0.15) / (0.05 + EPS), abs=1e-12)


def test_spans_sampled_one_behind_the_other_are_one_turn_and_unscored_ones_none() -> None:
    transcript = Transcript()
    transcript.observe([1, 2])
    transcript.sample(Completion(0, [3, 4], [-1.0, -1.0], "", StopReason.EOS, 0, runs=((1, 0), (1, 1))))
    transcript.observe([5])
    transcript.sample(Completion(0, [6], [-1.0], "", StopReason.EOS, 0), learn=False)
    transcript.observe([5])
    transcript.sample(Completion(0, [7], [-1.0], "", StopReason.EOS, 0))
    first, second = turns([transcript])
    assert (first.before, second.before) == (0, 2) and first.observation != second.observation
    assert first.observation == first.history
    again = turns([transcript, transcript])
    assert [t.before for t in again] == [0, 2, 3, 5] and again[3] == replace(second, before=5)


def test_an_agent_learns_with_it_from_the_command_line_s_options(tmp_path) -> None:  # type: ignore[no-untyped-def]
    shape = DecoderConfig(
        vocab=WORDS.vocab_size, hidden=32, layers=1, heads=2, kv_heads=2, head_size=16, intermediate=32, context=512,
        tied=True,
    )  # fmt: skip
    save_model(new_decoder(shape, 0), tmp_path / "start", WORDS)
    rows = adventure.tasks(4, seed=0, rooms=3)
    run = posttrain.rl(
        rows, "adventure", str(tmp_path / "start"), algorithm="gigpo", out=str(tmp_path / "run"), steps=2, prompts=2,
        group=4, max_tokens=6, max_turns=3, env_workers=0, threads=1, quiet=True,
        settings={"turn_state": "history", "turn_weight": 0.5, "turn_gamma": 0.9, "kl": 0.0},
    )  # fmt: skip
    assert len([m for m in read_metrics(run.path) if "loss" in m]) == 2
