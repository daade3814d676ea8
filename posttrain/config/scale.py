"""The options of what makes a run larger: plans, and files for batch systems."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.component import option


@dataclass(frozen=True)
class Plan:
    """Simulate a pilot run's job on other machines: steps per hour, who is idle, what limits it."""

    gpus: int | None = option(None, above=0, most=4096)
    """Split so many devices between engines and learners in every way, and name the best."""
    engines: tuple[int, ...] = ()
    """Numbers of engines to try, without --gpus; default: 1 2 4."""
    learners: tuple[int, ...] = ()
    """Numbers of learners to try, without --gpus; default: 1."""
    async_steps: tuple[int, ...] = (0, 1, 2, 4)
    """Values of --async-steps to try: step n learns from what the weights after step n - 1 - async_steps sampled."""
    tokens_per_step: int | None = option(None, above=0)
    """Also try every setting with this --tokens-per-step: longer replies go on in the next step, with its weights."""
    prompts: int | None = option(None, above=0)
    """Prompts a step; default: the pilot's."""
    group: int | None = option(None, above=0)
    """Replies a prompt; default: the pilot's. Members of its groups are then drawn again."""
    weight_sync_seconds: float | None = option(None, least=0)
    """Seconds to hand weights over to an engine; default: the pilot's, which are next to none where they are shared."""
    gradients: float = option(0.0, least=0)
    """Seconds a step in which several learners sum their gradients: the pilot, with one, cannot know."""
    steps: int | None = option(None, least=8, most=100_000)
    """Steps that are simulated, of which the first fifth is not counted; default: what takes a second for each setting."""
    json: bool = False
    """Print data instead, of all settings."""


@dataclass(frozen=True)
class Launch:
    """Print what a batch system is to run for a command of posttrain."""

    slurm: bool = False
    """A file for Slurm's sbatch: posttrain launch --slurm --nodes 2 --gpus-per-node 8 -- rl --tasks ... > job.sbatch"""
    nodes: int = option(1, above=0, most=10_000)
    """Machines."""
    gpus_per_node: int = option(0, least=0, most=64)
    """GPUs of each; 0: none."""
    processes_per_node: int | None = option(None, above=0, most=1024)
    """Processes of the run on each; default: one for each GPU, or one."""
    cpus_per_process: int | None = option(None, above=0, most=1024)
    """Cores of each process; default: Slurm's."""
    time: str | None = None
    """Time limit, as Slurm writes it: 30, 12:00:00, 2-00:00:00; default: that of the partition."""
    partition: str | None = None
    """Partition; default: Slurm's."""
    account: str | None = None
    """Who pays for it."""
    name: str = "posttrain"
    """Name of the job."""
    log: str = "slurm-%j.out"
    """File for what is printed; %j is the number of the job."""
    venv: str | None = None
    """Folder of the virtual environment that has posttrain; default: the python that is found on the nodes."""
    container: str | None = None
    """Image that has posttrain, for Apptainer: a .sif file or docker://..."""
    save_seconds: int = option(120, above=0, most=65_535)
    """Seconds before the time limit in which the run is told to finish its step and save."""
    directives: tuple[str, ...] = ()
    """Further options of sbatch, without dashes: --directives constraint=a100 mem=0 exclusive."""
