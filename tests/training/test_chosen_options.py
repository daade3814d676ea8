"""The line of a run's options has those that were chosen, in the words of the command line."""

from posttrain.config.resolve import chosen_options
from posttrain.config.training import RL


def test_chosen_options_are_named_as_the_command_line_names_them() -> None:
    config = RL(
        tasks="a.jsonl", fields={"prompt": "question"}, eval_tasks=("x=b.jsonl", "y=c.jsonl"), resume=True,
        deterministic=False, settings={"advantage.eps": 0.0001},
    )  # fmt: skip
    assert set(chosen_options(config)) == {
        "tasks a.jsonl", "fields.prompt question", "eval_tasks x=b.jsonl y=c.jsonl", "resume", "deterministic False",
        "advantage.eps 0.0001",
    }  # fmt: skip
