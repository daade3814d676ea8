"""The process group of a run: joining it, and ending when another process fails.

Each process does the same as a run of one process, with two exceptions: it samples its share of the groups, and
computes its share of the micro-batches. Each computes all decisions (filters, credit, order, health) from the same
numbers. Only the first one writes files and prints.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout

from posttrain.config.training import Training
from posttrain.core.protocols import Alone, World
from posttrain.core.types import UserError
from posttrain.learners.process_group import joined
from posttrain.models.gpu_placement import gpus_of_roles
from posttrain.runs.terminal.notices import held

SHARD_ALONE = "--shard requires --processes above 1, across which it shards the weights: add it, or leave --shard out"


def refuse_uneven(config: Training, size: int) -> None:
    """Raise UserError if `size` processes cannot be divided into the groups that compute together."""
    asked = {
        "--tensor-parallel": config.tensor_parallel,
        "--context-parallel": config.context_parallel,
        "--expert-parallel": config.expert_parallel,
    }
    each = math.prod(asked.values())
    if size % each:
        told = " ".join(f"{name} {value}" for name, value in asked.items() if value > 1)
        what = "layer's experts" if config.expert_parallel > 1 else "micro-batch"
        raise UserError(
            f"{told} needs {each} processes for each {what}, and the run has {size}: give --processes {each}, or a "
            "multiple of it"
        )
    if size % (each := config.shards(size)):
        raise UserError(
            f"--shard-size {each} needs {each} processes for each copy of the weights, and the run has {size}: give "
            f"--processes {each}, or a multiple of it"
        )


@contextmanager
def open_world(config: Training) -> Iterator[World]:
    """Yield the world of this process: alone, or one of the processes started by torchrun or `--processes`.

    Messages before the description of the run are held back until it is printed. Raises UserError if another process
    has failed, with its message.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if config.processes > 1:
            raise UserError(
                "--processes starts processes only from the command posttrain: start your program with torchrun "
                f"--nproc-per-node {config.processes}"
            )
        if config.collective_timeout != Training.collective_timeout:
            raise UserError("--collective-timeout requires --processes above 1: add it, or leave the timeout out")
        if config.restarts:
            raise UserError("--restarts requires --processes above 1: add it, or leave --restarts out")
        if config.shard:
            raise UserError(SHARD_ALONE)
        refuse_uneven(config, 1)
        with held():
            yield Alone()
        return
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(
            f"WORLD_SIZE is set in the environment and {', '.join(missing)} is not: start processes with torchrun or "
            "--processes, or unset WORLD_SIZE"
        )
    refuse_uneven(config, int(os.environ["WORLD_SIZE"]))
    with ExitStack() as left:
        if os.environ["RANK"] != "0":
            nowhere = left.enter_context(open(os.devnull, "w"))
            left.enter_context(redirect_stdout(nowhere))
            left.enter_context(redirect_stderr(nowhere))
        left.enter_context(held())
        roles = gpus_of_roles(config.role_devices)
        world = joined(config.device, config.collective_timeout, config.learner_devices, roles)
        try:
            yield world
            world.gather(None)  # no process exits while another one may still fail
        except BaseException as error:
            world.fail(error)
            raise
