"""The status page: rendered here, readable without JavaScript, nothing fetched from elsewhere."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Depends
from fastapi.responses import FileResponse, HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from driftguard.api.auth import is_loopback
from driftguard.api.context import Context, get_context
from driftguard.api.incidents import detail
from driftguard.api.models import IncidentModel
from driftguard.api.status import source_models, stream_models
from driftguard.detection.counting import SECONDS_PER_DAY
from driftguard.detection.findings import duration
from driftguard.errors import NotFound
from driftguard.store import detector_states, incidents

router = APIRouter(include_in_schema=False)

INCIDENTS_SHOWN: Final = 20
_HERE: Final = Path(__file__).parent
_CACHED: Final = {"Cache-Control": "public, max-age=3600"}
# Plotly sets styles on its elements; everything else comes from here or not at all.
_SECURITY: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@router.get("/")
def status_page(context: Annotated[Context, Depends(get_context)]) -> HTMLResponse:
    now = datetime.now(UTC)
    with context.database.session() as session:
        found = stream_models(session, now)
        newest = incidents.page(session, limit=INCIDENTS_SHOWN)
        return render(
            "status.html",
            now=now,
            serving=[item for item in found if item.in_service],
            replaced=[item for item in found if not item.in_service],
            incidents=[IncidentModel.of(*row) for row in newest],
            sources=source_models(session),
            unfolded=detector_states.unfolded(session),
            false_alarm_days=context.settings.detection.false_alarm_days,
        )


@router.get("/incidents/{incident_id}")
def incident_page(incident_id: UUID, context: Annotated[Context, Depends(get_context)]) -> HTMLResponse:
    """What the link in an alert opens."""
    with context.database.session() as session:
        return render(
            "incident.html",
            now=datetime.now(UTC),
            incident=detail(session, incident_id),
            key_needed=not is_loopback(context.settings.host),
        )


@router.get("/static/{name}")
def static_file(name: str) -> FileResponse:
    if name == "plotly.min.js":
        return FileResponse(_plotly(), headers=_CACHED)
    if name not in ("style.css", "page.js"):
        raise NotFound(f"/static/{name}: there is nothing here")
    return FileResponse(_HERE / "static" / name, headers={"Cache-Control": "no-cache"})


@cache
def _plotly() -> Path:
    """plotly.min.js of the installed package, found without importing it: the import costs memory."""
    spec = find_spec("plotly")
    places = spec.submodule_search_locations if spec else None
    for place in places or ():
        file = Path(place) / "package_data" / "plotly.min.js"
        if file.is_file():
            return file
    raise NotFound("plotly.min.js: the plotly package is not installed completely; the page has no chart")


def render(template: str, **values: object) -> HTMLResponse:
    """A page made of one of the templates."""
    return HTMLResponse(_environment().get_template(template).render(values), headers=_SECURITY)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(time=_time, rate=_rate, number=_number, words=_words, duration=_duration)
    return environment


def _time(at: datetime | None) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if at else "–"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _number(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:,.1f}{unit}"


def _duration(days: float) -> str:
    return duration(days * SECONDS_PER_DAY)


def _words(text: str) -> str:
    return text.replace("_", " ")
