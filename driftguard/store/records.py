"""Acceptance records, written in batches by binary COPY. driftguard.store.folding reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from psycopg import Connection as PsycopgConnection
from sqlalchemy.orm import Session

from driftguard.records import AcceptanceRecord, StreamKey
from driftguard.records.positions import POSITIONS_SUMMED
from driftguard.store.partitions import ensure_days, take_ingest_lock
from driftguard.store.rollup_tiers import DRAFTED_THERE
from driftguard.store.streams import StreamRegistry
from driftguard.store.tables import ACCEPTANCE_BUCKETS

_DAY = timedelta(days=1)

# `batch` and `ordinal` say which line of which batch a row is; the columns after them are those of `records`.
_STAGE = {
    "batch": "int4",
    "ordinal": "int4",
    "in_other": "bool",
    "record_id": "uuid",
    "ended_at": "timestamptz",
    "stream_id": "int8",
    "kind": "text",
    "started_at": "timestamptz",
    "segment": "text",
    "session": "text",
    "steps": "int8",
    "drafted": "int8",
    "accepted": "int8",
    "emitted": "int8",
    "drafted_per_position": "int8[]",
    "accepted_per_position": "int8[]",
    "num_speculative_tokens": "int4",
    "acceptance_rule": "text",
    "verification": "text",
    "temperature": "float8",
    "prompt_tokens": "int8",
    "cached_tokens": "int8",
    "output_tokens": "int8",
    "time_to_first_token_seconds": "float8",
    "time_per_output_token_seconds": "float8",
    "concurrency": "int8",
    "waiting_requests": "int8",
    "started_requests": "int8",
    "fidelity": "text",
}
_RECORD_COLUMNS = ", ".join(list(_STAGE)[3:])
_BUCKETS = ", ".join(f"count(*) FILTER (WHERE bucket = {number})" for number in range(ACCEPTANCE_BUCKETS))
_SUMS = ("records", "steps", "drafted", "accepted", "emitted", "output_tokens")
_TIMES = tuple(
    f"{name}_{part}" for name in ("time_per_output_token", "time_to_first_token") for part in ("sum", "count")
)
_SUMMED_TIMES = tuple(
    f"coalesce({part}({name}_seconds), 0) AS {name}_{part}"
    for name in ("time_per_output_token", "time_to_first_token")
    for part in ("sum", "count")
)
_ADDED = ", ".join(f"{name} = r.{name} + excluded.{name}" for name in _SUMS + _TIMES)
_BY_POSITION = ("drafted_per_position", "accepted_per_position")
_PLACES = range(1, POSITIONS_SUMMED + 1)
_PER_POSITION = tuple(
    f"(ARRAY[{', '.join(f'sum({there.format(place)})' for place in _PLACES)}]::bigint[])"
    f"[1:max(cardinality(accepted_per_position))] AS {name}"
    for name, there in zip(_BY_POSITION, (DRAFTED_THERE, "accepted_per_position[{0}]"), strict=True)
)


def _summed(name: str, most: int) -> str:
    """Of arrays that may differ in length, or be null: their sums place by place."""
    places = ", ".join(f"sum({name}[{place}])" for place in range(1, most + 1))
    return f"(ARRAY[{places}]::bigint[])[1:max(cardinality({name}))]"


def _both(name: str) -> str:
    """The same for what a rollup has and what is added; null where both are."""
    return f"""{name} =
    (SELECT array_agg(coalesce(a, 0) + coalesce(b, 0) ORDER BY place)
     FROM unnest(r.{name}, excluded.{name}) WITH ORDINALITY AS both_(a, b, place))"""  # noqa: S608 (constants only)


def _added_to(table: str, unit: str) -> str:
    """The INSERT that adds the minutes of `fresh` to one tier of the rollups."""
    return f"""
  INSERT INTO {table} AS r (minute, stream_id, segment, kind, {", ".join(_SUMS + _TIMES)}, acceptance_buckets,
    {", ".join(_BY_POSITION)})
  SELECT date_trunc('{unit}', minute, 'UTC'), stream_id, segment, kind,
    {", ".join(f"sum({name})" for name in _SUMS + _TIMES)},
    {_summed("acceptance_buckets", ACCEPTANCE_BUCKETS)},
    {", ".join(_summed(name, POSITIONS_SUMMED) for name in _BY_POSITION)}
  FROM minutes GROUP BY 1, 2, 3, 4
  ON CONFLICT (minute, stream_id, segment, kind) DO UPDATE SET {_ADDED},
    {", ".join(_both(name) for name in ("acceptance_buckets", *_BY_POSITION))}
