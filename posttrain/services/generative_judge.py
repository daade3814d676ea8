"""A judge of this machine as a service: a checkpoint that reasons before its verdict, sampled in this process.

A vote's seed depends only on its question's text and its number. If an engine's bits depend on the other requests of a
batch, questions are sampled one at a time. So an answer depends on its question alone. A vote that was truncated or has
no verdict is invalid; if fewer than half are valid, the answer is Invalid.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from posttrain.core.messages import clip, inline
from posttrain.core.protocols import Model, Service
from posttrain.core.seeds import seed_of
from posttrain.core.types import Completion, Invalid, InvalidKind, Reasoned, Sampling, UserError
from posttrain.engines.local.embedded import embedded
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.checkpoint_location import checkpoint_folder
from posttrain.models.gpu_placement import working_on
from posttrain.models.losses.continuations import continuation_logp
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs import fingerprint
from posttrain.runs.checkpoint import resolve
from posttrain.services.judge_prompt import kept, read_question
from posttrain.services.judge_recipe import Generative
from posttrain.verify.verdict import behind, final_score, final_verdict


@dataclass
class _Question:
    """A question and its votes."""

    id: int
    text: str  # the filled template
    tokens: list[int]
    votes: dict[int, Completion] = field(default_factory=dict)  # by number of the vote


class GenerativeJudge:
    """Service of a generative judge; implements `posttrain.core.protocols.Service`. Requests are those of a scalar
    judge; an answer is the mean of the votes.

    A vote is 1 or 0 by the recipe's words, the probability of the first word, or a number of the recipe's scale.
    """

    def __init__(
        self,
        recipe: Generative,
        name: str = "judge",
        device: str | torch.device = "cpu",
        matrices: torch.dtype | None = None,
    ) -> None:
        """Load the judge. Raises UserError if the folder does not exist, or if the model cannot produce a valid
        verdict. `matrices`: see `posttrain.models.checkpoint_folder.load_model`.
        """
        self.recipe, self.name = recipe, name
        try:
            self.folder = checkpoint_folder(resolve(recipe.model))
            self.model: Model = load_model(self.folder, device=device, matrices=matrices).requires_grad_(False)
            self.tokenizer = Tokenizer.load(self.folder)
        except UserError as error:
            raise UserError(f"{name}: model {error}") from error
        self.context = self.model.config.context
        self._least = self._check()
        with working_on(self.model.head.device):
            self.engine = embedded(self.model, self.tokenizer, recipe.slots)
        known = fingerprint.of_path(self.folder)
        self._weights = known["digest"] if known else ""
        self._waiting: deque[_Question] = deque()
        self._running: dict[int, tuple[_Question, int]] = {}  # request of the engine -> (question, number of the vote)
        self._begun = 0  # number of requests so far
        self._answers: list[tuple[int, Any]] = []
        self._counts = dict.fromkeys(("asked", "invalid", "votes", "unreadable", "tokens/prompt", "tokens/reply"), 0.0)

    @property
    def identity(self) -> str:
        told = json.dumps([self._weights, self.recipe.identity()], sort_keys=True)
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    @property
    def description(self) -> str:
        recipe, size = self.recipe, sum(p.numel() for p in self.model.parameters())
        worth = "a score" if recipe.scale else f"the {recipe.answer} of {recipe.words[0]!r}"
        votes = f"{recipe.votes} votes at temperature {recipe.temperature:g}" if recipe.temperature else "greedy"
        return f"{self.folder}, {size:,} parameters, context {self.context}, {worth}, {votes}"

    def submit(self, id: int, content: Any) -> None:
        self._counts["asked"] += 1
        question = self._read(id, content)
        if isinstance(question, str):
            self._answer(id, self._invalid(question))
        else:
            self._waiting.append(question)

    def poll(self) -> list[tuple[int, Any]]:
        """Sample a few tokens of the open votes, and return the complete answers."""
        with working_on(self.model.head.device):
            self._sample()
        answers, self._answers = self._answers, []
        return answers

    def _sample(self) -> None:
        while self._waiting and (self.engine.batch_invariant or not self._running):
            self._begin(self._waiting.popleft())
        for completion in self.engine.poll() if self._running else ():
            question, number = self._running.pop(completion.id)
            question.votes[number] = completion
            if len(question.votes) == self.recipe.votes:
                said = tuple(kept(completion.text) for _, completion in sorted(question.votes.items()))
                self._answer(question.id, self._count(question), said)

    def example(self, content: Any) -> float:
        return 0.5 if self.recipe.scale is None else sum(self.recipe.scale) / 2

    def counts(self) -> dict[str, float]:
        return dict(self._counts)

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self.engine.close()

    # -- questions -----------------------------------------------------------------------------------------------------

    def _check(self) -> int:
        """Return the number of tokens of the shortest reply with a verdict. Raises UserError if none is possible."""
        recipe, tokenizer = self.recipe, self.tokenizer
        where = f"{self.name}: the model {self.folder}"
        if recipe.chat and tokenizer.chat_template is None:
            raise UserError(f"{where} has no chat template: leave out chat, or put chat_template.jinja into its folder")
        if not self.model.eos_ids and tokenizer.eos_id is None and not recipe.stop:
            raise UserError(
                f"{where} has no end-of-sequence token: set eos_token_id in its config.json, or give a stop"
            )
        words = recipe.words if recipe.scale is None else (f"{recipe.scale[0]:g}", f"{recipe.scale[1]:g}")
        verdicts = {f"{recipe.marker} {word}": tokenizer.encode(f"{recipe.marker} {word}") for word in words}
        for verdict, tokens in verdicts.items():
            if tokenizer.unknown_id is not None and tokenizer.unknown_id in tokens:
                raise UserError(f"{where} can never produce {verdict!r}: its tokenizer lacks a token for part of it")
        least = min(map(len, verdicts.values()))
        if least > recipe.max_tokens:
            raise UserError(
                f"{self.name}: max_tokens {recipe.max_tokens} ends every reply before its verdict, which has {least} tokens"
            )
        empty = len(self._tokens("".join(text for text, _ in recipe.pattern)))
        if empty + least >= self.context:
            raise UserError(
                f"{where} has a context of {self.context} tokens, and the template alone has {empty}, a verdict {least}: "
                "shorten the template"
            )
        return least

    def _read(self, id: int, content: Any) -> _Question | str:
        """Parse an environment's request. Return the question, or an error message."""
        read = read_question(content, "scalar")
        if isinstance(read, str):
            return read
        known = {"prompt": read.asked, "response": read.replies[0], "reference": read.reference}
        missing = [place for _, place in self.recipe.pattern if place in ("prompt", "reference") and not known[place]]
        if missing:
            return f"the template shows {{{missing[0]}}}, and the question has none"
        text = "".join(part + (known[place] if place else "") for part, place in self.recipe.pattern)
        try:
            tokens = self._tokens(text)
        except UserError as error:
            return f"it cannot be read: {error}"
        if len(tokens) + self._least > self.context:
            return (
                f"the question has {len(tokens)} tokens, with no room for the verdict in the context of {self.context}"
            )
        if not tokens or max(tokens) >= self.model.config.vocab:
            return f"the tokenizer of {self.folder} gives tokens that its model does not have"
        return _Question(id, text, tokens)

    def _tokens(self, text: str) -> list[int]:
        shown = self.tokenizer.render([{"role": "user", "content": text}]) if self.recipe.chat else text
        return self.tokenizer.encode(shown, start=True)

    def _begin(self, question: _Question) -> None:
        recipe = self.recipe
        for number in range(recipe.votes):
            seed = seed_of(recipe.seed, "vote", question.text, number)
            self._begun += 1
            self._running[self._begun] = question, number
            sampling = Sampling(recipe.temperature, max_tokens=recipe.max_tokens, stop=recipe.stop, seed=seed)
            self.engine.submit(self._begun, question.tokens, sampling)
        self._counts["tokens/prompt"] += len(question.tokens)

    # -- answers -------------------------------------------------------------------------------------------------------

    def _answer(self, id: int, answer: float | Invalid, said: tuple[str, ...] = ()) -> None:
        self._counts["invalid"] += isinstance(answer, Invalid)
        self._answers.append((id, Reasoned(answer, said) if said else answer))

    def _count(self, question: _Question) -> float | Invalid:
        """Return the mean of the valid votes."""
        worth: list[float] = []
        problems: list[str] = []
        for _, completion in sorted(question.votes.items()):
            found = self._vote(question, completion)
            if isinstance(found, str):
                problems.append(found)
            else:
                worth.append(found)
            self._counts["tokens/reply"] += len(completion.tokens)
        self._counts["votes"] += len(question.votes)
        self._counts["unreadable"] += len(problems)
        if 2 * len(worth) < self.recipe.votes or not worth:
            return self._invalid(
                f"no verdict in {len(problems)} of {self.recipe.votes} replies; the first {problems[0]}"
            )
        return math.fsum(worth) / len(worth)

    def _vote(self, question: _Question, completion: Completion) -> float | str:
        """Return the value of a reply, or the reason why it is invalid."""
        recipe = self.recipe
        if completion.stop.truncated:
            return f"was cut off after {len(completion.tokens)} tokens"
        if recipe.scale is not None:
            found = final_score(completion.text, recipe.marker, recipe.scale)
        else:
            found = final_verdict(completion.text, recipe.marker, recipe.words)
        if found is None:
            return f"ends in {clip(inline(repr(completion.text[-60:])), 80)}"
        return found if recipe.answer == "share" else self._probability(question.tokens, completion)

    def _probability(self, prompt: list[int], completion: Completion) -> float:
        """Return P(first word) / (P(first word) + P(second word)) at the place of the reply's verdict, at temperature
        1.

        The mean over votes is the score of GenRM-CoT (Zhang et al. 2024, arXiv 2408.15240), which has no denominator.
        """
        decode, text = self.tokenizer.decode, completion.text
        found = behind(text, self.recipe.marker)
        assert found is not None, "this reply has a verdict"
        lengths = range(len(completion.tokens) + 1)
        kept = bisect.bisect_right(lengths, found.start, key=lambda n: len(decode(completion.tokens[:n]))) - 1
        before = [*prompt, *completion.tokens[:kept]]
        rest = text[len(decode(completion.tokens[:kept])) : found.start]  # text before the word in the same token
        words = [self.tokenizer.encode(rest + word) for word in self.recipe.words]
        first, second = continuation_logp(self.model, before, words)
        return 1.0 / (1.0 + math.exp(min(700.0, second - first)))

    def _invalid(self, reason: str) -> Invalid:
        return Invalid(f"{self.name}: {reason}", InvalidKind.UNANSWERED)


if TYPE_CHECKING:
    _proof: Callable[..., Service] = GenerativeJudge
