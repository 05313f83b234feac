"""How an incident opens, by the detector or for a replaced target, how grave it is, and who is told.

An incident says where, since when and how much acceptance changed. What that costs, why it came and hence how
grave it is says its examination (`examination.py`), right after the commit: nobody is told of it before. Its
severity may become graver, never less grave, until it is over.

A change that repeats one of the day or the week before (`repeated`) is asked about, and pages nobody while it
does: until it lasts longer, or costs more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple, cast
from uuid import UUID, uuid5

import structlog
from sqlalchemy.orm import Session

from driftguard.detection import (
    Acceptance,
    DriftClosed,
    DriftOpened,
    DriftSeenGradual,
    DriftWidened,
    SegmentChange,
)
from driftguard.incident_lifecycle import PAGE_SLOWDOWN, Direction, Severity, formula_slowdown, severity
from driftguard.records.documents.acceptance import from_to
from driftguard.records.documents.incident import (
    ChangedSegment,
    IncidentDiagnosis,
    IncidentEvidence,
    Repeats,
    going_on,
    names_of,
    over_by_now,
    positions_of,
)
from driftguard.records.positions import ACCEPTANCE, combined
from driftguard.store import incidents, notifications
from driftguard.store.tables import Incident, Stream

# Makes an incident's id from what it is about: the same fold gives the same id.
_NAMESPACE: Final = UUID("5f2c1f1c-6f0e-4d0c-9a4b-6f5d3c1e7a90")
# cycle, and how far from a whole one two changes may lie that are the same: change points are not exact, and
# people begin their weekends at different hours
_CYCLES: Final[tuple[tuple[Literal["day", "week"], timedelta, timedelta], ...]] = (
    ("day", timedelta(days=1), timedelta(hours=3)),
    ("week", timedelta(days=7), timedelta(hours=12)),
)
_NO_LARGER: Final = 1.25  # a duration or a cost that is up to so many times the earlier one's
_NO_DEEPER: Final = 1.5  # a move: at an alarm it is known roughly
_LATEST_END: Final = timedelta(hours=1)  # beyond that
_NOT_GRADUAL: Final = "by now a change at once is as likely as one that came gradually"
SILENT: Final = "the changed segments ({}) send no traffic any more"
_OLDEST: Final = timedelta(days=8)
log = structlog.get_logger(__name__)


def open_incident(session: Session, incident: Incident, reason: str) -> None:
    """Stores the incident, which awaits its examination, and why it opened. One of this id stays as it is.
    One of this stream and direction that is not resolved names its segments as well."""
    if known := incidents.unresolved_of(session, incident.stream_id, incident.direction):
        if not join(
            session, known[0], incident.segments, ChangePoint.of(incident), reason, incident.opened_at
        ):
            log.warning("drift found again; its incident is still open", incident=str(known[0].id))
        return
    if session.get(Incident, incident.id) is not None:
        return
    since = incident.change_point_at - _OLDEST
    earlier = incidents.resolved_since(session, incident.stream_id, incident.direction, since)
    incident.evidence = replace(incident.evidence, repeats=repeated(incident, earlier))
    incident.severity, incident.awaits_examination = "info", True
    incidents.open_incident(session, incident, reason)
    log.warning(
        "incident opened",
        incident=str(incident.id),
        stream=incident.stream_id,
        since=incident.change_point_at.isoformat(),
        segments=list(names_of(incident.segments)),
        reason=reason,
    )


def from_finding(stream: Stream, finding: DriftOpened, now: datetime, factor: float) -> tuple[Incident, str]:
    """The incident of an alarm, and why it opens. `factor`: what the stream's own A was multiplied by, see
    driftguard.detection.fleet."""
    incident = _incident(stream, finding, factor, now)
    return incident, _reason(finding, incident.segments)


def repeated(incident: Incident, earlier: Sequence[Incident]) -> Repeats | None:
    """Which of the `earlier` incidents of the stream this one looks like; None where it looks like none."""
    moved = abs(incident.acceptance_after - incident.acceptance_before)
    for name, cycle, apart in _CYCLES:
        for one in earlier:
            until = one.evidence.ending.mitigated_at if one.evidence.ending else None
            until = until or one.resolved_at
            if (
                until is not None
                and not one.level_accepted
                and incident.evidence.is_of_alarm
                and one.direction == incident.direction
                and set(names_of(incident.segments)) <= set(names_of(one.segments))
                and abs(incident.change_point_at - one.change_point_at - cycle) <= apart
                and moved <= _NO_DEEPER * abs(one.acceptance_after - one.acceptance_before)
            ):
                return Repeats(name, one.id, one.change_point_at, until)
    return None


def why_no_repetition(incident: Incident, newest: datetime, slowdown: float | None) -> str | None:
    """What has set the incident apart from the one that it looked like; None while nothing has. `newest`: end
    of the newest record, by the source's clock; `slowdown`: as it is by now."""
    repeats, known = incident.evidence.repeats, incident.evidence.slowdown
    if repeats is None or repeats.differs is not None:
        return None
    lasted, longest = newest - incident.change_point_at, _NO_LARGER * (repeats.until - repeats.since)
    if lasted > longest + _LATEST_END:
        return f"it has lasted longer than {repeats.name}"
    if slowdown is not None and known is not None and slowdown > _NO_LARGER * max(known, PAGE_SLOWDOWN):
        return f"it costs more than {repeats.name}"
    return None


