"""what is verified at once

Revision: 0026
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Of stored records the acceptance rule tells all that is known; they are not written anew for it.
    op.add_column("records", sa.Column("verification", sa.Text(), nullable=False, server_default="unknown"))
