"""Reads the files of a tokenizer beside tokenizer.json (special tokens, chat template), and checks token ids."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from posttrain.core.messages import one_line
from posttrain.core.run_date import CONFIG_KEY, is_day
from posttrain.core.types import UserError
from posttrain.models.json_files import Fields, read_json, read_text

VOCAB_MOST = 2**24  # maximal vocabulary of a new tokenizer: the trainer reserves memory for all entries
KWARGS_KEY = "chat_template_kwargs"
"""The entry of a checkpoint's tokenizer_config.json that holds the variables which its chat template gets."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def token_text(token: str | Mapping[str, Any]) -> str:
    """Return the text of a special token, which tokenizer_config.json stores as text, or as an object with flags."""
    return token["content"] if isinstance(token, Mapping) else token


def read_special(file: Path) -> dict[str, Any]:
    """Read a file that names special tokens; {} if it does not exist. Raises UserError for a name that is not text."""
    config = read_json(file, optional=True)
    fields = Fields(file, config)
    for name in NAMED_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(text, str):
            raise fields.refuse(name, 'a string, or an object with its text as "content"')
    if CONFIG_KEY in config and not is_day(config[CONFIG_KEY]):
        raise fields.refuse(CONFIG_KEY, "a day such as 2026-11-24")
    if not isinstance(config.get(KWARGS_KEY, {}), dict):
        raise fields.refuse(KWARGS_KEY, 'an object of variables, such as {"enable_thinking": false}')
    return config


def stored_template(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return (a folder's chat template or None, the file or entry that holds it)."""
    file, place = folder / "chat_template.jinja", f"{folder / 'tokenizer_config.json'}: chat_template"
    if file.exists() or file.is_symlink():
        return read_text(file), str(file)
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
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
    """Context that converts errors of `tokenizers` and transformers to a UserError that begins with `problem`.

    It suppresses standard error, to which a panic writes its stack and transformers its advice.
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
    """Return the UserError for an error of `tokenizers`: a bare Exception, or a panic, which does not derive from
    Exception.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return UserError(f"{problem}: {one_line(error)}")
    return error


def check_ids(backend: tokenizers.Tokenizer) -> None:
    """Raise UserError if two tokens have the same id, or if an id is absurdly large: `tokenizers` repeatedly counts up
    to the largest id.
    """
    tokens: dict[int, str] = {}
    for token, id in backend.get_vocab(with_added_tokens=True).items():
        if id >= VOCAB_MOST:
            raise UserError(f"token {token!r:.60} has the id {id}, and the maximum is {VOCAB_MOST:,}")
        if id in tokens:
            raise UserError(f"tokens {token!r:.60} and {tokens[id]!r:.60} have the same id, {id}")
        tokens[id] = token
