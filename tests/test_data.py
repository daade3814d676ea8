"""Tasks, ids, splits and orders: what is found, what is refused, and that nothing depends on how the rows are read."""

from __future__ import annotations

import random
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_files import ROWS, refused, write_jsonl, write_parquet

from posttrain.data.rows import load_rows
from posttrain.data.tasks import hold_out, order, to_tasks
from posttrain.types import UserError

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data files are not at {DATA}")

# From rows to tasks


def test_fields_rename_and_keep_the_other_columns(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"id": 7, "question": "1+1", "final": "2", "answer": "1+1=2", "level": 3}]
    )
    [task] = to_tasks(load_rows(path), fields={"prompt": "question", "answer": "final"})
    assert task == {"id": "7", "prompt": "1+1", "answer": "2", "level": 3}


def test_unknown_column_is_refused_with_place_columns_and_suggestion(tmp_path: Path) -> None:
    rows = load_rows(write_jsonl(tmp_path / "a.jsonl", ROWS))
    expected = ("a.jsonl:1", "no column 'quesion'", "did you mean 'question'?", "question, answer")
    refused(lambda: to_tasks(rows, fields={"prompt": "quesion"}), *expected)
    refused(lambda: to_tasks(rows, prompt_template="Q: {quesion}"), *expected, "prompt_template")
    refused(lambda: to_tasks(rows, convert=lambda row: {"prompt": row["quesion"]}), *expected)


def test_templates_fill_whole_columns_and_leave_braces_in_data_alone() -> None:
    row = {"q": "f(x) = {x} {0.real}", "n": 3, "a.b": "dotted", "a": "A"}
    [task] = to_tasks(
        [row], prompt_template="{{Q}} {q} {n} {a.b}\nA:", response_template=" {a}", need=("prompt", "response")
    )
    assert task["prompt"] == "{Q} f(x) = {x} {0.real} 3 dotted\nA:"
    assert task["response"] == " A"
    assert task["q"] == row["q"]


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("{q.__class__}", ("no column 'q.__class__'",)),
        ("{q[0]}", ("no column 'q[0]'",)),
        ("{}", ("no column ''",)),
        ("{q!r}", ("no format or conversion", "{q}")),
        ("{q:>{n}}", ("no format or conversion", "{q}")),
        ("{q", ("prompt_template", "expected '}'")),
        ("q}", ("prompt_template", "Single '}'")),
        ("{tags}", ("row 1", "'tags' holds a list")),
        ("{nothing}", ("row 1", "'nothing' holds a NoneType")),
    ],
)
def test_template_takes_nothing_but_columns_of_text(template: str, parts: tuple[str, ...]) -> None:
    rows = [{"q": "1+1", "n": 3, "tags": ["a"], "nothing": None}]
    refused(lambda: to_tasks(rows, prompt_template=template), *parts)


