"""Demonstrations: what is imitated, with which weight, and which rows a step has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHATML
from row_files import refused, write_jsonl

from posttrain.core.transcripts import Mask, Transcript
from posttrain.core.types import UserError
from posttrain.data.chat_prompts import AsMessages
from posttrain.data.rows import load_rows
from posttrain.data.tasks import ENDLESS, Stream, order, to_tasks
from posttrain.data.tasks_from_rows import Conversion, question
from posttrain.envs.demonstration import demonstrate, is_empty
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.example_stream import steps_per_epoch
from posttrain.training.sources.length_filter import TooLong
from posttrain.training.sources.sft_source import Demonstrations, Transcripts

CPU = torch.device("cpu")
NEED = ("prompt", "response")


def imitated(transcript: Transcript) -> list[int]:
    return [transcript.tokens[i] for i in transcript.scored]


def test_response_and_its_end_are_imitated_and_the_prompt_is_not(tokenizer: Tokenizer) -> None:
    transcript = demonstrate({"id": "a", "prompt": "1+1=", "response": "2"}, tokenizer, (1,))
    assert imitated(transcript) == [*tokenizer.encode("2"), 1]
    assert transcript.tokens == [*tokenizer.encode("1+1=", start=True), *tokenizer.encode("2"), 1]


@pytest.mark.parametrize("mask", ["assistant", "last", "all"])
def test_a_response_that_was_cut_off_has_no_end_to_be_imitated(tokenizer: Tokenizer, mask: Mask) -> None:
    row = {"prompt": "ab", "response": "cde"}
    whole, cut = (demonstrate({**row, "response_stop": stop}, tokenizer, (1,), mask) for stop in ("eos", "length"))
    assert [*cut.tokens, 1] == whole.tokens
    assert cut.n_scored == whole.n_scored - 1


def test_without_a_mask_everything_after_the_first_token_is_imitated(tokenizer: Tokenizer) -> None:
    transcript = demonstrate({"id": "a", "prompt": "1+1=", "response": "2"}, tokenizer, (1,), mask="all")
    assert transcript.scored.tolist() == list(range(1, len(transcript)))
    text = demonstrate({"id": "a", "response": "1+1=2"}, tokenizer, (1,), mask="all")  # pretraining text
    assert text.tokens == transcript.tokens and imitated(text) == imitated(transcript)


def test_assistant_turns_of_a_chat_are_imitated_up_to_their_end_token() -> None:
    tokenizer = Tokenizer.train(["hello there you"], 300, special=("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = CHATML
    (end,) = tokenizer.encode("<|im_end|>")
    messages = [
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"},
        {"role": "user", "content": "you"}, {"role": "assistant", "content": "too"},
    ]  # fmt: skip
    transcript = demonstrate({"id": "a", "messages": messages}, tokenizer, (end,))
    assert imitated(transcript) == [*tokenizer.encode("there"), end, *tokenizer.encode("too"), end]
    assert tokenizer.decode(transcript.tokens) == tokenizer.render(messages, generation=False).removesuffix("\n")
    cut = demonstrate({"id": "a", "messages": messages}, tokenizer, (end,), length=len(transcript) - 3)
    assert cut.tokens == transcript.tokens[:-3] and imitated(cut)[:3] == imitated(transcript)[:3]


USER, ASSISTANT = ({"role": role, "content": text} for role, text in (("user", "hello"), ("assistant", "there")))
LAST = {"role": "assistant", "content": "too"}
TURNS = "\n\nHuman: hello\n\nAssistant: there\n\nHuman: hello\n\nAssistant:"


@pytest.mark.parametrize(
    ("row", "learned"),
    [
        ({"messages": [USER, ASSISTANT, USER, LAST]}, ["there", "too"]),
        ({"messages": [USER, {**ASSISTANT, "weight": 0}, USER, {**LAST, "weight": 1}]}, ["too"]),
        ({"messages": [USER, ASSISTANT, USER, {**LAST, "weight": 0}]}, ["there"]),
        ({"prompt": [USER, ASSISTANT, USER], "response": "too"}, ["too"]),
        ({"prompt": [USER, ASSISTANT, USER], "completion": [LAST]}, ["too"]),
        ({"prompt": [USER], "completion": [ASSISTANT, USER, LAST]}, ["there", "too"]),
        ({"prompt": TURNS, "response": " too"}, ["too"]),
    ],
)
def test_of_a_prompt_nothing_is_imitated_whoever_said_it(row: dict[str, Any], learned: list[str]) -> None:
    tokenizer = Tokenizer.train(["hello there you"], 300, special=("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = CHATML
    (end,) = tokenizer.encode("<|im_end|>")
    [task] = to_tasks([row], need=NEED).shown(AsMessages(answered=True))
    transcript = demonstrate(task, tokenizer, (end,))
    assert imitated(transcript) == [token for text in learned for token in [*tokenizer.encode(text), end]]
    whole = tokenizer.render([USER, ASSISTANT, USER, LAST], generation=False).removesuffix("\n")
    assert whole.startswith(tokenizer.decode(transcript.tokens)), "weights change nothing that is shown"


@pytest.mark.parametrize("row", [
    {"prompt": [USER, ASSISTANT, USER], "completion": [LAST]}, {"prompt": TURNS, "response": " too"},
    {"messages": [USER, ASSISTANT, USER, LAST]},
])  # fmt: skip
def test_of_the_whole_text_a_conversation_before_the_response_is_imitated_too(row: dict[str, Any]) -> None:
    tokenizer = Tokenizer.train(["hello there you"], 300, special=("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = CHATML
    (end,) = tokenizer.encode("<|im_end|>")
    [task] = to_tasks([row], need=NEED, whole=True).shown(AsMessages(answered=True, whole=True))
    transcript = demonstrate(task, tokenizer, (end,), "all")
    assert transcript.scored.tolist() == list(range(1, len(transcript)))
    [other] = to_tasks([row], need=NEED).shown(AsMessages(answered=True))
    assert demonstrate(other, tokenizer, (end,)).tokens == transcript.tokens


def test_a_prompt_is_held_out_whatever_its_turns_weigh() -> None:
    [shown], [weighed] = (
        [question(task) for task in to_tasks([{"messages": [USER, turn, USER, LAST]}], need=NEED)]
        for turn in (ASSISTANT, {**ASSISTANT, "weight": 0})
    )
    assert shown == weighed


@pytest.mark.parametrize("message", [{**ASSISTANT, "weight": 0.5}, {**USER, "weight": 0}, {**ASSISTANT, "weight": "1"}])
def test_a_weight_that_means_nothing_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="message 1: weight is .* give assistant turns 0"):
        list(to_tasks([{"messages": [message, USER, LAST]}], need=NEED))


@pytest.mark.parametrize("message", [{**ASSISTANT, "train": 0}, {**USER, "train": True}, {**ASSISTANT, "train": "no"}])
def test_a_mark_that_means_nothing_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="message 1: train is .* give assistant turns true or false"):
        list(to_tasks([{"messages": [message, USER, LAST]}], need=NEED))
    marked = {**USER, "train": False}, {**ASSISTANT, "train": False}, USER, {**LAST, "train": True}
    assert question(to_tasks([{"messages": list(marked)}], need=NEED)[0]) == question(
        {"messages": [USER, ASSISTANT, USER, LAST]}
    )


def rows(count: int, long: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Demonstrations of 6 to 10 tokens; the `long` ones have 40 more."""
    return [{"prompt": f"{i:02}+1=", "response": "2" * (1 + i % 5 + 40 * (i in long))} for i in range(count)]


