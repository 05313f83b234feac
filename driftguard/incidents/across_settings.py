"""K or other settings of the requests change while a fall is open: between which levels its end is looked for
from then on.

What the detector and the comparisons know is the acceptance at the settings of the fall. At another K all
draft positions together accept another part, without any drift; the first draft token does not depend on how
many follow it. So where counts per position are given, the end is looked for between what it accepted before
the fall and during it.

Where they are not given, nothing tells what the segment would accept at this K without the fall: how
acceptance falls off from one draft token to the next depends on how requests differ. The end is then looked
for halfway between what the segment accepts as K has changed and as much more as it had fallen.
Assumptions of that: the fall goes on as K changes, and costs as much of the acceptance at either K. A fall
that was mended in the same moment is not seen to be over: the history of the incident says so. K set back
brings the level before the fall back.

Another temperature or acceptance rule moves the first draft token too, and verification by blocks all others.
Where none of the newest requests has the settings of the fall, and the detector has found a rise above what
it learned meanwhile, the end is looked for halfway between that and as much more as the segment had fallen,
on the same assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.orm import Session

from driftguard.records.documents.incident import AcrossSettings, ChangedSegment
from driftguard.records.positions import Positions
from driftguard.store import acceptance_levels, incidents
from driftguard.store.acceptance_levels import LevelAtK, Span
from driftguard.store.tables import ABOVE_EVERY_SEQ, Incident

LOOK_BACK: Final = timedelta(days=7)  # before the fall
SAME_K: Final = 0.05  # part by which the draft tokens per step may differ
NEWEST_REQUESTS: Final = 100  # of a segment, to tell its K
LEAST_REQUESTS: Final = 30
FALLEN_REQUESTS: Final = 200  # of a segment, to tell what it accepts while it is fallen


def moved(session: Session, incident: Incident) -> dict[str, AcrossSettings]:
    """Of a fall that is not resolved: segment -> between which levels its end is to be looked for, of those
    that have had LEAST_REQUESTS at another K than they were judged at, or that have risen with other
    settings."""
    if incident.direction != "down":
        return {}
    return _risen(session, incident) | _at_another_k(session, incident)


def _at_another_k(session: Session, incident: Incident) -> dict[str, AcrossSettings]:
    waiting = {
        each.segment: each
        for each in incident.segments
        if each.back_at is None and judged_by(each) != "first"
    }
    newest = [
        level
        for level in acceptance_levels.newest_k(
            session,
            incident.stream_id,
            {name: named_at(incident, each) for name, each in waiting.items()},
            NEWEST_REQUESTS,
        )
        if level.requests >= LEAST_REQUESTS
        and not _drafts_as_many(known_k(session, incident, waiting[level.segment]), level)
    ]
    by_first: dict[str, AcrossSettings] = {}
    spans = {
        level.segment: (_fell_in(incident, change), span_of(incident, change))
        for level in newest
        for change in [waiting[level.segment]]
    }
    for both in set(spans.values()):
        own = [level for level in newest if spans[level.segment] == both]
        by_first |= _by_first(session, incident, own, waiting, *both)
    return by_first | _as_much_more(session, incident, newest, waiting, by_first)


def is_same_k(one: float, other: float) -> bool:
    """Of draft tokens per step."""
    return abs(one / other - 1.0) <= SAME_K


def _drafts_as_many(known: float | None, newest: LevelAtK) -> bool:
    """Whether requests were drafted by as many tokens per step as is `known`; so it is where none tells."""
    if known is None or newest.highest_k is None:
        return True
    return is_same_k(newest.drafted / newest.steps, known)


def tell(session: Session, incident: Incident, found: Mapping[str, AcrossSettings], now: datetime) -> None:
    """Of an incident, locked by the caller, that is not resolved; `found` as `moved` says."""
    for why in dict.fromkeys(map(_why, found.values())):
        own = [name for name, levels in found.items() if _why(levels) == why]
        incidents.note(session, incident, why.format(", ".join(own)), now)
    incident.segments = tuple(
        replace(each, across_settings=found[each.segment]) if each.segment in found else each
        for each in incident.segments
    )


def _why(levels: AcrossSettings) -> str:
    if levels.of_rise:
        return (
            "{} has risen, with settings that came since: the fall is over where that wins back as much as "
            "half of it"
        )
    if levels.positions == "first":
        return (
            "K has changed, in {}: whether acceptance is back is asked by the first draft token from now on"
        )
    return (
        "K has changed, in {}: no counts per position tell how much of the acceptance that is; the fall is "
        "over where as much as half of it is won back from now on, or as K is set back; resolve it if it was "
        "mended as K changed"
    )


def _risen(session: Session, incident: Incident) -> dict[str, AcrossSettings]:
    """Of segments in a rise that began later than the fall, and have none of its settings any more."""
    rises = [
        (rise, each)
        for rise in incidents.of_stream(session, incident.stream_id)
        if rise.direction == "up"
        for each in rise.segments
    ]
    waiting = {
        each.segment: each
        for each in incident.segments
        if each.back_at is None and each.across_settings is None
    }
    found = {}
    for rise, risen in rises:
        change = waiting.get(risen.segment)
        if change is None or change.after.positions != risen.after.positions:
            continue
        is_later = span_of(rise, risen).first > named_at(incident, change)
        if is_later and has_other_settings(session, incident, change):
            (before, after), (low, _) = change.levels, risen.levels
            k = known_k(session, incident, change)
            found[change.segment] = AcrossSettings(
                low + before - after, low, risen.after.positions, k, of_rise=True
            )
    return found


def has_other_settings(session: Session, incident: Incident, change: ChangedSegment) -> bool:
    """Whether its newest requests have another temperature, acceptance rule or verification than the fall."""
    return acceptance_levels.has_other_settings(
        session, incident.stream_id, change.segment, span_of(incident, change), NEWEST_REQUESTS
    )


def judged_by(change: ChangedSegment) -> Positions:
    """Which draft positions say at present whether the segment is back."""
    return change.across_settings.positions if change.across_settings else change.after.positions


def span_of(incident: Incident, change: ChangedSegment) -> Span:
    """Of the records from the segment's change up to that at which it was named."""
    at = change.since or incident.change_point_at
    if change.since_seq is None or change.named_seq is None:
        return Span(incident.change_point_seq, incident.opened_seq + 1, at - LOOK_BACK)
    return Span(change.since_seq, change.named_seq + 1, at - LOOK_BACK)


