"""More streams than `ingest.max_streams`, by each way that records come in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from structlog.testing import capture_logs

from driftguard.app import Sidecar, create_app
from driftguard.probes.answers import ProbeFailed
from driftguard.probes.replay import replay
from driftguard.probes.server import ProbedServer, Serving
from driftguard.records import encode_record
from driftguard.settings import ProbeSettings, ProbeTargetSettings, Settings
from driftguard.store.database import Database
from tests.adapters.fake_engines import FakeVllm
from tests.adapters.otlp_exports import exported
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import serving
from tests.api.otlp.answers import PROTOBUF, answered
from tests.api.otlp.test_spans import ATTRIBUTES, as_json, as_protobuf
from tests.probes.servers import stub_server
from tests.probes.test_replay import make_set, prompts_file
from tests.sources.served import ok, served
from tests.store.samples import make_records

REFUSED = "would be one stream more than the 1 of ingest.max_streams"


@pytest.fixture
def engine() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
def client(database: Database, tmp_path: Path, engine: FakeVllm) -> Iterator[httpx.Client]:
    """It may have one stream, and has it. It scrapes another server, `late`."""
    with served() as server:
        server.pages["/metrics"] = ok(engine.text)
        settings = Settings.model_validate(
            {
                "data_dir": tmp_path,
                "ingest": {"max_streams": 1},
                "sources": [{"url": server.url, "server": "late"}],
                "scraping": {"interval_seconds": 1.0},
            }
        )
        with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:
            send(client, server="first").raise_for_status()
            yield client


def send(client: httpx.Client, *, seed: int = 0, server: str) -> httpx.Response:
    record = make_records(1, seed=seed, server=server)[0]
    return client.post("/api/v1/records", content=encode_record(record))


def servers(client: httpx.Client) -> set[str]:
    return {record["server"] for record in client.get("/api/v1/records").json()["records"]}


def refused_records(client: httpx.Client) -> float:
    (line,) = (
        line
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("driftguard_stream_limit_refused_records_total ")
    )
    return float(line.split()[1])


def test_a_batch_is_told_which_of_its_lines_would_begin_a_stream(client: httpx.Client) -> None:
    known, new = make_records(2, seed=1, server="first"), make_records(2, seed=2, server="second")
    body = [encode_record(known[0]), b"{oops", encode_record(new[0]), b"", encode_record(known[1])]
    with capture_logs() as logs:
        answer = client.post("/api/v1/records", content=b"\n".join([*body, encode_record(new[1])]))
        send(client, seed=3, server="third")
    problem = answer.json()
    assert (answer.status_code, problem["accepted"], problem["errors_total"]) == (422, 2, 3)
    assert [error["line"] for error in problem["errors"]] == [2, 3, 6]
    assert "server 'second'" in problem["errors"][1]["detail"]
    assert problem["errors"][1]["detail"].endswith(REFUSED)
    assert refused_records(client) == 3
    assert [log["records"] for log in logs if log["event"] == "ingest_streams_full"] == [2]  # once a minute
    assert servers(client) == {"first"}


def test_a_span_is_rejected(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/traces",
        content=as_protobuf(as_json("second", ATTRIBUTES)),
        headers={"Content-Type": PROTOBUF},
    )
    partial = answered(answer, PROTOBUF, ExportTraceServiceResponse).partial_success
    assert partial.rejected_spans == 1
    assert partial.error_message.startswith("span 1: server 'second'")
    assert REFUSED in partial.error_message


def test_an_export_of_metrics_is_told_and_its_window_is_not_sent_for_ever(client: httpx.Client) -> None:
    pushed, began = FakeVllm(), time.time_ns() - 120 * 10**9

    def export(seconds: int) -> Any:
        request = exported(pushed.text(), began + seconds * 10**9, service__instance__id="pushed")
        answer = client.post(
            "/v1/metrics", content=request.SerializeToString(), headers={"Content-Type": PROTOBUF}
        )
        return answered(answer, PROTOBUF, ExportMetricsServiceResponse).partial_success

    export(0)
    pushed.serve([1, 2])
    told = export(30)
    assert told.error_message.startswith("pushed: server 'pushed'")
    assert REFUSED in told.error_message
    assert condition(client, "pushed") == "incomplete"
    assert export(60).error_message == ""
    assert servers(client) == {"first"}


def condition(client: httpx.Client, server: str) -> str:
    (found,) = (item for item in client.get("/api/v1/status").json()["sources"] if item["server"] == server)
    return str(found["condition"])


def test_the_status_says_why_a_scraped_server_has_no_records(client: httpx.Client, engine: FakeVllm) -> None:
    def details() -> list[str]:
        return [source["detail"] for source in client.get("/api/v1/status").json()["sources"]]

    wait_until(lambda: any("first window" in detail for detail in details()), "the first scrape")
    engine.serve([1, 2])
    wait_until(lambda: any(REFUSED in detail for detail in details()), "the refusal")
    assert servers(client) == {"first"}


def test_canary_probes_of_a_new_stream_fail_with_the_reason(
    client: httpx.Client, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the built-in engine, which tells what it serves before there are records of it."""
    serving = Serving("big/model", "small", "v2", "draft_model")
    monkeypatch.setattr(ProbedServer, "serving", lambda _: serving)
    make_set(database, prompts_file(tmp_path), server="probed")
    rules = ProbeSettings(pause_seconds=0.0)
    with stub_server() as stub, pytest.raises(ProbeFailed, match=REFUSED):
        replay(database, ProbeTargetSettings(server="probed", url=stub.url), rules, max_streams=1)
    assert servers(client) == {"first"}
