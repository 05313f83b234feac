"""The diagnosis of stored incidents on a real database: what is gathered, what follows, what comes later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import msgspec
import numpy as np
import pytest
from sqlalchemy import delete, func, select, text
from sqlalchemy.orm import Session

from driftguard.detection import Acceptance, DetectorConfig
from driftguard.incidents import diagnosing, examination
from driftguard.incidents.message import document, summary
from driftguard.incidents.opening import NOBODY, Paging
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.records import AcceptanceRecord
from driftguard.records.documents.incident import (
    ChangedSegment,
    IncidentDiagnosis,
    IncidentEvidence,
    SeenEvidence,
)
from driftguard.records.probe_session import session_of
from driftguard.retraining.due import why_not
from driftguard.retraining.ledger.incident_notes import tell_promotion
from driftguard.store import incidents
from driftguard.store.captures import CapturedRequest, insert_captures
from driftguard.store.database import Database, DatabaseTimeout, Work
from driftguard.store.streams import all_streams
from driftguard.store.tables import Capture, Incident, Notification, Record
from tests.alerting.incident_rows import add_incident, add_stream
from tests.pipeline.examining import examine, fold_and_examine
from tests.pipeline.sidecar import running_sidecar
from tests.pipeline.traffic import Traffic, store

GOOD = {"code": 0.75, "german": 0.7}
BAD = {**GOOD, "german": 0.4}
NOW = datetime.now(UTC)
PAGER = Paging(("webhook:http://pager",))


def newest_seq(database: Database) -> int:
    with database.session() as session:
        return session.scalar(select(func.max(Record.seq))) or 0


def acceptance(rate: float) -> Acceptance:
    return Acceptance(rate, rate - 0.02, rate + 0.02, 100)


def open_incident(database: Database, changed_at: datetime, first: int, **more: object) -> UUID:
    """An incident about german, as the detector's finding makes one, with its diagnosis."""
    values: dict[str, Any] = {
        "id": uuid4(),
        "direction": "down",
        "severity": "info",
        "awaits_examination": True,
        "opened_at": NOW,
        "opened_seq": newest_seq(database),
        "change_point_seq": first,
        "change_point_at": changed_at,
        "interval_start_at": changed_at - timedelta(seconds=20),
        "interval_end_at": changed_at + timedelta(seconds=20),
        "acceptance_before": 0.7,
        "acceptance_after": 0.4,
        "segments": (ChangedSegment("german", acceptance(0.7), acceptance(0.4), evidence=1e6),),
        "evidence": IncidentEvidence(slowdown_formula=0.3),
    }
    with database.session() as session:
        (stream,) = all_streams(session)
        incident = Incident(stream_id=stream.id, **{**values, **more})
        incidents.open_incident(session, incident, "acceptance fell")
    examination.examine(database, incident.id, NOBODY, NOW)
    return incident.id


def fallen(
    database: Database, after: Sequence[AcceptanceRecord] | None = None, seed: int = 1, **more: object
) -> UUID:
    """Good traffic for an hour, then `after` (a fall of german), and the incident."""
    traffic = Traffic(seed=seed)
    store(database, traffic.draw(400, GOOD))
    changed_at, first = traffic.clock, newest_seq(database) + 1
    store(database, after if after is not None else traffic.draw(120, BAD))
    return open_incident(database, changed_at, first, **more)


def replay(database: Database, at: datetime, shift: float = 0.0, prompts: int = 12) -> None:
    """One replay of the canary probes, as `driftguard probe run` records it."""
    random = np.random.default_rng(3)
    (sample,) = Traffic(seed=9, start=at).draw(1, {"code": 0.5}, kind="probe")
    records = []
    for number, level in enumerate(random.uniform(0.5, 0.9, prompts)):
        accepted = round(100 * (level + shift))
        fields = {
            "record_id": uuid4(),
            "started_at": at,
            "ended_at": at,
            "session": session_of(f"prompt{number}", "answer"),
            "steps": 25,
            "drafted": 100,
            "accepted": accepted,
            "emitted": accepted + 25,
        }
        records.append(msgspec.structs.replace(sample, **fields))
    store(database, records)


def capture(database: Database, at: datetime, tokens: tuple[int, int], count: int, seed: int) -> list[UUID]:
    random = np.random.default_rng(seed)
    captured = [
        CapturedRequest(
            record_id=UUID(bytes=random.bytes(16)),
            server="chat",
            target="target",
            draft_version="v1",
            segment="german",
            captured_at=at + timedelta(milliseconds=number),
            prompt_token_ids=random.integers(*tokens, 30).tolist(),
            output_token_ids=random.integers(*tokens, 30).tolist(),
        )
        for number in range(count)
    ]
    with database.session() as session:
        insert_captures(session, captured, max_per_segment=1_000)
    return [item.record_id for item in captured]


