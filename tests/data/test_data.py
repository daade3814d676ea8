"""Tasks, ids, splits and orders: what is found, what is refused, and that nothing depends on how the rows are read."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import DATA, ROOT
from row_files import ROWS, refused, write_jsonl, write_parquet

from posttrain.core.types import Task, UserError
from posttrain.data.rows import load_rows
from posttrain.data.tasks import ENDLESS, Stream, draw, hold_out, order, to_tasks
from posttrain.data.tasks_from_rows import Conversion
from posttrain.envs.builtin import gsm8k
from posttrain.envs.play.load_env import opening

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data files are not at {DATA}")

# From rows to tasks


def test_fields_rename_and_keep_the_other_columns(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"id": 7, "question": "1+1", "final": "2", "answer": "1+1=2", "level": 3}]
    )
    [task] = to_tasks(load_rows(path), fields={"prompt": "question", "answer": "final"})
    assert task == {"id": "7", "prompt": "1+1", "question": "1+1", "answer": "2", "final": "2", "level": 3}


def test_a_columns_old_name_stays_and_changes_no_id() -> None:
    rows = [{"question": "1+1", "final": "2"}, {"question": "2+2", "final": "4"}, {"question": "1+1", "final": "2"}]
    fields = {"prompt": "question", "answer": "final"}
    plain = to_tasks([{"prompt": r["question"], "answer": r["final"]} for r in rows])
    for limited in (rows, [*rows, {"question": "3", "final": [3]}]):  # by columns, and one by one
        tasks = to_tasks(limited, fields=fields)
        assert [t["id"] for t in tasks][:2] == [t["id"] for t in plain] and tasks.merged == 1
        assert tasks[0]["final"] == tasks[0]["answer"] == "2"
    [swapped] = to_tasks([{"response": "p", "prompt": "r"}], fields={"prompt": "response", "response": "prompt"})
    assert (swapped["prompt"], swapped["response"]) == ("p", "r")
    [one] = to_tasks([{"q": "p", "completion": "r"}], fields={"prompt": "completion", "response": "q"})
    assert one.keys() == {"id", "prompt", "response", "q"}  # what is read stands under one name only


def test_unknown_column_is_refused_with_place_columns_and_suggestion(tmp_path: Path) -> None:
    rows = load_rows(write_jsonl(tmp_path / "a.jsonl", ROWS))
    expected = ("a.jsonl:1", "no column 'quesion'", "did you mean 'question'?", "question, answer")
    refused(lambda: to_tasks(rows, fields={"prompt": "quesion"}), *expected)
    refused(lambda: to_tasks(rows, prompt_template="Q: {quesion}"), *expected, "prompt_template")
    refused(lambda: to_tasks(rows, convert=lambda row: {"prompt": row["quesion"]}), *expected)


def test_converter_finds_renamed_columns_under_both_names() -> None:
    row = {"question": "1+1", "final": "2", "answer": "because"}
    seen: list[dict[str, Any]] = []
    [task] = to_tasks(
        [row], fields={"prompt": "question", "answer": "final"}, convert=lambda row: seen.append(row) or {**row}
    )
    assert seen[0] == {"prompt": "1+1", "question": "1+1", "final": "2", "answer": "2"}
    assert task["prompt"] == "1+1" and task["answer"] == "2"
    rows = [{"question": "Tom has 3 and 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}]
    [plain], [renamed] = (to_tasks(rows, fields=f, convert=gsm8k.row_to_task) for f in ({}, {"prompt": "question"}))
    assert plain == renamed and plain["answer"] == "7"


def test_fields_reach_into_a_column() -> None:
    rows = [{"prompt": f"{n}+0=", "reward_model": {"style": "rule", "ground_truth": str(n)}} for n in range(3)]
    tasks = to_tasks(rows, fields={"answer": "reward_model.ground_truth"})
    assert [task["answer"] for task in tasks] == ["0", "1", "2"] and tasks[0]["reward_model"] == rows[0]["reward_model"]
    expected = "no 'reward_model.truth'; reward_model holds: style, ground_truth"
    refused(lambda: to_tasks(rows, fields={"answer": "reward_model.truth"}), expected)
    [dotted] = to_tasks([{"the.prompt": "p"}], fields={"prompt": "the.prompt"})
    assert dotted["prompt"] == "p"


def test_columns_that_a_command_line_must_quote_are_quoted() -> None:
    refused(
        lambda: to_tasks([{"The Question": "?", "level": 1}]), "the row has: 'The Question', level; name its column"
    )


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
    with_key = to_tasks(rows, convert=lambda row: {"prompt": row.pop("question"), **row})
    assert [task["prompt"] for task in with_key] == [row["question"] for row in ROWS] == [t["prompt"] for t in with_key]
    assert list(rows) == ROWS  # the rows themselves are never changed


def test_rows_without_a_demonstration_are_left_out_where_one_is_needed() -> None:
    def converted(row: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": row["q"]} | ({"response": row["a"]} if row["a"] else {})

    rows = [{"q": "1", "a": "x"}, {"q": "2", "a": None}]
    assert len(to_tasks(rows, convert=converted)) == 2
    tasks = to_tasks(rows, convert=converted, need=SFT)
    assert [task["prompt"] for task in tasks] == ["1"] and tasks.left_out == 1


def test_converter_that_changes_its_mind_is_told() -> None:
    calls: list[int] = []

    def moody(row: dict[str, Any]) -> dict[str, Any] | None:
        calls.append(1)
        return row if len(calls) == 1 else None

    tasks = to_tasks([{"prompt": "a"}], convert=moody)
    refused(lambda: tasks[0], "row 1", "depend only on the row")


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


@pytest.mark.parametrize(
    ("row", "task", "said"),
    [
        ({"prompt": "hi", "completion": "hello"}, {"prompt": "hi", "response": "hello"}, "response from 'completion'"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, {"messages": [USER, ASSISTANT]}, "'prompt' and 'completion'"),
        ({"prompt": [USER], "completion": "hello"}, {"messages": [USER, ASSISTANT]}, "'prompt' and 'completion'"),
        ({"prompt": [USER], "response": "hello"}, {"messages": [USER, ASSISTANT]}, "'prompt' and 'response'"),
        ({"prompt": "hi", "response": "a", "completion": "b"},
         {"prompt": "hi", "response": "a", "completion": "b"}, "response from 'response'"),
        ({"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT]}, "messages from 'messages'"),
    ],
)  # fmt: skip
def test_prompt_and_completion_are_a_demonstration_as_text_and_as_messages(
    row: dict[str, Any], task: dict[str, Any], said: str
) -> None:
    tasks = to_tasks([row], need=SFT)
    assert {key: value for key, value in tasks[0].items() if key != "id"} == task
    assert said in tasks.taken()


def test_what_was_taken_for_what_is_told() -> None:
    row = {"question": "q", "reply": "r", "answer": "a"}
    assert to_tasks([row], fields={"prompt": "question"}).taken() == "prompt from 'question'"
    named = to_tasks([row], prompt_template="{question}:", fields={"response": "reply"}, need=SFT)
    assert named.taken() == "prompt from 'prompt_template', response from 'reply'"
    assert to_tasks([row], need=()).taken() == "the environment makes the prompts"
    assert to_tasks([{"prompt": [USER]}]).taken() == "messages from 'prompt'"
    assert to_tasks([row], convert=lambda row: {"prompt": "x"}).taken() == "<lambda> makes the tasks"
    compared: Any = {"convert": lambda row: {"prompt": "x"}, "left_out": "ties"}
    assert to_tasks([row], **compared).taken() == "of columns 'question', 'reply', 'answer'"
    told = to_tasks([row], **compared, fields={"prompt": "question", "chosen": "answer"}).taken()
    assert told == "prompt from 'question', chosen from 'answer', other columns 'reply'"


def test_a_conversation_named_as_the_response_is_answered_with_its_column() -> None:
    rows = [{"prompt": "hi", "chosen": [USER, ASSISTANT]}]
    refused(lambda: to_tasks(rows, fields={"response": "chosen"}, need=SFT), "--fields.messages chosen imitates it")
    [task] = to_tasks(rows, fields={"messages": "chosen"}, need=SFT)
    assert task["messages"] == [USER, ASSISTANT]


def test_environments_that_write_their_own_prompt_need_none() -> None:
    [task] = to_tasks([{"question": "who?", "answers": ["me"]}], need=("question",))
    assert {"prompt", "messages"}.isdisjoint(task)
    refused(lambda: to_tasks([{"question": ""}], need=("question",)), "no question")


@pytest.mark.parametrize(
    ("row", "need", "parts"),
    [
        ({"question": "hi", "answer": "x"}, RL, ("no prompt", "question, answer", "--fields.prompt")),
        ({"prompt": " \n"}, RL, ("prompt is empty",)),
        ({"prompt": 12}, RL, ("prompt must be text, and is 12 (int); put it in quotes",)),
        ({"prompt": "half \ud83d"}, RL, ("surrogate",)),
        ({"prompt": "hi", "response": ""}, SFT, ("no response", "prompt")),
        ({"prompt": "hi", "response": 3}, SFT, ("response must be text, and is 3 (int)",)),
        ({"prompt": "hi", "response": [ASSISTANT]}, SFT, ("response holds messages", "make both text")),
        ({"response": [USER, ASSISTANT]}, SFT, ("whole conversation: --fields.messages response imitates it",)),
        ({"prompt": "hi", "answer": None}, ("prompt", "answer"), ("no answer",)),
        ({"messages": [USER], "answer": ""}, ("prompt", "answer"), ("no answer",)),
        ({"messages": [USER]}, SFT, ("end with the assistant turn",)),
        ({"prompt": [USER], "completion": [USER]}, SFT, ("end with the assistant turn",)),
        ({"prompt": "hi", "completion": [ASSISTANT]}, SFT, ("completion holds messages", "make both text")),
        ({"messages": [USER, ASSISTANT]}, RL, ("end with an assistant turn",)),
        ({"messages": []}, RL, ("messages must be a list",)),
        ({"messages": "hi"}, RL, ("messages must be a list",)),
        ({"messages": ["hi"]}, RL, ("message 1", '"role" and "content"')),
        ({"messages": [{"from": "human", "text": "hi"}]}, RL, ("message 1", '"role" and "content"')),
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
    for order_of_them in (taken, taken[::-1]):  # an own id is never merged with a hash
        refused(lambda order_of_them=order_of_them: to_tasks(order_of_them), "row 2: id", "row 1")  # type: ignore[misc]
    refused(lambda: to_tasks([{"prompt": "a", "x": object()}]), "row 1", "give the rows an id")


TEXTS = st.sampled_from(["a", "1", " ", "", "half \ud83d", "é", "null", "true"])
VALUES = st.one_of(TEXTS, st.integers(0, 1), st.sampled_from([1.0, -0.0, True, None, [1, {"b": 1}]]))
COLUMNS = st.sampled_from(["prompt", "messages", "x", "y", "id"])
SOME_ROWS = st.one_of(
    st.dictionaries(COLUMNS, VALUES, max_size=3),
    st.fixed_dictionaries({"prompt": TEXTS, "x": VALUES}),
    st.fixed_dictionaries({"prompt": st.sampled_from("ab"), "x": st.sampled_from([1, "1", 1.0, None, "null"])}),
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    rows=st.lists(SOME_ROWS, min_size=1, max_size=3).flatmap(
        lambda pool: st.lists(st.sampled_from(pool), min_size=1, max_size=7)
    ),
    block=st.integers(1, 3),
    fields=st.sampled_from([{}, {"prompt": "x"}, {"x": "prompt"}, {"id": "x"}]),
    need=st.sampled_from([(), ("prompt",), ("prompt", "x")]),
)
def test_rows_seen_as_columns_give_what_rows_seen_one_by_one_give(
    rows: list[dict[str, Any]], block: int, fields: dict[str, str], need: tuple[str, ...]
) -> None:
    """Columns are the quick way for rows that are tasks as they stand."""

    def found(quick: bool) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("posttrain.data.rows.BLOCK", block)
            if not quick:
                patch.setattr(Conversion, "plain", lambda self, rows: None)
            try:
                tasks = to_tasks(rows, fields=fields, need=need, split_seed=3)
            except UserError as error:
                return str(error)
        assert tasks.draws is not None
        return list(tasks), tasks.at.tolist(), tasks.merged, tasks.draws[1].tolist()

    assert found(True) == found(False)


def independent(value: Any) -> str:
    """64 bits of BLAKE2b over canonical JSON, in hexadecimal: what ids are made of, and what is held out."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def test_ids_and_held_out_tasks_follow_from_hashes_alone() -> None:
    rows = [{"prompt": f"é{n}", "response": str(n % 7), "n": n} for n in range(300)]
    rows += [{"messages": [{"role": "user", "content": str(n)}], "x": None} for n in range(300)]
    tasks = to_tasks(rows, need=())
    assert [task["id"] for task in tasks] == [independent(row) for row in rows]
    for given_before in (None, 5, 6):
        _, held_out = hold_out(to_tasks(rows, need=(), split_seed=given_before), 0.3, 5)
        chosen = [row for row in rows if int(independent([5, row.get("prompt") or row["messages"]]), 16) < 0.3 * 2**64]
        assert [task["id"] for task in held_out] == [independent(row) for row in chosen]


