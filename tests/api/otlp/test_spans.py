"""POST /v1/traces: spans of an OpenTelemetry exporter, in both encodings, over real HTTP."""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_OID, uuid5

import httpx
import pytest
import structlog
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from driftguard.api import openapi_examples
from driftguard.api.otlp import spans as otlp_spans
from driftguard.settings import IngestSettings
from driftguard.store.database import Database
from tests.api.otlp.answers import JSON, PROTOBUF, answered
from tests.pipeline.sidecar import running_sidecar

DOCUMENT = Path(__file__).parents[3] / "docs" / "otlp.md"
ATTRIBUTES: dict[str, Any] = {
    "gen_ai.request.model": "Qwen3-32B",
    "gen_ai.conversation.id": "c-1",
    "gen_ai.usage.output_tokens": 9,
    "gen_ai.usage.input_tokens": 40,
    "gen_ai.usage.cache_read.input_tokens": 32,
    "driftguard.draft": "Qwen3-0.6B",
    "driftguard.draft_version": "v1",
    "driftguard.method": "draft_model",
    "driftguard.steps": 3,
    "driftguard.drafted_tokens": 12,
    "driftguard.accepted_tokens": 6,
    "driftguard.emitted_tokens": 9,
    "driftguard.accepted_per_position": [3, 2, 1],
    "driftguard.drafted_per_position": [3, 3, 3],
}


@pytest.fixture(scope="module")
def client(module_database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """One sidecar for the file: every test has spans of a service of its own."""
    database = Database.open(module_database_url)
    with closing(database), running_sidecar(database, tmp_path_factory.mktemp("data")) as client:
        yield client


@pytest.fixture
def service(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


_TEXT = {math.nan: "NaN", math.inf: "Infinity", -math.inf: "-Infinity"}  # as protobuf's JSON writes them


def value_of(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [value_of(item) for item in value]}}
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value if math.isfinite(value) else _TEXT[value]}


def attributes_of(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value_of(value)} for key, value in values.items()]


def as_json(service: str, *spans: dict[str, Any]) -> bytes:
    """Each span by its attributes; they ended just now."""
    now = time.time_ns()
    made = [
        {
            "traceId": uuid5(NAMESPACE_OID, f"{service} {number}").hex,
            "spanId": "eee19b7ec3c1b174",
            "name": "chat",
            "startTimeUnixNano": str(now - 10**9),
            "endTimeUnixNano": str(now),
            "attributes": attributes_of(values),
        }
        for number, values in enumerate(spans, start=1)
    ]
    resource = {"attributes": attributes_of({"service.name": service})}
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": made}]}]}).encode()


def as_protobuf(body: bytes) -> bytes:
    request = ExportTraceServiceRequest()
    for group in json.loads(body)["resourceSpans"]:
        into = request.resource_spans.add()
        fill(into.resource.attributes, group["resource"]["attributes"])
        for span in group["scopeSpans"][0]["spans"]:
            made = (into.scope_spans or [into.scope_spans.add()])[0].spans.add()
            made.trace_id, made.span_id = bytes.fromhex(span["traceId"]), bytes.fromhex(span["spanId"])
            made.start_time_unix_nano = int(span["startTimeUnixNano"])
            made.end_time_unix_nano = int(span["endTimeUnixNano"])
            fill(made.attributes, span["attributes"])
    return bytes(request.SerializeToString())


def fill(into: Any, attributes: list[dict[str, Any]]) -> None:
    for attribute in attributes:
        item = into.add()
        item.key = attribute["key"]
        put(item.value, attribute["value"])


def put(into: Any, value: dict[str, Any]) -> None:
    ((kind, given),) = value.items()
    if kind == "arrayValue":
        for item in given["values"]:
            put(into.array_value.values.add(), item)
    elif kind == "intValue":
        into.int_value = int(given)
    elif kind == "doubleValue":
        into.double_value = float(given)
    else:
        into.string_value = given


def send(client: httpx.Client, body: bytes, media_type: str, **headers: str) -> tuple[int, str]:
    """(rejected spans, why) of the answer."""
    answer = client.post("/v1/traces", content=body, headers={"Content-Type": media_type, **headers})
    partial = answered(answer, media_type, ExportTraceServiceResponse).partial_success
    return partial.rejected_spans, partial.error_message


