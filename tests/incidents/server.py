"""A server whose requests change name, K, draft version, clock and acceptance, and a sidecar beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import msgspec
import numpy as np
from sqlalchemy import select, update

from driftguard.detection import DetectorConfig
from driftguard.incidents import cost_measurement
from driftguard.incidents.message import summary
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.pipeline.look_around import LookAround
from driftguard.records import AcceptanceRecord
from driftguard.store import incidents
from driftguard.store.database import Database
from driftguard.store.tables import Incident, Stream, StreamCost
from tests.incidents.test_renamed_segment import mixed, renamed
from tests.incidents.test_target_replaced import with_k
from tests.pipeline.examining import PAGER, fold_and_examine
from tests.pipeline.traffic import Traffic, store

SECONDS_APART = 0.5
HISTORY = 1_000  # requests of a stream without one of a segment: it is silent
BATCH_RECORDS = 600  # to HISTORY as the usual ones are to each other


@dataclass(frozen=True, slots=True)
class Setup:
    """How requests are served. `first`: how often the first draft token is accepted, by segment. `later`: how
    often each next one of those behind accepted ones; None: as often as the first."""

    first: Mapping[str, float]
    shares: Mapping[str, float]
    k: int = 4
    names: Mapping[str, str] = field(default_factory=dict)
    draft_version: str = "v1"
    target: str = "target"
    tells_positions: bool = True
    temperature: float | None = None
    verification: str = "unknown"
    adapts_k: bool = False  # then records do not tell K
    later: float | None = None


class Server:
    """With a sidecar that folds, examines and looks after every batch, ten minutes later each time."""

    def __init__(self, database: Database, seed: int) -> None:
        self.database, self._seed = database, 1_000 * seed
        self._looked = datetime.now(UTC)
        self._lengths = np.random.default_rng(seed)
        self.now = datetime.now(UTC)
        self.traffic = Traffic(seed=seed, start=self.now, seconds_apart=SECONDS_APART)
        config = DetectorConfig(minimum_drop=0.1, history=HISTORY)
        self._pipeline = Pipeline(database, config, Metrics(), batch_records=BATCH_RECORDS)

    def send(self, count: int, setup: Setup) -> None:
        self._seed += 1
        drawn = mixed(self.traffic, self._seed, count, setup.first, setup.shares)
        records = renamed(with_k(drawn, setup.k, setup.first, self._seed, setup.later), setup.names)
        self.now += timedelta(seconds=SECONDS_APART * count)
        store(self.database, [self._served(record, setup) for record in records], arrived_at=self.now)
        self.look()

    def pause(self, minutes: float, *, clock_set: float = 0.0) -> None:
        """Sends nothing, as a server does that restarts. `clock_set`: minutes by which its clock is set."""
        self.now += timedelta(minutes=minutes)
        self.traffic.clock += timedelta(minutes=minutes + clock_set)

    def _served(self, record: AcceptanceRecord, setup: Setup) -> AcceptanceRecord:
        """Answers are as long as they are, however much of them is accepted."""
        served = msgspec.structs.replace(
            record,
            draft_version=setup.draft_version,
            target=setup.target,
            temperature=setup.temperature,
            verification=setup.verification,
            num_speculative_tokens=None if setup.adapts_k else record.num_speculative_tokens,
            output_tokens=int(self._lengths.lognormal(4.5, 0.6)) + 1,
        )
        if setup.tells_positions:
            return served
        return msgspec.structs.replace(served, drafted_per_position=None, accepted_per_position=None)

    def look(self) -> None:
        fold_and_examine(self._pipeline, self.database)
        with self.database.session() as session:
            session.execute(
                update(StreamCost).values(measured_at=StreamCost.measured_at - timedelta(hours=1))
            )
        self._looked += timedelta(minutes=10)
        cost_measurement.refresh(self.database, PAGER, max(self.now, self._looked))

    def look_around(self) -> None:
        """As the sidecar does every few seconds, for its gauges."""
        LookAround(self.database, Metrics()).look(self.now)

    def falls(self) -> Sequence[Incident]:
        """All that were told, oldest first."""
        with self.database.session() as session:
            query = select(Incident).where(Incident.direction == "down").order_by(Incident.opened_seq)
            return session.scalars(query).all()

    def fall(self) -> Incident:
        (incident,) = self.falls()
        return incident

    def reasons(self, incident: Incident) -> list[str]:
        with self.database.session() as session:
            return [each.reason for each in incidents.transitions(session, incident.id)]

    def summary(self, incident: Incident) -> str:
        with self.database.session() as session:
            return summary(incident, session.get_one(Stream, incident.stream_id))
