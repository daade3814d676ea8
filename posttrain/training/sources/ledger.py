"""Ledger of a step's rollouts: the fate of each with its reason, and the recorded values of its tokens.

The counts of a step's fates add up to the rollouts that it sampled. Further flags:

moved by KL, entropy, critic, teacher, imitation, action values    no token of it has an advantage, and this moved it
bounds the step                  likewise, and a trust region measures its KL there
critic warm-up                   the policy did not move, and only the critic was trained on it
update skipped                   an update with it moved nothing, because its gradient was not finite

n_i    scored tokens of rollout i    S    rollouts of an optimizer batch
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.algorithms.earned_rewards import equal_rewards
from posttrain.algorithms.filters import OverlongFilter
from posttrain.algorithms.policy import Algorithm
from posttrain.core.protocols import Learner
from posttrain.core.rollouts import Fate, Outcome, Rollout
from posttrain.core.token_probe import TokenSink
from posttrain.training.sources.credit_assignment import Credited
from posttrain.training.sources.model_outputs import evaluate_rollouts
from posttrain.training.sources.scoreboard import Dropped
from posttrain.training.sources.token_recording import TokenRecording, on_cpu

if TYPE_CHECKING:
    from numpy.typing import NDArray

SKIPPED, WARMING = "update skipped", "critic warm-up"
OF_CREDIT = {
    "old_logp": "before",
    "ref_logp": "reference",
    "teacher_logp": "teacher",
    "value": "value",
    "returns": "returns",
}
"""Field of a `Batch` -> the record's column."""


@dataclass(slots=True)
class _Account:
    """The ledger's entry of one rollout."""

    rollout: Rollout
    fate: Fate = Fate.UNSELECTED
    why: str = "no update drew it"
    advantage: float | None = None
    moved: bool = False  # whether any of its tokens has an advantage
    shaping: float = 0.0
    penalty: float = 0.0
    replayed: bool = False
    flags: dict[str, None] = field(default_factory=dict)  # in order of arrival
    updates: list[int] = field(default_factory=list)  # numbers of the updates with it, from 1 on
    skipped: int = 0  # number of these that were skipped
    numbers: dict[str, NDArray[Any]] = field(default_factory=dict)

    def outcome(self, updates: int) -> Outcome:
        fate, why = (Fate.TRAINED, self._learned(updates)) if self.updates else (self.fate, self.why)
        told = fate, why, tuple(self.flags), self.shaping, self.penalty, self.replayed
        numbers = dict(self.numbers)
        # computed by the weights at the step's start, so the values are the same
        if self.updates == [1] and "learner" in numbers:
            numbers.pop("before", None)
        return Outcome(self.rollout, self.advantage, *told, numbers=numbers)

    def _learned(self, updates: int) -> str:
        said = [str(number) for number in self.updates]
        told = f"in update{'s' if len(said) > 1 else ''} {', '.join(said)} of {updates}" if updates > 1 else ""
        if not self.skipped:
            return told
        many = (
            f"{self.skipped} of them were" if self.skipped > 1 else "which was" if len(said) == 1 else "one of them was"
        )
        return f"{told}, {many} skipped" if told else "its update was skipped"


@dataclass(frozen=True)
class _Update:
    """An update with the entries of its rollouts, by their places in its batches."""

    sink: TokenSink
    accounts: Mapping[int, _Account]


