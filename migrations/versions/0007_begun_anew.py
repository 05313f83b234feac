"""streams whose detector began again from nothing, and why

Revision: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("streams", sa.Column("begun_anew_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("streams", sa.Column("begun_anew_because", sa.Text(), nullable=True))
