"""requests that were answered and not recorded

Revision: 0025
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "unrecorded_requests",
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("reporter", sa.Uuid(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("hour", "server", "reason", "reporter"),
    )
