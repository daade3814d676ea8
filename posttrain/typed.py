"""The options of the front door, for editors.

Written by `python -m posttrain.cli.write_types` from where the options are declared.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class FromRowsOptions(TypedDict, total=False):
    """Options of several verbs."""

    split: str | None
    """Which split of a dataset that has several."""
    limit: int | None
    """Read only this many rows, the first ones."""
    fields: dict[str, str]
    """Names of columns: --fields.prompt question --fields.answer solution. A reward finds them under both names."""
    prompt_template: str | None
    """A prompt made from columns: "Question: {question}\\nAnswer:". A brace is {{ or }}. On the command line \\n and
    \\t are read as a new line and a tab."""


class DataOptions(FromRowsOptions, total=False):
    """Options of several verbs."""

    response_template: str | None
    """A response made from columns, in the same way (sft)."""
    too_long: Literal["skip", "truncate", "refuse"]
    """What happens to rows that do not fit the model's context (in rl: prompts that leave no room for a reply). skip:
    they are left out and counted; truncate: prompts lose their beginning, demonstrations their end, and what is shown
    later in an episode its middle; refuse: all are measured before the first step, and one of them ends the run."""
    chat_template: str | None
    """How messages and tools become text: a file of Jinja, or chatml. It takes the place of the model's own, and is
    written into the checkpoints of a run. Default: what the model's folder holds."""
    chat: bool | None
    """Show plain prompts of rows as messages of a user, in the model's chat template; responses of sft, prefer and
    reward-model are then the assistant's. --no-chat: as bare text. Default: as the run did that the model is of, or
    else in the template of instruct models (one that ends replies as the model does). Rows of messages are in it
    anyway."""
    system: str | None
    """A system message before these prompts, and before rows of messages that have none. Default: that of the run that
    the model is of."""


