"""Script for Slurm's sbatch that runs a training command.

Slurm itself starts the processes, one per task, with the variables that torchrun would set. With torchrun in between, a
run would be killed 30 seconds after the signal for the time limit, in the middle of a step or a checkpoint. So the
signal goes from the batch shell through srun to all processes, which save and end after the same step.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from posttrain.config.scale import Launch
from posttrain.config.training import Training
from posttrain.core.messages import clip
from posttrain.core.types import UserError

TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
OURS = ("--processes", "--restarts", "--resume", "--overwrite")
OURS_IN_SLURM = ("nodes", "ntasks", "signal", "requeue", "no-requeue", "array", "job-name", "time", "output")
LATE = 120  # seconds for other processes to end after the first has ended

BODY = """
set -euo pipefail
shopt -s nullglob

out={out}
words=({words})
python=({python})

# A run that has saved goes on from there: after a requeue, and when this file is submitted again.
saved=("$out"/checkpoints/step-*)
if (( ${{#saved[@]}} )); then
  words+=(--resume)
elif (( ${{SLURM_RESTART_COUNT:-0}} )); then
  words+=(--overwrite)  # this job has begun it: Slurm requeues a job whose node is lost, not one that was refused
fi

# The processes meet on the first machine. Its port is below those that Linux gives to outgoing connections (32768 on).
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${{hosts[0]}}
export MASTER_PORT=$(( 20000 + SLURM_JOB_ID % 12000 ))
export WORLD_SIZE={size} LOCAL_WORLD_SIZE={local}
export TORCH_CPP_LOG_LEVEL=${{TORCH_CPP_LOG_LEVEL:-ERROR}}

# Before the time limit this shell gets SIGTERM and passes it on: the run finishes its step, saves, and ends with 130.
srun --wait={late} --kill-on-bad-exit=0 \\
  bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"' process \\
  "${{python[@]}}" -m posttrain "${{words[@]}}" &
step=$!
trap 'kill -TERM "$step" 2> /dev/null || true' TERM
code=0
wait "$step" || code=$?
while kill -0 "$step" 2> /dev/null; do  # the signal ended the waiting, not the run
  code=0
  wait "$step" || code=$?
done
exit "$code"
"""


def script(launch: Launch, command: Sequence[str], training: Training) -> str:
    """Return the file for sbatch. `training`: the parsed command. Raises UserError for settings that sbatch cannot
    express.
    """
    if not launch.slurm:
        raise UserError("a scheduler is missing: give posttrain launch --slurm; one machine needs only --processes")
    if launch.venv is not None and launch.container is not None:
        raise UserError("--venv and --container both set the place of posttrain: give one of them")
    for word in command:
        if word.partition("=")[0] in OURS:
            raise UserError(f"{word.partition('=')[0]} is set by the file: leave it out of the command")
    if launch.time is not None and not TIME.fullmatch(launch.time):
        raise UserError(
            f"--time {clip(launch.time)} is not a time of Slurm: 30 (minutes), 12:00:00, or 2-00:00:00 (with days)"
        )
    if launch.time is not None and 0 < _seconds(launch.time) <= launch.save_seconds:  # 0: no limit
        raise UserError(
            f"--time {launch.time} is not longer than --save-seconds {launch.save_seconds}: "
            "give a longer --time, or a shorter --save-seconds"
        )
    local = launch.processes_per_node or launch.gpus_per_node or 1
    head = [f"#SBATCH {directive}" for directive in _directives(launch, local)]
    body = BODY.format(
        out=shlex.quote(training.out),
        words=shlex.join(command),
        python=shlex.join(_python(launch)),
        size=launch.nodes * local,
        local=local,
        late=LATE,
    )
    return "\n".join(["#!/bin/bash", *head]) + "\n" + body


def _seconds(time: str) -> int:
    """Convert a time of Slurm to seconds: minutes, minutes:seconds, hours:minutes:seconds; after days: hours ...

    >>> [_seconds(time) for time in ("2", "2:30", "1:00:00", "1-1", "1-0:30")]
    [120, 150, 3600, 90000, 88200]
    """
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, *[*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _directives(launch: Launch, local: int) -> Iterator[str]:
    chosen = {
        "job-name": launch.name,
        "nodes": launch.nodes,
        "ntasks-per-node": local,
        "gpus-per-node": launch.gpus_per_node or None,
        "cpus-per-task": launch.cpus_per_process,
        "time": launch.time,
        "partition": launch.partition,
        "account": launch.account,
        "output": launch.log,
        "signal": f"B:TERM@{launch.save_seconds}",
    }
    for name, value in chosen.items():
        if value is not None:
            yield f"--{name}={_quoted(f'--{name}', str(value))}"
    yield "--requeue"
    yield "--open-mode=append"
    for directive in launch.directives:
        name, equals, value = directive.partition("=")
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            raise UserError(
                f"--directives {clip(directive)} is not an option of sbatch: write name=value, or a name, without dashes"
            )
        if name in OURS_IN_SLURM:
            raise UserError(f"--directives {name} is set by the file: see posttrain launch --help for its option")
        yield f"--{name}={_quoted(f'--{name}', value)}" if equals else f"--{name}"


def _quoted(name: str, value: str) -> str:
    """Return a value quoted for sbatch: by a shell's rules, except that sbatch drops backslashes from all quotes."""
    if not value or not value.isprintable() or "\\" in value:
        raise UserError(
            f"{name} {clip(repr(value))} cannot stand in a line of sbatch: no backslash, no line break, not empty"
        )
    return shlex.quote(value)


def _python(launch: Launch) -> list[str]:
    if launch.container is not None:
        return ["apptainer", "exec", *(["--nv"] if launch.gpus_per_node else []), launch.container, "python"]
    return [f"{launch.venv.rstrip('/')}/bin/python"] if launch.venv else ["python"]
