"""Values on their way out of the sandbox: what they become, and what they are equal to."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.sandbox.examiner import change
from posttrain.sandbox.plain_values import NotPlain, decode, encode, equals, named

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
KEYS = SCALARS | st.tuples(SCALARS, SCALARS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=8,
)


def form_of(value: Any) -> Any:
    def refer(value: Any) -> Any:
        raise NotPlain(str(type(value)))

    return json.loads(json.dumps(encode(value, refer)))


def back(form: Any) -> Any:
    def resolve(kind: str, content: Any) -> Any:
        raise NotPlain(kind)

    return decode(form, resolve)


@given(VALUES)
@settings(max_examples=60, deadline=None)
def test_plain_data_comes_back_with_its_types(value: Any) -> None:
    found = back(form_of(value))
    assert (found == value and repr(found) == repr(value)) or isinstance(value, set | dict | list | tuple)
    assert type(found) is type(value)


@given(VALUES, VALUES)
@settings(max_examples=100, deadline=None)
def test_what_came_out_is_compared_as_python_compares(one: Any, other: Any) -> None:
    assert equals(form_of(one), other) == (one == other)
    assert equals(form_of(one), one)


Point = namedtuple("Point", "x y")


class Loud(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        (1, 1.0, True), (True, 1, True), ((1, 2), [1, 2], False), ([1, 2], (1, 2), False), ({1, 2}, {2, 1}, True),
        (frozenset({1}), {1}, True), (Point(1, 2), (1, 2), True), (Counter("aab"), {"a": 2, "b": 1}, True),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}, True), (deque([1]), [1], False), (range(2), [0, 1], False),
        (Decimal("1.5"), 1.5, True), (Fraction(1, 2), 0.5, True), (10**4000, 10**4000, True), (float("inf"), 1e400, True),
        (math.nan, math.nan, False), ({1: 2}.keys(), {1}, True), (Loud(3), 4, False), (Loud(3), 3, True), ("1", 1, False),
        (b"a", "a", False), (None, 0, False), ([], {}, False), ({}, set(), False), (-0.0, 0, True), (1j, 1j, True),
        ({(1, "a"): [None]}, {(1, "a"): [None]}, True), (datetime.date(2020, 1, 1), "2020-01-01", False),
    ],
)  # fmt: skip
def test_values_of_other_kinds_are_what_they_are_derived_from(value: Any, expected: Any, equal: bool) -> None:
    assert equals(form_of(value), expected) is equal


def test_other_types_of_the_library_come_back() -> None:
    now = datetime.datetime(2020, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    for value in (
        Decimal("1.50"), Fraction(-3, 7), range(1, 9, 2), deque([1, 2]), Counter("aab"), OrderedDict(b=1, a=2),
        bytearray(b"a"),
        now, now.date(), now.time(), datetime.timedelta(days=-1, seconds=5), 1 - 2j, 10**30, -(10**30), frozenset({1}),
    ):  # fmt: skip
        assert back(form_of(value)) == value and type(back(form_of(value))) is type(value)


@pytest.mark.parametrize(
    "form",
    [
        {}, {"int": 5}, {"int": "zz"}, {"tuple": 5}, {"set": [[1]]}, {"dict": [1]}, {"dict": [[1]]}, {"ref": 0}, {"no": 1},
        {"name": "builtins.eval"}, {"complex": [1, "a"]}, {"Fraction": ["1", "0"]}, {"range": [1, 2, 0]}, {"a": 1, "b": 2},
        {"date": 5}, {"timedelta": [1e9]}, {"bytes": "x"}, {"Decimal": "x"}, {"range": ["a"]}, {"Counter": [[[], 1]]},
    ],
)  # fmt: skip
def test_forms_that_are_none_are_refused_and_equal_to_nothing(form: Any) -> None:
    with pytest.raises(NotPlain):
        back(form)
    for expected in (0, "", (), [], {}, set(), None):
        assert not equals(form, expected)


def test_much_that_is_not_expected_is_not_looked_at() -> None:
    collide = [k * (2**61 - 1) for k in range(200_000)]  # all have the hash 0: a set of them takes an hour
    assert not equals({"set": collide}, {1, 2}) and not equals({"dict": [[k, 0] for k in collide]}, {1: 2})
    assert not equals({"Fraction": ["1" * 10**6, "3" * 10**6]}, 0.5) and not equals({"Decimal": "1" * 10**6}, 1)


def test_functions_of_python_go_by_their_names_and_others_do_not() -> None:
    assert named(len) == "builtins.len" and named(math.sqrt) == "math.sqrt"
    assert named(os.system) is None and named(lambda: 0) is None


def test_a_value_is_changed_in_place() -> None:
    inner, keyed = [1], {"a": [1]}
    value = [inner, keyed, (inner, 2), {5}]
    change(value, [[1, 2], {"a": [1, 3], "b": 4}, ([1, 2], 2), {6}, "new"])
    assert value == [[1, 2], {"a": [1, 3], "b": 4}, ([1, 2], 2), {6}, "new"] and value[0] is inner and value[1] is keyed
    change(inner, "x")
    assert inner == [1, 2]


KINDS = [
    "int", "tuple", "set", "frozenset", "deque", "dict", "OrderedDict", "Counter", "bytes", "bytearray", "complex",
    "Decimal", "Fraction", "range", "datetime", "date", "time", "timedelta", "ref", "name", "callback", "",
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KINDS), inner, max_size=2),
    max_leaves=8,
)


@given(JSON, VALUES)
@settings(max_examples=300, deadline=None)
def test_whatever_a_program_says_is_equal_or_not_and_raises_nothing(form: Any, expected: Any) -> None:
    if equals(form, expected):
        assert back(form) == expected
