"""Acceptance records: written in batches by binary COPY, read in the order of `seq`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from psycopg import Connection as PsycopgConnection
from sqlalchemy import select
from sqlalchemy.orm import Session

from driftguard.records import AcceptanceRecord, StreamKey
from driftguard.store.partitions import ensure_days, take_ingest_lock
from driftguard.store.record_sql import CREATE_STAGE, INSERT_FRESH, STAGE_COPY, STAGE_TYPES, TOUCH_STREAM
from driftguard.store.streams import StreamRegistry
from driftguard.store.tables import Record

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of one batch: accepted records are new, duplicates were stored before. `refused`: streams
    that would be too many, of whose records none is stored, and why."""

    accepted: int
    duplicates: int
    refused: Mapping[StreamKey, str] = field(default_factory=dict)

    def refusals(self, records: Sequence[AcceptanceRecord]) -> list[tuple[int, str]]:
        """Of records of this batch: (place in `records`, why) of those that are not stored."""
        if not self.refused:
            return []
        keys = (record.stream_key for record in records)
        return [(place, self.refused[key]) for place, key in enumerate(keys) if key in self.refused]


class StoredRecord(NamedTuple):
    """What the detector reads of one record."""

    seq: int
    stream_id: int
    segment: str
    session: str | None
    kind: str
    fidelity: str
    started_at: datetime
    ended_at: datetime
    steps: int
    drafted: int
    accepted: int
    emitted: int
    num_speculative_tokens: int | None
    acceptance_rule: str
    temperature: float | None
    output_tokens: int | None
    time_per_output_token_seconds: float | None
    first_drafted: int | None  # at the first position; None where the record does not tell
    first_accepted: int | None


def insert_batches(
    session: Session,
    batches: Sequence[Sequence[AcceptanceRecord]],
    registry: StreamRegistry,
    now: datetime,
) -> list[BatchResult]:
    """Stores the records that are new, updates their rollups and streams; one result per batch.

    A record_id is stored once: a second record with the same id that ended within a day of the first is a
    duplicate, whatever else it says. `seq` rises in commit order, and inside the transaction in the order
    given. `now` is when the records arrived. The caller checked clock and retention. Records of streams that
    would be too many are left out, and the result names those streams.
    """
    take_ingest_lock(session)
    refused = registry.register(session, (record for batch in batches for record in batch), now)
    kept = [_of_known_streams(batch, refused) for batch in batches]
    accepted = _store(session, kept, registry, now) if any(kept) else [0] * len(batches)
    return [
        BatchResult(new, len(known) - new, _among(refused, batch))
        for new, known, batch in zip(accepted, kept, batches, strict=True)
    ]


def _of_known_streams(
    batch: Sequence[AcceptanceRecord], refused: Mapping[StreamKey, str]
) -> Sequence[AcceptanceRecord]:
    return [record for record in batch if record.stream_key not in refused] if refused else batch


def _among(refused: Mapping[StreamKey, str], batch: Sequence[AcceptanceRecord]) -> Mapping[StreamKey, str]:
    return {key: refused[key] for record in batch if (key := record.stream_key) in refused} if refused else {}


def _store(
    session: Session, batches: Sequence[Sequence[AcceptanceRecord]], registry: StreamRegistry, now: datetime
) -> list[int]:
    """The number of new records of each batch."""
    records = [record for batch in batches for record in batch]
    days = {record.ended_at.astimezone(UTC).date() for record in records}
    ensure_days(session, days)
    driver = _driver(session)
    _copy_to_stage(driver, batches, registry)
    window = {"first": min(days) - _DAY, "end": max(days) + 2 * _DAY}
    accepted = [0] * len(batches)
    # Not prepared: a plan made for an empty staging table must not outlive it.
    stored = driver.execute(INSERT_FRESH, window, prepare=False).fetchall()
    touched = []
    for batch, stream_id, count, in_other, last_seen_at, traffic_ended_at in stored:
        accepted[batch] += count
        touched.append(
            {
                "stream_id": stream_id,
                "last_seen_at": last_seen_at,
                "in_other": in_other,
                "traffic_arrived_at": None if traffic_ended_at is None else now,
                "traffic_ended_at": traffic_ended_at,
            }
        )
    driver.cursor().executemany(TOUCH_STREAM, touched)
    return accepted


def _copy_to_stage(
    driver: PsycopgConnection[Any], batches: Sequence[Sequence[AcceptanceRecord]], registry: StreamRegistry
) -> None:
    driver.execute(CREATE_STAGE)
    streams = registry.streams
    with driver.cursor() as cursor, cursor.copy(STAGE_COPY) as copy:
        copy.set_types(STAGE_TYPES)
        ordinal = 0
        for number, batch in enumerate(batches):
            for r in batch:
                stream = streams[r.stream_key]
                segment = stream.place(r.segment)
                copy.write_row(
                    (
                        number, ordinal, segment != r.segment, r.record_id, r.ended_at, stream.id, r.kind,
                        r.started_at, segment, r.session, r.steps, r.drafted, r.accepted, r.emitted,
                        r.drafted_per_position, r.accepted_per_position, r.num_speculative_tokens,
                        r.acceptance_rule, r.temperature, r.prompt_tokens, r.output_tokens,
                        r.time_to_first_token_seconds, r.time_per_output_token_seconds, r.concurrency,
                        r.fidelity,
                    )
                )  # fmt: skip
                ordinal += 1


_STORED = (
    *(getattr(Record, name) for name in StoredRecord._fields[:-2]),
    Record.drafted_per_position[1],  # SQL counts from 1
    Record.accepted_per_position[1],
)


def read_after(session: Session, seq: int, *, limit: int) -> list[StoredRecord]:
    """The next records after `seq`, in order; fewer than `limit` means that there are no more yet."""
    rows = session.execute(select(*_STORED).where(Record.seq > seq).order_by(Record.seq).limit(limit))
    return [StoredRecord(*row) for row in rows]


def read_of_stream(
    session: Session, stream_id: int, *, after: int, up_to: int, limit: int
) -> list[StoredRecord]:
    """Those of one stream with after < seq <= up_to, in order."""
    own = select(*_STORED).where(Record.stream_id == stream_id, Record.seq > after, Record.seq <= up_to)
    return [StoredRecord(*row) for row in session.execute(own.order_by(Record.seq).limit(limit))]


def _driver(session: Session) -> PsycopgConnection[Any]:
    connection = session.connection().connection.driver_connection
    assert isinstance(connection, PsycopgConnection)  # noqa: S101 (Database opens nothing else)
    return connection
