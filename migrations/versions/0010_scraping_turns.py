"""which sidecar scrapes a server

Revision: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "scraping_turns",
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column("turn", sa.Uuid(), nullable=False),
        sa.Column("sidecar", sa.Text(), nullable=False),
        sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("server"),
    )
