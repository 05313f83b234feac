"""The interchange format: what is accepted, and that each refusal names the field and the line."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from driftguard.records import (
    RecordError,
    check_clock,
    check_record,
    decode_record,
    encode_record,
)

VALID: dict[str, Any] = {
    "record_id": "7b0c4d1e-6a3f-4f0e-9d59-0d5f2f6f8b11",
    "kind": "request",
    "started_at": "2026-11-01T10:00:00Z",
    "ended_at": "2026-11-01T10:00:02.5+00:00",
    "server": "gpu-1",
    "target": "org/model",
    "draft": "draft",
    "draft_version": "v1",
    "method": "draft_model",
    "steps": 10,
    "drafted": 40,
    "accepted": 30,
    "emitted": 40,
    "fidelity": "request",
}


def text(**changes: Any) -> str:
    return json.dumps({key: value for key, value in {**VALID, **changes}.items() if value is not ...})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"steps": -1}, "steps"),
        ({"drafted": 2**40 + 1}, "drafted"),
        ({"target": "m" * 257}, "target"),
        ({"server": ""}, "server"),
        ({"time_to_first_token_seconds": -0.005}, "time_to_first_token_seconds"),
        ({"time_to_first_token_seconds": float("nan")}, "time_to_first_token_seconds"),
        ({"temperature": float("inf")}, "temperature"),
        ({"num_speculative_tokens": 1_025}, "num_speculative_tokens"),
        ({"ended_at": datetime(2026, 11, 1, 10, 0, 3)}, "ended_at"),
        ({"accepted": 41}, "accepted"),
    ],
    ids=str,
)
def test_a_record_made_in_python_is_refused_for_what_no_line_may_hold(
    changes: dict[str, Any], field: str
) -> None:
    good = decode_record(text())
    check_record(good)
    with pytest.raises(RecordError) as refusal:
        check_record(structs.replace(good, **changes))
    assert refusal.value.field == field


def test_a_minimal_record_has_null_for_what_was_not_given() -> None:
    record = decode_record(text())
    assert record.record_id == UUID(VALID["record_id"])
    assert record.segment == "default"
    assert record.acceptance_rule == record.verification == "unknown"
    assert record.session is None
    assert record.temperature is None
    assert record.ended_at == datetime(2026, 11, 1, 10, 0, 2, 500_000, tzinfo=UTC)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"accepted": 41}, "accepted", "41 is more than drafted (40)"),
        ({"emitted": 41}, "emitted", "more than accepted + steps (40)"),
        ({"steps": -1}, "steps", ">= 0"),
        ({"started_requests": 3}, "started_requests", "is of windows only, and this is a request"),
        ({"drafted": "40"}, "drafted", "int"),
        ({"drafted": 40.5}, "drafted", "int"),
        ({"drafted": True}, "drafted", "int"),
        ({"steps": ...}, "steps", "missing"),
        ({"acceptance_rate": 0.5}, "acceptance_rate", "unknown field"),
        ({"kind": "batch"}, "kind", "enum"),
        ({"started_at": "2026-11-01T10:00:03Z"}, "ended_at", "before started_at"),
        ({"started_at": "2026-11-01T10:00:00"}, "started_at", "timezone"),
        ({"started_at": "yesterday"}, "started_at", "invalid"),
        ({"record_id": "7"}, "record_id", "uuid"),
        ({"server": ""}, "server", "length >= 1"),
        ({"segment": "x" * 300}, "segment", "length <= 256"),
        ({"session": "a\0b"}, "session", "NUL"),
        ({"temperature": -0.1}, "temperature", ">= 0"),
        ({"time_per_output_token_seconds": 1e308}, "time_per_output_token_seconds", "<= 1"),
        ({"prompt_tokens": 8, "cached_tokens": 9}, "cached_tokens", "9 is more than prompt_tokens (8)"),
        ({"cached_tokens": -1}, "cached_tokens", ">= 0"),
        ({"drafted_per_position": [40, 40]}, "drafted_per_position", "more than drafted"),
        (
            {"accepted_per_position": [11, 0], "drafted_per_position": [10, 10]},
            "accepted_per_position",
            "11 of 10",
        ),
        (
            {"accepted_per_position": [9], "drafted_per_position": [10, 10]},
            "accepted_per_position",
            "must agree",
        ),
        ({"accepted_per_position": [11]}, "accepted_per_position", "11 of 10"),
    ],
)
def test_a_refusal_names_the_field_and_the_line(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RecordError) as refusal:
        decode_record(text(**changes), line=7)
    assert refusal.value.field == field
    assert refusal.value.line == 7
    assert words.lower() in str(refusal.value).lower()


@pytest.mark.parametrize("value", ["NaN", "1e999", "Infinity"])
def test_numbers_that_are_not_finite_are_refused(value: str) -> None:
    with pytest.raises(RecordError):
        decode_record(text(temperature=0.123).replace("0.123", value))


def test_a_clock_that_runs_ahead_is_refused_beyond_the_tolerance() -> None:
    record = decode_record(text())
    check_clock(record, record.ended_at - timedelta(seconds=59))
    with pytest.raises(RecordError, match="future"):
        check_clock(record, record.ended_at - timedelta(seconds=61))


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists),
    st.sampled_from(sorted(VALID)),
)
def test_any_value_in_any_field_is_a_record_or_a_record_error(value: Any, field: str) -> None:
    given = json.dumps({**VALID, field: value})
    try:
        record = decode_record(given, line=1)
    except RecordError:
        with pytest.raises(RecordError, match=r"^line 1: "):
            decode_record(given, line=1)
    else:
        assert decode_record(encode_record(record)) == record
