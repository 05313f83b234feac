"""The sidecar with a defect planted: the database refuses what one stream wants to store when it has fallen.

python -m tests.chaos.poisoned serve ...
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import text
from sqlalchemy.orm import Session

from driftguard.cli import main
from driftguard.incidents import opening
from driftguard.store.tables import Incident, Stream

POISONED: Final = "poisoned"
_open_incident = opening.open_incident


def _refused(session: Session, incident: Incident, reason: str) -> None:
    stream = session.get(Stream, incident.stream_id)
    if stream is not None and stream.server == POISONED:
        session.execute(text("SELECT 1 / 0"))  # fails the transaction that it is in, or its savepoint
    _open_incident(session, incident, reason)


if __name__ == "__main__":
    opening.open_incident = _refused
    main()
