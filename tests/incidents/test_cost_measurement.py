"""The cost of speculation on a real database: with the incident that tells it, and per stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pytest
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from driftguard.cost import Cost, Speed, TimedRequest, assess
from driftguard.cost.assessment import UNMEASURED
from driftguard.detection import DetectorConfig
from driftguard.incidents import cost_measurement
from driftguard.incidents.message import document, summary
from driftguard.incidents.opening import NOBODY
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.records import AcceptanceRecord
from driftguard.status.gather import gather
from driftguard.status.stream_status import StreamStatus
from driftguard.store import examination_evidence, folding, incidents, stream_costs
from driftguard.store.database import Database, DatabaseTimeout, Work
from driftguard.store.tables import Incident, Stream, StreamCost
from tests.alerting.incident_rows import add_incident, add_stream
from tests.cost.traffic import Server, told
from tests.pipeline.examining import fold_and_examine
from tests.pipeline.sidecar import running_sidecar
from tests.pipeline.traffic import store, stream_ids

START = datetime.now(UTC) - timedelta(hours=2)
GOOD = Server(a=0.020, b=0.006, accepts=(0.85, 0.85, 0.8, 0.8))
BAD = Server(a=0.020, b=0.006, accepts=(0.6, 0.3, 0.2, 0.2))  # best with K = 1, but none was timed
USELESS = Server(a=0.020, b=0.006, accepts=(0.1, 0.1, 0.1, 0.1))


def records(rng: np.random.Generator, requests: Sequence[TimedRequest]) -> list[AcceptanceRecord]:
    """As the built-in engine sends them: without speculation draft, version and method are "none"."""
    found = []
    for item in requests:
        draft = "draft" if item.num_speculative_tokens else "none"
        ended_at = datetime.fromtimestamp(item.ended_at, UTC)
        values = {**told(item), "ended_at": ended_at, "started_at": ended_at - timedelta(seconds=1)}
        found.append(
            AcceptanceRecord(
                record_id=UUID(bytes=rng.bytes(16)),
                kind="request",
                server="chat",
                target="target",
                draft=draft,
                draft_version="v1" if draft == "draft" else "none",
                method="draft_model" if draft == "draft" else "none",
                fidelity="request",
                **values,
            )
        )
    return found


def send(
    database: Database,
    rng: np.random.Generator,
    server: Server,
    minute: int,
    ks: dict[int, int],
    **told: Any,
) -> None:
    """So many requests of each K, a second apart, from that minute on. `told`: what else they tell."""
    start = (START + timedelta(minutes=minute)).timestamp()
    drawn = [item for k, count in ks.items() for item in server.serve(rng, count, k, start=start, **told)]
    store(database, records(rng, sorted(drawn, key=lambda item: item.ended_at)))


def fold_all(database: Database) -> None:
    fold_and_examine(Pipeline(database, DetectorConfig(minimum_drop=0.1), Metrics()), database)


def fallen(database: Database, bad: Server, seed: int, ks: dict[int, int]) -> tuple[Incident, Stream]:
    """Half an hour of good traffic, then bad, and the incident that opens."""
    rng = np.random.default_rng(seed)
    share = {k: max(count // 4, 1) for k, count in ks.items()}
    send(database, rng, GOOD, 0, ks)
    send(database, rng, bad, 40, share)
    fold_all(database)
    cost_measurement.refresh(
        database, NOBODY, datetime.now(UTC)
    )  # it was found before ten requests were timed
    return only_incident(database)


def only_incident(database: Database) -> tuple[Incident, Stream]:
    with database.session() as session:
        ((incident, stream),) = incidents.list_page(session, limit=10)
        return incident, stream


def test_an_incident_tells_its_cost_and_that_no_speculation_would_be_faster(
    database: Database, tmp_path: Path
) -> None:
    incident, stream = fallen(database, USELESS, 1, {0: 100, 4: 1200})
    cost = incident.evidence.cost
    assert cost is not None
    assert cost.lost is not None
    lost = 1 - USELESS.tokens_per_second(4) / GOOD.tokens_per_second(4)
    assert cost.lost.low <= lost <= cost.lost.high
    assert incident.evidence.slowdown_measured == cost.lost.value
    tokens = [1 + 4 * rate for rate in (incident.acceptance_before, incident.acceptance_after)]
    assert incident.evidence.slowdown_formula == pytest.approx(1 - tokens[1] / tokens[0])
    assert incident.tokens_per_second_after == cost.now.tokens_per_second
    assert incident.severity == "critical"
    assert (cost.best, cost.sure) == (0, True)
    text = summary(incident, stream)
    assert "% slower (measured)." in text
    assert "Likely cause: the draft that runs is not the one that was: " in text
    assert "; best now: switch speculation off: " in text
    assert text == document(incident, stream, "firing", "http://sidecar")["summary"]
    stream.method = "unknown"
    assert summary(incident, stream).startswith(
        f"Acceptance of draft {stream.draft_version} on {stream.server}"
    )
    stream.draft_version = "unknown"
    assert summary(incident, stream).startswith(f"Acceptance of the draft on {stream.server} fell from")
    with running_sidecar(database, tmp_path) as client:
        answer = client.get(f"/api/v1/incidents/{incident.id}").json()
        assert msgspec.convert(answer["cost"], Cost) == cost
        assert answer["cost_percent"] == round(100 * cost.lost.value, 1)
        assert "best now: switch speculation off: " in client.get(f"/incidents/{incident.id}").text


def test_a_new_incident_is_told_its_cost_within_a_minute(database: Database) -> None:
    """Although the stream was measured right before, when too few requests were timed."""
    rng, now = np.random.default_rng(1), datetime.now(UTC)
    send(database, rng, GOOD, 0, {4: 1200})
    send(database, rng, BAD, 40, {4: 60})
    fold_all(database)
    found = only_incident(database)[0].evidence
    cost_measurement.refresh(database, NOBODY, now)
    with database.session() as session:
        unknown = replace(found, slowdown_measured=None, cost=None)
        session.execute(update(Incident).values(evidence=unknown))
        session.execute(update(Stream).values(last_seen_at=now + timedelta(minutes=1)))
    send(database, rng, BAD, 45, {4: 300})
    cost_measurement.refresh(database, NOBODY, now + timedelta(seconds=59))
    assert only_incident(database)[0].evidence.cost is None
    cost_measurement.refresh(database, NOBODY, now + timedelta(seconds=61))
    assert only_incident(database)[0].evidence.cost is not None


def test_a_new_draft_is_told_its_cost_within_a_minute(database: Database) -> None:
    """Although it was measured with its very first requests, too few to tell anything."""
    rng, now = np.random.default_rng(9), datetime.now(UTC)
    send(database, rng, GOOD, 119, {4: 5})
    cost_measurement.refresh(database, NOBODY, now)
    send(database, rng, GOOD, 121, {4: 300})
    cost_measurement.refresh(database, NOBODY, now + timedelta(seconds=59))
    assert only_stream(database, now).cost is None
    cost_measurement.refresh(database, NOBODY, now + timedelta(seconds=61))
    assert only_stream(database, now).cost is not None


def only_stream(database: Database, now: datetime) -> StreamStatus:
    with database.session() as session:
        (found,) = gather(session, now)
        return found


def test_with_one_k_an_incident_tells_the_loss_and_how_to_learn_the_rest(database: Database) -> None:
    incident, stream = fallen(database, BAD, 2, {4: 1200})
    cost = incident.evidence.cost
    assert cost is not None
    assert cost.lost is not None
    assert cost.best is None
    assert any("only K = 4 was timed" in note for note in cost.notes)
    assert "% slower (measured). The cause is not known" in summary(incident, stream)


def test_a_loss_that_times_do_not_show_is_told_by_formula(database: Database) -> None:
    """Times that scatter by a factor: acceptance is known much better than speed."""
    rng = np.random.default_rng(8)
    noisy = [Server(accepts=server.accepts, noise=2.0) for server in (GOOD, Server(accepts=(0.78,)))]
    send(database, rng, noisy[0], 0, {4: 1200})
    send(database, rng, noisy[1], 40, {4: 200})
    fold_all(database)
    incident, stream = only_incident(database)
    assert incident.evidence.slowdown_measured is None
    assert "% slower (by formula)" in summary(incident, stream)


def test_a_time_that_the_source_fills_in_does_not_make_a_fall_harmless(database: Database) -> None:
    """Measured, it would be 0% slower, which is no page."""
    rng = np.random.default_rng(10)
    filled_in: dict[str, Any] = {"time_per_output_token_seconds": 0.02}
    for minute, count, server in ((0, 1200, GOOD), (40, 300, BAD)):
        start = (START + timedelta(minutes=minute)).timestamp()
        store(database, records(rng, server.serve(rng, count, 4, start=start, **filled_in)))
    fold_all(database)
    cost_measurement.refresh(database, NOBODY, datetime.now(UTC))
    incident, stream = only_incident(database)
    assert incident.severity == "critical"
    assert "slower (by formula)" in summary(incident, stream)
    cost = incident.evidence.cost
    assert cost is not None
    assert UNMEASURED in cost.notes


def test_a_stream_tells_its_best_k_and_is_measured_again_only_with_new_traffic(
    database: Database, tmp_path: Path
) -> None:
    rng = np.random.default_rng(4)
    send(database, rng, BAD, 0, {0: 60, 1: 60, 4: 300})
    now = datetime.now(UTC)
    cost_measurement.refresh(database, NOBODY, now)
    with database.session() as session:
        (found,) = [item for item in gather(session, now) if item.stream.method != "none"]
        assert found.cost is not None
        assert (found.cost.best, found.cost.sure) == (1, True)
        assert "Best now: set K to 1: " in found.text
        late = now + timedelta(hours=1)
        assert stream_costs.outdated(session, timedelta(), late, limit=10) == []
        session.execute(update(Stream).values(traffic_arrived_at=late))
        assert [stream.id for stream in stream_costs.outdated(session, timedelta(), late, limit=10)] == [
            found.stream.id
        ]
        assert stream_costs.outdated(session, timedelta(minutes=5), now, limit=10) == []
        session.execute(update(Stream).values(last_seen_at=late + timedelta(minutes=1)))
        (found,) = [item for item in gather(session, late) if item.stream.method != "none"]
        assert "set K to 1" not in found.text  # more than an hour of traffic was not measured
        session.execute(update(Stream).values(last_seen_at=now, traffic_arrived_at=now))
    with running_sidecar(database, tmp_path) as client:
        streams = client.get("/api/v1/status").json()["streams"]
        told = {stream["method"]: stream["cost"] for stream in streams}
        assert told["none"] is None
        assert told["draft_model"]["best"] == 1
        assert {stream["cost_measured_at"] is None for stream in streams} == {True, False}
        assert "Best now: set K to 1: " in client.get("/").text


def test_the_running_sidecar_measures_by_itself(database: Database, tmp_path: Path) -> None:
    from tests.alerting.http_receiver import wait_until

    send(database, np.random.default_rng(5), GOOD, 0, {4: 50})
    with running_sidecar(database, tmp_path) as client:
        wait_until(lambda: client.get("/api/v1/status").json()["streams"][0]["cost"], "the measurement")


def test_what_tells_nothing_is_remembered_as_such(database: Database) -> None:
    send(database, np.random.default_rng(6), GOOD, 0, {4: 3})
    cost_measurement.refresh(database, NOBODY, datetime.now(UTC))
    with database.session() as session:
        assert session.scalars(select(StreamCost.cost)).all() == [None]
        assert cost_measurement.known(session, stream_ids(session)) == {}
        assert (
            stream_costs.outdated(session, timedelta(), datetime.now(UTC) + timedelta(hours=1), limit=10)
            == []
        )


def test_no_time_however_absurd_and_no_failure_of_the_cost_keeps_an_incident_from_being_stored(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One time in fifty is 1e160 s; and once the computation itself gives infinity, once it fails."""
    absurd: dict[str, Any] = {"time_per_output_token_seconds": 1e160}
    infinite = Cost(Speed(math.inf, 1.0, 1.0, 1.0, 10))
    computations = {
        "as it is": assess,
        "infinite": lambda *_, **__: infinite,
        "failing": lambda *_, **__: 1 / 0,
    }
    rng = np.random.default_rng(9)
    for server, computed in computations.items():
        monkeypatch.setattr(cost_measurement, "assess", computed)
        for minute, count, speed in ((0, 1200, GOOD), (40, 300, BAD)):
            start = (START + timedelta(minutes=minute)).timestamp()
            drawn = speed.serve(rng, count, 4, start=start)
            drawn = [item._replace(**absurd) if i % 50 == 0 else item for i, item in enumerate(drawn)]
            sent = records(rng, drawn)
            store(database, [msgspec.structs.replace(record, server=server) for record in sent])
        fold_all(database)
        cost_measurement.refresh(database, NOBODY, datetime.now(UTC))
    with database.session() as session:
        found = {stream.server: incident for incident, stream in incidents.list_page(session, limit=10)}
        costs = {server: incident.evidence.cost for server, incident in found.items()}
        known = cost_measurement.known(session, stream_ids(session))
        assert list(known) == [found["as it is"].stream_id]
        assert folding.unfolded(session) == 0
    assert costs.keys() == computations.keys()
    assert (costs["infinite"], costs["failing"]) == (None, None)
    assert costs["as it is"] is not None
    assert costs["as it is"].lost is not None


