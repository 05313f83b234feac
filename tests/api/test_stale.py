"""A source that stopped sending: the status, the page, the gauge; and what does not count as sending."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import delete, update
from structlog.testing import capture_logs

from driftguard.detection import DetectorConfig
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.pipeline.look_around import LookAround
from driftguard.records import AcceptanceRecord
from driftguard.status.gather import gather
from driftguard.status.stream_status import StreamStatus
from driftguard.status.usual_silence import UsualSilences
from driftguard.store.database import Database
from driftguard.store.tables import Record, Stream
from tests.alerting.http_receiver import wait_until
from tests.api.pages.reading import text_of
from tests.pipeline.sidecar import post, running_sidecar
from tests.pipeline.traffic import Traffic, store

GOOD = {"code": 0.75, "german": 0.7}
BAD = {**GOOD, "german": 0.35}
CONFIG = DetectorConfig(minimum_drop=0.1)


def arrive(database: Database, traffic: Traffic, records: Sequence[AcceptanceRecord]) -> None:
    """At once, by a clock that agrees with that of the source."""
    store(database, records, arrived_at=traffic.clock)


def statuses(database: Database, now: datetime, usual: UsualSilences | None = None) -> list[StreamStatus]:
    with database.session() as session:
        return gather(session, now, usual=usual)


def test_stale_says_since_when_and_what_was_known_and_is_over_with_the_next_record(
    database: Database,
) -> None:
    traffic, metrics, usual = Traffic(seed=91), Metrics(), UsualSilences()
    pipeline = Pipeline(database, CONFIG, metrics)
    arrive(database, traffic, traffic.draw(1000, GOOD) + traffic.draw(300, BAD))
    while pipeline.fold_batch():
        pass
    last = traffic.clock
    (alive,) = statuses(database, last + timedelta(minutes=4), usual)
    assert alive.verdict == "degraded"
    (stale,) = statuses(database, last + timedelta(minutes=6), usual)
    assert (stale.verdict, stale.since, stale.incident_id) == ("stale", last, alive.incident_id)
    told = f"Stale: no record from chat arrived after {last:%F %T} UTC. "
    assert stale.text == f"{told}Before that: {alive.text}"
    LookAround(database, metrics).look(last + timedelta(minutes=6))
    assert b'verdict="stale"} 1.0' in metrics.exposition()

    traffic.clock += timedelta(minutes=20)
    arrive(database, traffic, traffic.draw(1, BAD))
    (again,) = statuses(database, traffic.clock + timedelta(minutes=6), usual)
    assert again.verdict == "degraded"  # a silence of 20 minutes was seen: the next one may last an hour
    (again,) = statuses(database, traffic.clock + timedelta(minutes=65), usual)
    assert again.verdict == "stale"


def test_canary_probes_are_no_sign_of_life_and_another_server_is_none_either(database: Database) -> None:
    traffic = Traffic(seed=92)
    arrive(database, traffic, traffic.draw(300, GOOD))
    arrive(database, traffic, traffic.draw(900, GOOD, server="mail"))
    arrive(database, traffic, traffic.draw(2, GOOD, kind="probe"))
    mail, chat = sorted(statuses(database, traffic.clock), key=lambda item: item.verdict)
    assert [(item.stream.server, item.verdict) for item in (mail, chat)] == [
        ("mail", "insufficient_data"),
        ("chat", "stale"),
    ]


def test_a_source_is_still_stale_when_its_records_have_expired(
    database: Database,
) -> None:
    traffic = Traffic(seed=96)
    arrive(database, traffic, traffic.draw(300, GOOD))
    while Pipeline(database, CONFIG, Metrics()).fold_batch():
        pass
    last = traffic.clock
    with database.session() as session:
        session.execute(delete(Record))
    (expired,) = statuses(database, last + timedelta(days=31))
    assert expired.verdict == "stale"
    traffic.clock += timedelta(minutes=10)
    arrive(database, traffic, traffic.draw(2, GOOD, kind="probe"))
    (probed,) = statuses(database, traffic.clock)
    assert probed.verdict == "stale"
    arrive(database, traffic, traffic.draw(2, GOOD))
    (again,) = statuses(database, traffic.clock)
    assert again.verdict == "steady"


def test_a_stream_that_another_draft_replaced_is_replaced_and_not_stale(database: Database) -> None:
    traffic = Traffic(seed=93)
    arrive(database, traffic, traffic.draw(100, GOOD))
    arrive(database, traffic, traffic.draw(900, GOOD, draft_version="v2"))
    with database.session() as session:
        session.execute(
            update(Stream)
            .where(Stream.draft_version == "v1")
            .values(last_seen_at=traffic.clock - timedelta(minutes=15))
        )
    found = {item.stream.draft_version: item.verdict for item in statuses(database, traffic.clock)}
    assert found == {"v1": "replaced", "v2": "insufficient_data"}
    found = {
        item.stream.draft_version: item.verdict
        for item in statuses(database, traffic.clock + timedelta(hours=1))
    }
    assert found == {"v1": "replaced", "v2": "stale"}


def test_requests_without_drafts_are_no_silence(database: Database) -> None:
    traffic = Traffic(seed=94)
    pipeline = Pipeline(database, CONFIG, Metrics())
    arrive(database, traffic, traffic.draw(600, GOOD))
    none = {"steps": 0, "drafted": 0, "accepted": 0, "emitted": 0}
    arrive(database, traffic, [msgspec.structs.replace(record, **none) for record in traffic.draw(200, GOOD)])
    while pipeline.fold_batch():
        pass
    assert [item.verdict for item in statuses(database, traffic.clock)] == ["drafting_stopped"]


def test_drafting_that_stopped_days_after_a_fall_says_since_when_it_has(database: Database) -> None:
    traffic = Traffic(seed=91)
    pipeline = Pipeline(database, CONFIG, Metrics())
    arrive(database, traffic, traffic.draw(1000, GOOD) + traffic.draw(300, BAD))
    while pipeline.fold_batch():
        pass
    (fallen,) = statuses(database, traffic.clock)
    assert fallen.verdict == "degraded"
    traffic.clock += timedelta(days=2)
    arrive(database, traffic, traffic.draw(50, BAD))
    drafted_last = traffic.clock
    none = {"steps": 0, "drafted": 0, "accepted": 0, "emitted": 0}
    arrive(database, traffic, [msgspec.structs.replace(record, **none) for record in traffic.draw(200, GOOD)])
    while pipeline.fold_batch():
        pass
    (found,) = statuses(database, traffic.clock)
    assert (found.verdict, found.incident_id) == ("drafting_stopped", fallen.incident_id)
    assert found.since is not None
    assert abs(found.since - drafted_last) < timedelta(minutes=1)


@pytest.mark.parametrize("slow", [timedelta(minutes=7), timedelta(minutes=-3)])
def test_the_clock_of_a_live_source_does_not_make_it_stale(database: Database, slow: timedelta) -> None:
    traffic = Traffic(seed=97)
    for _ in range(4):
        store(database, traffic.draw(60, GOOD), arrived_at=traffic.clock + slow)
    arrived = traffic.clock + slow
    words = (
        "7 min behind that of the sidecar, or its records arrive that late"
        if slow > timedelta()
        else "3 min ahead of that of the sidecar"
    )
    by_clocks = f"arrived at {arrived:%F %T} UTC and ended at {traffic.clock:%F %T} UTC by its own clock"
    (alive,) = statuses(database, arrived + timedelta(minutes=4))
    assert alive.verdict == "insufficient_data"
    assert alive.text.endswith(f" The newest record from chat {by_clocks}: its clock is {words}.")
    (stale,) = statuses(database, arrived + timedelta(minutes=6))
    assert (stale.verdict, stale.since) == ("stale", arrived)
    assert stale.text.startswith(
        f"Stale: no record from chat arrived after {arrived:%F %T} UTC; the newest ended at "
        f"{traffic.clock:%F %T} UTC by its own clock: its clock is {words}. Before that: "
    )


def test_records_that_waited_for_the_sidecar_are_no_silence(database: Database) -> None:
    traffic = Traffic(seed=98)
    store(database, traffic.draw(3600, GOOD), arrived_at=traffic.clock)  # an hour of them at once
    (alive,) = statuses(database, traffic.clock + timedelta(minutes=4))
    assert alive.verdict == "insufficient_data"
    (stale,) = statuses(database, traffic.clock + timedelta(minutes=6))
    assert stale.verdict == "stale"


def test_the_api_and_the_page_say_it(database: Database, tmp_path: Path) -> None:
    with running_sidecar(database, tmp_path) as client:
        traffic = Traffic(seed=95)
        post(client, traffic.draw(50, GOOD))
        wait_until(lambda: client.get("/api/v1/status").json()["unfolded_records"] == 0, "the fold")
        (stream,) = client.get("/api/v1/status").json()["streams"]
        assert (stream["verdict"], stream["in_service"]) == ("insufficient_data", True)
        assert "behind that of the sidecar, or its records arrive that late" in stream["text"]
        an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
        with database.session() as session:
            session.execute(update(Stream).values(traffic_arrived_at=an_hour_ago))
        (stream,) = client.get("/api/v1/status").json()["streams"]
        assert (stream["verdict"], stream["in_service"]) == ("stale", True)
        assert datetime.fromisoformat(stream["since"]) == an_hour_ago
        assert stream["text"] in text_of(client.get("/").text)


def test_a_server_that_a_clock_which_was_ahead_has_heard_is_stale_in_time_and_its_next_draft_in_service(
    database: Database,
) -> None:
    now = datetime.now(UTC)
    traffic = Traffic(seed=97, start=now + timedelta(days=30))
    arrive(database, traffic, traffic.draw(300, GOOD))
    with capture_logs() as logs:
        LookAround(database, Metrics()).look(now)
    assert [each["event"] for each in logs] == ["streams were heard later than now: the clock was set back"]
    (silent,) = statuses(database, now + timedelta(minutes=7))
    assert silent.verdict == "stale"
    assert silent.since is not None
    assert now <= silent.since < now + timedelta(minutes=1)
    traffic.clock = now + timedelta(minutes=20)
    arrive(database, traffic, traffic.draw(300, GOOD, draft_version="v2"))
    found = {item.stream.draft_version: item.verdict for item in statuses(database, traffic.clock)}
    assert found == {"v1": "replaced", "v2": "insufficient_data"}


def test_a_clock_that_is_set_back_changes_nothing_in_which_draft_is_in_service(database: Database) -> None:
    traffic = Traffic(seed=98)
    for version in ("v1", "v2"):
        arrive(database, traffic, traffic.draw(300, GOOD, draft_version=version))
        traffic.clock += timedelta(days=1)
    traffic.clock -= timedelta(days=3)
    LookAround(database, Metrics()).look(traffic.clock)
    arrive(database, traffic, traffic.draw(30, GOOD, draft_version="v2"))
    found = {item.stream.draft_version: item.verdict for item in statuses(database, traffic.clock)}
    assert found == {"v1": "replaced", "v2": "insufficient_data"}


def test_a_clock_that_is_behind_that_of_the_database_moves_no_stream(database: Database) -> None:
    """As while a machine starts: what was heard before stays known."""
    traffic = Traffic(seed=99)
    arrive(database, traffic, traffic.draw(300, GOOD))
    with capture_logs() as logs:
        LookAround(database, Metrics()).look(datetime(2000, 1, 1, tzinfo=UTC))
    assert logs == []
    (known,) = statuses(database, traffic.clock + timedelta(minutes=6))
    assert (known.verdict, known.since) == ("stale", traffic.clock)
