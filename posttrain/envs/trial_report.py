"""Results of the trial of an environment, case by case, and their summary in words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.core.messages import clip, near, safe
from posttrain.core.reply_steps import SCORED_STEPS, scored_steps
from posttrain.core.types import Invalid, InvalidKind, Turn
from posttrain.envs.play.env_outputs import Done
from posttrain.envs.play.service_client import OPTIONS
from posttrain.envs.preview import Seen

STANDARD = {
    "empty": "",
    "junk": "}{ ))) <<answer>> \\boxed{ ```",
    "very long": "so we get 12, " * 4000,
    "unicode": "答えは４２ です \N{GRINNING FACE} \u0661\u0662 \u200b\x00 \N{LATIN SMALL LETTER E WITH ACUTE}",
}
OWN = ("response", "answer")  # columns of a task for its correct reply, and for the answer that such a reply contains
SCRIPT = "replies"  # column for correct replies turn by turn
ORACLE, NOTHING = "solution", "nothing"  # kinds of cases of a task set: its own solution, and an empty reply
FORMS = {
    "boxed": "\\boxed{%s}",
    "marked": "#### %s",
    "tagged": "<answer>%s</answer>",
    "said": "The answer is %s.",
}
"""Forms of a reply with an answer."""
SHOWN = 1  # turns of an episode that are printed after the first
FEW = 3  # most parts of a reward that are printed even if they are 0
WIDTH = 79  # columns of a line, to which texts are cut
MOST = 100_000  # most characters of a text with --verbose
TURNS = 64  # most repetitions of the reply, as in a run; many environments wait for a word that it does not contain


@dataclass(frozen=True)
class Case:
    """One task run with one reply, repeated on every turn, or with its own replies, one for each turn."""

    task: str  # its id
    kind: str  # kind of reply
    reply: str
    shown: tuple[str, ...]  # text of each turn
    asked: str  # text of the first turn; of messages, the user's last
    result: Done | None  # result of the first side; None: no end after `TURNS` turns
    steps: tuple[float, ...]  # rewards of its turns
    seconds: float  # of its slowest call
    repeats: bool  # whether the second run was equal
    seen: Seen | None = None  # the model's view, if one is given


@dataclass(frozen=True)
class Report:
    """The cases in the order of their runs, task by task."""

    cases: tuple[Case, ...]
    given: bool = False  # whether the replies are the user's own
    asked: tuple[str, ...] = ()  # services that the environment asked
    made_up: tuple[str, ...] = ()  # services whose answers were made up
    unanswered: Case | None = None  # the first case, run without answers of services
    context: int | None = None  # context length of the model, if one is given
    first: Turn | None = None  # the very first turn
    told: tuple[str, ...] = ()  # further remarks on the model
    most: int | None = None  # tokens at which training ends a reply
    columns: tuple[str, ...] = ()  # columns of the first task
    success: float | None = None  # reward from which on a reply succeeds, if the environment defines it
    full: float | None = None  # full reward, if each task was run with its own solution and with an empty reply

    @property
    def known(self) -> bool:
        """Whether one of the replies is a task's own complete reply, which should be correct."""
        return any(case.kind in (OWN[0], SCRIPT, ORACLE) for case in self.cases)

    @property
    def answered(self) -> bool:
        """Whether one of the replies contains a task's answer, as a correct reply does."""
        return any(case.kind == OWN[1] for case in self.cases)

    @property
    def invalid(self) -> list[Case]:
        failed = [case for case in self.cases if case.result and isinstance(case.result.reward, Invalid)]
        return [case for case in failed if not _unread(case)]

    @property
    def unread(self) -> list[Case]:
        """The cases with a made-up reply that is longer than what the model behind a service reads."""
        return [case for case in self.cases if _unread(case)]

    @property
    def rewards(self) -> list[float]:
        """The reward of each valid case, as training counts it: step rewards included."""
        return [total for case in self.cases if (total := _total(case)) is not None]

    @property
    def constant(self) -> bool:
        """Whether all replies to each task got the same reward, so that a group of rollouts would have no signal."""
        if not self.rewards:
            return False  # reported as invalid instead
        by_task: dict[str, set[float]] = {}
        for case in self.cases:
            if (total := _total(case)) is not None:
                by_task.setdefault(case.task, set()).add(total)
        return len({case.kind for case in self.cases}) > 1 and all(len(seen) == 1 for seen in by_task.values())

    @property
    def unreached(self) -> bool:
        """Whether no reply succeeded, by rewards that the environment gave without answers that were made up."""
        measured = bool(self.rewards) and self.success is not None and not self.made_up
        return measured and self.success is not None and max(self.rewards) < self.success

    @property
    def ok(self) -> bool:
        useless = self.constant and self.known
        sound = bool(self.rewards) and not self.invalid and all(c.repeats for c in self.cases)
        return sound and not useless and not self._unseen() and not self._unproven()

    def lines(self, verbose: bool = False) -> list[str]:
        """Return the lines of the cases, then their summary. Unless `verbose`, later tasks show only new problems."""
        told: set[str] = set()  # reasons and expectations that were already printed
        lines: list[str] = []
        hidden, known = 0, {""}  # problems that were already printed
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
        more = [f"({hidden} more cases: show them with --verbose)"] if hidden else []
        return [*lines, *more, "", *self._services(), *self._model(), *self._verdicts()]

    def _by_task(self) -> dict[str, list[Case]]:
        found: dict[str, list[Case]] = {}
        for case in self.cases:
            found.setdefault(case.task, []).append(case)
        return found

    def _case(self, case: Case, told: set[str], verbose: bool) -> list[str]:
        """Return the lines of a case: its reply and result, then its turns after the first."""
        reply, width = (MOST, MOST) if verbose else (22, WIDTH - 26)
        reply = min(reply, 60) if case.kind in STANDARD else reply  # the standard replies are known
        took = f"   {_duration(case.seconds)}" if verbose else ""
        lines = [f"  {case.kind:<12} {_cut(case.reply, reply):<22} {_outcome(case, told, verbose)}{took}"]
        turns = case.shown[1:] if verbose else case.shown[1 : 1 + SHOWN]
        lines += [f"  {'':<12} then shows {_cut(text, width)}" for text in turns]
        if (more := len(case.shown) - 1 - len(turns)) > 0:
            lines.append(f"  {'':<12} ... and {more} more")
        notes = case.result.notes if case.result is not None else {}
        scored = scored_steps(notes)
        scored = scored if verbose or len(scored) <= FEW else [*scored[:FEW], f"... and {len(scored) - FEW} more"]
        lines += [f"  {'':<12} step {safe(clip(line, width))}" for line in scored]
        if pairs := [f"{n} {json.dumps(v, ensure_ascii=False)}" for n, v in notes.items() if n != SCORED_STEPS]:
            lines.append(f"  {'':<12} noted {safe(clip(', '.join(pairs), width))}")
        return lines

    def _services(self) -> list[str]:
        """Describe the requests to services, and the result of an episode whose request has no answer."""
        lines = []
        for name in self.asked:
            what = "passages" if "retriever" in name else "numbers from 0 to 1"
            how = f"{what} were made up as its answers" if name in self.made_up else "it answered"
            option = OPTIONS.get(name)
            ways = option or " or ".join(given.replace(" ", f" {name}=", 1) for given in OPTIONS.values())
            lines.append(f"it asks the service {name}: {how}" + (f"; {ways} asks it" if name in self.made_up else ""))
        if self.unanswered is not None:
            lines.append(
                f"tried once without an answer (task {self.unanswered.task[:12]}): {_outcome(self.unanswered, set())}"
            )
        return lines

    def _unseen(self) -> list[str]:
        """Describe turns that cannot be shown to the model, or leave no room for a reply."""
        problems = []
        for case in self.cases:
            if case.seen is None or self.context is None:
                continue
            if case.seen.problem is not None:
                problems.append(f"the model cannot be shown task {case.task}: {case.seen.problem}")
            elif case.seen.prompt >= self.context:
                what = f"of {case.seen.prompt} tokens; the model's context holds {self.context}, reply included"
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
        return lines + self._cut_off(prompts)

    def _cut_off(self, prompts: Sequence[int]) -> list[str]:
        """Describe right replies that training would cut off."""
        if self.most is None:
            return []
        own = [max(case.seen.replies, default=0) for case in self.cases
               if case.seen is not None and case.kind in (OWN[0], SCRIPT)]  # fmt: skip
        lines = []
        if long := [count for count in own if count > self.most]:
            lines.append(
                f"{len(long)} of {len(own)} of the tasks' own replies are longer than --max-tokens {self.most}: up to "
                f"{max(long)} tokens with the end; training would cut off such a reply"
            )
        if prompts and prompts[-1] + self.most > (self.context or 0):
            lines.append(
                f"replies end before --max-tokens {self.most} where prompt and reply fill the context of {self.context}"
            )
        return lines

    def _verdicts(self) -> list[str]:
        lines = []
        total = len(self.cases)
        if self.invalid:
            assert self.invalid[0].result is not None and isinstance(self.invalid[0].result.reward, Invalid)
            reason = self.invalid[0].result.reward.reason
            lines.append(f"invalid on {len(self.invalid)} of {total}: {reason}")
            lines += missing_column(reason, self.columns)
        if unread := self.unread:
            lines.append(
                f"the {unread[0].kind} reply was not scored ({_wrong(unread[0])}): replies of training end at --max-tokens"
            )
        if self.constant:
            same = f" ({self.rewards[0]:g})" if len(set(self.rewards)) == 1 else ""
            lines.append(
                f"the reward is the same for every {'one of these replies' if self.given else 'reply'}{same}{self._advice()}"
            )
        elif self.unreached:
            lines.append(f"no reply reached SUCCESS = {self.success:g}{self._advice()}")
        lines += [*self._best_is_empty(), *self._in_form(), *self._proofs()]
        if different := [case for case in self.cases if not case.repeats]:
            where = f"task {different[0].task}, {different[0].kind}"
            lines.append(
                f"two calls disagree on {len(different)} of {total} ({where}): seed random numbers from the task"
            )
        if unfinished := sum(case.result is None for case in self.cases):
            lines.append(f"still asking after {TURNS} turns on {unfinished} of {total}")
        if not self.cases:
            return ["nothing was tried, as there are no replies: give some with --replies FILE", "check failed"]
        slowest = max(self.cases, key=lambda case: case.seconds)
        lines.append(f"slowest call {_duration(slowest.seconds)} (task {slowest.task}, {slowest.kind})")
        if self.rewards:
            low, high = min(self.rewards), max(self.rewards)
            lines.append(f"rewards from {low:g} to {high:g} over {len(self.rewards)} of {total} cases")
        lines.append(self._conclusion())
        return lines

    def _conclusion(self) -> str:
        if not self.ok:
            return "check failed"
        if self.constant and not self.known and not self.given:
            return "undecided: no error, and no reply earned more than another"
        return "undecided: no error, and no right reply was tried" if self.unreached else "check passed"

    def _best_is_empty(self) -> list[str]:
        """Warn of a reward that no other reply exceeds that of an empty one, though others earn less."""
        best = []
        for cases in self._by_task().values():
            totals = {case.kind: total for case in cases if (total := _total(case)) is not None}
            if (
                "empty" not in totals
                or min(totals.values()) == totals["empty"]
                or totals["empty"] < max(totals.values())
            ):
                return []
            best.append(totals["empty"])
        return [f"an empty reply earns the most ({best[0]:g}): a policy would learn to say nothing"] if best else []

    def _unproven(self) -> list[Case]:
        """Return the solutions without full reward, and the empty replies with it."""
        full = self.full
        if full is None:
            return []
        valid = [(case, total) for case in self.cases if (total := _total(case)) is not None]
        return [case for case, total in valid if (total < full if case.kind == ORACLE else total >= full)]

    def _proofs(self) -> list[str]:
        """Describe the rewards of the tasks' own solutions and of empty replies."""
        if self.full is None:
            return []
        wrong, tasks = self._unproven(), self._by_task()
        lines = [
            f"task {case.task}: "
            + (f"its solution gets {_number(case)}" if case.kind == ORACLE else f"doing nothing gets {_number(case)}")
            for case in wrong
        ]
        for kind, told in (
            (ORACLE, "solutions get full reward"),
            (NOTHING, "tasks give no full reward for doing nothing"),
        ):
            good = sum(case.kind == kind and _total(case) is not None and case not in wrong for case in self.cases)
            lines.append(f"{good} of {len(tasks)} {told}")
        return lines

    def _advice(self) -> str:
        """Explain what follows from rewards that are constant, or too low for success."""
        if self.known:
            return ": nothing can be learned from it" if self.constant else ", not even the task's own right reply"
        if self.given:
            return ": if one of them is right, the reward misses it"
        if any(len(case.shown) > 1 for case in self.cases):
            example = '{..., "replies": ["first reply", "second reply"]}'
            return (
                ": no reply tried here solves a task of several turns; give the replies of a right episode in the column "
                f"replies of a row, one for each turn: {example}"
            )
        which = "your answer column is not a full reply" if self.answered else "no column of yours is a full reply"
        others = [name for name in self.columns if name not in ("prompt", "messages", *OWN)]
        named = f"name a column that has them with --fields.response {others[0] if len(others) == 1 else 'COLUMN'}"
        return f": {which}; give some with --replies FILE, or {named}"

    def _in_form(self) -> list[str]:
        """Describe the form of an answer that earns more than the bare answer."""
        for case in self.cases:
            plain = next((c for c in self.cases if c.task == case.task and c.kind == OWN[1]), None)
            if case.kind in FORMS and plain is not None and _total(case) != _total(plain):
                earned = f"{case.reply!r} earns {_number(case)} and {plain.reply!r} {_number(plain)}"
                return [f"your answer column is not a full reply: {earned}"]
        return []


