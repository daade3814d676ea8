"""Recipes from scripts of TRL in many styles: classes, functions, entry points, files; and what scripts change elsewhere."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from posttrain.apps.migration.migrate import recipe_for
from posttrain.apps.migration.recipe_draft import RecipeDraft
from posttrain.config.resolve import filled, validate
from posttrain.config.verbs import VERBS
from posttrain.core.types import UserError

GRPO = "from trl import GRPOConfig, GRPOTrainer\ndef r(completions, **k): return [0.0] * len(completions)\n"
SFT = "from trl import SFTConfig, SFTTrainer\n"
DPO = "from trl import DPOConfig, DPOTrainer\n"


def imported(folder: Path, script: str, command: str = "", **files: str) -> tuple[RecipeDraft, dict[str, Any], str]:
    """Return the recipe of a script, or of a command that starts it, its table, and the lines that the command prints."""
    (folder / "own.py").write_text(script)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    (folder / "run.sh").write_text(command)
    draft = recipe_for(str(folder / ("run.sh" if command else "own.py")), 1, 100, None)
    table = tomllib.loads(draft.toml("own.py", "recipe.toml"))[draft.verb]
    validate(filled(VERBS[draft.verb].options, table))
    return draft, table, "\n".join([*draft.run.notes, *draft.before_the_first_run()])


OWN_CLASS = """
from trl import GRPOConfig, GRPOTrainer, TrlParser
@dataclass
class Own:
    data: str = "u/d"
@dataclass
class MyConfig(GRPOConfig):
    beta: float = 0.1
    num_generations: int = 4
def r(completions, **k): return [0.0] * len(completions)
own, args = {parser}((Own, MyConfig)).{parse}
GRPOTrainer(model="u/m", reward_funcs=r, args=args, train_dataset=load_dataset(own.data, split="train")).train()
"""


@pytest.mark.parametrize("parser", ["TrlParser", "HfArgumentParser", "H4ArgumentParser"])
@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("", {"kl": 0.1, "group": 4, "tasks": "u/d"}),
        ("c.yaml", {"kl": 0.3, "group": 4, "tasks": "x/y"}),
        ("c.json", {"kl": 0.5, "group": 4, "tasks": "u/d"}),
        ("--config c.yaml --beta 0.7", {"kl": 0.7, "group": 4, "tasks": "x/y"}),
    ],
)
def test_defaults_of_a_subclass_and_files_by_position_count(
    parser: str, words: str, lines: dict[str, Any], tmp_path: Path
) -> None:
    script = OWN_CLASS.format(parser=parser, parse="parse()" if parser[0] == "H4" else "parse_yaml_file(sys.argv[1])")
    files = {"c_yaml": "beta: 0.3\ndata: x/y\n", "c_json": '{"beta": 0.5}'}
    _, table, told = imported(tmp_path, script, f"python own.py {words}", **files)
    assert {name: table.get(name) for name in lines} == lines and "decides too" not in told


@pytest.mark.parametrize("call", ["main(*parser.parse_args_and_config())", "a, b = parser.parse()\nmain(a, b)"])
def test_options_that_a_script_sets_after_it_has_read_its_command_count(call: str, tmp_path: Path) -> None:
    script = f"{GRPO}def main(own, args):\n    args.reward_weights = [own.weight]\n    args.beta = 0.5\n"
    script += (
        "    if often():\n        args.seed = 3\n    GRPOTrainer('u/m', reward_funcs=[r], args=args, train_dataset=d)\n"
    )
    script += f"@dataclass\nclass Own:\n    weight: float = 0.5\nparser = TrlParser((Own, GRPOConfig))\n{call}"
    script = script.replace("GRPOConfig, GRPOTrainer", "GRPOConfig, GRPOTrainer, TrlParser")
    _, table, told = imported(tmp_path, script, "python own.py --beta 0.1 --weight 0.2 --seed 7")
    assert table["kl"] == 0.5 and table["env"].endswith(":r*0.2") and "set seed (3 if often())" in told


CLASSES = """
class Config:
    rate = 3e-6
