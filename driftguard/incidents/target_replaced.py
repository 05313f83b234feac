"""A new target behind an old draft, or another draft version that nobody announced: a new stream, so the
detector begins anew and would see nothing.

When a baseline of the new stream is ready, the fold notes it, and its acceptance is compared with the stream
before: the same server and method, with another target or draft version. A fall opens an incident; where the
target was replaced the draft is retrained against the new one. Where the stream before had fallen already, it
is compared as it was before that: its incident ends, and the new one, which refers to it, goes on. A stream
that still sends was replaced by nothing: two targets, or two drafts, served side by side are not compared
until the one before falls silent, as after a canary.

A segment whose K changed has a new baseline as well, in the same stream. Its first draft token, which K does
not change, is compared with that before. So is a segment that got another name (`renamed_segment.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID, uuid5

from sqlalchemy.orm import Session

from driftguard.detection import OF_WINDOWS, WINDOW_REFERENCE, BaselineReady, BaselineReason
from driftguard.diagnosis import comparisons
from driftguard.diagnosis.comparisons import LEVEL, Rate, acceptance_of
from driftguard.incident_lifecycle import formula_slowdown
from driftguard.incidents import like_with_like, renamed_segment
from driftguard.incidents.opening import open_incident
from driftguard.records.documents.incident import ChangedSegment, GoesOn, IncidentEvidence, Rollback
from driftguard.records.positions import ACCEPTANCE, Positions
from driftguard.store import (
    acceptance_levels,
    examination_evidence,
    folding,
    incidents,
    renamed_segments,
    silences,
)
from driftguard.store.acceptance_levels import AcceptanceLevel, Span
from driftguard.store.by_arrival import LeftOut
from driftguard.store.database import CHORE, Database
from driftguard.store.examination_evidence import FirstRecord
from driftguard.store.renamed_segments import Likeness
from driftguard.store.streams import get_stream, has_older_segments
from driftguard.store.tables import ABOVE_EVERY_SEQ, AwaitedComparison, Incident, Stream

LOOK_BACK: Final = timedelta(days=7)
K: Final = "num_speculative_tokens"
LEAST_REQUESTS: Final = 30  # of a segment, under either target
# A rollout may serve both for so long. The status says by the same span which of two targets is in service.
IN_SERVICE_WITHIN: Final = timedelta(minutes=5)
USUAL_SILENCES: Final = 3  # so many times as long a silence is none of those that are usual
_NAMESPACE: Final = UUID("a4f1c9a2-34c5-4a55-9d0e-6a2f6f0f6f9d")  # the same incident, however often folded

Fallen = tuple[str, Rate, Rate]  # segment, under the target before, under this one


def note_baseline(session: Session, stream: Stream, ready: BaselineReady) -> None:
    """Notes that the stream is to be compared, if there is one before it. Called in the fold: the comparison
    itself reads history, and therefore happens outside of it."""
    is_new = ready.why.reason is BaselineReason.FIRST
    may_be_renamed = is_new and has_older_segments(session, stream.id, ready.segment)
    k_changed = any(setting.name == K for setting in ready.why.changed)
    if may_be_renamed or k_changed or _before(session, stream):
        since = datetime.fromtimestamp(ready.since, UTC)
        incidents.note_comparison(session, stream.id, ready.ordinal, since)


def _before(session: Session, stream: Stream) -> list[Stream]:
    return examination_evidence.streams_before(session, stream, stream.first_seen_at - LOOK_BACK)


@dataclass(frozen=True, slots=True)
class _Past:
    """The stream whose place this one took. `heard_at`: its newest request that arrived since this one began,
    or else this one's beginning; by the server's clock. `taken`: this one's first request in its place; None
    while both are served side by side."""

    stream: Stream
    heard_at: datetime
    taken: FirstRecord | None


def _past(session: Session, stream: Stream) -> _Past | None:
    """The one heard last where every stream before went on for longer than a rollout takes. Beside one that
    went on, another was replaced only if it was heard until then: what fell silent long before has a
    successor.

    What ended later counts only if it arrived later as well, so that a server whose clock was set back as it
    started with another target is not taken for two side by side.
    """
    before = _before(session, stream)
    begun = examination_evidence.first_record(session, stream.id) if before else None
    if begun is None:
        return None
    beside: _Past | None = None
    for past in before:
        heard_at = examination_evidence.heard_since(session, past.id, begun) or begun.at
        if heard_at <= begun.at + IN_SERVICE_WITHIN:
            if beside is None or _newest(past) >= begun.at - IN_SERVICE_WITHIN:
                return _Past(past, heard_at, begun)
        elif beside is None or heard_at > beside.heard_at:
            beside = _Past(past, heard_at, None)
    return replace(beside, taken=_alone_since(session, beside, stream, begun)) if beside else None


def _alone_since(session: Session, beside: _Past, stream: Stream, begun: FirstRecord) -> FirstRecord | None:
    """None while the stream before, served beside this one since `begun`, is not silent for longer than
    usual: where little is asked, each of two falls silent now and then."""
    if _newest(stream) <= beside.heard_at + IN_SERVICE_WITHIN:
        return None
    alone = examination_evidence.first_record(session, stream.id, beside.heard_at)
    since = min(beside.heard_at - begun.at, LOOK_BACK)
    source = silences.Source((beside.stream.id,), beside.heard_at)
    (usual,) = silences.longest(session, [source], {since: timedelta()})
    least = max(IN_SERVICE_WITHIN, USUAL_SILENCES * usual)
    return alone if alone and _newest(stream) > alone.at + least else None


def _newest(stream: Stream) -> datetime:
    """When its newest request ended, by the server's clock."""
    return stream.traffic_ended_at or stream.last_seen_at


