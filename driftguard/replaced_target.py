"""A new target behind an old draft: a new stream, so the detector begins anew and would see nothing.

When a baseline of the new stream is ready, its acceptance is compared with the stream before: the same
server, draft and method, another target. A fall opens an incident, and the draft is retrained against the
new target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid5

import msgspec
import structlog
from sqlalchemy.orm import Session

from driftguard import incident_diagnosis, incident_severity
from driftguard.detection import Acceptance, BaselineReady, Finding
from driftguard.diagnosis import rates
from driftguard.diagnosis.rates import Rate
from driftguard.diagnosis.verdict import LEVEL
from driftguard.incidents import PAGE_SLOWDOWN, formula_slowdown
from driftguard.store import acceptance_levels, diagnosis_evidence, incidents
from driftguard.store.acceptance_levels import AcceptanceLevel
from driftguard.store.records import StoredRecord
from driftguard.store.tables import Incident, Stream

LOOK_BACK: Final = timedelta(days=7)
LEAST_REQUESTS: Final = 30  # of a segment, under either target
_QUANTILE_95: Final = 1.959963984540054
_NAMESPACE: Final = UUID(
    "a4f1c9a2-34c5-4a55-9d0e-6a2f6f0f6f9d"
)  # one incident per stream, however often folded
log = structlog.get_logger(__name__)

Fallen = tuple[str, Rate, Rate]  # segment, under the target before, under this one


def comparing_targets(
    minimum_drop: float, destinations: Sequence[str], page_slowdown: float = PAGE_SLOWDOWN
) -> Callable[[Session, Stream, Sequence[StoredRecord], Sequence[Finding]], None]:
    """An `after_fold` of the pipeline."""

    def compare(
        session: Session, stream: Stream, records: Sequence[StoredRecord], findings: Sequence[Finding]
    ) -> None:
        del records
        ready = [finding for finding in findings if isinstance(finding, BaselineReady)]
        if ready:
            _compare(session, stream, ready[-1], minimum_drop, destinations, page_slowdown)

    return compare


def fallen_segments(
    before: Sequence[AcceptanceLevel], after: Sequence[AcceptanceLevel], minimum_drop: float
) -> list[Fallen]:
    """Segments that accept less under the new target, by at least `minimum_drop` and shown at 1%.

    Welch's test per segment with Bonferroni's correction. Assumption: independent requests; where sessions
    dominate, the level does not hold.
    """
    known = {level.segment: level for level in before if level.requests >= LEAST_REQUESTS}
    pairs = [
        (level.segment, _rate(known[level.segment]), _rate(level))
        for level in after
        if level.segment in known and level.requests >= LEAST_REQUESTS
    ]
    return [
        (segment, old, new)
        for segment, old, new in pairs
        if new.rate <= old.rate - minimum_drop and rates.difference(old, new).p_value <= LEVEL / len(pairs)
    ]


def _rate(level: AcceptanceLevel) -> Rate:
    """Of requests that weigh the same: the mean of accepted / drafted."""
    return Rate(level.requests, level.requests, level.mean, math.sqrt(level.variance / level.requests))


def _compare(
    session: Session,
    stream: Stream,
    ready: BaselineReady,
    minimum_drop: float,
    destinations: Sequence[str],
    page_slowdown: float,
) -> None:
    incident_id = uuid5(_NAMESPACE, str(stream.id))
    past = diagnosis_evidence.stream_with_another_target(session, stream)
    if past is None or session.get(Incident, incident_id) is not None:
        return
    if incidents.unresolved_of(session, stream.id, "down"):
        return
    oldest = datetime.fromtimestamp(ready.since, UTC) - LOOK_BACK
    found = fallen_segments(_levels(session, past, oldest), _levels(session, stream, oldest), minimum_drop)
    if not found:
        return
    now = datetime.now(UTC)
    incident = _incident(session, stream, past, ready, found, now)
    incident.id = incident_id
    incident_diagnosis.attach(session, incident, stream, now, page_slowdown)
    reason = (
        f"the target {past.target} was replaced by {stream.target}, and the draft fits it less: acceptance "
        f"fell from {incident.acceptance_before:.2f} to {incident.acceptance_after:.2f}"
    )
    incidents.open_incident(session, incident, reason)
    incident_severity.announce(session, incident, destinations, now)
    log.warning("incident opened", incident=str(incident.id), stream=stream.id, reason=reason)


def _levels(session: Session, stream: Stream, oldest: datetime) -> list[AcceptanceLevel]:
    return acceptance_levels.levels(
        session,
        server=stream.server,
        target=stream.target,
        version=stream.draft_version,
        changed=(),
        since=oldest,
        oldest=oldest,
    )


def _incident(
    session: Session,
    stream: Stream,
    past: Stream,
    ready: BaselineReady,
    found: Sequence[Fallen],
    now: datetime,
) -> Incident:
    first = diagnosis_evidence.first_record(session, stream.id)
    total = sum(new.requests for _, _, new in found)
    before = sum(old.rate * new.requests for _, old, new in found) / total
    after = sum(new.rate * new.requests for _, _, new in found) / total
    k = diagnosis_evidence.usual_k(session, stream.id, first.at)
    return Incident(
        stream_id=stream.id,
        direction="down",
        severity="warning",  # until it is diagnosed
        opened_at=now,
        opened_seq=ready.ordinal,
        change_point_seq=first.seq,
        change_point_at=first.at,
        interval_start_at=min(past.last_seen_at, first.at),
        interval_end_at=first.at,
        acceptance_before=before,
        acceptance_after=after,
        segments=[_segment(*one) for one in found],
        evidence={
            incident_diagnosis.PREDECESSOR: past.id,
            "slowdown_measured": None,
            "slowdown_formula": formula_slowdown(before, after, k) if k else None,
            "num_speculative_tokens": k,
        },
    )


def _segment(segment: str, old: Rate, new: Rate) -> dict[str, Any]:
    sides = {"before": old, "after": new}
    return {
        "segment": segment,
        **{name: msgspec.to_builtins(_acceptance(rate)) for name, rate in sides.items()},
    }


def _acceptance(rate: Rate) -> Acceptance:
    half = _QUANTILE_95 * rate.error
    return Acceptance(rate.rate, max(rate.rate - half, 0.0), min(rate.rate + half, 1.0), rate.requests)