def test_an_incident_keeps_its_loss_for_as_long_as_the_records_before_it_are_kept(
    database: Database,
) -> None:
    _, stream = fallen(database, BAD, 10, {4: 1200})
    rng = np.random.default_rng(11)
    later = START + timedelta(days=9)
    store(database, records(rng, BAD.serve(rng, 300, 4, start=later.timestamp())))
    cost_measurement.refresh(database, NOBODY, later + timedelta(hours=1))
    with database.session() as session:
        lost = cost_measurement.known(session, stream_ids(session))[stream.id].cost.lost
    assert lost is not None
    assert lost.low <= 1 - BAD.tokens_per_second(4) / GOOD.tokens_per_second(4) <= lost.high


def test_requests_without_speculation_are_of_the_same_server_and_target(database: Database) -> None:
    rng = np.random.default_rng(7)
    send(database, rng, GOOD, 0, {0: 5, 4: 20})
    start = START.timestamp()
    for changed in ({"server": "other"}, {"target": "other"}, {"kind": "probe"}):
        others = records(rng, GOOD.serve(rng, 5, 0, start=start))
        store(database, [msgspec.structs.replace(record, **changed) for record in others])
    with database.session() as session:
        stream = session.scalars(select(Stream).where(Stream.method == "draft_model")).one()
        found = examination_evidence.without_speculation(session, stream, 2**62, stream.last_seen_at)
        assert len(found) == 5
        assert (
            examination_evidence.without_speculation(
                session, stream, 2**62, stream.last_seen_at + timedelta(days=2)
            )
            == []
        )


def test_what_a_clock_that_was_ahead_has_measured_is_measured_again(database: Database) -> None:
    """Else an incident that ends by a measurement would not end until then."""
    send(database, np.random.default_rng(7), GOOD, 0, {4: 50})
    now = datetime.now(UTC)
    cost_measurement.refresh(database, NOBODY, now + timedelta(days=30))
    cost_measurement.refresh(database, NOBODY, now)
    with database.session() as session:
        assert session.scalars(select(StreamCost.measured_at)).all() == [now]


@pytest.mark.parametrize("hindrance", ["slow", "locked"])
def test_a_stream_that_takes_too_long_keeps_no_other_from_being_measured(
    database: Database, monkeypatch: pytest.MonkeyPatch, hindrance: str
) -> None:
    """Nor the end of other incidents from being seen, or their cost from growing."""
    rng = np.random.default_rng(6)
    first, *others = [add_stream(database, version) for version in ("v1", "v2", "v3")]
    incident_id = add_incident(database, [], stream_id=first)
    send(database, rng, GOOD, 0, {4: 30})
    measure, impatient = cost_measurement.measure, Work("chore", 4.0, 2.0, 60.0)

    def slow(session: Session, stream: Stream, *rest: Any) -> Any:
        if hindrance == "slow" and stream.id == first:
            session.execute(text("SELECT pg_sleep(60)"))
        return measure(session, stream, *rest)

    monkeypatch.setattr(cost_measurement, "measure", slow)
    monkeypatch.setattr(cost_measurement, "CHORE", impatient)
    with database.session() as other:
        if hindrance == "locked":  # by hand, say, in a session that was forgotten
            incidents.lock(other, incident_id)
        with pytest.raises(DatabaseTimeout):
            cost_measurement.refresh(database, NOBODY, datetime.now(UTC))
    with database.session() as session:
        measured = set(session.scalars(select(StreamCost.stream_id)))
    assert first not in measured
    assert measured >= set(others)


def test_a_stream_whose_measuring_fails_keeps_no_other_from_being_measured(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = [add_stream(database, version) for version in ("v1", "v2", "v3")]
    rollback_of = cost_measurement.rollback_of

    def fail(session: Session, stream: Stream, cost: Cost | None) -> Any:
        if stream.id == first:
            raise ValueError("planted")
        return rollback_of(session, stream, cost)

    monkeypatch.setattr(cost_measurement, "rollback_of", fail)
    with pytest.raises(ValueError, match="planted"):
        cost_measurement.refresh(database, NOBODY, datetime.now(UTC))
    with database.session() as session:
        assert set(session.scalars(select(StreamCost.stream_id))) == set(others)
