"""README, the pages of a start and the guides say what the code does, and what they show runs."""

from __future__ import annotations

import inspect
import io
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from documents import ROOT, blocks, run

import posttrain.verify
from posttrain.cli.argument_errors import option_names
from posttrain.cli.command_table import COMMANDS
from posttrain.cli.main import app
from posttrain.config.row_options import Data
from posttrain.config.verbs import VERBS, load
from posttrain.core.foreign_options import ELSEWHERE
from posttrain.envs.play.load_env import BUILTIN
from posttrain.system.user_code import load_named

JOURNEYS = {
    "README": ("README.md",),
    "start": (
        "docs/start/install.md",
        "docs/start/first-run.md",
        "docs/start/own-reward.md",
        "docs/start/own-environment.md",
        "docs/start/agents.md",
        "docs/start/preferences.md",
        "docs/guides/algorithms.md",
        "docs/guides/curriculum.md",
        "docs/guides/runs.md",
        "docs/guides/tracking.md",
        "docs/guides/lora.md",
        "docs/guides/evaluation.md",
    ),
    "coming-from": ("docs/guides/coming-from.md",),
    "environments": ("docs/guides/environments.md",),
    "chat-rows": ("docs/guides/chat-rows.md",),
    "process-rewards": ("docs/guides/process-rewards.md", "docs/guides/search.md"),
    "stages": ("docs/guides/stages.md",),
    "distillation": ("docs/guides/distillation.md",),
    "retrieval": ("docs/guides/retrieval.md",),
    "serving": ("docs/guides/serving.md",),
    "verifiers": ("docs/guides/verifiers.md",),
    "skill": ("skills/posttrain/SKILL.md",),
}
"""Pages whose blocks run one after the other in one folder."""
RUNS = {
    "README": 1,
    "start": 52,
    "coming-from": 18,
    "environments": 20,
    "chat-rows": 5,
    "process-rewards": 8,
    "stages": 9,
    "distillation": 6,
    "retrieval": 7,
    "serving": 6,
    "verifiers": 16,
    "skill": 11,
}
"""How many programs and commands that are."""
SHORT = ("README", "start", "coming-from")
PAGES = {name: ROOT / name for names in JOURNEYS.values() for name in names}
TEXTS = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
OWN = ("README.md", *JOURNEYS["start"], "docs/guides/coming-from.md", "docs/guides/scaling.md", "docs/guides/vllm.md")
SAID = re.sub(
    r"^```python\n# commands\.py\n.*?^```$",
    "",
    "\n".join((ROOT / name).read_text(encoding="utf-8") for name in OWN),
    flags=re.MULTILINE | re.DOTALL,
)
"""The text of these pages without the commands of other trainers."""
WORDS = {
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--max-restarts",
    "--config",
    "--set",
    "--help",
    "--json",
    "--kind",
    "--page",
    "--arms",
    "--browser",
    "--count",
    "--num-generations",
    "--replies",
    "--index-url",
    "--from",
    "--torch-backend",
    "--enable-scale-out",
    "--logprobs-mode",
    "--generation-config",
    "--weight-transfer-config",
    "--enable-lora",
    "--max-lora-rank",
    "--logdir",
    "--seed",
}
"""Options of no configuration: of the command itself, of a verb without one, of other programs and trainers."""


def test_readme_is_one_page() -> None:
    text = TEXTS["README.md"]
    assert text.count("\n") <= 150 and len(text.encode()) <= 9_000


