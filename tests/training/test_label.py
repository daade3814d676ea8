"""Labels by services, functions and people; the best, the pairs, noise, agreement, and a person behind a pipe."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import random
import select
import struct
import sys
import termios
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from endpoints import Said, by_length, serving, write_recipe
from items_place import furnish, read, write
from processes import FORKS, commanded
from rich.text import Text
from row_files import refused
from safetensors.torch import load_file, save_file

import posttrain
from posttrain.cli.main import main
from posttrain.cli.rank_command import Shown, read_ranking
from posttrain.data.preference_examples import to_item
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.verbs.agreement import agreement, measured, read_labels

ITEMS: list[dict[str, Any]] = [
    {"id": "0", "prompt": "say a=", "responses": ["aa", "be", "cccc", "aa"]},
    {"id": "1", "prompt": "say b=", "responses": ["long text", "x"], "source": "here"},
    {"id": "2", "messages": [{"role": "user", "content": "hi"}], "responses": ["eee", "eel", ""]},
]


@pytest.fixture
def place(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path, tokenizer)
    write(tmp_path / "items.jsonl", ITEMS)
    said = [{"prompt": "p", "responses": ["a", "b"], "scores": scores} for scores in ([0, 1], [1e300, 1])]
    write(tmp_path / "wrong.jsonl", said)
    return tmp_path


def label(by: str = "", out: str = "out.jsonl", items: Any = "items.jsonl", **options: Any) -> list[dict[str, Any]]:
    found = posttrain.label(items, by, out=out, env_workers=0, **options)
    return read(out) if found.path else []


def rewarded(text: str) -> float:
    return len(text) + 10.0 * ("e" in text)


def test_a_function_scores_every_response_with_its_parts(place: Path) -> None:
    rows = label("my.py:reward")
    for row, item in zip(rows, ITEMS, strict=True):
        assert row["scores"] == [rewarded(text) for text in item["responses"]]
        assert row["parts"][0]["long"] == len(item["responses"][0]) and row["labeller"] == "my.py:reward"
        assert {name: row[name] for name in item} == item
    [item, *_] = [to_item(row) for row in rows]
    assert item is not None and [1, 0, 1.0, 10.0] in item["comparisons"]


def test_a_reward_model_gives_what_it_gives_in_training(place: Path) -> None:
    from posttrain.services.reward_model_service import RewardModelService

    rows = label("reward-model=reward", items=ITEMS[:2])
    service = RewardModelService("reward")
    for row in rows:
        for id, text in enumerate(row["responses"]):
            service.submit(id, {"prompt": row["prompt"], "response": text})
        assert row["scores"] == [answer for _, answer in sorted(service.poll())]


def test_a_reward_model_knows_which_sampled_responses_were_cut_off(place: Path) -> None:
    from posttrain.services.reward_model_service import RewardModelService

    item = {"prompt": "say a=", "responses": ["aa", "aa b"]}
    samples = [{"stop": "eos"}, {"stop": "length"}]
    [row] = label("reward-model=reward", items=[{**item, "samples": samples}])
    service = RewardModelService("reward")
    for id, cut in ((0, False), (1, True), (2, False)):
        service.submit(id, {"prompt": "say a=", "response": item["responses"][min(id, 1)], "cut": cut})
    expected = dict(service.poll())
    assert row["scores"] == [expected[0], expected[1]] and expected[1] != expected[2]


def test_a_scalar_judge_scores_and_what_it_cannot_is_null_with_the_reason(place: Path) -> None:
    def behave(request: dict[str, Any], number: int) -> Said:
        return (
            Said("no verdict at all")
            if "[" in str(request["messages"][1]) and "cccc" in str(request)
            else by_length(request)
        )

    with serving(behave) as server:
        write_recipe(place / "judge.toml", server.address)
        rows = label("judge=judge.toml", items=ITEMS[:2], pairs="pairs.jsonl")
    assert rows[0]["scores"] == [3.0, 3.0, None, 3.0] and rows[0]["invalid"][0][0] == 2
    assert rows[1]["scores"] == [10.0, 2.0] and "invalid" not in rows[1]
    assert to_item(rows[0]) is None  # the rest is tied
    assert [(row["chosen"], row["rejected"]) for row in read("pairs.jsonl")] == [("long text", "x")]


def test_a_pairwise_judge_compares_every_pair_in_both_orders(place: Path) -> None:
    with serving() as server:
        write_recipe(place / "judge.toml", server.address, kind="pairwise")
        asked = len(server.asked)
        rows = label("judge=judge.toml")
        assert len(server.asked) - asked - 1 <= 2 * (5 + 1 + 3)
        fewer = label("judge=judge.toml", out="fewer.jsonl", comparisons=2)
    for row in rows:
        texts = row["responses"]
        by_pair = {(min(b, w), max(b, w)): b for b, w, _, _ in row["comparisons"]}
        for i, j in combinations(range(len(texts)), 2):
            if texts[i] == texts[j]:
                assert (i, j) not in by_pair
            elif len(texts[i]) == len(texts[j]):
                assert [i, j] in row["ties"]
            else:
                assert by_pair[i, j] == (i if len(texts[i]) > len(texts[j]) else j)
    assert all(
        len(row["comparisons"]) + len(row.get("ties", [])) == min(2, n) for row, n in zip(fewer, (5, 1, 3), strict=True)
    )


def test_margin_of_a_comparison_by_criteria_is_the_difference_of_their_weighted_votes(place: Path) -> None:
    def behave(request: dict[str, Any], number: int) -> Said:
        said = by_length(request).content
        assert isinstance(said, dict)
        longer = said["score"]
        return Said({"reason": "", "right": longer, "short": {"A": "B", "B": "A"}.get(longer, longer)})

    with serving(behave) as server:
        write_recipe(place / "judge.toml", server.address, kind="pairwise")
        with (place / "judge.toml").open("a") as file:
            file.write(
                '[[criteria]]\nname = "right"\nrubric = "r"\nweight = 3\n[[criteria]]\nname = "short"\nrubric = "s"\n'
            )
        [row] = label("judge=judge.toml", items=ITEMS[1:2])
    assert row["comparisons"] == [[0, 1, 1.0, 3 / 4 - 1 / 4]]


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("circle", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
        pytest.param("/proc/self/mem", "cannot", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux's")),
    ],
)
def test_an_output_that_cannot_be_one_is_refused(place: Path, out: str, why: str) -> None:
    (place / "circle").symlink_to("circle")
    refused(lambda: label("my.py:reward", out=out), out[:200], why)
    if out.startswith("x"):
        refused(lambda: label("my.py:reward", best=out), out[:200], why)


@pytest.mark.parametrize("damage", ["[" * 100_000, "[]", "{}", "null", '{"day": 5}', '{"day": "soon"}'])
def test_what_says_from_what_rows_were_made_is_whole_or_refused(place: Path, damage: str) -> None:
    label("my.py:reward")
    (place / ".out.jsonl.made").write_text(damage)
    refused(lambda: label("my.py:reward", resume=True), ".out.jsonl.made", "missing or damaged")


def test_a_file_that_was_cut_off_within_a_block_is_continued_without_repetitions(place: Path) -> None:
    rows = label("my.py:reward")
    whole = (place / "out.jsonl").read_bytes()
    (place / "out.jsonl").write_bytes(whole[: whole.index(b"\n") + 9])
    assert label("my.py:reward", resume=True) == rows and (place / "out.jsonl").read_bytes() == whole


def test_an_outage_costs_no_labels_and_is_continued(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.training.verbs import label as label_verb

    monkeypatch.setattr(label_verb, "BLOCK", 1)
    (place / "down").touch()
    Path("may.py").write_text(
        "import os\nfrom posttrain import Invalid\n\ndef reward(task, reply):\n"
        "    down = task['id'] == '1' and os.path.exists('down')\n"
        "    return Invalid('the service is down') if down else float(len(reply))\n"
    )
    refused(lambda: label("may.py:reward"), "none of rows 2 to 2", "the service is down", "--resume")
    assert len(read("out.jsonl")) == 1
    (place / "down").unlink()
    label("may.py:reward", resume=True)
    label("may.py:reward", out="whole.jsonl")
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()


def test_best_of_n_is_the_argmax_and_rejection_sampling_keeps_what_is_good_enough(place: Path) -> None:
    label("my.py:reward", best="best.jsonl")
    best = read("best.jsonl")
    assert [row["response"] for row in best[:2]] == ["be", "long text"]
    assert best[2]["messages"] == [*ITEMS[2]["messages"], {"role": "assistant", "content": "eee"}]
    assert best[0]["score"] == 12 and best[1]["source"] == "here" and best[0]["item"] == "0"
    noted = {"id": "n", "prompt": "p", "responses": ["a", "b"], "scores": [1.0, 2.0]}
    write(place / "noted.jsonl", [{**noted, "samples": [{"stop": "eos"}, {"stop": "length"}]}])
    posttrain.label("noted.jsonl", best="ends.jsonl", top=2)
    assert [(row["response"], row["response_stop"]) for row in read("ends.jsonl")] == [("b", "length"), ("a", "eos")]
    posttrain.label("out.jsonl", best="many.jsonl", top=9, at_least=4.0)
    assert [row.get("response") for row in read("many.jsonl")] == ["be", "cccc", "long text", None, None]
    refused(lambda: label("", items="out.jsonl", best="none.jsonl", at_least=99.0), "would be empty", "at least 99")
    assert not Path("none.jsonl").exists()


def test_pairs_are_the_extremes_or_random_ones_with_the_margin(place: Path) -> None:
    rng = random.Random(0)
    rows = [{"id": str(i), "prompt": f"{i}", "responses": [f"r{j}" for j in range(5)],
             "scores": [rng.choice([0.0, 1.0, 2.5, None]) for _ in range(5)]} for i in range(60)]  # fmt: skip
    write(place / "scored.jsonl", rows)
    posttrain.label("scored.jsonl", pairs="extremes.jsonl", margin=1.2)
    posttrain.label("scored.jsonl", pairs="random.jsonl", pair="random", margin=1.2)
    by_id = {row["id"]: row for row in rows}
    enough = 0
    for row in rows:
        known = [s for s in row["scores"] if s is not None]
        enough += bool(known) and max(known) - min(known) >= 1.2
    differing = 0
    for extreme, other in zip(read("extremes.jsonl"), read("random.jsonl"), strict=True):
        scores = dict(zip(by_id[extreme["item"]]["responses"], by_id[extreme["item"]]["scores"], strict=True))
        known = [s for s in scores.values() if s is not None]
        assert scores[extreme["chosen"]] == max(known) and scores[extreme["rejected"]] == min(known)
        for pair in (extreme, other):
            assert scores[pair["chosen"]] - scores[pair["rejected"]] == pair["margin"] >= 1.2
        differing += (extreme["chosen"], extreme["rejected"]) != (other["chosen"], other["rejected"])
    assert len(read("extremes.jsonl")) == enough and differing > 5


def test_flips_turn_the_share_of_comparisons_and_the_same_of_the_pairs(place: Path) -> None:
    rng = random.Random(1)
    said = [{"prompt": str(i), "responses": ["a", "b", "c"]} for i in range(400)]
    rows = [{"id": each["prompt"], **each, "scores": [rng.random() for _ in range(3)]} for each in said]
    write(place / "scored.jsonl", rows)
    flipped = label("", items="scored.jsonl", flip=0.1, pairs="pairs.jsonl")
    wrong = 0
    for row in flipped:
        scores = row["scores"]
        turned = [[b, w] for b, w, _, _ in row["comparisons"] if scores[b] < scores[w]]
        assert turned == row["flipped"] and len(row["comparisons"]) == 3
        assert all(margin == abs(scores[b] - scores[w]) for b, w, _, margin in row["comparisons"])
        item = to_item(row)
        assert item is not None and item["comparisons"] == row["comparisons"]
        wrong += len(turned)
    assert 80 < wrong < 165  # 120 of 1200 are expected, 10.4 the standard deviation
    assert sum(len(row["flipped"]) == 3 for row in flipped) < 5  # 0.4: each for itself
    for row, pair in zip(flipped, read("pairs.jsonl"), strict=True):
        scores = row["scores"]
        best, worst = scores.index(max(scores)), scores.index(min(scores))
        better, worse = (worst, best) if [worst, best] in row["flipped"] else (best, worst)
        assert [pair["chosen"], pair["rejected"]] == ["abc"[better], "abc"[worse]]
    again = label("", out="again.jsonl", items="scored.jsonl", flip=0.1, seed=1)
    assert again != flipped


def test_values_of_comparisons_count_shares_and_flips_are_undone_in_them(place: Path) -> None:
    votes = {"id": "v", "prompt": "p", "responses": ["a", "b", "c"],
             "comparisons": [[0, 1, 0.6], [1, 0, 0.4], [1, 2, 1.0], [0, 2, 0.25]]}  # fmt: skip
    [turned] = label("", items=[votes], flip=1.0, best="best.jsonl", pairs="pairs.jsonl")
    worth = {"a": 0.6 - 0.4 + 0.25, "b": 0.4 - 0.6 + 1.0, "c": -1.25}
    [best], [pair] = read("best.jsonl"), read("pairs.jsonl")
    assert best["response"] == "b" and best["score"] == pytest.approx(worth["b"])
    assert (pair["chosen"], pair["rejected"]) == ("c", "b")  # the best and the worst, turned round
    assert pair["margin"] == pytest.approx(worth["b"] - worth["c"])
    assert [c[2] for c in turned["comparisons"]] == [0.6, 0.4, 1.0, 0.25]


def test_pairs_are_of_different_responses_that_say_something_and_know_which_was_cut_off(place: Path) -> None:
    responses, scores = ["ends", "ends", "cut of", " ", "middle"], [1.0, 3.0, 0.0, -9.0, 2.0]
    samples = [{"stop": stop} for stop in ("eos", "eos", "length", "eos", "eos")]
    said = [
        {"id": f"{i}", "prompt": f"{i}", "responses": responses, "scores": scores, "samples": samples}
        for i in range(40)
    ]
    write(place / "said.jsonl", [*said, {**said[0], "id": "skipped", "skipped": True}])
    posttrain.label("said.jsonl", best="best.jsonl", top=9, pairs="extremes.jsonl", margin=3.0)
    assert [(row["item"], row["response"]) for row in read("best.jsonl")][:4] == [
        ("0", "ends"), ("0", "middle"), ("0", "cut of"), ("1", "ends"),
    ]  # fmt: skip
    assert [row["item"] for row in read("extremes.jsonl")] == [
        f"{i}" for i in range(40)
    ]  # a difference of just 3 is enough
    pair = read("extremes.jsonl")[0]
    assert (pair["chosen"], pair["rejected"], pair["margin"]) == ("ends", "cut of", 3.0)
    assert (pair["chosen_stop"], pair["rejected_stop"]) == ("eos", "length")
    drawn = []
    for seed in (0, 1):
        posttrain.label("said.jsonl", pairs=f"random{seed}.jsonl", pair="random", seed=seed)
        drawn.append([(row["chosen"], row["rejected"], row["margin"]) for row in read(f"random{seed}.jsonl")])
    assert set(drawn[0]) == set(drawn[1]) and drawn[0] != drawn[1]  # each item draws for itself, and each seed
    assert set(drawn[0]) == {
        ("ends", "cut of", 1.0), ("ends", "cut of", 3.0), ("ends", "middle", 1.0), ("middle", "ends", 1.0),
        ("middle", "cut of", 2.0),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("row", "responses", "comparisons"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, ["a", "b"], 1),
        ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}, [" a", " b"], 1),
        (
            {"prompt": "p", "responses": ["a", "b", "c"], "pairs": [[0, 1], [1, 2]], "preferred": [1, 2]},
            ["a", "b", "c"],
            2,
        ),
        ({"prompt": "p", "response": "a", "label": True}, ["a"], 0),
    ],
)
def test_published_forms_are_labelled(place: Path, row: dict[str, Any], responses: list[str], comparisons: int) -> None:
    [found] = label("my.py:reward", items=[row])
    assert found["responses"] == responses and found["scores"] == [rewarded(text) for text in responses]
    assert not {"chosen", "rejected", "preferred", "response"} & found.keys()
    if comparisons:
        [turned] = label("", out="turned.jsonl", items=[row], flip=1.0)
        before = to_item(row)
        assert before is not None and len(turned["comparisons"]) == comparisons
        item = to_item(turned)
        assert item is not None
        assert [c[:2] for c in item["comparisons"]] == [[w, b] for b, w, *_ in before["comparisons"]]


# -- agreement ---------------------------------------------------------------------------------------------------------


def naive(first: list[list[int]], second: list[list[int]]) -> tuple[float, float]:
    """Raw agreement and Cohen's kappa over all pairs of replies, written from the definition."""
    said = []
    for a, b in zip(first, second, strict=True):
        for i, j in combinations(range(len(a)), 2):
            said.append(((a[i] > a[j]) - (a[i] < a[j]), (b[i] > b[j]) - (b[i] < b[j])))
    raw = sum(x == y for x, y in said) / len(said)
    chance = sum(
        (sum(x == c for x, _ in said) / len(said)) * (sum(y == c for _, y in said) / len(said)) for c in (-1, 0, 1)
    )
    return raw, (raw - chance) / (1 - chance)


