"""Recipes from runs of other trainers: quantities by hand, every recipe accepted here, nothing of theirs run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from posttrain.algorithms.all_algorithms import EVERY
from posttrain.apps.migration.foreign_run import Unresolved, value_of
from posttrain.apps.migration.migrate import recipe_for
from posttrain.apps.migration.shell_script import commands
from posttrain.cli.main import main
from posttrain.config.resolve import filled, validate
from posttrain.config.verbs import VERBS
from posttrain.core.option_aliases import suggestion
from posttrain.core.types import UserError
from posttrain.engines.servers.server_places import GivenServer
from posttrain.engines.vllm.vllm_client import VLLMClient
from posttrain.learners.optimizers import OptimizerChoice
from posttrain.training.adjust import adjust

RUNS = json.loads((ROOT / "tests" / "vectors" / "foreign_runs.json").read_text(encoding="utf-8"))
"""Options of published commands, configurations and scripts, shortened, and what must follow from them, found by hand."""

SCRIPT = """
from datasets import load_dataset
from trl import {config}, {trainer}
from trl.rewards import accuracy_reward
EPOCHS = 2 + 1
rows = load_dataset("d/maths", "main", split="train")
def short(completions, **kwargs):
    return [1.0 for _ in completions]
raise_if_run = open("RAN", "w") if __name__ == "__main__" else exec("open('RAN', 'w')")
arguments = {config}({options})
trainer = {trainer}(model="m", args=arguments, train_dataset=rows{more})
trainer.train()
"""
MORE = ", reward_funcs=[accuracy_reward, short], peft_config=LoraConfig(r=8, target_modules=['q_proj', 'v_proj'])"


def written(run: dict[str, Any], folder: Path) -> Path:
    """Return the file of a run: a shell script with variables and continuations, a YAML file or a Python script."""
    path = folder / run["file"]
    if path.suffix == ".sh":
        text = "#!/bin/bash\nset -x\n# a comment\n" + " \\\n    ".join([run["command"], *run["options"]]) + " $@\n"
    elif path.suffix == ".yaml":
        text = "\n".join(run["options"]) + "\n"
    else:
        grpo = run["config"] == "GRPOConfig"
        text = SCRIPT.format(config=run["config"], trainer=run["config"].replace("Config", "Trainer"),
                             options=", ".join(run["options"]), more=MORE if grpo else "")  # fmt: skip
    path.write_text(text, encoding="utf-8")
    return path


def imported(path: Path, **given: Any) -> tuple[str, str, dict[str, Any]]:
    """Return the verb, the recipe and its table."""
    draft = recipe_for(str(path), given.get("devices"), given.get("rows"), given.get("trainer"))
    text = draft.toml(path.name, "recipe.toml")
    return draft.verb, text, tomllib.loads(text)[draft.verb]


def command(folder: Path, text: str) -> Path:
    path = folder / "run.sh"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("run", RUNS, ids=[run["name"] for run in RUNS])
def test_quantities_follow_by_hand_and_the_recipe_is_accepted(run: dict[str, Any], tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    verb, text, table = imported(written(run, tmp_path), devices=run.get("devices"), rows=run["rows"])
    expected = dict(run["expect"])
    assert verb == expected.pop("verb")
    assert {name: table.get(name) for name in expected} == expected
    assert table.get("settings", {}) == run["settings"]
    assert all("  # " in line for line in text.splitlines() if line and line[0] not in "#["), (
        "a line without its reason"
    )
    config = filled(VERBS[verb].options, {k: v for k, v in table.items() if k != "track"})  # perhaps not installed here
    validate(config)
    if verb == "rl":
        adjust(EVERY[config.algorithm], config)
    assert not (tmp_path / "RAN").exists() and "secret" not in text


def test_the_command_writes_the_recipe_and_parses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "score.py").write_text(
        "def judge(data_source, solution_str, ground_truth, close=0.0): return 1.0"
    )
    source = written(next(run for run in RUNS if run["name"] == "verl custom reward"), tmp_path)
    assert main(["import", str(source), "--out", "recipe.toml", "--rows", "64"]) == 0
    assert "posttrain rl --config recipe.toml" in capsys.readouterr().out
    assert main(["import", str(source), "--out", "recipe.toml"]) == 2, "nothing is overwritten"
    capsys.readouterr()
    assert main(["rl", "--config", "recipe.toml"]) == 2
    assert "d.parquet" in capsys.readouterr().err, "all options are accepted: the rows are what is missing"


def test_a_batch_of_trl_counts_replies_of_all_processes(tmp_path: Path) -> None:
    path = command(
        tmp_path, "trl grpo --num_generations 8 --per_device_train_batch_size 2 --reward_funcs accuracy_reward"
    )
    with pytest.raises(UserError, match="batch of 2 replies .* --devices"):
        imported(path)
    for devices in (4, 8, 16):
        assert imported(path, devices=devices)[2]["prompts"] == 2 * devices // 8
    path = command(tmp_path, "trl grpo --generation_batch_size 64 --per_device_train_batch_size 2")
    table = imported(path, devices=4)[
        2
    ]  # 64 replies of 8 per prompt, 8 in an update: but an update needs a whole group
    assert (table["prompts"], table["minibatches"]) == (8, 8)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("--vllm_mode server --vllm_server_host 10.0.0.7 --vllm_server_port 8001", "http://10.0.0.7:8001"),
        ("--vllm_server_base_url http://a:1 --vllm_server_host b", "http://a:1"),
        ("--vllm_mode server", "http://127.0.0.1:8000"),
        ("--vllm_mode colocate --vllm_server_port 8001", None),
        ("", None),
    ],
)
def test_a_server_of_trl_is_one_url(given: str, url: str | None, tmp_path: Path) -> None:
    path = command(tmp_path, f"trl grpo --dataset_name d --reward_funcs accuracy_reward --use_vllm true {given}")
    _, text, table = imported(path)
    assert table.get("engine_url") == ([url] if url else None) and (url is None or "not with trl vllm-serve" in text)
    if url:
        GivenServer(url, VLLMClient, None, None)  # type: ignore[arg-type]  # it is one that is accepted


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("trl grpo --dataset_name d --optim adamw_torch_fused --adam_epsilon 1e-6",
         {"optimizer": "adamw", "optimizer_options": {"eps": 1e-6}}),
        ("trl dpo --dataset_name d --optim adamw_8bit", {"optimizer": "adamw8bit"}),
        ("trl sft --dataset_name d --optim paged_adamw_8bit", {"optimizer": "bitsandbytes.optim:PagedAdamW8bit"}),
        ("trl sft --dataset_name d --optim adafactor", {"optimizer": "adafactor"}),
        ("trl sft --dataset_name d --optim sgd", {"optimizer": "torch.optim:SGD"}),
        ("trl sft --dataset_name d --optim adalomo", {}),
        ("python -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.actor.optim.optimizer=AdamW8bit "
         "actor_rollout_ref.actor.optim.optimizer_impl=bitsandbytes.optim", {"optimizer": "adamw8bit"}),
        ("python -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.actor.optim.optimizer=SGD",
         {"optimizer": "torch.optim:SGD"}),
        ("python -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.actor.optim.optimizer=Lomo", {}),
        ("python -m openrlhf.cli.train_ppo_ray --data.prompt_dataset d --actor.optim muon --actor.muon.lr 2e-4 "
         "--actor.muon.momentum 0.9",
         {"optimizer": "muon", "lr": 2e-4, "optimizer_options": {"adjust_lr_fn": "original", "momentum": 0.9}}),
    ],
)  # fmt: skip
def test_optimizers_have_their_equals(text: str, lines: dict[str, Any], tmp_path: Path) -> None:
    verb, recipe, table = imported(command(tmp_path, text))
    assert {name: table[name] for name in ("optimizer", "optimizer_options") if name in table} == {
        name: value for name, value in lines.items() if name != "lr"
    }
    assert table.get("lr") == lines.get("lr", table.get("lr"))
    assert bool(lines) or "not taken over as optimizer: there is none of that name here" in recipe
    if lines:
        OptimizerChoice(table["optimizer"], table.get("optimizer_options", {})).check()
    assert filled(VERBS[verb].options, {**table, "env": "e"} if verb == "rl" else table)


def test_passes_become_steps_only_where_the_rows_are_known(tmp_path: Path) -> None:
    path = command(tmp_path, "trl grpo --num_generations 4 --per_device_train_batch_size 8 --warmup_ratio 0.1")
    _, text, table = imported(path)
    assert table["steps"] == 200 and "3 x ROWS / 2 prompts" in text and "warmup" not in table
    table = imported(path, rows=101)[2]
    assert table["steps"] == 150 and table["warmup"] == 15  # TRL leaves out the last of 101 rows in each of 3 passes
    path = command(tmp_path, "trl rloo --num_generations 4 --per_device_train_batch_size 8 --gradient_accumulation_steps 4 "
                             "--steps_per_generation 2 --num_train_epochs 2")  # fmt: skip
    table = imported(path, rows=101)[2]
    assert (table["prompts"], table["steps"]) == (8, 26)  # 4 prompts a generation: 100 rows, 12.5 steps of 8, twice
    path = command(
        tmp_path, "trl grpo --num_generations 4 --per_device_train_batch_size 8 --num_iterations 3 --max_steps 100"
    )
    assert imported(path)[2]["steps"] == 34, "three updates a step, and none of the 100 is left out"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("trl {} --dataset_name d", {"precision": "bfloat16", "chat": False}),
        ("trl {} --dataset_name d --bf16 False", {"precision": None, "chat": False}),
        ("trl {} --dataset_name d --fp16", {"precision": "bfloat16"}),
        ("trl {} --dataset_name d --bf16 False --dtype bfloat16", {"precision": "bfloat16"}),
        ("trl {} --dataset_name d --use_peft", {"lora": 16, "lora_alpha": 32.0, "lora_targets": ["q_proj", "v_proj"]}),
        ("trl {} --dataset_name d --lora_r 32 --lora_alpha 64", {"lora": None, "lora_alpha": None}),
        ("trl {} --dataset_name d --max_length 99 --num_train_epochs 2", {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("trainer", ["sft", "dpo", "kto", "reward", "grpo", "rloo"])
def test_defaults_of_trl_are_those_that_its_trainers_had_when_they_ran(
    text: str, lines: dict[str, Any], trainer: str, tmp_path: Path
) -> None:
    """Found by docs/results/imports.md: products in bfloat16, text without the chat template, LoRA only with use_peft."""
    _, recipe, table = imported(command(tmp_path, text.format(trainer)))
    assert {name: table.get(name) for name in lines} == lines
    if trainer not in ("grpo", "rloo"):
        assert table["too_long"] == ("skip" if trainer == "reward" else "truncate")
        assert table["max_length"] == (99 if "99" in text else 1024)
    assert ("no effect: TRL trains all weights without use_peft" in recipe) == ("--lora_r" in text)
    drops = "use_peft" in text and trainer in ("grpo", "rloo", "sft")  # the others disable it by default
    assert ("lora_dropout, not given: TRL's default, 0.05: nothing is dropped here" in recipe) == drops


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trl rloo --normalize_advantages True", "of the step's rewards here, of its advantages there"),
        ("trl kto --dataset_name d", "from those of a micro-batch there"),
        ("trl dpo --gradient_accumulation_steps 2", "a short last one of a pass counts as much as a full one"),
        ("trl sft --warmup_steps 5", "the first has 1 / warmup of the rate here, and 0 there"),
        ("trl sft --dataset_name d", 'of messages TRL trains every token, so set mask = "all" for these'),
        (
            "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo",
            "of all weights there, of matrices alone here",
        ),
        ("python -m openrlhf.cli.train_ppo_ray --data.prompt_dataset d", "reward.clip_range [-10, 10]"),
    ],
)
def test_a_difference_that_stays_is_told_in_the_recipe(text: str, words: str, tmp_path: Path) -> None:
    """Those of docs/results/imports.md, each by the words that its table has."""
    assert words in imported(command(tmp_path, text))[1]


@pytest.mark.parametrize(("given", "rank", "alpha"), [("", 8, 8.0), ("r=16", 16, 8.0), ("lora_alpha=4", 8, 4.0)])
def test_a_script_has_the_defaults_of_peft_and_not_those_of_the_command(
    given: str, rank: int, alpha: float, tmp_path: Path
) -> None:
    script = SCRIPT.format(
        config="SFTConfig", trainer="SFTTrainer", options="", more=f", peft_config=LoraConfig({given})"
    )
    (tmp_path / "own.py").write_text(script)
    table = imported(tmp_path / "own.py")[2]
    assert (table["lora"], table["lora_alpha"]) == (rank, alpha)


@pytest.mark.parametrize(
    ("text", "lines", "settings"),
    [
        ("python -m verl.trainer.sft_trainer", {"lr": 1e-3, "schedule": "constant", "betas": None, "warmup": None}, {}),
        ("python -m verl.trainer.fsdp_sft_trainer", {"lr": 1e-5, "schedule": None, "betas": [0.9, 0.95], "warmup": 3}, {}),
        ("torchrun -m verl.trainer.sft_trainer model.path=m data.messages_key=turns optim.lr_warmup_steps=7",
         {"model": "m", "fields": {"messages": "turns"}, "warmup": 7}, {}),
        ("python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.loss_scale_factor=4096 "
         "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
         {"aggregate": "constant", "precision": "bfloat16"}, {"aggregate.length": 4096}),
        ("python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.fsdp_config.dtype=float32",
         {"precision": "float32"}, {}),
        ("python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
         "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32 actor_rollout_ref.actor.optim.clip_grad=0.5",
         {"precision": "float32", "max_grad_norm": 0.5}, {}),
        ("python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.name=sglang "
         "actor_rollout_ref.rollout.tensor_model_parallel_size=2", {"engine": "sglang", "engine_tensor_parallel": 2}, {}),
        ("python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.grad_clip=0.3",
         {"max_grad_norm": 0.3}, {}),
        ("python -m openrlhf.cli.train_ppo_ray --actor.loss_agg_mode seq-mean-token-mean",
         {"aggregate": "sequence-mean", "correction": None}, {}),
        ("python -m openrlhf.cli.train_ppo_ray --vllm.num_engines 1 --algo.advantage.is_correction_level token "
         "--algo.advantage.is_correction_mode clip --algo.advantage.is_correction_threshold 0 2",
         {"aggregate": "token-mean", "correction": "truncate", "correction_cap": 2.0}, {}),
        ("python -m openrlhf.cli.train_ppo_ray --vllm.num_engines 1 --algo.advantage.is_correction_level seq",
         {"correction": "sequence", "correction_cap": 5.0}, {}),
    ],
)  # fmt: skip
def test_options_of_the_newest_versions_have_their_defaults_and_names(
    text: str, lines: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Found by the configurations that verl 0.9.1 and OpenRLHF 0.11.2 resolve."""
    table = imported(command(tmp_path, text), rows=2048)[2]
    assert {name: table.get(name) for name in lines} == lines and table.get("settings", {}) == settings