def widen(session: Session, stream: Stream, finding: DriftWidened, now: datetime) -> None:
    """More segments changed while the incident of this direction is open: it names them as well, its
    acceptance is that of all, and its cost is measured anew, which may make it graver
    (`cost_measurement.py`)."""
    for incident in incidents.unresolved_of(session, stream.id, finding.direction):
        named = {each.segment for each in incident.segments if each.back_at is None}
        joined = _segments([change for change in finding.segments if change.segment not in named])
        if not joined:
            continue
        verb = "fell" if finding.direction == "down" else "rose"
        moves = ", ".join(
            f"{each.segment} from {each.before.rate:.2f} to {each.after.rate:.2f}" for each in joined
        )
        since = datetime.fromtimestamp(finding.change_point_at, UTC)
        reason = (
            f"{ACCEPTANCE[positions_of(joined)]} {verb} in more segments, since {since:%Y-%m-%d %H:%M:%S} "
            f"UTC: {moves}; found {finding.requests_to_alarm} {finding.unit} after the change"
        )
        join(
            session, incident, joined, ChangePoint(finding.change_point, since, finding.ordinal), reason, now
        )


class ChangePoint(NamedTuple):
    """The first record of a change, when that ended, and the newest record as the change was told."""

    seq: int
    at: datetime
    named_seq: int

    @classmethod
    def of(cls, incident: Incident) -> ChangePoint:
        return cls(incident.change_point_seq, incident.change_point_at, incident.opened_seq)


def join(
    session: Session,
    incident: Incident,
    segments: Sequence[ChangedSegment],
    change_point: ChangePoint,
    reason: str,
    now: datetime,
) -> bool:
    """Names more segments, which changed at that point, in an incident that is not resolved, and says why;
    those that it names already, and that are not back, stay as they are. Whether there were others."""
    named = set(names_of(incident.segments))
    staying = {each.segment for each in incident.segments if each.back_at is None}
    seq, at, named_seq = change_point
    joined = [
        replace(each, since=at, since_seq=seq, named_seq=named_seq)
        for each in segments
        if each.segment not in staying
    ]
    if joined:
        again = names_of(joined)
        kept = (each for each in incident.segments if each.segment not in again)
        incident.segments = (*kept, *joined)
        before, after = _acceptance_of(incident.segments)
        incident.acceptance_before, incident.acceptance_after = before, after
        known = incident.evidence
        slower = by_formula(incident, known.num_speculative_tokens)
        if known.may_be_usual and known.repeats is not None:
            known = replace(known, repeats=replace(known.repeats, differs="more segments changed"))
        # What had changed when it was opened is the same change, seen later where there is less traffic.
        is_later = seq > incident.opened_seq
        if is_later and any(not set(each.renamed_from) & named for each in joined):
            known = replace(known, outgrew_cause=True)
        levels = {name: level for name, level in known.levels.items() if name not in again}
        incident.evidence = replace(
            known, slowdown_measured=None, slowdown_formula=slower, cost=None, levels=levels
        )
        incidents.note(session, incident, reason, now)
        log.warning("incident widened", incident=str(incident.id), stream=incident.stream_id, reason=reason)
    return bool(joined)


