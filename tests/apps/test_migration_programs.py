"""Files that `posttrain import` recognises beside those it converts: each is answered with what to do, in one line."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from posttrain.apps.migration.migrate import recipe_for
from posttrain.apps.migration.recognition import read
from posttrain.core.types import UserError


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.sh", "accelerate launch sft.py --config x.yaml", r"sft\.py is not beside a\.sh"),
        ("a.sh", "cd x\nNPROC_PER_NODE=8 swift rlhf --rlhf_type grpo", "starts ms-swift, which is not converted"),
        ("a.sh", "llamafactory-cli train a.yaml", "starts LLaMA-Factory"),
        ("a.sh", "trl vllm-serve --model m", "here it is posttrain serve-policy"),
        ("a.sh", "deepspeed --module openrlhf.cli.train_kto --beta 0.1", "here it is posttrain prefer --algorithm kto"),
        ("a.sh", "python3 -m verl.trainer.main_generation data.n_samples=4", "here it is posttrain sample"),
        ("a.yaml", "stage: sft\nfinetuning_type: lora\nlearning_rate: 1", "a configuration of LLaMA-Factory"),
        ("a.yml", "base_model: x\nadapter: lora\ndatasets: []", "a configuration of Axolotl"),
        ("a.yaml", "rlhf_type: grpo\ntrain_type: lora", "a configuration of ms-swift"),
        ("a.toml", "max_steps = 1", "configurations of prime-rl are not"),
        ("a.ipynb", "[1]", "is not a Jupyter notebook"),
    ],
)
def test_what_is_not_converted_is_named_with_its_equal(name: str, text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=told) as error:
        read(str(tmp_path / name))
    assert "\n" not in str(error.value) and "--trainer" not in str(error.value)


def test_a_notebook_is_read_as_its_code(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": "GRPOConfig(beta=9)"},
        {"cell_type": "code", "source": ["%%capture\n", "!pip install trl\n", "from trl import DPOConfig, DPOTrainer"]},
        {"cell_type": "code", "source": "if True:\n    %matplotlib inline\nargs = DPOConfig(beta=0.3)"},
        {
            "cell_type": "code",
            "source": "DPOTrainer('u/m', args=args, train_dataset=load_dataset('u/d'))",
            "outputs": [],
        },
    ]
    (tmp_path / "own.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    draft = recipe_for(str(tmp_path / "own.ipynb"), 1, None, None)
    table = tomllib.loads(draft.toml("own.ipynb", "recipe.toml"))["prefer"]
    assert (table["model"], table["tasks"], table["beta"]) == ("u/m", "u/d", 0.3)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ("--num_generations 2 --per_device_train_batch_size 2", ""),
        ("--num_generations 1 --per_device_train_batch_size 2", "--group must be at least 2"),
        ("--num_generations 2 --per_device_train_batch_size 2 --use_vllm --vllm_mode server --num_processes 4", ""),
    ],
)
def test_what_the_command_of_a_recipe_would_refuse_is_told_when_it_is_written(
    options: str, refused: str, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(f"trl grpo --reward_funcs accuracy_reward {options}", encoding="utf-8")
    notes = [note for note in recipe_for(str(tmp_path / "run.sh"), None, 8, None).run.notes if "refuses" in note]
    assert [refused in note for note in notes] == [True] * bool(refused)


def test_commands_and_other_languages_in_a_notebook_are_left_out(tmp_path: Path) -> None:
    sources = [
        "%%capture\nimport os\nif os.environ:\n    !uv pip install -qqq \\\n        trl \\\n        'torch>=2'\nelse: pass",
        "%%writefile accelerate.yaml\nnum_processes: [2",
        "%%html\n<b>SFT</b>",
        "files = !ls \\\n  *.jsonl\n%env A=b\nfrom trl import SFTConfig, SFTTrainer",
        "\n%%time\nSFTTrainer(model='u/m', args=SFTConfig(learning_rate=3e-5), train_dataset=d).train()",
    ]
    cells = [{"cell_type": "code", "source": source.splitlines(keepends=True)} for source in sources]
    (tmp_path / "own.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    draft = recipe_for(str(tmp_path / "own.ipynb"), 1, None, None)
    table = tomllib.loads(draft.toml("own.ipynb", "recipe.toml"))["sft"]
    assert (table["model"], table["lr"]) == ("u/m", 3e-5)
