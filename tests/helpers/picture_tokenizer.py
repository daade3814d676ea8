"""A chat template and a tokenizer of letters for models that read pictures."""

from __future__ import annotations

from posttrain.models.tokenizer.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' %}<|eos|>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<fake_token_around_image>", "<global-img>", "<image>", "<video>")
LETTERS = "0123456789+-*/= .abcdefghijklmnopqrstuvwxyz<>?_"


def picture_tokenizer() -> Tokenizer:
    """Return a tokenizer with the special tokens of pictures and the chat template."""
    return Tokenizer.train([LETTERS], 64, "characters", SPECIAL).templated(TEMPLATE, "the template")