class TrainingOptions(DataOptions, total=False):
    """Options of several verbs."""

    out: str
    """The run directory to make."""
    resume: bool
    """Continue the run in --out from its newest undamaged checkpoint, exactly."""
    accept_changes: bool
    """Resume even though tasks, model or reward have changed, or part of the record is lost; run.json notes it."""
    overwrite: bool
    """Delete a run that is already in --out."""
    seed: int
    """Decides data order, sampling and initial weights."""
    held_out: float
    """Share of the tasks kept out of training and used for evaluation."""
    split_seed: int | None
    """Decides which tasks are held out; default: --seed. Runs with different seeds that are to be compared on the same
    tasks need the same one."""
    eval_every: int
    """Steps between evaluations on the held-out tasks (0: before and after training only)."""
    save_every: int
    """Steps between checkpoints; one more is made at the end."""
    keep: int
    """How many checkpoints to keep."""
    record: Literal["tokens", "sample", "full"]
    """What is recorded of single tokens. tokens: ids, and the engine's log-probabilities; sample: of 8 groups a step,
    drawn by the seed, also what the update made of them (the learner's and the reference's log-probabilities, entropy,
    weight in the loss ...); full: of all groups. No result depends on it."""
    record_after: bool
    """Record also the log-probabilities of these tokens under the weights that the step ends with: one more forward
    pass over their groups."""
    tokens_per_microbatch: int | None
    """How many tokens go through the model at once, beside a prompt: the memory of an update. No result depends on it.
    Default: 1024 on a CPU, 8192 elsewhere."""
    lr: float
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"]
    """How the learning rate falls after the warm-up; linear and cosine end at 0."""
    warmup: int
    """Updates over which the learning rate rises."""
    weight_decay: float
    """Decoupled weight decay of matrices."""
    betas: tuple[float, float]
    """AdamW's moment decay rates."""
    max_grad_norm: float
    """Gradients are clipped to this norm (0: no clipping)."""
    router_balance: float
    """Mixtures of experts: coefficient of the loss that balances the load of experts (Switch: 0.01). It is of the whole
    optimizer batch."""
    router_z: float
    """Mixtures of experts: coefficient of the loss that keeps the router's logits small (ST-MoE: 0.001)."""
    lora: int | None
    """Train low-rank adapters of this rank (LoRA) instead of the weights, which stay as they are: a fraction of the
    memory of gradients and moments. Checkpoints hold the adapters, in PEFT's form. A run that begins with an adapter
    goes on with that."""
    lora_alpha: float | None
    """What the adapters add is multiplied by alpha / rank; default: twice the rank (arXiv 2405.09673)."""
    lora_targets: tuple[str, ...]
    """The matrices that are adapted: all-linear, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and
    down_proj."""
    quantize: Literal["nf4", "int8"] | None
    """With --lora: hold the frozen weights of the layers in four bits (NF4, as QLoRA does) or eight, and unpack them
    for each product."""
    rslora: bool
    """Divide alpha by the square root of the rank instead (rsLoRA): large ranks then learn as fast as small ones."""
    dora: bool
    """With --lora: let the length of each row of an adapted matrix learn by itself, and the adapters turn it (DoRA)."""
    precision: Literal["float32", "bfloat16"]
    """Arithmetic of forward and backward passes; weights and moments stay in float32."""
    device: str
    """auto, cpu, cuda, cuda:1 ..."""
    threads: int | None
    """CPU threads; default: PyTorch's choice."""
    compiled: bool
    """On a CPU, compile the inner loops where a C compiler is found; --no-compiled: use torch's operations alone."""
    health: Literal["warn", "stop", "log", "off"]
    """What to do when something goes wrong (entropy collapse, length or KL blow-up, no signal, a reward that jumps,
    skipped updates): warn, stop with a checkpoint, only log it, or do not check. After 5 steps in a row whose updates
    were all skipped because their gradients were not finite, the run stops, unless this is off."""
    quiet: bool
    """No progress display."""
    train_vision: bool
    """Of a model that sees: train what makes features of pictures too (the tower, and what brings them to the width of
    the text); by default it stays as it is."""
    processes: int
    """Processes of this machine that share the run: each plays and computes its share, and holds the whole model.
    Several machines: start one process each with torchrun."""
    shard: bool
    """Deal the weights out to the processes, with gradients and moments: each holds its rows of every matrix, and
    gathers a layer when it is its turn."""
    patience: float
    """Seconds within which each of several processes has to come to the next thing that they do together."""
    restarts: int
    """How often several processes are started again, from the newest checkpoint, when one of them was killed or
    crashed."""


class PassesOptions(TrainingOptions, total=False):
    """Options of several verbs."""

    epochs: float
    """Passes over the rows."""
    steps: int | None
    """Optimizer updates, instead of --epochs; required for rows without end."""
    rows: int
    """Prompts per optimizer update, each with all its responses."""


class SFTOptions(PassesOptions, total=False):
    """Options of posttrain sft."""

    mask_prompt: bool
    """Learn the responses only; --no-mask-prompt: the prompts too."""
    min_reward: float | None
    """Of rollouts that a run kept, and of replies that are played through --env: imitate those with this reward or
    more."""
    env_seconds: float
    """Time limit of one call of the environment, as in rl."""
    env_memory: float
    """Memory limit of the environment's process, in GiB, as in rl."""
    retriever: tuple[str, ...]
    """What the environment asks for passages while replies are played: the folder of an index, or an address, as in
    rl."""
    hidden: int
    """From scratch: width of the residual stream."""
    layers: int
    """From scratch: number of layers."""
    heads: int
    """From scratch: query heads."""
    kv_heads: int | None
    """From scratch: key-value heads; default: as many as query heads."""
    intermediate: int | None
    """From scratch: width of the feed-forward layers; default: 8/3 of hidden, rounded up to a multiple of 32."""
    context: int
    """From scratch: most tokens of prompt and reply together."""
    tokenizer: str
    """From scratch: bpe or characters, trained on the rows; or a folder to take one from."""
    vocab: int
    """From scratch: most entries of the tokenizer to train."""
    model: str | None
    """Folder of a Hugging Face checkpoint, of one of our runs, or a model's name. In sft: leave it out to start from
    scratch with the sizes below."""
    env: str
    """What plays and scores: my.py:reward, package.module:name, or a built-in name, perhaps with options of its own:
    search-qa,topk=5. Built in are adventure, arithmetic, calculator, code, code-all, code-choice, countdown, functions,
    gsm8k, guess, gymnasium, judge, math, nim, openenv, python, reasoning-gym, reward-model, search-qa, shapes,
    textarena, verdict and word-problems. In sft, rows with replies are played through it; for other rows its
    row_to_task makes the demonstrations, if it has one."""


