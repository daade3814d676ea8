"""The command: --help loads nothing heavy, options come from where they should, verbs do their work."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

from posttrain.cli import chat_command, named_files, write_types
from posttrain.cli.chat_command import converse, dialogue
from posttrain.cli.main import _stop, main
from posttrain.config.inference import Chat, Check, Evaluation
from posttrain.config.resolve import as_dict, continued, filled
from posttrain.config.row_options import Data
from posttrain.config.training import RL, SFT
from posttrain.core.types import Reply, StopReason, Turn, UserError
from posttrain.envs.builtin import arithmetic
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_file, rows_of
from posttrain.training import training_run
from posttrain.training.verbs import evaluate


def loaded_by(*arguments: str) -> tuple[int, set[str], str]:
    """Exit code, names of the modules, output of the command in a fresh process."""
    code = f"import sys; from posttrain.cli.main import _stop, main; code = main({list(arguments)!r}); "
    code += "print('\\n'.join(sys.modules), file=sys.stderr); sys.exit(code)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return ran.returncode, set(ran.stderr.split()), ran.stdout


HEAVY = {
    "torch",
    "numpy",
    "tokenizers",
    "transformers",
    "datasets",
    "safetensors",
    "jinja2",
    "matplotlib",
    "tensorboardX",
}


def test_help_loads_neither_the_verbs_nor_anything_heavy() -> None:
    code, modules, said = loaded_by("--help")
    ours = {"posttrain", "posttrain.cli", "posttrain.cli.main", "posttrain.core", "posttrain.core.types"}
    ours |= {"posttrain.core.progress", "posttrain.core.messages", "posttrain.core.user_files"}
    ours |= {"posttrain.cli.argument_errors",
             "posttrain.cli.command_table", "posttrain.cli.help_pages", "posttrain.config", "posttrain.config.verbs",
             "posttrain.core.extras", "posttrain.system", "posttrain.system.garbage"}  # fmt: skip
    assert code == 0
    assert all(verb in said for verb in ("sft", "rl", "eval", "chat", "algorithms", "check"))
    assert {name for name in modules if name.startswith("posttrain")} == ours
    assert not modules & (HEAVY | {"markdown_it", "pygments", "rich.markdown", "rich.live", "tomllib"})


@pytest.mark.parametrize(("verb", "config"), [("sft", SFT), ("rl", RL), ("eval", Evaluation)])
def test_the_whole_help_of_a_verb_names_every_option_and_loads_nothing_heavy(verb: str, config: type) -> None:
    code, modules, said = loaded_by(verb, "--help-all")
    assert code == 0 and not modules & HEAVY
    for option in fields(config):
        if option.name == "settings":  # flags, and --set
            continue
        assert f"--{option.name.replace('_', '-')}" in said, option.name


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that the verbs were called with, instead of running them; the files in them need not be there."""
    configs: list[Any] = []

    def take(config: Any) -> None:
        configs.append(config)
        raise UserError("taken")

    monkeypatch.setattr(named_files, "check_files", lambda config: None)
    monkeypatch.setattr(training_run, "run_training", take)
    monkeypatch.setattr(evaluate, "evaluate", take)
    return configs


def test_command_line_wins_over_the_recipe_and_the_recipe_over_the_default(tmp_path: Path, taken: list[Any]) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[rl]\ntasks = "x"\nenv = "y"\nmodel = "z"\n'
        'steps = 7\nlr = 2e-5\nstop = ["\\n", "a"]\n[rl.fields]\nprompt = "question"\n[sft]\ntasks = "x"\nrows = 3\n'
    )
    main(["rl", "--config", str(recipe), "--steps", "9", "--no-quiet", "--fields.answer", "final"])
    main(["sft", f"--config={recipe}", "--betas", "0.8", "0.9", "--mask", "all"])
    rl, sft = taken
    assert (rl.steps, rl.lr, rl.stop, rl.group) == (9, 2e-5, ("\n", "a"), 8)
    assert rl.fields["answer"] == "final" and rl.given == {
        "tasks",
        "env",
        "model",
        "steps",
        "lr",
        "stop",
        "fields",
        "quiet",
    }
    assert (sft.rows, sft.betas, sft.mask, sft.hidden) == (3, (0.8, 0.9), "all", 128)


