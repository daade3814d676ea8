"""Recipes from scripts of TRL: what a script gives to its configuration and to its trainer otherwise than by keywords."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from posttrain.apps.migration.migrate import recipe_for
from posttrain.config.resolve import filled, validate
from posttrain.config.verbs import VERBS
from posttrain.core.types import UserError

SCRIPT = """
import os
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
{before}
args = {config}
{after}
"""


def imported(folder: Path, config: str, after: str = "", before: str = "", **given: Any) -> tuple[str, dict[str, Any]]:
    """Return the recipe and its table, which a run accepts."""
    path = folder / "own.py"
    path.write_text(SCRIPT.format(config=config, after=after, before=before), encoding="utf-8")
    draft = recipe_for(str(path), given.get("devices"), given.get("rows"), None)
    text = draft.toml(path.name, "recipe.toml")
    table = tomllib.loads(text)[draft.verb]
    validate(filled(VERBS[draft.verb].options, table))
    return text, table


@pytest.mark.parametrize(
    ("config", "after", "before", "lines"),
    [
        ("GRPOConfig(learning_rate=1e-5)", "args.learning_rate = 3e-6; args.beta = 0.02", "", {"lr": 3e-6, "kl": 0.02}),
        ("GRPOConfig()", "trainer = GRPOTrainer(args=args)\nargs.num_generations = 4", "", {"group": 4}),
        ("GRPOConfig(beta=1)", "if __name__ == '__main__':\n    args.beta = 0.5", "", {"kl": 0.5}),
        ("GRPOConfig()", "other.beta = 0.5", "", {"kl": 0.0}),
        ("DPOConfig('out/dpo', beta=0.3)", "", "", {"out": "out/dpo", "beta": 0.3}),
        ("GRPOConfig(seed=7, **common)", "", "common = dict(num_generations=4, beta=0.1)", {"group": 4, "kl": 0.1}),
        ("GRPOConfig(**common)", "", "common = {'num_generations': 4}\ncommon['beta'] = 0.1", {"group": 4, "kl": 0.1}),
        ("GRPOConfig(**{**a, 'beta': 0.2})", "", "a = dict(beta=0.1, seed=3)", {"kl": 0.2, "seed": 3}),
    ],
)
def test_options_that_a_script_gives_in_other_places_than_keywords_are_taken_over(
    config: str, after: str, before: str, lines: dict[str, Any], tmp_path: Path
) -> None:
    _, table = imported(tmp_path, config, after, before)
    assert {name: table.get(name) for name in lines} == lines


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ("args.beta = choose()", "beta: only the script computes its value, choose(): set it here"),
        ("if fast:\n    args.beta = 0.5", "beta: only the script computes its value, 0.5 if fast: set it here"),
        ("args.beta *= 2", "beta: only the script computes its value, args.beta * 2: set it here"),
    ],
)
def test_an_attribute_that_only_the_script_computes_is_listed(after: str, told: str, tmp_path: Path) -> None:
    text, table = imported(tmp_path, "GRPOConfig(beta=0.1)", after)
    assert told in text and table["kl"] == 0.0 and "beta, not known here" in text
    assert "DPOConfig's argument 2: only the script computes its value" in imported(tmp_path, "DPOConfig('o', 8)")[0]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("b = 0.3\nif fast:\n    b = 0.5\n{}", "0.5 if fast"),
        ("if n > 3:\n    b = 0.3\nelse:\n    b = 0.5\n{}", "0.5 if not (n > 3)"),
        ("b = 0.3\nfor b in (0.1, 0.5):\n    pass\n{}", "b for b in (0.1, 0.5)"),
        ("b = 0.3\nwhile more():\n    b = 0.5\n{}", "0.5 while more()"),
        ("try:\n    b = 0.3\nexcept KeyError:\n    b = 0.5\n{}", "0.5 in an except"),
        ("match n:\n    case 1:\n        b = 0.5\n{}", "0.5 in case 1"),
        ("def sweep():\n    b = 0.5\n{}", "b"),
        ("b = 0.3\ndef train(b):\n    {}", "b"),
        ("b = 0.3\nwith made() as b:\n    {}", "b"),
        ("def run(b):\n    {}\nrun(0.3)\nrun(0.5)", "b"),
        ("c = dict(beta=0.3)\nif fast:\n    c['beta'] = 0.5\nb = 0.4\nargs = GRPOConfig(**c)", "0.5 if fast"),
        ("c = dict(beta=0.3)\ndef f():\n    c['beta'] = 0.5\nargs = GRPOConfig(**c)", "0.5 in another function"),
        ("args = GRPOConfig(beta=0.3)\ndef tune(args):\n    args.beta = 0.5", "0.5"),
    ],
)
def test_a_value_that_a_branch_or_another_function_decides_is_listed(code: str, told: str, tmp_path: Path) -> None:
    script = "from trl import GRPOConfig\n" + code.format("args = GRPOConfig(beta=b)")
    _, text, table = recipe(tmp_path, script)
    assert f"beta: only the script computes its value, {told}: set it here" in text and table["kl"] == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "b = 0.1\nb *= 3\n{}\nb = 0.5",
        "b = 0.3\ndef sweep():\n    b = 0.5\n{}",
        "b = 0.3\nclass A:\n    b = 0.5\n{}",
        "b = 0.3\nother = [b for b in range(3)]\n{}",
        "if __name__ == '__main__':\n    b = 0.3\n    {}",
        "def main():\n    {}\nb = 0.3\nmain()",
        "def main():\n    b = 0.3\n    {}\ndef other():\n    b = 0.5",
        "if fast:\n    b = 0.3\n    {}\nelse:\n    b = 0.5",
        "try:\n    b = 0.3\n    with open('a') as f:\n        {}\nfinally:\n    end()",
        "def run(a, b=0.5):\n    {}\nrun(1, 0.3)",
        "def run(*, b):\n    {}\nc = 0.3\nrun(b=c)",
        "c = dict(beta=0.3)\nargs = GRPOConfig(**c)\nc['beta'] = 0.5",
        "if fast:\n    args = GRPOConfig()\n    args.beta = 0.3",
    ],
)
def test_a_value_is_the_one_that_its_name_has_where_it_is_read(code: str, tmp_path: Path) -> None:
    script = "from trl import GRPOConfig\n" + code.format("args = GRPOConfig(beta=b)")
    assert recipe(tmp_path, script)[2]["kl"] == pytest.approx(0.3)


def test_rows_and_models_that_a_branch_only_changes_keep_their_source(tmp_path: Path) -> None:
    script = "rows = load_dataset('u/d')\nif 'train' in rows:\n    rows = rows['train']\nmodel = load()\n"
    script += "model = AutoModel.from_pretrained('u/m')\nif a:\n    model = get_peft_model(model, c)\n"
    script += "SFTTrainer(model=model, args=SFTConfig(), train_dataset={})"
    _, _, table = recipe(tmp_path, script.format("rows"))
    assert (table["model"], table["tasks"], table["split"]) == ("u/m", "u/d", "train")
    other = script.replace("model = AutoModel", "if b:\n    model = AutoModel")
    _, text, table = recipe(tmp_path, other.format("rows"))
    assert "only the script computes its value" in text and table["model"] == "MODEL"


FILES = 'd = load_dataset("json", data_files={"train": "a.jsonl", "test": "b.jsonl"})'
ONE = 'd = load_dataset("json", data_files="a.jsonl", split="train")\nd = d.map(shape)\n'
CHANGED = "Check the rows: the script changes them"


@pytest.mark.parametrize(
    ("config", "load", "train", "test", "lines", "changed"),
    [
        ("GRPO", FILES, "d['train']", "d['test']", {"tasks": "a.jsonl", "eval_tasks": ["b.jsonl"]}, False),
        ("GRPO", FILES, "d['train'].map(f)", "d['test'].map(f)", {"tasks": "a.jsonl", "eval_tasks": ["b.jsonl"]}, True),
        ("DPO", f"{FILES}\nd = d.map(f)", "d['train']", "d['test']", {"tasks": "a.jsonl", "held_out": None}, True),
        ("GRPO", f"{ONE}d = d.train_test_split(0.1)", "d['train']", "d['test']",
         {"tasks": "a.jsonl", "held_out": 0.1, "eval_tasks": None}, True),
        ("DPO", f"{ONE}e = d.train_test_split(test_size=20, seed=1)", "e['train']", "e['test']",
         {"tasks": "a.jsonl", "held_out": 0.2}, True),
        ("DPO", f"{ONE}e = d.train_test_split(train_size=0.9)", "e['train']", "e['test']",
         {"tasks": "a.jsonl", "held_out": 0.1}, True),
        ("DPO", f"{ONE}e = d.train_test_split(train_size=90)", "e['train']", "e['test']", {"held_out": None}, True),
        ("DPO", 'd = load_dataset("u/rows")["train"].train_test_split(0.2)', "d['train']", "d['test']",
         {"tasks": "u/rows", "split": "train", "held_out": 0.2}, False),
    ],
)  # fmt: skip
def test_held_out_rows_of_a_script_are_found(
    config: str, load: str, train: str, test: str, lines: dict[str, Any], changed: bool, tmp_path: Path
) -> None:
    trainer = f"{config}Trainer(model='m', args=args, train_dataset={train}, eval_dataset={test}).train()"
    text, table = imported(tmp_path, f"{config}Config()", trainer, load, rows=100)
    assert {name: table.get(name) for name in lines} == lines
    assert (CHANGED in text) == changed
    assert "dataset_name" not in text and "model_name_or_path" not in text, "names of options that a script has not"
    assert ("eval_dataset = b.jsonl: held_out keeps a share" in text) == (config == "DPO" and load.startswith(FILES))


@pytest.mark.parametrize(
    ("before", "project"),
    [
        ("os.environ.setdefault('WANDB_PROJECT', 'p')", "p"),
        ("os.environ['WANDB_PROJECT'] = 'p'\nos.environ.setdefault('WANDB_PROJECT', 'q')", "p"),
    ],
)
def test_an_environment_variable_is_read_as_the_script_sets_it(before: str, project: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    words = {"config": "DPOConfig(report_to='wandb')", "after": "DPOTrainer(args=args)", "before": before}
    path.write_text(SCRIPT.format(**words), encoding="utf-8")
    draft = recipe_for(str(path), None, None, None)
    assert tomllib.loads(draft.toml(path.name, "recipe.toml"))["prefer"]["track_project"] == project


def recipe(folder: Path, script: str) -> tuple[str, str, dict[str, Any]]:
    """Return the verb, the text and the table of a script's recipe, which a run accepts."""
    path = folder / "own.py"
    path.write_text(script, encoding="utf-8")
    draft = recipe_for(str(path), 1, None, None)
    text = draft.toml(path.name, "recipe.toml")
    table = tomllib.loads(text)[draft.verb]
    validate(filled(VERBS[draft.verb].options, table))
    return draft.verb, text, table