class PreferOptions(PassesOptions, total=False):
    """Options of posttrain prefer."""

    algorithm: str
    """A row of the table (see `posttrain algorithms`), or your own: my.py:row."""
    settings: dict[str, Any]
    """Changes to the row, by flag or by place: {"beta": 0.2, "link.smoothing": 0.1}."""
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
    """What is done with the scores of responses."""
    beta: float
    """How much a difference of scores counts; the larger, the closer the policy stays to its reference."""
    smoothing: float
    """Share of the comparisons assumed to be labelled wrongly."""
    noise: float
    """Share of the comparisons that are labelled wrongly."""
    desirable: float
    """Weight of responses labelled good."""
    undesirable: float
    """Weight of responses labelled bad."""
    score: Literal["log-ratio", "likelihood", "odds"]
    """What is compared: the log ratio to the reference, the likelihood, the odds."""
    length_normalised: bool
    """Scores are means over a response's tokens instead of sums."""
    divergence: Literal["reverse-kl", "forward-kl", "jensen-shannon", "alpha"]
    """From the reference, in place of the reverse KL."""
    tail: float
    """Weight of a response's tokens behind the length of the shorter one it is compared with (1: as the others)."""
    denominator: Literal["comparison", "prompt"]
    """What weighs the same: every comparison, or every prompt."""
    preference: float
    """Weight of the comparisons in the loss, beside imitation."""
    margin: float
    """By how much the better response's scaled score has to be higher (0: not at all)."""
    row_margins: float
    """What the margins that rows give count (0: not at all)."""
    imitation: float
    """Weight of the likelihood of the better responses in the loss (0: none)."""
    imitation_per: Literal["tokens", "responses", "sums"]
    """Denominator of that likelihood: all their tokens, each response's own, or none."""
    policy_weight: bool
    """Let comparisons count by the policy's own probability of their responses."""


class RewardModellingOptions(PassesOptions, total=False):
    """Options of posttrain reward-model."""

    algorithm: str
    """A row of the table: bradley-terry, k-wise, plackett-luce, outcome (labels, also of steps), regression; or your
    own: my.py:row."""
    settings: dict[str, Any]
    """Changes to the row, by flag or by place."""
    pooling: Literal["last", "mean"]
    """What is scored: the last token of a reply, or the mean over all of them (which transformers cannot load)."""
    head: Literal["linear", "mlp"]
    """The head: one linear layer, or two with a tanh between (which transformers cannot load)."""
    link: Literal["sigmoid", "plackett-luce", "cross-entropy", "squared-error"]
    """What is done with the scores of responses."""
    beta: float
    """How much a difference of scores counts; the larger, the closer the policy stays to its reference."""
    smoothing: float
    """Share of the comparisons assumed to be labelled wrongly."""
    noise: float
    """Share of the comparisons that are labelled wrongly."""
    desirable: float
    """Weight of responses labelled good."""
    undesirable: float
    """Weight of responses labelled bad."""
    denominator: Literal["comparison", "prompt"]
    """What weighs the same: every comparison, or every prompt."""
    margin: float
    """By how much the better response's scaled score has to be higher (0: not at all)."""
    row_margins: float
    """What the margins that rows give count (0: not at all)."""
    sign_penalty: float
    """Weight of better scores below 0, and of worse ones above."""
    size_penalty: float
    """Weight of the squares of the scores."""


