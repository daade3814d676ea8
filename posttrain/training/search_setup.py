"""Builds the engine that searches for replies, from the options of a verb."""

from __future__ import annotations

import re

from posttrain.config.search_options import SearchedGroup
from posttrain.config.service_options import process_model
from posttrain.core.protocols import Engine, Model
from posttrain.engines.search.search_engine import SearchEngine, SearchPlan
from posttrain.engines.search.tree_search import SearchSettings
from posttrain.envs.play.service_client import Services
from posttrain.envs.step_rewards import LINE, REPLY, StepScorer, delimiter_pattern
from posttrain.models.tokenizer.tokenizer import Tokenizer


def searching(
    config: SearchedGroup, name: str, engine: Engine, model: Model, tokenizer: Tokenizer, services: Services
) -> SearchEngine:
    """Return an engine that finds replies by the search of this name, with steps that `engine` samples."""
    delimiter = config.step_delimiter
    regular = len(delimiter) > 2 and delimiter[0] == delimiter[-1] == "/"
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
        "\n" if delimiter == LINE else "" if regular or delimiter == REPLY else delimiter,
        re.compile(delimiter_pattern(delimiter)) if regular else None,
        config.choose,
    )
    scorer = None
    if config.reward_model:
        scorer = StepScorer(services, process_model(config), delimiter, config.step_aggregate)
    return SearchEngine(engine, tokenizer, model.eos_ids, model.config.context, plan, scorer)
