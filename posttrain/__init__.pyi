"""posttrain: reinforcement-learning post-training for language models.

Written by `python -m posttrain.cli.write_types` from where verbs and options are declared.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, Unpack

from posttrain.core.types import Ask as Ask
from posttrain.core.types import Completion as Completion
from posttrain.core.types import Graded as Graded
from posttrain.core.types import Invalid as Invalid
from posttrain.core.types import Reply as Reply
from posttrain.core.types import Sampling as Sampling
from posttrain.core.types import Sides as Sides
from posttrain.core.types import SpanReward as SpanReward
from posttrain.core.types import StopRun as StopRun
from posttrain.core.types import Task as Task
from posttrain.core.types import ToolCall as ToolCall
from posttrain.core.types import Turn as Turn
from posttrain.core.types import UserError as UserError
from posttrain.core.rollouts import Rollout as Rollout
from posttrain.runs.tracking.tracker import Tracker as Tracker
from posttrain.envs.play.tools import Tools as Tools
from posttrain.envs.play.group_rewards import group_reward as group_reward
from posttrain.envs.play.call_recording import note as note
from posttrain.envs.play.call_recording import recorded as recorded
from posttrain.envs.play.trl_rewards import trl_reward as trl_reward
from posttrain.envs.play.verl_rewards import verl_reward as verl_reward
from posttrain.training.trainer import Run
from posttrain.training.verbs.evaluate import Evaluated
from posttrain.training.verbs.sample import Written
from posttrain.training.verbs.label import LabelSummary

__all__ = [
    "Ask",
    "Completion",
    "Graded",
    "Invalid",
    "Reply",
    "Sampling",
    "Sides",
    "SpanReward",
    "StopRun",
    "Task",
    "ToolCall",
    "Turn",
    "UserError",
    "Rollout",
    "Tracker",
    "Tools",
    "group_reward",
    "note",
    "recorded",
    "trl_reward",
    "verl_reward",
    "sft",
    "rl",
    "prefer",
    "reward_model",
    "distill",
    "evaluate",
    "sample",
    "label",
]
__version__: str
Rows = str | PathLike[str] | Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]
"""A file, folder or dataset by its name; rows in memory; a generator; a function that makes rows without end."""

class FromRowsOptions(TypedDict, total=False):
    """Options of several verbs."""

    split: str | None
    """Split of a dataset that has several."""
    limit: int | None
    """Read only the first N rows."""
    fields: dict[str, str]
    """Rename columns: --fields.prompt question --fields.answer solution. A reward finds them under both names. A dot
    selects a key inside a column: --fields.answer reward_model.ground_truth."""
    prompt_template: str | None
    """Build each prompt from columns: "Question: {question}\nAnswer:". Write a literal brace as {{ or }}. On the
    command line, \n and \t mean a newline and a tab."""

class ChatTemplateOptions(TypedDict, total=False):
    """Options of several verbs."""

    chat_template: str | None
    """Chat template: a Jinja file, or chatml. Default: the one in the model's folder. A run saves it with its
    checkpoints."""
    chat_template_kwargs: dict[str, Any]
    """Variables of the chat template: --chat-template-kwargs enable_thinking=false. In a recipe, a table. A run saves
    them with its checkpoints, where later commands find them."""

class DataOptions(ChatTemplateOptions, FromRowsOptions, total=False):
    """Options of several verbs."""

    response_template: str | None
    """Build each response from columns, like --prompt-template (sft)."""
    too_long: Literal["skip", "truncate", "refuse"]
    """Treatment of rows that exceed --max-length or the model's context: drop and count them (skip), cut them
    (truncate), or stop (refuse). truncate cuts the start of prompts, the end of demonstrations, and the middle of later
    observations of an episode. refuse measures all rows before the first step. In rl, a prompt is too long if it leaves
    no room for a reply."""
    chat: bool | None
    """Wrap plain prompts in the model's chat template, as the message of a user; --no-chat sends them as bare text.
    Responses of sft, prefer and reward-model are then the assistant's. Default: as in the run that trained the model;
    for other models, yes if they are instruct models (whose template ends replies as the model does). Rows of messages
    are always wrapped."""
    system: str | None
    """System message of prompts, and of messages without one. Default: the system message of the run that trained the
    model."""

class ModelOptions(TypedDict, total=False):
    """Options of several verbs."""

    lora: int | None
    """Train LoRA adapters of this rank instead of all weights. Gradients and optimizer state then take a fraction of
    the memory. Checkpoints hold the adapters in PEFT's format. If --model is an adapter, training continues with it."""
    lora_alpha: float | None
    """LoRA alpha: adapters are scaled by alpha / rank. Default: twice the rank (arXiv 2405.09673)."""
    lora_targets: Sequence[str]
    """Matrices to adapt: all-linear, or any of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj."""
    quantize: Literal["nf4", "int8"] | None
    """Keep the frozen weights in 4 bits (nf4, as in QLoRA) or 8 (int8); needs --lora. They are dequantised for each
    product."""
    weights: Literal["float32", "bfloat16"]
    """Type in which all weights of the run are stored. bfloat16, with --precision bfloat16, takes half the memory and
    needs no copies. Gradients, moments, norms and biases stay in float32. Updates use stochastic rounding, so that
    small ones are not lost. Not with --lora."""
    frozen_weights: Literal["float32", "bfloat16"]
    """Type of the weights that are not trained: the base of LoRA, a reference, teachers, reward models and judges of
    this machine. bfloat16 takes half the memory, and is exact for a checkpoint stored in bfloat16: with --precision
    bfloat16, products are the same. Norms, biases and adapters stay in float32."""
    rslora: bool
    """Scale adapters by alpha / sqrt(rank) (rsLoRA), so that large ranks learn as fast as small ones."""
    dora: bool
    """Learn the magnitude of each row of an adapted matrix separately from its direction (DoRA); needs --lora."""
    train_vision: bool
    """Vision-language models: train the vision tower and its projection too. By default they are frozen."""

