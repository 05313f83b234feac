"""The sidecar with a defect planted: the database refuses what one stream wants to store when it has fallen.

python -m tests.chaos.poisoned serve ...
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.orm import Session

from driftguard.cli import main
from driftguard.incidents import opening
from driftguard.store.tables import Stream

POISONED: Final = "poisoned"
_open_from = opening.open_from


def _refused(session: Session, stream: Stream, *rest: Any, **named: Any) -> None:
    if stream.server == POISONED:
        session.execute(text("SELECT 1 / 0"))  # fails the transaction that it is in, or its savepoint
    _open_from(session, stream, *rest, **named)


if __name__ == "__main__":
    opening.open_from = _refused
    main()
