"""comparisons that await the silence of a stream served beside

Revision: 0029
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "awaited_comparisons",
        sa.Column("is_beside", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