@pytest.mark.parametrize(
    ("trainer", "verb", "rate"),
    [
        ("SFTTrainer", "sft", 2e-5),
        ("DPOTrainer", "prefer", 1e-6),
        ("KTOTrainer", "prefer", 1e-6),
        ("RewardTrainer", "reward-model", 1e-4),
        ("GRPOTrainer", "rl", 1e-6),
    ],
)
def test_a_trainer_without_a_configuration_has_the_defaults_of_its_own(
    trainer: str, verb: str, rate: float, tmp_path: Path
) -> None:
    reward = ", reward_funcs=accuracy_reward" if trainer == "GRPOTrainer" else ""
    start = f"from trl import {trainer}\nfrom trl.rewards import accuracy_reward\nfrom datasets import load_dataset\n"
    call = f"{trainer}(model='u/m', train_dataset=load_dataset('u/d', split='train'){reward}).train()"
    found, _, table = recipe(tmp_path, start + call)
    own = VERBS[verb].options.__dataclass_fields__["lr"].default
    assert (found, table["model"], table["tasks"], table.get("lr", own)) == (verb, "u/m", "u/d", rate)
    old = call.replace(").train", ", args=TrainingArguments('o')).train")
    assert recipe(tmp_path, start + old)[2]["lr"] == 5e-5, "the rate of transformers"
    with pytest.raises(UserError, match="makes the args of .*Trainer elsewhere"):
        recipe(tmp_path, start + call.replace(").train", ", args=made()).train"))


