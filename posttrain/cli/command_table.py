"""The commands of posttrain: the verbs of `config/verbs.py`, and the commands without a configuration of rows.

Nothing heavy is imported here, so that `posttrain` and `posttrain --help` answer at once.
"""

from __future__ import annotations

from typing import NamedTuple

from posttrain.config.verbs import VERBS


class Command(NamedTuple):
    """A command, as shown on the front page of the help and on its own page."""

    name: str
    function: str  # module:function in posttrain.cli
    heading: str
    help: str
    example: str  # arguments of an example, without the command's name
    options: str = ""  # module:class of its options


def _verbs() -> list[Command]:
    """Return the verbs as commands: those that train share one function."""
    return [
        Command(
            name,
            f"training_commands:{name}" if verb.learns else f"commands:{verb.python or name}",
            verb.heading,
            verb.help,
            verb.example,
            verb.config,
        )
        for name, verb in VERBS.items()
    ]


HEADINGS = {
    "start": "Start",
    "train": "Train",
    "evaluate": "Evaluate and label",
    "look": "Look into runs",
    "serve": "Serve and convert",
    "scale": "Scale and research",
}
_ALL = (
    Command("demo", "commands:demo", "start", "Watch a model learn: a tiny one, or a real one (--real).", "--real"),
    Command("init", "init_command:init", "start", "Write the files of a first run: rows, reward, recipe.", "first"),
    Command("doctor", "doctor_command:doctor", "start", "Show what this machine has, and what works here.", ""),
    Command(
        "import",
        "import_command:import_recipe",
        "start",
        "Turn a run of TRL, verl or OpenRLHF into a recipe.",
        "train.sh --out recipe.toml",
    ),
    *_verbs(),
    Command(
        "algorithms",
        "inspect_commands:algorithms",
        "start",
        "List the algorithms, or show one: formula, paper, settings.",
        "grpo",
    ),
    Command(
        "data", "data_command:data", "start", "Show rows as a model reads them: lengths, repetitions.", "rows.jsonl"
    ),
    Command("chat", "commands:chat", "evaluate", "Talk to a model.", "runs/rl", "posttrain.config.inference:Chat"),
    Command(
        "show", "show_command:show", "look", "Show a run in a page, runs in a table, or two side by side.", "runs/rl"
    ),
    Command("view", "inspect_commands:view", "look", "Browse runs: curves, rollouts, groups, every token.", "runs/rl"),
    Command(
        "rollouts",
        "inspect_commands:rollouts",
        "look",
        "Print the rollouts of a step, turn by turn.",
        "runs/rl --order worst",
    ),
    Command(
        "query",
        "inspect_commands:query",
        "look",
        "Query all rollouts of a run with SQL.",
        'runs/rl "select fate, count(*) from rollouts group by fate"',
    ),
    Command("audit", "inspect_commands:audit", "look", "Look for reward hacking in a run.", "runs/rl"),
    Command("merge", "commands:merge", "serve", "Merge a LoRA adapter into its base model.", "runs/lora --out merged"),
    Command(
        "push",
        "push_command:push",
        "serve",
        "Upload a checkpoint to the Hugging Face hub, with a model card.",
        "runs/rl org/name --dry-run",
    ),
    Command(
        "serve-policy",
        "commands:serve_policy",
        "serve",
        "Serve a model over HTTP: token ids, OpenAI's API, Anthropic's API.",
        "--model runs/rl",
        "posttrain.config.inference:ServePolicy",
    ),
    Command(
        "retriever build",
        "commands:retriever_build",
        "serve",
        "Build an index of passages: by words (BM25) or by vectors.",
        "--passages passages.jsonl --out runs/index",
        "posttrain.config.inference:RetrieverBuild",
    ),
    Command(
        "retriever serve",
        "commands:retriever_serve",
        "serve",
        "Serve an index over HTTP, with the protocol of Search-R1.",
        "runs/index",
        "posttrain.config.inference:RetrieverServe",
    ),
    Command(
        "plan",
        "commands:plan",
        "scale",
        "Predict the throughput of N GPUs from a pilot run.",
        "runs/pilot --gpus 8",
        "posttrain.config.scale:Plan",
    ),
    Command(
        "memory",
        "commands:memory",
        "scale",
        "Estimate the GPU memory of a training command.",
        "--gpu-memory 80 -- rl --model FOLDER --lora 16 ...",
        "posttrain.config.scale:Memory",
    ),
    Command(
        "launch",
        "commands:launch",
        "scale",
        "Print an sbatch script for a posttrain command.",
        "--slurm --nodes 2 --gpus-per-node 8 -- rl --tasks ... > job.sbatch",
        "posttrain.config.scale:Launch",
    ),
    Command(
        "reproduce",
        "inspect_commands:reproduce",
        "scale",
        "Test what a paper claims in a small experiment.",
        "clip-higher",
    ),
)
COMMANDS = tuple(command for heading in HEADINGS for command in _ALL if command.heading == heading)
FIRST = ("sft", "rl", "prefer", "eval")
"""The commands of the front page."""


def is_heading(words: list[str]) -> bool:
    """Return whether these words are only the first word of commands with two words, such as retriever."""
    return len(words) == 1 and any(command.name.startswith(f"{words[0]} ") for command in COMMANDS)


def command_of(words: list[str]) -> Command | None:
    """Return the command at the start of the words, or None."""
    return next((c for c in COMMANDS if words[: c.name.count(" ") + 1] == c.name.split()), None)
