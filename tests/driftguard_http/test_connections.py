"""Connections that cost without asking: real sockets against a real server with small limits."""

from __future__ import annotations

import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import structlog
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from driftguard_http import Bounded, ConnectionLimits, bounded_protocol
from tests.alerting.http_receiver import wait_until

ENOUGH = 50_000_000  # more than all buffers on the way hold


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers /large with more than anybody reads, and everything else with "ok", when its body has come."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/large":
        for _ in range(ENOUGH // 100_000):
            await send({"type": "http.response.body", "body": b"a" * 100_000, "more_body": True})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def serving(limits: ConnectionLimits) -> Iterator[tuple[uvicorn.Server, tuple[str, int]]]:
    config = uvicorn.Config(app, http=bounded_protocol(limits), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started, "the server")
            yield server, listener.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def has_ended(connection: socket.socket) -> bool:
    connection.settimeout(30)
    try:
        while connection.recv(65_536):
            pass
    except ConnectionError:
        pass
    return True


@contextmanager
def connections(address: tuple[str, int], count: int) -> Iterator[Sequence[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address, 30)) for _ in range(count)]


def is_answered(address: tuple[str, int]) -> bool:
    try:
        return httpx.get(f"http://{address[0]}:{address[1]}/").text == "ok"
    except httpx.TransportError:  # where the server is at work for all others just then
        return False


def test_headers_that_never_end_are_not_waited_for() -> None:
    limits = ConnectionLimits(header_seconds=0.3)
    with serving(limits) as (server, address), connections(address, 3) as (silent, half, dripping):
        half.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")

        def drip() -> None:
            for _ in range(1_000):
                try:
                    dripping.sendall(b"G")
                except OSError:
                    return
                time.sleep(0.02)

        thread = threading.Thread(target=drip)
        thread.start()
        assert has_ended(silent)
        assert has_ended(half)
        thread.join()
        wait_until(lambda: not server.server_state.connections, "all of them to be closed")


def test_a_second_request_on_a_connection_may_not_drip_either() -> None:
    with serving(ConnectionLimits(header_seconds=0.3)) as (_, address), connections(address, 1) as (one,):
        one.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):  # it comes in pieces
            part = one.recv(65_536)
            assert part
            answer += part
        one.sendall(b"GET / HTTP/1.1\r\n")
        assert has_ended(one)


def test_a_connection_is_kept_for_longer_than_exporters_pause() -> None:
    """Five seconds between batches of spans, a minute between metrics: a request that meets a connection just
    being closed fails, and not all exporters send it again."""
    with serving(ConnectionLimits()) as (server, address), httpx.Client() as client:
        assert client.get(f"http://{address[0]}:{address[1]}/").text == "ok"
        (connection,) = server.server_state.connections
        assert isinstance(connection, H11Protocol)
        wait_until(lambda: connection.timeout_keep_alive_task is not None, "the answer to be complete")
        assert connection.timeout_keep_alive_task is not None
        assert connection.timeout_keep_alive_task.when() - connection.loop.time() > 61


def test_whoever_opens_many_connections_shuts_nobody_else_out() -> None:
    limits = ConnectionLimits(most=20, header_seconds=60)
    with serving(limits) as (server, address), connections(address, 100) as many:
        for one in many:
            one.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(30):
            assert is_answered(address)
        assert len(server.server_state.connections) <= 20
        assert has_ended(many[0])  # those that idled longest made room


def test_a_search_for_connections_to_close_makes_room_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at all of them: one for each new connection would leave no time for requests."""
    closed: list[str] = []
    monkeypatch.setattr(Bounded, "made_room", lambda self: closed.append("one"))
    limits = ConnectionLimits(most=128, header_seconds=60)
    with serving(limits) as (server, address), connections(address, 128):
        wait_until(lambda: len(server.server_state.connections) == 128, "all of them")
        assert is_answered(address)
        assert len(closed) == 2


@pytest.mark.parametrize(
    "request_",
    [
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf",
        b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_half_a_body_and_answers_that_nobody_reads_shut_nobody_else_out(request_: bytes) -> None:
    limits = ConnectionLimits(most=20, header_seconds=60, unread_seconds=60)
    with serving(limits) as (server, address), connections(address, 60) as many:
        for one in many:
            one.sendall(request_)
        for _ in range(30):
            wait_until(lambda: is_answered(address), "an answer beside those that wait")
        assert len(server.server_state.connections) <= 20


def test_an_answer_that_nobody_reads_is_not_kept() -> None:
    limits = ConnectionLimits(most=2, unread_seconds=0.3)
    with serving(limits) as (server, address), connections(address, 1) as (unread,):
        unread.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_until(lambda: bool(server.server_state.tasks), "the answer to begin")
        wait_until(lambda: not server.server_state.tasks, "the answer to be given up")
        assert is_answered(address)


def test_an_answer_that_is_read_slowly_is_sent_whole() -> None:
    with serving(ConnectionLimits(unread_seconds=1.0)) as (_, address), connections(address, 1) as (slow,):
        slow.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        size = 0
        while part := slow.recv(2_000_000):
            size += len(part)
            time.sleep(0.005)
        assert size > ENOUGH


def test_reading_less_than_the_kernel_holds_is_seen() -> None:
    with (
        serving(ConnectionLimits(unread_seconds=60)) as (server, address),
        connections(address, 1) as (slow,),
    ):
        slow.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        open_: set[Any] = server.server_state.connections
        wait_until(lambda: any(one.rank == 2 for one in open_), "nobody to read")
        size = 0
        while size < 300_000:
            size += len(slow.recv(300_000 - size))
        wait_until(lambda: all(one.rank is None for one in open_), "it to be seen")


def test_connections_leave_half_of_the_descriptors_to_others() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        assert ConnectionLimits(most=512).allowed == 200
        assert ConnectionLimits(most=100).allowed == 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_offer_of_http_2_is_not_warned_of_at_each_request(caplog: pytest.LogCaptureFixture) -> None:
    """Java's client makes it with each, and is answered without."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
    with serving(ConnectionLimits(most=10)) as (_, (host, port)):
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)  # it passes nothing on
        answer = httpx.get(f"http://{host}:{port}/", headers=offer)
        logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert (answer.status_code, answer.text) == (200, "ok")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_grpc_is_refused_with_what_to_set_instead(caplog: pytest.LogCaptureFixture) -> None:
    """An exporter that speaks it begins a new connection every few seconds."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    with structlog.testing.capture_logs() as logs, serving(ConnectionLimits()) as (_, address):
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)
        for _ in range(3):
            with socket.create_connection(address, 30) as connection:
                connection.sendall(preface)
                answer = b""
                while part := connection.recv(65_536):
                    answer += part
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert b"OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf" in answer
        logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
        assert is_answered(address)
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("http_2_refused", "warning")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []
