"""Starts the embedded PostgreSQL again when it is gone: killed, or shut down by a disk that was full."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from driftguard.errors import DatabaseUnavailable

LOOK_SECONDS: Final = 1.0
FIRST_WAIT_SECONDS: Final = 0.5  # what a killed server leaves behind ends by itself within a moment
MAX_WAIT_SECONDS: Final = 10.0
STEADY_SECONDS: Final = 60.0  # one that ran for so long is not about to fail again at once
STOP_SECONDS: Final = 12.0  # an attempt takes up to ten
_log = structlog.get_logger(__name__)


class Supervision:
    """`runs` says whether the server is there; `start` starts it, or joins it where somebody else did, and
    raises DatabaseUnavailable. `on_restart` is called on this thread after each restart."""

    def __init__(
        self,
        directory: Path,
        runs: Callable[[], bool],
        start: Callable[[], None],
        on_restart: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._runs = runs
        self._start = start
        self._on_restart = on_restart
        self._wait_seconds = FIRST_WAIT_SECONDS
        self._running_since = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="embedded-database", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """From now on a server that is gone stays so."""
        self._stopping.set()
        self._thread.join(STOP_SECONDS)

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            if self._runs():
                if time.monotonic() - self._running_since > STEADY_SECONDS:
                    self._wait_seconds = FIRST_WAIT_SECONDS
                continue
            _log.error("embedded_database_gone", directory=str(self._directory))
            self._restart()

    def _restart(self) -> None:
        gone_at = time.monotonic()
        while not self._stopping.wait(self._wait_seconds):
            self._wait_seconds = min(2 * self._wait_seconds, MAX_WAIT_SECONDS)
            try:
                self._start()
            except DatabaseUnavailable as error:
                _log.error(
                    "embedded_database_does_not_start", reason=error.detail, wait_seconds=self._wait_seconds
                )
                continue
            except Exception:  # noqa: BLE001 (without this thread the server would stay away for good)
                _log.exception("embedded_database_does_not_start", wait_seconds=self._wait_seconds)
                continue
            self._running_since = time.monotonic()
            _log.warning("embedded_database_restarted", seconds=round(self._running_since - gone_at, 1))
            self._on_restart()
            return
