"""GET /api/v1/records and /api/v1/rollups over real HTTP: pages, filters, and exports that come back."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pyarrow.parquet as pq
import pytest

from driftguard.api import exports, list_records
from driftguard.cli.replay import run_replay
from driftguard.records import AcceptanceRecord, encode_record
from driftguard.store.database import Database
from tests.conftest import fresh_database
from tests.pipeline.sidecar import post, running_sidecar
from tests.store.samples import make_records

NOW = datetime.now(UTC)
EARLY = make_records(40, seed=1, server="chat-1", ended_at=NOW - timedelta(minutes=30))
LATE = [
    *make_records(40, seed=2, server="chat-2", segments=2),
    *make_records(3, seed=3, kind="probe", server="chat-2", session=None, temperature=None),
    *make_records(2, seed=4, segment='a "quoted", label\nof two lines', server="chat-2"),
]
SENT = [*EARLY, *LATE]


@pytest.fixture(scope="module")
def client(module_database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A sidecar that has SENT, and pages of seven rows in its exports."""
    database = Database.open(module_database_url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(list_records, "EXPORT_ROWS", 7)
        with running_sidecar(database, tmp_path_factory.mktemp("data")) as client:
            post(client, SENT)
            yield client
    database.close()


def exported(client: httpx.Client, what: str = "records", **query: Any) -> list[dict[str, Any]]:
    answer = client.get(f"/api/v1/{what}", params={"format": "jsonl", **query})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.content.splitlines()]


def as_json(sent: list[AcceptanceRecord]) -> list[dict[str, Any]]:
    return [json.loads(encode_record(record)) for record in sent]


def test_json_lines_are_what_was_sent_in_the_order_of_arrival(client: httpx.Client) -> None:
    answer = client.get("/api/v1/records?format=jsonl")
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert 'filename="records.jsonl"' in answer.headers["content-disposition"]
    assert answer.content.splitlines() == [encode_record(record) for record in SENT]


def test_an_export_can_be_replayed_and_taken_in_again(
    client: httpx.Client, postgres_server: str, template_database: str, tmp_path: Path
) -> None:
    file = tmp_path / "records.jsonl"
    file.write_bytes(client.get("/api/v1/records?format=jsonl").content)
    out, err = io.StringIO(), io.StringIO()
    assert run_replay([file], json=False, false_alarm_every=1e5, minimum_drop=0.1, out=out, err=err) == 0
    assert out.getvalue().startswith(f"{len(SENT)} records, 3 of them probes, 2 streams")
    assert client.post("/api/v1/records", content=file.read_bytes()).json() == {
        "accepted": 0,
        "duplicates": len(SENT),
    }
    with contextmanager(fresh_database)(postgres_server, template_database) as url:
        other = Database.open(url)
        with running_sidecar(other, tmp_path) as second:
            answer = second.post("/api/v1/records", content=file.read_bytes())
            assert answer.json() == {"accepted": len(SENT), "duplicates": 0}
            assert second.get("/api/v1/records?format=jsonl").content == file.read_bytes()
        other.close()


