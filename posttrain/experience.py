"""The source of reinforcement learning: play -> score -> filter -> credit -> pack -> weight.

S    rollouts of an optimizer batch    N    scored tokens of a micro-batch
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.algorithms.parts import equal_rewards
from posttrain.algorithms.policy import Algorithm
from posttrain.data.pack import cut, lay
from posttrain.data.tasks import order
from posttrain.envs.host import Host
from posttrain.envs.play import Episode, play, seed_of
from posttrain.learners.local import LocalLearner
from posttrain.models.tokenizer import Tokenizer
from posttrain.types import Batch, Engine, Invalid, Rollout, Sampling, Scores, Stats, Step, Task, UserError

MAX_INVALID = 0.5  # of a step's rollouts: beyond this the reward function is broken, not some of the replies


@dataclass(frozen=True)
class Size:
    """How large a step is."""

    prompts: int  # tasks per step
    group: int  # rollouts per task
    tokens_per_microbatch: int


class Experience:
    """See `posttrain.types.Source`. A step's tasks and seeds follow from its number, so it has nothing to remember."""

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        host: Host,
        engine: Engine,
        learner: LocalLearner,
        tokenizer: Tokenizer,
        algorithm: Algorithm,
        sampling: Sampling,
        size: Size,
        seed: int,
        correct: float = 1.0,
    ) -> None:
        if size.prompts > len(tasks):
            raise UserError(f"--prompts {size.prompts} asks for more tasks per step than there are: {len(tasks)}")
        self.tasks, self.host, self.engine, self.learner = tasks, host, engine, learner
        self.tokenizer, self.algorithm, self.sampling, self.size, self.seed = tokenizer, algorithm, sampling, size, seed
        self.correct = correct

    def produce(self, number: int) -> Step:
        self.engine.load(self.learner.weights(), self.learner.version)
        context = self.learner.model.config.context
        rollouts = play(self.episodes(number), self.host, self.engine, self.tokenizer, self.sampling, context)
        stats = describe(rollouts, self.correct)
        kept = usable(rollouts, stats)
        reference = self._log_probabilities(kept, "reference") if self.algorithm.kl else None
        scores = scoreboard(kept, self._penalty(kept, reference))
        credit = per_token(self.algorithm.advantage(scores), scores) if kept else []
        if kept:
            stats.add("groups/no_signal", equal_rewards(scores).sum().item(), len(kept))
            stats.add("advantage/abs", sum(a.abs().sum().item() for a in credit), scores.length.sum().item())
        old = None if self.algorithm.on_policy or not kept else self._log_probabilities(kept, "policy")
        updates = self._updates(number, kept, scores, credit, old, reference)
        credited = {id(r): a.mean().item() for r, a in zip(kept, credit, strict=True)}
        return Step(number, updates, stats, [(r, credited.get(id(r), 0.0)) for r in rollouts])

    def episodes(self, number: int) -> list[Episode]:
        """What step `number` plays: its slice of the epochs' permutations, each task once per member of its group."""
        episodes, count = [], len(self.tasks)
        places = [divmod(p, count) for p in range((number - 1) * self.size.prompts, number * self.size.prompts)]
        permutation = {epoch: order(count, epoch, self.seed) for epoch in {e for e, _ in places}}
        for epoch, index in places:
            task = self.tasks[permutation[epoch][index]]
            group = f"{task['id']}#{epoch}"  # a task may come twice in a step where two epochs meet
            for member in range(self.size.group):
                episodes.append(Episode(task, group, seed_of(self.seed, "rollout", number, group, member)))
        return episodes

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass

    def _microbatches(self, rollouts: Sequence[Rollout], index: Sequence[int]) -> list[Batch]:
        parts = [rollouts[i].transcripts for i in index]
        device = self.learner.device
        return [
            lay([parts[i] for i in chosen], [index[i] for i in chosen], device)
            for chosen in cut(parts, self.size.tokens_per_microbatch)
        ]

    def _log_probabilities(self, rollouts: Sequence[Rollout], of: Any) -> list[Tensor]:
        """[n_i] for each rollout."""
        batches = self._microbatches(rollouts, range(len(rollouts)))
        outputs = self.learner.evaluate(batches, of)
        return split([(b.rollout, o.logp) for b, o in zip(batches, outputs, strict=True)], len(rollouts))

    def _penalty(self, rollouts: Sequence[Rollout], reference: list[Tensor] | None) -> list[Tensor]:
        """What a KL in the reward takes off each token's, [n_i] for each rollout; [] where the row has none."""
        kl = self.algorithm.kl
        if kl is None or kl.where != "reward" or not rollouts:
            return []
        assert reference is not None
        own = self._log_probabilities(rollouts, "policy")
        return [kl.beta * kl(lp, ref).cpu() for lp, ref in zip(own, reference, strict=True)]

    def _updates(
        self,
        number: int,
        rollouts: Sequence[Rollout],
        scores: Scores,
        credit: list[Tensor],
        old: list[Tensor] | None,
        reference: list[Tensor] | None,
    ) -> list[Callable[[], list[Batch]]]:
        """One thunk per optimizer update. Groups stay whole, so their prompts are shared."""
        if not rollouts:
            return []
        by_group: dict[int, list[int]] = defaultdict(list)
        for index, group in enumerate(scores.group.tolist()):
            by_group[group].append(index)
        updates: list[Callable[[], list[Batch]]] = []
        for epoch in range(self.algorithm.epochs):
            groups = order(len(by_group), epoch, seed_of(self.seed, "minibatch", number))
            parts = min(self.algorithm.minibatches, len(groups))
            for part in range(parts):
                chosen = [i for g in sorted(groups[part::parts]) for i in by_group[g]]
                first = epoch == 0 and part == 0

                def build(chosen: list[int] = chosen, first: bool = first) -> list[Batch]:
                    # The first update is on policy: the old log-probabilities are the current ones.
                    return self._weighted(rollouts, chosen, scores, credit, None if first else old, reference)

                updates.append(build)
        return updates

    def _weighted(
        self,
        rollouts: Sequence[Rollout],
        chosen: Sequence[int],
        scores: Scores,
        credit: list[Tensor],
        old: list[Tensor] | None,
        reference: list[Tensor] | None,
    ) -> list[Batch]:
        """The micro-batches of one update, their weights from the scoreboard of exactly these rollouts.

        Rollouts with advantage 0 have a gradient of 0 when nothing but the advantage moves a token: then they are not
        even fed. They still count in every denominator.
        """
        rows = torch.tensor(chosen)
        weight = torch.zeros(len(rollouts))
        weight[rows] = self.algorithm.aggregate(Scores(scores.reward[rows], scores.group[rows], scores.length[rows]))
        if not self.algorithm.moves_every_token:
            chosen = [i for i in chosen if bool(credit[i].any())]
        batches = []
        for batch in self._microbatches(rollouts, chosen):
            device = batch.weight.device
            here = batch.rollout.unique_consecutive().tolist()
            batches.append(
                replace(
                    batch,
                    weight=weight.to(device)[batch.rollout],
                    advantage=torch.cat([credit[i] for i in here]).to(device),
                    old_logp=torch.cat([old[i] for i in here]) if old else None,
                    ref_logp=torch.cat([reference[i] for i in here]) if reference else None,
                )
            )
        return batches


