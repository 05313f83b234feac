"""What one stream raises stops that stream, and no other; and nothing of it is lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select, text
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from driftguard import detection
from driftguard.detection import Finding
from driftguard.detection.state import codec
from driftguard.errors import DatabaseUnavailable
from driftguard.incidents import opening
from driftguard.metrics import Metrics
from driftguard.pipeline import batch_fold, held, state_cache
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.records.documents.incident import IncidentEvidence
from driftguard.store import folding
from driftguard.store.database import Database
from driftguard.store.folding import StoredRecord
from driftguard.store.tables import DetectorHistory, DetectorState, HeldStream, Incident, Stream
from tests.alerting.http_receiver import wait_until
from tests.pipeline.sidecar import running_sidecar
from tests.pipeline.test_fold_loop import CONFIG, fold_all
from tests.pipeline.traffic import Traffic, all_summaries, store

POISONED, SEGMENT = "poisoned", "rare poison"
SERVERS = ("alpha", POISONED, "gamma", "delta")
Plant = Callable[[pytest.MonkeyPatch, list[str]], None]


def traffic_of(database: Database, traffic: Traffic, *counts: tuple[int, float]) -> None:
    """(records of each stream, acceptance), one stream after the other in turns of ten; one request in ten of
    the poisoned one is of a segment of its own."""
    for count, rate in counts:
        for _ in range(count // 10):
            drawn = [
                record for server in SERVERS for record in traffic.draw(9, {"chat": rate}, server=server)
            ]
            for server in SERVERS:
                segment = SEGMENT if server == POISONED else "code"
                drawn += traffic.draw(1, {segment: rate}, server=server)
            store(database, drawn)


def raise_for(calls: list[str], what: str) -> None:
    calls.append(what)
    if calls[0] == "on":
        raise RuntimeError(f"planted in {what}\nwith a second line")


def in_the_fold(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    fold_many = detection.fold_many

    def poisoned(config: Any, states: Any, batches: Sequence[Any]) -> Any:
        if any(SEGMENT in batch.segment for batch in batches):
            raise_for(calls, "the fold")
        return fold_many(config, states, batches)

    patch.setattr(batch_fold, "fold_many", poisoned)


def in_the_summary(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    describe = detection.describe

    def poisoned(config: Any, state: Any, factor: float) -> Any:
        if SEGMENT in state.names:
            raise_for(calls, "the summary")
        return describe(config, state, factor)

    patch.setattr(state_cache, "describe", poisoned)


def in_the_decoding(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    from_parts = codec.from_parts

    def poisoned(parts: Any) -> Any:
        state = from_parts(parts)
        if SEGMENT in state.names:
            raise_for(calls, "the decoding")
        return state

    patch.setattr(state_cache, "from_parts", poisoned)


def is_poisoned(session: Session, incident: Incident) -> bool:
    stream = session.get(Stream, incident.stream_id)
    return stream is not None and stream.server == POISONED


def in_the_incident(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    open_incident = opening.open_incident

    def poisoned(session: Session, incident: Incident, reason: str) -> None:
        open_incident(session, incident, reason)
        if is_poisoned(session, incident):
            raise_for(calls, "the incident")

    patch.setattr(opening, "open_incident", poisoned)


def in_a_statement(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    open_incident = opening.open_incident

    def poisoned(session: Session, incident: Incident, reason: str) -> None:
        open_incident(session, incident, reason)
        calls.append("a statement")
        if is_poisoned(session, incident) and calls[0] == "on":
            session.execute(text("SELECT 1 / 0"))

    patch.setattr(opening, "open_incident", poisoned)


def told(database: Database) -> set[str]:
    with database.session() as session:
        return set(session.scalars(select(Stream.server).join(Incident, Incident.stream_id == Stream.id)))


def all_states(database: Database) -> list[tuple[Any, ...]]:
    with database.session() as session:
        heads = select(DetectorState.stream_id, DetectorState.state, DetectorState.summary)
        pieces = select(DetectorHistory.stream_id, DetectorHistory.number, DetectorHistory.piece)
        return [
            *map(tuple, session.execute(heads.order_by(DetectorState.stream_id))),
            *map(tuple, session.execute(pieces.order_by(DetectorHistory.stream_id, DetectorHistory.number))),
        ]


def from_scratch(database: Database) -> list[tuple[Any, ...]]:
    """The states after one fold of everything that is stored."""
    with database.session() as session:
        for table in ("incidents", "detector_states", "fold_positions", "held_streams"):
            session.execute(text(f"DELETE FROM {table}"))
    fold_all(Pipeline(database, CONFIG, Metrics()))
    return all_states(database)


def described_in_the_end(pipeline: Pipeline) -> None:
    """A stream is described in turn: after as many idle batches all of them are."""
    for _ in SERVERS:
        pipeline.fold_batch()


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant", [in_the_fold, in_the_summary, in_the_decoding, in_the_incident, in_a_statement]
)
def test_a_stream_that_raises_keeps_no_other_from_its_incident_and_its_own_is_told_once_it_can(
    database: Database, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    monkeypatch.setattr(held, "RETRY_AFTER_SECONDS", (0.0,) * 1_000)
    traffic = Traffic(seed=71)
    traffic_of(database, traffic, (600, 0.75))
    fold_all(Pipeline(database, CONFIG, Metrics(), batch_records=500))
    calls = ["on"]
    plant(monkeypatch, calls)
    traffic_of(database, traffic, (200, 0.4))
    metrics = Metrics()
    pipeline = Pipeline(database, CONFIG, metrics, batch_records=300)
    with database.session() as session:
        newest = session.scalar(text("SELECT max(seq) FROM records"))
    for _ in range(5):
        pipeline.fold_batch()
    assert told(database) == {*SERVERS} - {POISONED}
    with database.session() as session:
        (row,) = session.scalars(select(HeldStream))
        assert folding.position(session) == newest
        assert folding.unfolded(session) == row.records_behind > 0
        assert "\n" not in row.reason
    assert (metrics.registry.get_sample_value("driftguard_stream_failures_total") or 0) >= 2

    calls[0] = "off"
    fold_all(pipeline)
    assert told(database) == {*SERVERS}
    with database.session() as session:
        assert folding.unfolded(session) == 0
        assert session.scalars(select(HeldStream)).all() == []
    described_in_the_end(pipeline)
    assert all_states(database) == from_scratch(database)


def test_a_stream_is_set_aside_after_five_failures_and_tried_again_by_another_version(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "RETRY_AFTER_SECONDS", (0.0, 0.0, 0.0, 0.0))
    calls: list[int] = []

    def failing(
        session: Session, stream: Stream, records: Sequence[StoredRecord], findings: Sequence[Finding]
    ) -> None:
        if stream.server == POISONED:
            calls.append(len(records))
            raise RuntimeError("the reader failed")

    def pipeline() -> Pipeline:
        return Pipeline(database, CONFIG, Metrics(), after_fold=[failing], batch_records=400)

    def held_stream() -> HeldStream:
        with database.session() as session:
            return session.scalars(select(HeldStream)).one()

    traffic = Traffic(seed=71)
    traffic_of(database, traffic, (100, 0.75))
    first = pipeline()
    for _ in range(8):
        first.fold_batch()
    assert len(calls) == 6  # its batch together with the others', then alone, then four times again
    row = held_stream()
    assert row.set_aside_at is not None
    assert (row.failures, row.after_seq, row.records_behind) == (5, 0, 100)
    assert row.reason == "RuntimeError: the reader failed"

    traffic_of(database, traffic, (100, 0.75))  # of what it sends meanwhile nothing is lost either
    fold_all(first)
    fold_all(pipeline())  # restarted
    assert (len(calls), held_stream().records_behind) == (6, 200)
    monkeypatch.setattr(held, "VERSION", "0.2.0")
    newer = pipeline()
    for _ in range(3):
        newer.fold_batch()
    assert len(calls) == 7
    assert (held_stream().version, held_stream().set_aside_at) == ("0.2.0", row.set_aside_at)
    monkeypatch.setattr(held, "VERSION", "0.3.0")
    fold_all(Pipeline(database, CONFIG, Metrics(), batch_records=60))
    with database.session() as session:
        assert session.scalars(select(HeldStream)).all() == []
        requests = {each["requests"] for each in all_summaries(session).values()}
    assert requests == {200}


def test_a_failure_of_the_database_is_no_streams_own(database: Database) -> None:
    def too_slow(session: Session, *_: object) -> None:
        session.execute(text("SET LOCAL statement_timeout = 1"))
        session.execute(text("SELECT pg_sleep(1)"))

    traffic = Traffic(seed=71)
    traffic_of(database, traffic, (20, 0.75))
    pipeline = Pipeline(database, CONFIG, Metrics(), after_fold=[too_slow])
    with pytest.raises(DatabaseUnavailable, match="a statement was cancelled"):
        pipeline.fold_batch()
    with database.session() as session:
        assert session.scalars(select(HeldStream)).all() == []
        assert folding.position(session) == 0


def test_records_that_retention_drops_while_their_stream_is_held_are_told(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "RETRY_AFTER_SECONDS", (0.0,) * 10)
    calls = ["on"]
    in_the_fold(monkeypatch, calls)
    traffic = Traffic(seed=71)
    traffic_of(database, traffic, (100, 0.75))
    pipeline = Pipeline(database, CONFIG, Metrics())
    pipeline.fold_batch()
    with database.session() as session:
        session.execute(text("DELETE FROM records WHERE seq <= 120"))
    calls[0] = "off"
    with capture_logs() as logs:
        fold_all(pipeline)
    (line,) = [each for each in logs if each["event"].startswith("retention dropped records")]
    assert line["records"] == 30
    with database.session() as session:
        assert folding.unfolded(session) == 0


def test_a_stream_that_is_set_aside_is_told_and_folded_again_when_somebody_asks_for_it(
    database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(held, "RETRY_AFTER_SECONDS", ())
    calls = ["on"]
    in_the_fold(monkeypatch, calls)
    traffic = Traffic(seed=71)
    traffic_of(database, traffic, (100, 0.75))
    Pipeline(database, CONFIG, Metrics()).fold_batch()
    with database.session() as session:
        row = session.scalars(select(HeldStream)).one()

    reason = (
        "the detector failed 1 times at its records (RuntimeError: planted in the fold). 100 of them wait"
    )
    with running_sidecar(database, tmp_path) as client:

        def verdicts() -> dict[str, str]:
            return {
                each["server"]: each["verdict"] for each in client.get("/api/v1/status").json()["streams"]
            }

        def set_aside() -> str:
            lines = client.get("/metrics").text.splitlines()
            return next(line for line in lines if line.startswith("driftguard_streams_set_aside "))

        wait_until(lambda: set_aside() == "driftguard_streams_set_aside 1.0", "the gauge")
        named = f'draft_version="v1",method="draft_model",server="{POISONED}",target="target"}}'
        named = f"driftguard_stream_set_aside_since_timestamp_seconds{{{named}"
        assert named in client.get("/metrics").text
        assert verdicts() == {**dict.fromkeys(SERVERS, "insufficient_data"), POISONED: "cannot_be_judged"}
        assert reason in client.get("/").text
        assert client.get("/readyz").json()["fold_lag_records"] == 100

        path = f"/api/v1/streams/{row.stream_id}/retry"
        again = client.post(path)
        assert (again.status_code, again.json()["records_behind"]) == (200, 100)
        wait_until(lambda: len(calls) >= 5, "it to be tried again")  # together, alone, and both once more
        assert verdicts()[POISONED] == "cannot_be_judged"
        calls[0] = "off"
        client.post(path)
        wait_until(lambda: verdicts()[POISONED] == "insufficient_data", "the stream to be folded")
        assert client.get("/readyz").json()["fold_lag_records"] == 0
        assert client.post(path).status_code == 409
        assert client.post("/api/v1/streams/12345/retry").status_code == 404


def test_streams_in_which_nothing_is_found_are_folded_and_stored_together(database: Database) -> None:
    """However many they are: what is alone costs two statements more for each stream."""
    traffic, statements = Traffic(seed=72), Counter[str]()
    event.listen(
        database.engine,
        "before_cursor_execute",
        lambda _connection, _cursor, statement, *_: statements.update([statement.split(maxsplit=1)[0]]),
    )
    pipeline = Pipeline(database, CONFIG, Metrics())

    def statements_of_a_batch(servers: int) -> Counter[str]:
        for _ in range(2):  # the first one loads what is not in memory
            records = [
                record
                for server in range(servers)
                for record in traffic.draw(3, {"chat": 0.75}, server=f"server {server}")
            ]
            store(database, sorted(records, key=lambda record: record.segment))
            statements.clear()
            with capture_logs() as logs:
                assert pipeline.fold_batch() == 3 * servers
            assert logs == []
        return statements.copy()

    few = statements_of_a_batch(10)
    assert few == statements_of_a_batch(40)
    assert few["SAVEPOINT"] <= 2


def test_a_number_that_is_not_finite_holds_its_stream_and_says_where_it_was(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(**known: Any) -> IncidentEvidence:
        return IncidentEvidence(**known, slowdown_formula=math.inf)

    traffic = Traffic(seed=73)
    store(database, traffic.draw(900, {"chat": 0.75}, server=POISONED))
    store(database, traffic.draw(300, {"chat": 0.75}))
    fold_all(Pipeline(database, CONFIG, Metrics()))
    monkeypatch.setattr(opening, "IncidentEvidence", poisoned)
    store(database, traffic.draw(200, {"chat": 0.4}, server=POISONED) + traffic.draw(50, {"chat": 0.75}))
    fold_all(Pipeline(database, CONFIG, Metrics()))
    with database.session() as session:
        (row,) = session.scalars(select(HeldStream))
        assert row.reason == "NotFinite: incidents.evidence.slowdown_formula: inf is not a finite number"
        assert {each["requests"] for each in all_summaries(session).values()} == {900, 350}


def test_a_held_stream_does_not_wait_for_the_time_that_a_clock_which_was_ahead_has_set() -> None:
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    again = [now - timedelta(seconds=1), now + timedelta(seconds=64), now + timedelta(days=2)]
    assert [held.is_due(HeldStream(next_try_at=at), now, ()) for at in again] == [True, False, True]
