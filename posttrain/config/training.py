"""Options of what trains: sft, prefer, reward-model, rl and distill."""

from dataclasses import dataclass
from typing import Any, Literal

from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.preference import PreferenceAlgorithm
from posttrain.algorithms.reward_model_table import RewardModelAlgorithm
from posttrain.algorithms.settings import flags
from posttrain.config.curriculum_options import CurriculumGroup
from posttrain.config.mixture_options import MixtureGroup, MixtureWeightsGroup
from posttrain.config.option_groups import OptionGroup
from posttrain.config.row_options import Data
from posttrain.config.shared_options import (
    EnvLimitGroup,
    EnvWorkerGroup,
    EpisodeGroup,
    HardwareGroup,
    HeldOutGroup,
    ReplicaGroup,
    RetrieverGroup,
    SamplingGroup,
    SeedGroup,
    StepRewardGroup,
)
from posttrain.core.coerce import read_variable
from posttrain.core.component import option
from posttrain.core.transcripts import Mask

ROLES = ("reference", "critic", "teacher", "reward-model", "judge")
"""Models beside the policy that --role-devices can place."""


@dataclass(frozen=True)
class ModelGroup(OptionGroup, group="model"):
    """The model to train, and which of its weights."""

    model: str | None = option(None, first_hour=True, value="MODEL")
    """Model to start from: a Hugging Face folder, a GGUF file, the folder of a run, or org/name. In sft, leave it out to
    train from scratch. org/name, or org/name@revision, is a model of the Hugging Face hub."""
    lora: int | None = option(None, above=0, most=65_536, first_hour=True, value="RANK")
    """Train LoRA adapters of this rank instead of all weights. Gradients and optimizer state then take a fraction of
    the memory. Checkpoints hold the adapters in PEFT's format. If --model is an adapter, training continues with it."""
    lora_alpha: float | None = option(None, above=0, most=1e6)
    """LoRA alpha: adapters are scaled by alpha / rank. Default: twice the rank (arXiv 2405.09673)."""
    lora_targets: tuple[str, ...] = option(("all-linear",), value="NAME")
    """Matrices to adapt: all-linear, or any of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj."""
    quantize: Literal["nf4", "int8"] | None = None
    """Keep the frozen weights in 4 bits (nf4, as in QLoRA) or 8 (int8); needs --lora. They are dequantised for each
    product."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Type in which all weights of the run are stored. bfloat16, with --precision bfloat16, takes half the memory and needs
    no copies. Gradients, moments, norms and biases stay in float32. Updates use stochastic rounding, so that small ones
    are not lost. Not with --lora."""
    frozen_weights: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that are not trained: the base of LoRA, a reference, teachers, reward models and judges of
    this machine. bfloat16 takes half the memory, and is exact for a checkpoint stored in bfloat16: with --precision
    bfloat16, products are the same. Norms, biases and adapters stay in float32."""
    rslora: bool = False
    """Scale adapters by alpha / sqrt(rank) (rsLoRA), so that large ranks learn as fast as small ones."""
    dora: bool = False
    """Learn the magnitude of each row of an adapted matrix separately from its direction (DoRA); needs --lora."""
    train_vision: bool = False
    """Vision-language models: train the vision tower and its projection too. By default they are frozen."""


@dataclass(frozen=True)
class OptimizerGroup(OptionGroup, group="optimisation"):
    """The optimizer, its learning rate, and the terms of the loss that every algorithm may have."""

    lr: float = option(1e-5, above=0, first_hour=True)
    """Peak learning rate of the optimizer."""
    optimizer: str = option("adamw", value="NAME")
    """Optimizer: adamw, adamw8bit, adafactor, muon, lion, sgd, another of torch.optim such as radam, or a class as
    my.py:Class. A critic has the same. adamw8bit and lion are those of bitsandbytes. Muon updates the matrices of layers,
    and AdamW the rest."""
    optimizer_options: dict[str, Any] = option(factory=dict, value="KEY=VALUE")
    """Settings of the optimizer's class: --optimizer-options momentum=0.95. In a recipe, a table."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. linear and cosine end at 0."""
    warmup: int = option(0, least=0)
    """Warm-up: updates over which the learning rate rises from 0."""
    weight_decay: float = option(0.0, least=0)
    """Decoupled weight decay of weight matrices, with every optimizer."""
    betas: tuple[float, float] = option((0.9, 0.999), least=0, below=1)
    """Decay rates of the two moments: of AdamW, and of other optimizers that have two."""
    max_grad_norm: float = option(1.0, least=0)
    """Clip gradients to this norm (0: no clipping)."""
    tokens_per_microbatch: int | None = option(None, above=0)
    """Tokens in one forward and backward pass, besides a prompt: bounds the memory of an update. Default: 1024 on a
    CPU (768 for models of 50 million parameters and more, 384 for those that transformers computes); on a GPU as
    many as keep their activations within a fifth of its memory. Results do not depend on it."""
    recompute: Literal["auto", "none", "layers"] = option("auto", on_resume="free")
    """Activations to recompute in the backward pass (gradient checkpointing). layers: each layer keeps only its input,
    which costs a second forward pass. auto: layers, if the update may not fit into the GPU's memory otherwise. Results do
    not depend on it. Models of transformers always recompute their layers where activations would not fit."""
    offload: tuple[Literal["optimizer", "activations", "reference"], ...] = option((), on_resume="free")
    """Data to keep in the host's memory while the GPU does not need it. optimizer: its state, between updates.
    activations: those kept for the backward pass. reference: the reference model and teachers, while they are not used.
    Results do not depend on it."""
    float8: bool = False
    """Compute the products of layers in float8, by torchao, with --precision bfloat16: forward and for the gradients of
    activations; those of weights stay in bfloat16. Weights stay in float32. On a CPU the rounding is emulated, which is
    slower."""
    router_balance: float = option(0.0, least=0)
    """Mixtures of experts: coefficient of the load-balancing loss (Switch: 0.01). It is computed over the whole
    optimizer batch."""
    router_z: float = option(0.0, least=0)
    """Mixtures of experts: coefficient of the router z-loss, which keeps logits small (ST-MoE: 0.001)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        read = {name: read_variable(value) for name, value in self.optimizer_options.items()}
        object.__setattr__(self, "optimizer_options", read)


@dataclass(frozen=True)
class ProcessesGroup(OptionGroup, group="scale"):
    """Several processes that train one model."""

    processes: int = option(1, above=0, most=1024, on_resume="anew")
    """Training processes on this machine: each holds the whole model, unless an option divides it. On several machines,
    start one process each with torchrun."""
    learner_devices: tuple[int, ...] = option((), value="GPU", on_resume="free")
    """GPUs of the training processes, one each, by their numbers: 0 1. Default: the first ones."""
    role_devices: dict[str, str] = option(factory=dict, value="ROLE=GPU", on_resume="free")
    """GPUs for models beside the policy: --role-devices reference=1 critic=2. Roles are reference, critic, teacher,
    reward-model and judge. With several processes give each a number: reference=2,3; cpu is possible too. Default: the
    training process's own. In a recipe, a table."""
    shard: bool = option(False, on_resume="anew")
    """Shard weights, gradients and optimizer state across the processes (FSDP2)."""
    shard_size: int | None = option(None, above=1, most=1024, on_resume="anew")
    """Processes that share one copy of the weights with --shard (hybrid sharding, HSDP); it divides --processes. With the
    number of GPUs of a machine, weights are gathered within machines, and only gradients are summed between them.
    Default: all processes."""
    tensor_parallel: int = option(1, above=0, most=1024, on_resume="anew")
    """Processes that divide heads, MLP and vocabulary of the model among them, and compute the same micro-batches. It
    divides --processes."""
    context_parallel: int = option(1, above=0, most=1024, on_resume="anew")
    """Processes that divide the tokens of a micro-batch among them, for long replies. Times --tensor-parallel, it divides
    --processes."""
    expert_parallel: int = option(1, above=0, most=1024, on_resume="anew")
    """Processes that divide the experts of each layer of a mixture among them. Everything else is whole in each, and each
    has its own micro-batches. It divides --processes."""
    collective_timeout: float = option(600.0, above=0, most=86_400, value="SECONDS", on_resume="anew")
    """Timeout of collective operations, in seconds: a process that takes longer counts as lost."""
    restarts: int = option(0, least=0, on_resume="anew")
    """Restarts after a crash, from the newest checkpoint. Needs --processes above 1."""

    @property
    def in_parts(self) -> bool:
        """Whether no process has all weights."""
        return self.shard or self.tensor_parallel > 1 or self.expert_parallel > 1

    def shards(self, processes: int) -> int:
        """Return how many of these processes share one copy of the weights."""
        return (self.shard_size or processes) if self.shard else 1

    @property
    def divisions(self) -> tuple[str, ...]:
        """Options that divide the model or a micro-batch among processes."""
        asked = self.shard, self.tensor_parallel > 1, self.context_parallel > 1, self.expert_parallel > 1
        names = "--shard", "--tensor-parallel", "--context-parallel", "--expert-parallel"
        return tuple(name for name, given in zip(names, asked, strict=True) if given)


