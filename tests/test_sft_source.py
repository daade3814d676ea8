"""Demonstrations: what is imitated, with which weight."""

from __future__ import annotations

import pytest
import torch
from test_play import CHATML

from posttrain.models.tokenizer import Tokenizer
from posttrain.sources.sft import Demonstrations, demonstrate
from posttrain.types import Transcript, UserError

CPU = torch.device("cpu")


def imitated(transcript: Transcript) -> list[int]:
    return [transcript.tokens[i] for i in transcript.scored.tolist()]


def test_response_and_its_end_are_imitated_and_the_prompt_is_not(tokenizer: Tokenizer) -> None:
    transcript = demonstrate({"id": "a", "prompt": "1+1=", "response": "2"}, tokenizer, (1,), 64)
    assert imitated(transcript) == [*tokenizer.encode("2"), 1]
    assert transcript.tokens == [*tokenizer.encode("1+1=", start=True), *tokenizer.encode("2"), 1]


def test_without_a_mask_everything_after_the_first_token_is_imitated(tokenizer: Tokenizer) -> None:
    transcript = demonstrate({"id": "a", "prompt": "1+1=", "response": "2"}, tokenizer, (1,), 64, mask_prompt=False)
    assert transcript.scored.tolist() == list(range(1, len(transcript)))


def test_assistant_turns_of_a_chat_are_imitated_up_to_their_end_token() -> None:
    tokenizer = Tokenizer.train(["hello there you"], 300, special=("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = CHATML
    (end,) = tokenizer.encode("<|im_end|>")
    messages = [
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"},
        {"role": "user", "content": "you"}, {"role": "assistant", "content": "too"},
    ]  # fmt: skip
    transcript = demonstrate({"id": "a", "messages": messages}, tokenizer, (end,), 200)
    assert imitated(transcript) == [*tokenizer.encode("there"), end, *tokenizer.encode("too"), end]
    assert tokenizer.decode(transcript.tokens) == tokenizer.render(messages, generation=False)


def test_row_with_nothing_to_learn_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="row 'a' has nothing to learn"):
        demonstrate({"id": "a", "prompt": "", "response": "2"}, tokenizer, (1,), 64)


def test_row_longer_than_the_context_is_refused_and_not_cut(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="row 'a' has 12 tokens.*8"):
        demonstrate({"id": "a", "prompt": "1+1=" * 2, "response": "222"}, tokenizer, (1,), 8)


def rows(tokenizer: Tokenizer, count: int) -> list[Transcript]:
    return [
        demonstrate({"id": str(i), "prompt": f"{i}+1=", "response": "2" * (1 + i % 5)}, tokenizer, (1,), 64)
        for i in range(count)
    ]


@pytest.mark.parametrize("budget", [5, 17, 10_000])
def test_every_token_of_a_step_weighs_the_same_however_it_is_cut(tokenizer: Tokenizer, budget: int) -> None:
    source = Demonstrations(rows(tokenizer, 10), 4, budget, 0, CPU)
    for number in (1, 2, 3):  # the last one is short
        (build,) = source.produce(number).updates
        weight = torch.cat([b.weight for b in build()])
        assert weight.unique().numel() == 1 and weight.sum().item() == pytest.approx(1.0)


def test_every_row_comes_once_per_epoch_in_a_new_order(tokenizer: Tokenizer) -> None:
    source = Demonstrations(rows(tokenizer, 10), 4, 10_000, 0, CPU)

    def epoch(first: int) -> list[tuple[int, ...]]:
        batches = [b for n in range(first, first + 3) for b in source.produce(n).updates[0]()]
        return [
            tuple(b.layout.tokens[s : s + n].tolist())
            for b in batches
            for s, n in zip(b.layout.start, b.layout.length, strict=True)
        ]

    assert source.steps_per_epoch == 3 and len(epoch(1)) == 10
    assert sorted(epoch(1)) == sorted(epoch(4)) and epoch(1) != epoch(4)
