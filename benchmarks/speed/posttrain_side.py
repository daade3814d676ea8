"""posttrain's side. Runs in posttrain's environment.

python benchmarks/speed/posttrain_side.py PART SETTINGS     (started by bench.py; SETTINGS is JSON)

serve         an engine and a learner, called directly: sampling, updates, long contexts, prompts of groups
grpo, distill, sft, dpo, reward    the trainers of `posttrain rl`, `distill`, `sft`, `prefer` and `reward-model`, interrupted
              after each step
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from flops import peak_shapes, product_peak, reading_peak
from rewards import REWARDS
from side import Laps, Line, Memory, use_threads
from work import (
    DISTILLED,
    GROUP,
    LEARNING_RATE,
    PAIRS,
    PROMPTS,
    REQUESTS,
    SFT_ROWS,
    pairs,
    requests,
    rows,
    tasks,
    tokens_of,
)

from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.policy import PolicyObjective
from posttrain.config.training import RL, SFT, Distill, Prefer, RewardModelling
from posttrain.core.batch import Batch
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, Sampling
from posttrain.engines.local.compiled_step import KINDS as KINDS_OF_STEP
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import LOADERS, load_model
from posttrain.models.native.kernels import build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training import setup
from posttrain.training import trainer as course
from posttrain.training.adjust import adjust
from posttrain.training.loop import FinishedStep
from posttrain.training.sources.packing import collate, split_microbatches
from posttrain.training.training_run import run_training

DECODED = 64  # tokens of each reply where decoding steps are timed

KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("flash_attention", "_Compiled", "_Joined"),
    "gather, scatter, copy": ("index", "scatter", "gather", "cat", "embedding", "roll", "copy", "clone"),
    "norms, rotation": ("Norm", "_RoPE", "rms_norm", "pow", "rsqrt", "mean", "addcmul"),
    "draw, likelihood": ("cumsum", "searchsorted", "amax", "exp", "log", "Likelihood", "aten::sub", "shift", "bitwise"),
    "activation": ("silu", "_SwiGLU"),
    "optimizer": ("adam", "foreach"),
}
"""Kind of work -> what the names of its operations hold; the first that fits counts."""

OTHER = "elementwise, the rest"

Request = tuple[tuple[int, ...], int]  # prompt, tokens to sample


class Bench:
    """One model with its engine and its learner, called directly."""

    def __init__(self, folder: str, threads: int, device: str = "cpu", precision: str = "float32") -> None:
        use_threads(threads)
        self.folder = folder
        self.model, self.tokenizer = load_model(folder, device=device), Tokenizer.load(folder)
        self.model.eos_ids = (self.model.config.vocab,)  # no token: replies have exactly the lengths that are asked for
        self.engine = LocalEngine(self.model, self.tokenizer, precision=precision)
        self.learner = LocalLearner(self.model, Optimization(lr=LEARNING_RATE), precision=precision)
        self.objective = PolicyObjective(adjust(find("grpo"), RL(settings={"kl": 0.0})))
        self.batches: list[Batch] = []

    def sample(self, case: str) -> dict[str, Any]:
        wanted = self._requests(requests(case))
        seconds, completions = self.sampled(wanted)
        return {"seconds": seconds, "tokens": sum(len(c.tokens) for c in completions)}

    def update(self) -> dict[str, Any]:
        """One update on the ragged work, the same micro-batches every time."""
        if not self.batches:
            wanted = self._requests(requests("ragged"))
            self.batches = self.laid(wanted, self.sampled(wanted)[1])
        return {"seconds": self.updated(self.batches)}

    def prefill(self) -> dict[str, Any]:
        """Different prompts, a token each."""
        wanted = self._requests([(row["prompt"], 1) for row in rows(REQUESTS)])
        return {"seconds": self.sampled(wanted)[0]}

    def peak(self) -> dict[str, Any]:
        return {"flops": product_peak(peak_shapes(self.model.config)), "bandwidth": reading_peak()}

    def profile(self) -> dict[str, Any]:
        """Shares of an update's time inside operations, by kind."""
        self.update()
        with torch.profiler.profile() as profiler:
            self.update()
        seconds: dict[str, float] = dict.fromkeys([*KINDS, OTHER], 0.0)
        for event in profiler.key_averages():
            kind = next((kind for kind, names in KINDS.items() if any(n in event.key for n in names)), OTHER)
            seconds[kind] += event.self_cpu_time_total
        return {kind: spent / sum(seconds.values()) for kind, spent in seconds.items()}

    def phases(self, case: str) -> dict[str, Any]:
        """Shares of the time of sampling (a case of `work.py`), by kind; what compiled code does, and what is around it."""
        step = self.engine._compiled
        if step is None:  # no compiler, no phases
            return {}
        self.sample(case)
        step.seconds = torch.zeros(len(KINDS_OF_STEP), dtype=torch.float64)
        whole = self.sample(case)["seconds"]
        shares = dict(zip(KINDS_OF_STEP, (step.seconds / whole).tolist(), strict=True))
        step.seconds = None
        return {**shares, "prompts, packing, the rest": 1 - sum(shares.values())}

    def decode(self, running: int, compiled: bool) -> dict[str, Any]:
        """Seconds of a decoding step of so many requests, by compiled code or in torch's operations."""
        before = self.engine
        if not compiled:
            build.use(False)
            self.engine = LocalEngine(self.model, self.tokenizer, precision=before.precision)
            build.use(True)
        texts = [text for text, _ in requests("fixed")][:running]
        seconds, _ = self.sampled(self._requests([(text, DECODED) for text in texts]))
        self.engine = before
        return {"seconds": seconds / DECODED}

    def context(self, length: int) -> dict[str, Any]:
        """A group of 8 that fills a context of this length."""
        [prompt] = tokens_of(self.folder, [rows(1)[0]["prompt"]])
        return self._step([(tuple(prompt), length - len(prompt))] * GROUP)

    def prompt(self, length: int, reply: int, group: int) -> dict[str, Any]:
        """A long prompt with short replies: what a group pays for its prompt."""
        ids = tokens_of(self.folder, ["".join(r["prompt"] for r in rows(40))])[0][:length]
        assert len(ids) == length
        return self._step([(tuple(ids), reply)] * group)

    def _step(self, wanted: Sequence[Request]) -> dict[str, Any]:
        sampling, completions = self.sampled(wanted)
        update = self.updated(self.laid(wanted, completions))
        tokens = sum(len(c.tokens) for c in completions)
        return {"sampling": sampling, "update": update, "seconds": sampling + update, "tokens": tokens}

    def _requests(self, texts: Sequence[tuple[str, int]]) -> list[Request]:
        prompts = tokens_of(self.folder, [text for text, _ in texts])
        return [(tuple(ids), n) for ids, (_, n) in zip(prompts, texts, strict=True)]

    def sampled(self, wanted: Sequence[Request]) -> tuple[float, list[Completion]]:
        begin = time.perf_counter()
        self.engine.load(self.learner.weights(), self.engine.version + 1)  # forgets prompts that it has computed before
        for i, (prompt, n) in enumerate(wanted):
            self.engine.submit(i, prompt, Sampling(max_tokens=n, seed=i))
        completions: list[Completion] = []
        while len(completions) < len(wanted):
            completions += self.engine.poll()
        seconds = time.perf_counter() - begin
        completions.sort(key=lambda c: c.id)
        assert [len(c.tokens) for c in completions] == [n for _, n in wanted]
        return seconds, completions

    def laid(self, wanted: Sequence[Request], completions: Sequence[Completion]) -> list[Batch]:
        """Micro-batches as GRPO's: groups share their prompts, every rollout has an advantage."""
        rollouts = []
        for (prompt, _), completion in zip(wanted, completions, strict=True):
            transcript = Transcript()
            transcript.observe(prompt)
            transcript.sample(completion)
            rollouts.append([transcript])
        weight = torch.full((len(wanted),), 1 / sum(n for _, n in wanted))
        advantage = [torch.full((n,), 1.0 - 2.0 * (i % 2)) for i, (_, n) in enumerate(wanted)]
        return [
            collate(
                [rollouts[i] for i in index],
                index,
                weight=weight,
                fields={"advantage": advantage},
                device=self.learner.device,
            )
            for index in split_microbatches(rollouts, setup.microbatch_tokens(RL(), self.model))
        ]

    def updated(self, batches: Sequence[Batch]) -> float:
        begin = time.perf_counter()
        self.learner.update(batches, self.objective)
        if self.learner.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin


