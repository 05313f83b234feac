"""SGLang's log: a line `Decode batch` every 40 forward passes (--decode-log-interval) of a replica.

    [2026-08-14 13:55:48 TP0] Decode batch, #running-req: 2, #token: 240768, ..., accept len: 5.06, accept
    rate: 0.81, ...

It has means with two decimals and no counts. Steps are estimated as 40 x the running requests, which ignores
requests that began or ended in between, hence fidelity gauge. `accept rate` is not used: before 2026 it
included the bonus token. K must be given: draft tokens are steps x K. Times are taken as UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from driftguard.adapters.log_lines import numbers, windows_of
from driftguard.adapters.window import Incomplete, Window
from driftguard.records import RecordError

MARK: Final = "Decode batch"
NOTHING_FOUND: Final = f"no line {MARK!r} with an accept len: SGLang writes none without speculation"
PASSES: Final = 40
_HEAD = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)([^\]]*)\]")
_LONGEST: Final = timedelta(minutes=5)  # after a longer pause, the start of a line's interval is unknown


def windows(lines: Iterable[str], k: int | None) -> Iterator[tuple[int, Window | RecordError]]:
    """(number of the line, window or why it cannot be read) of the first rank of each replica.

    Raises Incomplete: `k` is not given.
    """
    before: dict[str, datetime] = {}
    return windows_of(lines, lambda line: _read(line, k, before))


def _read(line: str, k: int | None, before: dict[str, datetime]) -> Window | None:
    """`before`: of each replica the time of its last line."""
    head, mark, text = line.partition(MARK)
    found = _HEAD.search(head)
    told = numbers(text) if mark and found else {}
    if found is None or "accept len" not in told or "#running-req" not in told:
        return None
    if re.search(r"\b(TP|PP|EP)[1-9]", found[2]) and "DP" not in found[2]:
        return None  # another rank prints the same
    if k is None:
        raise Incomplete(f"SGLang's log does not contain how many tokens it drafts; {_hint(told)}")
    ended_at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    begun_at = before.get(found[2], ended_at)
    before[found[2]] = ended_at
    return _window(told, k, begun_at if ended_at - begun_at <= _LONGEST else ended_at, ended_at)


def _hint(told: dict[str, list[float]]) -> str:
    length, rate = told["accept len"][0], told.get("accept rate", [0.0])[0]
    seen = f" (this line suggests {round((length - 1.0) / rate)})" if rate > 0.0 and length > 1.0 else ""
    return f"set --num-speculative-tokens to its --speculative-num-draft-tokens less one{seen}"


def _window(told: dict[str, list[float]], k: int, begun_at: datetime, ended_at: datetime) -> Window:
    running, length = round(told["#running-req"][0]), told["accept len"][0]
    steps = PASSES * running
    accepted = min(max(round(steps * (length - 1.0)), 0), steps * k)
    return Window(
        target=None,
        begun_at=begun_at,
        ended_at=ended_at,
        steps=steps,
        drafted=steps * k,
        accepted=accepted,
        generated=None,
        fidelity="gauge",
        speculated_before=True,
        num_speculative_tokens=k,
        concurrency=running,
    )
