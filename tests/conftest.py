"""What tests share: tiny real models, tokenizers and rollouts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from places import DATA

from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, StopReason
from posttrain.envs.play import env_pool
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.kernels import build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.curves import curves
from posttrain.system import garbage
from posttrain.training import loop, trainer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

WORKERS = env_pool.default_workers


def bare(patch: pytest.MonkeyPatch) -> None:
    """Trainings without what takes longer than most of them do here and changes none: curves, full collections, and a
    process of the environment for each processor. One runs it here as on a machine with one processor; what several do
    is the subject of tests that ask for them. A command that runs here does not change the tests' own collections.
    """
    kept = {
        name: getattr(gc, name) for name in ("freeze", "unfreeze", "get_freeze_count", "get_threshold", "set_threshold")
    }
    patch.setattr(loop, "gc", SimpleNamespace(collect=lambda: 0, **kept))
    patch.setattr(garbage, "search_seldom", lambda: None)
    patch.setattr(trainer, "curves", lambda folder: None)
    patch.setattr(env_pool, "default_workers", lambda: 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    listed = set((Path(__file__).parent / "slow_tests.txt").read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid.partition("[")[0] in listed:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def bare_trainings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        bare(patch)
        yield


@pytest.fixture(scope="module", autouse=True)
def as_at_the_start() -> None:
    """Compiled code and one thread, whatever the options of runs in other modules were: both belong to the process."""
    build.use(True)
    torch.set_num_threads(1)  # the models are tiny, and several tests run at once


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings draw their curves, as they do outside of tests."""
    monkeypatch.setattr(trainer, "curves", curves)


@pytest.fixture
def workers_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment has as many processes as outside of tests."""
    monkeypatch.setattr(env_pool, "default_workers", WORKERS)


@pytest.fixture(scope="session")
def data() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"needs the data folder {DATA}")
    return DATA


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["0123456789+-*/= .abcdefghijklmnopqrstuvwxyz<>"], 64, "characters")


@pytest.fixture
def model(tokenizer: Tokenizer) -> Decoder:
    """A tiny decoder with grouped-query attention whose replies have all lengths."""
    return tiny(tokenizer)


def tiny(tokenizer: Tokenizer, seed: int = 0, dtype: torch.dtype = torch.float32, context: int = 64) -> Decoder:
    config = DecoderConfig(
        vocab=tokenizer.vocab_size, hidden=32, layers=2, heads=4, kv_heads=2, head_size=8, intermediate=48,
        context=context, tied=True,
    )  # fmt: skip
    model = new_decoder(config, seed).to(dtype)
    assert tokenizer.eos_id is not None
    model.eos_ids = (tokenizer.eos_id,)
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform, so that mistakes show
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


def make_rollouts(generator: torch.Generator, groups: int, size: int, vocab: int) -> list[Rollout]:
    """Rollouts of ragged lengths with random tokens and rewards; some with two turns, tool text and a step reward."""

    def ints(low: int, high: int, n: int) -> list[int]:
        return torch.randint(low, high, (n,), generator=generator).tolist()

    rollouts = []
    for group in range(groups):
        prompt = ints(3, vocab, ints(1, 9, 1)[0])
        for _ in range(size):
            transcript = Transcript()
            transcript.observe(prompt)
            steps = []
            for turn in range(ints(1, 3, 1)[0]):
                if turn:
                    steps.append((transcript.n_sampled, ints(0, 5, 1)[0] / 8))
                    transcript.observe(ints(3, vocab, ints(1, 5, 1)[0]))
                tokens = ints(3, vocab, ints(1, 8, 1)[0])
                logp = (-torch.rand(len(tokens), generator=generator) * 3).tolist()
                transcript.sample(Completion(0, tokens, logp, "", StopReason.EOS, 0))
            reward = torch.randint(0, 9, (1,), generator=generator).item() / 8  # exact in float32
            reward += sum(r for _, r in steps)
            rollouts.append(Rollout({"id": str(group)}, f"g{group}", [transcript], reward, steps=steps))
    return rollouts
