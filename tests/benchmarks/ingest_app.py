"""The smallest app that takes records: uvicorn's factory for the ingest benchmark and the crash test."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from fastapi import FastAPI

from driftguard.api import captures, ingest_records, unrecorded
from driftguard.api.context import Context
from driftguard.api.guarding import install_guard
from driftguard.api.problems import install_problem_handlers
from driftguard.ingest.queue import IngestQueue
from driftguard.metrics import Metrics
from driftguard.settings import Settings
from driftguard.settings.loading import load_settings
from driftguard.sources.otlp_push import PushedSources
from driftguard.store.database import Database
from driftguard.store.retention import maintain


def create_app() -> FastAPI:
    """Settings come from the environment, the database from DRIFTGUARD_DATABASE_URL."""
    return ingest_app(load_settings(), os.environ["DRIFTGUARD_DATABASE_URL"])


def ingest_app(settings: Settings, url: str) -> FastAPI:
    database = Database.open(url)
    metrics = Metrics()
    limits = settings.ingest
    queue = IngestQueue(
        database,
        max_queued_records=limits.max_queued_records,
        max_streams=limits.max_streams,
        metrics=metrics,
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        maintain(database, datetime.now(UTC), settings.retention)
        queue.start()
        yield
        queue.stop()
        database.close()

    app = FastAPI(lifespan=lifespan)
    pushed = PushedSources(database, queue.submit, metrics, ())
    app.state.context = Context(
        settings=settings, database=database, ingest=queue, metrics=metrics, pushed=pushed
    )
    install_guard(app, app.state.context)
    app.include_router(ingest_records.router)
    app.include_router(captures.router)
    app.include_router(unrecorded.router)
    install_problem_handlers(app)
    return app
