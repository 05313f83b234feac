"""draft tokens per position in the rollups

Revision: 0027
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Null: of minutes before this revision, and where no record tells positions. Nothing is written anew.
    for table in ("rollups_1m", "rollups_1h", "rollups_1d"):
        for name in ("drafted_per_position", "accepted_per_position"):
            op.add_column(table, sa.Column(name, postgresql.ARRAY(sa.BigInteger()), nullable=True))