def _may_still_send(past: _Past, stream: Stream, now: datetime) -> bool:
    """Whether the stream before may be heard again: it has not been silent for long while this one sends."""
    ended_at, arrived_at = stream.traffic_ended_at, stream.traffic_arrived_at
    if ended_at is None or arrived_at is None or now - arrived_at > IN_SERVICE_WITHIN:
        return False  # this one fell silent itself, so that waiting tells nothing more
    return ended_at <= past.heard_at + IN_SERVICE_WITHIN


def compare(database: Database, awaited: AwaitedComparison, minimum_drop: float, now: datetime) -> bool:
    """Opens an incident, which awaits its examination, where the stream accepts less than the one before. The
    fold waits only while that is stored. False, and to be called again, while it is too early to say whether
    the stream before still sends. Raises DatabaseUnavailable."""
    with database.session(CHORE) as session:
        stream = get_stream(session, awaited.stream_id)
        past = _past(session, stream) if stream else None
        is_beside = past is not None and past.taken is None
        if stream and past and not is_beside and _may_still_send(past, stream, now):
            return False
        if stream and is_beside and awaited.is_beside and now - stream.last_seen_at <= LOOK_BACK:
            return False
        found = _fall(session, awaited, stream, past, minimum_drop, now) if stream and past else None
        renamed: Sequence[renamed_segment.Renamed] = ()
        if not awaited.is_beside:  # else that has been compared
            found = found or _fall_across_settings(session, awaited, minimum_drop, now)
            renamed = renamed_segment.fallen(session, awaited, minimum_drop)
    with database.session(CHORE) as session:
        if found or renamed:
            folding.lock_fold(session)  # before any row: the fold itself notes comparisons
        if found is not None:
            open_incident(session, *found)
            _supersede(session, found[0], now)
        if renamed:
            renamed_segment.report(session, awaited, renamed, now)
        if is_beside and not awaited.is_beside:
            incidents.await_silence_beside(session, awaited)
            return False
        incidents.forget_comparison(session, awaited)
    return True


