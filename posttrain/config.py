"""Every option of every verb: frozen dataclasses, one field an option, documented where it is declared.

The command line, recipes (TOML) and the Python front door all fill in these and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from posttrain.types import UserError

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Data:
    """Where the rows come from and how they become tasks."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Notes which options were given: when a run is resumed, one left at its default is no wish to change it."""
        config = super().__new__(cls)
        object.__setattr__(config, "_given", frozenset(options))  # no field: equal options are equal configurations
        return config

    @property
    def given(self) -> frozenset[str]:
        """The names of the options that were given, whatever their values."""
        given: frozenset[str] = self.__dict__["_given"]
        return given

    tasks: str = ""
    """Rows: a .jsonl, .json, .csv or .parquet file, a folder, or the name of a dataset."""
    split: str | None = None
    """Which split of a dataset that has several."""
    limit: int | None = None
    """Read only the first so many rows."""
    fields: dict[str, str] = field(default_factory=dict)
    """What the columns are called: --fields.prompt question --fields.answer solution."""
    prompt_template: str | None = None
    """The prompt as made from columns: "Question: {question}\\nAnswer:"."""
    response_template: str | None = None
    """The response as made from columns (sft)."""
    env: str = ""
    """What plays and scores: my.py:reward, package.module:name, or a built-in name (arithmetic, gsm8k, math,
    word-problems). In sft only its row_to_task is used, if it has one."""


@dataclass(frozen=True)
class Training(Data):
    """What every kind of training has."""

    verb: ClassVar[str]  # of the command line, and the table of a recipe

    model: str | None = None
    """Folder of a Hugging Face checkpoint, of one of our runs, or a model's name. In sft: leave it out to start from
    scratch with the sizes below."""
    out: str = "runs/latest"
    """The run directory to make."""
    resume: bool = False
    """Continue the run in --out from its newest undamaged checkpoint, exactly."""
    accept_changes: bool = False
    """Resume although tasks or model are not what the run began with, or part of its record is lost; run.json says so."""
    overwrite: bool = False
    """Delete a run that is already in --out."""
    seed: int = 0
    """Decides data order, sampling and initial weights."""
    held_out: float = 0.0
    """Share of the tasks kept out of training and used for evaluation."""
    eval_every: int = 0
    """Steps between evaluations on the held-out tasks (0: before and after training only)."""
    save_every: int = 50
    """Steps between checkpoints; one more is made at the end."""
    keep: int = 2
    """How many checkpoints stay on the disk."""
    tokens_per_microbatch: int | None = None
    """How many tokens go through the model at once, beside a prompt: the memory of an update. No result depends on it.
    Left out: 1024 on a processor, 8192 elsewhere."""
    lr: float = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up; linear and cosine end at 0."""
    warmup: int = 0
    """Updates over which the learning rate rises."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decay rates."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm (0: not at all)."""
    precision: Precision = "float32"
    """Arithmetic of forward and backward passes; weights and moments stay in float32."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 ..."""
    threads: int | None = None
    """Processor threads; left out: PyTorch's choice."""
    compiled: bool = True
    """On a processor, use code compiled for it where a C compiler is found; --no-compiled: torch's operations alone."""
    health: Literal["warn", "stop", "log", "off"] = "warn"
    """When something goes wrong (entropy collapse, length or KL blow-up, no signal, a reward that jumps, skipped updates):
    say so, stop with a checkpoint, only write it down, or do not look. After 5 steps in a row whose updates were all
    skipped because their gradients were not finite, the run stops, unless this is off."""
    quiet: bool = False
    """No progress display."""


