"""prompt tokens from the prefix cache in each record, and when servers started

Revision: 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("records", sa.Column("cached_tokens", sa.BigInteger(), nullable=True))
    op.create_table(
        "server_starts",
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("server", "started_at"),
    )
