"""An engine that takes a new draft by a restart: settings, a command, and a run whose candidate passed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from driftguard.retraining.engines.connect import connect
from driftguard.retraining.engines.restarted_engine import RestartedEngine
from driftguard.retraining.ledger.outcome import RetrainOutcome
from driftguard.retraining.ledger.run_row import Job
from driftguard.retraining.promotion import restart
from driftguard.retraining.promotion.reconcile import settle
from driftguard.settings import CaptureSettings, EngineSettings, RetrainingSettings, Settings
from driftguard.store import retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import RetrainRun
from tests.retraining import world
from tests.retraining.world import drift, record, store, trained

OLD, NEW = "v1", "v2"
SERVER = "engine-1"


def restarted_settings(data_dir: Path, target: Path, draft: Path, **retraining: object) -> Settings:
    """As world.make_settings, without an admin API; update_url and update_engine are the engine's."""
    kind = retraining.pop("update_engine", "vllm")
    engine = EngineSettings.model_validate(
        {
            "server": SERVER,
            "target_directory": target,
            "draft_directory": None if kind == "sglang_ngram" else draft,
            "num_speculative_tokens": 4,
            "update_url": retraining.pop("update_url", None),
            "update_engine": kind,
        }
    )
    rules = {"steps": 60, "threads": 1, "maximum_regression": 0.05, "aim_requests": 128, **retraining}
    return Settings(
        data_dir=data_dir,
        engines=[engine],
        capture=CaptureSettings(enabled=True),
        retraining=RetrainingSettings.model_validate(rules),
    )


def script(path: Path, *lines: str) -> str:
    path.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    path.chmod(0o755)
    return str(path)


def serves(database: Database, version: str, count: int = 1) -> None:
    """Stores requests that the server has just answered with this draft."""
    now = datetime.now(UTC)
    store(database, [record(version, world.NEW, 0.7, now) for _ in range(count)])


def passed_the_gate(database: Database, settings: Settings) -> RetrainRun:
    """OLD fell, and NEW was trained from it."""
    incident_id = drift(database, OLD, datetime.now(UTC) - timedelta(minutes=5))
    settle(database, settings, SERVER)
    directory = str(settings.data_directory / "drafts" / NEW)
    return trained(database, incident_id, OLD, NEW, directory, "evaluating")


def promote(database: Database, settings: Settings, run_id: UUID, incident_id: UUID | None) -> RetrainOutcome:
    engine = connect(database, settings, SERVER)
    assert isinstance(engine, RestartedEngine)
    job = Job(database, settings, engine, engine.info(), "incident", lambda _: None, lambda: False)
    with retrain_runs.try_lock(database, SERVER, "target") as lock:
        assert lock is not None
        return restart.promote(job, engine, run_id, incident_id, NEW)


def main(arguments: Sequence[str]) -> int:
    """A process to be killed: DATABASE_URL DATA_DIR COMMAND RUN_ID [UPDATE_URL UPDATE_ENGINE]."""
    url, data_dir, command, run_id, *more = arguments
    models, live = Path(data_dir), dict(zip(("update_url", "update_engine"), more, strict=False))
    settings = restarted_settings(models, models, models, **live, promote_command=[command])
    return promote(Database.open(url), settings, UUID(run_id), None).exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
