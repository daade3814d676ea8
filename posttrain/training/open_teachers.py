"""Opens the teachers of a run, checks that they can teach the student, and describes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.algorithms.credit import Unrewarded
from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.teacher import Distillation
from posttrain.config.training import Distill
from posttrain.core.protocols import Model, World
from posttrain.core.types import Task, UserError
from posttrain.models.adapters.lora import is_adapted
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.checkpoint import resolve
from posttrain.runs.terminal.notices import warn
from posttrain.training.open_learner import held_model, other_device, reference
from posttrain.training.role_devices import TEACHERS
from posttrain.training.setup import parameters
from posttrain.training.sources.teacher_targets import ALWAYS_1, NAMED, TEACHER, Teachers
from posttrain.training.weight_types import frozen_type, refuse_rounded_moves

if TYPE_CHECKING:
    from posttrain.training.sources.remote_teacher import RemoteTeacher

PROBED = 3  # tasks whose prompts an endpoint is asked about before the run


@dataclass(frozen=True)
class OpenTeachers:
    """Teachers of a run, and those of them whose models the learner holds."""

    teachers: Teachers
    models: dict[str, Model] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)  # what runs, in words


def load_teachers(
    config: Distill,
    algorithm: Algorithm,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    opened: ExitStack,
    world: World,
    student: Model,
    start: Path,
) -> OpenTeachers:
    """Open the teachers and check that they can teach this student and some of the tasks.

    A teacher that the student started from (`start`) shares the weights that the student's adapters leave as they were.

    Raises UserError, in one line, for a teacher with another tokenizer, an endpoint that is asked for whole distributions,
    and a task whose teacher does not exist.
    """
    teacher = algorithm.teacher
    assert teacher is not None
    models: dict[str, Model] = {}
    remote: dict[str, RemoteTeacher] = {}
    lines = []
    for name, option, where in named_teachers(config):
        if where.startswith(("http://", "https://")):
            _refuse_exact(config, algorithm, option, where)
            from posttrain.training.sources.remote_teacher import RemoteTeacher  # and with it a library for HTTP

            remote[name] = opened.enter_context(closing(RemoteTeacher(where, teacher.temperature is not None)))
            if teacher.top_k:
                remote[name].check_top(teacher.top_k)
            of = f" of the sampled and its {teacher.top_k} likeliest tokens" if teacher.top_k else ""
            lines.append(f"{option} {where} ({remote[name].model}), asked for log-probabilities{of}")
        elif teacher.top_k:
            raise UserError(
                f"--teacher-top-k is for endpoints, and {option} {where} is a folder, which gives whole distributions: "
                "leave it out, or give only teachers behind endpoints"
            )
        else:
            folder = resolve(where)
            _check_tokens(tokenizer, Tokenizer.load(folder), f"{option} {where}")
            model = models[name] = _held(config, teacher, folder, world, student, start)
            size = f"{parameters(model):,} parameters, context {model.config.context}"
            softened = "the temperature of sampling" if teacher.temperature is None else f"{teacher.temperature:g}"
            lines.append(f"{option} {where}: {size}; its logits are divided by {softened}")
    if teacher.every:
        _check_moves(config, teacher, models, student)
    contexts = {name: model.config.context for name, model in models.items()}
    teachers = Teachers(tokenizer, contexts, remote, choose=bool(config.teachers))
    for task in tasks:
        teachers.name(task)
        teachers.prompt(task)
    for task, endpoint in ((t, remote[n]) for t in tasks[:PROBED] if (n := teachers.name(t)) in remote):
        text = task.get("prompt")
        if isinstance(text, str):
            endpoint.check([*tokenizer.encode(text, start=True), *tokenizer.encode(" 1")], tokenizer)
    if teaches_itself(config, algorithm, tasks, start):
        warn(
            f"--teacher {config.teacher} is the model itself, and reads the same prompts: the divergence is 0, and nothing "
            "is learned: give --teacher-prompt-template, or another teacher"
        )
    return OpenTeachers(teachers, models, lines)


def teaches_itself(config: Distill, algorithm: Algorithm, tasks: Sequence[Task], start: Path) -> bool:
    """Return whether the only teacher is the student as it starts (`start`), with nothing else to learn from."""
    teacher = algorithm.teacher
    assert teacher is not None
    others = algorithm.pretraining or algorithm.entropy or not isinstance(algorithm.advantage, Unrewarded)
    if others or config.teachers or not config.teacher or config.teacher.startswith(("http://", "https://")):
        return False
    softened = teacher.temperature is not None and (
        teacher.temperature != config.temperature or bool(config.temperature_column)
    )
    read = any(task.get("teacher_prompt") is not None for task in tasks)
    return not (softened or read) and resolve(config.teacher).resolve() == start.resolve()


def _held(config: Distill, teacher: Distillation, folder: Path, world: World, student: Model, start: Path) -> Model:
    """Load the frozen teacher in a folder."""
    if folder.resolve() == start.resolve() and is_adapted(student):
        model = reference(config, student, start, world, moves=teacher.every > 0)
    elif len(list(named_teachers(config))) == 1:
        model = held_model(config, folder, other_device(config, TEACHERS, student), world, frozen=True)
    else:  # of several each process holds all
        model = load_model(folder, device=other_device(config, TEACHERS, student), matrices=frozen_type(config))
    return model.requires_grad_(False)


def named_teachers(config: Distill) -> Iterator[tuple[str, str, str]]:
    """Return (name for the learner, option, folder or endpoint) of each teacher."""
    default = [(TEACHER, "--teacher", config.teacher)] if config.teacher else []
    others = ((NAMED.format(name), f"--teachers.{name}", where) for name, where in config.teachers.items())
    return chain(default, others)


def _check_moves(config: Distill, teacher: Distillation, models: Mapping[str, Model], student: Model) -> None:
    """Raise UserError where the teacher cannot move to the student's weights."""
    if TEACHER not in models:
        raise UserError(f"--teacher-every updates weights, and {config.teacher} is an endpoint: leave it out")
    refuse_rounded_moves(config, "--teacher-update-rate", teacher.rate)
    theirs, ours = (
        {name: parameter.shape for name, parameter in model.named_parameters()} for model in (models[TEACHER], student)
    )
    if theirs != ours:
        raise UserError(
            f"--teacher-every needs a teacher with the student's weights, and those of {config.teacher} have other names or "
            "shapes: give --teacher the folder of --model, or leave out --teacher-every"
        )