class Runner:
    def __init__(self, path, beta=0.1):
        with open(path) as file:
            self.options = yaml.safe_load(file)
        self.beta = beta
    def rows(self):
        return load_dataset(self.options["data"]["name"], split=self.options["data"].get("split", "train"))
    def model(self):
        model = AutoModelForCausalLM.from_pretrained(self.options["model"])
        return model, AutoTokenizer.from_pretrained(self.options["model"])
    def run(self):
        model, tokenizer = self.model()
        args = DPOConfig("o", learning_rate=Config.rate, beta=self.beta, seed=int(self.options["seed"]))
        DPOTrainer(model=model, args=args, train_dataset=self.rows(), processing_class=tokenizer).train()
Runner("c.yaml", beta=0.3).run()
"""
ENTRY = DPO + "{before}\n{decorators}def main({parameters}):\n    args = DPOConfig('o', learning_rate=lr, beta=beta)\n"
ENTRY += "    DPOTrainer(model=model, args=args, train_dataset=load_dataset('u/d', split='train')).train()\n{after}\n"
PLAIN = "lr: float = 3e-6, beta=0.3, model: str = 'u/m'"
CLICK = "@click.command()\n@click.option('--lr', default=3e-6)\n@click.option('-b', '--beta', default=0.3)\n"
CLICK += "@click.option('--base', 'model', default='u/m')\n"
TYPER = "lr: float = typer.Option(3e-6, help='x'), beta: Annotated[float, typer.Option()] = 0.3, "
TYPER += "model: str = typer.Argument('u/m')"
PARTS = """
@dataclass
class Optimizer:
    lr: float = 3e-6
@dataclass
class Args:
    optimizer: Optimizer = field(default_factory=Optimizer)
    beta: float = 0.3
def main(a):
    args = DPOConfig("o", learning_rate=a.optimizer.lr, beta=a.beta)
    DPOTrainer("u/m", args=args, train_dataset=load_dataset("u/d", split="train")).train()
main(tyro.cli(Args))
"""
WRAPPED = """
DEFAULTS = {"learning_rate": 1e-6, "beta": 0.3}
def made(**more):
    return DPOConfig("o", **{**DEFAULTS, **more})
def train(model, seed=1, **more):
    rows = load_dataset("u/d", split="train")
    DPOTrainer(model, None, made(weight_decay=0.0, **more), None, rows).train()
train("u/m", seed=3, learning_rate=3e-6)
"""
HYDRA = """
@hydra.main(version_base=None, config_path=".", config_name="h")
def main(cfg):
    args = DPOConfig(**OmegaConf.to_container(cfg.trainer))
    DPOTrainer(cfg.model, args=args, train_dataset=load_dataset("u/d", split="train")).train()
main()
"""
TWO = """
p = argparse.ArgumentParser()
sub = p.add_subparsers()
a = sub.add_parser("one"); a.add_argument("--lr", default=1e-3); a.set_defaults(func=one)
b = sub.add_parser("two"); b.add_argument("--lr", default=3e-6); b.add_argument("--beta", default=0.3)
b.set_defaults(func=two)
args = p.parse_args()
args.func(args)
"""
TWO = f"""
def one(args):
    SFTTrainer("u/x", args=SFTConfig("o", learning_rate=args.lr), train_dataset=d).train()
