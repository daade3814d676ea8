"""Tries an environment on a few tasks before a run is spent on it, and reports its defects.

Each task is run with its own answer, if it has one, with its own replies (a list, one for each turn), and with replies
of kinds that models produce: nothing, junk, very long text, other scripts. Each case runs twice. An environment is
sound if every case has a reward, both runs of a case are equal, and a correct reply earns another reward than a wrong
one. An answer need not be a whole reply: if it earns as little as junk, it is tried again in the forms that scorers
look for. If no whole reply is known to be correct, equal rewards are reported but not judged. A service that the
environment asks is used if it was given; otherwise answers are made up, a fixed one for each question, and one case
runs without an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.core.types import Ask, Invalid, InvalidKind, Reply, Task, Turn, UserError, bare
from posttrain.envs.play.env_outputs import AwaitsGroup, Done
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import content_text, last_asked
from posttrain.envs.play.load_env import success_of, task_set
from posttrain.envs.play.prompt_tokens import CHARACTERS_OF_A_TOKEN, PROMPT_TOKENS
from posttrain.envs.play.service_client import Services, made_up
from posttrain.envs.preview import Seen, Viewer
from posttrain.envs.trial_report import FORMS, NOTHING, ORACLE, OWN, SCRIPT, STANDARD, TURNS, Case, Report
from posttrain.models.tokenizer.tool_parser import HERMES

TASKS = 4  # more would only make the report longer
WITHOUT = Invalid("no answer", InvalidKind.UNANSWERED)
MOST_ASKS = 64  # most requests to services in an episode


def check(
    env_spec: str | Callable[..., Any],
    tasks: Sequence[Task],
    replies: list[str] | None = None,
    seconds: float = 10.0,
    memory: float = 4.0,
    services: Services | None = None,
    viewer: Viewer | None = None,
) -> Report:
    """Run the first few tasks with `replies`, or with the sample replies, and return the report.

    `seconds`: limit of one call; `memory`: limit of the environment in GiB; `services`: those that answer its requests,
    as far as given; `viewer`: the model whose view of the prompts is shown. Raises UserError if there are no tasks, or
    if the environment cannot be imported.
    """
    if not tasks:
        raise UserError("there are no tasks to check the environment with")
    trial = _Trial(_Answers(services or Services()), viewer)
    with EnvPool(env_spec, workers=1, seconds=seconds, memory=memory) as trial.pool:
        trial.pool.ready()
        proven = task_set(env_spec) if replies is None else None
        for number, task in enumerate(tasks if proven else ()):
            assert proven is not None
            trial.play(number, proven.module.with_oracle(task), ORACLE, [""], twice=False)
            trial.play(number, task, NOTHING, [""], twice=False)
        for number, task in enumerate(() if proven else tasks[:TASKS]):
            samples = _sample_replies(task, replies)
            if trial.pool.by_group:
                trial.play_group(number, task, samples)
                continue
            for kind, script in samples:
                trial.play(number, task, kind, script)
        success = success_of(env_spec, None)
        found = Report(tuple(trial.cases), success=success)
        if replies is None and proven is None and not found.known and (found.constant or found.unreached):
            for number, task in enumerate(tasks[:TASKS]):
                if trial.pool.by_group:
                    trial.play_group(number, task, [(kind, [reply]) for kind, reply in _in_forms(task)])
                    continue
                for kind, reply in _in_forms(task):
                    trial.play(number, task, kind, [reply])
    context = viewer.context if viewer is not None else None
    asked, made_up = tuple(trial.answers.asked), tuple(trial.answers.made_up)
    by_task = sorted(trial.cases, key=lambda case: [c.task for c in trial.cases].index(case.task))
    report = Report(tuple(by_task), replies is not None, asked, made_up, trial.unanswered, context, trial.first)
    columns = tuple(name for name in tasks[0] if name != "id")
    return replace(report, columns=columns, success=success, full=success if proven else None)


@dataclass
class _Trial:
    """Runs cases one after the other."""

    answers: _Answers
    viewer: Viewer | None
    pool: EnvPool = field(init=False)
    cases: list[Case] = field(default_factory=list)
    unanswered: Case | None = None
    first: Turn | None = None  # first turn of any case

    def play(self, number: int, task: Task, kind: str, script: Sequence[str], twice: bool = True) -> None:
        """Run one case, usually twice: the `number`-th task with these replies."""
        reply = ", ".join(script[:-1]) if kind == SCRIPT else script[0]
        seen = self.viewer.watch(task) if self.viewer is not None else None
        shown, result, slowest = _play(self.pool, task, script, self.answers, seen)
        repeats = True
        # that may have used up its time
        if twice and not (result and isinstance(_first(shown, result).reward, Invalid)):
            again = self.viewer.watch(task) if self.viewer is not None else None
            shown_again, result_again, slowest_again = _play(self.pool, task, script, self.answers, again)
            repeats = (shown, result) == (shown_again, result_again)
            slowest = max(slowest, slowest_again)
        self.first = self.first or next(iter(shown), None)
        name = str(task.get("id", number))
        side = shown[0].side if result and result.sides and shown else None
        steps = tuple(turn.reward for turn in shown if turn.reward and side in (None, turn.side))
        ends = None if result is None else _first(shown, result)
        self.cases.append(Case(name, kind, reply, *_shown_text(shown), ends, steps, slowest, repeats, seen))
        if self.answers.asked and self.unanswered is None:
            shown, result, slowest = _play(self.pool, task, script, None)
            ends = None if result is None else _first(shown, result)
            self.unanswered = Case(name, kind, reply, *_shown_text(shown), ends, (), slowest, True)

    def play_group(self, number: int, task: Task, samples: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Run all cases of a task twice, as one group, for a reward that scores whole groups."""
        scripts = [script for _, script in samples]
        (seen, first, slowest), (_, again, slower) = (self._group_played(task, scripts) for _ in range(2))
        for place, (kind, script) in enumerate(samples):
            shown, result = first[place]
            self.first = self.first or next(iter(shown), None)
            reply = ", ".join(script[:-1]) if kind == SCRIPT else script[0]
            steps = tuple(turn.reward for turn in shown if turn.reward)
            told, repeats = _shown_text(shown), first[place] == again[place]
            name, took = str(task.get("id", number)), max(slowest, slower)
            self.cases.append(Case(name, kind, reply, *told, result, steps, took, repeats, seen[place]))

    def _group_played(
        self, task: Task, scripts: Sequence[Sequence[str]]
    ) -> tuple[list[Seen | None], list[Played], float]:
        seen = [self.viewer.watch(task) if self.viewer is not None else None for _ in scripts]
        return seen, *_play_group(self.pool, task, scripts, self.answers, seen)