class OptimizerOptions(TypedDict, total=False):
    """Options of several verbs."""

    lr: float
    """Peak learning rate of the optimizer."""
    optimizer: str
    """Optimizer: adamw, adamw8bit, adafactor, muon, lion, sgd, another of torch.optim such as radam, or a class as
    my.py:Class. A critic has the same. adamw8bit and lion are those of bitsandbytes. Muon updates the matrices of
    layers, and AdamW the rest."""
    optimizer_options: dict[str, Any]
    """Settings of the optimizer's class: --optimizer-options momentum=0.95. In a recipe, a table."""
    schedule: Literal["constant", "linear", "cosine"]
    """Learning rate after the warm-up. linear and cosine end at 0."""
    warmup: int
    """Warm-up: updates over which the learning rate rises from 0."""
    weight_decay: float
    """Decoupled weight decay of weight matrices, with every optimizer."""
    betas: tuple[float, float]
    """Decay rates of the two moments: of AdamW, and of other optimizers that have two."""
    max_grad_norm: float
    """Clip gradients to this norm (0: no clipping)."""
    tokens_per_microbatch: int | None
    """Tokens in one forward and backward pass, besides a prompt: bounds the memory of an update. Default: 1024 on a CPU
    (768 for models of 50 million parameters and more, 384 for those that transformers computes); on a GPU as many as
    keep their activations within a fifth of its memory. Results do not depend on it."""
    recompute: Literal["auto", "none", "layers"]
    """Activations to recompute in the backward pass (gradient checkpointing). layers: each layer keeps only its input,
    which costs a second forward pass. auto: layers, if the update may not fit into the GPU's memory otherwise. Results
    do not depend on it. Models of transformers always recompute their layers where activations would not fit."""
    offload: Sequence[Literal["optimizer", "activations", "reference"]]
    """Data to keep in the host's memory while the GPU does not need it. optimizer: its state, between updates.
    activations: those kept for the backward pass. reference: the reference model and teachers, while they are not used.
    Results do not depend on it."""
    float8: bool
    """Compute the products of layers in float8, by torchao, with --precision bfloat16: forward and for the gradients of
    activations; those of weights stay in bfloat16. Weights stay in float32. On a CPU the rounding is emulated, which is
    slower."""
    router_balance: float
    """Mixtures of experts: coefficient of the load-balancing loss (Switch: 0.01). It is computed over the whole
    optimizer batch."""
    router_z: float
    """Mixtures of experts: coefficient of the router z-loss, which keeps logits small (ST-MoE: 0.001)."""

class HeldOutOptions(TypedDict, total=False):
    """Options of several verbs."""

    held_out: float
    """Share of the tasks that training leaves out, and evaluations use. Each prompt is held out with this probability,
    which depends on its text and --split-seed alone: new rows never move old ones, and of few tasks the number may be
    far from the share. In eval: evaluate on this share only, as training with the same --held-out and --split-seed
    does."""
    split_seed: int | None
    """Seed that chooses the held-out tasks. Default: --seed in training; in eval, that of the checkpoint's own run.
    Give runs with different seeds the same --split-seed to compare them on the same tasks."""

class HardwareOptions(TypedDict, total=False):
    """Options of several verbs."""

    device: str
    """Where to compute: auto, cpu, cuda, cuda:1 ..."""
    precision: Literal["float32", "bfloat16"]
    """Type of the arithmetic in forward and backward passes. Stored weights and optimizer state keep their types."""
    threads: int | None
    """CPU threads. Default: PyTorch's choice."""
    compiled: bool
    """Compile the inner loops: on a CPU with a C compiler, on a GPU with Triton. --no-compiled uses plain PyTorch
    operations."""
    deterministic: bool
    """On a GPU, use algorithms that give the same bits each time. --no-deterministic allows others, some of which are
    faster."""

class ProcessesOptions(TypedDict, total=False):
    """Options of several verbs."""

    processes: int
    """Training processes on this machine: each holds the whole model, unless an option divides it. On several machines,
    start one process each with torchrun."""
    learner_devices: Sequence[int]
    """GPUs of the training processes, one each, by their numbers: 0 1. Default: the first ones."""
    role_devices: dict[str, str]
    """GPUs for models beside the policy: --role-devices reference=1 critic=2. Roles are reference, critic, teacher,
    reward-model and judge. With several processes give each a number: reference=2,3; cpu is possible too. Default: the
    training process's own. In a recipe, a table."""
    shard: bool
    """Shard weights, gradients and optimizer state across the processes (FSDP2)."""
    shard_size: int | None
    """Processes that share one copy of the weights with --shard (hybrid sharding, HSDP); it divides --processes. With
    the number of GPUs of a machine, weights are gathered within machines, and only gradients are summed between them.
    Default: all processes."""
    tensor_parallel: int
    """Processes that divide heads, MLP and vocabulary of the model among them, and compute the same micro-batches. It
    divides --processes."""
    context_parallel: int
    """Processes that divide the tokens of a micro-batch among them, for long replies. Times --tensor-parallel, it
    divides --processes."""
    expert_parallel: int
    """Processes that divide the experts of each layer of a mixture among them. Everything else is whole in each, and
    each has its own micro-batches. It divides --processes."""
    collective_timeout: float
    """Timeout of collective operations, in seconds: a process that takes longer counts as lost."""
    restarts: int
    """Restarts after a crash, from the newest checkpoint. Needs --processes above 1."""

class SeedOptions(TypedDict, total=False):
    """Options of several verbs."""

    seed: int
    """Random seed: the same seed gives the same result, bit for bit. It decides data order, sampling and initial
    weights."""

class RunOptions(TypedDict, total=False):
    """Options of several verbs."""

    out: str
    """Folder of the run, to be created."""
    resume: bool
    """Continue the run in --out from its newest intact checkpoint, bit for bit."""
    overwrite: bool
    """Start again in --out. The run there is deleted after the first step of the new one."""
    accept_changes: bool
    """With --resume: accept changed tasks, model or reward, or a record with missing parts. run.json notes it."""
    save_every: int
    """Steps between checkpoints. One more is written at the end."""
    keep: int
    """Checkpoints to keep, the newest ones."""
    record: Literal["tokens", "sample", "full"]
    """Per-token data to record. tokens: ids and the sampler's log-probabilities. sample: for 8 groups a step, also the
    values of the update (log-probabilities of learner and reference, entropy, weight in the loss). full: the same for
    all groups. Results do not depend on it."""
    record_after: bool
    """Also record log-probabilities after the step's update: one more forward pass over the groups of --record."""
    health: Literal["warn", "stop", "log", "off"]
    """Reaction to health findings: entropy collapse, runaway length or KL, no signal, jumps of the reward, skipped
    updates. stop saves a checkpoint first. After 5 consecutive steps without a finite gradient, the run stops, unless
    this is off."""
    track: Sequence[str]
    """Trackers to log to: wandb, trackio, mlflow, swanlab, prometheus, or your own as my.py:Mine. Each runs in a
    process of its own and cannot delay a step. prometheus:PORT serves /metrics. TensorBoard's files are always
    written."""
    track_project: str
    """Project of the trackers. Default: the tracker's own variable (WANDB_PROJECT ...), or posttrain."""
    hook: Sequence[str]
    """Your own functions, called after each step: (step, metrics, rollouts). An object may have on_step, on_evaluation
    and on_checkpoint. They change no result; posttrain.StopRun ends the run with a checkpoint."""
    profile: str
    """Steps to profile with torch's profiler, such as 3:5. Writes a table by kind of work and kernel into the folder
    profile, and a trace of each phase for ui.perfetto.dev."""
    quiet: bool
    """Show no progress."""

