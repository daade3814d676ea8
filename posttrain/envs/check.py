"""Tries an environment on a few tasks before a run is spent on it, and decides what is wrong with it.

Each task is played with its own answer, if it has one, with its own replies (a list, one for each turn), and with replies
of the kinds that models do produce: nothing, junk, very much, other scripts. Each case is played twice. An environment is
in order if every case has a reward, the second time gives what the first gave, and a right reply earns another reward
than a wrong one. Where no right reply is known, equal rewards are told and not judged. A service that the environment
asks answers itself where it was given; else answers are made up, which follow from the question, and one case is
played without an answer.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from posttrain.core.messages import clip, safe
from posttrain.core.types import Ask, Invalid, InvalidKind, Reply, Task, Turn, UserError, bare
from posttrain.envs.play.env_pool import Done, EnvPool, Event
from posttrain.envs.play.episode import content_text
from posttrain.envs.play.service_client import OPTIONS, Services, made_up
from posttrain.envs.preview import Seen, Viewer
from posttrain.models.tokenizer.tool_parser import HERMES

STANDARD = {
    "empty": "",
    "junk": "}{ ))) <<answer>> \\boxed{ ```",
    "very long": "so we get 12, " * 4000,
    "unicode": "答えは４２ です \N{GRINNING FACE} \u0661\u0662 \u200b\x00 \N{LATIN SMALL LETTER E WITH ACUTE}",
}
TASKS = 4  # more only take longer to read
OWN = ("response", "answer")  # what a task may call its right reply
SCRIPT = "replies"  # and its right replies to turn after turn
SHOWN = 1  # turns of an episode that are printed beside the first
FEW = 3  # parts of a reward that are printed even where they are 0
WIDTH = 79  # columns of a line, where texts are cut
MOST = 100_000  # characters of a text that is shown as a whole
WITHOUT = Invalid("no answer, to see what becomes of it", InvalidKind.UNANSWERED)
MOST_ASKS = 64  # questions of an episode
TURNS = 64  # the reply is repeated that often, as in a run; many environments wait for a word that it does not contain


@dataclass(frozen=True)
class Case:
    """One task played with one reply, given again on every turn, or with its own replies, one after the other."""

    task: str  # its id
    kind: str  # of reply
    reply: str
    shown: tuple[str, ...]  # what the environment showed, turn by turn
    result: Done | None  # of the side that was asked first; None: it still asked after `TURNS` turns
    steps: tuple[float, ...]  # rewards of its turns
    seconds: float  # of its slowest call
    repeats: bool  # whether the second time went the same way
    seen: Seen | None = None  # by the model, where one is known


@dataclass(frozen=True)
class Report:
    """The cases in the order they were played, task by task."""

    cases: tuple[Case, ...]
    given: bool = False  # whether the replies are the user's own
    asked: tuple[str, ...] = ()  # services that the environment asked
    made_up: tuple[str, ...] = ()  # those of them whose answers were
    unanswered: Case | None = None  # the first case, played without their answers
    context: int | None = None  # of the model, where one is known

    @property
    def known(self) -> bool:
        """Whether one of the replies is a task's own, which ought to be right."""
        return any(case.kind in (*OWN, SCRIPT) for case in self.cases)

    @property
    def invalid(self) -> list[Case]:
        return [case for case in self.cases if case.result and isinstance(case.result.reward, Invalid)]

    @property
    def rewards(self) -> list[float]:
        """What training counts of each case with a valid reward: step rewards included."""
        return [total for case in self.cases if (total := _total(case)) is not None]

    @property
    def constant(self) -> bool:
        """Whether no two replies to a task were told apart: what a group of rollouts would learn from."""
        if not self.rewards:
            return False  # a different complaint
        by_task: dict[str, set[float]] = {}
        for case in self.cases:
            if (total := _total(case)) is not None:
                by_task.setdefault(case.task, set()).add(total)
        return len({case.kind for case in self.cases}) > 1 and all(len(seen) == 1 for seen in by_task.values())

    @property
    def ok(self) -> bool:
        useless = self.constant and self.known
        sound = bool(self.rewards) and not self.invalid and all(c.repeats for c in self.cases)
        return sound and not useless and not self._unseen()

    def lines(self, verbose: bool = False) -> list[str]:
        """The cases, then what they amount to. Of tasks but the first only what is wrong and new, unless `verbose`."""
        told: set[str] = set()  # what was expected instead of what is invalid
        lines: list[str] = []
        hidden, known = 0, {""}  # what is wrong, as far as it was shown
        for number, (task, cases) in enumerate(self._by_task().items()):
            new = {_wrong(case): case for case in reversed(cases) if _wrong(case) not in known}
            shown = cases if verbose or number == 0 else list(reversed(new.values()))
            known |= set(map(_wrong, shown))
            hidden += len(cases) - len(shown)
            rewards = "" if shown == cases else f"   rewards {', '.join(map(_number, cases))}"
            head = f"task {task if verbose else task[:12]}: "
            room = MOST if verbose else max(20, WIDTH - len(head) - len(rewards))
            lines.append(head + (_cut(cases[0].shown[0], room) if cases[0].shown else "shows nothing") + rewards)
            for case in shown:
                lines += self._case(case, told, verbose)
        more = [f"({hidden} more cases: --verbose shows them)"] if hidden else []
        return [*lines, *more, "", *self._services(), *self._model(), *self._verdicts()]

    def _by_task(self) -> dict[str, list[Case]]:
        found: dict[str, list[Case]] = {}
        for case in self.cases:
            found.setdefault(case.task, []).append(case)
        return found

    def _case(self, case: Case, told: set[str], verbose: bool) -> list[str]:
        """A case, and what it was shown after its first turn."""
        reply, width = (MOST, MOST) if verbose else (22, WIDTH - 26)
        reply = min(reply, 60) if case.kind in STANDARD else reply  # these are known
        lines = [
            f"  {case.kind:<12} {_cut(case.reply, reply):<22} {_outcome(case, told, verbose)}   {_duration(case.seconds)}"
        ]
        turns = case.shown[1:] if verbose else case.shown[1 : 1 + SHOWN]
        lines += [f"  {'':<12} then shows {_cut(text, width)}" for text in turns]
        if (more := len(case.shown) - 1 - len(turns)) > 0:
            lines.append(f"  {'':<12} ... and {more} more")
        if case.result is not None and case.result.notes:
            pairs = [f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in case.result.notes.items()]
            lines.append(f"  {'':<12} noted {safe(clip(', '.join(pairs), width))}")
        return lines

    def _services(self) -> list[str]:
        """What it asked, and what becomes of an episode whose question has no answer."""
        lines = []
        for name in self.asked:
            what = "passages" if "retriever" in name else "numbers from 0 to 1"
            how = f"{what} were made up as its answers" if name in self.made_up else "it answered itself"
            option = OPTIONS.get(name)
            ways = option or " or ".join(given.replace(" ", f" {name}=", 1) for given in OPTIONS.values())
            lines.append(f"it asks the service {name}: {how}" + (f"; {ways} asks it" if name in self.made_up else ""))
        if self.unanswered is not None:
            lines.append(f"without an answer (task {self.unanswered.task}): {_outcome(self.unanswered, set())}")
        return lines

    def _unseen(self) -> list[str]:
        """What the model could not be shown, or has no room for, and why."""
        problems = []
        for case in self.cases:
            if case.seen is None or self.context is None:
                continue
            if case.seen.problem is not None:
                problems.append(f"the model cannot be shown task {case.task}: {case.seen.problem}")
            elif case.seen.prompt >= self.context:
                what = f"of {case.seen.prompt} tokens; the model's context holds {self.context} with the reply"
                problems.append(f"task {case.task} begins with a prompt {what}: shorten it, or leave the row out")
        return list(dict.fromkeys(problems))

    def _model(self) -> list[str]:
        """What the model sees."""
        seen = [case.seen for case in self.cases if case.seen is not None]
        if not seen or self.context is None:
            return []
        prompts = sorted({one.prompt for one in seen if one.prompt})
        lines = self._unseen()[:1]
        if prompts and not lines:
            several = f"{prompts[0]} to {prompts[-1]}" if len(prompts) > 1 else f"{prompts[0]}"
            lines = [f"the model sees prompts of {several} tokens, in a context of {self.context}"]
        scripted = [case.seen.longest for case in self.cases if case.seen is not None and case.kind == SCRIPT]
        if scripted and prompts:
            room = "" if max(scripted) <= self.context else f", more than its context of {self.context}"
            lines.append(f"with the tasks' own replies an episode has up to {max(scripted)} tokens{room}")
        return lines

    def _verdicts(self) -> list[str]:
        lines = []
        total = len(self.cases)
        if self.invalid:
            assert self.invalid[0].result is not None and isinstance(self.invalid[0].result.reward, Invalid)
            reason = self.invalid[0].result.reward.reason
            lines.append(f"invalid on {len(self.invalid)} of {total}: {reason}")
        if self.constant:
            same = f" ({self.rewards[0]:g})" if len(set(self.rewards)) == 1 else ""
            lines.append(
                f"the reward is the same for every {'one of these replies' if self.given else 'reply'}{same}{self._advice()}"
            )
        if different := [case for case in self.cases if not case.repeats]:
            where = f"task {different[0].task}, {different[0].kind}"
            lines.append(
                f"two calls disagree on {len(different)} of {total} ({where}): seed what is random from the task"
            )
        if unfinished := sum(case.result is None for case in self.cases):
            lines.append(f"still asking after {TURNS} turns on {unfinished} of {total}")
        if not self.cases:
            return ["nothing was tried: there are no replies", "not in order"]
        slowest = max(self.cases, key=lambda case: case.seconds)
        lines.append(f"slowest call {_duration(slowest.seconds)} (task {slowest.task}, {slowest.kind})")
        if self.rewards:
            low, high = min(self.rewards), max(self.rewards)
            lines.append(f"rewards from {low:g} to {high:g} over {len(self.rewards)} of {total} cases")
        lines.append("in order" if self.ok else "not in order")
        return lines

    def _advice(self) -> str:
        """What equal rewards amount to."""
        if self.known:
            return ": nothing can be learned from it"
        if self.given:
            return ": if one of them is right, the reward does not see it"
        return (
            ", and no right reply is known for these tasks: name the column that has it with --fields.answer COLUMN, "
            "or give replies of your own with --replies FILE"
        )


