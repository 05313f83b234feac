"""The web pages: rendered here, readable without JavaScript, nothing loaded from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode
from uuid import UUID

import msgspec
import structlog
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, HTMLResponse
from pydantic import AfterValidator, BaseModel, Field
from sqlalchemy.orm import Session

from driftguard.api.auth import is_open
from driftguard.api.context import Context, get_context
from driftguard.api.cursors import encode_cursor
from driftguard.api.drafts import DraftModel
from driftguard.api.filters import StreamId, without_nul
from driftguard.api.incident_models import IncidentModel
from driftguard.api.incidents import detail
from driftguard.api.pages.errors import PageRoute
from driftguard.api.pages.rendering import render
from driftguard.api.pages.timeline import timeline
from driftguard.api.retraining import RunModel, get_retrain_run
from driftguard.api.status import Places, models_of, source_models
from driftguard.api.status_models import Rate, StreamStatusModel
from driftguard.api.streams import decode, matching
from driftguard.errors import NotFound
from driftguard.metrics.labels import StreamVerdict
from driftguard.records.documents.retraining_run import TrainingCurve
from driftguard.retraining.engines.candidate_kind import retraining_elsewhere, torch_version
from driftguard.retraining.promotion.watch import against
from driftguard.settings.shown import shown
from driftguard.status import stream_list, unrecorded
from driftguard.status.stream_list import Choice, Order
from driftguard.status.verdict import WORST_FIRST, Standing, standings
from driftguard.store import drafts, folding, incidents, retrain_runs, sources, streams
from driftguard.store.keys import list_keys
from driftguard.store.row_filter import RowFilter

router = APIRouter(include_in_schema=False, route_class=PageRoute)
AnyContext = Annotated[Context, Depends(get_context)]

STREAMS_SHOWN: Final = 100  # on a page
STREAMS_ON_WALL: Final = 500
SHOWN: Final = 20  # incidents or drafts on a page; the API has the rest
RUNS_SHOWN: Final = 50
_ALARMING: Final = ("degraded", "cannot_be_judged", "stale", "drafting_stopped", "speculation_loses")
_WORDS: Final = {
    "speculation_loses": "slower with speculation"
}  # of verdicts that do not follow "of 5 streams"
_ORDERS: Final[Mapping[Order, str]] = {
    "verdict": "the worst first",
    "cost": "the largest cost first",
    "last_seen": "the newest record first",
    "server": "by name",
}
_HERE: Final = Path(__file__).parent
_CACHED: Final = {"Cache-Control": "public, max-age=3600"}
_CHECKED: Final = {"Cache-Control": "no-cache"}
_STATIC: Final = ("style.css", "page.js", "plot.js", "chart.js", "curve.js")
_UPLOT: Final = ("uPlot.js", "uPlot.css", "uPlot.LICENSE.txt")  # the build brings them
log = structlog.get_logger(__name__)


class FleetQuery(BaseModel):
    """The fields of the search form; browsers send empty fields too."""

    q: Annotated[str, AfterValidator(without_nul)] = Field("", max_length=256)
    verdict: Literal[StreamVerdict, ""] = ""
    sort: Order = "verdict"
    group: Literal["", "target", "server", "cluster"] = ""
    view: Literal["", "wall"] = ""
    cursor: str = ""

    @property
    def narrowed(self) -> bool:
        """Whether the page is another than at first."""
        return self != FleetQuery(cursor=self.cursor)


@router.get("/")
async def fleet_page(
    query: Annotated[FleetQuery, Query()], context: AnyContext, request: Request
) -> HTMLResponse:
    """The streams in a sentence each, the worst first."""
    async with context.listing.taken(request):
        return await run_in_threadpool(_fleet, query, context, request)


def _fleet(query: FleetQuery, context: Context, request: Request) -> HTMLResponse:
    now = datetime.now(UTC)
    with context.database.session() as session:
        scraped = sources.all_sources(session)
        found = standings(session, now, scraped=scraped, usual=context.usual_silences)
        serving = [item for item in found if _is_watched(item)]
        unresolved = incidents.list_page(session, limit=RUNS_SHOWN, state="unresolved")
        open_in_all = incidents.count_unresolved(session)
        return render(
            request,
            "fleet.html",
            headline=headline(serving, known=len(found), unresolved=open_in_all),
            worst=serving[0].verdict if serving else "",
            verdicts=Counter(item.verdict for item in serving),
            query=query,
            worst_first=WORST_FIRST,
            orders=_ORDERS,
            groupings=("", "target", "server", *(["cluster"] if context.settings.clusters else [])),
            **_shown(session, now, found, query, Places.of(context, scraped)),
            unresolved=[IncidentModel.of(*row) for row in unresolved],
            open_in_all=open_in_all,
            resolved=[
                IncidentModel.of(*row) for row in incidents.list_page(session, limit=SHOWN, state="resolved")
            ],
            running=_runs(session, "running"),
            sources=source_models(session, scraped, now),
            elsewhere=context.sources_elsewhere(),
            probes=context.probed(),
            unrecorded=[
                one.text for one in unrecorded.of_servers(session, now) if not one.recorded and one.text
            ],
            unfolded=folding.unfolded(session),
        )


def _shown(
    session: Session, now: datetime, found: list[Standing], query: FleetQuery, places: Places
) -> dict[str, Any]:
    """Of the matching streams: one page of the watched ones, and the first of the others."""
    choice = Choice(text=query.q or None, verdict=query.verdict or None)
    chosen = matching(session, found, choice)
    watched = [item for item in chosen if _is_watched(item)]
    others = [item for item in chosen if not _is_watched(item)]
    after = decode(query.cursor, query.sort)
    most = STREAMS_ON_WALL if query.view == "wall" else STREAMS_SHOWN
    page, last = stream_list.page(watched, query.sort, most, after)
    models = models_of(session, now, [*page, *others[:STREAMS_SHOWN]], places)
    return {
        "total": len(found),
        "matching": len(watched),
        "serving": models[: len(page)],
        "groups": _groups(models[: len(page)], query.group),
        "next_page": f"?{urlencode({**query.model_dump(), 'cursor': encode_cursor(last)})}" if last else None,
        "others": len(others),
        "unwatched": models[len(page) :],
    }


def _groups(shown: Sequence[StreamStatusModel], by: str) -> list[tuple[str, list[StreamStatusModel]]]:
    """By the name of the target, server or cluster, in the order of their first streams; one without a name:
    all."""
    groups: dict[str, list[StreamStatusModel]] = {}
    for stream in shown:
        groups.setdefault((getattr(stream, by) or "in no cluster") if by else "", []).append(stream)
    return list(groups.items())


@router.get("/streams/{stream_id}")
def stream_page(stream_id: StreamId, context: AnyContext, request: Request) -> HTMLResponse:
    """One stream in full: its numbers, its segments, its cost, its drafts."""
    with context.database.session() as session:
        stream = streams.get_stream(session, stream_id)
        if stream is None:
            raise NotFound(f"there is no stream {stream_id}")
        scraped = sources.all_sources(session)
        now, known = datetime.now(UTC), streams.of_server(session, stream.server)
        found = standings(session, now, known, scraped, context.usual_silences)
        of_target = [item for item in found if item.stream.target == stream.target]
        related = models_of(session, now, of_target, Places.of(context, scraped))
        shown = next(item for item in related if item.id == stream_id)
        servers = source_models(session, scraped, now)
        history = _drafts(session, stream.server, stream.target)
        newest = incidents.list_page(session, limit=SHOWN, wanted=RowFilter(streams=[stream_id]))
        return render(
            request,
            "stream.html",
            stream=shown,
            related=related,
            baselines={
                "": _level(shown.acceptance.baseline),
                **{segment.segment: _level(segment.baseline) for segment in shown.segments},
            },
            incident=detail(session, shown.incident_id, context) if shown.incident_id else None,
            incidents=[IncidentModel.of(*row) for row in newest],
            drafts=history,
            runs=_runs_of(session, history),
            source=next((item for item in servers if item.server == stream.server), None),
            false_alarm_days=context.settings.detection.false_alarm_days,
            held=folding.find_held(session, stream_id),
            **_deciding(request, session, stream.server, stream.target),
        )


@router.get("/incidents/{incident_id}")
def incident_page(incident_id: UUID, context: AnyContext, request: Request) -> HTMLResponse:
    """The web page of an incident, to which the link in an alert leads."""
    with context.database.session() as session:
        incident = detail(session, incident_id, context)
        runs = [RunModel.model_validate(run) for run in retrain_runs.of_incident(session, incident_id)]
        made = drafts.of_runs(session, [run.id for run in runs])
        return render(
            request,
            "incident.html",
            timeline=timeline(incident, runs, [DraftModel.model_validate(draft) for draft in made]),
            incident=incident,
            baselines={
                segment.segment: asdict(segment.before) if segment.after.positions == "all" else None
                for segment in incident.segments
            },
            runs=runs,
            **_deciding(request, session, incident.stream.server, incident.stream.target),
        )


@router.get("/retraining")
def retraining_page(context: AnyContext, request: Request) -> HTMLResponse:
    """The retrainings that run, however long ago they began, and the newest that have ended."""
    with context.database.session() as session:
        ended = [run for run in _runs(session) if run.ended_at is not None]
        return render(request, "retraining.html", runs=[*_runs(session, "running"), *ended])


@router.get("/retraining/{run_id}")
def run_page(run_id: UUID, context: AnyContext, request: Request) -> HTMLResponse:
    """One retraining: its progress, the gate's decision, the state of the watch."""
    run = get_retrain_run(run_id, context)
    curve = msgspec.to_builtins(run.curve or TrainingCurve())
    return render(request, "run.html", run=run, curve=curve, against=against)