def test_agreement_is_cohens_kappa_over_shared_comparisons(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(3)
    ranks = [[rng.randint(1, 3) for _ in range(4)] for _ in range(40)]
    others = [[r if rng.random() < 0.7 else rng.randint(1, 3) for r in own] for own in ranks]
    items = [{"id": str(i), "prompt": f"{i}", "responses": ["a", "b", "c", "d"]} for i in range(40)]
    first = [{**item, "ranks": own} for item, own in zip(items, ranks, strict=True)]
    second = [{**item, "ranks": own} for item, own in zip(items, others, strict=True)]
    found = agreement(first, second)
    raw, kappa = naive(ranks, others)
    assert found.raw.mean == pytest.approx(raw) and found.kappa.mean == pytest.approx(kappa)
    assert found.comparisons == 240 and found.kappa.low < kappa < found.kappa.high
    turned = [
        {**row, "responses": row["responses"][::-1], "ranks": row["ranks"][::-1], "id": "x"} for row in second[::-1]
    ]
    assert agreement(first, turned) == found  # another order of items and of their responses
    skipped = [{**second[0], "skipped": True}, *second[1:]]
    assert agreement(first, skipped).prompts == 39
    write(place / "a.jsonl", first)
    write(place / "b.jsonl", second)
    assert main(["label", "--agreement", "a.jsonl", "b.jsonl"]) == 0
    assert f"Cohen's kappa {kappa:.3f} [" in capsys.readouterr().out
    write(place / "c.jsonl", [{**second[0], "prompt": "another"}])
    assert main(["label", "--agreement", "a.jsonl", "c.jsonl"]) == 2
    assert "share no comparison" in capsys.readouterr().err


@pytest.mark.parametrize(
    "said",
    [
        {"ranks": [2, 1, 2]},
        {"scores": [0.5, 3.0, 0.5]},
        {"comparisons": [[1, 0], [1, 2, 0.5]], "ties": [[2, 0]]},
        {"comparisons": [[1, 0, 0.7], [0, 1, 0.3], [2, 1, 0.4], [1, 2, 0.6], [0, 2, 0.5], [2, 0, 0.5]]},
        {"pairs": [[0, 1], [2, 1], [1, 2], [2, 0]], "preferred": [2, 2, 1, 0]},
        {"scores": [0.5, 3.0, 0.5], "pairs": [[0, 1]], "preferred": [1]},  # scored anew
        {"scores": [3.0, 0.5, 3.0], "comparisons": [[1, 0, 1.0, 2.5], [1, 2, 1.0, 2.5]], "ties": [[0, 2]]},  # flipped
    ],
)
def test_agreement_of_two_who_say_the_same_is_whole_whatever_the_form(place: Path, said: dict[str, Any]) -> None:
    item = {"prompt": "p", "responses": ["a", "b", "c"]}
    rows = [{"prompt": p, "responses": ["a", "b"], "scores": scores} for p, scores in (("q", [1, 0]), ("r", [0, 1]))]
    ranks = {**item, "ranks": [7, 1, 7]}
    write(place / "a.jsonl", [{**item, **said}, *rows])
    found = agreement(read_labels("a.jsonl"), [ranks, *rows])
    assert found.comparisons == 5 and found.ties == (1, 1) and found.raw.mean == found.kappa.mean == 1.0


def test_agreement_tells_whose_ties_which_prompt_and_leaves_what_either_skipped() -> None:
    first = [
        {"prompt": p, "responses": ["a", "b", "c"], "ranks": ranks} for p, ranks in (("p", [1, 1, 1]), ("q", [1, 2, 3]))
    ]
    second = [{**row, "ranks": ranks} for row, ranks in zip(first, ([1, 2, 2], [3, 2, 1]), strict=True)]
    found = agreement(first, second)
    assert (found.comparisons, found.ties, found.decided) == (6, (3, 1), 3)
    assert found.raw.mean == pytest.approx(1 / 6) and found.raw_decided.mean == 0.0
    # the first says 3 ties and 3 times "better", the second 1 tie, twice "better" and 3 times "worse"
    chance = (3 * 2 + 0 * 3 + 3 * 1) / 36
    assert found.kappa.mean == pytest.approx((1 / 6 - chance) / (1 - chance)) and found.kappa_decided.mean == 0.0
    for skipped in (
        ([{**first[0], "skipped": True}, first[1]], second),
        (first, [{**second[0], "skipped": True}, second[1]]),
    ):
        assert agreement(*skipped).comparisons == 3


def test_intervals_of_agreement_are_clustered_by_prompt() -> None:
    counts = np.zeros((30, 3, 3))
    for prompt in range(30):
        counts[prompt, 0, prompt % 2] = 1
    alone, tenfold = measured(counts), measured(counts * 10)
    assert tenfold.comparisons == 10 * alone.comparisons
    assert (tenfold.raw.low, tenfold.raw.high) == (alone.raw.low, alone.raw.high)
    assert "undefined" in str(measured(np.array([[[3.0, 0, 0], [0, 0, 0], [0, 0, 0]]])).kappa)


# -- a person ----------------------------------------------------------------------------------------------------------

HUMAN = ["label", "--items", "items.jsonl", "--human", "--rater", "ann", "--out", "ann.jsonl"]


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("2 1=3 4", [[2], [1, 3], [4]]),
        ("2>1 = 3, 4", [[2], [1, 3], [4]]),
        ("1=2=3=4", [[1, 2, 3, 4]]),
        ("2 1 3", "reply 4 is missing"),
        ("2 1 3 3", "reply 3 is there twice"),
        ("5 1 2 3", "there is no reply 5"),
        ("best", "give the numbers"),
        ("1=", "give the numbers"),
        ("٢ 1 3 4", "give the numbers"),
    ],
)
def test_rankings_are_read_with_ties(said: str, found: Any) -> None:
    read = read_ranking(said, 4)
    assert read == found if isinstance(found, list) else str(read).startswith(found)


