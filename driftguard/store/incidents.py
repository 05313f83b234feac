"""Incidents and their transitions. Every change of state is a row with its reason and time.

Also the streams that are to be compared with the target before theirs, which may open an incident: noted by
the fold, compared later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, cast
from uuid import UUID

from sqlalchemy import JSON, delete, exists, func, or_, select, text, type_coerce, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import Session

from driftguard.errors import BadInput, Conflict, NotFound
from driftguard.incident_lifecycle import Severity, State, Transition, is_graver, transition
from driftguard.records import Instant
from driftguard.records.documents.incident import (
    Ending,
    IncidentEvidence,
    changed_since,
    names_of,
    over_by_now,
)
from driftguard.store.row_filter import EVERYTHING, RowFilter, newest_first
from driftguard.store.tables import (
    AwaitedComparison,
    Incident,
    IncidentTransition,
    Notification,
    ServingScoresRow,
    Stream,
)

# A resolution is announced where the incident itself was announced, and nowhere else. This holds whoever
# resolves it (the detector, a person, the promotion watch), because every resolution passes through move().
_ANNOUNCE_RESOLUTION = text(
    """
    INSERT INTO notifications (incident_id, destination, event, severity, created_at)
    SELECT DISTINCT :incident_id, destination, 'resolved', :severity, :at FROM notifications
    WHERE incident_id = :incident_id AND event = 'firing'
    ON CONFLICT DO NOTHING
    """
)


# On an incident that is resolved: the change is over, its level is the new normal, it comes every day or week
Decision = Literal["over", "new_normal", "day", "week"]


class Cursor(NamedTuple):
    """The last incident of the page before: newest first, by (opened_at, id)."""

    opened_at: Instant
    id: UUID


def open_incident(session: Session, incident: Incident, reason: str) -> None:
    """Stores a new incident, in state open, with its first transition."""
    step = transition(None, "open", reason, incident.opened_at)
    incident.state = step.to_state
    session.add(incident)
    session.flush()
    _add_transition(session, incident.id, step, incident.severity)


def move(
    session: Session,
    incident_id: UUID,
    to_state: State,
    reason: str,
    at: datetime,
    *,
    mitigated_at: datetime | None = None,
    last_record_at: datetime | None = None,
) -> Incident:
    """Changes the state of one incident. Of one that is resolved, `mitigated_at`: since when something has
    helped; `last_record_at`: when the last record of the change ended, all since it belong to it by default.
    Raises NotFound, IllegalTransition, BadInput (empty reason)."""
    incident = lock(session, incident_id)
    if incident is None:
        raise NotFound(f"there is no incident {incident_id}")
    step = transition(cast("State", incident.state), to_state, reason, at)
    incident.state = step.to_state
    if step.to_state == "resolved":
        incident.resolved_at, incident.resolution = step.at, step.reason
        tokens = _emitted_since_change(session, incident, last_record_at)
        incident.evidence = replace(incident.evidence, ending=Ending(tokens, mitigated_at))
        announce_resolution(session, incident, at)
    session.flush()
    _add_transition(session, incident_id, step)
    return incident


_EMITTED = text(
    """
    WITH span AS (
        SELECT date_trunc('minute', CAST(:since AS timestamptz)) + interval '1 minute' AS first,
               date_trunc('minute', CAST(:until AS timestamptz)) AS last,
               date_trunc('hour', CAST(:since AS timestamptz), 'UTC') + interval '1 hour' AS first_hour,
               date_trunc('hour', CAST(:until AS timestamptz), 'UTC') AS last_hour
    )
    SELECT (SELECT coalesce(sum(emitted), 0) FROM rollups_1h, span
            WHERE stream_id = :stream_id AND segment = ANY(:segments) AND kind <> 'probe'
              AND minute >= first_hour AND minute < last_hour)
         + (SELECT coalesce(sum(emitted), 0) FROM rollups_1m, span
            WHERE stream_id = :stream_id AND segment = ANY(:segments) AND kind <> 'probe'
              AND minute >= first AND minute < least(first_hour, last))
         + (SELECT coalesce(sum(emitted), 0) FROM rollups_1m, span
            WHERE stream_id = :stream_id AND segment = ANY(:segments) AND kind <> 'probe'
              AND minute >= greatest(first_hour, last_hour) AND minute < last)
         + (SELECT coalesce(sum(emitted), 0) FROM records
            WHERE stream_id = :stream_id AND segment = ANY(:segments) AND kind <> 'probe'
              AND ended_at >= :since AND ended_at < least((SELECT first FROM span), :until))
         + (SELECT coalesce(sum(emitted), 0) FROM records
            WHERE stream_id = :stream_id AND segment = ANY(:segments) AND kind <> 'probe'
              AND ended_at >= (SELECT greatest(first, last) FROM span) AND ended_at < :until)
    """
)


def _emitted_since_change(session: Session, incident: Incident, last_record_at: datetime | None) -> int:
    """In the changed segments, up to this time of the source's clock, or to the stream's newest record, but
    in each from its own change on, and no longer than until it was over there: whole hours and minutes by
    the rollups, the rest by records. Those of hours are kept for longest: of an incident that lasted longer
    than the others are kept, the part of its first hour is not known any more."""
    if last_record_at is None:
        newest = select(Stream.last_seen_at).where(Stream.id == incident.stream_id)
        last_record_at = session.scalars(newest).one()
    ends = {each.segment: each.back_at for each in over_by_now(incident.segments)}
    of_span = defaultdict(list)
    for name, since in changed_since(incident.segments, incident.change_point_at).items():
        of_span[since, ends.get(name) or last_record_at].append(name)
    tokens = 0
    for (since, end), names in of_span.items():
        values = {
            "stream_id": incident.stream_id,
            "segments": names,
            "since": since,
            "until": end + timedelta(microseconds=1),
        }
        tokens += int(session.execute(_EMITTED, values).scalar_one())
    return tokens


def raise_severity(
    session: Session, incident: Incident, severity: Severity, reason: str, at: datetime
) -> bool:
    """Makes an incident graver, with the reason in its history; False where it is over, or as grave."""
    query = select(Incident.state, Incident.severity).where(Incident.id == incident.id).with_for_update()
    state, present = session.execute(query).one()
    if state == "resolved" or not is_graver(severity, present):
        return False
    incident.severity = severity
    session.flush()
    same = cast("State", state)
    _add_transition(session, incident.id, Transition(same, same, reason, at), severity)
    return True


def note(session: Session, incident: Incident, reason: str, at: datetime) -> None:
    """Writes what happened into the history of an incident, whose state and severity stay."""
    same = cast("State", incident.state)
    session.flush()
    _add_transition(session, incident.id, Transition(same, same, reason, at), None)


def accept_level(session: Session, incident_id: UUID, reason: str, at: datetime) -> Incident:
    """Resolves one incident because its new level is normal; the next fold of the stream reads that.

    Raises NotFound, IllegalTransition (it is resolved already), Conflict (the detector did not open it),
    BadInput (empty reason).
    """
    if not reason.strip():
        raise BadInput("reason: is empty; say why the new level is normal", field="reason")
    told = f"the operator accepted the new level as normal: {reason.strip()}"
    incident = move(session, incident_id, "resolved", told, at)
    if not incident.evidence.is_of_alarm:
        raise Conflict(
            f"incident {incident_id} was not opened by the detector, whose baseline is of the new level "
            "already: there is nothing to learn anew; resolve it"
        )
    incident.level_accepted = True
    session.flush()
    return incident


def take_as_usual(session: Session, incident_id: UUID, reason: str, at: datetime) -> Incident:
    """Resolves one incident because what it repeats is usual; the next fold of the stream reads that.

    Raises NotFound, IllegalTransition (it is resolved already), Conflict (it repeats none before it, or has
    turned out to differ from it), BadInput (empty reason).
    """
    if not reason.strip():
        raise BadInput("reason: is empty; say why it is usual", field="reason")
    incident, _ = find(session, incident_id)
    repeats = incident.evidence.repeats
    told = f"the operator said that it is usual{f' {repeats.when}' if repeats else ''}: {reason.strip()}"
    incident = move(session, incident_id, "resolved", told, at)
    if repeats is None:
        raise Conflict(
            f"incident {incident_id} repeats none before it, of a day or a week ago: accept its level, "
            "or resolve it"
        )
    if repeats.differs is not None:
        raise Conflict(f"incident {incident_id} is not like the one before it: {repeats.differs}")
    incident.evidence = replace(incident.evidence, repeats=replace(repeats, usual=True))
    session.flush()
    return incident


def decision_on(session: Session, stream_id: int, direction: str) -> tuple[Decision, tuple[str, ...]]:
    """On the stream's newest incident of this direction, which is resolved, and its segments."""
    query = (
        select(Incident)
        .where(Incident.stream_id == stream_id, Incident.direction == direction)
        .order_by(Incident.opened_seq.desc())
        .limit(1)
    )
    newest = session.scalar(query)
    if newest is None:
        return "over", ()
    decision: Decision = "over"
    if newest.level_accepted or newest.evidence.is_return:
        decision = "new_normal"
    elif newest.evidence.repeats is not None and newest.evidence.repeats.usual:
        decision = newest.evidence.repeats.cycle
    return decision, names_of(newest.segments)


