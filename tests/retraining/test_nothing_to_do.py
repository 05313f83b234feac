"""Reasons for not retraining, and for not even beginning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import update

from driftguard.errors import BadInput, BadSettings, NotFound
from driftguard.retraining import run
from driftguard.retraining.ledger.outcome import RetrainOutcome, Trigger
from driftguard.retraining.run import retrain
from driftguard.settings import CaptureSettings, EngineSettings, Settings
from driftguard.store import captures, incidents, retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import RetrainRun, Stream
from tests.retraining.conftest import Drifted
from tests.retraining.engine_stub import EngineStub
from tests.retraining.http_stub import StubHandler, serving
from tests.retraining.restarted import restarted_settings
from tests.retraining.world import Models, capture, incident_states, make_settings, requests_of

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


def runs(database: Database) -> list[RetrainRun]:
    with database.session() as session:
        return list(retrain_runs.list_page(session, limit=100))


def nothing(outcome: RetrainOutcome) -> str:
    assert (outcome.state, outcome.exit_code) == ("nothing_to_do", 3)
    return outcome.reason


def test_no_incident(database: Database, engine: EngineStub, tmp_path: Path) -> None:
    outcome = retrain(database, make_settings(tmp_path, engine.url))
    assert "no incident calls for it" in nothing(outcome)
    assert [(run.state, run.reason) for run in runs(database)] == [("nothing_to_do", outcome.reason)]


def test_a_draft_of_which_nothing_is_known_is_not_said_to_accept_well(
    database: Database, engine: EngineStub, tmp_path: Path
) -> None:
    reason = nothing(retrain(database, make_settings(tmp_path, engine.url)))
    assert reason.startswith("no incident calls for it: none is open about a fall of draft ")


def test_forced_without_traffic(database: Database, engine: EngineStub, tmp_path: Path) -> None:
    outcome = retrain(database, make_settings(tmp_path, engine.url), force=True)
    assert nothing(outcome) == "only 0 captured requests, 128 needed"
    assert not outcome.waits_for_traffic


@pytest.mark.usefixtures("training_here")
def test_forced_for_an_incident_it_waits_for_no_more_than_the_minimum(
    drifted: Drifted, engine: EngineStub, tmp_path: Path
) -> None:
    settings = make_settings(tmp_path / "data", engine.url, aim_requests=512, steps=1)
    asked = nothing(retrain(drifted.database, settings))
    assert asked.startswith("200 captured requests since the change; waiting for 512")
    assert retrain(drifted.database, settings, force=True).state in ("promoted", "rejected")


@pytest.mark.parametrize(("is_renamed", "counted"), [(False, 200), (True, 320)])
def test_a_segment_that_is_back_is_no_changed_traffic_unless_it_goes_on_under_another_name(
    drifted: Drifted, engine: EngineStub, models: Models, tmp_path: Path, is_renamed: bool, counted: int
) -> None:
    now = datetime.now(UTC)
    capture(drifted.database, drifted.parent, "deutsch", requests_of(models.old_traffic), now)
    with drifted.database.session() as session:
        incident, _ = incidents.find(session, drifted.incident_id)
        (fallen,) = incident.segments
        older = ("deutsch",) if is_renamed else ()
        incident.segments = (
            replace(fallen, segment="deutsch", back_at=now),
            replace(fallen, renamed_from=older),
        )
    settings = make_settings(tmp_path / "data", engine.url, minimum_requests=1_000)
    outcome = retrain(drifted.database, settings, incident_id=drifted.incident_id)
    assert nothing(outcome) == f"only {counted} captured requests since the change, 1000 needed"


def test_of_a_segment_that_joined_the_incident_the_changed_traffic_is_that_since_its_own_change(
    drifted: Drifted, engine: EngineStub, tmp_path: Path
) -> None:
    with drifted.database.session() as session:
        incident, _ = incidents.find(session, drifted.incident_id)
        (fallen,) = incident.segments
        incident.segments = (replace(fallen, since=datetime.now(UTC)),)
    settings = make_settings(tmp_path / "data", engine.url, minimum_requests=1_000)
    outcome = retrain(drifted.database, settings, incident_id=drifted.incident_id)
    assert nothing(outcome) == "only 0 captured requests since the change, 1000 needed"


def test_too_little_traffic_asks_again_in_one_row_and_reads_no_token_ids(
    drifted: Drifted, engine: EngineStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks every minute, and the captured requests of all segments may be gigabytes."""
    settings = make_settings(tmp_path / "data", engine.url, minimum_requests=300)
    monkeypatch.delattr(captures, "outline")
    for _ in range(3):
        outcome = retrain(drifted.database, settings, incident_id=drifted.incident_id, trigger="incident")
        assert nothing(outcome) == "only 200 captured requests since the change, 300 needed"
        assert outcome.waits_for_traffic
    assert len(runs(drifted.database)) == 1
    assert incident_states(drifted.database, drifted.incident_id) == ["open"]


