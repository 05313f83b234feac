"""One stated rate of false pages for all streams together, on a real database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, update

from driftguard.api.status_models import FleetModel
from driftguard.app import Sidecar, create_app
from driftguard.detection import DetectorConfig
from driftguard.detection.fleet import Fleet
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.settings import FalseAlarmScope, Settings
from driftguard.status import streams_in_service
from driftguard.store import incidents
from driftguard.store.database import Database
from driftguard.store.streams import all_streams
from driftguard.store.tables import DetectorState, Incident, Stream
from tests.api.ingest_server import serving
from tests.pipeline.traffic import Traffic, store

CONFIG = DetectorConfig(minimum_drop=0.1)
SERVERS = ("alpha", "beta", "gamma", "delta")


def fold_all(database: Database, scope: FalseAlarmScope) -> None:
    pipeline = Pipeline(database, CONFIG, Metrics(), scope=scope, batch_records=200)
    while pipeline.fold_batch():
        pass


def send(database: Database, traffic: Traffic, count: int, bad: tuple[str, ...] = ()) -> None:
    """So many requests of each server, one after the other."""
    rates = {server: 0.35 if server in bad else 0.7 for server in SERVERS}
    drawn = [
        record
        for _ in range(count)
        for server, rate in rates.items()
        for record in traffic.draw(1, {"chat": rate}, server=server)
    ]
    store(database, drawn)


def opened(database: Database) -> list[Incident]:
    with database.session() as session:
        return list(session.scalars(select(Incident).order_by(Incident.opened_seq)))


def test_each_stream_alone_needs_a_and_all_together_need_n_times_as_much(database: Database) -> None:
    traffic = Traffic(seed=1)
    send(database, traffic, 250)
    send(database, traffic, 80, bad=("beta",))
    fold_all(database, "fleet")
    (incident,) = opened(database)
    assert incident.evidence.false_alarm_factor == 4.0
    assert incident.evidence.false_alarm_every == 4 * CONFIG.false_alarm_every
    assert (incident.evidence.evidence or 0.0) >= 4 * CONFIG.false_alarm_every
    with database.session() as session:
        assert streams_in_service.gather(session, all_streams(session)).named == {incident.stream_id: 4.0}
        factors = {
            id_: streams_in_service.gather(session, all_streams(session)).factor(id_)
            for id_ in session.scalars(select(Stream.id))
        }
        told = {row.summary["false_alarm_every"] for row in session.scalars(select(DetectorState))}
    assert factors.pop(incident.stream_id) == 4.0  # its own naming does not help it
    assert set(factors.values()) == {2.0}  # k = 2 for the next one
    assert told == {CONFIG.false_alarm_every}  # what is promised of each stream does not move with the others

    send(database, traffic, 80, bad=("beta", "gamma"))
    fold_all(database, "fleet")
    assert [item.evidence.false_alarm_factor for item in opened(database)] == [4.0, 2.0]
    with database.session() as session:
        incidents.move(session, incident.id, "resolved", "expected", datetime.now(UTC))
        assert list(streams_in_service.gather(session, all_streams(session)).named.values()) == [2.0]
        assert (
            streams_in_service.gather(session, all_streams(session)).factor() == 2.0
        )  # gamma still counts, with what it was named with


def test_by_default_each_stream_has_its_own_a(database: Database) -> None:
    traffic = Traffic(seed=1)
    send(database, traffic, 250)
    send(database, traffic, 80, bad=("beta",))
    fold_all(database, "stream")
    (incident,) = opened(database)
    assert incident.evidence.false_alarm_factor == 1.0
    assert incident.evidence.false_alarm_every == CONFIG.false_alarm_every


def test_a_server_that_is_gone_for_a_week_no_longer_makes_the_others_need_more(database: Database) -> None:
    """Its stream stays the newest of its server for ever."""
    send(database, Traffic(seed=4), 3)
    with database.session() as session:
        gone = update(Stream).where(Stream.server == "delta")
        session.execute(gone.values(last_seen_at=Stream.last_seen_at - timedelta(days=8)))
        assert streams_in_service.gather(session, all_streams(session)).streams == 3


def test_one_stream_is_not_told_as_several() -> None:
    told = FleetModel.of(Fleet(1, {}), Settings().detection)
    assert told.text.startswith("1 stream in service: ")


def test_of_no_stream_no_false_page_is_foretold() -> None:
    assert FleetModel.of(Fleet(0, {}), Settings().detection).text == "0 streams in service"


@pytest.mark.parametrize(
    ("scope", "whose", "factor"), [("stream", "of each", 1.0), ("fleet", "over all", 4.0)]
)
def test_the_status_says_what_was_chosen_for_so_many_streams(
    database: Database, tmp_path: Path, scope: FalseAlarmScope, whose: str, factor: float
) -> None:
    send(database, Traffic(seed=2), 3)
    store(database, Traffic(seed=3).draw(5, {"chat": 0.7}, draft_version="old", server="alpha"))
    with database.session() as session:
        old = update(Stream).where(Stream.draft_version == "old")
        session.execute(old.values(last_seen_at=Stream.last_seen_at - timedelta(hours=1)))
    settings = Settings.model_validate({"data_dir": tmp_path, "detection": {"false_alarm_scope": scope}})
    with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:
        told = client.get("/api/v1/status").json()["fleet"]
    assert (told["streams"], told["false_alarm_scope"]) == (4, scope)
    assert told["false_alarm_factor"] == factor
    assert told["text"].startswith(
        f"4 streams in service: while nothing changes, the first false page {whose}"
    )
    assert told["text"].endswith("after 90 days or more")