def transcripts(
    tokenizer: Tokenizer, given: list[dict[str, Any]], context: int = 64, policy: Any = "skip", say: Any = print
) -> Transcripts:
    too_long = TooLong(policy, context, say)
    return Transcripts(to_tasks(given, need=NEED), tokenizer, (1,), tokenizer.vocab_size, too_long)


def test_row_that_cannot_be_learned_is_refused_with_its_place(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"response": "2"}, {"response": "3"}])
    tasks = to_tasks(load_rows(path), need=("response",))
    made = Transcripts(tasks, tokenizer, (1,), 64, TooLong("skip", 64, print), min_reward=0.5)
    refused(lambda: made[1], "a.jsonl:2: --min-reward needs recorded rollouts")


def test_of_a_text_without_a_prompt_all_is_learned_but_its_first_token(tokenizer: Tokenizer) -> None:
    tasks = to_tasks([{"response": "2 3"}], need=("response",))
    made = Transcripts(tasks, tokenizer, (1,), 64, TooLong("skip", 64, print))[0]
    assert made is not None
    [transcript] = made
    assert transcript.n_scored == len(transcript.tokens) - 1 == len(tokenizer.encode("2 3"))


def test_an_empty_reply_is_told_once_with_its_row_column_and_message(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["hello there"], 300, special=("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = CHATML
    ask, say = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}
    empty: dict[str, Any] = {"role": "assistant", "content": " "}
    marked = [[ask, empty | mark, ask, say] for mark in ({"train": False}, {"weight": 0})]
    chats = [[ask, say], *marked, [ask, say, ask, empty, ask, say], [ask, empty, ask, say]]
    said: list[str] = []
    write_jsonl(tmp_path / "t.jsonl", [{"messages": chat} for chat in chats])
    tasks = to_tasks(load_rows(str(tmp_path / "t.jsonl")), need=NEED)
    made = Transcripts(tasks, tokenizer, tokenizer.encode("<|im_end|>"), 600, TooLong("skip", 640, said.append))
    for place in range(3):
        made[place]
    assert said == []
    assert made[3] and made[4]
    assert is_empty(empty) and not is_empty(empty | {"reasoning_content": "so"})
    assert not is_empty({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]})
    (line,) = said
    assert "t.jsonl:4: column messages: message 4 is an empty reply" in line and '"train": false' in line
    last = Transcripts(tasks, tokenizer, tokenizer.encode("<|im_end|>"), 600, TooLong("skip", 640, said.append), "last")
    assert last[3] and len(said) == 1, "with --mask last it is context"


