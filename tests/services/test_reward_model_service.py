"""A reward model scores what transformers scores, reads its own tokenizer, and no bit depends on what else is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHATML, tiny
from reward_models import write_reward_model

from posttrain.core.types import Invalid, UserError
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.kernels import build
from posttrain.models.reward_model import ScoreShape
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.services.reward_model_service import RewardModelService

TEXTS = ["a", "the cat", "1 + 1 = 2", "x" * 40, "hello <b> world", "9", "12345678", "so it goes"] * 3


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return write_reward_model(tmp_path / "reward", tiny(tokenizer, seed=5), tokenizer)


def asked(service: RewardModelService, contents: list[Any], at_once: bool = True) -> list[Any]:
    answers: dict[int, Any] = {}
    for id, content in enumerate(contents):
        service.submit(id, content)
        if not at_once:
            answers |= dict(service.poll())
    while len(answers) < len(contents):
        answers |= dict(service.poll())
    return [answers[id] for id in range(len(contents))]


def of_transformers(folder: Path, texts: list[list[int]]) -> list[float]:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [theirs(torch.tensor([text])).logits.item() for text in texts]


def test_scores_are_those_of_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    ours = asked(RewardModelService(folder), [*TEXTS, {"prompt": "1 + 1 =", "response": " 2"}])
    tokens = [tokenizer.encode(text, start=True) for text in TEXTS]
    tokens.append([*tokenizer.encode("1 + 1 =", start=True), *tokenizer.encode(" 2"), tokenizer.eos_id])
    expected = of_transformers(folder, tokens)
    assert ours == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.5


@pytest.mark.parametrize("compiled", [True, False])
def test_no_bit_of_a_score_depends_on_what_else_is_asked_or_when(folder: Path, compiled: bool) -> None:
    build.use(compiled)
    try:
        service = RewardModelService(folder)
        alone = asked(service, TEXTS, at_once=False)
        assert asked(service, TEXTS) == alone
        assert asked(service, TEXTS[::-1])[::-1] == alone
    finally:
        build.use(True)


def test_an_offset_is_added_and_said(tmp_path: Path, tokenizer: Tokenizer, folder: Path) -> None:
    centred = RewardModelService(
        write_reward_model(tmp_path / "centred", tiny(tokenizer, seed=5), tokenizer, offset=-2.5)
    )
    plain = RewardModelService(folder)
    for ours, raw in zip(asked(centred, TEXTS), asked(plain, TEXTS), strict=True):
        assert ours == pytest.approx(raw - 2.5, abs=1e-12)
    assert "-2.5 to every score (posttrain_score_offset)" in centred.description
    assert "posttrain_score_offset" not in plain.description and centred.identity != plain.identity


@pytest.mark.parametrize("cut", [False, True])
def test_a_response_that_was_cut_off_is_read_at_its_last_token(folder: Path, tokenizer: Tokenizer, cut: bool) -> None:
    [score] = asked(RewardModelService(folder), [{"prompt": "1 + 1 =", "response": " 2", "cut": cut}])
    tokens = [*tokenizer.encode("1 + 1 =", start=True), *tokenizer.encode(" 2")]
    ended = of_transformers(folder, [tokens, [*tokens, tokenizer.eos_id or 0]])
    assert score == pytest.approx(ended[not cut], abs=1e-5) and abs(ended[0] - ended[1]) > 1e-3


def test_text_is_read_with_the_reward_models_own_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    other = Tokenizer.train(["the cat sat on the mat and so it goes"] * 50, 280)
    assert other.encode("the cat") != tokenizer.encode("the cat")
    service = RewardModelService(write_reward_model(tmp_path / "other", tiny(other, seed=5), other))
    [score] = asked(service, ["the cat"])
    assert score == pytest.approx(
        of_transformers(tmp_path / "other", [other.encode("the cat", start=True)])[0], abs=1e-5
    )
    assert service.counts() == {"scored": 1.0, "tokens": len(other.encode("the cat", start=True)), "invalid": 0.0}


def test_messages_are_rendered_by_the_reward_models_template(
    tmp_path: Path, tokenizer: Tokenizer, folder: Path
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns = [messages[0], {"role": "assistant", "content": "c"}, *messages]
    [answer, one, plain] = asked(
        RewardModelService(folder), [{"messages": turns}, {"messages": messages}, {"prompt": "a", "response": "b"}]
    )
    assert one == plain, "a single message is the prompt of a row"
    assert isinstance(answer, Invalid) and "cannot read it" in answer.reason and "template" in answer.reason
    words = Tokenizer.train(["<|im_start|>user\nassistant\nab<|im_end|>"], 64, "characters")
    words.chat_template = CHATML
    service = RewardModelService(write_reward_model(tmp_path / "chat", tiny(words, context=128), words))
    [score] = asked(service, [{"messages": messages}])
    shown = words.encode(words.render(messages[:1], generation=True), start=True)
    ended = [*shown, *words.encode("b<|im_end|>\n"), words.eos_id]  # no token of this template ends a reply
    assert score == pytest.approx(of_transformers(tmp_path / "chat", [ended])[0], abs=1e-5)
    [score] = asked(service, [{"messages": messages, "cut": True}])
    assert score == pytest.approx(of_transformers(tmp_path / "chat", [ended[:-1]])[0], abs=1e-5)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (7, "is asked with"),
        ({"prompt": "a"}, "is asked with"),
        ({"prompt": "a", "response": 1}, "is asked with"),
        ({"messages": []}, "is asked with"),
        ("x" * 100, "reads 1 to 64"),
    ],
)
def test_what_cannot_be_scored_is_invalid_and_the_rest_is(folder: Path, content: Any, told: str) -> None:
    invalid, score = asked(RewardModelService(folder), [content, "fine"])
    assert isinstance(invalid, Invalid) and told in invalid.reason and isinstance(score, float)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_invalid(folder: Path, value: float) -> None:
    service = RewardModelService(folder)
    with torch.no_grad():
        service.model.score[0, 0] = value
    [answer] = asked(service, ["abc"])
    assert isinstance(answer, Invalid) and "gave" in answer.reason


def test_folders_that_are_no_reward_model_are_refused_in_one_line(
    tmp_path: Path, tokenizer: Tokenizer, folder: Path
) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(UserError) as error:
            RewardModelService(path)
        assert "\n" not in str(error.value)
        return str(error.value)

    save_model(tiny(tokenizer), tmp_path / "causal", tokenizer)
    assert "has no score head" in refused(tmp_path / "causal")
    config = json.loads((folder / "config.json").read_text())
    for change, told in (
        ({"model_type": "deberta-v2"}, "deberta-v2"),
        ({"posttrain_score_offset": "x"}, "must be a finite number"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        assert told in refused(folder)
    assert "nowhere" in refused(tmp_path / "nowhere")


def test_every_step_of_a_reply_has_the_score_of_the_text_up_to_it(folder: Path, tokenizer: Tokenizer) -> None:
    steps = ["1 + 1 = 2", "the cat", "so it goes"]
    [ours] = asked(RewardModelService(folder), [{"prompt": "a", "steps": steps}])
    tokens, upto = tokenizer.encode("a", start=True), []
    for step in steps:
        tokens = [*tokens, *tokenizer.encode(step + "\n")]
        upto.append(tokens)
    assert ours == pytest.approx(of_transformers(folder, upto), abs=1e-5)
    assert max(ours) - min(ours) > 0.1


def test_steps_are_read_as_they_were_in_training(folder: Path, tokenizer: Tokenizer) -> None:
    from posttrain.data.preference_examples import to_item
    from posttrain.training.sources.length_filter import TooLong
    from posttrain.training.sources.preferences import PreferenceExamples

    row = to_item({"prompt": "a", "steps": ["1 + 1 = 2", "the cat"], "labels": [1, 0]})
    assert row is not None
    made = PreferenceExamples(
        [{**row, "id": "x"}], tokenizer, (tokenizer.eos_id or 0,), 10**6, TooLong("refuse", 1000, print)
    )[0]
    assert made is not None
    [trained] = made.responses
    service = RewardModelService(folder)
    read = service._read({"prompt": "a", "steps": ["1 + 1 = 2", "the cat"]})
    assert not isinstance(read, Invalid) and read.tokens == trained.tokens
    assert read.at == [span.start + span.length - 1 for span in trained.spans if span.learned]


def test_text_between_the_prompt_and_the_steps_is_context(folder: Path) -> None:
    service = RewardModelService(folder)
    messages = [{"role": "user", "content": "a"}]
    begun, plain, whole = asked(
        service,
        [
            {"messages": messages, "begun": "12345678", "steps": ["the cat"]},
            {"messages": messages, "steps": ["the cat"]},
            {"prompt": "a", "steps": ["12345678", "the cat"]},
        ],
    )
    assert len(begun) == len(plain) == 1 and begun != plain and len(whole) == 2


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": "a", "steps": []},
        {"prompt": "a", "steps": ["b", " "]},
        {"prompt": "a", "steps": "b"},
        {"prompt": "a", "steps": ["b"], "response": "c"},
        {"steps": ["b"]},
        {"messages": [], "steps": ["b"]},
        {"messages": [{"role": "user", "content": "a"}], "begun": 1, "steps": ["b"]},
    ],
)
def test_a_question_about_steps_that_makes_no_sense_has_no_answer(folder: Path, content: dict[str, Any]) -> None:
    [answer] = asked(RewardModelService(folder), [content])
    assert isinstance(answer, Invalid) and '"steps": [...]' in answer.reason


def test_a_reward_model_that_pools_over_a_reply_scores_no_steps(folder: Path) -> None:
    service = RewardModelService(folder)
    service.model.shape = ScoreShape("mean")
    [answer] = asked(service, [{"prompt": "a", "steps": ["b"]}])
    assert isinstance(answer, Invalid) and "pools over whole replies, so it cannot score steps" in answer.reason
