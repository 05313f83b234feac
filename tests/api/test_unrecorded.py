"""POST /api/v1/unrecorded, and what the status makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from driftguard.app import Sidecar, create_app
from driftguard.records import hour_of
from driftguard.settings import Settings
from driftguard.store.database import Database
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import serving
from tests.pipeline.sidecar import post, running_sidecar
from tests.store.samples import make_records

PATH = "/api/v1/unrecorded"
HOUR = hour_of(datetime.now(UTC))


@pytest.fixture
def sidecar(database: Database, tmp_path: Path) -> Iterator[httpx.Client]:
    with running_sidecar(database, tmp_path) as client:
        yield client


def line(**fields: Any) -> dict[str, Any]:
    known = {"reporter": str(uuid4()), "server": "server-1", "hour": HOUR.isoformat()}
    return {**known, "reason": "stop_string", "requests": 1, **fields}


def send(client: httpx.Client, *items: dict[str, Any]) -> httpx.Response:
    return client.post(PATH, content="\n".join(map(json.dumps, items)))


def status(client: httpx.Client) -> Any:
    return client.get("/api/v1/status").json()


def texts(client: httpx.Client, streams: int = 1) -> list[str]:
    wait_until(lambda: len(status(client)["streams"]) == streams, "the streams")
    return [stream["text"] for stream in status(client)["streams"]]


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"reason": "bored"}, "reason", "bored"),
        ({"server": ""}, "server", ">= 1"),
        ({"server": "a\x00"}, "server", "NUL"),
        ({"server": "x" * 257}, "server", "<= 256"),
        ({"reporter": "proxy-1"}, "reporter", "UUID"),
        ({"requests": 0}, "requests", ">= 1"),
        ({"requests": "3"}, "requests", "int"),
        ({"segment": "code"}, "segment", "unknown field"),
        ({"hour": HOUR.replace(tzinfo=None).isoformat()}, "hour", "timezone"),
        ({"hour": (HOUR + timedelta(minutes=1)).isoformat()}, "hour", "beginning of an hour"),
        ({"hour": (HOUR + timedelta(hours=2)).isoformat()}, "hour", "this clock"),
        ({"hour": (HOUR - timedelta(days=3)).isoformat()}, "hour", "last two days"),
    ],
)
def test_a_bad_count_is_named_and_the_others_are_stored(
    sidecar: httpx.Client, fields: dict[str, Any], field: str, said: str
) -> None:
    answer = send(sidecar, line(), line(**fields), line())
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert (error["line"], error["field"]) == (2, field)
    assert said in error["detail"]
    assert (answer.json()["accepted"], answer.json()["duplicates"]) == (2, 0)
    assert status(sidecar)["unrecorded"][0]["unrecorded"] == 2


def test_an_hour_may_be_written_with_another_offset_only_if_it_is_utc(sidecar: httpx.Client) -> None:
    elsewhere = HOUR.astimezone(datetime.strptime("+0530", "%z").tzinfo)
    answer = send(sidecar, line(hour=elsewhere.isoformat()))
    assert answer.json()["errors"][0]["field"] == "hour"


def test_what_is_missing_and_what_is_no_json_is_named(sidecar: httpx.Client) -> None:
    answer = sidecar.post(PATH, content=b'{"server": "s"}\n{')
    assert [error["field"] for error in answer.json()["errors"]] == ["reporter", None]
    assert sidecar.post(PATH, content=b"").status_code == 400
    assert sidecar.post(PATH, content=b" " * 64_001).status_code == 413


def test_a_server_beyond_max_streams_is_refused_by_name(database: Database, tmp_path: Path) -> None:
    settings = Settings.model_validate({"data_dir": tmp_path, "ingest": {"max_streams": 1}})
    with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:
        answer = send(client, line(server="a"), line(server="b"), line(server="a"))
        (error,) = answer.json()["errors"]
        assert (error["line"], error["field"]) == (2, "server")
        assert "'b' would be one server more than ingest.max_streams (1)" in error["detail"]
        assert (answer.json()["accepted"], answer.json()["errors_total"]) == (2, 1)


def test_the_share_ends_the_sentence_of_streams_made_of_requests(sidecar: httpx.Client) -> None:
    post(sidecar, make_records(69))
    post(sidecar, make_records(5, seed=1, method="none", draft="none", draft_version="none"))
    post(sidecar, make_records(9, seed=2, target="by-counters", kind="window", fidelity="counter"))
    post(sidecar, make_records(9, seed=3, server="elsewhere"))
    assert not any("recorded" in text for text in texts(sidecar, 4))
    one = line(requests=30)
    send(sidecar, one, line(reason="several_answers", requests=2))
    assert send(sidecar, one).json() == {"accepted": 0, "duplicates": 1}
    (missing,) = status(sidecar)["unrecorded"]
    assert (missing["server"], missing["recorded"], missing["unrecorded"]) == ("server-1", 74, 32)
    assert missing["reasons"] == {"stop_string": 30, "several_answers": 2}
    assert missing["share"] == pytest.approx(32 / 106)
    told = (
        "30% of the 106 requests to server-1 in the last 24 hours were answered and not recorded, most of "
        "them (30) because they ended on a stop string, and vLLM's answers to these hold no counts. "
        "Acceptance is of the others only. Inside vLLM all are recorded (docs/vllm-plugin.md)."
    )
    assert missing["text"] == told
    found = {
        (each["server"], each["target"], each["method"]): each["text"] for each in status(sidecar)["streams"]
    }
    assert {key for key, text in found.items() if text.endswith(told)} == {
        ("server-1", "target-1", "draft_model")
    }
    assert told in httpx.get(f"{sidecar.base_url}/").text.replace("&#39;", "'")


def test_what_is_known_by_its_counters_alone_is_not_said_to_be_missing(sidecar: httpx.Client) -> None:
    post(sidecar, make_records(20, kind="window", fidelity="counter"))
    send(sidecar, line(requests=500, reason="no_numbers"))
    assert [text for text in texts(sidecar) if "recorded" in text] == []
    assert status(sidecar)["unrecorded"] == []
    assert "without any record" not in sidecar.get("/").text


def test_a_server_without_any_record_is_told_on_the_page(sidecar: httpx.Client) -> None:
    send(sidecar, line(server="<b>new</b>", requests=400, reason="no_numbers"))
    told = "All of the 400 requests to &lt;b&gt;new&lt;/b&gt; in the last 24 hours were answered and not "
    page = sidecar.get("/").text
    assert "Servers without any record of a request" in page
    assert told in page
    assert "So its acceptance is not known." in page


@pytest.mark.slow
def test_the_metric_shows_the_share_by_reason_also_after_a_restart(
    database: Database, tmp_path: Path
) -> None:
    series = 'driftguard_unrecorded_requests_ratio{reason="stop_string",server="server-1"}'

    def shown(client: httpx.Client) -> list[str]:
        return [each for each in client.get("/metrics").text.splitlines() if each.startswith(series)]

    with running_sidecar(database, tmp_path) as client:
        post(client, make_records(60))
        send(client, line(requests=20), line(requests=20))
        wait_until(lambda: shown(client) == [f"{series} 0.4"], "the gauge")
    with running_sidecar(database, tmp_path) as client:
        wait_until(lambda: shown(client) == [f"{series} 0.4"], "the gauge")