class TrainingOptions(
    RunOptions,
    SeedOptions,
    ProcessesOptions,
    HardwareOptions,
    HeldOutOptions,
    OptimizerOptions,
    ModelOptions,
    DataOptions,
    total=False,
):
    """Options of several verbs."""

    eval_every: int
    """Steps between evaluations on the held-out tasks (0: only before and after training)."""
    eval_tasks: Sequence[str]
    """Rows to evaluate on, instead of a held-out share of --tasks. There may be several sets, with names: --eval-tasks
    easy=a.jsonl hard=b.jsonl. In rl each has figures of its own too."""
    eval_suite: str | None
    """TOML file of several evaluations, as for posttrain eval --suite, to sample at every evaluation. The metrics are
    suite/PART/accuracy, suite/PART/reward ... and suite/mean, if every part has valid rewards."""
    forget: str | None
    """Texts, or prompts with responses, whose loss is measured at every evaluation (forget/loss), to detect forgetting.
    Verbs that sample measure it at the sampling temperature."""

class MixtureOptions(TypedDict, total=False):
    """Options of several verbs."""

    mixture: dict[str, dict[str, str]]
    """Parts of a mixture, instead of --tasks: --mixture.maths.tasks maths.jsonl --mixture.maths.weight 2. Or a table
    [sft.mixture.maths] in a recipe. A part may have its own split, limit, fields (--mixture.maths.fields.prompt
    question), prompt_template, chat and system; in rl it has its own env, and may have max_tokens, temperature,
    max_turns, max_episode_tokens, max_tool_calls, env_timeout and env_memory."""
    mixture_temperature: float
    """Temperature T of a mixture without weights: a part of n tasks has the weight n^(1/T). 1: by size; large:
    equal."""

class PassesOptions(MixtureOptions, TrainingOptions, total=False):
    """Options of several verbs."""

    epochs: float
    """Passes over the rows."""
    steps: int | None
    """Optimizer updates, instead of --epochs. Required for rows without end. On the command line, either replaces the
    other of a recipe."""
    rows: int
    """Batch size: prompts per optimizer update, each with all its responses."""
    max_length: int | None
    """Maximum number of tokens in a row, of prompt and response together; of several responses, the longest counts.
    --too-long decides what happens to longer rows. Default: the model's context."""

class RetrieverOptions(TypedDict, total=False):
    """Options of several verbs."""

    retriever: Sequence[str]
    """Index that environments search: a folder made by posttrain retriever build, or the address of a server. The
    server speaks Search-R1's protocol: http://host:8000. Name several with NAME=FOLDER."""

class EnvLimitOptions(TypedDict, total=False):
    """Options of several verbs."""

    env_timeout: float
    """Timeout of one call of the environment, in seconds. A call that exceeds it makes the reward invalid."""
    env_memory: float
    """Memory limit of an environment process, in GiB (0: none). A process that exceeds it makes the reward invalid."""

class SFTOptions(EnvLimitOptions, RetrieverOptions, PassesOptions, total=False):
    """Options of posttrain sft."""

    mask: Literal["assistant", "last", "all"]
    """Messages that are trained: assistant (every assistant message, or the response), last (the last assistant
    message; earlier ones are context), or all (every token, prompts too). A message with "train": false or "weight": 0
    is never trained."""
    token_weight: Literal["equal", "probability", "uncertainty"]
    """Weight of each token in the loss, without a gradient: equal, its probability p (Dynamic Fine-Tuning), or
    uncertainty: p (1 - p), largest at p = 1/2."""
    min_reward: float | None
    """Keep rollouts with at least this reward: of a recorded run, or of replies that run through --env."""
    hidden: int
    """From scratch: hidden size."""
    layers: int
    """From scratch: number of layers."""
    heads: int
    """From scratch: attention heads."""
    kv_heads: int | None
    """From scratch: key-value heads. Default: as many as attention heads."""
    intermediate: int | None
    """From scratch: hidden size of the MLP. Default: 8/3 of --hidden, rounded up to a multiple of 32."""
    context: int
    """From scratch: context length in tokens, for prompt and reply together."""
    tokenizer: str
    """From scratch: bpe or characters, trained on the rows, or the folder of a model or run to take the tokenizer
    from."""
    vocab: int
    """From scratch: maximum vocabulary size of the tokenizer to train."""
    env: str
    """Reward function or environment: my.py:reward, package.module:name, a verifier such as verify:exact_match, or a
    built-in name. Settings follow the name: search-qa,topk=5. Add verifiers up with weights: "verify:exact_match*0.9 +
    verify:tags*0.1". Functions written for other trainers: trl:rewards.py:accuracy,format and
    verl:score.py:compute_score. harbor:FOLDER is a set of tasks in containers, which makes its rows too. Built in are
    adventure, arithmetic, calculator, code, code-all, code-choice, countdown, functions, gsm8k, guess, gymnasium,
    judge, math, nemo-gym, nim, openenv, python, reasoning-gym, refusal, reward-model, search-qa, shapes, textarena,
    unscored, verdict, word-problems and worked-sums. In sft, the replies of rows run through it; for rows without
    replies, its row_to_task, if any, writes the demonstrations."""
    model: str | None
    """Model to start from: a Hugging Face folder, a GGUF file, the folder of a run, or org/name. In sft, leave it out
    to train from scratch. org/name, or org/name@revision, is a model of the Hugging Face hub."""

class MixtureWeightsOptions(TypedDict, total=False):
    """Options of several verbs."""

    mixture_weights: Literal["fixed", "progress"]
    """Weights of the parts of --mixture. fixed: those given, or by size. progress: in proportion to the absolute change
    of each part's running solve rate, so that parts which are learned, or forgotten, come more often."""
    mixture_floor: float
    """With --mixture-weights progress: share of the prompts that goes by the fixed weights, so that no part is
    forgotten."""

class SamplingOptions(TypedDict, total=False):
    """Options of several verbs."""

    max_tokens: int
    """Maximum number of tokens in a reply."""
    temperature: float
    """Sampling temperature; 0 is greedy. Training computes log-probabilities at the same temperature."""
    temperature_column: str
    """Column with the sampling temperature of a task, instead of --temperature; where it is null, --temperature holds.
    Training computes the log-probabilities of each token at the temperature that sampled it."""
    top_p: float
    """Sample from the smallest set of tokens with this total probability. Training needs 1: other values change the
    sampled distribution."""
    top_k: int
    """Sample from the K most likely tokens (0: all). Training needs 0."""
    stop: Sequence[str]
    """Strings that end a reply."""

class CurriculumOptions(TypedDict, total=False):
    """Options of several verbs."""

    curriculum: Literal["uniform", "solve-rate", "stages", "levels"]
    """Order of the tasks. uniform: each once per epoch. solve-rate: those that the policy solves about half of the time
    come first. stages: by a column, the lowest value first; a stage ends at --curriculum-accuracy. levels: the same
    with new tasks of the function tasks(seed, level) that --tasks my.py:tasks names; levels count from 1, and one
    without rows ends them."""
    curriculum_column: str
    """Column with the stage of a task, for --curriculum stages: numbers, or strings in alphabetical order. Or a
    function of the task that returns it, as my.py:stage."""
    curriculum_accuracy: float
    """Running accuracy at which a stage, or a level, ends."""
    curriculum_floor: float
    """Share of the prompts that the curriculum does not choose. solve-rate: they go through all tasks in turn, so that
    no task is dropped for good. stages, levels: they are tasks of earlier ones."""
    curriculum_decay: float
    """Decay of the curriculum's running means. solve-rate: of a task's results, at each further visit. stages, levels:
    of its results, at each step."""
    curriculum_sharpness: float
    """Exponent s of --curriculum solve-rate: a task is drawn with weight (p (1 - p))^s, p its solve rate. At 0 all
    tasks have equal weight."""

