"""/healthz: the process is alive. /readyz: it can do its work. /metrics: the metrics for Prometheus."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from driftguard.api.context import Context, get_context
from driftguard.api.openapi import example, problem
from driftguard.errors import DatabaseUnavailable, DriftGuardError
from driftguard.ingest.watch import LONGEST_WAIT_SECONDS
from driftguard.metrics import CONTENT_TYPE
from driftguard.status.fold_watch import STALLED_AFTER_SECONDS
from driftguard.store import folding
from driftguard.store.database import CHECK
from driftguard.store.folding import Lag

router = APIRouter(tags=["health"])

MAX_FOLD_LAG_RECORDS: Final = 1_000_000  # about a minute of the detector's work
READY_SECONDS: Final = 10.0
_CHECKING: Final = ThreadPoolExecutor(4, thread_name_prefix="readyz")


_EXPOSITION: Final = {
    "content": {
        "text/plain": {
            "schema": {"type": "string"},
            "example": "# HELP driftguard_draft_tokens_total Draft tokens offered to the target.\n"
            "# TYPE driftguard_draft_tokens_total counter\n",
        }
    }
}


class FoldBehind(DriftGuardError):
    """The detector is {lag} records behind; it is ready below {MAX_FOLD_LAG_RECORDS}."""

    status = 503
    title = "Detector behind"


class IngestStuck(DriftGuardError):
    """A batch has waited {seconds} s for its commit; it is ready below {LONGEST_WAIT_SECONDS}."""

    status = 503
    title = "Ingest stuck"


class FoldStopped(DriftGuardError):
    """No fold has succeeded for {STALLED_AFTER_SECONDS} s while records wait for the detector."""

    status = 503
    title = "Detector stopped"


class ScrapingStopped(DriftGuardError):
    """No sidecar scrapes {servers}; this one needs a restart."""

    status = 503
    title = "Scraping stopped"


class Health(BaseModel):
    status: str = Field(examples=["ok"])


class Readiness(BaseModel):
    status: str = Field(examples=["ready"])
    database: str = Field(examples=["reachable, schema up to date"])
    fold_lag_records: int = Field(description="Stored records not yet folded by the detector.", examples=[0])


@router.get("/healthz", responses=example("alive"))
async def healthz() -> Health:
    """Says that the process is alive. 200 as long as it is; nothing else is checked, no thread waited for."""
    return Health(status="ok")


@router.get(
    "/readyz",
    responses=example("ready")
    | problem(DatabaseUnavailable, "database 'driftguard' at db.internal:5432: connection refused"),
)
async def readyz(context: Annotated[Context, Depends(get_context)]) -> Readiness:
    """Says whether the sidecar can work. 503 while the database is unreachable or read-only, or its schema
    does not fit, a batch has waited too long, the detector is far behind or has folded nothing for a minute
    while records wait, or the sidecar has stopped scraping. Sources that do not answer have metrics of their
    own. The answer comes within 10 seconds in any case."""
    # Not on the threads of requests, which may all be waiting for the database.
    checking = asyncio.get_running_loop().run_in_executor(_CHECKING, _check, context)
    try:
        return await asyncio.wait_for(checking, READY_SECONDS)
    except TimeoutError:
        place = context.database.place
        raise DatabaseUnavailable(f"{place}: not answered within {READY_SECONDS:g} s") from None


def _check(context: Context) -> Readiness:
    if (waited := context.ingest.oldest_unacknowledged_seconds()) > LONGEST_WAIT_SECONDS:
        raise IngestStuck(
            f"a batch has waited {waited:.0f} s for its commit; it is ready below {LONGEST_WAIT_SECONDS:g} s"
        )
    context.database.check_schema()
    with context.database.session(CHECK) as session:
        lag = folding.lag(session)
    _check_fold(context, lag)
    if overdue := context.overdue_sources(datetime.now(UTC)):
        raise ScrapingStopped(f"no sidecar scrapes {', '.join(overdue[:3])}; {len(overdue)} servers in all")
    return Readiness(status="ready", database="reachable, schema up to date", fold_lag_records=lag.records)


def _check_fold(context: Context, lag: Lag) -> None:
    """Records of held streams are not counted: the verdict shows those, and the other streams are still
    watched."""
    if lag.unread > MAX_FOLD_LAG_RECORDS:
        raise FoldBehind(
            f"the detector is {lag.unread} records behind; it is ready below {MAX_FOLD_LAG_RECORDS}"
        )
    seconds = context.fold_watch.seconds_without_fold(lag.position, lag.unread)
    if seconds >= STALLED_AFTER_SECONDS:
        since = datetime.now(UTC) - timedelta(seconds=seconds)
        raise FoldStopped(
            f"no fold has succeeded since {since:%F %T} UTC ({seconds:.0f} s) although {lag.unread} records "
            "wait; the log gives the reason",
            since=since.isoformat(timespec="seconds"),
        )


@router.get("/metrics", response_class=PlainTextResponse, responses={200: _EXPOSITION})
async def metrics(context: Annotated[Context, Depends(get_context)]) -> Response:
    """Shows the metrics, for Prometheus."""
    # One at a time: many computing threads starve the event loop, and delay /healthz.
    async with context.exposing:
        text = await run_in_threadpool(context.metrics.exposition)
    return Response(text, media_type=CONTENT_TYPE)
