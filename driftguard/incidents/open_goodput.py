"""What becomes of an open incident of goodput: it falls further, or ends by itself where goodput is back.

Tokens that come slower end it once they come as fast as before (driftguard.cost.goodput); speculation that
loses, once it has not lost for QUIET_LOOKS looks in a row. Where both came together, once both are over.
Either ends it once speculation has been off for as many looks: without draft tokens nothing can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, Literal

import structlog
from sqlalchemy.orm import Session

from driftguard.cost import Cost
from driftguard.cost import goodput as watching
from driftguard.cost.goodput import Fall
from driftguard.cost.payoff import Speculation, load_text
from driftguard.diagnosis.comparisons import QUANTILE_95
from driftguard.incidents import cost_measurement, opening
from driftguard.incidents.opening import Paging
from driftguard.records.documents.cost import Interval
from driftguard.records.documents.goodput import FurtherFall, GoodputChange, GoodputWatch, Watched
from driftguard.store import incidents
from driftguard.store.tables import Incident, Stream

_IS_OFF: Final = "speculation is off: the newest requests had no draft tokens"
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Further:
    """A fall beyond that of the open incident. `cost`: against the time just before it."""

    fall: Fall
    cost: Cost | None


def learned_anew(watch: GoodputWatch, now: datetime) -> GoodputWatch:
    """Of what was usual nothing is known any more."""
    return GoodputWatch(seq=watch.seq, begun_at=now)


def follow(
    session: Session,
    stream: Stream,
    watch: GoodputWatch,
    opened: Watched,
    found: Further | Literal["explained"] | None,
    speculation: tuple[Speculation, Cost | None],
    paging: Paging,
    now: datetime,
) -> GoodputWatch:
    """The watch after what became of its incident, which falls further, or ends where goodput is back.
    `found`: "explained" where an open fall of acceptance explains a further fall."""
    incident = incidents.lock(session, opened.incident_id)
    goodput = incident.evidence.goodput if incident is not None else None
    # Resolved by a person, or because its draft is gone.
    if incident is None or goodput is None or incident.state == "resolved":
        return learned_anew(watch, now) if opened.kind == "slower" else watching.closed(watch)
    if isinstance(found, Further) and not incident.awaits_examination:
        return _fallen_further(session, watch, incident, goodput, found, paging, now)
    if found == "explained":
        watch = replace(watch, sums=(), pending=())
    if opened.kind == "speculation_loses":
        return _losing(session, stream, watch, incident, goodput, speculation, paging, now)
    if watching.is_over(watch):
        return _fast_again(session, stream, watch, incident, goodput, now)
    if watching.is_gone(watch):
        reason = "no requests that can be compared with those before are served any more"
        _resolved(session, stream, watch, incident, reason, now)
        return learned_anew(watch, now)
    if _is_off(speculation[1]):
        # Blocks that cannot be compared are counted with these looks; one that can begins the count anew.
        quiet = opened.quiet + 1
        if quiet >= watching.QUIET_LOOKS:
            # A machine that is slow may be so still; what speculation lost is won back.
            is_back = goodput.kind == "speculation_loses"
            return _resolved(session, stream, watch, incident, _IS_OFF, now, is_back=is_back)
        watch = replace(watch, opened=replace(opened, quiet=quiet))
    fall = next((one for one in incidents.of_stream(session, stream.id) if one.direction == "down"), None)
    if fall is not None and goodput.by_acceptance:
        reason = f"acceptance fell, which explains it: incident {fall.id} goes on with it"
        return replace(_resolved(session, stream, watch, incident, reason, now), alarmed=True)
    return watch


def _fallen_further(
    session: Session,
    watch: GoodputWatch,
    incident: Incident,
    goodput: GoodputChange,
    found: Further,
    paging: Paging,
    now: datetime,
) -> GoodputWatch:
    fall, first = found.fall, found.fall.blocks[0]
    at = datetime.fromtimestamp(first.first_at, UTC)
    further = FurtherFall(first.first_seq, at, fall.lost, fall.concurrency)
    if goodput.kind == "slower":
        told = replace(goodput, lost=fall.lost, further=further)
        incident.evidence = replace(incident.evidence, goodput=told, slowdown_measured=None, cost=None)
        if found.cost is not None:
            incident.tokens_per_second_after = found.cost.now.tokens_per_second
    else:
        told = replace(goodput, further=further)
        slowdown = max(fall.lost, incident.evidence.slowdown or 0.0)
        incident.evidence = replace(incident.evidence, goodput=told, slowdown_measured=slowdown)
    load = load_text(fall.concurrency)
    reason = f"goodput fell further: tokens come about {fall.lost:.0%} slower than before the incident {load}"
    _tell(session, incident, reason, paging, now)
    return watching.with_opened(watch, Watched(incident.id, "slower", slower=fall.slower))


def _tell(session: Session, incident: Incident, reason: str, paging: Paging, now: datetime) -> None:
    """In its history, and with a page where it is graver by now."""
    incidents.note(session, incident, reason, now)
    graver = opening.severity_of(incident, incident.evidence.slowdown, paging)
    opening.raise_to(session, incident, graver, reason, paging, now)
    log.warning("incident fell further", incident=str(incident.id), reason=reason)


def _fast_again(
    session: Session,
    stream: Stream,
    watch: GoodputWatch,
    incident: Incident,
    goodput: GoodputChange,
    now: datetime,
) -> GoodputWatch:
    """One of speculation that loses goes on until that does not lose either."""
    reason = "tokens come as fast again as before at the same load"
    if goodput.kind == "slower":
        return _resolved(session, stream, watch, incident, reason, now, is_back=True)
    lost = max(1.0 - goodput.factor.value, 0.0) if goodput.factor else None
    ended = replace(goodput, further=None)
    incident.evidence = replace(incident.evidence, goodput=ended, slowdown_measured=lost)
    incidents.note(session, incident, reason, now)
    return watching.with_opened(watch, Watched(incident.id, "speculation_loses"))


def _losing(
    session: Session,
    stream: Stream,
    watch: GoodputWatch,
    incident: Incident,
    goodput: GoodputChange,
    speculation: tuple[Speculation, Cost | None],
    paging: Paging,
    now: datetime,
) -> GoodputWatch:
    """Over after QUIET_LOOKS in a row at which speculation did not lose."""
    (told, cost), opened = speculation, Watched(incident.id, "speculation_loses")
    is_off = _is_off(cost)
    if is_off or told.state in ("pays", "uncertain"):
        quiet = watch.opened.quiet + 1 if watch.opened else 1
        if quiet >= watching.QUIET_LOOKS:
            reason = _IS_OFF if is_off else f"speculation does not lose any more. {told.text}"
            return _resolved(session, stream, watch, incident, reason, now, is_back=True)
        return replace(watch, opened=replace(opened, quiet=quiet))
    if _loses_more(goodput.factor, told.factor) and told.factor and not incident.awaits_examination:
        lost = 1.0 - told.factor.value
        more = replace(goodput, factor=told.factor, lost=lost, concurrency=told.concurrency)
        incident.evidence = replace(incident.evidence, goodput=more, slowdown_measured=lost, cost=cost)
        incident.tokens_per_second_after = told.tokens_per_second
        before = f", {goodput.factor.value:.2f} before" if goodput.factor else ""
        reason = (
            f"goodput fell further: speculation is {told.factor.value:.2f} times as fast as none "
            f"{load_text(told.concurrency)}{before}"
        )
        _tell(session, incident, reason, paging, now)
    return replace(watch, opened=opened)


def _is_off(cost: Cost | None) -> bool:
    return cost is not None and cost.num_speculative_tokens is None


def _loses_more(before: Interval | None, now: Interval | None) -> bool:
    """By FURTHER at least, and SURELY standard errors."""
    if before is None or now is None:
        return False
    errors = ((one.high - one.low) / (2.0 * QUANTILE_95) for one in (before, now))
    return before.value - now.value >= max(
        cost_measurement.FURTHER, cost_measurement.SURELY * math.hypot(*errors)
    )


def _resolved(
    session: Session,
    stream: Stream,
    watch: GoodputWatch,
    incident: Incident,
    reason: str,
    now: datetime,
    *,
    is_back: bool = False,
) -> GoodputWatch:
    back = stream.traffic_ended_at if is_back else None
    incidents.move(session, incident.id, "resolved", reason, now, mitigated_at=back)
    log.info("incident resolved", incident=str(incident.id), reason=reason)
    return watching.closed(watch)
