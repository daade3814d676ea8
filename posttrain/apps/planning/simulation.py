"""A discrete-event simulation of a job: engines, environments and learners of an imaginary machine.

Between two events an engine's work follows from its number of requests, so only beginnings and ends of requests are
events. An engine holds weights of one version and loads others once all requests of that version have finished;
versions may differ between engines. Nothing is random: a job in a setting has one outcome.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field

from posttrain.apps.planning.job import Group, Job, JobEpisode, PlanSetting, Speed

KINDS = ("decoding", "tail", "reading", "loading", "environments", "weights")
"""Uses of an engine's time. Tail: it decodes less than half of the most requests that it had with these weights.
Environments: all its episodes wait for environments or rewards. Weights: it has no episode, and waits for the learners.
"""

BUSY = 0.9  # working share of the learners' time from which on they are the bottleneck


@dataclass(eq=False)
class SimulatedEpisode:
    """An episode in progress."""

    episode: JobEpisode
    group: int
    step: int  # step in which it is in progress
    engine: SimulatedEngine | None = None
    stage: int = 0
    steps: int = 0  # decoding steps left in its stage
    left: int = 0  # decoding steps left before it is cut in this step
    context: int = 0  # tokens so far
    asked: float = 0.0  # time of the request
    again: bool = False  # whether new weights have to read its whole context


@dataclass(frozen=True)
class Served:
    """A finished request of an engine: times of arrival, begin and end, in seconds."""

    asked: float
    begun: float
    finished: float


@dataclass(eq=False)
class SimulatedEngine:
    """Continuous batching: all running requests advance by a token in each step."""

    speed: Speed
    version: int = 0
    owed: int = 0  # episodes that are neither finished nor cut
    rewards: int = 0  # finished episodes whose rewards are being computed
    of: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # version -> `owed` of it
    waiting: defaultdict[int, deque[SimulatedEpisode]] = field(default_factory=lambda: defaultdict(deque))  # by version
    # heap: (place of its end, order, begun, whose)
    running: list[tuple[float, int, float, SimulatedEpisode]] = field(default_factory=list)
    place: float = 0.0  # decoding steps so far
    now: float = 0.0  # time up to which `place` and `spent` are counted
    busy: float = 0.0  # time until which it does something else than decoding
    doing: deque[tuple[float, str]] = field(default_factory=deque)  # (until when, kind) of that other work
    most: int = 0  # most requests at once with these weights
    events: int = 0  # number of scheduled ends; only the last one is valid
    known: set[tuple[int, int]] = field(default_factory=set)  # (group, version) of the prompts that were read
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    def advance(self, now: float) -> None:
        """Count the decoding steps and the use of time since the last event."""
        while self.doing and self.now < now:
            until, what = self.doing[0]
            end = min(until, now)
            self.spent[what] += end - self.now
            self.now = end
            if end == until:
                self.doing.popleft()
        seconds, self.now = now - self.now, now
        if seconds <= 0:
            return
        if self.running:
            self.place += seconds / self.speed.step(len(self.running))
            self.spent["tail" if len(self.running) * 2 < self.most else "decoding"] += seconds
        else:
            self.spent["environments" if self.owed or self.rewards else "weights"] += seconds

    def occupy(self, seconds: float, what: str) -> None:
        if seconds > 0:
            self.busy = max(self.busy, self.now) + seconds
            self.doing.append((self.busy, what))

    def next_end(self) -> float:
        """Return when the next running request ends."""
        left = max(0.0, self.running[0][0] - self.place)
        return max(self.now, self.busy) + left * self.speed.step(len(self.running))


@dataclass(frozen=True)
class SimulationResult:
    """The results, over the steps after the warm-up."""

    setting: PlanSetting
    steps_per_hour: float  # of the job's own number of groups
    engines: dict[str, float]  # share of the engines' time by kind
    learners: float  # share of the learners' time in which they work
    learned: tuple[float, ...]  # end of each step, in seconds
    served: tuple[Served, ...]  # all requests, if traced

    @property
    def idle(self) -> tuple[float, float]:
        """Return the idle shares of the engines' and of the learners' time; both the same if they share devices."""
        engines = self.engines["environments"] + self.engines["weights"]
        if self.setting.shared:
            both = max(0.0, engines - self.learners)
            return both, both
        return engines, max(0.0, 1 - self.learners)

    @property
    def limit(self) -> str:
        """Return the largest use of time: a kind of the engines' time, or "learners"."""
        if self.learners >= BUSY:
            return "learners"
        shares = dict(self.engines)
        if self.setting.shared:  # the process that waits for weights makes them
            shares |= {"learners": self.learners, "weights": 0.0}
        return max(shares, key=lambda kind: shares[kind])


