"""The acceptance record, and what follows from its fields."""

from __future__ import annotations

from driftguard.records.acceptance_record import (
    DEFAULT_SEGMENT,
    FUTURE_TOLERANCE,
    MAX_SEGMENTS_PER_STREAM,
    OTHER_SEGMENT,
    PROBE_SEGMENT,
    AcceptanceRecord,
    AcceptanceRule,
    Fidelity,
    Instant,
    Kind,
    RecordError,
    StreamKey,
    Text,
    check_clock,
    check_record,
    check_text,
    decode_line,
    decode_record,
    encode_record,
    readable_error,
)
from driftguard.records.record_ids import new_record_id

__all__ = [
    "DEFAULT_SEGMENT",
    "FUTURE_TOLERANCE",
    "MAX_SEGMENTS_PER_STREAM",
    "OTHER_SEGMENT",
    "PROBE_SEGMENT",
    "AcceptanceRecord",
    "AcceptanceRule",
    "Fidelity",
    "Instant",
    "Kind",
    "RecordError",
    "StreamKey",
    "Text",
    "check_clock",
    "check_record",
    "check_text",
    "decode_line",
    "decode_record",
    "encode_record",
    "new_record_id",
    "readable_error",
]
