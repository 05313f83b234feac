"""diagnosis of incidents, prompts of canary probes

Revision: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "incidents", sa.Column("diagnosis", postgresql.JSONB(astext_type=sa.Text()), nullable=True)
    )
    op.create_table(
        "probe_prompts",
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("body", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("server", "key"),
    )
    op.create_index(
        "ix_records_probes",
        "records",
        ["stream_id", "ended_at"],
        unique=False,
        postgresql_where="kind = 'probe'",
    )
