"""Opens, rehearses and closes the environment and the services of a verb.

Training, evaluation, sampling and chat get the player of a checkpoint from a `Playground`. Errors of an environment, a
reward model or an endpoint are reported here, before anything is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.config.inference import Chat, Check, Evaluation, Sample
from posttrain.config.mixture_options import of_part, parts_of
from posttrain.config.service_options import ScorerOption, named_services, options_of_services, process_model
from posttrain.config.shared_options import StepRewardGroup
from posttrain.config.training import RL, SFT
from posttrain.core.progress import doing
from posttrain.core.protocols import Alone, Engine, World
from posttrain.core.types import Env, Sampling, UserError
from posttrain.data.mixed_tasks import AnyTasks, MixedTasks
from posttrain.envs.builtin import unscored
from posttrain.envs.play.answer_journal import AnswerJournal
from posttrain.envs.play.env_pool import EnvPool, default_workers
from posttrain.envs.play.load_env import about, success_of
from posttrain.envs.play.mixed_pool import MixedPool
from posttrain.envs.play.player import EpisodeLimits, Player, TooLong
from posttrain.envs.play.service_client import Services
from posttrain.envs.play.task_temperature import check_temperatures
from posttrain.envs.preview import Viewer
from posttrain.envs.step_rewards import StepScoring, may_ask, with_step_rewards
from posttrain.models.checkpoint_summary import Outline, outline
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.chat_choice import Chatting, chatting
from posttrain.runs.checkpoint import resolve
from posttrain.runs.terminal.notices import warn
from posttrain.services.judge_recipe import Generative, Recipe, read_recipe
from posttrain.training.role_devices import JUDGES, REWARD_MODELS, refuse_idle_roles, role_device
from posttrain.training.setup import rehearse
from posttrain.training.weight_types import frozen_type

Serving = RL | SFT | Evaluation | Check | Sample | ScorerOption | Chat
"""The options of a command that may open judges, reward models and retrievers."""


@dataclass(frozen=True)
class RehearsedModel:
    """A model that will sample, without its weights."""

    tokenizer: Tokenizer
    chat: Chatting  # its treatment of plain prompts
    lines: Sequence[str]  # its description


@dataclass(frozen=True)
class Playground:
    """The environment and the services of a verb; engines change with checkpoints.

    The limits are those of a `Player`.
    """

    pool: EnvPool | MixedPool
    services: Services
    sampling: Sampling
    bounds: EpisodeLimits = EpisodeLimits()
    about: tuple[str, ...] = ()  # the description of the environment
    models: tuple[RehearsedModel, ...] = ()  # the models that will sample
    world: World = field(default_factory=Alone)  # the processes that share the episodes
    parts: Mapping[str, tuple[Sampling, EpisodeLimits]] = field(default_factory=dict)  # by part of a mixture
    too_long: TooLong = "refuse"
    temperature_column: str = ""

    def player(self, engine: Engine, tokenizer: Tokenizer, context: int) -> Player:
        """Return a player with this engine. `context`: context length of its model in tokens."""
        bounds = context, self.too_long, self.bounds, self.services
        own = self.world, self.parts, self.temperature_column
        return Player(self.pool, engine, tokenizer, self.sampling, *bounds, *own)

    @property
    def lines(self) -> list[str]:
        """Lines that describe the environment and the services."""
        return [*self.about, *(f"{name}: {service.description}" for name, service in self.services.named.items())]


@contextmanager
def open_playground(
    config: RL | Evaluation | Sample,
    env: Callable[..., Any] | None,
    tasks: AnyTasks,
    device: torch.device,
    folder: Path | None = None,
    resumed: bool = False,
    models: Sequence[Path] = (),
    world: World | None = None,
) -> Iterator[Playground]:
    """Open the playground of a verb, as a context manager.

    `env`: the environment, if it is given as an object; `folder`: of the run; `models`: folders of the models that will
    sample, of which only tokenizers and configurations are loaded. Raises UserError for a service that cannot be
    opened, or an environment that cannot start.
    """
    parts = parts_of(config) if isinstance(config, RL) else {}
    refuse_unused_services(config, [played_env(own, env) for own in parts.values() or (config,) if env or own.env])
    with ExitStack() as opened:
        services = opened.enter_context(open_services(config, device, resumed))
        if folder is not None and services:
            services.journal = AnswerJournal(folder, resumed, world.rank if world else 0)
        limits = config.env_workers, config.env_timeout, config.env_memory
        if isinstance(config, Sample) and not (env or config.env):
            env, limits = unscored.reward, (0, *limits[1:])
        column = "" if isinstance(config, Sample) else config.temperature_column
        if column:
            check_temperatures(tasks, column, trained=isinstance(config, RL))
        doing("trying the environment")
        told = tuple(line for own in parts.values() or (config,) for line in about(env or own.env))
        pool = (
            _pool_of_parts(parts, opened) if parts else opened.enter_context(EnvPool(played_env(config, env), *limits))
        )
        players = tuple(_rehearsed_models(config, models, pool, tasks, services))
        if not players:
            rehearse(pool, tasks, services=services)
        if isinstance(config, Sample):  # its requests set their own sampling
            yield Playground(pool, services, Sampling(), about=told, models=players, too_long=config.too_long)
            return
        own_limits = {name: _limits(own) for name, own in parts.items()}
        yield Playground(
            pool,
            services,
            *_limits(config),
            told,
            players,
            world or Alone(),
            parts=own_limits,
            too_long=config.too_long,
            temperature_column=column,
        )


def _rehearsed_models(
    config: RL | Evaluation | Sample,
    folders: Sequence[Path],
    pool: EnvPool | MixedPool,
    tasks: AnyTasks,
    services: Services,
) -> Iterator[RehearsedModel]:
    """Rehearse a few tasks with each model; yield the models without their weights.

    Among several, one without a chat template is shown messages in that of the first that has one; its plain prompts stay
    bare text unless --chat is given. Raises UserError, which names the model where there are several.
    """
    every = [outline(folder, config.chat_template, config.chat_template_kwargs) for folder in folders]
    found = ((folder, model.tokenizer.chat_template) for folder, model in zip(folders, every, strict=True))
    systems: dict[Path, str | None] = {}
    owner, template = next(((folder, text) for folder, text in found if text is not None), (None, None))
    for place, (folder, known) in enumerate(zip(folders, every, strict=True)):
        tell = None if place else warn  # only the first model warns of errors of tasks
        own, lent = known.tokenizer, known.tokenizer.chat_template is None and template is not None
        if lent and template is not None:
            known = known._replace(tokenizer=own.templated(template, f"the template of {owner}"))
        try:
            beside = folders[0] if place else None
            parts = parts_of(config) if isinstance(config, RL) else {}
            asked = config.chat or any(part.chat for part in parts.values())
            chat = chatting(config, folder, known.tokenizer if asked else own, known.ends, beside, parts)
            model = _rehearsed_model(config, known, chat, pool, tasks, services, tell)
        except UserError as error:
            raise UserError(f"{folder}: {error}" if len(folders) > 1 else str(error)) from None
        systems[folder] = chat.system
        used = chat.on or not pool.single_turn or any(task.get("messages") for task in tasks.examples())
        line = f"without a chat template of its own: messages are shown in that of {owner}"
        yield replace(model, lines=[*model.lines, line]) if lent and used else model
    if len(set(systems.values())) > 1:
        each = "; ".join(
            f"{folder} {'no system message' if own is None else repr(own)}" for folder, own in systems.items()
        )
        warn(f"the models read different prompts ({each}): --system TEXT gives all the same one, with --chat if needed")


def _rehearsed_model(
    config: RL | Evaluation | Sample,
    known: Outline,
    chat: Chatting,
    pool: EnvPool | MixedPool,
    tasks: AnyTasks,
    services: Services,
    tell: Callable[[str], None] | None,
) -> RehearsedModel:
    """Rehearse a few tasks; return the model without its weights. `tell`: prints warnings."""
    given, own = (config.mixture, parts_of(config)) if isinstance(config, RL) else ({}, {})
    for part in tasks.each() if isinstance(tasks, MixedTasks) else (tasks,):
        names = given.keys() & part.parts if isinstance(part, MixedTasks) else ()
        try:
            shown = rehearse(pool, chat.of(part), tell or (lambda text: None), services, viewer_of(known))
        except UserError as error:
            if not names:
                raise
            [name] = names
            more = "" if "env" in given[name] else f"; or give this part its own --mixture.{name}.env"
            raise of_part(name, error, more) from error
        for name in names:
            asked = own[name].chat if "chat" in given[name] else None
            chat.check(asked, shown, f"--mixture.{name}.chat")
    chat.check(config.chat, shown)
    return RehearsedModel(known.tokenizer, chat, chat.lines(tasks, shown))


def viewer_of(model: Outline) -> Viewer:
    """Return a viewer of prompts as this model gets them."""
    end = model.tokenizer.eos_id
    return Viewer(model.tokenizer, model.context, () if end is None else (end,))


def _pool_of_parts(parts: Mapping[str, RL], opened: ExitStack) -> MixedPool:
    """Open the environments of a mixture, among which the worker processes are divided."""
    pools = {}
    for name, own in parts.items():
        workers = default_workers() if own.env_workers is None else own.env_workers
        share = max(1, workers // len(parts)) if workers else 0
        pools[name] = opened.enter_context(EnvPool(played_env(own), share, own.env_timeout, own.env_memory))
    return MixedPool(pools)


def played_env(config: Any, env: Callable[..., Any] | None = None) -> str | Callable[..., Any]:
    """Return the environment of a run: the given one, with step rewards if options request them.

    Raises UserError if step rewards depend on success, and no success threshold is defined.
    """
    own = env or config.env
    if not (isinstance(config, StepRewardGroup) and config.rewards_steps):
        return own
    success = success_of(own, getattr(config, "success", None)) if config.step_rewards == "if-right" else None
    if config.step_rewards == "if-right" and success is None:
        add = "--env, which scores replies" if own == "unscored" else "--success"
        raise UserError(f"--step-rewards if-right needs to know which replies are right: add {add}")
    probability = config.step_score == "probability"
    aggregate = None if config.step_aggregate == "none" else config.step_aggregate
    how = process_model(config), config.step_delimiter, probability, config.step_weight, aggregate, success
    return with_step_rewards(own, StepScoring(*how))


def refuse_unused_services(config: Any, envs: Sequence[str | Callable[..., Any]]) -> None:
    """Raise UserError for a service that neither these environments nor a search can ask."""
    searched = process_model(config) if getattr(config, "search", ()) and config.reward_model else None
    for name, option in options_of_services(config).items():
        if name == searched or any(may_ask(env, name) for env in envs):
            continue
        scores_steps = option.startswith("--reward-model") and isinstance(config, StepRewardGroup)
        use = "" if not scores_steps or config.step_delimiter else "add --step-delimiter line to reward steps, or "
        raise UserError(f"{option} is used by nothing, as --env scores replies by itself: {use}leave it out")


def _limits(config: RL | Evaluation) -> tuple[Sampling, EpisodeLimits]:
    epsilon = config.epsilon_greedy if isinstance(config, RL) else 0.0
    sampling = Sampling(config.temperature, config.top_p, config.top_k, config.max_tokens, config.stop, epsilon=epsilon)
    bounds = config.max_episode_tokens, config.max_turns, config.max_tool_calls, config.episode_timeout
    return sampling, EpisodeLimits(*bounds)


@contextmanager
def open_dialogue(config: Chat, env: Env, device: torch.device) -> Iterator[Playground]:
    """Open the playground of a chat. `env` asks a person, so it runs in this process and is not rehearsed.

    Raises UserError for a service that cannot be opened.
    """
    with open_services(config, device) as services, EnvPool(env, workers=0) as pool:
        yield Playground(pool, services, Sampling(config.temperature, max_tokens=config.max_tokens))


def open_services(config: Serving, device: torch.device, resumed: bool = False) -> Services:
    """Open the services that the options name, and try each once, the cheapest first.

    A resumed run may continue with an endpoint that is down: its journal has the answers up to its interruption.
    """
    services, matrices = Services(), frozen_type(config)
    try:
        recipes = {name: read_recipe(file) for name, file in named_services(getattr(config, "judge", ()), "judge")}
        held = [JUDGES for recipe in recipes.values() if isinstance(recipe, Generative)]
        held += [REWARD_MODELS for _ in getattr(config, "reward_model", ())]
        refuse_idle_roles(config, [REWARD_MODELS, JUDGES], held)
        _ask_endpoints(recipes, services, resumed)
        _open_retrievers(config, services, resumed)
        for name, model in named_services(getattr(config, "reward_model", ()), "reward-model"):
            from posttrain.services.reward_model_service import RewardModelService

            services.named[name] = RewardModelService(
                resolve(model), role_device(config, REWARD_MODELS, device), matrices
            )
        for name, recipe in recipes.items():
            if isinstance(recipe, Generative):
                from posttrain.services.generative_judge import GenerativeJudge

                services.named[name] = GenerativeJudge(recipe, name, role_device(config, JUDGES, device), matrices)
    except BaseException:
        services.close()
        raise
    return services


def _ask_endpoints(recipes: Mapping[str, Recipe | Generative], services: Services, resumed: bool) -> None:
    """Open the judges behind endpoints, and try each once."""
    for name, recipe in recipes.items():
        if isinstance(recipe, Generative):
            continue
        from posttrain.services.judge import Judge  # imports a library for HTTP

        judge = services.named[name] = Judge(recipe, name)
        if (problem := judge.problem()) is not None:
            _warn_or_refuse(problem, resumed)


def _warn_or_refuse(problem: str, resumed: bool) -> None:
    """Warn of a service that is down if a run is resumed; else raise UserError."""
    if not resumed:
        raise UserError(problem)
    warn(f"{problem}; the run continues with the answers so far, and further requests are invalid")


def _open_retrievers(config: Serving, services: Services, resumed: bool) -> None:
    """Open indices, and try each retrieval server once."""
    for name, place in named_services(getattr(config, "retriever", ()), "retriever"):
        from posttrain.services.retriever import RemoteRetriever, retriever

        found = services.named[name] = retriever(place, name)
        if isinstance(found, RemoteRetriever) and (problem := found.problem()) is not None:
            _warn_or_refuse(problem, resumed)


def service_counts(services: Services) -> dict[str, dict[str, float]]:
    """Return the counts of each service since the last call, without zeros: requests, tokens, and the cost by its prices."""
    counts = services.counts()
    return {
        name: {what.removeprefix(f"{name}/"): n for what, n in counts.items() if what.startswith(f"{name}/") and n}
        for name in services.named
    }


def count_lines(counts: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return these counts as text, a line for each service."""
    return [
        f"{name}: " + (", ".join(f"{what} {value:g}" for what, value in own.items()) or "not asked")
        for name, own in counts.items()
    ]
