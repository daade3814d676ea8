"""Plays the cases of `tests/helpers/trl_agent.py` with TRL's own loop of tool calls, and records what came of them.

    PYTHONPATH=tests/helpers:tests:. python benchmarks/peers/trl_tools.py        (with trl and jmespath installed)

The replies are written, everything else is TRL's: template, tools, errors, masks, messages. The result is
`tests/vectors/trl_tools.json`, with which a test compares the same episodes played here.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import deque
from pathlib import Path
from typing import Any

import trl_agent
from template_families import tokenizer_of
from transformers import PreTrainedTokenizerFast
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, parse_response

FAMILY = "qwen3_instruct_2507"
OUT = Path(__file__).resolve().parents[2] / "tests" / "vectors" / "trl_tools.json"


def played(case: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens as pieces of text with TRL's mask, the messages, and the reward of the environment."""
    own, end = tokenizer_of(FAMILY)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own.backend, eos_token=end, pad_token="<|endoftext|>")
    tokenizer.chat_template = own.chat_template
    tokenizer = add_response_schema(tokenizer)
    made = vars(trl_agent)[case["environment"]]() if "environment" in case else None
    methods = [
        m for n, m in inspect.getmembers(made, inspect.ismethod) if n not in ("reset", "get_reward") and n[0] != "_"
    ]
    tools = [vars(trl_agent)[name] for name in case["tools"]] + methods
    prompt = [dict(message) for message in trl_agent.PROMPT]
    if made is not None:
        prompt[-1]["content"] += made.reset(prompt=trl_agent.PROMPT, target=5)
    trainer: Any = GRPOTrainer.__new__(GRPOTrainer)
    vars(trainer).update(
        max_tool_calling_iterations=case.get("most", sys.maxsize), max_completion_length=100_000, use_vllm=False,
        _is_vlm=False, _tokenizer=tokenizer, processing_class=tokenizer, chat_template=None, chat_template_kwargs={},
        environment_factories=None, tools=tools, async_loop=None,
        _sync_tool_dicts=[{tool.__name__: tool for tool in tools}], _async_tool_dicts=[{}],
    )  # fmt: skip
    trainer.model = type("", (), {"config": type("", (), {"max_position_embeddings": 1 << 20})})
    left = deque(tokenizer.encode(reply + end, add_special_tokens=False) for reply in case["replies"])
    trainer._generate_single_turn = lambda *_, **__: ([left.popleft()], None)
    shown = tokenizer.apply_chat_template(prompt, tools=tools, add_generation_prompt=True, return_dict=False)
    first = left.popleft()
    completions = [[parse_response(tokenizer, first, prefix=shown)]]
    mask, completions, ids, *_ = trainer._tool_call_loop([list(prompt)], [shown], [first], completions, None, None, {})
    pieces: list[list[Any]] = [[tokenizer.decode(shown), 0]]
    for token, learned in zip(ids[0], mask[0], strict=True):
        if pieces[-1][1] != learned:
            pieces.append(["", learned])
        pieces[-1][0] += tokenizer.decode([token])
    reward = None if made is None else made.get_reward()
    return {"prompt": prompt, "completion": completions[0], "pieces": pieces, "reward": reward, "left": len(left)}


if __name__ == "__main__":
    found = {name: played(case) for name, case in trl_agent.CASES.items()}
    OUT.write_text(json.dumps(found, indent=1) + "\n")