class RLOptions(TrainingOptions, total=False):
    """Options of posttrain rl."""

    algorithm: str
    """A row of the table (see `posttrain algorithms`), or your own: my.py:row."""
    settings: dict[str, Any]
    """Changes to the row, by flag or by place: {"clip_high": 0.28, "advantage.eps": 1e-4}."""
    critic: Literal["separate", "shared"] | None
    """For rows with a critic of states: a backbone of its own (the default), or a head on the policy's."""
    critic_model: str | None
    """Folder the critic's backbone starts from: a checkpoint, a reward model, or the critic of a run; default:
    --model."""
    critic_lr: float | None
    """Peak learning rate of the critic; default: --lr."""
    ptx: str | None
    """Rows of text, or of prompts and responses, whose likelihood is part of every update (ppo-ptx)."""
    steps: int
    """Training steps."""
    prompts: int
    """Tasks per step."""
    group: int
    """Rollouts per task."""
    max_tokens: int
    """Token budget of a reply."""
    max_episode_tokens: int | None
    """Environments of several turns: token budget of all replies of an episode together; default: none."""
    max_turns: int
    """Environments of several turns: how many replies an episode may have."""
    max_tool_calls: int | None
    """Environments of several turns: how many answers of tools an episode may show; default: no limit."""
    episode_seconds: float | None
    """Environments of several turns: an episode that has taken so long shows no further turn. Results then depend on
    the clock; default: no limit."""
    ahead: int
    """How many steps before it is learned from a step is played, beside the updates, by weights that are as much older
    (0: by the newest). A --correction, or a ratio with --old-policy sampler, makes up for most of that: only for
    replies of one token is a weight per token exact."""
    tokens_per_step: int
    """Most tokens of a reply that one step samples; an unfinished one goes on in the next step, with newer weights, and
    its group is learned from when the last of its replies is whole (0: no limit). For environments of one reply."""
    routing_replay: bool
    """Mixtures of experts: tokens are learned from with the experts that sampled them, whatever the router would choose
    by now. With the embedded engine."""
    temperature: float
    """Of sampling; log-probabilities are taken under the same temperature."""
    stop: tuple[str, ...]
    """Strings that end a reply."""
    top_p: float
    """Must stay 1 in training: it would change the distribution that is sampled."""
    top_k: int
    """Must stay 0 in training."""
    eval_tasks: str | None
    """Rows to evaluate on, instead of a held-out share of --tasks."""
    eval_samples: int
    """Replies per held-out task in each evaluation."""
    eval_limit: int
    """How many held-out tasks an evaluation plays at most."""
    success: float | None
    """Replies with at least this reward are right, for accuracy, pass@k and whatever learns from right replies;
    default: what a built-in environment, or SUCCESS = ... beside your own, says."""
    env_workers: int | None
    """Processes that play and score; default: one per CPU core (0: none; everything runs here, without limits, for
    debuggers)."""
    env_seconds: float
    """Time limit of one call of the environment; beyond it the reward is invalid."""
    env_memory: float
    """Memory limit of each of these processes, in GiB; beyond it the reward is invalid (0: no limit)."""
    reward_model: tuple[str, ...]
    """Folder of a reward model (a sequence-classification checkpoint of one label), which environments ask as "reward-
    model"; without --env, its score is the reward. Of several, NAME=FOLDER is asked by its name."""
    judge: tuple[str, ...]
    """Recipe (TOML) of a judge, which environments ask as "judge": a model behind an OpenAI-compatible endpoint, or a
    checkpoint that reasons before its verdict. Without --env, its verdict is the reward. Of several, NAME=RECIPE is
    asked by its name."""
    retriever: tuple[str, ...]
    """What environments ask as "retriever" for passages: the folder of an index (posttrain retriever build), or the
    address of a server that speaks Search-R1's protocol (http://host:8000). Of several, NAME=FOLDER is asked by its
    name."""
    slots: int
    """How many replies are sampled at once: bounds the memory of the key-value cache."""
    engine: Literal["local", "vllm"]
    """What samples: local, with the learner's own weights, or vLLM in a process of its own."""
    engine_cache: float
    """In GiB. vLLM: limit of its key-value cache. local: of what is kept of episodes between their turns; what is let
    go is computed again, to the same bits."""
    engine_seconds: float
    """Engines in other processes: time limit of a hand-over of weights, and of a decoding step. Beyond it one of
    several is started again, and the only one ends the run."""
    replicas: int
    """Sample with so many engines, each a process of this machine with a copy of the weights; 0: with the learner's
    own, in its process (vLLM: one process). No token depends on it, and one that dies is replaced."""
    handover: Literal["copied", "adapter", "nccl", "ipc"]
    """How weights reach vLLM: copied, all of them through memory of the machine, adapters merged; adapter, with --lora,
    the frozen ones once and then the adapters alone. With --replicas on cards: nccl, from card to card; ipc, within one
    card. These two are vLLM's own and have not been tried on cards yet."""
    launch: Literal["local", "ray"]
    """Where --replicas are processes: local, this machine, or ray, wherever a Ray cluster has room (RAY_ADDRESS; else
    one of this machine is made). Other machines have to see --out under the same path."""
    replica_cpus: float
    """--launch ray: CPUs that each replica takes of the cluster; with --device cuda it takes a GPU too."""
    engines: tuple[str, ...]
    """Sample with engines that listen (posttrain engine --listen), here or on other machines: HOST:PORT. They need to
    see --out under the same path, where the weights for them lie."""
    engine_token: str | None
    """File with what engines that listen want to know; default: POSTTRAIN_ENGINE_TOKEN in the environment."""
    engine_restarts: int
    """How often in a row each of several engines is started again. When none is left, the run saves and ends."""
    advantage: Literal["baselined", "to-go", "process", "decoupled", "pass-at-k", "gae", "earned", "none"]
    """How credit is assigned; gae brings a critic."""
    baseline: Literal["none", "batch", "group", "others"]
    """Whose mean reward is subtracted."""
    scale: Literal["none", "batch", "group"]
    """Whose standard deviation advantages are divided by."""
    baseline_weight: Literal["equal", "length", "gradient"]
    """Weight of each reward in that mean; gradient: the optimal baseline, one backward pass per rollout."""
    whiten: bool
    """Normalise advantages to mean 0 and standard deviation 1 over all tokens."""
    gamma: float
    """Discount per sampled token."""
    part_weights: str
    """Weights of the reward's named parts: correct=1 format=0.5."""
    advantage_k: int
    """Replies of which one has to be right (pass@k); below --group."""
    gae_lambda: float
    """Lambda of generalized advantage estimation."""
    gae_alpha: float
    """Lambda by length instead: 1 - 1 / (this times the reply's tokens), at least 0."""
    surrogate: Literal["clip", "ratio", "log-probability", "weighted", "expected-q"]
    """What is maximised: min(r A, clip(r) A), r A, lp A, or sg(r) lp A."""
    clip_low: float
    """The ratio is clipped at 1 - this."""
    clip_high: float
    """The ratio is clipped at 1 + this."""
    clip_dual: float
    """Where A < 0, the objective is at least this times A: above 1 (0: no bound)."""
    weight_at: Literal["token", "reward"]
    """What a ratio weighs: the advantage of its token, or the reward that is earned at it (with --ratio causal exact
    for rewards, whoever sampled)."""
    aggregate: Literal["sequence-mean", "token-mean", "sequence-sum", "constant", "prompt-mean"]
    """Weight of each token in the loss."""
    ratio: Literal["token", "sequence-mean", "sequence-sum", "sequence-value", "causal", "geometric"]
    """Which tokens make up the ratio r; geometric: GMPO's clipped geometric mean."""
    old_policy: Literal["start", "sampler"]
    """Whose log-probabilities the ratio divides by: those of the weights at the start of the step, or those that the
    tokens were sampled with."""
    correction: Literal["truncate", "icepop", "sequence", "sequence-truncate", "none"]
    """Weight for an engine whose log-probabilities differ from the learner's, or whose weights are older, as with
    --ahead and --replay (none: no weight). One per token is unbiased for replies of one token alone."""
    correction_cap: float
    """Bound of that weight, above 1."""
    kl_estimator: Literal["k1", "k2", "k3", "exact", "forward"]
    """How the KL is estimated; exact: over the whole vocabulary. In the loss k2 and exact have the gradient of the KL
    per token, in the reward k1 that of a reply."""
    kl: float
    """Coefficient of the KL penalty to the starting model (0: none, no reference is kept)."""
    kl_where: Literal["loss", "reward"]
    """Whether the KL is part of the loss or subtracted from the reward."""
    kl_control: Literal["fixed", "adaptive", "halving-doubling"]
    """How the coefficient changes from step to step."""
    kl_target: float
    """KL that the control aims at, in nats per token."""
    kl_horizon: float
    """Rollouts over which the adaptive control may change beta by a fifth."""
    entropy: float
    """Coefficient of the entropy bonus (0: none); with a target, where it starts."""
    entropy_target: float
    """Entropy to hold, in nats per token, by tuning the bonus."""
    top_entropy: float
    """Learn from this share of the tokens, those with the highest entropy (1: all)."""
    value_clip: float
    """How far values may move per step (0: no limit)."""
    value_coefficient: float
    """What the value loss weighs."""
    critic_warmup: int
    """Steps at the start in which only the critic learns."""
    critic_tau: float
    """How far the slow copies of action values follow each update."""
    divergence: Literal["reverse-kl", "forward-kl", "jensen-shannon", "sampled"]
    """How far the student is from its teacher; sampled: at the sampled tokens alone."""
    distillation: float
    """Weight of the teacher in the loss, or in each token's reward."""
    jsd_beta: float
    """jensen-shannon: share of the teacher in the mixture."""
    teacher_temperature: float
    """Of the teacher's logits; default: that of sampling."""
    branches: int
    """Rollouts that begin at a tool's answer which raised the entropy (0: none)."""
    branch_first: float
    """Share of a group that begins with the prompt."""
    branch_tokens: int
    """Tokens of a reply from which its entropy is estimated."""
    branch_threshold: float
    """Rollouts branch where alpha + beta x the rise is above it."""
    branch_credit: Literal["soft", "hard"]
    """Advantage of shared tokens: each rollout's own, or the mean of those that share them."""
    dynamic_sampling: int
    """Replace groups without signal, playing at most this many times --prompts (0: off)."""
    overlong_filter: bool
    """Leave truncated episodes out of the loss."""
    overlong_cache: int
    """Tokens before the episode's budget over which a penalty grows to -1 (0: no penalty)."""
    length_reward: float
    """Reward for being among the shorter replies of the group (0: none)."""
    imitation: float
    """Weight of the likelihood of successes in the loss (0: none)."""
    ptx_coefficient: float
    """Weight of the likelihood of the texts of --ptx."""
    trust_region: float
    """Natural gradient steps within this KL, in nats per token, instead of AdamW's (0: AdamW)."""
    replay: int
    """Rollouts to remember and draw from (0: only the step's own). A --correction, or a ratio with --old-policy
    sampler, makes up for the weights that sampled them."""
    reference_every: int
    """Steps after which the reference becomes the policy (0: never)."""
    epochs: int
    """Passes over the rollouts of a step."""
    minibatches: int
    """Optimizer updates per pass."""


