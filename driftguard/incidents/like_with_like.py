"""What segments accepted, so that like is compared with like: at one K, acceptance rule and verification, or
by the first draft token, which K does not change; and before a fall that is open, not since; nor in one that
is over."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.orm import Session

from driftguard.records import verified_at_once
from driftguard.store import incidents, renamed_segments
from driftguard.store.by_arrival import LeftOut
from driftguard.store.renamed_segments import Likeness
from driftguard.store.tables import ABOVE_EVERY_SEQ, Incident

LOOK_BACK: Final = timedelta(days=7)  # before a fall
LEAST_REQUESTS: Final = 30  # of a segment, on either side


def levels(
    session: Session,
    stream_id: int,
    segments: Collection[str],
    since: datetime,
    go_on: Sequence[Incident] = (),
    *,
    are_newer: bool = False,
) -> dict[str, list[Likeness]]:
    """Of each of the segments since then, by settings; of one in a fall that is open, as it was before that,
    under the name it had then; without what it accepted in a fall until it was back. `go_on`: falls of the
    stream that are resolved, as they go on elsewhere. `are_newer`: they are compared with what they took the
    place of, and are not what they accepted since a fall that has been told and is over."""
    until = dict.fromkeys(segments, ABOVE_EVERY_SEQ)
    was: dict[str, tuple[str, ...]] = {}
    for incident in (*incidents.of_stream(session, stream_id), *go_on):
        for each in incident.segments if incident.direction == "down" else ():
            if each.back_at is None and each.segment in segments:
                was[each.segment] = each.renamed_from or (each.segment,)
                until |= dict.fromkeys(was[each.segment], incident.change_point_seq)
                since = min(since, incident.change_point_at - LOOK_BACK)
    falls, without = falls_since(session, stream_id, since), []
    if are_newer:
        fell = first_falls(falls)
        until |= {name: min(fell[name], until[name]) for name in fell.keys() & until.keys()}
    else:
        without = until_back(falls)
    known = renamed_segments.likenesses(session, stream_id, until, since, without)
    return {name: [one for one in known if one.segment in was.get(name, (name,))] for name in segments}


def falls_since(session: Session, stream_id: int, since: datetime) -> list[Incident]:
    """Resolved ones whose change is no older, and all that are open."""
    resolved = incidents.resolved_since(session, stream_id, "down", since)
    is_open = [each for each in incidents.of_stream(session, stream_id) if each.direction == "down"]
    return [*resolved, *is_open]


def first_falls(falls: Sequence[Incident], *, over_after: datetime | None = None) -> dict[str, int]:
    """Segment -> the seq from which on it fell first, in those of these falls that are over, `over_after`
    that time: 0 where it accepted less than the stream before, from its first request on."""
    first: dict[str, int] = {}
    for incident in falls:
        known = incident.evidence
        is_replacement = known.predecessor_stream_id is not None or known.goes_on is not None
        for each in incident.segments:
            over_at = each.back_at or incident.resolved_at
            if over_at is not None and (over_after is None or over_at > over_after):
                seq = each.since_seq or (0 if is_replacement else incident.change_point_seq)
                first[each.segment] = min(seq, first.get(each.segment, seq))
    return first


def until_back(falls: Sequence[Incident]) -> list[LeftOut]:
    """What segments accepted in these falls until they were found back."""
    return [
        LeftOut(each.segment, each.since_seq or incident.change_point_seq, each.back_at)
        for incident in falls
        for each in incident.segments
        if each.back_at is not None and not incident.level_accepted
    ]


def at_equal_settings(old: Sequence[Likeness], new: Sequence[Likeness]) -> tuple[Likeness, Likeness] | None:
    """The two with the same K, acceptance rule and verification that most is known of."""
    both = [
        (one, other)
        for one in old
        for other in new
        if _settings(one) == _settings(other) and min(one.requests, other.requests) >= LEAST_REQUESTS
    ]
    return max(both, key=lambda pair: min(each.requests for each in pair), default=None)


def by_first(old: Sequence[Likeness], new: Sequence[Likeness]) -> tuple[Likeness, Likeness] | None:
    """The two by whose first draft tokens most is known, with one acceptance rule and any K."""
    both = [
        (_of_first(one), _of_first(other))
        for one in old
        for other in new
        if _settings_of_first(one) == _settings_of_first(other)
        and min(one.firsts, other.firsts) >= LEAST_REQUESTS
    ]
    return max(both, key=lambda pair: min(each.requests for each in pair), default=None)


def _settings(level: Likeness) -> tuple[int | None, str, str]:
    return level.num_speculative_tokens, level.acceptance_rule, verified_at_once(level.verification)


def _settings_of_first(level: Likeness) -> tuple[str, bool]:
    """Verification by blocks leaves the first draft token as it is; a tree has several in its place."""
    return level.acceptance_rule, level.verification == "tree"


def _of_first(level: Likeness) -> Likeness:
    return level._replace(
        requests=level.firsts, drafted=level.firsts, mean=level.first_mean, variance=level.first_variance
    )
