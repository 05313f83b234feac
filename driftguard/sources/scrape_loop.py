"""The thread that scrapes: every leased server, each at its own offset in the interval."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import aiohttp
import structlog

from driftguard.adapters.condition import DOWN
from driftguard.errors import DatabaseUnavailable
from driftguard.metrics import Metrics
from driftguard.settings import ScrapingSettings, SourceSettings
from driftguard.sources.announced_draft import AnnouncedDrafts
from driftguard.sources.condition import WasProbed, never_probed
from driftguard.sources.leases import LOOK_SECONDS, ScrapeLeases
from driftguard.sources.scrape import Submit, open_client, scrape
from driftguard.sources.source import Scraped, Source, sources_of
from driftguard.store import sources as stored
from driftguard.store.database import Database
from driftguard.store.streams import drafted_last

WRITES_PER_INTERVAL: Final = 3  # of the results: most of their cost is per write, not per server
OVERDUE_INTERVALS: Final = 3
SHORTEST_OVERDUE: Final = timedelta(minutes=1)
log = structlog.get_logger(__name__)


class ScrapeLoop:
    """Does nothing without sources. `start` and `stop` are called once each."""

    def __init__(
        self,
        database: Database,
        sources: Sequence[SourceSettings],
        settings: ScrapingSettings,
        submit: Submit,
        metrics: Metrics,
        was_probed: WasProbed = never_probed,
    ) -> None:
        """Raises BadSettings: two sources with the same name."""
        self._was_probed = was_probed
        self._database = database
        self._sources = sources_of(sources)
        self._settings = settings
        self._announced = AnnouncedDrafts(database)
        self._leases = ScrapeLeases(database, [source.identity.server for source in self._sources], submit)
        self._metrics = metrics
        self._found: dict[str, stored.SourceState] = {}
        self._recalled: dict[str, stored.SourceState] = {}  # as a lease began, until its first scrape
        self._changed: set[str] = set()
        self._began_at = datetime.now(UTC)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="scraping", daemon=True)

    def start(self) -> None:
        if self._sources:
            self._thread.start()

    def stop(self) -> None:
        """Ends at once; counts that were scraped but not stored are still in the servers' counters."""
        if self._loop is not None and self._main is not None:
            self._loop.call_soon_threadsafe(self._main.cancel)
        if self._thread.is_alive():
            self._thread.join()

    def overdue(self, now: datetime) -> list[str]:
        """Servers that this sidecar has not tried to scrape for three intervals, because the loop hangs. An
        unreachable server is not overdue, nor is one that another sidecar scrapes."""
        limit = max(OVERDUE_INTERVALS * timedelta(seconds=self._settings.interval_seconds), SHORTEST_OVERDUE)
        names = {source.identity.server for source in self._sources}.difference(self._leases.waiting)
        return [name for name in sorted(names) if now - self._tried_at(name) > limit]

    def waiting(self) -> Sequence[str]:
        """Servers of these sources that another sidecar on the database scrapes."""
        return self._leases.waiting

    def _tried_at(self, server: str) -> datetime:
        """The time of the last attempt, at least the beginning of its lease."""
        lease, found = self._leases.of(server), self._found.get(server)
        return max(lease.began_at if lease else self._began_at, found.scraped_at if found else self._began_at)

    def _run(self) -> None:
        try:
            asyncio.run(self._scrape_all())
        except asyncio.CancelledError:
            return
        finally:
            self._leases.stop()

    async def _scrape_all(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        await self._take_leases()
        async with open_client(self._settings) as client, asyncio.TaskGroup() as group:
            for place, source in enumerate(self._sources):
                delay = self._settings.interval_seconds * place / len(self._sources)
                group.create_task(self._watch(client, source, delay))
            group.create_task(self._keep())
            group.create_task(self._keep_leases())

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._take_leases()

    async def _take_leases(self) -> None:
        try:
            await self._leases.look()
            with suppress(DatabaseUnavailable):  # then nothing is stored either
                await self._announced.look()
        except Exception:
            self._metrics.loops.failures.labels("scraping").inc()
            log.exception("taking turns with other sidecars failed and will be tried again")
        servers = [source.identity.server for source in self._sources]
        here = {server for server in servers if self._leases.of(server) is not None}
        self._metrics.sources.set_scraping(servers, here, self._leases.waiting)

    async def _watch(self, client: aiohttp.ClientSession, source: Source, delay_seconds: float) -> None:
        """Scrapes one server at fixed times; a scrape that takes longer than the interval skips some."""
        clock, interval = asyncio.get_running_loop(), self._settings.interval_seconds
        due = clock.time() + delay_seconds
        last_lease: UUID | None = None
        while True:
            await asyncio.sleep(due - clock.time())
            try:
                if lease := self._leases.of(source.identity.server):
                    if lease.id != last_lease:
                        await asyncio.to_thread(self._recall, source)
                        source.before, source.unanswered, last_lease = None, None, lease.id
                    follow = self._announced.follow
                    self._note(source, await scrape(client, source, lease.submit, self._was_probed, follow))
            except Exception:
                self._metrics.loops.failures.labels("scraping").inc()
                log.exception("a scrape failed and will be tried again", source=source.identity.server)
            due += interval * max(1, -(-(clock.time() - due) // interval))

    def _recall(self, source: Source) -> None:
        """What was found while another sidecar scraped it, or before this one started. Raises
        DatabaseUnavailable."""
        server = source.identity.server
        with self._database.session() as session:
            source.drafted = drafted_last(session, server)
            last = stored.last_state(session, server, source.shown_url, datetime.now(UTC))
        if last is not None:
            self._recalled[server] = last

    def _note(self, source: Source, scraped: Scraped) -> None:
        server = source.identity.server
        before = self._found.get(server)
        recalled = self._recalled.pop(server, None)
        state = _state(recalled or before, source, scraped, self._settings.interval_seconds)
        self._metrics.sources.observe(server, state.kind, state.condition, scraped.at)
        if recalled is not None:
            self._metrics.sources.show(server, state.kind, state.condition, state.answered_at)
        if before is None or _is_news(before, state):
            tell = log.info if scraped.condition in ("waiting", "reporting", "idle") else log.warning
            tell("source", server=server, kind=state.kind, condition=scraped.condition, detail=scraped.detail)
        self._found[server] = state
        self._changed.add(server)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.interval_seconds / WRITES_PER_INTERVAL)
            self._leases.flush()
            changed, self._changed = self._changed, set()
            if not changed:
                continue
            try:
                await asyncio.to_thread(self._write, [self._found[server] for server in sorted(changed)])
            except DatabaseUnavailable:
                self._changed |= changed  # not logged here: the ingest reports the outage
            except Exception:
                self._changed |= changed
                self._metrics.loops.failures.labels("scraping").inc()
                log.exception("results of scrapes could not be stored and will be tried again")

    def _write(self, states: Sequence[stored.SourceState]) -> None:
        with self._database.session() as session:
            stored.store(session, states)


def _is_news(before: stored.SourceState, now: stored.SourceState) -> bool:
    """Whether the log tells it. That drafting stopped is told with another number after each scrape."""
    if before.condition == now.condition == "drafting_stopped":
        return False
    return (before.condition, before.detail) != (now.condition, now.detail)


def _state(
    before: stored.SourceState | None, source: Source, scraped: Scraped, interval_seconds: float
) -> stored.SourceState:
    same = before is not None and before.condition == scraped.condition
    answered = scraped.condition not in DOWN
    started = source.before.started_at if answered and source.before else None
    return stored.SourceState(
        server=source.identity.server,
        kind=before.kind if source.adapter is None and before else source.kind,
        url=source.shown_url,
        fidelity=source.adapter.fidelity if source.adapter else (before.fidelity if before else None),
        condition=scraped.condition,
        detail=scraped.detail,
        since=before.since if same and before else scraped.at,
        scraped_at=scraped.at,
        answered_at=scraped.at if answered else (before.answered_at if before else None),
        interval_seconds=interval_seconds,
        started_at=datetime.fromtimestamp(started, UTC) if started is not None else None,
        version=source.version if answered else None,
    )