class DistillOptions(RLOptions, total=False):
    """Options of posttrain distill."""

    teachers: dict[str, str]
    """Teachers that tasks choose by the column "teacher": --teachers.maths runs/maths --teachers.code runs/code. Tasks
    without a choice have --teacher."""
    teacher_prompt_template: str | None
    """What the teacher reads instead of the prompt, made from columns: "{hint} {prompt}". Or a column "teacher_prompt":
    text, or a list of messages."""


class EvaluationOptions(DataOptions, total=False):
    """Options of posttrain eval."""

    against: str | None
    """A second checkpoint: the two are compared task by task."""
    samples: int
    """Replies per task."""
    k: tuple[int, ...]
    """pass@k for these k."""
    temperature: float
    """Of sampling; 0: greedy."""
    top_p: float
    """Sample from the smallest set of tokens with this probability."""
    top_k: int
    """Sample from this many likeliest tokens (0: all)."""
    max_tokens: int
    """Token budget of a reply."""
    max_episode_tokens: int | None
    """Token budget of all replies of an episode together; default: none."""
    max_turns: int
    """How many replies an episode may have."""
    max_tool_calls: int | None
    """How many answers of tools an episode may show; default: no limit."""
    episode_seconds: float | None
    """An episode that has taken so long shows no further turn; default: no limit."""
    stop: tuple[str, ...]
    """Strings that end a reply."""
    success: float | None
    """Replies with at least this reward are right, as in training."""
    seed: int
    """Decides the samples."""
    held_out: float
    """Use only this held-out share of the tasks, as training with the same --held-out and --split-seed does."""
    split_seed: int | None
    """The --split-seed of the training run that held them out; default: that of the checkpoint's own run, or else 0."""
    out: str | None
    """A .json file for all figures and rewards; the rollouts go beside it, into a file that ends in
    .rollouts.parquet."""
    env_workers: int | None
    """Processes that play and score; default: one per CPU core."""
    env_seconds: float
    """Time limit of one call of the environment."""
    env_memory: float
    """Memory limit of each of these processes, in GiB (0: no limit)."""
    reward_model: tuple[str, ...]
    """Folder of a reward model (a sequence-classification checkpoint of one label), which environments ask as "reward-
    model"; without --env, its score is the reward. Of several, NAME=FOLDER is asked by its name."""
    judge: tuple[str, ...]
    """Recipe (TOML) of a judge, which environments ask as "judge": a model behind an OpenAI-compatible endpoint, or a
    checkpoint that reasons before its verdict. Without --env, its verdict is the reward. Of several, NAME=RECIPE is
    asked by its name."""
    retriever: tuple[str, ...]
    """What environments ask as "retriever" for passages: the folder of an index (posttrain retriever build), or the
    address of a server that speaks Search-R1's protocol (http://host:8000). Of several, NAME=FOLDER is asked by its
    name."""
    slots: int
    """How many replies are sampled at once."""
    replicas: int
    """Sample with so many engines, each a process of this machine with a copy of the weights; 0: in this process. No
    token depends on it."""
    compiled: bool
    """As in training."""
    precision: Literal["float32", "bfloat16"]
    """Arithmetic of the forward passes."""
    device: str
    """auto, cpu, cuda ..."""
    threads: int | None
    """CPU threads; default: PyTorch's choice."""


