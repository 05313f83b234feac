"""Runs that nobody can go on with: of a server that is in no settings any more, or of a target that another
one took the place of."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec
import procrastinate
import pytest
from sqlalchemy import update

from driftguard.records.documents.retraining_run import Rollout, Verdict, Watch
from driftguard.retraining import tasks
from driftguard.retraining.run import retrain
from driftguard.retraining.tasks import NAMESPACE, RetrainingJobs
from driftguard.settings import Settings
from driftguard.store import announced_drafts, drafts, retrain_runs, sources
from driftguard.store.database import Database
from driftguard.store.job_queue import deferring_connector
from driftguard.store.sources import SourceState
from driftguard.store.tables import RetrainRun, Stream
from tests.retraining import world
from tests.retraining.restarted import NEW, OLD, SERVER, passed_the_gate, restarted_settings, serves
from tests.retraining.world import incident_of, make_settings, record, store

Stuck = Literal["promoting", "rolling_out", "rolling_back", "worse", "undecided"]
AN_HOUR = timedelta(hours=1)
WORSE = Watch((), (), 0.05, 400, 0, recovered=False, verdict="worse")


class Runs:
    """A database in which NEW, made from OLD, got stuck on its way into service, or out of it."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self.database = database
        self.settings = settings
        self._jobs = procrastinate.App(connector=deferring_connector(database))
        self._jobs.add_tasks_from(RetrainingJobs(database, settings).blueprint, namespace=NAMESPACE)

    def stuck(self, how: Stuck, *, late: bool = True) -> RetrainRun:
        """`late`: what was asked for has not come in time."""
        run, now = passed_the_gate(self.database, self.settings), datetime.now(UTC)
        until = now + (-timedelta(seconds=1) if late else AN_HOUR)
        with self.database.session() as session:
            stored = session.get_one(RetrainRun, run.id)
            stored.state = "watching" if how in ("worse", "undecided") else how
            rollout = Rollout(NEW if how == "rolling_out" else OLD, now - AN_HOUR, until, "it loops")
            verdict: Verdict = "worse" if how == "worse" else "watching"
            stored.numbers = replace(
                retrain_runs.numbers_of(stored),
                rollout=None if how == "promoting" else rollout,
                watch=None if how in ("promoting", "rolling_out") else replace(WORSE, verdict=verdict),
            )
            if how not in ("promoting", "rolling_out"):
                made = drafts.find(session, SERVER, "target", NEW)
                assert made is not None
                drafts.put_in_service(
                    session,
                    server=SERVER,
                    target="target",
                    version=NEW,
                    name=NEW,
                    method="draft_model",
                    directory=made.directory,
                    at=now,
                )
        return run

    def look(self, jobs: RetrainingJobs) -> None:
        with self._jobs.open():
            jobs.defer_due(self._jobs)

    def without_engines(self) -> RetrainingJobs:
        """Of a sidecar that was started with other settings."""
        return RetrainingJobs(self.database, self.settings.model_copy(update={"engines": []}))

    def run(self, run: RetrainRun) -> RetrainRun:
        with self.database.session() as session:
            return session.get_one(RetrainRun, run.id)

    def incident(self, run: RetrainRun) -> str:
        assert run.incident_id is not None
        return incident_of(self.database, run.incident_id).state

    def another_target_serves(self, silent_for: timedelta) -> None:
        """The one before was heard so long before it."""
        made = record("v9", world.NEW, 0.7, datetime.now(UTC))
        store(self.database, [msgspec.structs.replace(made, target="another")])
        with self.database.session() as session:
            heard_at = datetime.now(UTC) - silent_for
            of_target = update(Stream).where(Stream.target == "target")
            session.execute(of_target.values(traffic_arrived_at=heard_at, traffic_ended_at=heard_at))


@pytest.fixture
def runs(database: Database, tmp_path: Path) -> Runs:
    directory = tmp_path / "models"
    return Runs(
        database, restarted_settings(tmp_path / "data", directory, directory, promote_command=["true"])
    )


OUT = f"no sidecar has {SERVER} among its engines any more"
OUT_AND = f"{OUT}: its records tell what it serves"
IN_SERVICE = f"draft {NEW} was being put into service, and"
BACK = f"it loops; draft {OLD} was being put back, and"
NOT_BACK = (
    f"draft {NEW} accepted less than the one before it: no requests of judged segments; it was not rolled "
    "back, because"
)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("promoting", f"{IN_SERVICE} {OUT_AND}"),
        ("rolling_out", f"{IN_SERVICE} {OUT_AND}"),
        ("rolling_back", f"{BACK} {OUT_AND}"),
        ("worse", f"{NOT_BACK} {OUT}"),
    ],
)
def test_a_run_of_a_server_that_was_taken_out_of_the_settings_ends_and_says_why(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, how: Stuck, told: str
) -> None:
    run = runs.stuck(how)
    state = runs.run(run).state
    for _ in range(2):  # also of one that is started again
        runs.look(jobs := runs.without_engines())
        assert runs.run(run).state == state  # it may be put back into them soon
    monkeypatch.setattr(tasks, "STARTED_SECONDS", 0.0)
    runs.look(jobs)
    ended = runs.run(run)
    assert (ended.state, ended.reason) == ("failed", told)
    assert runs.incident(run) == "open"
    runs.look(jobs)
    if how in ("rolling_back", "worse"):  # back in the settings, it is retrained from what serves
        serves(runs.database, NEW)
        assert retrain(runs.database, runs.settings, force=True).reason == (
            "only 0 captured requests, 128 needed"
        )
        assert runs.run(run).state == "failed"
    assert runs.run(run).ended_at == ended.ended_at


