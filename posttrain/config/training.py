"""Options of what trains: sft, prefer, reward-model, rl and distill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.preference import Preference
from posttrain.algorithms.reward_model_table import Scoring
from posttrain.algorithms.settings import flags
from posttrain.config.row_options import Data, Precision
from posttrain.config.service_options import play_the_only_service
from posttrain.core.component import option


@dataclass(frozen=True)
class Training(Data):
    """What every kind of training has."""

    model: str | None = None
    """Folder of a Hugging Face checkpoint, of one of our runs, or a model's name. In sft: leave it out to start from
    scratch with the sizes below."""
    out: str = "runs/latest"
    """The run directory to make."""
    resume: bool = False
    """Continue the run in --out from its newest undamaged checkpoint, exactly."""
    accept_changes: bool = False
    """Resume even though tasks, model or reward have changed, or part of the record is lost; run.json notes it."""
    overwrite: bool = False
    """Delete a run that is already in --out."""
    seed: int = option(0, least=-(2**62), most=2**62)
    """Decides data order, sampling and initial weights."""
    held_out: float = option(0.0, least=0, below=1)
    """Share of the tasks kept out of training and used for evaluation."""
    split_seed: int | None = option(None, least=-(2**62), most=2**62)
    """Decides which tasks are held out; default: --seed. Runs with different seeds that are to be compared on the same
    tasks need the same one."""
    eval_every: int = option(0, least=0)
    """Steps between evaluations on the held-out tasks (0: before and after training only)."""
    save_every: int = option(50, above=0)
    """Steps between checkpoints; one more is made at the end."""
    keep: int = option(2, above=0)
    """How many checkpoints to keep."""
    record: Literal["tokens", "sample", "full"] = "sample"
    """What is recorded of single tokens. tokens: ids, and the engine's log-probabilities; sample: of 8 groups a step, drawn
    by the seed, also what the update made of them (the learner's and the reference's log-probabilities, entropy, weight in
    the loss ...); full: of all groups. No result depends on it."""
    record_after: bool = False
    """Record also the log-probabilities of these tokens under the weights that the step ends with: one more forward pass
    over their groups."""
    tokens_per_microbatch: int | None = option(None, above=0)
    """How many tokens go through the model at once, beside a prompt: the memory of an update. No result depends on it.
    Default: 1024 on a CPU, 8192 elsewhere."""
    lr: float = option(1e-5, above=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up; linear and cosine end at 0."""
    warmup: int = option(0, least=0)
    """Updates over which the learning rate rises."""
    weight_decay: float = option(0.0, least=0)
    """Decoupled weight decay of matrices."""
    betas: tuple[float, float] = option((0.9, 0.999), least=0, below=1)
    """AdamW's moment decay rates."""
    max_grad_norm: float = option(1.0, least=0)
    """Gradients are clipped to this norm (0: no clipping)."""
    router_balance: float = option(0.0, least=0)
    """Mixtures of experts: coefficient of the loss that balances the load of experts (Switch: 0.01). It is of the whole
    optimizer batch."""
    router_z: float = option(0.0, least=0)
    """Mixtures of experts: coefficient of the loss that keeps the router's logits small (ST-MoE: 0.001)."""
    lora: int | None = option(None, above=0, most=65_536)
    """Train low-rank adapters of this rank (LoRA) instead of the weights, which stay as they are: a fraction of the memory
    of gradients and moments. Checkpoints hold the adapters, in PEFT's form. A run that begins with an adapter goes on with
    that."""
    lora_alpha: float | None = option(None, above=0, most=1e6)
    """What the adapters add is multiplied by alpha / rank; default: twice the rank (arXiv 2405.09673)."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """The matrices that are adapted: all-linear, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and
    down_proj."""
    quantize: Literal["nf4", "int8"] | None = None
    """With --lora: hold the frozen weights of the layers in four bits (NF4, as QLoRA does) or eight, and unpack them for
    each product."""
    rslora: bool = False
    """Divide alpha by the square root of the rank instead (rsLoRA): large ranks then learn as fast as small ones."""
    dora: bool = False
    """With --lora: let the length of each row of an adapted matrix learn by itself, and the adapters turn it (DoRA)."""
    precision: Precision = "float32"
    """Arithmetic of forward and backward passes; weights and moments stay in float32."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 ..."""
    threads: int | None = option(None, above=0)
    """CPU threads; default: PyTorch's choice."""
    compiled: bool = True
    """On a CPU, compile the inner loops where a C compiler is found; --no-compiled: use torch's operations alone."""
    health: Literal["warn", "stop", "log", "off"] = "warn"
    """What to do when something goes wrong (entropy collapse, length or KL blow-up, no signal, a reward that jumps, skipped
    updates): warn, stop with a checkpoint, only log it, or do not check. After 5 steps in a row whose updates were all
    skipped because their gradients were not finite, the run stops, unless this is off."""
    quiet: bool = False
    """No progress display."""
    train_vision: bool = False
    """Of a model that sees: train what makes features of pictures too (the tower, and what brings them to the width of the
    text); by default it stays as it is."""
    processes: int = option(1, above=0, most=1024)
    """Processes of this machine that share the run: each plays and computes its share, and holds the whole model. Several
    machines: start one process each with torchrun."""
    shard: bool = False
    """Deal the weights out to the processes, with gradients and moments: each holds its rows of every matrix, and gathers
    a layer when it is its turn."""
    patience: float = option(600.0, above=0, most=86_400)
    """Seconds within which each of several processes has to come to the next thing that they do together."""
    restarts: int = option(0, least=0)
    """How often several processes are started again, from the newest checkpoint, when one of them was killed or crashed."""


