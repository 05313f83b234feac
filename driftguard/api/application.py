"""The HTTP application without its context: every route, its errors and its OpenAPI document.

python -m driftguard.api.application > docs/openapi.json
"""

from __future__ import annotations

import json

from fastapi import FastAPI
from starlette.types import Lifespan

from driftguard.api import (
    acceptance_series,
    alert_rules,
    captures,
    drafts,
    health,
    held_streams,
    incidents,
    ingest_records,
    list_records,
    retraining,
    status,
    streams,
    unrecorded,
)
from driftguard.api.heads import HeadAsGet
from driftguard.api.openapi import install_openapi
from driftguard.api.otlp import routes as otlp
from driftguard.api.pages import dashboards, reference, runbooks
from driftguard.api.pages import routes as pages
from driftguard.api.pages.errors import install_page_handlers
from driftguard.api.problems import install_problem_handlers


def http_application(lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """The composition root sets `app.state.context` and `app.state.request_retraining`."""
    app = FastAPI(
        title="DriftGuard",
        version="1",
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # Swagger's page loads its scripts from a CDN; /docs is one of ours
        redoc_url=None,
        openapi_url="/api/v1/openapi.json",
        generate_unique_id_function=lambda route: route.name,
    )
    app.add_middleware(HeadAsGet)
    install_problem_handlers(app)
    install_page_handlers(app)
    for module in (
        ingest_records,
        list_records,
        captures,
        unrecorded,
        status,
        streams,
        acceptance_series,
        held_streams,
        incidents,
        drafts,
        retraining,
        otlp,
        health,
        alert_rules,
        dashboards,
        pages,
        runbooks,
        reference,
    ):
        app.include_router(module.router)
    install_openapi(app)
    return app


_DESCRIPTION = """\
Watches the acceptance of speculative decoding.

Lists are paginated: pass `next_cursor` as `cursor` for the next page of the list. `stream`, \
`segment`, `server`, `target`, `since` (inclusive) and `until` (exclusive) mean the same everywhere; an \
unknown parameter is refused. Every error is a problem document (RFC 9457) whose `detail` names what was \
wrong; errors of OTLP are a google.rpc.Status. \
On any other address than loopback, writing and captured text need an API key (`driftguard keys create`)."""


if __name__ == "__main__":
    print(json.dumps(http_application().openapi(), indent=2, ensure_ascii=False))
