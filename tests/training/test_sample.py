"""Items that are sampled: the same for any batch, whole grids, more where replies disagree, continued after a kill."""

from __future__ import annotations

import fcntl
import resource
import shutil
import time
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from items_place import ROWS, furnish, read, write
from processes import FORKS, commanded
from rapidfuzz.distance import Indel
from row_files import refused

import posttrain
from posttrain.cli.main import main
from posttrain.core.batch import Layout
from posttrain.core.types import UserError
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.jsonl_writer import Lines


@pytest.fixture
def place(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path, tokenizer)
    return tmp_path


def sample(out: str, **options: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {
        "model": "start",
        "samples": 3,
        "max_tokens": 8,
        "quiet": True,
        "env_workers": 0,
        **options,
    }
    found = posttrain.sample(given.pop("rows", "rows.jsonl"), out=out, **given)
    rows = read(out)
    assert found.items == len(rows)
    return rows


def test_the_same_file_for_any_number_of_slots_and_in_any_order_of_rows(place: Path) -> None:
    rows = sample("a.jsonl", temperature=(0.7, 1.0))
    sample("b.jsonl", temperature=(0.7, 1.0), slots=1)
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    turned = sample("c.jsonl", temperature=(1.0, 0.7), rows=ROWS[::-1], slots=5)
    by_place = {row["id"]: row["responses"] for row in rows}
    for row in turned:  # the temperatures stand the other way round, too
        assert row["responses"][3:] + row["responses"][:3] == by_place[row["id"]]
    assert len({text for row in rows for text in row["responses"]}) > len(rows) * 5


def test_replies_of_other_cells_are_drawn_apart(place: Path) -> None:
    """Of settings that hardly differ, and of equal checkpoints, the same random numbers would draw the same replies."""
    shutil.copytree("start", "twin")
    heats, shares = (1.0, 1.000001), (0.999999, 1.0)
    rows = sample("a.jsonl", model=("start", "twin"), samples=2, temperature=heats, top_p=shares)
    cells = {tuple(text for row in rows for text in row["responses"][c : c + 2]) for c in range(0, 16, 2)}
    assert len(cells) == 8


def test_the_grid_is_complete_and_each_reply_says_how_it_was_sampled(place: Path) -> None:
    rows = sample("a.jsonl", model=("start", "other"), samples=2, temperature=(0.7, 1.0), top_p=(0.8, 1.0), seed=(0, 5))
    cells = list(product(("start", "other"), (0.7, 1.0), (0.8, 1.0), (0, 5), (0, 1)))
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    for row, given in zip(rows, ROWS, strict=True):
        names = ("model", "temperature", "top_p", "seed", "member")
        assert [tuple(how[name] for name in names) for how in row["samples"]] == cells
        assert len(row["responses"]) == len(cells) and "scores" not in row
        assert {name: row[name] for name in given} == given


def test_the_mean_log_probability_is_that_of_the_tokens_under_the_temperature(
    place: Path, tokenizer: Tokenizer
) -> None:
    model = load_model(place / "start")
    [row, *_] = sample("a.jsonl", samples=4, temperature=(0.7,))
    how, text = next(
        (how, text) for how, text in zip(row["samples"], row["responses"], strict=True)
        if how["stop"] == "length" and "<" not in text
    )  # fmt: skip
    prompt, said = tokenizer.encode(row["prompt"], start=True), tokenizer.encode(text)
    assert len(said) == how["tokens"] == 8
    total = 0.0
    for place_, token in enumerate(said):
        logits = next_logits(model, [*prompt, *said[:place_]]) / 0.7
        total += float(torch.log_softmax(logits.double(), -1)[token])
    assert how["mean_logp"] == pytest.approx(total / 8, abs=1e-4)


def next_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    layout = Layout(torch.tensor(tokens), torch.arange(len(tokens)), (0,), (len(tokens),), (-1,))
    with torch.no_grad():
        hidden: torch.Tensor = model.hidden(layout, torch.tensor([len(tokens) - 1]))
        return hidden[0] @ model.head.weight.T


def test_kinds_of_prompts_have_their_own_settings(place: Path) -> None:
    recipe = place / "recipe.toml"
    recipe.write_text(
        '[sample]\ntasks = "rows.jsonl"\nmodel = ["start"]\nsamples = 2\nmax_tokens = 6\nkind = "topic"\nout = "a.jsonl"\n'
        "quiet = true\n[sample.kinds.b]\ntemperature = [0.5, 0.9]\nmax_tokens = 3\nsamples = 1\n"
    )
    assert main(["sample", "--config", "recipe.toml"]) == 0
    for row in read("a.jsonl"):
        expected = [(1.0, 6)] * 2 if row["topic"] == "a" else [(0.5, 3), (0.9, 3)]
        assert [(how["temperature"], how["max_tokens"]) for how in row["samples"]] == expected
        assert all(how["tokens"] <= how["max_tokens"] for how in row["samples"])


def test_adaptive_samples_more_only_where_the_first_replies_disagree(place: Path) -> None:
    few, many = sample("few.jsonl", samples=2), sample("many.jsonl", samples=6)
    unlike = {
        row["id"]: 1 - sum(Indel.normalized_similarity(a, b) for a, b in combinations(row["responses"], 2))
        for row in few
    }
    bound = sorted(unlike.values())[3]
    found = sample("found.jsonl", samples=2, adaptive=6, disagreement=bound)
    for row, small, large in zip(found, few, many, strict=True):
        assert row["responses"] == (large if unlike[row["id"]] >= bound else small)["responses"]
    assert {len(row["responses"]) for row in found} == {2, 6}


def test_adaptive_goes_by_scores_where_there_are_any(place: Path) -> None:
    found = sample("found.jsonl", env="my.py:digits", samples=3, adaptive=5)
    assert {len(row["responses"]) for row in found} == {3, 5}
    for row in found:
        first = row["scores"][:3]
        assert len(row["scores"]) == (5 if max(first) != min(first) else 3)


def test_an_environment_scores_with_its_parts_and_invalid_is_null(place: Path) -> None:
    for row in sample("a.jsonl", env="my.py:reward"):
        long = [float(len(text)) for text in row["responses"]]
        assert row["parts"] == [
            {"long": n, "e": 10.0 * ("e" in t)} for n, t in zip(long, row["responses"], strict=True)
        ]
        assert row["scores"] == [part["long"] + part["e"] for part in row["parts"]]
    rows = sample("b.jsonl", env="my.py:strict", samples=8)
    assert any(None in row["scores"] for row in rows)
    for row in rows:
        assert row["scores"] == [None if len(text) < 4 else len(text) for text in row["responses"]]
        assert [place for place, _ in row.get("invalid", [])] == [i for i, s in enumerate(row["scores"]) if s is None]


def test_a_reward_model_scores_while_sampling(place: Path) -> None:
    from posttrain.services.reward_model_service import RewardModelService

    [row, *_] = sample("a.jsonl", reward_model=("reward",))
    service = RewardModelService("reward")
    for id, (text, how) in enumerate(zip(row["responses"], row["samples"], strict=True)):
        service.submit(id, {"prompt": row["prompt"], "response": text, "cut": how["stop"] == "length"})
    assert row["scores"] == [answer for _, answer in sorted(service.poll())]


def test_equal_replies_are_kept_once_if_asked_for(place: Path) -> None:
    options = {"samples": 8, "max_tokens": 1, "temperature": (0.3,)}
    every, once = sample("every.jsonl", **options), sample("once.jsonl", distinct=True, **options)
    assert any(len(row["responses"]) < 8 for row in once)
    for row, whole in zip(once, every, strict=True):
        assert row["responses"] == list(dict.fromkeys(whole["responses"]))
        assert [how["times"] for how in row["samples"]] == [whole["responses"].count(text) for text in row["responses"]]


def test_published_pairs_are_sampled_anew_from_their_prompts(place: Path) -> None:
    said = [{"chosen": "\n\nHuman: hi\n\nAssistant: a", "rejected": "\n\nHuman: hi\n\nAssistant: b"}]
    [row] = sample("a.jsonl", rows=said)
    assert row["prompt"] == "\n\nHuman: hi\n\nAssistant:" and not {"chosen", "rejected"} & row.keys()


COMMAND = ["sample", "--tasks", "many.jsonl", "--model", "start", "--samples", "4", "--max-tokens", "20", "--slots", "4",
           "--out", "killed.jsonl"]  # fmt: skip


def test_a_killed_command_is_continued_to_the_same_bytes(place: Path) -> None:
    write(place / "many.jsonl", [{"id": str(i), "prompt": f"say {i}="} for i in range(60)])
    process = FORKS.Process(target=commanded, args=([*COMMAND, "--quiet"], place))
    process.start()
    out = place / "killed.jsonl"
    end = time.monotonic() + 120
    while not (out.exists() and out.stat().st_size > 3000):
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.001)
    process.kill()
    process.join()
    before = out.read_bytes()
    assert 0 < before.count(b"\n") < 60
    with out.open("ab") as file:
        file.write(b'{"id": "half a l')
    assert main([*COMMAND, "--resume", "--quiet"]) == 0
    whole = [word if word != "killed.jsonl" else "whole.jsonl" for word in COMMAND]
    assert main([*whole, "--quiet"]) == 0
    assert out.read_bytes() == (place / "whole.jsonl").read_bytes()
    assert out.read_bytes().startswith(before[: before.rindex(b"\n") + 1])


