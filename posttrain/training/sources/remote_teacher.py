"""Teacher behind an OpenAI-compatible endpoint: token ids in, their log-probabilities out.

It requests /completions with an echo of the prompt and its log-probabilities, which vLLM and similar servers support
for prompts of token ids. The endpoint samples one further token, which is discarded, as some refuse to sample none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor

from posttrain.core.messages import clip
from posttrain.core.transcripts import Transcript
from posttrain.core.types import UserError
from posttrain.system.endpoint import Endpoint, EndpointFailure, key_in
from posttrain.training.sources.packing import needed_length
from posttrain.training.sources.teacher_targets import ALWAYS_1, RemoteTeacherClient, TopTokens

KEY = "OPENAI_API_KEY"
AT_ONCE = 16  # concurrent requests
SECONDS = 300.0  # timeout of an answer
AS_IDS = "token_id:"
"""Begins a token that a server shows by its id, as an option of vLLM's requests does."""
ADDED = 0.001  # by how much the probabilities of some tokens may add up to more than 1
LEAST_LOGP = -1e30  # float32 holds it
PROBE = (0, 1, 2)  # ids that every vocabulary has
RETRIES = 6  # of a request: waits half a minute in all, unless the endpoint requests otherwise


class Decodes(Protocol):
    """The part of a tokenizer that a remote teacher needs."""

    def decode(self, tokens: Sequence[int]) -> str: ...


