"""How far acceptance came back with a promoted draft, in words. Pure."""

from __future__ import annotations

from driftguard.records.documents.retraining_run import SegmentWatch, Watch
from driftguard.store.tables import Incident

_MOST = 3  # segments that are named


def told(state: Watch, incident: Incident | None) -> str:
    """Of the segments that changed. For example: acceptance of german recovered to 0.53 from 0.39, was 0.62:
    15% below, over 29 requests. `incident`: that the draft was trained for, if any."""
    changed = [part for part in state.segments if part.old.changed] or list(state.segments)
    named = changed[:_MOST]
    if not named:
        return "no segment can be compared with the old draft"
    return "; ".join(_segment(part, _baseline(incident, part)) for part in named)


def _baseline(incident: Incident | None, part: SegmentWatch) -> float | None:
    """Of the same draft positions as the watch's means."""
    positions = "first" if part.old.by_first else "all"
    segments = incident.segments if incident is not None else ()
    return next(
        (
            one.before.rate
            for one in segments
            if (one.segment, one.after.positions) == (part.old.segment, positions)
        ),
        None,
    )


def _segment(part: SegmentWatch, baseline: float | None) -> str:
    name, now = part.old.segment, part.acceptance
    what = f"acceptance of{' the first draft token of' * part.old.by_first} {name}"
    if now is None:
        return f"no request of {name} has been judged yet"
    if now > part.old.mean and part.shown_better:
        level = f"recovered to {now:.2f} from {part.old.mean:.2f}"
    else:
        level = f"is {now:.2f}, {part.old.mean:.2f} with the old draft"
    return f"{what} {level}{_below(now, baseline)}, over {part.requests:,} requests"


def _below(now: float, baseline: float | None) -> str:
    """Against the level before the change, as a part of it; of the numbers as they are printed."""
    if baseline is None or round(baseline, 2) == 0.0:
        return ""
    short = 1.0 - round(now, 2) / round(baseline, 2)
    if abs(short) < 0.005:
        return f", was {baseline:.2f}"
    return f", was {baseline:.2f}: {abs(short):.0%} {'below' if short > 0.0 else 'above'}"
