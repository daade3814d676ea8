"""Progress for people: few plain lines where nobody watches, a live panel on a terminal, no harm from model text."""

import io
import json
import math
import re
from dataclasses import replace

import pytest

from posttrain.core.progress import doing, watch
from posttrain.core.rollouts import PlayedTurn, Rollout
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import Invalid, StopReason
from posttrain.runs.terminal import notices
from posttrain.runs.terminal.display import Display
from posttrain.runs.terminal.ending import lost_signal, outcome
from posttrain.runs.terminal.live_region import Passing, Region, Reports, cells
from posttrain.runs.terminal.output import Output
from posttrain.runs.terminal.panel import View, compose, figures
from posttrain.runs.terminal.printing import examples, sample, say, shown, table

METRICS = {"reward": 0.512, "length": 14.2, "entropy": 0.83, "loss": 0.1, "grad_norm": 2.0}
TIMING = {"tokens_per_second/sampled": 1234.0, "seconds/rollout": 0.5}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(steps: range, seconds: float, last: int) -> list[str]:
    """The lines of a run from the first to the last of `steps`, each taking `seconds`."""
    out, clock = io.StringIO(), Clock()
    display = Display(stream=out, clock=clock)
    display.start("GRPO", last, [])
    for number in steps:
        clock.now += seconds
        display.step(number, METRICS, TIMING)
    display.close()
    return out.getvalue().splitlines()[1:]


def test_a_plain_line_holds_the_figures_and_the_time_left() -> None:
    line = run(range(1, 13), 0.25, 200)[-1]
    assert line == "step  12/200  reward 0.512  entropy 0.83  length 14.2  1,234 tok/s  0:47 left"


def test_lines_on_a_terminal_that_cannot_redraw_fit_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    display = Display(stream=out, clock=Clock())
    display.start("GRPO", 3, ["word " * 30])
    display.step(1, {**METRICS, "eval/accuracy": 0.5, "eval/reward": 0.25}, TIMING)
    display.note("finding " * 20)
    display.close()
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) < 80 and len(lines) == 9
    assert "held-out reward 0.250" in out.getvalue() and out.getvalue().split().count("finding") == 20


def test_slow_steps_are_all_printed_and_fast_ones_every_two_seconds_with_the_first_and_the_last() -> None:
    assert len(run(range(1, 8), 3.0, 7)) == 7
    numbers = [int(line.split("/")[0].split()[1]) for line in run(range(1, 101), 0.125, 100)]
    assert numbers[0] == 1 and numbers[-1] == 100
    assert numbers[1:-1] == [17, 33, 49, 65, 81, 97]


def test_the_last_line_is_printed_once_even_if_the_run_ends_early() -> None:
    lines = run(range(1, 6), 0.1, 100)
    assert [line[:8] for line in lines] == ["step   1", "step   5"]


def test_time_left_of_a_resumed_run_counts_its_own_steps_only() -> None:
    assert run(range(101, 106), 10.0, 111)[-1].endswith("1:00 left")
    assert run(range(1, 3), 1800.0, 5)[-1].endswith("1:30:00 left")
    assert run(range(1, 6), 10.0, 5)[-1].endswith("done in 0:50")


def test_held_out_figures_are_always_printed_and_loss_only_where_there_is_no_reward() -> None:
    out, clock = io.StringIO(), Clock()
    display = Display(stream=out, clock=clock)
    display.start("SFT", 10, ["model  tiny"])
    for number in range(1, 5):
        display.step(number, {"loss": 2.5, **({"eval/loss": 2.25} if number == 3 else {})}, {})
    display.note("saved checkpoint 4")
    display.close()
    title, about, first, third, fourth, note = out.getvalue().splitlines()
    assert (title, about, note) == ("SFT", "  model  tiny", "saved checkpoint 4")
    assert "loss 2.5000" in first and "held-out loss 2.250" in third and fourth.startswith("step  4/10")
    assert all("loss" not in line for line in run(range(1, 3), 3.0, 2))


