"""Groups of options that several verbs share, each declared once."""

from dataclasses import dataclass
from typing import Literal

from posttrain.config.option_groups import OptionGroup
from posttrain.config.row_options import Precision
from posttrain.config.service_options import check_step_rewards, play_the_only_service
from posttrain.core.component import option
from posttrain.core.reply_steps import Aggregate


@dataclass(frozen=True)
class SamplingGroup(OptionGroup, group="sampling"):
    """Options of sampling."""

    max_tokens: int = option(256, above=0, first_hour=True)
    """Maximum number of tokens in a reply."""
    temperature: float = option(1.0, least=0, first_hour=True)
    """Sampling temperature; 0 is greedy. Training computes log-probabilities at the same temperature."""
    temperature_column: str = option("", value="COLUMN")
    """Column with the sampling temperature of a task, instead of --temperature; where it is null, --temperature holds.
    Training computes the log-probabilities of each token at the temperature that sampled it."""
    top_p: float = option(1.0, above=0, most=1)
    """Sample from the smallest set of tokens with this total probability. Training needs 1: other values change the
    sampled distribution."""
    top_k: int = option(0, least=0, most=10**9)
    """Sample from the K most likely tokens (0: all). Training needs 0."""
    stop: tuple[str, ...] = option((), value="TEXT")
    """Strings that end a reply."""


@dataclass(frozen=True)
class EpisodeGroup(OptionGroup, group="environment"):
    """Limits of an episode of several turns."""

    max_episode_tokens: int | None = option(None, above=0)
    """Maximum number of sampled tokens in an episode, over all of its replies. Default: no limit."""
    max_turns: int = option(64, above=0)
    """Maximum number of replies in an episode."""
    max_tool_calls: int | None = option(None, least=0)
    """Maximum number of tool results in an episode. Default: no limit."""
    episode_timeout: float | None = option(None, above=0, value="SECONDS")
    """Timeout of an episode, in seconds: after it, no further turn begins. Default: none. With a timeout, results
    depend on the clock."""


@dataclass(frozen=True)
class EnvLimitGroup(OptionGroup, group="environment"):
    """Limits of an environment's code."""

    env_timeout: float = option(10.0, above=0, most=86_400, value="SECONDS", on_resume="free")
    """Timeout of one call of the environment, in seconds. A call that exceeds it makes the reward invalid."""
    env_memory: float = option(4.0, least=0, most=100_000, value="GIB", on_resume="free")
    """Memory limit of an environment process, in GiB (0: none). A process that exceeds it makes the reward invalid."""


@dataclass(frozen=True)
class EnvWorkerGroup(EnvLimitGroup, group="environment"):
    """Processes for environments, and what each may take."""

    env_workers: int | None = option(None, least=0, most=1024, on_resume="free")
    """Environment processes. Default: one per CPU core. 0 runs the environment in this process, without limits, for
    debuggers."""


@dataclass(frozen=True)
class RetrieverGroup(OptionGroup, group="environment"):
    """Source of passages."""

    retriever: tuple[str, ...] = option((), value="INDEX", on_resume="free")
    """Index that environments search: a folder made by posttrain retriever build, or the address of a server. The
    server speaks Search-R1's protocol: http://host:8000. Name several with NAME=FOLDER."""


@dataclass(frozen=True)
class ServiceGroup(RetrieverGroup, group="environment"):
    """Models that environments may ask."""

    reward_model: tuple[str, ...] = option((), first_hour=True, value="FOLDER")
    """Reward model: the folder of a sequence classifier with one label. Without --env, its score is the reward;
    environments ask it under the name "reward-model". Name several with NAME=FOLDER."""
    judge: tuple[str, ...] = option((), first_hour=True, value="RECIPE")
    """Judge: the TOML recipe of a model behind an OpenAI endpoint, or of a checkpoint that reasons. Without --env, its
    verdict is the reward; environments ask it under the name "judge". Name several with NAME=RECIPE."""

    def __post_init__(self) -> None:
        super().__post_init__()
        play_the_only_service(self)