def records(client: httpx.Client, service: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/api/v1/records", params={"server": service}).json()["records"]
    return found


@pytest.mark.parametrize("media_type", [PROTOBUF, JSON])
def test_a_span_becomes_a_record_and_others_are_ignored(
    client: httpx.Client, service: str, media_type: str
) -> None:
    body = as_json(service, ATTRIBUTES, {"http.request.method": "GET"})
    encoded = as_protobuf(body) if media_type == PROTOBUF else body
    before = ignored(client)
    assert send(client, encoded, media_type) == (0, "")
    assert send(client, gzip.compress(encoded), media_type, **{"Content-Encoding": "gzip"}) == (0, "")
    (record,) = records(client, service)
    given = {
        "server": service,
        "target": "Qwen3-32B",
        "draft_version": "v1",
        "segment": "default",
        "session": "c-1",
        "drafted": 12,
        "accepted": 6,
        "emitted": 9,
        "prompt_tokens": 40,
        "cached_tokens": 32,
        "output_tokens": 9,
        "accepted_per_position": [3, 2, 1],
        "temperature": None,
    }
    assert {name: record[name] for name in given} == given
    assert ignored(client) == before + 2


def ignored(client: httpx.Client) -> float:
    text = client.get("/metrics").text
    (count,) = re.findall(r"^driftguard_otlp_ignored_spans_total (\S+)$", text, re.MULTILINE)
    return float(count)


def test_both_encodings_of_a_span_are_the_same_record(client: httpx.Client, service: str) -> None:
    body = as_json(service, ATTRIBUTES)
    send(client, body, JSON)
    send(client, as_protobuf(body), PROTOBUF)
    assert len(records(client, service)) == 1


@pytest.mark.parametrize("media_type", [PROTOBUF, JSON])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"driftguard.accepted_tokens": 13}, "span 2: accepted: 13 is more than drafted"),
        ({"driftguard.steps": "three"}, "span 2: steps"),
        (
            {"driftguard.seggment": "code"},
            "span 2: driftguard.seggment: unknown attribute; docs/otlp.md lists",
        ),
        ({"gen_ai.request.temperature": math.nan}, "span 2: temperature: number out of range"),
        ({"driftguard.time_per_output_token_seconds": -math.inf}, "span 2: time_per_output_token_seconds"),
        ({"driftguard.accepted_per_position": [3, math.inf, 1]}, "span 2: accepted_per_position"),
    ],
)
def test_a_span_that_makes_no_record_is_rejected_by_name_and_the_others_are_stored(
    client: httpx.Client, service: str, media_type: str, change: dict[str, Any], words: str
) -> None:
    body = as_json(service, ATTRIBUTES, ATTRIBUTES | change)
    rejected, why = send(client, as_protobuf(body) if media_type == PROTOBUF else body, media_type)
    assert rejected == 1
    assert words in why
    assert len(records(client, service)) == 1


def test_what_is_rejected_is_in_the_log_of_the_sidecar_once_a_minute(
    database: Database, tmp_path: Path, service: str
) -> None:
    """OpenTelemetry's own exporter for Python does not look at a partial success."""
    wrong = as_json(service, ATTRIBUTES, ATTRIBUTES | {"driftguard.seggment": "code"})
    with structlog.testing.capture_logs() as logs, running_sidecar(database, tmp_path) as client:
        for _ in range(3):
            send(client, wrong, JSON)
    (line,) = [line for line in logs if line["event"] == "otlp_rejected"]
    assert (line["log_level"], line["things"], line["rejected"]) == ("warning", "spans", 1)
    assert "driftguard.seggment" in line["reasons"]


