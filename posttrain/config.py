"""Every option of every verb: frozen dataclasses, one field an option, documented where it is declared.

The command line, recipes (TOML) and the Python front door all fill in these and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.preference import Preference
from posttrain.algorithms.row import Row
from posttrain.algorithms.scoring import Scoring
from posttrain.algorithms.settings import Flag, flags
from posttrain.part import option
from posttrain.types import UserError

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class FromRows:
    """Where rows come from."""

    verb: ClassVar[str]  # of the command line, and the table of a recipe
    row: ClassVar[type[Row] | None] = None  # of which kind the rows are whose settings are options of this verb too

    @classmethod
    def flags(cls) -> dict[str, Flag]:
        """The flags of its rows' settings, by name."""
        return flags(cls.row) if cls.row is not None else {}

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Notes which options were given: when a run is resumed, one left at its default is not changed."""
        config = super().__new__(cls)
        object.__setattr__(config, "_given", frozenset(options))  # no field: equal options are equal configurations
        return config

    @property
    def given(self) -> frozenset[str]:
        """The names of the options that were given, whatever their values."""
        given: frozenset[str] = self.__dict__["_given"]
        return given

    tasks: str = ""
    """Rows: a .jsonl, .json, .csv or .parquet file, a folder, the name of a dataset, or a function that makes rows without
    end: my.py:rows."""
    split: str | None = None
    """Which split of a dataset that has several."""
    limit: int | None = option(None, above=0)
    """Read only this many rows, the first ones."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names of columns: --fields.prompt question --fields.answer solution. A reward finds them under both names."""
    prompt_template: str | None = None
    """A prompt made from columns: "Question: {question}\\nAnswer:". A brace is {{ or }}. On the
    command line \\n and \\t are read as a new line and a tab."""


@dataclass(frozen=True)
class Data(FromRows):
    """Rows, and how they become tasks of a model."""

    response_template: str | None = None
    """A response made from columns, in the same way (sft)."""
    too_long: Literal["skip", "truncate", "refuse"] = "skip"
    """What happens to rows that do not fit the model's context (in rl: prompts that leave no room for a reply). skip:
    they are left out and counted; truncate: prompts lose their beginning, demonstrations their end, and what is shown later
    in an episode its middle; refuse: all are
    measured before the first step, and one of them ends the run."""
    env: str = ""
    """What plays and scores: my.py:reward, package.module:name, or a built-in name, perhaps with options of its own:
    search-qa,topk=5. Built in are adventure, arithmetic, calculator, code, code-all, countdown, gsm8k, guess, gymnasium,
    judge, math, openenv, python, reasoning-gym, reward-model, search-qa, textarena, verdict and word-problems. In sft, rows
    with replies are played through it; for other rows its row_to_task makes the demonstrations, if it has one."""
    chat_template: str | None = None
    """How messages and tools become text: a file of Jinja, or chatml. It takes the place of the model's own, and is written
    into the checkpoints of a run. Default: what the model's folder holds."""


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
    """Resume even though tasks or model have changed, or part of the record is lost; run.json notes it."""
    overwrite: bool = False
    """Delete a run that is already in --out."""
    seed: int = option(0, least=-(2**62), most=2**62)
    """Decides data order, sampling and initial weights."""
    held_out: float = option(0.0, least=0, below=1)
    """Share of the tasks kept out of training and used for evaluation."""
    eval_every: int = option(0, least=0)
    """Steps between evaluations on the held-out tasks (0: before and after training only)."""
    save_every: int = option(50, above=0)
    """Steps between checkpoints; one more is made at the end."""
    keep: int = option(2, above=0)
    """How many checkpoints to keep."""
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
    """vLLM: time limit of a hand-over of weights, and of one decoding step; beyond it the run stops."""

    def __post_init__(self) -> None:
        _play_the_only_service(self)


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