@dataclass(frozen=True)
class SFT(Training):
    """Supervised fine-tuning: imitate the responses of a dataset."""

    verb = "sft"
    out: str = "runs/sft"
    """The run directory to make."""
    epochs: float = 1.0
    """Passes over the rows."""
    rows: int = 16
    """Rows per optimizer update."""
    mask_prompt: bool = True
    """Learn the responses only; --no-mask-prompt: the prompts too."""
    lr: float = 1e-4
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after the warm-up; linear and cosine end at 0."""
    hidden: int = 128
    """From scratch: width of the residual stream."""
    layers: int = 4
    """From scratch: number of layers."""
    heads: int = 4
    """From scratch: query heads."""
    kv_heads: int | None = None
    """From scratch: key-value heads; left out: as many as query heads."""
    intermediate: int | None = None
    """From scratch: width of the feed-forward layers; left out: 8/3 of hidden, rounded up to a multiple of 32."""
    context: int = 512
    """From scratch: most tokens of prompt and reply together."""
    tokenizer: str = "bpe"
    """From scratch: bpe or characters, trained on the rows; or a folder to take one from."""
    vocab: int = 4096
    """From scratch: most entries of the tokenizer to train."""


@dataclass(frozen=True)
class Axes(Training):
    """What may be changed of an algorithm's row, axis by axis; left out, each is the row's own."""

    algorithm: str = "grpo"
    """A row of the table (see `posttrain algorithms`), or your own: my.py:row."""
    advantage: Literal["baselined", "to-go", "process", "gae"] | None = None
    """How credit is assigned; gae brings a critic."""
    baseline: Literal["none", "batch", "group", "others"] | None = None
    """Whose mean reward is taken off."""
    baseline_weight: Literal["equal", "length", "gradient"] | None = None
    """What a reward weighs in that mean; gradient: the optimal baseline, one backward pass per rollout."""
    scale: Literal["none", "batch", "group"] | None = None
    """Whose standard deviation advantages are divided by."""
    gamma: float | None = None
    """Discount per sampled token (gae, to-go)."""
    gae_lambda: float | None = None
    """Lambda of generalized advantage estimation."""
    gae_alpha: float | None = None
    """Lambda by length instead: 1 - 1 / (this times the reply's tokens), at least 0."""
    whiten: bool | None = None
    """Advantages to mean 0 and deviation 1 over all tokens (gae, to-go)."""
    surrogate: Literal["clip", "ratio", "log-probability", "weighted"] | None = None
    """What is maximised: min(r A, clip(r) A), r A, lp A or sg(r) lp A."""
    ratio: Literal["token", "sequence-mean", "sequence-sum", "sequence-value", "causal", "geometric"] | None = None
    """Of which tokens r is made; geometric is GMPO's clipped geometric mean."""
    clip_low: float | None = None
    """The ratio is clipped at 1 - this."""
    clip_high: float | None = None
    """The ratio is clipped at 1 + this."""
    clip_dual: float | None = None
    """Where A < 0, at least this times A: above 1 (0: no such bound)."""
    aggregate: Literal["sequence-mean", "token-mean", "sequence-sum", "constant", "prompt-mean"] | None = None
    """What each token weighs in the loss."""
    kl: float | None = None
    """Coefficient of the KL penalty to the starting model (0: none, no reference is kept)."""
    kl_estimator: Literal["k1", "k2", "k3", "exact", "forward"] | None = None
    """How the KL is estimated; exact: over the whole vocabulary."""
    kl_where: Literal["loss", "reward"] | None = None
    """Whether the KL is part of the loss or taken off the reward."""
    kl_control: Literal["fixed", "adaptive", "halving-doubling"] | None = None
    """What changes the coefficient from step to step."""
    kl_target: float | None = None
    """KL that the control aims at, in nats per token."""
    kl_horizon: float | None = None
    """Rollouts over which the adaptive control may change the coefficient by a fifth."""
    reference_every: int | None = None
    """Steps after which the reference becomes the policy (0: never)."""
    entropy: float | None = None
    """Coefficient of the entropy bonus (0: none); with a target, where it starts."""
    entropy_target: float | None = None
    """Entropy to hold, in nats per token, by tuning the bonus."""
    top_entropy: float | None = None
    """Learn from this share of the tokens, those with the highest entropy (1: all)."""
    correction: Literal["none", "truncate", "icepop", "sequence"] | None = None
    """Weight for an engine whose log-probabilities differ from the learner's."""
    correction_cap: float | None = None
    """Bound of that weight, above 1."""
    dynamic_sampling: int | None = None
    """Replace groups without signal, playing at most so many times --prompts (0: do not)."""
    overlong_filter: bool | None = None
    """Leave truncated replies out of the loss."""
    overlong_cache: int | None = None
    """Tokens before --max-tokens over which a penalty grows to -1 (0: none)."""
    length_reward: float | None = None
    """Reward for being among the shorter replies of the group (0: none)."""
    critic: Literal["separate", "shared", "none"] | None = None
    """A critic with a backbone of its own, or a head on the policy's."""
    critic_model: str | None = None
    """Folder the critic's backbone starts from: a checkpoint, a reward model, or the critic of a run; left out: --model."""
    critic_lr: float | None = None
    """Peak learning rate of the critic; left out: --lr."""
    critic_warmup: int | None = None
    """Steps at the start in which only the critic learns."""
    critic_tau: float | None = None
    """How far the slow copies of action values follow each update (sac)."""
    value_clip: float | None = None
    """Values may move by so much per step (0: freely)."""
    value_coefficient: float | None = None
    """What the value loss weighs."""
    imitation: float | None = None
    """What the likelihood of correct rollouts weighs in the loss (0: nothing)."""
    ptx: str | None = None
    """Rows of text, or of prompts and responses, whose likelihood is part of every update (ppo-ptx)."""
    ptx_coefficient: float | None = None
    """What that likelihood weighs."""
    trust_region: float | None = None
    """Natural gradient steps within this KL, in nats per token, instead of AdamW's (0: AdamW); --lr is then the critic's."""
    replay: int | None = None
    """Rollouts to remember and draw from (sac; 0: the step's own only)."""
    epochs: int | None = None
    """Passes over the rollouts of a step."""
    minibatches: int | None = None
    """Optimizer updates per pass."""


@dataclass(frozen=True)
class RL(Axes):
    """Reinforcement learning: sample replies, score them, make good ones likelier."""

    verb = "rl"
    out: str = "runs/rl"
    """The run directory to make."""
    steps: int = 200
    """Training steps."""
    prompts: int = 16
    """Tasks per step."""
    group: int = 8
    """Rollouts per task."""
    max_tokens: int = 256
    """Most tokens of a reply."""
    temperature: float = 1.0
    """Of sampling; log-probabilities are taken under the same temperature."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply."""
    top_p: float = 1.0
    """Must stay 1 in training: see the message when it is not."""
    top_k: int = 0
    """Must stay 0 in training."""
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    eval_tasks: str | None = None
    """Rows to evaluate on, instead of a held-out share of --tasks."""
    eval_samples: int = 1
    """Replies per held-out task in each evaluation."""
    eval_limit: int = 500
    """At most so many held-out tasks are played in an evaluation."""
    success: float | None = None
    """The reward from which on a reply is right, for accuracy, pass@k and all that learns from right replies; left out:
    what a built-in environment, or SUCCESS = ... beside your own, says."""
    env_workers: int = 1
    """Processes that play and score (0: none; everything runs here, without a time limit, for debuggers)."""
    env_seconds: float = 10.0
    """Time limit of one call of the environment; beyond it the reward is invalid."""
    slots: int = 256
    """Most replies sampled at once: the memory of the key-value cache."""
    engine: Literal["local", "vllm"] = "local"
    """What samples: local, with the learner's own weights, or vLLM in a process of its own."""
    engine_cache: float = 4.0
    """vLLM: most GiB of its key-value cache."""
    engine_seconds: float = 120.0
    """vLLM: time limit of a hand-over of weights, and of one decoding step; beyond it the run stops."""


@dataclass(frozen=True)
class Evaluation(Data):
    """Play held-out tasks and say how well it goes, with intervals."""

    verb: ClassVar[str] = "eval"
    model: str = ""
    """Folder of a checkpoint or of a run."""
    against: str | None = None
    """A second checkpoint: the two are compared task by task."""
    samples: int = 8
    """Replies per task."""
    k: tuple[int, ...] = (1, 4, 8)
    """pass@k for these k."""
    temperature: float = 1.0
    """Of sampling; 0: greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability."""
    top_k: int = 0
    """Sample from so many likeliest tokens (0: all)."""
    max_tokens: int = 256
    """Most tokens of a reply."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply."""
    success: float | None = None
    """The reward from which on a reply is right, as in training."""
    seed: int = 0
    """Decides the samples."""
    held_out: float = 0.0
    """Use only this held-out share of the tasks, as training with the same --held-out and --split-seed does."""
    split_seed: int = 0
    """The --seed of the training run whose held-out share is meant."""
    out: str | None = None
    """A .json file for all figures and rewards."""
    env_workers: int = 1
    """Processes that play and score."""
    env_seconds: float = 10.0
    """Time limit of one call of the environment."""
    slots: int = 256
    """Most replies sampled at once."""
    compiled: bool = True
    """As in training."""
    precision: Precision = "float32"
    """Arithmetic of the forward passes."""
    device: str = "auto"
    """auto, cpu, cuda ..."""
    threads: int | None = None
    """Processor threads; left out: PyTorch's choice."""


VERBS: dict[str, type[Data]] = {kind.verb: kind for kind in (SFT, RL, Evaluation)}
"""The verbs that take a configuration; a recipe has a table for each."""

OF_ONE_CALL = frozenset({"out", "resume", "accept_changes", "overwrite", "quiet"})
"""Options that a continued run does not take over."""

FREE_TO_CHANGE = frozenset(
    {"steps", "save_every", "keep", "threads", "env_workers", "env_seconds", "engine_seconds", "health"}
)
"""Options that a continued run takes over unless they are given anew."""


def validate(config: Training | Evaluation) -> None:
    """Refuse numbers that make no sense, in one line each. What depends on data or model is checked elsewhere."""
    positive = (
        *("steps", "prompts", "group", "rows", "epochs", "max_tokens", "tokens_per_microbatch", "save_every", "keep"),
        *(
            "lr",
            "slots",
            "samples",
            "hidden",
            "layers",
            "heads",
            "context",
            "threads",
            "limit",
            "env_seconds",
            "engine_cache",
            "engine_seconds",
            "minibatches",
            *("kl_target", "kl_horizon", "critic_lr", "entropy_target", "gae_alpha"),
        ),
    )
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{f.name.replace('_', '-')} must be a finite number, not {value}")
    for name in positive:
        value = getattr(config, name, None)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be above 0, not {value}")
    for name in (
        *("eval_every", "warmup", "env_workers", "temperature", "top_k", "weight_decay", "max_grad_norm", "kl"),
        *("entropy", "dynamic_sampling", "overlong_cache", "length_reward", "critic_warmup", "value_clip", "clip_dual"),
        *("clip_low", "clip_high", "imitation", "reference_every", "replay", "ptx_coefficient", "value_coefficient"),
        "trust_region",
    ):
        value = getattr(config, name, None)
        if value is not None and value < 0:
            raise UserError(f"--{name.replace('_', '-')} must be 0 or more, not {value}")
    if not 0 <= config.held_out < 1:
        raise UserError(f"--held-out is a share, at least 0 and below 1, not {config.held_out}")
    if not config.tasks:
        raise UserError("--tasks is missing: a file of rows, such as train.jsonl")
    if not isinstance(config, SFT) and not config.env:
        raise UserError("--env is missing: what scores the replies, such as my.py:reward or a built-in name (gsm8k)")
    if not isinstance(config, SFT) and not config.model:
        raise UserError("--model is missing: the folder of a checkpoint, or of a run of posttrain sft")
    if isinstance(config, RL):
        _validate_rl(config)
    if isinstance(config, Evaluation) and min(config.k, default=1) < 1:
        raise UserError(f"--k {min(config.k)}: pass@k is of at least one sample")


def _validate_rl(config: RL) -> None:
    if config.temperature == 0:
        raise UserError("--temperature 0 is greedy: all rollouts of a group would be equal and teach nothing")
    if config.top_p != 1 or config.top_k != 0:
        raise UserError(
            "--top-p and --top-k change the distribution that is sampled, and the gradient would be that of another: "
            "leave them at 1 and 0 in training, no --correction can see what they cut off (evaluation takes them)"
        )
    for name in ("gamma", "gae_lambda", "top_entropy", "critic_tau"):
        share = getattr(config, name)
        if share is not None and not 0 <= share <= 1:
            raise UserError(f"--{name.replace('_', '-')} is at least 0 and at most 1, not {share}")
    if config.top_entropy == 0:
        raise UserError("--top-entropy 0 would leave no token to learn from: give a share such as 0.2, or 1 for all")
    if config.clip_low is not None and config.clip_low > 1:
        raise UserError(f"--clip-low {config.clip_low}: the ratio would be clipped below 0; it is at most 1")
    for name in ("correction_cap", "clip_dual"):
        bound = getattr(config, name)
        if bound is not None and not bound > 1 and (name, bound) != ("clip_dual", 0):
            raise UserError(
                f"--{name.replace('_', '-')} bounds a ratio that is near 1: it must be above 1, not {bound}"
            )


AnyTraining = TypeVar("AnyTraining", bound=Training)


def continued(config: AnyTraining, recorded: Mapping[str, Any]) -> AnyTraining:
    """The options of a run that is resumed: as recorded in run.json, but for what may change and is given in `config`.

    Raises UserError if another option is given with another value, or if run.json holds what is no option's value.
    """
    now = as_dict(config)
    if unknown := sorted(recorded.keys() - now.keys()):
        raise UserError(f"cannot resume {config.out}: another version wrote it, with options {', '.join(unknown)}")
    kinds = get_type_hints(type(config))
    for name, value in recorded.items():
        if not _fits(value, kinds[name]):
            raise UserError(f"{config.out}/run.json is damaged ({name} is {str(value)[:40]!r}): put a copy of it back")
    fixed = sorted(config.given - OF_ONE_CALL - FREE_TO_CHANGE)
    differing = [f"{name} was {recorded.get(name)!r}" for name in fixed if now[name] != recorded.get(name)]
    if differing:
        other = ", ".join(differing)
        raise UserError(f"cannot resume {config.out} with other options ({other}): leave them out, or change --out")
    ours = OF_ONE_CALL | (config.given & FREE_TO_CHANGE)
    kept = {name: tuple(v) if isinstance(v, list) else v for name, v in recorded.items() if name not in ours}
    chosen: Any = {**kept, **{name: getattr(config, name) for name in ours}}
    return type(config)(**chosen)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value that was read from JSON is one of an option of this type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is ... and isinstance(value, list) else inner
        return isinstance(value, list) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, inner[1]) for v in value.values())
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is (type(None) if kind is None else kind)


def as_dict(config: Any) -> dict[str, Any]:
    """The options by name, as they are read back from JSON: tuples are lists, paths are text."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain
