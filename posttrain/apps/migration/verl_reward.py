"""The reward of a run of verl: its function, its model, the manager that calls them, and groups without signal.

Names are those of version 0.9, below `reward`; those of earlier versions are read as these, as verl itself does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from posttrain.apps.migration.foreign_run import is_known, shown
from posttrain.apps.migration.recipe_draft import RecipeDraft

FUNCTION, MANAGER, BUFFER = (
    "reward.custom_reward_function",
    "reward.reward_manager.name",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
MODEL = "reward.reward_model"
RENAMED: Mapping[str, str] = {
    "custom_reward_function.": f"{FUNCTION}.",
    "reward_model.reward_manager": MANAGER,
    "reward_manager.name": MANAGER,
    "reward_model.overlong_buffer.": f"{BUFFER}.",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.model.path": f"{MODEL}.model_path",
    "reward_model.": f"{MODEL}.",
}
"""Name of versions before 0.9, or its beginning -> the name since; of two that fit, the first one."""
_LIKE_NAIVE = ("naive", "dapo", "batch", "prime")
"""Managers whose reward is the function's score; they differ in how they call it, and dapo adds the overlong penalty."""
_BEFORE_PENALTY = ("acc", "score", "reward")
"""Metrics of filter_groups that are equal in the groups whose rewards are equal before the overlong penalty."""


def rename(draft: RecipeDraft) -> None:
    """Give the options of the reward the names of version 0.9; comments name them as the command does."""
    for name in list(draft.run.options):
        for old, new in RENAMED.items():
            if name.startswith(old) and (old.endswith(".") or name == old):
                now = new + name.removeprefix(old)
                draft.run.options[now] = draft.run.options.pop(name)
                draft.run.names[now] = draft.run.names.pop(name, name)
                break


def reward(draft: RecipeDraft) -> None:
    """Write the reward: a model, a function with its settings, or a hint where verl chooses one by itself."""
    path, name = draft.read(f"{FUNCTION}.path"), draft.read(f"{FUNCTION}.name", "compute_score")
    before = f"{FUNCTION}.reward_kwargs."
    read = {key: draft.read(key) for key in list(draft.run.options) if key.startswith(before)}
    settings = {key.removeprefix(before): value for key, value in read.items() if is_known(draft.run.options[key])}
    enabled, model = draft.read(f"{MODEL}.enable"), draft.read(f"{MODEL}.model_path")
    model = model if enabled and isinstance(model, str) else None
    if model:
        called = draft.run.names.get(f"{MODEL}.model_path", f"{MODEL}.model_path")
        what = "the function asks it" if isinstance(path, str) else "its score is the reward"
        draft.put("reward_model", [draft.fitted("model", model)], f"{called}: {what}")
    if isinstance(path, str):
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
        kept = {key: text for key, text in texts.items() if _fits(key, text, settings[key])}
        told = "".join(f",{key}={text}" for key, text in kept.items())
        draft.put("env", f"verl:{path}:{name}{told}", "custom_reward_function: same function")
        for key in (key for key in settings if key not in kept):
            what = "env cannot name it: make it the default of the function"
            draft.first.append(f"reward_kwargs.{key} = {shown(settings[key])}: {what}")
    elif not model:
        chosen = "verl chooses a function by data_source: copy it to score.py (or verify:math, verify:numeric)"
        draft.put("env", "verl:score.py:compute_score", chosen)
    _tools(draft)
    _manager(draft)
    _overlong(draft)
    _filter_groups(draft)


def _fits(key: str, text: str, value: object) -> bool:
    """Return whether a setting of `env` is read as the value that verl passes to the function."""
    if (
        not key.isidentifier()
        or not is_known(value)
        or not re.fullmatch(r"[^,+*]*|[-+\d.eE]+", text)
        or text != text.strip()
    ):
        return False
    try:
        read = json.loads(text)
    except ValueError:
        read = text
    return type(read) is type(value) and read == value


def _tools(draft: RecipeDraft) -> None:
    """Note that a reward alone has one turn: tools and turns of verl are an environment's here."""
    turns = "actor_rollout_ref.rollout.multi_turn"
    given = [name for name in draft.run.options if name.startswith(f"{turns}.")]
    if not draft.read(f"{turns}.enable"):
        return
    file = draft.run.options.get(f"{turns}.tool_config_path")
    tools = f", tools of {shown(file)}" if file else ""
    draft.treated |= {f"{turns}.tool_config_path"}
    for name in given:
        if not name.endswith((".max_assistant_turns", ".tool_config_path", ".enable")):
            draft.differs(
                draft.origin(name), "tools and the texts between turns are of the environment here: do it there"
            )
    told = "of all turns and results of tools together there; max_tokens is of each reply, max_episode_tokens of all replies"
    draft.differs(draft.origin("data.max_response_length"), told)
    draft.first.append(
        f"multi_turn.enable = true{tools}: env has one turn alone, so write an environment with turns and tools, "
        "--env my.py:play (docs/guides/environments.md)"
    )


def _manager(draft: RecipeDraft) -> None:
    manager = draft.read(MANAGER)
    if manager is not None and manager not in _LIKE_NAIVE:
        draft.differs(draft.origin(MANAGER), "a manager of your own: its reward is the environment's, --env my.py:play")


def _overlong(draft: RecipeDraft) -> None:
    """Write the penalty for replies near the limit, which only the manager dapo adds."""
    manager = draft.read(MANAGER, "naive")
    enabled, length = draft.read(f"{BUFFER}.enable"), draft.number(f"{BUFFER}.len")
    factor = draft.number(f"{BUFFER}.penalty_factor", 1)
    draft.read(f"{BUFFER}.log")
    limit, most = draft.number("reward.reward_kwargs.max_resp_len"), draft.number("data.max_response_length")
    if not (enabled and length):
        if draft.given(f"{BUFFER}.len"):
            draft.note(draft.origin(f"{BUFFER}.len"), "no effect: overlong_buffer_cfg.enable is not true")
        return
    if manager != "dapo":
        draft.note(draft.origin(f"{BUFFER}.len"), "no effect: only the reward manager dapo adds the penalty")
        return
    draft.put("overlong_cache", int(length), f"{draft.origin(f'{BUFFER}.len')}: same meaning")
    if factor != 1:
        draft.differs(draft.origin(f"{BUFFER}.penalty_factor"), "the penalty grows to 1 here")
    if limit is not None and limit != most:
        draft.differs(draft.origin("reward.reward_kwargs.max_resp_len"), "the penalty ends at max_tokens here")


def generated_together(draft: RecipeDraft) -> int:
    """Return the prompts of a generation. Before verl 0.9, a run of DAPO may generate for more than it learns from, and its
    steps are those of the loader of these larger batches; 0.9 takes only whole parts of a step, and they change nothing.
    """
    prompts = draft.count("data.train_batch_size")
    draft.treated.add("data.gen_batch_size")
    given = draft.count("data.gen_batch_size", prompts)
    return max(prompts, given) if draft.read("algorithm.filter_groups.enable") else prompts


def _filter_groups(draft: RecipeDraft) -> None:
    """Write that groups with equal rewards are replaced."""
    enabled, metric = draft.read("algorithm.filter_groups.enable"), draft.read("algorithm.filter_groups.metric")
    rounds = draft.number("algorithm.filter_groups.max_num_gen_batches", 0) or 10
    if not enabled:
        return
    if draft.count("actor_rollout_ref.rollout.n") == 1:
        return draft.note("algorithm.filter_groups", "no effect: a reply without others is always kept")
    prompts, together = draft.count("data.train_batch_size"), generated_together(draft)
    told = "filter_groups: at most so many times the prompts (0 there: no limit)"
    if together != prompts:
        told += f", which are {rounds:g} generations of {together} prompts for {prompts}"
    if metric in ("acc", "score"):
        told += f"; filter_groups.metric = {metric}: here it is the environment's reward that is compared"
    draft.put(
        "dynamic_sampling", math.ceil(rounds * together / prompts), f"{told}; groups with equal rewards are replaced"
    )
    if metric is not None and metric not in _BEFORE_PENALTY:
        what = "groups are compared by the environment's reward here, before the overlong penalty"
        draft.differs(draft.origin("algorithm.filter_groups.metric"), what)
