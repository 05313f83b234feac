"""Canary prompts of each server, prompts of captured traffic to choose from, and when they were replayed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import delete, func, select, text
from sqlalchemy.orm import Session

from driftguard.records import FUTURE_TOLERANCE
from driftguard.store.tables import ProbePrompt, Record, Stream


class StoredPrompt(NamedTuple):
    """One prompt as it is kept."""

    key: str
    segment: str
    body: dict[str, Any]


def replace(session: Session, server: str, prompts: Sequence[StoredPrompt], now: datetime) -> None:
    """Makes these the canary prompts of the server."""
    session.execute(delete(ProbePrompt).where(ProbePrompt.server == server))
    session.add_all(
        ProbePrompt(server=server, position=position, created_at=now, **prompt._asdict())
        for position, prompt in enumerate(prompts)
    )
    session.flush()


def of_server(session: Session, server: str) -> list[StoredPrompt]:
    """In their fixed order; none where there is no set."""
    query = select(ProbePrompt).where(ProbePrompt.server == server).order_by(ProbePrompt.position)
    return [StoredPrompt(row.key, row.segment, row.body) for row in session.scalars(query)]


# A hash of the id picks requests of all times of day, and the same ones again while they are kept.
_CAPTURED = text(
    """
    SELECT segment, prompt_token_ids FROM (
        SELECT segment, prompt_token_ids,
               row_number() OVER (PARTITION BY segment ORDER BY md5(record_id::text)) AS place
        FROM captures
        WHERE server = :server AND cardinality(prompt_token_ids) BETWEEN 1 AND :max_tokens
    ) AS shuffled
    WHERE place <= :per_segment ORDER BY segment, place
    """
)


def captured_prompts(
    session: Session, server: str, per_segment: int, max_tokens: int
) -> list[tuple[str, list[int]]]:
    """(segment, token ids) of some captured requests of every segment."""
    values = {"server": server, "per_segment": per_segment, "max_tokens": max_tokens}
    return [(row.segment, list(row.prompt_token_ids)) for row in session.execute(_CAPTURED, values)]


def newest_stream(session: Session, server: str) -> Stream | None:
    """The stream of this server that was heard last: what it serves, as far as records tell."""
    query = select(Stream).where(Stream.server == server, Stream.method != "none")
    return session.scalars(query.order_by(Stream.last_seen_at.desc(), Stream.id.desc()).limit(1)).first()


def last_replay(session: Session, stream_id: int, now: datetime) -> datetime | None:
    """When a canary probe of this stream ended last; without those that a clock which was ahead stored."""
    return session.scalar(
        select(func.max(Record.ended_at)).where(
            Record.stream_id == stream_id, Record.kind == "probe", Record.ended_at <= now + FUTURE_TOLERANCE
        )
    )