@router.get("/configuration")
def configuration_page(context: AnyContext, request: Request) -> HTMLResponse:
    """The settings, with their secrets masked, and the names of the keys."""
    with context.database.session() as session:
        return render(
            request,
            "configuration.html",
            settings=[*shown(context.settings)],
            keys=list_keys(session),
            version=version("driftguard-llm"),
        )


@router.get("/static/{name}")
def static_file(name: str, if_none_match: Annotated[str, Header(include_in_schema=False)] = "") -> Response:
    """Its ETag is weak: it is the same with and without compression. 304: the browser already has the
    file."""
    if name not in _STATIC and name not in _UPLOT:
        raise NotFound(f"/static/{name}: not found")
    path, headers = _HERE / "static" / name, _CACHED if name in _UPLOT else _CHECKED
    if not path.is_file():
        log.error("a file of the pages is missing, so that they have no charts", file=str(path))
        raise NotFound(f"{name}: this installation of DriftGuard is not complete; install it again")
    file = FileResponse(path, headers=headers, stat_result=path.stat())
    tag = file.headers["etag"]
    file.headers["etag"] = f"W/{tag}"
    known = {each.strip().removeprefix("W/") for each in if_none_match.split(",")}
    if known & {tag, "*"}:
        return Response(status_code=304, headers={**headers, "ETag": f"W/{tag}", "Vary": "Accept-Encoding"})
    return file


