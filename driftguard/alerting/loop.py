"""The threads that deliver the stored notifications."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol

import structlog

from driftguard.alerting.destination import shown
from driftguard.errors import DatabaseUnavailable
from driftguard.metrics import Metrics
from driftguard.outgoing.posting import DEADLINE_SECONDS

LOOK_SECONDS: Final = 1.0
STOP_SECONDS: Final = DEADLINE_SECONDS + 2.0  # for posts under way and their outcome

log = structlog.get_logger(__name__)


class Destination(Protocol):
    """A webhook or an Alertmanager: `name` is its identity."""

    name: str

    def deliver(self) -> float:
        """Sends what is due, if anything; returns the seconds to wait before the next call."""
        ...


class AlertLoop:
    """A thread for each destination, so that one that hangs, is slow or refuses does not delay the others."""

    def __init__(self, destinations: Sequence[Destination], metrics: Metrics) -> None:
        self._metrics = metrics
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(item,), name=f"alerts {shown(item.name)}", daemon=True)
            for item in destinations
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Waits for posts under way, so that what a receiver has accepted is stored as delivered."""
        self._stopping.set()
        until = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    def _run(self, destination: Destination) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            pause = self._deliver_due(destination)

    def _deliver_due(self, destination: Destination) -> float:
        try:
            return destination.deliver()
        except DatabaseUnavailable as error:
            log.warning("alerts wait for the database", destination=shown(destination.name), error=str(error))
        except Exception:
            self._metrics.loops.failures.labels("alerts").inc()
            log.exception(
                "sending alerts failed and will be tried again", destination=shown(destination.name)
            )
        return LOOK_SECONDS
