"""What an examination reads: the records on both sides of a change and how fast they were, canary probes,
captured token ids. What speculation costs a stream without an incident is read in the same way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final, cast
from uuid import UUID

from sqlalchemy import Row, func, or_, select, text
from sqlalchemy.orm import Session

from driftguard.adapters.kinds import ADAPTERS
from driftguard.cost import TimedRequest
from driftguard.diagnosis import Captured, EngineChange, Observed, ProbeResult
from driftguard.records.documents.serving_scores import MissingScores, ServingScores
from driftguard.records.positions import first_position
from driftguard.records.probe_session import PREFIX, parse
from driftguard.store.by_arrival import NEWEST_FIRST, OF_STREAM, newest_first, of_stream, oldest_first
from driftguard.store.tables import (
    ABOVE_EVERY_SEQ,
    Draft,
    Record,
    Rollup,
    ServerVersion,
    ServingScoresRow,
    Stream,
)

RECORDS: Final = 2_000  # on each side of the change point, of all segments: their shares must be right
LOOK_BACK: Final = timedelta(days=7)
PROBE_LOOK_BACK: Final = timedelta(days=30)
PROBES: Final = 1_000  # newest on each side
CAPTURES: Final = 150  # newest of each changed segment, on each side
OTHER_CAPTURES: Final = 50  # of every other segment, before the change: what the queries may look like now
OTHER_SEGMENTS: Final = 16
PROMPT_TOKENS: Final = 2_048  # the end of a prompt
OUTPUT_TOKENS: Final = 512  # the beginning of an answer
WITHOUT: Final = 1_000  # newest requests without speculation
WITHOUT_LOOK_BACK: Final = timedelta(days=1)  # seconds per step are compared, so from the same hours
_VERSION_BEFORE: Final = timedelta(hours=1)
_VERSION_NOTICED: Final = timedelta(minutes=10)
_ROUNDED: Final = timedelta(milliseconds=1)  # as a detector keeps times
_AHEAD: Final = timedelta(hours=1)  # records arrive a little out of order


@dataclass(frozen=True, slots=True)
class Moment:
    """The change: `seq` of its first record and its time; `newest` is the seq up to which to look."""

    seq: int
    at: datetime
    newest: int


# The server's start before a record, as its metrics told it; null where they were never scraped.
_TIMES = """
           extract(epoch FROM ended_at)::float8 AS ended, extract(epoch FROM (
               SELECT max(started_at) FROM server_starts
               WHERE server = (SELECT server FROM streams WHERE id = :stream_id) AND started_at <= ended_at
           ))::float8 AS server_started_at
