"""The common parts of vLLM's and SGLang's logs: `key: value` pairs, and incomplete times."""

from __future__ import annotations

import calendar
import re
from datetime import datetime, timedelta

from driftguard.records import RecordError

GARBLED = (ValueError, OverflowError)  # what reading the numbers or the time of a line may raise
AHEAD_OF_UTC = timedelta(hours=14)  # the largest offset of a time zone
_PAIR = re.compile(r"([#\w][\w #/()-]*?): ([-\d.]+(?:, [\d.]+)*)")


def cannot_be_read(number: int, error: Exception) -> RecordError:
    """Of a garbled line, which costs its own window alone."""
    return RecordError(f"cannot be read ({error})", line=number)


def numbers(text: str) -> dict[str, list[float]]:
    """Key -> its numbers, of `key: 1.5 unit, other key: 0.5, 0.25`."""
    return {key.strip(): [float(part) for part in value.split(", ")] for key, value in _PAIR.findall(text)}


def known_year(at: datetime, latest: datetime) -> datetime:
    """`at` with the last year in which it is not after `latest`: some logs leave the year out. They tell
    local times, which may be ahead by hours. `at`: of a leap year, so that it may be 29 February."""
    limit, year = latest + AHEAD_OF_UTC, latest.year + 1  # on the last day of a year it may be the next
    while not _exists(at, year) or at.replace(year=year) > limit:
        year -= 1
    return at.replace(year=year)


def _exists(at: datetime, year: int) -> bool:
    return (at.month, at.day) != (2, 29) or calendar.isleap(year)