def test_figures_of_a_set_of_held_out_tasks_are_named_after_the_set_and_invalid_ones_shown_where_there_are_some() -> (
    None
):
    out = io.StringIO()
    display = Display(stream=out, clock=Clock())
    display.start("GRPO", 1, [])
    sets = {"eval/mixture/long/reward": 0.25, "eval/mixture/long/invalid": 0.0, "eval/mixture/a.b/invalid": 0.5}
    display.step(1, {**METRICS, **sets}, {})
    display.close()
    line = out.getvalue().splitlines()[1]
    assert "  held-out long reward 0.250  held-out a.b invalid 0.500  " in line and line.count("invalid") == 1


def test_a_line_has_four_held_out_figures_at_most_and_the_evaluation_before_training_a_line_of_its_own() -> None:
    out = io.StringIO()
    display = Display(stream=out, clock=Clock())
    display.start("DPO", 1, [])
    held_out = {f"eval/{name}": 0.5 for name in ("accuracy", "loss", "reward", "length", "margin", "kl/data")}
    display.before(held_out)
    display.step(1, {**METRICS, **held_out}, {})
    display.close()
    _, before, line = out.getvalue().splitlines()
    assert before.startswith("before training  held-out accuracy 0.500  held-out loss 0.500  ")
    assert figures({"eval/logp_per_token/chosen": -2.939}) == [("held-out lp chosen", "-2.939")]
    assert before.count("held-out") == line.count("held-out") == 4


def test_a_line_shows_one_held_out_figure_of_every_part_of_a_mixture_also_of_one_that_scores_0() -> None:
    out = io.StringIO()
    display = Display(stream=out, clock=Clock())
    display.start("GRPO", 1, [])
    parts = {
        f"eval/mixture/{part}/{what}": value
        for part, value in {"maths": 0.447, "sums": 0.0, "code": 0.25}.items()
        for what in ("length", "reward", "accuracy")
    }
    display.before({"eval/accuracy": 0.37, "eval/tasks": 46.0, "eval/reward": 0.4, "eval/length": 9.0, **parts})
    line = out.getvalue().splitlines()[-1]
    for told in ("accuracy 0.370", "maths accuracy 0.447", "sums accuracy 0.000", "code accuracy 0.250"):
        assert line.count(f"held-out {told}") == 1
    assert "maths reward" not in line and "tasks" not in line
    first, last = {"step": 0, **parts}, {"step": 4, **parts}
    assert outcome([first, last])[1] == "held-out sums accuracy 0.000 -> 0.000"


def test_a_suite_and_texts_of_forget_are_on_the_line_and_at_the_end_with_their_values_before() -> None:
    out = io.StringIO()
    display = Display(stream=out, clock=Clock())
    display.start("SFT", 1, [])
    suite = {"suite/mean": 0.25, "suite/sums/accuracy": 0.5, "suite/sums/reward": 0.6, "suite/code/reward": 0.0}
    figures_of_step = {**suite, "suite/sums/length": 9.0, "suite/code/tasks": 4.0, "forget/loss": 2.5}
    display.before(figures_of_step)
    display.step(1, {"loss": 1.0, **figures_of_step}, {})
    display.close()
    told = "suite mean 0.250  suite sums 0.500  suite code 0.000  loss of --forget 2.500"
    _, before, line = out.getvalue().splitlines()
    assert before == f"before training  {told}" and told in line
    rows = [{"step": 0, **figures_of_step}, {"step": 1, **figures_of_step, "suite/sums/accuracy": 0.75}]
    assert outcome(rows)[:2] == ["suite mean 0.250 -> 0.250", "suite sums 0.500 -> 0.750"]


def test_a_line_has_one_speed_and_no_held_out_figure_that_a_more_exact_one_replaces() -> None:
    out = io.StringIO()
    display = Display(stream=out, clock=Clock())
    display.start("run", 1, [])
    held_out = {"eval/accuracy": 0.5, "eval/margin": 0.1, "eval/implicit_reward/chosen": 0.2}
    display.step(1, {"loss": 0.7, **held_out}, {f"tokens_per_second/{kind}": 9.0 for kind in ("read", "learned")})
    line = out.getvalue().splitlines()[-1]
    assert "9 tok/s learned" in line and "tok/s read" not in line
    assert "held-out accuracy 0.500  held-out margin 0.1" in line and "implicit" not in line


