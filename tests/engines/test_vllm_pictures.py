"""vLLM's log-probabilities of replies to prompts with pictures are the learner's. See `make test-vllm`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision_transforms
from picture_envs import drawn, looking
from picture_tokenizer import OF_QWEN, SPECIAL, picture_prompt, picture_tokenizer
from tiny_models import make_seeing
from vllm_samples import needs_vllm, opened

import posttrain
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Completion, Sampling
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.pool_protocol import Gone
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.hf.backed import Backed
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.packing import collate

pytestmark = [pytest.mark.timeout(1800), needs_vllm]

needs_torchvision = pytest.mark.skipif(
    not torchvision_transforms.FOLDER.exists(), reason="torchvision is not installed here: make test-vllm"
)
SIZES = {"head_dim": 32, "hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1,
         "max_position_embeddings": 512}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
KINDS: dict[str, dict[str, Any]] = {
    "idefics3": {},
    "qwen2_5_vl": {"rope_parameters": ROPE},
    "qwen3_vl": {"rope_parameters": {**ROPE, "mrope_interleaved": True}},
}
GAP = 2e-4  # nats


@pytest.fixture(
    scope="module", params=["idefics3", *(pytest.param(k, marks=needs_torchvision) for k in KINDS if k[0] == "q")]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    kind = request.param
    tokenizer = picture_tokenizer(SPECIAL if kind == "idefics3" else OF_QWEN)  # vLLM has the names of Qwen's tokens
    made = make_seeing(kind, tmp_path_factory.mktemp(kind), vocab_size=tokenizer.vocab_size, **SIZES, **KINDS[kind])
    if kind == "idefics3":  # what vLLM's processor asks for: see `Pixels`
        (made / "processor_config.json").write_text(
            json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": 4})
        )
    tokenizer.save(made)
    with pytest.MonkeyPatch.context() as patch:
        if kind != "idefics3":
            torchvision_transforms.install(tmp_path_factory.mktemp("packages") / "first", patch)
        yield made


@pytest.fixture(scope="module")
def policy(folder: Path) -> Backed:
    model: Any = load_model(folder)
    return model  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def engine(policy: Backed, tokenizer: Tokenizer) -> Iterator[EnginePool]:
    with closing(opened(policy, tokenizer)) as started:
        yield started


def picture_transcript(tokenizer: Tokenizer, *pictures: bytes) -> Transcript:
    """Return a transcript of a prompt with these pictures."""
    transcript = Transcript()
    tokens, media = picture_prompt(tokenizer, *pictures)
    transcript.observe(tokens, media=media)
    return transcript


def sampled(engine: EnginePool, transcripts: list[Transcript], seed: int = 0, count: int = 12) -> list[Completion]:
    """Sample a reply to each transcript, and append it."""
    for id, transcript in enumerate(transcripts):
        how = Sampling(seed=seed + id, max_tokens=count)
        engine.submit_with_media(id, transcript.tokens, transcript.media, how, keep=True)
    done: list[Completion] = []
    while len(done) < len(transcripts):
        done += engine.poll()
    done.sort(key=lambda completion: completion.id)
    for transcript, completion in zip(transcripts, done, strict=True):
        transcript.sample(completion)
    return done


def gap(model: Backed, transcripts: list[Transcript]) -> float:
    """Return the largest difference between the learner's and the engine's log-probability of a token, in nats."""
    batch = collate([[t] for t in transcripts], range(len(transcripts)), weight=torch.ones(len(transcripts)))
    (outputs,) = LocalLearner(model, Optimization()).evaluate([batch])
    assert batch.sampler_logp is not None
    return float((outputs.logp.double() - batch.sampler_logp).abs().max())


PICTURES_OF = [(drawn(1),), (drawn(2),), (drawn(3, 24, 40),), (drawn(1), drawn(4, 70, 30)), ()]


def test_log_probabilities_of_replies_to_pictures_are_the_learners(
    engine: EnginePool, policy: Backed, tokenizer: Tokenizer
) -> None:
    transcripts = [picture_transcript(tokenizer, *pictures) for pictures in PICTURES_OF for _ in range(3)]
    done = sampled(engine, transcripts)
    found = gap(policy, transcripts)
    print(f"{found:.1e} nats")
    assert found < GAP
    assert policy.vision is not None
    assert not {t for completion in done for t in completion.tokens} & set(policy.vision.placeholders)


def test_pictures_change_what_is_sampled(engine: EnginePool, policy: Backed, tokenizer: Tokenizer) -> None:
    one, other = ([picture_transcript(tokenizer, drawn(seed)) for _ in range(8)] for seed in (1, 2))
    first, second = ([c.tokens for c in sampled(engine, those)] for those in (one, other))
    assert sum(a != b for a, b in zip(first, second, strict=True)) >= 6, "the same seeds"
    for transcript in one:  # with the other picture the learner's log-probabilities differ
        transcript.media = other[0].media
    assert gap(policy, one) > 0.1 > GAP > gap(policy, other)


def test_a_picture_of_a_later_turn_is_read_behind_the_earlier_one(
    engine: EnginePool, policy: Backed, tokenizer: Tokenizer
) -> None:
    transcript = picture_transcript(tokenizer, drawn(1))
    sampled(engine, [transcript])
    later = picture_transcript(tokenizer, drawn(2))
    start = len(transcript)
    media = [type(m)(m.start + start, m.length, m.digest, m.grid) for m in later.media]
    transcript.observe(later.tokens, SpanKind.TOOL, media)
    sampled(engine, [transcript], 7)
    assert len(transcript.media) == 2 and gap(policy, [transcript]) < GAP


def test_a_server_that_makes_other_pixels_than_the_learner_is_refused(
    engine: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = engine.members[0].link.wire

    def checked() -> None:
        asyncio.run_coroutine_threadsafe(client.check(), client._loop).result()

    checked()
    monkeypatch.setattr("posttrain.engines.vllm.vllm_client.PIXELS", {"mm_device_do_normalize": True})
    with pytest.raises(Gone, match="its pixels are not the learner's: start it with --mm-processor-kwargs"):
        checked()


def test_features_of_pictures_are_those_of_the_newest_vision_tower(
    engine: EnginePool, policy: Backed, tokenizer: Tokenizer
) -> None:
    transcripts = [picture_transcript(tokenizer, *pictures) for pictures in PICTURES_OF[:4]]
    sampled(engine, transcripts)
    assert policy.vision is not None
    kept = {name: tensor.clone() for name, tensor in policy.named_parameters()}
    try:
        with torch.no_grad():
            for parameter in policy.vision.weights():
                parameter.mul_(1.3)
        assert gap(policy, transcripts) > 0.05, "the change is large enough to be seen"
        engine.load(policy, 1)
        again = [picture_transcript(tokenizer, *pictures) for pictures in PICTURES_OF[:4]]
        sampled(engine, again)
        assert gap(policy, again) < GAP
    finally:
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                parameter.copy_(kept[name])
        engine.load(policy, 0)


def test_grpo_learns_from_two_turns_with_a_picture_in_each(folder: Path, tmp_path: Path) -> None:
    tasks = [{"id": str(i), "shade": 40 * i} for i in range(3)]
    run = posttrain.rl(
        tasks, env=looking, model=str(folder), out=str(tmp_path / "run"), engine="vllm", slots=16, algorithm="grpo",
        kl=0.0, lr=1e-3, steps=2, prompts=2, group=3, max_tokens=6, quiet=True, train_vision=True,
    )  # fmt: skip
    assert len(run.metrics) == 2
    for row in run.metrics:
        assert row["sampler/gap/max"] < 1e-3
    assert len(list((tmp_path / "run" / "pictures").iterdir())) == 6