def test_the_length_of_a_run_on_the_command_line_replaces_that_of_the_recipe(tmp_path: Path, taken: list[Any]) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[sft]\ntasks = "x"\nepochs = 3\n[prefer]\ntasks = "x"\nmodel = "m"\nsteps = 7\n')
    main(["sft", "--config", str(recipe), "--steps", "9"])
    main(["prefer", "--config", str(recipe), "--epochs=2"])
    assert [(config.steps, config.epochs) for config in taken] == [(9, 1.0), (None, 2.0)]


def test_options_are_named_never_guessed_from_their_place(taken: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "rows.jsonl"]) == 2 and not taken
    assert "rows.jsonl" in capsys.readouterr().err


def test_configuration_survives_its_record(taken: list[Any]) -> None:
    main(
        [
            "rl",
            "--stop",
            "a",
            "b",
            "--tasks",
            "x",
            "--env",
            "y",
            "--model",
            "z",
            "--kl",
            "0.1",
            "--out",
            "here",
            "--fields.prompt",
            "q",
        ]
    )
    [config] = taken
    recorded = json.loads(json.dumps(as_dict(config)))
    assert recorded == as_dict(config)
    assert continued(RL(out="here"), recorded) == config
    assert continued(filled(RL, {"out": "here", "steps": 200, "kl": 0.1}), recorded) == config
    assert continued(RL(out="here", steps=3), recorded).steps == 3
    assert continued(RL(out="here", stop=("a", "b")), recorded) == config
    with pytest.raises(UserError, match=r"kl was 0\.1, stop was \['a', 'b'\]"):
        continued(filled(RL, {"out": "here", "kl": 0.0, "stop": ()}), recorded)
    with pytest.raises(UserError, match="another version wrote it, with options future"):
        continued(RL(out="here"), {**recorded, "future": 1})


