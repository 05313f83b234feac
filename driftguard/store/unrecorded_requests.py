"""Requests that were answered and not recorded, per hour, server, reason and reporter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ARRAY, Text, any_, distinct, func, literal, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.records import FUTURE_TOLERANCE, UnrecordedReason, UnrecordedRequests
from driftguard.records.unrecorded import LATEST_AFTER
from driftguard.store.tables import HourlyRollup, Stream, UnrecordedRow


def store(
    session: Session, counts: Sequence[UnrecordedRequests], max_servers: int, now: datetime
) -> tuple[int, Collection[str]]:
    """Keeps the largest of each count. Returns how many were news, and the servers that would be more than
    `max_servers` (none of their counts is stored)."""
    refused = _too_many(session, {count.server for count in counts}, max_servers, now)
    largest: dict[tuple[object, ...], UnrecordedRequests] = {}
    for count in sorted(counts, key=lambda count: count.requests):
        if count.server not in refused:
            largest[count.hour, count.server, count.reason, count.reporter] = count
    if not largest:
        return 0, refused
    statement = insert(UnrecordedRow)
    given = statement.excluded
    rows = [
        {
            "hour": c.hour,
            "server": c.server,
            "reason": c.reason,
            "reporter": c.reporter,
            "requests": c.requests,
        }
        for c in sorted(
            largest.values(), key=lambda c: (c.hour, c.server, c.reason, c.reporter)
        )  # no deadlock
    ]
    news = session.execute(
        statement.values(rows)
        .on_conflict_do_update(
            index_elements=["hour", "server", "reason", "reporter"],
            set_={"requests": given.requests},
            where=UnrecordedRow.requests < given.requests,
        )
        .returning(UnrecordedRow.requests)
    ).all()
    return len(news), refused


def _too_many(session: Session, servers: set[str], most: int, now: datetime) -> set[str]:
    """Those that are new, beyond `most` with the others of the hours that are still taken."""
    recent = UnrecordedRow.hour >= now - LATEST_AFTER
    known = session.scalars(
        select(UnrecordedRow.server).where(recent, UnrecordedRow.server.in_(servers)).distinct()
    )
    new = sorted(servers - set(known))
    if not new:
        return set()
    present = session.scalar(select(func.count(distinct(UnrecordedRow.server))).where(recent)) or 0
    return set(new[max(most - present, 0) :])


def since(
    session: Session, after: datetime, now: datetime, servers: Collection[str] | None = None
) -> dict[str, dict[UnrecordedReason, int]]:
    """server -> reason -> requests, the most frequent first, in the hours that began after that moment, and
    not by a clock that was ahead; of all servers, or of these."""
    requests = func.sum(UnrecordedRow.requests)
    query = (
        select(UnrecordedRow.server, UnrecordedRow.reason, requests)
        .where(UnrecordedRow.hour > after, UnrecordedRow.hour <= now + FUTURE_TOLERANCE)
        .group_by(UnrecordedRow.server, UnrecordedRow.reason)
        .order_by(UnrecordedRow.server, requests.desc(), UnrecordedRow.reason)
    )
    if servers is not None:
        query = query.where(UnrecordedRow.server == any_(literal(list(servers), ARRAY(Text))))
    found: dict[str, dict[UnrecordedReason, int]] = defaultdict(dict)
    for server, reason, count in session.execute(query):
        found[server][reason] = int(count)
    return found


@dataclass(frozen=True, slots=True)
class Recorded:
    """Of one server: the requests that have a record of their own, by stream; and whether it has windows."""

    requests: Mapping[int, int]
    has_windows: bool


def recorded_since(
    session: Session, after: datetime, now: datetime, servers: Collection[str]
) -> dict[str, Recorded]:
    """Of these servers, in the same hours; those without records are left out."""
    query = (
        select(Stream.server, HourlyRollup.stream_id, HourlyRollup.kind, func.sum(HourlyRollup.records))
        .join(Stream, Stream.id == HourlyRollup.stream_id)
        .where(Stream.server == any_(literal(list(servers), ARRAY(Text))))
        .where(HourlyRollup.minute > after, HourlyRollup.minute <= now + FUTURE_TOLERANCE)
        .where(HourlyRollup.kind != "probe")
        .group_by(Stream.server, HourlyRollup.stream_id, HourlyRollup.kind)
    )
    requests: dict[str, dict[int, int]] = defaultdict(dict)
    windows = set()
    for server, stream_id, kind, records in session.execute(query):
        if kind == "window":
            windows.add(server)
        else:
            requests[server][stream_id] = int(records)
    return {server: Recorded(requests[server], server in windows) for server in {*requests, *windows}}
