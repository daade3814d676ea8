"""Every verb on a second device: nothing stays on the processor, and results are those there."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from items_place import furnish
from reward_rows import GRADED, LABELLED
from second_device import NAME, second_device
from sums import PAIRS, SUMS, nearness

import posttrain
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.preference_table import PREFERENCES
from posttrain.engines.search.tree_search import SEARCHES
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_reading import read_metrics

second_device()
LETTERS = ["0123456789+-*/= .abcdefghijklmnopqrstuvwxyz<>?"]
EVERY: dict[str, Any] = {"threads": 1, "quiet": True, "lr": 1e-2, "steps": 1, "tokens_per_microbatch": 64}
PASSES: dict[str, Any] = {**EVERY, "rows": 4, "model": "start"}
SAMPLED: dict[str, Any] = {
    **EVERY, "prompts": 2, "group": 4, "max_tokens": 4, "env_workers": 0, "compiled": False, "model": "start"
}  # fmt: skip
RL: dict[str, Any] = {**SAMPLED, "env": nearness}
STEPS: dict[str, Any] = {**SAMPLED, "reward_model": ("reward",), "step_delimiter": "e", "max_tokens": 12}
ASKED: dict[str, Any] = {"threads": 1, "env_workers": 0, "max_tokens": 12, "model": "start"}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder: policies "start" and "other", a reward model, a mixture of experts."""
    folder = tmp_path_factory.mktemp("place")
    tokenizer = Tokenizer.train(LETTERS, 64, "characters")
    furnish(folder, tokenizer)
    for kind in ("qwen3_moe", "gpt2", "gemma2", "gpt_oss", "qwen3_5_text"):
        # torch unties weights that move to a device of another kind of tensor, as this one's are
        apart = {} if kind == "gpt2" else {"tie_word_embeddings": False}
        tokenizer.save(tiny_models.make(kind, folder / kind, vocab_size=tokenizer.vocab_size, **apart))
    texts = [{"text": "one two"}, {"prompt": "1+1=", "response": "2"}]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def trained(verb: str, given: Any, out: str, **options: Any) -> list[dict[str, Any]]:
    """Return the metrics of a run."""
    getattr(posttrain, verb)(given, out=out, overwrite=True, **options)
    return read_metrics(Path(out))


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert mine[name] == (pytest.approx(value, rel=2e-3, abs=1e-4)), name


DISTILLED: dict[str, Any] = {**SAMPLED, "teacher": "other"}
RUNS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "dpo": ("prefer", PAIRS, {**PASSES, "algorithm": "dpo"}),
    "a reference that moves": ("prefer", PAIRS, {**PASSES, "algorithm": "tr-dpo", "steps": 2}),
    "labels": ("prefer", PAIRS, {**PASSES, "algorithm": "kto", "eval_every": 1}),
    "adapters": ("prefer", PAIRS, {**PASSES, "lora": 2, "forget": "texts.jsonl", "eval_every": 1}),
    "a reward model": ("reward_model", PAIRS, {**PASSES, "held_out": 0.2, "eval_every": 1}),
    "a mean of scores": ("reward_model", PAIRS, {**PASSES, "pooling": "mean"}),
    "a process reward model": ("reward_model", LABELLED, {**PASSES, "algorithm": "outcome"}),
    "grades": ("reward_model", GRADED, {**PASSES, "algorithm": "regression"}),
    "a teacher": ("distill", SUMS, {**DISTILLED, "algorithm": "distill-reverse-kl"}),
    "a teacher and adapters": ("distill", SUMS, {**DISTILLED, "algorithm": "distill-jsd", "lora": 2}),
    "two teachers": ("distill", [{**row, "teacher": "ab"[n % 2]} for n, row in enumerate(SUMS)],
                     {**SAMPLED, "teachers": {"a": "other", "b": "start"}}),
    "a critic": ("rl", SUMS, {**RL, "algorithm": "ppo", "steps": 2}),
    "a critic on the policy's backbone": ("rl", SUMS, {**RL, "algorithm": "ppo", "critic": "shared"}),
    "a critic of actions": ("rl", SUMS, {**RL, "algorithm": "sac", "critic_warmup": 0}),
    "two critics of states": ("rl", SUMS, {**RL, "algorithm": "sac-v", "critic_warmup": 0, "lora": 2}),
    "a trust region": ("rl", SUMS, {**RL, "algorithm": "trpo"}),
    "weights from gradients": ("rl", SUMS, {**RL, "settings": {"advantage.weight": "gradient"}}),
    "rewards of steps": ("rl", SUMS, {**STEPS, "algorithm": "grpo-process"}),
    "rewards of steps and a critic": ("rl", SUMS, {**STEPS, "algorithm": "ppo"}),
    "rollouts of older weights": ("rl", SUMS, {**RL, "async_steps": 1, "steps": 2}),
    "packed weights": ("sft", SUMS, {**PASSES, "lora": 2, "quantize": "nf4"}),
    "experts": ("rl", SUMS, {**RL, "model": "qwen3_moe", "routing_replay": True}),
    "losses of routers": ("sft", SUMS, {**PASSES, "model": "qwen3_moe", "router_balance": 0.1, "router_z": 0.1}),
    "windows and soft caps": ("sft", SUMS, {**PASSES, "model": "gemma2"}),
    "windows and sinks": ("sft", SUMS, {**PASSES, "model": "gpt_oss"}),
    "linear attention": ("rl", SUMS, {**RL, "model": "qwen3_5_text"}),
    "a critic of transformers": ("rl", SUMS, {**RL, "model": "gpt2", "algorithm": "ppo", "lr": 1e-4}),
    "a reward model of transformers": ("reward_model", PAIRS, {**PASSES, "model": "gpt2"}),
}  # fmt: skip