def _fell_in(incident: Incident, change: ChangedSegment) -> Span:
    """The same, of the older name in whose place the segment fell, where the incident names that."""
    names = (change.segment, *change.renamed_from)
    return min(span_of(incident, each) for each in incident.segments if each.segment in names)


def named_at(incident: Incident, change: ChangedSegment) -> int:
    """The seq of the newest record as the segment was named."""
    return span_of(incident, change).end - 1


def known_k(session: Session, incident: Incident, change: ChangedSegment) -> float | None:
    """Draft tokens per step, of which the end of the fall is asked at present."""
    if change.across_settings is not None:
        return change.across_settings.k
    if change.since_seq is None:
        return incident.evidence.num_speculative_tokens
    return acceptance_levels.k_of_span(session, incident.stream_id, change.segment, span_of(incident, change))


def _by_first(
    session: Session,
    incident: Incident,
    newest: list[LevelAtK],
    waiting: Mapping[str, ChangedSegment],
    fell_in: Span,
    span: Span,
) -> dict[str, AcrossSettings]:
    """Of the segments whose first draft token is known on both sides of the fall, which was named in the
    `span`; `fell_in`: under what name ever."""
    begun, _, oldest = span
    goes_on, earlier, usual_until = incident.evidence.goes_on, incident.stream_id, fell_in.first
    if usual_until == incident.change_point_seq:  # it did not join later
        earlier = incident.evidence.predecessor_stream_id or earlier
        if goes_on is not None:
            earlier, usual_until = goes_on.stream_id, goes_on.change_point_seq
    before = {
        level.segment: level
        for level in acceptance_levels.of_span(
            session, earlier, Span(0, usual_until, fell_in.oldest), by_first=True
        )
    }
    ks = acceptance_levels.told_k(session, incident.stream_id, span)
    fallen = {
        level.segment: level
        for level in acceptance_levels.of_span(
            session,
            incident.stream_id,
            Span(begun, ABOVE_EVERY_SEQ, oldest),
            by_first=True,
            ks=ks - {k for level in newest for k in (level.lowest_k, level.highest_k)},
            newest=FALLEN_REQUESTS,
        )
    }
    found = {}
    for level in newest:
        names = waiting[level.segment].renamed_from or (level.segment,)
        usual = [before[name].mean for name in names if name in before]
        if len(usual) == len(names) and level.segment in fallen:
            high, low = sum(usual) / len(usual), fallen[level.segment].mean
            if high > low:
                found[level.segment] = AcrossSettings(high, low, "first", level.drafted / level.steps)
    return found


def _as_much_more(
    session: Session,
    incident: Incident,
    newest: list[LevelAtK],
    waiting: Mapping[str, ChangedSegment],
    known: Mapping[str, AcrossSettings],
) -> dict[str, AcrossSettings]:
    """Of the other segments, once NEWEST_REQUESTS of them have had one K."""
    found = {}
    for level in newest:
        k = level.highest_k
        if level.segment in known or k is None or k != level.lowest_k or level.requests < NEWEST_REQUESTS:
            continue
        change = waiting[level.segment]
        before, after = change.levels
        first = acceptance_levels.first_at_k(
            session, incident.stream_id, level.segment, named_at(incident, change), k, FALLEN_REQUESTS
        )
        if first is not None:
            risen = first.mean + before - after
            found[level.segment] = AcrossSettings(risen, first.mean, "all", first.drafted / first.steps)
    return found