class SampleOptions(DataOptions, total=False):
    """Options of posttrain sample."""

    samples: int
    """Replies per prompt for each model, temperature, top-p and seed."""
    temperature: tuple[float, ...]
    """Of sampling; several: each of them. 0 is greedy, one reply."""
    top_p: tuple[float, ...]
    """Sample from the smallest set of tokens with this probability; several: each of them."""
    top_k: int
    """Sample from this many likeliest tokens (0: all)."""
    seed: tuple[int, ...]
    """Decides the samples; several: each of them."""
    max_tokens: int
    """Token budget of a reply."""
    stop: tuple[str, ...]
    """Strings that end a reply."""
    kind: str
    """The column that names the kind of a prompt, where kinds have settings of their own."""
    kinds: dict[str, dict[str, str]]
    """Settings by kind of prompt, instead of those above: --kinds.code.temperature 0.2,0.6 --kinds.code.max_tokens 512,
    or a table [sample.kinds.code]. They are samples, temperature, top_p, top_k, max_tokens and stop."""
    adaptive: int | None
    """Sample up to this many (in the place of --samples) for prompts whose first --samples replies disagree."""
    disagreement: float
    """With --adaptive: from where on replies disagree. With an environment or a reward model, the highest score minus
    the lowest; else 1 minus the mean edit similarity of two replies, from 0 to 1."""
    distinct: bool
    """Keep equal replies to a prompt once, with how often they came (times)."""
    out: str
    """The file to write, a line of JSON for each prompt."""
    resume: bool
    """Continue the file in --out after its last whole line; with the same options, tasks and models only."""
    overwrite: bool
    """Replace a file that is already in --out."""
    env_workers: int | None
    """Processes that play and score; default: one per CPU core."""
    env_seconds: float
    """Time limit of one call of the environment."""
    env_memory: float
    """Memory limit of each of these processes, in GiB (0: no limit)."""
    reward_model: tuple[str, ...]
    """Folder of a reward model, whose scores are written beside the replies; as in evaluation."""
    judge: tuple[str, ...]
    """Recipe (TOML) of a judge, whose scores are written beside the replies; as in evaluation."""
    retriever: tuple[str, ...]
    """What environments ask for passages: the folder of an index, or the address of a server; as in evaluation."""
    slots: int
    """How many replies are sampled at once."""
    replicas: int
    """Sample with so many engines, each a process of this machine with a copy of the weights; 0: in this process. No
    token depends on it."""
    compiled: bool
    """As in training."""
    precision: Literal["float32", "bfloat16"]
    """Arithmetic of the forward passes."""
    device: str
    """auto, cpu, cuda ..."""
    threads: int | None
    """CPU threads; default: PyTorch's choice."""
    quiet: bool
    """No progress lines."""