def _is_watched(item: Standing) -> bool:
    return item.in_service and item.stream.method != "none"


def headline(serving: Sequence[Standing], known: int, unresolved: int = 0) -> str:
    """The state of the fleet in one line: 1 of 5 streams degraded, 1 stale. `known`: streams of any kind.
    `unresolved`: incidents, which may be of streams that are no longer in service, and go on paging."""
    counts = Counter(item.verdict for item in serving)
    of_all = f"of {len(serving)} stream{'' if len(serving) == 1 else 's'}"
    alarming = [
        (counts[verdict], _WORDS.get(verdict, verdict.replace("_", " ")))
        for verdict in _ALARMING
        if counts[verdict]
    ]
    if not serving:
        return "No stream with speculation is in service" if known else "No records yet"
    if not alarming:
        alarm = f"{unresolved} open incident{'' if unresolved == 1 else 's'}" if unresolved else "No alarm"
        return f"{alarm}: {counts['steady']} {of_all} steady"
    (first, verdict), *rest = alarming
    return ", ".join([f"{first} {of_all} {verdict}", *(f"{count} {name}" for count, name in rest)])


def _runs(session: Session, state: str | None = None) -> list[RunModel]:
    found = retrain_runs.list_page(session, limit=RUNS_SHOWN, state=state)
    return [RunModel.model_validate(run) for run in found]


def _drafts(session: Session, server: str, target: str) -> list[DraftModel]:
    found = drafts.list_page(session, limit=SHOWN, wanted=RowFilter(server=server, target=target))
    return [DraftModel.model_validate(row) for row in found]


def _runs_of(session: Session, made: Sequence[DraftModel]) -> dict[UUID, RunModel]:
    """The runs that made these drafts."""
    found = [retrain_runs.find(session, draft.retrain_run_id) for draft in made if draft.retrain_run_id]
    return {run.id: RunModel.model_validate(run) for run in found if run is not None}


def _level(rate: Rate | None) -> dict[str, Any] | None:
    """A baseline for the chart; None unless it is of all draft positions, which the chart draws."""
    return rate.model_dump() if rate and rate.positions == "all" else None


def _deciding(request: Request, session: Session, server: str, target: str) -> dict[str, Any]:
    """Values for the buttons: whether a key is needed, whether there is an engine, the target of a rollback,
    and the command that takes the place of a retraining here."""
    settings = get_context(request).settings
    serving = drafts.in_service(session, server, target)
    parent = serving.parent_version if serving else None
    return {
        "key_needed": not is_open(request.scope, settings.host),
        "has_engine": any(engine.server == server for engine in settings.engines),
        "in_service": serving.version if serving else None,
        "rollback_to": drafts.rollback_of(session, server, target, parent),
        "elsewhere": retraining_elsewhere(server, force=True) if torch_version() is None else None,
    }
