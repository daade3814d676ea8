"""A suite's parts are the evaluations that they would be alone; averages count every part once; mistakes name the part."""

from __future__ import annotations

import errno
import json
import os
from math import sqrt
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import tiny

import posttrain
from posttrain.cli.main import main
from posttrain.config.suite_file import read_suite
from posttrain.core.intervals import holm
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.verbs import evaluate
from posttrain.training.verbs.suite import macro_average

REWARDS = """
def even(task, reply):
    return float(len(reply) % 2 == 0)

def never(task, reply):
    if "42" in reply:  # a sample reply before the evaluation
        return 0.0
    raise ValueError("no such unit")

def seldom(task, reply):
    if task["id"].endswith("one"):
        raise ValueError("no such unit")
    return 1.0

def graded(task, reply):
    return {"length": min(len(reply), 10) / 10, "short": float(len(reply) < 4)}
"""
SUITE = """
samples = 2
max-tokens = 5
threads = 1
env_workers = 0

[near]
tasks = "near.jsonl"
env = "rewards.py:even"
success = 1.0

[far-away]
tasks = "far.jsonl"
env = "rewards.py:graded"
samples = 3
out_of_distribution = true
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    for name, seed in (("model", 0), ("other", 1), ("third", 2)):
        save_model(tiny(tokenizer, seed), folder / name, tokenizer)
    for name, texts in (("near", "one two three four five six seven eight".split()), ("far", "a b c d e f g".split())):
        rows = "".join(json.dumps({"prompt": text, "id": f"{name}-{text}"}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(rows)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "suite.toml").write_text(SUITE)
    return folder


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def test_parts_are_what_they_are_alone_and_averages_count_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--suite", "suite.toml", "--model", "model", "--against", "other", "--out", "out/s.json"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(Path("out/s.json").read_text())
    common = {"max_tokens": 5, "threads": 1, "env_workers": 0, "against": "other"}
    near = posttrain.evaluate("near.jsonl", "rewards.py:even", "model", samples=2, success=1.0, **common)
    far = posttrain.evaluate("far.jsonl", "rewards.py:graded", "model", samples=3, **common)
    for name, alone in (("near", near), ("far-away", far)):
        part = found["parts"][name]
        assert part["figures"] == alone.figures and part["against"][0]["figures"] == alone.against[0].figures
        assert part["against"][0]["differences"] == alone.against[0].differences
        rollouts = pq.read_table(f"out/s.{name}.rollouts.parquet")
        assert rollouts.num_rows == len(alone.rollouts) and Path(f"out/s.{name}.json").exists()
        assert part["rates"]["total_tokens"] == sum(r.n_sampled for r in alone.rollouts)
        assert name in printed
    short = [r.rewards["short"] for r in far.rollouts]
    assert found["parts"]["far-away"]["rates"]["part/short"] == pytest.approx(sum(short) / len(short))
    assert found["parts"]["near"]["in_distribution"] and not found["parts"]["far-away"]["in_distribution"]
    accuracy, reward = near.figures["accuracy"]["mean"], far.figures["reward"]["mean"]  # graded rewards: no threshold
    averages = found["averages"]
    assert averages["all"]["mean"] == pytest.approx((accuracy + reward) / 2)
    assert averages["in distribution"]["mean"] == accuracy and averages["out of distribution"]["mean"] == reward
    gap = averages["in distribution"]["against"][0]["difference"]["mean"]
    assert gap == pytest.approx(accuracy - near.against[0].figures["accuracy"]["mean"])


def test_wins_are_counted_by_task() -> None:
    suite = Path("same.toml")
    suite.write_text(
        '[one]\ntasks = "near.jsonl"\nenv = "rewards.py:even"\nmax_tokens = 5\nsamples = 4\nenv_workers = 0\n'
    )
    assert main(["eval", "--suite", "same.toml", "--model", "model", "--against", "model", "--out", "same.json"]) == 0
    [same] = json.loads(Path("same.json").read_text())["parts"]["one"]["against"]
    nothing = {"won": 0, "lost": 0, "tied": 8, "p": 1.0, "p_holm": 1.0}
    assert same["wins"] == {"by": "reward", **nothing, "verdict": "undecided"}
    assert main(["eval", "--suite", "same.toml", "--model", "model", "--against", "other", "--out", "two.json"]) == 0
    rewards: list[dict[str, list[float]]] = []
    for model in ("model", "other"):
        how = {"samples": 4, "max_tokens": 5, "env_workers": 0}
        rewards.append(posttrain.evaluate("near.jsonl", "rewards.py:even", model, **how).rewards)
    gaps = [sum(rewards[0][task]) - sum(rewards[1][task]) for task in rewards[0]]
    wins = json.loads(Path("two.json").read_text())["parts"]["one"]["against"][0]["wins"]
    assert (wins["won"], wins["lost"]) == (sum(g > 0 for g in gaps), sum(g < 0 for g in gaps)) and wins["won"] + wins[
        "lost"
    ]


def test_several_models_are_each_compared_as_alone_and_corrected_together(capsys: pytest.CaptureFixture[str]) -> None:
    how = {"samples": 2, "max_tokens": 5, "threads": 1, "env_workers": 0}
    both = posttrain.evaluate("near.jsonl", "rewards.py:even", "model", against=["other", "third"], **how)
    for compared, name in zip(both.against, ("other", "third"), strict=True):
        [alone] = posttrain.evaluate("near.jsonl", "rewards.py:even", "model", against=name, **how).against
        assert compared.model == name and compared.figures == alone.figures
        assert compared.differences == alone.differences and compared.wins["p"] == alone.wins["p"]
        assert [r.text for r in compared.rollouts] == [r.text for r in alone.rollouts]
        assert alone.wins["p_holm"] == alone.wins["p"]
    assert [one.wins["p_holm"] for one in both.against] == holm([one.wins["p"] for one in both.against])
    words = ["eval", "--suite", "suite.toml", "--model", "model", "--against", "other", "third", "--out", "three.json"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "p corrected: for 4 comparisons, by Holm's method" in printed
    assert all(len(line) <= 80 for line in printed.splitlines() if "sign test" in line or "Holm" in line)
    parts = json.loads(Path("three.json").read_text())["parts"].values()
    wins = [one["wins"] for part in parts for one in part["against"]]
    assert [one["p_holm"] for one in wins] == holm([one["p"] for one in wins])
    assert pq.read_table("three.near.against-2.rollouts.parquet")["text"].to_pylist() == [
        r.text for r in both.against[1].rollouts
    ]


@pytest.mark.parametrize(
    ("against", "told"),
    [(["other", "other"], "--against names other twice: give each model once"), (["nowhere"], "nowhere")],
)
def test_a_mistake_in_against_is_one_line(against: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--suite", "suite.toml", "--model", "model", "--against", *against]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_options_of_the_command_line_override_those_of_the_file() -> None:
    assert main(["eval", "--suite", "suite.toml", "--model", "model", "--samples", "1", "--out", "one.json"]) == 0
    parts = json.loads(Path("one.json").read_text())["parts"]
    assert [part["figures"]["samples"] for part in parts.values()] == [8, 7]


def test_columns_may_be_named_for_all_parts_and_for_one() -> None:
    Path("renamed.jsonl").write_text("".join(json.dumps({"q": f"{n} one", "other": "two"}) + "\n" for n in range(6)))
    part = 'tasks = "renamed.jsonl"\nenv = "rewards.py:even"\nmax_tokens = 3\nenv_workers = 0\nsamples = 1\n'
    Path("fields.toml").write_text(f'fields.prompt = "q"\n[all]\n{part}[own]\n{part}fields.prompt = "other"\n')
    assert main(["eval", "--suite", "fields.toml", "--model", "model", "--out", "fields.json"]) == 0
    prompts = [set(pq.read_table(f"fields.{part}.rollouts.parquet")["prompt"].to_pylist()) for part in ("all", "own")]
    assert prompts == [{f"{n} one" for n in range(6)}, {"two"}]


def test_limits_of_an_average_add_up_in_squares_and_need_every_part() -> None:
    figures = [{"mean": 0.5, "low": 0.4, "high": 0.7}, {"mean": 0.1, "low": 0.0, "high": 0.3}]
    found = macro_average(figures)
    assert (found["mean"], found["low"], found["high"]) == pytest.approx(
        (0.3, 0.3 - sqrt(0.01 + 0.01) / 2, 0.3 + sqrt(0.04 + 0.04) / 2)
    )
    without = macro_average([*figures, {"mean": 0.9, "low": None, "high": None, "why": "too few"}])
    assert without["low"] is None and "1 of 3 parts" in without["why"] and without["mean"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no part"),
        ("samples = 2", "has no part"),
        ("[a", "is not valid TOML"),
        ('[a]\ntasks = "near.jsonl"', "[a] --env is missing"),
        ('[a]\nenv = "rewards.py:even"', "[a] --tasks is missing"),
        ('[a]\ntasks = "near.jsonl"\nenv = "rewards.py:even"\nsample = 2', "[a] unknown option 'sample'"),
        ('[a]\ntasks = "near.jsonl"\nenv = "rewards.py:even"\nsamples = "x"', "[a] samples"),
        ('[a]\ntasks = "near.jsonl"\nenv = "rewards.py:even"\nsamples = 0', "[a] --samples must be above 0"),
        ('[a]\ntasks = "near.jsonl"\nenv = "rewards.py:even"\nmodel = "x"', "model belongs to the whole suite"),
        ('[a]\ntasks = "near.jsonl"\nenv = "rewards.py:even"\nout_of_distribution = 1', "must be true or false"),
        ('[[a]]\ntasks = "near.jsonl"\n[b]\nsamples = 2', "[[a]] is a list of tables: write [a] for a part"),
        ('[mean]\ntasks = "near.jsonl"\nenv = "rewards.py:even"', "[mean] has the name of the mean over parts"),
        ('["a/b"]\ntasks = "near.jsonl"\nenv = "rewards.py:even"', "must be a name of letters"),
        ('[a]\ntasks = "none.jsonl"\nenv = "rewards.py:even"', "[a] "),
    ],
)
def test_a_mistake_in_a_suite_is_one_line_with_the_part(
    text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong.toml").write_text(text)
    assert main(["eval", "--suite", "wrong.toml", "--model", "model"]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ('tasks = "none.jsonl"\nenv = "rewards.py:even"', "none.jsonl"),
        ('tasks = "near.jsonl"\nenv = "rewards.py:evn"', "did you mean 'even'"),
        ('tasks = "near.jsonl"\nenv = "rewards.py:even"\nmaj = [2]', "--maj needs to know which replies are right"),
    ],
)
def test_a_mistake_in_the_last_part_is_told_before_the_first_is_sampled(
    mistake: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("last.toml").write_text(f"{SUITE}[last]\n{mistake}\n")
    assert main(["eval", "--suite", "last.toml", "--model", "model", "--out", "last.json"]) == 2
    said = capsys.readouterr()
    assert "[last] " in said.err and told in " ".join(said.err.split())
    assert "near" not in said.out and not list(Path().glob("last.*.json"))


@pytest.mark.parametrize("out", ["", "unfinished.json"])
def test_a_part_that_fails_last_costs_no_figures_of_the_others(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("unfinished.toml").write_text(f'{SUITE}[last]\ntasks = "near.jsonl"\nenv = "rewards.py:never"\n')
    kept = ["--out", out] if out else []
    assert main(["eval", "--suite", "unfinished.toml", "--model", "model", *kept]) == 2
    said = capsys.readouterr()
    table = said.out.partition("\nmodel\n")[2].splitlines()
    assert [line.split()[0] for line in table[:3]] == ["part", "near", "far-away"]
    assert "mean of 2 parts" in said.out
    error = said.err.splitlines()[-1]
    assert error.startswith("posttrain: [last] no reward of model is valid") and "no such unit" in error
    where = "above and in unfinished.near.json ..." if out else "above"
    assert f"the figures of near and others are {where}: correct this part" in error
    assert Path("unfinished.far-away.json").exists() == bool(out)


def test_a_note_under_a_part_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("noted.toml").write_text(SUITE.replace("rewards.py:even", "rewards.py:seldom"))
    assert main(["eval", "--suite", "noted.toml", "--model", "model"]) == 0
    [note] = [line.strip() for line in capsys.readouterr().out.splitlines() if "rewards were invalid" in line]
    assert note.startswith("[near] model: 2 of 16 rewards were invalid")


def test_a_folder_in_place_of_the_file_of_figures_is_told_before_anything_is_sampled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("figures").mkdir(exist_ok=True)
    assert main(["eval", "--suite", "suite.toml", "--model", "model", "--out", "figures"]) == 2
    said = capsys.readouterr()
    assert "--out figures is a folder: name a file, such as figures/eval.json" in said.err and not said.out


@pytest.mark.parametrize("option", ["--out", "--inspect-log"])
def test_a_file_of_results_that_cannot_be_written_is_told_before_anything_is_sampled(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--suite", "suite.toml", "--model", "model", option, "near.jsonl/figures.json"]) == 2
    said = capsys.readouterr()
    assert f"{option} near.jsonl/figures.json cannot be written" in said.err and not said.out


@pytest.mark.parametrize("full", ["disk.near.json", "disk.json"])
def test_a_disk_that_is_full_meanwhile_costs_no_figures(
    full: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(full).write_text("of an earlier evaluation")
    write = evaluate.replace

    def limited(path: Path, content: bytes) -> None:
        if path.name == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(evaluate, "replace", limited)
    assert main(["eval", "--suite", "suite.toml", "--model", "model", "--out", "disk.json", "--overwrite"]) == 2
    said = capsys.readouterr()
    assert f"--out {full} cannot be written: No space left on device; the figures so far are above" in said.err
    assert "near" in said.out.partition("\nmodel\n")[2] and Path(full).read_text() == "of an earlier evaluation"


def test_a_table_of_template_variables_is_no_part_however_it_is_written() -> None:
    part = 'tasks = "near.jsonl"\nenv = "rewards.py:even"'
    for name in ("chat-template-kwargs", "chat_template_kwargs"):
        Path("variables.toml").write_text(f"[{name}]\nshort = true\n[a]\n{part}\n")
        [one] = read_suite("variables.toml", {"model": "model"})
        assert one.name == "a" and one.config.chat_template_kwargs == {"short": True}


def test_a_suite_that_is_not_there_and_tasks_beside_it_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--suite", "nowhere.toml", "--model", "model"]) == 2
    assert "--suite nowhere.toml cannot be read: No such file" in " ".join(capsys.readouterr().err.split())
    assert main(["eval", "--suite", "suite.toml", "--model", "model", "--tasks", "near.jsonl"]) == 2
    assert "whose parts name their own" in " ".join(capsys.readouterr().err.split())
