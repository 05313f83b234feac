"""an index of the records of one stream in order of seq

Revision: 0011
"""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # On every existing partition; later ones get it when they are made. Writes to `records` wait meanwhile.
    op.create_index("ix_records_stream_seq", "records", ["stream_id", "seq"])
