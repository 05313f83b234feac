"""Which draft a scraped server serves, where its counters do not tell and the settings no longer do.

A promotion by a restart announces its draft before it asks for the restart, and users may announce theirs by
the API. It comes into effect with the first restart of the server that is seen from then on, or at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime

import structlog

from driftguard.adapters.reading import Reading, has_restarted
from driftguard.sources.source import Source
from driftguard.store import announced_drafts
from driftguard.store.database import CHECK, Database
from driftguard.store.sources import SAME_START
from driftguard.store.tables import AnnouncedDraft

Follow = Callable[[Source, Reading], Awaitable[bool]]
log = structlog.get_logger(__name__)


async def nothing_announced(_source: Source, _reading: Reading) -> bool:
    return False


class AnnouncedDrafts:
    """`look` is called every few seconds, and `follow` with every reading of a source."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._at_once: frozenset[str] = frozenset()

    async def look(self) -> None:
        """Notices what takes effect without a restart. Raises DatabaseUnavailable."""
        self._at_once = await asyncio.to_thread(self._read_at_once)

    async def follow(self, source: Source, reading: Reading) -> bool:
        """Gives the source the draft version that its counts from `source.before` to `reading` are of. True:
        another draft came into service between the two, so that they are of both. Raises
        DatabaseUnavailable."""
        before = source.before
        restarted = before is not None and has_restarted(before, reading)
        if before is not None and not restarted and source.identity.server not in self._at_once:
            return False
        version, is_mixed = await asyncio.to_thread(self._version, source, reading, restarted)
        if version != source.identity.draft_version:
            source.identity = replace(source.identity, draft_version=version)
        return is_mixed

    def _read_at_once(self) -> frozenset[str]:
        with self._database.session(CHECK) as session:
            return announced_drafts.at_once(session)

    def _version(self, source: Source, reading: Reading, restarted: bool) -> tuple[str | None, bool]:
        with self._database.session(CHECK) as session:
            row = announced_drafts.lock(session, source.identity.server)
            if row is None:
                return source.draft_version, False
            announced_drafts.end_if_outdated(row, source.draft_version)
            restarted = restarted or (source.before is None and _has_restarted_since(row, reading))
            if restarted:
                announced_drafts.restarted(row)
            is_mixed = False
            if row.version is not None and (restarted or row.effective != "after_restart"):
                age = announced_drafts.age(session, row)
                announced_at = datetime.now(UTC) - age  # by the clock of this machine, as readings are
                is_mixed = not restarted and source.before is not None and source.before.at < announced_at
                announced_drafts.take_effect(row, source.draft_version)
                log.info("announced draft in service", server=row.server, draft_version=row.serving)
            return row.serving or source.draft_version, is_mixed


def _has_restarted_since(row: AnnouncedDraft, reading: Reading) -> bool:
    """Since the announcement, while nobody scraped it."""
    if row.started_at is None or reading.started_at is None:
        return False
    return reading.started_at > (row.started_at + SAME_START).timestamp()