@pytest.mark.parametrize("mini", [256, 1024])
@pytest.mark.parametrize("rank", [0, 8])
def test_recipe_of_verl_tells_by_what_its_updates_differ(mini: int, rank: int, tmp_path: Path) -> None:
    """Found by ten steps of verl's own trainer: what only matters to several updates, or to all weights, is told there."""
    actor = f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} actor_rollout_ref.actor.grad_clip=0.3"
    model = f"actor_rollout_ref.model.path=m actor_rollout_ref.model.lora_rank={rank}"
    text = f"python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {actor} {model}"
    recipe = imported(command(tmp_path, text), rows=2048)[1]
    assert ("of whole groups here" in recipe) == (mini < 1024)
    assert ("the padding token's input embedding is trained here" in recipe) == (rank == 0)
    assert "max_grad_norm = 0.3" in recipe and "0.9, which does not read it and clips at optim.clip_grad, 1" in recipe


@pytest.mark.parametrize(
    "text",
    [
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True "
        "actor_rollout_ref.actor.kl_loss_type={}",
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=True "
        "algorithm.kl_penalty={}",
        "python -m openrlhf.cli.train_ppo_ray --algo.kl.init_coef 0.1 --algo.kl.use_loss --algo.kl.estimator {}",
    ],
)
def test_recipe_tells_that_the_k3_of_verl_and_openrlhf_is_bounded(text: str, tmp_path: Path) -> None:
    for estimator in ("k2", "k3"):
        recipe = imported(command(tmp_path, text.format(estimator)), rows=2048)[1]
        assert f'kl_estimator = "{estimator}"' in recipe
        assert ("there a token's is at most 10" in recipe) == (estimator == "k3")


