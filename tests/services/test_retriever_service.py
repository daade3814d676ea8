"""Environments are answered by an index or by any server of the protocol; what fails is Invalid, never an empty list."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from endpoints import Said
from endpoints import serving as behaving
from processes import descendants, gone
from retrieved import ROWS, served, small_index, write_rows

import posttrain
from posttrain.cli.main import main
from posttrain.core.protocols import Service
from posttrain.core.types import Invalid, InvalidKind, UserError
from posttrain.envs.play.answer_journal import ANSWERS
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.services import retriever as services
from posttrain.services.retrieval.passage_index import open_index
from posttrain.services.retriever import LocalRetriever, RemoteRetriever, retriever
from posttrain.system import endpoint as endpoints


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_index(tmp_path_factory.mktemp("asked") / "index")


@pytest.fixture(scope="module")
def local(folder: Path) -> Iterator[Service]:
    service = retriever(str(folder))
    yield service
    service.close()


@pytest.fixture(scope="module")
def remote(folder: Path) -> Iterator[Service]:
    with served(open_index(folder)) as port:
        service = retriever(f"http://127.0.0.1:{port}")
        yield service
        service.close()


@pytest.mark.parametrize("place", ["localhost:9", "127.0.0.1:9", "some.host:8000/retrieve", "localhost", "http://h:1"])
def test_an_address_is_one_with_and_without_http(place: str) -> None:
    service = retriever(place)
    assert isinstance(service, RemoteRetriever)
    assert service.endpoint.address == "http://" + place.removeprefix("http://").removesuffix("/retrieve")
    service.close()


def test_it_is_said_once_what_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    service = retriever("http://127.0.0.1:9", retries=3)
    assert all(isinstance(answer, Invalid) for answer in answers(service, ["a", "b"]))
    told = capsys.readouterr().err
    assert told.startswith("waiting for http://127.0.0.1:9: ClientConnectorError") and told.count("\n") == 1
    service.close()


def test_it_is_said_that_a_server_which_takes_its_time_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endpoints, "PATIENCE_SECONDS", 0.1)
    found = json.dumps({"result": [[{"document": {"id": "a", "contents": "x"}, "score": 1.0}]]}).encode()
    for after, told in ((0.0, ""), (0.4, "to answer, 30 s at most")):
        with behaving(lambda request, number, after=after: Said(raw=found, after=after)) as server:
            service = retriever(server.address)
            assert isinstance(service, RemoteRetriever) and service.problem() is None
            service.close()
        assert (told in capsys.readouterr().err) if told else not capsys.readouterr().err


def answers(service: Service, contents: list[Any]) -> list[Any]:
    for id, content in enumerate(contents):
        service.submit(id, content)
    found: dict[int, Any] = {}
    end = time.monotonic() + 30
    while len(found) < len(contents):
        assert time.monotonic() < end
        found |= dict(service.poll())
        time.sleep(0.001)
    return [found[id] for id in range(len(contents))]


QUESTIONS: list[Any] = [
    "capital of Italy", {"query": "novel"}, {"query": "France", "k": 1}, {"query": "zzz", "k": 100}, "", "\x00",
    "\ud800 Tiber", "\U0001f642", "x" * 32_768,
]  # fmt: skip


@pytest.mark.parametrize("which", ["local", "remote"])
def test_questions_are_answered_as_the_index_does(which: str, folder: Path, request: pytest.FixtureRequest) -> None:
    service: Service = request.getfixturevalue(which)
    index = open_index(folder)
    for question, answer in zip(QUESTIONS * 3, answers(service, QUESTIONS * 3), strict=True):
        asked = {"k": 3, **({"query": question} if isinstance(question, str) else question)}
        [hits] = index.search([asked["query"]], asked["k"])
        assert answer == [{"id": h.passage.id, "contents": h.passage.contents, "score": h.score} for h in hits]
    assert json.loads(json.dumps(answer)) == answer and not service.poll()
    example = service.example({"query": "a"})
    assert isinstance(example, list) and example[0].keys() == {"id", "contents", "score"}


@pytest.mark.parametrize("which", ["local", "remote"])
@pytest.mark.parametrize(
    "content",
    [None, 3, [], ["x"], {}, {"query": 3}, {"query": "x", "k": 0}, {"query": "x", "k": 101}, {"query": "x", "k": True},
     {"query": "x", "more": 1}],
)  # fmt: skip
def test_what_is_no_question_is_invalid(which: str, content: Any, request: pytest.FixtureRequest) -> None:
    [answer] = answers(request.getfixturevalue(which), [content])
    assert isinstance(answer, Invalid) and answer.kind is InvalidKind.UNANSWERED


@pytest.mark.parametrize("which", ["local", "remote"])
def test_of_a_query_that_is_too_long_the_beginning_counts(which: str, request: pytest.FixtureRequest) -> None:
    """A policy could otherwise get out of a bad reward by a long query."""
    service: Service = request.getfixturevalue(which)
    [long, short] = answers(service, ["Tiber " + "x" * 100_000, "Tiber"])
    assert isinstance(long, list) and [hit["id"] for hit in long] == [hit["id"] for hit in short] == ["rome"]


# -- servers -----------------------------------------------------------------------------------------------------------


def right(request: dict[str, Any]) -> Said:
    documents = [{"document": {"id": "a", "contents": f'"{query}"\ntext'}, "score": 1} for query in request["queries"]]
    return Said(raw=json.dumps({"result": [[document] for document in documents]}).encode())


FOUND = [{"id": "a", "contents": '"x"\ntext', "score": 1.0}]
HTML = Said(raw=b"<html><body>Bad gateway</body></html>", headers={"Content-Type": "text/html"})


@pytest.mark.parametrize(
    ("first", "calls"),
    [
        (Said(status=503, raw=b"busy"), 2),
        (Said(status=429, raw=b"{}", headers={"Retry-After": "0"}), 2),
        (Said(status=500, raw=b'{"detail": "oops"}'), 2),
        (Said(close=True), 2),
        (Said(after=1.0, raw=b"{}"), 2),
        (HTML, 2),
        (Said(raw=b"rubbish"), 2),
        (Said(raw=b'{"result": []}'), 2),
    ],
)
def test_what_may_help_is_tried_again(first: Said, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "SECONDS", 0.5)
    with behaving(lambda request, number: right(request) if number else first) as server:
        service = RemoteRetriever(server.address.removesuffix("/v1"), "retriever")
        assert answers(service, ["x"]) == [FOUND]
        assert server.asked == [{"queries": ["x"], "topk": 3, "return_scores": True}] * calls
        service.close()


@pytest.mark.parametrize(
    ("said", "reason", "calls"),
    [
        (Said(status=503, raw=b"busy"), "HTTP 503", 3),
        (Said(status=422, raw=b'{"detail": "topk: no"}'), r"HTTP 422 (topk: no)", 1),
        (Said(status=404, raw=b"{}"), "HTTP 404", 1),
        (Said(close=True), "ServerDisconnectedError", 3),
        (Said(after=1.0, raw=b"{}"), "no answer within 0.2 s", 3),
        (HTML, "a page of HTML instead of an answer", 2),
        (Said(raw=b""), "nothing instead of an answer", 2),
        (Said(raw=b"[" * 100_000), "which is no JSON, instead of an answer", 2),
        (Said(raw=b'{"result": [[{"document": {}}]]}'), "a passage without contents instead of an answer", 2),
        (Said(raw=b'{"result": [[], []]}'), "a result of 2 for 1 query instead of an answer", 2),
    ],
)
def test_what_helps_nothing_is_invalid_and_never_an_empty_list(
    said: Said, reason: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "SECONDS", 0.2)
    with behaving(lambda request, number: said) as server:
        service = RemoteRetriever(server.address.removesuffix("/v1"), "books", retries=2)
        [answer] = answers(service, ["x"])
        assert isinstance(answer, Invalid) and answer.kind is InvalidKind.UNANSWERED
        assert answer.reason.startswith("books: http://127.0.0.1") and reason in answer.reason
        assert len(server.asked) == calls
        assert service.counts()["invalid"] == 1
        problem = service.problem()
        assert problem is not None and problem.startswith("--retriever http://") and "\n" not in problem
        service.close()


def test_a_server_that_is_down_is_invalid() -> None:
    with behaving() as server:
        address = server.address.removesuffix("/v1")
    service = RemoteRetriever(address, "retriever", retries=2)
    [answer] = answers(service, ["x"])
    assert isinstance(answer, Invalid) and "ClientConnectorError" in answer.reason
    assert service.counts()["retries"] == 2 and "check that the server runs" in (service.problem() or "")
    service.close()


@pytest.mark.parametrize("path", ["", "/", "/retrieve", "/retrieve/"])
def test_an_address_may_be_given_with_its_path(path: str) -> None:
    with behaving(lambda request, number: right(request)) as server:
        service = retriever(server.address.removesuffix("/v1") + path)
        assert answers(service, ["x"]) == [FOUND] and isinstance(service, RemoteRetriever) and service.problem() is None
        service.close()


def test_passages_that_are_said_in_other_ways_are_found() -> None:
    """Online servers of that protocol say neither ids nor scores, and more than they were asked for."""
    documents = [{"document": {"contents": f'"{i}"\ntext'}} for i in range(9)]
    with behaving(lambda request, number: Said(raw=json.dumps({"result": [documents]}).encode())) as server:
        service = retriever(server.address.removesuffix("/v1"))
        assert answers(service, [{"query": "x", "k": 2}]) == [
            [{"id": None, "contents": f'"{i}"\ntext', "score": None} for i in range(2)]
        ]
        service.close()


# -- an index of this machine ------------------------------------------------------------------------------------------


def test_an_index_that_cannot_be_opened_is_told(folder: Path, tmp_path: Path) -> None:
    before = descendants(os.getpid())
    with pytest.raises(UserError, match=r"there is no index in .*nix: posttrain retriever build"):
        LocalRetriever(str(tmp_path / "nix"), "retriever")
    place = small_index(tmp_path / "index")
    (place / "words.txt").write_bytes(b"")
    with pytest.raises(UserError, match="words.txt has 0 bytes"):
        LocalRetriever(str(place), "retriever")
    (tmp_path / "own.py").write_text("import numpy as np\ndef encode(texts, kind): return np.ones((len(texts), 2))\n")
    encoder = f"{tmp_path}/own.py:encode"
    place = small_index(tmp_path / "dense", encoder=encoder)
    (tmp_path / "own.py").write_text("raise SystemExit(3)")
    with pytest.raises(UserError, match=r"own.py does not import: SystemExit"):
        LocalRetriever(str(place), "retriever")
    gone(*set(descendants(os.getpid())) - set(before))


def test_a_question_that_an_encoder_cannot_read_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\n"
        "def encode(texts, kind):\n"
        "    return np.array([[len(text), 1 / (text != 'bad')] for text in texts])\n"
    )
    service = LocalRetriever(str(small_index(tmp_path / "index", encoder=f"{tmp_path}/own.py:encode")), "retriever")
    good, bad, again = answers(service, ["good", "bad", "good"])
    assert good == again and len(good) == 3
    assert isinstance(bad, Invalid) and "ZeroDivisionError" in bad.reason
    service.close()


def test_the_process_ends_with_the_service_and_its_death_is_told(folder: Path) -> None:
    before = set(descendants(os.getpid()))
    service = LocalRetriever(str(folder), "retriever")
    made = set(descendants(os.getpid())) - before
    assert made and answers(service, ["Tiber"])[0][0]["id"] == "rome"
    service.close()
    gone(*made)
    service = LocalRetriever(str(folder), "retriever")
    made = set(descendants(os.getpid())) - before
    os.kill(max(made), signal.SIGKILL)
    gone(max(made))
    with pytest.raises(UserError, match=r"the process of retriever, which searches .*index, died \(exit code -9"):
        answers(service, ["Tiber"])
    service.close()
    gone(*made)


# -- in runs -----------------------------------------------------------------------------------------------------------

ENVIRONMENT = """
from posttrain import Ask, Invalid


