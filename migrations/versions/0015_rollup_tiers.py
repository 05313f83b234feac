"""rollups in daily partitions, with hourly and daily tiers; captures by their age

Revision: 0015

The existing table of minutes becomes one partition, `rollups_1m_until_YYYYMMDD`, without being copied. It is
dropped as a whole when all of it is past retention. It is read once, to sum its hours and days.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_BUCKETS = ", ".join(f"sum(acceptance_buckets[{place}])::bigint" for place in range(1, 21))
_SUMS = (
    "records",
    "steps",
    "drafted",
    "accepted",
    "emitted",
    "output_tokens",
    "time_per_output_token_sum",
    "time_per_output_token_count",
    "time_to_first_token_sum",
    "time_to_first_token_count",
)


def upgrade() -> None:
    op.create_index("ix_captures_captured_at", "captures", ["captured_at"])
    for old, new in (("rollups_1m_pkey", "old_pkey"), ("ix_rollups_traffic", "old_traffic")):
        op.execute(f"ALTER INDEX {old} RENAME TO rollups_1m_{new}")
    op.rename_table("rollups_1m", "rollups_1m_old")
    _create("rollups_1m", "ix_rollups_traffic")
    _create("rollups_1h", "ix_rollups_1h_traffic")
    _create("rollups_1d", "ix_rollups_1d_traffic")
    first, last = op.get_bind().execute(sa.text("SELECT min(minute), max(minute) FROM rollups_1m_old")).one()
    if first is None:
        op.drop_table("rollups_1m_old")
        return
    for start, end in _months(_day(first), _day(last)):
        _partition("rollups_1h", f"{start:%Y%m}", start, end)
    for year in range(_day(first).year, _day(last).year + 1):
        _partition("rollups_1d", f"{year:04}", date(year, 1, 1), date(year + 1, 1, 1))
    op.execute("SET LOCAL work_mem = '256MB'")  # so that it does not sort on disk
    _sum("hour", "rollups_1m_old", "rollups_1h")
    _sum("day", "rollups_1h", "rollups_1d")
    _keep_as_one_partition(_day(last) + timedelta(days=1))


def _create(table: str, index: str) -> None:
    op.create_table(
        table,
        sa.Column("minute", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("drafted", sa.BigInteger(), nullable=False),
        sa.Column("accepted", sa.BigInteger(), nullable=False),
        sa.Column("emitted", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("acceptance_buckets", postgresql.ARRAY(sa.BigInteger()), nullable=False),
        sa.Column("time_per_output_token_sum", sa.Double(), nullable=False),
        sa.Column("time_per_output_token_count", sa.BigInteger(), nullable=False),
        sa.Column("time_to_first_token_sum", sa.Double(), nullable=False),
        sa.Column("time_to_first_token_count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("minute", "stream_id", "segment", "kind"),
        postgresql_partition_by="RANGE (minute)",
    )
    op.create_index(
        index, table, ["stream_id", "minute"], postgresql_where=sa.text("kind <> 'probe'")
    )


def _partition(table: str, suffix: str, start: date, end: date) -> None:
    op.execute(
        f"CREATE TABLE {table}_{suffix} PARTITION OF {table} "
        f"FOR VALUES FROM ('{start}T00:00:00Z') TO ('{end}T00:00:00Z') WITH (fillfactor = 50)"
    )


def _sum(unit: str, source: str, tier: str) -> None:
    sums = ", ".join(f"sum({name})" for name in _SUMS)
    op.execute(
        f"INSERT INTO {tier} (minute, stream_id, segment, kind, {', '.join(_SUMS)}, acceptance_buckets) "
        f"SELECT date_trunc('{unit}', minute, 'UTC'), stream_id, segment, kind, {sums}, ARRAY[{_BUCKETS}] "
        f"FROM {source} GROUP BY 1, 2, 3, 4"
    )


def _keep_as_one_partition(end: date) -> None:
    name = f"rollups_1m_until_{end:%Y%m%d}"
    op.rename_table("rollups_1m_old", name)
    for index in ("pkey", "traffic"):
        op.execute(f"ALTER INDEX rollups_1m_old_{index} RENAME TO {name}_{index}")
    op.execute(
        f"ALTER TABLE rollups_1m ATTACH PARTITION {name} FOR VALUES FROM (MINVALUE) TO ('{end}T00:00:00Z')"
    )


def _months(first: date, last: date) -> list[tuple[date, date]]:
    numbers = range(12 * first.year + first.month - 1, 12 * last.year + last.month)
    starts = [date(number // 12, number % 12 + 1, 1) for number in (*numbers, numbers[-1] + 1)]
    return list(zip(starts, starts[1:], strict=False))


def _day(moment: datetime) -> date:
    return moment.astimezone(UTC).date()