def test_a_person_ranks_through_a_pipe_undoes_skips_quits_and_resumes(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(said: str, *more: str) -> str:
        theirs, ours = os.pipe()
        os.write(ours, said.encode())
        os.close(ours)
        with open(theirs) as pipe:
            monkeypatch.setattr("sys.stdin", pipe)
            assert main([*HUMAN, *more]) == 0
        return capfd.readouterr().out

    out = run("nonsense\nu\n3 1=2\nu\n2 1=3\nq\n")
    assert "give the numbers" in out and "there is nothing to undo" in out and "1 of 3 items by ann" in out
    whole = run("s\n", "--resume")  # and then the input ends
    assert "2 of 3 items by ann, 1 of them skipped" in whole
    out = run("1 2 3\n", "--resume", "--pairs", "pairs.jsonl")
    assert "3 of 3" in out
    rows = read("ann.jsonl")
    order = Shown.of(rows[0], "ann", 0).order
    assert rows[0]["shown"] == list(order) and sorted(order) == [0, 1, 2]  # "aa" stands there twice
    best = order[1]
    texts = rows[0]["responses"]
    assert rows[0]["ranks"] == [1 if text == texts[best] else 2 for text in texts]
    assert rows[1]["skipped"] and to_item(rows[1]) is None
    order = Shown.of(rows[2], "ann", 0).order
    assert [rows[2]["ranks"][place] for place in order] == [1, 2, 3]
    assert [row["item"] for row in read("pairs.jsonl")] == ["0", "2"]


def test_positions_say_nothing(place: Path) -> None:
    tasks = [{"id": str(i), "responses": ["a", "b", "c"]} for i in range(300)]
    firsts = [Shown.of(task, "ann", 0).order[0] for task in tasks]
    assert all(70 < firsts.count(place) < 130 for place in range(3))
    assert [Shown.of(task, "bob", 0).order for task in tasks] != [Shown.of(task, "ann", 0).order for task in tasks]


HOSTILE = ["\x1b[2J\x1b[31mred\x07\x1b]0;title\x07", "w" * 20_000, "👩‍👩‍👧‍👦 emoji 漢字 " * 30, "a\u202eb\r\nc\x00\t."]


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.long) for count in (3, 5))])
def test_an_item_fits_the_terminal_until_all_of_it_is_asked_for(place: Path, count: int) -> None:
    replies = [f"{number} " + "many words to read " * 100 for number in range(count)]
    write(place / "items.jsonl", [{"id": "0", "prompt": "asked " * 200, "responses": replies}])
    rows = 30
    screen = Text.from_ansi(on_terminal(["q"], columns=80, rows=rows)).plain
    assert len(screen[: screen.index("> ")].rstrip("\n").split("\n")) < rows
    assert all(f"│ {number} many words" in screen for number in range(count))
    whole = Text.from_ansi(on_terminal(["a", "q"], columns=80, rows=rows)).plain
    assert sum(line.count("many") for line in whole.split("\n")) > 100 * count