def test_tasks_are_the_same_one_by_one_in_order_and_in_part() -> None:
    rows = [{"prompt": str(n % 40)} if n % 3 else {"prompt": f"no {n}"} for n in range(60)]
    tasks = to_tasks(rows, convert=lambda row: None if row["prompt"] == "1" else row)
    every = [tasks[place] for place in range(len(tasks))]
    assert list(tasks) == every and list(tasks[3:9]) == every[3:9] and list(tasks[50:51]) == every[50:51]
    assert list(tasks.some(np.array([0, 7, 30]))) == [every[0], every[7], every[30]]
    assert tasks.merged == 60 - tasks.left_out - len(tasks) > 0
    known = to_tasks(rows, split_seed=0)
    for part in (known, known[7:40]):
        sides = hold_out(part, 0.4, 0)
        assert list(map(list, sides)) == list(map(list, hold_out(to_tasks(list(part)), 0.4, 0)))


# Splits and orders

PROMPTS = st.lists(st.text(min_size=1, max_size=6), min_size=12, max_size=40, unique=True)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(prompts=PROMPTS, cut=st.integers(6, 11), seed=st.integers(-5, 5), rng=st.randoms(use_true_random=False))
def test_split_is_invariant_under_order_and_growth(prompts: list[str], cut: int, seed: int, rng: random.Random) -> None:
    tasks = [{"id": str(number), "prompt": prompt.replace("\0", ".") + "?"} for number, prompt in enumerate(prompts)]
    prompts = [task["prompt"] for task in tasks]

    def sides(tasks: list[dict[str, Any]], fraction: float = 0.5) -> tuple[set[str], set[str]]:
        try:
            train, held_out = hold_out(to_tasks(tasks), fraction, seed)
        except UserError:  # by chance all on one side
            return set(), set()
        assert [task for task in tasks if task in train] == list(train)
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
    train, held_out = hold_out(to_tasks(tasks), 0.3, seed=1)
    assert {task["prompt"] for task in train}.isdisjoint(task["prompt"] for task in held_out)
    ask = [{"role": "user", "content": "q"}]
    other = [{"id": str(n), "messages": [{"role": "user", "content": str(n)}]} for n in range(50)]
    pair = [{"id": a, "messages": [*ask, {"role": "assistant", "content": a}]} for a in ("yes", "no")]
    sides = hold_out(to_tasks([*other, *pair, {"id": "open", "messages": ask}], need=()), 0.5, seed=0)
    assert sorted(sum(task.get("messages", [])[:1] == ask for task in side) for side in sides) == [0, 3]


