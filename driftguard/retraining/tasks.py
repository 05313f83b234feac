"""The background jobs: retrain one server, settle one server, score the captures of one incident. The
state is in the tables, not in a job, but for a retraining that a person asked for and that has not begun.

`defer_due`, called every few seconds, reads from the tables what is due and queues it, at most one job of a
kind per server. So a lost job, a killed worker or an engine that did not answer needs no repair; the lost job
of a person is queued again.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import procrastinate
import structlog
from procrastinate.exceptions import AlreadyEnqueued, ConnectorException
from sqlalchemy.orm import Session

from driftguard.errors import BadInput, BadSettings, Conflict, DriftGuardError
from driftguard.retraining.due import (
    PastRun,
    awaits_scores,
    is_due,
    is_score_due,
    why_not,
)
from driftguard.retraining.engines.candidate_kind import retraining_elsewhere, torch_version
from driftguard.retraining.engines.engine_admin import EngineAway, EngineRefused, engine_of
from driftguard.retraining.ledger.outcome import Trigger
from driftguard.retraining.promotion import abandoned, restart
from driftguard.retraining.promotion.reconcile import end_killed, settle
from driftguard.retraining.run import retrain
from driftguard.retraining.serving_scores import give_up_killed, score
from driftguard.settings import Settings
from driftguard.store import (
    configured_engines,
    drafts,
    incidents,
    job_queue,
    retrain_runs,
    serving_scores,
    source_activity,
)
from driftguard.store.database import Database
from driftguard.store.serving_scores import Attempt
from driftguard.store.source_activity import newest_stream, stream_in_service
from driftguard.store.tables import Incident, RetrainRun, Stream

# A job about a server among the engines in the settings waits in a queue of that server: another sidecar on
# this database, whose settings lack it, could not do it.
QUEUE: Final = "retraining"
SETTLING: Final = "settling"  # by itself, so that a rollback waits for no training of another server
NAMESPACE: Final = "retraining"
# Seconds between two looks at what is known only after minutes: that a scoring was killed, or that another
# draft serves.
RARELY: Final = 60.0
REFUSED_SECONDS: Final = 60.0  # before an engine is asked again that has refused what settles it
# After its start, before a sidecar takes a server for one that no sidecar has in its settings: meanwhile the
# others tell theirs.
STARTED_SECONDS: Final = 600.0
OLDEST_REQUEST: Final = timedelta(days=1)  # a job waits for as long as no sidecar has its engine
_Incidents = Sequence[tuple[Incident, Stream]]
log = structlog.get_logger(__name__)


class RetrainingJobs:
    """Add `blueprint` to the procrastinate app, and call `defer_due` in a loop of the sidecar.

    Each of `queues` should have a worker: a job of the first lasts as long as a training.
    `should_stop` ends a running training soon, so that the sidecar can stop.
    """

    def __init__(
        self, database: Database, settings: Settings, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._database = database
        self._settings = settings
        self._should_stop = should_stop
        self._started_at = time.monotonic()
        self._rare_look_at = -math.inf
        self._unsettled_because: dict[str, str] = {}
        self._refused_at: dict[str, float] = {}
        self._is_automatic = settings.retraining.automatic and torch_version() is not None
        if settings.engines and settings.retraining.automatic and not self._is_automatic:
            log.warning(
                "torch is not installed, so no incident starts a retraining (retraining.automatic)",
                instead="driftguard retrain where torch is, or pip install 'driftguard-llm[engine]' here",
            )

    @property
    def blueprint(self) -> procrastinate.Blueprint:
        """A new blueprint each time: procrastinate renames its tasks when it is added to an app."""
        blueprint = procrastinate.Blueprint()
        blueprint.task(name="retrain", queue=QUEUE, pass_context=True)(self.retrain)
        blueprint.task(name="settle", queue=SETTLING)(self.settle)
        blueprint.task(name="score", queue=QUEUE)(self.score)
        return blueprint

    @property
    def queues(self) -> dict[str, list[str]]:
        """Name of a worker -> the queues of the jobs that this sidecar can do."""
        servers = sorted(self._servers())
        return {base: [base, *(_queue(base, server) for server in servers)] for base in (QUEUE, SETTLING)}

    def retrain(
        self,
        context: procrastinate.JobContext,
        server: str,
        trigger: Trigger,
        incident_id: str | None = None,
        force: bool = False,
    ) -> str:
        """Runs one retraining; returns how it ended and why. A failure is stored, not raised; raised is only
        that one which a person asked for was stopped before it began.

        A job that a person asked for is scheduled for the moment at which they did. Nothing is done where a
        run has begun since: two ask at once, and while the first job begins, no run tells the second that
        there is one.
        """
        if (asked_at := context.job.scheduled_at) is not None:
            with self._database.session() as session:
                begun = retrain_runs.begun_since(session, server, asked_at)
                is_old = retrain_runs.now(session) - asked_at > OLDEST_REQUEST
            if begun is not None:
                log.info("retraining left out: one was asked for already", server=server, run=str(begun.id))
                return f"nothing_to_do: run {begun.id} has begun since this was asked for"
            if is_old:
                log.info("retraining left out: it was asked for long ago", server=server, at=str(asked_at))
                return f"nothing_to_do: this was asked for at {asked_at}"
        outcome = retrain(
            self._database,
            self._settings,
            server=server,
            trigger=trigger,
            incident_id=UUID(incident_id) if incident_id else None,
            force=force,
            should_stop=self._should_stop,
            stores_why_not=asked_at is not None,
        )
        if asked_at is not None and outcome.run_id is None and self._should_stop():
            raise Conflict(f"stopped before it began: {outcome.reason}")  # `_queue_lost` queues what failed
        return f"{outcome.state}: {outcome.reason}"

    def settle(self, server: str) -> None:
        """Finishes what a killed run began, rolls back, or notes which draft somebody else has put into
        service; asked again later where that fails."""
        if time.monotonic() - self._refused_at.get(server, -math.inf) < REFUSED_SECONDS:
            return
        try:
            settle(self._database, self._settings, server, self._should_stop)
        except DriftGuardError as error:
            if isinstance(error, EngineRefused) and not isinstance(error, EngineAway):
                self._refused_at[server] = time.monotonic()
            if self._unsettled_because.get(server) != error.detail:  # once per reason, not once per attempt
                log.warning("cannot settle yet", server=server, reason=error.detail)
            self._unsettled_because[server] = error.detail
        else:
            self._unsettled_because.pop(server, None)

    def score(self, server: str, incident_id: str) -> str:  # noqa: ARG002 (its lock is named by the server)
        """Scores the captured requests of an incident; returns how it ended. A failure is stored, not
        raised."""
        return score(self._database, self._settings, UUID(incident_id), self._should_stop)

    def request(self, app: procrastinate.App, server: str | None, *, force: bool) -> int:
        """Queues a retraining by hand; returns the job's id.

        Raises BadInput (no such engine), Conflict (one runs or waits already, or there is no torch here).
        """
        try:
            name = engine_of(self._settings, server).server
        except BadSettings as error:
            raise BadInput(error.detail, field="server") from None
        with self._database.session() as session:
            now = retrain_runs.now(session)
            running = [
                run for run in retrain_runs.unended(session) if run.server == name and _lives(session, run)
            ]
        if running:
            raise Conflict(f"a retraining of {name} is {running[0].state}", run_id=str(running[0].id))
        if torch_version() is None:
            raise Conflict(
                "torch is not installed beside this sidecar, so it makes no draft: run "
                f"`{retraining_elsewhere(name, force=force)}` where it is, as the nightly job does"
            )
        job_id = defer_retraining(app, name, "manual", force=force, asked_at=now)
        if job_id is None:
            raise Conflict(f"a retraining of {name} is queued already")
        return job_id

    def defer_due(self, app: procrastinate.App) -> None:
        """Queues what is due: scores and retrainings of unresolved falls, and settling where a run was
        interrupted or another draft serves than the one that is known. An incident whose captured requests
        can be scored is retrained for after that."""
        is_rare = time.monotonic() - self._rare_look_at >= RARELY
        own = self._servers()
        if is_rare:
            give_up_killed(self._database, self._settings)
            with self._database.session() as session:
                configured_engines.tell(session, own)
            self._queue_lost(app)
        scores = self._settings.diagnosis.score_captures
        with self._database.session() as session:
            elsewhere = configured_engines.told(session) - own
            unsettled = {*self._unsettled(session), *(self._unfollowed(session) if is_rare else ())}
            falls = incidents.falls_to_act_on(session, unscored=scores, retrainable=self._is_automatic)
            attempts = serving_scores.attempts(session, [incident.id for incident, _ in falls])
            due = list(self._due(session, falls, attempts)) if self._is_automatic else []
        for server in sorted(unsettled & own):
            _defer(app, "settle", _queue(SETTLING, server), {"server": server})
        is_new = time.monotonic() - self._started_at < STARTED_SECONDS
        for server in sorted(unsettled - own - elsewhere):
            end_killed(self._database, self._settings, server)
            if not is_new:
                abandoned.end_of_server(self._database, server)
        for incident, stream in falls if scores else ():
            server = stream.server
            if server not in own and (is_new or server in elsewhere):
                continue
            if is_score_due(incident, attempts.get(incident.id)):
                arguments = {"server": server, "incident_id": str(incident.id)}
                _defer(app, "score", _queue(QUEUE, server) if server in own else QUEUE, arguments)
        for server, incident_id in due:
            defer_retraining(app, server, "incident", incident_id=incident_id)
        if is_rare:  # one that failed, as while the database is away, is made up for at once
            self._rare_look_at = time.monotonic()

    def _queue_lost(self, app: procrastinate.App) -> None:
        """Again what a person asked for, where its job ended with its process or without the database, and
        nobody was told. What has begun is not repeated, see `retrain`."""
        with self._database.session() as session:
            lost = job_queue.lost(session, f"{NAMESPACE}:retrain", OLDEST_REQUEST)
            begun = {job.id for job in lost if retrain_runs.begun_since(session, job.server, job.asked_at)}
        for job in lost:
            try:
                app.job_manager.retry_job_by_id(job.id, retry_at=job.asked_at)
            except ConnectorException as error:
                if job_queue.is_away(error):
                    raise
                continue  # another one of this server waits, or another sidecar was first
            if job.id not in begun:
                log.warning(
                    "a retraining that was asked for was not begun; it is queued again",
                    job=job.id,
                    server=job.server,
                )

    def _servers(self) -> set[str]:
        return {engine.server for engine in self._settings.engines}

    def _unsettled(self, session: Session) -> Iterator[str]:
        for run in retrain_runs.unended(session):
            if run.state == "watching":
                if retrain_runs.watch_of(run).verdict == "worse" and not _is_locked(session, run):
                    yield run.server
            elif run.state in retrain_runs.ROLLING_STATES and not restart.is_due(session, run):
                continue
            elif not _lives(session, run):
                yield run.server

    def _unfollowed(self, session: Session) -> Iterator[str]:
        """Servers whose records name another draft than the one that is known to be in service, or another
        target than the one of that, or of a draft that is watched. An engine with an admin API can be asked
        at once which one it is."""
        watched = [run for run in retrain_runs.unended(session) if run.state == "watching"]
        replaced = {run.server for run in watched if _is_replaced(session, run)}
        for engine in self._settings.engines:
            server = engine.server
            if server in replaced:
                yield server
                continue
            of = stream_in_service if engine.admin_url is None else newest_stream
            stream = of(session, server)
            known = None if stream is None else drafts.in_service(session, server, stream.target)
            if known is None:  # or of a target that took the place of another
                known = drafts.in_service_of_server(session, server)
            if stream is None or known is None:
                continue
            asks = engine.admin_url is not None
            is_other = known.version != stream.draft_version and (asks or known.target == stream.target)
            least = timedelta(0) if asks else source_activity.REPLACED_AFTER
            is_replaced = known.target != stream.target and _is_silent(session, server, known.target, least)
            if (is_other or is_replaced) and not retrain_runs.is_running(session, server, stream.target):
                yield server

    def _due(
        self, session: Session, falls: _Incidents, attempts: Mapping[UUID, Attempt]
    ) -> Iterator[tuple[str, UUID]]:
        if not falls:
            return
        now = retrain_runs.now(session)  # as runs are dated
        wait = timedelta(seconds=self._settings.retraining.wait_seconds)
        least = self._settings.diagnosis.least_confidence
        scores = self._settings.diagnosis.score_captures
        for incident, stream in falls:
            if scores and awaits_scores(incident, attempts.get(incident.id)):
                continue
            if why_not(incident.diagnosis, least, may_be_usual=incident.evidence.may_be_usual):
                continue
            if stream.server in self._servers():
                past = [
                    PastRun(
                        run.state,
                        run.ended_at,
                        _lives(session, run),
                        has_begun=run.parent_version is not None,
                        was_stopped=retrain_runs.numbers_of(run).was_stopped,
                    )
                    for run in retrain_runs.of_incident(session, incident.id)
                ]
                if is_due(past, now, wait):
                    yield stream.server, incident.id


def defer_retraining(
    app: procrastinate.App,
    server: str,
    trigger: Trigger,
    *,
    incident_id: UUID | None = None,
    force: bool = False,
    asked_at: datetime | None = None,
) -> int | None:
    """Queues a retraining; its job's id, or None when one of this server is queued already."""
    incident = str(incident_id) if incident_id else None
    arguments = {"server": server, "trigger": trigger, "incident_id": incident, "force": force}
    # No argument more: a sidecar of an older version that has this engine and may run it would fail at that.
    return _defer(app, "retrain", _queue(QUEUE, server), arguments, schedule_at=asked_at)