def resolved_since(session: Session, stream_id: int, direction: str, oldest: datetime) -> Sequence[Incident]:
    """Of this stream and direction, whose change is no older; newest first."""
    query = (
        select(Incident)
        .where(Incident.stream_id == stream_id, Incident.direction == direction)
        .where(Incident.state == "resolved", Incident.change_point_at >= oldest)
        .order_by(Incident.opened_seq.desc())
    )
    return session.scalars(query).all()


def accepted_since(session: Session, stream_id: int, since: datetime) -> bool:
    """Whether an operator has accepted a new level of this stream as normal."""
    query = select(Incident.id).where(
        Incident.stream_id == stream_id, Incident.level_accepted, Incident.resolved_at > since
    )
    return session.scalar(query.limit(1)) is not None


def _add_transition(
    session: Session, incident_id: UUID, step: Transition, severity: str | None = None
) -> None:
    session.add(IncidentTransition(incident_id=incident_id, severity=severity, **asdict(step)))
    session.flush()


def to_examine(session: Session) -> list[UUID]:
    """Those that nobody is told of before they are examined, oldest first; then unresolved ones that were
    told without it, because it failed or took too long, or an older version opened them."""
    undiagnosed = Incident.diagnosis.is_(None) | (Incident.diagnosis == JSON.NULL)
    query = select(Incident.id).where(
        Incident.awaits_examination | (undiagnosed & (Incident.state != "resolved"))
    )
    return list(session.scalars(query.order_by(Incident.awaits_examination.desc(), Incident.opened_at)))


