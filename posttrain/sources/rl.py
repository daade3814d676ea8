"""The source of reinforcement learning: play -> score -> filter -> credit -> pack -> weight.

S    rollouts of an optimizer batch    N    scored tokens of a micro-batch
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.algorithms.credit import GAE, Baselined, equal_rewards, per_token, returns
from posttrain.algorithms.critic import Value
from posttrain.algorithms.penalty import KL
from posttrain.algorithms.policy import Algorithm, Pretraining
from posttrain.data.tasks import order
from posttrain.envs.play import Episode, play, seed_of
from posttrain.envs.pool import EnvPool
from posttrain.learners.local import LocalLearner
from posttrain.models.tokenizer import Tokenizer
from posttrain.sources.packing import collate, split_microbatches
from posttrain.sources.replay import ReplayBuffer
from posttrain.sources.scores import describe, scoreboard, usable
from posttrain.types import (
    Batch,
    Engine,
    Rollout,
    Sampling,
    Scores,
    Stats,
    Step,
    Task,
    Transcript,
    UserError,
)


@dataclass(frozen=True)
class Size:
    """How large a step is."""

    prompts: int  # tasks per step
    group: int  # rollouts per task
    tokens_per_microbatch: int


@dataclass(frozen=True)
class Credited:
    """Rollouts with what a loss needs of each."""

    rollouts: Sequence[Rollout]
    scores: Scores
    per_token: dict[str, list[Tensor]]  # field of `Batch` -> [n_i] of each rollout

    def of(self, rows: Tensor) -> Credited:
        """Some of them: rows int64 [S']."""
        chosen = rows.tolist()
        fields = {name: [values[i] for i in chosen] for name, values in self.per_token.items()}
        return Credited([self.rollouts[i] for i in chosen], self.scores.of(rows), fields)


class Experience:
    """See `posttrain.types.Source`.

    Seeds follow from the step's number; remembered are the place in the endless row of tasks, coefficients that change,
    and, where a row replays, rollouts.
    """

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        pool: EnvPool,
        engine: Engine,
        learner: LocalLearner,
        tokenizer: Tokenizer,
        algorithm: Algorithm,
        sampling: Sampling,
        size: Size,
        seed: int,
        correct: float = 1.0,
        texts: Sequence[Transcript] = (),
    ) -> None:
        """`texts`: what a row with a pretraining term imitates beside its rollouts."""
        if size.prompts > len(tasks):
            raise UserError(f"--prompts {size.prompts} asks for more tasks per step than there are: {len(tasks)}")
        self.tasks, self.pool, self.engine, self.learner = tasks, pool, engine, learner
        self.tokenizer, self.algorithm, self.sampling, self.size, self.seed = tokenizer, algorithm, sampling, size, seed
        self.correct, self.texts = correct, texts
        self.cursor = 0  # tasks played so far
        kl, entropy = algorithm.kl, algorithm.entropy
        self.coefficients = {
            **({"kl": kl.beta} if kl else {}),
            **({"entropy": entropy.coefficient} if entropy else {}),
        }
        self.memory = ReplayBuffer(algorithm.replay.capacity) if algorithm.replay else None
        self._watched: tuple[Sequence[Rollout], list[Tensor], list[Tensor]] | None = None

    def produce(self, number: int) -> Step:
        row = self.algorithm
        self.engine.load(self.learner.weights(), self.learner.version)
        stats = Stats()
        rollouts, kept = self._play(number, stats)
        credited = self._credit(kept, stats)
        means = {id(r): a.mean().item() for r, a in zip(kept, credited.per_token["advantage"], strict=True)}
        if kept:
            for chosen in row.filters:
                credited = credited.of(chosen(credited.scores).nonzero().flatten())
        if row.critic is not None and row.critic.warmup:
            self.coefficients["policy"] = float(number > row.critic.warmup)
        for name, value in self.coefficients.items():
            stats.add(f"coefficient/{name}", value)
        updates = self._updates(number, credited)
        return Step(number, updates, stats, [(r, means.get(id(r), 0.0)) for r in rollouts])

    def learned(self, step: Step, stats: Stats) -> None:
        """Let what changes from step to step do so: coefficients, the reference."""
        if stats.get("sampler/ratio", (0.0, 0.0))[1]:
            # Effective sample size, as a share: (sum c)^2 / (N sum c^2), c the learner's probability over the engine's.
            (total, count), (squares, _) = stats["sampler/ratio"], stats.pop("sampler/ratio/square")
            stats.add("sampler/ess", total**2 / (count * squares))
        kl, entropy = self.algorithm.kl, self.algorithm.entropy
        if kl is not None and kl.control is not None and self._watched is not None:
            rollouts, old, other = self._watched
            if kl.against == "old":  # how far the updates went from the policy that sampled
                other = self._evaluate(rollouts)["logp"]
            measured = KL("k3")(torch.cat(old), torch.cat(other)).mean().item()
            stats.add("kl/measured", measured)
            self.coefficients["kl"] = kl.control(self.coefficients["kl"], measured, len(step.rollouts))
        if entropy is not None and stats["entropy"][1]:
            total, count = stats["entropy"]
            self.coefficients["entropy"] = entropy.next(self.coefficients["entropy"], total / count)
        if self.algorithm.refresh and step.number % self.algorithm.refresh == 0:
            self.learner.refresh_reference()
        self._watched = None

    def episodes(self, number: int, first: int, count: int) -> list[Episode]:
        """What step `number` plays: tasks `first` and on of the epochs' permutations, each once per member of its group."""
        episodes, tasks = [], len(self.tasks)
        places = [divmod(p, tasks) for p in range(first, first + count)]
        permutation = {epoch: order(tasks, epoch, self.seed) for epoch in {e for e, _ in places}}
        for epoch, index in places:
            task = self.tasks[permutation[epoch][index]]
            group = f"{task['id']}#{epoch}"  # a task may come twice in a step where two epochs meet
            for member in range(self.size.group):
                episodes.append(Episode(task, group, seed_of(self.seed, "rollout", number, group, member)))
        return episodes

    def state(self) -> dict[str, Any]:
        replay = {} if self.memory is None else {"memory": self.memory.state()}
        return {"cursor": self.cursor, "coefficients": dict(self.coefficients), **replay}

    def restore(self, state: dict[str, Any]) -> None:
        self.cursor, self.coefficients = state["cursor"], dict(state["coefficients"])
        if self.memory is not None:
            self.memory.restore(state["memory"])

    # -- play ----------------------------------------------------------------------------------------------------------

    def _play(self, number: int, stats: Stats) -> tuple[list[Rollout], list[Rollout]]:
        """(all rollouts of the step, those to learn from). Groups without signal are replaced if the row says so."""
        sampling = self.algorithm.sampling
        budget = self.size.prompts * (sampling.rounds if sampling else 1)
        context = self.learner.model.config.context
        played: list[Rollout] = []
        kept: list[Rollout] = []
        while (missing := min(self.size.prompts - len({r.group for r in kept}), budget)) > 0:
            episodes = self.episodes(number, self.cursor, missing)
            self.cursor, budget = self.cursor + missing, budget - missing
            rollouts = play(episodes, self.pool, self.engine, self.tokenizer, self.sampling, context)
            played += rollouts
            fit = usable(rollouts, stats)
            if fit:
                scores = scoreboard(fit, correct=self.correct)
                stats.add("groups/no_signal", equal_rewards(scores).sum().item(), len(fit))
                if sampling is not None:
                    fit = [r for r, keep in zip(fit, sampling(scores).tolist(), strict=True) if keep]
            kept += fit
            if sampling is None:
                break
        stats.merge(describe(played, self.correct))
        if sampling is not None:
            stats.add("groups/played", len({r.group for r in played}))
            stats.add("groups/kept", len({r.group for r in kept}))
        return played, kept

    # -- credit --------------------------------------------------------------------------------------------------------

    def _credit(self, rollouts: Sequence[Rollout], stats: Stats) -> Credited:
        """Scoreboard and advantages, with the learner's view of the tokens as far as the row asks for it."""
        row = self.algorithm
        if not rollouts:
            return Credited([], scoreboard([]), {"advantage": []})
        own, reference = self._views(rollouts)
        penalty: list[Tensor] = []
        if row.kl is not None and row.kl.where == "reward":
            exact = row.kl.estimator == "exact"
            k = own["kl"] if exact else [row.kl(a, b) for a, b in zip(own["logp"], reference, strict=True)]
            penalty = [self.coefficients["kl"] * x.cpu() for x in k]
        scores = scoreboard(rollouts, penalty, own.get("value", []), self.correct)
        if row.shaping:
            added = torch.stack([shape(scores) for shape in row.shaping]).sum(0)
            stats.add("reward/shaping", added.sum().item(), len(added))
            scores = replace(scores, reward=scores.reward + added)
        if isinstance(row.advantage, Baselined) and row.advantage.weight == "gradient":
            batches = [batch for i in range(len(rollouts)) for batch in self._microbatches(rollouts, [i])]
            scores = replace(scores, square=self.learner.squared_gradients(batches))
        advantage = per_token(row.advantage(scores), scores)
        fields = {"advantage": advantage}
        if not row.on_policy and row.surrogate.uses_ratio:
            fields["old_logp"] = own["logp"]
        if reference:
            fields["ref_logp"] = reference
        if isinstance(row.critic, Value):
            fields |= self._values(row.critic, scores, stats)
        if row.select is not None:
            chosen = row.select(own["entropy"])
            fields["advantage"] = [a * keep for a, keep in zip(advantage, chosen, strict=True)]
        every = torch.cat(fields["advantage"])
        stats.add("advantage/abs", every.abs().sum().item(), len(every))
        stats.add("advantage/std", every.std(correction=0).item())
        if row.kl is not None and row.kl.control is not None:
            self._watched = (rollouts, own["logp"], reference)
        return Credited(rollouts, scores, fields)

    def _views(self, rollouts: Sequence[Rollout]) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
        """What the policy and the critic say of the rollouts, and the reference's log-probabilities, if needed."""
        row = self.algorithm
        want = frozenset(
            name
            for name, needed in (
                ("value", isinstance(row.critic, Value)),
                ("entropy", row.select is not None),
                ("kl", row.kl is not None and row.kl.where == "reward" and row.kl.estimator == "exact"),
            )
            if needed
        )
        compared = row.kl is not None and (row.kl.where == "reward" or row.kl.control is not None)
        stale = not row.on_policy and row.surrogate.uses_ratio
        own = self._evaluate(rollouts, want) if want or compared or stale else {}
        reference = self._evaluate(rollouts, of="reference")["logp"] if row.needs_reference else []
        return own, reference

    def _values(self, critic: Value, scores: Scores, stats: Stats) -> dict[str, list[Tensor]]:
        """The critic's values of rollout time and the returns it is to learn."""
        assert isinstance(self.algorithm.advantage, GAE)
        lam = self.algorithm.advantage.lam if critic.lam is None else critic.lam
        aim = returns(scores, self.algorithm.advantage.gamma, lam)
        target, value = torch.cat(aim), torch.cat([v.double().cpu() for v in scores.value])
        spread = target.var(correction=0).item()
        if spread > 1e-12:  # equal returns leave nothing to explain
            stats.add("explained_variance", 1 - (target - value).var(correction=0).item() / spread)
        stats.add("value", value.sum().item(), len(value))
        stats.add("return", target.sum().item(), len(target))
        return {"value": list(scores.value), "returns": [x.float() for x in aim]}

    def _evaluate(
        self,
        rollouts: Sequence[Rollout],
        want: frozenset[str] = frozenset(),
        of: Literal["policy", "reference"] = "policy",
    ) -> dict[str, list[Tensor]]:
        """Field of `Outputs` -> [n_i] for each rollout."""
        batches = self._microbatches(rollouts, range(len(rollouts)))
        outputs = self.learner.evaluate(batches, of, want)

        def field(name: str) -> list[Tensor]:
            return split([(b.rollout, getattr(o, name)) for b, o in zip(batches, outputs, strict=True)], len(rollouts))

        return {name: field(name) for name in ("logp", *want)}

    def _microbatches(self, rollouts: Sequence[Rollout], index: Sequence[int]) -> list[Batch]:
        parts = [rollouts[i].transcripts for i in index]
        device = self.learner.device
        return [
            collate([parts[i] for i in chosen], [index[i] for i in chosen], device)
            for chosen in split_microbatches(parts, self.size.tokens_per_microbatch)
        ]

    # -- updates -------------------------------------------------------------------------------------------------------

    def _updates(self, number: int, credited: Credited) -> list[Callable[[], list[Batch]]]:
        """One thunk per optimizer update."""
        chosen = self._replayed(number, credited) if self.memory is not None else self._shuffled(number, credited)
        coefficients = dict(self.coefficients)
        # While a critic warms up the policy stands still, its text included.
        pretraining = self.algorithm.pretraining if coefficients.get("policy", 1.0) else None

        def build(place: int, part: Credited) -> list[Batch]:
            # The first update is on policy: the old log-probabilities are the current ones.
            batches = self._weighted(part, coefficients, fresh=place == 0)
            return [*batches, *self._texts(pretraining, number, place)] if pretraining else batches

        return [partial(build, place, part) for place, part in enumerate(chosen)]

    def _shuffled(self, number: int, credited: Credited) -> list[Credited]:
        """What each update learns from: every rollout once per epoch. Groups stay whole, so their prompts are shared."""
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
        """What each update learns from: drawn from memory, as many rollouts as a minibatch of the step has."""
        assert self.memory is not None
        self.memory.extend(credited.rollouts, credited.per_token["advantage"])
        row, remembered = self.algorithm, len(self.memory.rollouts)
        size = min(remembered, -(-self.size.prompts * self.size.group // row.minibatches))
        chosen = []
        for update in range(row.epochs * row.minibatches if remembered else 0):
            rows = order(remembered, update, seed_of(self.seed, "replay", number))[:size]
            rollouts = [self.memory.rollouts[i] for i in sorted(rows)]
            fields = {"advantage": [self.memory.advantages[i] for i in sorted(rows)]}
            if row.needs_reference:
                fields["ref_logp"] = self._evaluate(rollouts, of="reference")["logp"]
            chosen.append(Credited(rollouts, scoreboard(rollouts, correct=self.correct), fields))
        return chosen

    def _weighted(self, part: Credited, coefficients: dict[str, float], fresh: bool) -> list[Batch]:
        """The micro-batches of one update, their weights from the scoreboard of exactly these rollouts.

        Rollouts with advantage 0 have a gradient of 0 when nothing but the advantage moves a token: then they are not
        even fed. They still count in every denominator.
        """
        row = self.algorithm
        weight = row.aggregate(part.scores)
        fields = {name: values for name, values in part.per_token.items() if not (fresh and name == "old_logp")}
        imitate = None
        if row.imitation is not None:
            assert part.scores.correct is not None
            learned = (part.scores.length * part.scores.correct).sum().clamp_min(1.0)
            imitate = row.imitation.coefficient * part.scores.correct / learned
        fed = range(len(part.rollouts))
        chosen = list(fed) if row.moves_every_token else [i for i in fed if bool(part.per_token["advantage"][i].any())]
        batches = []
        for batch in self._microbatches(part.rollouts, chosen):
            device = batch.weight.device
            here = batch.rollout.unique_consecutive().tolist()
            tokens: dict[str, Any] = {
                n: torch.cat([values[i] for i in here]).to(device) for n, values in fields.items()
            }
            if imitate is not None:
                tokens["imitate"] = imitate.to(device)[batch.rollout]
            shares = weight.to(device)[batch.rollout]
            batches.append(replace(batch, weight=shares, coefficients=coefficients, **tokens))
        return batches

    def _texts(self, pretraining: Pretraining, number: int, place: int) -> list[Batch]:
        """Micro-batches of the pretraining texts of one update, each token weighing coefficient / tokens."""
        updates = self.algorithm.epochs * self.algorithm.minibatches
        first = ((number - 1) * updates + place) * pretraining.rows
        places = [divmod(p, len(self.texts)) for p in range(first, first + pretraining.rows)]
        permutation = {epoch: order(len(self.texts), epoch, self.seed) for epoch in {e for e, _ in places}}
        chosen = [[self.texts[permutation[epoch][i]]] for epoch, i in places]
        share = pretraining.coefficient / sum(t.n_sampled for (t,) in chosen)
        batches = [
            collate([chosen[i] for i in index], index, self.learner.device)
            for index in split_microbatches(chosen, self.size.tokens_per_microbatch)
        ]
        return [replace(b, weight=torch.full_like(b.weight, share), sampler_logp=None) for b in batches]


def split(parts: Sequence[tuple[Tensor, Tensor]], count: int) -> list[Tensor]:
    """Per-token values of micro-batches [(rollout [N], value [N])] -> one tensor [n_i] per rollout."""
    out: list[Tensor] = [torch.zeros(0)] * count
    for rollout, value in parts:
        rows, sizes = rollout.unique_consecutive(return_counts=True)
        for row, piece in zip(rows.tolist(), value.split(sizes.tolist()), strict=True):
            out[row] = piece
    return out
