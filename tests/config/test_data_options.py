"""Data as a user gives it, by the command line, by recipes and from Python: what a run makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from processes import FORKS, commanded
from row_files import refused, write_jsonl

import posttrain
from posttrain.apps.view.open_run import OpenRun
from posttrain.cli.main import main
from posttrain.config.training import RL, SFT
from posttrain.data import rows as rows_module
from posttrain.data.tasks import Stream, Tasks
from posttrain.models.native.decoder_flops import forward_flop
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import read_metrics, read_run, read_timing
from posttrain.runs.terminal.panel import figures
from posttrain.training.memory_plan import shape_of
from posttrain.training.setup import load_tasks, split_tasks

SMALL = "--tokenizer characters --hidden 16 --layers 1 --heads 2 --context 40 --rows 4 --threads 1 --quiet".split()
PLAY = (
    "--model start --prompts 2 --group 2 --max-tokens 4 --env-workers 0 --threads 1 --quiet --kl 0 --health off".split()
)

USER_CODE = """
import itertools


def guess(task):
    reply = yield "Guess the number between 1 and 100.\\n"
    for _ in range(5):
        if reply.strip() == task["number"]:
            return 1.0
        reply = yield "\\nNo. Again:\\n"
    return 0.5 * ("1" in reply)


def reward(task, reply):
    return float(len(reply))


def sums():
    for n in itertools.count():
        yield {"prompt": f"{n % 90}+1=", "response": str(n % 90 + 1)}