LOADED = (
    "model = AutoModelForCausalLM.from_pretrained('u/m', quantization_config=BitsAndBytesConfig(load_in_4bit=True))\n"
)
UNSLOTH = "model, tokenizer = FastLanguageModel.from_pretrained(model_name='u/m', max_seq_length=512{more})\n"
RANKS = {"lora": 32, "lora_alpha": 64.0, "quantize": "nf4"}


@pytest.mark.parametrize(
    ("made", "lines"),
    [
        (LOADED + "model = prepare_model_for_kbit_training(model)\n"
         "model = get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules='all-linear'))", RANKS),
        ("model = get_peft_model(AutoModelForCausalLM.from_pretrained('u/m'), LoraConfig())",
         {"lora": 8, "lora_alpha": 8.0, "quantize": None}),
        (LOADED + "wrapped = get_peft_model(model, peft_config=LoraConfig(r=32, lora_alpha=64))\nmodel = wrapped", RANKS),
        (UNSLOTH.format(more="") + "model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=64)",
         {**RANKS, "max_length": 512}),
        (UNSLOTH.format(more=", load_in_4bit=False") + "model = FastLanguageModel.get_peft_model(model)",
         {"lora": 16, "lora_alpha": 16.0, "quantize": None}),
        (UNSLOTH.format(more=", full_finetuning=True"), {"lora": None, "quantize": None, "max_length": 512}),
    ],
)  # fmt: skip
def test_adapters_and_bits_that_a_script_gives_to_the_model_are_those_of_the_recipe(
    made: str, lines: dict[str, Any], tmp_path: Path
) -> None:
    _, _, table = recipe(tmp_path, f"{made}\nSFTTrainer(model=model, args=SFTConfig('o'), train_dataset=rows).train()")
    assert table["model"] == "u/m" and {name: table.get(name) for name in lines} == lines


