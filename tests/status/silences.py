"""The usual silence of a source, by its definition: from the list of its active minutes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import pairwise

HOURS, DAY, WEEK = timedelta(hours=2), timedelta(days=1), timedelta(days=7)


def longest_silence(minutes: Sequence[datetime], last: datetime) -> timedelta:
    """`minutes`: with traffic, in order. The longest silence that began in the two hours before `last`, or
    within two hours of the same time one day or one week earlier."""
    spans = [(last - HOURS, last)]
    spans += [(last - days - HOURS, last - days + HOURS) for days in (DAY, WEEK)]
    return max(_longest_beginning(minutes, start, end) for start, end in spans)


def _longest_beginning(minutes: Sequence[datetime], start: datetime, end: datetime) -> timedelta:
    active = minutes[bisect_left(minutes, start) : bisect_right(minutes, end) + 1]
    return max((later - earlier for earlier, later in pairwise(active)), default=timedelta())