def check(
    env_spec: str | Callable[..., Any],
    tasks: Sequence[Task],
    replies: list[str] | None = None,
    seconds: float = 10.0,
    memory: float = 4.0,
    services: Services | None = None,
    viewer: Viewer | None = None,
) -> Report:
    """Play the first few tasks with `replies`, or with the sample replies. `seconds`: the limit of one call; `memory`:
    GiB that the environment may take; `services`: who answers what it asks, as far as they are there; `viewer`: the model
    that is to be shown it.

    Raises UserError if there are no tasks, or if the environment does not import.
    """
    if not tasks:
        raise UserError("there are no tasks to check the environment with")
    cases: list[Case] = []
    answers = _Answers(services or Services())
    unanswered = None
    with EnvPool(env_spec, workers=1, seconds=seconds, memory=memory) as pool:
        for number, task in enumerate(tasks[:TASKS]):
            for kind, script in _sample_replies(task, replies):
                reply = ", ".join(script[:-1]) if kind == SCRIPT else script[0]
                seen = viewer.watch(task) if viewer is not None else None
                shown, result, slowest = _play(pool, task, script, answers, seen)
                repeats = True
                if not (
                    result and isinstance(_first(shown, result).reward, Invalid)
                ):  # it may have taken all of its time
                    again = viewer.watch(task) if viewer is not None else None
                    shown_again, result_again, slowest_again = _play(pool, task, script, answers, again)
                    repeats = (shown, result) == (shown_again, result_again)
                    slowest = max(slowest, slowest_again)
                name = str(task.get("id", number))
                side = shown[0].side if result and result.sides and shown else None
                steps = tuple(turn.reward for turn in shown if turn.reward and side in (None, turn.side))
                ends = None if result is None else _first(shown, result)
                cases.append(Case(name, kind, reply, tuple(map(_text, shown)), ends, steps, slowest, repeats, seen))
                if answers.asked and unanswered is None:
                    shown, result, slowest = _play(pool, task, script, None)
                    ends = None if result is None else _first(shown, result)
                    unanswered = Case(name, kind, reply, tuple(map(_text, shown)), ends, (), slowest, True)
    context = viewer.context if viewer is not None else None
    asked, made_up = tuple(answers.asked), tuple(answers.made_up)
    return Report(tuple(cases), replies is not None, asked, made_up, unanswered, context)