def capture_another_topic(database: Database) -> None:
    """Prompts of german from before a fall, and on another topic since."""
    capture(database, NOW - timedelta(hours=3), (0, 300), 40, seed=1)
    capture(database, NOW, (500, 800), 40, seed=2)


def drifted(database: Database) -> UUID:
    """A fall of german, whose captured prompts moved to another topic."""
    capture_another_topic(database)
    return fallen(database)


def refresh(database: Database, now: datetime) -> None:
    diagnosing.refresh(database, PAGER, now)


def known(database: Database, incident_id: UUID) -> IncidentDiagnosis:
    with database.session() as session:
        diagnosis = incidents.find(session, incident_id)[0].diagnosis
    assert diagnosis is not None
    return diagnosis


def verdict(database: Database, incident_id: UUID) -> tuple[str, str]:
    diagnosis = known(database, incident_id)
    return diagnosis.cause, diagnosis.confidence


def missing(diagnosis: IncidentDiagnosis) -> str:
    return " | ".join(diagnosis.missing)


def test_a_fall_without_probes_or_captures_retrains_nothing_and_says_what_is_missing(
    database: Database,
) -> None:
    incident_id = fallen(database)
    assert verdict(database, incident_id) == ("unknown", "low")
    diagnosis = known(database, incident_id)
    assert why_not(diagnosis, "medium") is not None
    assert "no canary probes" in missing(diagnosis)
    assert "capture.enabled" in missing(diagnosis)
    with database.session() as session:
        incident, stream = incidents.find(session, incident_id)
        assert summary(incident, stream).endswith(
            ". The cause is not known; replay the canary probes (`driftguard probe run --server chat`), "
            "then look at the machine."
        )
        told = document(incident, stream, "firing", "http://x")["incident"]["diagnosis"]
        assert msgspec.convert(told, IncidentDiagnosis) == diagnosis


def test_moved_queries_without_probes_retrain_at_medium_confidence(database: Database) -> None:
    incident_id = drifted(database)
    assert verdict(database, incident_id) == ("query_drift", "medium")
    diagnosis = known(database, incident_id)
    assert why_not(diagnosis, "medium") is None
    assert "needs high confidence" in (why_not(diagnosis, "high") or "")
    with database.session() as session:
        incident, stream = incidents.find(session, incident_id)
        assert summary(incident, stream).endswith(
            ". Likely cause: the traffic moved (new topic) (medium confidence); "
            "retrain the draft on the new traffic."
        )
        incident.state = "mitigating"
        assert summary(incident, stream).endswith("; a new draft is being trained.")


def test_segments_that_are_back_do_not_hide_that_the_others_fell(database: Database) -> None:
    """Nineteen of twenty requests are of segments that fell as well, and accept as before again."""
    replay(database, NOW - timedelta(hours=3))
    capture_another_topic(database)
    stayed = {f"code{number}": 0.7 for number in range(19)}
    traffic = Traffic(seed=2)
    store(database, traffic.draw(800, {"german": 0.7, **stayed}))
    changed_at, first = traffic.clock, newest_seq(database) + 1
    store(database, traffic.draw(240, {"german": 0.5, **stayed}))
    replay(database, NOW)
    fell = acceptance(0.7), acceptance(0.5)
    back = [ChangedSegment(name, *fell, evidence=1e6, back_at=NOW) for name in stayed]
    segments = (ChangedSegment("german", *fell, evidence=1e6), *back)
    incident_id = open_incident(database, changed_at, first, segments=segments)
    assert verdict(database, incident_id) == ("query_drift", "high"), known(database, incident_id).reason


def test_a_faulty_machine_waits_for_its_probes_and_then_never_retrains(database: Database) -> None:
    replay(database, NOW - timedelta(hours=3))
    replay(database, NOW - timedelta(hours=2, minutes=30))
    incident_id = fallen(database)
    assert verdict(database, incident_id) == ("unknown", "low")
    assert "have not been replayed since the change" in missing(known(database, incident_id))
    assert why_not(known(database, incident_id), "medium") is not None

    replay(database, NOW, shift=-0.3)
    refresh(database, NOW + timedelta(seconds=2))
    assert verdict(database, incident_id) == ("machine", "high")
    reason = why_not(known(database, incident_id), "low")
    assert reason is not None
    assert "restart the server" in reason


def test_probes_from_before_a_fall_exclude_no_fault_of_a_server_whose_clock_is_behind(
    database: Database,
) -> None:
    """Its traffic fell ten minutes ago; by its own clock two hours before."""
    for minutes in (180, 60, 30):
        replay(database, NOW - timedelta(minutes=minutes))
    incident_id = drifted(database)
    assert known(database, incident_id).awaits_probes
    assert verdict(database, incident_id) == ("query_drift", "low")


