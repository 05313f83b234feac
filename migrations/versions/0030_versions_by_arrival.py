"""which records had arrived when a server's engine version was noticed

Revision: 0030
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("server_versions", sa.Column("noticed_seq", sa.BigInteger(), nullable=True))
