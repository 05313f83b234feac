"""Counts of unrecorded requests: what is sent again counts once, what is new is added."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from driftguard.records import UnrecordedReason, UnrecordedRequests, hour_of
from driftguard.status import unrecorded
from driftguard.store.database import Database
from driftguard.store.records import insert_batches
from driftguard.store.streams import StreamRegistry
from driftguard.store.unrecorded_requests import Recorded, recorded_since, since, store
from tests.store.samples import make_records

NOW = datetime.now(UTC)
HOUR = hour_of(NOW)
DAY_AGO = NOW - timedelta(days=1)


def counted(
    requests: int,
    reporter: UUID,
    reason: UnrecordedReason = "no_numbers",
    server: str = "chat",
    hour: datetime = HOUR,
) -> UnrecordedRequests:
    return UnrecordedRequests(reporter=reporter, server=server, hour=hour, reason=reason, requests=requests)


def stored(database: Database, *counts: UnrecordedRequests, servers: int = 9) -> tuple[int, set[str]]:
    with database.session() as session:
        news, refused = store(session, counts, servers, NOW)
    return news, set(refused)


def found(database: Database) -> dict[str, dict[UnrecordedReason, int]]:
    with database.session() as session:
        return since(session, DAY_AGO, NOW)


def test_what_is_sent_again_or_late_counts_once(database: Database) -> None:
    one = uuid4()
    assert stored(database, counted(5, one)) == (1, set())
    assert stored(database, counted(5, one)) == (0, set())
    assert stored(database, counted(8, one)) == (1, set())
    assert stored(database, counted(6, one)) == (0, set())  # overtaken
    assert stored(database, counted(9, one), counted(12, one), counted(10, one)) == (1, set())
    assert found(database) == {"chat": {"no_numbers": 12}}


def test_reporters_hours_and_servers_add_up_the_most_frequent_reason_first(database: Database) -> None:
    one, other = uuid4(), uuid4()  # two workers, or one before and after a restart
    earlier = HOUR - timedelta(hours=3)
    stored(database, counted(2, one), counted(3, other), counted(4, one, hour=earlier))
    stored(database, counted(10, one, "stop_string"), counted(1, one, server="code"))
    stored(database, counted(100, one, hour=HOUR - timedelta(days=1, hours=1)))  # too long ago
    assert found(database) == {"chat": {"stop_string": 10, "no_numbers": 9}, "code": {"no_numbers": 1}}
    assert list(found(database)["chat"]) == ["stop_string", "no_numbers"]
    with database.session() as session:
        assert since(session, DAY_AGO, NOW, ["code", "unheard"]) == {"code": {"no_numbers": 1}}


def test_a_server_that_is_too_many_is_refused_and_known_ones_go_on(database: Database) -> None:
    one = uuid4()
    assert stored(database, counted(1, one, server="a"), servers=2) == (1, set())
    both = [counted(2, one, server=server) for server in ("a", "b", "c")]
    assert stored(database, *both, servers=2) == (2, {"c"})
    assert stored(database, counted(3, one, server="c"), counted(3, one, server="b"), servers=2) == (1, {"c"})
    assert found(database) == {"a": {"no_numbers": 2}, "b": {"no_numbers": 3}}


def test_reports_at_the_same_time_in_any_order_wait_for_each_other(database: Database) -> None:
    reporters = sorted(uuid4() for _ in range(20))

    def report(worker: int) -> None:
        for requests in range(1, 11):
            counts = [counted(requests, reporter) for reporter in reporters]
            stored(database, *(counts if worker % 2 else reversed(counts)))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(report, range(4)))
    assert found(database) == {"chat": {"no_numbers": 200}}


def test_recorded_requests_are_counted_by_stream_and_windows_are_told_apart(database: Database) -> None:
    batches = [
        make_records(3, server="chat", ended_at=NOW),
        make_records(2, seed=1, server="chat", target="other", ended_at=NOW),
        make_records(4, seed=2, server="chat", kind="probe", ended_at=NOW),
        make_records(5, seed=3, server="scraped", kind="window", fidelity="counter", ended_at=NOW),
        make_records(6, seed=4, server="chat", ended_at=NOW - timedelta(days=1, hours=1)),
        make_records(1, seed=5, server="not asked for", ended_at=NOW),
    ]
    with database.session() as session:
        insert_batches(session, batches, StreamRegistry(), NOW)
        found = recorded_since(session, DAY_AGO, NOW, ["chat", "scraped", "silent"])
    assert sorted(found["chat"].requests.values()) == [2, 3]
    assert not found["chat"].has_windows
    assert found["scraped"] == Recorded({}, has_windows=True)
    assert set(found) == {"chat", "scraped"}


def test_what_a_clock_that_was_ahead_has_dated_is_not_of_the_last_day(database: Database) -> None:
    stored(database, counted(50, uuid4()), counted(900, uuid4(), hour=HOUR + timedelta(days=2)))
    batches = [
        make_records(3, server="chat", ended_at=NOW),
        make_records(4, seed=1, server="chat", ended_at=NOW + timedelta(days=2)),
    ]
    with database.session() as session:
        insert_batches(session, batches, StreamRegistry(), NOW)
        (found,) = unrecorded.of_servers(session, NOW)
    assert (found.unrecorded, found.recorded) == (50, 3)
