"""Published runs of TRL, made small enough for a processor: the files that its own trainer and `posttrain import` read.

    W    processes of the published run

A run keeps its settings. What is smaller is the model, the rows, the lengths, and `max_steps` beyond MOST. The W processes
become one that accumulates W times as many micro-batches; `posttrain import` is given the published command and
`--devices W`. Products are in float32 where a run is `exact`. Needs the standard library alone: both environments read it.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTEXT = 128  # tokens of the model's context, and max_length of every run
REPLY = 12  # max_completion_length
MOST = 16  # updates of a run that counts them: a quarter where a step has one
LONG = 5  # of how many rows one is longer than the context
SCRIPT = """
from datasets import load_dataset
from {home} import {config}, {trainer}
from rewards import letters, short
rows = load_dataset("{tasks}", split="train")
arguments = {config}({options})
trainer = {trainer}(model="{model}", args=arguments, train_dataset=rows{more})
if __name__ == "__main__":
    trainer.train()
"""
REWARDS = '''
def letters(completions, **kwargs):
    """The share of letters. A leading space, which TRL's decoding drops, does not count."""
    return [sum(c.isalpha() for c in text) / (len(text.strip()) + 1) for text in completions]


def short(completions, **kwargs):
    return [1 / (1 + len(text.strip())) for text in completions]
