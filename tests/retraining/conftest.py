from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
import torch
from driftguard_training.model_directories import model_version

from driftguard.retraining.training import process
from driftguard.settings import Settings
from driftguard.store.database import Database
from tests.retraining.engine_stub import EngineStub, running
from tests.retraining.training_here import run_here
from tests.retraining.world import NEW, OLD, Models, capture, drift, make_settings, requests_of
from tests.training.small_models import save_directory, small_model, write_traffic


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    target = small_model(1)
    return Models(
        target=save_directory(root / "target", target),
        draft=save_directory(root / "draft", small_model(2)),
        new_traffic=write_traffic(root / "new.jsonl", target, requests=200, seed=3, tokens=(16, 32)),
        old_traffic=write_traffic(root / "old.jsonl", target, requests=120, seed=4, tokens=(1, 16)),
    )


@pytest.fixture
def training_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what follows the training: trains without starting a process."""
    monkeypatch.setattr(process, "_run", run_here)


@pytest.fixture
def engine(models: Models) -> Iterator[EngineStub]:
    with running(EngineStub(models.target, models.draft)) as stub:
        yield stub


@dataclass(frozen=True, slots=True)
class Drifted:
    """A database with an incident and captured traffic before and after it."""

    database: Database
    settings: Settings
    incident_id: UUID
    parent: str


@pytest.fixture
def drifted(database: Database, engine: EngineStub, models: Models, tmp_path: Path) -> Drifted:
    version = model_version(models.draft)
    changed_at = datetime.now(UTC) - timedelta(minutes=5)
    incident_id = drift(database, version, changed_at)
    capture(database, version, OLD, requests_of(models.old_traffic), changed_at - timedelta(minutes=2))
    capture(database, version, NEW, requests_of(models.new_traffic), changed_at + timedelta(seconds=1))
    return Drifted(database, make_settings(tmp_path / "data", engine.url), incident_id, version)
