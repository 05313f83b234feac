"""/readyz where the fold does not get on, by a clock that the test turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from driftguard.app import Sidecar, create_app
from driftguard.metrics import Metrics
from driftguard.pipeline import batch_fold
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.settings import Settings
from driftguard.status.fold_watch import FoldWatch
from driftguard.store.database import Database
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import serving
from tests.pipeline.test_fold_loop import CONFIG
from tests.pipeline.traffic import Traffic, store


class Clock:
    seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


@contextmanager
def sidecar_whose_fold_fails(
    database: Database, data_dir: Path, clock: Clock, patch: pytest.MonkeyPatch
) -> Iterator[httpx.Client]:
    sidecar = Sidecar(Settings.model_validate({"data_dir": data_dir}), database, "http://sidecar")
    sidecar.fold_watch._clock = clock

    def failing() -> int:
        raise RuntimeError("planted")

    patch.setattr(sidecar.pipeline, "fold_batch", failing)
    with serving(create_app(sidecar)) as client:
        yield client


@pytest.mark.slow
def test_a_sidecar_whose_fold_fails_for_a_minute_is_not_ready_until_somebody_folds(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, traffic = Clock(), Traffic(seed=81)
    with sidecar_whose_fold_fails(database, tmp_path, clock, monkeypatch) as client:

        def lag() -> float:
            lines = client.get("/metrics").text.splitlines()
            shown = [line for line in lines if line.startswith("driftguard_fold_lag_records ")]
            return float(shown[0].split()[1]) if shown else 0.0

        clock.seconds += 3_600  # nothing waits, so nothing is late
        assert client.get("/readyz").json()["fold_lag_records"] == 0
        store(database, traffic.draw(40, {"chat": 0.75}))
        assert client.get("/readyz").json()["fold_lag_records"] == 40
        clock.seconds += 59
        assert client.get("/readyz").status_code == 200
        wait_until(lambda: lag() == 40, "the lag, although no fold succeeds")
        clock.seconds += 1
        answer = client.get("/readyz")
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
        problem = answer.json()
        assert problem["title"] == "Detector stopped"
        assert problem["detail"].startswith(f"no fold has succeeded since {problem['since'][:10]} ")
        assert "(60 s) although 40 records wait" in problem["detail"]
        assert client.get("/healthz").status_code == 200

        other = Pipeline(database, CONFIG, Metrics(), batch_records=30)  # of another sidecar
        other.fold_batch()
        assert client.get("/readyz").json()["fold_lag_records"] == 10
        clock.seconds += 61
        assert client.get("/readyz").status_code == 503
        other.fold_batch()
        assert client.get("/readyz").status_code == 200


def test_a_watch_that_looks_seldom_sees_the_same() -> None:
    clock = Clock()
    watch = FoldWatch(clock)
    assert watch.seconds_without_fold(10, 5) == 0
    clock.seconds += 300
    assert watch.seconds_without_fold(10, 900) == 300
    assert watch.seconds_without_fold(12, 898) == 0
    clock.seconds += 300
    assert watch.seconds_without_fold(910, 0) == 0
    clock.seconds += 300
    assert watch.seconds_without_fold(910, 1) == 0


def test_records_of_a_stream_that_is_held_back_keep_nobody_from_being_ready(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    store(database, Traffic(seed=82).draw(20, {"chat": 0.75}))

    def poisoned(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(batch_fold, "fold_many", poisoned)
        Pipeline(database, CONFIG, Metrics()).fold_batch()
    with sidecar_whose_fold_fails(database, tmp_path, clock, monkeypatch) as client:
        for _ in range(2):
            assert client.get("/readyz").json()["fold_lag_records"] == 20
            clock.seconds += 61