@dataclass(frozen=True)
class Evaluation(Data):
    """Play held-out tasks and say how well it goes, with intervals."""

    verb = "eval"
    model: str = ""
    """Folder of a checkpoint or of a run."""
    against: str | None = None
    """A second checkpoint: the two are compared task by task."""
    samples: int = option(8, above=0)
    """Replies per task."""
    k: tuple[int, ...] = option((1, 4, 8), above=0)
    """pass@k for these k."""
    temperature: float = option(1.0, least=0)
    """Of sampling; 0: greedy."""
    top_p: float = option(1.0, above=0, most=1)
    """Sample from the smallest set of tokens with this probability."""
    top_k: int = option(0, least=0, most=10**9)
    """Sample from this many likeliest tokens (0: all)."""
    max_tokens: int = option(256, above=0)
    """Token budget of a reply."""
    max_episode_tokens: int | None = option(None, above=0)
    """Token budget of all replies of an episode together; default: none."""
    max_turns: int = option(64, above=0)
    """How many replies an episode may have."""
    max_tool_calls: int | None = option(None, least=0)
    """How many answers of tools an episode may show; default: no limit."""
    episode_seconds: float | None = option(None, above=0)
    """An episode that has taken so long shows no further turn; default: no limit."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply."""
    success: float | None = None
    """Replies with at least this reward are right, as in training."""
    seed: int = option(0, least=-(2**62), most=2**62)
    """Decides the samples."""
    held_out: float = option(0.0, least=0, below=1)
    """Use only this held-out share of the tasks, as training with the same --held-out and --split-seed does."""
    split_seed: int = 0
    """The --seed of the training run that held them out."""
    out: str | None = None
    """A .json file for all figures and rewards; the rollouts go beside it, into a file that ends in .rollouts.jsonl."""
    env_workers: int | None = option(None, least=0, most=1024)
    """Processes that play and score; default: one per CPU core."""
    env_seconds: float = option(10.0, above=0, most=86_400)
    """Time limit of one call of the environment."""
    env_memory: float = option(4.0, least=0)
    """Memory limit of each of these processes, in GiB (0: no limit)."""
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
    """How many replies are sampled at once."""
    compiled: bool = True
    """As in training."""
    precision: Precision = "float32"
    """Arithmetic of the forward passes."""
    device: str = "auto"
    """auto, cpu, cuda ..."""
    threads: int | None = option(None, above=0)
    """CPU threads; default: PyTorch's choice."""

    def __post_init__(self) -> None:
        _play_the_only_service(self)


@dataclass(frozen=True)
class Chat:
    """Talk to a checkpoint (to one without a chat template: give it text to continue)."""

    system: str | None = None
    """A system message."""
    chat_template: str | None = None
    """How messages become text: a file of Jinja, or chatml; default: what the model's folder holds."""
    temperature: float = option(0.7, least=0)
    """Of sampling; 0: greedy."""
    max_tokens: int = option(256, above=0)
    """Most tokens of a reply."""
    reward_model: tuple[str, ...] = ()
    """Folder of a reward model: its score of each reply is shown. Of several, NAME=FOLDER is shown by its name."""
    judge: tuple[str, ...] = ()
    """Recipe (TOML) of a judge that scores: its verdict on each reply is shown. Of several, NAME=RECIPE is shown by its
    name."""
    device: str = "auto"
    """auto, cpu, cuda ..."""
    threads: int | None = option(None, above=0)
    """CPU threads; default: PyTorch's choice."""


@dataclass(frozen=True)
class ServePolicy:
    """Answer requests over HTTP with what a checkpoint samples: token ids in and out, and OpenAI's forms on top."""

    model: str = ""
    """Folder of a checkpoint or of a run."""
    port: int = option(8000, least=0, most=65_535)
    """Of this machine; the server hears nobody else. 0: any that is free."""
    name: str | None = None
    """What clients call the model; default: the text of --model."""
    chat_template: str | None = None
    """How messages become text: a file of Jinja, or chatml; default: what the model's folder holds."""
    max_tokens: int | None = option(None, above=0)
    """Most tokens of a reply, whatever a request asks; default: as many as the context holds."""
    requests: int = option(1024, above=0, most=1_000_000)
    """Replies that are under way at once; who asks beyond them is told to come back (429)."""
    slots: int = option(256, above=0)
    """How many replies are sampled at once: bounds the memory of the key-value cache."""
    engine: Literal["local", "vllm"] = "local"
    """What samples: local, this process, or vLLM in a process of its own."""
    engine_cache: float = option(4.0, above=0)
    """vLLM: limit of its key-value cache, in GiB."""
    engine_seconds: float = option(120.0, above=0, most=86_400)
    """vLLM: time limit of one decoding step; beyond it the server ends."""
    compiled: bool = True
    """As in training."""
    precision: Precision = "float32"
    """Arithmetic of the forward passes."""
    device: str = "auto"
    """auto, cpu, cuda ..."""
    threads: int | None = option(None, above=0)
    """CPU threads; default: PyTorch's choice."""