def _first(shown: Sequence[Turn], result: Done) -> Done:
    """Return the verdict on the first side, with the rewards of all sides as its components; Invalid if one of them
    is.
    """
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
    """Answers requests to services: the given ones, else made-up answers."""

    services: Services
    asked: dict[str, None] = field(default_factory=dict)  # services by name, in order
    made_up: dict[str, None] = field(default_factory=dict)

    def __call__(self, ask: Ask) -> Any:
        if ask.service == PROMPT_TOKENS:
            return len(str(ask.content)) // CHARACTERS_OF_A_TOKEN
        self.asked[ask.service] = None
        if self.services.problem(ask) is not None:
            self.made_up[ask.service] = None
            return made_up(ask)
        self.services.ask(0, ask)
        while not (answers := self.services.poll()):
            time.sleep(0.001)
        return bare(answers[0][1])


def _sample_replies(task: Task, replies: Sequence[str] | None) -> list[tuple[str, list[str]]]:
    """Return (kind, texts turn by turn) of each sample reply."""
    if replies is not None:
        return [(f"reply {number}", [reply]) for number, reply in enumerate(replies, 1)]
    own = [(key, [str(task[key])]) for key in OWN if isinstance(task.get(key), str | int | float)]
    script = task.get(SCRIPT)
    if isinstance(script, list | tuple) and script and all(isinstance(reply, str) for reply in script):
        own.append((SCRIPT, [*script, ""]))
    return [*own, *((kind, [reply]) for kind, reply in STANDARD.items())]