@dataclass(frozen=True)
class StepRewardGroup(ServiceGroup, group="environment"):
    """Rewards for the steps of a reply."""

    step_delimiter: str = option("", value="TEXT")
    """Reward each step of a reply with --reward-model, a model trained on labelled steps. The text between steps; or
    line, or a regular expression between slashes: "/(?=Step [0-9])/"; reply: each reply of an episode is one step;
    spans: the environment names where steps end. Without --env, only steps earn rewards."""
    step_aggregate: Literal["none", Aggregate] = "none"
    """Aggregate of step rewards, added to the reward as its part "process". none: each step keeps its own reward, at
    its last token, as grpo-process, --advantage to-go and critics read them."""
    step_rewards: Literal["always", "if-right"] = "always"
    """Replies whose steps earn rewards: all of them, or those whose outcome is right (P-GRPO)."""
    step_weight: float = option(1.0, least=0)
    """Weight of step rewards relative to the outcome's."""
    step_score: Literal["probability", "score"] = "probability"
    """The reward of a step: the probability that it is right (sigmoid of the reward model's score), or the score."""

    @property
    def rewards_steps(self) -> bool:
        """Whether the steps of a reply earn rewards."""
        return bool(self.step_delimiter)

    def __post_init__(self) -> None:
        check_step_rewards(self)
        super().__post_init__()


@dataclass(frozen=True)
class SeedGroup(OptionGroup, group="record"):
    """Options that make a result reproducible."""

    seed: int = option(0, least=-(2**62), most=2**62)
    """Random seed: the same seed gives the same result, bit for bit. It decides data order, sampling and initial
    weights."""


@dataclass(frozen=True)
class HeldOutGroup(OptionGroup, group="evaluation"):
    """Tasks that are kept for evaluation."""

    held_out: float = option(0.0, least=0, below=1, first_hour=True, value="SHARE")
    """Share of the tasks that training leaves out, and evaluations use. Each prompt is held out with this probability, which
    depends on its text and --split-seed alone: new rows never move old ones, and of few tasks the number may be far
    from the share. In eval: evaluate on this share only, as training with the same --held-out and --split-seed does."""
    split_seed: int | None = option(None, least=-(2**62), most=2**62)
    """Seed that chooses the held-out tasks. Default: --seed in training; in eval, that of the checkpoint's own run.
    Give runs with different seeds the same --split-seed to compare them on the same tasks."""


@dataclass(frozen=True)
class ReplicaGroup(OptionGroup, group="scale"):
    """Concurrent requests, and the number of engines."""

    slots: int = option(256, above=0)
    """Maximum of replies that each engine decodes at once. More of them need more memory for the KV cache."""
    replicas: int = option(0, least=0, most=1024, on_resume="free")
    """Sampling engines, each in a process of its own with a copy of the weights (0: none). An engine that dies is
    restarted. Samples of the local engine do not depend on their number. With 0, the local engine runs in this process,
    vLLM and SGLang in one server."""


@dataclass(frozen=True)
class HardwareGroup(OptionGroup, group="scale"):
    """Device and threads."""

    device: str = option("auto", first_hour=True, value="DEVICE")
    """Where to compute: auto, cpu, cuda, cuda:1 ..."""
    precision: Precision = "float32"
    """Type of the arithmetic in forward and backward passes. Stored weights and optimizer state keep their types."""
    threads: int | None = option(None, above=0, on_resume="free")
    """CPU threads. Default: PyTorch's choice."""
    compiled: bool = True
    """Compile the inner loops: on a CPU with a C compiler, on a GPU with Triton. --no-compiled uses plain PyTorch
    operations."""
    deterministic: bool = option(True, on_resume="free")
    """On a GPU, use algorithms that give the same bits each time. --no-deterministic allows others, some of which are
    faster."""
