"""Packs transcripts into micro-batches, and lays out their tokens.

Tokens are laid end to end without padding. A common beginning of transcripts is laid once: a prompt, the examples that
different prompts share, a branch, or the same search with the same result in several rollouts of a group. The segments
after it refer to it as their prefix. Tokens that no scored token depends on (the last token, trailing tool text) are not
laid at all.

    T    tokens of a micro-batch    N    scored tokens    S    rollouts of the optimizer batch
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from posttrain.core.batch import Batch, Layout, Packed, Preferences, Reading, Repeats
from posttrain.core.transcripts import SpanKind, Transcript

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from posttrain.core.token_probe import TokenSink

    Integers = NDArray[np.int64]


SHARED_TOKENS = 32
"""Least tokens that different prompts, or transcripts after the same prompt, must share by chance to be laid once, as each
segment has a cost of its own."""


def prompt_length(transcript: Transcript) -> int:
    """Return the number of tokens before the first sampled (or imitated) one."""
    for span in transcript.spans:
        if span.kind is SpanKind.SAMPLED or span.kind is SpanKind.IMITATED:
            assert span.start, "a transcript begins with a prompt: an empty one would be an empty segment"
            return span.start
    raise AssertionError("no token in it is trained")


Read = Literal["next", "last", "each"]
"""Tokens at which hidden states are read. next: before each scored token, which they predict. last: at the last token of
each scored span, such as the end of a reply or of a step of it. each: at every scored token itself."""


def needed_length(transcript: Transcript, read: Read = "next") -> int:
    """Return the number of tokens to feed: up to the last scored token, which is fed only if its own state is read."""
    for span in reversed(transcript.spans):
        if span.learned:
            return span.start + span.length - (read == "next")
    raise AssertionError("no token in it is trained")


def readings(transcript: Transcript, read: Read) -> int:
    """Return the number of hidden states of a transcript that are read."""
    return sum(1 for span in transcript.spans if span.learned) if read == "last" else transcript.n_scored


def learned(rollout: Sequence[Transcript]) -> list[Transcript]:
    """Return the transcripts of a rollout with a scored token. The others have no gradient."""
    return [t for t in rollout if t.n_scored]


def split_microbatches(
    rollouts: Sequence[Sequence[Transcript]], tokens_per_microbatch: int, read: Read = "next"
) -> list[list[int]]:
    """Return the indices of the rollouts of each micro-batch. Rollouts stay whole and in order; shared tokens count
    once.

    A micro-batch holds at most `tokens_per_microbatch` tokens besides the prompts of its first rollout, or a single
    longer rollout: so a long prompt does not separate the rollouts that share it. A rollout without a scored token is
    in no micro-batch.
    """
    rollouts = [learned(rollout) for rollout in rollouts]
    paths = iter(_paths([t for rollout in rollouts for t in rollout], read))
    batches: list[list[int]] = []
    used, laid = 0, set[int]()
    for index, rollout in enumerate(rollouts):
        own = [next(paths) for _ in rollout]
        if not own:
            continue
        pieces = {piece.key: piece.length for path in own for piece in path}
        cost = sum([length for key, length in pieces.items() if key not in laid])
        if not batches or used + cost > tokens_per_microbatch:
            batches.append([])
            ends = [prompt_length(t) for t in rollout]
            prompts = {p.key for path, end in zip(own, ends, strict=True) for p in path if p.first < end}
            used, laid = 0, set()
            cost = sum(length for key, length in pieces.items() if key not in prompts)
        batches[-1].append(index)
        used += cost
        laid |= pieces.keys()
    return batches


class Taught(NamedTuple):
    """A rollout as its teacher reads it."""

    by: str  # the teacher's name
    transcripts: Sequence[Transcript]  # with the same scored tokens as the rollout's own, or these themselves


def pack(
    rollouts: Sequence[Sequence[Transcript]],
    index: Sequence[int],
    device: torch.device | str = "cpu",
    taught: Sequence[Taught] = (),
    read: Read = "next",
) -> Packed:
    """Pack the transcripts of these rollouts for a model; `index[i]` is the place of rollout i in [S].

    Scored tokens keep the order of rollouts, and within one the order of its tokens. With `read` "last", only the last
    tokens of scored spans are read. `taught`: each rollout as its teacher reads it; if all have one teacher that reads
    the policy's context, nothing is laid a second time.
    """
    packed = _packed(rollouts, index, device, read)
    return replace(packed, readings=tuple(_readings(packed, rollouts, index, taught, device))) if taught else packed


def _readings(
    packed: Packed,
    rollouts: Sequence[Sequence[Transcript]],
    index: Sequence[int],
    taught: Sequence[Taught],
    device: torch.device | str,
) -> Iterator[Reading]:
    """Yield the readings of each teacher."""
    import torch

    for name in dict.fromkeys(t.by for t in taught):
        own = [i for i, t in enumerate(taught) if t.by == name]
        same = all(a is b for i in own for a, b in zip(rollouts[i], taught[i].transcripts, strict=True))
        everyone = len(own) == len(taught)
        read = packed
        if not (same and everyone):
            read = _packed([taught[i].transcripts for i in own], [index[i] for i in own], device)
        theirs = torch.tensor([index[i] for i in own], device=device)
        rows = None if everyone else torch.isin(packed.rollout, theirs).nonzero().flatten()
        place = packed.target if rows is None else packed.target[rows]
        assert torch.equal(place, read.target), "a teacher scores the tokens that were sampled"
        yield Reading(name, read, rows)


def _packed(
    rollouts: Sequence[Sequence[Transcript]], index: Sequence[int], device: torch.device | str, read: Read = "next"
) -> Packed:
    import torch

    rollouts = [learned(rollout) for rollout in rollouts]
    transcripts = [t for rollout in rollouts for t in rollout]
    owner = [place for place, rollout in zip(index, rollouts, strict=True) for _ in rollout]
    tree = _Tree.of(transcripts, read)
    at: list[int] = []  # lists, since most transcripts are too short for an array each to be worth its cost
    target: list[int] = []
    counts: list[int] = []
    heats: list[float] = []
    for transcript, path in zip(transcripts, tree.paths, strict=True):
        before = len(at)
        for span in transcript.spans:
            if span.learned:
                assert span.start, "a scored token needs a token before it, which predicts it"
                end = span.start + span.length
                first = end - 1 if read == "last" else span.start
                at += _laid(path, first - 1, end - 1) if read == "next" else _laid(path, first, end)
                target += transcript.tokens[first:end]
                heats += [span.temperature or math.nan] * (end - first)  # 0 is never trained: see `refuse_greedy`
        counts.append(len(at) - before)

    def tensor(values: Sequence[int] | NDArray[Any]) -> torch.Tensor:
        array = values if isinstance(values, np.ndarray) else np.array(values, dtype=np.int64)
        return torch.from_numpy(array).to(device)

    laid = tree.segments
    heat = None if all(map(math.isnan, heats)) else tensor(np.array(heats))
    pair = np.array(at, dtype=np.int64) * (1 + max(target, default=0)) + np.array(target, dtype=np.int64)
    _, once, of = np.unique(pair, return_index=True, return_inverse=True)
    return Packed(
        layout=Layout(
            tokens=tensor([token for s in laid for token in s.tokens]),
            position=tensor(_positions(laid)),
            start=tuple(s.start for s in laid),
            length=tuple(s.length for s in laid),
            prefix=tuple(s.prefix for s in laid),
            media=tuple(m for s in laid for m in s.media),
            experts=tensor(_experts(laid))
            if any(s.experts is not None for t in transcripts for s in t.spans)
            else None,
        ),
        at=tensor(at),
        target=tensor(target),
        rollout=tensor(np.repeat(np.asarray(owner, dtype=np.int64), counts)),
        transcript=tensor(np.repeat(np.arange(len(counts), dtype=np.int64), counts)),
        temperature=heat,
        repeats=Repeats(tensor(once), tensor(of)) if heat is None and len(once) < len(at) else None,
    )


def collate(
    rollouts: Sequence[Sequence[Transcript]],
    index: Sequence[int],
    *,
    weight: torch.Tensor,
    fields: Mapping[str, Sequence[torch.Tensor]] | None = None,
    imitate: torch.Tensor | None = None,
    preferences: Preferences | None = None,
    coefficients: Mapping[str, float] | None = None,
    taught: Sequence[Taught] = (),
    device: torch.device | str = "cpu",
    read: Read = "next",
    sink: TokenSink | None = None,
) -> Batch:
    """Build one micro-batch of some rollouts; `index[i]` is the place of rollout i in the optimizer batch [S].

    weight, imitate   [S], weight of each token of a rollout in the loss, and in its likelihood term.
    fields            of `Batch`: one value for each scored token, or a row of values, [n_i] or [n_i, k + 1] for each
                      rollout of the optimizer batch.
    taught            each of these rollouts as its teacher reads it: see `pack`.
    sink              receives the values computed for single tokens.
    """
    import torch

    packed = pack(rollouts, index, device, taught, read)
    scored = [t.scored_logp for rollout in rollouts for t in learned(rollout)]
    logp = [own for own in scored if own is not None]
    of_tokens: dict[str, Any] = {
        name: torch.cat([values[i] for i in index]).to(device) for name, values in (fields or {}).items()
    }
    if imitate is not None:
        of_tokens["imitate"] = imitate.to(device)[packed.rollout]
    return Batch(
        **vars(packed),
        weight=weight.to(device)[packed.rollout],
        sampler_logp=torch.from_numpy(_array(logp)).to(device) if len(logp) == len(scored) else None,
        preferences=preferences,
        coefficients=dict(coefficients or {}),
        tap=sink.tap(index, [sum([readings(t, read) for t in rollout]) for rollout in rollouts]) if sink else None,
        **of_tokens,
    )


def _array(parts: Sequence[Sequence[float]]) -> NDArray[np.float32]:
    """Return the concatenated numbers. An array for each part would cost more than its values."""
    return np.fromiter(chain.from_iterable(parts), dtype=np.float32, count=sum(map(len, parts)))


# -- the tree of what transcripts share --------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """A run of tokens of a transcript that others may share."""

    key: int  # equal for pieces with equal tokens, media, and pieces before them
    first: int  # place in the transcript
    length: int


class _Keys:
    """Numbers the runs of tokens of some transcripts."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}

    def of(self, transcript: Transcript, first: int, last: int, before: int = -1) -> int:
        """Return the number of the run from `first` to `last` after the run numbered `before` (-1: none)."""
        return self._known.setdefault(self._contents(transcript, first, last, before), len(self._known))

    def find(self, transcript: Transcript, first: int, last: int, before: int) -> int | None:
        """Return the number of a run as `of` does; None for a new run."""
        return self._known.get(self._contents(transcript, first, last, before))

    @staticmethod
    def _contents(transcript: Transcript, first: int, last: int, before: int) -> tuple[Any, ...]:
        contents = before, tuple(transcript.tokens[first:last])
        if not transcript.media:
            return contents
        return *contents, *((m.start - first, m.digest) for m in transcript.media if first <= m.start < last)