class EpisodeOptions(TypedDict, total=False):
    """Options of several verbs."""

    max_episode_tokens: int | None
    """Maximum number of sampled tokens in an episode, over all of its replies. Default: no limit."""
    max_turns: int
    """Maximum number of replies in an episode."""
    max_tool_calls: int | None
    """Maximum number of tool results in an episode. Default: no limit."""
    episode_timeout: float | None
    """Timeout of an episode, in seconds: after it, no further turn begins. Default: none. With a timeout, results
    depend on the clock."""

class EnvWorkerOptions(EnvLimitOptions, total=False):
    """Options of several verbs."""

    env_workers: int | None
    """Environment processes. Default: one per CPU core. 0 runs the environment in this process, without limits, for
    debuggers."""

class ServiceOptions(RetrieverOptions, total=False):
    """Options of several verbs."""

    reward_model: Sequence[str]
    """Reward model: the folder of a sequence classifier with one label. Without --env, its score is the reward;
    environments ask it under the name "reward-model". Name several with NAME=FOLDER."""
    judge: Sequence[str]
    """Judge: the TOML recipe of a model behind an OpenAI endpoint, or of a checkpoint that reasons. Without --env, its
    verdict is the reward; environments ask it under the name "judge". Name several with NAME=RECIPE."""

class StepRewardOptions(ServiceOptions, total=False):
    """Options of several verbs."""

    step_delimiter: str
    """Reward each step of a reply with --reward-model, a model trained on labelled steps. The text between steps; or
    line, or a regular expression between slashes: "/(?=Step [0-9])/"; reply: each reply of an episode is one step;
    spans: the environment names where steps end. Without --env, only steps earn rewards."""
    step_aggregate: Literal["none", "sum", "mean", "min", "last", "product"]
    """Aggregate of step rewards, added to the reward as its part "process". none: each step keeps its own reward, at
    its last token, as grpo-process, --advantage to-go and critics read them."""
    step_rewards: Literal["always", "if-right"]
    """Replies whose steps earn rewards: all of them, or those whose outcome is right (P-GRPO)."""
    step_weight: float
    """Weight of step rewards relative to the outcome's."""
    step_score: Literal["probability", "score"]
    """The reward of a step: the probability that it is right (sigmoid of the reward model's score), or the score."""

class ReplicaOptions(TypedDict, total=False):
    """Options of several verbs."""

    slots: int
    """Maximum of replies that each engine decodes at once. More of them need more memory for the KV cache."""
    replicas: int
    """Sampling engines, each in a process of its own with a copy of the weights (0: none). An engine that dies is
    restarted. Samples of the local engine do not depend on their number. With 0, the local engine runs in this process,
    vLLM and SGLang in one server."""

class EngineOptions(ReplicaOptions, total=False):
    """Options of several verbs."""

    engine: Literal["local", "vllm", "sglang"]
    """Sampling engine: local, with the learner's own weights, or a server that the run starts: vllm, sglang."""
    engine_url: Sequence[str]
    """Servers of vLLM or SGLang that run already, such as http://10.0.0.7:8000, instead of one that the run starts. The
    variable VLLM_API_KEY or SGLANG_API_KEY holds their key, if they need one."""
    engine_tensor_parallel: int
    """vLLM, SGLang: GPUs of each server, which share its weights (tensor parallelism)."""
    engine_seeds: bool
    """vLLM, SGLang: sample each reply with a seed of its own, so that a repeated run samples the same replies, apart
    from rounding. vLLM on CPUs and SGLang sample more slowly then."""
    engine_devices: Sequence[int]
    """GPUs of engines in processes of their own (--replicas, --engine), in turn. Default: the GPUs that no training
    process uses; if there are none, the training GPUs."""
    engine_cache: float | None
    """KV cache limit of each engine, in GiB. When the local engine's cache is full, the newest requests wait, and
    continue later. It does not limit models that transformers computes. Default: 0.7 of the memory that is free when
    sampling begins, with at most 4 for prefixes kept between turns. For a server 4; on GPUs that it has to itself, what
    it finds free; if it sleeps during updates, a fifth of the GPU."""
    engine_timeout: float
    """Timeout of an engine in another process, in seconds, for a weight sync or a decoding step. After it, the engine
    is restarted."""
    weight_sync: Literal["copied", "adapter", "nccl", "ipc"]
    """Transport of new weights to vLLM or SGLang. copied: all of them, adapters merged, through host memory, or to
    SGLang and --engine-url through files, for the latter under --out. adapter: with --lora, the base once, then only
    the adapters. nccl, ipc: from GPU to GPU, or within one GPU; both are vLLM's own, and have not been tested on GPUs
    yet."""
    launch: Literal["local", "ray"]
    """Where --replicas of the local engine run: on this machine, or on a Ray cluster. RAY_ADDRESS names the cluster;
    without it, one is started here. Weights and requests go through Ray: no shared disk is needed."""
    replica_cpus: float
    """--launch ray: CPUs for each replica. With --device cuda it also takes a GPU."""
    engine_restarts: int
    """Consecutive restarts of an engine before it is given up. When none is left, the run saves and ends."""

class AlgorithmOptions(TypedDict, total=False):
    """Options of several verbs."""

    algorithm: str
    """"""
    settings: dict[str, Any]
    """Settings of the algorithm, by flag or by place: {"clip_high": 0.28, "advantage.eps": 1e-4}."""