def test_probes_that_nobody_replays_are_not_awaited_for_ever(database: Database) -> None:
    replay(database, NOW - timedelta(hours=3))
    incident_id = drifted(database)
    refresh(database, NOW + timedelta(minutes=29))
    assert verdict(database, incident_id) == ("query_drift", "low")
    refresh(database, NOW + timedelta(minutes=31))
    assert verdict(database, incident_id) == ("query_drift", "medium")


def test_captures_that_arrive_later_sharpen_the_diagnosis_and_name_examples(database: Database) -> None:
    replay(database, NOW - timedelta(hours=3))
    capture(database, NOW - timedelta(hours=3), (0, 300), 40, seed=1)
    incident_id = fallen(database)
    replay(database, NOW)
    refresh(database, NOW)
    assert verdict(database, incident_id) == ("query_drift", "medium")
    new = capture(database, NOW, (500, 800), 12, seed=2)
    refresh(database, NOW)
    assert verdict(database, incident_id) == ("query_drift", "high")
    assert {UUID(example) for example in known(database, incident_id).examples} <= set(new)


def another_k(database: Database) -> UUID:
    traffic = Traffic(seed=4, start=NOW - timedelta(hours=1))
    after = [
        msgspec.structs.replace(
            record,
            num_speculative_tokens=8,
            drafted=2 * record.drafted,
            accepted_per_position=[record.steps * 7 // 10],
        )
        for record in traffic.draw(120, GOOD)
    ]
    before = [
        msgspec.structs.replace(record, accepted_per_position=[record.steps * 7 // 10])
        for record in Traffic(seed=5).draw(300, GOOD)
    ]
    store(database, before)
    first = newest_seq(database) + 1
    store(database, after)
    return open_incident(database, NOW - timedelta(hours=1), first)


def test_another_k_is_told_as_configuration_and_pages_nobody(database: Database) -> None:
    incident_id = another_k(database)
    assert verdict(database, incident_id) == ("configuration", "high")
    diagnosis = known(database, incident_id)
    assert diagnosis.summary == "the configuration: K (num_speculative_tokens) went from 4 to 8"
    assert why_not(diagnosis, "low") is not None
    with database.session() as session:
        assert incidents.find(session, incident_id)[0].severity == "info"


@pytest.mark.parametrize("kept", [timedelta(days=30), timedelta(days=3)])
def test_an_incident_whose_records_are_past_retention_keeps_its_diagnosis_and_pages_nobody(
    database: Database, kept: timedelta
) -> None:
    """Canary probes are replayed before retention has come to the change, or go on as it has."""
    incident_id = another_k(database)
    replay(database, NOW)
    refresh(database, NOW + timedelta(minutes=5))
    assert (verdict(database, incident_id), told(database)) == (("configuration", "high"), [])
    first = known(database, incident_id)

    later = NOW + kept + timedelta(minutes=30)
    drop(database, before=later - kept)
    if kept < timedelta(days=7):
        for hours in (2, 1):
            replay(database, later - timedelta(hours=hours))
    refresh(database, later)
    assert (known(database, incident_id), told(database)) == (first, [])


def told(database: Database) -> list[str]:
    with database.session() as session:
        return [row.severity for row in session.scalars(select(Notification))]


def drop(database: Database, before: datetime) -> None:
    """As retention does, day by day."""
    with database.session() as session:
        session.execute(delete(Record).where(Record.ended_at < before))


def test_captures_that_are_past_retention_leave_the_diagnosis_that_was_made_of_them(
    database: Database,
) -> None:
    incident_id = drifted(database)
    assert verdict(database, incident_id) == ("query_drift", "medium")
    with database.session() as session:
        session.execute(delete(Capture))
    refresh(database, NOW + timedelta(days=14))
    assert verdict(database, incident_id) == ("query_drift", "medium")


def fallen_harmlessly(database: Database) -> UUID:
    """As diagnosed before the captured requests were seen; it pages nobody."""
    incident_id = fallen(database)
    with database.session() as session:
        incident = incidents.find(session, incident_id)[0]
        incident.severity = "info"
        incident.diagnosis = replace(
            known(database, incident_id), cause="configuration", confidence="high", seen=SeenEvidence(0, -1)
        )
    return incident_id


def test_what_was_no_page_becomes_one_when_the_diagnosis_changes(database: Database) -> None:
    incident_id = fallen_harmlessly(database)
    refresh(database, NOW)
    with database.session() as session:
        assert incidents.find(session, incident_id)[0].severity == "critical"
        assert [row.event for row in session.scalars(select(Notification))] == ["firing"]
        reason = incidents.transitions(session, incident_id)[-1].reason
    assert reason.startswith("critical instead of info: diagnosed again: the cause is not known")


def test_what_an_incident_is_told_while_it_is_diagnosed_again_stays(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the draft that was promoted for it, which the fold tells."""
    incident_id = fallen_harmlessly(database)
    made = diagnosing.diagnosed

    def diagnosed(*arguments: Any) -> IncidentDiagnosis:
        with database.session() as other:
            tell_promotion(other, incident_id, "v2", NOW)
        return made(*arguments)

    monkeypatch.setattr(diagnosing, "diagnosed", diagnosed)
    refresh(database, NOW)
    with database.session() as session:
        incident = incidents.find(session, incident_id)[0]
    assert (incident.severity, incident.diagnosis is not None) == ("critical", True)
    assert incident.evidence.mitigation is not None
    assert incident.evidence.mitigation.draft_version == "v2"


def test_the_same_cause_found_again_pages_nobody(database: Database) -> None:
    """Whatever the cost says by now is judged where it is measured."""
    incident_id = fallen(database)
    with database.session() as session:
        incident = incidents.find(session, incident_id)[0]
        incident.severity = "info"
        incident.diagnosis = replace(known(database, incident_id), seen=SeenEvidence(0, -1))
    refresh(database, NOW)
    with database.session() as session:
        assert incidents.find(session, incident_id)[0].severity == "info"
        assert session.scalars(select(Notification)).all() == []


def test_an_incident_of_an_older_version_is_diagnosed_too(database: Database) -> None:
    incident_id = fallen(database)
    with database.session() as session:
        incidents.find(session, incident_id)[0].diagnosis = None
    examine(database)
    assert verdict(database, incident_id) == ("unknown", "low")


def test_nothing_new_is_not_diagnosed_again(database: Database) -> None:
    incident_id = fallen(database)
    before = known(database, incident_id)
    refresh(database, NOW + timedelta(minutes=5))
    assert known(database, incident_id) == before


def test_an_incident_whose_diagnosis_takes_too_long_keeps_no_other_from_being_diagnosed_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest comes first."""
    ids = [add_incident(database, [], stream_id=add_stream(database, version)) for version in ("v1", "v2")]
    for incident_id in ids:
        examine(database)
        with database.session() as session:
            incident = incidents.find(session, incident_id)[0]
            incident.diagnosis = replace(known(database, incident_id), seen=SeenEvidence(0, 0, -1))
    made, slow = diagnosing.diagnosed, ids[-1]

    def diagnosed(session: Session, incident: Incident, *rest: Any) -> IncidentDiagnosis:
        if incident.id == slow:
            session.execute(text("SELECT pg_sleep(60)"))
        return made(session, incident, *rest)

    monkeypatch.setattr(diagnosing, "diagnosed", diagnosed)
    monkeypatch.setattr(diagnosing, "CHORE", Work("chore", 4.0, 2.0, 60.0))
    with pytest.raises(DatabaseTimeout):
        refresh(database, datetime.now(UTC))
    assert [known(database, one).seen.scores for one in ids] == [0, -1]


def test_the_detector_opens_incidents_with_a_diagnosis_and_the_api_shows_it(
    database: Database, tmp_path: Any
) -> None:
    traffic = Traffic(seed=1)
    capture(database, traffic.clock, (0, 300), 40, seed=1)
    store(database, traffic.draw(1500, GOOD))
    new = capture(database, traffic.clock + timedelta(seconds=30), (500, 800), 40, seed=2)
    store(database, traffic.draw(200, BAD))
    fold_and_examine(Pipeline(database, DetectorConfig(minimum_drop=0.1), Metrics()), database)
    with running_sidecar(database, tmp_path) as client:
        (incident,) = client.get("/api/v1/incidents").json()["incidents"]
        detail = client.get(f"/api/v1/incidents/{incident['id']}").json()
        page = client.get(f"/incidents/{incident['id']}").text
    assert incident["diagnosis"]["cause"] == "query_drift"
    assert incident["diagnosis"]["examples"] == []
    assert "one piece of evidence decides" in detail["diagnosis"]["confidence_means"]
    assert {fact["about"] for fact in detail["diagnosis"]["facts"]} >= {"mix", "queries"}
    shown = [UUID(example["record_id"]) for example in detail["diagnosis"]["examples"]]
    assert shown
    assert set(shown) <= set(new)
    assert all(500 <= token < 800 for token in detail["diagnosis"]["examples"][0]["prompt_token_ids"])
    assert "Likely cause: the traffic moved" in page