def _paths(transcripts: Sequence[Transcript], read: Read) -> list[list[_Piece]]:
    """Return the pieces of each transcript, up to its last token that is needed.

    Transcripts are cut after the part of their prompt that they share with others, after their prompt, and where
    transcripts with the same prompt branch off, or differ after many equal tokens.
    """
    keys = _Keys()
    prompts = [prompt_length(t) for t in transcripts]
    roots = [keys.of(t, 0, n) for t, n in zip(transcripts, prompts, strict=True)]
    families: dict[int, list[int]] = defaultdict(list)  # root -> the transcripts that begin with it
    for number, root in enumerate(roots):
        families[root].append(number)
    cuts = {
        root: _cuts([transcripts[i] for i in family], prompts[family[0]], read) for root, family in families.items()
    }
    shared = _shared_lengths(transcripts, prompts, roots)
    heads: dict[int, list[_Piece]] = {}  # root -> the pieces of the prompt
    paths = []
    for transcript, root, prompt in zip(transcripts, roots, prompts, strict=True):
        if root not in heads:
            heads[root] = _head(transcript, root, prompt, shared.get(root, prompt), keys)
        path, first, end = heads[root][:], prompt, needed_length(transcript, read)
        between = sorted(cut for cut in cuts[root] if cut < end)
        for last in (*between, end):
            if last > first:
                path.append(_Piece(keys.of(transcript, first, last, path[-1].key), first, last - first))
            first = last
        paths.append(path)
    for root, family in families.items():
        if cuts[root]:
            _lengthen([(transcripts[i], paths[i]) for i in family], keys)
    return paths


