"""Scores replies, or compares two of them, by a reward model, a judge or a function: for labels and for evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import fsum
from typing import Any

import torch

from posttrain.config.inference import Evaluation
from posttrain.config.service_options import ScorerOption
from posttrain.config.shared_options import EnvWorkerGroup
from posttrain.core.intervals import mean_interval, stated
from posttrain.core.rollouts import Rollout
from posttrain.core.types import Invalid, Reply, Task, UserError
from posttrain.envs.play.env_outputs import Done
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.service_client import Services
from posttrain.envs.score_replies import compare, score
from posttrain.training.model_comparison import preferences, verdicts_of_rates, win_rate
from posttrain.training.playground import open_services, service_counts
from posttrain.training.rollout_figures import paired


class ReplyScorer:
    """A service or a function that scores replies; a pairwise judge compares two."""

    def __init__(
        self,
        chosen: ScorerOption,
        config: EnvWorkerGroup,
        device: torch.device,
        opened: ExitStack,
        env: Callable[..., Any] | None = None,
    ) -> None:
        """Open the service or the environment, which `opened` closes. `config`: the limits of a function; `env`: a function
        in place of the option. Raises UserError for a service that cannot be opened.
        """
        self.services: Services = opened.enter_context(open_services(chosen, device))
        judge = self.services.named.get("judge")
        self.pairwise = judge is not None and getattr(getattr(judge, "recipe", None), "kind", "") == "pairwise"
        limits = 0 if chosen.service else config.env_workers, config.env_timeout, config.env_memory
        self._pool = None if self.pairwise else opened.enter_context(EnvPool(env or chosen.env, *limits))

    def score(self, replies: Sequence[tuple[Task, Reply]]) -> list[Done]:
        """Return the result of each (task, reply), in their order. Replies to the same task object are a group."""
        assert self._pool is not None, "a pairwise judge scores no single reply"
        return score(self._pool, self.services, replies)

    def compare(self, pairs: Sequence[tuple[Task, str, str]]) -> list[Any]:
        """Return the pairwise judge's answer to each (task, first reply, second reply), in their order: 1, 0.5, 0, a dict
        of criteria with "reward", or Invalid. Each is asked in both orders.
        """
        return compare(self.services, "judge", [_question(*pair) for pair in pairs])


@dataclass(frozen=True)
class ScorerResults:
    """Results of `--scorer` for the rollouts of an evaluation."""

    scores: list[list[float | Invalid]]  # by model: of each rollout; of a pairwise judge []
    win_rates: list[dict[str, Any]]  # by model of --against: see `win_rate`; {}: no valid comparison
    counts: dict[str, dict[str, float]] = field(default_factory=dict)  # of its service: see `service_counts`

    def figures(self, place: int, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """Return the mean score of a model's rollouts, each task counted once: {"score": {"mean": ...}}."""
        by_task: dict[str, list[float]] = {}
        for rollout, own in zip(rollouts, self.scores[place], strict=True) if self.scores else ():
            if not isinstance(own, Invalid):
                by_task.setdefault(rollout.group, []).append(own)
        means = [fsum(scores) / len(scores) for scores in by_task.values()]
        return {"score": stated(fsum(means) / len(means), mean_interval(means), tasks=len(means))} if means else {}


class RolloutScorer:
    """The scorer of an evaluation. It reads whole episodes: the task's prompt or messages, or else the first prompt that
    the environment showed, and the sampled text of all turns.
    """

    def __init__(self, config: Evaluation, device: torch.device, opened: ExitStack) -> None:
        """Open what `--scorer` names, which `opened` closes. Raises UserError if it cannot be opened or has no use."""
        self._config = config
        self._scorer = ReplyScorer(ScorerOption(config.scorer), config, device, opened)
        if self._scorer.pairwise and (config.best or not config.against):
            way = "leave out --best" if config.best else "add --against"
            raise UserError(f"--scorer {config.scorer} compares two replies: {way}, or give a judge that scores")

    def results(self, every: Sequence[Sequence[Rollout]], say: Callable[[str], None]) -> ScorerResults:
        """Score the rollouts of every model, and compare those of the first with each of the others."""
        scores = [] if self._scorer.pairwise else [self._scores(rollouts) for rollouts in every]
        for model, own in zip((self._config.model, *self._config.against), scores, strict=False):
            _note_invalid(own, f"scores of {model}", say)
        rates, compared = [], list[list[float | Invalid]]()
        for model, (place, other) in zip(self._config.against, enumerate(every[1:], 1), strict=True):
            pairs = paired(every[0], other)
            if scores:
                preferred = preferences([scores[0][i] for i, _ in pairs], [scores[place][j] for _, j in pairs])
            else:
                preferred = self._preferences([(every[0][i], other[j]) for i, j in pairs])
                _note_invalid(preferred, f"comparisons with {model}", say)
            compared.append(preferred)
            rates.append(win_rate([every[0][i].task["id"] for i, _ in pairs], preferred))
        _refuse_without_scores(scores or compared, self._config.scorer)
        counts = {f"--scorer {name}": own for name, own in service_counts(self._scorer.services).items()}
        return ScorerResults(scores, verdicts_of_rates(rates), counts)

    def _scores(self, rollouts: Sequence[Rollout]) -> list[float | Invalid]:
        tasks: dict[str, Task] = {}  # one object for a task, whose replies are a group
        asked = [(tasks.setdefault(r.group, _shown(r)), Reply(r.text, r.stop)) for r in rollouts]
        return [done.reward for done in self._scorer.score(asked)]

    def _preferences(self, pairs: Sequence[tuple[Rollout, Rollout]]) -> list[float | Invalid]:
        """Return the pairwise judge's preferences. Equal replies are a tie without a question."""
        different = [place for place, (own, other) in enumerate(pairs) if own.text != other.text]
        asked = [(_shown(own), own.text, other.text) for own, other in (pairs[place] for place in different)]
        found: list[float | Invalid] = [0.5] * len(pairs)
        for place, answer in zip(different, self._scorer.compare(asked), strict=True):
            value = answer["reward"] if isinstance(answer, Mapping) else answer
            [found[place]] = preferences([value], [0.5])
        return found


def _note_invalid(values: Sequence[float | Invalid], what: str, say: Callable[[str], None]) -> None:
    reasons = [value.reason for value in values if isinstance(value, Invalid)]
    if reasons:
        say(f"{len(reasons)} of {len(values)} {what} by --scorer are left out as invalid; the first: {reasons[0]}")


def _refuse_without_scores(every: Sequence[Sequence[float | Invalid]], scorer: str) -> None:
    """Raise UserError if the scorer failed on everything."""
    values = [value for own in every for value in own]
    reasons = [value.reason for value in values if isinstance(value, Invalid)]
    if values and len(reasons) == len(values):
        raise UserError(f"no score of --scorer {scorer} is valid: correct it, or leave it out; the first: {reasons[0]}")


def _shown(rollout: Rollout) -> Task:
    """Return the task with a prompt: its own, or the first one of the episode."""
    task = rollout.task
    if task.get("messages") is not None or isinstance(task.get("prompt"), str):
        return task
    return {**task, "prompt": rollout.asked or rollout.prompt}


def _question(task: Task, first: str, second: str) -> dict[str, object]:
    asked = {"prompt": task["prompt"]} if task.get("messages") is None else {"messages": task["messages"]}
    return {**asked, "responses": [first, second]}