def _first(shown: Sequence[Turn], result: Done) -> Done:
    """The verdict on the side that was asked first, with what all sides earned as its parts. Invalid, if one of them is."""
    if not result.sides:
        return result
    ends = {turn.side: result.of(turn.side) for turn in shown}
    for done in ends.values():
        if isinstance(done.reward, Invalid):
            return done
    first = next(iter(ends.values()), Done(0.0))
    earned = {side: done.reward for side, done in ends.items() if not isinstance(done.reward, Invalid)}
    return Done(first.reward, earned, first.spans)


@dataclass
class _Answers:
    """Who answers questions to services."""

    services: Services
    asked: dict[str, None] = field(default_factory=dict)  # services by name, in order
    made_up: dict[str, None] = field(default_factory=dict)

    def __call__(self, ask: Ask) -> Any:
        self.asked[ask.service] = None
        if self.services.problem(ask) is not None:
            self.made_up[ask.service] = None
            return made_up(ask)
        self.services.ask(0, ask)
        while not (answers := self.services.poll()):
            time.sleep(0.001)
        return bare(answers[0][1])


def _sample_replies(task: Task, replies: Sequence[str] | None) -> list[tuple[str, list[str]]]:
    """Kinds of replies, each with what is said turn by turn."""
    if replies is not None:
        return [(f"reply {number}", [reply]) for number, reply in enumerate(replies, 1)]
    own = [(key, [str(task[key])]) for key in OWN if isinstance(task.get(key), str | int | float)]
    script = task.get(SCRIPT)
    if isinstance(script, list | tuple) and script and all(isinstance(reply, str) for reply in script):
        own.append((SCRIPT, [*script, ""]))
    return [*own, *((kind, [reply]) for kind, reply in STANDARD.items())]


