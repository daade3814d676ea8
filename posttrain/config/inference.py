"""Options of what uses models and data without training: eval, check, sample, label, chat, serve-policy and retriever."""

from dataclasses import dataclass
from typing import Literal

from posttrain.config.option_groups import OptionGroup
from posttrain.config.row_options import ChatTemplateGroup, Data, FromRows
from posttrain.config.search_options import SearchedGroup, SearchGroup
from posttrain.config.service_options import ScorerOption
from posttrain.config.shared_options import (
    EnvLimitGroup,
    EnvWorkerGroup,
    EpisodeGroup,
    HardwareGroup,
    HeldOutGroup,
    ReplicaGroup,
    SamplingGroup,
    SeedGroup,
    StepRewardGroup,
)
from posttrain.core.component import option
from posttrain.core.types import UserError


@dataclass(frozen=True)
class Evaluation(
    SearchGroup,
    SeedGroup,
    HardwareGroup,
    HeldOutGroup,
    ReplicaGroup,
    StepRewardGroup,
    EnvWorkerGroup,
    EpisodeGroup,
    SamplingGroup,
    Data,
):
    """Mean reward, accuracy and pass@k on a set of tasks, with 95% confidence intervals."""

    model: str = option("", group="model", first_hour=True, value="FOLDER")
    """Model to evaluate: the folder of a checkpoint or of a run, a .gguf file, or org/name of the Hugging Face Hub."""
    against: tuple[str, ...] = option((), group="model", first_hour=True, value="FOLDER")
    """Other models, one or several: --model is compared with each, task by task."""
    suite: str | None = option(None, group="data", first_hour=True, value="FILE")
    """TOML file of several evaluations, instead of --tasks: one table each, whose keys are options of this command."""
    harness: str | None = option(None, group="data", value="lm-eval:TASK,TASK")
    """Tasks of EleutherAI's lm-evaluation-harness, by name or file (my_task.yaml), besides --tasks or instead of them.
    Their figures are computed with this model's log-probabilities and engine. Needs the extra lm-eval."""
    samples: int = option(8, above=0, most=100_000, group="sampling", first_hour=True)
    """Replies per task."""
    k: tuple[int, ...] = option((1, 4, 8), above=0, group="evaluation", first_hour=True)
    """Values of k for pass@k."""
    maj: tuple[int, ...] = option((), above=0, group="evaluation", value="K")
    """Values of k for maj@k (self-consistency): the share of tasks whose most frequent final answer among k replies is
    right. A reply votes with the content of \\boxed{} or <answer>, with what follows "the answer is", else with its last
    number."""
    scorer: str = option("", group="evaluation", value="SCORER")
    """Scorer of replies, besides the reward: reward-model=FOLDER, judge=RECIPE.toml, or a reward function
    (my.py:reward, verify:NAME). With --against it gives win rates, for which a judge may also be pairwise."""
    best: tuple[int, ...] = option((), above=0, group="evaluation", value="K")
    """Values of k for best@k (best-of-N): the share of tasks where the reply with the highest score of --scorer among k
    replies is right."""
    forget: str | None = option(None, group="evaluation", value="ROWS")
    """Texts, or prompts with responses, whose loss in nats per token is reported too, to see what a model has forgotten.
    With --against, text by text."""
    price: float | None = option(None, least=0, group="evaluation")
    """Price of a million sampled tokens, in any currency: the cost of each model's replies is reported too."""
    success: float | None = option(None, group="environment", first_hour=True, value="REWARD")
    """Reward from which a reply counts as right. Default: the environment's own SUCCESS."""
    out: str | None = option(None, group="record", first_hour=True, value="FILE")
    """JSON file for all figures and rewards. The rollouts go into a file beside it that ends in .rollouts.parquet."""
    overwrite: bool = option(False, group="record")
    """Replace the file at --out."""
    inspect_log: str | None = option(None, group="record", value="FILE")
    """Log that inspect-ai opens (inspect view, read_eval_log): FILE.eval or FILE.json, with a sample for each reply. The
    models of --against, the parts of a suite and --harness each get a log of their own beside it."""

    def __post_init__(self) -> None:
        if self.inspect_log is not None and not self.inspect_log.endswith((".eval", ".json")):
            raise UserError(f"--inspect-log {self.inspect_log:.100} must end in .eval or .json")
        if self.inspect_log is not None and self.inspect_log == self.out:
            raise UserError(f"--inspect-log and --out are both {self.out:.100}: name two files")
        if len(self.search) > 1:
            raise UserError(
                f"--search {' '.join(self.search)}: eval takes one search: give one, and compare searches in separate "
                "runs"
            )
        if not self.search:
            super().__post_init__()

    @property
    def rewards_steps(self) -> bool:
        """Whether steps earn rewards: with a search, the reward model and the options of steps belong to the search."""
        return super().rewards_steps and not self.search