SHELL = """
N=4; M=$((N * 2 + 1))
export DATA="${BASE:-/data}/x y"
ARGS=(
   --one ${N}   # a comment with 'quotes
   # --two
   --three "a b"
)
ARGS+=(--four)
if [ -z "$1" ]; then echo hi; fi
read -r -d '' more <<EOF
tool.py \\
  --five 5
EOF
run --m $M --data "$DATA" "${ARGS[@]}" --raw '$N' --unset $UNSET --out $(date +%F)/x && deepspeed $more
"""


def test_shell_words_are_those_of_a_shell() -> None:
    found = list(commands(SHELL))
    assert found[-2] == ["run", "--m", "9", "--data", "/data/x y", "--one", "4", "--three", "a b", "--four", "--raw", "$N",
                         "--unset", "$UNSET", "--out", "$(date +%F)/x"]  # fmt: skip
    assert found[-1] == ["deepspeed", "tool.py", "--five", "5"]


def test_values_are_read_as_hydra_and_argparse_read_them() -> None:
    read = {
        "1e-6": 1e-6,
        "True": True,
        "null": None,
        "[1,'a, b',[2]]": [1, "a, b", [2]],
        "'7'": "7",
        "-1": -1,
        "a/b": "a/b",
    }
    assert {text: value_of(text) for text in read} == read
    assert value_of("$X/y") == Unresolved("$X/y")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.sh", b"echo hello\n", "has no command of TRL"),
        ("run.sh", b"python -m verl.trainer.main_eval a=1", "main_eval is not converted: here it is posttrain label"),
        ("run.sh", b"trl gold --x 1", "trl gold has no counterpart"),
        ("run.sh", b"\xff\xfe\x00", "is not text in UTF-8"),
        ("run.sh", b"python -m verl.trainer.main_ppo algorithm.adv_estimator=newest", "'newest' has no counterpart"),
        ("run.sh", b"python -m verl.trainer.main_ppo data.train_batch_size=many", "is a number"),
        ("run.sh", b"trl grpo --loss_type new --num_generations 8", "'new' has no counterpart"),
        ("a.py", b"def broken(:", "cannot be read|can be read: SyntaxError"),
        ("a.py", b"import os\n", "is not a script of TRL"),
        ("a.py", b"from trl import PPOTrainer\nPPOTrainer(1)", "PPOTrainer, .* here it is posttrain rl --algorithm ppo"),
        ("a.py", b"p = TrlParser((A, GRPOConfig))", "takes its options from its command line"),
        ("a.py", b"x = " + b"(" * 5000, "SyntaxError|RecursionError|MemoryError"),
        ("a.yaml", b"a: [1", "not valid YAML"),
        ("a.yaml", b"- 1", "has no options"),
        ("a.yaml", b"learning_rate: 1", "give --trainer"),
        ("run.sh", b"trl grpo --num_generations 0", "num_generations is a whole number above 0"),
        ("run.sh", b"trl sft --per_device_train_batch_size 1e999", "is a number, not"),
        ("missing.sh", None, "cannot be read"),
        ("big.sh", b"a" * (1 << 19), "more than"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_refused_in_one_line(name: str, content: bytes | None, message: str, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        recipe_for(str(tmp_path / name), None, None, None)
    assert main(["import", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.startswith("posttrain: ")


def grown(first: str, line: str, part: str) -> str:
    """Nine names, each of nine times the one before."""
    names = zip("abcdefgh", "bcdefghi", strict=True)
    return first + "".join(line.format(new, ", ".join([part.format(old)] * 9)) for old, new in names)


BOMB = grown("a: &a [x, x, x, x, x, x, x, x, x]\n", "{0}: &{0} [{1}]\n", "*{}")
TABLES = grown("a: &a {x: 1}\n", "{0}: &{0} {{k: [{1}]}}\n", "*{}")
MERGED = grown("a: &a {x: 1}\n", "{0}: &{0} {{<<: [{1}]}}\n", "*{}")
LISTS = grown("a = [1]\n", "{0} = [{1}]\n", "{}")
TABLE = grown("a = {1: 2}\n", "{0} = {{1: [{1}]}}\n", "{}")
TEXTS = grown("a = 'x'\n", "{0} = f'{1}'\n", "{{{}}}")


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", f"num_generations: 8\n{BOMB}"),
        ("a.yaml", f"num_generations: 8\n{TABLES}chat_template_kwargs: *i\n"),
        ("a.yaml", f"num_generations: 8\n{MERGED}chat_template_kwargs: *i\n"),
        *(("a.py", f"{made}GRPOConfig(output_dir=i, chat_template_kwargs=i)") for made in (LISTS, TABLE, TEXTS)),
        ("a.sh", f"python -m verl.trainer.main_ppo data.train_files={'[' * 3000}{']' * 3000}"),
        ("a.sh", f"python -m verl.trainer.main_ppo data.train_files=[{'a,' * 1000}]"),
        ("a.sh", "python -m verl.trainer.main_ppo +x='" + '{"a":' * 400 + "1" + "}" * 400 + "'"),
        ("a.sh", "a=xx\n" + "a=$a$a\n" * 60 + "trl grpo --x $a"),
        ("a.sh", "$" * 200_000), ("a.sh", "$(" * 100_000), ("a.sh", "<<A\n" * 60_000), ("a.sh", "'" + "\"'" * 100_000),
        ("a.sh", "#\n" * 100_000), ("a.sh", "x " * 100_000), ("a.sh", "a=$((9**9**9))\ntrl grpo --num_generations $a"),
        ("a.py", "x = 'a' * 10**9\nGRPOConfig(output_dir=x + x)\n" + "y = 1\n" * 30_000),
        ("a.py", "a = b\nb = a\nGRPOConfig(beta=a)"),
        ("a.sh", "python -m verl.trainer.main_ppo data.train_files='\x1b]0;x\x07\u202e' data.prompt_key='a\"b\\\x7f'"),
    ],
)  # fmt: skip
def test_hostile_files_end_at_once_in_a_recipe_or_a_line(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    try:
        draft = recipe_for(str(tmp_path / name), None, None, None)
    except UserError as error:
        assert len(str(error)) < 1000
        return
    recipe = draft.toml(name, "recipe.toml")
    assert len(recipe) < 100_000 and "\x1b" not in recipe and tomllib.loads(recipe)


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("--critic.model.path", "critic_model"),
        ("--actor_rollout_ref.model.path", "model"),
        ("--critic.adam.lr", "critic_lr"),
        ("--actor.adam.lr", "lr"),
        ("--reward.model_name_or_path", "reward_model"),
        ("--rollout.batch_size", "prompts"),
        ("--actor_rollout_ref.rollout.n", "group"),
        ("--algorithm.kl_ctrl.target_kl", "kl_target"),
        ("--actor_rollout_ref.rollout.temperature", "temperature"),
        ("--actor_rollout_ref.rollout.val_kwargs.n", "eval_samples"),
    ],
)  # fmt: skip
def test_dotted_names_of_the_command_line_are_answered_by_the_same_table(word: str, option: str) -> None:
    kind = VERBS["rl"].options
    known = [*kind.__dataclass_fields__, *kind.flags()]
    assert suggestion(word, known) == f"; here it is --{option.replace('_', '-')}"


def test_of_several_runs_in_a_file_the_recipe_names_the_others(tmp_path: Path) -> None:
    command = "trl {} --model_name_or_path a/b --dataset_name c/d\n"
    (tmp_path / "both.sh").write_text(command.format("sft") + command.format("dpo") + "echo done\n")
    (tmp_path / "one.sh").write_text(command.format("sft") + "echo done\n")
    script = SCRIPT.format(config="SFTConfig", trainer="SFTTrainer", options="", more="")
    (tmp_path / "both.py").write_text(script + "DPOTrainer(model='m', args=DPOConfig(beta=0.2)).train()\n")
    assert (
        "# Check that you mean this command, the first of 2 in both.sh: give another a file"
        in imported(tmp_path / "both.sh")[1]
    )
    assert "Check that you mean" not in imported(tmp_path / "one.sh")[1]
    verb, recipe, _ = imported(tmp_path / "both.py")
    assert verb == "sft" and "both.py calls DPOConfig too" in recipe


def test_what_only_a_run_would_know_is_left_to_its_reader(tmp_path: Path) -> None:
    """An argument of a script or a function, a value of a loop, and keywords from another place."""
    (tmp_path / "run.sh").write_text(
        "run() {\n trl sft --model_name_or_path $1 --dataset_name ${2:-c/d} --seed $s --learning_rate 1e-4 $@\n}\n"
    )
    _, recipe, table = imported(tmp_path / "run.sh")
    assert table["model"] == "MODEL" and table["tasks"] == "c/d" and table["lr"] == 1e-4
    assert "model_name_or_path: only the script computes its value, $1: set it here" in recipe
    assert table["seed"] == 42 and "seed, not known here: TRL's default" in recipe and "$s: same" not in recipe
    more = "**json.load(open('more.json'))"
    (tmp_path / "run.py").write_text(SCRIPT.format(config="SFTConfig", trainer="SFTTrainer", options=more, more=""))
    assert f"{more}: only the script computes its value" in imported(tmp_path / "run.py")[1]


@pytest.mark.parametrize(
    ("load", "tasks", "split"),
    [
        ("('json', data_files='own.jsonl', split='train')", "own.jsonl", None),
        ("('json', data_files=['own.jsonl'], split='train[:50]')", "own.jsonl", None),
        ("('csv', data_files={'train': 'a.csv', 'test': 'b.csv'}, split='test')", "b.csv", None),
        ("('parquet', data_files={'train': 'a.parquet'})['train']", "a.parquet", None),
        ("('d/maths', split='train[:50%]')", "d/maths", "train"),
    ],
)
def test_a_file_of_a_script_has_no_split_and_a_share_of_rows_is_told(
    load: str, tasks: str, split: str | None, tmp_path: Path
) -> None:
    """`datasets` calls the rows of a file "train"; here the split of a single file is refused."""
    script = SCRIPT.format(config="SFTConfig", trainer="SFTTrainer", options="", more="")
    given = '("d/maths", "main", split="train")'
    assert given in script
    (tmp_path / "own.py").write_text(script.replace(given, load))
    _, recipe, table = imported(tmp_path / "own.py")
    assert table["tasks"] == tasks and table.get("split") == split
    assert ("alone; write these rows to a file" in recipe) == ("%" in load) and table.get("limit") == (
        50 if "[:50]" in load else None
    )


def test_the_split_of_held_out_rows_is_told_where_it_cannot_be_named(tmp_path: Path) -> None:
    """`eval_tasks` reads all rows of a data set, training rows included."""
    more = ", reward_funcs=[short], eval_dataset=load_dataset('d/maths', split='test')"
    script = SCRIPT.format(config="GRPOConfig", trainer="GRPOTrainer", options="", more=more)
    (tmp_path / "own.py").write_text(script)
    assert "write split test of d/maths to a file" in imported(tmp_path / "own.py")[1]


def test_the_trainer_of_a_file_that_names_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text("trl sft --model_name_or_path a/b --dataset_name c/d\n")
    assert main(["import", str(tmp_path / "run.sh"), "--trainer", "dpo"]) == 2
    assert "--trainer is of a YAML configuration" in capsys.readouterr().err


def test_older_names_and_lists_with_spaces_of_verls_sft_are_read(tmp_path: Path) -> None:
    words = "data.train_files='[a.parquet, b.parquet]' optim.warmup_steps_ratio=0.05 trainer.total_training_steps=400"
    _, _, table = imported(command(tmp_path, f"torchrun --nproc_per_node=1 -m verl.trainer.fsdp_sft_trainer {words}"))
    assert table["warmup"] == 20
    assert [part["tasks"] for part in table["mixture"].values()] == ["a.parquet", "b.parquet"]