class RLOptions(
    AlgorithmOptions,
    EngineOptions,
    StepRewardOptions,
    EnvWorkerOptions,
    EpisodeOptions,
    CurriculumOptions,
    SamplingOptions,
    MixtureOptions,
    MixtureWeightsOptions,
    TrainingOptions,
    total=False,
):
    """Options of posttrain rl."""

    critic: Literal["separate", "shared"] | None
    """Algorithms with a critic: a backbone of its own, or a head on the policy's. Default: separate."""
    critic_model: str | None
    """Model that the critic starts from: a checkpoint, a reward model, or the critic of a run. Default: --model."""
    critic_lr: float | None
    """Peak learning rate of the critic. Default: --lr."""
    ptx: str | None
    """Rows whose likelihood is part of every update (ppo-ptx): texts, or prompts with responses."""
    steps: int
    """Training steps. Each samples, scores and updates."""
    prompts: int
    """Prompts per step."""
    group: int
    """Group size: rollouts per prompt."""
    epsilon_greedy: float
    """Probability E of a token that is drawn uniformly from the vocabulary instead of from the policy (0: none). The
    sampler's probability is then (1 - E) p + E / V, by which a --correction, or a ratio with --old-policy sampler,
    divides. Evaluations draw from the policy alone."""
    async_steps: int
    """Sample this many steps ahead of the update (0: synchronous). Rollouts then come from older weights. A
    --correction, or a ratio with --old-policy sampler, corrects most of the bias; a weight per token is exact only for
    replies of one token."""
    tokens_per_step: int
    """Maximum number of tokens of a reply that one step samples (0: no limit). A longer reply continues in the next
    step, with newer weights; its group enters an update once all its replies are complete. For environments of one
    turn."""
    routing_replay: bool
    """Mixtures of experts: update each token with the experts that computed it during sampling."""
    success: float | None
    """Reward from which a reply counts as right. It defines accuracy and pass@k. Default: the environment's own
    SUCCESS. Algorithms that imitate right replies use it too."""
    eval_samples: int
    """Replies per held-out task in each evaluation."""
    eval_limit: int
    """Maximum number of held-out tasks in an evaluation, of each set or part of a mixture."""
    advantage: Literal[
        "baselined",
        "to-go",
        "process",
        "turns",
        "turn-histories",
        "decoupled",
        "pass-at-k",
        "gae",
        "k-step",
        "earned",
        "none",
    ]
    """Advantage estimator; gae adds a critic."""
    baseline: Literal["none", "batch", "group", "others", "greedy"]
    """Baseline: the mean reward to subtract, or the reward of one additional greedy reply."""
    scale: Literal["none", "batch", "group", "mean"]
    """Divide advantages by the standard deviation of the group or of the batch, by the group's mean reward, or not at
    all."""
    baseline_weight: Literal["equal", "length", "gradient"]
    """Weight of each reward in the baseline. gradient is the optimal baseline, with one backward pass per rollout."""
    whiten: bool
    """Normalise advantages to mean 0 and standard deviation 1 over all tokens."""
    gamma: float
    """Discount factor per sampled token."""
    outcome_apart: bool
    """Normalise final rewards among the final rewards of the group, and step rewards among its step rewards."""
    part_weights: str
    """Weights of the reward's named parts: correct=1 format=0.5."""
    advantage_k: int
    """k of pass@k: at least one of k replies has to be right. Below --group."""
    gae_lambda: float
    """Lambda of generalized advantage estimation (GAE)."""
    gae_alpha: float
    """Length-adaptive lambda of GAE: 1 - 1 / (alpha x tokens of the reply), at least 0."""
    bootstrap_truncated: bool
    """Where an episode was cut off, the critic's value of its last state replaces the rewards of its last token."""
    k_step: int
    """k-step advantage: rewards of this many tokens, then the critic's value."""
    turn_weight: float
    """Weight of a turn's advantage among turns of the same state, relative to its rollout's."""
    turn_gamma: float
    """Discount factor per turn."""
    turn_state: Literal["observation", "history"]
    """State of a turn: the observation before it, or the whole context before it."""
    turn_history: int
    """Number K of earlier observations that turns of the same state may share."""
    turn_history_power: float
    """Exponent of the weight k + 1 of turns with the same last k observations."""
    surrogate: Literal[
        "clip", "ratio", "log-probability", "weighted", "soft-gate", "divergence-mask", "gamma-weight", "expected-q"
    ]
    """Surrogate objective: min(r A, clip(r) A), r A, lp A, sg(r) lp A, or another with a soft or a masked ratio."""
    clip_low: float
    """Clip the ratio below 1 minus this."""
    clip_high: float
    """Clip the ratio above 1 plus this."""
    clip_dual: float
    """Dual clip: where A < 0, bound the objective by this times A; above 1 (0: none)."""
    weight_at: Literal["token", "reward"]
    """Ratios weigh the advantage of their token, or the reward that is earned at it. With --ratio causal, reward is
    exact for replies that any policy has sampled."""
    aggregate: Literal["sequence-mean", "token-mean", "sequence-sum", "constant", "prompt-mean"]
    """Aggregation of the loss over tokens."""
    ratio: Literal["token", "sequence-mean", "sequence-sum", "sequence-value", "causal", "geometric"]
    """Importance ratio: per token or per sequence. geometric is GMPO's clipped geometric mean."""
    old_policy: Literal["start", "sampler"]
    """Denominator of the ratio: log-probabilities under the weights at the start of the step, or under the
    sampler's."""
    correction: Literal["truncate", "icepop", "sequence", "sequence-truncate", "none"]
    """Importance weight for an engine that differs from the learner, lags behind (--async-steps, --replay) or explores
    (--epsilon-greedy). none: no weight. A weight per token is unbiased only for replies of one token."""
    correction_cap: float
    """Cap of the weight of --correction, above 1."""
    off_policy_mask: float
    """Leave out tokens with A < 0 of rollouts whose mean of old - lp is above this, in nats per token (0: none)."""
    kl_estimator: Literal["k1", "k2", "k3", "exact", "forward"]
    """Estimator of the KL; exact sums over the whole vocabulary. In the loss k2 and exact have the gradient of the KL
    per token, in the reward k1 that of a reply."""
    kl: float
    """Coefficient of the KL penalty to the reference, the starting model (0: no penalty and no reference)."""
    kl_where: Literal["loss", "reward"]
    """Place of the KL: in the loss, or subtracted from the reward."""
    kl_unit: Literal["token", "response"]
    """Unit of the KL in the loss: each token, or the ratio of the whole response."""
    kl_weighed: bool
    """Multiply the KL estimate by the ratio to the old policy, which gives it the gradient of the KL per token."""
    kl_control: Literal["fixed", "adaptive", "halving-doubling"]
    """Control of the KL coefficient from step to step."""
    kl_target: float
    """Target KL of the controller, in nats per token."""
    kl_horizon: float
    """Horizon of the adaptive KL controller, in rollouts: the coefficient changes by a fifth at most."""
    entropy: float
    """Coefficient of the entropy bonus (0: none). With --entropy-target, its initial value."""
    entropy_target: float
    """Target entropy in nats per token; the coefficient is tuned to hold it."""
    entropy_where: Literal["loss", "reward"]
    """Place of the entropy: in the loss, or as -log pi of each token in the reward."""
    top_entropy: float
    """Learn only from this share of the tokens, those with the highest entropy (1: all)."""
    clip_cov: float
    """Clip-Cov: leave out this share of the tokens, among those whose update lowers the entropy most (0: none)."""
    kl_cov: float
    """KL-Cov: penalise the distance to the old policy at this share of the tokens, those whose update lowers the
    entropy most (0: none)."""
    value_clip: float
    """Clip range of the value function (0: no clipping)."""
    value_coefficient: float
    """Coefficient of the value loss."""
    critic_warmup: int
    """Number of first steps in which only the critic learns."""
    critic_tau: float
    """Target networks of action values: rate at which they follow each update."""
    value_network: bool
    """Learn a network of state values too, whose target copy gives the targets of the action values."""
    divergence: Literal["reverse-kl", "forward-kl", "jensen-shannon", "sampled"]
    """Divergence of the student from its teacher. sampled uses only the sampled tokens."""
    distillation: float
    """Weight of the teacher, in the loss or in each token's reward."""
    jsd_beta: float
    """Jensen-Shannon divergence: share of the teacher in the mixture."""
    teacher_temperature: float
    """Temperature of the teacher's logits. Default: the sampling temperature of each token."""
    teacher_every: int
    """Steps between updates of the teacher to the policy, whose weights it starts from (0: never)."""
    teacher_update_rate: float
    """Share of the way to the policy's weights that an update of the teacher goes (1: it becomes the policy)."""
    teacher_top_k: int
    """Likeliest tokens of which an endpoint gives log-probabilities, for the other divergences (0: none). A folder
    gives whole distributions."""
    branches: int
    """Rollouts that branch at a tool result that raised the entropy (0: none)."""
    branch_first: float
    """Share of a group that starts at the prompt, with --branches."""
    branch_tokens: int
    """Tokens at the start of a reply from which --branches estimates entropy."""
    branch_threshold: float
    """Branch where alpha + beta x the rise in entropy is above this."""
    branch_credit: Literal["soft", "hard"]
    """Advantage of tokens that branches share: the advantage of each rollout (soft), or the mean over them (hard)."""
    dynamic_sampling: int
    """Dynamic sampling: replace groups without signal, up to N times --prompts (0: off)."""
    overlong_filter: bool
    """Exclude truncated episodes from the loss."""
    overlong_cache: int
    """Overlong penalty: tokens before the limit over which it grows to -1 (0: none)."""
    reward_floor: float
    """Map rewards from 0..1 to this..1, such as -1 (0: unchanged)."""
    length_penalty: float
    """Deduction from the reward for each sampled token (0: none)."""
    length_reward: float
    """Weight of the reward for the shorter right replies of a group (0: none)."""
    redistribution: Literal["even", "entropy", "none"]
    """Redistribute the final reward over the tokens of a reply: evenly, or by the policy's entropy (none: the last
    token earns it)."""
    redistribution_share: float
    """Share of the final reward that is redistributed."""
    imitation: float
    """Weight of the likelihood of right replies in the loss (0: none)."""
    ptx_coefficient: float
    """Weight of the likelihood of --ptx texts in the loss."""
    ptx_weight: Literal["equal", "probability", "uncertainty"]
    """Weight of each token of --ptx texts, without a gradient: equal, its probability p (DFT), or uncertainty, p (1 -
    p) (CHORD)."""
    trust_region: float
    """Natural gradient steps within this KL, in nats per token, instead of an optimizer's (0: --optimizer)."""
    target_kl: float
    """End a step's updates after one whose KL to the policy before them is above this, in nats per token (0: never)."""
    replay: int
    """Replay buffer, in rollouts (0: on-policy, only the step's own). A --correction, or a ratio with --old-policy
    sampler, corrects for the weights that sampled them."""
    reference_every: int
    """Steps between updates of the reference to the policy (0: never)."""
    reference_update_rate: float
    """Share of the way to the policy's weights that an update of the reference goes (1: it becomes the policy)."""
    epochs: int
    """Passes over the rollouts of a step."""
    minibatches: int
    """Optimizer updates per pass."""