@dataclass(frozen=True)
class Passes(Training):
    """Training on given responses, in passes over the rows."""

    epochs: float = option(1.0, above=0)
    """Passes over the rows."""
    steps: int | None = option(None, above=0)
    """Optimizer updates, instead of --epochs; required for rows without end."""
    rows: int = option(32, above=0)
    """Prompts per optimizer update, each with all its responses."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate falls after the warm-up; linear and cosine end at 0."""


@dataclass(frozen=True)
class SFT(Passes):
    """Supervised fine-tuning: imitate the responses of a dataset."""

    verb = "sft"
    out: str = "runs/sft"
    """The run directory to make."""
    rows: int = option(16, above=0)
    """Rows per optimizer update."""
    mask_prompt: bool = True
    """Learn the responses only; --no-mask-prompt: the prompts too."""
    min_reward: float | None = None
    """Of rollouts that a run kept, and of replies that are played through --env: imitate those with this reward or more."""
    env_seconds: float = option(10.0, above=0, most=86_400)
    """Time limit of one call of the environment, as in rl."""
    env_memory: float = option(4.0, least=0)
    """Memory limit of the environment's process, in GiB, as in rl."""
    retriever: tuple[str, ...] = ()
    """What the environment asks for passages while replies are played: the folder of an index, or an address, as in rl."""
    lr: float = option(1e-4, above=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after the warm-up; linear and cosine end at 0."""
    hidden: int = option(128, above=0)
    """From scratch: width of the residual stream."""
    layers: int = option(4, above=0)
    """From scratch: number of layers."""
    heads: int = option(4, above=0)
    """From scratch: query heads."""
    kv_heads: int | None = option(None, above=0)
    """From scratch: key-value heads; default: as many as query heads."""
    intermediate: int | None = option(None, above=0)
    """From scratch: width of the feed-forward layers; default: 8/3 of hidden, rounded up to a multiple of 32."""
    context: int = option(512, above=1)
    """From scratch: most tokens of prompt and reply together."""
    tokenizer: str = "bpe"
    """From scratch: bpe or characters, trained on the rows; or a folder to take one from."""
    vocab: int = option(4096, above=0)
    """From scratch: most entries of the tokenizer to train."""


@dataclass(frozen=True)
class Prefer(Passes):
    """Learning from comparisons: make the better of two responses likelier, without sampling any."""

    verb = "prefer"
    row = Preference
    out: str = "runs/prefer"
    """The run directory to make."""
    algorithm: str = "dpo"
    """A row of the table (see `posttrain algorithms`), or your own: my.py:row."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Changes to the row, by flag or by place: {"beta": 0.2, "link.smoothing": 0.1}."""
    lr: float = option(1e-6, above=0)
    """Peak learning rate of AdamW."""


@dataclass(frozen=True)
class RewardModelling(Passes):
    """A reward model: a head on a language model that says how good a reply is, learned from what people prefer."""

    verb = "reward-model"
    row = Scoring
    out: str = "runs/reward-model"
    """The run directory to make."""
    algorithm: str = "bradley-terry"
    """A row of the table: bradley-terry, k-wise, plackett-luce, outcome (labels, also of steps), regression; or your own:
    my.py:row."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Changes to the row, by flag or by place."""
    pooling: Literal["last", "mean"] = "last"
    """What is scored: the last token of a reply, or the mean over all of them (which transformers cannot load)."""
    head: Literal["linear", "mlp"] = "linear"
    """The head: one linear layer, or two with a tanh between (which transformers cannot load)."""
    epochs: float = option(1.0, above=0)
    """Passes over the rows. More than one overfits soon (InstructGPT took one)."""


@dataclass(frozen=True)
class RL(Training):
    """Reinforcement learning: sample replies, score them, make good ones likelier."""

    verb = "rl"
    row = Algorithm
    out: str = "runs/rl"
    """The run directory to make."""
    algorithm: str = "grpo"
    """A row of the table (see `posttrain algorithms`), or your own: my.py:row."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Changes to the row, by flag or by place: {"clip_high": 0.28, "advantage.eps": 1e-4}."""
    critic: Literal["separate", "shared"] | None = None
    """For rows with a critic of states: a backbone of its own (the default), or a head on the policy's."""
    critic_model: str | None = None
    """Folder the critic's backbone starts from: a checkpoint, a reward model, or the critic of a run; default: --model."""
    critic_lr: float | None = option(None, above=0)
    """Peak learning rate of the critic; default: --lr."""
    ptx: str | None = None
    """Rows of text, or of prompts and responses, whose likelihood is part of every update (ppo-ptx)."""
    steps: int = option(200, above=0)
    """Training steps."""
    prompts: int = option(16, above=0, most=1_000_000)
    """Tasks per step."""
    group: int = option(8, above=0, most=1_000_000)
    """Rollouts per task."""
    max_tokens: int = option(256, above=0)
    """Token budget of a reply."""
    max_episode_tokens: int | None = option(None, above=0)
    """Environments of several turns: token budget of all replies of an episode together; default: none."""
    max_turns: int = option(64, above=0)
    """Environments of several turns: how many replies an episode may have."""
    max_tool_calls: int | None = option(None, least=0)
    """Environments of several turns: how many answers of tools an episode may show; default: no limit."""
    episode_seconds: float | None = option(None, above=0)
    """Environments of several turns: an episode that has taken so long shows no further turn. Results then depend on the
    clock; default: no limit."""
    ahead: int = option(0, least=0, most=1000)
    """How many steps before it is learned from a step is played, beside the updates, by weights that are as much older
    (0: by the newest). A --correction, or a ratio with --old-policy sampler, makes up for most of that: only for replies of
    one token is a weight per token exact."""
    tokens_per_step: int = option(0, least=0)
    """Most tokens of a reply that one step samples; an unfinished one goes on in the next step, with newer weights, and its
    group is learned from when the last of its replies is whole (0: no limit). For environments of one reply."""
    routing_replay: bool = False
    """Mixtures of experts: tokens are learned from with the experts that sampled them, whatever the router would choose by
    now. With the embedded engine."""
    temperature: float = option(1.0, least=0)
    """Of sampling; log-probabilities are taken under the same temperature."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply."""
    top_p: float = option(1.0, above=0, most=1)
    """Must stay 1 in training: it would change the distribution that is sampled."""
    top_k: int = option(0, least=0, most=10**9)
    """Must stay 0 in training."""
    lr: float = option(1e-6, above=0)
    """Peak learning rate of AdamW."""
    eval_tasks: str | None = None
    """Rows to evaluate on, instead of a held-out share of --tasks."""
    eval_samples: int = option(1, above=0)
    """Replies per held-out task in each evaluation."""
    eval_limit: int = option(500, above=0)
    """How many held-out tasks an evaluation plays at most."""
    success: float | None = None
    """Replies with at least this reward are right, for accuracy, pass@k and whatever learns from right replies; default:
    what a built-in environment, or SUCCESS = ... beside your own, says."""
    env_workers: int | None = option(None, least=0, most=1024)
    """Processes that play and score; default: one per CPU core (0: none; everything runs here, without
    limits, for debuggers)."""
    env_seconds: float = option(10.0, above=0, most=86_400)
    """Time limit of one call of the environment; beyond it the reward is invalid."""
    env_memory: float = option(4.0, least=0)
    """Memory limit of each of these processes, in GiB; beyond it the reward is invalid (0: no limit)."""
    reward_model: tuple[str, ...] = ()
    """Folder of a reward model (a sequence-classification checkpoint of one label), which environments ask as
    "reward-model"; without --env, its score is the reward. Of several, NAME=FOLDER is asked by its name."""
    judge: tuple[str, ...] = ()
    """Recipe (TOML) of a judge, which environments ask as "judge": a model behind an OpenAI-compatible endpoint, or a
    checkpoint that reasons before its verdict. Without --env, its verdict is the reward. Of several, NAME=RECIPE is asked
    by its name."""
    retriever: tuple[str, ...] = ()
    """What environments ask as "retriever" for passages: the folder of an index (posttrain retriever build), or the address
    of a server that speaks Search-R1's protocol (http://host:8000). Of several, NAME=FOLDER is asked by its name."""
    slots: int = option(256, above=0)
    """How many replies are sampled at once: bounds the memory of the key-value cache."""
    engine: Literal["local", "vllm"] = "local"
    """What samples: local, with the learner's own weights, or vLLM in a process of its own."""
    engine_cache: float = option(4.0, above=0)
    """In GiB. vLLM: limit of its key-value cache. local: of what is kept of episodes between their turns; what is let go is
    computed again, to the same bits."""
    engine_seconds: float = option(120.0, above=0, most=86_400)
    """Engines in other processes: time limit of a hand-over of weights, and of a decoding step. Beyond it one of several is
    started again, and the only one ends the run."""
    replicas: int = option(0, least=0, most=1024)
    """Sample with so many engines, each a process of this machine with a copy of the weights; 0: with the learner's own,
    in its process (vLLM: one process). No token depends on it, and one that dies is replaced."""
    handover: Literal["copied", "adapter", "nccl", "ipc"] = "copied"
    """How weights reach vLLM: copied, all of them through memory of the machine, adapters merged; adapter, with --lora, the
    frozen ones once and then the adapters alone. With --replicas on cards: nccl, from card to card; ipc, within one card.
    These two are vLLM's own and have not been tried on cards yet."""
    launch: Literal["local", "ray"] = "local"
    """Where --replicas are processes: local, this machine, or ray, wherever a Ray cluster has room (RAY_ADDRESS; else one
    of this machine is made). Other machines have to see --out under the same path."""
    replica_cpus: float = option(1.0, above=0, most=1024)
    """--launch ray: CPUs that each replica takes of the cluster; with --device cuda it takes a GPU too."""
    engines: tuple[str, ...] = ()
    """Sample with engines that listen (posttrain engine --listen), here or on other machines: HOST:PORT. They need to see
    --out under the same path, where the weights for them lie."""
    engine_token: str | None = None
    """File with what engines that listen want to know; default: POSTTRAIN_ENGINE_TOKEN in the environment."""
    engine_restarts: int = option(5, least=0)
    """How often in a row each of several engines is started again. When none is left, the run saves and ends."""

    def __post_init__(self) -> None:
        play_the_only_service(self)

    def chooses(self, flag: str) -> bool:
        """Whether a setting of the row is the run's own choice, by its flag or by its place."""
        named = {flag, *(".".join(place) for place, _ in flags(Algorithm)[flag].places)}
        return any(name.replace("-", "_") in named or name in named for name in self.settings)


@dataclass(frozen=True)
class Distill(RL):
    """On-policy distillation: the student samples, a teacher says what each of its tokens is worth."""

    verb = "distill"
    out: str = "runs/distill"
    """The run directory to make."""
    env: str = ""
    """What scores replies beside the teacher, as in rl; without one they are only sampled. The rows of distillation report
    its rewards and learn nothing from them, unless --advantage says how."""
    algorithm: str = "distill-reverse-kl"
    """A row of the table: distill-reverse-kl, distill-forward-kl, distill-jsd, distill-k1, or one that learns from rewards
    (grpo ...), to which the teacher is added."""
    teacher: str | None = None
    """Folder of the teacher: a checkpoint or a run, with the student's tokenizer; of any size. For distill-k1 also an
    OpenAI-compatible endpoint: http://host:8000/v1, or http://host:8000/v1#MODEL."""
    teachers: dict[str, str] = field(default_factory=dict)
    """Teachers that tasks choose by the column "teacher": --teachers.maths runs/maths --teachers.code runs/code. Tasks
    without a choice have --teacher."""
    teacher_prompt_template: str | None = None
    """What the teacher reads instead of the prompt, made from columns: "{hint} {prompt}". Or a column "teacher_prompt":
    text, or a list of messages."""
    prompts: int = option(64, above=0, most=1_000_000)
    """Tasks per step."""
    group: int = option(1, above=0, most=1_000_000)
    """Rollouts per task: one is enough where none are compared."""
    lr: float = option(1e-5, above=0)
    """Peak learning rate of AdamW."""
