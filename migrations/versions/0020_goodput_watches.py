"""the watch over goodput: tokens per second at the same load

Revision: 0020
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "goodput_watches",
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("watch", postgresql.JSONB(), nullable=False),
        sa.Column("looked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("stream_id"),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.id"], ondelete="CASCADE"),
    )
