"""Which part of a server's requests was answered and not recorded, and when that is worth telling.

Acceptance is then of a part of the traffic that is not chosen at random: agents and code completion, say, end
their answers on stop strings, of which vLLM tells no counts. Windows of counters are of all requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.orm import Session

from driftguard.records import WHY, UnrecordedReason
from driftguard.store import unrecorded_requests

PERIOD: Final = timedelta(days=1)  # of whole hours: those that began within it
# If the missing requests accept .20 more or less than the others, 5% of them move the acceptance of all by
# .01. That is less than most changes that are found, and the level of a stream is not known better.
TOLD_FROM: Final = 0.05
LEAST_REQUESTS: Final = 100  # below this a share of 5% is a handful of requests


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """The answered requests of a server in the last day: `recorded` ones, and others by reason, the most
    frequent first. `streams`: ids of those with records of requests."""

    server: str
    recorded: int
    reasons: Mapping[UnrecordedReason, int]
    streams: Collection[int]

    @property
    def unrecorded(self) -> int:
        return sum(self.reasons.values())

    @property
    def total(self) -> int:
        return self.unrecorded + self.recorded

    @property
    def share(self) -> float:
        return self.unrecorded / self.total

    @property
    def text(self) -> str:
        """What to know and to do about it; empty where it is too little to matter."""
        if self.total < LEAST_REQUESTS or self.share < TOLD_FROM:
            return ""
        main = next(iter(self.reasons))
        most = "" if len(self.reasons) == 1 else f"most of them ({self.reasons[main]:,}) "
        part = f"{min(self.share, 0.99):.0%}" if self.recorded else "All"
        rest = "Acceptance is of the others only" if self.recorded else "So its acceptance is not known"
        return (
            f"{part} of the {self.total:,} requests to {self.server} in the last 24 hours were answered and "
            f"not recorded, {most}because {WHY[main].cause}. {rest}. {WHY[main].remedy}."
        )


def of_servers(session: Session, now: datetime, servers: Collection[str] | None = None) -> list[Unrecorded]:
    """Of all servers or of these, the largest share first. Left out are servers without such requests, and
    those that are known by windows of their counters alone, which are of all requests."""
    missing = unrecorded_requests.since(session, now - PERIOD, now, servers)
    if not missing:
        return []
    recorded = unrecorded_requests.recorded_since(session, now - PERIOD, now, missing)
    found = []
    for server, reasons in missing.items():
        known = recorded.get(server)
        if known is not None and known.has_windows and not known.requests:
            continue
        requests = known.requests if known else {}
        found.append(Unrecorded(server, sum(requests.values()), reasons, requests.keys()))
    return sorted(found, key=lambda one: (-one.share, one.server))
