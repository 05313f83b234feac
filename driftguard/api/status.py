"""GET /api/v1/status and a stream's acceptance over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from driftguard.api.actions import ActionModel, Place
from driftguard.api.context import Context, get_context
from driftguard.api.filters import StatusQuery, StreamId, refuse_repeated
from driftguard.api.openapi import example, problem
from driftguard.api.status_models import (
    FalseAlarms,
    FleetModel,
    LastIncident,
    LastRetrain,
    NowAndBaseline,
    ProbedModel,
    Rate,
    SegmentStatus,
    SourceModel,
    StatusAnswer,
    StreamInfo,
    StreamStatusModel,
    TokensPerSecond,
    UnrecordedModel,
)
from driftguard.errors import NotFound
from driftguard.incidents import aftermath
from driftguard.status import streams_in_service, unrecorded
from driftguard.status.gather import describe
from driftguard.status.stream_status import StreamStatus
from driftguard.status.verdict import Standing, standings
from driftguard.store import (
    announced_drafts,
    folding,
    incidents,
    scrape_leases,
    series,
    sources,
    status_queries,
    streams,
)
from driftguard.store.series import Bin
from driftguard.store.tables import Incident, Source, Stream
from driftguard_http.origins import url_of

router = APIRouter(prefix="/api/v1", tags=["status"])

MAX_SEGMENTS_IN_SERIES: Final = 12
_BIN_SECONDS: Final = (5, 10, 60, 300, 900, 3600, 21_600, 86_400)
_POINTS: Final = 240


class Point(BaseModel):
    at: datetime
    requests: int
    drafted: int
    accepted: int
    acceptance: float | None = Field(description="accepted / drafted; null where nothing was drafted.")


class Line(BaseModel):
    stream_id: int
    draft_version: str
    segment: str | None = Field(description="null: all segments together.")
    points: list[Point]


class ChangePoint(BaseModel):
    incident_id: UUID
    direction: str
    at: datetime
    interval: tuple[datetime, datetime]
    resolved_at: datetime | None


class Promotion(BaseModel):
    draft_version: str
    at: datetime


class AcceptanceSeries(BaseModel):
    """Acceptance of a stream and of the other drafts of the same server and target."""

    stream: StreamInfo
    since: datetime
    until: datetime
    bin_seconds: int
    lines: list[Line]
    segments_left_out: int = Field(description="Segments with the least traffic are not drawn.")
    change_points: list[ChangePoint]
    promotions: list[Promotion]


@router.get("/status", dependencies=[Depends(refuse_repeated)], responses=example("status"))
async def get_status(
    query: Annotated[StatusQuery, Query()], context: Annotated[Context, Depends(get_context)]
) -> StatusAnswer:
    """Tells the verdict of every stream and the servers that are scraped."""
    async with context.listing:
        return await run_in_threadpool(_status, query, context)


def _status(query: StatusQuery, context: Context) -> StatusAnswer:
    now = datetime.now(UTC)
    with context.database.session() as session:
        known, scraped = streams.all_streams(session), sources.all_sources(session)
        found = standings(session, now, known, scraped, context.usual_silences)
        return StatusAnswer(
            generated_at=now,
            unfolded_records=folding.unfolded(session),
            false_alarm_days=context.settings.detection.false_alarm_days,
            fleet=FleetModel.of(streams_in_service.gather(session, known), context.settings.detection),
            streams=models_of(session, now, found[: query.limit], Places.of(context, scraped)),
            streams_left_out=max(len(found) - query.limit, 0),
            sources=source_models(session, scraped),
            sources_elsewhere=list(context.sources_elsewhere()),
            unrecorded=[
                UnrecordedModel.model_validate(one)
                for one in unrecorded.of_servers(session, now)[: query.limit]
            ],
            probes=[ProbedModel.model_validate(one) for one in context.probed()],
        )


@router.get(
    "/streams/{stream_id}/acceptance",
    responses=example("acceptance") | problem(NotFound, "there is no stream 7"),
)
def get_acceptance(
    stream_id: Annotated[StreamId, Path()],
    context: Annotated[Context, Depends(get_context)],
    minutes: Annotated[int, Query(ge=1, le=527_040, description="How far to look back.")] = 60,
) -> AcceptanceSeries:
    """Tells the acceptance of a stream over time. Ratio of sums per bin of time, with change points and
    promotions. 404: no such stream."""
    with context.database.session() as session:
        stream = streams.get_stream(session, stream_id)
        if stream is None:
            raise NotFound(f"there is no stream {stream_id}")
        return _series(session, stream, datetime.now(UTC), minutes)


def _series(session: Session, stream: Stream, now: datetime, minutes: int) -> AcceptanceSeries:
    since = now - timedelta(minutes=minutes)
    related = [
        item for item in streams.of_server(session, stream.server, stream.target) if item.method != "none"
    ]
    ids = [item.id for item in related]
    width = bin_seconds(minutes)
    bins = series.bins(session, ids, since, now, width)
    lines, left_out = _lines(bins, {item.id: item.draft_version for item in related})
    return AcceptanceSeries(
        stream=StreamInfo.model_validate(stream),
        since=since,
        until=now,
        bin_seconds=width,
        lines=lines,
        segments_left_out=left_out,
        change_points=[
            ChangePoint(
                incident_id=incident.id,
                direction=incident.direction,
                at=incident.change_point_at,
                interval=(incident.interval_start_at, incident.interval_end_at),
                resolved_at=incident.resolved_at,
            )
            for incident in incidents.in_window(session, ids, since)
        ],
        promotions=[
            Promotion(draft_version=draft.version, at=draft.promoted_at)
            for draft in series.promotions(session, stream.server, stream.target, since)
            if draft.promoted_at
        ],
    )


def bin_seconds(minutes: int) -> int:
    """The smallest bin with which a line stays readable."""
    return next((width for width in _BIN_SECONDS if minutes * 60 / width <= _POINTS), _BIN_SECONDS[-1])


def _lines(bins: list[Bin], versions: dict[int, str]) -> tuple[list[Line], int]:
    traffic: dict[str, int] = defaultdict(int)
    for item in bins:
        traffic[item.segment] += item.drafted
    drawn = sorted(traffic, key=lambda segment: -traffic[segment])[:MAX_SEGMENTS_IN_SERIES]
    sums: dict[tuple[int, str | None], dict[datetime, list[int]]] = defaultdict(dict)
    for item in bins:
        segments = (None, item.segment) if item.segment in drawn else (None,)
        for segment in segments:
            total = sums[item.stream_id, segment].setdefault(item.at, [0, 0, 0])
            for place, count in enumerate((item.requests, item.drafted, item.accepted)):
                total[place] += count
    lines = [
        Line(
            stream_id=stream_id,
            draft_version=versions[stream_id],
            segment=segment,
            points=[_point(at, *counts) for at, counts in sorted(points.items())],
        )
        for (stream_id, segment), points in sums.items()
    ]
    return lines, len(traffic) - len(drawn)


def _point(at: datetime, requests: int, drafted: int, accepted: int) -> Point:
    rate = accepted / drafted if drafted else None
    return Point(at=at, requests=requests, drafted=drafted, accepted=accepted, acceptance=rate)


def models_of(
    session: Session, now: datetime, chosen: Sequence[Standing], places: Places | None = None
) -> list[StreamStatusModel]:
    """In their order. `places`: where an action is taken, as far as that is known."""
    present = status_queries.requests_per_day(session, now, [item.stream.id for item in chosen])
    at = places or Places()
    return [_stream_model(item, present.get(item.stream.id), at) for item in describe(session, now, chosen)]


@dataclass(frozen=True, slots=True)
class Places:
    """What is known of the servers: by name their serving engine, and those in the settings."""

    kinds: Mapping[str, str] = field(default_factory=dict)
    engines: Mapping[str, str | None] = field(default_factory=dict)  # -> address of a built-in engine
    sidecar: str | None = None

    @classmethod
    def of(cls, context: Context, scraped: Sequence[Source]) -> Places:
        settings = context.settings
        return cls(
            {source.server: source.kind for source in scraped},
            {engine.server: engine.admin_address for engine in settings.engines},
            settings.alerting.external_url or url_of(settings.host, settings.port),
        )

    def at(self, server: str, draft_version: str) -> Place:
        place = Place(
            server,
            draft_version,
            kind=self.kinds.get(server),
            engine=server in self.engines,
            admin_url=self.engines.get(server),
        )
        return replace(place, sidecar=self.sidecar) if self.sidecar is not None else place


def source_models(session: Session, scraped: Sequence[Source]) -> list[SourceModel]:
    sidecars = scrape_leases.sidecars(session)
    known = sources.versions(session, [source.server for source in scraped])
    announced = announced_drafts.awaited(session)
    return [
        SourceModel.of(
            source,
            sidecars.get(source.server),
            known[source.server].version if source.server in known else None,
            announced.get(source.server),
        )
        for source in scraped
    ]


def _last_incident(incident: Incident | None) -> LastIncident | None:
    found = aftermath.of(incident) if incident is not None else None
    if incident is None or incident.resolved_at is None or found is None:
        return None
    return LastIncident(id=incident.id, resolved_at=incident.resolved_at, aftermath=found)


def _stream_model(item: StreamStatus, present: float | None, places: Places) -> StreamStatusModel:
    """`present`: requests per day; None if only the detector's own measurement is known."""
    stream, summary = item.stream, item.summary
    measured = summary.requests_per_day if summary else 0.0
    per_day = present or measured or None
    return StreamStatusModel(
        **StreamInfo.model_validate(stream).model_dump(),
        verdict=item.verdict,
        acceptance_verdict=item.acceptance_verdict,
        text=item.text,
        since=item.since,
        in_service=item.in_service,
        draft_in_service=item.draft_in_service,
        acceptance=NowAndBaseline(now=Rate.of(item.now), baseline=Rate.of(item.baseline)),
        tokens_per_second=TokensPerSecond(
            now=item.tokens_per_second_now,
            baseline=item.tokens_per_second_baseline,
            cost_percent=item.cost_percent,
        ),
        sample_size=item.sample_size,
        requests_missing=item.requests_missing,
        incident_id=item.incident_id,
        last_retrain=LastRetrain.of(item.last_retrain),
        segments=[
            SegmentStatus.of(segment, measured / per_day if per_day else 1.0) for segment in item.segments
        ],
        cost=item.cost,
        cost_measured_at=item.cost_measured_at,
        speculation=item.speculation,
        last_incident=_last_incident(item.last_incident),
        actions=ActionModel.all_of(item.actions, places.at(stream.server, stream.draft_version)),
        first_seen_at=stream.first_seen_at,
        last_seen_at=stream.last_seen_at,
        records_in_other=stream.records_in_other,
        sessions=summary.sessions if summary else "no requests",
        windows_after_gap=summary.windows_after_gap if summary else 0,
        requests_per_day=per_day,
        false_alarms=FalseAlarms.of(summary, per_day) if summary else None,
    )
