"""how many requests started in each window

Revision: 0023
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("records", sa.Column("started_requests", sa.BigInteger(), nullable=True))
