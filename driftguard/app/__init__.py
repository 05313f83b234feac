"""The composition root: the one place that knows every part of the sidecar and wires them together."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import procrastinate
import structlog
import uvicorn
from fastapi import FastAPI

from driftguard.alerting import destination
from driftguard.alerting.alertmanager import Alertmanager
from driftguard.alerting.loop import AlertLoop
from driftguard.alerting.places import Places
from driftguard.alerting.webhook import Webhook
from driftguard.api.application import http_application
from driftguard.api.auth import refuse_open_bind
from driftguard.api.context import Context
from driftguard.api.exports import ExportSlots
from driftguard.api.guarding import install_guard
from driftguard.detection import DetectorConfig
from driftguard.errors import BadSettings, DatabaseUnavailable
from driftguard.incidents import cost_measurement, diagnosing, goodput
from driftguard.incidents.examination import Examiner
from driftguard.incidents.opening import Paging
from driftguard.ingest.queue import IngestQueue
from driftguard.ingest.watch import IngestWatch
from driftguard.logs import configure_logging
from driftguard.metrics import Metrics
from driftguard.metrics.labels import CHORES
from driftguard.outgoing.posting import authorities
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.pipeline.look_around import LookAround
from driftguard.probes.loop import ProbeLoop
from driftguard.probes.target import targets_of
from driftguard.retraining.promotion.watch_hook import watch_promoted
from driftguard.retraining.run import retrain
from driftguard.retraining.tasks import NAMESPACE, RetrainingJobs
from driftguard.retraining.training.workspace import remove_leftovers, remove_outdated_corpora
from driftguard.settings import Settings
from driftguard.settings.secrets import secrets_of
from driftguard.sources.otlp_push import PushedSources
from driftguard.sources.scrape_loop import ScrapeLoop
from driftguard.sources.source import sources_of
from driftguard.status.fold_watch import FoldWatch
from driftguard.status.usual_silence import UsualSilences
from driftguard.store import job_queue, keys, retention
from driftguard.store.database import Database, DatabaseTimeout
from driftguard.store.open_database import open_database
from driftguard_http import ConnectionLimits, bounded_protocol, serving
from driftguard_http.allocation import collect_garbage_rarely, give_back_what_is_freed
from driftguard_http.open_files import raise_limit
from driftguard_http.origins import url_of

MAINTENANCE_SECONDS = 3_600.0
MAINTENANCE_PAUSE_SECONDS = 120.0  # while the database is away; sooner than the alert on it would fire
WORKER_PAUSE_SECONDS = 2.0
DUE_SECONDS = 2.0  # between two looks for retrainings that are due
LAST_JOBS_SECONDS = 10.0  # for jobs at hand when the sidecar is stopped; its process ends after 15
ANSWER_SECONDS = 5.0  # for a batch that waits for its commit when the sidecar is stopped
MOST_HEADER_BYTES = 32_768  # of a request, its first line included
log = structlog.get_logger(__name__)


def detector_config(settings: Settings) -> DetectorConfig:
    return DetectorConfig(
        false_alarm_every=settings.detection.false_alarm_minimum_requests,
        false_alarm_days=settings.detection.false_alarm_days,
        minimum_drop=settings.detection.minimum_drop,
        ignore=settings.detection.ignore,
    )


class Sidecar:
    """Every part of one running sidecar. `start` and `stop` are called once each."""

    def __init__(self, settings: Settings, database: Database, external_url: str) -> None:
        self.settings = settings
        self.database = database
        self.metrics = Metrics(settings.metrics.max_streams)
        database.on_timeout(self._count_timeout)
        database.on_restart.append(self.metrics.database.embedded_restarts.inc)
        self._stopping = threading.Event()
        self._stop_lock = threading.Lock()
        self._answering = threading.Timer(ANSWER_SECONDS, self._answer_all)
        self._answering.daemon = True
        peers, hooks = settings.alerting.alertmanager_urls, settings.alerting.webhook_urls
        self._paging = Paging(destination.identities(peers, hooks), settings.alerting.page_slowdown)
        self.fold_watch = FoldWatch()
        self.usual_silences = UsualSilences()
        self._looking = LookAround(
            database, self.metrics, self._paging.destinations, self.fold_watch, self.usual_silences
        )
        self._examiner = Examiner(
            database,
            self.metrics,
            minimum_drop=settings.detection.minimum_drop,
            paging=self._paging,
            on_told=self._looking.soon,
        )
        self.pipeline = Pipeline(
            database,
            detector_config(settings),
            self.metrics,
            scope=settings.detection.false_alarm_scope,
            after_fold=[watch_promoted],
            on_found=self._drift_found,
        )
        self.ingest = IngestQueue(
            database,
            metrics=self.metrics,
            max_queued_records=settings.ingest.max_queued_records,
            max_streams=settings.ingest.max_streams,
            on_commit=self.pipeline.wake,
        )
        self._ingest_watch = IngestWatch(self.ingest)
        self._retraining = RetrainingJobs(database, settings, self._stopping.is_set)
        self._deferring = self._job_app(job_queue.deferring_connector(database))
        places = Places(external_url, settings.alerting.grafana_url)
        self._alerts = AlertLoop(
            [
                *(
                    Alertmanager(database, url, places, self.metrics, settings.alerting.labels)
                    for url in peers
                ),
                *(Webhook(database, url, external_url, self.metrics) for url in hooks),
            ],
            self.metrics,
        )
        self.probes = ProbeLoop(
            database,
            settings.probes,
            targets_of(settings),
            self.metrics,
            settings.ingest.max_streams,
            is_elsewhere=lambda server: server in self.scraping.waiting(),
        )
        self.scraping = ScrapeLoop(
            database,
            settings.sources,
            settings.scraping,
            self.ingest.submit,
            self.metrics,
            was_probed=self.probes.was_asking,
        )
        scraped = [source.identity.server for source in sources_of(settings.sources)]
        self.pushed = PushedSources(
            database, self.ingest.submit, self.metrics, scraped, was_probed=self.probes.was_asking
        )
        self._chores = threading.Thread(target=self._do_chores, name="chores", daemon=True)

    def _job_app(self, connector: procrastinate.BaseConnector) -> procrastinate.App:
        app = procrastinate.App(connector=connector)
        app.add_tasks_from(self._retraining.blueprint, namespace=NAMESPACE)
        return app

    def start(self) -> None:
        self._deferring.open()
        # Today's partitions must exist before the first record; dropping old ones may wait.
        retention.create_ahead(self.database, datetime.now(UTC), self.settings.retention.partitions_ahead)
        self.ingest.start()
        self._ingest_watch.start()
        self.pipeline.start()
        self._examiner.start()
        self._looking.start()
        self._alerts.start()
        self.probes.start()
        self.scraping.start()
        self._chores.start()

    def stop(self) -> None:
        """Acknowledged records are stored, folded ones are committed; the rest is done by the next
        process."""
        self.stop_soon()
        self.scraping.stop()
        self.ingest.stop()
        self._answering.cancel()
        self._ingest_watch.stop()
        self.pipeline.stop()
        self._examiner.stop()
        self._looking.stop()
        self._alerts.stop()
        self.probes.stop()
        self._chores.join()
        self._deferring.close()

    async def work(self) -> None:
        """Runs the jobs until cancelled. Each worker by itself: one that ends waits for the job at hand, as a
        training of hours, and a rollback must not wait with it."""
        workers = [
            asyncio.create_task(self._keep_working(name, queues))
            for name, queues in self._retraining.queues.items()
        ]
        try:
            ended, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for worker in ended:
                worker.result()
        finally:
            for worker in workers:
                worker.cancel()
            # A second time cuts off the job at hand. But `asyncio.wait_for` of Python 3.11, in which a worker
            # waits to hear of jobs, can lose the first.
            _, late = await asyncio.wait(workers, timeout=LAST_JOBS_SECONDS)
            for worker in late:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _keep_working(self, name: str, queues: list[str]) -> None:
        """Restarts a worker after any failure of the database.

        One that cannot reach the database raises its error even if it was cancelled.
        """
        while not self._stopping.is_set():
            try:
                await self._run_worker(name, queues)
            except Exception as error:
                if job_queue.is_away(error):
                    reason = str(error.__cause__ or error)
                    log.warning("the job workers wait for the database", worker=name, error=reason)
                else:
                    self.metrics.loops.failures.labels("jobs").inc()
                    log.exception(
                        "the job workers failed and start again", worker=name, seconds=WORKER_PAUSE_SECONDS
                    )
            await asyncio.sleep(WORKER_PAUSE_SECONDS)

    async def _run_worker(self, name: str, queues: list[str]) -> None:
        """One job at a time."""
        connector = job_queue.worker_connector(self.database)
        app = self._job_app(connector)
        app.job_manager = job_queue.WorkerJobs(connector, self._stopping.is_set)
        async with app.open_async():
            await app.run_worker_async(
                queues=queues,
                name=name,
                concurrency=1,
                install_signal_handlers=False,
                delete_jobs="successful",
            )

    def stop_soon(self) -> None:
        """Ends a running training process. Senders that wait for a commit are answered within 5 seconds, even
        without the database. Returns at once; may be called more than once."""
        with self._stop_lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
            self.ingest.stop_soon()
            self._answering.start()

    def _answer_all(self) -> None:
        stopping = DatabaseUnavailable("the sidecar is stopping; send the batch again later")
        if refused := self.ingest.refuse_unacknowledged(stopping):
            log.warning("batches refused, as the sidecar is stopping", batches=refused)

    def request_retraining(self, server: str | None, *, force: bool) -> int:
        return self._retraining.request(self._deferring, server, force=force)

    def _count_timeout(self, timeout: DatabaseTimeout) -> None:
        self.metrics.database.timeouts.labels(timeout.work.name, timeout.reason).inc()

    def _do_chores(self) -> None:
        """The recurring chores: partitions and retention every hour, the rest every few seconds."""
        for chore in CHORES:
            self.metrics.loops.chore_last_success.labels(chore).set_to_current_time()
        maintained_at = -MAINTENANCE_SECONDS  # run at once: the last may have been interrupted
        while not self._stopping.wait(DUE_SECONDS):
            self._attempt("diagnose", self._diagnose)
            self._attempt("measure_costs", self._measure_costs)
            self._attempt("watch_goodput", self._watch_goodput)
            self._attempt("defer_retraining", lambda: self._retraining.defer_due(self._deferring))
            self._attempt("look_at_exports", lambda: self.pushed.look(datetime.now(UTC)))
            if (now := _seconds_since_boot()) - maintained_at >= MAINTENANCE_SECONDS:
                is_there = self._attempt("maintain", self._maintain)
                maintained_at = now if is_there else now - MAINTENANCE_SECONDS + MAINTENANCE_PAUSE_SECONDS

    def _drift_found(self) -> None:
        self._examiner.soon()
        self._looking.soon()  # an incident may have ended too

    def _diagnose(self) -> None:
        diagnosing.refresh(self.database, self._paging, datetime.now(UTC))

    def _measure_costs(self) -> None:
        cost_measurement.refresh(self.database, self._paging, datetime.now(UTC))

    def _watch_goodput(self) -> None:
        days = self.settings.detection.false_alarm_days
        goodput.refresh(
            self.database,
            self._paging,
            datetime.now(UTC),
            false_alarm_days=days,
            on_opened=self._drift_found,
        )

    def _attempt(self, name: str, chore: Callable[[], None]) -> bool:
        """`name`: one of CHORES. False: the database is away."""
        try:
            chore()
        except DatabaseUnavailable as error:
            log.warning("chore waits for the database", chore=name, error=str(error))
            return False
        except Exception:
            self.metrics.loops.chore_failures.labels(name).inc()
            log.exception("chore failed and will be tried again", chore=name)
        else:
            self.metrics.loops.chore_last_success.labels(name).set_to_current_time()
        return True

    def _maintain(self) -> None:
        try:
            done = retention.maintain(self.database, datetime.now(UTC), self.settings.retention)
            if done.created or done.dropped:
                log.info("partitions maintained", created=len(done.created), dropped=len(done.dropped))
        finally:  # captured text, which goes in time whatever keeps tables from being removed
            remove_leftovers(self.database, self.settings.data_directory)
            remove_outdated_corpora(self.database, self.settings)


def _seconds_since_boot() -> float:
    """Also those for which the machine was suspended, where that can be told; a clock that is set does not
    count."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def create_app(sidecar: Sidecar) -> FastAPI:
    """The HTTP application of a sidecar; starting and stopping it starts and stops the sidecar."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(sidecar.start)
        worker = asyncio.create_task(sidecar.work(), name="jobs")
        try:
            yield
        finally:
            sidecar.stop_soon()
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
            await asyncio.to_thread(sidecar.stop)

    app = http_application(lifespan)
    app.state.context = Context(
        settings=sidecar.settings,
        database=sidecar.database,
        ingest=sidecar.ingest,
        fold_watch=sidecar.fold_watch,
        usual_silences=sidecar.usual_silences,
        metrics=sidecar.metrics,
        pushed=sidecar.pushed,
        exports=ExportSlots(sidecar.settings.http.max_exports),
        overdue_sources=sidecar.scraping.overdue,
        sources_elsewhere=sidecar.scraping.waiting,
        probed=sidecar.probes.states,
    )
    app.state.request_retraining = sidecar.request_retraining
    install_guard(app, app.state.context)
    return app


class _Announced(uvicorn.Server):
    """Prints `ready` when it listens."""

    def __init__(self, config: uvicorn.Config, ready: str) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            _tell(self._ready)


def run_sidecar(settings: Settings) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Raises BadSettings (port in use, reachable by others without a key, unreadable SSL_CERT_FILE),
    DatabaseUnavailable.
    """
    configure_logging(settings.log_level, secrets_of(settings))
    _check_authorities()
    raise_limit()
    give_back_what_is_freed()
    collect_garbage_rarely()
    signal.signal(signal.SIGTERM, _unwind)
    with _bind(settings) as listener, open_database(settings) as database:
        with database.session() as session:
            refuse_open_bind(settings.host, has_keys=keys.has_keys(session))
        url = url_of(settings.host, listener.getsockname()[1])
        sidecar = Sidecar(settings, database, settings.alerting.external_url or url)
        config = uvicorn.Config(
            create_app(sidecar),
            http=bounded_protocol(ConnectionLimits(most=settings.http.max_connections)),
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=serving.REQUESTS_SECONDS,
        )
        ready = f"sidecar ready on {url} ({database.place})"
        has_ended = serving.serve(_Announced(config, ready), listener, sidecar.stop_soon)
    serving.exit_within(serving.EXIT_SECONDS if has_ended else 0.0)