def test_small_margins_are_not_shown_as_0_and_a_loss_that_is_the_divergence_is_shown_once() -> None:
    shown = figures({"margin": 0.000123, "eval/margin": -0.000456, "eval/kl/data": 0.5})
    assert shown == [
        ("margin", "0.000123"),
        ("held-out margin", "-0.000456"),
        ("held-out KL from the reference at the data", "0.500"),
    ]
    assert figures({"divergence": 3.1309, "loss": 3.1309}) == [("divergence", "3.1309")]


def test_a_line_says_how_many_groups_were_equal_but_not_of_groups_of_one() -> None:
    def labels(**values: float) -> dict[str, str]:
        return dict(figures({name.replace("__", "/"): value for name, value in values.items()}))

    assert labels(groups__no_signal=0.8125, advantage__abs=0.1)["equal groups"] == "81%"
    assert labels(groups__no_signal=1.0, advantage__abs=0.0)["equal groups"] == "100%"
    assert labels(groups__no_signal=1.0, advantage__abs=0.3) == labels(groups__no_signal=0.0) == {}


def test_the_end_of_a_run_shows_held_out_figures_before_and_after_and_the_groups_that_taught_nothing() -> None:
    rows = [{"step": 0, "eval/accuracy": 0.154, "eval/reward": 0.162}]
    rows += [{"step": n, "reward": 0.1, "accuracy": 0.1, "groups/no_signal": 0.8, "advantage/abs": 0.2} for n in (1, 2)]
    rows[-1] |= {"eval/accuracy": 0.385, "eval/reward": 0.469}
    assert outcome(rows, 13) == [
        "held-out accuracy 0.154 -> 0.385 (13 tasks)", "held-out reward 0.162 -> 0.469", "reward 0.100", "accuracy 0.100",
    ]  # fmt: skip
    assert outcome(rows[1:2]) == ["reward 0.100", "accuracy 0.100"] and outcome([]) == []
    assert outcome([{"step": 1, "nll": 2.0, "eval/loss": 2.5}], 1) == ["held-out loss 2.500 (1 task)", "loss 2.0000"]
    [line] = lost_signal(rows)
    # with 20% of the rollouts in mixed groups, half of which are right: accuracy .1 leaves no group all right, .8 all wrong
    assert " 80% of the rollouts " in line and line.endswith("about 80% of the groups were all wrong, 0% all right")
    [line] = lost_signal([{**row, "accuracy": 0.05, "groups/no_signal": 0.6} for row in rows])
    assert line.endswith("about 60% of the groups were all wrong, 0% all right"), "no more than are equal"
    assert lost_signal([{**row, "groups/no_signal": 0.4} for row in rows]) == lost_signal([]) == []
    assert lost_signal([{**row, "groups/no_signal": 1.0} for row in rows[1:]]) == [], "groups of one rollout"


def test_a_long_activity_is_reported_now_and_then_where_there_is_no_terminal() -> None:
    out, clock = io.StringIO(), Clock()
    reports = Reports(Output(out), clock)
    for number in range(5):
        reports.show(f"playing: {number} of 5", progress=True)
        clock.now += 9
    assert out.getvalue() == "playing: 2 of 5 ...\nplaying: 4 of 5 ...\n"


def test_quiet_shows_nothing() -> None:
    for out in (io.StringIO(), Terminal()):
        display = Display(quiet=True, stream=out)
        display.start("GRPO", 2, ["a"])
        display.step(1, METRICS, TIMING)
        display.note("saved")
        display.close()
        assert out.getvalue() == ""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    size(monkeypatch, 80, 24)
    return Terminal()


def size(monkeypatch: pytest.MonkeyPatch, columns: int, rows: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(rows))