ARGPARSE = """
p = argparse.ArgumentParser()
p.add_argument("--lr", type=float, default="3e-5")
p.add_argument("-m", "--model-id", default="u/m")
p.add_argument("--bits", action="store_true", dest="no_bits")
p.add_argument("--seed", type=int)
p.add_argument("--decay", type=float, required=True)
args = p.parse_args()
out, rows = "o", 4
SFTTrainer(model=args.model_id, args=SFTConfig(out, learning_rate=args.lr, bf16=args.no_bits, seed=args.seed,
           weight_decay=args.decay, per_device_train_batch_size=rows), train_dataset=d)
"""


def test_arguments_of_a_script_have_the_values_of_its_command_or_their_defaults(tmp_path: Path) -> None:
    _, text, table = recipe(tmp_path, "from trl import SFTConfig, SFTTrainer\nimport argparse\n" + ARGPARSE)
    assert (table["model"], table["lr"], table["out"], table["rows"]) == ("u/m", 3e-5, "o", 4)
    assert "precision" not in table and "lr = 3e-05, " in text and "seed: only the script computes its value" in text
    (tmp_path / "run.sh").write_text(
        "accelerate launch --num_processes 2 own.py --lr 1e-4 --model-id=x/y --max_steps 3\n"
    )
    draft = recipe_for(str(tmp_path / "run.sh"), None, None, None)
    table = tomllib.loads(draft.toml("run.sh", "recipe.toml"))["sft"]
    assert (table["model"], table["lr"], table["rows"], table["steps"]) == ("x/y", 1e-4, 8, 3)
    assert "weight_decay: only the script computes its value, args.decay" in draft.toml("run.sh", "recipe.toml")
    (tmp_path / "run.sh").write_text("python own.py --decay 3e-2 --seed 7\n")
    draft = recipe_for(str(tmp_path / "run.sh"), 1, None, None)
    table = tomllib.loads(draft.toml("run.sh", "recipe.toml"))["sft"]
    assert (table["weight_decay"], table["seed"]) == (0.03, 7), "arguments without a default"