def _in_forms(task: Task) -> list[tuple[str, str]]:
    """Return (kind, text) of replies with a task's answer in the forms that scorers look for."""
    answer = task.get(OWN[1])
    return [(kind, form % answer) for kind, form in FORMS.items()] if isinstance(answer, str | int | float) else []


Played = tuple[list[Turn], Done | None]
"""The turns of an episode, and its end; None if it did not come within `TURNS`."""


def _play(
    pool: EnvPool, task: Task, script: Sequence[str], answer: _Answers | None, seen: Seen | None = None
) -> tuple[list[Turn], Done | None, float]:
    """Run one episode; return its turns, its end, and the seconds of its slowest call."""
    [(shown, end)], slowest = _play_group(pool, task, [script], answer, [seen])
    return shown, end, slowest


def _play_group(
    pool: EnvPool,
    task: Task,
    scripts: Sequence[Sequence[str]],
    answer: _Answers | None,
    seen: Sequence[Seen | None],
) -> tuple[list[Played], float]:
    """Run the episodes of a group; return them, and the seconds of the slowest call.

    `scripts`: the replies of each, of which the last is repeated. Without `answer`, requests to services get none.
    `seen`: the model's views, by which replies are parsed; without them tool calls are parsed in Hermes' form.
    """
    pool.ready()  # the start of a worker does not count as the environment's time
    shown: list[list[Turn]] = [[] for _ in scripts]
    asked, ends, slowest = [0] * len(scripts), dict[int, Done | None](), 0.0
    for place in range(len(scripts)):
        pool.start(place, task, "group")
    while len(ends) < len(scripts):
        began = time.perf_counter()
        events = pool.poll(None)
        slowest = max(slowest, time.perf_counter() - began)
        for place, event in events:
            if isinstance(event, AwaitsGroup):
                continue
            if isinstance(event, Done):
                ends[place] = event
                continue
            shown[place] += [event] if isinstance(event, Turn) else []
            asked[place] += isinstance(event, Ask)
            script, number = scripts[place], len(shown[place])
            if number > TURNS + len(script) - 1 or asked[place] > MOST_ASKS:
                pool.drop(place)
                ends[place] = None
            elif isinstance(event, Turn):
                pool.send(place, _said(script[min(number, len(script)) - 1], event, number - 1, seen[place]))
            else:
                pool.send(place, WITHOUT if answer is None else answer(event))
    return [(own, ends[place]) for place, own in enumerate(shown)], slowest


def _said(text: str, turn: Turn, number: int, seen: Seen | None) -> Reply:
    if seen is not None:
        seen.show(turn)
    reply = seen.say(text) if seen is not None else None
    if reply is not None:
        return reply
    return Reply(text, tool_calls=HERMES.read(text, [*(turn.tools or ())]), number=number)


def _shown_text(shown: Sequence[Turn]) -> tuple[tuple[str, ...], str]:
    """Return the text of each turn, and the part of the first turn that differs from those of other tasks."""
    texts = tuple(map(_text, shown))
    asked = last_asked(shown[0].messages) if shown and shown[0].messages else ""
    return texts, asked or next(iter(texts), "")


def _text(turn: Turn) -> str:
    if turn.tokens is not None:
        return f"{len(turn.tokens)} token ids"
    if turn.messages is None:
        return turn.text or ""
    shown = [(message, content_text(message) if message.get("content") else "") for message in turn.messages]
    return "\n".join(f"{message.get('role', '?')}: {text}" for message, text in shown)