def test_tasks_with_one_prompt_for_all_are_split_by_their_ids() -> None:
    rows = [{"id": str(n), "prompt": "Begin.", "number": n} for n in range(2000)]
    train, held_out = hold_out(to_tasks(rows), 0.2, seed=1)
    assert 320 < len(held_out) < 480 and len(train) + len(held_out) == 2000
    by_id = [row["id"] for row in rows if int(independent([1, row["id"]]), 16) < 0.2 * 2**64]
    assert [task["id"] for task in held_out] == by_id
    made = to_tasks([{"number": n} for n in range(2000)], need=(), split_seed=1)  # the environment makes the prompts
    assert 320 < len(hold_out(made, 0.2, seed=1)[1]) < 480


def test_held_out_share_is_near_the_fraction_and_depends_on_the_seed() -> None:
    tasks = [{"id": str(n), "question": f"question {n}"} for n in range(4000)]  # no prompt: told apart by id
    splits = [hold_out(to_tasks(tasks, need=()), 0.2, seed)[1] for seed in range(5)]
    for held_out in splits:
        assert abs(len(held_out) / 4000 - 0.2) < 4 * (0.2 * 0.8 / 4000) ** 0.5
    assert len({tuple(task["id"] for task in held_out) for held_out in splits}) == 5


