"""Recipes of verl and OpenRLHF: what is learned is the same, or the command prints that it is not."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from posttrain.apps.migration.migrate import recipe_for
from posttrain.apps.migration.recipe_draft import RecipeDraft
from posttrain.apps.migration.shell_script import commands
from posttrain.cli.main import main
from posttrain.core.types import UserError

VERL = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a actor_rollout_ref.model.path=/m"
VERL_SFT = "torchrun -m verl.trainer.sft_trainer data.train_files=a model.path=/m"
PPO = "python -m openrlhf.cli.train_ppo_ray --pretrain /m --prompt_data a.jsonl --remote_rm_url r.py"
DPO = "deepspeed --module openrlhf.cli.train_dpo --pretrain /m --dataset a.jsonl"
SFT = "deepspeed --module openrlhf.cli.train_sft --pretrain /m --dataset a.jsonl"


def imported(folder: Path, text: str, rows: int = 2048) -> tuple[RecipeDraft, dict[str, Any]]:
    (folder / "run.sh").write_text(text, encoding="utf-8")
    draft = recipe_for(str(folder / "run.sh"), None, rows, None)
    return draft, tomllib.loads(draft.toml("run.sh", "a.toml"))[draft.verb]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{VERL} data.train_batch_size=1000 actor_rollout_ref.actor.ppo_mini_batch_size=96", "0.9 refuses it for 1000"),
        (f"{VERL} actor_rollout_ref.rollout.top_p=0.9", "top_p = 0.9: training samples from the model's own"),
        (f"{VERL} actor_rollout_ref.actor.use_kl_loss=True algorithm.use_kl_in_reward=True", "a run has one KL penalty"),
        (f"{VERL} data.shuffle=False", "data.shuffle = false: each pass has an order of its own"),
        (f"{VERL} data.filter_overlong_prompts=True data.max_prompt_length=64",
         "data.max_prompt_length = 64: longer prompts are left out there"),
        (f"{VERL} data.truncation=middle", "data.truncation = middle: here the start of a prompt is cut"),
        (f"{VERL} actor_rollout_ref.actor.optim.min_lr_ratio=0.1", "optim.min_lr_ratio = 0.1"),
        (f"{VERL} algorithm.use_pf_ppo=True", "algorithm.use_pf_ppo = true: no counterpart"),
        (f"{VERL} actor_rollout_ref.rollout.do_sample=False", "rollout.do_sample = false: training samples from"),
        (f"{VERL} trainer.critic_warmup=5", "critic_warmup = 5: the policy learns from the first step here"),
        (f"{VERL} trainer.resume_from_path=/run", "resume_from_path = /run: --resume"),
        (f"{SFT} --input_key q --output_key a", "a response ends with a space and the end-of-sequence token there"),
        (f"{VERL} distillation.enabled=True", "distillation.enabled = true: no counterpart"),
        (f"{VERL} trainer.v1.trainer_mode=separate_async", "trainer_mode = separate_async: no counterpart"),
        (f"{VERL} actor_rollout_ref.actor.fsdp_config.qat.enable=True", "qat.enable = true: no counterpart"),
        *((f"{VERL} some.option.of.a.later.version={value}", f"some.option.of.a.later.version = {told}: no counterpart")
          for value, told in (("3", "3"), ("0", "0"), ("0.0", "0.0"), ("False", "false"), ("abc", "abc"))),
        (f"{VERL} actor_rollout_ref.actor.optim.optimizer_impl=my.optim", "of my.optim: not taken over as optimizer"),
        (f"{VERL} algorithm.kl_ctrl.kl_coef=0.01", "kl_coef = 0.01: no effect without use_kl_in_reward"),
        (f"{VERL} algorithm.rollout_correction.rollout_rs=token_k1", "no such rejection here"),
        (f"{VERL} reward_model.reward_manager=mine", "a manager of your own"),
        (f"{VERL} $MORE", "the options in $MORE: only the script knows them"),
        (f"{VERL} '+data.apply_chat_template_kwargs=[1]'", "variables of the chat template"),
        (VERL.replace("verl.trainer", "recipe.one_step_off_policy"), "recipe.one_step_off_policy has a trainer of its own"),
        (f"{VERL} algorithm.adv_estimator=remax algorithm.use_kl_in_reward=True", "remax a token has the KL from it on"),
        (f"{VERL} algorithm.adv_estimator=reinforce_plus_plus_baseline actor_rollout_ref.rollout.n=4 "
         "algorithm.use_kl_in_reward=True", "a token has the KL of the whole reply there"),
        (f"{VERL} algorithm.adv_estimator=gpg actor_rollout_ref.rollout.n=4", "those with a reward other than 0 there"),
        (f"{VERL} actor_rollout_ref.actor.policy_loss.loss_mode=cispo actor_rollout_ref.rollout.n=4",
         "a weight is at least 0.8 there too"),
        ("python -m verl.trainer.sft_trainer data.truncation=left", "data.truncation = left: rows keep their end there"),
        (f"{VERL} actor_rollout_ref.rollout.multi_turn.enable=True", "of all turns and results of tools together there"),
        (f"{VERL} actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.format=hermes",
         "multi_turn.format = hermes: tools and the texts between turns are of the environment here"),
        (f"{VERL} actor_rollout_ref.rollout.multi_turn.enable=True "
         "actor_rollout_ref.rollout.multi_turn.max_tool_response_length=512", "max_tool_response_length = 512: tools"),
        (f"{VERL_SFT} optim.lr_scheduler_type=cosine trainer.total_training_steps=300",
         "total_training_steps = 300: the learning rate falls over these steps there, over the 32 of the run here"),
        (f"{PPO} --algo.advantage.is_correction_level token", "is_correction_level = token: no engine is named"),
        (f"{PPO} --max_len 512", "data.max_len = 512: a reply has at most as many tokens less those of its prompt"),
        (f"{PPO} --top_p 0.9", "top_p = 0.9: training samples from the model's own"),
        (f"{PPO} --rollout_batch_size 100 --train_batch_size 96", "of 100 rollouts the last 4 are no update of their own"),
        (f"{PPO} --advantage_estimator group_norm --n_samples_per_prompt 4", "KL of a whole reply is in its reward here"),
        (f"{PPO} --advantage_estimator reinforce --freezing_actor_steps 9", "the policy learns from the first step here"),
        (f"{PPO} --no_advantage_std_norm", "the mean of advantages over all tokens is not subtracted here"),
        (f"{PPO} --reward_clip_range -1 1", "reward.clip_range [-1, 1]: rewards are not clipped here"),
        (f"{PPO} --normalize_reward", "reward.normalize_enable = true: a reward is used as it is"),
        (f"{PPO} --reward.stop_properly_penalty_coef 0.0", "stop_properly_penalty_coef = 0.0: no counterpart"),
        (f"{PPO} --input_template 'Q: {{}}\\nA:'", "as two characters"),
        (f"{PPO} --prompt_data a.jsonl,b.jsonl --prompt_data_probs 0.7,0.3", "every file was read once"),
        (f"{DPO} --ref_pretrain /other", "ref.model_name_or_path = /other: the reference is the starting model here"),
        (f"{DPO} --dpo.label_smoothing 0.1", "dpo.label_smoothing = 0.1: OpenRLHF has no option of this name"),
        (f"{PPO} --prompt_max_len 64", "data.prompt_max_len = 64: longer prompts are cut there"),
        (f"{SFT} --pretrain_mode --input_key t", "a text ends with the end-of-sequence token here, not there"),
        (f"{SFT} --lr_scheduler cosine_with_min_lr", "the cosine ends at 0 here"),
    ],
)  # fmt: skip
def test_the_command_prints_what_changes_what_is_learned(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, _ = imported(tmp_path, text)
    assert main(["import", str(tmp_path / "run.sh"), "--rows", "2048", "--out", str(tmp_path / "a.toml")]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("check ")]
    assert any(told in line for line in printed) and told in draft.toml("run.sh", "a.toml")


@pytest.mark.parametrize(
    "text",
    [
        f"{VERL} actor_rollout_ref.rollout.val_kwargs.top_p=0.7 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 "
        "trainer.resume_mode=auto actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 trainer.nnodes=2 "
        "actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True data.shuffle=True "
        "actor_rollout_ref.actor.checkpoint.save_contents=[model] ray_kwargs.ray_init.num_cpus=4 model_engine=dp "
        "actor_rollout_ref.actor.tau_pos=1.0 actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.1 "
        "actor_rollout_ref.rollout.calculate_log_probs=True $@ > log 2>&1",
        f"{PPO} --generate_max_len 9 --lr_scheduler constant --vllm_sync_backend nccl --colocate_all_models "
        "--packing_samples --ckpt_path x "
        "--micro_train_batch_size 2 --adam_offload --zero_stage 3 --enable_ema --logging_steps 1 --save_hf_ckpt 2>&1 | tee",
    ],
)  # fmt: skip
def test_memory_speed_logs_and_evaluations_are_nothing_to_check(text: str, tmp_path: Path) -> None:
    assert imported(tmp_path, text)[0].run.notes == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"{DPO} --ipo --label_smoothing 0.1", {"algorithm": "ipo", "length_normalised": False, "smoothing": None}),
        (f"{DPO} --dpo.label_smoothing 0.1 --dpo.beta 0.3", {"algorithm": "dpo", "smoothing": None, "beta": 0.1}),
        (f"{VERL} actor_rollout_ref.actor.megatron.dtype=float32", {"precision": "float32"}),
        (f"{DPO} --label_smoothing 0.1", {"algorithm": "cdpo", "smoothing": 0.1}),
        (f"{DPO} --nll_loss_coef 0.2", {"algorithm": "dpo", "imitation": 0.2, "imitation_per": "responses"}),
        (f"{DPO} --dataset a.jsonl,b.jsonl --dataset_probs 0.7,0.3",
         {"mixture": {"a": {"tasks": "a.jsonl", "weight": 0.7}, "b": {"tasks": "b.jsonl", "weight": 0.3}}}),
        (f"{SFT} --pretrain_mode --input_key body", {"fields": {"text": "body"}, "mask": None}),
        (f"{SFT} --apply_chat_template --input_key turns", {"fields": {"messages": "turns"}, "mask": "last"}),
        (f"{SFT} --apply_chat_template --input_key messages --multiturn", {"fields": None, "mask": "assistant"}),
        (f"{SFT} --input_key q --output_key a --input_template $'Q: {{}}\\nA: '",
         {"fields": {"prompt": "q", "response": "a"}, "prompt_template": "Q: {q}\nA: "}),
        (f"{PPO} --prompt_max_len 64", {"max_tokens": 1024}),
        (f"{PPO} --generate_max_len 64", {"max_tokens": 64}),
        (f"{DPO.replace('train_dpo', 'train_rm')} --margin_loss", {"row_margins": 1.0}),
        (f"{DPO.replace('train_dpo', 'train_rm')} --margin_loss --loss logexp", {"row_margins": 0.0}),
        (f"{PPO} --async_train --async_queue_size 3", {"async_steps": 3}),
        (f"{PPO} --async_train", {"async_steps": 1}),
        (f"{PPO} --async_queue_size 3", {"async_steps": None}),
        (f"{PPO} --advantage_estimator reinforce_baseline --gamma 0.9 --n_samples_per_prompt 4",
         {"algorithm": "reinforce++-baseline", "gamma": 1.0}),
        (f"{PPO} --advantage_estimator reinforce --gamma 0.9", {"algorithm": "reinforce++", "gamma": 0.9}),
        (f"{PPO} --advantage_estimator dr_grpo --n_samples_per_prompt 4",
         {"algorithm": "reinforce++-baseline", "whiten": False, "baseline": "group", "scale": None, "kl_where": "reward"}),
        (f"{PPO} --advantage_estimator dr_grpo --n_samples_per_prompt 4 --use_kl_loss",
         {"algorithm": "grpo", "scale": "none", "whiten": None, "kl_where": "loss"}),
        (f"{PPO} --algo.advantage.estimator flash_reinforce --init_kl_coef 0", {"baseline": "batch", "scale": "none"}),
        (f"{PPO} --freezing_actor_steps 9 --num_episodes 20", {"algorithm": "ppo", "critic_warmup": 10}),
        (f"{PPO} --freezing_actor_steps 0", {"critic_warmup": 1}),
        (f"{PPO}", {"critic_warmup": None, "critic_model": None, "prompt_template": None}),
        (f"{PPO} --reward_pretrain /r", {"critic_model": None}),
        (f"{PPO.replace('--remote_rm_url r.py', '')} --reward_pretrain /r", {"critic_model": "/r"}),
        (f"{PPO.replace('--remote_rm_url r.py', '')} --reward_pretrain /r --critic_pretrain /c", {"critic_model": "/c"}),
        (f"{PPO.replace('--remote_rm_url r.py', '')} --reward_pretrain /r --advantage_estimator reinforce",
         {"critic_model": None}),
        (f"{VERL.replace('=grpo', '=gae')} trainer.critic_warmup=10 trainer.total_epochs=15", {"critic_warmup": 9}),
        (f"{VERL.replace('=grpo', '=gae')} trainer.critic_warmup=1", {"critic_warmup": None}),
        (f"{SFT} --input_key q --output_key a", {"prompt_template": "User: {q}\nAssistant: "}),
        (f"{SFT} --input_key q --output_key a --input_template none", {"prompt_template": None}),
        (f"{SFT} --input_key q --output_key a --apply_chat_template", {"prompt_template": None}),
        (f"{SFT} --pretrain_mode --input_key t", {"prompt_template": None}),
        (DPO, {"prompt_template": None}),
        (f"{PPO} --policy_loss_type gspo --vllm_num_engines 1 --enable_vllm_is_correction --advantage_estimator rloo "
         "--n_samples_per_prompt 4 --init_kl_coef 0", {"old_policy": "sampler", "correction": None}),
        *((f"{VERL} data.train_batch_size=128 {given}", {"steps": steps}) for given, steps in (
            ("trainer.total_epochs=2 trainer.total_training_steps=300", 32),
            ("trainer.total_epochs=2 trainer.total_training_steps=20", 20), ("trainer.total_training_steps=500", 480))),
        (f"{VERL_SFT} data.train_batch_size=128 trainer.total_training_steps=300", {"steps": 64, "epochs": None}),
        (f"{VERL_SFT} data.train_batch_size=128 trainer.total_training_steps=300 trainer.total_epochs=20", {"steps": 300}),
        (f"{VERL_SFT} engine.model_dtype=bf16", {"weights": "bfloat16"}),
        (f"{VERL_SFT} engine.model_dtype=bf16 model.lora_rank=8", {"weights": None, "frozen_weights": "bfloat16"}),
        (f"{VERL} data.train_max_samples=512 data.train_batch_size=256 trainer.total_epochs=3", {"limit": 512, "steps": 6}),
        (f"{VERL} actor_rollout_ref.model.lora.rank=16 '+actor_rollout_ref.model.lora.target_modules=[linear_qkv]'",
         {"lora": 16, "lora_alpha": 32.0, "lora_targets": ["q_proj", "k_proj", "v_proj"]}),
        (f"{VERL} algorithm.adv_estimator=reinforce_plus_plus_baseline actor_rollout_ref.rollout.n=4 algorithm.gamma=0.9",
         {"algorithm": "reinforce++-baseline", "gamma": 1.0}),
        (f"{VERL} algorithm.use_kl_in_reward=True algorithm.kl_penalty=k3+", {"kl_where": "reward", "kl_estimator": "k3"}),
        (f"{VERL} actor_rollout_ref.actor.fsdp_config.model_dtype=bf16", {"weights": "bfloat16"}),
        (f"{VERL} actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16 actor_rollout_ref.model.lora_rank=8",
         {"weights": None, "frozen_weights": "bfloat16"}),
        (f"{VERL} actor_rollout_ref.actor.optim.lr_decay_style=cosine", {"schedule": "cosine"}),
        (f"{VERL} '+data.apply_chat_template_kwargs={{enable_thinking:False,effort:low}}'",
         {"chat_template_kwargs": {"enable_thinking": False, "effort": "low"}}),
        (f"{VERL} actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov",
         {"algorithm": "kl-cov", "settings": {"covariance.coefficient": 0.1}}),
        ("python -m verl.trainer.main_ppo data.train_files= actor_rollout_ref.model.path=''",
         {"model": "MODEL", "tasks": "rows.jsonl"}),
        ("torchrun -m verl.trainer.sft_trainer engine=megatron optim=megatron data.enable_thinking_default=False "
         "trainer.save_freq=after_each_epoch",
         {"optimizer": None, "chat_template_kwargs": {"enable_thinking": False}, "keep": 1_000_000, "save_every": None}),
    ],
)  # fmt: skip
def test_lines_do_what_the_original_does(text: str, lines: dict[str, Any], tmp_path: Path) -> None:
    draft, table = imported(tmp_path, text)
    assert {name: table.get(name) for name in lines} == lines
    assert not any("refuses in this recipe" in note for note in draft.run.notes)


@pytest.mark.parametrize("text", [VERL, VERL_SFT])
def test_a_run_that_may_end_after_its_passes_is_to_be_checked_where_the_rows_are_not_counted(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(f"{text} trainer.total_training_steps=300")
    draft = recipe_for(str(tmp_path / "run.sh"), None, None, None)
    assert draft.lines["steps"][0] == 300
    assert any("total_epochs, not given" in note and "import with --rows ROWS" in note for note in draft.run.notes)


def test_a_setting_of_a_reward_function_that_env_cannot_name_is_left_to_the_reader(tmp_path: Path) -> None:
    before = "+custom_reward_function.reward_kwargs"
    settings = {"ok": "True", "rate": "0.5", "mode": "strict", "pattern": '"x,y=z"', "parts": "[1,2]", "deep.a": "1",
                "digits": "'7'", "of": "$OF"}  # fmt: skip
    words = " ".join(f"""'{before}.{name}={value.replace("'", '"')}'""" for name, value in settings.items())
    draft, table = imported(tmp_path, f"{VERL} custom_reward_function.path=s.py custom_reward_function.name=f {words}")
    assert table["env"] == "verl:s.py:f,ok=true,rate=0.5,mode=strict"
    first = " ".join(draft.before_the_first_run())
    assert all(f"reward_kwargs.{name} = " in first for name in ("pattern", "parts", "deep.a", "digits"))
    assert "reward_kwargs.of: only the script computes" in " ".join(draft.run.notes)


@pytest.mark.parametrize(
    ("given", "told"),
    [("--multirun data.prompt_key=a,b", "is a sweep of several runs"), ("trainer.val_only=True", "posttrain eval")],
)
def test_what_is_not_one_training_run_is_refused(given: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        imported(tmp_path, f"{VERL} {given}")


def test_files_of_ones_own_are_named_before_the_first_run(tmp_path: Path) -> None:
    draft, table = imported(tmp_path, f"{PPO} --lr_scheduler constant")
    assert table["env"] == "reward.py:reward" and "reward.py must be here" in " ".join(draft.before_the_first_run())
    (tmp_path / "run.sh").write_text(PPO)
    unknown = recipe_for(str(tmp_path / "run.sh"), None, None, None).before_the_first_run()
    assert any(line.startswith("set steps = 1 x ROWS / 1024 prompts") for line in unknown)
    draft, _ = imported(tmp_path, f"{VERL} data.train_batch_size=$N")
    assert any(line.startswith("set data.train_batch_size ($N)") for line in draft.before_the_first_run())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("M=z\nif [ $1 ]; then\n  M=a\nelse\n  M=b\nfi\nrun $M x=$M", ["run", "$M", "x=$M"]),
        ('B=fsdp\nif [[ $B == "megatron" ]]; then\n M=a\n run no\nelse\n M=b\nfi\nrun x=$M', ["run", "x=b"]),
        ('B=3\nif [ "$B" -lt 2 ]; then M=a; elif [ $B = 3 ]; then M=b; else M=c; fi\nrun x=$M', ["run", "x=b"]),
        ("if [ a = a ] && [ $Q ]; then M=1; fi\nrun x=$M", ["run", "x=$M"]),
        ('B=""\n[ -z "$B" ] && M=a\n[ -n "$B" ] && M=b\n[ -n "$B" ] || N=c\nrun $M $N', ["run", "a", "c"]),
        ("M=z\n[ -z $X ] && M=a\nrun x=$M", ["run", "x=$M"]),
        ("export M=z && run x=$M", ["run", "x=z"]),
        ("case $1 in\n a) M=1;;\n b)\n M=2 ;;\nesac\nrun x=$M", ["run", "x=$M"]),
        ("for s in 1 2; do\n N=4\n run n=$N\ndone", ["run", "n=4"]),
        (": ${X:=5}\nrun x=$X y=${Y:-$((X * 2))}", ["run", "x=5", "y=10"]),
        ("run a='1 > 2' --b c > log 2>&1 &", ["run", "a=1 > 2", "--b", "c"]),
        ("run a &> log", ["run", "a"]),
        ('R="$(pwd)"\nrun a=$R/b.py c=${PWD}/d', ["run", "a=./b.py", "c=./d"]),
        ("bash -c 'run a=1'", ["run", "a=1"]),
        ('C="run a=1"\neval "$C b=2"', ["run", "a=1", "b=2"]),
        ("# comment \\\nrun a=1", ["run", "a=1"]),
        (r"run $'a\n\'b'", ["run", "a\n'b"]),
    ],
)
def test_a_shell_script_says_what_it_runs_or_keeps_a_variable(script: str, words: list[str]) -> None:
    assert [found for found in commands(script) if found[0] == "run"] == [words]


def test_options_of_a_branch_are_left_out_and_named(tmp_path: Path) -> None:
    text = f'A=(data.train_batch_size=64)\nif [ "$1" ]; then\n  A+=(algorithm.gamma=0.9)\nfi\n{VERL} "${{A[@]}}" "$@"\n'
    draft, table = imported(tmp_path, text)
    assert table["prompts"] == 64
    plain = text.replace("A=(", 'A="').replace("=64)", '=64"').replace("A+=(", 'A="$A ').replace("=0.9)", '=0.9"')
    assert imported(tmp_path, plain.replace('"${A[@]}"', "$A"))[0].run.notes == draft.run.notes
    assert any("of a branch of the script, A: algorithm.gamma=0.9" in note for note in draft.run.notes)
