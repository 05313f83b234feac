"""The client for asyncio: a background task sends the records given to `send`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TypeVar
from uuid import UUID

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from driftguard.client import protocol
from driftguard.client.answers import BatchCounts, Incident, IncidentPage, Status
from driftguard.client.buffer import Buffer, Counts
from driftguard.client.protocol import Outcome, SidecarUnavailable
from driftguard.client.tally import Tally
from driftguard.errors import TooLarge
from driftguard.records import AcceptanceRecord, UnrecordedReason, encode_record, encode_unrecorded

Answer = TypeVar("Answer")


class AsyncClient:
    """As Client, in one event loop: make, use and close it there."""

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
        address = protocol.address_of(url)
        self._http = httpx.AsyncClient(
            base_url=address,
            headers=protocol.headers(api_key),
            timeout=protocol.TIMEOUT,
            trust_env=False,
            verify=protocol.authorities_for(address),
        )
        self._linger_seconds = linger_seconds
        self._buffer = Buffer(max_buffered, max_batch)
        self._arrived = asyncio.Event()  # there is a record, or the client is closing
        self._hurry = asyncio.Event()  # a full batch, a flush or closing: send without delay
        self._idle = asyncio.Event()  # nothing waits
        self._idle.set()
        self._closing = asyncio.Event()
        self._flushes = 0  # under way
        self._task: asyncio.Task[None] | None = None
        self._report_seconds = report_seconds
        self._tally = Tally()
        self._reporting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def counts(self) -> Counts:
        """The outcome so far of the records given to `send`."""
        return replace(self._buffer.counts)

    def send(self, record: AcceptanceRecord) -> None:
        """Takes microseconds; never waits for the network, never raises. After `close` it drops records."""
        if self._closing.is_set():
            self._buffer.counts.dropped += 1
            return
        self._buffer.add(record)
        if self._buffer.is_empty:
            return
        self._idle.clear()
        self._arrived.set()
        if self._buffer.has_a_batch:
            self._hurry.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="driftguard-client")

    def count_unrecorded(self, server: str, reason: UnrecordedReason, requests: int = 1) -> None:
        """As Client.count_unrecorded."""
        if self._closing.is_set():
            return
        self._tally.add(server, reason, requests, datetime.now(UTC))
        if self._reporting is None:
            loop = asyncio.get_running_loop()
            self._reporting = loop.create_task(self._report(), name="driftguard-unrecorded")

    async def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Sends all waiting records now. False: not all were acknowledged in time; the rest keeps waiting."""
        self._flushes += 1
        self._hurry.set()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        finally:
            self._flushes -= 1
        return True

    async def close(self, timeout_seconds: float = 5.0) -> None:
        """Sends waiting records for at most `timeout_seconds`; then the rest is dropped and counted."""
        for event in (self._closing, self._hurry, self._arrived):
            event.set()
        tasks = {task for task in (self._task, self._reporting) if task is not None}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._buffer.give_up()
        await self._http.aclose()

    async def post(self, records: Sequence[AcceptanceRecord]) -> BatchCounts:
        """Sends these records now, and waits until they are stored.

        Raises RefusedRecords (the others are stored), SidecarUnavailable (after several attempts; they may be
        sent again, and none is stored twice), TooLarge, Unauthorized.
        """
        content = protocol.body([encode_record(record) for record in records])

        async def once() -> BatchCounts:
            return protocol.read_counts(await self._post(content))

        return await self._attempt(once)

    async def status(self) -> Status:
        """One verdict per stream, of the 500 that are worst. Raises SidecarUnavailable."""
        return await self._get("/api/v1/status", Status)

    async def incident(self, incident_id: UUID) -> Incident:
        """Raises NotFound, SidecarUnavailable."""
        return await self._get(f"/api/v1/incidents/{incident_id}", Incident)

    async def incidents(
        self, *, state: str | None = None, stream: int | None = None
    ) -> AsyncIterator[Incident]:
        """Newest first; reads one page of the list after the other. `state`: one of an incident's states, or
        "unresolved".

        Raises BadInput, SidecarUnavailable.
        """
        query = protocol.incident_query(state, stream)
        while True:
            page = await self._get("/api/v1/incidents", IncidentPage, query)
            for incident in page.incidents:
                yield incident
            if page.next_cursor is None:
                return
            query["cursor"] = page.next_cursor

    async def _get(self, path: str, kind: type[Answer], query: dict[str, Any] | None = None) -> Answer:
        async def once() -> Answer:
            return protocol.read(await self._request("GET", path, params=query), kind)

        return await self._attempt(once)

    async def _post(self, content: bytes, path: str = protocol.RECORDS) -> httpx.Response:
        return await self._request("POST", path, content=content, headers=protocol.JSON_LINES)

    async def _request(self, method: str, path: str, **values: Any) -> httpx.Response:
        try:
            return await self._http.request(method, path, **values)
        except httpx.RequestError as error:
            raise protocol.unreachable(error) from error

    async def _attempt(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(SidecarUnavailable),
            wait=protocol.seconds_to_wait,
            stop=stop_after_attempt(protocol.ATTEMPTS),
            reraise=True,
        )
        return await retrying(call)

    async def _run(self) -> None:
        while batch := await self._next_batch():
            await self._deliver(batch)
            if self._buffer.counts.waiting == 0:
                self._idle.set()

    async def _next_batch(self) -> list[bytes]:
        """Waits for one; empty when the client was closed and nothing is left."""
        await self._arrived.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._linger_seconds):
                await self._hurry.wait()
        batch = self._buffer.take()
        if not self._closing.is_set():
            if self._buffer.is_empty:
                self._arrived.clear()
            if not self._buffer.has_a_batch and not self._flushes:
                self._hurry.clear()
        return batch

    async def _deliver(self, batch: list[bytes]) -> None:
        """Sends until the sidecar has acknowledged the batch; close() cancels this after its timeout."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(SidecarUnavailable),
            wait=protocol.seconds_to_wait,
            sleep=self._pause,
            after=self._note_failure,
        )
        try:
            self._buffer.answered(await retrying(self._send_once, batch))
        except TooLarge:
            self._buffer.take_smaller_batches(batch)
            self._arrived.set()

    async def _send_once(self, batch: list[bytes]) -> Outcome:
        return protocol.outcome(await self._post_what_waits(batch, protocol.RECORDS), batch)

    async def _post_what_waits(self, lines: list[bytes], path: str) -> httpx.Response:
        """Raises SidecarUnavailable, also where the system has no thread to look the sidecar's name up with:
        it would end the task, and what waits would wait for ever."""
        try:
            return await self._post(protocol.body(lines), path)
        except RuntimeError as error:
            raise SidecarUnavailable(f"{type(error).__name__}: {error}") from error

    async def _report(self) -> None:
        """Sends the tally now and then, and once more at the end."""
        is_closing = False
        while not is_closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._report_seconds):
                    await self._closing.wait()
            is_closing = self._closing.is_set()
            try:
                for report in self._tally.reports():
                    lines = [encode_unrecorded(count) for count in report]
                    answer = await self._post_what_waits(lines, protocol.UNRECORDED)
                    self._tally.answered(report, protocol.outcome(answer, lines))
            except (SidecarUnavailable, TooLarge) as error:
                self._tally.failed(error)

    def _note_failure(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, SidecarUnavailable):
            self._buffer.failed(error)

    async def _pause(self, seconds: float) -> None:
        # Closing ends one wait, so that there is one more attempt; from then on only the time limit does.
        if self._closing.is_set():
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()