def test_split_with_an_empty_side_is_refused() -> None:
    tasks = to_tasks([{"id": "1", "prompt": "a"}, {"id": "2", "prompt": "b"}])
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


def test_order_of_what_has_no_end_is_its_own() -> None:
    visits = order(ENDLESS, 0, 3)
    assert list(visits[:3]) == [0, 1, 2] and visits[10**12] == 10**12


def test_draws_follow_the_orders_of_the_epochs() -> None:
    drawn, after = draw(5, 3, 9, seed=2)
    orders = [list(order(5, epoch, 2)) for epoch in range(3)]
    assert drawn == [(0, p) for p in orders[0][3:]] + [(1, p) for p in orders[1]] + [(2, p) for p in orders[2][:2]]
    assert after == 12


def test_what_does_not_fit_is_passed_over_and_nothing_else_moves() -> None:
    everything = [place for _, place in draw(50, 0, 100, seed=2)[0]]
    drawn, number = [], 0
    while number < 100:  # in steps of any size
        more, number = draw(50, number, 1 + number % 3, 2, lambda place: place % 5 != 0)
        drawn += [place for _, place in more]
    assert drawn[:80] == [place for place in everything if place % 5]
    assert len(draw(50, 0, 400, 2, lambda place: place % 2 == 0)[0]) == 400
    refused(lambda: draw(50, 7, 1, 2, lambda place: False), "none of 50 rows fits", "--too-long truncate")