@dataclass(frozen=True)
class RunGroup(OptionGroup, group="record"):
    """The folder of the run, what is written into it, and what is watched."""

    out: str = option("runs/latest", first_hour=True, value="FOLDER", on_resume="anew")
    """Folder of the run, to be created."""
    resume: bool = option(False, first_hour=True, on_resume="anew")
    """Continue the run in --out from its newest intact checkpoint, bit for bit."""
    overwrite: bool = option(False, first_hour=True, on_resume="anew")
    """Start again in --out. The run there is deleted after the first step of the new one."""
    accept_changes: bool = option(False, on_resume="anew")
    """With --resume: accept changed tasks, model or reward, or a record with missing parts. run.json notes it."""
    save_every: int = option(50, above=0, on_resume="free")
    """Steps between checkpoints. One more is written at the end."""
    keep: int = option(2, above=0, on_resume="free")
    """Checkpoints to keep, the newest ones."""
    record: Literal["tokens", "sample", "full"] = option("sample", on_resume="free")
    """Per-token data to record. tokens: ids and the sampler's log-probabilities. sample: for 8 groups a step, also the
    values of the update (log-probabilities of learner and reference, entropy, weight in the loss). full: the same for
    all groups. Results do not depend on it."""
    record_after: bool = option(False, on_resume="free")
    """Also record log-probabilities after the step's update: one more forward pass over the groups of --record."""
    health: Literal["warn", "stop", "log", "off"] = option("warn", on_resume="free")
    """Reaction to health findings: entropy collapse, runaway length or KL, no signal, jumps of the reward, skipped
    updates. stop saves a checkpoint first. After 5 consecutive steps without a finite gradient, the run stops, unless
    this is off."""
    track: tuple[str, ...] = option((), value="TRACKER", on_resume="free")
    """Trackers to log to: wandb, trackio, mlflow, swanlab, prometheus, or your own as my.py:Mine. Each runs in a
    process of its own and cannot delay a step. prometheus:PORT serves /metrics. TensorBoard's files are always
    written."""
    track_project: str = option("", value="NAME", on_resume="free")
    """Project of the trackers. Default: the tracker's own variable (WANDB_PROJECT ...), or posttrain."""
    hook: tuple[str, ...] = option((), value="my.py:NAME", on_resume="free")
    """Your own functions, called after each step: (step, metrics, rollouts). An object may have on_step, on_evaluation
    and on_checkpoint. They change no result; posttrain.StopRun ends the run with a checkpoint."""
    profile: str = option("", value="FIRST:LAST", on_resume="anew")
    """Steps to profile with torch's profiler, such as 3:5. Writes a table by kind of work and kernel into the folder
    profile, and a trace of each phase for ui.perfetto.dev."""
    quiet: bool = option(False, on_resume="anew")
    """Show no progress."""


