"""Prompts with pictures as vLLM gets them. `test_vllm_pictures.py` runs them through vLLM itself."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picture_envs import drawn
from picture_tokenizer import picture_prompt, picture_tokenizer
from PIL import Image
from tiny_models import SEEING, Folders, make_seeing

from posttrain.core.types import Sampling, UserError
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.open_engine import open_engine
from posttrain.engines.pool.pool_protocol import Gone
from posttrain.engines.request import Request
from posttrain.engines.servers.server_client import ServedRun
from posttrain.engines.vllm.picture_prompts import with_single_placeholders
from posttrain.engines.vllm.vllm_client import VLLMClient
from posttrain.engines.vllm.vllm_setup import VLLMSetup
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.image_processor import PLACE
from posttrain.models.tokenizer.tokenizer import Tokenizer

pytest.importorskip("transformers")

ID = 5  # of the placeholder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def made(kind: str, folder: Path, **changed: Any) -> Path:
        picture_tokenizer().save(make_seeing(kind, folder, **changed))
        return folder

    return Folders(tmp_path_factory.mktemp("seeing"), made, vocab_size=picture_tokenizer().vocab_size)


@pytest.mark.parametrize("kind", SEEING)
def test_each_picture_has_one_placeholder_whose_tokens_make_the_prompt_again(
    kind: str, folders: Callable[[str], Path]
) -> None:
    tokenizer = Tokenizer.load(folders(kind))
    assert tokenizer.pictures is not None
    tokens, media = picture_prompt(tokenizer, drawn(1), drawn(2, 24, 40), drawn(1))
    found, parts = with_single_placeholders(tokenizer, tokens, media[::-1])
    assert found == [*tokenizer.encode("ab"), *[ID, *tokenizer.encode("cd")] * 3]
    assert [part["uuid"] for part in parts] == [m.digest for m in media]
    again: list[int] = []
    places = iter(media)
    for token in found:
        text = tokenizer.pictures.pixels(next(places).digest).text if token == ID else ""
        again += tokenizer._encode(text.replace(PLACE, "<image>"), False) if text else [token]
    assert again == tokens


def test_pictures_are_sent_as_the_run_decodes_them(folders: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.load(folders("qwen3_vl"))
    upright = np.random.default_rng(0).integers(0, 256, (8, 12, 4), dtype=np.uint8)
    image, exif, into = Image.fromarray(upright), Image.Exif(), io.BytesIO()
    exif[0x0112] = 6  # to be turned
    image.save(into, "PNG", exif=exif)
    tokens, media = picture_prompt(tokenizer, into.getvalue())
    _, [part] = with_single_placeholders(tokenizer, tokens, media)
    sent = Image.open(io.BytesIO(base64.b64decode(part["url"].removeprefix("data:image/png;base64,"))))
    assert np.array_equal(np.asarray(sent), np.rot90(upright[..., :3], 3))


class RecordingClient(VLLMClient):
    """A client that records its calls and answers them without a server."""

    def __init__(self, run: ServedRun, prompt: list[int]) -> None:
        self.prompt, self.calls = prompt, list[tuple[str, Any]]()
        super().__init__(run, "http://here", own=True)

    async def _call(self, method: str, path: str, body: Any = None) -> bytes:
        self.calls.append((path, body))
        choice = {"token_ids": [9], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "length"}
        answer = {"choices": [choice], "prompt_token_ids": self.prompt}
        return json.dumps({"data": [{"id": "policy", "max_model_len": 72}], **answer}).encode()


async def sample_and_resume(client: VLLMClient, request: Request) -> None:
    await client.sample(request)
    await client.resume()


def test_a_server_with_other_tokens_of_a_picture_is_refused(folders: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.load(folders("qwen3_vl"))
    tokens, media = picture_prompt(tokenizer, drawn(1))
    run = ServedRun(tokenizer, (7,), 512, 8, 60.0, False, {})
    request = Request(0, tuple(tokens), Sampling(max_tokens=1), media=tuple(media))
    with closing(RecordingClient(run, tokens)) as client:
        asyncio.run(sample_and_resume(client, request))
        asked = next(body for path, body in client.calls if path == "/inference/v1/generate")
        assert asked["token_ids"].count(ID) == 1 and asked["return_token_ids"]
        assert asked["sampling_params"]["logit_bias"] == {"5": -100.0, "6": -100.0}, "no placeholder is sampled"
        paths = [path for path, _ in client.calls]
        assert paths.index("/reset_encoder_cache") < paths.index("/resume"), "features are those of the old weights"
    with (
        closing(RecordingClient(run, [*tokens[:3], ID, *tokens[3:]])) as client,
        pytest.raises(Gone, match="its tokens of pictures are not those of this run .*: start it with the tokenizer"),
    ):
        asyncio.run(sample_and_resume(client, request))


@pytest.mark.parametrize(("kind", "replicas"), [("local", 1), ("sglang", 0)])
def test_engines_that_get_no_pictures_are_refused_with_the_one_that_does(
    kind: Any, replicas: int, folders: Callable[[str], Path]
) -> None:
    model, tokenizer = load_model(folders("qwen3_vl")), Tokenizer.load(folders("qwen3_vl"))
    with pytest.raises(
        UserError, match="supports text-only models, .* reads pictures: use --engine vllm, or leave out --"
    ):
        open_engine(kind, model, tokenizer, EngineOptions(8, replicas=replicas))


def test_servers_make_the_learners_pixels_and_read_pictures_alone() -> None:
    blind, seeing = (
        VLLMSetup("folder", torch.float32, 64, 8, 1 << 20, 1, pictures=sees).arguments("socket", (), False)
        for sees in (False, True)
    )
    given = dict(itertools.pairwise(seeing))
    assert json.loads(given["--mm-processor-kwargs"]) == {"use_fast": False} and "--no-mm-device-do-normalize" in seeing
    assert json.loads(given["--limit-mm-per-prompt"]) == {"video": 0, "audio": 0}
    assert not [word for word in blind if "mm-" in word]
