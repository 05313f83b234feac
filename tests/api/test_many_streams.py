"""How many statements a page, an API call and a look take: as many for a large fleet as for a small one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from sqlalchemy import event

from driftguard.app import Sidecar, create_app
from driftguard.metrics import Metrics
from driftguard.pipeline.look_around import LookAround
from driftguard.settings import Settings
from driftguard.store.database import Database
from tests.many_streams import populate


@contextmanager
def statements(database: Database) -> Iterator[list[str]]:
    seen: list[str] = []

    def note(_c: Any, _cursor: Any, statement: str, _p: Any, _context: Any, _many: bool) -> None:
        seen.append(statement)

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(database.engine, "before_cursor_execute", note)


def counted(database: Database, data_dir: Path) -> dict[str, int]:
    """The sidecar is not started: nothing but what is asked for speaks to the database."""
    app = create_app(Sidecar(Settings(data_dir=data_dir), database, "http://sidecar"))
    client = TestClient(app, "http://127.0.0.1")
    counts: dict[str, int] = {}
    for path in ("/", "/api/v1/status"):
        with statements(database) as seen:
            answer = client.get(path)
        assert answer.status_code == 200, answer.text
        counts[path] = len(seen)
    verdicts = Counter(item["verdict"] for item in answer.json()["streams"])
    assert verdicts["stale"] == sum(verdicts.values()) // 2
    with statements(database) as seen:
        client.get("/")
    assert len(seen) == counts["/"] - 1  # the usual silence of each is known by now
    with statements(database) as seen:
        LookAround(database, Metrics()).look(datetime.now(UTC))
    return {**counts, "look": len(seen)}


def test_four_times_the_streams_half_of_them_silent_take_no_statement_more(
    database: Database, tmp_path: Path
) -> None:
    populate(database, 30, minutes_apart=5)
    small = counted(database, tmp_path)
    populate(database, 120, minutes_apart=5)
    assert counted(database, tmp_path) == small
    assert max(small.values()) < 40
