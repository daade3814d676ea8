"""Minibatches: the rollouts of each optimizer update of a step, and the weights of their tokens.

S    rollouts of an optimizer batch    n_i    scored tokens of rollout i
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from posttrain.algorithms.policy import Algorithm
from posttrain.core.batch import Batch
from posttrain.core.component import Need
from posttrain.core.protocols import Learner
from posttrain.core.seeds import seed_of
from posttrain.core.transcripts import Transcript
from posttrain.data.tasks import order
from posttrain.training.sources.collector import Size
from posttrain.training.sources.credit_assignment import Credited
from posttrain.training.sources.ledger import Ledger
from posttrain.training.sources.model_outputs import evaluate_rollouts
from posttrain.training.sources.packing import collate, split_microbatches
from posttrain.training.sources.replay_buffer import ReplayBuffer
from posttrain.training.sources.scoreboard import scoreboard
from posttrain.training.sources.teacher_targets import Teachers


@dataclass(frozen=True)
class Minibatches:
    """Builds the updates of steps. Its only state is the replay buffer."""

    algorithm: Algorithm
    learner: Learner
    size: Size
    seed: int
    success: float | None
    # imitated besides the rollouts, by an algorithm with a pretraining term
    texts: Sequence[Sequence[Transcript] | None]
    buffer: ReplayBuffer | None
    teachers: Teachers | None = None

    def updates(
        self, number: int, credited: Credited, coefficients: Mapping[str, float], ledger: Ledger
    ) -> list[Callable[[], list[Batch]]]:
        """Return one thunk per optimizer update of step `number`. The ledger records the rollouts of each update."""
        chosen = self._shuffled(number, credited) if self.buffer is None else self._replayed(number, credited)
        ledger.choose(chosen)
        fixed, start = dict(coefficients), self.learner.version
        return [partial(self._build, number, place, part, fixed, ledger, start) for place, part in enumerate(chosen)]

    def _build(
        self, number: int, place: int, part: Credited, coefficients: Mapping[str, float], ledger: Ledger, start: int
    ) -> list[Batch]:
        """Build the micro-batches of an update. `start`: the version of the weights at the step's start."""
        self._check_older(part, start)
        # The first update is on policy: the old log-probabilities are the current ones.
        batches = self._weighted(part, coefficients, ledger, fresh=place == 0)
        # While a critic warms up, the policy is trained neither on rollouts nor on texts.
        return [*batches, *self._texts(number, place)] if coefficients.get("policy", 1.0) else batches

    def _check_older(self, part: Credited, start: int) -> None:
        """Assert that the algorithm has an importance weight for tokens sampled by other weights than the learner's."""
        found = {span.version for r in part.rollouts for t in r.transcripts for span in t.spans}
        others = {version for version in found if version is not None} - {self.learner.version}
        weighed = self.algorithm.weighs_older or (others <= {start} and self.algorithm.weighs_updates)
        assert not others or weighed, (
            "nothing corrects for the weights that sampled: see posttrain/training/older_weights.py"
        )

    def _shuffled(self, number: int, credited: Credited) -> list[Credited]:
        """Return the rollouts of each update, every rollout once per epoch.

        Groups stay whole, so their prompts are shared.
        """
        by_group: dict[int, list[int]] = defaultdict(list)
        for index, group in enumerate(credited.scores.group.tolist()):
            by_group[group].append(index)
        members, chosen = list(by_group.values()), []
        for epoch in range(self.algorithm.epochs if members else 0):
            groups = order(len(members), epoch, seed_of(self.seed, "minibatch", number))
            parts = min(self.algorithm.minibatches, len(groups))
            for part in range(parts):
                rows = [i for g in sorted(groups[part::parts]) for i in members[g]]
                chosen.append(credited.of(torch.tensor(rows)))
        return chosen

    def _replayed(self, number: int, credited: Credited) -> list[Credited]:
        """Return the rollouts of each update, drawn from the buffer, as many as a minibatch of the step has."""
        assert self.buffer is not None
        self.buffer.extend(credited.rollouts, credited.per_token["advantage"])
        algorithm, remembered = self.algorithm, len(self.buffer.rollouts)
        size = min(remembered, -(-self.size.prompts * self.size.group // algorithm.minibatches))
        chosen = []
        for update in range(algorithm.epochs * algorithm.minibatches if remembered else 0):
            rows = order(remembered, update, seed_of(self.seed, "replay", number))[:size]
            rollouts = [self.buffer.rollouts[i] for i in sorted(rows)]
            fields = {"advantage": [self.buffer.advantages[i] for i in sorted(rows)]}
            if Need.REFERENCE in algorithm.needs:
                budget = self.size.tokens_per_microbatch
                fields["ref_logp"] = evaluate_rollouts(self.learner, rollouts, budget, of="reference")["logp"]
            chosen.append(Credited(rollouts, scoreboard(rollouts, success=self.success), fields, {}))
        return chosen

    def _weighted(self, part: Credited, coefficients: Mapping[str, float], ledger: Ledger, fresh: bool) -> list[Batch]:
        """Return the micro-batches of one update, with weights from the scoreboard of exactly these rollouts.

        A rollout with advantage 0 has a gradient of 0 if nothing but the advantage moves a token, and none of its
        tokens is held near the old policy: it is not even fed, but still counts in every denominator. Losses of routers
        are means over the batch: with them all rollouts are fed.
        """
        algorithm = self.algorithm
        fields = {name: values for name, values in part.per_token.items() if not (fresh and name == "old_logp")}
        imitate = None
        if algorithm.imitation is not None:
            good = part.scores.success
            assert good is not None
            imitate = algorithm.imitation.coefficient * good / (part.scores.length * good).sum().clamp_min(1.0)
        fed = list(range(len(part.rollouts)))
        if not (algorithm.moves_every_token or self.learner.moves_every_token):
            held = part.per_token.get("held")
            moved = part.advantages()[1]
            fed = [i for i in fed if moved[i] or (held is not None and bool(held[i].any()))]
        transcripts = [part.rollouts[i].transcripts for i in fed]
        sink = ledger.feed(part, fed, coefficients, self.learner.moves_every_token)
        weight = algorithm.aggregate(part.scores)
        taught = {}
        if self.teachers is not None and algorithm.teacher is not None and algorithm.teacher.whole:
            taught = dict(zip(fed, self.teachers.taught([part.rollouts[i] for i in fed]), strict=True))
        return [
            collate(
                [transcripts[i] for i in index],
                [fed[i] for i in index],
                weight=weight,
                fields=fields,
                imitate=imitate,
                coefficients=coefficients,
                taught=[taught[fed[i]] for i in index] if taught else (),
                device=self.learner.device,
                sink=sink,
            )
            for index in split_microbatches(transcripts, self.size.tokens_per_microbatch)
        ]

    def _texts(self, number: int, place: int) -> list[Batch]:
        """Return micro-batches of the pretraining texts of one update; each token has weight coefficient / tokens."""
        pretraining = self.algorithm.pretraining
        if pretraining is None:
            return []
        updates = self.algorithm.epochs * self.algorithm.minibatches
        first = ((number - 1) * updates + place) * pretraining.rows
        places = [divmod(p, len(self.texts)) for p in range(first, first + pretraining.rows)]
        permutation = {epoch: order(len(self.texts), epoch, self.seed) for epoch in {e for e, _ in places}}
        drawn = (self.texts[int(permutation[epoch][i])] for epoch, i in places)
        chosen = [text for text in drawn if text is not None]
        if not chosen:
            return []
        share = pretraining.coefficient / sum(t.n_scored for text in chosen for t in text)
        none, imitate = torch.zeros(len(chosen)), torch.full((len(chosen),), share)
        return [
            collate([chosen[i] for i in index], index, weight=none, imitate=imitate, device=self.learner.device)
            for index in split_microbatches(chosen, self.size.tokens_per_microbatch)
        ]
