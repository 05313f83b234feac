"""scorings that run are found without reading the others

Revision: 0022
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "ix_serving_scores_running",
        "serving_scores",
        ["started_at"],
        postgresql_where=sa.text("state = 'scoring'"),
    )