@pytest.mark.timeout(600)  # some 20 seconds of one core, which a busy machine does not have at once
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("README", "start", "coming-from") else pytest.param(name, marks=pytest.mark.long)
        for name in JOURNEYS
    ],
)
def test_every_block_runs_in_its_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("1+2+3=\n\n"))  # what is said in chat
    before = set(sys.modules)
    ran = [run(block) for page in JOURNEYS[name] for block in blocks(PAGES[page])]
    for made in set(sys.modules) - before:
        if str(getattr(sys.modules[made], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[made]
    assert sum(ran) == RUNS[name]


def test_rewards_of_the_page_on_environments_judge_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # its modules must not be found by other tests
    for block in blocks(PAGES["docs/guides/environments.md"]):
        if block.file and block.language == "python":
            (tmp_path / block.file).write_text(block.text)
    task = {"prompt": "2+2=", "answer": "4"}
    assert load_named("my.py:reward")(task, "4") == {"answer": 1.0, "short": 0.1}
    assert load_named("mine.py:reward")(task, r"\boxed{4}") == {"answer": 1.0, "form": 0.0}
    graded = load_named("steps.py:steps")(task, "<think>2 and 2</think>4")
    assert graded.reward == 1.0 and [(s.end, s.reward, s.reply) for s in graded.spans] == [(22, 0.5, -1)]
    asked = load_named("tools.py:calculator")(task)
    assert next(asked).stop == ("</calc>",)
    told = asked.send("<calc>2+2</calc>")
    assert told.text == "<out>4</out>" and told.tool
    with pytest.raises(StopIteration) as ended:
        asked.send("it is 4")
    assert ended.value.value == 1.0


def test_table_of_verifiers_names_each_of_them_and_each_has_an_example() -> None:
    text = TEXTS["docs/guides/verifiers.md"]
    examples = "".join(block.text for block in blocks(PAGES["docs/guides/verifiers.md"]))
    for name in posttrain.verify.__all__:
        assert f"`{name}" in text and (f"{name}(" in examples or name in ("final_answer", "last_boxed")), name


def test_every_verb_and_every_option_that_a_page_names_exists() -> None:
    verbs = set(re.findall(r"posttrain ([a-z-]+) (?:--|[A-Z]|runs/|\.\.\.)", SAID)) - {"import"}
    assert {"sft", "rl", "eval", "chat", "check", "algorithms"} <= verbs <= {name.lstrip("-") for name in app}
    known = {f"--{name.replace('_', '-')}" for verb in VERBS for name in option_names(verb)}
    others = [load(command.options) for command in COMMANDS if command.options]
    known |= {f"--{f.name.replace('_', '-')}" for config in others for f in fields(config)}
    plain = [load(f"posttrain.cli.{command.function}") for command in COMMANDS if not command.options]
    known |= {f"--{name.replace('_', '-')}" for function in plain for name in inspect.signature(function).parameters}
    known |= {f"--no-{name[2:]}" for name in known}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", SAID.partition("## OpenRLHF")[0]))
    assert named <= known | WORDS, sorted(named - known - WORDS)


def test_every_environment_is_in_the_help() -> None:
    said = inspect.getsource(Data)
    assert set(BUILTIN) <= set(re.findall(r"[\w-]+", said.partition("Built in are")[2].partition(". In sft")[0]))


def test_options_of_the_page_on_other_trainers_are_those_that_the_command_answers_with() -> None:
    """A name of another trainer in a row of the page, and of the command's own table: both lead to an option."""
    page = (ROOT / "docs" / "guides" / "coming-from.md").read_text(encoding="utf-8")
    told = 0
    for theirs, ours in re.findall(r"^\| (`.*?) \| (.*?) \|$", page, re.MULTILINE):
        for name in re.findall(r"`[-\w.]*?(\w+)(?:=[^`]*)?`", theirs):
            options = [f"--{option.replace('_', '-')}" for option in re.findall(r"{([\w.]+)}", ELSEWHERE.get(name, ""))]
            told += bool(options)
            assert not options or any(option in ours for option in options), (name, options)
    assert told > 20


def test_what_the_readme_installs_and_makes_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r'pip install "\.\[([\w-]+)\]"', TEXTS["docs/start/install.md"])) == set(extras)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, least in (("README.md", {"demo", "test", "docs"}), ("docs/development.md", {"check", "test", "docs"})):
        made = set(re.findall(r"`make ([\w-]+)`", (ROOT / name).read_text(encoding="utf-8")))
        assert least <= made <= targets, name


def test_oldest_and_newest_torch_of_the_makefile_are_the_bounds() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = re.fullmatch(r"torch>=(\d+\.\d+),<(\d+)\.(\d+)", next(d for d in needed if d.startswith("torch>")))
    assert bounds is not None
    chosen = dict(re.findall(r"^TORCH_(\w+) := (\d+\.\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert chosen == {"OLDEST": bounds[1], "NEWEST": f"{bounds[2]}.{int(bounds[3]) - 1}"}


@pytest.mark.parametrize("name", PAGES)
def test_pictures_and_files_that_a_page_names_exist(name: str) -> None:
    for path in re.findall(r"\]\(([\w/.+-]+)(?:#[\w-]+)?\)", TEXTS[name]):
        made = "/reference/" in f"/{path}"  # by the site's build, which checks these links
        assert made or (PAGES[name].parent / path).exists(), path


def test_every_script_that_a_document_names_is_there() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        (document.name, script)
        for document in documents
        for script in re.findall(
            r"\b(?:benchmarks|recipes|examples|tests)/[\w/]+\.(?:py|toml)", document.read_text("utf-8")
        )
    }
    assert len(named) > 30
    assert not [(document, script) for document, script in sorted(named) if not (ROOT / script).exists()]
