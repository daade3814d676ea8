"""Table of commands to start with, by the data and rewards that a user has.

`posttrain algorithms` and the guide to algorithms show this table. `best_for` of an algorithm is more exact.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """Command to start with (without "posttrain") for what a user has, and why, in Markdown."""

    have: str
    command: str
    why: str

    @property
    def markdown(self) -> str:
        return f"| {self.have} | `{self.command}` | {self.why} |"


FIRST = (
    Choice(
        "a reward that is right or wrong",
        "rl --algorithm grpo --kl 0",
        "no critic and no reference model: only the policy is in memory",
    ),
    Choice(
        "such a reward, long replies",
        "rl --algorithm dapo",
        "a mean over tokens, clip-higher, and a penalty before replies are cut off",
    ),
    Choice(
        "a model that is sometimes right",
        "sample; label --best FILE; sft",
        "imitates the best of several replies: the [safest](../results/grid.md) with every source of the reward, but it "
        "only strengthens what the model already samples",
    ),
    Choice(
        "a reward model",
        "rl --algorithm ppo",
        "the KL in the reward keeps the policy near its start; `rloo` does so without a critic",
    ),
    Choice(
        "rewards for steps",
        "rl --algorithm grpo-process",
        "a [step's reward](process-rewards.md) reaches its own tokens",
    ),
    Choice("pairs of replies", "prefer --algorithm dpo", "no sampling"),
    Choice("good and bad labels, no pairs", "prefer --algorithm kto", "reads labels of single replies"),
    Choice(
        "pairs, for a reward model",
        "reward-model --algorithm bradley-terry",
        "use `outcome` for labels that are right or wrong",
    ),
    Choice("a stronger model", "distill --algorithm distill-reverse-kl", "a signal at every token"),
    Choice("demonstrations only", "sft", "imitates each token"),
)
"""The rows that the terminal shows."""
FURTHER = (
    Choice(
        "groups that are mostly all right or all wrong",
        "rl --dynamic-sampling 4",
        "replaces groups without signal; [`--curriculum`](curriculum.md) visits such tasks less often",
    ),
    Choice(
        "several updates per step",
        "rl --minibatches 4 --clip-high 0.28",
        "the clip acts only when the policy has moved",
    ),
    Choice(
        "rollouts of much older weights",
        "rl --algorithm vespo --async-steps 4",
        "a soft weight for the whole reply, where a clip would leave nothing",
    ),
    Choice(
        "an entropy that falls too fast",
        "rl --algorithm clip-cov",
        "holds the few tokens that lower it most, as `kl-cov` does",
    ),
    Choice(
        "demonstrations beside the reward",
        "rl --algorithm chord --ptx rows.jsonl",
        "imitates where the policy is uncertain",
    ),
    Choice("a mixture of experts", "rl --algorithm gspo", "one ratio per response instead of one per token"),
    Choice(
        "the same model with a longer prompt",
        "distill",
        "learns what examples in the prompt teach, without them: a column [`teacher_prompt`](distillation.md)",
    ),
    Choice(
        "agents that revisit the same states",
        "rl --algorithm gigpo",
        "also compares turns that began in the same state; [on guessing](../results/agents.md#credit-for-single-guesses) "
        "it did not help",
    ),
    Choice(
        "such agents, in states that one observation does not determine",
        "rl --algorithm hgpo",
        "turns with a longer shared history weigh more; no gain there either",
    ),
)
"""The rows that only the guide shows."""


def choice_table() -> str:
    """Return all rows as Markdown."""
    return "\n".join(
        ["| you have | start with | because |", "|---|---|---|", *(c.markdown for c in (*FIRST, *FURTHER))]
    )
