"""Has a source stopped sending, or is it only quiet? Judged from when its records arrived.

Rule: stale after a silence longer than 5 minutes and than three times the source's usual silence. The usual
silence is the longest that began in the two hours before the last record, or within two hours of the same
time of day one day or one week earlier; an active minute is the unit.

A server that sends one request in ten minutes thus has half an hour. One that is idle every night is not
called stale in its second night, nor on its second weekend: that silence is usual by then. The first time,
the records cannot distinguish idleness from failure. The mean traffic is not a suitable measure: it is the
same for a steady trickle and for bursts. Only the length of the silence depends on the current time, so a
stale stream stays stale until its next record: the verdict cannot flap.

The silence is measured by the sidecar's clock, from the last arrival, so that a wrong clock of the source
does not matter. The usual silence is taken from when the records ended, by the source's clock: only
differences count there, and records that waited during an outage of the sidecar leave no gap. A source that
rarely sends large batches is called stale between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

SHORTEST: Final = timedelta(minutes=5)
TIMES_USUAL: Final = 3
AROUND: Final = timedelta(hours=2)
# Begin -> end of each span, as time before the last record.
USUAL_SPANS: Final[Mapping[timedelta, timedelta]] = {
    AROUND: timedelta(),
    **{earlier + AROUND: earlier - AROUND for earlier in (timedelta(days=1), timedelta(days=7))},
}
SURELY_STALE: Final = timedelta(days=7)

CLOCKS_DISAGREE: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest record of a source, with its arrival by the sidecar's clock and its end by the source's
    clock."""

    arrived_at: datetime
    ended_at: datetime


def depends_on_usual_silence(newest: Newest, now: datetime) -> bool:
    """Not after a short silence, nor after one of more than a week."""
    return SHORTEST < now - newest.arrived_at <= SURELY_STALE


def is_stale(newest: Newest, now: datetime, usual: timedelta) -> bool:
    """`usual`: the longest silence that began in one of USUAL_SPANS; ignored where the result does not depend
    on it."""
    if depends_on_usual_silence(newest, now):
        return now - newest.arrived_at > TIMES_USUAL * usual
    return now - newest.arrived_at > SURELY_STALE


def clock_difference(newest: Newest) -> str | None:
    """The difference in words; None where the clocks agree within a minute. A slow clock and slow delivery
    look the same."""
    behind = newest.arrived_at - newest.ended_at
    if abs(behind) <= CLOCKS_DISAGREE:
        return None
    if behind < timedelta():
        return f"its clock is {_duration(-behind)} ahead of that of the sidecar"
    return f"its clock is {_duration(behind)} behind that of the sidecar, or its records arrive that late"


def _duration(difference: timedelta) -> str:
    """For example: 7 min, 3 h, 12 days."""
    for unit, size in (("days", timedelta(days=1)), ("h", timedelta(hours=1))):
        if difference >= 2 * size:
            return f"{difference / size:.0f} {unit}"
    return f"{difference / timedelta(minutes=1):.0f} min"