def serve(line: Line, settings: dict[str, Any]) -> None:
    bench = Bench(settings["model"], settings["threads"], precision=settings.get("precision", "float32"))
    actions = ("sample", "update", "prefill", "peak", "profile", "phases", "decode", "context", "prompt")
    line.serve({name: getattr(bench, name) for name in actions})


def grpo(line: Line, settings: dict[str, Any]) -> None:
    """The trainer of `posttrain rl`, with its record, its scoring process and everything else it has by default."""
    scratch = Path(settings["scratch"])
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks()))
    config = RL(
        tasks=str(scratch / "tasks.jsonl"),
        env=f"{Path(__file__).with_name('rewards.py')}:{REWARDS[settings['reward']]}",
        model=settings["model"],
        out=str(scratch / "run"),
        overwrite=True,
        quiet=True,
        threads=settings["threads"],
        precision=settings.get("precision", "float32"),
        algorithm="grpo",
        prompts=PROMPTS,
        group=GROUP,
        max_tokens=settings["max_tokens"],
        settings={"kl": 0.0},
        lr=LEARNING_RATE,
        max_grad_norm=1.0,
        steps=1_000_000,
        save_every=1_000_000,
    )
    _stepping(line, settings)
    run_training(config)


def distill(line: Line, settings: dict[str, Any]) -> None:
    """The trainer of `posttrain distill`: every step the same prompts, one reply each, nothing scored but by the teacher."""
    scratch = Path(settings["scratch"])
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks(DISTILLED)))
    config = Distill(
        tasks=str(scratch / "tasks.jsonl"),
        model=settings["model"],
        teacher=settings["teacher"],
        algorithm=f"distill-{settings['divergence']}",
        out=str(scratch / "run"),
        overwrite=True,
        quiet=True,
        threads=settings["threads"],
        precision=settings["precision"],
        prompts=DISTILLED,
        group=1,
        max_tokens=settings["max_tokens"],
        lr=LEARNING_RATE,
        max_grad_norm=1.0,
        steps=1_000_000,
        save_every=1_000_000,
    )
    _stepping(line, settings)
    run_training(config)


