"""Recipes on a real model: nothing held out is trained on, an arm is trained once, and each runs from end to end."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from recipe_modules import recipe_module
from retrieved import ROWS, write_rows

import posttrain
from posttrain import Rollout, UserError
from posttrain.core.rollouts import PlayedTurn
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import StopReason
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.training.trainer import Run
from posttrain.verify.similarity import chrf as posttrain_chrf

SEARCHED = [
    ("rome", "squad", "What lies on the Tiber?", "Rome"), ("paris", "squad", "Which river is Paris on?", "Seine"),
    ("hobbit", "popqa", "Of which year is The Hobbit?", "1937"), ("tolkien", "squad", "Where was Tolkien?", "Oxford"),
    ("seine", "squad", "What flows through Paris?", "Seine"), ("hobbit", "squad", "What is The Hobbit?", "a novel"),
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "retrieval"
    folder.mkdir()
    write_rows(folder / "passages.jsonl")
    write_rows(folder / "questions.jsonl", [
        {"id": f"{gold}-{number}-{copy}", "dataset": dataset, "question": asked, "answers": [answer], "gold_ids": [gold]}
        for copy in range(16) for number, (gold, dataset, asked, answer) in enumerate(SEARCHED)
    ])  # fmt: skip
    (folder.parent / "wordproblems").mkdir()
    write_rows(folder.parent / "wordproblems" / "train.jsonl", word_problems())
    for name, rows in asked().items():
        (folder.parent / name).mkdir()
        write_rows(folder.parent / name / {"sft": "instructions.jsonl", "preferences": "pairs.jsonl"}[name], rows)
    return folder.parent


def word_problems() -> list[dict[str, str]]:
    """Sixty wordings, each with two sets of numbers."""
    things = [f"{left} {right}" for left in ("red", "old", "big", "new", "odd", "hot") for right in "abcdefghij"]
    return [
        {"id": f"{name}-{n}", "question": f"Ann has {n} {name} and buys {n + 5}. How many?", "answer": str(2 * n + 5),
         "equation": f"x={n}+{n + 5}"}
        for name in things for n in (2, 31)
    ]  # fmt: skip


def asked() -> dict[str, list[dict[str, str]]]:
    """Instructions and pairs, by their folders."""
    prompts = [f"Name a town, number {number}." for number in range(60)]
    return {
        "sft": [{"prompt": prompt, "response": f"{prompt} Oxford, number {n}"} for n, prompt in enumerate(prompts)],
        "preferences": [
            {"prompt": p, "chosen": f"Oxford, please, {p}", "rejected": f"Oxford, duh, {p}"} for p in prompts
        ],
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template that has learned next to nothing."""
    rows = [{"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Oxford"}]}] * 4
    shape = {"hidden": 16, "layers": 1, "heads": 2, "context": 1536, "vocab": 320}
    out = tmp_path_factory.mktemp("model") / "run"
    run = posttrain.sft(rows, out=str(out), **shape, chat_template="chatml", rows=4, steps=1, quiet=True, threads=1)
    assert run.checkpoint is not None
    return Path(run.checkpoint)


def ran(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["recipe", *map(str, words)])
    recipe.main()


RECIPES = (
    ("reading", ("0", "1")),
    ("search", ("0",)),
    ("instructions", ("0",)),
    ("preferences", ("0",)),
    ("tools", ("0",)),
    ("expert_iteration", ("0",)),
    ("distillation", ("0",)),
)


