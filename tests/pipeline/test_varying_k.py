"""Records without K, on a real database: judged by their first position, and what is told says so."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from msgspec.structs import replace

from driftguard.detection import ObservationBatch
from driftguard.incidents.cost_measurement import slower_at_least
from driftguard.pipeline.batch_fold import _observations
from driftguard.store.database import Database
from driftguard.store.examination_evidence import timed_between
from driftguard.store.folding import read_after
from driftguard.store.records import insert_batches
from driftguard.store.streams import StreamRegistry
from tests.alerting.http_receiver import wait_until
from tests.cost.traffic import Server
from tests.detection.varying_k import at_k, ending_now, following
from tests.pipeline.sidecar import post, running_sidecar

CASES: tuple[dict[str, Any], ...] = (
    {},
    {"kind": "window"},
    {"kind": "window", "drafted_per_position": None},
    {"num_speculative_tokens": 4},
    {"num_speculative_tokens": 0},
    {"drafted_per_position": None},
    {"accepted_per_position": None},
    {"drafted_per_position": [], "accepted_per_position": []},
    {"drafted_per_position": [0], "accepted_per_position": [0]},
    {"segment": "german", "session": "s", "temperature": 0.0},
)
JUDGED_BY_FIRST = [True, False, False, False, False, False, False, False, True, True]


def test_stored_records_are_observed_as_a_replay_observes_them(database: Database) -> None:
    plain = ending_now(at_k(1, np.full(len(CASES), 0.7), np.full(len(CASES), 3)))
    records = [replace(record, **case) for record, case in zip(plain, CASES, strict=True)]
    with database.session() as session:
        insert_batches(session, [records], StreamRegistry(), datetime.now(UTC))
        stored = read_after(session, -1, limit=100)
        timed = timed_between(session, stored[0].stream_id, 0, 2**60, plain[-1].ended_at)
    ours = _observations(stored)
    replayed = ObservationBatch.from_records([record.seq for record in stored], records)
    assert ours.by_first.tolist() == JUDGED_BY_FIRST
    for column in (item.name for item in fields(ObservationBatch)):
        np.testing.assert_array_equal(getattr(ours, column), getattr(replayed, column), column)
    assert [item.by_first for item in reversed(timed)] == JUDGED_BY_FIRST


def test_a_worse_draft_at_a_k_that_follows_it_is_told_as_of_the_first_token(
    database: Database, tmp_path: Path
) -> None:
    records, k = following(2, np.repeat([0.8, 0.55], [1_000, 300]))
    assert np.median(k[:1_000]) > np.median(k[-200:])
    said = "cceptance of the first draft token"
    with running_sidecar(database, tmp_path) as client:
        post(client, ending_now(records))
        wait_until(lambda: client.get("/api/v1/status").json()["unfolded_records"] == 0, "the fold")
        (stream,) = client.get("/api/v1/status").json()["streams"]
        assert stream["verdict"] == "degraded"
        assert f"a{said} in default fell from 0." in stream["text"]
        assert stream["acceptance"]["baseline"]["positions"] == "first"
        assert stream["segments"][0]["now"]["positions"] == "first"

        url = f"/api/v1/incidents/{stream['incident_id']}"
        wait_until(lambda: client.get(url).json()["diagnosis"] is not None, "the examination")
        incident = client.get(url).json()
        assert incident["positions"] == "first"
        assert incident["acceptance_before"] == pytest.approx(0.8, abs=0.02)
        assert f"A{said} of draft v1 (draft_model) on chat fell from 0." in incident["summary"]
        assert f"a{said} fell from 0." in incident["transitions"][0]["reason"]
        # Of the first token's acceptance no speed follows; what is measured does not need it.
        assert incident["evidence"]["slowdown_formula"] is None
        assert incident["evidence"]["slowdown_measured"] > 0.05
        diagnosis = incident["diagnosis"]
        assert (diagnosis["cause"], diagnosis["retrain"]) == ("unknown", False)
        assert f"a{said} of all traffic moved" in next(
            fact["text"] for fact in diagnosis["facts"] if fact["about"] == "mix"
        )

        page = client.get(f"/incidents/{UUID(incident['id'])}").text
        assert page.count("of the first draft token") >= 4  # the sentence, the numbers, both of the segment
        assert "of the first draft token" in client.get("/").text
        assert (
            '"": null' in client.get(f"/streams/{stream['id']}").text
        )  # no such line in a chart of all positions

        def told_by_metrics() -> bool:
            return 'positions="first",segment="default"' in client.get("/metrics").text.replace(" ", "")

        wait_until(told_by_metrics, "the look after the examination")
        assert "driftguard_acceptance_baseline_ratio{" not in client.get("/metrics").text


def test_a_k_that_rose_is_no_loss_by_formula() -> None:
    """What all positions accept falls with it, and no fall of the traffic's own may be read from that."""
    server, rng = Server(a=0.02, b=0.005, accepts=(0.8, 0.7, 0.6, 0.5, 0.4)), np.random.default_rng(3)

    def told(*, by_first: bool) -> float | None:
        own = {"num_speculative_tokens": None, "by_first": by_first}
        return slower_at_least(
            server.serve(rng, 200, 2, **own), server.serve(rng, 200, 5, start=200.0, **own)
        )

    assert (told(by_first=False) or 0.0) > 0.1
    assert told(by_first=True) is None
