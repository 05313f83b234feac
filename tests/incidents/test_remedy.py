"""The one best action as every reader meets it: in the page's text, the API, the command, the web page."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from typer.testing import CliRunner

from driftguard.adapters.switching import switching_off
from driftguard.app import Sidecar, create_app
from driftguard.cli.main import app
from driftguard.cost.best_action import IN_ORDER, Action
from driftguard.incidents import cost_measurement, remedy
from driftguard.incidents.message import document, summary
from driftguard.incidents.opening import NOBODY
from driftguard.records.documents.diagnosis import Diagnosis
from driftguard.records.documents.goodput import GoodputChange
from driftguard.records.documents.incident import IncidentDiagnosis, SeenEvidence
from driftguard.records.documents.retraining_run import OldLevel, RunNumbers
from driftguard.retraining.engines import candidate_kind
from driftguard.retraining.promotion import watch
from driftguard.settings import Settings
from driftguard.status.gather import gather
from driftguard.status.stream_status import StreamStatus
from driftguard.store import incidents, retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import Draft, Incident, RetrainRun, Stream
from tests.alerting.incident_rows import add_incident, add_stream
from tests.api.ingest_server import serving
from tests.cost.traffic import Server
from tests.incidents.test_cost_measurement import fallen, only_incident, send
from tests.pipeline.sidecar import running_sidecar

DRAFT_LOSES = Server(a=0.020, b=0.006, accepts=(0.25,))
DRAFT_PAYS = Server(a=0.020, b=0.002, accepts=(0.6,))


def diagnosed(database: Database, *, retrain: bool = True, cause: Any = "query_drift") -> None:
    """As if the canary probes and the captures had shown it."""
    known = Diagnosis(
        cause=cause,
        confidence="high",
        summary="the traffic moved (new topic)",
        reason="acceptance fell inside segments, the queries moved, the canary probes did not",
        facts=(),
        missing=(),
        recommended_action="retrain the draft on the new traffic",
        retrain=retrain,
        awaits_probes=False,
    )
    with database.session() as session:
        (incident,) = session.query(Incident).all()
        incident.diagnosis = IncidentDiagnosis.of(known, datetime.now(UTC), SeenEvidence(12, 100))


def test_no_page_says_retrain_where_speculation_off_is_faster(database: Database) -> None:
    """It said both: that off would be faster, and to retrain."""
    fallen(database, DRAFT_LOSES, 1, {0: 100, 4: 1200})
    diagnosed(database)
    incident, stream = only_incident(database)
    text = summary(incident, stream)
    assert (
        "Likely cause: the traffic moved (new topic) (high confidence); best now: switch speculation off: "
        in text
    )
    assert "retrain" not in text
    told = document(incident, stream, "firing", "http://sidecar")["incident"]["actions"]
    assert [action["kind"] for action in told] == list(IN_ORDER)
    (best,) = [action for action in told if action["best"]]
    assert best["kind"] == "speculation_off"
    gain = DRAFT_LOSES.tokens_per_second(0) / DRAFT_LOSES.tokens_per_second(4) - 1.0
    assert best["gain"]["value"] == pytest.approx(gain, abs=0.05)


def test_where_speculation_still_pays_the_page_says_retrain(database: Database) -> None:
    fallen(database, DRAFT_PAYS, 2, {0: 100, 4: 1200})
    diagnosed(database)
    incident, stream = only_incident(database)
    assert summary(incident, stream).endswith("(high confidence); retrain the draft on the new traffic.")


def test_what_is_best_follows_the_load_while_the_incident_is_open_and_the_loss_stays(
    database: Database,
) -> None:
    fallen(database, DRAFT_PAYS, 3, {0: 100, 4: 1200})
    diagnosed(database)
    before = only_incident(database)[0].evidence.cost
    assert before is not None
    assert before.speedup is not None
    rng, now = np.random.default_rng(3), datetime.now(UTC)
    busy = replace(DRAFT_PAYS, a=0.030, b=0.030)
    send(database, rng, busy, 50, {0: 60, 4: 300}, concurrency=16)
    with database.session() as session:
        session.query(Stream).update({"last_seen_at": now + timedelta(seconds=1)})
    cost_measurement.refresh(database, NOBODY, now + cost_measurement.MEASURE_EVERY)
    incident, stream = only_incident(database)
    cost = incident.evidence.cost
    assert cost is not None
    assert cost.speedup is not None
    assert cost.speedup.concurrency == (9, 16)
    assert (cost.lost, cost.now) == (before.lost, before.now)
    assert "best now: switch speculation off: " in summary(incident, stream)


def promoted_and_accepts_less(database: Database) -> datetime:
    """Draft v1, trained from v0, is watched, and accepts less. Returns when its cost was measured."""
    rng = np.random.default_rng(4)
    send(database, rng, DRAFT_PAYS, 0, {0: 60, 4: 500})
    level = OldLevel("chat", changed=True, requests=300, mean=0.55, variance=0.01, standard_error=0.006)
    state = watch.start([level], 0.5, ())  # tolerates so much that it does not end before it is asked
    state = watch.fold(state, [("chat", 100, int(rng.binomial(100, 0.4))) for _ in range(150)])
    now = datetime.now(UTC)
    run = RetrainRun(
        id=uuid4(),
        server="chat",
        target="target",
        trigger="nightly",
        state="watching",
        started_at=now,
        parent_version="v0",
        candidate_version="v1",
        numbers=RunNumbers(watch=state),
    )
    with database.session() as session:
        retrain_runs.begin(session, run)
        session.add(draft("v1", "v0", "in_service"))
    cost_measurement.refresh(database, NOBODY, now)
    return now


def draft(version: str, parent: str, state: str) -> Draft:
    now = datetime.now(UTC)
    return Draft(
        server="chat",
        target="target",
        version=version,
        name=version,
        method="draft_model",
        directory=f"/drafts/{version}",
        parent_version=parent,
        state=state,
        created_at=now,
        promoted_at=now,
    )


def actions_of(database: Database, now: datetime) -> tuple[StreamStatus, dict[str, Action]]:
    """What is said of the one stream with drafts."""
    with database.session() as session:
        (found,) = [item for item in gather(session, now) if item.stream.method != "none"]
    return found, {action.kind: action for action in found.actions}


def test_a_draft_that_was_just_promoted_and_accepts_less_is_rolled_back_first(database: Database) -> None:
    found, actions = actions_of(database, promoted_and_accepts_less(database))
    (best,) = [action for action in actions.values() if action.best]
    assert best.kind == "roll_back"
    assert best.gain is not None
    assert best.gain.low <= (1 + 4 * 0.55) / (1 + 4 * 0.4) - 1 <= best.gain.high
    assert "Best now: roll back to draft v0: " in found.text


def test_of_a_rollback_that_passes_over_a_worse_parent_no_gain_over_that_parent_is_told(
    database: Database,
) -> None:
    now = promoted_and_accepts_less(database)
    with database.session() as session:
        session.add(draft("v0", "older", "rolled_back"))
    _, actions = actions_of(database, now)
    assert "draft older" in actions["roll_back"].sentence
    assert actions["roll_back"].gain is None


def test_api_command_and_page_name_the_best_and_how_to_do_each(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incident, stream = fallen(database, DRAFT_LOSES, 5, {0: 100, 4: 1200})
    diagnosed(database)
    monkeypatch.setenv("COLUMNS", "400")
    engines = [{"server": "chat", "admin_url": "http://me:secret@engine:8100"}]
    with running_sidecar(database, tmp_path, engines=engines) as client:
        shown = client.get(f"/api/v1/streams/{stream.id}").json()
        detail = client.get(f"/api/v1/incidents/{incident.id}").json()
        for actions in (shown["actions"], detail["actions"]):
            assert [action["kind"] for action in actions] == list(IN_ORDER)
            assert [action["kind"] for action in actions if action["best"]] == ["speculation_off"]
            commands = {action["kind"]: action["command"] for action in actions}
            off = (
                "curl -s -X POST http://engine:8100/admin/speculation -H 'Content-Type: application/json' -d"
            )
            assert commands["speculation_off"] == off + " '{\"enabled\": false}'"
            requests = {action["kind"]: action["request"] for action in actions}
            assert requests["retrain"] == {
                "path": "/api/v1/retrain",
                "body": {"server": "chat", "force": True},
            }
            assert {kind for kind in IN_ORDER if commands[kind] is None} == {"roll_back", "nothing"}
            reasons = {action["kind"]: action["reason"] for action in actions}
            assert "there is none to return to" in reasons["roll_back"]
        status = CliRunner().invoke(app, ["status", "--sidecar", str(client.base_url)])
        assert status.exit_code == 0, status.output
        assert (
            "to switch speculation off: curl -s -X POST http://engine:8100/admin/speculation" in status.output
        )
        for path in (f"/streams/{stream.id}", f"/incidents/{incident.id}"):
            page = client.get(path).text
            assert page.count("<small>best now</small>") == 1
            assert "<strong>Switch speculation off</strong> <small>best now</small>" in page
            assert "secret" not in page


def test_without_torch_the_command_to_retrain_elsewhere_is_told_instead_of_a_button(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The button was there, and each press of it ended as a failed run."""
    incident, stream = fallen(database, DRAFT_LOSES, 5, {0: 100, 4: 1200})
    diagnosed(database)
    monkeypatch.setattr(candidate_kind, "find_spec", lambda _: None)
    command = "driftguard retrain --server chat --force"
    told = f"<code>{command}</code>"
    engines = [{"server": "chat", "admin_url": "http://engine:8100"}]
    with running_sidecar(database, tmp_path, engines=engines) as client:
        shown = client.get(f"/api/v1/streams/{stream.id}").json()
        detail = client.get(f"/api/v1/incidents/{incident.id}").json()
        for actions in (shown["actions"], detail["actions"]):
            (retrain,) = [action for action in actions if action["kind"] == "retrain"]
            assert (retrain["request"], retrain["command"]) == (None, command)
        for path in (f"/streams/{stream.id}", f"/incidents/{incident.id}"):
            page = client.get(path).text
            assert page.count(told) == 1
            assert "Torch is not installed beside this sidecar" in page
            assert "/api/v1/retrain" not in page
        body = {"reason": "of the test"}
        client.post(f"/api/v1/incidents/{incident.id}/resolve", json=body).raise_for_status()
        page = client.get(f"/incidents/{incident.id}").text
        assert page.count(told) == 1
        assert "/api/v1/retrain" not in page


