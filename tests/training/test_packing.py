"""Transcripts and micro-batches: what is scored and shared, and that laying things together changes no gradient."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trees import drawn, grown, said
from update_cases import WORDS

from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Media, Span, SpanKind, Transcript
from posttrain.core.types import Completion, StopReason
from posttrain.models.losses.likelihood import token_logp
from posttrain.models.native.decoder import Decoder, causal
from posttrain.training.sources.packing import SHARED_TOKENS, collate, needed_length, pack, split_microbatches

CPU = torch.device("cpu")


def alone(model: Decoder, transcript: Transcript) -> Tensor:
    """Log-probabilities of the scored tokens, [n]: one sequence at a time, no packing."""
    tokens = torch.tensor(transcript.tokens)
    logs = (model(tokens, torch.arange(len(tokens)), causal) @ model.head.weight.T).log_softmax(-1)
    return torch.stack([logs[i - 1, tokens[i]] for i in transcript.scored.tolist()])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), trunks=st.integers(1, 3), leaves=st.integers(1, 6), budget=st.integers(1, 60),
    shared=st.sampled_from([0, SHARED_TOKENS, 50]),
)  # fmt: skip
def test_gradients_of_a_tree_equal_those_of_its_transcripts_laid_apart(
    seed: int, trunks: int, leaves: int, budget: int, shared: int
) -> None:
    """Each rollout has its own weight at tokens that it shares with others."""
    model = tiny(WORDS, dtype=torch.float64)
    transcripts = grown(seed, trunks, leaves, shared)
    weights = [torch.linspace(-1, 1 + i, t.n_scored, dtype=torch.float64) for i, t in enumerate(transcripts)]
    parameters = list(model.parameters())
    apart = torch.stack([(alone(model, t) * w).sum() for t, w in zip(transcripts, weights, strict=True)]).sum()
    expected = torch.autograd.grad(apart, parameters)
    total = torch.zeros((), dtype=torch.float64)
    for index in split_microbatches([[t] for t in transcripts], budget):
        batch = collate(
            [[transcripts[i]] for i in index],
            index,
            weight=torch.ones(len(transcripts), dtype=torch.float64),
            fields={"advantage": weights},
        )
        logp = token_logp(model.hidden(batch.layout, batch.at), model.head, batch.target)
        assert batch.advantage is not None
        total = total + (logp * batch.advantage).sum()
    assert abs(total.item() - apart.item()) < 1e-10 * max(1.0, abs(apart.item()))
    for own, other in zip(torch.autograd.grad(total, parameters), expected, strict=True):
        assert (own - other).abs().max() < 1e-10 * max(1.0, other.abs().max().item())


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31), trunks=st.integers(1, 3), leaves=st.integers(1, 6),
    shared=st.sampled_from([0, SHARED_TOKENS - 1, SHARED_TOKENS, 50]),
)  # fmt: skip
def test_what_transcripts_share_by_branching_or_from_their_beginning_is_laid_once(
    seed: int, trunks: int, leaves: int, shared: int
) -> None:
    count = iter(range(3, 10_000))  # every token another: nothing is alike by chance
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trees.drawn", lambda rng, n: [next(count) for _ in range(n)])
        transcripts = grown(seed, trunks, leaves, shared)
    packed = pack([[t] for t in transcripts], range(len(transcripts)))
    needed = {tuple(t.tokens[: i + 1]) for t in transcripts for i in range(needed_length(t))}
    prompts = {tuple(t.tokens[: t.spans[0].length]) for t in transcripts if t.n_scored}
    again = shared * (len(prompts) - 1) if 0 < shared < SHARED_TOKENS else 0  # too short to be worth a segment
    assert len(packed.layout.tokens) == len(needed) + again
    assert packed.rollout.tolist() == [i for i, t in enumerate(transcripts) for _ in range(t.n_scored)]
    assert packed.target.tolist() == [t.tokens[i] for t in transcripts for i in t.scored.tolist()]
    for k, before in enumerate(packed.layout.prefix):
        assert before < k, "a prefix stands before what continues it"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31), trunks=st.integers(1, 3), leaves=st.integers(1, 6),
    shared=st.sampled_from([0, SHARED_TOKENS, 50]), read=st.sampled_from(["next", "last", "each"]),
)  # fmt: skip
def test_no_segment_is_empty(
    seed: int, trunks: int, leaves: int, shared: int, read: Literal["next", "last", "each"]
) -> None:
    transcripts = [t for t in grown(seed, trunks, leaves, shared) if t.n_scored]
    transcripts += [t.branch() for t in transcripts]  # branches at ends, and equal transcripts
    for number, length in enumerate((1, 2)):  # with the shortest prompt, and replies of which nothing is fed
        transcripts.append(Transcript())
        transcripts[-1].observe([5])
        transcripts[-1].sample(said(random.Random(number), length))
    layout = pack([[t] for t in transcripts], range(len(transcripts)), read=read).layout
    assert min(layout.length) > 0 and sum(layout.length) == len(layout.tokens)


def test_a_transcript_that_begins_with_a_sampled_token_is_refused() -> None:
    """Its prompt would be an empty segment, also where that token is not scored."""
    transcript = Transcript()
    transcript.sample(said(random.Random(0), 3), learn=False)
    transcript.observe([7])
    transcript.sample(said(random.Random(1), 3))
    with pytest.raises(AssertionError, match="begins with a prompt"):
        pack([[transcript]], [0])


def test_rollouts_that_only_begin_alike_by_chance_share_their_prompt_alone() -> None:
    rng, prompt = random.Random(0), [5, 6, 7]
    transcripts = []
    for last in (8, 9):
        transcripts.append(Transcript())
        transcripts[-1].observe(prompt)
        transcripts[-1].sample(Completion(0, [4, 4, 4, last], [0.0] * 4, "", StopReason.EOS, 0))
    layout = pack([[t] for t in transcripts], range(2)).layout
    assert (layout.length, layout.prefix) == ((6,), (-1,))  # they are the same but for the last token, which is not fed
    transcripts[1].sample(said(rng, 2))
    layout = pack([[t] for t in transcripts], range(2)).layout
    assert (layout.length, layout.prefix) == ((3, 3, 5), (-1, 0, 0))


def searched(seed: int, rollouts: int) -> list[Transcript]:
    """Rollouts of one or two prompts that search for one of three words, read what was found, and answer at last."""
    rng = random.Random(seed)
    prompts, searches, answers = (
        [drawn(rng, rng.randint(*size)) for _ in range(3)] for size in ((3, 9), (20, 45), (1, 4))
    )
    found: list[Transcript] = []
    for number in range(rollouts):
        found.append(Transcript())
        found[-1].observe([3 + number % 2, *prompts[number % 2]])
        for _ in range(rng.randint(1, 2)):
            query, passage = rng.choice(searches), rng.choice(searches)
            found[-1].sample(Completion(0, query, [0.0] * len(query), "", StopReason.EOS, 0), learn=rng.random() < 0.8)
            found[-1].observe(passage, SpanKind.TOOL)
        answer = [*rng.choice(answers), 5, 6]
        found[-1].sample(Completion(0, answer, [0.0] * len(answer), "", StopReason.EOS, 0))
    return found


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), rollouts=st.integers(2, 9), budget=st.sampled_from([50, 10_000]))
def test_gradients_of_rollouts_with_equal_turns_equal_those_of_each_alone(
    seed: int, rollouts: int, budget: int
) -> None:
    model, transcripts = tiny(WORDS, dtype=torch.float64, context=256), searched(seed, rollouts)
    weights = [torch.linspace(-1, 1 + i, t.n_scored, dtype=torch.float64) for i, t in enumerate(transcripts)]
    parameters = list(model.parameters())
    apart = torch.stack([(alone(model, t) * w).sum() for t, w in zip(transcripts, weights, strict=True)]).sum()
    total = torch.zeros((), dtype=torch.float64)
    for index in split_microbatches([[t] for t in transcripts], budget):
        packed = pack([[transcripts[i]] for i in index], index)
        logp = token_logp(model.hidden(packed.layout, packed.at), model.head, packed.target)
        total = total + (logp * torch.cat([weights[i] for i in index])).sum()
    expected = torch.autograd.grad(apart, parameters)
    for own, other in zip(torch.autograd.grad(total, parameters), expected, strict=True):
        assert (own - other).abs().max() < 1e-10 * max(1.0, other.abs().max().item())


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), rollouts=st.integers(2, 9))
def test_equal_turns_of_rollouts_are_laid_once_unless_they_are_short(seed: int, rollouts: int) -> None:
    """A token is laid again only if fewer than `SHARED_TOKENS` before it, behind the prompt, are shared with another."""
    transcripts = searched(seed, rollouts)
    packed = pack([[t] for t in transcripts], range(rollouts))
    needed = [tuple(t.tokens[: needed_length(t)]) for t in transcripts]
    different = len({text[:i] for text in needed for i in range(1, len(text) + 1)})
    assert different <= len(packed.layout.tokens) <= different + (SHARED_TOKENS - 1) * (rollouts - 2)
    assert packed.target.tolist() == [t.tokens[i] for t in transcripts for i in t.scored.tolist()]


def two_that_read(same: int, media: int | None = None, routed: bool = False) -> list[list[Transcript]]:
    """Rollouts that say and read the same `same` tokens behind a prompt of three, and then something else."""
    found = []
    for last in (7, 8):
        transcript = Transcript()
        transcript.observe([5, 6, 7])
        transcript.sample(said(random.Random(0), 10, routed))
        seen = [] if media is None else [Media(media, 1, str(last))]
        transcript.observe([*range(10, same), 3], SpanKind.TOOL, media=seen)
        transcript.sample(Completion(0, [last, 9, 4], [0.0] * 3, "", StopReason.EOS, 0))
        found.append([transcript])
    return found


def test_equal_turns_are_cut_where_they_differ_if_enough_of_them_is_equal() -> None:
    def laid(rollouts: list[list[Transcript]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        layout = pack(rollouts, range(2)).layout
        return layout.length, layout.prefix

    assert laid(two_that_read(SHARED_TOKENS - 1)) == ((3 + SHARED_TOKENS, 2, 2), (-1, 0, 0))
    assert laid(two_that_read(SHARED_TOKENS - 2)) == ((3, SHARED_TOKENS + 1, SHARED_TOKENS + 1), (-1, 0, 0))


def test_pictures_and_routed_experts_are_not_shared_by_chance() -> None:
    def laid(**how: Any) -> list[int]:
        return list(pack(two_that_read(60, **how), range(2)).layout.length)

    assert laid() == [64, 2, 2]
    assert laid(media=40) == [40, 26, 26]
    assert laid(media=20) == laid(routed=True) == [3, 63, 63]


def test_tokens_with_temperatures_of_their_own_are_not_repeats() -> None:
    rollouts = two_that_read(60)
    assert pack(rollouts, range(2)).repeats is not None
    rollouts[0][0].spans[1] = replace(rollouts[0][0].spans[1], temperature=0.5)
    assert pack(rollouts, range(2)).repeats is None


def test_another_token_after_other_tokens_is_no_repeat() -> None:
    """Whatever the ids: a pair of place and token is not taken for another one."""
    transcript = Transcript()
    transcript.observe([5])
    transcript.sample(Completion(0, [9, 0, 9, 0, 0, 9], [0.0] * 6, "", StopReason.EOS, 0))
    assert pack([[transcript]], [0]).repeats is None


def test_repeated_tokens_are_the_same_token_after_the_same_tokens() -> None:
    packed = pack([[t] for t in searched(4, 9)], range(9))
    assert packed.repeats is not None
    pairs = list(zip(packed.at.tolist(), packed.target.tolist(), strict=True))
    first, of = packed.repeats.first.tolist(), packed.repeats.of.tolist()
    assert [pairs[first[k]] for k in of] == pairs
    assert len(first) == len(set(pairs)) < len(pairs)
    assert first == [pairs.index(pairs[i]) for i in first], "the first of each"


def test_a_rollout_is_as_old_as_the_oldest_weights_that_sampled_any_of_it() -> None:
    def rollout(*versions: int) -> Rollout:
        transcripts = []
        for version in versions:
            transcripts.append(Transcript())
            transcripts[-1].observe([5, 6])
            transcripts[-1].sample(Completion(0, [7], [0.0], "", StopReason.EOS, version))
        return Rollout({}, "g", transcripts, 0.0)

    assert rollout(4, 2, 3).version == 2 and rollout(7).version == 7 and rollout().version == 0


def test_a_prompt_that_reads_like_a_reply_to_the_first_one_is_laid_by_itself() -> None:
    transcripts = []
    for prompt, reply in (([5, 6], [7, 8, 9]), ([7, 8], [4, 4])):
        transcripts.append(Transcript())
        transcripts[-1].observe(prompt)
        transcripts[-1].sample(Completion(0, reply, [0.0] * len(reply), "", StopReason.EOS, 0))
    packed = pack([[t] for t in transcripts], range(2))
    assert packed.layout.tokens.tolist() == [5, 6, 7, 8, 7, 8, 4] and packed.layout.prefix == (-1, -1)
    assert packed.at.tolist() == [1, 2, 3, 5, 6]


@pytest.mark.parametrize("shared", [0, 50])
@pytest.mark.parametrize("budget", [1, 7, 20, 10_000])
def test_microbatches_hold_their_budget_beside_the_prompts_of_their_first_rollout(budget: int, shared: int) -> None:
    transcripts = grown(3, 3, 5, shared)
    batches = split_microbatches([[t] for t in transcripts], budget)
    assert [i for index in batches for i in index] == list(range(len(transcripts)))
    for index in batches:
        first = transcripts[index[0]]
        prompt = int(first.spans[0].length)
        laid = len(pack([[transcripts[i]] for i in index], index).layout.tokens)
        assert laid - prompt <= budget or len(index) == 1


def test_a_reply_that_is_not_to_be_learned_from_is_seen_and_not_scored() -> None:
    transcript = Transcript()
    transcript.observe([5, 6])
    transcript.sample(Completion(0, [7, 8], [-1.0, -2.0], "", StopReason.STOP, 3), learn=False)
    transcript.observe([9], SpanKind.TOOL)
    transcript.sample(Completion(0, [10, 11], [-3.0, -4.0], "", StopReason.EOS, 4))
    assert transcript.scored.tolist() == [5, 6] and (transcript.n_scored, transcript.n_sampled) == (2, 4)
    assert transcript.sampler_logp is not None and transcript.sampler_logp.tolist() == [-3.0, -4.0]
    packed = pack([[transcript]], [0])
    assert packed.target.tolist() == [10, 11] and packed.layout.tokens.tolist() == [5, 6, 7, 8, 9, 10]


def test_imitated_tokens_have_no_log_probabilities_of_an_engine() -> None:
    transcript = Transcript()
    transcript.observe([5])
    transcript.imitate([7, 8])
    assert transcript.sampler_logp is None and transcript.n_sampled == 0 and transcript.n_scored == 2
    assert collate([[transcript]], [0], weight=torch.ones(1)).sampler_logp is None


def test_every_span_knows_where_it_comes_from_and_which_weights_sampled_it() -> None:
    transcript = Transcript()
    transcript.observe([5, 6])
    transcript.sample(Completion(0, [7], [-1.0], "", StopReason.LENGTH, 3))
    transcript.sample(Completion(0, [8], [-1.0], "", StopReason.STOP, 4))  # went on with newer weights
    transcript.observe([9])
    transcript.observe([])
    assert transcript.spans == [
        Span(SpanKind.PROMPT, 0, 2),
        Span(SpanKind.SAMPLED, 2, 1, True, 3),
        Span(SpanKind.SAMPLED, 3, 1, True, 4),
        Span(SpanKind.OBSERVATION, 4, 1),
    ]


def with_everything(seed: int) -> Transcript:
    rng = random.Random(seed)
    transcript = Transcript()
    transcript.observe([5, 3, 3, 6], media=[Media(1, 2, "c0ffee", (1, 2, 1))])
    transcript.sample(said(rng, 3, experts=True))
    transcript = transcript.branch()
    transcript.observe([9, 3, 9], SpanKind.TOOL, media=[Media(8, 1, f"{seed:x}", (1, 1, 1))])
    transcript.sample(said(rng, 2, experts=True), learn=False)
    transcript.sample(said(rng, 2, experts=True))
    return transcript


def test_a_transcript_is_the_same_after_it_was_written_as_json() -> None:
    written = with_everything(1)
    read = Transcript.from_dict(json.loads(json.dumps(written.as_dict())))
    assert (read.tokens, read.spans, read.logp, read.media, read.forks) == (
        written.tokens, written.spans, written.logp, written.media, written.forks,
    )  # fmt: skip
    assert written.positions is not None and np.array_equal(read.positions, written.positions)  # type: ignore[arg-type]
    routes = [(a.experts, b.experts) for a, b in zip(read.spans, written.spans, strict=True)]
    assert any(b is not None for _, b in routes)
    assert all((a is None) == (b is None) and (b is None or np.array_equal(a, b)) for a, b in routes)  # type: ignore[arg-type]


def test_media_positions_and_experts_lie_where_their_tokens_lie() -> None:
    plain, seen = Transcript(), with_everything(1)
    plain.observe([4, 4])
    plain.sample(Completion(0, [4, 4], [-1.0, -1.0], "", StopReason.EOS, 0))
    layout = pack([[plain], [seen]], range(2)).layout
    assert (layout.start, layout.length) == ((0, 3), (3, 13))
    assert seen.positions is not None
    assert np.array_equal(layout.position[:, 3:].numpy(), seen.positions[:, :13])
    assert layout.position[:, :3].tolist() == [[0, 1, 2]] * 3, "text alone has the same place in all rows"
    assert layout.media == (Media(3 + 1, 2, "c0ffee", (1, 2, 1)), Media(3 + 8, 1, "1", (1, 1, 1)))
    assert layout.experts is not None and layout.experts.shape == (16, 2, 2)
    expected = np.full((14, 2, 2), -1)
    for span in seen.spans:
        if span.experts is not None:
            expected[span.start : span.start + span.length] = span.experts
    assert np.array_equal(layout.experts[3:].numpy(), expected[:13]) and (expected >= 0).any()
    assert (layout.experts[:3] == -1).all()


def asked(prompt: list[int], replies: int = 1, length: int = 5) -> list[Transcript]:
    """Transcripts with this prompt and replies of their own."""
    found = []
    for number in range(replies):
        found.append(Transcript())
        found[-1].observe(prompt)
        found[-1].sample(
            Completion(0, [3 + (number + i) % 40 for i in range(length)], [0.0] * length, "", StopReason.EOS, 0)
        )
    return found


def test_a_long_prompt_does_not_drive_its_group_apart_though_others_begin_like_it() -> None:
    beginning = [3 + i % 7 for i in range(50)]
    groups = [asked(beginning + [20 + n] * 40, replies=3) for n in range(2)]
    assert split_microbatches([[t] for group in groups for t in group], 20) == [[0, 1, 2], [3, 4, 5]]


def test_prompts_share_no_more_than_all_of_their_family_begin_with() -> None:
    first, second, third = [3] * 40 + [4] * 20 + [5], [3] * 40 + [4] * 20 + [6], [3] * 40 + [7] * 9
    rollouts = [asked(prompt) for prompt in (first, second, third)]
    packed = pack(rollouts, range(3))
    assert packed.layout.length == (40, 21 + 4, 21 + 4, 9 + 4) and packed.layout.prefix == (-1, 0, 0, 0)


def test_equal_ends_of_prompts_that_begin_otherwise_are_not_shared() -> None:
    rollouts = [asked([begin] * 40 + [end] * 6) for begin in (3, 4) for end in (5, 6)]
    packed = pack(rollouts, range(4))
    assert packed.layout.length == (40, 10, 10, 40, 10, 10) and packed.layout.prefix == (-1, 0, 0, -1, 3, 3)
    for number, rollout in enumerate(rollouts):
        assert packed.target[packed.rollout == number].tolist() == rollout[0].tokens[46:]


def test_a_picture_ends_what_prompts_share_and_routed_experts_are_never_shared() -> None:
    def laid(picture: int | None, routed: bool = False) -> list[int]:
        transcripts = []
        for last in (7, 8):
            transcripts.append(Transcript())
            media = [] if picture is None else [Media(picture, 1, str(last))]
            transcripts[-1].observe([*range(10, 60), last], media=media)
            transcripts[-1].sample(said(random.Random(0), 2, routed))
        return list(pack([[t] for t in transcripts], range(2)).layout.length)

    assert laid(None) == [50, 2, 2]
    assert laid(40) == [40, 12, 12]
    assert laid(20) == laid(None, routed=True) == [52, 52]


def test_equal_prompts_with_different_pictures_are_not_shared() -> None:
    rollouts = []
    for digest in ("a", "b", "a"):
        transcript = Transcript()
        transcript.observe([5, 3, 6], media=[Media(1, 1, digest)])
        transcript.sample(Completion(0, [7, 8], [-1.0, -1.0], "", StopReason.EOS, 0))
        rollouts.append([transcript])
    layout = pack(rollouts, range(3)).layout
    assert [m.digest for m in layout.media] == ["a", "b"] and len(layout.tokens) == 8


def test_nothing_after_the_last_scored_token_is_needed_though_a_reply_after_it_is_empty() -> None:
    transcript = Transcript()
    transcript.observe([1, 2])
    transcript.sample(Completion(0, [3, 4], [-1.0, -1.0], "", StopReason.EOS, 0))
    transcript.observe([5, 6])
    assert needed_length(transcript) == 3
    transcript.sample(Completion(0, [], [], "", StopReason.EOS, 0))
    assert needed_length(transcript) == 3


@pytest.mark.parametrize("unlearned_first", [True, False])
def test_contexts_without_learned_tokens_change_no_gradient(unlearned_first: bool) -> None:
    """A rollout may hold contexts that are only played, and trains with its others; one of such alone is in no batch."""
    rng = random.Random(5)
    model = tiny(WORDS, dtype=torch.float64)
    plain: list[list[Transcript]] = []
    mixed: list[list[Transcript]] = []
    for _ in range(4):
        taught, played, shown = Transcript(), Transcript(), Transcript()
        for transcript, learn in ((taught, True), (played, False)):
            transcript.observe(drawn(rng, 3))
            transcript.sample(said(rng, 4), learn=learn)
        shown.observe(drawn(rng, 2))
        plain.append([taught])
        mixed.append([played, shown, taught] if unlearned_first else [taught, played, shown])
    mixed.insert(2, [played])

    def gradient(rollouts: list[list[Transcript]]) -> tuple[Tensor, ...]:
        total = torch.zeros((), dtype=torch.float64)
        for index in split_microbatches(rollouts, 20):
            assert all(any(t.n_scored for t in rollouts[i]) for i in index)
            batch = collate([rollouts[i] for i in index], index, weight=torch.ones(len(rollouts)))
            assert batch.sampler_logp is not None and len(batch.sampler_logp) == len(batch.target)
            total = total + token_logp(model.hidden(batch.layout, batch.at), model.head, batch.target).sum()
        return torch.autograd.grad(total, list(model.parameters()))

    for own, other in zip(gradient(mixed), gradient(plain), strict=True):
        assert torch.equal(own, other)


def hidden_alone(model: Decoder, transcript: Transcript) -> Tensor:
    """The states that the head reads at every token, [L, D]: one sequence at a time, no packing."""
    tokens = torch.tensor(transcript.tokens)
    return model(tokens, torch.arange(len(tokens)), causal)


def in_steps(rng: random.Random, prompt: list[int]) -> Transcript:
    """A solution in steps, each a scored span, some with text between them; what stands behind the last is not scored."""
    transcript = Transcript()
    transcript.observe(prompt)
    for _ in range(rng.randint(1, 4)):
        transcript.imitate(drawn(rng, rng.randint(1, 4)))
        if rng.random() < 0.5:
            transcript.observe(drawn(rng, rng.randint(1, 3)))
    return transcript


@pytest.mark.parametrize("read", ["last", "each"])
@pytest.mark.parametrize("seed", range(6))
def test_hidden_states_are_read_at_the_tokens_themselves_and_are_those_of_each_transcript_alone(
    read: Literal["last", "each"], seed: int
) -> None:
    rng = random.Random(seed)
    model = tiny(WORDS, dtype=torch.float64)
    prompts = [drawn(rng, rng.randint(1, 5)) for _ in range(3)]
    items = [[in_steps(rng, prompt) for _ in range(3)] for prompt in prompts]
    items += [[t] for t in grown(seed, 2, 4) if t.n_scored]
    for cut in (split_microbatches(items, 40, read), [list(range(len(items)))]):
        assert [i for index in cut for i in index] == list(range(len(items)))
        for index in cut:
            packed = pack([items[i] for i in index], index, read=read)
            states = iter(model.hidden(packed.layout, packed.at))
            told = iter(zip(packed.target.tolist(), packed.rollout.tolist(), packed.transcript.tolist(), strict=True))
            for place, (item, transcript) in enumerate((k, t) for k in index for t in items[k]):
                own = hidden_alone(model, transcript)
                for span in (s for s in transcript.spans if s.learned):
                    end = span.start + span.length
                    for at in range(end - 1 if read == "last" else span.start, end):
                        assert (next(states) - own[at]).abs().max() < 1e-12
                        assert next(told) == (transcript.tokens[at], item, place)
            assert next(states, None) is None and next(told, None) is None


def test_last_token_is_fed_only_where_it_is_read_itself() -> None:
    transcript = Transcript()
    transcript.observe([3, 4])
    transcript.imitate([5, 6, 7])
    assert (
        needed_length(transcript) == 4 and needed_length(transcript, "last") == needed_length(transcript, "each") == 5
    )
    assert pack([[transcript]], [0]).at.tolist() == [1, 2, 3]
    assert pack([[transcript]], [0], read="last").at.tolist() == [4]
    assert pack([[transcript]], [0], read="each").at.tolist() == [2, 3, 4]
    transcript.observe([8])
    assert len(pack([[transcript]], [0], read="each").layout.tokens) == 5