def test_a_file_that_another_process_writes_is_left_alone(place: Path) -> None:
    sample("a.jsonl")
    kept = Path("a.jsonl").read_bytes()
    with Path("a.jsonl").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(lambda: sample("a.jsonl", resume=True), "is being written by another process")
    assert Path("a.jsonl").read_bytes() == kept
    Path(".a.jsonl.made").unlink()
    refused(lambda: sample("a.jsonl", resume=True), ".a.jsonl.made", "missing or damaged", "--overwrite")


def test_a_disk_that_is_full_is_told_in_one_line_and_costs_no_row_that_was_written(tmp_path: Path) -> None:
    file, soft_and_hard = tmp_path / "rows.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(UserError, match="cannot write to"), Lines(file, {}, False, False) as lines:
            lines.write([{"row": 1}])
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, soft_and_hard[1]))
            lines.write([{"row": "x" * 5000}])  # less than the buffer of the file
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_and_hard)
    with Lines(file, {}, True, False) as lines:
        assert [*lines] == [{"row": 1}]


def test_a_file_of_other_options_tasks_or_weights_is_not_continued(place: Path, tokenizer: Tokenizer) -> None:
    sample("a.jsonl")
    kept = Path("a.jsonl").read_bytes()
    refused(lambda: sample("a.jsonl"), "--out a.jsonl is there already", "--resume", "--overwrite")
    refused(lambda: sample("a.jsonl", resume=True, samples=4), "cannot resume a.jsonl", "samples was 3 and is 4")
    refused(lambda: sample("a.jsonl", resume=True, rows=ROWS[:3]), "tasks has changed")
    weights = Path("other/model.safetensors").read_bytes()
    Path("start/model.safetensors").write_bytes(weights)
    refused(lambda: sample("a.jsonl", resume=True), "model start has changed")
    refused(lambda: sample("a.jsonl", overwrite=True, model="none"), "none")
    assert Path("a.jsonl").read_bytes() == kept
    assert sample("a.jsonl", overwrite=True, rows=ROWS[:2]) == sample("b.jsonl", rows=ROWS[:2])
    sample("scored.jsonl", reward_model=("reward",))
    Path("reward/model.safetensors").write_bytes(weights)
    refused(
        lambda: sample("scored.jsonl", reward_model=("reward",), resume=True), "reward model reward-model has changed"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model": ()}, "--model is missing"),
        ({"samples": 40, "temperature": (0.5, 1.0)}, "80 replies, and a row holds at most 64"),
        ({"temperature": (0.5, 0.5)}, "--temperature has 0.5 twice"),
        ({"adaptive": 3}, "--adaptive 3 must be above --samples 3"),
        ({"kind": "topic"}, "has no effect without --kinds"),
        ({"kind": "tpoic", "kinds": {"a": {"samples": 2}}}, "no row has this column"),
        ({"kind": "topic", "kinds": {"c": {"samples": 2}}}, "--kinds.c: no prompt is of this kind"),
        ({"kind": "topic", "kinds": {"a": {"sample": 2}}}, "did you mean"),
        ({"kind": "topic", "kinds": {"a": {"temperature": -1}}}, "--kinds.a.temperature"),
        (
            {"adaptive": 8, "env": "my.py:ranked"},
            "scores whole groups, as it samples part of a group later: use --samples 8",
        ),
        ({"env": "my.py:twice"}, "asked for several replies"),
    ],
)
def test_mistakes_are_told_in_one_line(place: Path, options: dict[str, Any], told: str) -> None:
    refused(lambda: sample("a.jsonl", **options), told)
    assert not Path("a.jsonl").exists() and not list(Path().glob(".*.made"))


def test_greedy_sampling_replies_once(place: Path) -> None:
    for row in sample("a.jsonl", temperature=(0.0, 1.0), top_p=(0.9, 1.0), seed=(0, 1)):
        assert [how["temperature"] for how in row["samples"]] == [0.0] + [1.0] * 12


def test_the_file_is_one_that_other_verbs_read(place: Path) -> None:
    sample("a.jsonl", env="my.py:reward")
    from posttrain.data.preference_examples import to_item

    for row in read("a.jsonl"):
        texts = zip(row["responses"], row["scores"], strict=True)
        item, told = to_item(row), len({score for text, score in texts if text.strip()}) > 1  # equal scores say nothing
        assert (item is not None and bool(item["comparisons"])) == told
    assert any(len(set(row["scores"])) > 1 for row in read("a.jsonl"))
