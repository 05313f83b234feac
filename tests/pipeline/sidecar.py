"""A whole sidecar on a test's database, served over real HTTP."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import structlog

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
    with logs_apart(), serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:
        yield client


@contextmanager
def logs_apart() -> Iterator[None]:
    """Inside, nothing is logged to `sys.stdout`, where a command that is run beside a sidecar of this process
    prints: its output would be mixed with the lines of the sidecar's threads."""
    before = structlog.get_config()["logger_factory"]
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(sys.__stdout__))
    try:
        yield
    finally:
        structlog.configure(logger_factory=before)


def post(client: httpx.Client, records: Sequence[AcceptanceRecord]) -> None:
    answer = client.post("/api/v1/records", content=b"\n".join(map(encode_record, records)))
    assert answer.status_code == 200, answer.text
    assert answer.json()["accepted"] == len(records)