class PreferOptions(AlgorithmOptions, PassesOptions, total=False):
    """Options of posttrain prefer."""

    env: str
    """Reward function or environment: my.py:reward, package.module:name, a verifier such as verify:exact_match, or a
    built-in name. Settings follow the name: search-qa,topk=5. Add verifiers up with weights: "verify:exact_match*0.9 +
    verify:tags*0.1". Functions written for other trainers: trl:rewards.py:accuracy,format and
    verl:score.py:compute_score. harbor:FOLDER is a set of tasks in containers, which makes its rows too. Built in are
    adventure, arithmetic, calculator, code, code-all, code-choice, countdown, functions, gsm8k, guess, gymnasium,
    judge, math, nemo-gym, nim, openenv, python, reasoning-gym, refusal, reward-model, search-qa, shapes, textarena,
    unscored, verdict, word-problems and worked-sums. In sft, the replies of rows run through it; for rows without
    replies, its row_to_task, if any, writes the demonstrations."""
    link: Literal[
        "sigmoid",
        "robust",
        "square",
        "hinge",
        "self-play",
        "anchored-up",
        "anchored-down",
        "contrast",
        "reverse-kl",
        "classifier",
        "prospect",
        "plackett-luce",
    ]
    """Loss on the scores of responses."""
    beta: float
    """Scale of the score differences. The larger it is, the closer the policy stays to its reference."""
    smoothing: float
    """Label smoothing: share of the comparisons assumed to be mislabelled."""
    noise: float
    """Share of the comparisons that are mislabelled (robust DPO)."""
    desirable: float
    """Weight of responses that are labelled good (KTO)."""
    undesirable: float
    """Weight of responses that are labelled bad (KTO)."""
    score: Literal["log-ratio", "likelihood", "odds"]
    """Score of a response: log ratio to the reference, likelihood, or odds."""
    length_normalised: bool
    """Average scores over a response's tokens, instead of summing them."""
    divergence: Literal["reverse-kl", "forward-kl", "jensen-shannon", "alpha"]
    """Divergence from the reference, in place of the reverse KL."""
    tail: float
    """Weight of the tokens by which a response is longer than the other one of its comparison. 1: as other tokens."""
    denominator: Literal["comparison", "prompt"]
    """Average the loss over comparisons, or over prompts."""
    preference: float
    """Weight of the comparisons in the loss, relative to --imitation."""
    margin: float
    """Target margin: how much higher the better response's scaled score must be (0: none)."""
    row_margins: float
    """Weight of the margins in the rows (0: ignore them)."""
    imitation: float
    """Weight of the likelihood of the better responses in the loss (0: none)."""
    imitation_per: Literal["tokens", "responses", "sums"]
    """Normalise --imitation by all tokens, by each response's tokens, or not at all."""
    policy_weight: bool
    """Weight comparisons by the policy's probability of their responses (WPO)."""
    transport: Literal["paired", "unpaired", "none"]
    """Compare sorted distributions instead of responses: margins of policy and reference, or good and bad scores
    (AOT)."""
    reference_every: int
    """Steps between updates of the reference to the policy (0: never)."""
    reference_update_rate: float
    """Share of the way to the policy's weights that an update of the reference goes (1: it becomes the policy)."""

