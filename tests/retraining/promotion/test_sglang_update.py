"""An SGLang that takes a new draft without a restart: whatever fails, the run says what serves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol
from uuid import UUID

import pytest
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from driftguard.retraining.engines import live_update, sglang_tensors
from driftguard.retraining.engines.live_update import MayBePaused
from driftguard.settings import Settings
from driftguard.store import retrain_runs
from driftguard.store.database import Database
from tests.alerting.http_receiver import wait_until
from tests.retraining.promotion.test_restart import Restarts
from tests.retraining.restarted import NEW, OLD, SERVER, passed_the_gate, promote, serves
from tests.retraining.sglang_stub import Fault, SglangStub, running
from tests.retraining.world import incident_states
from tests.training.small_models import save_directory, small_model

pytestmark = pytest.mark.slow

LOADING, LOADED = "driftguard-loading:", "driftguard:"
STEPS = [
    "/server_info",
    "/weights_checker",
    "/ready",
    "/model_info",
    "/update_weight_version",
    "/pause_generation",
    "/flush_cache",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/continue_generation",
]


class Beside(Protocol):
    """A database, a command and an SGLang."""

    database: Database
    command: str

    @property
    def sglang(self) -> SglangStub: ...


class Live(Restarts):
    """As Restarts, beside an SGLang."""

    def __init__(self, database: Database, directory: Path) -> None:
        super().__init__(database, directory)
        self.old, self.new = directory / "draft", directory / "data" / "drafts" / NEW
        save_directory(self.old, small_model(1))
        save_directory(self.new, small_model(2))
        self.sglang = SglangStub(self.old)

    def settings(self, **retraining: object) -> Settings:
        return super().settings(update_url=self.sglang.url, update_engine="sglang", **retraining)

    def served(self) -> str:
        """What the weights are."""
        if self.sglang.serves(self.old):
            return OLD
        return NEW if self.sglang.serves(self.new) else "a mix"


@pytest.fixture
def live(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(live_update, "_RESUME_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(sglang_tensors, "BODY_BYTES", 5_000)  # some three parts
    found = Live(database, tmp_path)
    with running(found.sglang):
        yield found
        assert not found.sglang.changed_while_running


def test_the_new_draft_is_loaded_and_its_records_prove_it(live: Live) -> None:
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served(), live.sglang.version) == ("rolling_out", NEW, LOADED + NEW)
    assert live.sglang.calls.count("/update_weights_from_tensor") > 2
    assert (live.sglang.is_paused, live.sglang.session) == (False, None)
    assert live.calls() == []  # no command
    serves(live.database, OLD)  # a request that had begun before
    assert live.settled(settings, made.id) == "rolling_out"
    serves(live.database, NEW)
    assert live.settled(settings, made.id) == "watching"
    assert live.states() == {OLD: "retired", NEW: "in_service"}
    assert live.run(made.id).reason == "better; loaded without a restart"


def test_each_rank_of_tensor_parallelism_gets_all_tensors(live: Live) -> None:
    live.sglang.ranks = 2
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    assert promote(live.database, settings, made.id, made.incident_id).state == "rolling_out"
    assert live.served() == NEW


@pytest.mark.parametrize("fault", ["refuse", "drop", "lose", "hang"])
@pytest.mark.parametrize("step", STEPS)
def test_one_fault_at_any_step(live: Live, monkeypatch: pytest.MonkeyPatch, step: str, fault: Fault) -> None:
    """The server goes on with one whole draft, and the run says with which."""
    if fault == "hang":
        monkeypatch.setattr(live_update, "ANSWER_SECONDS", 3.0)
        monkeypatch.setattr(live_update, "LOAD_SECONDS", 3.0)
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    live.sglang.faults[step] = fault, 0, 1
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (live.sglang.is_paused, live.sglang.session) == (False, None)
    assert live.calls() == []
    does_no_harm = step in ("/end_weight_update", "/continue_generation")
    if does_no_harm or (step, fault) == ("/flush_cache", "refuse"):
        assert (outcome.state, live.served(), live.sglang.version) == ("rolling_out", NEW, LOADED + NEW)
        return
    assert (outcome.state, live.served()) == ("failed", OLD)
    assert made.incident_id is not None
    assert incident_states(live.database, made.incident_id)[-1] == "open"
    assert step in outcome.reason
    assert live.run(made.id).reason == outcome.reason
    assert live.unsettled(settings) == []
    was_half_loaded = step == "/update_weights_from_tensor" and fault in ("lose", "hang")
    if was_half_loaded:
        assert "draft v1 was put back and serves" in outcome.reason
        assert live.sglang.version == LOADED + OLD
    else:
        assert live.sglang.version == "default"
        assert "draft v1 was not replaced" in outcome.reason


@pytest.mark.parametrize(
    ("queued", "refusals", "is_flushed"), [(3, 0, True), (0, 1, True), (3, 1, False), (0, 2, False)]
)
def test_what_the_old_draft_computed_is_flushed_or_told(
    live: Live, queued: int, refusals: int, is_flushed: bool
) -> None:
    """Paused, SGLang flushes in spite of a queue; a grammar that is compiled then may prevent it."""
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    live.sglang.queued = queued
    live.sglang.faults["/flush_cache"] = "refuse", 0, refusals
    with capture_logs() as logs:
        outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served(), live.sglang.is_paused) == ("rolling_out", NEW, False)
    assert live.sglang.has_old_prefixes is not is_flushed
    warnings = [line["reason"] for line in logs if line["log_level"] == "warning"]
    assert len(warnings) == (not is_flushed)
    assert all("Flush cache failed" in reason for reason in warnings)


@pytest.mark.parametrize("fault", ["lose", "hang"])
def test_the_answer_to_the_last_part_is_lost(
    live: Live, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(live_update, "LOAD_SECONDS", 1.0)
    monkeypatch.setattr(sglang_tensors, "BODY_BYTES", 1 << 20)  # one part
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    live.sglang.faults["/update_weights_from_tensor"] = fault, 0, 1
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served()) == ("rolling_out", NEW)
    assert (live.sglang.is_paused, live.sglang.session) == (False, None)


def test_half_an_update_that_cannot_be_put_back_is_told(live: Live) -> None:
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    live.sglang.faults["/update_weights_from_tensor"] = "drop", 1, 9
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served()) == ("failed", "a mix")
    assert (live.sglang.is_paused, live.sglang.session) == (False, None)
    assert "draft v1 could not be put back" in outcome.reason
    assert "until the server is restarted" in outcome.reason


def test_a_draft_that_is_not_what_was_sent_is_not_believed(live: Live) -> None:
    """The server says that it has loaded all, and serves what it served before."""
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    shutil.copy(live.old / "model.safetensors", live.new / "model.safetensors")
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert outcome.state == "failed"
    assert (
        "took draft v2, and its checksums are not this draft's; draft v1 was not replaced" in outcome.reason
    )
    assert live.sglang.version == "default"


def other_shape(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:4].clone()
    save_file(tensors, directory / "model.safetensors")


def other_configuration(directory: Path) -> None:
    found = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**found, "rms_norm_eps": 0.5}))


def no_object(directory: Path) -> None:
    (directory / "config.json").write_text("[]")


def another_member_without_a_name(directory: Path) -> None:
    found = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**found, "": 1}))


def half_a_file(directory: Path) -> None:
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").unlink()  # what is mapped into a server's memory stays
    (directory / "model.safetensors").write_bytes(content[: len(content) // 2])


def other_type(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file({name: tensor.double() for name, tensor in tensors.items()}, directory / "model.safetensors")


def bytes_of_another_shape(directory: Path) -> None:
    content = (directory / "model.safetensors").read_bytes()
    changed = content.replace(b'"F32"', b'"F16"')
    assert changed != content
    (directory / "model.safetensors").write_bytes(changed)


def a_list_of_other_files(directory: Path) -> None:
    (directory / "SHA256SUMS").write_text("00" * 32 + "  model.safetensors\n")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (other_shape, r"the tensors of the draft differ .*: model\.norm\.weight is \(4,\), not \(16,\)"),
        (other_configuration, r"the config\.json of the draft differ.*: rms_norm_eps is 0\.5, not"),
        (no_object, r"config\.json of the draft cannot be read: Expected `object`, got `array`"),
        (another_member_without_a_name, r"the config\.json of the draft differ.*:  is 1, not None"),
        (half_a_file, r"model\.safetensors of the draft cannot be read: it has more or fewer bytes"),
        (other_type, r"the tensor .* is F64, not one of BF16, F16, F32"),
        (bytes_of_another_shape, r"the tensor .* has \d+ bytes, not those of its shape"),
        (a_list_of_other_files, r"model\.safetensors is not as the training wrote it"),
        (shutil.rmtree, r"there is no \.safetensors file in"),
    ],
)
def test_what_would_end_the_server_is_not_sent(
    live: Live, damage: Callable[[Path], None], reason: str
) -> None:
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    damage(live.new)
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served(), live.sglang.starts) == ("failed", OLD, 1)
    assert re.search(reason + ".*; draft v1 was not replaced", outcome.reason)
    assert not {"/pause_generation", "/begin_weight_update"} & set(live.sglang.calls)


def test_a_server_that_ends_while_a_draft_is_loaded_is_not_given_it_again(live: Live) -> None:
    """It comes back with its first draft, and what may have ended it must not end it for ever."""
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    live.sglang.faults |= {
        "/update_weights_from_tensor": ("die", 1, 1),
        "/end_weight_update": ("drop", 0, 9),  # it is not back yet
        "/continue_generation": ("drop", 0, 12),
    }
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert outcome.state == "failed"
    assert live.run(made.id).state == "rolling_out"
    assert "may be paused, and cannot be resumed" in outcome.reason
    sent = live.sglang.calls.count("/update_weights_from_tensor")
    assert live.unsettled(settings) == [SERVER]
    with pytest.raises(MayBePaused):
        live.settled(settings, made.id)
    assert live.settled(settings, made.id) == "failed"
    assert (live.served(), live.sglang.starts) == (OLD, 2)
    assert live.sglang.calls.count("/update_weights_from_tensor") == sent
    assert "its weight version is default): it has started again" in (live.run(made.id).reason or "")
    assert live.unsettled(settings) == []


def test_a_server_that_ends_and_is_back_at_once(live: Live) -> None:
    """It serves its first draft, which is the one before, and the run says that it does."""
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    live.sglang.faults["/update_weights_from_tensor"] = "die", 1, 1
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served(), live.sglang.starts) == ("failed", OLD, 2)
    assert "does not answer /update_weights_from_tensor" in outcome.reason
    assert "draft v1 was not replaced" in outcome.reason
    assert live.sglang.version == "default"


def kill(
    live: Beside, tmp_path: Path, run_id: UUID, step: str, engine: str = "sglang"
) -> subprocess.Popen[bytes]:
    """A promotion is killed while it waits for the answer to this step."""
    live.sglang.faults[step] = "hang", 0, 1
    url = live.database.url.render_as_string(hide_password=False)
    arguments = [url, str(tmp_path / "data"), live.command, str(run_id), live.sglang.url, engine]
    process = subprocess.Popen([sys.executable, "-m", "tests.retraining.restarted", *arguments])
    wait_until(lambda: live.sglang.hung.is_set() or process.poll() is not None, step)
    process.kill()
    process.wait()
    live.sglang.release.set()
    return process


def kill_at(live: Live, tmp_path: Path, run_id: UUID, settings: Settings, step: str) -> None:
    kill(live, tmp_path, run_id, step)
    assert live.sglang.is_paused
    wait_until(lambda: live.unsettled(settings) == [SERVER], "the end of the killed run's lock")


def kill_half_way(live: Live, tmp_path: Path, run_id: UUID, settings: Settings) -> None:
    """As if it had been killed after the first of several parts."""
    kill_at(live, tmp_path, run_id, settings, "/begin_weight_update")
    name, new = next(iter(load_file(live.new / "model.safetensors").items()))
    live.sglang.tensors[name] = new
    assert (live.served(), live.sglang.version) == ("a mix", LOADING + NEW)


@pytest.mark.parametrize("step", ["/pause_generation", "/update_weights_from_tensor", "/end_weight_update"])
def test_killed_while_the_server_is_paused(live: Live, tmp_path: Path, step: str) -> None:
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    kill_at(live, tmp_path, made.id, settings, step)
    assert live.settled(settings, made.id) == "rolling_out"
    assert (live.sglang.is_paused, live.sglang.session, live.served()) == (False, None, NEW)
    assert live.calls() == []
    serves(live.database, NEW)
    assert live.settled(settings, made.id) == "watching"


@pytest.mark.parametrize("refused", ["/pause_generation", "/begin_weight_update", "files"])
def test_an_update_that_goes_on_from_half_a_draft_is_refused(
    live: Live, tmp_path: Path, refused: str
) -> None:
    """Nothing was loaded this time, and yet the draft before does not serve."""
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    kill_half_way(live, tmp_path, made.id, settings)
    if refused == "files":
        shutil.rmtree(live.new)
    else:
        live.sglang.faults[refused] = "refuse", 0, 1
    assert live.settled(settings, made.id) == "failed"
    assert (live.served(), live.sglang.version) == (OLD, LOADED + OLD)
    assert (live.sglang.is_paused, live.sglang.session) == (False, None)
    assert "draft v1 was put back and serves" in (live.run(made.id).reason or "")


@pytest.mark.parametrize(("step", "times"), [("/server_info", 1), ("/begin_weight_update", 2)])
def test_half_a_draft_that_no_later_update_replaces_is_told_each_time(
    live: Live, tmp_path: Path, step: str, times: int
) -> None:
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    kill_half_way(live, tmp_path, made.id, settings)
    live.sglang.faults[step] = "refuse", 0, times
    assert live.settled(settings, made.id) == "failed"
    first = live.run(made.id).reason or ""
    live.sglang.faults["/begin_weight_update"] = "refuse", 0, 2
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert live.served() == "a mix"
    for reason in (first, outcome.reason):
        assert "draft v1, draft v2, or a mix of both, serves until the server is restarted" in reason


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ({"has_routes": False}, "answered /weights_checker with 404: .*Not Found"),
        ({"selects": False}, "gives no checksums of a draft for 1 ranks"),
        ({"key": "another"}, r"answered /server_info with 401: Unauthorized \(is engines\.api_key its key"),
        ({"info": {"speculative_algorithm": "NGRAM"}}, "speculative_algorithm is NGRAM, not STANDALONE"),
        ({"info": {"speculative_algorithm": "EAGLE3"}}, "speculative_algorithm is EAGLE3, not STANDALONE"),
        ({"info": {"dp_size": 2}}, "dp_size is 2, not 1"),
        ({"info": {"weight_cache_mode": "client"}}, "weight_cache_mode is client, not off"),
        (
            {"info": {"speculative_draft_model_path": "org/draft"}},
            "the draft org/draft, which is no directory here",
        ),
        (  # as below /root, where SGLang runs in a container: what this user may not look at
            {"info": {"speculative_draft_model_path": f"/root/{'x' * 256}"}},
            "which is no directory here that can be read",
        ),
    ],
)
def test_where_it_is_not_offered_a_restart_is_asked_for(
    live: Live, lacks: dict[str, object], reason: str
) -> None:
    for name, value in lacks.items():
        setattr(live.sglang, name, value)
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, len(live.calls()), live.served()) == ("rolling_out", 1, OLD)
    assert set(live.sglang.calls) <= {"/server_info", "/weights_checker"}
    serves(live.database, NEW)
    assert live.settled(settings, made.id) == "watching"
    told = live.run(made.id)
    for text in (retrain_runs.rollout_of(told).not_live, told.reason or ""):
        assert re.search(reason, text)


def test_where_the_draft_that_it_was_started_with_is_damaged_a_restart_is_asked_for(live: Live) -> None:
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    half_a_file(live.old)
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, len(live.calls())) == ("rolling_out", 1)
    assert set(live.sglang.calls) <= {"/server_info", "/weights_checker"}
    assert "cannot be read" in retrain_runs.rollout_of(live.run(made.id)).not_live


def test_no_restart_with_a_damaged_draft_is_asked_for(live: Live) -> None:
    """To take back the new one, which the server could not start with."""
    settings = live.settings()
    run_id = live.watched(settings)
    half_a_file(live.old)
    live.change(run_id, "watch", verdict="worse")
    assert live.settled(settings, run_id) == "rolling_back"
    assert live.calls() == []
    assert "cannot be read" in (live.run(run_id).reason or "")


def test_a_session_and_a_pause_of_somebody_else_are_left_alone(live: Live) -> None:
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    live.sglang.session = "all"
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served(), live.sglang.session) == ("failed", OLD, "all")
    assert "session is already open" in outcome.reason
    assert (live.sglang.is_paused, live.sglang.version) == (False, "default")


def test_a_server_that_somebody_else_paused_stays_paused(live: Live) -> None:
    live.sglang.is_paused = True
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.sglang.is_paused, live.served()) == ("failed", True, OLD)
    assert "is paused, or not ready" in outcome.reason


def test_a_worse_draft_is_taken_back_live(live: Live) -> None:
    settings = live.settings()
    run_id = live.watched(settings)
    live.change(run_id, "watch", verdict="worse")
    live.sglang.faults["/begin_weight_update"] = "refuse", 0, 1
    assert live.settled(settings, run_id) == "rolling_back"
    assert (live.served(), live.sglang.version) == (NEW, LOADED + NEW)
    live.change(run_id, "rollout", until=datetime.now(UTC) - timedelta(seconds=1))
    assert live.settled(settings, run_id) == "rolling_back"
    assert (live.served(), live.sglang.version) == (OLD, LOADED + OLD)
    serves(live.database, OLD)
    assert live.settled(settings, run_id) == "rolled_back"
    assert live.calls() == []


def test_a_rollback_that_was_cut_off_waits_where_the_server_has_started_again(live: Live) -> None:
    """The sidecar was down for long. What the server started with may be the draft before already."""
    settings = live.settings()
    run_id = live.watched(settings)
    live.change(run_id, "watch", verdict="worse")
    assert live.settled(settings, run_id) == "rolling_back"
    live.change(run_id, "rollout", live="begun", until=datetime.now(UTC) - timedelta(hours=1))
    live.sglang.start()
    sent = live.sglang.calls.count("/update_weights_from_tensor")
    assert live.settled(settings, run_id) == "rolling_back"
    assert live.sglang.calls.count("/update_weights_from_tensor") == sent
    serves(live.database, OLD)
    assert live.settled(settings, run_id) == "rolled_back"


def test_records_are_awaited_for_as_long_as_the_server_says_that_it_serves_the_draft(live: Live) -> None:
    settings = live.settings()
    made = passed_the_gate(live.database, settings)
    promote(live.database, settings, made.id, made.incident_id)
    for start, state in ((False, "rolling_out"), (True, "failed")):
        live.change(made.id, "rollout", until=datetime.now(UTC) - timedelta(seconds=1))
        if start:
            live.sglang.start()
        assert live.settled(settings, made.id) == state
    assert "no record of draft v2 has arrived" in (live.run(made.id).reason or "")