KEY = '-H "Authorization: Bearer $DRIFTGUARD_API_KEY"'


@pytest.mark.parametrize(
    ("host", "external_url", "needed"),
    [
        ("127.0.0.1", None, False),
        ("127.0.0.1", "http://127.0.0.1:8200", False),  # as of the demo
        ("127.0.0.1", "https://driftguard.example", True),  # a reverse proxy on this machine
        ("127.0.0.1", "http://localhost/driftguard", True),  # the same
        ("0.0.0.0", None, True),
        ("0.0.0.0", "http://127.0.0.1:8200", True),  # as of a container
    ],
)
def test_a_command_for_the_sidecar_has_a_key_where_the_sidecar_needs_one(
    database: Database, tmp_path: Path, host: str, external_url: str | None, needed: bool
) -> None:
    incident_id = add_incident(database, [])
    settings = Settings.model_validate(
        {
            "data_dir": tmp_path,
            "host": host,
            "alerting": {"external_url": external_url},
            "engines": [{"server": "chat", "admin_url": "http://engine:8100"}],
        }
    )
    with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:
        told = client.get(f"/api/v1/incidents/{incident_id}", headers={"Host": "127.0.0.1"}).json()
    commands = {action["kind"]: action["command"] for action in told["actions"]}
    at = (external_url or f"http://{host}:8200").rstrip("/")
    assert commands["retrain"].startswith(f"curl -s -X POST {at}/api/v1/retrain -H ")
    assert (KEY in commands["retrain"]) is needed
    assert KEY not in commands["speculation_off"]


