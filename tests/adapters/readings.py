"""Readings and windows of texts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from driftguard.adapters.adapter import Kind
from driftguard.adapters.kinds import ADAPTERS
from driftguard.adapters.reading import Reading
from driftguard.adapters.window import Identity, Window

BEFORE = datetime(2026, 6, 15, 12, 0, tzinfo=UTC)
AFTER = BEFORE + timedelta(seconds=15)


def windows(kind: Kind, before: str, after: str, k: int | None = None, at: datetime = AFTER) -> list[Window]:
    """The windows between two readings, the second of which is `at`; `k`: K in the settings."""
    adapter = ADAPTERS[kind]
    first, second = (Reading.parse(text, adapter.names, at) for text, at in ((before, BEFORE), (after, at)))
    return list(adapter.windows(first, second, Identity("server", num_speculative_tokens=k)))


def window(kind: Kind, before: str, after: str, k: int | None = None, at: datetime = AFTER) -> Window:
    (found,) = windows(kind, before, after, k, at)
    return found
