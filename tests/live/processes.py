"""The sidecar and the proxy as their users start them, and a wire on which bytes can be looked at."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPResponse, IncompleteRead
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from driftguard.demo.processes import Process, free_url, start_sidecar
from driftguard.records import AcceptanceRecord, decode_record
from tests.alerting.http_receiver import wait_until

READY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Sidecar:
    client: httpx.Client
    process: Process

    @property
    def url(self) -> str:
        return str(self.client.base_url)

    def get(self, path: str, **query: Any) -> Any:
        answer = self.client.get(f"/api/v1/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def records(self) -> list[AcceptanceRecord]:
        """All of them, in the order of arrival."""
        answer = self.client.get("/api/v1/records", params={"format": "jsonl"})
        assert answer.status_code == 200, answer.text
        return [decode_record(line) for line in answer.content.splitlines()]


@contextmanager
def sidecar(directory: Path, database_url: str, config: str = "") -> Iterator[Sidecar]:
    """`config`: more of it, in TOML."""
    directory.mkdir(exist_ok=True)
    url = free_url()
    first = f"data_dir = {json.dumps(str(directory / 'data'))}\ndatabase_url = {json.dumps(database_url)}\n"
    process = start_sidecar(directory, url, first + config)
    try:
        process.wait_ready(f"{url}/readyz", READY_SECONDS)
        with httpx.Client(base_url=url) as client:
            yield Sidecar(client, process)
    finally:
        process.stop()


@dataclass(frozen=True, slots=True)
class Proxy:
    url: str
    admin_url: str
    process: Process

    def counts(self) -> Counter[str]:
        """Its requests by what became of their records, and records by outcome, as `records_sent`."""
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(httpx.get(f"{self.admin_url}/driftguard/metrics").text):
            for sample in family.samples:
                if sample.name == "driftguard_proxy_requests_total":
                    found[sample.labels["record"]] += int(sample.value)
                elif sample.name == "driftguard_proxy_records_total":
                    found[f"records_{sample.labels['outcome']}"] += int(sample.value)
        return found

    def wait_sent(self, records: int) -> None:
        wait_until(lambda: self.counts()["records_sent"] == records, f"{records} records")


@contextmanager
def proxy(directory: Path, upstream: str, sidecar_url: str, *options: str) -> Iterator[Proxy]:
    url, admin_url = free_url(), free_url()
    arguments = ["driftguard", "proxy", "--upstream", upstream, "--sidecar", sidecar_url, *options]
    arguments += ["--port", url.rsplit(":", 1)[1], "--admin-port", admin_url.rsplit(":", 1)[1]]
    process = Process.start("proxy", arguments, directory / "proxy.log")
    try:
        process.wait_ready(f"{admin_url}/driftguard/healthz", READY_SECONDS)
        yield Proxy(url, admin_url, process)
    finally:
        process.stop()


@dataclass(slots=True)
class Wire:
    """A TCP relay that keeps what came back, connection by connection; all of it once it has ended."""

    url: str
    received: list[bytearray] = field(default_factory=list)

    def bodies(self) -> list[bytes]:
        """Of all answers, sorted."""
        return sorted(body for answers in self.received for body in _bodies(bytes(answers)))


class _Stream:
    """What http.client reads an answer from; it closes the file after each, which goes on here."""

    def __init__(self, content: bytes) -> None:
        self._file = BytesIO(content)
        self._file.close = lambda: None  # type: ignore[method-assign]

    def makefile(self, _mode: str) -> BytesIO:
        return self._file

    @property
    def has_more(self) -> bool:
        return self._file.tell() < len(self._file.getbuffer())


def _bodies(answers: bytes) -> Iterator[bytes]:
    stream = _Stream(answers)
    while stream.has_more:
        answer = HTTPResponse(stream)  # type: ignore[arg-type]
        answer.begin()
        try:
            yield answer.read()
        except IncompleteRead as error:  # the client closed at the last event, before the end of the stream
            yield error.partial


@contextmanager
def wire(upstream: str) -> Iterator[Wire]:
    """To the server at that URL."""
    where = urlsplit(upstream)
    stopping, relays = threading.Event(), list[threading.Thread]()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        found = Wire(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def relay(client: socket.socket) -> None:
            kept = bytearray()
            found.received.append(kept)
            address = (where.hostname or "", where.port or 80)
            with client, suppress(OSError), socket.create_connection(address) as server:
                while (readable := select.select([client, server], [], [], 0.05)[0]) or not stopping.is_set():
                    for source in readable:
                        data = source.recv(65_536)
                        if not data:
                            return
                        if source is server:
                            kept += data
                        (server if source is client else client).sendall(data)

        def accept() -> None:
            listener.settimeout(0.05)
            while not stopping.is_set():
                with suppress(TimeoutError):
                    relays.append(threading.Thread(target=relay, args=(listener.accept()[0],), daemon=True))
                    relays[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield found
        finally:
            stopping.set()
            for thread in [accepting, *relays]:
                thread.join()


def of_all(records: Sequence[AcceptanceRecord]) -> Counter[str]:
    """The sums of their counts; of positions as `accepted@0`, those of the first."""
    found: Counter[str] = Counter()
    for record in records:
        for name in ("steps", "drafted", "accepted", "emitted", "output_tokens"):
            found[name] += getattr(record, name) or 0
        for place, accepted in enumerate(record.accepted_per_position or ()):
            found[f"accepted@{place}"] += accepted
    return found
