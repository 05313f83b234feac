"""vLLM's log: a line `SpecDecoding metrics` every ten seconds in which it drafted.

    INFO 09-04 11:01:16 [metrics.py:125] SpecDecoding metrics: Mean acceptance length: 6.82, Accepted
    throughput: 6.46 tokens/s, Drafted throughput: 7.77 tokens/s, Accepted: 256 tokens, Drafted: 308 tokens,
    Per-position acceptance rate: 1.000, 1.000, 1.000, 1.000, 0.795, 0.614, 0.409, ...

Steps follow from the counts: Drafted / K where every step drafted K tokens, which the acceptance length
shows; else Accepted / (length - 1), within its two decimals. The time has no year and no time zone: the
last such time, as UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from driftguard.adapters.log_lines import known_year, numbers, windows_of
from driftguard.adapters.window import Window
from driftguard.records import RecordError

MARK: Final = "SpecDecoding metrics:"
NOTHING_FOUND: Final = (
    f"no line with {MARK!r}: vLLM writes none without speculation or with --disable-log-stats"
)
_TIME = re.compile(r"(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")
_USUAL_SECONDS: Final = 10.0


def windows(lines: Iterable[str], now: datetime) -> Iterator[tuple[int, Window | RecordError]]:
    """(number of the line, window or why it cannot be read); other lines are skipped. `now`: no line is
    newer."""
    return windows_of(lines, lambda line: _read(line, now))


def _read(line: str, now: datetime) -> Window | None:
    head, mark, text = line.partition(MARK)
    time = _TIME.search(head)
    if not mark or time is None:
        return None
    month, day, hour, minute, second = map(int, time.groups())
    ended_at = known_year(datetime(2000, month, day, hour, minute, second, tzinfo=UTC), now)
    return _window(numbers(text), ended_at)


def _window(told: dict[str, list[float]], ended_at: datetime) -> Window | None:
    try:
        accepted, drafted = round(told["Accepted"][0]), round(told["Drafted"][0])
        length = told["Mean acceptance length"][0]
    except KeyError:
        return None  # versions before 0.9 have no length, so the steps are unknown
    rates = told.get("Per-position acceptance rate", [])
    steps = _steps(accepted, drafted, length, len(rates))
    throughput = told.get("Drafted throughput", [0.0])[0]
    seconds = drafted / throughput if throughput > 0.0 else _USUAL_SECONDS
    return Window(
        target=None,
        begun_at=ended_at - timedelta(seconds=seconds),
        ended_at=ended_at,
        steps=steps,
        drafted=drafted,
        accepted=accepted,
        generated=None,
        fidelity="counter",
        speculated_before=True,
        num_speculative_tokens=len(rates) or None,
    )


def _steps(accepted: int, drafted: int, length: float, k: int) -> int:
    if k and drafted % k == 0:
        full = drafted // k
        if full and abs(1.0 + accepted / full - length) <= 0.0051:
            return full
    return round(accepted / (length - 1.0)) if length > 1.0 else drafted // max(k, 1)
