"""POST and GET /api/v1/captures."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from driftguard.api import captures
from driftguard.settings import CaptureSettings, Settings
from driftguard.store import captures as store
from tests.api.ingest_server import serving
from tests.benchmarks.ingest_app import ingest_app

PATH = "/api/v1/captures"


def line(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "record_id": f"00000000-0000-0000-0000-{number:012}",
        "server": "server-1",
        "target": "target-1",
        "draft_version": "v1",
        "segment": "code",
        "captured_at": datetime.now(UTC).isoformat(),
        "prompt_token_ids": [1, 2, 3],
        "output_token_ids": [number],
        **fields,
    }


def body(*items: dict[str, Any]) -> bytes:
    return "\n".join(json.dumps(item) for item in items).encode()


def test_capture_is_off_unless_it_is_switched_on(module_database_url: str) -> None:
    with serving(ingest_app(Settings(), module_database_url)) as client:
        answer = client.post(PATH, content=body(line(1)))
        assert answer.status_code == 403
        assert "capture.enabled" in answer.json()["detail"]
        assert client.get(PATH).content == b""


def test_what_is_posted_is_exported_within_the_bounds(database_url: str) -> None:
    settings = Settings(capture=CaptureSettings(enabled=True, max_requests_per_segment=3))
    with serving(ingest_app(settings, database_url)) as client:
        sent = [line(number, segment="chat" if number == 9 else "code") for number in (1, 2, 3, 4, 9)]
        assert client.post(PATH, content=body(*sent)).json() == {"accepted": 5, "duplicates": 0}
        assert client.post(PATH, content=body(sent[4])).json() == {"accepted": 0, "duplicates": 1}
        exported = [json.loads(text) for text in client.get(PATH).text.splitlines()]
        assert [item["output_token_ids"] for item in exported] == [[2], [3], [4], [9]]
        assert set(exported[0]) == set(sent[0])
        chosen = client.get(PATH, params={"segment": "chat", "server": "server-1"}).text.splitlines()
        assert [json.loads(text)["output_token_ids"] for text in chosen] == [[9]]
        bad_query = client.get(PATH, params={"since": "yesterday"})
        assert bad_query.status_code == 422
        assert bad_query.json()["errors"][0]["field"] == "since"


def test_requests_of_all_lengths_are_exported_page_by_page(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few at a time where they are long."""
    limits: list[int] = []
    read = store.read_captures

    def noted(*given: Any, limit: int, **more: Any) -> Any:
        limits.append(limit)
        return read(*given, limit=limit, **more)

    monkeypatch.setattr("driftguard.api.captures.read_captures", noted)
    monkeypatch.setattr(captures, "_FIRST_PAGE", 2)
    monkeypatch.setattr(captures, "_PAGE_TOKENS", 50)
    with serving(ingest_app(Settings(capture=CaptureSettings(enabled=True)), database_url)) as client:
        sent = [line(number, prompt_token_ids=[1] * (100 if number > 20 else 1)) for number in range(1, 41)]
        assert client.post(PATH, content=body(*sent)).json()["accepted"] == 40
        exported = [json.loads(text)["output_token_ids"] for text in client.get(PATH).text.splitlines()]
    assert exported == [[number] for number in range(1, 41)]
    assert (limits[:4], set(limits[4:])) == ([2, 4, 8, 16], {1})


@pytest.fixture(scope="module")
def capturing(module_database_url: str) -> Any:
    with serving(ingest_app(Settings(capture=CaptureSettings(enabled=True)), module_database_url)) as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids"),
        ({"output_token_ids": [2**31]}, "output_token_ids"),
        ({"prompt_token_ids": "text"}, "prompt_token_ids"),
        ({"prompt": "text"}, "prompt"),
        ({"segment": "a\x00"}, "segment"),
        (dict.fromkeys(("server", "target", "segment"), "\N{TURTLE}" * 256), "server"),
        ({"captured_at": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}, "captured_at"),
        ({"captured_at": (datetime.now(UTC) - timedelta(days=8)).isoformat()}, "captured_at"),
    ],
)
def test_bad_captures_are_named(capturing: Any, fields: dict[str, Any], field: str) -> None:
    answer = capturing.post(PATH, content=body(line(1, **fields)))
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert error["line"] == 1
    assert error["field"].startswith(field)
