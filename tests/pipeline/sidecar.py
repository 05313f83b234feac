"""A whole sidecar on a test's database, served over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from driftguard.app import Sidecar, create_app
from driftguard.records import AcceptanceRecord, encode_record
from driftguard.settings import Settings
from driftguard.store.database import Database
from tests.api.ingest_server import serving


@contextmanager
def running_sidecar(
    database: Database,
    data_dir: Path,
    webhook_urls: Sequence[str] = (),
    host: str = "127.0.0.1",
    *,
    page_slowdown: float = 0.02,
    engines: Sequence[Mapping[str, Any]] = (),
) -> Iterator[httpx.Client]:
    settings = Settings.model_validate(
        {
            "data_dir": data_dir,
            "host": host,  # what the sidecar takes itself to be bound to; it is served on loopback
            "alerting": {"webhook_urls": list(webhook_urls), "page_slowdown": page_slowdown},
            "detection": {"minimum_drop": 0.1, "false_alarm_days": 0.1},
            "engines": [dict(engine) for engine in engines],
        }
    )
    with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:
        yield client


def post(client: httpx.Client, records: Sequence[AcceptanceRecord]) -> None:
    answer = client.post("/api/v1/records", content=b"\n".join(map(encode_record, records)))
    assert answer.status_code == 200, answer.text
    assert answer.json()["accepted"] == len(records)
