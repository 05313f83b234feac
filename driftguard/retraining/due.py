"""Which incidents want a retraining now, and which servers have something to settle. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

MAXIMUM_FAILURES = 3  # of one incident; then a person is asked
RECHECK_PART = 60  # a wait for traffic is looked at this many times
SHORTEST_RECHECK = timedelta(seconds=2)
LONGEST_RECHECK = timedelta(minutes=1)
RETRY_FAILED_AFTER = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class PastRun:
    """One earlier run for the incident. `lives`: its process still runs."""

    state: str
    ended_at: datetime | None
    lives: bool


def is_due(runs: Sequence[PastRun], now: datetime, wait: timedelta) -> bool:
    """Whether an unresolved fall wants a run; `runs` of that incident, newest first.

    A first run starts at once. One that had too little traffic is repeated until there is enough; one that
    failed or was killed, a few times. What the gate rejected or the watch rolled back is left to people and
    the nightly job: the same traffic would make the same draft.
    """
    if not runs:
        return True
    last = runs[0]
    if last.ended_at is None:
        return last.state != "watching" and not last.lives
    if last.state == "nothing_to_do":
        return now >= last.ended_at + recheck_after(wait)
    failures = sum(run.state == "failed" for run in runs)
    return (
        last.state == "failed" and failures < MAXIMUM_FAILURES and now >= last.ended_at + RETRY_FAILED_AFTER
    )


def recheck_after(wait: timedelta) -> timedelta:
    """How long to wait before looking again whether enough traffic is captured."""
    return min(max(wait / RECHECK_PART, SHORTEST_RECHECK), LONGEST_RECHECK)