def test_hostile_replies_cannot_act_on_a_terminal(place: Path) -> None:
    plain = {"id": "1", "prompt": "q", "responses": ["left", "right"]}
    write(place / "items.jsonl", [{"id": "0", "prompt": "\x1b[31mq", "responses": HOSTILE}, plain])
    screen = on_terminal(["4 3 2 1", "2=1"], columns=80, rows=24)
    assert "2 of 2 items by ann" in screen
    left = screen
    for code in ("\x1b[2J", "\x1b[31m", "\x07", "\x1b]", "\x00", "\u202e"):
        assert code not in left, code
    assert "\\x1b[2J" in screen and " more (a: show all)" in screen
    from rich.cells import cell_len

    lines = Text.from_ansi(screen).plain.split("\n")
    assert max(cell_len(line) for line in lines) <= 80
    assert any("left" in line and "right" in line for line in lines)  # two fit side by side
    assert len(read("ann.jsonl")) == 2


def on_terminal(answers: list[str], columns: int, rows: int) -> str:
    """What the command writes to a terminal of that size where these answers are typed, one at each prompt."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    settings = termios.tcgetattr(theirs)
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    environment = {"TERM": "xterm-256color", "PAGER": "cat", "COLUMNS": ""}  # a pager would wait for keys
    process = FORKS.Process(target=commanded, args=(HUMAN, Path.cwd(), environment, os.ttyname(theirs)))
    process.start()
    screen, left, end = b"", list(answers), time.monotonic() + 120
    while time.monotonic() < end:
        if not select.select([ours], [], [], 0.1)[0]:
            if process.is_alive():
                continue
            break
        screen += os.read(ours, 65536)
        if left and screen.endswith(b"> "):
            os.write(ours, left.pop(0).encode() + b"\n")
            screen += b"\n"
    process.join(30)
    assert process.exitcode == 0
    os.close(theirs)
    os.close(ours)
    return screen.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--items", "items.jsonl"], "nothing to do"),
        (["--with", "my.py:reward"], "--items is missing"),
        (["--items", "items.jsonl", "--with", "jugde=x"], "is not a labeller"),
        (["--items", "items.jsonl", "--with", "judge"], "is not a labeller"),
        (["--items", "items.jsonl", "--with", "judge=none.toml"], "there is no such file"),
        (["--items", "items.jsonl", "--with", "my.py:nothing"], "my.py has no 'nothing'"),
        (["--items", "items.jsonl", "--with", "my.py:twice", "--env-workers", "0"], "asks for a second reply"),
        (["--items", "items.jsonl", "--with", "my.py:never", "--env-workers", "0"], "the service is down"),
        (["--items", "rows.jsonl", "--with", "my.py:reward"], "rows.jsonl:1: the row has id, prompt, answer"),
        (["--items", "items.jsonl", "--best", "b.jsonl"], "items.jsonl:1: the responses have no labels"),
        (["--items", "wrong.jsonl", "--best", "b.jsonl"], "wrong.jsonl:2: value 1 of scores must be a finite number"),
        (["--items", "my.py", "--with", "my.py:reward"], "my.py"),
        (["--items", "items.jsonl", "--with", "my.py:reward", "--out", "items.jsonl"], "are both items.jsonl"),
        (["--items", "items.jsonl", "--with", "my.py:reward", "--margin", "1"], "--margin has no effect"),
        (["--items", "items.jsonl", "--with", "my.py:reward", "--comparisons", "1"], "pairwise judge"),
        (["--items", "items.jsonl", "--human"], "--rater is missing"),
        (["--items", "items.jsonl", "--human", "--with", "my.py:reward", "--rater", "a"], "exclude each other"),
        (["--agreement", "items.jsonl", "none.jsonl"], "the responses have no labels"),
    ],
)
def test_mistakes_are_told_in_one_line(
    place: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["label", *words]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1, said
    assert not Path("out.jsonl").exists()


def test_labels_of_another_judge_or_reward_model_are_not_continued(place: Path) -> None:
    with serving() as server:
        write_recipe(place / "judge.toml", server.address)
        label("judge=judge.toml", out="judged.jsonl")
        write_recipe(place / "judge.toml", server.address, rubric="Be kind.")
        refused(lambda: label("judge=judge.toml", out="judged.jsonl", resume=True), "cannot resume judged.jsonl")
    label("reward-model=reward", items=ITEMS[:2])
    file = place / "reward/model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] *= 2  # the head is the same
    save_file(weights, file, {"format": "pt"})
    refused(lambda: label("reward-model=reward", items=ITEMS[:2], resume=True), "reward model has changed")


def test_labels_of_other_items_are_not_continued(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label("my.py:reward")
    refused(lambda: label("my.py:reward", items=ITEMS[:2], resume=True), "cannot resume out.jsonl: items has changed")
    refused(lambda: label("my.py:digits", resume=True), "cannot resume out.jsonl: with_ was")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main([*HUMAN[:-1], "out.jsonl", "--resume"]) == 2
    assert json.loads(Path("out.jsonl").read_text().splitlines()[0])["scores"]
