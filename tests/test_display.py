"""Progress for people: few plain lines where nobody watches, a live panel on a terminal, no harm from model text."""

import io

import pytest

from posttrain.runs.display import Display, sample, table
from posttrain.types import Invalid, Rollout, StopReason

METRICS = {"reward": 0.512, "length": 14.2, "entropy": 0.83, "loss": 0.1, "grad_norm": 2.0}
TIMING = {"tokens_per_second": 1234.0, "seconds/rollout": 0.5}


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
    assert line == "step  12/200  reward 0.512  length 14.2  entropy 0.83  1,234 tok/s  0:47 left"


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


def test_quiet_shows_nothing() -> None:
    for out in (io.StringIO(), Terminal()):
        display = Display(quiet=True, stream=out)
        display.start("GRPO", 2, ["a"])
        display.step(1, METRICS, TIMING)
        display.note("saved")
        display.close()
        assert out.getvalue() == ""


def test_a_terminal_gets_a_live_panel_with_the_last_state_left_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    display = Display(stream=out)
    display.start("GRPO on [bold]sums", 3, ["model  tiny"])
    for number in range(1, 4):
        display.step(number, {**METRICS, "reward": (number - 1) / 2, "eval/accuracy": 0.4}, TIMING)
    display.note("saved [checkpoint] 3")
    display.close()
    text = out.getvalue()
    final = text[text.rindex("╭") :]
    for shown in (
        "GRPO on [bold]sums",
        "model  tiny",
        "step 3/3",
        "▁▅█",
        "1.000",
        "1,234",
        "held-out accuracy",
        "done in",
    ):
        assert shown in final
    assert "saved [checkpoint] 3" in text


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
    recorded = {"group": "sum-3", "reward": None, "invalid": "lost", "stop": "eos", "prompt": "p", "text": "t"}
    out = io.StringIO()
    sample([played, failed, recorded, played], 3, out)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("── sum-1 ── reward 1 ── eos ──") and len(lines[0]) == 80
    assert lines[1:5] == ["prompt │ 6*7?", "       │ Think.", "reply  │ 42", "answer │ 42"]
    assert "── sum-2 ── invalid: timed out ── length" in out.getvalue()
    assert "── sum-3 ── invalid: lost ── eos" in out.getvalue()
    assert out.getvalue().count("sum-1") == 1


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
