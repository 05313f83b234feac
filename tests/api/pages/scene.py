"""A fleet as an operator meets it at night, made by the real pipeline from records.

One stream is degraded while a new draft is trained, one steady, one learning, one replaced, one scraped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import msgspec
import numpy as np
from sqlalchemy import delete

from driftguard.app import Sidecar, create_app
from driftguard.incidents import cost_measurement
from driftguard.incidents.opening import NOBODY
from driftguard.records import AcceptanceRecord
from driftguard.records.documents.retraining_run import (
    Costs,
    GateRules,
    OldLevel,
    RequestCounts,
    RunNumbers,
    TrainingCurve,
)
from driftguard.records.probe_session import session_of
from driftguard.retraining.ledger import incident_notes
from driftguard.retraining.promotion import watch
from driftguard.retraining.training.gate import DraftScores, GroupScores, decide
from driftguard.settings import Settings
from driftguard.store import drafts, retrain_runs, sources
from driftguard.store.database import Database
from driftguard.store.sources import SourceState
from driftguard.store.tables import RetrainRun, StreamCost
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import serving
from tests.cost.traffic import Server, told
from tests.pipeline.sidecar import post
from tests.retraining.curves import curve_of

SEED = 7
TARGET = "Qwen3-32B"
GOOD = Server(a=0.020, b=0.003, accepts=(0.92, 0.9, 0.88, 0.86))
FAIR = Server(a=0.020, b=0.003, accepts=(0.86, 0.84, 0.82, 0.8))
BAD = Server(a=0.020, b=0.003, accepts=(0.55, 0.45, 0.4, 0.4))
AWAY = "http://127.0.0.1:9"  # of an engine that does not answer

Segments = Mapping[str, Server]


@dataclass(frozen=True, slots=True)
class Scene:
    client: httpx.Client
    database: Database
    incident_id: UUID
    streams: Mapping[str, int]  # server -> id of its stream in service
    running_id: UUID
    done_id: UUID


@contextmanager
def fleet(database: Database, data_dir: Path, alerting: Mapping[str, str] | None = None) -> Iterator[Scene]:
    """On loopback. The engine of chat-eu-1 does not answer, and another training holds its lock."""
    now = datetime.now(UTC)
    chosen = settings(data_dir, alerting=alerting)
    with (
        retrain_runs.try_lock(database, "chat-eu-1", TARGET),
        serving(create_app(Sidecar(chosen, database, "http://sidecar"))) as client,
    ):
        done_id = _promotion(database, now)  # first, so that all records of its draft are watched
        _send_traffic(client, now)
        with database.session() as session:
            sources.store(session, _sources(now))
        incident_id = _the_incident(client)
        # It may have opened before its last requests were stored; its cost is measured again with them.
        with database.session() as session:
            session.execute(delete(StreamCost))
        cost_measurement.refresh(database, NOBODY, datetime.now(UTC))
        running_id = _running(database, incident_id, now)
        streams = {
            item["server"]: item["id"]
            for item in client.get("/api/v1/status").json()["streams"]
            if item["in_service"] and item["method"] != "none"
        }
        yield Scene(client, database, incident_id, streams, running_id, done_id)


def settings(data_dir: Path, host: str = "127.0.0.1", alerting: Mapping[str, str] | None = None) -> Settings:
    return Settings.model_validate(
        {
            "data_dir": data_dir,
            "host": host,
            "alerting": alerting or {},
            "detection": {"minimum_drop": 0.1},
            "engines": [{"server": "chat-eu-1", "admin_url": AWAY}, {"server": "chat", "admin_url": AWAY}],
            "retraining": {"automatic": False},
        }
    )


def _send_traffic(client: httpx.Client, now: datetime) -> None:
    rng = np.random.default_rng(SEED)
    both, fallen = {"code": GOOD, "german": FAIR}, {"code": GOOD, "german": BAD}
    hour, fall = now - timedelta(minutes=58), now - timedelta(minutes=12)
    post(client, _requests(rng, "chat-eu-1", both, (hour, fall), 900))
    probes = _probes(rng, fall - timedelta(minutes=5))
    post(client, probes)
    post(client, _requests(rng, "chat-eu-1", fallen, (fall, now), 260))
    post(client, [_again(item, now) for item in probes])
    of_any_k = _requests(rng, "chat-us-1", both, (hour, now), 700)  # judged by the first draft token
    post(client, [_without_k(item) for item in of_any_k])
    young = (now - timedelta(minutes=6), now)
    post(client, _requests(rng, "search-1", {"default": FAIR}, young, 60, version="3f" * 32))  # a sha256
    post(client, _requests(rng, "batch-1", {"summaries": BAD}, (hour, now - timedelta(minutes=20)), 400))
    after = (now - timedelta(minutes=20), now)
    post(client, _requests(rng, "batch-1", {"summaries": FAIR}, after, 120, version="v2"))
    windows = _requests(rng, "vllm-eu-2", {"default": FAIR}, (hour, now), 500)
    post(client, [msgspec.structs.replace(item, kind="window", fidelity="counter") for item in windows])


def _requests(
    rng: np.random.Generator,
    name: str,
    segments: Segments,
    between: tuple[datetime, datetime],
    count: int,
    version: str = "v1",
) -> list[AcceptanceRecord]:
    """Evenly spread; on chat-eu-1 some with K = 2 and some without speculation, so that its cost is told."""
    start, end = between
    found = []
    for number in range(count):
        at = start + (end - start) * (number + 1) / count
        segment = list(segments)[number % len(segments)]
        k = {7: 2, 16: 0}.get(number % 25, 4) if name == "chat-eu-1" else 4
        (drawn,) = segments[segment].serve(rng, 1, k, segment=segment, start=at.timestamp())
        draft = "Qwen3-0.6B" if k else "none"
        values = {**told(drawn), "ended_at": at, "started_at": at - timedelta(seconds=2)}
        found.append(
            AcceptanceRecord(
                record_id=UUID(bytes=rng.bytes(16)),
                kind="request",
                server=name,
                target=TARGET,
                draft=draft,
                draft_version=version if k else "none",
                method="draft_model" if k else "none",
                fidelity="request",
                **values,
            )
        )
    return found


def _without_k(item: AcceptanceRecord) -> AcceptanceRecord:
    drafted = [item.steps] * 4
    return msgspec.structs.replace(item, num_speculative_tokens=None, drafted_per_position=drafted)


def _probes(rng: np.random.Generator, at: datetime) -> list[AcceptanceRecord]:
    """One replay of twelve canary prompts."""
    drawn = _requests(rng, "chat-eu-1", {"default": GOOD}, (at - timedelta(seconds=6), at), 6)
    return [
        msgspec.structs.replace(
            drawn[number % 6],
            record_id=uuid4(),
            kind="probe",
            session=session_of(f"prompt{number}", "answer"),
        )
        for number in range(12)
    ]


def _again(probe: AcceptanceRecord, at: datetime) -> AcceptanceRecord:
    """The same answer in as many steps: the machine is as it was."""
    return msgspec.structs.replace(
        probe, record_id=uuid4(), started_at=at - timedelta(seconds=2), ended_at=at
    )


def _the_incident(client: httpx.Client) -> UUID:
    def found() -> list[dict[str, Any]]:
        return list(client.get("/api/v1/incidents?state=unresolved").json()["incidents"])

    def ready() -> bool:
        status = client.get("/api/v1/status").json()
        measured = [item["cost"] for item in status["streams"] if item["server"] == "chat-eu-1"]
        diagnoses = [incident["diagnosis"] for incident in found()]  # null until it is examined
        diagnosed = any(diagnosis and not diagnosis["awaits_probes"] for diagnosis in diagnoses)
        return status["unfolded_records"] == 0 and diagnosed and any(measured)

    wait_until(ready, "the incident, its diagnosis and the cost")
    (incident,) = found()
    return UUID(incident["id"])


def _promotion(database: Database, now: datetime) -> UUID:
    """batch-1 was retrained by the nightly job, and its new draft is being watched."""
    rng = np.random.default_rng(SEED)
    run = RetrainRun(
        id=uuid4(),
        server="batch-1",
        target=TARGET,
        trigger="nightly",
        state="watching",
        started_at=now - timedelta(minutes=32),
        parent_version="v1",
        candidate_version="v2",
        reason="",
        numbers=_numbers(rng),
    )
    run.reason = run.numbers.gate.reason if run.numbers and run.numbers.gate else None
    directory, place = "/drafts", {"server": "batch-1", "target": TARGET}
    first, promoted_at = now - timedelta(hours=20), now - timedelta(minutes=20)
    in_service = {**place, "method": "draft_model", "directory": directory}
    with database.session() as session:
        drafts.put_in_service(session, **in_service, version="v1", name="v1", at=first)  # type: ignore[arg-type]
        retrain_runs.begin(session, run)
        drafts.add_candidate(
            session,
            **place,
            version="v2",
            method="draft_model",
            directory=directory,
            parent_version="v1",
            run_id=run.id,
            at=promoted_at - timedelta(minutes=1),
        )
        drafts.put_in_service(session, **in_service, version="v2", name="v2", at=promoted_at)  # type: ignore[arg-type]
    return run.id


def _numbers(rng: np.random.Generator) -> RunNumbers:
    """What the gate and the watch store, decided by them."""
    groups = [
        _scores(rng, "changed:summaries", changed=True, before=0.30, after=0.62),
        _scores(rng, "older:letters", changed=False, before=0.64, after=0.65),
    ]
    decision = decide(groups, Costs(4, 0.020, 0.003, 0.003), GateRules(0.02, 0.05))
    levels = [OldLevel("summaries", changed=True, requests=400, mean=0.3, variance=0.02, standard_error=0.01)]
    watched = watch.fold(watch.start(levels, 0.05, ()), [("summaries", 100, 55 + n % 9) for n in range(60)])
    return RunNumbers(
        requests=RequestCounts(512, 171, 128),
        costs=Costs(4, 0.020, 0.003, 0.003),
        gate=decision,
        watch=watched,
    )


def _scores(
    rng: np.random.Generator, group: str, *, changed: bool, before: float, after: float
) -> GroupScores:
    old, new = (rng.normal(level, 0.08, 64).clip(0, 1) for level in (before, after))
    drafts = [
        DraftScores(kept.tolist(), [100.0] * 64, (95.0 * kept).tolist(), 1_600.0) for kept in (old, new)
    ]
    return GroupScores(group, changed, 6_400, *drafts)


def _running(database: Database, incident_id: UUID, now: datetime) -> UUID:
    run = RetrainRun(
        id=uuid4(),
        server="chat-eu-1",
        target=TARGET,
        incident_id=incident_id,
        trigger="incident",
        state="training",
        started_at=now - timedelta(minutes=2),
        parent_version="v1",
        progress={"step": 430, "steps": 1000, "loss": 0.912, "acceptance": 0.587},
    )
    rejected = RetrainRun(
        id=uuid4(),
        server="chat-us-1",
        target=TARGET,
        trigger="nightly",
        state="rejected",
        started_at=now - timedelta(hours=6),
        ended_at=now - timedelta(hours=6) + timedelta(minutes=7),
        parent_version="v1",
        candidate_version="v1b",
        reason="acceptance on the changed traffic went from 0.718 to 0.722; at least +0.020 is needed",
    )
    with database.session() as session:
        retrain_runs.begin(session, run)
        assert run.progress
        retrain_runs.set_progress(session, run.id, run.progress, running_curve(430, now))
        retrain_runs.begin(session, rejected)
        incident_notes.begin_mitigation(session, incident_id, "retraining on 512 captured requests", now)
    return run.id


def running_curve(step: int, now: datetime) -> TrainingCurve:
    """Of the run that is under way, at this step of 1000."""
    losses = [(one, 0.8 + 1.2 * math.exp(-one / 150)) for one in range(10, step + 1, 10)]
    kept = [(one, 0.6 - 0.3 * math.exp(-one / 200)) for one in range(0, step + 1, 100)]
    return curve_of(losses, kept, now)


def _sources(now: datetime) -> Sequence[SourceState]:
    def source(server: str, **more: Any) -> SourceState:
        values: dict[str, Any] = {
            "kind": "vllm",
            "url": f"http://{server}:8000/metrics",
            "fidelity": "counter",
            "condition": "reporting",
            "detail": "",
            "since": now - timedelta(hours=3),
            "scraped_at": now,
            "answered_at": now,
            "interval_seconds": 15.0,
        }
        return SourceState(server=server, **{**values, **more})

    gone = "connection refused; is the server running, and is this its address?"
    lost = {"condition": "unreachable", "detail": gone, "answered_at": now - timedelta(minutes=9)}
    return [source("vllm-eu-2"), source("vllm-eu-3", **lost)]
