"""Builds the engine that searches for replies, from the options of a verb."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.config.search_options import steps_of_search
from posttrain.config.service_options import process_model
from posttrain.core.protocols import Engine, Model
from posttrain.core.reply_steps import LINE, REPLY, expression_of
from posttrain.core.types import Invalid
from posttrain.engines.search.critic_value import CriticValue
from posttrain.engines.search.search_engine import SearchEngine, SearchPlan, SearchRecord
from posttrain.engines.search.self_verification import SelfVerifier
from posttrain.engines.search.tree_search import SearchSettings
from posttrain.envs.play.service_client import Services
from posttrain.envs.step_rewards import StepScorer
from posttrain.models.critic import stored_critic
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.terminal.notices import warn

LARGE = 2**16  # sampled tokens per reply from which a search is warned of: 16 times those of the default options


FEW_WHOLE = 0.9  # share of whole replies below which the budget of a search is said to be small


def warn_large_search(config: Any) -> None:
    """Warn about a search that may sample very many tokens for each reply."""
    per_reply = config.search_width * config.search_proposals * config.max_tokens
    tokens = per_reply if config.search_tokens is None else config.search_tokens
    if config.search and tokens >= LARGE:
        asked = "" if config.search_tokens is not None else " (--search-width x --search-proposals x --max-tokens)"
        warn(
            f"--search {' '.join(config.search)} may sample {tokens:,} tokens for each reply{asked}: --search-tokens "
            "sets the budget"
        )


@dataclass
class SearchTotals:
    """The results of the searches of one name, over all replies."""

    replies: int = 0
    whole: int = 0  # replies of searches that found a whole one
    tokens: int = 0
    value: float = 0.0
    rewards: list[float] = field(default_factory=list)  # valid ones

    def add(self, course: SearchRecord, reward: float | Invalid | None) -> None:
        """Add a reply, with the reward of its environment if there is one."""
        self.replies += 1
        self.whole += course.finished > 0
        self.tokens += course.spent
        self.value += course.value
        self.rewards += [reward] if isinstance(reward, int | float) else []

    def lines(self, name: str) -> list[str]:
        """Describe them in a line, with another one if many searches ended before a reply did."""
        n = self.replies
        earned = f", reward {math.fsum(self.rewards) / len(self.rewards):.3f}" if self.rewards else ""
        found = [
            f"{name:<11} {self.whole} of {n} replies whole, {self.tokens / n:,.0f} tokens sampled for each, "
            f"value {self.value / n:.3f}{earned}"
        ]
        if self.whole < FEW_WHOLE * n:
            found.append(
                f"--search-tokens ended {n - self.whole} of {n} searches of {name} before a whole reply: raise it"
            )
        return found


def searching(
    config: Any, name: str, engine: Engine, folder: Path, model: Model, tokenizer: Tokenizer, services: Services
) -> SearchEngine:
    """Return an engine that finds replies by the search of this name, with steps that `engine` samples. `folder`: the
    checkpoint of the model.
    """
    delimiter, aggregate = steps_of_search(config)
    expression = "" if expression_of(delimiter) is None else delimiter
    settings = SearchSettings(
        config.search_width,
        config.search_proposals,
        lookahead=config.search_lookahead,
        exploration=config.search_exploration,
    )
    plan = SearchPlan(
        name,
        settings,
        config.search_tokens,
        "\n" if delimiter == LINE else "" if expression or delimiter == REPLY else delimiter,
        expression,
        "best" if config.choose == "verified" else config.choose,
    )
    verifier = SelfVerifier(model, tokenizer, config.verify_question) if config.choose == "verified" else None
    scorer = critic = None
    if config.search_value == "critic":
        critic = CriticValue(stored_critic(folder, model), model)
    elif config.reward_model:
        scorer = StepScorer(services, process_model(config), delimiter, aggregate)
    return SearchEngine(engine, tokenizer, model.eos_ids, model.config.context, plan, scorer, verifier, critic)