def test_fields_of_a_dataclass_are_arguments_too(tmp_path: Path) -> None:
    script = """
@dataclass
class Own:
    decay: float
    rate: float = field(default=4e-5, metadata={})
    base: str = "u/m"
def main(own):
    SFTTrainer(model=own.base, args=SFTConfig(learning_rate=own.rate, seed=other.rate, weight_decay=own.decay),
               train_dataset=d)
other = 3
"""
    _, text, table = recipe(tmp_path, script)
    assert (table["model"], table["lr"]) == ("u/m", 4e-5) and "other.rate: set it here" in text
    (tmp_path / "run.sh").write_text("python own.py --decay 3e-2 --rate 1e-4\n")
    (tmp_path / "own.py").write_text(f"from trl import SFTTrainer\n{script}")
    draft = recipe_for(str(tmp_path / "run.sh"), 1, None, None)
    table = tomllib.loads(draft.toml("run.sh", "recipe.toml"))["sft"]
    assert (table["weight_decay"], table["lr"]) == (0.03, 1e-4)


def test_weights_of_rewards_that_only_the_script_computes_are_left_to_its_reader(tmp_path: Path) -> None:
    functions = "def f(completions): return [1.0]\ndef g(completions): return [1.0]\n"
    script = "GRPOTrainer(args=GRPOConfig(reward_weights=[1.0, {}]), reward_funcs=[f, g])"
    _, text, table = recipe(tmp_path, functions + script.format("args.w"))
    assert "*" not in table["env"] and "reward_weights = [1.0, args.w]: weights follow the terms of env" in text
    assert recipe(tmp_path, functions + script.format("0.5"))[2]["env"].endswith("*0.5")


def test_a_mapping_becomes_a_table_of_toml(tmp_path: Path) -> None:
    _, _, table = recipe(tmp_path, "GRPOConfig(chat_template_kwargs={'enable_thinking': False, 'a b': 1, 'c': 'x\"'})")
    assert table["chat_template_kwargs"] == {"enable_thinking": False, "a b": 1, "c": 'x"'}
    _, text, table = recipe(tmp_path, "GRPOConfig(chat_template_kwargs={'a': {'b': [f()]}}, output_dir='\\x9b2J')")
    assert "only the script computes its a: set it here" in text and "chat_template_kwargs" not in table
    assert table["out"] == "\x9b2J" and "\x9b" not in text, "a terminal obeys no value"
    (tmp_path / "a.yaml").write_text("num_generations: 8\nchat_template_kwargs:\n  enable_thinking: false\n")
    text = recipe_for(str(tmp_path / "a.yaml"), 1, None, None).toml("a.yaml", "recipe.toml")
    assert tomllib.loads(text)["rl"]["chat_template_kwargs"] == {"enable_thinking": False}


SWITCH = """
import argparse
from trl import SFTConfig, SFTTrainer
{arguments}
peft = None
{made}
SFTTrainer(model="u/m", args=SFTConfig("o"), train_dataset=d, peft_config=peft).train()
"""
PARSER = """p = argparse.ArgumentParser()
p.add_argument("--use_lora", action="store_true")
p.add_argument("--rank", type=int)
p.add_argument("--method", default="full")
a = p.parse_args()"""
HELPER = "def parse():\n    " + PARSER.replace("\n", "\n    ") + "\n    return a\na = parse()"
FIELDS = (
    "@dataclass\nclass Own:\n    use_lora: bool = field(default=False)\n    rank: int = 0\n    method: str = 'full'\n"
)
FIELDS += "a = HfArgumentParser(Own).parse_args_into_dataclasses()[0]"


