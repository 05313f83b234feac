"""When a server's canary probes are due. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

RETRY_AFTER: Final = timedelta(minutes=1)  # a server that did not answer


@dataclass(frozen=True, slots=True)
class Past:
    """The earlier probes of one server's draft in service."""

    replayed_at: datetime | None
    failed_at: datetime | None
    awaited_since: datetime | None  # newest change point whose diagnosis waits for a replay


def is_due(past: Past, now: datetime, interval: timedelta) -> bool:
    """At every interval; at once for a draft without any replay, and for a diagnosis that waits."""
    if past.failed_at is not None and now < past.failed_at + min(RETRY_AFTER, interval):
        return False
    if past.replayed_at is None or now >= past.replayed_at + interval:
        return True
    return past.awaited_since is not None and past.replayed_at < past.awaited_since