# Without end


def squares() -> Iterator[dict[str, Any]]:
    return ({"prompt": f"{n} squared", "answer": n * n} for n in itertools.count())


def test_stream_gives_its_tasks_by_their_places_and_begins_again_for_earlier_ones() -> None:
    called: list[int] = []
    stream = Stream(lambda: called.append(1) or squares(), Conversion())
    assert [stream[place]["answer"] for place in (0, 3, 3, 10, 4)] == [0, 9, 9, 100, 16] and len(called) == 2
    assert stream[7] == to_tasks(itertools.islice(squares(), 8))[7]
    assert len(stream) == ENDLESS and stream.where(5) == "row 6" and stream.taken() == "prompt from 'prompt'"
    assert [task["answer"] for task in stream.examples()] == [0, 1, 4]
    assert draw(len(stream), 7, 2, 0) == ([(7, 7), (8, 8)], 9)


def test_stream_that_ends_begins_again() -> None:
    stream = Stream(lambda: [{"prompt": "a"}, {"prompt": "b"}], Conversion())
    assert [stream[place]["prompt"] for place in range(5)] == list("ababa")


def test_failures_of_a_stream_name_the_row() -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield {"prompt": "a"}
        yield {"prompt": 1}

    def broken() -> Iterator[dict[str, Any]]:
        yield {"prompt": "a"}
        raise KeyError("b")

    refused(lambda: Stream(failing, Conversion())[1], "row 2: prompt must be text")
    refused(lambda: Stream(lambda: ["text"], Conversion())[0], "row 1", "must be an object")
    refused(lambda: Stream(broken, Conversion())[1], "failed after 1", "KeyError: 'b'", "test_data.py")
    refused(lambda: Stream(lambda: [], Conversion())[0], "gives no rows")


def test_some_of_the_beginning_of_a_stream_is_held_out_and_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.data.tasks.HELD_OUT", 20)
    train, held_out = hold_out(Stream(squares, Conversion()), 0.2, 4)
    every = to_tasks(itertools.islice(squares(), 100))
    left, away = hold_out(every, 0.2, 4)
    assert list(held_out) == list(away) and [train[place] for place in range(len(left))] == list(left)
    assert held_out.where(0) == away.where(0)
    refused(lambda: hold_out(Stream(lambda: itertools.repeat({"prompt": "a"}), Conversion()), 0.2), "fraction")


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
    root = ROOT
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@pytest.mark.parametrize("stop", [5, "", [""], [5], "\ud800", ["a", "\udfff"], {"a": 1}])
def test_a_stop_that_is_no_text_is_refused_with_its_row_before_it_is_played(tmp_path: Path, stop: Any) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2", "stop": stop}]
    with pytest.raises(UserError, match=r"row 2: (each )?stop "):
        to_tasks(rows)
    with pytest.raises(UserError, match=r"row 2: (each )?stop "):
        Stream(lambda: rows, Conversion())[:2]
    assert len(to_tasks(rows, need=())) == 2  # an environment's own column