def test_csv_says_the_same(client: httpx.Client) -> None:
    answer = client.get("/api/v1/records?format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert list(rows[0]) == list(AcceptanceRecord.__struct_fields__)
    read = [{name: cell for name, cell in row.items() if cell} for row in rows]
    lists = ("drafted_per_position", "accepted_per_position")
    texts = [
        {
            name: json.dumps(value) if name in lists else str(value)
            for name, value in row.items()
            if value is not None
        }
        for row in as_json(SENT)
    ]
    assert read == texts


def test_parquet_says_the_same_in_columns_of_their_types(client: httpx.Client) -> None:
    answer = client.get("/api/v1/records?format=parquet")
    by_header = client.get("/api/v1/records", headers={"Accept": answer.headers["content-type"]})
    for each in (answer, by_header):
        assert "content-encoding" not in each.headers  # it is compressed already
    assert by_header.content == answer.content
    table = pq.read_table(io.BytesIO(answer.content))
    read = [
        msgspec.convert({**row, "record_id": str(row["record_id"])}, AcceptanceRecord)
        for row in table.to_pylist()
    ]
    assert read == SENT
    types = {field.name: str(field.type) for field in table.schema}
    assert (types["ended_at"], types["drafted"], types["temperature"]) == (
        "timestamp[us, tz=UTC]",
        "int64",
        "double",
    )
    assert types["accepted_per_position"] == "list<element: int64>"


def test_an_export_of_nothing_is_a_file_of_its_kind(client: httpx.Client) -> None:
    none = {"segment": "there-is-none"}
    assert exported(client, **none) == []
    text = client.get("/api/v1/records", params={"format": "csv", **none}).text
    assert text == ",".join(AcceptanceRecord.__struct_fields__) + "\r\n"
    file = client.get("/api/v1/records", params={"format": "parquet", **none}).content
    assert pq.read_table(io.BytesIO(file)).num_rows == 0


@pytest.mark.parametrize(
    ("media_type", "answered"),
    [
        ("text/csv", "text/csv; charset=utf-8"),
        ("text/html, application/x-ndjson;q=0.9", "application/x-ndjson"),
        ("*/*", "application/json"),
    ],
)
def test_the_accept_header_chooses_where_the_query_does_not(
    client: httpx.Client, media_type: str, answered: str
) -> None:
    headers = {"Accept": media_type}
    assert client.get("/api/v1/rollups", headers=headers).headers["content-type"] == answered
    as_lines = client.get("/api/v1/rollups?format=jsonl", headers=headers)
    assert as_lines.headers["content-type"] == "application/x-ndjson"


def test_without_pyarrow_the_answer_names_the_extra(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "find_spec", lambda name: None)
    answer = client.get("/api/v1/records?format=parquet")
    assert answer.status_code == 501
    assert "pip install 'driftguard-llm[parquet]'" in answer.json()["detail"]


def test_filters_choose_by_stream_segment_kind_and_time(client: httpx.Client) -> None:
    streams = {stream["server"]: stream["id"] for stream in client.get("/api/v1/status").json()["streams"]}
    soon = (NOW - timedelta(minutes=10)).isoformat()
    wanted: list[tuple[dict[str, Any], list[AcceptanceRecord]]] = [
        ({"stream": streams["chat-1"]}, EARLY),
        ({"stream": list(streams.values())}, SENT),
        ({"server": "chat-2"}, LATE),
        ({"target": "another"}, []),
        ({"segment": "segment-1"}, [record for record in SENT if record.segment == "segment-1"]),
        (
            {"segment": ["segment-0", "segment-3"], "server": "chat-1"},
            [record for record in EARLY if record.segment in ("segment-0", "segment-3")],
        ),
        ({"kind": "probe"}, [record for record in SENT if record.kind == "probe"]),
        ({"since": soon}, LATE),
        ({"until": soon}, EARLY),
        ({"since": soon, "until": (NOW + timedelta(hours=1)).isoformat(), "kind": "window"}, []),
    ]
    for query, chosen in wanted:
        assert exported(client, **query) == as_json(chosen), query


@pytest.mark.parametrize("what", ["records", "rollups"])
def test_pages_follow_each_other_and_hold_what_the_export_holds(client: httpx.Client, what: str) -> None:
    seen: list[dict[str, Any]] = []
    query: dict[str, Any] = {"limit": 6, "kind": "request"}
    while True:
        page = client.get(f"/api/v1/{what}", params=query).json()
        assert len(page[what]) <= 6
        seen += page[what]
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    assert len(seen) > 6
    assert seen == exported(client, what, kind="request")


def test_rollups_add_up_to_the_records(client: httpx.Client) -> None:
    rollups = exported(client, "rollups")
    for name in ("drafted", "accepted", "emitted", "steps"):
        assert sum(row[name] for row in rollups) == sum(getattr(record, name) for record in SENT)
    per_segment: Counter[str] = Counter()
    for row in rollups:
        per_segment[row["segment"]] += row["records"]
    assert per_segment == Counter(record.segment for record in SENT)
    assert all(sum(row["acceptance_buckets"]) == row["records"] for row in rollups)


@pytest.mark.parametrize(("resolution", "width"), [("minute", 60), ("hour", 3_600), ("day", 86_400)])
def test_each_resolution_sums_all_records(client: httpx.Client, resolution: str, width: int) -> None:
    rows = exported(client, "rollups", resolution=resolution)
    began = [datetime.fromisoformat(row["minute"]).timestamp() for row in rows]
    assert {moment % width for moment in began} == {0}
    assert Counter(row["segment"] for row in rows for _ in range(row["records"])) == Counter(
        record.segment for record in SENT
    )
    page = client.get("/api/v1/rollups", params={"resolution": resolution, "limit": 500}).json()
    assert page["rollups"] == rows
    assert page["resolution"] == resolution


def test_a_page_of_rollups_says_since_when_its_resolution_is_kept(client: httpx.Client) -> None:
    pages = [client.get(f"/api/v1/rollups?resolution={name}").json() for name in ("minute", "hour", "day")]
    ages = [datetime.now(UTC) - datetime.fromisoformat(page["kept_since"]) for page in pages]
    assert [age.days for age in ages] == [35, 400, 1_830]
    assert client.get("/api/v1/rollups").json()["kept_since"] == pages[0]["kept_since"]


def test_records_have_no_resolution(client: httpx.Client) -> None:
    assert set(client.get("/api/v1/records").json()) == {"records", "next_cursor"}
    assert client.get("/api/v1/records?resolution=hour").status_code == 422
    assert client.get("/api/v1/rollups?resolution=week").status_code == 422


LISTS = ["incidents", "drafts", "retrain-runs", "records", "rollups", "captures"]


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("since=yesterday", "since"),
        ("since=2026-11-01T00:00:00", "since"),
        ("since=2026-11-02T00:00:00Z&until=2026-11-01T00:00:00Z", "until"),
        ("server=", "server"),
        ("server=a%00b", "server"),
        (f"target={'x' * 257}", "target"),
        ("sgement=code", "sgement"),
        ("since=7200", "since"),
        ("server=a&server=b", "server"),
    ],
)
def test_a_bad_filter_is_refused_by_name(client: httpx.Client, path: str, query: str, name: str) -> None:
    refuses(client, path, query, name)


