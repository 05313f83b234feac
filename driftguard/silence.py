"""Has a source stopped sending, or is it only quiet? Judged from its records alone.

Rule: stale after a silence longer than 5 minutes and than three times the source's usual silence. The usual
silence is the longest that began in the two hours before the last record, or within two hours of the same
time of day one day or one week earlier; an active minute is the unit.

A server that sends one request in ten minutes is thus given half an hour, and one that is idle every night
is not called stale in its second night, nor on its second weekend: what was silent then is usual now. The
first time, nothing in the records tells idleness from failure. The mean traffic is no measure of this: it
is the same for a steady trickle and for bursts. Nothing here depends on the present moment but the length
of the silence, so a stale stream stays stale until its next record: the verdict cannot flap.

The times are those at which the records ended, by the sender's clock: a source whose clock is slow by more
than its usual silence is stale although its records arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final

SHORTEST: Final = timedelta(minutes=5)
TIMES_USUAL: Final = 3
AROUND: Final = timedelta(hours=2)
EARLIER: Final = (timedelta(days=1), timedelta(days=7))
SURELY_STALE: Final = timedelta(days=7)

ActiveMinutes = Callable[[datetime, datetime], Sequence[datetime]]


def is_stale(last: datetime, now: datetime, active_minutes: ActiveMinutes) -> bool:
    """`last`: end of the newest record. `active_minutes`: those with records from one moment to another,
    and the first after that, up to `last`; oldest first."""
    silence = now - last
    if silence <= SHORTEST or silence > SURELY_STALE:
        return silence > SURELY_STALE
    windows = [(last - AROUND, last)]
    windows += [(last - days - AROUND, last - days + AROUND) for days in EARLIER]
    return all(silence > TIMES_USUAL * _longest(active_minutes(start, end)) for start, end in windows)


def _longest(minutes: Sequence[datetime]) -> timedelta:
    return max((later - earlier for earlier, later in pairwise(minutes)), default=timedelta())
