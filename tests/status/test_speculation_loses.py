"""A stream whose acceptance is as it was, and which would be faster without speculation: it is not steady."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from driftguard.api.pages.routes import headline
from driftguard.cli.main import app
from driftguard.cost import assess, payoff
from driftguard.incidents import cost_measurement
from driftguard.incidents.opening import NOBODY
from driftguard.metrics import Metrics
from driftguard.pipeline.look_around import LookAround
from driftguard.status.gather import gather
from driftguard.status.verdict import standings
from driftguard.store import stream_costs
from driftguard.store.database import Database
from driftguard.store.tables import Stream
from tests.alerting.incident_rows import add_incident
from tests.cost.traffic import Server
from tests.incidents.test_cost_measurement import fold_all, records
from tests.pipeline.sidecar import running_sidecar
from tests.pipeline.traffic import store

# 83.7 tokens/s with three draft tokens, 111.9 without: what an operator measured while all was "steady".
LOSING = Server(a=1 / 111.9, b=0.009907, accepts=(0.86,))
PAYING = Server(a=1 / 111.9, b=0.0010, accepts=(0.86,))
BUSY = {"concurrency": 16}


def serve(
    database: Database,
    seed: int,
    *parts: tuple[Server, int, int, dict[str, Any]],
    minutes_ago: float = 0.0,
) -> None:
    """Each part: a server, how many requests with K = 3 and without, and what else they tell; the newest
    ended so many minutes ago."""
    rng = np.random.default_rng(seed)
    seconds = sum(max(part[1:3]) for part in parts)
    at = datetime.now(UTC) - timedelta(minutes=minutes_ago, seconds=seconds)
    drawn = []
    for server, speculating, without, told in parts:
        for k, count in ((3, speculating), (0, without)):
            drawn += server.serve(rng, count, k, start=at.timestamp(), **told)
        at += timedelta(seconds=max(speculating, without))
    store(database, records(rng, sorted(drawn, key=lambda item: item.ended_at)))
    fold_all(database)
    cost_measurement.refresh(database, NOBODY, datetime.now(UTC))


def only_stream(database: Database) -> Any:
    with database.session() as session:
        (found,) = [item for item in gather(session, datetime.now(UTC)) if item.stream.method != "none"]
        return found


def test_a_stream_that_would_be_faster_without_speculation_is_not_steady(database: Database) -> None:
    serve(database, 1, (LOSING, 900, 60, BUSY))
    found = only_stream(database)
    assert found.verdict == "speculation_loses"
    assert found.speculation.state == "loses"
    assert found.speculation.tokens_per_second == pytest.approx(83.7, rel=0.05)
    assert found.speculation.tokens_per_second_without == pytest.approx(111.9, rel=0.05)
    assert found.speculation.factor.low <= 83.7 / 111.9 <= found.speculation.factor.high
    assert found.text.startswith("Speculation loses here: ")
    assert "at 9 to 16 requests at once" in found.text
    assert "Steady: acceptance 0.7" in found.text  # what acceptance does is said beside it
    with database.session() as session:
        every = standings(session, datetime.now(UTC))
        serving = [item for item in every if item.stream.method != "none"]
        assert headline(serving, len(serving)) == "1 of 1 stream slower with speculation"


def test_a_stream_that_pays_is_steady_and_says_by_how_much(database: Database) -> None:
    serve(database, 2, (PAYING, 900, 60, BUSY))
    found = only_stream(database)
    assert (found.verdict, found.speculation.state) == ("steady", "pays")
    assert found.speculation.factor.low > 1.0
    assert found.speculation.text.startswith("Speculation pays: ")
    assert found.text.startswith("Steady: ")


def test_at_equal_acceptance_the_load_there_is_now_decides(database: Database) -> None:
    """From +23% to -16% while acceptance stays (vllm#26504), and back again at night."""
    quiet = {"concurrency": 2}
    serve(database, 3, (PAYING, 900, 60, quiet), (LOSING, 150, 60, BUSY), minutes_ago=4)
    found = only_stream(database)
    assert found.verdict == "speculation_loses"
    assert [(load.concurrency, load.now) for load in found.cost.loads] == [((2, 2), False), ((9, 16), True)]
    assert found.cost.loads[0].factor.low > 1.0
    assert found.now.rate == pytest.approx(found.baseline.rate, abs=0.03)
    serve(database, 4, (PAYING, 150, 30, quiet))
    with database.session() as session:
        session.execute(update(Stream).values(last_seen_at=datetime.now(UTC)))
    cost_measurement.refresh(database, NOBODY, datetime.now(UTC) + cost_measurement.MEASURE_EVERY)
    assert only_stream(database).verdict == "steady"


def test_where_none_was_timed_without_speculation_the_verdict_says_what_is_missing(
    database: Database,
) -> None:
    serve(database, 5, (LOSING, 900, 0, BUSY))
    found = only_stream(database)
    assert (found.verdict, found.speculation.state) == ("steady", "unknown")
    assert found.speculation.factor is None
    assert "no request without speculation was timed at a concurrency of 9 to 16" in found.speculation.missing
    assert "speculation loses" not in found.text.lower()


def test_a_measurement_that_is_too_old_is_no_verdict(database: Database) -> None:
    serve(database, 6, (LOSING, 900, 60, BUSY))
    late = datetime.now(UTC) + cost_measurement.OUTDATED_AFTER + timedelta(minutes=1)
    with database.session() as session:
        session.execute(
            update(Stream).values(last_seen_at=late, traffic_arrived_at=late, traffic_ended_at=late)
        )
        (found,) = [item for item in gather(session, late) if item.stream.method != "none"]
    assert found.speculation is not None
    assert (found.verdict, found.speculation.state) == ("steady", "unknown")


def test_a_fall_that_is_open_is_told_first_and_the_loss_beside_it(database: Database) -> None:
    serve(database, 7, (LOSING, 900, 60, BUSY))
    stream_id = only_stream(database).stream.id
    add_incident(database, [], stream_id=stream_id, opened_at=datetime.now(UTC))
    found = only_stream(database)
    assert found.speculation is not None
    assert (found.verdict, found.speculation.state) == ("degraded", "loses")
    assert "Speculation loses here: " in found.text


def test_api_page_command_and_gauges_say_it(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(database, 8, (LOSING, 900, 60, BUSY))
    monkeypatch.setenv("COLUMNS", "400")
    with running_sidecar(database, tmp_path) as client:
        (stream,) = [s for s in client.get("/api/v1/status").json()["streams"] if s["method"] != "none"]
        told = stream["speculation"]
        assert (stream["verdict"], told["state"]) == ("speculation_loses", "loses")
        assert told["factor"]["high"] < 1.0
        assert told["concurrency"] == [9, 16]
        only = client.get("/api/v1/streams?verdict=speculation_loses").json()
        assert [item["id"] for item in only["streams"]] == [stream["id"]]
        page = client.get(f"/streams/{stream['id']}").text
        assert "Speculation loses here" in page
        assert f"{told['factor']['value']:.2f}" in page
        shown = CliRunner().invoke(app, ["status", "--sidecar", str(client.base_url)])
        assert shown.exit_code == 0, shown.output
        assert "Speculation loses here: " in shown.output
        assert f"speedup {told['factor']['value']:.2f} (" in shown.output
    metrics = Metrics()
    LookAround(database, metrics).look(datetime.now(UTC))
    labels = {"server": "chat", "target": "target", "draft_version": "v1", "method": "draft_model"}
    value = metrics.registry.get_sample_value

    def ratio(name: str, **more: str) -> float:
        found = value(f"driftguard_speculation_{name}", {**labels, **more})
        assert found is not None
        return found

    assert ratio("speedup_ratio", bound="high") == pytest.approx(told["factor"]["high"], rel=1e-6)
    assert ratio("speedup_ratio", bound="low") == pytest.approx(told["factor"]["low"], rel=1e-6)
    by_load = ratio("speedup_by_load_ratio", concurrency="9 to 16", bound="estimate")
    assert by_load == pytest.approx(told["factor"]["value"], rel=1e-6)
    assert ratio("load_info", concurrency="9 to 16") == 1.0
    assert value("driftguard_stream_verdict", {**labels, "verdict": "speculation_loses"}) == 1.0


def test_the_database_finds_the_streams_that_the_statement_says_are_losing(database: Database) -> None:
    """One is read for a fleet of any size, the other for what is shown."""
    rng, now = np.random.default_rng(9), datetime.now(UTC)
    cases = {
        f"server-{seed}": assess(
            [],
            Server(b=0.002 + 0.0015 * seed, accepts=(0.7,)).serve(rng, 80, 3, concurrency=seed % 3 or None),
            Server(b=0.0, accepts=(0.7,)).serve(rng, 9 + seed % 4, 0, concurrency=seed % 3 or None),
        )
        for seed in range(30)
    }
    with database.session() as session:
        for server, cost in cases.items():
            row = {"server": server, "target": "t", "draft": "d", "draft_version": "v", "method": "ngram"}
            stream = Stream(**row, first_seen_at=now, last_seen_at=now)
            session.add(stream)
            session.flush()
            stream_costs.store(session, stream.id, cost, now)
    with database.session() as session:
        names = {stream.id: stream.server for stream in session.query(Stream)}
        found = {names[each] for each in stream_costs.losing(session, timedelta(hours=1))}
    losing = {server for server, cost in cases.items() if payoff(cost).state == "loses"}
    assert found == losing
    assert 3 < len(losing) < 27