def _refuse_exact(config: Distill, algorithm: Algorithm, option: str, where: str) -> None:
    assert algorithm.teacher is not None
    if algorithm.teacher.whole:
        raise UserError(
            f"{algorithm.name}: {option} {where} gives log-probabilities of single tokens, and "
            f"{algorithm.teacher.divergence} needs full distributions: give --teacher-top-k 20, use --algorithm "
            "distill-k1, or a teacher in a folder"
        )
    own = algorithm.teacher.temperature
    if (config.temperature if own is None else own) != 1 or (own is None and config.temperature_column):
        raise UserError(f"{algorithm.name}: {option} {where} {ALWAYS_1}")


def _check_tokens(student: Tokenizer, teacher: Tokenizer, told: str) -> None:
    """Raise UserError unless every token has the same id on both sides."""
    ours, theirs = student.vocabulary, teacher.vocabulary
    if ours == theirs:
        return
    odd = min(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))[0]

    def said(vocabulary: Mapping[str, int]) -> str:
        return f"is {vocabulary[odd]}" if odd in vocabulary else "does not exist"

    raise UserError(
        f"{told} has another tokenizer ({len(theirs):,} tokens, the student has {len(ours):,}; {odd!r:.40} {said(theirs)} "
        f"there and {said(ours)} here): use a teacher of the student's family, with the same tokens"
    )