def _head(transcript: Transcript, root: int, prompt: int, shared: int, keys: _Keys) -> list[_Piece]:
    """Return the pieces of a prompt of `prompt` tokens, of which the first `shared` are a piece of their own."""
    if shared == prompt:
        return [_Piece(root, 0, prompt)]
    first = keys.of(transcript, 0, shared)
    return [_Piece(first, 0, shared), _Piece(keys.of(transcript, shared, prompt, first), shared, prompt - shared)]


def _shared_lengths(
    transcripts: Sequence[Transcript], prompts: Sequence[int], roots: Sequence[int]
) -> Mapping[int, int]:
    """Return root -> number of tokens that a prompt shares with all others that begin like it; prompts that share few
    are left out.

    Pictures, everything after them, and tokens with recorded routed experts are not shared.
    """
    families: dict[tuple[int, ...], dict[int, tuple[Transcript, int]]] = defaultdict(dict)
    for root, (transcript, prompt) in dict(zip(roots, zip(transcripts, prompts, strict=True), strict=True)).items():
        if prompt >= SHARED_TOKENS:
            families[tuple(transcript.tokens[:SHARED_TOKENS])][root] = transcript, prompt
    found: dict[int, int] = {}
    for family in families.values():
        if len(family) < 2 or any(s.experts is not None for t, _ in family.values() for s in t.spans):
            continue
        texts = [t.tokens[:prompt] for t, prompt in family.values()]
        length = _equal(min(texts), max(texts))
        length = min([length, *(m.start for t, _ in family.values() for m in t.media)])
        if length >= SHARED_TOKENS:
            found.update(dict.fromkeys(family, length))
    return found