@pytest.mark.parametrize("stop", [None, "\n", ["x", "y"], []])
def test_a_row_may_have_no_stop_one_or_several(stop: Any) -> None:
    [task] = to_tasks([{"prompt": "a", "stop": stop}])
    expected = (stop,) if isinstance(stop, str) else tuple(stop or ())
    assert opening(task).stop == expected


@pytest.mark.parametrize("id", ["\ud800", 10**5000], ids=["half a pair", "long"])
def test_an_id_that_cannot_be_written_is_refused_with_its_row(id: Any) -> None:
    rows = [{"prompt": "a", "id": "1"}, {"prompt": "b", "id": id}]
    with pytest.raises(UserError, match="row 2: the id "):
        to_tasks(rows)
    with pytest.raises(UserError, match="row 2: the id "):
        Stream(lambda: rows, Conversion())[:2]


def test_a_long_id_that_comes_twice_is_shown_by_its_beginning() -> None:
    with pytest.raises(UserError) as caught:
        to_tasks([{"prompt": "a", "id": "x" * 100_000}, {"prompt": "b", "id": "x" * 100_000}])
    assert len(str(caught.value)) < 200 and "xxx... is already that of" in str(caught.value)


def test_a_generator_of_rows_that_exits_is_told_from_one_that_ends() -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"prompt": "a"}
        sys.exit(0)

    with pytest.raises(UserError, match="the row generator failed after 1: SystemExit: 0"):
        Stream(rows, Conversion())[:2]
    with pytest.raises(UserError, match="the row generator failed after 1: SystemExit: 0"):
        load_rows(rows())


def test_a_row_that_holds_itself_is_refused_with_its_place() -> None:
    def circular(row: Task) -> Task:
        row["x"] = row
        return row

    with pytest.raises(UserError, match="row 1: a value contains itself"):
        to_tasks([{"prompt": "a"}], convert=circular)


def test_texts_of_classes_with_methods_of_their_own_become_plain() -> None:
    class Odd(str):
        def strip(self, chars: str | None = None, /) -> str:
            raise RuntimeError

        isascii = encode = __str__ = strip  # type: ignore[assignment]

    [task] = to_tasks([{"q": "a"}], convert=lambda row: {"id": Odd("i"), "prompt": Odd("a")})
    assert type(task["prompt"]) is str and type(task["id"]) is str and task["prompt"] == "a"


def test_a_converted_row_is_taken_as_the_plain_dict_that_it_is() -> None:
    class Mutable(dict[str, Any]):
        def items(self) -> Any:
            raise ValueError("no items")

        def __bool__(self) -> bool:
            raise ValueError("no truth")

    tasks = to_tasks([{"q": "a"}], convert=lambda row: Mutable(prompt=row["q"]))
    assert tasks[0]["prompt"] == "a" and type(tasks[0]) is dict


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/rows.jsonl"])
def test_what_can_be_no_name_of_a_file_is_told_shortly(name: str) -> None:
    with pytest.raises(UserError, match="is not a source of rows") as caught:
        load_rows(name)
    assert len(str(caught.value)) < 200


def test_rows_of_an_environment_that_have_a_response_are_split_by_their_ids() -> None:
    tasks = to_tasks([{"response": "yes" if n % 2 else "no", "seed": n} for n in range(100)], need=())
    train, held_out = hold_out(tasks, 0.2)
    assert 5 < len(held_out) < 40 and len(train) + len(held_out) == 100
    same = to_tasks(
        [{"text": "a", "seed": n} for n in range(60)] + [{"text": "b", "seed": 0}], need=("prompt", "response")
    )
    assert {len(part) for part in hold_out(same, 0.5, seed=next_seed(same))} == {1, 60}, "equal texts are on one side"


def next_seed(tasks: Any) -> int:
    """A seed with which a text is held out and the other is not."""
    for seed in range(50):
        try:
            hold_out(tasks, 0.5, seed)
        except UserError:
            continue
        return seed
    raise AssertionError
