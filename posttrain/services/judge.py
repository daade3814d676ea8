"""A judge as a service: a language model behind an endpoint that scores replies or compares them.

Decides how answers are combined: criteria are averaged by weight, a pair is compared in both orders and counts as a tie
if the results disagree, and a request with any invalid answer is Invalid as a whole. After an invalid answer, the
request is repeated once, with the error.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.core.protocols import Service
from posttrain.core.types import Invalid, InvalidKind, Reasoned, UserError, bare
from posttrain.services.answer_cache import AnswerCache
from posttrain.services.judge_prompt import (
    ENDED,
    JudgeAnswer,
    JudgeQuestion,
    again,
    kept,
    read_completion,
    read_question,
    read_verdict,
    request,
    schema,
)
from posttrain.services.judge_recipe import Criterion, Recipe
from posttrain.system.endpoint import Endpoint, EndpointFailure, key_in

FIRST = {"A": 1.0, "tie": 0.5, "B": 0.0}
"""Verdict of a comparison -> value for the reply that was shown as A."""
PATH = "chat/completions"
REFUSING = (400, 415, 422, 500, 501)
"""HTTP statuses with which endpoints refuse an output format."""
TRIED = ("What is 2 + 2?", "2 + 2 is 4.", "2 + 2 is 5.")


class Judge:
    """Service of a judge behind an endpoint; implements `posttrain.core.protocols.Service`.

    Answers are Reasoned, with the texts of the calls from which they were parsed. The answer of a scalar judge is a
    number of its scale, that of a pairwise one 1 (the first reply is better), 0.5 or 0. With several criteria it is a
    dict of these, with their weighted mean as "reward".
    """

    def __init__(self, recipe: Recipe, name: str = "judge", cache: AnswerCache | None = None) -> None:
        """Create the service. `cache`: replaces the user's. Raises UserError if the recipe's key is missing in the
        environment.
        """
        self.recipe, self.name = recipe, name
        key = key_in(recipe.key_env) if recipe.key_env else None
        if recipe.key_env and key is None:
            raise UserError(f"{name}: the environment variable {recipe.key_env} (key_env) holds no key: set it")
        self.cache = (cache or AnswerCache()) if recipe.cache else None
        self.endpoint = Endpoint(
            recipe.endpoint, key, recipe.calls, recipe.requests_per_minute, recipe.timeout, recipe.retries
        )
        self._asks = f"{self.endpoint.address}/{PATH}"  # key of the endpoint in the cache
        self._answers: list[tuple[int, Any]] = []
        counted = ("asked", "invalid", "cached", "rubbish", "disagreements", "tokens/prompt", "tokens/reply")
        self._counts = dict.fromkeys(counted, 0.0)

    @property
    def identity(self) -> str:
        told = json.dumps(self.recipe.identity(), sort_keys=True)
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    @property
    def description(self) -> str:
        recipe = self.recipe
        what = "which of two is better" if recipe.kind == "pairwise" else f"{recipe.scale[0]:g} to {recipe.scale[1]:g}"
        by = f" by {', '.join(c.name for c in recipe.criteria)}" if recipe.criteria else ""
        return f"{recipe.model} at {recipe.endpoint}, {what}{by}, {recipe.calls} calls at once"

    def submit(self, id: int, content: Any) -> None:
        self._counts["asked"] += 1
        question = read_question(content, self.recipe.kind)
        if isinstance(question, str):
            self._answers.append((id, Invalid(question, InvalidKind.UNANSWERED)))
        else:
            self.endpoint.start(id, self._judge(question))

    def poll(self) -> list[tuple[int, Any]]:
        answers, self._answers = [*self._answers, *self.endpoint.finished()], []
        for _, answer in answers:
            if isinstance(answer, Exception):
                raise answer
            self._counts["invalid"] += isinstance(bare(answer), Invalid)
        return answers

    def example(self, content: Any) -> Any:
        low, high = self.recipe.scale
        value = 0.5 if self.recipe.kind == "pairwise" else (low + high) / 2
        return self._joined([value] * len(self.recipe.all_criteria))

    def counts(self) -> dict[str, float]:
        prices, tokens = (self.recipe.prompt_price, self.recipe.reply_price), self._counts
        cost = (tokens["tokens/prompt"] * prices[0] + tokens["tokens/reply"] * prices[1]) / 1e6
        return {**self._counts, **self.endpoint.counts, **({"cost": cost} if any(prices) else {})}

    def close(self) -> None:
        self.endpoint.close()

    def problem(self) -> str | None:
        """Return the reason why the endpoint cannot judge, after one short question; None if it can."""
        replies = TRIED[1:] if self.recipe.kind == "pairwise" else TRIED[1:2]
        body = request(self.recipe, JudgeQuestion(TRIED[0], replies), self.recipe.all_criteria)
        found = self.endpoint.try_once(self._call(body, retries=1))
        if not isinstance(found, EndpointFailure):
            return None
        if "response_format" in body and found.status in REFUSING:
            plain = {name: value for name, value in body.items() if name != "response_format"}
            if not isinstance(self.endpoint.try_once(self._call(plain, retries=1)), EndpointFailure):
                where = f"{self.name} at {self.recipe.endpoint}"
                fix = f'does not support structured = "{self.recipe.structured}": set structured = "none" in its recipe'
                return f"{where} {fix}; it reports {found.reason}"
        key = f"look at {self.recipe.key_env}" if self.recipe.key_env else "name its variable as key_env"
        way = found.way(key, "the recipe's endpoint and model")
        return f"{self.name} at {self.recipe.endpoint} does not answer: {found.reason}; {way}"

    # -- on the event loop ---------------------------------------------------------------------------------------------

    async def _judge(self, question: JudgeQuestion) -> Any:
        parts = self.recipe.all_criteria
        groups = [parts] if self.recipe.together else [(part,) for part in parts]
        verdicts = await asyncio.gather(*(self._verdict(question, group) for group in groups))
        said = tuple(text for _, texts in verdicts for text in texts)
        values: dict[str, float] = {}
        for verdict, _ in verdicts:
            if isinstance(verdict, Invalid):
                return Reasoned(verdict, said) if said else verdict
            values |= verdict
        return Reasoned(self._joined([values[part.name] for part in parts]), said)

    async def _verdict(
        self, question: JudgeQuestion, criteria: Sequence[Criterion]
    ) -> tuple[dict[str, float] | Invalid, list[str]]:
        """Return a value for each criterion, and the texts of the answers."""
        if self.recipe.kind == "scalar":
            found, said = await self._asked(question, criteria)
            return found if isinstance(found, Invalid) else {c.name: float(found[c.name]) for c in criteria}, said
        swapped = JudgeQuestion(question.asked, question.replies[::-1])
        (one, said), (other, more) = await asyncio.gather(
            self._asked(question, criteria), self._asked(swapped, criteria)
        )
        if isinstance(one, Invalid) or isinstance(other, Invalid):
            return one if isinstance(one, Invalid) else other, [*said, *more]
        values: dict[str, float] = {}
        for criterion in criteria:
            first, second = FIRST[one[criterion.name]], 1.0 - FIRST[other[criterion.name]]
            values[criterion.name] = first if first == second else 0.5
            self._counts["disagreements"] += first != second
        return values, [*said, *more]

    async def _asked(
        self, question: JudgeQuestion, criteria: Sequence[Criterion]
    ) -> tuple[dict[str, Any] | Invalid, list[str]]:
        """Return the verdict and text of one call, from the cache or from the endpoint, with one repetition."""
        body, wanted = request(self.recipe, question, criteria), schema(self.recipe, criteria)
        first = _written(body)
        if self.cache is not None and (known := self.cache.get(self._asks, first)) is not None:
            found = read_verdict(known, wanted)
            if not isinstance(found, str):
                self._counts["cached"] += 1
                return found, [kept(known)]
        problem, texts = "", list[str]()
        for _ in range(2):
            said = await self._call(body)
            if isinstance(said, EndpointFailure) and not said.rubbish:
                return self._invalid(said.reason), texts
            if isinstance(said, JudgeAnswer):
                found, texts = self._read(said, wanted), [kept(said.text)]
                if not isinstance(found, str):
                    if self.cache is not None:
                        self.cache.put(self._asks, first, said.text)
                    return found, texts
                problem, body = found, again(body, said.text, found)
            else:
                problem = said.reason
            self._counts["rubbish"] += 1
        return self._invalid(f"rubbish twice: {problem}"), texts

    def _read(self, said: JudgeAnswer, wanted: dict[str, Any]) -> dict[str, Any] | str:
        """Parse an answer. Return the verdict, or an error message."""
        if said.ended:
            return ENDED[said.ended].format(most=self.recipe.max_tokens)
        return read_verdict(said.text, wanted)

    async def _call(self, body: dict[str, Any], retries: int | None = None) -> JudgeAnswer | EndpointFailure:
        said = await self.endpoint.call(PATH, _written(body), read_completion, retries)
        if isinstance(said, JudgeAnswer):
            self._counts["tokens/prompt"] += said.prompt_tokens
            self._counts["tokens/reply"] += said.reply_tokens
        return said

    def _invalid(self, reason: str) -> Invalid:
        return Invalid(f"{self.name}: {reason}", InvalidKind.UNANSWERED)

    def _joined(self, values: Sequence[float]) -> Any:
        """Combine the criteria's values: the value of a single rubric, or a dict of all with their weighted mean."""
        if not self.recipe.criteria:
            return values[0]
        total = sum(c.weight for c in self.recipe.criteria)
        mean = sum(c.weight * value for c, value in zip(self.recipe.criteria, values, strict=True)) / total
        return {"reward": mean, **{c.name: value for c, value in zip(self.recipe.criteria, values, strict=True)}}


def _written(body: dict[str, Any]) -> bytes:
    """Encode a request; equal requests give equal bytes, the cache's key. Keys keep their order, by which models write
    reasons first. An answer that is asked about again may have half of a surrogate pair, which UTF-8 has no bytes for.
    """
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "backslashreplace")


if TYPE_CHECKING:
    _proof: Callable[..., Service] = Judge
