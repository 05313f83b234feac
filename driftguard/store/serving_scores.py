"""Captured requests of an incident as they are scored offline, and their scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, NamedTuple
from uuid import UUID

from sqlalchemy import delete, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.diagnosis import Captured
from driftguard.records.documents.serving_scores import MissingScores, ServingScores
from driftguard.store.examination_evidence import LOOK_BACK, captured_of
from driftguard.store.tables import ServingScoresRow, Stream

SCORED_REQUESTS: Final = 100  # the newest of each changed segment, on each side

State = Literal["scoring", "scored", "missing"]


class Attempt(NamedTuple):
    """The newest scoring for one incident. `captures`: the step of SeenEvidence.captures it is made for."""

    captures: int
    state: State


@dataclass(frozen=True, slots=True)
class ServedCapture:
    """A captured request with how it was served, as in driftguard_training.traffic.ServedRequest. Where K
    varied, its counts are those of the first draft tokens."""

    captured: Captured
    temperature: float
    num_speculative_tokens: int | None
    drafting_steps: tuple[float, ...]
    is_after: bool
    verification: str  # token or block


def attempts(session: Session, incident_ids: Collection[UUID]) -> dict[UUID, Attempt]:
    """Of those that have one."""
    if not incident_ids:
        return {}
    query = select(ServingScoresRow.incident_id, ServingScoresRow.captures, ServingScoresRow.state)
    rows = session.execute(query.where(ServingScoresRow.incident_id.in_(incident_ids)))
    return {row.incident_id: Attempt(row.captures, row.state) for row in rows}


def begin(session: Session, incident_id: UUID, captures: int, now: datetime) -> bool:
    """False where a scoring for this step, or a later one, was begun already. Earlier scores stay until this
    one has ended."""
    values = {"captures": captures, "state": "scoring", "started_at": now, "ended_at": None}
    new = insert(ServingScoresRow).values(incident_id=incident_id, **values)
    is_later = ServingScoresRow.captures < new.excluded.captures
    row = new.on_conflict_do_update(index_elements=["incident_id"], set_=values, where=is_later)
    return session.scalar(row.returning(ServingScoresRow.incident_id)) is not None


def end(
    session: Session,
    incident_id: UUID,
    now: datetime,
    *,
    scores: ServingScores | None = None,
    missing: MissingScores | None = None,
) -> None:
    """With new scores, or with the reason why there are none; earlier ones stay then."""
    row = session.get_one(ServingScoresRow, incident_id)
    row.state = "scored" if scores is not None else "missing"
    row.ended_at, row.missing = now, missing
    if scores is not None:
        row.scores = scores


def take_back(session: Session, incident_id: UUID) -> None:
    """A scoring that was stopped on request is due again."""
    is_it = ServingScoresRow.incident_id == incident_id
    session.execute(delete(ServingScoresRow).where(is_it, ServingScoresRow.scores.is_(None)))
    earlier = {"captures": ServingScoresRow.captures - 1, "state": "scored"}
    session.execute(update(ServingScoresRow).where(is_it).values(earlier))


def give_up(session: Session, started_before: datetime, now: datetime) -> None:
    """Those whose process was killed together with its sidecar. Writes nothing where there are none."""
    killed = (ServingScoresRow.state == "scoring", ServingScoresRow.started_at < started_before)
    if session.scalar(select(ServingScoresRow.incident_id).where(*killed).limit(1)) is None:
        return
    ended = {"state": "missing", "missing": "interrupted", "ended_at": now}
    session.execute(update(ServingScoresRow).where(*killed).values(ended))


# K and the temperature decide what a faithful engine accepts: a record that tells neither is of no use. Where
# K varied, counts per position tell how long the drafts were, and it is judged by the first
# (driftguard.records.positions). Typical acceptance makes answers that are not the target's own. The stream
# is asked for last: else PostgreSQL may read all of its records of two hours for each captured request.
_CAPTURED = text(
    """
    SELECT newest.record_id, newest.segment, newest.is_after, newest.prompt_token_ids AS prompt,
           newest.output_token_ids AS output, r.session, r.drafted, r.accepted, r.temperature,
           r.num_speculative_tokens, r.steps, r.drafted_per_position, r.verification
    FROM (
        SELECT *, captured_at >= :at AS is_after, row_number() OVER (
            PARTITION BY segment, captured_at >= :at ORDER BY captured_at DESC, id DESC) AS age
        FROM captures
        WHERE server = :server AND target = :target AND draft_version = :version
          AND segment = ANY(:changed) AND captured_at >= :since AND captured_at < :until
          AND cardinality(prompt_token_ids) > 0 AND cardinality(output_token_ids) > 0
    ) AS newest
    JOIN LATERAL (
        SELECT stream_id, session, temperature, num_speculative_tokens, steps, drafted_per_position,
               verification,
               CASE WHEN num_speculative_tokens > 0 THEN drafted
                    ELSE drafted_per_position[1] END AS drafted,
               CASE WHEN num_speculative_tokens > 0 THEN accepted
                    ELSE accepted_per_position[1] END AS accepted
        FROM records
        WHERE records.record_id = newest.record_id
          AND ended_at >= newest.captured_at - interval '1 hour'
          AND ended_at <= newest.captured_at + interval '1 hour'
          AND drafted > 0 AND temperature IS NOT NULL AND acceptance_rule <> 'typical'
          AND (num_speculative_tokens > 0 OR num_speculative_tokens IS NULL
               AND drafted_per_position[1] > 0 AND accepted_per_position[1] IS NOT NULL)
        LIMIT 1
    ) AS r ON r.stream_id = :stream_id
    WHERE age <= :limit
    ORDER BY age, newest.segment, is_after
    """
)


def captured(session: Session, stream: Stream, changed: Sequence[str], at: datetime) -> list[ServedCapture]:
    """Of the changed segments within a week of the change at `at`. The newest of every segment and side come
    first, so that a scoring that is cut short has some of each."""
    values = {
        "stream_id": stream.id,
        "server": stream.server,
        "target": stream.target,
        "version": stream.draft_version,
        "changed": list(changed),
        "at": at,
        "since": at - LOOK_BACK,
        "until": at + LOOK_BACK,
        "limit": SCORED_REQUESTS,
    }
    return [
        ServedCapture(
            captured_of(row),
            row.temperature,
            row.num_speculative_tokens,
            () if row.num_speculative_tokens else _drafting_steps(row.steps, row.drafted_per_position),
            row.is_after,
            "block" if row.verification == "block" else "token",
        )
        for row in session.execute(_CAPTURED, values)
    ]


def _drafting_steps(steps: int, drafted_per_position: Sequence[int]) -> tuple[float, ...]:
    """The parts of the steps that drafted at least 1, 2, ... tokens."""
    return tuple(drafted / steps for drafted in drafted_per_position if drafted)
