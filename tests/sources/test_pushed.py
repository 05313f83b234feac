"""One server whose metrics a collector sends, while the database does not answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest

from driftguard.store.database import Database
from tests.adapters.fake_engines import FakeBentoMl, FakeLmDeploy, FakeVllm, K
from tests.adapters.otlp_exports import exported
from tests.sources.stored import Stored
from tests.sources.test_pushed_rounded import receiving


@pytest.fixture
def stored() -> Stored:
    return Stored()


@pytest.fixture
def client(database: Database, stored: Stored) -> Iterator[httpx.Client]:
    with receiving(database, stored.submit) as client:
        yield client


@pytest.mark.parametrize("outages", [["is_away"], ["is_unanswered"], ["is_unanswered", "is_full"]])
@pytest.mark.parametrize("is_sent_again", [False, True])
def test_what_was_counted_while_the_database_was_away_is_stored_once(
    client: httpx.Client, stored: Stored, outages: list[str], is_sent_again: bool
) -> None:
    """Also where a window was stored whose commit was not answered, and the queue is full afterwards; whether
    the collector sends an export again or drops it."""
    engine, at_ns = FakeVllm(), time.time_ns() - 600 * 10**9
    steps, wanted = 0, 200

    def export(times: int = 1) -> None:
        nonlocal at_ns, steps
        at_ns += 30 * 10**9
        engine.serve([3] * 10)
        steps += 10
        body = exported(engine.text(), at_ns, service__instance__id="chat").SerializeToString()
        headers = {"Content-Type": "application/x-protobuf"}
        for _ in range(times):
            answer = client.post("/v1/metrics", content=body, headers=headers)
            assert answer.status_code == wanted

    export()
    steps = 0  # those before the first export are in no window
    export()
    for outage in outages:
        setattr(stored, outage, True)
        wanted = 429 if stored.is_full else 503
        for _ in range(3):
            export(2 if is_sent_again else 1)
        setattr(stored, outage, False)
    wanted = 200
    export()
    export()
    found = sorted(stored.records, key=lambda record: record.ended_at)
    assert sum(record.steps for record in found) == steps
    assert all(record.drafted == record.steps * K for record in found)
    for earlier, later in pairwise(found):
        assert later.started_at == earlier.ended_at


def test_an_export_of_bentoml_may_come_in_parts_some_of_which_look_like_vllm(
    client: httpx.Client, stored: Stored
) -> None:
    engine, at_ns = FakeBentoMl(), time.time_ns() - 600 * 10**9
    for number in range(1, 5):
        engine.serve([3] * 10)
        text = engine.text().rpartition("\n\n")[2]  # its series once
        for part in ("bentoml_service_requests_total 7\n", text):
            body = exported(part, at_ns + number * 30 * 10**9, service__instance__id="chat")
            headers = {"Content-Type": "application/x-protobuf"}
            assert client.post("/v1/metrics", content=body.SerializeToString(), headers=headers).is_success
    assert [record.steps for record in stored.records] == [10, 10, 10]


def test_a_collector_that_starts_again_while_the_database_is_away_restarts_no_server(
    client: httpx.Client, stored: Stored
) -> None:
    """It does not know when counters began that it finds, and says that they began with its first point."""
    engine, at_ns = FakeLmDeploy(), time.time_ns() - 600 * 10**9
    engine.serve([3] * 1_000)
    start_ns = at_ns
    for number in range(1, 9):
        engine.serve([3] * 10)
        at_ns += 30 * 10**9
        stored.is_away = number in (4, 5, 6)
        start_ns = at_ns if number == 5 else start_ns
        body = exported(engine.text(), at_ns, start_ns=start_ns, service__instance__id="chat")
        headers = {"Content-Type": "application/x-protobuf"}
        answer = client.post("/v1/metrics", content=body.SerializeToString(), headers=headers)
        assert answer.status_code == (503 if stored.is_away else 200)
    assert [record.steps for record in stored.records] == [10, 10, 10, 20, 10, 10]


def test_a_collector_that_starts_again_with_a_part_of_an_export_restarts_no_server(
    client: httpx.Client, stored: Stored
) -> None:
    """As where the other part was lost: what it found with its first points is known all the same."""
    engine, at_ns = FakeLmDeploy(), time.time_ns() - 600 * 10**9
    engine.serve([3] * 1_000)
    start_ns = at_ns
    for number in range(1, 8):
        engine.serve([3] * 10)
        at_ns += 30 * 10**9
        start_ns = at_ns if number == 4 else start_ns
        lines = engine.text().splitlines(keepends=True)
        text = "".join(line for line in lines if number != 4 or "prompt_tokens" not in line)
        body = exported(text, at_ns, start_ns=start_ns, service__instance__id="chat")
        headers = {"Content-Type": "application/x-protobuf"}
        assert client.post("/v1/metrics", content=body.SerializeToString(), headers=headers).is_success
    assert [record.steps for record in stored.records] == [10, 10, 20, 10, 10]
