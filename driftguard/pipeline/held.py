"""A stream that raises is held: the fold goes on without it, and it is tried again, until it is set aside.

A held stream has a position of its own. Its records stay where all records are, and when it is tried again
they are folded from there, in their order: nothing of them is lost, unless retention drops them meanwhile.
Set aside means that it failed once more than RETRY_AFTER_SECONDS has entries. It is then tried again when
another version of DriftGuard starts, or when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from importlib.metadata import version
from typing import Any, Final

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from driftguard.metrics import Metrics
from driftguard.store import folding
from driftguard.store.tables import HeldStream

RETRY_AFTER_SECONDS: Final = (1.0, 4.0, 16.0, 64.0)  # after the first failure, the second, ...
VERSION: Final = version("driftguard-llm")
MAX_REASON_LENGTH: Final = 300
log = structlog.get_logger(__name__)


def hold(
    session: Session,
    failures: Mapping[int, Exception],
    behind: Mapping[int, int],
    after_seq: int,
    now: datetime,
    metrics: Metrics,
) -> None:
    """Of streams that failed for the first time. `behind`: stream id -> its records after `after_seq` that
    the fold reads past."""
    for stream_id, error in failures.items():
        values = {**_failed(stream_id, 0, None, error, now, metrics), "since": now, "after_seq": after_seq}
        folding.hold_stream(session, stream_id, {**values, "records_behind": behind.get(stream_id, 0)})


def hold_again(session: Session, held: HeldStream, error: Exception, now: datetime, metrics: Metrics) -> None:
    values = _failed(held.stream_id, held.failures, held.set_aside_at, error, now, metrics)
    folding.change_held(session, held.stream_id, values)


def _failed(
    stream_id: int,
    before: int,
    set_aside_at: datetime | None,
    error: Exception,
    now: datetime,
    metrics: Metrics,
) -> dict[str, Any]:
    """What is kept of the failure; `before`: how many there were."""
    metrics.fold.stream_failures.inc()
    failures, reason = before + 1, reason_of(error)
    of_stream = log.bind(stream=stream_id, failures=failures, reason=reason)
    next_try_at = None
    if set_aside_at is None and failures <= len(RETRY_AFTER_SECONDS):
        next_try_at = now + timedelta(seconds=RETRY_AFTER_SECONDS[failures - 1])
        of_stream.error("a stream could not be folded; the others go on without it", exc_info=error)
    else:
        set_aside_at = set_aside_at or now
        of_stream.error("a stream is set aside: no drift of it is found", exc_info=error)
    return {
        "failures": failures,
        "reason": reason,
        "version": VERSION,
        "next_try_at": next_try_at,
        "set_aside_at": set_aside_at,
    }


def reason_of(error: Exception) -> str:
    """One line. Of a statement that failed not the statement: it holds what was to be stored."""
    cause = (error.orig or error) if isinstance(error, DBAPIError) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0] if lines else 'no message'}"[:MAX_REASON_LENGTH]


def is_due(held: HeldStream, now: datetime, tried: Collection[int]) -> bool:
    """`tried`: those set aside by another version that this process tried already, so that two versions
    beside each other do not try in turn for ever."""
    if held.next_try_at is not None:
        wait = (held.next_try_at - now).total_seconds()
        return wait <= 0.0 or wait > RETRY_AFTER_SECONDS[-1]  # the clock was set back meanwhile
    return held.version != VERSION and held.stream_id not in tried


def advance(session: Session, held: HeldStream, seqs: Sequence[int], now: datetime, *, is_last: bool) -> None:
    """Its next records, those with `seqs`, were folded; `is_last`: there are no more."""
    left = held.records_behind - len(seqs)
    if not is_last:
        folding.change_held(
            session,
            held.stream_id,
            {"after_seq": seqs[-1], "records_behind": left, "failures": 0, "next_try_at": now},
        )
        return
    folding.release_held(session, held.stream_id)
    of_stream = log.bind(stream=held.stream_id, since=held.since.isoformat())
    of_stream.info("a stream that was held is folded again")
    if left > 0:
        of_stream.warning("retention dropped records before their stream could be folded", records=left)
