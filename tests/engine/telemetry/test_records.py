"""A finished request becomes exactly this record."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from uuid import UUID

from driftguard_engine.core import DraftInfo
from driftguard_engine.telemetry.telemetry import is_sampled, record_of

from driftguard.records import AcceptanceRecord, check_record, decode_record, encode_record
from tests.engine.telemetry.finished import STARTED, finished_request

ID = UUID(int=1)


def test_every_field_of_a_record() -> None:
    record = record_of(finished_request(1), ID, "engine-1", "big")
    check_record(record)
    assert decode_record(encode_record(record)) == record
    assert record == AcceptanceRecord(
        record_id=ID,
        kind="request",
        started_at=STARTED,
        ended_at=STARTED + timedelta(seconds=2),
        server="engine-1",
        target="big",
        draft="small",
        draft_version="abc123",
        method="draft_model",
        segment="segment-1",
        session="session",
        steps=2,
        drafted=5,
        accepted=3,
        emitted=5,
        drafted_per_position=[2, 2, 1],
        accepted_per_position=[2, 1, 0],
        num_speculative_tokens=3,
        acceptance_rule="rejection",
        verification="token",
        temperature=1.0,
        prompt_tokens=3,
        cached_tokens=0,
        output_tokens=5,
        time_to_first_token_seconds=0.5,
        time_per_output_token_seconds=0.25,
        concurrency=4,
        fidelity="request",
    )


def test_temperature_zero_is_the_greedy_rule() -> None:
    greedy = record_of(replace(finished_request(1, temperature=0.0), verification="block"), ID, "s", "t")
    assert (greedy.acceptance_rule, greedy.verification) == ("greedy", "greedy")


def test_the_block_rule_is_told() -> None:
    record = record_of(replace(finished_request(1), verification="block"), ID, "s", "t")
    assert (record.acceptance_rule, record.verification) == ("rejection", "block")


def test_without_speculation_the_stream_is_none() -> None:
    off = [
        finished_request(1, num_speculative_tokens=0),
        finished_request(1, draft=DraftInfo("none", "none", "none")),
    ]
    for finished in off:
        record = record_of(finished, ID, "s", "t")
        assert (record.draft, record.draft_version, record.method) == ("none", "none", "none")


def test_sampling_takes_the_asked_part_and_never_changes_its_mind() -> None:
    ids = [f"cmpl-{number}" for number in range(4000)]
    chosen = [one for one in ids if is_sampled(one, 0.25)]
    assert 900 < len(chosen) < 1100
    assert set(chosen) <= {one for one in ids if is_sampled(one, 0.5)}
    assert [one for one in ids if is_sampled(one, 0.25)] == chosen
    assert all(is_sampled(one, 1.0) for one in ids)
    assert not any(is_sampled(one, 0.0) for one in ids)


def test_unknown_times_stay_null() -> None:
    record = record_of(replace(finished_request(1), time_to_first_token_seconds=None), ID, "s", "t")
    assert record.time_to_first_token_seconds is None