@dataclass(frozen=True)
class Chat(ChatTemplateGroup):
    """Talk to a model; a model without a chat template continues text."""

    system: str | None = option(None, group="sampling", first_hour=True)
    """System message. Default: the system message of the run that trained the model."""
    temperature: float = option(0.7, least=0, group="sampling", first_hour=True)
    """Sampling temperature; 0 is greedy."""
    max_tokens: int = option(256, above=0, group="sampling", first_hour=True)
    """Maximum number of tokens in a reply."""
    reward_model: tuple[str, ...] = option((), group="environment", value="FOLDER")
    """Show the score of a reward model under each reply. Name several with NAME=FOLDER."""
    judge: tuple[str, ...] = option((), group="environment", value="RECIPE")
    """Show the verdict of a judge under each reply: the TOML recipe of a judge that scores. Name several with
    NAME=RECIPE."""
    device: str = option("auto", group="scale", first_hour=True)
    """Where to compute: auto, cpu, cuda, cuda:1 ..."""
    threads: int | None = option(None, above=0, group="scale")
    """CPU threads. Default: PyTorch's choice."""


@dataclass(frozen=True)
class ServePolicy(HardwareGroup, ChatTemplateGroup):
    """Serve a model over HTTP: token ids in and out, and the APIs of OpenAI and Anthropic."""

    model: str = option("", group="model", first_hour=True, value="FOLDER")
    """Model to serve: the folder of a checkpoint or of a run."""
    port: int = option(8000, least=0, most=65_535, group="scale", first_hour=True)
    """Port on this machine (0: any free one). The server accepts connections from this machine only."""
    name: str | None = option(None, group="model")
    """Name that clients use for the model. Default: the text of --model."""
    token: str | None = option(None, group="scale", value="FILE")
    """File with a token that every request must carry (Authorization: Bearer TOKEN). OpenAI's clients send it as their
    API key."""
    max_tokens: int | None = option(None, above=0, group="sampling", first_hour=True)
    """Maximum number of tokens in a reply, whatever a request asks for. Default: as many as fit the context."""
    requests: int = option(1024, above=0, most=1_000_000, group="scale")
    """Maximum number of requests in progress. Further ones are refused (429)."""
    slots: int = option(256, above=0, group="scale")
    """Maximum of replies that are decoded at once. If the KV cache has no room for them, the newest wait."""
    engine: Literal["local", "vllm", "sglang"] = option("local", group="scale", first_hour=True)
    """Sampling engine: local, in this process, or a server of its own: vllm, sglang."""
    engine_cache: float | None = option(None, above=0, most=100_000, group="scale", value="GIB")
    """KV cache limit, in GiB. It does not limit models that transformers computes in this process. Default: 0.7 of the free
    memory; for a server 4, or on GPUs that it has to itself, what it finds free."""
    engine_timeout: float = option(120.0, above=0, most=86_400, group="scale", value="SECONDS")
    """Server: timeout of a decoding step, in seconds. After it, it is restarted, and its requests are sampled again."""


@dataclass(frozen=True)
class Check(StepRewardGroup, EnvLimitGroup, Data):
    """Run a reward or an environment on sample replies, before any training."""

    model: str | None = option(None, group="model", first_hour=True, value="FOLDER")
    """Also apply this model's tokenizer and chat template to the prompts, and check that they fit its context. The
    folder of a checkpoint or of a run; no weights are read."""
    max_tokens: int | None = option(None, above=0, group="sampling")
    """With --model: the maximum number of tokens in a reply that the run will have, to check that the tasks' own replies
    fit."""
    limit: int | None = option(4, above=0, most=1e12, first_hour=True)
    """Read only the first N rows. The first few of them are tried."""
    replies: str | None = option(None, group="data", first_hour=True, value="FILE")
    """Text file of sample replies, one per line. Default: each task's own answer, and some hostile replies."""
    verifiers: bool = option(False, group="environment", first_hour=True)
    """List the verifiers available by name, with the columns that each reads, its settings and its result."""
    verbose: bool = option(False, group="record", first_hour=True)
    """Show every task and case, and texts in full. Default: the first task, and the problems of the others."""


