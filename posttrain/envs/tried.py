"""Results of a trial of an environment, case by case, and their summary in words."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

from posttrain.core.messages import clip, safe
from posttrain.core.types import Invalid, Turn
from posttrain.envs.play.env_outputs import Done
from posttrain.envs.play.service_client import OPTIONS
from posttrain.envs.preview import Seen

STANDARD = {
    "empty": "",
    "junk": "}{ ))) <<answer>> \\boxed{ ```",
    "very long": "so we get 12, " * 4000,
    "unicode": "答えは４２ です \N{GRINNING FACE} \u0661\u0662 \u200b\x00 \N{LATIN SMALL LETTER E WITH ACUTE}",
}
OWN = ("response", "answer")  # what a task may call its right reply, or what such a reply has to say
SCRIPT = "replies"  # and its right replies to turn after turn
FORMS = {
    "boxed": "\\boxed{%s}",
    "marked": "#### %s",
    "tagged": "<answer>%s</answer>",
    "said": "The answer is %s.",
}
"""Replies that say an answer."""
SHOWN = 1  # turns of an episode that are printed beside the first
FEW = 3  # parts of a reward that are printed even where they are 0
WIDTH = 79  # columns of a line, where texts are cut
MOST = 100_000  # characters of a text that is shown as a whole
TURNS = 64  # the reply is repeated that often, as in a run; many environments wait for a word that it does not contain


@dataclass(frozen=True)
class Case:
    """One task played with one reply, given again on every turn, or with its own replies, one after the other."""

    task: str  # its id
    kind: str  # of reply
    reply: str
    shown: tuple[str, ...]  # what the environment showed, turn by turn
    asked: str  # the first of it, of messages what the user said last
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
    first: Turn | None = None  # what was shown first of all
    told: tuple[str, ...] = ()  # what else is to be said of the model
    columns: tuple[str, ...] = ()  # of the first task

    @property
    def known(self) -> bool:
        """Whether one of the replies is a task's own, and complete: it should be right."""
        return any(case.kind in (OWN[0], SCRIPT) for case in self.cases)

    @property
    def answered(self) -> bool:
        """Whether one of the replies contains a task's answer, as a right reply does."""
        return any(case.kind == OWN[1] for case in self.cases)

    @property
    def invalid(self) -> list[Case]:
        return [case for case in self.cases if case.result and isinstance(case.result.reward, Invalid)]

    @property
    def rewards(self) -> list[float]:
        """Reward of each case with a valid reward, as training counts it: step rewards included."""
        return [total for case in self.cases if (total := _total(case)) is not None]

    @property
    def constant(self) -> bool:
        """Whether all replies to each task got the same reward: a group of rollouts would have no signal."""
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
            lines.append(head + (_cut(cases[0].asked, room) if cases[0].shown else "shows nothing") + rewards)
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
        took = f"   {_duration(case.seconds)}" if verbose else ""
        lines = [f"  {case.kind:<12} {_cut(case.reply, reply):<22} {_outcome(case, told, verbose)}{took}"]
        turns = case.shown[1:] if verbose else case.shown[1 : 1 + SHOWN]
        lines += [f"  {'':<12} then shows {_cut(text, width)}" for text in turns]
        if (more := len(case.shown) - 1 - len(turns)) > 0:
            lines.append(f"  {'':<12} ... and {more} more")
        if case.result is not None and case.result.notes:
            pairs = [f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in case.result.notes.items()]
            lines.append(f"  {'':<12} noted {safe(clip(', '.join(pairs), width))}")
        return lines

    def _services(self) -> list[str]:
        """Describe its requests to services, and what happens to an episode whose request has no answer."""
        lines = []
        for name in self.asked:
            what = "passages" if "retriever" in name else "numbers from 0 to 1"
            how = f"{what} were made up as its answers" if name in self.made_up else "it answered itself"
            option = OPTIONS.get(name)
            ways = option or " or ".join(given.replace(" ", f" {name}=", 1) for given in OPTIONS.values())
            lines.append(f"it asks the service {name}: {how}" + (f"; {ways} asks it" if name in self.made_up else ""))
        if self.unanswered is not None:
            lines.append(
                f"tried once without an answer (task {self.unanswered.task[:12]}): {_outcome(self.unanswered, set())}"
            )
        return lines

    def _unseen(self) -> list[str]:
        """Describe turns that the model could not be shown, or has no room for."""
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
        """Describe what the model sees."""
        seen = [case.seen for case in self.cases if case.seen is not None]
        if not seen or self.context is None:
            return []
        prompts = sorted({one.prompt for one in seen if one.prompt})
        lines = self._unseen()[:1]
        if prompts and not lines:
            several = f"{prompts[0]} to {prompts[-1]}" if len(prompts) > 1 else f"{prompts[0]}"
            lines = [f"the model sees prompts of {several} tokens, in a context of {self.context}"]
        lines += self.told
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
            missing = re.match(r"KeyError: '([^']+)'", reason)
            if missing and self.columns and missing[1] not in self.columns:
                there = ", ".join(map(repr, self.columns[:12]))
                lines.append(f"the row has no {missing[1]!r}, but {there}: --fields.{missing[1]} COLUMN renames one")
        if self.constant:
            same = f" ({self.rewards[0]:g})" if len(set(self.rewards)) == 1 else ""
            lines.append(
                f"the reward is the same for every {'one of these replies' if self.given else 'reply'}{same}{self._advice()}"
            )
        lines += self._in_form()
        if different := [case for case in self.cases if not case.repeats]:
            where = f"task {different[0].task}, {different[0].kind}"
            lines.append(
                f"two calls disagree on {len(different)} of {total} ({where}): seed what is random from the task"
            )
        if unfinished := sum(case.result is None for case in self.cases):
            lines.append(f"still asking after {TURNS} turns on {unfinished} of {total}")
        if not self.cases:
            return ["nothing was tried: there are no replies", "check failed"]
        slowest = max(self.cases, key=lambda case: case.seconds)
        lines.append(f"slowest call {_duration(slowest.seconds)} (task {slowest.task}, {slowest.kind})")
        if self.rewards:
            low, high = min(self.rewards), max(self.rewards)
            lines.append(f"rewards from {low:g} to {high:g} over {len(self.rewards)} of {total} cases")
        undecided = self.constant and not self.known and not self.given and self.ok
        told = "undecided: nothing is wrong with it, and no reply earned more than another"
        lines.append(told if undecided else "check passed" if self.ok else "check failed")
        return lines

    def _advice(self) -> str:
        """Explain the consequence of equal rewards."""
        if self.known:
            return ": nothing can be learned from it"
        if self.given:
            return ": if one of them is right, the reward does not see it"
        which = "your answer column is not a full reply" if self.answered else "no column of yours is a full reply"
        return f": {which}; give some with --replies FILE, or name a column that has them with --fields.response COLUMN"

    def _in_form(self) -> list[str]:
        """Describe the format of an answer, where that alone makes the difference."""
        for case in self.cases:
            plain = next((c for c in self.cases if c.task == case.task and c.kind == OWN[1]), None)
            if case.kind in FORMS and plain is not None and _total(case) != _total(plain):
                earned = f"{case.reply!r} earns {_number(case)} and {plain.reply!r} {_number(plain)}"
                return [f"your answer column is not a full reply: {earned}"]
        return []


def _steps(case: Case) -> list[float]:
    """Return the rewards of turns and components besides the final one."""
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
        if not verbose and case.result.reward.reason in told:
            return "invalid: as above"
        told.add(case.result.reward.reason)
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
    """Return the problem of a case; "": none."""
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
