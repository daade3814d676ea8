"""Protocol of retrieval servers and their clients: that of Search-R1's `search_r1/search/retrieval_server.py`.

    POST /retrieve    {"queries": ["who wrote The Hobbit?"], "topk": 3, "return_scores": true}
    200               {"result": [[{"document": {"id": "p17", "contents": "\\"The Hobbit\\"\\n..."}, "score": 11.2}, ...]]}

The result has a list for each query, in order. Without `return_scores` its entries are documents. If `topk` is missing,
null or 0, the server's default applies. Errors are {"detail": a line}.

Answers are untrusted and parsed strictly. Servers of that protocol differ, however, so ids and scores may be missing, and
there may be more passages than requested.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.messages import clip, near, short
from posttrain.services.retrieval.passage_index import Hit
from posttrain.services.retrieval.passages import LONGEST_CONTENTS
from posttrain.system.endpoint import EndpointFailure

PATH = "retrieve"
FIELDS = ("queries", "topk", "return_scores")
MOST_BYTES = 16 << 20  # of a request
MOST_QUERIES = 4096  # of a request: Search-R1's trainer sends those of a whole batch at once
LONGEST_QUERY = 32_768  # characters
MOST_TOPK = 100
MOST_PASSAGES = 50_000  # most passages of an answer
MOST_SCORE = 1e30  # largest absolute score


class SearchRefused(Exception):
    """A request that is refused, with status and reason."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(frozen=True)
class SearchRequest:
    queries: tuple[str, ...]
    topk: int
    scores: bool  # whether scores are returned


# -- the server's side -------------------------------------------------------------------------------------------------


def read_request(body: bytes, topk: int) -> SearchRequest:
    """Parse a request. `topk`: the server's default. Raises SearchRefused."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, numbers of thousands of digits, too deep
        raise SearchRefused(400, f"the body is not JSON: {clip(str(error), 100)}") from None
    if not isinstance(asked, dict):
        raise SearchRefused(
            422, f'the body is {short(asked)}; expected {{"queries": [...], "topk": 3, "return_scores": true}}'
        )
    if unknown := next((name for name in asked if name not in FIELDS), None):
        known = near(unknown, FIELDS) or f"; there are {', '.join(FIELDS)}"
        raise SearchRefused(400, f"{clip(unknown)} is not a field of a request{known}")
    queries, scores = asked.get("queries"), asked.get("return_scores", False)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        wrong = queries if not isinstance(queries, list) else next(q for q in queries if not isinstance(q, str))
        raise SearchRefused(
            422, f"queries: expected a list of texts, not {short(wrong)}" if "queries" in asked else "queries: missing"
        )
    if len(queries) > MOST_QUERIES:
        raise SearchRefused(422, f"queries: {len(queries):,}; at most {MOST_QUERIES:,} may be asked at once")
    if (longest := max(map(len, queries), default=0)) > LONGEST_QUERY:
        raise SearchRefused(422, f"queries: one of {longest:,} characters; a query has at most {LONGEST_QUERY:,}")
    if not isinstance(scores, bool):
        raise SearchRefused(422, f"return_scores: expected true or false, not {short(scores)}")
    return SearchRequest(tuple(queries), _topk(asked.get("topk"), topk, len(queries)), scores)


def _topk(asked: Any, default: int, queries: int) -> int:
    if asked is None or (asked == 0 and not isinstance(asked, bool)):
        asked = default
    if isinstance(asked, bool) or not isinstance(asked, int) or not 0 < asked <= MOST_TOPK:
        raise SearchRefused(422, f"topk: expected a whole number from 1 to {MOST_TOPK}, not {short(asked)}")
    if asked * queries > MOST_PASSAGES:
        raise SearchRefused(
            422, f"topk: {queries:,} queries times {asked} passages; at most {MOST_PASSAGES:,} in an answer"
        )
    return asked


def written_answer(found: Sequence[Sequence[Hit]], scores: bool) -> bytes:
    result: list[list[Any]] = []
    for own in found:
        documents = [{"id": hit.passage.id, "contents": hit.passage.contents} for hit in own]
        pairs = zip(documents, own, strict=True)
        result.append([{"document": document, "score": hit.score} for document, hit in pairs] if scores else documents)
    return json.dumps({"result": result}, ensure_ascii=False).encode()


# -- the client's side -------------------------------------------------------------------------------------------------


def written_request(queries: Sequence[str], topk: int) -> bytes:
    return json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()


def read_answer(message: Any, queries: int, topk: int) -> list[list[dict[str, Any]]] | EndpointFailure:
    """Return for each query its passages {"id", "contents", "score"}, at most `topk`. Missing fields are None."""
    result = message.get("result") if isinstance(message, dict) else None
    if not isinstance(result, list):
        return _rubbish("JSON without a list as its result")
    if len(result) != queries or not all(isinstance(own, list) for own in result):
        return _rubbish(f"a result of {len(result)} for {queries} quer{'y' if queries == 1 else 'ies'}")
    found = [[_read_passage(one) for one in own[:topk]] for own in result]
    wrong = next((one for own in found for one in own if isinstance(one, EndpointFailure)), None)
    return wrong or [[one for one in own if not isinstance(one, EndpointFailure)] for own in found]


def _read_passage(one: Any) -> dict[str, Any] | EndpointFailure:
    scored = isinstance(one, dict) and isinstance(one.get("document"), dict)
    document, score = (one["document"], one.get("score")) if scored else (one, None)
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(contents, str) or not contents.strip():
        return _rubbish("a passage without contents")
    if len(contents) > LONGEST_CONTENTS:
        return _rubbish(f"a passage of {len(contents):,} characters")
    id = document.get("id")
    if isinstance(id, bool) or not isinstance(id, str | int | None):
        return _rubbish(f"a passage whose id is {short(id)}")
    if score is not None and not is_score(score):
        return _rubbish(f"a passage whose score is {short(score)}")
    return {
        "id": None if id is None else _whole(str(id)),
        "contents": _whole(contents),
        "score": None if score is None else float(score),
    }


def _whole(text: str) -> str:
    """Remove halves of surrogate pairs, which JSON can contain and a file cannot."""
    return text.encode("utf-8", "replace").decode()


def is_score(value: Any) -> bool:
    """Return whether the value is a number that fits a float."""
    return type(value) in (int, float) and -MOST_SCORE <= value <= MOST_SCORE


def _rubbish(what: str) -> EndpointFailure:
    return EndpointFailure(f"{what} instead of an answer", rubbish=True)