def _queue(base: str, server: str) -> str:
    """A short name: that of the channel on which its workers hear of jobs may have 63 bytes."""
    return f"{base} {hashlib.sha256(server.encode()).hexdigest()[:16]}"


def _defer(
    app: procrastinate.App,
    task: str,
    queue: str,
    arguments: dict[str, Any],
    schedule_at: datetime | None = None,
) -> int | None:
    # No `lock`: procrastinate would never release that of a killed worker's job. The advisory lock of
    # retrain_runs, which ends with its process, prevents two runs at a time.
    job = app.configure_task(
        f"{NAMESPACE}:{task}",
        queue=queue,
        queueing_lock=f"{task} {arguments['server']}",
        schedule_at=schedule_at,
    )
    try:
        return int(job.defer(**arguments))
    except AlreadyEnqueued:
        return None


def _lives(session: Session, run: RetrainRun) -> bool:
    return run.ended_at is None and _is_locked(session, run)


def _is_locked(session: Session, run: RetrainRun) -> bool:
    """Whether a retraining runs there, this one or another; it settles first."""
    return retrain_runs.is_running(session, run.server, run.target)


def _is_replaced(session: Session, run: RetrainRun) -> bool:
    """Whether another target took the place of the run's."""
    return _is_silent(session, run.server, run.target, source_activity.REPLACED_AFTER)


def _is_silent(session: Session, server: str, target: str, least: timedelta) -> bool:
    """Whether the server's newest traffic is of another target, for so long. False: of this one none was ever
    heard, as of one that records call otherwise than the engine does."""
    silence = source_activity.silence(session, server, target)
    return silence is not None and silence >= least
