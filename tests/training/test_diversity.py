"""Diversity is what its definitions say, whatever the tokens are called and however the groups are parted."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.batch import Stats
from posttrain.training.sources.diversity import GROUPS, MEMBERS, TOKENS, diversity

REPLY = st.lists(st.integers(0, 5), max_size=8)
GROUP = st.lists(REPLY, min_size=1, max_size=MEMBERS)


def common(a: list[int], b: list[int]) -> int:
    """Length of the longest common subsequence, from its definition."""
    if not a or not b:
        return 0
    if a[-1] == b[-1]:
        return common(a[:-1], b[:-1]) + 1
    return max(common(a[:-1], b), common(a, b[:-1]))


def test_values_are_those_counted_by_hand() -> None:
    found = diversity([[[1, 2, 3], [1, 2, 4, 4]], [[7, 7], [7, 7]]])
    assert found["diversity/distinct_1"] == (4 + 1, 7 + 4)
    assert found["diversity/distinct_2"] == (4 + 1, 5 + 2)  # 12 23 24 44 of 12 23 12 24 44; 77 of 77 77
    total, count = found["diversity/similarity"]
    assert total == pytest.approx(2 * 2 / 7 + 1) and count == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(GROUP, max_size=3))
def test_similarity_is_the_mean_over_pairs_of_a_group(groups: list[list[list[int]]]) -> None:
    pairs = [pair for group in groups for pair in combinations(group, 2)]
    expected = sum(2 * common(a, b) / (len(a) + len(b)) if a or b else 1.0 for a, b in pairs)
    total, count = diversity(groups)["diversity/similarity"]
    assert count == len(pairs) and total == pytest.approx(expected, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(GROUP, max_size=6), st.permutations(range(6)), st.integers(0, 6), st.randoms(use_true_random=False))
def test_neither_names_of_tokens_nor_order_nor_parting_matter(groups, names, cut, generator) -> None:  # type: ignore[no-untyped-def]
    renamed = [[[names[token] + 150_000 for token in reply] for reply in group] for group in groups]
    for group in renamed:
        generator.shuffle(group)
    stats = Stats(diversity(renamed[:cut]))
    stats.merge(diversity(renamed[cut:]))
    for name, (total, count) in diversity(groups).items():
        assert stats[name][0] == pytest.approx(total, abs=1e-9) and stats[name][1] == count


def test_only_the_first_groups_members_and_tokens_are_looked_at() -> None:
    group = [[i, i + 1, i] for i in range(MEMBERS)]
    assert diversity([group] * GROUPS) == diversity([[*group, [1]]] * GROUPS + [[[1, 2, 3]]])
    long = [[1] * TOKENS, [2] * TOKENS]
    assert diversity([long]) == diversity([[[*reply, 3] for reply in long]])


def test_the_same_reply_every_time_is_wholly_similar_and_different_ones_are_not() -> None:
    same = Stats(diversity([[list(range(20))] * 8] * 4)).means()
    different = Stats(diversity([[list(range(20 * i, 20 * i + 20)) for i in range(8)]] * 4)).means()
    assert same == {"diversity/distinct_1": 1 / 8, "diversity/distinct_2": 1 / 8, "diversity/similarity": 1.0}
    assert different == {"diversity/distinct_1": 1.0, "diversity/distinct_2": 1.0, "diversity/similarity": 0.0}


@pytest.mark.parametrize("groups", [[], [[]], [[[]]], [[[1]]]])
def test_what_cannot_be_said_has_a_count_of_zero(groups: list[list[list[int]]]) -> None:
    found = diversity(groups)
    assert found["diversity/similarity"] == (0.0, 0.0) and found["diversity/distinct_2"] == (0.0, 0.0)
    assert "diversity/similarity" not in Stats(found).means()


def test_only_the_first_tokens_of_a_reply_the_first_replies_of_a_group_and_the_first_groups_are_looked_at() -> None:
    first = list(range(TOKENS))
    seen = diversity([[first, [*first, 7, 7, 7]]])
    assert seen["diversity/similarity"] == (1.0, 1.0)
    assert seen["diversity/distinct_1"] == (TOKENS, 2 * TOKENS)
    assert seen["diversity/distinct_2"] == (TOKENS - 1, 2 * (TOKENS - 1))
    other = [*first[:-1], -1]
    assert diversity([[first, other]])["diversity/distinct_1"] == (TOKENS + 1, 2 * TOKENS)
    assert diversity([[[i] for i in range(MEMBERS + 3)]])["diversity/distinct_1"] == (MEMBERS, MEMBERS)
    assert diversity([[[1], [2]]] * (GROUPS + 3))["diversity/similarity"] == (0.0, GROUPS)
