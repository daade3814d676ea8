"""An engine that searches for replies: it samples steps with another engine, and a scorer chooses among them.

A request is a search of its own. Many go on at once and share the engine below and the scorer. Steps fork the kept state of
the reply that they continue, so nothing is computed twice. Seeds follow from the request's seed and the number of the
proposal, so a result depends on no other request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from posttrain.core.protocols import Engine, ReadingEngine
from posttrain.core.seeds import seed_of
from posttrain.core.types import Completion, Invalid, InvalidKind, Sampling, StopReason, UserError
from posttrain.engines.request import Request, complete, reached_stop, stop_window, tokens_to_stop
from posttrain.engines.search.tree_search import (
    SEARCHES,
    Asking,
    Choice,
    Propose,
    SearchNode,
    SearchSettings,
    SearchStep,
    SearchTree,
)
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.system.bounded_places import bounded_places
from posttrain.verify.answer import voted_answer

PIECE = 8  # tokens between two looks for a regular expression

Verifier = Callable[[Mapping[str, Any], str], float | None]
"""Computes the value of a whole reply, from 0 to 1: (context, reply). None: it cannot read so long a reply."""

StateValue = Callable[[Sequence[int], bool], float]
"""Computes the value of a partial reply from its tokens: (those of prompt and reply, whether the reply is whole)."""

Scorer = Callable[[Mapping[str, Any], str, Callable[[float | Invalid], None]], None]
"""Computes the value of a partial reply of whole steps: (context, reply so far, function to call with the value)."""


@dataclass(frozen=True)
class SearchPlan:
    """Settings of the searches of an engine. Those that depend on the request, tokens and longest, are set for each."""

    name: str  # of SEARCHES
    settings: SearchSettings
    budget: int | None = None  # sampled tokens per reply; None: width x proposals replies of full length
    stop: str = "\n"  # the text that ends a step; "": none
    expression: str = ""  # or a regular expression between slashes for it
    choice: Choice = "best"


@dataclass(frozen=True)
class SearchRecord:
    """The course of a search."""

    value: float  # of the reply
    spent: int  # sampled tokens
    expansions: int  # partial replies after which steps were proposed
    finished: int  # distinct whole replies among which it was chosen
    unvalued: int = 0  # partial replies that were too long for the scorer, and so had the value 0
    unverified: int | None = None  # those of them that the verifier could not read; None: there is no verifier

    @property
    def columns(self) -> dict[str, Any]:
        unverified = {} if self.unverified is None else {"unverified": self.unverified}
        return {
            "value": self.value,
            "search_tokens": self.spent,
            "expansions": self.expansions,
            "finished": self.finished,
            **({"unvalued": self.unvalued} if self.unvalued else {}),
            **unverified,
        }


@dataclass
class _Search:
    """A request whose reply is being searched for."""

    id: int
    prompt: tuple[int, ...]
    context: Mapping[str, Any]
    sampling: Sampling
    tree: SearchTree
    asking: Asking
    asked: Propose | None = None
    answers: list[Any] = field(default_factory=list)
    missing: int = 0  # answers that have not come
    proposals: int = 0
    kept: list[int] = field(default_factory=list)  # requests whose state is kept
    unvalued: int = 0
    version: int = 0
    cancelled: bool = False


@dataclass
class _Part:
    """A step in the making."""

    search: _Search
    place: int  # among the answers
    node: SearchNode
    seed: int
    most: int
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)


class SearchEngine:
    """Engine that searches; implements `posttrain.core.protocols.Engine` and `ReadingEngine`. Replies have no later turns.

    `context`: tokens of prompt and reply together that the model reads. `scorer` or `critic`: gives partial replies
    their values; both None: they have none. A partial reply that is too long for the scorer has the value 0, the lowest.
    `verifier`: gives whole replies their value at the end, among which the plan chooses. A reply that it cannot read has
    the value 0, the lowest.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        context: int,
        plan: SearchPlan,
        scorer: Scorer | None,
        verifier: Verifier | None = None,
        critic: StateValue | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.eos_ids, self.context = engine, tokenizer, tuple(eos_ids), context
        self.plan, self.scorer, self.verifier, self.critic = plan, scorer, verifier, critic
        self._searches: dict[int, _Search] = {}
        self._parts: dict[int, _Part] = {}  # by request of the engine below
        self._values: deque[tuple[_Search, int, float | Invalid]] = deque()  # that have come
        self._done: list[Completion] = []
        self._records: dict[int, SearchRecord] = {}
        self._requests = 0

    @property
    def batch_invariant(self) -> bool:
        return self.engine.batch_invariant

    @property
    def backend(self) -> str:
        return f"{self.plan.name} search with {self.engine.backend}"

    def record(self, seed: int) -> SearchRecord | None:
        """Return and forget the course of the search with this seed; None: there was none."""
        return self._records.pop(seed, None)

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        """Search for a reply to a prompt of plain text."""
        self.submit_read(id, prompt, {"prompt": self.tokenizer.decode(prompt)}, sampling)

    def submit_read(
        self, id: int, prompt: Sequence[int], context: Mapping[str, Any], sampling: Sampling, keep: bool = False
    ) -> None:
        """Search for a reply. See `posttrain.core.protocols.ReadingEngine`."""
        settings = self.plan.settings
        replies = settings.width * settings.proposals
        tokens = replies * sampling.max_tokens if self.plan.budget is None else self.plan.budget
        scored = self.scorer is not None or self.critic is not None
        tree = SearchTree(replace(settings, tokens=tokens, longest=sampling.max_tokens, scored=scored))
        asking = SEARCHES[self.plan.name](tree)
        search = self._searches[id] = _Search(id, tuple(prompt), context, sampling, tree, asking)
        self._go_on(search, None)

    def poll(self) -> list[Completion]:
        """Let the engine below work, and pass on what has come. Return the replies that were found."""
        while self._values:
            search, place, value = self._values.popleft()
            if search.cancelled:
                continue
            if isinstance(value, Invalid):
                if value.kind is not InvalidKind.TOO_LONG:
                    raise UserError(f"--search: a partial reply has no value ({value.reason})")
                search.unvalued += 1
                value = 0.0
            self._answer(search, place, value)
        for completion in sorted(self.engine.poll(), key=lambda c: c.id) if self._parts else ():
            self._take(completion)
        done, self._done = self._done, []
        return done

    def cancel(self, id: int) -> None:
        search = self._searches.pop(id, None)
        self._done = [done for done in self._done if done.id != id]
        if search is None:
            return
        search.cancelled = True
        for request in [request for request, part in self._parts.items() if part.search is search]:
            self.engine.cancel(request)
            del self._parts[request]
        for request in search.kept:
            self.engine.forget(request)

    def forget(self, id: int) -> None:
        pass

    def copy(self, id: int, to: int, tokens: int) -> None:
        pass

    def load(self, weights: Any, version: int) -> None:
        self.engine.load(weights, version)

    def close(self) -> None:
        self._searches.clear()
        self._parts.clear()
        self.engine.close()

    # -- a search ------------------------------------------------------------------------------------------------------

    def _go_on(self, search: _Search, answers: list[Any] | None) -> None:
        """Give a search its answers, and ask what it asks next."""
        try:
            asked = search.asking.send(answers)
        except StopIteration:
            return self._finish(search)
        search.answers, search.missing = [None] * len(asked.nodes), len(asked.nodes)
        if not isinstance(asked, Propose):
            for place, node in enumerate(asked.nodes):
                self._ask_value(search, place, node)
            return
        search.asked = asked
        for place, (node, most) in enumerate(zip(asked.nodes, asked.most, strict=True)):
            seed = seed_of(search.sampling.seed, "search", search.proposals)
            search.proposals += 1
            part = _Part(search, place, node, seed, most)
            self._requests += 1
            last = node.step.origin if node.step is not None else None
            if last is not None:
                self.engine.copy(last, self._requests, len(search.prompt) + node.length)
            search.kept.append(self._requests)
            self._submit(self._requests, part)

    def _submit(self, request: int, part: _Part) -> None:
        """Sample a step, or the next piece of it."""
        search, own, asked = part.search, part.search.sampling, part.search.asked
        assert asked is not None, "steps are sampled where they were proposed"
        known = len(part.tokens)
        whole = asked.whole
        tokens = part.most - known
        if self.plan.expression and not whole:
            tokens = min(tokens, PIECE)
        stop = own.stop if whole or not self.plan.stop else (self.plan.stop, *own.stop)
        heat = 0.0 if asked.greedy else own.temperature
        seed = seed_of(part.seed, "behind", known) if known else part.seed
        sampling = Sampling(heat, own.top_p, own.top_k, tokens, stop, seed)
        self._parts[request] = part
        self.engine.submit(request, [*search.prompt, *part.node.tokens, *part.tokens], sampling, keep=not whole)

    def _take(self, completion: Completion) -> None:
        """Read tokens of a step, which is then whole or goes on."""
        part = self._parts.pop(completion.id)
        part.search.version = completion.version
        part.tokens += completion.tokens
        part.logp += completion.logp
        step = self._step(part, completion)
        if step is None:
            self._submit(completion.id, part)
        else:
            self._answer(part.search, part.place, step)

    def _step(self, part: _Part, completion: Completion) -> SearchStep | None:
        """Return the step of these tokens; None: it goes on."""
        search, before, sampled = part.search, part.node.tokens, len(part.tokens)
        count, ended = sampled, completion.stop is StopReason.EOS
        if (own := search.sampling.stop) and not ended:
            stopped = tokens_to_stop(self.tokenizer, before, part.tokens, own)
            ended, count = stopped is not None, stopped or sampled
        found = ended or completion.stop is StopReason.STOP
        assert search.asked is not None, "steps are sampled where they were proposed"
        if not found and self.plan.expression and not search.asked.whole:
            place = step_end(self.tokenizer.decode(part.tokens), self.plan.expression)
            found = place is not None
            if place is not None:
                count = self._tokens_of(part.tokens, place)
            elif sampled < part.most and completion.stop is StopReason.LENGTH:
                return None
        length = len(before) + count
        full = length >= search.sampling.max_tokens or len(search.prompt) + length >= self.context
        cut = not ended and (full or not found)
        return SearchStep(tuple(part.tokens[:count]), tuple(part.logp[:count]), ended, cut, sampled, completion.id)

    def _tokens_of(self, tokens: Sequence[int], end: int) -> int:
        """Return the number of tokens that the first `end` characters of their text take."""
        text = self.tokenizer.decode(tokens)
        return next(n for n in range(1, len(tokens) + 1) if self.tokenizer.decode(tokens[:n])[:end] == text[:end])

    def _ask_value(self, search: _Search, place: int, node: SearchNode) -> None:
        if self.critic is not None:
            return self._hear(search, place, self.critic([*search.prompt, *node.tokens], node.ended))
        assert self.scorer is not None, "a search without a scorer asks for no values"
        self.scorer(search.context, self._text(search, node), partial(self._hear, search, place))

    def _hear(self, search: _Search, place: int, value: float | Invalid) -> None:
        self._values.append((search, place, value))

    def _answer(self, search: _Search, place: int, answer: SearchStep | float) -> None:
        if search.cancelled:
            return
        search.answers[place] = answer
        search.missing -= 1
        if not search.missing:
            self._go_on(search, search.answers)

    # -- its reply -----------------------------------------------------------------------------------------------------

    def _completion(self, search: _Search, node: SearchNode) -> Completion:
        """Return a partial reply as a completion."""
        tokens, stop = node.tokens, search.sampling.stop
        stopped = bool(stop) and reached_stop(self.tokenizer, tokens[-stop_window(stop) :], stop)
        found = complete(
            Request(search.id, search.prompt, search.sampling),
            tokens,
            [logp for step in node.path for logp in step.logp],
            stopped=stopped,
            eos_ids=self.eos_ids,
            tokenizer=self.tokenizer,
            version=search.version,
        )
        full = len(search.prompt) + len(tokens) >= self.context
        return found if found.stop is not StopReason.CONTEXT or full else replace(found, stop=StopReason.LENGTH)

    def _text(self, search: _Search, node: SearchNode) -> str:
        return self._completion(search, node).text

    def _finish(self, search: _Search) -> None:
        tree, unverified = search.tree, None
        if self.verifier is not None:
            found = [self.verifier(search.context, self._text(search, whole)) for whole in tree.finished]
            unverified = found.count(None)
            for whole, value in zip(tree.finished, found, strict=True):
                whole.value = value or 0.0

        def answer(node: SearchNode) -> str:
            return voted_answer(self._text(search, node))

        node = tree.chosen(self.plan.choice, answer)
        self._done.append(self._completion(search, node))
        self._records[search.sampling.seed] = SearchRecord(
            node.value, tree.spent, tree.expansions, len(tree.finished), search.unvalued, unverified
        )
        for request in search.kept:
            self.engine.forget(request)
        del self._searches[search.id]


def step_end(text: str, delimiter: str) -> int | None:
    """Return the end of the first step of a text, its delimiter included; None: it has not ended. Blank text is no step.

    Raises UserError for a delimiter that takes too long.
    """
    return next((end for begin, end in bounded_places(delimiter, text) if text[:begin].strip()), None)


if TYPE_CHECKING:
    _proof: Callable[..., Engine] = SearchEngine
    _reading: Callable[..., ReadingEngine] = SearchEngine
