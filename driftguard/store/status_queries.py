"""What the status shows beyond the detectors' summaries: speeds, drafts in service, the last retraining."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import ARRAY, BigInteger, ColumnElement, any_, func, literal, select, tuple_
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.orm import Session

from driftguard.records import FUTURE_TOLERANCE
from driftguard.records.documents.retraining_run import Watch
from driftguard.records.positions import POSITIONS_SUMMED
from driftguard.store.tables import Draft, Incident, RetrainRun, Rollup, Stream

RECENT = timedelta(minutes=5)
EARLIER = timedelta(hours=2)
PRESENT = timedelta(days=1)
SHORTEST = timedelta(hours=1)  # of being known, before the traffic of the minutes since tells that of a day


@dataclass(frozen=True, slots=True)
class Speed:
    """Requests with a measured time per output token, and the sum of those times in seconds."""

    requests: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SegmentSpeed:
    """The last five minutes, and the two hours before them."""

    recent: Speed
    earlier: Speed


def speeds(session: Session, now: datetime, stream_ids: Sequence[int]) -> dict[int, dict[str, SegmentSpeed]]:
    """stream id -> segment -> speeds."""
    edge = now - RECENT
    count, seconds = Rollup.time_per_output_token_count, Rollup.time_per_output_token_sum
    recent, earlier = Rollup.minute >= edge, Rollup.minute < edge
    query = (
        select(
            Rollup.stream_id,
            Rollup.segment,
            func.coalesce(func.sum(count).filter(recent), 0),
            func.coalesce(func.sum(seconds).filter(recent), 0),
            func.coalesce(func.sum(count).filter(earlier), 0),
            func.coalesce(func.sum(seconds).filter(earlier), 0),
        )
        .where(_of(stream_ids), *_between(edge - EARLIER, now))
        .group_by(Rollup.stream_id, Rollup.segment)
    )
    found: dict[int, dict[str, SegmentSpeed]] = defaultdict(dict)
    for stream_id, segment, *sums in session.execute(query):
        now_count, now_seconds, then_count, then_seconds = sums
        found[stream_id][segment] = SegmentSpeed(
            Speed(int(now_count), float(now_seconds)), Speed(int(then_count), float(then_seconds))
        )
    return found


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of the last five minutes. `positions`: drafted and accepted at the first positions; empty: not told."""

    steps: int
    emitted: int
    positions: tuple[tuple[int, int], ...]


def lengths(session: Session, now: datetime, stream_ids: Sequence[int]) -> dict[int, Lengths]:
    """stream id -> how far its steps came, of those that had any."""
    places = range(1, POSITIONS_SUMMED + 1)
    drafted = [func.sum(Rollup.drafted_per_position[place]) for place in places]
    accepted = [func.sum(Rollup.accepted_per_position[place]) for place in places]
    query = (
        select(Rollup.stream_id, func.sum(Rollup.steps), func.sum(Rollup.emitted), *drafted, *accepted)
        .where(_of(stream_ids), *_between(now - RECENT, now))
        .group_by(Rollup.stream_id)
        .having(func.sum(Rollup.steps) > 0)
    )
    found = {}
    for stream_id, steps, emitted, *sums in session.execute(query):
        pairs = zip(sums[:POSITIONS_SUMMED], sums[POSITIONS_SUMMED:], strict=True)
        told = tuple((int(offered or 0), int(kept)) for offered, kept in pairs if kept is not None)
        found[stream_id] = Lengths(int(steps), int(emitted), told)
    return found


def requests_per_day(session: Session, now: datetime, stream_ids: Sequence[int]) -> dict[int, float]:
    """stream id -> its traffic over the last day, or since it was first seen if that is less than a day and
    more than an hour ago, or since its first record of the day where that was kept back until then; streams
    without any are left out."""
    begun = func.least(Stream.first_seen_at, func.min(Rollup.minute))
    since = func.greatest(begun, now - PRESENT)
    query = (
        select(Rollup.stream_id, func.sum(Rollup.records), since)
        .join(Stream, Stream.id == Rollup.stream_id)
        .where(_of(stream_ids), *_between(now - PRESENT, now))
        .where(Stream.first_seen_at <= now - SHORTEST)
        .group_by(Rollup.stream_id, Stream.first_seen_at)
    )
    return {
        stream_id: float(records) / ((now - start) / timedelta(days=1))
        for stream_id, records, start in session.execute(query)
    }


def _between(since: datetime, now: datetime) -> tuple[ColumnElement[bool], ...]:
    """Traffic from then on, without what a clock that was ahead has dated later than now."""
    return Rollup.minute >= since, Rollup.minute <= now + FUTURE_TOLERANCE, Rollup.kind != "probe"


