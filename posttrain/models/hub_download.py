"""Downloads checkpoints from the Hugging Face hub into its client's cache; only files that this package reads.

A complete file is never downloaded again. A lost connection resumes within the file. An interrupted command starts with
the file that was incomplete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from pathlib import Path

from posttrain.core.types import UserError
from posttrain.system.hub import HubName, as_far_as_reached, cached_list, problem

WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt", "README.md")
"""Files of a checkpoint; README.md has the licence."""
LEFT = ("*/*", "consolidated*", "*.fp16.*", "*.index.fp16.json")
"""Files that are not: copies in other formats (original/, onnx/), of Mistral's own form, of another precision."""

FOUND: dict[tuple[str, str, str], Path] = {}
"""Folder of each model that this process has opened, by name, address and cache. A run opens a model several times."""


def downloaded(named: HubName) -> Path:
    """Download the missing files of a model of the hub, and return its folder in the cache; offline, that folder alone.

    Raises UserError: no such model or revision, no access, offline and not in the cache, no safetensors, disk full.
    """
    from huggingface_hub import constants

    key = str(named), constants.ENDPOINT, constants.HF_HUB_CACHE
    if key not in FOUND or not FOUND[key].is_dir():
        FOUND[key] = _download(named)
    return FOUND[key]


def _download(named: HubName) -> Path:
    import huggingface_hub

    with as_far_as_reached() as unreached:
        try:
            whole = bool(unreached) or not _missing(named)
            with _without_bars() if whole or os.environ.get("RANK", "0") != "0" else nullcontext():
                return Path(
                    huggingface_hub.snapshot_download(
                        named.name, revision=named.revision, allow_patterns=[*WANTED], ignore_patterns=[*LEFT]
                    )
                )
        except UserError:
            raise
        except Exception as error:  # network, name and disk cause errors of many types
            if unreached:
                part = "was downloaded in part" if "incomplete" in str(error) else "was not downloaded before"
                way = f"give a folder, or run hf download {named.name} with a network"
                raise UserError(f"{unreached}, and {named} {part}: {way}; {cached_list()}") from None
            raise UserError(problem(error, named)) from None


def _missing(named: HubName) -> list[str]:
    """Return the files of the repository that the cache lacks; ["unknown"] if the hub does not respond.

    Raises UserError if the repository holds no checkpoint.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        info = HfApi().model_info(named.name, revision=named.revision, timeout=10.0)
    except Exception:  # the download then reports the error, or uses the cache
        return ["unknown"]
    every = [file.rfilename for file in info.siblings or ()]
    wanted = [file for file in every if _matches(file, WANTED) and not _matches(file, LEFT)]
    if not any(file.endswith(".safetensors") for file in wanted):
        _refuse_without_weights(named, every)
    return [file for file in wanted if not isinstance(try_to_load_from_cache(named.name, file, revision=info.sha), str)]


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def _refuse_without_weights(named: HubName, files: list[str]) -> None:
    """Raise UserError for a repository with weights in other formats, or without a file of a checkpoint."""
    gguf = [file for file in files if file.endswith(".gguf")]
    if gguf:
        raise UserError(f"{named} holds GGUF files, such as {gguf[0]}: download one (hf download {named.name} {gguf[0]}) "
                        "and give its path as the model")  # fmt: skip
    other = [file for file in files if file.endswith((".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx"))]
    if other:
        raise UserError(f"{named} has no safetensors, only {other[0]}: choose a model or a revision that has them")
    if "config.json" not in files and "tokenizer.json" not in files:
        raise UserError(f"{named} holds no checkpoint: config.json and model.safetensors are missing")


@contextmanager
def _without_bars() -> Iterator[None]:
    """Context without progress bars of the client, for when there is nothing to download."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()
