"""captured requests of an incident, scored with the registered models

Revision: 0021
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "serving_scores",
        sa.Column("incident_id", sa.Uuid(), nullable=False),
        sa.Column("captures", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("missing", sa.Text(), nullable=True),
        sa.Column("scores", postgresql.JSONB(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("incident_id"),
        sa.ForeignKeyConstraint(["incident_id"], ["incidents.id"], ondelete="CASCADE"),
    )
