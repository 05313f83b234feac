"""leases and waits of notifications, and destinations without the secrets of their addresses

Revision: 0014
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

# As driftguard.alerting.destination.identity; `url` is the part behind the kind.
_IDENTITIES = r"""
    UPDATE notifications SET
        destination = kind || ':' || shown || '#' || left(encode(sha256(convert_to(url, 'UTF8')), 'hex'), 16),
        last_error = replace(last_error, url, shown)
    FROM (
        SELECT id, kind, url, coalesce(
            parts[1] || parts[2] || coalesce(parts[3], ''), '(an address that cannot be read)'
        ) AS shown
        FROM (
            SELECT id, split_part(destination, ':', 1) AS kind,
                substring(destination FROM position(':' IN destination) + 1) AS url,
                regexp_match(
                    substring(destination FROM position(':' IN destination) + 1),
                    '^([A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#]*@)?(\[[0-9a-fA-F:.]*\]|[^/?#@:\[\]]*)(:[0-9]*)?'
                ) AS parts
            FROM notifications
        ) AS read
    ) AS known
    WHERE known.id = notifications.id
    """
# Jobs of earlier versions are not needed: the rows of `notifications` say what is to be sent.
_REMINDERS = "DELETE FROM procrastinate_jobs WHERE task_name = 'webhook:deliver'"


def upgrade() -> None:
    op.add_column("notifications", sa.Column("leased_until", sa.DateTime(timezone=True), nullable=True))
    op.add_column("notifications", sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=True))
    op.create_index(
        "ix_notifications_undelivered",
        "notifications",
        ["destination", "id"],
        postgresql_where=sa.text("delivered_at IS NULL"),
    )
    op.get_bind().exec_driver_sql(_IDENTITIES)
    op.execute(_REMINDERS)
