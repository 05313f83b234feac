"""The state after an attack, counted from the database and from what the receiver got."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import select, text

from driftguard.app import detector_config
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.settings import Settings
from driftguard.store import folding
from driftguard.store.database import Database
from driftguard.store.rollup_tiers import TIERS
from driftguard.store.tables import DetectorHistory, DetectorState, Record
from tests.alerting.http_receiver import Received


@dataclass(frozen=True, slots=True)
class Accounts:
    """`rollups_off`: (stream, segment; minute, hour or day) whose sums are not those of the records.
    `states_off`: streams whose stored detector state differs from one fold of all records from the beginning.
    """

    acknowledged: int
    stored: int
    lost: int
    doubled: int
    rollups_off: int
    states_off: int

    @property
    def are_right(self) -> bool:
        return not (self.lost or self.doubled or self.rollups_off or self.states_off)


_ROLLUPS_OFF = """
    WITH summed AS (
        SELECT date_trunc('{unit}', ended_at, 'UTC') AS minute, stream_id, segment, kind,
               count(*) AS records, sum(steps) AS steps, sum(drafted) AS drafted,
               sum(accepted) AS accepted, sum(emitted) AS emitted
        FROM records GROUP BY 1, 2, 3, 4
    )
    SELECT count(*) FROM summed FULL JOIN {table} AS rollup USING (minute, stream_id, segment, kind)
    WHERE (summed.records, summed.steps, summed.drafted, summed.accepted, summed.emitted)
          IS DISTINCT FROM
          (rollup.records, rollup.steps, rollup.drafted, rollup.accepted, rollup.emitted)
    """


def of_records(database: Database, acknowledged: Collection[UUID], settings: Settings) -> Accounts:
    """Folds all records again from the beginning, so nothing else may use the database meanwhile."""
    with database.session() as session:
        stored = Counter(session.scalars(select(Record.record_id)))
        rollups_off = sum(
            session.scalar(text(_ROLLUPS_OFF.format(unit=unit, table=tier.table.__tablename__))) or 0
            for unit, tier in TIERS.items()
        )
    return Accounts(
        acknowledged=len(acknowledged),
        stored=len(stored),
        lost=len(set(acknowledged) - set(stored)),
        doubled=sum(count - 1 for count in stored.values()),
        rollups_off=rollups_off,
        states_off=_states_off(database, settings),
    )


def _states_off(database: Database, settings: Settings) -> int:
    # First the records that the sidecar had not folded when it was stopped or killed.
    _fold_all(Pipeline(database, detector_config(settings), Metrics(), take_over_seconds=0.0))
    kept = _states(database)
    with database.session() as session:
        for table in ("incidents", "detector_states", "fold_positions"):
            session.execute(text(f"DELETE FROM {table}"))
    _fold_all(Pipeline(database, detector_config(settings), Metrics()))
    anew = _states(database)
    return sum(kept.get(stream_id) != anew.get(stream_id) for stream_id in {*kept, *anew})


def _fold_all(pipeline: Pipeline) -> None:
    while pipeline.fold_batch():
        pass


def _states(database: Database) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    with database.session() as session:
        for stream_id, state in session.execute(select(DetectorState.stream_id, DetectorState.state)):
            found[stream_id] = [bytes(state)]
        pieces = select(DetectorHistory).order_by(DetectorHistory.stream_id, DetectorHistory.number)
        for piece in session.scalars(pieces):
            found[piece.stream_id].append((piece.number, bytes(piece.piece)))
    return found


def unfolded(database: Database) -> int:
    with database.session() as session:
        return folding.unfolded(session)


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of opened incidents that the webhook's receiver got and answered. `repeated`: the same event
    again with the same Idempotency-Key, which a receiver can detect; `doubled`: with another key.
    """

    told: frozenset[str]  # servers
    repeated: int
    doubled: int


def of_pages(taken: Sequence[Received]) -> Pages:
    firing = [item for item in taken if item.body["event"] == "firing"]
    keys: dict[tuple[str, str], Counter[str]] = {}
    for item in firing:
        incident = item.body["incident"]
        key = {name.lower(): value for name, value in item.headers.items()}["idempotency-key"]
        keys.setdefault((incident["id"], incident["severity"]), Counter())[key] += 1
    return Pages(
        told=frozenset(item.body["stream"]["server"] for item in firing),
        repeated=sum(sum(counts.values()) - len(counts) for counts in keys.values()),
        doubled=sum(len(counts) - 1 for counts in keys.values()),
    )
