"""OTLP exports of very many fields: counted before objects are made of them, and never on the event loop."""

from __future__ import annotations

import gzip
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from driftguard.adapters.otlp_readings import Readings
from driftguard.api import request_body
from driftguard.api.otlp.bounds import json_fields, nested_fields, protobuf_fields
from driftguard.api.otlp.metrics import METRICS
from driftguard.api.otlp.spans import MARK, TRACES
from driftguard.app import Sidecar, create_app
from driftguard.settings import IngestSettings, Settings
from driftguard.sources.otlp_push import PushedSources
from driftguard.sources.otlp_push_source import PushedSource
from driftguard.store.database import Database
from tests.adapters.fake_engines import FakeVllm
from tests.adapters.otlp_exports import exported
from tests.api.ingest_server import serving
from tests.api.otlp.answers import JSON, PROTOBUF

LIMIT = 20_000
ITEMS = 1_000
GZIP = {"Content-Encoding": "gzip"}
WAIT_SECONDS = 20


@pytest.fixture(scope="module")
def client(module_database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    database = Database.open(module_database_url)
    settings = Settings.model_validate(
        {
            "data_dir": tmp_path_factory.mktemp("data"),
            "ingest": {"max_otlp_fields": LIMIT, "max_otlp_items": ITEMS},
        }
    )
    with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:
        yield client
    database.close()


def post(client: httpx.Client, path: str, body: bytes, media_type: str) -> httpx.Response:
    return client.post(path, content=gzip.compress(body), headers={"Content-Type": media_type} | GZIP)


@pytest.mark.parametrize("path", ["/v1/traces", "/v1/metrics"])
def test_an_export_of_millions_of_empty_messages_is_refused_by_their_number(
    client: httpx.Client, path: str
) -> None:
    name = {"/v1/traces": "resourceSpans", "/v1/metrics": "resourceMetrics"}[path]
    told = f"more than {LIMIT} fields"
    answer = post(client, path, b"\x0a\x00" * 2_900_000, PROTOBUF)
    assert answer.status_code == 413
    status = Status.FromString(answer.content)
    assert told in status.message
    assert "ingest.max_otlp_fields" in status.message
    answer = post(client, path, f'{{"{name}": [{"{}," * 1_900_000}{{}}]}}'.encode(), JSON)
    assert answer.status_code == 413
    assert told in answer.json()["message"]
    assert post(client, path, b"\x0a\x00" * ITEMS, PROTOBUF).status_code == 200


@pytest.mark.parametrize("path", ["/v1/traces", "/v1/metrics"])
def test_an_export_of_very_many_items_is_refused_by_their_number(client: httpx.Client, path: str) -> None:
    """Of a thousand allowed: the groups, scopes and metrics that hold them count too."""
    if path == "/v1/traces":
        spans = ExportTraceServiceRequest()
        scope = spans.resource_spans.add().scope_spans.add()
        items: Any = scope.spans
        item: dict[str, Any] = {"trace_id": b"t", "span_id": b"s", "end_time_unix_nano": 2}
        export: Message = spans
    else:
        points = ExportMetricsServiceRequest()
        metric = points.resource_metrics.add().scope_metrics.add().metrics.add(name="m")
        items, item, export = metric.gauge.data_points, {}, points
    for _ in range(ITEMS - 4):
        items.add(start_time_unix_nano=1, **item)
    bodies = {PROTOBUF: export.SerializeToString, JSON: lambda: MessageToJson(export).encode()}
    for media_type, body in bodies.items():
        assert post(client, path, body(), media_type).status_code == 200
    for _ in range(5):
        items.add(start_time_unix_nano=1, **item)
    for media_type, body in bodies.items():
        answer = post(client, path, body(), media_type)
        assert answer.status_code == 413
        assert b"ingest.max_otlp_items" in answer.content


def test_text_is_one_field_whatever_it_says(client: httpx.Client) -> None:
    text = json.dumps('a, "b", [c], {d} \\' * LIMIT)
    attribute = f'{{"key": "k", "value": {{"stringValue": {text}}}}}'
    body = f'{{"resourceSpans": [{{"resource": {{"attributes": [{attribute}]}}}}]}}'
    assert post(client, "/v1/traces", body.encode(), JSON).status_code == 200


def any_value(source: random.Random, depth: int = 0) -> AnyValue:
    if depth < 3 and source.random() < 0.3:
        values = [any_value(source, depth + 1) for _ in range(source.randrange(4))]
        return AnyValue(array_value=ArrayValue(values=values))
    return source.choice(
        [AnyValue(string_value="text"), AnyValue(int_value=source.getrandbits(40)), AnyValue()]
    )


def attributes(source: random.Random) -> list[KeyValue]:
    return [
        KeyValue(key="k" * (number * 90), value=any_value(source)) for number in range(source.randrange(5))
    ]


def traces(source: random.Random) -> Message:
    request = ExportTraceServiceRequest()
    for _ in range(source.randrange(4)):
        group = request.resource_spans.add(schema_url="s" * source.randrange(300))
        group.resource.attributes.extend(attributes(source))
        scope = group.scope_spans.add()
        for _ in range(source.randrange(4)):
            span = scope.spans.add(trace_id=b"trace", start_time_unix_nano=source.randrange(3), flags=1)
            span.attributes.extend(attributes(source))
            span.events.add().attributes.extend(attributes(source))
    return request


def metrics(source: random.Random) -> Message:
    request = ExportMetricsServiceRequest()
    for _ in range(source.randrange(4)):
        metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="m")
        point = metric.histogram.data_points.add(count=3, sum=source.random())
        point.bucket_counts.extend(range(source.randrange(9)))
        point.attributes.extend(attributes(source))
    return request


