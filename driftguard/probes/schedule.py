"""When a server's canary probes are due. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

RETRY_AFTER: Final = timedelta(minutes=1)  # a server that did not answer; twice as long each further time


@dataclass(frozen=True, slots=True)
class Past:
    """The earlier probes of one server's draft in service."""

    replayed_at: datetime | None
    failed_at: datetime | None
    awaited_since: datetime | None  # newest alarm whose diagnosis waits for a replay
    failures: int = 1  # since the last replay
    heard_at: datetime | None = None  # when its newest traffic arrived, where it had any


def is_due(past: Past, now: datetime, interval: timedelta) -> bool:
    """At every interval if there was traffic since the last replay; at once for a draft without any replay,
    and for a diagnosis that waits. A server that nobody uses is not kept awake."""
    if past.failed_at is not None and (
        past.failed_at <= now < past.failed_at + retry_after(past.failures, interval)
    ):  # else the clock was set back meanwhile
        return False
    if past.replayed_at is None:
        return True
    if past.awaited_since is not None and past.replayed_at < past.awaited_since:
        return True
    is_idle = past.heard_at is not None and past.heard_at <= past.replayed_at
    return now >= past.replayed_at + interval and not is_idle


def retry_after(failures: int, interval: timedelta) -> timedelta:
    """After so many failures in a row."""
    return min(RETRY_AFTER * (1 << min(failures - 1, 20)), interval)
