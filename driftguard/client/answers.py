"""The sidecar's answers, with the fields that a client needs; other fields are ignored.

docs/openapi.json says what each field means.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec


class BatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one batch: accepted records are new, duplicates were stored before."""

    accepted: int
    duplicates: int


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance rate with its 95% interval."""

    rate: float
    low: float
    high: float
    requests: int
    positions: str = "all"  # draft positions: all, first or both


class NowAndBaseline(msgspec.Struct, frozen=True, kw_only=True):
    now: Rate | None
    baseline: Rate | None


class TokensPerSecond(msgspec.Struct, frozen=True, kw_only=True):
    now: float | None
    baseline: float | None
    cost_percent: float | None


class SegmentStatus(msgspec.Struct, frozen=True, kw_only=True):
    segment: str
    verdict: str
    requests: int
    requests_needed: int
    now: Rate | None
    baseline: Rate | None
    learning: str | None


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    server: str
    target: str
    draft: str
    draft_version: str
    method: str


class StreamStatus(StreamInfo, frozen=True, kw_only=True):
    verdict: str
    text: str
    since: datetime | None
    in_service: bool
    draft_in_service: str
    acceptance: NowAndBaseline
    tokens_per_second: TokensPerSecond
    sample_size: int
    requests_missing: int
    incident_id: UUID | None
    segments: list[SegmentStatus]
    requests_per_day: float | None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    generated_at: datetime
    unfolded_records: int
    streams: list[StreamStatus]
    streams_left_out: int = 0  # beyond the 500 that are worst


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    cause: str
    confidence: str
    summary: str
    reason: str
    recommended_action: str
    retrain: bool


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    stream: StreamInfo
    state: str
    direction: str
    severity: str
    summary: str
    opened_at: datetime
    since: datetime
    since_interval: tuple[datetime, datetime]
    acceptance_before: float
    acceptance_after: float
    positions: str = "all"  # of both acceptances, as in Rate
    cost_percent: float | None
    segments: list[dict[str, Any]]
    diagnosis: Diagnosis | None
    resolved_at: datetime | None
    resolution: str | None


class IncidentPage(msgspec.Struct, frozen=True, kw_only=True):
    incidents: list[Incident]
    next_cursor: str | None


for _kind in (BatchCounts, Status, Incident, IncidentPage):
    # msgspec (0.22) would do this at the first answer, and crash where two threads read at once.
    msgspec.json.Decoder(_kind)