class LabelOptions(FromRowsOptions, total=False):
    """Options of posttrain label."""

    out: str
    """The file to write: the items with "scores", "comparisons" or "ranks"."""
    resume: bool
    """Continue the file in --out after its last whole line; with the same items and labeller only."""
    overwrite: bool
    """Replace files that are already there."""
    best: str | None
    """Also write this file: prompts with their best responses, for sft."""
    top: int
    """With --best: how many responses of a prompt, the best first."""
    at_least: float | None
    """With --best: only responses with at least this score."""
    pairs: str | None
    """Also write this file: rows with prompt, chosen and rejected, for prefer and reward-model."""
    pair: Literal["extremes", "random"]
    """With --pairs: the best against the worst response of a prompt, or a random pair."""
    margin: float
    """With --pairs: the scores of the two differ by at least so much."""
    flip: float
    """Turn comparisons round with this probability: noise for experiments."""
    comparisons: int | None
    """Pairwise judges: compare at most so many pairs of responses to a prompt, drawn at random; default: all."""
    seed: int
    """Decides random pairs, flips, and the order in which a person sees replies."""
    env_workers: int | None
    """Processes that score; default: one per CPU core."""
    env_seconds: float
    """Time limit of one call of the reward function."""
    env_memory: float
    """Memory limit of each of these processes, in GiB (0: no limit)."""
    device: str
    """Of a reward model: auto, cpu, cuda ..."""
    threads: int | None
    """CPU threads; default: PyTorch's choice."""
