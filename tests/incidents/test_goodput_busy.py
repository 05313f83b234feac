"""The watch over goodput of a stream with more requests than are counted from one look to the next."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np
import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from driftguard.incidents import goodput
from driftguard.incidents.opening import NOBODY
from driftguard.records import AcceptanceRecord
from driftguard.store import goodput_watches
from driftguard.store.database import Database, DatabaseTimeout, Work
from driftguard.store.tables import GoodputWatchRow, Record, Stream
from tests.cost.goodput_traffic import Machine
from tests.incidents.test_cost_measurement import records
from tests.incidents.test_goodput import Served, found
from tests.pipeline.traffic import store


@pytest.fixture(autouse=True)
def _limits_that_a_test_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput_watches, "MOST_READ", 60)
    monkeypatch.setattr(goodput_watches, "MOST_SPANNED", 120)


def read(database: Database, after: int) -> list[Any]:
    with database.session() as session:
        (stream,) = session.scalars(select(Stream).where(Stream.method != "none", Stream.server == "chat"))
        return goodput_watches.after(session, stream, after)


@pytest.mark.slow
def test_its_fall_is_found_although_looks_are_hardly_further_apart_than_a_block_is_long(
    database: Database,
) -> None:
    """301 requests from look to look: the newest 120 of them never span the five minutes of a block."""
    served = Served(database, 41, hours=6.0, seconds_apart=1.0)
    for _ in range(54):
        served.serve(301.0 / 3600.0)
    assert found(database) == []
    served.machine.slower = 3.0
    changed_at = datetime.fromtimestamp(served.machine.clock, UTC)
    for _ in range(12):
        served.serve(301.0 / 3600.0)
    ((incident, _),) = found(database)
    assert (incident.direction, incident.state) == ("slower", "open")
    assert abs(incident.change_point_at - changed_at) < timedelta(minutes=11)


def test_requests_are_read_from_all_of_the_time_since_the_last_look(database: Database) -> None:
    rng, machine = np.random.default_rng(42), Machine(without=0.2, clock=datetime.now(UTC).timestamp() - 9e4)
    store(database, records(rng, machine.serve(rng, 1_500)))
    rows = read(database, 300)
    assert 30 <= len(rows) < 120
    thirds, _ = np.histogram([row.seq for row in rows], bins=3, range=(301, 1_500))
    assert thirds.min() >= 10
    assert [row.seq for row in rows] == sorted({row.seq for row in rows})
    assert 0.05 < np.mean([row.request.drafted == 0 for row in rows]) < 0.4  # those of the other stream too
    assert len(read(database, 1_470)) == 30  # of few, each


def test_requests_after_a_pause_are_read_no_more_often_than_others(database: Database) -> None:
    """The first of a burst may be unlike the others; another server sends between the bursts."""
    rng, machine = np.random.default_rng(43), Machine(clock=datetime.now(UTC).timestamp() - 9e4, stalls=0.0)
    batch: list[AcceptanceRecord] = []
    for _ in range(400):
        for place, one in enumerate(records(rng, machine.serve(rng, 8))):
            batch.append(msgspec.structs.replace(one, segment="first" if place == 0 else "later"))
        others = records(rng, machine.serve(rng, int(rng.integers(1, 30))))
        batch += [msgspec.structs.replace(one, server="other") for one in others]
    store(database, batch)
    with database.session() as session:
        last = max(session.scalars(select(Record.seq)))
    rows = [row for after in range(1, last // 2, last // 40) for row in read(database, after)]
    assert len(rows) > 500
    assert np.mean([row.request.segment == "first" for row in rows]) == pytest.approx(1 / 8, abs=0.04)


def test_a_stream_that_takes_too_long_keeps_no_other_from_being_watched(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, machine = np.random.default_rng(46), Machine(clock=datetime.now(UTC).timestamp() - 9e4)
    for server in ("slow", "chat", "mail"):
        batch = records(rng, machine.serve(rng, 5))
        store(database, [msgspec.structs.replace(one, server=server) for one in batch])
    read_all, impatient = goodput_watches.after, Work("chore", 3.0, 2.0, 60.0)

    def after(session: Session, stream: Stream, seq: int) -> list[Any]:
        if stream.server == "slow":
            session.execute(text("SELECT pg_sleep(60)"))
        return read_all(session, stream, seq)

    monkeypatch.setattr(goodput_watches, "after", after)
    monkeypatch.setattr(goodput, "CHORE", impatient)
    with pytest.raises(DatabaseTimeout):
        goodput.refresh(database, NOBODY, datetime.now(UTC), false_alarm_days=90)
    with database.session() as session:
        seen = select(Stream.server).join(GoodputWatchRow, GoodputWatchRow.stream_id == Stream.id)
        assert set(session.scalars(seen.where(GoodputWatchRow.looked_at.is_not(None)))) == {"chat", "mail"}


def test_a_first_look_begins_with_the_newest(database: Database) -> None:
    rng, machine = np.random.default_rng(44), Machine(clock=datetime.now(UTC).timestamp() - 9e4)
    store(database, records(rng, machine.serve(rng, 1_000)))
    rows = read(database, 0)
    assert (len(rows), rows[-1].seq) == (60, 1_000)
    assert rows[0].seq > 1_000 - 120
