"""Loads encoders of texts: a folder of a transformers encoder, or a function of the user, my.py:encode.

Decides how an index recognises its encoder: a folder by a fingerprint of configuration, tokenizer and weights, a
function by one of its file. Another encoder is refused, because its queries would return unrelated passages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core.messages import dashed, one_line
from posttrain.core.types import UserError
from posttrain.data.arrow_store import digest
from posttrain.services.retrieval.dense import Encoder, Kind, Vectors
from posttrain.services.retrieval.index_folder import again, sampled
from posttrain.system.user_code import describe_error, load_named, source_file

OF_WEIGHTS = ("*.json", "*.safetensors", "*.bin", "*.model", "*.txt")
"""Files of a checkpoint that determine its vectors."""


class Function:
    """An encoder made of a function (texts, kind) -> array [texts, dimensions]; `kind` is "query" or "passage"."""

    def __init__(self, name: str) -> None:
        """Load the function. `name`: such as "my.py:encode". Raises UserError if there is no such function."""
        self._name = name
        function = load_named(name)
        if not callable(function):
            raise UserError(f"--encoder {name} is not a function (texts, kind) -> array")
        self._function: Callable[[Sequence[str], Kind], Any] = function
        self._file = source_file(function)

    @property
    def identity(self) -> dict[str, Any]:
        file = Path(self._file) if self._file is not None else None
        content = sampled(file) if file is not None and file.is_file() else ""
        target, _, function = self._name.rpartition(":")
        where = f"{file.resolve()}:{function}" if file is not None and target.endswith(".py") else self._name
        return {"function": where, "fingerprint": content}

    def encode(self, texts: Sequence[str], kind: Kind) -> Vectors:
        try:
            return np.asarray(self._function(list(texts), kind))
        except UserError:
            raise
        except Exception as error:  # the user's code may fail in any way
            raise UserError(f"--encoder {self._name} failed: {describe_error(error, self._file)}") from error


def load_encoder(name: str, **encoding: Any) -> Encoder:
    """Load an encoder by name; `encoding`: options of `posttrain.models.hf.encoder.Encoder`. Raises UserError."""
    if ":" in name:
        if encoding:
            raise UserError(f"{dashed(next(iter(encoding)))} has no effect with an encoder function: leave it out")
        return Function(name)
    from posttrain.models.checkpoint_location import checkpoint_folder
    from posttrain.models.hf.encoder import TransformersEncoder

    folder = checkpoint_folder(name)
    fingerprint = digest(*(f"{path.name} {sampled(path)}" for path in _files(folder)))
    return TransformersEncoder(folder, fingerprint, **encoding)


def encoder_of(identity: dict[str, Any], folder: Path, given: Encoder | str | None) -> Encoder:
    """Load the encoder of an index, as the manifest names it. `given`: replaces it, if it has moved or was an object.

    Raises UserError if it is a different encoder.
    """
    if not identity:
        raise UserError(f"the index in {folder} is damaged (it names no encoder): {again(folder)}")
    if given is None and "function" not in identity and "folder" not in identity:
        way = "open it in Python with open_index(folder, encoder)"
        raise UserError(f"the encoder of the index in {folder} was a Python object: {way}")
    name = given if isinstance(given, str) else str(identity.get("function", identity.get("folder")))
    settings = {setting: value for setting, value in _made_of(identity).items() if setting != "fingerprint"}
    try:
        found = load_encoder(name, **settings) if given is None or isinstance(given, str) else given
    except TypeError as error:
        what = f"damaged (its encoder: {one_line(error)})"
        raise UserError(f"the index in {folder} is {what}: {again(folder)}") from error
    if _made_of(found.identity) != _made_of(identity):
        raise UserError(f"{name} is not the encoder that the index in {folder} was made with: {again(folder)}")
    return found


def _made_of(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that determine vectors, without the path, which may change."""
    return {name: value for name, value in identity.items() if name not in ("folder", "function")}


def _files(folder: Path) -> list[Path]:
    return sorted({path for pattern in OF_WEIGHTS for path in folder.glob(pattern) if path.is_file()})