def test_a_command_for_an_engine_that_needs_a_key_has_its_name_and_not_the_key(
    database: Database, tmp_path: Path
) -> None:
    incident_id = add_incident(database, [])
    engines = [{"server": "chat", "admin_url": "http://engine:8100", "api_key": "secret-4711"}]
    with running_sidecar(database, tmp_path, engines=engines) as client:
        answer = client.get(f"/api/v1/incidents/{incident_id}")
        page = client.get(f"/incidents/{incident_id}").text
    commands = {action["kind"]: action["command"] for action in answer.json()["actions"]}
    assert commands["speculation_off"].startswith(
        f"curl -s -X POST http://engine:8100/admin/speculation {KEY} -H 'Content-Type: application/json' -d"
    )
    assert KEY not in commands["retrain"]
    assert "secret-4711" not in answer.text + page
    assert f"http://ENGINE:8100/admin/speculation {KEY}" in switching_off("chat", "driftguard", None)


def test_a_new_draft_gains_only_in_the_segments_that_fell(database: Database) -> None:
    """A quarter of the requests lost 40%: half of the way back is 5.6% of the stream's tokens, not 33%."""
    stream_id = add_stream(database)
    incident_id = add_incident(database, [], stream_id=stream_id)
    with database.session() as session:
        incident, _ = incidents.find(session, incident_id)
        (segment,) = incident.segments
        all_of_it = replace(segment.after, requests=4 * segment.after.requests)
        incident.evidence = replace(incident.evidence, slowdown_measured=0.4, stream_after=all_of_it)
    diagnosed(database)
    incident, _ = only_incident(database)
    (retrain,) = [action for action in remedy.of_incident(incident) if action.kind == "retrain"]
    assert retrain.gain is not None
    assert retrain.gain.value == pytest.approx(0.5 * (1.0 / (1.0 - 0.1) - 1.0))
    assert retrain.best


