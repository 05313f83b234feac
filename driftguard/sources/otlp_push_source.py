"""One server whose metrics are pushed to the sidecar, and the windows made from its exports."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final
from uuid import NAMESPACE_URL, uuid5

import msgspec

from driftguard.adapters.adapter import Adapter
from driftguard.adapters.condition import Condition
from driftguard.adapters.opentelemetry import OPENTELEMETRY
from driftguard.adapters.otlp_points import Point, is_in_the_future, refusal, selected
from driftguard.adapters.otlp_readings import Readings, Taken, TooManySeries
from driftguard.adapters.reading import Unfinished
from driftguard.adapters.window import Drafted, Identity, Incomplete, Window
from driftguard.errors import Busy, DatabaseUnavailable, DriftGuardError
from driftguard.records import AcceptanceRecord, RecordError, check_clock
from driftguard.sources.condition import Judged, WasProbed, judge, never_probed
from driftguard.sources.scrape import Submit, drafted_with

USUAL_INTERVAL_SECONDS: Final = 60.0  # the default of exporters; used until two exports have arrived
REASONS_KEPT: Final = 20  # of one export
WAITING: Final = Judged("waiting", "the next export gives its first window")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an export. Numbers are of data points; `reasons`: why some were rejected."""

    condition: Condition
    detail: str
    ignored: int = 0
    rejected: int = 0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Points by outcome. `reasons`: the first reasons for which points are rejected."""

    usable: Sequence[Point]
    ignored: int
    rejected: int
    reasons: tuple[str, ...]


@dataclass(slots=True)
class PushedSource:
    """`before`: the reading at which the last stored window ended; `waiting`: the one at whose end a window
    may be stored, as its commit was not answered, and the newest that none is stored of yet. `resource`
    distinguishes it from other resources of the same server, which have windows of their own."""

    identity: Identity
    adapter: Adapter
    resource: str
    heard_at: datetime
    was_probed: WasProbed = never_probed
    interval_seconds: float = USUAL_INTERVAL_SECONDS
    before: Taken | None = None
    waiting: Sequence[Taken] = ()
    read_at: datetime | None = None  # the newest reading that a window ends at or goes on over
    readings: Readings = field(default_factory=Readings)
    judged: Judged = WAITING
    judged_place: int | None = None  # of the reading that it is of
    unfinished: Unfinished | None = None  # as it was judged with the reading before that one
    drafted: Drafted | None = None  # what it did with last
    has_contradicted: bool = False  # whether the counts of its last window contradicted each other
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def take(
        self, points: Sequence[Point], now: datetime, oldest: datetime, submit: Submit, room: int
    ) -> Outcome:
        """Stores the windows that these points complete. `room`: how many more series may be remembered.
        Raises what `submit` raises: the export may be sent again, and the next window begins where this one
        would have begun.

        The caller holds the lock. Slow work runs in threads: an export may have very many points."""
        found = await asyncio.to_thread(self._sort, points, now, oldest)
        ignored, reasons = found.ignored, found.reasons
        present = [point for point in found.usable if not point.is_gone]
        if found.usable and not present:
            return Outcome("unreachable", "its collector no longer has a value for it", ignored)
        if not present and reasons:
            return Outcome("incomplete", reasons[0], ignored, found.rejected, reasons)
        try:
            if is_in_the_future(self.readings.newest_ns, now):  # the clock was set back meanwhile
                self._begin_anew()
            if self.before and self.before.reading.at < oldest:
                self.before = None
            taken = await asyncio.to_thread(self.readings.take, present, room)
            refused = await self._store(taken, now, submit)
        except (Incomplete, RecordError, TooManySeries) as error:
            told = str(error)
            return Outcome("incomplete", told, ignored, found.rejected + len(present), (*reasons, told))
        if refused:  # other windows of the same points may be stored, so that no point is rejected
            return Outcome("incomplete", refused[0], ignored, found.rejected, (*reasons, *refused))
        detail = self.judged.detail or next(iter(reasons), "")
        return Outcome(self.judged.condition, detail, ignored, found.rejected, reasons)

    def _begin_anew(self) -> None:
        """Otherwise all points would be taken for earlier ones until the clock has caught up."""
        self.before = self.read_at = self.judged_place = self.unfinished = None
        self.waiting, self.readings, self.judged = (), Readings(), WAITING

    def _sort(self, points: Sequence[Point], now: datetime, oldest: datetime) -> _Sorted:
        usable: list[Point] = []
        reasons: list[str] = []
        ignored = 0
        for point in points:
            known = selected(point, self.adapter.names)
            if known is None and point.name.startswith(OPENTELEMETRY.prefix):
                reasons.append(f"{point.name}: unknown metric")
            elif known is None:
                ignored += 1
            elif reason := refusal(known, now, oldest):
                reasons.append(reason)
            else:
                usable.append(known)
        return _Sorted(usable, ignored, len(reasons), tuple(dict.fromkeys(reasons))[:REASONS_KEPT])

    async def _store(self, taken: Sequence[Taken], now: datetime, submit: Submit) -> tuple[str, ...]:
        """Returns why some windows are refused. They are skipped: a longer window would be refused too."""
        refused: dict[str, None] = {}
        waiting, self.waiting = [*self.waiting, *taken], ()
        while waiting:
            try:
                records = await asyncio.to_thread(self._records, waiting[0], now)
                if records:
                    stored = await asyncio.wrap_future(submit(records))
                    refused |= dict.fromkeys(why for _, why in stored.refusals(records))
            except (Busy, DatabaseUnavailable):  # else its counts would be in a longer window as well
                self.waiting = (waiting[0], *_newest(waiting[1:]))
                raise
            except Exception as error:
                self.waiting = _newest(waiting if isinstance(error, DriftGuardError) else waiting[1:])
                raise
            self._move(waiting.pop(0))
        return tuple(refused)

    def _move(self, taken: Taken) -> None:
        """Makes the next window begin at this reading, unless the one before it goes on."""
        if self.before and taken.place != self.before.place:
            since = max(self.before.reading.at, self.read_at or self.before.reading.at)
            if taken.reading.at > since:  # or more points of the same reading arrived
                self.interval_seconds = (taken.reading.at - since).total_seconds()
        self.read_at = taken.reading.at
        if not self.judged.goes_on:
            self.before = taken

    def _records(self, taken: Taken, now: datetime) -> list[AcceptanceRecord]:
        """The records of the windows that end with this reading. Raises Incomplete, RecordError."""
        if self.before and taken.place == self.before.place:
            return []
        if self.before and taken.left_out:
            self.judged = Judged("reporting", f"a window was left out: {taken.left_out}")
            return []
        before = self.before.reading if self.before else None
        if taken.place != self.judged_place:  # otherwise more points of the same reading arrived
            self.judged_place, self.unfinished = taken.place, self.judged.unfinished
        self.judged = judge(
            self.adapter,
            before,
            taken.reading,
            self.identity,
            "",
            self.was_probed,
            self.unfinished,
            drafted=self.drafted,
        )
        try:
            records = [self._record(window, now) for window in self.judged.windows]
        except RecordError:
            if self.has_contradicted:  # so not by chance: a longer window would contradict itself again
                self.before = taken
            self.has_contradicted = not self.has_contradicted
            raise
        self.has_contradicted = False
        self.drafted = drafted_with(records) or self.drafted
        return records

    def _record(self, window: Window, now: datetime) -> AcceptanceRecord:
        """The same window is the same record, however often it is exported."""
        record = window.record(self.identity)
        what = (record.stream_key, record.draft, record.segment, record.started_at, record.ended_at)
        named = uuid5(NAMESPACE_URL, f"otlp:{self.resource}:{what}")
        record = msgspec.structs.replace(record, record_id=named)
        check_clock(record, now)
        return record


def _newest(waiting: Sequence[Taken]) -> Sequence[Taken]:
    """Only that is kept, since counters are cumulative. It ends no window if one before it could not."""
    left_out = next((item.left_out for item in waiting if item.left_out), "")
    return [replace(item, left_out=left_out) for item in waiting[-1:]]