def split(parts: Sequence[tuple[Tensor, Tensor]], count: int) -> list[Tensor]:
    """Per-token values of micro-batches [(rollout [N], value [N])] -> one tensor [n_i] per rollout."""
    out: list[Tensor] = [torch.zeros(0)] * count
    for rollout, value in parts:
        rows, sizes = rollout.unique_consecutive(return_counts=True)
        for row, piece in zip(rows.tolist(), value.split(sizes.tolist()), strict=True):
            out[row] = piece
    return out


def describe(rollouts: Sequence[Rollout], correct: float) -> Stats:
    """What is worth knowing of all rollouts of a step, the unusable ones too. Rewards from `correct` on are accurate."""
    stats = Stats()
    for rollout in rollouts:
        invalid = isinstance(rollout.reward, Invalid)
        stats.add("invalid", invalid)
        stats.add("truncated", rollout.stop.truncated)
        stats.add("length", rollout.n_sampled)
        # E[-log p] is the entropy: this estimates it, without bias, from the log-probabilities that sampling gave anyway.
        stats.add("entropy", -sum(sum(t.logp) for t in rollout.transcripts), rollout.n_sampled)
        if not isinstance(rollout.reward, Invalid):
            stats.add("reward", rollout.reward)
            stats.add("accuracy", rollout.reward >= correct - 1e-6)
            for name, value in rollout.rewards.items():
                stats.add(f"reward/{name}", value)
    return stats


def usable(rollouts: Sequence[Rollout], stats: Stats) -> list[Rollout]:
    """The rollouts that can teach something: valid, with a sampled token, and with such company in their group.

    A group keeps its valid members while at least half of it, and two, are valid; a group of one needs its one.
    """
    bad = [r for r in rollouts if isinstance(r.reward, Invalid)]
    if len(bad) > MAX_INVALID * len(rollouts):
        reason = bad[0].reward.reason if isinstance(bad[0].reward, Invalid) else ""
        raise UserError(f"{len(bad)} of {len(rollouts)} rewards of this step are invalid; the first: {reason}")
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group].append(rollout)
    kept = []
    for members in groups.values():
        valid = [r for r in members if not isinstance(r.reward, Invalid) and r.n_sampled > 0]
        if len(valid) >= max(min(2, len(members)), len(members) / 2):
            kept.extend(valid)
    stats.add("dropped", len(rollouts) - len(kept), len(rollouts))
    return kept


def scoreboard(rollouts: Sequence[Rollout], penalty: Sequence[Tensor] = ()) -> Scores:
    """The scoreboard of these rollouts, whose rewards are valid, on the CPU."""
    number: dict[str, int] = {}
    return Scores(
        reward=torch.tensor([float(r.reward) for r in rollouts], dtype=torch.float64),  # type: ignore[arg-type]
        group=torch.tensor([number.setdefault(r.group, len(number)) for r in rollouts], dtype=torch.int64),
        length=torch.tensor([r.n_sampled for r in rollouts], dtype=torch.float32),
        steps=tuple(tuple(r.steps) for r in rollouts),
        penalty=tuple(penalty),
    )


def per_token(advantage: Tensor | list[Tensor], scores: Scores) -> list[Tensor]:
    """Advantages [S], or one [n_i] for each rollout, as the latter."""
    if isinstance(advantage, list):
        return [a.to(scores.length.dtype) for a in advantage]
    lengths = scores.length.long().tolist()
    return [a.expand(n) for a, n in zip(advantage.to(scores.length.dtype), lengths, strict=True)]
