"""The line of a run's options has those that were chosen, in the words of the command line."""

from typing import Any

from posttrain.config.resolve import as_dict, chosen_options
from posttrain.config.training import RL
from posttrain.runs.run_options import changed


def test_chosen_options_are_named_as_the_command_line_names_them() -> None:
    config = RL(
        tasks="a.jsonl", fields={"prompt": "question"}, eval_tasks=("x=b.jsonl", "y=c.jsonl"), resume=True,
        deterministic=False, settings={"advantage.eps": 0.0001},
        mixture={"sums": {"tasks": "b.jsonl", "weight": 2.0, "fields": {"prompt": "query"}}},
    )  # fmt: skip
    assert set(chosen_options(config)) == {
        "tasks a.jsonl", "fields.prompt question", "eval_tasks x=b.jsonl y=c.jsonl", "resume", "deterministic False",
        "advantage.eps 0.0001", "mixture.sums.tasks b.jsonl", "mixture.sums.weight 2.0",
        "mixture.sums.fields.prompt query",
    }  # fmt: skip


def test_an_environment_that_follows_from_a_service_is_no_option_that_was_chosen() -> None:
    common: dict[str, Any] = {"tasks": "a.jsonl", "model": "m"}
    for config in (
        RL(**common, reward_model=("r",)),
        RL(**common, judge=("j.toml",)),
        RL(**common, reward_model=("r",), step_delimiter="line"),
    ):
        assert config.env and not [option for option in chosen_options(config) if option.startswith("env ")]
        about = {"verb": "rl", "config": as_dict(config)}
        assert "env" not in changed(about) and RL(**changed(about)).env == config.env
    both = RL(**common, env="my.py:both", reward_model=("r",))
    assert "env my.py:both" in chosen_options(both) and changed({"verb": "rl", "config": as_dict(both)})["env"]