@dataclass(frozen=True)
class Training(RunGroup, SeedGroup, ProcessesGroup, HardwareGroup, HeldOutGroup, OptimizerGroup, ModelGroup, Data):
    """Options of every kind of training."""

    eval_every: int = option(0, least=0, group="evaluation", first_hour=True, on_resume="free")
    """Steps between evaluations on the held-out tasks (0: only before and after training)."""
    eval_tasks: tuple[str, ...] = option((), group="evaluation", value="ROWS", first_hour=True)
    """Rows to evaluate on, instead of a held-out share of --tasks. There may be several sets, with names:
    --eval-tasks easy=a.jsonl hard=b.jsonl. In rl each has figures of its own too."""
    eval_suite: str | None = option(None, group="evaluation", value="FILE")
    """TOML file of several evaluations, as for posttrain eval --suite, to sample at every evaluation. The metrics are
    suite/PART/accuracy, suite/PART/reward ... and suite/mean, if every part has valid rewards."""
    forget: str | None = option(None, group="evaluation", value="ROWS")
    """Texts, or prompts with responses, whose loss is measured at every evaluation (forget/loss), to detect forgetting.
    Verbs that sample measure it at the sampling temperature."""


@dataclass(frozen=True)
class Passes(MixtureGroup, Training, group="optimisation"):
    """Training on given responses, in passes over the rows."""

    epochs: float = option(1.0, above=0, first_hour=True)
    """Passes over the rows."""
    steps: int | None = option(None, above=0, first_hour=True, on_resume="free")
    """Optimizer updates, instead of --epochs. Required for rows without end. On the command line, either replaces the
    other of a recipe."""
    rows: int = option(32, above=0, first_hour=True)
    """Batch size: prompts per optimizer update, each with all its responses."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    max_length: int | None = option(None, above=1, group="data", first_hour=True)
    """Maximum number of tokens in a row, of prompt and response together; of several responses, the longest counts.
    --too-long decides what happens to longer rows. Default: the model's context."""


