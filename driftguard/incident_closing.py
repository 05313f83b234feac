"""When an incident is over without a person saying so: the detector closed it, or its draft is gone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import structlog
from sqlalchemy.orm import Session

from driftguard.detection import DriftClosed
from driftguard.records.positions import ACCEPTANCE, together
from driftguard.standing import Standing
from driftguard.store import incidents
from driftguard.store import status_queries as status

REPLACED_AFTER: Final = timedelta(minutes=15)  # of silence, while another draft serves in its place
log = structlog.get_logger(__name__)


def closing_reason(finding: DriftClosed) -> str:
    """Why the detector says that it is over, in words."""
    names = ", ".join(change.segment for change in finding.segments)
    if finding.reason == "no_traffic":
        return f"the changed segments ({names}) send no traffic any more"
    now = ", ".join(f"{change.segment} {change.after.rate:.2f}" for change in finding.segments)
    acceptance = ACCEPTANCE[together(change.after.positions for change in finding.segments)]
    return f"{acceptance} is back at its baseline: {now}"


def close_replaced(session: Session, found: Sequence[Standing], now: datetime) -> None:
    """Resolves incidents of drafts that something other than a retraining replaced, say a restart of the
    server with another draft: no record of theirs will ever end them. An incident that is mitigating is
    left to the watch over the promotion, which may still roll back."""
    unresolved = status.unresolved_incidents(session)
    for item in found:
        if item.verdict != "replaced" or now - item.stream.last_seen_at < REPLACED_AFTER:
            continue
        for incident in unresolved.get(item.stream.id, {}).values():
            if incident.state != "mitigating":
                reason = f"draft {item.stream.draft_version} is no longer in service"
                incidents.move(session, incident.id, "resolved", reason, now)
                log.info("incident resolved", incident=str(incident.id), reason=reason)
