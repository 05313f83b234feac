"""severities of an incident over its life, and which of them was announced

Revision: 0009
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_OPENED_WITH = """
    UPDATE incident_transitions SET severity = incidents.severity
    FROM incidents WHERE incidents.id = incident_id AND from_state IS NULL
    """
_ANNOUNCED = """
    UPDATE notifications SET severity = incidents.severity FROM incidents WHERE incidents.id = incident_id
    """


def upgrade() -> None:
    op.add_column("incident_transitions", sa.Column("severity", sa.Text(), nullable=True))
    op.execute(_OPENED_WITH)
    op.add_column("notifications", sa.Column("severity", sa.Text(), nullable=True))
    op.execute(_ANNOUNCED)
    op.alter_column("notifications", "severity", nullable=False)
    op.drop_constraint("uq_notifications_once", "notifications")
    op.create_unique_constraint(
        "uq_notifications_once", "notifications", ["incident_id", "destination", "event", "severity"]
    )