def test_a_terminal_gets_a_live_panel_with_the_last_state_left_on_it(terminal: Terminal) -> None:
    display = Display(stream=terminal)
    display.start("GRPO on [bold]sums", 3, ["model  tiny"])
    for number in range(1, 4):
        display.step(number, {**METRICS, "reward": (number - 1) / 2, "eval/accuracy": 0.4}, TIMING)
    display.note("saved [checkpoint] 3\x1b[2J")
    display.close()
    text = terminal.getvalue()
    assert text.startswith("GRPO on [bold]sums\n  model  tiny\n") and text.count("model  tiny") == 1, "said once, above"
    assert "saved [checkpoint] 3\\x1b[2J\n" in text
    assert screen(text)[-5:] == [
        "── GRPO on [bold]sums ─────────────────────────────────────────────────────────",
        f"step 3/3  {'━' * 55}  done in 0:00",
        "reward 1.000   entropy 0.83   length 14.2   tok/s 1,234",
        "reward ▁▅█",
        "held-out accuracy 0.400",
    ]
    assert text.endswith("\x1b[?25h"), "the cursor is back"


def test_what_a_run_was_asked_to_do_is_broken_between_words_on_a_terminal_alone(terminal: Terminal) -> None:
    line = "  steps " + ", ".join(["1,234,567 tokens"] * 12)
    for stream, indent in ((terminal, 4), (io.StringIO(), 4)):
        display = Display(stream=stream)
        display.start("GRPO", 3, [line])
        display.close()
        shown = [row for row in stream.getvalue().splitlines() if "1,234,567" in row]
        assert all(row.startswith(" " * indent) for row in shown)
        assert sum(row.count("1,234,567 ") for row in shown) >= 8 and sum(row.count("1,234,567") for row in shown) == 12
        assert (len(shown) > 2 and max(map(len, shown)) < 80) if stream is terminal else shown == ["  " + line]


