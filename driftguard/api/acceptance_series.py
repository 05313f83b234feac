"""A stream's acceptance over time, with what happened meanwhile: for charts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Self
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query
from pydantic import BaseModel, ConfigDict, Field, model_validator
from sqlalchemy.orm import Session

from driftguard.api.context import Context, get_context
from driftguard.api.filters import Segments, StreamId, TimeRange, refuse_repeated
from driftguard.api.openapi import example, problem
from driftguard.api.status_models import StreamInfo
from driftguard.errors import BadInput, NotFound
from driftguard.settings import RetentionSettings
from driftguard.store import incidents, series, streams
from driftguard.store.rollup_tiers import coarsest
from driftguard.store.series import Bin
from driftguard.store.tables import Stream

router = APIRouter(prefix="/api/v1", tags=["status"])

MAX_SEGMENTS_IN_SERIES: Final = 12
LONGEST: Final = timedelta(minutes=527_040)
_YEARS: Final = range(1970, 9999)  # next to the first and the last of all years times cannot be computed with
_BIN_SECONDS: Final = (5, 10, 60, 300, 900, 3600, 21_600, 86_400)
_POINTS: Final = 240
_DIGITS: Final = 6  # of ratios: more are of no use, and are most of the answer


class Point(BaseModel):
    """Sums over the records that ended in this bin, and their ratios."""

    at: datetime
    requests: int
    steps: int
    drafted: int
    accepted: int
    emitted: int
    acceptance: float | None = Field(description="accepted / drafted; null where nothing was drafted.")
    acceptance_length: float | None = Field(
        description="emitted / steps: tokens per verification step; null where there was no step."
    )
    acceptance_per_position: list[float | None] = Field(
        description="At the first 16 positions of a draft: accepted / drafted there, or accepted / steps "
        "where the records do not tell how many were drafted there. Empty where they tell no positions."
    )
    tokens_per_second: float | None = Field(
        description="Of one request while decoding: requests / sum of their times per output token; null "
        "where no record gives that time."
    )


class Line(BaseModel):
    stream_id: int
    draft_version: str
    segment: str | None = Field(description="null: all segments together.")
    points: list[Point]


class ChangePoint(BaseModel):
    """Of an incident that was not resolved before `since`."""

    incident_id: UUID
    direction: str
    at: datetime
    interval: tuple[datetime, datetime]
    opened_at: datetime
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
    segments_left_out: int = Field(
        description="Segments that have no line: those with the least traffic, or all but those asked for."
    )
    change_points: list[ChangePoint]
    promotions: list[Promotion]
    server_starts: list[datetime] = Field(
        description="When the server's process started, where its metrics tell that."
    )


class SeriesQuery(TimeRange, Segments):
    """Without `segment` the segments with the most traffic have lines of their own."""

    model_config = ConfigDict(extra="forbid")
    minutes: int | None = Field(
        None,
        ge=1,
        le=LONGEST // timedelta(minutes=1),
        description="How far to look back, instead of `since` and `until`; 60.",
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.minutes is not None and (self.since is not None or self.until is not None):
            raise ValueError("minutes: give either minutes, or since and until")
        return self

    def span(self, now: datetime) -> tuple[datetime, datetime]:
        """Raises BadInput where it holds no time, or too much, or lies in no year that can be counted in."""
        for name, moment in (("since", self.since), ("until", self.until)):
            if moment is not None and moment.year not in _YEARS:
                told = f"{name}: {moment.isoformat()} is not in the years {_YEARS[0]} to {_YEARS[-1]}"
                raise BadInput(told, field=name)
        until = self.until or now
        since = self.since or until - timedelta(minutes=self.minutes or 60)
        if since >= until:
            raise BadInput(f"since: {since.isoformat()} is not before {until.isoformat()}", field="since")
        if until - since > LONGEST:
            raise BadInput(f"since: at most {LONGEST.days} days can be asked for", field="since")
        return since, until


@router.get(
    "/streams/{stream_id}/acceptance",
    dependencies=[Depends(refuse_repeated)],
    responses=example("acceptance") | problem(NotFound, "there is no stream 7"),
)
def get_acceptance(
    stream_id: Annotated[StreamId, Path()],
    query: Annotated[SeriesQuery, Query()],
    context: Annotated[Context, Depends(get_context)],
) -> AcceptanceSeries:
    """Tells the acceptance of a stream over time. Sums per bin of time and their ratios, with change points,
    promotions and restarts of the server. 404: no such stream.
    """
    now = datetime.now(UTC)
    since, until = query.span(now)
    width = bin_seconds(since, until, now, context.settings.retention)
    with context.database.session() as session:
        stream = streams.get_stream(session, stream_id)
        if stream is None:
            raise NotFound(f"there is no stream {stream_id}")
        return _series(session, stream, since, until, width, query.segment)


def bin_seconds(since: datetime, until: datetime, now: datetime, retention: RetentionSettings) -> int:
    """The smallest bin with which a line stays readable, and for which everything since then is kept."""
    seconds = (until - since).total_seconds()
    for width in _BIN_SECONDS:
        tier = coarsest(width)
        kept = tier.kept_since(now, retention) if tier else now - timedelta(days=retention.records_days)
        if seconds / width <= _POINTS and since >= kept:
            return width
    return _BIN_SECONDS[-1]


def _series(
    session: Session, stream: Stream, since: datetime, until: datetime, width: int, wanted: Sequence[str]
) -> AcceptanceSeries:
    related = [
        item for item in streams.of_server(session, stream.server, stream.target) if item.method != "none"
    ]
    ids = [item.id for item in related]
    bins = series.bins(session, ids, since, until, width)
    lines, left_out = _lines(bins, {item.id: item.draft_version for item in related}, wanted)
    return AcceptanceSeries(
        stream=StreamInfo.model_validate(stream),
        since=since,
        until=until,
        bin_seconds=width,
        lines=lines,
        segments_left_out=left_out,
        change_points=[
            ChangePoint(
                incident_id=incident.id,
                direction=incident.direction,
                at=incident.change_point_at,
                interval=(incident.interval_start_at, incident.interval_end_at),
                opened_at=incident.opened_at,
                resolved_at=incident.resolved_at,
            )
            for incident in incidents.in_window(session, ids, since, until)
        ],
        promotions=[
            Promotion(draft_version=draft.version, at=draft.promoted_at)
            for draft in series.promotions(session, stream.server, stream.target, since)
            if draft.promoted_at and draft.promoted_at < until
        ],
        server_starts=series.server_starts(session, stream.server, since, until),
    )


def _lines(bins: Sequence[Bin], versions: dict[int, str], wanted: Sequence[str]) -> tuple[list[Line], int]:
    traffic: dict[str, int] = defaultdict(int)
    for item in bins:
        traffic[item.segment] += item.drafted
    most = sorted(traffic, key=lambda segment: -traffic[segment])[:MAX_SEGMENTS_IN_SERIES]
    drawn = traffic.keys() & set(wanted) if wanted else set(most)
    parts: dict[tuple[int, str | None], dict[datetime, list[Bin]]] = defaultdict(lambda: defaultdict(list))
    for item in bins:
        for segment in (None, item.segment) if item.segment in drawn else (None,):
            parts[item.stream_id, segment][item.at].append(item)
    lines = [
        Line(
            stream_id=stream_id,
            draft_version=versions[stream_id],
            segment=segment,
            points=[_point(at, together) for at, together in sorted(points.items())],
        )
        for (stream_id, segment), points in parts.items()
    ]
    return lines, len(traffic) - len(drawn)


def _point(at: datetime, bins: Sequence[Bin]) -> Point:
    """Of all of them together."""
    steps, drafted, accepted, emitted = (
        sum(getattr(item, name) for item in bins) for name in ("steps", "drafted", "accepted", "emitted")
    )
    positions: dict[int, tuple[int, int]] = {}
    for item in bins:
        for place, (offered, kept) in enumerate(item.positions):
            before = positions.get(place, (0, 0))
            positions[place] = (before[0] + offered, before[1] + kept)
    return Point(
        at=at,
        requests=sum(item.requests for item in bins),
        steps=steps,
        drafted=drafted,
        accepted=accepted,
        emitted=emitted,
        acceptance=_ratio(accepted, drafted),
        acceptance_length=_ratio(emitted, steps),
        acceptance_per_position=[_ratio(kept, offered) for offered, kept in positions.values()],
        tokens_per_second=_ratio(
            sum(item.timed for item in bins), sum(item.seconds_per_token for item in bins)
        ),
    )


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, _DIGITS) if whole else None