def two(args):
    more = DPOConfig("o", learning_rate=args.lr, beta=args.beta)
    DPOTrainer("u/m", args=more, train_dataset=load_dataset("u/d", split="train")).train()
{TWO}"""


@pytest.mark.parametrize(
    ("script", "command"),
    [
        (DPO + CLASSES, ""),
        (ENTRY.format(before="", decorators="", parameters=PLAIN, after="fire.Fire(main)"), ""),
        (ENTRY.format(before="", decorators="", parameters=PLAIN, after="typer.run(main)"), ""),
        (ENTRY.format(before="", decorators="@app.command()\n", parameters=TYPER,
                      after="@app.command()\ndef other(beta=0.9, lr=1, model='u/x'):\n    pass\napp()"), ""),
        (ENTRY.format(before="", decorators=CLICK, parameters="lr, beta, model", after="main()"), ""),
        (ENTRY.format(before="", decorators="", parameters=PLAIN.replace("0.3", "0.9"), after="fire.Fire(main)"),
         "python own.py --beta 0.3"),
        (DPO + PARTS, ""),
        (DPO + WRAPPED, ""),
        (DPO + HYDRA, ""),
        (DPO + SFT + TWO, "python own.py two"),
        (DPO + SFT + TWO.replace("3e-6", "1"), "python own.py two --lr 3e-6"),
    ],
)  # fmt: skip
def test_values_of_classes_entry_points_and_files_are_found(script: str, command: str, tmp_path: Path) -> None:
    files = {"c_yaml": "model: u/m\nseed: 42\ndata: {name: u/d}\n"}
    files["h_yaml"] = "model: u/m\ntrainer: {learning_rate: 3e-6, beta: 0.3}\n"
    draft, table, told = imported(tmp_path, script, command, **files)
    found = (draft.verb, table["model"], table["tasks"], table["split"], table["lr"], table["beta"])
    assert found == ("prefer", "u/m", "u/d", "train", 3e-6, 0.3) and "only the script" not in told


def test_a_default_that_two_commands_give_otherwise_is_not_guessed(tmp_path: Path) -> None:
    script = "from trl import SFTConfig\na.add_argument('--lr', default=1e-3)\nb.add_argument('--lr', default=3e-6)\n"
    _, _, told = imported(tmp_path, f"{script}args = p.parse_args()\nSFTConfig('o', learning_rate=args.lr)")
    assert "set learning_rate (args.lr)" in told


CLASS = "class Len:\n    def __init__(self, k): self.k = k\n"
CLASS += "    def __call__(self, completions, **k): return [self.k] * len(completions)\n"
MAKER = "def made(s):\n    def inner(completions, **k): return [s] * len(completions)\n    return inner\n"


@pytest.mark.parametrize(
    ("before", "given", "rewards"),
    [
        ("", "[partial(scaled, by=0.5), scaled]", [0.5, 1.0]),
        (CLASS, "[Len(0.25)]", [0.25]),
        (CLASS + "length = Len(0.25)\n", "[length, scaled]", [0.25, 1.0]),
        (MAKER, "[made(2.0)]", [2.0]),
        ("", "[lambda completions, **k: [3.0] * len(completions)]", [3.0]),
        ("fs = [scaled]\nfs.append(partial(scaled, by=0.5))\n", "fs", [1.0, 0.5]),
        ("TABLE = {'a': scaled, 'b': partial(scaled, by=0.5)}\n", "[TABLE[name] for name in ['b', 'a']]", [0.5, 1.0]),
    ],
)
def test_rewards_without_a_name_of_their_own_are_copied_and_run(
    before: str, given: str, rewards: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = "from functools import partial\ndef scaled(completions, by=1.0, **k): return [by] * len(completions)\n"
    script = (
        f"{start}{GRPO}{before}GRPOTrainer('u/m', reward_funcs={given}, args=GRPOConfig('o'), train_dataset=d).train()"
    )
    draft, table, told = imported(tmp_path, script)
    assert "missing from env" not in told
    names = [term.rpartition(":")[2] for term in table["env"].split(" + ")]
    module: dict[str, Any] = {}
    exec(draft.run.files["rewards.py"], module)
    assert [module[name](completions=["a", "b"]) for name in names] == [[reward] * 2 for reward in rewards]


@pytest.mark.parametrize(
    "given", ["get_rewards(args)", "[other.reward]", "[made() for made in things]", "[partial(local, t=tokenizer)]"]
)
def test_rewards_that_cannot_be_copied_are_missing_from_env(given: str, tmp_path: Path) -> None:
    script = f"{GRPO}def main(tokenizer):\n    from x import local\n    fs = {given}\n"
    script += "    GRPOTrainer('u/m', reward_funcs=fs, args=GRPOConfig('o'), train_dataset=d).train()"
    assert "missing from env" in imported(tmp_path, script)[2]


@pytest.mark.parametrize(
    ("rows", "lines", "told"),
    [
        ("load_dataset('u/d', split='train[:1000]')", {"split": "train", "limit": 1000}, ""),
        ("load_dataset('u/d', split='train[:10%]')", {"split": "train", "limit": None}, "reads train[:10%] alone"),
        ("load_dataset('u/d', split='train+test')", {"split": "train"}, "reads train+test alone"),
        ("load_dataset('u/d', split='train').select(range(50))", {"limit": 50}, ""),
        ("load_dataset('u/d', split='train').shuffle(seed=1).select(range(50))", {"limit": 50}, "shuffles them before"),
        ("load_dataset('u/d', split='train').filter(f).select(range(50))", {"limit": None}, "the script takes"),
        ("load_dataset('u/d', split='train').select(chosen)", {"limit": None}, "the script takes"),
        ("load_dataset('json', data_files={'train': ['a.jsonl', 'b.jsonl']}, split='train')",
         {"mixture": {"a": {"tasks": "a.jsonl"}, "b": {"tasks": "b.jsonl"}}}, ""),
        ("load_dataset('json', data_files=['a.jsonl', 'b.jsonl'], split='train[:9]')", {"limit": None},
         "first 9 of all files"),
        ("concatenate_datasets([load_dataset('u/a', split='train'), load_dataset('u/b', split='train')])",
         {"mixture": {"a": {"tasks": "u/a"}, "b": {"tasks": "u/b"}}, "split": "train"}, ""),
        ("load_dataset('u/d', data_dir='x', split='train')", {"tasks": "u/d"}, "data_dir = x of load_dataset"),
        ("standardize_sharegpt(load_dataset('u/d', split='train'))", {"tasks": "u/d"}, "the script changes them"),
        ("load_dataset('u/d', split='train').train_test_split(0.1)['test']", {"tasks": "u/d"},
         "train_test_split calls test"),
    ],
)  # fmt: skip
def test_the_rows_that_a_script_takes_are_those_of_the_recipe_or_told(
    rows: str, lines: dict[str, Any], told: str, tmp_path: Path
) -> None:
    _, table, printed = imported(tmp_path, f"{SFT}SFTTrainer('u/m', args=SFTConfig('o'), train_dataset={rows}).train()")
    assert {name: table.get(name) for name in lines} == lines and told in printed


TRAINS = "SFTTrainer(model=model, args=SFTConfig('o'), train_dataset=load_dataset('u/d', split='train'){}).train()"


@pytest.mark.parametrize(
    ("before", "words", "told"),
    [
        ("", ", formatting_func=f", "formatting_func = f: it makes a text of each row"),
        ("", ", data_collator=Own()", "data_collator = Own(): it decides which tokens are trained"),
        ("", ", callbacks=[Stop()]", "callbacks = [Stop()]: one that changes or ends the training"),
        ("", ", optimizers=(o, None)", "optimizers = (o, None): optimizer, optimizer_options and schedule"),
        ("", ", compute_loss_func=f", "compute_loss_func = f: the loss is the algorithm's here"),
        ("", ", other=f", "other = f, an argument of the trainer: no counterpart"),
        ("t = AutoTokenizer.from_pretrained('u/t')", ", processing_class=t", "the tokenizer is that of u/t"),
        ("t.add_special_tokens({})", "", "t.add_special_tokens({}) (line 3): a model here keeps its tokenizer"),
        ("model.resize_token_embeddings(9)", "", "save it with its tokenizer in a folder"),
        ("t.chat_template = 'x'", "", "t.chat_template = 'x': write the template to a file"),
        ("t = AutoTokenizer.from_pretrained('u/m', add_eos_token=True)", "", "add_eos_token = True of the tokenizer"),
        ("t.padding_side = 'left'", "", "t.padding_side = 'left': nothing is padded here"),
        ("for p in model.parameters():\n    p.requires_grad = False", "", "lora is what keeps weights from training"),
        ("SFTTrainer.compute_loss = f", "", "SFTTrainer.compute_loss, which the script replaces"),
        ("train_on_responses_only(t)", "", "replies alone are trained"),
        ("model = PeftModel.from_pretrained(model, 'u/a')", "", "merge the adapter into the model"),
        ("BitsAndBytesConfig(load_in_4bit=True)", "", "BitsAndBytesConfig (line 3), which no model gets"),
        ("PPOTrainer(args=1)", "", "own.py calls PPOTrainer too"),
        ("LoraConfig(r=4)", "", "LoraConfig (line 3), which the trainer does not get: all weights are trained"),
    ],
)
def test_what_a_script_changes_otherwise_than_by_options_is_printed(
    before: str, words: str, told: str, tmp_path: Path
) -> None:
    script = (
        f"{SFT}model = AutoModelForCausalLM.from_pretrained('u/m', dtype='float32')\n{before}\n{TRAINS.format(words)}"
    )
    _, table, printed = imported(tmp_path, script)
    assert told in printed and table["model"] == "u/m" and not {"lora", "quantize"} & table.keys()
    plain, *_ = imported(tmp_path, f"{SFT}model = 'u/m'\n{TRAINS.format(', data_collator=DataCollatorForSeq2Seq(t)')}")
    assert not plain.run.first


def test_a_trainer_of_the_scripts_own_is_read_and_what_it_overrides_is_printed(tmp_path: Path) -> None:
    script = "class Mine(SFTTrainer):\n    def compute_loss(self, model, inputs): return 0\n"
    script = f"{SFT}{script}Mine('u/m', args=SFTConfig('o', learning_rate=3e-6), train_dataset=d).train()"
    draft, table, printed = imported(tmp_path, script)
    assert (draft.verb, table["model"], table["lr"]) == ("sft", "u/m", 3e-6)
    assert "Mine, a trainer of the script's own, which defines compute_loss: none of it is in the recipe" in printed


@pytest.mark.parametrize(
    ("config", "lines", "told"),
    [
        ("loss_type='cispo', epsilon_high=5.0, num_iterations=2, importance_sampling_level='sequence'",
         {"algorithm": "cispo", "clip_high": 4.0, "ratio": "sequence-mean"}, ""),
        ("loss_type='cispo'", {"algorithm": "cispo"}, "epsilon_high, not given: epsilon = 0.2 bounds the ratio itself"),
        ("loss_type='luspo'", {"ratio": "token"}, ""),
        ("loss_type='vespo', importance_sampling_level='sequence'", {"algorithm": "vespo", "ratio": None}, ""),
        ("beta=0.1, importance_sampling_level='sequence'", {"kl_weighed": True},
         "the KL is weighed by the ratio of the token"),
        ("optim='adafactor', adam_beta2=0.95, adam_epsilon=1e-6", {"betas": None, "optimizer_options": None}, ""),
        ("optim='adamw_torch', adam_beta2=0.95", {"betas": [0.9, 0.95]}, ""),
        ("top_p=0.9", {"top_p": None}, "top_p = 0.9: training samples from the model's own distribution"),
        ("neftune_noise_alpha=5", {}, "neftune_noise_alpha = 5: nothing is dropped or disturbed"),
        ("surprise=5", {}, "surprise = 5: no counterpart in posttrain"),
        ("logging_steps=5, dataloader_num_workers=2, push_to_hub=True", {}, ""),
        ("warmup_ratio=0.1, max_steps=50", {"warmup": 5}, ""),
    ],
)  # fmt: skip
def test_options_that_change_what_is_learned_are_converted_or_printed(
    config: str, lines: dict[str, Any], told: str, tmp_path: Path
) -> None:
    call = "GRPOTrainer('u/m', reward_funcs=[r], args=GRPOConfig('o', {}), train_dataset=load_dataset('u/d', split='train'))"
    draft, table, printed = imported(tmp_path, GRPO + call.format(config))
    assert {name: table.get(name) for name in lines} == lines and told in printed
    quiet = [note for note in draft.run.notes if "rewards.py" not in note]
    assert bool(told) == bool(quiet or [line for line in draft.first if not line.startswith("set steps")]), quiet


@pytest.mark.parametrize(
    ("config", "lines", "told"),
    [
        ("label_smoothing=0.1", {"algorithm": "dpo", "smoothing": None}, "TRL 1.16 has none for sigmoid"),
        ("label_smoothing=0.1, loss_type='robust'", {"algorithm": "robust", "noise": 0.1}, ""),
        ("loss_type=['sigmoid', 'sft'], loss_weights=[1.0, 0.5]", {"preference": 1.0, "imitation": 0.5}, ""),
        ("f_divergence_type='alpha_divergence', f_alpha_divergence_coef=0.3",
         {"divergence": "alpha", "settings": {"score.alpha": 0.3}}, ""),
        ("reference_free=True", {}, "reference_free = true"),
    ],
)  # fmt: skip
def test_losses_of_dpo_are_those_of_its_trainer(config: str, lines: dict[str, Any], told: str, tmp_path: Path) -> None:
    call = f"DPOTrainer('u/m', args=DPOConfig('o', {config}), train_dataset=load_dataset('u/d', split='train'))"
    _, table, printed = imported(tmp_path, DPO + call)
    assert {name: table.get(name) for name in lines} == lines and told in printed


@pytest.mark.parametrize(
    ("trainer", "config", "told"),
    [
        ("DPO", "loss_type=['sigmoid', kind()]", "only the script computes a part of loss_type"),
        ("CPO", "loss_type='ipo'", "CPO's loss_type 'ipo' has no counterpart"),
        ("CPO", "alpha=0.2", "AlphaPO is with simpo"),
        ("KTO", "loss_type='apo_zero_unpaired'", "KTO's loss_type 'apo_zero_unpaired' has no counterpart"),
        ("GRPO", "importance_sampling_level='word'", "importance_sampling_level is token or sequence"),
    ],
)
def test_losses_without_an_equal_are_refused(trainer: str, config: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told.replace("'", ".")):
        imported(tmp_path, f"from trl import {trainer}Config, {trainer}Trainer\n{trainer}Config('o', {config})")


@pytest.mark.parametrize(
    ("load", "lines", "told"),
    [
        ("AutoModelForCausalLM.from_pretrained('u/m')", {"precision": "bfloat16"},
         "dtype = auto: weights that learn are float32"),
        ("AutoModelForCausalLM.from_pretrained('u/m', dtype=torch.float32)", {"precision": "bfloat16"}, ""),
        ("AutoModelForCausalLM.from_pretrained('u/m', quantization_config=BitsAndBytesConfig(load_in_4bit=True))",
         {"quantize": "nf4"}, "4 bits here are nf4, not fp4"),
        ("AutoModelForCausalLM.from_pretrained('u/m', quantization_config=BitsAndBytesConfig(load_in_4bit=True, "
         "bnb_4bit_quant_type='nf4'))", {"quantize": "nf4"}, ""),
    ],
)  # fmt: skip
def test_the_type_of_a_models_weights_is_that_of_its_load(
    load: str, lines: dict[str, Any], told: str, tmp_path: Path
) -> None:
    words = ", peft_config=LoraConfig(r=8, bias='none', init_lora_weights=True)" * ("quantize" in lines)
    _, table, printed = imported(tmp_path, f"{SFT}model = {load}\n{TRAINS.format(words)}")
    assert {name: table.get(name) for name in lines} == lines and told in printed
    assert ("fp4" in printed or "dtype" in printed) == bool(told)


def test_a_batch_of_unsloth_is_raised_to_a_whole_group(tmp_path: Path) -> None:
    config = "GRPOConfig('o', per_device_train_batch_size=1, num_generations=6)"
    script = f"from unsloth import FastLanguageModel\n{GRPO}"
    script += f"GRPOTrainer('u/m', reward_funcs=r, args={config}, train_dataset=d)"
    _, table, printed = imported(tmp_path, script)
    assert (table["prompts"], table["group"]) == (1, 6) and "Unsloth raises it to num_generations, 6" in printed


TWO_OF_A_CLASS = f"""{SFT}d = load_dataset('u/d', split='train')
a = SFTTrainer('u/m', args=SFTConfig('a', learning_rate=1e-5, max_steps=100), train_dataset=d, peft_config=LoraConfig(r=4))
b = SFTTrainer('u/n', args=SFTConfig('b', learning_rate=9e-3, max_steps=1), train_dataset=d, peft_config=LoraConfig(r=2))
"""


@pytest.mark.parametrize(
    ("trains", "model", "values", "others"),
    [
        ("a.train()", "u/m", (1e-5, 100, "a", 4), "in line 3, not of those in line 4"),
        ("b.train()", "u/n", (9e-3, 1, "b", 2), "in line 4, not of those in line 3"),
        ("b.train()\na.train()", "u/n", (9e-3, 1, "b", 2), "in line 4, not of those in line 3"),
    ],
)
def test_of_two_trainers_of_a_class_the_recipe_is_of_the_first_that_is_trained(
    trains: str, model: str, values: tuple[Any, ...], others: str, tmp_path: Path
) -> None:
    draft, table, _ = imported(tmp_path, TWO_OF_A_CLASS + trains)
    assert (table["model"], *(table[name] for name in ("lr", "steps", "out", "lora"))) == (model, *values)
    assert any(others in line for line in draft.run.first)


OWN_SETTINGS = """class S:
    def __init__(self, **over):
        self.beta = 0.1
        {own}
