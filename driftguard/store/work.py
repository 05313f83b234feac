"""How long each kind of work waits for the database: docs/production.md has these numbers as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

ANSWER_MARGIN_SECONDS: Final = 5.0  # after which an answer that the server owes by its own clock is overdue


@dataclass(frozen=True, slots=True)
class Work:
    """Limits of one kind of work; 0 stands for none.

    The server keeps the first three by itself. It cannot tell us so through a network that passes nothing, so
    whoever waits for an answer gives up on the connection some seconds later.
    """

    name: str
    statement_seconds: float  # one statement, waits for locks included
    lock_seconds: float  # one wait for a lock, of a row, a table or an advisory one
    idle_seconds: float  # an open transaction without a statement: what it locked is free afterwards

    @property
    def silence_seconds(self) -> float:
        """How long an answer may take before its connection is given up."""
        return self.statement_seconds + ANSWER_MARGIN_SECONDS if self.statement_seconds else math.inf

    def server_settings(self) -> dict[str, str]:
        return {
            "statement_timeout": f"{self.statement_seconds * 1000:.0f}",
            "lock_timeout": f"{self.lock_seconds * 1000:.0f}",
            "idle_in_transaction_session_timeout": f"{self.idle_seconds * 1000:.0f}",
        }


# Senders wait for it, and send again what was not acknowledged.
INGEST: Final = Work("ingest", statement_seconds=10, lock_seconds=8, idle_seconds=30)
# Waits for the batch of another sidecar, and computes between its statements.
FOLD: Final = Work("fold", statement_seconds=45, lock_seconds=45, idle_seconds=300)
# Pages, API calls, jobs: whatever asks for nothing else.
REQUEST: Final = Work("request", statement_seconds=30, lock_seconds=5, idle_seconds=300)
# What recurs in the background: looking around, diagnoses, costs.
CHORE: Final = Work("chore", statement_seconds=45, lock_seconds=10, idle_seconds=300)
# A page waits for it; driftguard.incidents.examination has for how long.
EXAMINATION: Final = Work("examination", statement_seconds=15, lock_seconds=5, idle_seconds=60)
# Partitions and retention: long, but nothing that ingest may have to queue behind.
MAINTENANCE: Final = Work("maintenance", statement_seconds=600, lock_seconds=5, idle_seconds=60)
# Whether the database is there at all, and locks that only have to be looked at.
CHECK: Final = Work("check", statement_seconds=3, lock_seconds=3, idle_seconds=30)
# Somebody waits for it at a terminal; it may rewrite tables.
UPGRADE: Final = Work("upgrade", statement_seconds=0, lock_seconds=0, idle_seconds=0)
# The job queue: short statements, on connections of its own.
JOBS: Final = Work("jobs", statement_seconds=20, lock_seconds=10, idle_seconds=300)