def screen(text: str, columns: int = 80) -> list[str]:
    """What a terminal shows after this text: the codes that move up and erase are carried out, lines wrap."""
    lines, row = [""], 0
    for part in re.split(r"(\n|\r|\x1b\[\d*A|\x1b\[[JK]|\x1b\[\?25[hl])", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part in ("\x1b[J", "\x1b[K"):
            del lines[row + 1 :]
            lines[row] = ""
        elif part.endswith("A") and part.startswith("\x1b["):
            row = max(0, row - int(part[2:-1]))
        elif not part.startswith("\x1b") and part != "\r":
            lines[row] += part
            assert cells(lines[row]) <= columns, "nothing is longer than the terminal is wide"
    return [line for line in lines if line]


VIEW = View(
    "rl runs/a", 12, 200, "1:02:03 left",
    {"reward": 0.5, "accuracy": 0.25, "entropy": 1.5, "length": 120.0, "kl": 0.01, "invalid": 0.1, "loss": 0.3,
     "tokens_per_second/sampled": 12345.0, "eval/accuracy": 0.2, "eval/reward": 0.3,
     "eval/invalid": 0.0, "eval/length": 99.0},
    [0.1 * i for i in range(90)],
)  # fmt: skip


def text_of(view: View, columns: int, rows: int) -> list[str]:
    return ["".join(piece for piece, _ in line) for line in compose(view, columns, rows)]


def test_the_panel_has_everything_at_80_by_24() -> None:
    assert text_of(VIEW, 80, 24) == [
        "── rl runs/a ──────────────────────────────────────────────────────────────────",
        "step  12/200  ━━━────────────────────────────────────────────────  1:02:03 left",
        "reward 0.500   accuracy 0.250   entropy 1.50   length 120.0   KL 0.0100",
        "invalid 0.1   tok/s 12,345",
        "reward ▁▁▁▁▂▂▂▂▂▂▂▃▃▃▃▃▃▃▄▄▄▄▄▄▅▅▅▅▅▅▅▆▆▆▆▆▆▆▇▇▇▇▇▇████",
        "held-out accuracy 0.200   reward 0.300   length 99.0",
    ]


@pytest.mark.parametrize("title", ["rl runs/a", "rl " + "训练" * 60, "rl \x1b[2J\nb", ""])
@pytest.mark.parametrize("values", [VIEW.values, {"loss": 0.25, "tokens_per_second/sampled": 1.0}, {}])
def test_the_panel_fits_any_terminal_and_keeps_what_matters_most(title: str, values: dict[str, float]) -> None:
    view = replace(VIEW, title=title, values=values)
    for columns in range(1, 130):
        for rows in (1, 2, 3, 5, 8, 10, 24, 60):
            lines = text_of(view, columns, rows)
            assert 1 <= len(lines) < max(2, rows) and all(cells(line) < max(2, columns) for line in lines)
            assert not re.search(r"[\x00-\x1f]", "".join(lines))
            if columns >= 40 and rows >= 8:
                shown = "\n".join(lines)
                kept = [f"{name} {values[name]:.3f}" for name in ("reward", "accuracy") if name in values]
                for part in (
                    "step  12/200",
                    "━",
                    "1:02:03 left",
                    *kept,
                    *(["entropy 1.50"] if "entropy" in values else []),
                ):
                    assert part in shown, (columns, rows, part)


def test_figures_beyond_measure_do_not_fill_the_terminal() -> None:
    for value in (1e308, -1e308, math.inf, -math.inf, math.nan):
        view = replace(VIEW, values={"reward": value, "eval/reward": value}, history=[value, 1.0, -value, 0.5])
        assert all(len(line) < 80 for line in text_of(view, 80, 24))
        assert any("e+308" in line or "inf" in line or "nan" in line for line in text_of(view, 80, 24))


def test_a_window_that_became_narrower_is_drawn_over_where_the_terminal_has_wrapped_it(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [[("a" * 79, "")], [("b" * 30, "")]]
    region = Region(Output(terminal), lambda columns, rows: lines)
    region.print("")
    size(monkeypatch, 40, 10)
    before = len(terminal.getvalue())
    region.print("above")
    assert terminal.getvalue()[before:].startswith("\r\x1b[2A\x1b[Jabove\n"), "79 cells are two rows of 40"


def test_what_is_printed_while_the_panel_is_drawn_goes_above_it(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = Region(Output(terminal), lambda columns, rows: [[("panel", "")]])
    region.start()
    region.print("a note")
    region.stop()
    assert screen(terminal.getvalue()) == ["a note", "panel"]


class Broken(Terminal):
    """A terminal that goes away after some text."""

    def __init__(self, error: Exception, after: int) -> None:
        super().__init__()
        self.error, self.left = error, after

    def write(self, text: str) -> int:
        self.left -= len(text)
        if self.left < 0:
            raise self.error
        return super().write(text)

    def flush(self) -> None:
        if self.left < 0:
            raise self.error


@pytest.mark.parametrize("after", [0, 200, 600])
@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "x"), OSError(5, "x"), OSError(28, "x"), ValueError("closed")])
def test_a_stream_that_is_gone_ends_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, error: Exception, term: str, after: int
) -> None:
    monkeypatch.setenv("TERM", term)
    display = Display(stream=Broken(error, after))
    display.start("GRPO", 9, ["a"])
    for number in range(1, 10):
        display.step(number, METRICS, TIMING)
        display.note("saved")
    display.close()


def test_a_stream_that_was_closed_before_is_as_good_as_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    display = Display()
    display.start("GRPO", 1, ["a"])
    display.step(1, METRICS, TIMING)
    display.close()
    table("a", ["b"], [[1]])


def test_a_sparkline_survives_constant_missing_and_infinite_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for values in ([1.0], [0.5] * 500, [float("nan"), 1.0, float("inf"), 2.0]):
        out = Terminal()
        display = Display(stream=out)
        display.start("run", 500, [])
        for number, value in enumerate(values, 1):
            display.step(number, {"reward": value}, {})
        display.close()
        assert "reward" in out.getvalue()


def test_a_table_is_aligned_with_numbers_to_the_right() -> None:
    out = io.StringIO()
    table("Held out", ["model", "accuracy", "tasks"], [["base", 0.25, 1200], ["trained", None, 7]], out)
    assert out.getvalue().splitlines() == [
        "Held out",
        "model    accuracy  tasks",
        "base         0.25  1,200",
        "trained         -      7",
    ]