def test_version_algorithms_and_exit_codes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out.strip() == "0.1.0"
    assert main(["algorithms"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("grpo", "dr-grpo", "rloo", "reinforce-baseline"))
    assert main(["algorithms", "grpo"]) == 0
    assert "maximise" in capsys.readouterr().out

    def interrupt(config: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(named_files, "check_files", lambda config: None)
    monkeypatch.setattr(training_run, "run_training", interrupt)
    assert main(["rl", "--tasks", "x", "--env", "y", "--model", "z"]) == 130
    assert capsys.readouterr().err == "posttrain: stopped\n"


def test_import_that_a_signal_breaks_in_its_own_way_is_a_stop_and_anything_else_is_a_crash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def importing(*_: Any, **__: Any) -> None:
        try:
            if pressed:
                _stop(signal.SIGINT, None)
        except KeyboardInterrupt:
            raise ImportError("a library was half there") from None
        raise ImportError("a library was half there")

    pressed = False
    monkeypatch.setattr("posttrain.cli.main.app", importing)
    monkeypatch.setattr("posttrain.cli.main._asked_to_stop", False)
    with pytest.raises(ImportError):
        main(["check"])
    pressed = True
    assert main(["check"]) == 130 and capsys.readouterr().err == "posttrain: stopped\n"


@pytest.fixture
def place(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = arithmetic.tasks(20, seed=0, digits=1)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("drawn")
def test_rl_records_options_sizes_and_objective_and_tells_where_everything_is(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "rl --tasks rows.jsonl --model start --env arithmetic --steps 2 --prompts 2 --group 2 --max-tokens 4".split()
    )
    assert main([*words, "--threads", "1", "--out", "run", "--kl", "0"]) == 0
    said = capsys.readouterr().out
    recorded = json.loads((place / "run" / "run.json").read_text())
    assert recorded["config"]["steps"] == 2 and recorded["config"]["stop"] == []
    assert recorded["initial"] == "start" and recorded["final"]["step"] == 2
    for line in [*recorded["sizes"], recorded["objective"][0], "formulas: posttrain algorithms grpo"]:
        assert f"  {line}\n" in said
    assert "maximise" not in said and "maximise" in "".join(recorded["objective"])
    assert "2 prompts x 2 rollouts = 4 rollouts" in "".join(recorded["sizes"])
    assert "options: tasks rows.jsonl, env arithmetic, model start, threads 1, kl 0.0\n" in said
    assert "defaults" not in said and "temperature 1.0" not in said  # run.json has them
    for path in ("checkpoints/step-000002", "curves.png", "rollouts"):
        assert str(Path("run") / path) in said and (place / "run" / path).exists()


@pytest.mark.usefixtures("drawn")
def test_only_what_a_run_has_written_is_named_at_its_end(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "pairs.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n')
    assert main("prefer --tasks pairs.jsonl --model start --steps 1 --threads 1 --out preferred".split()) == 0
    said = capsys.readouterr().out
    assert str(Path("preferred") / "curves.png") in said
    assert ("rollouts" in said) == (place / "preferred" / "rollouts").exists()


def test_eval_compares_two_checkpoints_and_writes_its_figures(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "eval --tasks rows.jsonl --env arithmetic --samples 2 --k 1 2 --max-tokens 4 --threads 1 --limit 4".split()
    assert main([*words, "--model", "start", "--against", "start", "--out", "figures/a.json"]) == 0
    said, few = capsys.readouterr().out, "too few tasks for an interval: 4, and it takes 6"
    assert "start 0.000 0.000 0 0 4 1 undecided".split() in [line.split() for line in said.splitlines()]
    assert f"reward, accuracy, pass@1, pass@2, difference in reward, difference in accuracy: {few}" in said
    assert "figures     figures/a.json\nlook at it  posttrain rollouts figures/a.rollouts.parquet\n" in said
    assert main(["rollouts", "figures/a.json"]) == 2
    assert "its rollouts are in figures/a.rollouts.parquet" in capsys.readouterr().err
    figures = json.loads((place / "figures" / "a.json").read_text())
    assert figures["figures"] == figures["against"][0]["figures"] and len(figures["rewards"]) == 4
    own, other = (place / "figures" / f"a{side}.rollouts.parquet" for side in ("", ".against"))
    rows = rows_of(read_file(own))
    assert own.read_bytes() == other.read_bytes() and len(rows) == 8
    for task, rewards in figures["rewards"].items():
        assert rewards == [row["reward"] for row in rows if row["task"] == task]
    shown = [f"{name}, reward {example['reward']:g}" for name, example in figures["examples"].items()]
    assert [line[3:].partition(" ──")[0] for line in said.splitlines() if line.startswith("── ")] == shown
    every = sorted(row["reward"] for row in rows)
    assert [example["reward"] for example in figures["examples"].values()] == [every[0], every[3], every[-1]]
    for example in figures["examples"].values():
        row = rows[example["place"]]
        assert (row["task"], row["reward"], row["text"]) == (example["task"], example["reward"], example["reply"])


def test_more_tokens_than_the_context_holds_are_said_at_the_start(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "eval --tasks rows.jsonl --env arithmetic --samples 1 --threads 1 --limit 2 --model start".split()
    context = json.loads((place / "start" / "config.json").read_text())["max_position_embeddings"]
    for tokens, told in ((context, True), (4, False)):
        assert main([*words, "--max-tokens", str(tokens)]) == 0
        assert (f"--max-tokens {tokens} is more than a reply can have" in capsys.readouterr().out) == told


def test_check_tells_order_by_its_exit_code(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "env.py").write_text("def constant(task, reply):\n    return 1.0\n")
    assert main(["check", "--tasks", "rows.jsonl", "--env", "arithmetic"]) == 0
    assert main(["check", "--tasks", "rows.jsonl", "--env", "env.py:constant", "--limit", "1"]) == 2
    said = capsys.readouterr().out
    assert "nothing can be learned" in said and "SUCCESS = 1.0 in its file or --success 1.0" in said


def test_check_takes_every_data_option_that_rl_takes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {f.name for f in fields(Data)}
    assert data <= {f.name for f in fields(Check)} and data <= {f.name for f in fields(RL)}
    (place / "other.csv").write_text("question,solution\n1+1,2\n2+2,4\n")
    how = ["--fields.prompt", "question", "--fields.answer", "solution", "--limit", "1"]
    assert main(["check", "--tasks", "other.csv", "--env", "arithmetic", *how]) == 0
    assert "'1+1'" in capsys.readouterr().out
    template = ["--prompt-template", "Say {question}:", "--fields.answer", "solution"]
    assert main(["check", "--tasks", "other.csv", "--env", "arithmetic", *template]) == 0
    assert "'Say 2+2:'" in capsys.readouterr().out
    (place / "check.toml").write_text('[check]\ntasks = "rows.jsonl"\nenv = "arithmetic"\n')
    assert main(["check", "--config", "check.toml"]) == 0


# The dialogue


def spoken(env: Callable[..., Any], replies: list[Reply]) -> list[Turn]:
    """The turns that a dialogue yields when it is answered so."""
    playing = env({"id": "dialogue"})
    turns = []
    answer: Reply | None = None
    try:
        while True:
            turns.append(playing.send(answer))
            answer = replies.pop(0)
    except StopIteration:
        return turns


def test_dialogue_shows_what_is_typed_until_an_empty_line() -> None:
    said: list[str] = []
    typed = iter(["hello", "and you?", ""])
    turns = spoken(dialogue(lambda: next(typed), said.append, "Be brief.", True), [Reply("hi"), Reply("fine")])
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}
    assert [turn.messages for turn in turns] == [[system, user], [{"role": "user", "content": "and you?"}]]
    assert said == ["hi", "fine"]
    typed = iter(["once upon", ""])
    [turn] = spoken(dialogue(lambda: next(typed), said.append, None, False), [Reply(" a time")])
    assert turn == Turn(text="once upon")


def test_dialogue_ends_where_the_context_does() -> None:
    said: list[str] = []
    turns = spoken(dialogue(lambda: "more", said.append, None, False), [Reply("a"), Reply("b", StopReason.CONTEXT)])
    assert len(turns) == 2 and said == ["a", "b", "(the model's context is full)"]


TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_converse_talks_to_a_real_checkpoint(
    place: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    template: str | None,
) -> None:
    if template:
        (place / "start" / "chat_template.jinja").write_text(template)
    typed = iter(["1+2=", "3+4="])

    def type_in(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", type_in)
    converse("start", Chat(temperature=0.0, max_tokens=5, device="cpu"))
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line != "(cut off by --max-tokens)"]
    assert len(said) == 4 and "an empty line ends" in said[0] and not said[-1]


def test_a_chat_tells_a_reply_that_was_cut_off_from_one_that_ended() -> None:
    said: list[str] = []
    typed = iter(["a", "b", ""])
    spoken(dialogue(lambda: next(typed), said.append, None, True), [Reply("whole"), Reply("and so", StopReason.LENGTH)])
    assert said == ["whole", "and so", "(cut off by --max-tokens)"]


def test_a_message_of_several_lines_stands_between_two_lines_of_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = chat_command.FENCE
    typed = iter(["one", mark, "", mark, mark, "def f():", "    return 1", "", mark, "", mark, "unfinished"])

    def type_in(prompt: str) -> str:
        if (line := next(typed, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", type_in)
    said = [chat_command._ask() for _ in range(5)]
    assert said == ["one", "def f():\n    return 1\n", "", "unfinished", ""]


def test_what_a_model_says_cannot_rewrite_the_screen_of_a_chat(capsys: pytest.CaptureFixture[str]) -> None:
    chat_command._say("\x1b[2J\x1b]0;mine\x07 \u202e\u2066 a\nb")
    assert capsys.readouterr().out == "\\x1b[2J\\x1b]0;mine\\x07 \\u202e\\u2066 a\nb\n"


def test_options_told_to_editors_are_those_that_are_declared() -> None:
    written = Path(write_types.__file__).parents[1] / "__init__.pyi"
    told = ast.dump(ast.parse(written.read_text(encoding="utf-8")))
    assert told == ast.dump(ast.parse(write_types.text())), "run python -m posttrain.cli.write_types"
    pages = written.parent / "apps" / "view" / "static" / "verbs.js"
    assert pages.read_text(encoding="utf-8") == write_types.script(), "run python -m posttrain.cli.write_types"


def test_pages_that_cannot_be_written_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for place in (str(tmp_path / "file" / "pages"), "x" * 5000, "a\x00b"):
        assert main(["algorithms", "--pages", place]) == 2
        assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["show", "view", "rollouts", "query", "audit", "plan"])
@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "circle"])
def test_a_run_whose_name_can_be_none_is_refused_in_one_line(
    verb: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    assert main([verb, name, *(["select 1"] if verb == "query" else [])]) == 2
    assert name[:9] in capsys.readouterr().err


@pytest.mark.parametrize("words", [["rl", "--lr"], ["rollouts"], ["algorithms"]])
def test_no_refusal_acts_on_the_terminal(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "\x1b]0;mine\x07\u202e"]) == 2
    said = capsys.readouterr().err
    assert "mine" in said and "\\u202e" in said and said.replace("\n", "").isprintable()


STOPPED_AT_TORCH = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
sys.argv = ["posttrain", "rl", "--tasks", "a.jsonl", "--env", "exact", "--model", "m", "--out", "o"]
from posttrain.cli.main import entry
entry()
"""


@pytest.mark.parametrize("watched, quiet", [(True, False), (False, False), (True, True)])
def test_a_terminal_says_that_libraries_are_loaded_before_they_are(watched: bool, quiet: bool, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "m").mkdir()
    ours, theirs = os.openpty()
    code = STOPPED_AT_TORCH.replace('"o"]', '"o", "--quiet"]') if quiet else STOPPED_AT_TORCH
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=theirs if watched else subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", "PYTHONUTF8": "1"},
        cwd=tmp_path,
    ) as process:
        os.close(theirs)
        out, told = process.communicate(timeout=60)
    said = os.read(ours, 4096).decode() if watched else told.decode()
    os.close(ours)
    assert process.returncode == 130 and out == b"", "what is piped is not disturbed"
    shown = "loading libraries ...\r\x1b[K" if watched and not quiet else ""
    assert said.replace("\r\n", "\n") == f"{shown}posttrain: stopped\n"


def test_mistakes_that_need_no_model_are_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    (run / "run.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    rows = ["--tasks", "rows.jsonl", "--out", str(tmp_path / "new")]
    wrong = {
        "unknown algorithm 'dpoo'": ["prefer", *rows, "--model", "m", "--algorithm", "dpoo"],
        "unknown algorithm 'gprpo'": ["rl", *rows, "--model", "m", "--env", "my.py:reward", "--algorithm", "gprpo"],
        "--beta must be above 0": ["reward-model", *rows, "--model", "m", "--beta", "-1"],
        "already holds a run": ["sft", "--tasks", "rows.jsonl", "--out", str(run)],
        "holds no run to resume": ["sft", "--resume", "--out", str(tmp_path / "new")],
        "is a file": ["sft", "--tasks", "rows.jsonl", "--out", str(run / "run.json")],
    }
    refused_without_torch([*wrong.items()])


def test_files_that_are_not_there_are_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "env.py"):
        (tmp_path / name).touch()
    rows, env, out = f"--tasks {tmp_path}/rows.jsonl", f"--env {tmp_path}/env.py:reward", f"--out {tmp_path}/new"
    no_rows, no_env = f"--tasks {tmp_path}/lost.jsonl", f"--env {tmp_path}/lost.py:reward"
    model, no_model = f"--model {tmp_path}", f"--model {tmp_path}/lost"
    scored = f"{env} {out}"
    wrong = {
        "there is no file": [
            f"sft {no_rows} {out}",
            f"sft --mixture.a.tasks {tmp_path}/lost.jsonl --mixture.b.tasks {tmp_path}/rows.jsonl {out}",
            f"sft {rows} --eval-tasks a={tmp_path}/rows.jsonl b={tmp_path}/lost.jsonl {out}",
            f"prefer {no_rows} {model} {out}",
            f"reward-model {no_rows} {model} {out}",
            f"rl {no_rows} {model} {scored}",
            f"rl {rows} {model} {no_env},digits=2 {out}",
            f"distill {no_rows} {model} --teacher {tmp_path} {out}",
            f"eval {no_rows} {model} {scored}",
            f"sample {no_rows} {model} {out}",
            f"label --items {tmp_path}/lost.jsonl --with {tmp_path}/env.py:reward",
            f"check {no_rows} {env}",
            f"check {rows} {no_env}",
        ],
        "no such folder": [
            f"sft {rows} {no_model} {out}",
            f"prefer {rows} {no_model} {out}",
            f"reward-model {rows} {no_model} {out}",
            f"rl {rows} {no_model} {scored}",
            f"distill {rows} {model} --teacher {tmp_path}/lost {out}",
            f"eval {rows} {no_model} {scored}",
            f"eval {rows} {model} --against {tmp_path}/lost {scored}",
            f"sample {rows} {no_model} {out}",
            f"chat {tmp_path}/lost",
            f"serve-policy {no_model}",
        ],
    }
    refused_without_torch([(said, words.split()) for said, all_words in wrong.items() for words in all_words])


def refused_without_torch(wrong: list[tuple[str, list[str]]]) -> None:
    """Assert that each of these commands is refused in one line with this text, and that none loads torch."""
    code = "import json, sys; from posttrain.cli.main import main; codes = [*map(main, json.loads(sys.argv[1]))]; "
    code += "print(json.dumps([codes, 'torch' in sys.modules]))"
    ended = subprocess.run(
        [sys.executable, "-c", code, json.dumps([words for _, words in wrong])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ended.stdout) == [[2] * len(wrong), False]
    told = ended.stderr.splitlines()
    assert len(told) == len(wrong) and all(word in line for (word, _), line in zip(wrong, told, strict=True)), told