"""


@pytest.fixture
def place(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("posttrain.data.arrow_store.cache_folder", lambda name: None)  # nothing is written outside
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    (tmp_path / "my.py").write_text(USER_CODE)
    return tmp_path


def prompts(run: Path, steps: int = 1) -> set[str]:
    return {rollout["prompt"] for step in range(1, steps + 1) for rollout in read_rollouts(run, step)}


ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(8)]


@pytest.mark.parametrize("joined", [False, True])
def test_escapes_of_a_template_are_read_on_the_command_line(place: Path, joined: bool) -> None:
    write_jsonl(place / "rows.jsonl", ROWS)
    template = r"Question: {question}\n\tA\\n \{x\} \boxed"
    given = [f"--prompt-template={template}"] if joined else ["--prompt-template", template]
    words = ["rl", *PLAY, "--tasks", "rows.jsonl", "--env", "my.py:reward", "--steps", "1", "--out", "run", *given]
    process = FORKS.Process(target=commanded, args=(words, place))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert prompts(place / "run") <= {f"Question: {row['question']}\n\tA\\n {{x}} \\boxed" for row in ROWS}
    assert read_run(place / "run")["config"]["prompt_template"] == "Question: {question}\n\tA\\n {{x}} \\boxed"


def test_templates_of_recipes_and_of_python_are_taken_as_they_are(place: Path) -> None:
    write_jsonl(place / "rows.jsonl", ROWS)
    recipe = '[rl]\nprompt_template = "Q: {question}\\nA:"\n[sft]\nresponse_template = "{answer}"\n'
    recipe += "prompt_template = '{question}\\n'\n"
    (place / "recipe.toml").write_text(recipe)
    words = [*PLAY, "--tasks", "rows.jsonl", "--env", "my.py:reward", "--steps", "1", "--out", "run"]
    assert main(["rl", "--config", "recipe.toml", *words]) == 0
    assert prompts(place / "run") <= {f"Q: {row['question']}\nA:" for row in ROWS}
    assert main(["sft", "--config", "recipe.toml", *SMALL, "--tasks", "rows.jsonl", "--out", "sft"]) == 0
    assert read_run(place / "sft")["config"]["prompt_template"] == r"{question}\n"  # TOML's literal text
    tasks = load_tasks(RL(tasks="rows.jsonl", prompt_template=r"{question}\n"))
    assert tasks[0]["prompt"] == r"0 + 1?\n"


def test_environment_that_makes_its_prompts_runs_on_rows_without_one(place: Path) -> None:
    write_jsonl(place / "numbers.jsonl", [{"number": str(n)} for n in range(40)])
    words = [
        *PLAY,
        "--tasks",
        "numbers.jsonl",
        "--env",
        "my.py:guess",
        "--steps",
        "1",
        "--held-out",
        "0.3",
        "--out",
        "run",
    ]
    assert main(["rl", *words]) == 0
    assert prompts(place / "run") == {"Guess the number between 1 and 100.\n"}
    [tasks, held_out] = next(line for line in read_run(place / "run")["sizes"] if "held out" in line).split(", ")
    assert "the environment makes the prompts" in tasks and 4 < int(held_out.split()[0]) < 20
    refused(lambda: load_tasks(RL(tasks="numbers.jsonl", env="my.py:reward")), "numbers.jsonl:1: no prompt")


def test_fields_name_columns_for_an_environment_that_converts_rows_too(place: Path) -> None:
    write_jsonl(
        place / "rows.jsonl",
        [{"question": "1 + 1?", "answer": "so #### 2"}, {"question": "2?", "answer": "#### 2"}],
    )
    plain = load_tasks(RL(tasks="rows.jsonl", env="gsm8k"))
    assert list(load_tasks(RL(tasks="rows.jsonl", env="gsm8k", fields={"prompt": "question"}))) == list(plain)
    write_jsonl(place / "other.jsonl", [{"q": "1 + 1?", "a": "so #### 2"}])
    renamed = load_tasks(RL(tasks="other.jsonl", env="gsm8k", fields={"question": "q", "answer": "a"}))
    assert renamed[0] == plain[0]


def test_rows_of_prompt_and_completion_train_as_those_of_prompt_and_response(place: Path, capfd: Any) -> None:
    weights = []
    for name, column in (("a", "completion"), ("b", "response")):
        write_jsonl(place / f"{name}.jsonl", [{"prompt": f"{n}+1=", column: str(n + 1)} for n in range(12)])
        loud = [word for word in SMALL if word != "--quiet"]
        assert main(["sft", *loud, "--tasks", f"{name}.jsonl", "--out", name]) == 0
        weights.append((place / name / "checkpoints" / "step-000003" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert "12 tasks (prompt from 'prompt', response from 'completion'), 0 held out" in capfd.readouterr().out
    chat = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "hello"}]
    tasks = load_tasks(SFT(), [{"prompt": chat[0], "completion": chat[1]}], need=("prompt", "response"))
    assert tasks[0]["messages"] == [*chat[0], *chat[1]]


LONG = [{"prompt": f"{n}+1=" * (20 if n % 4 == 1 else 1), "response": str(n + 1)} for n in range(30)]


@pytest.mark.parametrize("policy", ["skip", "truncate"])
def test_long_rows_are_counted_and_named_and_a_resumed_run_meets_the_same(
    place: Path, capfd: pytest.CaptureFixture[str], policy: str
) -> None:
    write_jsonl(place / "rows.jsonl", LONG)
    words = ["sft", *SMALL, "--tasks", "rows.jsonl", "--epochs", "2", "--too-long", policy]
    words += ["--held-out", "0.2", "--eval-every", "2", "--save-every", "3"]
    loud = [word for word in words if word != "--quiet"]
    assert main([*loud, "--out", "whole"]) == 0
    said = capfd.readouterr().out
    assert "rows.jsonl:2: the demonstration has" in said and said.count("(--too-long)") == 3
    whole = (place / "whole" / "metrics.jsonl").read_bytes()
    for step in sorted((place / "whole" / "checkpoints").iterdir())[1:]:
        for file in sorted(step.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        step.rmdir()
    assert main(["sft", "--out", "whole", "--resume", "--quiet"]) == 0
    assert (place / "whole" / "metrics.jsonl").read_bytes() == whole
    met = [metrics["too_long"] for metrics in read_metrics(place / "whole")[1:]]
    assert sum(met) == 2 * sum(n % 4 == 1 for n in range(30)) - 2 * _held_out_long() and max(met) > 0


def _held_out_long() -> int:
    _, held_out = split_tasks(SFT(tasks="rows.jsonl", held_out=0.2), None, need=("prompt", "response"))
    assert held_out is not None
    return sum(len(task["prompt"]) > 40 for task in held_out)


@pytest.mark.parametrize("verb", ["sft", "prefer", "reward-model"])
@pytest.mark.parametrize("policy", ["skip", "truncate", "refuse"])
def test_rows_of_a_pretrained_model_are_limited_to_fewer_tokens_than_its_context(
    place: Path, capfd: pytest.CaptureFixture[str], verb: str, policy: str
) -> None:
    texts = ["1" * (2 + 4 * (n % 3 == 1)) for n in range(12)]  # 4 tokens with the end, or 8
    rows = [{"prompt": f"{n % 10}", "response": text, "chosen": text, "rejected": "2"} for n, text in enumerate(texts)]
    write_jsonl(
        place / "rows.jsonl", [row if verb != "sft" else {k: row[k] for k in ("prompt", "response")} for row in rows]
    )
    words = [verb, "--model", "start", "--tasks", "rows.jsonl", "--steps", "6", "--rows", "2", "--threads", "1"]
    words += ["--max-length", "6", "--too-long", policy, "--no-chat", "--out", "limited"]
    if policy == "refuse":
        assert main(words) == 2 and "has 8 tokens; --max-length is 6" in capfd.readouterr().err
        return
    assert main(words) == 0
    what = "left out" if policy == "skip" else "cut"
    assert f"too long    rows: 4 {what}; --max-length is 6 tokens" in capfd.readouterr().out
    assert sum(metrics["too_long"] for metrics in read_metrics(place / "limited")[1:]) == 4


def test_long_prompts_are_left_out_of_training_and_of_evaluation(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(place / "rows.jsonl", LONG)
    words = [*(word for word in PLAY if word != "--quiet"), "--tasks", "rows.jsonl", "--env", "my.py:reward"]
    assert main(["rl", *words, "--steps", "4", "--held-out", "0.3", "--out", "run"]) == 0
    assert all(len(prompt) < 10 for prompt in prompts(place / "run", 4)) and len(prompts(place / "run", 4)) == 8
    assert sum(metrics["too_long"] for metrics in read_metrics(place / "run")[1:]) > 0
    assert "the prompt has" in capfd.readouterr().err
    words = "eval --model start --tasks rows.jsonl --env my.py:reward --samples 1 --threads 1 --max-tokens 4".split()
    assert main([*words, "--out", "found.json"]) == 0
    found = json.loads((place / "found.json").read_text())
    assert found["figures"]["tasks"] == 22 and "rows.jsonl:2: the prompt has" in capfd.readouterr().out


def test_function_of_rows_without_end_serves_both_verbs_by_name(place: Path) -> None:
    stream = ["--tasks", "my.py:sums"]
    assert main(["sft", *SMALL, *stream, "--steps", "3", "--out", "sft", "--held-out", "0.1", "--save-every", "2"]) == 0
    assert [metrics["step"] for metrics in read_metrics(place / "sft")] == [0, 1, 2, 3]
    assert (
        main(["rl", *PLAY, *stream, "--env", "my.py:reward", "--steps", "4", "--out", "run", "--save-every", "2"]) == 0
    )
    assert [sorted(prompts_of(place / "run", step)) for step in (1, 2, 3)] == [
        [f"{n}+1=", f"{n + 1}+1="] for n in (0, 2, 4)
    ]
    assert "tasks without end" in "".join(read_run(place / "run")["sizes"])
    before = (place / "run" / "metrics.jsonl").read_bytes()
    for file in (place / "run" / "checkpoints" / "step-000004").rglob("*"):
        file.is_file() and file.unlink()
    assert main(["rl", "--out", "run", "--resume", "--quiet"]) == 0
    assert (place / "run" / "metrics.jsonl").read_bytes() == before


def prompts_of(run: Path, step: int) -> set[str]:
    return {rollout["prompt"] for rollout in read_rollouts(run, step)}


def test_rows_without_end_need_a_number_of_steps_or_of_rows(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", *SMALL, "--tasks", "my.py:sums", "--out", "run"]) == 2
    assert "give --steps" in capfd.readouterr().err
    words = "eval --model start --tasks my.py:sums --env my.py:reward --samples 1 --threads 1".split()
    assert main(words) == 2 and "evaluate on with --limit" in capfd.readouterr().err
    assert main([*words, "--limit", "3", "--max-tokens", "4"]) == 0
    tasks = load_tasks(RL(tasks="my.py:sums", limit=5))
    assert isinstance(tasks, Tasks) and len(tasks) == 5


def test_rows_from_python_are_lists_generators_datasets_paths_and_functions(place: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(8)]
    write_jsonl(place / "rows.jsonl", rows)

    def made() -> Iterator[dict[str, str]]:
        yield from rows

    class Again:
        def __iter__(self) -> Iterator[dict[str, str]]:
            return made()

    small: dict[str, Any] = {
        "tokenizer": "characters",
        "hidden": 16,
        "layers": 1,
        "heads": 2,
        "context": 24,
        "quiet": True,
    }
    small |= {"rows": 4, "threads": 1, "overwrite": True, "out": str(place / "run")}
    digests = set()
    for source in (rows, tuple(rows), made(), datasets.Dataset.from_list(rows), "rows.jsonl", place / "rows.jsonl"):
        run = posttrain.sft(source, **small)
        digests.add((run.checkpoint / "model.safetensors").read_bytes())
        assert len(run.metrics) == 2
    assert len(digests) == 1
    for source in (made, Again()):
        assert len(posttrain.sft(source, steps=3, **small).metrics) == 3
    with pytest.raises(posttrain.UserError, match="not a mapping"):
        posttrain.sft({"train": rows}, **small)


def test_options_hold_for_rows_in_memory(place: Path) -> None:
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(9)]
    tasks = load_tasks(RL(env="gsm8k", limit=3, fields={"prompt": "question"}), rows)
    assert [task["prompt"] for task in tasks] == ["0?", "1?", "2?"]  # rows that are given are not converted


def test_steps_of_sft_can_be_given_instead_of_epochs(place: Path) -> None:
    write_jsonl(place / "rows.jsonl", LONG)
    assert main(["sft", *SMALL, "--tasks", "rows.jsonl", "--steps", "5", "--out", "run"]) == 0
    assert read_metrics(place / "run")[-1]["step"] == 5


def test_tokenizer_is_trained_on_the_rows_without_holding_them(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "SMALL", -1)
    write_jsonl(place / "rows.jsonl", LONG)
    held: list[Any] = []
    train = Tokenizer.train
    monkeypatch.setattr(Tokenizer, "train", lambda texts, *how: held.append(texts) or train(texts, *how))
    assert main(["sft", *SMALL, "--tasks", "rows.jsonl", "--steps", "1", "--out", "run"]) == 0
    assert not hasattr(held[0], "__len__") and isinstance(load_tasks(RL(tasks="my.py:sums")), Stream)
    assert (
        Tokenizer.load(place / "run" / "checkpoints" / "step-000001").vocab_size == 15
    )  # digits, + and =, and three more


def test_speed_counts_what_was_sampled_or_of_given_rows_what_was_read_and_what_was_learned(place: Path) -> None:
    assert main(["sft", *SMALL, "--tasks", "my.py:sums", "--steps", "1", "--out", "sft"]) == 0
    play = ["--tasks", "my.py:sums", "--env", "my.py:reward", "--steps", "1", "--out", "rl"]
    assert main(["rl", *PLAY, *play]) == 0
    (given,), (played,) = read_timing(place / "sft"), read_timing(place / "rl")
    name = "tokens_per_second"
    rows = ["0+1=", "1+1=", "2+1=", "3+1="]  # each answered by a digit and an end; the end is learned, and not read
    taken = given["seconds/rollout"] + given["seconds/update"]
    assert given[f"{name}/learned"] * taken == pytest.approx(2 * len(rows), rel=1e-3)
    assert given[f"{name}/read"] * taken == pytest.approx(sum(map(len, rows)) + len(rows), rel=1e-3)
    seen = len(rows) * sum(range(1, 6))  # of 5 tokens each
    flop = given["update/tflops"] * 1e12 * given["seconds/update"]
    assert flop == pytest.approx(
        3 * forward_flop(shape_of(str(place / "sft")), 5 * len(rows), 2 * len(rows), seen), rel=1e-3
    )
    (metrics,) = read_metrics(place / "rl")
    taken = played["seconds/rollout"] + played["seconds/update"]
    assert played[f"{name}/sampled"] * taken == pytest.approx(metrics["length"] * metrics["rollouts"], rel=1e-3)
    assert [f"{name}/{of}" in each for each in (given, played) for of in ("sampled", "read", "learned")] == [
        False, True, True, True, False, False,
    ]  # fmt: skip
    assert ("tok/s read", "9") in figures({f"{name}/read": 9.0}), "and the display tells them apart"


def test_length_is_of_the_reply_wherever_it_is_told_and_total_of_all_tokens(place: Path) -> None:
    assert main(["sft", *SMALL, "--tasks", "my.py:sums", "--steps", "1", "--out", "sft"]) == 0
    write_jsonl(place / "rows.jsonl", [{"number": str(n)} for n in range(4)])
    assert main(["rl", *PLAY, "--tasks", "rows.jsonl", "--env", "my.py:guess", "--steps", "1", "--out", "rl"]) == 0
    played, given = read_rollouts(place / "rl", 1), read_rollouts(place / "sft", 1)
    (metrics,) = read_metrics(place / "rl")
    assert metrics["length"] == pytest.approx(sum(row["length"] for row in played) / len(played))
    for row in played:
        assert row["length"] == sum(s["length"] for s in row["spans"] if s["kind"] == "sampled")
        assert row["total"] == sum(s["length"] for s in row["spans"]) > row["length"]
    assert [(row["length"], row["total"]) for row in given] == [(2, 6)] * len(given), "a digit and an end, after 0+1="
    run = OpenRun(place / "rl", "rl")
    run.store.follow()
    assert run.store.rows.number("length").tolist() == [row["length"] for row in played], "and so in a histogram"


def test_a_run_says_that_the_held_out_share_is_a_probability(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(place / "rows.jsonl", LONG)
    options = [word for word in SMALL if word != "--quiet"]
    assert main(["sft", *options, "--tasks", "rows.jsonl", "--steps", "1", "--held-out", "0.3", "--out", "run"]) == 0
    _, held_out = split_tasks(SFT(tasks="rows.jsonl", held_out=0.3), None, None, ("prompt", "response"))
    assert held_out is not None
    assert f"{len(held_out)} held out (each prompt with probability 0.3)" in " ".join(capsys.readouterr().out.split())
