"""TRL's side of `beside_trl`: GRPO on prompts in a given order, checkpoints on the way. Runs in TRL's environment.

python recipes/real/trl_grpo.py SETTINGS     (started by beside_trl.py; SETTINGS is a JSON file)
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

transformers.logging.set_verbosity_error()


def last_number(text: str) -> str:
    """The last whole number of a reply, which decides: the questions have no other answers."""
    found = re.findall(r"-?\d+", text.replace(",", ""))
    return found[-1] if found else ""


class Clock(TrainerCallback):
    """Writes the seconds since the start after every step."""

    def __init__(self, file: Path) -> None:
        self.file, self.began = file, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with self.file.open("a") as out:
            out.write(json.dumps({"step": state.global_step, "seconds": time.perf_counter() - self.began}) + "\n")


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(given["threads"])
    out = Path(given["out"])

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [float(last_number(said[0]["content"]) == a) for said, a in zip(completions, answer, strict=True)]

    trainer = GRPOTrainer(
        model=given["model"],
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(out),
            use_cpu=True,
            gradient_checkpointing=False,
            learning_rate=given["lr"],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            max_steps=given["steps"],
            save_steps=given["every"],
            save_only_model=True,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            per_device_train_batch_size=given["batch"],
            gradient_accumulation_steps=given["prompts"] * given["group"] // given["batch"],
            num_generations=given["group"],
            max_completion_length=given["max_tokens"],
            beta=0.0,
            loss_type="grpo",
            temperature=1.0,
            shuffle_dataset=False,
            seed=given["seed"],
        ),
        train_dataset=Dataset.from_list(given["rows"]),
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
        callbacks=[Clock(out / "clock.jsonl")],
    )
    trainer.train()
    (out / "log.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
