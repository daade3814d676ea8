"""A model as EleutherAI's lm-evaluation-harness asks it: posttrain's log-probabilities, and replies of its engine.

    from posttrain.training.lm_eval_model import PosttrainLM
    lm_eval.simple_evaluate(PosttrainLM.load("runs/rl"), tasks=["hellaswag"])

Contexts and continuations are split into tokens by the harness's own rules (`TemplateLM`), as its `hf` model does. Answers
to one question share its tokens, which are computed once. The module imports lm_eval, so only those who use it do.

    N    scored tokens of a micro-batch    V    vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from posttrain.core.batch import Layout
from posttrain.core.protocols import Model
from posttrain.core.seeds import seed_of
from posttrain.core.types import Completion, Sampling, UserError
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.open_engine import open_engine
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.checkpoint import resolve

TOKENS = 4096  # of a micro-batch
LOGITS = 1 << 24  # alive at once
REPLY = 256  # tokens of a reply whose task sets no limit, as for the harness's own models

Pair = tuple[list[int], list[int]]  # tokens of the context, which is not scored, and of its continuation


class PosttrainLM(TemplateLM):  # type: ignore[misc]  # lm_eval is an extra
    """A checkpoint of posttrain, as a model of the harness."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer, slots: int = 64, precision: str = "float32", seed: int = 0
    ) -> None:
        """`slots`: replies decoded at once; `seed`: of replies that a task wants sampled rather than greedy."""
        super().__init__()
        if tokenizer.eos_id is None:
            raise UserError("the harness needs an end-of-sequence token, and this tokenizer names none: set eos_token")
        self.model, self.own, self.slots, self.precision, self.seed = model, tokenizer, slots, precision, seed
        self._eos = tokenizer.eos_id

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu", **how: Any) -> Self:
        """Load a checkpoint, or the newest one of a run. `how`: see the class. Raises UserError."""
        path = resolve(str(folder))
        return cls(load_model(path, device=device), Tokenizer.load(path), **how)

    # -- what the harness asks about the tokenizer ---------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self._eos

    @property
    def prefix_token_id(self) -> int:
        return self._eos if self.own.bos_id is None else self.own.bos_id

    @property
    def max_length(self) -> int:
        return self.model.config.context

    @property
    def tokenizer_name(self) -> str:
        return str(self.own.config.get("name_or_path", "posttrain"))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        return self.own.encode(string, start=add_special_tokens is not False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.own.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.own.render(chat_history, add_generation_prompt)

    # -- likelihoods ---------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **more: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation in nats, and whether each of its tokens is the likeliest."""
        pairs = [self._cut(context, continuation) for _, context, continuation in requests]
        found: dict[int, tuple[float, bool]] = {}
        for places in _microbatches(pairs):
            found |= dict(zip(places, self._scored([pairs[place] for place in places]), strict=True))
        return [found[place] for place in range(len(pairs))]

    def _cut(self, context: list[int], continuation: list[int]) -> Pair:
        """Return the pair without the beginning of a context that is too long. The last token is only predicted."""
        if len(continuation) > self.max_length:
            raise UserError(
                f"a continuation of {len(continuation)} tokens is longer than the model's context, {self.max_length}"
            )
        context = context or [self.prefix_token_id]  # something must predict the first token
        return context[len(context) - min(len(context), self.max_length + 1 - len(continuation)) :], continuation

    @torch.no_grad()
    def _scored(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return the results of pairs that fit into a micro-batch. Pairs with one context are neighbours."""
        layout, at, device = *_laid_out(pairs), self.model.head.device
        layout = Layout(
            layout.tokens.to(device), layout.position.to(device), layout.start, layout.length, layout.prefix
        )
        target = torch.tensor([token for _, continuation in pairs for token in continuation], device=device)
        logp, likeliest = [], []
        with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            hidden = self.model.hidden(layout, at.to(device))
            rows = max(1, LOGITS // self.model.config.vocab)
            for own, tokens in zip(hidden.split(rows), target.split(rows), strict=True):
                logits = self.model.head.logits(own)
                logp.append(logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1))
                likeliest.append(logits.argmax(-1) == tokens)
        sizes = [len(continuation) for _, continuation in pairs]
        each = zip(torch.cat(logp).double().split(sizes), torch.cat(likeliest).split(sizes), strict=True)
        return [(own.sum().item(), bool(right.all())) for own, right in each]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text in nats; a long one is scored in windows that do not overlap."""
        windows: list[tuple[None, list[int], list[int]]] = []
        sizes = []
        for request in requests:
            own = get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1)
            listed = [(None, *make_disjoint_window(window)) for window in own]
            sizes.append(len(listed))
            windows += listed
        found = iter(self._loglikelihood_tokens(windows))
        return [sum(next(found)[0] for _ in range(size)) for size in sizes]

    # -- replies -------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return replies of posttrain's engine, each up to its first stop string."""
        options = EngineOptions(self.slots, self.precision)
        with closing(open_engine("local", self.model, self.own, options)) as engine:
            engine.load(self.model, 0)
            stops = []
            for place, request in enumerate(requests):
                text, given = request.args
                sampling = self._sampling(given, place)
                stops.append(sampling.stop)
                engine.submit(place, self.tok_encode(text)[-(self.max_length - sampling.max_tokens) :], sampling)
            found: dict[int, Completion] = {}
            while len(found) < len(requests):
                found |= {completion.id: completion for completion in engine.poll()}
        return [_before(found[place].text, stop) for place, stop in enumerate(stops)]

    def _sampling(self, given: Mapping[str, Any], place: int) -> Sampling:
        """Return the sampling of a request: greedy unless it wants `do_sample`, as in the harness."""
        until = given.get("until") or []
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        most = int(next((given[name] for name in names if given.get(name) is not None), REPLY))
        if most >= self.max_length:
            raise UserError(f"a task wants replies of {most} tokens, and the model's context is {self.max_length}")
        drawn = bool(given.get("do_sample", float(given.get("temperature") or 0) > 0))
        return Sampling(
            temperature=float(given.get("temperature") or 1.0) if drawn else 0.0,
            top_p=float(given.get("top_p") or 1.0) if drawn else 1.0,
            top_k=int(given.get("top_k") or 0) if drawn else 0,
            max_tokens=most,
            stop=tuple(filter(None, [until] if isinstance(until, str) else until)),
            seed=seed_of(self.seed, "lm-eval", place),
        )


def _before(text: str, stop: Sequence[str]) -> str:
    return text[: min((text.find(word) for word in stop if word in text), default=len(text))]


def _microbatches(pairs: Sequence[Pair]) -> Iterator[list[int]]:
    """Yield the places of pairs that are computed together, pairs with equal contexts side by side."""
    batch: list[int] = []
    size = 0
    for place in sorted(range(len(pairs)), key=lambda place: pairs[place]):
        context, continuation = pairs[place]
        more = len(continuation) + len(context) * (not batch or pairs[batch[-1]][0] != context)
        if batch and size + more > TOKENS:
            yield batch
            batch, size, more = [], 0, len(context) + len(continuation)
        batch.append(place)
        size += more
    if batch:
        yield batch


def _laid_out(pairs: Sequence[Pair]) -> tuple[Layout, torch.Tensor]:
    """Return the layout of these pairs, and int64 [N]: the token that predicts each token of a continuation.

    A context is a segment, and each of its continuations, but for the last token, a segment behind it.
    """
    tokens: list[int] = []
    position: list[int] = []
    segments: list[tuple[int, int, int]] = []  # start, length, prefix
    at: list[int] = []
    root, before = -1, None
    for context, continuation in pairs:
        if context is not before and context != before:
            root, before = len(segments), context
            segments.append((len(tokens), len(context), -1))
            tokens += context
            position += range(len(context))
        start, length, _ = segments[root]
        at.append(start + length - 1)
        if own := continuation[:-1]:
            at += range(len(tokens), len(tokens) + len(own))
            segments.append((len(tokens), len(own), root))
            tokens += own
            position += range(length, length + len(own))
    starts, lengths, prefixes = zip(*segments, strict=True)
    return Layout(torch.tensor(tokens), torch.tensor(position), starts, lengths, prefixes), torch.tensor(at)
