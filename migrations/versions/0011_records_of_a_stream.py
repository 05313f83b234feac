"""the records of one stream in order of seq, without those of the others

Revision: 0011
"""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # On every partition there is, and by itself on those to come. Nothing is written to `records` meanwhile.
    op.create_index("ix_records_stream_seq", "records", ["stream_id", "seq"])
