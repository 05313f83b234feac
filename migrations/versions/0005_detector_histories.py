"""the detector's history apart from its state, in pieces that are written once

States stored before keep their history inside until they are stored again: history_rows is null there.

Revision: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("detector_states", sa.Column("history_rows", sa.BigInteger(), nullable=True))
    op.create_table(
        "detector_histories",
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("piece", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["stream_id"], ["detector_states.stream_id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("stream_id", "number"),
    )
