"""the curve of a training

Revision: 0028
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Null: of runs before this revision.
    op.add_column("retrain_runs", sa.Column("curve", postgresql.JSONB(), nullable=True))
