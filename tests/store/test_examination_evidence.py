"""What a diagnosis is given: which side of the change each record, probe and capture falls on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import select, text

from driftguard.diagnosis import Captured
from driftguard.records.probe_session import session_of
from driftguard.store import examination_evidence
from driftguard.store.captures import CapturedRequest, insert_captures
from driftguard.store.database import Database
from driftguard.store.examination_evidence import (
    Moment,
    captures_around,
    probes_around,
    records_around,
    usual_k,
)
from driftguard.store.partitions import ensure_days
from driftguard.store.records import insert_batches
from driftguard.store.streams import StreamRegistry
from driftguard.store.tables import ServerStart, Stream
from tests.store.samples import make_records

AT = datetime.now(UTC) - timedelta(minutes=5)


def insert(database: Database, count: int, seconds: float, **fixed: Any) -> None:
    """Records that ended so many seconds after AT, in an order of their own."""
    records = make_records(
        count, seed=int(seconds) + 1_000, ended_at=AT + timedelta(seconds=seconds), **fixed
    )
    with database.session() as session:
        insert_batches(session, [records], StreamRegistry(), datetime.now(UTC))


def the_stream(database: Database) -> Stream:
    with database.session() as session:
        return session.scalars(select(Stream)).one()


def test_records_are_split_at_the_change_and_end_at_the_alarm(database: Database) -> None:
    insert(database, 4, -60)
    insert(database, 1, -50, kind="probe")
    insert(database, 3, 1, num_speculative_tokens=8)
    insert(database, 2, 2)  # after the alarm
    with database.session() as session:
        before, after = records_around(session, the_stream(database).id, Moment(seq=6, at=AT, newest=8))
    assert [one.num_speculative_tokens for one in before] == [4] * 4
    assert [one.num_speculative_tokens for one in after] == [8] * 3
    assert all(one.first_drafted == one.steps and one.first_accepted is not None for one in after)


def test_records_without_positions_tell_nothing_of_the_first(database: Database) -> None:
    insert(database, 1, -60, drafted_per_position=None, accepted_per_position=None)
    with database.session() as session:
        ((one,), _) = records_around(session, the_stream(database).id, Moment(seq=9, at=AT, newest=9))
    assert (one.first_drafted, one.first_accepted) == (None, None)


def test_the_age_of_the_server_is_that_since_its_last_start_before_the_record(database: Database) -> None:
    insert(database, 1, -7_200)
    insert(database, 1, -60)
    insert(database, 1, 30, kind="probe", session=session_of("p", "a"))
    insert(database, 1, 60, server="another server")
    restarts = [("server-1", -3_600), ("server-1", 40), ("another server", -5)]
    with database.session() as session:
        session.add_all(
            ServerStart(server=name, started_at=AT + timedelta(seconds=seconds)) for name, seconds in restarts
        )
    with database.session() as session:
        stream = session.scalars(select(Stream).where(Stream.server == "server-1")).one()
        before, _ = records_around(session, stream.id, Moment(seq=99, at=AT, newest=99))
        _, ((probe),) = probes_around(session, stream.id, Moment(seq=0, at=AT, newest=99), AT)
    at = AT.timestamp()
    found = [(one.ended_at, one.server_started_at) for one in before]  # the newest first
    assert found == [(at - 60, at - 3_600), (at - 7_200, None)]
    assert (probe.ended_at, probe.server_started_at) == (at + 30, at - 3_600)


def test_what_the_causes_are_sought_with_comes_back_and_null_where_it_was_not_given(
    database: Database,
) -> None:
    given = {"prompt_tokens": 40, "cached_tokens": 32, "time_per_output_token_seconds": 0.5}
    nulls: dict[str, Any] = dict.fromkeys([*given, "output_tokens"])
    insert(database, 1, -60, **given)
    insert(database, 1, -50, **nulls)
    with database.session() as session:
        (untold, told), _ = records_around(session, the_stream(database).id, Moment(seq=9, at=AT, newest=9))
    assert {name: getattr(told, name) for name in given} == given
    assert {name: getattr(untold, name) for name in nulls} == nulls
    assert told.server_started_at is None


def test_probes_of_the_time_in_which_the_change_began_are_left_out(database: Database) -> None:
    for name, seconds in (("old", -120), ("unclear", -10), ("new", 5)):
        insert(database, 1, seconds, kind="probe", session=session_of(name, "answer"))
    insert(database, 1, 6, kind="probe", session="somebody else's probe")
    insert(database, 1, 7)
    with database.session() as session:
        moment = Moment(seq=2, at=AT, newest=9)
        before, after = probes_around(session, the_stream(database).id, moment, AT - timedelta(seconds=30))
    assert [(one.prompt, one.answer) for one in before] == [("old", "answer")]
    assert [one.prompt for one in after] == ["new"]


def test_probes_of_a_server_whose_clock_is_behind_are_sorted_by_their_arrival_too(database: Database) -> None:
    """Its traffic fell at AT by its own clock, ten minutes later by that of the sidecar."""
    insert(database, 1, -660, kind="probe", session=session_of("old", "a"))
    insert(database, 1, -60)
    insert(database, 1, 300, kind="probe", session=session_of("before the fall", "a"))
    insert(database, 2, 0, segment="fallen")
    insert(database, 1, 660, kind="probe", session=session_of("new", "a"))
    moment = Moment(seq=4, at=AT, newest=5)
    with database.session() as session:
        stream = the_stream(database)
        before, after = probes_around(session, stream.id, moment, AT - timedelta(seconds=30))
        seen = examination_evidence.seen_since(session, stream, uuid4(), ["fallen"], moment, 50)
    assert [one.prompt for one in before] == ["old"]
    assert [one.prompt for one in after] == ["new"]
    assert seen == (1, 0, 0)


def capture(database: Database, segment: str, seconds: Sequence[float], tokens: int = 3) -> None:
    captured = [
        CapturedRequest(
            record_id=UUID(int=1_000_000 * len(segment) + 1_000 + int(1_000 * second)),
            server="server-1",
            target="target-1",
            draft_version="v1",
            segment=segment,
            captured_at=AT + timedelta(seconds=second),
            prompt_token_ids=list(range(tokens)),
            output_token_ids=list(range(900)),
        )
        for second in seconds
    ]
    with database.session() as session:
        insert_captures(session, captured, max_per_segment=1_000)


def test_captures_of_changed_segments_on_both_sides_and_of_others_before(database: Database) -> None:
    insert(database, 1, -60)
    capture(database, "german", [-0.1 * n for n in range(200, 0, -1)], tokens=3_000)
    capture(database, "code", [-0.1 * n for n in range(80, 0, -1)])
    capture(database, "german!", [1])  # of another segment, after the change
    capture(database, "german", [0, 1])
    with database.session() as session:
        before, after = captures_around(session, the_stream(database), ["german"], AT)

    def of(segment: str, side: tuple[Captured, ...]) -> list[Captured]:
        return [one for one in side if one.segment == segment]

    assert len(of("german", before)) == examination_evidence.CAPTURES
    assert len(of("code", before)) == examination_evidence.OTHER_CAPTURES
    assert [one.segment for one in after] == ["german", "german"]
    newest = of("german", before)[-1]
    assert newest.prompt == tuple(range(3_000))[-examination_evidence.PROMPT_TOKENS :]
    assert newest.output == tuple(range(examination_evidence.OUTPUT_TOKENS))
    assert of("code", before)[0].output == ()  # only prompts of other segments are compared


def test_a_captured_request_has_the_session_and_the_counts_of_its_record_where_that_is_kept(
    database: Database,
) -> None:
    capture(database, "german", [-60, 1])
    kept = UUID(int=1_000_000 * len("german") + 1_000 - 60_000)
    insert(database, 1, -60, record_id=kept, session="s-1", drafted=40, accepted=20, steps=10, emitted=30,
           drafted_per_position=None, accepted_per_position=None)  # fmt: skip
    with database.session() as session:
        (known,), (unknown,) = captures_around(session, the_stream(database), ["german"], AT)
    assert (known.session, known.drafted, known.accepted) == ("s-1", 40, 20)
    assert (unknown.session, unknown.drafted, unknown.accepted) == (None, None, None)


def test_what_is_new_is_counted_up_to_the_limit(database: Database) -> None:
    insert(database, 1, -60)
    insert(database, 2, 5, kind="probe", session=session_of("p", "a"))
    capture(database, "german", [-1, 1, 2, 3])
    with database.session() as session:
        stream = the_stream(database)
        seen = partial(
            examination_evidence.seen_since, session, stream, uuid4(), ["german"], Moment(2, AT, 9)
        )
        assert seen(50) == (2, 3, 0)
        assert seen(2) == (2, 2, 0)


_MANY = text(
    """
    INSERT INTO records (record_id, seq, stream_id, ended_at, kind, started_at, segment, steps, drafted,
                         accepted, emitted, acceptance_rule, fidelity)
    SELECT gen_random_uuid(), :first + number, :stream_id,
           CAST(:since AS timestamptz) + number * interval '5 s',
           'request', now(), 'code', 1, 4, 2, 3, 'unknown', 'request'
    FROM generate_series(1, :count) AS number
    """
)


def test_a_stream_at_rest_is_read_without_the_records_of_the_others(database: Database) -> None:
    """It was busy two days ago; since then only another stream was, on the same days and on later ones."""
    insert(database, 1, -60)
    quiet = the_stream(database).id
    # All of its requests are of one day, a fourth of that day's: of half of them a scan would be right.
    since = (AT - timedelta(days=2)).replace(hour=6)
    with database.session() as session:
        ensure_days(session, {(since + timedelta(days=ahead)).date() for ahead in range(4)})
        session.execute(_MANY, {"first": 100, "stream_id": quiet, "since": since, "count": 3_000})
        session.execute(_MANY, {"first": 10_000, "stream_id": quiet + 1, "since": since, "count": 30_000})
        session.execute(text("ANALYZE records"))
        explained = text(f"EXPLAIN (ANALYZE, FORMAT JSON) {examination_evidence._RECORDS}")
        values = {"stream_id": quiet, "first": 0, "end": 50_000, "limit": examination_evidence.RECORDS}
        span = {"since": AT - timedelta(days=7), "until": AT + timedelta(days=7)}
        (explanation,) = session.execute(explained, {**values, **span}).scalar_one()
    assert max(_rows(explanation["Plan"])) <= examination_evidence.RECORDS + 1


def test_the_start_of_a_server_before_a_record_is_read_without_its_other_starts(database: Database) -> None:
    """As of one started again every few hours for months: of each of 2,000 records all were read."""
    for number in range(20):
        insert(database, number, number)
    starts = "SELECT server, :at - hours * interval '1 h' FROM streams, generate_series(1, 300) AS hours"
    with database.session() as session:
        session.execute(text(f"INSERT INTO server_starts (server, started_at) {starts}"), {"at": AT})
        session.execute(text("ANALYZE server_starts, streams, records"))
        explained = text(f"EXPLAIN (ANALYZE, FORMAT JSON) {examination_evidence._RECORDS}")
        span = {"since": AT - timedelta(days=7), "until": AT + timedelta(days=7), "first": 0, "end": 50_000}
        (explanation,) = session.execute(
            explained, {"stream_id": the_stream(database).id, "limit": 50, **span}
        ).scalar_one()
    assert max(_rows_of(explanation["Plan"], "server_starts")) == 1


def _rows_of(node: dict[str, Any], table: str) -> Iterator[int]:
    """Read by each scan of that table, every time."""
    if node.get("Relation Name") == table:
        yield node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
    for part in node.get("Plans", ()):
        yield from _rows_of(part, table)


def _rows(node: dict[str, Any]) -> Iterator[int]:
    """Read by each node of a plan, with those that it threw away."""
    yield node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
    for part in node.get("Plans", ()):
        yield from _rows(part)


def test_the_usual_k_is_of_the_traffic_since_that_minute(database: Database) -> None:
    insert(database, 5, -600, steps=10, drafted=80, accepted=1, emitted=2)
    insert(database, 5, 0, steps=10, drafted=30, accepted=1, emitted=2)
    insert(database, 5, 0.5, kind="probe", steps=10, drafted=10, accepted=1, emitted=2)
    with database.session() as session:
        stream_id = the_stream(database).id
        assert usual_k(session, stream_id, AT) == 3.0
        assert usual_k(session, stream_id, AT - timedelta(seconds=601)) == 5.5
        assert usual_k(session, stream_id + 1, AT) is None
