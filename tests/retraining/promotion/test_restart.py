"""Engines that take a new draft by a restart: a real command or receiver is told, and the records decide."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

import msgspec
import psutil
import pytest
from sqlalchemy import update

from driftguard.errors import Conflict
from driftguard.retraining import run
from driftguard.retraining.engines import webhook
from driftguard.retraining.engines.connect import connect
from driftguard.retraining.engines.engine_admin import EngineRefused
from driftguard.retraining.ledger.outcome import Progress, RetrainOutcome
from driftguard.retraining.promotion import restart
from driftguard.retraining.promotion.reconcile import settle
from driftguard.retraining.promotion.rollback import roll_back
from driftguard.retraining.tasks import RetrainingJobs
from driftguard.settings import ORDER_VARIABLES, Settings
from driftguard.store import announced_drafts, drafts, retrain_runs, source_activity, sources
from driftguard.store.database import Database
from driftguard.store.sources import SourceState
from driftguard.store.tables import Draft, RetrainRun, Stream
from tests.alerting.http_receiver import Receiver, http_receiver, wait_until
from tests.retraining.conftest import Drifted
from tests.retraining.restarted import (
    NEW,
    OLD,
    SERVER,
    passed_the_gate,
    promote,
    restarted_settings,
    script,
    serves,
)
from tests.retraining.world import Models, incident_states, record, store

pytestmark = pytest.mark.slow


class Restarts:
    """A database, and a command that writes down what it is told, once per call."""

    def __init__(self, database: Database, directory: Path) -> None:
        self.database = database
        self._directory = directory
        self.told = directory / "told"
        self.told.mkdir()
        self.command = script(
            directory / "restart.sh",
            f'env | grep ^DRIFTGUARD_ | sort > "{self.told}/$(ls {self.told} | wc -l)"',
            'echo "restarting $1"',
            f'exit "$(cat {directory}/status 2>/dev/null || echo 0)"',
        )

    def settings(self, **retraining: object) -> Settings:
        rules = {"promote_command": [self.command, "all; of them"], **retraining}
        models = self._directory
        return restarted_settings(models / "data", models / "target", models / "draft", **rules)

    def exits_with(self, status: int) -> None:
        (self._directory / "status").write_text(str(status))

    def calls(self) -> list[dict[str, str]]:
        found = sorted(self.told.iterdir(), key=lambda path: int(path.name))
        return [dict(line.split("=", 1) for line in path.read_text().splitlines()) for path in found]

    def run(self, run_id: UUID) -> RetrainRun:
        with self.database.session() as session:
            found = retrain_runs.find(session, run_id)
        assert found is not None
        return found

    def settled(self, settings: Settings, run_id: UUID) -> str:
        settle(self.database, settings, SERVER)
        return self.run(run_id).state

    def unsettled(self, settings: Settings) -> list[str]:
        """Servers for which the sidecar would queue a job now."""
        with self.database.session() as session:
            return list(RetrainingJobs(self.database, settings)._unsettled(session))

    def states(self) -> dict[str, str]:
        with self.database.session() as session:
            return {draft.version: draft.state for draft in drafts.list_page(session, limit=10)}

    def change(self, run_id: UUID, part: str, **values: object) -> None:
        """Of the run's stored numbers."""
        with self.database.session() as session:
            row = retrain_runs.find(session, run_id)
            assert row is not None
            numbers = retrain_runs.numbers_of(row)
            row.numbers = replace(numbers, **{part: replace(getattr(numbers, part), **values)})

    def watched(self, settings: Settings) -> UUID:
        """A run whose candidate was promoted by a restart."""
        made = passed_the_gate(self.database, settings)
        assert promote(self.database, settings, made.id, made.incident_id).state == "rolling_out"
        serves(self.database, NEW)
        assert self.settled(settings, made.id) == "watching"
        return made.id


@pytest.fixture
def restarts(database: Database, tmp_path: Path) -> Restarts:
    return Restarts(database, tmp_path)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with http_receiver() as running:
        yield running


