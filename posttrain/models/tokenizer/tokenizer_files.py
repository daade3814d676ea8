"""What a checkpoint folder says of its tokenizer besides tokenizer.json, and where that folder is."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.models.json_files import Fields, read_json, read_text

VOCAB_MOST = 2**24  # entries of a tokenizer to be trained: its trainer reserves memory for all of them
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def checkpoint_folder(name: str | Path) -> Path:
    """The local folder of a checkpoint: a path, or else a Hugging Face model name, downloaded if that is possible.

    Raises UserError if it is neither.
    """
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
        there = folder.exists()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a NUL, a user that there is not
        raise UserError(f"{str(name)!r:.80} can be no folder: {one_line(error)}") from None
    if there:
        raise UserError(f"{name} is a file: give the checkpoint folder that holds it")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name)):
        raise UserError(f"{name}: no such folder: give a folder with config.json, model.safetensors and tokenizer.json")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(str(name)))
    except Exception as error:  # no network, no such model, no access, disk full: the way out is the same
        raise UserError(
            f"{name}: no such folder, and as a Hugging Face model it cannot be downloaded here "
            f"({type(error).__name__}): give a local checkpoint folder"
        ) from None


def token_text(token: str | Mapping[str, Any]) -> str:
    """A special token stands in tokenizer_config.json as its text, or as an object with its text and flags."""
    return token["content"] if isinstance(token, Mapping) else token


def read_special(file: Path) -> dict[str, Any]:
    """A file that names special tokens, {} if there is none. Raises UserError for a name that is no text."""
    config = read_json(file, optional=True)
    fields = Fields(file, config)
    for name in NAMED_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(text, str):
            raise fields.refuse(name, 'a string, or an object with its text as "content"')
    return config


def stored_template(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """A folder's chat template, if it has one, and where it stands."""
    file, place = folder / "chat_template.jinja", f"{folder / 'tokenizer_config.json'}: chat_template"
    if file.exists() or file.is_symlink():
        return read_text(file), str(file)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        fields = [Fields(folder / "tokenizer_config.json", entry) for entry in template if isinstance(entry, dict)]
        named = {entry.text("name", None): entry.text("template", None) for entry in fields}
        if len(fields) == len(template):
            return named.get("default"), place
    if template is not None and not isinstance(template, str):
        raise Fields(folder / "tokenizer_config.json", config).refuse(
            "chat_template", 'a string, or a list of objects with "name" and "template"'
        )
    return template, place


@contextmanager
def refusing(problem: str) -> Iterator[None]:
    """Within it, what `tokenizers` and transformers raise is a UserError that begins with `problem`, and all they say.

    Both write pages to standard error before they raise: a panic its stack, transformers its advice.
    """
    kept = os.dup(2)
    silence = os.open(os.devnull, os.O_WRONLY)
    sys.stderr.flush()
    os.dup2(silence, 2)
    try:
        yield
    except BaseException as error:
        raise failed(error, problem) from None
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(silence)


def failed(error: BaseException, problem: str) -> BaseException:
    """The UserError for what `tokenizers` raised: bare Exceptions, and panics, which are not Exceptions at all."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return UserError(f"{problem}: {one_line(error)}")
    return error


def check_ids(backend: tokenizers.Tokenizer) -> None:
    """Raises UserError if two tokens have one id, or if an id is absurd: `tokenizers` counts up to it again and again."""
    tokens: dict[int, str] = {}
    for token, id in backend.get_vocab(with_added_tokens=True).items():
        if id >= VOCAB_MOST:
            raise UserError(f"token {token!r:.60} has the id {id}, where {VOCAB_MOST:,} is beyond every vocabulary")
        if id in tokens:
            raise UserError(f"tokens {token!r:.60} and {tokens[id]!r:.60} have the same id, {id}")
        tokens[id] = token