def _check_authorities() -> None:
    """Raises BadSettings. Else calls of engines and webhooks fail one by one, and name no file."""
    try:
        authorities()
    except ValueError as error:
        raise BadSettings(str(error)) from None


def _unwind(*_: object) -> None:
    """Raises on SIGTERM, before and after serving, so that the embedded database is stopped too."""
    raise SystemExit(0)


@contextmanager
def _bind(settings: Settings) -> Iterator[socket.socket]:
    """Binds before anything else starts, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
            raise BadSettings(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
                f"choose another with {option}"
            ) from None
        yield listener


def run_retraining(settings: Settings, *, server: str | None, force: bool, traffic: Path | None) -> int:
    """The nightly job: one retraining. Prints its progress and outcome, and returns the exit code. At a
    terminal it counts as started by hand, and no next run is expected. Ctrl-C and SIGTERM end a run that has
    not begun to promote; a second one ends the process as it is.

    Raises BadSettings (no such engine), BadInput (the traffic file), DatabaseUnavailable.
    """
    configure_logging(settings.log_level, secrets_of(settings))
    stop = _Stop()
    # What was captured is in the sidecar's database, and nothing is trained for an engine that is not set.
    with open_database(settings, makes=traffic is not None and bool(settings.engines)) as database:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        outcome = retrain(
            database,
            settings,
            server=server,
            trigger="manual" if sys.stdout.isatty() else "nightly",
            force=force,
            traffic=traffic,
            should_stop=stop.is_asked,
            awaits_restart=True,
            on_progress=lambda progress: _tell(f"{progress.stage}: {progress.detail}"),
        )
    _tell(f"{outcome.state}: {outcome.reason}")
    was_cut_off = stop.number == signal.SIGINT and outcome.state in ("failed", "nothing_to_do")
    return 128 + signal.SIGINT if was_cut_off else outcome.exit_code


def _tell(line: str) -> None:
    """One that cannot be written, as to a full disk or to a reader that has gone, ends nothing."""
    with suppress(OSError):
        print(f"{line}\n", end="", flush=True)  # at once, since other threads log


class _Stop:
    """Notes the signal that asks the nightly job to end. Raises KeyboardInterrupt at the next one."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __call__(self, number: int, _frame: object) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number

    def is_asked(self) -> bool:
        return self.number is not None