def test_the_nightly_job_leaves_a_row_although_the_incident_asks_on(
    drifted: Drifted, engine: EngineStub, tmp_path: Path
) -> None:
    settings = make_settings(tmp_path / "data", engine.url, minimum_requests=300)
    triggers: tuple[Trigger, ...] = ("incident", "nightly", "incident", "incident")
    for trigger in triggers:
        retrain(drifted.database, settings, incident_id=drifted.incident_id, trigger=trigger)
    assert [run.trigger for run in runs(drifted.database)] == ["incident", "nightly", "incident"]


@pytest.mark.parametrize("trigger", ["nightly", "manual"])
def test_each_night_and_whoever_asks_leaves_a_row_of_its_own_time(
    drifted: Drifted, engine: EngineStub, tmp_path: Path, trigger: Trigger
) -> None:
    settings = make_settings(tmp_path / "data", engine.url, minimum_requests=300)
    for _ in range(2):
        retrain(drifted.database, settings, trigger=trigger)
    second, first = runs(drifted.database)
    assert second.started_at > first.started_at


def test_capture_that_is_off_is_named(drifted: Drifted, engine: EngineStub, tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "data", engine.url, minimum_requests=300)
    settings = settings.model_copy(update={"capture": CaptureSettings(enabled=False)})
    assert "capture is off (capture.enabled)" in nothing(retrain(drifted.database, settings))