def test_convert_may_leave_rows_out_and_its_failures_name_the_row(tmp_path: Path) -> None:
    rows = load_rows(write_jsonl(tmp_path / "a.jsonl", ROWS))

    def only_two(row: dict[str, Any]) -> dict[str, Any] | None:
        return {"prompt": row["question"], "answer": 2} if row["answer"] == "2" else None

    tasks = to_tasks(rows, convert=only_two)
    assert [task["prompt"] for task in tasks] == [ROWS[0]["question"], ROWS[2]["question"]]
    assert (tasks.left_out, tasks.merged) == (1, 0)
    refused(lambda: to_tasks(rows, convert=lambda row: None), "3 of 3 rows were left out")
    refused(lambda: to_tasks(rows, convert=lambda row: {"prompt": 1 // 0}), "a.jsonl:1", "ZeroDivisionError")
    refused(lambda: to_tasks(rows, convert=lambda row: row["answer"]), "a.jsonl:1", "returned a str")
    assert list(rows) == ROWS  # the rows themselves are never changed


USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
RL, SFT = ("prompt",), ("prompt", "response")


@pytest.mark.parametrize(
    ("row", "need", "kept"),
    [
        ({"prompt": "hi"}, RL, "prompt"),
        ({"messages": [USER]}, RL, "messages"),
        ({"prompt": [USER]}, RL, "messages"),
        ({"prompt": "hi", "response": "hello"}, SFT, "prompt"),
        ({"messages": [USER, ASSISTANT]}, SFT, "messages"),
        ({"prompt": "hi", "messages": [USER, ASSISTANT]}, RL, "prompt"),
        ({"prompt": "hi", "messages": [USER, ASSISTANT]}, SFT, "messages"),
        ({"prompt": None, "messages": [USER, ASSISTANT]}, SFT, "messages"),
        ({"prompt": "hi", "messages": None}, RL, "prompt"),
        ({"prompt": "hi", "messages": [USER]}, ("messages",), "messages"),
        ({"messages": [USER], "chosen": "a", "rejected": "b"}, ("prompt", "chosen", "rejected"), "messages"),
    ],
)
def test_a_task_has_exactly_one_prompt_and_it_meets_the_need(
    row: dict[str, Any], need: tuple[str, ...], kept: str
) -> None:
    [task] = to_tasks([row], need=need)
    assert {"prompt", "messages"} & task.keys() == {kept}


def test_environments_that_write_their_own_prompt_need_none() -> None:
    [task] = to_tasks([{"question": "who?", "answers": ["me"]}], need=("question",))
    assert {"prompt", "messages"}.isdisjoint(task)
    refused(lambda: to_tasks([{"question": ""}], need=("question",)), "no question")


@pytest.mark.parametrize(
    ("row", "need", "parts"),
    [
        ({"question": "hi", "answer": "x"}, RL, ("no prompt", "question, answer", "--fields.prompt")),
        ({"prompt": " \n"}, RL, ("prompt is empty",)),
        ({"prompt": 12}, RL, ("prompt must be text", "int")),
        ({"prompt": "half \ud83d"}, RL, ("surrogate",)),
        ({"prompt": "hi", "response": ""}, SFT, ("no response", "prompt")),
        ({"prompt": "hi", "response": 3}, SFT, ("response must be text", "int")),
        ({"prompt": "hi", "answer": None}, ("prompt", "answer"), ("no answer",)),
        ({"messages": [USER], "answer": ""}, ("prompt", "answer"), ("no answer",)),
        ({"messages": [USER]}, SFT, ("end with the assistant turn",)),
        ({"messages": [USER, ASSISTANT]}, RL, ("end with an assistant turn",)),
        ({"messages": []}, RL, ("messages must be a list",)),
        ({"messages": "hi"}, RL, ("messages must be a list",)),
        ({"messages": ["hi"]}, RL, ("message 1", '"role" and "content"')),
        ({"messages": [{"from": "human", "value": "hi"}]}, RL, ("message 1", '"role" and "content"')),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, RL, ("message 2", "'bot' is not one of")),
        ({"messages": [{"role": ["user"], "content": "x"}]}, RL, ("message 1", "is not one of")),
        ({"messages": [{"role": "user", "content": None}]}, RL, ("message 1", "content must be text")),
        ({"id": 1.5, "prompt": "hi"}, RL, ("id must be text or a whole number",)),
    ],
)
def test_row_that_is_no_task_is_refused_with_its_place(
    tmp_path: Path, row: dict[str, Any], need: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    good = {"prompt": "ok", "response": "ok", "answer": "ok"}
    rows = load_rows(write_jsonl(tmp_path / "a.jsonl", [good, row]))
    refused(lambda: to_tasks(rows, need=need), "a.jsonl:2", *parts)


def test_nulls_that_table_formats_put_into_messages_are_dropped(tmp_path: Path) -> None:
    messages = [USER, {**ASSISTANT, "name": "Bo"}]
    [task] = to_tasks(load_rows(write_parquet(tmp_path / "a.parquet", [{"messages": messages}])), need=SFT)
    assert task["messages"] == messages


# Ids


def test_own_ids_must_be_unique_and_both_rows_are_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": 1, "prompt": "a"}, {"id": "b", "prompt": "b"}])
    assert [task["id"] for task in to_tasks(load_rows(path))] == ["1", "b"]
    write_jsonl(path, [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b"}, {"id": "1", "prompt": "c"}])
    refused(lambda: to_tasks(load_rows(path)), "a.jsonl:3: id '1'", "a.jsonl:1")


def test_rows_without_id_get_one_from_their_columns_and_repetitions_are_kept_once() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "response": "1"},
        {"response": "1", "prompt": "a", "id": None},  # the same columns in another order
        {"prompt": "a", "response": "2"},
        {"prompt": "b", "day": date(2020, 1, 1)},
    ]
    tasks = to_tasks(rows)
    assert len(tasks) == len({task["id"] for task in tasks}) == 3 and tasks.merged == 1
    assert {task["id"] for task in to_tasks(rows[::-1])} == {task["id"] for task in tasks}
    assert tasks[0]["id"] == "08e037beea17b933"  # stable between processes and versions
    taken = [{"prompt": "z", "id": tasks[0]["id"]}, rows[0]]
    refused(lambda: to_tasks(taken), "row 2: id", "row 1")  # an own id is never merged with a hash
    refused(lambda: to_tasks([{"prompt": "a", "x": object()}]), "row 1", "give the rows an id")


# Splits and orders

PROMPTS = st.lists(st.text(min_size=1, max_size=6), min_size=12, max_size=40, unique=True)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(prompts=PROMPTS, cut=st.integers(6, 11), seed=st.integers(-5, 5), rng=st.randoms(use_true_random=False))
def test_split_is_invariant_under_order_and_growth(prompts: list[str], cut: int, seed: int, rng: random.Random) -> None:
    tasks = [{"id": str(number), "prompt": prompt} for number, prompt in enumerate(prompts)]

    def sides(tasks: list[dict[str, Any]], fraction: float = 0.5) -> tuple[set[str], set[str]]:
        try:
            train, held_out = hold_out(tasks, fraction, seed)
        except UserError:  # by chance all on one side
            return set(), set()
        assert [task for task in tasks if task in train] == train
        return {task["prompt"] for task in train}, {task["prompt"] for task in held_out}

    train, held_out = sides(tasks)
    assert train | held_out in (set(), set(prompts)) and not train & held_out
    assert sides(rng.sample(tasks, len(tasks))) == (train, held_out)
    if train:
        few_train, few_held_out = sides(tasks[:cut])
        assert few_train <= train and few_held_out <= held_out
        assert sides(tasks, 0.2)[1] <= held_out


def test_equal_prompts_are_never_on_both_sides() -> None:
    tasks = [{"id": f"{copy}-{n}", "prompt": f"question {n}"} for copy in range(3) for n in range(100)]
    train, held_out = hold_out(tasks, 0.3, seed=1)
    assert {task["prompt"] for task in train}.isdisjoint(task["prompt"] for task in held_out)
    ask = [{"role": "user", "content": "q"}]
    other = [{"id": str(n), "messages": [{"role": "user", "content": str(n)}]} for n in range(50)]
    pair = [{"id": a, "messages": [*ask, {"role": "assistant", "content": a}]} for a in ("yes", "no")]
    sides = hold_out([*other, *pair, {"id": "open", "messages": ask}], 0.5, seed=0)
    assert sorted(sum(task.get("messages", [])[:1] == ask for task in side) for side in sides) == [0, 3]


def test_held_out_share_is_near_the_fraction_and_depends_on_the_seed() -> None:
    tasks = [{"id": str(n), "question": f"question {n}"} for n in range(4000)]  # no prompt: told apart by id
    splits = [hold_out(tasks, 0.2, seed)[1] for seed in range(5)]
    for held_out in splits:
        assert abs(len(held_out) / 4000 - 0.2) < 4 * (0.2 * 0.8 / 4000) ** 0.5
    assert len({tuple(task["id"] for task in held_out) for held_out in splits}) == 5


def test_split_with_an_empty_side_is_refused() -> None:
    tasks = [{"id": "1", "prompt": "a"}, {"id": "2", "prompt": "b"}]
    refused(lambda: hold_out(tasks, 1e-9), "none of the 2 tasks is held out")
    refused(lambda: hold_out(tasks, 1 - 1e-9), "left to train on")
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        refused(lambda fraction=fraction: hold_out(tasks, fraction), "between 0 and 1")  # type: ignore[misc]


def test_order_is_a_permutation_of_its_own_for_every_epoch_and_seed() -> None:
    import numpy as np

    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    orders = [tuple(order(50, epoch, seed)) for epoch in range(4) for seed in (-1, 0, 1, 2**63)]
    assert all(sorted(visits) == list(range(50)) for visits in orders) and len(set(orders)) == len(orders)
    assert list(order(8, 0, 0)) == list(order(8, 0, 0)) == [0, 2, 1, 5, 4, 3, 6, 7]  # stable between versions
    assert list(order(0, 0, 0)) == []
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]


# The real files


@needs_data
def test_real_word_problems_keep_their_ids() -> None:
    tasks = to_tasks(load_rows(DATA / "wordproblems", split="train"), fields={"prompt": "question"})
    assert len(tasks) == 1488 and tasks[0]["id"] == "multiarith-1" and tasks[0]["answer"] == "39"
    assert len(to_tasks(load_rows(DATA / "wordproblems", split="svamp"), fields={"prompt": "question"})) == 1000


@needs_data
def test_real_gsm8k_and_math_become_tasks_and_split() -> None:
    template = "Question: {question}\nAnswer:"
    tasks = to_tasks(load_rows(DATA / "gsm8k" / "train.jsonl"), prompt_template=template)
    assert len(tasks) == 7473 and tasks.merged == 0
    assert tasks[0]["prompt"].startswith("Question: Natalia sold") and tasks[0]["prompt"].endswith("\nAnswer:")
    train, held_out = hold_out(tasks, 0.1, seed=0)
    assert len(train) + len(held_out) == 7473 and 650 < len(held_out) < 850
    tasks = to_tasks(load_rows(DATA / "math"), prompt_template="{problem}", response_template="{solution}", need=SFT)
    assert len(tasks) == 4066


@needs_data
def test_real_instructions_keep_every_response_of_a_repeated_prompt_on_one_side() -> None:
    tasks = to_tasks(load_rows(DATA / "sft" / "instructions.jsonl"), need=SFT)
    assert len(tasks) == len({task["id"] for task in tasks}) == 1100
    assert len({task["prompt"] for task in tasks}) == 1075
    train, held_out = hold_out(tasks, 0.2, seed=3)
    assert {task["prompt"] for task in train}.isdisjoint(task["prompt"] for task in held_out)


def test_reading_data_imports_no_torch() -> None:
    import subprocess

    code = "import sys, posttrain.data.tasks as t; t.to_tasks([{'prompt': 'a'}]); sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
