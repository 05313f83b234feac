"""when the traffic of a stream arrived; an index of the rollups of one stream

Revision: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# The time of arrival of these records was not stored: it is set to the time at which they ended. For streams
# whose records have expired, the rollups show whether they had traffic.
_ENDED = """
    UPDATE streams SET traffic_ended_at = coalesce(
      (SELECT max(ended_at) FROM records WHERE stream_id = streams.id AND kind <> 'probe'),
      (SELECT least(max(minute) + interval '1 minute', last_seen_at) FROM rollups_1m
       WHERE stream_id = streams.id AND kind <> 'probe' HAVING count(*) > 0))
    """


def upgrade() -> None:
    op.create_index(
        "ix_rollups_traffic",
        "rollups_1m",
        ["stream_id", "minute"],
        postgresql_where=sa.text("kind <> 'probe'"),
    )
    for name in ("traffic_arrived_at", "traffic_ended_at"):
        op.add_column("streams", sa.Column(name, sa.DateTime(timezone=True), nullable=True))
    op.execute(_ENDED)
    op.execute("UPDATE streams SET traffic_arrived_at = traffic_ended_at")