def _play(
    pool: EnvPool, task: Task, script: Sequence[str], answer: _Answers | None, seen: Seen | None = None
) -> tuple[list[Turn], Done | None, float]:
    """One episode -> its turns, its end if it came within `TURNS`, and the seconds of its slowest call.

    `script`: the replies, of which the last is given again and again. Without `answer`, questions have none. `seen`: by a
    model, as whose replies they are read; without one calls of tools are read in Hermes' form.
    """
    pool.ready()  # a worker that starts anew is not the environment's time
    shown: list[Turn] = []
    event, slowest = _timed(pool, lambda: pool.start(0, task))
    asked = 0
    while not isinstance(event, Done):
        if isinstance(event, Turn):
            shown.append(event)
        asked += isinstance(event, Ask)
        if len(shown) > TURNS + len(script) - 1 or asked > MOST_ASKS:
            pool.drop(0)
            return shown, None, slowest
        if isinstance(event, Turn):
            text = script[min(len(shown), len(script)) - 1]
            said: Any = _said(text, event, len(shown) - 1, seen)
        else:
            said = WITHOUT if answer is None else answer(event)
        event, seconds = _timed(pool, partial(pool.send, 0, said))
        slowest = max(slowest, seconds)
    return shown, event, slowest


def _said(text: str, turn: Turn, number: int, seen: Seen | None) -> Reply:
    if seen is not None:
        seen.show(turn)
    reply = seen.say(text) if seen is not None else None
    return reply or Reply(text, tool_calls=HERMES.read(text, [*(turn.tools or ())]), number=number)


def _timed(pool: EnvPool, ask: Callable[[], None]) -> tuple[Event, float]:
    began = time.perf_counter()
    ask()
    [(_, event)] = pool.poll(None)
    return event, time.perf_counter() - began


def _text(turn: Turn) -> str:
    if turn.tokens is not None:
        return f"{len(turn.tokens)} token ids"
    if turn.messages is None:
        return turn.text or ""
    shown = [(message, content_text(message) if message.get("content") else "") for message in turn.messages]
    return "\n".join(f"{message.get('role', '?')}: {text}" for message, text in shown)


def _steps(case: Case) -> list[float]:
    """What the turns and parts of the replies of a finished episode earned besides."""
    assert case.result is not None
    return [*case.steps, *(span.reward for span in case.result.spans if span.reward)]


def _total(case: Case) -> float | None:
    """The reward that training counts; None: there is none."""
    if case.result is None or isinstance(case.result.reward, Invalid):
        return None
    return case.result.reward + math.fsum(_steps(case)) + 0.0  # never -0


def _outcome(case: Case, told: set[str], verbose: bool = True) -> str:
    """`told`: what was already said to be expected; added to. Of many parts of a reward, those that are 0 are not shown."""
    if case.result is None:
        return "no end"
    if isinstance(case.result.reward, Invalid):
        reason, expected, rest = case.result.reward.reason.partition("; expected ")
        known = bool(expected) and rest in told
        told.add(rest)
        reason = reason if verbose else clip(reason, WIDTH)
        return f"invalid: {reason}" + ("" if known else expected + rest)
    rewards = case.result.rewards
    named = {name: value for name, value in rewards.items() if value or verbose or len(rewards) <= FEW}
    parts = [f"{name} {value + 0.0:g}" for name, value in named.items()]
    if steps := _steps(case):
        parts.append(f"steps {math.fsum(steps) + 0.0:g}")
    return f"reward {_total(case):g}" + (f" ({', '.join(parts)})" if parts else "")


def _wrong(case: Case) -> str:
    """What is wrong with it; "": nothing."""
    if case.result is not None and isinstance(case.result.reward, Invalid):
        return case.result.reward.reason
    return "no end" if case.result is None else "" if case.repeats else "another result"


def _number(case: Case) -> str:
    total = _total(case)
    return "none" if total is None else f"{total:g}"


def _cut(text: str, width: int) -> str:
    return quoted if len(quoted := repr(text)) <= width else quoted[: width - 3] + "..."


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