def test_where_speculation_loses_by_the_load_no_restart_and_no_draft_gives_that_back(
    database: Database,
) -> None:
    add_incident(database, [])
    diagnosed(database)
    with database.session() as session:
        (incident,) = session.query(Incident).all()
        loses = GoodputChange(
            kind="speculation_loses",
            concurrency=(8, 16),
            lost=0.3,
            requests=400,
            acceptance="none",
            false_alarm_days=365.0,
        )
        incident.evidence = replace(incident.evidence, goodput=loses)
    incident, _ = only_incident(database)
    gains = {action.kind: action.gain for action in remedy.of_incident(incident)}
    assert (gains["retrain"], gains["restart"]) == (None, None)


def test_a_draft_that_none_was_before_is_not_rolled_back() -> None:
    assert remedy.rollback_of(None, None, "v1", None) is None


def test_a_rise_is_not_answered_with_a_remedy(database: Database) -> None:
    """Looping answers are easy to predict: the diagnosis says to read some, whatever K would be faster."""
    fallen(database, DRAFT_LOSES, 6, {0: 100, 4: 1200})
    diagnosed(database, retrain=False, cause="quality")
    with database.session() as session:
        (incident,) = session.query(Incident).all()
        incident.direction = "up"
    incident, stream = only_incident(database)
    assert "best now" not in summary(incident, stream).lower()
    kinds = {action.kind: action for action in remedy.of_incident(incident)}
    assert kinds["retrain"].gain is None
    assert kinds["restart"].gain is None