def close(session: Session, incident: Incident, finding: DriftClosed, now: datetime) -> None:
    """The detector says that what it found is over, or the norm: the incident is over, but for segments in
    which it goes on, or may go on under another name, and those that a comparison found and that are not
    back."""
    ended_at = datetime.fromtimestamp(finding.ended_at, UTC)
    of_alarm, is_back = incident.evidence.is_of_alarm, finding.reason == "recovered"
    back = {change.segment for change in finding.segments if is_back}
    over = [
        each.segment
        for each in incident.segments
        if each.back_at is None
        and (each.silent_at is None or each.segment in back)
        and not each.is_compared(of_alarm=of_alarm)
        and each.segment not in finding.left
    ]
    reason = closing_reason(finding) if finding.segments else SILENT.format(", ".join(over))
    come_back(session, incident, over, reason, now, ended_at, is_back=is_back)


def come_back(
    session: Session,
    incident: Incident,
    segments: Sequence[str],
    reason: str,
    now: datetime,
    at: datetime,
    *,
    is_back: bool = True,
) -> None:
    """Resolves the incident where the other segments are over already; else its history tells it. `at`: end
    of the request that showed it; `is_back`: because acceptance is back."""
    if not any(each.segment in segments and each.back_at is None for each in incident.segments):
        return  # over already, as another name took the place
    mitigated = at if is_back else _newest_return(incident)
    incident.segments = tuple(
        replace(each, back_at=at) if each.segment in segments and each.back_at is None else each
        for each in incident.segments
    )
    if left := [each.segment for each in incident.segments if each.back_at is None]:
        names, are = ", ".join(left), "is" if len(left) == 1 else "are"
        told = f"the rise goes on in {names}" if incident.direction == "up" else f"{names} {are} not back yet"
        incidents.note(session, incident, f"{reason}; {told}", now)
        return
    incidents.move(session, incident.id, "resolved", reason, now, mitigated_at=mitigated, last_record_at=at)
    log.info("incident resolved", incident=str(incident.id), stream=incident.stream_id, reason=reason)


def _newest_return(incident: Incident) -> datetime | None:
    """When the detector found the last of the segments back that are."""
    if incident.direction != "down":
        return None  # a level that became the norm
    of_alarm = incident.evidence.is_of_alarm
    own = (
        each
        for each in over_by_now(incident.segments)
        if each.silent_at is None and not each.is_compared(of_alarm=of_alarm)
    )
    return max((each.back_at for each in own if each.back_at is not None), default=None)


def tell_gradual(session: Session, stream: Stream, finding: DriftSeenGradual, now: datetime) -> None:
    """What is known by now of how the change came replaces what was known at its alarm. Nobody is paged."""
    for incident in incidents.unresolved_of(session, stream.id, finding.direction):
        known, found = incident.evidence.gradual, finding.gradual
        if not incident.evidence.is_of_alarm:
            continue
        incident.evidence = replace(incident.evidence, gradual=found)
        if found is not None and found.certain:
            incidents.note(session, incident, found.text, now)
        elif known is not None and known.certain:
            incidents.note(session, incident, _NOT_GRADUAL, now)


