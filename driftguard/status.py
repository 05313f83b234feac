"""One verdict per stream, with the numbers it rests on and one sentence for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import msgspec
from sqlalchemy.orm import Session

from driftguard import stream_cost
from driftguard.alerting.message import clock, cost_percent
from driftguard.cost import Cost, advice
from driftguard.detection import Acceptance, SegmentSummary, StreamSummary
from driftguard.incidents import positions_of
from driftguard.records.positions import ACCEPTANCE, together
from driftguard.silence import Newest, clock_difference
from driftguard.standing import Standing, standings
from driftguard.store import detector_states
from driftguard.store import status_queries as status
from driftguard.store.streams import StreamRow
from driftguard.store.tables import HeldStream, Incident, RetrainRun, Source
from driftguard.usual_silence import Place, UsualSilences

_CURRENT: Final = ("degraded", "improved", "insufficient_data", "relearning", "steady")  # drafts now


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """One stream now. Acceptances are over the watched segments, both sides in today's mix."""

    stream: StreamRow
    verdict: str
    text: str
    since: datetime | None
    in_service: bool
    draft_in_service: str
    now: Acceptance | None
    baseline: Acceptance | None
    tokens_per_second_now: float | None
    tokens_per_second_baseline: float | None
    cost_percent: float | None  # of the tokens per second, while degraded
    sample_size: int  # requests folded
    requests_missing: int  # until the first segment is watched
    incident_id: UUID | None
    last_retrain: RetrainRun | None
    segments: Sequence[SegmentSummary]
    cost: Cost | None  # as it was last measured
    cost_measured_at: datetime | None
    summary: StreamSummary | None  # the detector's; None before the first fold


def gather(
    session: Session,
    now: datetime,
    known: Sequence[StreamRow] | None = None,
    scraped: Sequence[Source] | None = None,
    usual: UsualSilences | None = None,
) -> list[StreamStatus]:
    """Every stream, the worst of those in service first; the arguments are those of standing.standings."""
    return describe(session, now, standings(session, now, known, scraped, usual))


def describe(session: Session, now: datetime, chosen: Sequence[Standing]) -> list[StreamStatus]:
    """What the verdicts of these streams rest on, in their order."""
    ids = [item.stream.id for item in chosen]
    facts = _Facts(
        summaries={
            stream_id: msgspec.convert(summary, StreamSummary)
            for stream_id, summary in detector_states.summaries(session, ids).items()
        },
        speeds=status.speeds(session, now, ids),
        retrains=status.last_retrains(session),
        costs=stream_cost.known(session, ids),
    )
    return [_status(item, facts) for item in chosen]


@dataclass(frozen=True, slots=True)
class _Facts:
    """By stream id; `retrains`: by server and target."""

    summaries: dict[int, StreamSummary]
    speeds: dict[int, dict[str, status.SegmentSpeed]]
    retrains: dict[Place, RetrainRun]
    costs: dict[int, stream_cost.Measured]


def _status(item: Standing, facts: _Facts) -> StreamStatus:
    stream, verdict, incident, held = item.stream, item.known_verdict, item.incident, item.set_aside
    summary = facts.summaries.get(stream.id)
    now, baseline = _acceptances(summary)
    speeds = facts.speeds.get(stream.id, {})
    now_speed, baseline_speed = _speeds(speeds, incident if verdict == "degraded" else None)
    measured = facts.costs.get(stream.id)
    found = StreamStatus(
        stream=stream,
        verdict=verdict,
        text="",
        since=held.since if held else _since(summary, incident),
        in_service=item.in_service,
        draft_in_service=item.draft_in_service,
        now=now,
        baseline=baseline,
        tokens_per_second_now=now_speed,
        tokens_per_second_baseline=baseline_speed,
        cost_percent=cost_percent(incident) if verdict == "degraded" and incident else None,
        sample_size=summary.requests if summary else 0,
        requests_missing=_missing(summary),
        incident_id=incident.id if incident else None,
        last_retrain=facts.retrains.get((stream.server, stream.target)),
        segments=summary.segments if summary else (),
        cost=measured.cost if measured else None,
        cost_measured_at=measured.at if measured else None,
        summary=summary,
    )
    found = _with_text(found, incident) if held is None else replace(found, text=_set_aside_sentence(held))
    if not item.in_service or item.heard is None:
        return found
    return _stale(found, item.heard) if item.verdict == "stale" else _with_clock(found, item.heard)


def _stale(found: StreamStatus, newest: Newest) -> StreamStatus:
    """Whatever the verdict was, nobody knows it now; the incident stays."""
    text = f"Stale: no record from {found.stream.server} arrived after {clock(newest.arrived_at)}"
    if difference := clock_difference(newest):
        text += f"; the newest ended at {clock(newest.ended_at)} by its own clock: {difference}"
    text += f". Before that: {found.text}"
    return replace(found, verdict="stale", since=newest.arrived_at, text=text)


