"""Which files of drafts are removed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from sqlalchemy import select, update

from driftguard.app import Sidecar
from driftguard.errors import DatabaseUnavailable
from driftguard.retraining.training import workspace
from driftguard.retraining.training.workspace import draft_directory, remove_old_drafts
from driftguard.settings import Settings
from driftguard.store import drafts, retention
from driftguard.store.database import Database
from driftguard.store.tables import Draft, Stream
from tests.retraining.world import NEW, drift, make_settings, record, store, trained

NOW = datetime.now(UTC)
LONG_AGO = NOW - timedelta(days=8)


def made(database: Database, home: Path, *versions: str, method: str = "draft_model") -> None:
    """Each from the one before, long ago."""
    parents = ("v1", *versions)
    incident_id = drift(database, "v1", NOW)
    for parent, version in zip(parents, versions, strict=False):
        directory = home / version
        directory.mkdir(parents=True)
        trained(database, incident_id, parent, version, str(directory), "promoted")
    with database.session() as session:
        session.execute(update(Draft).values(method=method, created_at=LONG_AGO))


def serves(database: Database, version: str, directory: Path) -> None:
    with database.session() as session:
        drafts.put_in_service(
            session,
            server="engine-1",
            target="target",
            version=version,
            name=version,
            method="suffix",
            directory=str(directory),
            at=NOW,
        )


def directories(database: Database) -> dict[str, str | None]:
    with database.session() as session:
        return {draft.version: draft.directory for draft in session.scalars(select(Draft))}


@pytest.mark.parametrize(
    ("state", "is_kept"),
    [("rolling_out", True), ("promoting", True), ("evaluating", True), ("failed", False)],
)
def test_a_draft_on_its_way_into_service_keeps_its_files(
    database: Database, tmp_path: Path, state: str, is_kept: bool
) -> None:
    """Also where a clock that was ahead has dated others later: a server is about to start with it."""
    settings = make_settings(tmp_path, "http://127.0.0.1:9", keep_candidates=1)
    incident_id = drift(database, "v1", NOW)
    for version, of_run in (("v2", state), ("v3", "rejected")):
        directory = draft_directory(tmp_path, version)
        directory.mkdir(parents=True)
        trained(database, incident_id, "v1", version, str(directory), of_run)
    with database.session() as session:
        ahead = update(Draft).where(Draft.version == "v3").values(created_at=NOW + timedelta(days=2))
        session.execute(ahead)
    remove_old_drafts(database, settings, "engine-1", "target")
    assert draft_directory(tmp_path, "v2").exists() == is_kept
    assert draft_directory(tmp_path, "v3").exists()


def test_the_draft_in_service_can_be_rolled_back_also_after_the_one_after_it_was(
    database: Database, tmp_path: Path
) -> None:
    """As where the watch finds that one worse, and a person then the one before it."""
    settings = make_settings(tmp_path, "http://127.0.0.1:9", keep_candidates=1)
    home = tmp_path / "drafts"
    made(database, home, "v2", "v3", "v4", "v5")
    serves(database, "v5", home / "v5")
    remove_old_drafts(database, settings, "engine-1", "target")
    assert sorted(path.name for path in home.iterdir()) == ["v3", "v4", "v5"]


def test_a_corpus_goes_when_captures_do_although_nothing_is_retrained_any_more(
    database: Database, tmp_path: Path
) -> None:
    """It holds captured text. The one in service, and the one before it, stay."""
    home = tmp_path / "drafts"
    made(database, home, "v2", "v3", "v4", method="suffix")
    serves(database, "v4", home / "v4")
    Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar")._maintain()
    assert sorted(path.name for path in home.iterdir()) == ["v3", "v4"]
    assert directories(database)["v2"] is None


def test_a_corpus_goes_in_time_although_old_records_cannot_be_removed(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a partition belongs to another role."""
    home = tmp_path / "drafts"
    made(database, home, "v2", "v3", method="suffix")

    def fail(*_: object) -> NoReturn:
        raise DatabaseUnavailable("must be owner of table records")

    monkeypatch.setattr(retention, "maintain", fail)
    with pytest.raises(DatabaseUnavailable):
        Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar")._maintain()
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(("state", "is_kept"), [("failed", False), ("training", True)])
def test_what_a_killed_training_left_goes_although_another_sidecar_has_ended_its_run(
    database: Database, tmp_path: Path, state: str, is_kept: bool
) -> None:
    """It has captured requests in it, and nothing may be retrained on this machine for months."""
    killed = trained(database, drift(database, "v1", NOW), "v1", "v2", "/elsewhere/v2", state)
    files = workspace.of_run(tmp_path, killed.id)
    workspace.create(files)
    files.train.write_text("{}\n")
    Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar")._maintain()
    assert (files.directory.exists(), files.staging.exists()) == (is_kept, is_kept)


@pytest.mark.parametrize(("silent_days", "is_kept"), [(6, True), (8, False)])
def test_a_corpus_of_a_target_that_was_replaced_long_ago_is_in_service_no_more(
    database: Database, tmp_path: Path, silent_days: int, is_kept: bool
) -> None:
    home = tmp_path / "drafts"
    made(database, home, "v2", method="suffix")
    serves(database, "v2", home / "v2")
    store(database, [msgspec.structs.replace(record("v9", NEW, 0.7, NOW), target="another")])
    with database.session() as session:
        heard_at = datetime.now(UTC) - timedelta(days=silent_days)
        of_target = update(Stream).where(Stream.target == "target")
        session.execute(of_target.values(traffic_arrived_at=heard_at))
    Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar")._maintain()
    assert (home / "v2").exists() == is_kept


@pytest.mark.parametrize("has_others", [False, True])
def test_a_machine_without_the_drafts_leaves_them_to_the_one_that_has_them(
    database: Database, tmp_path: Path, has_others: bool
) -> None:
    """As the sidecar of another engine on the same database, or of one whose nightly job makes them on a
    volume that it does not mount."""
    home = tmp_path / "drafts"
    made(database, home, "v2", "v3", method="suffix")
    home.rename(tmp_path / "elsewhere")
    if has_others:
        home.mkdir()
    Sidecar(Settings(data_dir=tmp_path), database, "http://sidecar")._maintain()
    settings = make_settings(tmp_path, "http://127.0.0.1:9", keep_candidates=1)
    remove_old_drafts(database, settings, "engine-1", "target")
    assert directories(database) == {"v2": str(home / "v2"), "v3": str(home / "v3")}


def test_old_drafts_are_removed_after_their_directory_was_moved_and_linked(
    database: Database, tmp_path: Path
) -> None:
    """As to a larger disk. One that another server has by its new path stays."""
    before, now = tmp_path / "before", tmp_path / "now"
    made(database, before / "drafts", "v2", "v3", "v4")
    before.rename(now)
    before.symlink_to(now)
    with database.session() as session:
        equal = select(Draft).where(Draft.version == "v3")
        shared = session.scalars(equal).one()
        directory = str(now / "drafts" / "v3")
        assert shared.retrain_run_id is not None
        drafts.add_candidate(
            session,
            server="engine-2",
            target="target",
            version="v3",
            method="draft_model",
            directory=directory,
            parent_version="v1",
            run_id=shared.retrain_run_id,
            at=NOW,
        )
    settings = make_settings(before, "http://127.0.0.1:9", keep_candidates=1)
    remove_old_drafts(database, settings, "engine-1", "target")
    assert sorted(path.name for path in (now / "drafts").iterdir()) == ["v3", "v4"]