@pytest.mark.parametrize("path", LISTS[:-1])
@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("limit=0", "limit"),
        ("limit=501", "limit"),
        ("cursor=nonsense", "cursor"),
        ("cursor=WyIyMDI2LTAxLTAxIl0", "cursor"),  # ["2026-01-01"]
        ("cursor=W1tbW1tb", "cursor"),
    ],
)
def test_a_bad_page_is_refused_by_name(client: httpx.Client, path: str, query: str, name: str) -> None:
    refuses(client, path, query, name)


@pytest.mark.parametrize(
    ("path", "query", "name"),
    [
        ("records", "kind=guess", "kind.0"),
        ("records", "format=xml", "format"),
        ("records", "format=csv&limit=5", "limit"),
        ("rollups", "format=jsonl&cursor=WzFd", "cursor"),
        ("records", f"cursor={'WzkyMjMzNzIwMzY4NTQ3NzU4MDhd'}", "cursor"),  # [2**63]
        ("incidents", "stream=0", "stream.0"),
        ("rollups", f"stream={2**63}", "stream.0"),
        ("incidents", "segment=", "segment.0"),
        ("incidents", "state=closed", "state"),
        ("drafts", "state=open", "state"),
        ("retrain-runs", "state=open", "state"),
        ("captures", "limit=5", "limit"),
    ],
)
def test_what_only_one_list_has_is_refused_by_name(
    client: httpx.Client, path: str, query: str, name: str
) -> None:
    refuses(client, path, query, name)


def test_the_methods_of_a_path_are_told(client: httpx.Client) -> None:
    answer = client.delete("/api/v1/records")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")


def refuses(client: httpx.Client, path: str, query: str, name: str) -> None:
    answer = client.get(f"/api/v1/{path}?{query}")
    problem = answer.json()
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert name in [problem.get("field"), *(error["field"] for error in problem.get("errors", []))]
    assert name.partition(".")[0] in problem["detail"]
