"""A promoted draft that its engine lost, because it was started again without what it kept in --state-dir,
serves again: the same files on the same server and target, so that there is nothing to train or to judge.

What somebody chose stands: a draft that was put into service by the admin API or is in --state-dir, one that
was never in service before, or one that was trained here and that the engine is started with by now.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from driftguard.retraining.engines.engine_admin import EngineAdmin, EngineDraft, EngineInfo, EngineRefused
from driftguard.retraining.training import checksums
from driftguard.store import drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import Draft

# A draft that had served for less, when its engine was started again, may be what ended it.
SERVED_AT_LEAST: Final = timedelta(minutes=5)
log = structlog.get_logger(__name__)


class Loss(NamedTuple):
    """`serving`: the promoted draft, put back into service; None: it was not. `told`: what was done, or why
    nothing was, for the run that made it."""

    run_id: UUID
    serving: EngineDraft | None
    told: str


def put_back_if_lost(database: Database, admin: EngineAdmin, info: EngineInfo, now: datetime) -> Loss | None:
    """None: nothing is lost. Raises EngineRefused: the engine is away."""
    with database.session() as session:
        lost = _lost(session, info)
        if lost is None or lost.retrain_run_id is None:
            return None
        run = retrain_runs.find(session, lost.retrain_run_id)
        digest = retrain_runs.numbers_of(run).checksums_sha256 if run is not None else None
    serving, obstacle = None, _obstacle(lost, info, now)
    if obstacle is None:
        directory = Path(lost.directory or "")
        try:
            if directory.is_dir():  # else the engine alone sees them, and verifies them
                checksums.verify_if_known(directory, digest)
            admin.load(directory, lost.version)
            serving = admin.activate(lost.version)
        except (EngineRefused, checksums.DraftChanged) as error:
            admin.info()  # one that is away is asked again later
            obstacle = error.detail
    told = f"the engine was started again and lost it, found at {now:%Y-%m-%d %H:%M:%S} UTC"
    if serving is not None:
        told = f"{told}, and it was put back (with --state-dir the engine keeps it)"
        log.warning("promoted draft lost and put back", server=info.server, draft=lost.version, reason=told)
        with database.session() as session:
            drafts.in_service_anew(session, lost.id, now)
    else:
        told = f"{told}; draft {info.draft.version} serves, and it was not put back: {obstacle}"
        log.error("promoted draft lost", server=info.server, draft=lost.version, reason=told)
    return Loss(lost.retrain_run_id, serving, told)


def _lost(session: Session, info: EngineInfo) -> Draft | None:
    """The draft that was promoted here, and that the engine forgot."""
    known = drafts.in_service(session, info.server, info.target)
    if known is None or known.version == info.draft.version:
        return None
    serving = drafts.find(session, info.server, info.target, info.draft.version)
    was_chosen = info.activated or serving is None or serving.retrain_run_id is not None
    watched = retrain_runs.watching(session, info.server, info.target, known.version)
    is_worse = watched is not None and retrain_runs.watch_of(watched).verdict == "worse"
    return None if was_chosen or is_worse else known


def _obstacle(lost: Draft, info: EngineInfo, now: datetime) -> str | None:
    """Why it is not even tried."""
    if lost.directory is None:
        return "its files are gone"
    started_at = now - timedelta(seconds=info.uptime_seconds)
    if lost.promoted_at is not None and started_at < lost.promoted_at + SERVED_AT_LEAST:
        minutes = SERVED_AT_LEAST.total_seconds() / 60
        return f"it had served for less than {minutes:.0f} minutes, so that it may be what ended the engine"
    return None
