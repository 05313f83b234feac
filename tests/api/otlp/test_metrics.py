"""POST /v1/metrics: what an OpenTelemetry collector or SDK exports, over real HTTP, as windows."""

from __future__ import annotations

import gzip
import re
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
import pytest
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from driftguard.adapters.opentelemetry import METRICS
from driftguard.adapters.otlp_identity import SOURCES, identity
from driftguard.api import openapi_examples
from driftguard.api.otlp import metrics as otlp_metrics
from driftguard.api.otlp import routes
from driftguard.app import Sidecar, create_app
from driftguard.settings import IngestSettings, Settings
from driftguard.sources import otlp_push
from driftguard.store.database import Database
from tests.adapters.fake_engines import FakeTgi, FakeVllm, K
from tests.adapters.otlp_exports import as_json, exported
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import kill_held_up, serving, writers_held_up
from tests.api.otlp.answers import JSON, PROTOBUF, answered

DOCUMENT = Path(__file__).parents[3] / "docs" / "otlp.md"
encodings = pytest.mark.parametrize("media_type", [PROTOBUF, JSON])


@pytest.fixture(scope="module")
def opened(module_database_url: str) -> Iterator[Database]:
    database = Database.open(module_database_url)
    yield database
    database.close()


@pytest.fixture(scope="module")
def client(opened: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """One sidecar for the file: every test names a server of its own."""
    settings = Settings.model_validate(
        {
            "data_dir": tmp_path_factory.mktemp("data"),
            "sources": [{"url": "http://127.0.0.1:9", "server": "scraped-1"}],
            "scraping": {"interval_seconds": 3600},
        }
    )
    with serving(create_app(Sidecar(settings, opened, "http://sidecar"))) as client:
        yield client


def post(client: httpx.Client, body: bytes, media_type: str = PROTOBUF, **headers: str) -> httpx.Response:
    return client.post("/v1/metrics", content=body, headers={"Content-Type": media_type, **headers})


def send(
    client: httpx.Client, request: ExportMetricsServiceRequest, media_type: str = PROTOBUF
) -> tuple[int, str]:
    """(rejected data points, why) of the answer."""
    body = as_json(request) if media_type == JSON else request.SerializeToString()
    answer = post(client, gzip.compress(body), media_type, **{"Content-Encoding": "gzip"})
    partial = answered(answer, media_type, ExportMetricsServiceResponse).partial_success
    return partial.rejected_data_points, partial.error_message


def windows(client: httpx.Client, server: str) -> list[dict[str, Any]]:
    """Oldest first."""
    found: list[dict[str, Any]] = client.get("/api/v1/records", params={"server": server}).json()["records"]
    return sorted(found, key=lambda record: str(record["ended_at"]))


def source(client: httpx.Client, server: str) -> dict[str, Any]:
    (found,) = (item for item in client.get("/api/v1/status").json()["sources"] if item["server"] == server)
    return dict(found)


def counts(record: dict[str, Any]) -> tuple[int, int, int]:
    return record["steps"], record["drafted"], record["accepted"]


@encodings
def test_what_vllm_counted_between_two_exports_is_a_window(client: httpx.Client, media_type: str) -> None:
    engine, began = FakeVllm(), time.time_ns() - 120 * 10**9
    server = f"vllm-{media_type[-4:]}"

    def export(seconds: int) -> None:
        at = began + seconds * 10**9
        request = exported(engine.text(), at, service__instance__id=server, driftguard__draft_version="v2")
        assert send(client, request, media_type) == (0, "")

    export(0)
    assert source(client, server)["condition"] == "waiting"
    engine.serve([4, 0, 2], requests=2)
    export(30)
    export(30)  # sent again
    engine.serve([1] * 10)
    engine.serve([2] * 10)  # this export was lost
    export(90)
    first, second = windows(client, server)
    assert (counts(first), counts(second)) == ((3, 12, 6), (20, 80, 30))
    expected = {
        "target": "meta/Llama-3.1-8B",
        "draft_version": "v2",
        "fidelity": "counter",
        "kind": "window",
        "accepted_per_position": [2, 2, 1, 1],
        "output_tokens": 9,
        "prompt_tokens": 200,
        "concurrency": 3,
    }
    assert {name: first[name] for name in expected} == expected
    assert (first["time_to_first_token_seconds"], second["started_at"]) == (0.25, first["ended_at"])
    told = source(client, server)
    assert (told["kind"], told["url"], told["condition"]) == ("vllm", "OTLP", "reporting")
    assert f'driftguard_source_up{{kind="vllm",source="{server}"}} 1.0' in client.get("/metrics").text


def sdk(client: httpx.Client, server: str, temporality: AggregationTemporality) -> MeterProvider:
    exporter = OTLPMetricExporter(
        f"{client.base_url}/v1/metrics",
        preferred_temporality={Counter: temporality, Histogram: temporality},
    )
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
    attributes = {"driftguard.server": server, "gen_ai.request.model": "m", "driftguard.draft": "small"}
    return MeterProvider([reader], resource=Resource(attributes), shutdown_on_exit=False)


@pytest.mark.parametrize("temporality", list(AggregationTemporality)[1:])
def test_a_server_instrumented_with_the_sdk_has_a_window_per_segment(
    client: httpx.Client, temporality: AggregationTemporality
) -> None:
    server = f"sdk-{temporality.name.lower()}"
    provider = sdk(client, server, temporality)
    meter = provider.get_meter("test")
    names = ("steps", "drafted", "accepted", "accepted_per_position")
    counters = {name: meter.create_counter(METRICS[name]) for name in names}
    speed = meter.create_histogram(METRICS["time_per_output_token_seconds"])

    def serve(segment: str, accepted: int) -> None:
        labels = {"driftguard.segment": segment}
        for name, count in (("steps", 10), ("drafted", 20), ("accepted", accepted)):
            counters[name].add(count, labels)
        counters["accepted_per_position"].add(accepted, labels | {"driftguard.position": 0})
        speed.record(0.02)

    serve("code", 7)
    serve("chat", 5)
    provider.force_flush()
    serve("code", 9)
    provider.force_flush()
    found = {(item["segment"], *counts(item)) for item in windows(client, server) if item["drafted"]}
    first = {("code", 10, 20, 7), ("chat", 10, 20, 5)}
    is_delta = temporality is AggregationTemporality.DELTA  # which needs no export before the first window
    assert found == {("code", 10, 20, 9)} | (first if is_delta else set())
    newest = windows(client, server)[-1]
    assert (newest["draft"], newest["target"]) == ("small", "m")
    assert newest["accepted_per_position"] == [9]
    provider.shutdown()
    assert len(windows(client, server)) == (3 if is_delta else 1)


def test_a_restart_loses_nothing_and_is_marked(client: httpx.Client) -> None:
    began = time.time_ns() - 300 * 10**9

    def export(engine: FakeVllm, seconds: int, start_seconds: int) -> None:
        at, start = began + seconds * 10**9, began + start_seconds * 10**9
        text = "".join(line + "\n" for line in engine.text().splitlines() if not line.startswith("process_"))
        send(client, exported(text, at, start_ns=start, service__instance__id="restarts"))

    engine, anew = FakeVllm(), FakeVllm()
    engine.serve([4] * 10)
    export(engine, 0, -100)
    anew.serve([4] * 10 + [1] * 5)  # its counters have passed those before already
    export(anew, 60, 40)
    (window,) = windows(client, "restarts")
    assert counts(window) == (15, 15 * K, 45)
    since = datetime.fromtimestamp(began // 10**9 + 40, UTC)
    assert abs(datetime.fromisoformat(window["started_at"]) - since) < timedelta(seconds=1.1)
    # A collector that starts anew knows no better start than its own first scrape: no restart of the server.
    export(anew, 120, 120)
    anew.serve([2])
    export(anew, 180, 120)
    assert counts(windows(client, "restarts")[-1]) == (1, K, 2)
    assert len(windows(client, "restarts")) == 2


def test_a_server_started_again_without_speculation_has_stopped_drafting(client: httpx.Client) -> None:
    """A vLLM so started has no counters of drafts at all."""
    engine, began = FakeVllm(running=0), time.time_ns() - 300 * 10**9

    def condition(seconds: int) -> str:
        at = began + seconds * 10**9
        lines = engine.text().splitlines(keepends=True)
        text = "".join(line for line in lines if seconds < 120 or "spec_decode" not in line)
        assert send(client, exported(text, at, service__instance__id="plain")) == (0, "")
        return str(source(client, "plain")["condition"])

    assert condition(0) == "waiting"
    engine.serve([4, 0, 2])
    assert [condition(60), condition(90)] == ["reporting", "idle"]
    engine.restart(at=engine.started_at + 100)
    engine.running, engine.plain_tokens = 0, 500
    assert condition(120) == "idle"  # counters of drafts may still come, in another part of the export
    engine.plain_tokens = 700
    assert condition(150) == "drafting_stopped"
    stopped = windows(client, "plain")[1:]
    assert [(*counts(one), one["output_tokens"]) for one in stopped] == [(0, 0, 0, 500), (0, 0, 0, 200)]


class Ahead(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) + timedelta(hours=2)


@pytest.mark.parametrize("temporality", [1, 2], ids=["delta", "cumulative"])
def test_windows_go_on_after_a_clock_that_was_ahead_is_set_back(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, temporality: int
) -> None:
    """That of the machine on which both the sidecar and who exports are."""
    server, began = f"set-back-{temporality}", time.time_ns() - 120 * 10**9

    def export(seconds: int, total: int) -> str:
        names = {"steps": total, "drafted_tokens": 4 * total, "accepted_tokens": 2 * total}
        text = "".join(f"driftguard_{name}_total 0\n" for name in names)
        request = exported(text, 0, driftguard__server=server, driftguard__target="m")
        metrics = request.resource_metrics[0].scope_metrics[0].metrics
        for metric, (name, value) in zip(metrics, names.items(), strict=True):
            metric.name = f"driftguard.{name}"
            metric.sum.aggregation_temporality = temporality
            (point,) = metric.sum.data_points
            point.as_double = value
            point.time_unix_nano = began + seconds * 10**9
            point.start_time_unix_nano = point.time_unix_nano - 15 * 10**9
        assert send(client, request) == (0, "")
        return str(source(client, server)["condition"])

    with monkeypatch.context() as ahead:
        ahead.setattr(routes, "datetime", Ahead)
        for number in range(2):
            export(7_200 + 15 * number, 10 + 10 * number)
    before = len(windows(client, server))
    first = export(30, 30)
    assert first == ("reporting" if temporality == 1 else "waiting")
    assert export(45, 40) == "reporting"
    assert len(windows(client, server)) == before + (2 if temporality == 1 else 1)


def test_data_parallel_ranks_are_added_and_an_export_in_parts_is_one_reading(client: httpx.Client) -> None:
    began, engine = time.time_ns() - 300 * 10**9, FakeVllm()

    def text() -> str:
        one = engine.text()
        rank = "".join(
            line.replace('engine="0"', 'engine="1"') + "\n" for line in one.splitlines() if "engine=" in line
        )
        return one + rank

    def export(seconds: int) -> None:
        whole = exported(text(), began + seconds * 10**9, service__instance__id="parts")
        metrics = list(whole.resource_metrics[0].scope_metrics[0].metrics)
        for part in (metrics[:3], metrics[3:]):
            one = ExportMetricsServiceRequest()
            one.CopyFrom(whole)
            del one.resource_metrics[0].scope_metrics[0].metrics[:]
            one.resource_metrics[0].scope_metrics[0].metrics.extend(part)
            assert send(client, one) == (0, "")

    engine.serve([2] * 100)
    export(0)
    engine.serve([3] * 10)
    export(30)
    assert [counts(window) for window in windows(client, "parts")] == [(20, 20 * K, 60)]


@encodings
def test_what_no_window_can_be_made_of_is_rejected_by_name(client: httpx.Client, media_type: str) -> None:
    engine, at = FakeTgi(), time.time_ns() - 10**9
    engine.serve([2] * 10)
    server = f"tgi-{media_type[-4:]}"
    request = exported(engine.text(), at, service__instance__id=server)
    rejected, why = send(client, request, media_type)
    assert rejected == len(request.resource_metrics[0].scope_metrics[0].metrics)
    assert f"{server}: TGI does not report how many tokens it drafts" in why
    assert source(client, server)["condition"] == "incomplete"


@pytest.mark.parametrize(
    ("resource", "change", "words"),
    [
        ({}, {}, "names no server"),
        ({"service__instance__id": "scraped-1"}, {}, "scraped-1 is scraped already"),
        ({"service__name": "a", "driftguard__seggment": "b"}, {}, "driftguard.seggment: unknown attribute"),
        ({"service__name": "b"}, {"time_unix_nano": 5}, "time_unix_nano 5 is in the future, or older"),
        ({"service__name": "c"}, {"as_double": -1.0}, "-1.0 is not a count"),
        ({"service__name": "d"}, {"as_double": float("nan")}, "nan is not a count"),
    ],
)
def test_points_that_are_wrong_are_rejected_by_name(
    client: httpx.Client, resource: dict[str, str], change: dict[str, Any], words: str
) -> None:
    request = exported("vllm:spec_decode_num_drafts_total 7\n", time.time_ns(), **resource)  # type: ignore[arg-type]
    (point,) = request.resource_metrics[0].scope_metrics[0].metrics[0].sum.data_points
    for name, value in change.items():
        setattr(point, name, value)
    for media_type in (PROTOBUF, JSON):
        rejected, why = send(client, request, media_type)
        assert rejected == 1
        assert words in why


def test_a_nul_costs_no_other_server_of_the_export_its_state(client: httpx.Client) -> None:
    """Postgres stores none."""
    text, at = "vllm:spec_decode_num_drafts_total 7\n", time.time_ns()
    request = exported(text, at, service__name="beside-a-nul")
    for name, metric in (("nul\0", "vllm:spec_decode_num_drafts_total"), ("nul-inside", "driftguard.\0")):
        odd = exported(text, at, service__name=name)
        odd.resource_metrics[0].scope_metrics[0].metrics[0].name = metric
        request.resource_metrics.extend(odd.resource_metrics)
    rejected, why = send(client, request)
    assert rejected == 2
    assert "a NUL" in why
    assert source(client, "beside-a-nul")["condition"] == "not_speculating"
    assert source(client, "nul-inside")["detail"] == "driftguard.: unknown metric"


@encodings
def test_a_point_without_a_number_is_rejected_and_not_taken_for_0(
    client: httpx.Client, media_type: str
) -> None:
    """So JavaScript writes NaN in JSON. A counter at 0 would be a restart of the server."""
    engine, at, server = FakeVllm(), time.time_ns() - 10**10, f"no-number-{media_type[-4:]}"
    send(client, exported(engine.text(), at, service__instance__id=server), media_type)
    engine.serve([3] * 10)
    wrong = exported(engine.text(), at + 10**9, service__instance__id=server)
    metrics = {metric.name: metric for metric in wrong.resource_metrics[0].scope_metrics[0].metrics}
    steps = next(metric for name, metric in metrics.items() if name.startswith("vllm:spec_decode_num_drafts"))
    steps.sum.data_points[0].ClearField("as_double")
    rejected, why = send(client, wrong, media_type)
    assert rejected == 1
    assert f"{steps.name}: nan is not a count" in why
    engine.serve([3] * 10)
    right = exported(engine.text(), at + 2 * 10**9, service__instance__id=server)
    assert send(client, right, media_type) == (0, "")
    assert [counts(record)[0] for record in windows(client, server)] == [20]


def test_metrics_of_others_are_ignored_and_counted(client: httpx.Client) -> None:
    request = exported("http_requests_total 7\n", time.time_ns(), service__name="web")
    before = ignored(client)
    assert send(client, request) == (0, "")
    assert ignored(client) == before + 1
    assert "web" not in {item["server"] for item in client.get("/api/v1/status").json()["sources"]}


def ignored(client: httpx.Client) -> float:
    (found,) = re.findall(
        r"^driftguard_otlp_ignored_points_total (\S+)$", client.get("/metrics").text, re.MULTILINE
    )
    return float(found)


def test_a_server_whose_exports_stop_is_stale_and_one_that_is_away_is_told(
    client: httpx.Client, opened: Database
) -> None:
    send(client, exported(FakeVllm().text(), time.time_ns(), service__instance__id="leaves"))
    gone = exported("vllm:spec_decode_num_drafts_total 7\n", time.time_ns(), service__instance__id="leaves")
    gone.resource_metrics[0].scope_metrics[0].metrics[0].sum.data_points[0].flags = 1
    send(client, gone)
    assert source(client, "leaves")["condition"] == "unreachable"
    with opened.session() as session:
        connection = session.connection().connection.driver_connection
        assert connection is not None
        connection.execute(
            "UPDATE sources SET scraped_at = scraped_at - interval '1 hour' WHERE server = 'leaves'"
        )
    wait_until(lambda: source(client, "leaves")["condition"] == "stale", "a look at the exports")
    assert source(client, "leaves")["detail"] == "its exports have stopped"
    assert "leaves" in client.get("/").text
    up = 'driftguard_source_up{kind="vllm",source="leaves"} 0.0'
    stale = 'driftguard_source_condition{condition="stale",kind="vllm",source="leaves"} 1.0'
    wait_until(lambda: {up, stale} <= set(client.get("/metrics").text.splitlines()), "the metrics to follow")


def test_an_export_that_the_database_did_not_take_is_taken_when_it_is_sent_again(
    client: httpx.Client, opened: Database
) -> None:
    engine, at = FakeVllm(), time.time_ns() - 10**10
    send(client, exported(engine.text(), at, service__instance__id="again"))
    engine.serve([3] * 10)
    body = exported(engine.text(), at + 10**9, service__instance__id="again").SerializeToString()
    answers: list[httpx.Response] = []
    with writers_held_up(opened):
        thread = threading.Thread(target=lambda: answers.append(post(client, body)))
        thread.start()
        while not answers:
            kill_held_up(opened)
            thread.join(timeout=0.05)
    (answer,) = answers
    assert (answer.status_code, answer.headers["content-type"]) == (503, PROTOBUF)
    assert int(answer.headers["retry-after"]) > 0
    assert Status.FromString(answer.content).code == 14
    assert post(client, body).status_code == 200
    assert [counts(window) for window in windows(client, "again")] == [(10, 10 * K, 30)]


def test_bad_data_is_told_as_a_status_in_the_encoding_of_the_request(client: httpx.Client) -> None:
    answer = post(client, b"\xff\xff")
    assert (answer.status_code, answer.headers["content-type"]) == (400, PROTOBUF)
    status = Status.FromString(answer.content)
    told = BadRequest()
    assert status.details[0].Unpack(told)
    assert "ExportMetricsServiceRequest" in status.message == told.field_violations[0].description
    for body in (b"{oops", b'{"resourceMetrics": 1}', b'{"resourceMetrics": [{"scopeMetrics": 1}]}'):
        answer = post(client, body, JSON)
        assert (answer.status_code, answer.headers["content-type"]) == (400, JSON)
        assert answer.json()["details"][0]["@type"].endswith("/google.rpc.BadRequest")
        assert "ExportMetricsServiceRequest" in answer.json()["message"]


def test_an_empty_export_is_taken(client: httpx.Client) -> None:
    assert post(client, b"").content == b""
    assert post(client, b"{}", JSON).json() == {}


def test_the_documented_example_is_one_of_vllm() -> None:
    (export,) = otlp_metrics.METRICS.read(
        JSON, msgspec.json.encode(openapi_examples.METRICS), IngestSettings()
    )
    assert export.points[0].name == "vllm:spec_decode_num_drafts_total"


def test_every_metric_and_attribute_is_documented() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").partition("## Metrics")[2].splitlines()
    for field, names in (*SOURCES.items(), *((field, (name,)) for field, name in METRICS.items())):
        assert [name for name in names if not documents(lines, field, name)] == []


def documents(lines: list[str], field: str, name: str) -> bool:
    return any(line.startswith(f"| `{field}` |") and f"`{name}`" in line for line in lines)


def test_what_is_remembered_of_all_resources_together_is_bounded(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, began = FakeVllm(), time.time_ns()

    def export(server: str, seconds: int) -> tuple[int, str]:
        at = began + seconds * 10**9
        return send(client, exported(engine.text(), at, service__instance__id=server))

    engine.serve([4, 0, 2], requests=2)
    assert export("known", -60) == (0, "")
    monkeypatch.setattr(otlp_push, "MAX_SERIES", 0)
    rejected, reason = export("one too many", -60)
    assert rejected > 0
    assert reason == "one too many: no room for more than the 0 series that are already remembered"
    engine.serve([4, 0, 2], requests=2)
    assert export("known", -30) == (0, "")
    assert len(windows(client, "known")) == 1


@pytest.mark.parametrize(
    ("attributes", "server"),
    [
        ({"service.name": "chat", "service.instance.id": "chat-eu-1:8000"}, "chat-eu-1:8000"),
        ({"service.name": "chat", "service.instance.id": "627cc493-f310-47de-96bd-71410b7dec09"}, "chat"),
        (
            {
                "service.name": "chat",
                "server.address": "chat-eu-1",
                "service.instance.id": "627cc493-f310-47de-96bd-71410b7dec09",
            },
            "chat-eu-1",
        ),
        (  # of version 5: made of a name, so that it stays
            {"service.name": "chat", "service.instance.id": "17ffc8fd-6ed7-5069-a5fb-2fed78f5455f"},
            "17ffc8fd-6ed7-5069-a5fb-2fed78f5455f",
        ),
        (  # a machine's own, which stays too
            {"service.name": "chat", "service.instance.id": "627cc493f31047de96bd71410b7dec09"},
            "627cc493f31047de96bd71410b7dec09",
        ),
        (  # which an SDK calls every service that has no name
            {
                "service.name": "unknown_service:python",
                "service.instance.id": "627cc493-f310-47de-96bd-71410b7dec09",
            },
            "627cc493-f310-47de-96bd-71410b7dec09",
        ),
        (
            {"service.instance.id": "627cc493-f310-47de-96bd-71410b7dec09"},
            "627cc493-f310-47de-96bd-71410b7dec09",
        ),
    ],
)
def test_a_server_is_not_named_by_an_id_that_its_sdk_makes_up_at_each_start(
    attributes: dict[str, str], server: str
) -> None:
    assert identity(attributes).server == server
