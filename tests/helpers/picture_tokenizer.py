"""A chat template and a tokenizer of letters for models that read pictures."""

from __future__ import annotations

from posttrain.core.pictures import PICTURES
from posttrain.core.transcripts import Media
from posttrain.models.tokenizer.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' %}<|eos|>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<fake_token_around_image>", "<global-img>", "<image>", "<video>")
OF_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")  # at the same ids
LETTERS = "0123456789+-*/= .abcdefghijklmnopqrstuvwxyz<>?_"


def picture_tokenizer(special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """Return a tokenizer with the special tokens of pictures, the third for a picture, and the chat template."""
    template = TEMPLATE.replace("<image>", special[2])
    return Tokenizer.train([LETTERS], 64, "characters", special).templated(template, "the template")


def picture_prompt(tokenizer: Tokenizer, *pictures: bytes) -> tuple[list[int], list[Media]]:
    """Return the tokens of a prompt with letters around each of these pictures, and the pictures' positions."""
    digests = [PICTURES.put(picture).removeprefix("sha256:") for picture in pictures]
    assert tokenizer.pictures is not None
    placeholder = tokenizer.backend.id_to_token(tokenizer.pictures.id)
    return tokenizer.encode_seen("ab" + f"{placeholder}cd" * len(digests), digests, False)
