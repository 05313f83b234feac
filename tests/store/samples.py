"""Records as a server would send them, from a seed."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from driftguard.records import AcceptanceRecord


def make_records(count: int, *, seed: int = 0, segments: int = 4, **fixed: object) -> list[AcceptanceRecord]:
    """`count` records of the last minute; `fixed` overrides fields."""
    source = random.Random(seed)
    now = datetime.now(UTC)
    return [_record(source, now, segments, fixed) for _ in range(count)]


def _record(source: random.Random, now: datetime, segments: int, fixed: dict[str, Any]) -> AcceptanceRecord:
    steps = source.randint(1, 60)
    accepted = sorted((source.randint(0, steps) for _ in range(4)), reverse=True)
    ended_at = fixed.get("ended_at", now - timedelta(seconds=source.random() * 60))
    values: dict[str, Any] = {
        "record_id": UUID(int=source.getrandbits(128), version=4),
        "kind": "request",
        "started_at": ended_at - timedelta(seconds=2),
        "ended_at": ended_at,
        "server": "server-1",
        "target": "target-1",
        "draft": "draft-1",
        "draft_version": "v1",
        "method": "draft_model",
        "segment": f"segment-{source.randrange(segments)}",
        "session": f"session-{source.randrange(1_000)}",
        "steps": steps,
        "drafted": 4 * steps,
        "accepted": sum(accepted),
        "emitted": sum(accepted) + steps,
        "drafted_per_position": [steps] * 4,
        "accepted_per_position": accepted,
        "num_speculative_tokens": 4,
        "acceptance_rule": "rejection",
        "verification": "block",
        "temperature": 0.7,
        "prompt_tokens": source.randint(10, 500),
        "cached_tokens": 10,
        "waiting_requests": 2,
        "output_tokens": sum(accepted) + steps,
        "time_to_first_token_seconds": 0.05 + source.random() / 10,
        "time_per_output_token_seconds": 0.01 + source.random() / 50,
        "concurrency": source.randint(1, 8),
        "fidelity": "request",
    }
    if fixed.get("kind") == "window":
        values["started_requests"] = 3
    return AcceptanceRecord(**{**values, **fixed})