def test_the_command_is_told_and_the_records_decide(
    restarts: Restarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRIFTGUARD_DATABASE_URL", "postgresql://user:hunter2@db/x")
    (tmp_path / "first").mkdir()
    (tmp_path / "draft").symlink_to(tmp_path / "first")  # which promotions turn to other drafts
    settings = restarts.settings()
    made = passed_the_gate(restarts.database, settings)
    outcome = promote(restarts.database, settings, made.id, made.incident_id)
    assert outcome.state == "rolling_out"
    assert restarts.calls() == [
        {
            "DRIFTGUARD_ACTION": "promote",
            "DRIFTGUARD_RUN_ID": str(made.id),
            "DRIFTGUARD_SERVER": SERVER,
            "DRIFTGUARD_TARGET": "target",
            "DRIFTGUARD_METHOD": "draft_model",
            "DRIFTGUARD_DRAFT_PATH": str(tmp_path / "data" / "drafts" / NEW),
            "DRIFTGUARD_DRAFT_VERSION": NEW,
            "DRIFTGUARD_PREVIOUS_PATH": str(tmp_path / "first"),
            "DRIFTGUARD_PREVIOUS_VERSION": OLD,
        }
    ]
    assert set(restarts.calls()[0]) == ORDER_VARIABLES  # which no setting is taken for
    rolling = restarts.run(made.id)
    assert retrain_runs.rollout_of(rolling).output == "restarting all; of them\n"  # no shell took it apart

    serves(restarts.database, OLD)  # a server that has not been restarted yet
    assert restarts.settled(settings, made.id) == "rolling_out"
    assert restarts.states() == {OLD: "in_service", NEW: "candidate"}
    assert restarts.unsettled(settings) == []
    serves(restarts.database, NEW)
    assert restarts.unsettled(settings) == [SERVER]  # by the sidecar, whatever became of who asked
    assert restarts.settled(settings, made.id) == "watching"
    assert restarts.states() == {OLD: "retired", NEW: "in_service"}
    serves(restarts.database, OLD)  # the last of them
    assert restarts.settled(settings, made.id) == "watching"
    assert restarts.states() == {OLD: "retired", NEW: "in_service"}
    assert len(restarts.calls()) == 1


def test_a_first_draft_that_was_moved_is_where_the_settings_say(restarts: Restarts, tmp_path: Path) -> None:
    """As to a larger disk: it is trained from, and rolled back to, where it is now."""
    first, moved = tmp_path / "draft", tmp_path / "disk"
    first.mkdir()
    made = passed_the_gate(restarts.database, restarts.settings())
    first.rename(moved)
    command = [restarts.command, "now"]
    settings = restarted_settings(tmp_path / "data", tmp_path / "target", moved, promote_command=command)
    settle(restarts.database, settings, SERVER)
    assert promote(restarts.database, settings, made.id, made.incident_id).state == "rolling_out"
    serves(restarts.database, NEW)
    assert restarts.settled(settings, made.id) == "watching"
    restarts.change(made.id, "watch", verdict="worse")
    assert restarts.settled(settings, made.id) == "rolling_back"
    promoted, rolled_back = restarts.calls()
    assert promoted["DRIFTGUARD_PREVIOUS_PATH"] == rolled_back["DRIFTGUARD_DRAFT_PATH"] == str(moved)


def test_models_below_the_home_directory_are_found_there(
    restarts: Restarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    serves(restarts.database, OLD)
    settings = restarted_settings(
        tmp_path / "data", Path("~/target"), Path("~/draft"), promote_command=[restarts.command]
    )
    found = connect(restarts.database, settings, SERVER).info()
    assert found.target_directory == str(tmp_path / "target")
    assert found.draft.directory == str(tmp_path / "draft")


@pytest.mark.parametrize(
    ("command", "seconds", "reason"),
    [
        (["restart.sh", "now"], 60.0, "promote_command ended with status 7: restarting now"),
        (["slow.sh"], 2.0, "promote_command did not end within 2 s: waiting"),
        (["none.sh"], 60.0, "none.sh is missing or not executable"),
    ],
)
def test_a_command_that_fails_fails_the_run_and_keeps_the_draft(
    restarts: Restarts, tmp_path: Path, command: list[str], seconds: float, reason: str
) -> None:
    restarts.exits_with(7)
    script(tmp_path / "slow.sh", "echo waiting", "sleep 60")
    command = [str(tmp_path / command[0]), *command[1:]]
    settings = restarts.settings(promote_command=command, promote_timeout_seconds=seconds)
    made = passed_the_gate(restarts.database, settings)
    outcome = promote(restarts.database, settings, made.id, made.incident_id)
    assert (outcome.state, outcome.exit_code) == ("failed", 1)
    assert reason in outcome.reason
    ended = restarts.run(made.id)
    assert (ended.state, ended.reason) == ("failed", outcome.reason)
    assert restarts.states() == {OLD: "in_service", NEW: "candidate"}
    assert made.incident_id is not None
    assert incident_states(restarts.database, made.incident_id) == ["open", "mitigating", "open"]


NOT_RUN = "retraining.promote_command cannot be run: [Errno 2] No such file or directory: '/nonexistent/"


def test_a_command_that_cannot_be_run_for_want_of_a_temporary_directory_fails_the_run(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full or read-only disk."""
    settings = restarts.settings()
    made = passed_the_gate(restarts.database, settings)
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    outcome = promote(restarts.database, settings, made.id, made.incident_id)
    assert (outcome.state, restarts.run(made.id).state) == ("failed", "failed")
    assert outcome.reason.startswith(NOT_RUN)
    assert restarts.calls() == []


def test_a_rollback_for_want_of_a_temporary_directory_is_told_and_asked_for_again(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = restarts.settings()
    run_id = restarts.watched(settings)
    restarts.change(run_id, "watch", verdict="worse")
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    assert restarts.settled(settings, run_id) == "rolling_back"
    assert f"draft v1 cannot be put back: {NOT_RUN}" in (restarts.run(run_id).reason or "")
    monkeypatch.undo()
    restarts.change(run_id, "rollout", until=datetime.now(UTC) - timedelta(seconds=1))
    assert restarts.settled(settings, run_id) == "rolling_back"
    assert restarts.calls()[-1]["DRIFTGUARD_ACTION"] == "roll_back"


def test_a_restart_that_shows_in_no_record_fails_by_name(restarts: Restarts) -> None:
    settings = restarts.settings(promote_wait_seconds=0.01)
    made = passed_the_gate(restarts.database, settings)
    promote(restarts.database, settings, made.id, made.incident_id)
    wait_until(lambda: restarts.settled(settings, made.id) != "rolling_out", "the end of the wait")
    ended = restarts.run(made.id)
    assert ended.state == "failed"
    assert "no record of draft v2 has arrived within" in (ended.reason or "")
    assert restarts.states() == {OLD: "in_service", NEW: "candidate"}
    assert made.incident_id is not None
    assert incident_states(restarts.database, made.incident_id)[-1] == "open"


def test_a_scraped_server_follows_the_order_that_is_given(restarts: Restarts) -> None:
    """Its counters do not tell the draft. What was refused, or shows in no record, is not awaited."""
    now = datetime.now(UTC)
    with restarts.database.session() as session:
        state = SourceState(SERVER, "vllm", "http://x", "counter", "reporting", "", now, now, now, 15.0)
        sources.store(session, [state])

    def awaited() -> dict[str, str]:
        with restarts.database.session() as session:
            return announced_drafts.awaited(session)

    settings = restarts.settings(promote_wait_seconds=0.01)
    made = passed_the_gate(restarts.database, settings)
    promote(restarts.database, settings, made.id, made.incident_id)
    assert awaited() == {SERVER: NEW}
    wait_until(lambda: restarts.settled(settings, made.id) == "failed", "the end of the wait")
    assert awaited() == {}
    restarts.exits_with(7)
    promote(restarts.database, settings, made.id, made.incident_id)
    assert awaited() == {}


@pytest.mark.parametrize(("killed_at", "state"), [("_store", "promoting"), ("announce", "rolling_out")])
def test_a_job_that_is_killed_before_it_gives_the_order_leaves_no_draft_to_be_taken_for_served(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch, killed_at: str, state: str
) -> None:
    """By the next restart of the server, whatever that is for."""
    now = datetime.now(UTC)
    with restarts.database.session() as session:
        source = SourceState(SERVER, "vllm", "http://x", "counter", "reporting", "", now, now, now, 15.0)
        sources.store(session, [source])

    def killed(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    settings = restarts.settings(promote_timeout_seconds=0.01, promote_wait_seconds=0.01)
    made = passed_the_gate(restarts.database, settings)
    with monkeypatch.context() as patched:
        patched.setattr(restart if killed_at == "_store" else announced_drafts, killed_at, killed)
        with pytest.raises(KeyboardInterrupt):
            promote(restarts.database, settings, made.id, made.incident_id)
    assert (restarts.run(made.id).state, restarts.calls()) == (state, [])
    wait_until(lambda: restarts.settled(settings, made.id) == "failed", "the end of the wait")
    with restarts.database.session() as session:
        assert announced_drafts.awaited(session) == {}


def test_a_scraped_server_follows_a_rollback(restarts: Restarts) -> None:
    settings = restarts.settings()
    run_id = restarts.watched(settings)
    now = datetime.now(UTC)
    with restarts.database.session() as session:
        state = SourceState(SERVER, "vllm", "http://x", "counter", "reporting", "", now, now, now, 15.0)
        sources.store(session, [state])
    restarts.change(run_id, "watch", verdict="worse")
    assert restarts.settled(settings, run_id) == "rolling_back"
    with restarts.database.session() as session:
        assert announced_drafts.awaited(session) == {SERVER: OLD}


def test_the_webhook_is_told_until_it_accepts(
    restarts: Restarts, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recover(_: object) -> float:
        receiver.status = 202
        return 0.0

    monkeypatch.setattr(webhook, "_backoff", recover)
    receiver.status = 503
    settings = restarts.settings(
        promote_command=[], promote_webhook=receiver.url, promote_webhook_key="hunter2"
    )
    made = passed_the_gate(restarts.database, settings)
    outcome = promote(restarts.database, settings, made.id, made.incident_id)
    assert outcome.state == "rolling_out"
    first, second = receiver.received
    assert (first.answered, second.answered) == (503, 202)
    assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"]
    assert first.headers["Idempotency-Key"].startswith(f"{made.id}:promote:")
    assert second.headers["Authorization"] == "Bearer hunter2"
    assert first.body == second.body
    assert (second.body["draft_version"], second.body["previous_version"]) == (NEW, OLD)
    assert second.body["draft_path"].endswith(f"/drafts/{NEW}")
    serves(restarts.database, NEW)
    assert restarts.settled(settings, made.id) == "watching"


@pytest.mark.parametrize(
    ("status", "garbled", "seconds", "reason"),
    [
        (400, False, 60.0, "refused with HTTP 400"),
        (503, False, 2.0, "not accept within 2 s: HTTP 503"),
        (200, True, 2.0, "not accept within 2 s: HTTP 200, but the answer is encoded (gzip)"),
    ],
)
def test_a_webhook_that_does_not_accept_fails_the_run(
    restarts: Restarts, receiver: Receiver, status: int, garbled: bool, seconds: float, reason: str
) -> None:
    receiver.status, receiver.garbled = status, garbled
    settings = restarts.settings(
        promote_command=[], promote_webhook=receiver.url, promote_timeout_seconds=seconds
    )
    made = passed_the_gate(restarts.database, settings)
    outcome = promote(restarts.database, settings, made.id, made.incident_id)
    assert outcome.state == "failed"
    assert reason in outcome.reason
    assert restarts.run(made.id).state == "failed"
    if status == 400:
        assert len(receiver.received) == 1


def test_a_worse_draft_is_taken_back_by_the_same_command(restarts: Restarts, tmp_path: Path) -> None:
    settings = restarts.settings()
    run_id = restarts.watched(settings)
    restarts.change(run_id, "watch", verdict="worse")
    restarts.exits_with(1)
    assert restarts.settled(settings, run_id) == "rolling_back"
    assert restarts.settled(settings, run_id) == "rolling_back"
    assert len(restarts.calls()) == 2  # refused: not asked again at once
    refused = restarts.run(run_id)
    assert "; draft v1 cannot be put back: retraining.promote_command ended with status 1" in (
        refused.reason or ""
    )
    assert refused.incident_id is not None
    assert incident_states(restarts.database, refused.incident_id) == ["open", "mitigating", "open"]
    forced = run.retrain(restarts.database, settings, force=True)
    assert forced.state == "nothing_to_do"
    assert re.match(r"a rollout of draft v1 is under way since .* UTC: draft v2 accepted less", forced.reason)
    assert "cannot be put back: retraining.promote_command ended with status 1" in forced.reason
    restarts.exits_with(0)
    restarts.change(run_id, "rollout", until=datetime.now(UTC) - timedelta(seconds=1))
    assert restarts.settled(settings, run_id) == "rolling_back"
    assert "cannot be put back" not in (restarts.run(run_id).reason or "")
    asked = restarts.calls()[-1]
    assert len(restarts.calls()) == 3
    assert asked["DRIFTGUARD_ACTION"] == "roll_back"
    assert (asked["DRIFTGUARD_DRAFT_VERSION"], asked["DRIFTGUARD_PREVIOUS_VERSION"]) == (OLD, NEW)
    assert asked["DRIFTGUARD_DRAFT_PATH"] == str(tmp_path / "draft")
    serves(restarts.database, NEW)
    assert restarts.settled(settings, run_id) == "rolling_back"
    serves(restarts.database, OLD)
    assert restarts.settled(settings, run_id) == "rolled_back"
    assert restarts.states() == {OLD: "in_service", NEW: "rolled_back"}
    assert "accepted less than the one before it" in (restarts.run(run_id).reason or "")


def test_a_rollback_that_was_cut_off_before_its_order_was_given_is_asked_for_again_soon(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worse draft serves until then."""
    settings = restarts.settings()
    run_id = restarts.watched(settings)

    def killed(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(announced_drafts, "announce", killed)
        with pytest.raises(KeyboardInterrupt):
            roll_back(restarts.database, settings, server=SERVER, draft_version=NEW, reason="it loops")
    assert restarts.settled(settings, run_id) == "rolling_back"
    assert [call["DRIFTGUARD_ACTION"] for call in restarts.calls()] == ["promote"]
    asked = retrain_runs.rollout_of(restarts.run(run_id))
    earlier = timedelta(minutes=6)
    restarts.change(run_id, "rollout", asked_at=asked.asked_at - earlier, until=asked.until - earlier)
    assert restarts.unsettled(settings) == [SERVER]
    assert restarts.settled(settings, run_id) == "rolling_back"
    assert restarts.calls()[-1]["DRIFTGUARD_ACTION"] == "roll_back"


def test_no_server_is_restarted_with_a_draft_whose_files_are_gone(restarts: Restarts, tmp_path: Path) -> None:
    settings = restarts.settings()
    run_id = restarts.watched(settings)
    made_here = tmp_path / "data" / "drafts" / OLD
    made_here.parent.mkdir(parents=True)
    with restarts.database.session() as session:
        values = {"directory": str(made_here), "retrain_run_id": run_id}
        session.execute(update(Draft).where(Draft.version == OLD).values(values))
    with pytest.raises(Conflict, match=f"the files of draft v1, in {made_here}, are gone: bring them back"):
        roll_back(restarts.database, settings, server=SERVER, draft_version=NEW, reason="it loops")
    restarts.change(run_id, "watch", verdict="worse")
    assert restarts.settled(settings, run_id) == "rolling_back"
    assert len(restarts.calls()) == 1  # of the promotion
    assert "cannot be put back: the files of draft v1" in (restarts.run(run_id).reason or "")
    made_here.mkdir()
    restarts.change(run_id, "rollout", until=datetime.now(UTC) - timedelta(seconds=1))
    assert restarts.settled(settings, run_id) == "rolling_back"
    assert restarts.calls()[-1]["DRIFTGUARD_DRAFT_PATH"] == str(made_here)


def test_no_server_is_restarted_with_a_draft_whose_files_cannot_be_read(
    restarts: Restarts, tmp_path: Path
) -> None:
    """As those of another user; here the name is too long, which no user may pass."""
    settings = restarts.settings()
    run_id = restarts.watched(settings)
    with restarts.database.session() as session:
        values = {"directory": str(tmp_path / ("x" * 300)), "retrain_run_id": run_id}
        session.execute(update(Draft).where(Draft.version == OLD).values(values))
    restarts.change(run_id, "watch", verdict="worse")
    assert restarts.settled(settings, run_id) == "rolling_back"
    assert len(restarts.calls()) == 1  # of the promotion
    assert "x, cannot be read (File name too long): bring them back" in (restarts.run(run_id).reason or "")


def test_by_hand_it_is_asked_for_once_and_refused_by_name(restarts: Restarts) -> None:
    settings = restarts.settings()
    run_id = restarts.watched(settings)
    with restarts.database.session() as session:
        retrain_runs.end(session, run_id, "promoted", "stands", datetime.now(UTC))

    def take_back() -> str:
        told = roll_back(restarts.database, settings, server=SERVER, draft_version=NEW, reason="it loops")
        return told.version

    restarts.exits_with(1)
    with pytest.raises(EngineRefused, match="ended with status 1"):
        take_back()
    assert (restarts.run(run_id).state, restarts.run(run_id).ended_at is None) == ("promoted", False)
    assert restarts.run(run_id).reason == "stands"
    restarts.exits_with(0)
    assert take_back() == OLD
    told = "rolled back to draft v1 by hand: it loops"
    assert restarts.run(run_id).reason == told  # for as long as its records are awaited
    with pytest.raises(Conflict, match=f"a rollout of draft v1 is under way since [^:]*:..:.. UTC: {told}"):
        take_back()
    assert len(restarts.calls()) == 3
    serves(restarts.database, OLD)
    assert restarts.settled(settings, run_id) == "rolled_back"
    assert "rolled back to draft v1 by hand: it loops" in (restarts.run(run_id).reason or "")


def test_a_watch_does_not_end_while_a_rollback_is_ordered_and_goes_on_where_it_is_refused(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = restarts.settings()
    run_id = restarts.watched(settings)
    heard = source_activity.heard

    def stands_meanwhile(*asked: Any) -> Any:
        """As the fold ends a watch: where it is still one."""
        with restarts.database.session() as session:
            if retrain_runs.watching(session, SERVER, "target", NEW) is not None:
                retrain_runs.end(session, run_id, "promoted", "stands", datetime.now(UTC))
        return heard(*asked)

    monkeypatch.setattr(source_activity, "heard", stands_meanwhile)
    restarts.exits_with(1)
    with pytest.raises(EngineRefused, match="ended with status 1"):
        roll_back(restarts.database, settings, server=SERVER, draft_version=NEW, reason="it loops")
    after = restarts.run(run_id)
    assert (after.state, after.reason == "stands") == ("watching", False)


def test_killed_while_the_command_runs(restarts: Restarts, tmp_path: Path) -> None:
    settings = restarts.settings()
    made = passed_the_gate(restarts.database, settings)
    command = script(
        tmp_path / "hang.sh",
        f"echo $$ > {tmp_path}/pid.part",
        f"mv {tmp_path}/pid.part {tmp_path}/pid",
        "sleep 60",
    )
    url = restarts.database.url.render_as_string(hide_password=False)
    pid = tmp_path / "pid"
    arguments = [url, str(tmp_path), command, str(made.id)]
    process = subprocess.Popen([sys.executable, "-m", "tests.retraining.restarted", *arguments])
    wait_until(lambda: pid.exists() or process.poll() is not None, "the command's start")
    child = psutil.Process(int(pid.read_text()))
    process.kill()
    process.wait()
    assert psutil.wait_procs([child], timeout=60)[1] == [], "the command outlived the run that started it"

    def is_free() -> bool:
        with restarts.database.session() as session:
            return not retrain_runs.is_running(session, SERVER, "target")

    wait_until(is_free, "the end of the killed run's lock")
    assert restarts.settled(settings, made.id) == "rolling_out"  # nobody can know yet
    assert restarts.states()[OLD] == "in_service"
    serves(restarts.database, NEW)
    assert restarts.settled(settings, made.id) == "watching"
    assert restarts.calls() == []


def test_of_a_scraped_server_the_promotion_stands_at_once(restarts: Restarts) -> None:
    settings = restarts.settings()
    made = passed_the_gate(restarts.database, settings)
    with restarts.database.session() as session:
        session.connection().exec_driver_sql("UPDATE records SET kind = 'window'")
    promote(restarts.database, settings, made.id, made.incident_id)
    serves(restarts.database, NEW)
    assert restarts.settled(settings, made.id) == "promoted"
    assert "better; not watched: there are no records of single requests" in (
        restarts.run(made.id).reason or ""
    )


def test_a_server_without_records_is_named(restarts: Restarts) -> None:
    with pytest.raises(EngineRefused, match="no records of engine-1 have arrived yet"):
        settle(restarts.database, restarts.settings(), SERVER)


@pytest.mark.usefixtures("training_here")
def test_a_whole_retraining(drifted: Drifted, models: Models, tmp_path: Path) -> None:
    """The nightly job waits for the records; meanwhile nothing else is trained."""
    command = script(
        tmp_path / "restart.sh", f'test -f "$DRIFTGUARD_DRAFT_PATH/config.json" && touch {tmp_path}/done'
    )
    settings = restarted_settings(
        tmp_path / "data", models.target, models.draft, promote_command=[command], steps=30
    )
    ended: list[RetrainOutcome] = []
    job = threading.Thread(
        target=lambda: ended.append(run.retrain(drifted.database, settings, awaits_restart=True))
    )
    job.start()

    def rolling() -> list[RetrainRun]:
        with drifted.database.session() as session:
            return retrain_runs.in_states(session, SERVER, "target", ("rolling_out",))

    try:
        wait_until(lambda: bool(rolling()) or not job.is_alive(), "a restart")
        second = None
        while second is None or "is running already" in second.reason:
            second = run.retrain(drifted.database, settings, force=True)
        assert (second.state, second.reason.split(" of")[0]) == ("nothing_to_do", "a rollout")
        version = rolling()[0].candidate_version or ""
        serves(drifted.database, version)
    finally:
        job.join()
    (outcome,) = ended
    assert (outcome.state, outcome.exit_code) == ("promoted", 0)
    assert outcome.reason.startswith(f"draft {version}: ")
    assert (tmp_path / "done").exists()
    with drifted.database.session() as session:
        serving = drafts.in_service(session, SERVER, "target")
    assert serving is not None
    assert (serving.version, serving.directory) == (version, str(tmp_path / "data" / "drafts" / version))


@pytest.mark.usefixtures("training_here")
@pytest.mark.parametrize("is_beside", [False, True])
def test_another_target_that_serves_by_the_time_the_candidate_is_judged_gets_no_restart(
    drifted: Drifted, models: Models, tmp_path: Path, is_beside: bool
) -> None:
    """Unless it is tried beside the one that the candidate was made for, which is still heard."""
    command = script(tmp_path / "restart.sh", f"touch {tmp_path}/done")
    settings = restarted_settings(
        tmp_path / "data", models.target, models.draft, promote_command=[command], steps=30
    )

    def replace_while_judged(progress: Progress) -> None:
        if progress.stage == "evaluating":
            made = record("v1", "german", 0.7, datetime.now(UTC))
            store(drifted.database, [msgspec.structs.replace(made, target="another")])
            with drifted.database.session() as session:
                silent_since = datetime.now(UTC) - timedelta(minutes=0 if is_beside else 6)
                before = Stream.draft_version == drifted.parent
                session.execute(update(Stream).where(before).values(traffic_arrived_at=silent_since))

    outcome = run.retrain(drifted.database, settings, on_progress=replace_while_judged)
    assert (tmp_path / "done").exists() == is_beside
    if is_beside:
        assert outcome.state == "rolling_out"
    else:
        assert outcome.state == "failed"
        assert "engine-1 serves target another at" in outcome.reason
