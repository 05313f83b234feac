"""incidents are examined after the fold that opened them; so are the targets that replaced another

Revision: 0013
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "incidents",
        sa.Column("awaits_examination", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_index(
        "ix_incidents_awaiting", "incidents", ["opened_at"], postgresql_where=sa.text("awaits_examination")
    )
    op.create_table(
        "awaited_comparisons",
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("ready_seq", sa.BigInteger(), nullable=False),
        sa.Column("reference_since", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("stream_id"),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.id"], ondelete="CASCADE"),
    )
