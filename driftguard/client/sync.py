"""The client for threads: a background thread sends the records given to `send`."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, TypeVar
from uuid import UUID
from weakref import WeakSet

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt
from tenacity.stop import stop_base

from driftguard.client import protocol
from driftguard.client.answers import BatchCounts, Incident, IncidentPage, Status
from driftguard.client.buffer import Buffer, Counts
from driftguard.client.protocol import Outcome, SidecarUnavailable
from driftguard.client.tally import Tally
from driftguard.errors import TooLarge
from driftguard.records import AcceptanceRecord, UnrecordedReason, encode_record, encode_unrecorded

Answer = TypeVar("Answer")
LEAST_SECONDS: Final = 0.1
log = logging.getLogger("driftguard.client")
_clients: WeakSet[Client] = WeakSet()  # of this process
_told: set[str] = set()  # names of threads that could not be started


class Client:
    """A client of the sidecar at `url`. May be used from any thread, and in forked processes, each of which
    sends its own records. What waits is sent where a process ends in order, too.

    api_key: needed where the sidecar is bound to more than loopback. max_buffered: records that wait while
    the sidecar is unreachable; the oldest is dropped first and counted. max_batch: records of one request.
    linger_seconds: how long to wait for more records before a batch that is not full is sent.
    report_seconds: how often counts of unrecorded requests are sent.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        max_buffered: int = 10_000,
        max_batch: int = 500,
        linger_seconds: float = 1.0,
        report_seconds: float = protocol.REPORT_SECONDS,
    ) -> None:
        """Connects at first use. Raises ValueError."""
        self._address = protocol.address_of(url)
        self._headers = protocol.headers(api_key)
        self._authorities = protocol.authorities_for(self._address)
        self._max_buffered = max_buffered
        self._max_batch = max_batch
        self._linger_seconds = linger_seconds
        self._report_seconds = report_seconds
        self._begin()
        _clients.add(self)

    def _begin(self) -> None:
        """With no records, connections and threads. Raises ValueError."""
        self._http = httpx.Client(
            base_url=self._address,
            headers=self._headers,
            timeout=protocol.TIMEOUT,
            trust_env=False,
            verify=self._authorities,
        )
        self._buffer = Buffer(self._max_buffered, self._max_batch)
        self._tally = Tally()
        self._changed = threading.Condition()  # guards the buffer and the tally
        self._flushing = False
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None
        self._reporting: threading.Thread | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def counts(self) -> Counts:
        """The outcome so far of the records given to `send`."""
        with self._changed:
            return replace(self._buffer.counts)

    def send(self, record: AcceptanceRecord) -> None:
        """Takes microseconds; never waits for the network, never raises. After `close` it drops records."""
        with self._changed:
            if self._closing.is_set():
                self._buffer.counts.dropped += 1
                return
            self._buffer.add(record)
            self._start()
            self._changed.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = started(self._run, "driftguard-client")

    def count_unrecorded(self, server: str, reason: UnrecordedReason, requests: int = 1) -> None:
        """Requests that `server` answered and of which there is no record, so that the status can say which
        part of the traffic is missing. Takes microseconds; never waits for the network, never raises. Counts
        of the last day wait in memory while the sidecar is away."""
        with self._changed:
            if self._closing.is_set():
                return
            self._tally.add(server, reason, requests, datetime.now(UTC))
            if self._reporting is None:
                self._reporting = started(self._report, "driftguard-unrecorded")

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Sends all waiting records now. False: not all were acknowledged in time; the rest keeps waiting."""
        with self._changed:
            self._flushing = True
            if not self._buffer.is_empty:  # and no thread could be started for it
                self._start()
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: self._buffer.counts.waiting == 0, timeout_seconds)
            finally:
                self._flushing = False

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Sends waiting records for at most `timeout_seconds`; then the rest is dropped and counted."""
        _clients.discard(self)
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        threads = [thread for thread in (self._thread, self._reporting) if thread is not None]
        deadline = time.monotonic() + timeout_seconds
        self._send_here(deadline)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._abandoned.set()
        with self._changed:
            self._buffer.give_up()
        if not any(thread.is_alive() for thread in threads):
            self._http.close()  # otherwise an attempt is in progress, and the thread ends after it

    def post(self, records: Sequence[AcceptanceRecord]) -> BatchCounts:
        """Sends these records now, and waits until they are stored.

        Raises RefusedRecords (the others are stored), SidecarUnavailable (after several attempts; they may be
        sent again, and none is stored twice), TooLarge, Unauthorized.
        """
        content = protocol.body([encode_record(record) for record in records])
        return self._attempt(lambda: protocol.read_counts(self._post(content)))

    def status(self) -> Status:
        """One verdict per stream, of the 500 that are worst. Raises SidecarUnavailable."""
        return self._get("/api/v1/status", Status)

    def incident(self, incident_id: UUID) -> Incident:
        """Raises NotFound, SidecarUnavailable."""
        return self._get(f"/api/v1/incidents/{incident_id}", Incident)

    def incidents(self, *, state: str | None = None, stream: int | None = None) -> Iterator[Incident]:
        """Newest first; reads one page of the list after the other. `state`: one of an incident's states, or
        "unresolved".

        Raises BadInput, SidecarUnavailable.
        """
        query = protocol.incident_query(state, stream)
        while True:
            page = self._get("/api/v1/incidents", IncidentPage, query)
            yield from page.incidents
            if page.next_cursor is None:
                return
            query["cursor"] = page.next_cursor

    def _get(self, path: str, kind: type[Answer], query: dict[str, Any] | None = None) -> Answer:
        return self._attempt(lambda: protocol.read(self._request("GET", path, params=query), kind))

    def _post(self, content: bytes, path: str = protocol.RECORDS) -> httpx.Response:
        return self._request("POST", path, content=content, headers=protocol.JSON_LINES)

    def _request(self, method: str, path: str, **values: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **values)
        except httpx.RequestError as error:
            raise protocol.unreachable(error) from error

    def _attempt(self, call: Callable[[], Answer]) -> Answer:
        retrying = Retrying(
            retry=retry_if_exception_type(SidecarUnavailable),
            wait=protocol.seconds_to_wait,
            stop=stop_after_attempt(protocol.ATTEMPTS),
            reraise=True,
        )
        return retrying(call)

    def _run(self) -> None:
        while batch := self._next_batch():
            self._deliver(batch)

    def _next_batch(self) -> list[bytes]:
        """Waits for one; empty when the client was closed and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._buffer.is_empty or self._closing.is_set())
            self._changed.wait_for(
                lambda: self._buffer.has_a_batch or self._flushing or self._closing.is_set(),
                self._linger_seconds,
            )
            return [] if self._abandoned.is_set() else self._buffer.take()

    def _deliver(self, batch: list[bytes], stop: stop_base | None = None) -> bool:
        """Sends until the sidecar has acknowledged the batch, or until `stop`; without one, until the timeout
        of close(). Whether the sidecar has answered."""
        retrying = Retrying(
            retry=retry_if_exception_type(SidecarUnavailable),
            wait=protocol.seconds_to_wait,
            sleep=self._pause,
            stop=stop or (lambda _: self._abandoned.is_set()),
            after=self._note_failure,
            retry_error_callback=lambda _: None,
        )
        try:
            outcome: Outcome | None = retrying(self._send_once, batch)
        except TooLarge:
            with self._changed:
                self._buffer.take_smaller_batches(batch)
            return True
        with self._changed:
            if outcome is not None and not self._abandoned.is_set():
                self._buffer.answered(outcome)
            self._changed.notify_all()
        return outcome is not None

    def _send_here(self, deadline: float) -> None:
        """What waits for a thread that could not be started; once, and until then. `deadline`: by
        time.monotonic()."""
        if self._abandoned.is_set():
            return
        tells = self._reporting is None and bool(self._tally.reports())
        if not tells and (self._thread is not None or self._buffer.is_empty):
            return
        self._http.timeout = max(deadline - time.monotonic(), LEAST_SECONDS)
        if tells:
            self._send_tally()
        while self._thread is None and time.monotonic() < deadline and (batch := self._next_batch()):
            if not self._deliver(batch, stop_after_attempt(1)):
                return

    def _send_once(self, batch: list[bytes]) -> Outcome:
        return protocol.outcome(self._post(protocol.body(batch)), batch)

    def _report(self) -> None:
        """Sends the tally now and then, and once more at the end."""
        while not self._closing.wait(self._report_seconds):
            self._send_tally()
        self._send_tally()

    def _send_tally(self) -> None:
        with self._changed:
            reports = self._tally.reports()
        try:
            for report in reports:
                lines = [encode_unrecorded(count) for count in report]
                answer = self._post(protocol.body(lines), protocol.UNRECORDED)
                outcome = protocol.outcome(answer, lines)
                with self._changed:
                    self._tally.answered(report, outcome)
        except (SidecarUnavailable, TooLarge) as error:
            self._tally.failed(error)

    def _note_failure(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, SidecarUnavailable):
            with self._changed:
                self._buffer.failed(error)

    def _pause(self, seconds: float) -> None:
        # Closing ends one wait, so that there is one more attempt; from then on only the time limit does.
        (self._abandoned if self._closing.is_set() else self._closing).wait(seconds)


def started(work: Callable[[], None], name: str) -> threading.Thread | None:
    """A thread. None where the system has none to give, or the process is ending (from Python 3.12 on): what
    waits for it goes on waiting, and the next caller tries again."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        if name not in _told:
            _told.add(name)
            log.warning("no thread could be started, and what is to be sent waits for one: %s", error)
        return None
    return thread


def _begin_in_child() -> None:
    """Of a fork. Threads do not go on there, and locks may be held by them for ever; connections and the
    records that wait are the parent's."""
    for client in list(_clients):
        client._begin()


def _close_all() -> None:
    for client in list(_clients):
        client.close()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_begin_in_child)
atexit.register(_close_all)
