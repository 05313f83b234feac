"""A vLLM that takes a new draft without a restart: whatever fails, it goes on, and the run says with what."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from driftguard.retraining.engines import live_update
from driftguard.retraining.engines.engine_admin import EngineRefused
from driftguard.retraining.engines.live_update import MayBePaused
from driftguard.retraining.engines.vllm_update import VllmUpdate
from driftguard.retraining.promotion.rollback import roll_back
from driftguard.settings import Settings
from driftguard.store import retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import Stream
from tests.alerting.http_receiver import wait_until
from tests.retraining.promotion.test_restart import Restarts
from tests.retraining.restarted import NEW, OLD, SERVER, passed_the_gate, promote, serves
from tests.retraining.vllm_stub import Fault, VllmStub, running
from tests.retraining.world import incident_states

pytestmark = pytest.mark.slow

ALL_STEPS = [
    "/is_paused",
    "/init_weight_transfer_engine",
    "/start_draft_weight_update",
    "/update_weights",
    "/pause",
    "/finish_weight_update",
    "/resume",
]


class Live(Restarts):
    """As Restarts, beside a vLLM."""

    def __init__(self, database: Database, directory: Path, vllm: VllmStub) -> None:
        super().__init__(database, directory)
        self.vllm = vllm
        self.old, self.new = str(directory / "draft"), str(directory / "data" / "drafts" / NEW)

    def settings(self, **retraining: object) -> Settings:
        return super().settings(update_url=self.vllm.url, **retraining)

    def served(self) -> str:
        """What the weights are."""
        if self.vllm.is_mixed:
            return "a mix"
        return {self.old: OLD, self.new: NEW}[self.vllm.weights]


@pytest.fixture
def live(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(live_update, "_RESUME_PAUSE_SECONDS", 0.01)
    with running(VllmStub(str(tmp_path / "draft"))) as stub:
        yield Live(database, tmp_path, stub)


def test_the_new_draft_is_loaded_and_its_records_prove_it(live: Live) -> None:
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served(), live.vllm.version) == ("rolling_out", NEW, NEW)
    assert live.vllm.calls == [*ALL_STEPS, "/is_paused"]
    assert not live.vllm.is_paused
    assert live.calls() == []  # no command
    serves(live.database, OLD)  # a request that had begun before
    assert live.settled(settings, made.id) == "rolling_out"
    serves(live.database, NEW)
    assert live.settled(settings, made.id) == "watching"
    assert live.states() == {OLD: "retired", NEW: "in_service"}
    assert live.run(made.id).reason == "better; loaded without a restart"


@pytest.mark.parametrize("stands", [False, True])
def test_one_that_a_restart_of_the_server_lost_is_called_so(live: Live, stands: bool) -> None:
    """It is in the memory of that server alone, and nothing loads it again."""
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    promote(live.database, settings, made.id, made.incident_id)
    serves(live.database, NEW)
    assert live.settled(settings, made.id) == "watching"
    with live.database.session() as session:
        if stands:
            retrain_runs.end(session, made.id, "promoted", "it stands", datetime.now(UTC))
        session.execute(update(Stream).values(traffic_arrived_at=datetime.now(UTC) - timedelta(minutes=6)))
    serves(live.database, OLD)
    assert live.settled(settings, made.id) == "promoted"
    assert live.states() == {OLD: "in_service", NEW: "lost"}


@pytest.mark.parametrize("fault", ["refuse", "garble", "drop", "lose", "hang"])
@pytest.mark.parametrize("step", ALL_STEPS)
def test_one_fault_at_any_step(live: Live, monkeypatch: pytest.MonkeyPatch, step: str, fault: Fault) -> None:
    """The server goes on with one whole draft, and the run says with which."""
    settings = live.settings(promote_timeout_seconds=1.0 if fault == "hang" else 60.0)
    if fault == "hang":
        monkeypatch.setattr(live_update, "ANSWER_SECONDS", 3.0)
        monkeypatch.setattr(live_update, "LOAD_SECONDS", 3.0)
    made = passed_the_gate(live.database, settings)
    live.vllm.faults[step] = fault, 1
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert not live.vllm.is_paused
    assert not live.vllm.active
    done_all_the_same = step == "/resume" or (step == "/finish_weight_update" and fault in ("lose", "hang"))
    if done_all_the_same:
        assert (outcome.state, live.served()) == ("rolling_out", NEW)
    elif (step, fault) == ("/init_weight_transfer_engine", "refuse"):
        assert (outcome.state, live.served()) == ("rolling_out", OLD)  # a restart was asked for
        assert len(live.calls()) == 1
        return
    else:
        assert (outcome.state, live.served()) == ("failed", OLD)
        assert made.incident_id is not None
        assert incident_states(live.database, made.incident_id)[-1] == "open"
        touched = step not in ("/is_paused", "/init_weight_transfer_engine")
        assert f"draft {OLD} " in outcome.reason or not touched
        assert step in outcome.reason
        assert live.run(made.id).reason == outcome.reason
    assert live.calls() == []
    assert live.unsettled(settings) == []


def test_a_mix_of_both_drafts_is_replaced_or_told(live: Live) -> None:
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    live.vllm.faults["/finish_weight_update"] = "refuse", 3
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served(), live.vllm.is_paused) == ("failed", "a mix", False)
    assert "out of memory; draft v1 could not be put back" in outcome.reason
    assert "until the server is restarted" in outcome.reason


def test_a_session_that_cannot_be_ended_is_why_no_other_begins(live: Live) -> None:
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    live.vllm.faults["/finish_weight_update"] = "refuse", 2
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert re.search(
        r"could not be put back \(.* answered /start_draft_weight_update with 500: start_weight_update "
        r"called while a weight update is already active\.; the session before was not ended: .* "
        r"answered /finish_weight_update with 500: out of memory\)",
        outcome.reason,
    )


def test_a_server_that_is_not_resumed_is_tried_until_it_is(live: Live) -> None:
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    live.vllm.faults["/resume"] = "drop", 12
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.vllm.is_paused) == ("failed", True)
    assert "may be paused, and cannot be resumed" in (live.run(made.id).reason or "")
    assert live.run(made.id).state == "rolling_out"
    assert live.unsettled(settings) == [SERVER]
    with pytest.raises(MayBePaused):
        live.settled(settings, made.id)
    assert live.settled(settings, made.id) == "rolling_out"
    assert (live.vllm.is_paused, live.served()) == (False, NEW)
    assert live.unsettled(settings) == []
    serves(live.database, NEW)
    assert live.settled(settings, made.id) == "watching"


@pytest.mark.parametrize("step", ["/pause", "/finish_weight_update"])
def test_killed_while_the_server_is_paused(live: Live, tmp_path: Path, step: str) -> None:
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    live.vllm.faults[step] = "hang", 1
    url = live.database.url.render_as_string(hide_password=False)
    arguments = [url, str(tmp_path), live.command, str(made.id), live.vllm.url]
    process = subprocess.Popen([sys.executable, "-m", "tests.retraining.restarted", *arguments])
    wait_until(lambda: live.vllm.hung.is_set() or process.poll() is not None, step)
    process.kill()
    process.wait()
    live.vllm.release.set()
    assert live.vllm.is_paused
    wait_until(lambda: live.unsettled(settings) == [SERVER], "the end of the killed run's lock")
    assert live.settled(settings, made.id) == "rolling_out"
    assert (live.vllm.is_paused, live.served()) == (False, NEW)
    assert live.calls() == []
    serves(live.database, NEW)
    assert live.settled(settings, made.id) == "watching"


def test_where_the_address_is_taken_out_after_it_was_cut_off_a_restart_is_asked_for(live: Live) -> None:
    """It resumes the server, which may be paused, and nobody else can."""
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    promote(live.database, settings, made.id, made.incident_id)
    live.change(made.id, "rollout", live="begun")
    without = Restarts.settings(live)
    assert live.settled(without, made.id) == "rolling_out"
    assert [call["DRIFTGUARD_DRAFT_VERSION"] for call in live.calls()] == [NEW]
    assert live.unsettled(without) == []
    serves(live.database, NEW)
    assert live.settled(without, made.id) == "watching"
    assert "by a restart, not live: an update was cut off, and engines.update_url is no longer set" in (
        live.run(made.id).reason or ""
    )


def test_the_files_must_be_those_that_the_run_made(live: Live) -> None:
    """Workers are told the digest that the run has, also by who goes on with it, and not that of a list which
    was exchanged since."""
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    with live.database.session() as session:
        row = retrain_runs.find(session, made.id)
        assert row is not None
        row.numbers = replace(retrain_runs.numbers_of(row), checksums_sha256="5e" * 32)
    promote(live.database, settings, made.id, made.incident_id)
    assert live.vllm.digest == "5e" * 32
    live.vllm.digest = None
    live.change(made.id, "rollout", live="begun")
    live.settled(settings, made.id)
    assert live.vllm.digest == "5e" * 32


def test_killed_after_the_records_came(live: Live) -> None:
    """Nothing is loaded again into a server that is proven to serve the draft."""
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    promote(live.database, settings, made.id, made.incident_id)
    live.change(made.id, "rollout", live="begun")
    serves(live.database, NEW)
    assert live.settled(settings, made.id) == "watching"
    assert live.vllm.seen()["/finish_weight_update"] == 2  # the second ends a session, if there is one
    assert live.vllm.version == NEW


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("has_routes", "answered /is_paused with 404: .*VLLM_SERVER_DEV_MODE=1"),
        ("has_backend", "with 500: Weight transfer not configured"),
    ],
)
def test_where_it_is_not_offered_a_restart_is_asked_for(live: Live, lacks: str, reason: str) -> None:
    setattr(live.vllm, lacks, False)
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, len(live.calls()), live.served()) == ("rolling_out", 1, OLD)
    assert set(live.vllm.calls) <= set(ALL_STEPS[:2])
    serves(live.database, NEW)
    assert live.settled(settings, made.id) == "watching"
    told = live.run(made.id)
    assert retrain_runs.rollout_of(told).live == "no"
    for text in (retrain_runs.rollout_of(told).not_live, told.reason or ""):
        assert re.search(reason, text)


def test_where_nothing_can_restart_it_the_reason_is_why_it_is_not_loaded_live(live: Live) -> None:
    live.vllm.has_backend = False
    settings = live.settings(promote_command=[])
    made = passed_the_gate(live.database, settings)
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert outcome.state == "failed"
    assert "neither retraining.promote_command nor promote_webhook is set" in outcome.reason
    assert "Weight transfer not configured" in outcome.reason


def test_a_server_that_somebody_else_paused_stays_paused(live: Live) -> None:
    live.vllm.is_paused = True
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.vllm.is_paused) == ("failed", True)
    assert "was paused by somebody else" in outcome.reason
    assert set(live.vllm.calls) == set(ALL_STEPS[:2])


def test_a_worse_draft_is_taken_back_live(live: Live) -> None:
    settings = live.settings()
    run_id = live.watched(settings)
    live.change(run_id, "watch", verdict="worse")
    live.vllm.faults["/update_weights"] = "refuse", 1
    assert live.settled(settings, run_id) == "rolling_back"
    assert live.served() == NEW
    live.change(run_id, "rollout", until=datetime.now(UTC) - timedelta(seconds=1))
    assert live.settled(settings, run_id) == "rolling_back"
    assert (live.served(), live.vllm.version) == (OLD, OLD)
    serves(live.database, OLD)
    assert live.settled(settings, run_id) == "rolled_back"
    assert live.calls() == []


def test_by_hand_a_refusal_is_raised(live: Live) -> None:
    settings = live.settings()
    run_id = live.watched(settings)
    live.vllm.faults["/pause"] = "refuse", 1
    with pytest.raises(EngineRefused, match="out of memory; draft v2 was not replaced"):
        roll_back(live.database, settings, server=SERVER, draft_version=NEW, reason="it loops")
    assert (live.run(run_id).state, live.served()) == ("watching", NEW)
    roll_back(live.database, settings, server=SERVER, draft_version=NEW, reason="it loops")
    assert (live.run(run_id).state, live.served()) == ("rolling_back", OLD)


def test_records_are_awaited_for_as_long_as_the_server_says_that_it_serves_the_draft(live: Live) -> None:
    """At night there may be no traffic; a server that was restarted serves its first draft again."""
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    promote(live.database, settings, made.id, made.incident_id)
    for version, state in ((NEW, "rolling_out"), ("default", "failed")):
        live.change(made.id, "rollout", until=datetime.now(UTC) - timedelta(seconds=1))
        live.vllm.version = version
        assert live.settled(settings, made.id) == state
    assert "no record of draft v2 has arrived" in (live.run(made.id).reason or "")


def test_a_server_that_no_longer_says_what_it_serves_blocks_nothing(live: Live) -> None:
    """It was restarted without its development routes; no record of the draft will come."""
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    promote(live.database, settings, made.id, made.incident_id)
    live.change(made.id, "rollout", until=datetime.now(UTC) - timedelta(seconds=1))
    live.vllm.has_routes = False
    assert live.settled(settings, made.id) == "failed"
    assert "no record of draft v2 has arrived" in (live.run(made.id).reason or "")


def test_no_password_is_told() -> None:
    with pytest.raises(EngineRefused, match="9 does not answer /weight_info") as caught:
        VllmUpdate("http://user:hunter2@127.0.0.1:9", "secret-key", 1.0).version()
    assert "hunter2" not in caught.value.detail