def _with_clock(found: StreamStatus, newest: Newest) -> StreamStatus:
    difference = clock_difference(newest)
    if difference is None:
        return found
    told = (
        f"The newest record from {found.stream.server} arrived at {clock(newest.arrived_at)} and ended at "
        f"{clock(newest.ended_at)} by its own clock: {difference}."
    )
    return replace(found, text=f"{found.text} {told}")


def _since(summary: StreamSummary | None, incident: Incident | None) -> datetime | None:
    if incident is not None:
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
    """Rates in one mix of segments; the half-widths of independent intervals add in squares."""
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
        together(part.positions for part in parts),
    )


def _speeds(
    speeds: dict[str, status.SegmentSpeed], incident: Incident | None
) -> tuple[float | None, float | None]:
    """Tokens per second now and before; during an incident of the segments that it names."""
    if incident is None:
        return _rate([item.recent for item in speeds.values()]), _rate(
            [item.earlier for item in speeds.values()]
        )
    named = {segment["segment"] for segment in incident.segments}
    now = _rate([item.recent for segment, item in speeds.items() if segment in named])
    return now or incident.tokens_per_second_after, incident.tokens_per_second_before


def _rate(parts: Sequence[status.Speed]) -> float | None:
    requests, seconds = sum(part.requests for part in parts), sum(part.seconds for part in parts)
    return requests / seconds if seconds > 0 else None


def _with_text(found: StreamStatus, incident: Incident | None) -> StreamStatus:
    text = _sentence(found, incident)
    told = _advice(found) if found.verdict in _CURRENT else None
    return replace(found, text=f"{text} {told[0].upper()}{told[1:]}." if told else text)


def _advice(found: StreamStatus) -> str | None:
    if found.cost is None or stream_cost.is_outdated(found.stream.last_seen_at, found.cost_measured_at):
        return None
    return advice(found.cost)


def _sentence(found: StreamStatus, incident: Incident | None) -> str:
    if found.verdict == "replaced":
        return f"No longer in service: {found.stream.server} runs draft {found.draft_in_service}."
    if found.verdict == "drafting_stopped":
        return "Drafting has stopped: the newest requests carried no draft tokens."
    if incident is not None:
        return _incident_sentence(incident)
    if found.stream.method == "none":
        return "Requests without speculation: there is no acceptance to watch."
    if found.verdict in ("insufficient_data", "relearning"):
        return _learning_sentence(found)
    rates = f"{ACCEPTANCE[found.now.positions]} {found.now.rate:.2f}" if found.now else "acceptance not known"
    told = f"Steady: {rates}" + (f", baseline {found.baseline.rate:.2f}." if found.baseline else ".")
    learning = [segment.segment for segment in found.segments if segment.learning]
    return f"{told} Not watched yet: {_some(learning)}." if learning else told


def _learning_sentence(found: StreamStatus) -> str:
    more = f"; at least {found.requests_missing} more are needed" if found.requests_missing else ""
    so_far = f"{found.sample_size} requests so far{more} before a change could be told."
    begun_at, because = found.stream.begun_anew_at, found.stream.begun_anew_because
    if begun_at is None:
        return f"Insufficient data: {so_far}"
    if found.verdict == "relearning":
        return f"Relearning since {clock(begun_at)}: the detector's state was {because}. {so_far}"
    return f"Insufficient data since {clock(begun_at)}: {because}. {so_far}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _set_aside_sentence(held: HeldStream) -> str:
    return (
        f"Cannot be judged since {clock(held.since)}: the detector failed {held.failures} times at its "
        f"records ({held.reason}). {held.records_behind:,} of them wait, as long as retention keeps them. "
        "They are read again when another version of DriftGuard starts, or when somebody asks for it, on its "
        f"page or with `driftguard retry {held.stream_id}`."
    )


def _incident_sentence(incident: Incident) -> str:
    names = _some([segment["segment"] for segment in incident.segments])
    word, verb = ("Degraded", "fell") if incident.direction == "down" else ("Improved", "rose")
    acceptance = ACCEPTANCE[positions_of(incident.segments)]
    percent = cost_percent(incident)
    cost = (
        f", about {percent:.0f}% slower" if incident.direction == "down" and percent and percent > 0 else ""
    )
    doing = {"acknowledged": " Acknowledged.", "mitigating": " A new draft is being made."}
    return (
        f"{word} since {clock(incident.change_point_at)}: {acceptance} in {names} {verb} from "
        f"{incident.acceptance_before:.2f} to {incident.acceptance_after:.2f}{cost}."
        f"{doing.get(incident.state, '')}"
    )