@dataclass(frozen=True)
class Check(Data):
    """Run a reward or an environment against sample replies, before any training."""

    verb = "check"
    model: str | None = None
    """Folder of a checkpoint or of a run: also try how its tokenizer and chat template show what the environment shows, and
    whether that fits its context. No weights are read."""
    limit: int | None = option(4, above=0)
    """Read only the first so many rows; the first few tasks are tried."""
    replies: str | None = None
    """A text file of sample replies, one a line; default: the task's own answer and some hostile ones."""
    verbose: bool = False
    """Show every task and case, and texts as a whole; default: the first task, and what is wrong with the others."""
    env_seconds: float = option(10.0, above=0, most=86_400)
    """Time limit of one call of the environment, as in training."""
    env_memory: float = option(4.0, least=0)
    """Memory limit of the environment's process, in GiB, as in training."""
    reward_model: tuple[str, ...] = ()
    """As in training; without it, an environment that asks one gets made-up answers."""
    judge: tuple[str, ...] = ()
    """As in training; without it, an environment that asks one gets made-up answers."""
    retriever: tuple[str, ...] = ()
    """As in training; without it, an environment that asks one gets made-up passages."""

    def __post_init__(self) -> None:
        _play_the_only_service(self)


@dataclass(frozen=True)
class Sample(Data):
    """Sample replies to every prompt, over a grid of settings, and write them as items to be labelled or learned from."""

    verb = "sample"
    model: tuple[str, ...] = ()
    """Folder of a checkpoint or of a run; of several, each replies to every prompt. All are in memory at once."""
    samples: int = option(4, above=0, most=1024)
    """Replies per prompt for each model, temperature, top-p and seed."""
    temperature: tuple[float, ...] = option((1.0,), least=0)
    """Of sampling; several: each of them. 0 is greedy, one reply."""
    top_p: tuple[float, ...] = option((1.0,), above=0, most=1)
    """Sample from the smallest set of tokens with this probability; several: each of them."""
    top_k: int = option(0, least=0, most=10**9)
    """Sample from this many likeliest tokens (0: all)."""
    seed: tuple[int, ...] = option((0,), least=-(2**62), most=2**62)
    """Decides the samples; several: each of them."""
    max_tokens: int = option(256, above=0)
    """Token budget of a reply."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply."""
    kind: str = ""
    """The column that names the kind of a prompt, where kinds have settings of their own."""
    kinds: dict[str, dict[str, str]] = field(default_factory=dict)
    """Settings by kind of prompt, instead of those above: --kinds.code.temperature 0.2,0.6 --kinds.code.max_tokens 512, or
    a table [sample.kinds.code]. They are samples, temperature, top_p, top_k, max_tokens and stop."""
    adaptive: int | None = option(None, above=1, most=1024)
    """Sample up to this many (in the place of --samples) for prompts whose first --samples replies disagree."""
    disagreement: float = option(0.5, least=0)
    """With --adaptive: from where on replies disagree. With an environment or a reward model, the highest score minus the
    lowest; else 1 minus the mean edit similarity of two replies, from 0 to 1."""
    distinct: bool = False
    """Keep equal replies to a prompt once, with how often they came (times)."""
    out: str = "items.jsonl"
    """The file to write, a line of JSON for each prompt."""
    resume: bool = False
    """Continue the file in --out after its last whole line; with the same options, tasks and models only."""
    overwrite: bool = False
    """Replace a file that is already in --out."""
    env_workers: int | None = option(None, least=0, most=1024)
    """Processes that play and score; default: one per CPU core."""
    env_seconds: float = option(10.0, above=0, most=86_400)
    """Time limit of one call of the environment."""
    env_memory: float = option(4.0, least=0)
    """Memory limit of each of these processes, in GiB (0: no limit)."""
    reward_model: tuple[str, ...] = ()
    """Folder of a reward model, whose scores are written beside the replies; as in evaluation."""
    judge: tuple[str, ...] = ()
    """Recipe (TOML) of a judge, whose scores are written beside the replies; as in evaluation."""
    retriever: tuple[str, ...] = ()
    """What environments ask for passages: the folder of an index, or the address of a server; as in evaluation."""
    slots: int = option(256, above=0)
    """How many replies are sampled at once."""
    compiled: bool = True
    """As in training."""
    precision: Precision = "float32"
    """Arithmetic of the forward passes."""
    device: str = "auto"
    """auto, cpu, cuda ..."""
    threads: int | None = option(None, above=0)
    """CPU threads; default: PyTorch's choice."""
    quiet: bool = False
    """No progress lines."""

    def __post_init__(self) -> None:
        _play_the_only_service(self)


