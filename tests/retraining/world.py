"""A database in which the acceptance of one segment fell, and settings that lead to an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import NAMESPACE_OID, UUID, uuid4, uuid5

from driftguard.detection import Acceptance
from driftguard.records import AcceptanceRecord
from driftguard.records.documents.incident import (
    ChangedSegment,
    IncidentDiagnosis,
    IncidentEvidence,
    SeenEvidence,
)
from driftguard.records.documents.retraining_run import Comparison, Decision, GateRules, RunNumbers
from driftguard.retraining.ledger.incident_notes import begin_mitigation
from driftguard.settings import CaptureSettings, EngineSettings, RetrainingSettings, Settings
from driftguard.store import drafts, retrain_runs
from driftguard.store.captures import CapturedRequest, insert_captures
from driftguard.store.database import Database
from driftguard.store.incidents import find, open_incident, transitions
from driftguard.store.records import insert_batches
from driftguard.store.streams import StreamRegistry, all_streams
from driftguard.store.tables import Incident, RetrainRun

NEW, OLD = "german", "code"
MOVED = IncidentDiagnosis(  # what the examination of the incident found
    cause="query_drift",
    confidence="medium",
    summary="the traffic moved",
    reason="acceptance fell inside segments",
    facts=(),
    missing=(),
    recommended_action="retrain the draft on the new traffic",
    retrain=True,
    awaits_probes=False,
    diagnosed_at=datetime(2026, 1, 1, tzinfo=UTC),
    seen=SeenEvidence(probes=0, captures=0),
)
BETTER = Decision(  # the gate's decision on a candidate that passes
    promote=True,
    reason="better",
    gain=Comparison("changed traffic", True, 40, 0.4, 0.7, 0.3, 0.2, 0.4),
    groups=(),
    untested=(),
    seconds_per_token={},
    rules=GateRules(0.02, 0.05),
)
BEFORE, AFTER = 0.77, 0.41


@dataclass(frozen=True, slots=True)
class Models:
    """Directories of a tiny target and a draft that knows little of it, and traffic of the target."""

    target: Path
    draft: Path
    new_traffic: Path
    old_traffic: Path


def make_settings(data_dir: Path, engine_url: str, **retraining: object) -> Settings:
    """Small runs: the models learn within a few steps."""
    rules = {
        "minimum_requests": 128,
        "aim_requests": 128,
        "steps": 60,
        "threads": 1,
        "maximum_regression": 0.05,
        **retraining,
    }
    return Settings(
        data_dir=data_dir,
        engines=[EngineSettings(server="engine-1", admin_url=engine_url)],
        capture=CaptureSettings(enabled=True),
        retraining=RetrainingSettings.model_validate(rules),
    )


def requests_of(path: Path) -> list[tuple[list[int], list[int]]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["prompt_token_ids"], line["output_token_ids"]) for line in lines]


def capture(
    database: Database,
    version: str,
    segment: str,
    requests: Sequence[tuple[list[int], list[int]]],
    at: datetime,
) -> None:
    """Stores these requests as captured, a millisecond apart. Fixed ids give a fixed split."""
    captured = [
        CapturedRequest(
            record_id=uuid5(NAMESPACE_OID, f"{segment}-{number}"),
            server="engine-1",
            target="target",
            draft_version=version,
            captured_at=at + timedelta(milliseconds=number),
            prompt_token_ids=prompt,
            output_token_ids=output,
            segment=segment,
        )
        for number, (prompt, output) in enumerate(requests)
    ]
    with database.session() as session:
        assert insert_captures(session, captured, max_per_segment=4_000) == len(captured)


def record(version: str, segment: str, rate: float, at: datetime) -> AcceptanceRecord:
    accepted = round(80 * rate)
    return AcceptanceRecord(
        record_id=uuid4(),
        kind="request",
        started_at=at - timedelta(seconds=1),
        ended_at=at,
        server="engine-1",
        target="target",
        draft="draft",
        draft_version=version,
        method="draft_model",
        steps=20,
        drafted=80,
        accepted=accepted,
        emitted=accepted + 20,
        fidelity="request",
        segment=segment,
        temperature=1.0,
    )


def store(database: Database, records: Sequence[AcceptanceRecord]) -> None:
    with database.session() as session:
        insert_batches(session, [records], StreamRegistry(), datetime.now(UTC))


def rates(level: float, count: int) -> list[float]:
    """Requests that differ, with exactly this mean."""
    return [level + (0.1 if number % 2 else -0.1) for number in range(count)]


def acceptance(rate: float) -> Acceptance:
    return Acceptance(rate, rate - 0.02, rate + 0.02, 60)


def drift(database: Database, version: str, changed_at: datetime) -> UUID:
    """Records before and after a fall of the new segment, and its incident; returns the incident's id."""
    before = [record(version, OLD, rate, changed_at - timedelta(minutes=1)) for rate in rates(BEFORE, 60)]
    before += [record(version, NEW, rate, changed_at - timedelta(minutes=1)) for rate in rates(BEFORE, 60)]
    after = [record(version, NEW, rate, changed_at + timedelta(seconds=1)) for rate in rates(AFTER, 60)]
    store(database, before + after)
    with database.session() as session:
        stream = next(row for row in all_streams(session) if row.draft_version == version)
        incident = Incident(
            id=uuid4(),
            stream_id=stream.id,
            direction="down",
            state="open",
            severity="critical",
            opened_at=changed_at + timedelta(seconds=2),
            opened_seq=180,
            change_point_seq=121,
            change_point_at=changed_at,
            interval_start_at=changed_at,
            interval_end_at=changed_at,
            acceptance_before=BEFORE,
            acceptance_after=AFTER,
            segments=(ChangedSegment(NEW, acceptance(BEFORE), acceptance(AFTER), evidence=1e6),),
            evidence=IncidentEvidence(),
            diagnosis=MOVED,
        )
        open_incident(session, incident, "acceptance fell")
        return incident.id


def trained(
    database: Database, incident_id: UUID, parent: str, candidate: str, directory: str, state: str
) -> RetrainRun:
    """A run for the incident, which it sets to mitigating: it made `candidate` from `parent`."""
    now = datetime.now(UTC)
    run = RetrainRun(
        id=uuid4(),
        server="engine-1",
        target="target",
        incident_id=incident_id,
        trigger="incident",
        state=state,
        started_at=now,
        parent_version=parent,
        candidate_version=candidate,
        numbers=RunNumbers(gate=BETTER),
    )
    with database.session() as session:
        retrain_runs.begin(session, run)
        drafts.add_candidate(
            session,
            server="engine-1",
            target="target",
            version=candidate,
            method="draft_model",
            directory=directory,
            parent_version=parent,
            run_id=run.id,
            at=now,
        )
        begin_mitigation(session, incident_id, "retraining", now)
    return run


def incident_states(database: Database, incident_id: UUID) -> list[str]:
    with database.session() as session:
        return [row.to_state for row in transitions(session, incident_id)]


def incident_of(database: Database, incident_id: UUID) -> Incident:
    with database.session() as session:
        return find(session, incident_id)[0]
