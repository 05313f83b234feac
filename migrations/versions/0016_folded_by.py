"""which sidecar folded last, and goes on

Revision: 0016
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("fold_positions", sa.Column("folded_by", sa.Uuid(), nullable=True))
