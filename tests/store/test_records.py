"""The writer: once, in order, whole, and with rollups that are exact."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from driftguard.records import AcceptanceRecord
from driftguard.store import streams
from driftguard.store.database import Database
from driftguard.store.folding import read_after
from driftguard.store.records import BatchResult, insert_batches
from driftguard.store.streams import StreamRegistry, all_streams
from driftguard.store.tables import Record, Segment, Stream
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import is_held_up
from tests.store.samples import make_records

NULLS: dict[str, Any] = dict.fromkeys(
    [
        *("session", "drafted_per_position", "accepted_per_position", "num_speculative_tokens"),
        *(
            "temperature",
            "prompt_tokens",
            "cached_tokens",
            "output_tokens",
            "concurrency",
            "waiting_requests",
            "started_requests",
        ),
        *("time_to_first_token_seconds", "time_per_output_token_seconds"),
    ]
)


def insert(database: Database, *batches: list[AcceptanceRecord]) -> list[BatchResult]:
    with database.session() as session:
        return insert_batches(session, batches, StreamRegistry(), datetime.now(UTC))


def stored_ids(database: Database) -> list[str]:
    with database.session() as session:
        return [str(value) for value in session.scalars(select(Record.record_id).order_by(Record.seq))]


def test_every_field_comes_back_as_it_was_sent(database: Database) -> None:
    full = make_records(1, kind="window")[0]
    empty = make_records(1, seed=1, **NULLS, segment='odd, "quoted" \\ {segment}\n\t')[0]
    insert(database, [full, empty])
    with database.session() as session:
        rows = session.scalars(select(Record).order_by(Record.seq)).all()
    for record, row in zip((full, empty), rows, strict=True):
        for name in set(AcceptanceRecord.__struct_fields__) & set(Record.__table__.columns.keys()):
            assert getattr(row, name) == getattr(record, name), name


def test_a_record_sent_again_is_stored_once(database: Database) -> None:
    records = make_records(20)
    assert insert(database, records) == [BatchResult(accepted=20, duplicates=0)]
    assert insert(database, records[10:] + make_records(5, seed=1)) == [BatchResult(5, 10)]
    assert len(set(stored_ids(database))) == len(stored_ids(database)) == 25


def test_a_record_twice_in_a_batch_or_in_two_batches_of_one_transaction(database: Database) -> None:
    first, second, third = make_records(3)
    assert insert(database, [first, first, second], [second, third]) == [BatchResult(2, 1), BatchResult(1, 1)]
    assert stored_ids(database) == [str(record.record_id) for record in (first, second, third)]


def test_an_id_that_returns_with_other_times_is_still_the_same_record(database: Database) -> None:
    record = make_records(1)[0]
    moved = msgspec.structs.replace(record, ended_at=record.ended_at + timedelta(hours=23))
    insert(database, [record])
    assert insert(database, [moved]) == [BatchResult(0, 1)]


def test_the_same_records_from_many_writers_at_once(database: Database) -> None:
    records = make_records(400)
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: insert(database, records)[0], range(4)))
    assert sum(result.accepted for result in results) == 400
    assert sum(result.duplicates for result in results) == 1_200
    assert sorted(stored_ids(database)) == sorted(str(record.record_id) for record in records)


def test_two_calls_in_one_transaction(database: Database) -> None:
    records = make_records(4)
    with database.session() as session:
        registry = StreamRegistry()
        first = insert_batches(session, [records[:3]], registry, datetime.now(UTC))
        second = insert_batches(session, [records[2:]], registry, datetime.now(UTC))
    assert (first, second) == ([BatchResult(3, 0)], [BatchResult(1, 1)])
    assert len(stored_ids(database)) == 4


def test_seq_follows_the_order_given(database: Database) -> None:
    batches = [make_records(300, seed=seed) for seed in range(3)]
    insert(database, *batches)
    assert stored_ids(database) == [str(record.record_id) for batch in batches for record in batch]


def test_a_writer_that_comes_second_also_commits_second(database: Database) -> None:
    with ThreadPoolExecutor(1) as threads:
        with database.session() as first:
            insert_batches(first, [make_records(5, seed=1)], StreamRegistry(), datetime.now(UTC))
            second = threads.submit(insert, database, make_records(5, seed=2, server="server-2"))
            with pytest.raises(TimeoutError):
                second.result(timeout=0.5)
        assert second.result() == [BatchResult(5, 0)]
    assert stored_ids(database)[:5] == [str(record.record_id) for record in make_records(5, seed=1)]


def test_a_reader_by_seq_misses_nothing_while_writers_commit(database: Database) -> None:
    """If seq did not rise in commit order, the reader would step over a row that commits later."""

    def write(seed: int) -> None:
        for number in range(6):
            insert(database, make_records(50, seed=1_000 * seed + number, server=f"server-{seed}"))

    seen: list[int] = []
    with ThreadPoolExecutor(4) as threads:
        writers = [threads.submit(write, seed) for seed in range(4)]
        while True:
            all_written = all(writer.done() for writer in writers)
            with database.session() as session:
                page = read_after(session, seen[-1] if seen else 0, limit=37)
            seen += [row.seq for row in page]
            if all_written and not page:
                break
    assert [writer.exception() for writer in writers] == [None] * 4
    assert len(seen) == 4 * 6 * 50


def test_reading_gives_what_the_detector_needs_in_pages(database: Database) -> None:
    records = make_records(10)
    insert(database, records)
    with database.session() as session:
        first = read_after(session, 0, limit=4)
        rest = read_after(session, first[-1].seq, limit=100)
        assert read_after(session, rest[-1].seq, limit=1) == []
    for record, row in zip(records, first + rest, strict=True):
        assert (row.segment, row.session, row.kind) == (record.segment, record.session, record.kind)
        assert (row.drafted, row.accepted, row.ended_at) == (record.drafted, record.accepted, record.ended_at)


def test_a_failed_transaction_leaves_nothing(database: Database) -> None:
    def insert_and_fail() -> None:
        with database.session() as session:
            insert_batches(session, [make_records(5)], StreamRegistry(), datetime.now(UTC))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        insert_and_fail()
    assert stored_ids(database) == []
    with database.session() as session:
        assert all_streams(session) == []


def test_segments_beyond_the_limit_become_other_and_are_counted(database: Database) -> None:
    many = [make_records(1, seed=number, segment=f"tenant-{number:03}")[0] for number in range(70)]
    insert(database, many[:60])
    insert(database, many[60:])
    insert(database, many[60:])  # duplicates count nothing
    with database.session() as session:
        stream = all_streams(session)[0]
        named = session.scalars(select(Segment.segment).order_by(Segment.segment)).all()
        assert named == [f"tenant-{number:03}" for number in range(64)]
        assert stream.records_in_other == 6
        in_other = session.scalar(select(func.count()).where(Record.segment == "other"))
    assert in_other == 6


def test_two_writers_cannot_pass_the_limit_together(database: Database) -> None:
    def write(writer: int) -> None:
        registry = StreamRegistry()
        for number in range(40):
            record = make_records(1, seed=100 * writer + number, segment=f"{writer}-{number}")
            with database.session() as session:
                insert_batches(session, [record], registry, datetime.now(UTC))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, range(2)))
    with database.session() as session:
        stream = all_streams(session)[0]
        assert session.scalar(select(func.count()).select_from(Segment)) == 64
        assert stream.records_in_other == 16


def test_streams_beyond_the_limit_are_refused_by_name_and_the_others_stored(database: Database) -> None:
    registry = StreamRegistry(max_streams=2)
    known, new, beyond = (make_records(3, seed=n, server=f"server-{n}") for n in range(3))
    with database.session() as session:
        assert insert_batches(session, [known], registry, datetime.now(UTC)) == [BatchResult(3, 0)]
    mixed = [beyond[0], new[0], known[0], beyond[1], new[1]]
    for limited in (registry, StreamRegistry(max_streams=2)):  # one that remembers, one that has to look
        with database.session() as session:
            mixed_result, beyond_result = insert_batches(
                session, [new[:1] + mixed, beyond[2:]], limited, datetime.now(UTC)
            )
        assert [place for place, _ in mixed_result.refusals(new[:1] + mixed)] == [1, 4]
        assert list(beyond_result.refused) == [beyond[0].stream_key]
        assert "'server-2'" in beyond_result.refused[beyond[0].stream_key]
        assert "more than the 2 of ingest.max_streams" in beyond_result.refused[beyond[0].stream_key]
        assert (beyond_result.accepted, beyond_result.duplicates) == (0, 0)
    assert (mixed_result.accepted, mixed_result.duplicates) == (0, 4)
    assert set(stored_ids(database)) == {str(r.record_id) for r in [*known, *new[:2]]}
    with database.session() as session:
        raised = insert_batches(session, [beyond], StreamRegistry(max_streams=3), datetime.now(UTC))
    assert raised == [BatchResult(3, 0)]


def test_a_limit_below_the_streams_that_there_are_keeps_those(database: Database) -> None:
    for number in range(3):
        insert(database, make_records(1, seed=number, server=f"server-{number}"))
    known, unknown = make_records(1, seed=5, server="server-2"), make_records(1, seed=6, server="server-9")
    with database.session() as session:
        (result,) = insert_batches(session, [known + unknown], StreamRegistry(1), datetime.now(UTC))
    assert (result.accepted, [place for place, _ in result.refusals(known + unknown)]) == (1, [1])


def test_two_writers_cannot_pass_the_limit_of_streams_together(database: Database) -> None:
    def write(writer: int) -> int:
        registry, refused = StreamRegistry(max_streams=10), 0
        for number in range(10):
            record = make_records(1, seed=100 * writer + number, server=f"{writer}-{number}")
            with database.session() as session:
                (result,) = insert_batches(session, [record], registry, datetime.now(UTC))
            refused += len(result.refused)
        return refused

    with ThreadPoolExecutor(2) as threads:
        assert sum(threads.map(write, range(2))) == 10
    with database.session() as session:
        assert len(all_streams(session)) == 10


def test_ingest_and_a_sidecar_whose_clock_is_behind_do_not_wait_for_each_other(database: Database) -> None:
    """It moves the times of streams back that were heard later than now, at each look."""
    of_each = [make_records(2, seed=seed, server=f"server-{seed}") for seed in range(2)]
    insert(database, of_each[0][:1], of_each[1][:1])
    with database.session() as session:  # its row stands behind the other now
        session.execute(update(Stream).where(Stream.server == "server-0").values(draft="renamed"))

    def move_back() -> bool:
        with database.session() as session:
            return streams.move_back(session, datetime.now(UTC))

    ahead, registry = datetime.now(UTC) + timedelta(minutes=10), StreamRegistry()
    with database.session() as session:
        session.execute(update(Stream).values(traffic_arrived_at=ahead))
    with ThreadPoolExecutor(1) as threads:
        with database.session() as session:
            insert_batches(session, [of_each[0]], registry, ahead)
            moved = threads.submit(move_back)
            wait_until(lambda: is_held_up(database), "the other sidecar to wait for ingest")
            insert_batches(session, [of_each[1]], registry, ahead)
        assert moved.result()


def test_streams_are_told_apart_by_their_whole_key(database: Database) -> None:
    base = make_records(1, seed=0)
    changes: list[dict[str, Any]] = [{name: "b"} for name in ("server", "target", "draft_version", "method")]
    others = [make_records(1, seed=number, **change) for number, change in enumerate(changes, start=1)]
    insert(database, base, *others)
    with database.session() as session:
        streams = all_streams(session)
        newest = max(record.ended_at for record in base)
        assert len({(s.server, s.target, s.draft_version, s.method) for s in streams}) == 5
        assert next(s for s in streams if s.draft_version == "v1").last_seen_at >= newest


ROLLUPS_FROM_RECORDS = text(
    """
    SELECT date_trunc('minute', ended_at), stream_id, segment, kind, count(*), sum(steps), sum(drafted),
      sum(accepted), sum(emitted), coalesce(sum(output_tokens), 0),
      coalesce(sum(time_per_output_token_seconds), 0), count(time_per_output_token_seconds),
      coalesce(sum(time_to_first_token_seconds), 0), count(time_to_first_token_seconds)
    FROM records GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
    """
)
ROLLUPS = text(
    """
    SELECT minute, stream_id, segment, kind, records, steps, drafted, accepted, emitted, output_tokens,
      time_per_output_token_sum, time_per_output_token_count, time_to_first_token_sum,
      time_to_first_token_count, acceptance_buckets
    FROM rollups_1m ORDER BY 1, 2, 3, 4
    """
)


def test_rollups_equal_a_recomputation_from_the_records(database: Database) -> None:
    batches = [make_records(200, seed=seed) for seed in range(3)]
    batches.append(make_records(20, seed=9, kind="probe"))
    batches.append(make_records(5, seed=10, steps=3, drafted=0, accepted=0, emitted=3, **NULLS))
    for batch in batches:
        insert(database, batch, batch[:50])
    with database.session() as session:
        expected = session.execute(ROLLUPS_FROM_RECORDS).all()
        found = session.execute(ROLLUPS).all()
        buckets = _buckets_from_records(session)
        assert len(found) == len(expected) > 4
        for ours, theirs in zip(found, expected, strict=True):
            assert tuple(ours[:10]) == tuple(theirs[:10])
            assert ours[10:14] == pytest.approx(theirs[10:14])
            assert ours.acceptance_buckets == buckets[tuple(ours[:4])]


def _buckets_from_records(session: Session) -> dict[tuple[object, ...], list[int]]:
    """Requests by acceptance rate in twentieths; a request without drafted tokens has no rate."""
    buckets: dict[tuple[object, ...], list[int]] = defaultdict(lambda: [0] * 20)
    for row in session.scalars(select(Record)):
        minute = row.ended_at.replace(second=0, microsecond=0)
        counts = buckets[minute, row.stream_id, row.segment, row.kind]
        if row.drafted:
            counts[min(row.accepted * 20 // row.drafted, 19)] += 1
    return buckets
