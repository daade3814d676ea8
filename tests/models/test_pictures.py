"""Models that see: every number is that of their own forward with the picture, in prompts, tool text, runs and resumes."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import SEEING, Folders, InDouble, make_seeing, opened
from torch import Tensor
from update_cases import WORDS

from posttrain.core.pictures import PICTURES, png
from posttrain.core.transcripts import Media, SpanKind, Transcript, positions_of
from posttrain.core.types import Completion, Sampling, StopReason
from posttrain.engines.local.backed_engine import BackedEngine
from posttrain.engines.local.uncached_engine import UncachedEngine
from posttrain.models.hf.backed import Backed
from posttrain.models.hf.vision import Vision
from posttrain.models.losses.likelihood import token_logp, token_logp_entropy
from posttrain.training.sources.packing import collate, split_microbatches

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return Folders(tmp_path_factory.mktemp("seeing"), make_seeing, vocab_size=WORDS.vocab_size)


# -- layouts -----------------------------------------------------------------------------------------------------------


def noise(rng: random.Random, shape: tuple[int, int] | None = None) -> str:
    """The digest of a picture of a few pixels more or less."""
    shape = shape or rng.choice([(16, 16), (24, 16), (16, 32), (9, 21)])
    pixels = np.array([rng.randrange(256) for _ in range(3 * shape[0] * shape[1])], dtype=np.uint8)
    return PICTURES.hold(png(pixels.reshape(*shape, 3)))


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(7, WORDS.vocab_size) for _ in range(count)]


def observe(
    transcript: Transcript, rng: random.Random, vision: Vision, digest: str, kind: SpanKind | None = None
) -> None:
    """Words, a picture, words."""
    pixels, before, after = (
        vision.processor.pixels(digest),
        words(rng, rng.randint(0, 3)),
        words(rng, rng.randint(1, 3)),
    )
    tokens = [*before, *[vision.placeholders[0]] * pixels.count, *after]
    media = [Media(len(transcript) + len(before), pixels.count, digest, pixels.grid)]
    transcript.observe(tokens, kind, media)


def said(rng: random.Random) -> Completion:
    tokens = words(rng, rng.randint(1, 4))
    return Completion(0, tokens, [-1.0] * len(tokens), "", StopReason.EOS, 0)


def grown(seed: int, vision: Vision) -> list[Transcript]:
    """Groups that share a prompt with a picture, some of them with another one in a tool's answer; and text alone."""
    rng, found = random.Random(seed), list[Transcript]()
    pictures = [noise(rng) for _ in range(3)]
    for _ in range(2):
        prompt = Transcript()
        observe(prompt, rng, vision, rng.choice(pictures))
        for _ in range(rng.randint(2, 3)):
            one = prompt.branch()
            one.forks = ()
            one.sample(said(rng))
            if rng.random() < 0.6:
                observe(one, rng, vision, rng.choice(pictures), SpanKind.TOOL)
                one.sample(said(rng), learn=rng.random() < 0.7)
            found.append(one)
    plain = Transcript()
    plain.observe(words(rng, 3))
    plain.sample(said(rng))
    return [*found, plain]


def alone(model: Backed, transcript: Transcript) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) of the scored tokens by the model's own forward of this sequence, picture and all."""
    assert model.vision is not None
    tokens, more = torch.tensor([transcript.tokens]), dict[str, Any]()
    if transcript.media:
        seen = [model.vision.processor.pixels(m.digest).inputs for m in transcript.media]
        if len({x["pixel_values"].shape[1:] for x in seen}) > 1:  # fewer tiles than others: filled up with zeros
            most = max(x["pixel_values"].shape[1] for x in seen)
            seen = [
                {name: torch.cat((x, x.new_zeros(1, most - x.shape[1], *x.shape[2:])), 1) for name, x in one.items()}
                for one in seen
            ]
        more = {name: torch.cat([one[name] for one in seen]) for name in seen[0]}
        if "mm_token_type_ids" in inspect.signature(model.inner.forward).parameters:
            more["mm_token_type_ids"] = (tokens == model.vision.placeholders[0]).int()
    logits = model.inner(input_ids=tokens, use_cache=False, **more).logits[0]
    words_only = torch.tensor([id for id in range(logits.shape[-1]) if id not in model.vision.placeholders])
    logs = logits[:, words_only].log_softmax(-1)
    at = transcript.scored - 1
    return logs[at, torch.searchsorted(words_only, tokens[0, transcript.scored])], -(logs.exp() * logs).sum(-1)[at]


