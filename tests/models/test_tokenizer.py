"""Tokenizers and chat templates, held against transformers."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from places import DATA

from posttrain.core.types import UserError
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer

DATA = DATA / "models"
CHECKPOINTS = ("stories260K", "gsm8k-5m")
SPECIAL = ("<|im_start|>", "<|im_end|>")
CORPUS = [
    "Debby had 32 pieces of candy, and ate 17 of them. How many are left?\nAnswer: 32 - 17 = 15.",
    "  Two spaces, a tab\tand 1,234.5 kg; naïve café, 北京, π ≈ 3.14159!",
    "def add(a, b):\n    return a + b\n",
] * 5
TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "word",
    " word",
    "\n\nnew lines\n",
    "a<|eos|>b",
    "<s> x </s>",
    "emoji 🙂🙃",
    "12 + 30 = 42",
]
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}\n"
    "{% if tools is not none %}{{ raise_exception('no tools') }}{% endif %}\n"
    "{% for message in loop_messages %}\n"
    "    {% if message['role'] == 'skip' %}{% continue %}{% endif %}\n"
    "    {% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' %}\n"
    "    {% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}\n"
    "    {{- content }}\n"
    "{% endfor %}\n"
    "{{- messages[0] | tojson }}{{ pad_token }}{{ strftime_now('%Y') }}\n"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}\n"
)
MESSAGES = [
    {"role": "system", "content": 'Be brief & <kind>. "Yes", naïve'},
    {"role": "user", "content": "  What is 2 + 2?\n"},
    {"role": "skip", "content": "never mind"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
]


def checkpoint(name: str) -> Path:
    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is absent")
    return DATA / name


def describe(tokenizer: Tokenizer, **config: object) -> Tokenizer:
    """The same tokenizer under a changed tokenizer_config.json."""
    return Tokenizer(tokenizer.backend, {**tokenizer.config, **config}, tokenizer.chat_template)


def assert_equal_to_transformers(ours: Tokenizer, theirs: transformers.PreTrainedTokenizerBase) -> None:
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        ids = theirs.encode(text)
        assert ours.encode(text, start=True) == ids
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert (ours.eos_id, ours.bos_id, ours.pad_id) == (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id)


def test_byte_level_checkpoint_is_equal_to_transformers() -> None:
    folder = checkpoint("gsm8k-5m")
    assert_equal_to_transformers(Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder))


def test_sentencepiece_checkpoint_is_equal_to_transformers_at_the_start_of_a_context() -> None:
    folder = checkpoint("stories260K")
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        if not text.startswith("<s>"):
            assert ours.encode(text, start=True) == theirs.encode(text)
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.vocab_size == len(theirs) == 512
    assert (ours.eos_id, ours.bos_id, ours.pad_id) == (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id)


def test_a_continuation_neither_invents_nor_loses_its_leading_space() -> None:
    tokenizer = Tokenizer.load(checkpoint("stories260K"))
    prompt, reply = "Once upon", " a time, there was"
    tokens = tokenizer.encode(prompt, start=True)
    assert tokenizer.decode(tokens) == "<s> Once upon"
    whole = tokenizer.encode(prompt + reply, start=True)
    assert whole[: len(tokens)] == tokens
    assert tokenizer.decode(whole[len(tokens) :]) == reply
    assert tokenizer.encode(reply) == whole[len(tokens) :]
    for text in (*CORPUS[:3], " a", "a", "</s>a", "<information> x</information>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_rendered_prompt_gets_its_beginning_token_once() -> None:
    tokenizer = Tokenizer.load(checkpoint("stories260K"))
    assert tokenizer.encode("<s>Hello", start=True).count(1) == 1
    assert tokenizer.encode("", start=True) == [1]


@pytest.mark.parametrize("kind", ["bpe", "characters"])
def test_a_trained_tokenizer_is_equal_to_transformers_beside_any_model(kind: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(CORPUS, 400, kind, SPECIAL)
    tokenizer.chat_template = CHATML
    sizes: dict[str, Any] = {
        "hidden": 8,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "head_size": 4,
        "intermediate": 8,
        "context": 64,
    }
    # transformers takes the model's type into account: llama, qwen3 and qwen2, beside which it knows BPE only
    families: list[dict[str, Any]] = [{}, {"qk_norm": True}, {"qkv_bias": True}]
    for changes in families[: 3 if kind == "bpe" else 2]:
        model = new_decoder(DecoderConfig(vocab=tokenizer.vocab_size, **sizes, **changes), seed=0)
        save_model(model, tmp_path, tokenizer)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert_equal_to_transformers(tokenizer, theirs)
        assert theirs.get_vocab() == tokenizer.backend.get_vocab() and len(theirs) == tokenizer.vocab_size
        assert theirs.chat_template == CHATML
        again = Tokenizer.load(tmp_path)
        assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
        assert again.chat_template == CHATML and again.config == tokenizer.config
        assert load_model(tmp_path).eos_ids == (tokenizer.eos_id,)


@pytest.mark.parametrize("kind", ["bpe", "characters"])
def test_training_is_deterministic_and_places_special_tokens_first(kind: Any) -> None:
    one, other = (Tokenizer.train(iter(CORPUS), 400, kind, SPECIAL) for _ in range(2))
    assert one.backend.to_str() == other.backend.to_str()
    assert (one.pad_id, one.eos_id, one.bos_id) == (0, 1, None)
    first = 3 if kind == "characters" else 2
    assert one.encode("<|im_start|><|im_end|>") == [first, first + 1]
    assert one.vocab_size <= 400


def test_characters_are_one_token_each_and_unknown_ones_are_visible() -> None:
    tokenizer = Tokenizer.train(["abc\n 123"], 100, "characters")
    assert len(tokenizer.encode("ab\n12 c")) == 7
    assert tokenizer.decode(tokenizer.encode("abz")) == "ab<|unk|>"
    assert Tokenizer.train(["aaabbc"], 5, "characters").encode("abc") == [3, 4, 2]


def test_digits_are_single_tokens() -> None:
    tokenizer = Tokenizer.train(["1234 1234 1234"] * 20, 300)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1234")] == ["1", "2", "3", "4"]


def test_a_vocabulary_too_small_is_refused() -> None:
    kind: Any
    for kind, vocab in (("bpe", 200), ("characters", 3)):
        with pytest.raises(UserError, match="special tokens need"):
            Tokenizer.train(CORPUS, vocab, kind)
    with pytest.raises(UserError, match='"bpe" or "characters"'):
        Tokenizer.train(CORPUS, 300, kind + "s")


BYTES = Tokenizer.train(CORPUS, 400, "bpe", SPECIAL)
CHARACTERS = Tokenizer.train(CORPUS, 400, "characters", SPECIAL)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text())
def test_every_text_round_trips_through_bytes(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text)) == text


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([*sorted(set("".join(CORPUS))), "<|eos|>", "<|im_end|>"])))
def test_every_known_character_round_trips(characters: list[str]) -> None:
    text = "".join(characters)
    assert CHARACTERS.decode(CHARACTERS.encode(text)) == text


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
@pytest.mark.parametrize("generation", [True, False])
def test_chat_templates_render_as_in_transformers(template: str, generation: bool, tmp_path: Path) -> None:
    tokenizer = describe(BYTES, bos_token="<|im_start|>")
    tokenizer.chat_template = template
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=generation)
    assert tokenizer.render(MESSAGES, generation) == expected
    assert Tokenizer.load(tmp_path).render(MESSAGES, generation) == expected


@pytest.mark.parametrize(
    "stored", [CHATML, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]]
)
def test_a_template_in_the_configuration_is_found(stored: object, tmp_path: Path) -> None:
    describe(BYTES, chat_template=stored, eos_token={"content": "<|im_end|>", "lstrip": False}).save(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.chat_template == CHATML and tokenizer.eos_id == BYTES.encode("<|im_end|>")[0]


def test_templates_fail_in_one_line_and_cannot_leave_the_sandbox() -> None:
    tokenizer = describe(BYTES)
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.render(MESSAGES)
    for template, problem in (
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{% if %}", "cannot render"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(UserError, match=problem):
            tokenizer.render(MESSAGES)


def test_a_stored_length_limit_does_not_cut_texts(tmp_path: Path) -> None:
    BYTES.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps({**json.loads(file.read_text()), "truncation": truncation}))
    assert Tokenizer.load(tmp_path).encode(CORPUS[0]) == BYTES.encode(CORPUS[0])


def test_older_checkpoints_without_tokenizer_json_are_converted(tmp_path: Path) -> None:
    BYTES.save(tmp_path / "new")
    model = json.loads((tmp_path / "new" / "tokenizer.json").read_text())["model"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (old / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (old / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|eos|>"}')
    tokenizer = Tokenizer.load(old)
    theirs = transformers.AutoTokenizer.from_pretrained(old)
    assert tokenizer.encode("two words") == theirs.encode("two words")
    assert tokenizer.eos_id == 1
    tokenizer.save(tmp_path / "again")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "again").encode("a b") == tokenizer.encode("a b")


def test_a_folder_without_a_sound_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} holds no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_can_be_sent_to_another_process() -> None:
    again = pickle.loads(pickle.dumps(describe(BYTES)))
    assert again.encode(CORPUS[0]) == BYTES.encode(CORPUS[0])


def test_importing_the_module_imports_no_heavy_library() -> None:
    code = (
        "import sys, posttrain.models.tokenizer.tokenizer; "
        "print(sorted({'torch', 'transformers', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
