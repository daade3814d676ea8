"""Calls of endpoints reach their server: encrypted, through proxies, over connections that come and go."""

from __future__ import annotations

import gzip
import json
import select
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from posttrain.core.types import UserError
from posttrain.system import endpoint as endpoints
from posttrain.system.endpoint import Endpoint, EndpointFailure

ANSWER = {"said": "yes"}
Handling = Callable[[BaseHTTPRequestHandler, bytes], None]


def plainly(handler: BaseHTTPRequestHandler, body: bytes, **headers: str) -> None:
    content = json.dumps(ANSWER).encode()
    handler.send_response(200)
    for name, value in {"Content-Length": str(len(content)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(content)


class Server(ThreadingHTTPServer):
    """Notes the paths that it is asked for, and how many connections were opened; a proxy for CONNECT."""

    daemon_threads = True

    def __init__(self, handle: Handling = plainly) -> None:
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.opened = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                server.opened += 1
                super().setup()

            def do_POST(self) -> None:
                server.paths.append(self.path)
                server.headers.append(dict(self.headers))
                handle(self, self.rfile.read(int(self.headers["Content-Length"])))

            def do_GET(self) -> None:
                server.paths.append(self.path)
                handle(self, b"")

            def do_CONNECT(self) -> None:
                server.paths.append(self.path)
                host, port = self.path.split(":")
                with socket.create_connection((host, int(port))) as other:
                    self.send_response(200)
                    self.end_headers()
                    ends = {self.connection: other, other: self.connection}
                    while True:
                        for ready in select.select(list(ends), [], [])[0]:
                            if not (data := ready.recv(65536)):
                                return
                            ends[ready].sendall(data)

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that refuses a certificate


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.001)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that a server called localhost has signed for itself, with its key."""
    file = tmp_path_factory.mktemp("certificate") / "both.pem"
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = [
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-keyout",
        str(file),
        "-out",
        str(file) + ".c",
    ]
    try:
        subprocess.run(["openssl", *made, *named], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    file.write_text(file.read_text() + Path(str(file) + ".c").read_text())
    return file


def encrypted(certificate: Path) -> Server:
    server = Server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server


def called(
    address: str, times: int = 1, body: bytes | None = b"{}", retries: int = 0
) -> tuple[list[Any], dict[str, float]]:
    """The answers to calls that are made one after the other, and what was counted."""
    with closing(Endpoint(address, "key", 4, None, 20.0, retries)) as endpoint:
        said = [endpoint.wait(endpoint.call("asked", body, lambda message: message)) for _ in range(times)]
        return said, endpoint.counts


def test_calls_one_after_the_other_share_a_connection() -> None:
    with serving(Server()) as server:
        said, counts = called(f"http://127.0.0.1:{server.server_port}/v1/", times=3)
    assert said == [ANSWER] * 3 and counts == {"requests": 3.0, "retries": 0.0, "failures": 0.0}
    assert server.paths == ["/v1/asked"] * 3 and server.opened == 1
    sent = server.headers[0]
    assert sent["Authorization"] == "Bearer key" and sent["Host"] == f"127.0.0.1:{server.server_port}"
    assert sent["Content-Type"] == "application/json" and sent["Content-Length"] == "2"


def test_what_is_there_is_asked_for_without_a_body() -> None:
    with serving(Server()) as server:
        assert called(f"http://127.0.0.1:{server.server_port}/v1", body=None)[0] == [ANSWER]


def test_a_connection_that_the_server_has_closed_is_opened_again_without_a_failed_call() -> None:
    def once(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        plainly(handler, body)
        handler.close_connection = True  # and does not say so

    def politely(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        plainly(handler, body, Connection="close")

    for handle in (once, politely):
        with (
            serving(Server(handle)) as server,
            closing(Endpoint(f"http://127.0.0.1:{server.server_port}", None, 4, None, 20.0, 0)) as endpoint,
        ):
            for _ in range(3):
                assert endpoint.wait(endpoint.call("asked", b"{}", lambda message: message)) == ANSWER
                select.select([], [], [], 0.1)  # until the end of the connection has come
        assert server.opened == 3


def test_answers_in_chunks_are_put_together() -> None:
    def chunked(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for part in (b'{"said"', b': "y', b'es"}'):
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        handler.wfile.write(b"0\r\n\r\n")

    with serving(Server(chunked)) as server:
        assert called(f"http://127.0.0.1:{server.server_port}", times=2)[0] == [ANSWER] * 2
    assert server.opened == 1


def test_a_long_question_and_a_long_answer_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def echo(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    long = json.dumps("x" * 3_000_000).encode()
    with serving(Server(echo)) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        assert called(address, body=long)[0] == ["x" * 3_000_000]
        monkeypatch.setattr(endpoints, "MOST_BYTES", 1 << 20)
        [refused], _ = called(address, body=long)
    assert isinstance(refused, EndpointFailure) and refused.rubbish and refused.reason == "an answer of more than 1 MiB"


def test_an_encrypted_endpoint_is_believed_if_its_certificate_is(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(encrypted(certificate)) as server:
        address = f"https://localhost:{server.server_port}/v1"
        [refused], _ = called(address)
        assert (
            isinstance(refused, EndpointFailure) and "CERTIFICATE_VERIFY_FAILED" in refused.reason and not server.paths
        )
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert called(address, times=2)[0] == [ANSWER] * 2
        [other], _ = called(f"https://127.0.0.1:{server.server_port}/v1")
    assert isinstance(other, EndpointFailure) and "CERTIFICATE_VERIFY_FAILED" in other.reason


def test_the_proxy_of_the_environment_is_asked_and_named_hosts_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Server()) as proxy, serving(Server()) as server:
        monkeypatch.setenv("HTTP_PROXY", f"http://me:a%20b@127.0.0.1:{proxy.server_port}")
        assert called("http://nowhere.invalid/v1")[0] == [ANSWER]
        assert proxy.paths == ["http://nowhere.invalid/v1/asked"]
        assert (
            proxy.headers[0]["Proxy-Authorization"] == "Basic bWU6YSBi"
            and proxy.headers[0]["Host"] == "nowhere.invalid"
        )
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert called(f"http://127.0.0.1:{server.server_port}/v1")[0] == [ANSWER]
        assert len(proxy.paths) == 1 and server.paths == ["/v1/asked"]
    monkeypatch.setenv("HTTP_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(UserError, match="names the proxy socks5"):
        called("http://nowhere.invalid/v1")


def test_an_encrypted_endpoint_is_reached_through_a_tunnel_of_the_proxy(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Server()) as proxy, serving(encrypted(certificate)) as server:
        monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{proxy.server_port}")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert called(f"https://localhost:{server.server_port}/v1", times=2)[0] == [ANSWER] * 2
    assert proxy.paths == [f"localhost:{server.server_port}"] and server.paths == ["/v1/asked"] * 2


@pytest.mark.parametrize(
    "address, reason, again",
    [("http://127.0.0.1:9/v1", "ClientConnectorError", True), ("ftp://x/v1", "NonHttpUrlClientError", False),
     ("http://x:99999/v1", "InvalidUrlClientError", False), ("http:///v1", "InvalidUrlClientError", False),
     ("http://a..b/v1", "UnicodeError", False), ("http://u:p@x/v1", "ValueError", False)],
)  # fmt: skip
def test_an_address_where_nobody_answers_is_a_failure_in_words(address: str, reason: str, again: bool) -> None:
    [refused], _ = called(address)
    assert isinstance(refused, EndpointFailure) and reason in refused.reason and refused.again is again


def test_a_failure_of_the_proxy_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Server()) as proxy:
        monkeypatch.setattr(proxy.RequestHandlerClass, "do_CONNECT", lambda handler: handler.send_error(407, "no"))
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:secret@127.0.0.1:{proxy.server_port}")
        [refused], _ = called("https://nowhere.invalid/v1")
    assert refused.reason == "ClientHttpProxyError: HTTP 407 no"


def test_a_compressed_answer_that_nobody_asked_for_is_not_unpacked() -> None:
    def packed(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        content = gzip.compress(json.dumps(ANSWER).encode())
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    with serving(Server(packed)) as server:
        [refused], _ = called(f"http://127.0.0.1:{server.server_port}/v1")
    assert isinstance(refused, EndpointFailure) and "no JSON" in refused.reason


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(UserError, match=r"http://\[x/v1 is no address: Invalid IPv6 URL"):
        called("http://[x/v1")
