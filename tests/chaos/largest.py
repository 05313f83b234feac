"""Bodies of the largest size allowed, with the content that needs most memory to read, several at once."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import httpx

from driftguard.settings import IngestSettings
from tests.chaos.row import Row
from tests.chaos.scene import SERVERS, closing, scene

AT_ONCE: Final = 6
LIMITS: Final = IngestSettings()
MOST_BYTES: Final = LIMITS.max_batch_bytes - 1_000  # the rest is for what is around them
PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
LINES: Final = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class Body:
    """One attack."""

    name: str
    path: str
    media_type: str
    content: bytes


def bodies() -> Iterator[Body]:
    yield from _metrics()
    yield from _traces()
    yield from _records()


def _metrics() -> Iterator[Body]:
    path, most, items = "/v1/metrics", LIMITS.max_otlp_fields - 100, LIMITS.max_otlp_items - 100
    now = time.time_ns()
    name = "vllm:spec_decode_num_draft_tokens_total"
    counter = _text(1, name)
    stamp = b"\x19" + now.to_bytes(8, "little") + b"\x21" + bytes(8)

    def protobuf(points: bytes) -> bytes:
        metric = counter + _message(7, points + b"\x10\x02\x18\x01")
        return _message(1, _message(2, _message(2, metric)))

    empty = b"\x0a\x00" * most
    yield Body("empty points", path, PROTOBUF, protobuf(empty))
    of_three = _message(1, stamp)
    yield Body("points", path, PROTOBUF, protobuf(of_three * items))
    attribute = _message(7, _text(1, "k") + _message(2, _text(1, "v")))
    labelled = _message(1, attribute + stamp)
    yield Body("points of a label", path, PROTOBUF, protobuf(labelled * items))
    distinct = b"".join(
        _message(1, _message(7, _text(1, "k") + _message(2, _text(1, str(number)))) + stamp)
        for number in range(items)
    )
    yield Body("series", path, PROTOBUF, protobuf(distinct))
    labels = b"".join(
        _message(7, _text(1, f"k{number}") + _message(2, _text(1, "v"))) for number in range(most // 4)
    )
    yield Body("a point of many labels", path, PROTOBUF, protobuf(_message(1, labels + stamp)))
    group = _message(1, _message(2, _message(2, counter + _message(7, _message(1, stamp)))))
    yield Body("resources", path, PROTOBUF, group * (items // 4))

    def json(points: str) -> bytes:
        kind = f'"isMonotonic":true,"aggregationTemporality":2,"dataPoints":[{points}]'
        metric = f'{{"name":"{name}","sum":{{{kind}}}}}'
        return f'{{"resourceMetrics":[{{"scopeMetrics":[{{"metrics":[{metric}]}}]}}]}}'.encode()

    yield Body("empty points", path, JSON, json(",".join(["{}"] * (most // 2 - 10))))
    point = f'{{"timeUnixNano":"{now}","asDouble":1}}'
    yield Body("points", path, JSON, json(",".join([point] * items)))
    yield Body(
        "resources", path, JSON, b'{"resourceMetrics":[' + b",".join([b"{}"] * (most // 2 - 10)) + b"]}"
    )
    empty_metric = '{"name":"vllm:a"}'
    metric_list = ",".join([empty_metric] * min(most // 2 - 10, MOST_BYTES // (len(empty_metric) + 1)))
    yield Body(
        "metrics",
        path,
        JSON,
        f'{{"resourceMetrics":[{{"scopeMetrics":[{{"metrics":[{metric_list}]}}]}}]}}'.encode(),
    )
    wide = "a" * MOST_BYTES + "\U0001f600"
    yield Body(
        "wide text", path, JSON, json(f'{{"attributes":[{{"key":"k","value":{{"stringValue":"{wide}"}}}}]}}')
    )


def _traces() -> Iterator[Body]:
    path, most, items = "/v1/traces", LIMITS.max_otlp_fields - 100, LIMITS.max_otlp_items - 100

    def protobuf(spans: bytes) -> bytes:
        return _message(1, _message(2, spans))

    yield Body("empty spans", path, PROTOBUF, protobuf(b"\x12\x00" * most))
    mark = _message(9, _text(1, "driftguard.drafted_tokens") + _message(2, b"\x18\x04"))
    ours = _message(2, _message(1, b"0" * 16) + _message(2, b"0" * 8) + mark)
    yield Body("spans", path, PROTOBUF, protobuf(ours * items))
    attributes = b"".join(
        _message(9, _text(1, f"k{number}") + _message(2, _text(1, "v"))) for number in range(most // 4)
    )
    yield Body("a span of many attributes", path, PROTOBUF, protobuf(_message(2, attributes)))
    nested = b"\x0a\x00" * (most - 10)
    yield Body(
        "an array of empty values",
        path,
        PROTOBUF,
        protobuf(_message(2, _message(9, _text(1, "k") + _message(2, _message(5, nested))))),
    )
    span = '{"traceId":"","spanId":"","startTimeUnixNano":0,"endTimeUnixNano":0}'
    many = ",".join([span] * min(most // 5, MOST_BYTES // (len(span) + 1)))
    yield Body("spans", path, JSON, f'{{"resourceSpans":[{{"scopeSpans":[{{"spans":[{many}]}}]}}]}}'.encode())
    attribute = '{"key":"k"}'
    many = ",".join([attribute] * (most // 2 - 10))
    yield Body(
        "attributes", path, JSON, f'{{"resourceSpans":[{{"resource":{{"attributes":[{many}]}}}}]}}'.encode()
    )
    many = ",".join(["{}"] * (most // 2 - 10))
    yield Body("empty groups", path, JSON, f'{{"resourceSpans":[{many}]}}'.encode())


def _records() -> Iterator[Body]:
    path, most = "/api/v1/records", MOST_BYTES
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    positions = "[" + ",".join(["1000000"] * 64) + "]"
    record = (
        '{{"record_id":"00000000-0000-4000-8000-{number:012d}","kind":"request","started_at":"'
        + now
        + '","ended_at":"'
        + now
        + '",'
        '"server":"'
        + "s" * 256
        + '","target":"'
        + "t" * 256
        + '","draft":"'
        + "d" * 256
        + '","draft_version":"'
        + "v" * 256
        + '",'
        '"method":"'
        + "m" * 256
        + '","segment":"'
        + "g" * 256
        + '","session":"'
        + "e" * 256
        + '","steps":1000000,"drafted":64000000,"accepted":64000000,'
        '"emitted":65000000,"fidelity":"request","drafted_per_position":'
        + positions
        + ',"accepted_per_position":'
        + positions
        + "}}"
    )
    lines = [record.format(number=number) for number in range(LIMITS.max_batch_records)]
    lines = lines[: most // (len(lines[0]) + 1)]
    yield Body("full records", path, LINES, "\n".join(lines).encode())
    yield Body("full records", path, JSON, f"[{','.join(lines)}]".encode())
    yield Body("empty lines", path, LINES, b"\n" * most)
    yield Body("numbers", path, JSON, b"[" + b"0," * (most // 2 - 2) + b"0]")
    yield Body("a line of arrays", path, LINES, b"[" + b"[]," * (most // 3 - 2) + b"[]]")
    long = lines[0].replace(positions, "[" + ",".join(["999"] * (most // 5)) + "]", 1)
    yield Body("a record of many positions", path, LINES, long.encode())


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def largest_bodies(seed: int, rounds: int) -> Row:
    """Sends every kind of body to a sidecar with its own database."""
    row = Row("largest bodies", f"{rounds} x {AT_ONCE} at once of each")
    with scene(seed, own_database=True) as here:
        here.send()
        for _ in range(rounds):
            for body in bodies():
                send_at_once(here.sidecar.url, body)
        return closing(here, row, SERVERS, 240.0)


def send_at_once(url: str, body: Body, at_once: int = AT_ONCE) -> list[int]:
    """The status of each answer; 0 where there was none."""
    assert len(body.content) <= LIMITS.max_batch_bytes, (body.name, len(body.content))
    packed = gzip.compress(body.content, 1)

    def send(number: int) -> int:
        headers = {"Content-Type": body.media_type}
        if number % 2:
            headers["Content-Encoding"] = "gzip"
        try:
            content = packed if number % 2 else body.content
            return httpx.post(
                f"{url}{body.path}", content=content, headers=headers, timeout=120.0
            ).status_code
        except httpx.HTTPError:
            return 0

    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(send, range(at_once)))
