"""The commands of posttrain: where each is, what it does in a sentence, and how it is called.

Nothing is imported here, so that `posttrain` and `posttrain --help` answer at once.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A command, as the front page and its own page of help show it."""

    name: str
    function: str  # module:function in posttrain.cli
    heading: str
    help: str
    example: str  # what follows its name


COMMANDS = (
    Command("init", "init_command:init", "start", "Write the files of a first run: rows, reward, recipe.", "first"),
    Command(
        "check",
        "commands:check",
        "start",
        "Try a reward or an environment on sample replies.",
        "--tasks rows.jsonl --env my.py:reward",
    ),
    Command(
        "algorithms",
        "inspect_commands:algorithms",
        "start",
        "List the algorithms, or show one: formula, paper, settings.",
        "grpo",
    ),
    Command(
        "sft",
        "commands:sft",
        "train",
        "Supervised fine-tuning on responses, conversations or recorded episodes.",
        "--tasks rows.jsonl --model MODEL --out runs/sft",
    ),
    Command(
        "rl",
        "commands:rl",
        "train",
        "Reinforcement learning from a reward function, a verifier or an environment.",
        "--tasks rows.jsonl --env my.py:reward --model runs/sft",
    ),
    Command(
        "prefer",
        "commands:prefer",
        "train",
        "Learn from preferences without sampling (DPO and its family).",
        "--tasks pairs.jsonl --model runs/sft --out runs/prefer",
    ),
    Command(
        "reward-model",
        "commands:reward_model",
        "train",
        "Train a reward model from pairs, rankings, labels or scores.",
        "--tasks pairs.jsonl --model runs/sft --out runs/reward-model",
    ),
    Command(
        "distill",
        "commands:distill",
        "train",
        "On-policy distillation: a teacher scores what a student says.",
        "--tasks rows.jsonl --model runs/sft --teacher MODEL",
    ),
    Command(
        "eval",
        "commands:evaluate",
        "evaluate",
        "Mean reward, accuracy and pass@k on a set of tasks; --against compares two models.",
        "--tasks test.jsonl --env my.py:reward --model runs/rl --against runs/sft",
    ),
    Command(
        "sample",
        "commands:sample",
        "evaluate",
        "Sample replies to label or to learn from.",
        "--tasks rows.jsonl --model runs/sft --out items.jsonl",
    ),
    Command(
        "label",
        "commands:label",
        "evaluate",
        "Label replies: by a reward model, judge, function or person.",
        "--items items.jsonl --with my.py:reward --pairs pairs.jsonl",
    ),
    Command("chat", "commands:chat", "evaluate", "Talk to a model.", "runs/rl"),
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
        "serve-policy",
        "commands:serve_policy",
        "serve",
        "Serve a model over HTTP: token ids, OpenAI's chat and completions.",
        "--model runs/rl",
    ),
    Command(
        "engine",
        "commands:serve_engine",
        "serve",
        "Sample for runs on other machines, with their weights.",
        "--model runs/sft --listen 0.0.0.0:7000",
    ),
    Command(
        "retriever build",
        "commands:retriever_build",
        "serve",
        "Build an index of passages: by words (BM25) or by vectors.",
        "--passages passages.jsonl --out runs/index",
    ),
    Command(
        "retriever serve",
        "commands:retriever_serve",
        "serve",
        "Serve an index over HTTP, with the protocol of Search-R1.",
        "runs/index",
    ),
    Command(
        "plan",
        "commands:plan",
        "scale",
        "Predict the throughput of N GPUs from a pilot run.",
        "runs/pilot --gpus 8",
    ),
    Command(
        "launch",
        "commands:launch",
        "scale",
        "Print an sbatch script for a posttrain command.",
        "--slurm --nodes 2 --gpus-per-node 8 -- rl --tasks ... > job.sbatch",
    ),
    Command(
        "reproduce",
        "inspect_commands:reproduce",
        "scale",
        "Test what a paper claims in a small experiment.",
        "clip-higher",
    ),
)
HEADINGS = {
    "start": "Start",
    "train": "Train",
    "evaluate": "Evaluate and label",
    "look": "Look into runs",
    "serve": "Serve and convert",
    "scale": "Scale and research",
}
FIRST = ("sft", "rl", "prefer", "eval")
"""The commands of the front page."""


def is_heading(words: list[str]) -> bool:
    """Whether this is the first word of commands alone, without the second one: retriever."""
    return len(words) == 1 and any(command.name.startswith(f"{words[0]} ") for command in COMMANDS)


def command_of(words: list[str]) -> Command | None:
    """The command that these words begin with."""
    return next((c for c in COMMANDS if words[: c.name.count(" ") + 1] == c.name.split()), None)