@pytest.mark.parametrize("arguments", [PARSER, HELPER, FIELDS])
@pytest.mark.parametrize(
    ("made", "rank"),
    [
        ("if a.use_lora:\n    peft = LoraConfig(r=32)", None),
        ("if not a.use_lora:\n    peft = LoraConfig(r=32)", 32),
        ("peft = LoraConfig(r=32) if a.use_lora else None", None),
        ("peft = None if not a.use_lora else LoraConfig(r=32)", None),
        ("peft = LoraConfig(r=32) if a.method != 'lora' and not a.rank else None", 32),
        ("def make():\n    return LoraConfig(r=32)\npeft = make() if a.method == 'lora' else None", None),
        ("def make():\n    return LoraConfig(r=32)\npeft = make()", 32),
        ("class A:\n    def b(self):\n        return None\npeft = LoraConfig(r=32) if not a.rank else None", 32),
        ("class A:\n    def b(self):\n        return None\npeft = A().make(LoraConfig(r=32))", 32),
    ],
)
def test_adapters_behind_a_switch_are_those_of_the_switch(
    arguments: str, made: str, rank: int | None, tmp_path: Path
) -> None:
    _, text, table = recipe(tmp_path, SWITCH.format(arguments=arguments, made=made))
    assert table.get("lora") == rank and "whether adapters learn" not in text
    assert "a." not in made or "Check the arguments of own.py" in text, "defaults that are taken are told"


@pytest.mark.parametrize(
    ("words", "rank"), [("", 32), ("--full", None), ("--full --rank 8", None), ("-r 8", 8), ("--rank 16", 16)]
)
def test_switches_of_a_command_have_the_value_that_their_action_gives_them(
    words: str, rank: int | None, tmp_path: Path
) -> None:
    parser = "p = argparse.ArgumentParser()\np.add_argument('--full', action='store_false', dest='lora')\n"
    parser += "p.add_argument('-r', '--rank', type=int, default=32)\na = p.parse_args()"
    made = "peft = LoraConfig(r=a.rank) if a.lora else None"
    (tmp_path / "own.py").write_text(SWITCH.format(arguments=parser, made=made))
    (tmp_path / "run.sh").write_text(f"python own.py {words}\n")
    draft = recipe_for(str(tmp_path / "run.sh"), 1, None, None)
    text = draft.toml("run.sh", "recipe.toml")
    assert tomllib.loads(text)["sft"].get("lora") == rank and "no counterpart" not in text


@pytest.mark.parametrize(
    "made", ["if often():\n    peft = LoraConfig(r=32)", "peft = LoraConfig(r=32) if often() else None"]
)
def test_adapters_behind_a_condition_that_only_the_script_knows_are_told(made: str, tmp_path: Path) -> None:
    _, text, table = recipe(tmp_path, SWITCH.format(arguments=PARSER, made=made))
    assert table["lora"] == 32 and "Check whether adapters learn: " in text and "if often()" in text


def test_a_value_that_only_the_script_knows_is_never_called_the_same(tmp_path: Path) -> None:
    options = "beta=choose(), loss_type=kind(), learning_rate=rate(), output_dir=place()"
    path = tmp_path / "own.py"
    path.write_text(f"from trl import DPOConfig\nDPOConfig({options})")
    draft = recipe_for(str(path), 1, None, None)
    text = draft.toml(path.name, "recipe.toml")
    assert not [line for line in text.splitlines() if "not known here" in line and "same" in line.partition("#")[2]]
    told = next(line for line in draft.before_the_first_run() if line.startswith("set "))
    assert all(f"{name} (" in told for name in ("beta", "loss_type", "learning_rate")), told
    assert "TRL's default" in told and "model" not in told and "output_dir" not in told


