"""Retrainings, restarts, kills and operators in any order: once all is quiet, database and engine agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest
from sqlalchemy.orm import Session

from driftguard.errors import DriftGuardError
from driftguard.records.documents.retraining_run import Decision, RunNumbers, Watch
from driftguard.retraining import attempt, run, tasks
from driftguard.retraining.engines import command
from driftguard.retraining.engines.order import Order, Reply
from driftguard.retraining.ledger import incident_notes
from driftguard.retraining.ledger.run_row import Job
from driftguard.retraining.promotion.rollback import roll_back
from driftguard.retraining.run import retrain
from driftguard.retraining.tasks import RetrainingJobs
from driftguard.retraining.training import checksums, workspace
from driftguard.retraining.training.plan import Plan
from driftguard.settings import Settings
from driftguard.store import drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.records import insert_batches
from driftguard.store.streams import StreamRegistry
from driftguard.store.tables import Incident, RetrainRun
from tests.retraining import world
from tests.retraining.engine_stub import EngineStub, running
from tests.retraining.restarted import restarted_settings
from tests.retraining.world import BETTER, drift, make_settings, record
from tests.training.small_models import save_directory, small_model

SERVER, TARGET, FIRST = "engine-1", "target", "v0"
STEPS: Final = 40
WORSE: Final = Watch((), (), 0.05, 400, 0, recovered=False, verdict="worse")


class Killed(BaseException):
    """As by kill -9: nothing of the process reaches the database any more."""


class World:
    """A clock, and a database whose process may be killed at the beginning or end of any transaction."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.database, self.random = database, random.Random(seed)
        self.offset = timedelta(0)
        self.registry = StreamRegistry()
        self.left: int | None = None  # transactions until the process is killed
        self.is_dead = False
        self.made = 0
        self.is_meddled_with = seed % 2 == 1  # somebody puts drafts into service without the product
        self.told: list[str] = []
        self._session = Database.session
        monkeypatch.setattr(retrain_runs, "now", lambda _: self.now())
        monkeypatch.setattr(Database, "session", self.session)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.offset

    @contextmanager
    def session(self, *work: Any) -> Iterator[Session]:
        self.step()
        with self._session(self.database, *work) as session:
            yield session
        self.step()

    def step(self) -> None:
        """One more moment at which the process may be killed."""
        if self.left is not None:
            self.is_dead |= self.left == 0
            self.left -= 1
        if self.is_dead:
            raise Killed

    def killed_after(self, steps: int | None, act: Callable[[], object]) -> None:
        self.left, self.is_dead = steps, False
        try:
            act()
        except Killed:
            self.told.append("killed")
        except DriftGuardError as error:
            self.told.append(f"refused: {error.detail}")
        finally:
            self.left, self.is_dead = None, False

    def record_of(self, version: str) -> None:
        now = self.now()
        with self.database.session() as session:
            insert_batches(session, [[record(version, world.NEW, 0.7, now)]], self.registry, now)