class Simulation:
    """One job in one setting, for some steps."""

    def __init__(self, job: Job, setting: PlanSetting, steps: int, trace: bool = False) -> None:
        """`trace`: whether the result lists all requests."""
        self.job, self.setting, self.steps, self.trace = job, setting, steps, trace
        self.engines = [SimulatedEngine(job.speed) for _ in range(setting.engines)]
        self.events: list[tuple[float, int, str, object]] = []
        self.order = 0
        self.now = 0.0
        self.begun = 0  # groups
        self.opened = 0  # steps
        self.owed: defaultdict[int, int] = defaultdict(int)  # episodes that a step waits for
        self.carried: defaultdict[int, list[SimulatedEpisode]] = defaultdict(list)  # later step -> cut episodes
        self.groups: dict[int, tuple[Group, list[int]]] = {}  # number -> the group, [episodes that are not finished]
        self.whole: defaultdict[int, list[Group]] = defaultdict(list)  # step -> the groups that it learns from
        self.played = 0  # the last step that has no episode in progress
        # of each step: its end, its groups, groups finished by then, seconds of learning
        self.learned: list[tuple[float, int, int, float]] = []
        self.finished = 0  # groups that are whole
        self.learning = False
        self.dirty: dict[int, SimulatedEngine] = {}
        self.served: list[Served] = []
        self.marks: list[dict[str, float]] = []  # the engines' use of time, after each step

    def run(self) -> SimulationResult:
        self._open()
        while len(self.learned) < self.steps:
            while self.dirty:  # one by one: an engine may begin the episodes that another one finishes
                self._settle(self.dirty.pop(next(iter(self.dirty))))
            assert self.events, "nothing is left to happen, and steps are"
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                _, _, kind, what = heapq.heappop(self.events)
                getattr(self, f"_{kind}")(what)
        return self._outcome()

    def _at(self, time: float, kind: str, what: object) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, kind, what))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _version(self, step: int) -> int:
        """Return the version of the weights that sample a step."""
        return max(0, step - 1 - self.setting.async_steps)

    def _open(self) -> None:
        """Begin all steps whose weights exist."""
        while self._version(self.opened + 1) <= len(self.learned):
            self.opened += 1
            for playing in self.carried.pop(self.opened, ()):
                self._begin(playing, self._free())
            for _ in range(self.job.prompts):
                group, number = self.job.group(self.begun), self.begun
                self.begun += 1
                self.groups[number] = (group, [len(group.episodes)])
                engine = self._free()
                self.owed[self.opened] += len(group.episodes)
                for episode in group.episodes:
                    self._begin(SimulatedEpisode(episode, number, self.opened), engine)

    def _free(self) -> SimulatedEngine:
        """Return the engine with the fewest unfinished episodes."""
        return min(self.engines, key=lambda engine: engine.owed)

    def _begin(self, playing: SimulatedEpisode, engine: SimulatedEngine) -> None:
        """Begin or continue an episode in its step."""
        playing.engine, playing.left = engine, self.setting.tokens or 1 << 62
        engine.advance(self.now)
        engine.owed += 1
        engine.of[self._weights(playing)] += 1
        if playing.again:
            self._asked(playing)
        else:
            self._ask(playing)

    def _weights(self, playing: SimulatedEpisode) -> int:
        return 0 if self.setting.clock else self._version(playing.step)

    def _played(self) -> None:
        """Begin learning from the next step if it has no episode in progress."""
        if self.setting.clock:
            return
        while self.played < self.opened and not self.owed[self.played + 1]:
            self.played += 1
        self._learn()

    def _learn(self) -> None:
        number = len(self.learned) + 1
        if self.learning or number > self.steps:
            return
        if self.setting.clock:
            ready = self.whole[0]
            if len(ready) < self.job.prompts:
                return
            self.whole[number], self.whole[0] = ready[: self.job.prompts], ready[self.job.prompts :]
        elif number > self.played:
            return
        self.learning = True
        learning, learners = self.job.learning, self.setting.learners
        tokens = sum(group.tokens for group in self.whole[number])
        seconds = learning.step + tokens * learning.token / learners + (learning.sum if learners > 1 else 0.0)
        self._at(self.now + seconds, "updated", seconds)

    def _updated(self, seconds: float) -> None:
        self.learning = False
        groups = len(self.whole.pop(len(self.learned) + 1, ()))
        self.learned.append((self.now, groups, self.finished, seconds))
        for engine in self.engines:
            engine.advance(self.now)
            if self.setting.clock:
                engine.occupy(self.job.speed.load, "loading")
                self.dirty[id(engine)] = engine
        self.marks.append({kind: sum(engine.spent[kind] for engine in self.engines) for kind in KINDS})
        self._open()
        self._played()
        self._learn()

    # -- episodes ------------------------------------------------------------------------------------------------------

    def _ask(self, playing: SimulatedEpisode) -> None:
        """Send the next request, after the environment's time."""
        stage = playing.episode.stages[playing.stage]
        playing.steps = stage.steps
        if stage.wait:
            self._at(self.now + stage.wait, "asked", playing)
        else:
            self._asked(playing)

    def _asked(self, playing: SimulatedEpisode) -> None:
        assert playing.engine is not None
        playing.asked = self.now
        playing.engine.waiting[self._weights(playing)].append(playing)
        self.dirty[id(playing.engine)] = playing.engine

    def _ends(self, what: tuple[SimulatedEngine, int]) -> None:
        """Handle the scheduled end of a request, unless another event has changed it."""
        engine, event = what
        if event == engine.events:
            self.dirty[id(engine)] = engine

    def _settle(self, engine: SimulatedEngine) -> None:
        """Remove finished requests, admit others, and schedule the next end."""
        engine.advance(self.now)
        while engine.running and engine.next_end() <= self.now + 1e-12 * max(1.0, self.now):
            end, _, begun, playing = heapq.heappop(engine.running)
            engine.place = max(engine.place, end)
            engine.occupy(self.job.speed.reply, "reading")
            if self.trace:
                self.served.append(Served(playing.asked, begun, self.now))
            self._reply_ended(playing)
        self._admit(engine)
        engine.events += 1
        if engine.running:
            self._at(engine.next_end(), "ends", (engine, engine.events))

    def _admit(self, engine: SimulatedEngine) -> None:
        if not engine.of[engine.version] and (later := [v for v, owed in engine.of.items() if owed]):
            engine.version, engine.most = min(later), 0
            engine.occupy(self.job.speed.load, "loading")
        waiting, speed = engine.waiting[engine.version], self.job.speed
        free = speed.slots - len(engine.running)
        if not waiting or (engine.running and free < speed.admitted):
            return
        for _ in range(min(free, len(waiting))):
            playing = waiting.popleft()
            engine.occupy(self._read(engine, playing) * speed.read, "reading")
            steps = min(playing.steps, playing.left)
            playing.steps, playing.left = playing.steps - steps, playing.left - steps
            playing.context += steps
            self.order += 1
            heapq.heappush(engine.running, (engine.place + steps, self.order, self.now, playing))
        engine.most = max(engine.most, len(engine.running))

    def _read(self, engine: SimulatedEngine, playing: SimulatedEpisode) -> int:
        """Return the tokens to read before this request can be decoded."""
        if playing.again:
            playing.again = False
            return playing.context
        tokens = playing.episode.stages[playing.stage].read
        playing.context += tokens
        prompt = (playing.group, engine.version)
        if playing.stage == 0 and prompt in engine.known:
            return 0
        engine.known.add(prompt)
        return tokens

    def _reply_ended(self, playing: SimulatedEpisode) -> None:
        """Handle the end or the cut of a reply."""
        if playing.steps or not playing.left:
            unfinished = playing.steps or playing.stage + 1 < len(playing.episode.stages)
            if unfinished:
                return self._cut(playing)
        playing.stage += 1
        if playing.stage < len(playing.episode.stages):
            return self._ask(playing)
        self._leave(playing)
        assert playing.engine is not None
        playing.engine.rewards += 1
        if playing.episode.reward:
            self._at(self.now + playing.episode.reward, "rewarded", playing)
        else:
            self._rewarded(playing)

    def _cut(self, playing: SimulatedEpisode) -> None:
        """Continue the episode in the next step."""
        self._leave(playing)
        if not playing.steps:  # between two turns: the next one is asked for then
            playing.stage += 1
        playing.again = bool(playing.steps)
        step, playing.step = playing.step, playing.step + 1
        self.owed[step] -= 1
        self.owed[playing.step] += 1
        if playing.step <= self.opened:
            self._begin(playing, self._free())
        else:
            self.carried[playing.step].append(playing)
        self._played()

    def _leave(self, playing: SimulatedEpisode) -> None:
        assert playing.engine is not None
        playing.engine.owed -= 1
        playing.engine.of[self._weights(playing)] -= 1

    def _rewarded(self, playing: SimulatedEpisode) -> None:
        assert playing.engine is not None
        playing.engine.advance(self.now)
        playing.engine.rewards -= 1
        group, left = self.groups[playing.group]
        left[0] -= 1
        self.owed[playing.step] -= 1
        if not left[0]:
            del self.groups[playing.group]
            self.finished += 1
            self.whole[0 if self.setting.clock else playing.step].append(group)
        if self.setting.clock:
            self._learn()
        self._played()

    # -- results -------------------------------------------------------------------------------------------------------

    def _outcome(self) -> SimulationResult:
        """Return the results without the first fifth, in which engines are not yet as far ahead as they may be.

        Learning is counted no faster than sampling: rollouts sampled in advance can be learned from only once.
        """
        first = max(1, min(self.steps - 2, self.steps // 5 + self.setting.async_steps))
        (began, _, before, _), (ended, _, after, _) = self.learned[first - 1], self.learned[-1]
        took = ended - began
        groups = min(after - before, sum(count for _, count, _, _ in self.learned[first:]))
        whole = took * len(self.engines)
        return SimulationResult(
            self.setting,
            3600 * groups / self.job.prompts / took,
            {kind: (self.marks[-1][kind] - self.marks[first - 1][kind]) / whole for kind in KINDS},
            min(1.0, sum(seconds for _, _, _, seconds in self.learned[first:]) / took),
            tuple(when for when, _, _, _ in self.learned),
            tuple(self.served),
        )
