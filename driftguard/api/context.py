"""The context of every route; the composition root stores it at `app.state.context`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime

from fastapi import Request

from driftguard.api.exports import ExportSlots
from driftguard.api.rejections import RejectionLog
from driftguard.api.request_body import Bodies
from driftguard.errors import DriftGuardError
from driftguard.ingest.queue import IngestQueue
from driftguard.metrics import Metrics
from driftguard.probes.loop import Probed
from driftguard.settings import HttpSettings, Settings
from driftguard.sources.otlp_push import PushedSources
from driftguard.status.fold_watch import FoldWatch
from driftguard.status.usual_silence import UsualSilences
from driftguard.store.database import Database


class ClientGone(DriftGuardError):
    """The client closed its connection before its turn came."""

    status = 499  # as nginx says it; nobody reads it
    title = "Client gone"


class Turns:
    """One request after the other. A client that has gone meanwhile has no turn: open pages ask again every
    few seconds, and after an outage of the database all that they had given up would be answered first."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def taken(self, request: Request) -> AsyncIterator[None]:
        """Raises ClientGone."""
        async with self._lock:
            if await request.is_disconnected():
                raise ClientGone("the client closed its connection before its turn came")
            yield


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of a running sidecar that requests need."""

    settings: Settings
    database: Database
    ingest: IngestQueue
    metrics: Metrics
    pushed: PushedSources
    exports: ExportSlots = field(default_factory=lambda: ExportSlots(HttpSettings().max_exports))
    # Servers that no sidecar has tried to scrape for too long, and those that another sidecar scrapes.
    overdue_sources: Callable[[datetime], Sequence[str]] = lambda _: ()
    sources_elsewhere: Callable[[], Sequence[str]] = lambda: ()
    probed: Callable[[], Sequence[Probed]] = lambda: ()
    exposing: asyncio.Lock = field(default_factory=asyncio.Lock)
    listing: Turns = field(default_factory=Turns)  # for queries over all streams
    bodies: Bodies = field(default_factory=Bodies)
    otlp_rejections: RejectionLog = field(default_factory=RejectionLog)
    fold_watch: FoldWatch = field(default_factory=FoldWatch)
    usual_silences: UsualSilences = field(default_factory=UsualSilences)


def get_context(request: Request) -> Context:
    """FastAPI dependency: the Context of the app that serves this request."""
    context = request.app.state.context
    assert isinstance(context, Context)  # noqa: S101 (set by the composition root before the first request)
    return context
