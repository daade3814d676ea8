"""Commands and configurations of other programs that are recognised but not converted: the answer to each, in one line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from posttrain.core.types import UserError

_MODULES = {
    "openrlhf.cli.train_kto": "posttrain prefer --algorithm kto",
    "openrlhf.cli.train_prm": "posttrain reward-model --algorithm outcome, on rows with labelled steps",
    "openrlhf.cli.train_kd": "posttrain distill --teacher MODEL",
    "openrlhf.cli.batch_inference": "posttrain sample",
    "openrlhf.cli.interactive_chat": "posttrain chat",
    "verl.trainer.main_generation": "posttrain sample",
    "verl.trainer.main_generation_server": "posttrain sample",
    "verl.trainer.main_eval": "posttrain label --with my.py:reward",
}
"""Modules that are started -> their equal here."""
_TRL = {
    "vllm-serve": "posttrain serve-policy",
    "gkd": "posttrain distill --teacher MODEL",
    "prm": "posttrain reward-model --algorithm outcome, on rows with labelled steps",
    "ppo": "posttrain rl --algorithm ppo",
    "bco": "posttrain prefer --algorithm bco",
}
"""Commands of TRL -> their equal here."""
_PROGRAMS = {
    "llamafactory-cli": "LLaMA-Factory",
    "axolotl": "Axolotl",
    "swift": "ms-swift",
    "megatron": "ms-swift",
    "tune": "torchtune",
    "prime-rl": "prime-rl",
}
_CONFIGURATIONS: tuple[tuple[str, set[str], int], ...] = (
    ("LLaMA-Factory", {"stage", "finetuning_type", "cutoff_len", "template", "dataset_dir", "do_train"}, 2),
    ("Axolotl", {"base_model", "datasets", "sequence_len", "adapter", "micro_batch_size", "val_set_size"}, 2),
    ("ms-swift", {"rlhf_type", "train_type", "tuner_type", "model_type", "torch_dtype"}, 2),
)
"""Program, options that only its configurations have, and how many of these show it."""


def answer_to(words: Iterable[str]) -> str:
    """ "; it has ...", for a program or module of another one that is known here; "" for none."""
    words = list(words)
    for before, word in zip(["", *words], words, strict=False):
        module = re.sub(r"\.py$", "", word).replace("/", ".")
        own = next((name for name in _MODULES if module == name or module.endswith(f".{name}")), "")
        if own:
            return f"; {own} is not converted: here it is {_MODULES[own]}"
        if before == "trl" and word in _TRL:
            return f"; trl {word} is not converted: here it is {_TRL[word]}"
        if (program := _PROGRAMS.get(Path(word).name)) and before in ("", "run", "-m", "exec"):
            return f"; it starts {program}, which is not converted"
        if re.match(r"(verl|openrlhf|recipe|trl)\.[\w.]+$", word):
            return f"; {word} has no counterpart in posttrain"
    return ""


def script_that_is_missing(words: Iterable[str], path: Path) -> str:
    """Return the script that a command starts and that is not there; "" if none is."""
    return next(
        (word for word in words if re.fullmatch(r"[\w./-]+\.py", word) and not (path.parent / word).is_file()), ""
    )


def refuse_configuration(options: Collection[str], name: str) -> None:
    """Raise UserError for the configuration of another program."""
    for program, signs, enough in _CONFIGURATIONS:
        if len(signs.intersection(options)) >= enough:
            raise UserError(
                f"{name} is a configuration of {program}, which is not converted: write its options as those of posttrain "
                "sft, rl or prefer"
            )
