"""indexes on the retraining runs of a place, on those that are under way and on those the gate decided on

Revision: 0032
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

_ENDED = "'promoted', 'rejected', 'nothing_to_do', 'failed', 'rolled_back'"


def upgrade() -> None:
    place = ["server", "target", "started_at"]
    op.create_index("ix_retrain_runs_place", "retrain_runs", place)
    op.create_index(
        "ix_retrain_runs_unended",
        "retrain_runs",
        ["server", "target"],
        postgresql_where=sa.text(f"state NOT IN ({_ENDED})"),
    )
    op.create_index(
        "ix_retrain_runs_judged", "retrain_runs", place, postgresql_where=sa.text("numbers ? 'gate'")
    )
