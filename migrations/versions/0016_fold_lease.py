"""which sidecar folds, and until when the others leave it that

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
    op.add_column("fold_positions", sa.Column("leased_by", sa.Uuid(), nullable=True))
    op.add_column("fold_positions", sa.Column("leased_until", sa.DateTime(timezone=True), nullable=True))