class Ledger:
    """Ledger of the rollouts of one step."""

    def __init__(
        self,
        algorithm: Algorithm,
        number: int,
        played: Sequence[Rollout],
        dropped: Iterable[Dropped],
        recording: TokenRecording,
    ) -> None:
        """`dropped`: rollouts that were dropped before credit assignment."""
        self.algorithm, self.number, self.recording = algorithm, number, recording
        # by id(), since two rollouts may be equal; in the order of the rollouts
        self._accounts = {id(rollout): _Account(rollout) for rollout in played}
        for rollout, fate, why in dropped:
            self.leave([rollout], fate, why)
        self._chosen: frozenset[str] = frozenset()
        self._updates: list[_Update] = []
        self._credited: Credited | None = None

    def leave(self, rollouts: Iterable[Rollout], fate: Fate, why: str) -> None:
        for rollout in rollouts:
            account = self._account(rollout)
            account.fate, account.why = fate, why

    def leave_filtered(self, rollouts: Iterable[Rollout], by: OverlongFilter) -> None:
        for rollout in rollouts:
            self.leave([rollout], Fate.FILTERED, by.why(rollout.n_sampled, str(rollout.stop)))

    # -- before the updates --------------------------------------------------------------------------------------------

    def credit(self, credited: Credited) -> None:
        """Record the advantages of the remaining rollouts."""
        if not credited.rollouts:
            return
        self._credited = credited
        scores = credited.scores
        equal, reward = equal_rewards(scores).tolist(), scores.reward.tolist()
        sizes = scores.group.bincount()[scores.group].tolist()
        added = None if credited.shaping is None else credited.shaping.tolist()
        means, moved = credited.advantages()
        for i, rollout in enumerate(credited.rollouts):
            account = self._account(rollout)
            account.advantage, account.moved = means[i], moved[i]
            account.shaping = 0.0 if added is None else added[i]
            account.penalty = scores.penalty[i].double().sum().item() if scores.penalty else 0.0
            if moved[i]:
                continue
            if equal[i] and sizes[i] > 1:
                account.fate, account.why = Fate.EQUAL, f"all rewards of its group are {reward[i]:g}"
            elif credited.selected and not credited.selected[i].any():
                account.why = "none of its tokens was selected"
            else:
                account.why = "its advantage is 0"

    def choose(self, parts: Sequence[Credited]) -> None:
        """Draw the groups whose token values are recorded, once the rollouts of each update are known."""
        again = [self._enter(part) for part in parts]
        drawn = [self._account(rollout) for part in parts for rollout in part.rollouts]
        # only groups that move, if not all are recorded: the others show little
        full = self.recording.level == "full"
        groups = {a.rollout.group for a in drawn if full or a.moved or self.algorithm.moves_every_token}
        if full and self._credited is not None:
            groups |= {rollout.group for rollout in self._credited.rollouts}
        self._chosen = self.recording.chosen(self.number, groups)
        if self._credited is not None:
            self._note(self._credited, range(len(self._credited.rollouts)))
        for part, rows in zip(parts, again, strict=True):
            self._note(part, rows)

    def _enter(self, part: Credited) -> list[int]:
        """Add entries for rollouts of earlier steps that this update drew; return their places in the part.

        Their tasks are left out, as a resumed run does not have them and has to record the same.
        """
        again = [i for i, rollout in enumerate(part.rollouts) if id(rollout) not in self._accounts]
        means, moved = part.advantages() if again else ([], [])
        for i in again:
            rollout = part.rollouts[i]
            known = replace(rollout, task={"id": rollout.group.rpartition("#")[0]}, seconds=0.0)
            self._accounts[id(rollout)] = _Account(known, advantage=means[i], moved=moved[i], replayed=True)
        return again

    def _note(self, credited: Credited, rows: Iterable[int]) -> None:
        """Record the values of these rollouts' tokens that are known before the updates."""
        chosen = [i for i in rows if credited.rollouts[i].group in self._chosen]
        columns = {OF_CREDIT[name]: values for name, values in credited.per_token.items() if name in OF_CREDIT}
        views = {"before": credited.views.get("old"), "reference": credited.views.get("reference")}
        columns |= {name: values for name, values in views.items() if values is not None}
        columns["token_advantage"] = credited.per_token["advantage"]
        for name, values in columns.items():
            for i, own in zip(chosen, on_cpu([values[i] for i in chosen]), strict=True):
                if name != "token_advantage" or (own != own[:1]).any():
                    self._account(credited.rollouts[i]).numbers[name] = own
        for i in chosen if credited.selected else ():
            self._account(credited.rollouts[i]).numbers["kept"] = credited.selected[i].numpy()

    def _account(self, rollout: Rollout) -> _Account:
        return self._accounts[id(rollout)]

    # -- the updates ---------------------------------------------------------------------------------------------------

    def feed(self, part: Credited, fed: Sequence[int], coefficients: Mapping[str, float], routers: bool) -> TokenSink:
        """Record the rollouts of the next update, by their places in `part`; return the sink for the values that it
        computes.

        `routers`: whether the learner adds losses of routers.
        """
        accounts = {i: self._account(part.rollouts[i]) for i in fed}
        number, warming = len(self._updates) + 1, coefficients.get("policy", 1.0) == 0
        for i, account in accounts.items():
            account.updates.append(number)
            if not account.moved or warming:
                flags = [WARMING] if warming else self._flags(part, i, coefficients)
                account.flags |= dict.fromkeys([*flags, *["moved by routers"] * routers])
        sink = TokenSink(frozenset(i for i in fed if part.rollouts[i].group in self._chosen))
        self._updates.append(_Update(sink, accounts))
        return sink

    def _flags(self, part: Credited, i: int, coefficients: Mapping[str, float]) -> list[str]:
        """Return the flags of a rollout without an advantage: the other terms that move its tokens."""
        algorithm, success = self.algorithm, part.scores.success
        critic = ["moved by critic"] if algorithm.critic is not None else []
        penalised = (
            algorithm.kl is not None and algorithm.kl.where == "loss" and coefficients.get("kl", algorithm.kl.beta)
        )
        bonus = algorithm.widens and coefficients["entropy"]
        imitated = algorithm.imitation is not None and success is not None and bool(success[i])
        said = {
            "moved by KL": penalised,
            "held near the old policy": "held" in part.per_token and bool(part.per_token["held"][i].any()),
            "moved by entropy": bonus,
            "moved by teacher": algorithm.teacher,
            "moved by imitation": imitated,
            "moved by action values": algorithm.surrogate.wants,
            "bounds the step": algorithm.trust_region,
        }
        return [*(name for name, there in said.items() if there), *critic]

    # -- behind them ---------------------------------------------------------------------------------------------------

    def settle(self, learner: Learner, tokens_per_microbatch: int) -> None:
        """Collect the values of the updates, once all are done."""
        for update in self._updates:
            found = update.sink.settle()
            for place, account in update.accounts.items():
                if update.sink.skipped:
                    account.skipped += 1
                    account.flags[SKIPPED] = None
                columns = found.get(place, {})
                for name, values in columns.items():
                    if name != "weight":
                        account.numbers[name] = values
                    elif not update.sink.skipped:  # a skipped update moves nothing
                        account.numbers[name] = account.numbers.get(name, np.zeros_like(values)) + values
        if self.recording.after:
            self._look_again(learner, tokens_per_microbatch)

    def _look_again(self, learner: Learner, tokens_per_microbatch: int) -> None:
        """Compute log-probabilities under the weights at the step's end, in one forward pass."""
        chosen = [a for a in self._accounts.values() if a.rollout.group in self._chosen and a.advantage is not None]
        if chosen:
            seen = evaluate_rollouts(learner, [a.rollout for a in chosen], tokens_per_microbatch)["logp"]
            for account, values in zip(chosen, on_cpu(seen), strict=True):
                account.numbers["after"] = values

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of all sampled rollouts in their order, followed by replayed ones that an update
        trained.
        """
        accounts = self._accounts.values()
        return [a.outcome(len(self._updates)) for a in accounts if not a.replayed or a.updates]
