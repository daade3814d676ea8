"""Assembles a run of `sft`: rows -> demonstrations, a loaded or new model, learner, source, trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import chain, islice

import torch

from posttrain.algorithms.token_weights import FORMULAS
from posttrain.config.mixture_options import parts_of
from posttrain.config.training import SFT
from posttrain.core.progress import doing
from posttrain.core.protocols import Model
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Task, UserError
from posttrain.data.mixed_tasks import AnyTasks
from posttrain.data.tasks import Stream
from posttrain.data.tasks_from_rows import is_script
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.load_env import is_generator_env, load_env
from posttrain.envs.play.service_client import Services
from posttrain.models.checkpoint_summary import outline
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import described
from posttrain.models.tokenizer.custom_template import around, read_template
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.chat_choice import chatting
from posttrain.runs.checkpoint import resolve
from posttrain.runs.run_folder import RunFolder
from posttrain.training.mixtures import rows_of
from posttrain.training.open_learner import new_learner, policy
from posttrain.training.passes import example_recording, must_end, sizes, updates
from posttrain.training.playground import open_services
from posttrain.training.row_warnings import (
    READ_FOR_UNKNOWN,
    texts_of,
    warn_bad_responses,
    warn_unknown_tokens_in_episodes,
    warn_unread,
)
from posttrain.training.setup import (
    end_tokens,
    microbatch_tokens,
    optimization,
    require_chat_template,
    watch_lengths,
)
from posttrain.training.sources.demonstrations import Enact, demonstration_runner, episode_texts
from posttrain.training.sources.sft_source import Demonstrations, LikelihoodObjective, Transcripts
from posttrain.training.text_loss import text_loss
from posttrain.training.training_run import RunContext, RunParts

TEMPLATE_COUNTS = 100  # weight of the chat template's markup, so that the tokenizer has tokens for it
READ_OF_A_STREAM = 10_000  # most tasks of an endless stream to train a tokenizer on
READ_OF_EPISODES = 10_000  # most episodes to run for that
BYTES = 258  # vocabulary of the smallest tokenizer that encodes everything

Play = Callable[[Tokenizer, Sequence[int]], Enact]
"""Function of a tokenizer and the ids that end a reply; returns a function that runs demonstrations."""


def sft(context: RunContext[SFT]) -> RunParts:
    """Train by supervised fine-tuning: maximise the likelihood of demonstrations."""
    config, run, device = context.config, context.run, context.device
    tasks, held_out = rows_of(config, context.rows, need=("prompt", "response"))
    must_end(config, tasks)
    play = _player(run, device, context.resources)
    folder = run.checkpoint or run.start
    if folder:
        tokenizer, _, ends = outline(folder, config.chat_template, config.chat_template_kwargs)
        require_chat_template(tokenizer, tasks)
        model = policy(config, folder, device, run.world)
    elif config.lora is not None:
        raise UserError("--lora needs a pretrained model: give --model")
    else:
        model, tokenizer = _from_scratch(config, tasks, play, device)
        ends = model.eos_ids
    run.chat = chatting(config, folder, tokenizer, ends, parts=parts_of(config))
    told = run.chat.lines(tasks)
    how_shown = {"answered": True, "whole": config.mask == "all"}
    tasks, held_out = run.chat.of(tasks, **how_shown), run.chat.of(held_out, **how_shown) if held_out else None
    warn_unread(tokenizer, tasks, mask=config.mask)
    warn_bad_responses(tasks)
    if play is not None and tokenizer.unknown_id is not None:
        warn_unknown_tokens_in_episodes(
            tokenizer, _episodes(play, tasks.examples(READ_FOR_UNKNOWN), tokenizer.chat_template)
        )
    too_long = watch_lengths(config, model.config.context)

    eos = end_tokens(model, tokenizer)
    enact = play(tokenizer, eos) if play is not None else None

    def transcripts(tasks: AnyTasks) -> Transcripts:
        how = config.mask, enact, config.min_reward
        return Transcripts(tasks, tokenizer, eos, model.config.vocab, too_long, *how)

    made, unseen = transcripts(tasks), transcripts(held_out) if held_out else None
    made.check()
    steps = updates(config, made)
    learner = new_learner(config, model, optimization(config, steps), run.world)
    tokens = microbatch_tokens(config, model)
    source = Demonstrations(made, config.rows, tokens, config.seed, device, example_recording(config, learner, tokens))

    return RunParts(
        source,
        LikelihoodObjective(config.token_weight),
        learner,
        tokenizer,
        steps,
        [*sizes(config, model, (tasks, held_out), steps, "rows", device), *told],
        [f"minimise  - sum_t {FORMULAS[config.token_weight]}lp_t / (tokens of the step)"],
        text_loss(unseen, source, learner, "eval/loss") if unseen else None,
        notifiers=(too_long,),
        finish=lambda run: [made.kept] if made.kept and not config.quiet else [],
    )


def _player(run: RunFolder[SFT], device: torch.device, opened: ExitStack) -> Play | None:
    """Return a function that runs demonstrations in the environment, whose worker starts at the first row with replies.

    None if there is no environment with turns.
    """
    config = run.config
    if not config.env or not is_generator_env(load_env(config.env)):
        return None

    @cache
    def place() -> tuple[EnvPool, Services]:
        assert config.env
        pool = opened.enter_context(EnvPool(config.env, 1, config.env_timeout, config.env_memory))
        return pool, opened.enter_context(open_services(config, device, run.checkpoint is not None))

    def play(tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Enact:
        def enact(task: Task) -> list[tuple[list[Transcript], float]]:
            pool, services = place()
            return demonstration_runner(pool, tokenizer, eos_ids, services)(task)

        return enact

    return play


def _episodes(play: Play, tasks: Iterable[Task], template: str | None) -> Iterator[str]:
    """Yield the texts of whole episodes, which, unlike `texts_of`, include those of the environment."""
    reader = Tokenizer.train((), BYTES)
    reader = reader.templated(template, "its own") if template is not None else reader
    assert reader.eos_id is not None
    return episode_texts(play(reader, (reader.eos_id,)), reader, tasks)


def _from_scratch(config: SFT, tasks: AnyTasks, play: Play | None, device: torch.device) -> tuple[Model, Tokenizer]:
    """Return a new model of the given sizes, and a tokenizer, trained on rows and their episodes or loaded from a
    folder.
    """
    if config.tokenizer in ("bpe", "characters"):
        template = read_template(config.chat_template) if config.chat_template is not None else None
        some = tasks.first(READ_OF_A_STREAM) if isinstance(tasks, Stream) else tasks
        doing("training a tokenizer")
        texts = chain.from_iterable(map(texts_of, some))
        if play is not None:
            told = chain.from_iterable(texts_of(task) for task in some if not is_script(task))
            # run here: a tokenizer's trainer reads in its own thread, and signals wait until it has read everything
            played = list(_episodes(play, islice(some, READ_OF_EPISODES), template[0] if template else None))
            texts = chain(told, played)
        shown = around(template[0]) * TEMPLATE_COUNTS if template else []
        tokenizer = Tokenizer.train(chain(texts, shown), config.vocab, config.tokenizer)  # type: ignore[arg-type]
        tokenizer = tokenizer.templated(*template) if template else tokenizer
        tokenizer = tokenizer.with_kwargs(config.chat_template_kwargs)
        require_chat_template(tokenizer, tasks)
    else:
        tokenizer = Tokenizer.load(resolve(config.tokenizer), config.chat_template, config.chat_template_kwargs)
    if config.hidden % config.heads:
        raise UserError(f"--hidden {config.hidden} must be a multiple of --heads {config.heads}")
    model = new_decoder(
        DecoderConfig(
            vocab=tokenizer.vocab_size,
            hidden=config.hidden,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads or config.heads,
            head_size=config.hidden // config.heads,
            intermediate=config.intermediate or -(-config.hidden * 8 // (3 * 32)) * 32,
            context=config.context,
            tied=True,
        ),
        config.seed,
    )
    if tokenizer.eos_id is None:
        raise UserError(
            f"the tokenizer in {config.tokenizer} has no end-of-sequence token: set eos_token in its config"
        )
    model.eos_ids = (tokenizer.eos_id,)
    model.source = described(model, tokenizer)
    return model.to(device), tokenizer