@dataclass(frozen=True)
class Label(FromRows):
    """Say how good the responses of items are: by a reward model, a judge, a function or a person; write best or pairs."""

    verb = "label"
    tasks: str = ""
    """The same as --items."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names of columns: --fields.prompt question --fields.chosen better."""
    items: str = ""
    """Rows with responses, in any form of preference data, or as posttrain sample writes them."""
    with_: str = ""
    """What labels: reward-model=FOLDER, judge=RECIPE.toml, or my.py:reward. Left out: what the items say already."""
    human: bool = False
    """A person labels, in this terminal: replies are shuffled and ranked."""
    rater: str = ""
    """Who that is: a name that is written beside each label."""
    agreement: tuple[str, str] | None = None
    """Two files of labels for the same items: says how far they agree."""
    out: str = "labelled.jsonl"
    """The file to write: the items with "scores", "comparisons" or "ranks"."""
    resume: bool = False
    """Continue the file in --out after its last whole line; with the same items and labeller only."""
    overwrite: bool = False
    """Replace files that are already there."""
    best: str | None = None
    """Also write this file: prompts with their best responses, for sft."""
    top: int = option(1, above=0)
    """With --best: how many responses of a prompt, the best first."""
    at_least: float | None = None
    """With --best: only responses with at least this score."""
    pairs: str | None = None
    """Also write this file: rows with prompt, chosen and rejected, for prefer and reward-model."""
    pair: Literal["extremes", "random"] = "extremes"
    """With --pairs: the best against the worst response of a prompt, or a random pair."""
    margin: float = option(0.0, least=0)
    """With --pairs: the scores of the two differ by at least so much."""
    flip: float = option(0.0, least=0, most=1)
    """Turn comparisons round with this probability: noise for experiments."""
    comparisons: int | None = option(None, above=0)
    """Pairwise judges: compare at most so many pairs of responses to a prompt, drawn at random; default: all."""
    seed: int = option(0, least=-(2**62), most=2**62)
    """Decides random pairs, flips, and the order in which a person sees replies."""
    env_workers: int | None = option(None, least=0, most=1024)
    """Processes that score; default: one per CPU core."""
    env_seconds: float = option(10.0, above=0, most=86_400)
    """Time limit of one call of the reward function."""
    env_memory: float = option(4.0, least=0)
    """Memory limit of each of these processes, in GiB (0: no limit)."""
    device: str = "auto"
    """Of a reward model: auto, cpu, cuda ..."""
    threads: int | None = option(None, above=0)
    """CPU threads; default: PyTorch's choice."""

    def __post_init__(self) -> None:
        if self.items and self.tasks and self.items != self.tasks:
            raise UserError("--items and --tasks are the same option: give one of them")
        object.__setattr__(self, "tasks", self.items or self.tasks)

    @property
    def env(self) -> str:
        """What the environment is that asks the service, or scores."""
        return self.service or ("" if re.match(r"[\w-]*=", self.with_) else self.with_)

    @property
    def service(self) -> str:
        """The service that labels, "reward-model" or "judge"; "": none."""
        kind, equals, file = self.with_.partition("=")
        return kind if equals and file and kind in LABELLERS else ""

    @property
    def reward_model(self) -> tuple[str, ...]:
        return (self.with_.partition("=")[2],) if self.service == "reward-model" else ()

    @property
    def judge(self) -> tuple[str, ...]:
        return (self.with_.partition("=")[2],) if self.service == "judge" else ()