def fall_further(
    session: Session, incident: Incident, fallen: Mapping[str, tuple[Acceptance, Acceptance]], now: datetime
) -> str:
    """Tells that segments of an incident accept still less than they did since its change (before, after) and
    returns it: they have these levels from then on, and the cost is measured anew."""
    moves = ", ".join(
        f"{segment} from {from_to(before.rate, after.rate)}" for segment, (before, after) in fallen.items()
    )
    reason = f"{ACCEPTANCE[positions_of(incident.segments)]} fell further: {moves}"
    incident.segments = tuple(
        replace(
            each,
            # of as many requests as were counted at the alarm: they are the segment's weight
            after=replace(fallen[each.segment][1], requests=each.after.requests),
            adjusted=None,
        )
        if each.segment in fallen
        else each
        for each in incident.segments
    )
    _, incident.acceptance_after = _acceptance_of(incident.segments)
    slower = by_formula(incident, incident.evidence.num_speculative_tokens)
    incident.evidence = replace(
        incident.evidence, slowdown_measured=None, slowdown_formula=slower, cost=None, outgrew_cause=True
    )
    incidents.note(session, incident, reason, now)
    log.warning("incident fell further", incident=str(incident.id), reason=reason)
    return reason


def by_formula(incident: Incident, drafted_per_step: float | None) -> float | None:
    """Part of the tokens per second lost, in the segments that are not back. None where K varies: no speed
    follows from the first position."""
    fallen = going_on(incident.segments)
    if not drafted_per_step or positions_of(fallen) != "all":
        return None
    before, after = incident.acceptance_before, incident.acceptance_after
    if len(fallen) < len(incident.segments):
        before, after = _acceptance_of(fallen)
    return formula_slowdown(before, after, drafted_per_step)


def closing_reason(finding: DriftClosed) -> str:
    """Why the detector says that it is over, in words."""
    names = ", ".join(change.segment for change in finding.segments)
    if finding.reason == "became_normal":
        levels = ", ".join(f"{change.segment} {change.after.rate:.2f}" for change in finding.segments)
        return f"the rise has lasted, and is the baseline from now on: {levels}"
    if finding.reason == "no_traffic":
        told = SILENT.format(names)
        return told if finding.direction == "down" else f"{told} with the settings that they rose with"
    now = ", ".join(_back_at(change) for change in finding.segments)
    acceptance = ACCEPTANCE[combined([change.after.positions for change in finding.segments])]
    if all(change.after.is_at(change.before.rate) for change in finding.segments):
        return f"{acceptance} is back at its baseline: {now}"
    return f"{acceptance} is back by more than half of the change: {now}"


def _back_at(change: SegmentChange) -> str:
    told = f"{change.segment} {change.after.rate:.2f}"
    if change.after.is_at(change.before.rate):
        return told
    return f"{told}, baseline {change.before.rate:.2f}"


def _reason(finding: DriftOpened, segments: Sequence[ChangedSegment]) -> str:
    verb = "fell" if finding.direction == "down" else "rose"
    levels = from_to(finding.adjusted.before, finding.adjusted.after)
    return (
        f"{ACCEPTANCE[positions_of(segments)]} {verb} from {levels}; "
        f"found {finding.requests_to_alarm} {finding.unit} after the change"
    )


def _incident(stream: Stream, finding: DriftOpened, factor: float, now: datetime) -> Incident:
    changed_at = datetime.fromtimestamp(finding.change_point_at, UTC)
    return Incident(
        id=uuid5(_NAMESPACE, f"{stream.id}/{finding.direction}/{finding.ordinal}"),
        stream_id=stream.id,
        direction=finding.direction,
        opened_at=now,
        opened_seq=finding.ordinal,
        change_point_seq=finding.change_point,
        change_point_at=changed_at,
        interval_start_at=changed_at,
        interval_end_at=changed_at,
        acceptance_before=finding.adjusted.before,
        acceptance_after=finding.adjusted.after,
        segments=_segments(finding.segments),
        evidence=IncidentEvidence(
            evidence=finding.evidence,
            false_alarm_every=finding.false_alarm_every,
            false_alarm_factor=factor,
            requests_to_alarm=finding.requests_to_alarm,
            interval=finding.interval,
            interval_level=finding.interval_level,
            stream_before=finding.before,
            stream_after=finding.after,
            adjusted=finding.adjusted,
            gradual=finding.gradual,
        ),
    )