class RemoteTeacher:
    """Client of a remote teacher, see `RemoteTeacherClient` in `posttrain.training.sources.teacher_targets`.

    The address is "http://host:8000/v1", or "...#MODEL" if it serves several models. The key in OPENAI_API_KEY is sent
    if there is one. An endpoint's answers to equal requests may differ in the last bits, so a resumed run is exact only
    as far as the endpoint is.
    """

    def __init__(self, address: str, fixed: bool = False) -> None:
        """`fixed`: the teacher's temperature is its own, not that of sampling.

        Raises UserError if the endpoint does not answer, or does not answer like an OpenAI-compatible endpoint.
        """
        self.fixed = fixed
        self.address, _, model = address.partition("#")
        self._endpoint = Endpoint(self.address, key_in(KEY), AT_ONCE, None, SECONDS, RETRIES)
        try:
            self.model = model or self._only_model()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._endpoint.close()

    def logp(self, transcripts: Sequence[Transcript]) -> list[Tensor]:
        """See `RemoteTeacherClient`. Raises UserError if the endpoint fails for good, or answers something else, and for
        tokens that were sampled at a temperature that it cannot follow.
        """
        self._refuse_temperatures(transcripts)
        return self._endpoint.wait_for_all([self._of_transcript(transcript) for transcript in transcripts])

    def top(self, transcripts: Sequence[Transcript], count: int) -> list[TopTokens]:
        """See `RemoteTeacherClient`; raises as `logp` does."""
        self._refuse_temperatures(transcripts)
        return self._endpoint.wait_for_all([self._top_of_transcript(transcript, count) for transcript in transcripts])

    def _refuse_temperatures(self, transcripts: Sequence[Transcript]) -> None:
        learned = [span.temperature for t in transcripts for span in t.spans if span.learned]
        own = [temperature for temperature in learned if temperature is not None]
        if own and not self.fixed:
            raise UserError(
                f"turns were sampled at temperature {min(own):g}, and the teacher at {self.address} {ALWAYS_1}"
            )

    def check(self, tokens: Sequence[int], tokenizer: Decodes) -> None:
        """Raise UserError unless the endpoint returns prompt log-probabilities, and decodes these ids like the
        student.
        """
        choice = self._endpoint.wait(self._completed(tokens))
        self._read(choice, tokens)
        said = _dict(choice.get("logprobs")).get("tokens")
        if isinstance(said, list) and len(said) >= len(tokens) and all(isinstance(t, str) for t in said):
            theirs = [t for t in said[: len(tokens)] if not t.startswith(AS_IDS)]
            ours = tokenizer.decode(list(tokens))
            if len(theirs) == len(tokens) and "".join(theirs).strip() != ours.strip() and "\ufffd" not in ours:
                raise UserError(
                    f"the teacher at {self.address} has another tokenizer: it reads {clip(repr(''.join(theirs)), 60)} where "
                    f"the student wrote {clip(repr(ours), 60)}; use a teacher of the student's family"
                )

    def check_top(self, count: int) -> None:
        """Raise UserError unless the endpoint names its `count` likeliest tokens."""
        found = self._endpoint.wait(self._called(PROBE, count))
        if isinstance(found, EndpointFailure) and found.status in (400, 422):
            raise UserError(
                f"the teacher at {self.address} does not name {count} likeliest tokens: {found.reason}; vLLM names at most "
                "--max-logprobs, 20 by default: give it more, or --teacher-top-k less"
            )
        choice = found if isinstance(found, dict) else self._refuse(found)
        self._read_top(choice, PROBE, range(1, len(PROBE)), count)

    async def _of_transcript(self, transcript: Transcript) -> Tensor:
        places = transcript.scored
        if not len(places):
            return torch.zeros(0)
        tokens = transcript.tokens[: needed_length(transcript) + 1]
        values = self._read(await self._completed(tokens), tokens)
        return torch.tensor([values[place] for place in places], dtype=torch.float32)

    async def _top_of_transcript(self, transcript: Transcript, count: int) -> TopTokens:
        places = transcript.scored.tolist()
        if not places:
            return TopTokens(torch.zeros(0, count + 1, dtype=torch.int64), torch.zeros(0, count + 1), torch.zeros(0))
        tokens = transcript.tokens[: needed_length(transcript) + 1]
        return self._read_top(await self._completed(tokens, count), tokens, places, count)

    async def _completed(self, tokens: Sequence[int], top: int = 0) -> dict[str, Any]:
        found = await self._called(tokens, top)
        return found if isinstance(found, dict) else self._refuse(found)

    async def _called(self, tokens: Sequence[int], top: int) -> dict[str, Any] | EndpointFailure:
        """Ask for the log-probabilities of tokens, and of the `top` likeliest tokens at each."""
        asked = {
            "model": self.model,
            "prompt": [int(token) for token in tokens],
            "max_tokens": 1,
            "temperature": 1.0,
            "echo": True,
            "logprobs": top or 1,
            **({"return_tokens_as_token_ids": True} if top else {}),
        }
        return await self._endpoint.call("completions", json.dumps(asked).encode(), _first_choice)

    def _read(self, choice: dict[str, Any], tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of a prompt; nan for the first."""
        listed = choice.get("prompt_logprobs")
        if listed:  # vLLM's own form: by token id
            pairs = zip(_list(listed), tokens, strict=False)
            found = [_dict(_dict(at).get(str(token))).get("logprob") for at, token in pairs]
        else:
            found = _list(_dict(choice.get("logprobs")).get("token_logprobs"))[: len(tokens)]
        bad = [x for x in found[1:] if not _is_logp(x)]
        if len(found) < len(tokens) or bad:
            raise self._strange(
                f"{len(found)} log-probabilities for {len(tokens)} tokens of a prompt (echo, logprobs)"
                if not bad
                else f"a log-probability {clip(repr(bad[0]))}"
            )
        return [math.nan, *(float(x) for x in found[1:] if x is not None)]

    def _read_top(self, choice: dict[str, Any], tokens: Sequence[int], places: Sequence[int], count: int) -> TopTokens:
        """Return the likeliest tokens at these places of a prompt."""
        values = self._read(choice, tokens)
        listed = _list(choice.get("prompt_logprobs") or _dict(choice.get("logprobs")).get("top_logprobs"))
        if len(listed) < len(tokens):
            raise self._strange(f"the likeliest tokens at {len(listed)} of {len(tokens)} tokens of a prompt")
        ids = torch.full((len(places), count + 1), -1)
        logp = torch.full((len(places), count + 1), -math.inf)
        for row, place in enumerate(places):
            named = self._named(listed[place], count)
            named.setdefault(tokens[place], values[place])
            ids[row, : len(named)] = torch.tensor(list(named))
            logp[row, : len(named)] = torch.tensor(list(named.values()))
        total = logp.double().exp().sum(-1).max().item()
        if total > 1 + ADDED:
            raise self._strange(f"probabilities of a token that add up to {total:.4g}")
        return TopTokens(ids, logp, torch.tensor([values[place] for place in places], dtype=torch.float32))

    def _named(self, listed: Any, count: int) -> dict[int, float]:
        """Return the `count` likeliest tokens of an answer at one place, with their log-probabilities."""
        found: dict[int, float] = {}
        for token, value in _dict(listed).items():
            number, own = token.removeprefix(AS_IDS), isinstance(value, dict)  # vLLM's own form has no prefix
            logp = value.get("logprob") if own else value
            if not (number.isascii() and number.isdigit() and len(number) < 10) or own == (number != token):
                raise self._strange(
                    f"the token {clip(repr(token), 40)} in place of its id, which vLLM shows on request ({AS_IDS}N)"
                )
            if not _is_logp(logp):
                raise self._strange(f"a log-probability {clip(repr(logp))}")
            found[int(number)] = float(logp)
        if len(found) < count:
            raise self._strange(f"{len(found)} likeliest tokens, and --teacher-top-k is {count}")
        return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[:count])

    def _only_model(self) -> str:
        names = self._endpoint.try_once(self._endpoint.call("models", None, _names, retries=1))
        if not isinstance(names, list):
            self._refuse(names)
        if len(names) != 1:
            raise UserError(
                f"the teacher at {self.address} serves {', '.join(map(str, names)) or 'no model'}: choose one of them, such "
                f"as --teacher {self.address}#MODEL"
            )
        return names[0]

    def _refuse(self, failed: EndpointFailure) -> NoReturn:
        if failed.rubbish:
            raise self._strange(failed.reason)
        way = failed.way(f"check the environment variable {KEY}", "its address and model")
        raise UserError(f"the teacher at {self.address} does not answer: {failed.reason}; {way}")

    def _strange(self, what: str) -> UserError:
        return UserError(
            f"the teacher at {self.address} sent {what}; it must be an OpenAI-compatible endpoint whose /completions echoes "
            "the log-probabilities of a prompt of token ids, as vLLM's does, and its address ends in /v1 as a rule"
        )


def _first_choice(message: Any) -> dict[str, Any] | EndpointFailure:
    try:
        return dict(message["choices"][0])
    except (LookupError, TypeError, ValueError):
        return EndpointFailure(f"an answer without choices: {clip(str(message))}", rubbish=True)


def _is_logp(value: Any) -> bool:
    """Return whether a value is the logarithm of a probability, as far as rounding allows."""
    return type(value) in (int, float) and LEAST_LOGP <= value <= ADDED


def _dict(message: Any) -> dict[str, Any]:
    return message if isinstance(message, dict) else {}


def _list(message: Any) -> list[Any]:
    return message if isinstance(message, list) else []


def _names(message: Any) -> list[str] | EndpointFailure:
    """Return the models that an endpoint serves."""
    try:
        return [str(model["id"]) for model in message["data"]]
    except (LookupError, TypeError):
        return EndpointFailure(f"no list of models: {clip(str(message))}", rubbish=True)


if TYPE_CHECKING:
    _proof: Callable[..., RemoteTeacherClient] = RemoteTeacher
