"""What was rejected of exports, in the log: many exporters do not look at a partial success."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

import structlog

SECONDS: Final = 60.0  # between two lines about the same signal
_log = structlog.get_logger(__name__)


class RejectionLog:
    """Logs the first rejection at once, and those of the next minute together with the one after it."""

    def __init__(self) -> None:
        self._rejected: Counter[str] = Counter()
        self._quiet_until: dict[str, float] = {}

    def note(self, things: str, rejected: int, reasons: str) -> None:
        """`things`: spans or data points. `reasons`: why, as the answer says it."""
        if not rejected:
            return
        self._rejected[things] += rejected
        now = time.monotonic()
        if now >= self._quiet_until.get(things, 0.0):
            self._quiet_until[things] = now + SECONDS
            _log.warning("otlp_rejected", things=things, rejected=self._rejected.pop(things), reasons=reasons)