def fallen_segments(
    before: Sequence[AcceptanceLevel],
    after: Sequence[AcceptanceLevel],
    minimum_drop: float,
    window_inflation: float | None = None,
) -> list[Fallen]:
    """Segments that accept less under the new target, by at least `minimum_drop` and shown at 1%.

    Welch's test per segment with Bonferroni's correction. Assumption: independent requests; where sessions
    dominate, the level does not hold. Windows of a counter vary `window_inflation` times as much, and how far
    their tasks wander shows only in time: of n of them a change counts from OF_WINDOWS.deviations / n
    standard deviations on, as in the detector.
    """
    least = LEAST_REQUESTS if window_inflation is None else WINDOW_REFERENCE
    inflation = 1.0 if window_inflation is None else window_inflation
    known = {level.segment: level for level in before if level.requests >= least}
    pairs = [
        (known[level.segment], level) for level in after if level.segment in known and level.requests >= least
    ]
    found = []
    for old, new in pairs:
        rates = _rate(old, inflation), _rate(new, inflation)
        drop = minimum_drop
        if window_inflation is not None:
            drop = max(drop, OF_WINDOWS.deviations / new.requests * math.sqrt(old.variance))
        is_shown = comparisons.difference(*rates).p_value <= LEVEL / len(pairs)
        if new.mean <= old.mean - drop and is_shown:
            found.append((new.segment, *rates))
    return found


def _rate(level: AcceptanceLevel, inflation: float = 1.0) -> Rate:
    """Of requests that weigh the same: the mean of accepted / drafted."""
    error = math.sqrt(inflation * level.variance / level.requests)
    return Rate(level.requests, level.requests, level.mean, error)


def _window_inflation(session: Session, stream_id: int) -> float | None:
    """None of requests."""
    is_of_windows = acceptance_levels.kind_of(session, stream_id) == "window"
    return folding.variance_inflation(session, stream_id) if is_of_windows else None


def _fall(
    session: Session,
    awaited: AwaitedComparison,
    stream: Stream,
    before: _Past,
    minimum_drop: float,
    now: datetime,
) -> tuple[Incident, str] | None:
    """The incident to store and why, if the stream accepts less than the one before, whose place it took."""
    past, first = before.stream, before.taken
    if first is None:
        return None
    kinds = {acceptance_levels.kind_of(session, one.id) for one in (past, stream)}
    if len(kinds) > 1:
        return None
    of_kind = _alike_windows if kinds == {"window"} else _alike
    alike = of_kind(session, past, stream, max(awaited.reference_since, first.at) - LOOK_BACK)
    inflation = _window_inflation(session, past.id)
    found = fallen_segments(alike.before, alike.after, minimum_drop, inflation)
    if not found:
        return None
    name = f"{stream.id}/{awaited.ready_seq}"
    incident = _incident(session, awaited, first, found, now, name=name, positions=alike.positions)
    incident.segments = tuple(
        replace(each, renamed_from=(alike.renamed[each.segment],)) if each.segment in alike.renamed else each
        for each in incident.segments
    )
    incident.interval_start_at = min(past.last_seen_at, first.at)
    high, low = incident.acceptance_before, incident.acceptance_after
    k = incident.evidence.num_speculative_tokens if alike.positions == "all" else None
    earlier = _open_fall(session, past, incident.segments)
    can_go_back = past.target == stream.target and earlier is None
    incident.evidence = replace(
        incident.evidence,
        predecessor_stream_id=past.id if earlier is None else None,
        slowdown_formula=formula_slowdown(high, low, k) if k else None,
        rollback=Rollback(past.draft_version, None, by_hand=True) if can_go_back else None,
        goes_on=GoesOn(earlier.id, past.id, earlier.change_point_seq) if earlier else None,
    )
    names = "".join(
        f"segment {each.segment} is taken for {each.renamed_from[0]}; "
        for each in incident.segments
        if each.renamed_from
    )
    fell = f"{ACCEPTANCE[alike.positions]} fell from {high:.2f} to {low:.2f}"
    return incident, f"{_replaced(past, stream, earlier)}: {names}{fell}"


