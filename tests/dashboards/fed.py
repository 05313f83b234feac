"""Servers to scrape: a sidecar's metrics, from a database in which drafts were retrained, and the built-in
engine's metrics while it serves. The numbers come from the methods that the programs call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from uuid import uuid4

import msgspec
from driftguard_engine.server.metrics import Metrics as EngineMetrics
from driftguard_engine.telemetry.telemetry import Telemetry

from driftguard.cost import Cost
from driftguard.detection import DetectorConfig
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.pipeline.look_around import LookAround
from driftguard.records import UnrecordedRequests
from driftguard.records.documents.cost import Choice, Interval, LoadSpeedup, Speed
from driftguard.records.documents.retraining_run import Costs, GateRules, RunNumbers
from driftguard.retraining.training.gate import DraftScores, GroupScores, decide
from driftguard.store import drafts, stream_costs, streams, unrecorded_requests
from driftguard.store.database import Database
from driftguard.store.tables import RetrainRun
from tests.engine.server.fake_engine import FakeEngine
from tests.engine.telemetry.finished import finished_request
from tests.pipeline.traffic import Traffic, store, with_positions

GOOD = {"code": 0.75, "german": 0.7}
PLACE = {"server": "chat", "target": "target"}


def scores(kept: float) -> DraftScores:
    return DraftScores([kept, kept + 0.1] * 20, [100.0] * 40, [80.0 * kept] * 40, 2_000.0)


@contextmanager
def exposed(exposition: Callable[[], bytes]) -> Iterator[str]:
    """The base URL of a server whose /metrics are what `exposition` returns."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = exposition()
            with suppress(BrokenPipeError):  # Prometheus was stopped meanwhile
                self.send_response(200)
                self.send_header("content-type", "text/plain; version=0.0.4")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class MendedSidecar:
    """A server whose draft was replaced after a retraining that passed the gate; an earlier candidate was
    rejected. Not all of its requests are recorded."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.metrics = Metrics()
        self._pipeline = Pipeline(database, DetectorConfig(), self.metrics)
        self._looking = LookAround(database, self.metrics)
        self._random = Traffic(seed=22, start=datetime.now(UTC) - timedelta(minutes=2), seconds_apart=0.05)
        store(database, with_positions(self._random.draw(100, GOOD)))
        self._retrained()
        self._measured()
        self._not_recorded()

    def exposition(self) -> bytes:
        """With gauges that count as new, as those of a sidecar that goes on by itself."""
        self.metrics.loops.gauges_last_refresh.set_to_current_time()
        return self.metrics.exposition()

    def go_on(self) -> None:
        """One more run ends, and everything else goes on."""
        self._add_run("nothing_to_do")
        store(self._database, with_positions(self._random.draw(20, GOOD)))
        self.metrics.sources.observe("chat", "vllm", "reporting", datetime.now(UTC))
        self.metrics.notifications.attempts.labels("webhook", "firing", "delivered").inc()
        self.metrics.ingest.captures.labels("accepted").inc()
        self._pipeline.fold_batch()
        self._looking.look(datetime.now(UTC))

    def _add_run(self, state: str, **values: object) -> None:
        now = datetime.now(UTC)
        running = state in ("training", "watching")
        with self._database.session() as session:
            run = RetrainRun(
                id=uuid4(),
                **PLACE,
                trigger="nightly",
                state=state,
                started_at=now,
                ended_at=None if running else now,
                **values,
            )
            session.add(run)

    def _retrained(self) -> None:
        groups = [
            GroupScores("german", True, 4_000, scores(0.4), scores(0.6)),
            GroupScores("code", False, 4_000, scores(0.7), scores(0.7)),
        ]
        decision = decide(groups, Costs(4, 0.01, 0.001, 0.001), GateRules(0.02, 0.02))
        assert decision.promote, decision.reason
        self._add_run("training")
        self._add_run("promoted", candidate_version="v1", numbers=RunNumbers(gate=decision))
        with self._database.session() as session:
            for version in ("v0", "v1"):
                drafts.put_in_service(
                    session,
                    server=PLACE["server"],
                    target=PLACE["target"],
                    version=version,
                    name="draft",
                    method="draft_model",
                    directory=None,
                    at=datetime.now(UTC),
                )

    def _measured(self) -> None:
        """What the costs of a stream look like once requests without speculation were timed too."""
        speed = Speed(40.0, 0.025, 3.0, 0.075, 500)
        choices = tuple(
            Choice(k, tokens, 0.02 + 0.01 * k, speed, Interval(gain, gain - 0.05, gain + 0.05), True)
            for k, tokens, speed, gain in ((0, 1.0, 25.0, -0.4), (4, 3.0, 40.0, 0.0), (5, 3.2, 42.0, 0.05))
        )
        cost = Cost(
            speed,
            num_speculative_tokens=4,
            acceptance_rate=0.7,
            choices=choices,
            best=5,
            break_even_acceptance=Interval(0.4, 0.35, 0.45),
            loads=(LoadSpeedup((3, 4), True, 500, 50, Interval(1.6, 1.5, 1.7), 40.0, 25.0),),
        )
        with self._database.session() as session:
            (stream,) = streams.all_streams(session)
            stream_costs.store(session, stream.id, msgspec.to_builtins(cost), datetime.now(UTC))

    def _not_recorded(self) -> None:
        now = datetime.now(UTC)
        hour = now.replace(minute=0, second=0, microsecond=0)
        count = UnrecordedRequests(
            hour=hour, server=PLACE["server"], reason="stop_string", reporter=uuid4(), requests=30
        )
        with self._database.session() as session:
            unrecorded_requests.store(session, [count], 10, now)


class ServingEngine:
    """The metrics of an engine without a model, whose finished requests are made up."""

    def __init__(self) -> None:
        telemetry = Telemetry(None, None, "test", "fake-target")
        self.metrics = EngineMetrics(FakeEngine(SimpleNamespace()), telemetry)

    def go_on(self) -> None:
        """Two requests end, and one is refused."""
        for number in range(2):
            self.metrics.finished(finished_request(number))
        self.metrics.refused("queue_full")