def test_fields_are_counted_as_protobuf_writes_them() -> None:
    source = random.Random(1)
    for number in range(200):
        message = (traces, metrics)[number % 2](source)
        body, fields = message.SerializeToString(), fields_of(message)
        nested = nested_fields(message.DESCRIPTOR)
        if fields:
            assert protobuf_fields(body, nested, fields - 1) == fields
        assert protobuf_fields(body, nested, fields) in (0, fields)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_are_left_to_the_parser(body: bytes) -> None:
    nested = nested_fields(ExportTraceServiceRequest.DESCRIPTOR)
    assert 0 <= protobuf_fields(body, nested, 1) <= 2


@given(
    st.recursive(
        st.one_of(st.text(), st.integers()), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_json_is_never_counted_as_more_than_it_holds(value: Any) -> None:
    body = json.dumps(value).encode()
    assert json_fields(body, 0) <= 2 * nodes(value)
    assert json_fields(body, 0) >= nodes(value) - 1


def test_strings_that_never_end_take_no_time_that_grows_with_the_square_of_their_number() -> None:
    assert json_fields(b"[" * 200_000 + rb"\"" * 1_000_000, 100) == 200_000


def nodes(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(nodes, inner))


def fields_of(message: Message) -> int:
    count = 0
    for field, value in message.ListFields():
        many = list(value) if field.is_repeated else [value]
        if field.message_type is not None:
            count += sum(1 + fields_of(item) for item in many)
        else:
            count += 1 if field.is_packed else len(many)
    return count


def test_a_span_is_given_few_attributes_of_its_resource() -> None:
    """A hundred thousand of a resource are not copied into each of its spans."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    names = ["service.name", "driftguard.draft", "driftguard.wrong", *(f"a{number}" for number in range(500))]
    group.resource.attributes.extend(KeyValue(key=name, value=AnyValue(string_value="v")) for name in names)
    span = group.scope_spans.add().spans.add()
    span.attributes.extend([KeyValue(key=MARK, value=AnyValue(int_value=1))])
    (found,) = TRACES.read(PROTOBUF, request.SerializeToString(), IngestSettings())
    assert set(found.attributes) == {"service.name", "driftguard.draft", "driftguard.wrong", MARK}


def test_a_gzip_body_of_endless_members_is_refused(client: httpx.Client) -> None:
    """Each has 20 bytes, and what follows it would be copied with each."""
    headers = {"Content-Type": PROTOBUF} | GZIP
    body = gzip.compress(b"")
    assert client.post("/v1/traces", content=3 * body, headers=headers).status_code == 200
    answer = client.post("/v1/traces", content=250_000 * body, headers=headers)
    assert answer.status_code == 413
    assert "members" in Status.FromString(answer.content).message


STAGES = [
    (request_body, "_unpacked"),
    (METRICS.__class__, "read"),
    (PushedSources, "_find"),
    (PushedSource, "_sort"),
    (Readings, "take"),
    (PushedSource, "_records"),
]


@pytest.mark.parametrize(("owner", "name"), STAGES, ids=[name for _, name in STAGES])
def test_the_sidecar_answers_while_an_export_is_worked_on(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """Each step that takes longer with a larger export is held up; others are answered meanwhile."""
    is_reached, may_go_on = threading.Event(), threading.Event()
    work = getattr(owner, name)

    def held_up(*arguments: Any) -> Any:
        is_reached.set()
        may_go_on.wait(WAIT_SECONDS)
        return work(*arguments)

    monkeypatch.setattr(owner, name, held_up)
    export = exported(FakeVllm().text(), time.time_ns(), service__instance__id=name).SerializeToString()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(post, client, "/v1/metrics", export, PROTOBUF)
        assert is_reached.wait(WAIT_SECONDS)
        try:
            assert httpx.get(f"{client.base_url}/healthz", timeout=WAIT_SECONDS / 2).status_code == 200
        finally:
            may_go_on.set()
        assert answer.result().status_code == 200
