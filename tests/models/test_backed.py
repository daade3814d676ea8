"""Models behind transformers: every number is that of their own forward, whichever way a layout goes through them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from digit_tasks import TASKS, digits, goes_on_exactly
from models_table import BEGIN, DOCUMENT, END, rows
from rl_sources import ROW_KINDS
from safetensors.torch import load_file, save_file
from sampled import complete, ragged
from tiny_models import DROPPING, KINDS, Folders, InDouble, make, opened
from torch import Tensor
from trees import grown
from update_cases import ROWS, WORDS, board, credit, feed, new_case, old_of

import posttrain
from posttrain.algorithms.policy import Algorithm, PolicyObjective
from posttrain.core.batch import Layout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Sampling, UserError
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.local.backed_engine import BackedEngine
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.local.uncached_engine import UncachedEngine
from posttrain.engines.open_engine import open_engine
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.hf import transformers_folder
from posttrain.models.hf.backed import Backed, _rows_of
from posttrain.models.hf.backed_writer import stored_tensors
from posttrain.models.hf.token_mixing import NAME
from posttrain.models.losses.likelihood import token_logp, token_logp_entropy
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_writer import checkpoint_tensors, save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.packing import collate, split_microbatches

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return Folders(tmp_path_factory.mktemp("models"), make, vocab_size=WORDS.vocab_size)


def alone(model: Backed, transcript: Transcript) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) of the scored tokens by the model's own forward, one sequence at a time."""
    tokens = torch.tensor([transcript.tokens])
    logs = model.inner(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    at = transcript.scored - 1
    return logs[at, tokens[0, transcript.scored]], entropy[at]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_entropies_and_gradients_are_those_of_each_transcript_alone(
    kind: str, folders: Callable[[str], Path]
) -> None:
    model, within = opened(folders(kind), torch.float64), 1e-9
    assert model.way == KINDS[kind][0]
    with InDouble():
        compared(model, within)


def compared(model: Backed, within: float) -> None:
    for seed, budget in ((0, 30), (1, 7)):
        transcripts = grown(seed, 2, 3)
        weights = [torch.linspace(-1, 1 + i, t.n_scored, dtype=torch.float64) for i, t in enumerate(transcripts)]
        way, attention = model.way, model.attention
        model.attend("eager")
        plain = torch.zeros((), dtype=torch.float64)
        for transcript, weight in zip(transcripts, weights, strict=True):
            logp, entropy = alone(model, transcript)
            plain = plain + (logp * weight).sum() + 0.3 * (entropy * weight.square()).sum()
        parameters = [p for p in model.parameters()]
        expected = torch.autograd.grad(plain, parameters, allow_unused=True)
        model.attend(attention)
        total = torch.zeros((), dtype=torch.float64)
        for index in split_microbatches([[t] for t in transcripts], budget):
            batch = collate(
                [[transcripts[i]] for i in index], index, weight=torch.ones(len(transcripts), dtype=torch.float64),
                fields={"advantage": weights},
            )  # fmt: skip
            assert batch.advantage is not None and model.way == way
            hidden = model.hidden(batch.layout, batch.at)
            logp, entropy = token_logp_entropy(hidden, model.head, batch.target)
            total = total + (logp * batch.advantage).sum() + 0.3 * (entropy * batch.advantage.square()).sum()
        assert abs(total.item() - plain.item()) < within * max(1.0, abs(plain.item()))
        for own, other in zip(torch.autograd.grad(total, parameters, allow_unused=True), expected, strict=True):
            own, other = (torch.zeros(1) if x is None else x for x in (own, other))
            assert (own - other).abs().max() < within * max(1.0, other.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_computed_twice_have_the_same_gradients_and_keep_less(
    kind: str, folders: Callable[[str], Path]
) -> None:
    model, transcripts = opened(folders(kind)), grown(0, 3, 3)
    batch = collate([[t] for t in transcripts], range(len(transcripts)), weight=torch.ones(len(transcripts)))
    found, kept = [], []
    for room in (math.inf, 0.0):
        model.activation_room, total = room, 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logp = token_logp(model.hidden(batch.layout, batch.at), model.head, batch.target)
        kept.append(total)
        found.append(torch.autograd.grad(logp.sum(), list(model.parameters()), allow_unused=True))
    assert kept[1] < 0.7 * kept[0] and model.kept_per_token > 4 * 32 * 2
    assert not any(m.training for m in model.inner.modules())
    for one, two in zip(*found, strict=True):
        assert (one is None) == (two is None)
        assert one is None or two is None or torch.allclose(one, two, atol=1e-5 * float(one.abs().max()))


@pytest.mark.parametrize("kind", DROPPING)
def test_nothing_is_dropped_out_where_layers_are_computed_twice(kind: str, folders: Callable[[str], Path]) -> None:
    model, transcripts = opened(folders(kind)), grown(0, 3, 3)
    batch = collate([[t] for t in transcripts], range(len(transcripts)), weight=torch.ones(len(transcripts)))
    found = []
    for room in (math.inf, 0.0):
        model.activation_room = room
        logp = token_logp(model.hidden(batch.layout, batch.at), model.head, batch.target)
        gradients = torch.autograd.grad(logp.sum(), list(model.parameters()), allow_unused=True)
        found.append([logp.detach(), *(g for g in gradients if g is not None)])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5 * float(one.abs().max()))


@pytest.mark.parametrize("row", ["ppo", "sac"])
def test_critic_of_a_backed_model_learns(row: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    start = make("granite", tmp_path / "start", vocab_size=tokenizer.vocab_size)
    tokenizer.save(start)
    run = posttrain.rl(
        TASKS, digits, model=str(start), algorithm=row, prompts=3, group=2, max_tokens=4, lr=1e-3, threads=1, steps=2,
        env_workers=0, quiet=True, out=str(tmp_path / "run"), save_every=2, critic_warmup=0,
    )  # fmt: skip
    assert len(run.metrics) == 2 and run.metrics[1]["grad_norm/critic"] > 0


@pytest.mark.parametrize("seed", range(20))
def test_each_wanted_token_stands_in_a_row_behind_its_own_ancestors_and_nothing_else(seed: int) -> None:
    draw = np.random.default_rng(seed)
    length = draw.integers(1, 7, 8).tolist()
    prefix = [-1, *(int(draw.integers(-1, k)) for k in range(1, 8))]
    start = np.cumsum([0, *length])[:-1].tolist()
    tokens = torch.arange(sum(length))
    wanted = draw.choice(len(tokens), min(10, len(tokens)), replace=False)
    rows, place = _rows_of(Layout(tokens, tokens, tuple(start), tuple(length), tuple(prefix)), wanted)
    assert [len(row) for row in rows] == sorted((len(row) for row in rows), reverse=True)
    begins = np.cumsum([0, *(len(row) for row in rows)])
    for token, at in zip(wanted.tolist(), place.tolist(), strict=True):
        k = max(k for k in range(8) if start[k] <= token)
        expected = list(range(start[k], token + 1))
        while (k := prefix[k]) >= 0:
            expected = [*range(start[k], start[k] + length[k]), *expected]
        row = int(np.searchsorted(begins, at, side="right")) - 1
        assert rows[row][: at - begins[row] + 1].tolist() == expected


def test_biases_of_experts_are_not_decayed(folders: Callable[[str], Path]) -> None:
    model = opened(folders("gpt_oss"))
    learner = LocalLearner(model, Optimization(lr=0.1, weight_decay=0.5))
    decayed = {id(p) for group in learner.optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert {n for n, p in model.named_parameters() if id(p) in decayed} == {
        n for n, p in model.named_parameters() if p.ndim >= 2 and not n.endswith("bias")
    }


def test_texts_for_which_longrope_would_change_its_angles_are_too_long(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    make("phi3", tmp_path, rope_parameters={**rope, "factor": 16.0}, original_max_position_embeddings=16)
    assert opened(tmp_path).config.context == 16


def test_no_token_asked_for_is_no_state(folders: Callable[[str], Path]) -> None:
    layout = Layout(torch.arange(3, 8), torch.arange(5), (0,), (5,), (-1,))
    for kind in ("qwen3", "mamba2"):
        assert opened(folders(kind)).hidden(layout, torch.zeros(0, dtype=torch.int64)).shape == (0, 32)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gemma3_text", "mamba2", "phi"])
def test_saved_folder_opens_here_and_in_transformers_with_equal_logits(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    model = opened(folders(kind))
    model.eos_ids, model.generation = (5, 7), {"top_k": 20}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.save(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    again, tokens = load_model(tmp_path), torch.arange(3, 15)
    assert isinstance(again, Backed) and again.eos_ids == (5, 7) and again.generation["top_k"] == 20
    layout = Layout(tokens, torch.arange(12), (0,), (12,), (-1,))
    with torch.no_grad():
        wanted = theirs.eval()(input_ids=tokens[None]).logits[0]
        for one in (model, again):
            assert torch.allclose(one.head.logits(one.hidden(layout, torch.arange(12))), wanted, atol=1e-4)
    stored = load_file(tmp_path / "model.safetensors")
    named = dict(stored_tensors(model))
    tied = {name for name in named if name not in stored}
    assert tied <= {"lm_head.weight"} and all(torch.equal(named[name], tensor) for name, tensor in stored.items())


def stir_buffers(model: Backed) -> list[str]:
    """Change what a checkpoint holds besides parameters; returns the names."""
    stored, draw = model.inner.state_dict().keys(), torch.Generator().manual_seed(0)
    found = {name: buffer for name, buffer in model.inner.named_buffers() if name in stored}
    for buffer in found.values():
        buffer.uniform_(0.3, 1.5, generator=draw)
    return list(found)


@pytest.mark.parametrize(
    ("kind", "name"), [("deepseek_v3", "e_score_correction_bias"), ("gemma4_text", "layer_scalar")]
)
def test_what_a_checkpoint_holds_besides_parameters_is_handed_over_with_them(
    kind: str, name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    model = opened(folders(kind))
    assert any(place.endswith(name) for place in stir_buffers(model))
    model.save(tmp_path)
    named, stored = dict(stored_tensors(model)), load_file(tmp_path / "model.safetensors")
    assert named.keys() - stored.keys() <= {"lm_head.weight"}
    assert all(torch.equal(named[place], tensor) for place, tensor in stored.items())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Decoder], Backed]:
    place = tmp_path_factory.mktemp("qwen")

    def twin(model: Decoder) -> Backed:
        save_model(model, place)
        found = opened(place, torch.float64)
        assert found.way == "flat"

        def tables(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            """Both compute these in float32, and not to the same last bit."""
            cos, sin = (table[None, :, 0] for table in model.rotary(position_ids[0], x.dtype))
            half = sin.shape[-1] // 2
            return cos, torch.cat((sin[..., half:], sin[..., half:]), -1)

        found.inner.model.rotary_emb.forward = tables
        return found

    return twin


@pytest.mark.parametrize(
    "row",
    [row if row.name in ROW_KINDS - {"trpo"} else pytest.param(row, marks=pytest.mark.long) for row in ROWS],
    ids=lambda row: row.name,
)
def test_native_and_backed_learn_alike_with_every_row(
    row: Algorithm, qwen: Callable[[Decoder], Backed], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = Backed.hidden

    def in_double(self: Backed, layout: Layout, at: Tensor) -> Tensor:
        with InDouble(angles=False):
            return hidden(self, layout, at)

    monkeypatch.setattr(Backed, "hidden", in_double)
    case = new_case(row)
    own = case.learner
    assert isinstance(own.model, Decoder)
    how = Optimization(lr=1e-3, eps=1e-3, weight_decay=0.1, trust_region=row.trust_region, critic_follow=0.1)
    others = {name: qwen(model) for name, model in own.others.items() if isinstance(model, Decoder)}
    native = LocalLearner(own.model, how, others=own.others, critic=own.critic, teaching=own.teaching)
    critic = None if own.critic is None else _copied(own.critic)
    backed = LocalLearner(qwen(own.model), how, others=others, critic=critic, teaching=own.teaching)
    found, objective = credit(row, board(case, case.rollouts), old_of(case, case.rollouts)), PolicyObjective(row)
    for step in range(5):
        cuts = [range(step, len(case.rollouts)), range(step)]
        batches = feed(case, case.rollouts, found, [list(cut) for cut in cuts])
        ours = native.update(batches, objective)
        theirs = backed.update(batches, objective)
        assert ours.keys() == theirs.keys()
        for name, (total, count) in ours.items():
            assert theirs[name][1] == count and theirs[name][0] == pytest.approx(total, rel=1e-9, abs=1e-9), name
    weights = dict(stored_tensors(backed.model))  # type: ignore[arg-type]
    for name, tensor in checkpoint_tensors(own.model):
        assert (weights[name] - tensor).abs().max() < 1e-9, name


def _copied(module: Any) -> Any:
    import copy

    return copy.deepcopy(module)


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe"])
def test_backed_model_learns_and_goes_on_exactly(kind: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    start = make(kind, tmp_path / "start", vocab_size=tokenizer.vocab_size)
    tokenizer.save(start)
    goes_on_exactly(
        tmp_path, 4, 2, model=str(start), prompts=3, group=4, max_tokens=5, lr=5e-3, threads=1, env_workers=0,
        save_every=2, quiet=True, kl=0.01, minibatches=2,
    )  # fmt: skip
    last = "checkpoints/step-000004"
    stored = [load_file(tmp_path / name / last / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(stored[1][name], tensor) for name, tensor in stored[0].items())


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder with a decoder"),
        ({"model_type": "nobody"}, "model_type .nobody. is unknown to posttrain and to the installed transformers"),
        ({"model_type": "nobody", "auto_map": {"AutoModelForCausalLM": "m.M"}}, "POSTTRAIN_TRUST_REMOTE_CODE=1"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized weights cannot be trained"),
        ({"num_hidden_layers": 3}, "lacks tensors"),
        ({"num_hidden_layers": 1}, "holds unknown tensors"),
        ({"num_hidden_layers": 10**5}, "num_hidden_layers is 100000; it must be a whole number from 0 to"),
        ({"hidden_size": 64}, r"has shape \[.*\], config.json says \[.*64"),
        (
            {"vocab_size": 2**40},
            "announces 35,184,.* parameters, 131,.* GiB of weights, and .* are free: correct the sizes",
        ),
        ({"sliding_window": None}, "the forward of Gemma3ForCausalLM fails, correct config.json: .*sliding_window"),
    ],
)
def test_folder_that_is_not_what_it_says_is_refused_in_one_line(
    change: dict[str, Any], message: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    for file in folders("gemma3_text").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | change
    if "num_hidden_layers" in change:
        config["layer_types"] = ["full_attention"] * change["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_mean_nothing_without_scales_are_refused(
    dtype: torch.dtype, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    for file in folders("phi").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.fc1.weight"
    save_file({**stored, name: stored[name].to(dtype)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"{name} is stored as .*: give the unquantized checkpoint"):
        load_model(tmp_path)


def test_weights_that_are_not_finite_are_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    for file in folders("phi").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.embed_tokens.weight"][3, 1] = float("nan")
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="embed_tokens.weight has numbers that are not finite"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma2"])
def test_numbers_that_are_not_the_models_own_are_refused_and_the_suspect_is_named(
    kind: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Backed.hidden
    with monkeypatch.context() as patch:
        patch.setattr(Backed, "hidden", lambda *a: forward(*a) * 1.001)
        with pytest.raises(UserError, match="nats off its own forward; the suspect is its attention"):
            opened(folders(kind))
    with monkeypatch.context() as patch:
        patch.setattr(transformers_folder, "_head_of", lambda *a: (1.01, None))
        with pytest.raises(UserError, match="nats off its own forward; the suspect is its output head"):
            opened(folders(kind))


def test_native_families_with_what_is_not_native_go_through_transformers(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    make("qwen3", tmp_path, rope_parameters=scaling)
    model = load_model(tmp_path)
    assert isinstance(model, Backed) and model.way == "flat"


def test_context_is_what_the_configuration_calls_it(folders: Callable[[str], Path]) -> None:
    assert opened(folders("gpt2")).config.context == 256
    assert re.fullmatch(r"\d+", str(opened(folders("mamba2")).config.context))
    assert tiny(WORDS).config.vocab == opened(folders("gpt2")).config.vocab


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7}, {"top_p": 0.8, "top_k": 12}, {"temperature": 0.0}])
def test_every_engine_samples_the_tokens_of_the_native_one(
    model: Decoder, tokenizer: Tokenizer, tmp_path: Path, how: dict[str, Any]
) -> None:
    save_model(model, tmp_path, tokenizer)
    prompts, sampling = ragged(20, **how)
    native = complete(LocalEngine(model, tokenizer, slots=8), prompts, sampling)
    for engine, within in (
        (UncachedEngine(model, tokenizer, slots=3), 1e-5),
        (BackedEngine(opened(tmp_path), tokenizer, slots=3), 1e-4),
        (BackedEngine(opened(tmp_path), tokenizer, slots=64), 1e-4),
    ):
        own = complete(engine, prompts, sampling)
        for id, completion in native.items():
            assert (own[id].tokens, own[id].text, own[id].stop) == (completion.tokens, completion.text, completion.stop)
            assert own[id].logp == pytest.approx(completion.logp, abs=within)


@pytest.mark.parametrize("kind", KINDS)
def test_engine_with_a_cache_samples_what_the_one_without_does(
    kind: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.engines.local.backed_engine.PREFILL", 12)
    model = opened(folders(kind))
    prompts = [[5, 6, 7], [5, 6, 7], [9, 4, 3, 8, 11], [20] * 12, [5, 6, 7], [13, 2, 30, 31, 9]]
    sampling = [Sampling(max_tokens=3 + 2 * n, seed=n) for n in range(len(prompts))]
    plain = complete(UncachedEngine(model, WORDS, slots=4), prompts, sampling)
    engine = BackedEngine(model, WORDS, slots=4)
    cached = complete(engine, prompts, sampling)
    for id, completion in plain.items():
        assert cached[id].tokens == completion.tokens
        assert cached[id].logp == pytest.approx(completion.logp, abs=2e-3)
    assert model.attention == (NAME if model.way == "flat" else model.rows_attention)


def test_prompts_are_filled_up_where_that_changes_nothing_and_nowhere_else(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = opened(folders("gpt2")), [[5, 6, 7], [9, 4, 3, 8, 11], [20, 3]]
    sampling = [Sampling(max_tokens=4, seed=n) for n in range(3)]
    plain = complete(UncachedEngine(model, WORDS), prompts, sampling)
    assert BackedEngine(model, WORDS)._pads
    forward = model.inner.base_model.forward

    def without_masks(
        input_ids: Tensor,
        past_key_values: Any = None,
        position_ids: Any = None,
        attention_mask: Any = None,
        **more: Any,
    ) -> Any:
        return forward(input_ids=input_ids, past_key_values=past_key_values, **more)

    monkeypatch.setattr(model.inner.base_model, "forward", without_masks)
    engine = BackedEngine(model, WORDS)
    cached = complete(engine, prompts, sampling)
    assert not engine._pads and not engine._cohorts, "nothing runs: no cache is held"
    for id, completion in plain.items():
        assert cached[id].tokens == completion.tokens
        assert cached[id].logp == pytest.approx(completion.logp, abs=1e-4)


KINDS_ELSEWHERE = [
    "granite",
    *(pytest.param(kind, marks=pytest.mark.long) for kind in ("gemma2", "deepseek_v3", "gemma4_text")),
]


@pytest.mark.parametrize("kind", KINDS_ELSEWHERE)
def test_engine_of_another_process_takes_over_weights_and_samples_alike(
    kind: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = opened(make(kind, tmp_path / kind, vocab_size=tokenizer.vocab_size))
    stir_buffers(model)
    prompts, sampling = ragged(6)
    with closing(open_engine("local", model, tokenizer, EngineOptions(8, replicas=1))) as pool:
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            pool.load(model, version)
            here = complete(BackedEngine(model, tokenizer), prompts, sampling)
            there = complete(pool, prompts, sampling)
            for id, completion in here.items():
                assert there[id].tokens == completion.tokens and there[id].version == version
                assert there[id].logp == pytest.approx(completion.logp, abs=1e-4)


def test_table_of_models_is_what_trying_them_gives() -> None:
    text = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0].splitlines()
    assert [line.split("`")[1] for line in text] == [kind for kind in KINDS if kind != "qwen3"]
    assert all(line.split("|")[2].strip() == KINDS[line.split("`")[1]][0] for line in text)
    assert set(rows(("granite", "gemma2"))) <= set(text)
