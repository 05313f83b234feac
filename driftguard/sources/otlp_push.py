"""All servers whose metrics are pushed to the sidecar (OTLP), and their state.

State is in memory, as for scraped servers: after a restart of the sidecar the first export of cumulative
counters gives no window. So all exports of one server must go to the same sidecar.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, cast

from driftguard.adapters.adapter import Adapter
from driftguard.adapters.condition import DOWN, Condition
from driftguard.adapters.kinds import detect
from driftguard.adapters.opentelemetry import OPENTELEMETRY
from driftguard.adapters.otlp_identity import BadResource, identity
from driftguard.adapters.otlp_points import Point
from driftguard.metrics import Metrics
from driftguard.sources.condition import WasProbed, never_probed
from driftguard.sources.otlp_push_source import Outcome, PushedSource
from driftguard.sources.scrape import Submit
from driftguard.store import sources
from driftguard.store.database import Database

MAX_RESOURCES: Final = 20_000  # remembered at most
MAX_SERIES: Final = 100_000  # of all of them together
MAX_RESOURCE_LENGTH: Final = 16_000  # of the attributes of a remembered resource, as text


@dataclass(frozen=True, slots=True)
class Export:
    """The data points of one resource."""

    attributes: dict[str, Any]
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Receipt:
    """Numbers of data points that are in no window. `reasons`: why some are rejected."""

    ignored: int
    rejected: int
    reasons: tuple[str, ...]


class PushedSources:
    """Used on one event loop, except for `look`, which any thread may call. Work that grows with the number
    of points or resources runs in threads."""

    def __init__(
        self,
        database: Database,
        submit: Submit,
        metrics: Metrics,
        scraped: Collection[str],
        was_probed: WasProbed = never_probed,
    ) -> None:
        """`scraped`: servers that are scraped; if they were pushed too, their counts would count twice."""
        self._database = database
        self._submit = submit
        self._metrics = metrics
        self._scraped = frozenset(scraped)
        self._was_probed = was_probed
        self._known: dict[str, PushedSource] = {}  # by resource
        self._finding = threading.Lock()  # held while one is added
        self._shown: set[str] = set()

    async def take(self, exports: Iterable[Export], now: datetime, oldest: datetime) -> Receipt:
        """Returns when every window is stored. Raises Busy, DatabaseUnavailable: the export may be sent
        again."""
        found, receipts = await asyncio.to_thread(self._find, exports, now)
        work = (self._take(source, export, now, oldest) for source, export in found)
        done = await asyncio.gather(*work, return_exceptions=True)
        states: dict[str, sources.SourceState] = {}
        for item in done:
            if isinstance(item, BaseException):
                raise item
            receipt, state = item
            receipts.append(receipt)
            states[state.server] = state
        if states:
            await asyncio.to_thread(self._write, list(states.values()))
        return Receipt(
            sum(receipt.ignored for receipt in receipts),
            sum(receipt.rejected for receipt in receipts),
            tuple(dict.fromkeys(reason for receipt in receipts for reason in receipt.reasons)),
        )

    async def _take(
        self, source: PushedSource, export: Export, now: datetime, oldest: datetime
    ) -> tuple[Receipt, sources.SourceState]:
        async with source.lock:
            source.heard_at = now
            remembered = sum(known.readings.series for known in list(self._known.values()))
            room = max(0, MAX_SERIES - remembered)
            outcome = await source.take(export.points, now, oldest, self._submit, room)
        server = source.identity.server
        self._metrics.sources.observe(server, source.adapter.kind, outcome.condition, now)
        told = tuple(f"{server}: {reason}" for reason in outcome.reasons)
        return Receipt(outcome.ignored, outcome.rejected, told), _state(source, outcome)

    def _find(
        self, exports: Iterable[Export], now: datetime
    ) -> tuple[list[tuple[PushedSource, Export]], list[Receipt]]:
        """The sources of the exports, and the outcome of exports without one."""
        found: list[tuple[PushedSource, Export]] = []
        receipts: list[Receipt] = []
        for name, export in _merged(exports).items():
            try:
                source = self._source(name, export, now)
            except BadResource as error:
                receipts.append(Receipt(0, len(export.points), (str(error),)))
                continue
            if source is None:
                receipts.append(Receipt(len(export.points), 0, ()))
            else:
                found.append((source, export))
        return found, receipts

    def _source(self, name: str, export: Export, now: datetime) -> PushedSource | None:
        """None: these are not metrics of a serving engine. Raises BadResource."""
        known = self._known.get(name)
        adapter = _adapter(export.points, known.adapter if known else None)
        if adapter is None or (known and known.adapter is adapter):
            return known
        told = identity(export.attributes)
        if told.server in self._scraped:
            raise BadResource(f"{told.server} is scraped already (sources); its counts would count twice")
        if len(name) > MAX_RESOURCE_LENGTH:
            raise BadResource(
                f"{told.server}: the resource's attributes have more than {MAX_RESOURCE_LENGTH} characters"
            )
        with self._finding:
            if self._known.get(name) is known:  # otherwise another request of the same server came first
                if known is None and len(self._known) >= MAX_RESOURCES:
                    raise BadResource(f"{told.server}: more than {MAX_RESOURCES} resources export metrics")
                self._known[name] = PushedSource(
                    told, adapter, name, heard_at=now, was_probed=self._was_probed
                )
            return self._known[name]

    def _write(self, states: Sequence[sources.SourceState]) -> None:
        with self._database.session() as session:
            sources.store_pushed(session, states)

    def look(self, now: datetime) -> None:
        """Marks the servers whose exports have stopped, and removes those silent for a day. Raises
        DatabaseUnavailable."""
        with self._database.session() as session:
            rows = sources.look_at_pushed(session, sources.PUSHED, now)
        for row in rows:
            condition = cast("Condition", row.condition)
            self._metrics.sources.show(row.server, row.kind, condition, row.answered_at)
        present = {row.server for row in rows}
        for server in self._shown - present:
            self._metrics.sources.forget(server)
        self._shown = present
        limit = now - sources.FORGOTTEN_AFTER
        for name in [name for name, source in list(self._known.items()) if source.heard_at < limit]:
            self._known.pop(name, None)


def _merged(exports: Iterable[Export]) -> dict[str, Export]:
    """By resource: a collector may split one into many parts."""
    points: dict[str, list[Point]] = defaultdict(list)
    attributes: dict[str, dict[str, Any]] = {}
    for export in exports:
        name = _resource(export.attributes)
        points[name] += export.points
        attributes[name] = export.attributes
    return {name: Export(attributes[name], of_resource) for name, of_resource in points.items()}


def _resource(attributes: dict[str, Any]) -> str:
    return repr(sorted((name, str(value)) for name, value in attributes.items()))


def _adapter(points: Sequence[Point], known: Adapter | None) -> Adapter | None:
    """`known` as long as its metrics arrive, else detected by their names. A part of an export of BentoML,
    which has vLLM's metrics, may look like one of vLLM."""
    names = {point.name for point in points}
    if not names:
        return None
    for adapter in filter(None, (known, OPENTELEMETRY)):
        if any(name.startswith(adapter.prefix) for name in names):
            return adapter
    found = detect("\n".join(names))
    return known if found and known and found.names == known.names else found


def _state(source: PushedSource, outcome: Outcome) -> sources.SourceState:
    return sources.SourceState(
        server=source.identity.server,
        kind=source.adapter.kind,
        url=sources.PUSHED,
        fidelity=source.adapter.fidelity,
        condition=outcome.condition,
        detail=outcome.detail.replace("\x00", ""),  # which a metric's name may have, and no database stores
        since=source.heard_at,
        scraped_at=source.heard_at,
        answered_at=None if outcome.condition in DOWN else source.heard_at,
        interval_seconds=source.interval_seconds,
    )