@pytest.mark.parametrize(
    ("content", "media_type", "status", "reason"),
    [
        (b"{oops", JSON, 400, "ExportTraceServiceRequest"),
        (b"a" * 6_000_001, JSON, 413, "larger than 6000000 bytes"),
        (b"", "text/plain", 415, "text/plain"),
    ],
)
def test_an_export_that_is_refused_whole_is_in_the_log_of_the_sidecar_once_a_minute(
    database: Database, tmp_path: Path, content: bytes, media_type: str, status: int, reason: str
) -> None:
    """OpenTelemetry's SDK for JavaScript says nothing of it unless a logger is set."""
    headers = {"Content-Type": media_type}
    with structlog.testing.capture_logs() as logs, running_sidecar(database, tmp_path) as client:
        for _ in range(3):
            assert client.post("/v1/traces", content=content, headers=headers).status_code == status
        foreign = client.post("/v1/traces", headers=headers | {"Origin": "http://other.example"})
        assert foreign.status_code == 403
    line, other = (line for line in logs if line["event"] == "otlp_refused")
    assert (other["status"], other["exports"]) == (403, 1)
    told = (line["log_level"], line["path"], line["status"], line["exports"])
    assert told == ("warning", "/v1/traces", status, 1)
    assert reason in line["reason"]


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([{"gen_ai.operation.name": "chat", "gen_ai.usage.output_tokens": 53}], True),
        ([{"openinference.span.kind": "LLM", "llm.token_count.completion": 53}], True),
        ([{"driftguard.drafted": 12, "driftguard.accepted_tokens": 6}], True),  # misspelt
        ([{"http.request.method": "POST"}], False),
        ([ATTRIBUTES, {"gen_ai.operation.name": "chat"}], False),
    ],
)
def test_the_log_says_once_that_spans_of_generations_have_no_counts(
    database: Database, tmp_path: Path, service: str, spans: list[dict[str, Any]], said: bool
) -> None:
    """Instrumentations of OpenAI's client tell of tokens, and not of what was accepted."""
    with structlog.testing.capture_logs() as logs, running_sidecar(database, tmp_path) as client:
        for _ in range(3):
            assert send(client, as_json(service, *spans), JSON) == (0, "")
    lines = [line for line in logs if line["event"] == "otlp_spans_without_counts"]
    assert len(lines) == said
    assert all("driftguard.drafted_tokens" in line["hint"] for line in lines)


@pytest.mark.parametrize("value", [{"intValue": "NaN"}, {"doubleValue": "warm"}])
def test_a_number_that_is_none_costs_only_its_own_span(
    client: httpx.Client, service: str, value: dict[str, str]
) -> None:
    ours, other = json.loads(as_json(service, ATTRIBUTES, ATTRIBUTES, {})), {"key": "app.x", "value": value}
    _, wrong, foreign = ours["resourceSpans"][0]["scopeSpans"][0]["spans"]
    wrong["attributes"].append({"key": "gen_ai.request.temperature", "value": value})
    foreign["attributes"].append(other)
    rejected, why = send(client, json.dumps(ours).encode(), JSON)
    assert rejected == 1
    assert "span 2: temperature" in why
    assert len(records(client, service)) == 1


@pytest.mark.parametrize(
    ("media_type", "half", "stored"),
    [
        (JSON, rb"\ud83d", "\ufffd"),
        (JSON, rb"\uDE00", "\ufffd"),
        (JSON, rb"\ude00\ud83d", "\ufffd\ufffd"),
        (PROTOBUF, b"\xed\xa0\xbd", "\ufffd"),  # as protobufjs writes it
        (PROTOBUF, b"\xff\xfeA", "??A"),
    ],
)
def test_half_a_character_costs_no_record(
    client: httpx.Client, service: str, media_type: str, half: bytes, stored: str
) -> None:
    """The SDK for JavaScript cuts attributes between two UTF-16 units (attributeValueLengthLimit)."""
    place = "\uffff"
    body = as_json(
        service,
        ATTRIBUTES | {"driftguard.segment": rf"a \ud83d 😀 \\{place}"},
        {"gen_ai.prompt": f"cut {place}"},
    )
    encoded = as_protobuf(body) if media_type == PROTOBUF else body
    mark = place.encode() if media_type == PROTOBUF else rb"\uffff"
    assert encoded.count(mark) == 2
    assert send(client, encoded.replace(mark, half), media_type) == (0, "")
    (record,) = records(client, service)
    assert record["segment"] == rf"a \ud83d 😀 \\{stored}"