def test_tokens_that_the_model_does_not_know_are_refused(tokenizer: Tokenizer) -> None:
    made = Transcripts(to_tasks(rows(2), need=NEED), tokenizer, (1,), 5, TooLong("skip", 64, print))
    refused(lambda: made[0], "the model's vocabulary has 5")


@pytest.mark.parametrize("budget", [5, 17, 10_000])
def test_every_token_of_a_step_weighs_the_same_however_it_is_cut(tokenizer: Tokenizer, budget: int) -> None:
    source = Demonstrations(transcripts(tokenizer, rows(10)), 4, budget, 0, CPU)
    for number in (1, 2, 3):  # the last one is short
        (build,) = source.produce(number).updates
        weight = torch.cat([b.weight for b in build()])
        assert weight.unique().numel() == 1 and weight.sum().item() == pytest.approx(1.0)


def shown(source: Demonstrations, number: int) -> list[tuple[int, ...]]:
    """The fed tokens of each row of a step."""
    return [
        tuple(b.layout.tokens[s : s + n].tolist())
        for b in source.produce(number).updates[0]()
        for s, n in zip(b.layout.start, b.layout.length, strict=True)
    ]


def test_every_row_comes_once_per_epoch_in_a_new_order(tokenizer: Tokenizer) -> None:
    source = Demonstrations(transcripts(tokenizer, rows(10)), 4, 10_000, 0, CPU)
    first, second = ([row for n in range(k, k + 3) for row in shown(source, n)] for k in (1, 4))
    assert steps_per_epoch(source.items, source.rows) == 3 and len(first) == 10
    assert sorted(first) == sorted(second) and first != second


def test_rows_that_are_too_long_are_missing_from_their_step_and_no_other_changes(tokenizer: Tokenizer) -> None:
    said: list[str] = []
    long = (1, 4, 6, 7, 8)
    whole = Demonstrations(transcripts(tokenizer, rows(12, long)), 4, 10_000, 3, CPU)
    short = Demonstrations(transcripts(tokenizer, rows(12, long), 20, "skip", said.append), 4, 10_000, 3, CPU)
    for number in (1, 2, 3, 4, 5, 6):
        step = short.produce(number)
        assert shown(short, number) == [row for row in shown(whole, number) if len(row) < 20]
        assert step.stats["too_long"][0] == len(shown(whole, number)) - len(shown(short, number))
    assert len(said) == 3 and said[0].startswith("row ") and "tokens; the model's context holds 20" in said[0]


def test_a_row_as_long_as_the_context_is_neither_left_out_nor_cut(tokenizer: Tokenizer) -> None:
    [[whole]] = transcripts(tokenizer, rows(1))
    for policy in ("skip", "truncate", "refuse"):
        [[kept]] = transcripts(tokenizer, rows(1), len(whole), policy)
        assert kept.tokens == whole.tokens
    assert transcripts(tokenizer, rows(1), len(whole) - 1, "skip", lambda _: None)[0] is None


def test_step_depends_on_its_number_alone_whatever_was_made_before(tokenizer: Tokenizer) -> None:
    given = rows(12, (1, 4, 6, 7, 8))
    source = Demonstrations(transcripts(tokenizer, given, 20, "truncate"), 4, 10_000, 3, CPU)
    steps = [(source.produce(n).stats, shown(source, n)) for n in (1, 2, 3, 4, 5, 6)]
    for number in (5, 2):
        fresh = Demonstrations(transcripts(tokenizer, given, 20, "truncate"), 4, 10_000, 3, CPU)
        list(fresh.items)  # as an evaluation would
        assert (fresh.produce(number).stats, shown(fresh, number)) == steps[number - 1]


