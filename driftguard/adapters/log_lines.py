"""The common parts of vLLM's and SGLang's logs: `key: value` pairs, and incomplete times."""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta

from driftguard.adapters.window import Incomplete, Window
from driftguard.records import RecordError

AHEAD_OF_UTC = timedelta(hours=14)  # the largest offset of a time zone
_PAIR = re.compile(r"([#\w][\w #/()-]*?): ([-\d.]+(?:, [\d.]+)*)")


def windows_of(
    lines: Iterable[str], read: Callable[[str], Window | None]
) -> Iterator[tuple[int, Window | RecordError]]:
    """(number of the line, its window or why it cannot be read); lines that `read` makes None of are skipped.
    A garbled one costs its own window alone. Raises Incomplete as `read` does."""
    for number, line in enumerate(lines, start=1):
        try:
            window = read(line)
        except Incomplete:
            raise
        except (ValueError, OverflowError) as error:  # its numbers, or its time
            yield number, RecordError(f"cannot be read ({error})", line=number)
        else:
            if window is not None:
                yield number, window


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