@pytest.mark.parametrize("way", ["flat", "rows"])
@pytest.mark.parametrize("kind", SEEING)
def test_log_probabilities_entropies_and_gradients_are_those_of_each_transcript_alone(
    kind: str, way: str, folders: Callable[[str], Path]
) -> None:
    model = opened(folders(kind), torch.float64)
    assert model.way == "flat" and model.vision is not None
    flat = model.attention
    for seed, budget in ((0, 200), (1, 30)):
        transcripts = grown(seed, model.vision)
        weights = [torch.linspace(-1, 1 + i, t.n_scored, dtype=torch.float64) for i, t in enumerate(transcripts)]
        parameters = list(model.parameters())
        with InDouble():
            model.attend("eager")
            plain = torch.zeros((), dtype=torch.float64)
            for transcript, weight in zip(transcripts, weights, strict=True):
                logp, entropy = alone(model, transcript)
                plain = plain + (logp * weight).sum() + 0.3 * (entropy * weight.square()).sum()
            expected = torch.autograd.grad(plain, parameters, allow_unused=True)
            model.way = way  # type: ignore[assignment]
            model.attend(flat if way == "flat" else "sdpa")
            total = torch.zeros((), dtype=torch.float64)
            for index in split_microbatches([[t] for t in transcripts], budget):
                batch = collate(
                    [[transcripts[i]] for i in index], index, weight=torch.ones(len(transcripts), dtype=torch.float64),
                    fields={"advantage": weights},
                )  # fmt: skip
                assert batch.advantage is not None
                logp, entropy = token_logp_entropy(model.hidden(batch.layout, batch.at), model.head, batch.target)
                total = total + (logp * batch.advantage).sum() + 0.3 * (entropy * batch.advantage.square()).sum()
            found = torch.autograd.grad(total, parameters, allow_unused=True)
        assert abs(total.item() - plain.item()) < 1e-9 * max(1.0, abs(plain.item()))
        tower, moved = {id(p) for p in model.vision.weights()}, 0
        for parameter, own, other in zip(parameters, found, expected, strict=True):
            own, other = (torch.zeros(1) if x is None else x for x in (own, other))
            assert (own - other).abs().max() < 1e-9 * max(1.0, other.abs().max().item())
            moved += id(parameter) in tower and bool(other.any())
        assert moved > len(tower) / 2, "the picture reaches what is said of it"


@pytest.mark.parametrize("way", ["flat", "rows"])
@pytest.mark.parametrize("kind", ["qwen3_vl", "smolvlm"])
def test_gradients_are_the_same_where_layers_are_computed_twice(
    kind: str, way: str, folders: Callable[[str], Path]
) -> None:
    model = opened(folders(kind))
    assert model.vision is not None
    transcripts, found = grown(2, model.vision), []
    if way == "rows":
        model.way = "rows"
        model.attend("sdpa")
    batch = collate([[t] for t in transcripts], range(len(transcripts)), weight=torch.ones(len(transcripts)))
    for room in (math.inf, 0.0):
        model.activation_room = room
        logp = token_logp(model.hidden(batch.layout, batch.at), model.head, batch.target)
        found.append(torch.autograd.grad(logp.sum(), list(model.parameters()), allow_unused=True))
    for one, two in zip(*found, strict=True):
        assert (one is None) == (two is None)
        assert one is None or two is None or torch.allclose(one, two, atol=1e-5 * float(one.abs().max()))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_places_in_time_height_and_width_are_the_models_own(kind: str, folders: Callable[[str], Path]) -> None:
    model = opened(folders(kind))
    assert model.vision is not None
    for seed in range(4):
        for transcript in grown(seed, model.vision):
            if not transcript.media:
                assert transcript.positions is None
                continue
            ids = torch.tensor([transcript.tokens])
            grids = [model.vision.processor.pixels(m.digest).inputs["image_grid_thw"] for m in transcript.media]
            kinds = (ids == model.vision.placeholders[0]).int()
            theirs, _ = model.inner.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=torch.cat(grids))
            assert np.array_equal(theirs[:, 0].numpy(), transcript.positions)  # type: ignore[arg-type]
            shorter = positions_of(len(ids[0]) - 1, transcript.media)
            assert np.array_equal(shorter, theirs[:, 0, :-1].numpy())  # type: ignore[arg-type]