SHORT = ("dpo", "a reference that moves", "a reward model", "a process reward model", "a teacher", "a critic",
         "a critic of actions", "rewards of steps", "packed weights", "experts")  # fmt: skip
"""Runs of `make test`; the others repeat them for other parts."""


def long_but(names: Iterable[str], short: Container[str]) -> list[Any]:
    """Return the names as parameters of a test, those not in `short` marked long."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", long_but(RUNS, SHORT))
def test_a_run_has_the_metrics_of_the_processor(name: str) -> None:
    verb, rows, options = RUNS[name]
    same(trained(verb, rows, "second", **options, device=NAME), trained(verb, rows, "cpu", **options, device="cpu"))


@pytest.mark.parametrize(
    "name",
    long_but(
        ("a critic of actions", "dpo", "a reward model", "a teacher", "a critic", "packed weights"),
        ["a critic of actions"],
    ),
)
def test_products_in_bfloat16_find_their_weights(name: str) -> None:
    """Only that nothing mixes devices, since a GPU's products round otherwise than a processor's."""
    verb, rows, options = RUNS[name]
    [*_, last] = trained(verb, rows, "narrow", **options, device=NAME, precision="bfloat16")
    assert last["loss"] == last["loss"] and last["grad_norm"] > 0


def test_an_evaluation_has_the_rewards_of_the_processor() -> None:
    how: dict[str, Any] = {
        **ASKED,
        "samples": 2,
        "against": ("other",),
        "success": 1.0,
        "scorer": "reward-model=reward",
    }
    ours, theirs = (posttrain.evaluate(SUMS[:6], nearness, **how, device=device) for device in (NAME, "cpu"))
    assert ours.rewards == theirs.rewards and len(ours.rewards) == 6
    against = [[rollout.reward for one in side.against for rollout in one.rollouts] for side in (ours, theirs)]
    assert against[0] == against[1] and len(against[0]) == 12


@pytest.mark.parametrize("search", long_but(("", *SEARCHES), [""]))
def test_samples_and_their_labels_are_those_of_the_processor(search: str) -> None:
    how = {**ASKED, "reward_model": ("reward",), "samples": 1 if search else 3, "quiet": True, "overwrite": True}
    if search:
        how |= {"search": (search,), "step_delimiter": "e", "search_width": 2, "search_proposals": 2}
    found = []
    for device in (NAME, "cpu"):
        posttrain.sample(SUMS[:3], out="items.jsonl", **how, device=device)
        by = "reward-model=reward"
        posttrain.label("items.jsonl", by, out="labels.jsonl", device=device, overwrite=True, env_workers=0)
        found.append([json.loads(line) for line in Path("labels.jsonl").read_text().splitlines()])
    for ours, theirs in zip(*found, strict=True):
        assert ours["responses"] == theirs["responses"] and ours["scores"] == pytest.approx(theirs["scores"], abs=1e-4)


WARM, TEXTS = {"critic_warmup": 0}, {"ptx": "texts.jsonl"}
NEEDED: dict[str, dict[str, Any]] = {
    "sac": WARM, "sac-v": WARM, "vapo": {**WARM, "success": 1.0}, "pass-at-k": {"success": 1.0}, "chord": TEXTS,
    "ppo-ptx": TEXTS,
}  # fmt: skip
"""Algorithm -> options that it requires."""


@pytest.mark.long
@pytest.mark.parametrize("name", [*TABLE, *PREFERENCES])
def test_every_algorithm_makes_a_step(name: str) -> None:
    if name in PREFERENCES:
        verb, rows, options = "prefer", PAIRS, PASSES
    else:
        verb, rows = "distill" if name.startswith("distill") else "rl", SUMS
        options = DISTILLED if verb == "distill" else RL
    [*_, last] = trained(verb, rows, "out", **{**options, **NEEDED.get(name, {})}, algorithm=name, device=NAME)
    assert last["step"] == 1
