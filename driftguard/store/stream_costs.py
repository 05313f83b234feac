"""The cost of speculation as it was last measured, one row per stream."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import ARRAY, BigInteger, any_, exists, literal, or_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.records.documents.cost import Cost
from driftguard.store.streams import is_to_be_seen_again
from driftguard.store.tables import Incident, Stream, StreamCost


def outdated(session: Session, every: timedelta, now: datetime, *, limit: int) -> list[Stream]:
    """Streams with drafts of which traffic has arrived since their last measurement, `every` so long, and
    those that a clock which was ahead has measured; the longest unmeasured first."""
    query = (
        select(Stream)
        .outerjoin(StreamCost, StreamCost.stream_id == Stream.id)
        .where(
            Stream.method != "none",
            is_to_be_seen_again(StreamCost.measured_at, every, now),
        )
        .order_by(StreamCost.measured_at.asc().nulls_first(), Stream.id)
        .limit(limit)
    )
    return list(session.scalars(query))


def awaited(session: Session, since: datetime, before: datetime, *, limit: int) -> list[Stream]:
    """Streams that began since then and whose cost is not known yet, and those with an incident opened since
    then that is not resolved and was not told what it surely costs; of which traffic has arrived since their
    last measurement, and none since `before`; those with an incident and the longest unmeasured first."""
    of_new_incident = exists().where(
        Incident.stream_id == Stream.id,
        Incident.state != "resolved",
        Incident.opened_at >= since,
        Incident.evidence["slowdown_measured"].as_float().is_(None),
    )
    query = (
        select(Stream)
        .join(StreamCost, StreamCost.stream_id == Stream.id)
        .where(
            or_(of_new_incident, StreamCost.cost.is_(None) & (Stream.first_seen_at >= since)),
            StreamCost.measured_at < before,
            Stream.traffic_arrived_at > StreamCost.measured_at,
        )
        .order_by(of_new_incident.desc(), StreamCost.measured_at, Stream.id)
        .limit(limit)
    )
    return list(session.scalars(query))


_LOSING = text(
    """
    SELECT streams.id FROM stream_costs JOIN streams ON streams.id = stream_costs.stream_id
    WHERE streams.last_seen_at - stream_costs.measured_at <= :outdated_after
      AND stream_costs.cost @? '$.loads[*] ? (@.now == true && @.factor.high < 1)'
    """
)


def losing(session: Session, outdated_after: timedelta) -> set[int]:
    """Ids of the streams that speculation makes slower at the load there is now, as driftguard.cost.payoff
    has it; without those whose newest traffic was not measured for so long."""
    return set(session.scalars(_LOSING, {"outdated_after": outdated_after}))


def store(session: Session, stream_id: int, cost: Cost | None, measured_at: datetime) -> None:
    """None where the records do not tell."""
    values = {"cost": cost, "measured_at": measured_at}
    statement = insert(StreamCost).values(stream_id=stream_id, **values)
    session.execute(statement.on_conflict_do_update(index_elements=["stream_id"], set_=values))


def measured(session: Session, stream_ids: Sequence[int]) -> list[StreamCost]:
    """Of those streams where it is known."""
    chosen = StreamCost.stream_id == any_(literal(stream_ids, ARRAY(BigInteger)))
    return list(session.scalars(select(StreamCost).where(StreamCost.cost.is_not(None), chosen)))