@dataclass(frozen=True)
class RetrieverBuild:
    """Make an index of passages: of their words (BM25), or with an encoder of their vectors."""

    passages: str = ""
    """Rows with title and text, or with contents, and perhaps an id: a file, a folder or the name of a dataset."""
    out: str = "runs/index"
    """The folder of the index. It appears whole, or not at all."""
    split: str | None = None
    """Which split of a dataset that has several."""
    limit: int | None = option(None, above=0)
    """Read only this many rows, the first ones."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names of columns: --fields.text body --fields.title heading."""
    k1: float = option(0.9, least=0, most=100)
    """BM25: how soon the count of a word in a passage is enough."""
    b: float = option(0.4, least=0, most=1)
    """BM25: how much long passages count less, from 0 to 1."""
    encoder: str | None = None
    """Dense: the folder of an encoder that transformers loads, or a function my.py:encode(texts, kind), where kind is query
    or passage, that returns an array, a row for each text."""
    pooling: Literal["mean", "first", "last"] = "mean"
    """Folder of an encoder: which hidden states are the vector: the mean of all, that of the first token (CLS), or that of
    the last."""
    normalised: bool = True
    """Folder of an encoder: vectors of length 1, so that products are cosines."""
    query_prefix: str = ""
    """Folder of an encoder: what stands before a query, such as "query: "."""
    passage_prefix: str = ""
    """Folder of an encoder: what stands before a passage, such as "passage: "."""
    longest: int = option(256, above=0)
    """Folder of an encoder: tokens of a text that are read."""
    faiss: str | None = None
    """Dense: a kind of FAISS index (Flat, HNSW32, "IVF256,PQ32" ...); default: plain products with every vector."""
    device: str = "auto"
    """Folder of an encoder: auto, cpu, cuda ..."""
    overwrite: bool = False
    """Replace an index that is already in --out."""


@dataclass(frozen=True)
class RetrieverServe:
    """Serve an index over HTTP, by the protocol of Search-R1, until it is interrupted."""

    host: str = "127.0.0.1"
    """The address it is bound to. There is no key: whoever reaches it may ask."""
    port: int = option(8000, least=0, most=65_535)
    """The port; 0: any that is free, which is printed."""
    topk: int = option(3, above=0, most=100)
    """Passages for a query that does not say how many."""
    encoder: str | None = None
    """Of a dense index, where the encoder has moved since it was built."""


OF_RETRIEVERS = (RetrieverBuild, RetrieverServe)
"""What posttrain retriever is given."""

LABELLERS = ("reward-model", "judge")
"""Services that label."""


VERBS: dict[str, type[FromRows]] = {
    kind.verb: kind for kind in (SFT, Prefer, RewardModelling, RL, Distill, Evaluation, Check, Sample, Label)
}
"""The verbs that take a configuration; a recipe has a table for each."""

OF_ONE_CALL = frozenset({"out", "resume", "accept_changes", "overwrite", "quiet"})
"""Options that a continued run does not take over."""

FREE_TO_CHANGE = frozenset(
    {
        "steps",
        "save_every",
        "keep",
        "threads",
        "env_workers",
        "env_seconds",
        "env_memory",
        "engine_seconds",
        "health",
        "retriever",
    }
)
"""Options that a continued run takes over unless they are given anew."""


SCORERS = ("reward_model", "judge")
"""Options that name services which say how good a reply is."""

SERVICES = (*SCORERS, "retriever")
"""Options that name services."""


def named_services(values: Sequence[str], kind: str) -> list[tuple[str, str]]:
    """(name, file or folder) of each service of an option: "NAME=FOLDER", or "FOLDER" for the one called as its kind."""
    found = [re.fullmatch(r"(?:([A-Za-z][\w-]*)=)?(.+)", value) for value in values]
    if any(match is None for match in found):
        raise UserError(f"--{kind} is empty: leave it out, or give a file or folder")
    return [(match[1] or kind, match[2]) for match in found if match]


def _play_the_only_service(config: RL | Evaluation | Check | Sample) -> None:
    """Without an environment, a reward model or a judge alone is one."""
    given = [(kind.replace("_", "-"), value) for kind in SCORERS for value in getattr(config, kind)]
    if not config.env and len(given) == 1:
        [(kind, value)] = given
        [(name, _)] = named_services([value], kind)
        if name == kind:
            object.__setattr__(config, "env", kind)
