"""A promoted draft that its engine lost, because it was started again without what it kept in --state-dir,
serves again: the same files on the same server and target, so that there is nothing to train or to judge.

What somebody chose stands: a draft that was put into service by the admin API or is in --state-dir, or any
that the engine is started with but the one that the promoted draft goes back to.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from driftguard.records.documents.retraining_run import RunNumbers
from driftguard.retraining.engines.engine_admin import (
    EngineAdmin,
    EngineAway,
    EngineDraft,
    EngineInfo,
    EngineRefused,
)
from driftguard.retraining.training import checksums
from driftguard.retraining.training.draft_files import is_here
from driftguard.store import drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import Draft

# A draft that had served for less, when its engine was started again, may be what ended it; the second holds
# once it was put back. What ends its engine only later is told by the number of times: engines are started
# again for ordinary reasons too, some of them several times a day.
SERVED_AT_LEAST: Final = timedelta(minutes=5)
SERVED_AGAIN_AT_LEAST: Final = timedelta(hours=1)
MOST_A_DAY: Final = 4
A_DAY: Final = timedelta(days=1)
LOST: Final = "the engine was started again and lost it"
log = structlog.get_logger(__name__)


class Loss(NamedTuple):
    """`serving`: what the engine serves now. `told`: that the promoted draft was put back into service, or
    why it was not, for the run that made it."""

    run_id: UUID
    serving: EngineDraft
    told: str


def put_back_if_lost(database: Database, admin: EngineAdmin, info: EngineInfo) -> Loss | None:
    """None: nothing is lost. Raises EngineRefused: the engine is away."""
    with database.session() as session:
        lost = lost_draft(session, info)
        if lost is None or lost.retrain_run_id is None:
            return None
        now = retrain_runs.now(session)
        run = retrain_runs.find(session, lost.retrain_run_id)
        numbers = retrain_runs.numbers_of(run) if run is not None else RunNumbers()
    put_back_at = tuple(at for at in numbers.put_back_at if at > now - A_DAY)
    # Asked after `now` was read, so that a slow answer makes its start no later than it was.
    started_at = now - timedelta(seconds=admin.info().uptime_seconds)
    serving, obstacle = info.draft, _obstacle(lost, put_back_at, info, started_at)
    if obstacle is None:
        # Before: an engine that it ends is not given it again.
        _store_given(database, lost, now, (*put_back_at, now))
        try:
            serving, obstacle = _put_back(admin, lost, numbers.checksums_sha256)
        except _NotGiven:
            _store_given(database, lost, lost.promoted_at, put_back_at)
            raise
        if obstacle is not None:
            _store_given(database, lost, lost.promoted_at, put_back_at)
    told = f"{LOST}, found at {now:%Y-%m-%d %H:%M:%S} UTC"
    if obstacle is None:
        told = f"{told}, and it was put back (with --state-dir the engine keeps it)"
        log.warning("promoted draft lost and put back", server=info.server, draft=lost.version, reason=told)
    else:
        told = f"{told}; draft {serving.version} serves, and it was not put back: {obstacle}"
        log.error("promoted draft lost", server=info.server, draft=lost.version, reason=told)
    return Loss(lost.retrain_run_id, serving, told)


class _NotGiven(EngineRefused):
    """The engine was away before it got the draft, which so cannot be why."""


def _put_back(admin: EngineAdmin, lost: Draft, digest: str | None) -> tuple[EngineDraft, str | None]:
    """What serves then, and why that is another one. Raises _NotGiven, or EngineRefused: the engine is
    away."""
    directory = Path(lost.directory or "")
    try:
        if is_here(directory):  # else the engine alone sees them, and verifies them
            checksums.verify_if_known(directory, digest)
        try:
            admin.load(directory, lost.version)
        except EngineAway as error:
            raise _NotGiven(error.detail) from error
        return admin.activate(lost.version), None
    except _NotGiven:
        raise
    except (EngineRefused, checksums.DraftChanged) as error:
        serving = admin.info().draft  # the answer may be lost although the engine acted
        return serving, None if serving.version == lost.version else error.detail


def _store_given(
    database: Database, lost: Draft, at: datetime | None, put_back_at: tuple[datetime, ...]
) -> None:
    with database.session() as session:
        drafts.in_service_anew(session, lost.id, at)
        if lost.retrain_run_id is not None:
            retrain_runs.change_numbers(session, lost.retrain_run_id, put_back_at=put_back_at)


def lost_draft(session: Session, info: EngineInfo) -> Draft | None:
    """The draft that was promoted here, and that the engine forgot."""
    known = drafts.in_service(session, info.server, info.target)
    if known is None or known.version == info.draft.version:
        return None
    was_chosen = info.activated or info.draft.version != _first_of(session, known)
    is_worse = retrain_runs.taken_back(session, info.server, info.target, known.version) is not None
    return None if was_chosen or is_worse else known


def is_lost_live(session: Session, info: EngineInfo) -> bool:
    """Whether a restart of the server has lost the draft that was loaded while it ran: it serves what it is
    started with. Nothing loads it again."""
    known = drafts.in_service(session, info.server, info.target)
    if known is None or known.version == info.draft.version or known.retrain_run_id is None:
        return False
    run = retrain_runs.find(session, known.retrain_run_id)
    loaded = retrain_runs.numbers_of(run).rollout if run is not None else None
    is_live = loaded is not None and (loaded.live, loaded.version) == ("done", known.version)
    return is_live and info.draft.version == _first_of(session, known)


def _first_of(session: Session, draft: Draft) -> str | None:
    """The version that was not trained here and that this one goes back to, over its parents; None: not
    known."""
    *_, first = drafts.lineage(session, draft)
    return first.version if first.retrain_run_id is None else None


def _obstacle(
    lost: Draft, put_back_at: tuple[datetime, ...], info: EngineInfo, started_at: datetime
) -> str | None:
    """Why it is not even tried. `put_back_at`: within the last day."""
    if lost.directory is None:
        return "its files are gone"
    if info.given_up == lost.version:
        return "the engine has ended again and again with it, and gave it up"
    if len(put_back_at) >= MOST_A_DAY:
        times = f"it was put back {len(put_back_at)} times within a day, and lost each time"
        return f"{times}, so that it may be what ends the engine"
    if lost.promoted_at is None or started_at < lost.promoted_at:
        return None
    served, within = started_at - lost.promoted_at, ""
    if served < SERVED_AT_LEAST:
        within = f"{SERVED_AT_LEAST.total_seconds() / 60:.0f} minutes of getting it"
    elif put_back_at and served < SERVED_AGAIN_AT_LEAST:
        within = "an hour of getting it back"
    return f"the engine ended within {within}, so that it may be what ended it" if within else None
