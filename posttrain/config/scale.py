"""Options of what makes a run larger: plans, and files for batch systems."""

from dataclasses import dataclass

from posttrain.config.option_groups import OptionGroup
from posttrain.core.component import option


@dataclass(frozen=True)
class Plan(OptionGroup, group="scale"):
    """Simulate a pilot run's job on other machines: steps per hour, who is idle, what limits it."""

    gpus: int | None = option(None, above=0, most=4096, first_hour=True)
    """Try every split of N devices between engines and learners, and report the best."""
    engines: tuple[int, ...] = option((), first_hour=True)
    """Numbers of engines to try, without --gpus. Default: 1 2 4."""
    learners: tuple[int, ...] = option((), first_hour=True)
    """Numbers of learners to try, without --gpus. Default: 1."""
    async_steps: tuple[int, ...] = option((0, 1, 2, 4), first_hour=True)
    """Values of --async-steps to try. Step n learns from what the weights after step n - 1 - async_steps sampled."""
    tokens_per_step: int | None = option(None, above=0, first_hour=True)
    """Also try every setting with this --tokens-per-step: longer replies continue in the next step, with its
    weights."""
    prompts: int | None = option(None, above=0, first_hour=True)
    """Prompts per step. Default: the pilot's."""
    group: int | None = option(None, above=0, first_hour=True)
    """Rollouts per prompt. Default: the pilot's. With another number, rollouts are resampled from the pilot's
    groups."""
    weight_sync_seconds: float | None = option(None, least=0, value="SECONDS")
    """Duration of a weight sync, in seconds. Default: the pilot's, which is near 0 where weights are shared."""
    gradients: float = option(0.0, least=0, value="SECONDS")
    """Seconds per step in which several learners sum their gradients. A pilot with one learner does not measure it."""
    steps: int | None = option(None, least=8, most=100_000)
    """Steps to simulate; the first fifth is not counted. Default: as many as take a second for each setting."""
    json: bool = option(False, first_hour=True)
    """Print JSON with all settings instead of a table."""


@dataclass(frozen=True)
class Memory(OptionGroup, group="scale"):
    """Estimate the GPU memory of a training command."""

    gpu_memory: float = option(80.0, above=0, most=100_000, first_hour=True, value="GIB")
    """Memory of the GPU, in GiB: 24, 40, 80, 141 ..."""


@dataclass(frozen=True)
class Launch(OptionGroup, group="scale"):
    """Print a script that runs a posttrain command on a batch system."""

    slurm: bool = option(False, first_hour=True)
    """Print an sbatch script: posttrain launch --slurm --nodes 2 --gpus-per-node 8 -- rl --tasks ... > job.sbatch"""
    nodes: int = option(1, above=0, most=10_000, first_hour=True)
    """Number of machines."""
    gpus_per_node: int = option(0, least=0, most=64, first_hour=True)
    """GPUs per machine (0: none)."""
    processes_per_node: int | None = option(None, above=0, most=1024, first_hour=True)
    """Training processes on each machine. Default: one per GPU, or one."""
    cpus_per_process: int | None = option(None, above=0, most=1024, first_hour=True)
    """CPU cores per process. Default: Slurm's."""
    time: str | None = option(None, first_hour=True)
    """Time limit in Slurm's format: 30, 12:00:00, 2-00:00:00. Default: the partition's."""
    partition: str | None = option(None, first_hour=True)
    """Partition. Default: Slurm's."""
    account: str | None = option(None, first_hour=True)
    """Account to charge."""
    name: str = option("posttrain", first_hour=True)
    """Name of the job."""
    log: str = option("slurm-%j.out", first_hour=True)
    """File for the output; %j is the job's number."""
    venv: str | None = option(None, first_hour=True, value="FOLDER")
    """Virtual environment that has posttrain. Default: the nodes' python."""
    container: str | None = option(None, first_hour=True, value="IMAGE")
    """Apptainer image that has posttrain: a .sif file or docker://..."""
    save_seconds: int = option(120, above=0, most=65_535, first_hour=True, value="SECONDS")
    """Seconds before the time limit at which the run finishes its step and saves."""
    directives: tuple[str, ...] = option((), first_hour=True, value="OPTION")
    """Further sbatch options, without dashes: --directives constraint=a100 mem=0 exclusive."""