@pytest.mark.parametrize(
    ("value", "kl"),
    [
        ("0.0 if a.use_lora else 0.04", 0.04),
        ("0.04 if not a.use_lora else 0.0", 0.04),
        ("a.method == 'none' and 1.0 or 0.3", 0.3),
        ("0.1 if a.rank is None else 0.2", 0.1),
        ("0.1 if 3 > 2 else 0.2", 0.1),
        ("0.1 if a.method in ('full', 'all') else 0.2", 0.1),
        ("b", 0.5),
    ],
)
@pytest.mark.parametrize("arguments", [PARSER, HELPER])
def test_an_expression_of_arguments_has_the_value_of_their_defaults(
    value: str, kl: float, arguments: str, tmp_path: Path
) -> None:
    before = "b = 0.5\nif a.use_lora:\n    b = 0.1"
    script = f"import argparse\nfrom trl import GRPOConfig\n{arguments}\n{before}\nGRPOConfig(beta={value})"
    assert recipe(tmp_path, script)[2]["kl"] == pytest.approx(kl)


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        ("model, ref", "u/r"),
        ("model=model, ref_model=ref", "u/r"),
        ("model=model, ref_model=AutoModel.from_pretrained('u/m')", None),
        ("model=model, ref_model=deepcopy(model)", None),
        ("model=model, ref_model=create_reference_model(model)", None),
        ("model, None", None),
        ("model=model, ref_model=made()", "made()"),
    ],
)
@pytest.mark.parametrize("trainer", ["DPO", "KTO"])
def test_a_reference_that_is_another_model_is_told_before_the_first_run(
    trainer: str, given: str, reference: str | None, tmp_path: Path
) -> None:
    loads = "model = AutoModel.from_pretrained('u/m')\nref = AutoModel.from_pretrained('u/r')\n"
    call = f"{trainer}Trainer({given}, args={trainer}Config('o'), train_dataset=d).train(resume_from_checkpoint=True)"
    _, text, table = recipe(tmp_path, f"from trl import {trainer}Config, {trainer}Trainer\n{loads}{call}")
    assert table["model"] == "u/m" and ("ref_model" in text) == (reference is not None)
    assert reference is None or f"{reference}: the reference here is the starting model" in text
    assert "resume_from_checkpoint = true: --resume" in text


@pytest.mark.parametrize("load", ["rows()", "load_dataset('u/d').map(shape)"])
def test_a_class_under_another_name_is_found_and_columns_of_rows_that_a_script_makes_are_told(
    load: str, tmp_path: Path
) -> None:
    script = "from trl.experimental.kto import KTOConfig as K2, KTOTrainer as Trainer\n"
    verb, text, table = recipe(tmp_path, f"{script}Trainer('u/m', args=K2(beta=0.3), train_dataset={load}).train()")
    assert (verb, table["algorithm"], table["beta"], table["model"]) == ("prefer", "kto", 0.3, "u/m")
    assert "to a file with the columns prompt, completion and label" in text


@pytest.mark.parametrize(
    ("trainer", "told"),
    [
        ("GKDTrainer", "posttrain distill"),
        ("OnlineDPOTrainer", "posttrain sample, label and prefer"),
        ("PRMTrainer", "posttrain reward-model --algorithm outcome"),
        ("BCOTrainer", "posttrain prefer --algorithm bco"),
    ],
)
def test_a_trainer_that_is_another_verb_here_is_refused_with_this_verb(trainer: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        recipe(tmp_path, f"{trainer}(model='m', args={trainer.replace('Trainer', 'Config')}())")


@pytest.mark.parametrize(
    ("config", "before", "after", "told"),
    [
        ("DPOConfig('o', **B)", "B = dict(beta=0.1)\nB.update(beta=0.4)", "", "which changes B: B.update(beta=0.4)"),
        ("DPOConfig('o')", "", "args.set_training(learning_rate=3e-6)", "which changes args: args.set_training("),
        ("DPOConfig('o', **read())", "", "", "the options in **read(), which only the script knows"),
    ],
)
def test_options_that_a_script_changes_or_computes_otherwise_are_to_be_checked(
    config: str, before: str, after: str, told: str, tmp_path: Path
) -> None:
    text, _ = imported(tmp_path, config, after, before)
    assert any(line.startswith("# Check") and told in line for line in text.splitlines()), text


def test_other_mappings_may_change(tmp_path: Path) -> None:
    text, _ = imported(tmp_path, "DPOConfig('o', beta=0.2)", before="other = {}\nother.update(beta=0.4)")
    assert "changes" not in text