def awaiting_for(
    session: Session, patience: timedelta, now: datetime, *, locked: bool = False
) -> list[Incident]:
    """Those that await their examination for so long. So do those opened later than now by as much: the clock
    was set back, so that it is not known for how long. `locked`: but for what somebody else has locked."""
    is_over = or_(Incident.opened_at <= now - patience, Incident.opened_at > now + patience)
    query = select(Incident).where(Incident.awaits_examination, is_over).order_by(Incident.opened_at)
    return list(session.scalars(query.with_for_update(skip_locked=True) if locked else query))


def lock(session: Session, incident_id: UUID) -> Incident | None:
    """As it is now, also where this session has read it before, and nobody else changes it before this
    transaction ends."""
    query = select(Incident).where(Incident.id == incident_id).with_for_update()
    return session.scalar(query, execution_options={"populate_existing": True})


def end_wait(session: Session, incident: Incident, severity: Severity) -> None:
    """An incident that awaits its examination gets its first severity, also in its history."""
    incident.severity, incident.awaits_examination = severity, False
    session.flush()
    opening = update(IncidentTransition).where(
        IncidentTransition.incident_id == incident.id, IncidentTransition.from_state.is_(None)
    )
    session.execute(opening.values(severity=severity))


def announce(
    session: Session,
    incident_id: UUID,
    destinations: Collection[str],
    event: str,
    severity: str,
    at: datetime,
) -> None:
    """One row per destination; what is already there stays as it is."""
    if not destinations:
        return
    same = {"incident_id": incident_id, "event": event, "severity": severity, "created_at": at}
    rows = [{**same, "destination": destination} for destination in destinations]
    session.execute(insert(Notification).values(rows).on_conflict_do_nothing())


def announce_open(session: Session, destination: str, at: datetime) -> bool:
    """Every page that is not over, to a place that was told of none of it: say as it is new in the
    settings. Whether that is all: what somebody else has locked is left for another call."""
    told = exists().where(
        Notification.incident_id == Incident.id,
        Notification.destination == destination,
        Notification.event == "firing",
    )
    untold = (
        select(Incident)
        .where(Incident.state != "resolved", Incident.severity != "info", ~Incident.awaits_examination, ~told)
        .order_by(Incident.opened_at)
    )
    # Locked: one that ends meanwhile is told of with its end, or not at all.
    for incident in session.scalars(untold.with_for_update(read=True, skip_locked=True)).all():
        announce(session, incident.id, [destination], "firing", incident.severity, at)
    return session.scalar(untold.limit(1)) is None


