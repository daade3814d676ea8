"""Runs each original with TRL itself, on the rows, the order and the replies of our run, and records what every update did.

    .../env-trl/bin/python benchmarks/peers/originals_trl.py FOLDER [NAME ...]

`originals_ours.py` comes first. TRL's own scripts and trainers run; put in are a sampler that gives the rows in our order,
our replies in place of its sampling, and their shuffle left out, so that each update has the rows of ours.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
import torch
import transformers
import trl.trainer.grpo_trainer as grpo
import trl.trainer.rloo_trainer as rloo
from accelerate import Accelerator
from originals import ORIGINALS, Original, scaled
from torch.utils.data import Sampler
from transformers import Trainer

KINDS = ("grpo", "rloo")


class Given(Sampler[int]):
    """Rows in a given order, one epoch after another; then as the trainer's own sampler has them."""

    def __init__(self, order: Sequence[int], size: int, repeats: Sequence[int] = (1, 1, 1)) -> None:
        """`repeats`: of a row, rows of a generation, of a generation."""
        self.order, self.size, self.repeats, self.taken = list(order), size, repeats, 0

    def __len__(self) -> int:
        times, chunk, again = self.repeats
        return self.size // chunk * chunk * times * again

    def __iter__(self) -> Iterator[int]:
        times, chunk, again = self.repeats
        own = self.order[self.taken : self.taken + self.size]
        own += [i for i in range(self.size) if i not in own][: self.size - len(own)]
        self.taken += self.size
        for first in range(0, len(own) // chunk * chunk, chunk):
            for _ in range(again):
                yield from (i for i in own[first : first + chunk] for _ in range(times))


class Recorder:
    """Records the updates of a TRL run as the trainer of transformers makes them."""

    def __init__(self, ours: dict[str, Any]) -> None:
        self.ours = ours
        self.updates: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.generations: list[dict[str, int]] = []
        self.loss, self.norm = 0.0, float("nan")
        self.rows: list[list[Any]] = []

    def start(self, trainer: Any) -> None:
        args, model = trainer.args, trainer.model
        decayed = set(trainer.get_decay_parameter_names(model))
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        group = trainer.optimizer.param_groups[0]
        self.facts = {
            "optimizer": str(args.optim).rpartition(".")[2].lower(),
            "betas": list(group["betas"]),
            "eps": group["eps"],
            "weight decay": args.weight_decay,
            "numbers decayed": sum(p.numel() for n, p in named.items() if n in decayed),
            "numbers trained": sum(p.numel() for p in named.values()),
            "clip": args.max_grad_norm,
            "products": {"no": "float32", "bf16": "bfloat16"}[trainer.accelerator.mixed_precision],
            "weights": str(next(iter(named.values())).dtype).removeprefix("torch."),
        }

    def step(self, trainer: Any) -> None:
        self.updates.append(
            {
                "loss": self.loss,
                "grad_norm": self.norm,
                "lr": trainer.optimizer.param_groups[0]["lr"],
                "rows": self.rows,
            }
        )
        self.loss, self.rows = 0.0, []

    def inputs(self, kind: str, inputs: dict[str, Any]) -> None:
        self.rows += list(_rows(kind, inputs))


def _rows(kind: str, inputs: dict[str, Any]) -> Iterator[list[Any]]:
    """[tokens, 1 for each that is trained] of each row of a micro-batch, without padding."""
    if "completion_ids" in inputs:
        parts = [[inputs[f"{p}_ids"], inputs[f"{p}_mask"]] for p in ("prompt", "completion")]
        for one in zip(*parts[0], *parts[1], strict=True):
            prompt, reply = one[0][one[1].bool()].tolist(), one[2][one[3].bool()].tolist()
            yield [prompt + reply, [0] * len(prompt) + [1] * len(reply)]
        return
    prefixes = ("chosen_", "rejected_") if "chosen_input_ids" in inputs else ("",)
    for prefix in prefixes:
        ids = inputs[f"{prefix}input_ids"]
        if f"{prefix}labels" in inputs:
            trained = inputs[f"{prefix}labels"] != -100
        elif "completion_mask" in inputs:
            trained = inputs["completion_mask"].bool()
        else:
            trained = None
        there = inputs.get(f"{prefix}attention_mask", torch.ones_like(ids)).bool()
        for i in range(len(ids)):
            tokens = ids[i][there[i]].tolist()
            mask = [0] * (len(tokens) - 1) + [1] if trained is None else trained[i][there[i]].int().tolist()
            yield [tokens, [0, *mask[1:]]]


def watch(recorder: Recorder, kind: str) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()

    def swap(owner: Any, name: str, new: Any) -> None:
        old = getattr(owner, name)
        stack.callback(setattr, owner, name, old)
        setattr(owner, name, new(old))

    def training_step(old: Any) -> Any:
        def made(self: Any, *given: Any, **named: Any) -> Any:
            if not recorder.facts:
                recorder.start(self)
                inner = self.compute_loss

                def compute_loss(model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
                    recorder.inputs(kind, inputs)
                    return inner(model, inputs, *rest, **more)

                self.compute_loss = compute_loss
            loss = old(self, *given, **named)
            recorder.loss += float(loss)
            return loss

        return made

    def clip(old: Any) -> Any:
        def made(self: Any, parameters: Any, limit: float, *rest: Any, **more: Any) -> Any:
            norm = old(self, parameters, limit, *rest, **more)
            recorder.norm = float(norm)
            return norm

        return made

    class Steps(transformers.TrainerCallback):
        trainer: Any

        def on_pre_optimizer_step(self, *given: Any, **named: Any) -> None:
            recorder.step(self.trainer)

    def init(old: Any) -> Any:
        def made(self: Any, *given: Any, **named: Any) -> None:
            old(self, *given, **named)
            own = Steps()
            own.trainer = self
            self.add_callback(own)

        return made

    swap(Trainer, "training_step", training_step)
    swap(Accelerator, "clip_grad_norm_", clip)
    swap(Trainer, "__init__", init)
    swap(Trainer, "_save_checkpoint", lambda old: lambda *given, **named: None)
    swap(Trainer, "save_model", lambda old: lambda *given, **named: None)
    if kind in KINDS:
        _put_in(recorder, swap)
    else:
        swap(Trainer, "_get_train_sampler", lambda old: lambda self, *given: _sampler(recorder, self))
    return stack


def _sampler(recorder: Recorder, trainer: Any) -> Given:
    """The rows in the order of our run; places are those among the rows that the trainer has kept."""
    order = recorder.ours["order"]
    kept = {place: rank for rank, place in enumerate(sorted(set(order)))}
    size = len(trainer.train_dataset)
    return Given([kept[place] for place in order if kept[place] < size], size)


def _put_in(recorder: Recorder, swap: Any) -> None:
    """Have TRL's trainers take our prompts and replies, update by update, and split them in this order."""
    steps = recorder.ours["steps"]
    passes = recorder.ours["options"].get("epochs", 1)
    first = [[r for update in step[: len(step) // passes] for r in update] for step in steps]
    waiting = [list(step) for step in first]

    def sampler(old: Any) -> Any:
        def made(self: Any, dataset: Any = None) -> Any:
            place = {row: i for i, row in enumerate(self.train_dataset["prompt"])}
            times, args = self.num_generations, self.args
            order = [place[r["prompt"]] for step in first for r in step[::times]]
            return Given(order, len(place), (times, args.generation_batch_size // times,
                                             self.num_iterations * args.steps_per_generation))  # fmt: skip

        return made

    def generate(old: Any) -> Any:
        def made(self: Any, prompt_ids: Any, *rest: Any, **named: Any) -> Any:
            recorder.generations.append(
                {"prompts": len({tuple(ids) for ids in prompt_ids}), "replies": len(prompt_ids)}
            )
            given = waiting[0][: len(prompt_ids)] if waiting else []
            if len(given) < len(prompt_ids):
                return old(self, prompt_ids, *rest, **named)
            del waiting[0][: len(prompt_ids)]
            if not waiting[0]:
                del waiting[0]
            replies = [r["reply_ids"] for r in given]
            return (replies, None) if isinstance(self, grpo.GRPOTrainer) else replies

        return made

    for module, kind in ((grpo, grpo.GRPOTrainer), (rloo, rloo.RLOOTrainer)):
        swap(module, "shuffle_sequence_dict", lambda old: lambda given: given)
        swap(kind, "_get_train_sampler", sampler)
        swap(kind, "_generate_single_turn", generate)


def run(own: Original, place: Path) -> dict[str, Any]:
    recorder = Recorder(json.loads((place / "ours.json").read_text()))
    file = place / f"theirs-{own.file}"
    file.write_text(scaled(own, place, folded=True), encoding="utf-8")
    with watch(recorder, own.trainer):
        if own.file == "run.py":
            runpy.run_path(str(file), run_name="__main__")
        else:
            script = importlib.import_module(f"trl.scripts.{own.trainer}")
            words = file.read_text().replace("\\\n", " ").split()
            words = words[
                next(i for i, w in enumerate([*words, "--"]) if w.startswith("--") and w != "--num_processes") :
            ]
            words = ["--config", str(file)] if own.file == "run.yaml" else words
            script.main(*script.make_parser().parse_args_and_config(words, fail_with_unknown_args=False)[:4])
    return {"updates": recorder.updates, "generations": recorder.generations, **recorder.facts}


def all_of(folder: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for own in ORIGINALS:
        place = folder / own.folder
        if (names and own.name not in names) or not (place / "ours.json").exists():
            continue
        sys.path.insert(0, str(place))
        with contextlib.chdir(place):
            found = run(own, place)
        sys.path.remove(str(place))
        sys.modules.pop("rewards", None)
        found["versions"] = {name: version(name) for name in ("trl", "transformers", "torch")}
        (place / "theirs.json").write_text(json.dumps(found))
        print(f"{own.name}: {len(found['updates'])} updates", flush=True)


if __name__ == "__main__":
    all_of(Path(sys.argv[1]).resolve(), sys.argv[2:])
