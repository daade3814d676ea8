"""The source of reinforcement learning: play -> score -> filter -> credit -> pack -> weight.

What a step plays stands in `collecting`, what its tokens earn in `crediting`, what each update learns from in
`minibatches`; here they are put in order, with what is remembered from step to step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from posttrain.algorithms.penalty import KL
from posttrain.algorithms.policy import Algorithm
from posttrain.batch import Stats, Step
from posttrain.envs.play import Player
from posttrain.part import Need
from posttrain.protocols import Learner, Paced, Source
from posttrain.sources.collecting import Collector, Size
from posttrain.sources.crediting import Credited, credit
from posttrain.sources.lengths import Placed, TooLong
from posttrain.sources.minibatches import Minibatches
from posttrain.sources.replay import ReplayBuffer
from posttrain.sources.teaching import Teachers
from posttrain.sources.views import view
from posttrain.types import Transcript


class Experience:
    """See `posttrain.protocols.Source`.

    Seeds follow from the step's number. What is remembered: the place in the endless order of tasks, coefficients that
    change, and, where a row replays, rollouts.
    """

    def __init__(
        self,
        *,
        tasks: Placed,
        player: Player,
        learner: Learner,
        algorithm: Algorithm,
        size: Size,
        seed: int,
        success: float | None = None,
        texts: Sequence[Sequence[Transcript] | None] = (),
        too_long: TooLong | None = None,
        teachers: Teachers | None = None,
        rewarded: bool = True,
    ) -> None:
        """`success`: rewards from it on are successes; `texts`: what a row with a pretraining term imitates.

        `teachers`: who teaches a row with a teacher; `rewarded`: whether anything scores the replies.
        """
        assert (teachers is not None) == (algorithm.teacher is not None), "a row with a teacher has one to ask"
        assert success is not None or Need.SUCCESS not in algorithm.needs, "what is a success?"
        self.learner, self.algorithm, self.size, self.success = learner, algorithm, size, success
        parts = Need.PARTS in algorithm.needs
        self.player = player
        plan = algorithm.branching.plan(learner.weights().config.vocab) if algorithm.branching else None
        self.collector = Collector(tasks, player, size, seed, success, too_long, parts, rewarded, plan)
        self.buffer = ReplayBuffer(algorithm.replay.capacity) if algorithm.replay else None
        self.teachers = teachers
        self.minibatches = Minibatches(algorithm, learner, size, seed, success, texts, self.buffer, teachers)
        kl, entropy = algorithm.kl, algorithm.entropy
        self.coefficients = {
            **({"kl": kl.beta} if kl else {}),
            **({"entropy": entropy.coefficient} if entropy else {}),
        }
        self._watched: Credited | None = None

    def produce(self, number: int) -> Step:
        row = self.algorithm
        stats, seconds, work = Stats(), self._waited(), self._worked()
        marks = [time.perf_counter()]  # between loading, playing and the rest
        self.player.engine.load(self.learner.weights(), self.learner.version)
        marks.append(time.perf_counter())
        self.player.services.begin(number)
        collected = self.collector.collect(number, row.sampling, stats)
        marks.append(time.perf_counter())
        tokens, kept = self.size.tokens_per_microbatch, collected.kept
        if self.teachers is not None:
            kept = self.teachers.readable(kept, stats)
        credited = credit(row, kept, self.learner, tokens, self.coefficients, self.success, stats, self.teachers)
        self._watched = credited if kept else None
        means = {id(r): a.mean().item() for r, a in zip(kept, credited.per_token["advantage"], strict=True)}
        if kept:
            for chosen in row.filters:
                credited = credited.of(chosen(credited.scores).nonzero().flatten())
        if row.critic is not None and row.critic.warmup:
            self.coefficients["policy"] = float(number > row.critic.warmup)
        for name, value in self.coefficients.items():
            stats.add(f"coefficient/{name}", value)
        updates = self.minibatches.updates(number, credited, self.coefficients)
        sampled = sum(r.n_own for r in collected.played)
        rollouts = [(r, means.get(id(r), 0.0)) for r in collected.played]
        seconds = {name: now - seconds[name] for name, now in self._waited().items()}
        marks.append(time.perf_counter())
        parts = zip(("load", "play", "credit"), marks, marks[1:], strict=False)
        seconds |= {name: end - begin for name, begin, end in parts}
        work = {name: now - work.get(name, 0.0) for name, now in self._worked().items()}
        return Step(number, updates, stats, sampled, rollouts, seconds, self.player.services.counts(), work)

    def _worked(self) -> dict[str, float]:
        """What the engine has counted so far."""
        engine = self.player.engine
        return dict(engine.pace()) if isinstance(engine, Paced) else {}

    def _waited(self) -> dict[str, float]:
        """Seconds so far in which nothing was sampled, because of environments or of services."""
        asked = {"services": self.player.services.waited} if self.player.services else {}
        return {"waiting": self.player.pool.waited, **asked}

    def learned(self, step: Step, stats: Stats) -> None:
        """Let what changes from step to step do so: coefficients, the reference."""
        if stats.get("sampler/ratio", (0.0, 0.0))[1]:
            # Effective sample size, as a share: (sum c)^2 / (N sum c^2), c the learner's probability over the engine's.
            (total, count), (squares, _) = stats["sampler/ratio"], stats.pop("sampler/ratio/square")
            stats.add("sampler/ess", total**2 / (count * squares))
        if self.coefficients.get("policy", 1.0):  # while a critic warms up alone, nothing of the policy's changes
            self._steer(step, stats)
        if self.algorithm.refresh and step.number % self.algorithm.refresh == 0:
            self.learner.refresh_reference()
        self._watched = None

    def _steer(self, step: Step, stats: Stats) -> None:
        """Move the coefficients of KL and entropy by what was measured in this step."""
        kl, entropy = self.algorithm.kl, self.algorithm.entropy
        if kl is not None and kl.control is not None and self._watched is not None:
            rollouts, views = self._watched.rollouts, self._watched.views
            if kl.against == "old":  # how far the updates went from the policy that sampled
                other = view(self.learner, rollouts, self.size.tokens_per_microbatch)["logp"]
            else:
                other = views["reference"]
            measured = KL("k3")(torch.cat(views["old"]), torch.cat(other)).mean().item()
            stats.add("kl/measured", measured)
            self.coefficients["kl"] = kl.control(self.coefficients["kl"], measured, len(rollouts))
        if entropy is not None and stats["entropy"][1]:
            total, count = stats["entropy"]
            self.coefficients["entropy"] = entropy.next(self.coefficients["entropy"], total / count)

    def state(self) -> dict[str, Any]:
        replay = {} if self.buffer is None else {"replay": self.buffer.state()}
        return {"cursor": self.collector.cursor, "coefficients": dict(self.coefficients), **replay}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. Raises ValueError, KeyError or TypeError if it is of no such source."""
        cursor, coefficients = state["cursor"], dict(state["coefficients"])
        if type(cursor) is not int or cursor < 0:
            raise ValueError(f"{cursor!r} tasks played")
        if coefficients.keys() - {"policy"} != self.coefficients.keys() - {"policy"}:
            raise ValueError(f"coefficients of {', '.join(coefficients) or 'nothing'}")
        if not all(math.isfinite(value) for value in coefficients.values()):
            raise ValueError("coefficients that are not finite")
        self.collector.cursor, self.coefficients = cursor, coefficients
        if self.buffer is not None:
            self.buffer.restore(state["replay"])


if TYPE_CHECKING:
    _proof: Callable[..., Source] = Experience