def _stepping(line: Line, settings: dict[str, Any]) -> None:
    """Have the trainer that runs next interrupted after each step."""
    laps = Laps(line, _watched(settings))

    def after(trained: FinishedStep) -> bool | None:
        seconds = trained.seconds
        leave(laps.step(tokens=trained.stats["length"][0], rollout=seconds["rollout"], update=seconds["update"]))
        return None

    also(after)


def sft(line: Line, settings: dict[str, Any]) -> None:
    """The trainer of `posttrain sft`."""
    scratch = Path(settings["scratch"])
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(settings["rows"])))
    config = SFT(
        tasks=str(scratch / "rows.jsonl"),
        model=settings["model"],
        out=str(scratch / "run"),
        overwrite=True,
        quiet=True,
        threads=settings["threads"],
        precision=settings["precision"],
        rows=SFT_ROWS,
        epochs=1000,
        lr=LEARNING_RATE,
        save_every=1_000_000,
    )
    laps = Laps(line, _watched(settings))

    def after(trained: FinishedStep) -> bool | None:
        leave(laps.step(tokens=trained.stats["nll"][1]))
        return None

    also(after)
    run_training(config)


def dpo(line: Line, settings: dict[str, Any]) -> None:
    """The trainer of `posttrain prefer`; what the reference says is found before the first step."""
    run_training(Prefer(**_of_pairs(line, settings), lr=LEARNING_RATE))


def reward(line: Line, settings: dict[str, Any]) -> None:
    """The trainer of `posttrain reward-model`."""
    run_training(RewardModelling(**_of_pairs(line, settings), lr=LEARNING_RATE))


def _of_pairs(line: Line, settings: dict[str, Any]) -> dict[str, Any]:
    """Options of a trainer that learns from pairs, which is interrupted after each step."""
    scratch = Path(settings["scratch"])
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(settings["kind"])))
    laps = Laps(line, _watched(settings))

    def after(trained: FinishedStep) -> bool | None:
        leave(laps.step(pairs=PAIRS, tokens=trained.step.tokens))
        return None

    also(after)
    return {
        "tasks": str(scratch / "pairs.jsonl"),
        "model": settings["model"],
        "out": str(scratch / "run"),
        "overwrite": True,
        "quiet": True,
        "threads": settings["threads"],
        "precision": settings["precision"],
        "rows": PAIRS,
        "steps": 1_000_000,
        "schedule": "constant",
        "save_every": 1_000_000,
    }


def _watched(settings: dict[str, Any]) -> Memory:
    """Memory from here on: all is imported, and the model was loaded once (the trainer loads it again)."""
    use_threads(settings["threads"])
    watch, model = Memory(), load_model(settings["model"])
    watch.begin()
    del model
    return watch


def also(hook: Callable[[FinishedStep], bool | None]) -> Callable[[], None]:
    """Let the training loop call this after each step, when everything else has been done (recording, display).

    Returns what ends that.
    """
    original = course.train

    def train(learner: Any, source: Any, objective: Any, hooks: Sequence[Any], **options: Any) -> int:
        return original(learner, source, objective, [*hooks, hook], **options)

    course.train = train
    return lambda: setattr(course, "train", original)


def leave(wanted: bool) -> None:
    """Leave a run where it stands: no checkpoint, no curves."""
    if wanted:
        raise SystemExit


if __name__ == "__main__":
    parts = {"serve": serve, "grpo": grpo, "distill": distill, "sft": sft, "dpo": dpo, "reward": reward}
    given = json.loads(sys.argv[2])
    if given.get("backed"):
        LOADERS.clear()  # nothing is native any more
    parts[sys.argv[1]](Line(), given)