def test_each_picture_of_a_micro_batch_goes_through_the_tower_once(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(folders("qwen3_vl"))
    assert model.vision is not None
    transcripts, counted = grown(0, model.vision), list[int]()
    visual = type(model.inner.model.visual).forward

    def forward(self: Any, pixels: Tensor, **more: Any) -> Any:
        counted.append(len(more["grid_thw"]))
        return visual(self, pixels, **more)

    monkeypatch.setattr(type(model.inner.model.visual), "forward", forward)
    batch = collate([[t] for t in transcripts], range(len(transcripts)), weight=torch.ones(len(transcripts)))
    pictures = {m.digest for t in transcripts for m in t.media}
    assert sum(len(t.media) for t in transcripts) > len(batch.layout.media) >= len(pictures) > 1
    for way, attention in (("flat", model.attention), ("rows", "sdpa")):
        counted.clear()
        model.way = way  # type: ignore[assignment]
        model.attend(attention)
        model.hidden(batch.layout, batch.at)
        assert counted == [len(pictures)]


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SEEING)
def test_engine_with_a_cache_samples_what_the_one_without_does(
    kind: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.engines.local.backed_engine.PREFILL", 40)
    model = opened(folders(kind))
    assert model.vision is not None
    rng, prompts = random.Random(3), list[Transcript]()
    for _ in range(4):
        one = Transcript()
        observe(one, rng, model.vision, noise(rng))
        prompts += [one, one]
    alike = [noise(rng, (16, 16)) for _ in range(2)]  # the same tokens, and not the same picture
    observe(first := Transcript(), rng, model.vision, alike[0])
    (second := Transcript()).observe(first.tokens, media=[replace(first.media[0], digest=alike[1])])
    (plain := Transcript()).observe(words(rng, 5))
    prompts += [first, second, plain]
    found = []
    for make in (UncachedEngine, BackedEngine):
        engine = make(model, WORDS, slots=6)
        for id, prompt in enumerate(prompts):
            sampling = Sampling(max_tokens=3 + id, seed=min(id, 8))
            engine.submit_with_media(id, prompt.tokens, prompt.media, sampling)
        done: dict[int, Completion] = {}
        while len(done) < len(prompts):
            done |= {c.id: c for c in engine.poll()}
        found.append(done)
    assert found[0][8].logp[0] != found[0][9].logp[0]
    for id, completion in found[0].items():
        assert found[1][id].tokens == completion.tokens
        assert found[1][id].logp == pytest.approx(completion.logp, abs=2e-3)
        assert not set(model.vision.placeholders) & set(completion.tokens)


def test_what_stands_for_a_picture_is_never_sampled_and_is_counted(folders: Callable[[str], Path]) -> None:
    model = opened(folders("smolvlm"))
    with torch.no_grad():  # all that the model would say is the placeholder
        model.inner.lm_head.weight[:] = 0.01 * model.inner.lm_head.weight
        model.inner.model.text_model.norm.weight[:] = 0.0
        model.inner.lm_head.weight[5] += 1.0
        model.inner.model.text_model.norm.register_forward_hook(lambda *_: torch.ones(()) + _[-1])
    for how in ({}, {"temperature": 0.0}):
        engine = BackedEngine(model, WORDS)
        engine.submit(0, [9, 10], Sampling(max_tokens=6, **how))
        done = []
        while not done:
            done = engine.poll()
        assert 5 not in done[0].tokens
        assert engine.counts()["placeholders"] == len(done[0].tokens)
