"""the draft version that a scraped server serves, where that was announced

Revision: 0024
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "announced_drafts",
        sa.Column("server", sa.Text(), primary_key=True),
        sa.Column("version", sa.Text(), nullable=True),
        sa.Column("effective", sa.Text(), nullable=False),
        sa.Column("announced_at", moment, nullable=False),
        sa.Column("started_at", moment, nullable=True),
        sa.Column("serving", sa.Text(), nullable=True),
        sa.Column("serving_since", moment, nullable=True),
        sa.Column("instead_of", sa.Text(), nullable=True),
        sa.Column("started_with", sa.Text(), nullable=True),
    )