class T:
    def __init__(self, s, **over):
        self.s = s
        {other}
    def run(self):
        DPOTrainer('u/m', args=DPOConfig('o', beta=self.s.beta), train_dataset=d).train()
"""
LOOP = "for k, v in over.items():\n            setattr(self.s, k, v)"


@pytest.mark.parametrize(
    ("script", "beta", "told"),
    [
        ("a = DPOConfig('o')\nsetattr(a, 'beta', 0.3)", 0.3, ""),
        ("a = DPOConfig('o')\nvars(a).update(beta=0.3)", 0.3, ""),
        ("a = DPOConfig('o')\na.__dict__.update({'beta': 0.3})", 0.3, ""),
        ("a = DPOConfig('o')\nfor k, v in dict(beta=0.3).items():\n    setattr(a, k, v)", 0.3, ""),
        ("a = DPOConfig('o')\nsetattr(a, name(), 0.3)", 0.1, "line 3 of the script, setattr(a, name(), 0.3)"),
        ("a = DPOConfig('o')\na.__dict__.update(read())", 0.1, "line 3 of the script, a.__dict__.update(read())"),
        (OWN_SETTINGS.format(own="", other=LOOP) + "T(S(), beta=0.3).run()", 0.3, ""),
        (OWN_SETTINGS.format(own="self.__dict__.update(over)", other="") + "T(S(beta=0.3)).run()", 0.1, "set beta ("),
        (OWN_SETTINGS.format(own="self.__dict__.update(over)", other="") + "T(S(**read())).run()", 0.1, "update(over)"),
    ],
)  # fmt: skip
def test_attributes_that_are_set_by_their_names_are_followed_or_told(
    script: str, beta: float, told: str, tmp_path: Path
) -> None:
    trains = "" if "class T" in script else "\nDPOTrainer('u/m', args=a, train_dataset=d).train()"
    draft, table, _ = imported(tmp_path, f"{DPO}{script}{trains}")
    assert table["beta"] == beta
    found = [line for line in draft.before_the_first_run() if "of the script, " in line or line.startswith("set beta")]
    assert bool(found) == bool(told) and told in "".join(found)


def test_rows_that_a_named_function_makes_messages_of_are_told(tmp_path: Path) -> None:
    script = (
        "def one(x): return {'role': 'user', 'content': x}\ndef to_chat(row): return {'messages': [one(row['q'])]}\n"
    )
    script += "def plain(row): return {'text': row['q']}\n"
    for function, told in (("to_chat", True), ("partial(to_chat)", True), ("plain", False)):
        rows = f"load_dataset('u/d', split='train').map({function})"
        _, _, printed = imported(tmp_path, f"{SFT}{script}SFTTrainer('u/m', args=SFTConfig('o'), train_dataset={rows})")
        assert ("delete chat = false" in printed) == told


@pytest.mark.parametrize(
    ("trainer", "config", "words", "lines", "told"),
    [
        ("SFT", "packing=True, packing_strategy='wrapped'", "", {"too_long": None, "max_length": None},
         "packing_strategy = wrapped: rows are cut into blocks"),
        ("SFT", "packing=True", "", {"too_long": "truncate", "max_length": 1024}, "packing = true"),
        ("SFT", "chat_template_path='u/t'", "", {"chat_template": None}, "save the template of this tokenizer as a file"),
        ("GRPO", "vllm_sampling_params={'min_p': 0.1}", "", {}, "vllm_sampling_params = "),
        ("GRPO", "vllm_sampling_params=SamplingParams(min_p=0.1)", "", {}, "vllm_sampling_params = "),
        ("DPO", "", "lora_dropout=0.1, inference_mode=False", {"lora": 8}, ""),
        ("DPO", "disable_dropout=False", "lora_dropout=0.1", {"lora": 8}, "lora_dropout = 0.1: nothing is dropped here"),
        ("SFT", "", "lora_dropout=0.1", {"lora": 8}, "lora_dropout = 0.1: nothing is dropped here"),
        ("CPO", "max_completion_length=512", "", {"max_tokens": None}, ""),
    ],
)  # fmt: skip
def test_options_that_change_what_is_learned_in_one_trainer_alone_are_told_of_it(
    trainer: str, config: str, words: str, lines: dict[str, Any], told: str, tmp_path: Path
) -> None:
    more = ", reward_funcs=[r]" * (trainer == "GRPO") + f", peft_config=LoraConfig({words})" * bool(words)
    script = f"{GRPO}from trl import {trainer}Config, {trainer}Trainer\nd = load_dataset('u/d', split='train')\n"
    script += f"{trainer}Trainer('u/m', args={trainer}Config('o', {config}), train_dataset=d{more}).train()"
    _, table, printed = imported(tmp_path, script)
    assert {name: table.get(name) for name in lines} == lines and told in printed
    assert told or "what is learned" not in printed