def _replaced(past: Stream, stream: Stream, earlier: Incident | None) -> str:
    """In words; `earlier`: the fall that goes on."""
    if earlier is not None:
        return (
            f"{past.target} with draft {past.draft_version} was replaced by {stream.target} with draft "
            f"{stream.draft_version}, and the fall of incident {earlier.id} goes on"
        )
    if past.target == stream.target:
        return f"the draft version {past.draft_version} was replaced by {stream.draft_version}"
    return f"the target {past.target} was replaced by {stream.target}, and the draft fits it less"


def _open_fall(session: Session, past: Stream, fallen: Sequence[ChangedSegment]) -> Incident | None:
    """That of the stream before, where one of these segments had fallen already."""
    names = {name for each in fallen for name in each.renamed_from or (each.segment,)}
    for incident in incidents.of_stream(session, past.id):
        open_names = {each.segment for each in incident.segments if each.back_at is None}
        if incident.direction == "down" and names & open_names:
            return incident
    return None


def _supersede(session: Session, incident: Incident, now: datetime) -> None:
    """Ends the incident that this one goes on from, unless a retraining is at it."""
    opened, goes_on = incidents.lock(session, incident.id), incident.evidence.goes_on
    earlier = incidents.lock(session, goes_on.incident_id) if goes_on is not None else None
    if opened is None or earlier is None or earlier.state == "resolved" or earlier.is_left_to_retraining:
        return
    reason = f"the fall goes on with another target or draft: incident {opened.id}"
    incidents.move(session, earlier.id, "resolved", reason, now)


def _fall_across_settings(
    session: Session, awaited: AwaitedComparison, minimum_drop: float, now: datetime
) -> tuple[Incident, str] | None:
    """The incident to store and why, if the first draft token is accepted less since K changed. Before and
    since are told by the order of arrival: a server that starts with another K may start with another clock.
    """
    first = examination_evidence.record_at(
        session, awaited.stream_id, awaited.reference_since, awaited.ready_seq
    )
    if first is None:
        return None
    oldest = awaited.reference_since - LOOK_BACK
    spans = [Span(0, first.seq, oldest), Span(first.seq, ABOVE_EVERY_SEQ, oldest)]
    told = [acceptance_levels.told_k(session, awaited.stream_id, span) for span in spans]
    if told[0] == told[1]:
        return None
    falls = like_with_like.falls_since(session, awaited.stream_id, oldest)
    later = like_with_like.first_falls(falls, over_after=first.at)
    fallen = like_with_like.until_back(falls)
    withouts = fallen, [*fallen, *(LeftOut(name, fell, None) for name, fell in later.items())]
    sides = [
        acceptance_levels.of_span(session, awaited.stream_id, span, by_first=True, without=without)
        for span, without in zip(spans, withouts, strict=True)
    ]
    found = fallen_segments(sides[0], sides[1], minimum_drop, _window_inflation(session, awaited.stream_id))
    if not found:
        return None
    name = f"{awaited.stream_id}/{awaited.ready_seq}"
    incident = _incident(session, awaited, first, found, now, name=name, positions="first")
    return incident, (
        "the number of draft tokens changed, and the first of them is accepted less as well: "
        f"{ACCEPTANCE['first']} fell from {incident.acceptance_before:.2f} to {incident.acceptance_after:.2f}"
    )


def _incident(
    session: Session,
    awaited: AwaitedComparison,
    first: FirstRecord,
    found: Sequence[Fallen],
    now: datetime,
    *,
    name: str,
    positions: Positions = "all",
) -> Incident:
    """A fall since the record `first`. `name`: the same for the same incident, however often it is folded."""
    before, after = _means(found)
    return Incident(
        id=uuid5(_NAMESPACE, name),
        stream_id=awaited.stream_id,
        direction="down",
        opened_at=now,
        opened_seq=awaited.ready_seq,
        change_point_seq=first.seq,
        change_point_at=first.at,
        interval_start_at=first.at,
        interval_end_at=first.at,
        acceptance_before=before,
        acceptance_after=after,
        segments=tuple(
            ChangedSegment(segment, acceptance_of(old, positions), acceptance_of(new, positions))
            for segment, old, new in found
        ),
        evidence=IncidentEvidence(
            num_speculative_tokens=examination_evidence.usual_k(session, awaited.stream_id, first.at)
        ),
    )