def test_step_of_which_nothing_fits_has_the_next_row_that_does(tokenizer: Tokenizer) -> None:
    visits = [int(place) for place in order(10, 0, 0)]
    long = tuple(visits[0:8])
    source = Demonstrations(transcripts(tokenizer, rows(10, long), 20), 4, 10_000, 0, CPU)
    last = shown(source, 3)
    assert shown(source, 1) == shown(source, 2) == [row for row in last if row in shown(source, 1)]
    assert len(shown(source, 1)) == 1 and len(last) == 2
    none = Demonstrations(transcripts(tokenizer, rows(10), 3), 4, 10_000, 0, CPU)
    refused(lambda: none.produce(1), "none of 10 rows fits")


def test_truncated_demonstrations_lose_their_end_and_their_last_token_does_not_end_them(tokenizer: Tokenizer) -> None:
    said: list[str] = []
    made = transcripts(tokenizer, rows(3, (1,)), 20, "truncate", said.append)
    whole = demonstrate(made.tasks[1], tokenizer, (1,))
    [cut] = made[1]
    assert cut.tokens == whole.tokens[:20] and cut.tokens[-1] != 1
    assert imitated(cut) == imitated(whole)[: len(imitated(cut))] and "is cut" in said[0]
    said.clear()
    assert transcripts(tokenizer, rows(3, (1,)), 4, "truncate", said.append)[1] is None and "left out" in said[0]


def test_long_rows_can_be_refused_before_the_first_step(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="row 2: the demonstration has 48 tokens.*holds 20: shorten it"):
        transcripts(tokenizer, rows(3, (1,)), 20, "refuse")


def test_transcripts_are_made_once_while_there_is_room(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.training.sources.example_stream.REMEMBERED", 20)
    made = transcripts(tokenizer, rows(10))
    firsts = [made[place] for place in range(10)]
    again = [made[place] for place in range(10)]
    assert [a is b for a, b in zip(firsts, again, strict=True)] == [True, True] + [False] * 8
    assert [t.tokens for [t] in firsts] == [t.tokens for [t] in again]


def test_rows_without_end_come_in_their_own_order(tokenizer: Tokenizer) -> None:
    stream = Stream(lambda: iter(rows(50)), Conversion(need=NEED))
    source = Demonstrations(Transcripts(stream, tokenizer, (1,), 64, TooLong("skip", 64, print)), 4, 10_000, 0, CPU)
    assert len(source.items) == ENDLESS
    every = [tuple(demonstrate(task, tokenizer, (1,)).tokens[:-1]) for task in to_tasks(rows(50), need=NEED)]
    assert sorted(shown(source, 3)) == sorted(every[8:12]) and sorted(shown(source, 1)) == sorted(every[:4])


def test_steps_are_numbered_and_their_order_is_of_the_seed_and_the_epoch(tokenizer: Tokenizer) -> None:
    def read(seed: int) -> list[list[int]]:
        source = Demonstrations(transcripts(tokenizer, rows(8)), 8, 10_000, seed, CPU)
        steps = [source.produce(number) for number in (1, 2)]
        assert [step.number for step in steps] == [1, 2]
        assert [step.tokens for step in steps] == [sum(t.n_scored for [t] in source.items)] * 2
        own = {id(source.items[place]): place for place in range(8)}
        found: list[list[int]] = []
        for step in steps:
            caught: list[Any] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    Demonstrations, "batches", lambda self, given, _, caught=caught: caught.extend(given) or []
                )
                step.updates[0]()
            found.append([own[id(t)] for t in caught])
        return found

    every = [*read(0), *read(1)]
    assert all(sorted(own) == list(range(8)) for own in every) and len(set(map(tuple, every))) == 4


def test_an_end_token_within_a_reply_is_imitated() -> None:
    class Text:
        eos_id = 10

        def encode(self, text: str, start: bool = False) -> list[int]:
            return [ord(c) for c in text]

        def render(self, messages: Sequence[Any], generation: bool = True, tools: Any = None) -> str:
            said = "".join(f"{message['role'][0]}:{message['content']}\n " for message in messages)
            return said + "a:" * generation

    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x\ny"}]
    transcript = demonstrate({"messages": messages}, Text(), [10])  # type: ignore[arg-type]
    assert [transcript.tokens[i] for i in transcript.scored] == [ord(c) for c in "x\ny\n"]
