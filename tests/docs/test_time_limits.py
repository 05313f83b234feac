"""docs/production.md tells the time limits that hold."""

from __future__ import annotations

import re
from pathlib import Path

from driftguard.store import database
from driftguard.store.database import Work

PRODUCTION = Path(__file__).parents[2] / "docs" / "production.md"


def test_the_table_of_time_limits_is_what_holds() -> None:
    kinds = [kind for kind in vars(database).values() if isinstance(kind, Work) and kind.statement_seconds]
    told = re.findall(
        r"^\| (\w+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", PRODUCTION.read_text(), re.MULTILINE
    )
    limits = [
        (kind.name, kind.statement_seconds, kind.lock_seconds, kind.idle_seconds, kind.silence_seconds)
        for kind in kinds
    ]
    assert told == [
        tuple(f"{limit}" if isinstance(limit, str) else f"{limit:g}" for limit in row) for row in limits
    ]
