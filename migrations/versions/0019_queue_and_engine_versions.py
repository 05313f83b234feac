"""waiting requests in each record, and the versions of the engines that servers run

Revision: 0019
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("records", sa.Column("waiting_requests", sa.BigInteger(), nullable=True))
    op.create_table(
        "server_versions",
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column("noticed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("server", "noticed_at"),
    )
