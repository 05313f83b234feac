"""Requests that any client with access to the port can send."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from driftguard.store.keys import create_key
from tests.chaos.row import Row
from tests.chaos.scene import SERVERS, Scene, closing, scene
from tests.chaos.sender import Senders
from tests.chaos.traffic import in_batches

SLOW_CONNECTIONS: Final = 600
UNFINISHED_CONNECTIONS: Final = 1_100
DESCRIPTORS: Final = 1_024
BODY_BYTES: Final = 2 * 10**9
UNREAD_EXPORTS: Final = 100
EXPORTED: Final = 30_000  # records: several megabytes for each export
ATTACK_SECONDS: Final = 20.0
ANYWHERE: Final = "0.0.0.0"  # a sidecar that others reach asks for a key
_HEAD: Final = b"POST /api/v1/records HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def slow_requests(seed: int, rounds: int) -> Row:
    """Request headers that come one byte per second, without end."""
    row = Row("slow requests", f"{SLOW_CONNECTIONS * rounds} connections, a header byte per second")
    with scene(seed) as here, _connected(here, SLOW_CONNECTIONS * rounds) as connections:
        here.send()
        until = time.monotonic() + ATTACK_SECONDS
        place = 0
        while time.monotonic() < until:
            begun = time.monotonic()
            for connection in connections:
                with suppress(OSError):
                    connection.send((_HEAD + b"X-Padding: " + b"a" * 1_000)[place : place + 1])
            place += 1
            time.sleep(max(0.0, 1.0 - (time.monotonic() - begun)))
        return closing(here, row, SERVERS, 120.0)


def unfinished_requests(seed: int, rounds: int) -> Row:
    """More connections than the process may have descriptors, each with half a request."""
    count = UNFINISHED_CONNECTIONS * rounds
    row = Row("unfinished requests", f"{count} connections at {DESCRIPTORS} descriptors")
    with scene(seed, descriptors=DESCRIPTORS) as here, _connected(here, count) as connections:
        for connection in connections:
            with suppress(OSError):
                connection.send(_HEAD)
        here.send()
        time.sleep(ATTACK_SECONDS)
        return closing(here, row, SERVERS, 120.0)


@contextmanager
def _connected(here: Scene, count: int) -> Iterator[Sequence[socket.socket]]:
    address = urlsplit(here.sidecar.url)
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(1.0)
            with suppress(OSError):
                connection.connect((address.hostname, address.port))
                connection.setblocking(False)
                found.append(connection)
        yield found


def huge_body_without_a_key(seed: int, rounds: int) -> Row:
    """Two gigabytes for a sidecar that others reach, once with declared length and once in chunks."""
    return _huge_body(seed, rounds, with_key=False)


def huge_body_with_a_key(seed: int, rounds: int) -> Row:
    return _huge_body(seed, rounds, with_key=True)


def _huge_body(seed: int, rounds: int, *, with_key: bool) -> Row:
    row = Row(
        f"huge body {'with' if with_key else 'without'} a key", f"{2 * rounds} x {BODY_BYTES / 1e9:.0f} GB"
    )
    with scene_with_key(seed) as here:
        here.send()
        key = f"Authorization: Bearer {here.before}\r\n" if with_key else ""
        expected = 413 if with_key else 401
        for number in range(2 * rounds):
            sent, status = _send_huge(here.sidecar.url, key, expected, declared=number % 2 == 0)
            if status != expected or sent > BODY_BYTES // 10:
                row.wrong.append(f"{sent / 1e6:.0f} MB were taken, and the answer was {status}")
        return closing(here, row, SERVERS, 120.0)


@contextmanager
def scene_with_key(seed: int) -> Iterator[Scene]:
    """A sidecar bound to every address, and senders that have a key."""
    with scene(seed, host=ANYWHERE, before_start=_make_key) as here:
        key = here.before
        headers = {"Authorization": f"Bearer {key}"}
        here.senders.headers.update(headers)
        yield here


def _make_key(database: Any) -> str:
    with database.session() as session:
        return str(create_key(session, "chaos"))


def _send_huge(url: str, key: str, expected: int, *, declared: bool) -> tuple[int, int]:
    """(bytes that the other side took, status of its answer; 0 where the connection just ended)."""
    address = urlsplit(url)
    part = b"a" * 1_000_000
    length = f"Content-Length: {BODY_BYTES}" if declared else "Transfer-Encoding: chunked"
    sent = 0
    with socket.create_connection((address.hostname, address.port), timeout=20.0) as connection:
        connection.sendall(_HEAD + key.encode() + length.encode() + b"\r\n\r\n")
        with suppress(OSError):
            while sent < BODY_BYTES:
                connection.sendall(part if declared else b"%x\r\n" % len(part) + part + b"\r\n")
                sent += len(part)
        with suppress(OSError):
            answer = connection.recv(100)
            if answer.startswith(b"HTTP/1.1 "):
                return sent, int(answer[9:12])
    return sent, expected if sent < BODY_BYTES // 10 else 0  # a reset may overtake the answer


def unread_exports(seed: int, rounds: int) -> Row:
    """Exports of everything, whose clients do not read a byte."""
    row = Row("unread exports", f"{UNREAD_EXPORTS * rounds} at once")
    with scene(seed) as here:
        here.send()
        here.senders.start(in_batches(here.traffic.draw("bulk", EXPORTED), 5_000))
        if not here.senders.join(240.0):
            row.wrong.append("not all records were acknowledged before the attack")
        with _connected(here, UNREAD_EXPORTS * rounds) as connections:
            for connection in connections:
                with suppress(OSError):
                    connection.send(
                        b"GET /api/v1/records?format=jsonl HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                        b"Accept-Encoding: identity\r\n\r\n"
                    )
            more = Senders(here.sidecar.url)
            more.start([here.traffic.draw("chat", 20) for _ in range(20)], ATTACK_SECONDS / 20)
            if not more.join(ATTACK_SECONDS + 60):
                row.wrong.append("records were not acknowledged meanwhile")
            here.senders.acknowledged |= more.acknowledged
        return closing(here, row, SERVERS, 120.0)


def otlp_bombs(seed: int, rounds: int) -> Row:
    """Small bodies that are expensive to read."""
    row = Row("OTLP bombs", f"{rounds} x 5 million empty entries in 15 kB, and 40,000 points")
    with scene(seed) as here:
        here.send()
        for _ in range(rounds):
            for path, headers, body in _bombs():
                with suppress(httpx.HTTPError):
                    httpx.post(f"{here.sidecar.url}{path}", content=body, headers=headers, timeout=30.0)
        return closing(here, row, SERVERS, 120.0)


def _bombs() -> Iterator[tuple[str, dict[str, str], bytes]]:
    protobuf = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
    empty = gzip.compress(b"\x0a\x00" * 5_000_000)
    for path in ("/v1/traces", "/v1/metrics"):
        yield path, protobuf, empty
    point = {"asDouble": 1.0, "timeUnixNano": str(time.time_ns())}
    metrics = [
        {"name": f"vllm:spec_decode_num_{number}_total", "sum": {"isMonotonic": True, "dataPoints": [point]}}
        for number in range(40_000)
    ]
    body = {"resourceMetrics": [{"scopeMetrics": [{"metrics": metrics}]}]}
    packed = gzip.compress(json.dumps(body).encode())
    yield "/v1/metrics", {"Content-Type": "application/json", "Content-Encoding": "gzip"}, packed


FOREIGN: Final[dict[str, dict[str, str]]] = {
    "Host": {"Host": "evil.example"},
    "Origin": {"Origin": "http://evil.example"},
    "Origin null": {"Origin": "null"},
    "Sec-Fetch-Site": {"Sec-Fetch-Site": "cross-site"},
}


def foreign_writes(seed: int, rounds: int) -> Row:
    """Every write of the API, as a page of another site would send it."""
    row = Row("writes from foreign sites", "every write of the API, each with a foreign Host and Origin")
    with scene(seed) as here:
        here.send()
        document = httpx.get(f"{here.sidecar.url}/api/v1/openapi.json").json()
        for problem in taken_foreign_writes(here.sidecar.url, document):
            row.wrong.append(problem)
        return closing(here, row, SERVERS, 120.0)


def taken_foreign_writes(url: str, openapi: dict[str, Any]) -> Iterator[str]:
    """Those that were not answered with 403."""
    for path, operations in openapi["paths"].items():
        for method in operations:
            if method in ("get", "head", "options", "parameters"):
                continue
            filled = path.replace("{", "").replace("}", "")
            for name, headers in FOREIGN.items():
                answer = httpx.request(method, f"{url}{filled}", headers=headers, content=b"{}")
                if answer.status_code != 403:
                    yield f"{method.upper()} {path} with a foreign {name}: {answer.status_code}"
