"""Every published form of preference data becomes one kind of task; what is wrong with a row is one line that names it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import CHATML
from hypothesis import given, settings
from hypothesis import strategies as st
from update_cases import WORDS

from posttrain.core.types import Task, UserError
from posttrain.data.labels import to_labelled
from posttrain.data.preference_examples import MOST, to_compared, to_item, to_judged
from posttrain.data.tasks import to_tasks
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.row_warnings import warn_repeated_prompts
from posttrain.training.sources.length_filter import Policy, TooLong
from posttrain.training.sources.preferences import PreferenceExamples

HUMAN = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: why?\n\nAssistant:"
ASKED = [{"role": "user", "content": "why?"}]


def said(text: str) -> list[dict[str, str]]:
    return [*ASKED, {"role": "assistant", "content": text}]


def pair(margin: float = 0.0) -> dict[str, Any]:
    return {"responses": ["good", "bad"], "comparisons": [[0, 1, 1.0, margin]], "labels": []}


K = ["a", "b", "c", "d"]
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"prompt": "p", "chosen": "good", "rejected": "bad"}, {"prompt": "p", **pair()}),
    ({"prompt": "p", "chosen": "pgood", "rejected": "pbad"}, {"prompt": "p", **pair()}),  # repeated in both
    ({"prompt": "p", "chosen": "pgood", "rejected": "bad"}, {"prompt": "p", **pair(), "responses": ["pgood", "bad"]}),
    ({"prompt": "p", "chosen": "good", "rejected": "bad", "margin": 2}, {"prompt": "p", **pair(2.0)}),
    (
        {"prompt": "p", "chosen": "good", "rejected": "bad", "score_chosen": 8.5, "score_rejected": 6},
        {"prompt": "p", **pair(2.5)},
    ),
    (
        {"chosen": HUMAN + " good", "rejected": HUMAN + " bad"},
        {"prompt": HUMAN, **pair(), "responses": [" good", " bad"]},
    ),
    *(  # without a prompt, as TRL has them: their common words
        (
            {"chosen": f"{asked} good", "rejected": f"{asked} {bad}"},
            {"prompt": asked, **pair(), "responses": [" good", f" {bad}"]},
        )
        for asked, bad in (("The sky is", "gone"), ("The sky is", "good, no"), ("The sky\nis", "bad"))
    ),
    ({"prompt": "why?", "chosen": said("good"), "rejected": said("bad")}, {"messages": ASKED, **pair()}),
    ({"chosen": said("good"), "rejected": said("bad")}, {"messages": ASKED, **pair()}),
    (
        {"prompt": ASKED, "chosen": said("good")[1:], "rejected": said("bad")[1:]},
        {"prompt": ASKED, **pair()},
    ),
    (
        {"prompt": "p", "responses": ["good", "bad"], "comparisons": [[0, 1]]},
        {"prompt": "p", **pair()},
    ),
    (
        {"prompt": "p", "responses": K, "comparisons": [[3, 1, 2], [0, 1, 0.5, -1], [1, 0, 0]]},
        {
            "prompt": "p",
            "responses": ["a", "b", "d"],
            "comparisons": [[2, 1, 2.0, 0.0], [0, 1, 0.5, -1.0]],
            "labels": [],
        },
    ),
    (  # ties are dropped, a cycle stays, an unused response goes
        {
            "prompt": "p",
            "responses": K,
            "pairs": [[0, 1], [1, 2], [0, 2], [0, 3]],
            "preferred": [1, 1, 2, 0],
        },
        {
            "prompt": "p",
            "responses": ["a", "b", "c"],
            "comparisons": [[0, 1, 1.0, 0.0], [1, 2, 1.0, 0.0], [2, 0, 1.0, 0.0]],
            "labels": [],
        },
    ),
    (
        {"prompt": "p", "responses": K[:3], "ranks": [2, 1, 2]},
        {"prompt": "p", "responses": K[:3], "comparisons": [[1, 0, 1.0, 0.0], [1, 2, 1.0, 0.0]], "labels": []},
    ),
    (
        {"prompt": "p", "responses": K[:3], "scores": [0.5, 3, -1]},
        {
            "prompt": "p",
            "responses": K[:3],
            "comparisons": [[1, 0, 1.0, 2.5], [0, 2, 1.0, 1.5], [1, 2, 1.0, 4.0]],
            "labels": [],
        },
    ),
    *(  # conversational and unpaired, as TRL has it, and as one list of messages
        (row, {**prompt, "responses": ["r"], "comparisons": [], "labels": [[1.0]]})
        for row, prompt in (
            ({"prompt": ASKED, "completion": said("r")[1:], "label": True}, {"prompt": ASKED}),
            ({"messages": said("r"), "label": True}, {"messages": ASKED}),
            ({"messages": said("r"), "score": 1}, {"messages": ASKED}),
        )
    ),
    *(
        (
            {"prompt": "p", name: "r", "label": label},
            {"prompt": "p", "responses": ["r"], "comparisons": [], "labels": [[value]]},
        )
        for name, label, value in (
            ("response", True, 1.0),
            ("completion", False, 0.0),
            ("response", -1, 0.0),
            ("response", 1, 1.0),
            ("response", 0.25, 0.25),
        )
    ),
    (
        {"prompt": "p", "completion": [{"role": "assistant", "content": "r"}], "score": 4},
        {"prompt": "p", "responses": ["r"], "comparisons": [], "labels": [[4.0]]},
    ),
    (
        {"prompt": "p", "steps": ["one", "two", "three"], "mistake_index": 1},
        {"prompt": "p", "responses": [["one", "two"]], "comparisons": [], "labels": [[1.0, 0.0]]},
    ),
    (
        {"prompt": "p", "steps": ["one", "two"], "mistake_index": None},
        {"prompt": "p", "responses": [["one", "two"]], "comparisons": [], "labels": [[1.0, 1.0]]},
    ),
    (
        {"prompt": "p", "completions": ["one", "two"], "labels": [True, False]},
        {"prompt": "p", "responses": [["one", "two"]], "comparisons": [], "labels": [[1.0, 0.0]]},
    ),
]


def whole(task: dict[str, Any]) -> dict[str, Any]:
    """The task, none of whose responses was cut off."""
    return {**task, "cut": [False] * len(task["responses"])}


@pytest.mark.parametrize(
    ("row", "cut"),
    [
        ({"chosen": "a", "rejected": "b", "chosen_stop": "length", "rejected_stop": "eos"}, [True, False]),
        ({"responses": ["a", "b", "c"], "ranks": [1, 2, 3], "stops": ["eos", "context", "stop"]}, [False, True, False]),
        ({"responses": ["a", "b"], "scores": [1, 2], "samples": [{"stop": "eos"}, {"stop": "length"}]}, [False, True]),
        ({"responses": ["a", "b"], "scores": [1, 2], "samples": [{"stop": "length"}]}, [False, False]),  # of others
        ({"responses": ["", "a", "b"], "ranks": [3, 1, 2], "stops": ["eos", "stop", "length"]}, [False, True]),
        ({"responses": ["a", "b", "c"], "scores": [1, None, 2], "stops": ["eos", "length", "stop"]}, [False, False]),
        ({"response": "a", "label": True, "stop": "length"}, [True]),
    ],
)
def test_what_was_cut_off_is_learned_from_without_an_end(
    row: dict[str, Any], cut: list[bool], tokenizer: Tokenizer
) -> None:
    task = to_item({"prompt": "p", **row})
    assert task is not None and task["cut"] == cut
    item = PreferenceExamples(
        [], tokenizer, (tokenizer.eos_id,), tokenizer.vocab_size, TooLong("skip", 99, print)
    ).make(task, None)  # type: ignore[arg-type]
    assert [t.tokens[-1] != tokenizer.eos_id for t in item.responses] == cut
    assert all(t.tokens[t.scored[-1]] == t.tokens[-1] for t in item.responses)


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_every_form_becomes_a_prompt_with_responses_and_what_is_said_of_them(number: int) -> None:
    row, expected = FORMS[number][0], whole(FORMS[number][1])
    assert to_item({**row, "unread": 1}) == expected
    assert to_item({**row, "id": "x", "source": "s"}) == {"id": "x", "source": "s", **expected}


SILENT: list[dict[str, Any]] = [
    {"prompt": "p", "chosen": "same", "rejected": "same"},
    {"prompt": "p", "chosen": "good", "rejected": " \n"},
    {"prompt": "p", "chosen": "", "rejected": "bad"},
    {"prompt": "p", "responses": ["a", "b"], "pairs": [[0, 1]], "preferred": [0]},
    {"prompt": "p", "responses": ["a", "b"], "ranks": [1, 1]},
    {"prompt": "p", "responses": ["a", "a", ""], "ranks": [1, 2, 3]},
    {"prompt": "p", "responses": ["a", "b"], "comparisons": []},
    {"prompt": "p", "response": "", "label": True},
]


def test_rows_that_say_nothing_are_left_out_and_counted() -> None:
    assert all(to_item(row) is None for row in SILENT)
    tasks = to_tasks([*SILENT, {"prompt": "p", "chosen": "good", "rejected": "bad"}], convert=to_compared)
    assert len(tasks) == 1 and tasks.left_out == len(SILENT)


def test_equal_responses_leave_only_their_own_comparisons_out() -> None:
    row = {"prompt": "p", "responses": ["a", "a", "b"], "ranks": [1, 2, 3]}
    assert to_item(row) == {
        "prompt": "p",
        "responses": ["a", "a", "b"],
        "cut": [False] * 3,
        "comparisons": [[0, 2, 1.0, 0.0], [1, 2, 1.0, 0.0]],
        "labels": [],
    }


CELLS: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"prompt": "p", "chosen": "good", "rejected": "bad", "margin": "2"}, {"prompt": "p", **pair(2.0)}),
    ({"prompt": "p", "chosen": "good", "rejected": "bad", "margin": ""}, {"prompt": "p", **pair()}),
    (
        {"prompt": "p", "chosen": "good", "rejected": "bad", "score_chosen": "8.5", "score_rejected": "6"},
        {"prompt": "p", **pair(2.5)},
    ),
    (
        {"prompt": "p", "responses": '["good", "bad"]', "scores": "[0.5, 0.25]"},
        {"prompt": "p", **pair(0.25)},
    ),
    *(
        (
            {"prompt": "p", "response": "7", "label": cell},
            {"prompt": "p", "responses": ["7"], "comparisons": [], "labels": [[label]]},
        )
        for cell, label in (("1", 1.0), ("0", 0.0), ("-1", 0.0), ("True", 1.0), ("false", 0.0), ("0.75", 0.75))
    ),
    (
        {"prompt": "p", "response": "7", "score": " 3.5 "},
        {"prompt": "p", "responses": ["7"], "comparisons": [], "labels": [[3.5]]},
    ),
    (
        {"prompt": "p", "steps": '["a", "b", "c"]', "mistake_index": "1"},
        {"prompt": "p", "responses": [["a", "b"]], "comparisons": [], "labels": [[1.0, 0.0]]},
    ),
]


@pytest.mark.parametrize("number", range(len(CELLS)))
def test_a_cell_of_a_table_says_what_the_same_value_says_in_json(number: int, tmp_path: Path) -> None:
    row, expected = CELLS[number]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(row))
        table.writeheader()
        table.writerow(row)
    [task] = to_tasks(_rows(tmp_path / "rows.csv"), convert=to_item)
    assert {name: task[name] for name in expected} == expected


def test_labels_of_a_table_are_read_where_best_responses_are_chosen(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('prompt,responses,scores\np,"[""a"", ""b""]","[1, null]"\n')
    [task] = to_tasks(_rows(tmp_path / "rows.csv"), convert=to_labelled)
    assert (task["responses"], task["scores"]) == (["a", "b"], [1, None])


two = {"prompt": "p", "responses": ["a", "b"]}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "p", "chosen": "a"}, "no rejected"),
    ({"prompt": "p", "rejected": "a", "chosen": None}, "no chosen"),
    ({"prompt": "p", "answer": "a"}, "the row has prompt, answer"),
    ({"prompt": "p", "winner": "a"}, "--fields.chosen COLUMN"),
    ({"prompt": "p", "chosen": "a", "rejected": ["b"]}, "both be text, or both messages"),
    ({"prompt": "p", "chosen": 3, "rejected": 4}, "a list of messages, and is 3 (int); put it in quotes"),
    ({"chosen": "a", "rejected": "b"}, "--fields.prompt COLUMN"),
    ({"chosen": HUMAN + " a", "rejected": "\n\nHuman: other\n\nAssistant: b"}, "do not begin with the same one"),
    ({"chosen": "I do", "rejected": "I don't", "question": "Do you?"}, "--fields.prompt COLUMN"),
    ({"chosen": "word", "rejected": "work it"}, "--fields.prompt COLUMN"),
    ({"chosen": ASKED, "rejected": said("b")}, "chosen must end with a message"),
    ({"chosen": said("a"), "rejected": []}, "rejected must end with a message"),
    ({"chosen": said("a"), "rejected": [{"role": "user", "content": "no"}, *said("b")[1:]]}, "differ before the last"),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": float("nan")}, "margin must be a finite number"),
    (
        {"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": float("inf"), "score_rejected": 0},
        "score_chosen",
    ),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": "x", "score_rejected": 0}, "score_chosen must be"),
    (
        {"prompt": "p", "chosen": "a", "rejected": "b", "margin": 1e300},
        "margin must be a finite number of at most 1e+09",
    ),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": 10**400}, "margin must be a finite number of at most"),
    ({**two, "comparisons": [[0, 1, 1e308]]}, "share or margin must be a finite number of at most"),
    ({**two}, "responses without labels"),
    ({**two, "responses": [], "ranks": []}, f"a row must have 1 to {MOST} responses, and has 0"),
    ({**two, "responses": ["a", 3], "ranks": [1, 2]}, "responses must be a list of texts"),
    ({**two, "responses": ["a"] * (MOST + 1), "ranks": [1] * (MOST + 1)}, f"and has {MOST + 1}"),
    ({**two, "pairs": [[0, 1]], "preferred": []}, "lists of the same length"),
    (
        {**two, "pairs": [[0, 2]], "preferred": [1]},
        "pairs has [0, 2]; each must be two different places of responses, 0 to 1",
    ),
    ({**two, "pairs": [[0, 1]], "preferred": [3]}, "preferred has 3"),
    ({**two, "comparisons": [[1, 1]]}, "comparisons has [1, 1]"),
    ({**two, "comparisons": [[-1, 1]]}, "comparisons has [-1, 1]"),
    ({**two, "comparisons": [[True, 0]]}, "comparisons has [True, 0]"),
    ({**two, "comparisons": [3]}, "comparisons has 3"),
    ({**two, "comparisons": "0 1"}, "comparisons must be a list"),
    ({**two, "comparisons": [[0, 1, -2]]}, "share is -2"),
    ({**two, "comparisons": [[0, 1, "x"]]}, "share or margin must be a finite number"),
    ({**two, "comparisons": [[0, 1, 1, 0, 7]]}, "comparisons has [0, 1, 1, 0, 7]"),
    ({**two, "ranks": [1, 2, 3]}, "ranks must be a list of 2 numbers"),
    ({**two, "scores": [1, "2"]}, "value 2 of scores must be a finite number"),
    ({**two, "scores": [1, float("inf")]}, "value 2 of scores must be a finite number"),
    ({"prompt": "p", "response": "a"}, "a response without a label"),
    ({"prompt": "p", "response": 3, "label": True}, "response must be text"),
    ({"prompt": "p", "response": "a", "label": "good"}, "label is 'good'; it must be true or false"),
    ({"prompt": "p", "response": "a", "label": 2}, "label is 2"),
    ({"prompt": "p", "response": "a", "score": "high"}, "score must be a finite number"),
    ({"prompt": "p", "steps": [], "mistake_index": 0}, "steps must be a list of texts"),
    ({"prompt": "p", "steps": ["a", " "], "mistake_index": 0}, "steps must be a list of texts"),
    (
        {"prompt": "p", "steps": ["a"], "mistake_index": 1},
        "mistake_index is 1; it must be null or the place of a step, 0 to 0",
    ),
    ({"prompt": "p", "steps": ["a"], "labels": [1, 0]}, "labels must be a list of 1"),
    ({"prompt": "p", "steps": ["a", "b"], "labels": [1, 5]}, "label 2 is 5; it must be true or false"),
    ({"prompt": "p", "steps": ["a", "b"], "labels": [1, None]}, "label 2 is null; it must be true or false"),
    ({"prompt": "p", "steps": ["a"]}, "steps without labels"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_wrong_with_a_row_is_one_line_that_names_it(number: int, tmp_path: Path) -> None:
    row, told = WRONG[number]
    good = {"prompt": "x", "chosen": "good", "rejected": "bad"}
    with pytest.raises(UserError) as error:
        to_tasks([good, row], convert=to_item)
    message = str(error.value)
    assert message.startswith("row 2: ") and told in message and "\n" not in message, message
    if "NaN" not in json.dumps(row) and "Infinity" not in json.dumps(row):
        (tmp_path / "rows.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(UserError, match=r"rows\.jsonl:2: "):
            to_tasks(_rows(tmp_path / "rows.jsonl"), convert=to_item)


def _rows(file: Path) -> Any:
    from posttrain.data.rows import load_rows

    return load_rows(str(file))


def test_links_are_told_which_rows_they_cannot_read() -> None:
    label, steps = {"prompt": "p", "response": "r", "label": True}, {"prompt": "p", "steps": ["a"], "mistake_index": 0}
    assert to_judged(label) == to_item(label) and to_judged(FORMS[0][0]) == to_compared(FORMS[0][0]) == whole(
        FORMS[0][1]
    )
    for row, read, told in (
        (label, to_compared, "--algorithm kto"),
        (steps, to_judged, "steps of a solution"),
        ({"messages": [{"role": "assistant", "content": "r"}], "label": True}, to_judged, "only the response"),
        ({"prompt": "p", "response": "r", "score": 4}, to_judged, "the score is 4"),
    ):
        with pytest.raises(UserError, match=told):
            read(row)
    assert to_judged(SILENT[0]) is None and to_compared(SILENT[0]) is None


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 5) | st.floats() | st.sampled_from(["a", "", "b", HUMAN, HUMAN + "x"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["role", "content"]), inner, max_size=2)
    ),
    max_leaves=12,
)
COLUMNS = """prompt messages chosen rejected margin score_chosen score_rejected responses pairs preferred comparisons ranks
scores response completion label score steps completions labels mistake_index""".split()


@settings(max_examples=400, deadline=None)
@given(row=st.dictionaries(st.sampled_from(COLUMNS), ANYTHING, max_size=6))
def test_any_row_makes_a_sound_item_or_says_nothing_or_is_told_in_one_line(row: dict[str, Any]) -> None:
    try:
        item = to_item(row)
    except UserError as error:
        assert "\n" not in str(error)
        return
    if item is None:
        return
    count = len(item["responses"])
    assert bool(item["comparisons"]) != bool(item["labels"])
    for better, worse, share, margin in item["comparisons"]:
        assert 0 <= better < count and 0 <= worse < count and better != worse and share > 0
        assert margin == margin and abs(margin) != float("inf")
        assert item["responses"][better] != item["responses"][worse]
        assert item["responses"][better].strip() and item["responses"][worse].strip()
    if item["labels"]:
        assert len(item["labels"]) == count == 1


# -- from tasks to items -------------------------------------------------------------------------------------------------


def items_of(
    rows: list[dict[str, Any]], policy: Policy = "skip", context: int = 64, words: Tokenizer = WORDS
) -> PreferenceExamples:
    told: list[str] = []
    tasks = to_tasks(rows, convert=to_item)
    assert words.eos_id is not None
    made = PreferenceExamples(tasks, words, (words.eos_id,), words.vocab_size, TooLong(policy, context, told.append))
    made.told = told  # type: ignore[attr-defined]
    return made


def test_prompt_and_responses_are_tokenised_apart_and_end_with_the_end_of_sequence() -> None:
    (item,) = (items_of([{"prompt": "1+1=", "chosen": "2", "rejected": "33"}])[0],)
    assert item is not None
    prompt = WORDS.encode("1+1=", start=True)
    for transcript, text in zip(item.responses, ("2", "33"), strict=True):
        reply = [*WORDS.encode(text), WORDS.eos_id]
        assert transcript.tokens == [*prompt, *reply]
        assert transcript.scored.tolist() == list(range(len(prompt), len(prompt) + len(reply)))
    assert item.n_scored == 5


def test_only_the_last_turn_of_a_conversation_is_scored() -> None:
    words = Tokenizer.train(["0123456789abcdefghijklmnopqrstuvwxyz ?"], 64, "characters")
    words.chat_template = CHATML
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    row = {f: [*before, {"role": "assistant", "content": text}] for f, text in (("chosen", "yes"), ("rejected", "no"))}
    item = items_of([row], context=400, words=words)[0]
    assert item is not None
    first, second = item.responses
    assert first.n_scored == len(words.encode("yes<|im_end|>\n")) + 1
    shared = first.spans[-1].start if first.spans[-1].learned else first.spans[-2].start
    assert first.tokens[:shared] == second.tokens[:shared]
    assert first.scored.tolist()[0] == shared and [s.learned for s in first.spans].count(True) == 1


def test_steps_are_scored_spans_of_their_own() -> None:
    item = items_of([{"prompt": "1+1+1", "steps": ["2", "3"], "mistake_index": 1}])[0]
    assert item is not None and item.labels == [(1.0, 0.0)]
    spans = [s for s in item.responses[0].spans if s.learned]
    assert [s.length for s in spans] == [len(WORDS.encode("2\n")), len(WORDS.encode("3")) + 1]


ROWS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "3" * 30},
    {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    {"prompt": "9" * 40, "chosen": "4", "rejected": "5"},
]


def test_pairs_that_are_too_long_are_skipped_cut_or_refused_and_named() -> None:
    skipped = items_of(ROWS, "skip", 20)
    assert skipped[0] is None and skipped[1] is not None and skipped[2] is None
    assert skipped.too_long.take() == 2
    assert skipped.told[0].startswith("row 1: the longest of prompt and response has 35 tokens")  # type: ignore[attr-defined]
    cut = items_of(ROWS, "truncate", 20)
    first = cut[0]
    assert first is not None and [len(t) for t in first.responses] == [6, 20] and cut[2] is None
    assert cut.too_long.take() == 2
    with pytest.raises(
        UserError, match="row 1: the longest of prompt and response has 35 tokens; the model's context holds 20"
    ):
        items_of(ROWS, "refuse", 20)
    assert items_of(ROWS, "refuse", 64)[0] is not None


def test_a_token_outside_the_models_vocabulary_is_refused() -> None:
    small = items_of(ROWS)
    small.vocab = 5
    with pytest.raises(UserError, match="the model's vocabulary has 5: use the model's own tokenizer"):
        small[0]


def test_published_pairs_and_rankings_become_items(data: Path) -> None:
    pairs = to_tasks(_rows(data / "preferences" / "pairs.jsonl"), convert=to_compared)
    assert pairs.left_out == 6 and all(len(task["comparisons"]) == 1 for task in pairs)
    wise: list[Task] = list(to_tasks(_rows(data / "preferences" / "kwise.jsonl"), convert=to_compared))
    assert max(len(task["responses"]) for task in wise) > 2


def test_prompts_that_only_some_responses_repeat_are_counted() -> None:
    prompt, told = "What is 1 and 2?", []
    pairs = [
        (f"{prompt} 3", "no"),
        (f"{prompt} 3", f"{prompt} no"),
        ("3", "no"),
        ("3", f" {prompt} no"),
        ("What", "no"),
    ]
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
    warn_repeated_prompts(to_tasks(rows, convert=to_compared), told.append)
    [line] = told
    assert line.startswith("in 2 of 5 rows checked") and repr(prompt) in line
    warn_repeated_prompts(to_tasks(rows[1:3], convert=to_compared), told.append)
    assert len(told) == 1
