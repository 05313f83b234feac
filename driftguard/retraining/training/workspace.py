"""Files of a retraining: traffic for the training process, and the drafts it made.

data_dir/retraining/<run id>/   train.jsonl, replay.jsonl, heldout.jsonl, training.log: removed with the run,
                                because captured text must not outlive its retention in a copy
data_dir/scoring/<incident id>/ served.jsonl, training.log, of a scoring of captured requests: likewise
data_dir/drafts/<version>/      candidates, also the promoted ones; the version is the weights' hash
data_dir/drafts/<run id>/       the candidate of a run until its version is known: removed with the run. The
                                drafts may be on a file system of their own, as a volume that the engines
                                mount, and are moved as a whole
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from driftguard.retraining.training import checksums
from driftguard.settings import Settings
from driftguard.store import drafts, retrain_runs, source_activity
from driftguard.store.database import Database
from driftguard.store.tables import Draft

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Workspace:
    """The directories of one run, or of one scoring, which makes no candidate."""

    directory: Path

    @property
    def train(self) -> Path:
        return self.directory / "train.jsonl"

    @property
    def replay(self) -> Path:
        return self.directory / "replay.jsonl"

    @property
    def held_out(self) -> Path:
        return self.directory / "heldout.jsonl"

    @property
    def served(self) -> Path:
        return self.directory / "served.jsonl"

    @property
    def log(self) -> Path:
        return self.directory / "training.log"

    @property
    def staging(self) -> Path:
        return _drafts(self.directory.parent.parent) / self.directory.name

    @property
    def candidate(self) -> Path:
        return self.staging / "candidate"


def of_run(data_directory: Path, run_id: UUID) -> Workspace:
    """Not created yet."""
    return Workspace(_runs(data_directory) / str(run_id))


def create(workspace: Workspace) -> None:
    """That of a run. What holds captured traffic is readable by this user only."""
    workspace.directory.mkdir(parents=True, mode=0o700)
    workspace.staging.mkdir(parents=True)  # now: a training whose candidate cannot be kept is in vain


def create_scoring(data_directory: Path, incident_id: UUID) -> Workspace:
    """The same for a scoring, instead of what a killed one left."""
    directory = _scorings(data_directory) / str(incident_id)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, mode=0o700)
    return Workspace(directory)


def remove_old_scorings(data_directory: Path, older_than: timedelta) -> None:
    """What killed scorings left."""
    for directory in _scorings(data_directory).glob("*-*-*-*-*"):
        if time.time() - directory.stat().st_mtime > older_than.total_seconds():
            remove(Workspace(directory))


def remove(workspace: Workspace) -> None:
    for directory in (workspace.directory, workspace.staging):
        if not _is_removed(directory):
            log.error("files of a retraining cannot be removed", directory=str(directory))


def draft_directory(data_directory: Path, version: str) -> Path:
    return _drafts(data_directory) / version


def keep_candidate(workspace: Workspace, destination: Path) -> None:
    """Moves the candidate to its final directory. An existing directory of this version is kept where its
    checksums hold, because it has the same weights; else it is replaced.
    """
    former = workspace.staging / "former"  # removed with the run
    if destination.exists():
        try:
            checksums.verify(destination)
        except checksums.DraftChanged as changed:
            log.warning("the files of a draft are replaced", draft=destination.name, reason=changed.detail)
            destination.rename(former)
        else:
            return
    workspace.candidate.rename(destination)


def remove_leftovers(database: Database, data_directory: Path) -> None:
    """Removes the files of killed runs. Those of a run in another database with the same directory stay."""
    runs = _runs(data_directory)
    left = [path for of in (runs, _drafts(data_directory)) for path in of.glob("*-*-*-*-*")]
    found = {_run_id(path): runs / path.name for path in left}
    with database.session() as session:
        ended = retrain_runs.ended_ids(session, [run_id for run_id in found if run_id is not None])
    for run_id in ended:
        remove(Workspace(found[run_id]))


def remove_outdated_corpora(database: Database, settings: Settings) -> None:
    """As `remove_old_drafts`, wherever there are any: nothing may be retrained or settled there for months.
    What is being retrained does it when it is settled next."""
    oldest = datetime.now(UTC) - timedelta(days=settings.retention.captures_days)
    with database.session() as session:
        places = drafts.places_of_corpora(session, oldest)
    for server, target in places:
        with database.session() as session:
            if not _outdated(session, settings, server, target):
                continue
        with retrain_runs.try_lock(database, server, target) as lock:
            if lock is not None:
                remove_old_drafts(database, settings, server, target)


def remove_old_drafts(database: Database, settings: Settings, server: str, target: str) -> None:
    """Removes all but the newest drafts made here, and corpora that are older than captured requests may be,
    because they are made of these; never the one in service, nor those to which rollbacks return (see
    `drafts.removable`), nor what a run under way has made: a server may be about to start with it. Of a
    target that another one took the place of for as long, no corpus is in service."""
    with database.session() as session:
        for draft, directory in _outdated(session, settings, server, target):
            is_last = drafts.uses_of_files(session, draft) == 1
            if is_last and not _is_removed(directory):
                log.error("files of a draft cannot be removed", directory=str(directory))
                continue
            drafts.forget_directory(session, draft.id)


def _outdated(session: Session, settings: Settings, server: str, target: str) -> list[tuple[Draft, Path]]:
    """With their directories, of those that are here: another machine's are removed there, and known until
    then."""
    longest = timedelta(days=settings.retention.captures_days)
    silence = source_activity.silence(session, server, target)
    under_way = {run.candidate_version for run in retrain_runs.unended(session) if run.server == server}
    found = drafts.removable(
        session,
        server,
        target,
        settings.retraining.keep_candidates,
        datetime.now(UTC) - longest,
        is_served=silence is None or silence < longest,
    )
    home = _drafts(settings.data_directory)
    paths = [(draft, Path(draft.directory or "")) for draft in found if draft.version not in under_way]
    return [(draft, path) for draft, path in paths if _is_in(path, home) and not _is_gone(path)]


def _is_in(directory: Path, home: Path) -> bool:
    """Also by a path that has become a symbolic link since, as where `data_dir` was moved."""
    return directory.parent == home or os.path.realpath(directory.parent) == os.path.realpath(home)


def _is_removed(directory: Path) -> bool:
    """Removes it."""
    shutil.rmtree(directory, ignore_errors=True)
    return _is_gone(directory)


def _is_gone(directory: Path) -> bool:
    """False also where this user may not even look."""
    try:
        directory.lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _runs(data_directory: Path) -> Path:
    return data_directory / "retraining"


def _drafts(data_directory: Path) -> Path:
    return data_directory / "drafts"


def _scorings(data_directory: Path) -> Path:
    return data_directory / "scoring"


def _run_id(path: Path) -> UUID | None:
    try:
        return UUID(path.name)
    except ValueError:
        return None
