"""A name of `--fields` that is nearly a column's is told, and any other is left to the reward that reads it."""

import pytest

from posttrain.training.row_warnings import warn_near_names


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("promt", "prompt"), ("reponse", "response"), ("choosen", "chosen"), ("anwser", "answer"),
        ("prompt", ""), ("prompts", "prompt"), ("answers", ""), ("ground_truth", ""), ("prompt_text", ""), ("question", ""),
    ],
)  # fmt: skip
def test_a_mistyped_column_is_answered_with_the_column(name: str, meant: str) -> None:
    told: list[str] = []
    warn_near_names({name: "x"}, told.append)
    assert told == (
        [f"--fields.{name} x: only your own code reads {name!r}; did you mean --fields.{meant}?"] if meant else []
    )
