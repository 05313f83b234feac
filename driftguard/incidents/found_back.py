"""Has acceptance come back where a comparison found the fall: of a segment under another name, at another K,
or of a stream in which another target or draft took over? And where K has changed while any fall was open
(`across_settings.py`)?

The detector has learned the lower level as the baseline of such a segment, so that its recovery test
(driftguard.detection.steps.recovery) cannot say so. Here the newest requests of the segment are held against
the midpoint between before and after whenever the cost of the stream is measured.

Test: with x of a request its accepted / drafted tokens (of the first draft token, where the fall was judged
by that), the n newest requests since the incident opened say that it is back where

    t = (mean x - midpoint) / sqrt(inflation var x / n)

has a one-sided p-value of at most FALSE_END share(m) / len(SIZES): n is each of SIZES, m the minutes since
the incident opened, and share that of driftguard.alpha_spending. `inflation` is by how much the variance of
sums exceeds that of independent requests, as the detector found for the segment. Where that is large it takes
as many times more requests to tell: up to MOST_LARGER times each of SIZES.
Guarantee: looks lie a minute apart at least, so each spends a share of its own, and all shares together are
less than 1. While the segment accepts no more than the midpoint, the probability that it is ever called back
is at most FALSE_END, however long that lasts and however the looks depend on each other (Bonferroni).
Assumptions: means of LEAST_REQUESTS requests and more are Student distributed; the inflation is right.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from scipy.special import stdtr
from sqlalchemy.orm import Session

from driftguard import alpha_spending
from driftguard.incidents.across_settings import has_other_settings, is_same_k, judged_by, known_k, named_at
from driftguard.incidents.opening import come_back
from driftguard.records.documents.incident import ChangedSegment, names_of
from driftguard.records.positions import ACCEPTANCE, Positions, combined
from driftguard.store import acceptance_levels, folding, incidents
from driftguard.store.acceptance_levels import NewestLevel
from driftguard.store.tables import Incident

FALSE_END: Final = 0.01
SIZES: Final = (100, 200, 400, 800, 1_600)  # newest requests of a segment
MOST_LARGER: Final = 16
LEAST_REQUESTS: Final = 30
_MINUTE: Final = timedelta(minutes=1)
_RETURN: Final = "the return from a fall: the baseline of the fallen level is learned anew"


def found_back(session: Session, incident: Incident, now: datetime) -> list[NewestLevel]:
    """The newest levels of those segments of an unresolved incident that are back. That is not asked by all
    draft positions of a segment that drafts another number of tokens per step than it did, or has other
    settings, as that moves acceptance too; the first draft token does not depend on K or on verification by
    blocks. With other settings a rise of the segment is waited for (`across_settings.py`)."""
    waiting = {
        each.segment: each for each in incident.segments if each.back_at is None and is_asked(incident, each)
    }
    if not waiting:
        return []
    inflations = folding.variance_inflations(session, incident.stream_id, waiting)
    level = level_at((now - incident.opened_at) // _MINUTE)
    back: dict[str, NewestLevel] = {}
    for newest in _newest(session, incident, waiting, inflations):
        change = waiting[newest.segment]
        midpoint = sum(_between(change)) / 2.0
        p = p_value(newest, midpoint, inflations[newest.segment])
        if p <= level and _is_comparable(session, incident, change, newest):
            back.setdefault(newest.segment, newest)  # of the smallest number of requests that says so
    return list(back.values())


def level_at(minutes: int) -> float:
    """Of the p-value of each of SIZES, so many minutes after the incident opened."""
    return FALSE_END * alpha_spending.share(max(minutes, 0)) / len(SIZES)


def sizes_at(inflation: float) -> tuple[int, ...]:
    """Numbers of newest requests: SIZES, or 4 or MOST_LARGER times as many where they depend on others."""
    larger = next((larger for larger in (1, 4) if inflation <= 4 * larger), MOST_LARGER)
    return tuple(size * larger for size in SIZES)


def p_value(newest: NewestLevel, midpoint: float, inflation: float) -> float:
    """Of "accepts no more than the midpoint on average", one-sided; 1 where too few requests tell."""
    if newest.requests < LEAST_REQUESTS:
        return 1.0
    error = math.sqrt(inflation * newest.variance / newest.requests)
    if error == 0.0:
        return 0.0 if newest.mean > midpoint else 1.0
    return float(stdtr(newest.requests - 1, (midpoint - newest.mean) / error))


def end_where_back(session: Session, incident: Incident, found: Sequence[NewestLevel], now: datetime) -> None:
    """Of an incident, locked by the caller, that is not resolved; `found` as `found_back` says."""
    if not found:
        return
    names = [level.segment for level in found]
    own = [each for each in incident.segments if each.segment in names]
    levels = ", ".join(f"{level.segment} {level.mean:.2f}" for level in found)
    reason = f"{ACCEPTANCE[combined(map(judged_by, own))]} {_is_back(own)}: {levels}"
    come_back(session, incident, names, reason, now, max(level.ended_at for level in found))
    _learn_anew(session, incident, now)


def _learn_anew(session: Session, incident: Incident, now: datetime) -> None:
    """The detector knows these segments by the fallen level: for it they have risen, and another fall would
    only be the end of that. So its rise ends, and their baselines are learned anew from its change point."""
    back = {
        each.segment for each in incident.segments if each.back_at is not None and is_asked(incident, each)
    }
    for rise in incidents.unresolved_of(session, incident.stream_id, "up"):
        if set(names_of(rise.segments)) <= back:
            incidents.move(session, rise.id, "resolved", _RETURN, now)
            rise.evidence = replace(rise.evidence, is_return=True)


def is_asked(incident: Incident, change: ChangedSegment) -> bool:
    """Whether it is asked here whether a segment is back: the detector alone cannot tell."""
    detector_tells = change.across_settings is None and change.silent_at is None
    return not detector_tells or change.is_compared(of_alarm=incident.evidence.is_of_alarm)


def _between(change: ChangedSegment) -> tuple[float, float]:
    if change.across_settings:
        return change.across_settings.before, change.across_settings.after
    return change.before.rate, change.after.rate


def _is_back(changes: Sequence[ChangedSegment]) -> str:
    across = [each.across_settings for each in changes if each.across_settings is not None]
    if len(across) == len(changes) and all(one.of_rise for one in across):
        return "has risen by more than half of the fall, with settings that came since"
    if len(across) == len(changes) and all(one.positions == "all" and not one.of_rise for one in across):
        return "has risen by more than half of the fall since K changed"
    if all(each.renamed_from for each in changes):
        return "is back at what it was under the older name"
    if all(judged_by(each) == "first" for each in changes):
        return "is back at what it was before K changed"
    return "is back at what it was before the change"


def _newest(
    session: Session,
    incident: Incident,
    waiting: Mapping[str, ChangedSegment],
    inflations: Mapping[str, float],
) -> list[NewestLevel]:
    """Of all that wait, by the draft positions they are judged by; of each the fewest requests first."""
    alike: dict[tuple[Positions, tuple[int, ...]], dict[str, int]] = defaultdict(dict)
    for name, each in waiting.items():
        alike[judged_by(each), sizes_at(inflations[name])][name] = named_at(incident, each)
    return [
        level
        for (positions, sizes), after in alike.items()
        for level in acceptance_levels.newest(
            session, incident.stream_id, after, sizes, by_first=positions == "first"
        )
    ]


def _is_comparable(session: Session, incident: Incident, change: ChangedSegment, newest: NewestLevel) -> bool:
    if judged_by(change) == "first":
        return True
    k = known_k(session, incident, change)
    if k is not None and not is_same_k(newest.drafted / newest.steps, k):
        return False
    return change.across_settings is not None or not has_other_settings(session, incident, change)