def test_a_rollout_of_a_server_that_was_taken_out_of_the_settings_has_its_time(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever puts it back into them sees it end as any."""
    monkeypatch.setattr(tasks, "STARTED_SECONDS", 0.0)
    run = runs.stuck("rolling_out", late=False)
    runs.look(runs.without_engines())
    assert runs.run(run).state == "rolling_out"


def test_a_server_that_may_be_paused_is_told_so(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "STARTED_SECONDS", 0.0)
    run = runs.stuck("rolling_out")
    with runs.database.session() as session:
        stored = session.get_one(RetrainRun, run.id)
        rollout = replace(retrain_runs.rollout_of(stored), live="begun")
        stored.numbers = replace(retrain_runs.numbers_of(stored), rollout=rollout)
    runs.look(runs.without_engines())
    assert (runs.run(run).reason or "").endswith(
        "its records tell what it serves; an update was cut off, and it may be paused"
    )


def test_a_watch_that_has_not_found_a_draft_worse_goes_on_without_the_settings(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records still tell whether the incident is over."""
    monkeypatch.setattr(tasks, "STARTED_SECONDS", 0.0)
    run = runs.stuck("undecided")
    runs.look(runs.without_engines())
    assert runs.run(run).state == "watching"


@pytest.mark.parametrize("how", ["promoting", "worse"])
def test_a_run_of_an_engine_that_is_only_away_does_not_end(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: Stuck
) -> None:
    monkeypatch.setattr(tasks, "STARTED_SECONDS", 0.0)
    run = runs.stuck(how)
    state = runs.run(run).state
    jobs = RetrainingJobs(runs.database, make_settings(tmp_path / "data", "http://127.0.0.1:9"))
    for _ in range(2):
        runs.look(jobs)
        jobs.settle(SERVER)
    assert runs.run(run).state == state


INSTEAD = "target another is served instead"


@pytest.mark.parametrize(
    ("how", "state", "told"),
    [
        ("rolling_out", "failed", f"{IN_SERVICE} {INSTEAD}"),
        ("rolling_back", "promoted", f"{BACK} {INSTEAD}"),
        ("worse", "promoted", f"{NOT_BACK} {INSTEAD}"),
        ("undecided", "promoted", f"promoted; no longer watched, because {INSTEAD}"),
    ],
)
def test_a_run_of_a_target_that_another_one_took_the_place_of_ends_and_says_why(
    runs: Runs, how: Stuck, state: str, told: str
) -> None:
    run = runs.stuck(how)
    before = runs.run(run).state
    jobs = RetrainingJobs(runs.database, runs.settings)
    runs.another_target_serves(silent_for=timedelta(minutes=20))  # or is only tried beside it
    jobs.settle(SERVER)
    assert runs.run(run).state == before
    runs.another_target_serves(silent_for=timedelta(minutes=70))
    jobs.settle(SERVER)
    ended = runs.run(run)
    assert (ended.state, ended.reason) == (state, told)
    assert runs.incident(run) == "open"


def test_a_watch_over_a_target_that_another_one_took_the_place_of_is_looked_at(runs: Runs) -> None:
    """Nothing else would settle the server: of the other target no draft is known to be in service."""
    runs.stuck("undecided")
    jobs = RetrainingJobs(runs.database, runs.settings)
    for minutes, looked_at in ((20, []), (70, [SERVER])):
        runs.another_target_serves(silent_for=timedelta(minutes=minutes))
        with runs.database.session() as session:
            assert list(jobs._unfollowed(session)) == looked_at
    jobs.settle(SERVER)
    with runs.database.session() as session:
        assert list(jobs._unfollowed(session)) == []


def test_a_restart_that_lasts_has_its_time_although_another_target_is_heard(runs: Runs) -> None:
    run = runs.stuck("rolling_out", late=False)
    runs.another_target_serves(silent_for=timedelta(minutes=70))
    RetrainingJobs(runs.database, runs.settings).settle(SERVER)
    assert runs.run(run).state == "rolling_out"


def test_what_was_ordered_for_a_target_that_is_gone_is_not_awaited_of_the_next(runs: Runs) -> None:
    run = runs.stuck("rolling_out")
    now = datetime.now(UTC)
    with runs.database.session() as session:
        state = SourceState(SERVER, "vllm", "http://x", "counter", "reporting", "", now, now, now, 15.0)
        sources.store(session, [state])
        announced_drafts.announce(session, SERVER, NEW, "after_restart")
    runs.another_target_serves(silent_for=timedelta(minutes=70))
    RetrainingJobs(runs.database, runs.settings).settle(SERVER)
    assert runs.run(run).state == "failed"
    with runs.database.session() as session:
        assert announced_drafts.awaited(session) == {}
