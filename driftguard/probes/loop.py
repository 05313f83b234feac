"""The thread of the sidecar that replays canary probes when they are due."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

import structlog

from driftguard.errors import BadSettings, DriftGuardError
from driftguard.metrics import Metrics
from driftguard.probes.replay import replay
from driftguard.probes.schedule import Past, is_due
from driftguard.settings import ProbeSettings, ProbeTargetSettings
from driftguard.store import incidents, probe_prompts
from driftguard.store.database import Database

LOOK_SECONDS: Final = 2.0
_INCIDENTS: Final = 1_000
log = structlog.get_logger(__name__)


class ProbeLoop:
    """Does nothing unless an interval is set. `start` and `stop` are called once each."""

    def __init__(
        self, database: Database, settings: ProbeSettings, metrics: Metrics, max_streams: int | None = None
    ) -> None:
        """Raises BadSettings: an interval and no server."""
        if settings.interval_seconds is not None and not settings.targets:
            raise BadSettings(
                "probes.interval_seconds: is set, but no server to probe is; add [[probes.targets]]"
            )
        self._database = database
        self._settings = settings
        self._metrics = metrics
        self._max_streams = max_streams
        self._failed_at: dict[str, datetime] = {}
        self._told: dict[str, str] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)

    def start(self) -> None:
        if self._settings.interval_seconds is not None:
            self._thread.start()

    def stop(self) -> None:
        """Ends after the current answer; the answers so far are not stored."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            for target in self._settings.targets:
                self._attempt(target.server, lambda target=target: self._look(target))  # type: ignore[misc]

    def _attempt(self, server: str, look: Callable[[], None]) -> None:
        try:
            look()
        except DriftGuardError as error:
            self._failed_at[server] = datetime.now(UTC)
            if self._told.get(server) != error.detail:  # once per reason, not once per minute
                log.warning("canary probes were not replayed", server=server, reason=error.detail)
            self._told[server] = error.detail
        except Exception:
            self._metrics.loops.failures.labels("probes").inc()
            self._failed_at[server] = datetime.now(UTC)
            log.exception("canary probes failed and will be tried again", server=server)

    def _look(self, target: ProbeTargetSettings) -> None:
        interval = timedelta(seconds=self._settings.interval_seconds or 0.0)
        if not is_due(self._past(target.server), datetime.now(UTC), interval):
            return
        done = replay(
            self._database,
            target,
            self._settings,
            sleep=self._stopping.wait,
            should_stop=self._stopping.is_set,
            max_streams=self._max_streams,
        )
        if done is not None:
            self._told.pop(target.server, None)
            log.info(
                "canary probes replayed",
                server=done.server,
                draft_version=done.draft_version,
                prompts=done.prompts,
                acceptance=done.acceptance,
            )

    def _past(self, server: str) -> Past:
        with self._database.session() as session:
            stream = probe_prompts.newest_stream(session, server)
            replayed_at = probe_prompts.last_replay(session, stream.id) if stream else None
            awaiting = [
                incident.change_point_at
                for incident, of in incidents.list_page(session, limit=_INCIDENTS, state="unresolved")
                if stream and of.id == stream.id and incident.diagnosis and incident.diagnosis.awaits_probes
            ]
        return Past(replayed_at, self._failed_at.get(server), max(awaiting, default=None))
