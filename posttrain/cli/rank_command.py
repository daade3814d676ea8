"""A person ranks replies on the terminal: shuffled, so that positions carry no information, with ties, undo and resume.

Each answer is on disk before the next question is shown. Shown text cannot control the terminal: control codes are made
visible. Input and output may be pipes.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from posttrain.config.inference import Label
from posttrain.core.messages import safe
from posttrain.core.seeds import seed_of
from posttrain.core.types import Task, UserError
from posttrain.data.tasks import Tasks
from posttrain.runs.jsonl_writer import Lines
from posttrain.runs.terminal.output import Output
from posttrain.training.verbs.label import check_continued, check_outputs, derive, load_items
from posttrain.training.verbs.sample import digest_of

NARROWEST = 36  # columns of a reply in a row of replies
LEAST = 2  # lines of a text that are always shown, however small the terminal is
HELP = "best first, = for ties: 2 1=3 4   s skip   u undo   a show all   q quit"


def rank(config: Label) -> int:
    """Ask until all prompts are ranked or the person quits; return the exit code."""
    from posttrain.config.resolve import validate

    validate(config)
    check_outputs(config)
    tasks = load_items(config, None, with_labels=False)
    told = {"verb": "label", "items": digest_of(tasks), "rater": config.rater, "seed": config.seed}
    with Lines(Path(config.out), told, config.resume, config.overwrite) as lines:
        check_continued(lines, tasks)
        screen = Screen(Output(sys.stdout))
        finished, stopped = False, False
        try:
            finished = RankSession(tasks, lines, config.rater, config.seed, screen, _read).run()
        except KeyboardInterrupt:
            stopped = True
            screen.say("")
        skipped = sum(bool(row.get("skipped")) for row in lines)
        screen.say(
            f"{lines.count} of {len(tasks)} items by {safe(config.rater)}, {skipped} of them skipped: {config.out}"
        )
        if not finished:
            unmade = " --best and --pairs are written at the end." if config.best or config.pairs else ""
            again = " and --resume" if lines.count else ""
            screen.say(f"Continue with the same command{again}.{unmade}")
            return 130 if stopped else 0
        best, pairs = derive(config, lines)
        for name, count, file in (("best", best, config.best), ("pairs", pairs, config.pairs)):
            if count is not None:
                screen.say(f"{name:<11} {count} rows: {file}")
    return 0


@dataclass(frozen=True)
class Shown:
    """The distinct replies to a prompt, in the order in which they are shown."""

    order: tuple[int, ...]  # index among the responses, for each shown reply

    @staticmethod
    def of(task: Task, rater: str, seed: int) -> Shown:
        texts = task["responses"]
        different = [place for place, text in enumerate(texts) if texts.index(text) == place]
        random.Random(seed_of(seed, "shown", rater, task["id"])).shuffle(different)
        return Shown(tuple(different))

    def ranks(self, task: Task, groups: Sequence[Sequence[int]]) -> list[int]:
        """Return the rank of each response, from groups of shown numbers (1, 2 ...), the best group first."""
        texts, ranks, rank = task["responses"], {}, 1
        for group in groups:
            for number in group:
                ranks[texts[self.order[number - 1]]] = rank
            rank += len(group)
        return [ranks[text] for text in texts]


def read_ranking(said: str, count: int) -> list[list[int]] | str:
    """Parse "2 1=3 4" as [[2], [1, 3], [4]], or return an error message. ">" and "," are valid separators too."""
    tight = re.sub(r"\s*=\s*", "=", said.strip())
    groups = [group.split("=") for group in re.split(r"[\s>,]+", tight) if group]
    words = [word for group in groups for word in group]
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        return "give the numbers of the replies, the best first, such as " + " ".join(map(str, range(count, 0, -1)))
    numbers = [int(word[:9]) for word in words]
    if strange := [n for n in numbers if not 1 <= n <= count]:
        return f"there is no reply {strange[0]}: they are 1 to {count}"
    if twice := [n for n in numbers if numbers.count(n) > 1]:
        return f"reply {twice[0]} is there twice"
    if left := [n for n in range(1, count + 1) if n not in numbers]:
        return f"reply {left[0]} is missing: rank all, with = for ties"
    sizes = iter(numbers)
    return [[next(sizes) for _ in group] for group in groups]


class RankSession:
    """One ranking session of a person."""

    def __init__(
        self, tasks: Tasks, lines: Lines, rater: str, seed: int, screen: Screen, read: Callable[[], str | None]
    ) -> None:
        """`read`: returns a line of input; None at its end."""
        self.tasks, self.lines, self.rater, self.seed, self.screen, self.read = tasks, lines, rater, seed, screen, read

    def run(self) -> bool:
        """Return True when all is ranked, False on quitting."""
        while self.lines.count < len(self.tasks):
            task = self.tasks[self.lines.count]
            shown = Shown.of(task, self.rater, self.seed)
            if len(shown.order) < 2:  # there is nothing to compare
                self._write(task, shown, None)
                continue
            self._show(task, shown)
            if not self._ask(task, shown):
                return False
        return True

    def _ask(self, task: Task, shown: Shown) -> bool:
        """Process answers until the prompt is done or skipped; False: the person quits."""
        while True:
            self.screen.prompt()
            said = self.read()
            word = said.strip().lower() if said is not None else "q"
            if word == "q":
                return False
            if word == "u":
                if self._undo():
                    return True
                self.screen.say("there is nothing to undo")
            elif word == "s":
                self._write(task, shown, None)
                return True
            elif word == "a":
                self._show(task, shown, whole=True)
            elif isinstance(groups := read_ranking(word, len(shown.order)), str):
                self.screen.say(groups if word not in ("", "?", "h", "help") else HELP)
            else:
                self._write(task, shown, groups)
                return True

    def _write(self, task: Task, shown: Shown, groups: Sequence[Sequence[int]] | None) -> None:
        row: dict[str, Any] = {**task, "ranks": [1] * len(task["responses"]), "skipped": True}
        if groups is not None:
            row = {**task, "ranks": shown.ranks(task, groups)}
        self.lines.write([{**row, "shown": list(shown.order), "labeller": self.rater}])

    def _undo(self) -> bool:
        """Undo the last ranking."""
        while self.lines.count:
            asked = len(set(self.tasks[self.lines.count - 1]["responses"])) > 1
            self.lines.drop()
            if asked:
                return True
        return False

    def _show(self, task: Task, shown: Shown, whole: bool = False) -> None:
        texts = [task["responses"][place] for place in shown.order]
        self.screen.item(f"{self.lines.count + 1} of {len(self.tasks)}", asked_text(task), texts, whole)


def asked_text(task: Task) -> str:
    """Return the prompt as text for a person."""
    if "messages" in task:
        return "\n".join(f"{message['role']}: {message['content']}" for message in task["messages"])
    return str(task["prompt"])


class Screen:
    """The display of a comparison: replies in a row if the terminal is wide enough, otherwise one below the other."""

    def __init__(self, out: Output) -> None:
        from rich.console import Console

        self.console = Console(file=cast(TextIO, out), highlight=False, markup=False, emoji=False)

    def item(self, head: str, prompt: str, replies: Sequence[str], whole: bool) -> None:
        """Print the comparison, shortened to fit the screen; or `whole`, through a pager if it is higher than the
        terminal.
        """
        if whole and self.console.is_terminal:
            with self.console.pager():
                self._draw(head, prompt, replies, whole)
            self.console.print(HELP, soft_wrap=False)
        else:
            self._draw(head, prompt, replies, whole)

    def _draw(self, head: str, prompt: str, replies: Sequence[str], whole: bool) -> None:
        from rich.table import Table

        wide = self.console.width // len(replies) >= NARROWEST
        boxes = 2 if wide else 1 + len(replies)  # in a column, each with a frame of two lines
        free = self.console.height - 3 - 2 * boxes  # lines for the head, the help and the answer
        least = max(LEAST, free // boxes)
        asked = min(least, self._lines(prompt, self.console.width))  # lines left by the prompt go to the replies
        each = None if whole else max(LEAST, (free - asked) // (boxes - 1))
        self.console.rule(head)
        self.console.print(self._box("prompt", prompt, self.console.width, None if whole else least))
        if wide:
            table = Table.grid(expand=True)
            for _ in replies:
                table.add_column(ratio=1)
            width = self.console.width // len(replies)
            table.add_row(*(self._box(str(number), text, width, each) for number, text in enumerate(replies, 1)))
            self.console.print(table)
        else:
            for number, text in enumerate(replies, 1):
                self.console.print(self._box(str(number), text, self.console.width, each))
        self.console.print(HELP, soft_wrap=False)

    def say(self, text: str) -> None:
        self.console.print(text)

    def prompt(self) -> None:
        self.console.print("> ", end="")
        self.console.file.flush()

    def _lines(self, text: str, width: int) -> int:
        return len(_wrapped(self.console, text, width))

    def _box(self, title: str, text: str, width: int, most: int | None) -> Any:
        """Return a frame of `width` columns with the text, shortened to its first `most` lines."""
        from rich.panel import Panel
        from rich.text import Text

        lines = _wrapped(self.console, text, width)
        if not text.strip():
            body = Text("(empty)", style="dim")
        elif most is None or len(lines) <= most:
            body = Text("\n").join(lines)
        else:
            left = sum(map(len, lines[most - 1 :]))
            more = Text(f"... {left:,} more (a: show all)", style="dim")
            body = Text("\n").join([*lines[: most - 1], more])
        return Panel(body, title=Text(title), title_align="left")


def _wrapped(console: Any, text: str, width: int) -> list[Any]:
    """Return the lines of a text in a frame of this width."""
    from rich.text import Text

    shown = Text(safe(text.replace("\t", "    ")), overflow="fold")
    return list(shown.wrap(console, max(1, width - 4)))


def _read() -> str | None:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError:
        return "?"
    except OSError as error:
        raise UserError(f"the terminal cannot be read: {error.strerror or error}") from error
    return line if line else None
