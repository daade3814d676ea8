"""Chat templates of public models, each with a tokenizer of characters that knows its special tokens."""

from __future__ import annotations

import pytest
from places import DATA

from posttrain.models.tokenizer.tokenizer import Tokenizer

TEMPLATES = DATA / "templates"
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
ENDS = {  # what the model itself says when it has replied
    "deepseek": "<｜end▁of▁sentence｜>", "gemma4": "<turn|>", "gemma": "<end_of_turn>", "gptoss": "<|return|>",
    "idefics3": "<end_of_utterance>", "smolvlm": "<end_of_utterance>", "llama3": "<|eot_id|>", "mistral": "</s>",
    "phi3": "<|end|>", "qwen": "<|im_end|>",
}  # fmt: skip
OTHERS = ("<s>", "</s>", "<|endoftext|>", "<|call|>", "<|tool_response>")  # special tokens besides
NO_SYSTEM = {"gemma"}
NO_TOOL = {  # a tool's message is refused: by the template, or because it would show nothing
    "gemma", "gemma3", "phi3", "phi3_5"
}  # fmt: skip

needs_templates = pytest.mark.skipif(not FAMILIES, reason="needs the chat templates in ../shared/data/templates")


def tokenizer_of(family: str) -> tuple[Tokenizer, str]:
    """A tokenizer of characters with this template, and the token that ends a reply."""
    end = next(text for name, text in ENDS.items() if family.startswith(name))
    tokenizer = Tokenizer.train(["hello there you"], 300, special=tuple(dict.fromkeys((*OTHERS, *ENDS.values()))))
    config = {"bos_token": "<s>", "eos_token": "<|endoftext|>" if family.startswith("phi3") else end}
    template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return Tokenizer(tokenizer.backend, config, template), end


def asked(family: str) -> list[dict[str, str]]:
    system = [] if family in NO_SYSTEM else [{"role": "system", "content": "be brief"}]
    return [*system, {"role": "user", "content": "first question"}]
