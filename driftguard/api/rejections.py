"""What was rejected of exports, in the log: many exporters tell nobody of a partial success or a refusal."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

import structlog

SECONDS: Final = 60.0  # between two lines about the same signal
_WITHOUT_COUNTS: Final = (
    "no record is made of spans without driftguard.drafted_tokens (docs/otlp.md). Instrumentations of "
    "clients do not see what was accepted: the proxy records it (docs/proxy.md)"
)
_log = structlog.get_logger(__name__)


class RejectionLog:
    """Logs the first rejection at once, and those of the next minute together with the one after it."""

    def __init__(self) -> None:
        self._untold: Counter[str] = Counter()
        self._quiet_until: dict[str, float] = {}
        self._is_settled = False

    def note(self, things: str, rejected: int, reasons: str) -> None:
        """`things`: spans or data points. `reasons`: why, as the answer says it."""
        if number := self._due(things, rejected):
            _log.warning("otlp_rejected", things=things, rejected=number, reasons=reasons)

    def note_refused(self, path: str, status: int, reason: str) -> None:
        """A whole export, which its exporter does not send again."""
        if exports := self._due(f"{path} {status}", 1):
            _log.warning("otlp_refused", path=path, exports=exports, status=status, reason=reason)

    def note_spans(self, *, with_counts: bool, of_generations: bool) -> None:
        """Says once that spans of generations arrive and none of them has counts."""
        if of_generations and not (with_counts or self._is_settled):
            _log.warning("otlp_spans_without_counts", hint=_WITHOUT_COUNTS)
        self._is_settled |= with_counts or of_generations

    def _due(self, subject: str, more: int) -> int:
        """How many are to be told of with these; 0: nothing is, or not yet."""
        self._untold[subject] += more
        now = time.monotonic()
        if not more or now < self._quiet_until.get(subject, 0.0):
            return 0
        self._quiet_until[subject] = now + SECONDS
        return self._untold.pop(subject)
