"""A sidecar with something of everything that an operator asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import httpx

from driftguard.store import drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import RetrainRun
from tests.alerting.http_receiver import wait_until
from tests.alerting.incident_rows import add_incident
from tests.pipeline.sidecar import post, running_sidecar
from tests.pipeline.traffic import Traffic
from tests.retraining.curves import curve_of

RUN = UUID("0192f0c1-9a1e-7d44-8f0a-3c1d2e4f5a6b")


@contextmanager
def operated_sidecar(database: Database, data_dir: Path) -> Iterator[tuple[httpx.Client, UUID]]:
    """Its client, and the id of its incident: a fall of one server, two candidates of another, their run."""
    now = datetime.now(UTC)
    incident_id = add_incident(database, [])
    with database.session() as session:
        run = RetrainRun(
            id=RUN, server="server-1", target="target", trigger="nightly", state="rejected",
            reason="no better on held-out traffic", started_at=now - timedelta(minutes=9), ended_at=now,
        )  # fmt: skip
        retrain_runs.begin(session, run)
        curve = curve_of([(10, 2.0), (20, 1.5)], [(0, 0.3), (20, 0.6)], now)
        retrain_runs.set_progress(session, RUN, None, curve)
        for version in ("v1", "v2"):
            drafts.add_candidate(
                session, server="server-1", target="target", version=version, method="draft_model",
                directory=f"/drafts/{version}", parent_version="v0", run_id=RUN, at=now,
            )  # fmt: skip
        drafts.reject(session, "server-1", "target", "v1", now)
    with running_sidecar(database, data_dir) as client:
        post(client, Traffic(seed=91).draw(12, {"[chat]": 0.75, "code": 0.6}))
        wait_until(lambda: client.get("/api/v1/status").json()["unfolded_records"] == 0, "the fold")
        yield client, incident_id
