"""A GGUF file is the model that it was written from."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import QUANTIZED, TEMPLATE, tiny, write_gguf

from posttrain.cli.main import main
from posttrain.core.types import UserError
from posttrain.models.adapters.adapter_folder import fingerprint
from posttrain.models.checkpoint_folder import load_backbone, load_model
from posttrain.models.gguf import gguf_file
from posttrain.models.hf.transformers_folder import load_backed
from posttrain.models.json_files import read_json
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_writer import checkpoint_tensors
from posttrain.models.tokenizer.gguf_tokenizer import SPLITS
from posttrain.models.tokenizer.tokenizer import Tokenizer

TEXTS = ["Once upon a time, 2024 ships sailed.", "the  end\n\n of it's day", "caf\u00e9 \u5317 \U0001f642"] * 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 320, special=["<|user|>", "<|assistant|>"])


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)


def own_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    from posttrain.core.batch import Layout

    count = len(ids)
    layout = Layout(ids, torch.arange(count), (0,), (count,), (-1,))
    with torch.no_grad():
        return model.head.logits(model.hidden(layout, torch.arange(count))).log_softmax(-1)


@pytest.mark.parametrize("quantized", QUANTIZED)
def test_weights_are_those_that_were_written(tmp_path: Path, quantized: str) -> None:
    written = write_gguf(tmp_path / "m.gguf", tiny("llama"), quantized)
    model = load_model(tmp_path / "m.gguf")
    assert isinstance(model, Decoder)
    found = dict(checkpoint_tensors(model))
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], weight) for name, weight in written.items())
    if quantized == "F32":
        assert all(torch.equal(weight, written[name]) for name, weight in tiny("llama").state_dict().items())


BIASED = {"attention_bias": True, "mlp_bias": True}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "tied", "more"),
    [("llama", True, {}), ("llama", False, BIASED), ("qwen2", True, {}), ("qwen3", False, {"rope_theta": 1e6})],
)
def test_log_probabilities_are_those_of_the_model_it_was_written_from(
    tmp_path: Path, kind: str, tied: bool, more: dict[str, Any]
) -> None:
    model, ids = tiny(kind, tied, **more), torch.arange(3, 43)
    write_gguf(tmp_path / "m.gguf", model)
    found = load_model(tmp_path / "m.gguf")
    assert isinstance(found, Decoder) and found.config.tied == tied and found.config.family == kind
    torch.testing.assert_close(own_logits(found, ids), logits(model, ids), atol=1e-4, rtol=0)


def test_model_through_transformers_is_the_native_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path, ids = tmp_path / "m.gguf", torch.arange(3, 43)
    write_gguf(path, tiny("llama"), "Q8_0", tokenizer)
    backed = load_backed(path, read_json(path / "config.json"))
    torch.testing.assert_close(own_logits(load_model(path), ids), own_logits(backed, ids), atol=1e-4, rtol=0)
    backed.save(tmp_path / "saved")
    torch.testing.assert_close(
        own_logits(load_model(tmp_path / "saved"), ids), own_logits(backed, ids), atol=1e-4, rtol=0
    )


def test_scaling_of_llama_3_is_recognized_by_its_divisors(tmp_path: Path) -> None:
    import gguf

    model, ids = tiny("llama", rope_parameters=LLAMA3, max_position_embeddings=131072), torch.arange(3, 43)
    plain = 500_000.0 ** -(np.arange(0, 64, 2) / 64)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    add = gguf.GGUFWriter.write_header_to_file

    def with_divisors(writer: gguf.GGUFWriter, *rest: Any) -> None:
        writer.add_tensor("rope_freqs.weight", divisors)
        add(writer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_divisors)
        write_gguf(tmp_path / "m.gguf", model)
        divisors = divisors * 1.01
        write_gguf(tmp_path / "other.gguf", model)
        divisors = divisors * 0
        write_gguf(tmp_path / "zeros.gguf", model)
    found = load_model(tmp_path / "m.gguf")
    torch.testing.assert_close(own_logits(found, ids), logits(model, ids), atol=1e-4, rtol=0)
    for name, message in (("other", "not the scaling of Llama 3"), ("zeros", "a divisor of 0")):
        with pytest.raises(UserError, match=message):
            load_model(tmp_path / f"{name}.gguf")


@pytest.mark.parametrize("how", [{"scaling.factor": 4.0}, {"scale_linear": 4.0}, {"scaling.factor": 0.0}, {}])
def test_linear_scaling_needs_no_type(tmp_path: Path, how: dict[str, float]) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("llama"), also={f"llama.rope.{key}": value for key, value in how.items()})
    scaling = load_model(tmp_path / "m.gguf").config.rope_scaling
    assert scaling == ({"rope_type": "linear", "factor": 4.0} if any(how.values()) else None)


def test_saved_checkpoint_is_a_folder_of_the_same_model(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny("llama", True), "Q8_0", tokenizer)
    model, read = load_model(path), Tokenizer.load(path)
    model.save(tmp_path / "saved")
    read.save(tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert again.eos_ids == model.eos_ids == (tokenizer.eos_id,)
    from transformers import AutoModelForCausalLM

    ids = torch.arange(3, 43)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    torch.testing.assert_close(own_logits(again, ids), logits(theirs, ids), atol=1e-4, rtol=0)
    assert Tokenizer.load(tmp_path / "saved").chat_template == read.chat_template == TEMPLATE


def test_tokenizer_is_the_one_it_was_written_from(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("llama"), tokenizer=tokenizer)
    found = Tokenizer.load(tmp_path / "m.gguf")
    for text in [*TEXTS, "<|user|>Hi<|eos|>", " 12 345"]:
        assert found.backend.encode(text).ids == tokenizer.backend.encode(text).ids
    assert (found.eos_id, found.pad_id, found.added) == (tokenizer.eos_id, tokenizer.pad_id, tokenizer.added)


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("qwen2", False)])
def test_texts_of_llama_3_begin_with_bos_where_no_flag_says_so(
    tmp_path: Path, tokenizer: Tokenizer, pre: str, begins: bool
) -> None:
    also = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 3}
    write_gguf(
        tmp_path / "m.gguf", tiny("llama"), tokenizer=tokenizer, also=also, without=("tokenizer.ggml.add_bos_token",)
    )
    assert (Tokenizer.load(tmp_path / "m.gguf").backend.encode("12").ids[0] == 3) == begins


def test_list_that_announces_a_text_as_long_as_the_disk_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    key = b"tokenizer.ggml.tokens"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 2**62)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    with file.open("r+b") as content:
        content.truncate(2**32)
    tracemalloc.start()
    with pytest.raises(UserError, match="the file ends before"):
        Tokenizer.load(file)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_known_split_loses_no_text(tmp_path: Path, tokenizer: Tokenizer, pre: str) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("llama"), tokenizer=tokenizer, also={"tokenizer.ggml.pre": pre})
    found = Tokenizer.load(tmp_path / "m.gguf").backend
    for text in TEXTS[:3]:
        assert found.decode(found.encode(text).ids) == text
    digits = [found.decode([id]) for id in found.encode("1234").ids]
    assert digits == list("1234")  # the vocabulary has no token of two


def test_turn_ends_where_the_file_names_a_token_for_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    also = {"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.bos_token_id": 3, "tokenizer.ggml.add_bos_token": True}
    write_gguf(tmp_path / "m.gguf", tiny("llama"), tokenizer=tokenizer, also=also)
    assert load_model(tmp_path / "m.gguf").eos_ids == (tokenizer.eos_id, 2)
    assert Tokenizer.load(tmp_path / "m.gguf").backend.encode("a").ids[0] == 3


def test_critic_and_fingerprint_of_a_file_are_those_of_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny("llama"))
    critic, score = load_backbone(path)
    assert score is None and critic.config.tied
    before, content = fingerprint(path), bytearray(path.read_bytes())
    write_gguf(tmp_path / "again.gguf", tiny("llama"), also={"general.name": "another name"})
    assert fingerprint(tmp_path / "again.gguf") == before
    content[-4] ^= 1
    path.write_bytes(content)
    assert fingerprint(path) != before


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "architecture": (
        {"general.architecture": "rwkv9"},
        (),
        "architecture 'rwkv9' cannot be read .* known are .*llama.*",
    ),
    "layers": ({}, ("llama.block_count",), "llama.block_count is missing; it must be a whole number"),
    "negative": ({"llama.embedding_length": "wide"}, (), "llama.embedding_length is 'wide'"),
    "sizes": ({"llama.feed_forward_length": 2**31 - 1}, (), "announces .* parameters"),
    "tensor": ({}, ("blk.1.ffn_up.weight",), "lacks tensors model.layers.1.mlp.up_proj.weight"),
    "embedding": ({}, ("token_embd.weight",), "has no token_embd.weight"),
    "parts": ({"split.count": 3}, (), "one of 3 parts .*llama-gguf-split --merge"),
    "scaling": ({"llama.rope.scaling.type": "yarn"}, (), "'yarn' cannot be read .* give the Hugging Face folder"),
    "experts": ({"llama.expert_count": 8}, (), "mixture of experts of architecture llama is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_file_that_is_no_supported_model_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    also, without, message = REFUSED[case]
    if "general.architecture" in also:
        import gguf

        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv9")
        writer.add_uint32("rwkv9.block_count", 1)
        for step in (
            writer.write_header_to_file,
            writer.write_kv_data_to_file,
            writer.write_tensors_to_file,
            writer.close,
        ):
            step()
    else:
        write_gguf(tmp_path / "m.gguf", tiny("llama"), also=also, without=without)
    with pytest.raises(UserError, match=message) as raised:
        load_model(tmp_path / "m.gguf")
    assert "\n" not in str(raised.value) and "m.gguf" in str(raised.value)


BEGINNING: dict[str, Any] = {
    "tokenizer.ggml.tokens": [":", "a", "a:"],
    "tokenizer.ggml.merges": ["a :"],
    "tokenizer.ggml.token_type": [1, 1, 1],
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.padding_token_id": 1,
}
NO_TOKENIZER: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "none": ({}, ("tokenizer.ggml.tokens",), "has no tokenizer"),
    "kind": ({"tokenizer.ggml.model": "rwkv"}, (), "tokenizer.ggml.model is 'rwkv'; supported are gpt2, llama"),
    "split": ({"tokenizer.ggml.pre": "odd"}, (), "tokenizer.ggml.pre is 'odd'; supported are .*qwen2"),
    "merges": ({"tokenizer.ggml.merges": ["absent together"]}, (), "its tokenizer cannot be built"),
    "id": ({"tokenizer.ggml.eos_token_id": 10**6}, (), "eos_token_id is 1000000; it must be a token id below"),
    "BOS": (BEGINNING, (), "its tokenizer cannot be built.*begins with ':'"),
    "twice": ({"tokenizer.ggml.tokens": ["a", "a"]}, (), "names a token twice"),
}


@pytest.mark.parametrize("case", NO_TOKENIZER)
def test_file_without_a_usable_tokenizer_is_refused(tmp_path: Path, tokenizer: Tokenizer, case: str) -> None:
    also, without, message = NO_TOKENIZER[case]
    write_gguf(tmp_path / "m.gguf", tiny("llama"), tokenizer=tokenizer, also=also, without=without)
    with pytest.raises(UserError, match=message):
        Tokenizer.load(tmp_path / "m.gguf")


def test_missing_package_is_named_with_its_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("llama"))
    monkeypatch.setattr(gguf_file, "installed", lambda library: False)
    with pytest.raises(UserError, match=r"gguf is not installed: pip install 'gguf"):
        load_model(tmp_path / "m.gguf")


def test_unknown_quantization_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny("llama"))
    content = path.read_bytes()
    at = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    for kind, name in ((24, "I8"), (77, "type 77")):
        path.write_bytes(content[:at] + struct.pack("<I", kind) + content[at + 4 :])
        with pytest.raises(UserError, match=f"output_norm.weight is stored as {name}, .* give a file of F32, .*Q4_K"):
            load_model(path)


def test_damaged_file_is_refused_wherever_it_is_damaged(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Cut short, or with numbers replaced by huge ones, at places all over the header."""
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny("llama"), "Q8_0", tokenizer)
    content = path.read_bytes()
    header = content.index(b"blk.1.ffn_norm.weight") + 60
    random = np.random.default_rng(3)
    refused = 0
    for number in range(150):
        at = int(random.integers(0, header))
        huge = random.choice([b"\xff" * 8, b"\xff" * 4, struct.pack("<Q", 2**40), struct.pack("<I", 9), b"\x00" * 8])
        path.write_bytes(content[:at] if number % 5 == 0 else content[:at] + bytes(huge) + content[at + len(huge) :])
        try:
            Tokenizer.load(path)
            load_model(path)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 75
    for other in (
        b"",
        b"GGUF",
        b"GGUF\x01\x00\x00\x00" + bytes(16),
        b"GGUF\x00\x00\x00\x03" + bytes(16),
        b"PK\x03\x04" * 9,
    ):
        path.write_bytes(other)
        with pytest.raises(UserError, match=r"m\.gguf"):
            load_model(path)


def test_end_of_a_run_with_adapters_on_a_gguf_file_tells_how_other_programs_get_them(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_gguf(Path("m.gguf"), tiny("llama"), "F32", tokenizer)
    Path("rows.jsonl").write_text('{"prompt": "ab", "response": "cd"}\n' * 4)
    common = ["--tasks", "rows.jsonl", "--steps", "1", "--rows", "2", "--no-chat"]
    assert main(["sft", "--model", "m.gguf", "--lora", "2", *common, "--out", "adapted"]) == 0
    assert "elsewhere   posttrain merge adapted --out MERGED, since PEFT and vLLM" in capsys.readouterr().out
    assert main(["merge", "adapted", "--out", "merged"]) == 0
    assert main(["sft", "--model", "merged", "--lora", "2", *common, "--out", "again"]) == 0
    assert "elsewhere" not in capsys.readouterr().out
