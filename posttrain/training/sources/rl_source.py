"""Source of reinforcement learning: rollouts -> scores -> filter -> credit -> packing -> weights.

`collector` samples the rollouts of a step, `credit_assignment` computes their advantages, and `minibatches` the updates.
This module runs them in order and keeps the state between steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from posttrain.algorithms.penalty import KL
from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.ratio import Correction
from posttrain.core.batch import Stats, TrainingStep
from posttrain.core.component import Need
from posttrain.core.protocols import Learner, Source
from posttrain.core.rollouts import Fate, Rollout
from posttrain.core.transcripts import Transcript
from posttrain.learners.forward_pass import REFERENCE
from posttrain.training.sources.async_rollouts import StepQueue
from posttrain.training.sources.collector import Collector
from posttrain.training.sources.credit_assignment import Credited, credit
from posttrain.training.sources.first_steps import FirstSteps
from posttrain.training.sources.ledger import Ledger
from posttrain.training.sources.minibatches import Minibatches
from posttrain.training.sources.model_outputs import evaluate_rollouts
from posttrain.training.sources.replay_buffer import ReplayBuffer
from posttrain.training.sources.teacher_targets import TEACHER, UNREADABLE, Teachers
from posttrain.training.sources.token_recording import SAMPLE, TokenRecording


class RLSource:
    """Source of RL steps, see `posttrain.core.protocols.Source`.

    Seeds derive from the step's number. The state is that of the order of tasks, coefficients that change, and rollouts
    of the replay buffer or of asynchronous steps.
    """

    def __init__(
        self,
        collector: Collector,
        learner: Learner,
        algorithm: Algorithm,
        *,
        texts: Sequence[Sequence[Transcript] | None] = (),
        teachers: Teachers | None = None,
        async_steps: int = 0,
        last: int = 0,
        recording: TokenRecording = SAMPLE,
        watch: FirstSteps | None = None,
    ) -> None:
        """`collector`: samples rollouts for the needs of this algorithm. `texts`: imitated by an algorithm with a
        pretraining term; `teachers`: those of an algorithm with a teacher.

        `async_steps`: number of steps between sampling and update, during which the engine has weights of its own;
        `last`: the number of the last step. `recording`: decides whose token values are recorded. `watch`: looks at the
        replies of each step.
        """
        assert collector.needs == algorithm.needs, "the collector prepares the rollouts for another algorithm"
        assert (teachers is None) == (algorithm.teacher is None), "exactly an algorithm with a teacher has teachers"
        size, seed, success = collector.size, collector.seed, collector.success
        assert success is not None or Need.SUCCESS not in algorithm.needs, "the algorithm needs a success threshold"
        self.learner, self.algorithm, self.size, self.success = learner, algorithm, size, success
        self.recording, self.watch = recording, watch
        self.queue = StepQueue(collector, algorithm.sampling, async_steps, last)
        self.buffer = ReplayBuffer(algorithm.replay.capacity) if algorithm.replay else None
        self.teachers = teachers
        self.minibatches = Minibatches(algorithm, learner, size, seed, success, texts, self.buffer, teachers)
        kl, entropy = algorithm.kl, algorithm.entropy
        self.coefficients = {
            **({"kl": kl.beta} if kl else {}),
            **({"entropy": entropy.coefficient} if entropy else {}),
        }
        self._watched: Credited | None = None
        self._ledger: Ledger | None = None

    @property
    def lags(self) -> bool:
        """Whether weights older than those at a step's start may have sampled its rollouts."""
        return bool(self.queue.async_steps or self.queue.collector.tokens)

    @property
    def explores(self) -> bool:
        """Whether some tokens are drawn uniformly instead of from the policy."""
        player = self.queue.collector.player
        return any(sampling.epsilon for sampling in (player.sampling, *(own for own, _ in player.parts.values())))

    def produce(self, number: int) -> TrainingStep:
        algorithm = self.algorithm
        played, began = self.queue.take(number, self.learner), time.perf_counter()
        collected, stats = played.collected, Stats(played.stats)
        tokens, kept = self.size.tokens_per_microbatch, collected.kept
        if self.watch is not None:
            self.watch.look(collected.played)
        if self.lags:
            self._measure_staleness(collected.played, stats)
        ledger = self._ledger = Ledger(algorithm, number, collected.played, collected.dropped, self.recording)
        if self.teachers is not None:
            kept, unreadable = self.teachers.readable(kept, stats)
            ledger.leave(unreadable, Fate.FILTERED, UNREADABLE)
        credited = credit(algorithm, kept, self.learner, tokens, self.coefficients, self.success, stats, self.teachers)
        self._watched = credited if kept else None
        ledger.credit(credited)
        for chosen in algorithm.filters if kept else ():
            stay = chosen(credited.scores)
            ledger.leave_filtered(credited.of((~stay).nonzero().flatten()).rollouts, chosen)
            credited = credited.of(stay.nonzero().flatten())
        if algorithm.critic is not None and algorithm.critic.warmup:
            self.coefficients["policy"] = float(number > algorithm.critic.warmup)
        for name, value in self.coefficients.items():
            stats.add(f"coefficient/{name}", value)
        updates = self.minibatches.updates(number, credited, self.coefficients, ledger)
        sampled = sum(r.n_own for r in collected.played)
        seconds = {**played.seconds, "credit": time.perf_counter() - began}
        return TrainingStep(
            number,
            updates,
            stats,
            sampled,
            collected.played,
            seconds=seconds,
            counts=played.counts,
            work=played.work,
            enough=algorithm.early_stop or (lambda stats: False),
        )

    def _measure_staleness(self, rollouts: Sequence[Rollout], stats: Stats) -> None:
        """Measure the number of updates between the weights that sampled each token and those that learn from it."""
        spans = [s for r in rollouts for t in r.transcripts for s in t.spans]
        ages = [(self.learner.version - s.version, s.length) for s in spans if s.version is not None]
        if ages:
            stats.add("staleness", sum(age * length for age, length in ages), sum(length for _, length in ages))
            stats.add("staleness/max", max(age for age, _ in ages))

    def learned(self, step: TrainingStep, stats: Stats) -> None:
        """Update the coefficients and the reference after a step, and close its ledger."""
        if stats.get("sampler/ratio", (0.0, 0.0))[1]:
            # Effective sample size, as a share: (sum c)^2 / (N sum c^2), c the learner's probability over the engine's.
            (total, count), (squares, _) = stats["sampler/ratio"], stats.pop("sampler/ratio/square")
            stats.add("sampler/ess", total**2 / (count * squares))
        if self.coefficients.get("policy", 1.0):  # while only a critic is trained, the policy's coefficients stay
            self._steer(step, stats)
        moving, teacher = self.algorithm.moving, self.algorithm.teacher
        if moving is not None and step.number % moving.every == 0:
            self.learner.move(REFERENCE, moving.rate)
        if teacher is not None and teacher.every and step.number % teacher.every == 0:
            self.learner.move(TEACHER, teacher.rate)
        self._watched = None
        if self._ledger is not None:
            self._ledger.settle(self.learner, self.size.tokens_per_microbatch)
            step.outcomes[:] = self._ledger.outcomes()
            self._ledger = None

    def _steer(self, step: TrainingStep, stats: Stats) -> None:
        """Update the coefficients of KL and entropy from the measurements of this step."""
        kl, entropy = self.algorithm.kl, self.algorithm.entropy
        if kl is not None and kl.control is not None and self._watched is not None:
            rollouts, views = self._watched.rollouts, self._watched.views
            old = torch.cat(views["old"])
            sampler = torch.cat([torch.from_numpy(_sampler_logp(r)) for r in rollouts]).to(old)
            if kl.against == "old":  # distance of the updated policy from the ratio's denominator
                old = sampler if self.algorithm.old == "sampler" else old
                other = evaluate_rollouts(self.learner, rollouts, self.size.tokens_per_microbatch)["logp"]
            else:
                other = views["reference"]
            distance = KL("k3")(old, torch.cat(other))
            measured = self._mean(distance, old - sampler, [len(logp) for logp in views["old"]])
            stats.add("kl/measured", measured)
            self.coefficients["kl"] = kl.control(self.coefficients["kl"], measured, len(rollouts))
        # Tokens of another policy give its entropy; distributions computed at them are the policy's own.
        total, count = stats.get("entropy/policy" if self.lags or self.explores else "entropy", (0.0, 0.0))
        if entropy is not None and count:  # no group may be complete
            self.coefficients["entropy"] = entropy.next(self.coefficients["entropy"], total / count)

    def _mean(self, distance: Tensor, gap: Tensor, lengths: Sequence[int]) -> float:
        """Return the mean of a distance [N] over the policy's own tokens. `gap` [N]: its log-probability minus the
        sampler's.

        Tokens of another policy are weighted by exp(gap), bounded like the algorithm's correction, or like the default
        one.
        """
        if not (self.lags or self.explores):
            return distance.mean().item()
        rollout = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(gap.device)
        weight = (self.algorithm.correction or Correction())(gap, rollout)
        return ((weight * distance).sum() / weight.sum().clamp_min(1e-9)).item()

    def state(self) -> dict[str, Any]:
        replay = {} if self.buffer is None else {"replay": self.buffer.state()}
        return {**self.queue.state(), "coefficients": dict(self.coefficients), **replay}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state`. Raises ValueError, KeyError or TypeError if it is invalid."""
        coefficients = dict(state["coefficients"])
        if coefficients.keys() - {"policy"} != self.coefficients.keys() - {"policy"}:
            raise ValueError(f"coefficients of {', '.join(coefficients) or 'nothing'}")
        if not all(math.isfinite(value) for value in coefficients.values()):
            raise ValueError("coefficients that are not finite")
        self.coefficients = coefficients
        self.queue.restore(state)
        if self.buffer is not None:
            self.buffer.restore(state["replay"])


def _sampler_logp(rollout: Rollout) -> Any:
    """Return the sampler's log-probabilities, float32 [n_i]."""
    found = [t.sampler_logp for t in rollout.transcripts]
    return np.concatenate([logp for logp in found if logp is not None])


if TYPE_CHECKING:
    _proof: Callable[..., Source] = RLSource