def announce_offered(
    session: Session, destination: str, offered: Collection[tuple[UUID, str, str]], at: datetime
) -> None:
    """What (incident, event, severity) a place was offered that has no row of it, say as it is new in the
    settings. Not of an incident that became graver since: that is announced as well, and only that is owed
    now."""
    of_place = select(Notification.incident_id, Notification.event, Notification.severity).where(
        Notification.destination == destination,
        Notification.incident_id.in_({incident_id for incident_id, _, _ in offered}),
    )
    known = {(row.incident_id, row.event, row.severity) for row in session.execute(of_place)}
    missing = [one for one in offered if one not in known]
    if not missing:
        return
    # Locked: what somebody else has locked, who may be raising its severity, is left for another call.
    present = select(Incident.id, Incident.severity).where(
        Incident.id.in_({incident_id for incident_id, _, _ in missing})
    )
    rows = session.execute(present.with_for_update(read=True, skip_locked=True))
    severity_of = {row.id: row.severity for row in rows}
    for incident_id, event, severity in missing:
        if severity_of.get(incident_id) == severity:
            announce(session, incident_id, [destination], event, severity, at)


def announce_resolution(session: Session, incident: Incident, at: datetime) -> None:
    """To every place to which the incident was announced."""
    values = {"incident_id": incident.id, "severity": incident.severity, "at": at}
    session.execute(_ANNOUNCE_RESOLUTION, values)


def find(session: Session, incident_id: UUID) -> tuple[Incident, Stream]:
    """One incident with its stream. Raises NotFound."""
    row = session.execute(
        select(Incident, Stream)
        .join(Stream, Stream.id == Incident.stream_id)
        .where(Incident.id == incident_id)
    ).one_or_none()
    if row is None:
        raise NotFound(f"there is no incident {incident_id}")
    return row[0], row[1]


def of_stream(session: Session, stream_id: int) -> list[Incident]:
    """Those that are not resolved: at most one per direction, of acceptance and of goodput."""
    query = select(Incident).where(Incident.stream_id == stream_id, Incident.state != "resolved")
    return list(session.scalars(query))


def unresolved_of(session: Session, stream_id: int, direction: str | None = None) -> list[Incident]:
    """Incidents of a stream that are not resolved, locked: at most one per direction."""
    query = select(Incident).where(Incident.stream_id == stream_id, Incident.state != "resolved")
    query = query.with_for_update()
    if direction is not None:
        query = query.where(Incident.direction == direction)
    return list(session.scalars(query))


def list_page(
    session: Session,
    *,
    limit: int,
    cursor: Cursor | None = None,
    state: str | None = None,
    wanted: RowFilter = EVERYTHING,
) -> list[tuple[Incident, Stream]]:
    """Newest first, at most `limit`, after the cursor, by the time at which they were opened.

    `state` "unresolved" means any but resolved; a segment is wanted where it is among the changed ones.
    """
    query = select(Incident, Stream).join(Stream, Stream.id == Incident.stream_id)
    query = query.where(*wanted.at(Incident.opened_at), *wanted.of(Stream.server, Stream.target))
    if state == "unresolved":
        query = query.where(Incident.state != "resolved")
    elif state is not None:
        query = query.where(Incident.state == state)
    if wanted.streams:
        query = query.where(Incident.stream_id.in_(wanted.streams))
    if wanted.segments:
        query = query.where(or_(*(Incident.segments.contains([{"segment": s}]) for s in wanted.segments)))
    query = newest_first(query, Incident.opened_at, Incident.id, limit=limit, cursor=cursor)
    return [(incident, stream) for incident, stream in session.execute(query)]


def falls_to_act_on(session: Session, *, unscored: bool, retrainable: bool) -> list[tuple[Incident, Stream]]:
    """Falls that are not resolved, newest first: `unscored`, those with captured requests that their newest
    scoring did not know; `retrainable`, those whose diagnosis calls for a new draft. Mostly there is none, so
    that a look every few seconds reads no documents."""
    diagnosis = type_coerce(Incident.diagnosis, JSONB)
    scored = func.coalesce(ServingScoresRow.captures, 0)
    wanted = [
        *([diagnosis["seen"]["captures"].as_integer() > scored] if unscored else []),
        *([diagnosis["retrain"].as_boolean()] if retrainable else []),
    ]
    if not wanted:
        return []
    query = (
        select(Incident, Stream)
        .join(Stream, Stream.id == Incident.stream_id)
        .outerjoin(ServingScoresRow, ServingScoresRow.incident_id == Incident.id)
        .where(Incident.state != "resolved", Incident.direction == "down", or_(*wanted))
        .order_by(Incident.opened_at.desc(), Incident.id.desc())
    )
    return [(incident, stream) for incident, stream in session.execute(query)]


def transitions(session: Session, incident_id: UUID) -> Sequence[IncidentTransition]:
    """Oldest first."""
    return session.scalars(
        select(IncidentTransition)
        .where(IncidentTransition.incident_id == incident_id)
        .order_by(IncidentTransition.id)
    ).all()