class RewardModellingOptions(AlgorithmOptions, PassesOptions, total=False):
    """Options of posttrain reward-model."""

    pooling: Literal["last", "mean"]
    """Hidden states to score: of a reply's last token, or the mean over its tokens. transformers cannot load mean."""
    head: Literal["linear", "mlp"]
    """Head of the reward model: one linear layer, or two with a tanh between. transformers cannot load mlp."""
    env: str
    """Reward function or environment: my.py:reward, package.module:name, a verifier such as verify:exact_match, or a
    built-in name. Settings follow the name: search-qa,topk=5. Add verifiers up with weights: "verify:exact_match*0.9 +
    verify:tags*0.1". Functions written for other trainers: trl:rewards.py:accuracy,format and
    verl:score.py:compute_score. harbor:FOLDER is a set of tasks in containers, which makes its rows too. Built in are
    adventure, arithmetic, calculator, code, code-all, code-choice, countdown, functions, gsm8k, guess, gymnasium,
    judge, math, nemo-gym, nim, openenv, python, reasoning-gym, refusal, reward-model, search-qa, shapes, textarena,
    unscored, verdict, word-problems and worked-sums. In sft, the replies of rows run through it; for rows without
    replies, its row_to_task, if any, writes the demonstrations."""
    link: Literal["sigmoid", "plackett-luce", "cross-entropy", "squared-error"]
    """Loss on the scores of responses."""
    beta: float
    """Scale of the score differences. The larger it is, the closer the policy stays to its reference."""
    smoothing: float
    """Label smoothing: share of the comparisons assumed to be mislabelled."""
    noise: float
    """Share of the comparisons that are mislabelled (robust DPO)."""
    desirable: float
    """Weight of responses that are labelled good (KTO)."""
    undesirable: float
    """Weight of responses that are labelled bad (KTO)."""
    denominator: Literal["comparison", "prompt"]
    """Average the loss over comparisons, or over prompts."""
    margin: float
    """Target margin: how much higher the better response's scaled score must be (0: none)."""
    row_margins: float
    """Weight of the margins in the rows (0: ignore them)."""
    sign_penalty: float
    """Penalty for better responses that score below 0, and worse ones above."""
    size_penalty: float
    """Penalty on squared scores."""

class DistillOptions(RLOptions, total=False):
    """Options of posttrain distill."""

    teachers: dict[str, str]
    """Teachers that tasks choose with a column "teacher": --teachers.maths runs/maths --teachers.code runs/code. Tasks
    without a choice use --teacher."""
    teacher_prompt_template: str | None
    """Prompt for the teacher in place of the student's, built from columns: "{hint} {prompt}". A column
    "teacher_prompt" (text, or a list of messages) does the same."""

class SearchOptions(TypedDict, total=False):
    """Options of several verbs."""

    search: Sequence[Literal["best-of-n", "beam", "best-first", "lookahead", "mcts"]]
    """Search for each reply: the policy proposes steps, and a process reward model (--reward-model), or its own critic
    (--search-value critic), chooses among them. best-of-n: whole replies. beam: continues the best partial replies.
    best-first: continues the best one. lookahead: a beam that values steps by greedy rollouts. mcts: PUCT. Of several
    searches, each finds --samples replies."""
    search_value: Literal["reward-model", "critic"]
    """Value of a partial reply: that of --reward-model, or the return that the critic of the policy's own run expects
    from there on. Such a run is one of ppo, for example."""
    search_width: int
    """Number of partial replies that a beam keeps, or of whole replies after which best-first ends. mcts reads it only
    for the default of --search-tokens."""
    search_proposals: int
    """Steps that are proposed after each partial reply. best-of-n samples --search-width times as many whole
    replies."""
    search_tokens: int | None
    """Budget of sampled tokens per reply, those of discarded steps and rollouts included. Default: the most that best-
    of-n can take."""
    search_lookahead: int
    """Number of steps in a rollout of --search lookahead."""
    search_exploration: float
    """The constant c of PUCT, for --search mcts: higher values visit more partial replies."""
    choose: Literal["best", "majority", "weighted", "verified"]
    """Choice among the whole replies that a search has found: the highest value (best), the most frequent final answer
    (majority), the answer with the highest sum of values (weighted), or the highest probability of yes when the policy
    is asked whether its reply is right (verified). best-of-n with majority or verified needs no reward model."""
    verify_question: str
    """Question for --choose verified: a user message after the reply, or after a prompt without messages a line of its
    own. The verdict is Yes or No."""

class EvaluationOptions(
    SearchOptions,
    SeedOptions,
    HardwareOptions,
    HeldOutOptions,
    ReplicaOptions,
    StepRewardOptions,
    EnvWorkerOptions,
    EpisodeOptions,
    SamplingOptions,
    DataOptions,
    total=False,
):
    """Options of posttrain eval."""

    against: Sequence[str]
    """Other models, one or several: --model is compared with each, task by task."""
    suite: str | None
    """TOML file of several evaluations, instead of --tasks: one table each, whose keys are options of this command."""
    harness: str | None
    """Tasks of EleutherAI's lm-evaluation-harness, by name or file (my_task.yaml), besides --tasks or instead of them.
    Their figures are computed with this model's log-probabilities and engine. Needs the extra lm-eval."""
    samples: int
    """Replies per task."""
    k: Sequence[int]
    """Values of k for pass@k."""
    maj: Sequence[int]
    """Values of k for maj@k (self-consistency): the share of tasks whose most frequent final answer among k replies is
    right. A reply votes with the content of \boxed{} or <answer>, with what follows "the answer is", else with its last
    number."""
    scorer: str
    """Scorer of replies, besides the reward: reward-model=FOLDER, judge=RECIPE.toml, or a reward function
    (my.py:reward, verify:NAME). With --against it gives win rates, for which a judge may also be pairwise."""
    best: Sequence[int]
    """Values of k for best@k (best-of-N): the share of tasks where the reply with the highest score of --scorer among k
    replies is right."""
    forget: str | None
    """Texts, or prompts with responses, whose loss in nats per token is reported too, to see what a model has
    forgotten. With --against, text by text."""
    price: float | None
    """Price of a million sampled tokens, in any currency: the cost of each model's replies is reported too."""
    success: float | None
    """Reward from which a reply counts as right. Default: the environment's own SUCCESS."""
    out: str | None
    """JSON file for all figures and rewards. The rollouts go into a file beside it that ends in .rollouts.parquet."""
    overwrite: bool
    """Replace the file at --out."""
    inspect_log: str | None
    """Log that inspect-ai opens (inspect view, read_eval_log): FILE.eval or FILE.json, with a sample for each reply.
    The models of --against, the parts of a suite and --harness each get a log of their own beside it."""

class SearchedOptions(SearchOptions, ServiceOptions, total=False):
    """Options of several verbs."""

    step_delimiter: str
    """Text at which a step ends; or line, or a regular expression between slashes: "/(?=Step [0-9])/"; reply: the reply
    is one step."""
    step_aggregate: Literal["sum", "mean", "min", "last", "product"]
    """Value of a partial reply, from the probabilities of its steps: last if the reward model predicts whether the
    reply will be right; min or product if it predicts whether the step is right."""

