"""Captures as a retraining reads them: an outline of all, then the token ids of those that were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from driftguard.store.tables import Capture


class CaptureOutline(NamedTuple):
    """One captured request without its token ids."""

    record_id: UUID
    segment: str
    captured_at: datetime


class CapturedTokens(NamedTuple):
    """The token ids of one captured request."""

    record_id: UUID
    prompt_token_ids: list[int]
    output_token_ids: list[int]


def outline(session: Session, server: str, target: str) -> list[CaptureOutline]:
    """All captured requests of this server and target that a draft can learn from: with prompt and output."""
    query = select(Capture.record_id, Capture.segment, Capture.captured_at).where(
        Capture.server == server,
        Capture.target == target,
        func.cardinality(Capture.prompt_token_ids) > 0,
        func.cardinality(Capture.output_token_ids) > 0,
    )
    return [CaptureOutline._make(row) for row in session.execute(query)]


def token_ids(session: Session, record_ids: Sequence[UUID]) -> list[CapturedTokens]:
    """Of those that are still kept, in the order of arrival."""
    query = select(Capture.record_id, Capture.prompt_token_ids, Capture.output_token_ids)
    query = query.where(Capture.record_id.in_(record_ids)).order_by(Capture.id)
    return [CapturedTokens._make(row) for row in session.execute(query)]