class Product:
    """The sidecar and its operator, against a world with an engine."""

    def __init__(
        self, around: World, settings: Settings, first: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.around, self.settings, self._first = around, settings, first
        self.database = around.database
        monkeypatch.setattr(run, "SETTLING_SECONDS", 0.0)
        monkeypatch.setattr(attempt, "AWAY_SECONDS", 0.0)
        monkeypatch.setattr(tasks, "REFUSED_SECONDS", 0.0)
        monkeypatch.setattr(run, "_too_few", lambda *_: None)
        monkeypatch.setattr(run, "captured_traffic", lambda *_: None)
        monkeypatch.setattr(run, "_planned", lambda *_: Plan(["a"], [], [], {"a": "changed:german"}))
        monkeypatch.setattr(attempt, "_make_and_judge", self._make_and_judge)

    def _make_and_judge(
        self, job: Job, _kind: str, run_id: UUID, _files: object, call: Any, *_: object
    ) -> tuple[str, Decision, RunNumbers]:
        """A candidate that passes, with files of its own."""
        self.around.made += 1
        version = f"v{self.around.made}"
        directory = workspace.draft_directory(job.settings.data_directory, version)
        directory.mkdir(parents=True)
        for path in self._first.iterdir():
            if path.name != checksums.FILE_NAME:
                (directory / path.name).write_bytes(path.read_bytes())
        names = sorted(path.name for path in directory.iterdir())
        lines = [f"{checksums._digest(directory / name)}  {name}\n" for name in names]
        (directory / checksums.FILE_NAME).write_text("".join(lines))
        attempt._store_candidate(job, run_id, call, version, directory)
        made = checksums.digest_of_list(directory)
        numbers = RunNumbers(checksums_sha256=made, gate=BETTER)
        attempt._store_decision(job, run_id, version, BETTER, numbers)
        return version, BETTER, numbers

    def retrain(self) -> None:
        outcome = retrain(self.database, self.settings, server=SERVER, force=True)
        self.around.told.append(f"retrained: {outcome.state}, {outcome.reason}")

    def look(self) -> None:
        """As the sidecar does every few seconds."""
        jobs = RetrainingJobs(self.database, self.settings)
        with self.database.session() as session:
            due = {*jobs._unsettled(session), *jobs._unfollowed(session)}
        for server in due:
            jobs.settle(server)

    def roll_back(self) -> None:
        with self.database.session() as session:
            known = drafts.in_service(session, SERVER, TARGET)
        version = known.version if known else FIRST
        roll_back(self.database, self.settings, server=SERVER, draft_version=version, reason="slow")
        self.around.told.append(f"rolled back {version}")

    def find_worse(self) -> None:
        with self.database.session() as session:
            for each in retrain_runs.in_states(session, SERVER, TARGET, ("watching",)):
                numbers = retrain_runs.numbers_of(each)
                if numbers.watch is not None and numbers.watch.verdict != "worse":
                    each.numbers = replace(numbers, watch=WORSE)
                    self.around.told.append(f"{each.candidate_version} is found worse")

    def stand(self) -> None:
        """The watch ends."""
        with self.database.session() as session:
            for each in retrain_runs.in_states(session, SERVER, TARGET, ("watching",)):
                if retrain_runs.watch_of(each).verdict != "worse":
                    now = retrain_runs.now(session)
                    retrain_runs.end(session, each.id, "promoted", "stands", now)
                    incident_notes.end_mitigation(session, each.incident_id, "stands", now)


class Replicas:
    """Two processes behind one server, which a command restarts with another draft."""

    def __init__(self, around: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.around = around
        self.serving = [FIRST, FIRST]
        self.mode = "obey"
        self.pending: list[str] = []
        monkeypatch.setattr(command, "run", self.run)

    def run(self, _command: Sequence[str], order: Order, _timeout: float, _stop: Callable[[], bool]) -> Reply:
        self.around.step()
        self.around.told.append(f"order {order.action} {order.draft_version}: {self.mode}")
        mode, self.mode = self.mode, "obey"
        if mode == "refuse":
            return Reply("", "refused")
        if mode == "later":
            self.pending.append(order.draft_version)
        elif mode == "half":
            self.serving[0] = order.draft_version
            self.pending.append(order.draft_version)
        elif mode == "obey":
            self.serving = [order.draft_version] * 2
            self.pending.clear()
        self.around.step()
        return Reply("done")

    def tell(self) -> None:
        """Records of what they serve."""
        for version in self.serving:
            self.around.record_of(version)

    def obey(self) -> None:
        for version in self.pending:
            self.serving = [version] * 2
        self.pending.clear()

    def disturb(self) -> None:
        chance = self.around.random
        act = chance.randrange(5)
        if act == 0:
            self.mode = chance.choice(["refuse", "later", "half", "ignore"])
        elif act == 1:
            self.obey()
        elif act == 2 and self.around.is_meddled_with and chance.random() < 0.3:
            version = f"v{chance.randrange(self.around.made + 1)}"
            self.around.told.append(f"somebody serves {version}")
            self.serving = [version] * 2
        else:
            self.tell()

    def calm(self, *, has_time: bool) -> None:
        if has_time:  # what is ordered until now may have been given up before
            self.obey()
            self.serving = [self.serving[1]] * 2
        self.tell()

    @property
    def version(self) -> str:
        return self.serving[0]


class FallsSilent(EngineStub):
    """An engine that answers nothing after its next activation, if so told."""

    falls_silent = False

    def activate(self, version: str) -> dict[str, Any]:
        if self.falls_silent:
            self.lose, self.mute = "activate", True
        return super().activate(version)


class Built:
    """The built-in engine, which keeps no draft over a restart."""

    def __init__(self, around: World, stub: FallsSilent) -> None:
        self.around, self.stub = around, stub

    def disturb(self) -> None:
        chance, stub = self.around.random, self.stub
        stub.refuse = stub.lose = ""
        stub.mute = stub.falls_silent = False
        act = chance.randrange(10)
        if act == 0:
            stub.refuse = chance.choice(["load", "activate"])
        elif act == 1:
            stub.lose = chance.choice(["load", "activate"])
        elif act == 2:
            stub.mute, stub.falls_silent = chance.choice([(True, False), (False, True)])
        elif act == 3:
            self.around.told.append("engine started again")
            stub.start_again()
        elif act == 4 and self.around.is_meddled_with and chance.random() < 0.3:
            version = chance.choice(sorted(stub.loaded))
            self.around.told.append(f"somebody activates {version}")
            stub.activate(version)
        else:
            self.around.record_of(self.version)

    def calm(self, *, has_time: bool) -> None:
        del has_time
        self.stub.refuse = self.stub.lose = ""
        self.stub.mute = self.stub.falls_silent = False
        self.around.record_of(self.version)

    @property
    def version(self) -> str:
        return str(self.stub.serving["version"])


def wait(product: Product, engine: Replicas | Built, seconds: int) -> None:
    product.around.offset += timedelta(seconds=seconds)
    if isinstance(engine, Built):
        engine.stub.started_at -= seconds


def live(product: Product, engine: Replicas | Built) -> None:
    around, chance = product.around, product.around.random
    for _ in range(STEPS):
        engine.disturb()
        wait(product, engine, chance.choice([0, 1, 1, 10, 180, 400, 1_200, 7_200]))
        steps = chance.randrange(20) if chance.random() < 0.4 else None
        act = chance.choices(
            [product.retrain, product.look, product.roll_back, product.find_worse, product.stand],
            [4, 8, 3, 2, 1],
        )[0]
        around.killed_after(steps, act)
    for hour in range(12):
        wait(product, engine, 3_600)
        engine.calm(has_time=hour > 2)
        around.killed_after(None, product.look)


def faults(product: Product, engine: Replicas | Built) -> list[str]:
    """What database, engine and files disagree about."""
    with product.database.session() as session:
        runs = retrain_runs.list_page(session, limit=100)
        states = {draft.version: draft.state for draft in drafts.list_page(session, limit=100)}
        served = drafts.find(session, SERVER, TARGET, engine.version)
        incident = session.query(Incident).one()
    found = [f"{of}: {fault}" for of, fault in _faults_of_runs(runs, states, engine)]
    if (serving := [version for version, state in states.items() if state == "in_service"]) != [
        engine.version
    ]:
        found.append(f"{serving} in service, {engine.version} serves")
    is_watched = any(each.state == "watching" and each.incident_id for each in runs)
    if (incident.state == "mitigating") != is_watched:
        found.append(f"incident {incident.state}, watched: {is_watched}")
    has_files = served is not None and served.directory is not None and Path(served.directory).is_dir()
    if not has_files and not product.around.is_meddled_with:
        found.append(f"the files of {engine.version} are gone")
    return found


def _faults_of_runs(
    runs: Sequence[RetrainRun], states: Mapping[str, str], engine: Replicas | Built
) -> Iterator[tuple[str | None, str]]:
    for each in runs:
        version = each.candidate_version
        if each.state == "watching":
            if retrain_runs.watch_of(each).verdict == "worse" or version != engine.version:
                yield version, f"watched while {engine.version} serves, {retrain_runs.watch_of(each).verdict}"
        elif each.state not in retrain_runs.ENDED_STATES or each.ended_at is None or not each.reason:
            yield version, f"run {each.state} since {each.ended_at}: {each.reason}"
        elif engine.around.is_meddled_with:
            continue  # what somebody did with it later is not told by its run
        elif each.state == "failed" and version == engine.version:
            yield version, f"serves, and its run failed: {each.reason}"
        elif each.state == "rolled_back" and states[version or ""] != "rolled_back":
            yield version, f"its run was rolled back, it is {states[version or '']}"
        elif each.state == "promoted" and retrain_runs.numbers_of(each).watch == WORSE:
            back = f"because draft {each.parent_version} is in service"
            if "accepted less than" not in each.reason or back in each.reason:
                yield version, f"is worse, and its run does not tell: {each.reason}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["restart", "admin"])
@pytest.mark.parametrize("seed", [4, 8, 18, 55])
def test_once_all_is_quiet_database_and_engine_agree(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, kind: str
) -> None:
    first = tmp_path / "first"
    save_directory(first, small_model(2))
    around = World(database, monkeypatch, seed)
    if kind == "restart":
        settings = restarted_settings(
            tmp_path / "data", first, first, promote_command=["/bin/true"], promote_wait_seconds=600
        )
        drift(database, FIRST, around.now() - timedelta(minutes=5))
        replicas = Replicas(around, monkeypatch)
        replicas.tell()
        product = Product(around, settings, first, monkeypatch)
        live(product, replicas)
        assert faults(product, replicas) == [], "\n".join(around.told)
        return
    stub = FallsSilent(first, first)
    stub.serving = stub.first = {**stub.serving, "version": FIRST}
    stub.loaded = {FIRST: stub.first}
    with running(stub):
        drift(database, FIRST, around.now() - timedelta(minutes=5))
        product = Product(around, make_settings(tmp_path / "data", stub.url), first, monkeypatch)
        built = Built(around, stub)
        live(product, built)
        assert faults(product, built) == [], "\n".join(around.told)
