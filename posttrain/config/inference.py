"""Options of what uses models and data without training: eval, check, sample, label, chat, serve-policy, engine and
retriever."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from posttrain.config.row_options import Data, FromRows, Precision
from posttrain.config.service_options import LABELLERS, play_the_only_service
from posttrain.core.component import option
from posttrain.core.types import UserError


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
    split_seed: int | None = None
    """The --split-seed of the training run that held them out; default: that of the checkpoint's own run, or else 0."""
    out: str | None = None
    """A .json file for all figures and rewards; the rollouts go beside it, into a file that ends in .rollouts.parquet."""
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
    replicas: int = option(0, least=0, most=1024)
    """Sample with so many engines, each a process of this machine with a copy of the weights; 0: in this process. No token
    depends on it."""
    compiled: bool = True
    """As in training."""
    precision: Precision = "float32"
    """Arithmetic of the forward passes."""
    device: str = "auto"
    """auto, cpu, cuda ..."""
    threads: int | None = option(None, above=0)
    """CPU threads; default: PyTorch's choice."""

    def __post_init__(self) -> None:
        play_the_only_service(self)


@dataclass(frozen=True)
class Chat:
    """Talk to a checkpoint (to one without a chat template: give it text to continue)."""

    system: str | None = None
    """A system message; default: that of the run that the model is of."""
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
    token: str | None = None
    """File with a token that every request has to carry (Authorization: Bearer TOKEN), as OpenAI's clients send their key."""
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
class ServeEngine:
    """Sample for runs on other machines, with the weights that they hand over."""

    model: str = ""
    """Folder of the checkpoint that the run starts from. Its tokenizer and its sizes are read, no weights."""
    listen: str = "127.0.0.1:7000"
    """Address to listen at, HOST:PORT; 0.0.0.0 is all of this machine's. Port 0: any that is free."""
    engine_token: str | None = None
    """File with what runs must know; default: POSTTRAIN_ENGINE_TOKEN in the environment."""
    slots: int = option(256, above=0)
    """How many replies are sampled at once: bounds the memory of the key-value cache."""
    engine: Literal["local", "vllm"] = "local"
    """What samples."""
    engine_cache: float = option(4.0, above=0)
    """In GiB: vLLM's key-value cache, or what is kept of episodes between their turns."""
    compiled: bool = True
    """As in training."""
    precision: Precision = "float32"
    """Arithmetic of the forward passes, as in the run."""
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
        play_the_only_service(self)


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
    replicas: int = option(0, least=0, most=1024)
    """Sample with so many engines, each a process of this machine with a copy of the weights; 0: in this process. No token
    depends on it."""
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
        play_the_only_service(self)


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
    """The address it is bound to. Without --token whoever reaches it may ask."""
    port: int = option(8000, least=0, most=65_535)
    """The port; 0: any that is free, which is printed."""
    token: str | None = None
    """File with a token that every request has to carry (Authorization: Bearer TOKEN). Runs send what stands in
    POSTTRAIN_RETRIEVER_TOKEN in their environment."""
    topk: int = option(3, above=0, most=100)
    """Passages for a query that does not say how many."""
    encoder: str | None = None
    """Of a dense index, where the encoder has moved since it was built."""