@pytest.mark.parametrize(("name", "seeds"), RECIPES)
def test_a_recipe_on_a_real_model_runs_from_end_to_end_and_only_once(
    name: str, seeds: tuple[str, ...], data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, page = recipe_module(f"real.{name}"), tmp_path / "page.md"
    if name == "instructions":  # the replies of a tiny model are no sentences
        monkeypatch.setattr(recipe, "rewritten", lambda rows, _: [{**row, "response": "rain"} for row in rows])
    words = ["--small", "--seeds", *seeds, "--out", tmp_path / "out", "--model", model, "--data", data, "--page", page]
    ran(recipe, monkeypatch, *words)
    text = page.read_text()
    found = json.loads((tmp_path / "out" / "results.json").read_text())["arms"]
    assert list(found) == list(recipe.ARMS) and all(list(of_arm) == list(seeds) for of_arm in found.values())
    for arm in recipe.ARMS:
        assert f"\n| {arm} | " in text
    if name == "instructions":  # the audit of the runs, and replies of their last steps
        assert all(f"\n| {arm} | 0 | " in text for arm in recipe.AUDITED)
        steps = [read_rollouts(tmp_path / "out" / f"{arm}-0", 2) for arm in ("grpo", "constraint-alone", "words-paid")]
        asked = re.findall(r"\[prompt\] (.*)", text)
        assert len(asked) >= 6 and set(asked) <= {row["asked"] for rows in steps for row in rows}

    def work(*_: object, **__: object) -> None:
        raise AssertionError("trained or measured again")

    for verb in ("sft", "rl", "evaluate", "reward_model", "prefer"):
        monkeypatch.setattr(posttrain, verb, work)
    ran(recipe, monkeypatch, *words)
    assert page.read_text() == text


def test_a_suite_of_tasks_is_written_and_evaluated(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--trained", model, "--model", model, "--out", tmp_path, "--data", data, "--small"]
    with pytest.raises(SystemExit) as ended:
        ran(recipe_module("real.suite"), monkeypatch, *words)
    assert ended.value.code == 0
    parts = json.loads((tmp_path / "suite.json").read_text())["parts"]
    assert {name: part["figures"]["tasks"] for name, part in parts.items()} == {"reading": 8, "sums": 4, "problems": 4}
    asked = [json.loads(line)["id"] for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    assert asked == ["3*1", "8*1", "2+2", "7*2"], "other tasks would make other figures than those of the page"
    for part in parts.values():
        [start] = part["against"]
        assert start["differences"]["accuracy"]["mean"] == 0  # the same model, and the same seeds


@pytest.mark.parametrize("task", ["sums", "instructions", "tiny"])
def test_a_sweep_of_learning_rates_runs_once_and_writes_its_own_part_of_the_page(
    task: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, page = recipe_module("learning_rates"), tmp_path / "page.md"
    rates = {way: lrs[:1] for way, lrs in recipe.RATES[task].items()}
    monkeypatch.setattr(recipe, "RATES", {task: rates})
    monkeypatch.setattr(recipe.instructions, "rewritten", lambda rows, _: [{**row, "response": "rain"} for row in rows])
    starts = []
    rl = posttrain.rl

    def noting(rows: Any, env: str, start: str, **how: Any) -> Run:
        starts.append((Path(start).name, how["lr"], how["lora"]))
        return rl(rows, env, start, **how)

    monkeypatch.setattr(posttrain, "rl", noting)
    words = ["--task", task, "--small", "--seeds", 0, "--out", tmp_path / "out", "--model", model, "--page", page]
    ran(recipe, monkeypatch, *words)
    start = model.name if task == "sums" else "sft-0"
    assert starts == [(start, lr, None if way == "full" else 16) for way, lrs in rates.items() for lr in lrs]
    text = page.read_text()
    mark = "written by the recipe -->" if task == "sums" else f"written by the recipe: {task} -->"
    assert mark in text
    assert all(f"\n| {recipe.named(way, lr)} | 0." in text for way, lrs in rates.items() for lr in lrs)
    for verb in ("sft", "rl", "evaluate"):
        monkeypatch.setattr(posttrain, verb, None)  # nothing is trained or measured again
    ran(recipe, monkeypatch, *words)
    assert page.read_text() == text


def test_replies_are_rewritten_so_that_they_keep_their_constraint() -> None:
    recipe = recipe_module("real.instructions")
    rows = recipe.learned(48, 0)
    plain = [
        "{0} are liked, by many. There, people know {0} well. All of them like {0}. And".format(row["topic"])
        for row in rows
    ]
    found = recipe.rewritten(rows, plain)
    assert len(found) == 48 and all(a["prompt"] == b["prompt"] for a, b in zip(found, rows, strict=True))
    for row, made in zip(rows, found, strict=True):
        assert recipe.reward(row, made["response"]) == {"kept": 1.0, "about": 1.0}
    kept = [recipe.reward(row, text)["kept"] for row, text in zip(rows, plain, strict=True)]
    assert sum(kept) == 0, "none without it"
    assert recipe.rewritten(rows, ["no sentence"] * 48) == []
    json_rows = [row for row in rows if row["constraints"][0][0] == "JSON"]
    assert len(recipe.rewritten(json_rows, [f"All people know {row['topic']}." for row in json_rows])) == len(json_rows)
    assert recipe.reward({"topic": "rain", "constraints": [("no commas", "")]}, "It rains.") == {
        "kept": 0.0,
        "about": 1.0,
    }


def test_no_topic_and_no_new_kind_of_constraint_is_trained() -> None:
    recipe = recipe_module("real.instructions")
    rows, unseen = recipe.learned(600, 1), recipe.unseen(60)
    assert recipe.learned(60, 1) == recipe.learned(60, 1) != recipe.learned(60, 2) and unseen == recipe.unseen(60)
    assert len({row["topic"] for row in rows}) == 40 and not {row["topic"] for row in rows} & set(recipe.HELD_OUT)
    assert {row["topic"] for side in unseen.values() for row in side} <= set(recipe.HELD_OUT)
    kinds = {side: {name for row in of_side for name, _ in row["constraints"]} for side, of_side in unseen.items()}
    assert kinds["trained"] == set(recipe.TRAINED) == {name for row in rows for name, _ in row["constraints"]}
    assert kinds["new"] == set(recipe.NEW) and not kinds["new"] & kinds["trained"]
    assert all(
        len(row["constraints"]) == (2 if side == "two" else 1) for side, of_side in unseen.items() for row in of_side
    )


@pytest.mark.parametrize(
    ("kind", "value", "kept", "broken"),
    [
        ("capitals", "", "RAIN FALLS ON ALL 5 OF US.", "RAIN FALLS ON ALL of US."),
        ("JSON", ["a", "b"], '{"a": "rain is wet", "b": "so are we"}', '{"b": "rain is wet", "a": "so are we"}'),
        ("list", 2, "- rain is\n- wet and cold", "- rain is wet and cold"),
        ("last word", "home", "I like to be at home!", "At home I like to be."),
        ("no commas", "", "I like rain and snow.", "I like rain, snow and ice."),
        ("at most", 8, "one two three four five six seven eight", "one two three four five six seven eight nine"),
        ("small letters", "", "i like rain a lot.", "I like rain a lot."),
        ("quoted", "", '"I like rain a lot."', 'I like "rain" a lot.'),
        ("first word", "home", "Home is where I am.", "I am at home now."),
        ("question", "", "Do you like the rain?", "Do you like it? I do."),
    ],
)
def test_a_constraint_is_kept_or_broken(kind: str, value: Any, kept: str, broken: str) -> None:
    reward = recipe_module("real.constraints").reward
    row = {"topic": "rain", "constraints": [(kind, value)]}
    assert [reward(row, text)["kept"] for text in (kept, broken)] == [1.0, 0.0]


def test_rewards_that_can_be_hacked_record_the_one_that_was_meant() -> None:
    recipe = recipe_module("real.constraints")
    row = {"topic": "rain", "constraints": [("no commas", "")]}
    about, other, short = "Rain falls on all of us.", "It falls on all of us.", "Rain, rain."
    assert [recipe.constraint_alone(row, text)["reward"] for text in (about, other, short)] == [1, 1, 0]
    for text, intended in ((about, 2), (other, 1), (short, 1)):
        assert sum(recipe.reward(row, text).values()) == intended == recipe.constraint_alone(row, text)["intended"]
        paid = recipe.words_paid(row, text)
        assert paid["intended"] == intended and paid["reward"] == intended + len(text.split()) / 20


def test_no_article_has_questions_on_both_sides(data: Path) -> None:
    recipe = recipe_module("real.reading")
    learned, held_out = recipe.questions(argparse.Namespace(data=data))
    sides = [{row["id"].partition("-")[0] for row in rows} for rows in (learned, held_out)]
    assert len(learned) + len(held_out) == 80 and not sides[0] & sides[1]  # those of popqa have no article


def test_an_excerpt_is_whole_sentences_with_the_answer_in_one() -> None:
    excerpt = recipe_module("real.reading").excerpt
    text = " ".join(f"Sentence {n} says {'so ' * 30}much." for n in range(9)) + " The answer is forty-two. It is."
    found = {excerpt(text, "forty-two", f"question {n}") for n in range(20)}
    assert len(found) > 1 and all("The answer is forty-two." in part and len(part) <= 400 for part in found)
    assert all(part[0] in "ST" and part.endswith(".") and part in text for part in found)
    assert excerpt("so " * 200 + "it is forty-two.", "forty-two", "a") is None


def test_what_search_finds_for_a_scripted_query_stands_in_the_prompt(model: Path, tmp_path: Path) -> None:
    from posttrain.models.tokenizer.tokenizer import Tokenizer
    from posttrain.services.retrieval.passage_index import build, open_index

    recipe = recipe_module("real.search")
    build(list(ROWS), str(tmp_path / "index"))
    index, words = open_index(str(tmp_path / "index")), Tokenizer.load(model)
    row = {"id": "a", "question": "Who flows through Paris?", "answers": ["Tolkien"], "gold_ids": ["tolkien"]}
    found, gold = (recipe.scripted(row, index, is_gold, words) for is_gold in (False, True))
    assert '(Title: "Seine")' in found["prompt"] and not found["found"]
    assert '(Title: "Tolkien")' in gold["prompt"] and gold["found"]
    for prompt in (found["prompt"], gold["prompt"]):
        assert prompt.index("<|im_start|>assistant") < prompt.index("<search> Who") < prompt.index("Doc 1(Title:")
        assert prompt.endswith("</information>\n\n")
    searching = recipe.Searching(*[None] * 2, index, "", [], [], 0, 0, 0)
    assert not searching.can_be_found(row) and searching.can_be_found({**row, "answers": ["river"]})


def test_the_arm_with_information_trained_differs_in_what_is_scored_alone_and_only_its_own_run(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first rollouts are those of the masked arm, from the same start; all that stands after the prompt is scored."""
    recipe = recipe_module("real.search")
    arms = ["SFT", recipe.UNMASKED, "GRPO"]  # the masked arm after the other one, whose player must be gone
    words = ["--small", "--seeds", 0, "--out", tmp_path / "out", "--model", model, "--data", data]
    ran(recipe, monkeypatch, *words, "--page", tmp_path / "page.md", "--arms", *arms)
    masked, unmasked = (
        read_rollouts(tmp_path / "out" / f"{arm}-0", 1, None) for arm in ("grpo", "grpo-information-trained")
    )
    assert [row["tokens"] for row in masked] == [row["tokens"] for row in unmasked] and len(masked) == 16
    shown = {"prompt": 0, "sampled": 0, "observation": 0}
    for row, other in zip(masked, unmasked, strict=True):
        for span in row["spans"]:
            shown[span["kind"]] += span["length"]
            assert span["learned"] == (span["kind"] == "sampled")
        assert other["scored"] == row["total"] - row["spans"][0]["length"] and row["scored"] == row["sampled"]
    assert all(shown.values())
    found = json.loads((tmp_path / "out" / "results.json").read_text())["arms"]
    text = (tmp_path / "page.md").read_text()
    assert list(found) == arms and "Not run: start; GRPO, longer; GRPO, F1; GRPO, scripted search;" in text
    assert "masked minus unmasked (GRPO minus GRPO, information trained): +0.000" in text


def test_arms_see_other_rows_with_another_seed_and_practise_nothing_that_was_demonstrated(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[tuple[str, str], list[str]] = {}

    def noting(verb: str) -> Any:
        def work(*given: Any, out: str, **options: Any) -> Any:
            if "without" not in out:
                arm = "f1" if "f1=1" in options["env"] else verb
                seen[arm, out.rpartition("-")[2]] = [row["id"] for row in given[0]]
            return Run(out, None)

        return work

    recipe = recipe_module("real.search")
    learned, _ = recipe.search_qa.questions(data / "retrieval", None)
    monkeypatch.setattr(posttrain, "sft", noting("sft"))
    monkeypatch.setattr(posttrain, "rl", noting("rl"))
    monkeypatch.setattr(
        recipe.Searching, "measured", lambda *_: dict.fromkeys(recipe.FIGURES, 0.0) | {"queries": [], "episodes": []}
    )
    monkeypatch.setattr(recipe.Searching, "can_be_found", lambda _, row: not row["id"].startswith("tolkien"))
    monkeypatch.setattr(recipe.Searching, "with_given_passage", lambda *_: {"exact": 0.0, "found": 0.0})
    ran(recipe, monkeypatch, "--small", "--seeds", 0, 1, "--out", tmp_path, "--model", model, "--data", data)
    for seed in ("0", "1"):
        assert len(seen["sft", seed]) == 8 and not set(seen["sft", seed]) & set(seen["rl", seed])
        assert len(seen["rl", seed]) == len(learned) - 4 * 8, "whatever part of the first ones was demonstrated"
        assert seen["f1", seed] == [i for i in seen["rl", seed] if not i.startswith("tolkien")], (
            "its first passage is another"
        )
    assert seen["sft", "0"] != seen["sft", "1"]
    shuffled = recipe_module("real.study").shuffled
    assert shuffled([*range(9)], 1, "a") == shuffled([*range(9)], 1, "a") != shuffled([*range(9)], 2, "a")


def test_a_figure_is_the_mean_over_seeds_with_students_interval() -> None:
    cell = recipe_module("real.study").cell
    assert cell([0.1, 0.3, 0.2], "exact") == "0.200 [-0.048, 0.448] (0.100, 0.300, 0.200)"  # 4.303 * 0.1 / sqrt(3)
    assert cell([0.5, 0.5], "exact") == "0.500" and cell([1.2, 2.0], "minutes") == "2"


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    recipe, study = recipe_module("real.reading"), recipe_module("real.study")
    monkeypatch.setattr(
        sys, "argv", ["recipe", "--out", str(tmp_path), "--model", "x", "--data", str(tmp_path / "none")]
    )
    with pytest.raises(SystemExit) as ended:
        study.run(recipe.main)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and "--data" in said


def test_results_under_other_settings_are_refused(model: Path, tmp_path: Path) -> None:
    study = recipe_module("real.study")
    given = study.options("doc", "x").parse_args(["--out", str(tmp_path), "--model", str(model)])
    first = study.Study(given, {"steps": 2})
    assert first.once("GRPO", 0, lambda: {"exact": 0.5})["exact"] == 0.5
    again = study.Study(given, {"steps": 2})
    assert again.once("GRPO", 0, lambda: {"exact": 0.9})["exact"] == 0.5
    with pytest.raises(UserError, match="other settings"):
        study.Study(given, {"steps": 3})


def test_an_interrupted_run_is_no_result(tmp_path: Path) -> None:
    study = recipe_module("real.study")
    assert study.finished(Run(tmp_path, None)) == str(tmp_path)
    for run in (Run(tmp_path, None, interrupted=True), Run(tmp_path, None, stopped="collapsed")):
        with pytest.raises(UserError, match="did not reach its end"):
            study.finished(run)


def test_no_prompt_of_comparisons_has_replies_on_both_sides_and_only_the_learned_ones_depend_on_the_seed(
    data: Path,
) -> None:
    recipe = recipe_module("real.preferences")
    for rows in (recipe.given_pairs(data), recipe.asked(data)):
        first, second = (recipe.part(rows, seed, 20, 8) for seed in (0, 1))
        assert first[1] == second[1] and first[0] != second[0] and [len(side) for side in first] == [20, 8]
        for learned, unseen in (first, second):
            assert not {row["prompt"] for row in learned} & {row["prompt"] for row in unseen}
    pairs = recipe.part(recipe.given_pairs(data), 0, 20, 8)
    training = recipe.sides(pairs[0] + pairs[1])
    assert [[task["prompt"] for task in side] for side in training] == [
        [row["prompt"] for row in side] for side in pairs
    ]


def test_replies_are_compared_where_their_marks_differ_by_more_than_the_gap() -> None:
    recipe = recipe_module("real.preferences")
    texts = ["Paris.", "It is Rome.", "It is Rome!", "Rome"]
    rollouts = [
        Rollout({"prompt": "Capital?", "reference": "It is Rome."}, "a", [], 0.0, text=text, stop=StopReason.LENGTH)
        for text in texts
    ]
    row = recipe.comparison_row(rollouts, 0.1)
    marks = [posttrain_chrf(text, "It is Rome.") for text in texts]
    expected = {(a, b) for a in range(4) for b in range(4) if marks[a] - marks[b] > 0.1}
    assert {tuple(pair) for pair in row["comparisons"]} == expected and (1, 0) in expected and (1, 2) in expected
    assert row["stops"] == ["length"] * 4 and row["responses"] == texts


def test_a_bag_of_words_is_logistic_regression_on_differences_of_counts() -> None:
    baselines = recipe_module("real.word_baselines")
    tasks = [{"responses": ["yes please", "no"], "comparisons": [[0, 1, 1.0, 0.0]]}] * 3
    tasks.append({"responses": ["no", "please please"], "comparisons": [[0, 1, 1.0, 0.0]]})
    names = {"no": 0, "please": 1, "yes": 2}
    inputs = torch.stack(baselines.differences(tasks, names))
    assert inputs.tolist() == [[-1.0, 1.0, 1.0]] * 3 + [[1.0, -2.0, 0.0]]
    weight = baselines.logistic_regression(inputs)
    missing = 1 - torch.sigmoid(inputs @ weight)  # where the gradient is 0: mean of (1 - sigma) x = 2 ridge w
    gradient = -(missing[:, None] * inputs).mean(0) + 2 * baselines.RIDGE * weight
    assert gradient.abs().max() < 1e-5
    unseen = [{"responses": ["yes", "no no unknown"], "comparisons": [[0, 1, 1.0, 0.0], [1, 0, 1.0, 0.0]]}]
    assert baselines.baselines(tasks, unseen) == {"bag": 0.5, "longer": 0.5, "shorter": 0.5}
    assert baselines.baselines(tasks, [{"responses": ["yes", "no no"], "comparisons": [[0, 1, 1.0, 0.0]]}])["bag"] == 1


def test_a_mark_is_high_for_the_reference_and_low_for_a_short_or_a_long_reply() -> None:
    mark = recipe_module("real.reply_judge").mark
    reference = "The capital of Norway is Oslo."
    assert mark(reference, reference) == 1.0 and mark("", reference) == 0.0
    assert (
        max(mark("Oslo", reference), mark("It is a large city. " * 9, reference))
        < mark("Norway has Oslo.", reference)
        < 1
    )


def test_held_out_problems_share_no_wording_with_learned_ones_and_larger_numbers_keep_the_answer_right(
    data: Path,
) -> None:
    from recipes.real.problems import enlarged, problems
    from recipes.wordproblems import shape

    learned, held_out = problems(data)
    assert len(learned) + len(held_out) == 120 and learned and held_out
    assert not {shape(task["prompt"]) for task in learned} & {shape(task["prompt"]) for task in held_out}
    larger = enlarged(learned, random.Random(0))
    assert len(larger) == len(learned)
    for task in larger:
        left, right = (int(word) for word in re.findall(r"[0-9]+", task["prompt"]))
        assert 100 < left < 1000 and 100 < right < 1000 and int(task["answer"]) == left + right
        assert task["response"] == f"{left}+{right}"


def test_expert_iteration_keeps_each_right_and_finished_reply_once_and_always_trains_the_untrained_model() -> None:
    recipe = recipe_module("real.expert_iteration")
    tasks = [{"id": name, "prompt": f"{name}?", "answer": "3"} for name in "ab"]
    said = [("a", "1 + 2 = 3", 1.0, True), ("a", "1 + 2 = 3 ", 1.0, True), ("a", "2 + 2 = 4", 0.0, True),
            ("b", "9 - 6 = 3, and so", 1.0, False)]  # fmt: skip
    sampled_by: list[tuple[str, int]] = []
    imitated: list[list[str]] = []

    class Trial(recipe.Expert):  # type: ignore[name-defined, misc]
        def sampled(self, rows: Any, model: str) -> list[Rollout]:
            sampled_by.append((model, len(rows[0]["prompt"])))
            ends = {True: StopReason.EOS, False: StopReason.LENGTH}
            return [Rollout({"id": i}, "g", [], reward, stop=ends[end], text=text) for i, text, reward, end in said]

        def imitation(self, rows: Any, arm: str) -> str:
            imitated.append([row["response"] for row in rows])
            return f"round {len(imitated)}"

    study = SimpleNamespace(model="untrained")
    found: dict[str, float] = {}
    trial = Trial(study, 0, [], [tasks, tasks], [], [], 2)
    assert trial.expert_iteration(found) == "round 2"
    assert imitated == [["1 + 2 = 3"]] * 2  # "a" says the same twice, "b" was cut off
    assert sampled_by == [("untrained", 9), ("round 1", 1)]  # solved problems are shown in the first round alone
    assert found["right in round 1"] == 0.75 and found["rows after round 2"] == 1


def test_figures_of_expert_iteration_are_those_of_the_evaluation_under_their_names() -> None:
    recipe = recipe_module("real.expert_iteration")
    figures = {"accuracy": 0.1, "pass@8": 0.5, "maj@8": 0.2}

    def evaluate(rows: Any, env: str, model: str, **how: Any) -> Any:
        assert (how["samples"], how["k"], how["maj"], how["temperature"]) == (8, (8,), (8,), 1.0)
        replies = [Rollout({"id": "a"}, "g", [], reward, text="3") for reward in (1.0, 0.0)]
        return SimpleNamespace(figures={name: {"mean": mean} for name, mean in figures.items()}, rollouts=replies)

    study = SimpleNamespace(model="untrained", evaluate=evaluate)
    task = {"id": "a", "prompt": "a?", "answer": "3"}
    found = recipe.Expert(study, 0, [], [], [], [task], 2).measured("untrained")
    assert (found["pass@1"], found["pass@8"], found["maj@8"]) == (0.1, 0.5, 0.2)


def test_written_solutions_that_miss_the_answer_are_not_imitated() -> None:
    recipe = recipe_module("real.expert_iteration")
    task = {"response": "(5+35)/8", "answer": "5"}
    assert recipe.right(task) and recipe.solution(task) == "(5 + 35) / 8 = 5"
    assert recipe.right({"response": "5.2+4.23", "answer": "9.43"})
    assert not recipe.right({"response": "2-1", "answer": "5"}) and not recipe.right({"answer": "5"})


def test_figures_of_calls_count_every_call_and_those_that_had_a_result() -> None:
    recipe = recipe_module("real.tools")
    tool = recipe.TOOLS[0]

    def episode(*texts: str) -> Rollout:
        kinds = [SpanKind.PROMPT, *(SpanKind.TOOL if text.startswith("<out>") else SpanKind.SAMPLED for text in texts)]
        turns = [PlayedTurn(kind, text, 0, 0, 1) for kind, text in zip(kinds, ("Question", *texts), strict=True)]
        return Rollout({}, "a", [], 1.0, turns=turns)

    bad = "<out>not an expression that can be worked out</out>"
    played = [
        episode("<calc>1+</calc>", bad, "<calc>1+2</calc>", "<out>3</out>", "3"),
        episode("<calc>4*</calc>", bad, "5"),
        episode("7"),
        episode("8"),
        episode("<calc>2*2</calc>", "<out>4</out>", "4"),
    ]
    assert recipe.of_calls(played, tool) == {"calls": 0.8, "answered": 0.5, "questions with a call": 0.4}
    assert recipe.of_calls([episode("7")], tool) == {"calls": 0.0, "answered": 0.0, "questions with a call": 0.0}