"""
_RECORDS = text(
    f"""
    SELECT segment, drafted, accepted, num_speculative_tokens, acceptance_rule, verification,
           temperature, concurrency, waiting_requests, kind, steps, drafted_per_position[1] AS first_drafted,
           accepted_per_position[1] AS first_accepted, prompt_tokens, cached_tokens, output_tokens,
           time_per_output_token_seconds, session, {_TIMES}
    FROM records
    WHERE {OF_STREAM} AND kind <> 'probe' AND seq >= :first AND seq < :end
      AND ended_at >= :since AND ended_at <= :until
    ORDER BY {NEWEST_FIRST} LIMIT :limit
    """  # noqa: S608 (constants only)
)


def records_around(
    session: Session, stream_id: int, moment: Moment
) -> tuple[tuple[Observed, ...], tuple[Observed, ...]]:
    """The newest before the change and the newest since, up to the record that raised the alarm."""
    return (
        records_between(session, stream_id, 0, moment.seq, moment.at),
        records_between(session, stream_id, moment.seq, moment.newest + 1, moment.at),
    )


def records_between(
    session: Session, stream_id: int, first: int, end: int, at: datetime
) -> tuple[Observed, ...]:
    """The newest of the seqs `first` to `end` - 1 that ended within a week of `at`."""
    rows = session.execute(
        _RECORDS,
        {
            "stream_id": stream_id,
            "first": first,
            "end": end,
            "since": at - LOOK_BACK,
            "until": at + LOOK_BACK,
            "limit": RECORDS,
        },
    )
    return tuple(_observed(row) for row in rows)


def _observed(row: Any) -> Observed:
    told = row.first_accepted is not None
    judged = first_position(row.kind, row.num_speculative_tokens, row.first_drafted, row.first_accepted)
    first_drafted = row.steps if row.first_drafted is None else row.first_drafted
    return Observed(
        segment=row.segment,
        steps=row.steps,
        drafted=row.drafted,
        accepted=row.accepted,
        num_speculative_tokens=row.num_speculative_tokens,
        acceptance_rule=row.acceptance_rule,
        verification=row.verification,
        temperature=row.temperature,
        concurrency=row.concurrency,
        waiting_requests=row.waiting_requests,
        first_drafted=first_drafted if told else None,
        first_accepted=row.first_accepted,
        by_first=judged is not None,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        output_tokens=row.output_tokens,
        time_per_output_token_seconds=row.time_per_output_token_seconds,
        session=row.session,
        ended_at=row.ended,
        server_started_at=row.server_started_at,
    )


def is_before_kept(session: Session, stream_id: int, moment: Moment) -> bool:
    """Whether a record from before the change, of those that `records_between` finds, is still kept."""
    query = select(Record.seq).where(
        of_stream(stream_id),
        Record.kind != "probe",
        Record.seq < moment.seq,
        Record.ended_at.between(moment.at - LOOK_BACK, moment.at + LOOK_BACK),
    )
    return session.scalar(query.order_by(*newest_first).limit(1)) is not None


BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class FirstRecord:
    """Where a stream began."""

    seq: int
    at: datetime


def first_record(session: Session, stream_id: int, since: datetime = BEGINNING) -> FirstRecord | None:
    """Of the traffic that is kept, from then on."""
    query = select(Record.seq, Record.ended_at).where(
        Record.stream_id == stream_id, Record.kind != "probe", Record.ended_at >= since
    )
    found = session.execute(query.order_by(Record.ended_at, Record.seq).limit(1)).one_or_none()
    return FirstRecord(*found) if found else None


def record_at(session: Session, stream_id: int, at: datetime, until: int) -> FirstRecord | None:
    """The newest record of the traffic, up to the seq `until`, that ended at this time of the server's clock,
    which may have come twice; None where it is not kept any more."""
    query = select(Record.seq, Record.ended_at).where(
        Record.stream_id == stream_id,
        Record.kind != "probe",
        Record.ended_at.between(at - _ROUNDED, at + _ROUNDED),
        Record.seq <= until,
    )
    found = session.execute(query.order_by(Record.seq.desc()).limit(1)).one_or_none()
    return FirstRecord(*found) if found else None


def usual_k(
    session: Session, stream_id: int, since: datetime, segments: Collection[str] | None = None
) -> float | None:
    """Drafted tokens per step since that minute, of these segments or of all, from the rollups: the records
    may be millions. None where nothing was drafted."""
    sums = select(func.sum(Rollup.drafted), func.sum(Rollup.steps)).where(
        Rollup.stream_id == stream_id,
        Rollup.kind != "probe",
        Rollup.minute >= since.replace(second=0, microsecond=0),
    )
    if segments is not None:
        sums = sums.where(Rollup.segment.in_(segments))
    drafted, steps = session.execute(sums).one()
    return float(drafted / steps) if drafted and steps else None


def heard_since(session: Session, stream_id: int, begun: FirstRecord) -> datetime | None:
    """When the newest of the traffic ended that both arrived and ended after this record of another stream;
    None where none did."""
    query = select(Record.ended_at).where(
        Record.stream_id == stream_id,
        Record.kind != "probe",
        Record.ended_at > begun.at,
        Record.seq > begun.seq,
    )
    return session.scalar(query.order_by(Record.ended_at.desc()).limit(1))


def streams_before(session: Session, stream: Stream, since: datetime) -> list[Stream]:
    """Those whose place this stream may have taken, the likeliest first: of the same server, draft and method
    with another target; then of the same server, target and method with another draft version, heard since
    then, unless DriftGuard trained or promoted this one (`retraining.promotion.watch` compares those)."""
    newest = (Stream.last_seen_at.desc(), Stream.id.desc())
    earlier = select(Stream).where(
        Stream.server == stream.server,
        Stream.method == stream.method,
        Stream.first_seen_at < stream.first_seen_at,
    )
    of_target = earlier.where(Stream.draft_version == stream.draft_version, Stream.target != stream.target)
    found = list(session.scalars(of_target.order_by(*newest)))
    known = select(Draft.id).where(
        Draft.server == stream.server,
        Draft.target == stream.target,
        Draft.version == stream.draft_version,
        or_(Draft.retrain_run_id.is_not(None), Draft.promoted_at.is_not(None)),
    )
    if session.scalar(known) is not None:
        return found
    of_draft = earlier.where(
        Stream.target == stream.target,
        Stream.draft_version != stream.draft_version,
        Stream.last_seen_at >= since,
    )
    return [*found, *session.scalars(of_draft.order_by(*newest))]


_PROBES = text(
    f"""
    SELECT session, drafted, accepted, steps, drafted_per_position[1] AS first_drafted,
           accepted_per_position[1] AS first_accepted, prompt_tokens, cached_tokens, {_TIMES}
    FROM records
    WHERE stream_id = :stream_id AND kind = 'probe' AND starts_with(session, :prefix)
      AND ended_at >= :since AND ended_at < :until AND seq >= :first AND seq < :end
    ORDER BY ended_at DESC, seq DESC LIMIT :limit
    """  # noqa: S608 (constants only)
)


def probes_around(
    session: Session, stream_id: int, moment: Moment, changed_from: datetime
) -> tuple[tuple[ProbeResult, ...], tuple[ProbeResult, ...]]:
    """Replays before the change can have begun, `changed_from`, and since it: by their times and by their
    order of arrival, because the change has a time of the server's clock and a probe of the sidecar's."""
    earlier = {"since": changed_from - PROBE_LOOK_BACK, "until": changed_from, "first": 0, "end": moment.seq}
    later = {
        "since": moment.at,
        "until": moment.at + LOOK_BACK,
        "first": moment.seq,
        "end": ABOVE_EVERY_SEQ,
    }
    return _probes(session, stream_id, earlier), _probes(session, stream_id, later)


def _probes(session: Session, stream_id: int, span: Mapping[str, Any]) -> tuple[ProbeResult, ...]:
    values = {**span, "stream_id": stream_id, "prefix": PREFIX, "limit": PROBES}
    found = []
    for row in session.execute(_PROBES, values):
        asked = parse(row.session)
        told = row.first_accepted is not None
        first_drafted = row.steps if row.first_drafted is None else row.first_drafted
        found.append(
            ProbeResult(
                prompt=asked.prompt,
                answer=asked.answer,
                is_warm=asked.is_warm,
                drafted=row.drafted,
                accepted=row.accepted,
                first_drafted=first_drafted if told else None,
                first_accepted=row.first_accepted,
                prompt_tokens=row.prompt_tokens,
                cached_tokens=row.cached_tokens,
                ended_at=row.ended,
                server_started_at=row.server_started_at,
            )
        )
    return tuple(reversed(found))


_CAPTURES = text(
    """
    SELECT newest.record_id, newest.segment, r.session, r.drafted, r.accepted,
           prompt_token_ids[greatest(1, cardinality(prompt_token_ids) - :prompt_tokens + 1):] AS prompt,
           output_token_ids[1:CASE WHEN newest.segment = ANY(:changed) THEN :output_tokens ELSE 0 END]
             AS output
    FROM (
        SELECT *, row_number() OVER (PARTITION BY segment ORDER BY captured_at DESC, id DESC) AS age
        FROM captures
        WHERE server = :server AND target = :target AND segment = ANY(:segments)
          AND captured_at >= :since AND captured_at < :until
    ) AS newest
    LEFT JOIN LATERAL (
        SELECT session, drafted, accepted FROM records
        WHERE records.record_id = newest.record_id
          AND ended_at >= newest.captured_at - interval '1 hour'
          AND ended_at <= newest.captured_at + interval '1 hour'
        LIMIT 1
    ) AS r ON newest.segment = ANY(:changed)
    WHERE age <= CASE WHEN newest.segment = ANY(:changed) THEN CAST(:limit AS int) ELSE :other_limit END
    ORDER BY captured_at, id
    """
)
_CAPTURED_SEGMENTS = text(
    """
    SELECT segment FROM captures
    WHERE server = :server AND target = :target AND captured_at >= :since AND captured_at < :until
      AND segment <> ALL(:changed)
    GROUP BY segment ORDER BY count(*) DESC, segment LIMIT :limit
    """
)


def captures_around(
    session: Session, stream: Stream, changed: Sequence[str], at: datetime
) -> tuple[tuple[Captured, ...], tuple[Captured, ...]]:
    """Of the changed segments on both sides; before the change also of others, to compare with."""
    span = {"server": stream.server, "target": stream.target, "since": at - LOOK_BACK, "until": at}
    others = session.scalars(
        _CAPTURED_SEGMENTS, {**span, "changed": list(changed), "limit": OTHER_SEGMENTS}
    ).all()
    later = {**span, "since": at, "until": at + LOOK_BACK}
    return (
        _captures(session, span, changed, [*changed, *others]),
        _captures(session, later, changed, list(changed)),
    )


def _captures(
    session: Session, span: dict[str, Any], changed: Sequence[str], segments: list[str]
) -> tuple[Captured, ...]:
    values = {
        **span,
        "changed": list(changed),
        "segments": segments,
        "limit": CAPTURES,
        "other_limit": OTHER_CAPTURES,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    return tuple(map(captured_of, session.execute(_CAPTURES, values)))


def captured_of(row: Row[Any]) -> Captured:
    """Of a row with the columns of its name, and those of its record or null."""
    return Captured(
        record_id=str(row.record_id),
        segment=row.segment,
        prompt=tuple(row.prompt),
        output=tuple(row.output),
        session=row.session,
        drafted=row.drafted,
        accepted=row.accepted,
    )


_SEEN = text(
    """
    SELECT (SELECT count(*) FROM records
            WHERE stream_id = :stream_id AND kind = 'probe' AND starts_with(session, :prefix)
              AND ended_at >= :at AND ended_at < :until AND seq >= :seq) AS probes,
           (SELECT count(*) FROM (
                SELECT 1 FROM captures
                WHERE server = :server AND target = :target AND segment = ANY(:changed)
                  AND captured_at >= :at AND captured_at < :until LIMIT :limit) AS captured) AS captures,
           coalesce((SELECT captures - CAST(state = 'scoring' AS int) FROM serving_scores
                     WHERE incident_id = :incident_id), 0) AS scores
    """
)


def seen_since(
    session: Session,
    stream: Stream,
    incident_id: UUID,
    changed: Collection[str],
    moment: Moment,
    limit: int,
) -> tuple[int, int, int]:
    """(probe records, captured requests of the changed segments, counted up to `limit`) since the change, as
    `probes_around` and `captures_around` find them, and the step of captured requests at which these were
    scored."""
    row = session.execute(
        _SEEN,
        {
            "stream_id": stream.id,
            "incident_id": incident_id,
            "prefix": PREFIX,
            "server": stream.server,
            "target": stream.target,
            "changed": list(changed),
            "at": moment.at,
            "until": moment.at + LOOK_BACK,
            "seq": moment.seq,
            "limit": limit,
        },
    ).one()
    return row.probes, row.captures, row.scores


def scores_of(session: Session, incident_id: UUID) -> tuple[ServingScores | None, MissingScores | None]:
    """The newest scores of captured requests, and why the newest attempt made none."""
    row = session.get(ServingScoresRow, incident_id)
    return (row.scores, cast("MissingScores | None", row.missing)) if row is not None else (None, None)


def engine_change(session: Session, stream: Stream, moment: Moment, since: datetime) -> EngineChange | None:
    """The last that was noticed between an hour before `since`, from when on the change of acceptance may
    have begun, and shortly after it: a version is asked for every few minutes. The change has a time of the
    server's clock and a version one of the sidecar's: so it is noticed between the records of the stream
    that arrived before and after it."""
    query = select(ServerVersion).where(ServerVersion.server == stream.server)
    rows = session.scalars(query.order_by(ServerVersion.noticed_at.desc())).all()
    for now, before in pairwise(rows):
        noticed_at = _by_its_clock(session, stream.id, now)
        if noticed_at <= moment.at + _VERSION_NOTICED:
            if noticed_at < since - _VERSION_BEFORE:
                return None
            seconds = (moment.at - noticed_at).total_seconds()
            return EngineChange(_engine(before), _engine(now), now.noticed_at, seconds)
    return None


def _by_its_clock(session: Session, stream_id: int, version: ServerVersion) -> datetime:
    """When a version was noticed, by the clock of the server whose stream this is."""
    if version.noticed_seq is None:  # noticed by an older version of DriftGuard
        return version.noticed_at
    query = select(Record.ended_at).where(of_stream(stream_id), Record.kind != "probe").limit(1)
    earlier = query.where(Record.seq <= version.noticed_seq).order_by(*newest_first)
    later = query.where(Record.seq > version.noticed_seq).order_by(*oldest_first)
    at = max(session.scalar(earlier) or version.noticed_at, version.noticed_at)
    return min(session.scalar(later) or at, at)


def _engine(of: ServerVersion) -> str:
    adapter = next((adapter for kind, adapter in ADAPTERS.items() if kind == of.kind), None)
    return f"{adapter.name if adapter else of.kind} {of.version}"


def ended_at(session: Session, stream_id: int, seqs: Collection[int]) -> dict[int, datetime]:
    """When these records of a stream ended; those past their retention are missing."""
    query = select(Record.seq, Record.ended_at).where(Record.stream_id == stream_id, Record.seq.in_(seqs))
    return {row.seq: row.ended_at for row in session.execute(query)}


_TIMED = text(
    """
    SELECT extract(epoch FROM r.ended_at)::float8 AS ended_at, r.segment, r.num_speculative_tokens,
           r.concurrency, r.steps, r.drafted, r.accepted, r.emitted, r.accepted_per_position,
           r.output_tokens, r.time_per_output_token_seconds, r.kind,
           r.drafted_per_position[1] AS first_drafted, r.accepted_per_position[1] AS first_accepted
    FROM records r
    WHERE r.stream_id = :stream_id AND r.kind <> 'probe' AND r.seq >= :first AND r.seq < :end
      AND r.ended_at >= :since AND r.ended_at <= :until
    ORDER BY r.ended_at DESC, r.seq DESC LIMIT :limit
    """
)


def timed_between(
    session: Session, stream_id: int, first: int, end: int, newest_ended_at: datetime
) -> list[TimedRequest]:
    """The newest of a stream's seqs `first` to `end` - 1, up to a week older than `newest_ended_at`."""
    values = {"stream_id": stream_id, "first": first, "end": end, "limit": RECORDS}
    return _timed_requests(session, values, newest_ended_at, LOOK_BACK)


def without_speculation(
    session: Session, stream: Stream, end: int, newest_ended_at: datetime
) -> list[TimedRequest]:
    """The newest requests of the same server and target that had no draft, up to a day older."""
    same = (Stream.server == stream.server, Stream.target == stream.target, Stream.method == "none")
    found = []
    for stream_id in session.scalars(select(Stream.id).where(*same)).all():
        values = {"stream_id": stream_id, "first": 0, "end": end, "limit": WITHOUT}
        found += _timed_requests(session, values, newest_ended_at, WITHOUT_LOOK_BACK)
    return sorted(found, key=lambda item: item.ended_at, reverse=True)[:WITHOUT]


def _timed_requests(
    session: Session, values: Mapping[str, Any], newest: datetime, look_back: timedelta
) -> list[TimedRequest]:
    span = {"since": newest - look_back, "until": newest + _AHEAD}
    return [timed(*row) for row in session.execute(_TIMED, {**values, **span})]


def timed(*row: Any) -> TimedRequest:
    """A request from the columns of `_TIMED`, in their order."""
    *told, kind, first_drafted, first_accepted = row
    found = TimedRequest(*told)
    first = first_position(kind, found.num_speculative_tokens, first_drafted, first_accepted)
    return found._replace(by_first=first is not None)
