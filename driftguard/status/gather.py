"""One verdict per stream, with the numbers it rests on and one sentence for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy.orm import Session

from driftguard.cost import Speculation, payoff
from driftguard.cost.best_action import Action
from driftguard.detection import Acceptance, StreamSummary
from driftguard.incidents import cost_measurement, recovery, remedy
from driftguard.incidents.message import cost_percent
from driftguard.records.documents.incident import going_on, names_of
from driftguard.records.positions import combined
from driftguard.status import unrecorded
from driftguard.status.sentences import DRAFTING, set_aside_sentence, stale, with_clock, with_text
from driftguard.status.stream_status import StreamStatus
from driftguard.status.unrecorded import Unrecorded
from driftguard.status.usual_silence import Place, UsualSilences
from driftguard.status.verdict import Standing, standings
from driftguard.store import drafts, folding, status_queries
from driftguard.store.streams import StreamRow
from driftguard.store.tables import Incident, RetrainRun, Source

msgspec.json.Decoder(StreamSummary)  # looks at the type now: see store.column_types.Document
TOLD_FOR: Final = timedelta(days=1)  # how long a stream tells of its resolved incident


def gather(
    session: Session,
    now: datetime,
    known: Sequence[StreamRow] | None = None,
    scraped: Sequence[Source] | None = None,
    usual: UsualSilences | None = None,
) -> list[StreamStatus]:
    """Every stream, the worst of those in service first; the arguments are those of verdict.standings."""
    return describe(session, now, standings(session, now, known, scraped, usual))


def describe(session: Session, now: datetime, chosen: Sequence[Standing]) -> list[StreamStatus]:
    """The status of these streams (verdict, numbers, sentence), in their order."""
    ids = [item.stream.id for item in chosen]
    facts = _Facts(
        summaries={
            stream_id: msgspec.convert(summary, StreamSummary)
            for stream_id, summary in folding.summaries(session, ids).items()
        },
        speeds=status_queries.speeds(session, now, ids),
        lengths=status_queries.lengths(session, now, ids),
        retrains=status_queries.last_retrains(session),
        costs=cost_measurement.known(session, ids),
        rollbacks=drafts.rollbacks_in_service(session),
        watched=status_queries.watched_runs(session),
        resolved=status_queries.newest_resolved(session, now - TOLD_FOR),
        unrecorded={
            one.server: one
            for one in unrecorded.of_servers(session, now, {item.stream.server for item in chosen})
        },
    )
    return [_status(item, facts) for item in chosen]


@dataclass(frozen=True, slots=True)
class _Facts:
    """By stream id; `retrains`: by server and target."""

    summaries: dict[int, StreamSummary]
    speeds: dict[int, dict[str, status_queries.SegmentSpeed]]
    lengths: dict[int, status_queries.Lengths]
    retrains: dict[Place, RetrainRun]
    costs: dict[int, cost_measurement.Measured]
    rollbacks: dict[tuple[str, str, str], str]  # server, target, version -> version
    resolved: dict[Place, Incident]
    watched: dict[tuple[str, str, str], status_queries.WatchedRun]
    unrecorded: dict[str, Unrecorded]  # by server


def _status(item: Standing, facts: _Facts) -> StreamStatus:
    stream, verdict, incident, held = item.stream, item.known_verdict, item.incident, item.set_aside
    summary = facts.summaries.get(stream.id)
    now, baseline = _acceptances(summary)
    speeds = facts.speeds.get(stream.id, {})
    now_speed, baseline_speed = _speeds(speeds, incident if verdict == "degraded" else None)
    length = facts.lengths.get(stream.id)
    measured = facts.costs.get(stream.id)
    promoted = facts.watched.get((stream.server, stream.target, stream.draft_version))
    found = StreamStatus(
        stream=stream,
        verdict=verdict,
        acceptance_verdict=item.acceptance_verdict,
        text="",
        since=held.since if held else _since(verdict, summary, incident),
        in_service=item.in_service,
        target_in_service=item.target_in_service,
        draft_in_service=item.draft_in_service,
        now=now,
        baseline=baseline,
        tokens_per_second_now=now_speed,
        tokens_per_second_baseline=baseline_speed,
        acceptance_length=length.emitted / length.steps if length else None,
        acceptance_per_position=[
            kept / offered if offered else None for offered, kept in (length.positions if length else ())
        ],
        cost_percent=cost_percent(incident) if verdict == "degraded" and incident else None,
        sample_size=summary.requests if summary else 0,
        requests_missing=_missing(summary),
        incident_id=incident.id if incident else None,
        last_retrain=facts.retrains.get((stream.server, stream.target)),
        segments=summary.segments if summary else (),
        cost=measured.cost if measured else None,
        cost_measured_at=measured.at if measured else None,
        promoted_at=promoted.promoted_at if promoted else None,
        recovery=recovery.told(promoted.watch, promoted.incident) if promoted else None,
        last_incident=facts.resolved.get((stream.server, stream.target)),
        speculation=_speculation(item, measured),
        actions=_actions(item, measured, facts),
        summary=summary,
    )
    found = with_text(found, incident) if held is None else replace(found, text=set_aside_sentence(held))
    if item.in_service and (missing := _missing_requests(stream, facts)):
        found = replace(found, text=f"{found.text} {missing}")
    if not item.in_service or item.heard is None:
        return found
    return stale(found, item.heard) if item.verdict == "stale" else with_clock(found, item.heard)


def _missing_requests(stream: StreamRow, facts: _Facts) -> str:
    """Empty for a stream of windows, which are of all requests, and where there is no acceptance."""
    missing = facts.unrecorded.get(stream.server)
    return missing.text if missing and stream.id in missing.streams and stream.method != "none" else ""


def _speculation(item: Standing, measured: cost_measurement.Measured | None) -> Speculation | None:
    if not item.in_service or item.stream.method == "none":
        return None
    if measured is None:
        return payoff(None)
    return payoff(measured.cost, outdated=_is_outdated(item, measured))


def _actions(item: Standing, measured: cost_measurement.Measured | None, facts: _Facts) -> tuple[Action, ...]:
    if item.known_verdict not in DRAFTING or item.stream.method == "none":
        return ()
    cost = None if measured is None or _is_outdated(item, measured) else measured.cost
    place, version = (item.stream.server, item.stream.target), item.stream.draft_version
    rollback = remedy.rollback_of(
        facts.rollbacks.get((*place, version)), facts.retrains.get(place), version, cost
    )
    return remedy.of_stream(cost, item.incident, rollback)


def _is_outdated(item: Standing, measured: cost_measurement.Measured) -> bool:
    return cost_measurement.is_outdated(item.stream.last_seen_at, measured.at)


def _since(verdict: str, summary: StreamSummary | None, incident: Incident | None) -> datetime | None:
    """Not since an incident that is open and is not why the stream has this verdict: drafting may stop, or
    speculation begin to lose, days after acceptance changed."""
    if verdict == "speculation_loses":
        return incident.change_point_at if incident is not None and incident.evidence.goodput else None
    if incident is not None and verdict != "drafting_stopped":
        return incident.change_point_at
    if summary is None or summary.since is None:
        return None
    return datetime.fromtimestamp(summary.since, UTC)


def _missing(summary: StreamSummary | None) -> int:
    return min((segment.requests_needed for segment in summary.segments), default=0) if summary else 0


def _acceptances(summary: StreamSummary | None) -> tuple[Acceptance | None, Acceptance | None]:
    if summary is None:
        return None, None
    pairs = [(item.recent, item.baseline) for item in summary.segments if item.recent and item.baseline]
    requests = sum(recent.requests for recent, _ in pairs)
    if not requests:
        return summary.acceptance, None
    weights = [recent.requests / requests for recent, _ in pairs]
    now = _mixed([recent for recent, _ in pairs], weights)
    return now, _mixed([baseline for _, baseline in pairs], weights)


def _mixed(parts: Sequence[Acceptance], weights: Sequence[float]) -> Acceptance:
    """Rates averaged over one mix of segments; the half-widths of independent intervals add in squares."""
    rate = sum(part.rate * weight for part, weight in zip(parts, weights, strict=True))
    squares = sum(
        (weight * (part.high - part.low) / 2) ** 2 for part, weight in zip(parts, weights, strict=True)
    )
    half = float(squares**0.5)
    return Acceptance(
        rate,
        max(0.0, rate - half),
        min(1.0, rate + half),
        sum(part.requests for part in parts),
        combined(part.positions for part in parts),
    )


def _speeds(
    speeds: dict[str, status_queries.SegmentSpeed], incident: Incident | None
) -> tuple[float | None, float | None]:
    """Tokens per second now and before; during an incident of its segments that are not back."""
    if incident is None:
        return _rate([item.recent for item in speeds.values()]), _rate(
            [item.earlier for item in speeds.values()]
        )
    named = set(names_of(going_on(incident.segments)))
    now = _rate([item.recent for segment, item in speeds.items() if segment in named])
    return now or incident.tokens_per_second_after, incident.tokens_per_second_before


def _rate(parts: Sequence[status_queries.Speed]) -> float | None:
    requests, seconds = sum(part.requests for part in parts), sum(part.seconds for part in parts)
    return requests / seconds if seconds > 0 else None