def missing_column(reason: str, columns: Sequence[str]) -> list[str]:
    """Explain an exception about a column that the row lacks, with the most similar one; [] for any other reason."""
    missing = re.match(r"KeyError: '([^']+)'", reason)
    if not missing or not columns or missing[1] in columns:
        return []
    name, there = missing[1], ", ".join(map(repr, columns[:12]))
    if close := near(name, columns):
        return [f"the row has no {name!r}{close}"]
    return [f"the row has no {name!r}, but {there}: --fields.{name} COLUMN renames one"]


def _steps(case: Case) -> list[float]:
    """Return the rewards of turns and spans besides the final reward."""
    assert case.result is not None
    return [*case.steps, *(span.reward for span in case.result.spans if span.reward)]


def _total(case: Case) -> float | None:
    """Return the reward that training counts; None if it is invalid."""
    if case.result is None or isinstance(case.result.reward, Invalid):
        return None
    return case.result.reward + math.fsum(_steps(case)) + 0.0  # never -0


def _outcome(case: Case, told: set[str], verbose: bool = True) -> str:
    """Return the result of a case in words. `told`: reasons that were already printed; added to. Unless `verbose`, of
    many parts of a reward those that are 0 are left out.
    """
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


def _unread(case: Case) -> bool:
    """Return whether a made-up reply is longer than what the model behind a service reads."""
    reward = case.result.reward if case.result is not None else None
    return case.kind in STANDARD and isinstance(reward, Invalid) and reward.kind is InvalidKind.TOO_LONG


def _wrong(case: Case) -> str:
    """Return the problem of a case, or ""."""
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
