"""The server speaks Search-R1's protocol, answers each asker alone as in company, and is held up by nobody."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from retrieved import ROWS, asked, served, small_index

from posttrain.cli.main import main
from posttrain.core.types import UserError
from posttrain.services.retrieval import search_protocol
from posttrain.services.retrieval import search_server as servers
from posttrain.services.retrieval.batcher import MOST_WAITING, SHARE, TOGETHER, Batcher, Busy
from posttrain.services.retrieval.passage_index import Hit, PassageIndex, open_index
from posttrain.services.retrieval.passages import Passage


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> PassageIndex:
    return open_index(small_index(tmp_path_factory.mktemp("served") / "index"))


@pytest.fixture(scope="module")
def port(index: PassageIndex) -> Iterator[int]:
    with served(index) as port:
        yield port


def test_answers_are_those_of_search_r1(port: int, index: PassageIndex) -> None:
    """As in search_r1/search/retrieval_server.py: `retrieve_endpoint`, and `load_docs` of a corpus of id and contents."""
    queries = ["capital of Italy", "novel", "zzz"]
    found = index.search(queries, 2)
    documents = [[{"id": h.passage.id, "contents": h.passage.contents} for h in own] for own in found]
    status, answer = asked(port, {"queries": queries, "topk": 2, "return_scores": True})
    assert status == 200 and answer.keys() == {"result"}
    assert answer["result"] == [
        [{"document": d, "score": h.score} for d, h in zip(own, hits, strict=True)]
        for own, hits in zip(documents, found, strict=True)
    ]
    assert answer["result"][2] == [] and len(answer["result"][1]) == 2
    assert (
        answer["result"][0][0]["document"]["contents"] == '"Rome"\nRome is the capital of Italy. It lies on the Tiber.'
    )
    for request in (
        {"queries": queries, "topk": 2},
        {"queries": queries, "topk": 2, "return_scores": False},
    ):
        assert asked(port, request) == (200, {"result": documents})


@pytest.mark.parametrize("topk", [{}, {"topk": None}, {"topk": 0}])
def test_a_query_that_does_not_say_how_many_gets_three(port: int, topk: dict[str, Any]) -> None:
    status, answer = asked(port, {"queries": ["the"], **topk})
    assert status == 200 and len(answer["result"][0]) == 3


REFUSED: list[tuple[Any, int, str]] = [
    (b"", 400, "the body is not JSON"),
    (b"{", 400, "the body is not JSON"),
    (b"\xff", 400, "the body is not JSON"),
    (b"[" * 100_000, 400, "the body is not JSON"),
    (b'{"queries": ["x"], "topk": ' + b"9" * 5000 + b"}", 400, "the body is not JSON"),
    ([], 422, r"the body is \[\] \(list\); expected"),
    ({}, 422, "queries: missing"),
    ({"queries": "x"}, 422, "queries: expected a list of texts, not 'x' (str)"),
    ({"queries": ["x", 3]}, 422, "queries: expected a list of texts, not 3 (int)"),
    ({"queries": ["x"], "top_k": 3}, 400, "top_k is not a field of a request; did you mean 'topk'?"),
    ({"queries": ["x"], "more": 3}, 400, "more is not a field of a request; there are queries, topk, return_scores"),
    ({"queries": ["x"], "topk": -1}, 422, "topk: expected a whole number from 1 to 100, not -1"),
    ({"queries": ["x"], "topk": 1.5}, 422, "topk: expected a whole number"),
    ({"queries": ["x"], "topk": "3"}, 422, "topk: expected a whole number"),
    ({"queries": ["x"], "topk": True}, 422, "topk: expected a whole number"),
    ({"queries": ["x"], "topk": 101}, 422, "topk: expected a whole number"),
    ({"queries": ["x"], "return_scores": 1}, 422, "return_scores: expected true or false, not 1"),
    ({"queries": ["x" * 32_769]}, 422, "queries: one of 32,769 characters; a query has at most 32,768"),
    ({"queries": ["x"] * 4097}, 422, "queries: 4,097; at most 4,096"),
    ({"queries": ["x"], "topk": 10**400}, 422, "topk: expected a whole number"),
    ({"queries": ["x"] * 4000, "topk": 100}, 422, "topk: 4,000 queries times 100 passages; at most 50,000"),
    (b" " * ((16 << 20) + 1), 413, "the body has more than 16 MiB"),
]


@pytest.mark.parametrize(("body", "status", "detail"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_answered_is_refused_in_json(port: int, body: Any, status: int, detail: str) -> None:
    found, answer = asked(port, body)
    assert found == status and answer.keys() == {"detail"}
    assert answer["detail"].startswith(detail.replace("\\", ""))
    assert asked(port, {"queries": ["x"]})[0] == 200, "and the server goes on"


def test_a_compressed_body_is_not_unpacked(port: int) -> None:
    packed = gzip.compress(json.dumps({"queries": ["x"]}).encode())
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/retrieve", packed, {"Content-Encoding": "gzip"})
    answer = connection.getresponse()
    assert answer.status == 415 and json.load(answer) == {"detail": "the body is compressed; send it as it is"}
    connection.close()


def test_other_paths_and_methods_are_refused_in_json(port: int) -> None:
    assert asked(port, None, "/retrieve", "GET") == (405, {"detail": "there is POST /retrieve and GET /health"})
    assert asked(port, None, "/", "GET") == (404, {"detail": "there is POST /retrieve and GET /health"})


@pytest.mark.parametrize("query", ["", "\x00", "\ud800", "\U0001f642" * 1000, "the " * 8192, "\u202e", "x" * 32_768])
def test_any_text_is_a_query(port: int, query: str) -> None:
    status, answer = asked(port, {"queries": [query, "Tiber"]})
    assert status == 200 and answer["result"][1][0]["id"] == "rome"


def test_health_says_what_is_served(port: int, index: PassageIndex) -> None:
    told = {"status": "ok", "kind": "bm25", "passages": 5, "fingerprint": index.manifest.fingerprint, "waiting": 0}
    assert asked(port, None, "/health", "GET") == (200, told)


def test_an_answer_is_the_same_in_any_company(port: int) -> None:
    queries = [f"{a} {b}" for a in ("capital", "river", "novel") for b in ("Italy", "France", "Oxford", "Seine")]
    requests = [
        {"queries": queries[i : i + n], "topk": k, "return_scores": True}
        for i in range(9)
        for n in (1, 3)
        for k in (1, 3)
    ]
    alone = [asked(port, request) for request in requests]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda request: asked(port, request), requests * 4)) == alone * 4


def test_a_damaged_index_and_a_mistake_of_ours_are_told_and_the_server_goes_on(
    index: PassageIndex, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing:
        manifest = index.manifest

        def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
            if "user" in queries:
                raise UserError("the index is damaged")
            if "ours" in queries:
                raise RuntimeError("secret")
            return index.search(queries, k)

    with served(Failing()) as port:
        assert asked(port, {"queries": ["user"]}) == (500, {"detail": "the index is damaged"})
        status, answer = asked(port, {"queries": ["ours"]})
        assert status == 500 and "secret" not in answer["detail"]
        assert asked(port, {"queries": ["Tiber"]})[0] == 200
    assert "RuntimeError: secret" in capsys.readouterr().err


# -- who holds it up ---------------------------------------------------------------------------------------------------


def opened(port: int, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(sent)
    return connection


HEAD = b"POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b'\r\n{"queries"'], ids=["nothing", "half a head", "half a body"])
def test_a_client_that_hangs_is_hung_up_on(index: PassageIndex, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "ARRIVE_SECONDS", 0.3)
    monkeypatch.setattr(servers, "LINGER_SECONDS", 0.2)
    with served(index) as port:
        hanging = [opened(port, sent) for _ in range(20)]
        assert asked(port, {"queries": ["Tiber"]})[0] == 200
        for connection in hanging:
            answer = b""
            while more := connection.recv(4096):
                answer += more
            assert not answer or answer.startswith(b"HTTP/1.1 408")
            connection.close()


def test_a_client_that_takes_no_answer_is_hung_up_on(index: PassageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "TAKE_SECONDS", 0.3)

    class Long:
        manifest = index.manifest

        def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
            return [[Hit(Passage("x", "y" * 30_000_000), 1.0)] for _ in queries]

    with served(Long()) as port:
        body = b'{"queries": ["x"]}'
        head = b"POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection = opened(port, head + body)
        time.sleep(1.0)
        received = 0
        with suppress(ConnectionError):
            while more := connection.recv(1 << 20):
                received += len(more)
        assert received < 30_000_000, "it was cut off in the middle"
        assert asked(port, None, "/health", "GET")[0] == 200


def test_a_client_that_goes_away_is_forgotten(index: PassageIndex) -> None:
    begun, may_go = threading.Event(), threading.Event()

    class Slow:
        manifest = index.manifest

        def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
            begun.set()
            assert may_go.wait(20)
            return index.search(queries, k)

    with served(Slow()) as port:
        body = b'{"queries": ["x"]}'
        connection = opened(
            port, b"POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        assert begun.wait(20)
        connection.close()
        end = time.monotonic() + 20
        while asked(port, None, "/health", "GET")[1]["waiting"]:
            assert time.monotonic() < end
        may_go.set()
        assert asked(port, {"queries": ["Tiber"]})[0] == 200


# -- batching ----------------------------------------------------------------------------------------------------------


def hits(queries: Sequence[str], k: int) -> list[list[Hit]]:
    return [[Hit(Passage(query, f"{k}"), 1.0)] for query in queries]


def test_requests_gather_while_a_search_runs_and_each_gets_its_own() -> None:
    searched: list[tuple[list[str], int]] = []

    def search(queries: Sequence[str], k: int) -> list[list[Hit]]:
        searched.append((list(queries), k))
        time.sleep(0.02)
        return hits(queries, k)

    async def run() -> None:
        batcher = Batcher(search)
        task = asyncio.create_task(batcher.run())
        first = asyncio.create_task(batcher.search(["first"], 3))
        await asyncio.sleep(0.005)
        large = asyncio.create_task(batcher.search([f"large {i}" for i in range(200)], 3))
        small = [asyncio.create_task(batcher.search([f"small {i}"], 3)) for i in range(10)]
        other = asyncio.create_task(batcher.search(["other"], 5))
        found = await asyncio.gather(*small)
        assert not large.done(), "a large request holds up nobody"
        assert [own[0][0].passage.id for own in found] == [f"small {i}" for i in range(10)]
        assert [own[0].passage.id for own in await large] == [f"large {i}" for i in range(200)]
        assert (await other)[0][0].passage.contents == "5" and await first
        assert await batcher.search([], 3) == [] and batcher.waiting == 0
        task.cancel()

    asyncio.run(run())
    assert searched[0] == (["first"], 3)
    assert searched[1][0] == [*(f"large {i}" for i in range(SHARE)), *(f"small {i}" for i in range(10))]
    assert all(len(queries) <= TOGETHER for queries, _ in searched) and [k for _, k in searched].count(5) == 1


def test_a_search_that_fails_is_told_to_those_who_were_in_it() -> None:
    def search(queries: Sequence[str], k: int) -> list[list[Hit]]:
        if "bad" in queries:
            raise ValueError("bad")
        return hits(queries, k)

    async def run() -> None:
        batcher = Batcher(search)
        task = asyncio.create_task(batcher.run())
        with pytest.raises(ValueError, match="bad"):
            await batcher.search(["bad", *"x" * 100], 3)
        assert await batcher.search(["good"], 3) == hits(["good"], 3)
        given_up = asyncio.create_task(batcher.search(["x"], 3))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await batcher.search(["good"], 3) == hits(["good"], 3) and batcher.waiting == 0
        task.cancel()

    asyncio.run(run())


def test_too_many_queries_are_refused_with_the_time_to_come_back(
    index: PassageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        batcher = Batcher(hits)  # which nobody runs
        waiting = [asyncio.create_task(batcher.search(["x"] * 4096, 3)) for _ in range(MOST_WAITING // 4096)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await batcher.search(["x"], 3)
        for task in waiting:
            task.cancel()

    asyncio.run(run())

    async def busy(self: Batcher, queries: Sequence[str], k: int) -> Any:
        raise Busy

    monkeypatch.setattr(Batcher, "search", busy)
    with served(index) as port:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/retrieve", b'{"queries": ["x"]}')
        response = connection.getresponse()
        assert response.status == 503 and response.headers["Retry-After"] == "1"
        assert "try again later" in json.loads(response.read())["detail"]
        connection.close()


# -- the asker's side --------------------------------------------------------------------------------------------------


def test_what_a_server_writes_is_what_an_asker_reads(index: PassageIndex) -> None:
    found = index.search(["capital", "zzz"], 3)
    for scores in (True, False):
        read = search_protocol.read_answer(json.loads(search_protocol.written_answer(found, scores)), 2, 3)
        assert read == [
            [{"id": h.passage.id, "contents": h.passage.contents, "score": h.score if scores else None} for h in own]
            for own in found
        ]


DOCUMENT = {"id": 3, "contents": "c"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"result": [[{"document": {"contents": "c"}}]]}, {"id": None, "contents": "c", "score": None}),
        ({"result": [[{"document": DOCUMENT, "score": 2}]], "more": 1}, {"id": "3", "contents": "c", "score": 2.0}),
        ({"result": [[DOCUMENT]]}, {"id": "3", "contents": "c", "score": None}),
        ({"result": [[{"contents": "c\ud800"}]]}, {"id": None, "contents": "c?", "score": None}),
        ({"result": [[DOCUMENT, {"odd": 1}]]}, {"id": "3", "contents": "c", "score": None}),
    ],
)
def test_servers_of_the_protocol_may_leave_things_out(message: Any, expected: dict[str, Any]) -> None:
    assert search_protocol.read_answer(message, 1, 1) == [[expected]], "and say more than was asked for"


@pytest.mark.parametrize(
    "message",
    [
        None, [], "x", {}, {"result": None}, {"result": []}, {"result": [[], []]}, {"result": [{}]}, {"result": [[3]]},
        {"result": [[{}]]}, {"result": [[{"document": {}}]]}, {"result": [[{"document": {"contents": ""}}]]},
        {"result": [[{"document": {"contents": 3}}]]}, {"result": [[{"document": DOCUMENT, "score": "x"}]]},
        {"result": [[{"document": DOCUMENT, "score": float("nan")}]]},
        {"result": [[{"document": DOCUMENT, "score": 10**400}]]},
        {"result": [[{"document": DOCUMENT, "score": True}]]}, {"result": [[{"id": [], "contents": "c"}]]},
        {"result": [[{"id": "a", "contents": "c" * 100_001}]]}, {"detail": "wrong"},
    ],
)  # fmt: skip
def test_rubbish_is_no_answer(message: Any) -> None:
    found = search_protocol.read_answer(message, 1, 3)
    assert not isinstance(found, list) and found.rubbish and found.reason.endswith("instead of an answer")


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_serves_until_it_is_interrupted(index: PassageIndex) -> None:
    words = [sys.executable, "-m", "posttrain", "retriever", "serve", str(index.folder), "--port", "0", "--topk", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # shells ignore it behind an &
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        assert "5 passages, bm25" in process.stdout.readline()
        found = re.fullmatch(r"address     http://127.0.0.1:(\d+)/retrieve\n", process.stdout.readline())
        assert found
        _, answer = asked(int(found[1]), {"queries": ["Tiber", "France"]})
        assert [len(own) for own in answer["result"]] == [1, 1]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == "posttrain: stopped\n"
    finally:
        process.kill()
        process.communicate()


def test_a_signal_that_comes_within_a_finalizer_ends_the_server(index: PassageIndex) -> None:
    class Closed:
        def __del__(self) -> None:  # Python drops what is raised here
            signal.raise_signal(signal.SIGINT)

    def say(text: str) -> None:
        asyncio.get_running_loop().call_later(0.05, Closed)

    def interrupt(number: int, frame: object) -> None:  # as the command has it; asyncio replaces only Python's own
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            servers.serve(index, "127.0.0.1", 0, 1, say)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_port_in_use_and_an_address_that_is_none_are_told(
    index: PassageIndex, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(index.folder)
    for words, told in (
        (
            ["--port", str(port)],
            f"--port {port} cannot be used on 127.0.0.1: Address already in use; choose another --port, or 0",
        ),
        (["--host", "256.1.1.1"], "--host 256.1.1.1 is not an address of this machine"),
        (
            ["--host", "192.0.2.1", "--port", "0"],
            "--port 0 cannot be used on 192.0.2.1: Cannot assign requested address",
        ),
        (["--port", "65536"], "--port must be at least 0 and at most 65535, not 65536"),
        (["--topk", "0"], "--topk must be above 0"),
    ):
        assert main(["retriever", "serve", place, *words]) == 2
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1


def test_passages_are_those_of_the_rows(index: PassageIndex) -> None:
    assert [passage.id for passage in index.passages] == [row["id"] for row in ROWS]
    assert Path(index.folder).is_dir()
