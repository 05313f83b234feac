"""incidents whose new level an operator accepted

Revision: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "incidents", sa.Column("level_accepted", sa.Boolean(), nullable=False, server_default=sa.false())
    )
