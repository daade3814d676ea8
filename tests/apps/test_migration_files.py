"""Recipes from commands with further files: configurations of TRL, accelerate and Hydra, and the values in them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from posttrain.apps.migration.migrate import recipe_for
from posttrain.apps.migration.recipe_draft import RecipeDraft
from posttrain.apps.migration.recognition import read
from posttrain.cli.main import main
from posttrain.config.resolve import filled, validate
from posttrain.config.verbs import VERBS
from posttrain.core.several_files import names_of

PARSED = "from trl import TrlParser, DPOConfig, ModelConfig\nparser = TrlParser((DPOConfig, ModelConfig))\n"


def imported(path: Path, trainer: str | None = None, rows: int | None = None) -> tuple[str, dict[str, Any]]:
    """Return the recipe and its table, which a run accepts."""
    draft = recipe_for(str(path), None, rows, trainer)
    text = draft.toml(path.name, "recipe.toml")
    table = tomllib.loads(text)[draft.verb]
    validate(
        filled(VERBS[draft.verb].options, {k: v for k, v in table.items() if k != "track"})
    )  # perhaps not installed here
    return text, table


def files(folder: Path, **contents: str) -> Path:
    """Write files, whose names have "_" for "."; return that of the run."""
    for name, content in contents.items():
        (folder / name.replace("_", ".")).write_text(content, encoding="utf-8")
    return folder / next(iter(contents)).replace("_", ".")


LAUNCH = "accelerate launch --config_file=accelerate.yaml dpo.py --config dpo.yaml --learning_rate 2e-6"
LAUNCH += " --use_peft --lora_r 16\n"


def test_the_configuration_that_a_command_gives_to_a_script_is_read(tmp_path: Path) -> None:
    dpo = "beta: 0.3\nlearning_rate: 1.0e-5\ndataset_name: u/pairs\nper_device_train_batch_size: 4\n"
    run = files(tmp_path, run_sh=LAUNCH, dpo_py=PARSED, dpo_yaml=dpo, accelerate_yaml="num_processes: 2\n")
    _, table = imported(run)
    assert (table["beta"], table["lr"], table["tasks"], table["lora"]) == (0.3, 2e-6, "u/pairs", 16)
    assert (table["rows"], table["processes"]) == (8, 2)


def test_a_command_counts_where_its_script_parses_it_by_a_class_of_its_own(tmp_path: Path) -> None:
    own = "@dataclass\nclass ScriptArguments:\n    dataset_name: str = 'org/default'\n"
    command = "python sft.py --dataset_name org/mine --dataset_train_split train_sft --learning_rate 2e-6\n"
    run = files(tmp_path, run_sh=command, sft_py=own + PARSED.replace("DPO", "SFT"))
    draft = recipe_for(str(run), 1, None, None)
    table = tomllib.loads(draft.toml(run.name, "recipe.toml"))["sft"]
    assert (table["tasks"], table["split"], table["lr"]) == ("org/mine", "train_sft", 2e-6)


def test_files_that_decide_and_are_not_there_are_told_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = files(tmp_path, run_sh=LAUNCH, dpo_py=PARSED)
    assert main(["import", str(run), "--out", str(tmp_path / "a.toml")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "the number of devices in accelerate.yaml, which is not beside run.sh: --devices N" in told
    assert "the options of --config dpo.yaml, which cannot be read" in told
    hydra = "python -m verl.trainer.main_ppo --config-path=conf --config-name={} trainer.nnodes=1 ~trainer.bar\n"
    for name in ("my_grpo", "my_grpo.yaml"):
        told = imported(files(tmp_path, verl_sh=hydra.format(name)))[0]
        assert (
            "# Check my_grpo.yaml, which decides too" in told
            and "# Check ~trainer.bar, which deletes an option" in told
        )


HYDRA = """defaults:
  - ppo_trainer
  - actor: small
  - data@data: sums
  - gone
  - _self_
algorithm:
  adv_estimator: grpo
  use_kl_in_reward: false
data:
  train_batch_size: 64
  max_response_length: ${length.reply}
length: {reply: 16}
trainer:
  experiment_name: run_${length.reply}
  project_name: ${oc.env:PROJECT}
actor_rollout_ref:
  actor: {optim: {lr: 2e-6}, ppo_mini_batch_size: "${data.train_batch_size}"}
