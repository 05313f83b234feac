"""The thread of the sidecar that replays canary probes when they are due, one server at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

import structlog

from driftguard.errors import BadSettings, Conflict, DatabaseUnavailable, DriftGuardError
from driftguard.masking import address
from driftguard.metrics import Metrics
from driftguard.probes.replay import Replay, replay
from driftguard.probes.schedule import Past, is_due
from driftguard.probes.target import ProbeTarget
from driftguard.settings import ProbeSettings
from driftguard.store import incidents, probe_prompts
from driftguard.store.database import CHORE, Database

LOOK_SECONDS: Final = 2.0
LOOK_AGAIN: Final = timedelta(minutes=1)  # at one server, unless a diagnosis waits for its probes
SPANS_KEPT: Final = 64  # of a server
SPAN_MARGIN: Final = timedelta(seconds=1)  # an engine counts an answer a little before or after it is read
_INCIDENTS: Final = 1_000
log = structlog.get_logger(__name__)

ProbingState = Literal["waiting", "asked", "refused"]


@dataclass(frozen=True, slots=True)
class Probed:
    """What this sidecar knows of the probes of one server. `detail`: what they cost where they are asked,
    else what is missing; for a reader."""

    server: str
    url: str
    interval_seconds: float
    state: ProbingState
    detail: str
    replayed_at: datetime | None = None


@dataclass(slots=True)
class _Kept:
    """Between two looks at one server."""

    probed: Probed
    looked_at: datetime | None = None
    failed_at: datetime | None = None
    failures: int = 0


class ProbeLoop:
    """Does nothing without targets. `start` and `stop` are called once each; other threads may ask for
    `states` and `was_asking`."""

    def __init__(
        self,
        database: Database,
        settings: ProbeSettings,
        targets: Sequence[ProbeTarget],
        metrics: Metrics,
        max_streams: int | None = None,
        is_elsewhere: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`is_elsewhere`: whether another sidecar sees to a server. Raises BadSettings: an interval is set,
        and no server is known."""
        if settings.enabled and "interval_seconds" in settings.model_fields_set and not targets:
            raise BadSettings(
                "probes.interval_seconds: is set, but no server to probe is known; add [[probes.targets]]"
            )
        self._database = database
        self._settings = settings
        self._targets = targets
        self._metrics = metrics
        self._max_streams = max_streams
        self._is_elsewhere = is_elsewhere
        self._interval = timedelta(seconds=settings.interval_seconds)
        waiting = "no traffic of it has arrived yet"
        self._kept = {
            one.server: _Kept(
                Probed(one.server, address(one.asked.url), settings.interval_seconds, "waiting", waiting)
            )
            for one in targets
        }
        self._spans: dict[str, deque[tuple[datetime, datetime | None]]] = {
            one.server: deque(maxlen=SPANS_KEPT) for one in targets
        }
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)

    def start(self) -> None:
        if self._targets:
            self._thread.start()

    def stop(self) -> None:
        """Ends after the current answer; the answers so far are not stored."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def states(self) -> list[Probed]:
        return [self._kept[target.server].probed for target in self._targets]

    def was_asking(self, server: str, url: str, begun_at: datetime, ended_at: datetime) -> bool:
        """Whether probes were asked of the server of this name or address at any time between."""
        asked = {target.server for target in self._targets if address(target.asked.url) == address(url)}
        return any(
            start - SPAN_MARGIN <= ended_at and (end is None or begun_at <= end + SPAN_MARGIN)
            for name in {server, *asked} & self._spans.keys()
            for start, end in tuple(self._spans[name])
        )

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            try:
                while not self._stopping.is_set() and self.look():
                    pass  # a diagnosis may wait for another server by now
            except DatabaseUnavailable as error:
                log.debug("canary probes wait for the database", error=error.detail)
            except Exception:
                self._metrics.loops.failures.labels("probes").inc()
                log.exception("looking for due canary probes failed and will be tried again")

    def look(self) -> bool:
        """Replays the probes of one server if some are due, first where a diagnosis waits. Whether it did."""
        with self._database.session(CHORE) as session:
            awaited: dict[int, datetime] = {}
            servers = set()
            for incident, of in incidents.list_page(session, limit=_INCIDENTS, state="unresolved"):
                if incident.diagnosis and incident.diagnosis.awaits_probes:
                    # By the sidecar's clock it came before its alarm, whatever the server's clock says.
                    since = max(incident.change_point_at, incident.opened_at)
                    awaited[of.id] = max(since, awaited.get(of.id, since))
                    servers.add(of.server)
        for target in sorted(self._targets, key=lambda one: one.server not in servers):
            kept, now = self._kept[target.server], datetime.now(UTC)
            looked, again = kept.looked_at, min(LOOK_AGAIN, self._interval)
            is_new = looked is None or not looked <= now < looked + again  # a clock may be set back
            if (is_new or target.server in servers) and self._is_due(target, awaited, now):
                self._attempt(target, lambda target=target: self._replay(target))  # type: ignore[misc]
                return True
        return False

    def _is_due(self, target: ProbeTarget, awaited: Mapping[int, datetime], now: datetime) -> bool:
        kept = self._kept[target.server]
        kept.looked_at = now
        if self._is_elsewhere(target.server):
            self._tell(target, "waiting", "another sidecar on this database scrapes and probes it")
            return False
        with self._database.session(CHORE) as session:
            stream = probe_prompts.newest_stream(session, target.server)
            if stream is None or stream.traffic_arrived_at is None:
                return False  # so is an engine that does not speculate
            replayed_at = probe_prompts.last_replay(session, stream.id, now)
            past = Past(
                replayed_at,
                kept.failed_at,
                awaited.get(stream.id),
                max(kept.failures, 1),
                stream.traffic_arrived_at,
            )
        due = is_due(past, now, self._interval)
        if replayed_at is not None and not due and kept.probed.state == "waiting":  # since this one started
            asked, again = (f"{at:%Y-%m-%d %H:%M}" for at in (replayed_at, replayed_at + self._interval))
            self._tell(
                target, "waiting", f"last asked at {asked} UTC, due again at {again} UTC if traffic arrives"
            )
        return due

    def _attempt(self, target: ProbeTarget, ask: Callable[[], None]) -> None:
        kept = self._kept[target.server]
        try:
            ask()
        except DatabaseUnavailable:
            raise
        except Conflict as error:  # which stores what the server answers
            kept.failed_at = datetime.now(UTC)
            self._tell(target, "waiting", error.detail)
        except DriftGuardError as error:
            self._note_failure(kept)
            if kept.probed.detail != error.detail:  # once per reason, not once per attempt
                log.warning("canary probes were not replayed", server=target.server, reason=error.detail)
            self._tell(target, "refused", error.detail)
        except Exception:
            self._metrics.loops.failures.labels("probes").inc()
            self._note_failure(kept)
            log.exception("canary probes failed and will be tried again", server=target.server)

    def _note_failure(self, kept: _Kept) -> None:
        kept.failed_at, kept.failures = datetime.now(UTC), kept.failures + 1

    def _replay(self, target: ProbeTarget) -> None:
        spans = self._spans[target.server]
        if self._kept[target.server].probed.state == "waiting":
            self._tell(target, "waiting", "its probes are asked for the first time")
        begun_at: datetime | None = None

        def note() -> None:
            nonlocal begun_at
            if begun_at is None:
                begun_at = datetime.now(UTC)
                spans.append((begun_at, None))

        try:
            done = replay(
                self._database,
                target.asked,
                self._settings,
                sleep=self._stopping.wait,
                should_stop=self._stopping.is_set,
                max_streams=self._max_streams,
                is_given=target.is_given,
                on_ask=note,
            )
        finally:
            if begun_at is not None:  # an attempt may fail before a prompt is sent
                spans[-1] = (begun_at, datetime.now(UTC))
        if done is not None:
            self._note(target, done)

    def _note(self, target: ProbeTarget, done: Replay) -> None:
        kept = self._kept[target.server]
        kept.failed_at, kept.failures = None, 0
        cost = _cost(done, self._settings)
        if kept.probed.state != "asked":
            log.info("canary probes are asked", server=done.server, url=kept.probed.url, cost=cost)
        self._tell(target, "asked", cost)
        kept.probed = replace(kept.probed, replayed_at=datetime.now(UTC))
        log.debug(
            "canary probes replayed",
            server=done.server,
            draft_version=done.draft_version,
            prompts=done.prompts,
            acceptance=done.acceptance,
        )

    def _tell(self, target: ProbeTarget, state: ProbingState, detail: str) -> None:
        kept = self._kept[target.server]
        kept.probed = replace(kept.probed, state=state, detail=detail)


def _cost(done: Replay, settings: ProbeSettings) -> str:
    """For example: 32 requests every 60 min, at most 2,048 tokens of answers."""
    tokens = done.requests * settings.max_tokens
    every = f"{settings.interval_seconds / 60:.3g} min"
    return f"{done.requests} requests every {every}, at most {tokens:,} tokens of answers"