def test_a_table_on_a_terminal_shows_every_cell_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    table("Held out", ["model", "[b]"], [["[red]base[/red]", 0.25]], out)
    assert all(shown in out.getvalue() for shown in ("Held out", "[b]", "[red]base[/red]", "0.25"))


def test_samples_show_prompt_reply_and_reward_of_played_and_of_recorded_rollouts() -> None:
    played = Rollout({"answer": 42}, "sum-1", [], 1.0, stop=StopReason.EOS, prompt="6*7?\nThink.", text="42")
    failed = Rollout({}, "sum-2", [], Invalid("timed out"), stop=StopReason.LENGTH, prompt="?", text="")
    recorded = {
        "group": "sum-3",
        "reward": None,
        "invalid": "lost",
        "stop": "eos",
        "prompt": "p",
        "text": "t",
        "turns": [],
    }
    out = io.StringIO()
    sample([played, failed, recorded, played], 3, out)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("── sum-1 [0] ── reward 1 ── ended by eos ──") and len(lines[0]) == 80
    assert lines[1:5] == ["prompt │ 6*7?", "       │ Think.", "reply  │ 42", "answer │ 42"]
    assert "── sum-2 [0] ── invalid: timed out ── ended by length" in out.getvalue()
    assert "── sum-3 ── invalid: lost ── ended by eos" in out.getvalue()
    assert out.getvalue().count("sum-1") == 1
    stepped = replace(played, reward=1.5, rewards={"outcome": 1.0}, steps=[(1, 0.25), (2, 0.25)])
    sample([stepped], 1, out)
    assert "── reward 1.5: outcome 1, steps 0.5 ── ended" in out.getvalue()


