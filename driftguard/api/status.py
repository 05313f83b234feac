"""GET /api/v1/status."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.orm import Session

from driftguard.api.actions import ActionModel, Place
from driftguard.api.context import Context, get_context
from driftguard.api.filters import StatusQuery, refuse_repeated
from driftguard.api.openapi import example
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
from driftguard.incidents import aftermath
from driftguard.retraining.engines.candidate_kind import torch_version
from driftguard.settings import Settings
from driftguard.status import streams_in_service, unrecorded
from driftguard.status.gather import describe
from driftguard.status.stream_status import StreamStatus
from driftguard.status.verdict import Standing, standings
from driftguard.store import (
    announced_drafts,
    folding,
    scrape_leases,
    sources,
    status_queries,
    streams,
)
from driftguard.store.tables import Incident, Source
from driftguard_http.origins import is_loopback, url_of

router = APIRouter(prefix="/api/v1", tags=["status"])


@router.get("/status", dependencies=[Depends(refuse_repeated)], responses=example("status"))
async def get_status(
    query: Annotated[StatusQuery, Query()],
    context: Annotated[Context, Depends(get_context)],
    request: Request,
) -> StatusAnswer:
    """Tells the verdict of every stream and the servers that are scraped."""
    async with context.listing.taken(request):
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
            sources=source_models(session, scraped, now),
            sources_elsewhere=list(context.sources_elsewhere()),
            unrecorded=[
                UnrecordedModel.model_validate(one)
                for one in unrecorded.of_servers(session, now)[: query.limit]
            ],
            probes=[ProbedModel.model_validate(one) for one in context.probed()],
        )


def models_of(
    session: Session, now: datetime, chosen: Sequence[Standing], places: Places | None = None
) -> list[StreamStatusModel]:
    """In their order. `places`: where an action is taken, as far as that is known."""
    present = status_queries.requests_per_day(session, now, [item.stream.id for item in chosen])
    at = places or Places()
    return [_stream_model(item, present.get(item.stream.id), at) for item in describe(session, now, chosen)]


@dataclass(frozen=True, slots=True)
class Places:
    """What is known of the servers: by name their serving engine, and those in the settings. `keyed`: of
    these, the ones with a key. The others as in Place."""

    kinds: Mapping[str, str] = field(default_factory=dict)
    engines: Mapping[str, str | None] = field(default_factory=dict)  # -> address of a built-in engine
    keyed: Collection[str] = ()
    sidecar: str | None = None
    sidecar_key: bool = False
    has_torch: bool = True
    cluster_of: Callable[[str], str | None] = lambda _: None

    @classmethod
    def of(cls, context: Context, scraped: Sequence[Source]) -> Places:
        settings = context.settings
        return cls(
            kinds={source.server: source.kind for source in scraped},
            engines={engine.server: engine.admin_address for engine in settings.engines},
            keyed={engine.server for engine in settings.engines if engine.api_key is not None},
            sidecar=settings.alerting.external_url or url_of(settings.host, settings.port),
            sidecar_key=is_key_needed(settings),
            has_torch=torch_version() is not None,
            cluster_of=settings.cluster_of,
        )

    def at(self, server: str, draft_version: str) -> Place:
        place = Place(
            server,
            draft_version,
            kind=self.kinds.get(server),
            engine=server in self.engines,
            admin_url=self.engines.get(server),
            engine_key=server in self.keyed,
            sidecar_key=self.sidecar_key,
            has_torch=self.has_torch,
        )
        return replace(place, sidecar=self.sidecar) if self.sidecar is not None else place


def is_key_needed(settings: Settings) -> bool:
    """At the address under which people reach this sidecar (see auth.is_open): another one than that to which
    it is bound is of a reverse proxy, whose requests need a key on loopback too."""
    if not is_loopback(settings.host):
        return True
    if (external := settings.alerting.external_url) is None:
        return False
    parts = urlsplit(external)
    return not is_loopback(parts.hostname or "") or parts.port != settings.port


def source_models(session: Session, scraped: Sequence[Source], now: datetime) -> list[SourceModel]:
    sidecars = scrape_leases.sidecars(session)
    # Scrapes are dated by the clock of whoever scrapes, which may be another one than that of `now`.
    unread = [source.server for source in scraped if sources.is_unread(source, now)]
    unread_servers = {*unread} - scrape_leases.scraped_now(session, unread) if unread else set[str]()
    known = sources.versions(session, [source.server for source in scraped])
    announced = announced_drafts.awaited(session)
    return [
        SourceModel.of(
            source,
            sidecars.get(source.server),
            known[source.server].version if source.server in known else None,
            announced.get(source.server),
            is_unread=source.server in unread_servers,
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
        cluster=places.cluster_of(stream.server),
        verdict=item.verdict,
        acceptance_verdict=item.acceptance_verdict,
        text=item.text,
        since=item.since,
        in_service=item.in_service,
        draft_in_service=item.draft_in_service,
        acceptance=NowAndBaseline(now=Rate.of(item.now), baseline=Rate.of(item.baseline)),
        acceptance_length=item.acceptance_length,
        acceptance_per_position=list(item.acceptance_per_position),
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
        false_alarms=FalseAlarms.of(summary, per_day, item.unit) if summary else None,
    )
