"""why a stream learns its baselines again is a code, and was an English sentence

Revision: 0017
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        UPDATE streams SET begun_anew_because = CASE
            WHEN begun_anew_because LIKE 'stored by another version%' THEN 'other_version'
            ELSE 'damaged' END
        WHERE begun_anew_because IS NOT NULL
        """
    )
    op.create_check_constraint(
        "ck_streams_begun_anew_because", "streams", sa.text("begun_anew_because IN ('other_version', 'damaged')")
    )