"""
"""A configuration of one's own over verl's; YAML reads 2e-6 as text."""


def test_hydras_configuration_beside_a_command_of_verl_is_read_below_its_overrides(tmp_path: Path) -> None:
    for folder in ("actor", "data"):
        (tmp_path / "cfg" / folder).mkdir(parents=True)
    (tmp_path / "cfg" / "my_grpo.yaml").write_text(HYDRA, encoding="utf-8")
    (tmp_path / "cfg" / "actor" / "small.yaml").write_text("anything: 1\n", encoding="utf-8")
    data = "train_files: a.parquet\nmax_response_length: 7\ntrain_batch_size: 8\n"
    (tmp_path / "cfg" / "data" / "sums.yaml").write_text(data, encoding="utf-8")
    command = "python -m verl.trainer.main_ppo --config-path=cfg --config-name=my_grpo data.train_batch_size=32\n"
    told, table = imported(files(tmp_path, verl_sh=command))
    lines = {"tasks": "a.parquet", "prompts": 32, "minibatches": 1, "max_tokens": 16, "lr": 2e-6, "algorithm": "grpo"}
    assert {name: table[name] for name in lines} == lines and table["out"] == "runs/run_16"
    assert "# Check trainer.project_name = ${oc.env:PROJECT}, which only Hydra resolves" in told
    assert "# Check gone.yaml of the defaults, which is not there" in told and "ppo_trainer" not in told


def test_a_configuration_whose_defaults_name_itself_is_read_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("defaults: [own, own]\ndata: {train_batch_size: 4}\n", encoding="utf-8")
    command = "python -m verl.trainer.main_ppo --config-name own algorithm.adv_estimator=grpo\n"
    assert imported(files(tmp_path, verl_sh=command))[1]["prompts"] == 4


def test_numbers_of_a_configuration_are_read_as_argparse_reads_them(tmp_path: Path) -> None:
    """YAML reads 1e-3 without a point as text."""
    text = 'beta: 1e-3\nmax_steps: "50"\nlearning_rate: 2e-6\nlabel_smoothing: "0.1"\nloss_type: robust\nseed: "7"\n'
    _, table = imported(files(tmp_path, a_yaml=text), "dpo")
    lines = {"beta": 1e-3, "steps": 50, "lr": 2e-6, "noise": 0.1, "seed": 7}
    assert {name: table[name] for name in lines} == lines


@pytest.mark.parametrize(
    ("content", "trainer"),
    [
        ("loss_type: [sigmoid, sft]", "grpo"),
        ("loss_type: [[a], b]", "dpo"),
        ("loss_type: [nll]", "sft"),
        ("scale_rewards: [a]", "grpo"),
        ("importance_sampling_level: [a]", "grpo"),
        ("use_vllm: true\nvllm_importance_sampling_mode: [a]", "grpo"),
        ("f_divergence_type: [a]", "dpo"),
    ],
)
def test_a_list_in_place_of_a_word_is_refused_in_one_line(
    content: str, trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(files(tmp_path, a_yaml=content)), "--trainer", trainer]) == 2
    assert capsys.readouterr().err.startswith("posttrain: TRL's ") or trainer == "dpo"


VLLM = "trl grpo --dataset_name d --reward_funcs accuracy_reward --use_vllm true"


@pytest.mark.parametrize(
    ("text", "rows", "lines", "told"),
    [
        (VLLM, None, {"correction": "sequence-truncate", "correction_cap": 3.0}, "larger weight out (weight 0)"),
        (f"{VLLM} --vllm_importance_sampling_cap 2.0", None, {"correction_cap": 2.0}, "importance_sampling_cap = 2.0: "),
        ("trl grpo --sync_ref_model True --beta 0.1 --num_iterations 4 --ref_model_sync_steps 10", None,
         {"reference_every": 2}, "of which a step has 4: 2.5 steps, rounded"),
        (f"{VLLM} --vllm_importance_sampling_mode token_mask", None, {"correction": "icepop"}, "below 1 / cap"),
        ("trl dpo --dataset_name d --lr_scheduler_type cosine_with_min_lr", None, {"schedule": "cosine"},
         "it ends at 0 here, and at min_lr there"),
        ("trl dpo --dataset_name d --lr_scheduler_type constant --warmup_steps 9", None, {"warmup": None}, "no warm-up"),
        ("trl dpo --save_strategy epoch --eval_strategy epoch", 80, {"save_every": 10}, "add eval_every = 10"),
        ("trl dpo --save_strategy epoch", None, {"save_every": None}, "those of a pass (import with --rows ROWS)"),
        ("trl dpo --save_strategy no --eval_strategy no --eval_steps 50 --save_steps 7", None,
         {"save_every": 1_000_000, "eval_every": None}, "only at the end"),
        ("trl dpo --eval_strategy steps --eval_steps 50", None, {"eval_every": None}, "add eval_every = 50"),
        ("trl dpo --report_to wandb --run_name one", None, {"track": ["wandb"], "out": "runs/one"}, "pip install"),
        ("export WANDB_PROJECT='p q'\ntrl dpo --report_to wandb", None, {"track_project": "p q"}, ""),
        ("WANDB_PROJECT=p trl dpo --dataset_name d", None, {"track_project": None}, "no effect without a tracker"),
        ("trl dpo --lr_scheduler_type constant --warmup_ratio 0.1", None, {"warmup": None}, "#   warmup_ratio: no effect"),
        ("trl dpo --no_remove_unused_columns", None, {}, "= true: all columns of a row are kept"),
        ("trl grpo --importance_sampling_level sequence", None, {"ratio": "sequence-mean"}, "GSPO's ratio; with one update"),
        ("trl grpo --scale_rewards none", None, {"scale": "none", "settings": None}, ""),
    ],
)  # fmt: skip
def test_options_of_trl_that_have_no_exact_equal_are_converted_or_told(
    text: str, rows: int | None, lines: dict[str, Any], told: str, tmp_path: Path
) -> None:
    recipe, table = imported(files(tmp_path, run_sh=text), rows=rows)
    assert {name: table.get(name) for name in lines} == lines and told in recipe
    assert "_strategy = no:" not in recipe.replace("save_strategy = no: only at the end", ""), "no noise"


@pytest.mark.parametrize(
    ("options", "lines", "told", "untold"),
    [
        (
            "data.filter_overlong_prompts=True data.truncation=error",
            {"too_long": "skip"},
            "no effect: longer prompts",
            "",
        ),
        ("data.truncation=error", {"too_long": "refuse"}, "", ""),
        (
            "trainer.logger=['console','wandb'] trainer.project_name=p",
            {"track": ["wandb"], "track_project": "p"},
            "",
            "",
        ),
        (
            "trainer.logger=console trainer.project_name=p",
            {"track": None, "track_project": None},
            "without a tracker",
            "",
        ),
        ("algorithm.norm_adv_by_std_in_grpo=false", {"scale": "none"}, "do not divide by the group's std", ""),
        (
            "data.train_files=['a.parquet','b.parquet']",
            {"tasks": None, "mixture": {"a": {"tasks": "a.parquet"}, "b": {"tasks": "b.parquet"}}},
            "2 files as parts of a mixture",
            "only the first",
        ),
        (
            'data.train_files="${TRAIN_FILE}"',
            {"tasks": "FILE.parquet"},
            "# Before the first run: name model; name tasks;",
            "gsm8k",
        ),
        (
            "data.train_files=['a.parquet',\"$HIS/b.parquet\"]",
            {"mixture": {"a": {"tasks": "a.parquet"}, "FILE2": {"tasks": "FILE2.parquet"}}},
            "# Before the first run: name tasks of part FILE2;",
            "gsm8k",
        ),
        (
            "reward_model.reward_manager=dapo algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc",
            {"dynamic_sampling": 10},
            "filter_groups.metric = acc: here it is the environment's reward that is compared",
            "no counterpart",
        ),
        (
            "reward.reward_kwargs.overlong_buffer_cfg.len=9",
            {"overlong_cache": None},
            "overlong_buffer_cfg.len = 9: no effect",
            "",
        ),
        (
            "reward_model.reward_manager=naive +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=9",
            {"overlong_cache": None},
            "reward_model.reward_kwargs.overlong_buffer_cfg.len = 9: no effect: only the reward manager dapo",
            "",
        ),
        (
            "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_4",
            {"correction": "icepop"},
            "the lower bound is 1 / 4 here",
            "",
        ),
        ("algorithm.rollout_correction.rollout_rs=token_k1", {"correction": None}, "no such rejection here", ""),
        ("reward_model.reward_manager=naive trainer.val_before_train=True", {}, "", "reward_manager"),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov actor_rollout_ref.actor.clip_ratio_high=0.28",
            {"algorithm": "clip-cov", "clip_high": None},
            "clip_ratio_low, clip_ratio_high (0.2, 0.28): verl's Clip-Cov keeps PPO's clip",
            "",
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo "
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
            {"algorithm": "gspo", "aggregate": "constant"},
            "",
            "",
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean actor_rollout_ref.actor.loss_agg_mode=token-mean",
            {"algorithm": "gmpo", "aggregate": None},
            "loss_agg_mode = token-mean: no effect",
            "",
        ),
        ("trainer.val_before_train=True", {}, "", "val_before_train"),
        ("actor_rollout_ref.actor.fsdp_config.optimizer_offload=True", {"offload": ["optimizer"]}, "", ""),
    ],
)
def test_options_of_verl_vanish_neither_nor_say_the_opposite(
    options: str, lines: dict[str, Any], told: str, untold: str, tmp_path: Path
) -> None:
    text = f"python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 {options}"
    recipe, table = imported(files(tmp_path, run_sh=text))
    assert {name: table.get(name) for name in lines} == lines and told in recipe
    assert not untold or untold not in recipe


@pytest.mark.parametrize(
    ("given", "epochs", "steps", "budget"),
    [
        ("data.gen_batch_size=48", 1, 2, 30),  # two whole batches of 48 in 100 rows; 10 of them are 30 times 16 prompts
        ("data.gen_batch_size=48", 3, 6, 30),
        ("data.gen_batch_size=20", 1, 5, 13),
        ("data.gen_batch_size=null", 1, 6, 10),
        ("data.gen_batch_size=4", 1, 6, 10),
        ("data.gen_batch_size=48 algorithm.filter_groups.enable=False", 1, 6, None),
    ],
)
def test_steps_of_dapo_are_those_of_the_batches_that_it_generates(
    given: str, epochs: int, steps: int, budget: int | None, tmp_path: Path
) -> None:
    text = "python -m recipe.dapo.main_dapo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
    text += (
        "data.train_batch_size=16 algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 "
    )
    recipe, table = imported(files(tmp_path, run_sh=f"{text} trainer.total_epochs={epochs} {given}"), rows=100)
    assert (table["prompts"], table["steps"], table.get("dynamic_sampling")) == (16, steps, budget)
    assert "gen_batch_size: no counterpart" not in recipe


@pytest.mark.parametrize(
    ("given", "told", "untold"),
    [
        ("actor_rollout_ref.rollout.multi_turn.enable=true actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml",
         "tools of t.yaml: env has one turn alone", "no counterpart"),
        ("critic.ppo_epochs=3 critic.ppo_mini_batch_size=8 critic.optim.lr_warmup_steps_ratio=0.2",
         "critic.ppo_mini_batch_size = 8; critic.optim.lr_warmup_steps_ratio = 0.2: the critic learns in", "--"),
    ],
)  # fmt: skip
def test_options_of_turns_and_of_the_critic_are_not_answered_with_the_policys(
    given: str, told: str, untold: str, tmp_path: Path
) -> None:
    run = f"python3 -m verl.trainer.main_ppo data.train_files=d.parquet actor_rollout_ref.model.path=m {given}\n"
    recipe = imported(files(tmp_path, run_sh=run))[0]
    assert told in recipe and untold not in recipe.partition("# Options of verl")[2]


def test_what_has_to_be_put_right_before_the_first_run_is_one_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "trl grpo --model_name_or_path Qwen/Qwen3-0.6B --reward_funcs rewards.py --use_vllm true --report_to wandb"
    run = files(tmp_path, run_sh=text)
    told = (
        "model Qwen/Qwen3-0.6B is on the hub",
        "name tasks",
        "set steps = 3 x ROWS",
        "install vLLM, or remove engine",
        "or remove track",
    )
    recipe = imported(run)[0]
    assert "# Before the first run: " in recipe and all(words in recipe for words in told)
    assert main(["import", str(run), "--out", str(tmp_path / "a.toml")]) == 0
    out = capsys.readouterr().out
    assert out.count("first       ") == 5 and all(words in out for words in told)
    plain = files(tmp_path, dpo_sh="trl dpo --model_name_or_path runs/sft --dataset_name pairs.jsonl")
    assert "Before the first run" not in imported(plain)[0]


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("eos_token", False),
        ("pad_token", False),
        ("max_tokens", False),
        ("hub_token", True),
        ("token", True),
        ("auth.token", True),
        ("wandb_token", True),
        ("my_secret", True),
        ("api_key", True),
    ],
)
def test_only_secrets_are_hidden_in_a_recipe(name: str, hidden: bool, tmp_path: Path) -> None:
    text = f"trl sft --model_name_or_path m --dataset_name d --{name} VALUE"
    recipe = RecipeDraft(read(str(files(tmp_path, run_sh=text))), "sft", {}).origin(name)
    assert recipe == f"{name} = {'***' if hidden else 'VALUE'}"


LONG = "0x" + "f" * 50
SCRIPT = "from trl import GRPOConfig\nGRPOConfig({})\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.py", SCRIPT.format(f"max_steps={LONG}"), "max_steps has an integer of more than 64 bits"),
        ("a.py", SCRIPT.format(f"learning_rate={LONG}"), "learning_rate has an integer of more than 64 bits"),
        ("a.py", SCRIPT.format(f"output_dir=[{LONG}]"), "output_dir has an integer of more than 64 bits"),
        ("a.py", f"mask = {LONG}{'f' * 5000}\n" + SCRIPT.format(""), "a.py:1 has an integer of more than 64 bits"),
        ("grpo.yaml", f"own: {{a: {{b: [1, {LONG}]}}}}\n", "own.a.b has an integer of more than 64 bits"),
        ("grpo.yaml", "own: &own {a: {b: [*own]}}\n", "grpo.yaml is nested too deeply"),
        ("grpo.yaml", "".join(f"{' ' * n}a:\n" for n in range(300)), "grpo.yaml is nested too deeply"),
        ("grpo.yaml", "a: " + "[" * 1500 + "]" * 1500, "grpo.yaml is nested too deeply"),
    ],
)
def test_integers_that_python_cannot_show_and_deep_nesting_are_refused_in_one_line(
    name: str, content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert main(["import", str(tmp_path / name)]) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and not told.out


def test_penalty_near_the_limit_is_that_of_the_manager_that_verl_takes_by_default(tmp_path: Path) -> None:
    buffer = "+reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=128"
    rest = f"algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m data.train_files=d.parquet {buffer}"
    rest += " data.max_response_length=512 actor_rollout_ref.rollout.n=8\n"
    for module, length in (("verl.trainer.main_ppo", None), ("recipe.dapo.main_dapo", 128)):
        text, table = imported(files(tmp_path, run_sh=f"python3 -m {module} {rest}"))
        assert table.get("overlong_cache") == length and ("only the reward manager dapo" in text) == (length is None)
    off = rest.replace("enable=True", "enable=False")
    text, table = imported(files(tmp_path, run_sh=f"python3 -m recipe.dapo.main_dapo {off}"))
    assert "overlong_cache" not in table and "overlong_buffer_cfg.enable is not true" in text


def test_a_reward_model_that_is_off_scores_nothing(tmp_path: Path) -> None:
    run = "python3 -m verl.trainer.main_ppo data.train_files=d.parquet actor_rollout_ref.model.path=m"
    for enabled, models in (("True", ["rm"]), ("False", None)):
        given = f"reward.reward_model.enable={enabled} reward.reward_model.model_path=rm\n"
        _, table = imported(files(tmp_path, run_sh=f"{run} {given}"))
        assert table.get("reward_model") == models


TWO = """
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
rows = load_dataset("json", data_files=["x/a.jsonl", "y/a.jsonl"], split="train")
SFTTrainer(model="m", args=SFTConfig(output_dir="out"), train_dataset=rows).train()
"""
COMMAS = "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset x/a.jsonl,y/a.jsonl"


@pytest.mark.parametrize("run", [{"two_py": TWO}, {"run_sh": f"{COMMAS} --train.batch_size 64\n"}])
def test_several_files_of_other_trainers_are_parts_of_a_mixture_too(run: dict[str, str], tmp_path: Path) -> None:
    _, table = imported(files(tmp_path, **run), rows=100)
    assert table["mixture"] == {"x": {"tasks": "x/a.jsonl"}, "y": {"tasks": "y/a.jsonl"}} and "tasks" not in table


@pytest.mark.parametrize(
    "names",
    [
        ["p/data/t.parquet", "q/data/t.parquet", "r/data-2/t.parquet"],
        ["a.jsonl", "a.jsonl", "b.jsonl"],
        ["a-1.jsonl", "x/a.jsonl", "y/a.jsonl"],
    ],
)
def test_names_of_the_parts_of_a_mixture_differ(names: list[str]) -> None:
    assert len(set(names_of(names))) == len(names)


def test_tokens_of_accounts_are_hidden_and_those_of_a_model_are_not(tmp_path: Path) -> None:
    options = "trainer.huggingface_token=hf_HIDDEN +x.github_token=gh_HIDDEN +data.eos_token=END +y.token=t_HIDDEN"
    run = f"python3 -m verl.trainer.main_ppo data.train_files=d.parquet actor_rollout_ref.model.path=m {options}\n"
    text, _ = imported(files(tmp_path, run_sh=run))
    assert "HIDDEN" not in text and "END" in text
