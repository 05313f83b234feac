"""Synthetic traffic: requests whose latent acceptance differs, in segments, with changes on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from driftguard.records import AcceptanceRecord
from driftguard.store import folding
from driftguard.store.database import Database
from driftguard.store.records import insert_batches
from driftguard.store.streams import StreamRegistry
from driftguard.store.tables import Stream

K = 4
SECONDS_PER_STEP = 0.05


class Traffic:
    """Records one second apart by default, ending before now. `draw` gives the next ones."""

    def __init__(self, seed: int, start: datetime | None = None, *, seconds_apart: float = 1.0) -> None:
        self._random = np.random.default_rng(seed)
        self._apart = timedelta(seconds=seconds_apart)
        self.clock = start or datetime.now(UTC) - timedelta(hours=2)

    def draw(
        self,
        count: int,
        rates: Mapping[str, float],
        *,
        draft_version: str = "v1",
        kind: str = "request",
        server: str = "chat",
    ) -> list[AcceptanceRecord]:
        """`rates`: mean acceptance per segment; the requests' own vary around it (sd 0.1)."""
        segments = list(rates)
        return [
            self._one(segments[i % len(segments)], rates, draft_version, kind, server) for i in range(count)
        ]

    def _one(
        self, segment: str, rates: Mapping[str, float], draft_version: str, kind: str, server: str
    ) -> AcceptanceRecord:
        rate = float(np.clip(self._random.normal(rates[segment], 0.1), 0.02, 0.98))
        steps = int(self._random.integers(10, 40))
        accepted = int(self._random.binomial(steps * K, rate))
        emitted = accepted + steps
        self.clock += self._apart
        return AcceptanceRecord(
            record_id=UUID(bytes=self._random.bytes(16)),
            kind=kind,  # type: ignore[arg-type]
            started_at=self.clock - timedelta(milliseconds=500),
            ended_at=self.clock,
            server=server,
            target="target",
            draft="draft",
            draft_version=draft_version,
            method="draft_model",
            steps=steps,
            drafted=steps * K,
            accepted=accepted,
            emitted=emitted,
            fidelity="request",
            segment=segment,
            num_speculative_tokens=K,
            output_tokens=emitted,
            time_per_output_token_seconds=SECONDS_PER_STEP * steps / emitted,
        )


def with_positions(records: Sequence[AcceptanceRecord]) -> list[AcceptanceRecord]:
    """With what was accepted at each position of the drafts, as much at each as possible."""
    return [
        msgspec.structs.replace(
            record,
            drafted_per_position=[record.steps] * K,
            accepted_per_position=[(record.accepted + K - 1 - place) // K for place in range(K)],
        )
        for record in records
    ]


def store(
    database: Database, records: Sequence[AcceptanceRecord], arrived_at: datetime | None = None
) -> None:
    """As the ingest's writer does, in one transaction."""
    with database.session() as session:
        insert_batches(session, [records], StreamRegistry(), arrived_at or datetime.now(UTC))


def stream_ids(session: Session) -> Sequence[int]:
    """Of every stream."""
    return session.scalars(select(Stream.id)).all()


def all_summaries(session: Session) -> dict[int, dict[str, Any]]:
    """stream id -> what the status shows."""
    return folding.summaries(session, stream_ids(session))
