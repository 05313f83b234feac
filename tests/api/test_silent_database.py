"""A sidecar whose database stops answering, seen from outside: every call has an answer, and it recovers."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psycopg
import pytest

from driftguard.api import health
from driftguard.ingest import queue
from driftguard.records import encode_record
from driftguard.store.database import Database, Work
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import read_only, writers_held_up
from tests.pipeline.sidecar import post, running_sidecar
from tests.store.black_hole import black_hole
from tests.store.samples import make_records


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftguard.store.database.ANSWER_MARGIN_SECONDS", 0.5)
    monkeypatch.setattr("driftguard.store.database.PING_SECONDS", 0.5)
    monkeypatch.setattr(queue, "INGEST", Work("ingest", 1, 0.5, 60))


def test_it_answers_while_its_database_does_not_and_recovers_by_itself(
    database: Database, tmp_path: Path
) -> None:
    with black_hole(database.libpq_url) as hole:
        far = Database.open(f"{hole.url}&connect_timeout=2")
        with running_sidecar(far, tmp_path) as client:
            post(client, make_records(5))
            assert client.get("/readyz").status_code == 200
            hole.hold()
            ready = client.get("/readyz")
            assert ready.status_code == 503
            assert re.search("no answer|timeout", ready.json()["detail"])
            body = b"\n".join(map(encode_record, make_records(5, seed=1)))
            refused = client.post("/api/v1/records", content=body)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert client.get("/healthz").status_code == 200
            hole.resume()
            wait_until(lambda: client.get("/readyz").status_code == 200, "the database to be found again")
            assert sum(client.post("/api/v1/records", content=body).json().values()) == 5
        far.close()


def test_a_database_that_may_only_be_read_is_told_as_unavailable_and_found_again(
    database: Database, tmp_path: Path
) -> None:
    with running_sidecar(database, tmp_path) as client:
        post(client, make_records(5))
        with read_only(database):
            wait_until(lambda: "driftguard_database_up 0.0" in client.get("/metrics").text, "the outage")
            body = encode_record(make_records(1, seed=1)[0])
            answers = [client.get("/readyz"), client.post("/api/v1/records", content=body)]
            assert [answer.status_code for answer in answers] == [503, 503]
            assert all("in a read-only transaction" in answer.json()["detail"] for answer in answers)
            assert int(answers[1].headers["retry-after"]) > 0
            assert client.get("/").status_code == 200
        wait_until(lambda: client.get("/readyz").status_code == 200, "the database to be found again")
        post(client, make_records(5, seed=1))


def test_the_database_is_told_as_down_while_it_takes_no_records_although_it_can_be_read(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a full disk, which does not keep the detector from finding that there is nothing to fold."""

    def full(*_: object) -> None:
        raise psycopg.errors.DiskFull("could not extend file: No space left on device")

    with running_sidecar(database, tmp_path) as client:
        with monkeypatch.context() as patched:
            patched.setattr(queue, "insert_batches", full)
            answer = client.post("/api/v1/records", content=encode_record(make_records(1)[0]))
            assert answer.status_code == 503
            rounds = {_sample(client, "driftguard_detector_last_round_timestamp_seconds")}

            def has_looked_twice() -> bool:
                rounds.add(_sample(client, "driftguard_detector_last_round_timestamp_seconds"))
                return len(rounds) > 2

            wait_until(has_looked_twice, "the detector to look")
            assert _sample(client, "driftguard_database_up") == 0
        post(client, make_records(1))
        assert _sample(client, "driftguard_database_up") == 1


def test_a_timeout_is_told_to_the_sender_and_counted(database: Database, tmp_path: Path) -> None:
    with running_sidecar(database, tmp_path) as client:
        with writers_held_up(database):
            answer = client.post("/api/v1/records", content=encode_record(make_records(1)[0]))
        assert answer.status_code == 503
        assert "ingest: waited 0.5 s for a lock that another holds" in answer.json()["detail"]
        counted = 'driftguard_database_timeouts_total{reason="lock",work="ingest"} 1.0'
        assert counted in client.get("/metrics").text
        post(client, make_records(1))


def test_it_is_not_ready_while_a_batch_waits_for_long(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "INGEST", Work("ingest", 60, 60, 60))
    monkeypatch.setattr(health, "LONGEST_WAIT_SECONDS", 0.2)
    with running_sidecar(database, tmp_path) as client, ThreadPoolExecutor(1) as sender:
        with writers_held_up(database):
            sent = sender.submit(post, client, make_records(3))
            wait_until(lambda: oldest_seconds(client) > 0.2, "the batch to grow old")
            answer = client.get("/readyz")
            assert (answer.status_code, answer.json()["title"]) == (503, "Ingest stuck")
            assert re.search(r"waited \d+ s", answer.json()["detail"])
        sent.result(60)
        assert client.get("/readyz").status_code == 200


def oldest_seconds(client: httpx.Client) -> float:
    return _sample(client, "driftguard_ingest_oldest_unacknowledged_seconds")


def _sample(client: httpx.Client, name: str) -> float:
    metric = re.search(rf"^{name} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert metric
    return float(metric[1])


def test_readyz_has_an_answer_when_its_check_hangs(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "READY_SECONDS", 0.3)
    with black_hole(database.libpq_url) as hole:
        far = Database.open(f"{hole.url}&connect_timeout=2")
        with running_sidecar(far, tmp_path) as client:
            hole.hold()
            answer = client.get("/readyz")
            assert (answer.status_code, answer.json()["title"]) == (503, "Database unavailable")
            assert "not answered within 0.3 s" in answer.json()["detail"]
            hole.resume()
        far.close()
