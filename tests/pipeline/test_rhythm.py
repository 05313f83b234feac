"""A daily rhythm in the detector loop: learned over restarts, and said in what the status is made of."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from driftguard.detection import DetectorConfig
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.store.database import Database
from tests.cli.test_main import driftguard
from tests.pipeline.sidecar import running_sidecar
from tests.pipeline.traffic import Traffic, store

PER_HOUR = 25


def test_acceptance_by_the_hour_is_learned_and_told(database: Database, tmp_path: Path) -> None:
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    traffic = Traffic(5, midnight - timedelta(days=5), seconds_apart=3_600.0 / PER_HOUR)
    for _ in range(5):
        for hour in range(24):
            rate = 0.6 + 0.12 * math.sin(2.0 * math.pi * hour / 24.0)
            store(database, traffic.draw(PER_HOUR, {"code": rate}))
        while Pipeline(database, DetectorConfig(), Metrics()).fold_batch():  # as after a restart
            pass
    with running_sidecar(database, tmp_path) as client:
        (stream,) = client.get("/api/v1/status").json()["streams"]
        (segment,) = stream["segments"]
        (follows,) = segment["follows"]
        assert (follows["factor"], follows["by"]) == ("day", pytest.approx(0.12, abs=0.04))
        told = f"depends on the hour of day, by {follows['by']:.2f} either way"
        assert told in client.get(f"/streams/{stream['id']}").text
        status = driftguard("status", "--sidecar", str(client.base_url))
        assert told in " ".join(status.stdout.split())