def _means(found: Sequence[Fallen]) -> tuple[float, float]:
    """Before and after, in the mix of segments after the change."""
    total = sum(new.requests for _, _, new in found)
    return (
        sum(old.rate * new.requests for _, old, new in found) / total,
        sum(new.rate * new.requests for _, _, new in found) / total,
    )


@dataclass(frozen=True, slots=True)
class _Alike:
    """What the segments of two streams accepted, by their names in the second one. `renamed`: new name -> old
    name, of those that changed it."""

    before: Sequence[AcceptanceLevel]
    after: Sequence[AcceptanceLevel]
    positions: Positions
    renamed: Mapping[str, str]


def _alike(session: Session, past: Stream, stream: Stream, oldest: datetime) -> _Alike:
    """At equal K and acceptance rule; by the first draft token where a segment has no equal ones."""
    known = [renamed_segments.appeared(session, one.id) for one in (past, stream)]
    renamed = renamed_segment.of_next_stream(session, past.id, stream.id)
    older = {name: name for name in known[0].keys() & known[1]} | renamed
    go_on = _that_go_on(session, past, stream)
    before = like_with_like.levels(session, past.id, set(older.values()), oldest, go_on)
    after = like_with_like.levels(session, stream.id, older.keys(), oldest, are_newer=True)
    equal = {new: like_with_like.at_equal_settings(before[old], after[new]) for new, old in older.items()}
    by_first = {new: like_with_like.by_first(before[old], after[new]) for new, old in older.items()}
    is_equal = all(equal[new] or not by_first[new] for new in older)
    pairs = {
        new: pair
        for new, pair in (equal if is_equal else by_first).items()
        if pair and (new not in renamed or renamed_segment.lengths_alike(*pair))
    }
    return _Alike(
        [_level(new, old) for new, (old, _) in pairs.items()],
        [_level(new, own) for new, (_, own) in pairs.items()],
        "all" if is_equal else "first",
        renamed,
    )


def _alike_windows(session: Session, past: Stream, stream: Stream, oldest: datetime) -> _Alike:
    """Before a fall that is open, or goes on; by the first draft token where K is another or not told."""
    falls = [
        each
        for each in (*incidents.of_stream(session, past.id), *_that_go_on(session, past, stream))
        if each.direction == "down"
    ]
    until = min((each.change_point_seq for each in falls), default=ABOVE_EVERY_SEQ)
    since = min((each.change_point_at - LOOK_BACK for each in falls), default=oldest)
    own_falls = like_with_like.falls_since(session, stream.id, oldest)
    fell = min(like_with_like.first_falls(own_falls).values(), default=ABOVE_EVERY_SEQ)
    sides = (past.id, Span(0, until, min(since, oldest))), (stream.id, Span(0, fell, oldest))
    ks = [acceptance_levels.told_k(session, *side) for side in sides]
    by_first = ks[0] != ks[1] or len(ks[0]) != 1
    without = like_with_like.until_back(like_with_like.falls_since(session, past.id, oldest))
    before = acceptance_levels.of_span(session, *sides[0], by_first=by_first, without=without)
    after = acceptance_levels.of_span(session, *sides[1], by_first=by_first)
    return _Alike(before, after, "first" if by_first else "all", {})


def _that_go_on(session: Session, past: Stream, stream: Stream) -> list[Incident]:
    """Falls of the stream before that are resolved, as they go on in this one."""
    return [
        incidents.find(session, goes_on.incident_id)[0]
        for incident in incidents.of_stream(session, stream.id)
        if (goes_on := incident.evidence.goes_on) is not None and goes_on.stream_id == past.id
    ]


def _level(name: str, known: Likeness) -> AcceptanceLevel:
    return AcceptanceLevel(name, known.requests, known.mean, known.variance)
