"""The statements of the ingest: staging table, COPY, and the one statement that stores what is new."""

from __future__ import annotations

from driftguard.store.tables import ACCEPTANCE_BUCKETS

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
    "temperature": "float8",
    "prompt_tokens": "int8",
    "output_tokens": "int8",
    "time_to_first_token_seconds": "float8",
    "time_per_output_token_seconds": "float8",
    "concurrency": "int8",
    "fidelity": "text",
}
_RECORD_COLUMNS = ", ".join(list(_STAGE)[3:])
_BUCKETS = ", ".join(f"count(*) FILTER (WHERE bucket = {number})" for number in range(ACCEPTANCE_BUCKETS))
_SUMS = ("records", "steps", "drafted", "accepted", "emitted", "output_tokens")
_TIMES = tuple(
    f"{name}_{part}" for name in ("time_per_output_token", "time_to_first_token") for part in ("sum", "count")
)
_ADDED = ", ".join(f"{name} = r.{name} + excluded.{name}" for name in _SUMS + _TIMES)


def _added_to(table: str, unit: str) -> str:
    """The INSERT that adds `fresh` to one tier of the rollups."""
    return f"""
  INSERT INTO {table} AS r (minute, stream_id, segment, kind, {", ".join(_SUMS)}, acceptance_buckets,
    {", ".join(_TIMES)})
  SELECT date_trunc('{unit}', ended_at, 'UTC'), stream_id, segment, kind,
    count(*), sum(steps), sum(drafted), sum(accepted), sum(emitted), coalesce(sum(output_tokens), 0),
    ARRAY[{_BUCKETS}],
    coalesce(sum(time_per_output_token_seconds), 0), count(time_per_output_token_seconds),
    coalesce(sum(time_to_first_token_seconds), 0), count(time_to_first_token_seconds)
  FROM fresh GROUP BY 1, 2, 3, 4
  ON CONFLICT (minute, stream_id, segment, kind) DO UPDATE SET {_ADDED}, acceptance_buckets =
    (SELECT array_agg(a + b ORDER BY place)
     FROM unnest(r.acceptance_buckets, excluded.acceptance_buckets) WITH ORDINALITY AS both_(a, b, place))
"""  # noqa: S608 (constants only)


STAGE_TYPES = list(_STAGE.values())

CREATE_STAGE = (
    f"CREATE TEMP TABLE IF NOT EXISTS record_stage ({', '.join(f'{n} {t}' for n, t in _STAGE.items())}) "
    "ON COMMIT DELETE ROWS"
)

STAGE_COPY = f"COPY record_stage ({', '.join(_STAGE)}) FROM STDIN (FORMAT BINARY)"

# The ingest lock makes `fresh` exact: nobody else inserts between this look and the commit. The window of
# days keeps the look to the partitions in question. seq is drawn after the sort, so in the order of arrival.
INSERT_FRESH = f"""
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
), per_minute AS ({_added_to("rollups_1m", "minute")}
), per_hour AS ({_added_to("rollups_1h", "hour")}
), per_day AS ({_added_to("rollups_1d", "day")}
)
SELECT batch, stream_id, count(*), count(*) FILTER (WHERE in_other), max(ended_at),
  max(ended_at) FILTER (WHERE kind <> 'probe')
FROM fresh GROUP BY batch, stream_id
"""  # noqa: S608 (constants only)

# greatest() passes over nulls: a batch of canary probes alone brings no traffic.
TOUCH_STREAM = """
UPDATE streams SET
    last_seen_at = greatest(last_seen_at, %(last_seen_at)s),
    records_in_other = records_in_other + %(in_other)s,
    traffic_arrived_at = greatest(traffic_arrived_at, %(traffic_arrived_at)s),
    traffic_ended_at = greatest(traffic_ended_at, %(traffic_ended_at)s)
WHERE id = %(stream_id)s
"""