def severities(session: Session, incident_ids: Collection[UUID]) -> dict[UUID, list[tuple[str, datetime]]]:
    """Of each incident (severity, since when), in their order; never empty."""
    query = select(IncidentTransition).where(
        IncidentTransition.incident_id.in_(incident_ids), IncidentTransition.severity.is_not(None)
    )
    found: dict[UUID, list[tuple[str, datetime]]] = defaultdict(list)
    for row in session.scalars(query.order_by(IncidentTransition.id)):
        found[row.incident_id].append((str(row.severity), row.at))
    return found


def unresolved_counts(session: Session) -> list[tuple[str, str, int]]:
    """(severity, direction, how many) of the incidents that are not resolved; without those that await their
    examination, whose severity is not known."""
    rows = session.execute(
        select(Incident.severity, Incident.direction, func.count())
        .where(Incident.state != "resolved", ~Incident.awaits_examination)
        .group_by(Incident.severity, Incident.direction)
    )
    return [(severity, direction, count) for severity, direction, count in rows]


def count_unresolved(session: Session) -> int:
    """As `list_page` lists them."""
    return session.scalar(select(func.count()).where(Incident.state != "resolved")) or 0


def opened_by_detector(session: Session) -> list[tuple[int, IncidentEvidence]]:
    """(stream id, evidence) of the unresolved incidents that an alarm of the detector opened."""
    query = select(Incident.stream_id, Incident.evidence).where(
        Incident.state != "resolved", Incident.evidence.has_key("false_alarm_every")
    )
    return [(row.stream_id, row.evidence) for row in session.execute(query)]


def in_window(
    session: Session, stream_ids: Sequence[int], since: datetime, until: datetime
) -> list[Incident]:
    """Incidents of these streams that began before `until` and were not resolved before `since`, oldest
    first."""
    return list(
        session.scalars(
            select(Incident)
            .where(Incident.stream_id.in_(stream_ids), Incident.change_point_at < until)
            .where(Incident.resolved_at.is_(None) | (Incident.resolved_at >= since))
            .order_by(Incident.opened_at)
        )
    )


def alerting(session: Session, resolved_since: datetime, peer: str) -> list[tuple[Incident, Stream]]:
    """What an Alertmanager peer has to hear: pages that are not over, pages resolved after `resolved_since`,
    and older resolutions that the peer has not taken yet."""
    pending: Any = text(
        "incidents.id IN (SELECT incident_id FROM notifications "
        "WHERE destination = :peer AND event = 'resolved' AND delivered_at IS NULL)"
    ).bindparams(peer=peer)
    query = (
        select(Incident, Stream)
        .join(Stream, Stream.id == Incident.stream_id)
        .where(Incident.severity != "info")
        .where((Incident.state != "resolved") | (Incident.resolved_at >= resolved_since) | pending)
        .order_by(Incident.opened_at, Incident.id)
    )
    return [(incident, stream) for incident, stream in session.execute(query)]


def note_comparison(session: Session, stream_id: int, ready_seq: int, reference_since: datetime) -> None:
    """By the newest baseline of the stream: one noted before is replaced."""
    values = {"ready_seq": ready_seq, "reference_since": reference_since, "is_beside": False}
    statement = insert(AwaitedComparison).values(stream_id=stream_id, **values)
    session.execute(statement.on_conflict_do_update(index_elements=["stream_id"], set_=values))


def awaited_comparisons(session: Session) -> Sequence[AwaitedComparison]:
    """In order of streams."""
    return session.scalars(select(AwaitedComparison).order_by(AwaitedComparison.stream_id)).all()


def awaits_comparison(session: Session, stream_id: int) -> bool:
    """Not where all that is awaited is the silence of another stream, served beside this one."""
    awaited = session.get(AwaitedComparison, stream_id)
    return awaited is not None and not awaited.is_beside


def await_silence_beside(session: Session, one: AwaitedComparison) -> None:
    """Unless a newer baseline has been noted meanwhile."""
    session.execute(
        update(AwaitedComparison)
        .where(AwaitedComparison.stream_id == one.stream_id, AwaitedComparison.ready_seq == one.ready_seq)
        .values(is_beside=True)
    )


def forget_comparison(session: Session, one: AwaitedComparison) -> None:
    """Unless a newer baseline has been noted meanwhile."""
    session.execute(
        delete(AwaitedComparison).where(
            AwaitedComparison.stream_id == one.stream_id, AwaitedComparison.ready_seq == one.ready_seq
        )
    )