def test_json_is_read_as_javascript_writes_it(client: httpx.Client, service: str) -> None:
    """Attributes of the exporter for JavaScript: what is integral is an integer of any size, null is NaN."""
    export = json.loads(as_json(service, ATTRIBUTES | {"driftguard.steps": 0}, {}))
    ours, other = export["resourceSpans"][0]["scopeSpans"][0]["spans"]
    (steps,) = (item for item in ours["attributes"] if item["key"] == "driftguard.steps")
    steps["value"] = {"intValue": 3}
    wrong = json.loads(json.dumps(ours)) | {"spanId": "9b448235a6f814dc"}
    (steps,) = (item for item in wrong["attributes"] if item["key"] == "driftguard.steps")
    steps["value"] = {"intValue": "BIG"}
    other["attributes"] = [
        {"key": "big", "value": {"intValue": "BIG"}},
        {"key": "nan", "value": {"doubleValue": None}},
        {"key": "arr", "value": {"arrayValue": {"values": [{"intValue": 1}, {}, {"doubleValue": 2.5}]}}},
        {"key": "map", "value": {"kvlistValue": {"values": [{"key": "a", "value": {"intValue": "BIG"}}]}}},
    ]
    export["resourceSpans"][0]["scopeSpans"][0]["spans"].append(wrong)
    body = json.dumps(export).replace('"BIG"', "1e+21").encode()
    rejected, why = send(client, body, JSON)
    assert rejected == 1
    assert "steps: expected int <= 1099511627776" in why
    assert [record["steps"] for record in records(client, service)] == [3]


@pytest.mark.parametrize("left_out", ["traceId", "spanId", "startTimeUnixNano", "endTimeUnixNano"])
def test_what_an_exporter_leaves_out_costs_only_its_own_span(
    client: httpx.Client, service: str, left_out: str
) -> None:
    export = json.loads(as_json(service, ATTRIBUTES, ATTRIBUTES, {}))
    _, ours, other = export["resourceSpans"][0]["scopeSpans"][0]["spans"]
    del ours[left_out], other[left_out]
    rejected, why = send(client, json.dumps(export).encode(), JSON)
    assert rejected == 1
    assert "span 2: " in why
    assert len(records(client, service)) == 1


@pytest.mark.parametrize("media_type", [PROTOBUF, JSON])
@pytest.mark.parametrize("ids", [{"traceId": ""}, {"spanId": "0" * 16}])
def test_spans_without_ids_are_not_taken_for_one_record(
    client: httpx.Client, service: str, media_type: str, ids: dict[str, str]
) -> None:
    export = json.loads(as_json(service, ATTRIBUTES, ATTRIBUTES))
    for span in export["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        span |= {"traceId": "5b8efff798038103d269b633813fc60c"} | ids
    body = json.dumps(export).encode()
    rejected, why = send(client, as_protobuf(body) if media_type == PROTOBUF else body, media_type)
    assert rejected == 2
    assert "span 1: record_id" in why
    assert records(client, service) == []


@pytest.mark.parametrize(
    ("content", "media_type", "status", "words"),
    [
        (b"{oops", JSON, 400, "ExportTraceServiceRequest"),
        (b'{"resourceSpans": [{"scopeSpans": 1}]}', JSON, 400, "scopeSpans"),
        (b"\xff\xff", PROTOBUF, 400, "ExportTraceServiceRequest"),
        (b"", "text/plain", 415, "text/plain"),
    ],
)
def test_what_is_no_export_is_refused(
    client: httpx.Client, content: bytes, media_type: str, status: int, words: str
) -> None:
    answer = client.post("/v1/traces", content=content, headers={"Content-Type": media_type})
    told = PROTOBUF if media_type == PROTOBUF else JSON
    assert (answer.status_code, answer.headers["content-type"]) == (status, told)
    message = Status.FromString(answer.content).message if told == PROTOBUF else answer.json()["message"]
    assert words in message


def test_without_the_extra_json_is_taken_and_protobuf_names_it(
    client: httpx.Client, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ExportTraceServiceRequest.__module__, Status.__module__):
        monkeypatch.setitem(sys.modules, module, None)
    body = as_json(service, ATTRIBUTES)
    answer = client.post("/v1/traces", content=as_protobuf(body), headers={"Content-Type": PROTOBUF})
    assert answer.status_code == 501
    assert "pip install 'driftguard-llm[otlp]'" in answer.json()["message"]
    assert send(client, body, JSON) == (0, "")


def test_the_documented_example_is_a_record() -> None:
    (span,) = otlp_spans.TRACES.read(JSON, json.dumps(openapi_examples.SPANS).encode(), IngestSettings())
    assert json.loads(otlp_spans.record_line(span))["accepted"] == 148


def test_every_attribute_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Metrics")[0]
    for field, names in otlp_spans._SOURCES.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"| `{field}` |"))
        assert [name for name in names if f"`{name}`" not in line] == []
