"""TRL's side: its trainers, interrupted after each step. Runs in TRL's environment.

    python benchmarks/speed/trl_side.py PART SETTINGS     (started by bench.py; SETTINGS is JSON)

Same data, batch, lengths, rewards, optimizer and arithmetic as on the other side: float32, or bfloat16 by autocast. What
TRL does by default and what costs it time without changing the result is switched off: gradient checkpointing, logging,
saving.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import rewards
import torch
import transformers
from datasets import Dataset
from side import Laps, Line, Memory, timed, use_threads
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from work import DISTILLED, GROUP, LEARNING_RATE, PAIRS, PROMPTS, REQUESTS, SFT_ROWS, pairs, rows, tasks

transformers.logging.set_verbosity_error()

COMMON: dict[str, Any] = dict(
    use_cpu=True,
    gradient_checkpointing=False,
    learning_rate=LEARNING_RATE,
    lr_scheduler_type="constant",
    max_grad_norm=1.0,
    max_steps=1_000_000,
    save_strategy="no",
    logging_steps=1_000_000,
    report_to=[],
    disable_tqdm=True,
    dataloader_pin_memory=False,
)


def narrow(settings: dict[str, Any]) -> bool:
    """Whether products are computed in bfloat16."""
    return bool(settings.get("precision", "float32") == "bfloat16")


class AfterStep(TrainerCallback):
    """Calls back when an optimizer step is done; ends the training when that says so."""

    def __init__(self, step: Callable[[], bool]) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = self.step()


class Scores:
    """The reward as TRL calls it. Which one it is may change from step to step. Counts the sampled tokens it is shown."""

    __name__ = "reward"

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tokens = 0

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        self.tokens += sum(len(ids) for ids in completion_ids)
        reward = getattr(rewards, rewards.REWARDS[self.kind])
        return [reward({"answer": a}, text) for text, a in zip(completions, answer, strict=True)]

    def counted(self) -> int:
        tokens, self.tokens = self.tokens, 0
        return tokens


def grpo_trainer(
    settings: dict[str, Any], scores: Scores, way: str, step: Callable[[], bool], most: int
) -> GRPOTrainer:
    """`way`: how many rollouts go through the model at once in the update, with a + if sampling batches continuously.

    All rollouts of a step are sampled at once in any case.
    """
    batch = int(way.removesuffix("+"))
    return GRPOTrainer(
        model=settings["model"],
        reward_funcs=scores,
        args=GRPOConfig(
            **COMMON,
            bf16=narrow(settings),
            output_dir=settings["scratch"],
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=REQUESTS // batch,
            num_generations=GROUP,
            max_completion_length=most,
            beta=0.0,
            loss_type="grpo",
            temperature=1.0,
            shuffle_dataset=False,
            use_transformers_continuous_batching=way.endswith("+"),
            transformers_continuous_batching_config={"max_memory_percent": 0.2},
        ),
        train_dataset=Dataset.from_list(tasks() * 100).select_columns(["prompt", "answer"]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[AfterStep(step)],
    )


def grpo(line: Line, settings: dict[str, Any]) -> None:
    """Steps of GRPO. The reward of a step may be named in the request for it."""
    watch = watched(settings)
    scores = Scores(settings.get("reward", "signal"))
    laps = Laps(line, watch, lambda request: setattr(scores, "kind", request.get("reward", scores.kind)))
    trainer = grpo_trainer(
        settings, scores, settings["way"], lambda: laps.step(tokens=scores.counted()), settings["max_tokens"]
    )
    trainer.train()


def choose(line: Line, settings: dict[str, Any]) -> None:
    """Seconds per 1,000 sampled tokens of one step in several settings, so that TRL is compared in its best one.

    Settings are called "8" (rollouts at once in the update) or "8+" (and transformers' continuous batching for sampling).
    In a process of its own: memory that one trainer leaves behind must not count as the next one's.
    """
    use_threads(settings["threads"])
    scores = Scores("signal")
    found: dict[str, float] = {}

    def measure(way: str, most: int) -> None:
        trainer = grpo_trainer(settings, scores, way, lambda: True, most)
        seconds = timed(trainer.train)
        found[way] = 1000 * seconds / scores.counted()

    measure(settings["ways"][0], 16)  # warms up; measured again
    for way in settings["ways"]:
        measure(way, settings["max_tokens"])
    measure(min(found, key=lambda way: found[way]) + "+", settings["max_tokens"])
    line.answer(**found)


class CountingSFT(SFTTrainer):
    """Counts the tokens that are learned."""

    counted = 0

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        self.counted += int((inputs["labels"][:, 1:] != -100).sum())
        return super().compute_loss(model, inputs, *more, **options)


def sft(line: Line, settings: dict[str, Any]) -> None:
    """Steps of SFT, padded or packed by TRL's default strategy. Both learn about as many rows a step."""
    watch, packed = watched(settings), settings["packed"]
    data = [{"prompt": r["prompt"], "completion": r["response"]} for r in rows(settings["rows"])]
    made: list[CountingSFT] = []
    laps = Laps(line, watch)

    def step() -> bool:
        tokens, made[0].counted = made[0].counted, 0
        return laps.step(tokens=tokens)

    def trainer(batch: int) -> CountingSFT:
        return CountingSFT(
            model=settings["model"],
            args=SFTConfig(
                **COMMON,
                bf16=narrow(settings),
                output_dir=settings["scratch"],
                per_device_train_batch_size=batch,
                packing=packed,
                max_length=1024,
            ),
            train_dataset=Dataset.from_list(data),
            processing_class=AutoTokenizer.from_pretrained(settings["model"]),
            callbacks=[AfterStep(step)],
        )

    made.append(trainer(settings.get("batch", SFT_ROWS)))
    laps.begin = time.perf_counter()
    made[0].train()


class CountingDPO(DPOTrainer):
    """Counts the tokens of the responses."""

    counted = 0

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        self.counted += int(inputs["completion_mask"].sum())
        return super().compute_loss(model, inputs, *more, **options)


class CountingReward(RewardTrainer):
    """Counts the tokens of prompts and responses."""

    counted = 0

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        self.counted += int(inputs["attention_mask"].sum())
        return super().compute_loss(model, inputs, *more, **options)


def dpo(line: Line, settings: dict[str, Any]) -> None:
    """Steps of DPO. What the reference says is computed before the first step, as on the other side."""
    options = {"precompute_ref_log_probs": True, "beta": 0.1, "loss_type": ["sigmoid"], "max_length": None}
    _of_pairs(line, settings, lambda args, **more: CountingDPO(args=DPOConfig(**args, **options), **more))


def reward(line: Line, settings: dict[str, Any]) -> None:
    """Steps of a reward model."""
    _of_pairs(line, settings, lambda args, **more: CountingReward(args=RewardConfig(**args, max_length=None), **more))


def _of_pairs(line: Line, settings: dict[str, Any], make: Callable[..., Any]) -> None:
    data = Dataset.from_list(pairs(settings["kind"]))

    def trainer(batch: int, step: Callable[[Any], bool]) -> Any:
        made: list[Any] = []
        made.append(
            make(
                model=settings["model"],
                args=_batched(settings, batch, PAIRS),
                train_dataset=data,
                processing_class=_padded(settings["model"]),
                callbacks=[AfterStep(lambda: step(made[0]))],
            )
        )
        return made[0]

    def count(made: Any) -> dict[str, float]:
        tokens, made.counted = made.counted, 0
        return {"pairs": PAIRS, "tokens": tokens}

    _measured(line, settings, trainer, count)


class TimedDistillation(DistillationTrainer):
    """Counts the sampled tokens, and how long sampling takes."""

    counted = 0
    sampling = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        begin = time.perf_counter()
        made = super()._generate_and_score_completions(inputs)
        self.sampling += time.perf_counter() - begin
        self.counted += int(made["completion_mask"].sum())
        return made


BETAS = {"reverse-kl": 1.0, "jsd": 0.5, "forward-kl": 0.0}
"""What TRL calls the divergences."""


def distill(line: Line, settings: dict[str, Any]) -> None:
    """Steps of distillation on policy: every step the same prompts, one reply each, all sampled at once."""

    def trainer(batch: int, step: Callable[[Any], bool]) -> TimedDistillation:
        made: list[TimedDistillation] = []
        made.append(
            TimedDistillation(
                model=settings["model"],
                teacher_model=settings["teacher"],
                args=DistillationConfig(
                    **_batched(settings, batch, DISTILLED),
                    max_completion_length=settings["max_tokens"],
                    beta=BETAS[settings["divergence"]],
                    temperature=1.0,
                    shuffle_dataset=False,
                ),
                train_dataset=Dataset.from_list(tasks(DISTILLED)).select_columns(["prompt"]),
                processing_class=_padded(settings["model"], padding_side="left"),
                callbacks=[AfterStep(lambda: step(made[0]))],
            )
        )
        return made[0]

    def count(made: TimedDistillation) -> dict[str, float]:
        found = {"tokens": made.counted, "rollout": made.sampling}
        made.counted, made.sampling = 0, 0.0
        return found

    _measured(line, settings, trainer, count)


def _batched(settings: dict[str, Any], batch: int, whole: int) -> dict[str, Any]:
    """What every trainer is told: `batch` of the `whole` examples of a step go through the model at once."""
    return dict(
        **COMMON,
        bf16=narrow(settings),
        output_dir=settings["scratch"],
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=whole // batch,
    )


def _padded(folder: str, **options: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _measured(
    line: Line,
    settings: dict[str, Any],
    make: Callable[[int, Callable[[Any], bool]], Any],
    count: Callable[[Any], dict[str, float]],
) -> None:
    """Laps of the trainer with the fastest of `ways`: how many examples go through the model at once.

    Each is tried for two steps, the first of which warms up. What counts is its time per token, where tokens vary.
    """
    laps = Laps(line, watched(settings))
    tried: dict[int, float] = {}
    for batch in settings["ways"]:
        ends: list[float] = []
        tokens: list[float] = []

        def note(made: Any, ends: list[float] = ends, tokens: list[float] = tokens) -> bool:
            ends.append(time.perf_counter())
            tokens.append(count(made)["tokens"])
            return len(ends) == 2

        make(batch, note).train()
        tried[batch] = 1000 * (ends[1] - ends[0]) / tokens[1]
    best = min(tried, key=lambda batch: tried[batch])
    laps.about = {"way": best, "tried": tried}
    trainer = make(best, lambda made: laps.step(**count(made)))
    laps.begin = time.perf_counter()
    trainer.train()


def start(line: Line, settings: dict[str, Any]) -> None:
    """The first step of a run; the driver looks at the clock."""
    trainer = grpo_trainer(settings, Scores("signal"), "8", lambda: True, settings["max_tokens"])
    trainer.train()
    line.answer(now=time.time())


def watched(settings: dict[str, Any]) -> Memory:
    """Memory from here on: all is imported, and the model was loaded once (the trainer loads it again)."""
    use_threads(settings["threads"])
    watch, model = Memory(), AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    watch.begin()
    del model
    return watch


if __name__ == "__main__":
    assert PROMPTS * GROUP == REQUESTS
    parts = {
        "grpo": grpo,
        "choose": choose,
        "distill": distill,
        "sft": sft,
        "dpo": dpo,
        "reward": reward,
        "start": start,
    }
    parts[sys.argv[1]](Line(), json.loads(sys.argv[2]))