def test_another_run_is_under_way(drifted: Drifted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that holds the lock is named as soon as it is stored."""
    monkeypatch.setattr(run, "SETTLING_SECONDS", 0.1)
    begun = "a retraining of engine-1 / target is running already"
    with retrain_runs.try_lock(drifted.database, "engine-1", "target") as lock:
        assert lock is not None
        settling = nothing(retrain(drifted.database, drifted.settings))
        assert runs(drifted.database) == []
        with drifted.database.session() as session:
            known = {"id": uuid4(), "server": "engine-1", "target": "target", "trigger": "incident"}
            session.add(RetrainRun(**known, state="training", started_at=NOON))
        training = nothing(retrain(drifted.database, drifted.settings))
    assert settling == f"{begun}, or an earlier one is settled; try again in a minute"
    assert training == (
        f"{begun}: training, since 2026-11-01 12:00 UTC; follow it with: driftguard runs show {known['id']}"
    )


def test_a_run_by_hand_waits_for_the_settling_of_an_earlier_one(
    drifted: Drifted, engine: EngineStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = iter(range(10))
    try_lock = retrain_runs.try_lock

    @contextmanager
    def settled_at_the_third_look(*of: Any) -> Iterator[retrain_runs.RunLock | None]:
        with try_lock(*of) as lock:
            yield lock if next(tried) >= 2 else None

    monkeypatch.setattr(run, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(retrain_runs, "try_lock", settled_at_the_third_look)
    settings = make_settings(tmp_path / "data", engine.url, minimum_requests=300)
    assert "is running already" in nothing(retrain(drifted.database, settings, trigger="incident"))
    assert "captured requests" in nothing(retrain(drifted.database, settings))


@pytest.mark.parametrize(("method", "directory"), [("ngram", None), ("mtp", None), ("peagle", "/head")])
def test_a_drafter_that_nothing_is_made_for(
    drifted: Drifted, engine: EngineStub, method: str, directory: str | None
) -> None:
    engine.serving = {"name": method, "version": "v", "method": method, "directory": directory}
    assert f"has method {method}: nothing can be made in its place" in nothing(
        retrain(drifted.database, drifted.settings)
    )


def test_a_head_that_another_server_serves(drifted: Drifted, models: Models, tmp_path: Path) -> None:
    """As vLLM's or SGLang's EAGLE: by restart, live, and with a directory that could be read."""
    with drifted.database.session() as session:
        session.execute(update(Stream).values(method="eagle3"))
    settings = restarted_settings(
        tmp_path, models.target, models.draft, update_url="http://127.0.0.1:9", promote_command=["true"]
    )
    outcome = retrain(drifted.database, settings, force=True)
    assert "has method eagle3: nothing can be made in its place" in nothing(outcome)
    assert "eagle3, medusa, ssd and mirror for the built-in engine alone" in outcome.reason


def test_a_hybrid_without_a_corpus(drifted: Drifted, engine: EngineStub) -> None:
    """Its model stays, and it has no corpus that could be made anew."""
    engine.serving = {"name": "h", "version": "h", "method": "hybrid", "directory": "/h", "corpus": None}
    assert "has method hybrid, and no corpus: of a hybrid that is what is made anew" in nothing(
        retrain(drifted.database, drifted.settings)
    )


@pytest.mark.usefixtures("training_here")
def test_speculation_that_is_off_leaves_everything_as_it_is(drifted: Drifted, engine: EngineStub) -> None:
    retrain(drifted.database, drifted.settings.model_copy(update={"capture": CaptureSettings()}))
    engine.serving = {"name": "none", "version": "none", "method": "none", "directory": None}
    assert "method none" in nothing(retrain(drifted.database, drifted.settings))


def test_a_resolved_incident(drifted: Drifted) -> None:
    with drifted.database.session() as session:
        incidents.move(session, drifted.incident_id, "resolved", "was a test", datetime.now(UTC))
    outcome = retrain(drifted.database, drifted.settings, incident_id=drifted.incident_id)
    assert nothing(outcome) == f"incident {drifted.incident_id} is resolved"
    assert "no incident calls for it" in nothing(retrain(drifted.database, drifted.settings))


def test_an_unknown_incident(drifted: Drifted) -> None:
    with pytest.raises(NotFound, match="there is no incident"):
        retrain(drifted.database, drifted.settings, incident_id=uuid4())


def test_an_engine_that_does_not_answer(database: Database, tmp_path: Path) -> None:
    outcome = retrain(database, make_settings(tmp_path, "http://127.0.0.1:9"))
    assert (outcome.state, outcome.exit_code) == ("failed", 1)
    assert "http://127.0.0.1:9 cannot be reached" in outcome.reason
    assert [run.state for run in runs(database)] == ["failed"]


def test_an_address_that_answers_in_bytes(database: Database, tmp_path: Path) -> None:
    """As something before the engine does with a compressed page. Without a row of the failure an incident
    would ask again every two seconds."""

    class Compressed(StubHandler):
        def do_GET(self) -> None:
            self.send_content(502, b"\x1f\x8b\x08\x00\x00\x00page")

    with serving(Compressed) as url:
        outcome = retrain(database, make_settings(tmp_path, url))
        assert (
            outcome.reason
            == f"the engine at {url} answered /admin/info with 502: \x1f\N{REPLACEMENT CHARACTER}\x08page"
        )
    assert [(run.state, run.reason) for run in runs(database)] == [("failed", outcome.reason)]


def test_an_engine_with_another_name(database: Database, engine: EngineStub, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, engines=[EngineSettings(server="other", admin_url=engine.url)])
    outcome = retrain(database, settings)
    assert outcome.state == "failed"
    assert "calls itself 'engine-1', the settings call it 'other'" in outcome.reason


def test_engines_that_the_settings_do_not_name(database: Database, tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="engines: none is set"):
        retrain(database, Settings(data_dir=tmp_path))
    with pytest.raises(BadSettings, match="'x' is not among the engines in the settings: engine-1"):
        retrain(database, make_settings(tmp_path, "http://127.0.0.1:9"), server="x")
    two = [EngineSettings(server=name, admin_url="http://127.0.0.1:9") for name in ("a", "b")]
    with pytest.raises(BadSettings, match="name one of a, b"):
        retrain(database, Settings(data_dir=tmp_path, engines=two))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no requests in the file"),
        ('{"prompt_token_ids": [1], "output_token_ids": [2]}\nnot json\n', "line 2: "),
        (
            '{"prompt_token_ids": [1], "output_token_ids": [], "segment": "a"}',
            "line 1: output_token_ids is empty",
        ),
        ('{"prompt_token_ids": [1, -4], "output_token_ids": [1]}', "line 1: prompt_token_ids holds -4"),
        ('{"prompt_token_ids": [1]}', "line 1: .*output_token_ids"),
        ('{"prompt_token_ids": [1], "output_token_ids": [2], "text": "hi"}', "line 1: .*text"),
    ],
)
def test_a_bad_traffic_file_is_refused_by_line(
    database: Database, tmp_path: Path, content: str, message: str
) -> None:
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text(content)
    with pytest.raises(BadInput, match=message):
        retrain(database, make_settings(tmp_path, "http://127.0.0.1:9"), traffic=traffic)
    with pytest.raises(BadInput, match="cannot be read"):
        retrain(database, make_settings(tmp_path, "http://127.0.0.1:9"), traffic=tmp_path / "absent")
    assert runs(database) == []


def test_a_traffic_file_may_tell_of_some_requests_when_they_were_captured(
    database: Database, engine: EngineStub, tmp_path: Path
) -> None:
    """Also without an offset, as Python writes a time of day."""
    traffic, times = tmp_path / "traffic.jsonl", (None, "2026-03-01T14:05:00", "2026-03-01T14:05:00+02:00")
    lines = [
        {"prompt_token_ids": [1], "output_token_ids": [number], "captured_at": at}
        for number, at in enumerate(times)
    ]
    traffic.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    outcome = retrain(database, make_settings(tmp_path, engine.url), traffic=traffic)
    assert nothing(outcome) == "only 3 captured requests, 128 needed"


def test_a_nightly_job_whose_output_cannot_be_written_goes_on(
    drifted: Drifted, engine: EngineStub, tmp_path: Path
) -> None:
    """As where the disk of its log is full: that is no reason to lose a training."""
    config = tmp_path / "driftguard.toml"
    config.write_text(
        f"""
data_dir = "{tmp_path / "data"}"
[[engines]]
server = "engine-1"
admin_url = "{engine.url}"
[retraining]
minimum_requests = 10000
aim_requests = 10000
"""
    )
    url = drifted.database.url.render_as_string(hide_password=False)
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "driftguard", "retrain", "--config", str(config)],
            env={**os.environ, "DRIFTGUARD_DATABASE_URL": url},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (3, "")
    assert "captured requests since the change, 10000 needed" in (runs(drifted.database)[0].reason or "")