def _segments(changes: Sequence[SegmentChange]) -> tuple[ChangedSegment, ...]:
    return tuple(
        ChangedSegment(each.segment, each.before, each.after, each.evidence, each.adjusted)
        for each in changes
    )


def _acceptance_of(segments: Sequence[ChangedSegment]) -> tuple[float, float]:
    """Acceptance of the changed segments before and after as it was tested, both in the mix of segments after
    the change, so that only acceptance differs."""
    total = sum(each.after.requests for each in segments)
    levels = [
        (each.adjusted.before, each.adjusted.after) if each.adjusted else (each.before.rate, each.after.rate)
        for each in segments
    ]
    return (
        sum(before * each.after.requests for (before, _), each in zip(levels, segments, strict=True)) / total,
        sum(after * each.after.requests for (_, after), each in zip(levels, segments, strict=True)) / total,
    )


@dataclass(frozen=True, slots=True)
class Paging:
    """Who is paged, and from when on. `destinations`: to which notifications are sent. `slowdown`: a fall is
    a page from this part of the tokens per second on, in [0, 1]."""

    destinations: tuple[str, ...] = ()
    slowdown: float = PAGE_SLOWDOWN


NOBODY = Paging()


def severity_of(incident: Incident, slowdown: float | None, paging: Paging = NOBODY) -> Severity:
    """By its cause and by what it costs. Suspicious answers are a page although nothing got slower; what is
    surely no fault is none, unless more has changed since than that explains. `slowdown`: part of the tokens
    per second lost; None: not known."""
    known = incident.diagnosis
    if known is not None and known.cause == "quality":
        return "warning"
    if incident.evidence.may_be_usual:
        return "info"
    if known is not None and _is_surely_harmless(known) and not incident.evidence.outgrew_cause:
        return "info"
    return severity(cast("Direction", incident.direction), slowdown, paging.slowdown)


def _is_surely_harmless(known: IncidentDiagnosis) -> bool:
    return known.cause in ("mix_shift", "configuration") and known.confidence == "high"


def announce(session: Session, incident: Incident, paging: Paging, now: datetime) -> None:
    """Tells every destination of a stored incident, if it is a page."""
    if incident.severity != "info":
        incidents.announce(session, incident.id, paging.destinations, "firing", incident.severity, now)


def announce_examined(session: Session, incident: Incident, paging: Paging, now: datetime) -> None:
    """Ends the wait for the examination of an incident, locked by the caller: it gets its first severity, by
    what is known of it, and is told. What is over by then is told too, with its end, as if it had been told
    at once."""
    incidents.end_wait(session, incident, severity_of(incident, incident.evidence.slowdown, paging))
    announce(session, incident, paging, now)
    if incident.state == "resolved":
        incidents.announce_resolution(session, incident, now)


def raise_to(
    session: Session, incident: Incident, graver: Severity, reason: str, paging: Paging, now: datetime
) -> bool:
    """Writes it into the incident's history and pages again. False where it is as grave already, or over."""
    told = f"{graver} instead of {incident.severity}: {reason}"
    if not incidents.raise_severity(session, incident, graver, told, now):
        return False
    incident.evidence = replace(incident.evidence, raised_because=reason)
    notifications.drop_undelivered(session, incident.id)
    announce(session, incident, paging, now)
    log.warning("incident became graver", incident=str(incident.id), severity=graver, reason=reason)
    return True
