"""What the database reads for a statement, which is no matter of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import event

from driftguard.store.database import Database


def pages_read(database: Database, ask: Callable[[], object]) -> int:
    """By the statement of `ask` that reads most."""
    return max(int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]) for plan in _plans(database, ask))


def pages_spilled(database: Database, ask: Callable[[], object]) -> int:
    """To temporary files, as where more is sorted than memory holds, by the statement that writes most."""
    return max(int(plan["Temp Written Blocks"]) for plan in _plans(database, ask))


def _plans(database: Database, ask: Callable[[], object]) -> list[dict[str, Any]]:
    """As each statement was carried out, done again."""
    asked: list[Any] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        asked.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        ask()
    finally:
        event.remove(database.engine, "before_cursor_execute", note)
    with database.engine.connect() as connection:
        return [_plan(connection, *one) for one in asked]


def _plan(connection: Any, statement: str, parameters: Any) -> dict[str, Any]:
    explained = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"
    (plan,) = connection.exec_driver_sql(explained, parameters).scalar_one()
    found: dict[str, Any] = plan["Plan"]
    return found