"""  # noqa: S608 (constants only)


_STAGE_TYPES = list(_STAGE.values())

_CREATE_STAGE = (
    f"CREATE TEMP TABLE IF NOT EXISTS record_stage ({', '.join(f'{n} {t}' for n, t in _STAGE.items())}) "
    "ON COMMIT DELETE ROWS"
)

_STAGE_COPY = f"COPY record_stage ({', '.join(_STAGE)}) FROM STDIN (FORMAT BINARY)"

# The ingest lock makes `fresh` exact: nobody else inserts between this look and the commit. The window of
# days keeps the look to the partitions in question. seq is drawn after the sort, so in the order of arrival.
# The streams are updated in the order of their ids, as by the fold: else each could wait for the other.
_INSERT_FRESH = f"""
WITH staged AS (
  DELETE FROM record_stage RETURNING *
), fresh AS MATERIALIZED (
  SELECT DISTINCT ON (record_id) *,
    CASE WHEN drafted > 0 THEN least(accepted * {ACCEPTANCE_BUCKETS} / drafted, {ACCEPTANCE_BUCKETS - 1}) END
      AS bucket
  FROM staged s
  WHERE NOT EXISTS (
    SELECT FROM records r
    WHERE r.record_id = s.record_id AND r.ended_at >= %(first)s AND r.ended_at < %(end)s)
  ORDER BY record_id, ordinal
), stored AS (
  INSERT INTO records (seq, {_RECORD_COLUMNS})
  SELECT nextval('records_seq'), {_RECORD_COLUMNS} FROM (SELECT * FROM fresh ORDER BY ordinal) arrived
), minutes AS MATERIALIZED (
  SELECT date_trunc('minute', ended_at, 'UTC') AS minute, stream_id, segment, kind,
    count(*) AS records, {", ".join(f"coalesce(sum({name}), 0) AS {name}" for name in _SUMS[1:])},
    ARRAY[{_BUCKETS}] AS acceptance_buckets,
    {", ".join(_PER_POSITION)},
    {", ".join(_SUMMED_TIMES)}
  FROM fresh GROUP BY 1, 2, 3, 4
), per_minute AS ({_added_to("rollups_1m", "minute")}
), per_hour AS ({_added_to("rollups_1h", "hour")}
), per_day AS ({_added_to("rollups_1d", "day")}
)
SELECT batch, stream_id, count(*), count(*) FILTER (WHERE in_other), max(ended_at),
  max(ended_at) FILTER (WHERE kind <> 'probe')
FROM fresh GROUP BY batch, stream_id ORDER BY stream_id
"""  # noqa: S608 (constants only)

# greatest() passes over nulls: a batch of canary probes alone brings no traffic.
_TOUCH_STREAM = """
UPDATE streams SET
    last_seen_at = greatest(last_seen_at, %(last_seen_at)s),
    records_in_other = records_in_other + %(in_other)s,
    traffic_arrived_at = greatest(traffic_arrived_at, %(traffic_arrived_at)s),
    traffic_ended_at = greatest(traffic_ended_at, %(traffic_ended_at)s)
WHERE id = %(stream_id)s
"""


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
    would be too many are left out, and the result names those streams. After a failure the caller lets the
    registry forget.
    """
    registry.begin(take_ingest_lock(session, registry.transaction))
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
    stored = driver.execute(_INSERT_FRESH, window, prepare=False).fetchall()
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
    driver.cursor().executemany(_TOUCH_STREAM, touched)
    return accepted


def _copy_to_stage(
    driver: PsycopgConnection[Any], batches: Sequence[Sequence[AcceptanceRecord]], registry: StreamRegistry
) -> None:
    driver.execute(_CREATE_STAGE)
    streams = registry.streams
    with driver.cursor() as cursor, cursor.copy(_STAGE_COPY) as copy:
        copy.set_types(_STAGE_TYPES)
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
                        r.acceptance_rule, r.verification, r.temperature, r.prompt_tokens, r.cached_tokens,
                        r.output_tokens, r.time_to_first_token_seconds, r.time_per_output_token_seconds,
                        r.concurrency, r.waiting_requests, r.started_requests, r.fidelity,
                    )
                )  # fmt: skip
                ordinal += 1


def _driver(session: Session) -> PsycopgConnection[Any]:
    connection = session.connection().connection.driver_connection
    assert isinstance(connection, PsycopgConnection)  # noqa: S101 (Database opens nothing else)
    return connection
