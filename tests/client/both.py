"""Both clients behind one interface: the asyncio one in an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar
from uuid import UUID

from driftguard.client import AsyncClient, BatchCounts, Client, Counts, Incident, Status
from driftguard.records import AcceptanceRecord, UnrecordedReason

Value = TypeVar("Value")


class AnyClient(Protocol):
    @property
    def counts(self) -> Counts: ...

    def send(self, record: AcceptanceRecord) -> None: ...

    def count_unrecorded(self, server: str, reason: UnrecordedReason, requests: int = 1) -> None: ...

    def flush(self, timeout_seconds: float = 5.0) -> bool: ...

    def close(self, timeout_seconds: float = 5.0) -> None: ...

    def post(self, records: Sequence[AcceptanceRecord]) -> BatchCounts: ...

    def status(self) -> Status: ...

    def incident(self, incident_id: UUID) -> Incident: ...

    def incidents(self, *, state: str | None = None, stream: int | None = None) -> Iterator[Incident]: ...


MakeClient = Callable[..., AnyClient]


class Looped:
    """An AsyncClient whose calls block until they are done."""

    def __init__(self, loop: asyncio.AbstractEventLoop, url: str, **options: Any) -> None:
        self._loop = loop

        async def make() -> AsyncClient:
            return AsyncClient(url, **options)

        self._client = self._wait(make())

    def _wait(self, call: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(60)

    @property
    def counts(self) -> Counts:
        return self._client.counts

    def send(self, record: AcceptanceRecord) -> None:
        async def send() -> None:
            self._client.send(record)

        self._wait(send())

    def count_unrecorded(self, server: str, reason: UnrecordedReason, requests: int = 1) -> None:
        async def count() -> None:
            self._client.count_unrecorded(server, reason, requests)

        self._wait(count())

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        return self._wait(self._client.flush(timeout_seconds))

    def close(self, timeout_seconds: float = 5.0) -> None:
        self._wait(self._client.close(timeout_seconds))

    def post(self, records: Sequence[AcceptanceRecord]) -> BatchCounts:
        return self._wait(self._client.post(records))

    def status(self) -> Status:
        return self._wait(self._client.status())

    def incident(self, incident_id: UUID) -> Incident:
        return self._wait(self._client.incident(incident_id))

    def incidents(self, *, state: str | None = None, stream: int | None = None) -> Iterator[Incident]:
        async def read() -> list[Incident]:
            return [incident async for incident in self._client.incidents(state=state, stream=stream)]

        yield from self._wait(read())


@contextmanager
def making(kind: str) -> Iterator[MakeClient]:
    """Makes clients of this kind, and closes them."""
    made: list[AnyClient] = []
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def make(url: object, **options: Any) -> AnyClient:
        client: AnyClient = (
            Client(str(url), **options) if kind == "sync" else Looped(loop, str(url), **options)
        )
        made.append(client)
        return client

    try:
        yield make
    finally:
        for client in made:
            client.close(0.1)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
