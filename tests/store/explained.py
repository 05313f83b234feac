"""What the database reads for a statement, which is no matter of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import event

from driftguard.store.database import Database


def pages_read(database: Database, ask: Callable[[], object]) -> int:
    """By the statement of `ask` that reads most."""
    asked: list[Any] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        asked.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        ask()
    finally:
        event.remove(database.engine, "before_cursor_execute", note)
    with database.engine.connect() as connection:
        return max(_pages(connection, *one) for one in asked)


def _pages(connection: Any, statement: str, parameters: Any) -> int:
    explained = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"
    (plan,) = connection.exec_driver_sql(explained, parameters).scalar_one()
    return int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])