'''
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@dataclass(frozen=True)
class Original:
    """A published run. `options` are as published but for the model, the rows, the rewards and the lengths."""

    name: str
    source: str  # where it is published
    start: str  # the words before the options, a configuration of TRL, or "yaml TRAINER"
    options: tuple[str, ...]
    kind: str  # of rows: pairs, unpaired, replies, messages or prompts
    rows: int
    devices: int = 1
    more: str = ""  # arguments of the trainer
    exact: bool = True  # products in float32 on both sides, so that rounding hides nothing
    long: bool = True  # whether some rows are longer than the context
    change: tuple[str, str] | None = None  # of the recipe: what one of its comments asks for

    @property
    def folder(self) -> str:
        return self.name.replace(",", "").replace(" ", "-")

    @property
    def file(self) -> str:
        return "run.py" if self.start.endswith("Config") else "run.yaml" if self.start[:5] == "yaml " else "run.sh"

    @property
    def trainer(self) -> str:
        """The trainer's name in TRL's command line."""
        return re.sub(r"Config$", "", self.start.split("/")[-1].split()[-1]).removesuffix(".py").lower()


def _published(place: Path, name: str) -> tuple[str, ...]:
    """The options of a run that the tests of the importer transcribe."""
    runs = json.loads(place.read_text(encoding="utf-8"))
    return tuple(next(run["options"] for run in runs if run["name"] == name))


VECTORS = Path(__file__).resolve().parents[2] / "tests" / "vectors" / "foreign_runs.json"
_KTO = ("--per_device_train_batch_size 16", "--num_train_epochs 1", "--learning_rate 5e-7", "--lr_scheduler_type=cosine",
        "--gradient_accumulation_steps 1", "--warmup_steps 0.1", "--logging_first_step")  # fmt: skip
_OPEN = "tests/vectors/foreign_runs.json"

ORIGINALS = (
    Original("sft yaml", f"{_OPEN}: trl sft yaml", "yaml sft", _published(VECTORS, "trl sft yaml"), "replies", 100, 2),
    Original("sft defaults", "TRL's defaults", "trl sft", (), "replies", 30, exact=False),
    Original("sft replies", "TRL's defaults", "trl sft", ("--num_train_epochs 1",), "replies", 30),
    Original("sft dft", "TRL's documentation of SFT", "trl sft", ("--loss_type dft", "--num_train_epochs 1"), "replies", 30),
    Original("sft messages", "TRL's defaults", "trl sft", ("--num_train_epochs 1",), "messages", 30),
    Original("sft messages, all trained", "TRL's defaults", "trl sft", ("--num_train_epochs 1",), "messages", 30,
             change=('mask = "assistant"', 'mask = "all"')),
    Original("dpo command", f"{_OPEN}: trl dpo command", "trl dpo", _published(VECTORS, "trl dpo command"), "pairs", 70),
    Original("dpo defaults", "TRL's defaults", "trl dpo", (), "pairs", 30, exact=False),
    Original("dpo full", "trl/scripts/dpo.py", "python trl/scripts/dpo.py",
             ("--learning_rate 5.0e-7", "--num_train_epochs 1", "--per_device_train_batch_size 2",
              "--gradient_accumulation_steps 8", "--weight_decay 0.1", "--warmup_steps 2",
              "--lr_scheduler_type cosine"), "pairs", 165),
    Original("reward command", f"{_OPEN}: trl reward command", "python trl/scripts/reward.py",
             _published(VECTORS, "trl reward command"), "pairs", 60, long=False),
    Original("reward defaults", "TRL's defaults", "trl reward", ("--num_train_epochs 1",), "pairs", 40, exact=False),
    Original("kto script", f"{_OPEN}: trl kto script", "KTOConfig", _published(VECTORS, "trl kto script"), "unpaired", 14),
    Original("kto command", "trl/scripts/kto.py", "python trl/scripts/kto.py", _KTO, "unpaired", 90),
    Original("orpo script", "TRL's defaults", "experimental.orpo.ORPOConfig", ("num_train_epochs=1",), "pairs", 30),
    Original("cpo script", "TRL's defaults", "experimental.cpo.CPOConfig", ("num_train_epochs=1",), "pairs", 30),
    Original("simpo script", "TRL's documentation of CPO", "experimental.cpo.CPOConfig",
             ("loss_type='simpo'", "cpo_alpha=0.0", "num_train_epochs=1"), "pairs", 30),
    Original("grpo command", f"{_OPEN}: trl grpo command", "accelerate launch --num_processes 8 trl/scripts/grpo.py",
             _published(VECTORS, "trl grpo command"), "prompts", 70, 8),
    Original("grpo script", f"{_OPEN}: trl grpo script", "GRPOConfig", _published(VECTORS, "trl grpo script"), "prompts",
             40, 2, ", reward_funcs=[letters, short]"),
    Original("grpo defaults", "TRL's defaults, 8 processes", "accelerate launch --num_processes 8 trl/scripts/grpo.py",
             (), "prompts", 22, 8, exact=False),
    Original("rloo defaults", "TRL's defaults", "trl rloo", (), "prompts", 11, exact=False),
    Original("rloo script", "TRL's defaults, several updates a step", "RLOOConfig",
             ("steps_per_generation=4", "gradient_accumulation_steps=2", "num_generations=4", "normalize_advantages=True",
              "num_train_epochs=1"), "prompts", 30, 1, ", reward_funcs=[letters]"),
)  # fmt: skip


def scaled(own: Original, place: Path, folded: bool = False) -> str:
    """The text of a run with the small model, rows and lengths; `folded`: its processes as accumulated micro-batches."""
    online = own.trainer in ("grpo", "rloo")
    length = {"max_completion_length": REPLY} if online else {"max_length": CONTEXT}
    given: dict[str, Any] = dict(_pair(option) for option in own.options)
    script, yaml = own.file == "run.py", own.file == "run.yaml"
    given.pop("dataset_config", None)
    if "max_steps" in given:
        given["max_steps"] = min(int(given["max_steps"]), MOST if "steps_per_generation" in given else MOST // 4)
    if not script:
        model = place / ("reward" if own.trainer == "reward" else "model")
        given |= {"model_name_or_path": str(model), "dataset_name": str(place / own.kind)}
    if online and not script:
        given["reward_funcs"] = " ".join(
            f"rewards.{f}" for f in ("letters", "short")[: 1 + (own.name == "grpo command")]
        )
    given |= {"output_dir": repr(str(place / "out")) if script else str(place / "out"), **length}
    if own.exact:
        given["bf16"] = False
    if folded and own.devices > 1:
        times = own.devices * int(given.get("gradient_accumulation_steps", 1))
        given["gradient_accumulation_steps"] = times
        if "steps_per_generation" in given:
            given["steps_per_generation"] = own.devices * int(given["steps_per_generation"])
    if folded:
        given |= {"use_cpu": True, "report_to": repr("none") if script else "none"}
    if yaml:
        return "".join(f"{name}: {value}\n" for name, value in given.items())
    if not script:
        return " \\\n    ".join([own.start, *(f"--{name} {value}".rstrip() for name, value in given.items())]) + "\n"
    home, _, config = f"trl.{own.start}".rpartition(".")
    given = {name: value for name, value in given.items() if "EPOCHS" not in str(value)}
    places = {"model": place / "model", "tasks": place / own.kind}
    options = ", ".join(f"{name}={value}" for name, value in given.items())
    trainer = config.replace("Config", "Trainer")
    return SCRIPT.format(home=home, config=config, trainer=trainer, options=options, more=own.more, **places)


def _pair(option: str) -> tuple[str, str]:
    """Name and value of an option as a command, a YAML file or a script has it."""
    name, _, value = re.sub(r"^--", "", option).replace(": ", " ", 1).replace("=", " ", 1).partition(" ")
    return name, value


def lay_out(place: Path, data: Path) -> None:
    """Write the model and the rows of every kind, each a folder that `datasets` and posttrain can read."""
    model = place / "model"
    if not model.exists():
        shutil.copytree(data / "models" / "stories260K", model)
        for file, changed in (
            ("config.json", {"max_position_embeddings": CONTEXT}),
            ("tokenizer_config.json", {"chat_template": TEMPLATE}),
        ):
            (model / file).write_text(json.dumps({**json.loads((model / file).read_text()), **changed}))
    (place / "rewards.py").write_text(REWARDS)


def write_rows(own: Original, place: Path, data: Path) -> None:
    """Write the rows of a run. One of LONG is longer than the context, none has a prompt that is."""
    lines = (data / "preferences" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [row for row in map(json.loads, lines) if len(row["prompt"]) < 90 and len(row["chosen"]) < 60]
    pairs = [row for row in pairs if own.long or len(row["rejected"]) < 90][: own.rows]
    assert len(pairs) == own.rows
    for row in pairs[LONG - 1 :: LONG] if own.long else ():
        row["chosen"] = " ".join([row["chosen"]] * 6)
    folder = place / own.kind
    folder.mkdir(exist_ok=True)
    rows = [_row(own.kind, place_of, row) for place_of, row in enumerate(pairs)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text, encoding="utf-8")


def _row(kind: str, place: int, row: dict[str, str]) -> dict[str, Any]:
    prompt, reply = row["prompt"] + "\n", row["chosen"]
    if kind == "pairs":
        return {"prompt": prompt, "chosen": reply, "rejected": row["rejected"]}
    if kind == "unpaired":
        return {"prompt": prompt, "completion": reply if place % 2 else row["rejected"], "label": bool(place % 2)}
    if kind == "replies":
        return {"prompt": prompt, "completion": reply}
    if kind == "messages":
        return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]}
    return {"prompt": prompt}
