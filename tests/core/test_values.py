"""What each rollout has several of: seeds, values that are never changed, and a transcript's own count of its tokens."""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import replace

import pytest

from posttrain.core.batch import Stats
from posttrain.core.seeds import seed_of, seeds_of
from posttrain.core.transcripts import Media, Span, SpanKind, Transcript
from posttrain.core.types import Completion, Sampling, StopReason, Turn
from posttrain.envs.demonstration import last_alone


@pytest.mark.parametrize("count", [0, 1, 12])
def test_the_seeds_of_a_group_are_those_of_its_members(count: int) -> None:
    named = 7, "rollout", 3, "1+2#0"
    assert seeds_of(*named, count=count) == [seed_of(*named, member) for member in range(count)]


@pytest.mark.parametrize("value", [Turn("a", stop=(".",)), Sampling(seed=3), Span(SpanKind.SAMPLED, 1, 2, True, 4)])
def test_values_are_equal_by_what_they_hold_and_travel(value: object) -> None:
    assert value == deepcopy(value) == pickle.loads(pickle.dumps(value))
    assert hash(value) == hash(deepcopy(value)) and value != replace(value, **{_second(value): 9})  # type: ignore[type-var]
    assert not hasattr(value, "__dict__"), "a value is small, and quick to make"


def test_every_field_of_a_completion_travels() -> None:
    whole = Completion(7, [3, 4], [-1.0, -2.0], "ab", StopReason.STOP, 5, None, ((1, 4), (1, 5)), None)
    assert whole == pickle.loads(pickle.dumps(whole)) == deepcopy(whole)
    given = [getattr(whole, name) for name in Completion.__match_args__]  # type: ignore[attr-defined]
    assert whole.__reduce__() == (Completion, tuple(given))


@pytest.mark.parametrize("name", ["reward", "reward/max", "reward/min"])
@pytest.mark.parametrize("values", [[], [0.1, 0.2, 0.3, -1e9, 1e-9], [True, False]])
def test_many_values_of_a_metric_add_up_to_the_bits_of_one_after_the_other(name: str, values: list[float]) -> None:
    together, alone = Stats({"reward": (0.7, 3.0)}), Stats({"reward": (0.7, 3.0)})
    together.add_each(name, values)
    for value in values:
        alone.add(name, value)
    assert together == alone


def _second(value: object) -> str:
    return str(type(value).__match_args__[1])  # type: ignore[attr-defined]


def test_a_transcript_counts_the_scored_tokens_of_its_spans_however_it_was_made() -> None:
    whole = Transcript()
    whole.observe([1, 2])
    whole.sample(Completion(0, [3, 4, 5], [-1.0, -2.0, -3.0], "abc", StopReason.EOS, 1))
    whole.observe([6])
    whole.sample(Completion(0, [7], [-1.0], "d", StopReason.EOS, 1), learn=False)
    whole.imitate([8, 9])
    made = [whole, whole.branch(), whole.with_prompt([0]), Transcript.from_dict(whole.as_dict())]
    for transcript in (*made, last_alone(whole.branch()), last_alone(whole.branch(), without=[9])):
        assert transcript.n_scored == sum(span.length for span in transcript.spans if span.learned) > 0
        assert transcript.n_scored == len(transcript.scored)


def test_pictures_behind_another_prompt_stand_at_the_same_tokens_and_those_of_the_first_prompt_are_gone() -> None:
    seen = Transcript()
    seen.observe([1, 9, 2], media=[Media(1, 1, "aa")])
    seen.observe([9, 9, 3], SpanKind.OBSERVATION, [Media(3, 2, "bb")])  # the first token behind the prompt
    seen.imitate([4])
    seen.observe([5, 9], SpanKind.TOOL, [Media(8, 1, "cc")])
    other = seen.with_prompt([7])
    assert other.media == [Media(1, 2, "bb"), Media(6, 1, "cc")]
    assert [other.tokens[m.start : m.start + m.length] for m in other.media] == [[9, 9], [9]]


def test_the_engines_log_probabilities_are_those_of_scored_tokens_and_of_no_imitated_ones() -> None:
    alone, mixed = Transcript(), Transcript()
    alone.observe([1])
    alone.sample(Completion(0, [2, 3], [-0.5, -0.25], "ab", StopReason.EOS, 1))
    mixed.sample(Completion(0, [2, 3], [-0.5, -0.25], "ab", StopReason.EOS, 1), learn=False)
    assert alone.sampler_logp is not None and alone.sampler_logp.tolist() == [-0.5, -0.25]
    assert mixed.sampler_logp is not None and mixed.sampler_logp.tolist() == []
    mixed.imitate([4, 5])
    assert mixed.sampler_logp is None