@dataclass(frozen=True)
class SFT(EnvLimitGroup, RetrieverGroup, Passes):
    """Supervised fine-tuning on responses, conversations or recorded episodes."""

    out: str = "runs/sft"
    rows: int = option(16, above=0)
    """Batch size: rows per optimizer update."""
    mask: Mask = option("assistant", group="optimisation")
    """Messages that are trained: assistant (every assistant message, or the response), last (the last assistant
    message; earlier ones are context), or all (every token, prompts too). A message with "train": false or "weight": 0
    is never trained."""
    token_weight: Literal["equal", "probability", "uncertainty"] = option("equal", group="optimisation")
    """Weight of each token in the loss, without a gradient: equal, its probability p (Dynamic Fine-Tuning), or
    uncertainty: p (1 - p), largest at p = 1/2."""
    min_reward: float | None = option(None, group="data")
    """Keep rollouts with at least this reward: of a recorded run, or of replies that run through --env."""
    lr: float = option(1e-4, above=0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    hidden: int = option(128, above=0, group="model", first_hour=True)
    """From scratch: hidden size."""
    layers: int = option(4, above=0, group="model", first_hour=True)
    """From scratch: number of layers."""
    heads: int = option(4, above=0, group="model")
    """From scratch: attention heads."""
    kv_heads: int | None = option(None, above=0, group="model")
    """From scratch: key-value heads. Default: as many as attention heads."""
    intermediate: int | None = option(None, above=0, group="model")
    """From scratch: hidden size of the MLP. Default: 8/3 of --hidden, rounded up to a multiple of 32."""
    context: int = option(512, above=1, group="model", first_hour=True)
    """From scratch: context length in tokens, for prompt and reply together."""
    tokenizer: str = option("bpe", group="model", first_hour=True)
    """From scratch: bpe or characters, trained on the rows, or the folder of a model or run to take the tokenizer from."""
    vocab: int = option(4096, above=0, group="model")
    """From scratch: maximum vocabulary size of the tokenizer to train."""


@dataclass(frozen=True)
class AlgorithmGroup(OptionGroup, group="algorithm"):
    """The algorithm, and changes to its settings."""

    algorithm: str = option("", first_hour=True)
    settings: dict[str, Any] = option(factory=dict)
    """Settings of the algorithm, by flag or by place: {"clip_high": 0.28, "advantage.eps": 1e-4}."""


@dataclass(frozen=True)
class Prefer(AlgorithmGroup, Passes):
    """Learn from preferences without sampling (DPO and its family)."""

    algorithm_kind = PreferenceAlgorithm
    out: str = "runs/prefer"
    algorithm: str = "dpo"
    """Algorithm: dpo, ipo, kto ... (`posttrain algorithms` lists all), or your own as my.py:name."""
    lr: float = option(1e-6, above=0)


@dataclass(frozen=True)
class RewardModelling(AlgorithmGroup, Passes):
    """Train a reward model: a language model with a head that scores replies."""

    algorithm_kind = RewardModelAlgorithm
    out: str = "runs/reward-model"
    algorithm: str = "bradley-terry"
    """Algorithm: bradley-terry, k-wise, plackett-luce, outcome, regression, or your own as my.py:name. outcome learns
    from labels of whole replies or of their steps."""
    pooling: Literal["last", "mean"] = option("last", group="model")
    """Hidden states to score: of a reply's last token, or the mean over its tokens. transformers cannot load mean."""
    head: Literal["linear", "mlp"] = option("linear", group="model")
    """Head of the reward model: one linear layer, or two with a tanh between. transformers cannot load mlp."""
    epochs: float = option(1.0, above=0)
    """Passes over the rows. More than one soon overfits (InstructGPT used one)."""


@dataclass(frozen=True)
class EngineGroup(ReplicaGroup, group="scale"):
    """Engine of training, and its weight sync."""

    engine: Literal["local", "vllm", "sglang"] = "local"
    """Sampling engine: local, with the learner's own weights, or a server that the run starts: vllm, sglang."""
    engine_url: tuple[str, ...] = option((), value="URL", on_resume="free")
    """Servers of vLLM or SGLang that run already, such as http://10.0.0.7:8000, instead of one that the run starts. The
    variable VLLM_API_KEY or SGLANG_API_KEY holds their key, if they need one."""
    engine_tensor_parallel: int = option(1, above=0, most=1024, value="N", on_resume="free")
    """vLLM, SGLang: GPUs of each server, which share its weights (tensor parallelism)."""
    engine_seeds: bool = option(False, on_resume="free")
    """vLLM, SGLang: sample each reply with a seed of its own, so that a repeated run samples the same replies, apart from
    rounding. vLLM on CPUs and SGLang sample more slowly then."""
    engine_devices: tuple[int, ...] = option((), value="GPU", on_resume="free")
    """GPUs of engines in processes of their own (--replicas, --engine), in turn. Default: the GPUs that no
    training process uses; if there are none, the training GPUs."""
    engine_cache: float | None = option(None, above=0, most=100_000, value="GIB", on_resume="free")
    """KV cache limit of each engine, in GiB. When the local engine's cache is full, the newest requests wait, and continue
    later. It does not limit models that transformers computes. Default: 0.7 of the memory that is free when sampling
    begins, with at most 4 for prefixes kept between turns. For a server 4; on GPUs that it has to itself, what it finds
    free; if it sleeps during updates, a fifth of the GPU."""
    engine_timeout: float = option(120.0, above=0, most=86_400, value="SECONDS", on_resume="free")
    """Timeout of an engine in another process, in seconds, for a weight sync or a decoding step. After it, the engine is
    restarted."""
    weight_sync: Literal["copied", "adapter", "nccl", "ipc"] = option("copied", on_resume="free")
    """Transport of new weights to vLLM or SGLang. copied: all of them, adapters merged, through host memory, or to SGLang
    and --engine-url through files, for the latter under --out. adapter: with --lora, the base once, then only the
    adapters. nccl, ipc: from GPU to GPU, or within one GPU; both are vLLM's own, and have not been tested on GPUs yet."""
    launch: Literal["local", "ray"] = option("local", on_resume="free")
    """Where --replicas of the local engine run: on this machine, or on a Ray cluster. RAY_ADDRESS names the cluster;
    without it, one is started here. Weights and requests go through Ray: no shared disk is needed."""
    replica_cpus: float = option(1.0, above=0, most=1024, on_resume="free")
    """--launch ray: CPUs for each replica. With --device cuda it also takes a GPU."""
    engine_restarts: int = option(5, least=0, on_resume="free")
    """Consecutive restarts of an engine before it is given up. When none is left, the run saves and ends."""


@dataclass(frozen=True)
class RL(
    AlgorithmGroup,
    EngineGroup,
    StepRewardGroup,
    EnvWorkerGroup,
    EpisodeGroup,
    CurriculumGroup,
    SamplingGroup,
    MixtureGroup,
    MixtureWeightsGroup,
    Training,
):
    """Reinforcement learning from a reward function, a verifier or an environment."""

    algorithm_kind = Algorithm
    out: str = "runs/rl"
    algorithm: str = "grpo"
    """Algorithm: grpo, dapo, ppo ... (`posttrain algorithms` lists all), or your own as my.py:name."""
    critic: Literal["separate", "shared"] | None = option(None, group="algorithm")
    """Algorithms with a critic: a backbone of its own, or a head on the policy's. Default: separate."""
    critic_model: str | None = option(None, group="algorithm", value="FOLDER")
    """Model that the critic starts from: a checkpoint, a reward model, or the critic of a run. Default: --model."""
    critic_lr: float | None = option(None, above=0, group="algorithm")
    """Peak learning rate of the critic. Default: --lr."""
    ptx: str | None = option(None, group="algorithm", value="ROWS")
    """Rows whose likelihood is part of every update (ppo-ptx): texts, or prompts with responses."""
    steps: int = option(200, above=0, group="optimisation", first_hour=True, on_resume="free")
    """Training steps. Each samples, scores and updates."""
    prompts: int = option(16, above=0, most=1_000_000, group="sampling", first_hour=True)
    """Prompts per step."""
    group: int = option(8, above=0, most=1_000_000, group="sampling", first_hour=True)
    """Group size: rollouts per prompt."""
    epsilon_greedy: float = option(0.0, least=0, below=1, group="sampling")
    """Probability E of a token that is drawn uniformly from the vocabulary instead of from the policy (0: none). The
    sampler's probability is then (1 - E) p + E / V, by which a --correction, or a ratio with --old-policy sampler, divides.
    Evaluations draw from the policy alone."""
    async_steps: int = option(0, least=0, most=1000, group="sampling")
    """Sample this many steps ahead of the update (0: synchronous). Rollouts then come from older weights. A
    --correction, or a ratio with --old-policy sampler, corrects most of the bias; a weight per token is exact only for
    replies of one token."""
    tokens_per_step: int = option(0, least=0, group="sampling")
    """Maximum number of tokens of a reply that one step samples (0: no limit). A longer reply continues in the next
    step, with newer weights; its group enters an update once all its replies are complete. For environments of one
    turn."""
    routing_replay: bool = option(False, group="sampling")
    """Mixtures of experts: update each token with the experts that computed it during sampling."""
    lr: float = option(1e-6, above=0)
    success: float | None = option(None, group="environment", value="REWARD", first_hour=True)
    """Reward from which a reply counts as right. It defines accuracy and pass@k. Default: the environment's own SUCCESS.
    Algorithms that imitate right replies use it too."""
    eval_samples: int = option(1, above=0, most=100_000, group="evaluation")
    """Replies per held-out task in each evaluation."""
    eval_limit: int = option(500, above=0, group="evaluation")
    """Maximum number of held-out tasks in an evaluation, of each set or part of a mixture."""

    def chooses(self, flag: str) -> bool:
        """Whether a setting of the algorithm is the run's own choice, by its flag or by its place."""
        named = {flag, *(".".join(place) for place, _ in flags(Algorithm)[flag].places)}
        return any(name.replace("-", "_") in named or name in named for name in self.settings)


@dataclass(frozen=True)
class Distill(RL):
    """On-policy distillation: the student samples, a teacher scores each token."""

    out: str = "runs/distill"
    env: str = option("", first_hour=False)
    """Reward function or environment to use beside the teacher, as in rl. Without one, replies are only sampled. The
    distillation algorithms report its rewards and learn nothing from them unless --advantage is set."""
    algorithm: str = "distill-reverse-kl"
    """Algorithm: distill-reverse-kl, distill-forward-kl, distill-jsd, distill-k1, or one of rl. Those of rl (grpo ...) learn
    from rewards and the teacher."""
    teacher: str | None = option(None, group="model", first_hour=True, value="MODEL")
    """Teacher: the folder of a checkpoint or of a run, of any size, with the student's tokenizer. For distill-k1, or
    with --teacher-top-k, also an OpenAI-compatible endpoint: http://host:8000/v1, or http://host:8000/v1#MODEL."""
    teachers: dict[str, str] = option(factory=dict, group="model", value="MODEL")
    """Teachers that tasks choose with a column "teacher": --teachers.maths runs/maths --teachers.code runs/code. Tasks
    without a choice use --teacher."""
    teacher_prompt_template: str | None = option(None, group="data")
    """Prompt for the teacher in place of the student's, built from columns: "{hint} {prompt}". A column
    "teacher_prompt" (text, or a list of messages) does the same."""
    prompts: int = option(64, above=0, most=1_000_000)
    group: int = option(1, above=0, most=1_000_000)
    """Rollouts per prompt; one is enough for algorithms that do not compare rollouts."""
    lr: float = option(1e-5, above=0)
