"""A post to real sockets that drip, flood, hang, redirect and refuse."""

from __future__ import annotations

import socket
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from driftguard.outgoing.posting import MAX_ANSWER_BYTES, Answer, NotAnswered, post
from tests.outgoing.raw_receiver import RawReceiver, dripping, raw_receiver, saying, silent

SHORT = 0.5  # a deadline that a test can wait for
OK = b"HTTP/1.1 200 OK\r\n"


def posted(receiver: RawReceiver, deadline_seconds: float = SHORT) -> Answer:
    return post(receiver.url, {"event": "firing"}, {}, deadline_seconds=deadline_seconds)


@pytest.mark.parametrize(
    "answer",
    [silent, dripping(b"", b"H"), dripping(OK + b"x-slow: "), dripping(b"HTTP/1.1 100 Continue\r\n\r\n" * 3)],
    ids=["hangs", "drips its status", "drips its headers", "sends informational answers"],
)
def test_without_a_status_in_time_there_is_no_answer_and_the_connection_is_closed(answer: object) -> None:
    with raw_receiver(answer) as receiver:  # type: ignore[arg-type]
        with pytest.raises(NotAnswered, match=r"no answer within 0\.5 s"):
            posted(receiver)
        assert receiver.closed.wait(60)


def test_an_answer_that_drips_is_taken_by_its_status_at_the_deadline() -> None:
    with raw_receiver(dripping(OK + b"content-length: 1000000\r\n\r\n")) as receiver:
        answer = posted(receiver)
        assert receiver.closed.wait(60)
    assert answer.is_success
    assert answer.problem == "the answer did not end in time"
    assert set(answer.text) == {"x"}


@pytest.mark.parametrize(
    "headers", [b"", b"content-length: 99999999999\r\n"], ids=["until closed", "by length"]
)
def test_of_an_endless_answer_no_more_than_its_beginning_is_read(headers: bytes) -> None:
    sent = threading.Event()
    written = 0

    def flood(connection: socket.socket, stopping: threading.Event) -> None:
        nonlocal written
        connection.sendall(b"HTTP/1.1 500 Oops\r\n" + headers + b"\r\n")
        try:
            while not stopping.is_set():
                written += connection.send(b"x" * 65_536)
        finally:
            sent.set()

    with raw_receiver(flood) as receiver:
        answer = posted(receiver, deadline_seconds=60.0)
        assert sent.wait(60)  # the other side closed
    assert (answer.status, len(answer.text)) == (500, MAX_ANSWER_BYTES)
    assert answer.problem == "the answer is longer than 65,536 bytes"
    assert written < 16 * 2**20  # what the buffers of both sides hold


def test_an_endless_header_ends_the_exchange() -> None:
    with raw_receiver(dripping(OK + b"x-long: ", b"x" * 65_536, every_seconds=0.0)) as receiver:
        with pytest.raises(NotAnswered, match="RemoteProtocolError"):
            posted(receiver, deadline_seconds=60.0)
        assert receiver.closed.wait(60)


def test_what_a_compressed_answer_would_unpack_to_is_not_unpacked() -> None:
    with raw_receiver(saying(OK + b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\noops")) as receiver:
        answer = posted(receiver)
    assert answer.is_success
    assert answer.text == ""
    assert answer.problem == "the answer is encoded (gzip), which was not asked for"


def test_a_redirect_is_not_followed_and_told_without_the_secrets_of_where_it_leads() -> None:
    location = b"location: https://user:hunter2@elsewhere.example:8443/services/T000/B000/sesame?key=open\r\n"
    with raw_receiver(
        saying(b"HTTP/1.1 307 Moved\r\n" + location + b"content-length: 0\r\n\r\n")
    ) as receiver:
        answer = posted(receiver)
    assert not answer.is_success
    assert answer.text == "a redirect to https://elsewhere.example:8443, which is not followed"


def test_an_answer_that_breaks_off_is_taken_by_its_status() -> None:
    def breaking_off(connection: socket.socket, stopping: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 503 Later\r\ncontent-length: 100\r\n\r\nnot now")
        connection.shutdown(socket.SHUT_WR)

    with raw_receiver(breaking_off) as receiver:
        answer = posted(receiver)
    assert (answer.status, answer.text) == (503, "not now")
    assert answer.problem == "the answer broke off (RemoteProtocolError)"


def test_nobody_there_is_no_answer() -> None:
    with pytest.raises(NotAnswered, match="ConnectError"):
        post("http://127.0.0.1:9/hook", {}, {}, deadline_seconds=60.0)


@pytest.mark.parametrize(
    "url", ["http://[::1/hunter2hunter2", "ftp://here/hunter2hunter2", "http://a:hunter2hunter2/"]
)
def test_an_address_that_cannot_be_used_is_no_answer_and_stays_untold(url: str) -> None:
    with pytest.raises(NotAnswered) as raised:
        post(url, {}, {}, deadline_seconds=60.0)
    assert "hunter2" not in str(raised.value)


def test_a_receiver_that_repeats_what_it_was_sent_does_not_make_it_public() -> None:
    sent = b"/services/T00000000/opensesame?token=hunter2, Basic dXNlcjpzd29yZGZpc2g=, Bearer key-4711"
    body = b"Cannot POST " + sent
    answered = b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    with raw_receiver(saying(answered)) as receiver:
        place = receiver.url.removeprefix("http://").removesuffix("/hook")
        url = f"http://user:swordfish@{place}/services/T00000000/opensesame?token=hunter2"
        answer = post(url, {}, {"Authorization": "Bearer key-4711"}, deadline_seconds=60.0)
    assert answer.text == "Cannot POST /***?token=***, Basic ***, Bearer ***"


def test_a_retry_after_is_read_as_seconds_or_as_a_date_by_the_receivers_clock() -> None:
    wrong_clock = datetime(2019, 5, 1, 12, 0, tzinfo=UTC)
    until = format_datetime(wrong_clock + timedelta(seconds=90), usegmt=True)
    date = f"date: {format_datetime(wrong_clock, usegmt=True)}\r\nretry-after: {until}\r\n"
    never = "retry-after: Mon, 20 Nov 99999999999999999999 19:12:08 GMT\r\n"
    told = {"retry-after: 7\r\n": 7.0, date: 90.0, "retry-after: soon\r\n": None, never: None, "": None}
    for headers, seconds in told.items():
        answered = f"HTTP/1.1 429 Slowly\r\n{headers}content-length: 0\r\n\r\n".encode()
        with raw_receiver(saying(answered)) as receiver:
            assert posted(receiver, 60.0) == Answer(429, retry_after_seconds=seconds)


def test_a_receiver_that_does_not_read_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # connected by the system, read by nobody
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/hook"
        with pytest.raises(NotAnswered, match="no answer within"):
            post(url, {"long": "x" * 2**25}, {}, deadline_seconds=SHORT)


def test_a_name_that_is_looked_up_for_long_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    found, ended = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> list[object]:
        found.wait(60)
        ended.set()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        with pytest.raises(NotAnswered, match="no answer within"):
            post("http://slow.example/hook", {}, {}, deadline_seconds=SHORT)
        assert not ended.is_set()
    finally:
        found.set()
    assert ended.wait(60)
