"""Acceptance per position and acceptance length, in the API and in the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from driftguard.records import AcceptanceRecord
from driftguard.store.database import Database
from driftguard.store.tables import ServerStart
from tests.alerting.http_receiver import wait_until
from tests.pipeline.sidecar import post, running_sidecar
from tests.store.samples import make_records

AT = ("drafted_per_position", "accepted_per_position")


def minutes_ago(minutes: float) -> datetime:
    """From the minute that runs, asked in a test: modules are imported long before their last test runs."""
    return datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=minutes)


def records(
    ended_at: datetime, number: int, drafted: list[int] | None, kept: list[int] | None
) -> list[AcceptanceRecord]:
    """Of ten steps each."""
    counts = {"steps": 10, "drafted": 30, "accepted": 12, "emitted": 20, AT[0]: drafted, AT[1]: kept}
    return make_records(number, segments=1, seed=number, ended_at=ended_at, **counts)


def test_positions_are_told_by_series_status_and_metrics(database: Database, tmp_path: Path) -> None:
    """Some records tell what was drafted at a position, some only what was accepted (then each step counts),
    some nothing."""
    ended_at = minutes_ago(2)
    told = records(ended_at, 3, [10, 8, 4], [6, 4, 2])
    windows = records(ended_at, 2, None, [9, 3])
    silent = records(ended_at, 5, None, None)
    with running_sidecar(database, tmp_path) as client:
        post(client, [*told, *windows, *silent])
        wait_until(lambda: client.get("/api/v1/status").json()["unfolded_records"] == 0, "the fold")
        (stream,) = client.get("/api/v1/status").json()["streams"]
        exposed = client.get("/metrics").text
        answers = [
            client.get(f"/api/v1/streams/{stream['id']}/acceptance?minutes={minutes}").json()
            for minutes in (15, 90)  # from records, from rollups
        ]
    expected = [(18 + 18) / (30 + 20), (12 + 6) / (24 + 20), 6 / 12]
    assert stream["acceptance_length"] == pytest.approx(2.0)
    assert stream["acceptance_per_position"] == pytest.approx(expected)
    for answer in answers:
        points = {line["segment"]: line["points"] for line in answer["lines"]}
        for (point,) in points.values():
            assert point["acceptance_length"] == pytest.approx(2.0)
            assert point["acceptance_per_position"] == pytest.approx(expected, abs=1e-6)
            times = sum(one.time_per_output_token_seconds or 0 for one in (*told, *windows, *silent))
            assert point["tokens_per_second"] == pytest.approx(10 / times, rel=1e-4)
    assert _counted(exposed, "driftguard_draft_tokens_per_position_total") == [50, 44, 12]
    assert _counted(exposed, "driftguard_accepted_tokens_per_position_total") == [36, 18, 6]


def _counted(exposed: str, name: str) -> Sequence[float]:
    """By position."""
    lines = [line for line in exposed.splitlines() if line.startswith(f"{name}{{")]
    assert [f'position="{place}"' in line for place, line in enumerate(lines, start=1)] == [True] * len(lines)
    return [float(line.rpartition(" ")[2]) for line in lines]


def test_a_series_is_of_the_time_that_was_asked_for(database: Database, tmp_path: Path) -> None:
    until = minutes_ago(10)
    with database.session() as session:
        for minutes in (5, 20, 90):
            session.add(ServerStart(server="server-1", started_at=until + timedelta(minutes=10 - minutes)))
    with running_sidecar(database, tmp_path) as client:
        post(
            client,
            [
                one
                for ago in (5, 15, 25, 45)
                for one in records(until + timedelta(minutes=10 - ago), ago, None, None)
            ],
        )
        (stream,) = client.get("/api/v1/status").json()["streams"]
        path = f"/api/v1/streams/{stream['id']}/acceptance"
        span = {"since": (until - timedelta(minutes=20)).isoformat(), "until": until.isoformat()}
        answer = client.get(path, params=span).json()
        long_ago = [(until - timedelta(days=100, hours=hours)).isoformat() for hours in (1, 0)]
        old = client.get(path, params=dict(zip(("since", "until"), long_ago, strict=True))).json()
        wrong: list[dict[str, str]] = [
            {"minutes": "5", **span},
            {"since": (datetime.now(UTC) + timedelta(days=1)).isoformat()},
            {"since": "2020-01-01T00:00Z"},
            {"hours": "1"},
            {"until": "0001-01-01T00:30:00Z"},
            {"since": "0001-01-01T00:00:00+14:00", "until": "0001-01-03T00:00:00Z"},
            {"until": "9999-12-31T23:59:59-14:00"},
        ]
        refusals = [client.get(path, params=each) for each in wrong]
    (total,) = [line for line in answer["lines"] if line["segment"] is None]
    assert [point["requests"] for point in total["points"]] == [25, 15]
    assert [datetime.fromisoformat(at) for at in answer["server_starts"]] == [until - timedelta(minutes=10)]
    assert old["bin_seconds"] == 3_600  # finer rollups are not kept for so long
    assert [refusal.status_code for refusal in refusals] == [422] * len(wrong)
    assert "minutes" in refusals[0].text


def test_a_segment_that_is_asked_for_is_told_however_little_traffic_it_has(
    database: Database, tmp_path: Path
) -> None:
    sent = [
        one for place in range(12) for one in make_records(2, seed=place, segments=1, segment=f"busy-{place}")
    ]
    silent: dict[str, None] = dict.fromkeys(AT)
    small = {"segment": "rare", "drafted": 4, "steps": 1, "accepted": 0, "emitted": 1, **silent}
    rare = make_records(1, seed=12, segments=1, **small)
    with running_sidecar(database, tmp_path) as client:
        post(client, [*sent, *rare])
        (stream,) = client.get("/api/v1/status").json()["streams"]
        path = f"/api/v1/streams/{stream['id']}/acceptance"
        usual, asked = client.get(path).json(), client.get(path, params={"segment": "rare"}).json()
    assert "rare" not in {line["segment"] for line in usual["lines"]}
    assert usual["segments_left_out"] == 1
    lines = {line["segment"]: sum(point["requests"] for point in line["points"]) for line in asked["lines"]}
    assert lines == {None: 25, "rare": 1}
    assert asked["segments_left_out"] == 12
