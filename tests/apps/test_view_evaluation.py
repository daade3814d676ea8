"""The page of a file of `posttrain eval --out` has its figures; other files are refused in a line."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import generated_runs
import pytest
from conftest import tiny
from viewed import viewing

from posttrain.apps.view.evaluation_file import ALONE, OWN, EvaluationFile
from posttrain.apps.view.view_command import divided
from posttrain.cli.main import main
from posttrain.core.types import UserError
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer

SUITE = """
samples = 2
max_tokens = 4
threads = 1
env_workers = 0
tasks = "rows.jsonl"

[near]
env = "rewards.py:even"
success = 1.0
k = [1, 2]

[far]
env = "rewards.py:graded"
out_of_distribution = true
"""
REWARDS = """
def even(task, reply):
    return float(len(reply) % 2 == 0)

def graded(task, reply):
    return {"length": min(len(reply), 10) / 10, "short": float(len(reply) < 4)}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    for name, seed in (("model", 0), ("other", 1), ("third", 2)):
        save_model(tiny(tokenizer, seed), folder / name, tokenizer)
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in "one two three six".split())
    )
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "suite.toml").write_text(SUITE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        models = ["--model", "model", "--against", "other", "third"]
        assert main(["eval", "--suite", "suite.toml", *models, "--out", "suite.json"]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def same(shown: dict[str, Any], figure: dict[str, Any]) -> bool:
    return all(shown[name] == figure.get(name) for name in ("mean", "low", "high", "why"))


def test_a_suite_is_shown_with_every_part_model_difference_and_mean() -> None:
    content, page = json.loads(Path("suite.json").read_text()), EvaluationFile.read(Path("suite.json")).page
    assert page["models"] == ["model", "other", "third"]
    rows = {(row["part"], row["model"]): row for row in page["rows"]}
    assert list(rows) == [(part, model) for part in ("near", "far") for model in page["models"]]
    for (part, model), row in rows.items():
        told = content["parts"][part]
        side = told if model == "model" else told["against"][page["models"].index(model) - 1]
        of = "accuracy" if part == "near" else "reward"
        assert (row["of"], row["inside"], row["own"]) == (of, part == "near", model == "model")
        assert same(row["figure"], side["figures"][of])
        assert (row["length"], row["invalid"]) == (side["rates"]["length"], side["rates"]["invalid"])
        if model != "model":
            assert same(row["difference"], side["differences"][of])
            assert {name: side["wins"][name] for name in row["wins"]} == row["wins"]
        if part == "near":
            assert same(row["means"]["pass@2"], side["figures"]["pass@2"])
        else:
            assert row["means"]["short"]["mean"] == side["rates"]["part/short"]
    assert {"pass@2", "short", "length"} <= set(page["means"])
    averages = {one["of"]: one for one in page["averages"]}
    assert averages.keys() == content["averages"].keys() and len(averages) == 3
    for name, one in averages.items():
        assert same(one["figure"], content["averages"][name])
        for shown, told in zip(one["against"], content["averages"][name]["against"], strict=True):
            assert same(shown["figure"], told["figures"]) and same(shown["difference"], told["difference"])


def test_a_single_evaluation_is_shown_as_one_part() -> None:
    part, page = json.loads(Path("suite.near.json").read_text()), EvaluationFile.read(Path("suite.near.json")).page
    assert [(row["part"], row["model"]) for row in page["rows"]] == [(ALONE, name) for name in (OWN, "other", "third")]
    assert same(page["rows"][0]["figure"], part["figures"]["accuracy"]) and page["averages"] == []


def test_files_of_evaluations_are_served_beside_runs_and_alone(tmp_path: Path) -> None:
    folder = generated_runs.make_run(tmp_path / "run", steps=1, groups=1, group=2, tokens=4, evals=0)
    folders, evaluations = divided([str(folder), "suite.json", "suite.near.json", str(folder / "run.json")])
    assert folders == [str(folder), str(folder / "run.json")] and len(evaluations) == 2
    with viewing([], "token", evaluations) as pages:
        told = pages.get("/token/api/runs").json()
        assert told["runs"] == [] and [one["name"] for one in told["evaluations"]] == ["suite.json", "suite.near.json"]
        assert pages.get("/token/api/evaluation/1").json() == evaluations[1].page
        assert [pages.get(f"/token/api/evaluation/{n}").status for n in ("2", "x", "-1", "9" * 20)] == [404] * 4


def test_a_file_of_an_evaluation_is_exported_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "suite.json", "--export", "suite.html"]) == 0
    packed = re.search(rb'id="data">(.*?)</script>', Path("suite.html").read_bytes())
    assert packed is not None
    kept = json.loads(gzip.decompress(b64decode(packed[1])))
    assert kept["evaluation/0"] == EvaluationFile.read(Path("suite.json")).page and kept["runs"]["runs"] == []
    for more in (["--where", "reward > 0"], ["--rollouts", "3"]):
        capsys.readouterr()
        assert main(["view", "suite.json", "--export", "suite.html", *more]) == 2
        assert f"{more[0]} has no effect on a file of figures" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"loss": 1}', "holds no figures: give a file that posttrain eval --out has written"),
        ('{"figures": {"reward": 3}}', "is damaged"),
        ('{"parts": {"a": {"figures": {}}}}', "is damaged"),
        ('{"parts": [1]}', "is damaged"),
    ],
)
def test_other_files_are_refused_in_a_line(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(UserError, match=said) as caught:
        EvaluationFile.read(tmp_path / "file.json")
    assert "\n" not in str(caught.value)
