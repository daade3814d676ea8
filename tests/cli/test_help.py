"""Help: a page for the first hour, a page of everything, both from where options are declared."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import pytest

from posttrain.cli.command_table import COMMANDS, Command
from posttrain.cli.main import main
from posttrain.config.option_groups import GROUPS, OptionGroup, options_of
from posttrain.config.training import RL, Distill, Training
from posttrain.config.verbs import VERBS, load
from posttrain.core.component import option, setting_of

KINDS: tuple[type[Any], ...] = tuple(load(command.options) for command in COMMANDS if command.options)
BY_NAME = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)


def page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str, columns: int = 80
) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(list(words)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= columns for line in lines), [line for line in lines if len(line) > columns]
    return lines


def sections(lines: list[str]) -> dict[str, list[str]]:
    """Heading -> the options under it."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if re.fullmatch(r"[A-Z][a-z]+:", line):
            found[line[:-1].lower()] = []
        elif found and re.match(r"  -", line):
            found[list(found)[-1]].append(line.split()[0].partition(".")[0].rstrip(","))
    return found


@BY_NAME
def test_help_of_a_command_fits_sixty_lines_of_eighty_columns(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = page(capsys, monkeypatch, *command.name.split(), "--help")
    assert len(lines) <= 60
    assert lines[0].startswith(f"posttrain {command.name}: {command.help[:20]}")
    assert lines == page(capsys, monkeypatch, *command.name.split(), "-h")


@pytest.mark.parametrize("verb", VERBS)
def test_whole_help_has_every_option_once_under_its_heading(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short, whole = (sections(page(capsys, monkeypatch, verb, word)) for word in ("--help", "--help-all"))
    kind = VERBS[verb].options
    declared = {o.name: o for o in options_of(kind) if o.name != "settings"}
    wanted: dict[str, set[str]] = {o.group: set() for o in declared.values()}
    for o in declared.values():
        wanted[o.group].add(f"--{o.name.rstrip('_').replace('_', '-')}")
    for flag in kind.flags():
        wanted["algorithm"].add(f"--{flag.replace('_', '-')}")
    if kind.algorithm_kind is not None:
        wanted["algorithm"].add("--set")
    wanted.setdefault("record", set()).add("--config")
    assert {heading: set(names) for heading, names in whole.items()} == wanted
    assert [heading for heading in GROUPS if heading in whole] == list(whole), "in the order of GROUPS"
    every = [name for names in whole.values() for name in names]
    assert len(every) == len(set(every))
    first = {f"--{name.rstrip('_').replace('_', '-')}" for name, o in declared.items() if o.first_hour}
    first |= {f"--{name.replace('_', '-')}" for name, flag in kind.flags().items() if flag.first_hour}
    assert {name for names in short.values() for name in names} == first | {"--config"}
    assert len(first) <= 26


def test_the_front_page_says_in_one_screen_what_to_do_first_and_where_help_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = page(capsys, monkeypatch)
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert all(word in text for word in ("posttrain init", "  sft ", "  rl ", "  prefer ", "  eval ", "--help-all"))
    assert lines[3].startswith("  posttrain init"), "first things first"


@pytest.mark.parametrize("word", ["--help", "-h", "--help-all"])
def test_help_without_a_command_lists_all_of_them(
    word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = page(capsys, monkeypatch, word)
    assert len(lines) <= 60
    assert all(any(line.startswith(f"  {command.name} ") for line in lines) for command in COMMANDS)


def test_a_page_that_leaves_sentences_out_says_where_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert page(capsys, monkeypatch, "query", "--help")[-1] == "posttrain query --help-all says more about these."
    assert "--help-all" not in "".join(page(capsys, monkeypatch, "query", "--help-all"))
    assert "--help-all" not in "".join(page(capsys, monkeypatch, "merge", "--help")), "nothing of it is left out"


def test_help_of_a_command_of_commands_lists_these(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["retriever"], ["retriever", "--help"]):
        assert [line.split()[1] for line in page(capsys, monkeypatch, *words) if line.startswith("  retriever ")] == [
            "build",
            "serve",
        ]


def test_help_of_a_command_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrain", "--help"]) == 2
    assert "retrain" in capsys.readouterr().err


def test_words_behind_two_dashes_ask_for_no_help_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--slurm", "--", "rl", "--help"]) == 2
    assert not capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 100])
def test_help_follows_the_width_of_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    widest = max(map(len, page(capsys, monkeypatch, "rl", "--help-all", columns=columns)))
    assert columns - 10 < widest <= columns


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_option_has_a_group_and_a_text_that_answers_what_it_does(kind: type[Any]) -> None:
    for told in options_of(kind):
        assert told.group in GROUPS, f"{kind.__name__}.{told.name} stands in a class without a group"
        assert told.help.endswith((".", "...", "job.sbatch")), (told.name, told.help)
        assert told.help[0].isupper() or told.name == "launch" or told.help.startswith(("--launch", "vLLM")), told.help
        assert not re.match(r"(What|How|Whose|Whether|As in) ", told.help), (told.name, told.help)
    for name, flag in kind.flags().items() if hasattr(kind, "flags") else ():
        assert flag.help.endswith(".") and not re.match(r"(What|Whose|Whether) ", flag.help), (name, flag.help)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_option_in_gib_has_a_bound_so_that_its_bytes_are_a_number(kind: type[Any]) -> None:
    declared = {f.name: setting_of(f).bounds for f in fields(kind)}
    for name in [o.name for o in options_of(kind) if o.value == "GIB"]:
        most = declared[name].most
        assert most is not None and most <= 2**20, name


def test_an_option_that_another_class_overrides_keeps_its_group_text_and_first_hour() -> None:
    lr = [next(o for o in options_of(kind) if o.name == "lr") for kind in (Training, RL, Distill)]
    assert [o.default for o in lr] == [1e-5, 1e-6, 1e-5]
    assert {(o.group, o.first_hour, o.help) for o in lr} == {
        ("optimisation", True, "Peak learning rate of the optimizer.")
    }


def test_how_an_option_is_shown_stands_where_it_is_declared() -> None:
    @dataclass(frozen=True)
    class Own(OptionGroup, group="sampling"):
        warmth: float = option(0.5, first_hour=True, value="DEGREES")
        bare: int = 3

    told = {o.name: o for o in options_of(Own)}
    assert (told["warmth"].group, told["warmth"].first_hour, told["warmth"].value) == ("sampling", True, "DEGREES")
    assert (told["bare"].group, told["bare"].first_hour, told["bare"].default) == ("sampling", False, 3)