def test_samples_on_a_terminal_are_as_wide_as_it_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    said = "word  " * 30 + "x" * 100 + "\n  indented"
    out = Terminal()
    sample([Rollout({}, "g", [], 0.0, prompt="p", text=said)], 1, out)
    lines = [line.rstrip("\r") for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= 49
    shown = [line[9:] for line in lines[2:] if line]
    assert "".join(shown).replace(" ", "") == said.replace("\n", "").replace(" ", "")


def test_a_long_prompt_loses_its_middle_on_a_terminal_and_a_long_reply_does_not(terminal: Terminal) -> None:
    long = "\n".join(f"line {number}" for number in range(1000))
    rollout = Rollout({}, "g", [], 0.0, prompt=long, text=long)
    sample([rollout], 1, terminal)
    lines = [line.rstrip("\r") for line in terminal.getvalue().splitlines()]
    reply = next(place for place, line in enumerate(lines) if line.startswith("reply"))
    prompt = [line[9:] for line in lines[1:reply]]
    assert prompt[7:10] == ["line 7", "... (968 more lines: --json shows all)", "line 976"] and len(prompt) == 33
    assert [line[9:] for line in lines[reply : reply + 1000]] == long.split("\n")
    piped = io.StringIO()
    sample([rollout], 1, piped)
    assert piped.getvalue().count("line 500") == 2, "a file has everything"


def test_characters_that_take_two_columns_fit_a_terminal_too_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    said = "法国的首都是巴黎。" * 20 + " Paris, 巴黎 " * 9 + "\n" + "عاصمة فرنسا هي باريس. " * 9 + "👩‍👩‍👧 " * 40
    out = Terminal()
    rollout = Rollout({"answer": "巴黎" * 40}, "城市", [], 0.0, prompt="巴黎" * 90, text=said)
    sample([rollout], 1, out)
    examples("replies", {"best": replace(rollout, task={"id": "城市" * 30, "answer": "巴黎" * 40})}, out)
    lines = [line.rstrip("\r") for line in out.getvalue().splitlines()]
    assert max(map(cells, lines)) <= 49
    names = [line[:7].strip() for line in lines]
    shown = "".join(line[9:] for line in lines[names.index("reply") : names.index("answer")])
    assert shown.replace(" ", "") == said.replace("\n", "").replace(" ", "")
    assert min(map(cells, lines[names.index("prompt") : names.index("reply") - 1])) >= 48, "no line is half as long"


def test_columns_of_a_table_stand_one_below_the_other_whatever_their_alphabet() -> None:
    out = io.StringIO()
    table("replies", ["text", "n"], [["巴黎巴黎", 1], ["Paris", 20]], out)
    assert out.getvalue().splitlines()[1:] == ["text       n", "巴黎巴黎   1", "Paris     20"]


def test_code_and_spaces_are_shown_as_they_are_read(terminal: Terminal) -> None:
    text = "def f():\r\n\treturn\u00a01\n\t\tx\u3000y \u200d \u202e"
    sample([Rollout({}, "g", [], 0.0, prompt="p", text=text)], 1, terminal)
    lines = [line.rstrip("\r") for line in terminal.getvalue().splitlines()]
    assert "reply  │ def f():" in lines and "       │     return\u00a01" in lines
    assert "       │         x\u3000y \u200d \\u202e" in lines, "what turns the direction of text is made visible"


def test_samples_of_several_turns_show_what_each_side_said_in_its_place() -> None:
    turns = [
        PlayedTurn(SpanKind.PROMPT, "Guess a number.", 0, 0, 4),
        PlayedTurn(SpanKind.SAMPLED, "50", 0, 4, 2),
        PlayedTurn(SpanKind.OBSERVATION, "Lower.", 0, 6, 2, reward=0.5),
        PlayedTurn(SpanKind.SAMPLED, "calculator(7 * 6)\nplease", 0, 8, 5),
        PlayedTurn(SpanKind.TOOL, "42", 0, 13, 2),
        PlayedTurn(SpanKind.PROMPT, "So far: 42", 1, 0, 4),
        PlayedTurn(SpanKind.SAMPLED, "42", 1, 4, 2),
    ]
    played = Rollout({"answer": 42}, "g", [], 1.0, turns=turns, prompt="not shown", text="not shown")
    for rollout in (played, json.loads(json.dumps(shown(played)))):
        out = io.StringIO()
        sample([rollout], 1, out)
        assert out.getvalue().splitlines()[1:-1] == [
            "prompt │ Guess a number.",
            "reply  │ 50",
            "env    │ Lower.  (reward 0.5)",
            "reply  │ calculator(7 * 6)",
            "       │ please",
            "tool   │ 42",
            "       │ (a new context)",
            "prompt │ So far: 42",
            "reply  │ 42",
            "answer │ 42",
        ]


def test_model_text_cannot_steer_the_terminal_or_break_a_narrow_encoding() -> None:
    text = "\x1b[2J\x07\r红"
    rollout = Rollout({}, "g", [], 0.0, prompt="p", text=text)
    out = io.StringIO()
    sample([rollout], 1, out)
    assert "reply  │ \\x1b[2J\\x07\\r红" in out.getvalue()
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    sample([rollout], 1, narrow)
    table("红", ["a"], [[1]], narrow)
    assert b"\\u7ea2" in narrow.buffer.getvalue()


def test_notes_are_broken_between_words_only(terminal: Terminal) -> None:
    display = Display(stream=terminal)
    display.start("GRPO", 3, [])
    display.note("health, step 7: entropy fell " + " ".join(["exploring"] * 20) + "\nusual causes: " + "rates, " * 30)
    display.close()
    shown = screen(terminal.getvalue())
    words = [word for line in shown[1:] for word in line.split()]
    assert words.count("exploring") == 20 and words.count("rates,") == 30, "no word is in two lines"
    assert any(line.startswith("usual causes: rates,") for line in shown)


def test_what_is_held_back_stands_behind_what_describes_the_run(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", terminal)
    with notices.held():
        notices.warn("the reward changed")
        display = Display(stream=terminal)
        assert terminal.getvalue() == ""
        display.start("GRPO", 3, ["model  tiny"] * 20)
        notices.tell("late")
        display.close()
    text = terminal.getvalue()
    order = [text.rindex("model  tiny"), text.index("posttrain: warning: the reward changed"), text.index("step 0/3")]
    assert order == sorted(order) and text.rstrip().endswith("late"), "nothing is lost"


def test_what_is_held_back_is_shown_also_where_nothing_describes_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), notices.held():
        notices.warn("a")
        raise ValueError
    with notices.held():
        notices.warn("b")
        Display(quiet=True).start("GRPO", 3, ["model"])
        assert capsys.readouterr() == ("", "posttrain: warning: a\nposttrain: warning: b\n")
    notices.tell("at once")
    assert capsys.readouterr().err == "at once\n"


def test_what_is_being_done_is_one_line_that_anything_else_takes_away(terminal: Terminal) -> None:
    out, clock = Output(terminal), Clock()
    passing = Passing(Output(terminal), [out], clock)
    passing.show("opening " + "long/" * 40 + "\x1b[2J")
    assert len(screen(terminal.getvalue())) == 1
    passing.show("playing: 1 of 9", progress=True)
    clock.now += 1
    passing.show("playing: 2 of 9", progress=True)
    assert screen(terminal.getvalue()) == ["playing: 2 of 9 ..."], "progress in time, in the same line"
    out.write("rl runs/a\n")
    passing.erase()
    assert screen(terminal.getvalue()) == ["rl runs/a"]
    out.write("more\n")
    assert terminal.getvalue().endswith("rl runs/a\nmore\n"), "nothing is erased twice"


def test_once_a_run_is_described_nothing_is_said_of_what_is_being_done(terminal: Terminal) -> None:
    told: list[str] = []
    watch(lambda text, progress: told.append(text))
    doing("opening a model")
    Display(stream=terminal).start("GRPO", 3, [])
    doing("opening another")
    assert told == ["opening a model"]


def test_examples_are_cut_to_a_few_lines_and_cannot_rewrite_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\rfine\x07" + " word" * 100
    plain = Rollout(
        {"id": "t1", "answer": "A" * 300}, "t1", [], 0.0, prompt="few shots\n" * 30 + "the end:", text=hostile
    )
    messages = [{"role": "user", "content": "first"}, {"role": "user", "content": "the question"}]
    chat = Rollout({"id": "t2", "messages": messages}, "t2", [], 1.0, prompt="<|im_start|>assistant\n", text="\n\n")
    examples("Replies of m", {"worst, reward 0": plain, "best, reward 1": chat})
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80 and "\x1b" not in said and "\r" not in said and "\\x1b[2J" in said
    assert lines[2:4] == ["prompt │ ... (30 more lines before)", "       │ the end:"]
    assert lines[6].startswith("       │ ... (") and lines[7].endswith("AAA...")
    assert lines[9:11] == ["prompt │ the question", "reply  │"]


def test_an_example_of_several_turns_shows_what_was_said_between_the_replies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    turns = [PlayedTurn(SpanKind.PROMPT, "what is 17*6+15", 0, 0, 4)]
    for number in range(4):
        turns.append(PlayedTurn(SpanKind.SAMPLED, f"[{number}]", 0, 4, 2))
        turns.append(PlayedTurn(SpanKind.TOOL, f"={number}", 0, 6, 2))
    played = Rollout({"id": "t"}, "t", [], 1.0, turns=turns[:4], prompt="what is 17*6+15", text="[0][1]")
    examples("Replies", {"best": played, "worst": replace(played, turns=turns)})
    lines = capsys.readouterr().out.splitlines()
    told = ["prompt │ what is 17*6+15", "reply  │ [0]", "tool   │ =0", "reply  │ [1]"]
    assert lines[2:6] == told and lines[7:11] == told
    assert lines[11:-1] == ["tool   │ =1", "reply  │ [2]", "tool   │ =2", "       │ ... (2 more turns)"]


def test_what_is_said_at_the_end_is_broken_between_words_only(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", terminal)
    say("ask it      posttrain rl --reward-model runs/rm ..., or label --with reward-model=runs/rm", "done")
    assert screen(terminal.getvalue()) == [
        "ask it      posttrain rl --reward-model runs/rm ..., or label --with",
        "            reward-model=runs/rm",
        "done",
    ]


def test_a_title_is_not_broken_where_its_table_is_narrow(terminal: Terminal) -> None:
    table("4 tasks, 2 samples each", ["", "rl"], [["reward", 0.1]], terminal)
    assert "4 tasks, 2 samples each" in terminal.getvalue()