@dataclass(frozen=True)
class Sample(ReplicaGroup, HardwareGroup, SearchedGroup, EnvWorkerGroup, Data, group="sampling"):
    """Sample replies to every prompt over a grid of settings: examples to label or to learn from."""

    model: tuple[str, ...] = option((), group="model", first_hour=True, value="FOLDER")
    """Model to sample from: the folder of a checkpoint or of a run. Several models each reply to every prompt; all are
    in memory at once."""
    samples: int = option(4, above=0, most=1024, first_hour=True)
    """Replies per prompt, for each model, temperature, top-p and seed."""
    temperature: tuple[float, ...] = option((1.0,), least=0, first_hour=True)
    """Sampling temperatures; each is used. 0 is greedy and gives one reply."""
    top_p: tuple[float, ...] = option((1.0,), above=0, most=1)
    """Sample from the smallest set of tokens with this total probability. Of several values, each is used."""
    top_k: int = option(0, least=0, most=10**9)
    """Sample from the K most likely tokens (0: all)."""
    seed: tuple[int, ...] = option((0,), least=-(2**62), most=2**62)
    """Random seeds; each is used. The same seed gives the same replies."""
    max_tokens: int = option(256, above=0, first_hour=True)
    """Maximum number of tokens in a reply."""
    stop: tuple[str, ...] = option((), value="TEXT")
    """Strings that end a reply."""
    kind: str = option("", value="COLUMN")
    """Column with the kind of a prompt, for --kinds."""
    kinds: dict[str, dict[str, str]] = option(factory=dict, value="VALUE")
    """Settings by kind of prompt: --kinds.code.temperature 0.2,0.6 --kinds.code.max_tokens 512. Or a table
    [sample.kinds.code] in a recipe. The settings are samples, temperature, top_p, top_k, max_tokens and stop."""
    adaptive: int | None = option(None, above=1, most=1024)
    """Sample up to this many replies for prompts whose first --samples replies disagree."""
    disagreement: float = option(0.5, least=0)
    """With --adaptive: threshold of disagreement. Disagreement is the highest score minus the lowest, with an
    environment or a reward model; else 1 minus the mean edit similarity of two replies, from 0 to 1."""
    distinct: bool = False
    """Write equal replies to a prompt once, with their number in "times"."""
    out: str = option("items.jsonl", group="record", first_hour=True, value="FILE")
    """File to write: one line of JSON per prompt."""
    resume: bool = option(False, group="record", first_hour=True)
    """Continue the file in --out after its last whole line. Options, tasks and models must be the same."""
    overwrite: bool = option(False, group="record", first_hour=True)
    """Replace the file at --out."""
    quiet: bool = option(False, group="record")
    """Show no progress."""


@dataclass(frozen=True)
class Label(EnvWorkerGroup, SeedGroup, FromRows, group="labels"):
    """Label replies with a reward model, a judge, a function or a person; write the best ones, or pairs."""

    tasks: str = option("", first_hour=False)
    """Another name for --items."""
    items: str = option("", group="data", first_hour=True, value="ROWS")
    """Rows with responses: preference data in any form, or a file that posttrain sample wrote."""
    with_: str = option("", first_hour=True, value="LABELLER")
    """Labeller: reward-model=FOLDER, judge=RECIPE.toml, or a reward function (my.py:reward). Leave it out to use the
    labels in the rows."""
    human: bool = option(False, first_hour=True)
    """Let a person label in this terminal: replies are shuffled and ranked."""
    rater: str = option("", first_hour=True, value="NAME")
    """With --human: name of the person, recorded with each label."""
    agreement: tuple[str, str] | None = option(None, first_hour=True, value="FILE")
    """Compare two files of labels for the same prompts, and report their agreement."""
    out: str = option("labelled.jsonl", group="record", first_hour=True, value="FILE")
    """File to write: the rows with "scores", "comparisons" or "ranks"."""
    resume: bool = option(False, group="record", first_hour=True)
    """Continue the file in --out after its last whole line. Rows and labeller must be the same."""
    overwrite: bool = option(False, group="record", first_hour=True)
    """Replace existing files."""
    best: str | None = option(None, first_hour=True, value="FILE")
    """Also write prompts with their best responses to this file, for sft."""
    top: int = option(1, above=0)
    """With --best: number of responses per prompt, the best first."""
    at_least: float | None = None
    """With --best: only responses with at least this score."""
    pairs: str | None = option(None, first_hour=True, value="FILE")
    """Also write pairs (prompt, chosen, rejected) to this file, for prefer and reward-model."""
    pair: Literal["extremes", "random"] = "extremes"
    """With --pairs: compare the best with the worst response of a prompt, or a random pair."""
    margin: float = option(0.0, least=0)
    """With --pairs: minimum difference between the two scores."""
    flip: float = option(0.0, least=0, most=1)
    """Probability of swapping a comparison: label noise for experiments."""
    comparisons: int | None = option(None, above=0)
    """Pairwise judges: compare at most N pairs of responses per prompt, drawn at random. Default: all."""
    device: str = option("auto", group="scale")
    """Where a reward model computes: auto, cpu, cuda ..."""
    threads: int | None = option(None, above=0, group="scale")
    """CPU threads. Default: PyTorch's choice."""

    def __post_init__(self) -> None:
        if self.items and self.tasks and self.items != self.tasks:
            raise UserError("--items and --tasks are the same option: give one of them")
        object.__setattr__(self, "tasks", self.items or self.tasks)

    @property
    def labeller(self) -> ScorerOption:
        return ScorerOption(self.with_)

    @property
    def env(self) -> str:
        """The environment that labels."""
        return self.labeller.env