def search(task):
    reply = yield task["prompt"]
    found = yield Ask("retriever", {"query": task["about"], "k": 2})
    if isinstance(found, Invalid):
        return found
    reply = yield found[0]["contents"][:20] if found else "nothing"
    return float(len(reply))


def books(task):
    reply = yield task["prompt"]
    found = yield Ask("books", reply[:100])
    return found if isinstance(found, Invalid) else float(len(found) + len(reply))
"""


@pytest.fixture
def place(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(ENVIRONMENT)
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{row['id']}=", "about": row["title"]} for row in ROWS])
    small_index(tmp_path / "index")
    save_model(tiny(tokenizer, context=64), tmp_path / "start", tokenizer)
    return tmp_path


OPTIONS = {"model": "start", "prompts": 2, "group": 3, "max_tokens": 6, "threads": 1, "env_workers": 1, "quiet": True}


def left(out: str) -> dict[str, bytes]:
    """What a run left that does not depend on the clock."""
    folder = Path(out)
    return {p.name: p.read_bytes() for p in [folder / "metrics.jsonl", *sorted(folder.glob("rollouts/*"))]}


def test_a_run_is_the_same_with_an_index_and_with_a_server_and_notices_another_index(place: Path) -> None:
    how: dict[str, Any] = {**OPTIONS, "env": "my.py:search", "save_every": 1, "lr": 1e-2}
    posttrain.rl("rows.jsonl", out="a", steps=2, retriever=("index",), **how)
    with served(open_index("index")) as port:
        posttrain.rl("rows.jsonl", out="b", steps=1, retriever=(f"http://127.0.0.1:{port}",), **how)
    posttrain.rl("rows.jsonl", out="b", steps=2, resume=True, retriever=("index",), **how)
    assert left("a") == left("b")
    answered = [json.loads(line) for line in (place / "a" / ANSWERS).read_text().splitlines()]
    assert sum("answer" in line for line in answered) == 4, "a group's equal questions are one"
    timing = json.loads((place / "a" / "timing.jsonl").read_text().splitlines()[0])
    assert timing["services/retriever/asked"] == 2 and timing["services/retriever/invalid"] == 0
    small_index(place / "index", ROWS[:4], overwrite=True)
    with pytest.raises(UserError, match="--retriever index changed since the run began"):
        posttrain.rl("rows.jsonl", out="a", steps=3, resume=True, retriever=("index",), **how)


def test_a_retriever_is_missed_and_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tasks", "rows.jsonl", "--env"]
    assert main(["eval", *words, "my.py:search", "--model", "start"]) == 2
    assert "this run has none: give --retriever FOLDER" in capsys.readouterr().err
    assert main(["eval", *words, "my.py:search", "--model", "start", "--retriever", "http://127.0.0.1:9"]) == 2
    told = capsys.readouterr().err
    assert "--retriever http://127.0.0.1:9 does not answer: ClientConnectorError" in told and told.count("\n") == 1
    assert main(["check", *words, "my.py:search"]) == 0
    told = capsys.readouterr().out
    assert "passages were made up as its answers; --retriever FOLDER asks it" in told
    assert "invalid: no answer" in told
    assert main(["check", *words, "my.py:search", "--retriever", "index"]) == 0
    assert "it asks the service retriever: it answered" in capsys.readouterr().out
    assert main(["check", *words, "my.py:books", "--retriever", "books=index"]) == 0
    assert main(["check", *words, "my.py:books", "--retriever", "index", "index"]) == 2
    assert "two services have the name 'retriever'" in capsys.readouterr().err
    assert main(["check", "--tasks", "rows.jsonl", "--retriever", "index"]) == 2
    assert "--env is missing: give an environment that uses retriever" in capsys.readouterr().err