def _of(stream_ids: Sequence[int]) -> ColumnElement[bool]:
    """One parameter, however many they are."""
    return Rollup.stream_id == any_(literal(stream_ids, ARRAY(BigInteger)))


def drafts_in_service(session: Session) -> dict[tuple[str, str], str]:
    """(server, target) -> version of the draft that was put into service there."""
    query = select(Draft.server, Draft.target, Draft.version).where(Draft.state == "in_service")
    return {(row.server, row.target): row.version for row in session.execute(query)}


def last_retrains(session: Session) -> dict[tuple[str, str], RetrainRun]:
    """(server, target) -> its newest retraining run. None are sorted for it."""
    newest = select(RetrainRun.server, RetrainRun.target, func.max(RetrainRun.started_at)).group_by(
        RetrainRun.server, RetrainRun.target
    )
    same = tuple_(RetrainRun.server, RetrainRun.target, RetrainRun.started_at)
    return {
        (run.server, run.target): run for run in session.scalars(select(RetrainRun).where(same.in_(newest)))
    }


class RunTotals(NamedTuple):
    """The retraining runs of a (server, target) with one trigger that are in one state."""

    server: str
    target: str
    trigger: str
    state: str
    runs: int
    last_at: datetime  # the newest end; where they are under way, the newest beginning


def run_totals(session: Session) -> list[RunTotals]:
    query = select(
        RetrainRun.server,
        RetrainRun.target,
        RetrainRun.trigger,
        RetrainRun.state,
        func.count(),
        func.max(func.coalesce(RetrainRun.ended_at, RetrainRun.started_at)),
    ).group_by(RetrainRun.server, RetrainRun.target, RetrainRun.trigger, RetrainRun.state)
    return [RunTotals(*row) for row in session.execute(query)]


def rejected_in_a_row(session: Session) -> dict[tuple[str, str], int]:
    """(server, target) -> candidates rejected since one was put into service; without those with none."""
    put = (
        select(RetrainRun.server, RetrainRun.target, func.max(RetrainRun.started_at).label("at"))
        .where(RetrainRun.state.in_(("watching", "promoted", "rolling_back", "rolled_back")))
        .group_by(RetrainRun.server, RetrainRun.target)
        .subquery()
    )
    query = (
        select(RetrainRun.server, RetrainRun.target, func.count())
        .outerjoin(put, (put.c.server == RetrainRun.server) & (put.c.target == RetrainRun.target))
        .where(RetrainRun.state == "rejected", put.c.at.is_(None) | (RetrainRun.started_at > put.c.at))
        .group_by(RetrainRun.server, RetrainRun.target)
    )
    return {(server, target): count for server, target, count in session.execute(query)}


def newest_resolved(session: Session, since: datetime) -> dict[tuple[str, str], Incident]:
    """(server, target) -> its incident that was resolved last, and after `since`."""
    query = (
        select(Stream.server, Stream.target, Incident)
        .ext(distinct_on(Stream.server, Stream.target))
        .join(Stream, Stream.id == Incident.stream_id)
        .where(Incident.state == "resolved", Incident.resolved_at > since)
        .order_by(Stream.server, Stream.target, Incident.resolved_at.desc())
    )
    return {(server, target): incident for server, target, incident in session.execute(query)}


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """A promoted draft that is being watched. `incident`: that it was trained for, if any."""

    watch: Watch
    promoted_at: datetime | None
    incident: Incident | None


def watched_runs(session: Session) -> dict[tuple[str, str, str], WatchedRun]:
    """(server, target, draft version) -> its watch."""
    same = (
        (Draft.server == RetrainRun.server)
        & (Draft.target == RetrainRun.target)
        & (Draft.version == RetrainRun.candidate_version)
    )
    query = (
        select(RetrainRun, Draft.promoted_at, Incident)
        .outerjoin(Draft, same)
        .outerjoin(Incident, Incident.id == RetrainRun.incident_id)
        .where(RetrainRun.state == "watching", RetrainRun.candidate_version.is_not(None))
    )
    found: dict[tuple[str, str, str], WatchedRun] = {}
    for run, promoted_at, incident in session.execute(query):
        if run.candidate_version and run.numbers is not None and run.numbers.watch is not None:
            found[run.server, run.target, run.candidate_version] = WatchedRun(
                run.numbers.watch, promoted_at, incident
            )
    return found


def unresolved_incidents(session: Session) -> dict[int, dict[str, Incident]]:
    """stream id -> direction -> incident."""
    found: dict[int, dict[str, Incident]] = defaultdict(dict)
    for incident in session.scalars(select(Incident).where(Incident.state != "resolved")):
        found[incident.stream_id][incident.direction] = incident
    return found