@dataclass(frozen=True)
class RetrieverBuild(OptionGroup, group="data"):
    """Build an index of passages: by words (BM25), or by vectors of an encoder."""

    passages: str = option("", first_hour=True, value="ROWS")
    """Passages: rows with title and text, or with contents, and optionally an id. A file, a folder or the name of a
    dataset."""
    out: str = option("runs/index", group="record", first_hour=True, value="FOLDER")
    """Folder of the index. It is created only once the index is complete."""
    split: str | None = None
    """Split of a dataset that has several."""
    limit: int | None = option(None, above=0, most=1e12)
    """Read only the first N rows."""
    fields: dict[str, str] = option(factory=dict, first_hour=True, value="COLUMN")
    """Rename columns: --fields.text body --fields.title heading."""
    k1: float = option(0.9, least=0, most=100, group="model")
    """BM25: saturation of term counts."""
    b: float = option(0.4, least=0, most=1, group="model")
    """BM25: length normalisation of passages, from 0 (none) to 1 (full)."""
    encoder: str | None = option(None, group="model", first_hour=True, value="ENCODER")
    """Dense index: the folder of an encoder that transformers loads, or a function my.py:encode(texts, kind). kind is
    query or passage; it returns an array with a row for each text."""
    pooling: Literal["mean", "first", "last"] = option("mean", group="model")
    """Encoder folder: the hidden state to use: the mean, the first token's (CLS), or the last token's."""
    normalised: bool = option(True, group="model")
    """Encoder folder: normalise vectors, so that products are cosines."""
    query_prefix: str = option("", group="model", value="TEXT")
    """Encoder folder: text before each query, such as "query: "."""
    passage_prefix: str = option("", group="model", value="TEXT")
    """Encoder folder: text before each passage, such as "passage: "."""
    longest: int = option(256, above=0, group="model")
    """Encoder folder: maximum number of tokens read from a text."""
    faiss: str | None = option(None, group="model")
    """Dense index: a type of FAISS index (Flat, HNSW32, "IVF256,PQ32" ...). Default: exact products with every
    vector."""
    device: str = option("auto", group="scale")
    """Encoder folder: where to compute: auto, cpu, cuda ..."""
    overwrite: bool = option(False, group="record", first_hour=True)
    """Replace the index at --out."""


@dataclass(frozen=True)
class RetrieverServe(OptionGroup, group="scale"):
    """Serve an index over HTTP, with the protocol of Search-R1."""

    host: str = option("127.0.0.1", first_hour=True)
    """Address to bind to. Without --token, every client that can reach it may send queries."""
    port: int = option(8000, least=0, most=65_535, first_hour=True)
    """Port (0: any free one, which is printed)."""
    token: str | None = option(None, value="FILE")
    """File with a token that every request must carry (Authorization: Bearer TOKEN). Runs send the value
    of the environment variable POSTTRAIN_RETRIEVER_TOKEN."""
    topk: int = option(3, above=0, most=100, group="sampling", first_hour=True)
    """Passages per query without a topk of its own."""
    encoder: str | None = option(None, group="model", first_hour=True, value="ENCODER")
    """Dense index: path of the encoder, if it has moved since the index was built."""
