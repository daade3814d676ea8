"""Options of the search for replies at inference."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from posttrain.config.option_groups import OptionGroup
from posttrain.config.service_options import check_delimiter, process_model
from posttrain.config.shared_options import ServiceGroup
from posttrain.core.component import option
from posttrain.core.messages import dashed
from posttrain.core.reply_steps import LINE, SPANS, Aggregate
from posttrain.core.types import UserError


@dataclass(frozen=True)
class SearchGroup(OptionGroup, group="search"):
    """The search for a reply, step by step."""

    search: tuple[Literal["best-of-n", "beam", "best-first", "lookahead", "mcts"], ...] = ()
    """Search for each reply: the policy proposes steps, and a process reward model (--reward-model), or its own critic
    (--search-value critic), chooses among them.
    best-of-n: whole replies. beam: continues the best partial replies. best-first: continues the best one. lookahead: a
    beam that values steps by greedy rollouts. mcts: PUCT. Of several searches, each finds --samples replies."""
    search_value: Literal["reward-model", "critic"] = "reward-model"
    """Value of a partial reply: that of --reward-model, or the return that the critic of the policy's own run expects
    from there on. Such a run is one of ppo, for example."""
    search_width: int = option(4, above=0, most=1024)
    """Number of partial replies that a beam keeps, or of whole replies after which best-first ends. mcts reads it only
    for the default of --search-tokens."""
    search_proposals: int = option(4, above=0, most=1024)
    """Steps that are proposed after each partial reply. best-of-n samples --search-width times as many whole replies."""
    search_tokens: int | None = option(None, above=0)
    """Budget of sampled tokens per reply, those of discarded steps and rollouts included. Default: the most that
    best-of-n can take."""
    search_lookahead: int = option(1, above=0)
    """Number of steps in a rollout of --search lookahead."""
    search_exploration: float = option(1.25, least=0)
    """The constant c of PUCT, for --search mcts: higher values visit more partial replies."""
    choose: Literal["best", "majority", "weighted", "verified"] = "best"
    """Choice among the whole replies that a search has found: the highest value (best), the most frequent final answer
    (majority), the answer with the highest sum of values (weighted), or the highest probability of yes when the policy
    is asked whether its reply is right (verified). best-of-n with majority or verified needs no reward model."""
    verify_question: str = option("Is the answer correct (Yes/No)?", value="TEXT")
    """Question for --choose verified: a user message after the reply, or after a prompt without messages a line of its
    own. The verdict is Yes or No."""


@dataclass(frozen=True)
class SearchedGroup(SearchGroup, ServiceGroup, group="search"):
    """A search, and the services beside it. Its reward model is no environment."""

    step_delimiter: str = option("line", value="TEXT")
    """Text at which a step ends; or line, or a regular expression between slashes: "/(?=Step [0-9])/"; reply: the reply
    is one step."""
    step_aggregate: Aggregate = "last"
    """Value of a partial reply, from the probabilities of its steps: last if the reward model predicts whether the
    reply will be right; min or product if it predicts whether the step is right."""

    def __post_init__(self) -> None:
        if not self.search:
            super().__post_init__()


def steps_of_search(config: Any) -> tuple[str, Aggregate]:
    """Return (delimiter, aggregate) of the steps of a search: lines, and the value of the last one, unless given."""
    aggregate: Literal["none", Aggregate] = config.step_aggregate
    return config.step_delimiter or LINE, "last" if aggregate == "none" else aggregate


def check_search(config: Any, env: str | None, temperatures: Sequence[float], top_k: int) -> None:
    """Raise UserError, in one line, for options of a search that contradict each other or have no effect."""
    own = {f.name for f in fields(SearchGroup)} | set(OF_STEPS if isinstance(config, SearchedGroup) else ())
    for name in (f.name for f in fields(config) if getattr(config, f.name) != f.default):
        option, wanted = dashed(name), OF_SOME.get(name, ())
        if name in own and name != "search" and not (set(wanted or config.search) & set(config.search)):
            raise UserError(
                f"{option} has no effect without --search {' or '.join(wanted)}".rstrip() + ": leave it out"
            )
        if name in OF_REWARDS and config.search:
            raise UserError(f"{option} has no effect with --search, which gives no step rewards: leave it out")
    if not config.search:
        return
    if config.choose != "verified" and config.verify_question != SearchGroup.verify_question:
        raise UserError("--verify-question has no effect without --choose verified: leave it out")
    if config.step_delimiter == SPANS:
        raise UserError("--search needs a --step-delimiter in the text: line, a text, a regular expression, or reply")
    check_delimiter(steps_of_search(config)[0])
    if config.search_value == "critic":
        _check_critic(config, env)
    elif config.reward_model:
        process_model(config)
    elif config.search != ("best-of-n",) or config.choose not in ("majority", "verified"):
        raise UserError(
            "--search needs what scores steps: --reward-model FOLDER, or --search-value critic for a run with a critic"
        )
    elif given := [f.name for f in fields(config) if f.name in OF_STEPS and getattr(config, f.name) != f.default]:
        raise UserError(f"{dashed(given[0])} has no effect without --reward-model: leave it out")
    if not env and (config.judge or len(config.reward_model) > 1):
        other = "--judge" if config.judge else "a second --reward-model"
        raise UserError(
            f"{other} has no effect with --search and without --env: leave it out, or add an --env that asks it"
        )
    check_proposals(config, "--", temperatures, top_k)


def _check_critic(config: Any, env: str | None) -> None:
    """Raise UserError for options that do not go with the critic as value."""
    if config.reward_model and not env:
        raise UserError("--reward-model has no effect with --search-value critic and without --env: leave it out")
    if config.step_aggregate != "last" and config.step_aggregate != "none":
        raise UserError(
            "--step-aggregate has no effect with --search-value critic, one value of all steps: leave it out"
        )
    if config.choose == "weighted":
        raise UserError(
            "--choose weighted adds up probabilities, and a critic gives returns, which may be negative: use --choose "
            "majority or best"
        )


def check_proposals(config: SearchGroup, where: str, temperatures: Sequence[float], top_k: int) -> None:
    """Raise UserError for a search among steps that are all the same. `where`: "--", or "--kinds.NAME."."""
    same = f"{where}temperature 0" if 0 in temperatures else f"{where}top-k 1" if top_k == 1 else ""
    if same and config.search and config.search_width * config.search_proposals > 1:
        raise UserError(
            f"{same} proposes the same step each time: raise it, or give --search-width 1 and --search-proposals 1"
        )


OF_STEPS = ("step_delimiter", "step_aggregate")
"""Options that a search shares with step rewards."""
OF_REWARDS = ("step_rewards", "step_weight", "step_score")
"""Options that only step rewards have."""
OF_SOME = {"search_lookahead": ("lookahead",), "search_exploration": ("mcts",)}
"""Option -> the searches that it applies to."""