def _cuts(family: Sequence[Transcript], prompt: int, read: Read) -> set[int]:
    """Return the positions behind their prompt at which transcripts with the same prompt are cut: where one branched off,
    and where two differ after at least `SHARED_TOKENS` equal tokens. Neighbours in the order of their tokens suffice.

    Pictures, everything after them, and tokens with recorded routed experts are not shared by chance.
    """
    found = {fork for transcript in family for fork in transcript.forks if fork > prompt}
    if len(family) > 1 and not any(s.experts is not None for t in family for s in t.spans):
        ends = [min([needed_length(t, read), *(m.start for m in t.media if m.start >= prompt)]) for t in family]
        texts = sorted(t.tokens[prompt:end] for t, end in zip(family, ends, strict=True))
        equal = (_equal(a, b) for a, b in pairwise(texts))
        found |= {prompt + length for length in equal if length >= SHARED_TOKENS}
    return found


def _equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens that two texts begin with."""
    return next((i for i, (own, other) in enumerate(zip(a, b, strict=False)) if own != other), min(len(a), len(b)))


def _lengthen(family: Sequence[tuple[Transcript, list[_Piece]]], keys: _Keys) -> None:
    """Extend a transcript that ends within a piece of another to the whole of that piece, so that it is laid once."""
    longest = sorted({(piece.first, piece.length) for _, path in family for piece in path}, reverse=True)
    for transcript, path in family:
        last = path[-1]
        before = path[-2].key if len(path) > 1 else -1
        for first, length in longest:
            if first == last.first and last.length < length <= len(transcript) - first:
                key = keys.find(transcript, first, first + length, before)
                if key is not None:
                    path[-1] = _Piece(key, first, length)
                    break


def _laid(path: Sequence[_Segment], first: int, last: int) -> list[int]:
    """Return the positions in the micro-batch of tokens `first` to `last` of a transcript with these segments."""
    places: list[int] = []
    begin = 0
    for segment in path:
        end = begin + segment.length
        places += range(segment.start + max(first - begin, 0), segment.start + min(last, end) - begin)
        begin = end
    return places


@dataclass
class _Segment:
    """A segment of a micro-batch: a piece, or several that no transcript separates."""

    transcript: Transcript  # a transcript that contains it
    first: int  # position in that transcript
    length: int
    prefix: int  # number of the segment before it; -1: none
    start: int = -1  # position in the micro-batch
    users: int = 0  # number of transcripts that contain it
    children: list[int] = field(default_factory=list)

    @property
    def slice(self) -> slice:
        return slice(self.first, self.first + self.length)

    @property
    def tokens(self) -> list[int]:
        return self.transcript.tokens[self.slice]

    @property
    def position(self) -> Integers:
        own = self.transcript.positions
        if own is None:
            return np.arange(self.first, self.first + self.length, dtype=np.int64)
        return own[:, self.slice]

    @property
    def media(self) -> list[Any]:
        found = [m for m in self.transcript.media if self.first <= m.start < self.first + self.length]
        return [replace(m, start=m.start - self.first + self.start) for m in found]

    @property
    def experts(self) -> NDArray[np.int16] | None:
        """Return the routed experts, [length, layers, k]; -1 where the engine reported none. None: none at all."""
        told = [s for s in self.transcript.spans if s.experts is not None]
        if not told:
            return None
        shape = told[0].experts.shape[1:]  # type: ignore[union-attr]
        whole = np.full((len(self.transcript), *shape), -1, dtype=np.int16)
        for span in told:
            assert span.experts is not None
            whole[span.start : span.start + span.length] = span.experts
        return whole[self.slice]


@dataclass(frozen=True)
class _Tree:
    """Tree of the segments of a micro-batch, and the path of each transcript."""

    segments: list[_Segment]
    paths: list[list[_Segment]]

    @staticmethod
    def of(transcripts: Sequence[Transcript], read: Read) -> _Tree:
        nodes: dict[int, int] = {}
        found: list[_Segment] = []
        walks: list[list[int]] = []
        for transcript, path in zip(transcripts, _paths(transcripts, read), strict=True):
            walk: list[int] = []
            for piece in path:
                parent = walk[-1] if walk else -1
                if piece.key not in nodes:
                    nodes[piece.key] = len(found)
                    found.append(_Segment(transcript, piece.first, piece.length, parent))
                    if parent >= 0:
                        found[parent].children.append(nodes[piece.key])
                walk.append(nodes[piece.key])
            for number in walk:
                found[number].users += 1
            walks.append(walk)
        return _Tree._joined(found, walks)

    @staticmethod
    def _joined(found: list[_Segment], walks: list[list[int]]) -> _Tree:
        """Merge each segment with its only continuation."""
        place: dict[int, int] = {}
        segments: list[_Segment] = []
        start = 0
        for number, segment in enumerate(found):
            if number in place:
                continue
            last = number
            while len(found[last].children) == 1 and found[found[last].children[0]].users == found[last].users:
                last = found[last].children[0]
                segment.length += found[last].length
                place[last] = len(segments)
            place[number] = len(segments)
            segment.start = start
            segment.prefix = place[segment.prefix] if segment.prefix >= 0 else -1
            segment.transcript = found[last].transcript
            segments.append(segment)
            start += segment.length
        paths = []
        for walk in walks:
            numbers = dict.fromkeys(place[number] for number in walk)
            paths.append([segments[number] for number in numbers])
        return _Tree(segments, paths)


def _positions(segments: Sequence[_Segment]) -> Sequence[int] | Integers:
    """Return positions [T], or [3, T] if any transcript has three rows; text has the same position in all of them."""
    if all(s.transcript.positions is None for s in segments):
        return [place for s in segments for place in range(s.first, s.first + s.length)]
    return np.concatenate([np.broadcast_to(s.position, (3, s.length)) for s in segments], axis=-1)


def _experts(segments: Sequence[_Segment]) -> NDArray[np.int16]:
    """Return the routed experts, [T, layers, k]."""
    known = [s.experts for s in segments]
    shape = next(x.shape[1:] for x in known if x is not None)
    whole = [
        np.full((s.length, *shape), -1, np.int16) if x is None else x for s, x in zip(segments, known, strict=True)
    ]
    return np.concatenate(whole)
