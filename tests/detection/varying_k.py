"""Requests of a server that chooses K: the counts per position are exact, K is not in the records."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from driftguard.records import AcceptanceRecord

LARGEST_K = 6
BETWEEN_REQUESTS = 0.1  # sd of what a request's tokens are accepted with
START = datetime(2026, 3, 1, 9, tzinfo=UTC)


def at_k(
    seed: int, quality: NDArray[np.float64], k: NDArray[np.int64], *, first: int = 0
) -> list[AcceptanceRecord]:
    """One request per entry of `quality` (mean acceptance of a draft token that all before it allow) and `k`
    (most of its steps' K: a tenth of them draft one fewer or more). `first`: number of the first one."""
    rng = np.random.default_rng(seed)
    return [
        _request(rng, first + n, float(q), int(each))
        for n, (q, each) in enumerate(zip(quality, k, strict=True))
    ]


def following(
    seed: int, quality: NDArray[np.float64], *, first: int = 0
) -> tuple[list[AcceptanceRecord], NDArray[np.int64]]:
    """As `at_k`, with K chosen by what the last requests accepted: the better, the more. Also those K."""
    rng = np.random.default_rng(seed)
    records, chosen, level = [], [], float(quality[0])
    for n, q in enumerate(quality):
        k = int(np.clip(round(15.0 * level - 8.0), 1, LARGEST_K))
        record = _request(rng, first + n, float(q), k)
        assert record.drafted_per_position is not None
        assert record.accepted_per_position is not None
        level += 0.05 * (record.accepted_per_position[0] / record.drafted_per_position[0] - level)
        records.append(record)
        chosen.append(k)
    return records, np.array(chosen)


def without_positions(records: list[AcceptanceRecord]) -> list[AcceptanceRecord]:
    return [replace(record, drafted_per_position=None, accepted_per_position=None) for record in records]


def with_k(records: list[AcceptanceRecord], k: int) -> list[AcceptanceRecord]:
    return [replace(record, num_speculative_tokens=k) for record in records]


def ending_now(records: list[AcceptanceRecord]) -> list[AcceptanceRecord]:
    later = datetime.now(UTC) - timedelta(seconds=10) - records[-1].ended_at
    return [
        replace(record, started_at=record.started_at + later, ended_at=record.ended_at + later)
        for record in records
    ]


def _request(rng: np.random.Generator, number: int, quality: float, k: int) -> AcceptanceRecord:
    p = float(np.clip(rng.normal(quality, BETWEEN_REQUESTS), 0.02, 0.98))
    tokens = int(rng.integers(60, 240))  # as long as its answer is, whatever K: steps follow from both
    ks = np.clip(k + rng.choice([-1, 0, 1], tokens, p=[0.05, 0.9, 0.05]), 1, LARGEST_K)
    kept = np.minimum(rng.geometric(1.0 - p, tokens) - 1, ks)
    steps = int(np.searchsorted((kept + 1).cumsum(), tokens)) + 1
    ks, kept = ks[:steps], kept[:steps]
    positions = np.arange(LARGEST_K)
    ended_at = START + timedelta(seconds=number)
    return AcceptanceRecord(
        record_id=UUID(bytes=rng.bytes(16)),
        kind="request",
        started_at=ended_at - timedelta(seconds=1),
        ended_at=ended_at,
        server="chat",
        target="target",
        draft="draft",
        draft_version="v1",
        method="draft_model",
        steps=steps,
        drafted=int(ks.sum()),
        accepted=int(kept.sum()),
        emitted=int(kept.sum()) + steps,
        drafted_per_position=(ks[:, None] > positions).sum(axis=0).tolist(),
        accepted_per_position=(kept[:, None] > positions).sum(axis=0).tolist(),
        output_tokens=int(kept.sum()) + steps,
        time_per_output_token_seconds=float(0.05 * steps + 0.005 * ks.sum()) / int(kept.sum() + steps),
        fidelity="request",
    )