class SampleOptions(ReplicaOptions, HardwareOptions, SearchedOptions, EnvWorkerOptions, DataOptions, total=False):
    """Options of posttrain sample."""

    samples: int
    """Replies per prompt, for each model, temperature, top-p and seed."""
    temperature: Sequence[float]
    """Sampling temperatures; each is used. 0 is greedy and gives one reply."""
    top_p: Sequence[float]
    """Sample from the smallest set of tokens with this total probability. Of several values, each is used."""
    top_k: int
    """Sample from the K most likely tokens (0: all)."""
    seed: Sequence[int]
    """Random seeds; each is used. The same seed gives the same replies."""
    max_tokens: int
    """Maximum number of tokens in a reply."""
    stop: Sequence[str]
    """Strings that end a reply."""
    kind: str
    """Column with the kind of a prompt, for --kinds."""
    kinds: dict[str, dict[str, str]]
    """Settings by kind of prompt: --kinds.code.temperature 0.2,0.6 --kinds.code.max_tokens 512. Or a table
    [sample.kinds.code] in a recipe. The settings are samples, temperature, top_p, top_k, max_tokens and stop."""
    adaptive: int | None
    """Sample up to this many replies for prompts whose first --samples replies disagree."""
    disagreement: float
    """With --adaptive: threshold of disagreement. Disagreement is the highest score minus the lowest, with an
    environment or a reward model; else 1 minus the mean edit similarity of two replies, from 0 to 1."""
    distinct: bool
    """Write equal replies to a prompt once, with their number in "times"."""
    out: str
    """File to write: one line of JSON per prompt."""
    resume: bool
    """Continue the file in --out after its last whole line. Options, tasks and models must be the same."""
    overwrite: bool
    """Replace the file at --out."""
    quiet: bool
    """Show no progress."""

class LabelOptions(EnvWorkerOptions, SeedOptions, FromRowsOptions, total=False):
    """Options of posttrain label."""

    out: str
    """File to write: the rows with "scores", "comparisons" or "ranks"."""
    resume: bool
    """Continue the file in --out after its last whole line. Rows and labeller must be the same."""
    overwrite: bool
    """Replace existing files."""
    best: str | None
    """Also write prompts with their best responses to this file, for sft."""
    top: int
    """With --best: number of responses per prompt, the best first."""
    at_least: float | None
    """With --best: only responses with at least this score."""
    pairs: str | None
    """Also write pairs (prompt, chosen, rejected) to this file, for prefer and reward-model."""
    pair: Literal["extremes", "random"]
    """With --pairs: compare the best with the worst response of a prompt, or a random pair."""
    margin: float
    """With --pairs: minimum difference between the two scores."""
    flip: float
    """Probability of swapping a comparison: label noise for experiments."""
    comparisons: int | None
    """Pairwise judges: compare at most N pairs of responses per prompt, drawn at random. Default: all."""
    device: str
    """Where a reward model computes: auto, cpu, cuda ..."""
    threads: int | None
    """CPU threads. Default: PyTorch's choice."""

def sft(tasks: Rows, **options: Unpack[SFTOptions]) -> Run:
    """Supervised fine-tuning on responses, conversations or recorded episodes. Rows have "prompt" and
    "response", or chat "messages".

    `tasks`: a path, rows in memory, a generator, or a function that makes rows without end. Options are
    those of `posttrain sft --help-all`.

    Raises UserError for a mistake of the caller's."""
    ...

def rl(
    tasks: Rows,
    env: str | Callable[..., Any] | None = None,
    model: str | PathLike[str] | None = None,
    **options: Unpack[RLOptions],
) -> Run:
    """Reinforcement learning from a reward function, a verifier or an environment. `env`: a reward
    function (task, reply) -> float, an environment, or the name of one.

    `tasks`: a path, rows in memory, a generator, or a function that makes rows without end. Options are
    those of `posttrain rl --help-all`.

    Raises UserError for a mistake of the caller's."""
    ...

def prefer(tasks: Rows, model: str | PathLike[str] | None = None, **options: Unpack[PreferOptions]) -> Run:
    """Learn from preferences without sampling (DPO and its family). Rows have "prompt", "chosen" and
    "rejected"; or several "responses" with ranks, comparisons or labels; or one "response" with a
    "label".

    `tasks`: a path, rows in memory, a generator, or a function that makes rows without end. Options are
    those of `posttrain prefer --help-all`.

    Raises UserError for a mistake of the caller's."""
    ...

def reward_model(
    tasks: Rows, model: str | PathLike[str] | None = None, **options: Unpack[RewardModellingOptions]
) -> Run:
    """Train a reward model from pairs, rankings, labels or scores. Rows are as for `prefer`, or have a
    "response" with a "score" or with "steps".

    `tasks`: a path, rows in memory, a generator, or a function that makes rows without end. Options are
    those of `posttrain reward-model --help-all`.

    Raises UserError for a mistake of the caller's."""
    ...

def distill(
    tasks: Rows,
    model: str | PathLike[str] | None = None,
    teacher: str | PathLike[str] | None = None,
    env: str | Callable[..., Any] | None = None,
    **options: Unpack[DistillOptions],
) -> Run:
    """On-policy distillation: a teacher scores what a student samples. `teacher`: a model of any size with
    the same tokenizer. With `env`, replies are scored as well.

    `tasks`: a path, rows in memory, a generator, or a function that makes rows without end. Options are
    those of `posttrain distill --help-all`.

    Raises UserError for a mistake of the caller's."""
    ...

def evaluate(
    tasks: Rows | None = None,
    env: str | Callable[..., Any] | None = None,
    model: str | PathLike[str] | None = None,
    **options: Unpack[EvaluationOptions],
) -> Evaluated:
    """Mean reward, accuracy and pass@k on a set of tasks; --against compares models. Every figure has a
    95% interval.

    `tasks`: a path, rows in memory, a generator, or a function that makes rows without end. Options are
    those of `posttrain eval --help-all`.

    Raises UserError for a mistake of the caller's."""
    ...

def sample(
    tasks: Rows,
    model: str | PathLike[str] | Sequence[str] | None = None,
    env: str | Callable[..., Any] | None = None,
    **options: Unpack[SampleOptions],
) -> Written:
    """Sample replies to label or to learn from. With `env` or a reward model, replies have scores.

    `tasks`: a path, rows in memory, a generator, or a function that makes rows without end. Options are
    those of `posttrain sample --help-all`.

    Raises UserError for a mistake of the caller's."""
    ...

def label(items: Rows, by: str | Callable[..., Any] | None = None, **options: Unpack[LabelOptions]) -> LabelSummary:
    """Label replies: by a reward model, judge, function or person. `by`: "reward-model=FOLDER",
    "judge=RECIPE.toml", or a reward (task, reply) -> float.

    `items`: a path, rows in memory, a generator, or a function that makes rows without end. Options are
    those of `posttrain label --help-all`.

    Raises UserError for a mistake of the caller's."""
    ...
